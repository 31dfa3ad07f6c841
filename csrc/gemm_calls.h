// Calls of the linear kernels that run together: one, or those of several weights in the same parallel loops, as the experts of a
// layer. Defined in gemm.cpp.
#pragma once

#include "gemm.h"
#include "parallel.h"

namespace bitline {

constexpr int64_t kMaxPassM = 1024;  // rows of calls that run together

// Those of the ISA level in use; null below AVX2.
const GemmKernels* gemm_kernels();

// What does not depend on x. Returns 0, or bitline_gemm's error.
int init_call(GemmCall& c, const GemmKernels* kernels, const void* packed, const void* bias, int dtype);

// Sets the one scale of all c.m rows of c.x, where the scheme has one.
void set_act_tensor_scale(const GemmKernels& kernels, GemmCall& c);

// Initialized calls, whose x [m, k], m, y and act_tensor_scale are set; m is 1 to kMaxPassM. Each result has bitline_gemm's bits.
// Returns 0; -2: no memory.
int run_calls(GemmCall* calls, int64_t count, const GemmKernels& kernels);

namespace {  // internal linkage: see parallel.h

inline size_t round_up(size_t bytes) { return (bytes + 63) / 64 * 64; }

constexpr int64_t kSharingCalls = 64;  // calls before a call that are asked whether it can read what they prepare of x

// The last call before calls[i] for which fits(call); null where there is none.
template <class F> const GemmCall* earlier_call(const GemmCall* calls, int64_t i, const F& fits) {
  for (int64_t j = i - 1; j >= 0 && j >= i - kSharingCalls; --j)
    if (fits(calls[j])) return calls + j;
  return nullptr;
}

// fn(call, task) for each of the tasks(call) tasks of all calls, on all threads.
template <class Tasks, class F>
void for_each_task(GemmCall* calls, int64_t count, const Tasks& tasks, const F& fn, bool brief) {
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) calls[i].first_task = total, total += tasks(calls[i]);
  parallel_for(total, [&](int64_t task) {
    int64_t low = 0, high = count;  // the last call whose first task is not behind this one
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (calls[middle].first_task <= task ? low : high) = middle;
    }
    fn(calls[low], task - calls[low].first_task);
  }, brief);
}

}  // namespace

}  // namespace bitline
