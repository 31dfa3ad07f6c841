#include "gemm_unpack.h"

#include "parallel.h"

namespace bitline {
namespace {

constexpr int64_t kTaskElements = 1 << 16;

// Those of the highest level up to the one in use that supports the weight; null below AVX2.
const GemmUnpackKernels* kernels_for(const PackedHeader& w) {
  static constexpr const GemmUnpackKernels* by_level[kNumLevels] = {nullptr,
                                                                    BITLINE_AVX2_KERNELS(&avx2::gemm_unpack_kernels),
                                                                    BITLINE_AVX512_KERNELS(&avx512::gemm_unpack_kernels),
                                                                    nullptr,
                                                                    nullptr,
                                                                    BITLINE_NEON_KERNELS(&neon::gemm_unpack_kernels),
                                                                    nullptr};
  int i = isa_level();
  while (i > 0 && (by_level[i] == nullptr || !by_level[i]->supports(w))) i = kLowerLevel[i];
  return by_level[i];
}

}  // namespace
}  // namespace bitline

using namespace bitline;

// The weight [n, k] that a packed one stands for, to `out`, contiguous, of a dtype (enum Dtype): columns in the order of x,
// float32 arithmetic, rounded once. Returns 0; -1: not a packed weight of this version; -3: no kernel at this ISA level.
BITLINE_EXPORT int bitline_gemm_unpack(const void* packed, void* out, int dtype) {
  const PackedHeader& w = *static_cast<const PackedHeader*>(packed);
  if (w.magic != kPackedMagic) return -1;
  const GemmUnpackKernels* kernels = kernels_for(w);
  if (kernels == nullptr) return -3;
  const int64_t blocks_per_task = kTaskElements / (kBlockN * w.k_packed);
  parallel_for_chunks(num_n_blocks(w), blocks_per_task < 1 ? 1 : blocks_per_task, [&](int64_t first, int64_t last) {
    for (int64_t block = first; block < last; ++block)
      kernels->unpack_block(w, block, Dtype(dtype), static_cast<uint8_t*>(out));
  });
  return 0;
}
