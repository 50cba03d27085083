/* y[M, N] = x[M, K] . W[N, K]^T with W as the GGUF file stores it, or float32.
 *
 * A group of weight rows is dequantised once into a buffer, then multiplied with every row of x. Reading
 * 4-bit weights costs a sixth of the memory traffic of float32, which is what bounds decoding.
 */
#include <stddef.h>
#include <stdlib.h>

#include "operations.h"
#include "vector.h"

#define INLINE static inline __attribute__((always_inline)) /* for constant arguments, whose loops unroll */

/* A group of weight rows is dequantised at a time; 12 rows by 256 columns of x are 12 KiB. */
enum { GROUP = 8, PANEL = 12, TILE_M = 3, STRETCH = 256, FEW = 16 };

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

/* LANES weights as floats. */
static inline vec load_bf16(const uint8_t *p) {
#if LANES == 16 && defined(__AVX512F__)
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#elif LANES == 8 && defined(__AVX2__)
    return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#else
    uint16_t narrow[LANES];
    ivec wide;
    vec v;
    memcpy(narrow, p, sizeof narrow);
    for (int i = 0; i < LANES; i++) wide[i] = (int32_t)((uint32_t)narrow[i] << 16);
    memcpy(&v, &wide, sizeof v);
    return v;
#endif
}

static void dequantize(const struct weight *w, int64_t row, int64_t k, float *out) {
    const uint8_t *data = w->data + row * w->row_bytes;
    if (w->format == Q4_1)
        dequantize_q4_1(data, k, out);
    else if (w->format == Q8_0)
        dequantize_q8_0(data, k, out);
    else if (w->format == BF16)
        for (int64_t i = 0; i < k; i += LANES) store(out + i, load_bf16(data + 2 * i));
    else
        memcpy(out, data, (size_t)k * sizeof(float));
}

/* Adds the products over one stretch of k to acc[m][GROUP]. m and n are constants at each call, so that the
 * loops unroll and the accumulators live in registers meanwhile. Rows of w are `ws` apart, those of x `xs`. */
INLINE void tile(const int m, const int n, const float *w, int64_t ws, const float *x, int64_t xs,
                 int64_t stretch, vec *acc) {
    vec sum[TILE_M][8];
    for (int r = 0; r < m; r++)
        for (int c = 0; c < n; c++) sum[r][c] = acc[r * GROUP + c];
    for (int64_t i = 0; i < stretch; i += LANES) {
        vec xv[TILE_M];
        for (int r = 0; r < m; r++) xv[r] = load(x + r * xs + i);
        for (int c = 0; c < n; c++) {
            const vec wv = in_register(load(w + c * ws + i));
            for (int r = 0; r < m; r++) sum[r][c] += xv[r] * wv;
        }
    }
    for (int r = 0; r < m; r++)
        for (int c = 0; c < n; c++) acc[r * GROUP + c] = sum[r][c];
}

/* Up to PANEL rows of x against GROUP weight rows. Over a stretch of k both fit into the first-level cache; the
 * accumulators are carried from stretch to stretch, which changes no order and so no bit. */
static void panel(const float *w, int64_t ws, const float *x, int64_t xs, int64_t m, int64_t k, vec *acc) {
    for (int64_t i = 0; i < m * GROUP; i++) acc[i] = splat(0.0f);
    for (int64_t i = 0; i < k; i += STRETCH) {
        const int64_t stretch = k - i < STRETCH ? k - i : STRETCH;
        int64_t r = 0;
        for (; r + TILE_M <= m; r += TILE_M)
            for (int c = 0; c < GROUP; c += 4)
                tile(TILE_M, 4, w + c * ws + i, ws, x + r * xs + i, xs, stretch, acc + r * GROUP + c);
        for (; r < m; r++) tile(1, GROUP, w + i, ws, x + r * xs + i, xs, stretch, acc + r * GROUP);
    }
}

/* One row of x against GROUP weight rows, read where they lie: at a row, memory is what bounds. The next group
 * is asked for meanwhile. */
static void single_f32(const float *w, const float *x, int64_t k, vec *acc) {
    vec sum[GROUP];
    for (int c = 0; c < GROUP; c++) sum[c] = splat(0.0f);
    for (int64_t i = 0; i < k; i += LANES) {
        const vec xv = load(x + i);
        for (int c = 0; c < GROUP; c++) {
            __builtin_prefetch(w + (c + GROUP) * k + i);
            sum[c] += xv * in_register(load(w + c * k + i));
        }
    }
    for (int c = 0; c < GROUP; c++) acc[c] = sum[c];
}

static void single_bf16(const uint8_t *w, const float *x, int64_t k, vec *acc) {
    vec sum[GROUP];
    for (int c = 0; c < GROUP; c++) sum[c] = splat(0.0f);
    for (int64_t i = 0; i < k; i += LANES) {
        const vec xv = load(x + i);
        for (int c = 0; c < GROUP; c++) {
            __builtin_prefetch(w + 2 * ((c + GROUP) * k + i));
            sum[c] += xv * load_bf16(w + 2 * (c * k + i));
        }
    }
    for (int c = 0; c < GROUP; c++) acc[c] = sum[c];
}

