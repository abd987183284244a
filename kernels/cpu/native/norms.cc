// RMS norms: each row by itself, added up in one order in every number of rows.
//
// XLA adds up fewer than eight rows in another order than more, and keeps what it norms in float32
// or rounds it first as each bucket's fusions happen to fall; both move a sum across a rounding
// edge now and then, and then an answer.
#include "norms.h"
#include "parts.h"
#include "tasks.h"

namespace jitney {
namespace {

namespace ffi = xla::ffi;

constexpr std::int64_t kRowsOfNorms = 16;

// The norms of a call's rows [rows, size], each of the row itself or, where something is added, of
// the sum, which is kept. x and sum are of one dtype, added and out of one: bfloat16, or x's.
struct Rows {
  const ffi::AnyBuffer& x;
  const ffi::AnyBuffer* added;  // or null
  const ffi::AnyBuffer& weight;
  ffi::AnyBuffer* sum;  // or null
  ffi::AnyBuffer& out;
};

template <class Stream, class Number>
void add_row(const Stream* x, const Number* added, Stream* sum, std::int64_t size) {
  for (std::int64_t i = 0; i < size; i += kLanes) {
    store(load(x + i) + load(added + i), sum + i);
  }
}

template <class Stream, class Number, class Weight>
void norm(ffi::ThreadPool& pool, const Rows& of, float eps) {
  const std::int64_t rows = of.x.dimensions()[0], size = of.x.dimensions()[1];
  const auto* x = static_cast<const Stream*>(of.x.untyped_data());
  const auto* weight = static_cast<const Weight*>(of.weight.untyped_data());
  auto* out = static_cast<Number*>(of.out.untyped_data());
  const Number* added = nullptr;
  Stream* sum = nullptr;
  if (of.added != nullptr) {
    added = static_cast<const Number*>(of.added->untyped_data());
    sum = static_cast<Stream*>(of.sum->untyped_data());
  }
  const std::int64_t tasks = (rows + kRowsOfNorms - 1) / kRowsOfNorms;
  share(pool, tasks, rows, [=](std::int64_t task) {
    const std::int64_t first = task * kRowsOfNorms;
    for (std::int64_t row = first; row < rows && row < first + kRowsOfNorms; ++row) {
      const Stream* from = x + row * size;
      if (added != nullptr) {
        add_row(from, added + row * size, sum + row * size, size);
        from = sum + row * size;
      }
      norm_row(from, weight, out + row * size, size, eps);
    }
  });
}

template <class Stream, class Number>
ffi::Error norm_by(ffi::ThreadPool& pool, const Rows& of, float eps) {
  switch (of.weight.element_type()) {
    case ffi::DataType::F32:
      norm<Stream, Number, float>(pool, of, eps);
      return ffi::Error::Success();
    case ffi::DataType::BF16:
      norm<Stream, Number, Bfloat16>(pool, of, eps);
      return ffi::Error::Success();
    default:
      return refused("a norm's weight is float32 or bfloat16");
  }
}

// Rows [T, E] and weight [E], float32 or bfloat16; see Rows.
ffi::Error norm_rows(ffi::ThreadPool& pool, const Rows& of, float eps) {
  const Timed timed(Part::kNorms);
  const ffi::DataType stream = of.x.element_type(), dtype = of.out.element_type();
  if (of.x.dimensions().size() != 2 || of.weight.dimensions().size() != 1) {
    return refused("a norm takes x [T, E] and weight [E]");
  }
  if ((of.added && of.added->element_type() != dtype) ||
      (of.sum && of.sum->element_type() != stream)) {
    return refused("a sum has the dtype of its rows, what is added that of the norm");
  }
  if (of.added && of.added->element_count() != of.x.element_count()) {
    return refused("what is added before a norm has the shape of its rows");
  }
  if (of.x.dimensions()[1] % kLanes != 0 || of.weight.dimensions()[0] != of.x.dimensions()[1]) {
    return refused("a norm's rows are whole vectors, as long as its weight");
  }
  if (stream == ffi::DataType::F32 && dtype == ffi::DataType::F32) {
    return norm_by<float, float>(pool, of, eps);
  }
  if (stream == ffi::DataType::F32 && dtype == ffi::DataType::BF16) {
    return norm_by<float, Bfloat16>(pool, of, eps);
  }
  if (stream == ffi::DataType::BF16 && dtype == ffi::DataType::BF16) {
    return norm_by<Bfloat16, Bfloat16>(pool, of, eps);
  }
  return refused("a norm takes float32 or bfloat16, and gives the same or bfloat16");
}

// x [T, E], weight [E] -> [T, E].
ffi::Error rms_norm(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weight,
                    ffi::Result<ffi::AnyBuffer> out, float eps) {
  return norm_rows(pool, {x, nullptr, weight, nullptr, *out}, eps);
}

// x and added [T, E], weight [E] -> their sum and its norm [T, E]; the sum may lie where x does.
ffi::Error norm_sum(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer added,
                    ffi::AnyBuffer weight, ffi::Result<ffi::AnyBuffer> sum,
                    ffi::Result<ffi::AnyBuffer> out, float eps) {
  return norm_rows(pool, {x, &added, weight, &*sum, *out}, eps);
}

}  // namespace
}  // namespace jitney

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(jitney_rms_norm, jitney::rms_norm,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<float>("eps"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(jitney_norm_sum, jitney::norm_sum,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<float>("eps"));
#pragma GCC visibility pop
