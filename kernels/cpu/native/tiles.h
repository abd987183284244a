// Small products whose sums all stand in registers: what every product and attention here is made
// of.
//
// A `Kind` says what is multiplied: `Left` and `Right` are the element types of A and B, and a sum
// takes one element of each at a time, in the order of the inputs, whatever the shape of the tile
// it stands in. So with pairs, where nothing is left over, a row's result is the same bits alone
// and among any number of rows. Strides count elements.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <utility>

#include "vectors.h"

namespace jitney {

// float32 times float32.
struct Single {
  using Left = float;
  using Right = float;
  static Floats repeated(const float* from) { return splat(*from); }
  static Floats add(Floats x, Floats y, Floats sum) { return multiply_add(x, y, sum); }
};

// float32 times bfloat16, which is widened on its way.
struct Widened {
  using Left = float;
  using Right = Bfloat16;
  static Floats repeated(const float* from) { return splat(*from); }
  static Floats add(Floats x, Floats y, Floats sum) { return multiply_add(x, y, sum); }
};

#if JITNEY_PAIRS
// Pairs of bfloat16 times pairs of bfloat16: two products an element.
struct Pairs {
  using Left = Pair;
  using Right = Pair;
  static Floats repeated(const Pair* from) {
    return as_floats(Ints{} + static_cast<std::int32_t>(from->bits));
  }
  static Floats add(Floats x, Floats y, Floats sum) { return multiply_add_pairs(x, y, sum); }
};
#endif

// Quads of int8 times quads of uint8: four products an element, whose sums are int32 under the
// names of floats. They are exact, so nothing depends on their order.
struct Quads {
  using Left = Quad;
  using Right = Quad;
  static Floats repeated(const Quad* from) {
    return as_floats(Ints{} + static_cast<std::int32_t>(from->bits));
  }
  static Floats add(Floats x, Floats y, Floats sum) {
    return as_floats(multiply_add_quads(as_ints(x), as_ints(y), as_ints(sum)));
  }
};

#if JITNEY_SQUARES
// Four bfloat16 times four bfloat16, two rows times two columns at once.
struct Bfloat16Squares {
  using Left = Eight;
  using Right = Eight;
  static Floats add(Floats x, Floats y, Floats sum) { return multiply_add_square(x, y, sum); }
};

// Eight int8 times eight uint8 likewise; sums are int32 under the names of floats.
struct Int8Squares {
  using Left = Eight;
  using Right = Eight;
  static Floats add(Floats x, Floats y, Floats sum) {
    return as_floats(multiply_add_square(as_ints(x), as_ints(y), as_ints(sum)));
  }
};
#endif

// What panels of weights are multiplied as: an element is neighbouring inputs of a column.
#if JITNEY_SQUARES
using Bfloat16Panels = Bfloat16Squares;
using Int8Panels = Int8Squares;
#else
#if JITNEY_PAIRS
using Bfloat16Panels = Pairs;
#endif
using Int8Panels = Quads;
#endif

// Registers that may hold sums, by what is multiplied.
template <class Kind>
constexpr int kSumsOf = kSums;
template <>
inline constexpr int kSumsOf<Quads> = kQuadSums;

// Memory that something else reads later: a tile asks for `step` bytes of it with each element of
// its sums. If all of it was asked for at once, the processor would wait until it has room for that
// many requests: 3 % of a step of 512 rows, a fifth of one of 32.
struct Later {
  const char* from;
  Index step;
};

// C [kRows, kLanes * kVectors] (+)= A [kRows, n] times B [n, kLanes * kVectors], C float32. Rows of
// B are asked for kAhead early; 0: not, where the hardware foresees them.
template <class Kind, int kRows, int kVectors, int kAhead, bool kLater>
void tile(const typename Kind::Left* a, Index lda, const typename Kind::Right* b, Index ldb,
          float* c, Index ldc, Index n, bool add, Later later) {
  Floats sums[kRows][kVectors];
  repeat<kRows>([&](auto r) {
    repeat<kVectors>([&](auto v) { sums[r][v] = add ? load(c + r * ldc + v * kLanes) : Floats{}; });
  });
  for (Index k = 0; k < n; ++k) {
    const typename Kind::Right* row = b + k * ldb;
    if constexpr (kAhead > 0) {
      prefetch_near(row + kAhead * ldb, kVectors * kLanes * sizeof *row);
    }
    if constexpr (kLater) {
      prefetch_second(later.from + k * later.step, later.step);
    }
    Floats right[kVectors];
    repeat<kVectors>([&](auto v) { right[v] = load(row + v * kLanes); });
    repeat<kRows>([&](auto r) {
      const Floats left = Kind::repeated(a + r * lda + k);
      repeat<kVectors>([&](auto v) { sums[r][v] = Kind::add(left, right[v], sums[r][v]); });
    });
  }
  repeat<kRows>([&](auto r) {
    repeat<kVectors>([&](auto v) { store(sums[r][v], c + r * ldc + v * kLanes); });
  });
}

#if JITNEY_SQUARES
template <class Kind>
constexpr bool kSquare = std::is_same_v<Kind, Bfloat16Squares> || std::is_same_v<Kind, Int8Squares>;

// Two rows' sums in four columns as squares hold them: two columns each, and of a column the first
// row's sum before the second's.
struct Squares {
  Floats first, second;

