// Runs the linear kernels on cases from a file, at every ISA level that this CPU and build have one for. test_native_arm.py links
// it with the core for ARM, writes the cases, and compares the results.
//
//     native_arm_gemm CASES RESULTS
//
// CASES: cases until the end of the file. A case is five int64, M, N, bytes of x, of the packed weight and of the bias (0: none),
// one int64 for the dtype (enum Dtype), then x, packed weight and bias. RESULTS: for each level an int64, its number, then for each
// case an int64, bitline_gemm's result, and y [M, N], which was all ones before, followed by as many ones as a row of y; and the same
// of bitline_gemm_unpack and its W [N, K].
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <vector>

extern "C" {
int bitline_isa_supported();
int bitline_set_isa(int);
int bitline_gemm(const void*, int64_t, const void*, const void*, void*, int);
int bitline_gemm_unpack(const void*, void*, int);
}

namespace {

struct Case {
  int64_t m, n, dtype;
  std::vector<uint8_t> x, bias;
  std::vector<uint64_t> packed_bytes;
  uint64_t* packed;  // 64-byte aligned in packed_bytes
};

bool read_case(FILE* file, Case& c) {
  int64_t head[6];
  if (fread(head, 8, 6, file) != 6) return false;
  c.m = head[0], c.n = head[1], c.dtype = head[5];
  c.x.resize(size_t(head[2])), c.bias.resize(size_t(head[4])), c.packed_bytes.resize(size_t(head[3]) / 8 + 8);
  c.packed = reinterpret_cast<uint64_t*>((reinterpret_cast<uintptr_t>(c.packed_bytes.data()) + 63) / 64 * 64);
  return fread(c.x.data(), 1, c.x.size(), file) == c.x.size() && fread(c.packed, 1, size_t(head[3]), file) == size_t(head[3]) &&
         fread(c.bias.data(), 1, c.bias.size(), file) == c.bias.size();
}

void write_result(int64_t failed, const std::vector<uint8_t>& data, FILE* results) {
  fwrite(&failed, 8, 1, results);
  fwrite(data.data(), 1, data.size(), results);
}

void run_case(const Case& c, FILE* results) {
  const int64_t itemsize = c.dtype == 0 ? 4 : 2, k = int64_t(c.packed[3]);  // PackedHeader::k
  std::vector<uint8_t> y(size_t((c.m + 1) * c.n * itemsize), 0xFF), w(size_t((c.n + 1) * k * itemsize), 0xFF);
  const void* bias = c.bias.empty() ? nullptr : c.bias.data();
  write_result(bitline_gemm(c.x.data(), c.m, c.packed, bias, y.data(), int(c.dtype)), y, results);
  write_result(bitline_gemm_unpack(c.packed, w.data(), int(c.dtype)), w, results);
}

}  // namespace

int main(int count, char** arguments) {
  FILE* cases = count == 3 ? fopen(arguments[1], "rb") : nullptr;
  FILE* results = count == 3 ? fopen(arguments[2], "wb") : nullptr;
  if (cases == nullptr || results == nullptr) return 2;
  for (int64_t level = 1; level < 32; ++level) {
    if (!(bitline_isa_supported() >> level & 1)) continue;
    if (bitline_set_isa(int(level)) != 0) return 3;
    fwrite(&level, 8, 1, results);
    rewind(cases);
    for (Case c; read_case(cases, c);) run_case(c, results);
  }
  return fclose(results) == 0 ? 0 : 4;
}
