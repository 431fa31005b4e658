// A call of attention over a cache, as kernels see it.
#pragma once

#include <stdint.h>

#include "parallel.h"

namespace attnops {

// The dtypes of stored numbers. Queries may have the first three. A byte has two numbers of int4: the first half of the
// features in the lower 4 bits.
enum Stored { kF32, kBF16, kF16, kI8, kE4M3, kE5M2, kI4 };

// What has a separate scale.
enum Scales { kNoScale, kByTensor, kByHead, kByToken };

// Blocks are [blocks, K, n, width], as in `attnops_caches.Store`. The token with the number j is in slot j of its row, or
// in slot j + S if j is negative (a ring). Kernels read no block, page or slot outside the arrays, whatever the numbers in
// `table`, `rows`, `positions` and `packed` are.
//
// B rows have T queries each. Packed rows have T queries together, and arrays by query have the batch 1.
struct DecodeCall {
  int64_t B, T, H, K, D, Dv;
  int64_t S;       // slots of a row
  int64_t n;       // slots of a block
  int64_t blocks;  // blocks of this layer
  int64_t base;    // index of this layer's first block among the blocks of all layers
  int64_t M;       // pages of a row; 0 without a table
  const int32_t* table;  // [B, M]

  Stored stored;
  const char *key, *value;  // of all layers; `value` points to the values of the first token
  int64_t key_stride, value_stride;  // bytes from one token to the next
  int64_t key_head, value_head;      // bytes from one kv head to the next
  int64_t key_block, value_block;    // bytes from one block to the next
  int64_t key_count, value_count;    // bytes of a token's key and value
  Scales scales;
  const float *key_scale, *value_scale;  // [1], [K] or [all blocks, K, n]

  Stored dtype, out_dtype;  // of the query, and of the output: the same or float32
  const char* query;   // [B, T, H, D]
  char* out;           // [B, T, H, Dv]
  float *lse, *residual, *highest;  // [B, H, T] the logsumexp, its rounding error, the largest score, each or null

  const int32_t* packed;     // [T] the row of each packed query, no row if out of range; null if queries are not packed
  const int32_t* positions;  // of queries [B, T]; below 0 for padding
  const int32_t* rows;       // [B, 4]: position minus number; the first and one after the last number; the newest slot
  const int32_t *left, *right;  // positions that a query sees before and after its own, [1 or B (packed: T), 1 or H]
  bool band_by_batch, band_by_head;
  const uint8_t* bits;  // [1 or B, 1 or H, 1 or T, S] booleans by slot, or null
  int64_t bits_b, bits_h, bits_t;  // strides, 0 where the size is 1
  const float* bias;    // [1 or B, 1 or H, 1 or T, 1 or S], added to scores, or null
  int64_t bias_b, bias_h, bias_t, bias_s;
  const float* sinks;   // [1 or B, H], or null
  int64_t sinks_b;
  float scale, cap;     // cap: 0 for none
};

}  // namespace attnops
