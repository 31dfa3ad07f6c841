// Parallel loops on torch's own OpenMP threads: a second thread pool in the process would compete with them for the cores.
#pragma once

#include <stdint.h>

namespace bitline {

using Task = void (*)(void* context, int64_t task);

// Threads that a parallel_for of the calling thread uses: torch.get_num_threads().
int num_threads();

// task(context, i) for each i in [0, n), on all threads; returns when all are done. Tasks are handed out one at a time from a
// shared counter (dynamic scheduling), so they should take 20 us and more, and be a few for each thread. Nested calls run
// serially.
void run_tasks(int64_t n, Task task, void* context);

namespace {  // internal linkage: the linker must not merge copies that were compiled for different ISA levels

template <class F>
void parallel_for(int64_t n, const F& fn) {
  run_tasks(n, [](void* context, int64_t task) { (*static_cast<const F*>(context))(task); }, const_cast<F*>(&fn));
}

// fn(begin, end) for chunks of [0, n) of `grain` elements.
template <class F>
void parallel_for_chunks(int64_t n, int64_t grain, const F& fn) {
  auto chunk = [&](int64_t i) { fn(i * grain, n < (i + 1) * grain ? n : (i + 1) * grain); };
  parallel_for((n + grain - 1) / grain, chunk);
}

}  // namespace
}  // namespace bitline
