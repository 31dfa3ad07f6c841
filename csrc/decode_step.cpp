#include "decode_step.h"

#include <stdlib.h>

#include "gemm.h"
#include "parallel.h"
#include "routed_mlp.h"
#include "scratch.h"

namespace bitline {

const DecodeKernels& decode_kernels() {
  static constexpr const DecodeKernels* by_level[kNumLevels] = {&portable::decode_kernels,
                                                                BITLINE_AVX2_KERNELS(&avx2::decode_kernels),
                                                                BITLINE_AVX512_KERNELS(&avx512::decode_kernels), nullptr};
  return dispatch(by_level);
}

bool has_shape(const void* packed, int64_t n, int64_t k) {
  const PackedHeader& w = *static_cast<const PackedHeader*>(packed);
  return w.magic == kPackedMagic && w.n == n && w.k == k;
}

namespace {

__thread Scratch op_scratch, layer_scratch;  // of one operation; a layer's intermediate vectors

bool has_mlp_shapes(const DecoderLayer& l) {
  if (l.routed != nullptr) return l.ranks == nullptr && has_routed_shapes(*l.routed, l.hidden);
  if (l.gate == nullptr) return true;
  return has_shape(l.gate, l.intermediate, l.hidden) && has_shape(l.up, l.intermediate, l.hidden) &&
         has_shape(l.down, l.hidden, l.intermediate);
}

constexpr int64_t kSerialAttention = 1 << 15;  // key elements that one thread reads sooner than a parallel region starts

}  // namespace
}  // namespace bitline

using namespace bitline;

// y = weight * bf16(x / sqrt(mean(x^2) + epsilon)) for each of m rows of n bfloat16 numbers.
BITLINE_EXPORT void bitline_rms_norm(const uint16_t* x, const uint16_t* weight, uint16_t* y, int64_t m, int64_t n,
                                     double epsilon) {
  const DecodeKernels& kernels = decode_kernels();
  for (int64_t i = 0; i < m; ++i) kernels.rms_norm(x + i * n, weight, y + i * n, n, float(epsilon));
}

// y = bf16(silu(gate)) * up, n bfloat16 numbers.
BITLINE_EXPORT void bitline_silu_and_mul(const uint16_t* gate, const uint16_t* up, uint16_t* y, int64_t n) {
  decode_kernels().silu_and_mul(gate, up, y, n);
}

// One token's attention in one layer (flash-decoding: KV splits are attended in parallel, then reduced). qkv: queries [kv_heads
// * q_per_kv][head_dim], then keys and values [kv_heads][head_dim], bfloat16, before RoPE. cos, sin: [head_dim]. Key and value
// are written to `position` of the KV cache keys, values [kv_heads][capacity][head_dim]; the queries then attend to positions
// [0, position]. y [kv_heads * q_per_kv][head_dim]. head_dim: a multiple of 16 up to 256. Returns 0; -2: no memory; -4: other
// sizes.
BITLINE_EXPORT int bitline_decode_attention(const uint16_t* qkv, const uint16_t* cos, const uint16_t* sin, uint16_t* keys,
                                            uint16_t* values, uint16_t* y, int64_t kv_heads, int64_t q_per_kv, int64_t head_dim,
                                            int64_t capacity, int64_t position, double scale) {
  if (head_dim % 16 || head_dim < 16 || head_dim > kMaxHeadDim || q_per_kv < 1 || q_per_kv > kMaxQPerKv) return -4;
  if (position < 0 || position >= capacity) return -4;
  const DecodeKernels& kernels = decode_kernels();
  const int64_t length = position + 1, splits = (length + kKvSplit - 1) / kKvSplit, partial_floats = q_per_kv * (2 + head_dim);
  const size_t query_bytes = size_t(q_per_kv) * head_dim * 2, partial_bytes = size_t(splits) * partial_floats * 4;
  uint8_t* scratch = static_cast<uint8_t*>(reserve(op_scratch, size_t(kv_heads) * (query_bytes + partial_bytes)));
  if (scratch == nullptr) return -2;
  float* partials = reinterpret_cast<float*>(scratch);
  uint16_t* queries = reinterpret_cast<uint16_t*>(partials + kv_heads * splits * partial_floats);
  kernels.rope(qkv, cos, sin, queries, kv_heads * q_per_kv, head_dim);
  const uint16_t* key = qkv + kv_heads * q_per_kv * head_dim;
  for (int64_t h = 0; h < kv_heads; ++h) {
    kernels.rope(key + h * head_dim, cos, sin, keys + (h * capacity + position) * head_dim, 1, head_dim);
    __builtin_memcpy(values + (h * capacity + position) * head_dim, key + (kv_heads + h) * head_dim, size_t(head_dim) * 2);
  }
  const Attention attention{queries, keys, values, capacity, length, q_per_kv, head_dim, float(scale)};
  const auto task = [&](int64_t i) {
    const int64_t kv_head = i / splits, begin = i % splits * kKvSplit;
    const int64_t end = length < begin + kKvSplit ? length : begin + kKvSplit;
    kernels.attend_split(attention, kv_head, begin, end, partials + i * partial_floats);
  };
  if (kv_heads * q_per_kv * length * head_dim <= kSerialAttention) {
    for (int64_t i = 0; i < kv_heads * splits; ++i) task(i);
  } else {
    parallel_for(kv_heads * splits, task, true);
  }
  for (int64_t h = 0; h < kv_heads; ++h)
    for (int64_t q = 0; q < q_per_kv; ++q)
      kernels.reduce_splits(partials + h * splits * partial_floats + q * (2 + head_dim), splits, partial_floats, head_dim,
                            y + (h * q_per_kv + q) * head_dim);
  return 0;
}

