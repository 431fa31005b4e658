// Fork and join on XLA's thread pool.
//
// A handler runs on a thread of that pool. If it blocked until tasks that it scheduled had run, handlers that occupy all
// threads would wait for ever. So the caller runs tasks too: threads claim tasks by an atomic counter, and when none is
// left, the caller waits only for tasks that a running thread has claimed. A helper that starts late does nothing.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#if defined(__linux__)
#include <sched.h>
#endif

#include "parallel.h"

namespace attnops {

// The cores that this process may use.
inline int available_cores() {
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0 && CPU_COUNT(&set) > 0) return CPU_COUNT(&set);
#endif
  const unsigned n = std::thread::hardware_concurrency();
  return n ? static_cast<int>(n) : 1;
}

// The state that the caller and its helpers share; the last of them deletes it.
struct Job {
  Job(int64_t count, Parallel::Task task, void* data) : count(count), task(task), data(data) {}

  // Runs tasks until none is unclaimed. `data` is read only with a claimed task, for which the caller waits.
  void work() noexcept {
    int64_t ran = 0;
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count; ++ran) task(data, i);
    if (ran && done.fetch_add(ran, std::memory_order_acq_rel) + ran == count) {
      std::lock_guard<std::mutex> lock(mutex);
      finished.notify_all();
    }
  }

  void wait() noexcept {
    for (int spin = 0; spin < 4096; ++spin) {
      if (done.load(std::memory_order_acquire) == count) return;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
    std::unique_lock<std::mutex> lock(mutex);
    finished.wait(lock, [this] { return done.load(std::memory_order_acquire) == count; });
  }

  const int64_t count;
  const Parallel::Task task;
  void* const data;
  std::atomic<int64_t> next{0}, done{0};
  std::mutex mutex;
  std::condition_variable finished;
};

// A `Parallel` over a pool with `num_threads()` and `Schedule(function)`, such as `xla::ffi::ThreadPool`.
template <typename Pool>
class PoolParallel : public Parallel {
 public:
  explicit PoolParallel(Pool& pool) : Parallel(&run_), pool_(pool) {
    static const int cores = available_cores();  // XLA has a thread a device: 8 where 2 cores are shown as 8 devices
    const int64_t threads = pool.num_threads();
    threads_ = static_cast<int>(threads < 1 ? 1 : threads < cores ? threads : cores);
  }

 private:
  static void run_(Parallel* self, int64_t count, Task task, void* data) noexcept {
    const int64_t helpers = (self->threads() < count ? self->threads() : count) - 1;
    if (helpers <= 0) {
      for (int64_t i = 0; i < count; ++i) task(data, i);
      return;
    }
    auto job = std::make_shared<Job>(count, task, data);
    for (int64_t i = 0; i < helpers; ++i) static_cast<PoolParallel*>(self)->pool_.Schedule([job] { job->work(); });
    job->work();
    job->wait();
  }

  Pool& pool_;
};

}  // namespace attnops
