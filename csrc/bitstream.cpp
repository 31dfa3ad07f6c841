#include "bitstream.h"

#include <stdlib.h>
#include <string.h>

#include "parallel.h"

namespace bitline {

const BitstreamKernels& bitstream() {
  static constexpr const BitstreamKernels* by_level[kNumLevels] = {&portable::bitstream_kernels,
                                                                   BITLINE_AVX2_KERNELS(&avx2::bitstream_kernels),
                                                                   BITLINE_AVX512_KERNELS(&avx512::bitstream_kernels), nullptr};
  return dispatch(by_level);
}

namespace {

// Rows per task: about 128 KiB of unpacked codes.
int64_t rows_per_task(int64_t k) { return k < (1 << 17) ? (1 << 17) / (k + 1) + 1 : 1; }

}  // namespace
}  // namespace bitline

using namespace bitline;

// src: packed rows, `stride` bytes apart; dst uint8 [rows, k], one code per byte. bits: 1 to 7.
BITLINE_EXPORT void bitline_unpack_codes(const uint8_t* src, int64_t stride, int64_t rows, int64_t k, int bits, uint8_t* dst) {
  const auto unpack = bitstream().unpack;
  parallel_for_chunks(rows, rows_per_task(k), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) unpack(src + r * stride, k, bits, dst + r * k);
  });
}

// src: one code per byte, rows `stride` bytes apart; dst: packed rows uint8 [rows, row_bytes(k, bits)]. bits: 1 to 7.
BITLINE_EXPORT void bitline_pack_codes(const uint8_t* src, int64_t stride, int64_t rows, int64_t k, int bits, uint8_t* dst) {
  const auto pack = bitstream().pack;
  parallel_for_chunks(rows, rows_per_task(k), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) pack(src + r * stride, k, bits, dst + r * row_bytes(k, bits));
  });
}

// Gather columns index [count] of packed rows of k columns: dst uint8 [rows, row_bytes(count, bits)], packed. bits: 1 to 8.
// Returns 0; -1: an index is outside [0, k); -2: no memory.
BITLINE_EXPORT int bitline_take_columns(const uint8_t* src, int64_t stride, int64_t rows, int64_t k, int bits,
                                        const int64_t* index, int64_t count, uint8_t* dst) {
  for (int64_t i = 0; i < count; ++i)
    if (index[i] < 0 || index[i] >= k) return -1;
  const BitstreamKernels& kernels = bitstream();
  int failed = 0;
  parallel_for_chunks(rows, rows_per_task(k > count ? k : count), [&](int64_t begin, int64_t end) {
    uint8_t* unpacked = static_cast<uint8_t*>(malloc(size_t(k + count)));
    if (unpacked == nullptr) {
      __atomic_store_n(&failed, -2, __ATOMIC_RELAXED);
      return;
    }
    uint8_t* taken = unpacked + k;
    for (int64_t r = begin; r < end; ++r) {
      const uint8_t* codes = src + r * stride;
      uint8_t* out = dst + r * row_bytes(count, bits);
      if (bits < 8) kernels.unpack(codes, k, bits, unpacked), codes = unpacked;
      if (bits == 8) taken = out;
      for (int64_t i = 0; i < count; ++i) taken[i] = codes[index[i]];
      if (bits < 8) kernels.pack(taken, count, bits, out);
    }
    free(unpacked);
  });
  return failed;
}
