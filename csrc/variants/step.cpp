// Vectors of 16 numbers in the compiler's own terms, so that one text serves every instruction set and all give the same bits.
#include "step.h"

#include <string.h>

namespace bitline::BITLINE_LEVEL {
namespace {

typedef float F __attribute__((vector_size(64)));
typedef int32_t I __attribute__((vector_size(64)));
typedef uint32_t U __attribute__((vector_size(64)));
typedef uint16_t H __attribute__((vector_size(32)));
typedef float F8 __attribute__((vector_size(32)));
typedef float F4 __attribute__((vector_size(16)));

constexpr int64_t kWidth = 16;

inline F load(const uint16_t* p) {
  H h;
  memcpy(&h, p, sizeof h);
  return (F)(__builtin_convertvector(h, U) << 16);
}
inline F load(const float* p) {
  F f;
  memcpy(&f, p, sizeof f);
  return f;
}
inline void store(float* p, F f) { memcpy(p, &f, sizeof f); }

// Up to 16 numbers; zeros for the rest.
inline F load(const uint16_t* p, int64_t count) {
  if (count >= kWidth) return load(p);
  uint16_t room[kWidth] = {};
  memcpy(room, p, size_t(count) * 2);
  return load(room);
}

// To the nearest bfloat16, ties to even, as float32 bits; NaN stays one.
inline U rounded(F f) {
  const U u = (U)f;
  const U nearest = u + 0x7FFF + ((u >> 16) & 1);
  const U nan = (U)(f != f);
  return ((nearest & ~nan) | ((u | 0x400000) & nan)) & 0xFFFF0000u;
}
inline F round_bf16(F f) { return (F)rounded(f); }
inline void store(uint16_t* p, F f, int64_t count = kWidth) {
  const H h = __builtin_convertvector(rounded(f) >> 16, H);
  memcpy(p, &h, size_t(count < kWidth ? count : kWidth) * 2);
}

inline F all(float x) { return x - F{}; }

inline float sum(F f) {
  const F8 a = __builtin_shufflevector(f, f, 0, 1, 2, 3, 4, 5, 6, 7) + __builtin_shufflevector(f, f, 8, 9, 10, 11, 12, 13, 14, 15);
  const F4 b = __builtin_shufflevector(a, a, 0, 1, 2, 3) + __builtin_shufflevector(a, a, 4, 5, 6, 7);
  return (b[0] + b[2]) + (b[1] + b[3]);
}

inline F select(I mask, F yes, F no) { return (F)(((I)yes & mask) | ((I)no & ~mask)); }

// e^x: 2^n times the series of e^r up to r^7 / 7!, |r| <= log(2) / 2. Zero below -87, infinity above 88.7.
inline F exponential(F x) {
  const F low = all(-87.0f), high = all(88.7f);
  const F clamped = select(x < low, low, select(x > high, high, x));
  const F magic = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const F t = clamped * 1.44269504f + magic;
  const F n = t - magic;
  const F r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;  // log(2) in two parts, the first of 9 bits
  F p = r * (1.0f / 5040) + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const F power = (F)(((I)t - (I)magic + 127) << 23);
  const F y = select(x > high, all(__builtin_inff()), p * power);
  return select(x < low, F{}, y);
}

void norm(const uint16_t* x, const uint16_t* weight, uint16_t* y, int64_t n, float epsilon) {
  F squares = {};
  for (int64_t i = 0; i < n; i += kWidth) {
    const F v = load(x + i, n - i);
    squares += v * v;
  }
  const float factor = 1.0f / __builtin_sqrtf(sum(squares) / float(n) + epsilon);
  for (int64_t i = 0; i < n; i += kWidth) store(y + i, load(weight + i, n - i) * round_bf16(load(x + i, n - i) * factor), n - i);
}

void gate(const uint16_t* gates, const uint16_t* up, uint16_t* y, int64_t n) {
  for (int64_t i = 0; i < n; i += kWidth) {
    const F g = load(gates + i, n - i);
    store(y + i, round_bf16(g / (1.0f + exponential(-g))) * load(up + i, n - i), n - i);
  }
}

void add(const uint16_t* a, const uint16_t* b, uint16_t* y, int64_t n) {
  for (int64_t i = 0; i < n; i += kWidth) store(y + i, load(a + i, n - i) + load(b + i, n - i), n - i);
}

void rotate(const uint16_t* x, const uint16_t* cos, const uint16_t* sin, uint16_t* y, int64_t heads, int64_t dim) {
  const int64_t half = dim / 2;
  for (int64_t h = 0; h < heads; ++h, x += dim, y += dim) {
    for (int64_t i = 0; i < half; i += kWidth) {
      const int64_t rest = half - i;
      const F a = load(x + i, rest), b = load(x + half + i, rest);
      const F low = round_bf16(a * load(cos + i, rest)) + round_bf16(-b * load(sin + i, rest));
      const F high = round_bf16(b * load(cos + half + i, rest)) + round_bf16(a * load(sin + half + i, rest));
      store(y + i, low, rest);
      store(y + half + i, high, rest);
    }
  }
}

void attend(const Attention& a, int64_t head, int64_t begin, int64_t end, float* part) {
  float q[kMostRepeat * kMostDim];
  float scores[kChunk];
  const int64_t dim = a.dim, count = end - begin;
  const uint16_t* keys = a.keys + (head * a.room + begin) * dim;
  const uint16_t* values = a.values + (head * a.room + begin) * dim;
  for (int64_t i = 0; i < a.repeat * dim; i += kWidth) store(q + i, load(a.queries + head * a.repeat * dim + i));
  for (int64_t r = 0; r < a.repeat; ++r, part += 2 + dim) {
    const float* query = q + r * dim;
    float most = -__builtin_inff();
    for (int64_t j = 0; j < count; ++j) {
      F products = {};
      for (int64_t i = 0; i < dim; i += kWidth) products += load(query + i) * load(keys + j * dim + i);
      const float score = sum(products) * a.scale;
      scores[j] = score;
      most = score > most || score != score ? score : most;
    }
    F sums = {};
    for (int64_t j = 0; j < count; j += kWidth) {
      F s = all(-__builtin_inff());
      memcpy(&s, scores + j, size_t(count - j < kWidth ? count - j : kWidth) * 4);
      const F e = exponential(s - most);
      sums += e;
      memcpy(scores + j, &e, size_t(count - j < kWidth ? count - j : kWidth) * 4);
    }
    part[0] = most, part[1] = sum(sums);
    for (int64_t i = 0; i < dim; i += 4 * kWidth) {  // four vectors of sums at a time stay in registers
      const int64_t vectors = (dim - i) / kWidth < 4 ? (dim - i) / kWidth : 4;
      F out[4] = {};
      if (vectors == 4) {
        for (int64_t j = 0; j < count; ++j)
          for (int64_t v = 0; v < 4; ++v) out[v] += scores[j] * load(values + j * dim + i + v * kWidth);
      } else {
        for (int64_t j = 0; j < count; ++j)
          for (int64_t v = 0; v < vectors; ++v) out[v] += scores[j] * load(values + j * dim + i + v * kWidth);
      }
      for (int64_t v = 0; v < vectors; ++v) store(part + 2 + i + v * kWidth, out[v]);
    }
  }
}

void merge(const float* parts, int64_t count, int64_t step, int64_t dim, uint16_t* y) {
  float most = parts[0];
  for (int64_t p = 1; p < count; ++p) {
    const float here = parts[p * step];
    most = here > most || here != here ? here : most;
  }
  float total = 0;
  F out[kMostDim / kWidth] = {};
  for (int64_t p = 0; p < count; ++p) {
    const float* part = parts + p * step;
    const float share = exponential(all(part[0] - most))[0];
    total += share * part[1];
    for (int64_t i = 0; i < dim; i += kWidth) out[i / kWidth] += share * load(part + 2 + i);
  }
  for (int64_t i = 0; i < dim; i += kWidth) store(y + i, out[i / kWidth] / total);
}

void widen(const uint16_t* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; i += kWidth) {
    const F f = load(x + i, n - i);
    memcpy(y + i, &f, size_t(n - i < kWidth ? n - i : kWidth) * 4);
  }
}

constexpr int64_t kAhead = 2048;  // numbers: a page of 4 KB. One row at a time, since rows side by side took 1.4 times as long

void rows(const float* x, const uint16_t* w, int64_t k, int64_t begin, int64_t end, uint16_t* y) {
  const int64_t whole = k / (2 * kWidth) * (2 * kWidth);
  for (int64_t n = begin; n < end; ++n) {
    const uint16_t* p = w + n * k;
    F even = {}, odd = {};
    for (int64_t i = 0; i < whole; i += 2 * kWidth) {
      __builtin_prefetch(p + i + kAhead);
      even += load(x + i) * load(p + i);
      odd += load(x + i + kWidth) * load(p + i + kWidth);
    }
    float total = sum(even + odd);
    for (int64_t i = whole; i < k; ++i) total += x[i] * load(p + i, 1)[0];
    store(y + n, all(total), 1);
  }
}

}  // namespace

extern const StepTable step = {norm, gate, add, rotate, attend, merge, widen, rows};

}  // namespace bitline::BITLINE_LEVEL
