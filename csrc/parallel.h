// Work on torch's own threads: a second OpenMP runtime in the process would fight with it for the cores.
#pragma once

#include <stdint.h>

namespace bitline {

using Task = void (*)(void* context, int64_t task);

// How many threads a parallel_for of the calling thread uses: torch.get_num_threads().
int threads();

// Call task(context, i) for each i in [0, n), each once, on all threads; returns when all are done. Tasks are dealt out one
// at a time, so make them large enough (20 us and more) and a few for each thread. Within a task it runs serially.
void run_tasks(int64_t n, Task task, void* context);

namespace {  // internal linkage: no two variants may share one copy of this code

template <class F>
void parallel_for(int64_t n, const F& fn) {
  run_tasks(n, [](void* context, int64_t task) { (*static_cast<const F*>(context))(task); }, const_cast<F*>(&fn));
}

// fn(begin, end) for parts of [0, n) that are multiples of `grain` long.
template <class F>
void parallel_ranges(int64_t n, int64_t grain, const F& fn) {
  auto part = [&](int64_t i) { fn(i * grain, n < (i + 1) * grain ? n : (i + 1) * grain); };
  parallel_for((n + grain - 1) / grain, part);
}

}  // namespace
}  // namespace bitline
