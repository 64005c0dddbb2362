/*
 * The ends of what is allowed, where kernels with tiles go wrong and random problems seldom get: scales whose largest score is just
 * about to overflow, maxima that rise among scores too large for their own rounding, infinities, strides that are never used,
 * rows that begin at odd addresses. On every instruction set, or ATTN_TEST_BACKEND.
 */
#define _GNU_SOURCE
#include <math.h>
#include <string.h>

#include "build.h"
#include "numeric.h"
#include "test.h"

/* Two roundings of o to its dtype, for numbers around 1, or the error of float sums of a few hundred terms. */
static double rounding_of(attn_dtype dtype) {
    return dtype == ATTN_F64 ? 1e-12 : dtype == ATTN_F32 ? 2e-5 : dtype == ATTN_F16 ? 4e-3 : 3e-2;
}

/* Runs the rig, made with that seed, compares it with ref, and frees it. */
static void check_by_reference(rig *r, attn_context *context, uint64_t seed) {
    CHECK_OK(rig_run(r, context));
    rig expected = rig_reference(r, seed);
    rig_check_close(r, &expected, rounding_of(r->p.dtype));
    rig_free(&expected);
    rig_free(r);
}

/* ---- scores ---- */

/*
 * Rows without a key in a tile stand beside rows that have some. What stands for "no score yet" times the scale must not overflow:
 * with these scales -FLT_MAX / scale * scale does, in base 2.
 */
static void scales_at_the_edge(attn_context *context, attn_dtype dtype) {
    const double scales[] = {0.72, 1.1, 1.3, 2.3, 3.99};
    for (size_t n = 0; n < sizeof scales / sizeof *scales; n++) {
        rig r = {.p = problem(dtype, 1, 2, 1, 150, 141, 16)};
        r.p.flags = ATTN_CAUSAL | ATTN_SCALE;
        r.p.scale = scales[n];
        CHECK(rig_make(&r, 3));
        for (int64_t x = 0; x < 150 * 2 * 16; x++) attn__store(dtype, r.f.q.data, x, attn__load(dtype, r.f.q.data, x) / 8);
        check_by_reference(&r, context, 3);
    }
}
TEST(s01_scales_where_no_score_yet_overflows) { each_cpu(scales_at_the_edge); }

/*
 * Scores are 2^23 and a small integer, exact in float: the largest is only met by and by, whichever way keys are walked, and the
 * factor between two maxima must come from their difference, not from the difference of two rounded products.
 */
static void rising_maxima(attn_context *context, attn_dtype dtype) {
    enum { SQ = 20, SK = 300, D = 16 };
    rig r = {.p = problem(dtype, 1, 1, 1, SQ, SK, D)};
    r.p.flags = ATTN_SCALE;
    r.p.scale = 1;
    CHECK(rig_make(&r, 4));
    memset(r.f.q.data, 0, SQ * D * attn_dtype_size(dtype));
    memset(r.f.k.data, 0, SK * D * attn_dtype_size(dtype));
    for (int32_t i = 0; i < SQ; i++) {
        attn__store(dtype, r.f.q.data, i * D, 4096);
        attn__store(dtype, r.f.q.data, i * D + 1, i % 2 ? 1 : -1); /* rising to the end, or to the beginning */
    }
    for (int32_t j = 0; j < SK; j++) {
        attn__store(dtype, r.f.k.data, j * D, 2048);
        attn__store(dtype, r.f.k.data, j * D + 1, j / 64);
    }
    CHECK_OK(rig_run(&r, context));
    rig expected = rig_reference(&r, 4);
    for (int32_t i = 0; i < SQ; i++) /* lse has no bits left for more than the largest score */
        for (int32_t x = 0; x < D; x++)
            CHECK_CLOSE(rig_o(&r, 0, i, 0, x), rig_o(&expected, 0, i, 0, x), rounding_of(dtype));
    rig_free(&expected);
    rig_free(&r);
}
TEST(s01_huge_scores_whose_maximum_rises) { each_cpu(rising_maxima); }

/*
 * A scale that is a number above zero, but zero as a float: all keys that a row sees weigh the same, and those that it does not see,
 * whose score of -inf a scale of zero would turn into NaN, nothing.
 */
static void scale_too_small_for_float(attn_context *context, attn_dtype dtype) {
    rig r = {.p = problem(dtype, 1, 1, 1, 150, 141, 16)};
    r.p.flags = ATTN_CAUSAL | ATTN_SCALE;
    r.p.scale = 1e-60;
    CHECK(rig_make(&r, 10));
    check_by_reference(&r, context, 10);
}
TEST(s01_scale_that_is_zero_in_float) { each_cpu(scale_too_small_for_float); }

/* q is `q`, k is `k` with the sign of every other dim turned where `turn`: every row is to be the mean of V. */
static void check_equal_scores(attn_context *context, attn_dtype dtype, double scale, double q, double k, bool turn) {
    enum { SQ = 40, SK = 141, D = 16 };
    rig r = {.p = problem(dtype, 1, 1, 1, SQ, SK, D)};
    r.p.flags = ATTN_SCALE;
    r.p.scale = scale;
    CHECK(rig_make(&r, 11));
    for (int64_t x = 0; x < SQ * D; x++) attn__store(dtype, r.f.q.data, x, q);
    for (int64_t x = 0; x < SK * D; x++) attn__store(dtype, r.f.k.data, x, turn && x % 2 ? -k : k);
    CHECK_OK(rig_run(&r, context));
    rig expected = rig_reference(&r, 11);
    for (int32_t i = 0; i < SQ; i++) {
        double lse = rig_lse(&expected, 0, i, 0);
        CHECK_CLOSE(rig_lse(&r, 0, i, 0), lse, 1e-6 * fabs(lse));
        for (int32_t x = 0; x < D; x++)
            CHECK_CLOSE(rig_o(&r, 0, i, 0, x), rig_o(&expected, 0, i, 0, x), rounding_of(dtype));
    }
    rig_free(&expected);
    rig_free(&r);
}

/* Scores of 3e38 are floats, but no more in base 2: o is the mean of V all the same, and lse is 3e38. */
static void lse_near_the_largest_float(attn_context *context, attn_dtype dtype) {
    check_equal_scores(context, dtype, 3e38 / 0x1p34, 32768, 32768, false);
}
TEST(s01_lse_near_the_largest_float) { each_cpu(lse_near_the_largest_float); }

static void each_cpu_but(void (*body)(attn_context *context, attn_dtype dtype), const char *why_no_gpu) {
    if (on_host()) each_cpu(body);
    if (!on_host()) test_skip(why_no_gpu);
}

