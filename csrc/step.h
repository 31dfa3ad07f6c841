// What lies between the linear layers of a decoder that makes one token, in bfloat16: norms, gates, rotations, attention, and a
// product with a plain matrix. Sums are float32; numbers are rounded where transformers' own modules round them.
#pragma once

#include "isa.h"

namespace bitline {

// One query of a layer. Keys and values are [kv heads][room][dim], of which `length` positions count.
struct Attention {
  const uint16_t *queries;  // [kv heads * repeat][dim], rotated
  const uint16_t *keys, *values;
  int64_t room, length, repeat, dim;
  float scale;
};

// One token through a layer of a decoder: everything but cos, sin and the sizes is bfloat16 numbers or packed weights. The norms of
// queries and keys, and biases, may be null. Python fills it as an array of 64-bit integers (model/decode_step.py has the same order).
struct Layer {
  const uint16_t* x;  // [hidden]
  uint16_t* y;
  const uint16_t *first_norm, *second_norm, *query_norm, *key_norm, *cos, *sin;
  uint16_t *keys, *values;  // of the cache, [heads][place][dim]; the token's go to position `at`
  const void *query, *query_bias, *key, *key_bias, *value, *value_bias, *out, *out_bias, *gate, *gate_bias, *up, *up_bias, *down, *down_bias;
  int64_t hidden, heads, repeat, dim, place, at, inner;
};
static_assert(sizeof(Layer) == 31 * 8);

constexpr int64_t kChunk = 128;      // positions of a task: the same for any number of threads, and so are the sums
constexpr int64_t kMostDim = 256;    // of a head, a multiple of 16
constexpr int64_t kMostRepeat = 32;  // query heads of a kv head

struct StepTable {
  // y = weight * bf16(x / sqrt(mean(x^2) + epsilon))
  void (*norm)(const uint16_t* x, const uint16_t* weight, uint16_t* y, int64_t n, float epsilon);
  // y = bf16(silu(gate)) * up
  void (*gate)(const uint16_t* gate, const uint16_t* up, uint16_t* y, int64_t n);
  void (*add)(const uint16_t* a, const uint16_t* b, uint16_t* y, int64_t n);
  // y = bf16(x * cos) + bf16(half turned x * sin) for each head
  void (*rotate)(const uint16_t* x, const uint16_t* cos, const uint16_t* sin, uint16_t* y, int64_t heads, int64_t dim);
  // Positions [begin, end) of one kv head. part: for each query head its largest score, the sum of exp(score - largest), and
  // the values summed with those weights: 2 + dim floats.
  void (*attend)(const Attention& a, int64_t head, int64_t begin, int64_t end, float* part);
  // One query head of all its parts, which lie `step` floats apart.
  void (*merge)(const float* parts, int64_t count, int64_t step, int64_t dim, uint16_t* y);
  void (*widen)(const uint16_t* x, float* y, int64_t n);
  // y[begin, end) = rows of w [n, k] times x
  void (*rows)(const float* x, const uint16_t* w, int64_t k, int64_t begin, int64_t end, uint16_t* y);
};

namespace portable { extern const StepTable step; }
BITLINE_AVX2(namespace avx2 { extern const StepTable step; })
BITLINE_AVX512(namespace avx512 { extern const StepTable step; })

}  // namespace bitline
