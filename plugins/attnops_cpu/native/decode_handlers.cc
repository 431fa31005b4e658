// The handler of attention over a cache: checks shapes, so that no kernel reads outside of an array.
#include "decode.h"
#include "handlers.h"

namespace attnops {
namespace {

using Array = ffi::AnyBuffer;
using Dimensions = ffi::Span<const int64_t>;

bool is_shape(const Array& x, std::initializer_list<int64_t> wanted) {
  const Dimensions given = x.dimensions();
  return given.size() == wanted.size() && std::equal(given.begin(), given.end(), wanted.begin());
}

// Whether each size is 1 or the wanted one.
bool broadcasts(const Array& x, std::initializer_list<int64_t> wanted) {
  const Dimensions given = x.dimensions();
  if (given.size() != wanted.size()) return false;
  auto size = wanted.begin();
  for (const int64_t n : given)
    if (n != 1 && n != *size++) return false;
    else if (n == 1) ++size;
  return true;
}

template <typename T>
const T* data(const Array& x) {
  return x.element_count() ? static_cast<const T*>(x.untyped_data()) : nullptr;
}

int64_t stride(const Array& x, size_t axis) {
  const Dimensions sizes = x.dimensions();
  if (sizes[axis] == 1) return 0;
  int64_t n = 1;
  for (size_t i = axis + 1; i < sizes.size(); ++i) n *= sizes[i];
  return n;
}

bool dtype_of(const Array& x, Stored* dtype) {
  switch (x.element_type()) {
    case ffi::F32: *dtype = kF32; return true;
    case ffi::BF16: *dtype = kBF16; return true;
    case ffi::F16: *dtype = kF16; return true;
    default: return false;
  }
}

ffi::Error wrong(const char* what) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, std::string("attnops_cpu_decode: ") + what);
}

