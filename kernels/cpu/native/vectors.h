// Vectors of float32 as wide as a register of the instruction set that this file is compiled for:
// AVX-512 or AVX2.
//
// Arithmetic is written with the operators that GCC and Clang give vector types; instructions that
// have no operator are named here and nowhere else. Nothing is contracted behind our back
// (-ffp-contract=off): a product and a sum are fused exactly where `multiply_add` says so.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

namespace jitney {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
constexpr int kLanes = 16;
// Registers that hold the sums of a product's tile; the rest hold what is multiplied.
constexpr int kSums = 24;
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int kLanes = 8;
constexpr int kSums = 12;
#else
#error "these kernels need AVX2 and FMA (x86-64-v3) or more"
#endif

// Whether one instruction multiplies and adds pairs of bfloat16.
#if defined(__AVX512BF16__)
constexpr bool kMultipliesPairs = true;
#else
constexpr bool kMultipliesPairs = false;
#endif

// Whether one instruction multiplies and adds quads of bytes, and the registers that hold the sums
// of them: without that, what is multiplied takes twice as many registers.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
constexpr bool kMultipliesQuads = true;
constexpr int kQuadSums = kSums;
#else
constexpr bool kMultipliesQuads = false;
constexpr int kQuadSums = kSums * 2 / 3;
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef std::int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef std::int16_t Shorts __attribute__((vector_size(4 * kLanes)));
typedef std::uint16_t Halves __attribute__((vector_size(4 * kLanes)));

constexpr int kLine = 64;  // bytes of a cache line

// Straight code: body(0) to body(kCount - 1), each with its number as a constant. A loop over
// vectors of an array would keep GCC from holding them in registers.
template <class Body, int... kNumber>
__attribute__((always_inline)) inline void repeat(std::integer_sequence<int, kNumber...>,
                                                  const Body& body) {
  (body(std::integral_constant<int, kNumber>{}), ...);
}

template <int kCount, class Body>
__attribute__((always_inline)) inline void repeat(const Body& body) {
  repeat(std::make_integer_sequence<int, kCount>{}, body);
}

struct Bfloat16 {
  std::uint16_t bits;
};

// Two neighbouring bfloat16, the first in the lower half.
struct Pair {
  std::uint32_t bits;
};

// Four neighbouring bytes, the first in the lowest.
struct Quad {
  std::uint32_t bits;
};

inline Floats splat(float number) { return Floats{} + number; }

inline Floats as_floats(Ints bits) { return reinterpret_cast<Floats>(bits); }

inline Ints as_ints(Floats numbers) { return reinterpret_cast<Ints>(numbers); }

// kLanes elements from an address of any alignment, as float32. A pair is loaded as its 32 bits.
inline Floats load(const float* from) {
  Floats numbers;
  std::memcpy(&numbers, from, sizeof numbers);
  return numbers;
}

inline Floats load(const Pair* from) {
  Floats bits;
  std::memcpy(&bits, from, sizeof bits);
  return bits;
}

inline Floats load(const Quad* from) {
  Floats bits;
  std::memcpy(&bits, from, sizeof bits);
  return bits;
}

inline Floats load(const Bfloat16* from) {
#if defined(__AVX512F__)
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return as_floats((Ints)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
#else
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return as_floats((Ints)_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
#endif
}

inline void store(Floats numbers, float* to) { std::memcpy(to, &numbers, sizeof numbers); }

// Rounds to nearest, ties to even; a NaN stays one. With avx512_bf16 numbers below 1e-38 become 0.
inline void store(Floats numbers, Bfloat16* to) {
#if defined(__AVX512BF16__)
  const __m512bh narrow_pairs =
      (__m512bh)_mm512_castsi256_si512((__m256i)_mm512_cvtneps_pbh((__m512)numbers));
  const __m256i narrow = _mm512_castsi512_si256((__m512i)narrow_pairs);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow);
#else
  const Ints bits = as_ints(numbers);
  const Ints upper = (bits >> 16) & 0xFFFF;
  const Ints rounded = ((bits + 0x7FFF + (upper & 1)) >> 16) & 0xFFFF;
  const Ints chosen = (numbers != numbers) ? (upper | 0x40) : rounded;
#if defined(__AVX512F__)
  const __m256i narrow = _mm512_cvtepi32_epi16((__m512i)chosen);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow);
#else
  const __m256i packed = _mm256_packus_epi32((__m256i)chosen, (__m256i)chosen);
  const __m256i in_order = _mm256_permute4x64_epi64(packed, 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(in_order));
#endif
#endif
}

// x * y + z, rounded once.
inline Floats multiply_add(Floats x, Floats y, Floats z) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)z);
#else
  return (Floats)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)z);
