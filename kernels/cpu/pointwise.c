/* The small operations between products. Rows are independent; few are done by the thread that calls. */
#include "operations.h"
#include "rows.h"

/* d is a multiple of LANES. */
void dockyard_rms_norm(const float *x, const float *weight, float eps, int64_t rows, int64_t d, float *out,
                       int32_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * d > WORTH_A_THREAD)
    for (int64_t r = 0; r < rows; r++) norm_row(x + r * d, weight, eps, d, out + r * d);
}

/* Rotary embedding in place over x[rows, heads, d], adjacent pairs (the layout of GGUF's llama files).
 * table[positions, d] holds cos and sin interleaved. */
void dockyard_rope(float *x, const float *table, const int64_t *positions, int64_t rows, int64_t heads, int64_t d,
                   int32_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * heads * d > WORTH_A_THREAD)
    for (int64_t r = 0; r < rows; r++) {
        const float *angle = table + positions[r] * d;
        for (int64_t h = 0; h < heads; h++) {
            float *head = x + (r * heads + h) * d;
            for (int64_t i = 0; i < d; i += 2)
                turn_pair(head + i, angle[i], -angle[i + 1], angle[i], angle[i + 1]);
        }
    }
}

/* In place over n values, a multiple of LANES. */
void dockyard_silu_mul(float *gate, const float *up, int64_t n, int32_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (n > WORTH_A_THREAD)
    for (int64_t i = 0; i < n; i += LANES) silu_mul_row(gate + i, up + i, LANES);
}
