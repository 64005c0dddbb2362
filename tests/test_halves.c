/*
 * Kernels of the cpu backend that take numbers apart (src/cpu/bf16.h), float32 in three parts and f16 in two, as a whole: above all what differs with the
 * number of parts. test_parts.c has what they are made of.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "build.h"
#include "numeric.h"
#include "test.h"

/* For each instruction set, and with kernels as they are taken by themselves; has_amx: may they be those of tiles? */
static void each_kernel(void (*body)(attn_context *context, bool has_amx)) {
    if (!on_host()) {
        test_skip("about kernels of the cpu backend; what GPUs do there is not tested");
        return;
    }
    const char *isa;
    for (int i = 0; (isa = cpu_isa(i)) != NULL; i++) {
        attn_context *context = make_cpu_context(isa, 2);
        body(context, strcmp(isa, "amx") == 0);
        attn_context_destroy(context);
    }
    use_isa(NULL);
    attn_context *context = make_context(ATTN_BACKEND_CPU, 2);
    body(context, strstr(attn_cpu_features(), "AMX") != NULL);
    attn_context_destroy(context);
}

/* f16: p add up to 1 but for the rounding of each, 2^-11 of it, and, where there is no AMX and lse is not restored, for what that is rounded by. */
static void large_scores(attn_context *context, bool has_amx) {
    static const int shapes[][3] = {{72, 130, 72}, {64, 130, 64}, {40, 130, 40}, {72, 40, 72}, {12, 130, 24}, {40, 8, 40}};
    for (int n = 0; n < 6 * 14; n++) {
        const int *shape = shapes[n % 6], power = n / 6, rows = shape[0], keys = shape[1], dim = shape[2];
        test_context("f16, %d rows, %d keys, %d dims, q and k times 2^%d", rows, keys, dim, power);
        rig r = {.p = problem(ATTN_F16, 1, 1, 1, rows, keys, dim), .backward = true};
        CHECK(rig_make(&r, (uint64_t)n));
        for (int x = 0; x < (rows + keys) * dim; x++) {
            uint16_t *at = (uint16_t *)(x < rows * dim ? r.f.q.data : r.f.k.data) + (x < rows * dim ? x : x - rows * dim);
            attn__store(ATTN_F16, at, 0, ldexp(attn__load(ATTN_F16, at, 0), power));
        }
        rig_one_hot(&r);
        CHECK_OK(rig_run(&r, context));
        for (int i = 0; i < rows; i++) {
            const double lse = has_amx ? 0 : rig_lse(&r, 0, i, 0);
            CHECK_CLOSE(rig_sum_of_p(&r, i), 1, 0x1p-11 + keys * 0x1p-25 + 1e-5 + expm1(0x1p-24 * fabs(lse)));
        }
        rig_free(&r);
    }
}
TEST(s01_gradients_of_large_halves) { each_kernel(large_scores); }

/*
 * Rows that see at most four keys, whose scores are what two terms of 2^20 leave: fwd.c has them in the forward, and so has the backward, or p would be off
 * by what sums in another order have.
 */
static void few_keys(attn_context *context, bool has_amx) {
    enum { N = 72 };
    (void)has_amx;
    for (int kind = 0; kind < 2; kind++) {
        test_context("f16, scores of terms that cancel, %s", kind ? "windows of four keys" : "causal");
        rig r = {.p = problem(ATTN_F16, 1, 1, 1, N, N, N), .backward = true};
        r.p.flags = kind ? ATTN_WINDOW : ATTN_CAUSAL;
        r.p.window_left = kind ? 3 : 0;
        CHECK(rig_make(&r, 31));
        for (int64_t i = 0; i < N; i++) {
            attn__store(ATTN_F16, r.f.q.data, i * N, 1024);
            attn__store(ATTN_F16, r.f.q.data, i * N + 1, 1024);
            attn__store(ATTN_F16, r.f.k.data, i * N, 1024);
            attn__store(ATTN_F16, r.f.k.data, i * N + 1, -1024);
        }
        rig_one_hot(&r);
        CHECK_OK(rig_run(&r, context));
        for (int i = 0; i < (kind ? N : 4); i++) CHECK_CLOSE(rig_sum_of_p(&r, i), 1, 0x1p-11 + 1e-5);
        rig_free(&r);
    }
}
TEST(s01_gradients_of_halves_of_few_keys) { each_kernel(few_keys); }

/* A row of d_o that is no number, and keys of three strips: d_q of the other rows has the bits that it has without. */
static void odd_row(attn_context *context, bool has_amx) {
    static const attn_dtype dtypes[] = {ATTN_F32, ATTN_F16, ATTN_BF16};
    enum { ROWS = 130, KEYS = 1100, D = 72, AT = 7 };
    (void)has_amx;
    for (int n = 0; n < 3; n++) {
        test_context("%s, an infinite row of d_o", attn_dtype_name(dtypes[n]));
        rig plain = {.p = problem(dtypes[n], 1, 1, 1, ROWS, KEYS, D), .backward = true}, r = plain;
        CHECK(rig_make(&plain, 32) && rig_make(&r, 32));
        attn__store(dtypes[n], r.f.d_o.data, AT * D + 3, INFINITY);
        CHECK_OK(rig_run(&plain, context));
        CHECK_OK(rig_run(&r, context));
        for (int32_t i = 0; i < ROWS; i++) {
            const void *with = rig_row(&r, &r.f.d_q, dtypes[n], 0, i, 0),
                       *without = rig_row(&plain, &plain.f.d_q, dtypes[n], 0, i, 0);
            if (i != AT) CHECK_SAY(memcmp(with, without, D * attn_dtype_size(dtypes[n])) == 0, "row %d", i);
            for (int x = 0; i == AT && x < D; x++) CHECK(!isfinite(attn__load(dtypes[n], with, x)));
        }
        rig_free(&plain);
        rig_free(&r);
    }
}
TEST(s09_infinite_row_of_d_o) { each_kernel(odd_row); }

/* Rows 32 to 96 do not see the first 64 keys, which rows before and after them do: what memory has in the place of their p is not added. */
static void holes(attn_context *context, bool has_amx) {
    static const attn_dtype dtypes[] = {ATTN_F32, ATTN_F16, ATTN_BF16};
    static const double bars[] = {2e-5, 4e-3, 3e-2};
    enum { ROWS = 128, KEYS = 512, D = 72 };
    int32_t mask[2 * KEYS];
    (void)has_amx;
    for (int32_t j = 0; j < KEYS; j++) {
        mask[2 * j] = j % 256 < 64 ? 32 : ROWS;
        mask[2 * j + 1] = j % 256 < 64 ? 96 : ROWS;
    }
    for (int n = 0; n < 3; n++) {
        test_context("%s, holes", attn_dtype_name(dtypes[n]));
        rig r = {.p = problem(dtypes[n], 1, 1, 1, ROWS, KEYS, D), .backward = true};
        r.p.flags = ATTN_CAUSAL;
        r.p.flashmask_vectors = 2;
        r.p.flashmask_heads = 1;
        CHECK(rig_make(&r, 33));
        memcpy((void *)(uintptr_t)r.f.flashmask, mask, sizeof mask);
        CHECK_OK(rig_run(&r, context));
        rig expected = rig_reference(&r, 33);
        rig_check_close(&r, &expected, bars[n]);
        rig_free(&expected);
        rig_free(&r);
    }
}
TEST(s06_holes_of_rows) { each_kernel(holes); }
