// Random calls of the flash kernels of one instruction set, forward and backward, each held to a plain computation in
// double; the tile map is often garbage. Built with the address sanitizer, so that a read outside of an array ends the
// program: each array has an allocation of its own, of exactly its size. Arguments: the number of calls, a seed, `one_in`,
// and, to see that a wrong result is found, any fourth one: the plain computation then hides the newest key.
#if defined(ATTNOPS_AMX)
#include "isa.h"
static const attnops::Kernels others{};  // of other dtypes, which are left out
#define ATTNOPS_OTHERS others
#endif
#include "kernels.inc"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "draws.h"

namespace {

using namespace attnops;
using namespace attnops::ATTNOPS_ISA;

bool hides_newest = false;

struct Fuzz : Draws {
  using Draws::Draws;
  float number() { return static_cast<float>(below(2001) - 1000) / 800.0f; }
  float* floats(int64_t n) {
    float* all = make<float>(n);
    for (int64_t i = 0; i < n; ++i) all[i] = number();
    return all;
  }
  void* numbers(int64_t n, Float type) {
    if (type == Float::f32) return floats(n);
    uint16_t* all = make<uint16_t>(n);
    for (int64_t i = 0; i < n; ++i)
      type == Float::bf16 ? narrow(reinterpret_cast<bf16*>(all) + i, number()) : narrow(reinterpret_cast<f16*>(all) + i, number());
    return all;
  }
  static double read(const void* all, int64_t i, Float type) {
    switch (type) {
      case Float::f32: return static_cast<const float*>(all)[i];
      case Float::bf16: return widen(static_cast<const bf16*>(all)[i]);
      default: return widen(static_cast<const f16*>(all)[i]);
    }
  }

  bool close(const char* what, double found, double expected, double allowed) const {
    if (std::fabs(found - expected) <= allowed || found == expected) return true;
    std::printf("%s is %.9g, but must be %.9g within %.3g\n", what, found, expected, allowed);
    return false;
  }

