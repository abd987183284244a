// What a vector of float32 is, as wide as a register of the instruction set that this file is
// compiled for: AVX-512, AVX2 or NEON.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

namespace jitney {

using Index = std::ptrdiff_t;

// Registers that hold the sums of a product's tile; the rest hold what is multiplied. Of dot
// products as many are summed at once, a multiple of the lanes: they would wait for each other's
// instruction if they were few.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
constexpr int kLanes = 16, kSums = 24, kDots = 16;
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int kLanes = 8, kSums = 12, kDots = 8;
#elif defined(__aarch64__) && defined(__ARM_NEON)
constexpr int kLanes = 4, kSums = 24, kDots = 16;
#else
#error "these kernels need AVX2 and FMA (x86-64-v3) or more, or 64-bit ARM"
#endif

// Whether one instruction multiplies and adds pairs of bfloat16.
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define JITNEY_PAIRS 1
constexpr bool kMultipliesPairs = true;
#else
constexpr bool kMultipliesPairs = false;
#endif

// Whether one instruction multiplies two rows with two columns (ARM's MMLA).
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) && defined(__ARM_FEATURE_MATMUL_INT8)
#define JITNEY_SQUARES 1
#endif

// Whether one instruction multiplies and adds quads of bytes, and the registers that hold the sums
// of them: without that, what is multiplied takes twice as many registers.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__ARM_FEATURE_MATMUL_INT8)
#define JITNEY_QUADS 1
constexpr int kQuadSums = kSums;
#else
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

// Eight neighbouring bytes of a row or of a column: four bfloat16 or eight int8.
struct Eight {
  std::uint64_t bits;
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

inline void store(Floats numbers, float* to) { std::memcpy(to, &numbers, sizeof numbers); }

}  // namespace jitney
