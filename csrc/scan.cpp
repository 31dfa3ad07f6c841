#include "scan.h"

#include "parallel.h"

namespace bitline {
namespace {

constexpr int64_t kGrain = 1 << 18;

const ScanTable& table() {
  static constexpr const ScanTable* tables[kLevels] = {&portable::scan, BITLINE_AVX2_TABLE(&avx2::scan),
                                                       BITLINE_AVX512_TABLE(&avx512::scan), nullptr};
  return pick(tables);
}

}  // namespace
}  // namespace bitline

using namespace bitline;

// 1 where all n numbers at x are finite, else 0. exponent: the bits of the first that is not (0x7C00 float16, 0x7F80 bfloat16,
// 0x7F800000 float32, 0x7F E4M3FN, 0x7C E5M2); size: bytes of a number, 1, 2 or 4. x is aligned to it.
BITLINE_EXPORT int bitline_all_finite(const void* x, int64_t n, int size, uint32_t exponent) {
  const ScanTable& f = table();
  int bad = 0;
  parallel_ranges(n, kGrain, [&](int64_t begin, int64_t end) {
    const bool ok = size == 1   ? f.finite8(static_cast<const uint8_t*>(x) + begin, end - begin, uint8_t(exponent))
                    : size == 2 ? f.finite16(static_cast<const uint16_t*>(x) + begin, end - begin, uint16_t(exponent))
                                : f.finite32(static_cast<const uint32_t*>(x) + begin, end - begin, exponent);
    if (!ok) __atomic_store_n(&bad, 1, __ATOMIC_RELAXED);
  });
  return !bad;
}
