// The linear kernel by int8 products, for levels below AVX-512: x of a group is split into int8 digits of one fixed-point number
// (the slices of the Ozaki scheme), whose products with the codes are summed exactly in integers. Weight-only layers of few rows take
// three digits, 22 bits and the sign below the group's largest element, or four for float32; int8 activations are one digit.
#pragma once

#include "variants/gemm_scales.h"
#include "variants/gemm_slice_layout.h"

namespace bitline::BITLINE_ISA {
namespace {

constexpr int64_t kSlicesPrefetch = 2048;  // bytes of codes
constexpr int64_t kPassBytes = 2048;  // of codes that are read for some rows of W, then for the next: memory is read in order

// ---- codes to bytes ------------------------------------------------------------------------------------------------------

template <int BITS> INLINE U32 unpack_bytes(const U32 (&v)[k_block_of(BITS) * BITS / 32], int j) {
  constexpr ByteTerms<BITS> terms = make_byte_terms<BITS>();
  if constexpr (BITS == 8) return v[0] ^ splat(code_bias(BITS) * 0x01010101u);
  U32 codes{};
  UNROLL for (int i = 0; i < terms.count[j]; ++i) {
    const ByteTerm t = terms.term[j][i];
    codes |= (t.shift >= 0 ? v[t.index] >> t.shift : v[t.index] << -t.shift) & t.mask;
  }
  return codes;
}

// ---- one group -----------------------------------------------------------------------------------------------------------

// Products of a code and a digit, in pairs, that 16-bit sums hold.
template <int BITS, bool TABLE> constexpr int max_adds() {
  constexpr int max_code = TABLE ? kMaxTableCode : (1 << BITS) - 1;
  return 32767 / (2 * max_code << (slice_bits(BITS) - 1));
}

// Sums of codes times digits, for MR rows of x, S digits each, and V vectors of rows of W.
template <int S, int MR, int V> struct SliceSums {
  I32 sum[MR][S][V];
};
template <int S, int MR, int V> INLINE void flush(SliceSums<S, MR, V>& sums, I16 (&partial)[MR][S][V]) {
  UNROLL for (int m = 0; m < MR; ++m) UNROLL for (int s = 0; s < S; ++s) UNROLL for (int i = 0; i < V; ++i)
    sums.sum[m][s][i] = widen_add(sums.sum[m][s][i], partial[m][s][i]), partial[m][s][i] = I16{};
}

// Adds one K block at q. x: [byte vector][digit][row of x_stride]. partial: 16-bit sums, where dot4 is not there.
template <int BITS, bool TABLE, int S, int MR, int V>
INLINE void multiply_k_block(const uint8_t* q, const uint32_t* x, int64_t x_stride, U8x16 table, SliceSums<S, MR, V>& sums,
                             I16 (&partial)[MR][S][V]) {
  constexpr int int32_count = k_block_of(BITS) * BITS / 32, vectors = byte_vectors<BITS>();
  U32 v[V][int32_count];
  UNROLL for (int j = 0; j < int32_count; ++j) prefetch(q + kSlicesPrefetch + 4 * kBlockN * j);
  UNROLL for (int i = 0; i < V; ++i) UNROLL for (int j = 0; j < int32_count; ++j)
    v[i][j] = load_u32(q + 4 * (kBlockN * j + kLanes * i));
  UNROLL for (int j = 0; j < vectors; ++j, x += S * x_stride) {
    U32 codes[V];
    UNROLL for (int i = 0; i < V; ++i) {
      codes[i] = unpack_bytes<BITS>(v[i], j);
      if constexpr (TABLE) codes[i] = look_up(table, codes[i]);
    }
    UNROLL for (int s = 0; s < S; ++s) UNROLL for (int m = 0; m < MR; ++m) {
      const U32 digits = splat(x[s * x_stride + m]);
      UNROLL for (int i = 0; i < V; ++i) {
        if constexpr (kWideDot) sums.sum[m][s][i] = dot4(sums.sum[m][s][i], codes[i], digits);
        else partial[m][s][i] += dot2(codes[i], digits);
      }
    }
    if constexpr (!kWideDot && max_adds<BITS, TABLE>() < vectors)
      if ((j + 1) % max_adds<BITS, TABLE>() == 0 && j + 1 < vectors) flush(sums, partial);
  }
}

template <int BITS> constexpr int k_block_bytes() { return k_block_of(BITS) * BITS * kBlockN / 8; }
// K blocks between two flushes of 16-bit sums.
template <int BITS, bool TABLE> constexpr int flush_k_blocks() {
  const int most = max_adds<BITS, TABLE>() / byte_vectors<BITS>();
  return kWideDot || most == 0 ? 1 : most;
}

// Adds `k_blocks` K blocks from q on.
template <int BITS, bool TABLE, int S, int MR, int V>
INLINE void multiply(const uint8_t* q, int64_t k_blocks, const uint32_t* x, int64_t x_stride, U8x16 table,
                     SliceSums<S, MR, V>& total) {
  constexpr int chunk = flush_k_blocks<BITS, TABLE>();
  const int64_t x_step = byte_vectors<BITS>() * S * x_stride;
  SliceSums<S, MR, V> sums = total;
  int64_t kb = 0;
  for (; kb + chunk <= k_blocks; kb += chunk) {
    I16 partial[MR][S][V]{};
    // Not unrolled: GCC 12 would multiply first and spill all products.
    _Pragma("GCC unroll 1") for (int i = 0; i < chunk; ++i, q += k_block_bytes<BITS>(), x += x_step)
      multiply_k_block<BITS, TABLE>(q, x, x_stride, table, sums, partial);
    if constexpr (!kWideDot) flush(sums, partial);
  }
  _Pragma("GCC unroll 1") for (; kb < k_blocks; ++kb, q += k_block_bytes<BITS>(), x += x_step) {
    I16 partial[MR][S][V]{};
    multiply_k_block<BITS, TABLE>(q, x, x_stride, table, sums, partial);
    if constexpr (!kWideDot) flush(sums, partial);
  }
  total = sums;
}

// The number that digits' sums stand for: digit s counts 2**(s * slice_bits).
template <int BITS, int S, int MR, int V> INLINE F32 combine(const SliceSums<S, MR, V>& sums, int m, int i) {
  F32 v = to_f32(sums.sum[m][S - 1][i]);
  UNROLL for (int s = S - 2; s >= 0; --s) v = fma(v, splat(float(1 << slice_bits(BITS))), to_f32(sums.sum[m][s][i]));
  return v;
}

// ---- N blocks ------------------------------------------------------------------------------------------------------------

// Operands of an M tile: x_stride is its rows.
struct SlicesTile {
  const uint32_t* x;
  const int32_t* acc_init;
  const float *x_scales, *x_group_sums;
  int64_t x_stride;
};

// inner [MR][32] += rows [r, r + MR) of an M tile times group g. STRIDE: the tile's rows, 0 where that is not known.
template <int BITS, bool TABLE, int S, int MR, int V, int STRIDE>
INLINE void slices_group(const GemmCall& c, int64_t block, const ScaleRow& scale_row, int64_t g, const SlicesTile& tile, int64_t r,
                         float* inner) {
  const PackedHeader& w = *c.w;
  constexpr int columns = k_block_of(BITS);
  constexpr int parts = kBlockN / (kLanes * V);
  const int64_t rows = STRIDE ? STRIDE : tile.x_stride, k_blocks = w.group_k / columns;
  const uint8_t* q = c.base + w.codes + block * n_block_bytes(w) + g * k_blocks * k_block_bytes<BITS>();
  const U8x16 table = TABLE ? load_u8x16(c.slices.table) : U8x16{};
  const uint32_t* x = tile.x + g * (w.group_k / 4) * S * rows + r;
  const int32_t* acc_init = tile.acc_init + g * S * rows + r;
  SliceSums<S, MR, V> sums[parts];
  for (int p = 0; p < parts; ++p)
    UNROLL for (int m = 0; m < MR; ++m) UNROLL for (int s = 0; s < S; ++s) UNROLL for (int i = 0; i < V; ++i)
      sums[p].sum[m][s][i] = splat(acc_init[s * rows + m]);
  constexpr int64_t flush = flush_k_blocks<BITS, TABLE>();
  constexpr int64_t pass = (kPassBytes / k_block_bytes<BITS>() + flush - 1) / flush * flush;
  for (int64_t kb = 0; kb < k_blocks; kb += pass) {
    const int64_t count = pass < k_blocks - kb ? pass : k_blocks - kb;
    const uint8_t* from = q + kb * k_block_bytes<BITS>();
    for (int p = 0; p < parts; ++p)
      multiply<BITS, TABLE>(from + 4 * kLanes * V * p, count, x + kb * byte_vectors<BITS>() * S * rows, rows, table, sums[p]);
  }
  const float *x_scales = tile.x_scales + g * rows + r, *x_group_sums = tile.x_group_sums + g * rows + r;
  for (int p = 0; p < parts; ++p)
    UNROLL for (int i = 0; i < V; ++i) {
      const int lane = kLanes * (V * p + i);
      const ScaleOffset a = scale_row.at(lane);
      UNROLL for (int m = 0; m < MR; ++m) {
        float* at = inner + m * kBlockN + lane;
        F32 t = fma(a.scale * splat(x_scales[m]), combine<BITS>(sums[p], m, i), load_f32(at));
        if (w.offset_type != kNone) t = fma(a.offset, splat(x_group_sums[m]), t);
        store_f32(at, t);
      }
    }
}

// One N block and M tile, all of K. MR: rows of x at once; 1: the tile has one row.
template <int BITS, bool TABLE, int S, int MR, int V> void slices_tile(const GemmCall& c, int64_t block, int64_t m_tile) {
  const PackedHeader& w = *c.w;
  const int64_t row = m_tile_start(c, m_tile), rows = m_tile_start(c, m_tile + 1) - row, groups = w.num_groups;
  const SlicesTile tile{c.x_packed + row * c.row_int32, c.acc_init + row * groups * S, c.slices.x_scales + row * groups,
                        c.x_group_sums + row * groups, rows};
  alignas(64) float inner[kMaxTileM * kBlockN], outer[kMaxTileM * kBlockN];
  const int64_t count = rows * kBlockN;
  for (int64_t i = 0; i < count; ++i) inner[i] = outer[i] = 0;
  for (int64_t g = 0; g < groups; ++g) {
    if (g % kPromoteGroups == 0)
      for (int64_t i = 0; i < count; ++i) outer[i] += inner[i], inner[i] = 0;
    const ScaleRow scale_row(c, block, g);
    int64_t r = 0;
    for (; r + MR <= rows; r += MR) slices_group<BITS, TABLE, S, MR, V, MR == 1>(c, block, scale_row, g, tile, r, inner + r * kBlockN);
    for (; MR > 1 && r < rows; ++r) slices_group<BITS, TABLE, S, 1, V, 0>(c, block, scale_row, g, tile, r, inner + r * kBlockN);
  }
  for (int64_t i = 0; i < count; ++i) outer[i] += inner[i];
  for (int64_t m = 0; m < rows; ++m) epilogue(c, row + m, block, outer + m * kBlockN);
}

template <int BITS, bool TABLE, int S> void slices_blocks_of(const GemmCall& c, int64_t first, int64_t last) {
  constexpr int wide = k_block_of(BITS) > 16 ? 1 : kVectorRegisters / 16;  // long K blocks are unrolled code enough
  constexpr int vectors = (S < 3 ? 2 : 1) * wide;                          // of rows of W whose sums fit the registers
  for (int64_t block = first; block < last; ++block)
    for (int64_t t = c.m_tile_begin; t < c.m_tile_end; ++t) {
      if (m_tile_start(c, t + 1) - m_tile_start(c, t) == 1) slices_tile<BITS, TABLE, S, 1, 2 * wide>(c, block, t);
      else slices_tile<BITS, TABLE, S, S == 1 ? 3 : 2, vectors>(c, block, t);
    }
}

template <int BITS, bool TABLE> void slices_blocks_as(const GemmCall& c, int64_t first, int64_t last) {
  switch (c.slices.count) {
    case 1: if constexpr (!TABLE && (BITS == 4 || BITS == 8)) slices_blocks_of<BITS, TABLE, 1>(c, first, last); break;
    case 2: return slices_blocks_of<BITS, TABLE, 2>(c, first, last);
    case 3: return slices_blocks_of<BITS, TABLE, 3>(c, first, last);
    default: return slices_blocks_of<BITS, TABLE, 4>(c, first, last);
  }
}

void slices_blocks(const GemmCall& c, int64_t first, int64_t last) {
  if (!c.w->is_integer) return slices_blocks_as<4, true>(c, first, last);
  with_bits(c.w->bits, [&]<int BITS>() { slices_blocks_as<BITS, false>(c, first, last); });
}

}  // namespace
}  // namespace bitline::BITLINE_ISA
