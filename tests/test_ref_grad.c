/*
 * Gradients of the oracle. L = sum d_o * o + sum d_lse * lse is a function of q, k, v, bias and sink; what the backward of `ref`
 * says of it in float64 is compared with finite differences along random directions, for each feature alone and together.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "build.h"
#include "test.h"

enum { BATCH = 2, HEADS = 4, ROWS = 7, KEYS = 9, DIM = 5, DIRECTIONS = 3 };

/* Differences of the fourth order at this step are good to 1e-10; a power of two keeps the steps of a float exact. */
static const double step = 0x1p-10;
static const double tolerance = 1e-6; /* relative */

typedef struct grad_case {
    const char *name;
    uint32_t flags;
    int32_t heads_kv; /* 0: as many as query heads */
    int32_t dim_v;
    int32_t left, right;              /* ATTN_WINDOW */
    int32_t vectors, flashmask_heads; /* FlashMask */
    double scale, softcap, dropout;
    unsigned sums; /* ATTN_BIAS: bit n is set where the bias is broadcast along dim n */
} grad_case;

#define VARLEN (ATTN_VARLEN_Q | ATTN_VARLEN_KV)
#define USED (ATTN_USED_Q | ATTN_USED_KV)

static const grad_case cases[] = {
    {.name = "plain"},
    {.name = "causal", .flags = ATTN_CAUSAL},
    {.name = "window", .flags = ATTN_WINDOW, .left = 2, .right = 1},
    {.name = "window open to the right", .flags = ATTN_WINDOW, .left = 1, .right = -1},
    {.name = "causal window", .flags = ATTN_CAUSAL | ATTN_WINDOW, .left = 3, .right = 2},
    {.name = "scale 0", .flags = ATTN_SCALE, .scale = 0},
    {.name = "scale negative", .flags = ATTN_SCALE, .scale = -0.7},
    {.name = "softcap", .softcap = 1.5},
    {.name = "alibi", .flags = ATTN_ALIBI},
    {.name = "bias", .flags = ATTN_BIAS},
    {.name = "bias of all sequences", .flags = ATTN_BIAS, .sums = 1},
    {.name = "bias of all heads", .flags = ATTN_BIAS, .sums = 2},
    {.name = "bias of all rows", .flags = ATTN_BIAS, .sums = 4},
    {.name = "bias of all keys", .flags = ATTN_BIAS | ATTN_SINK, .sums = 8},
    {.name = "bias of all sequences and heads", .flags = ATTN_BIAS, .sums = 3},
    {.name = "bias of all sequences and rows", .flags = ATTN_BIAS, .sums = 5},
    {.name = "bias of everything", .flags = ATTN_BIAS | ATTN_SINK, .sums = 15},
    {.name = "sink", .flags = ATTN_SINK},
    {.name = "dropout", .dropout = 0.3},
    {.name = "gqa", .heads_kv = 2},
    {.name = "mqa", .heads_kv = 1},
    {.name = "dim_v smaller", .dim_v = 3},
    {.name = "dim_v larger", .dim_v = 11},
    {.name = "varlen", .flags = VARLEN},
    {.name = "varlen q", .flags = ATTN_VARLEN_Q},
    {.name = "varlen kv", .flags = ATTN_VARLEN_KV},
    {.name = "used lengths", .flags = USED},
    {.name = "leftpad", .flags = ATTN_LEFTPAD},
    {.name = "flashmask causal 1", .flags = ATTN_CAUSAL, .vectors = 1},
    {.name = "flashmask causal 2", .flags = ATTN_CAUSAL, .vectors = 2},
    {.name = "flashmask full 2", .vectors = 2},
    {.name = "flashmask full 4", .vectors = 4},
    {.name = "flashmask of each kv head", .heads_kv = 2, .vectors = 4, .flashmask_heads = 2},
    {.name = "causal gqa varlen", .flags = ATTN_CAUSAL | VARLEN, .heads_kv = 2},
    {.name = "causal leftpad used", .flags = ATTN_CAUSAL | ATTN_LEFTPAD | USED},
    {.name = "softcap alibi bias sink", .flags = ATTN_ALIBI | ATTN_BIAS | ATTN_SINK, .softcap = 2, .sums = 2},
    {.name = "dropout sink gqa", .flags = ATTN_SINK, .heads_kv = 2, .dropout = 0.5},
    {.name = "dropout bias varlen", .flags = ATTN_BIAS | VARLEN, .dropout = 0.2, .sums = 1},
    {.name = "softcap causal scale negative", .flags = ATTN_CAUSAL | ATTN_SCALE, .scale = -0.4, .softcap = 0.8},
    {.name = "window alibi gqa used", .flags = ATTN_WINDOW | ATTN_ALIBI | USED, .heads_kv = 2, .left = 2, .right = 2},
    {.name = "flashmask sink dropout", .flags = ATTN_CAUSAL | ATTN_SINK, .heads_kv = 1, .vectors = 2, .dropout = 0.25},
    {.name = "everything",
     .flags = ATTN_CAUSAL | ATTN_WINDOW | ATTN_SCALE | ATTN_ALIBI | ATTN_BIAS | ATTN_SINK | VARLEN | USED | ATTN_LEFTPAD,
     .heads_kv = 2,
     .dim_v = 6,
     .left = 4,
     .right = -1,
     .vectors = 2,
     .flashmask_heads = 2,
     .scale = 0.6,
     .softcap = 3,
     .dropout = 0.15,
     .sums = 5},
};

