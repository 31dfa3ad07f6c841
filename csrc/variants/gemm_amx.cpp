// AMX: K slices of an N block are dequantized into a panel in L1 whose rows are B tiles; x lies packed as A tiles of 16 rows. Small
// M, and whatever AMX does not run, is left to AVX-512's kernels.
#include "gemm_avx512_panel.h"

namespace bitline::avx512 {
extern const GemmKernels gemm_kernels;
int64_t max_slices_m(const GemmCall& c);
bool plan_few_rows(GemmCall& c, int64_t max_m);
void plan_vectors(GemmCall& c);
}

namespace bitline::BITLINE_ISA {
namespace {

constexpr int64_t kMinInt8M = 12;  // below, AVX-512's GEMV with VNNI
constexpr int64_t kMaxStepInt32 = 16;  // rows of a B tile
constexpr int64_t kMaxSliceInt32 = kAmxPanelBytes / 4 / kBlockN;
constexpr int64_t kMaxSliceGroups = kMaxSliceInt32 / 4;

// ---- tiles ---------------------------------------------------------------------------------------------------------------

// GCC's intrinsics do not say that tile loads, of configurations too, read memory.
INLINE void finish_stores(const void* p = nullptr) { __asm__ volatile("" ::"r"(p) : "memory"); }

// Tiles 0-3: accumulators, 4 and 5: x, 6 and 7: W.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Once a thread and partition. With less than 16 rows of x, tiles of just these rows are loaded and stored.
void configure_tiles(const GemmCall& c) {
  TileConfig t;
  const uint8_t m = uint8_t(c.m < kAmxTileM ? c.m : kAmxTileM);
  for (int i = 0; i < 4; ++i) t.rows[i] = m, t.row_bytes[i] = 64;
  for (int i = 4; i < 6; ++i) t.rows[i] = m, t.row_bytes[i] = uint16_t(c.k_step_int32 * 4);
  for (int i = 6; i < 8; ++i) t.rows[i] = uint8_t(c.k_step_int32), t.row_bytes[i] = 64;
  finish_stores(&t);
  _tile_loadconfig(&t);
}

// Accumulator tile += A tile * B tile: bfloat16 pairs, or signed x times unsigned codes.
#define BITLINE_MMA(acc, a, b) \
  if constexpr (Compute::k_per_operand == 2) _tile_dpbf16ps(acc, a, b); \
  else _tile_dpbsud(acc, a, b)

// 32 rows of x, in two A tiles a_stride int32 apart, times 32 of W. a: [K step][16][step]; b: [K step][step][32].
template <class Compute>
INLINE void mma_two_tiles(const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t steps, int64_t step) {
  finish_stores();
  for (int64_t s = 0; s < steps; ++s) {
    _tile_loadd(6, b, kBlockN * 4);
    _tile_loadd(4, a, step * 4);
    BITLINE_MMA(0, 4, 6);
    _tile_loadd(7, b + 16, kBlockN * 4);
    BITLINE_MMA(1, 4, 7);
    _tile_loadd(5, a + a_stride, step * 4);
    BITLINE_MMA(2, 5, 6);
    BITLINE_MMA(3, 5, 7);
    a += kAmxTileM * step, b += kBlockN * step;
  }
}

// One A tile. Odd K steps have accumulators of their own, which hides half of the latency.
template <class Compute> INLINE void mma_one_tile(const uint32_t* a, const uint32_t* b, int64_t steps, int64_t step) {
  finish_stores();
  for (int64_t s = 0; s < steps; s += 2) {
    _tile_loadd(4, a, step * 4);
    _tile_loadd(6, b, kBlockN * 4);
    BITLINE_MMA(0, 4, 6);
    _tile_loadd(7, b + 16, kBlockN * 4);
    BITLINE_MMA(1, 4, 7);
    if (s + 1 == steps) break;
    a += kAmxTileM * step, b += kBlockN * step;
    _tile_loadd(5, a, step * 4);
    _tile_loadd(6, b, kBlockN * 4);
    BITLINE_MMA(2, 5, 6);
    _tile_loadd(7, b + 16, kBlockN * 4);
    BITLINE_MMA(3, 5, 7);
    a += kAmxTileM * step, b += kBlockN * step;
  }
}
#undef BITLINE_MMA

INLINE void zero_accumulators() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}
// acc: [32][32].
INLINE void load_accumulators(const float* acc) {
  constexpr int stride = kBlockN * 4;
  finish_stores();
  _tile_loadd(0, acc, stride);
  _tile_loadd(1, acc + 16, stride);
  _tile_loadd(2, acc + 16 * kBlockN, stride);
  _tile_loadd(3, acc + 16 * kBlockN + 16, stride);
}
INLINE void store_accumulators(float* acc) {
  constexpr int stride = kBlockN * 4;
  _tile_stored(0, acc, stride);
  _tile_stored(1, acc + 16, stride);
  _tile_stored(2, acc + 16 * kBlockN, stride);
  _tile_stored(3, acc + 16 * kBlockN + 16, stride);
}

// ---- K slices ------------------------------------------------------------------------------------------------------------

// Some K steps of an N block: whole groups where accumulators are scaled.
struct Slice {
  int64_t begin, int32_count;   // of a packed row of x
  int64_t first_group, groups;  // kScaleAccumulators
};

template <class Compute> INLINE int64_t group_int32(const GemmCall& c) { return c.w->group_k / Compute::k_per_operand; }

template <class Compute> Slice slice_at(const GemmCall& c, int64_t begin) {
  Slice s{begin, c.row_int32 - begin < c.slice_int32 ? c.row_int32 - begin : c.slice_int32, 0, 0};
  if (c.scale_at != kScaleAccumulators) return s;
  const int64_t per_group = group_int32<Compute>(c);
  s.first_group = begin / per_group, s.groups = s.int32_count < per_group ? 1 : s.int32_count / per_group;
  s.int32_count = s.groups * per_group;
  return s;
}

// A slice of W as rows of B tiles [int32_count][32], in `panel` or where it lies. next: codes to prefetch meanwhile.
template <class Compute, int BITS>
const uint32_t* dequantize_slice(const GemmCall& c, int64_t block, const Slice& slice, const uint8_t* next, uint32_t* panel) {
  constexpr int columns = KBlock<BITS>::columns, k_block_bytes = 128 * KBlock<BITS>::vectors;
  const PackedHeader& w = *c.w;
  const int64_t k = slice.begin * Compute::k_per_operand, left = w.k_packed - k;
  int64_t k_count = slice.int32_count * Compute::k_per_operand;
  if (k_count > left) {
    const int64_t filled = left / Compute::k_per_operand;
    for (int64_t i = filled * kBlockN; i < slice.int32_count * kBlockN; i += 16)
      _mm512_store_si512(panel + i, _mm512_setzero_si512());
    k_count = left;
  } else if (BITS == 8 && Compute::k_per_operand == 4) {  // 8-bit codes are B tiles
    return reinterpret_cast<const uint32_t*>(c.base + w.codes + block * n_block_bytes(w) + k / columns * k_block_bytes);
  }
  const uint8_t* p = c.base + w.codes + block * n_block_bytes(w) + k / columns * k_block_bytes;
  if constexpr (Compute::k_per_operand == 2) {
    if (c.scale_at == kScalePanel) {
      alignas(64) float scales[kBlockN], offsets[kBlockN];
      ScaleCursor cursor(w, c.base, block, k / w.group_k);
      for (int64_t at = 0; at < k_count; cursor.next()) {
        const int64_t in_group = w.group_k - (k + at) % w.group_k, count = in_group < k_count - at ? in_group : k_count - at;
        cursor.store(scales, offsets);
        const int64_t from = at / columns * k_block_bytes;
        dequantize_scaled<BITS>(c, p + from, count / columns, scales, w.offset_type == kNone ? nullptr : offsets,
                                panel + at / 2 * kBlockN, next + from);
        at += count;
      }
      return panel;
    }
  }
  dequantize<Compute, BITS>(c, p, k_count / columns, panel, next);
  return panel;
}

// ---- accumulators in memory ----------------------------------------------------------------------------------------------

// Rows of one M tile whose accumulators lie in `from` [rows][32], those of odd K steps in `from_odd` or nowhere.
template <class Compute> INLINE typename Compute::Acc load_acc(const float* from, const float* from_odd, int64_t i) {
  using Acc = typename Compute::Acc;
  const Acc a = (Acc)_mm512_loadu_ps(from + i);
  return from_odd ? Compute::add(a, (Acc)_mm512_loadu_ps(from_odd + i)) : a;
}

template <class Compute> void add_unscaled(const float* from, const float* from_odd, int64_t rows, float* acc) {
  using Acc = typename Compute::Acc;
  for (int64_t i = 0; i < rows * kBlockN; i += 16)
    _mm512_storeu_ps(acc + i, (__m512)Compute::add((Acc)_mm512_loadu_ps(acc + i), load_acc<Compute>(from, from_odd, i)));
}

// scales, offsets: [32] of the group; offsets: null where there are none. sums, init: [rows] of the group.
template <class Compute>
void add_scaled(const float* from, const float* from_odd, int64_t rows, const float* scales, const float* offsets,
                const float* sums, const int32_t* init, float* acc) {
  for (int h = 0; h < 2; ++h) {
    const __m512 scale = _mm512_load_ps(scales + 16 * h);
    const __m512 offset = offsets ? _mm512_load_ps(offsets + 16 * h) : _mm512_setzero_ps();
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t i = r * kBlockN + 16 * h;
      const auto a = Compute::add(load_acc<Compute>(from, from_odd, i), Compute::init(init, r));
      __m512 v = _mm512_fmadd_ps(scale, Compute::to_f32(a), _mm512_loadu_ps(acc + i));
      if (offsets) v = _mm512_fmadd_ps(offset, _mm512_set1_ps(sums[r]), v);
      _mm512_storeu_ps(acc + i, v);
    }
  }
}

