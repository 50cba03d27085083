/* One vector type for every target: the compiler lowers it to AVX-512, AVX2, SSE or NEON.
 *
 * Row invariance is the contract of every kernel here: the bits of an output row depend on that row's
 * inputs alone, never on how many other rows came along or how many threads ran. So each output value has
 * one accumulator vector, filled in ascending order of k, and one fixed horizontal sum.
 */
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if !defined(LANES) /* a test sets it, to run the wide form on a narrow processor */
#if defined(__AVX512F__)
#define LANES 16
#else
#define LANES 8
#endif
#endif

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));

static inline vec load(const float *p) {
    vec v;
    memcpy(&v, p, sizeof v);
    return v;
}

/* Keeps a value that several products share out of their memory operands. */
static inline vec in_register(vec v) {
#if (defined(__AVX512F__) && LANES == 16) || (defined(__AVX2__) && LANES == 8)
    __asm__("" : "+v"(v));
#endif
    return v;
}

static inline void store(float *p, vec v) { memcpy(p, &v, sizeof v); }

static inline vec splat(float x) { return x - (vec){0}; }

/* mask lanes are 0 or -1, as vector comparisons give them. */
static inline vec pick(ivec mask, vec yes, vec no) {
    ivec y, n;
    memcpy(&y, &yes, sizeof y);
    memcpy(&n, &no, sizeof n);
    const ivec bits = (mask & y) | (~mask & n);
    vec v;
    memcpy(&v, &bits, sizeof v);
    return v;
}

/* Halves folded onto each other, so that the order is fixed by LANES alone. */
static inline float horizontal_sum(vec v) {
#if LANES == 16
    v += __builtin_shuffle(v, (ivec){8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7});
    v += __builtin_shuffle(v, (ivec){4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11});
    v += __builtin_shuffle(v, (ivec){2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13});
    v += __builtin_shuffle(v, (ivec){1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14});
#else
    v += __builtin_shuffle(v, (ivec){4, 5, 6, 7, 0, 1, 2, 3});
    v += __builtin_shuffle(v, (ivec){2, 3, 0, 1, 6, 7, 4, 5});
    v += __builtin_shuffle(v, (ivec){1, 0, 3, 2, 5, 4, 7, 6});
#endif
    return v[0];
}

/* horizontal_sum of eight vectors at once, to the same bits, in a third of the operations. */
static inline void horizontal_sums(const vec *v, float *sums) {
    vec t[4], u[2];
#if LANES == 8
    for (int i = 0; i < 4; i++)
        t[i] = __builtin_shuffle(v[i], v[i + 4], (ivec){0, 1, 2, 3, 8, 9, 10, 11}) +
               __builtin_shuffle(v[i], v[i + 4], (ivec){4, 5, 6, 7, 12, 13, 14, 15});
    for (int i = 0; i < 2; i++)
        u[i] = __builtin_shuffle(t[i], t[i + 2], (ivec){0, 1, 8, 9, 4, 5, 12, 13}) +
               __builtin_shuffle(t[i], t[i + 2], (ivec){2, 3, 10, 11, 6, 7, 14, 15});
    const vec all = __builtin_shuffle(u[0], u[1], (ivec){0, 8, 2, 10, 4, 12, 6, 14}) +
                    __builtin_shuffle(u[0], u[1], (ivec){1, 9, 3, 11, 5, 13, 7, 15});
#else
    for (int i = 0; i < 4; i++)
        t[i] = __builtin_shuffle(v[i], v[i + 4], (ivec){0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23}) +
               __builtin_shuffle(v[i], v[i + 4], (ivec){8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31});
    for (int i = 0; i < 2; i++)
        u[i] = __builtin_shuffle(t[i], t[i + 2], (ivec){0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27}) +
               __builtin_shuffle(t[i], t[i + 2], (ivec){4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31});
    const vec s = __builtin_shuffle(u[0], u[1], (ivec){0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29}) +
                  __builtin_shuffle(u[0], u[1], (ivec){2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31});
    const vec all = __builtin_shuffle(s, (ivec){0, 8, 4, 12, 2, 10, 6, 14}) +
                    __builtin_shuffle(s, (ivec){1, 9, 5, 13, 3, 11, 7, 15});
#endif
    memcpy(sums, &all, 8 * sizeof(float));
}

/* The low and the high nibbles of LANES bytes as floats. GCC 12 splits the portable form into scalars. */
static inline void unpack_nibbles(const uint8_t *p, vec *low, vec *high) {
#if defined(__AVX512F__) && LANES == 16
    const __m512i q = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
    *low = (vec)_mm512_cvtepi32_ps(_mm512_and_si512(q, _mm512_set1_epi32(15)));
    *high = (vec)_mm512_cvtepi32_ps(_mm512_srli_epi32(q, 4));
#elif defined(__AVX2__) && LANES == 8
    const __m256i q = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
    *low = (vec)_mm256_cvtepi32_ps(_mm256_and_si256(q, _mm256_set1_epi32(15)));
    *high = (vec)_mm256_cvtepi32_ps(_mm256_srli_epi32(q, 4));
#else
    for (int i = 0; i < LANES; i++) {
        (*low)[i] = (float)(p[i] & 15);
        (*high)[i] = (float)(p[i] >> 4);
    }
#endif
}

/* e^x for x <= 0, relative error below 3e-7: 2^n * p(r) with |r| <= ln(2)/2, p of degree 6.
 * Below -87 the result is 0 (float32 would be subnormal). */
static inline vec exp_nonpositive(vec x) {
    const vec clamped = pick(x < -87.0f, splat(-87.0f), x);
    const vec scaled = clamped * 1.44269504088896341f - 0.5f; /* round to nearest by truncation, x <= 0 */
    const ivec n = __builtin_convertvector(scaled, ivec);
    const vec nf = __builtin_convertvector(n, vec);
    const vec r = (clamped - nf * 0.693359375f) - nf * -2.12194440e-4f; /* ln 2 in two parts */
    vec p = splat(1.0f / 720);
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const ivec bits = (n + 127) << 23;
    vec power;
    memcpy(&power, &bits, sizeof power);
    return pick(x < -87.0f, splat(0.0f), p * power);
}
