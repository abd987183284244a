// Rows that pad a step: a bucket has more rows than a step has tokens, and nobody reads what comes of
// the others. Products write zeros for them, which the sums and norms behind read, and multiply
// nothing.
#pragma once

#include <algorithm>
#include <cstring>

#include "tasks.h"
#include "tiles.h"

namespace jitney {

// Rows of a step that are somebody's, int32; the others pad it.
using RowCount = xla::ffi::BufferR0<xla::ffi::DataType::S32>;

// How many of so many rows are multiplied.
inline Index present(const RowCount& count, Index rows) {
  return std::clamp<Index>(count.typed_data()[0], 0, rows);
}

// Rows of y, [rows, ...], that are cleared at a time.
constexpr Index kClearedAtATime = 16;

// Zeros for the rows of y [rows, ...] from `first` on.
inline void clear_rows(xla::ffi::ThreadPool& pool, xla::ffi::AnyBuffer& y, Index first) {
  const Index rows = y.dimensions()[0];
  if (first == rows) {
    return;
  }
  const Index bytes = static_cast<Index>(y.size_bytes()) / rows;
  auto* to = static_cast<char*>(y.untyped_data());
  share(pool, parts(rows - first, kClearedAtATime), rows, [=](Index ticket) {
    const Index begin = first + ticket * kClearedAtATime;
    const Index end = std::min(rows, begin + kClearedAtATime);
    std::memset(to + begin * bytes, 0, (end - begin) * bytes);
  });
}

}  // namespace jitney
