/* Sums of four products of bytes in each 32-bit lane: exact integers, so that every form gives the same.
 *
 * A lane of `w` holds four neighbouring weights of one row, `a` four activations of -127..127. dot_nibbles
 * takes weights of 0..15 and adds at most eight times before finish_nibbles; dot_signed takes -128..127, from
 * start_signed on. AVX-512 VNNI and AVX-VNNI multiply unsigned bytes with signed ones in one instruction. AVX2
 * adds pairs of products in 16 bits: eight pairs of nibbles fit, or one of magnitudes up to 128. The portable
 * form is four multiplications of whole vectors.
 */
#pragma once

#include "vector.h"

static inline ivec load_words(const void *p) {
    ivec v;
    memcpy(&v, p, sizeof v);
    return v;
}

/* Has a sum added up before the next is begun: GCC multiplies all first and runs out of registers. */
static inline ivec settled(ivec v) {
#if (defined(__AVX512F__) && LANES == 16) || (defined(__AVX2__) && LANES == 8)
    __asm__("" : "+v"(v));
#endif
    return v;
}

#if LANES == 16 && defined(__AVX512VNNI__)
#define DOT(sum, w, a) ((ivec)_mm512_dpbusd_epi32((__m512i)(sum), (__m512i)(w), _mm512_set1_epi32(a)))
#elif LANES == 8 && defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define DOT(sum, w, a) ((ivec)_mm256_dpbusd_epi32((__m256i)(sum), (__m256i)(w), _mm256_set1_epi32(a)))
#elif LANES == 8 && defined(__AVXVNNI__)
#define DOT(sum, w, a) ((ivec)_mm256_dpbusd_avx_epi32((__m256i)(sum), (__m256i)(w), _mm256_set1_epi32(a)))
#endif

#if defined(DOT)

static inline ivec dot_nibbles(ivec sum, ivec w, int32_t a) { return DOT(sum, w, a); }

static inline ivec finish_nibbles(ivec sum) { return sum; }

/* Signed weights move up by 128 to be unsigned; 128 times the activations is taken off beforehand. */
static inline ivec start_signed(int32_t sum_of_activations) { return (ivec){0} - 128 * sum_of_activations; }

static inline ivec dot_signed(ivec sum, ivec w, int32_t a) { return DOT(sum, w ^ (int32_t)0x80808080, a); }

#else

static inline ivec start_signed(int32_t sum_of_activations) {
    (void)sum_of_activations;
    return (ivec){0};
}

#if LANES == 8 && defined(__AVX2__)

static inline ivec add_pairs(ivec pairs) {
    return (ivec)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi16(1));
}

static inline ivec dot_nibbles(ivec sum, ivec w, int32_t a) {
    return (ivec)_mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16((__m256i)w, _mm256_set1_epi32(a)));
}

static inline ivec finish_nibbles(ivec sum) { return add_pairs(sum); }

static inline ivec dot_signed(ivec sum, ivec w, int32_t a) {
    const __m256i turned = _mm256_sign_epi8(_mm256_set1_epi32(a), (__m256i)w);
    return sum + add_pairs((ivec)_mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)w), turned));
}

#else

/* A byte comes to the top of its lane and down again with its sign. */
static inline ivec dot_signed(ivec sum, ivec w, int32_t a) {
    for (int up = 0; up < 32; up += 8) sum += ((w << up) >> 24) * ((int32_t)((uint32_t)a << up) >> 24);
    return sum;
}

static inline ivec dot_nibbles(ivec sum, ivec w, int32_t a) { return dot_signed(sum, w, a); }

static inline ivec finish_nibbles(ivec sum) { return sum; }

#endif
#endif
