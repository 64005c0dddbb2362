/*
 * C5 and its relatives: what must agree to the last bit. Outputs are compared with memcmp, on every instruction set of the cpu
 * backend and every float dtype, with the backward pass where there is one.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "build.h"
#include "check.h"
#include "numeric.h"
#include "schedule.h"
#include "test.h"

/* Makes two forms from one seed, runs them and compares all outputs. */
static void check_same(attn_context *a_context, const rig *a_form, attn_context *b_context, const rig *b_form) {
    rig a = *a_form, b = *b_form;
    CHECK(rig_make(&a, 11) && rig_make(&b, 11));
    CHECK_OK(rig_run(&a, a_context));
    CHECK_OK(rig_run(&b, b_context));
    CHECK(rig_same(&a, &b));
    rig_free(&a);
    rig_free(&b);
}

/* A problem with a bit of everything that keeps its shape. */
static rig rich(attn_dtype dtype, int32_t batch, int32_t max_q, int32_t max_kv) {
    rig r = {.p = problem(dtype, batch, 4, 2, max_q, max_kv, 40), .backward = true};
    r.p.dim_v = 24;
    r.p.flags = ATTN_CAUSAL | ATTN_ALIBI | ATTN_SINK | ATTN_BIAS;
    r.p.softcap = 20;
    r.p.dropout = 0.2;
    r.f.seed = 5, r.f.offset = 6;
    return r;
}

/* ---- the same call ---- */

static void run_is_rerun(attn_context *context, attn_dtype dtype) {
    rig prefill = rich(dtype, 2, 130, 150), decode = {.p = problem(dtype, 2, 4, 1, 1, 3000, 24)};
    check_same(context, &prefill, context, &prefill);
    check_same(context, &decode, context, &decode);
}
TEST(c5_run_is_rerun) { each_cpu(run_is_rerun); }

/*
 * Packed sequences, none of rows or keys among them, groups of eight heads, a window: ATTN_TEST_REPEAT times, beside a load that lets
 * blocks start in another order each time.
 */
static void reruns(attn_context *context, attn_dtype dtype) {
    const char *wish = getenv("ATTN_TEST_REPEAT");
    const int times = wish ? atoi(wish) : 2;
    struct device *d = test_device(context);
    const bool is_loaded = wish && d && device_is_gpu(d);
    load *beside = is_loaded ? load_make(context, d) : NULL;
    CHECK(times >= 2 && (beside || !is_loaded));
    for (int32_t n = 0, dim; (dim = wide_dim(n)) != 0; n++) {
        rig first = {.p = problem(dtype, 6, 16, 2, 260, 300, dim), .backward = true}, again;
        first.p.flags = ATTN_VARLEN_Q | ATTN_VARLEN_KV | ATTN_WINDOW;
        first.p.window_left = 100, first.p.window_right = 3;
        first.p.total_q = 456, first.p.total_kv = 640;
        first.f.cu_q = (int32_t[]){0, 0, 130, 131, 391, 400, 456};
        first.f.cu_kv = (int32_t[]){0, 40, 170, 250, 550, 550, 640};
        again = first;
        CHECK(rig_make(&first, 36) && rig_make(&again, 36));
        CHECK_OK(rig_run(&first, context));
        again.beside = beside;
        for (int t = 1; t < times; t++) {
            rig_reset(&again, (unsigned char)t);
            CHECK_OK(rig_run(&again, context));
            if (!CHECK_SAY(rig_same(&first, &again), "dim %d, run %d of %d", dim, t, times)) break;
        }
        rig_free(&first);
        rig_free(&again);
    }
    load_free(beside);
}
TEST(c5_reruns_of_groups_of_heads_packed_with_a_window) { each_cpu(reruns); }

/* Two blocks of keys at most, on any GPU: d_q is then a sum of two, the same in any order. That GPUs have none wants a plan for many keys. */
static void order_of_two(attn_context *context, attn_dtype dtype) {
    for (int32_t n = 0, dim; (dim = wide_dim(n)) != 0; n++) {
        const int32_t keys = dim == 192 ? 120 : 200;
        rig in_turn = {.p = problem(dtype, 2, 4, 2, 150, keys, dim), .backward = true};
        in_turn.p.flags = ATTN_VARLEN_KV;
        in_turn.p.total_kv = 2 * keys;
        in_turn.f.cu_kv = (int32_t[]){0, keys, 2 * keys};
        rig as_they_come = in_turn;
        as_they_come.p.flags |= ATTN_UNORDERED;
        as_they_come.p.max_kv = 8192;
        check_same(context, &in_turn, context, &as_they_come);
    }
}
TEST(c5_unordered_sum_of_two_blocks_is_the_ordered_one) { each_cpu(order_of_two); }

static void call_is_plan(attn_context *context, attn_dtype dtype) {
    rig a = rich(dtype, 2, 50, 70), b = a;
    CHECK(rig_make(&a, 12) && rig_make(&b, 12));
    CHECK_OK(rig_run(&a, context));
    for (int n = 0; n < 3; n++) { /* cold and warm cache */
        rig_reset(&b, 0x11);
        CHECK_OK(rig_call(&b, context));
        CHECK(rig_same(&a, &b));
    }
    rig_free(&a);
    rig_free(&b);
}
TEST(c5_one_shot_is_plan_and_run) { each_cpu(call_is_plan); }

