/* Which of many: the largest scores of a row, and the scores of an indexer. */
#include <math.h>
#include <stdlib.h>

#include "deepseek.h"
#include "vector.h"

static inline float without_nan(float x) { return x == x ? x : -INFINITY; }

/* The k-th largest of v, by Hoare's selection; 1 <= k <= n. Reorders v. */
static float kth_largest(float *v, int64_t n, int64_t k) {
    int64_t low = 0, high = n - 1, at = k - 1;
    while (low < high) {
        const float pivot = v[low + (high - low) / 2];
        int64_t i = low, j = high;
        while (i <= j) {
            while (v[i] > pivot) i++;
            while (v[j] < pivot) j--;
            if (i > j) break;
            const float kept = v[i];
            v[i++] = v[j], v[j--] = kept;
        }
        if (at <= j) high = j;
        else if (at >= i) low = i;
        else break;
    }
    return v[at];
}

void largest(const float *scores, int64_t count, int64_t k, float *scratch, int64_t *positions) {
    int64_t found = 0, room = k;
    float least = -INFINITY;
    if (0 < k && k < count) {
        for (int64_t i = 0; i < count; i++) scratch[i] = without_nan(scores[i]);
        least = kth_largest(scratch, count, k);
        for (int64_t i = 0; i < count; i++) room -= scores[i] > least;
    }
    for (int64_t i = 0; i < count && found < k; i++) {
        const int tied = scores[i] == least && least > -INFINITY && room > 0;
        if (tied) room--;
        if (tied || scores[i] > least) positions[found++] = i;
    }
    while (found < k) positions[found++] = -1;
}

int dockyard_top_k(const float *scores, int64_t rows, int64_t count, int64_t k, int64_t *out, int32_t threads) {
    int failed = 0;
#pragma omp parallel num_threads(threads) if (rows * count > WORTH_A_THREAD)
    {
        float *scratch = malloc((size_t)(count + 1) * sizeof(float));
        if (scratch == NULL) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; r++)
            if (scratch != NULL) largest(scores + r * count, count, k, scratch, out + r * k);
        free(scratch);
    }
    return failed ? -2 : 0;
}

enum { KEYS = 8 };

/* Scores of KEYS keys for one row: sum_h a_h relu(q_h . k), heads in order. */
static void scores_of_keys(const float *q, const float *a, const float *const *keys, int64_t heads, int64_t d,
                           float *out) {
    float total[KEYS] = {0};
    for (int64_t h = 0; h < heads; h++, q += d) {
        vec sum[KEYS];
        float products[KEYS];
        for (int c = 0; c < KEYS; c++) sum[c] = splat(0.0f);
        for (int64_t i = 0; i < d; i += LANES) {
            const vec own = load(q + i);
            for (int c = 0; c < KEYS; c++) sum[c] += own * load(keys[c] + i);
        }
        horizontal_sums(sum, products);
        for (int c = 0; c < KEYS; c++) total[c] += a[h] * (products[c] > 0 ? products[c] : 0.0f);
    }
    memcpy(out, total, sizeof total);
}

/* q[T, heads, d], a[T, heads], keys[count] rows of pool[pool_rows, d], out[T, count]: -inf from visible[t] on.
 * d is a multiple of LANES. */
int dockyard_index_scores(const float *q, const float *a, const float *pool, int64_t pool_rows, const int64_t *keys,
                          const int64_t *visible, int64_t rows, int64_t heads, int64_t d, int64_t count, float *out,
                          int32_t threads) {
    const int64_t parts = (count + KEYS - 1) / KEYS;
    for (int64_t i = 0; i < count; i++)
        if (keys[i] < 0 || keys[i] >= pool_rows) return -3;
#pragma omp parallel for schedule(dynamic, 16) num_threads(threads) if (rows * count * heads * d > WORTH_A_THREAD)
    for (int64_t item = 0; item < rows * parts; item++) {
        const int64_t r = item / parts, at = item % parts * KEYS, left = count - at < KEYS ? count - at : KEYS;
        const float *own[KEYS];
        float scores[KEYS];
        for (int64_t c = 0; c < KEYS; c++) own[c] = pool + keys[at + (c < left ? c : left - 1)] * d;
        if (at < visible[r]) scores_of_keys(q + r * heads * d, a + r * heads, own, heads, d, scores);
        for (int64_t c = 0; c < left; c++) out[r * count + at + c] = at + c < visible[r] ? scores[c] : -INFINITY;
    }
    return 0;
}