/* What GPUs do not do, as attn.h says. */
static void each_cpu_no_gpu(void (*body)(attn_context *context, attn_dtype dtype)) {
    each_cpu_but(body, "a known fault: on a GPU scores below -2.3e38, and dot products above 3.4e38, are infinite");
}

/* What kernels of the cpu backend make of each other's scores. */
static void each_cpu_alone(void (*body)(attn_context *context, attn_dtype dtype)) {
    each_cpu_but(body, "about kernels of the cpu backend; what GPUs do there is not tested");
}

static void lse_near_the_smallest_float(attn_context *context, attn_dtype dtype) {
    check_equal_scores(context, dtype, 3e38 / 0x1p34, -32768, 32768, false);
}
TEST(s01_lse_near_the_smallest_float) { each_cpu_no_gpu(lse_near_the_smallest_float); }

/* Dot products that overflow before they are scaled, up, down or both, and not afterwards. */
static void overflow_before_the_scale(attn_context *context, attn_dtype dtype) {
    static const double scales[] = {1e-10, -1e-10, 1e-36};
    for (size_t n = 0; n < 3 && dtype != ATTN_F16; n++) {
        check_equal_scores(context, dtype, scales[n], 0x1p66, 0x1p66, false);
        check_equal_scores(context, dtype, scales[n], -0x1p66, 0x1p66, false);
        check_equal_scores(context, dtype, scales[n], 0x1p66, 0x1p66, true);
    }
}
TEST(s01_dot_products_that_overflow_before_the_scale) { each_cpu_no_gpu(overflow_before_the_scale); }

/* What some call a mask: a bias of -FLT_MAX for every key of a row gives the mean of V, beside rows that have none. */
static void bias_of_the_smallest_float(attn_context *context, attn_dtype dtype) {
    enum { SQ = 40, SK = 141, D = 16 };
    rig r = {.p = problem(dtype, 1, 1, 1, SQ, SK, D)};
    r.p.flags = ATTN_BIAS;
    r.p.bias_dtype = ATTN_F32;
    if (dtype == ATTN_F64) return;
    CHECK(rig_make(&r, 12));
    for (int64_t x = 0; x < 20 * SK; x++) ((float *)r.f.bias.data)[x] = -3.40282347e38f;
    CHECK_OK(rig_run(&r, context));
    rig expected = rig_reference(&r, 12);
    for (int32_t i = 0; i < SQ; i++)
        for (int32_t x = 0; x < D; x++)
            CHECK_CLOSE(rig_o(&r, 0, i, 0, x), rig_o(&expected, 0, i, 0, x), rounding_of(dtype));
    rig_free(&expected);
    rig_free(&r);
}
TEST(s04_bias_of_the_smallest_float_for_a_whole_row) { each_cpu_no_gpu(bias_of_the_smallest_float); }

/* An lse of +inf, from elsewhere, makes every p 0, and so the gradients; few rows, and many. */
static void infinite_lse(attn_context *context, attn_dtype dtype) {
    for (int32_t rows = 3; rows < 80; rows += 70) {
        rig r = {.p = problem(dtype, 1, 2, 1, rows, 70, 16), .backward = true};
        CHECK(rig_make(&r, 13));
        CHECK_OK(rig_run(&r, context));
        for (int32_t n = 0; n < 2 * rows; n++)
            attn__store(dtype == ATTN_F64 ? ATTN_F64 : ATTN_F32, r.f.lse, n, (double)INFINITY);
        CHECK_OK(rig_run_op(&r, context, ATTN_BACKWARD, rig_backward_buffers(&r)));
        for (int64_t x = 0; x < (int64_t)rows * 2 * 16; x++) CHECK(attn__load(dtype, r.f.d_q.data, x) == 0);
        for (int64_t x = 0; x < 70 * 16; x++) CHECK(attn__load(dtype, r.f.d_v.data, x) == 0);
        rig_free(&r);
    }
}
TEST(s07_lse_of_infinity_gives_zero_gradients) { each_cpu(infinite_lse); }

/* ---- infinities ---- */

/*
 * One element of V is infinite: that column of o is, in every row that sees the key, and nothing else; no NaN. The key is in a tile that
 * all rows see, or in one with a mask; for a negative scale a GPU has kernels of its own, as for the head dims.
 */
static void check_infinite_value(attn_context *context, const rig *clean, int32_t key) {
    enum { X = 5 };
    const attn_problem *p = &clean->full;
    rig r = {.p = clean->p};
    CHECK(rig_make(&r, 5));
    attn__store(p->dtype, r.f.v.data, (int64_t)key * p->dim_v + X, INFINITY);
    CHECK_OK(rig_run(&r, context));
    for (int32_t i = 0; i < p->max_q; i++) {
        int32_t last = i + p->max_kv - p->max_q;
        bool sees = !(p->flags & ATTN_CAUSAL) || key <= last;
        if ((p->flags & ATTN_WINDOW) && key < last - p->window_left) sees = false;
        for (int32_t x = 0; x < p->dim_v; x++) {
            double want = sees && x == X ? INFINITY : rig_o(clean, 0, i, 0, x), got = rig_o(&r, 0, i, 0, x);
            CHECK_SAY(got == want, "dim %d, flags %x, scale %g, key %d, row %d: %g instead of %g", p->dim_v,
                      (unsigned)p->flags, p->scale, key, i, got, want);
        }
    }
    rig_free(&r);
}

static void infinite_value(attn_context *context, attn_dtype dtype) {
    static const uint32_t flags[] = {0, ATTN_CAUSAL, ATTN_CAUSAL | ATTN_WINDOW};
    static const int32_t dims[] = {16, 64, 128};
    for (int d = 0; d < (attn_dtype_size(dtype) == 2 ? 3 : 1); d++)
        for (int way = 0; way < 6; way++) {
            rig clean = {.p = problem(dtype, 1, 1, 1, 70, 200, dims[d])};
            clean.p.flags = flags[way % 3] | ATTN_SCALE;
            clean.p.window_left = clean.p.flags & ATTN_WINDOW ? 100 : 0;
            clean.p.scale = way / 3 ? -0.2 : 0.2;
            CHECK(rig_make(&clean, 5));
            CHECK_OK(rig_run(&clean, context));
            check_infinite_value(context, &clean, 120); /* all rows see it, or nearly all the window's */
            check_infinite_value(context, &clean, 150); /* rows from 20 on, under a causal mask */
            rig_free(&clean);
        }
}
TEST(s09_infinity_in_v_is_infinity_in_o) { each_cpu(infinite_value); }

