#include "gemm_avx512.h"

namespace bitline::BITLINE_LEVEL {

void gemm_bf16(const Call& c, int64_t first, int64_t last, uint32_t* panel, float* out) {
  switch (c.w->width) {
    case 2: return run<ModeBF16, 2>(c, first, last, panel, out);
    case 3: return run<ModeBF16, 3>(c, first, last, panel, out);
    case 4: return run<ModeBF16, 4>(c, first, last, panel, out);
    case 5: return run<ModeBF16, 5>(c, first, last, panel, out);
    case 6: return run<ModeBF16, 6>(c, first, last, panel, out);
    default: return run<ModeBF16, 8>(c, first, last, panel, out);
  }
}

}  // namespace bitline::BITLINE_LEVEL
