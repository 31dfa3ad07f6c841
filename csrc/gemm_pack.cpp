#include "gemm_pack.h"

#include <stdlib.h>
#include <string.h>

#include "bitstream.h"
#include "gemm.h"
#include "parallel.h"

namespace bitline {
namespace {

static_assert(kPackRows == kRows);

const GemmPackTable& table() {
  static constexpr const GemmPackTable* tables[kLevels] = {&portable::gemm_pack, BITLINE_AVX2_TABLE(&avx2::gemm_pack),
                                                           BITLINE_AVX512_TABLE(&avx512::gemm_pack), nullptr};
  return pick(tables);
}

// Add bits to a word's pieces, to one that moves by as much where there is one.
void add(StepPlan& plan, int& count, int begin, int from, int left, uint32_t mask) {
  for (int i = begin; i < count; ++i) {
    Piece& p = plan.pieces[i];
    if (p.from == from && p.left == left) {
      p.mask |= mask;
      return;
    }
  }
  plan.pieces[count++] = {from, left, mask};
}

StepPlan plan_of(int width, int flip) {
  StepPlan plan;
  memset(&plan, 0, sizeof plan);
  const int columns = int(step_of(width));
  plan.words = columns * width / 32;
  int count = 0;
  for (int w = 0; w < plan.words; ++w) {
    plan.first[w] = count;
    for (int direction = 0; direction < 2; ++direction) {  // to the left and in place, then to the right
      if (direction == 1) plan.right[w] = count;
      const int begin = count;
      for (int c = 0; c < columns; ++c) {
        for (int b = 0; b < width; ++b) {
          const Place to = place(width, c, b);
          const int source = c * width + b, left = to.bit - source % 32;
          if (to.word == w && (left < 0) == (direction == 1)) add(plan, count, begin, source / 32, left, 1u << to.bit);
        }
      }
    }
  }
  plan.first[plan.words] = count;
  for (int c = 0; c < columns; ++c)
    for (int b = 0; b < width; ++b)
      if (flip >> b & 1) plan.flip[(c * width + b) / 32] |= 1u << ((c * width + b) % 32);
  return plan;
}

// The source of one block: rows as they are, or made to be what `steps` reads.
struct Source {
  const uint8_t* codes;
  int64_t stride, n, k;
  int width;               // bits of a code
  const int32_t* columns;  // the column of each packed one, -1 for none; null where they are the same
};

// Row r with kp columns of `width` bits, in `room`: chosen columns, or wider codes. xored with `flip`, zero where there is none.
void make(const Source& s, int64_t r, const Meta& w, int flip, uint8_t* bytes, uint8_t* room) {
  uint8_t* chosen = bytes + s.k;
  const uint8_t* from = s.codes + r * s.stride;
  if (s.width == 8)
    memcpy(bytes, from, size_t(s.k));
  else
    bitstream().unpack(from, s.k, s.width, bytes);
  for (int64_t j = 0; j < w.kp; ++j) {
    const int64_t column = s.columns == nullptr ? j : s.columns[j];
    chosen[j] = column >= 0 && column < s.k ? uint8_t(bytes[column] ^ flip) : 0;
  }
  if (w.width == 8)
    memcpy(room, chosen, size_t(w.kp));
  else
    bitstream().pack(chosen, w.kp, int(w.width), room);
}

}  // namespace
}  // namespace bitline

using namespace bitline;

