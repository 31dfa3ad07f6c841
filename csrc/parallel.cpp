// Enters the OpenMP runtime that torch has loaded through the ABI of GCC's `#pragma omp parallel` (GOMP_parallel, which LLVM's
// and Intel's runtimes export too). Where there is none, each parallel loop spawns threads.
#include "parallel.h"

#include <dlfcn.h>
#include <pthread.h>

#include "isa.h"

namespace bitline {
namespace {

using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
using GetNumThreads = int (*)();

GompParallel gomp_parallel = nullptr;
GetNumThreads torch_num_threads = nullptr;
__thread bool in_parallel_region = false;

struct Job {
  Task task;
  void* context;
  int64_t n;
  int64_t next;
};

// Runs on every thread of the team.
void run_worker(void* data) {
  Job& job = *static_cast<Job*>(data);
  const bool nested = in_parallel_region;
  in_parallel_region = true;
  for (;;) {
    const int64_t i = __atomic_fetch_add(&job.next, 1, __ATOMIC_RELAXED);
    if (i >= job.n) break;
    job.task(job.context, i);
  }
  in_parallel_region = nested;
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
  const int count = torch_num_threads == nullptr ? 1 : torch_num_threads();
  return count < 1 ? 1 : count;
}

void run_tasks(int64_t n, Task task, void* context) {
  // at::get_num_threads, behind num_threads, also sets the OpenMP team size of this thread.
  const int count = n < 2 || in_parallel_region ? 1 : num_threads();
  Job job{task, context, n, 0};
  if (count == 1) {
    for (int64_t i = 0; i < n; ++i) task(context, i);
  } else if (gomp_parallel != nullptr) {
    gomp_parallel(run_worker, &job, 0, 0);  // 0: the whole team; libgomp destroys the threads that a smaller team leaves over
  } else {
    run_on_spawned_threads(job, count);
  }
}

}  // namespace bitline

using namespace bitline;

// Look up torch's OpenMP runtime. torch_library: path of libtorch_cpu, already loaded. Returns 2: parallel loops run on torch's
// threads; 1: on threads spawned for each loop; 0: torch was not found, and loops run on the calling thread.
BITLINE_EXPORT int bitline_bind_torch_threads(const char* torch_library) {
  void* torch = dlopen(torch_library, RTLD_NOW | RTLD_NOLOAD);
  if (torch == nullptr) return 0;
  torch_num_threads = reinterpret_cast<GetNumThreads>(dlsym(torch, "_ZN2at15get_num_threadsEv"));  // int at::get_num_threads()
  void* symbol = dlsym(RTLD_DEFAULT, "GOMP_parallel");  // the order in which torch's own calls were bound
  if (symbol == nullptr) symbol = dlsym(torch, "GOMP_parallel");
  gomp_parallel = reinterpret_cast<GompParallel>(symbol);
  return torch_num_threads == nullptr ? 0 : gomp_parallel == nullptr ? 1 : 2;
}

BITLINE_EXPORT int bitline_num_threads() { return num_threads(); }

// For benchmarks of fork/join overhead: `regions` parallel loops of `tasks` empty tasks.
BITLINE_EXPORT void bitline_empty_parallel_regions(int64_t regions, int64_t tasks) {
  for (int64_t i = 0; i < regions; ++i) parallel_for(tasks, [](int64_t) {});
}
