// Memory that a thread keeps between calls.
#pragma once

#include <stdint.h>
#include <stdlib.h>

namespace bitline {

struct Scratch {
  void* at;
  size_t size;
};

namespace {  // internal linkage: see parallel.h

// At least `bytes`, aligned to a page, whatever was in it lost; null where there is no memory.
inline void* reserve(Scratch& s, size_t bytes) {
  if (s.size < bytes) {
    free(s.at);
    s.at = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    s.size = s.at == nullptr ? 0 : bytes;
  }
  return s.at;
}

}  // namespace
}  // namespace bitline
