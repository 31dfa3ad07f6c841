// Runs go as vectors of words of eight bytes, whose fields all move alike. A row's bytes and codes stay in
// a first-level cache from plane to plane.
#include "blocks.h"

#include <string.h>

namespace bitline::BITLINE_LEVEL {
namespace {

// One plane of all blocks, to the codes or, where they hold other bits already, into them.
template <int kRun, int kBits, bool kInto>
void plane(const uint8_t* __restrict src, int64_t count, int64_t bytes, int64_t size, int at, int left, uint8_t* __restrict dst) {
  typedef uint64_t Run __attribute__((vector_size(kRun)));
  constexpr uint64_t kMask = (0xFFu >> (8 - kBits)) * 0x0101010101010101u;
  const int64_t runs = size / (kRun * 8 / kBits);
  for (int64_t b = 0; b < count; ++b) {
    const uint8_t* from = src + b * bytes + at;
    for (int64_t r = 0; r < runs; ++r, from += kRun) {
      Run run;
      memcpy(&run, from, kRun);
      for (int f = 0; f < 8 / kBits; ++f, dst += kRun) {
        Run codes = ((run >> (f * kBits)) & kMask) << left;
        if (kInto) {
          Run before;
          memcpy(&before, dst, kRun);
          codes |= before;
        }
        memcpy(dst, &codes, kRun);
      }
    }
  }
}

template <int kRun, bool kInto, class... Args>
void of_bits(const Plane& p, Args... args) {
  switch (p.bits) {
    case 1: return plane<kRun, 1, kInto>(args...);
    case 2: return plane<kRun, 2, kInto>(args...);
    case 4: return plane<kRun, 4, kInto>(args...);
    default: return plane<kRun, 8, kInto>(args...);
  }
}

template <bool kInto>
void any_plane(const uint8_t* src, int64_t count, int64_t bytes, int64_t size, const Plane& p, uint8_t* dst) {
  switch (p.run) {
    case 8: return of_bits<8, kInto>(p, src, count, bytes, size, p.at, p.left, dst);
    case 16: return of_bits<16, kInto>(p, src, count, bytes, size, p.at, p.left, dst);
    case 32: return of_bits<32, kInto>(p, src, count, bytes, size, p.at, p.left, dst);
    default: return of_bits<64, kInto>(p, src, count, bytes, size, p.at, p.left, dst);
  }
}

void codes(const uint8_t* src, int64_t count, int64_t bytes, int64_t size, const Plane* planes, int64_t plane_count, int none,
           uint8_t* dst) {
  any_plane<false>(src, count, bytes, size, planes[0], dst);
  for (int64_t i = 1; i < plane_count; ++i) any_plane<true>(src, count, bytes, size, planes[i], dst);
  if (none >= 0)
    for (int64_t i = 0; i < count * size; ++i) dst[i] = dst[i] == none ? uint8_t(0) : dst[i];
}

}  // namespace

extern const BlocksTable blocks = {codes};

}  // namespace bitline::BITLINE_LEVEL
