// The linear kernels with AVX2: the same packed weights, float32 FMA on eight output rows per vector, for every dtype of x.
#include "gemm_int8_slices.h"

namespace bitline::BITLINE_ISA {
namespace {

constexpr int kMaxSlicesM = kWideDot ? kMaxTileM : 2;  // of weight-only layers
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

// How codes become float32: arithmetic for integers and E4M3, permutations for tables of 16, gathers for other tables.
enum CodeKind { kInteger, kTable, kE4M3 };

// Whether a weight's table is E4M3's.
bool is_e4m3(const GemmCall& c) {
  const float* lut = reinterpret_cast<const float*>(c.base + c.w->lut_f32);
  return c.w->bits == 8 && lut[1] == 0x1p-9f && lut[8] == 0x1p-6f && lut[0x7e] == 448 && lut[0xfe] == -448;
}

template <int BITS, CodeKind KIND> struct Dequantizer {
  const float* lut;
  __m256 low, high, zero_point;
  __m256i nan_codes = _mm256_setzero_si256();  // kE4M3: bytes of all ones where one has been
  explicit Dequantizer(const GemmCall& c) : lut(reinterpret_cast<const float*>(c.base + c.w->lut_f32)) {
    zero_point = _mm256_set1_ps(float(c.w->implicit_zero));
    if constexpr (BITS == 4) low = _mm256_loadu_ps(lut), high = _mm256_loadu_ps(lut + 8);
  }
  // Column k of a K block at p, rows from `lane` on.
  INLINE __m256 operator()(const uint8_t* p, int lane, int k) {
    if constexpr (KIND == kE4M3) {
      const __m256i nan = _mm256_set1_epi8(0x7f);
      if (k == 0)
        nan_codes = _mm256_or_si256(nan_codes, _mm256_cmpeq_epi8(_mm256_and_si256(load(p + 4 * lane), nan), nan));
      // Exponent and mantissa at float32's bit positions are 2**-120 times the value. NaN codes become 480.
      const int bit = bit_position(8, k, 0).bit;
      const __m256i sign_extended = _mm256_srai_epi32(_mm256_slli_epi32(load(p + 4 * lane), 24 - bit), 4);
      const __m256i bits = _mm256_and_si256(sign_extended, _mm256_set1_epi32(int(0x87f00000)));
      return _mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(0x1p120f));
    }
    const __m256i code = unpack_codes<BITS>(p, lane, k);
    if constexpr (KIND == kInteger) return _mm256_sub_ps(_mm256_cvtepi32_ps(code), zero_point);
    if constexpr (BITS == 4)
      return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, code), _mm256_permutevar8x32_ps(high, code),
                              _mm256_castsi256_ps(_mm256_slli_epi32(code, 28)));
    return _mm256_i32gather_ps(lut, code, 4);
  }
  bool found_nan() const { return KIND == kE4M3 && !_mm256_testz_si256(nan_codes, nan_codes); }
};

// One N block, all of K, the MR rows of a call of small M: V vectors of output rows at once, each with MR accumulators of CHAINS
// independent ones. False: a NaN code was read as a number, y is not written.
template <int BITS, CodeKind KIND, int MR, int V, int CHAINS> bool gemv(const GemmCall& c, int64_t block) {
  constexpr int columns = k_block_of(BITS), k_block_bytes = columns * BITS * kBlockN / 8;
  const PackedHeader& w = *c.w;
  Dequantizer<BITS, KIND> dequantize(c);
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
            const __m256 v = dequantize(q, lane + 8 * i, j);
            UNROLL for (int m = 0; m < MR; ++m)
              acc[m][i][j % CHAINS] = _mm256_fmadd_ps(v, _mm256_broadcast_ss(xk + j * MR + m), acc[m][i][j % CHAINS]);
          }
        }
      }
      const ScaleRow scale_row(c, block, g);
      UNROLL for (int i = 0; i < V; ++i) {
        const ScaleOffset a = scale_row.at(lane + 8 * i);
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
  if (dequantize.found_nan()) return false;
  for (int m = 0; m < MR; ++m) epilogue(c, m, block, out[m]);
  return true;
}

