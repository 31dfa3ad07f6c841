// Exchanges of tensor-parallel ranks that are processes of one machine, through memory that all of them map.
#pragma once

#include "isa.h"

namespace bitline {

// One rank's view of the shared memory, which begins with a counter of each rank, kRankLine bytes apart, and then has two buffers
// [world][capacity]. Ranks write their parts into the buffers in turn and then count a call; a rank that has counted the next call
// has read the buffer. Python fills it (parallel/shared_memory.py: View).
struct Ranks {
  uint8_t* memory;
  int64_t rank, world, capacity;  // capacity: bytes of the largest part
  int64_t calls;                  // of this rank
  int (*waits)(int64_t rank);     // called now and then while one waits for a rank; not 0: do not wait any more
};
static_assert(sizeof(Ranks) == 6 * 8);

constexpr int64_t kRankLine = 64;  // a cache line
constexpr int kLost = -5;

}  // namespace bitline

// Defined in ranks.cpp, which documents it; also called by decode_step.cpp.
BITLINE_EXPORT int bitline_ranks_sum(bitline::Ranks* ranks, const void* x, int64_t n, int from, void* y, int to);
