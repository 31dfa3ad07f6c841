#include "scan.h"

namespace bitline::BITLINE_LEVEL {
namespace {

template <class T>
bool finite(const T* x, int64_t n, T exponent) {
  T bad = 0;
  for (int64_t i = 0; i < n; ++i) bad |= T((x[i] & exponent) == exponent);
  return bad == 0;
}

}  // namespace

extern const ScanTable scan = {finite<uint16_t>, finite<uint32_t>};

}  // namespace bitline::BITLINE_LEVEL
