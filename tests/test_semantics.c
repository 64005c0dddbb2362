/*
 * Semantics 1 to 9 of attn.h as properties: two problems that mean the same thing, or a result known by other means, within
 * a tolerance of rounding. Each runs on `ref` and on `cpu`, in float and in double. 10 and 11 are in test_cache.c.
 */
#define _GNU_SOURCE
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "build.h"
#include "numeric.h"
#include "philox.h"
#include "test.h"

/* Makes two forms from one seed and compares o and lse after a run. */
static void check_close(attn_context *context, rig *a, rig *b, double tolerance) {
    CHECK_OK(rig_run(a, context));
    CHECK_OK(rig_run(b, context));
    rig_check_close(a, b, tolerance);
    rig_free(a);
    rig_free(b);
}

/* ---- 1: scale ---- */

static void scale_of_zero(attn_context *context, attn_dtype dtype, double tolerance) {
    enum { SK = 77, D = 12 };
    rig r = {.p = problem(dtype, 1, 1, 1, 5, SK, D)};
    r.p.flags = ATTN_SCALE;
    CHECK(rig_make(&r, 1));
    CHECK_OK(rig_run(&r, context));
    CHECK_CLOSE(rig_lse(&r, 0, 0, 0), log(SK), tolerance);
    for (int32_t x = 0; x < D; x++) {
        double sum = 0;
        for (int32_t j = 0; j < SK; j++) sum += attn__load(dtype, rig_key(&r, &r.f.v, dtype, 0, j, 0), x);
        for (int32_t i = 0; i < 5; i++) CHECK_CLOSE(rig_o(&r, 0, i, 0, x), sum / SK, tolerance);
    }
    rig_free(&r);
}
TEST(s01_scale_of_zero_gives_the_mean) { each_host(scale_of_zero); }

static void negative_scale(attn_context *context, attn_dtype dtype, double tolerance) {
    rig a = {.p = problem(dtype, 1, 2, 2, 70, 90, 20), .backward = true}, b = a;
    a.p.flags = b.p.flags = ATTN_SCALE;
    a.p.scale = -0.5;
    b.p.scale = 0.5;
    CHECK(rig_make(&a, 2) && rig_make(&b, 2));
    for (int64_t n = 0; n < 90 * 2 * 20; n++) attn__store(dtype, b.f.k.data, n, -attn__load(dtype, b.f.k.data, n));
    CHECK_OK(rig_run(&a, context));
    CHECK_OK(rig_run(&b, context));
    for (int64_t n = 0; n < 90 * 2 * 20; n++) attn__store(dtype, b.f.d_k.data, n, -attn__load(dtype, b.f.d_k.data, n));
    rig_check_close(&a, &b, tolerance);
    rig_free(&a);
    rig_free(&b);
}
TEST(s01_negative_scale_is_negated_keys) { each_host(negative_scale); }

/* ---- 2: softcap ---- */

static void softcap_by_hand(attn_context *context, attn_dtype dtype, double tolerance) {
    rig r = {.p = problem(dtype, 1, 1, 1, 1, 2, 1)};
    r.p.flags = ATTN_SCALE;
    r.p.scale = 3;
    r.p.softcap = 1.5;
    CHECK(rig_make(&r, 3));
    static const double q = 2, k[2] = {0.5, -0.25}, v[2] = {1, -3};
    attn__store(dtype, r.f.q.data, 0, q);
    for (int j = 0; j < 2; j++) {
        attn__store(dtype, r.f.k.data, j, k[j]);
        attn__store(dtype, r.f.v.data, j, v[j]);
    }
    CHECK_OK(rig_run(&r, context));
    double e0 = exp(1.5 * tanh(3 * q * k[0] / 1.5)), e1 = exp(1.5 * tanh(3 * q * k[1] / 1.5));
    CHECK_CLOSE(rig_lse(&r, 0, 0, 0), log(e0 + e1), tolerance);
    CHECK_CLOSE(rig_o(&r, 0, 0, 0, 0), (e0 * v[0] + e1 * v[1]) / (e0 + e1), tolerance);
    rig_free(&r);
}
TEST(s02_softcap_by_hand) { each_host(softcap_by_hand); }

