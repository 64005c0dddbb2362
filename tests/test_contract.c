/*
 * The contract of attn.h, C1 to C6, on every instruction set of the cpu backend and every float dtype. The bitwise half of
 * C5 is in test_bitwise.c, C3 in test_invalid.c.
 */
#define _GNU_SOURCE
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "build.h"
#include "numeric.h"
#include "schedule.h"
#include "test.h"

/* ---- C1: rows without a key ---- */

static bool all_zero(attn_dtype dtype, const void *row, int32_t dim) {
    for (int32_t x = 0; x < dim; x++)
        if (attn__load(dtype, row, x) != 0) return false;
    return true;
}

static bool all_finite(attn_dtype dtype, const void *data, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (!isfinite(attn__load(dtype, data, i))) return false;
    return true;
}

/* Row i of sequence b has no key: zero, -inf, zero; in every head. */
static void check_row_is_empty(const rig *r, int32_t b, int32_t i) {
    const attn_problem *p = &r->full;
    for (int32_t h = 0; h < p->heads_q; h++) {
        CHECK(all_zero(p->out_dtype, rig_row(r, &r->f.o, p->out_dtype, b, i, h), p->dim_v));
        CHECK(rig_lse(r, b, i, h) == -INFINITY);
        if (r->backward) CHECK(all_zero(p->dtype, rig_row(r, &r->f.d_q, p->dtype, b, i, h), p->dim_qk));
    }
}

static void check_finite_gradients(const rig *r) {
    const attn_problem *p = &r->full;
    int64_t rows = (int64_t)p->batch * p->max_q * p->heads_q, keys = (int64_t)p->batch * p->max_kv * p->heads_kv;
    CHECK(all_finite(p->dtype, r->f.d_q.data, rows * p->dim_qk));
    CHECK(all_finite(p->kv_dtype, r->f.d_k.data, keys * p->dim_qk));
    CHECK(all_finite(p->kv_dtype, r->f.d_v.data, keys * p->dim_v));
}

static void causal_rows_before_the_first_key(attn_context *context, attn_dtype dtype) {
    rig r = {.p = problem(dtype, 1, 2, 1, 90, 20, 24), .backward = true};
    r.p.flags = ATTN_CAUSAL;
    CHECK(rig_make(&r, 1));
    CHECK_OK(rig_run(&r, context));
    for (int32_t i = 0; i < 70; i++) check_row_is_empty(&r, 0, i);
    CHECK(isfinite(rig_lse(&r, 0, 70, 0)));
    check_finite_gradients(&r);
    rig_free(&r);
}
TEST(c1_causal_row_before_the_first_key_gives_zero) { each_cpu(causal_rows_before_the_first_key); }

static void no_keys_at_all(attn_context *context, attn_dtype dtype) {
    rig r = {.p = problem(dtype, 3, 2, 2, 9, 40, 16), .backward = true};
    r.p.flags = ATTN_USED_KV | ATTN_SINK | ATTN_BIAS;
    r.f.used_kv = (int32_t[]){40, 0, 5};
    CHECK(rig_make(&r, 2));
    CHECK_OK(rig_run(&r, context));
    for (int32_t i = 0; i < 9; i++) check_row_is_empty(&r, 1, i);
    for (int32_t h = 0; h < 2; h++) CHECK(isfinite(r.f.d_sink[h]));
    check_finite_gradients(&r);
    rig_free(&r);
}
TEST(c1_row_without_key_gives_zero_with_a_sink_too) { each_cpu(no_keys_at_all); }

static void keys_masked_by_flashmask(attn_context *context, attn_dtype dtype) {
    enum { S = 70 };
    rig r = {.p = problem(dtype, 1, 2, 1, S, S, 16), .backward = true};
    r.p.flashmask_vectors = 2;
    int32_t flash[S][2];
    for (int j = 0; j < S; j++) { /* every key masks rows from 40 on; odd ones mask all rows */
        flash[j][0] = 40;
        flash[j][1] = j % 2 ? S : 0;
    }
    r.f.flashmask = &flash[0][0];
    CHECK(rig_make(&r, 3));
    CHECK_OK(rig_run(&r, context));
    for (int32_t i = 40; i < S; i++) check_row_is_empty(&r, 0, i);
    for (int32_t j = 1; j < S && r.backward; j += 2) { /* a key that no row sees */
        CHECK(all_zero(dtype, rig_key(&r, &r.f.d_k, dtype, 0, j, 0), 16));
        CHECK(all_zero(dtype, rig_key(&r, &r.f.d_v, dtype, 0, j, 0), 16));
    }
    check_finite_gradients(&r);
    rig_free(&r);
}
TEST(c1_flashmask_row_and_key_without_partner_give_zero) { each_cpu(keys_masked_by_flashmask); }

