/*
 * The accuracy bars: relative RMS error against float64 for random inputs of variance 1, 4096 keys of dim 128, on every
 * instruction set. The error of a row does not depend on the other rows, so 96 of them stand for 4096. And few rows of float32,
 * which are worked in double: o and lse are what ref says, rounded once, and gradients are hardly worse.
 */
#define _GNU_SOURCE
#include <math.h>
#include <stdlib.h>

#include "build.h"
#include "numeric.h"
#include "test.h"

enum { ROWS = 96, KEYS = 4096, DIM = 128 };

/* RMS of a - b over RMS of b; b is float64. */
static double relative_rms(attn_dtype dtype, const void *a, const double *b, int64_t count) {
    double error = 0, size = 0;
    for (int64_t n = 0; n < count; n++) {
        double d = attn__load(dtype, a, n) - b[n];
        error += d * d;
        size += b[n] * b[n];
    }
    return sqrt(error / size);
}

/* The same numbers in float64; one sequence. */
static void widen(rig *to, const rig *from) {
    const attn_problem *p = &from->full;
    int64_t rows = (int64_t)p->heads_q * p->max_q, keys = (int64_t)p->heads_kv * p->max_kv;
    struct {
        void *to;
        const void *from;
        int64_t count;
    } const copies[] = {{to->f.q.data, from->f.q.data, rows * p->dim_qk},
                        {to->f.k.data, from->f.k.data, keys * p->dim_qk},
                        {to->f.v.data, from->f.v.data, keys * p->dim_v},
                        {to->f.d_o.data, from->f.d_o.data, rows * p->dim_v}};
    for (int c = 0; c < 4; c++)
        for (int64_t n = 0; n < copies[c].count; n++) ((double *)copies[c].to)[n] = attn__load(p->dtype, copies[c].from, n);
    for (int64_t n = 0; n < rows; n++) ((double *)(uintptr_t)to->f.d_lse)[n] = ((const float *)from->f.d_lse)[n];
    to->f.alibi = from->f.alibi; /* float in either */
    to->f.sink = from->f.sink;
}

/*
 * Runs `want` on ref, then `have` on each instruction set, and has them compared each time. wide: the numbers of `want` are those of
 * `have`. Both are freed.
 */
static void on_each_isa(const char *name, rig *want, rig *have, bool wide, const double *bars,
                        void (*compare)(const rig *want, const rig *have, const double *bars)) {
    attn_context *ref = make_context(ATTN_BACKEND_REF, 1);
    if (wide) widen(want, have);
    CHECK_OK(rig_run(want, ref));
    attn_context_destroy(ref);
    const char *isa;
    for (int n = 0; (isa = cpu_isa(n)) != NULL; n++) {
        test_context("%s, %s", isa, name);
        attn_context *cpu = make_cpu_context(isa, 2);
        rig_reset(have, 0xA5);
        CHECK_OK(rig_run(have, cpu));
        compare(want, have, bars);
        attn_context_destroy(cpu);
        use_isa(NULL);
    }
    rig_free(want);
    rig_free(have);
}

static void compare_by_bars(const rig *want, const rig *have, const double *bars) {
    struct {
        const char *name;
        const void *narrow, *wide;
        int64_t count;
        double bar;
    } const outputs[] = {{"o", have->f.o.data, want->f.o.data, ROWS * DIM, bars[0]},
                         {"d_q", have->f.d_q.data, want->f.d_q.data, ROWS * DIM, bars[1]},
                         {"d_k", have->f.d_k.data, want->f.d_k.data, KEYS * DIM, bars[1]},
                         {"d_v", have->f.d_v.data, want->f.d_v.data, KEYS * DIM, bars[1]}};
    for (int o = 0; o < 4; o++) {
        double rms = relative_rms(have->p.dtype, outputs[o].narrow, outputs[o].wide, outputs[o].count);
        CHECK_SAY(rms <= outputs[o].bar, "%s: relative RMS %.3g, may be %.3g", outputs[o].name, rms, outputs[o].bar);
    }
    for (int i = 0; i < ROWS; i++) CHECK_CLOSE(rig_lse(have, 0, i, 0), rig_lse(want, 0, i, 0), 2e-6);
}