static void large_softcap(attn_context *context, attn_dtype dtype, double tolerance) {
    rig a = {.p = problem(dtype, 1, 2, 1, 40, 70, 20), .backward = true}, b = a;
    b.p.softcap = 1e6;
    CHECK(rig_make(&a, 4) && rig_make(&b, 4));
    check_close(context, &a, &b, fmax(tolerance, 1e-9)); /* tanh x = x - x^3 / 3: a relative 1e-11 of scores below 10 */
}
TEST(s02_large_softcap_is_none) { each_host(large_softcap); }

/* ---- 3, 4: ALiBi and bias ---- */

static void *bias_at(const rig *r, int32_t b, int32_t h, int32_t i, int32_t j) {
    const attn_matrix *m = &r->f.bias;
    int64_t at = b * m->stride[0] + h * m->stride[1] + i * m->stride[2] + j * m->stride[3];
    return (char *)m->data + at * (int64_t)attn_dtype_size(r->full.bias_dtype);
}

static void alibi_is_bias(attn_context *context, attn_dtype dtype, double tolerance) {
    enum { SQ = 50, SK = 80 };
    static const float slopes[] = {0.5f, 0.25f, 0.125f, -0.0625f};
    rig a = {.p = problem(dtype, 2, 2, 1, SQ, SK, 20), .backward = true}, b = a;
    a.p.flags = ATTN_ALIBI | ATTN_CAUSAL;
    a.f.alibi = slopes;
    a.f.alibi_stride = 2;
    b.p.flags = ATTN_BIAS | ATTN_CAUSAL;
    CHECK(rig_make(&a, 5) && rig_make(&b, 6));
    b.f.d_bias = (attn_matrix){0};
    for (int32_t n = 0; n < 2; n++) {
        rig_copy(&b, n, &a, n);
        for (int32_t h = 0; h < 2; h++)
            for (int32_t i = 0; i < SQ; i++)
                for (int32_t j = 0; j < SK; j++)
                    attn__store(dtype, bias_at(&b, n, h, i, j), 0, -slopes[2 * n + h] * abs(i + SK - SQ - j));
    }
    check_close(context, &a, &b, tolerance);
}
TEST(s03_alibi_is_a_bias) { each_host(alibi_is_bias); }

static void bias_broadcast(attn_context *context, attn_dtype dtype, double tolerance) {
    enum { B = 2, H = 3, SQ = 20, SK = 70 };
    for (int dim = 0; dim < 4; dim++) { /* broadcast along one of the dims */
        rig a = {.p = problem(dtype, B, H, H, SQ, SK, 12), .backward = true}, b = a;
        a.p.flags = b.p.flags = ATTN_BIAS;
        CHECK(rig_make(&a, 7) && rig_make(&b, 7));
        a.f.bias.stride[dim] = a.f.d_bias.stride[dim] = 0;
        for (int32_t n = 0; n < B; n++)
            for (int32_t h = 0; h < H; h++)
                for (int32_t i = 0; i < SQ; i++)
                    for (int32_t j = 0; j < SK; j++)
                        memcpy(bias_at(&b, n, h, i, j), bias_at(&a, n, h, i, j), attn_dtype_size(dtype));
        CHECK_OK(rig_run(&a, context));
        CHECK_OK(rig_run(&b, context));
        rig_check_close(&a, &b, tolerance);
        const int64_t *s = b.f.d_bias.stride;
        static const int32_t extents[] = {B, H, SQ, SK};
        for (int32_t at = 0; at < B * H * SQ * SK; at++) { /* the gradient of a broadcast is the sum */
            int32_t index[4] = {at / (H * SQ * SK), at / (SQ * SK) % H, at / SK % SQ, at % SK};
            if (index[dim] != 0) continue;
            double sum = 0;
            for (index[dim] = 0; index[dim] < extents[dim]; index[dim]++)
                sum += attn__load(dtype, b.f.d_bias.data,
                                  index[0] * s[0] + index[1] * s[1] + index[2] * s[2] + index[3] * s[3]);
            index[dim] = 0;
            CHECK_CLOSE(
                attn__load(dtype, a.f.d_bias.data, index[0] * s[0] + index[1] * s[1] + index[2] * s[2] + index[3] * s[3]),
                sum, 10 * tolerance);
        }
        rig_free(&a);
        rig_free(&b);
    }
}
TEST(s04_bias_broadcast_is_expanded_and_its_gradient_summed) { each_host(bias_broadcast); }

