// The linear kernels with AVX2: the same packed weights, float32 FMA on eight output rows per vector, for every dtype of x.
#include "gemm_pack_activations.h"

#define INLINE inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 64")

namespace bitline::BITLINE_ISA {
namespace {

constexpr int kMaxGemvM = 3;            // up to here codes are dequantized in registers, once for all rows of x
constexpr int kMaxMR = 6;               // rows of x of a panel tile, two vectors of accumulators each
constexpr int kPrefetchDistance = 1024; // bytes of codes
constexpr int kMaxGroupK = 512;         // columns of a group; kernels/cpu/packed_weight.py splits longer ones

INLINE __m256i load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
INLINE __m256i shift_right(__m256i v, int by) { return _mm256_srli_epi32(v, by); }

// The codes of column k of a K block for eight rows, gathered bit run by bit run from where bit_position() has them. `lane`:
// the first row's 32-bit lane.
template <int BITS> INLINE __m256i unpack_codes(const uint8_t* p, int lane, int k) {
  const auto vector = [&](int i) { return load(p + 4 * (kBlockN * i + lane)); };
  __m256i code = _mm256_setzero_si256();
  UNROLL for (int bit = 0; bit < BITS;) {
    const BitPosition at = bit_position(BITS, k, bit);
    int run = 1;
    while (bit + run < BITS && bit_position(BITS, k, bit + run).index == at.index &&
           bit_position(BITS, k, bit + run).bit == at.bit + run)
      ++run;
    const __m256i v = vector(at.index), moved = at.bit > bit ? shift_right(v, at.bit - bit) : _mm256_slli_epi32(v, bit - at.bit);
    code = _mm256_or_si256(code, _mm256_and_si256(moved, _mm256_set1_epi32(((1 << run) - 1) << bit)));
    bit += run;
  }
  return code;
}

// Codes to float32: arithmetic for integers, permutations for tables of 16, gathers for larger ones.
template <int BITS, bool INTEGER> struct Dequantizer {
  const float* lut;
  __m256 low, high, zero_point;
  explicit Dequantizer(const GemmCall& c) : lut(reinterpret_cast<const float*>(c.base + c.w->lut_f32)) {
    zero_point = _mm256_set1_ps(float(c.w->implicit_zero));
    if constexpr (BITS == 4) low = _mm256_loadu_ps(lut), high = _mm256_loadu_ps(lut + 8);
  }
  INLINE __m256 operator()(__m256i code) const {
    if constexpr (INTEGER) return _mm256_sub_ps(_mm256_cvtepi32_ps(code), zero_point);
    if constexpr (BITS == 4)
      return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, code), _mm256_permutevar8x32_ps(high, code),
                              _mm256_castsi256_ps(_mm256_slli_epi32(code, 28)));
    return _mm256_i32gather_ps(lut, code, 4);
  }
};

// Eight scales or offsets from element i on as float32. super_scales: of the same rows, where the type has a second level.
INLINE __m256 load_scales(const uint8_t* p, int64_t type, int64_t i, const float* super_scales) {
  const auto bytes = [&] { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + i)); };
  switch (type) {
    case kF32: return _mm256_loadu_ps(reinterpret_cast<const float*>(p) + i);
    case kBF16:
      return _mm256_castsi256_ps(_mm256_slli_epi32(
          _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 2 * i))), 16));
    case kF16: return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 2 * i)));
    case kU8: return _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes())), _mm256_loadu_ps(super_scales));
    case kI8: return _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes())), _mm256_loadu_ps(super_scales));
    case kZeroPoint: return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes()));
    default: {  // E4M3: its exponent and mantissa at float32's bit positions are 2**-120 times the value
      const __m256i b = _mm256_cvtepu8_epi32(bytes());
      const __m256i bits = _mm256_or_si256(_mm256_slli_epi32(_mm256_and_si256(b, _mm256_set1_epi32(127)), 20),
                                           _mm256_slli_epi32(_mm256_and_si256(b, _mm256_set1_epi32(128)), 24));
      return _mm256_mul_ps(_mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(0x1p120f)), _mm256_loadu_ps(super_scales));
    }
  }
}

