/*
 * The accuracy bars: relative RMS error against float64 for random inputs of variance 1, 4096 keys of dim 128, on every
 * instruction set. The error of a row does not depend on the other rows, so 96 of them stand for 4096.
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

/* The same numbers in float64. */
static void widen(rig *to, const rig *from) {
    struct {
        void *to;
        const void *from;
        int64_t count;
    } const copies[] = {{to->f.q.data, from->f.q.data, ROWS * DIM},
                        {to->f.k.data, from->f.k.data, KEYS * DIM},
                        {to->f.v.data, from->f.v.data, KEYS * DIM},
                        {to->f.d_o.data, from->f.d_o.data, ROWS * DIM}};
    for (int c = 0; c < 4; c++)
        for (int64_t n = 0; n < copies[c].count; n++)
            ((double *)copies[c].to)[n] = attn__load(from->full.dtype, copies[c].from, n);
    for (int n = 0; n < ROWS; n++) ((double *)(uintptr_t)to->f.d_lse)[n] = ((const float *)from->f.d_lse)[n];
}

/* Bars of o and of the gradients. Those of f16 and bf16 start from an o and a gradient that are rounded themselves. */
static void check_bars(attn_dtype dtype, double o_bar, double gradient_bar) {
    rig narrow = {.p = problem(dtype, 1, 1, 1, ROWS, KEYS, DIM), .backward = true};
    rig wide = {.p = problem(ATTN_F64, 1, 1, 1, ROWS, KEYS, DIM), .backward = true};
    attn_context *ref = make_context(ATTN_BACKEND_REF, 1);
    CHECK(rig_make(&narrow, 1) && rig_make(&wide, 1));
    widen(&wide, &narrow);
    CHECK_OK(rig_run(&wide, ref));
    const char *isa;
    for (int n = 0; (isa = cpu_isa(n)) != NULL; n++) {
        test_context("%s %s", isa, attn_dtype_name(dtype));
        attn_context *cpu = make_cpu_context(isa, 2);
        rig_reset(&narrow, 0xA5);
        CHECK_OK(rig_run(&narrow, cpu));
        struct {
            const char *name;
            const void *narrow, *wide;
            int64_t count;
            double bar;
        } const outputs[] = {{"o", narrow.f.o.data, wide.f.o.data, ROWS * DIM, o_bar},
                             {"d_q", narrow.f.d_q.data, wide.f.d_q.data, ROWS * DIM, gradient_bar},
                             {"d_k", narrow.f.d_k.data, wide.f.d_k.data, KEYS * DIM, gradient_bar},
                             {"d_v", narrow.f.d_v.data, wide.f.d_v.data, KEYS * DIM, gradient_bar}};
        for (int o = 0; o < 4; o++) {
            double rms = relative_rms(dtype, outputs[o].narrow, outputs[o].wide, outputs[o].count);
            CHECK_SAY(rms <= outputs[o].bar, "%s: relative RMS %.3g, may be %.3g", outputs[o].name, rms, outputs[o].bar);
        }
        for (int i = 0; i < ROWS; i++) CHECK_CLOSE(rig_lse(&narrow, 0, i, 0), rig_lse(&wide, 0, i, 0), 2e-6);
        attn_context_destroy(cpu);
        use_isa(NULL);
    }
    attn_context_destroy(ref);
    rig_free(&narrow);
    rig_free(&wide);
}

TEST(accuracy_f32_1e_6_and_gradients_5e_6) { check_bars(ATTN_F32, 1e-6, 5e-6); }
TEST(accuracy_f16_2_9e_4) { check_bars(ATTN_F16, 2.9e-4, 5.8e-4); }
TEST(accuracy_bf16_2_3e_3) { check_bars(ATTN_BF16, 2.3e-3, 4.6e-3); }
