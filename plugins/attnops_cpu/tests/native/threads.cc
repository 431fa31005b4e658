// All kernels on a pool of threads, called by several threads at once, some of them the pool's own, as XLA's handlers are;
// each result must be the same to the bit as on one thread. Built with the thread sanitizer.
//
//   threads pool CALLS   the calls, and how many threads take part in one
//   threads race CALLS   the same, but tasks write what others write, which the sanitizer must find
//   threads fork FORKS   processes forked while eight threads call; each child must be able to call, alone, and end
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <set>
#include <thread>
#include <vector>

#include "draws.h"
#include "isa.h"
#include "pool.h"

namespace {

using namespace attnops;

// Threads that run functions in order, like XLA's pool.
class Pool {
 public:
  explicit Pool(int threads) {
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { work(); });
  }
  ~Pool() {
    for (size_t i = 0; i < threads_.size(); ++i) Schedule(nullptr);
    for (std::thread& thread : threads_) thread.join();
  }
  int64_t num_threads() const { return static_cast<int64_t>(threads_.size()); }
  void Schedule(std::function<void()> function) {
    std::lock_guard<std::mutex> lock(mutex_);
    functions_.push_back(std::move(function));
    some_.notify_one();
  }

 private:
  void work() {
    while (true) {
      std::unique_lock<std::mutex> lock(mutex_);
      some_.wait(lock, [this] { return !functions_.empty(); });
      const std::function<void()> function = std::move(functions_.front());
      functions_.pop_front();
      lock.unlock();
      if (!function) return;
      function();
    }
  }
  std::mutex mutex_;
  std::condition_variable some_;
  std::deque<std::function<void()>> functions_;
  std::vector<std::thread> threads_;
};

// Four threads, also where there are fewer cores.
struct FourThreads : PoolParallel<Pool> {
  explicit FourThreads(Pool& pool) : PoolParallel(pool) { threads_ = 4; }
};

// A pool whose threads a fork has left behind.
struct NoThreads {
  int64_t num_threads() const { return 4; }
  template <typename F>
  void Schedule(F&&) {}
};
struct Abandoned : PoolParallel<NoThreads> {
  explicit Abandoned(NoThreads& pool) : PoolParallel(pool) { threads_ = 4; }
};

struct Serial : Parallel {
  Serial() : Parallel(&run) {}
  static void run(Parallel*, int64_t count, Task task, void* data) noexcept {
    for (int64_t i = 0; i < count; ++i) task(data, i);
  }
};

// Forward and backward with a bias whose gradient is shared, a cache in several chunks, and states whose columns are shared.
struct Calls : Draws {
  static constexpr int64_t T = 130, S = 200, D = 16, SLOTS = 9000;
  float *query, *key, *value, *bias, *cache, *keys_of_cache;
  int32_t positions[1] = {SLOTS - 1}, rows[4] = {0, 0, SLOTS, SLOTS - 1}, left[1] = {INT32_MAX}, right[1] = {INT32_MAX};

  Calls() : Draws(3) {
    for (float** x : {&query, &key, &value, &bias, &cache, &keys_of_cache}) {
      const int64_t n = x == &cache || x == &keys_of_cache ? SLOTS * D : 2 * (T + S) * D;
      *x = make<float>(n);
      for (int64_t i = 0; i < n; ++i) (*x)[i] = static_cast<float>(below(200) - 100) / 100.0f;
    }
  }

  static constexpr int64_t Q = T * 2 * D, KV = S * D, STATS = 2 * T, BIAS = T + S - 1;
  std::vector<float> operator()(Parallel& parallel) const {
    std::vector<float> all(4 * Q + 2 * KV + 2 * STATS + BIAS + D + 4 * D * D);
    float* to = all.data();
    const auto take = [&](int64_t n) { return (to += n) - n; };
    Scoring s{};
    s.B = 1, s.T = T, s.S = S, s.H = 2, s.K = 1, s.D = s.Dv = D, s.scale = 0.25f, s.low = INT64_MIN / 2, s.high = INT64_MAX / 2;
    s.bias = bias + T - 1, s.bias_query = -1, s.bias_key = 1;
    ForwardCall forward{};
    forward.scoring = s, forward.query = query, forward.key = key, forward.value = value;
    forward.out = take(Q), forward.lse = take(STATS), forward.residual = take(STATS);
    BackwardCall back{};
    back.scoring = s, back.query = query, back.key = key, back.value = value, back.d_out = query, back.delta = bias;
    back.lse = forward.lse, back.residual = forward.residual, back.bias_floats = BIAS;
    back.d_query = take(Q), back.d_key = take(KV), back.d_value = take(KV), back.d_bias = take(BIAS);
    DecodeCall c{};
    c.B = c.T = c.H = c.K = c.blocks = 1, c.D = c.Dv = D, c.S = c.n = SLOTS, c.stored = c.dtype = kF32, c.scale = 0.25f;
    c.key = reinterpret_cast<const char*>(keys_of_cache), c.value = reinterpret_cast<const char*>(cache);
    c.key_stride = c.value_stride = c.key_count = c.value_count = D * 4;
    c.query = reinterpret_cast<const char*>(query), c.out = reinterpret_cast<char*>(take(D));
    c.positions = positions, c.rows = rows, c.left = left, c.right = right;
    LinearCall linear{};
    linear.B = linear.K = linear.H = 1, linear.T = T, linear.D = D, linear.Dv = 4 * D, linear.scale = 0.25f;
    linear.query = query, linear.key = key, linear.value = value, linear.out = take(2 * Q), linear.state = take(4 * D * D);
    const Kernels& kernels = kernels_baseline;
    if (!kernels.forward(forward, parallel) || !kernels.backward(back, parallel) || !kernels.decode(c, parallel)) all.clear();
    if (!kernels.linear(linear, parallel)) all.clear();
    return all;
  }
};

