// exp2, and functions that use it.
#pragma once

#include "simd.h"

namespace attnops {
namespace ATTNOPS_ISA {

// 2^x for x up to 127, relative error at most 2.2e-7; 0 for −inf and below −150, NaN for NaN.
//
// x = n + f with f in [−0.5, 0.5]; a polynomial of degree 6 is 2^f, and n is added to the exponent. A polynomial of
// degree 5 has an error of 3.3e-6.
static ATTNOPS_INLINE vf exp2(vf x) {
  x = vmax(splat(-160.0f), x);  // NaN stays: the second argument is returned
#if defined(__AVX512F__)
  const vf n = (vf)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const vf magic = splat(12582912.0f);  // 1.5 · 2^23: the sum is rounded to an integer
  const vf n = (x + magic) - magic;
#endif
  const vf f = x - n;
  vf p = splat(1.53533616e-4f);
  p = p * f + splat(1.33988744e-3f);
  p = p * f + splat(9.61843736e-3f);
  p = p * f + splat(5.55033247e-2f);
  p = p * f + splat(2.40226479e-1f);
  p = p * f + splat(6.93147203e-1f);
  p = p * f + splat(1.0f);
#if defined(__AVX512F__)
  return (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  // In two factors, since 2^−160 has no float32; NaN stays in p.
  const vi whole = __builtin_convertvector(n, vi), half = whole >> 1;
  return p * (vf)((half + 127) << 23) * (vf)((whole - half + 127) << 23);
#endif
}

constexpr float LOG2E = 1.44269504f;

// tanh x, relative error 2e-7 also where x is small.
static ATTNOPS_INLINE vf tanh(vf x) {
  const vf size = (vf)((vi)x & 0x7fffffff), z = x * x;
  vf p = splat(-5.70498872745e-3f);
  p = p * z + splat(2.06390887954e-2f);
  p = p * z + splat(-5.37397155531e-2f);
  p = p * z + splat(1.33314422036e-1f);
  p = p * z + splat(-3.33332819422e-1f);
  const vf small = p * z * x + x;
  const vf e = exp2(vmin(splat(20.0f), size) * splat(2 * LOG2E));  // NaN stays
  const vf large = splat(1.0f) - splat(2.0f) / (e + splat(1.0f));
  return select((vi)(size < splat(0.625f)), small, (vf)((vi)large | ((vi)x & (int32_t)0x80000000)));
}

}  // namespace ATTNOPS_ISA
}  // namespace attnops