/* FlashMask hides rows, some or all, but their lse is of other keys, too, and finite: zero gradients nevertheless. */
static void hidden_rows_with_an_lse(attn_context *context, attn_dtype dtype) {
    enum { S = 300 };
    for (int32_t n = 0, dim; (dim = wide_dim(n)) != 0; n++) {
        for (int32_t seen = 0; seen <= 140; seen += 140) {
            rig r = {.p = problem(dtype, 1, 2, 1, S, S, dim), .backward = true};
            int32_t flash[S];
            for (int j = 0; j < S; j++) flash[j] = seen; /* rows from there on are masked */
            r.p.flags = ATTN_CAUSAL;
            r.p.flashmask_vectors = 1;
            r.f.flashmask = flash;
            CHECK(rig_make(&r, 16));
            CHECK_OK(rig_run(&r, context));
            for (int32_t i = 0; i < 2 * S; i++) attn__store(dtype == ATTN_F64 ? ATTN_F64 : ATTN_F32, r.f.lse, i, 3);
            CHECK_OK(rig_run_op(&r, context, ATTN_BACKWARD, rig_backward_buffers(&r)));
            for (int32_t i = seen; i < S; i++)
                for (int32_t h = 0; h < 2; h++) CHECK(all_zero(dtype, rig_row(&r, &r.f.d_q, dtype, 0, i, h), dim));
            check_finite_gradients(&r);
            rig_free(&r);
        }
    }
}
TEST(c1_rows_hidden_by_flashmask_give_zero_gradients_whatever_lse_is) { each_cpu(hidden_rows_with_an_lse); }

static void window_past_the_end(attn_context *context, attn_dtype dtype) {
    rig r = {.p = problem(dtype, 1, 1, 1, 40, 90, 8), .backward = true};
    r.p.flags = ATTN_WINDOW | ATTN_SINK;
    r.p.window_left = 3, r.p.window_right = 0;
    r.p.max_q = 120; /* 30 rows before the first key */
    CHECK(rig_make(&r, 4));
    CHECK_OK(rig_run(&r, context));
    for (int32_t i = 0; i < 30; i++) check_row_is_empty(&r, 0, i);
    CHECK(isfinite(rig_lse(&r, 0, 30, 0)));
    check_finite_gradients(&r);
    rig_free(&r);
}
TEST(c1_window_without_key_gives_zero) { each_cpu(window_past_the_end); }

static void minus_infinity_everywhere(attn_context *context, attn_dtype dtype) {
    rig r = {.p = problem(dtype, 1, 1, 1, 5, 70, 8), .backward = true};
    r.p.flags = ATTN_BIAS;
    CHECK(rig_make(&r, 5));
    for (int32_t j = 0; j < 70; j++) attn__store(dtype, r.f.bias.data, 2 * 70 + j, -INFINITY);
    CHECK_OK(rig_run(&r, context));
    check_row_is_empty(&r, 0, 2);
    check_finite_gradients(&r);
    rig_free(&r);
}
TEST(c1_bias_of_minus_infinity_for_a_whole_row_gives_zero) { each_cpu(minus_infinity_everywhere); }

/* Keys of -inf: every score is, and no p = 0 may meet the infinity in the gradients. Few rows, and many; one strip of keys, and two. */
static void keys_of_minus_infinity(attn_context *context, attn_dtype dtype) {
    static const int32_t rows[] = {3, 73, 20}, keys[] = {70, 70, 600};
    for (int n = 0; n < 3; n++) {
        rig r = {.p = problem(dtype, 1, 2, 1, rows[n], keys[n], 16), .backward = true};
        CHECK(rig_make(&r, 14));
        for (int64_t x = 0; x < rows[n] * 2 * 16; x++) attn__store(dtype, r.f.q.data, x, 1);
        for (int64_t x = 0; x < keys[n] * 16; x++) attn__store(dtype, r.f.k.data, x, -INFINITY);
        CHECK_OK(rig_run(&r, context));
        for (int32_t i = 0; i < rows[n]; i++) check_row_is_empty(&r, 0, i);
        check_finite_gradients(&r);
        rig_free(&r);
    }
}
TEST(c1_keys_of_minus_infinity_give_zero) { each_cpu(keys_of_minus_infinity); }

