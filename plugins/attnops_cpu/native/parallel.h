// The interface of parallel loops for kernels. It has no templates of the standard library: the linker might keep their
// code, compiled for one instruction set, for all sets.
#pragma once

#include <stdint.h>

namespace attnops {

class Parallel {
 public:
  using Task = void (*)(void* data, int64_t index);

  // The threads among which tasks are divided, at least 1.
  int threads() const { return threads_; }

  // Runs function(0) … function(count − 1), in any order, on this thread and others, and returns when all have run.
  // The function must not throw.
  template <typename F>
  void operator()(int64_t count, F&& function) {
    run_(this, count, [](void* data, int64_t i) { (*static_cast<F*>(data))(i); }, const_cast<void*>(static_cast<const void*>(&function)));
  }

 protected:
  using Run = void (*)(Parallel* self, int64_t count, Task task, void* data) noexcept;
  explicit Parallel(Run run) : run_(run) {}
  int threads_ = 1;

 private:
  Run run_;
};

// Memory of this thread for one task, 64-byte aligned, kept for later tasks; its content is undefined. A second call by
// the same task invalidates the first. Null if there is no memory.
void* scratch(int64_t bytes);

// Memory of one call, 64-byte aligned, with undefined content; null if there is no memory. Up to 64 MB are kept for later
// calls.
class Buffer {
 public:
  explicit Buffer(int64_t bytes);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  void* get() const { return data_; }

 private:
  int64_t bytes_;
  void* data_;
};

}  // namespace attnops
