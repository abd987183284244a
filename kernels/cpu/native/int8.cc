// Products of rows that are rounded to int8 with weights in int8; axes as in
// jitney/kernels/cpu/int8.py.
#include <cmath>

#include "panels.h"
#include "parts.h"
#include "rows.h"
#include "tasks.h"
#include "tiles.h"

namespace jitney {
namespace {

namespace ffi = xla::ffi;

// Weights are stored this much greater than they are, since the instruction takes one operand
// without a sign.
constexpr std::int32_t kShift = 128;
constexpr float kGreatest = 127.0f;
// Rows whose numbers are all smaller than this are multiplied as if they had one as great.
constexpr float kLeast = 1e-30f;
// From so many rows on, they are rounded by all threads, so many at a time.
constexpr Index kManyRows = 64, kRowsATime = 16;

// Rows of x as they are multiplied.
struct Rounded {
  Quad* codes;           // [rows, depth]
  float* steps;          // [rows] what a code of 1 stands for
  std::int32_t* shifts;  // [rows] what the weights' shift adds to every sum
};

// The greatest magnitude of a row; NaN if any of its numbers is not finite.
template <class Number>
float magnitude(const Number* x, Index size) {
  Floats most{}, strange{};
  for (Index i = 0; i < size; i += kLanes) {
    const Floats numbers = load(x + i);
    most = greater(greater(-numbers, numbers), most);
    strange = multiply_add(numbers, Floats{}, strange);
  }
  return greatest(most) + total(strange);
}

// Row `row` of x [rows, size] as whole steps of 1/127 of its greatest magnitude.
template <class Number>
void round_row(const Number* x, Index size, Index row, const Rounded& to) {
  const float most = magnitude(x + row * size, size);
  const float length = most < kLeast ? kLeast : most;
  const Floats inverse = splat(kGreatest / length);
  Quad* codes = to.codes + row * size / 4;
  Ints sum{};
  for (Index i = 0; i < size; i += kLanes) {
    const Ints numbers = rounded(load(x + row * size + i) * inverse);
    store_bytes(numbers, codes + i / 4);
    sum += numbers;
  }
  to.steps[row] = length / kGreatest;
  to.shifts[row] = kShift * total(sum);
}

template <class Number>
void round_rows(ffi::ThreadPool& pool, const Number* x, Index rows, Index size,
                const Rounded& to) {
  const Index together = rows < kManyRows ? std::max<Index>(1, rows) : kRowsATime;
  share(pool, parts(rows, together), rows, [&](Index ticket) {
    const Index end = std::min(rows, (ticket + 1) * together);
    for (Index row = ticket * together; row < end; ++row) {
      round_row(x, size, row, to);
    }
  });
}

// Room for them, until the next call on this thread.
Rounded room_for(Index rows, Index size) {
  float* memory = Scratch::of_call().of(rows * (size / 4 + 2));
  float* steps = memory + rows * size / 4;
  return {reinterpret_cast<Quad*>(memory), steps, reinterpret_cast<std::int32_t*>(steps + rows)};
}

// to = (sums - shift) * step * scales, over `count` columns.
template <class To>
void scale_row(const float* sums, std::int32_t shift, float step, const float* scales, To* to,
               Index count) {
  const Floats steps = splat(step);
  for (Index i = 0; i < count; i += kLanes) {
    const Floats whole = as_numbers(as_ints(load(sums + i)) - shift);
    store(whole * steps * load(scales + i), to + i);
  }
}

// What becomes of the sums of a row with a panel: [rows, panels * width] of `To`.
template <class To>
struct Finish {
  const Panels<Int8Panels>& of;
  const Rounded& x;
  const float* scales;
  To* out;
  bool gated;

  void operator()(Index panel, Index row, float* sums) const {
    const Index width = gated ? of.columns / 2 : of.columns;
    const float* own = scales + panel * width;
    To* to = out + (row * of.panels + panel) * width;
    if (!gated) {
      scale_row(sums, x.shifts[row], x.steps[row], own, to, width);
      return;
    }
    const float* ups = own + of.panels * width;
    scale_row(sums, x.shifts[row], x.steps[row], own, sums, width);
    scale_row(sums + width, x.shifts[row], x.steps[row], ups, sums + width, width);
    gate_row(sums, to, width);
  }
};

template <class To>
void multiply_int8(ffi::ThreadPool& pool, const Panels<Int8Panels>& of, const Rounded& x,
                   const ffi::AnyBuffer& scales, ffi::AnyBuffer& y, bool gated) {
  auto* out = static_cast<To*>(y.untyped_data());
  const auto* steps = static_cast<const float*>(scales.untyped_data());
  multiply_panels(pool, of, Finish<To>{of, x, steps, out, gated});
}

bool is_float(ffi::DataType kind) {
  return kind == ffi::DataType::F32 || kind == ffi::DataType::BF16;
}

// x [T, I] float32 or bfloat16, w int8 [P, I / B, C, B] (or `Chosen` of many), B inputs side by
// side, whose bits are those of the weight + 128 as uint8, scales float32 [P * C] -> y [T, P * C]
// in float32 or bfloat16, or, gated, [T, P * C / 2]. Rows from `count` on are zeros.
ffi::Error int8_panels(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w,
                       ffi::AnyBuffer scales, RowCount count, ffi::RemainingArgs rest,
                       ffi::Result<ffi::AnyBuffer> y, bool gated) {
  const Timed timed(Part::kProducts);
  const auto xs = x.dimensions(), ys = y->dimensions(), ss = scales.dimensions();
  const auto [ws, weights] = chosen(w, rest);
  using Element = Int8Panels::Left;
  constexpr Index beside = sizeof(Element);
  if (xs.size() != 2 || !weights || ys.size() != 2 || ss.size() != 1 ||
      xs[1] != beside * ws[1] || ws[3] != beside || ys[0] != xs[0] || ss[0] != ws[0] * ws[2] ||
      ys[1] * (gated ? 2 : 1) != ss[0]) {
    return refused("panels of int8 take x [T, I], w [P, I / B, C, B] and scales [P * C]");
  }
  if (!is_float(x.element_type()) || !is_float(y->element_type()) ||
      w.element_type() != ffi::DataType::S8 || scales.element_type() != ffi::DataType::F32) {
    return refused("panels of int8 take and give float32 or bfloat16; scales are float32");
  }
  if (xs[1] % kLanes != 0 || ws[2] % (gated ? 2 * kLanes : kLanes) != 0) {
    return refused("panels of int8 take whole vectors of inputs and of columns");
  }
  const Index rows = present(count, xs[0]);
  clear_rows(pool, *y, rows);
  const Rounded codes = room_for(rows, xs[1]);
  if (x.element_type() == ffi::DataType::F32) {
    round_rows(pool, static_cast<const float*>(x.untyped_data()), rows, xs[1], codes);
  } else {
    round_rows(pool, static_cast<const Bfloat16*>(x.untyped_data()), rows, xs[1], codes);
  }
  const Panels<Int8Panels> of{reinterpret_cast<const Element*>(codes.codes),
                              static_cast<const Element*>(weights),
                              rows,
                              ws[0],
                              ws[1],
                              ws[2]};
  if (y->element_type() == ffi::DataType::F32) {
    multiply_int8<float>(pool, of, codes, scales, *y, gated);
  } else {
    multiply_int8<Bfloat16>(pool, of, codes, scales, *y, gated);
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jitney

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(jitney_int8_panels, jitney::int8_panels,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<jitney::RowCount>()
                                  .RemainingArgs()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<bool>("gated"));
#pragma GCC visibility pop
