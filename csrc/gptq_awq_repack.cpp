#include "gptq_awq_repack.h"

#include "parallel.h"
#include "prefault.h"
#include "scratch.h"

namespace bitline {

const RepackKernels& repack() {
  static constexpr const RepackKernels* by_level[kNumLevels] = {&portable::repack_kernels,
                                                                BITLINE_AVX2_KERNELS(&avx2::repack_kernels),
                                                                BITLINE_AVX512_KERNELS(&avx512::repack_kernels), nullptr};
  return dispatch(by_level);
}

namespace {

constexpr int64_t kColumnsPerTask = 128;  // a few cache lines of each source row, so that DRAM is read in bursts
constexpr int64_t kPermutedBytes = 512 << 10;
__thread Scratch panel_scratch;

void prefault_rows(const uint32_t* src, int64_t stride, int64_t rows, int64_t columns) {
  if (rows > 0) prefault_source(src, ((rows - 1) * stride + columns) * 4);
}

}  // namespace
}  // namespace bitline

using namespace bitline;

// GPTQ's qweight int32 [rows, columns] = [K * bits / 32, N] to canonical rows, dst int32 [columns, rows]: a transpose of int32.
// Strides are in int32.
BITLINE_EXPORT void bitline_repack_gptq(const uint32_t* src, int64_t stride, int64_t rows, int64_t columns, uint32_t* dst,
                                        int64_t dst_stride) {
  const RepackKernels& kernels = repack();
  prefault_rows(src, stride, rows, columns);
  parallel_for_chunks(columns, kColumnsPerTask, [&](int64_t begin, int64_t end) {
    kernels.transpose(src + begin, stride, rows, end - begin, dst + begin * dst_stride, dst_stride);
  });
}

// AWQ's 4-bit qweight int32 [k, columns] = [K, N / 8] to canonical rows, dst int32 [8 * columns, ceil(k / 8)]; bits past k are
// zero.
BITLINE_EXPORT void bitline_repack_awq(const uint32_t* src, int64_t stride, int64_t k, int64_t columns, uint32_t* dst,
                                       int64_t dst_stride) {
  const RepackKernels& kernels = repack();
  prefault_rows(src, stride, k, columns);
  parallel_for_chunks(columns, kColumnsPerTask / 2, [&](int64_t begin, int64_t end) {
    kernels.awq(src + begin, stride, k, end - begin, dst + 8 * begin * dst_stride, dst_stride);
  });
}

// bitline_repack_gptq with act-order: code j of a row of dst int32 [columns, k * bits / 32] is code perm[j] of the column.
// bits: 1, 2, 4 or 8; k * bits is a multiple of 32; every perm[j] is in [0, k). Returns 0; -1: no memory.
BITLINE_EXPORT int bitline_repack_gptq_permuted(const uint32_t* src, int64_t stride, const int32_t* perm, int64_t k, int bits,
                                                int64_t columns, uint32_t* dst, int64_t dst_stride) {
  // The codes of a task's columns are unpacked next to each other and read in random order: they have to fit L2.
  int64_t grain = kColumnsPerTask;
  while (grain > 32 && permuted_bytes(k, bits, grain) > kPermutedBytes) grain /= 2;
  const RepackKernels& kernels = repack();
  prefault_rows(src, stride, k * bits / 32, columns);
  int failed = 0;
  parallel_for_chunks(columns, grain, [&](int64_t begin, int64_t end) {
    uint8_t* panels = static_cast<uint8_t*>(reserve(panel_scratch, size_t(permuted_bytes(k, bits, end - begin))));
    if (panels == nullptr) {
      __atomic_store_n(&failed, -1, __ATOMIC_RELAXED);
      return;
    }
    kernels.gptq_permuted(src + begin, stride, perm, bits, k * bits / 32, end - begin, panels, dst + begin * dst_stride,
                          dst_stride);
  });
  return failed;
}
