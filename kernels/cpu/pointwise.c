/* The small operations between products. Each is one pass over its rows, in order. */
#include <math.h>

#include "operations.h"
#include "vector.h"

/* out = x / rms(x) * weight (Zhang and Sennrich 2019). d is a multiple of LANES. */
void dockyard_rms_norm(const float *x, const float *weight, float eps, int64_t rows, int64_t d, float *out) {
    for (int64_t r = 0; r < rows; r++, x += d, out += d) {
        vec sum = {0};
        for (int64_t i = 0; i < d; i += LANES) sum += load(x + i) * load(x + i);
        const float scale = 1.0f / sqrtf(horizontal_sum(sum) / (float)d + eps);
        for (int64_t i = 0; i < d; i += LANES) store(out + i, load(x + i) * scale * load(weight + i));
    }
}

/* Rotary embedding in place over x[rows, heads, d], adjacent pairs (the layout of GGUF's llama files).
 * table[positions, d] holds cos and sin interleaved. */
void dockyard_rope(float *x, const float *table, const int64_t *positions, int64_t rows, int64_t heads, int64_t d) {
    for (int64_t r = 0; r < rows; r++) {
        const float *angle = table + positions[r] * d;
        for (int64_t h = 0; h < heads; h++, x += d) {
            for (int64_t i = 0; i < d; i += 2) {
                const float a = x[i], b = x[i + 1];
                x[i] = a * angle[i] - b * angle[i + 1];
                x[i + 1] = a * angle[i + 1] + b * angle[i];
            }
        }
    }
}

/* gate = silu(gate) * up, in place. n is a multiple of LANES. */
void dockyard_silu_mul(float *gate, const float *up, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) {
        const vec g = load(gate + i);
        const vec e = exp_nonpositive(pick(g < 0, g, -g)); /* e^-|g|, so that nothing overflows */
        const vec sigmoid = pick(g < 0, e, splat(1.0f)) / (1.0f + e);
        store(gate + i, g * sigmoid * load(up + i));
    }
}