/* ---- 5: masks ---- */

static bool visible(const attn_problem *p, int32_t i, int32_t j) {
    int32_t diagonal = i + p->max_kv - p->max_q;
    if (p->flags & ATTN_CAUSAL && j > diagonal) return false;
    if (!(p->flags & ATTN_WINDOW)) return true;
    return (p->window_left < 0 || j >= diagonal - p->window_left) &&
           (p->window_right < 0 || j <= diagonal + p->window_right);
}

static void mask_is_bias(attn_context *context, attn_dtype dtype, double tolerance) {
    static const int32_t cases[][3] = {{1, 0, 0}, {0, 10, 3}, {0, -1, 5}, {0, 0, 0}, {1, 20, 7}, {0, 0, -1}, {0, 64, 0}};
    for (size_t n = 0; n < sizeof cases / sizeof *cases; n++) {
        rig a = {.p = problem(dtype, 1, 2, 1, 70, 90, 12), .backward = true};
        rig b = a;
        a.p.flags = (cases[n][0] ? ATTN_CAUSAL : 0) | (n ? ATTN_WINDOW : 0);
        a.p.window_left = cases[n][1];
        a.p.window_right = cases[n][2];
        b.p.flags = ATTN_BIAS;
        CHECK(rig_make(&a, 8) && rig_make(&b, 9));
        b.f.d_bias = (attn_matrix){0};
        rig_copy(&b, 0, &a, 0);
        for (int32_t h = 0; h < 2; h++)
            for (int32_t i = 0; i < 70; i++)
                for (int32_t j = 0; j < 90; j++)
                    attn__store(dtype, bias_at(&b, 0, h, i, j), 0, visible(&a.p, i, j) ? 0 : -INFINITY);
        check_close(context, &a, &b, tolerance);
    }
}
TEST(s05_causal_and_window_are_a_bias_of_minus_infinity) { each_host(mask_is_bias); }

/* ---- 6: sink ---- */

static void sink_is_a_key(attn_context *context, attn_dtype dtype, double tolerance) {
    enum { SQ = 30, SK = 60, D = 12 };
    rig a = {.p = problem(dtype, 1, 2, 2, SQ, SK, D), .backward = true};
    a.p.flags = ATTN_SINK;
    rig b = {.p = problem(dtype, 1, 2, 2, SQ, SK + 1, D), .backward = true}; /* key SK: k = v = 0, bias = sink */
    b.p.flags = ATTN_BIAS;
    CHECK(rig_make(&a, 10) && rig_make(&b, 11));
    rig_copy(&b, 0, &a, 0);
    for (int32_t h = 0; h < 2; h++) {
        for (int32_t x = 0; x < D; x++) {
            attn__store(dtype, rig_key(&b, &b.f.k, dtype, 0, SK, h), x, 0);
            attn__store(dtype, rig_key(&b, &b.f.v, dtype, 0, SK, h), x, 0);
        }
        for (int32_t i = 0; i < SQ; i++)
            for (int32_t j = 0; j <= SK; j++) attn__store(dtype, bias_at(&b, 0, h, i, j), 0, j == SK ? a.f.sink[h] : 0);
    }
    CHECK_OK(rig_run(&a, context));
    CHECK_OK(rig_run(&b, context));
    rig_check_close(&a, &b, tolerance);
    for (int32_t h = 0; h < 2; h++) {
        double sum = 0;
        for (int32_t i = 0; i < SQ; i++)
            sum += attn__load(dtype, b.f.d_bias.data, h * b.f.d_bias.stride[1] + i * b.f.d_bias.stride[2] + SK);
        CHECK_CLOSE(a.f.d_sink[h], sum, fmax(10 * tolerance, 1e-6)); /* d_sink is a float always */
    }
    rig_free(&a);
    rig_free(&b);
}
TEST(s06_sink_is_a_key_without_value) { each_host(sink_is_a_key); }

/* ---- 7: lse and its gradient ---- */