/* Outputs that are not wanted do not change the others. */
static void unwanted_outputs(attn_context *context, attn_dtype dtype) {
    rig all = rich(dtype, 2, 70, 90);
    CHECK(rig_make(&all, 33));
    CHECK_OK(rig_run(&all, context));
    for (int wanted = all.backward ? 0 : 3; wanted < 4; wanted++) { /* d_q, d_k, d_v, or o without lse */
        rig one = rich(dtype, 2, 70, 90);
        CHECK(rig_make(&one, 33));
        attn_tensor *const tensors[] = {&one.f.d_q, &one.f.d_k, &one.f.d_v};
        const attn_tensor *const right[] = {&all.f.d_q, &all.f.d_k, &all.f.d_v, &all.f.o};
        memcpy(one.f.o.data, all.f.o.data, (size_t)2 * 70 * 4 * 24 * attn_dtype_size(dtype));
        attn_buffers f = wanted < 3 ? rig_backward_buffers(&one) : rig_forward_buffers(&one);
        memcpy(f.lse, all.f.lse, (size_t)2 * 4 * 70 * (dtype == ATTN_F64 ? 8 : 4));
        if (wanted < 3) {
            attn_tensor kept = *tensors[wanted];
            f.d_q = f.d_k = f.d_v = (attn_tensor){0};
            f.d_bias = (attn_matrix){0};
            f.d_sink = NULL;
            *(wanted == 0 ? &f.d_q : wanted == 1 ? &f.d_k : &f.d_v) = kept;
            CHECK_OK(rig_run_op(&one, context, ATTN_BACKWARD, f));
        } else {
            rig_reset(&one, 0x5A);
            f.lse = NULL;
            CHECK_OK(rig_run_op(&one, context, ATTN_FORWARD, f));
        }
        int64_t counts[] = {2 * 70 * 4 * 40, 2 * 90 * 2 * 40, 2 * 90 * 2 * 24, 2 * 70 * 4 * 24};
        const void *got = wanted < 3 ? tensors[wanted]->data : one.f.o.data;
        CHECK_SAY(memcmp(got, right[wanted]->data, (size_t)counts[wanted] * attn_dtype_size(dtype)) == 0, "output %d",
                  wanted);
        rig_free(&one);
    }
    rig_free(&all);
}
TEST(c5_unwanted_outputs_do_not_change_the_others) { each_cpu(unwanted_outputs); }

/* ---- threads ---- */

static const int32_t thread_counts[] = {2, 7, 16};

static void check_threads(const rig *form) {
    const char *isa;
    for (int i = 0; (isa = cpu_isa(i)) != NULL; i++) {
        attn_context *one = make_cpu_context(isa, 1);
        for (size_t n = 0; n < sizeof thread_counts / sizeof *thread_counts; n++) {
            test_context("%s %s, %d threads", isa, attn_dtype_name(form->p.dtype), thread_counts[n]);
            attn_context *many = make_cpu_context(isa, thread_counts[n]);
            if (CHECK(one != NULL) && CHECK(many != NULL)) check_same(one, form, many, form);
            attn_context_destroy(many);
        }
        attn_context_destroy(one);
        use_isa(NULL);
    }
}

TEST(c5_threads_1_to_16) {
    static const attn_dtype dtypes[] = {ATTN_F32, ATTN_F16, ATTN_BF16, ATTN_F64};
    for (size_t d = 0; d < sizeof dtypes / sizeof *dtypes; d++) {
        rig r = rich(dtypes[d], 2, 150, 200);
        check_threads(&r);
    }
}

TEST(c5_threads_1_to_16_split_decode) {
    static const attn_dtype dtypes[] = {ATTN_F32, ATTN_BF16, ATTN_F64};
    for (size_t d = 0; d < sizeof dtypes / sizeof *dtypes; d++) {
        rig r = {.p = problem(dtypes[d], 3, 8, 2, 1, 5000, 32)};
        r.p.flags = ATTN_USED_KV | ATTN_CAUSAL;
        r.f.used_kv = (int32_t[]){5000, 1, 2049};
        check_threads(&r);
    }
}

/* Few rows and many keys beside a sequence with many rows: the chunks of the former are not spread over threads. */
TEST(c5_threads_1_to_16_mixed_batch) {
    static const attn_dtype dtypes[] = {ATTN_F32, ATTN_F64};
    for (size_t d = 0; d < sizeof dtypes / sizeof *dtypes; d++) {
        rig r = {.p = problem(dtypes[d], 3, 4, 1, 70, 2500, 8), .backward = true};
        r.p.flags = ATTN_USED_Q | ATTN_USED_KV | ATTN_CAUSAL;
        r.f.used_q = (int32_t[]){1, 70, 16};
        r.f.used_kv = (int32_t[]){2500, 90, 1100};
        check_threads(&r);
    }
}

/*
 * Heads of few rows that fill the longest strip, to the last tile: on one thread, which makes strips as long as they get, and on
 * many, which makes them shorter.
 */
TEST(c5_threads_1_to_16_full_strips_of_few_rows) {
    rig verify = {.p = problem(ATTN_F16, 4, 64, 4, 16, 130, 16)}, decode = {.p = problem(ATTN_F16, 3, 32, 16, 1, 130, 16)};
    check_threads(&verify);
    check_threads(&decode);
}

/* One head and many strips of keys, of which those in the middle have the most rows: the threads take turns at d_q. */
TEST(c5_threads_take_turns_at_d_q) {
    for (int n = 0; n < 4; n++) {
        rig r = {.p = problem(n < 2 ? ATTN_F32 : ATTN_BF16, 1, 1, 1, 700, 2900, 24), .backward = true};
        if (n % 2) {
            r.p.flags = ATTN_WINDOW;
            r.p.window_left = 700;
            r.p.window_right = 200;
        }
        check_threads(&r);
    }
}

/* The caller's own parallel_for, in three tempers. */
static int in_order(void *user, void (*body)(void *arg, int32_t index), void *arg, int32_t count) {
    ++*(int *)user;
    for (int32_t i = 0; i < count; i++) body(arg, i);
    return 0;
}

static int reversed(void *user, void (*body)(void *arg, int32_t index), void *arg, int32_t count) {
    ++*(int *)user;
    for (int32_t i = count; i-- > 0;) body(arg, i);
    return 0;
}

typedef struct own_thread {
    void (*body)(void *arg, int32_t index);
    void *arg;
    int32_t index;
} own_thread;

static void *own_thread_main(void *arg) {
    own_thread *t = arg;
    t->body(t->arg, t->index);
    return NULL;
}

static int on_threads(void *user, void (*body)(void *arg, int32_t index), void *arg, int32_t count) {
    ++*(int *)user;
    own_thread t[16];
    pthread_t id[16];
    int32_t started = 0;
    if (count > 16) return -1;
    for (; started < count; started++) {
        t[started] = (own_thread){body, arg, started};
        if (pthread_create(&id[started], NULL, own_thread_main, &t[started])) break;
    }
    for (int32_t i = 0; i < started; i++) pthread_join(id[i], NULL);
    return started == count ? 0 : -1;
}

TEST(c5_callers_parallel_for_is_pool) {
    static int (*const tempers[])(void *, void (*)(void *, int32_t), void *, int32_t) = {in_order, reversed, on_threads};
    attn_context *pool = make_context(ATTN_BACKEND_CPU, 3);
    for (int n = 0; n < 3; n++) {
        int calls = 0;
        attn_context *own;
        attn_config config = {.size = sizeof config,
                              .backend = ATTN_BACKEND_CPU,
                              .threads = 5,
                              .parallel_for = tempers[n],
                              .parallel_user = &calls};
        if (!CHECK_OK(attn_context_create(&own, &config))) break;
        test_context("temper %d", n);
        rig prefill = rich(ATTN_F32, 2, 130, 140), decode = {.p = problem(ATTN_BF16, 2, 4, 2, 1, 3000, 24)};
        check_same(pool, &prefill, own, &prefill);
        check_same(pool, &decode, own, &decode);
        CHECK(calls > 0);
        attn_context_destroy(own);
    }
    attn_context_destroy(pool);
}

