// What handlers share. A handler checks shapes and dtypes, and calls a kernel of `kernels()`.
#pragma once

#include "isa.h"
#include "pool.h"
#include "xla/ffi/api/ffi.h"

namespace attnops {

namespace ffi = xla::ffi;

using FfiParallel = PoolParallel<ffi::ThreadPool>;

inline ffi::Error no_isa() {
  return ffi::Error(ffi::ErrorCode::kFailedPrecondition, "ATTNOPS_CPU_ISA names instructions that this processor does not have");
}
inline ffi::Error no_memory() { return ffi::Error(ffi::ErrorCode::kResourceExhausted, "attnops-cpu: out of memory"); }

}  // namespace attnops

// A handler whose symbol is exported; `attnops_cpu.library.TARGETS` must name it.
#define ATTNOPS_HANDLER(name, function, ...) \
  extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* name(XLA_FFI_CallFrame* frame); \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, function, (__VA_ARGS__));
