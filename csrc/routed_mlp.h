// The MLP of a decoder layer with experts, for one token in bfloat16: a router chooses experts, whose results are summed with its
// weights, and some models add a shared expert.
#pragma once

#include "experts.h"

namespace bitline {

// y = W x + bias. plain: W is a bfloat16 matrix and there is no bias; else W is a packed weight, and bias may be null.
struct LinearLayer {
  const void* weight;
  const uint16_t* bias;
  int64_t plain;
};

// Python fills it (model/decoder_experts.py). renormalize: the weights of the chosen experts are divided by their sum. round_weights:
// and rounded to bfloat16. x, y, index, weights and results of `experts` are set for each token; alpha, limit: its gate's.
struct RoutedMlp {
  const uint16_t* router;  // [num_experts, hidden]
  int64_t renormalize, round_weights;
  ExpertsCall experts;
  double alpha, limit;
  const uint16_t* shared_router;  // [hidden]; null: no shared expert. Its result is multiplied by sigmoid(shared_router @ x).
  LinearLayer shared_gate, shared_up, shared_down;
  int64_t shared_intermediate;
};
static_assert(sizeof(RoutedMlp) == (3 + 17 + 2 + 1 + 9 + 1) * 8);

// Whether sizes and packed weights are those of vectors of `hidden` numbers.
bool has_routed_shapes(const RoutedMlp& mlp, int64_t hidden);

// y [hidden] of x [hidden], another vector, where has_routed_shapes. Returns as bitline_experts.
int run_routed_mlp(const RoutedMlp& mlp, const uint16_t* x, uint16_t* y, int64_t hidden);

}  // namespace bitline

BITLINE_EXPORT int bitline_route(const uint16_t* x, const uint16_t* router, int64_t hidden, int64_t num_experts, int64_t top_k,
                                 int renormalize, int round_weights, int64_t* index, float* weights);