/* An infinite key with the score -inf in every row: as if it were not there. */
static void infinite_key(attn_context *context, attn_dtype dtype) {
    enum { SQ = 70, SK = 130, D = 16, KEY = 70 };
    rig r = {.p = problem(dtype, 1, 1, 1, SQ, SK, D)};
    CHECK(rig_make(&r, 6));
    for (int32_t i = 0; i < SQ; i++) attn__store(dtype, r.f.q.data, i * D + 3, 1);
    attn__store(dtype, r.f.k.data, KEY * D + 3, -INFINITY);
    check_by_reference(&r, context, 6);
}
TEST(s01_key_of_minus_infinity_has_no_weight) { each_cpu(infinite_key); }

/* ---- numbers far from 1 ---- */

/* Numbers of head h times 2^(sign power[h]). */
static void times_powers(const rig *r, const attn_tensor *of, const int *power, int sign) {
    const attn_dtype dtype = r->p.dtype;
    const int32_t heads = r->p.heads_q, dim = r->p.dim_qk;
    for (int64_t x = 0; x < (int64_t)r->p.max_q * heads * dim; x++)
        attn__store(dtype, (void *)of->data, x, ldexp(attn__load(dtype, of->data, x), sign * power[x / dim % heads]));
}

/*
 * Heads whose q, k and v are 1 times a power of two, from the smallest that float has to nearly the largest: o is as exact as ever, next to the
 * size of v; where that is next to nothing, each product may be rounded to a multiple of 2^-149.
 */
static void far_from_one(attn_context *context, attn_dtype dtype) {
    enum { ROWS = 90, D = 40, HEADS = 12 };
    static const int of_v[HEADS] = {-138, -130, -126, -110, -103, -101, -60, 50, 56, 57, 100, 120};
    static const int of_q[HEADS] = {0, 30, 57, 70, 100, -30, -57, -70, -100, 100, -100, 54};
    if (dtype != ATTN_F32 && dtype != ATTN_F64) return; /* the others have no such numbers */
    for (int causal = 0; causal < 2; causal++) {
        rig r = {.p = problem(dtype, 1, HEADS, HEADS, ROWS, ROWS, D)};
        r.p.flags = causal ? ATTN_CAUSAL : 0;
        CHECK(rig_make(&r, 21));
        times_powers(&r, &r.f.q, of_q, 1);
        times_powers(&r, &r.f.k, of_q, -1);
        times_powers(&r, &r.f.v, of_v, 1);
        CHECK_OK(rig_run(&r, context));
        rig expected = rig_reference(&r, 21);
        for (int32_t h = 0; h < HEADS; h++) {
            test_context("q times 2^%d, v times 2^%d%s", of_q[h], of_v[h], causal ? ", causal" : "");
            for (int32_t i = 0; i < ROWS; i++) {
                CHECK_CLOSE(rig_lse(&r, 0, i, h), rig_lse(&expected, 0, i, h), 1e-5);
                for (int32_t x = 0; x < D; x++)
                    CHECK_CLOSE(rig_o(&r, 0, i, h, x), rig_o(&expected, 0, i, h, x),
                                ldexp(rounding_of(dtype), of_v[h]) + (dtype == ATTN_F32 ? ROWS * 0x1p-150 : 0));
            }
        }
        rig_free(&expected);
        rig_free(&r);
    }
}
TEST(s01_numbers_far_from_one) { each_cpu_no_gpu(far_from_one); }

/* The same of gradients, and of d_o: next to what they are made of, and a few multiples of 2^-149. */
static void gradients_far_from_one(attn_context *context, attn_dtype dtype) {
    enum { ROWS = 90, D = 72, HEADS = 14 };
    static const int of_q[HEADS] = {0, 19, 33, 21, -40, 60, 0, 0, 0, 0, -90, 0, 0, 20};
    static const int of_v[HEADS] = {0, 0, 0, 20, 0, -30, 40, -75, 20, 0, 10, -60, 21, 50};
    static const int of_o[HEADS] = {0, 0, 0, 21, 0, 0, -40, 20, -80, -110, 10, -60, 60, -60};
    static const uint32_t flags[] = {0, ATTN_CAUSAL, ATTN_ALIBI, ATTN_PRECISE_FEW, 0, ATTN_CAUSAL};
    if (dtype != ATTN_F32 && dtype != ATTN_F64) return; /* the others have no such numbers */
    for (int n = 0; n < 6; n++) {
        rig r = {.p = problem(dtype, 1, HEADS, HEADS, ROWS, ROWS, D), .backward = true};
        r.p.flags = flags[n];
        r.p.softcap = n == 4 ? 2 : 0;
        r.p.dropout = n == 5 ? 0.25 : 0;
        CHECK(rig_make(&r, 23));
        for (int h = 0; r.f.alibi && h < HEADS; h++) ((float *)(uintptr_t)r.f.alibi)[h] = 0.03f; /* else few keys count */
        times_powers(&r, &r.f.q, of_q, 1);
        times_powers(&r, &r.f.k, of_q, -1);
        times_powers(&r, &r.f.v, of_v, 1);
        times_powers(&r, &r.f.d_o, of_o, 1);
        for (int32_t i = 0; i < ROWS * HEADS; i++) { /* a gradient of lse would be much more than the rest */
            const double old = attn__load(dtype == ATTN_F64 ? ATTN_F64 : ATTN_F32, r.f.d_lse, i);
            attn__store(dtype == ATTN_F64 ? ATTN_F64 : ATTN_F32, (void *)(uintptr_t)r.f.d_lse, i,
                        ldexp(old, of_o[i / ROWS] + of_v[i / ROWS]));
        }
        CHECK_OK(rig_run(&r, context));
        rig expected = rig_reference(&r, 23);
        for (int32_t h = 0; h < HEADS; h++) {
            test_context("q times 2^%d, v times 2^%d, d_o times 2^%d, flags %u, softcap %g, dropout %g", of_q[h], of_v[h],
                         of_o[h], r.p.flags, (double)r.p.softcap, (double)r.p.dropout);
            const int size[] = {of_o[h] + of_v[h] - of_q[h], of_o[h] + of_v[h] + of_q[h], of_o[h]};
            for (int32_t i = 0; i < ROWS; i++)
                for (int32_t x = 0; x < D; x++) {
                    const attn_tensor *mine[] = {&r.f.d_q, &r.f.d_k, &r.f.d_v},
                                      *right[] = {&expected.f.d_q, &expected.f.d_k, &expected.f.d_v};
                    for (int of = 0; of < 3; of++) {
                        int64_t at = ((int64_t)i * HEADS + h) * D + x;
                        CHECK_CLOSE(attn__load(dtype, mine[of]->data, at), attn__load(dtype, right[of]->data, at),
                                    ldexp(rounding_of(dtype), size[of]) +
                                        (dtype == ATTN_F32
                                             ? ROWS * ldexp(1, -149 + (of == 0 && of_q[h] < 0 ? -of_q[h] : 0) +
                                                                   (of == 1 && of_q[h] > 0 ? of_q[h] : 0))
                                             : 0));
                    }
                }
        }
        rig_free(&expected);
        rig_free(&r);
    }
}
TEST(s01_gradients_of_numbers_far_from_one) { each_cpu_no_gpu(gradients_far_from_one); }

