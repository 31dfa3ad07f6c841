// Blocks of 32 output rows with AVX-512, for each mode and width: codes decoded in registers for one tile of input rows, or
// a panel of them decoded once into the cache and multiplied with many tiles.
#pragma once

#include "gemm_avx512_decode.h"

namespace bitline::BITLINE_LEVEL {
namespace {

// How far ahead of one row's product the codes are asked for, and their pages before: the entry of a page table that has left the
// caches takes longer to come than 4 KB of codes (W4A16, M=1 between calls of other layers: 190 us with kFar, 247 without).
constexpr int64_t kNear = 4096, kFar[] = {32768, 65536}, kPage = 4096, kStreamNear = 1024;

INLINE void prefetch(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }

// What to prefetch while codes are read: `advance` bytes for each step of them.
struct Ahead {
  const uint8_t* at;
  int64_t advance;
};

constexpr int kPanelWords = kPanelBytes / 4 / kRows;

INLINE void store16(const Call& c, int64_t row, int64_t col, __m512 v) {
  const int64_t left = c.w->n - col;
  if (left <= 0) return;
  const __mmask16 mask = left >= 16 ? __mmask16(0xffff) : __mmask16((1u << left) - 1);
  if (c.dtype == kX32) {
    if (c.bias) v = _mm512_add_ps(v, _mm512_maskz_loadu_ps(mask, static_cast<const float*>(c.bias) + col));
    _mm512_mask_storeu_ps(static_cast<float*>(c.y) + row * c.w->n + col, mask, v);
    return;
  }
  const int64_t at = row * c.w->n + col;
  __m256i b = _mm256_setzero_si256();
  if (c.bias) b = _mm256_maskz_loadu_epi16(mask, static_cast<const uint16_t*>(c.bias) + col);
  uint16_t* y = static_cast<uint16_t*>(c.y) + at;
  if (c.dtype == kX16) {
    if (c.bias) v = _mm512_add_ps(v, _mm512_cvtph_ps(b));
    _mm256_mask_storeu_epi16(y, mask, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  } else {
    if (c.bias) v = _mm512_add_ps(v, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16)));
    _mm256_mask_storeu_epi16(y, mask, (__m256i)_mm512_cvtneps_pbh(v));
  }
}

INLINE void finish(const Call& c, int64_t row, int64_t block, __m512 a, __m512 b) {
  if (c.row_scale) {
    const __m512 s = _mm512_set1_ps(c.row_scale[row]);
    a = _mm512_mul_ps(a, s), b = _mm512_mul_ps(b, s);
  }
  store16(c, row, block * kRows, a);
  store16(c, row, block * kRows + 16, b);
}

// One block, all of K, a tile of MR rows of x. CHAINS independent sums of each row hide the latency of the multiply-adds.
template <class Mo, int BITS, int MR, int CHAINS, bool OFFSET>
void narrow_tile(const Call& c, int64_t block, int64_t row, Ahead ahead) {
  using C = Codes<BITS>;
  constexpr int step = C::step, words = step / Mo::per_word;
  const Meta& w = *c.w;
  const uint8_t* p = c.base + w.codes + block * block_bytes(w);
  const uint8_t* page = p;
  Scales scales(w, c.base, block, 0);
  const uint32_t* x = c.xp + row * c.words;
  const float* sums = c.sums + row * w.groups;
  const int32_t* starts = c.starts + row * w.groups;
  const typename Mo::template Tab<BITS> table(c.base, w);
  __m512 total[MR][2], all[MR][2];
  UNROLL for (int m = 0; m < MR; m++) total[m][0] = total[m][1] = all[m][0] = all[m][1] = _mm512_setzero_ps();
  const int64_t steps = w.run / step, group_bytes = steps * 128 * C::vectors;
  const int64_t left = w.map ? w.run : w.k - (w.groups - 1) * w.run, last_steps = (left + step - 1) / step;  // without its padding
  for (int64_t g = 0; g < w.groups; g++) {
    if (g % kGroups == 0 && g > 0)
      UNROLL for (int m = 0; m < MR; m++) UNROLL for (int i = 0; i < 2; i++)
        all[m][i] = _mm512_add_ps(all[m][i], total[m][i]), total[m][i] = _mm512_setzero_ps();
    typename Mo::Acc acc[MR][2][CHAINS];
    UNROLL for (int m = 0; m < MR; m++) UNROLL for (int i = 0; i < CHAINS; i++)
      acc[m][0][i] = acc[m][1][i] = i == 0 ? Mo::start(starts, g * MR + m) : typename Mo::Acc{};
    for (; page < p + group_bytes; page += kPage) prefetch(page + kFar[0]), prefetch(page + kFar[1]);
    prefetch(scales.s + kStreamNear);
    if (OFFSET) prefetch(scales.o + kStreamNear);
    const int64_t now = g + 1 < w.groups ? steps : last_steps;
    for (int64_t s = 0; s < now; s++) {
      C c0, c1;
      c0.read(p), c1.read(p + 64);
      UNROLL for (int i = 0; i < C::vectors * 2; i++) prefetch(ahead.at + 64 * i);
      ahead.at += ahead.advance;
      UNROLL for (int j = 0; j < words; j++) {
        const __m512i w0 = Mo::template word<BITS>(c0, table, j), w1 = Mo::template word<BITS>(c1, table, j);
        UNROLL for (int m = 0; m < MR; m++) {
          acc[m][0][j % CHAINS] = Mo::mac(acc[m][0][j % CHAINS], w0, x[j * MR + m]);
          acc[m][1][j % CHAINS] = Mo::mac(acc[m][1][j % CHAINS], w1, x[j * MR + m]);
        }
      }
      x += words * MR;
      p += 128 * C::vectors;
    }
    const Affine a0 = scales.half(0), a1 = scales.half(1);
    scales.next();
    UNROLL for (int m = 0; m < MR; m++) {
      typename Mo::Acc s0 = acc[m][0][0], s1 = acc[m][1][0];
      UNROLL for (int i = 1; i < CHAINS; i++) s0 = Mo::add(s0, acc[m][0][i]), s1 = Mo::add(s1, acc[m][1][i]);
      total[m][0] = _mm512_fmadd_ps(a0.s, Mo::sum(s0), total[m][0]);
      total[m][1] = _mm512_fmadd_ps(a1.s, Mo::sum(s1), total[m][1]);
      if (OFFSET) {
        const __m512 sum = _mm512_set1_ps(sums[g * MR + m]);
        total[m][0] = _mm512_fmadd_ps(a0.o, sum, total[m][0]);
        total[m][1] = _mm512_fmadd_ps(a1.o, sum, total[m][1]);
      }
    }
  }
  UNROLL for (int m = 0; m < MR; m++)
    finish(c, row + m, block, _mm512_add_ps(all[m][0], total[m][0]), _mm512_add_ps(all[m][1], total[m][1]));
}

// Sums of each row at once in a tile of few rows: a dozen vectors of sums in all keep the multiplier busy.
constexpr int chains_of(int rows) { return rows <= 3 ? 4 : rows <= 5 ? 2 : 1; }

// One block, all tiles. While they read it again out of the cache, each brings its share of the next block; so does not the first
// tile of the first block, which has to bring its own.
template <class Mo, int BITS, bool OFFSET> void narrow(const Call& c, int64_t block, bool begins) {
  const int64_t tiles = c.last_tile - c.first_tile, bytes = block_bytes(*c.w);
  const uint8_t* p = c.base + c.w->codes + block * bytes;
  for (int64_t t = 0; t < tiles; t++) {
    const int64_t row = tile_start(c, c.first_tile + t);
    Ahead ahead{p + kNear, 128 * Codes<BITS>::vectors};
    if (tiles > 1 && !(begins && t == 0)) {
      const int64_t parts = tiles - begins, part = t - begins;
      ahead.advance = (ahead.advance + parts - 1) / parts;
      ahead.at = p + bytes + part * (bytes / parts);
    }
    switch (tile_start(c, c.first_tile + t + 1) - row) {
#define BITLINE_TILE(MR) case MR: \
      if (chains_of(MR) == 1 || c.w->invariant) narrow_tile<Mo, BITS, MR, 1, OFFSET>(c, block, row, ahead); \
      else narrow_tile<Mo, BITS, MR, chains_of(MR), OFFSET>(c, block, row, ahead); \
      break;
      BITLINE_TILE(1) BITLINE_TILE(2) BITLINE_TILE(3) BITLINE_TILE(4) BITLINE_TILE(5) BITLINE_TILE(6)
      BITLINE_TILE(7) BITLINE_TILE(8) BITLINE_TILE(9) BITLINE_TILE(10) BITLINE_TILE(11) BITLINE_TILE(12)
#undef BITLINE_TILE
    }
  }
}

// A part of K: some whole groups, or a piece of one.
struct Part {
  int64_t group, runs, words;  // first group; how many; words of each (or of the piece)
  int64_t word;                // its first word in a row of x
  bool first;                  // it has its group's first column
  const float *s, *o;          // [runs][32]; o is null where there are no offsets
};

// Where a tile finds the words of the weight: in a panel, or as codes, which it leaves decoded for the tiles after it.
struct Decoded {
  static constexpr int words = 1;
  const uint32_t* panel;
  INLINE void step() {}
  INLINE void word(int, __m512i& a, __m512i& b) { a = load(panel), b = load(panel + 16), panel += 32; }
};
template <class Mo, int BITS> struct Decoding {
  static constexpr int words = Codes<BITS>::step / Mo::per_word;
  const uint8_t* p;
  uint32_t* panel;
  const typename Mo::template Tab<BITS> table;
  Codes<BITS> c0, c1;
  INLINE void step() { c0.read(p), c1.read(p + 64), p += 128 * Codes<BITS>::vectors; }
  INLINE void word(int j, __m512i& a, __m512i& b) {
    a = Mo::template word<BITS>(c0, table, j), b = Mo::template word<BITS>(c1, table, j);
    _mm512_store_si512(panel, a), _mm512_store_si512(panel + 16, b), panel += 32;
  }
};

// sums[MR][32] += words of the weight [words][32] times a tile of x [words][MR], each group scaled.
template <class Mo, int MR, class From> void tile(const Part& part, From from, const uint32_t* x, const float* sums,
                                                  const int32_t* starts, float* out) {
  for (int64_t r = 0; r < part.runs; r++) {
    typename Mo::Acc a0[MR], a1[MR];
    UNROLL for (int m = 0; m < MR; m++) a0[m] = a1[m] = part.first ? Mo::start(starts, r * MR + m) : typename Mo::Acc{};
    for (int64_t i = 0; i < part.words; i += From::words) {
      from.step();
      UNROLL for (int j = 0; j < From::words; j++) {
        __m512i w0, w1;
        from.word(j, w0, w1);
        UNROLL for (int m = 0; m < MR; m++) {
          a0[m] = Mo::mac(a0[m], w0, x[m]);
          a1[m] = Mo::mac(a1[m], w1, x[m]);
        }
        x += MR;
      }
    }
    const __m512 s0 = _mm512_loadu_ps(part.s + 32 * r), s1 = _mm512_loadu_ps(part.s + 32 * r + 16);
    UNROLL for (int m = 0; m < MR; m++) {
      float* at = out + 32 * m;
      __m512 t0 = _mm512_fmadd_ps(s0, Mo::sum(a0[m]), _mm512_loadu_ps(at));
      __m512 t1 = _mm512_fmadd_ps(s1, Mo::sum(a1[m]), _mm512_loadu_ps(at + 16));
      if (part.o) {
        const __m512 sum = _mm512_set1_ps(sums[r * MR + m]);
        t0 = _mm512_fmadd_ps(_mm512_loadu_ps(part.o + 32 * r), sum, t0);
        t1 = _mm512_fmadd_ps(_mm512_loadu_ps(part.o + 32 * r + 16), sum, t1);
      }
      _mm512_storeu_ps(at, t0), _mm512_storeu_ps(at + 16, t1);
    }
  }
}

template <class Mo, class From> void any_tile(int64_t rows, const Part& p, const From& from, const uint32_t* x,
                                             const float* sums, const int32_t* starts, float* out) {
  switch (rows) {
    case 6: return tile<Mo, 6>(p, from, x, sums, starts, out);
    case 7: return tile<Mo, 7>(p, from, x, sums, starts, out);
    case 8: return tile<Mo, 8>(p, from, x, sums, starts, out);
    case 9: return tile<Mo, 9>(p, from, x, sums, starts, out);
    case 10: return tile<Mo, 10>(p, from, x, sums, starts, out);
    case 11: return tile<Mo, 11>(p, from, x, sums, starts, out);
    default: return tile<Mo, 12>(p, from, x, sums, starts, out);
  }
}

// Scaled weights rounded once, as a dense layer in bfloat16 would hold them: no scale is left to apply to sums.
INLINE __m512i scaled_pair(__m512i pair, __m512 s, __m512 o) {
  const __m512 a = _mm512_fmadd_ps(low_half(pair), s, o), b = _mm512_fmadd_ps(high_half(pair), s, o);
  const __m512i order = _mm512_or_si512(
      _mm512_slli_epi32(_mm512_add_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                         _mm512_set1_epi32(16)), 16),
      _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(b, a));
}

