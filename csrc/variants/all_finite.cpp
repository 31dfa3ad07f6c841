// OR-reductions without an early exit: the compiler vectorizes them for each ISA level.
#include "all_finite.h"

namespace bitline::BITLINE_ISA {
namespace {

template <class T>
bool finite(const T* x, int64_t n, T exponent) {
  T non_finite = 0;
  for (int64_t i = 0; i < n; ++i) non_finite |= T((x[i] & exponent) == exponent);
  return non_finite == 0;
}

bool finite8(const uint8_t* x, int64_t n, uint8_t first_non_finite) {
  uint8_t non_finite = 0;
  for (int64_t i = 0; i < n; ++i) non_finite |= uint8_t((x[i] & 0x7F) >= first_non_finite);
  return non_finite == 0;
}

}  // namespace

extern const AllFiniteKernels all_finite_kernels = {finite8, finite<uint16_t>, finite<uint32_t>};

}  // namespace bitline::BITLINE_ISA