/*
 * Scores that are large: p of the backward are those of the forward, or nearly, whichever kernels they are worked by: causal rows that see few keys, rows that see
 * a number that tiles do not have, few rows and few dims have others in the one than in the other. With d_o of ones their sum over keys, which d_v has, is 1
 * for each row; so is that of d_bias, with d_lse of ones and d_o of zeros.
 */
static void one_of_large_scores(attn_context *context, int32_t rows, int32_t dim, int flags, bool has_far, int each,
                                int power) {
    enum { KEYS = 130, AT = 5, FAR_AT = 3 };
    test_context("f32, %d rows, dim %d, flags %d%s, each row of %d times 2^%d", rows, dim, flags,
                 has_far ? ", 1e18 in v" : "", each, power);
    rig r = {.p = problem(ATTN_F32, 1, 1, 1, rows, KEYS, dim), .backward = true};
    r.p.flags = (uint32_t)flags;
    CHECK(rig_make(&r, 24));
    const bool of_bias = flags & ATTN_BIAS;
    float *q = r.f.q.data, *d_o = r.f.d_o.data;
    const float *d_v = r.f.d_v.data, *d_bias = r.f.d_bias.data;
    for (int64_t x = 0; x < (int64_t)rows * dim; x++) {
        if (x / dim % each == 0) q[x] = ldexpf(q[x], power);
        d_o[x] = of_bias || (has_far && x % dim == FAR_AT) ? 0 : 1;
    }
    for (int i = 0; of_bias && i < rows; i++) ((float *)(uintptr_t)r.f.d_lse)[i] = 1;
    if (has_far) ((float *)r.f.v.data)[FAR_AT] = 1e18f;
    CHECK_OK(rig_run(&r, context));
    double sum = 0;
    for (int64_t x = 0; x < KEYS && !of_bias; x++) sum += (double)d_v[x * dim + AT];
    for (int64_t x = 0; of_bias && x < (int64_t)rows * KEYS; x++) sum += (double)d_bias[x];
    CHECK_CLOSE(sum, rows, 1e-3 * rows);
    rig_free(&r);
}

static void all_large_scores(attn_context *context) {
    static const int of_q[] = {0, 13, 17, 18, 20, 24, 30, 50, 55, 58, 80};
    for (size_t n = 0; n < 2 * sizeof of_q / sizeof *of_q; n++)
        for (int dim = 64; dim <= 72; dim += 8) {
            const int each = n % 2 ? 8 : 1, power = of_q[n / 2];
            for (int32_t rows = 3; rows <= 130; rows += 127) { /* few, and many */
                one_of_large_scores(context, rows, dim, 0, false, each, power);
                one_of_large_scores(context, rows, dim, ATTN_BIAS, false, each, power);
                one_of_large_scores(context, rows, dim, ATTN_PRECISE_FEW, false, each, power);
                if (dim == 64 || each > 1) continue;
                one_of_large_scores(context, rows, dim, ATTN_ALIBI, false, each, power);
                one_of_large_scores(context, rows, dim, ATTN_PRECISE, false, each, power);
            }
            one_of_large_scores(context, 130, dim, ATTN_CAUSAL, false, each, power);
            one_of_large_scores(context, 130, dim, ATTN_CAUSAL, true, each, power);
        }
}

/* Sums of two large terms that cancel: no score of another kernel is near the forward's then, though what is left may be as large as an lse that is restored. */
static void scores_that_cancel(attn_context *context, int flags) {
    enum { ROWS = 100, D = 72 };
    const int powers =
        flags && strstr(attn_cpu_features(), "AMX") ? 20 : 24; /* there d_v is of double, lse of tiles: cpu.md */
    for (int power = 14; power <= powers; power += 2) {
        test_context("f32, scores of two terms of 2^%d, flags %d", power, flags);
        rig r = {.p = problem(ATTN_F32, 1, 1, 1, ROWS, ROWS, D), .backward = true};
        r.p.flags = (uint32_t)flags;
        CHECK(rig_make(&r, 26));
        float *q = r.f.q.data, *k = r.f.k.data, *d_o = r.f.d_o.data;
        for (int i = 0; i < ROWS; i++) {
            q[i * D] = q[i * D + 1] = ldexpf(1, power - 6);
            k[i * D] = 1.1f * 64;
            k[i * D + 1] = -k[i * D] * (1 - ldexpf(1.6f, 13 - power)); /* leaves 1.76 2^13 */
        }
        for (int x = 0; x < ROWS * D; x++) d_o[x] = 1;
        CHECK_OK(rig_run(&r, context));
        double sum = 0;
        for (int j = 0; j < ROWS; j++) sum += (double)((const float *)r.f.d_v.data)[j * D];
        CHECK_CLOSE(sum, ROWS, 1e-3 * ROWS);
        rig_free(&r);
    }
}

/* ATTN_PRECISE_FEW, rows that weigh few keys and whose lse is not large: p of float adds up to 1 as p of double does. */
static void few_keys_of_moderate_scores(attn_context *context) {
    enum { ROWS = 64, KEYS = 2, D = 64, SEEDS = 8 };
    for (int n = 0; n < 6 * SEEDS; n++) {
        const int power = n / SEEDS * 4;
        test_context("f32, rows of two keys, q times 2^%d, seed %d", power, n % SEEDS);
        rig r = {.p = problem(ATTN_F32, 1, 1, 1, ROWS, KEYS, D), .backward = true};
        r.p.flags = ATTN_PRECISE_FEW;
        CHECK(rig_make(&r, (uint64_t)(n % SEEDS)));
        float *q = r.f.q.data, *d_o = r.f.d_o.data;
        for (int x = 0; x < ROWS * D; x++) q[x] = ldexpf(q[x], power), d_o[x] = x / D == x % D;
        CHECK_OK(rig_run(&r, context));
        for (int i = 0; i < ROWS; i++) { /* of d_v a column is p of a row */
            const float *p = (const float *)r.f.d_v.data + i;
            if (fabsf(((const float *)r.f.lse)[i]) <= 1024) CHECK_CLOSE((double)(p[0] + p[D]), 1, 5e-7);
        }
        rig_free(&r);
    }
}