/*
 * Where GPUs have kernels of their own: sequences without rows or without keys, rows before the first key, keys after the last row's
 * window. Zeros are zeros exactly.
 */
static void wide_empty_rows_and_keys(attn_context *context, attn_dtype dtype) {
    for (int32_t n = 0, dim; (dim = wide_dim(n)) != 0; n++) {
        rig r = {.p = problem(dtype, 4, 4, 2, 150, 170, dim), .backward = true};
        r.p.flags = ATTN_VARLEN_Q | ATTN_VARLEN_KV | ATTN_CAUSAL | ATTN_WINDOW;
        r.p.window_left = 20;
        r.p.total_q = 250, r.p.total_kv = 330;
        r.f.cu_q = (int32_t[]){0, 0, 70, 220, 250};
        r.f.cu_kv = (int32_t[]){0, 90, 90, 160, 330};
        CHECK(rig_make(&r, 15));
        CHECK_OK(rig_run(&r, context));
        for (int32_t i = 0; i < 70; i++) check_row_is_empty(&r, 1, i); /* no keys */
        for (int32_t i = 0; i < 80; i++) check_row_is_empty(&r, 2, i); /* 150 rows, 70 keys */
        CHECK(isfinite(rig_lse(&r, 2, 80, 3)) && isfinite(rig_lse(&r, 3, 0, 3)));
        const int32_t unseen[][2] = {{0, 90}, {3, 120}}; /* no rows; 30 rows, of which the first sees keys from 120 on */
        for (int u = 0; u < 2; u++)
            for (int32_t j = 0; j < 2 * unseen[u][1]; j++) {
                CHECK(all_zero(dtype, rig_key(&r, &r.f.d_k, dtype, unseen[u][0], j / 2, j % 2), dim));
                CHECK(all_zero(dtype, rig_key(&r, &r.f.d_v, dtype, unseen[u][0], j / 2, j % 2), dim));
            }
        CHECK(all_finite(dtype, r.f.d_q.data, (int64_t)250 * 4 * dim));
        CHECK(all_finite(dtype, r.f.d_k.data, (int64_t)330 * 2 * dim));
        CHECK(all_finite(dtype, r.f.d_v.data, (int64_t)330 * 2 * dim));
        rig_free(&r);
    }
}
TEST(c1_rows_and_keys_without_partner_of_large_dims_give_zero) { each_cpu(wide_empty_rows_and_keys); }

/* ---- C2: memory that does not count ---- */

/* Makes the rig twice, runs the second one with `poison` applied to its inputs, and compares every output bit. */
static void check_poison(attn_context *context, const rig *form, void (*poison)(rig *r)) {
    rig clean = *form, poisoned = *form;
    CHECK(rig_make(&clean, 7) && rig_make(&poisoned, 7));
    clean.clean_workspace = true;
    poison(&poisoned);
    CHECK_OK(rig_run(&clean, context));
    CHECK_OK(rig_run(&poisoned, context));
    CHECK(rig_same(&clean, &poisoned));
    rig_free(&clean);
    rig_free(&poisoned);
}

/* NaN in every row of sequence b from sq on, and in every cache position outside its keys. */
static void poison_padding(rig *r) {
    const attn_problem *p = &r->full;
    for (int32_t b = 0; b < p->batch; b++) {
        attn_seq s = attn__seq(p, &r->f, b);
        for (int32_t h = 0; h < p->heads_q; h++)
            for (int32_t i = s.sq; i < p->max_q; i++) {
                fill_nan(p->dtype, rig_row(r, &r->f.q, p->dtype, b, i, h), p->dim_qk);
                if (!r->backward) continue;
                fill_nan(p->out_dtype, rig_row(r, &r->f.d_o, p->out_dtype, b, i, h), p->dim_v);
                fill_nan(attn__wide(p->dtype) ? ATTN_F64 : ATTN_F32,
                         (char *)(void *)r->f.d_lse + attn__lse_index(p, &s, i, h) * (attn__wide(p->dtype) ? 8 : 4), 1);
            }
        for (int32_t h = 0; h < p->heads_kv; h++)
            for (int32_t t = 0; t < p->max_kv; t++) {
                if (t >= s.leftpad && t < s.leftpad + s.sk) continue;
                fill_nan(p->kv_dtype, rig_key(r, &r->f.k, p->kv_dtype, b, t, h), p->dim_qk);
                fill_nan(p->kv_dtype, rig_key(r, &r->f.v, p->kv_dtype, b, t, h), p->dim_v);
            }
    }
}

