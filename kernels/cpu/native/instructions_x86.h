// Instructions of AVX-512 and AVX2 that GCC's and Clang's vector types have no operator for.
#pragma once

#include <immintrin.h>

#include "lanes.h"

namespace jitney {

// A thread that waits for another one.
inline void pause() { _mm_pause(); }

// Whole numbers of 16 bits without a sign, widened.
inline Ints load_halves(const Bfloat16* from) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#else
  return (Ints)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#endif
}

// Bytes without a sign, widened.
inline Ints load_bytes(const std::uint8_t* from) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#endif
}

// What the lowest four bits of each lane are in e2m1.
inline Floats small_floats(Ints codes) {
#if defined(__AVX512F__)
  const __m512 table = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f,
                                      -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
  return (Floats)_mm512_permutexvar_ps((__m512i)codes, table);
#else
  const __m256 table = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
  const __m256 sizes = _mm256_permutevar8x32_ps(table, (__m256i)codes);
  return as_floats(as_ints((Floats)sizes) | ((codes << 28) & (1 << 31)));
#endif
}

// The lower half of each lane, one after the other, of numbers below 2**16.
inline void store_halves(Ints numbers, Bfloat16* to) {
#if defined(__AVX512F__)
  const __m256i narrow = _mm512_cvtepi32_epi16((__m512i)numbers);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow);
#else
  const __m256i packed = _mm256_packus_epi32((__m256i)numbers, (__m256i)numbers);
  const __m256i in_order = _mm256_permute4x64_epi64(packed, 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(in_order));
#endif
}

#if defined(__AVX512BF16__)
// Rounded to nearest, ties to even; numbers below 1e-38 become 0.
inline void store_rounded(Floats numbers, Bfloat16* to) {
  const __m512bh narrow_pairs =
      (__m512bh)_mm512_castsi256_si512((__m256i)_mm512_cvtneps_pbh((__m512)numbers));
  const __m256i narrow = _mm512_castsi512_si256((__m512i)narrow_pairs);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow);
}

// z + the products of kLanes pairs of bfloat16.
inline Floats multiply_add_pairs(Floats x, Floats y, Floats z) {
  return (Floats)_mm512_dpbf16_ps((__m512)z, (__m512bh)(__m512i)as_ints(x),
                                  (__m512bh)(__m512i)as_ints(y));
}
#endif

// x * y + z, rounded once.
inline Floats multiply_add(Floats x, Floats y, Floats z) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)z);
#else
  return (Floats)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)z);
#endif
}

// z + the products of two neighbouring int16 each.
inline Ints multiply_add_shorts(Shorts x, Shorts y, Ints z) {
#if defined(__AVX512F__)
  return z + (Ints)_mm512_madd_epi16((__m512i)x, (__m512i)y);
#else
  return z + (Ints)_mm256_madd_epi16((__m256i)x, (__m256i)y);
#endif
}

#if defined(__AVX512VNNI__)
// z + the products of kLanes quads of int8, x, with quads of uint8, y; modulo 2**32.
inline Ints multiply_add_quads(Ints x, Ints y, Ints z) {
  return (Ints)_mm512_dpbusd_epi32((__m512i)z, (__m512i)y, (__m512i)x);
}
#elif defined(__AVXVNNI__)
inline Ints multiply_add_quads(Ints x, Ints y, Ints z) {
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)z, (__m256i)y, (__m256i)x);
}
#endif

// To the nearest whole numbers, ties to even.
inline Ints rounded(Floats numbers) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtps_epi32((__m512)numbers);
#else
  return (Ints)_mm256_cvtps_epi32((__m256)numbers);
#endif
}

// The next whole numbers below.
inline Floats floor_of(Floats numbers) {
#if defined(__AVX512F__)
  return (Floats)_mm512_floor_ps((__m512)numbers);
#else
  return (Floats)_mm256_floor_ps((__m256)numbers);
#endif
}

// The lowest byte of each lane, one after the other, of numbers from -128 to 127.
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

}  // namespace jitney