/* What a derivative is taken by. */
typedef struct input {
    const char *name;
    void *data;
    const void *gradient;
    size_t count;
    bool is_float; /* sink: float, the others: double */
} input;

/* Elements of the block that begins at data. */
static size_t block_count(const rig *r, const void *data, size_t each) {
    for (int n = 0; n < r->blocks; n++)
        if (r->block[n].data == data) return r->block[n].bytes / each;
    return 0;
}

/* Dense strides, but 0 along the dims that are summed. */
static attn_matrix broadcast(rig *r, unsigned sums, rig_kind kind) {
    static const int32_t size[4] = {BATCH, HEADS, ROWS, KEYS};
    attn_matrix m = {0};
    int64_t count = 1;
    for (int n = 3; n >= 0; n--) {
        if (sums >> n & 1) continue;
        m.stride[n] = count;
        count *= size[n];
    }
    m.data = rig_tensor(r, ATTN_F64, count, kind);
    return m;
}

static bool make_case(rig *r, const grad_case *c, uint64_t seed) {
    static const int32_t cu_q[] = {0, 7, 10}, cu_kv[] = {0, 4, 13}; /* and a row of padding each */
    static const int32_t used_q[] = {5, 3}, used_kv[] = {3, 8}, leftpad[] = {1, 3};
    int32_t heads_kv = c->heads_kv ? c->heads_kv : HEADS;
    *r = (rig){.p = problem(ATTN_F64, BATCH, HEADS, heads_kv, ROWS, KEYS, DIM), .backward = true, .random = seed};
    r->p.flags = c->flags;
    r->p.dim_v = c->dim_v;
    r->p.window_left = c->left;
    r->p.window_right = c->right;
    r->p.flashmask_vectors = c->vectors;
    r->p.flashmask_heads = c->flashmask_heads;
    r->p.scale = c->scale;
    r->p.softcap = c->softcap;
    r->p.dropout = c->dropout;
    r->f.seed = seed;
    if (c->flags & ATTN_VARLEN_Q) r->p.total_q = 11, r->f.cu_q = cu_q;
    if (c->flags & ATTN_VARLEN_KV) r->p.total_kv = 14, r->f.cu_kv = cu_kv;
    if (c->flags & ATTN_USED_Q) r->f.used_q = used_q;
    if (c->flags & ATTN_USED_KV) r->f.used_kv = used_kv;
    if (c->flags & ATTN_LEFTPAD) r->f.leftpad = leftpad;
    if (c->flags & ATTN_BIAS) {
        r->f.bias = broadcast(r, c->sums, RIG_INPUT);
        r->f.d_bias = broadcast(r, c->sums, RIG_OUTPUT);
    }
    if (c->vectors) {
        int32_t count = BATCH * (c->flashmask_heads ? c->flashmask_heads : 1) * KEYS * c->vectors;
        int32_t *vectors = rig_ints(r, count);
        for (int32_t n = 0; vectors && n < count; n++) vectors[n] = random_range(&r->random, 0, ROWS);
        r->f.flashmask = vectors;
    }
    if (!rig_make(r, seed)) return false;
    float *sink = (float *)(uintptr_t)r->f.sink; /* the rig's own, and so writable */
    for (int h = 0; sink && h < HEADS; h++) sink[h] = (float)(round(sink[h] * 16) / 16);
    return true;
}

