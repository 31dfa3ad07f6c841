// Whether a call runs as int8 slices (gemm_int8_slices.h), and with how many digits.
#pragma once

#include "variants/gemm_pack_activations.h"

namespace bitline::BITLINE_ISA {
namespace {

// A table of 16 values as small integers times a unit; false where it has none.
bool table_as_integers(const float* lut, SlicedCall& s) {
  for (float unit = 1; unit >= 0.5f; unit /= 2) {
    float low = lut[0], high = lut[0];
    bool whole = true;
    for (int i = 0; i < 16; ++i) {
      whole &= __builtin_rintf(lut[i] / unit) * unit == lut[i];
      low = lut[i] < low ? lut[i] : low, high = lut[i] > high ? lut[i] : high;
    }
    if (!whole || high - low > kMaxTableCode * unit) continue;
    for (int i = 0; i < 16; ++i) s.table[i] = uint8_t((lut[i] - low) / unit);
    s.code_zero = int32_t(-low / unit), s.code_unit = unit;
    return true;
  }
  return false;
}

// Whether W's codes are integers that the slices' kernels multiply.
bool codes_as_integers(const GemmCall& c, SlicedCall& s) {
  const PackedHeader& w = *c.w;
  s.code_zero = int32_t(w.implicit_zero) - code_bias(int(w.bits)), s.code_unit = 1;
  return w.is_integer || (w.bits == 4 && table_as_integers(reinterpret_cast<const float*>(c.base + w.lut_f32), s));
}

// Digits of x: 14 bits and the sign below the largest element of a group for bfloat16, of which codes of 8 bits take three, 22
// bits for float16, 30 for float32. int8 activations are one digit, or two where digits have 7 bits.
int slice_count(const GemmCall& c, bool int8) {
  const bool short_digits = slice_bits(int(c.w->bits)) < 8;
  if (int8) return short_digits ? 2 : 1;
  if (c.w->act_quant != kActNone || c.dtype == kFloat16) return 3;
  return c.dtype == kFloat32 ? 4 : short_digits ? 3 : 2;
}

// max_m: rows of a call of a weight-only layer, up to which it runs as slices.
bool plan_slices(GemmCall& c, int64_t max_m) {
  const PackedHeader& w = *c.w;
  // Without a wide dot product 8-bit codes take two digits: from some M on float32 panels are faster.
  const bool int8 = has_int8_activations(w) && (kWideDot || w.bits == 4 || c.m <= 16);
  if (w.batch_invariant || (!int8 && c.m > max_m) || !codes_as_integers(c, c.slices)) return false;
  if (!int8 && w.act_quant == kActNone && !has_fixed_point_range(c.x, c.m * w.k, c.dtype)) return false;
  c.slices.count = slice_count(c, int8), c.slices.x_is_int8 = int8, c.slices.max_tile_m = kMaxTileM;
  c.strategy = kInt8Slices, c.row_int32 = w.k_packed / 4 * c.slices.count;
  return true;
}

}  // namespace
}  // namespace bitline::BITLINE_ISA
