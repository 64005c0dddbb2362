/*
 * Fuzz target "bytes to problem to plan to run": the bytes choose a problem with small sizes, the lengths, tables and numbers
 * in its buffers, and a few fields that are overwritten with anything. Whatever comes of it, nothing may crash, hang or
 * upset a sanitizer; ref and cpu must give the same status; and a refused call may not have written a byte (C3).
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../build.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define MUST(condition)                                                                                                    \
    do {                                                                                                                   \
        if (!(condition)) {                                                                                                \
            fprintf(stderr, "%s:%d: %s (%s)\n", __FILE__, __LINE__, #condition, attn_error_detail());                      \
            abort();                                                                                                       \
        }                                                                                                                  \
    } while (0)

/* ---- bytes ---- */

typedef struct stream {
    const uint8_t *at, *end;
} stream;

/* Zeros past the end. */
static uint64_t take(stream *s, size_t bytes) {
    uint64_t value = 0;
    for (size_t n = 0; n < bytes; n++) value = value << 8 | (s->at < s->end ? *s->at++ : 0);
    return value;
}

/* 0 to most. */
static int32_t pick(stream *s, int32_t most) { return (int32_t)(take(s, most > 255 ? 2 : 1) % ((uint32_t)most + 1)); }

/* ---- the problem ---- */

/* Legal in most cases: what a flag asks for is given. */
static attn_problem decode_problem(stream *s) {
    attn_problem p = {.size = sizeof p};
    p.op = (attn_op)pick(s, 2);
    p.dtype = (attn_dtype)(1 + pick(s, 5));
    p.kv_dtype = (attn_dtype)(pick(s, 3) ? 0 : pick(s, 7));
    p.out_dtype = (attn_dtype)(pick(s, 3) ? 0 : pick(s, 4));
    p.bias_dtype = (attn_dtype)(pick(s, 3) ? 0 : pick(s, 4));
    p.rotary_dtype = (attn_dtype)(pick(s, 3) ? 0 : pick(s, 4));
    p.flags = (uint32_t)take(s, 3) & ((ATTN_PRECISE_FEW << 1) - 1);
    if (p.op == ATTN_BACKWARD) p.flags &= ~(ATTN_APPEND | ATTN_BATCH_INDEX | ATTN_DESCALE);
    if (p.op == ATTN_KV_APPEND || (p.dtype != ATTN_F32 && p.dtype != ATTN_F64)) p.flags &= ~ATTN_PRECISE;
    if (p.op == ATTN_KV_APPEND || p.dtype != ATTN_F32 || (p.flags & ATTN_PRECISE)) p.flags &= ~ATTN_PRECISE_FEW;
    if (p.op != ATTN_BACKWARD) p.flags &= ~ATTN_UNORDERED;
    if (p.op == ATTN_KV_APPEND) p.flags |= ATTN_APPEND;
    if (p.flags & ATTN_APPEND)
        p.flags |= ATTN_USED_KV;
    else
        p.flags &= ~(ATTN_VARLEN_NEW | ATTN_ROTARY | ATTN_ROTARY_INTERLEAVED | ATTN_ROTARY_POS);
    p.batch = pick(s, 4);
    p.heads_kv = 1 + pick(s, 2);
    p.heads_q = p.heads_kv * (1 + pick(s, 2));
    p.dim_qk = 1 + pick(s, 39);
    p.dim_v = pick(s, 40);
    p.max_q = pick(s, 100);
    p.max_kv = pick(s, 3) ? pick(s, 200) : pick(s, 2100);
    if (p.flags & ATTN_VARLEN_Q) p.total_q = pick(s, 300);
    if (p.flags & ATTN_VARLEN_KV) p.total_kv = pick(s, 600);
    if (p.flags & ATTN_WINDOW) {
        p.window_left = pick(s, 70) - 1;
        p.window_right = pick(s, 70) - 1;
    }
    static const int32_t vectors[2][4] = {{0, 2, 4, 4}, {0, 1, 2, 2}};
    p.flashmask_vectors = vectors[(p.flags & ATTN_CAUSAL) != 0][pick(s, 3)];
    p.flashmask_heads = p.flashmask_vectors && pick(s, 1) ? p.heads_kv : 0;
    if (!(p.flags & ATTN_VARLEN_KV) && pick(s, 1)) {
        p.page_size = pick(s, 40);
        p.num_pages = p.page_size ? pick(s, 30) : 0;
    }
    if (p.flags & ATTN_BATCH_INDEX) p.cache_batch = 1 + pick(s, 4);
    if (p.flags & ATTN_APPEND) p.max_new = pick(s, 20);
    if (p.flags & ATTN_VARLEN_NEW) p.total_new = pick(s, 60);
    if (p.flags & ATTN_ROTARY) {
        p.rotary_dim = 2 * (1 + pick(s, 19));
        p.rotary_len = pick(s, 300);
    }
    if (p.flags & ATTN_SCALE) p.scale = (double)(pick(s, 255) - 128) / 16;
    p.softcap = pick(s, 3) ? 0 : (double)pick(s, 200);
    p.dropout = pick(s, 3) ? 0 : (double)pick(s, 255) / 256;
    return p;
}

