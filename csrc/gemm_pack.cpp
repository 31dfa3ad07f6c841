#include "gemm_pack.h"

#include <string.h>

#include "bitstream.h"
#include "gptq_awq_repack.h"
#include "parallel.h"
#include "scratch.h"

namespace bitline {
namespace {

const GemmPackKernels& kernels() {
  static constexpr const GemmPackKernels* by_level[kNumLevels] = {&portable::gemm_pack_kernels,
                                                                  BITLINE_AVX2_KERNELS(&avx2::gemm_pack_kernels),
                                                                  BITLINE_AVX512_KERNELS(&avx512::gemm_pack_kernels), nullptr};
  return dispatch(by_level);
}

__thread Scratch row_scratch;

// The rows that are packed (bitstream.h).
struct CanonicalCodes {
  const uint8_t* codes;
  int64_t stride, n, k;
  int bits;
  const int32_t* columns;  // the source column of each packed column, -1 for padding; null: the same
};

// Row r as `out`, k_packed codes of w.bits bits: columns gathered, widened, XORed with flip, zero in padding.
void repack_row(const CanonicalCodes& s, int64_t r, const PackedHeader& w, int flip, uint8_t* unpacked, uint8_t* out) {
  uint8_t* gathered = unpacked + s.k;
  const uint8_t* from = s.codes + r * s.stride;
  if (s.bits == 8)
    memcpy(unpacked, from, size_t(s.k));
  else
    bitstream().unpack(from, s.k, s.bits, unpacked);
  for (int64_t j = 0; j < w.k_packed; ++j) {
    const int64_t column = s.columns == nullptr ? j : s.columns[j];
    gathered[j] = column >= 0 && column < s.k ? uint8_t(unpacked[column] ^ flip) : 0;
  }
  if (w.bits == 8)
    memcpy(out, gathered, size_t(w.k_packed));
  else
    bitstream().pack(gathered, w.k_packed, int(w.bits), out);
}

// flip of all codes of a K block, as int32 of a row.
struct Flip {
  uint32_t int32[kMaxInt32];

  Flip(int bits, int flip) : int32{} {
    for (int i = 0; i < int32_per_k_block(bits) * 32; ++i) int32[i / 32] |= uint32_t(flip >> (i % bits) & 1) << (i % 32);
  }
};

// Copies of the rows' bytes [byte, byte + chunk_bytes), XORed with `flip` as far as there are codes, zero behind them and in
// rows that W lacks: the source rows must not be read past their end.
void copy_edge(const CanonicalCodes& s, int64_t first_row, int64_t rows, int64_t byte, int64_t chunk_bytes, const PackedHeader& w,
               const Flip& flip, uint8_t* copies) {
  memset(copies, 0, size_t(kBlockN * chunk_bytes));
  const int64_t row_end = row_bytes(w.k, int(w.bits)), left = row_end - byte < chunk_bytes ? row_end - byte : chunk_bytes;
  const int64_t k_block_bytes = int32_per_k_block(int(w.bits)) * 4;
  for (int64_t r = 0; r < rows && left > 0; ++r) {
    uint8_t* row = copies + r * chunk_bytes;
    memcpy(row, s.codes + (first_row + r) * s.stride + byte, size_t(left));
    for (int64_t i = 0; i < left; ++i) row[i] ^= reinterpret_cast<const uint8_t*>(flip.int32)[i % k_block_bytes];
    if (byte + left == row_end && w.k * w.bits % 8 != 0) row[left - 1] &= uint8_t((1 << (w.k * w.bits % 8)) - 1);
  }
}

// The arguments of bitline_gemm_pack_scales.
struct ScaleGrid {
  const uint8_t* src;
  int64_t stride, n, rows_per_scale, row_offset;
  const int64_t* index;
  int64_t count;
};

template <class T>
void gather_block(const ScaleGrid& s, int64_t block, void* dst) {
  for (int64_t i = 0; i < kBlockN; ++i) {
    const int64_t r = block * kBlockN + i;
    T* to = static_cast<T*>(dst) + block * kBlockN * s.count + i;
    if (r >= s.n) {
      for (int64_t j = 0; j < s.count; ++j) to[j * kBlockN] = 0;
      continue;
    }
    const T* from = reinterpret_cast<const T*>(s.src) + (r + s.row_offset) / s.rows_per_scale * s.stride;
    for (int64_t j = 0; j < s.count; ++j) to[j * kBlockN] = from[s.index[j]];
  }
}

// Whether each row of W has a row of scales of its own, in order, that is whole and aligned int32.
bool is_row_of_int32(const ScaleGrid& s, int itemsize) {
  if (s.rows_per_scale != 1 || s.row_offset != 0 || s.count * itemsize % 4 != 0 || s.stride * itemsize % 4 != 0) return false;
  for (int64_t j = 0; j < s.count; ++j)
    if (s.index[j] != j) return false;
  return reinterpret_cast<uintptr_t>(s.src) % 4 == 0;
}

// gather_block of such rows: int32 of 32 rows are transposed, then split into their elements.
template <class T>
void transpose_block(const ScaleGrid& s, int64_t block, void* dst) {
  constexpr int kPerInt32 = 4 / int(sizeof(T)), kInt32 = 16;  // a cache line of each row at a time
  const int64_t row_int32 = s.count / kPerInt32, stride = s.stride / kPerInt32;
  const uint32_t* from = reinterpret_cast<const uint32_t*>(s.src) + block * kBlockN * stride;
  T* to = static_cast<T*>(dst) + block * kBlockN * s.count;
  for (int64_t i = 0; i < row_int32; i += kInt32) {
    alignas(64) uint32_t columns[kInt32][kBlockN];
    const int64_t left = row_int32 - i < kInt32 ? row_int32 - i : kInt32;
    repack().transpose_in_cache(from + i, stride, kBlockN, left, columns[0], kBlockN);
    for (int64_t c = 0; c < left; ++c)
      for (int e = 0; e < kPerInt32; ++e, to += kBlockN)
        for (int r = 0; r < kBlockN; ++r) to[r] = T(columns[c][r] >> (e * 8 * int(sizeof(T)) % 32));
  }
}

}  // namespace
}  // namespace bitline

