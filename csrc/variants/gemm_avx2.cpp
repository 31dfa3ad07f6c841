// The same packed weights with AVX2: float32 products, eight rows to a vector, whatever the input's dtype.
#include "gemm_prepare.h"

#define INLINE inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 64")

namespace bitline::BITLINE_LEVEL {
namespace {

constexpr int kFew = 3;        // rows of x up to which codes are decoded for each of them, once for all of them
constexpr int kMostTile = 6;   // rows of x that are multiplied with a panel at once, two vectors of sums each
constexpr int kAhead = 1024;  // bytes of codes that are asked for ahead
constexpr int kMostRun = 512;  // columns of a group (native_cpu_pack.py cuts longer ones)

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

// Scales and offsets of eight rows of a group.
struct Affine {
  __m256 s, o;
};
INLINE Affine affine(const Call& c, int64_t block, int64_t g, int lane) {
  const Meta& w = *c.w;
  const int64_t at = (block * w.groups + g) * kRows + lane;
  int64_t coarse = 0;
  if (w.coarse_scales) coarse = (block * ((w.groups + w.coarse_ratio - 1) / w.coarse_ratio) + g / w.coarse_ratio) * kRows + lane;
  Affine a;
  a.s = stream(c.base + w.scales, w.scale_type, at, reinterpret_cast<const float*>(c.base + w.coarse_scales) + coarse);
  a.o = _mm256_setzero_ps();
  if (w.offset_type == kNone) return a;
  a.o = stream(c.base + w.offsets, w.offset_type, at, reinterpret_cast<const float*>(c.base + w.coarse_offsets) + coarse);
  if (w.offset_type == kZero) a.o = _mm256_sub_ps(_mm256_setzero_ps(), _mm256_mul_ps(a.s, a.o));
  return a;
}

// All of K for the MR rows of a call of few. V vectors of output rows at once, each with CHAINS sums for each row.
template <int BITS, bool INTEGER, int MR, int V, int CHAINS> void few_rows(const Call& c, int64_t block) {
  constexpr int step = step_of(BITS);
  const Meta& w = *c.w;
  const Values<BITS, INTEGER> values(c);
  const float* x = reinterpret_cast<const float*>(c.xp);
  const int64_t group_bytes = w.run * BITS * kRows / 8;
  float out[MR][kRows];
  for (int lane = 0; lane < kRows; lane += 8 * V) {
    __m256 total[MR][V], all[MR][V];
    UNROLL for (int m = 0; m < MR; ++m) UNROLL for (int i = 0; i < V; ++i) total[m][i] = all[m][i] = _mm256_setzero_ps();
    const uint8_t* p = c.base + w.codes + block * block_bytes(w);
    for (int64_t g = 0; g < w.groups; ++g, p += group_bytes) {
      if (g % kGroups == 0)
        UNROLL for (int m = 0; m < MR; ++m) UNROLL for (int i = 0; i < V; ++i)
          all[m][i] = _mm256_add_ps(all[m][i], total[m][i]), total[m][i] = _mm256_setzero_ps();
      __m256 acc[MR][V][CHAINS];
      UNROLL for (int m = 0; m < MR; ++m) UNROLL for (int i = 0; i < V; ++i) UNROLL for (int j = 0; j < CHAINS; ++j)
        acc[m][i][j] = _mm256_setzero_ps();
      const uint8_t* q = p;
      for (int64_t k = 0; k < w.run; k += step, q += step * BITS * kRows / 8) {
        const float* at = x + (g * w.run + k) * MR;
        for (int i = 0; lane == 0 && i < step * BITS * kRows / 8; i += 64)
          _mm_prefetch(reinterpret_cast<const char*>(q + kAhead + i), _MM_HINT_T0);
        UNROLL for (int j = 0; j < step; ++j) {
          UNROLL for (int i = 0; i < V; ++i) {
            const __m256 v = values.of(index<BITS>(q, lane + 8 * i, j));
            UNROLL for (int m = 0; m < MR; ++m)
              acc[m][i][j % CHAINS] = _mm256_fmadd_ps(v, _mm256_broadcast_ss(at + j * MR + m), acc[m][i][j % CHAINS]);
          }
        }
      }
      UNROLL for (int i = 0; i < V; ++i) {
        const Affine a = affine(c, block, g, lane + 8 * i);
        UNROLL for (int m = 0; m < MR; ++m) {
          UNROLL for (int j = 1; j < CHAINS; ++j) acc[m][i][0] = _mm256_add_ps(acc[m][i][0], acc[m][i][j]);
          total[m][i] = _mm256_fmadd_ps(a.s, acc[m][i][0], total[m][i]);
          if (w.offset_type != kNone) total[m][i] = _mm256_fmadd_ps(a.o, _mm256_broadcast_ss(c.sums + g * MR + m), total[m][i]);
        }
      }
    }
    UNROLL for (int m = 0; m < MR; ++m) UNROLL for (int i = 0; i < V; ++i)
      _mm256_storeu_ps(out[m] + lane + 8 * i, _mm256_add_ps(all[m][i], total[m][i]));
  }
  for (int m = 0; m < MR; ++m) finish(c, m, block, out[m]);
}

// total [MR][32] += a group's numbers [run][32] times MR rows of x, `stride` apart from one column to the next, scaled.
template <int MR> void panel_rows(const Call& c, int64_t block, int64_t g, const float* panel, const float* x, const float* sums,
                                  int64_t stride, float* total) {
  for (int lane = 0; lane < kRows; lane += 16) {
    __m256 acc[MR][2];
    UNROLL for (int m = 0; m < MR; ++m) acc[m][0] = acc[m][1] = _mm256_setzero_ps();
    for (int64_t k = 0; k < c.w->run; ++k) {
      const __m256 v0 = _mm256_load_ps(panel + k * kRows + lane), v1 = _mm256_load_ps(panel + k * kRows + lane + 8);
      UNROLL for (int m = 0; m < MR; ++m) {
        const __m256 b = _mm256_broadcast_ss(x + k * stride + m);
        acc[m][0] = _mm256_fmadd_ps(v0, b, acc[m][0]), acc[m][1] = _mm256_fmadd_ps(v1, b, acc[m][1]);
      }
    }
    UNROLL for (int i = 0; i < 2; ++i) {
      const Affine a = affine(c, block, g, lane + 8 * i);
      UNROLL for (int m = 0; m < MR; ++m) {
        float* at = total + m * kRows + lane + 8 * i;
        __m256 t = _mm256_fmadd_ps(a.s, acc[m][i], _mm256_load_ps(at));
        if (c.w->offset_type != kNone) t = _mm256_fmadd_ps(a.o, _mm256_broadcast_ss(sums + m), t);
        _mm256_store_ps(at, t);
      }
    }
  }
}

// One block, all tiles: each group is decoded once. total: room for 64 floats a row.
template <int BITS, bool INTEGER> void many_rows(const Call& c, int64_t block, float* total) {
  constexpr int step = step_of(BITS);
  const Meta& w = *c.w;
  const Values<BITS, INTEGER> values(c);
  alignas(64) float panel[kMostRun * kRows];
  const int64_t first = tile_start(c, c.first_tile) * kRows, last = tile_start(c, c.last_tile) * kRows;
  float* all = total + c.m * kRows;
  for (int64_t i = first; i < last; ++i) total[i] = all[i] = 0;
  const uint8_t* q = c.base + w.codes + block * block_bytes(w);
  for (int64_t g = 0; g < w.groups; ++g) {
    if (g % kGroups == 0)
      for (int64_t i = first; i < last; ++i) all[i] += total[i], total[i] = 0;
    for (int64_t k = 0; k < w.run; k += step, q += step * BITS * kRows / 8)
      UNROLL for (int j = 0; j < step; ++j) UNROLL for (int i = 0; i < kRows; i += 8)
        _mm256_store_ps(panel + (k + j) * kRows + i, values.of(index<BITS>(q, i, j)));
    for (int64_t t = c.first_tile; t < c.last_tile; ++t) {
      const int64_t start = tile_start(c, t), rows = tile_start(c, t + 1) - start;
      const float* x = reinterpret_cast<const float*>(c.xp) + start * c.words + g * w.run * rows;
      const float* sums = c.sums + start * w.groups + g * rows;
      for (int64_t r = 0; r < rows; r += kMostTile) {
        float* at = total + (start + r) * kRows;
        switch (rows - r) {
          case 1: panel_rows<1>(c, block, g, panel, x + r, sums + r, rows, at); break;
          case 2: panel_rows<2>(c, block, g, panel, x + r, sums + r, rows, at); break;
          case 3: panel_rows<3>(c, block, g, panel, x + r, sums + r, rows, at); break;
          case 4: panel_rows<4>(c, block, g, panel, x + r, sums + r, rows, at); break;
          case 5: panel_rows<5>(c, block, g, panel, x + r, sums + r, rows, at); break;
          default: panel_rows<6>(c, block, g, panel, x + r, sums + r, rows, at);
        }
      }
    }
  }
  for (int64_t row = first / kRows; row < last / kRows; ++row) {
    float out[kRows];
    for (int i = 0; i < kRows; ++i) out[i] = all[row * kRows + i] + total[row * kRows + i];
    finish(c, row, block, out);
  }
}

template <int BITS, bool INTEGER> void run(const Call& c, int64_t first, int64_t last, float* total) {
  const bool one = c.w->invariant;
  for (int64_t block = first; block < last; ++block) {
    if (c.wide) many_rows<BITS, INTEGER>(c, block, total);
    else if (c.m == 1) one ? few_rows<BITS, INTEGER, 1, 4, 1>(c, block) : few_rows<BITS, INTEGER, 1, 4, 2>(c, block);
    else if (c.m == 2) one ? few_rows<BITS, INTEGER, 2, 2, 1>(c, block) : few_rows<BITS, INTEGER, 2, 2, 2>(c, block);
    else few_rows<BITS, INTEGER, 3, 2, 1>(c, block);
  }
}

template <int BITS> void either(const Call& c, int64_t first, int64_t last, float* out) {
  c.w->integer ? run<BITS, true>(c, first, last, out) : run<BITS, false>(c, first, last, out);
}

void blocks(const Call& c, int64_t first, int64_t last, uint32_t*, float* out) {
  switch (c.w->width) {
    case 2: return either<2>(c, first, last, out);
    case 3: return either<3>(c, first, last, out);
    case 4: return either<4>(c, first, last, out);
    case 5: return either<5>(c, first, last, out);
    case 6: return either<6>(c, first, last, out);
    default: return either<8>(c, first, last, out);
  }
}

bool has(Mode mode) { return mode == kF32Mode; }

bool wide(const Call& c) { return c.m > kFew; }

}  // namespace

extern const GemmTable gemm = {blocks, prepare, range, has, wide};

}  // namespace bitline::BITLINE_LEVEL
