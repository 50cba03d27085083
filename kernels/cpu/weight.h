/* What a product multiplies with, and which of several weights an item of work belongs to. */
#pragma once

#include <stdint.h>

enum format { F32 = 0, Q4_1 = 3, Q8_0 = 8, BF16 = 30 }; /* the numbers that GGML gives to its types */
enum { BLOCK = 32 };                         /* weights that share a scale */

struct weight {
    const uint8_t *data; /* N rows of row_bytes, or packed: groups of 32 rows, 32 * row_bytes each */
    float *out;          /* [M, N] */
    int64_t rows;        /* N */
    int64_t row_bytes;
    int32_t format;
    int32_t packed; /* multiplied in integers (integer.c) */
};

/* One weight times m rows of its own. Rows of x are x_stride floats apart, those of weight.out out_stride.
 * k is a multiple of 32 and at most 16,384. */
struct product {
    struct weight weight;
    const float *x;
    int64_t m, k, x_stride, out_stride;
};

/* The usual one: both sides side by side in memory. */
static inline struct product dense_product(struct weight weight, const float *x, float *out, int64_t m, int64_t k) {
    weight.out = out;
    return (struct product){weight, x, m, k, k, weight.rows};
}

/* Multiplications below which waking another thread takes longer than they do. */
enum { WORTH_A_THREAD = 1 << 15 };

/* Groups of `size` rows that a list of weights has; the last group of each may be smaller. */
static inline int64_t num_groups(const struct weight *weights, int32_t count, int64_t size) {
    int64_t groups = 0;
    for (int32_t i = 0; i < count; i++) groups += (weights[i].rows + size - 1) / size;
    return groups;
}

/* The weight that a group belongs to; *group becomes its number there. */
static inline const struct weight *owner(const struct weight *weights, int64_t size, int64_t *group) {
    for (;; weights++) {
        const int64_t own = (weights->rows + size - 1) / size;
        if (*group < own) return weights;
        *group -= own;
    }
}

/* Several products, none of them packed, in one parallel region; what each gives is what linear_float gives. */
int products_float(const struct product *products, int64_t count, int32_t threads);

/* Products with weights that are all packed, or all not. They return what dockyard_linear does. */
int linear_integer(const struct weight *weights, int32_t count, const float *x, int64_t m, int64_t k,
                int32_t threads);
int linear_float(const struct weight *weights, int32_t count, const float *x, int64_t m, int64_t k,
                 int32_t threads);