/* L, by a forward run. */
static double objective(rig *r, attn_context *context) {
    r->backward = false;
    CHECK_OK(rig_run(r, context));
    const double *o = r->f.o.data, *d_o = r->f.d_o.data, *lse = r->f.lse, *d_lse = r->f.d_lse;
    double sum = 0;
    for (size_t n = 0; n < block_count(r, o, sizeof *o); n++) sum += d_o[n] * o[n];
    for (size_t n = 0; n < block_count(r, lse, sizeof *lse); n++)
        if (lse[n] != -INFINITY) sum += d_lse[n] * lse[n];
    return sum;
}

static double get(const input *x, const void *data, size_t n) {
    return x->is_float ? ((const float *)data)[n] : ((const double *)data)[n];
}

/* x = start + distance * direction */
static void move(const input *x, const double *start, const double *direction, double distance) {
    for (size_t n = 0; n < x->count; n++) {
        double value = start[n] + distance * direction[n];
        if (x->is_float)
            ((float *)x->data)[n] = (float)value;
        else
            ((double *)x->data)[n] = value;
    }
}

static void check_direction(rig *r, attn_context *context, const input *x, bool may_vanish) {
    double *start = malloc(x->count * sizeof *start), *direction = malloc(x->count * sizeof *direction);
    /* A gradient that is a float (d_sink) is off by half a unit in its last place, and no more is allowed for; where terms of
       the sum cancel, that can be more than 1e-6 of what is left. */
    double along = 0, rounding = 0;
    if (!CHECK(start && direction)) goto done;
    for (size_t n = 0; n < x->count; n++) {
        start[n] = get(x, x->data, n);
        direction[n] = random_normal(&r->random) / sqrt((double)x->count);
        if (x->is_float) direction[n] = round(direction[n] * 16) / 16;
        along += direction[n] * get(x, x->gradient, n);
        if (x->is_float) rounding += fabs(direction[n] * get(x, x->gradient, n)) * 0x1p-24;
    }
    double value[5];
    for (int n = 0; n < 5; n++) {
        move(x, start, direction, (n - 2) * step);
        value[n] = n == 2 ? 0 : objective(r, context);
    }
    move(x, start, direction, 0);
    double difference = (8 * (value[3] - value[1]) - (value[4] - value[0])) / (12 * step);
    CHECK_CLOSE(along, difference, tolerance * fmax(fabs(along), fabs(difference)) + rounding);
    CHECK(may_vanish || fabs(along) > 1e-4);
done:
    free(start);
    free(direction);
}

static void check_case(const grad_case *c, attn_context *context, uint64_t seed) {
    rig r;
    test_context("%s", c->name);
    if (!CHECK(make_case(&r, c, seed))) return;
    if (!CHECK_OK(rig_run(&r, context))) {
        rig_free(&r);
        return;
    }
    input inputs[] = {
        {.name = "q", .data = r.f.q.data, .gradient = r.f.d_q.data},
        {.name = "k", .data = r.f.k.data, .gradient = r.f.d_k.data},
        {.name = "v", .data = r.f.v.data, .gradient = r.f.d_v.data},
        {.name = "bias", .data = r.f.bias.data, .gradient = r.f.d_bias.data},
        {.name = "sink", .data = (float *)(uintptr_t)r.f.sink, .gradient = r.f.d_sink, .is_float = true},
    };
    for (size_t n = 0; n < sizeof inputs / sizeof *inputs; n++) {
        input *x = &inputs[n];
        if (!x->data) continue;
        x->count = block_count(&r, x->data, x->is_float ? sizeof(float) : sizeof(double));
        for (int direction = 0; direction < DIRECTIONS; direction++) {
            test_context("%s, by %s, direction %d", c->name, x->name, direction);
            check_direction(&r, context, x, n < 2 && c->flags & ATTN_SCALE && c->scale == 0);
        }
    }
    rig_free(&r);
}

