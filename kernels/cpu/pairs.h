/* Sums of two products of 16-bit numbers in each 32-bit lane: exact integers, so that every form gives the
 * same. A lane of `w` holds two neighbouring weights of one row, `a` two activations of -32767..32767; over a
 * block of 32 a sum stays below 2^28. AVX-512 VNNI and AVX-VNNI multiply and add in one instruction, AVX2 in
 * two. */
#pragma once

#include "vector.h"

typedef int16_t hvec __attribute__((vector_size(LANES * 4)));
typedef uint16_t uhvec __attribute__((vector_size(LANES * 4)));

static inline ivec load_words(const void *p) {
    ivec v;
    memcpy(&v, p, sizeof v);
    return v;
}

/* Four bits of each 16, from `shift` on; the highest need no mask. */
static inline ivec nibbles(ivec words, int shift) {
    return shift == 12 ? (ivec)((uhvec)words >> 12) : (words >> shift) & 0x000f000f;
}

/* The upper byte of each 16 bits, with its sign. */
static inline ivec signed_bytes(ivec words) { return (ivec)((hvec)words >> 8); }

static inline ivec dot_pairs(ivec sum, ivec w, int32_t a) {
#if LANES == 16 && defined(__AVX512VNNI__)
    return (ivec)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)w, _mm512_set1_epi32(a));
#elif LANES == 8 && defined(__AVX512VNNI__) && defined(__AVX512VL__)
    return (ivec)_mm256_dpwssd_epi32((__m256i)sum, (__m256i)w, _mm256_set1_epi32(a));
#elif LANES == 8 && defined(__AVXVNNI__)
    return (ivec)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)w, _mm256_set1_epi32(a));
#elif LANES == 8 && defined(__AVX2__)
    return sum + (ivec)_mm256_madd_epi16((__m256i)w, _mm256_set1_epi32(a));
#else
    return sum + ((w << 16) >> 16) * (int16_t)a + (w >> 16) * (a >> 16);
#endif
}
