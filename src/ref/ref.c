/*
 * Backend "ref": the naive algorithm in double on one thread, every feature of attn.h, forward and backward. It is the oracle
 * that every other kernel is tested against, so it has no tiles, no online softmax and no shortcuts; the one concession to
 * speed is that keys and values are converted to double once per KV head.
 */
#include <stdlib.h>

#include "ref.h"

void attn__ref_row(attn_dtype dtype, const void *data, int64_t at, int32_t n, double factor, double *out) {
    for (int32_t x = 0; x < n; x++) out[x] = attn__load(dtype, data, at + x) * factor;
    for (int32_t x = n; x < attn__ref_pad(n); x++) out[x] = 0;
}

void attn__ref_load(attn_ref *r, int32_t b, int32_t kv_head) {
    const attn_problem *p = r->p;
    const attn_buffers *f = r->f;
    if (r->kv_head == kv_head && r->s.b == b) return;
    r->kv_head = kv_head;
    r->s = attn__seq(p, f, b);
    r->mask = attn__seq_mask(p, &r->s);
    for (int32_t j = 0; j < r->s.sk; j++) {
        double k_descale = attn__kv_descale(p, f, f->k_descale, b, kv_head) *
                           attn__page_descale(p, f, f->k_descale, &r->s, r->s.leftpad + j, kv_head);
        double v_descale = attn__kv_descale(p, f, f->v_descale, b, kv_head) *
                           attn__page_descale(p, f, f->v_descale, &r->s, r->s.leftpad + j, kv_head);
        int64_t k_at = attn__kv_offset(p, f, &f->k, &r->s, r->s.leftpad + j, kv_head);
        int64_t v_at = attn__kv_offset(p, f, &f->v, &r->s, r->s.leftpad + j, kv_head);
        attn__ref_row(p->kv_dtype, f->k.data, k_at, p->dim_qk, k_descale, r->k + (int64_t)j * r->pad_qk);
        attn__ref_row(p->kv_dtype, f->v.data, v_at, p->dim_v, v_descale, r->v + (int64_t)j * r->pad_v);
    }
}

void attn__ref_scores(attn_ref *r, int32_t h, int32_t i) {
    const attn_problem *p = r->p;
    const attn_buffers *f = r->f;
    const attn_seq *s = &r->s;
    double alibi = p->flags & ATTN_ALIBI ? f->alibi[s->b * f->alibi_stride + h] : 0;
    attn__q_row(p, f, s, i, h, r->q);
    for (int32_t x = p->dim_qk; x < r->pad_qk; x++) r->q[x] = 0;
    r->count = 0;
    for (int32_t j = 0; j < s->sk; j++) {
        const int32_t *flash = p->flashmask_vectors ? attn__flash_at(p, f, s->b, r->kv_head, j) : NULL;
        if (!attn__mask_allowed(&r->mask, i, j, flash)) continue;
        double x = p->scale * attn__ref_dot(r->q, r->k + (int64_t)j * r->pad_qk, r->pad_qk), slope = p->scale;
        if (p->softcap > 0) {
            double t = tanh(x / p->softcap);
            x = p->softcap * t;
            slope *= 1 - t * t;
        }
        if (p->flags & ATTN_ALIBI) x -= alibi * abs(i + (s->sk - s->sq) - j);
        if (p->flags & ATTN_BIAS) x += attn__load(p->bias_dtype, f->bias.data, attn__matrix_at(&f->bias, s->b, h, i, j));
        r->key[r->count] = j;
        r->score[r->count] = x;
        r->slope[r->count] = slope;
        r->count++;
    }
}

/* ---- the backend ---- */

static const attn_kernel kernels[] = {
    {.name = "fwd_ref_f64", .needs = "", .op = ATTN_FORWARD, .wide = true},
    {.name = "bwd_ref_f64", .needs = "", .op = ATTN_BACKWARD, .wide = true},
    {.name = "append_ref", .needs = "", .op = ATTN_KV_APPEND, .wide = true},
};
enum { KERNELS = sizeof kernels / sizeof kernels[0] };

