// A call of linear attention as the kernel sees it: pointers, lengths and strides, all checked by the handler.
#pragma once

#include <stdint.h>

#include "flash.h"

namespace attnops {

// Strides are in elements, 0 for arrays that all rows or tokens share. Arrays that a call does not have are null.
struct LinearCall {
  int64_t B, T, K, H, D, Dv;
  Float type;               // of query, key, value and out
  const void *query, *key;  // [B, T, K, D]
  const void* value;        // [B, T, H, Dv]
  const float* decay;       // [B, T, H], natural logarithms
  int64_t decay_batch, decay_token;
  const float* beta;         // [B, T, H]; null without the delta rule
  const uint8_t* is_token;   // [B, T], 0 for padding
  const uint8_t* starts;     // [B, T], 1 where the state is emptied before the token
  const float* initial;      // [B, H, D, Dv]; may be `state`
  float scale;
  void* out;     // [B, T, H, Dv]
  float* state;  // [B, H, D, Dv]
};

}  // namespace attnops
