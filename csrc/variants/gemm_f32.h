// The linear kernels in float32, for the levels below AVX-512: codes become float32 in registers or in a panel and are multiplied
// by FMA, kLanes output rows per vector.
#pragma once

#include "variants/gemm_f32_dequant.h"
#include "variants/gemm_scales.h"

namespace bitline::BITLINE_ISA {
namespace {

constexpr int kMaxGemvM = 3;             // up to here codes are dequantized in registers, once for all rows of x
constexpr int kMaxMR = 6;                // rows of x of a panel tile
constexpr int kPrefetchDistance = 1024;  // bytes of codes
constexpr int kMaxGroupK = 512;          // columns of a group; kernels/cpu/packed_weight.py splits longer ones
constexpr int kTileVectors = kVectorRegisters / 8;  // of output rows, each with an accumulator for every row of x

// ---- GEMV ----------------------------------------------------------------------------------------------------------------

// One N block, all of K, the MR rows of a call of small M: V vectors of output rows at once, each with MR accumulators of CHAINS
// independent ones. False: a NaN code was read as a number, y is not written.
template <int BITS, CodeKind KIND, int MR, int V, int CHAINS> bool gemv(const GemmCall& c, int64_t block) {
  constexpr int columns = k_block_of(BITS), k_block_bytes = columns * BITS * kBlockN / 8;
  const PackedHeader& w = *c.w;
  Dequantizer<BITS, KIND> dequantize(c);
  const float* x = reinterpret_cast<const float*>(c.x_packed);
  const int64_t group_bytes = w.group_k * BITS * kBlockN / 8;
  float out[MR][kBlockN];
  for (int lane = 0; lane < kBlockN; lane += kLanes * V) {
    F32 inner[MR][V], outer[MR][V];
    UNROLL for (int m = 0; m < MR; ++m) UNROLL for (int i = 0; i < V; ++i) inner[m][i] = outer[m][i] = F32{};
    const uint8_t* p = c.base + w.codes + block * n_block_bytes(w);
    for (int64_t g = 0; g < w.num_groups; ++g, p += group_bytes) {
      if (g % kPromoteGroups == 0)
        UNROLL for (int m = 0; m < MR; ++m) UNROLL for (int i = 0; i < V; ++i) outer[m][i] += inner[m][i], inner[m][i] = F32{};
      F32 acc[MR][V][CHAINS];
      UNROLL for (int m = 0; m < MR; ++m) UNROLL for (int i = 0; i < V; ++i) UNROLL for (int j = 0; j < CHAINS; ++j)
        acc[m][i][j] = F32{};
      const uint8_t* q = p;
      for (int64_t k = 0; k < w.group_k; k += columns, q += k_block_bytes) {
        const float* xk = x + (g * w.group_k + k) * MR;
        for (int i = 0; lane == 0 && i < k_block_bytes; i += 64) prefetch(q + kPrefetchDistance + i);
        UNROLL for (int j = 0; j < columns; ++j) {
          UNROLL for (int i = 0; i < V; ++i) {
            const F32 v = dequantize(q, lane + kLanes * i, j);
            UNROLL for (int m = 0; m < MR; ++m)
              acc[m][i][j % CHAINS] = fma(v, splat(xk[j * MR + m]), acc[m][i][j % CHAINS]);
          }
        }
      }
      const ScaleRow scale_row(c, block, g);
      UNROLL for (int i = 0; i < V; ++i) {
        const ScaleOffset a = scale_row.at(lane + kLanes * i);
        UNROLL for (int m = 0; m < MR; ++m) {
          UNROLL for (int j = 1; j < CHAINS; ++j) acc[m][i][0] += acc[m][i][j];
          inner[m][i] = fma(a.scale, acc[m][i][0], inner[m][i]);
          if (w.offset_type != kNone) inner[m][i] = fma(a.offset, splat(c.x_group_sums[g * MR + m]), inner[m][i]);
        }
      }
    }
    UNROLL for (int m = 0; m < MR; ++m) UNROLL for (int i = 0; i < V; ++i)
      store_f32(out[m] + lane + kLanes * i, outer[m][i] + inner[m][i]);
  }
  if (dequantize.found_nan()) return false;
  for (int m = 0; m < MR; ++m) epilogue(c, m, block, out[m]);
  return true;
}

// ---- panels --------------------------------------------------------------------------------------------------------------

// One N block, all M tiles: each group is dequantized into a panel once. inner: 64 floats per row, the second half for the outer
// accumulators. False as gemv's.
template <class Panel> bool panel_gemm(const GemmCall& c, int64_t block, float* inner) {
  const PackedHeader& w = *c.w;
  Panel panel(c);
  alignas(64) typename Panel::Value values[Panel::kValues];
  const int64_t first = m_tile_start(c, c.m_tile_begin) * kBlockN, last = m_tile_start(c, c.m_tile_end) * kBlockN;
  float* outer = inner + c.m * kBlockN;
  for (int64_t i = first; i < last; ++i) inner[i] = outer[i] = 0;
  const uint8_t* q = c.base + w.codes + block * n_block_bytes(w);
  for (int64_t g = 0; g < w.num_groups; ++g, q += w.group_k * w.bits * kBlockN / 8) {
    if (g % kPromoteGroups == 0)
      for (int64_t i = first; i < last; ++i) outer[i] += inner[i], inner[i] = 0;
    panel.fill(q, w.group_k, values);
    for (int64_t t = c.m_tile_begin; t < c.m_tile_end; ++t) Panel::multiply(c, block, g, t, values, inner);
  }
  if (panel.found_nan()) return false;
  for (int64_t row = first / kBlockN; row < last / kBlockN; ++row) {
    float out[kBlockN];
    for (int i = 0; i < kBlockN; ++i) out[i] = outer[row * kBlockN + i] + inner[row * kBlockN + i];
    epilogue(c, row, block, out);
  }
  return true;
}

// inner [MR][32] += a group's panel [group_k][32] times MR rows of x, scaled. x_stride: from one column of x to the next.
template <int MR> void panel_rows(const GemmCall& c, int64_t block, int64_t g, const float* panel, const float* x,
                                  const float* x_group_sums, int64_t x_stride, float* inner) {
  const ScaleRow scale_row(c, block, g);
  for (int lane = 0; lane < kBlockN; lane += kLanes * kTileVectors) {
    F32 acc[MR][kTileVectors];
    UNROLL for (int m = 0; m < MR; ++m) UNROLL for (int i = 0; i < kTileVectors; ++i) acc[m][i] = F32{};
    for (int64_t k = 0; k < c.w->group_k; ++k) {
      F32 v[kTileVectors];
      UNROLL for (int i = 0; i < kTileVectors; ++i) v[i] = load_f32(panel + k * kBlockN + lane + kLanes * i);
      UNROLL for (int m = 0; m < MR; ++m) {
        const F32 b = splat(x[k * x_stride + m]);
        UNROLL for (int i = 0; i < kTileVectors; ++i) acc[m][i] = fma(v[i], b, acc[m][i]);
      }
    }
    UNROLL for (int i = 0; i < kTileVectors; ++i) {
      const ScaleOffset a = scale_row.at(lane + kLanes * i);
      UNROLL for (int m = 0; m < MR; ++m) {
        float* at = inner + m * kBlockN + lane + kLanes * i;
        F32 t = fma(a.scale, acc[m][i], load_f32(at));
        if (c.w->offset_type != kNone) t = fma(a.offset, splat(x_group_sums[m]), t);
        store_f32(at, t);
      }
    }
  }
}

// A panel [group_k][32] of float32.
template <int BITS, CodeKind KIND> struct F32Panel : Dequantizer<BITS, KIND> {
  using Value = float;
  static constexpr int kValues = kMaxGroupK * kBlockN;
  static constexpr int kFillVectors = 4;  // of output rows, unrolled
  using Dequantizer<BITS, KIND>::Dequantizer;

  // group_k columns of codes at q.
  INLINE void fill(const uint8_t* q, int64_t group_k, float* values) {
    constexpr int columns = k_block_of(BITS), k_block_bytes = columns * BITS * kBlockN / 8;
    for (int64_t k = 0; k < group_k; k += columns, q += k_block_bytes)
      for (int lane = 0; lane < kBlockN; lane += kLanes * kFillVectors)
        UNROLL for (int j = 0; j < columns; ++j) UNROLL for (int i = 0; i < kFillVectors; ++i)
          store_f32(values + (k + j) * kBlockN + lane + kLanes * i, (*this)(q, lane + kLanes * i, j));
  }

  static void multiply(const GemmCall& c, int64_t block, int64_t g, int64_t m_tile, const float* values, float* inner) {
    const PackedHeader& w = *c.w;
    const int64_t start = m_tile_start(c, m_tile), rows = m_tile_start(c, m_tile + 1) - start;
    const float* x = reinterpret_cast<const float*>(c.x_packed) + start * c.row_int32 + g * w.group_k * rows;
    const float* sums = c.x_group_sums + start * w.num_groups + g * rows;
    for (int64_t r = 0; r < rows; r += kMaxMR) {
      float* at = inner + (start + r) * kBlockN;
      switch (rows - r) {
        case 1: panel_rows<1>(c, block, g, values, x + r, sums + r, rows, at); break;
        case 2: panel_rows<2>(c, block, g, values, x + r, sums + r, rows, at); break;
        case 3: panel_rows<3>(c, block, g, values, x + r, sums + r, rows, at); break;
        case 4: panel_rows<4>(c, block, g, values, x + r, sums + r, rows, at); break;
        case 5: panel_rows<5>(c, block, g, values, x + r, sums + r, rows, at); break;
        default: panel_rows<6>(c, block, g, values, x + r, sums + r, rows, at);
      }
    }
  }
};

// ---- N blocks ------------------------------------------------------------------------------------------------------------

template <int BITS, CodeKind KIND> bool f32_block(const GemmCall& c, int64_t block, float* acc) {
  const bool one_chain = c.w->batch_invariant;
  if (c.strategy == kPanel) return panel_gemm<F32Panel<BITS, KIND>>(c, block, acc);
  if (c.m == 1) return one_chain ? gemv<BITS, KIND, 1, 4, 1>(c, block) : gemv<BITS, KIND, 1, 4, 2>(c, block);
  if (c.m == 2)
    return one_chain ? gemv<BITS, KIND, 2, kTileVectors, 1>(c, block) : gemv<BITS, KIND, 2, kTileVectors, 2>(c, block);
  return gemv<BITS, KIND, 3, kTileVectors, 1>(c, block);
}

// N blocks [first, last) by kGemv or kPanel, in float32.
void f32_blocks(const GemmCall& c, int64_t first, int64_t last, float* acc) {
  const bool e4m3 = !c.w->is_integer && is_e4m3(c);
  for (int64_t block = first; block < last; ++block) {
    if (e4m3 && f32_block<8, kE4M3>(c, block, acc)) continue;
    with_bits(c.w->bits, [&]<int BITS>() {
      c.w->is_integer ? f32_block<BITS, kInteger>(c, block, acc) : f32_block<BITS, kTable>(c, block, acc);
    });
  }
}

void plan_f32(GemmCall& c) {
  c.strategy = c.m > kMaxGemvM ? kPanel : kGemv;
  c.row_int32 = c.w->k_packed;
}

}  // namespace
}  // namespace bitline::BITLINE_ISA