static void lse_gradient(attn_context *context, attn_dtype dtype, double tolerance) {
    enum { SQ = 30, SK = 70, D = 20 };
    rig r = {.p = problem(dtype, 1, 1, 1, SQ, SK, D), .backward = true};
    CHECK(rig_make(&r, 12));
    memset(r.f.d_o.data, 0, SQ * D * attn_dtype_size(dtype));
    CHECK_OK(rig_run(&r, context));
    for (int32_t i = 0; i < SQ; i++) /* d_q = d_lse * scale * sum_j p_j k_j */
        for (int32_t x = 0; x < D; x++) {
            double sum = 0;
            for (int32_t j = 0; j < SK; j++) {
                double s = 0;
                for (int32_t y = 0; y < D; y++)
                    s += attn__load(dtype, r.f.q.data, i * D + y) * attn__load(dtype, r.f.k.data, j * D + y);
                sum += exp(s / sqrt(D) - rig_lse(&r, 0, i, 0)) * attn__load(dtype, r.f.k.data, j * D + x);
            }
            CHECK_CLOSE(attn__load(dtype, r.f.d_q.data, i * D + x), attn__load(dtype, r.f.d_lse, i) * sum / sqrt(D),
                        tolerance);
        }
    for (int32_t n = 0; n < SK * D; n++) CHECK_CLOSE(attn__load(dtype, r.f.d_v.data, n), 0, 0);
    rig_free(&r);
}
TEST(s07_gradient_into_lse) { each_host(lse_gradient); }

/* ---- 8: dropout ---- */

static void dropout_by_position(attn_context *context, attn_dtype dtype, double tolerance) {
    enum { B = 2, H = 2, SQ = 60, SK = 150, D = 8 };
    rig r = {.p = problem(dtype, B, H, 1, SQ, SK, D), .probs = true};
    r.p.dropout = 0.3;
    r.f.seed = UINT64_C(0x123456789abcdef0), r.f.offset = UINT64_C(0xfedcba9876543210);
    CHECK(rig_make(&r, 13));
    CHECK_OK(rig_run(&r, context));
    attn_philox generator = attn__philox_make(r.f.seed, r.f.offset, 0.3);
    int64_t dropped = 0, wrong = 0;
    for (int32_t b = 0; b < B; b++)
        for (int32_t h = 0; h < H; h++)
            for (int32_t i = 0; i < SQ; i++) {
                double sum = 0, total = 0;
                for (int32_t j = 0; j < SK; j++) {
                    double p = attn__load(dtype, r.f.probs.data, ((b * H + h) * SQ + i) * (int64_t)SK + j);
                    bool drop = attn__dropped(&generator, (uint32_t)(b * H + h), (uint32_t)i, (uint32_t)j);
                    wrong += drop != (bool)signbit(p);
                    dropped += drop;
                    total += fabs(p);
                    if (!drop) sum += p / 0.7 * attn__load(dtype, rig_key(&r, &r.f.v, dtype, b, j, 0), 0);
                }
                CHECK_CLOSE(total, 1, 10 * tolerance);
                CHECK_CLOSE(rig_o(&r, b, i, h, 0), sum, 10 * tolerance);
            }
    CHECK(wrong == 0);
    double count = (double)B * H * SQ * SK; /* 4.9 standard deviations */
    CHECK_CLOSE((double)dropped / count, 0.3, 4.9 * sqrt(0.3 * 0.7 / count));
    rig_free(&r);
}
TEST(s08_dropout_is_a_function_of_position) { each_host(dropout_by_position); }

TEST(s08_dropout_cpu_is_ref) {
    attn_context *cpu = make_context(ATTN_BACKEND_CPU, 2), *ref = make_context(ATTN_BACKEND_REF, 1);
    rig a = {.p = problem(ATTN_F32, 2, 4, 2, 100, 150, 20), .backward = true};
    a.p.flags = ATTN_CAUSAL;
    a.p.dropout = 0.5;
    a.f.seed = 3, a.f.offset = 4;
    rig b = a;
    CHECK(rig_make(&a, 14) && rig_make(&b, 14));
    CHECK_OK(rig_run(&a, cpu));
    CHECK_OK(rig_run(&b, ref));
    rig_check_close(&a, &b, 2e-5);
    rig_free(&a);
    rig_free(&b);
    attn_context_destroy(cpu);
    attn_context_destroy(ref);
}

/* ---- properties of the softmax as a whole ---- */

