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

namespace bitline {

// avx2: AVX2, FMA, F16C, BMI1, BMI2 (Haswell, Zen). avx512: F, BW, DQ, VL, VNNI, BF16, VBMI (Sapphire Rapids, Zen 4).
// amx: bf16 and int8 tiles on top of that, where the OS grants their state.
enum IsaLevel : int { kPortable = 0, kAvx2 = 1, kAvx512 = 2, kAmx = 3, kNumLevels = 4 };

// The level in use: the highest that CPU, OS and build support, unless bitline_set_isa chose a lower one.
IsaLevel isa_level();

// The kernels of the highest level in use that has any. by_level[kPortable] is never null.
template <class Kernels>
static inline const Kernels& dispatch(const Kernels* const (&by_level)[kNumLevels]) {
  int i = isa_level();
  while (by_level[i] == nullptr) --i;
  return *by_level[i];
}

}  // namespace bitline
