// Products in AMX's eight registers, each of up to 16 rows of 64 bytes.
//
// One instruction multiplies 16 rows of A with 16 columns of B over 16 elements. B lies as panels
// do: an element is neighbouring inputs of a column. A row's sums take its inputs in the same order
// wherever the row stands, so its result is the same bits alone and among any number of rows, but
// not those of `tiles.h`, which rounds after every pair.
//
// A thread says which shapes its registers have before it uses them, and gives them back after: the
// system saves them while somebody holds them.
#pragma once

#include "tiles.h"

namespace jitney {

// Whether this library uses them.
#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define JITNEY_AMX 1

template <class Kind>
constexpr bool kAmx = std::is_same_v<Kind, Pairs> || std::is_same_v<Kind, Quads>;

namespace amx {

constexpr Index kSide = 16;  // rows of a register, elements of a row of A, columns of a sum

// How the registers are divided up between sums, A and B.
enum class Layout : Index { kSquare = 1, kLine, kStack };

// What the registers hold, as LDTILECFG reads it.
struct alignas(kLine) Shapes {
  std::uint8_t palette = 1, start = 0, unused[14] = {};
  std::uint16_t bytes[16] = {};
  std::uint8_t rows[16] = {};

  void set(int number, Index height, Index elements) {
    rows[number] = static_cast<std::uint8_t>(height);
    bytes[number] = static_cast<std::uint16_t>(4 * elements);
  }
};

// The registers of one thread, which are given back at the end. Loading shapes takes as long as
// some products, so what is held already is not loaded again; shapes are known by a number, since
// comparing what was just written would wait until the sums before it are written too.
class Registers {
 public:
  Registers() = default;
  Registers(const Registers&) = delete;
  Registers& operator=(const Registers&) = delete;
  ~Registers() { _tile_release(); }

  // Registers 0 to 3 for sums of `first` rows (0 and 1) and of `second` (2 and 3), 4 and 5 for
  // these rows of A, 6 and 7 for B; `depth` elements at a time.
  void square(Index first, Index second, Index depth) {
    if (take(Layout::kSquare, first, second, depth)) {
      return;
    }
    Shapes shapes;
    for (int number = 0; number < 2; ++number) {
      const Index height = number == 0 ? first : second;
      shapes.set(2 * number, height, kSide);
      shapes.set(2 * number + 1, height, kSide);
      shapes.set(4 + number, height, depth);
      shapes.set(6 + number, depth, kSide);
    }
    _tile_loadconfig(&shapes);
  }

  // Registers 0 to 3 for sums of `height` rows, 4 for these rows of A, 5 to 7 for B.
  void line(Index height, Index depth) {
    if (take(Layout::kLine, height, 0, depth)) {
      return;
    }
    Shapes shapes;
    for (int number = 0; number < 4; ++number) {
      shapes.set(number, height, kSide);
    }
    shapes.set(4, height, depth);
    for (int number = 5; number < 8; ++number) {
      shapes.set(number, depth, kSide);
    }
    _tile_loadconfig(&shapes);
  }

  // Registers 0 to 3 for sums of kSide rows each, 4, 5 and 7 for rows of A, 6 for B.
  void stack(Index depth) {
    if (take(Layout::kStack, kSide, kSide, depth)) {
      return;
    }
    Shapes shapes;
    for (int number = 0; number < 8; ++number) {
      shapes.set(number, kSide, number < 4 ? kSide : depth);
    }
    shapes.set(6, depth, kSide);
    _tile_loadconfig(&shapes);
  }

 private:
  // Notes which shapes the registers are to have from now on; whether they have them already.
  bool take(Layout layout, Index first, Index second, Index depth) {
    const Index before = held_;
    held_ = ((static_cast<Index>(layout) * 32 + first) * 32 + second) * 32 + depth;
    return held_ == before;
  }

