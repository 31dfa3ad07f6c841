// Scales and zero points, stored [groups, N], to rows [N, groups]. They are a hundredth of the codes: scalar loops over chunks
// that stay in cache are enough.
#include <stdlib.h>
#include <string.h>

#include "bitstream.h"
#include "parallel.h"

using namespace bitline;

namespace {

constexpr int64_t kColumnsPerTask = 64;

// fn(begin, end, buffer) for chunks of `grain` columns, each with `bytes` bytes of its own. Returns 0; -2: no memory.
template <class F>
int for_column_chunks(int64_t columns, int64_t grain, int64_t bytes, const F& fn) {
  int failed = 0;
  parallel_for_chunks(columns, grain, [&](int64_t begin, int64_t end) {
    uint8_t* buffer = static_cast<uint8_t*>(malloc(size_t(bytes)));
    if (buffer == nullptr) {
      __atomic_store_n(&failed, -2, __ATOMIC_RELAXED);
      return;
    }
    fn(begin, end, buffer);
    free(buffer);
  });
  return failed;
}

template <class T>
int transpose(const T* src, int64_t stride, int64_t rows, int64_t columns, T* dst) {
  const int64_t bytes = rows * kColumnsPerTask * int64_t(sizeof(T));
  return for_column_chunks(columns, kColumnsPerTask, bytes, [=](int64_t begin, int64_t end, uint8_t* buffer) {
    T* chunk = reinterpret_cast<T*>(buffer);
    const int64_t n = end - begin;
    for (int64_t r = 0; r < rows; ++r) memcpy(chunk + r * n, src + r * stride + begin, size_t(n) * sizeof(T));
    for (int64_t c = 0; c < n; ++c)
      for (int64_t r = 0; r < rows; ++r) dst[(begin + c) * rows + r] = chunk[r * n + c];
  });
}

constexpr int kAwqReverseOrder[8] = {0, 4, 1, 5, 2, 6, 3, 7};  // the nibble of each column

}  // namespace

// dst [columns, rows] = transpose of src [rows, columns], elements of 1, 2 or 4 bytes; the stride is in elements.
// Returns 0; -2: no memory.
BITLINE_EXPORT int bitline_transpose(const void* src, int64_t stride, int64_t rows, int64_t columns, int itemsize, void* dst) {
  if (itemsize == 1) return transpose(static_cast<const uint8_t*>(src), stride, rows, columns, static_cast<uint8_t*>(dst));
  if (itemsize == 2) return transpose(static_cast<const uint16_t*>(src), stride, rows, columns, static_cast<uint16_t*>(dst));
  return transpose(static_cast<const uint32_t*>(src), stride, rows, columns, static_cast<uint32_t*>(dst));
}

// qzeros int32 [groups, columns * bits / 32], a bit stream of `bits` (1 to 7) bits along the columns, to dst uint8 [columns,
// groups]. add_int32 is added to each int32 and then add_code to each code, both modulo their range: checkpoints that store
// zero point - 1. awq_order: columns in AWQ's order (columns is then a multiple of 8). The stride is in int32. Returns 0; -2:
// no memory.
BITLINE_EXPORT int bitline_unpack_zero_points(const uint32_t* src, int64_t stride, int64_t groups, int64_t columns, int bits,
                                              uint32_t add_int32, int add_code, int awq_order, uint8_t* dst) {
  const auto unpack = bitstream().unpack;
  const int64_t grain = 128;  // a multiple of 32: 32 codes end on an int32
  const uint8_t mask = uint8_t((1 << bits) - 1);
  return for_column_chunks(columns, grain, groups * grain, [=](int64_t begin, int64_t end, uint8_t* codes) {
    const int64_t n = end - begin;
    for (int64_t g = 0; g < groups; ++g) {
      uint32_t packed[grain * 7 / 32];
      const int64_t count = (n * bits + 31) / 32;
      for (int64_t i = 0; i < count; ++i) packed[i] = src[g * stride + begin / 32 * bits + i] + add_int32;
      unpack(reinterpret_cast<const uint8_t*>(packed), n, bits, codes + g * n);
    }
    for (int64_t c = 0; c < n; ++c) {
      const int64_t position = awq_order ? c / 8 * 8 + kAwqReverseOrder[c % 8] : c;
      uint8_t* out = dst + (begin + c) * groups;
      for (int64_t g = 0; g < groups; ++g) out[g] = uint8_t(codes[g * n + position] + add_code) & mask;
    }
  });
}
