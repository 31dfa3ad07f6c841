#include "step.h"

#include <stdlib.h>

#include "parallel.h"
#include "scratch.h"

namespace bitline {
namespace {

const StepTable& table() {
  static constexpr const StepTable* tables[kLevels] = {&portable::step, BITLINE_AVX2_TABLE(&avx2::step),
                                                       BITLINE_AVX512_TABLE(&avx512::step), nullptr};
  return pick(tables);
}

__thread Scratch room;

constexpr int64_t kSerial = 1 << 15;  // numbers of keys that one thread reads sooner than two are woken

}  // namespace
}  // namespace bitline

using namespace bitline;

// y = weight * bf16(x / sqrt(mean(x^2) + epsilon)) for each of m rows of n bfloat16 numbers.
BITLINE_EXPORT void bitline_step_norm(const uint16_t* x, const uint16_t* weight, uint16_t* y, int64_t m, int64_t n, double epsilon) {
  const StepTable& t = table();
  for (int64_t i = 0; i < m; ++i) t.norm(x + i * n, weight, y + i * n, n, float(epsilon));
}

// y = bf16(silu(gate)) * up, n bfloat16 numbers.
BITLINE_EXPORT void bitline_step_gate(const uint16_t* gate, const uint16_t* up, uint16_t* y, int64_t n) { table().gate(gate, up, y, n); }

// One token of a layer's attention. qkv: queries [heads * repeat][dim], then keys and values [heads][dim], all bfloat16. cos, sin
// [dim]. Rotated keys and the values are put at position `at` of the cache's keys and values [heads][room][dim]; the queries then
// look at positions [0, at]. y [heads * repeat][dim]. dim: a multiple of 16 up to 256. Returns 0; -2: no memory; -4: other sizes.
BITLINE_EXPORT int bitline_step_attention(const uint16_t* qkv, const uint16_t* cos, const uint16_t* sin, uint16_t* keys, uint16_t* values,
                                          uint16_t* y, int64_t heads, int64_t repeat, int64_t dim, int64_t place, int64_t at, double scale) {
  if (dim % 16 || dim < 16 || dim > kMostDim || repeat < 1 || repeat > kMostRepeat || at < 0 || at >= place) return -4;
  const StepTable& t = table();
  const int64_t length = at + 1, chunks = (length + kChunk - 1) / kChunk, step = repeat * (2 + dim);
  uint8_t* bytes = static_cast<uint8_t*>(reserve(room, size_t(heads) * (size_t(repeat) * dim * 2 + size_t(chunks) * step * 4)));
  if (bytes == nullptr) return -2;
  float* parts = reinterpret_cast<float*>(bytes);
  uint16_t* queries = reinterpret_cast<uint16_t*>(parts + heads * chunks * step);
  t.rotate(qkv, cos, sin, queries, heads * repeat, dim);
  const uint16_t* key = qkv + heads * repeat * dim;
  for (int64_t h = 0; h < heads; ++h) {
    t.rotate(key + h * dim, cos, sin, keys + (h * place + at) * dim, 1, dim);
    __builtin_memcpy(values + (h * place + at) * dim, key + (heads + h) * dim, size_t(dim) * 2);
  }
  const Attention a{queries, keys, values, place, length, repeat, dim, float(scale)};
  const auto task = [&](int64_t i) {
    const int64_t head = i / chunks, begin = i % chunks * kChunk;
    t.attend(a, head, begin, length < begin + kChunk ? length : begin + kChunk, parts + i * step);
  };
  if (heads * repeat * length * dim <= kSerial) {
    for (int64_t i = 0; i < heads * chunks; ++i) task(i);
  } else {
    parallel_for(heads * chunks, task);
  }
  for (int64_t h = 0; h < heads; ++h)
    for (int64_t r = 0; r < repeat; ++r)
      t.merge(parts + h * chunks * step + r * (2 + dim), chunks, step, dim, y + (h * repeat + r) * dim);
  return 0;
}

// y [n] = w [n, k] x [k], all bfloat16. Returns 0; -2: no memory.
BITLINE_EXPORT int bitline_step_rows(const uint16_t* x, const uint16_t* w, uint16_t* y, int64_t n, int64_t k) {
  const StepTable& t = table();
  float* wide = static_cast<float*>(reserve(room, size_t(k) * 4));
  if (wide == nullptr) return -2;
  t.widen(x, wide, k);
  const int64_t parts = n < 64 ? 1 : 8 * threads();
  parallel_for(parts, [&](int64_t i) { t.rows(wide, w, k, n * i / parts, n * (i + 1) / parts, y); });
  return 0;
}