  Index held_ = 0;  // the number of the shapes; 0: none
};

// The instructions name their registers, so each product stands here for itself.
template <class Kind, int kSum, int kLeft, int kRight>
__attribute__((always_inline)) inline void dot() {
  constexpr bool pairs = std::is_same_v<Kind, Pairs>;
#define JITNEY_DOT(sum, left, right)                               \
  if constexpr (kSum == sum && kLeft == left && kRight == right) { \
    if constexpr (pairs) {                                         \
      _tile_dpbf16ps(sum, left, right);                            \
    } else {                                                       \
      _tile_dpbsud(sum, left, right);                              \
    }                                                              \
  }
  JITNEY_DOT(0, 4, 6)
  JITNEY_DOT(1, 4, 7)
  JITNEY_DOT(2, 5, 6)
  JITNEY_DOT(3, 5, 7)
  JITNEY_DOT(0, 4, 5)
  JITNEY_DOT(1, 4, 6)
  JITNEY_DOT(2, 4, 7)
  JITNEY_DOT(3, 4, 5)
  JITNEY_DOT(1, 5, 6)
  JITNEY_DOT(2, 7, 6)
  JITNEY_DOT(3, 4, 6)
#undef JITNEY_DOT
}

// Memory that is wanted next, of which every step of a product asks for some.
struct Soon {
  const char* at = nullptr;
  Index bytes = 0;  // a step

  void ask() {
    prefetch_second(at, bytes);
    at += bytes;
  }
};

// What is multiplied: C [rows, columns] (+)= A [rows, n] times B [n, columns].
template <class Kind>
struct Product {
  const typename Kind::Left* a;
  Index lda;
  const typename Kind::Right* b;
  Index ldb;
  float* c;
  Index ldc;
  Index n;
  bool add;

