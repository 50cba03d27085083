/* Causal attention of query rows over a paged KV cache, grouped query heads.
 *
 * Row r belongs to sequence sequences[r], whose block table is that row of tables, and sees positions
 * 0..positions[r]. Scores are reduced in ascending order of position whatever the chunking, so that full,
 * chunked and incremental runs give the same bits.
 */
#include <math.h>
#include <stdlib.h>

#include "operations.h"
#include "vector.h"

static inline float *entry(const struct paging *p, int64_t row, int64_t position, int which) {
    const int64_t b = p->tables[p->sequences[row] * p->width + position / p->block];
    const int64_t slot = (b * 2 + which) * p->block + position % p->block;
    return p->cache + slot * p->kv_heads * p->d;
}

/* q . k for one position, not yet summed over the lanes. */
static inline __attribute__((always_inline)) vec product(const float *q, const float *key, const int64_t n) {
    vec sum = splat(0.0f);
    for (int64_t i = 0; i < n; i++) sum += load(q + i * LANES) * load(key + i * LANES);
    return sum;
}

/* Fills scores[0..positions], padded with -inf to a whole vector; returns the highest. n is d / LANES. */
static inline __attribute__((always_inline)) float scores_of(const struct paging *p, int64_t row, int64_t kv,
                                                             const float *q, float scale, float *scores,
                                                             const int64_t n) {
    const int64_t count = p->positions[row] + 1;
    vec highest = splat(-INFINITY);
    for (int64_t t = 0; t < count; t += LANES) {
        vec products[LANES];
        for (int64_t i = 0; i < LANES; i++)
            products[i] = t + i < count ? product(q, entry(p, row, t + i, 0) + kv * p->d, n) : splat(0.0f);
        float sums[LANES];
        for (int i = 0; i < LANES; i += 8) horizontal_sums(products + i, sums + i);
        vec s = load(sums) * scale;
        for (int64_t i = count - t; i < LANES; i++) s[i] = -INFINITY;
        store(scores + t, s);
        highest = pick(s > highest, s, highest);
    }
    float most = -INFINITY;
    for (int i = 0; i < LANES; i++) most = highest[i] > most ? highest[i] : most;
    return most;
}

/* Turns padded scores into exponentials in place; returns their sum. */
static float exponentials(float *scores, int64_t n, float highest) {
    vec sum = {0};
    for (int64_t t = 0; t < n; t += LANES) {
        const vec e = exp_nonpositive(load(scores + t) - highest);
        store(scores + t, e);
        sum += e;
    }
    return horizontal_sum(sum);
}

static inline __attribute__((always_inline)) void weighted_values(const struct paging *p, int64_t row, int64_t kv,
                                                                  const float *weights, float total, float *out,
                                                                  const int64_t n) {
    vec acc[MAX_HEAD / LANES];
    for (int64_t i = 0; i < n; i++) acc[i] = splat(0.0f);
    for (int64_t t = 0; t <= p->positions[row]; t++) {
        const float *value = entry(p, row, t, 1) + kv * p->d;
        const vec w = splat(weights[t]);
        for (int64_t i = 0; i < n; i++) acc[i] += load(value + i * LANES) * w;
    }
    for (int64_t i = 0; i < n; i++) store(out + i * LANES, acc[i] / total);
}

static inline __attribute__((always_inline)) void attend(const struct paging *p, int64_t row, int64_t kv, const float *q,
                                                         float scale, float *scores, float *out, const int64_t n) {
    const float highest = scores_of(p, row, kv, q, scale, scores, n);
    const float total = exponentials(scores, p->positions[row] + 1, highest);
    weighted_values(p, row, kv, scores, total, out, n);
}

/* The common head sizes get loops of constant length, whose accumulators stay in registers. */
static void attend_any(const struct paging *p, int64_t row, int64_t kv, const float *q, float scale, float *scores,
                       float *out) {
    if (p->d == 64) attend(p, row, kv, q, scale, scores, out, 64 / LANES);
    else if (p->d == 128) attend(p, row, kv, q, scale, scores, out, 128 / LANES);
    else attend(p, row, kv, q, scale, scores, out, p->d / LANES);
}

/* q, out: [rows, heads, d]; d is a multiple of LANES and at most MAX_HEAD. Returns 0, or -1 when memory ran
 * out. */
int dockyard_paged_attention(const struct paging *p, const float *q, int64_t rows, float scale, float *out,
                             int32_t threads) {
    const int64_t group = p->heads / p->kv_heads;
    int64_t longest = 0;
    int failed = 0;
    for (int64_t r = 0; r < rows; r++) longest = p->positions[r] > longest ? p->positions[r] : longest;
    const size_t scratch = ((size_t)longest + 1 + LANES) * sizeof(float);
#pragma omp parallel num_threads(threads)
    {
        float *scores = malloc(scratch);
        if (scores == NULL) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic, 4)
        for (int64_t item = 0; item < rows * p->heads; item++) {
            if (scores == NULL) continue;
            const int64_t row = item / p->heads, head = item % p->heads, kv = head / group;
            attend_any(p, row, kv, q + item * p->d, scale, scores, out + item * p->d);
        }
        free(scores);
    }
    return failed ? -1 : 0;
}

/* Puts k, v [rows, kv_heads, d] into the rows' cache slots. */
void dockyard_store_kv(const struct paging *p, const float *k, const float *v, int64_t rows) {
    const size_t bytes = (size_t)(p->kv_heads * p->d) * sizeof(float);
    for (int64_t r = 0; r < rows; r++) {
        memcpy(entry(p, r, p->positions[r], 0), k + r * p->kv_heads * p->d, bytes);
        memcpy(entry(p, r, p->positions[r], 1), v + r * p->kv_heads * p->d, bytes);
    }
}