// inner [MR][32] += a group's panel [group_k][32] times MR rows of x, scaled. x_stride: from one column of x to the next.
template <int MR> void panel_tile(const GemmCall& c, int64_t block, int64_t g, const float* panel, const float* x,
                                  const float* x_group_sums, int64_t x_stride, float* inner) {
  const ScaleRow scale_row(c, block, g);
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
      const ScaleOffset a = scale_row.at(lane + 8 * i);
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
// accumulators. False as gemv's.
template <int BITS, CodeKind KIND> bool panel_gemm(const GemmCall& c, int64_t block, float* inner) {
  constexpr int columns = k_block_of(BITS), k_block_bytes = columns * BITS * kBlockN / 8;
  const PackedHeader& w = *c.w;
  Dequantizer<BITS, KIND> dequantize(c);
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
        _mm256_store_ps(panel + (k + j) * kBlockN + i, dequantize(q, i, j));
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
  if (dequantize.found_nan()) return false;
  for (int64_t row = first / kBlockN; row < last / kBlockN; ++row) {
    float out[kBlockN];
    for (int i = 0; i < kBlockN; ++i) out[i] = outer[row * kBlockN + i] + inner[row * kBlockN + i];
    epilogue(c, row, block, out);
  }
  return true;
}

template <int BITS, CodeKind KIND> bool compute_block(const GemmCall& c, int64_t block, float* acc) {
  const bool one_chain = c.w->batch_invariant;
  if (c.strategy == kPanel) return panel_gemm<BITS, KIND>(c, block, acc);
  if (c.m == 1) return one_chain ? gemv<BITS, KIND, 1, 4, 1>(c, block) : gemv<BITS, KIND, 1, 4, 2>(c, block);
  if (c.m == 2) return one_chain ? gemv<BITS, KIND, 2, 2, 1>(c, block) : gemv<BITS, KIND, 2, 2, 2>(c, block);
  return gemv<BITS, KIND, 3, 2, 1>(c, block);
}

void compute_blocks_e4m3(const GemmCall& c, int64_t first, int64_t last, float* acc) {
  for (int64_t block = first; block < last; ++block)
    if (!compute_block<8, kE4M3>(c, block, acc)) compute_block<8, kTable>(c, block, acc);
}

template <int BITS> void compute_blocks_of(const GemmCall& c, int64_t first, int64_t last, float* acc) {
  for (int64_t block = first; block < last; ++block)
    c.w->is_integer ? compute_block<BITS, kInteger>(c, block, acc) : compute_block<BITS, kTable>(c, block, acc);
}

void compute_blocks(const GemmCall& c, int64_t first, int64_t last, uint32_t*, float* acc) {
  if (c.strategy == kInt8Slices) return slices_blocks(c, first, last);
  if (!c.w->is_integer && is_e4m3(c)) return compute_blocks_e4m3(c, first, last, acc);
  with_bits(c.w->bits, [&]<int BITS>() { compute_blocks_of<BITS>(c, first, last, acc); });
}

bool supports(ComputeType compute) { return compute == kComputeF32; }

// A table of 16 values as small integers times a unit; false where it has none.
bool table_as_integers(const float* lut, SlicedCall& s) {
  for (float unit = 1; unit >= 0.5f; unit /= 2) {
    float low = lut[0], high = lut[0];
    bool whole = true;
    for (int i = 0; i < 16; ++i) {
      whole &= __builtin_rintf(lut[i] / unit) * unit == lut[i];
      low = lut[i] < low ? lut[i] : low, high = lut[i] > high ? lut[i] : high;
    }
    if (!whole || high - low > kMaxTableCode * unit) continue;
    for (int i = 0; i < 16; ++i) s.table[i] = uint8_t((lut[i] - low) / unit);
    s.code_zero = int32_t(-low / unit), s.code_unit = unit;
    return true;
  }
  return false;
}

// Whether W's codes are integers that the slices' kernels multiply.
bool codes_as_integers(const GemmCall& c, SlicedCall& s) {
  const PackedHeader& w = *c.w;
  s.code_zero = int32_t(w.implicit_zero), s.code_unit = 1;
  return w.is_integer || (w.bits == 4 && table_as_integers(reinterpret_cast<const float*>(c.base + w.lut_f32), s));
}

// Digits of x: 14 bits and the sign below the largest element of a group for bfloat16, of which codes of 8 bits take three, 22
// bits for float16, 30 for float32. int8 activations are one digit, or two where digits have 7 bits.
int slice_count(const GemmCall& c, bool int8) {
  const bool short_digits = slice_bits(int(c.w->bits)) < 8;
  if (int8) return short_digits ? 2 : 1;
  if (c.w->act_quant != kActNone || c.dtype == kFloat16) return 3;
  return c.dtype == kFloat32 ? 4 : short_digits ? 3 : 2;
}

bool plan_slices(GemmCall& c) {
  const PackedHeader& w = *c.w;
  const bool int8 = w.act_quant == kActInt8 && w.is_integer && (w.bits == 4 || w.bits == 8);
  if (w.batch_invariant || (!int8 && c.m > kMaxSlicesM) || !codes_as_integers(c, c.slices)) return false;
  if (!int8 && w.act_quant == kActNone && !has_fixed_point_range(c.x, c.m * w.k, c.dtype)) return false;
  c.slices.count = slice_count(c, int8), c.slices.x_is_int8 = int8;
  c.strategy = kInt8Slices, c.row_int32 = w.k_packed / 4 * c.slices.count;
  return true;
}

void plan(GemmCall& c) {
  if (plan_slices(c)) return;
  c.strategy = c.m > kMaxGemvM ? kPanel : kGemv;
  c.row_int32 = c.w->k_packed;
}

}  // namespace

extern const GemmKernels gemm_kernels = {compute_blocks, pack_activations, min_max, supports, plan};

}  // namespace bitline::BITLINE_ISA
