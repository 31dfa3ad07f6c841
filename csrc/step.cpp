#include "step.h"

#include <stdlib.h>

#include "gemm.h"
#include "parallel.h"
#include "scratch.h"

BITLINE_EXPORT int bitline_gemm(const void* x, int64_t m, const void* packed, const void* bias, void* y, int dtype);
BITLINE_EXPORT int bitline_gemm_row(const void* x, int64_t k, const void* first, const void* first_bias, const void* second,
                                    const void* second_bias, const void* third, const void* third_bias, void* y, int dtype);

namespace bitline {
namespace {

const StepTable& table() {
  static constexpr const StepTable* tables[kLevels] = {&portable::step, BITLINE_AVX2_TABLE(&avx2::step),
                                                       BITLINE_AVX512_TABLE(&avx512::step), nullptr};
  return pick(tables);
}

__thread Scratch room, between;  // of one function; of a layer's

bool shaped(const void* packed, int64_t n, int64_t k) {
  const Meta& w = *static_cast<const Meta*>(packed);
  return w.magic == kMagic && w.n == n && w.k == k;
}

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

// One token through a layer: norm, attention and its output, norm, gated MLP, each added to what went in. Returns 0; -2: no memory;
// -3: no kernel for this level of CPU features; -4: the weights are not of these sizes. The cache's position `at` and y are then of no use.
BITLINE_EXPORT int bitline_step_layer(const void* layer, double scale, double first_epsilon, double second_epsilon, double head_epsilon) {
  const Layer& l = *static_cast<const Layer*>(layer);
  const StepTable& t = table();
  const int64_t hidden = l.hidden, inner = l.inner, all = l.heads * l.repeat * l.dim, one = l.heads * l.dim;
  if (!shaped(l.query, all, hidden) || !shaped(l.key, one, hidden) || !shaped(l.value, one, hidden) || !shaped(l.out, hidden, all) ||
      !shaped(l.gate, inner, hidden) || !shaped(l.up, inner, hidden) || !shaped(l.down, hidden, inner))
    return -4;
  uint16_t* at = static_cast<uint16_t*>(reserve(between, size_t(2 * all + 2 * one + 2 * hidden + 3 * inner) * 2));
  if (at == nullptr) return -2;
  uint16_t *qkv = at, *attended = qkv + all + 2 * one, *a = attended + all, *sum = a + hidden, *both = sum + hidden, *gated = both + 2 * inner;
  t.norm(l.x, l.first_norm, a, hidden, float(first_epsilon));
  if (const int failed = bitline_gemm_row(a, hidden, l.query, l.query_bias, l.key, l.key_bias, l.value, l.value_bias, qkv, kXB16)) return failed;
  if (l.query_norm != nullptr && l.key_norm != nullptr) {
    bitline_step_norm(qkv, l.query_norm, qkv, l.heads * l.repeat, l.dim, head_epsilon);
    bitline_step_norm(qkv + all, l.key_norm, qkv + all, l.heads, l.dim, head_epsilon);
  }
  if (const int failed = bitline_step_attention(qkv, l.cos, l.sin, l.keys, l.values, attended, l.heads, l.repeat, l.dim, l.place, l.at, scale))
    return failed;
  if (const int failed = bitline_gemm(attended, 1, l.out, l.out_bias, a, kXB16)) return failed;
  t.add(l.x, a, sum, hidden);
  t.norm(sum, l.second_norm, a, hidden, float(second_epsilon));
  if (const int failed = bitline_gemm_row(a, hidden, l.gate, l.gate_bias, l.up, l.up_bias, nullptr, nullptr, both, kXB16)) return failed;
  t.gate(both, both + inner, gated, inner);
  if (const int failed = bitline_gemm(gated, 1, l.down, l.down_bias, a, kXB16)) return failed;
  t.add(sum, a, l.y, hidden);
  return 0;
}
