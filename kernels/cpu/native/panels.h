// Weights that were laid out once, in panels: what is common to every type of number.
//
// A panel holds all inputs of some columns, an element of `Kind` after the other, so that a tile
// reads it from the first byte to the last.
#pragma once

#include <algorithm>

#include "amx.h"
#include "tasks.h"
#include "tiles.h"

namespace jitney {

// Rows of a panel that are asked for ahead of the one being multiplied.
constexpr int kPanelAhead = 24;
// Elements of a panel's column, and rows of x, that one task takes at a time: what they need (400 KB
// and less than 300) stays in the second-level cache.
constexpr Index kDepth = 1024, kChunk = 128;
// AMX multiplies several times as fast, so it takes more rows with what it reads of a panel.
constexpr Index kAmxChunk = 512;

template <class Kind>
struct Panels {
  const typename Kind::Left* x;   // [rows, depth]
  const typename Kind::Right* w;  // [panels, depth, columns]
  Index rows, panels, depth, columns;

  // Vectors of a tile: all of a panel's, where the registers hold so many sums.
  Index wide() const { return divisor(columns / kLanes, most_vectors<Kind>()); }

  // Rows of a tile; AMX needs no whole ones.
  Index tall() const { return kAmx<Kind> ? 1 : std::min(rows, rows_for<Kind>(wide())); }

  // Rows that one task takes at a time: with AMX as many as leave a task or two for each thread.
  Index chunk() const {
    if (!kAmx<Kind>) {
      return kChunk;
    }
    Index most = kAmxChunk;
    while (most > kChunk / 2 && panels * ((rows + most - 1) / most) < 2 * threads()) {
      most /= 2;
    }
    return most;
  }

  Index chunks() const { return (rows + chunk() - 1) / chunk(); }
};

// Rows of tile i of the chunk that begins at row `first` start here. The last tile overlaps the one
// before where the rows do not divide: it computes the same bits again.
template <class Kind>
Index row_of(const Panels<Kind>& of, Index first, Index i) {
  return std::min(first + i * of.tall(), of.rows - of.tall());
}

template <class Kind>
Index tiles_of_chunk(const Panels<Kind>& of, Index first) {
  const Index tall = of.tall();
  return (std::min(of.chunk(), of.rows - first) + tall - 1) / tall;
}

// The sums of a chunk's rows, from `first` on, with one panel, [chunk + tall, columns]; rows of
// tile i begin at i * tall. The panel that is expected next is asked for meanwhile.
template <class Kind>
void multiply_panel(const Panels<Kind>& of, Index panel, Index first, float* sums) {
  const Index tall = of.tall(), wide = of.wide(), tiles = tiles_of_chunk(of, first);
  const auto opening = tile_for<Kind, kPanelAhead>(tall, wide);
  const auto following = tile_for<Kind, 0>(tall, wide);
  const auto* here = of.w + panel * of.depth * of.columns;
  const auto* next = of.w + (panel + threads()) % of.panels * of.depth * of.columns;
  for (Index start = 0; start < of.depth; start += kDepth) {
    const Index deep = std::min(kDepth, of.depth - start);
    const Index share = deep * of.columns / tiles;
    for (Index i = 0; i < tiles; ++i) {
      const auto* x = of.x + row_of(of, first, i) * of.depth + start;
      const auto multiply = i == 0 ? opening : following;
      for (Index column = 0; column < of.columns; column += wide * kLanes) {
        multiply(x, of.depth, here + start * of.columns + column, of.columns,
                 sums + i * tall * of.columns + column, of.columns, deep, start > 0);
      }
      if (tiles > 1) {
        prefetch_second(next + start * of.columns + i * share, share * sizeof *next);
      }
    }
  }
}

#if JITNEY_AMX
// The same by AMX; the sums of row `first` + r begin at r * columns. Few rows are done before what
// is asked for could come: they ask for the panel that they read.
template <class Kind>
void multiply_panel_amx(const Panels<Kind>& of, Index panel, Index first, float* sums) {
  const Index rows = tiles_of_chunk(of, first);
  const auto* here = of.w + panel * of.depth * of.columns;
  const auto* next = of.w + (panel + threads()) % of.panels * of.depth * of.columns;
  for (Index start = 0; start < of.depth; start += kDepth) {
    const Index deep = std::min(kDepth, of.depth - start);
    const Index bytes = deep * of.columns * Index{sizeof *next};
    const amx::Soon soon{reinterpret_cast<const char*>(next + start * of.columns),
                   rows > amx::kSide ? bytes / amx::steps(rows, of.columns, deep) : 0};
    const amx::Product<Kind> product{of.x + first * of.depth + start,
                                     of.depth,
                                     here + start * of.columns,
                                     of.columns,
                                     sums,
                                     of.columns,
                                     deep,
                                     start > 0};
    amx::multiply<Kind, kPanelAhead>(product, rows, of.columns, soon);
  }
}
#endif

// Every panel times every chunk of rows, on all threads; finish(panel, row, sums) is told the sums
// [columns] of each row, and may overwrite them.
template <class Kind, class Finish>
void multiply_panels(xla::ffi::ThreadPool& pool, const Panels<Kind>& of, const Finish& finish) {
  share(pool, of.panels * of.chunks(), of.rows, [&](Index ticket) {
    const Index panel = ticket % of.panels, first = ticket / of.panels * of.chunk();
    const Index tall = of.tall(), tiles = tiles_of_chunk(of, first);
    float* sums = Scratch::mine().of((of.chunk() + tall) * of.columns);
    if constexpr (kAmx<Kind>) {
      multiply_panel_amx(of, panel, first, sums);
    } else {
      multiply_panel(of, panel, first, sums);
    }
    for (Index i = 0; i < tiles; ++i) {
      const Index row = row_of(of, first, i);
      for (Index r = 0; r < tall; ++r) {
        finish(panel, row + r, sums + (i * tall + r) * of.columns);
      }
    }
  });
}

// to = silu(sums[:count]) * sums[count:], rounded to what `to` holds.
template <class To>
void gate_row(const float* sums, To* to, Index count) {
  const Floats one = splat(1.0f);
  for (Index i = 0; i < count; i += kLanes) {
    const Floats gate = load(sums + i), up = load(sums + count + i);
    const Floats size = greater(-gate, gate);
    const Floats power =
        exp2_of_negative(size * splat(-1.44269504f));  // exp(-|gate|), which never overflows
    const Floats share = (gate >= Floats{}) ? one : power;
    store(gate * share / (one + power) * up, to + i);
  }
}

}  // namespace jitney
