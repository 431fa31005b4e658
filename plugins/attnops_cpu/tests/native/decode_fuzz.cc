// Random calls of the decode kernel of one instruction set, each held to a plain computation in double; tables, lengths and
// positions are often garbage. Built with the address sanitizer, so that a read outside of an array ends the program:
// each array has an allocation of its own, of exactly its size. Arguments: the number of calls, a seed, `one_in`, and, to see
// that a wrong result is found, any fourth one: the plain computation then leaves out the newest token.
#include <math.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "flash.h"
#include "simd.h"
#if defined(ATTNOPS_AMX)
#include "isa.h"
static const attnops::Kernels others{};  // of other calls, which are left out
#define ATTNOPS_OTHERS others
#endif

#include "product.inc"

#include "decode.inc"

#include "draws.h"

namespace {

using namespace attnops;
using namespace attnops::ATTNOPS_ISA;

bool leaves_out_newest = false;

struct Fuzz : Draws {
  using Draws::Draws;
  float number() { return static_cast<float>(below(2001) - 1000) / 500.0f; }
  int32_t garbage() { return of<int32_t>({INT32_MIN, INT32_MAX, -1, -7, 0, 1 << 30, static_cast<int32_t>(random())}); }

  char* numbers(int64_t n, Stored stored) {
    static const int sizes[] = {4, 2, 2, 1, 1, 1, 1};
    char* all = make<char>(n * sizes[stored]);
    for (int64_t i = 0; i < n; ++i) {
      if (stored == kF32) reinterpret_cast<float*>(all)[i] = number();
      if (stored == kBF16) narrow(reinterpret_cast<bf16*>(all) + i, number());
      if (stored == kF16) narrow(reinterpret_cast<f16*>(all) + i, number());
      if (stored == kI8) all[i] = static_cast<char>(below(255) - 127);
      if (stored == kE4M3) all[i] = static_cast<char>(below(0x50) | below(2) << 7);
      if (stored == kI4) all[i] = static_cast<char>(random());
      if (stored == kE5M2) all[i] = static_cast<char>(below(0x44) | below(2) << 7);
    }
    return all;
  }

  // Number i of n; of int4 the first half of them is in the lower bits.
  static double read(const char* all, int64_t i, int64_t n, Stored stored) {
    const uint8_t byte = static_cast<uint8_t>(all[stored == kI4 ? i % (n / 2) : i]);
    const double sign = byte & 0x80 ? -1 : 1;
    switch (stored) {
      case kF32: return reinterpret_cast<const float*>(all)[i];
      case kBF16: return widen(reinterpret_cast<const bf16*>(all)[i]);
      case kF16: return widen(reinterpret_cast<const f16*>(all)[i]);
      case kI8: return static_cast<int8_t>(byte);
      case kI4: return static_cast<int8_t>(i < n / 2 ? byte << 4 : byte & 0xf0) / 16;
      case kE4M3: {
        const int e = byte >> 3 & 15, f = byte & 7;
        return sign * (e ? ldexp(1 + f / 8.0, e - 7) : ldexp(f / 8.0, -6));
      }
      default: {
        const int e = byte >> 2 & 31, f = byte & 3;
        return sign * (e ? ldexp(1 + f / 4.0, e - 15) : ldexp(f / 4.0, -14));
      }
    }
  }

