// Attention of query [B, T, H, D] over key [B, S, K, D] and value [B, S, K, Dv], float32: [B, T, H, Dv].
// Query i sees key j where low <= i - j <= high; a query that sees no key gives 0.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

static ffi::Error Attend(int64_t low, int64_t high, float scale, ffi::Buffer<ffi::F32> query, ffi::Buffer<ffi::F32> key,
                         ffi::Buffer<ffi::F32> value, ffi::ResultBuffer<ffi::F32> out) {
  const auto q_shape = query.dimensions(), v_shape = value.dimensions();
  const int64_t B = q_shape[0], T = q_shape[1], H = q_shape[2], D = q_shape[3];
  const int64_t S = v_shape[1], K = v_shape[2], Dv = v_shape[3];
  std::vector<double> weights(S), sums(Dv);
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t i = 0; i < T; ++i) {
      const int64_t first = std::max<int64_t>(0, i - std::min(high, i));
      const int64_t last = std::min(S - 1, i - std::max(low, i - S + 1));
      for (int64_t h = 0; h < H; ++h) {
        const int64_t k = h / (H / K);
        const float* q = query.typed_data() + ((b * T + i) * H + h) * D;
        double highest = -std::numeric_limits<double>::infinity(), total = 0;
        for (int64_t j = first; j <= last; ++j) {
          const float* other = key.typed_data() + ((b * S + j) * K + k) * D;
          double score = 0;
          for (int64_t d = 0; d < D; ++d) score += double(q[d]) * other[d];
          weights[j] = score * scale;
          highest = std::max(highest, weights[j]);
        }
        std::fill(sums.begin(), sums.end(), 0);
        for (int64_t j = first; j <= last; ++j) {
          const float* row = value.typed_data() + ((b * S + j) * K + k) * Dv;
          const double weight = std::exp(weights[j] - highest);
          total += weight;
          for (int64_t d = 0; d < Dv; ++d) sums[d] += weight * row[d];
        }
        float* result = out->typed_data() + ((b * T + i) * H + h) * Dv;
        for (int64_t d = 0; d < Dv; ++d) result[d] = total == 0 ? 0 : float(sums[d] / total);
      }
    }
  }
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(attend, Attend,
                              ffi::Ffi::Bind()
                                  .Attr<int64_t>("low")
                                  .Attr<int64_t>("high")
                                  .Attr<float>("scale")
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
