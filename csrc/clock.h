// The monotonic clock.
#pragma once

#include <stdint.h>
#include <time.h>

namespace bitline {
namespace {  // internal linkage: see parallel.h

inline int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t(t.tv_sec) * 1000000000 + t.tv_nsec;
}

}  // namespace
}  // namespace bitline
