// AVX-512: the kernels of each compute type, which are compiled as one source file each, and when panels are used.
#include "gemm.h"
#include "gemm_pack_activations.h"

namespace bitline::BITLINE_ISA {

void gemm_bf16(const GemmCall& c, int64_t first, int64_t last, uint32_t* panel, float* acc);
void gemm_f32(const GemmCall& c, int64_t first, int64_t last, uint32_t* panel, float* acc);
void gemm_int8(const GemmCall& c, int64_t first, int64_t last, uint32_t* panel, float* acc);

namespace {

void compute_blocks(const GemmCall& c, int64_t first, int64_t last, uint32_t* panel, float* acc) {
  if (c.compute == kComputeBF16) return gemm_bf16(c, first, last, panel, acc);
  if (c.compute == kComputeF32) return gemm_f32(c, first, last, panel, acc);
  return gemm_int8(c, first, last, panel, acc);
}

bool supports(ComputeType) { return true; }

// Dequantizing anew for each M tile is free where the multiply-add units are the bottleneck. It is not for 8 bits, whose
// look-ups use the same units (M=64: 2,507 us; panels 2,327), nor for groups of 16, and of 32 with offsets, whose accumulators
// are scaled every 8 or 16 operands (NVFP4, M=64: 2,792; 2,453).
bool prefers_panel(const GemmCall& c) {
  if (c.compute != kComputeBF16 || c.dtype != kBFloat16) return false;
  if (c.w->batch_invariant) return false;  // panels may be scaled before the accumulation
  if (c.w->group_k <= 16) return c.m > 4 * kMaxTileM;
  return c.m > (c.w->bits == 8 ? 3 : c.w->group_k <= 32 && c.w->offset_type != kNone ? 8 : INT64_MAX / kMaxTileM) * kMaxTileM;
}

void plan(GemmCall& c) {
  c.strategy = prefers_panel(c) ? kPanel : kGemv;
  c.row_int32 = c.w->k_packed / k_per_int32(c.compute);
}

}  // namespace

extern const GemmKernels gemm_kernels = {compute_blocks, pack_activations, min_max, supports, plan};

}  // namespace bitline::BITLINE_ISA