/* Overwrites up to three 4-byte words of a struct with anything. */
static void garble_problem(stream *s, attn_problem *p) {
    for (int n = pick(s, 7) - 4; n > 0; n--) {
        size_t word = (size_t)pick(s, (int32_t)(sizeof *p / 4 - 1));
        uint32_t value = (uint32_t)take(s, 4);
        if (word >= 2)
            memcpy((char *)p + 4 * word, &value, 4); /* a wrong size is for the tests: memory must be behind it */
    }
}

/* The most work that is run; a plan is made of anything. Without rows and keys sequences and heads cost something, too. */
static bool affordable(const attn_problem *p) {
    if ((double)p->batch * p->heads_q > 1e6) return false;
    double q = p->flags & ATTN_VARLEN_Q ? (double)p->total_q : (double)p->batch * p->max_q;
    return p->max_kv <= 10000 && q * p->heads_q * ((double)p->max_kv + 64) * (p->dim_qk + p->dim_v) < 2e5;
}

/* ---- the buffers ---- */

static void fill_ints(stream *s, const int32_t *array, int64_t count, int32_t most, bool ascending) {
    int32_t *data = (int32_t *)(uintptr_t)array, sum = 0;
    int how = pick(s, 7);
    if (!data || how < 2) return; /* what the rig put there */
    for (int64_t n = 0; n < count; n++) {
        if (how == 7) {
            data[n] = (int32_t)take(s, 4);
        } else {
            sum = ascending && n ? sum + pick(s, most / 2) : pick(s, most);
            data[n] = sum;
        }
    }
}

static void decode_buffers(stream *s, rig *r) {
    const attn_problem *p = &r->full;
    const attn_buffers *f = &r->f;
    fill_ints(s, f->cu_q, p->batch + 1, p->max_q, true);
    fill_ints(s, f->cu_kv, p->batch + 1, p->max_kv, true);
    fill_ints(s, f->cu_new, p->batch + 1, p->max_new, true);
    fill_ints(s, f->used_q, p->batch, p->max_q, false);
    fill_ints(s, f->used_kv, p->batch, p->max_kv, false);
    fill_ints(s, f->leftpad, p->batch, p->max_kv / 4, false);
    fill_ints(s, f->batch_index, p->batch, p->cache_batch, false);
    fill_ints(s, f->rotary_pos, p->batch, p->rotary_len, false);
    if (p->page_size) {
        int64_t pages = ((int64_t)p->max_kv + p->page_size - 1) / p->page_size;
        fill_ints(s, f->page_table, p->cache_batch * pages, p->num_pages - (p->num_pages > 0), false);
    }
    int64_t vectors = (int64_t)p->batch * p->flashmask_heads * p->max_kv * p->flashmask_vectors;
    fill_ints(s, f->flashmask, vectors, p->max_q + 3, false);
    for (int n = 0; n < r->blocks; n++) /* numbers of any kind: NaN, infinite, subnormal */
        if (r->block[n].kind == RIG_INPUT && r->block[n].data == f->q.data && pick(s, 3) == 0)
            for (size_t i = 0; i < r->block[n].bytes; i++) ((uint8_t *)r->block[n].data)[i] = (uint8_t)take(s, 1);
    r->f.seed = take(s, 2);
    r->f.offset = take(s, 2);
    if (pick(s, 7) == 7) { /* a pointer becomes NULL, a stride 0 */
        size_t word = 1 + (size_t)pick(s, (int32_t)(sizeof *f / 8 - 2));
        memset((char *)&r->f + 8 * word, 0, 8);
    }
}

