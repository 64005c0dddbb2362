/*
 * The backward pass of `ref`. Probabilities come from the lse that the caller gives, D from the given o, so that both may belong to a
 * softmax over more keys than are here (ring attention):
 *
 *   p = exp(s - lse)    D = sum_x d_o o    d_p = d_o . v_j (dropped: 0, kept: / (1 - dropout))    d_s = p (d_p - D + d_lse)
 *
 * Each gradient is summed in double and rounded once. d_bias makes a pass of its own, which recomputes the rows, so that its
 * sums, along whichever dims it is broadcast, need no more room than one row.
 */
#include "ref.h"

/* The row of d_o and the gradients of the scores of row i of head h. False for a row without keys, which lse tells. */
static bool row_gradient(attn_ref *r, int32_t h, int32_t i) {
    const attn_problem *p = r->p;
    const attn_buffers *f = r->f;
    int64_t lse_at = attn__lse_index(p, &r->s, i, h);
    double lse = attn__load(r->lse_dtype, f->lse, lse_at), o[ATTN_MAX_DIM];
    if (lse == -INFINITY) return false;
    attn__ref_scores(r, h, i);
    attn__ref_row(p->out_dtype, f->o.data, attn__q_offset(p, &f->o, &r->s, i, h), p->dim_v, 1, o);
    attn__ref_row(p->out_dtype, f->d_o.data, attn__q_offset(p, &f->d_o, &r->s, i, h), p->dim_v, 1, r->d_o);
    double d_lse = f->d_lse ? attn__load(r->lse_dtype, f->d_lse, lse_at) : 0;
    double common = d_lse - attn__ref_dot(o, r->d_o, r->pad_v);
    for (int32_t n = 0; n < r->count; n++) {
        int32_t j = r->key[n];
        bool kept = !attn__ref_dropped(r, h, i, j);
        double probability = exp(r->score[n] - lse);
        double d_p = kept ? r->keep * attn__ref_dot(r->d_o, r->v + (int64_t)j * r->pad_v, r->pad_v) : 0;
        r->d_score[n] = probability * (d_p + common);
        r->weight[n] = kept ? r->keep * probability : 0;
    }
    /* The sink is a key without a value: its d_p is 0. */
    if (p->flags & ATTN_SINK) r->d_sink_row = exp(f->sink[h] - lse) * common;
    return true;
}

static void store_row(attn_dtype dtype, void *data, int64_t at, int32_t n, const double *row) {
    for (int32_t x = 0; x < n; x++) attn__store(dtype, data, at + x, row[x]);
}

/* Writes d_q of one row and adds to d_k, d_v and d_sink. */
static void backward_row(attn_ref *r, int32_t h, int32_t i) {
    const attn_problem *p = r->p;
    const attn_buffers *f = r->f;
    double d_q[ATTN_MAX_DIM] = {0};
    bool has_keys = row_gradient(r, h, i);
    int32_t count = has_keys ? r->count : 0;
    if (has_keys && (p->flags & ATTN_SINK)) r->d_sink[h] += r->d_sink_row;
    for (int32_t n = 0; n < count; n++) {
        int64_t j = r->key[n];
        double d_dot = r->d_score[n] * r->slope[n];
        attn__ref_add(d_q, d_dot, r->k + j * r->pad_qk, r->pad_qk);
        attn__ref_add(r->d_k + j * r->pad_qk, d_dot, r->q, r->pad_qk);
        attn__ref_add(r->d_v + j * r->pad_v, r->weight[n], r->d_o, r->pad_v);
    }
    if (f->d_q.data) store_row(p->dtype, f->d_q.data, attn__q_offset(p, &f->d_q, &r->s, i, h), p->dim_qk, d_q);
}

