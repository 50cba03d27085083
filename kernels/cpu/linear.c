/* y[M, N] = x[M, K] . W[N, K]^T with W as the GGUF file stores it, or float32.
 *
 * A tile of weight rows is dequantised once into a buffer that stays in the first-level cache, then
 * multiplied with every row of x in tiles of three. Reading 4-bit weights costs a sixth of the memory
 * traffic of float32, which is what bounds decoding.
 */
#include <stddef.h>
#include <stdlib.h>

#include "vector.h"

enum format { F32 = 0, Q4_1 = 3, Q8_0 = 8 }; /* the numbers that GGML gives to its types */
enum { BLOCK = 32, TILE_N = 4, TILE_M = 3, MAX_K = 16384 };

struct weight {
    const uint8_t *data; /* N rows of row_bytes */
    float *out;          /* [M, N] */
    int64_t rows;        /* N */
    int64_t row_bytes;
    int32_t format;
};

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

static const float *dequantize(const struct weight *w, int64_t row, int64_t k, float *buffer) {
    const uint8_t *data = w->data + row * w->row_bytes;
    if (w->format == F32) return (const float *)data;
    if (w->format == Q4_1)
        dequantize_q4_1(data, k, buffer);
    else
        dequantize_q8_0(data, k, buffer);
    return buffer;
}

/* m and n are constants at each call, so that the loops unroll into registers. */
static inline __attribute__((always_inline)) void tile(const int m, const int n, const float *const *w,
                                                       const float *x, int64_t k, float *out, int64_t stride) {
    vec acc[TILE_M][TILE_N];
    for (int r = 0; r < m; r++)
        for (int c = 0; c < n; c++) acc[r][c] = splat(0.0f);
    for (int64_t i = 0; i < k; i += LANES) {
        vec xv[TILE_M];
        for (int r = 0; r < m; r++) xv[r] = load(x + r * k + i);
        for (int c = 0; c < n; c++) {
            const vec wv = in_register(load(w[c] + i));
            for (int r = 0; r < m; r++) acc[r][c] += xv[r] * wv;
        }
    }
    for (int r = 0; r < m; r++)
        for (int c = 0; c < n; c++) out[r * stride + c] = horizontal_sum(acc[r][c]);
}

static void tile_rows(const int n, const float *const *w, const float *x, int64_t m, int64_t k, float *out,
                      int64_t stride) {
    int64_t r = 0;
    for (; r + 3 <= m; r += 3) {
        if (n == 4) tile(3, 4, w, x + r * k, k, out + r * stride, stride);
        else for (int c = 0; c < n; c++) tile(3, 1, w + c, x + r * k, k, out + r * stride + c, stride);
    }
    for (; r < m; r++) {
        if (n == 4) tile(1, 4, w, x + r * k, k, out + r * stride, stride);
        else for (int c = 0; c < n; c++) tile(1, 1, w + c, x + r * k, k, out + r * stride + c, stride);
    }
}

static void weight_tile(const struct weight *w, int64_t row, const float *x, int64_t m, int64_t k, float *buffer) {
    const int n = (int)(w->rows - row < TILE_N ? w->rows - row : TILE_N);
    const float *rows[TILE_N];
    for (int c = 0; c < n; c++) rows[c] = dequantize(w, row + c, k, buffer + c * k);
    tile_rows(n, rows, x, m, k, w->out + row, w->rows);
}

/* Several weights over the same x in one parallel region: waking threads costs more than a small product.
 * k is a multiple of 32 and at most MAX_K. Returns 0, or -1 when k is out of range. */
int dockyard_linear(const struct weight *weights, int32_t count, const float *x, int64_t m, int64_t k,
                    int32_t threads) {
    if (k % BLOCK != 0 || k > MAX_K || k <= 0) return -1;
    int64_t tiles = 0;
    for (int32_t i = 0; i < count; i++) tiles += (weights[i].rows + TILE_N - 1) / TILE_N;
#pragma omp parallel num_threads(threads)
    {
        float buffer[TILE_N * MAX_K] __attribute__((aligned(64)));
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tiles; t++) {
            int64_t local = t;
            int32_t i = 0;
            for (;; i++) {
                const int64_t own = (weights[i].rows + TILE_N - 1) / TILE_N;
                if (local < own) break;
                local -= own;
            }
            weight_tile(&weights[i], local * TILE_N, x, m, k, buffer);
        }
    }
    return 0;
}

/* Rows `ids` of a table, dequantised: the embedding look-up. */
void dockyard_gather(const uint8_t *table, int64_t row_bytes, int32_t format, const int64_t *ids, int64_t m,
                     int64_t k, float *out) {
    struct weight w = {table, NULL, 0, row_bytes, format};
    for (int64_t i = 0; i < m; i++) {
        const float *row = dequantize(&w, ids[i], k, out + i * k);
        if (row != out + i * k) memcpy(out + i * k, row, (size_t)k * sizeof(float));
    }
}