/* Head dims past 64 have kernels that work another way on some GPUs, for 16-bit dtypes. */
static int32_t most_dim(attn_dtype dtype) { return attn_dtype_size(dtype) == 2 ? 128 : 63; }

static void nan_in_padding(attn_context *context, attn_dtype dtype) {
    for (int32_t dim = 40; dim <= most_dim(dtype); dim += 88) {
        rig r = {.p = problem(dtype, 4, 4, 2, 70, 150, dim), .backward = true};
        r.p.flags = ATTN_USED_Q | ATTN_USED_KV | ATTN_LEFTPAD | ATTN_CAUSAL;
        r.f.used_q = (int32_t[]){70, 1, 0, 33};
        r.f.used_kv = (int32_t[]){149, 65, 20, 0};
        r.f.leftpad = (int32_t[]){1, 30, 20, 0};
        check_poison(context, &r, poison_padding);
    }
}
TEST(c2_nan_in_padding) { each_cpu(nan_in_padding); }

static void nan_in_decode_padding(attn_context *context, attn_dtype dtype) {
    rig r = {.p = problem(dtype, 2, 4, 1, 1, 3000, 16)};
    r.p.flags = ATTN_USED_KV;
    r.f.used_kv = (int32_t[]){2999, 1027};
    check_poison(context, &r, poison_padding);
}
TEST(c2_nan_in_padding_of_a_split_decode) { each_cpu(nan_in_decode_padding); }

/* Pages in reverse order; what lies past the used length is NaN and its page ids are nonsense. */
static void poison_pages(rig *r) {
    const attn_problem *p = &r->full;
    int64_t per_slot = attn__pages_per_slot(p, &r->f), elements = (int64_t)p->page_size * p->heads_kv;
    for (int32_t page = 0; page < p->num_pages; page++) { /* keep a copy of what is used, poison all, put it back */
        char *k = (char *)r->f.k.data + page * elements * p->dim_qk * (int64_t)attn_dtype_size(p->kv_dtype);
        char *v = (char *)r->f.v.data + page * elements * p->dim_v * (int64_t)attn_dtype_size(p->kv_dtype);
        int32_t used = 0; /* positions of this page that are some sequence's keys */
        for (int32_t b = 0; b < p->batch; b++)
            for (int32_t n = 0; n * p->page_size < r->f.used_kv[b]; n++)
                if (r->f.page_table[b * per_slot + n] == page)
                    used = attn__min32(p->page_size, r->f.used_kv[b] - n * p->page_size);
        int64_t kept = (int64_t)used * p->heads_kv, row = (int64_t)attn_dtype_size(p->kv_dtype);
        fill_nan(p->kv_dtype, k + kept * p->dim_qk * row, (int32_t)((elements - kept) * p->dim_qk));
        fill_nan(p->kv_dtype, v + kept * p->dim_v * row, (int32_t)((elements - kept) * p->dim_v));
    }
    for (int32_t b = 0; b < p->batch; b++)
        for (int64_t n = 0; n < per_slot; n++)
            if (n * p->page_size >= r->f.used_kv[b])
                ((int32_t *)(uintptr_t)r->f.page_table)[b * per_slot + n] = n % 2 ? INT32_MAX : INT32_MIN;
}

static void nan_in_page_tails(attn_context *context, attn_dtype dtype) {
    for (int way = 0; way < 2; way++) {
        rig r = {.p = problem(dtype, 3, 4, 2, 20, 64, way ? 64 : 24)};
        r.p.flags = ATTN_USED_KV;
        r.p.page_size = way ? 16 : 7;
        r.p.num_pages = 40; /* 10 or 4 for each sequence, and some that nobody uses */
        r.f.used_kv = (int32_t[]){64, 22, 0};
        check_poison(context, &r, poison_pages);
    }
}
TEST(c2_nan_in_page_tails_and_nonsense_page_ids) { each_cpu(nan_in_page_tails); }

/* Keys 3, 40 and 41 are outside everything that any row may see: here, masked by FlashMask for all rows. */
static void poison_masked_keys(rig *r) {
    static const int32_t keys[] = {3, 40, 41};
    const attn_problem *p = &r->full;
    for (int n = 0; n < 3; n++)
        for (int32_t h = 0; h < p->heads_kv; h++) {
            fill_nan(p->kv_dtype, rig_key(r, &r->f.k, p->kv_dtype, 0, keys[n], h), p->dim_qk);
            fill_nan(p->kv_dtype, rig_key(r, &r->f.v, p->kv_dtype, 0, keys[n], h), p->dim_v);
        }
}

