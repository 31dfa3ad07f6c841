#include "gemm.h"

#include <stdlib.h>
#include <string.h>

#include "parallel.h"
#include "scratch.h"

namespace bitline {
namespace {

const GemmTable* table() {
  static constexpr const GemmTable* tables[kLevels] = {nullptr, BITLINE_AVX2_TABLE(&avx2::gemm),
                                                       BITLINE_AVX512_TABLE(&avx512::gemm), nullptr};
  int at = level();
  while (at > 0 && tables[at] == nullptr) --at;
  return tables[at];
}

__thread Scratch shared_part, own_part;  // a call's input as all its threads see it; one thread's panel and sums

size_t round_up(size_t n) { return (n + 63) / 64 * 64; }

constexpr int64_t kMostRows = 1024;     // rows of one pass
constexpr int64_t kPieceBytes = 1 << 19;  // of a prepared input
constexpr int64_t kSerialWords = 1 << 15;  // an input up to this many words is prepared by the calling thread

Mode mode_of(const Meta& w, int dtype, const GemmTable& t) {
  // int32 sums of 255 * 128 hold 65,000 columns of a group.
  if (w.act == kInt8 && w.integer && (w.width == 4 || w.width == 8) && w.run <= 65000 && t.has(kI8Mode)) return kI8Mode;
  if ((dtype == kXB16 || (w.act != kPlain && !w.rounded)) && t.has(kBF16Mode)) return kBF16Mode;
  return kF32Mode;
}

void tensor_scale(const Meta& w, const GemmTable& t, Call& c) {
  c.tensor_scale = 0, c.tensor_zero = 0;
  if (w.act == kPlain || w.reach == kToken) return;
  if (w.reach == kStatic) {
    c.tensor_scale = w.input_scale, c.tensor_zero = w.input_zero;
    return;
  }
  float low, high;
  const bool finite = t.range(c.x, c.m * w.k, c.dtype, &low, &high);
  quantizer(w, low, high, &c.tensor_scale, &c.tensor_zero);
  if (!finite) c.tensor_scale = __builtin_nanf("");
}

// Parts that the blocks are dealt out in. One row: a few long ones for each thread, of one size if possible. More: many, since a
// thread that the system stops for a while leaves the rest to the others.
int64_t parts_of(int64_t blocks, int64_t rows) {
  const int64_t each = threads();
  if (rows > kTile) return blocks < 16 * each ? blocks : 16 * each;
  int64_t best = blocks;
  for (int64_t n = 4 * each, least = INT64_MAX; n >= each && blocks > each; n -= each) {
    const int64_t padded = (blocks + n - 1) / n * n;  // what they take if all are as long as the longest
    if (n <= blocks && padded < least) best = n, least = padded;
  }
  return best;
}

// Pieces of the tiles: so that a product with few blocks has enough parts, and so that a piece of the input stays in a core's
// second-level cache while the blocks go by, where these are decoded for each tile anyway (1000 x 4304, M=1024: 10.6 to 10.2 ms).
int64_t pieces_of(const Call& c, int64_t parts, int64_t tiles) {
  const int64_t wanted = (16 * threads() + parts - 1) / parts, most = tiles / 4;
  const int64_t pieces = most < 2 || wanted < 2 ? 1 : wanted < most ? wanted : most;
  if (c.wide || c.mode == kI8Mode) return pieces;
  const int64_t fitting = (c.m * c.words * 4 + kPieceBytes - 1) / kPieceBytes;
  return pieces > fitting ? pieces : fitting < tiles ? fitting : tiles;
}

// One plain row is multiplied as it is where the packed columns are the input's.
bool direct(const Call& c) {
  const Meta& w = *c.w;
  return c.m == 1 && c.mode == kBF16Mode && w.act == kPlain && !w.map && w.kp == w.k && w.offset_type == kNone;
}

// Places of the prepared input from `at` on, where that is not null. Returns their bytes; `room` is prepare's, at their end.
size_t place(Call& c, uint8_t* at, float** room) {
  const Meta& w = *c.w;
  size_t need = 0;
  const size_t words_at = need;
  need += round_up(direct(c) ? 0 : size_t(c.m) * c.words * 4);
  const size_t sums_at = need;
  need += round_up(size_t(c.m) * w.groups * 4);
  const size_t starts_at = need;
  need += c.mode == kI8Mode ? round_up(size_t(c.m) * w.groups * 4) : 0;
  const size_t scale_at = need;
  need += round_up(size_t(c.m) * 4);
  const size_t room_at = need;
  need += size_t(kTile + 2) * w.kp * 4;
  if (at == nullptr) return need;
  c.xp = direct(c) ? static_cast<const uint32_t*>(c.x) : reinterpret_cast<uint32_t*>(at + words_at);
  c.sums = reinterpret_cast<float*>(at + sums_at);
  c.starts = reinterpret_cast<int32_t*>(at + starts_at);
  c.row_scale = w.act == kPlain ? nullptr : reinterpret_cast<float*>(at + scale_at);
  *room = reinterpret_cast<float*>(at + room_at);
  return need;
}

// Rows [0, c.m) of c.x. Returns 0, or -2 where there is no memory.
int pass(Call& c, const GemmTable& t) {
  const Meta& w = *c.w;
  const int64_t rows = c.m, tiles = tiles_of(c);
  c.wide = t.wide(c);
  float* room;
  uint8_t* at = static_cast<uint8_t*>(reserve(shared_part, place(c, nullptr, &room)));
  if (at == nullptr) return -2;
  place(c, at, &room);
  int failed = 0;
  if (!direct(c)) {
    if (rows * c.words <= kSerialWords) {
      for (int64_t i = 0; i < tiles; ++i) t.prepare(c, i, room);
    } else {
      parallel_for(tiles, [&](int64_t i) {
        float* mine = static_cast<float*>(reserve(own_part, size_t(kTile + 2) * w.kp * 4));
        if (mine == nullptr) __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
        else t.prepare(c, i, mine);
      });
    }
  }
  if (failed) return -2;
  const int64_t blocks = blocks_of(w), parts = parts_of(blocks, rows), pieces = pieces_of(c, parts, tiles);
  const size_t own = kPanelBytes + size_t(c.wide ? c.m : 0) * kRows * 8;
  parallel_for(pieces * parts, [&](int64_t task) {
    const int64_t part = task % parts, piece = task / parts;
    Call mine = c;
    mine.first_tile = tiles * piece / pieces, mine.last_tile = tiles * (piece + 1) / pieces;
    uint32_t* panel = static_cast<uint32_t*>(reserve(own_part, own));
    if (panel == nullptr) __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
    else t.blocks(mine, blocks * part / parts, blocks * (part + 1) / parts, panel, reinterpret_cast<float*>(panel) + kPanelBytes / 4);
  });
  return failed ? -2 : 0;
}

}  // namespace
}  // namespace bitline

