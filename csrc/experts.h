// The experts of a mixture-of-experts layer: two projections of packed weights with a gate between them, and the weighted sum of
// each token's experts.
#pragma once

#include "gemm.h"

namespace bitline {

enum Activation : int64_t { kSilu = 0, kGelu = 1, kGeluTanh = 2, kRelu = 3, kRelu2 = 4 };

// What lies between the projections. gated: h [2 n] is gate and up, a = activation(gate) * up; else h [n], a = activation(h). With
// limit > 0 the clamped SwiGLU: a = (up + 1) * gate * sigmoid(alpha * gate), gate <= limit, |up| <= limit.
struct Gate {
  Activation activation;
  bool gated;
  float alpha, limit;
};

// One call. Expert e's packed weights are at up + e * up_stride and down + e * down_stride, bytes; biases [num_experts, n] of its
// dtype, or null. Python fills it as an array of 64-bit integers in this order (kernels/cpu/native_experts.py).
struct ExpertsCall {
  const uint8_t* x;      // [tokens, k]
  uint8_t* y;            // [tokens, n]
  const int64_t* index;  // [tokens, top_k]; num_experts: none
  const float* weights;  // [tokens, top_k]
  uint8_t* results;      // [tokens * top_k, n], to write to
  const uint8_t *up, *up_bias, *down, *down_bias;
  int64_t up_stride, down_stride, tokens, top_k, num_experts, dtype, activation, gated;
};
static_assert(sizeof(ExpertsCall) == 17 * 8);

struct ExpertKernels {
  // a [n] of a row h, computed in float32 and rounded once.
  void (*gate)(const Gate& gate, const void* h, void* a, int64_t n, Dtype dtype);
  // y [n] = sum over j of weights[j] * results[rows[j]], in the order of j, in float32. rows[j] < 0: left out.
  void (*weighted_sum)(const void* results, const int64_t* rows, const float* weights, int64_t top_k, void* y, int64_t n, Dtype dtype);
};

BITLINE_AVX2(namespace avx2 { extern const ExpertKernels expert_kernels; })
BITLINE_NEON(namespace neon { extern const ExpertKernels expert_kernels; })

}  // namespace bitline

BITLINE_EXPORT int bitline_experts(const void* call, double alpha, double limit);
