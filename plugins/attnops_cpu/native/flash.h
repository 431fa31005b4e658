// A call of flash attention as kernels see it: pointers, lengths and strides, all checked by the handlers.
#pragma once

#include <stdint.h>

namespace attnops {

enum class Float : int32_t { f32 = 0, bf16 = 1, f16 = 2 };

// Keys per panel: the unit in which keys are packed, skipped and masked, and the bits of a word.
constexpr int PANEL = 32;

// The entries of the tile map; numbers from 0 on are the index of a PARTIAL tile's bits in the bits of its batch.
constexpr int32_t TILE_EMPTY = -2, TILE_FULL = -1;

// The shapes and the scoring. Query i sees key j where all of these allow it: low <= i − j <= high; the tile map; and in
// tiles that are neither EMPTY nor FULL the ids, if there are any, else the bits.
struct Scoring {
  int64_t B, T, S, H, K, D, Dv;
  float scale;
  float cap;  // 0 for none
  int64_t low, high;
  const int32_t* tiles;  // [B or 1, H or 1, nq, nk]; null for all FULL
  int64_t tiles_batch, tiles_head, nq, nk, bq, bk;
  const uint32_t* bits;  // [B or 1, slots, bq, bk / PANEL]
  int64_t bits_batch, slots;
  const int32_t *q_ids, *kv_ids;  // [B or 1, T] and [B or 1, S]; null for none
  int64_t q_ids_batch, kv_ids_batch;
  const void* bias;  // null for none; strides are in elements, and the stride of keys is 0 or 1
  Float bias_type;
  int64_t bias_batch, bias_head, bias_query, bias_key;
  const uint32_t* dropout;  // the hash of each query, [B, H, T]; null for none
  uint32_t dropout_spread, dropout_threshold;
  float dropout_scale;  // of the weights that are kept
  const float* sinks;  // [B or 1, H]; null for none
  int64_t sinks_batch;
};

struct ForwardCall {
  Scoring scoring;
  Float type;  // of query, key and value
  const void *query, *key, *value;  // [B, T, H, D], [B, S, K, D], [B, S, K, Dv]
  Float out_type;
  void* out;  // [B, T, H, Dv]
  float *lse, *residual;  // [B, H, T]
  float* max_logits;  // [B, H, T]; null if not asked for
  bool in_place;      // by the kernel over caches, which packs nothing: without dropout, and with a float32 bias or none
};

struct BackwardCall {
  Scoring scoring;
  Float type;  // of query, key and value
  const void *query, *key, *value;
  const void* d_out;  // [B, T, H, Dv], of the same type; float32 for float16
  const float *lse, *residual, *delta;  // [B, H, T]
  Float d_type;  // of the gradients of query, key and value
  void *d_query, *d_key, *d_value;
  float* d_bias;  // of the bias's shape; null if not asked for
  int64_t bias_floats;
};

}  // namespace attnops