/*
 * Rows that see at most four keys have scores of fwd.c in the forward, whatever kernel there is. Where terms cancel these are not those of tiles, though
 * no lse is large: p of the backward are of the forward's all the same.
 */
static void few_keys_of_scores_that_cancel(attn_context *context) {
    enum { N = 72, KINDS = 3 };
    static const uint32_t flags[KINDS] = {ATTN_CAUSAL, ATTN_WINDOW, ATTN_CAUSAL};
    static const char *const name[KINDS] = {"causal", "windows of four keys", "FlashMask of two keys"};
    for (int power = 8; power <= 20; power += 4)
        for (int kind = 0; kind < KINDS; kind++) {
            test_context("f32, scores of two terms of 2^%d, %s", power, name[kind]);
            rig r = {.p = problem(ATTN_F32, 1, 1, 1, N, N, N), .backward = true};
            r.p.flags = flags[kind];
            r.p.window_left = kind == 1 ? 3 : 0;
            r.p.flashmask_vectors = r.p.flashmask_heads = kind == 2;
            CHECK(rig_make(&r, 28));
            float *q = r.f.q.data, *k = r.f.k.data;
            for (int i = 0; i < N; i++) {
                q[i * N] = q[i * N + 1] = ldexpf(1, power - 6);
                k[i * N] = 1.1f * 64;
                k[i * N + 1] = -k[i * N] * (1 - ldexpf(1.6f, 4 - power));
                if (kind == 2) ((int32_t *)(uintptr_t)r.f.flashmask)[i] = i + 2;
            }
            rig_one_hot(&r);
            CHECK_OK(rig_run(&r, context));
            for (int i = 0; i < (kind ? N : 4); i++) CHECK_CLOSE(rig_sum_of_p(&r, i), 1, 2e-6);
            rig_free(&r);
        }
}

/* ATTN_PRECISE_FEW: scores that are exact, and an lse that float has no room for, 512 + log(72): p add up to 1 by what it rounds off. */
static void lost_digits_of_lse(attn_context *context) {
    enum { N = 72 };
    test_context("f32, an lse of 516.3, ATTN_PRECISE_FEW");
    rig r = {.p = problem(ATTN_F32, 1, 1, 1, N, N, N), .backward = true};
    r.p.flags = ATTN_PRECISE_FEW | ATTN_SCALE;
    r.p.scale = 1;
    CHECK(rig_make(&r, 29));
    for (int x = 0; x < N * N; x++) ((float *)r.f.q.data)[x] = ((float *)r.f.k.data)[x] = x % N < 8 ? 8 : 0;
    rig_one_hot(&r);
    CHECK_OK(rig_run(&r, context));
    for (int i = 0; i < N; i++) CHECK_CLOSE(rig_sum_of_p(&r, i), 1, 2e-6);
    rig_free(&r);
}

/*
 * In one tile rows without a key, a row with a number that tiles do not have and a row whose lse is large: what the last one gives to keys is theirs on
 * any number of threads.
 */
static void large_beside_far(attn_context *context) {
    enum { ROWS = 136, KEYS = 100, D = 96, LARGE = 60, FAR = 100, TIED = 2 };
    test_context("f32, a row that is large beside one that is far and rows without a key");
    rig r = {.p = problem(ATTN_F32, 1, 1, 1, ROWS, KEYS, D), .backward = true};
    r.p.flags = ATTN_CAUSAL | ATTN_SCALE;
    r.p.scale = 1;
    CHECK(rig_make(&r, 27));
    float *q = r.f.q.data, *k = r.f.k.data;
    for (int x = 0; x < ROWS * D; x++) q[x] = rintf(q[x]);
    for (int x = 0; x < KEYS * D; x++) k[x] = x % D == 0 ? 0 : rintf(k[x]); /* so that nobody sees what is far */
    memcpy(k + (TIED + 1) * D, k + TIED * D, D * sizeof *k);
    for (int x = 0; x < D; x++) q[LARGE * D + x] = 512 * k[TIED * D + x];
    q[FAR * D] = 1e18f;
    CHECK_OK(rig_run(&r, context));
    rig expected = rig_reference(&r, 27);
    CHECK(((const float *)r.f.lse)[LARGE] > 1024 && ((const float *)r.f.lse)[0] < 0);
    for (int x = 0; x < KEYS * D; x++) {
        const double right = (double)((float *)expected.f.d_k.data)[x];
        if (x % D)
            CHECK_CLOSE((double)((float *)r.f.d_k.data)[x], right,
                        4e-3 * fmax(fabs(right), 100)); /* an lse of 2^15 is off by 2^-10 */
    }
    rig_free(&expected);
    rig_free(&r);
}

/* Kernels as they are taken by themselves: not each where it can be. */
TEST(s01_gradients_of_large_scores_by_default) {
    use_isa(NULL);
    attn_context *context = make_context(ATTN_BACKEND_CPU, 2);
    CHECK(context != NULL);
    all_large_scores(context);
    scores_that_cancel(context, 0);
    scores_that_cancel(context, ATTN_PRECISE_FEW);
    few_keys_of_moderate_scores(context);
    few_keys_of_scores_that_cancel(context);
    lost_digits_of_lse(context);
    large_beside_far(context);
    attn_context_destroy(context);
}

