// The gate between an expert's projections and the sum over experts, on vectors of float32.
#include "experts.h"

#include "variants/dtype_rows.h"
#include "variants/vector_math.h"

namespace bitline::BITLINE_ISA {
namespace {

// ---- activations ---------------------------------------------------------------------------------------------------------

INLINE F32 times_sigmoid(F32 v, F32 of) { return v / (1.0f + exponential(-of)); }

// v times the normal distribution's value at v; erfc of |v| / sqrt(2) by a Chebyshev fit with a relative error below 1.2e-7.
INLINE F32 gelu(F32 v) {
  const F32 z = F32(U32(v) & 0x7FFFFFFFu) * 0.70710678f, t = 1.0f / (1.0f + 0.5f * z);
  constexpr float fit[] = {0.17087277f, -0.82215223f, 1.48851587f, -1.13520398f, 0.27886807f,
                           -0.18628806f, 0.09678418f, 0.37409196f, 1.00002368f};
  F32 p = splat(fit[0]);
  for (int i = 1; i < 9; ++i) p = fma(p, t, splat(fit[i]));
  const F32 half_erfc = 0.5f * t * exponential(fma(-z, z, fma(p, t, splat(-1.26551223f))));
  return v * select(is_less(v, F32{}), half_erfc, 1.0f - half_erfc);
}

template <Activation A> INLINE F32 activate(F32 v) {
  if constexpr (A == kSilu) return times_sigmoid(v, v);
  if constexpr (A == kGelu) return gelu(v);
  if constexpr (A == kGeluTanh) return times_sigmoid(v, 1.5957691216f * (v + 0.044715f * v * v * v));  // (1 + tanh u) / 2 at 2 u
  const F32 positive = select(is_less(v, F32{}), F32{}, v);
  return A == kRelu ? positive : positive * positive;
}

// The clamped SwiGLU.
INLINE F32 clamped_swiglu(const Gate& g, F32 gate, F32 up) {
  const F32 limit = splat(g.limit);
  gate = select(is_less(limit, gate), limit, gate);
  up = select(is_less(limit, up), limit, select(is_less(up, -limit), -limit, up));
  return (up + 1.0f) * times_sigmoid(gate, g.alpha * gate);
}

// ---- rows ----------------------------------------------------------------------------------------------------------------

template <Dtype D, class F> void each_vector(const Gate& g, const void* h, void* a, int64_t n, const F& fn) {
  const void* up = static_cast<const uint8_t*>(h) + n * kItemBytes<D>;
  for (int64_t i = 0; i < n; i += kLanes) {
    const F32 gate = load_row<D>(h, i, n);
    store_row<D>(a, i, n, fn(gate, g.gated ? load_row<D>(up, i, n) : splat(1.0f)));
  }
}

template <Dtype D> void gate_of(const Gate& g, const void* h, void* a, int64_t n) {
  const auto plain = [&]<Activation A>() { each_vector<D>(g, h, a, n, [](F32 gate, F32 up) { return activate<A>(gate) * up; }); };
  if (g.gated && g.limit > 0)
    return each_vector<D>(g, h, a, n, [&](F32 gate, F32 up) { return clamped_swiglu(g, gate, up); });
  switch (g.activation) {
    case kSilu: return plain.template operator()<kSilu>();
    case kGelu: return plain.template operator()<kGelu>();
    case kGeluTanh: return plain.template operator()<kGeluTanh>();
    case kRelu: return plain.template operator()<kRelu>();
    default: return plain.template operator()<kRelu2>();
  }
}

void gate(const Gate& g, const void* h, void* a, int64_t n, Dtype dtype) {
  with_dtype(dtype, [&]<Dtype D>() { gate_of<D>(g, h, a, n); });
}

void weighted_sum(const void* results, const int64_t* rows, const float* weights, int64_t top_k, void* y, int64_t n, Dtype dtype) {
  with_dtype(dtype, [&]<Dtype D>() {
    const uint8_t* first = static_cast<const uint8_t*>(results);
    for (int64_t i = 0; i < n; i += kLanes) {
      F32 sum{};
      for (int64_t j = 0; j < top_k; ++j)
        if (rows[j] >= 0) sum += weights[j] * load_row<D>(first + rows[j] * n * kItemBytes<D>, i, n);
      store_row<D>(y, i, n, sum);
    }
  });
}

}  // namespace

extern const ExpertKernels expert_kernels = {gate, weighted_sum};

}  // namespace bitline::BITLINE_ISA
