#include "ranks.h"

#include <sched.h>
#include <string.h>

#include "clock.h"
#include "decode_step.h"
#include "gemm.h"
#include "parallel.h"
#include "pause.h"

namespace bitline {
namespace {

constexpr int kSpins = 2000;             // looks at a counter before the processor is given to others
constexpr int64_t kCheckNs = 200000000;  // of waiting, between calls of `waits`
constexpr int64_t kSumChunk = 8192;      // elements

bool wait_for(const Ranks& r, int64_t rank) {
  const int64_t* counter = reinterpret_cast<const int64_t*>(r.memory + rank * kRankLine);
  const auto has_come = [&] { return __atomic_load_n(counter, __ATOMIC_ACQUIRE) >= r.calls; };
  for (int i = 0; i < kSpins; ++i) {
    if (has_come()) return true;
    pause_cpu();
  }
  for (int64_t checked = now_ns(); !has_come();) {
    sched_yield();
    if (now_ns() - checked < kCheckNs) continue;
    if (r.waits(rank) && !has_come()) return false;
    checked = now_ns();
  }
  return true;
}

// Hand out this rank's part and wait for all others': [world] of them, `capacity` bytes apart, until the next call. Null: a rank
// is lost.
const uint8_t* exchange(Ranks& r, const void* part, int64_t nbytes) {
  uint8_t* parts = r.memory + r.world * kRankLine + (r.calls & 1) * r.world * r.capacity;
  memcpy(parts + r.rank * r.capacity, part, size_t(nbytes));
  ++r.calls;
  __atomic_store_n(reinterpret_cast<int64_t*>(r.memory + r.rank * kRankLine), r.calls, __ATOMIC_RELEASE);
  for (int64_t rank = 0; rank < r.world; ++rank)
    if (!wait_for(r, rank)) return nullptr;
  return parts;
}

}  // namespace
}  // namespace bitline

using namespace bitline;

// y [world][nbytes] = all ranks' parts of so many bytes, up to `capacity`. Returns 0; -4: more; -5: a rank is lost.
BITLINE_EXPORT int bitline_ranks_gather(Ranks* ranks, const void* part, int64_t nbytes, uint8_t* y) {
  if (nbytes > ranks->capacity) return -4;
  const uint8_t* parts = exchange(*ranks, part, nbytes);
  if (parts == nullptr) return kLost;
  for (int64_t rank = 0; rank < ranks->world; ++rank) memcpy(y + rank * nbytes, parts + rank * ranks->capacity, size_t(nbytes));
  return 0;
}

// y [n] = the sum of all ranks' x [n], up to `capacity` bytes, in the order of ranks, in float32, rounded once. from, to: the
// Dtype of x and y, float32 or bfloat16. y may be x. Returns as bitline_ranks_gather.
BITLINE_EXPORT int bitline_ranks_sum(Ranks* ranks, const void* x, int64_t n, int from, void* y, int to) {
  const int64_t nbytes = n * (from == kBFloat16 ? 2 : 4);
  if (nbytes > ranks->capacity || from == kFloat16 || to == kFloat16) return -4;
  const uint8_t* parts = exchange(*ranks, x, nbytes);
  if (parts == nullptr) return kLost;
  const DecodeKernels& kernels = decode_kernels();
  const auto chunk = [&](int64_t begin, int64_t end) {
    kernels.sum_parts(parts, ranks->capacity, ranks->world, y, begin, end, from == kBFloat16, to == kBFloat16);
  };
  parallel_for_chunks(n, kSumChunk, chunk, true);
  return 0;
}
