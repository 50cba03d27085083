/* What the library exports for DeepSeek's models. Shapes: T rows, N streams, C channels, H heads, D head size.
 * Those that return a number return 0, -1 when a width is out of range, -2 when memory ran out, -3 when what
 * they are given to choose does not exist. */
#pragma once

#include <stdint.h>

#include "weight.h"

/* cos and sin of each row's position, [T, channels], each channel its own; sin is negative on even channels. */
struct angles {
    const float *cos, *sin;
    int64_t channels; /* the last of a head */
};

struct site {
    struct weight projection;       /* [N + N + N*N, N*C] */
    const float *base, *scale;      /* of each coefficient */
    const float *norm;              /* [C] */
    int64_t streams, channels, iterations;
    float eps, norm_eps;
};

/* Of a site and its rows: [T, N], [T, N], [T, N, N] from stream to stream. */
struct coefficients {
    float *pre, *post, *mix;
};

struct expert {
    struct weight gate, up, down;
};

struct mixture {
    struct weight router;
    const float *bias, *image_bias;
    const struct expert *experts; /* the shared one behind the others */
    int64_t channels, columns, inner, k; /* columns: channels with their padding */
    float limit, scale;
};

/* What makes queries of rows; a weight without rows is absent. */
struct queries {
    struct weight latent, head_weights;  /* over the rows */
    struct weight query, index_query;    /* over the latents */
    const float *norm, *head_norm;       /* of latents; of heads, or NULL */
    int64_t columns, latent_columns, d, index_d;
    float index_scale, eps; /* index_scale: of head weights */
};

/* Entries that rows read: where index is at least `first`, in order. Row t has its places at t * index_stride,
 * `width` of them, or the first counts[t]. */
struct entries {
    const float *pool; /* [P, D] */
    const int64_t *index, *counts;
    int64_t rows, width, index_stride, first;
};

struct output {
    const struct weight *groups; /* of heads */
    struct weight whole;
    int64_t num_groups, columns; /* columns: of a group */
};

/* How a cache stores a row: `channels` codes in groups that share a scale, then `rotary` channels as they are. */
struct record {
    int64_t channels, rotary, group, width; /* width: bytes */
    int32_t codes, scales;                  /* formats, numbered in records.c */
    float largest, least;                   /* of a code's values; of a group's magnitude, or of an E4M3 scale */
};

int dockyard_hyper_site(const struct site *s, const float *x, const float *premix, int64_t rows,
                        const struct coefficients *to, float *normed, int32_t threads);
int dockyard_hyper_spread(const float *x, const float *y, const float *post, const float *mix, int64_t rows,
                          int64_t streams, int64_t channels, float *out, int32_t threads);
int dockyard_mixture(const struct mixture *m, const float *x, const int64_t *chosen, const uint8_t *image,
                     int64_t rows, float *out, int32_t threads);
int dockyard_keys(const struct weight *weights, int32_t count, const float *x, int64_t rows, int64_t k,
                  const float *norm, float eps, const struct angles *angles, int32_t threads);
int dockyard_queries(const struct queries *q, const float *x, int64_t rows, const struct angles *angles,
                     int32_t threads);
int dockyard_attend(const struct entries *entries, int32_t count, const float *q, int64_t rows, int64_t heads,
                    int64_t d, const float *sinks, float scale, const struct angles *angles, float *out,
                    int32_t threads);
int dockyard_grouped_output(const struct output *o, const float *x, int64_t rows, float *out, int32_t threads);
int dockyard_index_scores(const float *q, const float *a, const float *pool, int64_t pool_rows, const int64_t *keys,
                          const int64_t *visible, int64_t rows, int64_t heads, int64_t d, int64_t count, float *out,
                          int32_t threads);
int dockyard_top_k(const float *scores, int64_t rows, int64_t count, int64_t k, int64_t *out, int32_t threads);
void dockyard_encode(const struct record *r, const float *x, int64_t rows, uint8_t *out, int32_t threads);
void dockyard_decode_record(const struct record *r, const uint8_t *stored, int64_t rows, float *out, int32_t threads);

/* The positions of the k largest scores in ascending order, ties to the lowest; -1, last, where only -inf is left.
 * `scratch` holds as many floats as there are scores. */
void largest(const float *scores, int64_t count, int64_t k, float *scratch, int64_t *positions);
