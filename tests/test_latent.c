/*
 * Latent attention (MLA): one cache whose rows are keys of 576 dims, and whose first 512 are the values. On a GPU with a kernel of its
 * own for it (decode_sm90.cu) these are the shapes that it takes, on all others a case of unequal dims.
 */
#define _GNU_SOURCE
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "build.h"
#include "numeric.h"
#include "test.h"

enum { DIM = 576, DIM_V = 512 };

static attn_problem latent(attn_dtype dtype, int32_t batch, int32_t heads, int32_t max_q, int32_t max_kv) {
    attn_problem p = problem(dtype, batch, heads, 1, max_q, max_kv, DIM);
    p.dim_v = DIM_V;
    return p;
}

/* rig_make, and v is k. */
static bool make(rig *r, uint64_t seed) {
    if (!rig_make(r, seed)) return false;
    r->f.v = r->f.k;
    return true;
}

/* Every sequence by itself, without the batch's flags. */
static void check_alone(attn_context *context, const rig *all, uint32_t flags) {
    for (int32_t b = 0; b < all->full.batch; b++) {
        rig alone = {.p = all->p};
        alone.p.flags = flags;
        alone.p.batch = 1;
        alone.p.total_q = alone.p.total_kv = 0;
        alone.p.page_size = alone.p.num_pages = alone.p.cache_batch = 0;
        alone.p.max_q = rig_sq(all, b);
        alone.p.max_kv = rig_sk(all, b);
        alone.f.sink = all->f.sink;
        if (!CHECK(make(&alone, 3))) return;
        rig_copy(&alone, 0, all, b);
        CHECK_OK(rig_run(&alone, context));
        CHECK_SAY(rig_same_rows(&alone, 0, all, b, rig_sq(all, b)), "sequence %d", b);
        rig_free(&alone);
    }
}

/* In pages, in another order, of which unused ones and positions hold NaN. */
static void check_pages(attn_context *context, const rig *flat, int32_t size) {
    const int32_t batch = flat->full.batch, each = (flat->full.max_kv + size - 1) / size, pages = batch * each + 3;
    rig paged = {.p = flat->p, .f = {.used_kv = flat->f.used_kv, .leftpad = flat->f.leftpad, .sink = flat->f.sink}};
    paged.p.page_size = size;
    paged.p.num_pages = pages;
    if (!CHECK(make(&paged, 4))) return;
    for (int32_t i = 0; i < batch * each; i++) ((int32_t *)(uintptr_t)paged.f.page_table)[i] = pages - 1 - i;
    fill_nan(paged.full.kv_dtype, paged.f.k.data, pages * size * DIM);
    for (int32_t b = 0; b < batch; b++) rig_copy(&paged, b, flat, b);
    CHECK_OK(rig_run(&paged, context));
    CHECK_SAY(rig_same(flat, &paged), "pages of %d", size);
    rig_free(&paged);
}

/* Within what the dtype allows of the reference in double. */
static void check_reference(const rig *r) {
    rig want = {.p = r->p, .f = r->f};
    attn_context *ref = make_context(ATTN_BACKEND_REF, 1);
    if (!CHECK(ref != NULL)) return;
    want.f.o = (attn_tensor){0};
    want.f.lse = NULL;
    CHECK(rig_make(&want, 5));
    CHECK_OK(rig_run(&want, ref));
    rig_check_close(r, &want, r->full.dtype == ATTN_BF16 ? 2e-2 : r->full.dtype == ATTN_F16 ? 3e-3 : 1e-4);
    rig_free(&want);
    attn_context_destroy(ref);
}

typedef struct shape {
    int32_t heads, rows, lengths[4];
    uint32_t flags;
    int32_t left; /* of a window */
    double softcap, scale;
    attn_dtype out_dtype;
} shape;

/* With NaN where there are no keys, before them and behind. */
static void check_shape(attn_context *context, attn_dtype dtype, const shape *x, uint64_t seed, int32_t page_size) {
    int32_t most = 0, used[4], leftpad[4];
    for (int b = 0; b < 4; b++) {
        leftpad[b] = (int32_t)(seed % 2) * b * 5;
        used[b] = x->lengths[b] + leftpad[b];
        if (used[b] > most) most = used[b];
    }
    rig r = {.p = latent(dtype, 4, x->heads, x->rows, most + 9)};
    r.p.flags = x->flags | ATTN_USED_KV | ATTN_LEFTPAD;
    r.p.window_left = x->left;
    r.p.softcap = x->softcap;
    r.p.scale = x->scale;
    r.p.out_dtype = x->out_dtype;
    r.f.used_kv = used;
    r.f.leftpad = leftpad;
    test_context("%s, %d heads, %d rows, keys %d %d %d %d, flags %x, seed %d", attn_dtype_name(dtype), x->heads, x->rows,
                 x->lengths[0], x->lengths[1], x->lengths[2], x->lengths[3], x->flags, (int)seed);
    if (!CHECK(make(&r, seed))) return;
    for (int32_t b = 0; b < 4; b++) {
        for (int32_t at = 0; at < leftpad[b]; at++) fill_nan(dtype, rig_key(&r, &r.f.k, dtype, b, at, 0), DIM);
        for (int32_t at = used[b]; at < most + 9; at++) fill_nan(dtype, rig_key(&r, &r.f.k, dtype, b, at, 0), DIM);
    }
    CHECK_OK(rig_run(&r, context));
    check_reference(&r);
    check_alone(context, &r, x->flags);
    check_pages(context, &r, page_size);
    rig_free(&r);
}

