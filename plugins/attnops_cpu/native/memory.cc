#include <pthread.h>

#include <cstdlib>
#include <mutex>

#include "parallel.h"

namespace attnops {
namespace {

struct Arena {
  void* data = nullptr;
  int64_t bytes = 0;
  ~Arena() { std::free(data); }
};

void* aligned(int64_t bytes) {
  return std::aligned_alloc(64, static_cast<size_t>((bytes < 64 ? 64 : bytes) + 63) / 64 * 64);
}

// Memory of calls that have ended, kept for the next ones: the system clears each page of new memory when it is first
// written, which takes longer than the kernel's own writes to it.
class Kept {
 public:
  // A piece of at least `bytes`, and at most four times as much, and its size; null for none.
  void* take(int64_t bytes, int64_t* size) {
    std::lock_guard<std::mutex> lock(mutex_);
    int best = -1;
    for (int i = 0; i < count_; ++i)
      if (each_[i].bytes >= bytes && each_[i].bytes / 4 <= bytes && (best < 0 || each_[i].bytes < each_[best].bytes)) best = i;
    if (best < 0) return nullptr;
    void* const data = each_[best].data;
    *size = each_[best].bytes;
    total_ -= *size;
    each_[best] = each_[--count_];
    return data;
  }

  void give(void* data, int64_t bytes) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (count_ < MOST && bytes <= MOST_BYTES - total_) {
        each_[count_++] = {data, bytes};
        total_ += bytes;
        return;
      }
    }
    std::free(data);
  }

  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  static constexpr int MOST = 32;
  static constexpr int64_t MOST_BYTES = 64 << 20;
  struct Piece {
    void* data;
    int64_t bytes;
  };
  std::mutex mutex_;
  Piece each_[MOST];
  int count_ = 0;
  int64_t total_ = 0;
};

// Never destroyed: threads may still run when the process ends. A fork holds the lock, so that the child does not inherit
// it locked by a thread that the child does not have.
Kept& kept = *new Kept;
[[maybe_unused]] const int at_fork = pthread_atfork([] { kept.lock(); }, [] { kept.unlock(); }, [] { kept.unlock(); });

}  // namespace

void* scratch(int64_t bytes) {
  static thread_local Arena arena;
  if (arena.bytes < bytes) {
    std::free(arena.data);
    arena.data = aligned(bytes);
    arena.bytes = arena.data ? bytes : 0;
  }
  return arena.data;
}

Buffer::Buffer(int64_t bytes) : bytes_(bytes < 4096 ? 4096 : bytes) {
  const int64_t wanted = bytes_;
  data_ = kept.take(wanted, &bytes_);
  if (!data_) data_ = aligned(wanted);
}
Buffer::~Buffer() {
  if (data_) kept.give(data_, bytes_);
}

}  // namespace attnops