/* Likewise an lse whose gradient is large: d_v does not see it, and d_q and d_k are right next to it. */
static void gradients_of_large_scores(attn_context *context, attn_dtype dtype) {
    enum { ROWS = 130, D = 72 };
    if (dtype != ATTN_F32) return;
    all_large_scores(context);
    scores_that_cancel(context, 0);
    scores_that_cancel(context, ATTN_PRECISE_FEW);
    few_keys_of_moderate_scores(context);
    few_keys_of_scores_that_cancel(context);
    lost_digits_of_lse(context);
    large_beside_far(context);
    for (int power = 60; power <= 110; power += 10) {
        test_context("f32, d_lse times 2^%d", power);
        rig r = {.p = problem(dtype, 1, 1, 1, ROWS, ROWS, D), .backward = true};
        CHECK(rig_make(&r, 25));
        float *d_lse = (float *)(uintptr_t)r.f.d_lse;
        for (int i = 0; i < ROWS; i += 3) d_lse[i] = ldexpf(d_lse[i], power);
        CHECK_OK(rig_run(&r, context));
        rig expected = rig_reference(&r, 25);
        for (int64_t x = 0; x < (int64_t)ROWS * D; x++) {
            CHECK_CLOSE((double)((float *)r.f.d_q.data)[x], (double)((float *)expected.f.d_q.data)[x],
                        2e-5 * (x / D % 3 ? 1 : ldexp(1, power)));
            CHECK_CLOSE((double)((float *)r.f.d_k.data)[x], (double)((float *)expected.f.d_k.data)[x], ldexp(2e-5, power));
            CHECK_CLOSE((double)((float *)r.f.d_v.data)[x], (double)((float *)expected.f.d_v.data)[x], 2e-5);
        }
        rig_free(&expected);
        rig_free(&r);
    }
}
TEST(s01_gradients_of_large_scores) { each_cpu_alone(gradients_of_large_scores); }

/*
 * Few rows, and keys of which a row sees one or five: lse may be far below the terms that its scores are sums of. With values and d_o that have a 1 for
 * each key and row d_v has p, which add up to 1.
 */
static void large_scores_of_few(attn_context *context, attn_dtype dtype) {
    enum { KEYS = 5, D = 128, DV = 8 };
    const int64_t size = (int64_t)attn_dtype_size(dtype);
    for (int n = 0; n < 16 * 4 * 2; n++) {
        const int seed = n / 8, rows = n / 2 % 4 + 1, powers = dtype == ATTN_F16 ? 10 : 60;
        for (int power = 0; power <= powers; power += powers / 5) {
            test_context("%s, %d rows, %d keys, q times 2^%d, seed %d", attn_dtype_name(dtype), rows, n % 2 ? 1 : KEYS,
                         power, seed);
            rig r = {.p = problem(dtype, 1, 1, 1, rows, KEYS, D), .backward = true};
            r.p.dim_v = DV;
            if (n % 2) r.p.flags = ATTN_WINDOW; /* of one key */
            CHECK(rig_make(&r, (uint64_t)seed));
            for (int64_t x = 0; x < rows * D; x++)
                attn__store(dtype, r.f.q.data, x, ldexp(attn__load(dtype, r.f.q.data, x), power));
            for (int64_t x = 0; dtype == ATTN_F16 && x < KEYS * D; x++) /* of which q has not the range */
                attn__store(dtype, r.f.k.data, x, ldexp(attn__load(dtype, r.f.k.data, x), power));
            memset(r.f.d_o.data, 0, (size_t)(rows * DV * size));
            for (int i = 0; i < rows; i++) attn__store(dtype, r.f.d_o.data, i * DV + i, 1);
            CHECK_OK(rig_run(&r, context));
            for (int i = 0; i < rows; i++) {
                double sum = 0;
                for (int j = 0; j < KEYS; j++) sum += attn__load(dtype, r.f.d_v.data, j * DV + i);
                CHECK_CLOSE(sum, 1, 1e-2);
            }
            rig_free(&r);
        }
    }
}
TEST(s01_large_scores_of_few_rows_and_keys) { each_cpu_alone(large_scores_of_few); }

/*
 * One number of a key or of a row that is far from 1, or none: rows that do not see it have the same bits as without it, and those that do are right. So have
 * the gradients of these rows, and of keys that do not see the row; and those of a value are right.
 */
static void check_gradients_of_one(const rig *r, const rig *plain, const rig *expected, int of, double number, int32_t at) {
    const int32_t rows = r->p.max_q, dim = r->p.dim_qk;
    const attn_tensor *mine[] = {&r->f.d_q, &r->f.d_k, &r->f.d_v}, *same[] = {&plain->f.d_q, &plain->f.d_k, &plain->f.d_v},
                      *right[] = {&expected->f.d_q, &expected->f.d_k, &expected->f.d_v};
    for (int n = 0; n < 3; n++)
        for (int32_t i = 0; i < rows; i++) {
            const bool sees = n == 0 ? i >= at : of > 0 || i <= at;
            for (int32_t x = 0; x < dim; x++) {
                const float have = ((const float *)mine[n]->data)[i * dim + x];
                if (!sees) CHECK(have == ((const float *)same[n]->data)[i * dim + x]);
                if (of < 2 || number > 1e36) continue; /* scores have the rest; and sums of 120 may be past all numbers */
                CHECK_CLOSE((double)have, (double)((const float *)right[n]->data)[i * dim + x], 1e-4 * fmax(number, 1));
            }
        }
}

static void one_number_far_from_one(attn_context *context, attn_dtype dtype) {
    enum { ROWS = 120, D = 72, AT = 70 };
    static const double numbers[] = {1e-45, 1e-40, 1e-32, 1e5, 1e17, 1e25, 1e29, 3e37};
    if (dtype != ATTN_F32) return;
    rig plain = {.p = problem(dtype, 1, 1, 1, ROWS, ROWS, D)};
    plain.p.flags = ATTN_CAUSAL;
    plain.backward = true;
    CHECK(rig_make(&plain, 22));
    CHECK_OK(rig_run(&plain, context));
    for (size_t n = 0; n < sizeof numbers / sizeof *numbers; n++)
        for (int of = 0; of < 3; of++) {
            test_context("%g in %c", numbers[n], "qkv"[of]);
            rig r = {.p = plain.p, .backward = true};
            CHECK(rig_make(&r, 22));
            attn_tensor *t[] = {&r.f.q, &r.f.k, &r.f.v};
            attn__store(dtype, t[of]->data, AT * D + 3, numbers[n]);
            if (of == 2 && numbers[n] < 1) /* nothing else that it could hide in */
                for (int32_t j = 0; j < ROWS; j++)
                    if (j != AT) attn__store(dtype, r.f.v.data, (int64_t)j * D + 3, 0);
            CHECK_OK(rig_run(&r, context));
            rig expected = rig_reference(&r, 22);
            if (of < 2 || numbers[n] > 1) check_gradients_of_one(&r, &plain, &expected, of, numbers[n], AT);
            CHECK(of == 2 && numbers[n] < 1 ? rig_o(&r, 0, AT - 1, 0, 3) == 0 : rig_same_rows(&plain, 0, &r, 0, AT));
            for (int32_t i = AT; i < ROWS; i++)
                for (int32_t x = 0; x < D; x++) {
                    const double want = rig_o(&expected, 0, i, 0, x),
                                 size = of == 2 && x == 3 ? fabs(want) : fmax(fabs(want), 1);
                    CHECK_CLOSE(rig_o(&r, 0, i, 0, x), want, 2e-5 * size + 0x1p-149);
                }
            rig_free(&expected);
            rig_free(&r);
        }
    rig_free(&plain);
}
TEST(c5_float_far_from_one) { each_cpu_no_gpu(one_number_far_from_one); }