  // Returns whether a call is right.
  bool call() {
    DecodeCall c = {};
    const bool packed = maybe(30);
    c.B = 1 + below(3), c.T = of({1, 1, 2, 4, 16, 17, 70}), c.K = 1 + below(3), c.H = c.K * of({1, 2, 3, 4, 8});
    c.D = of({1, 7, 16, 64, 80, 128, 256}), c.Dv = maybe(70) ? c.D : of({1, 5, 33, 64, 96});
    c.stored = static_cast<Stored>(below(7));
    if (c.stored == kI4) c.D += c.D % 2, c.Dv += c.Dv % 2;
    c.dtype = c.stored < kI8 && maybe(70) ? c.stored : of({kF32, kBF16, kF16});
#if defined(ATTNOPS_AMX)
    const int64_t G = of<int64_t>({1, 3, 8, 24, 32, 40});
    c.stored = c.dtype = kBF16, c.H = c.K * G;
    if (c.T * G < 24) c.T = (23 + G) / G + below(9);
#endif
    const bool paged = maybe(50), layered = maybe(30);
    c.n = paged ? of({1, 3, 16, 128}) : of({1, 2, 31, 64, 300, 1500});
    c.M = paged ? 1 + below(c.n > 16 ? 3 : 24) : 0;
    c.blocks = paged ? 1 + below(12) : c.B;
    c.S = paged ? c.M * c.n : c.n;
    const int64_t layers = layered ? 3 : 1;
    c.base = layered ? below(3) * c.blocks : 0;
    const int64_t tokens = layers * c.blocks * c.K * c.n, size = c.stored == kF32 ? 4 : c.stored < kI8 ? 2 : 1;
    const int content = static_cast<int>(c.Dv <= c.D ? below(3) : below(2));
    const int64_t in_byte = c.stored == kI4 ? 2 : 1, D = c.D / in_byte, Dv = c.Dv / in_byte;
    const int64_t width = content == 0 ? D : content == 1 ? D + Dv + below(3) : D + below(3);
    char* key = numbers(tokens * width, c.stored);
    c.key = key, c.key_stride = width * size;
    if (content == 0) c.value = numbers(tokens * Dv, c.stored), c.value_stride = Dv * size;
    if (content == 1) c.value = key + (width - Dv) * size, c.value_stride = width * size;
    if (content == 2) c.value = key, c.value_stride = width * size;
    c.key_count = D * size, c.value_count = Dv * size;
    c.key_head = c.n * c.key_stride, c.value_head = c.n * c.value_stride;
    if (content == 0 && maybe(30)) {  // plain arrays: heads of a token after each other
      c.key_head = c.key_stride, c.value_head = c.value_stride;
      c.key_stride *= c.K, c.value_stride *= c.K;
    }
    c.key_block = c.K * c.n * c.key_count, c.value_block = c.K * c.n * c.value_count;
    if (content != 0) c.key_block = c.value_block = c.K * c.key_head;
    c.scales = c.stored < kI8 ? kNoScale : of({kByTensor, kByHead, kByToken});
    const int64_t scales = c.scales == kByTensor ? 1 : c.scales == kByHead ? c.K : c.scales == kByToken ? tokens : 0;
    float *key_scale = make<float>(scales), *value_scale = make<float>(scales);
    for (int64_t i = 0; i < scales; ++i) key_scale[i] = 0.001f * (1 + below(30)), value_scale[i] = 0.001f * (1 + below(30));
    c.key_scale = key_scale, c.value_scale = value_scale;
    if (paged) {
      int32_t* table = make<int32_t>(c.B * c.M);
      for (int64_t i = 0; i < c.B * c.M; ++i) table[i] = maybe(80) ? below(c.blocks) : garbage();
      c.table = table;
    }
    const int64_t batch = packed ? 1 : c.B;
    c.query = numbers(batch * c.T * c.H * c.D, c.dtype);
    c.out_dtype = c.dtype;
    c.out = numbers(batch * c.T * c.H * c.Dv, c.dtype);
    c.lse = make<float>(batch * c.H * c.T), c.highest = make<float>(batch * c.H * c.T);
    const bool is_garbage = maybe(30), ring = !paged && maybe(40);
    int32_t *positions = make<int32_t>(batch * c.T), *rows = make<int32_t>(c.B * 4);
    for (int64_t b = 0; b < c.B; ++b) {
      const int64_t length = below(c.S + 1), newest = ring ? below(c.S) : c.S - 1;
      int32_t* row = rows + 4 * b;
      row[0] = ring ? static_cast<int32_t>(below(1000)) : -static_cast<int32_t>(below(4)), row[3] = static_cast<int32_t>(newest);
      row[2] = static_cast<int32_t>(ring ? newest + 1 : length), row[1] = static_cast<int32_t>(row[2] - below(length + 1));
      for (int64_t t = 0; t < c.T && b < batch; ++t) positions[b * c.T + t] = static_cast<int32_t>(row[2] + row[0] - c.T + t - below(2) * below(9));
      if (is_garbage) {
        for (int i = 0; i < 4; ++i)
          if (maybe(40)) row[i] = garbage();
        if (maybe(40)) positions[b % batch * c.T + below(c.T)] = garbage();
      }
    }
    if (packed) {  // runs of queries of rows in any order, some of them of no row
      int32_t* row_of = make<int32_t>(c.T);
      int32_t row = 0;
      for (int64_t t = 0; t < c.T; ++t) row_of[t] = row = t && maybe(90) ? row : maybe(80) ? below(c.B) : garbage();
      c.packed = row_of;
    }
    c.positions = positions, c.rows = rows;
    c.band_by_batch = maybe(30), c.band_by_head = maybe(30);
    const int64_t of_bands = packed ? c.T : c.B, bands = (c.band_by_batch ? of_bands : 1) * (c.band_by_head ? c.H : 1);
    int32_t *left = make<int32_t>(bands), *right = make<int32_t>(bands);
    for (int64_t i = 0; i < bands; ++i) left[i] = of<int32_t>({INT32_MAX, INT32_MAX, 0, 5, 40}), right[i] = of<int32_t>({INT32_MAX, 0, 0, 3});
    c.left = left, c.right = right;
    if (maybe(40)) {
      const int64_t b = of({int64_t{1}, batch}), h = of({int64_t{1}, c.H}), t = of({int64_t{1}, c.T});
      uint8_t* bits = make<uint8_t>(b * h * t * c.S);
      for (int64_t i = 0; i < b * h * t * c.S; ++i) bits[i] = maybe(50);
      c.bits = bits, c.bits_b = b > 1 ? h * t * c.S : 0, c.bits_h = h > 1 ? t * c.S : 0, c.bits_t = t > 1 ? c.S : 0;
    }
    if (maybe(30)) {
      const int64_t b = of({int64_t{1}, batch}), h = of({int64_t{1}, c.H}), t = of({int64_t{1}, c.T}), s = of({int64_t{1}, c.S});
      float* bias = make<float>(b * h * t * s);
      for (int64_t i = 0; i < b * h * t * s; ++i) bias[i] = number();
      c.bias = bias;
      c.bias_b = b > 1 ? h * t * s : 0, c.bias_h = h > 1 ? t * s : 0, c.bias_t = t > 1 ? s : 0, c.bias_s = s > 1 ? 1 : 0;
    }
    if (maybe(30)) {
      float* sinks = make<float>(c.H);
      for (int64_t i = 0; i < c.H; ++i) sinks[i] = number();
      c.sinks = sinks;
    }
    c.scale = 1 / sqrtf(static_cast<float>(c.D)), c.cap = maybe(20) ? 2.0f : 0.0f;
    Shuffled parallel(random);
    if (!decode(c, parallel)) return false;
    return random() % one_in || is_right(c);
  }

