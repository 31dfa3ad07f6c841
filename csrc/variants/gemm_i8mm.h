// The linear kernels by ARM's matrix instructions: bfmmla multiplies 2x4 by 4x2 bfloat16, usmmla 2x8 by 8x2 int8. W is
// dequantized into a panel of such operands, once for all M tiles.
//
// A panel is [K step][32 rows][2 int32], packed x [K step][row of the tile][2 int32], with a K step of 4 bfloat16 or 8 int8
// columns: a vector holds two rows.
#pragma once

#include "variants/gemm_f32.h"
#include "variants/gemm_int8_slices.h"
#include "variants/gemm_plan_slices.h"

namespace bitline::BITLINE_ISA {
namespace {

constexpr int kMinMatrixM = 4;
constexpr int kStepInt32 = 2 * kBlockN;  // of a panel

struct BF16Matrix {
  using Acc = F32;
  static constexpr int kStepColumns = 4;
  static INLINE F32 multiply_add(F32 acc, U32 w, U32 x) {
    return F32(vbfmmlaq_f32(float32x4_t(acc), vreinterpretq_bf16_u32(uint32x4_t(w)), vreinterpretq_bf16_u32(uint32x4_t(x))));
  }
  static INLINE F32 value(const GemmCall&, F32 sum, int64_t) { return sum; }
};

struct Int8Matrix {
  using Acc = I32;
  static constexpr int kStepColumns = 8;
  static INLINE I32 multiply_add(I32 acc, U32 w, U32 x) {
    return I32(vusmmlaq_s32(int32x4_t(acc), uint8x16_t(w), int8x16_t(x)));
  }
  static INLINE F32 value(const GemmCall& c, I32 sum, int64_t x_row_group) { return to_f32(sum + splat(c.acc_init[x_row_group])); }
};

// inner [ROWS][32] += a group's panel times an M tile of ROWS rows, scaled. x_row_group: its first row's index in acc_init and
// x_group_sums.
template <class Matrix, int ROWS> void matrix_rows(const GemmCall& c, int64_t block, int64_t g, const uint32_t* panel,
                                                   const uint32_t* x_tile, int64_t x_row_group, float* inner) {
  const ScaleRow scale_row(c, block, g);
  constexpr int pairs = (ROWS + 1) / 2;
  for (int lane = 0; lane < kBlockN; lane += 2 * kLanes) {
    typename Matrix::Acc acc[pairs][4]{};  // [pair of rows of x][pair of rows of W]
    const uint32_t *p = panel + 2 * lane, *x = x_tile;
    for (int64_t k = 0; k < c.w->group_k; k += Matrix::kStepColumns, p += kStepInt32, x += 2 * ROWS) {
      U32 v[4];
      UNROLL for (int i = 0; i < 4; ++i) v[i] = load_u32(p + 4 * i);
      UNROLL for (int m = 0; m < pairs; ++m) {
        // The last of an odd number of rows is its own pair.
        const U32 rows = 2 * m + 1 < ROWS ? load_u32(x + 4 * m) : U32(vdupq_n_u64(load_as<uint64_t>(x + 4 * m)));
        UNROLL for (int i = 0; i < 4; ++i) acc[m][i] = Matrix::multiply_add(acc[m][i], v[i], rows);
      }
    }
    UNROLL for (int i = 0; i < 2; ++i) {
      const ScaleOffset a = scale_row.at(lane + kLanes * i);
      UNROLL for (int m = 0; m < ROWS; ++m) {
        const auto first = acc[m / 2][2 * i], second = acc[m / 2][2 * i + 1];
        const auto even = __builtin_shufflevector(first, second, 0, 2, 4, 6);
        const auto sum = m % 2 == 0 ? even : __builtin_shufflevector(first, second, 1, 3, 5, 7);
        float* at = inner + m * kBlockN + lane + kLanes * i;
        F32 t = fma(a.scale, Matrix::value(c, sum, x_row_group + m), load_f32(at));
        if (c.w->offset_type != kNone) t = fma(a.offset, splat(c.x_group_sums[x_row_group + m]), t);
        store_f32(at, t);
      }
    }
  }
}

template <class Matrix> void multiply_panel(const GemmCall& c, int64_t block, int64_t g, int64_t m_tile, const uint32_t* panel,
                                            float* inner) {
  const PackedHeader& w = *c.w;
  const int64_t start = m_tile_start(c, m_tile), rows = m_tile_start(c, m_tile + 1) - start;
  const uint32_t* x = c.x_packed + start * c.row_int32 + g * (w.group_k / Matrix::kStepColumns) * 2 * rows;
  const int64_t x_row_group = start * w.num_groups + g * rows;
  const auto multiply = [&]<int ROWS>() {
    matrix_rows<Matrix, ROWS>(c, block, g, panel, x, x_row_group, inner + start * kBlockN);
  };
  static_assert(kMinMatrixM == 4 && kMaxTileM == 12);  // so tiles have 4 to 12 rows
  switch (rows) {
    case 4: return multiply.template operator()<4>();
    case 5: return multiply.template operator()<5>();
    case 6: return multiply.template operator()<6>();
    case 7: return multiply.template operator()<7>();
    case 8: return multiply.template operator()<8>();
    case 9: return multiply.template operator()<9>();
    case 10: return multiply.template operator()<10>();
    case 11: return multiply.template operator()<11>();
    default: return multiply.template operator()<12>();
  }
}

// ---- panels --------------------------------------------------------------------------------------------------------------

// Codes of two columns, in 16 bits each, to a bfloat16 pair: by tables of the low and the high bytes, for up to 6 bits.
template <int BITS> struct BF16PairTable {
  static constexpr int kVectors = BITS <= 4 ? 1 : BITS == 5 ? 2 : 4;
  uint8x16_t low[kVectors], high[kVectors];
  explicit BF16PairTable(const GemmCall& c) {
    for (int i = 0; i < kVectors; ++i) {
      const uint8x16x2_t bytes = vld2q_u8(c.base + c.w->lut_bf16 + 32 * i);
      low[i] = bytes.val[0], high[i] = bytes.val[1];
    }
  }
  static INLINE uint16x8_t look_up_bytes(const uint8x16_t (&table)[kVectors], uint8x16_t index) {
    if constexpr (kVectors == 1) return vreinterpretq_u16_u8(vqtbl1q_u8(table[0], index));
    else if constexpr (kVectors == 2) return vreinterpretq_u16_u8(vqtbl2q_u8(uint8x16x2_t{{table[0], table[1]}}, index));
    else return vreinterpretq_u16_u8(vqtbl4q_u8(uint8x16x4_t{{table[0], table[1], table[2], table[3]}}, index));
  }
  INLINE U32 operator()(const uint8_t* p, int lane, int k) {
    const uint8x16_t codes = uint8x16_t(unpack_codes<BITS, 0x10001>(p, lane, k));
    return U32(vsliq_n_u16(look_up_bytes(low, codes), look_up_bytes(high, codes), 8));
  }
  bool found_nan() const { return false; }
};

// 8-bit codes: by way of float32, whose high halves are the pair. Tables are rounded.
template <CodeKind KIND> struct BF16PairFloat : Dequantizer<8, KIND> {
  using Dequantizer<8, KIND>::Dequantizer;
  INLINE U32 operator()(const uint8_t* p, int lane, int k) {
    const auto value = [&](int column) INLINE_LAMBDA {
      const U32 v = U32(Dequantizer<8, KIND>::operator()(p, lane, column));
      return KIND == kTable ? v + 0x7fff + (v >> 16 & 1) : v;
    };
    return U32(vtrn2q_u16(uint16x8_t(value(k)), uint16x8_t(value(k + 1))));
  }
};

// Pair: what makes bfloat16 pairs of columns k and k + 1 of a K block.
template <int BITS, class Pair> struct BF16Panel : Pair {
  using Value = uint32_t;
  static constexpr int kValues = kMaxGroupK / 4 * kStepInt32;
  using Pair::Pair;
  INLINE void fill(const uint8_t* q, int64_t group_k, uint32_t* values) {
    constexpr int columns = k_block_of(BITS), k_block_bytes = columns * BITS * kBlockN / 8;
    for (int64_t k = 0; k < group_k; k += columns, q += k_block_bytes)
      for (int lane = 0; lane < kBlockN; lane += kLanes)
        UNROLL for (int j = 0; j < columns; j += 4) {
          const uint32x4_t low = uint32x4_t((*this)(q, lane, j)), high = uint32x4_t((*this)(q, lane, j + 2));
          uint32_t* to = values + (k + j) / 4 * kStepInt32 + 2 * lane;
          vst1q_u32(to, vzip1q_u32(low, high)), vst1q_u32(to + 4, vzip2q_u32(low, high));
        }
  }
  static void multiply(const GemmCall& c, int64_t block, int64_t g, int64_t m_tile, const uint32_t* values, float* inner) {
    multiply_panel<BF16Matrix>(c, block, g, m_tile, values, inner);
  }
};

// Codes of 4 or 8 bits as they are, in the order of columns of convert_to_compute_type.
template <int BITS> struct Int8Panel {
  using Value = uint32_t;
  static constexpr int kValues = kMaxGroupK / 8 * kStepInt32;
  explicit Int8Panel(const GemmCall&) {}
  INLINE void fill(const uint8_t* q, int64_t group_k, uint32_t* values) {
    constexpr int bytes = BITS * kBlockN;  // of eight columns: one K block of 4 bits, two of 8
    for (int64_t k = 0; k < group_k; k += 8, q += bytes, values += kStepInt32)
      for (int lane = 0; lane < kBlockN; lane += kLanes) {
        const U32 v[1] = {load_u32(q + 4 * lane)}, next[1] = {load_u32(q + (BITS == 8 ? 4 * kBlockN : 0) + 4 * lane)};
        const uint32x4_t low = uint32x4_t(unpack_bytes<BITS>(v, 0)), high = uint32x4_t(unpack_bytes<BITS>(next, BITS == 4));
        vst1q_u32(values + 2 * lane, vzip1q_u32(low, high)), vst1q_u32(values + 2 * lane + 4, vzip2q_u32(low, high));
      }
  }
  static void multiply(const GemmCall& c, int64_t block, int64_t g, int64_t m_tile, const uint32_t* values, float* inner) {
    multiply_panel<Int8Matrix>(c, block, g, m_tile, values, inner);
  }
  bool found_nan() const { return false; }
};

// ---- calls ---------------------------------------------------------------------------------------------------------------

bool runs_on_matrices(const GemmCall& c) { return c.strategy == kPanel && c.compute != kComputeF32; }

void matrix_block(const GemmCall& c, int64_t block, float* acc) {
  const PackedHeader& w = *c.w;
  if (c.compute == kComputeInt8) {
    w.bits == 4 ? panel_gemm<Int8Panel<4>>(c, block, acc) : panel_gemm<Int8Panel<8>>(c, block, acc);
    return;
  }
  with_bits(w.bits, [&]<int BITS>() {
    if constexpr (BITS < 8) panel_gemm<BF16Panel<BITS, BF16PairTable<BITS>>>(c, block, acc);
    else if (w.is_integer) panel_gemm<BF16Panel<8, BF16PairFloat<kInteger>>>(c, block, acc);
    else if (!is_e4m3(c) || !panel_gemm<BF16Panel<8, BF16PairFloat<kE4M3>>>(c, block, acc))
      panel_gemm<BF16Panel<8, BF16PairFloat<kTable>>>(c, block, acc);
  });
}

void matrix_blocks(const GemmCall& c, int64_t first, int64_t last, float* acc) {
  for (int64_t block = first; block < last; ++block) matrix_block(c, block, acc);
}

// int8 activations, and what gemm.cpp may compute in bfloat16: x in it, or quantized and W exact.
bool plan_matrices(GemmCall& c) {
  const PackedHeader& w = *c.w;
  const bool int8 = has_int8_activations(w);
  const bool bf16 = c.dtype == kBFloat16 || (w.act_quant != kActNone && !w.lut_bf16_inexact);
  if (w.batch_invariant || c.m < kMinMatrixM || !(int8 ? w.group_k % 8 == 0 : bf16)) return false;
  c.compute = int8 ? kComputeInt8 : kComputeBF16;
  c.strategy = kPanel, c.row_int32 = w.k_packed / k_per_int32(c.compute);
  return true;
}

// Packed x of an M tile from [int32][row] to [K step][row][2 int32].
void pair_int32(const GemmCall& c, int64_t m_tile) {
  const int64_t start = m_tile_start(c, m_tile), rows = m_tile_start(c, m_tile + 1) - start;
  uint32_t *x = const_cast<uint32_t*>(c.x_packed) + start * c.row_int32, step[2 * kMaxTileM];
  for (int64_t i = 0; i < c.row_int32; i += 2, x += 2 * rows) {
    memcpy(step, x, size_t(rows) * 8);
    for (int64_t r = 0; r < rows; ++r) x[2 * r] = step[r], x[2 * r + 1] = step[rows + r];
  }
}

}  // namespace
}  // namespace bitline::BITLINE_ISA
