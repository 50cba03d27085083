/* y[M, N] = x[M, K] . W[N, K]^T with W as the GGUF file stores it, or float32.
 *
 * A group of weight rows is dequantised once into a buffer, then multiplied with every row of x. Reading
 * 4-bit weights costs a sixth of the memory traffic of float32, which is what bounds decoding.
 */
#include <stddef.h>
#include <stdlib.h>

#include "operations.h"
#include "vector.h"

/* A group of weight rows is dequantised at a time; 12 rows by 256 columns of x are 12 KiB. */
enum { GROUP = 8, PANEL = 12, TILE_M = 3, STRETCH = 256, MAX_K = 16384 };

static inline float half_to_float(const uint8_t *p) {
    _Float16 h;
    memcpy(&h, p, sizeof h);
    return (float)h;
}

/* Block: float16 scale, float16 minimum, 16 bytes; low nibbles are elements 0..15, high ones 16..31. */
static void dequantize_q4_1(const uint8_t *row, int64_t k, float *restrict out) {
    for (int64_t b = 0; b < k / BLOCK; b++, row += 20) {
        const vec scale = splat(half_to_float(row)), minimum = splat(half_to_float(row + 2));
        for (int i = 0; i < 16; i += LANES) {
            vec low, high;
            unpack_nibbles(row + 4 + i, &low, &high);
            store(out + b * BLOCK + i, low * scale + minimum);
            store(out + b * BLOCK + 16 + i, high * scale + minimum);
        }
    }
}

/* Block: float16 scale, 32 signed bytes. */
static void dequantize_q8_0(const uint8_t *row, int64_t k, float *restrict out) {
    for (int64_t b = 0; b < k / BLOCK; b++, row += 34) {
        const float scale = half_to_float(row);
        const int8_t *q = (const int8_t *)row + 2;
        float *to = out + b * BLOCK;
        for (int i = 0; i < BLOCK; i++) to[i] = (float)q[i] * scale;
    }
}

static void dequantize(const struct weight *w, int64_t row, int64_t k, float *out) {
    const uint8_t *data = w->data + row * w->row_bytes;
    if (w->format == Q4_1)
        dequantize_q4_1(data, k, out);
    else if (w->format == Q8_0)
        dequantize_q8_0(data, k, out);
    else
        memcpy(out, data, (size_t)k * sizeof(float));
}

/* Adds the products over one stretch of k to acc[m][GROUP]. m and n are constants at each call, so that the
 * loops unroll and the accumulators live in registers meanwhile. */
static inline __attribute__((always_inline)) void tile(const int m, const int n, const float *w, const float *x,
                                                       int64_t k, int64_t stretch, vec *acc) {
    vec sum[TILE_M][8];
    for (int r = 0; r < m; r++)
        for (int c = 0; c < n; c++) sum[r][c] = acc[r * GROUP + c];
    for (int64_t i = 0; i < stretch; i += LANES) {
        vec xv[TILE_M];
        for (int r = 0; r < m; r++) xv[r] = load(x + r * k + i);
        for (int c = 0; c < n; c++) {
            const vec wv = in_register(load(w + c * k + i));
            for (int r = 0; r < m; r++) sum[r][c] += xv[r] * wv;
        }
    }
    for (int r = 0; r < m; r++)
        for (int c = 0; c < n; c++) acc[r * GROUP + c] = sum[r][c];
}

/* Up to PANEL rows of x against GROUP dequantised weight rows. Over a stretch of k both fit into the first-level
 * cache; the accumulators are carried from stretch to stretch, which changes no order and so no bit. */
static void panel(const float *w, const float *x, int64_t m, int64_t k, vec *acc) {
    for (int64_t i = 0; i < m * GROUP; i++) acc[i] = splat(0.0f);
    for (int64_t i = 0; i < k; i += STRETCH) {
        const int64_t stretch = k - i < STRETCH ? k - i : STRETCH;
        int64_t r = 0;
        for (; r + TILE_M <= m; r += TILE_M)
            for (int c = 0; c < GROUP; c += 4) tile(TILE_M, 4, w + c * k + i, x + r * k + i, k, stretch, acc + r * GROUP + c);
        for (; r < m; r++)
            for (int c = 0; c < GROUP; c += 8) tile(1, 8, w + c * k + i, x + r * k + i, k, stretch, acc + r * GROUP + c);
    }
}

/* GROUP may be smaller than a vector. */
static void group_sums(const vec *acc, float *sums) {
    if (GROUP % LANES == 0)
        for (int c = 0; c < GROUP; c += LANES) store(sums + c, horizontal_sums(acc + c));
    else
        for (int c = 0; c < GROUP; c++) sums[c] = horizontal_sum(acc[c]);
}

/* GROUP weight rows from `row` on, for all of x. Rows past the end repeat the last one and are not written. */
static void weight_group(const struct weight *w, int64_t row, const float *x, int64_t m, int64_t k, float *buffer) {
    const int64_t n = w->rows - row < GROUP ? w->rows - row : GROUP;
    for (int64_t c = 0; c < GROUP; c++) dequantize(w, row + (c < n ? c : n - 1), k, buffer + c * k);
    for (int64_t r = 0; r < m; r += PANEL) {
        vec acc[PANEL * GROUP];
        const int64_t rows = m - r < PANEL ? m - r : PANEL;
        panel(buffer, x + r * k, rows, k, acc);
        for (int64_t i = 0; i < rows; i++) {
            float sums[GROUP];
            group_sums(acc + i * GROUP, sums);
            memcpy(w->out + (r + i) * w->rows + row, sums, (size_t)n * sizeof(float));
        }
    }
}

/* k is a multiple of 32 and at most MAX_K. */
int linear_float(const struct weight *weights, int32_t count, const float *x, int64_t m, int64_t k,
                 int32_t threads) {
    if (k % BLOCK != 0 || k > MAX_K || k <= 0) return -1;
    const int64_t groups = num_groups(weights, count, GROUP);
    int failed = 0;
#pragma omp parallel num_threads(threads)
    {
        float *buffer = aligned_alloc(64, (size_t)(GROUP * k) * sizeof(float));
        if (buffer == NULL) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(static)
        for (int64_t t = 0; t < groups; t++) {
            if (buffer == NULL) continue;
            int64_t group = t;
            const struct weight *w = owner(weights, GROUP, &group);
            weight_group(w, group * GROUP, x, m, k, buffer);
        }
        free(buffer);
    }
    return failed ? -2 : 0;
}

/* Several weights over the same x; neighbours of one kind share a parallel region, since waking threads costs
 * more than a small product. Returns 0, -1 when k is out of range, -2 when memory ran out. */
int dockyard_linear(const struct weight *weights, int32_t count, const float *x, int64_t m, int64_t k,
                    int32_t threads) {
    int status = 0;
    for (int32_t i = 0, n; i < count && status == 0; i += n) {
        for (n = 1; i + n < count && weights[i + n].packed == weights[i].packed;) n++;
        status = (weights[i].packed ? linear_integer : linear_float)(weights + i, n, x, m, k, threads);
    }
    return status;
}

/* Rows `ids` of a table, dequantised: the embedding look-up. */
void dockyard_gather(const uint8_t *table, int64_t row_bytes, int32_t format, const int64_t *ids, int64_t m,
                     int64_t k, float *out) {
    struct weight w = {table, NULL, 0, row_bytes, format, 0};
    for (int64_t i = 0; i < m; i++) dequantize(&w, ids[i], k, out + i * k);
}