/* ---- batch and layout ---- */

static void paged_is_contiguous(attn_context *context, attn_dtype dtype) {
    static const int32_t page_sizes[] = {1, 16, 37, 64};
    for (size_t n = 0; n < sizeof page_sizes / sizeof *page_sizes; n++) {
        int32_t page_size = page_sizes[n], max_kv = 300, per_slot = (max_kv + page_size - 1) / page_size;
        rig flat = {.p = problem(dtype, 3, 4, 2, 70, max_kv, 40)};
        flat.p.flags = ATTN_CAUSAL | ATTN_USED_KV;
        flat.f.used_kv = (int32_t[]){300, 5, 123};
        rig paged = flat;
        paged.p.page_size = page_size;
        paged.p.num_pages = 3 * per_slot + 2;
        CHECK(rig_make(&flat, 13) && rig_make(&paged, 14));
        int32_t *table = (int32_t *)(uintptr_t)paged.f.page_table;
        for (int32_t i = 0; i < 3 * per_slot; i++) table[i] = (i * 7 + 3) % paged.p.num_pages; /* 7 divides none of them */
        CHECK(paged.p.num_pages % 7 != 0);
        for (int32_t b = 0; b < 3; b++) rig_copy(&paged, b, &flat, b);
        CHECK_OK(rig_run(&flat, context));
        CHECK_OK(rig_run(&paged, context));
        CHECK_SAY(rig_same(&flat, &paged), "pages of %d", page_size);
        rig_free(&flat);
        rig_free(&paged);
    }
}
TEST(c5_paged_is_contiguous) { each_cpu(paged_is_contiguous); }

static void paged_decode_is_contiguous(attn_context *context, attn_dtype dtype) {
    rig flat = {.p = problem(dtype, 2, 4, 1, 1, 2600, 24)};
    flat.p.flags = ATTN_USED_KV | ATTN_LEFTPAD;
    flat.f.used_kv = (int32_t[]){2600, 1030};
    flat.f.leftpad = (int32_t[]){5, 0};
    rig paged = flat;
    paged.p.page_size = 100;
    paged.p.num_pages = 52;
    CHECK(rig_make(&flat, 13) && rig_make(&paged, 14));
    for (int32_t i = 0; i < 52; i++) ((int32_t *)(uintptr_t)paged.f.page_table)[i] = 51 - i;
    for (int32_t b = 0; b < 2; b++) rig_copy(&paged, b, &flat, b);
    CHECK_OK(rig_run(&flat, context));
    CHECK_OK(rig_run(&paged, context));
    CHECK(rig_same(&flat, &paged));
    rig_free(&flat);
    rig_free(&paged);
}
TEST(c5_paged_split_decode_is_contiguous) { each_cpu(paged_decode_is_contiguous); }

/* Sequence b of them, which has run, and the same by itself, without pages. */
static void check_one_alone(attn_context *context, const rig *all, int32_t b, uint32_t flags) {
    rig alone = {.p = all->p, .backward = all->backward};
    alone.p.flags = flags;
    alone.p.batch = 1;
    alone.p.total_q = alone.p.total_kv = 0;
    alone.p.page_size = alone.p.num_pages = 0;
    alone.p.max_q = rig_sq(all, b);
    alone.p.max_kv = rig_sk(all, b);
    alone.f.alibi = all->f.alibi;
    alone.f.sink = all->f.sink;
    CHECK(rig_make(&alone, 15));
    rig_copy(&alone, 0, all, b);
    CHECK_OK(rig_run(&alone, context));
    CHECK_SAY(rig_same_rows(&alone, 0, all, b, rig_sq(all, b)), "rows of sequence %d", b);
    if (all->backward) CHECK_SAY(rig_same_keys(&alone, 0, all, b, rig_sk(all, b)), "keys of sequence %d", b);
    rig_free(&alone);
}

/* Every sequence of `all` against a problem of its own. */
static void check_alone(attn_context *context, rig *all, uint32_t flags) {
    CHECK_OK(rig_run(all, context));
    for (int32_t b = 0; b < all->full.batch; b++) check_one_alone(context, all, b, flags);
}

static void varlen_is_alone(attn_context *context, attn_dtype dtype) {
    rig r = {.p = problem(dtype, 5, 4, 2, 200, 250, 40), .backward = true};
    uint32_t flags = ATTN_CAUSAL | ATTN_ALIBI | ATTN_SINK;
    r.p.flags = flags | ATTN_VARLEN_Q | ATTN_VARLEN_KV;
    r.p.total_q = 347, r.p.total_kv = 400;
    r.f.cu_q = (int32_t[]){0, 1, 130, 130, 147, 347};
    r.f.cu_kv = (int32_t[]){0, 70, 200, 230, 247, 400};
    CHECK(rig_make(&r, 16));
    check_alone(context, &r, flags);
    rig_free(&r);
}
TEST(c5_varlen_is_each_sequence_alone) { each_cpu(varlen_is_alone); }

/* With NaN of both signs in the first KV head, some of them in one sum. */
static void nan_is_alone(attn_context *context, attn_dtype dtype) {
    rig r = {.p = problem(dtype, 4, 4, 2, 70, 600, 64), .backward = true};
    r.p.flags = ATTN_VARLEN_Q | ATTN_VARLEN_KV;
    r.p.total_q = 81, r.p.total_kv = 1000;
    r.f.cu_q = (int32_t[]){0, 1, 71, 79, 81};
    r.f.cu_kv = (int32_t[]){0, 130, 230, 400, 1000};
    CHECK(rig_make(&r, 61));
    for (int64_t at = 0; at < (int64_t)r.p.total_kv * 2 * 64; at += 1987) {
        const int64_t key = at / 128 * 128, x = at % 48;
        attn__store(dtype, (void *)r.f.k.data, key + x, at % 3 ? NAN : -NAN);
        attn__store(dtype, (void *)r.f.k.data, key + x + 16, at % 3 ? -NAN : NAN);
        attn__store(dtype, (void *)r.f.v.data, key + x, at % 2 ? NAN : -NAN);
    }
    check_alone(context, &r, 0);
    rig_free(&r);
}
TEST(c5_sequences_with_nan_are_each_alone) { each_cpu(nan_is_alone); }

