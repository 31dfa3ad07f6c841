// Quantization of x in groups of columns and back, on vectors of float32.
#include "group_quant.h"

#include "variants/dtype_rows.h"

namespace bitline::BITLINE_ISA {
namespace {

// A floating-point type of few bits, as its rounding needs it.
struct Minifloat {
  float max;
  int dropped;       // mantissa bits that float32 has more
  float min_normal;
  float magic;       // adding it to a number below min_normal rounds that to a multiple of the smallest subnormal
};
constexpr Minifloat minifloat(int mantissa_bits, float min_normal, float max) {
  return {max, 23 - mantissa_bits, min_normal, 0x1.8p23f * min_normal / float(1 << mantissa_bits)};
}
constexpr Minifloat kE4M3Type = minifloat(3, 0x1p-6f, 448);
constexpr Minifloat kUE5M3Type = minifloat(3, 0x1p-14f, 114688);

// Of the codes of x; kGroupInt8 has none.
Minifloat code_type(GroupQuant kind) {
  switch (kind) {
    case kGroupE4M3: return kE4M3Type;
    case kGroupE5M2: return minifloat(2, 0x1p-14f, 57344);
    case kGroupE2M1: return minifloat(1, 1, 6);
    case kGroupE2M3: return minifloat(3, 1, 7.5f);
    default: return minifloat(2, 0x1p-2f, 28);  // E3M2
  }
}

// To the nearest value, ties to even, saturating. NaN stays NaN. Magnitudes are compared as integers: one instruction each.
INLINE F32 round_to(const Minifloat& type, F32 v) {
  const U32 sign = U32(v) & 0x80000000u;
  const I32 given = I32(U32(v) ^ sign), most = I32(splat(type.max));
  const F32 a = F32(given > most ? most : given);
  const U32 b = U32(a), ulp = splat(uint32_t(1) << type.dropped);
  const U32 normal = (b + (ulp / 2 - 1) + ((b >> splat(uint32_t(type.dropped))) & 1)) & ~(ulp - 1);
  const I32 subnormal = I32((a + type.magic) - type.magic);
  const I32 rounded = I32(a) < I32(splat(type.min_normal)) ? subnormal : I32(normal);
  return F32(U32(given > 0x7F800000 ? given : rounded) | sign);
}
float round_to(const Minifloat& type, float v) { return round_to(type, splat(v))[0]; }

// To int8. NaN stays NaN.
INLINE F32 round_to_int8(F32 v) {
  v = select(is_less(splat(127.0f), v), splat(127.0f), select(is_less(v, splat(-128.0f)), splat(-128.0f), v));
  return (v + 0x1.8p23f) - 0x1.8p23f;
}

// 2^exponent for exponents from -127 on, the first of which is subnormal.
float power_of_two(int exponent) { return exponent == -127 ? 0x1p-127f : from_bits(uint32_t(exponent + 127) << 23); }

// The scale of a group whose largest absolute value is amax; max: of the codes.
float group_scale(const PackedHeader& w, float amax, float max) {
  switch (w.group_scale) {
    case kGroupE8M0Scale: {  // rounded up from 1.75 times a power of two on
      const uint32_t b = bits_of(amax);
      const int exponent = int(b >> 23) - int(bits_of(max) >> 23) + ((b & 0x7fffff) >= 0x600000);
      return amax > 0 ? power_of_two(exponent < -127 ? -127 : exponent > 127 ? 127 : exponent) : 1;
    }
    case kGroupE4M3Scale: {
      const float scale = round_to(kE4M3Type, amax * w.group_global_scale / max);
      return scale > 0 ? scale / w.group_global_scale : 1;
    }
    case kGroupE5M3Scale: {
      const float scale = round_to(kUE5M3Type, amax / max);
      return scale > 0 ? scale : 1;
    }
    default: {
      const float scale = (amax > w.act_limit ? w.act_limit : amax) / max, least = 0x1p-23f;
      return scale < least ? least : scale;
    }
  }
}

template <Dtype D> float largest_magnitude(const void* x, int64_t begin, int64_t end) {
  I32 most{};  // of bits: NaN is above infinity
  for (int64_t i = begin; i < end; i += kLanes) {
    const I32 v = I32(load_row<D>(x, i, end)) & 0x7FFFFFFF;
    most = v > most ? v : most;
  }
  return from_bits(uint32_t(max_lane(most)));
}

// encode: from a value in units of its group's scale to the code's.
template <Dtype D, class Encode>
void quantize_row(const PackedHeader& w, const void* x, void* y, float max, const Encode& encode) {
  for (int64_t begin = 0; begin < w.k; begin += w.group_quant_k) {
    const int64_t left = w.k - begin, end = begin + (left < w.group_quant_k ? left : w.group_quant_k);
    const F32 scale = splat(group_scale(w, largest_magnitude<D>(x, begin, end), max));
    for (int64_t i = begin; i < end; i += kLanes) store_row<D>(y, i, end, encode(load_row<D>(x, i, end) / scale) * scale);
  }
}

void fake_quantize_row(const PackedHeader& w, const void* x, void* y, Dtype dtype) {
  with_dtype(dtype, [&]<Dtype D>() {
    if (w.group_quant == kGroupInt8) return quantize_row<D>(w, x, y, 127.5f, [](F32 v) { return round_to_int8(v); });
    const Minifloat type = code_type(GroupQuant(w.group_quant));
    quantize_row<D>(w, x, y, type.max, [&](F32 v) { return round_to(type, v); });
  });
}

}  // namespace

extern const GroupQuantKernels group_quant_kernels = {fake_quantize_row};

}  // namespace bitline::BITLINE_ISA
