/* y[M, N] = x[M, K] . W[N, K]^T in integers: the products of the profile `fast`.
 *
 * Each row of x is rounded to 16 bits in blocks of 32 with a scale of their own. Weights keep the bits of
 * their file, 32 rows packed side by side (kernels/cpu/packing.py), so that a lane holds a row and nothing is
 * summed across lanes. Sums over a block are exact; the blocks' sums are added as floats in ascending order of
 * k, a block's scaled sum before its minimum, in one accumulator a row, whatever the number of rows and
 * threads.
 */
#include <math.h>
#include <omp.h>
#include <stdlib.h>

#include "pairs.h"
#include "weight.h"

#define INLINE static inline __attribute__((always_inline)) /* for constant arguments, whose loops unroll */

/* A tile is TILE_M rows of x by WIDTH vectors of weight rows: each activation that is loaded serves WIDTH
 * products, each weight that is unpacked TILE_M, and all sums stay in the 32 registers of AVX-512. Weights are
 * fetched AHEAD bytes early: what processors fetch by themselves ends with a page. */
enum { GROUP = 32, TILE_M = 4, WIDTH = 2, WORD_BYTES = GROUP * 4, HALF_BYTES = GROUP * 2, MANY_ROWS = 8 };
enum { TILE_N = WIDTH * LANES, HIGHEST = 32767, AHEAD = 6144, LINE = 64 };
enum { QUICK = 4 }; /* times as many multiplications as of floats, in the same time */

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

/* Scales of LANES rows: float16, or the exponents of powers of two, of which 0 stands for 0. */
INLINE vec scales_of(const int format, const uint8_t *p) {
    if (format == Q4_1 || format == Q8_0) return halves(p);
#if LANES == 16 && defined(__AVX512F__)
    return (vec)_mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)), 23);
#elif LANES == 8 && defined(__AVX2__)
    return (vec)_mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)), 23);
#else
    ivec bits;
    vec v;
    for (int i = 0; i < LANES; i++) bits[i] = (int32_t)p[i] << 23;
    memcpy(&v, &bits, sizeof v);
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
INLINE void add_nibbles(const int m, const int format, const uint8_t *w, const struct block *x, int64_t stride,
                        ivec (*sums)[WIDTH]) {
    for (int word = 0; word < 4; word++, w += WORD_BYTES) {
        ivec words[WIDTH];
        for (int v = 0; v < WIDTH; v++) words[v] = load_words(w + v * sizeof(ivec));
        for (int part = 0; part < 4; part++) {
            const int shift = part % 2 * 8 + part / 2 * 4;
            ivec pairs[WIDTH];
            for (int v = 0; v < WIDTH; v++)
                pairs[v] = format == Q4_1 ? nibbles(words[v], shift) : doubled_e2m1(words[v], shift);
            add_pair(m, pairs, x, stride, part / 2 * 8 + 2 * word + part % 2, sums);
        }
    }
}

/* A word is four weights of a row: bytes 0 and 2, then 1 and 3. */
INLINE void add_bytes(const int m, const int format, const uint8_t *w, const struct block *x, int64_t stride,
                      ivec (*sums)[WIDTH]) {
    for (int word = 0; word < 8; word++, w += WORD_BYTES) {
        ivec even[WIDTH], odd[WIDTH];
        for (int v = 0; v < WIDTH; v++) {
            const ivec words = load_words(w + v * sizeof(ivec));
            even[v] = format == MXFP8 ? shifted(words << 8) : signed_bytes(words << 8);
            odd[v] = format == MXFP8 ? shifted(words) : signed_bytes(words);
        }
        add_pair(m, even, x, stride, 2 * word, sums);
        add_pair(m, odd, x, stride, 2 * word + 1, sums);
    }
}