/* One row against many keys, as in decoding, beside long sequences and empty ones, where GPUs have kernels of their own. */
static void wide_varlen_is_alone(attn_context *context, attn_dtype dtype) {
    for (int32_t n = 0, dim; (dim = wide_dim(n)) != 0; n++) {
        rig r = {.p = problem(dtype, 6, 2, 1, 140, 600, dim), .backward = true};
        r.p.flags = ATTN_CAUSAL | ATTN_VARLEN_Q | ATTN_VARLEN_KV;
        r.p.total_q = 225, r.p.total_kv = 1000;
        r.f.cu_q = (int32_t[]){0, 1, 141, 141, 158, 208, 225};
        r.f.cu_kv = (int32_t[]){0, 600, 740, 780, 797, 797, 1000};
        CHECK(rig_make(&r, 37));
        check_alone(context, &r, ATTN_CAUSAL);
        rig_free(&r);
    }
}
TEST(c5_varlen_of_large_dims_is_each_sequence_alone) { each_cpu(wide_varlen_is_alone); }

/* Sequences with one row and thousands of keys in a batch whose longest has many rows: splits may not depend on that. */
static void varlen_decode_is_alone(attn_context *context, attn_dtype dtype) {
    rig r = {.p = problem(dtype, 3, 2, 1, 140, 3000, 16), .backward = true};
    r.p.flags = ATTN_VARLEN_Q | ATTN_VARLEN_KV;
    r.p.total_q = 144, r.p.total_kv = 5300;
    r.f.cu_q = (int32_t[]){0, 1, 141, 144};
    r.f.cu_kv = (int32_t[]){0, 3000, 3200, 5300};
    CHECK(rig_make(&r, 17));
    check_alone(context, &r, 0);
    rig_free(&r);
}
TEST(c5_varlen_with_few_rows_and_many_keys_is_alone) { each_cpu(varlen_decode_is_alone); }

/* Few rows and so many keys that GPUs work them by longer spans, all of them or in a window that begins in the middle of one. */
static void long_decode_is_alone(attn_context *context, attn_dtype dtype) {
    static const int32_t lefts[] = {-1, 3000, 8000};
    for (size_t n = 0; n < sizeof lefts / sizeof *lefts; n++) {
        rig r = {.p = problem(dtype, 4, 4, 1, 2, 20000, 64)};
        const uint32_t flags = ATTN_CAUSAL | ATTN_WINDOW;
        r.p.flags = flags | ATTN_USED_KV;
        r.p.window_left = lefts[n];
        r.p.window_right = -1;
        r.f.used_kv = (int32_t[]){700, 20000, 8705, 10241};
        CHECK(rig_make(&r, 39));
        check_alone(context, &r, flags);
        rig_free(&r);
    }
}
TEST(c5_few_rows_and_very_many_keys_are_alone) { each_cpu(long_decode_is_alone); }

/*
 * Partial results of short sequences between long and empty ones: room for them is counted in rows of all sequences (first form)
 * or in sequences (second), whichever is less, and in both forms the last sequence ends where the room ends.
 */
static void varlen_short_between_long(attn_context *context, attn_dtype dtype) {
    static const int32_t first[] = {0, 3, 43, 44, 44, 60, 77, 79}, second[] = {0, 2, 102, 103, 119};
    static const int32_t used[] = {1100, 600, 513, 1100, 1024, 1, 1099};
    for (int form = 0; form < 2; form++) {
        rig r = {.p = problem(dtype, form ? 4 : 7, 2, 1, form ? 100 : 40, 1100, 8)};
        r.p.flags = ATTN_CAUSAL | ATTN_VARLEN_Q | ATTN_USED_KV;
        r.p.total_q = form ? 119 : 79;
        r.f.cu_q = form ? second : first;
        r.f.used_kv = used;
        CHECK(rig_make(&r, 35));
        check_alone(context, &r, ATTN_CAUSAL);
        rig_free(&r);
    }
}
TEST(c5_varlen_short_sequences_between_long_ones_are_alone) { each_cpu(varlen_short_between_long); }

static void used_is_alone(attn_context *context, attn_dtype dtype) {
    rig r = {.p = problem(dtype, 4, 4, 4, 90, 140, 24), .backward = true};
    uint32_t flags = ATTN_CAUSAL | ATTN_BIAS;
    r.p.flags = flags | ATTN_USED_Q | ATTN_USED_KV | ATTN_LEFTPAD;
    r.f.used_q = (int32_t[]){90, 1, 33, 64};
    r.f.used_kv = (int32_t[]){140, 140, 20, 64};
    r.f.leftpad = (int32_t[]){0, 17, 20, 1};
    CHECK(rig_make(&r, 18));
    check_alone(context, &r, flags);
    rig_free(&r);
}
TEST(c5_used_lengths_and_leftpad_are_alone) { each_cpu(used_is_alone); }

static void batch_of_64(attn_context *context, attn_dtype dtype) {
    for (int decodes = 0; decodes < 2; decodes++) {
        rig r = {.p = problem(dtype, 64, 2, 1, 20, 70, 16), .backward = !decodes};
        if (decodes) r.p = problem(dtype, 64, 4, 1, 1, 1500, 8);
        r.p.flags = decodes ? 0 : ATTN_CAUSAL;
        CHECK(rig_make(&r, 19 + (uint64_t)decodes));
        check_alone(context, &r, r.p.flags);
        rig_free(&r);
    }
}
TEST(c5_one_sequence_is_the_same_in_a_batch_of_64) { each_cpu(batch_of_64); }

/* Pages for what is used, in any order; behind them the table has numbers of pages that there are not. */
static void deal_pages(rig *r, uint64_t *random) {
    const int32_t count = r->p.num_pages, per_slot = (int32_t)attn__pages_per_slot(&r->full, &r->f);
    int32_t *table = (int32_t *)(uintptr_t)r->f.page_table, *left = malloc((size_t)count * sizeof *left), next = count;
    if (!CHECK(left != NULL)) return;
    for (int32_t n = 0; n < count; n++) left[n] = n;
    for (int32_t b = 0; b < r->p.batch; b++)
        for (int32_t n = 0; n < per_slot; n++) {
            int32_t *to = &table[b * per_slot + n], any = next ? random_range(random, 0, next - 1) : 0;
            *to = n % 2 ? INT32_MAX : -1;
            if (n * r->p.page_size >= r->f.used_kv[b]) continue;
            *to = left[any];
            left[any] = left[--next];
        }
    CHECK(next == 0);
    free(left);
}

