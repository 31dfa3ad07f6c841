// Runs go as words of eight bytes, whose fields all move alike; the compiler makes vectors of them.
#include "blocks.h"

#include <string.h>

namespace bitline::BITLINE_LEVEL {
namespace {

// Field after field of runs of kRun bytes, to the codes or, where they hold lower bits already, into them.
template <int kRun, bool kInto>
void plane(const uint8_t* src, int64_t size, const Plane& p, uint8_t* dst) {
  const int fields = 8 / p.bits;
  const uint64_t mask = (0xFFu >> (8 - p.bits)) * 0x0101010101010101u;
  for (int64_t at = 0; at < size; src += kRun) {
    uint64_t run[kRun / 8];
    memcpy(run, src, kRun);
    for (int f = 0; f < fields && at < size; ++f, at += kRun) {
      uint64_t codes[kRun / 8];
      if (kInto) memcpy(codes, dst + at, kRun);
      for (int i = 0; i < kRun / 8; ++i) {
        const uint64_t bits = ((run[i] >> (f * p.bits)) & mask) << p.left;
        codes[i] = kInto ? codes[i] | bits : bits;
      }
      memcpy(dst + at, codes, kRun);
    }
  }
}

void codes(const uint8_t* src, int64_t size, const Plane* planes, int64_t count, int none, uint8_t* dst) {
  for (int64_t i = 0; i < count; ++i) {
    const Plane& p = planes[i];
    const uint8_t* from = src + p.at;
    if (i == 0) (p.run == 16 ? plane<16, false> : p.run == 32 ? plane<32, false> : plane<64, false>)(from, size, p, dst);
    else (p.run == 16 ? plane<16, true> : p.run == 32 ? plane<32, true> : plane<64, true>)(from, size, p, dst);
  }
  if (none >= 0)
    for (int64_t i = 0; i < size; ++i) dst[i] = dst[i] == none ? 0 : dst[i];
}

}  // namespace

extern const BlocksTable blocks = {codes};

}  // namespace bitline::BITLINE_LEVEL
