// Which level this CPU, this system and this build have, and which one is in use.
#include "isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace bitline {
namespace {

#if defined(__x86_64__)
bool has(uint32_t word, int bit) { return (word >> bit) & 1; }

// XCR0: the register states that the system saves. Bits 1, 2: SSE and AVX; 5, 6, 7: AVX-512; 17, 18: tiles.
uint64_t saved_states() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t(high) << 32) | low;
}

// Linux hands out tile data on request, once for the process: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
bool tiles_granted() {
#if defined(__linux__)
  return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
  return false;
#endif
}

// Bits of CPUID leaves 1 and 7 (Intel SDM volume 2A, AMD APM volume 3).
Level detect() {
  uint32_t a, b1, c1, d1, b7, c7, d7, a71, b71, c71, d71;
  if (!__get_cpuid(1, &a, &b1, &c1, &d1) || !has(c1, 27)) return kPortable;  // 27: xgetbv may be used
  if (!__get_cpuid_count(7, 0, &a, &b7, &c7, &d7)) return kPortable;
  if (!__get_cpuid_count(7, 1, &a71, &b71, &c71, &d71)) a71 = 0;
  const uint64_t states = saved_states();
  if ((states & 0x6) != 0x6 || !has(c1, 12) || !has(c1, 29) || !has(b7, 3) || !has(b7, 5) || !has(b7, 8)) return kPortable;
  const bool f_bw_dq_vl = has(b7, 16) && has(b7, 30) && has(b7, 17) && has(b7, 31);
  if ((states & 0xE6) != 0xE6 || !f_bw_dq_vl || !has(c7, 11) || !has(c7, 1) || !has(a71, 5)) return kAvx2;
  const bool tiles = has(d7, 24) && has(d7, 25) && has(d7, 22);
  if ((states & 0x60000) != 0x60000 || !tiles || !tiles_granted()) return kAvx512;
  return kAmx;
}
#else
Level detect() { return kPortable; }
#endif

Level built([[maybe_unused]] Level found) {
#ifndef BITLINE_HAS_AVX2
  return kPortable;
#elif !defined(BITLINE_HAS_AVX512)
  return found < kAvx2 ? found : kAvx2;
#elif !defined(BITLINE_HAS_AMX)
  return found < kAvx512 ? found : kAvx512;
#else
  return found;
#endif
}

// Set when the library is loaded, before anyone can call it.
const Level highest = built(detect());
int current = highest;

}  // namespace

Level level() { return Level(__atomic_load_n(&current, __ATOMIC_RELAXED)); }

}  // namespace bitline

using namespace bitline;

// Changes with every change of a signature; native.py has the same number.
BITLINE_EXPORT int bitline_abi() { return 1; }

BITLINE_EXPORT int bitline_isa() { return level(); }

BITLINE_EXPORT int bitline_isa_highest() { return highest; }

// Use a level up to the highest; -1 where this machine has it not.
BITLINE_EXPORT int bitline_set_isa(int wanted) {
  if (wanted < 0 || wanted > highest) return -1;
  __atomic_store_n(&current, wanted, __ATOMIC_RELAXED);
  return 0;
}
