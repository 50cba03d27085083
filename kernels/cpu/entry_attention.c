/* Attention of each row over entries of its own choice, with a sink: one key, which is the value too, for all heads.
 *
 * Entries that a row lacks are left out of its sums, in which the others stand in order of their places: a row's
 * bits depend on what it reads alone, however wide the index is.
 */
#include <math.h>
#include <stdlib.h>

#include "deepseek.h"
#include "rows.h"

#define INLINE static inline __attribute__((always_inline)) /* for constant arguments, whose loops unroll */

enum { HEADS = 4, KEYS = 8, HALF = 4, STRIPE = 4 * LANES };

/* Pointers to the entries that a row reads; how many they are, or -1 where one is outside its pool or its index. */
static int64_t gather(const struct entries *sources, int32_t count, int64_t row, int64_t d, const float **found) {
    int64_t n = 0;
    for (int32_t s = 0; s < count; s++) {
        const struct entries *e = &sources[s];
        const int64_t *index = e->index + row * e->index_stride, places = e->counts == NULL ? e->width : e->counts[row];
        if (places > e->width) return -1;
        for (int64_t i = 0; i < places; i++) {
            if (index[i] >= e->rows) return -1;
            if (index[i] >= e->first) found[n++] = e->pool + index[i] * d;
        }
    }
    return n;
}

/* Scores of KEYS entries for m heads, a constant at each call. Scores of a head are `stride` apart. */
INLINE void score_tile(const int m, const float *q, const float *const *keys, int64_t d, float scale, float *scores,
                       int64_t stride) {
    vec sum[HEADS][KEYS];
    for (int from = 0; from < KEYS; from += HALF) { /* all at once would not fit into registers */
        vec part[HEADS][HALF];
        for (int h = 0; h < m; h++)
            for (int c = 0; c < HALF; c++) part[h][c] = splat(0.0f);
        for (int64_t i = 0; i < d; i += LANES) {
            vec own[HEADS];
            for (int h = 0; h < m; h++) own[h] = load(q + h * d + i);
            for (int c = 0; c < HALF; c++) {
                const vec key = in_register(load(keys[from + c] + i));
                for (int h = 0; h < m; h++) part[h][c] += own[h] * key;
            }
        }
        for (int h = 0; h < m; h++)
            for (int c = 0; c < HALF; c++) sum[h][from + c] = part[h][c];
    }
    for (int h = 0; h < m; h++) {
        float products[KEYS];
        horizontal_sums(sum[h], products);
        for (int c = 0; c < KEYS; c++) scores[h * stride + c] = products[c] * scale;
    }
}

/* Weighted values of m heads over one stripe of channels, divided by the heads' totals. */
INLINE void value_tile(const int m, const int width, const float *weights, int64_t stride, const float *totals,
                       const float *const *values, int64_t n, int64_t at, int64_t d, float *out) {
    vec sum[HEADS][STRIPE / LANES];
    for (int h = 0; h < m; h++)
        for (int i = 0; i < width; i++) sum[h][i] = splat(0.0f);
    for (int64_t s = 0; s < n; s++) {
        vec value[STRIPE / LANES];
        for (int i = 0; i < width; i++) value[i] = load(values[s] + at + i * LANES);
        for (int h = 0; h < m; h++)
            for (int i = 0; i < width; i++) sum[h][i] += value[i] * weights[h * stride + s];
    }
    for (int h = 0; h < m; h++)
        for (int i = 0; i < width; i++) store(out + h * d + at + i * LANES, sum[h][i] / totals[h]);
}

/* Scores become weights in place, the places behind the last too; returns the total with the sink's. */
static float weigh(float *scores, int64_t n, float sink) {
    vec most = splat(sink), sum = {0};
    for (int64_t i = n; i % LANES != 0; i++) scores[i] = -INFINITY;
    for (int64_t i = 0; i < n; i += LANES) most = pick(load(scores + i) > most, load(scores + i), most);
    float highest = most[0];
    for (int i = 1; i < LANES; i++) highest = most[i] > highest ? most[i] : highest;
    for (int64_t i = 0; i < n; i += LANES) {
        const vec e = exp_nonpositive(load(scores + i) - highest);
        store(scores + i, e);
        sum += e;
    }
    return horizontal_sum(sum) + exp_nonpositive(splat(sink - highest))[0];
}

