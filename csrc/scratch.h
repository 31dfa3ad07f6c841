// Thread-local scratch memory that is kept between calls.
#pragma once

#include <stdint.h>
#include <stdlib.h>

namespace bitline {

struct Scratch {
  void* data;
  size_t bytes;
};

namespace {  // internal linkage: see parallel.h

// At least `bytes`, page-aligned; growing loses the contents. Null: no memory.
inline void* reserve(Scratch& scratch, size_t bytes) {
  if (scratch.bytes < bytes) {
    free(scratch.data);
    scratch.data = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    scratch.bytes = scratch.data == nullptr ? 0 : bytes;
  }
  return scratch.data;
}

inline void release(Scratch& scratch) {
  free(scratch.data);
  scratch = {};
}

}  // namespace
}  // namespace bitline
