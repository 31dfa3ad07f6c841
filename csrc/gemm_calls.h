// Calls of the linear kernels that run together: one, or those of several weights in the same parallel loops, as the experts of a
// layer. Defined in gemm.cpp.
#pragma once

#include "gemm.h"

namespace bitline {

constexpr int64_t kMaxPassM = 1024;  // rows of calls that run together

// Those of the ISA level in use; null below AVX2.
const GemmKernels* gemm_kernels();

// What does not depend on x. Returns 0, or bitline_gemm's error.
int init_call(GemmCall& c, const GemmKernels* kernels, const void* packed, const void* bias, int dtype);

// Sets the one scale of all c.m rows of c.x, where the scheme has one.
void set_act_tensor_scale(const GemmKernels& kernels, GemmCall& c);

// Initialized calls, whose x [m, k], m, y and act_tensor_scale are set; m is 1 to kMaxPassM. Each result has bitline_gemm's bits.
// Returns 0; -2: no memory.
int run_calls(GemmCall* calls, int64_t count, const GemmKernels& kernels);

}  // namespace bitline
