/*
 * The oracle: `ref` in double on dense outputs.
 *
 * What happens before attention, append and rotary embedding, is done here by the letter of attn.h and not by the library:
 * ref gets a cache that already holds the new keys, and queries that are already rotated. The host backends share that code,
 * so that comparing them with each other would prove nothing.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "compare.h"
#include "numeric.h"

/* ---- append and rotary ---- */

/* The product of two floats is exact in double, so this rounds it once, to float: no compiler can contract it. */
static float product(double a, double b) { return (float)((float)a * (double)(float)b); }

void rotate_row(const rotation *r, double *x, int64_t at) {
    int32_t half = r->dim / 2;
    for (int32_t n = 0; n < half; n++) {
        double cosine = attn__load(r->table, r->cos, at * half + n), sine = attn__load(r->table, r->sin, at * half + n);
        double *first = x + (r->neighbours ? 2 * n : n), *second = first + (r->neighbours ? 1 : half);
        double a = *first, b = *second;
        if (r->inverse) sine = -sine;
        if (r->dtype == ATTN_F64) {
            *first = a * cosine - b * sine;
            *second = a * sine + b * cosine;
        } else {
            *first = product(a, cosine) - product(b, sine);
            *second = product(a, sine) + product(b, cosine);
        }
    }
}

static void rotate(const check_case *c, double *x, int64_t at) {
    const attn_problem *p = &c->problem;
    const attn_buffers *f = &c->buffers;
    rotation r = {p->dtype, p->rotary_dtype, f->rotary_cos, f->rotary_sin, p->rotary_dim, false, false};
    r.neighbours = p->flags & ATTN_ROTARY_INTERLEAVED;
    rotate_row(&r, x, at);
}

/* Row r of k_new or v_new into a copy of the cache block. */
static void append_row(const check_case *c, void *cache, int b, int r, int h, bool is_key) {
    const attn_problem *p = &c->problem;
    const attn_buffers *f = &c->buffers;
    const attn_tensor *from = is_key ? &f->k_new : &f->v_new, *to = is_key ? &f->k : &f->v;
    int32_t dim = is_key ? p->dim_qk : p->dim_v;
    int64_t batch = p->flags & ATTN_VARLEN_NEW ? 0 : b * from->stride[0];
    int64_t source = batch + (c->seq[b].first_new + r) * from->stride[1] + h * from->stride[2];
    int64_t target = case_kv_at(c, to, b, c->seq[b].used + r, h);
    double row[576];
    for (int32_t x = 0; x < dim; x++) row[x] = attn__load(p->dtype, from->data, source + x);
    if (is_key && (p->flags & ATTN_ROTARY)) rotate(c, row, c->seq[b].rotary_pos + r);
    double factor =
        p->kv_dtype == p->dtype ? 1 : case_kv_descale(c, is_key ? f->k_descale : f->v_descale, b, c->seq[b].used + r, h);
    for (int32_t x = 0; x < dim; x++) attn__store(p->kv_dtype, cache, target + x, row[x] / factor);
}

/* What a cache holds after the append; the caller frees it. */
static unsigned char *append(const check_case *c, const block *cache, bool is_key) {
    const attn_problem *p = &c->problem;
    size_t element = attn_dtype_size(cache->dtype);
    unsigned char *copy = must_alloc(cache->count, element);
    memcpy(copy, cache->data, (size_t)cache->count * element);
    for (int b = 0; b < p->batch; b++) {
        for (int r = 0; r < c->seq[b].appended; r++) {
            for (int h = 0; h < p->heads_kv; h++) append_row(c, copy + cache->origin * (int64_t)element, b, r, h, is_key);
        }
    }
    return copy;
}

/* ---- what ref gets ---- */

static void point(oracle *o, const block *b, void *memory, size_t element) {
    void *target = (char *)memory + b->origin * (int64_t)element;
    memcpy((char *)&o->buffers + b->pointer, &target, sizeof target);
}

/* A copy of a block: numbers as doubles, unless they are float by definition. */
static void copy_block(oracle *o, const check_case *c, const block *b) {
    int64_t index = b - c->blocks;
    const unsigned char *data = o->cache[index] ? o->cache[index] : b->data;
    bool as_is = !b->dtype || b->fixed;
    size_t element = as_is ? 4 : sizeof(double);
    if (!o->memory[index]) o->memory[index] = must_alloc(b->count, element);
    if (as_is) memcpy(o->memory[index], data, (size_t)b->count * element);
    for (int64_t n = 0; !as_is && n < b->count; n++) ((double *)o->memory[index])[n] = attn__load(b->dtype, data, n);
    point(o, b, o->memory[index], element);
}