using namespace bitline;

namespace bitline {
namespace {

// What a call of a packed weight needs to know before its rows. Returns 0, or what bitline_gemm returns.
int begin(Call& c, const GemmTable* t, const void* x, const void* packed, const void* bias, int dtype) {
  const Meta& w = *static_cast<const Meta*>(packed);
  if (w.magic != kMagic) return -1;
  if (t == nullptr) return -3;
  memset(&c, 0, sizeof c);
  c.w = &w, c.base = static_cast<const uint8_t*>(packed), c.bias = bias, c.dtype = Dtype(dtype);
  c.mode = mode_of(w, dtype, *t);
  c.words = w.kp / (c.mode == kBF16Mode ? 2 : c.mode == kF32Mode ? 1 : 4);
  c.x = x;
  return 0;
}

}  // namespace
}  // namespace bitline

// y [m, n] = x [m, k] times a packed weight, plus bias [n] where it is not null; all of one dtype, contiguous.
// Returns 0; -1: not a packed weight of this version; -2: no memory; -3: this level of CPU features has no kernel.
BITLINE_EXPORT int bitline_gemm(const void* x, int64_t m, const void* packed, const void* bias, void* y, int dtype) {
  const GemmTable* t = table();
  Call c;
  if (const int failed = begin(c, t, x, packed, bias, dtype)) return failed;
  const Meta& w = *c.w;
  const int64_t item = dtype == kX32 ? 4 : 2;
  c.m = m;
  tensor_scale(w, *t, c);
  for (int64_t row = 0; row < m; row += kMostRows) {
    c.x = static_cast<const uint8_t*>(x) + row * w.k * item;
    c.y = static_cast<uint8_t*>(y) + row * w.n * item;
    c.m = m - row < kMostRows ? m - row : kMostRows;
    if (const int failed = pass(c, *t)) return failed;
  }
  return 0;
}

// One row x [k] times up to three packed weights of k columns, in one parallel loop; third and its bias may be null. y: the
// results one after another. Each is what bitline_gemm gives. Returns as bitline_gemm; -4: they have not all k columns.
BITLINE_EXPORT int bitline_gemm_row(const void* x, int64_t k, const void* first, const void* first_bias, const void* second,
                                    const void* second_bias, const void* third, const void* third_bias, void* y, int dtype) {
  const GemmTable* t = table();
  const void *const packed[] = {first, second, third}, *const bias[] = {first_bias, second_bias, third_bias};
  const int count = third == nullptr ? 2 : 3;
  Call calls[3];
  float* room[3];
  size_t need = 0;
  int64_t starts[4] = {0, 0, 0, 0};  // of each weight's blocks among all
  uint8_t* out = static_cast<uint8_t*>(y);
  for (int i = 0; i < count; ++i) {
    Call& c = calls[i];
    if (const int failed = begin(c, t, x, packed[i], bias[i], dtype)) return failed;
    if (c.w->k != k) return -4;
    c.m = 1, c.y = out, c.last_tile = 1;
    out += c.w->n * (dtype == kX32 ? 4 : 2);
    tensor_scale(*c.w, *t, c);
    need += round_up(place(c, nullptr, &room[i]));
    starts[i + 1] = starts[i] + blocks_of(*c.w);
  }
  uint8_t* at = static_cast<uint8_t*>(reserve(shared_part, need));
  if (at == nullptr) return -2;
  for (int i = 0; i < count; ++i) {
    at += round_up(place(calls[i], at, &room[i]));
    if (!direct(calls[i])) t->prepare(calls[i], 0, room[i]);
  }
  const int64_t blocks = starts[count], parts = parts_of(blocks, 1);
  int failed = 0;
  parallel_for(parts, [&](int64_t part) {
    const int64_t from = blocks * part / parts, to = blocks * (part + 1) / parts;
    uint32_t* panel = static_cast<uint32_t*>(reserve(own_part, kPanelBytes));
    if (panel == nullptr) {
      __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
      return;
    }
    for (int i = 0; i < count; ++i) {
      const int64_t low = from > starts[i] ? from - starts[i] : 0, high = (to < starts[i + 1] ? to : starts[i + 1]) - starts[i];
      if (low < high) t->blocks(calls[i], low, high, panel, reinterpret_cast<float*>(panel) + kPanelBytes / 4);
    }
  });
  return failed ? -2 : 0;
}