/* Sequences of many lengths: in a batch, the same with its pages in another order, again, and alone. */
static void decode_batch_of_256(attn_context *context, attn_dtype dtype) {
    enum { BATCH = 256, MOST = 1100, PAGE = 16, ALONE = 16 };
    int32_t used[BATCH], dim;
    uint64_t random = 43;
    for (int32_t d = 0; (dim = on_host() ? 24 : wide_dim(d)) != 0 && d < (on_host() ? 1 : 2); d++) {
        rig one = {.p = problem(dtype, BATCH, 4, 1, 1, MOST, dim)}, other;
        one.p.flags = ATTN_USED_KV, one.p.page_size = PAGE;
        one.f.used_kv = used;
        for (int32_t b = 0; b < BATCH; b++) {
            used[b] = random_range(&random, 1, b % 8 ? 60 : MOST);
            one.p.num_pages += (used[b] + PAGE - 1) / PAGE;
        }
        other = one;
        CHECK(rig_make(&one, random) && rig_make(&other, random + 1));
        deal_pages(&one, &random);
        deal_pages(&other, &random);
        for (int32_t b = 0; b < BATCH; b++) rig_copy(&other, b, &one, b);
        CHECK_OK(rig_run(&one, context));
        for (int n = 0; n < 2; n++) {
            rig_reset(&other, (unsigned char)n);
            CHECK_OK(rig_run(&other, context));
            CHECK_SAY(rig_same(&one, &other), "dim %d, pages in another order, run %d", dim, n);
        }
        for (int n = 0; n < ALONE; n++)
            check_one_alone(context, &one, random_range(&random, 0, BATCH / ALONE - 1) * ALONE + n, 0);
        rig_free(&one);
        rig_free(&other);
    }
}
TEST(c5_one_decode_is_the_same_in_a_batch_of_256_of_many_lengths) { each_cpu(decode_batch_of_256); }

/* Keys and values of 8 bits: alone as in a batch, of more rows than some of them have, and in pages. */
static void narrow_cache(attn_context *context, attn_dtype dtype) {
    static const attn_dtype kinds[] = {ATTN_E4M3, ATTN_E5M2, ATTN_I8};
    static const int32_t dims[] = {128, 64, 256};
    for (int n = 0; n < 3 && dtype != ATTN_F64; n++) {
        rig flat = {.p = problem(dtype, 3, 2, 1, 10, 528, dims[n])};
        flat.p.kv_dtype = kinds[n];
        flat.p.flags = ATTN_CAUSAL | ATTN_USED_Q | ATTN_USED_KV;
        flat.f.used_q = (int32_t[]){1, 10, 2};
        flat.f.used_kv = (int32_t[]){528, 13, 514};
        rig paged = flat;
        paged.p.page_size = 16;
        paged.p.num_pages = 3 * 33;
        test_context("%s, dim %d", attn_dtype_name(kinds[n]), dims[n]);
        CHECK(rig_make(&flat, 41) && rig_make(&paged, 42));
        for (int32_t i = 0; i < 3 * 33; i++) ((int32_t *)(uintptr_t)paged.f.page_table)[i] = 3 * 33 - 1 - i;
        for (int32_t b = 0; b < 3; b++) rig_copy(&paged, b, &flat, b);
        CHECK_OK(rig_run(&flat, context));
        CHECK_OK(rig_run(&paged, context));
        CHECK(rig_same(&flat, &paged));
        check_alone(context, &flat, ATTN_CAUSAL);
        rig_free(&flat);
        rig_free(&paged);
    }
}
TEST(c5_cache_of_8_bits_is_the_same_alone_and_in_pages) { each_cpu(narrow_cache); }

/*
 * Queries of several sequences as rows of one, to keys that all of them share (examples/prefix.c): what a row gives depends
 * neither on the other rows nor on its place among them.
 */
static void rows_of_a_group(attn_context *context, attn_dtype dtype) {
    enum { ROWS = 16, GROUPS = 2, HEADS = 4, DIM = 24, TURN = 5 };
    rig a = {.p = problem(dtype, GROUPS, HEADS, 2, ROWS, 1300, DIM)};
    a.p.flags = ATTN_BATCH_INDEX;
    a.p.cache_batch = 1;
    a.f.batch_index = (int32_t[GROUPS]){0};
    rig b = a;
    CHECK(rig_make(&a, 23) && rig_make(&b, 24));
    memcpy(b.f.k.data, a.f.k.data, (size_t)(1300 * 2 * DIM) * attn_dtype_size(dtype));
    memcpy(b.f.v.data, a.f.v.data, (size_t)(1300 * 2 * DIM) * attn_dtype_size(dtype));
    for (int32_t i = 0; i < ROWS; i++) /* in the second group of b, among others, in another order */
        memcpy(rig_row(&b, &b.f.q, dtype, 1, (i + TURN) % ROWS, 0), rig_row(&a, &a.f.q, dtype, 0, i, 0),
               (size_t)(i < ROWS / 2 ? HEADS * DIM : 0) * attn_dtype_size(dtype));
    CHECK_OK(rig_run(&a, context));
    CHECK_OK(rig_run(&b, context));
    for (int32_t i = 0; i < ROWS / 2; i++)
        for (int32_t h = 0; h < HEADS; h++) {
            CHECK(rig_lse(&a, 0, i, h) == rig_lse(&b, 1, (i + TURN) % ROWS, h));
            for (int32_t x = 0; x < DIM; x++) CHECK(rig_o(&a, 0, i, h, x) == rig_o(&b, 1, (i + TURN) % ROWS, h, x));
        }
    rig_free(&a);
    rig_free(&b);
}
TEST(c5_rows_that_share_their_keys) { each_cpu(rows_of_a_group); }

/*
 * The same in chunks of the shared keys, each of which has all rows, by a stride of 0: what a row gives depends neither on how many they
 * are, if they are more than 16, nor on its place; and what a chunk gives not on those before it.
 */
