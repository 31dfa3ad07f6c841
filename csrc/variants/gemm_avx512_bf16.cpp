#include "gemm_avx512.h"

namespace bitline::BITLINE_ISA {

void gemm_bf16(const GemmCall& c, int64_t first, int64_t last, uint32_t* panel, float* acc) {
  with_bits(c.w->bits, [&]<int BITS>() { compute_blocks_of<ComputeBF16, BITS>(c, first, last, panel, acc); });
}

}  // namespace bitline::BITLINE_ISA
