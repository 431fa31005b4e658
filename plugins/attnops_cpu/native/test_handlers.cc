// A handler for tests of the library and of the pool.
#include <algorithm>

#include "handlers.h"

namespace attnops {

static ffi::Error twice(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::F32> y) {
  if (!kernels()) return no_isa();
  const int64_t n = static_cast<int64_t>(x.element_count()), step = 1024;
  FfiParallel parallel(pool);
  const float* from = x.typed_data();
  float* to = y->typed_data();
  parallel((n + step - 1) / step, [&](int64_t i) { kernels()->twice(from + i * step, to + i * step, std::min(step, n - i * step)); });
  return ffi::Error::Success();
}

}  // namespace attnops

ATTNOPS_HANDLER(attnops_cpu_twice, attnops::twice,
                xla::ffi::Ffi::Bind().Ctx<xla::ffi::ThreadPool>().Arg<xla::ffi::Buffer<xla::ffi::F32>>().Ret<xla::ffi::Buffer<xla::ffi::F32>>())
