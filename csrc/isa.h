// ISA levels: which variants of a kernel this process may call.
#pragma once

#include <stddef.h>
#include <stdint.h>

#define BITLINE_EXPORT extern "C" __attribute__((visibility("default")))

// BITLINE_AVX2(declaration) expands only where that level is built; BITLINE_AVX2_KERNELS(&kernels) is else a null pointer.
#ifdef BITLINE_HAS_AVX2
#define BITLINE_AVX2(...) __VA_ARGS__
#define BITLINE_AVX2_KERNELS(kernels) kernels
#else
#define BITLINE_AVX2(...)
#define BITLINE_AVX2_KERNELS(kernels) nullptr
#endif
#ifdef BITLINE_HAS_AVX_VNNI
#define BITLINE_AVX_VNNI(...) __VA_ARGS__
#define BITLINE_AVX_VNNI_KERNELS(kernels) kernels
#else
#define BITLINE_AVX_VNNI(...)
#define BITLINE_AVX_VNNI_KERNELS(kernels) nullptr
#endif
#ifdef BITLINE_HAS_AVX512
#define BITLINE_AVX512(...) __VA_ARGS__
#define BITLINE_AVX512_KERNELS(kernels) kernels
#else
#define BITLINE_AVX512(...)
#define BITLINE_AVX512_KERNELS(kernels) nullptr
#endif
#ifdef BITLINE_HAS_AMX
#define BITLINE_AMX(...) __VA_ARGS__
#define BITLINE_AMX_KERNELS(kernels) kernels
#else
#define BITLINE_AMX(...)
#define BITLINE_AMX_KERNELS(kernels) nullptr
#endif
#ifdef BITLINE_HAS_NEON
#define BITLINE_NEON(...) __VA_ARGS__
#define BITLINE_NEON_KERNELS(kernels) kernels
#else
#define BITLINE_NEON(...)
#define BITLINE_NEON_KERNELS(kernels) nullptr
#endif
#ifdef BITLINE_HAS_NEON_I8MM
#define BITLINE_NEON_I8MM(...) __VA_ARGS__
#define BITLINE_NEON_I8MM_KERNELS(kernels) kernels
#else
#define BITLINE_NEON_I8MM(...)
#define BITLINE_NEON_I8MM_KERNELS(kernels) nullptr
#endif

namespace bitline {

// avx2: AVX2, FMA, F16C, BMI1, BMI2 (Haswell, Zen). avx512: F, BW, DQ, VL, VNNI, BF16, VBMI (Sapphire Rapids, Zen 4).
// amx: bf16 and int8 tiles on top of that, where the OS grants their state. avx_vnni: vpdpbusd beside AVX2 (Alder Lake, Sierra
// Forest, Zen 5). neon: ASIMD with dotprod (Armv8.2: Graviton 2, Apple M1). neon_i8mm: i8mm and bf16 on top (Graviton 3, Grace).
enum IsaLevel : int {
  kPortable = 0, kAvx2 = 1, kAvx512 = 2, kAmx = 3, kAvxVnni = 4, kNeon = 5, kNeonI8mm = 6, kNumLevels = 7
};
// The next lower level, whose kernels run where a level has none of its own.
constexpr int kLowerLevel[kNumLevels] = {kPortable, kPortable, kAvx2, kAvx512, kAvx2, kPortable, kNeon};

// The level in use: the highest that CPU, OS and build support, unless bitline_set_isa chose another.
IsaLevel isa_level();

// The kernels of the level in use, or of the next lower one that has any. by_level[kPortable] is never null.
template <class Kernels>
static inline const Kernels& dispatch(const Kernels* const (&by_level)[kNumLevels]) {
  int i = isa_level();
  while (by_level[i] == nullptr) i = kLowerLevel[i];
  return *by_level[i];
}

}  // namespace bitline
