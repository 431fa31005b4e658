// What the random calls of both kernels share: draws, arrays of exactly their size, and tasks in a random order.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <random>
#include <utility>
#include <vector>

#include "parallel.h"

// Tasks in a random order, on this thread.
struct Shuffled : attnops::Parallel {
  explicit Shuffled(std::mt19937& random) : Parallel(&run), random(random) { threads_ = 4; }
  static void run(Parallel* self, int64_t count, Task task, void* data) noexcept {
    std::vector<int64_t> order(count);
    for (int64_t i = 0; i < count; ++i) order[i] = i;
    for (int64_t i = count - 1; i > 0; --i) std::swap(order[i], order[static_cast<Shuffled*>(self)->random() % (i + 1)]);
    for (const int64_t i : order) task(data, i);
  }
  std::mt19937& random;
};

// Only one in so many calls is held to the plain computation, which takes most of the time.
inline unsigned one_in = 1;

// Draws, and the arrays of a call, each with an allocation of its own.
struct Draws {
  std::mt19937 random;
  std::vector<void*> owned;

  explicit Draws(unsigned seed) : random(seed) {}
  ~Draws() {
    for (void* p : owned) free(p);
  }
  int64_t below(int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); }
  template <class X>
  X of(std::initializer_list<X> choices) {
    return choices.begin()[below(static_cast<int64_t>(choices.size()))];
  }
  bool maybe(int percent) { return below(100) < percent; }
  template <class X>
  X* make(int64_t n) {
    void* p = malloc(static_cast<size_t>(n) * sizeof(X));
    owned.push_back(p);
    return static_cast<X*>(p);
  }
};