/* Sums over GROUP weight rows from `row` on, of which `n` exist, for one row of x. */
static void single(const struct weight *w, int64_t row, int64_t n, const float *x, int64_t k, float *out) {
    vec acc[GROUP];
    float sums[GROUP];
    const uint8_t *data = w->data + row * w->row_bytes;
    if (w->format == F32)
        single_f32((const float *)(const void *)data, x, k, acc);
    else
        single_bf16(data, x, k, acc);
    horizontal_sums(acc, sums);
    memcpy(out + row, sums, (size_t)n * sizeof(float));
}

/* GROUP weight rows from `row` on, for all of x. Rows past the end repeat the last one and are not written. */
static void weight_group(const struct product *p, int64_t row, float *buffer) {
    const struct weight *w = &p->weight;
    const int64_t n = w->rows - row < GROUP ? w->rows - row : GROUP, k = p->k;
    if (p->m == 1 && n == GROUP && (w->format == F32 || w->format == BF16)) {
        single(w, row, n, p->x, k, w->out);
        return;
    }
    const float *rows = (const float *)(const void *)(w->data + row * w->row_bytes);
    if (w->format != F32 || n < GROUP) {
        for (int64_t c = 0; c < GROUP; c++) dequantize(w, row + (c < n ? c : n - 1), k, buffer + c * k);
        rows = buffer;
    }
    for (int64_t r = 0; r < p->m; r += PANEL) {
        vec acc[PANEL * GROUP];
        const int64_t m = p->m - r < PANEL ? p->m - r : PANEL;
        panel(rows, k, p->x + r * p->x_stride, p->x_stride, m, k, acc);
        for (int64_t i = 0; i < m; i++) {
            float sums[GROUP];
            horizontal_sums(acc + i * GROUP, sums);
            memcpy(w->out + (r + i) * p->out_stride + row, sums, (size_t)n * sizeof(float));
        }
    }
}

/* Returns 0, -1 when a k is out of range, -2 when memory ran out. */
int products_float(const struct product *products, int64_t count, int32_t threads) {
    int64_t groups = 0, widest = 0, work = 0;
    for (int64_t i = 0; i < count; i++) {
        const int64_t k = products[i].k;
        if (k % BLOCK != 0 || k > MAX_COLUMNS || k <= 0) return -1;
        widest = k > widest ? k : widest;
        groups += (products[i].weight.rows + GROUP - 1) / GROUP;
        work += products[i].weight.rows * products[i].m * k;
    }
    const int chunk = groups > 16 * threads ? 4 : 1;
    int failed = 0;
#pragma omp parallel num_threads(threads) if (work > WORTH_A_THREAD)
    {
        float *buffer = aligned_alloc(64, (size_t)(GROUP * widest) * sizeof(float));
        int64_t first = 0, before = 0; /* the product that a group falls into, and the groups before it */
        if (buffer == NULL) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic, chunk)
        for (int64_t t = 0; t < groups; t++) {
            if (buffer == NULL) continue;
            for (int64_t own; t - before >= (own = (products[first].weight.rows + GROUP - 1) / GROUP); first++)
                before += own;
            weight_group(&products[first], (t - before) * GROUP, buffer);
        }
        free(buffer);
    }
    return failed ? -2 : 0;
}

int products_mixed(const struct product *products, int64_t count, int32_t threads) {
    int status = 0;
    for (int64_t i = 0, n; i < count && status == 0; i += n) {
        const int packed = products[i].weight.packed;
        for (n = 1; i + n < count && products[i + n].weight.packed == packed;) n++;
        status = (packed ? products_integer : products_float)(products + i, n, threads);
    }
    return status;
}

/* Several weights over the same x. Returns 0, -1 when k is out of range, -2 when memory ran out. */
int dockyard_linear(const struct weight *weights, int32_t count, const float *x, int64_t m, int64_t k,
                    int32_t threads) {
    struct product few[FEW], *products = few;
    if (count <= 0) return 0;
    if (count > FEW && (products = malloc((size_t)count * sizeof *products)) == NULL) return -2;
    for (int32_t i = 0; i < count; i++) products[i] = dense_product(weights[i], x, weights[i].out, m, k);
    const int status = products_mixed(products, count, threads);
    if (products != few) free(products);
    return status;
}

/* Rows `ids` of a table, dequantised: the embedding look-up. */
void dockyard_gather(const uint8_t *table, int64_t row_bytes, int32_t format, const int64_t *ids, int64_t m,
                     int64_t k, float *out) {
    struct weight w = {table, NULL, 0, row_bytes, format, 0};
    for (int64_t i = 0; i < m; i++) dequantize(&w, ids[i], k, out + i * k);
}