/* ---- runs ---- */

typedef struct copy {
    unsigned char *bytes[RIG_BLOCKS];
} copy;

static void keep(copy *c, const rig *r) {
    for (int n = 0; n < r->blocks; n++) {
        MUST((c->bytes[n] = malloc(r->block[n].bytes + 1)) != NULL);
        memcpy(c->bytes[n], r->block[n].data, r->block[n].bytes);
    }
}

static bool unchanged(const copy *c, const rig *r) {
    for (int n = 0; n < r->blocks; n++)
        if (memcmp(c->bytes[n], r->block[n].data, r->block[n].bytes) != 0) return false;
    return true;
}

static attn_status run_and_check(rig *r, attn_context *context, const copy *before) {
    attn_status status = rig_run(r, context);
    MUST(status == ATTN_OK || status == ATTN_INVALID || status == ATTN_UNSUPPORTED);
    MUST(status == ATTN_OK || (attn_error_detail()[0] && unchanged(before, r)));
    for (int n = 0; n < r->blocks; n++) memcpy(r->block[n].data, before->bytes[n], r->block[n].bytes);
    MUST(rig_call(r, context) == status);
    for (int n = 0; n < r->blocks; n++) memcpy(r->block[n].data, before->bytes[n], r->block[n].bytes);
    return status;
}

static attn_context *make(attn_backend_id backend) {
    attn_context *context;
    attn_config config = {.size = sizeof config, .backend = backend, .threads = 2};
    MUST(attn_context_create(&context, &config) == ATTN_OK);
    return context;
}

/* Only makes a plan; *workspace is the most bytes that any wanted. */
static attn_status make_plan(attn_context *context, const attn_problem *p, size_t *workspace) {
    attn_plan *plan;
    attn_status status = attn_plan_create(&plan, context, p);
    MUST((plan != NULL) == (status == ATTN_OK));
    if (attn_plan_workspace(plan) > *workspace) *workspace = attn_plan_workspace(plan);
    attn_plan_destroy(plan);
    return status;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static attn_context *ref, *cpu;
    if (!ref) {
        ref = make(ATTN_BACKEND_REF);
        cpu = make(ATTN_BACKEND_CPU);
    }
    stream s = {data, data + size};
    rig r = {.p = decode_problem(&s), .limit = (size_t)1 << 17};
    garble_problem(&s, &r.p);
    r.probs = r.p.op == ATTN_FORWARD && pick(&s, 3) == 0;
    size_t workspace = 0;
    attn_status planned = make_plan(ref, &r.p, &workspace);
    MUST(make_plan(cpu, &r.p, &workspace) == planned);
    if (planned != ATTN_OK || workspace > (size_t)1 << 24 || !affordable(&r.p) || !rig_make(&r, 1)) return 0;
    decode_buffers(&s, &r);
    copy before;
    keep(&before, &r);
    MUST(run_and_check(&r, ref, &before) == run_and_check(&r, cpu, &before));
    for (int n = 0; n < r.blocks; n++) free(before.bytes[n]);
    rig_free(&r);
    return 0;
}