TEST(s07_ref_gradients_by_finite_differences) {
    attn_context *context = make_context(ATTN_BACKEND_REF, 1);
    if (!CHECK(context != NULL)) return;
    for (size_t n = 0; n < sizeof cases / sizeof *cases; n++) check_case(&cases[n], context, 1000 + n);
    attn_context_destroy(context);
    test_context(NULL);
}

/* The lse and o of all keys, given to a backward over some of them, yield those keys' part of the whole backward. */
TEST(s07_ref_backward_of_a_part_of_a_larger_softmax) {
    enum { CUT = 4 };
    attn_context *context = make_context(ATTN_BACKEND_REF, 1);
    rig whole = {.p = problem(ATTN_F64, BATCH, HEADS, 2, ROWS, KEYS, DIM), .backward = true};
    if (!CHECK(context && rig_make(&whole, 5)) || !CHECK_OK(rig_run(&whole, context))) return;
    double *sum = calloc(BATCH * ROWS * HEADS * DIM, sizeof *sum);
    for (int part = 0; part < 2; part++) {
        int32_t first = part ? CUT : 0, count = part ? KEYS - CUT : CUT;
        rig r = {.p = whole.p, .f = whole.f};
        r.p.op = ATTN_BACKWARD;
        r.p.max_kv = count;
        r.f.k.data = (double *)whole.f.k.data + first * whole.f.k.stride[1];
        r.f.v.data = (double *)whole.f.v.data + first * whole.f.v.stride[1];
        r.f.d_q.data = r.f.d_k.data = r.f.d_v.data = NULL;
        if (!CHECK(sum && rig_make(&r, 6)) || !CHECK_OK(rig_run(&r, context))) break;
        for (int n = 0; n < BATCH * ROWS * HEADS * DIM; n++) sum[n] += ((double *)r.f.d_q.data)[n];
        for (int b = 0; b < BATCH; b++) {
            const double *d_k = rig_key(&r, &r.f.d_k, ATTN_F64, b, 0, 0), *d_v = rig_key(&r, &r.f.d_v, ATTN_F64, b, 0, 0);
            const double *all_k = rig_key(&whole, &whole.f.d_k, ATTN_F64, b, first, 0);
            const double *all_v = rig_key(&whole, &whole.f.d_v, ATTN_F64, b, first, 0);
            for (int n = 0; n < count * 2 * DIM; n++) {
                CHECK_CLOSE(d_k[n], all_k[n], 1e-13);
                CHECK_CLOSE(d_v[n], all_v[n], 1e-13);
            }
        }
        rig_free(&r);
    }
    for (int n = 0; sum && n < BATCH * ROWS * HEADS * DIM; n++) CHECK_CLOSE(sum[n], ((double *)whole.f.d_q.data)[n], 1e-13);
    free(sum);
    rig_free(&whole);
    attn_context_destroy(context);
}

/* d_q, d_k and d_v do not depend on which of them are wanted. */
TEST(s07_ref_gradients_that_are_not_wanted) {
    attn_context *context = make_context(ATTN_BACKEND_REF, 1);
    rig all = {.p = problem(ATTN_F64, BATCH, HEADS, 2, ROWS, KEYS, DIM), .backward = true};
    if (!CHECK(context && rig_make(&all, 9)) || !CHECK_OK(rig_run(&all, context))) return;
    attn_tensor *const wanted[3] = {&all.f.d_q, &all.f.d_k, &all.f.d_v};
    for (int n = 0; n < 3; n++) {
        size_t bytes = block_count(&all, wanted[n]->data, 1);
        attn_tensor kept[3] = {*wanted[0], *wanted[1], *wanted[2]};
        void *before = malloc(bytes);
        if (!CHECK(before != NULL)) break;
        memcpy(before, kept[n].data, bytes);
        memset(kept[n].data, 0xA5, bytes);
        for (int m = 0; m < 3; m++)
            if (m != n) wanted[m]->data = NULL;
        CHECK_OK(rig_run(&all, context));
        CHECK(memcmp(before, kept[n].data, bytes) == 0);
        for (int m = 0; m < 3; m++) *wanted[m] = kept[m];
        free(before);
    }
    rig_free(&all);
    attn_context_destroy(context);
}

