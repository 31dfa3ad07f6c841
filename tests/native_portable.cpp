// Calls functions of the native core with the same inputs on every machine and prints a hash of each result. test_native_arm.py
// builds it with the core's portable level for this machine and for ARM, and compares.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <vector>

extern "C" {
int bitline_abi();
int bitline_isa_supported();
int bitline_all_finite(const void*, int64_t, int, uint32_t);
void bitline_repack_gptq(const uint32_t*, int64_t, int64_t, int64_t, uint32_t*, int64_t);
void bitline_repack_awq(const uint32_t*, int64_t, int64_t, int64_t, uint32_t*, int64_t);
int bitline_repack_gptq_permuted(const uint32_t*, int64_t, const int32_t*, int64_t, int, int64_t, uint32_t*, int64_t);
void bitline_unpack_codes(const uint8_t*, int64_t, int64_t, int64_t, int, uint8_t*);
void bitline_pack_codes(const uint8_t*, int64_t, int64_t, int64_t, int, uint8_t*);
int bitline_take_columns(const uint8_t*, int64_t, int64_t, int64_t, int, const int64_t*, int64_t, uint8_t*);
int bitline_transpose(const void*, int64_t, int64_t, int64_t, int, void*);
int bitline_unpack_zero_points(const uint32_t*, int64_t, int64_t, int64_t, int, uint32_t, int, int, uint8_t*);
void bitline_prefault_pages(void*, int64_t);
void bitline_rms_norm(const uint16_t*, const uint16_t*, uint16_t*, int64_t, int64_t, double);
void bitline_silu_and_mul(const uint16_t*, const uint16_t*, uint16_t*, int64_t);
int bitline_gemv_bf16(const uint16_t*, const uint16_t*, uint16_t*, int64_t, int64_t);
int bitline_decode_attention(const uint16_t*, const uint16_t*, const uint16_t*, uint16_t*, uint16_t*, uint16_t*, int64_t, int64_t,
                           int64_t, int64_t, int64_t, double);
}

namespace {

uint32_t state = 1;
uint32_t next_random() { return state = state * 1664525u + 1013904223u; }

template <class T>
std::vector<T> random_values(size_t n) {
  std::vector<T> out(n);
  for (T& x : out) {
    const uint32_t high = next_random();  // the high bits of a linear congruential generator are the random ones
    x = T(high >> 16 | next_random() >> 16 << 16);
  }
  return out;
}

// bfloat16 numbers from 2^-7 to 2 of either sign.
std::vector<uint16_t> random_bf16(size_t n) {
  auto out = random_values<uint16_t>(n);
  for (uint16_t& x : out) x = uint16_t((x & 0x87FF) | 0x3C00);
  return out;
}

template <class T>
void print_hash(const char* name, int64_t size, const std::vector<T>& x) {
  uint64_t hash = 1469598103934665603u;
  const uint8_t* bytes = reinterpret_cast<const uint8_t*>(x.data());
  for (size_t i = 0; i < x.size() * sizeof(T); ++i) hash = (hash ^ bytes[i]) * 1099511628211u;
  printf("%s %lld %016llx\n", name, (long long)size, (unsigned long long)hash);
}

}  // namespace

int main() {
  printf("abi %d\n", bitline_abi());
  for (const int64_t n : {1, 7, 16, 33, 150}) {
    const int64_t columns = 8 * ((n + 9) / 8), k = 8 * n;
    const auto packed = random_values<uint32_t>(size_t(n * columns));
    std::vector<uint32_t> out(size_t(n * columns));
    bitline_repack_gptq(packed.data(), columns, n, columns, out.data(), n);
    print_hash("repack_gptq", n, out);
    std::vector<uint32_t> rows(size_t(8 * columns * ((n + 7) / 8)));
    bitline_repack_awq(packed.data(), columns, n, columns, rows.data(), (n + 7) / 8);
    print_hash("repack_awq", n, rows);
    std::vector<int32_t> perm(static_cast<size_t>(k));
    for (int64_t j = 0; j < k; ++j) perm[size_t(j)] = int32_t(k - 1 - j);
    if (bitline_repack_gptq_permuted(packed.data(), columns, perm.data(), k, 4, columns, out.data(), n)) return 1;
    print_hash("repack_gptq_permuted", n, out);
    std::vector<uint8_t> zeros(size_t(n * columns));
    if (bitline_unpack_zero_points(packed.data(), columns, n, columns, 4, 0x11111111u, 0, 1, zeros.data())) return 1;
    print_hash("unpack_zero_points", n, zeros);
    if (bitline_transpose(packed.data(), columns, n, columns, 4, out.data())) return 1;
    print_hash("transpose", n, out);
    for (int bits = 1; bits < 8; ++bits) {
      const int64_t row = (n * bits + 7) / 8;
      const auto stream = random_values<uint8_t>(size_t(3 * row));
      std::vector<uint8_t> codes(size_t(3 * n)), repacked(size_t(3 * row));
      bitline_unpack_codes(stream.data(), row, 3, n, bits, codes.data());
      print_hash("unpack_codes", bits, codes);
      bitline_pack_codes(codes.data(), n, 3, n, bits, repacked.data());
      print_hash("pack_codes", bits, repacked);
      const std::vector<int64_t> index = {n - 1, 0, n / 2, 0, n - 1};
      std::vector<uint8_t> taken(size_t(3 * ((5 * bits + 7) / 8)));
      if (bitline_take_columns(stream.data(), row, 3, n, bits, index.data(), 5, taken.data())) return 1;
      print_hash("take_columns", bits, taken);
    }
    auto numbers = random_values<uint16_t>(size_t(n * columns));
    for (uint16_t& x : numbers) x &= 0xBFFF;
    printf("finite %d", bitline_all_finite(numbers.data(), n * columns, 2, 0x7F80));
    numbers.back() = 0x7F80;
    printf(" %d\n", bitline_all_finite(numbers.data(), n * columns, 2, 0x7F80));
  }
  for (const int64_t n : {1, 15, 64, 130}) {
    const auto x = random_bf16(size_t(n)), w = random_bf16(size_t(3 * n));
    std::vector<uint16_t> y(static_cast<size_t>(n)), z(3);
    bitline_rms_norm(x.data(), w.data(), y.data(), 1, n, 1e-6);
    print_hash("rms_norm", n, y);
    bitline_silu_and_mul(x.data(), w.data(), y.data(), n);
    print_hash("silu_and_mul", n, y);
    if (bitline_gemv_bf16(x.data(), w.data(), z.data(), 3, n)) return 1;
    print_hash("gemv_bf16", n, z);
    const int64_t dim = 48, kv_heads = 2, q_per_kv = 3;
    const auto qkv = random_bf16(size_t(kv_heads * (q_per_kv + 2) * dim)), cos_sin = random_bf16(size_t(2 * dim));
    auto keys = random_bf16(size_t(kv_heads * n * dim)), values = random_bf16(keys.size());
    std::vector<uint16_t> out(size_t(kv_heads * q_per_kv * dim));
    if (bitline_decode_attention(qkv.data(), cos_sin.data(), cos_sin.data() + dim, keys.data(), values.data(), out.data(), kv_heads,
                                 q_per_kv, dim, n, n - 1, 0.01))
      return 1;
    print_hash("decode_attention", n, out);
    print_hash("keys", n, keys);
  }
  std::vector<uint8_t> large(5 << 20);
  bitline_prefault_pages(large.data(), int64_t(large.size()));
  print_hash("prefault_pages", 0, large);
}