#endif
}

#if defined(__AVX512BF16__)
// z + the products of kLanes pairs of bfloat16.
inline Floats multiply_add_pairs(Floats x, Floats y, Floats z) {
  return (Floats)_mm512_dpbf16_ps((__m512)z, (__m512bh)(__m512i)as_ints(x),
                                  (__m512bh)(__m512i)as_ints(y));
}
#endif

// z + the products of two neighbouring int16 each.
inline Ints multiply_add_shorts(Shorts x, Shorts y, Ints z) {
#if defined(__AVX512F__)
  return z + (Ints)_mm512_madd_epi16((__m512i)x, (__m512i)y);
#else
  return z + (Ints)_mm256_madd_epi16((__m256i)x, (__m256i)y);
#endif
}

// z + the products of kLanes quads of int8, x, with quads of uint8, y; modulo 2**32.
inline Ints multiply_add_quads(Ints x, Ints y, Ints z) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)z, (__m512i)y, (__m512i)x);
#elif defined(__AVXVNNI__)
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)z, (__m256i)y, (__m256i)x);
#else
  const Shorts even_x = (Shorts)((Halves)x << 8) >> 8, odd_x = (Shorts)x >> 8;
  const Halves even_y = (Halves)y & 0xFF, odd_y = (Halves)y >> 8;
  return multiply_add_shorts(odd_x, (Shorts)odd_y,
                             multiply_add_shorts(even_x, (Shorts)even_y, z));
#endif
}

// To the nearest whole numbers, ties to even.
inline Ints rounded(Floats numbers) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtps_epi32((__m512)numbers);
#else
  return (Ints)_mm256_cvtps_epi32((__m256)numbers);
#endif
}

inline Floats as_numbers(Ints whole) { return __builtin_convertvector(whole, Floats); }

// The lowest byte of each lane, one after the other.
inline void store_bytes(Ints numbers, Quad* to) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8((__m512i)numbers));
#else
  const __m256i shorts = _mm256_packs_epi32((__m256i)numbers, (__m256i)numbers);
  const __m256i bytes = _mm256_packs_epi16(shorts, shorts);
  const int low = _mm256_extract_epi32(bytes, 0), high = _mm256_extract_epi32(bytes, 4);
  std::memcpy(to, &low, sizeof low);
  std::memcpy(to + 1, &high, sizeof high);
#endif
}

// The greater of each two; the second where either is a NaN.
inline Floats greater(Floats x, Floats y) {
#if defined(__AVX512F__)
  return (Floats)_mm512_max_ps((__m512)x, (__m512)y);
#else
  return (Floats)_mm256_max_ps((__m256)x, (__m256)y);
#endif
}

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
  exchange<4>(square);
  if constexpr (kLanes == 16) {
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
  if constexpr (kLanes == 16) {
    add_halves<8>(sums);
  }
  add_halves<4>(sums);
  add_halves<2>(sums);
  add_halves<1>(sums);
  return sums[0];
}

// The lanes of one vector added up, always in the same order.
inline float total(Floats numbers) {
#if defined(__AVX512F__)
  const __m256 upper = _mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)numbers, 1));
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256((__m512)numbers), upper);
#else
  const __m256 eight = (__m256)numbers;
#endif
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// The lanes of a vector of whole numbers added up.
inline std::int32_t total(Ints numbers) {
  std::int32_t sum = 0;
  for (int i = 0; i < kLanes; ++i) {
    sum += numbers[i];
  }
  return sum;
}

// The greatest lane of a vector.
inline float greatest(Floats numbers) {
#if defined(__AVX512F__)
  const __m256 upper = _mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)numbers, 1));
  const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256((__m512)numbers), upper);
#else
  const __m256 eight = (__m256)numbers;
#endif
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
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
  const Floats whole = (Floats)_mm256_floor_ps((__m256)within);
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
