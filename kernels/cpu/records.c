/* Entries of quantised caches: float32 rows to stored bytes and back, to the bits of engine/model/deepseek/records.py.
 *
 * A row is stored as its codes, its rotary channels as bfloat16, a scale for each group of codes, and zeros. Every
 * step is exact or rounds once, to nearest with ties to even. What is beyond a format's largest value becomes that,
 * infinities too; a NaN makes its group's scale NaN, and so the whole group.
 */
#include <stddef.h>
#include <string.h>

#include "deepseek.h"

enum { E2M1 = 0, E4M3 = 1, E8M0 = 2, FLOAT32 = 3 };
enum { NAN_BITS = 0x7fc00000 };

static inline uint32_t bits_of(float x) {
    uint32_t b;
    memcpy(&b, &x, sizeof b);
    return b;
}

static inline float float_of(uint32_t b) {
    float x;
    memcpy(&x, &b, sizeof x);
    return x;
}

static inline float magnitude(float x) { return float_of(bits_of(x) & 0x7fffffffu); }

/* Codes 0..15, the nearest; bounds are where a tie goes to the even code. Beyond 6 the largest; of NaN 0. */
static inline uint8_t to_e2m1(float x) {
    const float m = magnitude(x);
    const int code = (m > 0.25f) + (m >= 0.75f) + (m > 1.25f) + (m >= 1.75f) + (m > 2.5f) + (m >= 3.5f) + (m > 5.0f);
    return (uint8_t)(code + 8 * (x < 0));
}

static const float e2m1_values[16] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f,
                                      -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

/* Beyond 448 the largest. Below 2^-6 steps are 2^-9, which is the last bit of 2^14. */
static inline uint8_t to_e4m3(float x) {
    const uint8_t sign = (uint8_t)(bits_of(x) >> 31 << 7);
    float m = magnitude(x);
    if (m != m) return 0x7f;
    m = m > 448.0f ? 448.0f : m;
    if (m < 0.015625f) return sign | (uint8_t)(bits_of(m + 16384.0f) - bits_of(16384.0f));
    const uint32_t b = bits_of(m);
    return sign | (uint8_t)((b - (120u << 23) + 0x7ffffu + (b >> 20 & 1)) >> 20);
}

static inline float from_e4m3(uint8_t code) {
    const uint32_t sign = (uint32_t)(code & 0x80) << 24, rest = code & 0x7f;
    if (rest == 0x7f) return float_of(sign | NAN_BITS);
    if (rest < 8) return float_of(sign | bits_of((float)rest * 0.001953125f));
    return float_of(sign | ((rest << 20) + (120u << 23)));
}

/* 2^(code - 127) */
static inline float from_e8m0(uint8_t code) {
    return code == 255 ? float_of(NAN_BITS) : float_of(code == 0 ? 0x00400000u : (uint32_t)code << 23);
}

/* The power of two that brings a positive x to at most 1; 255 of NaN. */
static inline uint8_t to_e8m0(float x) {
    if (x != x) return 255;
    const uint32_t b = bits_of(x);
    const int32_t code = (int32_t)(b >> 23) + ((b & 0x7fffffu) != 0);
    return (uint8_t)(code > 254 ? 254 : code);
}

static inline uint16_t to_bf16(float x) {
    const uint32_t b = bits_of(x);
    return x != x ? 0x7fc0 : (uint16_t)((b + 0x7fffu + (b >> 16 & 1)) >> 16);
}

static int64_t code_bytes(const struct record *r) { return r->codes == E2M1 ? r->channels / 2 : r->channels; }

static int64_t scale_bytes(const struct record *r) { return r->scales == FLOAT32 ? 4 : 1; }

/* The largest magnitude of a group, NaN where there is one. */
static float largest_of(const float *x, int64_t n) {
    float most = 0.0f;
    int unordered = 0;
    for (int64_t i = 0; i < n; i++) {
        most = magnitude(x[i]) > most ? magnitude(x[i]) : most;
        unordered |= x[i] != x[i];
    }
    return unordered ? float_of(NAN_BITS) : most;
}

/* A group's scale, stored at `to`; returns what its values are multiplied with, or divided by for E4M3. */
static float encode_scale(const struct record *r, const float *x, uint8_t *to) {
    const float most = largest_of(x, r->group);
    if (r->scales == E4M3) {
        const float scale = most / r->largest;
        *to = to_e4m3(scale < r->least ? r->least : scale);
        return from_e4m3(*to);
    }
    const float inverse = 1.0f / r->largest;
    const uint8_t code = to_e8m0((most < r->least ? r->least : most) * inverse);
    const float scale = from_e8m0(code);
    if (r->scales == FLOAT32) memcpy(to, &scale, sizeof scale);
    else *to = code;
    return code == 255 ? scale : from_e8m0((uint8_t)(254 - code));
}

static void encode_row(const struct record *r, const float *x, uint8_t *out) {
    uint8_t *rotary = out + code_bytes(r), *scales = rotary + 2 * r->rotary;
    memset(out, 0, (size_t)r->width);
    for (int64_t at = 0; at < r->channels; at += r->group, scales += scale_bytes(r)) {
        const float factor = encode_scale(r, x + at, scales);
        for (int64_t i = at; i < at + r->group; i++) {
            const float v = r->scales == E4M3 ? x[i] / factor : x[i] * factor;
            if (r->codes == E4M3) out[i] = to_e4m3(v);
            else out[i / 2] |= (uint8_t)(to_e2m1(v) << (i % 2 * 4));
        }
    }
    for (int64_t i = 0; i < r->rotary; i++) {
        const uint16_t narrow = to_bf16(x[r->channels + i]);
        memcpy(rotary + 2 * i, &narrow, sizeof narrow);
    }
}

static float decode_scale(const struct record *r, const uint8_t *from) {
    float scale;
    if (r->scales == E4M3) return from_e4m3(*from);
    if (r->scales == E8M0) return from_e8m0(*from);
    memcpy(&scale, from, sizeof scale);
    return scale;
}

static void decode_row(const struct record *r, const uint8_t *stored, float *out) {
    const uint8_t *rotary = stored + code_bytes(r), *scales = rotary + 2 * r->rotary;
    for (int64_t at = 0; at < r->channels; at += r->group, scales += scale_bytes(r)) {
        const float scale = decode_scale(r, scales);
        for (int64_t i = at; i < at + r->group; i++)
            out[i] = scale * (r->codes == E4M3 ? from_e4m3(stored[i]) : e2m1_values[stored[i / 2] >> (i % 2 * 4) & 15]);
    }
    for (int64_t i = 0; i < r->rotary; i++) {
        uint16_t narrow;
        memcpy(&narrow, rotary + 2 * i, sizeof narrow);
        out[r->channels + i] = float_of((uint32_t)narrow << 16);
    }
}

/* x[rows, channels + rotary] to out[rows, width] */
void dockyard_encode(const struct record *r, const float *x, int64_t rows, uint8_t *out, int32_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * r->channels > WORTH_A_THREAD)
    for (int64_t i = 0; i < rows; i++) encode_row(r, x + i * (r->channels + r->rotary), out + i * r->width);
}

void dockyard_decode_record(const struct record *r, const uint8_t *stored, int64_t rows, float *out, int32_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * r->channels > WORTH_A_THREAD)
    for (int64_t i = 0; i < rows; i++) decode_row(r, stored + i * r->width, out + i * (r->channels + r->rotary));
}
