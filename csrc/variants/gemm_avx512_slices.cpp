// Weight-only layers and few rows of x by VNNI: x of a group is split into int8 digits of one fixed-point number (the slices of the
// Ozaki scheme, gemm_pack_slices.h), whose products with the codes are summed exactly in integers.
#include "gemm_avx512_slices.h"

#include "gemm_avx512.h"
#include "gemm_slice_layout.h"

namespace bitline::BITLINE_ISA {
namespace {

template <int BITS> INLINE __m512i raw(const KBlock<BITS>& codes, int i) {
  if constexpr (KBlock<BITS>::vectors == 1) return codes.v;
  else return codes.v[i];
}

// Byte vector j of a K block (gemm_slice_layout.h).
template <int BITS> INLINE __m512i unpack_bytes(const KBlock<BITS>& codes, int j) {
  if constexpr (BITS == 8) return codes.v;
  constexpr ByteTerms<BITS> terms = make_byte_terms<BITS>();
  __m512i bytes = _mm512_setzero_si512();
  UNROLL for (int i = 0; i < terms.count[j]; i++) {
    const ByteTerm t = terms.term[j][i];
    const __m512i v = raw(codes, t.index), mask = _mm512_set1_epi32(int(t.mask));
    const __m512i right = t.shift > 0 ? _mm512_srli_epi32(v, unsigned(t.shift)) : v;
    const __m512i moved = t.shift < 0 ? _mm512_slli_epi32(v, unsigned(-t.shift)) : right;
    bytes = i == 0 ? _mm512_and_si512(moved, mask) : _mm512_ternarylogic_epi32(bytes, moved, mask, 0xF8);  // a | (b & c)
  }
  return bytes;
}

// Bytes of codes times DIGITS digits of x. TABLE: codes index 16 small integers.
template <int BITS_, int DIGITS, bool TABLE> struct ComputeSlices : ComputeInt8 {
  static constexpr int digits = DIGITS, max_rows = max_slices_rows(BITS_, DIGITS);
  template <int BITS> struct LutOf {
    __m512i table;
    INLINE explicit LutOf(const GemmCall& c) {
      if constexpr (TABLE) table = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(c.slices.table)));
    }
  };
  template <int BITS> static INLINE __m512i operand(const KBlock<BITS>& codes, const LutOf<BITS>& lut, int j) {
    const __m512i bytes = unpack_bytes<BITS>(codes, j);
    if constexpr (TABLE) return _mm512_shuffle_epi8(lut.table, bytes);
    return bytes;
  }
};

template <int BITS, int DIGITS, bool TABLE> void blocks_of(const GemmCall& c, int64_t first, int64_t last) {
  using Compute = ComputeSlices<BITS, DIGITS, TABLE>;
  for (int64_t block = first; block < last; block++) {
    if (c.w->offset_type != kNone) gemv<Compute, BITS, true>(c, block, block == first);
    else gemv<Compute, BITS, false>(c, block, block == first);
  }
}

template <int BITS, bool TABLE> void blocks_as(const GemmCall& c, int64_t first, int64_t last) {
  switch (c.slices.count) {
    case 2: return blocks_of<BITS, 2, TABLE>(c, first, last);
    case 3: return blocks_of<BITS, 3, TABLE>(c, first, last);
    default: return blocks_of<BITS, 4, TABLE>(c, first, last);
  }
}

}  // namespace

void gemm_slices(const GemmCall& c, int64_t first, int64_t last) {
  if (!c.w->is_integer) return blocks_as<4, true>(c, first, last);
  with_bits(c.w->bits, [&]<int BITS>() { blocks_as<BITS, false>(c, first, last); });
}

}  // namespace bitline::BITLINE_ISA
