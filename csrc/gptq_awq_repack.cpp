#include "gptq_awq_repack.h"

#include <stdlib.h>
#include <string.h>

#include "parallel.h"

namespace bitline {

const RepackKernels& repack() {
  static constexpr const RepackKernels* by_level[kNumLevels] = {&portable::repack_kernels,
                                                                BITLINE_AVX2_KERNELS(&avx2::repack_kernels),
                                                                BITLINE_AVX512_KERNELS(&avx512::repack_kernels), nullptr};
  return dispatch(by_level);
}

namespace {

constexpr int64_t kColumnsPerTask = 128;  // a few cache lines of each source row, so that DRAM is read in bursts

}  // namespace
}  // namespace bitline

using namespace bitline;

// GPTQ's qweight int32 [rows, columns] = [K * bits / 32, N] to canonical rows, dst int32 [columns, rows]: a transpose of int32.
// Strides are in int32.
BITLINE_EXPORT void bitline_repack_gptq(const uint32_t* src, int64_t stride, int64_t rows, int64_t columns, uint32_t* dst,
                                        int64_t dst_stride) {
  const RepackKernels& kernels = repack();
  parallel_for_chunks(columns, kColumnsPerTask, [&](int64_t begin, int64_t end) {
    kernels.transpose(src + begin, stride, rows, end - begin, dst + begin * dst_stride, dst_stride);
  });
}

// AWQ's 4-bit qweight int32 [k, columns] = [K, N / 8] to canonical rows, dst int32 [8 * columns, ceil(k / 8)]; bits past k are
// zero.
BITLINE_EXPORT void bitline_repack_awq(const uint32_t* src, int64_t stride, int64_t k, int64_t columns, uint32_t* dst,
                                       int64_t dst_stride) {
  const RepackKernels& kernels = repack();
  parallel_for_chunks(columns, kColumnsPerTask / 2, [&](int64_t begin, int64_t end) {
    kernels.awq(src + begin, stride, k, end - begin, dst + 8 * begin * dst_stride, dst_stride);
  });
}

// bitline_repack_gptq with act-order: code j of a row of dst int32 [columns, k * bits / 32] is code perm[j] of the column.
// bits: 1, 2, 4 or 8; k * bits is a multiple of 32; every perm[j] is in [0, k). Returns 0; -1: no memory.
BITLINE_EXPORT int bitline_repack_gptq_permuted(const uint32_t* src, int64_t stride, const int32_t* perm, int64_t k, int bits,
                                                int64_t columns, uint32_t* dst, int64_t dst_stride) {
  const int per_int32 = 32 / bits;
  PermutedCode* sources = static_cast<PermutedCode*>(malloc(size_t(k) * sizeof(PermutedCode)));
  if (sources == nullptr) return -1;
  for (int64_t j = 0; j < k; ++j) {
    const int from = perm[j] % per_int32, to = int(j % per_int32);
    sources[j] = {perm[j] / per_int32, uint32_t((to - from + per_int32) % per_int32 * bits)};
  }
  const RepackKernels& kernels = repack();
  // Every int32 of a task's columns is read per_int32 times in random order. They are copied next to each other into a chunk that
  // fits L2: rows that lie a power of two apart would evict each other from a few cache sets.
  const int64_t k_packed = k / per_int32;
  int64_t grain = kColumnsPerTask;
  while (grain > 16 && grain * k_packed * 4 > (256 << 10)) grain /= 2;
  int failed = 0;
  parallel_for_chunks(columns, grain, [&](int64_t begin, int64_t end) {
    const int64_t n = end - begin;
    uint32_t* chunk = static_cast<uint32_t*>(malloc(size_t(k_packed * n) * 4));
    if (chunk == nullptr) {
      __atomic_store_n(&failed, -1, __ATOMIC_RELAXED);
      return;
    }
    for (int64_t r = 0; r < k_packed; ++r) memcpy(chunk + r * n, src + r * stride + begin, size_t(n) * 4);
    kernels.gptq_permuted(chunk, n, sources, bits, k_packed, n, dst + begin * dst_stride, dst_stride);
    free(chunk);
  });
  free(sources);
  return failed;
}
