// Tells the processor that a loop waits for another thread.
#pragma once

namespace bitline {
namespace {  // internal linkage: see parallel.h

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

}  // namespace
}  // namespace bitline