static void nan_in_masked_keys(attn_context *context, attn_dtype dtype) {
    enum { S = 80 };
    int32_t flash[S];
    for (int j = 0; j < S; j++) flash[j] = j == 3 || j == 40 || j == 41 ? 0 : S;
    rig r = {.p = problem(dtype, 1, 4, 2, S, S, 32), .backward = true};
    r.p.flags = ATTN_CAUSAL;
    r.p.flashmask_vectors = 1;
    r.f.flashmask = flash;
    check_poison(context, &r, poison_masked_keys);
}
TEST(c2_nan_in_keys_that_no_row_sees) { each_cpu(nan_in_masked_keys); }

static void poison_bias_above_diagonal(rig *r) {
    const attn_problem *p = &r->full;
    for (int32_t i = 0; i < p->max_q; i++)
        for (int32_t j = i + 1 + p->max_kv - p->max_q; j < p->max_kv; j++)
            attn__store(p->bias_dtype, r->f.bias.data, (int64_t)i * p->max_kv + j, NAN);
}

static void nan_in_masked_bias(attn_context *context, attn_dtype dtype) {
    rig r = {.p = problem(dtype, 1, 1, 1, 90, 100, 16), .backward = true};
    r.p.flags = ATTN_CAUSAL | ATTN_BIAS;
    check_poison(context, &r, poison_bias_above_diagonal);
}
TEST(c2_nan_in_bias_of_masked_pairs) { each_cpu(nan_in_masked_bias); }

/*
 * NaN in a key that only some rows see: these become NaN, all others must keep their bits although they share a tile with it.
 * The last key of a causal problem, of which the last row knows; a key of a window, with rows before and after those that see it.
 * Backward: the gradients of the rows before, too. For head dims and negative scales a GPU has kernels of their own.
 */
static void check_nan_in_a_key(attn_context *context, attn_dtype dtype, int32_t dim, bool window, double scale) {
    enum { S = 140, LEFT = 20 };
    const int32_t key = window ? 60 : S - 1, from = key, to = window ? key + LEFT + 1 : S;
    rig clean = {.p = problem(dtype, 1, 2, 1, S, S, dim), .backward = true};
    clean.p.flags = ATTN_CAUSAL | (window ? ATTN_WINDOW : 0);
    clean.p.window_left = window ? LEFT : 0;
    clean.p.flags |= ATTN_SCALE;
    clean.p.scale = scale;
    rig poisoned = clean;
    CHECK(rig_make(&clean, 8) && rig_make(&poisoned, 8));
    fill_nan(dtype, rig_key(&poisoned, &poisoned.f.k, dtype, 0, key, 0), dim);
    fill_nan(dtype, rig_key(&poisoned, &poisoned.f.v, dtype, 0, key, 0), dim);
    CHECK_OK(rig_run(&clean, context));
    CHECK_OK(rig_run(&poisoned, context));
    CHECK_SAY(rig_same_rows(&clean, 0, &poisoned, 0, from), "dim %d, window %d, scale %g", dim, window, scale);
    for (int32_t i = 0; i < S; i++)
        for (int32_t h = 0; h < 2; h++)
            for (int32_t x = 0; x < dim; x++) {
                bool nan = i >= from && i < to;
                double want = rig_o(&clean, 0, i, h, x), got = rig_o(&poisoned, 0, i, h, x);
                CHECK_SAY(nan ? isnan(got) : got == want, "dim %d, window %d, scale %g, row %d: %g instead of %g", dim,
                          window, scale, i, got, nan ? NAN : want);
            }
    rig_free(&clean);
    rig_free(&poisoned);
}

static void nan_in_a_key_that_some_rows_see(attn_context *context, attn_dtype dtype) {
    for (int32_t dim = 32; dim <= most_dim(dtype); dim *= 2)
        for (int way = 0; way < 4; way++) check_nan_in_a_key(context, dtype, dim, way % 2, way / 2 ? -0.2 : 0.2);
}
TEST(c2_nan_in_a_key_reaches_only_rows_that_see_it) { each_cpu(nan_in_a_key_that_some_rows_see); }

/*
 * NaN in all keys and values of the sequence in the middle: its neighbours must keep their bits, though their last tiles reach into it.
 * Sequences of one length, or packed.
 */
