// The scales and offsets of one N block and group, as a packed weight has them.
#pragma once

#include "gemm.h"
#ifdef BITLINE_ISA_avx512
#include "variants/gemm_avx512_dequant.h"
#else
#include "variants/gemm_f32_dequant.h"
#endif

namespace bitline::BITLINE_ISA {
namespace {

struct GroupScales {
  const PackedHeader& w;
  const uint8_t* base;
  int64_t first, super_first;
  INLINE GroupScales(const GemmCall& c, int64_t block, int64_t g) : w(*c.w), base(c.base) {
    first = (block * w.num_groups + g) * kBlockN, super_first = 0;
    if (!w.super_scales) return;
    const int64_t per = w.groups_per_super_scale;
    super_first = (block * ((w.num_groups + per - 1) / per) + g / per) * kBlockN;
  }
  // As float32, of a vector of rows from `lane` on. There are no offsets where w.offset_type is kNone.
  INLINE auto scale(int lane) const { return load_scales(base + w.scales, w.scale_type, first + lane, super(w.super_scales, lane)); }
  INLINE auto offset(int lane) const { return load_scales(base + w.offsets, w.offset_type, first + lane, super(w.super_offsets, lane)); }
  INLINE const float* super(int64_t section, int lane) const {
    return reinterpret_cast<const float*>(base + section) + super_first + lane;
  }
};

}  // namespace
}  // namespace bitline::BITLINE_ISA
