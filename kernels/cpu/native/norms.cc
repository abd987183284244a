// RMS norms: each row by itself, added up in one order in every number of rows.
//
// XLA adds up fewer than eight rows in another order than more, and keeps what it norms in float32
// or rounds it first as each bucket's fusions happen to fall; both move a sum across a rounding
// edge now and then, and then an answer.
#include <cmath>

#include "tasks.h"
#include "vectors.h"

namespace jitney {
namespace {

namespace ffi = xla::ffi;

constexpr std::int64_t kRowsOfTask = 16;

// out = x / sqrt(mean(x * x) + eps) * weight, all [size].
template <class Number>
void norm_row(const Number* x, const Number* weight, Number* out, std::int64_t size, float eps) {
  Floats squares = {};
  for (std::int64_t i = 0; i < size; i += kLanes) {
    const Floats here = load(x + i);
    squares = multiply_add(here, here, squares);
  }
  const float mean = total(squares) * (1.0f / static_cast<float>(size));
  const Floats factor = splat(1.0f / std::sqrt(mean + eps));
  for (std::int64_t i = 0; i < size; i += kLanes) {
    store(load(x + i) * factor * load(weight + i), out + i);
  }
}

template <class Number>
void norm(ffi::ThreadPool& pool, const ffi::AnyBuffer& x, const ffi::AnyBuffer& weight,
          ffi::AnyBuffer& out, float eps) {
  const std::int64_t rows = x.dimensions()[0], size = x.dimensions()[1];
  const auto* from = static_cast<const Number*>(x.untyped_data());
  const auto* by = static_cast<const Number*>(weight.untyped_data());
  auto* to = static_cast<Number*>(out.untyped_data());
  const std::int64_t tasks = (rows + kRowsOfTask - 1) / kRowsOfTask;
  share(pool, tasks, rows, [=](std::int64_t task) {
    const std::int64_t first = task * kRowsOfTask;
    for (std::int64_t row = first; row < rows && row < first + kRowsOfTask; ++row) {
      norm_row(from + row * size, by, to + row * size, size, eps);
    }
  });
}

// x [T, E], weight [E] of one dtype -> [T, E].
ffi::Error rms_norm(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weight,
                    ffi::Result<ffi::AnyBuffer> out, float eps) {
  const ffi::DataType dtype = x.element_type();
  if (x.dimensions().size() != 2 || weight.dimensions().size() != 1) {
    return refused("a norm takes x [T, E] and weight [E]");
  }
  if (weight.element_type() != dtype || out->element_type() != dtype) {
    return refused("x, weight and the result of a norm have one dtype");
  }
  if (x.dimensions()[1] % kLanes != 0 || weight.dimensions()[0] != x.dimensions()[1]) {
    return refused("a norm's rows are whole vectors, as long as its weight");
  }
  if (dtype == ffi::DataType::F32) {
    norm<float>(pool, x, weight, *out, eps);
  } else if (dtype == ffi::DataType::BF16) {
    norm<Bfloat16>(pool, x, weight, *out, eps);
  } else {
    return refused("a norm takes float32 or bfloat16");
  }
  return ffi::Error::Success();
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
#pragma GCC visibility pop
