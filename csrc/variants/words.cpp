// Blocks of kBlock × kBlock words go through registers; what is left at the edges goes word by word.
#include "words.h"

#include "variants/transpose.h"

namespace bitline::BITLINE_LEVEL {
namespace {

constexpr int64_t kAhead = 2;  // blocks of rows to fetch before their turn: no prefetcher follows rows that lie far apart

// Whether the rows of a result are stored past the caches: a vector is a whole line.
bool past_caches(const uint32_t* dst, int64_t dst_stride) { return sizeof(Words) == kLine && aligned(dst, dst_stride); }

void fetch(const uint32_t* src, int64_t stride, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r) __builtin_prefetch(src + r * stride);
}

void transpose(const uint32_t* src, int64_t stride, int64_t rows, int64_t columns, uint32_t* dst, int64_t dst_stride) {
  const int64_t whole_rows = rows / kBlock * kBlock, whole = columns / kBlock * kBlock;
  const bool past = past_caches(dst, dst_stride);
  for (int64_t r = 0; r < whole_rows; r += kBlock) {
    for (int64_t c = 0; c < whole; c += kBlock) {
      if (r + kAhead * kBlock < whole_rows) fetch(src + (r + kAhead * kBlock) * stride + c, stride, kBlock);
      Words x[kBlock];
      for (int i = 0; i < kBlock; ++i) x[i] = load(src + (r + i) * stride + c);
      transpose_block(x);
      for (int i = 0; i < kBlock; ++i) store(dst + (c + i) * dst_stride + r, x[i], past);
    }
  }
  finish_past();
  for (int64_t c = 0; c < columns; ++c)
    for (int64_t r = c < whole ? whole_rows : 0; r < rows; ++r) dst[c * dst_stride + r] = src[r * stride + c];
}

// ---- AWQ -----------------------------------------------------------------------------------------------------------

constexpr int kColumnOfField[8] = {0, 2, 4, 6, 1, 3, 5, 7};

#if defined(BITLINE_LEVEL_avx512)
inline void exchange(Words& low, Words& high, int shift, uint32_t mask) {
  const Words m = _mm512_set1_epi32(int(mask));
  const Words differ = _mm512_ternarylogic_epi32(_mm512_srli_epi32(low, shift), high, m, 0x28);  // (a ^ b) & c
  high = _mm512_xor_si512(high, differ);
  low = _mm512_xor_si512(low, _mm512_slli_epi32(differ, shift));
}
#elif defined(BITLINE_LEVEL_avx2)
inline void exchange(Words& low, Words& high, int shift, uint32_t mask) {
  const Words m = _mm256_set1_epi32(int(mask));
  const Words differ = _mm256_and_si256(_mm256_xor_si256(_mm256_srli_epi32(low, shift), high), m);
  high = _mm256_xor_si256(high, differ);
  low = _mm256_xor_si256(low, _mm256_slli_epi32(differ, shift));
}
#else
inline void exchange(Words& low, Words& high, int shift, uint32_t mask) {
  for (int i = 0; i < kBlock; ++i) {
    const uint32_t differ = ((low.at[i] >> shift) ^ high.at[i]) & mask;
    high.at[i] ^= differ;
    low.at[i] ^= differ << shift;
  }
}
#endif

// Nibble i of x[j] and nibble j of x[i] change places: halves of words, then bytes, then nibbles of pairs of words.
template <class W, class Exchange>
inline void transpose_nibbles(W (&x)[8], const Exchange& exchange) {
  for (int i = 0; i < 4; ++i) exchange(x[i], x[i + 4], 16, 0x0000FFFFu);
  for (int i = 0; i < 8; ++i)
    if (!(i & 2)) exchange(x[i], x[i + 2], 8, 0x00FF00FFu);
  for (int i = 0; i < 8; i += 2) exchange(x[i], x[i + 1], 4, 0x0F0F0F0Fu);
}

// One output word of each of a column's 8 rows; rows of src past k count as zero.
void awq_word(const uint32_t* src, int64_t stride, int64_t k, int64_t block, uint32_t* dst, int64_t dst_stride) {
  uint32_t x[8];
  for (int i = 0; i < 8; ++i) x[i] = 8 * block + i < k ? src[(8 * block + i) * stride] : 0;
  transpose_nibbles(x, [](uint32_t& low, uint32_t& high, int shift, uint32_t mask) {
    const uint32_t differ = ((low >> shift) ^ high) & mask;
    high ^= differ;
    low ^= differ << shift;
  });
  for (int i = 0; i < 8; ++i) dst[kColumnOfField[i] * dst_stride + block] = x[i];
}

// A tile of 8 * kBlock rows and kBlock columns of words: kBlock output words of each of 8 * kBlock rows.
void awq(const uint32_t* src, int64_t stride, int64_t k, int64_t columns, uint32_t* dst, int64_t dst_stride) {
  constexpr int64_t kRows = 8 * kBlock;
  const int64_t whole_rows = k / kRows * kRows, whole = columns / kBlock * kBlock, words = (k + 7) / 8;
  const bool past = past_caches(dst, dst_stride);
  for (int64_t r = 0; r < whole_rows; r += kRows) {
    for (int64_t c = 0; c < whole; c += kBlock) {
      Words fields[8][kBlock];
      for (int b = 0; b < kBlock; ++b) {
        const uint32_t* from = src + (r + 8 * b) * stride + c;
        if (r + 8 * b + kRows < whole_rows) fetch(from + kRows * stride, stride, 8);
        Words x[8];
        for (int i = 0; i < 8; ++i) x[i] = load(from + i * stride);
        transpose_nibbles(x, [](Words& low, Words& high, int shift, uint32_t mask) { exchange(low, high, shift, mask); });
        for (int i = 0; i < 8; ++i) fields[i][b] = x[i];
      }
      for (int i = 0; i < 8; ++i) {
        transpose_block(fields[i]);
        uint32_t* to = dst + (8 * c + kColumnOfField[i]) * dst_stride + r / 8;
        for (int j = 0; j < kBlock; ++j) store(to + 8 * j * dst_stride, fields[i][j], past);
      }
    }
  }
  finish_past();
  for (int64_t c = 0; c < columns; ++c)
    for (int64_t b = c < whole ? whole_rows / 8 : 0; b < words; ++b)
      awq_word(src + c, stride, k, b, dst + 8 * c * dst_stride, dst_stride);
}

// ---- activation order ----------------------------------------------------------------------------------------------

inline uint32_t turned(uint32_t x, uint32_t turn) { return x << turn | x >> ((32 - turn) & 31); }

#if defined(BITLINE_LEVEL_avx512)
inline Words select(Words sum, Words x, uint32_t turn, uint32_t mask) {
  const Words y = _mm512_rolv_epi32(x, _mm512_set1_epi32(int(turn)));
  return _mm512_ternarylogic_epi32(sum, y, _mm512_set1_epi32(int(mask)), 0xF8);  // a | (b & c)
}
inline Words nothing() { return _mm512_setzero_si512(); }
#elif defined(BITLINE_LEVEL_avx2)
inline Words select(Words sum, Words x, uint32_t turn, uint32_t mask) {
  const Words left = _mm256_sll_epi32(x, _mm_cvtsi32_si128(int(turn)));
  const Words right = _mm256_srl_epi32(x, _mm_cvtsi32_si128(int(32 - turn)));  // by 32: zero
  return _mm256_or_si256(sum, _mm256_and_si256(_mm256_or_si256(left, right), _mm256_set1_epi32(int(mask))));
}
inline Words nothing() { return _mm256_setzero_si256(); }
#else
inline Words select(Words sum, Words x, uint32_t turn, uint32_t mask) {
  for (int i = 0; i < kBlock; ++i) sum.at[i] |= turned(x.at[i], turn) & mask;
  return sum;
}
inline Words nothing() { return Words{}; }
#endif

void ordered(const uint32_t* src, int64_t stride, const Field* fields, int width, int64_t words, int64_t columns, uint32_t* dst,
             int64_t dst_stride) {
  const int per = 32 / width;
  const uint32_t first = (1u << width) - 1;
  const int64_t whole_words = words / kBlock * kBlock, whole = columns / kBlock * kBlock;
  const bool past = past_caches(dst, dst_stride);
  for (int64_t w = 0; w < whole_words; w += kBlock) {
    for (int64_t c = 0; c < whole; c += kBlock) {
      Words x[kBlock];
      for (int i = 0; i < kBlock; ++i) {
        const Field* field = fields + (w + i) * per;
        Words sum = nothing();
        for (int j = 0; j < per; ++j) sum = select(sum, load(src + field[j].row * stride + c), field[j].turn, first << (j * width));
        x[i] = sum;
      }
      transpose_block(x);
      for (int i = 0; i < kBlock; ++i) store(dst + (c + i) * dst_stride + w, x[i], past);
    }
  }
  finish_past();
  for (int64_t c = 0; c < columns; ++c) {
    for (int64_t w = c < whole ? whole_words : 0; w < words; ++w) {
      uint32_t sum = 0;
      for (int j = 0; j < per; ++j) {
        const Field& field = fields[w * per + j];
        sum |= turned(src[field.row * stride + c], field.turn) & (first << (j * width));
      }
      dst[c * dst_stride + w] = sum;
    }
  }
}

}  // namespace

extern const WordsTable words = {transpose, awq, ordered};

}  // namespace bitline::BITLINE_LEVEL
