// What one compilation of quantize.cpp offers.
#pragma once

#include "fullspeed.h"

// Writes codes and scales of blocks [begin, end) of one row of values.
using QuantizeBlocks = void (*)(const Blocks &form, const void *values, uint8_t *codes, float *scales, int64_t begin,
                                int64_t end);
// Sums `count` messages' values of blocks [begin, end) into `out`.
using SumBlocks = void (*)(const Blocks &form, const Message *messages, int64_t count, void *out, int64_t begin,
                           int64_t end);

#define FS_QUANTIZE_FUNCTIONS                                  \
    QuantizeBlocks find_quantize_function(const Blocks &form); \
    SumBlocks find_sum_function(const Blocks &form);

namespace baseline {
FS_QUANTIZE_FUNCTIONS
}
namespace avx2 {
FS_QUANTIZE_FUNCTIONS
}
namespace avx512 {
FS_QUANTIZE_FUNCTIONS
}
