// The linear kernels with AVX2: int8 slices for few rows of x and int8 activations, float32 FMA for every other call.
#include "gemm_f32.h"
#include "gemm_int8_slices.h"
#include "gemm_plan_slices.h"

namespace bitline::BITLINE_ISA {
namespace {

// Rows up to which a weight-only layer takes the slices: more digits and 8-bit codes take more instructions than float32.
int64_t max_slices_m(const GemmCall& c) {
  if (kWideDot) return kMaxTileM;
  if (c.w->bits == 8 || c.dtype == kFloat32) return 1;
  return c.dtype == kBFloat16 ? 5 : 3;
}

void compute_blocks(const GemmCall& c, int64_t first, int64_t last, uint32_t*, float* acc) {
  if (c.strategy == kInt8Slices) return slices_blocks(c, first, last);
  f32_blocks(c, first, last, acc);
}

bool supports(ComputeType compute) { return compute == kComputeF32; }

void plan(GemmCall& c) {
  if (!plan_slices(c, max_slices_m(c))) plan_f32(c);
}

}  // namespace

extern const GemmKernels gemm_kernels = {compute_blocks, pack_activations, min_max, supports, plan};

}  // namespace bitline::BITLINE_ISA
