// kLanes x kLanes tiles of int32 are transposed in registers; the edges go one int32 at a time.
#include "gptq_awq_repack.h"

#include <string.h>

#include "variants/transpose.h"

namespace bitline::BITLINE_ISA {
namespace {

constexpr int64_t kPrefetchTiles = 2;  // tiles of rows ahead: hardware prefetchers do not follow rows that lie far apart
constexpr int64_t kPrefetchRows = 16;

// Whether dst's rows may be written with non-temporal stores: a vector is a whole cache line.
bool stores_whole_lines(const uint32_t* dst, int64_t dst_stride) { return sizeof(Vec) == kCacheLine && aligned(dst, dst_stride); }

void prefetch_rows(const uint32_t* src, int64_t stride, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r) __builtin_prefetch(src + r * stride);
}

void prefetch_columns(const uint32_t* src, int64_t columns) {
  for (int64_t i = 0; i < columns; i += kCacheLine / 4) __builtin_prefetch(src + i);
}

// kNonTemporal: dst is not read again soon, and the caller fences.
template <bool kNonTemporal>
void transpose_tiles(const uint32_t* src, int64_t stride, int64_t rows, int64_t columns, uint32_t* dst, int64_t dst_stride) {
  constexpr int kTiles = kCacheLine / int(sizeof(Vec)), kRows = kTiles * kLanes;  // whole cache lines of dst
  const int64_t tiled_rows = rows / kRows * kRows, tiled_columns = columns / kLanes * kLanes;
  const bool non_temporal = kNonTemporal && aligned(dst, dst_stride);
  for (int64_t r = 0; r < tiled_rows; r += kRows) {
    for (int64_t c = 0; c < tiled_columns; c += kLanes) {
      const int64_t ahead = r + kPrefetchTiles * kLanes;
      if (ahead + kRows <= tiled_rows) prefetch_rows(src + ahead * stride + c, stride, kRows);
      Vec x[kTiles][kLanes];
      for (int t = 0; t < kTiles; ++t) {
        for (int i = 0; i < kLanes; ++i) x[t][i] = load(src + (r + t * kLanes + i) * stride + c);
        transpose_tile(x[t]);
      }
      for (int i = 0; i < kLanes; ++i)
        for (int t = 0; t < kTiles; ++t) store(dst + (c + i) * dst_stride + r + t * kLanes, x[t][i], non_temporal);
    }
  }
  for (int64_t c = 0; c < columns; ++c)
    for (int64_t r = c < tiled_columns ? tiled_rows : 0; r < rows; ++r) dst[c * dst_stride + r] = src[r * stride + c];
}

void transpose(const uint32_t* src, int64_t stride, int64_t rows, int64_t columns, uint32_t* dst, int64_t dst_stride) {
  transpose_tiles<true>(src, stride, rows, columns, dst, dst_stride);
  stream_fence();
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

typedef uint8_t Bytes __attribute__((vector_size(32)));
typedef uint32_t Int32s __attribute__((vector_size(32)));
typedef uint64_t Fields __attribute__((vector_size(32)));
typedef Bytes UnalignedBytes __attribute__((aligned(1), may_alias));  // GCC's memcpy moves 16 bytes, and a load then stalls

inline Bytes load_bytes(const void* p) { return *static_cast<const UnalignedBytes*>(p); }
inline void store_bytes(void* p, Bytes x) { *static_cast<UnalignedBytes*>(p) = x; }

// The 4 x 4 bytes of each 128-bit lane are transposed.
inline Bytes transpose_bytes(Bytes x) {
  return __builtin_shufflevector(x, x, 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15, 16, 20, 24, 28, 17, 21, 25, 29, 18,
                                 22, 26, 30, 19, 23, 27, 31);
}

// The 4 x 4 int32 that four vectors have in each 128-bit lane are transposed.
inline void transpose_int32s(Bytes (&x)[4]) {
  const Int32s x0 = Int32s(x[0]), x1 = Int32s(x[1]), x2 = Int32s(x[2]), x3 = Int32s(x[3]);
  const Int32s a = __builtin_shufflevector(x0, x1, 0, 8, 1, 9, 4, 12, 5, 13);
  const Int32s b = __builtin_shufflevector(x0, x1, 2, 10, 3, 11, 6, 14, 7, 15);
  const Int32s c = __builtin_shufflevector(x2, x3, 0, 8, 1, 9, 4, 12, 5, 13);
  const Int32s d = __builtin_shufflevector(x2, x3, 2, 10, 3, 11, 6, 14, 7, 15);
  x[0] = Bytes(__builtin_shufflevector(a, c, 0, 1, 8, 9, 4, 5, 12, 13));
  x[1] = Bytes(__builtin_shufflevector(a, c, 2, 3, 10, 11, 6, 7, 14, 15));
  x[2] = Bytes(__builtin_shufflevector(b, d, 0, 1, 8, 9, 4, 5, 12, 13));
  x[3] = Bytes(__builtin_shufflevector(b, d, 2, 3, 10, 11, 6, 7, 14, 15));
}

// Bits of each byte moved by `shift` to the left, or -shift to the right, as far as they stay under the mask.
inline Fields move_bits(Fields x, int shift, uint64_t mask) {
  return (shift < 0 ? x >> -shift : x << shift) & (mask * 0x0101010101010101u);
}

// A panel holds a row of 32 bytes for each column of K. A byte is a code of one output row, or those of two rows where they fit,
// so that a row of a panel, which is read at random, is as short as possible.
template <int kBits>
struct Panel {
  static constexpr int kPerByte = 8 / kBits, kPerInt32 = 32 / kBits, kHalves = kBits <= 4 ? 2 : 1, kColumns = 32 * kHalves;
  static constexpr uint64_t kMask = (1 << kBits) - 1;

  // An int32 of each column to kPerInt32 rows. Columns get an order of their own, which `join` undoes.
  static void split(const uint32_t* src, uint8_t* rows) {
    Bytes x[kHalves][4];
    for (int h = 0; h < kHalves; ++h) {
      for (int i = 0; i < 4; ++i) x[h][i] = transpose_bytes(load_bytes(src + (4 * h + i) * 8));
      transpose_int32s(x[h]);  // now byte i of each int32
    }
    for (int i = 0; i < 4; ++i) {
      for (int f = 0; f < kPerByte; ++f, rows += 32) {
        Fields codes = move_bits(Fields(x[0][i]), -f * kBits, kMask);
        if (kHalves == 2) codes |= move_bits(Fields(x[kHalves - 1][i]), 4 - f * kBits, kMask << 4);
        store_bytes(rows, Bytes(codes));
      }
    }
  }

  // The inverse, with the rows of any kPerInt32 columns of K.
  static void join(const uint8_t* panel, const int32_t* perm, uint32_t* dst) {
    Bytes x[kHalves][4];
    for (int i = 0; i < 4; ++i) {
      Fields fields[kHalves] = {};
      for (int f = 0; f < kPerByte; ++f) {
        const Fields row = Fields(load_bytes(panel + int64_t(*perm++) * 32));
        for (int h = 0; h < kHalves; ++h) fields[h] |= move_bits(row, f * kBits - 4 * h, kMask << (f * kBits));
      }
      for (int h = 0; h < kHalves; ++h) x[h][i] = Bytes(fields[h]);
    }
    for (int h = 0; h < kHalves; ++h) {
      transpose_int32s(x[h]);
      for (int i = 0; i < 4; ++i) store_bytes(dst + (4 * h + i) * 8, transpose_bytes(x[h][i]));
    }
  }
};

template <int kBits>
void permute(const uint32_t* src, int64_t stride, const int32_t* perm, int64_t k_packed, int64_t columns, uint8_t* panels,
             uint32_t* dst, int64_t dst_stride) {
  using P = Panel<kBits>;
  constexpr int64_t kRows = 32;  // int32 of each output row that are written at a time
  const int64_t panel_bytes = k_packed * P::kPerInt32 * 32;
  uint32_t edge[P::kColumns] = {};
  for (int64_t r = 0; r < k_packed; ++r) {
    for (int64_t c = 0; c < columns; c += P::kColumns) {
      const uint32_t* from = src + r * stride + c;
      if (columns - c < P::kColumns) from = static_cast<uint32_t*>(memcpy(edge, from, size_t(columns - c) * 4));
      else if (r + kPrefetchRows < k_packed) prefetch_columns(from + kPrefetchRows * stride, P::kColumns);
      P::split(from, panels + c / P::kColumns * panel_bytes + r * P::kPerInt32 * 32);
    }
  }
  for (int64_t c = 0; c < columns; c += P::kColumns) {
    const uint8_t* panel = panels + c / P::kColumns * panel_bytes;
    const int64_t width = columns - c < P::kColumns ? columns - c : P::kColumns;
    for (int64_t r = 0; r < k_packed; r += kRows) {
      alignas(64) uint32_t joined[kRows * P::kColumns];
      const int64_t rows = k_packed - r < kRows ? k_packed - r : kRows;
      for (int64_t i = 0; i < rows; ++i) P::join(panel, perm + (r + i) * P::kPerInt32, joined + i * P::kColumns);
      transpose_tiles<true>(joined, P::kColumns, rows, width, dst + c * dst_stride + r, dst_stride);
    }
  }
  stream_fence();
}

void gptq_permuted(const uint32_t* src, int64_t stride, const int32_t* perm, int bits, int64_t k_packed, int64_t columns,
                   uint8_t* panels, uint32_t* dst, int64_t dst_stride) {
  switch (bits) {
    case 1: return permute<1>(src, stride, perm, k_packed, columns, panels, dst, dst_stride);
    case 2: return permute<2>(src, stride, perm, k_packed, columns, panels, dst, dst_stride);
    case 4: return permute<4>(src, stride, perm, k_packed, columns, panels, dst, dst_stride);
    default: return permute<8>(src, stride, perm, k_packed, columns, panels, dst, dst_stride);
  }
}

}  // namespace

extern const RepackKernels repack_kernels = {transpose, transpose_tiles<false>, awq, gptq_permuted};

}  // namespace bitline::BITLINE_ISA
