// Block-wise quantisation to 8 or 4 bits; kernels/format.py lays the bytes out. Compiled once per instruction set, as
// namespace INSTRUCTION_SET.
//
// The arithmetic is that of kernels/quantize_torch.py, operation by operation, so finite values give the same bits.
#include "quantize.h"

#include <algorithm>

#include "numbers.h"

namespace INSTRUCTION_SET {
namespace {

constexpr float LEAST_SCALE = 0x1p-126f;
constexpr int32_t ZERO_OF_4_BITS = 8;
constexpr int64_t PIECE = 512;  // values worked on together; the first-level cache holds them several times

// Rounds to the nearest, ties to even, and converts: where 1 is the last digit of a float, adding does both.
constexpr float ROUNDER = 0x1.8p23f;

inline int32_t nearest(float value) { return int32_t(as_bits(value + ROUNDER) - as_bits(ROUNDER)); }

// Of absolute values, whose bits are ordered as they are, nan above inf.
template <class V> float largest(const V *values, int64_t numel) {
    uint32_t found = 0;
    for (int64_t i = 0; i < numel; i++) found = std::max(found, as_bits(widen(values[i])) & 0x7fffffffu);
    return as_float(found);
}

template <class V> void write_codes_8(const V *values, int64_t numel, float inverse, uint8_t *codes) {
    for (int64_t i = 0; i < numel; i++) codes[i] = uint8_t(nearest(widen(values[i]) * inverse));
}

template <class V> void write_codes_4(const V *values, int64_t numel, float inverse, uint8_t *codes) {
    for (int64_t start = 0; start < numel; start += PIECE) {
        const int64_t length = std::min(PIECE, numel - start);
        uint8_t each[PIECE];
        for (int64_t i = 0; i < length; i++)
            each[i] = uint8_t(nearest(widen(values[start + i]) * inverse) + ZERO_OF_4_BITS) & 15;
        if (length % 2) each[length] = ZERO_OF_4_BITS;
        for (int64_t i = 0; i < (length + 1) / 2; i++)
            codes[start / 2 + i] = uint8_t(each[2 * i] | (each[2 * i + 1] << 4));
    }
}

template <class V, int bits>
void quantize_blocks(const Blocks &form, const void *values, uint8_t *codes, float *scales, int64_t begin,
                     int64_t end) {
    for (int64_t block = begin; block < end; block++) {
        const int64_t first = block * form.block, numel = std::min(form.block, form.numel - first);
        const V *row = static_cast<const V *>(values) + first;
        const float quotient = largest(row, numel) / float((1 << (bits - 1)) - 1);
        const float scale = quotient < LEAST_SCALE ? LEAST_SCALE : quotient;  // a nan stays
        scales[block] = scale;
        if (bits == 8) write_codes_8(row, numel, 1.0f / scale, codes + first);
        else write_codes_4(row, numel, 1.0f / scale, codes + first / 2);
    }
}

template <int bits, bool is_first>
void add_piece(const uint8_t *codes, int64_t numel, float scale, float *sums) {
    if (bits == 8) {
        const int8_t *each = reinterpret_cast<const int8_t *>(codes);
        for (int64_t i = 0; i < numel; i++) sums[i] = (is_first ? 0.0f : sums[i]) + float(each[i]) * scale;
        return;
    }
    int8_t each[PIECE];
    for (int64_t i = 0; i < (numel + 1) / 2; i++) {
        each[2 * i] = int8_t((codes[i] & 15) - ZERO_OF_4_BITS);
        each[2 * i + 1] = int8_t((codes[i] >> 4) - ZERO_OF_4_BITS);
    }
    for (int64_t i = 0; i < numel; i++) sums[i] = (is_first ? 0.0f : sums[i]) + float(each[i]) * scale;
}

template <class V, int bits>
void sum_blocks(const Blocks &form, const Message *messages, int64_t count, void *out, int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; block++) {
        const int64_t last = std::min((block + 1) * form.block, form.numel);
        for (int64_t first = block * form.block; first < last; first += PIECE) {
            const int64_t numel = std::min(PIECE, last - first), at = first * bits / 8;
            float sums[PIECE];
            add_piece<bits, true>(messages[0].codes + at, numel, messages[0].scales[block], sums);
            for (int64_t k = 1; k < count; k++)
                add_piece<bits, false>(messages[k].codes + at, numel, messages[k].scales[block], sums);
            V *row = static_cast<V *>(out) + first;
            for (int64_t i = 0; i < numel; i++) narrow(sums[i], row[i]);
        }
    }
}

}  // namespace

QuantizeBlocks find_quantize_function(const Blocks &form) {
    const bool is_wide = form.bits == 8;
    switch (form.values) {
        case float32: return is_wide ? quantize_blocks<float, 8> : quantize_blocks<float, 4>;
        case bfloat16: return is_wide ? quantize_blocks<BFloat16, 8> : quantize_blocks<BFloat16, 4>;
        case float16: return is_wide ? quantize_blocks<Float16, 8> : quantize_blocks<Float16, 4>;
        case none: break;
    }
    return nullptr;
}

SumBlocks find_sum_function(const Blocks &form) {
    const bool is_wide = form.bits == 8;
    switch (form.values) {
        case float32: return is_wide ? sum_blocks<float, 8> : sum_blocks<float, 4>;
        case bfloat16: return is_wide ? sum_blocks<BFloat16, 8> : sum_blocks<BFloat16, 4>;
        case float16: return is_wide ? sum_blocks<Float16, 8> : sum_blocks<Float16, 4>;
        case none: break;
    }
    return nullptr;
}

}  // namespace INSTRUCTION_SET
