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

int64_t row_bytes(const GemmCall& c) { return c.w->k * item_bytes(c.dtype); }
int64_t rows_per_task(const GemmCall& c) { return c.w->k < kTaskElements ? kTaskElements / c.w->k : 1; }

bool quantizes_alike(const PackedHeader& v, const PackedHeader& w) {
  return v.k == w.k && v.group_quant == w.group_quant && v.group_scale == w.group_scale && v.group_quant_k == w.group_quant_k &&
         v.group_global_scale == w.group_global_scale && v.act_limit == w.act_limit;
}

// Points the x of calls that quantize it into `memory`, where each one's x has room, or to the values of an earlier call. Returns
// how many bytes are to be filled.
size_t place(GemmCall* calls, int64_t count, uint8_t* memory) {
  size_t bytes = 0;
  for (int64_t i = 0; i < count; ++i) {
    GemmCall& c = calls[i];
    if (c.w->group_quant == kNoGroups) continue;
    const GemmCall* same = earlier_call(calls, i, [&](const GemmCall& other) {
      return other.x_given == c.x && other.m == c.m && quantizes_alike(*other.w, *c.w);
    });
    if (same != nullptr) {
      c.x = same->x;
      continue;
    }
    c.x_given = c.x, c.x = memory + bytes;
    bytes += round_up(size_t(c.m * row_bytes(c)));
  }
  return bytes;
}

}  // namespace

int quantize_groups(GemmCall* calls, int64_t count) {
  size_t room = 0;
  for (int64_t i = 0; i < count; ++i) {
    calls[i].x_given = nullptr;
    if (calls[i].w->group_quant != kNoGroups) room += round_up(size_t(calls[i].m * row_bytes(calls[i])));
  }
  if (room == 0) return 0;
  uint8_t* memory = static_cast<uint8_t*>(reserve(quantized_x, room));
  if (memory == nullptr) return -2;
  const size_t bytes = place(calls, count, memory);
  const GroupQuantKernels& kernels = group_quant_kernels();
  const auto tasks = [](const GemmCall& c) { return c.x_given == nullptr ? 0 : (c.m + rows_per_task(c) - 1) / rows_per_task(c); };
  const auto quantize = [&](const GemmCall& c, int64_t task) {
    const int64_t first = task * rows_per_task(c), last = first + rows_per_task(c);
    for (int64_t r = first; r < (last < c.m ? last : c.m); ++r)
      kernels.fake_quantize_row(*c.w, static_cast<const uint8_t*>(c.x_given) + r * row_bytes(c),
                                static_cast<uint8_t*>(const_cast<void*>(c.x)) + r * row_bytes(c), c.dtype);
  };
  if (bytes > size_t(kSerialElements) * 2) {
    for_each_task(calls, count, tasks, quantize, true);
    return 0;
  }
  for (int64_t i = 0; i < count; ++i)
    for (int64_t task = 0; task < tasks(calls[i]); ++task) quantize(calls[i], task);
  return 0;
}

}  // namespace bitline