/* Dot products that overflow float in some rows: a causal prefix has the bits of the whole, done again in double or not. */
static void prefix_past_all_numbers(attn_context *context, attn_dtype dtype) {
    enum { S = 60, D = 16 };
    static const int32_t prefixes[] = {1, 2, 3, 4, 5, 16, 17, 40};
    if (dtype != ATTN_F32) return;
    for (int flags = 0; flags < 2; flags++) {
        rig whole = {.p = problem(dtype, 1, 1, 1, S, S, D)};
        whole.p.flags = ATTN_CAUSAL | (flags ? ATTN_PRECISE_FEW : 0);
        CHECK(rig_make(&whole, 23));
        for (int64_t x = 0; x < S * D; x++) {
            attn__store(dtype, whole.f.q.data, x, attn__load(dtype, whole.f.q.data, x) * 1e20);
            attn__store(dtype, whole.f.k.data, x, attn__load(dtype, whole.f.k.data, x) * (x % 5 ? 1e18 : 1e20));
        }
        CHECK_OK(rig_run(&whole, context));
        for (size_t n = 0; n < sizeof prefixes / sizeof *prefixes; n++) {
            rig prefix = {.p = whole.p};
            prefix.p.max_q = prefix.p.max_kv = prefixes[n];
            CHECK(rig_make(&prefix, 24));
            rig_copy(&prefix, 0, &whole, 0);
            CHECK_OK(rig_run(&prefix, context));
            CHECK_SAY(rig_same_rows(&prefix, 0, &whole, 0, prefixes[n]), "prefix of %d%s", prefixes[n],
                      flags ? ", precise" : "");
            rig_free(&prefix);
        }
        rig_free(&whole);
    }
}
TEST(c5_float_prefix_past_all_numbers) { each_cpu_no_gpu(prefix_past_all_numbers); }

/* ---- addresses ---- */

/* The stride of a dim of one element is never used, so it may be anything. */
static void unused_strides(attn_context *context, attn_dtype dtype) {
    rig plain = {.p = problem(dtype, 1, 2, 1, 1, 1, 32)}, odd = plain;
    CHECK(rig_make(&plain, 7) && rig_make(&odd, 7));
    odd.f.q.stride[0] = odd.f.q.stride[1] = 1;
    odd.f.k.stride[0] = odd.f.v.stride[1] = 3;
    odd.f.k.stride[1] = odd.f.k.stride[2] = 5;
    odd.f.v.stride[0] = odd.f.v.stride[2] = -7;
    CHECK_OK(rig_run(&plain, context));
    CHECK_OK(rig_run(&odd, context));
    CHECK(rig_same(&plain, &odd));
    rig_free(&plain);
    rig_free(&odd);
}
TEST(c5_unused_strides_do_not_matter) { each_cpu(unused_strides); }

/* Rows at multiples of 16 bytes, and the same numbers one element further: other kernels, the same bits. */
static void alignment(attn_context *context, attn_dtype dtype) {
    enum { B = 2, H = 2, S = 150 };
    for (int32_t dim = 32; dim <= 128; dim += 32) {
        rig even = {.p = problem(dtype, B, H, H, S, S, dim)}, odd = even;
        even.p.flags = odd.p.flags = ATTN_CAUSAL | ATTN_SINK;
        CHECK(rig_make(&even, 8));
        attn_tensor *const to[] = {&odd.f.q, &odd.f.k, &odd.f.v};
        for (int n = 0; n < 3; n++) {
            char *data = rig_tensor(&odd, dtype, (int64_t)B * H * S * dim + 1, RIG_INPUT);
            if (!CHECK(data != NULL)) return;
            *to[n] = attn_dense(data + attn_dtype_size(dtype), S, H, dim);
        }
        odd.f.sink = even.f.sink;
        CHECK(rig_make(&odd, 9));
        for (int32_t b = 0; b < B; b++) rig_copy(&odd, b, &even, b);
        CHECK_OK(rig_run(&even, context));
        CHECK_OK(rig_run(&odd, context));
        CHECK(rig_same(&even, &odd));
        rig_free(&odd);
        rig_free(&even);
    }
}
TEST(c5_alignment_does_not_matter) { each_cpu(alignment); }

/*
 * One row of d_o for all rows, heads and sequences, by strides of zero, as the gradient of a sum has it; against the same numbers
 * written out. Other kernels may have to serve it on a GPU, so there it is close.
 */
static void flat_gradient(attn_context *context, attn_dtype dtype) {
    enum { B = 2, H = 4, S = 130 };
    for (int32_t n = 0, dim; (dim = wide_dim(n)) != 0; n++) {
        const size_t row = (size_t)dim * attn_dtype_size(dtype);
        rig dense = {.p = problem(dtype, B, H, 2, S, S, dim), .backward = true}, flat = dense;
        CHECK(rig_make(&dense, 12) && rig_make(&flat, 12));
        for (int32_t x = 0; x < dim; x++) { /* small, so that sums are around 1, for which the tolerance is */
            const double small = attn__load(dtype, dense.f.d_o.data, x) / 8;
            attn__store(dtype, dense.f.d_o.data, x, small);
            attn__store(dtype, flat.f.d_o.data, x, small);
        }
        for (size_t i = 1; i < (size_t)B * H * S; i++) memcpy((char *)dense.f.d_o.data + i * row, dense.f.d_o.data, row);
        CHECK_OK(rig_run(&dense, context));
        CHECK_OK(rig_run_op(&flat, context, ATTN_FORWARD, rig_forward_buffers(&flat)));
        attn_buffers f = rig_backward_buffers(&flat);
        memset(f.d_o.stride, 0, sizeof f.d_o.stride);
        CHECK_OK(rig_run_op(&flat, context, ATTN_BACKWARD, f));
        if (on_host())
            CHECK_SAY(rig_same(&dense, &flat), "dim %d", dim);
        else
            rig_check_close(&dense, &flat, 2 * rounding_of(dtype));
        rig_free(&dense);
        rig_free(&flat);
    }
}
TEST(s09_gradient_with_zero_strides) { each_cpu(flat_gradient); }

