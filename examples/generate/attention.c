/*
 * The KV cache and attention. There are two plans, made once: one for the prefill, whose sequences have different numbers of new
 * tokens and are packed, and one for decoding, where each has one. A call of attn_run rotates q and k, appends k and v to the
 * cache and attends.
 *
 * Pages are taken one by one, by whichever sequence needs one next, so that those of a sequence lie anywhere; all layers have the
 * same page table. On a GPU the cache and the tables are there, and q, k, v go there and o comes back for each layer, since the
 * rest of the model is on the CPU.
 */
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "generate.h"

struct attention {
    attention_settings settings;
    shape shape;
    attn_plan *prefill, *decode;
    attention_times spent;
    size_t element;                  /* bytes of dtype */
    int32_t pages_each, pages_taken; /* pages that a sequence can have; taken by all */

    /* On the host. */
    int32_t *used, *cu, *page_table; /* [batch], [batch + 1], [batch][pages_each] */
    const int32_t *count;            /* new tokens of each sequence, in this step */
    bool is_decode;
    uint16_t *converted; /* bf16: [rows][heads][dim] */

    /* Where attention runs. */
    int32_t *there_used, *there_cu, *there_page_table;
    void *cache_k, *cache_v; /* [layers][pages][page][heads_kv][dim] */
    void *q, *k, *v;         /* NULL: the model's own are taken */
    float *o;                /* the same */
    float *cos, *sin;        /* [tokens][dim / 2] */
    void *workspace;
    size_t workspace_bytes;
};

/* ---- memory ---- */

/* Zeroed on the host, for no reason of libattn's: what is not used may hold anything. */
static void *take(const attention *a, size_t bytes) {
    void *memory = NULL;
    if (a->settings.gpu) return gpu_alloc(bytes);
    if (posix_memalign(&memory, 64, bytes ? bytes : 1) != 0) {
        fail("not enough memory for %zu bytes", bytes);
        return NULL;
    }
    return memset(memory, 0, bytes);
}

static void give(const attention *a, void *memory) {
    if (a->settings.gpu)
        gpu_free(memory);
    else
        free(memory);
}

static bool put(const attention *a, void *to, const void *from, size_t bytes) {
    if (a->settings.gpu) return gpu_put(to, from, bytes);
    memcpy(to, from, bytes);
    return true;
}

/* ---- making ---- */

static bool said(attn_status status) {
    return status == ATTN_OK || fail("%s: %s", attn_status_name(status), attn_error_detail());
}

static attn_problem problem_of(const attention *a, bool decode) {
    const attention_settings *s = &a->settings;
    attn_problem p = {
        .size = sizeof p,
        .op = ATTN_FORWARD,
        .dtype = s->dtype,
        .out_dtype = ATTN_F32,
        .rotary_dtype = ATTN_F32,
        .flags = ATTN_CAUSAL | ATTN_USED_KV | ATTN_APPEND | ATTN_ROTARY,
        .batch = s->batch,
        .heads_q = a->shape.heads,
        .heads_kv = a->shape.heads_kv,
        .dim_qk = a->shape.dim,
        .max_q = 1,
        .max_new = 1,
        .max_kv = a->pages_each * s->page,
        .page_size = s->page,
        .num_pages = s->batch * a->pages_each,
        .rotary_dim = a->shape.dim,
        .rotary_len = s->tokens,
    };
    if (decode) return p;
    p.flags |= ATTN_VARLEN_Q | ATTN_VARLEN_NEW;
    p.max_q = p.max_new = s->chunk;
    p.total_q = p.total_new = s->rows;
    return p;
}

static bool make_plans(attention *a) {
    attn_problem prefill = problem_of(a, false), decode = problem_of(a, true);
    if (!said(attn_plan_create(&a->prefill, a->settings.context, &prefill))) return false;
    if (!said(attn_plan_create(&a->decode, a->settings.context, &decode))) return false;
    size_t one = attn_plan_workspace(a->prefill), other = attn_plan_workspace(a->decode);
    a->workspace_bytes = one > other ? one : other;
    return (a->workspace = take(a, a->workspace_bytes)) != NULL;
}

