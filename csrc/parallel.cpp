// Enters the OpenMP runtime that torch has loaded through the ABI of GCC's `#pragma omp parallel` (GOMP_parallel, which LLVM's
// and Intel's runtimes export too). Where there is none, loops run on the pool, or spawn threads while that is taken.
#include "parallel.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "awake_team.h"
#include "clock.h"
#include "isa.h"
#include "thread_pool.h"

namespace bitline {
namespace {

using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
using GetNumThreads = int (*)();
using SetNumThreads = void (*)(int);

GompParallel gomp_parallel = nullptr;
GetNumThreads torch_num_threads = nullptr;
SetNumThreads set_openmp_team = nullptr;  // omp_set_num_threads: of the calling thread
int default_threads = 0;   // torch's number when it was found
int quota_threads = 1024;  // that the cgroup's CPU quota allows
__thread bool in_parallel_region = false;

// Until then loops run on the pool: other processes were seen to hold up OpenMP's threads. Of all threads of the process.
int64_t contended_until_ns = 0;
int64_t last_wait_ns = 0;
int consecutive_waits = 0;
constexpr int64_t kBarrierWaitNs = 300000, kWaitIntervalNs = 50000000, kContendedNs = 2000000000;
constexpr int kWaits = 4;

__thread int adapting_scopes = 0;  // of bitline_adapt_threads that the calling thread is in
__thread int team_before = 0;      // torch's number of threads before it was lowered to one; 0: it was not

struct Job {
  Task task;
  void* context;
  int64_t n;
  int64_t next;
  int64_t last_task_ns;  // when a thread last found no task left
};

// Runs on every thread of the team.
void run_worker(void* data) {
  Job& job = *static_cast<Job*>(data);
  const bool nested = in_parallel_region;
  in_parallel_region = true;
  bool claimed = false;
  for (;;) {
    const int64_t i = __atomic_fetch_add(&job.next, 1, __ATOMIC_RELAXED);
    if (i >= job.n) break;
    job.task(job.context, i);
    claimed = true;
  }
  if (claimed) __atomic_store_n(&job.last_task_ns, now_ns(), __ATOMIC_RELAXED);
  in_parallel_region = nested;
}

struct AwakeScope {
  void (*leader)(void*);
  void* context;
  const bool* leading_thread;  // its in_parallel_region
  int64_t last_task_ns;
};

// Runs on every thread of the team.
void join_scope(void* data) {
  AwakeScope& scope = *static_cast<AwakeScope*>(data);
  const bool leads = scope.leading_thread == &in_parallel_region;
  join_awake_team(leads, scope.leader, scope.context);
  if (leads) scope.last_task_ns = now_ns();
}

// worker(&job) on each of torch's OpenMP threads. If its barrier waits long after the last task, several times in a row, other
// processes preempt the threads, and brief loops of the next seconds run on the pool.
template <class J> void run_on_openmp(void (*worker)(void*), J& job) {
  gomp_parallel(worker, &job, 0, 0);  // 0: the whole team; libgomp destroys the threads that a smaller team leaves over
  const int64_t now = now_ns();
  if (now - job.last_task_ns < kBarrierWaitNs) return;
  const bool again = now - __atomic_exchange_n(&last_wait_ns, now, __ATOMIC_RELAXED) < kWaitIntervalNs;
  const int waits = again ? __atomic_add_fetch(&consecutive_waits, 1, __ATOMIC_RELAXED) : 1;
  if (!again) __atomic_store_n(&consecutive_waits, 1, __ATOMIC_RELAXED);
  if (waits >= kWaits) __atomic_store_n(&contended_until_ns, now + kContendedNs, __ATOMIC_RELAXED);
}

bool is_contended() { return now_ns() < __atomic_load_n(&contended_until_ns, __ATOMIC_RELAXED); }

void restore_team() {
  if (team_before != 0 && torch_num_threads() == 1) set_openmp_team(team_before);  // else the caller has set it since
  team_before = 0;
}

// In a scope of bitline_adapt_threads: torch's operations between the loops run on the calling thread alone while other processes
// hold up OpenMP's threads, since each of their barriers waits for a time slice of those. All loops then run on the pool.
void adapt_team() {
  const bool lower = adapting_scopes > 0 && is_contended();
  if (lower == (team_before != 0)) return;
  if (!lower) return restore_team();
  team_before = torch_num_threads();
  set_openmp_team(1);
}

bool prefers_pool(int count, bool brief) {
  if (gomp_parallel == nullptr || count != torch_num_threads()) return true;
  return brief && is_contended();
}

// CPUs that a cgroup's quota is worth, rounded up; 0: no limit or no such file. v2: "quota period" or "max period".
int quota_of(const char* quota_file, const char* period_file) {
  char text[2][64] = {};
  const char* files[2] = {quota_file, period_file};
  for (int i = 0; i < 2 && files[i] != nullptr; ++i) {
    const int file = open(files[i], O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    const ssize_t size = read(file, text[i], sizeof text[i] - 1);
    close(file);
    if (size <= 0) return 0;
  }
  char* end = text[0];
  const int64_t quota = strtoll(text[0], &end, 10);
  const int64_t period = strtoll(period_file == nullptr ? end : text[1], nullptr, 10);
  return quota <= 0 || period <= 0 ? 0 : int((quota + period - 1) / period);
}

int cgroup_quota() {
  const int v2 = quota_of("/sys/fs/cgroup/cpu.max", nullptr);
  if (v2 > 0) return v2;
  const int v1 = quota_of("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us");
  return v1 > 0 ? v1 : 1024;
}

void* thread_main(void* data) {
  run_worker(data);
  return nullptr;
}

constexpr int kMaxSpawnedThreads = 64;

void run_on_spawned_threads(Job& job, int count) {
  pthread_t spawned[kMaxSpawnedThreads];
  int n = 0;
  while (n < count - 1 && n < kMaxSpawnedThreads && pthread_create(&spawned[n], nullptr, thread_main, &job) == 0) ++n;
  run_worker(&job);
  while (n > 0) pthread_join(spawned[--n], nullptr);
}

}  // namespace

int num_threads() {
  int count = torch_num_threads == nullptr ? 1 : torch_num_threads();
  if (count == 1 && team_before != 0) count = team_before;
  if (count == default_threads && count > quota_threads) return quota_threads;
  return count < 1 ? 1 : count;
}

void mark_parallel_region(bool inside) { in_parallel_region = inside; }

void run_tasks(int64_t n, Task task, void* context, bool brief) {
  // at::get_num_threads, behind num_threads, also sets the OpenMP team size of this thread.
  const int count = n < 2 || in_parallel_region ? 1 : num_threads();
  if (count == 1) {
    for (int64_t i = 0; i < n; ++i) task(context, i);
    return;
  }
  if (leads_awake_team()) {
    in_parallel_region = true;
    run_on_awake_team(n, task, context);
    in_parallel_region = false;
    return;
  }
  if (set_openmp_team != nullptr) adapt_team();
  if (prefers_pool(count, brief)) {
    in_parallel_region = true;
    const bool done = run_on_pool(count, n, task, context);
    in_parallel_region = false;
    if (done) return;
  }
  Job job{task, context, n, 0, 0};
  if (gomp_parallel != nullptr) run_on_openmp(run_worker, job);
  else run_on_spawned_threads(job, count);
}

void run_with_awake_team(void (*leader)(void*), void* context) {
  const int count = in_parallel_region || leads_awake_team() ? 1 : num_threads();
  if (count > 1 && set_openmp_team != nullptr) adapt_team();
  if (count == 1 || prefers_pool(count, true) || !open_awake_team(count)) return leader(context);
  AwakeScope scope{leader, context, &in_parallel_region, 0};
  run_on_openmp(join_scope, scope);
  close_awake_team();
}

}  // namespace bitline

using namespace bitline;

// Look up torch's OpenMP runtime. torch_library: path of libtorch_cpu, already loaded. Returns 2: parallel loops run on torch's
// threads; 1: on threads spawned for each loop; 0: torch was not found, and loops run on the calling thread.
BITLINE_EXPORT int bitline_bind_torch_threads(const char* torch_library) {
  void* torch = dlopen(torch_library, RTLD_NOW | RTLD_NOLOAD);
  if (torch == nullptr) return 0;
  torch_num_threads = reinterpret_cast<GetNumThreads>(dlsym(torch, "_ZN2at15get_num_threadsEv"));  // int at::get_num_threads()
  const auto find = [&](const char* name) {
    void* symbol = dlsym(RTLD_DEFAULT, name);  // the order in which torch's own calls were bound
    return symbol == nullptr ? dlsym(torch, name) : symbol;
  };
  gomp_parallel = reinterpret_cast<GompParallel>(find("GOMP_parallel"));
  if (gomp_parallel != nullptr) set_openmp_team = reinterpret_cast<SetNumThreads>(find("omp_set_num_threads"));
  default_threads = torch_num_threads == nullptr ? 0 : torch_num_threads();
  quota_threads = cgroup_quota();
  return torch_num_threads == nullptr ? 0 : gomp_parallel == nullptr ? 1 : 2;
}

BITLINE_EXPORT int bitline_num_threads() { return num_threads(); }

// begin: 1 at the start of a scope, 0 at its end, on the same thread. In a scope torch's number of threads is one while other processes
// hold up its threads (adapt_team), and what it was before again behind it.
BITLINE_EXPORT void bitline_adapt_threads(int begin) {
  adapting_scopes += begin ? 1 : -1;
  if (adapting_scopes == 0) restore_team();
}

// For tests: loops of the next `ns` nanoseconds take it that other processes hold up OpenMP's threads; 0: that none do.
BITLINE_EXPORT void bitline_pretend_contended(int64_t ns) {
  __atomic_store_n(&contended_until_ns, now_ns() + ns, __ATOMIC_RELAXED);
}

// For benchmarks of fork/join overhead: `regions` parallel loops of `tasks` empty tasks.
BITLINE_EXPORT void bitline_empty_parallel_regions(int64_t regions, int64_t tasks) {
  for (int64_t i = 0; i < regions; ++i) parallel_for(tasks, [](int64_t) {});
}
