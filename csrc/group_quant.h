// Activations that a scheme quantizes in groups of columns (block FP8, MX, NVFP4): the values that their codes stand for.
#pragma once

#include "gemm.h"

namespace bitline {

// Where a call's weight asks for it, points x to the values that the codes of x stand for, in x's dtype. Calls of the same x and
// scheme share them. They live until the thread's next call. Returns 0; -2: no memory.
int quantize_groups(GemmCall* calls, int64_t count);

struct GroupQuantKernels {
  // A row of w.k numbers, in float32, rounded once to the dtype: act_quant.py's fake_quantize.
  void (*fake_quantize_row)(const PackedHeader& w, const void* x, void* y, Dtype dtype);
};

BITLINE_AVX2(namespace avx2 { extern const GroupQuantKernels group_quant_kernels; })
BITLINE_NEON(namespace neon { extern const GroupQuantKernels group_quant_kernels; })

}  // namespace bitline