  // Returns whether a call is right.
  bool call() {
    Scoring s{};
    s.B = 1 + below(2), s.K = 1 + below(2), s.H = s.K * (1 + below(3));
    s.T = 1 + below(maybe(20) ? 130 : 30), s.S = 1 + below(maybe(20) ? 300 : 70);
    s.D = 1 + below(70), s.Dv = 1 + below(70);
    const Float types[] = {Float::f32, Float::bf16, Float::f16};
#if defined(ATTNOPS_AMX)
    const Float type = Float::bf16;  // the others are another set's
#else
    const Float type = types[below(3)];
#endif
    s.scale = number() / 3, s.cap = maybe(30) ? 1.5f : 0.0f;
    s.low = maybe(50) ? INT64_MIN / 2 : below(20) - 10, s.high = maybe(50) ? INT64_MAX / 2 : s.low / 2 + below(40);
    if (maybe(60)) {
      s.bq = 1 + below(40), s.bk = PANEL * (1 + below(3));
      s.nq = ceil_div(s.T, s.bq), s.nk = ceil_div(s.S, s.bk);
      const int64_t batches = maybe(50) ? s.B : 1, heads = maybe(50) ? s.H : 1;
      s.tiles_head = heads > 1 ? s.nq * s.nk : 0, s.tiles_batch = batches > 1 ? heads * s.nq * s.nk : 0;
      s.slots = maybe(80) ? 1 + below(5) : 0;
      int32_t* tiles = make<int32_t>(batches * heads * s.nq * s.nk);
      for (int64_t i = 0; i < batches * heads * s.nq * s.nk; ++i)
        tiles[i] = static_cast<int32_t>(maybe(5) ? (maybe(50) ? INT32_MAX : INT32_MIN + 9) - below(9) : below(s.slots + 2) - 2);
      s.tiles = tiles;
      if (maybe(50)) {
        const int64_t copies = maybe(50) ? s.B : 1, words = s.slots * s.bq * (s.bk / PANEL);
        uint32_t* bits = make<uint32_t>(copies * words);
        for (int64_t i = 0; i < copies * words; ++i) bits[i] = random();
        s.bits = bits, s.bits_batch = copies > 1 ? words : 0;
      } else {
        s.slots = 0;
        const int64_t copies = maybe(50) ? s.B : 1;
        int32_t *q = make<int32_t>(copies * s.T), *kv = make<int32_t>(copies * s.S);
        for (int64_t i = 0; i < copies * s.T; ++i) q[i] = static_cast<int32_t>(below(3));
        for (int64_t i = 0; i < copies * s.S; ++i) kv[i] = static_cast<int32_t>(below(3));
        s.q_ids = q, s.kv_ids = kv;
        s.q_ids_batch = copies > 1 ? s.T : 0, s.kv_ids_batch = copies > 1 ? s.S : 0;
      }
    }
    int64_t bias_floats = 0;
    if (maybe(40)) {
      const int64_t batches = maybe(50) ? s.B : 1, heads = maybe(50) ? s.H : 1;
      s.bias_type = types[below(3)];
      const bool table = maybe(30);
      const int64_t rows = !table && maybe(70) ? s.T : 1, columns = table ? s.T + s.S - 1 : maybe(70) ? s.S : 1;
      bias_floats = batches * heads * rows * columns;
      s.bias = numbers(bias_floats, s.bias_type);
      s.bias_key = columns > 1 || table ? 1 : 0, s.bias_query = table ? -1 : rows > 1 ? columns : 0;
      if (s.S == 1 && !table) s.bias_key = 0;
      s.bias_head = heads > 1 ? rows * columns : 0, s.bias_batch = batches > 1 ? heads * rows * columns : 0;
      if (table) s.bias = static_cast<const char*>(s.bias) + (s.T - 1) * (s.bias_type == Float::f32 ? 4 : 2);
    }
    if (maybe(30)) {
      uint32_t* rows = make<uint32_t>(s.B * s.H * s.T);
      for (int64_t i = 0; i < s.B * s.H * s.T; ++i) rows[i] = random();
      s.dropout = rows, s.dropout_spread = 0x27D4EB2Fu, s.dropout_threshold = 1u << 22, s.dropout_scale = 1 / 0.75f;
    }
    if (maybe(30)) s.sinks = floats(s.B * s.H), s.sinks_batch = s.H;

    const int64_t rows = s.B * s.H * s.T, q_size = rows * s.D, k_size = s.B * s.S * s.K * s.D, v_size = s.B * s.S * s.K * s.Dv;
    ForwardCall forward_call{};
    forward_call.scoring = s, forward_call.type = type, forward_call.out_type = Float::f32;
    const void *q = forward_call.query = numbers(q_size, type), *k = forward_call.key = numbers(k_size, type);
    const void* v = forward_call.value = numbers(v_size, type);
    float* const out = make<float>(rows * s.Dv);
    float *const lse = make<float>(rows), *const residual = make<float>(rows), *const most = make<float>(rows);
    forward_call.out = out, forward_call.lse = lse, forward_call.residual = residual, forward_call.max_logits = most;
#if defined(ATTNOPS_AMX)
    const bool has_kernel = s.T * (s.H / s.K) >= decoding::kManyRows;  // that of fewer rows is another set's
#else
    const bool has_kernel = true;
#endif
    forward_call.in_place = has_kernel && !s.dropout && (!s.bias || s.bias_type == Float::f32) && maybe(50);
    Shuffled parallel(random);
    if (!ATTNOPS_ISA::forward_either(forward_call, parallel)) return false;

    BackwardCall back{};
    back.scoring = s, back.type = type, back.query = q, back.key = k, back.value = v;
    const Float wide = type == Float::f16 ? Float::f32 : type;
    const void* const d_out = back.d_out = numbers(rows * s.Dv, wide);
    float* const delta = floats(rows);
    back.lse = lse, back.residual = residual, back.delta = delta, back.d_type = Float::f32;
    float *const dq = make<float>(q_size), *const dk = make<float>(k_size), *const dv = make<float>(v_size);
    back.d_query = dq, back.d_key = dk, back.d_value = dv;
    back.bias_floats = bias_floats, back.d_bias = bias_floats && maybe(70) ? make<float>(bias_floats) : nullptr;
    if (!ATTNOPS_ISA::backward(back, parallel)) return false;

    if (random() % one_in) return true;
    // In double; 16-bit products may round weights to bfloat16.
    const double loose = type == Float::bf16 ? 2e-2 : 3e-5;
    std::vector<double> eq(q_size), ek(k_size), ev(v_size), eb(bias_floats), p(s.S), x(s.S), slope(s.S), keep(s.S);
    const int64_t shift = s.bias_query < 0 ? s.T - 1 : 0;
    double size = 1;
    for (int64_t b = 0; b < s.B; ++b)
      for (int64_t h = 0; h < s.H; ++h)
        for (int64_t i = 0; i < s.T; ++i) {
          const int64_t kv = h / (s.H / s.K), at = (b * s.H + h) * s.T + i, qi = ((b * s.T + i) * s.H + h);
          double m = -INFINITY, l = 0, highest = -INFINITY;
          for (int64_t j = 0; j < s.S; ++j) {
            bool seen = i - j >= s.low && i - j <= s.high && !(hides_newest && j == s.S - 1);
            if (s.tiles && seen) {
              const int64_t tile = s.tiles[b * s.tiles_batch + h * s.tiles_head + i / s.bq * s.nk + j / s.bk];
              if (tile == TILE_EMPTY) seen = false;
              else if (tile != TILE_FULL && s.q_ids) seen = s.q_ids[b * s.q_ids_batch + i] == s.kv_ids[b * s.kv_ids_batch + j];
              else if (tile != TILE_FULL) {
                seen = tile >= 0 && tile < s.slots && s.bits &&
                       s.bits[b * s.bits_batch + (tile * s.bq + i % s.bq) * (s.bk / PANEL) + j % s.bk / PANEL] >> (j % PANEL) & 1;
              }
            }
            double dot = 0;
            for (int64_t d = 0; d < s.D; ++d) dot += read(q, qi * s.D + d, type) * read(k, ((b * s.S + j) * s.K + kv) * s.D + d, type);
            dot *= s.scale, slope[j] = 1;
            if (s.cap > 0) slope[j] = 1 - std::pow(std::tanh(dot / s.cap), 2), dot = s.cap * std::tanh(dot / s.cap);
            if (s.bias) dot += read(s.bias, b * s.bias_batch + h * s.bias_head + i * s.bias_query + j * s.bias_key, s.bias_type);
            x[j] = seen ? dot : -INFINITY;
            highest = std::fmax(highest, x[j]);
            keep[j] = 1;
            if (s.dropout) {
              uint32_t hash = s.dropout[at] + static_cast<uint32_t>(j) * s.dropout_spread;
              hash = (hash ^ (hash >> 16)) * 0x85EBCA6Bu, hash = (hash ^ (hash >> 13)) * 0xC2B2AE35u, hash ^= hash >> 16;
              keep[j] = (hash >> 8) >= s.dropout_threshold ? s.dropout_scale : 0;
            }
          }
          m = s.sinks && highest > -INFINITY ? std::fmax(highest, s.sinks[b * s.H + h]) : highest;
          for (int64_t j = 0; j < s.S; ++j) l += p[j] = m == -INFINITY ? 0 : std::exp(x[j] - m);
          if (s.sinks && highest > -INFINITY) l += std::exp(s.sinks[b * s.H + h] - m);
          if (!close("logsumexp", lse[at] + residual[at], l > 0 ? m + std::log(l) : -INFINITY, loose)) return false;
          if (!close("largest score", most[at], highest, loose)) return false;
          for (int64_t d = 0; d < s.Dv; ++d) {
            double sum = 0;
            for (int64_t j = 0; j < s.S; ++j) sum += l > 0 ? p[j] / l * keep[j] * read(v, ((b * s.S + j) * s.K + kv) * s.Dv + d, type) : 0;
            if (!close("output", out[qi * s.Dv + d], sum, loose)) return false;
          }
          for (int64_t j = 0; j < s.S; ++j) {
            const double weight = l > 0 ? p[j] / l : 0;
            double dp = 0;
            const int64_t kj = (b * s.S + j) * s.K + kv;
            for (int64_t d = 0; d < s.Dv; ++d) {
              const double o = read(d_out, qi * s.Dv + d, wide);
              dp += o * read(v, kj * s.Dv + d, type);
              ev[kj * s.Dv + d] += weight * keep[j] * o;
            }
            const double ds = weight * (dp * keep[j] - delta[at]);
            if (bias_floats) eb[shift + b * s.bias_batch + h * s.bias_head + i * s.bias_query + j * s.bias_key] += ds;
            for (int64_t d = 0; d < s.D; ++d) {
              eq[qi * s.D + d] += ds * slope[j] * s.scale * read(k, kj * s.D + d, type);
              ek[kj * s.D + d] += ds * slope[j] * s.scale * read(q, qi * s.D + d, type);
            }
          }
        }
    for (const auto* all : {&eq, &ek, &ev, &eb})
      for (const double each : *all) size = std::fmax(size, std::fabs(each));
    for (int64_t i = 0; i < q_size; ++i)
      if (!close("gradient of the query", dq[i], eq[i], loose * size)) return false;
    for (int64_t i = 0; i < k_size; ++i)
      if (!close("gradient of the key", dk[i], ek[i], loose * size)) return false;
    for (int64_t i = 0; i < v_size; ++i)
      if (!close("gradient of the value", dv[i], ev[i], loose * size)) return false;
    for (int64_t i = 0; back.d_bias && i < bias_floats; ++i)
      if (!close("gradient of the bias", back.d_bias[i], eb[i], loose * size)) return false;
    return true;
  }
};

}  // namespace

int main(int argc, char** argv) {
  const int calls = std::atoi(argv[1]);
  const unsigned seed = static_cast<unsigned>(std::atoi(argv[2]));
  one_in = argc > 3 ? static_cast<unsigned>(std::atoi(argv[3])) : 1;
  hides_newest = argc > 4;
  for (int i = 0; i < calls; ++i) {
    Fuzz fuzz(seed * 1000003u + static_cast<unsigned>(i));
    if (!fuzz.call()) {
      std::printf("call %d of seed %u is wrong\n", i, seed);
      return 1;
    }
  }
  return 0;
}