// ---- chunks of N blocks --------------------------------------------------------------------------------------------------

struct SliceScales {
  alignas(64) float scales[kMaxSliceGroups][kBlockN], offsets[kMaxSliceGroups][kBlockN];
};

// A slice of W times M tiles t and, if `two`, t + 1. acc: of tile t, [32 or 16][32].
template <class Compute>
void multiply_tiles(const GemmCall& c, const Slice& slice, const SliceScales& s, const uint32_t* b, int64_t t, bool two, float* acc) {
  const PackedHeader& w = *c.w;
  const int64_t step = c.k_step_int32, tile_int32 = kAmxTileM * c.row_int32, row = m_tile_start(c, t);
  const uint32_t* a = c.x_packed + row * c.row_int32 + slice.begin * kAmxTileM;
  alignas(64) float out[2 * kAmxTileM * kBlockN];
  if (c.scale_at != kScaleAccumulators) {
    if (two) {
      load_accumulators(acc);
      mma_two_tiles<Compute>(a, tile_int32, b, slice.int32_count / step, step);
      store_accumulators(acc);
    } else {
      zero_accumulators();
      mma_one_tile<Compute>(a, b, slice.int32_count / step, step);
      store_accumulators(out);
      add_unscaled<Compute>(out, out + kAmxTileM * kBlockN, m_tile_start(c, t + 1) - row, acc);
    }
    return;
  }
  const int64_t per_group = group_int32<Compute>(c), steps = per_group / step;
  for (int64_t g = 0; g < slice.groups; ++g, a += per_group * kAmxTileM, b += per_group * kBlockN) {
    zero_accumulators();
    if (two) mma_two_tiles<Compute>(a, tile_int32, b, steps, step);
    else mma_one_tile<Compute>(a, b, steps, step);
    store_accumulators(out);
    for (int i = 0; i <= int(two); ++i) {
      const int64_t first = m_tile_start(c, t + i), rows = m_tile_start(c, t + i + 1) - first;
      const int64_t group = first * w.num_groups + (slice.first_group + g) * rows;
      const float *from = out + i * kAmxTileM * kBlockN, *odd = two || steps == 1 ? nullptr : out + kAmxTileM * kBlockN;
      add_scaled<Compute>(from, odd, rows, s.scales[g], w.offset_type == kNone ? nullptr : s.offsets[g], c.x_group_sums + group,
                          c.acc_init + group, acc + i * kAmxTileM * kBlockN);
    }
  }
}

