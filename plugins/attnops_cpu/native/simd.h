// Vectors of the instruction set that a file is compiled for: 16 float32 with AVX-512, 8 with AVX2, else 4 (SSE2, NEON).
//
// GCC's and clang's vector extensions have loads, arithmetic and comparisons of all widths; where an instruction matters
// (maximum, conversion, products of bfloat16) there are intrinsics. All is in the namespace ATTNOPS_ISA, which the file of
// an instruction set defines, so that the linker never uses one set's function in place of another's.
#pragma once

#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__ARM_NEON)
#include <arm_neon.h>
#endif
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define ATTNOPS_DOT_BF16  // there are products of vectors of bfloat16
#endif
#if defined(ATTNOPS_AMX) || defined(ATTNOPS_DOT_BF16)
#define ATTNOPS_BF16  // there are products of bfloat16
#endif

namespace attnops {
namespace ATTNOPS_ISA {

#if defined(__AVX512F__)
constexpr int VL = 16;  // float32 in a vector
#elif defined(__AVX2__)
constexpr int VL = 8;
#else
constexpr int VL = 4;
#endif
#if defined(__AVX512F__) || defined(__ARM_NEON)
constexpr int REGISTERS = 32;
#else
constexpr int REGISTERS = 16;
#endif

typedef float vf __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));
typedef uint16_t vh __attribute__((vector_size(VL * 2)));

// 16-bit floats as stored in memory.
struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

#define ATTNOPS_INLINE inline __attribute__((always_inline))

static ATTNOPS_INLINE vf splat(float x) {
#if defined(__AVX512F__)
  return (vf)_mm512_set1_ps(x);
#elif defined(__AVX2__)
  return (vf)_mm256_set1_ps(x);
#else
  return x - vf{};
#endif
}
static ATTNOPS_INLINE vi splat_i(int32_t x) { return x - vi{}; }
static ATTNOPS_INLINE vf load(const float* p) {
  vf v;
  memcpy(&v, p, sizeof(v));
  return v;
}
static ATTNOPS_INLINE vi load_i(const int32_t* p) {
  vi v;
  memcpy(&v, p, sizeof(v));
  return v;
}
static ATTNOPS_INLINE void store(float* p, vf v) { memcpy(p, &v, sizeof(v)); }

// The larger of each pair; b where either is NaN.
static ATTNOPS_INLINE vf vmax(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}
static ATTNOPS_INLINE vf vmin(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return a < b ? a : b;
#endif
}
// a where the mask (all ones or 0 in each lane) is set, else b.
static ATTNOPS_INLINE vf select(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }

static ATTNOPS_INLINE float hsum(vf v) {
  float s = 0;
  for (int i = 0; i < VL; ++i) s += v[i];
  return s;
}
static ATTNOPS_INLINE float hmax(vf v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#endif
  float m = v[0];
  for (int i = 1; i < VL; ++i) m = v[i] > m ? v[i] : m;
  return m;
}

// x where the bit of the lane is set in the word, from bit `first` on, else −inf.
static ATTNOPS_INLINE vf where_bits(uint32_t word, int first, vf x, float otherwise) {
#if defined(__AVX512F__)
  return (vf)_mm512_mask_mov_ps((__m512)splat(otherwise), (__mmask16)(word >> first), (__m512)x);
#else
  vi lane;
  for (int i = 0; i < VL; ++i) lane[i] = 1 << i;
  return select((vi)((splat_i((int32_t)(word >> first)) & lane) != 0), x, splat(otherwise));
#endif
}

