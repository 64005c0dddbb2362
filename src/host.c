/*
 * What the host backends share. None of it is hot beside attention itself, so rows pass through double, one element at
 * a time; the work is spread over threads where the caller's backend has them.
 */
#include "host.h"

#include "numeric.h"

/* ---- rotary ---- */

void attn__rotate(const attn_rotation *r, double *x) {
    for (int32_t n = 0; n < r->rotary_dim / 2; n++) {
        attn_pair at = attn__rotate_pair(r, n);
        attn__rotate_two(r, n, &x[at.first], &x[at.second]);
    }
}

/* Rounds x to the numbers of a dtype. */
static double rounded(attn_dtype dtype, double x) {
    double held[1];
    attn__store(dtype, held, 0, x);
    return attn__load(dtype, held, 0);
}

void attn__q_row(const attn_problem *p, const attn_buffers *f, const attn_seq *s, int32_t i, int32_t h, double *out) {
    int64_t at = attn__q_offset(p, &f->q, s, i, h);
    for (int32_t x = 0; x < p->dim_qk; x++) out[x] = attn__load(p->dtype, f->q.data, at + x);
    if (p->flags & ATTN_ROTARY) {
        attn_rotation r = attn__rotation(p, f, attn__rotary_pos(p, f, s) + i * attn__rotary_q_step(p));
        attn__rotate(&r, out);
        for (int32_t x = 0; x < p->rotary_dim; x++) out[x] = rounded(p->dtype, out[x]);
    }
    double descale = attn__descale(f, f->q_descale, s->b, h / (p->heads_q / p->heads_kv));
    if (descale != 1.0) {
        for (int32_t x = 0; x < p->dim_qk; x++) out[x] *= descale;
    }
}

/* ---- append ---- */

typedef struct append_job {
    const attn_problem *p;
    const attn_buffers *f;
} append_job;

/* One row of k_new or v_new goes to its cache position. */
static void append_row(const append_job *job, const attn_seq *s, int32_t row, int32_t h, bool is_key) {
    const attn_problem *p = job->p;
    const attn_buffers *f = job->f;
    const attn_tensor *from = is_key ? &f->k_new : &f->v_new, *to = is_key ? &f->k : &f->v;
    int32_t dim = is_key ? p->dim_qk : p->dim_v;
    int64_t source = attn__new_offset(p, from, s, row, h), target = attn__kv_offset(p, f, to, s, s->used + row, h);
    bool rotated = is_key && (p->flags & ATTN_ROTARY);
    if (p->dtype == p->kv_dtype && !rotated) { /* the same bytes */
        size_t size = attn_dtype_size(p->dtype);
        memcpy((char *)to->data + target * (int64_t)size, (const char *)from->data + source * (int64_t)size,
               (size_t)dim * size);
        return;
    }
    double x[ATTN_MAX_DIM];
    for (int32_t n = 0; n < dim; n++) x[n] = attn__load(p->dtype, from->data, source + n);
    if (rotated) {
        attn_rotation r = attn__rotation(p, f, attn__rotary_pos(p, f, s) + row);
        attn__rotate(&r, x);
    }
    const float *factors = is_key ? f->k_descale : f->v_descale;
    double descale = p->dtype == p->kv_dtype ? 1.0
                                             : attn__kv_descale(p, f, factors, s->b, h) *
                                                   attn__page_descale(p, f, factors, s, s->used + row, h);
    for (int32_t n = 0; n < dim; n++) attn__store(p->kv_dtype, to->data, target + n, x[n] / descale);
}

static void append_sequence(void *arg, int64_t index, int32_t slot) {
    const append_job *job = arg;
    const attn_problem *p = job->p;
    int32_t h = (int32_t)(index % p->heads_kv);
    attn_seq s = attn__seq(p, job->f, (int32_t)(index / p->heads_kv));
    (void)slot;
    for (int32_t row = 0; row < s.appended; row++) {
        append_row(job, &s, row, h, true);
        append_row(job, &s, row, h, false);
    }
}