  bool is_right(const DecodeCall& c) {
    const double eps = c.dtype == kF32 && c.stored != kBF16 && c.stored != kF16 ? 2e-5 : 2e-2;
    const double step = c.dtype == kF16 ? 6e-8 : 0;  // of its subnormal numbers
    std::vector<double> weight(c.S), out(c.Dv), size(c.Dv);
    for (int64_t batch = 0; batch < (c.packed ? 1 : c.B); ++batch)
      for (int64_t h = 0; h < c.H; ++h)
        for (int64_t t = 0; t < c.T; ++t) {
          const int64_t k = h / (c.H / c.K), query = (batch * c.T + t) * c.H + h, b = c.packed ? c.packed[t] : batch;
          const Query q{batch, b, k, h, t};
          double highest = -INFINITY, sum = 0;
          for (int64_t s = 0; s < c.S; ++s) {
            weight[s] = -INFINITY;
            const int64_t at = token(c, q, s);
            if (at < 0) continue;
            double x = 0;
            for (int64_t d = 0; d < c.D; ++d) x += read(c.query, query * c.D + d, 0, c.dtype) * read(key(c, at), d, c.D, c.stored);
            x *= c.scale * scale(c, c.key_scale, k, at);
            if (c.cap > 0) x = c.cap * ::tanh(x / c.cap);
            if (c.bias) x += c.bias[batch * c.bias_b + h * c.bias_h + t * c.bias_t + s * c.bias_s];
            weight[s] = x;
            highest = fmax(highest, x);
          }
          const bool sees_any = highest > -INFINITY;
          const int64_t of_scores = (batch * c.H + h) * c.T + t;
          if (!is_near(c.highest[of_scores], highest, 3 * eps)) return wrong(c, "highest", batch, h, t, 0, c.highest[of_scores], highest);
          if (sees_any && c.sinks) {
            const double with_sink = fmax(highest, c.sinks[h]);
            sum = exp(c.sinks[h] - with_sink), highest = with_sink;
          }
          std::fill(out.begin(), out.end(), 0), std::fill(size.begin(), size.end(), 0);
          for (int64_t s = 0; s < c.S && sees_any; ++s) {
            if (weight[s] == -INFINITY) continue;
            const int64_t at = token(c, q, s);
            const double w = exp(weight[s] - highest), factor = scale(c, c.value_scale, k, at);
            sum += w;
            for (int64_t d = 0; d < c.Dv; ++d) {
              const int64_t n = c.value == c.key ? c.D : c.Dv;
              const double v = read(value(c, at), d, n, c.stored) * factor;
              out[d] += w * v, size[d] += w * fabs(v);
            }
          }
          double largest = 0;
          for (int64_t d = 0; d < c.Dv; ++d) largest = fmax(largest, sees_any ? size[d] / sum : 0);
          for (int64_t d = 0; d < c.Dv; ++d) {
            const double found = read(c.out, query * c.Dv + d, 0, c.dtype), wanted = sees_any ? out[d] / sum : 0;
            if (!(fabs(found - wanted) <= eps * largest + step)) return wrong(c, "out", b, h, t, d, found, wanted);
          }
          const double found = c.lse[of_scores], wanted = sees_any ? highest + log(sum) : -INFINITY;
          if (!is_near(found, wanted, eps)) return wrong(c, "lse", b, h, t, 0, found, wanted);
        }
    return true;
  }

