// Products with weights in MXFP4, which a task widens to elements of a panel, some blocks at a time,
// while they are near: any number of rows is multiplied with them as with a panel of floats. A
// row's result is the same bits as with these, and in every number of rows.
#include <algorithm>
#include <cstdint>

#include "panels.h"
#include "parts.h"
#include "rows.h"
#include "tasks.h"
#include "tiles.h"

namespace jitney {
namespace {

namespace ffi = xla::ffi;

constexpr Index kBlock = 32;          // inputs that share a scale
constexpr Index kBytes = kBlock / 2;  // of a column's block
// Rows that one task takes at a time, and bytes of widened weights, in the first-level cache.
constexpr Index kRowsOfChunk = 128, kNear = 16 << 10;

// Elements of a block's column.
template <class Kind>
constexpr Index kElements = std::is_same_v<Kind, Single>
                                ? kBlock
                                : kBlock / (sizeof(typename Kind::Right) / sizeof(Bfloat16));

// Two inputs of kLanes columns, each weight as it is multiplied.
struct Two {
  Floats first, second;

  // codes: a byte of each column, the first input in the lower half.
  Two(const std::uint8_t* codes, Floats scales) {
    const Ints bytes = load_bytes(codes);
    first = small_floats(bytes) * scales;
    second = small_floats(bytes >> 4) * scales;
  }

  // As bfloat16, in which weights are exact.
  Ints pairs() const { return ((as_ints(first) >> 16) & 0xFFFF) | (as_ints(second) & ~0xFFFF); }
};

inline void store_two(const Two& two, float* to, Index columns) {
  store(two.first, to);
  store(two.second, to + columns);
}

// One block of kLanes columns: codes [kBytes, columns] -> to [kElements, columns].
template <class Kind>
void widen(const std::uint8_t* codes, Floats scales, Index columns, typename Kind::Right* to) {
  if constexpr (std::is_same_v<Kind, Single>) {
    for (Index i = 0; i < kBytes; ++i) {
      store_two({codes + i * columns, scales}, to + 2 * i * columns, columns);
    }
  } else if constexpr (sizeof(typename Kind::Right) == 4) {
    for (Index i = 0; i < kBytes; ++i) {
      const Two two(codes + i * columns, scales);
      store(as_floats(two.pairs()), reinterpret_cast<float*>(to + i * columns));
    }
  } else {
    for (Index i = 0; i < kBytes; i += 2) {
      const Ints even = Two(codes + i * columns, scales).pairs();
      const Ints odd = Two(codes + (i + 1) * columns, scales).pairs();
      for (int lane = 0; lane < kLanes; ++lane) {
        to[i / 2 * columns + lane].bits = static_cast<std::uint32_t>(even[lane]) |
                                          std::uint64_t{static_cast<std::uint32_t>(odd[lane])} << 32;
      }
    }
  }
}

// One call.
template <class Kind>
struct Fours {
  const typename Kind::Left* x;  // [rows, blocks * kElements]
  const std::uint8_t* codes;     // [panels, blocks, kBytes, columns]
  const std::uint8_t* scales;    // [panels, blocks, columns]
  float* y;                      // [all rows, panels * columns]
  Index rows, panels, blocks, columns;

  Index depth() const { return blocks * kElements<Kind>; }

  // Blocks of a panel that are widened at a time.
  Index together() const {
    const Index bytes = kElements<Kind> * columns * Index{sizeof(typename Kind::Right)};
    return std::max<Index>(1, kNear / bytes);
  }

  // Blocks [first, first + count) of a panel, widened: [count * kElements, columns].
  void widen_blocks(Index panel, Index first, Index count, typename Kind::Right* to) const {
    for (Index block = first; block < first + count; ++block) {
      const Index at = panel * blocks + block;
      for (Index column = 0; column < columns; column += kLanes) {
        const Ints powers = load_bytes(scales + at * columns + column) << 23;
        widen<Kind>(codes + at * kBytes * columns + column, as_floats(powers), columns,
                    to + column);
      }
      to += kElements<Kind> * columns;
    }
  }