static void key_permutation(attn_context *context, attn_dtype dtype, double tolerance) {
    enum { SK = 140, D = 20 };
    rig a = {.p = problem(dtype, 1, 2, 1, 50, SK, D), .backward = true}, b = a;
    CHECK(rig_make(&a, 15) && rig_make(&b, 15));
    size_t row = D * attn_dtype_size(dtype);
    for (int32_t j = 0; j < SK; j++) { /* 53 is prime to 140 */
        memcpy(rig_key(&b, &b.f.k, dtype, 0, j * 53 % SK, 0), rig_key(&a, &a.f.k, dtype, 0, j, 0), row);
        memcpy(rig_key(&b, &b.f.v, dtype, 0, j * 53 % SK, 0), rig_key(&a, &a.f.v, dtype, 0, j, 0), row);
    }
    CHECK_OK(rig_run(&a, context));
    CHECK_OK(rig_run(&b, context));
    for (int32_t i = 0; i < 50; i++)
        for (int32_t x = 0; x < D; x++) {
            CHECK_CLOSE(rig_o(&a, 0, i, 1, x), rig_o(&b, 0, i, 1, x), tolerance);
            CHECK_CLOSE(attn__load(dtype, rig_row(&a, &a.f.d_q, dtype, 0, i, 1), x),
                        attn__load(dtype, rig_row(&b, &b.f.d_q, dtype, 0, i, 1), x), tolerance);
        }
    for (int32_t j = 0; j < SK; j++)
        for (int32_t x = 0; x < D; x++)
            CHECK_CLOSE(attn__load(dtype, rig_key(&a, &a.f.d_k, dtype, 0, j, 0), x),
                        attn__load(dtype, rig_key(&b, &b.f.d_k, dtype, 0, j * 53 % SK, 0), x), tolerance);
    rig_free(&a);
    rig_free(&b);
}
TEST(property_order_of_keys_does_not_matter) { each_host(key_permutation); }

static void linear_in_v(attn_context *context, attn_dtype dtype, double tolerance) {
    enum { COUNT = 90 * 12 };
    rig a = {.p = problem(dtype, 1, 1, 1, 30, 90, 12)}, b = a, c = a;
    CHECK(rig_make(&a, 16) && rig_make(&b, 16) && rig_make(&c, 16));
    for (int64_t n = 0; n < COUNT; n++) { /* c.v = 2 a.v - 3 b.v */
        attn__store(dtype, b.f.v.data, n, random_normal(&b.random));
        attn__store(dtype, c.f.v.data, n, 2 * attn__load(dtype, a.f.v.data, n) - 3 * attn__load(dtype, b.f.v.data, n));
    }
    CHECK_OK(rig_run(&a, context));
    CHECK_OK(rig_run(&b, context));
    CHECK_OK(rig_run(&c, context));
    for (int32_t i = 0; i < 30; i++)
        for (int32_t x = 0; x < 12; x++)
            CHECK_CLOSE(rig_o(&c, 0, i, 0, x), 2 * rig_o(&a, 0, i, 0, x) - 3 * rig_o(&b, 0, i, 0, x), 10 * tolerance);
    rig_free(&a);
    rig_free(&b);
    rig_free(&c);
}
TEST(property_linear_in_v) { each_host(linear_in_v); }

static void inside_v(attn_context *context, attn_dtype dtype, double tolerance) {
    enum { SK = 200, D = 12 };
    rig r = {.p = problem(dtype, 1, 2, 1, 60, SK, D)};
    r.p.flags = ATTN_SCALE;
    r.p.scale = 5; /* peaked: close to one key's value */
    CHECK(rig_make(&r, 17));
    CHECK_OK(rig_run(&r, context));
    for (int32_t x = 0; x < D; x++) {
        double low = INFINITY, high = -INFINITY;
        for (int32_t j = 0; j < SK; j++) {
            double v = attn__load(dtype, r.f.v.data, j * D + x);
            low = fmin(low, v);
            high = fmax(high, v);
        }
        for (int32_t i = 0; i < 60; i++)
            for (int32_t h = 0; h < 2; h++)
                CHECK(rig_o(&r, 0, i, h, x) >= low - tolerance && rig_o(&r, 0, i, h, x) <= high + tolerance);
    }
    rig_free(&r);
}
TEST(property_o_is_inside_min_and_max_of_v) { each_host(inside_v); }

