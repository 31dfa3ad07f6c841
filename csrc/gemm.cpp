// Calls of the linear kernels: compute type, workspace, activation packing, and how N blocks and M tiles are split into tasks.
#include "gemm_calls.h"

#include <stdlib.h>
#include <string.h>

#include "group_quant.h"
#include "parallel.h"
#include "scratch.h"

namespace bitline {

const GemmKernels* gemm_kernels() {
  static constexpr const GemmKernels* by_level[kNumLevels] = {nullptr, BITLINE_AVX2_KERNELS(&avx2::gemm_kernels),
                                                              BITLINE_AVX512_KERNELS(&avx512::gemm_kernels),
                                                              BITLINE_AMX_KERNELS(&amx::gemm_kernels),
                                                              BITLINE_AVX_VNNI_KERNELS(&avx_vnni::gemm_kernels),
                                                              BITLINE_NEON_KERNELS(&neon::gemm_kernels),
                                                              BITLINE_NEON_I8MM_KERNELS(&neon_i8mm::gemm_kernels)};
  int i = isa_level();
  while (i > 0 && by_level[i] == nullptr) i = kLowerLevel[i];
  return by_level[i];
}

namespace {

// Packed activations of all calls that run together, which all threads read; one thread's panel and accumulators.
__thread Scratch call_workspace, thread_workspace;

constexpr int64_t kXChunkBytes = 1 << 19;      // of packed activations that stay in L2
constexpr int64_t kSerialPackInt32 = 1 << 15;  // packed activations up to this size are packed by the calling thread
constexpr int64_t kDequantRows = 4;            // rows of x whose products take as long as dequantizing W

ComputeType compute_type(const PackedHeader& w, int dtype, const GemmKernels& kernels) {
  // int32 accumulators hold 65,000 columns of 255 * 128.
  const bool int8 = has_int8_activations(w) && w.group_k <= 65000;
  if (int8 && kernels.supports(kComputeInt8)) return kComputeInt8;
  // Quantized activations are exact in bfloat16, so only W may be rounded.
  const bool bf16 = dtype == kBFloat16 || (w.act_quant != kActNone && !w.lut_bf16_inexact);
  return bf16 && kernels.supports(kComputeBF16) ? kComputeBF16 : kComputeF32;
}

// Partitions of the N blocks, one task each. Small M: a few long ones for each thread, of equal length if possible. Large M:
// many, so that a thread which the OS preempts leaves its rest to the others; with AMX one for each chunk.
int64_t num_n_partitions(const GemmCall& c, int64_t blocks) {
  const int64_t team = num_threads();
  if (c.m > (c.strategy == kAmxTiles ? kAmxTileM : kMaxTileM)) {
    if (c.strategy == kAmxTiles) return (blocks + c.chunk_blocks - 1) / c.chunk_blocks;
    return blocks < 16 * team ? blocks : 16 * team;
  }
  int64_t best = blocks;
  for (int64_t n = 4 * team, least = INT64_MAX; n >= team && blocks > team; n -= team) {
    const int64_t padded = (blocks + n - 1) / n * n;  // work if all partitions are as long as the longest
    if (n <= blocks && padded < least) best = n, least = padded;
  }
  return best;
}

// Partitions of the M tiles: so that a layer of few N blocks has enough tasks, and so that a chunk of packed activations stays
// in L2 while the N blocks go by, where W is dequantized for each M tile anyway (1000 x 4304, M=1024: 10.6 to 10.2 ms).
int64_t num_m_partitions(const GemmCall& c, int64_t n_partitions, int64_t tiles) {
  const int64_t tasks = (c.strategy == kAmxTiles ? 2 : 16) * num_threads();  // a panel is dequantized anew for each partition
  const int64_t wanted = (tasks + n_partitions - 1) / n_partitions, most = tiles / 4;
  const int64_t partitions = most < 2 || wanted < 2 ? 1 : wanted < most ? wanted : most;
  if (c.strategy != kGemv || c.compute == kComputeInt8) return partitions;
  const int64_t fitting = (c.m * c.row_int32 * 4 + kXChunkBytes - 1) / kXChunkBytes;
  return partitions > fitting ? partitions : fitting < tiles ? fitting : tiles;
}

// Whether x is read where it lies: one bfloat16 row whose columns are the packed columns.
bool reads_x_in_place(const GemmCall& c) {
  const PackedHeader& w = *c.w;
  const bool same_columns = !w.column_map && w.k_packed == w.k;
  const bool same_bits = c.compute == kComputeBF16 && w.act_quant == kActNone;
  return c.m == 1 && c.strategy != kAmxTiles && same_bits && same_columns && w.offset_type == kNone;
}

size_t scratch_bytes(const GemmCall& c) {
  return size_t(kScratchRows) * (c.row_int32 > c.w->k_packed ? c.row_int32 : c.w->k_packed) * 4;
}

// Places the call's buffers in `workspace`, unless that is null. Returns their bytes.
size_t lay_out_workspace(GemmCall& c, uint8_t* workspace) {
  const PackedHeader& w = *c.w;
  size_t bytes = 0;
  const size_t x_at = bytes;
  const size_t packed_rows = c.strategy == kAmxTiles ? num_m_tiles(c) * kAmxTileM : c.m;
  bytes += round_up(reads_x_in_place(c) ? 0 : packed_rows * c.row_int32 * 4);
  const size_t sums_at = bytes;
  bytes += round_up(size_t(c.m) * w.num_groups * 4);
  const size_t init_at = bytes;
  const size_t digits = c.strategy == kInt8Slices ? c.slices.count : c.compute == kComputeInt8;
  bytes += round_up(digits * c.m * w.num_groups * 4);
  const size_t x_scales_at = bytes;
  bytes += c.strategy == kInt8Slices ? round_up(size_t(c.m) * w.num_groups * 4) : 0;
  const size_t scale_at = bytes;
  bytes += round_up(size_t(c.m) * 4);
  if (workspace == nullptr) return bytes;
  c.x_packed = reads_x_in_place(c) ? static_cast<const uint32_t*>(c.x) : reinterpret_cast<uint32_t*>(workspace + x_at);
  c.x_group_sums = reinterpret_cast<float*>(workspace + sums_at);
  c.acc_init = reinterpret_cast<int32_t*>(workspace + init_at);
  c.slices.x_scales = reinterpret_cast<float*>(workspace + x_scales_at);
  c.act_scale = w.act_quant == kActNone ? nullptr : reinterpret_cast<float*>(workspace + scale_at);
  return bytes;
}

// Whether two weights have the same digits of x, in the same order, and the same sums of them.
bool packs_x_alike(const GemmCall& a, const GemmCall& b) {
  const PackedHeader &v = *a.w, &w = *b.w;
  const bool same_columns = v.k == w.k && v.group_k == w.group_k && v.num_groups == w.num_groups && !v.column_map && !w.column_map;
  const bool same_sums = (v.offset_type == kNone) == (w.offset_type == kNone);
  const bool same_digits = a.slices.count == b.slices.count && a.slices.code_zero == b.slices.code_zero &&
                           a.slices.code_unit == b.slices.code_unit;
  const bool sliced = a.strategy == kInt8Slices && b.strategy == kInt8Slices && v.act_quant == kActNone && w.act_quant == kActNone;
  return sliced && v.bits == w.bits && same_columns && same_sums && same_digits;
}

// The call before calls[i] whose packed x calls[i] can read; null where there is none.
const GemmCall* call_of_same_x(const GemmCall* calls, int64_t i) {
  return earlier_call(calls, i, [&](const GemmCall& c) {
    return c.x == calls[i].x && c.m == calls[i].m && !c.x_from && packs_x_alike(c, calls[i]);
  });
}

// Pack all M tiles of the calls. Returns 0; -2: no memory.
int pack_activations(GemmCall* calls, int64_t count, const GemmKernels& kernels) {
  const auto tiles = [](const GemmCall& c) { return c.x_from || reads_x_in_place(c) ? 0 : num_m_tiles(c); };
  int failed = 0;
  const auto pack = [&](const GemmCall& c, int64_t tile) {
    float* scratch = static_cast<float*>(reserve(thread_workspace, scratch_bytes(c)));
    if (scratch == nullptr) __atomic_store_n(&failed, -2, __ATOMIC_RELAXED);
    else kernels.pack_activations(c, tile, scratch);
  };
  int64_t packed_int32 = 0;
  for (int64_t i = 0; i < count; ++i) packed_int32 += tiles(calls[i]) == 0 ? 0 : calls[i].m * calls[i].row_int32;
  if (packed_int32 > kSerialPackInt32) {
    for_each_task(calls, count, tiles, pack, count > 1);
    return failed;
  }
  for (int64_t i = 0; i < count; ++i)
    for (int64_t tile = 0; tile < tiles(calls[i]); ++tile) pack(calls[i], tile);
  return failed;
}

// Plan calls whose x, m and act_tensor_scale are set, and pack their x. Returns 0; -2: no memory.
int prepare_calls(GemmCall* calls, int64_t count, const GemmKernels& kernels) {
  if (const int failed = quantize_groups(calls, count)) return failed;
  size_t bytes = 0;
  for (int64_t i = 0; i < count; ++i) {
    GemmCall& c = calls[i];
    kernels.plan(c);
    c.x_from = call_of_same_x(calls, i);
    if (!c.x_from) bytes += lay_out_workspace(c, nullptr);
  }
  uint8_t* workspace = static_cast<uint8_t*>(reserve(call_workspace, bytes));
  if (workspace == nullptr) return -2;
  for (int64_t i = 0; i < count; ++i) {
    GemmCall& c = calls[i];
    if (!c.x_from) {
      workspace += lay_out_workspace(c, workspace);
      continue;
    }
    c.x_packed = c.x_from->x_packed, c.x_group_sums = c.x_from->x_group_sums;
    c.acc_init = c.x_from->acc_init, c.slices.x_scales = c.x_from->slices.x_scales;
  }
  return pack_activations(calls, count, kernels);
}

// Sets the calls' partitions: of one as its M and N want, of several for each a share of the tasks by its rows.
void set_partitions(GemmCall* calls, int64_t count) {
  int64_t work = 0, most_rows = 0, all = 0;
  for (int64_t i = 0; i < count; ++i) {
    work += calls[i].m + kDequantRows;
    if (calls[i].m > most_rows) most_rows = calls[i].m;
  }
  const int64_t tasks = (most_rows > kMaxTileM ? 16 : 8) * num_threads();
  for (int64_t i = 0; i < count; ++i) {
    GemmCall& c = calls[i];
    const int64_t blocks = num_n_blocks(*c.w), chunk = c.strategy == kAmxTiles ? c.chunk_blocks : 1;
    const int64_t most = (blocks + chunk - 1) / chunk, share = (tasks * (c.m + kDequantRows) + work - 1) / work;
    c.n_partitions = count == 1 ? num_n_partitions(c, blocks) : share < most ? share : most;
    all += c.n_partitions;
  }
  for (int64_t i = 0; i < count; ++i) calls[i].m_partitions = num_m_partitions(calls[i], all, num_m_tiles(calls[i]));
}

// One of the call's n_partitions * m_partitions tasks. Returns 0; -2: no memory.
int compute_partition(const GemmCall& c, const GemmKernels& kernels, int64_t task) {
  const int64_t n_part = task % c.n_partitions, m_part = task / c.n_partitions;
  const int64_t tiles = num_m_tiles(c), blocks = num_n_blocks(*c.w);
  GemmCall own = c;
  // AMX multiplies two M tiles at once, the last of an odd number alone, in another order: partitions are of whole pairs.
  const int64_t unit = c.strategy == kAmxTiles ? 2 : 1, units = (tiles + unit - 1) / unit;
  own.m_tile_begin = units * m_part / c.m_partitions * unit, own.m_tile_end = units * (m_part + 1) / c.m_partitions * unit;
  if (own.m_tile_end > tiles) own.m_tile_end = tiles;
  uint32_t* panel = static_cast<uint32_t*>(reserve(thread_workspace, size_t(panel_bytes(c)) + size_t(acc_floats(c)) * 4));
  if (panel == nullptr) return -2;
  float* acc = reinterpret_cast<float*>(panel) + panel_bytes(c) / 4;
  kernels.compute_blocks(own, blocks * n_part / c.n_partitions, blocks * (n_part + 1) / c.n_partitions, panel, acc);
  return 0;
}

}  // namespace

int init_call(GemmCall& c, const GemmKernels* kernels, const void* packed, const void* bias, int dtype) {
  const PackedHeader& w = *static_cast<const PackedHeader*>(packed);
  if (w.magic != kPackedMagic) return -1;
  if (kernels == nullptr) return -3;
  memset(&c, 0, sizeof c);
  c.w = &w, c.base = static_cast<const uint8_t*>(packed), c.bias = bias, c.dtype = Dtype(dtype);
  c.compute = compute_type(w, dtype, *kernels);
  c.num_threads = num_threads();
  return 0;
}

void set_act_tensor_scale(const GemmKernels& kernels, GemmCall& c) {
  const PackedHeader& w = *c.w;
  c.act_tensor_scale = 0, c.act_tensor_zero = 0;
  if (w.act_quant == kActNone || w.act_granularity == kPerToken) return;
  if (w.act_granularity == kStatic) {
    c.act_tensor_scale = w.act_scale, c.act_tensor_zero = w.act_zero;
    return;
  }
  float low, high;
  const bool finite = kernels.min_max(c.x, c.m * w.k, c.dtype, &low, &high);
  act_quant_params(w, low, high, &c.act_tensor_scale, &c.act_tensor_zero);
  if (!finite) c.act_tensor_scale = __builtin_nanf("");
}

int run_calls(GemmCall* calls, int64_t count, const GemmKernels& kernels) {
  if (const int failed = prepare_calls(calls, count, kernels)) return failed;
  set_partitions(calls, count);
  bool few_rows = true;
  for (int64_t i = 0; i < count; ++i) few_rows &= calls[i].m <= kMaxTileM;
  int error = 0;
  const auto tasks = [](const GemmCall& c) { return c.n_partitions * c.m_partitions; };
  for_each_task(calls, count, tasks, [&](const GemmCall& c, int64_t task) {
    if (const int failed = compute_partition(c, kernels, task)) __atomic_store_n(&error, failed, __ATOMIC_RELAXED);
  }, few_rows);
  return error;
}

}  // namespace bitline

