#include "gemm_avx512.h"

namespace bitline::BITLINE_LEVEL {

void gemm_f32(const Call& c, int64_t first, int64_t last, uint32_t* panel, float* out) {
  switch (c.w->width) {
    case 2: return run<ModeF32, 2>(c, first, last, panel, out);
    case 3: return run<ModeF32, 3>(c, first, last, panel, out);
    case 4: return run<ModeF32, 4>(c, first, last, panel, out);
    case 5: return run<ModeF32, 5>(c, first, last, panel, out);
    case 6: return run<ModeF32, 6>(c, first, last, panel, out);
    default: return run<ModeF32, 8>(c, first, last, panel, out);
  }
}

}  // namespace bitline::BITLINE_LEVEL