/* A result, NaN until it is written. */
static double *doubles(int64_t count) {
    double *memory = must_alloc(count, sizeof *memory);
    return memset(memory, 0xff, (size_t)count * sizeof *memory);
}

int64_t case_pairs(const check_case *c) {
    const attn_problem *p = &c->problem;
    return (int64_t)p->batch * p->heads_q * p->max_q * p->max_kv;
}

static attn_matrix dense_matrix(const attn_problem *p, void *data) {
    int64_t row = p->max_kv, head = row * p->max_q;
    return (attn_matrix){data, {head * p->heads_q, head, row, 1}};
}

static attn_tensor dense_q(const attn_problem *p, void *data, int64_t dim) {
    return attn_dense(data, p->flags & ATTN_VARLEN_Q ? p->total_q : p->max_q, p->heads_q, dim);
}

static attn_tensor dense_kv(const attn_problem *p, void *data, int64_t dim) {
    return attn_dense(data, p->flags & ATTN_VARLEN_KV ? p->total_kv : p->max_kv, p->heads_kv, dim);
}

static attn_status forward(oracle *o, const check_case *c, attn_context *ref) {
    attn_problem p = o->problem;
    attn_buffers f = o->buffers;
    int64_t rows = c->rows_q * p.heads_q;
    o->o = doubles(rows * c->problem.dim_v);
    o->lse = doubles(rows);
    o->probs = doubles(case_pairs(c));
    p.op = ATTN_FORWARD;
    f.o = dense_q(&c->problem, o->o, c->problem.dim_v);
    f.lse = o->lse;
    f.probs = dense_matrix(&p, o->probs);
    f.d_o.data = f.d_q.data = f.d_k.data = f.d_v.data = f.d_bias.data = f.d_sink = NULL;
    f.d_lse = NULL;
    return attn_forward(ref, &p, &f, NULL);
}

/* A row that a bias of -inf leaves without keys has no gradient to give, whatever its d_o holds (C1). */
static void poison_d_o(check_case *c, int b, int i, int h) {
    const attn_problem *p = &c->problem;
    for (int x = 0; x < p->dim_v; x++)
        attn__store(p->out_dtype, c->buffers.d_o.data, case_q_at(c, &c->buffers.d_o, b, i, h) + x, NAN);
}

/* Gives a backward case the o and lse of its forward, rounded to their dtypes; F_RING: as if there had been more keys. */
static void store_forward(oracle *o, check_case *c) {
    const attn_problem *p = &c->problem;
    attn_dtype lse_dtype = p->dtype == ATTN_F64 ? ATTN_F64 : ATTN_F32;
    bool hide = c->strict && !has(c, F_BROADCAST);
    for (int b = 0; b < p->batch; b++) {
        for (int h = 0; h < p->heads_q; h++) {
            for (int i = 0; i < c->seq[b].sq; i++) {
                int64_t at = case_lse_at(c, b, i, h), row = case_q_row(c, b, i) * p->heads_q + h;
                double more = c->ring ? c->ring[at] : 0;
                double *probs = o->probs + (((int64_t)b * p->heads_q + h) * p->max_q + i) * p->max_kv;
                o->lse[at] += more;
                attn__store(lse_dtype, c->buffers.lse, at, o->lse[at]);
                if (o->lse[at] == -INFINITY && hide) poison_d_o(c, b, i, h);
                for (int j = 0; j < p->max_kv; j++) probs[j] *= exp(-more);
                for (int x = 0; x < p->dim_v; x++) {
                    double value = o->o[row * p->dim_v + x] + more * rng_normal(&c->rng);
                    attn__store(p->out_dtype, c->buffers.o.data, case_q_at(c, &c->buffers.o, b, i, h) + x, value);
                }
            }
        }
    }
    copy_block(o, c, block_find(c, "o"));
    copy_block(o, c, block_find(c, "lse"));
    copy_block(o, c, block_find(c, "d_o"));
}

