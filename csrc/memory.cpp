// Pages of memory.
#include "parallel.h"

#include "isa.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#endif

namespace {

#if defined(__linux__) && defined(MADV_HUGEPAGE)
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14; older ones refuse it, and the pages come when they are written to
#endif

constexpr uintptr_t kLarge = 2 << 20;

// Where the system has large pages at hand they come six times faster than small ones. Where a hypervisor has taken back what the
// system did not use, which it does by large pages, the first touch of each costs it 4 ms, and small ones come from elsewhere.
constexpr double kSlow = 1e-3;
bool large_are_slow = false;

double seconds() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

// True where the page in the middle is there: memory that the process has used before.
bool resident(uintptr_t at, size_t bytes) {
  const uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE));
  unsigned char there = 0;
  return mincore(reinterpret_cast<void*>((at + bytes / 2) / page * page), 1, &there) == 0 && (there & 1);
}

// A part of [begin, end), one large page or less. `advised`: large ones were asked for.
void bring(uintptr_t at, size_t bytes, uintptr_t begin, uintptr_t end, bool advised) {
  if (resident(at, bytes)) return;
  if (advised && bytes == kLarge && !__atomic_load_n(&large_are_slow, __ATOMIC_RELAXED)) {
    const double started = seconds();
    *reinterpret_cast<volatile char*>(at) = 0;
    if (seconds() - started < kSlow) return;
    if (!__atomic_exchange_n(&large_are_slow, true, __ATOMIC_RELAXED))
      madvise(reinterpret_cast<void*>(begin), end - begin, MADV_NOHUGEPAGE);
    return;
  }
  madvise(reinterpret_cast<void*>(at), bytes, MADV_POPULATE_WRITE);
}
#endif

}  // namespace

// Bring the pages under [at, at + bytes), memory whose contents do not matter, on all threads: large ones where they come fast.
// Only a hint: what does not work is left to page faults.
BITLINE_EXPORT void bitline_prepare([[maybe_unused]] void* at, [[maybe_unused]] int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE));
  const uintptr_t first = (reinterpret_cast<uintptr_t>(at) + page - 1) / page * page;
  const uintptr_t last = (reinterpret_cast<uintptr_t>(at) + uintptr_t(bytes)) / page * page;
  const uintptr_t begin = (first + kLarge - 1) / kLarge * kLarge, end = last / kLarge * kLarge;
  if (begin >= end) return;
  const bool advised = !__atomic_load_n(&large_are_slow, __ATOMIC_RELAXED) &&
                       madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE) == 0;
  const int64_t whole = int64_t((end - begin) / kLarge);
  bitline::parallel_for(whole + 2, [&](int64_t i) {
    if (i < whole) bring(begin + uintptr_t(i) * kLarge, kLarge, begin, end, advised);
    if (i == whole && first < begin) bring(first, begin - first, begin, end, advised);
    if (i > whole && end < last) bring(end, last - end, begin, end, advised);
  });
#endif
}
