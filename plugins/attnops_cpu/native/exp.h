// exp2 and what is made of it.
#pragma once

#include "simd.h"

namespace attnops {
namespace ATTNOPS_ISA {

// 2^x, relative error at most 2.2e-7; 0 below −126 and for −inf, inf from 128, NaN for NaN. Subnormal results are 0.
//
// x = n + f with f in [−0.5, 0.5]; a polynomial of degree 6 is 2^f, and n is added to the exponent. A polynomial of
// degree 5 has an error of 3.3e-6.
static ATTNOPS_INLINE vf exp2(vf x) {
  const vf limited = vmin(splat(128.0f), vmax(splat(-127.0f), x));  // NaN stays: the second argument is returned
#if defined(__AVX512F__)
  const vf n = (vf)_mm512_roundscale_ps((__m512)limited, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const vf f = limited - n;
#else
  const vf magic = splat(12582912.0f);  // 1.5 · 2^23: the sum is rounded to an integer
  const vf n = (limited + magic) - magic;
  const vf f = limited - n;
#endif
  vf p = splat(1.5353362e-4f);
  p = p * f + 1.3398874e-3f;
  p = p * f + 9.6184373e-3f;
  p = p * f + 5.5503324e-2f;
  p = p * f + 2.4022648e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.0f;
#if defined(__AVX512F__)
  const vf scaled = (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
  return (vf)_mm512_maskz_mov_ps(_mm512_cmp_ps_mask((__m512)x, (__m512)splat(-126.0f), _CMP_NLT_UQ), (__m512)scaled);
#else
  // In two halves, since 2^128 has no float32.
  const vi whole = __builtin_convertvector(n, vi), half = whole >> 1;
  const vf scaled = p * (vf)((half + 127) << 23) * (vf)((whole - half + 127) << 23);
  const vf value = (vf)((vi)scaled & ~(vi)(x < splat(-126.0f)));
  return select((vi)(x != x), x, value);
#endif
}

}  // namespace ATTNOPS_ISA
}  // namespace attnops
