// Parallel loops on torch's own OpenMP threads, since a second thread pool in the process competes with them for the cores; on
// threads of the native core's own (thread_pool.h) while other processes hold those up.
#pragma once

#include <stdint.h>

namespace bitline {

using Task = void (*)(void* context, int64_t task);

// Threads that a parallel_for of the calling thread uses: torch.get_num_threads(), but no more than the cgroup's CPU quota unless
// the caller has set torch's number.
int num_threads();

// Marks the calling thread as one whose loops run serially, or no longer.
void mark_parallel_region(bool inside);

// task(context, i) for each i in [0, n), on all threads; returns when all are done. Tasks are handed out one at a time from a
// shared counter (dynamic scheduling), so they should take 20 us and more, and be a few for each thread. Nested calls run
// serially. brief: the loop takes less than a thread's time slice, as a GEMV does, so that none is waited for on a busy machine.
void run_tasks(int64_t n, Task task, void* context, bool brief);

// leader(context) on the calling thread, whose team is awake meanwhile (awake_team.h): for a call that runs many loops of a few
// microseconds. Nothing else may wait in it for long, since the other threads spin.
void run_with_awake_team(void (*leader)(void*), void* context);

namespace {  // internal linkage: the linker must not merge copies that were compiled for different ISA levels

template <class F>
void parallel_for(int64_t n, const F& fn, bool brief = false) {
  run_tasks(n, [](void* context, int64_t task) { (*static_cast<const F*>(context))(task); }, const_cast<F*>(&fn), brief);
}

template <class F>
void with_awake_team(const F& fn) {
  run_with_awake_team([](void* context) { (*static_cast<const F*>(context))(); }, const_cast<F*>(&fn));
}

// fn(begin, end) for chunks of [0, n) of `grain` elements.
template <class F>
void parallel_for_chunks(int64_t n, int64_t grain, const F& fn, bool brief = false) {
  auto chunk = [&](int64_t i) { fn(i * grain, n < (i + 1) * grain ? n : (i + 1) * grain); };
  parallel_for((n + grain - 1) / grain, chunk, brief);
}

}  // namespace
}  // namespace bitline
