// Vectors of float32: what is made of the instructions of each kind of CPU.
//
// Arithmetic is written with the operators that GCC and Clang give vector types; instructions that
// have no operator are named in `instructions_*.h` and, of AVX-512 alone, here. Nothing is
// contracted behind our back (-ffp-contract=off): a product and a sum are fused exactly where
// `multiply_add` says so.
#pragma once

#if defined(__aarch64__)
#include "instructions_arm.h"
#else
#include "instructions_x86.h"
#endif

namespace jitney {

// kLanes bfloat16 from an address of any alignment, as float32.
inline Floats load(const Bfloat16* from) { return as_floats(load_halves(from) << 16); }

// Rounds to nearest, ties to even; a NaN stays one. Where an instruction does it, numbers below
// 1e-38 may become 0.
inline void store(Floats numbers, Bfloat16* to) {
#if JITNEY_PAIRS
  store_rounded(numbers, to);
#else
  const Ints bits = as_ints(numbers);
  const Ints upper = (bits >> 16) & 0xFFFF;
  const Ints nearest = ((bits + 0x7FFF + (upper & 1)) >> 16) & 0xFFFF;
  store_halves((numbers != numbers) ? (upper | 0x40) : nearest, to);
#endif
}

#if !JITNEY_QUADS
// z + the products of kLanes quads of int8, x, with quads of uint8, y; modulo 2**32.
inline Ints multiply_add_quads(Ints x, Ints y, Ints z) {
  const Shorts even_x = (Shorts)((Halves)x << 8) >> 8, odd_x = (Shorts)x >> 8;
  const Halves even_y = (Halves)y & 0xFF, odd_y = (Halves)y >> 8;
  return multiply_add_shorts(odd_x, (Shorts)odd_y,
                             multiply_add_shorts(even_x, (Shorts)even_y, z));
}
#endif

inline Floats as_numbers(Ints whole) { return __builtin_convertvector(whole, Floats); }

// Elements of two vectors by constant number: 0 to kLanes - 1 from the first, the rest from the
// second.
template <int... kPicked>
inline Floats pick(Floats x, Floats y) {
#if defined(__clang__)
  return __builtin_shufflevector(x, y, kPicked...);
#else
  return __builtin_shuffle(x, y, Ints{kPicked...});
#endif
}

// Half of what two vectors exchange when element j of each pairs up with element j ^ apart: those
// that stay.
template <int kApart, std::size_t... kLane>
inline Floats kept(Floats x, Floats y, std::index_sequence<kLane...>) {
  return pick<((kLane & kApart) ? kLanes + (int(kLane) ^ kApart) : int(kLane))...>(x, y);
}

// The other half: those that are turned.
template <int kApart, std::size_t... kLane>
inline Floats turned(Floats x, Floats y, std::index_sequence<kLane...>) {
  return pick<((kLane & kApart) ? kLanes + int(kLane) : int(kLane) | kApart)...>(x, y);
}

using AllLanes = std::make_index_sequence<kLanes>;

// One round of `transpose`, for vectors that lie kApart from each other.
template <int kApart>
inline void exchange(Floats* square) {
  repeat<kLanes>([&](auto r) {
    if constexpr ((r & kApart) == 0) {
      const Floats upper = square[r], lower = square[r + kApart];
      square[r] = kept<kApart>(upper, lower, AllLanes{});
      square[r + kApart] = turned<kApart>(upper, lower, AllLanes{});
    }
  });
}

// Turns kLanes vectors of kLanes elements about their diagonal.
inline void transpose(Floats* square) {
  exchange<1>(square);
  exchange<2>(square);
  if constexpr (kLanes > 4) {
    exchange<4>(square);
  }
  if constexpr (kLanes > 8) {
    exchange<8>(square);
  }
}

template <int kApart>
inline void add_halves(Floats* sums) {
  repeat<kApart>([&](auto i) {
    const Floats first = sums[i], second = sums[i + kApart];
    sums[i] = kept<kApart>(first, second, AllLanes{}) + turned<kApart>(first, second, AllLanes{});
  });
}

// One vector of the totals of kLanes vectors, each total added up in the same order. Overwrites its
// argument.
inline Floats total_of_each(Floats* sums) {
  if constexpr (kLanes > 8) {
    add_halves<8>(sums);
  }
  if constexpr (kLanes > 4) {
    add_halves<4>(sums);
  }
  add_halves<2>(sums);
  add_halves<1>(sums);
  return sums[0];
}

// The lanes of a vector of whole numbers added up.
inline std::int32_t total(Ints numbers) {
  std::int32_t sum = 0;
  for (int i = 0; i < kLanes; ++i) {
    sum += numbers[i];
  }
  return sum;
}

// Terms of x, from the first one given to the last.
template <int kCount>
inline Floats polynomial(Floats x, const float (&terms)[kCount]) {
  Floats sum = splat(terms[0]);
  repeat<kCount - 1>([&](auto i) { sum = multiply_add(sum, x, splat(terms[i + 1])); });
  return sum;
}

// 2**f on [0, 1], minimax in relative error: under 2e-7, and exactly 1 of 0, so that what is scaled
// by it stays as it is; under 3e-6 for what is rounded to bfloat16.
template <class To>
inline Floats exp2_of_part(Floats f) {
  if constexpr (std::is_same_v<To, Bfloat16>) {
    return polynomial(
        f, {1.35341678e-2f, 5.20114601e-2f, 2.41442755e-1f, 6.93003833e-1f, 1.00000262f});
  } else {
    return polynomial(f, {1.86713005e-3f, 9.01703071e-3f, 5.57999127e-2f, 2.40164444e-1f,
                          6.93151295e-1f, 1.0f});
  }
}

// 2**x for x up to 126, as exact as `To` needs it; of x under -126 what is next to nothing, 2**-126
// at most. A NaN stays one.
template <class To = float>
inline Floats exp2_of(Floats x) {
#if defined(__AVX512F__)
  const Floats part = (Floats)_mm512_reduce_ps((__m512)x, _MM_FROUND_FLOOR);
  return (Floats)_mm512_scalef_ps((__m512)exp2_of_part<To>(part), (__m512)x);
#else
  const Floats within = greater(splat(-126.0f), x);
  const Floats whole = floor_of(within);
  const Ints power = (rounded(whole) + 127) << 23;
  return exp2_of_part<To>(within - whole) * as_floats(power);
#endif
}

// x / (1 + exp(-x)), as exact as `To` needs it. The power is cut where the share is 0 or 1 to any
// precision. A NaN stays one.
template <class To>
inline Floats silu(Floats x) {
  const Floats one = splat(1.0f);
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<To, Bfloat16>) {
    const Floats upper = splat(126.0f), exponent = x * splat(-1.44269504f);
    const Floats power = exp2_of<To>((Floats)_mm512_min_ps((__m512)upper, (__m512)exponent));
    const Floats all = one + power;
    const Floats near = (Floats)_mm512_rcp14_ps((__m512)all);
    const Floats left = multiply_add(-near, all, one);  // the error, 2**-14, which Newton's squares
    return x * multiply_add(near, left, near);
  }
#endif
  const Floats size = greater(-x, x);
  const Floats power = exp2_of(size * splat(-1.44269504f));  // which never overflows
  const Floats share = (x >= Floats{}) ? one : power;
  return x * share / (one + power);
}

