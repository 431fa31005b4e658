// A stand-in for the compiler's <arm_neon.h> where the processor is no ARM: the intrinsics that the kernels use, in vector
// extensions, so that random calls test the kernels of NEON on every machine. Lane 0 is the lowest in memory, as there.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

typedef float float32x2_t __attribute__((vector_size(8)));
typedef float float32x4_t __attribute__((vector_size(16)));
typedef uint16_t uint16x4_t __attribute__((vector_size(8)));
typedef uint16_t uint16x8_t __attribute__((vector_size(16)));
typedef uint64_t uint64x1_t __attribute__((vector_size(8)));
typedef uint64_t uint64x2_t __attribute__((vector_size(16)));
typedef uint16x4_t float16x4_t, bfloat16x4_t;
typedef uint16x8_t bfloat16x8_t;
struct uint16x4x4_t {
  uint16x4_t val[4];
};

namespace neon {

template <class To, class From>
To bits_of(From x) {
  static_assert(sizeof(To) == sizeof(From), "");
  To y;
  std::memcpy(&y, &x, sizeof(y));
  return y;
}
template <class Whole, class Half>
Whole joined(Half low, Half high) {
  Whole x;
  std::memcpy(&x, &low, sizeof(low));
  std::memcpy(reinterpret_cast<char*>(&x) + sizeof(low), &high, sizeof(high));
  return x;
}

inline float of_bf16(uint16_t x) { return bits_of<float>(static_cast<uint32_t>(x) << 16); }
inline uint16_t to_bf16(float x) {  // to nearest, ties to even
  const uint32_t bits = bits_of<uint32_t>(x);
  if (x != x) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float of_f16(uint16_t x) {
  const int exponent = x >> 10 & 31, fraction = x & 1023;
  const float size = exponent == 31 ? (fraction ? NAN : INFINITY)
                     : exponent     ? std::ldexp(1024.0f + fraction, exponent - 25)
                                    : std::ldexp(static_cast<float>(fraction), -24);
  return x & 0x8000 ? -size : size;
}
inline uint16_t to_f16(float x) {
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const float size = std::fabs(x);
  if (x != x) return sign | 0x7e00;
  if (size >= 65520) return sign | 0x7c00;
  const int exponent = size < std::ldexp(1.0f, -14) ? -14 : std::ilogb(size);  // nearbyint: to nearest, ties to even
  const int steps = static_cast<int>(std::nearbyint(std::ldexp(size, 10 - exponent)));
  return static_cast<uint16_t>(sign | (steps + ((exponent + 14) << 10)));
}

// Rounded to odd, and numbers below the smallest normal one are 0: so FEAT_BF16 adds.
inline float odd(double x) {
  float y = static_cast<float>(x);
  if (!(std::fabs(x) < INFINITY)) return y;
  if (std::fabs(x) < 1.17549435e-38) return 0;
  if (y == x) return y;
  if (std::fabs(static_cast<double>(y)) > std::fabs(x)) y = std::nextafter(y, 0.0f);
  return bits_of<float>(bits_of<uint32_t>(y) | 1);
}
// The sum and the products of two pairs.
__attribute__((noinline)) inline float add_pair(float sum, const uint16_t* a, const uint16_t* b) {
  const double first = static_cast<double>(of_bf16(a[0])) * of_bf16(b[0]), second = static_cast<double>(of_bf16(a[1])) * of_bf16(b[1]);
  return odd(static_cast<double>(sum) + odd(first + second));
}

}  // namespace neon

inline float32x4_t vld1q_f32(const float* p) { return *reinterpret_cast<const float32x4_t __attribute__((aligned(4), may_alias))*>(p); }
inline void vst1q_f32(float* p, float32x4_t x) { std::memcpy(p, &x, 16); }
inline uint64x1_t vld1_u64(const uint64_t* p) { return uint64x1_t{*p}; }
inline uint64x2_t vld1q_u64(const uint64_t* p) { return uint64x2_t{p[0], p[1]}; }
inline void vst4_u16(uint16_t* p, uint16x4x4_t x) {
  for (int i = 0; i < 16; ++i) p[i] = x.val[i % 4][i / 4];
}

inline bfloat16x8_t vreinterpretq_bf16_u64(uint64x2_t x) { return reinterpret_cast<bfloat16x8_t>(x); }
inline uint16x4_t vreinterpret_u16_bf16(bfloat16x4_t x) { return x; }
inline uint64x2_t vcombine_u64(uint64x1_t low, uint64x1_t high) { return neon::joined<uint64x2_t>(low, high); }
inline float32x4_t vcombine_f32(float32x2_t low, float32x2_t high) { return neon::joined<float32x4_t>(low, high); }
inline float32x2_t vget_low_f32(float32x4_t x) { return float32x2_t{x[0], x[1]}; }
inline float32x2_t vget_high_f32(float32x4_t x) { return float32x2_t{x[2], x[3]}; }
inline uint16x8_t vzip1q_u16(uint16x8_t a, uint16x8_t b) { return uint16x8_t{a[0], b[0], a[1], b[1], a[2], b[2], a[3], b[3]}; }
inline uint16x8_t vzip2q_u16(uint16x8_t a, uint16x8_t b) { return uint16x8_t{a[4], b[4], a[5], b[5], a[6], b[6], a[7], b[7]}; }

inline float32x4_t vcvt_f32_f16(float16x4_t x) {
  return float32x4_t{neon::of_f16(x[0]), neon::of_f16(x[1]), neon::of_f16(x[2]), neon::of_f16(x[3])};
}
inline float16x4_t vcvt_f16_f32(float32x4_t x) {
  return float16x4_t{neon::to_f16(x[0]), neon::to_f16(x[1]), neon::to_f16(x[2]), neon::to_f16(x[3])};
}
inline bfloat16x4_t vcvt_bf16_f32(float32x4_t x) {
  return bfloat16x4_t{neon::to_bf16(x[0]), neon::to_bf16(x[1]), neon::to_bf16(x[2]), neon::to_bf16(x[3])};
}

inline float32x4_t vpaddq_f32(float32x4_t a, float32x4_t b) { return float32x4_t{a[0] + a[1], a[2] + a[3], b[0] + b[1], b[2] + b[3]}; }
inline float32x4_t vbfdotq_f32(float32x4_t sum, bfloat16x8_t a, bfloat16x8_t b) {
  uint16_t x[8], y[8];
  std::memcpy(x, &a, 16), std::memcpy(y, &b, 16);
  for (int i = 0; i < 4; ++i) sum[i] = neon::add_pair(sum[i], x + 2 * i, y + 2 * i);
  return sum;
}
inline float32x4_t vbfmmlaq_f32(float32x4_t sum, bfloat16x8_t a, bfloat16x8_t b) {
  uint16_t x[8], y[8];
  std::memcpy(x, &a, 16), std::memcpy(y, &b, 16);
  for (int i = 0; i < 4; ++i)
    for (int pair = 0; pair < 4; pair += 2) sum[i] = neon::add_pair(sum[i], x + i / 2 * 4 + pair, y + i % 2 * 4 + pair);
  return sum;
}