uint16_t to_bf16(float v) {
  const uint32_t b = bits_of(v);
  if (v != v) return uint16_t(b >> 16 | 0x40);
  return uint16_t((b + 0x7fff + ((b >> 16) & 1)) >> 16);
}

// 32 columns of a row of y: activation scale, bias, one rounding, store.
void epilogue(const GemmCall& c, int64_t row, int64_t block, const float* acc) {
  const int64_t n = c.w->n, first = block * kBlockN, count = n - first < kBlockN ? n - first : kBlockN;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t col = first + i, at = row * n + col;
    float v = c.act_scale ? acc[i] * c.act_scale[row] : acc[i];
    if (c.dtype == kFloat32) {
      if (c.bias) v += static_cast<const float*>(c.bias)[col];
      static_cast<float*>(c.y)[at] = v;
    } else if (c.dtype == kFloat16) {
      if (c.bias) v += _cvtsh_ss(static_cast<const uint16_t*>(c.bias)[col]);
      static_cast<uint16_t*>(c.y)[at] = _cvtss_sh(v, _MM_FROUND_TO_NEAREST_INT);
    } else {
      if (c.bias) v += from_bits(uint32_t(static_cast<const uint16_t*>(c.bias)[col]) << 16);
      static_cast<uint16_t*>(c.y)[at] = to_bf16(v);
    }
  }
}

// Of eight rows of a group, whose share of y is scale * sum(code * x) + offset * sum(x).
struct ScaleOffset {
  __m256 scale, offset;
};
INLINE ScaleOffset scale_offset(const GemmCall& c, int64_t block, int64_t g, int lane) {
  const PackedHeader& w = *c.w;
  const int64_t at = (block * w.num_groups + g) * kBlockN + lane;
  int64_t super = 0;
  if (w.super_scales) {
    const int64_t per = w.groups_per_super_scale;
    super = (block * ((w.num_groups + per - 1) / per) + g / per) * kBlockN + lane;
  }
  ScaleOffset a;
  a.scale = load_scales(c.base + w.scales, w.scale_type, at, reinterpret_cast<const float*>(c.base + w.super_scales) + super);
  a.offset = _mm256_setzero_ps();
  if (w.offset_type == kNone) return a;
  a.offset = load_scales(c.base + w.offsets, w.offset_type, at, reinterpret_cast<const float*>(c.base + w.super_offsets) + super);
  if (w.offset_type == kZeroPoint) a.offset = _mm256_sub_ps(_mm256_setzero_ps(), _mm256_mul_ps(a.scale, a.offset));
  return a;
}

