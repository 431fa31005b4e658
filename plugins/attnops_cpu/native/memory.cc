#include <cstdlib>

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

Buffer::Buffer(int64_t bytes) : data_(aligned(bytes)) {}
Buffer::~Buffer() { std::free(data_); }

}  // namespace attnops
