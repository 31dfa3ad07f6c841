#include "routed_mlp.h"

#include "decode_step.h"
#include "gemm_calls.h"
#include "scratch.h"
#include "top_k.h"

namespace bitline {
namespace {

__thread Scratch route_scratch, mlp_scratch;

float rounded_to_bf16(float v) {
  const uint32_t bits = bits_of(v);
  return v != v ? v : from_bits((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000u);
}

bool fits(const LinearLayer& layer, int64_t n, int64_t k) {
  return layer.plain || has_shape(layer.weight, n, k);
}

// y [n] of x [k]. Returns as bitline_gemm.
int run_linear(const LinearLayer& layer, const uint16_t* x, uint16_t* y, int64_t n, int64_t k) {
  if (layer.plain) return bitline_gemv_bf16(x, static_cast<const uint16_t*>(layer.weight), y, n, k);
  return bitline_gemm(x, 1, layer.weight, layer.bias, y, kBFloat16);
}

// What lies between the parts of an MLP.
struct Buffers {
  int64_t* index;
  float* weights;
  uint16_t *results, *gate, *up, *activated, *shared;

  // Lays them out at `memory`, unless that is null. Returns their bytes.
  size_t place(uint8_t* memory, const RoutedMlp& mlp, int64_t hidden) {
    size_t bytes = 0;
    const auto take = [&](int64_t count, int64_t item) {
      uint8_t* at = memory == nullptr ? nullptr : memory + bytes;
      bytes += round_up(size_t(count * item));
      return at;
    };
    index = reinterpret_cast<int64_t*>(take(mlp.experts.top_k, 8));
    weights = reinterpret_cast<float*>(take(mlp.experts.top_k, 4));
    results = reinterpret_cast<uint16_t*>(take(mlp.experts.top_k * hidden, 2));
    gate = reinterpret_cast<uint16_t*>(take(mlp.shared_intermediate, 2));
    up = reinterpret_cast<uint16_t*>(take(mlp.shared_intermediate, 2));
    activated = reinterpret_cast<uint16_t*>(take(mlp.shared_intermediate, 2));
    shared = reinterpret_cast<uint16_t*>(take(hidden, 2));
    return bytes;
  }
};

// y += sigmoid(shared_router @ x) * the shared expert's result. Returns as bitline_gemm.
int add_shared_expert(const RoutedMlp& mlp, const Buffers& b, const uint16_t* x, uint16_t* y, int64_t hidden) {
  const DecodeKernels& kernels = decode_kernels();
  const int64_t intermediate = mlp.shared_intermediate;
  uint16_t gate;
  if (const int failed = run_linear(mlp.shared_gate, x, b.gate, intermediate, hidden)) return failed;
  if (const int failed = run_linear(mlp.shared_up, x, b.up, intermediate, hidden)) return failed;
  kernels.silu_and_mul(b.gate, b.up, b.activated, intermediate);
  if (const int failed = run_linear(mlp.shared_down, b.activated, b.shared, hidden, intermediate)) return failed;
  if (const int failed = bitline_gemv_bf16(x, mlp.shared_router, &gate, 1, hidden)) return failed;
  kernels.add_gated(y, gate, b.shared, y, hidden);
  return 0;
}

}  // namespace

bool has_routed_shapes(const RoutedMlp& mlp, int64_t hidden) {
  const ExpertsCall& l = mlp.experts;
  const PackedHeader &up = *reinterpret_cast<const PackedHeader*>(l.up), &down = *reinterpret_cast<const PackedHeader*>(l.down);
  if (l.tokens != 1 || l.dtype != kBFloat16 || l.top_k < 1 || l.top_k > l.num_experts) return false;
  if (up.magic != kPackedMagic || down.magic != kPackedMagic || up.k != hidden || down.n != hidden) return false;
  const int64_t intermediate = mlp.shared_intermediate;
  return mlp.shared_router == nullptr ||
         (fits(mlp.shared_gate, intermediate, hidden) && fits(mlp.shared_up, intermediate, hidden) &&
          fits(mlp.shared_down, hidden, intermediate));
}

int run_routed_mlp(const RoutedMlp& mlp, const uint16_t* x, uint16_t* y, int64_t hidden) {
  Buffers b;
  uint8_t* memory = static_cast<uint8_t*>(reserve(mlp_scratch, b.place(nullptr, mlp, hidden)));
  if (memory == nullptr) return -2;
  b.place(memory, mlp, hidden);
  ExpertsCall l = mlp.experts;
  if (const int failed = bitline_route(x, mlp.router, hidden, l.num_experts, l.top_k, int(mlp.renormalize), int(mlp.round_weights),
                                       b.index, b.weights))
    return failed;
  l.x = reinterpret_cast<const uint8_t*>(x), l.y = reinterpret_cast<uint8_t*>(y);
  l.index = b.index, l.weights = b.weights, l.results = reinterpret_cast<uint8_t*>(b.results);
  if (const int failed = bitline_experts(&l, mlp.alpha, mlp.limit)) return failed;
  return mlp.shared_router == nullptr ? 0 : add_shared_expert(mlp, b, x, y, hidden);
}

}  // namespace bitline

using namespace bitline;

// The top_k experts of one token x [hidden] in the order of their probability, softmax(bf16(router @ x)) in float32, and their weights:
// the probabilities, divided by their sum if `renormalize`, rounded to bfloat16 if `round_weights`. router [num_experts, hidden], x:
// bfloat16. Where a logit is NaN, all weights are. Returns 0; -2: no memory; -4: top_k is not in [1, num_experts].
BITLINE_EXPORT int bitline_route(const uint16_t* x, const uint16_t* router, int64_t hidden, int64_t num_experts, int64_t top_k,
                                 int renormalize, int round_weights, int64_t* index, float* weights) {
  if (top_k < 1 || top_k > num_experts) return -4;
  const size_t item = sizeof(Candidate) + sizeof(float) + sizeof(uint16_t);
  Candidate* candidates = static_cast<Candidate*>(reserve(route_scratch, size_t(num_experts) * item));
  if (candidates == nullptr) return -2;
  float* probabilities = reinterpret_cast<float*>(candidates + num_experts);
  uint16_t* logits = reinterpret_cast<uint16_t*>(probabilities + num_experts);
  if (const int failed = bitline_gemv_bf16(x, router, logits, num_experts, hidden)) return failed;
  decode_kernels().softmax(logits, probabilities, num_experts);
  for (int64_t e = 0; e < num_experts; ++e) candidates[e] = {probabilities[e], e};
  select_top_k(candidates, num_experts, top_k);
  float sum = 0;
  for (int64_t j = 0; j < top_k; ++j) sum += candidates[j].probability;
  for (int64_t j = 0; j < top_k; ++j) {
    const float weight = renormalize ? candidates[j].probability / sum : candidates[j].probability;
    index[j] = candidates[j].expert, weights[j] = round_weights ? rounded_to_bf16(weight) : weight;
  }
  return 0;
}