static void rows_of_chunks(attn_context *context, attn_dtype dtype) {
    enum { CHUNK = 320, KEYS = 700, CHUNKS = 3, FEW = 17, MANY = 150, TURN = 100, HEADS = 2, DIM = 40 };
    static const int32_t cu[] = {0, CHUNK, 2 * CHUNK, KEYS};
    const size_t row = HEADS * DIM * attn_dtype_size(dtype), keys = (size_t)KEYS * row;
    rig few = {.p = problem(dtype, CHUNKS, HEADS, HEADS, FEW, CHUNK, DIM)};
    few.p.flags = ATTN_VARLEN_KV;
    few.p.total_kv = KEYS;
    few.p.out_dtype = dtype == ATTN_F64 ? ATTN_F64 : ATTN_F32; /* as merge had better have them */
    few.f.cu_kv = cu;
    rig many = few, alone = few;
    many.p.max_q = MANY;
    alone.p.batch = 1;
    alone.p.total_kv = CHUNK;
    CHECK(rig_make(&few, 25) && rig_make(&many, 26) && rig_make(&alone, 27));
    few.f.q.stride[0] = many.f.q.stride[0] = 0;
    memcpy(many.f.k.data, few.f.k.data, keys);
    memcpy(many.f.v.data, few.f.v.data, keys);
    memcpy(alone.f.k.data, (char *)few.f.k.data + CHUNK * row, CHUNK * row);
    memcpy(alone.f.v.data, (char *)few.f.v.data + CHUNK * row, CHUNK * row);
    memcpy((char *)many.f.q.data + TURN * row, few.f.q.data, FEW * row);
    memcpy(alone.f.q.data, few.f.q.data, FEW * row);
    CHECK_OK(rig_run(&few, context));
    CHECK_OK(rig_run(&many, context));
    CHECK_OK(rig_run(&alone, context));
    CHECK(rig_same_rows(&alone, 0, &few, 1, FEW));
    for (int32_t n = 0; n < CHUNKS * FEW * HEADS; n++) {
        const int32_t b = n / (FEW * HEADS), i = n / HEADS % FEW, h = n % HEADS;
        CHECK(rig_lse(&few, b, i, h) == rig_lse(&many, b, TURN + i, h));
        for (int32_t x = 0; x < DIM; x++) CHECK(rig_o(&few, b, i, h, x) == rig_o(&many, b, TURN + i, h, x));
    }
    rig_free(&few);
    rig_free(&many);
    rig_free(&alone);
}
TEST(c5_chunks_that_share_their_rows) { each_cpu(rows_of_chunks); }

static void batch_index_is_order(attn_context *context, attn_dtype dtype) {
    static const int32_t slots[] = {4, 0, 2};
    rig indexed = {.p = problem(dtype, 3, 4, 2, 5, 90, 16)};
    indexed.p.flags = ATTN_BATCH_INDEX;
    indexed.p.cache_batch = 5;
    indexed.f.batch_index = slots;
    rig plain = {.p = problem(dtype, 3, 4, 2, 5, 90, 16)};
    CHECK(rig_make(&indexed, 21) && rig_make(&plain, 22));
    for (int32_t b = 0; b < 3; b++) rig_copy(&plain, b, &indexed, b);
    CHECK_OK(rig_run(&indexed, context));
    CHECK_OK(rig_run(&plain, context));
    CHECK(rig_same_rows(&indexed, 0, &plain, 0, 5) && rig_same_rows(&indexed, 1, &plain, 1, 5) &&
          rig_same_rows(&indexed, 2, &plain, 2, 5));
    rig_free(&indexed);
    rig_free(&plain);
}
TEST(c5_batch_index_is_order) { each_cpu(batch_index_is_order); }

/* q, k and v in [batch][head][row][dim] order with gaps, against dense ones. */
static void strides_do_not_matter(attn_context *context, attn_dtype dtype) {
    enum { B = 2, H = 3, S = 70, D = 20, GAP = 5 };
    rig dense = {.p = problem(dtype, B, H, H, S, S, D)}, strided = dense;
    CHECK(rig_make(&dense, 23));
    attn_tensor *const to[] = {&strided.f.q, &strided.f.k, &strided.f.v};
    for (int n = 0; n < 3; n++) {
        to[n]->stride[0] = -(int64_t)H * S * (D + GAP); /* batches backwards */
        to[n]->stride[1] = D + GAP;
        to[n]->stride[2] = S * (D + GAP);
        char *data = rig_tensor(&strided, dtype, (int64_t)B * H * S * (D + GAP), RIG_INPUT);
        if (!CHECK(data != NULL)) return;
        to[n]->data = data + (int64_t)H * S * (D + GAP) * (int64_t)attn_dtype_size(dtype);
    }
    CHECK(rig_make(&strided, 24));
    for (int32_t b = 0; b < B; b++) rig_copy(&strided, b, &dense, b);
    CHECK_OK(rig_run(&dense, context));
    CHECK_OK(rig_run(&strided, context));
    CHECK(rig_same(&dense, &strided));
    rig_free(&dense);
    rig_free(&strided);
}
TEST(c5_strides_do_not_matter) { each_cpu(strides_do_not_matter); }

/* The stride of a dim of one element is no distance of anything. One key, and pages of one key each. */
static void strides_of_one(attn_context *context, attn_dtype dtype) {
    enum { KEYS = 65, D = 32 };
    for (int paged = 0; paged < 2; paged++) {
        rig usual = {.p = problem(dtype, 1, 1, 1, 1, paged ? KEYS : 1, D), .backward = !paged};
        if (paged) usual.p.page_size = 1, usual.p.num_pages = KEYS;
        rig odd = usual;
        CHECK(rig_make(&usual, 25) && rig_make(&odd, 25));
        attn_tensor *const of[] = {&odd.f.q, &odd.f.o, &odd.f.k, &odd.f.v, &odd.f.d_o, &odd.f.d_q, &odd.f.d_k, &odd.f.d_v};
        for (int n = 0; n < (paged ? 4 : 8); n++) {
            for (int x = paged && n >= 2; x < 3; x++) of[n]->stride[x] = n % 2 ? INT64_MAX : -INT64_MAX;
        }
        CHECK_OK(rig_run(&usual, context));
        CHECK_OK(rig_run(&odd, context));
        CHECK(rig_same(&usual, &odd));
        rig_free(&usual);
        rig_free(&odd);
    }
}
TEST(c5_strides_of_dims_of_one_do_not_matter) {
    if (on_host()) each_cpu(strides_of_one);
    if (!on_host()) test_skip("tensors are copied by their strides");
}

/* ---- equivalent problems ---- */

