// Numbers of 8 bits, and numbers at the end of a row.
#pragma once

#include "simd.h"

namespace attnops {
namespace ATTNOPS_ISA {

// The numbers as stored in memory.
struct i8 {
  int8_t value;
};
struct e4m3 {
  uint8_t bits;
};
struct e5m2 {
  uint8_t bits;
};

static ATTNOPS_INLINE vf load_wide(const i8* p) {
  typedef int8_t vb __attribute__((vector_size(VL)));
  vb b;
  memcpy(&b, p, sizeof(b));
  return __builtin_convertvector(b, vf);
}
typedef uint8_t vbyte __attribute__((vector_size(VL)));
static ATTNOPS_INLINE vf of_halves(vh h) {
  f16 halves[VL];
  memcpy(halves, &h, sizeof(h));
  return load_wide(halves);
}
static ATTNOPS_INLINE vf load_wide(const e5m2* p) {
  vbyte b;
  memcpy(&b, p, sizeof(b));
  return of_halves(__builtin_convertvector(b, vh) << 8);
}
// As a float16 its exponent is 8 too small.
static ATTNOPS_INLINE vf load_wide(const e4m3* p) {
  vbyte b;
  memcpy(&b, p, sizeof(b));
  const vh h = __builtin_convertvector(b, vh);
  return of_halves(((h & 0x80) << 8) | ((h & 0x7f) << 7)) * 256.0f;
}
// A vector of `count` numbers, fewer than VL, and zeros.
template <class E>
static ATTNOPS_INLINE vf load_first(const E* p, int64_t count) {
  E some[VL];
  memset(some, 0, sizeof(some));
  memcpy(some, p, static_cast<size_t>(count) * sizeof(E));
  return load_wide(some);
}
template <class E>
static ATTNOPS_INLINE float widen(E x) {
  return load_first(&x, 1)[0];
}
// `count` bytes of int4 as 2 · count int8: the numbers in the lower bits first.
static ATTNOPS_INLINE void unpack_int4(int8_t* to, const char* from, int64_t count) {
  typedef uint8_t vbytes __attribute__((vector_size(4 * VL)));
  int64_t i = 0;
  for (; i + 4 * VL <= count; i += 4 * VL) {
    vbytes low, high;
    memcpy(&low, from + i, sizeof(low));
    high = (vbytes)((vu)low >> 4);
    low = ((low & 15) ^ 8) - 8, high = ((high & 15) ^ 8) - 8;  // with their sign
    memcpy(to + i, &low, sizeof(low));
    memcpy(to + count + i, &high, sizeof(high));
  }
  for (; i < count; ++i) {
    const int x = static_cast<uint8_t>(from[i]);
    to[i] = static_cast<int8_t>(((x & 15) ^ 8) - 8), to[count + i] = static_cast<int8_t>((x >> 4 ^ 8) - 8);
  }
}
}  // namespace ATTNOPS_ISA
}  // namespace attnops