static void shapes(attn_context *context, attn_dtype dtype) {
    static const shape list[] = {
        {16, 1, {1100, 1, 0, 1024}, .flags = 0},
        {128, 1, {1300, 70, 3, 64}, .flags = ATTN_SINK},
        {8, 3, {1026, 65, 2, 2050}, .flags = ATTN_CAUSAL},
        {20, 5, {2100, 90, 1200, 7}, .flags = ATTN_CAUSAL | ATTN_WINDOW, .left = 300, .softcap = 20},
        {3, 16, {130, 17, 16, 15}, .flags = ATTN_CAUSAL | ATTN_SINK | ATTN_SCALE, .scale = -0.03, .out_dtype = ATTN_F32},
    };
    for (size_t n = 0; n < sizeof list / sizeof list[0] && dtype != ATTN_F64; n++)
        check_shape(context, dtype, &list[n], 2 + n, n % 2 ? 3 : 64);
}
TEST(c5_latent_cache_is_the_same_alone_and_in_pages) { each_cpu(shapes); }

/* ATTN_TEST_REPEAT of them. */
static void any_shapes(attn_context *context, attn_dtype dtype) {
    static const int32_t heads[] = {1, 5, 16, 24, 64, 128}, pages[] = {1, 7, 16, 64, 100};
    const char *wish = getenv("ATTN_TEST_REPEAT");
    const int times = wish ? atoi(wish) : 2;
    uint64_t random = 77;
    for (int n = 0; n < times && dtype != ATTN_F64; n++) {
        shape x = {.heads = heads[random_range(&random, 0, 5)]};
        const int32_t most = 160 / x.heads < 16 ? 160 / x.heads : 16;
        x.rows = random_range(&random, 0, 2) ? 1 : random_range(&random, 1, most);
        for (int b = 0; b < 4; b++) x.lengths[b] = random_range(&random, 0, random_range(&random, 0, 1) ? 140 : 2100);
        if (random_range(&random, 0, 1)) x.flags |= ATTN_CAUSAL;
        if (random_range(&random, 0, 3) == 0) x.flags |= ATTN_SINK;
        if (random_range(&random, 0, 2) == 0) x.flags |= ATTN_WINDOW, x.left = random_range(&random, 0, 1500);
        if (random_range(&random, 0, 3) == 0) x.softcap = 5;
        if (random_range(&random, 0, 3) == 0) x.flags |= ATTN_SCALE, x.scale = 0.01 * random_range(&random, -5, 5);
        if (random_range(&random, 0, 3) == 0) x.out_dtype = ATTN_F32;
        check_shape(context, dtype, &x, 100 + (uint64_t)n, pages[random_range(&random, 0, 4)]);
    }
}
TEST(c5_latent_caches_of_any_shape) { each_cpu(any_shapes); }

/* Beside sequences of more rows, which other kernels have, of none, and with queries and keys packed. */
static void packed(attn_context *context, attn_dtype dtype) {
    rig r = {.p = latent(dtype, 4, 4, 20, 1100)};
    if (dtype == ATTN_F64) return;
    r.p.flags = ATTN_CAUSAL | ATTN_VARLEN_Q | ATTN_VARLEN_KV;
    r.p.total_q = 25, r.p.total_kv = 1300;
    r.f.cu_q = (int32_t[]){0, 2, 22, 22, 25};
    r.f.cu_kv = (int32_t[]){0, 1100, 1140, 1150, 1300};
    if (!CHECK(make(&r, 6))) return;
    CHECK_OK(rig_run(&r, context));
    check_reference(&r);
    check_alone(context, &r, ATTN_CAUSAL);
    rig_free(&r);
}
TEST(c5_latent_sequences_that_are_packed_are_alone) { each_cpu(packed); }

/* v somewhere else, with the same numbers: another kernel, perhaps, and the same result. */
static void apart(attn_context *context, attn_dtype dtype) {
    rig a = {.p = latent(dtype, 2, 6, 2, 1100)}, b = a;
    if (dtype == ATTN_F64) return;
    if (!CHECK(make(&a, 7) && rig_make(&b, 8))) return;
    for (int32_t n = 0; n < 2; n++) rig_copy(&b, n, &a, n);
    CHECK_OK(rig_run(&a, context));
    CHECK_OK(rig_run(&b, context));
    rig_check_close(&a, &b, dtype == ATTN_BF16 ? 2e-2 : dtype == ATTN_F16 ? 3e-3 : 1e-4);
    rig_free(&a);
    rig_free(&b);
}
TEST(s09_latent_values_elsewhere) { each_cpu(apart); }

/* Rows that may not see the last keys do not see what is not finite there; those that do, do. */
static void nonfinite(attn_context *context, attn_dtype dtype) {
    rig a = {.p = latent(dtype, 1, 9, 4, 1090)};
    if (dtype == ATTN_F64) return;
    a.p.flags = ATTN_CAUSAL;
    rig b = a;
    if (!CHECK(make(&a, 9) && make(&b, 10))) return;
    rig_copy(&b, 0, &a, 0);
    for (int32_t n = 0; n < 2; n++) {
        attn__store(dtype, rig_key(&b, &b.f.k, dtype, 0, 1088 + n, 0), 5 + 300 * n, n ? NAN : INFINITY);
        attn__store(dtype, rig_key(&b, &b.f.k, dtype, 0, 1088 + n, 0), 511, -INFINITY);
    }
    CHECK_OK(rig_run(&a, context));
    CHECK_OK(rig_run(&b, context));
    CHECK(rig_same_rows(&a, 0, &b, 0, 2));
    for (int32_t h = 0; h < 9; h++) CHECK_SAY(isnan(rig_lse(&b, 0, 3, h)), "head %d", h);
    rig_free(&a);
    rig_free(&b);
}
TEST(c2_latent_nan_in_keys_that_some_rows_see) { each_cpu(nonfinite); }
