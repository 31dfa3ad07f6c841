// Dequantization to float32 in registers, for the levels below AVX-512: codes of each bit width, and scales.
#pragma once

#include "gemm.h"
#include "variants/simd.h"

namespace bitline::BITLINE_ISA {
namespace {

// Runs of a code's bits that one shift of one int32 of the K block brings into place. shift: to the right.
template <int BITS> struct CodeRuns {
  struct Run {
    int index, shift;
    uint32_t mask;
  };
  int count[k_block_of(BITS)], most;
  Run run[k_block_of(BITS)][BITS];
};
template <int BITS> constexpr CodeRuns<BITS> make_code_runs() {
  CodeRuns<BITS> all{};
  for (int k = 0; k < k_block_of(BITS); ++k) {
    for (int bit = 0; bit < BITS; ++bit) {
      const BitPosition at = bit_position(BITS, k, bit);
      int& count = all.count[k];
      const bool same = count > 0 && all.run[k][count - 1].index == at.index && all.run[k][count - 1].shift == at.bit - bit;
      if (!same) all.run[k][count++] = {at.index, at.bit - bit, 0};
      all.run[k][count - 1].mask |= 1u << bit;
    }
    if (all.count[k] > all.most) all.most = all.count[k];
  }
  return all;
}

// The codes of column k of a K block at p, rows from `lane` on. HALVES 0x10001: of columns k and k + 1, in 16 bits each.
template <int BITS, uint32_t HALVES = 1> INLINE U32 unpack_codes(const uint8_t* p, int lane, int k) {
  constexpr CodeRuns<BITS> runs = make_code_runs<BITS>();
  U32 code{};
  UNROLL for (int i = 0; i < runs.most; ++i) {
    if (i >= runs.count[k]) continue;
    const auto run = runs.run[k][i];
    const U32 v = load_u32(p + 4 * (kBlockN * run.index + lane));
    code |= (run.shift >= 0 ? v >> run.shift : v << -run.shift) & splat(run.mask * HALVES);
  }
  return code;
}

// How codes become float32: arithmetic for integers and E4M3, look-ups in registers for tables of 16, gathers for other tables.
enum CodeKind { kInteger, kTable, kE4M3 };

// Whether a weight's table is E4M3's.
bool is_e4m3(const GemmCall& c) {
  const float* lut = reinterpret_cast<const float*>(c.base + c.w->lut_f32);
  return c.w->bits == 8 && lut[1] == 0x1p-9f && lut[8] == 0x1p-6f && lut[0x7e] == 448 && lut[0xfe] == -448;
}

template <int BITS, CodeKind KIND> struct Dequantizer {
  const float* lut;
  Table16 table;
  F32 zero_point;
  U8 nan_codes{};  // kE4M3: bytes of all ones where one has been
  explicit Dequantizer(const GemmCall& c) : lut(reinterpret_cast<const float*>(c.base + c.w->lut_f32)) {
    zero_point = splat(float(c.w->implicit_zero));
    if constexpr (BITS <= 4) table = load_table16(lut);  // the section has 64 bytes at least
  }
  // Column k of a K block at p, rows from `lane` on.
  INLINE F32 operator()(const uint8_t* p, int lane, int k) {
    if constexpr (KIND == kE4M3) {
      const U32 v = load_u32(p + 4 * lane);
      if (k == 0) nan_codes |= U8((U8(v) & 0x7f) == 0x7f);
      // Exponent and mantissa at float32's bit positions are 2**-120 times the value. NaN codes become 480.
      const int bit = bit_position(8, k, 0).bit;
      return F32((I32(v << (24 - bit)) >> 4) & int32_t(0x87f00000)) * splat(0x1p120f);
    }
    const U32 code = unpack_codes<BITS>(p, lane, k);
    if constexpr (KIND == kInteger) return to_f32(I32(code)) - zero_point;
    if constexpr (BITS <= 4) return look_up(table, code);
    return gather(lut, code);
  }
  bool found_nan() const {
    uint32_t any = 0;
    for (int i = 0; i < kLanes; ++i) any |= U32(nan_codes)[i];
    return KIND == kE4M3 && any != 0;
  }
};

// kLanes scales or offsets from element i on as float32. super_scales: of the same rows, where the type has a second level.
INLINE F32 load_scales(const uint8_t* p, int64_t type, int64_t i, const float* super_scales) {
  switch (type) {
    case kF32: return load_f32(reinterpret_cast<const float*>(p) + i);
    case kBF16: return load_bf16(p + 2 * i);
    case kF16: return load_f16(p + 2 * i);
    case kU8: return to_f32(load_u8(p + i)) * load_f32(super_scales);
    case kI8: return to_f32(load_i8(p + i)) * load_f32(super_scales);
    case kZeroPoint: return to_f32(load_i8(p + i));
    default: {  // E4M3: its exponent and mantissa at float32's bit positions are 2**-120 times the value
      const I32 b = load_u8(p + i);
      return F32((b & 127) << 20 | (b & 128) << 24) * splat(0x1p120f) * load_f32(super_scales);
    }
  }
}

}  // namespace
}  // namespace bitline::BITLINE_ISA
