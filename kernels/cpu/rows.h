/* What several kernels do with one row. Widths are multiples of LANES. */
#pragma once

#include <math.h>

#include "vector.h"

static inline float inverse_rms(const float *x, int64_t n, float eps) {
    vec sum = {0};
    for (int64_t i = 0; i < n; i += LANES) sum += load(x + i) * load(x + i);
    return 1.0f / sqrtf(horizontal_sum(sum) / (float)n + eps);
}

/* out = x / rms(x) * weight (Zhang and Sennrich 2019); out may be x. */
static inline void norm_row(const float *x, const float *weight, float eps, int64_t n, float *out) {
    const float scale = inverse_rms(x, n, eps);
    for (int64_t i = 0; i < n; i += LANES) store(out + i, load(x + i) * scale * load(weight + i));
}

/* (a, b) -> (a cos0 + b sin0, b cos1 + a sin1): a rotation where cos1 = cos0 and sin0 = -sin1. */
static inline void turn_pair(float *x, float cos0, float sin0, float cos1, float sin1) {
    const float a = x[0], b = x[1];
    x[0] = a * cos0 + b * sin0;
    x[1] = b * cos1 + a * sin1;
}

/* gate = silu(gate) * up */
static inline void silu_mul_row(float *gate, const float *up, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) {
        const vec g = load(gate + i);
        const vec e = exp_nonpositive(pick(g < 0, g, -g)); /* e^-|g|, so that nothing overflows */
        const vec sigmoid = pick(g < 0, e, splat(1.0f)) / (1.0f + e);
        store(gate + i, g * sigmoid * load(up + i));
    }
}
