#include "group_quant.h"

#include "gemm_calls.h"
#include "scratch.h"

namespace bitline {
namespace {

const GroupQuantKernels& group_quant_kernels() {
  static constexpr const GroupQuantKernels* by_level[kNumLevels] = {
      nullptr, BITLINE_AVX2_KERNELS(&avx2::group_quant_kernels), nullptr, nullptr, nullptr,
      BITLINE_NEON_KERNELS(&neon::group_quant_kernels), nullptr};
  return dispatch(by_level);
}

__thread Scratch quantized_x;

constexpr int64_t kSerialElements = 1 << 13;  // that the calling thread quantizes in about 5 us
constexpr int64_t kTaskElements = 1 << 13;
constexpr int64_t kSharingCalls = 64;         // calls before a call that are asked for the same x

int64_t item_bytes(const GemmCall& c) { return c.dtype == kFloat32 ? 4 : 2; }

bool quantizes_alike(const PackedHeader& v, const PackedHeader& w) {
  return v.k == w.k && v.group_quant == w.group_quant && v.group_scale == w.group_scale && v.group_quant_k == w.group_quant_k &&
         v.group_global_scale == w.group_global_scale && v.act_limit == w.act_limit;
}

// The call before calls[i] that quantizes the same x in the same way; null where there is none.
const GemmCall* call_of_same_codes(const GemmCall* calls, int64_t i) {
  for (int64_t j = i - 1; j >= 0 && j >= i - kSharingCalls; --j)
    if (calls[j].x_given == calls[i].x_given && calls[j].m == calls[i].m && quantizes_alike(*calls[j].w, *calls[i].w)) return calls + j;
  return nullptr;
}

// Points each call's x into `memory`, unless that is null, or to an earlier call's. Returns the bytes.
size_t place(GemmCall* calls, int64_t count, uint8_t* memory) {
  size_t bytes = 0;
  for (int64_t i = 0; i < count; ++i) {
    GemmCall& c = calls[i];
    if (c.w->group_quant == kNoGroups) continue;
    if (const GemmCall* same = call_of_same_codes(calls, i)) {
      c.x = same->x;
      continue;
    }
    if (memory != nullptr) c.x = memory + bytes;
    bytes += round_up(size_t(c.m * c.w->k * item_bytes(c)));
  }
  return bytes;
}

}  // namespace

int quantize_groups(GemmCall* calls, int64_t count) {
  for (int64_t i = 0; i < count; ++i) calls[i].x_given = calls[i].x;
  const size_t bytes = place(calls, count, nullptr);
  if (bytes == 0) return 0;
  uint8_t* memory = static_cast<uint8_t*>(reserve(quantized_x, bytes));
  if (memory == nullptr) return -2;
  place(calls, count, memory);
  const GroupQuantKernels& kernels = group_quant_kernels();
  const auto rows_per_task = [](const GemmCall& c) { return c.w->k < kTaskElements ? kTaskElements / c.w->k : 1; };
  const auto quantize = [&](const GemmCall& c, int64_t first, int64_t last) {
    const int64_t row_bytes = c.w->k * item_bytes(c);
    for (int64_t r = first; r < last; ++r)
      kernels.fake_quantize_row(*c.w, static_cast<const uint8_t*>(c.x_given) + r * row_bytes,
                                static_cast<uint8_t*>(const_cast<void*>(c.x)) + r * row_bytes, c.dtype);
  };
  const auto owns_x = [&](const GemmCall& c) { return c.x != c.x_given && call_of_same_codes(calls, &c - calls) == nullptr; };
  if (bytes <= size_t(kSerialElements) * 2) {
    for (int64_t i = 0; i < count; ++i)
      if (owns_x(calls[i])) quantize(calls[i], 0, calls[i].m);
    return 0;
  }
  const auto tasks = [&](const GemmCall& c) { return owns_x(c) ? (c.m + rows_per_task(c) - 1) / rows_per_task(c) : 0; };
  for_each_task(calls, count, tasks, [&](const GemmCall& c, int64_t task) {
    const int64_t first = task * rows_per_task(c), last = first + rows_per_task(c);
    quantize(c, first, last < c.m ? last : c.m);
  }, true);
  return 0;
}

}  // namespace bitline
