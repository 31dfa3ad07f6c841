// The linear kernels with NEON: sdot or usdot for few rows of x and int8 activations, float32 FMA for what those do not compute.
#include "gemm_f32.h"
#include "gemm_int8_slices.h"
#include "gemm_plan_slices.h"

namespace bitline::BITLINE_ISA {
namespace {

constexpr int kMaxSlicesM = kMaxTileM;  // of weight-only layers

void compute_blocks(const GemmCall& c, int64_t first, int64_t last, uint32_t*, float* acc) {
  if (c.strategy == kInt8Slices) return slices_blocks(c, first, last);
  f32_blocks(c, first, last, acc);
}

bool supports(ComputeType compute) { return compute == kComputeF32; }

void plan(GemmCall& c) {
  if (!plan_slices(c, kMaxSlicesM)) plan_f32(c);
}

}  // namespace

extern const GemmKernels gemm_kernels = {compute_blocks, pack_activations, min_max, supports, plan};

}  // namespace bitline::BITLINE_ISA