/* d_q of the query heads of one KV head, and its d_k and d_v, which are sums over them. */
static void backward_group(attn_ref *r) {
    const attn_problem *p = r->p;
    const attn_buffers *f = r->f;
    int32_t group = p->heads_q / p->heads_kv;
    for (int64_t x = 0; x < (int64_t)r->s.sk * r->pad_qk; x++) r->d_k[x] = 0;
    for (int64_t x = 0; x < (int64_t)r->s.sk * r->pad_v; x++) r->d_v[x] = 0;
    for (int32_t h = r->kv_head * group; h < (r->kv_head + 1) * group; h++)
        for (int32_t i = 0; i < r->s.sq; i++) backward_row(r, h, i);
    for (int32_t j = 0; j < r->s.sk; j++) {
        int64_t k_at = attn__kv_offset(p, f, &f->d_k, &r->s, r->s.leftpad + j, r->kv_head);
        int64_t v_at = attn__kv_offset(p, f, &f->d_v, &r->s, r->s.leftpad + j, r->kv_head);
        const double *d_k = r->d_k + (int64_t)j * r->pad_qk, *d_v = r->d_v + (int64_t)j * r->pad_v;
        if (f->d_k.data) store_row(p->kv_dtype, f->d_k.data, k_at, p->dim_qk, d_k);
        if (f->d_v.data) store_row(p->kv_dtype, f->d_v.data, v_at, p->dim_v, d_v);
    }
}

/* Indices of d_bias that go into one element of it along one dim: one, or all where the dim is summed. */
typedef struct span {
    int32_t first, end;
} span;

static span span_of(int64_t stride, int32_t at, int32_t extent) { return stride ? (span){at, at + 1} : (span){0, extent}; }

/* Adds the gradients of the scores of these sequences, heads and rows to r->d_bias. */
static void bias_sum(attn_ref *r, span batches, span heads, span rows, bool sum_keys) {
    for (int32_t b = batches.first; b < batches.end; b++) {
        for (int32_t h = heads.first; h < heads.end; h++) {
            attn__ref_load(r, b, h / (r->p->heads_q / r->p->heads_kv));
            for (int32_t i = rows.first; i < rows.end && i < r->s.sq; i++) {
                int32_t count = row_gradient(r, h, i) ? r->count : 0;
                for (int32_t n = 0; n < count; n++) r->d_bias[sum_keys ? 0 : r->key[n]] += r->d_score[n];
            }
        }
    }
}

static void backward_bias(attn_ref *r) {
    const attn_problem *p = r->p;
    const attn_matrix *m = &r->f->d_bias;
    const int64_t *stride = m->stride;
    int32_t batches = stride[0] ? p->batch : 1, heads = stride[1] ? p->heads_q : 1;
    int32_t rows = stride[2] ? p->max_q : 1, cols = stride[3] ? p->max_kv : 1;
    for (int32_t b = 0; b < batches; b++) {
        for (int32_t h = 0; h < heads; h++) {
            for (int32_t i = 0; i < rows; i++) {
                for (int32_t j = 0; j < cols; j++) r->d_bias[j] = 0;
                bias_sum(r, span_of(stride[0], b, p->batch), span_of(stride[1], h, p->heads_q),
                         span_of(stride[2], i, p->max_q), stride[3] == 0);
                for (int32_t j = 0; j < cols; j++)
                    attn__store(p->bias_dtype, m->data, attn__matrix_at(m, b, h, i, j), r->d_bias[j]);
            }
        }
    }
}

void attn__ref_backward(attn_ref *r) {
    for (int32_t h = 0; h < r->p->heads_q; h++) r->d_sink[h] = 0;
    for (int32_t b = 0; b < r->p->batch; b++) {
        for (int32_t kv_head = 0; kv_head < r->p->heads_kv; kv_head++) {
            attn__ref_load(r, b, kv_head);
            backward_group(r);
        }
    }
    if (r->f->d_bias.data) backward_bias(r);
    for (int32_t h = 0; r->f->d_sink && h < r->p->heads_q; h++) r->f->d_sink[h] = (float)r->d_sink[h];
}
