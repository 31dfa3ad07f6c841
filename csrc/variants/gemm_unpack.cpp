// Codes become float32 in registers and are scaled there, output rows side by side; a panel of such columns is rounded and
// transposed to rows of W.
#include "gemm_unpack.h"

#include <string.h>

#include "variants/gemm_group_scales.h"
#include "variants/transpose.h"
#include "variants/vector_math.h"

namespace bitline::BITLINE_ISA {
namespace {

constexpr int kPanelK = 64;  // columns of a panel: whole K blocks of every bit width

// Decoder: read() takes the codes of a K block at p, rows from `lane` on; column(j) is what those of its column j stand for.
// found_nan(): a NaN code was read as a number.
#ifdef BITLINE_ISA_avx512

using F32 = __m512;
typedef uint32_t U32 __attribute__((vector_size(64)));
enum CodeKind { kAnyCodes };

template <int BITS, CodeKind> struct Decoder {
  LutF32<BITS> lut;
  KBlock<BITS> codes;
  explicit Decoder(const GemmCall& c) : lut(c) {}
  INLINE void read(const uint8_t* p, int lane) { codes.read(p + 4 * lane); }
  INLINE F32 column(int j) const { return _mm512_castsi512_ps(ComputeF32::operand<BITS>(codes, lut, j)); }
  bool found_nan() const { return false; }
};

INLINE F32 load_f32(const float* p) { return _mm512_loadu_ps(p); }
INLINE void store_f32(float* p, F32 v) { _mm512_storeu_ps(p, v); }
INLINE U32 f16_bits(F32 v) { return U32(_mm512_cvtepu16_epi32(_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT))); }

// 4-bit codes are looked up in float32, others as bfloat16.
bool supports(const PackedHeader& w) { return w.bits == 4 || !w.lut_bf16_inexact; }

#else

template <int BITS, CodeKind KIND> struct Decoder : Dequantizer<BITS, KIND> {
  const uint8_t* at;
  int from;
  explicit Decoder(const GemmCall& c) : Dequantizer<BITS, KIND>(c) {}
  INLINE void read(const uint8_t* p, int lane) { at = p, from = lane; }
  INLINE F32 column(int j) { return (*this)(at, from, j); }
};

INLINE U32 f16_bits(F32 v) { return __builtin_convertvector(f32_to_f16(v), U32); }

bool supports(const PackedHeader&) { return true; }

#endif

enum OffsetKind { kNoOffset, kCodeOffset, kValueOffset };

// `count` packed columns from `first` on of an N block, to panel [count][32].
template <int BITS, OffsetKind OFFSET, class Codes>
void fill_panel(const GemmCall& c, int64_t block, int64_t first, int64_t count, Codes& codes, float* panel) {
  constexpr int columns = k_block_of(BITS), k_block_bytes = columns * BITS * kBlockN / 8;
  const PackedHeader& w = *c.w;
  for (int lane = 0; lane < kBlockN; lane += kLanes) {
    const uint8_t* p = c.base + w.codes + block * n_block_bytes(w) + first * BITS * kBlockN / 8;
    float* out = panel + lane;
    for (int64_t k = first; k < first + count;) {
      const int64_t g = k / w.group_k, group_end = (g + 1) * w.group_k;
      const int64_t end = group_end < first + count ? group_end : first + count;
      const GroupScales group(c, block, g);
      const F32 scale = group.scale(lane), offset = OFFSET == kNoOffset ? F32{} : group.offset(lane);
      for (; k < end; k += columns, p += k_block_bytes, out += columns * kBlockN) {
        codes.read(p, lane);
        UNROLL for (int j = 0; j < columns; ++j) {
          const F32 v = codes.column(j);
          if constexpr (OFFSET == kNoOffset) store_f32(out + j * kBlockN, v * scale);
          if constexpr (OFFSET == kCodeOffset) store_f32(out + j * kBlockN, (v - offset) * scale);
          if constexpr (OFFSET == kValueOffset) store_f32(out + j * kBlockN, v * scale + offset);
        }
      }
    }
  }
}

// int32 i of kLanes rows of W whose values are the panel's: one float32, or two neighbouring columns of 16 bits.
template <Dtype DTYPE> INLINE U32 rounded(const float* panel, int i) {
  if constexpr (DTYPE == kFloat32) return (U32)load_f32(panel + i * kBlockN);
  const F32 even = load_f32(panel + 2 * i * kBlockN), odd = load_f32(panel + (2 * i + 1) * kBlockN);
  if constexpr (DTYPE == kFloat16) return f16_bits(even) | f16_bits(odd) << 16;
  return bf16_bits(even) >> 16 | bf16_bits(odd);
}

// A panel as 32 rows of kPanelK columns, `stride` bytes apart.
template <Dtype DTYPE> void transpose_panel(const float* panel, uint8_t* rows, int64_t stride) {
  constexpr int row_int32 = DTYPE == kFloat32 ? kPanelK : kPanelK / 2;
  for (int lane = 0; lane < kBlockN; lane += kLanes) {
    for (int i = 0; i < row_int32; i += kLanes) {
      Vec tile[kLanes];
      UNROLL for (int j = 0; j < kLanes; ++j) tile[j] = (Vec)rounded<DTYPE>(panel + lane, i + j);
      transpose_tile(tile);
      UNROLL for (int r = 0; r < kLanes; ++r) memcpy(rows + (lane + r) * stride + 4 * i, &tile[r], sizeof(Vec));
    }
  }
}

void transpose_panel(const float* panel, Dtype dtype, uint8_t* rows, int64_t stride) {
  if (dtype == kFloat32) transpose_panel<kFloat32>(panel, rows, stride);
  if (dtype == kFloat16) transpose_panel<kFloat16>(panel, rows, stride);
  if (dtype == kBFloat16) transpose_panel<kBFloat16>(panel, rows, stride);
}

// from [count], to the input columns of `map` of a row.
template <class T> void scatter(const T* from, const int32_t* map, int64_t count, T* row) {
  for (int64_t j = 0; j < count; ++j)
    if (map[j] >= 0) row[map[j]] = from[j];
}

// A panel of `count` packed columns from `first` on, to the rows of an N block.
void write_panel(const GemmCall& c, int64_t block, int64_t first, int64_t count, const float* panel, uint8_t* out) {
  const PackedHeader& w = *c.w;
  const int64_t itemsize = item_bytes(c.dtype), stride = w.k * itemsize;
  const int64_t rows = w.n - block * kBlockN < kBlockN ? w.n - block * kBlockN : kBlockN;
  uint8_t* to = out + block * kBlockN * stride;
  if (!w.column_map && rows == kBlockN && first + kPanelK <= w.k) return transpose_panel(panel, c.dtype, to + first * itemsize, stride);
  alignas(64) uint32_t copies[kBlockN][kPanelK];
  transpose_panel(panel, c.dtype, reinterpret_cast<uint8_t*>(copies), sizeof copies[0]);
  const int32_t* map = reinterpret_cast<const int32_t*>(c.base + w.column_map) + first;
  const int64_t left = w.k - first < count ? w.k - first : count;
  for (int64_t r = 0; r < rows; ++r, to += stride) {
    if (!w.column_map && left > 0) memcpy(to + first * itemsize, copies[r], size_t(left * itemsize));
    if (w.column_map && itemsize == 4) scatter(copies[r], map, count, reinterpret_cast<uint32_t*>(to));
    if (w.column_map && itemsize == 2) scatter(reinterpret_cast<uint16_t*>(copies[r]), map, count, reinterpret_cast<uint16_t*>(to));
  }
}

// One N block. False: a NaN code was read as a number.
template <int BITS, CodeKind KIND> bool unpack_codes_block(const GemmCall& c, int64_t block, uint8_t* out) {
  const PackedHeader& w = *c.w;
  Decoder<BITS, KIND> codes(c);
  alignas(64) float panel[kPanelK * kBlockN] = {};
  for (int64_t first = 0; first < w.k_packed; first += kPanelK) {
    const int64_t count = w.k_packed - first < kPanelK ? w.k_packed - first : kPanelK;
    if (w.offset_type == kNone) fill_panel<BITS, kNoOffset>(c, block, first, count, codes, panel);
    else if (w.offset_type == kZeroPoint) fill_panel<BITS, kCodeOffset>(c, block, first, count, codes, panel);
    else fill_panel<BITS, kValueOffset>(c, block, first, count, codes, panel);
    write_panel(c, block, first, count, panel, out);
  }
  return !codes.found_nan();
}

void unpack_block(const PackedHeader& w, int64_t block, Dtype dtype, uint8_t* out) {
  GemmCall c;
  memset(&c, 0, sizeof c);
  c.w = &w, c.base = reinterpret_cast<const uint8_t*>(&w), c.dtype = dtype;
#ifdef BITLINE_ISA_avx512
  with_bits(w.bits, [&]<int BITS>() { unpack_codes_block<BITS, kAnyCodes>(c, block, out); });
#else
  if (!w.is_integer && is_e4m3(c) && unpack_codes_block<8, kE4M3>(c, block, out)) return;
  with_bits(w.bits, [&]<int BITS>() {
    w.is_integer ? unpack_codes_block<BITS, kInteger>(c, block, out) : unpack_codes_block<BITS, kTable>(c, block, out);
  });
#endif
}

}  // namespace

extern const GemmUnpackKernels gemm_unpack_kernels = {supports, unpack_block};

}  // namespace bitline::BITLINE_ISA
