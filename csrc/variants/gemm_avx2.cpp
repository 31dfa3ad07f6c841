// The same packed weights with AVX2: float32 products, eight rows to a vector, whatever the input's dtype.
#include "gemm_prepare.h"

#define INLINE inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 64")

namespace bitline::BITLINE_LEVEL {
namespace {

constexpr int kMostTile = 3;  // rows of x at once: 4 vectors of sums each

INLINE __m256i load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
INLINE __m256i right(__m256i v, int by) { return _mm256_srli_epi32(v, by); }

// The codes of column k of a step for eight rows, as place() has them. `lane` is the first of the rows' 32-bit lanes; vectors of a
// block are 32 lanes apart.
template <int BITS> INLINE __m256i index(const uint8_t* p, int lane, int k) {
  const auto vector = [&](int i) { return load(p + 4 * (kRows * i + lane)); };
  __m256i code = _mm256_setzero_si256();
  UNROLL for (int bit = 0; bit < BITS;) {  // runs of neighbouring bits
    const Place at = place(BITS, k, bit);
    int run = 1;
    while (bit + run < BITS && place(BITS, k, bit + run).word == at.word && place(BITS, k, bit + run).bit == at.bit + run) ++run;
    const __m256i v = vector(at.word), moved = at.bit > bit ? right(v, at.bit - bit) : _mm256_slli_epi32(v, bit - at.bit);
    code = _mm256_or_si256(code, _mm256_and_si256(moved, _mm256_set1_epi32(((1 << run) - 1) << bit)));
    bit += run;
  }
  return code;
}

// Numbers from codes: arithmetic for integers, permutations for tables of 16, gathers for larger ones.
template <int BITS, bool INTEGER> struct Values {
  const float* table;
  __m256 low, high, center;
  explicit Values(const Call& c) : table(reinterpret_cast<const float*>(c.base + c.w->table32)) {
    center = _mm256_set1_ps(float(c.w->center));
    if constexpr (BITS == 4) low = _mm256_loadu_ps(table), high = _mm256_loadu_ps(table + 8);
  }
  INLINE __m256 of(__m256i code) const {
    if constexpr (INTEGER) return _mm256_sub_ps(_mm256_cvtepi32_ps(code), center);
    if constexpr (BITS == 4)
      return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, code), _mm256_permutevar8x32_ps(high, code),
                              _mm256_castsi256_ps(_mm256_slli_epi32(code, 28)));
    return _mm256_i32gather_ps(table, code, 4);
  }
};

INLINE __m256 stream(const uint8_t* p, int64_t type, int64_t i, const float* coarse) {
  const auto bytes = [&] { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + i)); };
  switch (type) {
    case kF32: return _mm256_loadu_ps(reinterpret_cast<const float*>(p) + i);
    case kBF16:
      return _mm256_castsi256_ps(_mm256_slli_epi32(
          _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 2 * i))), 16));
    case kF16: return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 2 * i)));
    case kU8: return _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes())), _mm256_loadu_ps(coarse));
    case kI8: return _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes())), _mm256_loadu_ps(coarse));
    case kZero: return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes()));
    default: {  // E4M3: exponent and mantissa moved to float32's place are 2**-120 times the value
      const __m256i b = _mm256_cvtepu8_epi32(bytes());
      const __m256i at = _mm256_or_si256(_mm256_slli_epi32(_mm256_and_si256(b, _mm256_set1_epi32(127)), 20),
                                         _mm256_slli_epi32(_mm256_and_si256(b, _mm256_set1_epi32(128)), 24));
      return _mm256_mul_ps(_mm256_mul_ps(_mm256_castsi256_ps(at), _mm256_set1_ps(0x1p120f)), _mm256_loadu_ps(coarse));
    }
  }
}

uint16_t to_bf16(float v) {
  const uint32_t b = bits_of(v);
  if (v != v) return uint16_t(b >> 16 | 0x40);
  return uint16_t((b + 0x7fff + ((b >> 16) & 1)) >> 16);
}

// Write a row of a block: scaled by the row's own scale, bias added, rounded once.
void finish(const Call& c, int64_t row, int64_t block, const float* sums) {
  const int64_t n = c.w->n, first = block * kRows, count = n - first < kRows ? n - first : kRows;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t col = first + i, at = row * n + col;
    float v = c.row_scale ? sums[i] * c.row_scale[row] : sums[i];
    if (c.dtype == kX32) {
      if (c.bias) v += static_cast<const float*>(c.bias)[col];
      static_cast<float*>(c.y)[at] = v;
    } else if (c.dtype == kX16) {
      if (c.bias) v += _cvtsh_ss(static_cast<const uint16_t*>(c.bias)[col]);
      static_cast<uint16_t*>(c.y)[at] = _cvtss_sh(v, _MM_FROUND_TO_NEAREST_INT);
    } else {
      if (c.bias) v += from_bits(uint32_t(static_cast<const uint16_t*>(c.bias)[col]) << 16);
      static_cast<uint16_t*>(c.y)[at] = to_bf16(v);
    }
  }
}