  static bool is_near(double a, double b, double eps) { return a == b || fabs(a - b) <= eps; }

  static double scale(const DecodeCall& c, const float* scales, int64_t k, int64_t at) {
    return c.scales == kByTensor ? scales[0] : c.scales == kByHead ? scales[k] : c.scales == kByToken ? scales[at] : 1;
  }

  // A query: its batch of arrays by query, its row of the cache, kv head, head and index.
  struct Query {
    int64_t batch, b, k, h, t;
  };

  // The token in slot s that a query sees, counted through blocks, kv heads and slots; below 0 if it sees none.
  static int64_t token(const DecodeCall& c, const Query& q, int64_t s) {
    if (q.b < 0 || q.b >= c.B) return -1;
    const int32_t* row = c.rows + 4 * q.b;
    const int64_t position = c.positions[q.batch * c.T + q.t], newest = row[3] < 0 ? 0 : row[3] >= c.S ? c.S - 1 : row[3];
    const int64_t number = s > newest ? s - c.S : s, lead = c.packed ? q.t : q.b;
    const int64_t band = (c.band_by_batch ? lead * (c.band_by_head ? c.H : 1) : 0) + (c.band_by_head ? q.h : 0);
    if (position < 0 || number < row[1] || number >= row[2] - leaves_out_newest) return -1;
    if (c.left[band] != INT32_MAX && number + row[0] < position - c.left[band]) return -1;
    if (c.right[band] != INT32_MAX && number + row[0] > position + c.right[band]) return -1;
    if (c.bits && !c.bits[q.batch * c.bits_b + q.h * c.bits_h + q.t * c.bits_t + s]) return -1;
    int64_t block = q.b;
    if (c.M) block = c.table[q.b * c.M + s / c.n];
    if (block < 0 || block >= c.blocks) return -1;
    return ((c.base + block) * c.K + q.k) * c.n + s % c.n;
  }

  static const char* key(const DecodeCall& c, int64_t at) {
    return c.key + at / c.n / c.K * c.key_block + at / c.n % c.K * c.key_head + at % c.n * c.key_stride;
  }
  static const char* value(const DecodeCall& c, int64_t at) {
    return c.value + at / c.n / c.K * c.value_block + at / c.n % c.K * c.value_head + at % c.n * c.value_stride;
  }

  static bool wrong(const DecodeCall& c, const char* what, int64_t b, int64_t h, int64_t t, int64_t d, double found, double wanted) {
    printf("%s[%d, %d, %d, %d] is %g, must be %g; B %d T %d H %d K %d D %d Dv %d S %d n %d M %d stored %d dtype %d scales %d bits %d\n",
           what, (int)b, (int)t, (int)h, (int)d, found, wanted, (int)c.B, (int)c.T, (int)c.H, (int)c.K, (int)c.D, (int)c.Dv,
           (int)c.S, (int)c.n, (int)c.M, c.stored, c.dtype, c.scales, c.bits != nullptr);
    return false;
  }
};

}  // namespace

int main(int count, char** arguments) {
  const int calls = count > 1 ? atoi(arguments[1]) : 1000;
  const unsigned seed = count > 2 ? static_cast<unsigned>(atoi(arguments[2])) : 0;
  one_in = count > 3 ? static_cast<unsigned>(atoi(arguments[3])) : 1;
  leaves_out_newest = count > 4;
  for (int i = 0; i < calls; ++i) {
    Fuzz fuzz(seed + static_cast<unsigned>(i));
    if (!fuzz.call()) {
      printf("call %d of seed %u is wrong\n", i, seed);
      return 1;
    }
  }
  printf("%d calls are right\n", calls);
}