/* Bars of o and of the gradients. Those of f16 and bf16 start from an o and a gradient that are rounded themselves. */
static void check_bars(attn_dtype dtype, double o_bar, double gradient_bar) {
    rig narrow = {.p = problem(dtype, 1, 1, 1, ROWS, KEYS, DIM), .backward = true};
    rig wide = {.p = problem(ATTN_F64, 1, 1, 1, ROWS, KEYS, DIM), .backward = true};
    CHECK(rig_make(&narrow, 1) && rig_make(&wide, 1));
    on_each_isa(attn_dtype_name(dtype), &wide, &narrow, true, (double[]){o_bar, gradient_bar}, compare_by_bars);
}

TEST(accuracy_f32_1e_6_and_gradients_5e_6) { check_bars(ATTN_F32, 1e-6, 5e-6); }
TEST(accuracy_f16_2_9e_4) { check_bars(ATTN_F16, 2.9e-4, 5.8e-4); }
TEST(accuracy_bf16_2_3e_3) { check_bars(ATTN_BF16, 2.3e-3, 4.6e-3); }

/* o and lse of b, in float32, against a: the same or the next number, and hardly ever the next. */
static void compare_rounded_once(const rig *a, const rig *b, const double *bars) {
    (void)bars;
    int64_t elements = (int64_t)a->p.heads_q * a->p.max_q * a->full.dim_v, rows = (int64_t)a->p.heads_q * a->p.max_q,
            others = 0;
    for (int64_t n = 0; n < elements + rows; n++) {
        float want = n < elements ? ((const float *)a->f.o.data)[n] : ((const float *)a->f.lse)[n - elements];
        float have = n < elements ? ((const float *)b->f.o.data)[n] : ((const float *)b->f.lse)[n - elements];
        if (have == want) continue;
        others++;
        if (!CHECK_SAY(have == nextafterf(want, have), "number %lld is %.9g, want %.9g", (long long)n, (double)have,
                       (double)want))
            return;
    }
    CHECK_SAY(others * 10000 <= elements + rows, "%lld of %lld numbers are not the nearest", (long long)others,
              (long long)(elements + rows));
}

static const struct {
    const char *name;
    int32_t heads_q, heads_kv, sq, sk, dim;
    uint32_t flags;
    double softcap, dropout;
} few_rows[] = {
    {"ALiBi", 2, 2, 3, 799, 80, ATTN_ALIBI, 0, 0.17},
    {"window", 2, 2, 3, 799, 224, ATTN_WINDOW, 50, 0.17},
    {"softcap", 4, 1, 1, 130, 59, 0, 2, 0},
    {"dim 1", 2, 1, 2, 17, 1, 0, 0, 0},
    {"groups of 8", 8, 1, 4, 2500, 64, ATTN_CAUSAL, 0, 0},
    {"sink", 8, 1, 1, 2500, 128, ATTN_CAUSAL | ATTN_SINK, 0, 0},
    {"groups of 12", 12, 1, 1, 300, 40, ATTN_CAUSAL, 0.5, 0},
};
enum { FEW_ROWS = sizeof few_rows / sizeof few_rows[0] };

static rig few_rows_rig(size_t c, attn_dtype dtype) {
    rig r = {
        .p = problem(dtype, 1, few_rows[c].heads_q, few_rows[c].heads_kv, few_rows[c].sq, few_rows[c].sk, few_rows[c].dim)};
    r.p.flags = few_rows[c].flags;
    r.p.softcap = few_rows[c].softcap;
    r.p.dropout = few_rows[c].dropout;
    if (r.p.flags & ATTN_WINDOW) r.p.window_left = 37, r.p.window_right = 21;
    return r;
}

TEST(accuracy_f32_of_few_rows_is_rounded_once) {
    for (size_t c = 0; c < FEW_ROWS; c++) {
        rig want = few_rows_rig(c, ATTN_F32), have = want;
        have.p.flags |= ATTN_PRECISE_FEW;
        CHECK(rig_make(&want, c + 1) && rig_make(&have, c + 1));
        on_each_isa(few_rows[c].name, &want, &have, false, NULL, compare_rounded_once);
    }
}

