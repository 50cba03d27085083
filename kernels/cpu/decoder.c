/* All layers of a llama-family decoder in one call: what kernels/decoder.py composes of single operations, to
 * the same bits. At a batch of one the way from Python to thirty layers' operations takes as long as their
 * arithmetic. */
#include <stdlib.h>

#include "operations.h"

/* One allocation, cut into what a layer needs for its rows. */
struct scratch {
    float *normed, *q, *k, *v, *mixed, *added, *gate, *up;
};

static float *cut(float **rest, int64_t floats) {
    float *part = *rest;
    *rest += floats;
    return part;
}

static float *allocate(const struct decoder *d, const struct paging *p, int64_t rows, struct scratch *s) {
    const int64_t q = rows * p->heads * p->d, kv = rows * p->kv_heads * p->d;
    const int64_t c = rows * d->channels, f = rows * d->feed_forward;
    float *rest = malloc((size_t)(2 * (q + kv + c + f)) * sizeof(float)), *whole = rest;
    if (whole == NULL) return NULL;
    s->normed = cut(&rest, c), s->added = cut(&rest, c);
    s->q = cut(&rest, q), s->mixed = cut(&rest, q);
    s->k = cut(&rest, kv), s->v = cut(&rest, kv);
    s->gate = cut(&rest, f), s->up = cut(&rest, f);
    return whole;
}

static struct weight into(struct weight w, float *out) {
    w.out = out;
    return w;
}

static void add(float *x, const float *y, int64_t n) {
    for (int64_t i = 0; i < n; i++) x[i] += y[i];
}

static int attention(const struct decoder *d, const struct layer *l, const struct paging *p, float *x,
                     int64_t rows, const struct scratch *s, int32_t threads) {
    const struct weight inputs[] = {into(l->q, s->q), into(l->k, s->k), into(l->v, s->v)};
    const struct weight output = into(l->output, s->added);
    dockyard_rms_norm(x, l->attention_norm, d->norm_eps, rows, d->channels, s->normed, threads);
    int status = dockyard_linear(inputs, 3, s->normed, rows, d->channels, threads);
    if (status != 0) return status;
    dockyard_rope(s->q, d->angles, p->positions, rows, p->heads, p->d, threads);
    dockyard_rope(s->k, d->angles, p->positions, rows, p->kv_heads, p->d, threads);
    dockyard_store_kv(p, s->k, s->v, rows);
    if (dockyard_paged_attention(p, s->q, rows, d->scale, s->mixed, threads) != 0) return -2;
    status = dockyard_linear(&output, 1, s->mixed, rows, p->heads * p->d, threads);
    add(x, s->added, rows * d->channels);
    return status;
}

static int feed_forward(const struct decoder *d, const struct layer *l, float *x, int64_t rows,
                        const struct scratch *s, int32_t threads) {
    const struct weight inputs[] = {into(l->gate, s->gate), into(l->up, s->up)};
    const struct weight output = into(l->down, s->added);
    dockyard_rms_norm(x, l->feed_forward_norm, d->norm_eps, rows, d->channels, s->normed, threads);
    int status = dockyard_linear(inputs, 2, s->normed, rows, d->channels, threads);
    if (status != 0) return status;
    dockyard_silu_mul(s->gate, s->up, rows * d->feed_forward, threads);
    status = dockyard_linear(&output, 1, s->gate, rows, d->feed_forward, threads);
    add(x, s->added, rows * d->channels);
    return status;
}

/* x[rows, channels] in place. Layer i's cache starts i * layer_floats behind paging->cache. Returns 0, -1 when
 * a width is out of range, -2 when memory ran out. */
int dockyard_decode(const struct decoder *decoder, const struct paging *paging, int64_t layer_floats,
                    float *x, int64_t rows, int32_t threads) {
    struct scratch scratch;
    float *memory = allocate(decoder, paging, rows, &scratch);
    int status = memory == NULL && rows > 0 ? -2 : 0;
    for (int64_t i = 0; i < decoder->num_layers && rows > 0 && status == 0; i++) {
        const struct layer *layer = &decoder->layers[i];
        struct paging p = *paging;
        p.cache += i * layer_floats;
        status = attention(decoder, layer, &p, x, rows, &scratch, threads);
        if (status == 0) status = feed_forward(decoder, layer, x, rows, &scratch, threads);
    }
    free(memory);
    return status;
}