static void gqa_is_repeated_kv(attn_context *context, attn_dtype dtype) {
    static const int32_t shapes[][2] = {
        {100, 130}, {1, 2500}, {2, 300}, {4, 70}, {16, 90}}; /* tiles of 3, 6, 12, 48 rows */
    for (int n = 0; n < 5; n++) {
        rig grouped = {.p = problem(dtype, 2, 6, 2, shapes[n][0], shapes[n][1], 24), .backward = true};
        grouped.p.flags = ATTN_CAUSAL;
        rig repeated = grouped;
        repeated.p.heads_kv = 6;
        CHECK(rig_make(&grouped, 25) && rig_make(&repeated, 26));
        for (int32_t b = 0; b < 2; b++) rig_copy(&repeated, b, &grouped, b);
        CHECK_OK(rig_run(&grouped, context));
        CHECK_OK(rig_run(&repeated, context));
        for (int32_t b = 0; b < 2; b++)
            CHECK_SAY(rig_same_rows(&grouped, b, &repeated, b, shapes[n][0]), "%d rows", shapes[n][0]);
        rig_free(&grouped);
        rig_free(&repeated);
    }
}
TEST(c5_s09_gqa_is_repeated_kv) { each_cpu(gqa_is_repeated_kv); }

static void window_is_causal(attn_context *context, attn_dtype dtype) {
    enum { S = 150 };
    static const int32_t lefts[] = {S - 1, S, -1};
    for (int n = 0; n < 3; n++)
        for (int also_causal = 0; also_causal < 2; also_causal++) {
            rig causal = {.p = problem(dtype, 1, 2, 1, S, S, 40), .backward = true};
            causal.p.flags = ATTN_CAUSAL;
            rig window = causal;
            window.p.flags = ATTN_WINDOW | (also_causal ? ATTN_CAUSAL : 0);
            window.p.window_left = lefts[n];
            window.p.window_right = also_causal ? -1 : 0;
            check_same(context, &causal, context, &window);
        }
}
TEST(c5_s05_window_that_sees_all_before_is_causal) { each_cpu(window_is_causal); }

static void open_window_is_none(attn_context *context, attn_dtype dtype) {
    rig none = {.p = problem(dtype, 1, 2, 1, 90, 110, 24), .backward = true}, open = none, wide = none;
    open.p.flags = wide.p.flags = ATTN_WINDOW;
    open.p.window_left = open.p.window_right = -1;
    wide.p.window_left = 110, wide.p.window_right = INT32_MAX;
    check_same(context, &none, context, &open);
    check_same(context, &none, context, &wide);
}
TEST(c5_s05_open_window_is_none) { each_cpu(open_window_is_none); }

/* Tiles of a plan: how many rows and keys a document must have so that it is whole tiles. */
static int32_t whole_tiles(attn_context *context, attn_problem p) {
    int32_t length = 1;
    for (p.op = ATTN_FORWARD; p.op <= ATTN_BACKWARD; p.op++) {
        attn_plan *plan;
        if (!CHECK_OK(attn_plan_create(&plan, context, &p))) return 0;
        attn_kernel_info info = {0};
        int32_t n = 0;
        while (attn_kernel_get(n, &info, sizeof info) == ATTN_OK && strcmp(info.name, attn_plan_kernel(plan)) != 0) n++;
        attn_plan_destroy(plan);
        if (!CHECK(info.rows > 0 && info.cols > 0)) return 0;
        while (length % info.rows || length % info.cols) length++;
    }
    return length;
}

/* Documents of so many tiles, twice as many, and as many again. */
static void check_documents(attn_context *context, attn_dtype dtype, int32_t tiles) {
    rig packed = {.p = problem(dtype, 3, 2, 1, 0, 0, 24), .backward = true};
    int32_t tile = tiles * whole_tiles(context, packed.p), total = 4 * tile;
    if (tile == 0) return;
    int32_t cu[] = {0, tile, 3 * tile, total};
    packed.p.flags = ATTN_CAUSAL | ATTN_VARLEN_Q | ATTN_VARLEN_KV;
    packed.p.max_q = packed.p.max_kv = 2 * tile;
    packed.p.total_q = packed.p.total_kv = total;
    packed.f.cu_q = packed.f.cu_kv = cu;
    rig masked = {.p = problem(dtype, 1, 2, 1, total, total, 24), .backward = true};
    masked.p.flags = ATTN_CAUSAL;
    masked.p.flashmask_vectors = 1;
    CHECK(rig_make(&packed, 27) && rig_make(&masked, 27));
    for (int32_t b = 0; b < 3; b++)
        for (int32_t j = cu[b]; j < cu[b + 1]; j++) ((int32_t *)(uintptr_t)masked.f.flashmask)[j] = cu[b + 1];
    /* Packed and dense layouts of one sequence are the same memory: rows [total], then heads. Copy it over as a whole. */
    size_t q_bytes = (size_t)total * 2 * 24 * attn_dtype_size(dtype);
    memcpy(masked.f.q.data, packed.f.q.data, q_bytes);
    memcpy(masked.f.d_o.data, packed.f.d_o.data, q_bytes);
    memcpy(masked.f.k.data, packed.f.k.data, q_bytes / 2);
    memcpy(masked.f.v.data, packed.f.v.data, q_bytes / 2);
    memcpy((void *)(uintptr_t)masked.f.d_lse, packed.f.d_lse, (size_t)total * 2 * (dtype == ATTN_F64 ? 8 : 4));
    CHECK_OK(rig_run(&packed, context));
    CHECK_OK(rig_run(&masked, context));
    CHECK(rig_same(&packed, &masked));
    rig_free(&packed);
    rig_free(&masked);
}

static void flashmask_is_varlen(attn_context *context, attn_dtype dtype) {
    check_documents(context, dtype, 1);
    check_documents(context, dtype, 4); /* the second one is in two strips of keys of the backward */
}
TEST(c5_s10_flashmask_causal_document_is_varlen) { each_cpu(flashmask_is_varlen); }

static void causal_prefix(attn_context *context, attn_dtype dtype) {
    enum { S = 200 };
    static const int32_t prefixes[] = {1, 2, 4, 5, 16, 17, 64, 100, 199};
    rig whole = {.p = problem(dtype, 1, 4, 2, S, S, 40)};
    whole.p.flags = ATTN_CAUSAL | ATTN_ALIBI;
    CHECK(rig_make(&whole, 28));
    CHECK_OK(rig_run(&whole, context));
    for (size_t n = 0; n < sizeof prefixes / sizeof *prefixes; n++) {
        rig prefix = {.p = whole.p};
        prefix.p.max_q = prefix.p.max_kv = prefixes[n];
        prefix.f.alibi = whole.f.alibi;
        CHECK(rig_make(&prefix, 29));
        rig_copy(&prefix, 0, &whole, 0);
        CHECK_OK(rig_run(&prefix, context));
        CHECK_SAY(rig_same_rows(&prefix, 0, &whole, 0, prefixes[n]), "prefix of %d", prefixes[n]);
        rig_free(&prefix);
    }
    rig_free(&whole);
}
TEST(c5_causal_prefix) { each_cpu(causal_prefix); }