/* m heads of one row over its n entries; `keys` repeat the last one up to a multiple of KEYS. */
INLINE void heads(const int m, const float *q, const float *const *keys, int64_t n, int64_t d, const float *sinks,
                  float scale, float *scores, int64_t stride, float *out) {
    float totals[HEADS];
    for (int64_t s = 0; s < n; s += KEYS) score_tile(m, q, keys + s, d, scale, scores + s, stride);
    for (int h = 0; h < m; h++) totals[h] = weigh(scores + h * stride, n, sinks[h]);
    int64_t at = 0;
    for (; at + STRIPE <= d; at += STRIPE)
        value_tile(m, STRIPE / LANES, scores, stride, totals, keys, n, at, d, out);
    for (; at < d; at += LANES) value_tile(m, 1, scores, stride, totals, keys, n, at, d, out);
}

/* Back by the row's angles: of one head's output. */
static void rotate_back(float *head, int64_t d, const float *cos, const float *sin, int64_t channels) {
    float *tail = head + d - channels;
    for (int64_t i = 0; i < channels; i += 2) turn_pair(tail + i, cos[i], -sin[i], cos[i + 1], -sin[i + 1]);
}

static int64_t widest_row(const struct entries *sources, int32_t count, int64_t rows) {
    int64_t widest = 0;
    for (int32_t s = 0; s < count; s++) {
        int64_t most = sources[s].width;
        for (int64_t r = 0; sources[s].counts != NULL && r < rows; r++)
            most = sources[s].counts[r] > most ? sources[s].counts[r] : most;
        widest += most;
    }
    return widest + KEYS + LANES;
}

/* q, out [T, heads, d]; d is a multiple of LANES. */
int dockyard_attend(const struct entries *sources, int32_t count, const float *q, int64_t rows, int64_t num_heads,
                    int64_t d, const float *sinks, float scale, const struct angles *angles, float *out,
                    int32_t threads) {
    if (d % LANES != 0) return -1;
    const int64_t widest = widest_row(sources, count, rows), stride = widest + -widest % LANES + LANES;
    const int64_t parts = rows >= 2 * threads ? 1 : threads, size = (num_heads + parts - 1) / parts;
    const int64_t share = (size + HEADS - 1) / HEADS * HEADS; /* heads of an item */
    int failed = 0, outside = 0;
#pragma omp parallel num_threads(threads) if (rows * num_heads * widest * d > WORTH_A_THREAD)
    {
        const float **keys = malloc((size_t)widest * sizeof *keys);
        float *scores = malloc((size_t)(HEADS * stride) * sizeof *scores);
        const int ready = keys != NULL && scores != NULL;
        if (!ready) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < rows * parts; item++) {
            const int64_t row = item / parts, first = item % parts * share;
            const int64_t stop = first + share < num_heads ? first + share : num_heads;
            if (!ready || first >= stop) continue;
            const int64_t n = gather(sources, count, row, d, keys);
            if (n < 0) {
#pragma omp atomic write
                outside = 1;
                continue;
            }
            for (int64_t i = n; i % KEYS != 0; i++) keys[i] = keys[n - 1];
            for (int64_t h = first, m; h < stop; h += m) {
                const int64_t at = (row * num_heads + h) * d;
                m = stop - h >= HEADS ? HEADS : 1;
                if (m == HEADS) heads(HEADS, q + at, keys, n, d, sinks + h, scale, scores, stride, out + at);
                else heads(1, q + at, keys, n, d, sinks + h, scale, scores, stride, out + at);
            }
            for (int64_t h = first; angles != NULL && h < stop; h++)
                rotate_back(out + (row * num_heads + h) * d, d, angles->cos + row * angles->channels,
                            angles->sin + row * angles->channels, angles->channels);
        }
        free(keys);
        free(scores);
    }
    return failed ? -2 : outside ? -3 : 0;
}
