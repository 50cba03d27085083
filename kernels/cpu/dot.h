/* Sums of four products of bytes in each 32-bit lane: exact integers, so that every form gives the same.
 *
 * A lane of `w` holds four neighbouring weights of one row, `a` four activations of -127..127. AVX-512 VNNI
 * and AVX-VNNI have one instruction for it; AVX2 multiplies pairs into 16 bits, which nibbles and magnitudes
 * up to 128 cannot overflow; the portable form is four multiplications of whole vectors.
 */
#pragma once

#include "vector.h"

static inline ivec load_words(const void *p) {
    ivec v;
    memcpy(&v, p, sizeof v);
    return v;
}

#if LANES == 16 && defined(__AVX512VNNI__)
#define DOT_UNSIGNED(sum, w, a) ((ivec)_mm512_dpbusd_epi32((__m512i)(sum), (__m512i)(w), _mm512_set1_epi32(a)))
#elif LANES == 8 && defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define DOT_UNSIGNED(sum, w, a) ((ivec)_mm256_dpbusd_epi32((__m256i)(sum), (__m256i)(w), _mm256_set1_epi32(a)))
#elif LANES == 8 && defined(__AVXVNNI__)
#define DOT_UNSIGNED(sum, w, a) \
    ((ivec)_mm256_dpbusd_avx_epi32((__m256i)(sum), (__m256i)(w), _mm256_set1_epi32(a)))
#endif

/* Both take weights as unsigned bytes: nibbles, or signed bytes moved up by 128, which `start` makes good. */
#if defined(DOT_UNSIGNED)

static inline ivec dot_nibbles(ivec sum, ivec w, int32_t a) { return DOT_UNSIGNED(sum, w, a); }

static inline ivec start_signed(int32_t sum_of_activations) { return (ivec){0} - 128 * sum_of_activations; }

static inline ivec dot_signed(ivec sum, ivec w, int32_t a) {
    return DOT_UNSIGNED(sum, w ^ (int32_t)0x80808080, a);
}

#elif LANES == 8 && defined(__AVX2__)

static inline ivec dot_nibbles(ivec sum, ivec w, int32_t a) {
    const __m256i pairs = _mm256_maddubs_epi16((__m256i)w, _mm256_set1_epi32(a));
    return sum + (ivec)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}

static inline ivec start_signed(int32_t sum_of_activations) {
    (void)sum_of_activations;
    return (ivec){0};
}

static inline ivec dot_signed(ivec sum, ivec w, int32_t a) {
    const __m256i magnitudes = _mm256_abs_epi8((__m256i)w);
    const __m256i turned = _mm256_sign_epi8(_mm256_set1_epi32(a), (__m256i)w);
    const __m256i pairs = _mm256_maddubs_epi16(magnitudes, turned);
    return sum + (ivec)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}

#else

static inline ivec start_signed(int32_t sum_of_activations) {
    (void)sum_of_activations;
    return (ivec){0};
}

/* A byte comes to the top of its lane and down again with its sign. */
static inline ivec dot_signed(ivec sum, ivec w, int32_t a) {
    for (int up = 0; up < 32; up += 8) sum += ((w << up) >> 24) * (int32_t)((int32_t)((uint32_t)a << up) >> 24);
    return sum;
}

static inline ivec dot_nibbles(ivec sum, ivec w, int32_t a) { return dot_signed(sum, w, a); }

#endif
