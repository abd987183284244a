// Instructions of 64-bit ARM that GCC's and Clang's vector types have no operator for.
#pragma once

#include <arm_neon.h>

#include "lanes.h"

namespace jitney {

// A thread that waits for another one. YIELD does nothing on most cores; this takes as long as x86's
// PAUSE.
inline void pause() { __asm__ volatile("isb"); }

// Whole numbers of 16 bits without a sign, widened.
inline Ints load_halves(const Bfloat16* from) {
  return (Ints)vmovl_u16(vld1_u16(reinterpret_cast<const std::uint16_t*>(from)));
}

// Bytes without a sign, widened.
inline Ints load_bytes(const std::uint8_t* from) {
  std::uint32_t bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  const uint16x8_t halves = vmovl_u8(vcreate_u8(bytes));
  return (Ints)vmovl_u16(vget_low_u16(halves));
}

// What the lowest four bits of each lane are in e2m1: exponent and fraction moved to their places,
// but for 0 and 0.5.
inline Floats small_floats(Ints codes) {
  const Ints sizes = codes & 7, usual = (sizes << 22) + (126 << 23);
  const Ints small = sizes < 2, bits = (small & (sizes * 0x3F000000)) | (~small & usual);
  return as_floats(bits | ((codes & 8) << 28));
}

// The lower half of each lane, one after the other, of numbers below 2**16.
inline void store_halves(Ints numbers, Bfloat16* to) {
  vst1_u16(reinterpret_cast<std::uint16_t*>(to), vmovn_u32((uint32x4_t)numbers));
}

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
// Rounded to nearest, ties to even.
inline void store_rounded(Floats numbers, Bfloat16* to) {
  const bfloat16x4_t narrow = vcvt_bf16_f32((float32x4_t)numbers);
  std::memcpy(to, &narrow, sizeof narrow);
}

// z + the products of kLanes pairs of bfloat16.
inline Floats multiply_add_pairs(Floats x, Floats y, Floats z) {
  return (Floats)vbfdotq_f32((float32x4_t)z, (bfloat16x8_t)x, (bfloat16x8_t)y);
}
#endif

// x * y + z, rounded once.
inline Floats multiply_add(Floats x, Floats y, Floats z) {
  return (Floats)vfmaq_f32((float32x4_t)z, (float32x4_t)x, (float32x4_t)y);
}

// z + the products of two neighbouring int16 each.
inline Ints multiply_add_shorts(Shorts x, Shorts y, Ints z) {
  const int32x4_t low = vmull_s16(vget_low_s16((int16x8_t)x), vget_low_s16((int16x8_t)y));
  const int32x4_t high = vmull_high_s16((int16x8_t)x, (int16x8_t)y);
  return z + (Ints)vpaddq_s32(low, high);
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
// z + the products of kLanes quads of int8, x, with quads of uint8, y; modulo 2**32.
inline Ints multiply_add_quads(Ints x, Ints y, Ints z) {
  return (Ints)vusdotq_s32((int32x4_t)z, (uint8x16_t)y, (int8x16_t)x);
}
#endif

#if JITNEY_SQUARES
// Two of them from an address of any alignment.
inline Floats load(const Eight* from) {
  return (Floats)vld1q_f32(reinterpret_cast<const float*>(from));
}

inline Floats side_by_side(Eight first, Eight second) {
  return (Floats)vcombine_u64(vcreate_u64(first.bits), vcreate_u64(second.bits));
}

// z + two columns of four bfloat16 each, w, times two rows, x: the first column's product with each
// row, then the second's.
inline Floats multiply_add_square(Floats x, Floats w, Floats z) {
  return (Floats)vbfmmlaq_f32((float32x4_t)z, (bfloat16x8_t)w, (bfloat16x8_t)x);
}

// The same of eight uint8 a column and eight int8 a row.
inline Ints multiply_add_square(Ints x, Ints w, Ints z) {
  return (Ints)vusmmlaq_s32((int32x4_t)z, (uint8x16_t)w, (int8x16_t)x);
}
#endif

// To the nearest whole numbers, ties to even.
inline Ints rounded(Floats numbers) { return (Ints)vcvtnq_s32_f32((float32x4_t)numbers); }

// The next whole numbers below.
inline Floats floor_of(Floats numbers) { return (Floats)vrndmq_f32((float32x4_t)numbers); }

// The lowest byte of each lane, one after the other, of numbers from -128 to 127.
inline void store_bytes(Ints numbers, Quad* to) {
  const int16x4_t shorts = vmovn_s32((int32x4_t)numbers);
  const int8x8_t bytes = vmovn_s16(vcombine_s16(shorts, shorts));
  std::memcpy(to, &bytes, sizeof *to);
}

// The greater of each two; the second where either is a NaN.
inline Floats greater(Floats x, Floats y) { return x > y ? x : y; }

// The lanes of one vector added up, always in the same order.
inline float total(Floats numbers) { return vaddvq_f32((float32x4_t)numbers); }

// The greatest lane of a vector.
inline float greatest(Floats numbers) { return vmaxvq_f32((float32x4_t)numbers); }

}  // namespace jitney
