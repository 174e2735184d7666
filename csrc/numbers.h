// 16-bit numbers: to fp32 and back, in integer arithmetic that vectorises. For sources that are compiled once per
// instruction set: everything here is theirs alone.
#pragma once

#include <cstdint>
#include <cstring>

namespace INSTRUCTION_SET {
namespace {

struct BFloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};

inline float as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline uint32_t as_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

inline float widen(float value) { return value; }

inline float widen(BFloat16 value) { return as_float(uint32_t(value.bits) << 16); }

// The exponent's bias is changed by a multiplication, which also makes subnormals normal.
inline float widen(Float16 value) {
    const uint32_t magnitude = uint32_t(value.bits & 0x7fff) << 13;
    const float scaled = as_float(magnitude) * 0x1p112f;
    const uint32_t special = as_bits(scaled) | 0x7f800000u;  // inf and nan keep their fraction
    const uint32_t sign = uint32_t(value.bits & 0x8000) << 16;
    return as_float((magnitude >= 0x0f800000u ? special : as_bits(scaled)) | sign);
}

inline void narrow(float value, float &out) { out = value; }

// Both round to the nearest, ties to even, as torch does.
inline void narrow(float value, BFloat16 &out) {
    const uint32_t bits = as_bits(value);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    out.bits = uint16_t(is_nan ? 0x7fc0u : rounded);
}

inline void narrow(float value, Float16 &out) {
    const uint32_t bits = as_bits(value), magnitude = bits & 0x7fffffffu;
    // Normal: rebias, add what rounds. Subnormal: adding 0.5 makes the hardware round at fp16's smallest step.
    const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    const uint32_t subnormal = as_bits(as_float(magnitude) + 0.5f) - 0x3f000000u;
    const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
    const uint32_t rounded = magnitude >= 0x477ff000u ? special : finite;
    out.bits = uint16_t(rounded | ((bits >> 16) & 0x8000u));
}

}  // namespace
}  // namespace INSTRUCTION_SET