static void split_and_merge(attn_context *context, attn_dtype dtype, double tolerance) {
    enum { B = 2, SQ = 20, SK = 150, D = 12, H = 2 };
    static const int32_t cuts[] = {0, 64, 64, 101, SK}; /* one part is empty */
    rig whole = {.p = problem(dtype, B, H, H, SQ, SK, D)}, part[4], merged = whole;
    CHECK(rig_make(&whole, 18) && rig_make(&merged, 18));
    CHECK_OK(rig_run(&whole, context));
    attn_tensor o_parts[4];
    const void *lse_parts[4];
    for (int n = 0; n < 4; n++) {
        part[n] = (rig){.p = problem(dtype, B, H, H, SQ, cuts[n + 1] - cuts[n], D)};
        part[n].f.q = whole.f.q;
        part[n].f.k = whole.f.k;
        part[n].f.v = whole.f.v;
        int64_t skip = cuts[n] * H * D * (int64_t)attn_dtype_size(dtype);
        part[n].f.k.data = (char *)whole.f.k.data + skip;
        part[n].f.v.data = (char *)whole.f.v.data + skip;
        CHECK(rig_make(&part[n], 19));
        CHECK_OK(rig_run(&part[n], context));
        o_parts[n] = part[n].f.o;
        lse_parts[n] = part[n].f.lse;
    }
    fill_nan(dtype, part[1].f.o.data, B * SQ * H * D); /* counts nothing, since its lse is -inf */
    attn_merge_args args = {.size = sizeof args,
                            .dtype = dtype,
                            .parts = 4,
                            .batch = B,
                            .rows = SQ,
                            .heads = H,
                            .dim = D,
                            .o_parts = o_parts,
                            .lse_parts = lse_parts,
                            .o = merged.f.o,
                            .lse = merged.f.lse};
    CHECK_OK(attn_merge(context, &args, NULL));
    rig_check_close(&whole, &merged, tolerance);
    for (int n = 0; n < 4; n++) rig_free(&part[n]);
    rig_free(&whole);
    rig_free(&merged);
}
TEST(property_split_by_keys_and_attn_merge) { each_host(split_and_merge); }

/* Ring attention: o and lse of all keys, the backward of a part of them; few rows, worked by other loops, and more. */
static void backward_by_parts(attn_context *context, attn_dtype dtype, double tolerance) {
    enum { H = 2, SK = 150, D = 12, PARTS = 3 };
    static const int32_t cuts[PARTS + 1] = {0, 64, 101, SK}, row_counts[] = {3, 20};
    for (int c = 0; c < 2; c++) {
        int32_t rows = row_counts[c];
        rig whole = {.p = problem(dtype, 1, H, H, rows, SK, D), .backward = true}, part[PARTS];
        CHECK(rig_make(&whole, 21));
        CHECK_OK(rig_run(&whole, context));
        for (int n = 0; n < PARTS; n++) {
            part[n] = (rig){.p = problem(dtype, 1, H, H, rows, cuts[n + 1] - cuts[n], D), .f = whole.f, .backward = true};
            int64_t skip = cuts[n] * H * D * (int64_t)attn_dtype_size(dtype);
            part[n].f.k.data = (char *)whole.f.k.data + skip;
            part[n].f.v.data = (char *)whole.f.v.data + skip;
            part[n].f.d_q = part[n].f.d_k = part[n].f.d_v = (attn_tensor){0};
            CHECK(rig_make(&part[n], 22));
            CHECK_OK(rig_run_op(&part[n], context, ATTN_BACKWARD, rig_backward_buffers(&part[n])));
            for (int32_t at = 0; at < (cuts[n + 1] - cuts[n]) * H * D; at++) {
                int64_t in_whole = cuts[n] * H * D + at;
                CHECK_CLOSE(attn__load(dtype, part[n].f.d_k.data, at), attn__load(dtype, whole.f.d_k.data, in_whole),
                            tolerance);
                CHECK_CLOSE(attn__load(dtype, part[n].f.d_v.data, at), attn__load(dtype, whole.f.d_v.data, in_whole),
                            tolerance);
            }
        }
        for (int32_t at = 0; at < rows * H * D; at++) {
            double sum = 0;
            for (int n = 0; n < PARTS; n++) sum += attn__load(dtype, part[n].f.d_q.data, at);
            CHECK_CLOSE(sum, attn__load(dtype, whole.f.d_q.data, at), tolerance);
        }
        for (int n = 0; n < PARTS; n++) rig_free(&part[n]);
        rig_free(&whole);
    }
}
TEST(property_backward_by_parts_of_the_keys) { each_host(backward_by_parts); }