// One N block, all of K, the MR rows of a call of small M: V vectors of output rows at once, each with MR accumulators of CHAINS
// independent ones.
template <int BITS, bool INTEGER, int MR, int V, int CHAINS> void gemv(const GemmCall& c, int64_t block) {
  constexpr int columns = k_block_of(BITS), k_block_bytes = columns * BITS * kBlockN / 8;
  const PackedHeader& w = *c.w;
  const Dequantizer<BITS, INTEGER> dequantize(c);
  const float* x = reinterpret_cast<const float*>(c.x_packed);
  const int64_t group_bytes = w.group_k * BITS * kBlockN / 8;
  float out[MR][kBlockN];
  for (int lane = 0; lane < kBlockN; lane += 8 * V) {
    __m256 inner[MR][V], outer[MR][V];
    UNROLL for (int m = 0; m < MR; ++m) UNROLL for (int i = 0; i < V; ++i) inner[m][i] = outer[m][i] = _mm256_setzero_ps();
    const uint8_t* p = c.base + w.codes + block * n_block_bytes(w);
    for (int64_t g = 0; g < w.num_groups; ++g, p += group_bytes) {
      if (g % kPromoteGroups == 0)
        UNROLL for (int m = 0; m < MR; ++m) UNROLL for (int i = 0; i < V; ++i)
          outer[m][i] = _mm256_add_ps(outer[m][i], inner[m][i]), inner[m][i] = _mm256_setzero_ps();
      __m256 acc[MR][V][CHAINS];
      UNROLL for (int m = 0; m < MR; ++m) UNROLL for (int i = 0; i < V; ++i) UNROLL for (int j = 0; j < CHAINS; ++j)
        acc[m][i][j] = _mm256_setzero_ps();
      const uint8_t* q = p;
      for (int64_t k = 0; k < w.group_k; k += columns, q += k_block_bytes) {
        const float* xk = x + (g * w.group_k + k) * MR;
        for (int i = 0; lane == 0 && i < k_block_bytes; i += 64)
          _mm_prefetch(reinterpret_cast<const char*>(q + kPrefetchDistance + i), _MM_HINT_T0);
        UNROLL for (int j = 0; j < columns; ++j) {
          UNROLL for (int i = 0; i < V; ++i) {
            const __m256 v = dequantize(unpack_codes<BITS>(q, lane + 8 * i, j));
            UNROLL for (int m = 0; m < MR; ++m)
              acc[m][i][j % CHAINS] = _mm256_fmadd_ps(v, _mm256_broadcast_ss(xk + j * MR + m), acc[m][i][j % CHAINS]);
          }
        }
      }
      UNROLL for (int i = 0; i < V; ++i) {
        const ScaleOffset a = scale_offset(c, block, g, lane + 8 * i);
        UNROLL for (int m = 0; m < MR; ++m) {
          UNROLL for (int j = 1; j < CHAINS; ++j) acc[m][i][0] = _mm256_add_ps(acc[m][i][0], acc[m][i][j]);
          inner[m][i] = _mm256_fmadd_ps(a.scale, acc[m][i][0], inner[m][i]);
          if (w.offset_type != kNone)
            inner[m][i] = _mm256_fmadd_ps(a.offset, _mm256_broadcast_ss(c.x_group_sums + g * MR + m), inner[m][i]);
        }
      }
    }
    UNROLL for (int m = 0; m < MR; ++m) UNROLL for (int i = 0; i < V; ++i)
      _mm256_storeu_ps(out[m] + lane + 8 * i, _mm256_add_ps(outer[m][i], inner[m][i]));
  }
  for (int m = 0; m < MR; ++m) epilogue(c, m, block, out[m]);
}

// inner [MR][32] += a group's panel [group_k][32] times MR rows of x, scaled. x_stride: from one column of x to the next.
template <int MR> void panel_tile(const GemmCall& c, int64_t block, int64_t g, const float* panel, const float* x,
                                  const float* x_group_sums, int64_t x_stride, float* inner) {
  for (int lane = 0; lane < kBlockN; lane += 16) {
    __m256 acc[MR][2];
    UNROLL for (int m = 0; m < MR; ++m) acc[m][0] = acc[m][1] = _mm256_setzero_ps();
    for (int64_t k = 0; k < c.w->group_k; ++k) {
      const __m256 v0 = _mm256_load_ps(panel + k * kBlockN + lane), v1 = _mm256_load_ps(panel + k * kBlockN + lane + 8);
      UNROLL for (int m = 0; m < MR; ++m) {
        const __m256 b = _mm256_broadcast_ss(x + k * x_stride + m);
        acc[m][0] = _mm256_fmadd_ps(v0, b, acc[m][0]), acc[m][1] = _mm256_fmadd_ps(v1, b, acc[m][1]);
      }
    }
    UNROLL for (int i = 0; i < 2; ++i) {
      const ScaleOffset a = scale_offset(c, block, g, lane + 8 * i);
      UNROLL for (int m = 0; m < MR; ++m) {
        float* at = inner + m * kBlockN + lane + 8 * i;
        __m256 t = _mm256_fmadd_ps(a.scale, acc[m][i], _mm256_load_ps(at));
        if (c.w->offset_type != kNone) t = _mm256_fmadd_ps(a.offset, _mm256_broadcast_ss(x_group_sums + m), t);
        _mm256_store_ps(at, t);
      }
    }
  }
}