attn_status attn__host_append(const attn_plan *plan, const attn_buffers *f) {
    append_job job = {&plan->problem, f};
    return attn__parallel(plan->context, plan->slots, (int64_t)job.p->batch * job.p->heads_kv, append_sequence, &job);
}

/* ---- padding ---- */

/* Zeroes rows [first, end) of all heads; rows count from `base`. */
static void zero_rows(const attn_tensor *t, attn_dtype dtype, int64_t base, int64_t first, int64_t end, int32_t heads,
                      int32_t dim) {
    if (!t->data) return;
    int64_t size = (int64_t)attn_dtype_size(dtype);
    for (int64_t row = first; row < end; row++) {
        for (int32_t h = 0; h < heads; h++)
            memset((char *)t->data + (base + row * t->stride[1] + h * t->stride[2]) * size, 0, (size_t)(dim * size));
    }
}

/* Rows [first, end) of o and lse, or of d_q; a packed tensor counts rows from its beginning. */
static void pad_q(const attn_problem *p, const attn_buffers *f, int32_t b, int64_t first, int64_t end) {
    bool packed = p->flags & ATTN_VARLEN_Q;
    if (p->op == ATTN_BACKWARD) {
        zero_rows(&f->d_q, p->dtype, packed ? 0 : b * f->d_q.stride[0], first, end, p->heads_q, p->dim_qk);
        return;
    }
    zero_rows(&f->o, p->out_dtype, packed ? 0 : b * f->o.stride[0], first, end, p->heads_q, p->dim_v);
    for (int64_t row = first; f->lse && row < end; row++) {
        for (int32_t h = 0; h < p->heads_q; h++) {
            int64_t at = packed ? h * p->total_q + row : ((int64_t)b * p->heads_q + h) * p->max_q + row;
            attn__store(attn__real_dtype(p->dtype), f->lse, at, -INFINITY);
        }
    }
}

static void pad_kv(const attn_problem *p, const attn_buffers *f, int32_t b, int64_t first, int64_t end) {
    bool packed = p->flags & ATTN_VARLEN_KV;
    zero_rows(&f->d_k, p->kv_dtype, packed ? 0 : b * f->d_k.stride[0], first, end, p->heads_kv, p->dim_qk);
    zero_rows(&f->d_v, p->kv_dtype, packed ? 0 : b * f->d_v.stride[0], first, end, p->heads_kv, p->dim_v);
}

attn_status attn__host_fill_padding(const attn_plan *plan, const attn_buffers *f) {
    const attn_problem *p = &plan->problem;
    bool packed_q = p->flags & ATTN_VARLEN_Q, packed_kv = p->flags & ATTN_VARLEN_KV;
    int64_t q_end = 0, kv_end = 0; /* packed: rows up to here are covered */
    for (int32_t b = 0; b < p->batch; b++) {
        attn_seq s = attn__seq(p, f, b);
        int64_t q_rows = packed_q ? f->cu_q[b + 1] : p->max_q, kv_rows = packed_kv ? f->cu_kv[b + 1] : p->max_kv;
        pad_q(p, f, b, q_end, s.q_row);
        pad_q(p, f, b, s.q_row + s.sq, q_rows);
        if (packed_q) q_end = q_rows;
        if (p->op != ATTN_BACKWARD) continue;
        pad_kv(p, f, b, kv_end, s.kv_row + s.leftpad);
        pad_kv(p, f, b, s.kv_row + s.leftpad + s.sk, kv_rows);
        if (packed_kv) kv_end = kv_rows;
    }
    if (packed_q) pad_q(p, f, 0, q_end, p->total_q);
    if (packed_kv && p->op == ATTN_BACKWARD) pad_kv(p, f, 0, kv_end, p->total_kv);
    return ATTN_OK;
}