static attn_status backward(oracle *o, const check_case *c, attn_context *ref) {
    const attn_problem *p = &c->problem;
    attn_buffers f = o->buffers;
    int64_t rows_q = c->rows_q * p->heads_q, rows_kv = c->rows_kv * p->heads_kv;
    o->d_q = doubles(rows_q * p->dim_qk);
    o->d_k = doubles(rows_kv * p->dim_qk);
    o->d_v = doubles(rows_kv * p->dim_v);
    f.d_q = dense_q(p, o->d_q, p->dim_qk);
    f.d_k = dense_kv(p, o->d_k, p->dim_qk);
    f.d_v = dense_kv(p, o->d_v, p->dim_v);
    float *d_sink = NULL;
    if (has(c, F_D_BIAS)) {
        o->d_bias = doubles(case_pairs(c));
        f.d_bias = dense_matrix(p, o->d_bias);
    }
    if (has(c, F_D_SINK)) f.d_sink = d_sink = must_alloc(p->heads_q, sizeof *d_sink);
    attn_status status = attn_backward(ref, &o->problem, &f, NULL);
    if (d_sink) {
        o->d_sink = must_alloc(p->heads_q, sizeof *o->d_sink);
        for (int h = 0; h < p->heads_q; h++) o->d_sink[h] = d_sink[h];
    }
    free(d_sink);
    return status;
}

/* The call after the append: the new keys are in the cache, the queries are rotated, and nothing is left to append. */
static void settle_append(oracle *o, const check_case *c) {
    attn_problem *p = &o->problem;
    attn_buffers *f = &o->buffers;
    bool rotated = p->flags & ATTN_ROTARY;
    p->flags &= ~(ATTN_APPEND | ATTN_VARLEN_NEW | ATTN_ROTARY | ATTN_ROTARY_INTERLEAVED | ATTN_ROTARY_POS);
    p->max_new = p->rotary_dim = p->rotary_len = 0;
    p->total_new = 0;
    f->k_new.data = f->v_new.data = NULL;
    f->cu_new = f->rotary_pos = NULL;
    f->rotary_cos = f->rotary_sin = NULL;
    int32_t *used = o->memory[block_find(c, "used_kv") - c->blocks];
    for (int b = 0; b < p->batch; b++) used[b] += c->seq[b].appended;
    if (!rotated) return;
    o->q = doubles(c->rows_q * p->heads_q * p->dim_qk);
    f->q = dense_q(&c->problem, o->q, p->dim_qk);
    for (int b = 0; b < p->batch; b++) {
        for (int i = 0; i < c->seq[b].sq; i++) {
            int64_t at = c->seq[b].rotary_pos + (p->flags & (ATTN_CAUSAL | ATTN_WINDOW) ? i : 0);
            for (int h = 0; h < p->heads_q; h++) {
                double *row = o->q + case_q_at(c, &f->q, b, i, h), held[1];
                for (int x = 0; x < p->dim_qk; x++)
                    row[x] = attn__load(c->problem.dtype, c->buffers.q.data, case_q_at(c, &c->buffers.q, b, i, h) + x);
                rotate(c, row, at);
                for (int x = 0; x < c->problem.rotary_dim; x++) {
                    attn__store(c->problem.dtype, held, 0, row[x]);
                    row[x] = attn__load(c->problem.dtype, held, 0);
                }
            }
        }
    }
}

attn_status oracle_run(oracle *o, check_case *c, attn_context *ref) {
    memset(o, 0, sizeof *o);
    o->problem = c->given;
    o->buffers = c->buffers;
    attn_problem *p = &o->problem;
    p->dtype = p->kv_dtype = p->out_dtype = p->bias_dtype = p->rotary_dtype = ATTN_F64;
    for (int n = 0; n < c->block_count; n++) {
        const block *b = &c->blocks[n];
        if (b->role == BLOCK_CACHE) o->cache[n] = append(c, b, b->pointer == offsetof(attn_buffers, k));
        if (b->role != BLOCK_OUT) copy_block(o, c, b);
    }
    if (p->op == ATTN_KV_APPEND) return ATTN_OK;
    if (case_appends(c)) settle_append(o, c);
    attn_status status = forward(o, c, ref);
    if (status != ATTN_OK || p->op == ATTN_FORWARD) return status;
    store_forward(o, c);
    return backward(o, c, ref);
}

void oracle_free(oracle *o) {
    double **results[] = {&o->o,         &o->lse,       &o->probs,        &o->d_q,
                          &o->d_k,       &o->d_v,       &o->d_bias,       &o->d_sink,
                          &o->o_error,   &o->lse_error, &o->probs_error,  &o->d_q_error,
                          &o->d_k_error, &o->d_v_error, &o->d_bias_error, &o->d_sink_error,
                          &o->q};
    for (size_t n = 0; n < sizeof results / sizeof results[0]; n++) free(*results[n]);
    for (int n = 0; n < CASE_BLOCKS; n++) {
        free(o->memory[n]);
        free(o->cache[n]);
    }
}
