// Detects the ISA level of CPU, OS and build, and holds the one in use.
#include "isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace bitline {
namespace {

#if defined(__x86_64__)
bool has_bit(uint32_t reg, int bit) { return (reg >> bit) & 1; }

// XCR0: register states that the OS saves. Bits 1, 2: SSE and AVX; 5, 6, 7: AVX-512; 17, 18: AMX tiles.
uint64_t read_xcr0() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t(high) << 32) | low;
}

// Linux grants AMX tile data on request, once per process: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
bool request_amx_tiles() {
#if defined(__linux__)
  return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
  return false;
#endif
}

// The CPU's and OS's levels, a bit each. Feature bits of CPUID leaves 1 and 7 (Intel SDM volume 2A, AMD APM volume 3).
uint32_t detect_levels() {
  uint32_t a, b1, c1, d1, b7, c7, d7, a71, b71, c71, d71, levels = 1u << kPortable;
  if (!__get_cpuid(1, &a, &b1, &c1, &d1) || !has_bit(c1, 27)) return levels;  // 27: OSXSAVE, xgetbv may be used
  if (!__get_cpuid_count(7, 0, &a, &b7, &c7, &d7)) return levels;
  if (!__get_cpuid_count(7, 1, &a71, &b71, &c71, &d71)) a71 = 0;
  const uint64_t xcr0 = read_xcr0();
  const bool avx2 = has_bit(c1, 12) && has_bit(c1, 29) && has_bit(b7, 3) && has_bit(b7, 5) && has_bit(b7, 8);
  if ((xcr0 & 0x6) != 0x6 || !avx2) return levels;
  levels |= 1u << kAvx2;
#ifdef BITLINE_EMULATED
  return levels | 1u << kAvxVnni | 1u << kAvx512 | 1u << kAmx;
#endif
  if (has_bit(a71, 4)) levels |= 1u << kAvxVnni;
  const bool f_bw_dq_vl = has_bit(b7, 16) && has_bit(b7, 30) && has_bit(b7, 17) && has_bit(b7, 31);
  if ((xcr0 & 0xE6) != 0xE6 || !f_bw_dq_vl || !has_bit(c7, 11) || !has_bit(c7, 1) || !has_bit(a71, 5)) return levels;
  levels |= 1u << kAvx512;
  const bool amx = has_bit(d7, 24) && has_bit(d7, 25) && has_bit(d7, 22);
  if ((xcr0 & 0x60000) != 0x60000 || !amx || !request_amx_tiles()) return levels;
  return levels | 1u << kAmx;
}
#elif defined(__aarch64__)
struct ArmFeatures {
  bool dotprod, i8mm, bf16;
};
#if defined(__linux__)
// Linux reports what the CPU has in the auxiliary vector (asm/hwcap.h).
ArmFeatures arm_features() {
  const uint64_t hwcap = getauxval(AT_HWCAP), hwcap2 = getauxval(AT_HWCAP2);
  const bool atomics = hwcap >> 8 & 1;  // Armv8.1's, which compilers use above Armv8.0
  return {atomics && (hwcap >> 20 & 1), bool(hwcap2 >> 13 & 1), bool(hwcap2 >> 14 & 1)};
}
#elif defined(__APPLE__)
bool has_feature(const char* name) {
  int value = 0;
  size_t size = sizeof value;
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
}
ArmFeatures arm_features() {
  return {has_feature("hw.optional.arm.FEAT_DotProd"), has_feature("hw.optional.arm.FEAT_I8MM"),
          has_feature("hw.optional.arm.FEAT_BF16")};
}
#else
ArmFeatures arm_features() { return {}; }
#endif

uint32_t detect_levels() {
  const ArmFeatures has = arm_features();
  uint32_t levels = 1u << kPortable;
  if (has.dotprod) levels |= 1u << kNeon;
  if (has.dotprod && has.i8mm && has.bf16) levels |= 1u << kNeonI8mm;
  return levels;
}
#else
uint32_t detect_levels() { return 1u << kPortable; }
#endif

constexpr uint32_t kBuilt = 1u << kPortable
#ifdef BITLINE_HAS_AVX2
                            | 1u << kAvx2
#endif
#ifdef BITLINE_HAS_AVX_VNNI
                            | 1u << kAvxVnni
#endif
#ifdef BITLINE_HAS_AVX512
                            | 1u << kAvx512
#endif
#ifdef BITLINE_HAS_AMX
                            | 1u << kAmx
#endif
#ifdef BITLINE_HAS_NEON
                            | 1u << kNeon
#endif
#ifdef BITLINE_HAS_NEON_I8MM
                            | 1u << kNeonI8mm
#endif
    ;

int highest_of(uint32_t levels) {
  constexpr int order[] = {kAmx, kAvx512, kAvxVnni, kAvx2, kNeonI8mm, kNeon};
  for (const int level : order)
    if (levels >> level & 1) return level;
  return kPortable;
}

// Set when the library is loaded, before any call.
const uint32_t supported = detect_levels() & kBuilt;
int current = highest_of(supported);

}  // namespace

IsaLevel isa_level() { return IsaLevel(__atomic_load_n(&current, __ATOMIC_RELAXED)); }

}  // namespace bitline

using namespace bitline;

// Raised with every change of an exported name or signature; native.py holds the same number.
BITLINE_EXPORT int bitline_abi() { return 10; }

BITLINE_EXPORT int bitline_isa() { return isa_level(); }

// The levels that this machine and build support, a bit each.
BITLINE_EXPORT int bitline_isa_supported() { return int(supported); }

// Use a supported level. Returns 0; -1: this machine or build lacks it.
BITLINE_EXPORT int bitline_set_isa(int level) {
  if (level < 0 || level >= kNumLevels || !(supported >> level & 1)) return -1;
  __atomic_store_n(&current, level, __ATOMIC_RELAXED);
  return 0;
}
