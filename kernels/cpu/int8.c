/* y[M, N] = x[M, K] . W[N, K]^T in integers: the products of the profile `fast`.
 *
 * Each row of x is rounded to 8 bits in blocks of 32 with a scale of their own. Weights keep the bits of
 * their file, sixteen rows packed side by side (kernels/cpu/packing.py), so that a lane holds a row and
 * nothing is summed across lanes. Sums over a block are exact; the blocks' sums are added as floats in
 * ascending order of k, in one accumulator a row for scales and one for minima, whatever the number of rows
 * and threads.
 */
#include <math.h>
#include <stdlib.h>

#include "dot.h"
#include "weight.h"

#define INLINE static inline __attribute__((always_inline)) /* for constant arguments, whose loops unroll */

enum { GROUP = 16, TILE_M = 4, WORD_BYTES = GROUP * 4, HALF_BYTES = GROUP * 2, MANY_ROWS = 8 };

/* 32 activations: x is about scale * q. */
struct block {
    float scale;
    float scaled_sum; /* scale * sum */
    int32_t sum;      /* of q */
    int8_t q[BLOCK];
};

/* Magnitudes are compared as integers, where NaN and infinity are the largest: they stay in the scale. Blocks
 * below 1e-30 become 0, since 127 / highest would overflow. */
static void quantize_row(const float *x, int64_t blocks, struct block *to) {
    for (int64_t b = 0; b < blocks; b++, x += BLOCK, to++) {
        int32_t bits[BLOCK], most = 0;
        memcpy(bits, x, sizeof bits);
        for (int i = 0; i < BLOCK; i++) {
            const int32_t magnitude = bits[i] & 0x7fffffff;
            most = magnitude > most ? magnitude : most;
        }
        float highest;
        memcpy(&highest, &most, sizeof highest);
        const float inverse = highest < 1e-30f ? 0.0f : 127.0f / highest;
        int32_t sum = 0;
        for (int i = 0; i < BLOCK; i++) {
            const int32_t q = (int32_t)rintf(x[i] * inverse);
            to->q[i] = (int8_t)q;
            sum += q;
        }
        to->scale = highest < 1e-30f ? 0.0f : highest / 127.0f;
        to->sum = sum;
        to->scaled_sum = to->scale * (float)sum;
    }
}

static inline vec halves(const uint8_t *p) {
#if LANES == 16 && defined(__AVX512F__)
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif LANES == 8 && defined(__F16C__)
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
    _Float16 h[LANES];
    vec v;
    memcpy(h, p, sizeof h);
    for (int i = 0; i < LANES; i++) v[i] = (float)h[i];
    return v;
#endif
}

static inline int32_t four(const struct block *x, int word) {
    int32_t v;
    memcpy(&v, x->q + 4 * word, sizeof v);
    return v;
}

/* One block of 4-bit weights against m blocks of x, `stride` apart. m is a constant at each call. */
INLINE void sums_q4_1(const int m, const uint8_t *w, const struct block *x, int64_t stride, ivec *sum) {
    for (int r = 0; r < m; r++) sum[r] = (ivec){0};
    for (int word = 0; word < 4; word++) {
        const ivec both = load_words(w + word * WORD_BYTES);
        const ivec low = both & 0x0f0f0f0f, high = (both >> 4) & 0x0f0f0f0f;
        for (int r = 0; r < m; r++) {
            sum[r] = dot_nibbles(sum[r], low, four(x + r * stride, word));
            sum[r] = settled(dot_nibbles(sum[r], high, four(x + r * stride, 4 + word)));
        }
    }
    for (int r = 0; r < m; r++) sum[r] = finish_nibbles(sum[r]);
}

INLINE void sums_q8_0(const int m, const uint8_t *w, const struct block *x, int64_t stride, ivec *sum) {
    for (int r = 0; r < m; r++) sum[r] = start_signed(x[r * stride].sum);
    for (int word = 0; word < 8; word++) {
        const ivec bytes = load_words(w + word * WORD_BYTES);
        for (int r = 0; r < m; r++) sum[r] = settled(dot_signed(sum[r], bytes, four(x + r * stride, word)));
    }
}