static void check_nan_in_a_sequence(attn_context *context, attn_dtype dtype, int32_t dim, uint32_t flags) {
    enum { S = 40, SK = 150 };
    static const int32_t cu_q[] = {0, 30, 60, 100}, cu_kv[] = {0, 139, 250, 400};
    rig clean = {.p = problem(dtype, 3, 2, 1, S, SK, dim)};
    clean.p.flags = flags;
    clean.p.window_left = flags & ATTN_WINDOW ? 40 : 0;
    if (flags & ATTN_VARLEN_KV) {
        clean.p.total_q = 3 * S;
        clean.p.total_kv = 3 * SK;
        clean.f.cu_q = cu_q;
        clean.f.cu_kv = cu_kv;
    }
    rig poisoned = clean;
    CHECK(rig_make(&clean, 10) && rig_make(&poisoned, 10));
    for (int32_t j = 0; j < rig_sk(&poisoned, 1); j++) {
        fill_nan(dtype, rig_key(&poisoned, &poisoned.f.k, dtype, 1, j, 0), dim);
        fill_nan(dtype, rig_key(&poisoned, &poisoned.f.v, dtype, 1, j, 0), dim);
    }
    CHECK_OK(rig_run(&clean, context));
    CHECK_OK(rig_run(&poisoned, context));
    for (int32_t b = 0; b < 3; b++)
        CHECK_SAY(rig_same_rows(&clean, b, &poisoned, b, rig_sq(&clean, b)) == (b != 1), "sequence %d, dim %d, flags %x", b,
                  dim, (unsigned)flags);
    rig_free(&clean);
    rig_free(&poisoned);
}

static void nan_in_a_sequence(attn_context *context, attn_dtype dtype) {
    static const uint32_t flags[] = {0, ATTN_CAUSAL, ATTN_CAUSAL | ATTN_WINDOW};
    for (int32_t dim = 32; dim <= most_dim(dtype); dim *= 2)
        for (int n = 0; n < 3; n++) {
            check_nan_in_a_sequence(context, dtype, dim, flags[n]);
            check_nan_in_a_sequence(context, dtype, dim, flags[n] | ATTN_VARLEN_Q | ATTN_VARLEN_KV);
        }
}
TEST(c2_nan_in_a_sequence_stays_there) { each_cpu(nan_in_a_sequence); }

/* The mirror image: NaN in the first row, which sees only key 0; keys from 1 on must keep the bits of their gradients. */
static void nan_in_a_row_that_some_keys_see(attn_context *context, attn_dtype dtype) {
    enum { S = 75, DIM = 32 };
    rig clean = {.p = problem(dtype, 1, 1, 1, S, S, DIM), .backward = true};
    clean.p.flags = ATTN_CAUSAL;
    rig poisoned = clean;
    CHECK(rig_make(&clean, 9) && rig_make(&poisoned, 9));
    fill_nan(dtype, rig_row(&poisoned, &poisoned.f.q, dtype, 0, 0, 0), DIM);
    fill_nan(dtype, rig_row(&poisoned, &poisoned.f.d_o, dtype, 0, 0, 0), DIM);
    CHECK_OK(rig_run(&clean, context));
    CHECK_OK(rig_run(&poisoned, context));
    size_t row = DIM * attn_dtype_size(dtype);
    for (int32_t j = 1; j < S; j++) {
        CHECK(memcmp(rig_key(&clean, &clean.f.d_k, dtype, 0, j, 0), rig_key(&poisoned, &poisoned.f.d_k, dtype, 0, j, 0),
                     row) == 0);
        CHECK(memcmp(rig_key(&clean, &clean.f.d_v, dtype, 0, j, 0), rig_key(&poisoned, &poisoned.f.d_v, dtype, 0, j, 0),
                     row) == 0);
    }
    rig_free(&clean);
    rig_free(&poisoned);
}
TEST(c2_nan_in_a_row_reaches_only_keys_that_see_it) { each_cpu(nan_in_a_row_that_some_keys_see); }

static void no_poison(rig *r) { (void)r; }

static void nan_in_workspace(attn_context *context, attn_dtype dtype) {
    rig prefill = {.p = problem(dtype, 2, 4, 2, 70, 90, 20), .backward = true};
    prefill.p.flags = ATTN_CAUSAL | ATTN_SINK;
    rig decode = {.p = problem(dtype, 2, 4, 2, 1, 2500, 20)};
    check_poison(context, &prefill, no_poison); /* the clean one has a workspace of zeros, the other of NaNs */
    check_poison(context, &decode, no_poison);
}
TEST(c2_nan_in_workspace) { each_cpu(nan_in_workspace); }

/* ---- C4: every element is written ---- */

static void check_writes_all(attn_context *context, rig *r) {
    rig other = *r;
    CHECK(rig_make(r, 10) && rig_make(&other, 10));
    rig_reset(&other, 0x3C);
    CHECK_OK(rig_run(r, context));
    CHECK_OK(rig_run(&other, context));
    CHECK(rig_same(r, &other));
    rig_free(&other);
}

