#include "gemm_avx512.h"

namespace bitline::BITLINE_ISA {

void gemm_bf16(const GemmCall& c, int64_t first, int64_t last, uint32_t* panel, float* acc) {
  switch (c.w->bits) {
    case 2: return compute_blocks_of<ComputeBF16, 2>(c, first, last, panel, acc);
    case 3: return compute_blocks_of<ComputeBF16, 3>(c, first, last, panel, acc);
    case 4: return compute_blocks_of<ComputeBF16, 4>(c, first, last, panel, acc);
    case 5: return compute_blocks_of<ComputeBF16, 5>(c, first, last, panel, acc);
    case 6: return compute_blocks_of<ComputeBF16, 6>(c, first, last, panel, acc);
    default: return compute_blocks_of<ComputeBF16, 8>(c, first, last, panel, acc);
  }
}

}  // namespace bitline::BITLINE_ISA
