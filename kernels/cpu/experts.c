/* A mixture of experts: routing by score or by a given choice, the chosen experts' products in two parallel
 * regions, their outputs added in slot order and the shared expert's last. */
#include <math.h>
#include <stdlib.h>

#include "deepseek.h"
#include "operations.h"
#include "rows.h"

enum { FEW_ROWS = 8 }; /* whose small operations one thread does */

static float expert_score(float x) { /* sqrt(softplus(x)) */
    return sqrtf((x > 0 ? x : 0.0f) + log1pf(expf(-fabsf(x))));
}

/* Memory of one call. A = T*K assignments; rows of `inputs`, `gate`, `up` and `outputs` are the T rows of the
 * shared expert, then the assignments expert by expert. */
struct work {
    float *scores, *biased, *weights, *inputs, *gate, *up, *outputs;
    int64_t *chosen, *place, *starts; /* [A] experts, [A] rows of outputs, [E + 1] first row of each expert */
    struct product *products;
};

static int allocate(struct work *w, const struct mixture *m, int64_t rows) {
    const int64_t e = m->router.rows, a = rows * m->k, all = rows + a;
    const size_t floats = (size_t)(3 * rows * e + a + all * (m->columns + 2 * m->inner + m->channels));
    const size_t longs = (size_t)(2 * a + e + 1), jobs = (size_t)(2 * (e + 1));
    char *memory = malloc(longs * sizeof(int64_t) + jobs * sizeof(struct product) + floats * sizeof(float));
    if (memory == NULL) return -2;
    w->chosen = (int64_t *)(void *)memory, w->place = w->chosen + a, w->starts = w->place + a;
    w->products = (struct product *)(void *)(w->starts + e + 1);
    w->scores = (float *)(void *)(w->products + jobs), w->biased = w->scores + rows * e;
    w->weights = w->biased + 2 * rows * e, w->inputs = w->weights + a;
    w->gate = w->inputs + all * m->columns, w->up = w->gate + all * m->inner, w->outputs = w->up + all * m->inner;
    return 0;
}

/* A row's experts, unless they are given, and their weights: scale g / sum of the chosen g. Returns 0, or -3
 * where there is no such expert: scores that are not numbers have no largest. */
static int route(const struct mixture *m, struct work *w, int64_t row, const int64_t *given, int is_image) {
    const int64_t e = m->router.rows;
    float *scores = w->scores + row * e, sum = 0.0f;
    int64_t *chosen = w->chosen + row * m->k;
    for (int64_t i = 0; i < e; i++) scores[i] = expert_score(scores[i]);
    if (given != NULL) memcpy(chosen, given + row * m->k, (size_t)m->k * sizeof *chosen);
    else {
        const float *bias = is_image ? m->image_bias : m->bias;
        float *biased = w->biased + 2 * row * e;
        for (int64_t i = 0; i < e; i++) biased[i] = scores[i] + bias[i];
        largest(biased, e, m->k, biased + e, chosen);
    }
    for (int64_t k = 0; k < m->k; k++) {
        if (chosen[k] < 0 || chosen[k] >= e) return -3;
        sum += scores[chosen[k]];
    }
    for (int64_t k = 0; k < m->k; k++) w->weights[row * m->k + k] = scores[chosen[k]] / (sum + 1e-20f) * m->scale;
    return 0;
}

/* Gives each assignment its row behind the shared expert's, expert by expert. Returns the most that one has. */
static int64_t arrange(const struct mixture *m, struct work *w, int64_t rows) {
    const int64_t e = m->router.rows, a = rows * m->k;
    int64_t most = 0;
    memset(w->starts, 0, (size_t)(e + 1) * sizeof(int64_t));
    for (int64_t i = 0; i < a; i++) w->starts[w->chosen[i] + 1]++;
    w->starts[0] = rows;
    for (int64_t i = 0; i < e; i++) {
        most = w->starts[i + 1] > most ? w->starts[i + 1] : most;
        w->starts[i + 1] += w->starts[i];
    }
    for (int64_t i = 0; i < a; i++) w->place[i] = w->starts[w->chosen[i]]++;
    for (int64_t i = e; i > 0; i--) w->starts[i] = w->starts[i - 1];
    w->starts[0] = rows;
    return most;
}

/* Rows in the order of their experts, with zeros in the padding. */
static void gather(const struct mixture *m, const struct work *w, const float *x, int64_t rows) {
    const int64_t c = m->channels, padding = m->columns - c;
    for (int64_t i = 0; i < rows + rows * m->k; i++) {
        const int64_t from = i < rows ? i : (i - rows) / m->k, to = i < rows ? i : w->place[i - rows];
        float *row = w->inputs + to * m->columns;
        memcpy(row, x + from * c, (size_t)c * sizeof(float));
        memset(row + c, 0, (size_t)padding * sizeof(float));
    }
}