// Optional arrays that are not given have no elements; `rows` has a row for each row of the cache. `stored` and `scales` are
// values of `Stored` and `Scales`; `value_first` is the first feature of values in the array of keys, −1 if values have a
// separate array.
ffi::Error decode(ffi::ThreadPool pool, Array query, Array key, Array value, Array key_scale, Array value_scale, Array positions,
                  Array rows, Array left, Array right, Array packed, Array table, Array layer, Array bits, Array bias, Array sinks,
                  ffi::Result<Array> out, ffi::Result<Array> lse, ffi::Result<Array> highest, int64_t head_dim, int64_t value_head_dim, int64_t value_first,
                  int64_t stored, int64_t scales, float scale, float cap) {
  if (!kernels()) return no_isa();
  DecodeCall c = {};
  const Dimensions q = query.dimensions(), k = key.dimensions();
  if (q.size() != 4 || (k.size() != 4 && k.size() != 5)) return wrong("query must be [B, T, H, D], key [blocks, K, n, W]");
  const int64_t batch = q[0];  // of arrays by query
  c.B = rows.dimensions().size() ? rows.dimensions()[0] : 0, c.T = q[1], c.H = q[2], c.D = head_dim, c.Dv = value_head_dim;
  const size_t lead = k.size() - 4;
  c.blocks = k[lead], c.K = k[lead + 1], c.n = k[lead + 2];
  const int64_t layers = lead ? k[0] : 1, width = k[lead + 3];
  if (c.B < 1 || c.T < 1 || c.K < 1 || c.n < 1 || c.blocks < 1 || c.H < c.K || c.H % c.K || q[3] != c.D || c.D < 1 || c.Dv < 1)
    return wrong("sizes of query and key do not fit");
  if (packed.element_count()) {
    if (packed.element_type() != ffi::S32 || !is_shape(packed, {c.T})) return wrong("packed must be int32 [T]");
    c.packed = data<int32_t>(packed);
  }
  if (batch != (c.packed ? 1 : c.B)) return wrong("query must have a row for each of rows, or 1 of packed rows");
  if (stored < kF32 || stored > kI4 || scales < kNoScale || scales > kByToken) return wrong("stored or scales is unknown");
  c.stored = static_cast<Stored>(stored), c.scales = static_cast<Scales>(scales);
  const int64_t size = stored == kF32 ? 4 : stored == kBF16 || stored == kF16 ? 2 : 1;
  const int64_t features = stored == kI4 ? 2 : 1;  // of an element
  if (c.D % features || c.Dv % features) return wrong("head dims of int4 must be even");
  const int64_t key_width = c.D / features, value_width = c.Dv / features;
  if (static_cast<int64_t>(ffi::ByteWidth(key.element_type())) != size) return wrong("key's dtype is not what is stored");
  if (!dtype_of(query, &c.dtype) || out->element_type() != query.element_type() || !is_shape(*out, {batch, c.T, c.H, c.Dv}))
    return wrong("query and output must be float32, bfloat16 or float16, [B, T, H, D]");
  c.out_dtype = c.dtype;
  c.key = data<char>(key), c.key_stride = width * size, c.key_count = key_width * size, c.value_count = value_width * size;
  if (width < key_width) return wrong("key has too few features");
  if (value_first >= 0) {
    if (value_first + value_width > width) return wrong("key has too few features");
    c.value = c.key + value_first * size, c.value_stride = c.key_stride;
  } else {
    if (value.element_type() != key.element_type() || value.dimensions().size() != k.size() ||
        !std::equal(k.begin(), k.end() - 1, value.dimensions().begin()) || value.dimensions().back() != value_width)
      return wrong("value does not fit key");
    c.value = data<char>(value), c.value_stride = c.value_count;
  }
  c.key_head = c.n * c.key_stride, c.value_head = c.n * c.value_stride;
  c.key_block = c.K * c.key_head, c.value_block = c.K * c.value_head;
  if (table.element_count()) {
    if (table.element_type() != ffi::S32 || table.dimensions().size() != 2 || table.dimensions()[0] != c.B) return wrong("table");
    c.table = data<int32_t>(table), c.M = table.dimensions()[1];
  } else if (c.blocks < c.B) {
    return wrong("key must have a block for each row");
  }
  c.S = c.M ? c.M * c.n : c.n;
  if (c.S > INT32_MAX) return wrong("a row has more slots than int32 counts");
  if (layer.element_type() != ffi::S32 || layer.element_count() != 1) return wrong("layer");
  int64_t given = *data<int32_t>(layer);
  if (given < 0) given += layers;  // counted from the last, as in `lax.dynamic_slice`, which reads the layer's lengths and table
  c.base = c.blocks * (given < 0 ? 0 : given < layers ? given : layers - 1);

  const size_t scale_count = scales == kNoScale ? 0 : scales == kByTensor ? 1 : scales == kByHead ? c.K : layers * c.blocks * c.K * c.n;
  for (const Array* x : {&key_scale, &value_scale})
    if (scale_count && (x->element_type() != ffi::F32 || x->element_count() != scale_count)) return wrong("scales do not fit");
  c.key_scale = data<float>(key_scale), c.value_scale = data<float>(value_scale);

  if (positions.element_type() != ffi::S32 || !(is_shape(positions, {batch, c.T}) || (c.packed && is_shape(positions, {c.T, 1}))))
    return wrong("positions must be int32 by query");
  if (rows.element_type() != ffi::S32 || !is_shape(rows, {c.B, 4})) return wrong("rows must be int32 [B, 4]");
  // If rows are packed, each query has a separate row in these arrays.
  const int64_t lead_size = c.packed ? c.T : c.B, T = c.packed ? 1 : c.T;
  const size_t by_query = c.packed ? 0 : 2;
  for (const Array* x : {&left, &right})
    if (x->element_type() != ffi::S32 || !broadcasts(*x, {lead_size, c.H}) || !is_shape(*x, {left.dimensions()[0], left.dimensions()[1]}))
      return wrong("left and right must be int32 [1 or B, 1 or H]");
  c.positions = data<int32_t>(positions), c.rows = data<int32_t>(rows);
  c.left = data<int32_t>(left), c.right = data<int32_t>(right);
  c.band_by_batch = left.dimensions()[0] > 1, c.band_by_head = left.dimensions()[1] > 1;
  if (bits.element_count()) {
    if (bits.element_type() != ffi::PRED || !broadcasts(bits, {lead_size, c.H, T, c.S}) || bits.dimensions()[3] != c.S)
      return wrong("bits must be booleans [1 or B, 1 or H, 1 or T, S]");
    c.bits = data<uint8_t>(bits), c.bits_b = c.packed ? 0 : stride(bits, 0), c.bits_h = stride(bits, 1), c.bits_t = stride(bits, by_query);
  }
  if (bias.element_count()) {
    if (bias.element_type() != ffi::F32 || !broadcasts(bias, {lead_size, c.H, T, c.S})) return wrong("bias must be float32, by score");
    c.bias = data<float>(bias);
    c.bias_b = c.packed ? 0 : stride(bias, 0), c.bias_h = stride(bias, 1), c.bias_t = stride(bias, by_query), c.bias_s = stride(bias, 3);
  }
  if (sinks.element_count()) {
    if (sinks.element_type() != ffi::F32 || !is_shape(sinks, {c.H})) return wrong("sinks must be float32 [H]");
    c.sinks = data<float>(sinks);
  }
  for (const auto& [x, to] : {std::pair(&*lse, &c.lse), std::pair(&*highest, &c.highest)}) {
    if (!x->element_count()) continue;
    if (x->element_type() != ffi::F32 || !is_shape(*x, {batch, c.H, c.T})) return wrong("logsumexp and largest scores must be float32 [B, H, T]");
    *to = static_cast<float*>(x->untyped_data());
  }
  c.query = data<char>(query), c.out = static_cast<char*>(out->untyped_data()), c.scale = scale, c.cap = cap;
  FfiParallel parallel(pool);
  return kernels()->decode(c, parallel) ? ffi::Error::Success() : no_memory();
}

}  // namespace
}  // namespace attnops

