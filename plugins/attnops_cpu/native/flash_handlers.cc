// The handlers of flash attention. All arrays are checked here, so that no kernel reads outside of them.
#include <climits>
#include <string>

#include "handlers.h"

namespace attnops {
namespace {

using Any = ::xla::ffi::AnyBuffer;

ffi::Error wrong(const std::string& what) { return ffi::Error(ffi::ErrorCode::kInvalidArgument, "attnops-cpu: " + what); }

bool type_of(ffi::DataType given, Float* type) {
  switch (given) {
    case ffi::F32: *type = Float::f32; return true;
    case ffi::BF16: *type = Float::bf16; return true;
    case ffi::F16: *type = Float::f16; return true;
    default: return false;
  }
}

// Whether an array has these dimensions; one that is marked `or_one` may also be 1.
struct Size {
  int64_t size;
  bool or_one = false;
};
template <typename Buffer>
bool has_shape(const Buffer& x, std::initializer_list<Size> sizes) {
  const auto dims = x.dimensions();
  if (dims.size() != sizes.size()) return false;
  size_t i = 0;
  for (const Size& expected : sizes) {
    const int64_t size = dims[i++];
    if (size != expected.size && !(expected.or_one && size == 1)) return false;
  }
  return true;
}

// The stride, in elements, of a dimension of an array [B or 1, …]; 0 if its size is 1.
int64_t stride(const Any& x, size_t axis) {
  if (x.dimensions()[axis] == 1) return 0;
  int64_t n = 1;
  for (size_t i = axis + 1; i < x.dimensions().size(); ++i) n *= x.dimensions()[i];
  return n;
}

bool given(const Any& x) { return x.element_count() > 0; }

}  // namespace

// The arguments that forward and backward share: arrays that a call does not have are empty. Attributes are integers and
// floats by name.
#define ATTNOPS_SHARED_PARAMETERS \
  Any query, Any key, Any value, Any tiles, Any bits, Any q_ids, Any kv_ids, Any bias, Any dropout, Any sinks, \
      float scale, float cap, int64_t low, int64_t high, int64_t block_q, int64_t block_k, bool table, \
      int64_t dropout_spread, int64_t dropout_threshold, float dropout_scale
#define ATTNOPS_SHARED_BINDING \
  Arg<::xla::ffi::AnyBuffer>().Arg<::xla::ffi::AnyBuffer>().Arg<::xla::ffi::AnyBuffer>().Arg<::xla::ffi::AnyBuffer>().Arg<::xla::ffi::AnyBuffer>().Arg<::xla::ffi::AnyBuffer>().Arg<::xla::ffi::AnyBuffer>().Arg<::xla::ffi::AnyBuffer>().Arg<::xla::ffi::AnyBuffer>().Arg<::xla::ffi::AnyBuffer>()
#define ATTNOPS_SHARED_ATTRIBUTES \
  Attr<float>("scale").Attr<float>("cap").Attr<int64_t>("low").Attr<int64_t>("high").Attr<int64_t>("block_q") \
      .Attr<int64_t>("block_k").Attr<bool>("table").Attr<int64_t>("dropout_spread").Attr<int64_t>("dropout_threshold") \
      .Attr<float>("dropout_scale")

static ffi::Error scoring_of(ATTNOPS_SHARED_PARAMETERS, Scoring* s, Float* type) {
  const auto q = query.dimensions(), k = key.dimensions(), v = value.dimensions();
  if (q.size() != 4 || k.size() != 4 || v.size() != 4) return wrong("query, key and value must have 4 dimensions");
  *s = Scoring{};
  s->B = q[0], s->T = q[1], s->H = q[2], s->D = q[3], s->S = k[1], s->K = k[2], s->Dv = v[3];
  if (!has_shape(key, {{s->B}, {s->S}, {s->K}, {s->D}}) || !has_shape(value, {{s->B}, {s->S}, {s->K}, {s->Dv}}))
    return wrong("key or value has a wrong shape");
  if (s->K < 1 || s->H % s->K) return wrong("kv heads must divide heads");
  if (s->D > 1024 || s->Dv > 1024) return wrong("head dims must be at most 1024");
  if (!type_of(query.element_type(), type) || key.element_type() != query.element_type() ||
      value.element_type() != query.element_type())
    return wrong("query, key and value must have one floating dtype");
  s->scale = scale, s->cap = cap, s->low = low, s->high = high;
  s->bq = block_q, s->bk = block_k;
  if (given(tiles)) {
    if (block_q < 1 || block_k < PANEL || block_k % PANEL) return wrong("wrong sizes of tiles");
    s->nq = (s->T + block_q - 1) / block_q, s->nk = (s->S + block_k - 1) / block_k;
    if (tiles.element_type() != ffi::S32 || !has_shape(tiles, {{s->B, true}, {s->H, true}, {s->nq}, {s->nk}}))
      return wrong("the tile map has a wrong shape");
    s->tiles = tiles.typed_data<int32_t>();
    s->tiles_batch = stride(tiles, 0), s->tiles_head = stride(tiles, 1);
    if (given(bits)) {
      if (bits.element_type() != ffi::U32 || bits.dimensions().size() != 4 ||
          !has_shape(bits, {{s->B, true}, {bits.dimensions()[1]}, {block_q}, {block_k / PANEL}}))
        return wrong("the mask's bits have a wrong shape");
      s->bits = bits.typed_data<uint32_t>();
      s->bits_batch = stride(bits, 0), s->slots = bits.dimensions()[1];
    }
    if (given(q_ids)) {
      if (q_ids.element_type() != ffi::S32 || kv_ids.element_type() != ffi::S32 ||
          !has_shape(q_ids, {{s->B, true}, {s->T}}) || !has_shape(kv_ids, {{s->B, true}, {s->S}}))
        return wrong("segment ids have a wrong shape");
      s->q_ids = q_ids.typed_data<int32_t>(), s->kv_ids = kv_ids.typed_data<int32_t>();
      s->q_ids_batch = stride(q_ids, 0), s->kv_ids_batch = stride(kv_ids, 0);
    }
  }
  if (given(bias)) {
    if (!type_of(bias.element_type(), &s->bias_type)) return wrong("the bias must have a floating dtype");
    s->bias_key = 1;
    if (table) {  // of kv − q at kv − q + T − 1
      if (!has_shape(bias, {{s->B, true}, {s->H, true}, {s->T + s->S - 1}})) return wrong("the bias has a wrong shape");
      s->bias_query = -1;
      const char* first = static_cast<const char*>(bias.untyped_data());
      s->bias = first + (s->T - 1) * (s->bias_type == Float::f32 ? 4 : 2);
    } else {
      if (!has_shape(bias, {{s->B, true}, {s->H, true}, {s->T, true}, {s->S, true}})) return wrong("the bias has a wrong shape");
      s->bias = bias.untyped_data();
      s->bias_query = stride(bias, 2), s->bias_key = bias.dimensions()[3] == 1 ? 0 : 1;
    }
    s->bias_batch = stride(bias, 0), s->bias_head = stride(bias, 1);
  }
  if (given(dropout)) {
    if (dropout.element_type() != ffi::U32 || !has_shape(dropout, {{s->B}, {s->H}, {s->T}}))
      return wrong("the dropout's hashes have a wrong shape");
    s->dropout = dropout.typed_data<uint32_t>();
    s->dropout_spread = static_cast<uint32_t>(dropout_spread);
    s->dropout_threshold = static_cast<uint32_t>(dropout_threshold);
    s->dropout_scale = dropout_scale;
  }
  if (given(sinks)) {
    if (sinks.element_type() != ffi::F32 || !has_shape(sinks, {{s->B, true}, {s->H}})) return wrong("sinks have a wrong shape");
    s->sinks = sinks.typed_data<float>(), s->sinks_batch = stride(sinks, 0);
  }
  return ffi::Error::Success();
}

#define ATTNOPS_SHARED_VALUES \
  query, key, value, tiles, bits, q_ids, kv_ids, bias, dropout, sinks, scale, cap, low, high, block_q, block_k, table, \
      dropout_spread, dropout_threshold, dropout_scale

static ffi::Error forward(ffi::ThreadPool pool, ATTNOPS_SHARED_PARAMETERS, bool in_place, ffi::Result<Any> out, ffi::Result<Any> lse,
                          ffi::Result<Any> residual, ffi::Result<Any> max_logits) {
  if (!kernels()) return no_isa();
  ForwardCall call{};
  ffi::Error error = scoring_of(ATTNOPS_SHARED_VALUES, &call.scoring, &call.type);
  if (error.failure()) return error;
  const Scoring& s = call.scoring;
  if (!has_shape(*out, {{s.B}, {s.T}, {s.H}, {s.Dv}}) || !type_of(out->element_type(), &call.out_type))
    return wrong("the output has a wrong shape or dtype");
  for (auto* x : {&lse, &residual})
    if (!has_shape(**x, {{s.B}, {s.H}, {s.T}}) || (*x)->element_type() != ffi::F32)
      return wrong("the logsumexp has a wrong shape or dtype");
  call.query = query.untyped_data(), call.key = key.untyped_data(), call.value = value.untyped_data();
  call.out = out->untyped_data();
  call.lse = lse->typed_data<float>(), call.residual = residual->typed_data<float>();
  if (given(*max_logits)) {
    if (!has_shape(*max_logits, {{s.B}, {s.H}, {s.T}}) || max_logits->element_type() != ffi::F32)
      return wrong("the largest scores have a wrong shape or dtype");
    call.max_logits = max_logits->typed_data<float>();
  }
  call.in_place = in_place;
  if (in_place && (s.dropout || (s.bias && s.bias_type != Float::f32) || s.S > INT32_MAX))
    return wrong("dropout, biases of 16 bits and more than 2^31 keys are not served in place");
  FfiParallel parallel(pool);
  return kernels()->forward(call, parallel) ? ffi::Error::Success() : no_memory();
}

static ffi::Error backward(ffi::ThreadPool pool, ATTNOPS_SHARED_PARAMETERS, Any d_out, Any lse, Any residual, Any delta,
                           ffi::Result<Any> d_query, ffi::Result<Any> d_key, ffi::Result<Any> d_value,
                           ffi::Result<Any> d_bias) {
  if (!kernels()) return no_isa();
  BackwardCall call{};
  ffi::Error error = scoring_of(ATTNOPS_SHARED_VALUES, &call.scoring, &call.type);
  if (error.failure()) return error;
  const Scoring& s = call.scoring;
  const ffi::DataType wide = call.type == Float::f16 ? ffi::F32 : query.element_type();
  if (!has_shape(d_out, {{s.B}, {s.T}, {s.H}, {s.Dv}}) || d_out.element_type() != wide)
    return wrong("the output's cotangent has a wrong shape or dtype");
  for (const Any* x : {&lse, &residual, &delta})
    if (!has_shape(*x, {{s.B}, {s.H}, {s.T}}) || x->element_type() != ffi::F32)
      return wrong("the statistics have a wrong shape or dtype");
  if (!has_shape(*d_query, {{s.B}, {s.T}, {s.H}, {s.D}}) || !has_shape(*d_key, {{s.B}, {s.S}, {s.K}, {s.D}}) ||
      !has_shape(*d_value, {{s.B}, {s.S}, {s.K}, {s.Dv}}) || !type_of(d_query->element_type(), &call.d_type) ||
      d_key->element_type() != d_query->element_type() || d_value->element_type() != d_query->element_type())
    return wrong("a gradient has a wrong shape or dtype");
  call.query = query.untyped_data(), call.key = key.untyped_data(), call.value = value.untyped_data();
  call.d_out = d_out.untyped_data();
  call.lse = lse.typed_data<float>(), call.residual = residual.typed_data<float>(), call.delta = delta.typed_data<float>();
  call.d_query = d_query->untyped_data(), call.d_key = d_key->untyped_data(), call.d_value = d_value->untyped_data();
  if (given(*d_bias)) {
    if (d_bias->element_type() != ffi::F32 || d_bias->element_count() != bias.element_count())
      return wrong("the bias's gradient has a wrong shape or dtype");
    call.d_bias = d_bias->typed_data<float>();
    call.bias_floats = static_cast<int64_t>(bias.element_count());
  }
  FfiParallel parallel(pool);
  return kernels()->backward(call, parallel) ? ffi::Error::Success() : no_memory();
}

}  // namespace attnops

ATTNOPS_HANDLER(attnops_cpu_forward, attnops::forward,
                xla::ffi::Ffi::Bind().Ctx<xla::ffi::ThreadPool>().ATTNOPS_SHARED_BINDING.ATTNOPS_SHARED_ATTRIBUTES
                    .Attr<bool>("in_place").Ret<xla::ffi::AnyBuffer>().Ret<xla::ffi::AnyBuffer>().Ret<xla::ffi::AnyBuffer>().Ret<xla::ffi::AnyBuffer>())

ATTNOPS_HANDLER(attnops_cpu_backward, attnops::backward,
                xla::ffi::Ffi::Bind().Ctx<xla::ffi::ThreadPool>().ATTNOPS_SHARED_BINDING.ATTNOPS_SHARED_ATTRIBUTES
                    .Arg<xla::ffi::AnyBuffer>().Arg<xla::ffi::AnyBuffer>().Arg<xla::ffi::AnyBuffer>().Arg<xla::ffi::AnyBuffer>()
                    .Ret<xla::ffi::AnyBuffer>().Ret<xla::ffi::AnyBuffer>().Ret<xla::ffi::AnyBuffer>().Ret<xla::ffi::AnyBuffer>())