  static Squares of_rows(Floats upper, Floats lower) {
    return {pick<0, 4, 1, 5>(upper, lower), pick<2, 6, 3, 7>(upper, lower)};
  }
  Floats upper() const { return pick<0, 2, 4, 6>(first, second); }
  Floats lower() const { return pick<1, 3, 5, 7>(first, second); }
};

// The same by instructions that multiply two rows with two columns. A row without another one is
// multiplied twice, and both sums are written to its place.
template <class Kind, int kRows, int kVectors, int kAhead, bool kLater>
void square_tile(const Eight* a, Index lda, const Eight* b, Index ldb, float* c, Index ldc,
                 Index n, bool add, Later later) {
  constexpr int couples = (kRows + 1) / 2;
  const auto lower_of = [](int couple) { return std::min(2 * couple + 1, kRows - 1); };
  Squares sums[couples][kVectors];
  repeat<couples>([&](auto r) {
    repeat<kVectors>([&](auto v) {
      sums[r][v] = Squares{};
      if (add) {
        sums[r][v] = Squares::of_rows(load(c + 2 * r * ldc + v * kLanes),
                                      load(c + lower_of(r) * ldc + v * kLanes));
      }
    });
  });
  for (Index k = 0; k < n; ++k) {
    const Eight* row = b + k * ldb;
    if constexpr (kAhead > 0) {
      prefetch_near(row + kAhead * ldb, kVectors * kLanes * sizeof *row);
    }
    if constexpr (kLater) {
      prefetch_second(later.from + k * later.step, later.step);
    }
    Floats left[couples];
    repeat<couples>([&](auto r) {
      left[r] = side_by_side(a[2 * r * lda + k], a[lower_of(r) * lda + k]);
    });
    repeat<kVectors>([&](auto v) {
      const Floats first = load(row + v * kLanes), second = load(row + v * kLanes + kLanes / 2);
      repeat<couples>([&](auto r) {
        sums[r][v].first = Kind::add(left[r], first, sums[r][v].first);
        sums[r][v].second = Kind::add(left[r], second, sums[r][v].second);
      });
    });
  }
  repeat<couples>([&](auto r) {
    repeat<kVectors>([&](auto v) {
      store(sums[r][v].upper(), c + 2 * r * ldc + v * kLanes);
      store(sums[r][v].lower(), c + lower_of(r) * ldc + v * kLanes);
    });
  });
}
#endif

template <class Kind>
using Tile = void (*)(const typename Kind::Left*, Index, const typename Kind::Right*, Index, float*,
                      Index, Index, bool, Later);

// Tiles have up to so many rows and vectors, as far as their sums fit the registers.
constexpr int kMostRows = 8, kMostVectors = kLanes == 8 ? 3 : 6;

template <class Kind, int kAhead, bool kLater, int kShape>
constexpr Tile<Kind> tile_of_shape() {
  constexpr int rows = kShape / kMostVectors + 1, vectors = kShape % kMostVectors + 1;
  if constexpr (rows * vectors > kSumsOf<Kind>) {
    return nullptr;
#if JITNEY_SQUARES
  } else if constexpr (kSquare<Kind>) {
    return square_tile<Kind, rows, vectors, kAhead, kLater>;
#endif
  } else {
    return tile<Kind, rows, vectors, kAhead, kLater>;
  }
}

template <class Kind, int kAhead, bool kLater, std::size_t... kShape>
constexpr std::array<Tile<Kind>, sizeof...(kShape)> tiles_of(std::index_sequence<kShape...>) {
  return {tile_of_shape<Kind, kAhead, kLater, int(kShape)>()...};
}

// The tile of so many rows and vectors, at most kSumsOf in all; without kLater it asks for nothing
// that is read later.
template <class Kind, int kAhead, bool kLater = false>
Tile<Kind> tile_for(Index rows, Index vectors) {
  static constexpr auto tiles =
      tiles_of<Kind, kAhead, kLater>(std::make_index_sequence<kMostRows * kMostVectors>{});
  return tiles[(rows - 1) * kMostVectors + vectors - 1];
}

// The most vectors of a tile of so many rows that divide a row of `columns` vectors; at least 1.
inline Index vectors_for(Index rows, Index columns) {
  Index vectors = 1;
  for (Index wider = 2; wider <= kMostVectors && rows * wider <= kSums; ++wider) {
    if (columns % wider == 0) {
      vectors = wider;
    }
  }
  return vectors;
}

// The most rows of a tile of so many vectors.
template <class Kind = Single>
Index rows_for(Index vectors) {
  return std::min<Index>(kSumsOf<Kind> / vectors, kMostRows);
}

// The most vectors of a tile that leave room for four rows.
template <class Kind>
constexpr Index most_vectors() {
  return std::min(kMostVectors, kSumsOf<Kind> / 4);
}

// How many parts of a size hold so many; the last one may be smaller.
inline Index parts(Index count, Index size) { return (count + size - 1) / size; }

// A number rounded up to whole times another.
inline Index padded(Index count, Index to) { return parts(count, to) * to; }

// The largest divisor of a number that is at most `most`.
inline Index divisor(Index number, Index most) {
  Index found = 1;
  for (Index d = 2; d <= most; ++d) {
    if (number % d == 0) {
      found = d;
    }
  }
  return found;
}

// out[r, j] = sum of A[r, :] * B[j, :] over `size` elements, a multiple of kLanes. kRows * kOthers
// = kDots. The rows that lie kAhead after those of B are asked for meanwhile; 0: not.
template <class Kind, int kRows, int kOthers, int kAhead = 0>
__attribute__((always_inline)) inline void dots(const typename Kind::Left* a, Index lda,
                                                const typename Kind::Right* b, Index ldb,
                                                float* out, Index ldo, Index size) {
  static_assert(kRows * kOthers == kDots);
  Floats sums[kDots];
  repeat<kDots>([&](auto i) { sums[i] = Floats{}; });
  for (Index i = 0; i < size; i += kLanes) {
    Floats right[kOthers];
    repeat<kOthers>([&](auto j) {
      right[j] = load(b + j * ldb + i);
      if constexpr (kAhead > 0) {
        __builtin_prefetch(b + (j + kAhead) * ldb + i, 0, 3);
      }
    });
    repeat<kRows>([&](auto r) {
      const Floats left = load(a + r * lda + i);
      repeat<kOthers>([&](auto j) {
        sums[r * kOthers + j] = Kind::add(left, right[j], sums[r * kOthers + j]);
      });
    });
  }
  float totals[kDots];
  repeat<kDots / kLanes>([&](auto i) {
    store(total_of_each(sums + i * kLanes), totals + i * kLanes);
  });
  for (int r = 0; r < kRows; ++r) {
    std::memcpy(out + r * ldo, totals + r * kOthers, 4 * kOthers);
  }
}

}  // namespace jitney
