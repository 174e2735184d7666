// What one compilation of update.cpp offers.
#pragma once

#include "fullspeed.h"

// Updates elements [begin, end) of a tensor.
using RangeFunction = void (*)(const Update &how, const Tensor &tensor, int64_t begin, int64_t end);

// The function for these dtypes; null without one. x86 has the latter two, others what their compiler assumes.
namespace baseline {
RangeFunction find_range_function(const Update &how);
}
namespace avx2 {
RangeFunction find_range_function(const Update &how);
}
namespace avx512 {
RangeFunction find_range_function(const Update &how);
}