/* q.k so large that exp of it overflows everything; all scores are equal, so the result is the mean. */
TEST(property_huge_equal_scores_give_the_mean) {
    enum { SK = 90, D = 16 };
    for (attn_backend_id backend = ATTN_BACKEND_REF; backend <= ATTN_BACKEND_CPU; backend++) {
        attn_context *context = make_context(backend, 2);
        test_context("%s", attn_context_backend(context));
        rig r = {.p = problem(ATTN_BF16, 1, 1, 1, 3, SK, D)};
        CHECK(rig_make(&r, 20));
        for (int32_t n = 0; n < 3 * D; n++) attn__store(ATTN_BF16, r.f.q.data, n, 133120);
        for (int32_t n = 0; n < SK * D; n++) attn__store(ATTN_BF16, r.f.k.data, n, 133120);
        CHECK_OK(rig_run(&r, context));
        for (int32_t x = 0; x < D; x++) {
            double sum = 0;
            for (int32_t j = 0; j < SK; j++) sum += attn__load(ATTN_BF16, r.f.v.data, j * D + x);
            for (int32_t i = 0; i < 3; i++)
                CHECK_CLOSE(rig_o(&r, 0, i, 0, x), sum / SK, fabs(sum / SK) / 256 + 1e-6); /* one rounding to bf16 */
        }
        rig_free(&r);
        attn_context_destroy(context);
    }
}

/* Every dtype against ref, with a tolerance of that dtype's rounding; scores stay small. */
TEST(property_cpu_is_ref_for_every_dtype) {
    static const struct {
        attn_dtype dtype, kv_dtype, out_dtype;
        double tolerance;
    } cases[] = {{ATTN_F32, 0, 0, 2e-6},         {ATTN_F64, 0, 0, 1e-13},         {ATTN_F16, 0, 0, 2e-3},
                 {ATTN_BF16, 0, 0, 1.6e-2},      {ATTN_E4M3, 0, ATTN_F32, 1e-5},  {ATTN_E5M2, ATTN_E5M2, ATTN_F32, 1e-5},
                 {ATTN_F32, ATTN_I8, 0, 2e-4},   {ATTN_BF16, ATTN_E4M3, 0, 3e-2}, {ATTN_F16, ATTN_BF16, ATTN_F32, 1e-5},
                 {ATTN_F32, ATTN_BF16, 0, 1e-5}, {ATTN_E4M3, ATTN_I8, 0, 3e-2},   {ATTN_F16, ATTN_F16, ATTN_BF16, 1.6e-2}};
    attn_context *cpu = make_context(ATTN_BACKEND_CPU, 2), *ref = make_context(ATTN_BACKEND_REF, 1);
    for (size_t n = 0; n < sizeof cases / sizeof *cases; n++) {
        test_context("%s / %s", attn_dtype_name(cases[n].dtype), attn_dtype_name(cases[n].kv_dtype));
        rig a = {.p = problem(cases[n].dtype, 2, 4, 2, 40, 90, 20)};
        a.p.kv_dtype = cases[n].kv_dtype;
        a.p.out_dtype = cases[n].out_dtype;
        if (cases[n].kv_dtype == ATTN_I8) { /* integers of some 32, brought back to 1 */
            a.p.flags = ATTN_DESCALE;
            static const float one = 1, part = 1 / 32.0f;
            a.f.q_descale = &one, a.f.k_descale = a.f.v_descale = &part;
        }
        rig b = a;
        CHECK(rig_make(&a, 21) && rig_make(&b, 21));
        CHECK_OK(rig_run(&a, cpu));
        CHECK_OK(rig_run(&b, ref));
        rig_check_close(&a, &b, cases[n].tolerance);
        rig_free(&a);
        rig_free(&b);
    }
    attn_context_destroy(cpu);
    attn_context_destroy(ref);
}
