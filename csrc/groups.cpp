// Scales and zero points, stored by groups and then columns, to rows of groups. They are a hundredth of the codes: plain loops
// over parts that stay in cache are enough.
#include <stdlib.h>
#include <string.h>

#include "bitstream.h"
#include "parallel.h"

using namespace bitline;

namespace {

constexpr int64_t kColumns = 64;

// Work on `columns` in slabs, each with room for `bytes` bytes of its own. Returns 0, or -2 where there is no memory.
template <class F>
int slabs(int64_t columns, int64_t slab, int64_t bytes, const F& fn) {
  int failed = 0;
  parallel_ranges(columns, slab, [&](int64_t begin, int64_t end) {
    uint8_t* room = static_cast<uint8_t*>(malloc(size_t(bytes)));
    if (room == nullptr) {
      __atomic_store_n(&failed, -2, __ATOMIC_RELAXED);
      return;
    }
    fn(begin, end, room);
    free(room);
  });
  return failed;
}

template <class T>
int transpose(const T* src, int64_t stride, int64_t rows, int64_t columns, T* dst) {
  return slabs(columns, kColumns, rows * kColumns * int64_t(sizeof(T)), [=](int64_t begin, int64_t end, uint8_t* room) {
    T* part = reinterpret_cast<T*>(room);
    const int64_t n = end - begin;
    for (int64_t r = 0; r < rows; ++r) memcpy(part + r * n, src + r * stride + begin, size_t(n) * sizeof(T));
    for (int64_t c = 0; c < n; ++c)
      for (int64_t r = 0; r < rows; ++r) dst[(begin + c) * rows + r] = part[r * n + c];
  });
}

constexpr int kFieldOfColumn[8] = {0, 4, 1, 5, 2, 6, 3, 7};

}  // namespace

// dst [columns, rows] = the transpose of src [rows, columns], numbers of 1, 2 or 4 bytes; the stride is in numbers.
// Returns 0, or -2 where there is no memory.
BITLINE_EXPORT int bitline_transpose(const void* src, int64_t stride, int64_t rows, int64_t columns, int size, void* dst) {
  if (size == 1) return transpose(static_cast<const uint8_t*>(src), stride, rows, columns, static_cast<uint8_t*>(dst));
  if (size == 2) return transpose(static_cast<const uint16_t*>(src), stride, rows, columns, static_cast<uint16_t*>(dst));
  return transpose(static_cast<const uint32_t*>(src), stride, rows, columns, static_cast<uint32_t*>(dst));
}

// Zero points in words src [groups, words], a bit stream of `width` (1 to 7) bits along the columns, to dst [columns, groups].
// `add` is added to each word, and then `plus` to each code, both modulo what they hold. interleaved: AWQ's order of columns
// (columns is then a multiple of 8). The stride is in words. Returns 0, or -2 where there is no memory.
BITLINE_EXPORT int bitline_zero_points(const uint32_t* src, int64_t stride, int64_t groups, int64_t columns, int width,
                                       uint32_t add, int plus, int interleaved, uint8_t* dst) {
  const auto unpack = bitstream().unpack;
  const int64_t slab = 128;  // 32 codes end on a word
  const uint8_t mask = uint8_t((1 << width) - 1);
  return slabs(columns, slab, groups * slab, [=](int64_t begin, int64_t end, uint8_t* room) {
    const int64_t n = end - begin;
    for (int64_t g = 0; g < groups; ++g) {
      uint32_t words[slab * 7 / 32];
      const int64_t count = (n * width + 31) / 32;
      for (int64_t i = 0; i < count; ++i) words[i] = src[g * stride + begin / 32 * width + i] + add;
      unpack(reinterpret_cast<const uint8_t*>(words), n, width, room + g * n);
    }
    for (int64_t c = 0; c < n; ++c) {
      const int64_t field = interleaved ? c / 8 * 8 + kFieldOfColumn[c % 8] : c;
      uint8_t* to = dst + (begin + c) * groups;
      for (int64_t g = 0; g < groups; ++g) to[g] = uint8_t(room[g * n + field] + plus) & mask;
    }
  });
}
