// The int32 of 32 rows are transposed, so that a vector holds the same int32 of many rows; bits then move alike in all of them.
#include "gemm_pack.h"

#include "variants/transpose.h"

namespace bitline::BITLINE_ISA {
namespace {

constexpr int kVectors = kBlockN / kLanes;  // vectors of one int32 of all rows

// insert: out | (x moved by kShift bits to the left, or -kShift to the right, & mask). swap_fields: fields 1 and 2 of each four
// fields of kBits bits are exchanged.
#if defined(BITLINE_ISA_avx512)
inline Vec flip_bits(Vec x, uint32_t flip) { return _mm512_xor_si512(x, _mm512_set1_epi32(int(flip))); }
template <int kShift>
inline Vec insert(Vec out, Vec x, uint32_t mask) {
  const Vec moved = kShift < 0 ? _mm512_srli_epi32(x, unsigned(-kShift)) : _mm512_slli_epi32(x, unsigned(kShift));
  return _mm512_ternarylogic_epi32(out, moved, _mm512_set1_epi32(int(mask)), 0xF8);  // a | (b & c)
}
template <int kBits>
inline Vec swap_fields(Vec x, uint32_t mask) {
  const Vec m = _mm512_set1_epi32(int(mask));
  const Vec delta = _mm512_ternarylogic_epi32(_mm512_srli_epi32(x, kBits), x, m, 0x28);  // (a ^ b) & c
  return _mm512_ternarylogic_epi32(x, delta, _mm512_slli_epi32(delta, kBits), 0x96);     // a ^ b ^ c
}
#elif defined(BITLINE_ISA_avx2)
inline Vec flip_bits(Vec x, uint32_t flip) { return _mm256_xor_si256(x, _mm256_set1_epi32(int(flip))); }
template <int kShift>
inline Vec insert(Vec out, Vec x, uint32_t mask) {
  const Vec moved = kShift < 0 ? _mm256_srli_epi32(x, -kShift) : _mm256_slli_epi32(x, kShift);
  return _mm256_or_si256(out, _mm256_and_si256(moved, _mm256_set1_epi32(int(mask))));
}
template <int kBits>
inline Vec swap_fields(Vec x, uint32_t mask) {
  const Vec delta = _mm256_and_si256(_mm256_xor_si256(_mm256_srli_epi32(x, kBits), x), _mm256_set1_epi32(int(mask)));
  return _mm256_xor_si256(_mm256_xor_si256(x, delta), _mm256_slli_epi32(delta, kBits));
}
#else
inline Vec flip_bits(Vec x, uint32_t flip) {
  for (int i = 0; i < kLanes; ++i) x.lane[i] ^= flip;
  return x;
}
template <int kShift>
inline Vec insert(Vec out, Vec x, uint32_t mask) {
  for (int i = 0; i < kLanes; ++i)
    out.lane[i] |= (kShift < 0 ? x.lane[i] >> (-kShift & 31) : x.lane[i] << (kShift & 31)) & mask;
  return out;
}
template <int kBits>
inline Vec swap_fields(Vec x, uint32_t mask) {
  for (int i = 0; i < kLanes; ++i) {
    const uint32_t delta = (x.lane[i] >> kBits ^ x.lane[i]) & mask;
    x.lane[i] ^= delta ^ delta << kBits;
  }
  return x;
}
#endif

template <int kBits>
constexpr KBlockPlan kPlan = plan_of(kBits);

// Moves [kMove, kEnd) of the plan; x: vectors of the same rows, kVectors apart.
template <int kBits, int kMove, int kEnd>
[[gnu::always_inline]] inline Vec insert_all(Vec out, const Vec* x) {
  if constexpr (kMove == kEnd) {
    return out;
  } else {
    constexpr BitMove move = kPlan<kBits>.moves[kMove];
    return insert_all<kBits, kMove + 1, kEnd>(insert<move.shift>(out, x[move.source * kVectors], move.mask), x);
  }
}

// int32 kIndex and the following ones of a K block of 32 rows.
template <int kBits, int kIndex>
[[gnu::always_inline]] inline void arrange_by_plan(const Vec* x, uint32_t* dst, bool non_temporal) {
  if constexpr (kIndex < int32_per_k_block(kBits)) {
    constexpr int kFirst = kPlan<kBits>.first_move[kIndex], kEnd = kPlan<kBits>.first_move[kIndex + 1];
    for (int v = 0; v < kVectors; ++v)
      store(dst + kIndex * kBlockN + v * kLanes, insert_all<kBits, kFirst, kEnd>(Vec{}, x + v), non_temporal);
    arrange_by_plan<kBits, kIndex + 1>(x, dst, non_temporal);
  }
}

// One K block of 32 rows. Codes of 2, 4 and 8 bits: even columns move to the low half, odd ones to the high half, in log steps.
template <int kBits>
inline void arrange(const Vec* x, uint32_t* dst, bool non_temporal) {
  if constexpr (8 % kBits != 0) {
    arrange_by_plan<kBits, 0>(x, dst, non_temporal);
  } else {
    for (int v = 0; v < kVectors; ++v) {
      Vec y = x[v];
      if (kBits == 2) y = swap_fields<2>(y, 0x0C0C0C0Cu);
      if (kBits <= 4) y = swap_fields<4>(y, 0x00F000F0u);
      store(dst + v * kLanes, swap_fields<8>(y, 0x0000FF00u), non_temporal);
    }
  }
}

template <int kBits>
void pack(const uint8_t* src, int64_t stride, int64_t k_blocks, const uint32_t* flip, uint32_t* dst) {
  constexpr int kInt32 = int32_per_k_block(kBits), kAll = kPackKBlocks * kInt32;
  alignas(64) uint32_t transposed[kAll][kBlockN];
  const bool non_temporal = aligned(dst);
  for (int64_t first = 0; first < k_blocks; first += kPackKBlocks, src += kAll * 4) {
    for (int r = 0; r < kBlockN; r += kLanes) {
      for (int w = 0; w < kAll; w += kLanes) {
        Vec x[kLanes];
        for (int i = 0; i < kLanes; ++i) {
          const uint8_t* from = src + (r + i) * stride + w * 4;
          x[i] = load(reinterpret_cast<const uint32_t*>(from));
          __builtin_prefetch(from + 2 * kAll * 4, 0, 2);  // rows lie too far apart for hardware prefetchers
        }
        transpose_tile(x);
        for (int i = 0; i < kLanes; ++i) store(transposed[w + i] + r, flip_bits(x[i], flip[(w + i) % kInt32]));
      }
    }
    const int64_t count = k_blocks - first < kPackKBlocks ? k_blocks - first : kPackKBlocks;
    for (int64_t kb = 0; kb < count; ++kb, dst += kInt32 * kBlockN) {
      Vec x[kInt32 * kVectors];
      for (int i = 0; i < kInt32 * kVectors; ++i) x[i] = load(transposed[kb * kInt32] + i * kLanes);
      arrange<kBits>(x, dst, non_temporal);
    }
  }
  stream_fence();
}

void pack_k_blocks(const uint8_t* src, int64_t stride, int64_t k_blocks, int bits, const uint32_t* flip, uint32_t* dst) {
  switch (bits) {
    case 2: return pack<2>(src, stride, k_blocks, flip, dst);
    case 3: return pack<3>(src, stride, k_blocks, flip, dst);
    case 4: return pack<4>(src, stride, k_blocks, flip, dst);
    case 5: return pack<5>(src, stride, k_blocks, flip, dst);
    case 6: return pack<6>(src, stride, k_blocks, flip, dst);
    default: return pack<8>(src, stride, k_blocks, flip, dst);
  }
}

}  // namespace

extern const GemmPackKernels gemm_pack_kernels = {pack_k_blocks};

}  // namespace bitline::BITLINE_ISA