static bool make_rotary(attention *a) {
    const int32_t half = a->shape.dim / 2, tokens = a->settings.tokens;
    const size_t bytes = (size_t)tokens * (size_t)half * sizeof(float);
    float *cosines = malloc(bytes), *sines = malloc(bytes);
    bool made = cosines && sines;
    for (int32_t t = 0; t < tokens && made; t++) {
        for (int32_t x = 0; x < half; x++) {
            double angle = t * pow(10000, -2.0 * x / a->shape.dim);
            cosines[t * half + x] = (float)cos(angle);
            sines[t * half + x] = (float)sin(angle);
        }
    }
    if (!made) fail("not enough memory for %d positions", tokens);
    made = made && (a->cos = take(a, bytes)) && (a->sin = take(a, bytes));
    made = made && put(a, a->cos, cosines, bytes) && put(a, a->sin, sines, bytes);
    free(cosines);
    free(sines);
    return made;
}

static bool make_buffers(attention *a) {
    const attention_settings *s = &a->settings;
    const size_t batch = (size_t)s->batch, pages = batch * (size_t)a->pages_each, rows = (size_t)s->rows;
    const size_t row_q = (size_t)a->shape.heads * (size_t)a->shape.dim,
                 row_kv = (size_t)a->shape.heads_kv * (size_t)a->shape.dim;
    const size_t cache = (size_t)a->shape.layers * pages * (size_t)s->page * row_kv * a->element;
    const bool apart = s->gpu || s->dtype != ATTN_F32; /* not the model's own arrays */
    a->used = calloc(batch, sizeof *a->used);
    a->cu = calloc(batch + 1, sizeof *a->cu);
    a->page_table = calloc(pages, sizeof *a->page_table);
    if (!a->used || !a->cu || !a->page_table) return fail("not enough memory for a batch of %d", s->batch);
    for (size_t n = 0; n < pages; n++) a->page_table[n] = -1; /* of no sequence yet: it is not looked at */
    if (s->dtype == ATTN_BF16 && !(a->converted = malloc(rows * row_q * a->element)))
        return fail("not enough memory for %zu rows", rows);
    bool made = (a->cache_k = take(a, cache)) && (a->cache_v = take(a, cache)) &&
                (a->there_used = take(a, batch * sizeof *a->used)) &&
                (a->there_cu = take(a, (batch + 1) * sizeof *a->cu)) &&
                (a->there_page_table = take(a, pages * sizeof *a->page_table));
    if (made && apart)
        made = (a->q = take(a, rows * row_q * a->element)) && (a->k = take(a, rows * row_kv * a->element)) &&
               (a->v = take(a, rows * row_kv * a->element));
    if (made && s->gpu) made = (a->o = take(a, rows * row_q * sizeof *a->o)) != NULL;
    return made;
}

attention *attention_create(const attention_settings *settings, const shape *s) {
    attention *a = calloc(1, sizeof *a);
    if (!a) {
        fail("not enough memory");
        return NULL;
    }
    a->settings = *settings;
    a->shape = *s;
    a->element = attn_dtype_size(settings->dtype);
    a->pages_each = (settings->tokens + settings->page - 1) / settings->page;
    const int64_t pages = (int64_t)settings->batch * a->pages_each;
    const bool fits = (pages <= INT32_MAX && settings->rows <= INT32_MAX) ||
                      fail("%d sequences of up to %d tokens are too many", settings->batch, settings->tokens);
    if (fits && make_plans(a) && make_buffers(a) && make_rotary(a)) return a;
    attention_destroy(a);
    return NULL;
}

void attention_destroy(attention *a) {
    if (!a) return;
    void *there[] = {a->there_used, a->there_cu, a->there_page_table, a->cache_k, a->cache_v, a->q, a->k, a->v, a->o,
                     a->cos,        a->sin,      a->workspace};
    for (size_t n = 0; n < sizeof there / sizeof *there; n++) give(a, there[n]);
    free(a->used);
    free(a->cu);
    free(a->page_table);
    free(a->converted);
    attn_plan_destroy(a->prefill);
    attn_plan_destroy(a->decode);
    free(a);
}

const char *attention_kernel(const attention *a, bool decode) { return attn_plan_kernel(decode ? a->decode : a->prefill); }

attention_times attention_spent(attention *a) {
    attention_times spent = a->spent;
    a->spent = (attention_times){0, 0};
    return spent;
}

/* ---- a step ---- */