/* Rows that see nothing, whether by the mask or by a bias of -inf, have gradients of exactly zero. */
TEST(c1_ref_rows_without_a_key_have_zero_gradients) {
    attn_context *context = make_context(ATTN_BACKEND_REF, 1);
    for (int by_bias = 0; by_bias < 2; by_bias++) {
        rig r = {.p = problem(ATTN_F64, 1, 1, 1, 3, 2, DIM), .backward = true};
        test_context("%s", by_bias ? "bias" : "causal");
        r.p.flags = ATTN_SINK | (by_bias ? ATTN_BIAS : ATTN_CAUSAL); /* causal: row 0 is before the first key */
        if (!CHECK(context && rig_make(&r, 3))) break;
        if (by_bias) ((double *)r.f.bias.data)[0] = ((double *)r.f.bias.data)[1] = -INFINITY;
        CHECK_OK(rig_run(&r, context));
        CHECK(rig_lse(&r, 0, 0, 0) == -INFINITY);
        CHECK(rig_lse(&r, 0, 1, 0) > -INFINITY);
        for (int x = 0; x < DIM; x++) {
            CHECK(rig_o(&r, 0, 0, 0, x) == 0);
            CHECK(((double *)r.f.d_q.data)[x] == 0);
            CHECK(isfinite(((double *)r.f.d_q.data)[DIM + x]) && ((double *)r.f.d_q.data)[DIM + x] != 0);
        }
        for (int x = 0; x < 2 * DIM; x++)
            CHECK(isfinite(((double *)r.f.d_k.data)[x]) && isfinite(((double *)r.f.d_v.data)[x]));
        if (by_bias) CHECK(((double *)r.f.d_bias.data)[0] == 0 && ((double *)r.f.d_bias.data)[1] == 0);
        CHECK(isfinite(r.f.d_sink[0]) && r.f.d_sink[0] != 0);
        rig_free(&r);
    }
    attn_context_destroy(context);
    test_context(NULL);
}

/* No keys, no rows, no sequences: nothing to compute, and all of what there is written. */
TEST(c1_ref_empty_problems) {
    attn_context *context = make_context(ATTN_BACKEND_REF, 1);
    static const int32_t sizes[][3] = {{2, 3, 0}, {2, 0, 3}, {2, 0, 0}, {0, 3, 3}}; /* batch, rows, keys */
    for (size_t n = 0; n < sizeof sizes / sizeof *sizes; n++) {
        rig r = {.p = problem(ATTN_F64, sizes[n][0], 2, 1, sizes[n][1], sizes[n][2], DIM), .backward = true, .probs = true};
        r.p.flags = ATTN_SINK | ATTN_BIAS;
        test_context("batch %d, %dx%d", sizes[n][0], sizes[n][1], sizes[n][2]);
        if (!CHECK(context && rig_make(&r, 1))) break;
        CHECK_OK(rig_run(&r, context));
        for (size_t m = 0; m < block_count(&r, r.f.o.data, sizeof(double)); m++) CHECK(((double *)r.f.o.data)[m] == 0);
        for (size_t m = 0; m < block_count(&r, r.f.lse, sizeof(double)); m++) CHECK(((double *)r.f.lse)[m] == -INFINITY);
        for (size_t m = 0; m < block_count(&r, r.f.d_q.data, sizeof(double)); m++) CHECK(((double *)r.f.d_q.data)[m] == 0);
        for (size_t m = 0; m < block_count(&r, r.f.d_k.data, sizeof(double)); m++) CHECK(((double *)r.f.d_k.data)[m] == 0);
        for (size_t m = 0; m < block_count(&r, r.f.d_v.data, sizeof(double)); m++) CHECK(((double *)r.f.d_v.data)[m] == 0);
        CHECK(r.f.d_sink[0] == 0 && r.f.d_sink[1] == 0);
        rig_free(&r);
    }
    attn_context_destroy(context);
    test_context(NULL);
}