/* TILE_N weight rows, the first of them `lane` of its group, against m rows of x: results[m][TILE_N]. */
INLINE void tile(const int m, const int format, const uint8_t *w, const struct block *x, int64_t blocks,
                 int lane, vec (*results)[WIDTH]) {
    vec acc[TILE_M][WIDTH] = {{{0}}};
    const int narrow = format == Q4_1 || format == MXFP4;
    const int scale_bytes = format == Q4_1 || format == Q8_0 ? 2 : 1;
    const int64_t header = format == Q4_1 ? 2 * HALF_BYTES : scale_bytes * GROUP;
    const int64_t bytes = header + (narrow ? 4 : 8) * WORD_BYTES;
    for (int64_t b = 0; b < blocks; b++, w += bytes) {
        ivec sums[TILE_M][WIDTH] = {{{0}}};
        for (int64_t i = 0; i < bytes; i += LINE) __builtin_prefetch(w + AHEAD + i);
        if (narrow) add_nibbles(m, format, w + header + 4 * lane, x + b, blocks, sums);
        else add_bytes(m, format, w + header + 4 * lane, x + b, blocks, sums);
        for (int v = 0; v < WIDTH; v++) {
            const uint8_t *at = w + scale_bytes * (lane + v * LANES);
            const vec scales = scales_of(format, at);
            for (int r = 0; r < m; r++) {
                const struct block *own = x + r * blocks + b;
                acc[r][v] += __builtin_convertvector(sums[r][v], vec) * (scales * own->scale);
                if (format == Q4_1) acc[r][v] += halves(at + HALF_BYTES) * own->scaled_sum;
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
INLINE void group_of(const struct product *p, const int format, int64_t group, const struct block *x) {
    const struct weight *w = &p->weight;
    const int64_t blocks = p->k / BLOCK;
    const uint8_t *data = w->data + group * GROUP * w->row_bytes;
    for (int lane = 0; lane < GROUP; lane += TILE_N) {
        const int64_t row = group * GROUP + lane, left = w->rows - row, n = left < TILE_N ? left : TILE_N;
        for (int64_t r = 0; r < p->m && n > 0; r += TILE_M) {
            vec results[TILE_M][WIDTH];
            const int64_t rows = p->m - r < TILE_M ? p->m - r : TILE_M;
            tile_of(rows, format, data, x + r * blocks, blocks, lane, results);
            for (int64_t i = 0; i < rows; i++)
                memcpy(w->out + (r + i) * p->out_stride + row, results[i], (size_t)n * sizeof(float));
        }
    }
}

static void weight_group(const struct product *p, int64_t group, const struct block *x) {
    if (p->weight.format == Q4_1) group_of(p, Q4_1, group, x);
    else if (p->weight.format == Q8_0) group_of(p, Q8_0, group, x);
    else if (p->weight.format == MXFP4) group_of(p, MXFP4, group, x);
    else group_of(p, MXFP8, group, x);
}

/* Whether a product's rows are those of the one before, whose blocks then serve both. */
static int shares_rows(const struct product *p) {
    return p[0].x == p[-1].x && p[0].m == p[-1].m && p[0].k == p[-1].k && p[0].x_stride == p[-1].x_stride;
}

static int64_t num_blocks(const struct product *p) { return p->m * (p->k / BLOCK); }

/* The groups of the products that begin in one thread's share of all work. */
static void run_share(const struct product *products, int64_t count, const struct block *rows, int64_t work,
                      int64_t number, int64_t threads) {
    const int64_t first = work * number / threads, stop = work * (number + 1) / threads;
    int64_t before = 0;
    for (int64_t i = 0; i < count; i++) {
        const struct product *p = products + i;
        if (i > 0 && !shares_rows(p)) rows += num_blocks(p - 1);
        for (int64_t row = 0; row < p->weight.rows; row += GROUP, before += num_blocks(p))
            if (before >= first && before < stop) weight_group(p, row / GROUP, rows);
    }
}

/* Returns 0, -1 when a k is out of range, -2 when memory ran out. */
int products_integer(const struct product *products, int64_t count, int32_t threads) {
    int64_t all = 0, work = 0; /* blocks of rows; of rows by groups */
    for (int64_t i = 0; i < count; i++) {
        const struct product *p = products + i;
        if (p->k % BLOCK != 0 || p->k <= 0) return -1;
        if (i == 0 || !shares_rows(p)) all += num_blocks(p);
        work += num_blocks(p) * ((p->weight.rows + GROUP - 1) / GROUP);
    }
    struct block *rows = malloc((size_t)all * sizeof *rows), *own = rows;
    if (rows == NULL && all > 0) return -2;
    for (int64_t i = 0; i < count; i++) {
        const struct product *p = products + i;
        if (i > 0 && shares_rows(p)) continue;
        const int64_t blocks = p->k / BLOCK;
#pragma omp parallel for schedule(static) num_threads(threads) if (p->m >= MANY_ROWS)
        for (int64_t r = 0; r < p->m; r++) quantize_row(p->x + r * p->x_stride, blocks, own + r * blocks);
        own += num_blocks(p);
    }
#pragma omp parallel num_threads(threads) if (work * GROUP * BLOCK > QUICK * WORTH_A_THREAD)
    run_share(products, count, rows, work, omp_get_thread_num(), omp_get_num_threads());
    free(rows);
    return 0;
}
