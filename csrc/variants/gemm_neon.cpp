// The linear kernels with NEON: sdot or usdot for few rows of x, bfmmla and usmmla for more where the CPU has them (neon_i8mm),
// float32 FMA for what those do not compute.
#include "gemm_f32.h"
#include "gemm_int8_slices.h"
#include "gemm_plan_slices.h"
#ifdef BITLINE_ISA_neon_i8mm
#include "gemm_i8mm.h"
#endif

namespace bitline::BITLINE_ISA {
namespace {

#ifndef BITLINE_ISA_neon_i8mm
bool runs_on_matrices(const GemmCall&) { return false; }
void matrix_blocks(const GemmCall&, int64_t, int64_t, float*) {}
bool plan_matrices(GemmCall&) { return false; }
void pair_int32(const GemmCall&, int64_t) {}
#endif

void compute_blocks(const GemmCall& c, int64_t first, int64_t last, uint32_t*, float* acc) {
  if (c.strategy == kInt8Slices) return slices_blocks(c, first, last);
  if (runs_on_matrices(c)) return matrix_blocks(c, first, last, acc);
  f32_blocks(c, first, last, acc);
}

void pack(const GemmCall& c, int64_t m_tile, float* scratch) {
  pack_activations(c, m_tile, scratch);
  if (runs_on_matrices(c)) pair_int32(c, m_tile);
}

bool supports(ComputeType compute) { return compute == kComputeF32; }  // plan_matrices chooses others

void plan(GemmCall& c) {
  c.compute = kComputeF32;  // a pass of fewer rows may compute otherwise than the one before
  if (!plan_matrices(c) && !plan_slices(c, kMaxTileM)) plan_f32(c);
}

}  // namespace

extern const GemmKernels gemm_kernels = {compute_blocks, pack, min_max, supports, plan};

}  // namespace bitline::BITLINE_ISA
