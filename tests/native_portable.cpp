// Calls functions of the native core with the same numbers everywhere and prints a hash of each result. test_native_arm.py
// builds it with the core's portable level for this machine and for another, and compares.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <vector>

extern "C" {
int bitline_abi();
int bitline_isa_highest();
int bitline_all_finite(const void*, int64_t, int, uint32_t);
void bitline_transpose_words(const uint32_t*, int64_t, int64_t, int64_t, uint32_t*, int64_t);
void bitline_awq_codes(const uint32_t*, int64_t, int64_t, int64_t, uint32_t*, int64_t);
int bitline_ordered_words(const uint32_t*, int64_t, const int32_t*, int64_t, int, int64_t, uint32_t*, int64_t);
void bitline_unpack(const uint8_t*, int64_t, int64_t, int64_t, int, uint8_t*);
void bitline_pack(const uint8_t*, int64_t, int64_t, int64_t, int, uint8_t*);
int bitline_take(const uint8_t*, int64_t, int64_t, int64_t, int, const int64_t*, int64_t, uint8_t*);
int bitline_transpose(const void*, int64_t, int64_t, int64_t, int, void*);
int bitline_zero_points(const uint32_t*, int64_t, int64_t, int64_t, int, uint32_t, int, int, uint8_t*);
void bitline_prepare(void*, int64_t);
void bitline_step_norm(const uint16_t*, const uint16_t*, uint16_t*, int64_t, int64_t, double);
void bitline_step_gate(const uint16_t*, const uint16_t*, uint16_t*, int64_t);
int bitline_step_rows(const uint16_t*, const uint16_t*, uint16_t*, int64_t, int64_t);
int bitline_step_attention(const uint16_t*, const uint16_t*, const uint16_t*, uint16_t*, uint16_t*, uint16_t*, int64_t, int64_t,
                           int64_t, int64_t, int64_t, double);
}

namespace {

uint32_t state = 1;
uint32_t draw() { return state = state * 1664525u + 1013904223u; }

template <class T>
std::vector<T> random(size_t n) {
  std::vector<T> out(n);
  for (T& x : out) {
    const uint32_t high = draw();  // the high bits of such a generator are the better ones
    x = T(high >> 16 | draw() >> 16 << 16);
  }
  return out;
}

// bfloat16 numbers from 2^-7 to 2 of either sign.
std::vector<uint16_t> moderate(size_t n) {
  auto out = random<uint16_t>(n);
  for (uint16_t& x : out) x = uint16_t((x & 0x87FF) | 0x3C00);
  return out;
}

template <class T>
void say(const char* name, int64_t size, const std::vector<T>& x) {
  uint64_t hash = 1469598103934665603u;
  const uint8_t* bytes = reinterpret_cast<const uint8_t*>(x.data());
  for (size_t i = 0; i < x.size() * sizeof(T); ++i) hash = (hash ^ bytes[i]) * 1099511628211u;
  printf("%s %lld %016llx\n", name, (long long)size, (unsigned long long)hash);
}

}  // namespace

int main() {
  printf("abi %d\n", bitline_abi());
  for (const int64_t n : {1, 7, 16, 33, 150}) {
    const int64_t columns = 8 * ((n + 9) / 8), width = 4, k = 8 * n;
    const auto words = random<uint32_t>(size_t(n * columns));
    std::vector<uint32_t> out(size_t(n * columns));
    bitline_transpose_words(words.data(), columns, n, columns, out.data(), n);
    say("transpose_words", n, out);
    std::vector<uint32_t> rows(size_t(8 * columns * ((n + 7) / 8)));
    bitline_awq_codes(words.data(), columns, n, columns, rows.data(), (n + 7) / 8);
    say("awq_codes", n, rows);
    std::vector<int32_t> perm(static_cast<size_t>(k));
    for (int64_t j = 0; j < k; ++j) perm[size_t(j)] = int32_t(k - 1 - j);
    if (bitline_ordered_words(words.data(), columns, perm.data(), k, int(width), columns, out.data(), n)) return 1;
    say("ordered_words", n, out);
    std::vector<uint8_t> zeros(size_t(n * columns));
    if (bitline_zero_points(words.data(), columns, n, columns, 4, 0x11111111u, 0, 1, zeros.data())) return 1;
    say("zero_points", n, zeros);
    if (bitline_transpose(words.data(), columns, n, columns, 4, out.data())) return 1;
    say("transpose", n, out);
    for (int bits = 1; bits < 8; ++bits) {
      const int64_t row = (n * bits + 7) / 8;
      const auto stream = random<uint8_t>(size_t(3 * row));
      std::vector<uint8_t> codes(size_t(3 * n)), packed(size_t(3 * row));
      bitline_unpack(stream.data(), row, 3, n, bits, codes.data());
      say("unpack", bits, codes);
      bitline_pack(codes.data(), n, 3, n, bits, packed.data());
      say("pack", bits, packed);
      const std::vector<int64_t> index = {n - 1, 0, n / 2, 0, n - 1};
      std::vector<uint8_t> taken(size_t(3 * ((5 * bits + 7) / 8)));
      if (bitline_take(stream.data(), row, 3, n, bits, index.data(), 5, taken.data())) return 1;
      say("take", bits, taken);
    }
    auto numbers = random<uint16_t>(size_t(n * columns));
    for (uint16_t& x : numbers) x &= 0xBFFF;
    printf("finite %d", bitline_all_finite(numbers.data(), n * columns, 2, 0x7F80));
    numbers.back() = 0x7F80;
    printf(" %d\n", bitline_all_finite(numbers.data(), n * columns, 2, 0x7F80));
  }
  for (const int64_t n : {1, 15, 64, 130}) {
    const auto x = moderate(size_t(n)), w = moderate(size_t(3 * n));
    std::vector<uint16_t> y(static_cast<size_t>(n)), z(3);
    bitline_step_norm(x.data(), w.data(), y.data(), 1, n, 1e-6);
    say("step_norm", n, y);
    bitline_step_gate(x.data(), w.data(), y.data(), n);
    say("step_gate", n, y);
    if (bitline_step_rows(x.data(), w.data(), z.data(), 3, n)) return 1;
    say("step_rows", n, z);
    const int64_t dim = 48, heads = 2, repeat = 3;
    const auto qkv = moderate(size_t(heads * (repeat + 2) * dim)), turn = moderate(size_t(2 * dim));
    auto keys = moderate(size_t(heads * n * dim)), values = moderate(keys.size());
    std::vector<uint16_t> out(size_t(heads * repeat * dim));
    if (bitline_step_attention(qkv.data(), turn.data(), turn.data() + dim, keys.data(), values.data(), out.data(), heads, repeat, dim, n,
                               n - 1, 0.01)) return 1;
    say("step_attention", n, out);
    say("keys", n, keys);
  }
  std::vector<uint8_t> large(5 << 20);
  bitline_prepare(large.data(), int64_t(large.size()));
  say("prepare", 0, large);
}