void require(bool is_true, const char* what) {
  if (is_true) return;
  std::fprintf(stderr, "%s\n", what);
  std::_Exit(1);
}

std::atomic<int64_t> sum{0};
int64_t unguarded = 0;

// No more threads run tasks of a call than there are cores, however many the pool has.
void count_threads() {
  Pool pool(available_cores() + 6);
  PoolParallel<Pool> parallel(pool);
  std::mutex mutex;
  std::set<std::thread::id> threads;
  parallel(300, [&](int64_t) {
    usleep(200);
    std::lock_guard<std::mutex> lock(mutex);
    threads.insert(std::this_thread::get_id());
  });
  require(static_cast<int>(threads.size()) <= available_cores(), "more threads than cores took part");
  require(available_cores() == 1 || threads.size() > 1, "one thread ran all tasks");
  std::printf("threads on %d of %d cores took part\n", static_cast<int>(threads.size()), available_cores());
}

void run_pool(int count, bool races) {
  const Calls calls;
  Serial serial;
  const std::vector<float> expected = calls(serial);
  Pool pool(4);
  const auto call = [&] {
    FourThreads parallel(pool);
    parallel(50, [races](int64_t i) {
      usleep(50);  // the caller leaves some to the others
      sum += i;
      if (races) unguarded += i;
    });
    const std::vector<float> found = calls(parallel);
    require(found.size() == expected.size() && !std::memcmp(found.data(), expected.data(), found.size() * 4), "a result differs");
  };
  std::atomic<int> scheduled{0};
  for (int i = 0; i < 6; ++i)  // more than the pool has threads
    pool.Schedule([&] {
      for (int n = 0; n < count; ++n) call();
      ++scheduled;
    });
  std::vector<std::thread> callers;
  for (int i = 0; i < 3; ++i)
    callers.emplace_back([&] {
      for (int n = 0; n < count; ++n) call();
    });
  for (std::thread& caller : callers) caller.join();
  while (scheduled != 6) usleep(1000);
  require(sum == 9 * count * 50 * 49 / 2, "a task was lost");
}

void run_fork(int forks) {
  const Calls calls;
  Serial serial;
  const std::vector<float> expected = calls(serial);
  std::atomic<bool> stop{false};
  std::vector<std::thread> callers;
  Pool pool(4);
  for (int i = 0; i < 8; ++i)
    callers.emplace_back([&] {
      FourThreads parallel(pool);
      while (!stop) {
        for (int n = 0; n < 200; ++n) Buffer buffer(1 << 16);  // the lock of kept memory is taken most of the time
        calls(parallel);
      }
    });
  for (int i = 0; i < forks; ++i) {
    usleep(2000);
    const pid_t child = fork();
    if (!child) {
      NoThreads none;
      Abandoned parallel(none);
      _exit(calls(parallel) == expected ? 0 : 1);
    }
    int status = 0, waited = 0;
    while (child > 0 && !waitpid(child, &status, WNOHANG)) {
      usleep(1000);
      if (++waited < 20000) continue;
      kill(child, SIGKILL);
      require(false, "a child did not end");
    }
    require(child > 0 && status == 0, "a child's results differ");
  }
  stop = true;
  for (std::thread& caller : callers) caller.join();
}

}  // namespace

int main(int count, char** arguments) {
  require(count == 3, "threads pool|race|fork NUMBER");
  const int number = std::atoi(arguments[2]);
  if (!std::strcmp(arguments[1], "fork")) {
    run_fork(number);
  } else {
    count_threads();
    run_pool(number, !std::strcmp(arguments[1], "race"));
  }
  std::puts("right");
}