template <class Mo, int BITS> void decode(const Call& c, const uint8_t* p, int64_t steps, uint32_t* panel) {
  using C = Codes<BITS>;
  const typename Mo::template Tab<BITS> table(c.base, *c.w);
  for (int64_t s = 0; s < steps; s++) {
    C c0, c1;
    c0.read(p), c1.read(p + 64);
    UNROLL for (int j = 0; j < C::step / Mo::per_word; j++) {
      _mm512_store_si512(panel, Mo::template word<BITS>(c0, table, j));
      _mm512_store_si512(panel + 16, Mo::template word<BITS>(c1, table, j));
      panel += 32;
    }
    p += 128 * C::vectors;
  }
}

template <int BITS> void decode_scaled(const Call& c, const uint8_t* p, int64_t steps, const float* s, const float* o, uint32_t* panel) {
  using C = Codes<BITS>;
  const Table<BITS> table(c.base, *c.w);
  const __m512 s0 = _mm512_loadu_ps(s), s1 = _mm512_loadu_ps(s + 16), zero = _mm512_setzero_ps();
  const __m512 o0 = o ? _mm512_loadu_ps(o) : zero, o1 = o ? _mm512_loadu_ps(o + 16) : zero;
  for (int64_t i = 0; i < steps; i++) {
    C c0, c1;
    c0.read(p), c1.read(p + 64);
    UNROLL for (int j = 0; j < C::step / 2; j++) {
      _mm512_store_si512(panel, scaled_pair(c0.pair(table, j), s0, o0));
      _mm512_store_si512(panel + 16, scaled_pair(c1.pair(table, j), s1, o1));
      panel += 32;
    }
    p += 128 * C::vectors;
  }
}