static void activate(const struct mixture *m, const struct work *w, int64_t row) {
    float *gate = w->gate + row * m->inner, *up = w->up + row * m->inner;
    const vec most = splat(m->limit), least = splat(-m->limit);
    for (int64_t i = 0; i < m->inner; i += LANES) {
        const vec g = load(gate + i), u = load(up + i);
        store(gate + i, pick(g > most, most, g));
        store(up + i, pick(u > most, most, pick(u < least, least, u)));
    }
    silu_mul_row(gate, up, m->inner);
}

static void add_up(const struct mixture *m, const struct work *w, int64_t row, float *out) {
    const int64_t c = m->channels;
    const float *weights = w->weights + row * m->k, *shared = w->outputs + row * c;
    const int64_t *place = w->place + row * m->k;
    for (int64_t i = 0; i < c; i += LANES) {
        vec sum = load(w->outputs + place[0] * c + i) * weights[0];
        for (int64_t k = 1; k < m->k; k++) sum += load(w->outputs + place[k] * c + i) * weights[k];
        store(out + row * c + i, sum + load(shared + i));
    }
}

/* Gate and up, or down, of every expert that has rows; the shared one's are the first. `only`: the input of all,
 * where none has more than one row; else NULL. */
static int run_experts(const struct mixture *m, const struct work *w, const float *only, int64_t rows, int down,
                       int32_t threads) {
    const int64_t e = m->router.rows;
    int64_t count = 0;
    for (int64_t i = -1; i < e; i++) {
        const int64_t start = i < 0 ? 0 : w->starts[i], stop = i < 0 ? rows : w->starts[i + 1], n = stop - start;
        const struct expert *own = &m->experts[i < 0 ? e : i];
        if (n == 0) continue;
        if (down) {
            w->products[count++] = dense_product(own->down, w->gate + start * m->inner,
                                                 w->outputs + start * m->channels, n, m->inner);
            continue;
        }
        const float *x = only != NULL ? only : w->inputs + start * m->columns;
        w->products[count++] = dense_product(own->gate, x, w->gate + start * m->inner, n, m->columns);
        w->products[count++] = dense_product(own->up, x, w->up + start * m->inner, n, m->columns);
    }
    return products_mixed(w->products, count, threads);
}

/* x[T, C]; chosen[T, K], some perhaps more than once, or NULL: by score; image[T], or NULL: none is one. out[T, C]. */
int dockyard_mixture(const struct mixture *m, const float *x, const int64_t *chosen, const uint8_t *image,
                     int64_t rows, float *out, int32_t threads) {
    struct work w;
    if (m->channels % LANES != 0 || m->inner % LANES != 0) return -1;
    if (allocate(&w, m, rows) != 0) return -2;
    for (int64_t r = 0; r < rows; r++) {
        memcpy(w.inputs + r * m->columns, x + r * m->channels, (size_t)m->channels * sizeof(float));
        memset(w.inputs + r * m->columns + m->channels, 0, (size_t)(m->columns - m->channels) * sizeof(float));
    }
    const struct product scores = dense_product(m->router, w.inputs, w.scores, rows, m->columns);
    int status = products_float(&scores, 1, threads);
#pragma omp parallel for schedule(static) num_threads(threads) if (rows > FEW_ROWS)
    for (int64_t r = 0; r < rows; r++) {
        if (status != 0 || route(m, &w, r, chosen, image != NULL && image[r]) == 0) continue;
#pragma omp atomic write
        status = -3;
    }
    if (status == 0) {
        /* A row that has an expert twice is two of that expert's. */
        const int shared = arrange(m, &w, rows) <= 1 && rows == 1;
        if (!shared) gather(m, &w, x, rows);
        status = run_experts(m, &w, shared ? w.inputs : NULL, rows, 0, threads);
    }
    if (status == 0) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows > FEW_ROWS)
        for (int64_t r = 0; r < rows + rows * m->k; r++) activate(m, &w, r);
        status = run_experts(m, &w, NULL, rows, 1, threads);
    }
#pragma omp parallel for schedule(static) num_threads(threads) if (rows > FEW_ROWS)
    for (int64_t r = 0; r < rows; r++)
        if (status == 0) add_up(m, &w, r, out);
    free(w.chosen);
    return status;
}
