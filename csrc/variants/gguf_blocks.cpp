// Runs of bytes are vectors of 64-bit lanes; one shift and mask extracts a bit field of all of them. The bytes and codes of a row
// stay in L1 from plane to plane.
#include "gguf_blocks.h"

#include <string.h>

namespace bitline::BITLINE_ISA {
namespace {

// One plane of a row's blocks. kMerge: OR into the codes, which hold other planes' bits already.
template <int kRunBytes, int kBits, bool kMerge>
void unpack_plane(const uint8_t* __restrict src, int64_t num_blocks, int64_t block_bytes, int64_t block_codes, int byte_offset,
                  int shift, uint8_t* __restrict dst) {
  typedef uint64_t Run __attribute__((vector_size(kRunBytes)));
  constexpr uint64_t kMask = (0xFFu >> (8 - kBits)) * 0x0101010101010101u;
  const int64_t runs = block_codes / (kRunBytes * 8 / kBits);
  for (int64_t b = 0; b < num_blocks; ++b) {
    const uint8_t* from = src + b * block_bytes + byte_offset;
    for (int64_t r = 0; r < runs; ++r, from += kRunBytes) {
      Run run;
      memcpy(&run, from, kRunBytes);
      for (int f = 0; f < 8 / kBits; ++f, dst += kRunBytes) {
        Run codes = ((run >> (f * kBits)) & kMask) << shift;
        if (kMerge) {
          Run before;
          memcpy(&before, dst, kRunBytes);
          codes |= before;
        }
        memcpy(dst, &codes, kRunBytes);
      }
    }
  }
}

template <int kRunBytes, bool kMerge, class... Args>
void dispatch_bits(const BitPlane& plane, Args... args) {
  switch (plane.bits) {
    case 1: return unpack_plane<kRunBytes, 1, kMerge>(args...);
    case 2: return unpack_plane<kRunBytes, 2, kMerge>(args...);
    case 4: return unpack_plane<kRunBytes, 4, kMerge>(args...);
    default: return unpack_plane<kRunBytes, 8, kMerge>(args...);
  }
}

template <bool kMerge>
void dispatch_plane(const uint8_t* src, int64_t num_blocks, int64_t block_bytes, int64_t block_codes, const BitPlane& p,
                    uint8_t* dst) {
  switch (p.run_bytes) {
    case 8: return dispatch_bits<8, kMerge>(p, src, num_blocks, block_bytes, block_codes, p.byte_offset, p.shift, dst);
    case 16: return dispatch_bits<16, kMerge>(p, src, num_blocks, block_bytes, block_codes, p.byte_offset, p.shift, dst);
    case 32: return dispatch_bits<32, kMerge>(p, src, num_blocks, block_bytes, block_codes, p.byte_offset, p.shift, dst);
    default: return dispatch_bits<64, kMerge>(p, src, num_blocks, block_bytes, block_codes, p.byte_offset, p.shift, dst);
  }
}

void unpack(const uint8_t* src, int64_t num_blocks, int64_t block_bytes, int64_t block_codes, const BitPlane* planes,
            int64_t num_planes, int zero_code, uint8_t* dst) {
  dispatch_plane<false>(src, num_blocks, block_bytes, block_codes, planes[0], dst);
  for (int64_t i = 1; i < num_planes; ++i) dispatch_plane<true>(src, num_blocks, block_bytes, block_codes, planes[i], dst);
  if (zero_code >= 0)
    for (int64_t i = 0; i < num_blocks * block_codes; ++i) dst[i] = dst[i] == zero_code ? uint8_t(0) : dst[i];
}

// Runs of bytes; even: bytes 0, 2, 4, … of a, then those of b.
template <int kBytes>
struct Run;
template <>
struct Run<8> {
  typedef uint16_t Pairs __attribute__((vector_size(8), aligned(1), may_alias));
  typedef uint8_t Bytes __attribute__((vector_size(8), aligned(1), may_alias));
  static Bytes even(Bytes a, Bytes b) { return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14); }
};
template <>
struct Run<16> {
  typedef uint16_t Pairs __attribute__((vector_size(16), aligned(1), may_alias));
  typedef uint8_t Bytes __attribute__((vector_size(16), aligned(1), may_alias));
  static Bytes even(Bytes a, Bytes b) {
    return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  }
};
template <>
struct Run<32> {
  typedef uint16_t Pairs __attribute__((vector_size(32), aligned(1), may_alias));
  typedef uint8_t Bytes __attribute__((vector_size(32), aligned(1), may_alias));
  static Bytes even(Bytes a, Bytes b) {
    return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 34, 36, 38, 40, 42, 44,
                                   46, 48, 50, 52, 54, 56, 58, 60, 62);
  }
};

// A run's low nibbles in pairs, then its high ones: each 16-bit lane makes a byte of either.
template <int kBytes>
void pack_nibble_runs(const uint8_t* src, int64_t num_blocks, int64_t block_bytes, int64_t runs, uint8_t* dst) {
  using Pairs = typename Run<kBytes>::Pairs;
  using Bytes = typename Run<kBytes>::Bytes;
  for (int64_t b = 0; b < num_blocks; ++b, src += block_bytes) {
    for (int64_t r = 0; r < runs; ++r, dst += kBytes) {
      const Pairs x = *reinterpret_cast<const Pairs*>(src + r * kBytes);
      const Pairs low = (x & 0x000F) | (x >> 4 & 0x00F0), high = (x >> 4 & 0x000F) | (x >> 8 & 0x00F0);
      *reinterpret_cast<Bytes*>(dst) = Run<kBytes>::even(Bytes(low), Bytes(high));
    }
  }
}

void pack_nibbles(const uint8_t* src, int64_t num_blocks, int64_t block_bytes, int64_t block_codes, const BitPlane& p,
                  uint8_t* dst) {
  const int64_t runs = block_codes / 2 / p.run_bytes;
  src += p.byte_offset;
  switch (p.run_bytes) {
    case 8: return pack_nibble_runs<8>(src, num_blocks, block_bytes, runs, dst);
    case 16: return pack_nibble_runs<16>(src, num_blocks, block_bytes, runs, dst);
    default: return pack_nibble_runs<32>(src, num_blocks, block_bytes, runs, dst);
  }
}

}  // namespace

extern const GgufBlockKernels gguf_block_kernels = {unpack, pack_nibbles};

}  // namespace bitline::BITLINE_ISA
