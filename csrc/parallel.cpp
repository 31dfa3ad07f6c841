// torch's OpenMP runtime is found where torch found it and entered through the ABI that GCC's `#pragma omp parallel` calls
// (GOMP_parallel, which LLVM's and Intel's runtimes also have). Where there is none, a call starts threads of its own.
#include "parallel.h"

#include <dlfcn.h>
#include <pthread.h>

#include "isa.h"

namespace bitline {
namespace {

using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
using Count = int (*)();

Parallel gomp_parallel = nullptr;
Count torch_threads = nullptr;
__thread bool inside = false;

struct Job {
  Task task;
  void* context;
  int64_t n;
  int64_t next;
};

void work(void* data) {
  Job& job = *static_cast<Job*>(data);
  const bool outer = inside;
  inside = true;
  for (;;) {
    const int64_t i = __atomic_fetch_add(&job.next, 1, __ATOMIC_RELAXED);
    if (i >= job.n) break;
    job.task(job.context, i);
  }
  inside = outer;
}

void* start(void* data) {
  work(data);
  return nullptr;
}

constexpr int kMostStarted = 64;

void run_started(Job& job, int count) {
  pthread_t started[kMostStarted];
  int n = 0;
  while (n < count - 1 && n < kMostStarted && pthread_create(&started[n], nullptr, start, &job) == 0) ++n;
  work(&job);
  while (n > 0) pthread_join(started[--n], nullptr);
}

}  // namespace

int threads() {
  const int count = torch_threads == nullptr ? 1 : torch_threads();
  return count < 1 ? 1 : count;
}

void run_tasks(int64_t n, Task task, void* context) {
  const int count = n < 2 || inside ? 1 : threads();  // asking torch also hands its number to this thread's OpenMP
  Job job{task, context, n, 0};
  if (count == 1) {
    for (int64_t i = 0; i < n; ++i) task(context, i);
  } else if (gomp_parallel != nullptr) {
    gomp_parallel(work, &job, 0, 0);  // the whole team: libgomp ends the threads that a smaller one leaves over
  } else {
    run_started(job, count);
  }
}

}  // namespace bitline

using namespace bitline;

// Look up torch's runtime. torch_library: its libtorch_cpu, loaded already. Returns 2 where tasks run on torch's threads, 1
// where they run on threads started for each call, 0 where torch is not found and everything runs on the calling thread.
BITLINE_EXPORT int bitline_init(const char* torch_library) {
  void* torch = dlopen(torch_library, RTLD_NOW | RTLD_NOLOAD);
  if (torch == nullptr) return 0;
  torch_threads = reinterpret_cast<Count>(dlsym(torch, "_ZN2at15get_num_threadsEv"));  // int at::get_num_threads()
  void* found = dlsym(RTLD_DEFAULT, "GOMP_parallel");  // torch's calls are bound in the same order
  if (found == nullptr) found = dlsym(torch, "GOMP_parallel");
  gomp_parallel = reinterpret_cast<Parallel>(found);
  return torch_threads == nullptr ? 0 : gomp_parallel == nullptr ? 1 : 2;
}

BITLINE_EXPORT int bitline_threads() { return threads(); }

// For measuring: `regions` parallel loops of `tasks` tasks that do nothing.
BITLINE_EXPORT void bitline_empty_regions(int64_t regions, int64_t tasks) {
  for (int64_t i = 0; i < regions; ++i) parallel_for(tasks, [](int64_t) {});
}