// Where all columns share a scale: init and sums of x over all groups.
template <class Compute>
void scale_output(const GemmCall& c, int64_t block, int64_t t, float* acc) {
  const PackedHeader& w = *c.w;
  const int64_t first = m_tile_start(c, t), rows = m_tile_start(c, t + 1) - first;
  alignas(64) float scales[kBlockN], offsets[kBlockN], sums[kAmxTileM] = {}, from[kAmxTileM * kBlockN];
  int32_t init[kAmxTileM] = {};
  ScaleCursor(w, c.base, block, 0).store(scales, offsets);
  for (int64_t g = 0; g < w.num_groups; ++g)
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t i = first * w.num_groups + g * rows + r;
      if (w.offset_type != kNone) sums[r] += c.x_group_sums[i];
      if (Compute::k_per_operand == 4) init[r] += c.acc_init[i];
    }
  for (int64_t i = 0; i < rows * kBlockN; i += 16)
    _mm512_store_ps(from + i, _mm512_loadu_ps(acc + i)), _mm512_storeu_ps(acc + i, _mm512_setzero_ps());
  add_scaled<Compute>(from, nullptr, rows, scales, w.offset_type == kNone ? nullptr : offsets, sums, init, acc);
}

// Bytes of codes that a slice's columns take in one N block, for prefetching.
template <class Compute, int BITS> INLINE int64_t slice_bytes(const Slice& slice) {
  return slice.int32_count * Compute::k_per_operand * BITS * kBlockN / 8;
}

