// What attention needs of a step's new rows, in one pass over what their projection made: queries
// and keys normed where a model does so, turned by their positions, and keys and values put into
// their pages.
//
// XLA makes three passes of it: one that turns queries, one that turns keys and lays them beside
// the values, and one, on a single thread, that puts them into the pool.
#include "norms.h"
#include "parts.h"
#include "tasks.h"
#include "tiles.h"

namespace jitney {
namespace {

namespace ffi = xla::ffi;

constexpr std::int64_t kRowsOfRotation = 8;

// Turns pairs (j, j + half) of x by cos and sin [half]; out may be x.
template <class Number>
void turn(const Number* x, const float* cos, const float* sin, Number* out, std::int64_t half) {
  for (std::int64_t i = 0; i < half; i += kLanes) {
    const Floats first = load(x + i), second = load(x + half + i);
    const Floats c = load(cos + i), s = load(sin + i);
    store(first * c - second * s, out + i);
    store(second * c + first * s, out + half + i);
  }
}

// The same numbers, those that are not finite as 0: a key that is masked still meets its value as
// 0 * v, and 0 * NaN would reach the next owner of the page. out may be x.
template <class Number>
void copy_finite(const Number* x, Number* out, std::int64_t size) {
  for (std::int64_t i = 0; i < size; i += kLanes) {
    const Floats here = load(x + i);
    store(here - here == 0.0f ? here : Floats{}, out + i);
  }
}

template <class Number, class Weight>
struct Step {
  const Number* heads;      // [rows, queries + 2 * pairs, dim]: queries, keys, values
  const float *cos, *sin;   // [rows, dim / 2]
  const std::int32_t* to;   // [rows], slots of the pool
  const Weight *query_norm, *key_norm;  // [dim], or null
  Number* turned;           // [rows, queries, dim]
  Number* pool;             // [slots, pairs, 2, dim]: a key and its value
  std::int64_t rows, queries, pairs, dim, slots;
  float eps;

  // A head normed, if there is a norm, and turned.
  void turn_head(const Number* head, const Weight* norm, std::int64_t row, Number* out) const {
    const std::int64_t half = dim / 2;
    if (norm != nullptr) {
      norm_row(head, norm, out, dim, eps);
      head = out;
    }
    turn(head, cos + row * half, sin + row * half, out, half);
  }