/* LANES weight rows, the first of them `lane` of its group, against m rows of x: results[m][LANES]. */
INLINE void tile(const int m, const int format, const uint8_t *w, const struct block *x, int64_t blocks,
                 int lane, vec *results) {
    vec scaled[TILE_M], minima[TILE_M];
    for (int r = 0; r < m; r++) scaled[r] = minima[r] = splat(0.0f);
    const int64_t header = format == Q4_1 ? 2 * HALF_BYTES : HALF_BYTES;
    const int64_t bytes = header + (format == Q4_1 ? 4 : 8) * WORD_BYTES;
    for (int64_t b = 0; b < blocks; b++, w += bytes) {
        ivec sum[TILE_M];
        if (format == Q4_1) sums_q4_1(m, w + header + 4 * lane, x + b, blocks, sum);
        else sums_q8_0(m, w + header + 4 * lane, x + b, blocks, sum);
        const vec scale = halves(w + 2 * lane);
        for (int r = 0; r < m; r++) {
            const struct block *own = x + r * blocks + b;
            scaled[r] += __builtin_convertvector(sum[r], vec) * (scale * own->scale);
            if (format == Q4_1) minima[r] += halves(w + HALF_BYTES + 2 * lane) * own->scaled_sum;
        }
    }
    for (int r = 0; r < m; r++) results[r] = scaled[r] + minima[r];
}

static void tile_any(int64_t m, int32_t format, const uint8_t *w, const struct block *x, int64_t blocks,
                     int lane, vec *results) {
    if (format == Q4_1 && m == TILE_M) tile(TILE_M, Q4_1, w, x, blocks, lane, results);
    else if (format == Q4_1) tile(1, Q4_1, w, x, blocks, lane, results);
    else if (m == TILE_M) tile(TILE_M, Q8_0, w, x, blocks, lane, results);
    else tile(1, Q8_0, w, x, blocks, lane, results);
}

/* A group of weight rows for all of x. Rows past the end are packed as zeros and not written. */
static void weight_group(const struct weight *w, int64_t group, const struct block *x, int64_t m,
                         int64_t blocks) {
    const uint8_t *data = w->data + group * GROUP * w->row_bytes;
    for (int lane = 0; lane < GROUP; lane += LANES) {
        const int64_t row = group * GROUP + lane, left = w->rows - row, n = left < LANES ? left : LANES;
        for (int64_t r = 0, step; r < m && n > 0; r += step) {
            vec results[TILE_M];
            step = m - r < TILE_M ? 1 : TILE_M;
            tile_any(step, w->format, data, x + r * blocks, blocks, lane, results);
            for (int64_t i = 0; i < step; i++)
                memcpy(w->out + (r + i) * w->rows + row, &results[i], (size_t)n * sizeof(float));
        }
    }
}

/* k is a multiple of 32. */
int linear_int8(const struct weight *weights, int32_t count, const float *x, int64_t m, int64_t k,
                int32_t threads) {
    if (k % BLOCK != 0 || k <= 0) return -1;
    const int64_t blocks = k / BLOCK, groups = num_groups(weights, count, GROUP);
    struct block *rows = malloc((size_t)(m * blocks) * sizeof *rows);
    if (rows == NULL && m > 0) return -2;
#pragma omp parallel for schedule(static) num_threads(threads) if (m >= MANY_ROWS)
    for (int64_t r = 0; r < m; r++) quantize_row(x + r * k, blocks, rows + r * blocks);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t t = 0; t < groups; t++) {
        int64_t group = t;
        const struct weight *w = owner(weights, GROUP, &group);
        weight_group(w, group, rows, m, blocks);
    }
    free(rows);
    return 0;
}
