// AVX-512: the kernels of each compute type, which are compiled as one source file each, and when panels are used.
#include "gemm.h"
#include "gemm_avx512_slices.h"
#include "gemm_plan_slices.h"

namespace bitline::BITLINE_ISA {

void gemm_bf16(const GemmCall& c, int64_t first, int64_t last, uint32_t* panel, float* acc);
void gemm_f32(const GemmCall& c, int64_t first, int64_t last, uint32_t* panel, float* acc);
void gemm_int8(const GemmCall& c, int64_t first, int64_t last, uint32_t* panel, float* acc);
void gemm_slices(const GemmCall& c, int64_t first, int64_t last);
int64_t max_slices_m(const GemmCall& c);
bool plan_few_rows(GemmCall& c, int64_t max_m);
void plan_vectors(GemmCall& c);

namespace {

void compute_blocks(const GemmCall& c, int64_t first, int64_t last, uint32_t* panel, float* acc) {
  if (c.strategy == kInt8Slices) return gemm_slices(c, first, last);
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
  if (!plan_few_rows(c, max_slices_m(c))) plan_vectors(c);
}

}  // namespace

// Rows of a call up to which digits of x are multiplied instead of bfloat16 pairs or float32. Two digits of bfloat16 take as many
// multiply-adds as vdpbf16ps and are added up once a group, so they only pay where codes of 8 bits need no look-up (Zen 5, M=8:
// W8A16 446 to 412 us, but MXFP4 332 to 402). Three of float16 take fewer than float32 FMAs, four of float32 as many.
int64_t max_slices_m(const GemmCall& c) {
  const int64_t group_k = c.w->group_k;
  const bool long_groups = group_k >= 64;
  if (c.dtype == kBFloat16) return c.w->bits != 8 ? 0 : long_groups ? 12 : group_k >= 32 ? 8 : 0;
  if (has_long_k_block(int(c.w->bits))) return c.dtype == kFloat16 ? 4 : 2;
  if (c.dtype == kFloat16) return long_groups ? 32 : 4;
  return c.w->bits == 8 ? (long_groups ? 32 : 4) : (long_groups ? 3 : 2);
}

// Weight-only layers and up to max_m rows: digits. False: plan_vectors.
bool plan_few_rows(GemmCall& c, int64_t max_m) {
  if (c.w->act_quant != kActNone || !plan_slices(c, max_m)) return false;
  c.compute = kComputeF32;  // x is split as float32
  c.slices.max_tile_m = max_slices_rows(int(c.w->bits), c.slices.count);
  return true;
}

void plan_vectors(GemmCall& c) {
  c.strategy = prefers_panel(c) ? kPanel : kGemv;
  c.row_int32 = c.w->k_packed / k_per_int32(c.compute);
}

extern const GemmKernels gemm_kernels = {compute_blocks, pack_activations, min_max, supports, plan};

}  // namespace bitline::BITLINE_ISA
