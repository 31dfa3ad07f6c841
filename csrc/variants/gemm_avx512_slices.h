// How many rows of x the int8 slices of AVX-512 multiply at once.
#pragma once

namespace bitline::BITLINE_ISA {
namespace {

// Codes whose K block takes several vectors, and many shifts.
constexpr bool has_long_k_block(int bits) { return bits == 3 || bits == 5 || bits == 6; }

// Accumulators of two vectors of rows of W, for each digit and row of x, fill up to 24 of 32 registers; long K blocks need more
// for codes.
constexpr int max_slices_rows(int bits, int digits) {
  if (digits == 2) return has_long_k_block(bits) ? 4 : 6;
  return has_long_k_block(bits) ? 2 : digits == 3 ? 4 : 3;
}

}  // namespace
}  // namespace bitline::BITLINE_ISA
