// Threads of the native core's own, for loops whose caller must not wait for a thread that has claimed no task: on a machine where
// other processes compute too, OpenMP's barrier waits for every thread of the team to be scheduled.
#pragma once

#include "parallel.h"

namespace bitline {

// task(context, i) for i in [0, n) on up to `threads` threads, the caller's among them. False, and nothing is done: the pool serves
// another caller, or this system has no futex.
bool run_on_pool(int threads, int64_t n, Task task, void* context);

}  // namespace bitline
