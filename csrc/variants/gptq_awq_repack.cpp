// kLanes x kLanes tiles of int32 are transposed in registers; the edges go one int32 at a time.
#include "gptq_awq_repack.h"

#include "variants/transpose.h"

namespace bitline::BITLINE_ISA {
namespace {

constexpr int64_t kPrefetchTiles = 2;  // tiles of rows ahead: hardware prefetchers do not follow rows that lie far apart

// Whether dst's rows may be written with non-temporal stores: a vector is a whole cache line.
bool stores_whole_lines(const uint32_t* dst, int64_t dst_stride) { return sizeof(Vec) == kCacheLine && aligned(dst, dst_stride); }

void prefetch_rows(const uint32_t* src, int64_t stride, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r) __builtin_prefetch(src + r * stride);
}

void transpose(const uint32_t* src, int64_t stride, int64_t rows, int64_t columns, uint32_t* dst, int64_t dst_stride) {
  const int64_t tiled_rows = rows / kLanes * kLanes, tiled_columns = columns / kLanes * kLanes;
  const bool non_temporal = stores_whole_lines(dst, dst_stride);
  for (int64_t r = 0; r < tiled_rows; r += kLanes) {
    for (int64_t c = 0; c < tiled_columns; c += kLanes) {
      const int64_t ahead = r + kPrefetchTiles * kLanes;
      if (ahead < tiled_rows) prefetch_rows(src + ahead * stride + c, stride, kLanes);
      Vec x[kLanes];
      for (int i = 0; i < kLanes; ++i) x[i] = load(src + (r + i) * stride + c);
      transpose_tile(x);
      for (int i = 0; i < kLanes; ++i) store(dst + (c + i) * dst_stride + r, x[i], non_temporal);
    }
  }
  stream_fence();
  for (int64_t c = 0; c < columns; ++c)
    for (int64_t r = c < tiled_columns ? tiled_rows : 0; r < rows; ++r) dst[c * dst_stride + r] = src[r * stride + c];
}

// ---- AWQ -----------------------------------------------------------------------------------------------------------

constexpr int kAwqOrder[8] = {0, 2, 4, 6, 1, 3, 5, 7};  // the column of each nibble

// Delta swap: exchange the bits of `high` under the mask with those of `low` that lie `shift` higher.
#if defined(BITLINE_ISA_avx512)
inline void delta_swap(Vec& low, Vec& high, int shift, uint32_t mask) {
  const Vec m = _mm512_set1_epi32(int(mask));
  const Vec delta = _mm512_ternarylogic_epi32(_mm512_srli_epi32(low, shift), high, m, 0x28);  // (a ^ b) & c
  high = _mm512_xor_si512(high, delta);
  low = _mm512_xor_si512(low, _mm512_slli_epi32(delta, shift));
}
#elif defined(BITLINE_ISA_avx2)
inline void delta_swap(Vec& low, Vec& high, int shift, uint32_t mask) {
  const Vec m = _mm256_set1_epi32(int(mask));
  const Vec delta = _mm256_and_si256(_mm256_xor_si256(_mm256_srli_epi32(low, shift), high), m);
  high = _mm256_xor_si256(high, delta);
  low = _mm256_xor_si256(low, _mm256_slli_epi32(delta, shift));
}
#else
inline void delta_swap(Vec& low, Vec& high, int shift, uint32_t mask) {
  for (int i = 0; i < kLanes; ++i) {
    const uint32_t delta = ((low.lane[i] >> shift) ^ high.lane[i]) & mask;
    high.lane[i] ^= delta;
    low.lane[i] ^= delta << shift;
  }
}
#endif

// An 8 x 8 transpose: nibble i of x[j] and nibble j of x[i] are exchanged, as 16-bit halves, then bytes, then nibbles.
template <class T, class DeltaSwap>
inline void transpose_nibbles(T (&x)[8], const DeltaSwap& delta_swap) {
  for (int i = 0; i < 4; ++i) delta_swap(x[i], x[i + 4], 16, 0x0000FFFFu);
  for (int i = 0; i < 8; ++i)
    if (!(i & 2)) delta_swap(x[i], x[i + 2], 8, 0x00FF00FFu);
  for (int i = 0; i < 8; i += 2) delta_swap(x[i], x[i + 1], 4, 0x0F0F0F0Fu);
}

// One int32 of each of the 8 output rows of a column of src; rows of src past k count as zero.
void awq_edge(const uint32_t* src, int64_t stride, int64_t k, int64_t block, uint32_t* dst, int64_t dst_stride) {
  uint32_t x[8];
  for (int i = 0; i < 8; ++i) x[i] = 8 * block + i < k ? src[(8 * block + i) * stride] : 0;
  transpose_nibbles(x, [](uint32_t& low, uint32_t& high, int shift, uint32_t mask) {
    const uint32_t delta = ((low >> shift) ^ high) & mask;
    high ^= delta;
    low ^= delta << shift;
  });
  for (int i = 0; i < 8; ++i) dst[kAwqOrder[i] * dst_stride + block] = x[i];
}

// Tiles of 8 * kLanes rows and kLanes columns of int32: kLanes output int32 of each of 8 * kLanes output rows.
void awq(const uint32_t* src, int64_t stride, int64_t k, int64_t columns, uint32_t* dst, int64_t dst_stride) {
  constexpr int64_t kTileRows = 8 * kLanes;
  const int64_t tiled_rows = k / kTileRows * kTileRows, tiled_columns = columns / kLanes * kLanes, k_packed = (k + 7) / 8;
  const bool non_temporal = stores_whole_lines(dst, dst_stride);
  for (int64_t r = 0; r < tiled_rows; r += kTileRows) {
    for (int64_t c = 0; c < tiled_columns; c += kLanes) {
      Vec nibbles[8][kLanes];
      for (int b = 0; b < kLanes; ++b) {
        const uint32_t* from = src + (r + 8 * b) * stride + c;
        if (r + 8 * b + kTileRows < tiled_rows) prefetch_rows(from + kTileRows * stride, stride, 8);
        Vec x[8];
        for (int i = 0; i < 8; ++i) x[i] = load(from + i * stride);
        transpose_nibbles(x, [](Vec& low, Vec& high, int shift, uint32_t mask) { delta_swap(low, high, shift, mask); });
        for (int i = 0; i < 8; ++i) nibbles[i][b] = x[i];
      }
      for (int i = 0; i < 8; ++i) {
        transpose_tile(nibbles[i]);
        uint32_t* to = dst + (8 * c + kAwqOrder[i]) * dst_stride + r / 8;
        for (int j = 0; j < kLanes; ++j) store(to + 8 * j * dst_stride, nibbles[i][j], non_temporal);
      }
    }
  }
  stream_fence();
  for (int64_t c = 0; c < columns; ++c)
    for (int64_t b = c < tiled_columns ? tiled_rows / 8 : 0; b < k_packed; ++b)
      awq_edge(src + c, stride, k, b, dst + 8 * c * dst_stride, dst_stride);
}

// ---- GPTQ with act-order -------------------------------------------------------------------------------------------

inline uint32_t rotate_left(uint32_t x, uint32_t by) { return x << by | x >> ((32 - by) & 31); }

// out | (x rotated left & mask): one more code of an output int32.
#if defined(BITLINE_ISA_avx512)
inline Vec insert_code(Vec out, Vec x, uint32_t rotation, uint32_t mask) {
  const Vec y = _mm512_rolv_epi32(x, _mm512_set1_epi32(int(rotation)));
  return _mm512_ternarylogic_epi32(out, y, _mm512_set1_epi32(int(mask)), 0xF8);  // a | (b & c)
}
inline Vec zero_vec() { return _mm512_setzero_si512(); }
#elif defined(BITLINE_ISA_avx2)
inline Vec insert_code(Vec out, Vec x, uint32_t rotation, uint32_t mask) {
  const Vec left = _mm256_sll_epi32(x, _mm_cvtsi32_si128(int(rotation)));
  const Vec right = _mm256_srl_epi32(x, _mm_cvtsi32_si128(int(32 - rotation)));  // a shift by 32 gives zero
  return _mm256_or_si256(out, _mm256_and_si256(_mm256_or_si256(left, right), _mm256_set1_epi32(int(mask))));
}
inline Vec zero_vec() { return _mm256_setzero_si256(); }
#else
inline Vec insert_code(Vec out, Vec x, uint32_t rotation, uint32_t mask) {
  for (int i = 0; i < kLanes; ++i) out.lane[i] |= rotate_left(x.lane[i], rotation) & mask;
  return out;
}
inline Vec zero_vec() { return Vec{}; }
#endif

void gptq_permuted(const uint32_t* src, int64_t stride, const PermutedCode* sources, int bits, int64_t k_packed, int64_t columns,
                   uint32_t* dst, int64_t dst_stride) {
  const int per_int32 = 32 / bits;
  const uint32_t code_mask = (1u << bits) - 1;
  const int64_t tiled_k = k_packed / kLanes * kLanes, tiled_columns = columns / kLanes * kLanes;
  const bool non_temporal = stores_whole_lines(dst, dst_stride);
  for (int64_t k = 0; k < tiled_k; k += kLanes) {
    for (int64_t c = 0; c < tiled_columns; c += kLanes) {
      Vec x[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        const PermutedCode* source = sources + (k + i) * per_int32;
        Vec out = zero_vec();
        for (int j = 0; j < per_int32; ++j)
          out = insert_code(out, load(src + source[j].row * stride + c), source[j].rotation, code_mask << (j * bits));
        x[i] = out;
      }
      transpose_tile(x);
      for (int i = 0; i < kLanes; ++i) store(dst + (c + i) * dst_stride + k, x[i], non_temporal);
    }
  }
  stream_fence();
  for (int64_t c = 0; c < columns; ++c) {
    for (int64_t k = c < tiled_columns ? tiled_k : 0; k < k_packed; ++k) {
      uint32_t out = 0;
      for (int j = 0; j < per_int32; ++j) {
        const PermutedCode& source = sources[k * per_int32 + j];
        out |= rotate_left(src[source.row * stride + c], source.rotation) & (code_mask << (j * bits));
      }
      dst[c * dst_stride + k] = out;
    }
  }
}

}  // namespace

extern const RepackKernels repack_kernels = {transpose, awq, gptq_permuted};

}  // namespace bitline::BITLINE_ISA
