// Tile registers of AMX: eight of 16 rows of 64 bytes, and products of bfloat16 between them. With ATTNOPS_AMX_EMULATED they
// are plain C++, bit for bit as Intel's manual defines them, so that the kernels can be built and tested on any machine.
#pragma once

#include "simd.h"

namespace attnops {
namespace ATTNOPS_ISA {

// The operand of `ldtilecfg`: palette 1, and for each tile its bytes per row and its rows.
struct alignas(64) TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

#if defined(ATTNOPS_AMX_EMULATED)

struct EmulatedTiles {
  TileConfig config;
  bool is_configured;
  alignas(64) uint8_t rows[8][16][64];
};
static thread_local EmulatedTiles emulated;

static inline void tile_configure(const TileConfig& config) {
  memset(&emulated, 0, sizeof(emulated));
  emulated.config = config;
  emulated.is_configured = true;
}
static inline void tile_release() { memset(&emulated, 0, sizeof(emulated)); }
static inline void tile_zero(int tile) {
  if (!emulated.is_configured) __builtin_trap();  // as the processor does
  memset(emulated.rows[tile], 0, sizeof(emulated.rows[tile]));
}
static inline void tile_load(int tile, const void* from, int64_t stride) {
  tile_zero(tile);
  for (int r = 0; r < emulated.config.rows[tile]; ++r)
    memcpy(emulated.rows[tile][r], (const char*)from + r * stride, emulated.config.row_bytes[tile]);
}
static inline void tile_store(int tile, void* to, int64_t stride) {
  if (!emulated.is_configured) __builtin_trap();
  for (int r = 0; r < emulated.config.rows[tile]; ++r)
    memcpy((char*)to + r * stride, emulated.rows[tile][r], emulated.config.row_bytes[tile]);
}

// Subnormal numbers are 0, before and after an operation.
static inline float flushed(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if (!(bits & 0x7f800000u)) bits &= 0x80000000u;
  memcpy(&x, &bits, 4);
  return x;
}
static inline float tile_number(int tile, int row, int i) {
  bf16 x;
  memcpy(&x, emulated.rows[tile][row] + 2 * i, 2);
  return flushed(widen(x));
}
// TDPBF16PS: c += a · b. Even and odd neighbours have separate sums, which are added to each other, then to c.
static inline void tile_dot(int c, int a, int b) {
  const TileConfig& config = emulated.config;
  const int columns = config.row_bytes[c] / 4, words = config.row_bytes[a] / 4;
  if (!emulated.is_configured || config.rows[a] != config.rows[c] || config.rows[b] != words ||
      config.row_bytes[b] != config.row_bytes[c])
    __builtin_trap();
  for (int m = 0; m < config.rows[c]; ++m) {
    float even[16] = {}, odd[16] = {}, sum[16];
    for (int k = 0; k < words; ++k) {
      const float low = tile_number(a, m, 2 * k), high = tile_number(a, m, 2 * k + 1);
      for (int n = 0; n < columns; ++n) {
        even[n] = flushed(__builtin_fmaf(low, tile_number(b, k, 2 * n), even[n]));
        odd[n] = flushed(__builtin_fmaf(high, tile_number(b, k, 2 * n + 1), odd[n]));
      }
    }
    memcpy(sum, emulated.rows[c][m], sizeof(sum));
    for (int n = 0; n < columns; ++n) sum[n] = flushed(flushed(sum[n]) + flushed(even[n] + odd[n]));
    memcpy(emulated.rows[c][m], sum, config.row_bytes[c]);
  }
}
static inline void tile_fence() {}

#else

// Macros, since the number of a tile is part of the instruction.
#define tile_configure(config) _tile_loadconfig(&(config))
#define tile_release() _tile_release()
#define tile_zero(tile) _tile_zero(tile)
#define tile_load(tile, from, stride) _tile_loadd(tile, from, stride)
#define tile_store(tile, to, stride) _tile_stored(tile, to, stride)
#define tile_dot(c, a, b) _tile_dpbf16ps(c, a, b)
// GCC doesn't know that loads of tiles read memory: earlier writes must be complete.
static ATTNOPS_INLINE void tile_fence() { asm volatile("" ::: "memory"); }

#endif

}  // namespace ATTNOPS_ISA
}  // namespace attnops