/* The first `length` rows and keys of `whole`, which has run, by themselves. */
static void check_prefix(attn_context *context, const rig *whole, int32_t length) {
    rig prefix = {.p = whole->p};
    prefix.p.max_q = prefix.p.max_kv = length;
    CHECK(rig_make(&prefix, 29));
    rig_copy(&prefix, 0, whole, 0);
    CHECK_OK(rig_run(&prefix, context));
    CHECK_SAY(rig_same_rows(&prefix, 0, whole, 0, length), "dim %d, prefix of %d", whole->p.dim_qk, length);
    rig_free(&prefix);
}

/* The same where GPUs have kernels of their own. Prefixes of 2 to 16 rows go to another one there: docs/kernels/decode.md. */
static void wide_causal_prefix(attn_context *context, attn_dtype dtype) {
    static const int32_t prefixes[] = {17, 63, 64, 65, 128, 130, 255, 2, 9, 16};
    for (int32_t n = 0, dim; (dim = wide_dim(n)) != 0; n++) {
        rig whole = {.p = problem(dtype, 1, 2, 1, 290, 290, dim)};
        whole.p.flags = ATTN_CAUSAL;
        CHECK(rig_make(&whole, 28));
        CHECK_OK(rig_run(&whole, context));
        for (int i = 0; i < (strcmp(attn_context_backend(context), "cuda") == 0 ? 7 : 10); i++)
            check_prefix(context, &whole, prefixes[i]);
        rig_free(&whole);
    }
}
TEST(c5_causal_prefix_of_large_dims) { each_cpu(wide_causal_prefix); }

/*
 * One row and one key: o is v, and lse a dot product, which on a GPU one kernel multiplies by other instructions than the next; above dim
 * 128 in another order, too.
 */
static void wide_first_row(attn_context *context, attn_dtype dtype) {
    static const int32_t lengths[] = {17, 64, 200};
    const int32_t most = strcmp(attn_context_backend(context), "cuda") == 0 ? 128 : INT32_MAX;
    for (int32_t n = 0, dim; (dim = wide_dim(n / 3)) != 0; n++) {
        if (dim > most) continue;
        rig whole = {.p = problem(dtype, 1, 4, 2, lengths[n % 3], lengths[n % 3], dim)};
        whole.p.flags = ATTN_CAUSAL;
        CHECK(rig_make(&whole, 38));
        CHECK_OK(rig_run(&whole, context));
        check_prefix(context, &whole, 1);
        rig_free(&whole);
    }
}
TEST(c5_first_row_of_large_dims_is_the_row_alone) { each_cpu(wide_first_row); }

/* The last rows of a causal problem by themselves see the same keys: bottom-right alignment. */
static void causal_suffix(attn_context *context, attn_dtype dtype) {
    enum { S = 150, TAIL = 60 };
    rig whole = {.p = problem(dtype, 1, 2, 1, S, S, 24)}, tail = {.p = problem(dtype, 1, 2, 1, TAIL, S, 24)};
    whole.p.flags = tail.p.flags = ATTN_CAUSAL;
    CHECK(rig_make(&whole, 30) && rig_make(&tail, 31));
    rig_copy(&tail, 0, &whole, 0); /* keys; then the last rows over the first */
    for (int32_t i = 0; i < TAIL; i++)
        memcpy(rig_row(&tail, &tail.f.q, dtype, 0, i, 0), rig_row(&whole, &whole.f.q, dtype, 0, S - TAIL + i, 0),
               2 * 24 * attn_dtype_size(dtype));
    CHECK_OK(rig_run(&whole, context));
    CHECK_OK(rig_run(&tail, context));
    for (int32_t i = 0; i < TAIL; i++)
        CHECK(memcmp(rig_row(&tail, &tail.f.o, dtype, 0, i, 0), rig_row(&whole, &whole.f.o, dtype, 0, S - TAIL + i, 0),
                     2 * 24 * attn_dtype_size(dtype)) == 0);
    rig_free(&whole);
    rig_free(&tail);
}
TEST(c5_s05_causal_is_aligned_to_the_last_row) { each_cpu(causal_suffix); }

static void default_scale(attn_context *context, attn_dtype dtype) {
    rig none = {.p = problem(dtype, 1, 2, 1, 70, 70, 25), .backward = true}, given = none;
    given.p.flags = ATTN_SCALE;
    given.p.scale = 0.2; /* 1 / sqrt(25) */
    check_same(context, &none, context, &given);
}
TEST(c5_s01_default_scale) { each_cpu(default_scale); }

/*
 * On a GPU scores go to base 2 in one rounding without ALiBi, and in two with it, which C5 does not forbid. Then lse, and o in
 * float, are two results that may each be 2e-6 off, and o in 16 bits is within a unit in the last place of numbers below 2. F64 is
 * computed in base e either way.
 */
static void alibi_of_zero(attn_context *context, attn_dtype dtype) {
    rig none = {.p = problem(dtype, 1, 2, 1, 70, 70, 25), .backward = true}, zero = none;
    zero.p.flags = ATTN_ALIBI;
    zero.f.alibi = (float[]){0, 0};
    if (strcmp(attn_context_backend(context), "cuda") != 0 || dtype == ATTN_F64) {
        check_same(context, &none, context, &zero);
        return;
    }
    CHECK(rig_make(&none, 11) && rig_make(&zero, 11));
    CHECK_OK(rig_run(&none, context));
    CHECK_OK(rig_run(&zero, context));
    rig_check_close(&none, &zero, dtype == ATTN_BF16 ? 0x1p-7 : dtype == ATTN_F16 ? 0x1p-10 : 4e-6);
    for (int32_t i = 0; i < 70; i++)
        for (int32_t h = 0; h < 2; h++) CHECK_CLOSE(rig_lse(&none, 0, i, h), rig_lse(&zero, 0, i, h), 4e-6);
    rig_free(&none);
    rig_free(&zero);
}
TEST(c5_s03_alibi_of_zero) { each_cpu(alibi_of_zero); }
