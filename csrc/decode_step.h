// The operations between the linear layers of a decoder that generates one token, in bfloat16: RMSNorm, SiLU-and-multiply, RoPE,
// attention, and a GEMV with a dense matrix. Accumulation is float32; values are rounded where transformers' modules round them.
#pragma once

#include "isa.h"
#include "ranks.h"

namespace bitline {

struct RoutedMlp;  // routed_mlp.h

// Attention of one query token in one layer. keys, values: [kv_heads][capacity][head_dim], of which `length` positions count.
struct Attention {
  const uint16_t *queries;  // [kv_heads * q_per_kv][head_dim], RoPE applied
  const uint16_t *keys, *values;
  int64_t capacity, length, q_per_kv, head_dim;
  float scale;
};

// One token through a decoder layer: bfloat16 vectors, and packed weights (packed_weight.h) with their biases. q_norm, k_norm
// and biases may be null. Python fills it as an array of 64-bit integers in this order (model/decode_step.py).
struct DecoderLayer {
  const uint16_t* x;  // [hidden]
  uint16_t* y;        // [hidden]; [2][hidden] where gate and routed are null and the MLP is left out
  const uint16_t *input_norm, *post_attention_norm, *q_norm, *k_norm, *cos, *sin;
  uint16_t *keys, *values;  // of the KV cache, [kv_heads][capacity][head_dim]; the token's are written to `position`
  const void *q, *q_bias, *k, *k_bias, *v, *v_bias, *o, *o_bias, *gate, *gate_bias, *up, *up_bias, *down, *down_bias;
  int64_t hidden, kv_heads, q_per_kv, head_dim, capacity, position, intermediate;
  Ranks* ranks;  // heads and intermediate channels are this rank's, and o and down are summed over ranks; null: whole layers
  const RoutedMlp* routed;  // an MLP with experts, in place of gate, up and down
};
static_assert(sizeof(DecoderLayer) == 33 * 8);

struct LayerScalars {
  double scale, input_epsilon, post_attention_epsilon, qk_epsilon;  // scale: of attention
};

// KV positions of a split: fixed, so that the split-KV reduction is the same for any number of threads.
constexpr int64_t kKvSplit = 128;
constexpr int64_t kMaxHeadDim = 256;  // a multiple of 16
constexpr int64_t kMaxQPerKv = 32;    // query heads of a KV head (GQA)

struct DecodeKernels {
  // y = weight * bf16(x / sqrt(mean(x^2) + epsilon))
  void (*rms_norm)(const uint16_t* x, const uint16_t* weight, uint16_t* y, int64_t n, float epsilon);
  // y = bf16(silu(gate)) * up
  void (*silu_and_mul)(const uint16_t* gate, const uint16_t* up, uint16_t* y, int64_t n);
  void (*add)(const uint16_t* a, const uint16_t* b, uint16_t* y, int64_t n);
  // y = a + bf16(bf16(sigmoid(gate)) * b), with one gate for all
  void (*add_gated)(const uint16_t* a, uint16_t gate, const uint16_t* b, uint16_t* y, int64_t n);
  // y = exp(x - max(x)) / sum(exp(x - max(x)))
  void (*softmax)(const uint16_t* x, float* y, int64_t n);
  // RoPE: y = bf16(x * cos) + bf16(rotate_half(x) * sin) for each head
  void (*rope)(const uint16_t* x, const uint16_t* cos, const uint16_t* sin, uint16_t* y, int64_t heads, int64_t head_dim);
  // Split-KV attention over positions [begin, end) of one KV head. partial, for each of its query heads: the largest score, the
  // sum of exp(score - largest), and the values weighted with those, 2 + head_dim floats.
  void (*attend_split)(const Attention& a, int64_t kv_head, int64_t begin, int64_t end, float* partial);
  // Reduce one query head's partials of all splits, `stride` floats apart.
  void (*reduce_splits)(const float* partials, int64_t splits, int64_t stride, int64_t head_dim, uint16_t* y);
  void (*bf16_to_f32)(const uint16_t* x, float* y, int64_t n);
  // y[begin, end) = rows of w [n, k] times x
  void (*gemv)(const float* x, const uint16_t* w, int64_t k, int64_t begin, int64_t end, uint16_t* y);
  // y[begin, end) = the sum of `count` vectors, `stride` bytes apart, one after the other in float32, rounded once. from_bf16,
  // to_bf16: whether the vectors and y are bfloat16, else float32.
  void (*sum_parts)(const uint8_t* parts, int64_t stride, int64_t count, void* y, int64_t begin, int64_t end, bool from_bf16,
                    bool to_bf16);
};
const DecodeKernels& decode_kernels();  // of the ISA level in use

// Whether a packed weight has this shape.
bool has_shape(const void* packed, int64_t n, int64_t k);

namespace portable { extern const DecodeKernels decode_kernels; }
BITLINE_AVX2(namespace avx2 { extern const DecodeKernels decode_kernels; })
BITLINE_AVX512(namespace avx512 { extern const DecodeKernels decode_kernels; })

}  // namespace bitline

BITLINE_EXPORT int bitline_gemv_bf16(const uint16_t* x, const uint16_t* w, uint16_t* y, int64_t n, int64_t k);
