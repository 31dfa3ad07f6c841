// Vectors of 16 elements as compiler vector extensions: one source for every ISA level, and the same bits at each.
#include "decode_step.h"

#include <string.h>

#include "variants/vector_math.h"

namespace bitline::BITLINE_ISA {
namespace {

typedef float F32x16 __attribute__((vector_size(64)));
typedef uint32_t U32x16 __attribute__((vector_size(64)));
typedef uint16_t U16x16 __attribute__((vector_size(32)));
typedef float F32x8 __attribute__((vector_size(32)));
typedef float F32x4 __attribute__((vector_size(16)));

constexpr int64_t kLanes = 16;

inline F32x16 load(const uint16_t* p) {
  U16x16 h;
  memcpy(&h, p, sizeof h);
  return (F32x16)(__builtin_convertvector(h, U32x16) << 16);
}
inline F32x16 load(const float* p) {
  F32x16 f;
  memcpy(&f, p, sizeof f);
  return f;
}
inline void store(float* p, F32x16 f, int64_t count = kLanes) { memcpy(p, &f, size_t(count < kLanes ? count : kLanes) * 4); }

// The first `count` lanes, zeros in the rest.
inline F32x16 load(const uint16_t* p, int64_t count) {
  if (count >= kLanes) return load(p);
  uint16_t padded[kLanes] = {};
  memcpy(padded, p, size_t(count) * 2);
  return load(padded);
}
inline F32x16 load(const float* p, int64_t count) {
  if (count >= kLanes) return load(p);
  F32x16 f = {};
  memcpy(&f, p, size_t(count) * 4);
  return f;
}

inline F32x16 round_bf16(F32x16 f) { return (F32x16)bf16_bits(f); }
inline void store(uint16_t* p, F32x16 f, int64_t count = kLanes) {
  const U16x16 h = __builtin_convertvector(bf16_bits(f) >> 16, U16x16);
  memcpy(p, &h, size_t(count < kLanes ? count : kLanes) * 2);
}

inline F32x16 broadcast(float x) { return x - F32x16{}; }

inline float reduce_add(F32x16 f) {
  const F32x8 a = __builtin_shufflevector(f, f, 0, 1, 2, 3, 4, 5, 6, 7) +
                  __builtin_shufflevector(f, f, 8, 9, 10, 11, 12, 13, 14, 15);
  const F32x4 b = __builtin_shufflevector(a, a, 0, 1, 2, 3) + __builtin_shufflevector(a, a, 4, 5, 6, 7);
  return (b[0] + b[2]) + (b[1] + b[3]);
}

void rms_norm(const uint16_t* x, const uint16_t* weight, uint16_t* y, int64_t n, float epsilon) {
  F32x16 squares = {};
  for (int64_t i = 0; i < n; i += kLanes) {
    const F32x16 v = load(x + i, n - i);
    squares += v * v;
  }
  const float rstd = 1.0f / __builtin_sqrtf(reduce_add(squares) / float(n) + epsilon);
  for (int64_t i = 0; i < n; i += kLanes) store(y + i, load(weight + i, n - i) * round_bf16(load(x + i, n - i) * rstd), n - i);
}

void silu_and_mul(const uint16_t* gate, const uint16_t* up, uint16_t* y, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const F32x16 g = load(gate + i, n - i);
    store(y + i, round_bf16(g / (1.0f + exponential(-g))) * load(up + i, n - i), n - i);
  }
}

void add(const uint16_t* a, const uint16_t* b, uint16_t* y, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) store(y + i, load(a + i, n - i) + load(b + i, n - i), n - i);
}

void add_gated(const uint16_t* a, uint16_t gate, const uint16_t* b, uint16_t* y, int64_t n) {
  const F32x16 g = broadcast(load(&gate, 1)[0]), scale = round_bf16(1.0f / (1.0f + exponential(-g)));
  for (int64_t i = 0; i < n; i += kLanes) store(y + i, load(a + i, n - i) + round_bf16(scale * load(b + i, n - i)), n - i);
}

void rope(const uint16_t* x, const uint16_t* cos, const uint16_t* sin, uint16_t* y, int64_t heads, int64_t head_dim) {
  const int64_t half = head_dim / 2;
  for (int64_t h = 0; h < heads; ++h, x += head_dim, y += head_dim) {
    for (int64_t i = 0; i < half; i += kLanes) {
      const int64_t rest = half - i;
      const F32x16 a = load(x + i, rest), b = load(x + half + i, rest);
      const F32x16 low = round_bf16(a * load(cos + i, rest)) + round_bf16(-b * load(sin + i, rest));
      const F32x16 high = round_bf16(b * load(cos + half + i, rest)) + round_bf16(a * load(sin + half + i, rest));
      store(y + i, low, rest);
      store(y + half + i, high, rest);
    }
  }
}

// x = exp(x - max) of n values. Returns their sum.
float exponentials(float* x, int64_t n, float max) {
  F32x16 sums = {};
  for (int64_t i = 0; i < n; i += kLanes) {
    F32x16 v = broadcast(-__builtin_inff());
    memcpy(&v, x + i, size_t(n - i < kLanes ? n - i : kLanes) * 4);
    const F32x16 e = exponential(v - max);
    sums += e;
    store(x + i, e, n - i);
  }
  return reduce_add(sums);
}

