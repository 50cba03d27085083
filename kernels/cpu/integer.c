/* y[M, N] = x[M, K] . W[N, K]^T in integers: the products of the profile `fast`.
 *
 * Each row of x is rounded to 16 bits in blocks of 32 with a scale of their own. Weights keep the bits of
 * their file, 32 rows packed side by side (kernels/cpu/packing.py), so that a lane holds a row and nothing is
 * summed across lanes. Sums over a block are exact; the blocks' sums are added as floats in ascending order of
 * k, a block's scaled sum before its minimum, in one accumulator a row, whatever the number of rows and
 * threads.
 */
#include <math.h>
#include <stdlib.h>

#include "pairs.h"
#include "weight.h"

#define INLINE static inline __attribute__((always_inline)) /* for constant arguments, whose loops unroll */

/* A tile is TILE_M rows of x by WIDTH vectors of weight rows: each activation that is loaded serves WIDTH
 * products, each weight that is unpacked TILE_M, and all sums stay in the 32 registers of AVX-512. Weights are
 * fetched AHEAD bytes early: what processors fetch by themselves ends with a page. */
enum { GROUP = 32, TILE_M = 4, WIDTH = 2, WORD_BYTES = GROUP * 4, HALF_BYTES = GROUP * 2, MANY_ROWS = 8 };
enum { TILE_N = WIDTH * LANES, HIGHEST = 32767, AHEAD = 6144, LINE = 64 };

/* 32 activations: x is about scale * q. */
struct block {
    float scale;
    float scaled_sum; /* scale * the sum of q */
    int16_t q[BLOCK];
};

/* Magnitudes are compared as integers, where NaN and infinity are the largest: they stay in the scale. Blocks
 * below 1e-30 become 0, since HIGHEST / highest would overflow. */
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
        const float inverse = highest < 1e-30f ? 0.0f : HIGHEST / highest;
        int32_t sum = 0;
        for (int i = 0; i < BLOCK; i++) {
            const int32_t q = (int32_t)rintf(x[i] * inverse);
            to->q[i] = (int16_t)q;
            sum += q;
        }
        to->scale = highest < 1e-30f ? 0.0f : highest / HIGHEST;
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

/* Adds pair `number` of m blocks of x, `stride` apart, times w. m is a constant at each call, here and below. */
INLINE void add_pair(const int m, const ivec *w, const struct block *x, int64_t stride, int number,
                     ivec (*sums)[WIDTH]) {
    for (int r = 0; r < m; r++) {
        int32_t pair;
        memcpy(&pair, x[r * stride].q + 2 * number, sizeof pair);
        for (int v = 0; v < WIDTH; v++) sums[r][v] = dot_pairs(sums[r][v], w[v], pair);
    }
}

/* A word is eight weights of a row: low nibbles of its bytes 0 and 2, of 1 and 3, then the high ones. */
INLINE void add_q4_1(const int m, const uint8_t *w, const struct block *x, int64_t stride,
                     ivec (*sums)[WIDTH]) {
    for (int word = 0; word < 4; word++, w += WORD_BYTES) {
        ivec words[WIDTH];
        for (int v = 0; v < WIDTH; v++) words[v] = load_words(w + v * sizeof(ivec));
        for (int part = 0; part < 4; part++) {
            const int shift = part % 2 * 8 + part / 2 * 4;
            ivec pairs[WIDTH];
            for (int v = 0; v < WIDTH; v++) pairs[v] = nibbles(words[v], shift);
            add_pair(m, pairs, x, stride, part / 2 * 8 + 2 * word + part % 2, sums);
        }
    }
}

/* A word is four weights of a row: bytes 0 and 2, then 1 and 3. */
INLINE void add_q8_0(const int m, const uint8_t *w, const struct block *x, int64_t stride,
                     ivec (*sums)[WIDTH]) {
    for (int word = 0; word < 8; word++, w += WORD_BYTES) {
        ivec even[WIDTH], odd[WIDTH];
        for (int v = 0; v < WIDTH; v++) {
            const ivec words = load_words(w + v * sizeof(ivec));
            even[v] = signed_bytes(words << 8), odd[v] = signed_bytes(words);
        }
        add_pair(m, even, x, stride, 2 * word, sums);
        add_pair(m, odd, x, stride, 2 * word + 1, sums);
    }
}

/* TILE_N weight rows, the first of them `lane` of its group, against m rows of x: results[m][TILE_N]. */
INLINE void tile(const int m, const int format, const uint8_t *w, const struct block *x, int64_t blocks,
                 int lane, vec (*results)[WIDTH]) {
    vec acc[TILE_M][WIDTH] = {{{0}}};
    const int64_t header = format == Q4_1 ? 2 * HALF_BYTES : HALF_BYTES;
    const int64_t bytes = header + (format == Q4_1 ? 4 : 8) * WORD_BYTES;
    for (int64_t b = 0; b < blocks; b++, w += bytes) {
        ivec sums[TILE_M][WIDTH] = {{{0}}};
        for (int64_t i = 0; i < bytes; i += LINE) __builtin_prefetch(w + AHEAD + i);
        if (format == Q4_1) add_q4_1(m, w + header + 4 * lane, x + b, blocks, sums);
        else add_q8_0(m, w + header + 4 * lane, x + b, blocks, sums);
        for (int v = 0; v < WIDTH; v++) {
            const uint8_t *scales = w + 2 * (lane + v * LANES);
            for (int r = 0; r < m; r++) {
                const struct block *own = x + r * blocks + b;
                acc[r][v] += __builtin_convertvector(sums[r][v], vec) * (halves(scales) * own->scale);
                if (format == Q4_1) acc[r][v] += halves(scales + HALF_BYTES) * own->scaled_sum;
            }
        }
    }
    for (int r = 0; r < m; r++)
        for (int v = 0; v < WIDTH; v++) results[r][v] = acc[r][v];
}

INLINE void tile_of(int64_t m, const int format, const uint8_t *w, const struct block *x, int64_t blocks,
                    int lane, vec (*results)[WIDTH]) {
    if (m == 1) tile(1, format, w, x, blocks, lane, results);
    else if (m == 2) tile(2, format, w, x, blocks, lane, results);
    else if (m == 3) tile(3, format, w, x, blocks, lane, results);
    else tile(TILE_M, format, w, x, blocks, lane, results);
}

/* A group of weight rows for all of x. Rows past the end are packed as zeros and not written. */
static void weight_group(const struct weight *w, int64_t group, const struct block *x, int64_t m,
                         int64_t blocks) {
    const uint8_t *data = w->data + group * GROUP * w->row_bytes;
    for (int lane = 0; lane < GROUP; lane += TILE_N) {
        const int64_t row = group * GROUP + lane, left = w->rows - row, n = left < TILE_N ? left : TILE_N;
        for (int64_t r = 0; r < m && n > 0; r += TILE_M) {
            vec results[TILE_M][WIDTH];
            const int64_t rows = m - r < TILE_M ? m - r : TILE_M;
            if (w->format == Q4_1) tile_of(rows, Q4_1, data, x + r * blocks, blocks, lane, results);
            else tile_of(rows, Q8_0, data, x + r * blocks, blocks, lane, results);
            for (int64_t i = 0; i < rows; i++)
                memcpy(w->out + (r + i) * w->rows + row, results[i], (size_t)n * sizeof(float));
        }
    }
}

/* k is a multiple of 32. */
int linear_integer(const struct weight *weights, int32_t count, const float *x, int64_t m, int64_t k,
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
