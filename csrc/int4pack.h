// The packed weight of aten::_weight_int4pack_mm_for_cpu.
#pragma once

#include "isa.h"

namespace bitline {

// Bytes of `rows` weight rows lie as [K', rows / 2]. Low nibbles are the rows low_start, low_start + low_step, … of such a block,
// high nibbles likewise. kernels/torch/int4_packing.py measures it in the running torch.
struct NibbleOrder {
  int rows, low_start, low_step, high_start, high_step;
};

constexpr int64_t kChunkCodes = 256;  // codes of a row that are laid out at a time
constexpr int kMaxBlockRows = 64;

// How scales become torch's pairs (s, z); see bitline_int4pack_scales.
struct ScaleConversion {
  float step, step_center, center;  // step_center: step * center
  const int64_t* group;             // of each column of pairs
  int64_t columns;
};

struct Int4PackKernels {
  // rows [order.rows][kChunkCodes / 2]: nibbles of each row, even columns low; to dst [codes][order.rows / 2]. codes: a
  // multiple of 32.
  void (*interleave)(const uint8_t* rows, int64_t codes, const NibbleOrder& order, uint8_t* dst);
  // Codes, one per byte, in place: (code ^ flip) + add, or lut[code] where a table of 16 is given.
  void (*map_codes)(uint8_t* codes, int64_t n, uint8_t flip, uint8_t add, const uint8_t* lut);
  // Bits [shift, shift + 4) of n bytes to n / 2 bytes of two nibbles.
  void (*pack_nibbles)(const uint8_t* codes, int64_t n, int shift, uint8_t* dst);
  // One row's scales as pairs of bfloat16, s in the low half; high_pairs (16 s, 8 s) for the plane of high nibbles. zero,
  // offset and high_pairs may be null.
  void (*scale_pairs)(const ScaleConversion& conversion, const float* scale, const uint8_t* zero, const float* offset,
                      uint32_t* pairs, uint32_t* high_pairs);
};

namespace portable { extern const Int4PackKernels int4pack_kernels; }
BITLINE_AVX2(namespace avx2 { extern const Int4PackKernels int4pack_kernels; })

}  // namespace bitline
