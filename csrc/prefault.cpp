// Faults in pages on all threads: those of new memory, as huge pages where those are fast, and those of mapped files.
#include "prefault.h"

#include "isa.h"
#include "parallel.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#endif

namespace {

#if defined(__linux__) && defined(MADV_HUGEPAGE)
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23  // Linux 5.14; older kernels refuse it, and pages are faulted in when they are written to
#endif

constexpr uintptr_t kHugePage = 2 << 20;
constexpr int64_t kMinSourceBytes = 1 << 20;

// Where the system has free huge pages, they are faulted in six times faster than small ones. Where a hypervisor has reclaimed
// free memory in huge pages (ballooning), the first touch of each costs 4 ms, and small pages come from elsewhere.
constexpr double kSlowFaultSeconds = 1e-3;
bool huge_pages_are_slow = false;

double thread_seconds() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

// Whether the page in the middle is resident: memory that the process has used before.
bool resident(uintptr_t at, size_t bytes) {
  const uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE));
  unsigned char vec = 0;
  return mincore(reinterpret_cast<void*>((at + bytes / 2) / page * page), 1, &vec) == 0 && (vec & 1);
}

// Fault in [at, at + bytes), at most one huge page of [begin, end). advised: huge pages were asked for.
void prefault(uintptr_t at, size_t bytes, uintptr_t begin, uintptr_t end, bool advised) {
  if (resident(at, bytes)) return;
  if (advised && bytes == kHugePage && !__atomic_load_n(&huge_pages_are_slow, __ATOMIC_RELAXED)) {
    const double started = thread_seconds();
    *reinterpret_cast<volatile char*>(at) = 0;
    if (thread_seconds() - started < kSlowFaultSeconds) return;
    if (!__atomic_exchange_n(&huge_pages_are_slow, true, __ATOMIC_RELAXED))
      madvise(reinterpret_cast<void*>(begin), end - begin, MADV_NOHUGEPAGE);
    return;
  }
  madvise(reinterpret_cast<void*>(at), bytes, MADV_POPULATE_WRITE);
}
#endif

}  // namespace

namespace bitline {

void prefault_source([[maybe_unused]] const void* at, [[maybe_unused]] int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  if (bytes < kMinSourceBytes) return;
  const uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE));
  const uintptr_t first = reinterpret_cast<uintptr_t>(at) / page * page, last = reinterpret_cast<uintptr_t>(at) + uintptr_t(bytes);
  parallel_for_chunks(int64_t(last - first), kHugePage, [&](int64_t begin, int64_t end) {
    madvise(reinterpret_cast<void*>(first + uintptr_t(begin)), size_t(end - begin), MADV_POPULATE_READ);
  });
#endif
}

}  // namespace bitline

// Fault in the pages of [at, at + bytes), memory whose contents do not matter, on all threads. Only a hint: what fails is left to
// page faults.
BITLINE_EXPORT void bitline_prefault_pages([[maybe_unused]] void* at, [[maybe_unused]] int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE));
  const uintptr_t first = (reinterpret_cast<uintptr_t>(at) + page - 1) / page * page;
  const uintptr_t last = (reinterpret_cast<uintptr_t>(at) + uintptr_t(bytes)) / page * page;
  const uintptr_t begin = (first + kHugePage - 1) / kHugePage * kHugePage, end = last / kHugePage * kHugePage;
  if (begin >= end) return;
  const bool advised = !__atomic_load_n(&huge_pages_are_slow, __ATOMIC_RELAXED) &&
                       madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE) == 0;
  const int64_t huge_pages = int64_t((end - begin) / kHugePage);
  bitline::parallel_for(huge_pages + 2, [&](int64_t i) {  // the last two tasks are the unaligned head and tail
    if (i < huge_pages) prefault(begin + uintptr_t(i) * kHugePage, kHugePage, begin, end, advised);
    if (i == huge_pages && first < begin) prefault(first, begin - first, begin, end, advised);
    if (i > huge_pages && end < last) prefault(end, last - end, begin, end, advised);
  });
#endif
}