  void run(std::int64_t row) const {
    const Number* head = heads + row * (queries + 2 * pairs) * dim;
    Number* query = turned + row * queries * dim;
    for (std::int64_t i = 0; i < queries; ++i, head += dim, query += dim) {
      turn_head(head, query_norm, row, query);
    }
    if (to[row] < 0 || to[row] >= slots) {
      return;  // a row of padding
    }
    Number* slot = pool + to[row] * pairs * 2 * dim;
    for (std::int64_t i = 0; i < pairs; ++i, head += dim, slot += 2 * dim) {
      turn_head(head, key_norm, row, slot);
      copy_finite(slot, slot, dim);
      copy_finite(head + pairs * dim, slot + dim, dim);
    }
  }
};

// Buffers of a call, but for the pool that came in, which is the one that goes out.
struct Buffers {
  const ffi::AnyBuffer &heads, &query_norm, &key_norm;
  const ffi::Buffer<ffi::DataType::F32> &cos, &sin;
  const ffi::Buffer<ffi::DataType::S32>& to;
  ffi::AnyBuffer &turned, &pool;
};

template <class Number, class Weight>
void run(ffi::ThreadPool& pool, const Buffers& of, float eps) {
  const bool normed = of.query_norm.element_count() > 0;
  const auto weight = [&](const ffi::AnyBuffer& norm) {
    return normed ? static_cast<const Weight*>(norm.untyped_data()) : nullptr;
  };
  Step<Number, Weight> step{};
  step.heads = static_cast<const Number*>(of.heads.untyped_data());
  step.cos = of.cos.typed_data();
  step.sin = of.sin.typed_data();
  step.to = of.to.typed_data();
  step.query_norm = weight(of.query_norm);
  step.key_norm = weight(of.key_norm);
  step.turned = static_cast<Number*>(of.turned.untyped_data());
  step.pool = static_cast<Number*>(of.pool.untyped_data());
  step.rows = of.heads.dimensions()[0];
  step.queries = of.turned.dimensions()[1];
  step.pairs = of.pool.dimensions()[2] / 2;
  step.dim = of.heads.dimensions()[2];
  step.slots = of.pool.dimensions()[0] * of.pool.dimensions()[1];
  step.eps = eps;
  share(pool, parts(step.rows, kRowsOfRotation), step.rows, [&](std::int64_t task) {
    const std::int64_t first = task * kRowsOfRotation;
    for (std::int64_t row = first; row < std::min(step.rows, first + kRowsOfRotation); ++row) {
      step.run(row);
    }
  });
}

// Why these shapes cannot be; null where they can.
const char* wrong_shapes(const Buffers& of) {
  const auto heads = of.heads.dimensions(), turned = of.turned.dimensions();
  const auto pool = of.pool.dimensions();
  if (heads.size() != 3 || turned.size() != 3 || pool.size() != 4) {
    return "a rotation takes heads [T, H + 2K, D] and a pool [N, page, 2K, D]";
  }
  const std::int64_t rows = heads[0], dim = heads[2], angles = rows * dim / 2;
  if (turned[0] != rows || turned[2] != dim || pool[3] != dim || pool[2] % 2 != 0 ||
      heads[1] != turned[1] + pool[2]) {
    return "the heads of a rotation are its queries and those of its pool";
  }
  if (dim % (2 * kLanes) != 0) {
    return "half of a head that is turned is whole vectors";
  }
  if (static_cast<std::int64_t>(of.cos.element_count()) != angles ||
      static_cast<std::int64_t>(of.sin.element_count()) != angles ||
      static_cast<std::int64_t>(of.to.element_count()) != rows) {
    return "each row of a rotation has D / 2 angles and a slot of the pool";
  }
  for (const ffi::AnyBuffer* norm : {&of.query_norm, &of.key_norm}) {
    const auto count = static_cast<std::int64_t>(norm->element_count());
    if (count != static_cast<std::int64_t>(of.query_norm.element_count()) ||
        (count != 0 && count != dim)) {
      return "the norms of a rotation are both [D] or both empty";
    }
  }
  return nullptr;
}

// heads [T, H + 2K, D], cos and sin float32 [T, 1, D / 2], slots int32 [T], norms [D] or [0] each,
// pool [N, page, 2K, D] -> queries [T, H, D] and the same pool, with the keys and values.
ffi::Error rotate_and_write(ffi::ThreadPool pool, ffi::AnyBuffer heads,
                            ffi::Buffer<ffi::DataType::F32> cos,
                            ffi::Buffer<ffi::DataType::F32> sin,
                            ffi::Buffer<ffi::DataType::S32> to, ffi::AnyBuffer query_norm,
                            ffi::AnyBuffer key_norm, ffi::AnyBuffer before,
                            ffi::Result<ffi::AnyBuffer> turned, ffi::Result<ffi::AnyBuffer> after,
                            float eps) {
  const Timed timed(Part::kRotation);
  const Buffers of{heads, query_norm, key_norm, cos, sin, to, *turned, *after};
  if (const char* why = wrong_shapes(of)) {
    return refused(why);
  }
  if (before.untyped_data() != after->untyped_data()) {
    return refused("the pool of a rotation is written where it lies");
  }
  const ffi::DataType dtype = heads.element_type(), weights = query_norm.element_type();
  if (turned->element_type() != dtype || after->element_type() != dtype ||
      key_norm.element_type() != weights) {
    return refused("heads, queries and pool of a rotation have one dtype, and so have its norms");
  }
  const bool wide = weights == ffi::DataType::F32;
  if (dtype == ffi::DataType::F32 && wide) {
    run<float, float>(pool, of, eps);
  } else if (dtype == ffi::DataType::BF16 && wide) {
    run<Bfloat16, float>(pool, of, eps);
  } else if (dtype == ffi::DataType::BF16 && weights == ffi::DataType::BF16) {
    run<Bfloat16, Bfloat16>(pool, of, eps);
  } else {
    return refused("a rotation takes float32 or bfloat16");
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jitney

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(jitney_rotate_and_write, jitney::rotate_and_write,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::DataType::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::DataType::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::DataType::S32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<float>("eps"));
#pragma GCC visibility pop
