// Pages of memory.
#include "isa.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

// Ask the system for large pages under [at, at + bytes), which nobody has written to yet: a page fault then brings 2 MiB
// instead of 4 KiB. Only a hint.
BITLINE_EXPORT void bitline_large_pages([[maybe_unused]] void* at, [[maybe_unused]] int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kLarge = 2 << 20;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(at) + kLarge - 1) / kLarge * kLarge;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(at) + uintptr_t(bytes)) / kLarge * kLarge;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}
