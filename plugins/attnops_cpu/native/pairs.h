// Vectors of pairs of bfloat16, and their products.
#pragma once

#include "simd.h"

#if defined(ATTNOPS_DOT_BF16)
namespace attnops {
namespace ATTNOPS_ISA {

constexpr int TWO = 2 * VL;  // numbers in a vector

static ATTNOPS_INLINE vu load_pairs(const void* p) {
  vu v;
  memcpy(&v, p, sizeof(v));
  return v;
}
// A vector of the first n of TWO numbers, and zeros.
static ATTNOPS_INLINE vu load_pairs(const void* p, int64_t n) {
#if defined(__AVX512BF16__)
  return (vu)_mm512_maskz_loadu_epi16(n >= TWO ? ~0u : (1u << n) - 1, p);
#else
  vu v = {};
  memcpy(&v, p, (size_t)(n < TWO ? n : TWO) * 2);
  return v;
#endif
}

// Pairs of the numbers of `a` and `b` at the same place, in two vectors; `in_order` sorts sums of their products.
static ATTNOPS_INLINE void interleave(vu a, vu b, vu* to) {
#if defined(__AVX512BF16__)
  to[0] = (vu)_mm512_unpacklo_epi16((__m512i)a, (__m512i)b);
  to[1] = (vu)_mm512_unpackhi_epi16((__m512i)a, (__m512i)b);
#else
  to[0] = (vu)vzip1q_u16((uint16x8_t)a, (uint16x8_t)b);
  to[1] = (vu)vzip2q_u16((uint16x8_t)a, (uint16x8_t)b);
#endif
}

// Sorts n sums, a multiple of TWO.
static ATTNOPS_INLINE void in_order(float* sums, int64_t n) {
#if defined(__AVX512BF16__)
  // Unpacking interleaved 8 of each 16 bytes of both vectors.
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  for (int64_t d = 0; d < n; d += TWO) {
    const __m512 a = _mm512_loadu_ps(sums + d), b = _mm512_loadu_ps(sums + d + VL);
    _mm512_storeu_ps(sums + d, _mm512_permutex2var_ps(a, first, b));
    _mm512_storeu_ps(sums + d + VL, _mm512_permutex2var_ps(a, second, b));
  }
#else
  (void)sums, (void)n;
#endif
}

// Adds to each lane the products of a pair: VDPBF16PS or BFDOT.
static ATTNOPS_INLINE void add_products(vf& sum, vu a, vu b) {
#if defined(__AVX512BF16__)
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));  // around the intrinsic GCC 12 copies all sums
#else
  sum = (vf)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)a, (bfloat16x8_t)b);
#endif
}

}  // namespace ATTNOPS_ISA
}  // namespace attnops
#endif