// Write the codes of a packed weight whose Meta is there. src: its n rows, `stride` bytes apart, of k codes of `width` bits,
// each xored with `flip`. columns: the column of each packed one, -1 for padding; null where packed columns are the columns.
// Everything is written, what is past n and k as zero. Returns 0, or -2 where there is no memory.
BITLINE_EXPORT int bitline_gemm_pack_rows(const uint8_t* src, int64_t stride, int width, int flip, const int32_t* columns,
                                          void* packed) {
  const Meta& w = *static_cast<const Meta*>(packed);
  const Source source{src, stride, w.n, w.k, width, columns};
  const bool made = columns != nullptr || width != w.width;
  const StepPlan plan = plan_of(int(w.width), made ? 0 : flip);
  const int64_t words = plan.words, total = w.kp / step_of(w.width), part_bytes = kPackSteps * words * 4;
  const int64_t row_size = total * words * 4 + part_bytes, own = row_bytes(w.k, int(w.width));
  const auto steps = table().steps;
  uint8_t* codes = static_cast<uint8_t*>(packed) + w.codes;
  int failed = 0;
  parallel_for(blocks_of(w), [&](int64_t block) {
    const int64_t first = block * kPackRows, rows = w.n - first < kPackRows ? w.n - first : kPackRows;
    // Rows that are made, and the end of rows that are read where they lie, which must not be read beyond.
    const int64_t room_stride = made ? row_size : part_bytes;
    uint8_t* room = static_cast<uint8_t*>(calloc(size_t(kPackRows * room_stride + w.k + w.kp), 1));
    if (room == nullptr) {
      __atomic_store_n(&failed, -2, __ATOMIC_RELAXED);
      return;
    }
    if (made)
      for (int64_t r = 0; r < rows; ++r)
        make(source, first + r, w, flip, room + kPackRows * room_stride, room + r * room_stride);
    for (int64_t at = 0; at < total; at += kPackSteps) {
      const int64_t count = total - at < kPackSteps ? total - at : kPackSteps, byte = at * words * 4;
      uint32_t* to = reinterpret_cast<uint32_t*>(codes + block * block_bytes(w)) + at * words * kPackRows;
      if (made) {
        steps(room + byte, room_stride, count, plan, to);
      } else if (rows == kPackRows && byte + part_bytes <= w.k * w.width / 8) {
        steps(src + first * stride + byte, stride, count, plan, to);
      } else {
        memset(room, 0, size_t(kPackRows * room_stride));
        const int64_t left = own - byte < part_bytes ? own - byte : part_bytes;
        for (int64_t r = 0; r < rows && left > 0; ++r) {
          uint8_t* row = room + r * room_stride;
          memcpy(row, src + (first + r) * stride + byte, size_t(left));
          for (int64_t i = 0; i < left; ++i) row[i] ^= reinterpret_cast<const uint8_t*>(plan.flip)[i % (words * 4)];
          if (byte + left == own && w.k * w.width % 8 != 0) row[left - 1] &= uint8_t((1 << (w.k * w.width % 8)) - 1);
        }
        StepPlan flipped = plan;  // what is padding stays zero
        memset(flipped.flip, 0, sizeof flipped.flip);
        steps(room, room_stride, count, flipped, to);
      }
    }
    free(room);
  });
  return failed;
}

// dst [rows / 32][count][32] = src[(r + offset) / each][pick[j]], numbers of 1, 2 or 4 bytes; rows past n are zero. The stride is
// in numbers; rows is a multiple of 32.
BITLINE_EXPORT void bitline_gemm_pack_scales(const void* src, int64_t stride, int size, int64_t n, int64_t each, int64_t offset,
                                             const int64_t* pick, int64_t count, int64_t rows, void* dst) {
  const auto fill = [=](auto* out, const auto* in, int64_t block) {
    for (int64_t i = 0; i < kPackRows; ++i) {
      const int64_t r = block * kPackRows + i;
      auto* to = out + block * kPackRows * count + i;
      if (r >= n) {
        for (int64_t j = 0; j < count; ++j) to[j * kPackRows] = 0;
        continue;
      }
      const auto* from = in + (r + offset) / each * stride;
      for (int64_t j = 0; j < count; ++j) to[j * kPackRows] = from[pick[j]];
    }
  };
  parallel_for(rows / kPackRows, [&](int64_t block) {
    if (size == 1) fill(static_cast<uint8_t*>(dst), static_cast<const uint8_t*>(src), block);
    if (size == 2) fill(static_cast<uint16_t*>(dst), static_cast<const uint16_t*>(src), block);
    if (size == 4) fill(static_cast<uint32_t*>(dst), static_cast<const uint32_t*>(src), block);
  });
}
