// N blocks of 32 output rows with AVX-512, for each compute type and bit width. GEMV (also batched, M tile by M tile): codes are
// dequantized in registers, anew for each M tile. Panel: K slices of an N block are dequantized into cache once for all M tiles.
#pragma once

#include "gemm_avx512_panel.h"

namespace bitline::BITLINE_ISA {
namespace {

// Codes to prefetch while an M tile reads its own.
struct CodePrefetch {
  const uint8_t* next;
  int64_t bytes_per_k_block;
};

constexpr int kPanelOperands = kPanelBytes / 4 / kBlockN;

// ---- GEMV ----------------------------------------------------------------------------------------------------------------

// The sum of row m's products in vector i of rows of W: of all chains, and of all digits by their place value.
template <class Compute, int MR, int CHAINS>
INLINE __m512 sum_of_products(const typename Compute::Acc (&acc)[MR * Compute::digits][2][CHAINS], int m, int i) {
  __m512 sum = _mm512_setzero_ps();
  UNROLL for (int d = Compute::digits - 1; d >= 0; d--) {
    typename Compute::Acc s = acc[d * MR + m][i][0];
    UNROLL for (int j = 1; j < CHAINS; j++) s = Compute::add(s, acc[d * MR + m][i][j]);
    const __m512 digit = Compute::to_f32(s);
    sum = d == Compute::digits - 1 ? digit : _mm512_fmadd_ps(sum, _mm512_set1_ps(256), digit);
  }
  return sum;
}

// One N block, all of K, an M tile of MR rows: MR x 2 vectors of accumulators, each split into CHAINS independent ones, which
// hide the latency of the multiply-adds.
template <class Compute, int BITS, int MR, int CHAINS, bool OFFSET>
void gemv_tile(const GemmCall& c, int64_t block, int64_t row, CodePrefetch code_prefetch) {
  using Codes = KBlock<BITS>;
  using Acc = typename Compute::Acc;
  constexpr int columns = Codes::columns, operands = columns / Compute::k_per_operand, ROWS = MR * Compute::digits;
  const PackedHeader& w = *c.w;
  const uint8_t* p = c.base + w.codes + block * n_block_bytes(w);
  const uint8_t* page = p;
  ScaleCursor cursor(w, c.base, block, 0);
  const uint32_t* x = c.x_packed + row * c.row_int32;
  const float* x_group_sums = c.x_group_sums + row * w.num_groups;
  const float* x_scales = c.slices.x_scales + row * w.num_groups;
  const int32_t* acc_init = c.acc_init + row * w.num_groups * Compute::digits;
  const typename Compute::template LutOf<BITS> lut(c);
  __m512 inner[MR][2], outer[MR][2];
  UNROLL for (int m = 0; m < MR; m++) inner[m][0] = inner[m][1] = outer[m][0] = outer[m][1] = _mm512_setzero_ps();
  const int64_t k_blocks = w.group_k / columns, group_bytes = k_blocks * 128 * Codes::vectors;
  const int64_t last_k = w.column_map ? w.group_k : w.k - (w.num_groups - 1) * w.group_k;  // the last group without padding
  const int64_t last_k_blocks = (last_k + columns - 1) / columns;
  for (int64_t g = 0; g < w.num_groups; g++) {
    if (g % kPromoteGroups == 0 && g > 0)
      UNROLL for (int m = 0; m < MR; m++) UNROLL for (int i = 0; i < 2; i++)
        outer[m][i] = _mm512_add_ps(outer[m][i], inner[m][i]), inner[m][i] = _mm512_setzero_ps();
    Acc acc[ROWS][2][CHAINS];
    UNROLL for (int m = 0; m < ROWS; m++) UNROLL for (int i = 0; i < CHAINS; i++)
      acc[m][0][i] = acc[m][1][i] = i == 0 ? Compute::init(acc_init, g * ROWS + m) : Acc{};
    for (; page < p + group_bytes; page += kPageBytes) prefetch(page + kPageDistance[0]), prefetch(page + kPageDistance[1]);
    prefetch(cursor.scales + kScaleDistance);
    if (OFFSET) prefetch(cursor.offsets + kScaleDistance);
    const int64_t group_k_blocks = g + 1 < w.num_groups ? k_blocks : last_k_blocks;
    for (int64_t kb = 0; kb < group_k_blocks; kb++) {
      Codes codes0, codes1;
      codes0.read(p), codes1.read(p + 64);
      UNROLL for (int i = 0; i < Codes::vectors * 2; i++) prefetch(code_prefetch.next + 64 * i);
      code_prefetch.next += code_prefetch.bytes_per_k_block;
      UNROLL for (int j = 0; j < operands; j++) {
        const __m512i w0 = Compute::template operand<BITS>(codes0, lut, j), w1 = Compute::template operand<BITS>(codes1, lut, j);
        UNROLL for (int m = 0; m < ROWS; m++) {
          acc[m][0][j % CHAINS] = Compute::mac(acc[m][0][j % CHAINS], w0, x[j * ROWS + m]);
          acc[m][1][j % CHAINS] = Compute::mac(acc[m][1][j % CHAINS], w1, x[j * ROWS + m]);
        }
      }
      x += operands * ROWS;
      p += 128 * Codes::vectors;
    }
    const ScaleOffset a0 = cursor.half(0), a1 = cursor.half(1);
    cursor.next();
    UNROLL for (int m = 0; m < MR; m++) {
      __m512 scale0 = a0.scale, scale1 = a1.scale;
      if constexpr (Compute::digits > 1) {
        const __m512 unit = _mm512_set1_ps(x_scales[g * MR + m]);
        scale0 = _mm512_mul_ps(scale0, unit), scale1 = _mm512_mul_ps(scale1, unit);
      }
      const __m512 s0 = sum_of_products<Compute, MR, CHAINS>(acc, m, 0), s1 = sum_of_products<Compute, MR, CHAINS>(acc, m, 1);
      inner[m][0] = _mm512_fmadd_ps(scale0, s0, inner[m][0]), inner[m][1] = _mm512_fmadd_ps(scale1, s1, inner[m][1]);
      if (OFFSET) {
        const __m512 sum = _mm512_set1_ps(x_group_sums[g * MR + m]);
        inner[m][0] = _mm512_fmadd_ps(a0.offset, sum, inner[m][0]);
        inner[m][1] = _mm512_fmadd_ps(a1.offset, sum, inner[m][1]);
      }
    }
  }
  UNROLL for (int m = 0; m < MR; m++)
    epilogue(c, row + m, block, _mm512_add_ps(outer[m][0], inner[m][0]), _mm512_add_ps(outer[m][1], inner[m][1]));
}

// A dozen accumulators in all keep the multiply-add units busy: small M tiles have several chains for each.
template <class Compute> constexpr int chains_of(int rows) {
  if (Compute::digits > 1) return rows * Compute::digits <= 3 ? 2 : 1;
  return rows <= 3 ? 4 : rows <= 5 ? 2 : 1;
}

// One N block, all M tiles. From the second M tile on the block is read from cache, so each M tile prefetches its share of the
// next N block instead; the first M tile of the first block prefetches its own.
template <class Compute, int BITS, bool OFFSET> void gemv(const GemmCall& c, int64_t block, bool first_block) {
  const int64_t tiles = c.m_tile_end - c.m_tile_begin, bytes = n_block_bytes(*c.w);
  const uint8_t* p = c.base + c.w->codes + block * bytes;
  for (int64_t t = 0; t < tiles; t++) {
    const int64_t row = m_tile_start(c, c.m_tile_begin + t);
    CodePrefetch code_prefetch{p + kCodeDistance, 128 * KBlock<BITS>::vectors};
    if (tiles > 1 && !(first_block && t == 0)) {
      const int64_t shares = tiles - first_block, share = t - first_block;
      code_prefetch.bytes_per_k_block = (code_prefetch.bytes_per_k_block + shares - 1) / shares;
      code_prefetch.next = p + bytes + share * (bytes / shares);
    }
    switch (m_tile_start(c, c.m_tile_begin + t + 1) - row) {
#define BITLINE_TILE(MR) case MR: \
      if constexpr (MR <= Compute::max_rows) { \
        constexpr int chains = chains_of<Compute>(MR); \
        if (Compute::digits == 1 && c.w->batch_invariant) gemv_tile<Compute, BITS, MR, 1, OFFSET>(c, block, row, code_prefetch); \
        else gemv_tile<Compute, BITS, MR, chains, OFFSET>(c, block, row, code_prefetch); \
      } \
      break;
      BITLINE_TILE(1) BITLINE_TILE(2) BITLINE_TILE(3) BITLINE_TILE(4) BITLINE_TILE(5) BITLINE_TILE(6)
      BITLINE_TILE(7) BITLINE_TILE(8) BITLINE_TILE(9) BITLINE_TILE(10) BITLINE_TILE(11) BITLINE_TILE(12)
#undef BITLINE_TILE
    }
  }
}

// ---- panel GEMM ----------------------------------------------------------------------------------------------------------

// The K slice of a panel: some whole groups, or a part of one.
struct KSlice {
  int64_t first_group, num_groups;
  int64_t operands;              // of each group, or of the part of one
  bool starts_group;             // the slice has its group's first column
  const float *scales, *offsets; // [num_groups][32]; offsets: null where there are none
};

// Where a panel tile takes W from: a dequantized panel, or codes, which it dequantizes and leaves in the panel for the M tiles
// after it.
struct FromPanel {
  static constexpr int operands = 1;
  const uint32_t* panel;
  INLINE void next_k_block() {}
  INLINE void operand(int, __m512i& a, __m512i& b) { a = load(panel), b = load(panel + 16), panel += 32; }
};
template <class Compute, int BITS> struct FromCodes {
  static constexpr int operands = KBlock<BITS>::columns / Compute::k_per_operand;
  const uint8_t* p;
  uint32_t* panel;
  const typename Compute::template LutOf<BITS> lut;
  KBlock<BITS> codes0, codes1;
  INLINE void next_k_block() { codes0.read(p), codes1.read(p + 64), p += 128 * KBlock<BITS>::vectors; }
  INLINE void operand(int j, __m512i& a, __m512i& b) {
    a = Compute::template operand<BITS>(codes0, lut, j), b = Compute::template operand<BITS>(codes1, lut, j);
    _mm512_store_si512(panel, a), _mm512_store_si512(panel + 16, b), panel += 32;
  }
};

// out [MR][32] += the slice of W [operands][32] times an M tile of x [operands][MR], each group scaled.
template <class Compute, int MR, class Source>
void panel_tile(const KSlice& slice, Source source, const uint32_t* x, const float* x_group_sums, const int32_t* acc_init,
                float* out) {
  for (int64_t g = 0; g < slice.num_groups; g++) {
    typename Compute::Acc a0[MR], a1[MR];
    UNROLL for (int m = 0; m < MR; m++)
      a0[m] = a1[m] = slice.starts_group ? Compute::init(acc_init, g * MR + m) : typename Compute::Acc{};
    for (int64_t i = 0; i < slice.operands; i += Source::operands) {
      source.next_k_block();
      UNROLL for (int j = 0; j < Source::operands; j++) {
        __m512i w0, w1;
        source.operand(j, w0, w1);
        UNROLL for (int m = 0; m < MR; m++) {
          a0[m] = Compute::mac(a0[m], w0, x[m]);
          a1[m] = Compute::mac(a1[m], w1, x[m]);
        }
        x += MR;
      }
    }
    const __m512 s0 = _mm512_loadu_ps(slice.scales + 32 * g), s1 = _mm512_loadu_ps(slice.scales + 32 * g + 16);
    UNROLL for (int m = 0; m < MR; m++) {
      float* at = out + 32 * m;
      __m512 t0 = _mm512_fmadd_ps(s0, Compute::to_f32(a0[m]), _mm512_loadu_ps(at));
      __m512 t1 = _mm512_fmadd_ps(s1, Compute::to_f32(a1[m]), _mm512_loadu_ps(at + 16));
      if (slice.offsets) {
        const __m512 sum = _mm512_set1_ps(x_group_sums[g * MR + m]);
        t0 = _mm512_fmadd_ps(_mm512_loadu_ps(slice.offsets + 32 * g), sum, t0);
        t1 = _mm512_fmadd_ps(_mm512_loadu_ps(slice.offsets + 32 * g + 16), sum, t1);
      }
      _mm512_storeu_ps(at, t0), _mm512_storeu_ps(at + 16, t1);
    }
  }
}

// Panels are used for more than 12 rows, whose M tiles have 6 to 12.
template <class Compute, class Source>
void panel_tile_of(int64_t rows, const KSlice& slice, const Source& source, const uint32_t* x, const float* x_group_sums,
                   const int32_t* acc_init, float* out) {
  switch (rows) {
    case 6: return panel_tile<Compute, 6>(slice, source, x, x_group_sums, acc_init, out);
    case 7: return panel_tile<Compute, 7>(slice, source, x, x_group_sums, acc_init, out);
    case 8: return panel_tile<Compute, 8>(slice, source, x, x_group_sums, acc_init, out);
    case 9: return panel_tile<Compute, 9>(slice, source, x, x_group_sums, acc_init, out);
    case 10: return panel_tile<Compute, 10>(slice, source, x, x_group_sums, acc_init, out);
    case 11: return panel_tile<Compute, 11>(slice, source, x, x_group_sums, acc_init, out);
    default: return panel_tile<Compute, 12>(slice, source, x, x_group_sums, acc_init, out);
  }
}

// From some M on, scaling the panel costs less than scaling the accumulators of each group, of which a row of short groups has
// more.
INLINE bool scales_panel(const GemmCall& c, int64_t group_k) {
  return c.compute == kComputeBF16 && c.dtype == kBFloat16 && group_k < 512 && 5 * c.m > 8 * group_k;
}

// The K slice from operand `at` of a row on, as long as a panel holds.
INLINE KSlice k_slice_at(const PackedHeader& w, int64_t group_operands, int64_t at) {
  KSlice slice;
  slice.first_group = at / group_operands;
  const int64_t within = at - slice.first_group * group_operands;
  slice.starts_group = within == 0;
  if (group_operands <= kPanelOperands) {
    slice.operands = group_operands;
    slice.num_groups = kPanelOperands / group_operands;
    if (slice.num_groups > w.num_groups - slice.first_group) slice.num_groups = w.num_groups - slice.first_group;
  } else {
    slice.num_groups = 1;
    slice.operands = group_operands - within < kPanelOperands ? group_operands - within : kPanelOperands;
  }
  return slice;
}

// One N block, all M tiles. acc: 32 floats per row.
template <class Compute, int BITS> void panel_gemm(const GemmCall& c, int64_t block, uint32_t* panel, float* acc) {
  constexpr int columns = KBlock<BITS>::columns, k_block_bytes = 128 * KBlock<BITS>::vectors;
  const PackedHeader& w = *c.w;
  alignas(64) static const float ones[32] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                                             1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  alignas(64) float scales[kPanelOperands][32], offsets[kPanelOperands][32];
  const int64_t group_operands = w.group_k / Compute::k_per_operand, tiles = c.m_tile_end - c.m_tile_begin;
  const int64_t first_row = m_tile_start(c, c.m_tile_begin), last_row = m_tile_start(c, c.m_tile_end);
  const bool scaled = scales_panel(c, w.group_k), has_offsets = w.offset_type != kNone;
  for (int64_t i = first_row * 32; i < last_row * 32; i += 16) _mm512_store_ps(acc + i, _mm512_setzero_ps());
  const uint8_t* p = c.base + w.codes + block * n_block_bytes(w);
  for (int64_t at = 0; at < c.row_int32;) {
    KSlice slice = k_slice_at(w, group_operands, at);
    load_group_scales(c, block, slice.first_group, slice.num_groups, scales, offsets);
    const int64_t operands = slice.num_groups * slice.operands;
    const int64_t bytes = operands * Compute::k_per_operand / columns * k_block_bytes;
    const int64_t prefetch_share = (bytes / tiles + 63) / 64 * 64;
    slice.scales = scales[0], slice.offsets = has_offsets && slice.starts_group ? offsets[0] : nullptr;
    if constexpr (Compute::k_per_operand == 2) {
      if (scaled) {
        const int64_t k_blocks = slice.operands * 2 / columns;
        for (int64_t g = 0; g < slice.num_groups; g++)
          dequantize_scaled<BITS>(c, p + g * k_blocks * k_block_bytes, k_blocks, scales[g], has_offsets ? offsets[g] : nullptr,
                                  panel + g * slice.operands * 32);
      }
    }
    const bool fused = !scaled && BITS == 8 && Compute::k_per_operand == 2;  // the first M tile dequantizes
    if (!scaled && !fused) dequantize<Compute, BITS>(c, p, operands * Compute::k_per_operand / columns, panel);
    const uint8_t* codes = p;
    p += bytes;
    for (int64_t i = 0; i < bytes; i += kPageBytes) prefetch(p + kPageDistance[0] + i);
    if (scaled) slice.operands = operands, slice.num_groups = 1, slice.scales = ones, slice.offsets = nullptr;
    for (int64_t t = 0; t < tiles; t++) {
      const int64_t row = m_tile_start(c, c.m_tile_begin + t), rows = m_tile_start(c, c.m_tile_begin + t + 1) - row;
      for (int64_t i = 0; i < prefetch_share; i += 64)  // each M tile its share of the next slice
        _mm_prefetch(reinterpret_cast<const char*>(p + prefetch_share * t + i), _MM_HINT_T1);
      const int64_t group = row * w.num_groups + slice.first_group * rows;
      if constexpr (BITS == 8 && Compute::k_per_operand == 2) {
        if (fused && t == 0) {
          panel_tile_of<Compute>(
              rows, slice, FromCodes<Compute, BITS>{codes, panel, typename Compute::template LutOf<BITS>(c), {}, {}},
              c.x_packed + row * c.row_int32 + at * rows, c.x_group_sums + group, c.acc_init + group, acc + 32 * row);
          continue;
        }
      }
      panel_tile_of<Compute>(rows, slice, FromPanel{panel}, c.x_packed + row * c.row_int32 + at * rows, c.x_group_sums + group,
                             c.acc_init + group, acc + 32 * row);
    }
    at += operands;
  }
  for (int64_t m = first_row; m < last_row; m++)
    epilogue(c, m, block, _mm512_load_ps(acc + 32 * m), _mm512_load_ps(acc + 32 * m + 16));
}

template <class Compute, int BITS>
void compute_blocks_of(const GemmCall& c, int64_t first, int64_t last, uint32_t* panel, float* acc) {
  const bool has_offsets = c.w->offset_type != kNone;
  for (int64_t block = first; block < last; block++) {
    if (c.strategy == kPanel) panel_gemm<Compute, BITS>(c, block, panel, acc);
    else if (has_offsets) gemv<Compute, BITS, true>(c, block, block == first);
    else gemv<Compute, BITS, false>(c, block, block == first);
  }
}

}  // namespace
}  // namespace bitline::BITLINE_ISA