// From a number of rows on scaling the panel costs less than scaling the sums of each group, which a shorter group has more of.
INLINE bool scale_panel(const Call& c, int64_t run) {
  return c.mode == kBF16Mode && c.dtype == kXB16 && run < 512 && 5 * c.m > 8 * run;
}

template <class Mo, int BITS> void wide(const Call& c, int64_t block, uint32_t* panel, float* out) {
  constexpr int step = Codes<BITS>::step;
  const Meta& w = *c.w;
  alignas(64) static const float ones[32] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  alignas(64) float s[kPanelWords][32], o[kPanelWords][32];
  const int64_t run_words = w.run / Mo::per_word, tiles = c.last_tile - c.first_tile;
  const int64_t first_row = tile_start(c, c.first_tile), last_row = tile_start(c, c.last_tile);
  const bool scaled = scale_panel(c, w.run), offset = w.offset_type != kNone;
  for (int64_t i = first_row * 32; i < last_row * 32; i += 16) _mm512_store_ps(out + i, _mm512_setzero_ps());
  const uint8_t* p = c.base + w.codes + block * block_bytes(w);
  for (int64_t at = 0; at < c.words;) {
    Part part;
    part.word = at, part.group = at / run_words;
    const int64_t within = at - part.group * run_words;
    part.first = within == 0;
    if (run_words <= kPanelWords) {
      part.words = run_words;
      part.runs = kPanelWords / run_words;
      if (part.runs > w.groups - part.group) part.runs = w.groups - part.group;
    } else {
      part.runs = 1;
      part.words = run_words - within < kPanelWords ? run_words - within : kPanelWords;
    }
    Scales scales(w, c.base, block, part.group);
    for (int64_t r = 0; r < part.runs; r++, scales.next())
      for (int h = 0; h < 2; h++) {
        const Affine a = scales.half(h);
        _mm512_store_ps(s[r] + 16 * h, a.s), _mm512_store_ps(o[r] + 16 * h, a.o);
      }
    const int64_t words = part.runs * part.words;
    const int64_t bytes = words * Mo::per_word / step * 128 * Codes<BITS>::vectors, share = (bytes / tiles + 63) / 64 * 64;
    part.s = s[0], part.o = offset && part.first ? o[0] : nullptr;
    if constexpr (Mo::per_word == 2) {
      if (scaled) {
        const int64_t steps = part.words * 2 / step;
        for (int64_t r = 0; r < part.runs; r++)
          decode_scaled<BITS>(c, p + r * steps * 128 * Codes<BITS>::vectors, steps, s[r], offset ? o[r] : nullptr, panel + r * part.words * 32);
      }
    }
    const bool fused = !scaled && BITS == 8 && Mo::per_word == 2;
    if (!scaled && !fused) decode<Mo, BITS>(c, p, words * Mo::per_word / step, panel);
    const uint8_t* codes = p;
    p += bytes;
    for (int64_t i = 0; i < bytes; i += kPage) prefetch(p + kFar[0] + i);
    if (scaled) part.words = words, part.runs = 1, part.s = ones, part.o = nullptr;
    for (int64_t t = 0; t < tiles; t++) {
      const int64_t row = tile_start(c, c.first_tile + t), rows = tile_start(c, c.first_tile + t + 1) - row;
      for (int64_t i = 0; i < share; i += 64) _mm_prefetch(reinterpret_cast<const char*>(p + share * t + i), _MM_HINT_T1);
      const int64_t sums = row * w.groups + part.group * rows;
      if constexpr (BITS == 8 && Mo::per_word == 2) {
        if (fused && t == 0) {
          any_tile<Mo>(rows, part, Decoding<Mo, BITS>{codes, panel, typename Mo::template Tab<BITS>(c.base, w), {}, {}},
                       c.xp + row * c.words + at * rows, c.sums + sums, c.starts + sums, out + 32 * row);
          continue;
        }
      }
      any_tile<Mo>(rows, part, Decoded{panel}, c.xp + row * c.words + at * rows, c.sums + sums, c.starts + sums, out + 32 * row);
    }
    at += words;
  }
  for (int64_t m = first_row; m < last_row; m++) finish(c, m, block, _mm512_load_ps(out + 32 * m), _mm512_load_ps(out + 32 * m + 16));
}

template <class Mo, int BITS> void run(const Call& c, int64_t first, int64_t last, uint32_t* panel, float* out) {
  const bool offset = c.w->offset_type != kNone;
  for (int64_t b = first; b < last; b++) {
    if (c.wide) wide<Mo, BITS>(c, b, panel, out);
    else if (offset) narrow<Mo, BITS, true>(c, b, b == first);
    else narrow<Mo, BITS, false>(c, b, b == first);
  }
}

}  // namespace
}  // namespace bitline::BITLINE_LEVEL
