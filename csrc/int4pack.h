// The packed weight of torch's CPU int4 operator.
#pragma once

#include "isa.h"

namespace bitline {

// Bytes of `block` rows lie as [K', block / 2]; low nibbles are the rows low_start, low_start + low_step, … of a block, high
// nibbles likewise. kernels/torch/int4_packing.py learns it from torch.
struct NibbleLayout {
  int block, low_start, low_step, high_start, high_step;
};

constexpr int64_t kChunk = 256;  // codes of a row that are laid out at a time
constexpr int kMostRows4 = 64;

// How scales become (s, z): see bitline_int4pack_scales.
struct ScaleRow {
  float step, middle, center;
  const int64_t* pick;
  int64_t columns;
};

struct Int4PackTable {
  // rows [block][kChunk / 2]: nibbles of each row, even columns low; to dst [codes][block / 2]. codes: a multiple of 32.
  void (*lay)(const uint8_t* rows, int64_t codes, const NibbleLayout& layout, uint8_t* dst);
  // Codes as bytes, each replaced by (code ^ flip) + add or, where there is a table of 16, by table[code].
  void (*change)(uint8_t* codes, int64_t n, uint8_t flip, uint8_t add, const uint8_t* table);
  // Pairs of bytes to nibbles: bits [shift, shift + 4) of each.
  void (*nibbles)(const uint8_t* codes, int64_t n, int shift, uint8_t* dst);
  // One row's scales as pairs of bfloat16, s in the low half; `high` (16 s, 8 s) may be null, as may zero and offset.
  void (*scales)(const ScaleRow& row, const float* scale, const uint8_t* zero, const float* offset, uint32_t* pairs,
                 uint32_t* high);
};

namespace portable { extern const Int4PackTable int4pack; }
BITLINE_AVX2(namespace avx2 { extern const Int4PackTable int4pack; })

}  // namespace bitline
