// Tasks are claimed by compare-and-swap on one ticket, (generation of the loop, next task). The caller returns once all tasks are
// finished; a thread that comes later finds a ticket of another generation and claims nothing.
#include "thread_pool.h"

#include "clock.h"
#include "isa.h"
#include "pause.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace bitline {

#if defined(__linux__)
namespace {

constexpr int kMaxWorkers = 255;
constexpr int64_t kLingerNs = 2000, kCallerSpinNs = 5000;  // awake without work: on a busy machine that is another's time
constexpr uint32_t kClosed = 0xffffffff;  // a ticket's next task while the loop's fields change

struct Pool {
  alignas(64) uint64_t ticket;     // generation << 32 | next task
  alignas(64) uint32_t published;  // generation, on which workers sleep
  uint32_t sleepers;
  alignas(64) uint32_t finished;   // tasks of this generation, on which the caller sleeps
  uint32_t caller_sleeps;
  alignas(64) Task task;           // of the loop
  void* context;
  uint32_t count;
  int32_t workers;
  alignas(64) uint32_t in_use;
  int started;
};
Pool pool;

void futex_wait(uint32_t* at, uint32_t while_value) {
  const timespec limit{0, 50000000};  // a lost wake-up would cost 50 ms, not a hang
  syscall(SYS_futex, at, FUTEX_WAIT_PRIVATE, while_value, &limit, nullptr, 0);
}
void futex_wake(uint32_t* at, int count) { syscall(SYS_futex, at, FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0); }

// Spins while *at is `value`, for at most `ns`. Returns whether it has changed.
bool spin(const uint32_t* at, uint32_t value, int64_t ns) {
  const int64_t end = now_ns() + ns;
  do {
    for (int i = 0; i < 32; ++i) {
      if (__atomic_load_n(at, __ATOMIC_ACQUIRE) != value) return true;
      pause_cpu();
    }
  } while (now_ns() < end);
  return false;
}

// Tasks of a generation until none is left. worker: -1 for the caller.
void claim_tasks(uint32_t generation, int worker) {
  for (;;) {
    uint64_t ticket = __atomic_load_n(&pool.ticket, __ATOMIC_ACQUIRE);
    const uint32_t next = uint32_t(ticket);
    if (uint32_t(ticket >> 32) != generation || next == kClosed) return;
    const uint32_t count = __atomic_load_n(&pool.count, __ATOMIC_ACQUIRE);
    if (next >= count || worker >= __atomic_load_n(&pool.workers, __ATOMIC_ACQUIRE)) return;
    const Task task = __atomic_load_n(&pool.task, __ATOMIC_ACQUIRE);
    void* context = __atomic_load_n(&pool.context, __ATOMIC_ACQUIRE);
    // The fields were this generation's if the ticket still is.
    if (!__atomic_compare_exchange_n(&pool.ticket, &ticket, ticket + 1, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) continue;
    task(context, next);
    if (__atomic_add_fetch(&pool.finished, 1, __ATOMIC_SEQ_CST) == count && worker >= 0 &&
        __atomic_load_n(&pool.caller_sleeps, __ATOMIC_SEQ_CST))
      futex_wake(&pool.finished, 1);
  }
}

void* worker_main(void* index) {
  const int worker = int(reinterpret_cast<intptr_t>(index));
  mark_parallel_region(true);
  uint32_t seen = 0;
  for (;;) {
    if (!spin(&pool.published, seen, kLingerNs)) {
      __atomic_add_fetch(&pool.sleepers, 1, __ATOMIC_SEQ_CST);
      if (__atomic_load_n(&pool.published, __ATOMIC_SEQ_CST) == seen) futex_wait(&pool.published, seen);
      __atomic_sub_fetch(&pool.sleepers, 1, __ATOMIC_SEQ_CST);
      if (__atomic_load_n(&pool.published, __ATOMIC_ACQUIRE) == seen) continue;
    }
    seen = __atomic_load_n(&pool.published, __ATOMIC_ACQUIRE);
    claim_tasks(seen, worker);
  }
  return nullptr;
}

// A forked child has none of its parent's threads.
void forget_workers() { pool.started = 0, pool.in_use = 0, pool.sleepers = 0; }

int start_workers(int wanted) {
  static bool registered = false;
  if (!registered) pthread_atfork(nullptr, nullptr, forget_workers), registered = true;
  if (wanted > kMaxWorkers) wanted = kMaxWorkers;
  for (; pool.started < wanted; ++pool.started) {
    pthread_t thread;
    if (pthread_create(&thread, nullptr, worker_main, reinterpret_cast<void*>(intptr_t(pool.started))) != 0) break;
    pthread_detach(thread);
  }
  return pool.started < wanted ? pool.started : wanted;
}

void wait_for_tasks(uint32_t count) {
  uint32_t finished = __atomic_load_n(&pool.finished, __ATOMIC_ACQUIRE);
  const int64_t end = now_ns() + kCallerSpinNs;
  while (finished != count && now_ns() < end) {
    pause_cpu();
    finished = __atomic_load_n(&pool.finished, __ATOMIC_ACQUIRE);
  }
  if (finished == count) return;
  __atomic_store_n(&pool.caller_sleeps, 1, __ATOMIC_SEQ_CST);
  while ((finished = __atomic_load_n(&pool.finished, __ATOMIC_SEQ_CST)) != count) futex_wait(&pool.finished, finished);
  __atomic_store_n(&pool.caller_sleeps, 0, __ATOMIC_RELAXED);
}

}  // namespace

bool run_on_pool(int threads, int64_t n, Task task, void* context) {
  uint32_t free = 0;
  if (n >= kClosed || !__atomic_compare_exchange_n(&pool.in_use, &free, 1, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) return false;
  const int workers = start_workers(threads - 1);
  const uint32_t generation = pool.published + 1;
  __atomic_store_n(&pool.ticket, uint64_t(generation) << 32 | kClosed, __ATOMIC_SEQ_CST);
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  __atomic_store_n(&pool.task, task, __ATOMIC_RELAXED);
  __atomic_store_n(&pool.context, context, __ATOMIC_RELAXED);
  __atomic_store_n(&pool.count, uint32_t(n), __ATOMIC_RELAXED);
  __atomic_store_n(&pool.workers, workers, __ATOMIC_RELAXED);
  __atomic_store_n(&pool.finished, 0, __ATOMIC_RELAXED);
  __atomic_store_n(&pool.ticket, uint64_t(generation) << 32, __ATOMIC_SEQ_CST);
  __atomic_store_n(&pool.published, generation, __ATOMIC_SEQ_CST);
  if (__atomic_load_n(&pool.sleepers, __ATOMIC_SEQ_CST) > 0) futex_wake(&pool.published, kMaxWorkers);
  claim_tasks(generation, -1);
  wait_for_tasks(uint32_t(n));
  __atomic_store_n(&pool.in_use, 0, __ATOMIC_RELEASE);
  return true;
}

#else  // no futex

bool run_on_pool(int, int64_t, Task, void*) { return false; }

#endif

}  // namespace bitline

using namespace bitline;

// For tests: `loops` loops of `tasks` tasks on the pool, each of which must run once. Returns the loops in which one did not; -1: no
// pool on this system. Loops while the pool serves another caller do not run.
BITLINE_EXPORT int64_t bitline_pool_loops(int64_t loops, int64_t tasks, int threads) {
  constexpr int64_t kMaxTasks = 4096;
  uint32_t runs[kMaxTasks];
  int64_t wrong = 0;
  bool any = false;
  if (tasks > kMaxTasks) tasks = kMaxTasks;
  for (int64_t loop = 0; loop < loops; ++loop) {
    for (int64_t i = 0; i < tasks; ++i) runs[i] = 0;
    const Task count = [](void* context, int64_t i) { __atomic_add_fetch(static_cast<uint32_t*>(context) + i, 1, __ATOMIC_RELAXED); };
    if (run_on_pool(threads, tasks, count, runs)) any = true;
    else continue;
    bool right = true;
    for (int64_t i = 0; i < tasks; ++i) right &= runs[i] == 1;
    wrong += !right;
  }
  return any ? wrong : -1;
}
