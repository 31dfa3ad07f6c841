// Functions of vectors of float32, in the compiler's vector arithmetic: the same bits for any number of lanes and ISA level.
#pragma once

#include <stdint.h>

namespace bitline::BITLINE_ISA {
namespace {

// Integers in the lanes of a vector F of float32.
template <class F> struct Lanes {
  typedef int32_t I32 __attribute__((vector_size(sizeof(F))));
  typedef uint32_t U32 __attribute__((vector_size(sizeof(F))));
};

// Masks by integer arithmetic: GCC 12 compares vectors wider than the level's registers one element at a time.
template <class F> inline auto is_nan(F f) {
  using L = Lanes<F>;
  return (typename L::I32)(0x7F800000u - ((typename L::U32)f & 0x7FFFFFFFu)) >> 31;
}
template <class F> inline auto is_less(F a, F b) {
  const F difference = a - b;
  return ((typename Lanes<F>::I32)difference >> 31) & ~is_nan(difference);
}

template <class F> inline F select(typename Lanes<F>::I32 mask, F yes, F no) {
  using I32 = typename Lanes<F>::I32;
  return (F)(((I32)yes & mask) | ((I32)no & ~mask));
}

// Round to bfloat16, to nearest even, as float32 bits; NaN stays NaN.
template <class F> inline auto bf16_bits(F f) {
  using U32 = typename Lanes<F>::U32;
  const U32 u = (U32)f;
  const U32 nearest = u + 0x7FFF + ((u >> 16) & 1);
  const U32 nan = (U32)is_nan(f);
  return ((nearest & ~nan) | ((u | 0x400000) & nan)) & 0xFFFF0000u;
}

// e^x = 2^n * e^r by the Taylor polynomial of degree 7, |r| <= log(2) / 2. Zero below -87, infinity above 88.7.
template <class F> inline F exponential(F x) {
  using I32 = typename Lanes<F>::I32;
  const F low = -87.0f - F{}, high = 88.7f - F{};
  const F clamped = select(is_less(x, low), low, select(is_less(high, x), high, x));
  const F magic = 12582912.0f - F{};  // 1.5 * 2^23: adding it rounds to an integer
  const F t = clamped * 1.44269504f + magic;
  const F n = t - magic;
  const F r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;  // Cody-Waite: log(2) in two parts, the first of 9 bits
  F p = r * (1.0f / 5040) + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const F power = (F)(((I32)t - (I32)magic + 127) << 23);
  const F y = select(is_less(high, x), __builtin_inff() - F{}, p * power);
  return select(is_less(x, low), F{}, y);
}

}  // namespace
}  // namespace bitline::BITLINE_ISA
