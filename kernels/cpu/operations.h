/* What the library exports, and what a decoder is made of. */
#pragma once

#include <stdint.h>

#include "weight.h"

struct paging {
    float *cache;             /* [num_blocks, 2, block, kv_heads, d]: keys, then values, of one layer */
    const int32_t *tables;    /* [sequences, width] block numbers */
    const int64_t *sequences; /* [rows] */
    const int64_t *positions; /* [rows] */
    int64_t width, block, kv_heads, heads, d;
};

struct layer {
    const float *attention_norm, *feed_forward_norm; /* [channels] */
    struct weight q, k, v, output, gate, up, down;   /* without `out` */
};

struct decoder {
    const struct layer *layers;
    const float *angles; /* [positions, d], cos and sin interleaved */
    int64_t num_layers, channels, feed_forward;
    float norm_eps, scale; /* scale: of attention scores */
};

/* Those that return a number return 0, or a negative one that their file explains. */
int dockyard_linear(const struct weight *weights, int32_t count, const float *x, int64_t m, int64_t k,
                    int32_t threads);
void dockyard_gather(const uint8_t *table, int64_t row_bytes, int32_t format, const int64_t *ids, int64_t m,
                     int64_t k, float *out);
void dockyard_rms_norm(const float *x, const float *weight, float eps, int64_t rows, int64_t d, float *out,
                       int32_t threads);
void dockyard_rope(float *x, const float *table, const int64_t *positions, int64_t rows, int64_t heads, int64_t d,
                   int32_t threads);
void dockyard_silu_mul(float *gate, const float *up, int64_t n, int32_t threads);
int dockyard_paged_attention(const struct paging *p, const float *q, int64_t rows, float scale, float *out,
                             int32_t threads);
void dockyard_store_kv(const struct paging *p, const float *k, const float *v, int64_t rows);
int dockyard_decode(const struct decoder *decoder, const struct paging *paging, int64_t layer_floats,
                    float *x, int64_t rows, int32_t threads);
