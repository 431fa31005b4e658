// The kernels of each instruction set, and which of them this processor runs.
#pragma once

#include "decode.h"
#include "flash.h"
#include "linear.h"
#include "parallel.h"

namespace attnops {

// What a file of an instruction set defines, each kernel in its `.inc` file.
struct Kernels {
  const char* name;  // the file's ATTNOPS_ISA
  void (*twice)(const float* x, float* y, int64_t n);  // tests of the library: y = 2 x
  bool (*forward)(const ForwardCall& call, Parallel& parallel);  // false: no memory
  bool (*backward)(const BackwardCall& call, Parallel& parallel);
  bool (*decode)(const DecodeCall& call, Parallel& parallel);
  bool (*linear)(const LinearCall& call, Parallel& parallel);
};

// The instruction sets that CMakeLists.txt compiles for this processor's family.
extern const Kernels kernels_amx, kernels_avx512_bf16, kernels_avx512, kernels_avx2, kernels_neon_bf16, kernels_neon,
    kernels_baseline, kernels_amx_emulated;

// The first that this processor has; or the one that ATTNOPS_CPU_ISA names, read at the first call. Null if the
// processor has no such instructions, or the name is unknown.
const Kernels* kernels();

}  // namespace attnops
