// The handler of linear attention: checks shapes and dtypes, so that no kernel reads outside of an array.
#include <string>

#include "handlers.h"

namespace attnops {
namespace {

using Array = ::xla::ffi::AnyBuffer;

ffi::Error wrong(const char* what) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, std::string("attnops_cpu_linear: ") + what);
}

bool is_array(const Array& x, ffi::DataType type, std::initializer_list<int64_t> sizes) {
  const auto given = x.dimensions();
  return x.element_type() == type && given.size() == sizes.size() && std::equal(given.begin(), given.end(), sizes.begin());
}

// Arrays that a call does not have are empty.
bool given(const Array& x) { return x.element_count() > 0; }

ffi::Error linear(ffi::ThreadPool pool, Array query, Array key, Array value, Array decay, Array beta, Array is_token, Array starts,
                  Array initial, ffi::Result<Array> out, ffi::Result<Array> state, float scale) {
  if (!kernels()) return no_isa();
  const auto q = query.dimensions(), v = value.dimensions(), g = decay.dimensions();
  if (q.size() != 4 || v.size() != 4) return wrong("query and value must have 4 dimensions");
  LinearCall call{};
  call.B = q[0], call.T = q[1], call.K = q[2], call.D = q[3], call.H = v[2], call.Dv = v[3];
  const ffi::DataType type = query.element_type();
  switch (type) {
    case ffi::F32: call.type = Float::f32; break;
    case ffi::BF16: call.type = Float::bf16; break;
    case ffi::F16: call.type = Float::f16; break;
    default: return wrong("query, key and value must be float32, bfloat16 or float16");
  }
  if (call.D < 1 || call.Dv < 1 || call.D > 1024 || call.Dv > 1024) return wrong("head dims must be from 1 to 1024");
  if (call.K < 1 || call.H % call.K) return wrong("key heads must divide value heads");
  if (!is_array(key, type, {call.B, call.T, call.K, call.D}) || !is_array(value, type, {call.B, call.T, call.H, call.Dv}) ||
      !is_array(*out, type, {call.B, call.T, call.H, call.Dv}) || !is_array(*state, ffi::F32, {call.B, call.H, call.D, call.Dv}))
    return wrong("key, value or a result has a wrong shape or dtype");
  if (given(decay)) {
    if (g.size() != 3 || (g[0] != 1 && g[0] != call.B) || (g[1] != 1 && g[1] != call.T) || !is_array(decay, ffi::F32, {g[0], g[1], call.H}))
      return wrong("decay has a wrong shape or dtype");
    call.decay = decay.typed_data<float>();
    call.decay_token = g[1] == 1 ? 0 : call.H, call.decay_batch = g[0] == 1 ? 0 : g[1] * call.H;
  }
  if (given(beta)) {
    if (!is_array(beta, ffi::F32, {call.B, call.T, call.H})) return wrong("beta has a wrong shape or dtype");
    call.beta = beta.typed_data<float>();
  }
  for (const Array* x : {&is_token, &starts})
    if (given(*x) && !is_array(*x, ffi::PRED, {call.B, call.T})) return wrong("the tokens' flags have a wrong shape or dtype");
  if (given(is_token)) call.is_token = static_cast<const uint8_t*>(is_token.untyped_data());
  if (given(starts)) call.starts = static_cast<const uint8_t*>(starts.untyped_data());
  if (given(initial)) {
    if (!is_array(initial, ffi::F32, {call.B, call.H, call.D, call.Dv})) return wrong("the first state has a wrong shape or dtype");
    call.initial = initial.typed_data<float>();
  }
  call.query = query.untyped_data(), call.key = key.untyped_data(), call.value = value.untyped_data();
  call.scale = scale, call.out = out->untyped_data(), call.state = state->typed_data<float>();
  FfiParallel parallel(pool);
  return kernels()->linear(call, parallel) ? ffi::Error::Success() : no_memory();
}

}  // namespace
}  // namespace attnops

ATTNOPS_HANDLER(attnops_cpu_linear, attnops::linear,
                xla::ffi::Ffi::Bind().Ctx<xla::ffi::ThreadPool>().Arg<xla::ffi::AnyBuffer>().Arg<xla::ffi::AnyBuffer>()
                    .Arg<xla::ffi::AnyBuffer>().Arg<xla::ffi::AnyBuffer>().Arg<xla::ffi::AnyBuffer>().Arg<xla::ffi::AnyBuffer>()
                    .Arg<xla::ffi::AnyBuffer>().Arg<xla::ffi::AnyBuffer>().Ret<xla::ffi::AnyBuffer>().Ret<xla::ffi::AnyBuffer>()
                    .Attr<float>("scale"))
