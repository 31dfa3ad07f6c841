// Pairs of a token and one of its experts are sorted by expert and run in waves of experts; in a wave the up projections of all
// experts share one parallel loop, then the gate, then the down projections. The sums over each token's experts come last.
#include "experts.h"

#include <string.h>

#include "gemm_calls.h"
#include "parallel.h"
#include "scratch.h"

namespace bitline {
namespace {

const ExpertKernels& expert_kernels() {
  static constexpr const ExpertKernels* by_level[kNumLevels] = {nullptr, BITLINE_AVX2_KERNELS(&avx2::expert_kernels), nullptr,
                                                                nullptr, nullptr, BITLINE_NEON_KERNELS(&neon::expert_kernels),
                                                                nullptr};
  return dispatch(by_level);
}

// The sorted pairs; a wave's calls, rows of x, h and a.
__thread Scratch sort_scratch, wave_scratch;
constexpr size_t kKeptBytes = 64 << 20;        // of a wave, from one layer to the next
constexpr int64_t kSerialBytes = 1 << 17;      // that are copied by the calling thread
constexpr int64_t kGrainElements = 1 << 13;    // of a task of the gate or of the sums

// Pairs by expert, in the order of the tokens.
struct SortedPairs {
  int64_t* starts;  // [num_experts + 1], of each expert's pairs
  int64_t* tokens;  // [pairs], of each sorted pair
  int64_t* rows;    // [tokens * top_k], each pair's place among the sorted; -1: no expert
};

struct Wave {
  int64_t first_expert, last_expert, begin, end, active;  // sorted pairs [begin, end) of `active` experts
  GemmCall* calls;
  uint8_t *x, *h, *a;
};

// One projection of the experts.
struct Projection {
  const uint8_t *packed, *bias;
  int64_t stride, n, k;
};

// Counting sort. Returns 0; -2: no memory; -5: an expert's number is out of range.
int sort_pairs(const ExpertsCall& l, SortedPairs& s) {
  const int64_t pairs = l.tokens * l.top_k, experts = l.num_experts;
  s.starts = static_cast<int64_t*>(reserve(sort_scratch, size_t(experts + 1 + 2 * pairs) * 8));
  if (s.starts == nullptr) return -2;
  s.tokens = s.starts + experts + 1, s.rows = s.tokens + pairs;
  memset(s.starts, 0, size_t(experts + 1) * 8);
  for (int64_t i = 0; i < pairs; ++i) {
    const int64_t e = l.index[i];
    if (e < 0 || e > experts) return -5;
    if (e < experts) ++s.starts[e + 1];
  }
  for (int64_t e = 0; e < experts; ++e) s.starts[e + 1] += s.starts[e];
  for (int64_t i = 0; i < pairs; ++i) {
    const int64_t e = l.index[i];
    s.rows[i] = e < experts ? s.starts[e]++ : -1;
    if (e < experts) s.tokens[s.rows[i]] = i / l.top_k;
  }
  for (int64_t e = experts; e > 0; --e) s.starts[e] = s.starts[e - 1];  // each has moved on to the next expert's
  s.starts[0] = 0;
  return 0;
}

// The next experts whose pairs fit a pass, or one with more.
Wave next_wave(const ExpertsCall& l, const SortedPairs& s, int64_t first) {
  Wave w{};
  w.first_expert = w.last_expert = first, w.begin = w.end = s.starts[first];
  for (int64_t e = first; e < l.num_experts; ++e) {
    const int64_t end = s.starts[e + 1];
    if (w.active > 0 && end - w.begin > kMaxPassM) break;
    w.active += end > w.end, w.end = end, w.last_expert = e + 1;
  }
  return w;
}

// Places the wave's buffers. Returns 0; -2: no memory.
int lay_out(Wave& w, int64_t x_bytes, int64_t h_bytes, int64_t a_bytes) {
  const int64_t rows = w.end - w.begin;
  const size_t calls = round_up(size_t(w.active) * sizeof(GemmCall)), x = round_up(size_t(rows * x_bytes));
  const size_t h = round_up(size_t(rows * h_bytes));
  uint8_t* memory = static_cast<uint8_t*>(reserve(wave_scratch, calls + x + h + size_t(rows * a_bytes)));
  if (memory == nullptr) return -2;
  w.calls = reinterpret_cast<GemmCall*>(memory);
  w.x = memory + calls, w.h = w.x + x, w.a = w.h + h;
  return 0;
}

void gather_rows(const ExpertsCall& l, const SortedPairs& s, const Wave& w, int64_t x_bytes) {
  const auto copy = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) memcpy(w.x + i * x_bytes, l.x + s.tokens[w.begin + i] * x_bytes, size_t(x_bytes));
  };
  const int64_t rows = w.end - w.begin, grain = kSerialBytes / x_bytes + 1;
  parallel_for_chunks(rows, grain, copy, true);
}