using namespace bitline;

// Write the codes of a packed weight whose header is there. src: n rows, `stride` bytes apart, of k codes of `bits` bits, each
// XORed with `flip`. columns: the source column of each packed column, -1 for padding; null: packed columns are the source
// columns. The whole section is written, zero past n and k. Returns 0; -2: no memory.
BITLINE_EXPORT int bitline_gemm_pack_codes(const uint8_t* src, int64_t stride, int bits, int flip, const int32_t* columns,
                                           void* packed) {
  const PackedHeader& w = *static_cast<const PackedHeader*>(packed);
  const CanonicalCodes source{src, stride, w.n, w.k, bits, columns};
  const bool repacked = columns != nullptr || bits != w.bits;  // else K blocks are made of the source rows themselves
  const int packed_bits = int(w.bits);
  const Flip flipped(packed_bits, repacked ? 0 : flip), unflipped(packed_bits, 0);
  const int64_t k_blocks = w.k_packed / k_block_of(w.bits), k_block_bytes = int32_per_k_block(packed_bits) * 4;
  const int64_t chunk_bytes = kPackKBlocks * k_block_bytes;
  const int64_t scratch_stride = repacked ? k_blocks * k_block_bytes + chunk_bytes : chunk_bytes;
  const int64_t chunks_in_rows = repacked ? 0 : w.k * w.bits / 8 / chunk_bytes;  // that can be read where they lie
  const auto pack_k_blocks = kernels().pack_k_blocks;
  uint8_t* codes = static_cast<uint8_t*>(packed) + w.codes;
  int failed = 0;
  parallel_for(num_n_blocks(w), [&](int64_t block) {
    const int64_t first = block * kBlockN, rows = w.n - first < kBlockN ? w.n - first : kBlockN;
    uint8_t* scratch = static_cast<uint8_t*>(reserve(row_scratch, size_t(kBlockN * scratch_stride + w.k + w.k_packed)));
    if (scratch == nullptr) {
      __atomic_store_n(&failed, -2, __ATOMIC_RELAXED);
      return;
    }
    uint8_t* to = codes + block * n_block_bytes(w);
    if (repacked) {
      memset(scratch, 0, size_t(kBlockN * scratch_stride));
      for (int64_t r = 0; r < rows; ++r)
        repack_row(source, first + r, w, flip, scratch + kBlockN * scratch_stride, scratch + r * scratch_stride);
      pack_k_blocks(scratch, scratch_stride, k_blocks, packed_bits, unflipped.int32, reinterpret_cast<uint32_t*>(to));
      return;
    }
    int64_t k = rows == kBlockN ? chunks_in_rows * kPackKBlocks : 0;
    k = k < k_blocks ? k : k_blocks;
    pack_k_blocks(src + first * stride, stride, k, packed_bits, flipped.int32, reinterpret_cast<uint32_t*>(to));
    for (; k < k_blocks; k += kPackKBlocks) {
      const int64_t count = k_blocks - k < kPackKBlocks ? k_blocks - k : kPackKBlocks;
      copy_edge(source, first, rows, k * k_block_bytes, chunk_bytes, w, flipped, scratch);
      uint32_t* edge = reinterpret_cast<uint32_t*>(to + k * k_block_bytes * kBlockN);
      pack_k_blocks(scratch, chunk_bytes, count, packed_bits, unflipped.int32, edge);
    }
  });
  return failed;
}

// dst [n_pad / 32][count][32] = src[(row + row_offset) / rows_per_scale][index[j]], elements of 1, 2 or 4 bytes; rows past n
// are zero. The stride is in elements; n_pad is a multiple of 32.
BITLINE_EXPORT void bitline_gemm_pack_scales(const void* src, int64_t stride, int itemsize, int64_t n, int64_t rows_per_scale,
                                             int64_t row_offset, const int64_t* index, int64_t count, int64_t n_pad, void* dst) {
  const ScaleGrid grid{static_cast<const uint8_t*>(src), stride, n, rows_per_scale, row_offset, index, count};
  const bool whole_rows = is_row_of_int32(grid, itemsize);
  parallel_for(n_pad / kBlockN, [&](int64_t block) {
    if (whole_rows && (block + 1) * kBlockN <= n) {
      if (itemsize == 1) transpose_block<uint8_t>(grid, block, dst);
      if (itemsize == 2) transpose_block<uint16_t>(grid, block, dst);
      if (itemsize == 4) transpose_block<uint32_t>(grid, block, dst);
    } else {
      if (itemsize == 1) gather_block<uint8_t>(grid, block, dst);
      if (itemsize == 2) gather_block<uint16_t>(grid, block, dst);
      if (itemsize == 4) gather_block<uint32_t>(grid, block, dst);
    }
  });
}