// y [n] = w [n, k] @ x [k], all bfloat16. Returns 0; -2: no memory.
BITLINE_EXPORT int bitline_gemv_bf16(const uint16_t* x, const uint16_t* w, uint16_t* y, int64_t n, int64_t k) {
  const DecodeKernels& kernels = decode_kernels();
  float* x_f32 = static_cast<float*>(reserve(op_scratch, size_t(k) * 4));
  if (x_f32 == nullptr) return -2;
  kernels.bf16_to_f32(x, x_f32, k);
  const int64_t partitions = n < 64 ? 1 : 8 * num_threads();
  const auto task = [&](int64_t i) { kernels.gemv(x_f32, w, k, n * i / partitions, n * (i + 1) / partitions, y); };
  parallel_for(partitions, task, true);
  return 0;
}

namespace bitline {
namespace {

// Returns as bitline_decode_layer.
int run_layer(const DecoderLayer& l, const LayerScalars& s) {
  const DecodeKernels& kernels = decode_kernels();
  const int64_t hidden = l.hidden, intermediate = l.intermediate, q_size = l.kv_heads * l.q_per_kv * l.head_dim;
  const int64_t kv_size = l.kv_heads * l.head_dim;
  if (!has_shape(l.q, q_size, hidden) || !has_shape(l.k, kv_size, hidden) || !has_shape(l.v, kv_size, hidden) ||
      !has_shape(l.o, hidden, q_size) || !has_mlp_shapes(l) || (l.ranks != nullptr && hidden * 2 > l.ranks->capacity))
    return -4;
  const size_t count = size_t(2 * q_size + 2 * kv_size + 2 * hidden + 3 * intermediate);
  uint16_t* qkv = static_cast<uint16_t*>(reserve(layer_scratch, count * 2));
  if (qkv == nullptr) return -2;
  uint16_t *attended = qkv + q_size + 2 * kv_size, *normed = attended + q_size, *residual = normed + hidden;
  uint16_t *gate_up = residual + hidden, *activated = gate_up + 2 * intermediate;
  kernels.rms_norm(l.x, l.input_norm, normed, hidden, float(s.input_epsilon));
  if (const int failed = bitline_fused_gemv(normed, hidden, l.q, l.q_bias, l.k, l.k_bias, l.v, l.v_bias, qkv, kBFloat16))
    return failed;
  if (l.q_norm != nullptr && l.k_norm != nullptr) {
    bitline_rms_norm(qkv, l.q_norm, qkv, l.kv_heads * l.q_per_kv, l.head_dim, s.qk_epsilon);
    bitline_rms_norm(qkv + q_size, l.k_norm, qkv + q_size, l.kv_heads, l.head_dim, s.qk_epsilon);
  }
  if (const int failed = bitline_decode_attention(qkv, l.cos, l.sin, l.keys, l.values, attended, l.kv_heads, l.q_per_kv,
                                                  l.head_dim, l.capacity, l.position, s.scale))
    return failed;
  uint16_t* projected = normed;
  if (const int failed = bitline_gemm(attended, 1, l.o, l.o_bias, projected, kBFloat16)) return failed;
  if (l.ranks != nullptr && bitline_ranks_sum(l.ranks, projected, hidden, kBFloat16, projected, kBFloat16)) return kLost;
  const auto error = [&](int code) { return l.ranks == nullptr ? code : kLost; };  // the other ranks go on
  if (l.gate == nullptr && l.routed == nullptr) {
    kernels.add(l.x, projected, l.y, hidden);
    kernels.rms_norm(l.y, l.post_attention_norm, l.y + hidden, hidden, float(s.post_attention_epsilon));
    return 0;
  }
  kernels.add(l.x, projected, residual, hidden);
  kernels.rms_norm(residual, l.post_attention_norm, normed, hidden, float(s.post_attention_epsilon));
  if (l.routed != nullptr) {
    if (const int failed = run_routed_mlp(*l.routed, normed, l.y, hidden)) return failed;
    kernels.add(residual, l.y, l.y, hidden);
    return 0;
  }
  if (const int failed = bitline_fused_gemv(normed, hidden, l.gate, l.gate_bias, l.up, l.up_bias, nullptr, nullptr, gate_up,
                                            kBFloat16))
    return error(failed);
  kernels.silu_and_mul(gate_up, gate_up + intermediate, activated, intermediate);
  if (const int failed = bitline_gemm(activated, 1, l.down, l.down_bias, projected, kBFloat16)) return error(failed);
  if (l.ranks != nullptr && bitline_ranks_sum(l.ranks, projected, hidden, kBFloat16, projected, kBFloat16)) return kLost;
  kernels.add(residual, projected, l.y, hidden);
  return 0;
}

// Threads that spin while ranks wait for each other would take the processors from them.
template <class F> void run_awake_unless_ranks(const DecoderLayer& l, const F& run) {
  if (l.ranks == nullptr) with_awake_team(run);
  else run();
}

}  // namespace
}  // namespace bitline