ATTNOPS_HANDLER(attnops_cpu_decode, attnops::decode,
                xla::ffi::Ffi::Bind()
                    .Ctx<xla::ffi::ThreadPool>()
                    .Arg<xla::ffi::AnyBuffer>()  // query
                    .Arg<xla::ffi::AnyBuffer>()  // key
                    .Arg<xla::ffi::AnyBuffer>()  // value
                    .Arg<xla::ffi::AnyBuffer>()  // key_scale
                    .Arg<xla::ffi::AnyBuffer>()  // value_scale
                    .Arg<xla::ffi::AnyBuffer>()  // positions
                    .Arg<xla::ffi::AnyBuffer>()  // rows
                    .Arg<xla::ffi::AnyBuffer>()  // left
                    .Arg<xla::ffi::AnyBuffer>()  // right
                    .Arg<xla::ffi::AnyBuffer>()  // packed
                    .Arg<xla::ffi::AnyBuffer>()  // table
                    .Arg<xla::ffi::AnyBuffer>()  // layer
                    .Arg<xla::ffi::AnyBuffer>()  // bits
                    .Arg<xla::ffi::AnyBuffer>()  // bias
                    .Arg<xla::ffi::AnyBuffer>()  // sinks
                    .Ret<xla::ffi::AnyBuffer>()  // out
                    .Ret<xla::ffi::AnyBuffer>()  // lse
                    .Ret<xla::ffi::AnyBuffer>()  // highest
                    .Attr<int64_t>("head_dim")
                    .Attr<int64_t>("value_head_dim")
                    .Attr<int64_t>("value_first")
                    .Attr<int64_t>("stored")
                    .Attr<int64_t>("scales")
                    .Attr<float>("scale")
                    .Attr<float>("cap"))
