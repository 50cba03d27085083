/* What an attention makes of its rows, each in one call: keys, queries, and the output behind its heads. */
#include <stdlib.h>

#include "deepseek.h"
#include "operations.h"
#include "rows.h"

/* Each head's last channels, by the row's angles. */
static void rotate_row(float *x, int64_t heads, int64_t d, const float *cos, const float *sin, int64_t channels) {
    for (int64_t h = 0; h < heads; h++) {
        float *tail = x + h * d + d - channels;
        for (int64_t i = 0; i < channels; i += 2) turn_pair(tail + i, cos[i], sin[i], cos[i + 1], sin[i + 1]);
    }
}

/* Products of x[T, k] with all weights; the first one's become keys: normed and rotated. */
int dockyard_keys(const struct weight *weights, int32_t count, const float *x, int64_t rows, int64_t k,
                  const float *norm, float eps, const struct angles *angles, int32_t threads) {
    const int64_t d = weights[0].rows;
    if (d % LANES != 0) return -1;
    const int status = dockyard_linear(weights, count, x, rows, k, threads);
    const int64_t turned = angles->channels;
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * d > WORTH_A_THREAD)
    for (int64_t r = 0; r < rows; r++) {
        float *key = weights[0].out + r * d;
        if (status != 0) continue;
        norm_row(key, norm, eps, d, key);
        rotate_row(key, 1, d, angles->cos + r * turned, angles->sin + r * turned, turned);
    }
    return status;
}

static void finish_queries(const struct queries *q, int64_t row, const struct angles *a) {
    const float *cos = a->cos + row * a->channels, *sin = a->sin + row * a->channels;
    float *own = q->query.out + row * q->query.rows;
    for (int64_t at = 0; q->head_norm != NULL && at < q->query.rows; at += q->d)
        norm_row(own + at, q->head_norm, q->eps, q->d, own + at);
    rotate_row(own, q->query.rows / q->d, q->d, cos, sin, a->channels);
    for (int64_t i = 0; i < q->head_weights.rows; i++) q->head_weights.out[row * q->head_weights.rows + i] *= q->index_scale;
    if (q->index_query.rows > 0)
        rotate_row(q->index_query.out + row * q->index_query.rows, q->index_query.rows / q->index_d, q->index_d, cos,
                   sin, a->channels);
}

/* Latents of x[T, columns], normed; of them the heads' queries and the indexer's, rotated. */
int dockyard_queries(const struct queries *q, const float *x, int64_t rows, const struct angles *angles,
                     int32_t threads) {
    const int64_t rank = q->latent.rows, padding = q->latent_columns - rank;
    if (rank % LANES != 0 || q->d % LANES != 0) return -1;
    float *latents = malloc((size_t)(rows * (rank + q->latent_columns)) * sizeof(float));
    if (latents == NULL) return -2;
    float *normed = latents + rows * rank;
    struct weight first[] = {q->latent, q->head_weights}, second[] = {q->query, q->index_query};
    first[0].out = latents;
    int status = dockyard_linear(first, q->head_weights.rows > 0 ? 2 : 1, x, rows, q->columns, threads);
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * rank > WORTH_A_THREAD)
    for (int64_t r = 0; r < rows; r++) {
        float *latent = normed + r * q->latent_columns;
        if (status != 0) continue;
        norm_row(latents + r * rank, q->norm, q->eps, rank, latent);
        memset(latent + rank, 0, (size_t)padding * sizeof(float));
    }
    if (status == 0)
        status = dockyard_linear(second, q->index_query.rows > 0 ? 2 : 1, normed, rows, q->latent_columns, threads);
#pragma omp parallel for schedule(static) num_threads(threads) if (rows > 4)
    for (int64_t r = 0; r < rows; r++)
        if (status == 0) finish_queries(q, r, angles);
    free(latents);
    return status;
}

/* x[T, num_groups * columns]: each group of heads through its own matrix, then all through one. out[T, whole.rows] */
int dockyard_grouped_output(const struct output *o, const float *x, int64_t rows, float *out, int32_t threads) {
    const int64_t rank = o->groups[0].rows, width = o->num_groups * rank;
    const size_t bytes = (size_t)(rows * width) * sizeof(float);
    struct product *products = malloc((size_t)o->num_groups * sizeof *products + bytes);
    if (products == NULL) return -2;
    float *latents = (float *)(void *)(products + o->num_groups);
    for (int64_t g = 0; g < o->num_groups; g++) {
        struct weight weight = o->groups[g];
        weight.out = latents + g * rank;
        products[g] = (struct product){weight, x + g * o->columns, rows, o->columns, o->num_groups * o->columns, width};
    }
    int status = products_mixed(products, o->num_groups, threads);
    const struct product last = dense_product(o->whole, latents, out, rows, width);
    if (status == 0) status = products_mixed(&last, 1, threads);
    free(products);
    return status;
}
