#include "gemm_avx512.h"
#include "gemm_prepare.h"

namespace bitline::BITLINE_LEVEL {

void gemm_bf16(const Call& c, int64_t first, int64_t last, uint32_t* panel, float* out);
void gemm_f32(const Call& c, int64_t first, int64_t last, uint32_t* panel, float* out);

namespace {

void blocks(const Call& c, int64_t first, int64_t last, uint32_t* panel, float* out) {
  if (c.mode == kBF16Mode) return gemm_bf16(c, first, last, panel, out);
  if (c.mode == kF32Mode) return gemm_f32(c, first, last, panel, out);
  if (c.w->width == 4) return run<ModeI8, 4>(c, first, last, panel, out);
  return run<ModeI8, 8>(c, first, last, panel, out);
}

bool has(Mode) { return true; }

// Decoding anew for each tile is free where the multiplier is what everything waits for. It is not for 8 bits, whose look-ups take
// its units (M=64: 2,507 us; panels 2,327), nor for groups of 16, and of 32 with offsets, whose sums are scaled every 8 or 16 words
// (NVFP4, M=64: 2,792; 2,453).
bool wide(const Call& c) {
  if (c.mode != kBF16Mode || c.dtype != kXB16 || c.w->invariant) return false;  // panels may be scaled before they are added up
  if (c.w->run <= 16) return c.m > 4 * kTile;
  return c.m > (c.w->width == 8 ? 3 : c.w->run <= 32 && c.w->offset_type != kNone ? 8 : INT64_MAX / kTile) * kTile;
}

}  // namespace

extern const GemmTable gemm = {blocks, prepare, range, has, wide};

}  // namespace bitline::BITLINE_LEVEL