// N blocks [first, first + count) of y: each K slice of x, in L1 or L2, meets them all.
template <class Compute, int BITS>
void compute_chunk(const GemmCall& c, int64_t first, int64_t count, uint32_t* panel, float* acc) {
  const PackedHeader& w = *c.w;
  const int64_t row0 = m_tile_start(c, c.m_tile_begin), block_floats = (c.m_tile_end - c.m_tile_begin) * kAmxTileM * kBlockN;
  for (int64_t i = 0; i < count * block_floats; i += 16) _mm512_store_ps(acc + i, _mm512_setzero_ps());
  SliceScales scales;
  const uint8_t* codes = c.base + w.codes;
  for (int64_t at = 0; at < c.row_int32;) {
    const Slice slice = slice_at<Compute>(c, at);
    const int64_t bytes = slice_bytes<Compute, BITS>(slice), from = at * Compute::k_per_operand * BITS * kBlockN / 8;
    for (int64_t i = 0; i < count; ++i) {
      // The slice after this one: of the next block, else the chunk's first block's next slice.
      const uint8_t* next = codes + (i + 1 < count ? (first + i + 1) * n_block_bytes(w) + from : first * n_block_bytes(w) + from + bytes);
      if (c.scale_at == kScaleAccumulators)
        load_group_scales(c, first + i, slice.first_group, slice.groups, scales.scales, scales.offsets);
      const uint32_t* b = dequantize_slice<Compute, BITS>(c, first + i, slice, next, panel);
      const bool in_place = b != panel;
      const int64_t pairs = (c.m_tile_end - c.m_tile_begin + 1) / 2, share = (bytes / pairs + 63) / 64 * 64;
      for (int64_t t = c.m_tile_begin; t < c.m_tile_end; t += 2) {
        const int64_t pair = (t - c.m_tile_begin) / 2;
        for (int64_t j = 0; in_place && j < share; j += 64)
          _mm_prefetch(reinterpret_cast<const char*>(next + pair * share + j), _MM_HINT_T1);
        multiply_tiles<Compute>(c, slice, scales, b, t, t + 1 < c.m_tile_end,
                                acc + i * block_floats + (m_tile_start(c, t) - row0) * kBlockN);
      }
    }
    at += slice.int32_count;
  }
  for (int64_t i = 0; i < count; ++i)
    for (int64_t t = c.m_tile_begin; t < c.m_tile_end; ++t) {
      float* tile_acc = acc + i * block_floats + (m_tile_start(c, t) - row0) * kBlockN;
      if (c.scale_at == kScaleOutput) scale_output<Compute>(c, first + i, t, tile_acc);
      for (int64_t m = m_tile_start(c, t); m < m_tile_start(c, t + 1); ++m, tile_acc += kBlockN)
        epilogue(c, m, first + i, _mm512_loadu_ps(tile_acc), _mm512_loadu_ps(tile_acc + 16));
    }
}

template <class Compute, int BITS>
void compute_blocks_of(const GemmCall& c, int64_t first, int64_t last, uint32_t* panel, float* acc) {
  configure_tiles(c);
  for (int64_t block = first; block < last; block += c.chunk_blocks)
    compute_chunk<Compute, BITS>(c, block, last - block < c.chunk_blocks ? last - block : c.chunk_blocks, panel, acc);
  _tile_release();
}