// All of K for MR rows of a tile of `stride` rows.
template <int BITS, bool INTEGER, int MR, int CHAINS>
void rows_of_block(const Call& c, int64_t block, int64_t row, int64_t stride, const uint32_t* words, const float* sums) {
  constexpr int step = step_of(BITS);
  const Meta& w = *c.w;
  const Values<BITS, INTEGER> values(c);
  const float* x = reinterpret_cast<const float*>(words);
  const int64_t cells = (w.groups + w.coarse_ratio - 1) / w.coarse_ratio;
  const int64_t group_bytes = w.run * BITS * kRows / 8;
  float out[MR][kRows];
  for (int half = 0; half < 2; ++half) {  // 16 rows: two vectors, so that sums stay in registers
    __m256 total[MR][2], all[MR][2];
    UNROLL for (int m = 0; m < MR; ++m) total[m][0] = total[m][1] = all[m][0] = all[m][1] = _mm256_setzero_ps();
    const uint8_t* p = c.base + w.codes + block * block_bytes(w);
    for (int64_t g = 0; g < w.groups; ++g, p += group_bytes) {
      if (g % kGroups == 0)
        UNROLL for (int m = 0; m < MR; ++m) UNROLL for (int i = 0; i < 2; ++i)
          all[m][i] = _mm256_add_ps(all[m][i], total[m][i]), total[m][i] = _mm256_setzero_ps();
      __m256 acc[MR][2][CHAINS];
      UNROLL for (int m = 0; m < MR; ++m) UNROLL for (int j = 0; j < CHAINS; ++j)
        acc[m][0][j] = acc[m][1][j] = _mm256_setzero_ps();
      const uint8_t* q = p;
      for (int64_t k = 0; k < w.run; k += step, q += step * BITS * kRows / 8) {
        const float* at = x + (g * w.run + k) * stride;
        UNROLL for (int j = 0; j < step; ++j) {
          const __m256 v0 = values.of(index<BITS>(q, 16 * half, j)), v1 = values.of(index<BITS>(q, 16 * half + 8, j));
          UNROLL for (int m = 0; m < MR; ++m) {
            const __m256 b = _mm256_broadcast_ss(at + j * stride + m);
            acc[m][0][j % CHAINS] = _mm256_fmadd_ps(v0, b, acc[m][0][j % CHAINS]);
            acc[m][1][j % CHAINS] = _mm256_fmadd_ps(v1, b, acc[m][1][j % CHAINS]);
          }
        }
      }
      UNROLL for (int i = 0; i < 2; ++i) {
        const int64_t cell = (block * w.groups + g) * kRows + 16 * half + 8 * i;
        const int64_t coarse = (block * cells + g / w.coarse_ratio) * kRows + 16 * half + 8 * i;
        const __m256 s = stream(c.base + w.scales, w.scale_type, cell, reinterpret_cast<const float*>(c.base + w.coarse_scales) + coarse);
        UNROLL for (int m = 0; m < MR; ++m) {
          UNROLL for (int half_of = CHAINS / 2; half_of > 0; half_of /= 2)
            UNROLL for (int j = 0; j < half_of; ++j) acc[m][i][j] = _mm256_add_ps(acc[m][i][j], acc[m][i][j + half_of]);
          total[m][i] = _mm256_fmadd_ps(s, acc[m][i][0], total[m][i]);
        }
        if (w.offset_type != kNone) {
          __m256 o = stream(c.base + w.offsets, w.offset_type, cell, reinterpret_cast<const float*>(c.base + w.coarse_offsets) + coarse);
          if (w.offset_type == kZero) o = _mm256_sub_ps(_mm256_setzero_ps(), _mm256_mul_ps(s, o));
          UNROLL for (int m = 0; m < MR; ++m)
            total[m][i] = _mm256_fmadd_ps(o, _mm256_broadcast_ss(sums + g * stride + m), total[m][i]);
        }
      }
    }
    UNROLL for (int m = 0; m < MR; ++m) UNROLL for (int i = 0; i < 2; ++i)
      _mm256_storeu_ps(out[m] + 16 * half + 8 * i, _mm256_add_ps(all[m][i], total[m][i]));
  }
  for (int m = 0; m < MR; ++m) finish(c, row + m, block, out[m]);
}

template <int BITS, bool INTEGER> void run(const Call& c, int64_t first, int64_t last) {
  for (int64_t block = first; block < last; ++block)
    for (int64_t t = c.first_tile; t < c.last_tile; ++t) {
      const int64_t start = tile_start(c, t), rows = tile_start(c, t + 1) - start;
      for (int64_t r = 0; r < rows; r += kMostTile) {
        const uint32_t* x = c.xp + start * c.words + r;
        const float* sums = c.sums + start * c.w->groups + r;
        switch (rows - r) {
#define BITLINE_ROWS(MR, CHAINS) \
          c.w->invariant ? rows_of_block<BITS, INTEGER, MR, 1>(c, block, start + r, rows, x, sums) \
                         : rows_of_block<BITS, INTEGER, MR, CHAINS>(c, block, start + r, rows, x, sums)
          case 1: BITLINE_ROWS(1, 4); break;
          case 2: BITLINE_ROWS(2, 2); break;
          default: BITLINE_ROWS(3, 1);
#undef BITLINE_ROWS
        }
      }
    }
}

template <int BITS> void either(const Call& c, int64_t first, int64_t last) {
  c.w->integer ? run<BITS, true>(c, first, last) : run<BITS, false>(c, first, last);
}

void blocks(const Call& c, int64_t first, int64_t last, uint32_t*, float*) {
  switch (c.w->width) {
    case 2: return either<2>(c, first, last);
    case 3: return either<3>(c, first, last);
    case 4: return either<4>(c, first, last);
    case 5: return either<5>(c, first, last);
    case 6: return either<6>(c, first, last);
    default: return either<8>(c, first, last);
  }
}

bool has(Mode mode) { return mode == kF32Mode; }

bool wide(const Call&) { return false; }

}  // namespace

extern const GemmTable gemm = {blocks, prepare, range, has, wide};

}  // namespace bitline::BITLINE_LEVEL
