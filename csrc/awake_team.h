// Loops of a call that has many short ones, as a decode step has: the team's threads stay awake between them, so that a loop costs
// two cache misses instead of a fork and a join of all threads.
#pragma once

#include "parallel.h"

namespace bitline {

// To be called by every thread of a team, the one that leads among them with `as_leader`: that thread runs leader(context), the others
// compute tasks of its loops until it returns.
void join_awake_team(bool as_leader, void (*leader)(void*), void* context);

// Prepare a team of `threads`, for join_awake_team. False: there is one already, or it would be too large.
bool open_awake_team(int threads);
void close_awake_team();  // once all threads have left it

// Whether the calling thread leads the team.
bool leads_awake_team();

// task(context, i) for i in [0, n), by the thread that leads and those that have joined. Each has a share of consecutive tasks, the same
// one in every loop of n tasks; one that waits takes over what others have not begun.
void run_on_awake_team(int64_t n, Task task, void* context);

}  // namespace bitline