// One 16-bit float.
static ATTNOPS_INLINE float widen(float x) { return x; }
static ATTNOPS_INLINE float widen(bf16 x) {
  const uint32_t bits = (uint32_t)x.bits << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
static ATTNOPS_INLINE float widen(f16 x) {
  const uint32_t sign = (uint32_t)(x.bits & 0x8000u) << 16, rest = x.bits & 0x7fffu;
  // A subnormal number as an integer: on XLA's threads products treat float32's subnormal numbers as 0.
  float f = (float)(int32_t)rest * 5.9604644775390625e-8f;  // 2^-24
  uint32_t bits;
  memcpy(&bits, &f, 4);
  if (rest >= 0x400u) bits = (rest << 13) + (rest >= 0x7c00u ? 0x70000000u : 0x38000000u);  // the exponent's bias
  bits |= sign;
  memcpy(&f, &bits, 4);
  return f;
}

// Loads VL numbers as float32.
static ATTNOPS_INLINE vf load_wide(const float* p) { return load(p); }
static ATTNOPS_INLINE vf load_wide(const bf16* p) {
  vh h;
  memcpy(&h, p, sizeof(h));
  return (vf)(__builtin_convertvector(h, vu) << 16);
}
static ATTNOPS_INLINE vf load_wide(const f16* p) {
#if defined(__AVX512F__)
  __m256i h;
  memcpy(&h, p, sizeof(h));
  return (vf)_mm512_cvtph_ps(h);
#elif defined(__AVX2__)
  __m128i h;
  memcpy(&h, p, sizeof(h));
  return (vf)_mm256_cvtph_ps(h);
#elif defined(__ARM_NEON)
  float16x4_t h;
  memcpy(&h, p, sizeof(h));
  return (vf)vcvt_f32_f16(h);
#else
  vf v;
  for (int i = 0; i < VL; ++i) v[i] = widen(p[i]);
  return v;
#endif
}

// Rounded to nearest, ties to even; NaN stays NaN.
static ATTNOPS_INLINE void narrow(bf16* p, float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  p->bits = (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u
                                                          : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
static ATTNOPS_INLINE void narrow(float* p, float x) { *p = x; }
static ATTNOPS_INLINE void narrow(f16* p, float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  bits &= 0x7fffffffu;
  uint32_t half;
  if (bits > 0x7f800000u) {
    half = 0x7e00u;
  } else if (bits >= 0x477ff000u) {  // 65520 and above round to infinity
    half = 0x7c00u;
  } else if (bits < 0x38800000u) {  // subnormal: the sum with 0.5 leaves the rounded number in the low bits
    float f;
    memcpy(&f, &bits, 4);
    f += 0.5f;
    memcpy(&half, &f, 4);
    half -= 0x3f000000u;
  } else {
    half = (bits - 0x38000000u + 0xfffu + ((bits >> 13) & 1u)) >> 13;
  }
  p->bits = (uint16_t)(sign | half);
}
// Stores VL numbers, rounded.
static ATTNOPS_INLINE void store_narrow(float* p, vf v) { store(p, v); }
static ATTNOPS_INLINE void store_narrow(bf16* p, vf v) {
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  const bfloat16x4_t h = vcvt_bf16_f32((float32x4_t)v);
#else
  const vu bits = (vu)v;
  const vu rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16, quiet = (bits >> 16) | 0x40u;
  const vu is_nan = (vu)((bits & 0x7fffffffu) > 0x7f800000u);
  const vh h = __builtin_convertvector((is_nan & quiet) | (~is_nan & rounded), vh);
#endif
  memcpy(p, &h, sizeof(h));
}
static ATTNOPS_INLINE void store_narrow(f16* p, vf v) {
#if defined(__AVX512F__)
  const __m256i h = _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  memcpy(p, &h, sizeof(h));
#elif defined(__AVX2__)
  const __m128i h = _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  memcpy(p, &h, sizeof(h));
#elif defined(__ARM_NEON)
  const float16x4_t h = vcvt_f16_f32((float32x4_t)v);
  memcpy(p, &h, sizeof(h));
#else
  for (int i = 0; i < VL; ++i) narrow(p + i, v[i]);
#endif
}

}  // namespace ATTNOPS_ISA
}  // namespace attnops
