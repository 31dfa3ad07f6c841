#include "gemm_avx512.h"

namespace bitline::BITLINE_ISA {

void gemm_int8(const GemmCall& c, int64_t first, int64_t last, uint32_t* panel, float* acc) {
  if (c.w->bits == 4) return compute_blocks_of<ComputeInt8, 4>(c, first, last, panel, acc);
  return compute_blocks_of<ComputeInt8, 8>(c, first, last, panel, acc);
}

}  // namespace bitline::BITLINE_ISA