/*
 * In float alone they keep to the bar of many rows. ALiBi makes scores of any size: one of size S is rounded by up to 2^-24 S, which is the
 * relative error of its weight. Scores are up to 1430 here, so 1e-4 would be no surprise, but rows of such scores weigh one key or two:
 * the error is 7.5e-6 where products of slopes are rounded by themselves, 2.8e-6 where they are fused, and is not to grow unnoticed.
 */
static void compare_o(const rig *want, const rig *have, const double *bars) {
    int64_t rows = (int64_t)want->p.heads_q * want->p.max_q;
    double o = relative_rms(ATTN_F32, have->f.o.data, want->f.o.data, rows * want->full.dim_v);
    CHECK_SAY(o <= bars[0], "o: relative RMS %.3g, may be %.3g", o, bars[0]);
}

TEST(accuracy_f32_of_few_rows_by_itself) {
    for (size_t c = 0; c < FEW_ROWS; c++) {
        rig want = few_rows_rig(c, ATTN_F64), have = few_rows_rig(c, ATTN_F32);
        double bar = few_rows[c].flags & ATTN_ALIBI ? 1.2e-5 : 1e-6;
        want.backward = have.backward = true; /* widen wants d_o */
        CHECK(rig_make(&want, c + 1) && rig_make(&have, c + 1));
        on_each_isa(few_rows[c].name, &want, &have, true, &bar, compare_o);
    }
}

/*
 * Gradients of few rows, against those of float64. Rounding to float32 alone makes a relative RMS of 2.4e-8: so d_v is rounded
 * once. To d_q and d_k comes what the rounding of the given o does by way of delta.
 */
static void compare_few_rows(const rig *want, const rig *have, const double *bars) {
    int64_t rows = (int64_t)want->p.heads_q * want->p.max_q, keys = (int64_t)want->p.heads_kv * want->p.max_kv;
    double d_q = relative_rms(ATTN_F32, have->f.d_q.data, want->f.d_q.data, rows * want->full.dim_qk);
    double d_k = relative_rms(ATTN_F32, have->f.d_k.data, want->f.d_k.data, keys * want->full.dim_qk);
    double d_v = relative_rms(ATTN_F32, have->f.d_v.data, want->f.d_v.data, keys * want->full.dim_v);
    (void)bars;
    CHECK_SAY(d_v <= 3e-8, "d_v: relative RMS %.3g, may be 3e-8", d_v);
    CHECK_SAY(d_q <= 1.2e-7 && d_k <= 1.2e-7, "d_q, d_k: relative RMS %.3g, %.3g, may be 1.2e-7", d_q, d_k);
    for (int32_t h = 0; (want->p.flags & ATTN_SINK) && h < want->p.heads_q; h++)
        CHECK_CLOSE((double)have->f.d_sink[h], (double)want->f.d_sink[h], 1e-7);
}

TEST(accuracy_f32_gradients_of_few_rows) {
    for (size_t c = 0; c < FEW_ROWS; c++) {
        rig want = few_rows_rig(c, ATTN_F64), have = few_rows_rig(c, ATTN_F32);
        have.p.flags |= ATTN_PRECISE_FEW;
        want.backward = have.backward = true;
        CHECK(rig_make(&want, c + 1) && rig_make(&have, c + 1));
        on_each_isa(few_rows[c].name, &want, &have, true, NULL, compare_few_rows);
    }
}

/*
 * Many rows, each of which weighs few keys, and few rows weigh each key: those are done in double. So o and lse are rounded once, and
 * so is d_v, with ATTN_PRECISE_FEW; without it they are not.
 */
static const struct {
    const char *name;
    int32_t heads_q, heads_kv, sq, sk, dim;
    uint32_t flags;
    double softcap, dropout;
} few_keys[] = {
    {"window", 2, 2, 300, 200, 32, ATTN_WINDOW, 0, 0},
    {"groups", 6, 2, 100, 130, 59, ATTN_WINDOW | ATTN_CAUSAL | ATTN_SINK, 50, 0.17},
    {"short", 3, 1, 10, 1500, 64, ATTN_WINDOW, 0, 0},
    {"steep", 2, 1, 70, 600, 96, ATTN_ALIBI, 0, 0},
    {"strips", 2, 2, 1100, 1100, 40, ATTN_WINDOW, 2, 0},
};
enum { FEW_KEYS = sizeof few_keys / sizeof few_keys[0] };

