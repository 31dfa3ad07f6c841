// Quantized linear layers on a CPU: the packed weight, the prepared input and what each instruction set provides.
#pragma once

#include "isa.h"

namespace bitline {

constexpr int kRows = 32;   // output rows of a block: two vectors of 16
constexpr int kTile = 12;   // input rows of a register tile
constexpr int kGroups = 16; // groups whose float32 sums are added one after another; such sums are then added: less rounding
constexpr int64_t kMagic = 0x32304d4d45474c42;  // the layout's version

// How a stream of scales or offsets is stored. U8, I8 and E4M3 are multiplied by a coarser float32 stream; kZero is a
// zero point minus the type's center, int8, which stands for the offset -scale * zero.
enum Stream : int64_t { kNone = 0, kF32 = 1, kBF16 = 2, kF16 = 3, kU8 = 4, kI8 = 5, kE4M3 = 6, kZero = 7 };
enum Dtype : int { kX32 = 0, kX16 = 1, kXB16 = 2 };  // float32, float16, bfloat16
// How the input is quantized before the product, and over what one scale reaches.
enum Act : int64_t { kPlain = 0, kInt8 = 1, kInt8Asym = 2, kFP8 = 3 };
enum Reach : int64_t { kToken = 0, kTensor = 1, kStatic = 2 };
// What is multiplied: bfloat16 pairs, float32, or unsigned codes of bytes with int8.
enum Mode : int { kBF16Mode = 0, kF32Mode = 1, kI8Mode = 2 };

// The first 256 bytes of a packed weight. Parts are byte offsets from its start, 0 where absent.
// codes: blocks of 32 rows, each a run of steps: 16 rows' vector of 64 bytes after 16 rows' (decode.h says what is in one).
// scales, offsets: [block][group][32]; coarse ones float32 [block][ceil(groups / ratio)][32]. map: int32 [kp], the input
// column of each packed column, -1 for padding. table16: bfloat16 values of codes as decode.h reads them; table32:
// float32 values of all 2**width codes.
struct Meta {
  int64_t magic, bytes, n, k;
  int64_t kp;      // columns as packed: groups * run
  int64_t width;   // bits of a packed code: 2, 3, 4, 5, 6 or 8
  int64_t groups;  // scales of a row
  int64_t run;     // columns of a group, a multiple of the width's step
  int64_t integer, center;  // where integer is 1, a code stands for code - center
  int64_t scale_type, offset_type, coarse_ratio;
  int64_t codes, scales, offsets, coarse_scales, coarse_offsets, map, table16, table32;
  int64_t act, reach;
  float input_scale;
  int32_t input_zero;
  float limit;     // what an absolute value counts as at most for a dynamic scale; infinity for no limit
  int32_t rounded; // 1 where table16 rounds some value
  int64_t invariant;  // 1: a row's result must not depend on how many rows come with it
  int64_t reserved[6];
};
static_assert(sizeof(Meta) == 256);

// Columns in one step of the codes.
constexpr int step_of(int64_t width) {
  return width == 2 ? 16 : width == 3 ? 32 : width == 4 ? 8 : width == 5 ? 32 : width == 6 ? 16 : 4;
}
// Where bit `bit` of a step's code of column `column` lies: a word of its row, and a bit of that. Even columns have the words' low
// halves and odd ones the high halves. A half holds as many whole codes as it can; the bits that are left over make the last ones.
struct Place {
  int word, bit;
};
constexpr Place place(int width, int column, int bit) {
  const int pair = column / 2, half = column % 2 * 16, each = 16 / width;
  if (16 % width == 0) return {pair / each, half + pair % each * width + bit};
  const int words = step_of(width) * width / 32;
  if (pair < words * each) return {pair / each, half + pair % each * width + bit};
  if (width == 6) return bit < 4 ? Place{pair - 6, half + 12 + bit} : Place{2, half + 2 * pair + bit - 4};
  return {bit, half + 15};  // 3 and 5 bits
}
inline int64_t block_bytes(const Meta& w) { return w.kp * w.width * kRows / 8; }
inline int64_t blocks_of(const Meta& w) { return (w.n + kRows - 1) / kRows; }

// One call. The input is cut into tiles of up to 12 rows; xp is the tiles one after another, [word][row], words of 32 bits.
struct Call {
  const Meta* w;
  const uint8_t* base;
  const void *x, *bias;
  void* y;
  int64_t m;
  int64_t first_tile, last_tile;  // those to multiply
  Dtype dtype;
  Mode mode;
  int64_t words;          // of one row
  bool wide;              // decode panels of the weight and multiply each with all tiles; else decode anew for each tile
  const uint32_t* xp;
  const float* sums;      // where there are offsets: the input summed over each group, laid out like xp
  const int32_t* starts;  // int8: -center * that sum
  const float* row_scale; // where the input is quantized: the scale of each row
  float tensor_scale;     // the one scale of a whole input, 0 where each row has its own
  int tensor_zero;
};

inline int64_t tiles_of(const Call& c) { return (c.m + kTile - 1) / kTile; }
inline int64_t tile_start(const Call& c, int64_t t) {
  const int64_t n = tiles_of(c);
  return c.m / n * t + (t < c.m % n ? t : c.m % n);
}
constexpr int64_t kPanelBytes = 1 << 14;  // of decoded weights; with a tile of the input it fits a first-level cache

// Scale and zero point for numbers between low and high, as act_quant.py computes them.
inline void quantizer(const Meta& w, float low, float high, float* scale, int* zero) {
  const int64_t act = w.act;
  low = low < -w.limit ? -w.limit : low, high = high > w.limit ? w.limit : high;
  const float most = -low > high ? -low : high, tiny = 0x1p-23f;
  *zero = 0;
  if (act == kInt8Asym) {
    low = low < 0 ? low : 0, high = high > 0 ? high : 0;
    *scale = (high - low) / 255.0f;
    if (*scale < tiny) *scale = tiny;
    const float z = __builtin_rintf(-128.0f - low / *scale);
    *zero = int(z < -128 ? -128.0f : z > 127 ? 127.0f : z);
    return;
  }
  *scale = most / (act == kFP8 ? 448.0f : 127.5f);
  if (*scale < tiny) *scale = tiny;
}

struct GemmTable {
  // Blocks [first, last) of the output, for the call's tiles. panel: kPanelBytes; out: where c.wide, 64 floats a row. Both 64-byte aligned.
  void (*blocks)(const Call& c, int64_t first, int64_t last, uint32_t* panel, float* out);
  // Fill xp, sums, starts and row_scale of one tile. room: 14 rows of kp floats.
  void (*prepare)(const Call& c, int64_t tile, float* room);
  // Smallest and largest of n numbers; false where one of them is not finite.
  bool (*range)(const void* x, int64_t n, Dtype dtype, float* low, float* high);
  bool (*has)(Mode mode);
  // Whether panels are faster for a call; a measured number of rows.
  bool (*wide)(const Call& c);
};

BITLINE_AVX2(namespace avx2 { extern const GemmTable gemm; })
BITLINE_AVX512(namespace avx512 { extern const GemmTable gemm; })

}  // namespace bitline
