/* One site of the hyper-connections: its coefficients, and the row that its sub-layer reads; then the streams
 * behind the sub-layer. Coefficients of LANES rows are made at once, a lane a row, so that a row's bits do not
 * depend on the others. */
#include <stdlib.h>

#include "deepseek.h"
#include "operations.h"
#include "rows.h"

static vec sigmoid(vec x) {
    const vec e = exp_nonpositive(pick(x < 0, x, -x));
    return pick(x < 0, e, splat(1.0f)) / (1.0f + e);
}

/* Softmax over each stream's targets, then columns, rows, columns, ... each divided by its sum + eps. */
static void balance(vec *mix, int64_t n, int64_t iterations, float eps) {
    for (int64_t j = 0; j < n; j++) {
        vec *row = mix + j * n, most = row[0], sum = splat(0.0f);
        for (int64_t k = 1; k < n; k++) most = pick(row[k] > most, row[k], most);
        for (int64_t k = 0; k < n; k++) sum += row[k] = exp_nonpositive(row[k] - most);
        for (int64_t k = 0; k < n; k++) row[k] = row[k] / sum + eps;
    }
    for (int64_t turn = 0; turn < 2 * iterations - 1; turn++) {
        const int64_t along = turn % 2 ? 1 : n, across = turn % 2 ? n : 1;
        for (int64_t line = 0; line < n; line++) {
            vec *first = mix + line * across, sum = first[0];
            for (int64_t i = 1; i < n; i++) sum += first[i * along];
            const vec inverse = 1.0f / (sum + eps);
            for (int64_t i = 0; i < n; i++) first[i * along] *= inverse;
        }
    }
}

/* Of `count` rows from `row` on, at most LANES. */
static void coefficients(const struct site *s, const float *x, const float *product, int64_t row, int64_t count,
                         const struct coefficients *to) {
    const int64_t n = s->streams, all = n * (n + 2), width = n * s->channels;
    vec m[MAX_STREAMS * (MAX_STREAMS + 2)], inverse = {0};
    for (int64_t r = 0; r < count; r++) inverse[r] = inverse_rms(x + (row + r) * width, width, s->norm_eps);
    for (int64_t j = 0; j < all; j++) {
        vec of_rows = {0};
        for (int64_t r = 0; r < count; r++) of_rows[r] = product[(row + r) * all + j];
        m[j] = of_rows * inverse * s->scale[j] + s->base[j];
    }
    for (int64_t k = 0; k < n; k++) m[k] = sigmoid(m[k]) + s->eps, m[n + k] = 2.0f * sigmoid(m[n + k]);
    balance(m + 2 * n, n, s->iterations, s->eps);
    for (int64_t r = 0; r < count; r++) {
        for (int64_t k = 0; k < n; k++) {
            to->pre[(row + r) * n + k] = m[k][r];
            to->post[(row + r) * n + k] = m[n + k][r];
        }
        for (int64_t k = 0; k < n * n; k++) to->mix[(row + r) * n * n + k] = m[2 * n + k][r];
    }
}

/* out = norm(sum_k premix_k X_k) */
static void collapse(const struct site *s, const float *x, const float *premix, float *out) {
    const int64_t n = s->streams, c = s->channels;
    for (int64_t i = 0; i < c; i += LANES) {
        vec sum = load(x + i) * premix[0];
        for (int64_t k = 1; k < n; k++) sum += load(x + k * c + i) * premix[k];
        store(out + i, sum);
    }
    norm_row(out, s->norm, s->norm_eps, c, out);
}

/* x[T, N, C]. premix[T, N] is what the row is read with; NULL stands for the site's own. normed[T, C]. */
int dockyard_hyper_site(const struct site *s, const float *x, const float *premix, int64_t rows,
                        const struct coefficients *to, float *normed, int32_t threads) {
    const int64_t n = s->streams, width = n * s->channels;
    if (n > MAX_STREAMS || s->channels % LANES != 0) return -1;
    float *product = malloc((size_t)(rows * n * (n + 2)) * sizeof(float));
    if (product == NULL) return -2;
    const struct product one = dense_product(s->projection, x, product, rows, width);
    const int status = products_float(&one, 1, threads);
    if (premix == NULL) premix = to->pre;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (rows > LANES)
    for (int64_t row = 0; row < rows; row += LANES) {
        const int64_t count = rows - row < LANES ? rows - row : LANES;
        if (status != 0) continue;
        coefficients(s, x, product, row, count, to);
        for (int64_t r = row; r < row + count; r++)
            collapse(s, x + r * width, premix + r * n, normed + r * s->channels);
    }
    free(product);
    return status;
}

static void spread_row(const float *x, const float *y, const float *post, const float *mix, int64_t streams,
                       int64_t channels, float *out) {
    for (int64_t i = 0; i < channels; i += LANES) {
        vec from[MAX_STREAMS];
        const vec own = load(y + i);
        for (int64_t j = 0; j < streams; j++) from[j] = load(x + j * channels + i);
        for (int64_t k = 0; k < streams; k++) {
            vec sum = own * post[k];
            for (int64_t j = 0; j < streams; j++) sum += from[j] * mix[j * streams + k];
            store(out + k * channels + i, sum);
        }
    }
}

/* out_k = post_k y + sum_j mix[j, k] X_j */
int dockyard_hyper_spread(const float *x, const float *y, const float *post, const float *mix, int64_t rows,
                          int64_t streams, int64_t channels, float *out, int32_t threads) {
    const int64_t width = streams * channels;
    if (streams < 1 || streams > MAX_STREAMS || channels % LANES != 0) return -1;
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * streams * width > WORTH_A_THREAD)
    for (int64_t r = 0; r < rows; r++)
        spread_row(x + r * width, y + r * channels, post + r * streams, mix + r * streams * streams, streams, channels,
                   out + r * width);
    return 0;
}