using namespace bitline;

// y [m, n] = x [m, k] @ W.T + bias [n] (or null) with a packed W; x, bias and y contiguous, of one dtype (enum Dtype).
// Returns 0; -1: not a packed weight of this version; -2: no memory; -3: no kernel at this ISA level.
BITLINE_EXPORT int bitline_gemm(const void* x, int64_t m, const void* packed, const void* bias, void* y, int dtype) {
  const GemmKernels* kernels = gemm_kernels();
  GemmCall c;
  if (const int failed = init_call(c, kernels, packed, bias, dtype)) return failed;
  const PackedHeader& w = *c.w;
  const int64_t itemsize = item_bytes(dtype);
  c.x = x, c.m = m;
  set_act_tensor_scale(*kernels, c);
  for (int64_t row = 0; row < m; row += kMaxPassM) {
    c.x = static_cast<const uint8_t*>(x) + row * w.k * itemsize;
    c.y = static_cast<uint8_t*>(y) + row * w.n * itemsize;
    c.m = m - row < kMaxPassM ? m - row : kMaxPassM;
    if (const int failed = run_calls(&c, 1, *kernels)) return failed;
  }
  return 0;
}

// x [k] @ W.T for two or three packed weights of k columns in one parallel loop, as for q, k, v or gate, up; w2 and bias2 may
// be null. y: the results one after another, each bit-equal to bitline_gemm's. Returns as bitline_gemm; -4: a weight has not k
// columns.
BITLINE_EXPORT int bitline_fused_gemv(const void* x, int64_t k, const void* w0, const void* bias0, const void* w1,
                                      const void* bias1, const void* w2, const void* bias2, void* y, int dtype) {
  const GemmKernels* kernels = gemm_kernels();
  const void *const packed[] = {w0, w1, w2}, *const bias[] = {bias0, bias1, bias2};
  const int count = w2 == nullptr ? 2 : 3;
  GemmCall calls[3];
  int64_t block_start[4] = {0, 0, 0, 0};  // of each weight's N blocks among all
  uint8_t* out = static_cast<uint8_t*>(y);
  for (int i = 0; i < count; ++i) {
    GemmCall& c = calls[i];
    if (const int failed = init_call(c, kernels, packed[i], bias[i], dtype)) return failed;
    if (c.w->k != k) return -4;
    c.x = x, c.m = 1, c.y = out, c.m_tile_end = 1;
    out += c.w->n * item_bytes(dtype);
    set_act_tensor_scale(*kernels, c);
    block_start[i + 1] = block_start[i] + num_n_blocks(*c.w);
  }
  if (const int failed = prepare_calls(calls, count, *kernels)) return failed;
  const int64_t blocks = block_start[count], partitions = num_n_partitions(calls[0], blocks);
  int failed = 0;
  parallel_for(partitions, [&](int64_t part) {
    const int64_t from = blocks * part / partitions, to = blocks * (part + 1) / partitions;
    uint32_t* panel = static_cast<uint32_t*>(reserve(thread_workspace, kPanelBytes));
    if (panel == nullptr) {
      __atomic_store_n(&failed, -2, __ATOMIC_RELAXED);
      return;
    }
    for (int i = 0; i < count; ++i) {
      const int64_t begin = from > block_start[i] ? from - block_start[i] : 0;
      const int64_t end = (to < block_start[i + 1] ? to : block_start[i + 1]) - block_start[i];
      if (begin < end) kernels->compute_blocks(calls[i], begin, end, panel, reinterpret_cast<float*>(panel) + kPanelBytes / 4);
    }
  }, true);
  return failed;
}