// A projection of the wave's experts: x, rows in the order of the sorted pairs, to y. row_of: where the x of an expert with one pair
// lies. Returns as bitline_gemm; -4: an expert's weight has another shape.
template <class RowOf>
int project(const ExpertsCall& l, const SortedPairs& s, const Wave& w, const Projection& p, const RowOf& row_of, uint8_t* y) {
  const GemmKernels* kernels = gemm_kernels();
  const int64_t itemsize = item_bytes(l.dtype);
  int64_t count = 0;
  for (int64_t e = w.first_expert; e < w.last_expert; ++e) {
    const int64_t at = s.starts[e] - w.begin, m = s.starts[e + 1] - s.starts[e];
    if (m == 0) continue;
    const uint8_t *packed = p.packed + e * p.stride, *bias = p.bias == nullptr ? nullptr : p.bias + e * p.n * itemsize;
    GemmCall& c = w.calls[count++];
    if (const int failed = init_call(c, kernels, packed, bias, int(l.dtype))) return failed;
    if (c.w->n != p.n || c.w->k != p.k) return -4;
    if (m > kMaxPassM) return bitline_gemm(row_of(at, m), m, packed, bias, y, int(l.dtype));  // alone in its wave
    c.x = row_of(at, m), c.m = m, c.y = y + at * p.n * itemsize;
    set_act_tensor_scale(*kernels, c);
  }
  return run_calls(w.calls, count, *kernels);
}

void apply_gate(const ExpertsCall& l, const Gate& gate, const Wave& w, int64_t h_bytes, int64_t a_bytes, int64_t n) {
  const ExpertKernels& kernels = expert_kernels();
  parallel_for_chunks(w.end - w.begin, kGrainElements / n + 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) kernels.gate(gate, w.h + i * h_bytes, w.a + i * a_bytes, n, Dtype(l.dtype));
  }, true);
}

void sum_results(const ExpertsCall& l, const SortedPairs& s, int64_t n) {
  const ExpertKernels& kernels = expert_kernels();
  const int64_t y_bytes = n * item_bytes(l.dtype);
  parallel_for_chunks(l.tokens, kGrainElements / (n * l.top_k + 1) + 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      kernels.weighted_sum(l.results, s.rows + t * l.top_k, l.weights + t * l.top_k, l.top_k, l.y + t * y_bytes, n, Dtype(l.dtype));
  }, true);
}

// Returns as bitline_experts.
int run_waves(const ExpertsCall& l, const SortedPairs& s, const Gate& gate, const Projection& up, const Projection& down) {
  const int64_t itemsize = item_bytes(l.dtype);
  const int64_t x_bytes = up.k * itemsize, h_bytes = up.n * itemsize, a_bytes = down.k * itemsize, y_bytes = down.n * itemsize;
  for (int64_t e = 0; e < l.num_experts;) {
    Wave w = next_wave(l, s, e);
    e = w.last_expert;
    if (w.active == 0) break;
    if (const int failed = lay_out(w, x_bytes, h_bytes, a_bytes)) return failed;
    const bool gathered = w.active < w.end - w.begin;  // else each expert reads its token's row where it lies
    if (gathered) gather_rows(l, s, w, x_bytes);
    const auto x_of = [&](int64_t at, int64_t m) { return m == 1 ? l.x + s.tokens[w.begin + at] * x_bytes : w.x + at * x_bytes; };
    const auto a_of = [&](int64_t at, int64_t) { return w.a + at * a_bytes; };
    if (const int failed = project(l, s, w, up, x_of, w.h)) return failed;
    apply_gate(l, gate, w, h_bytes, a_bytes, down.k);
    if (const int failed = project(l, s, w, down, a_of, l.results + w.begin * y_bytes)) return failed;
  }
  return 0;
}

}  // namespace
}  // namespace bitline

using namespace bitline;

// y [t] = sum over j of weights [t, j] * down(gate(up(x [t]))) of expert index [t, j] (ExpertsCall). Each projection is rounded to the
// dtype, each result has the bits of bitline_gemm of the expert's tokens in order. alpha, limit: the gate's. Returns 0; -1: not a packed
// weight of this version; -2: no memory; -3: no kernel at this ISA level; -4: weights whose shapes do not fit; -5: an expert's number
// is out of range.
BITLINE_EXPORT int bitline_experts(const void* call, double alpha, double limit) {
  const ExpertsCall& l = *static_cast<const ExpertsCall*>(call);
  const PackedHeader &up = *reinterpret_cast<const PackedHeader*>(l.up), &down = *reinterpret_cast<const PackedHeader*>(l.down);
  if (up.magic != kPackedMagic || down.magic != kPackedMagic) return -1;
  if (gemm_kernels() == nullptr) return -3;
  if (up.n != down.k * (l.gated ? 2 : 1)) return -4;
  SortedPairs s;
  if (const int failed = sort_pairs(l, s)) return failed;
  const Gate gate{Activation(l.activation), l.gated != 0, float(alpha), float(limit)};
  const Projection first{l.up, l.up_bias, l.up_stride, up.n, up.k}, second{l.down, l.down_bias, l.down_stride, down.n, down.k};
  const int failed = run_waves(l, s, gate, first, second);
  if (wave_scratch.bytes > kKeptBytes) release(wave_scratch);
  if (failed) return failed;
  sum_results(l, s, down.n);
  return 0;
}