/*
 * Scores of +-2048 and more under a softcap of 30 are +-30, to the last bit, and do not change with q or k: their gradients are zero,
 * or what is left of 1 - tanh^2 in float. V's are those of equal weights for half of the keys.
 */
static void softcap_of_huge_scores(attn_context *context, attn_dtype dtype) {
    enum { SQ = 100, SK = 150 };
    for (int32_t n = 0, dim; (dim = wide_dim(n)) != 0; n++) {
        rig r = {.p = problem(dtype, 1, 2, 2, SQ, SK, dim), .backward = true};
        r.p.softcap = 30;
        rig expected = r;
        CHECK(rig_make(&r, 13) && rig_make(&expected, 13));
        for (int64_t x = 0; x < (int64_t)2 * SQ * dim; x++) attn__store(dtype, r.f.q.data, x, x / dim % 3 ? 256 : -256);
        for (int64_t x = 0; x < (int64_t)2 * SK * dim; x++) attn__store(dtype, r.f.k.data, x, x / dim % 5 ? 1 : -1);
        memcpy(expected.f.q.data, r.f.q.data, (size_t)2 * SQ * (size_t)dim * attn_dtype_size(dtype));
        memcpy(expected.f.k.data, r.f.k.data, (size_t)2 * SK * (size_t)dim * attn_dtype_size(dtype));
        attn_context *ref = make_context(ATTN_BACKEND_REF, 1);
        CHECK_OK(rig_run(&expected, ref));
        CHECK_OK(rig_run(&r, context));
        rig_check_close(&r, &expected, 2 * rounding_of(dtype));
        attn_context_destroy(ref);
        rig_free(&expected);
        rig_free(&r);
    }
}
TEST(s02_softcap_of_huge_scores) { each_cpu(softcap_of_huge_scores); }

/* ---- threads ---- */

/* Every row sees the first key alone, and its d_o is such that d_v passes all numbers after 171 rows: the infinity among them comes before or after that. */
static void weigh_one_key(rig *r) {
    const int64_t dim = r->p.dim_qk;
    CHECK(rig_make(r, 5));
    for (int64_t row = 0; row < r->p.max_q; row++) {
        attn__store(r->p.dtype, (void *)r->f.q.data, row * dim, 100);
        attn__store(r->p.dtype, (void *)r->f.d_o.data, row * dim, row == 5 ? -INFINITY : 2e36);
        attn__store(r->p.dtype, (void *)r->f.d_o.data, row * dim + 1, row == 300 ? INFINITY : -2e36);
    }
    for (int64_t key = 0; key < r->p.max_kv; key++)
        attn__store(r->p.dtype, (void *)r->f.k.data, key * dim, key ? -100 : 100);
}

/* Kernels whose tiles have more rows on one thread than on many: sums must not know of it. */
static void check_on_threads(const rig *form, void (*make)(rig *r)) {
    static const int32_t counts[] = {2, 7, 16};
    const char *isa;
    for (int i = 0; (isa = cpu_isa(i)) != NULL; i++) {
        attn_context *context = make_cpu_context(isa, 1);
        rig one = *form;
        make(&one);
        CHECK_OK(rig_run(&one, context));
        attn_context_destroy(context);
        for (size_t n = 0; n < sizeof counts / sizeof *counts; n++) {
            test_context("%s %s, %d threads", isa, attn_dtype_name(form->p.dtype), counts[n]);
            rig many = *form;
            make(&many);
            context = make_cpu_context(isa, counts[n]);
            CHECK_OK(rig_run(&many, context));
            CHECK(rig_same(&one, &many));
            attn_context_destroy(context);
            rig_free(&many);
        }
        rig_free(&one);
        use_isa(NULL);
    }
}

TEST(c5_threads_1_to_16_infinity_in_sums_past_all_numbers) {
    static const attn_dtype dtypes[] = {ATTN_F32, ATTN_BF16};
    for (size_t d = 0; d < sizeof dtypes / sizeof *dtypes; d++) {
        rig r = {.p = problem(dtypes[d], 1, 1, 1, 600, 70, 72), .backward = true};
        check_on_threads(&r, weigh_one_key);
    }
}

/* Numbers that bf16's parts do not have, in rows and keys of several strips: what they give to d_q goes from strip to strip. */
static void make_numbers_far_from_one(rig *r) {
    const int64_t dim = r->p.dim_qk;
    CHECK(rig_make(r, 7));
    const struct {
        const void *data;
        int64_t row;
        double x;
    } numbers[] = {{r->f.v.data, 100, 1e30},   {r->f.v.data, 300, -1e9},  {r->f.v.data, 800, INFINITY},
                   {r->f.k.data, 520, 4e6},    {r->f.k.data, 1030, -5e9}, {r->f.q.data, 900, 3e10},
                   {r->f.d_o.data, 600, 1e25}, {r->f.d_o.data, 50, NAN},  {r->f.d_o.data, 1099, 1e8}};
    for (size_t n = 0; n < sizeof numbers / sizeof *numbers; n++)
        attn__store(r->p.dtype, (void *)(uintptr_t)numbers[n].data, numbers[n].row * dim + 3, numbers[n].x);
}

TEST(c5_threads_1_to_16_numbers_far_from_one) {
    rig r = {.p = problem(ATTN_F32, 1, 1, 1, 1100, 1100, 72), .backward = true};
    r.p.flags = ATTN_CAUSAL;
    check_on_threads(&r, make_numbers_far_from_one);
}

static void make_plainly(rig *r) { CHECK(rig_make(r, 6)); }

/* Rows 30 to 230 of the first 64 keys and 100 to 500 of the last: holes within and across tiles of 128 and of 256 rows. */
TEST(c5_threads_1_to_16_holes_across_tiles_of_rows) {
    static const attn_dtype dtypes[] = {ATTN_F32, ATTN_BF16};
    enum { KEYS = 330 };
    int32_t mask[2 * KEYS];
    for (int32_t j = 0; j < KEYS; j++) {
        mask[2 * j] = j < 64 ? 30 : j < 200 ? 600 : 100;
        mask[2 * j + 1] = j < 64 ? 230 : j < 200 ? 600 : 500;
    }
    for (size_t d = 0; d < sizeof dtypes / sizeof *dtypes; d++) {
        rig r = {.p = problem(dtypes[d], 1, 1, 1, 600, KEYS, 72), .backward = true};
        r.p.flags = ATTN_CAUSAL;
        r.p.flashmask_vectors = 2;
        r.p.flashmask_heads = 1;
        r.f.flashmask = mask;
        check_on_threads(&r, make_plainly);
    }
}