void compute_blocks(const GemmCall& c, int64_t first, int64_t last, uint32_t* panel, float* acc) {
  if (c.strategy != kAmxTiles) return avx512::gemm_kernels.compute_blocks(c, first, last, panel, acc);
  if (c.compute == kComputeInt8) {
    if (c.w->bits == 4) return compute_blocks_of<ComputeInt8, 4>(c, first, last, panel, acc);
    return compute_blocks_of<ComputeInt8, 8>(c, first, last, panel, acc);
  }
  with_bits(c.w->bits, [&]<int BITS>() { compute_blocks_of<ComputeBF16, BITS>(c, first, last, panel, acc); });
}

// ---- planning ------------------------------------------------------------------------------------------------------------

// Scaling a panel costs about 90 cycles more for each 1,024 weights than leaving it unscaled, scaling the accumulators of a group
// about 110 for each 32 rows of x.
bool prefers_scaled_panel(const GemmCall& c) { return 6 * c.m > 5 * c.w->group_k; }

// Up to here digits of x by VNNI are faster than tiles, which other inputs than bfloat16 do not have.
int64_t max_digits_m(const GemmCall& c) {
  if (c.dtype != kBFloat16) return avx512::max_slices_m(c);
  const PackedHeader& w = *c.w;
  if (w.bits == 8) return w.group_k >= 64 ? 12 : 8;
  if (w.bits == 3 || w.bits == 5) return 4;
  return w.bits != 6 && w.group_k >= 32 && w.group_k < 64 ? 8 : 6;
}

// From M = 2 to here AVX-512's GEMV in float32 is faster than tiles, and than vdpbf16ps: two FMAs start in a cycle, one vdpbf16ps
// in two.
int64_t max_f32_m(const PackedHeader& w) { return w.bits == 8 ? 2 : w.group_k >= 64 ? 3 : 5; }

// int32 of a K step, 0 where groups are too short or uneven for AMX.
int64_t k_step_of(int64_t per_group) {
  for (int64_t step = kMaxStepInt32; step >= 4; step /= 2)
    if (per_group % step == 0) return step;
  return 0;
}

// N blocks of a chunk: enough chunks to keep all threads busy, few enough accumulators for L2.
int64_t chunk_blocks_of(const GemmCall& c) {
  const int64_t fair = num_n_blocks(*c.w) / (4 * c.num_threads), most = c.m > 128 ? 4 : 2;
  return fair < 1 ? 1 : fair < most ? fair : most;
}

void plan(GemmCall& c) {
  if (avx512::plan_few_rows(c, max_digits_m(c))) return;
  avx512::plan_vectors(c);
  const PackedHeader& w = *c.w;
  if (c.m == 1 || w.batch_invariant || c.compute == kComputeF32) return;
  if (c.compute == kComputeInt8 && c.m < kMinInt8M) return;
  if (c.compute == kComputeBF16 && c.m <= max_f32_m(w)) {
    c.compute = kComputeF32;
    return avx512::plan_vectors(c);
  }
  const int64_t k_per = k_per_int32(c.compute), step = k_step_of(w.group_k / k_per);
  const bool may_round = c.compute == kComputeBF16 && c.dtype == kBFloat16;
  if (w.row_scales && (c.compute == kComputeBF16 || w.k_packed <= 65000)) c.scale_at = kScaleOutput;
  else if (may_round && (step == 0 || prefers_scaled_panel(c))) c.scale_at = kScalePanel;
  else if (step != 0) c.scale_at = kScaleAccumulators;
  else return;
  c.strategy = kAmxTiles;
  c.k_step_int32 = c.scale_at == kScaleAccumulators ? step : kMaxStepInt32;
  c.row_int32 = (w.k_packed / k_per + c.k_step_int32 - 1) / c.k_step_int32 * c.k_step_int32;
  c.slice_int32 = c.m <= 64 ? kMaxSliceInt32 / 8 : kMaxSliceInt32 / 2;
  c.chunk_blocks = chunk_blocks_of(c);
}

void pack_activations(const GemmCall& c, int64_t m_tile, float* scratch) {
  avx512::gemm_kernels.pack_activations(c, m_tile, scratch);
}
bool min_max(const void* x, int64_t n, Dtype dtype, float* low, float* high) {
  return avx512::gemm_kernels.min_max(x, n, dtype, low, high);
}
bool supports(ComputeType) { return true; }

}  // namespace

extern const GemmKernels gemm_kernels = {compute_blocks, pack_activations, min_max, supports, plan};

}  // namespace bitline::BITLINE_ISA
