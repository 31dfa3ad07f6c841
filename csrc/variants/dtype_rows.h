// Rows of float32, float16 or bfloat16 numbers as vectors of float32.
#pragma once

#include "gemm.h"
#include "variants/simd.h"
#include "variants/vector_math.h"

namespace bitline::BITLINE_ISA {
namespace {

template <Dtype D> constexpr int64_t kItemBytes = D == kFloat32 ? 4 : 2;

template <Dtype D> INLINE F32 load_whole(const uint8_t* p) {
  if constexpr (D == kFloat32) return load_as<F32>(p);
  else if constexpr (D == kFloat16) return load_f16(p);
  else return load_bf16(p);
}
// Elements i to i + kLanes of a row, zeros behind its n elements.
template <Dtype D> INLINE F32 load_row(const void* row, int64_t i, int64_t n) {
  const uint8_t* p = static_cast<const uint8_t*>(row) + i * kItemBytes<D>;
  if (n - i >= kLanes) return load_whole<D>(p);
  uint8_t padded[kLanes * kItemBytes<D>] = {};
  memcpy(padded, p, size_t((n - i) * kItemBytes<D>));
  return load_whole<D>(padded);
}

template <Dtype D> INLINE void store_row(void* row, int64_t i, int64_t n, F32 v) {
  uint8_t* p = static_cast<uint8_t*>(row) + i * kItemBytes<D>;
  const auto store = [&](const auto& values) INLINE_LAMBDA {
    if (n - i >= kLanes) memcpy(p, &values, sizeof values);
    else memcpy(p, &values, size_t((n - i) * kItemBytes<D>));
  };
  if constexpr (D == kFloat32) store(v);
  else if constexpr (D == kBFloat16) store(high_halves(bf16_bits(v)));
  else store(f32_to_f16(v));
}

// fn.operator()<D>() for a dtype.
template <class F> void with_dtype(Dtype dtype, const F& fn) {
  switch (dtype) {
    case kFloat32: return fn.template operator()<kFloat32>();
    case kFloat16: return fn.template operator()<kFloat16>();
    default: return fn.template operator()<kBFloat16>();
  }
}

}  // namespace
}  // namespace bitline::BITLINE_ISA
