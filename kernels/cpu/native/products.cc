// Products with weights; axes as in jitney/kernels/cpu/products.py.
#include <algorithm>

#include "panels.h"
#include "parts.h"
#include "rows.h"
#include "tasks.h"
#include "tiles.h"

namespace jitney {
namespace {

namespace ffi = xla::ffi;

// Rows of weights and of a table that are asked for ahead of the one being multiplied.
constexpr int kWeightsAhead = 48, kTableAhead = 16;
// Rows of a table per task.
constexpr Index kStripe = 512;

// x bfloat16 [T, I], w bfloat16 [P, I / B, C, B] (or `Chosen` of many), B inputs side by side -> y
// [T, P * C] in float32 or bfloat16, or, gated, [T, P * C / 2]. Rows from `count` on are zeros.
ffi::Error panels(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, RowCount count,
                  ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> y, bool gated) {
  const Timed timed(Part::kProducts);
  const auto xs = x.dimensions(), ys = y->dimensions();
  const auto [ws, weights] = chosen(w, rest);
#if JITNEY_PAIRS
  using Element = Bfloat16Panels::Left;
  constexpr Index beside = sizeof(Element) / sizeof(Bfloat16);
  if (xs.size() != 2 || !weights || ys.size() != 2 || xs[1] != beside * ws[1] ||
      ws[3] != beside || ys[0] != xs[0] || ys[1] * (gated ? 2 : 1) != ws[0] * ws[2]) {
    return refused("panels take x [T, I] and w [P, I / B, C, B]");
  }
  const ffi::DataType kind = y->element_type();
  const bool narrow = kind == ffi::DataType::BF16;
  if (x.element_type() != ffi::DataType::BF16 || w.element_type() != ffi::DataType::BF16 ||
      !(narrow || (kind == ffi::DataType::F32 && !gated))) {
    return refused("panels multiply bfloat16 into float32 or bfloat16");
  }
  if (ws[2] % (gated ? 2 * kLanes : kLanes) != 0) {
    return refused("a panel has whole vectors of columns");
  }
  const Index rows = present(count, xs[0]);
  clear_rows(pool, *y, rows);
  const Panels<Bfloat16Panels> of{static_cast<const Element*>(x.untyped_data()),
                                  static_cast<const Element*>(weights),
                                  rows,
                                  ws[0],
                                  ws[1],
                                  ws[2]};
  void* out = y->untyped_data();
  const Index width = gated ? of.columns / 2 : of.columns;
  multiply_panels(pool, of, [&, width](Index panel, Index row, const float* sums) {
    const Index at = (row * of.panels + panel) * width;
    if (gated) {
      gate_row(sums, static_cast<Bfloat16*>(out) + at, width);
    } else if (narrow) {
      copy_row(sums, static_cast<Bfloat16*>(out) + at, width);
    } else {
      copy_row(sums, static_cast<float*>(out) + at, width);
    }
  });
  return ffi::Error::Success();
#else
  return refused("panels are for CPUs that multiply pairs of bfloat16");
#endif
}

// Two runs of columns a thread, each a multiple of its tile's width. Of more rows than a tile has,
// each tile's columns are multiplied with all of them while they are near; the last rows overlap
// those before, and are the same bits again.
template <class Kind>
void multiply_runs(ffi::ThreadPool& pool, const ffi::AnyBuffer& x, Index rows,
                   const ffi::AnyBuffer& w, ffi::AnyBuffer& y) {
  if (rows == 0) {
    return;
  }
  const Index depth = w.dimensions()[0], outs = w.dimensions()[1];
  const auto* left = static_cast<const typename Kind::Left*>(x.untyped_data());
  const auto* right = static_cast<const typename Kind::Right*>(w.untyped_data());
  auto* to = static_cast<float*>(y.untyped_data());
  const Index tall = std::min<Index>(rows, kMostRows);
  const Index vectors = vectors_for(tall, outs / kLanes), width = vectors * kLanes;
  const auto opening = tile_for<Kind, kWeightsAhead>(tall, vectors);
  const auto following = tile_for<Kind, 0>(tall, vectors);
  const Index runs = 2 * threads();
  const Index run = parts(outs / width, runs) * width;
  share(pool, parts(outs, run), rows, [=](Index ticket) {
    const Index end = std::min(outs, (ticket + 1) * run);
    for (Index column = ticket * run; column < end; column += width) {
      for (Index begin = 0; begin < rows; begin += tall) {
        const Index row = std::min(begin, rows - tall);
        const auto multiply = begin == 0 ? opening : following;
        multiply(left + row * depth, depth, right + column, outs, to + row * outs + column, outs,
                 depth, false, {});
      }
    }
  });
}

// x float32 [T, I], w float32 or bfloat16 [I, O] -> y float32 [T, O]. Rows from `count` on are
// zeros.
ffi::Error product(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, RowCount count,
                   ffi::Result<ffi::AnyBuffer> y) {
  const Timed timed(Part::kProducts);
  const auto xs = x.dimensions(), ws = w.dimensions(), ys = y->dimensions();
  if (xs.size() != 2 || ws.size() != 2 || ys.size() != 2 || xs[1] != ws[0] || ys[0] != xs[0] ||
      ys[1] != ws[1]) {
    return refused("a product takes x [T, I] and w [I, O]");
  }
  if (xs[0] < 1 || ws[1] % kLanes != 0) {
    return refused("a product takes at least a row, and whole vectors of columns");
  }
  if (x.element_type() != ffi::DataType::F32 || y->element_type() != ffi::DataType::F32) {
    return refused("x and the product are float32");
  }
  const Index rows = present(count, xs[0]);
  if (w.element_type() == ffi::DataType::F32) {
    multiply_runs<Single>(pool, x, rows, w, *y);
  } else if (w.element_type() == ffi::DataType::BF16) {
    multiply_runs<Widened>(pool, x, rows, w, *y);
  } else {
    return refused("weights are float32 or bfloat16");
  }
  clear_rows(pool, *y, rows);
  return ffi::Error::Success();
}

// Rows of x, a power of two, times kDots rows of a table.
template <class Kind, int kRows, int kAhead>
void table_block(const typename Kind::Left* x, const typename Kind::Right* table, Index size,
                 float* to, Index words) {
  constexpr int others = kDots / kRows;
  for (int j = 0; j < kDots; j += others) {
    dots<Kind, kRows, others, kAhead>(x, size, table + j * size, size, to + j, words, size);
  }
}

// All rows of x times kDots rows of a table, which the first rows ask for ahead.
template <class Kind>
void table_rows(const typename Kind::Left* x, Index rows, const typename Kind::Right* table,
                Index size, float* to, Index words) {
  Index row = 0;
  const auto left = [&] { return x + row * size; };
  const auto out = [&] { return to + row * words; };
  if (rows == 1) {
    table_block<Kind, 1, kTableAhead>(left(), table, size, out(), words);
    return;
  }
  if (rows < 4) {
    table_block<Kind, 2, kTableAhead>(left(), table, size, out(), words);
    row = 2;
  } else {
    table_block<Kind, 4, kTableAhead>(left(), table, size, out(), words);
    row = 4;
  }
  for (; rows - row >= 4; row += 4) {
    table_block<Kind, 4, 0>(left(), table, size, out(), words);
  }
  if (rows - row >= 2) {
    table_block<Kind, 2, 0>(left(), table, size, out(), words);
    row += 2;
  }
  if (rows - row == 1) {
    table_block<Kind, 1, 0>(left(), table, size, out(), words);
  }
}

// A task has a stripe of the table. `size` counts elements of the kind.
template <class Kind>
void project_stripes(ffi::ThreadPool& pool, const ffi::AnyBuffer& x, const ffi::AnyBuffer& table,
                     ffi::AnyBuffer& y, Index size) {
  const Index rows = x.dimensions()[0], words = table.dimensions()[0];
  const auto* left = static_cast<const typename Kind::Left*>(x.untyped_data());
  const auto* right = static_cast<const typename Kind::Right*>(table.untyped_data());
  auto* to = static_cast<float*>(y.untyped_data());
  share(pool, parts(words, kStripe), rows, [=](Index ticket) {
    const Index end = std::min(words, (ticket + 1) * kStripe);
    for (Index word = ticket * kStripe; word < end; word += kDots) {
      table_rows<Kind>(left, rows, right + word * size, size, to + word, words);
    }
  });
}

#if JITNEY_AMX
// Rows of x, [rows, size] pairs, as columns: [size, columns], zeros where there is no row.
const Pair* as_columns(const Pair* x, Index rows, Index size, Index columns) {
  Pair* turned = reinterpret_cast<Pair*>(Scratch::of_call().of(size * columns));
  for (Index i = 0; i < size; ++i) {
    for (Index row = 0; row < columns; ++row) {
      turned[i * columns + row] = row < rows ? x[row * size + i] : Pair{0};
    }
  }
  return turned;
}

// y[row, word] = sums[word, row], of so many words and of the rows that there are.
void store_turned(const float* sums, Index columns, Index count, Index rows, float* to,
                  Index words) {
  for (Index word = 0; word < count; word += kLanes) {
    for (Index row = 0; row < rows; row += kLanes) {
      Floats square[kLanes];
      repeat<kLanes>([&](auto i) { square[i] = load(sums + (word + i) * columns + row); });
      transpose(square);
      const Index present = std::min<Index>(kLanes, rows - row);
      for (Index r = 0; r < present; ++r) {
        store(square[r], to + (row + r) * words + word);
      }
    }
  }
}

// The same by AMX, whose A is the table as it lies.
void project_amx(ffi::ThreadPool& pool, const ffi::AnyBuffer& x, const ffi::AnyBuffer& table,
                 ffi::AnyBuffer& y, Index size) {
  const Index rows = x.dimensions()[0], words = table.dimensions()[0];
  const Index columns = padded(rows, kLanes);
  const auto* lying = static_cast<const Pair*>(x.untyped_data());
  const Pair* right = as_columns(lying, rows, size, columns);
  const auto* left = static_cast<const Pair*>(table.untyped_data());
  auto* to = static_cast<float*>(y.untyped_data());
  share(pool, parts(words, kStripe), rows, [=](Index ticket) {
    const Index first = ticket * kStripe, count = std::min(kStripe, words - first);
    float* sums = Scratch::mine().of(count * columns);
    const amx::Product<Pairs> product{left + first * size, size, right, columns, sums, columns,
                                      size,                false};
    amx::Registers registers;
    amx::Soon soon;
    amx::multiply<Pairs, amx::Near::kColumns, 0>(product, count, columns, soon, registers);
    store_turned(sums, columns, count, rows, to + first, words);
  });
}
#endif

// x [T, E] float32, or bfloat16 where the CPU multiplies pairs, table [V, E] float32 or bfloat16 ->
// y float32 [T, V].
ffi::Error project(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer table,
                   ffi::Result<ffi::AnyBuffer> y) {
  const Timed timed(Part::kHead);
  const auto xs = x.dimensions(), ts = table.dimensions(), ys = y->dimensions();
  if (xs.size() != 2 || ts.size() != 2 || ys.size() != 2 || xs[1] != ts[1] || ys[0] != xs[0] ||
      ys[1] != ts[0]) {
    return refused("a projection takes x [T, E] and a table [V, E]");
  }
  const ffi::DataType of_x = x.element_type(), of_table = table.element_type();
  const bool pairs =
      of_x == ffi::DataType::BF16 && of_table == ffi::DataType::BF16 && kMultipliesPairs;
  if (ts[0] % kDots != 0 || ts[1] % (pairs ? 2 * kLanes : kLanes) != 0) {
    return refused("a table has whole vectors of rows and of columns");
  }
  if (y->element_type() != ffi::DataType::F32) {
    return refused("a projection is float32");
  }
  if (pairs) {
#if JITNEY_AMX
    project_amx(pool, x, table, *y, ts[1] / 2);
#elif JITNEY_PAIRS
    project_stripes<Pairs>(pool, x, table, *y, ts[1] / 2);
#endif
  } else if (of_x == ffi::DataType::F32 && of_table == ffi::DataType::F32) {
    project_stripes<Single>(pool, x, table, *y, ts[1]);
  } else if (of_x == ffi::DataType::F32 && of_table == ffi::DataType::BF16) {
    project_stripes<Widened>(pool, x, table, *y, ts[1]);
  } else {
    return refused("a projection takes float32, and bfloat16 where the CPU multiplies pairs of it");
  }
  return ffi::Error::Success();
}

// How panels are laid out: inputs side by side in bfloat16 (0: they are not multiplied so) and in
// int8, and the most columns of a panel, which are whole tiles.
#if JITNEY_PAIRS
constexpr int kBfloat16Beside = sizeof(Bfloat16Panels::Left) / sizeof(Bfloat16);
#else
constexpr int kBfloat16Beside = 0;
#endif
constexpr int kBytesBeside = sizeof(Int8Panels::Left);
constexpr int kPanelColumns = kLanes == 4 ? 32 : 96;

}  // namespace
}  // namespace jitney

#pragma GCC visibility push(default)
extern "C" const int jitney_panel_layout[] = {jitney::kBfloat16Beside, jitney::kBytesBeside,
                                              jitney::kPanelColumns};
XLA_FFI_DEFINE_HANDLER_SYMBOL(jitney_panels, jitney::panels,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<jitney::RowCount>()
                                  .RemainingArgs()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<bool>("gated"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jitney_product, jitney::product,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<jitney::RowCount>()
                                  .Ret<xla::ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jitney_project, jitney::project,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>());
#pragma GCC visibility pop
