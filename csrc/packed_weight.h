// The packed weight of the CPU linear kernels: one byte array that starts with PackedHeader. kernels/cpu/packed_weight.py writes
// header and tables, gemm_pack.cpp codes and scales.
//
// Codes lie in blocks of kBlockN output rows, and within a block in K blocks (k_block_of(bits) columns). A K block is one
// 64-byte vector of rows 0-15 and one of rows 16-31, for each int32 that a row's codes of the K block fill; row r is 32-bit
// lane r % 16. The low 16 bits of a lane hold codes of even columns, the high ones of odd columns (bit_position), so that one
// shift brings the codes of two neighbouring columns to the low bits of the halves: a 16-bit table look-up makes them a
// bfloat16 pair, vdpbf16ps's operand.
#pragma once

#include "isa.h"

namespace bitline {

constexpr int kBlockN = 32;  // output rows of a block: two vectors of 16 lanes
constexpr int64_t kPackedMagic = 0x32304d4d45474c42;  // with the layout's version

// How scales or offsets are stored. kU8, kI8 and kE4M3 are multiplied by a second-level float32 scale (GGUF's super-block
// scale, NVFP4's global scale). kZeroPoint: int8 zero point minus the implicit one, which stands for the offset -scale * zero.
enum ScaleType : int64_t { kNone = 0, kF32 = 1, kBF16 = 2, kF16 = 3, kU8 = 4, kI8 = 5, kE4M3 = 6, kZeroPoint = 7 };
// Activation quantization before the GEMM, and over what one activation scale reaches.
enum ActQuant : int64_t { kActNone = 0, kActInt8 = 1, kActInt8Asym = 2, kActFP8 = 3 };
enum ActGranularity : int64_t { kPerToken = 0, kPerTensor = 1, kStatic = 2 };
// The same in groups of columns: the GEMM then reads the values that the codes stand for. Element type of the codes, and format of
// a group's scale; kGroupE4M3Scale lies under a static global one.
enum GroupQuant : int64_t { kNoGroups = 0, kGroupInt8 = 1, kGroupE4M3 = 2, kGroupE5M2 = 3, kGroupE2M1 = 4, kGroupE2M3 = 5,
                            kGroupE3M2 = 6 };
enum GroupScale : int64_t { kGroupF32Scale = 0, kGroupE8M0Scale = 1, kGroupE4M3Scale = 2, kGroupE5M3Scale = 3 };

// The first 256 bytes. `codes` to `lut_f32` are the sections' byte offsets from the start, 0 where a section is absent. scales,
// offsets: [N block][group][32]. super_scales, super_offsets: float32 [N block][ceil(groups / groups_per_super_scale)][32].
// column_map: int32 [k_packed], the input column of each packed column, -1 for padding. lut_bf16: values of the codes as
// gemm_avx512_dequant.h reads them; lut_f32: float32 values of all 2**bits codes.
struct PackedHeader {
  int64_t magic, bytes, n, k;
  int64_t k_packed;    // num_groups * group_k
  int64_t bits;        // of a packed code: 2, 3, 4, 5, 6 or 8
  int64_t num_groups;  // scales of a row
  int64_t group_k;     // columns of a group, padded to a multiple of the K block
  int64_t is_integer, implicit_zero;  // integer codes stand for code - implicit_zero
  int64_t scale_type, offset_type, groups_per_super_scale;
  int64_t codes, scales, offsets, super_scales, super_offsets, column_map, lut_bf16, lut_f32;
  int64_t act_quant, act_granularity;
  float act_scale;     // kStatic
  int32_t act_zero;    // kStatic
  float act_limit;     // dynamic scales clamp absolute values to it; infinity: no limit
  int32_t lut_bf16_inexact;  // 1: lut_bf16 rounds some value
  int64_t batch_invariant;   // 1: a row's result must not depend on M
  int64_t row_scales;        // 1: all groups of a row have the same scale and offset
  int64_t group_quant, group_scale, group_quant_k;  // kind, format of the scales, columns of a group
  float group_global_scale;  // kGroupE4M3Scale: what block scales were multiplied by; 1 where the checkpoint has none
  int32_t padding;
  int64_t reserved;
};
static_assert(sizeof(PackedHeader) == 256);

// Columns of a K block.
constexpr int k_block_of(int64_t bits) {
  return bits == 2 ? 16 : bits == 3 ? 32 : bits == 4 ? 8 : bits == 5 ? 32 : bits == 6 ? 16 : 4;
}

// Where bit `bit` of the code of column `column` of a K block lies: an int32 of its row, and a bit of that. Each 16-bit half
// holds as many whole codes as fit; the bits left over of all int32 of a K block hold its last one (3 and 5 bits) or two (6
// bits) column pairs.
struct BitPosition {
  int index, bit;
};
constexpr BitPosition bit_position(int bits, int column, int bit) {
  const int pair = column / 2, half = column % 2 * 16, per_half = 16 / bits;
  if (16 % bits == 0) return {pair / per_half, half + pair % per_half * bits + bit};
  const int int32_count = k_block_of(bits) * bits / 32;
  if (pair < int32_count * per_half) return {pair / per_half, half + pair % per_half * bits + bit};
  if (bits == 6) return bit < 4 ? BitPosition{pair - 6, half + 12 + bit} : BitPosition{2, half + 2 * pair + bit - 4};
  return {bit, half + 15};  // 3 and 5 bits
}

inline int64_t n_block_bytes(const PackedHeader& w) { return w.k_packed * w.bits * kBlockN / 8; }
inline int64_t num_n_blocks(const PackedHeader& w) { return (w.n + kBlockN - 1) / kBlockN; }

}  // namespace bitline