void attend_split(const Attention& a, int64_t kv_head, int64_t begin, int64_t end, float* partial) {
  float q[kMaxQPerKv * kMaxHeadDim];
  float scores[kKvSplit];
  const int64_t dim = a.head_dim, count = end - begin;
  const uint16_t* keys = a.keys + (kv_head * a.capacity + begin) * dim;
  const uint16_t* values = a.values + (kv_head * a.capacity + begin) * dim;
  for (int64_t i = 0; i < a.q_per_kv * dim; i += kLanes) store(q + i, load(a.queries + kv_head * a.q_per_kv * dim + i));
  for (int64_t h = 0; h < a.q_per_kv; ++h, partial += 2 + dim) {
    const float* query = q + h * dim;
    float max_score = -__builtin_inff();
    for (int64_t j = 0; j < count; ++j) {
      F32x16 acc = {};
      for (int64_t i = 0; i < dim; i += kLanes) acc += load(query + i) * load(keys + j * dim + i);
      const float score = reduce_add(acc) * a.scale;
      scores[j] = score;
      max_score = score > max_score || score != score ? score : max_score;
    }
    partial[0] = max_score, partial[1] = exponentials(scores, count, max_score);
    for (int64_t i = 0; i < dim; i += 4 * kLanes) {  // four accumulators at a time stay in registers
      const int64_t vectors = (dim - i) / kLanes < 4 ? (dim - i) / kLanes : 4;
      F32x16 acc[4] = {};
      if (vectors == 4) {
        for (int64_t j = 0; j < count; ++j)
          for (int64_t v = 0; v < 4; ++v) acc[v] += scores[j] * load(values + j * dim + i + v * kLanes);
      } else {
        for (int64_t j = 0; j < count; ++j)
          for (int64_t v = 0; v < vectors; ++v) acc[v] += scores[j] * load(values + j * dim + i + v * kLanes);
      }
      for (int64_t v = 0; v < vectors; ++v) store(partial + 2 + i + v * kLanes, acc[v]);
    }
  }
}

void reduce_splits(const float* partials, int64_t splits, int64_t stride, int64_t head_dim, uint16_t* y) {
  float max_score = partials[0];
  for (int64_t s = 1; s < splits; ++s) {
    const float split_max = partials[s * stride];
    max_score = split_max > max_score || split_max != split_max ? split_max : max_score;
  }
  float total = 0;
  F32x16 out[kMaxHeadDim / kLanes] = {};
  for (int64_t s = 0; s < splits; ++s) {
    const float* partial = partials + s * stride;
    const float rescale = exponential(broadcast(partial[0] - max_score))[0];
    total += rescale * partial[1];
    for (int64_t i = 0; i < head_dim; i += kLanes) out[i / kLanes] += rescale * load(partial + 2 + i);
  }
  for (int64_t i = 0; i < head_dim; i += kLanes) store(y + i, out[i / kLanes] / total);
}

void bf16_to_f32(const uint16_t* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) store(y + i, load(x + i, n - i), n - i);
}

constexpr int64_t kPrefetchElements = 2048;  // ahead: a page of 4 KB

// One row at a time: four rows side by side, each in another page, take 1.4 times as long.
void gemv(const float* x, const uint16_t* w, int64_t k, int64_t begin, int64_t end, uint16_t* y) {
  const int64_t unrolled = k / (2 * kLanes) * (2 * kLanes);
  for (int64_t n = begin; n < end; ++n) {
    const uint16_t* row = w + n * k;
    F32x16 acc0 = {}, acc1 = {};
    for (int64_t i = 0; i < unrolled; i += 2 * kLanes) {
      __builtin_prefetch(row + i + kPrefetchElements);
      acc0 += load(x + i) * load(row + i);
      acc1 += load(x + i + kLanes) * load(row + i + kLanes);
    }
    float total = reduce_add(acc0 + acc1);
    for (int64_t i = unrolled; i < k; ++i) total += x[i] * load(row + i, 1)[0];
    store(y + n, broadcast(total), 1);
  }
}

void softmax(const uint16_t* x, float* y, int64_t n) {
  bf16_to_f32(x, y, n);
  float max = y[0];
  for (int64_t i = 1; i < n; ++i) max = y[i] > max || y[i] != y[i] ? y[i] : max;
  const float sum = exponentials(y, n, max);
  for (int64_t i = 0; i < n; i += kLanes) store(y + i, load(y + i, n - i) / sum, n - i);
}

template <class From, class To>
void sum_parts_of(const uint8_t* parts, int64_t stride, int64_t count, To* y, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i += kLanes) {
    F32x16 total = load(reinterpret_cast<const From*>(parts) + i, end - i);
    for (int64_t part = 1; part < count; ++part) total += load(reinterpret_cast<const From*>(parts + part * stride) + i, end - i);
    store(y + i, total, end - i);
  }
}

void sum_parts(const uint8_t* parts, int64_t stride, int64_t count, void* y, int64_t begin, int64_t end, bool from_bf16,
               bool to_bf16) {
  uint16_t* y_bf16 = static_cast<uint16_t*>(y);
  float* y_f32 = static_cast<float*>(y);
  if (from_bf16 && to_bf16) sum_parts_of<uint16_t>(parts, stride, count, y_bf16, begin, end);
  else if (from_bf16) sum_parts_of<uint16_t>(parts, stride, count, y_f32, begin, end);
  else if (to_bf16) sum_parts_of<float>(parts, stride, count, y_bf16, begin, end);
  else sum_parts_of<float>(parts, stride, count, y_f32, begin, end);
}

}  // namespace

extern const DecodeKernels decode_kernels = {rms_norm,     silu_and_mul,  add,         add_gated, softmax,  rope,
                                             attend_split, reduce_splits, bf16_to_f32, gemv,      sum_parts};

}  // namespace bitline::BITLINE_ISA
