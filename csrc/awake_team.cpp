// A loop is published by its generation. Every thread has a slot with a ticket, (generation, next task of its share), from which tasks
// are claimed by compare-and-swap, and with the number of tasks that it has finished, for which the leader waits. A ticket of an older
// generation is one of which nothing is claimed yet. A thread that read the fields of one generation claims nothing of a later one:
// while a share has tasks that nobody has claimed its loop is not over, and afterwards its ticket is of that generation or a later one.
#include "awake_team.h"

#include "isa.h"
#include "pause.h"

namespace bitline {
namespace {

constexpr int kMaxThreads = 256;
constexpr int kGraceSpins = 50;  // looks at the team before a waiting thread takes over tasks of others: about 2 us

struct alignas(64) Slot {
  uint64_t ticket;    // generation << 32 | next task
  uint64_t finished;  // tasks that this thread has computed, of all generations
};

struct Team {
  alignas(64) uint32_t published;  // generation; threads wait for another one
  uint32_t opening;                // generation whose fields are being written, before it is published
  uint32_t count;                  // tasks of the loop; all fields are of `published`
  uint32_t ends;                   // 1: it is no loop, but where threads leave the team
  Task task;
  void* context;
  alignas(64) uint32_t in_use;
  int threads;      // shares of a loop
  int joined;       // threads without the leader
  uint64_t target;  // tasks of all loops so far
  Slot slots[kMaxThreads];
};
Team team;
__thread bool leads = false;

// A loop as one thread has read it, or the end of all.
struct Loop {
  uint32_t generation, count, ends;
  Task task;
  void* context;
};

template <class T> T load(const T* at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
template <class T> void store(T* at, T value) { __atomic_store_n(at, value, __ATOMIC_RELEASE); }

void publish(uint32_t count, Task task, void* context, bool ends) {
  const uint32_t generation = team.published + 1;
  __atomic_store_n(&team.opening, generation, __ATOMIC_SEQ_CST);
  store(&team.count, count), store(&team.task, task), store(&team.context, context), store(&team.ends, uint32_t(ends));
  store(&team.published, generation);
}

// The loop in progress, once it is not `seen`.
Loop next_loop(uint32_t seen) {
  for (;;) {
    Loop loop;
    loop.generation = load(&team.published);
    if (loop.generation != seen) {
      loop.count = load(&team.count), loop.task = load(&team.task), loop.context = load(&team.context), loop.ends = load(&team.ends);
      if (load(&team.opening) == loop.generation) return loop;
    }
    pause_cpu();
  }
}

uint32_t share_begin(const Loop& loop, int slot) { return uint32_t(int64_t(loop.count) * slot / team.threads); }

// Claim the next task of a slot's share. Returns it; -1: there is none left.
int64_t claim(const Loop& loop, int slot) {
  const uint32_t begin = share_begin(loop, slot), end = share_begin(loop, slot + 1);
  uint64_t ticket = load(&team.slots[slot].ticket);
  for (;;) {
    const int32_t newer = int32_t(uint32_t(ticket >> 32) - loop.generation);
    const uint32_t next = newer == 0 ? uint32_t(ticket) : begin;
    if (newer > 0 || next >= end) return -1;
    const uint64_t claimed = uint64_t(loop.generation) << 32 | (next + 1);
    if (__atomic_compare_exchange_n(&team.slots[slot].ticket, &ticket, claimed, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) return next;
  }
}

// Compute what is left of a slot's share. own: the calling thread's slot.
void run_share(const Loop& loop, int slot, int own) {
  uint64_t done = 0;
  for (int64_t task; (task = claim(loop, slot)) >= 0; ++done) loop.task(loop.context, task);
  if (done > 0) store(&team.slots[own].finished, team.slots[own].finished + done);
}

void take_over(const Loop& loop, int own) {
  for (int i = 1; i < team.threads; ++i) run_share(loop, (own + i) % team.threads, own);
}

bool is_finished() {
  uint64_t finished = 0;
  for (int i = 0; i < team.threads; ++i) finished += load(&team.slots[i].finished);
  return finished == team.target;
}

// A thread's part of a loop: its own share, and once it has waited for a while what others have left. Returns when `is_over()`.
template <class F> void work_until(const F& is_over, const Loop& loop, int own) {
  run_share(loop, own, own);
  for (int i = 0; !is_over(); ++i) {
    if (i == kGraceSpins) take_over(loop, own);
    pause_cpu();
  }
}

void follow(int own) {
  mark_parallel_region(true);
  uint32_t seen = load(&team.published) - 1;  // the loop in progress, if any, has tasks to take over
  for (;;) {
    const Loop loop = next_loop(seen);
    if (loop.ends) break;
    seen = loop.generation;
    work_until([&] { return load(&team.published) != seen; }, loop, own);
  }
  mark_parallel_region(false);
}

}  // namespace

bool open_awake_team(int threads) {
  uint32_t free = 0;
  if (threads > kMaxThreads) return false;
  if (!__atomic_compare_exchange_n(&team.in_use, &free, 1, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) return false;
  team.threads = threads, team.joined = 0, team.target = 0;
  publish(0, nullptr, nullptr, false);
  for (int i = 0; i < threads; ++i) team.slots[i] = {uint64_t(team.published) << 32, 0};
  return true;
}

void close_awake_team() { __atomic_store_n(&team.in_use, 0, __ATOMIC_RELEASE); }

bool leads_awake_team() { return leads; }

void join_awake_team(bool as_leader, void (*leader)(void*), void* context) {
  if (!as_leader) {
    const int own = __atomic_add_fetch(&team.joined, 1, __ATOMIC_RELAXED);
    if (own < team.threads) follow(own);  // more threads have no share
    return;
  }
  leads = true;
  leader(context);
  leads = false;
  publish(0, nullptr, nullptr, true);
}

void run_on_awake_team(int64_t n, Task task, void* context) {
  team.target += uint64_t(n);
  publish(uint32_t(n), task, context, false);
  work_until([] { return is_finished(); }, {team.published, uint32_t(n), 0, task, context}, 0);
}

}  // namespace bitline

using namespace bitline;

// For tests and benchmarks: `loops` loops of `tasks` tasks, each of which must run once, in one scope of with_awake_team. Returns the
// loops in which one did not.
BITLINE_EXPORT int64_t bitline_awake_team_loops(int64_t loops, int64_t tasks) {
  constexpr int64_t kMaxTasks = 4096;
  uint32_t runs[kMaxTasks] = {};
  int64_t wrong = 0;
  if (tasks > kMaxTasks) tasks = kMaxTasks;
  with_awake_team([&] {
    for (int64_t loop = 1; loop <= loops; ++loop) {
      parallel_for(tasks, [&](int64_t i) { __atomic_add_fetch(runs + i, 1, __ATOMIC_RELAXED); }, true);
      bool right = true;
      for (int64_t i = 0; i < tasks; ++i) right &= runs[i] == uint32_t(loop);
      wrong += !right;
    }
  });
  return wrong;
}