static void writes_all(attn_context *context, attn_dtype dtype) {
    rig r = {.p = problem(dtype, 3, 4, 2, 37, 80, 20), .backward = true, .probs = true};
    r.p.flags = ATTN_USED_Q | ATTN_USED_KV | ATTN_CAUSAL | ATTN_BIAS | ATTN_SINK;
    r.f.used_q = (int32_t[]){35, 0, 37};
    r.f.used_kv = (int32_t[]){80, 3, 0};
    check_writes_all(context, &r);
    for (int32_t b = 0; b < 3; b++)
        for (int32_t i = rig_sq(&r, b); i < 37; i++) check_row_is_empty(&r, b, i);
    for (int32_t b = 0; b < 3; b++)
        for (int32_t j = rig_sk(&r, b); j < 80 && r.backward; j++) {
            CHECK(all_zero(dtype, rig_key(&r, &r.f.d_k, dtype, b, j, 0), 20));
            CHECK(all_zero(dtype, rig_key(&r, &r.f.d_v, dtype, b, j, 1), 20));
        }
    rig_free(&r);
}
TEST(c4_every_output_is_written) { each_cpu(writes_all); }

static void writes_all_packed(attn_context *context, attn_dtype dtype) {
    rig r = {.p = problem(dtype, 3, 2, 1, 30, 60, 20), .backward = true};
    r.p.flags = ATTN_VARLEN_Q | ATTN_VARLEN_KV | ATTN_USED_Q | ATTN_USED_KV | ATTN_LEFTPAD;
    r.p.total_q = 70, r.p.total_kv = 130;
    r.f.used_q = (int32_t[]){29, 0, 26};
    r.f.leftpad = (int32_t[]){3, 10, 0};
    r.f.cu_q = (int32_t[]){4, 34, 34, 60}; /* rows before the first and after the last sequence */
    r.f.cu_kv = (int32_t[]){1, 50, 60, 120};
    r.f.used_kv = (int32_t[]){40, 10, 0};
    check_writes_all(context, &r);
    for (int32_t n = 0; n < 70; n++)
        if (n < 4 || n >= 60) CHECK(all_zero(dtype, (char *)r.f.o.data + n * 40 * attn_dtype_size(dtype), 40));
    rig_free(&r);
}
TEST(c4_every_row_of_packed_outputs_is_written) { each_cpu(writes_all_packed); }

static void writes_all_decode(attn_context *context, attn_dtype dtype) {
    rig r = {.p = problem(dtype, 2, 8, 2, 2, 2000, 20)};
    r.p.flags = ATTN_USED_Q | ATTN_USED_KV;
    r.f.used_q = (int32_t[]){2, 1};
    r.f.used_kv = (int32_t[]){1999, 0};
    check_writes_all(context, &r);
    rig_free(&r);
}
TEST(c4_every_output_of_a_split_decode_is_written) { each_cpu(writes_all_decode); }

static void empty_problems(attn_context *context, attn_dtype dtype) {
    static const int32_t sizes[][3] = {{0, 5, 5}, {2, 0, 5}, {2, 5, 0}, {0, 0, 0}, {1, 0, 0}, {0, 5, 2000}};
    for (size_t n = 0; n < 2 * sizeof sizes / sizeof *sizes; n++) {
        const int32_t *size = sizes[n / 2];
        rig r = {.p = problem(dtype, size[0], 2, 1, size[1], size[2], 8), .backward = true};
        r.p.flags = n % 2 ? ATTN_SINK | ATTN_CAUSAL : ATTN_SINK;
        CHECK(rig_make(&r, 1));
        CHECK_OK(rig_run(&r, context));
        for (int32_t b = 0; b < size[0]; b++)
            for (int32_t i = 0; i < size[1]; i++) check_row_is_empty(&r, b, i);
        for (int32_t h = 0; h < 2 && r.backward; h++) CHECK(r.f.d_sink[h] == 0);
        rig_free(&r);
    }
}
TEST(c4_empty_problems_run) { each_cpu(empty_problems); }

/* ---- C6: memory ---- */

static size_t workspace_of(attn_context *context, attn_op op, int32_t length) {
    attn_problem p = problem(ATTN_F32, 1, 8, 8, length, length, 64);
    p.op = op;
    p.flags = ATTN_CAUSAL;
    attn_plan *plan;
    if (!CHECK_OK(attn_plan_create(&plan, context, &p))) return 0;
    size_t bytes = attn_plan_workspace(plan);
    attn_plan_destroy(plan);
    return bytes;
}