// One N block, all M tiles: each group is dequantized into a panel once. inner: 64 floats per row, the second half for the outer
// accumulators.
template <int BITS, bool INTEGER> void panel_gemm(const GemmCall& c, int64_t block, float* inner) {
  constexpr int columns = k_block_of(BITS), k_block_bytes = columns * BITS * kBlockN / 8;
  const PackedHeader& w = *c.w;
  const Dequantizer<BITS, INTEGER> dequantize(c);
  alignas(64) float panel[kMaxGroupK * kBlockN];
  const int64_t first = m_tile_start(c, c.m_tile_begin) * kBlockN, last = m_tile_start(c, c.m_tile_end) * kBlockN;
  float* outer = inner + c.m * kBlockN;
  for (int64_t i = first; i < last; ++i) inner[i] = outer[i] = 0;
  const uint8_t* q = c.base + w.codes + block * n_block_bytes(w);
  for (int64_t g = 0; g < w.num_groups; ++g) {
    if (g % kPromoteGroups == 0)
      for (int64_t i = first; i < last; ++i) outer[i] += inner[i], inner[i] = 0;
    for (int64_t k = 0; k < w.group_k; k += columns, q += k_block_bytes)
      UNROLL for (int j = 0; j < columns; ++j) UNROLL for (int i = 0; i < kBlockN; i += 8)
        _mm256_store_ps(panel + (k + j) * kBlockN + i, dequantize(unpack_codes<BITS>(q, i, j)));
    for (int64_t t = c.m_tile_begin; t < c.m_tile_end; ++t) {
      const int64_t start = m_tile_start(c, t), rows = m_tile_start(c, t + 1) - start;
      const float* x = reinterpret_cast<const float*>(c.x_packed) + start * c.row_int32 + g * w.group_k * rows;
      const float* x_group_sums = c.x_group_sums + start * w.num_groups + g * rows;
      for (int64_t r = 0; r < rows; r += kMaxMR) {
        float* at = inner + (start + r) * kBlockN;
        switch (rows - r) {
          case 1: panel_tile<1>(c, block, g, panel, x + r, x_group_sums + r, rows, at); break;
          case 2: panel_tile<2>(c, block, g, panel, x + r, x_group_sums + r, rows, at); break;
          case 3: panel_tile<3>(c, block, g, panel, x + r, x_group_sums + r, rows, at); break;
          case 4: panel_tile<4>(c, block, g, panel, x + r, x_group_sums + r, rows, at); break;
          case 5: panel_tile<5>(c, block, g, panel, x + r, x_group_sums + r, rows, at); break;
          default: panel_tile<6>(c, block, g, panel, x + r, x_group_sums + r, rows, at);
        }
      }
    }
  }
  for (int64_t row = first / kBlockN; row < last / kBlockN; ++row) {
    float out[kBlockN];
    for (int i = 0; i < kBlockN; ++i) out[i] = outer[row * kBlockN + i] + inner[row * kBlockN + i];
    epilogue(c, row, block, out);
  }
}

template <int BITS, bool INTEGER> void compute_blocks_as(const GemmCall& c, int64_t first, int64_t last, float* acc) {
  const bool one_chain = c.w->batch_invariant;
  for (int64_t block = first; block < last; ++block) {
    if (c.strategy == kPanel) panel_gemm<BITS, INTEGER>(c, block, acc);
    else if (c.m == 1) one_chain ? gemv<BITS, INTEGER, 1, 4, 1>(c, block) : gemv<BITS, INTEGER, 1, 4, 2>(c, block);
    else if (c.m == 2) one_chain ? gemv<BITS, INTEGER, 2, 2, 1>(c, block) : gemv<BITS, INTEGER, 2, 2, 2>(c, block);
    else gemv<BITS, INTEGER, 3, 2, 1>(c, block);
  }
}

template <int BITS> void compute_blocks_of(const GemmCall& c, int64_t first, int64_t last, float* acc) {
  c.w->is_integer ? compute_blocks_as<BITS, true>(c, first, last, acc) : compute_blocks_as<BITS, false>(c, first, last, acc);
}

void compute_blocks(const GemmCall& c, int64_t first, int64_t last, uint32_t*, float* acc) {
  with_bits(c.w->bits, [&]<int BITS>() { compute_blocks_of<BITS>(c, first, last, acc); });
}

bool supports(ComputeType compute) { return compute == kComputeF32; }

void plan(GemmCall& c) {
  c.strategy = c.m > kMaxGemvM ? kPanel : kGemv;
  c.row_int32 = c.w->k_packed;
}

}  // namespace

extern const GemmKernels gemm_kernels = {compute_blocks, pack_activations, min_max, supports, plan};

}  // namespace bitline::BITLINE_ISA