// One token through a decoder layer: norm, attention and o_proj, norm, gated MLP, with both residual connections. Returns 0;
// -2: no memory; -3: no kernel at this ISA level; -4: the weights are not of these sizes; -5: another rank is lost, or an error
// came after ranks had exchanged something. Where `gate` and `routed` are null the MLP is left out: y [2][hidden] is the residual before
// it and what it gets, the residual normed. An MLP with experts has no ranks. On errors y and `position` of the KV cache are garbage.
BITLINE_EXPORT int bitline_decode_layer(const void* layer, double scale, double input_epsilon, double post_attention_epsilon,
                                        double qk_epsilon) {
  const DecoderLayer& l = *static_cast<const DecoderLayer*>(layer);
  int failed = 0;
  const auto run = [&] { failed = run_layer(l, {scale, input_epsilon, post_attention_epsilon, qk_epsilon}); };
  run_awake_unless_ranks(l, run);
  return failed;
}

// One token through `count` decoder layers of one hidden size, each of which reads the output of the one before. Instead of the layers'
// own x, y, cos, sin and position these count: x [hidden], y [count][hidden], and one position in all KV caches. scalars: of each
// layer. Returns as bitline_decode_layer; -4 also for a layer without an MLP.
BITLINE_EXPORT int bitline_decode_layers(const void* layers, const void* scalars, int64_t count, const uint16_t* x, uint16_t* y,
                                         const uint16_t* cos, const uint16_t* sin, int64_t position) {
  const DecoderLayer* all = static_cast<const DecoderLayer*>(layers);
  int failed = 0;
  const auto run = [&] {
    for (int64_t i = 0; i < count && failed == 0; ++i) {
      DecoderLayer l = all[i];
      l.x = i == 0 ? x : y + (i - 1) * l.hidden, l.y = y + i * l.hidden, l.cos = cos, l.sin = sin, l.position = position;
      failed = run_layer(l, static_cast<const LayerScalars*>(scalars)[i]);
      if (failed != 0 && i > 0 && l.ranks != nullptr) failed = kLost;  // the other ranks go on
    }
  };
  for (int64_t i = 0; i < count; ++i)
    if (all[i].gate == nullptr && all[i].routed == nullptr) return -4;
  if (count > 0) run_awake_unless_ranks(all[0], run);
  return failed;
}