TEST(c6_workspace_grows_linearly) {
    attn_context *context = make_context(ATTN_BACKEND_CPU, 2);
    for (attn_op op = ATTN_FORWARD; op <= ATTN_BACKWARD; op++) {
        test_context("op %d", (int)op);
        size_t small = workspace_of(context, op, 16384), large = workspace_of(context, op, 65536);
        CHECK_SAY(large <= 4 * small, "%zu bytes for 16384 rows, %zu for 65536", small, large);
        size_t row = 8 * 64 * sizeof(float); /* one row of one tensor */
        CHECK_SAY(large <= 65536 * 4 * row, "%zu bytes are more than four tensors of 65536 rows", large);
    }
    CHECK_SAY(workspace_of(context, ATTN_FORWARD, 65536) <= (size_t)64 << 20, "%zu bytes for 65536 rows",
              workspace_of(context, ATTN_FORWARD, 65536));
    attn_context_destroy(context);
}

/* ---- C5, and what ATTN_UNORDERED takes from it ---- */

/* d_q is near what it is in turns, as a sum of as many numbers in float, rounded to its dtype, and d_k and d_v are the same to the bit. */
static void check_near_in_turns(const rig *in_turn, const rig *loose) {
    const attn_problem *p = &in_turn->full;
    const double eps = p->dtype == ATTN_BF16 ? 0x1p-7 : p->dtype == ATTN_F16 ? 0x1p-10 : p->dtype == ATTN_F32 ? 0x1p-20 : 0;
    double squares = 0;
    for (int pass = 0; pass < 2; pass++) /* how large they are, then how far apart */
        for (int32_t b = 0; b < p->batch; b++)
            for (int32_t i = 0; i < p->max_q; i++)
                for (int32_t h = 0; h < p->heads_q; h++)
                    for (int32_t x = 0; x < p->dim_qk; x++) {
                        const double want = attn__load(p->dtype, rig_row(in_turn, &in_turn->f.d_q, p->dtype, b, i, h), x);
                        const double have = attn__load(p->dtype, rig_row(loose, &loose->f.d_q, p->dtype, b, i, h), x);
                        const double mean = sqrt(squares / ((double)p->batch * p->max_q * p->heads_q * p->dim_qk));
                        if (pass == 0)
                            squares += want * want;
                        else if (!(fabs(have - want) <= eps * fmax(fabs(want), mean)))
                            CHECK_SAY(false, "d_q of sequence %d, row %d, head %d, dim %d: %g, and %g in turns", b, i, h, x,
                                      have, want);
                    }
    CHECK(squares > 0);
    for (int32_t b = 0; b < p->batch; b++) CHECK(rig_same_keys(in_turn, b, loose, b, rig_sk(in_turn, b)));
}

/* Several blocks of keys on any GPU. That GPUs have no order wants a plan for many keys. */
static void without_an_order(attn_context *context, attn_dtype dtype) {
    enum { ROWS = 200, KEYS = 700 };
    static const uint32_t masks[] = {0, ATTN_CAUSAL, ATTN_WINDOW};
    for (int32_t n = 0, dim; (dim = wide_dim(n)) != 0; n++)
        for (int m = 0; m < 3; m++) {
            rig in_turn = {.p = problem(dtype, 2, 4, 2, ROWS, KEYS, dim), .backward = true};
            in_turn.p.flags = ATTN_VARLEN_KV | masks[m];
            in_turn.p.window_left = masks[m] == ATTN_WINDOW ? 300 : 0,
            in_turn.p.window_right = masks[m] == ATTN_WINDOW ? 90 : 0;
            in_turn.p.total_kv = 2 * KEYS - 100;
            in_turn.f.cu_kv = (int32_t[]){0, KEYS, 2 * KEYS - 100};
            rig loose = in_turn;
            loose.p.flags |= ATTN_UNORDERED;
            loose.p.max_kv = 8192;
            CHECK(rig_make(&in_turn, 50) && rig_make(&loose, 50));
            CHECK_OK(rig_run(&in_turn, context));
            CHECK_OK(rig_run(&loose, context));
            test_context("dim %d, mask %d", dim, m);
            check_near_in_turns(&in_turn, &loose);
            test_context(NULL);
            rig_free(&in_turn);
            rig_free(&loose);
        }
}
TEST(c5_unordered_sums_are_near_those_in_turns) { each_cpu(without_an_order); }