static const attn_kernel *kernel(int32_t index, bool *available) {
    if (available) *available = true;
    return index >= 0 && index < KERNELS ? &kernels[index] : NULL;
}

static attn_status make_plan(attn_plan *plan) {
    const attn_problem *p = &plan->problem;
    for (int n = 0; n < KERNELS; n++)
        if (kernels[n].op == p->op) plan->kernel = &kernels[n];
    plan->slots = 1;
    attn__plan_say(plan, "kernel: %s, naive, row by row, in double, one thread\n", plan->kernel->name);
    if (p->op == ATTN_KV_APPEND) return ATTN_OK;
    bool backward = p->op == ATTN_BACKWARD;
    int64_t k_bytes = (int64_t)sizeof(double) * attn__ref_pad(p->dim_qk);
    int64_t v_bytes = (int64_t)sizeof(double) * attn__ref_pad(p->dim_v);
    int64_t keys = attn__max32(p->max_kv, 1); /* one at the least, so that there always is a workspace */
    bool fits = attn__plan_reserve(plan, REF_K, keys, k_bytes) && attn__plan_reserve(plan, REF_V, keys, v_bytes) &&
                attn__plan_reserve(plan, REF_KEY, keys, sizeof(int32_t)) &&
                attn__plan_reserve(plan, REF_ROW, keys, 4 * sizeof(double));
    if (backward)
        fits = fits && attn__plan_reserve(plan, REF_D_K, keys, k_bytes) &&
               attn__plan_reserve(plan, REF_D_V, keys, v_bytes) &&
               attn__plan_reserve(plan, REF_BIAS, keys, sizeof(double)) &&
               attn__plan_reserve(plan, REF_SINK, p->heads_q, sizeof(double));
    RETURN_IF(!fits, ATTN_INVALID, "max_kv=%d: the workspace overflows size_t", (int)p->max_kv);
    return ATTN_OK;
}

static attn_status run(const attn_plan *plan, const attn_buffers *f, void *stream) {
    const attn_problem *p = &plan->problem;
    (void)stream;
    if (p->flags & ATTN_APPEND) RETURN_IF_ERROR(attn__host_append(plan, f));
    if (p->op == ATTN_KV_APPEND) return ATTN_OK;
    RETURN_IF_ERROR(attn__host_fill_padding(plan, f));

    attn_ref r = {.p = p, .f = f, .kv_head = -1};
    r.lse_dtype = attn__real_dtype(p->dtype);
    r.pad_qk = attn__ref_pad(p->dim_qk);
    r.pad_v = attn__ref_pad(p->dim_v);
    r.dropout = attn__philox_make(f->seed, f->offset, p->dropout);
    r.keep = 1 / (1 - p->dropout);
    r.k = attn__part(plan, f, REF_K);
    r.v = attn__part(plan, f, REF_V);
    r.d_k = attn__part(plan, f, REF_D_K);
    r.d_v = attn__part(plan, f, REF_D_V);
    r.key = attn__part(plan, f, REF_KEY);
    r.score = attn__part(plan, f, REF_ROW);
    r.slope = r.score + p->max_kv;
    r.d_score = r.slope + p->max_kv;
    r.weight = r.d_score + p->max_kv;
    r.d_bias = attn__part(plan, f, REF_BIAS);
    r.d_sink = attn__part(plan, f, REF_SINK);
    if (p->op == ATTN_FORWARD)
        attn__ref_forward(&r);
    else
        attn__ref_backward(&r);
    return ATTN_OK;
}

const attn_backend attn__backend_ref = {
    .name = "ref",
    .id = ATTN_BACKEND_REF,
    .host = true,
    .kernel = kernel,
    .plan = make_plan,
    .run = run,
    .tiles = NULL,
    .merge = attn__host_merge,
    .rotary = attn__host_rotary,
};
