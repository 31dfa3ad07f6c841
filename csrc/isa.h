// Levels of CPU features: which variants of a function this process may call.
#pragma once

#include <stddef.h>
#include <stdint.h>

#define BITLINE_EXPORT extern "C" __attribute__((visibility("default")))

// BITLINE_AVX2(declaration) is there where that level is built; BITLINE_AVX2_TABLE(&t) is else a null pointer.
#ifdef BITLINE_HAS_AVX2
#define BITLINE_AVX2(...) __VA_ARGS__
#define BITLINE_AVX2_TABLE(t) t
#else
#define BITLINE_AVX2(...)
#define BITLINE_AVX2_TABLE(t) nullptr
#endif
#ifdef BITLINE_HAS_AVX512
#define BITLINE_AVX512(...) __VA_ARGS__
#define BITLINE_AVX512_TABLE(t) t
#else
#define BITLINE_AVX512(...)
#define BITLINE_AVX512_TABLE(t) nullptr
#endif
#ifdef BITLINE_HAS_AMX
#define BITLINE_AMX(...) __VA_ARGS__
#define BITLINE_AMX_TABLE(t) t
#else
#define BITLINE_AMX(...)
#define BITLINE_AMX_TABLE(t) nullptr
#endif

namespace bitline {

// avx2: AVX2, FMA, F16C, BMI1, BMI2 (Haswell, Zen). avx512: F, BW, DQ, VL, VNNI, BF16, VBMI (Sapphire Rapids, Zen 4).
// amx: tiles of bf16 and int8 on top of that, with the system's leave to use them.
enum Level : int { kPortable = 0, kAvx2 = 1, kAvx512 = 2, kAmx = 3, kLevels = 4 };

// The level in use: the highest that CPU and build have, unless bitline_set_isa chose a lower one.
Level level();

// The table of the highest level in use that has one. tables[0] is never null.
template <class Table>
static inline const Table& pick(const Table* const (&tables)[kLevels]) {
  int at = level();
  while (tables[at] == nullptr) --at;
  return *tables[at];
}

}  // namespace bitline