bool attention_begin(attention *a, bool decode, const int32_t *count) {
    const attention_settings *s = &a->settings;
    const size_t batch = (size_t)s->batch;
    bool more = false;
    a->is_decode = decode;
    a->count = count;
    for (int32_t b = 0; b < s->batch; b++) {
        int32_t *table = a->page_table + (int64_t)b * a->pages_each;
        a->cu[b + 1] = a->cu[b] + count[b];
        if (a->used[b] + count[b] > s->tokens) return fail("sequence %d is longer than was said", b);
        for (int32_t n = 0; n * s->page < a->used[b] + count[b]; n++) {
            if (table[n] >= 0) continue;
            table[n] = a->pages_taken++;
            more = true;
        }
    }
    double began = seconds();
    bool there =
        put(a, a->there_used, a->used, batch * sizeof *a->used) &&
        put(a, a->there_cu, a->cu, (batch + 1) * sizeof *a->cu) &&
        (!more || put(a, a->there_page_table, a->page_table, batch * (size_t)a->pages_each * sizeof *a->page_table));
    a->spent.copy += seconds() - began;
    return there;
}

/* Rounded to nearest, ties to even; NaN stays one. */
static uint16_t bf16_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (x != x) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Where attention finds the numbers x, in the dtype that it wants them in; NULL: they did not arrive. */
static void *arrive(attention *a, void *there, const float *x, int64_t count) {
    const void *from = x;
    if (!there) return (void *)(uintptr_t)x;
    if (a->converted) {
        for (int64_t n = 0; n < count; n++) a->converted[n] = bf16_of(x[n]);
        from = a->converted;
    }
    return put(a, there, from, (size_t)count * a->element) ? there : NULL;
}

bool attention_layer(attention *a, int32_t layer, const float *q, const float *k, const float *v, float *o) {
    const attention_settings *s = &a->settings;
    const int64_t heads = a->shape.heads, heads_kv = a->shape.heads_kv, dim = a->shape.dim, rows = a->cu[s->batch];
    const int64_t cache = (int64_t)s->batch * a->pages_each * s->page * heads_kv * dim * layer; /* elements before it */
    double began = seconds();
    void *at_q = arrive(a, a->q, q, rows * heads * dim), *at_k = at_q ? arrive(a, a->k, k, rows * heads_kv * dim) : NULL;
    void *at_v = at_k ? arrive(a, a->v, v, rows * heads_kv * dim) : NULL;
    if (!at_v) return false;
    /*
     * Packed, or with one row of each sequence: the rows lie the same way. Rows of o that no sequence has, up to settings.rows,
     * are written with 0: the model's arrays have room for the first step of the prefill, which is the largest.
     */
    attn_buffers buffers = {
        .size = sizeof buffers,
        .q = attn_dense(at_q, 1, heads, dim),
        .k = attn_dense((char *)a->cache_k + (size_t)cache * a->element, s->page, heads_kv, dim),
        .v = attn_dense((char *)a->cache_v + (size_t)cache * a->element, s->page, heads_kv, dim),
        .o = attn_dense(a->o ? a->o : o, 1, heads, dim),
        .k_new = attn_dense(at_k, 1, heads_kv, dim),
        .v_new = attn_dense(at_v, 1, heads_kv, dim),
        .cu_q = a->is_decode ? NULL : a->there_cu,
        .cu_new = a->is_decode ? NULL : a->there_cu,
        .used_kv = a->there_used,
        .page_table = a->there_page_table,
        .page_table_stride = a->pages_each,
        .rotary_cos = a->cos,
        .rotary_sin = a->sin,
        .workspace = a->workspace,
        .workspace_size = a->workspace_bytes,
    };
    double ready = seconds();
    if (!said(attn_run(a->is_decode ? a->decode : a->prefill, &buffers, NULL))) return false;
    if (s->gpu && !gpu_wait()) return false;
    double ran = seconds();
    if (a->o && !gpu_get(o, a->o, (size_t)(rows * heads * dim) * sizeof *o)) return false;
    a->spent.run += ran - ready;
    a->spent.copy += seconds() - ran + ready - began;
    return true;
}

void attention_end(attention *a) {
    for (int32_t b = 0; b < a->settings.batch; b++) a->used[b] += a->count[b];
}
