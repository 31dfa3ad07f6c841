// Quantized linear layers on a CPU: y [M, N] = x [M, K] @ W.T with a packed W (packed_weight.h). One call's operands, and the
// micro-kernels that each ISA level provides.
#pragma once

#include "isa.h"
#include "packed_weight.h"

namespace bitline {

constexpr int kMaxTileM = 12;  // rows of x in a tile of vector registers
constexpr int kAmxTileM = 16;  // rows of x in an AMX tile
// Two-level accumulation: after this many groups the float32 accumulators are promoted to outer ones, which bounds rounding
// errors.
constexpr int kPromoteGroups = 16;
constexpr int64_t kPanelBytes = 1 << 14;  // of dequantized weights; with a tile of x it fits L1
constexpr int64_t kAmxPanelBytes = 1 << 15;  // at most
constexpr int kScratchRows = kAmxTileM + 2;

enum Dtype : int { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };  // of x, bias and y
constexpr int64_t item_bytes(int64_t dtype) { return dtype == kFloat32 ? 4 : 2; }
// Operands of the multiply-add: bfloat16 pairs (vdpbf16ps), float32 (FMA), or unsigned 8-bit codes with int8 (VNNI).
enum ComputeType : int { kComputeBF16 = 0, kComputeF32 = 1, kComputeInt8 = 2 };

// How a call computes. kGemv: W is dequantized in registers, anew for each M tile. kPanel: W is dequantized into a panel in cache,
// once for all M tiles. kAmxTiles: the same, with AMX tiles as operands. kInt8Slices: x as int8 digits, times the codes.
enum Strategy : int { kGemv = 0, kPanel = 1, kAmxTiles = 2, kInt8Slices = 3 };
// Where scales are applied with AMX. kScaleOutput: all columns of a row of W share one scale. kScaleAccumulators: to each group's
// accumulators. kScalePanel: to the dequantized panel, rounded to bfloat16 as a dense layer holds it.
enum ScaleAt : int { kScaleOutput = 0, kScaleAccumulators = 1, kScalePanel = 2 };

constexpr int kMaxTableCode = 24;  // of a table of 16 values that kInt8Slices reads as integers
// kInt8Slices. Row r of x is x_scale [group] * code_unit times the number whose int8 digits are the row's slices.
struct SlicedCall {
  int count;                 // digits of an element
  int max_tile_m;            // rows of an M tile at most
  bool x_is_int8;            // quantized activations: no fixed point is needed
  int32_t code_zero;         // codes, or table entries, stand for value + code_zero
  float code_unit;
  uint8_t table[16];         // where the codes are not integers
  const float* x_scales;     // [group][row of the tile], times code_unit
};

// One call. x_packed: the M tiles one after another; of up to 12 rows, each [int32][row of the tile]; with AMX of 16 rows, padded
// with zeros, each [K step][row of the tile][int32 of a K step].
struct GemmCall {
  const PackedHeader* w;
  const uint8_t* base;  // of the packed weight
  const void *x, *bias;
  const void* x_given;  // x before this call quantized it in groups; null where it is not or another call did
  void* y;
  int64_t m;
  int64_t m_tile_begin, m_tile_end;  // those to compute
  Dtype dtype;
  ComputeType compute;
  int64_t row_int32;         // int32 of one packed row of x, padded to whole K steps
  int64_t num_threads;
  Strategy strategy;
  ScaleAt scale_at;          // kAmxTiles
  int64_t k_step_int32;      // kAmxTiles: int32 of a row of an A tile, rows of a B tile
  int64_t slice_int32;       // kAmxTiles: int32 of a row of x in a K slice
  int64_t chunk_blocks;      // kAmxTiles: N blocks that go by while a K slice of x stays in cache
  const uint32_t* x_packed;
  const float* x_group_sums; // where W has offsets: x summed over each group, in x_packed's order of tiles
  const int32_t* acc_init;   // kComputeInt8, kInt8Slices: initial accumulators, -zero * that sum of the codes of x (of each slice)
  SlicedCall slices;
  const float* act_scale;    // activation quantization: the scale of each row, else null
  float act_tensor_scale;    // one scale for all of x, 0 where each row has its own
  int act_tensor_zero;
  const GemmCall* x_from;    // the call whose packed x it reads; null: its own
  int64_t first_task;        // among the tasks of all calls that run together
  int64_t n_partitions, m_partitions;
};

// Columns of W in one int32 of a packed row of x.
inline int64_t k_per_int32(ComputeType compute) { return compute == kComputeBF16 ? 2 : compute == kComputeF32 ? 1 : 4; }

namespace {  // internal linkage: see parallel.h

inline uint32_t bits_of(float v) {
  uint32_t b;
  __builtin_memcpy(&b, &v, 4);
  return b;
}
inline float from_bits(uint32_t b) {
  float v;
  __builtin_memcpy(&v, &b, 4);
  return v;
}

// Whether products of W's codes and of x, quantized to int8, are summed as int32.
inline bool has_int8_activations(const PackedHeader& w) {
  return w.act_quant == kActInt8 && w.is_integer && (w.bits == 4 || w.bits == 8);
}

// fn.operator()<BITS>() for the bits of a packed code.
template <class F> void with_bits(int64_t bits, const F& fn) {
  switch (bits) {
    case 2: return fn.template operator()<2>();
    case 3: return fn.template operator()<3>();
    case 4: return fn.template operator()<4>();
    case 5: return fn.template operator()<5>();
    case 6: return fn.template operator()<6>();
    default: return fn.template operator()<8>();
  }
}

}  // namespace

inline int64_t max_tile_m(const GemmCall& c) {
  return c.strategy == kAmxTiles ? kAmxTileM : c.strategy == kInt8Slices ? c.slices.max_tile_m : kMaxTileM;
}
inline int64_t num_m_tiles(const GemmCall& c) { return (c.m + max_tile_m(c) - 1) / max_tile_m(c); }
// First row of M tile t. Tiles of vectors differ by one row at most; AMX tiles are full, but for the last.
inline int64_t m_tile_start(const GemmCall& c, int64_t t) {
  const int64_t n = num_m_tiles(c);
  if (c.strategy == kAmxTiles) return t < n ? t * kAmxTileM : c.m;
  return c.m / n * t + (t < c.m % n ? t : c.m % n);
}

// Activation scale and zero point for values between low and high; act_quant.py computes the same.
inline void act_quant_params(const PackedHeader& w, float low, float high, float* scale, int* zero) {
  const int64_t act = w.act_quant;
  low = low < -w.act_limit ? -w.act_limit : low, high = high > w.act_limit ? w.act_limit : high;
  const float amax = -low > high ? -low : high, min_scale = 0x1p-23f;
  *zero = 0;
  if (act == kActInt8Asym) {
    low = low < 0 ? low : 0, high = high > 0 ? high : 0;
    *scale = (high - low) / 255.0f;
    if (*scale < min_scale) *scale = min_scale;
    const float z = __builtin_rintf(-128.0f - low / *scale);
    *zero = int(z < -128 ? -128.0f : z > 127 ? 127.0f : z);
    return;
  }
  *scale = amax / (act == kActFP8 ? 448.0f : 127.5f);
  if (*scale < min_scale) *scale = min_scale;
}

struct GemmKernels {
  // N blocks [first, last) of y, for the call's M tiles. panel: panel_bytes; acc: acc_floats. Both 64-byte aligned.
  void (*compute_blocks)(const GemmCall& c, int64_t first, int64_t last, uint32_t* panel, float* acc);
  // Fill x_packed, x_group_sums, acc_init and act_scale of one M tile. scratch: kScratchRows rows of row_int32 int32.
  void (*pack_activations)(const GemmCall& c, int64_t m_tile, float* scratch);
  // Minimum and maximum of n numbers; false where one of them is not finite.
  bool (*min_max)(const void* x, int64_t n, Dtype dtype, float* low, float* high);
  bool (*supports)(ComputeType compute);
  // Set strategy, row_int32 and what AMX needs beside, from the call's M, compute type and weight.
  void (*plan)(GemmCall& c);
};

// What a thread needs to compute one partition.
inline int64_t panel_bytes(const GemmCall& c) { return c.strategy == kAmxTiles ? kAmxPanelBytes : kPanelBytes; }
inline int64_t acc_floats(const GemmCall& c) {
  if (c.strategy == kAmxTiles) return num_m_tiles(c) * kAmxTileM * kBlockN * c.chunk_blocks;
  return c.strategy == kPanel ? 2 * c.m * kBlockN : 0;
}

BITLINE_AVX2(namespace avx2 { extern const GemmKernels gemm_kernels; })
BITLINE_AVX_VNNI(namespace avx_vnni { extern const GemmKernels gemm_kernels; })
BITLINE_AVX512(namespace avx512 { extern const GemmKernels gemm_kernels; })
BITLINE_AMX(namespace amx { extern const GemmKernels gemm_kernels; })
BITLINE_NEON(namespace neon { extern const GemmKernels gemm_kernels; })
BITLINE_NEON_I8MM(namespace neon_i8mm { extern const GemmKernels gemm_kernels; })

}  // namespace bitline

// Defined in gemm.cpp, which documents them; also called by torch_op.cpp and decode_step.cpp.
BITLINE_EXPORT int bitline_gemm(const void* x, int64_t m, const void* packed, const void* bias, void* y, int dtype);
BITLINE_EXPORT int bitline_fused_gemv(const void* x, int64_t k, const void* w0, const void* bias0, const void* w1,
                                      const void* bias1, const void* w2, const void* bias2, void* y, int dtype);
