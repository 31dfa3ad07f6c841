#include "scan.h"

namespace bitline::BITLINE_LEVEL {
namespace {

template <class T>
bool finite(const T* x, int64_t n, T exponent) {
  T bad = 0;
  for (int64_t i = 0; i < n; ++i) bad |= T((x[i] & exponent) == exponent);
  return bad == 0;
}

bool finite8(const uint8_t* x, int64_t n, uint8_t from) {
  uint8_t bad = 0;
  for (int64_t i = 0; i < n; ++i) bad |= uint8_t((x[i] & 0x7F) >= from);
  return bad == 0;
}

}  // namespace

extern const ScanTable scan = {finite8, finite<uint16_t>, finite<uint32_t>};

}  // namespace bitline::BITLINE_LEVEL
