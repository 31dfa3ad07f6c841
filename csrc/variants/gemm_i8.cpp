#include "gemm_avx512.h"
#include "gemm_prepare.h"

namespace bitline::BITLINE_LEVEL {

void gemm_bf16(const Call& c, int64_t first, int64_t last, uint32_t* panel, float* out);
void gemm_f32(const Call& c, int64_t first, int64_t last, uint32_t* panel, float* out);

namespace {

constexpr int64_t kNarrowRows = 100000;

void blocks(const Call& c, int64_t first, int64_t last, uint32_t* panel, float* out) {
  if (c.mode == kBF16Mode) return gemm_bf16(c, first, last, panel, out);
  if (c.mode == kF32Mode) return gemm_f32(c, first, last, panel, out);
  if (c.w->width == 4) return run<ModeI8, 4>(c, first, last, panel, out);
  return run<ModeI8, 8>(c, first, last, panel, out);
}

bool has(Mode) { return true; }

bool wide(const Call& c) { return c.m > kNarrowRows; }

}  // namespace

extern const GemmTable gemm = {blocks, prepare, range, has, wide};

}  // namespace bitline::BITLINE_LEVEL
