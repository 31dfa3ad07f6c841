#include "all_finite.h"

#include "parallel.h"

namespace bitline {
namespace {

constexpr int64_t kGrain = 1 << 18;  // elements per task

const AllFiniteKernels& kernels() {
  static constexpr const AllFiniteKernels* by_level[kNumLevels] = {&portable::all_finite_kernels,
                                                                   BITLINE_AVX2_KERNELS(&avx2::all_finite_kernels),
                                                                   BITLINE_AVX512_KERNELS(&avx512::all_finite_kernels), nullptr};
  return dispatch(by_level);
}

}  // namespace
}  // namespace bitline

using namespace bitline;

// 1: all n numbers at x are finite; 0: some are not. itemsize: bytes of a number (1, 2 or 4), to which x is aligned. exponent:
// the first bit pattern that is not finite (0x7C00 float16, 0x7F80 bfloat16, 0x7F800000 float32, 0x7F E4M3FN, 0x7C E5M2).
BITLINE_EXPORT int bitline_all_finite(const void* x, int64_t n, int itemsize, uint32_t exponent) {
  const AllFiniteKernels& k = kernels();
  int found_non_finite = 0;
  parallel_for_chunks(n, kGrain, [&](int64_t begin, int64_t end) {
    const bool finite = itemsize == 1   ? k.finite8(static_cast<const uint8_t*>(x) + begin, end - begin, uint8_t(exponent))
                        : itemsize == 2 ? k.finite16(static_cast<const uint16_t*>(x) + begin, end - begin, uint16_t(exponent))
                                        : k.finite32(static_cast<const uint32_t*>(x) + begin, end - begin, exponent);
    if (!finite) __atomic_store_n(&found_non_finite, 1, __ATOMIC_RELAXED);
  });
  return !found_non_finite;
}