// Ask for `bytes` of memory that will be read soon: into the nearest cache, or into the second one.
inline void prefetch_near(const void* from, std::ptrdiff_t bytes) {
  for (std::ptrdiff_t at = 0; at < bytes; at += kLine) {
    __builtin_prefetch(static_cast<const char*>(from) + at, 0, 3);
  }
}

inline void prefetch_second(const void* from, std::ptrdiff_t bytes) {
  for (std::ptrdiff_t at = 0; at < bytes; at += kLine) {
    __builtin_prefetch(static_cast<const char*>(from) + at, 0, 2);
  }
}

// Two vectors, one after the other.
template <class To>
inline void store_two(Floats first, Floats second, To* to) {
#if defined(__AVX512BF16__)
  if constexpr (std::is_same_v<To, Bfloat16>) {
    const __m512bh narrow = _mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    _mm512_storeu_si512(to, (__m512i)narrow);
    return;
  }
#endif
  store(first, to);
  store(second, to + kLanes);
}

// to[i] = number(i), a vector, for i below `count`, a multiple of kLanes. Whole cache lines are
// written at once where they are what two vectors become.
template <class To, class Number>
inline void store_each(To* to, std::ptrdiff_t count, const Number& number) {
  std::ptrdiff_t i = 0;
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
    store_two(number(i), number(i + kLanes), to + i);
  }
  if (i < count) {
    store(number(i), to + i);
  }
}

// to = from * factor over `count` elements, a multiple of kLanes.
template <class From, class To>
inline void copy_row(const From* from, To* to, std::ptrdiff_t count, float factor = 1.0f) {
  const Floats wide = splat(factor);
  store_each(to, count, [&](std::ptrdiff_t i) { return load(from + i) * wide; });
}

}  // namespace jitney