  const void* left(Index row, Index k) const { return a + row * lda + k; }
  const void* right(Index k, Index column) const { return b + k * ldb + column; }
  float* sums(Index row, Index column) const { return c + row * ldc + column; }
};

// Sums in register kSum: taken from memory or, where there are none yet, zero.
template <int kSum>
__attribute__((always_inline)) inline void begin_sum(const float* from, Index bytes, bool add) {
#define JITNEY_BEGIN(sum)              \
  if constexpr (kSum == sum) {         \
    if (add) {                         \
      _tile_loadd(sum, from, bytes);   \
    } else {                           \
      _tile_zero(sum);                 \
    }                                  \
  }
  JITNEY_BEGIN(0)
  JITNEY_BEGIN(1)
  JITNEY_BEGIN(2)
  JITNEY_BEGIN(3)
#undef JITNEY_BEGIN
}

template <int kSum>
__attribute__((always_inline)) inline void end_sum(float* to, Index bytes) {
  if constexpr (kSum == 0) _tile_stored(0, to, bytes);
  if constexpr (kSum == 1) _tile_stored(1, to, bytes);
  if constexpr (kSum == 2) _tile_stored(2, to, bytes);
  if constexpr (kSum == 3) _tile_stored(3, to, bytes);
}

// kTall by kWide registers of sums, from a row and a column on; step(k) adds what elements from k
// on give. Two rows of registers are 0 and 1, and 2 and 3.
template <int kTall, int kWide, class Kind, class Step>
__attribute__((always_inline)) inline void sum_up(const Product<Kind>& of, Index row, Index column,
                                                  Index depth, const Step& step) {
  constexpr int pitch = kTall == 2 ? 2 : kWide;
  const Index bytes = 4 * of.ldc;
  repeat<kTall>([&](auto r) {
    repeat<kWide>([&](auto c) {
      begin_sum<r * pitch + c>(of.sums(row + r * kSide, column + c * kSide), bytes, of.add);
    });
  });
  for (Index k = 0; k < of.n; k += depth) {
    step(k);
  }
  repeat<kTall>([&](auto r) {
    repeat<kWide>([&](auto c) {
      end_sum<r * pitch + c>(of.sums(row + r * kSide, column + c * kSide), bytes);
    });
  });
}

// What of a product is multiplied again soon and stays in the first-level cache: rows of A or
// columns of B. The other is loaded as what is not: a tenth to a quarter faster.
enum class Near { kRows, kColumns };

template <int kRegister, bool kNear>
__attribute__((always_inline)) inline void load_tile(const void* from, Index bytes) {
#define JITNEY_LOAD(number)                     \
  if constexpr (kRegister == number) {          \
    if constexpr (kNear) {                      \
      _tile_loadd(number, from, bytes);         \
    } else {                                    \
      _tile_stream_loadd(number, from, bytes);  \
    }                                           \
  }
  JITNEY_LOAD(4)
  JITNEY_LOAD(5)
  JITNEY_LOAD(6)
  JITNEY_LOAD(7)
#undef JITNEY_LOAD
}

// Two by two registers of sums, from a row and a column on; two by one at the right edge.
template <class Kind, Near kKept, bool kWide>
void squares(const Product<Kind>& of, Index row, Index column, Index depth, Soon& soon) {
  constexpr bool rows = kKept == Near::kRows, columns = kKept == Near::kColumns;
  const Index lda = 4 * of.lda, ldb = 4 * of.ldb;
  sum_up<2, kWide ? 2 : 1>(of, row, column, depth, [&](Index k) {
    soon.ask();
    load_tile<6, columns>(of.right(k, column), ldb);
    load_tile<4, rows>(of.left(row, k), lda);
    dot<Kind, 0, 4, 6>();
    if constexpr (kWide) {
      load_tile<7, columns>(of.right(k, column + kSide), ldb);
      dot<Kind, 1, 4, 7>();
    }
    load_tile<5, rows>(of.left(row + kSide, k), lda);
    dot<Kind, 2, 5, 6>();
    if constexpr (kWide) dot<Kind, 3, 5, 7>();
  });
}

// The same where there may be but one column of registers left.
template <class Kind, Near kKept>
void squares_at(const Product<Kind>& of, Index row, Index column, Index columns, Index depth,
                Soon& soon) {
  if (columns - column > kSide) {
    squares<Kind, kKept, true>(of, row, column, depth, soon);
  } else {
    squares<Kind, kKept, false>(of, row, column, depth, soon);
  }
}

// Up to four registers of sums side by side, from a column on. Rows of B are asked for kAhead
// early.
template <class Kind, int kWide, int kAhead>
void lines(const Product<Kind>& of, Index row, Index column, Index depth) {
  const Index lda = 4 * of.lda, ldb = 4 * of.ldb;
  sum_up<1, kWide>(of, row, column, depth, [&](Index k) {
    if constexpr (kAhead > 0) {
      for (Index ahead = kAhead; ahead < kAhead + depth; ++ahead) {
        prefetch_near(of.right(k + ahead, column), kWide * kLine);
      }
    }
    _tile_loadd(4, of.left(row, k), lda);
    _tile_loadd(5, of.right(k, column), ldb);
    dot<Kind, 0, 4, 5>();
    if constexpr (kWide > 1) {
      _tile_loadd(6, of.right(k, column + kSide), ldb);
      dot<Kind, 1, 4, 6>();
    }
    if constexpr (kWide > 2) {
      _tile_loadd(7, of.right(k, column + 2 * kSide), ldb);
      dot<Kind, 2, 4, 7>();
    }
    if constexpr (kWide > 3) {
      _tile_loadd(5, of.right(k, column + 3 * kSide), ldb);
      dot<Kind, 3, 4, 5>();
    }
  });
}

// Four registers of sums one below the other: sums that wait for each other's instruction are what
// a single one would be.
template <class Kind>
void stacks(const Product<Kind>& of, Index row, Index column, Index depth) {
  const Index lda = 4 * of.lda, ldb = 4 * of.ldb;
  sum_up<4, 1>(of, row, column, depth, [&](Index k) {
    _tile_loadd(6, of.right(k, column), ldb);
    _tile_loadd(4, of.left(row, k), lda);
    dot<Kind, 0, 4, 6>();
    _tile_loadd(5, of.left(row + kSide, k), lda);
    dot<Kind, 1, 5, 6>();
    _tile_loadd(7, of.left(row + 2 * kSide, k), lda);
    dot<Kind, 2, 7, 6>();
    _tile_loadd(4, of.left(row + 3 * kSide, k), lda);
    dot<Kind, 3, 4, 6>();
  });
}

// As many rows as are whole stacks, times the only column of registers; how many they are.
template <class Kind>
Index whole_stacks(const Product<Kind>& of, Index rows, Index depth, Registers& registers) {
  const Index whole = rows / (4 * kSide) * (4 * kSide);
  if (whole > 0) {
    registers.stack(depth);
  }
  for (Index row = 0; row < whole; row += 4 * kSide) {
    stacks(of, row, 0, depth);
  }
  return whole;
}

// Rows of two registers, from `row` on, times all columns; how many they are. Two columns of
// registers stay near while the rows pass them, where there are more than two registers of rows.
template <class Kind, Near kKept>
Index whole_squares(const Product<Kind>& of, Index row, Index rows, Index columns, Index depth,
                    Soon& soon, Registers& registers) {
  const Index whole = (rows - row) / (2 * kSide) * (2 * kSide), end = row + whole;
  if (whole > 0) {
    registers.square(kSide, kSide, depth);
  }
  for (Index column = 0; column < columns; column += 2 * kSide) {
    for (Index here = row; here < end; here += 2 * kSide) {
      squares_at<Kind, kKept>(of, here, column, columns, depth, soon);
    }
  }
  return whole;
}

// The last rows, fewer than two registers', times all columns.
template <class Kind, Near kKept, int kAhead>
void last_rows(const Product<Kind>& of, Index row, Index count, Index columns, Index depth,
               Soon& soon, Registers& registers) {
  if (count > kSide) {
    registers.square(kSide, count - kSide, depth);
    for (Index column = 0; column < columns; column += 2 * kSide) {
      squares_at<Kind, kKept>(of, row, column, columns, depth, soon);
    }
    return;
  }
  registers.line(count, depth);
  for (Index column = 0; column < columns; column += 4 * kSide) {
    switch (std::min<Index>(4, (columns - column) / kSide)) {
      case 4:
        lines<Kind, 4, kAhead>(of, row, column, depth);
        break;
      case 3:
        lines<Kind, 3, kAhead>(of, row, column, depth);
        break;
      case 2:
        lines<Kind, 2, kAhead>(of, row, column, depth);
        break;
      default:
        lines<Kind, 1, kAhead>(of, row, column, depth);
    }
  }
}

// A product whose n is whole runs of `depth`.
template <class Kind, Near kKept, int kAhead>
void whole_runs(const Product<Kind>& of, Index rows, Index columns, Index depth, Soon& soon,
                Registers& registers) {
  Index row = columns == kSide ? whole_stacks(of, rows, depth, registers) : 0;
  row += whole_squares<Kind, kKept>(of, row, rows, columns, depth, soon, registers);
  if (row < rows) {
    last_rows<Kind, kKept, kAhead>(of, row, rows - row, columns, depth, soon, registers);
  }
}

// How often a product of more than kSide rows asks for what is wanted soon.
inline Index steps(Index rows, Index columns, Index n) {
  return parts(rows, 2 * kSide) * parts(columns, 2 * kSide) * parts(n, kSide);
}

// C [rows, columns] (+)= A [rows, n] times B [n, columns], columns whole vectors. Rows of B are
// asked for kAhead early where few rows are multiplied.
template <class Kind, Near kKept, int kAhead>
void multiply(Product<Kind> of, Index rows, Index columns, Soon& soon, Registers& registers) {
  const Index n = of.n, whole = n / kSide * kSide;
  if (whole > 0) {
    of.n = whole;
    whole_runs<Kind, kKept, kAhead>(of, rows, columns, kSide, soon, registers);
  }
  if (n > whole) {
    of.a += whole;
    of.b += whole * of.ldb;
    of.n = n - whole;
    of.add = of.add || whole > 0;
    whole_runs<Kind, kKept, 0>(of, rows, columns, of.n, soon, registers);
  }
}

}  // namespace amx
#else
template <class Kind>
constexpr bool kAmx = false;

namespace amx {
class Registers {};
}  // namespace amx
#endif

class NoRegisters {};

// What a product of this kind is multiplied in, beside vectors.
template <class Kind>
using RegistersOf = std::conditional_t<kAmx<Kind>, amx::Registers, NoRegisters>;

}  // namespace jitney
