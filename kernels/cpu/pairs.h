/* Sums of two products of 16-bit numbers in each 32-bit lane: exact integers, so that every form gives the
 * same. A lane of `w` holds two neighbouring weights of one row, `a` two activations of -32767..32767; over a
 * block of 32 a sum stays below 2^31. AVX-512 VNNI and AVX-VNNI multiply and add in one instruction, AVX2 in
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

/* Twice the values of the E2M1 codes that are the four bits of each 16 from `shift` on. AVX-512 looks up five
 * bits, of which the fifth makes no difference. AVX2 looks up bytes, whose sign would not reach the upper ones,
 * so there values are lifted by 12. */
#define E2M1 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12
static inline ivec doubled_e2m1(ivec words, int shift) {
#if LANES == 16 && defined(__AVX512BW__)
    const hvec values = {E2M1, E2M1};
    return (ivec)_mm512_permutexvar_epi16((__m512i)(words >> shift), (__m512i)values);
#elif LANES == 8 && defined(__AVX2__)
    const __m256i lifted = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    const __m256i upper = _mm256_set1_epi16((int16_t)0x8000); /* looked up as 0 */
    const __m256i found = _mm256_shuffle_epi8(lifted, _mm256_or_si256((__m256i)nibbles(words, shift), upper));
    return (ivec)_mm256_sub_epi16(found, _mm256_set1_epi16(12));
#elif LANES == 16
    return (ivec)__builtin_shuffle((hvec){E2M1, E2M1}, (hvec)nibbles(words, shift));
#else
    return (ivec)__builtin_shuffle((hvec){E2M1}, (hvec)nibbles(words, shift));
#endif
}
#undef E2M1

/* Of the upper byte of each 16 bits, the upper five with their sign, shifted up by as much as the lower three. */
static inline ivec shifted(ivec words) {
    const hvec significands = (hvec)words >> 11;
    const uhvec shifts = (uhvec)words >> 8 & 7;
#if LANES == 8 && defined(__AVX2__) && !defined(__AVX512BW__)
    const __m256i powers = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(1, 2, 4, 8, 16, 32, 64, (int8_t)128, 0, 0, 0, 0, 0, 0, 0, 0));
    const __m256i upper = _mm256_set1_epi16((int16_t)0x8000); /* looked up as 0 */
    const __m256i found = _mm256_shuffle_epi8(powers, _mm256_or_si256((__m256i)shifts, upper));
    return (ivec)_mm256_mullo_epi16((__m256i)significands, found);
#else
    return (ivec)((uhvec)significands << shifts);
#endif
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