  void finish(Index panel, Index row, const float* sums) const {
    copy_row(sums, y + (row * panels + panel) * columns, columns);
  }
};

// A chunk of rows times one panel.
template <class Kind>
void multiply_panel(const Fours<Kind>& of, Index panel, Index first) {
  const Index columns = of.columns, depth = of.depth();
  const Index count = std::min(kRowsOfChunk, of.rows - first), together = of.together();
  const Index wide = divisor(columns / kLanes, most_vectors<Kind>());
  const Index tall = std::min(count, rows_for<Kind>(wide)), tiles = parts(count, tall);
  const auto tile = tile_for<Kind, 0>(tall, wide);
  // The last tile overlaps the one before where the rows do not divide, so each has sums of its own.
  const auto row_of = [&](Index i) { return first + std::min(i * tall, count - tall); };
  const Index kept = tiles * tall * columns;
  const Index widened = together * kElements<Kind> * columns * sizeof(typename Kind::Right) / 4;
  float* sums = Scratch::mine().of(kept + widened);
  auto* weights = reinterpret_cast<typename Kind::Right*>(sums + kept);
  RegistersOf<Kind> registers;
  for (Index block = 0; block < of.blocks; block += together) {
    const Index here = std::min(together, of.blocks - block), deep = here * kElements<Kind>;
    of.widen_blocks(panel, block, here, weights);
    const auto* x = of.x + block * kElements<Kind>;
#if JITNEY_AMX
    if constexpr (kAmx<Kind>) {
      const amx::Product<Kind> product{x + first * depth, depth,   weights, columns,
                                       sums,              columns, deep,    block > 0};
      amx::Soon soon;
      amx::multiply<Kind, amx::Near::kColumns, 0>(product, count, columns, soon, registers);
      continue;
    }
#endif
    for (Index i = 0; i < tiles; ++i) {
      for (Index column = 0; column < columns; column += wide * kLanes) {
        tile(x + row_of(i) * depth, depth, weights + column, columns,
             sums + i * tall * columns + column, columns, deep, block > 0, {});
      }
    }
  }
  if (kAmx<Kind>) {
    for (Index r = 0; r < count; ++r) {
      of.finish(panel, first + r, sums + r * columns);
    }
    return;
  }
  for (Index i = 0; i < tiles; ++i) {
    for (Index r = 0; r < tall; ++r) {
      of.finish(panel, row_of(i) + r, sums + (i * tall + r) * columns);
    }
  }
}

template <class Kind>
void multiply(ffi::ThreadPool& pool, Fours<Kind> of, const void* x) {
  of.x = static_cast<const typename Kind::Left*>(x);
  share(pool, of.panels * parts(of.rows, kRowsOfChunk), of.rows, [&](Index ticket) {
    multiply_panel(of, ticket % of.panels, ticket / of.panels * kRowsOfChunk);
  });
}

// x [T, I] float32, or bfloat16 where the CPU multiplies pairs of it, codes uint8 [P, I / 32, 16, C]
// and scales uint8 [P, I / 32, 1, C] (or `Chosen` of many): a byte has inputs 2j and 2j + 1 of a
// column -> y float32 [T, P * C]. Rows from `count` on are zeros.
ffi::Error mxfp4_panels(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer codes,
                        ffi::AnyBuffer scales, RowCount count, ffi::RemainingArgs rest,
                        ffi::Result<ffi::AnyBuffer> y) {
  const Timed timed(Part::kProducts);
  const auto xs = x.dimensions(), ys = y->dimensions();
  const auto [cs, bytes] = chosen(codes, rest);
  const auto [ss, powers] = chosen(scales, rest);
  if (xs.size() != 2 || ys.size() != 2 || !bytes || !powers || xs[1] != kBlock * cs[1] ||
      cs[2] != kBytes || ss[0] != cs[0] || ss[1] != cs[1] || ss[2] != 1 || ss[3] != cs[3] ||
      cs[3] % kLanes != 0 || ys[0] != xs[0] || ys[1] != cs[0] * cs[3]) {
    return refused("MXFP4 takes x [T, I], codes [P, I / 32, 16, C] and scales [P, I / 32, 1, C]");
  }
  if (codes.element_type() != ffi::DataType::U8 || scales.element_type() != ffi::DataType::U8 ||
      y->element_type() != ffi::DataType::F32) {
    return refused("codes and scales of MXFP4 are uint8, and the product is float32");
  }
  const Index rows = present(count, xs[0]);
  clear_rows(pool, *y, rows);
  const auto call = [&](auto fours) {
    fours.codes = static_cast<const std::uint8_t*>(bytes);
    fours.scales = static_cast<const std::uint8_t*>(powers);
    fours.y = static_cast<float*>(y->untyped_data());
    fours.rows = rows;
    fours.panels = cs[0];
    fours.blocks = cs[1];
    fours.columns = cs[3];
    multiply(pool, fours, x.untyped_data());
    return ffi::Error::Success();
  };
  if (x.element_type() == ffi::DataType::F32) {
    return call(Fours<Single>{});
  }
#if JITNEY_PAIRS
  if (x.element_type() == ffi::DataType::BF16) {
    return call(Fours<Bfloat16Panels>{});
  }
#endif
  return refused("MXFP4 is multiplied with float32, and bfloat16 where the CPU multiplies pairs");
}

}  // namespace
}  // namespace jitney

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(jitney_mxfp4_panels, jitney::mxfp4_panels,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<jitney::RowCount>()
                                  .RemainingArgs()
                                  .Ret<xla::ffi::AnyBuffer>());
#pragma GCC visibility pop
