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
// Elements of a panel's column, and rows of x, that one task takes at a time: what they need (400
// KB and less than 300) stays in the second-level cache.
constexpr Index kDepth = 1024, kChunk = 128;
// AMX multiplies several times as fast, so a thread takes more rows with what it reads of a panel:
// whole ones of so many and more. Of those a block has its sums, and as many inputs of its rows,
// in the first-level cache.
constexpr Index kAmxChunk = 256, kAmxBlock = 32, kAmxDepth = 144;

template <class Kind>
struct Panels {
  const typename Kind::Left* x;   // [rows, depth]
  const typename Kind::Right* w;  // [panels, depth, columns]
  Index rows, panels, depth, columns;

  // Vectors of a tile: all of a panel's, where the registers hold so many sums.
  Index wide() const { return divisor(columns / kLanes, most_vectors<Kind>()); }

  // Rows of a tile.
  Index tall() const { return std::min(rows, rows_for<Kind>(wide())); }

  // Rows that one task takes at a time: with AMX as many as leave a task or two for each thread.
  Index chunk() const {
    if (!kAmx<Kind>) {
      return kChunk;
    }
    const Index whole = std::max<Index>(1, rows / kAmxChunk);
    Index most = padded(parts(rows, whole), kAmxBlock);
    while (most > kChunk / 2 && panels * parts(rows, most) < 2 * threads()) {
      most = padded(most / 2, kAmxBlock);
    }
    return most;
  }

  Index chunks() const { return parts(rows, chunk()); }
};

// Rows of tile i of the chunk that begins at row `first` start here. The last tile overlaps the one
// before where the rows do not divide: it computes the same bits again.
template <class Kind>
Index row_of(const Panels<Kind>& of, Index first, Index i) {
  return std::min(first + i * of.tall(), of.rows - of.tall());
}

template <class Kind>
Index tiles_of_chunk(const Panels<Kind>& of, Index first) {
  return parts(std::min(of.chunk(), of.rows - first), of.tall());
}

// The rows of a chunk, from `first` on, times one panel: finish(row, sums) is told the sums of
// each. Those of tile i begin at i * tall. The panel that is expected next is asked for meanwhile.
template <class Kind, class Finish>
void multiply_panel(const Panels<Kind>& of, Index panel, Index first, const Finish& finish) {
  const Index tall = of.tall(), wide = of.wide(), tiles = tiles_of_chunk(of, first);
  // A single tile is done before anything could come that it asked for.
  const auto opening = tiles == 1 ? tile_for<Kind, kPanelAhead>(tall, wide)
                                  : tile_for<Kind, kPanelAhead, true>(tall, wide);
  const auto following = tile_for<Kind, 0, true>(tall, wide);
  const auto* here = of.w + panel * of.depth * of.columns;
  const auto* next = of.w + (panel + 1) % of.panels * of.depth * of.columns;
  // Of a matrix that is not cut, each tile is finished before the next one has sums.
  const Index kept = of.depth > kDepth ? tall * of.columns : 0;
  float* all_sums = Scratch::mine().of(tiles * kept + tall * of.columns);
  const Index side_by_side = of.columns / (wide * kLanes);
  for (Index start = 0; start < of.depth; start += kDepth) {
    const Index deep = std::min(kDepth, of.depth - start);
    // Of the next panel, with each element of each tile; two tiles are done before memory could
    // bring all of it.
    Index step = parts(of.columns * sizeof *next, tiles * side_by_side);
    if (tiles == 2) {
      step = std::min<Index>(step, kLine);
    }
    const auto* later = reinterpret_cast<const char*>(next + start * of.columns);
    for (Index i = 0; i < tiles; ++i) {
      const Index row = row_of(of, first, i);
      const auto* x = of.x + row * of.depth + start;
      const auto multiply = i == 0 ? opening : following;
      float* sums = all_sums + i * kept;
      for (Index column = 0; column < of.columns; column += wide * kLanes) {
        multiply(x, of.depth, here + start * of.columns + column, of.columns, sums + column,
                 of.columns, deep, start > 0, {later, step});
        later += deep * step;
      }
      const Index finished = start + deep == of.depth ? tall : 0;
      for (Index r = 0; r < finished; ++r) {
        finish(row + r, sums + r * of.columns);
      }
    }
  }
}

#if JITNEY_AMX
// The same by AMX: finish(row, sums) is told the sums of each row while they are near. Few rows are
// done before what is asked for could come: they ask for the panel that they read.
template <class Kind, class Finish>
void multiply_panel_amx(const Panels<Kind>& of, Index panel, Index first, const Finish& finish) {
  const Index end = std::min(of.rows, first + of.chunk()), columns = of.columns;
  const bool many = end - first > kAmxBlock;
  const Index cuts = parts(of.depth, kAmxDepth);
  const Index deep = many ? padded(parts(of.depth, cuts), amx::kSide) : of.depth;
  const auto* here = of.w + panel * of.depth * columns;
  const auto* next = of.w + (panel + 1) % of.panels * of.depth * columns;
  const Index bytes = of.depth * columns * Index{sizeof *next};
  amx::Soon soon{reinterpret_cast<const char*>(next), 0};
  if (end - first > amx::kSide) {
    soon.bytes = bytes / amx::steps(end - first, columns, of.depth);
  }
  float* sums = Scratch::mine().of(kAmxBlock * columns);
  amx::Registers registers;
  for (Index row = first; row < end; row += kAmxBlock) {
    const Index count = std::min(kAmxBlock, end - row);
    for (Index start = 0; start < of.depth; start += deep) {
      const amx::Product<Kind> product{of.x + row * of.depth + start,
                                       of.depth,
                                       here + start * columns,
                                       columns,
                                       sums,
                                       columns,
                                       std::min(deep, of.depth - start),
                                       start > 0};
      amx::multiply<Kind, amx::Near::kRows, kPanelAhead>(product, count, columns, soon,
                                                         registers);
    }
    for (Index r = 0; r < count; ++r) {
      finish(row + r, sums + r * columns);
    }
  }
}
#endif

// Every panel times every chunk of rows, on all threads; finish(panel, row, sums) is told the sums
// [columns] of each row, and may overwrite them.
template <class Kind, class Finish>
void multiply_panels(xla::ffi::ThreadPool& pool, const Panels<Kind>& of, const Finish& finish) {
  if (of.rows == 0) {
    return;
  }
  share(pool, of.panels * of.chunks(), of.rows, [&](Index ticket) {
    const Index panel = ticket % of.panels, first = ticket / of.panels * of.chunk();
    if constexpr (kAmx<Kind>) {
      multiply_panel_amx(of, panel, first,
                         [&](Index row, float* sums) { finish(panel, row, sums); });
    } else {
      multiply_panel(of, panel, first, [&](Index row, float* sums) { finish(panel, row, sums); });
    }
  });
}

// to = silu(sums[:count]) * sums[count:], rounded to what `to` holds.
template <class To>
void gate_row(const float* sums, To* to, Index count) {
  store_each(to, count,
             [&](Index i) { return silu<To>(load(sums + i)) * load(sums + count + i); });
}

}  // namespace jitney
