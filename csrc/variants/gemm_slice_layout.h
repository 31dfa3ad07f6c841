// Which columns of a K block the bytes of int8 products hold, how they are brought there, and how x is split into slices
// (gemm_int8_slices.h, gemm_avx512_slices.cpp).
#pragma once

#include "packed_weight.h"

namespace bitline::BITLINE_ISA {
namespace {

#ifdef BITLINE_ISA_avx2
constexpr bool kWideDot = false;  // vpmaddubsw sums two products in 16 bits
#else
constexpr bool kWideDot = true;
#endif

#ifdef BITLINE_ISA_neon
constexpr bool kSignedDot = true;  // sdot: both operands are signed
#else
constexpr bool kSignedDot = false;
#endif

constexpr int kMaxSlices = 4;
// What is subtracted from codes before they are multiplied.
constexpr int code_bias(int bits) { return kSignedDot && bits == 8 ? 128 : 0; }
// Bits of a digit: two products with 8-bit codes must fit 16 bits.
constexpr int slice_bits(int bits) { return !kWideDot && bits == 8 ? 7 : 8; }

// The column pairs of a K block, even and odd column, whose codes byte vector j holds in its even and odd bytes: chosen so that
// few shifts bring them there.
template <int BITS> constexpr int byte_pair(int j, int odd_byte) {
  constexpr int pairs3[8][2] = {{0, 3}, {1, 4}, {5, 8}, {6, 9}, {10, 13}, {11, 14}, {2, 7}, {12, 15}};
  constexpr int pairs5[8][2] = {{0, 2}, {3, 5}, {6, 8}, {9, 11}, {12, 14}, {1, 4}, {7, 10}, {13, 15}};
  if constexpr (BITS == 2) return j + 4 * odd_byte;
  if constexpr (BITS == 3) return pairs3[j][odd_byte];
  if constexpr (BITS == 4) return j + 2 * odd_byte;
  if constexpr (BITS == 5) return pairs5[j][odd_byte];
  return 2 * j + odd_byte;
}

template <int BITS> constexpr int byte_vectors() { return k_block_of(BITS) / 4; }

// Column of a K block in byte `byte` of byte vector j.
template <int BITS> constexpr int byte_column(int j, int byte) { return 2 * byte_pair<BITS>(j, byte & 1) + (byte >> 1); }

// Bits of a byte vector that one shift of one int32 of the K block brings into place. shift: to the right.
struct ByteTerm {
  int index, shift;
  uint32_t mask;
};
template <int BITS> struct ByteTerms {
  int count[byte_vectors<BITS>()];
  ByteTerm term[byte_vectors<BITS>()][2 * BITS];
};
template <int BITS> constexpr ByteTerms<BITS> make_byte_terms() {
  ByteTerms<BITS> all{};
  for (int j = 0; j < byte_vectors<BITS>(); ++j)
    for (int byte = 0; byte < 2; ++byte)
      for (int bit = 0; bit < BITS; ++bit) {
        const BitPosition at = bit_position(BITS, 2 * byte_pair<BITS>(j, byte), bit);
        const int shift = at.bit - 8 * byte - bit;
        int i = 0;
        while (i < all.count[j] && (all.term[j][i].index != at.index || all.term[j][i].shift != shift)) ++i;
        if (i == all.count[j]) all.term[j][all.count[j]++] = {at.index, shift, 0};
        all.term[j][i].mask |= 0x00010001u << (8 * byte + bit);
      }
  return all;
}

}  // namespace
}  // namespace bitline::BITLINE_ISA