static const float steep[] = {1.1F, 0.9F};

static rig few_keys_rig(size_t c, attn_dtype dtype) {
    rig r = {
        .p = problem(dtype, 1, few_keys[c].heads_q, few_keys[c].heads_kv, few_keys[c].sq, few_keys[c].sk, few_keys[c].dim)};
    r.p.flags = few_keys[c].flags;
    r.p.softcap = few_keys[c].softcap;
    r.p.dropout = few_keys[c].dropout;
    if (r.p.flags & ATTN_WINDOW) r.p.window_left = 4, r.p.window_right = 2;
    if (r.p.flags & ATTN_ALIBI) r.f.alibi = steep;
    return r;
}

TEST(accuracy_f32_of_few_keys_is_rounded_once) {
    for (size_t c = 0; c < FEW_KEYS; c++) {
        rig want = few_keys_rig(c, ATTN_F32), have = want;
        have.p.flags |= ATTN_PRECISE_FEW;
        CHECK(rig_make(&want, c + 1) && rig_make(&have, c + 1));
        on_each_isa(few_keys[c].name, &want, &have, false, NULL, compare_rounded_once);
    }
}

static void compare_d_v(const rig *want, const rig *have, const double *bars) {
    int64_t keys = (int64_t)want->p.heads_kv * want->p.max_kv;
    double d_v = relative_rms(ATTN_F32, have->f.d_v.data, want->f.d_v.data, keys * want->full.dim_v);
    bool single = !(have->p.flags & ATTN_PRECISE_FEW);
    CHECK_SAY(single ? d_v > bars[0] : d_v <= bars[0], "d_v: relative RMS %.3g, bar %.3g%s", d_v, bars[0],
              single ? " is for double" : "");
}

TEST(accuracy_f32_d_v_of_few_keys_is_rounded_once) {
    for (size_t c = 0; c < 2 * FEW_KEYS; c++) {
        rig want = few_keys_rig(c / 2, ATTN_F64), have = few_keys_rig(c / 2, ATTN_F32);
        want.backward = have.backward = true;
        if (c % 2 == 0) have.p.flags |= ATTN_PRECISE_FEW;
        CHECK(rig_make(&want, c + 1) && rig_make(&have, c + 1));
        on_each_isa(few_keys[c / 2].name, &want, &have, true, (double[]){3.6e-8}, compare_d_v);
    }
}

/*
 * By ALiBi, keys far away have scores of -60 and gradients that are small, and wanted as exactly as others: each row of d_v by its
 * own size, against float64. Where the scores are rounded to float32 the worst row is off by 2e-6, otherwise by 5e-7.
 */
static void compare_rows_of_d_v(const rig *want, const rig *have, const double *bars) {
    int32_t dim = want->full.dim_v;
    double worst = 0;
    for (int64_t j = 0; j < want->p.max_kv; j++)
        worst = fmax(worst, relative_rms(ATTN_F32, (const float *)have->f.d_v.data + j * dim,
                                         (const double *)want->f.d_v.data + j * dim, dim));
    CHECK_SAY(worst <= bars[0], "d_v: a row is off by %.3g, may be by %.3g", worst, bars[0]);
}

TEST(accuracy_f32_gradients_of_keys_far_away) {
    rig want = {.p = problem(ATTN_F64, 1, 1, 1, 64, 300, 32), .backward = true}, have = want;
    have.p.dtype = ATTN_F32;
    want.p.flags = have.p.flags = ATTN_ALIBI;
    want.f.alibi = have.f.alibi = (float[]){0.2305F}; /* its products with distances have to be rounded */
    CHECK(rig_make(&want, 1) && rig_make(&have, 1));
    on_each_isa("ALiBi", &want, &have, true, (double[]){1e-6}, compare_rows_of_d_v);
}
