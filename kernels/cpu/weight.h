/* What a product multiplies with, and where it goes. */
#pragma once

#include <stdint.h>

/* The numbers that GGML gives to its types, and of those that it does not have. */
enum format { F32 = 0, Q4_1 = 3, Q8_0 = 8, BF16 = 30, MXFP4 = 39, MXFP8 = 1000 };
/* The build defines what Python has too (kernels/cpu/build.py): BLOCK, the weights that share a scale, of which
 * columns are a multiple; MAX_COLUMNS of a product in floats; MAX_HEAD channels; MAX_STREAMS. */

struct weight {
    const uint8_t *data; /* N rows of row_bytes, or packed: groups of 32 rows, 32 * row_bytes each */
    float *out;          /* [M, N] */
    int64_t rows;        /* N */
    int64_t row_bytes;
    int32_t format;
    int32_t packed; /* multiplied in integers (integer.c) */
};

/* One weight times m rows of its own. Rows of x are x_stride floats apart, those of weight.out out_stride.
 * k is a multiple of BLOCK, and at most MAX_COLUMNS where the weight is not packed. */
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

/* Several products, each neighbours of one kind in one parallel region; what each gives does not depend on the
 * others. They return what dockyard_linear does: products_float takes unpacked weights, products_integer packed
 * ones, products_mixed either. */
int products_float(const struct product *products, int64_t count, int32_t threads);
int products_integer(const struct product *products, int64_t count, int32_t threads);
int products_mixed(const struct product *products, int64_t count, int32_t threads);

/* All weights over the same x. */
int dockyard_linear(const struct weight *weights, int32_t count, const float *x, int64_t m, int64_t k,
                    int32_t threads);
