/*
 * The oracle: the same call on `ref`, in double and with dense outputs, and how far off a correct result may be.
 *
 * The error analysis. Let u be the unit roundoff of the arithmetic (2^-24; f64 problems 2^-53). A kernel computes
 * x = scale * q.k with an error of about u sqrt(d) |scale| |q| |k| (rounding errors of a sum add up like a random walk; |q||k|
 * bounds the sum of absolute products), then adds, caps and subtracts lse, which costs u times the size of these numbers.
 * An absolute error of a score is a relative error of its probability:
 *
 *     e_ij = u (dot(d) |scale| |q_i| |k_j| + add (|s_ij| + |lse_i|) + sum(n))         p_ij is off by p_ij (e_ij + e_i)
 *     e_i  = sum_j p_ij e_ij                                                         lse_i is off by e_i
 *     o_i is off by sum_j p_ij (e_ij + e_i) max|v_j|
 *     d_s_ij is off by b_ij = p_ij g_ij (e_ij + u dot(d_v)),   g_ij = |d_o_i| (|v_j| + |o_i|) + |d_lse_i|
 *     d_q_i by |scale| sum_j b_ij max|k_j|     d_k_j by |scale| sum_i b_ij max|q_i|     d_v_j by sum_i p_ij e_ij max|d_o_i|
 *
 * dot, add and sum below are small constants. Keys that ref gives no probability to contribute nothing: one wrong key among
 * n shows as an error of 1/n, some orders of magnitude above these bounds.
 */
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "compare.h"
#include "numeric.h"

static double dot_constant(double d) { return 2 + sqrt(d) / 2; }
/* Where strides of zero repeat a value, the roundings of a sum repeat too, and add up instead of cancelling. */
static double sum_constant(const check_case *c, double n) { return 4 + (has(c, F_BROADCAST) ? n / 4 : sqrt(n) / 2); }
static const double add_constant = 4;

/* ---- ref ---- */

/* Appended values are rounded to the dtypes of the cache, and rotated q to its own: those the oracle must keep. */
static bool promoted(const check_case *c) { return !case_appends(c); }

static attn_dtype copy_dtype(const check_case *c, const block *b) {
    return promoted(c) && b->dtype && !b->fixed ? ATTN_F64 : b->dtype;
}

static void copy_block(oracle *o, const check_case *c, int index) {
    const block *b = &c->blocks[index];
    attn_dtype dtype = copy_dtype(c, b);
    size_t element = dtype ? attn_dtype_size(dtype) : sizeof(int32_t);
    if (!o->memory[index]) o->memory[index] = must_alloc(b->count, element);
    if (dtype == b->dtype) {
        memcpy(o->memory[index], b->data, (size_t)b->count * element);
    } else {
        for (int64_t n = 0; n < b->count; n++) attn__store(dtype, o->memory[index], n, attn__load(b->dtype, b->data, n));
    }
    void *target = (char *)o->memory[index] + b->origin * (int64_t)element;
    memcpy((char *)&o->buffers + b->pointer, &target, sizeof target);
}

/* Memory for a raw result, NaN until it is written. */
static void *raw(const oracle *o, int64_t count) {
    void *memory = must_alloc(count, attn_dtype_size(o->real));
    memset(memory, 0xff, (size_t)count * attn_dtype_size(o->real));
    return memory;
}

/* Turns a raw result into doubles and frees it. */
static double *cooked(const oracle *o, void *memory, int64_t count) {
    if (!memory || o->real == ATTN_F64) return memory;
    double *out = must_alloc(count, sizeof *out);
    for (int64_t n = 0; n < count; n++) out[n] = attn__load(o->real, memory, n);
    free(memory);
    return out;
}

static int64_t pairs(const check_case *c) {
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
    void *out = raw(o, rows * c->problem.dim_v), *lse = raw(o, rows), *probs = raw(o, pairs(c));
    p.op = ATTN_FORWARD;
    f.o = dense_q(&c->problem, out, c->problem.dim_v);
    f.lse = lse;
    f.probs = dense_matrix(&p, probs);
    f.d_o.data = f.d_q.data = f.d_k.data = f.d_v.data = f.d_bias.data = f.d_sink = NULL;
    f.d_lse = NULL;
    attn_status status = attn_forward(ref, &p, &f, NULL);
    o->o = cooked(o, out, rows * c->problem.dim_v);
    o->lse = cooked(o, lse, rows);
    o->probs = cooked(o, probs, pairs(c));
    return status;
}

/* Gives a backward case the o and lse of its forward, rounded to their dtypes; F_RING: as if there had been more keys. */
static void store_forward(oracle *o, check_case *c) {
    const attn_problem *p = &c->problem;
    attn_dtype lse_dtype = p->dtype == ATTN_F64 ? ATTN_F64 : ATTN_F32;
    for (int b = 0; b < p->batch; b++) {
        for (int h = 0; h < p->heads_q; h++) {
            for (int i = 0; i < c->seq[b].sq; i++) {
                int64_t at = case_lse_at(c, b, i, h), row = case_q_row(c, b, i) * p->heads_q + h;
                double more = c->ring ? c->ring[at] : 0;
                double *probs = o->probs + (((int64_t)b * p->heads_q + h) * p->max_q + i) * p->max_kv;
                o->lse[at] += more;
                attn__store(lse_dtype, c->buffers.lse, at, o->lse[at]);
                for (int j = 0; j < p->max_kv; j++) probs[j] *= exp(-more);
                for (int x = 0; x < p->dim_v; x++) {
                    double value = o->o[row * p->dim_v + x] + more * rng_normal(&c->rng);
                    attn__store(p->out_dtype, c->buffers.o.data, case_q_at(c, &c->buffers.o, b, i, h) + x, value);
                }
            }
        }
    }
    for (int n = 0; n < c->block_count; n++) {
        bool is_result =
            c->blocks[n].pointer == offsetof(attn_buffers, o) || c->blocks[n].pointer == offsetof(attn_buffers, lse);
        if (is_result) copy_block(o, c, n);
    }
}

static attn_status backward(oracle *o, const check_case *c, attn_context *ref) {
    const attn_problem *p = &c->problem;
    attn_buffers f = o->buffers;
    int64_t rows_q = c->rows_q * p->heads_q, rows_kv = c->rows_kv * p->heads_kv;
    o->d_q = raw(o, rows_q * p->dim_qk);
    o->d_k = raw(o, rows_kv * p->dim_qk);
    o->d_v = raw(o, rows_kv * p->dim_v);
    f.d_q = dense_q(p, o->d_q, p->dim_qk);
    f.d_k = dense_kv(p, o->d_k, p->dim_qk);
    f.d_v = dense_kv(p, o->d_v, p->dim_v);
    float *d_sink = NULL;
    if (has(c, F_D_BIAS)) {
        o->d_bias = raw(o, pairs(c));
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

attn_status oracle_run(oracle *o, check_case *c, attn_context *ref) {
    memset(o, 0, sizeof *o);
    o->problem = c->given;
    o->buffers = c->buffers;
    if (promoted(c)) {
        attn_problem *p = &o->problem;
        p->dtype = p->kv_dtype = p->out_dtype = p->bias_dtype = p->rotary_dtype = ATTN_F64;
    } else if (c->problem.dtype != ATTN_F64) {
        o->problem.out_dtype = ATTN_F32;
    }
    o->real = o->problem.dtype == ATTN_F64 ? ATTN_F64 : ATTN_F32;
    for (int n = 0; n < c->block_count; n++) {
        if (c->blocks[n].role != BLOCK_OUT) copy_block(o, c, n);
    }
    if (c->problem.op == ATTN_KV_APPEND) return attn_kv_append(ref, &o->problem, &o->buffers, NULL);
    attn_status status = forward(o, c, ref);
    if (status != ATTN_OK || c->problem.op == ATTN_FORWARD) return status;
    store_forward(o, c);
    return backward(o, c, ref);
}

void oracle_free(oracle *o) {
    double **results[] = {&o->o,         &o->lse,       &o->probs,        &o->d_q,         &o->d_k,         &o->d_v,
                          &o->d_bias,    &o->d_sink,    &o->o_error,      &o->lse_error,   &o->probs_error, &o->d_q_error,
                          &o->d_k_error, &o->d_v_error, &o->d_bias_error, &o->d_sink_error};
    for (size_t n = 0; n < sizeof results / sizeof results[0]; n++) free(*results[n]);
    for (int n = 0; n < CASE_BLOCKS; n++) free(o->memory[n]);
}

/* ---- bounds ---- */

/* Euclidean norm and largest magnitude of a row. */
typedef struct magnitude {
    double norm, most;
} magnitude;

static magnitude measure(attn_dtype dtype, const void *data, int64_t at, int32_t n, double factor) {
    magnitude m = {0, 0};
    for (int32_t x = 0; x < n; x++) {
        double value = fabs(attn__load(dtype, data, at + x) * factor);
        m.norm += value * value;
        m.most = value > m.most ? value : m.most;
    }
    m.norm = sqrt(m.norm);
    return m;
}

/* The state of the analysis: one sequence and query head at a time. */
typedef struct analysis {
    oracle *o;
    const check_case *c;
    double unit;      /* roundoff of the arithmetic */
    double least;     /* its smallest normal number: probabilities below may vanish */
    double keep;      /* 1 / (1 - dropout) */
    magnitude *k, *v; /* [max_kv] of this sequence and KV head */
    double *e;        /* [max_kv]: e_ij of this row; 0: masked */
    int b, h, kv_head;
} analysis;

static attn_dtype oracle_dtype(const check_case *c, attn_dtype dtype) { return promoted(c) ? ATTN_F64 : dtype; }

static void measure_kv(analysis *a) {
    const check_case *c = a->c;
    const attn_problem *p = &c->problem;
    const attn_buffers *f = &a->o->buffers;
    attn_dtype dtype = oracle_dtype(c, p->kv_dtype);
    double k_scale = case_descale(c, c->buffers.k_descale, a->b, a->kv_head);
    double v_scale = case_descale(c, c->buffers.v_descale, a->b, a->kv_head);
    for (int j = 0; j < c->seq[a->b].sk; j++) {
        int position = c->seq[a->b].leftpad + j;
        a->k[j] = measure(dtype, f->k.data, case_kv_at(c, &f->k, a->b, position, a->kv_head), p->dim_qk, k_scale);
        a->v[j] = measure(dtype, f->v.data, case_kv_at(c, &f->v, a->b, position, a->kv_head), p->dim_v, v_scale);
    }
}

/* What the gradients of row i allow; `q` and the e_ij are those of the row. */
static void bound_gradients(analysis *a, int i, magnitude q, const double *probs) {
    oracle *o = a->o;
    const check_case *c = a->c;
    const attn_problem *p = &c->problem;
    const attn_buffers *f = &o->buffers;
    int64_t row = case_q_row(c, a->b, i) * p->heads_q + a->h, lse_at = case_lse_at(c, a->b, i, a->h);
    magnitude d_o = measure(ATTN_F64, f->d_o.data, case_q_at(c, &f->d_o, a->b, i, a->h), p->dim_v, 1);
    magnitude out = measure(ATTN_F64, f->o.data, case_q_at(c, &f->o, a->b, i, a->h), p->dim_v, 1);
    double d_lse = f->d_lse ? fabs(((const double *)f->d_lse)[lse_at]) : 0, factor = fabs(p->scale);
    double dots = a->unit * dot_constant(p->dim_v);
    for (int j = 0; j < c->seq[a->b].sk; j++) {
        if (a->e[j] == 0) continue;
        double probability = fabs(probs[j]), e = a->e[j] + dots, g = d_o.norm * (a->keep * a->v[j].norm + out.norm) + d_lse;
        if (p->softcap > 0) e += a->unit * dot_constant(p->dim_qk) * factor * q.norm * a->k[j].norm / p->softcap;
        double off = (probability * e + a->least) * g;
        int64_t kv = case_kv_row(c, a->b, c->seq[a->b].leftpad + j) * p->heads_kv + a->kv_head;
        o->d_q_error[row] += factor * off * a->k[j].most;
        o->d_k_error[kv] += factor * off * q.most;
        o->d_v_error[kv] += a->keep * (probability * a->e[j] + a->least) * d_o.most;
        if (o->d_bias_error) o->d_bias_error[(((int64_t)a->b * p->heads_q + a->h) * p->max_q + i) * p->max_kv + j] = off;
    }
    if (!o->d_sink_error || !isfinite(c->buffers.sink[a->h])) return;
    double size = add_constant * (fabs(c->buffers.sink[a->h]) + fabs(o->lse[lse_at])) + sum_constant(c, (double)c->rows_q);
    o->d_sink_error[a->h] +=
        exp(c->buffers.sink[a->h] - o->lse[lse_at]) * (d_o.norm * out.norm + d_lse) * (a->unit * size + dots);
}

static void bound_row(analysis *a, int i) {
    oracle *o = a->o;
    const check_case *c = a->c;
    const attn_problem *p = &c->problem;
    const sequence *s = &c->seq[a->b];
    int64_t row = case_q_row(c, a->b, i) * p->heads_q + a->h, lse_at = case_lse_at(c, a->b, i, a->h);
    int64_t line = (((int64_t)a->b * p->heads_q + a->h) * p->max_q + i) * p->max_kv;
    const double *probs = o->probs + line;
    double lse = o->lse[lse_at], dot = dot_constant(p->dim_qk);
    if (lse == -INFINITY) return; /* exact: zeros */
    int longer = s->sq * (p->heads_q / p->heads_kv) > s->sk ? s->sq * (p->heads_q / p->heads_kv) : s->sk;
    double q_scale = case_descale(c, c->buffers.q_descale, a->b, a->kv_head), sum = sum_constant(c, longer);
    magnitude q = measure(oracle_dtype(c, p->dtype), o->buffers.q.data, case_q_at(c, &o->buffers.q, a->b, i, a->h),
                          p->dim_qk, q_scale);
    double mean = 0, weight = 0, weighted = 0, left = 1;
    for (int j = 0; j < s->sk; j++) {
        double probability = fabs(probs[j]);
        a->e[j] = 0;
        if (probability == 0 && !case_allowed(c, a->b, a->h, i, j)) continue;
        double x = fabs(p->scale) * q.norm * a->k[j].norm, score = log(fmax(probability, DBL_MIN)) + lse;
        a->e[j] = a->unit * (dot * x + add_constant * (fabs(score) + fabs(lse)) + sum);
        mean += probability * a->e[j];
        weight += probability * a->v[j].most;
        weighted += (probability * a->e[j] + a->least) * a->v[j].most;
        left -= probability;
    }
    if ((p->flags & ATTN_SINK) && isfinite(c->buffers.sink[a->h]))
        mean += fabs(left) * a->unit * (add_constant * (fabs(c->buffers.sink[a->h]) + fabs(lse)) + sum);
    o->o_error[row] = a->keep * (weighted + mean * weight);
    o->lse_error[lse_at] = mean + a->unit * (add_constant * fabs(lse) + sum);
    for (int j = 0; j < s->sk; j++) {
        if (a->e[j] > 0) o->probs_error[line + j] = fabs(probs[j]) * (a->e[j] + mean) + a->least;
    }
    if (p->op == ATTN_BACKWARD) bound_gradients(a, i, q, probs);
}

/* Does ref see the keys that attn.h says it should? Where a probability cannot have vanished, both ways. */
static bool mask_agrees(const analysis *a, int i, char *why, size_t size) {
    const check_case *c = a->c;
    const attn_problem *p = &c->problem;
    const double *probs = a->o->probs + (((int64_t)a->b * p->heads_q + a->h) * p->max_q + i) * p->max_kv;
    bool may_vanish = (p->flags & (ATTN_ALIBI | ATTN_BIAS)) || c->q_size > 1;
    for (int j = 0; j < p->max_kv; j++) {
        bool allowed = i < c->seq[a->b].sq && j < c->seq[a->b].sk && case_allowed(c, a->b, a->h, i, j);
        if (!(probs[j] == probs[j]) || (probs[j] != 0 && !allowed) || (probs[j] == 0 && allowed && !may_vanish)) {
            snprintf(why, size, "ref: batch %d, head %d, row %d gives key %d, which it may%s see, probability %g", a->b,
                     a->h, i, j, allowed ? "" : " not", probs[j]);
            return false;
        }
    }
    return true;
}

static bool all_numbers(const double *x, int64_t count, const char *name, char *why, size_t size) {
    for (int64_t n = 0; x && n < count; n++) {
        if (isfinite(x[n]) || (x[n] == -INFINITY && strcmp(name, "lse") == 0)) continue;
        snprintf(why, size, "ref: element %lld of %s is %g", (long long)n, name, x[n]);
        return false;
    }
    return true;
}

static bool results_sane(const oracle *o, const check_case *c, char *why, size_t size) {
    const attn_problem *p = &c->problem;
    int64_t rows_q = c->rows_q * p->heads_q, rows_kv = c->rows_kv * p->heads_kv;
    return all_numbers(o->o, rows_q * p->dim_v, "o", why, size) && all_numbers(o->lse, rows_q, "lse", why, size) &&
           all_numbers(o->probs, pairs(c), "probs", why, size) &&
           all_numbers(o->d_q, rows_q * p->dim_qk, "d_q", why, size) &&
           all_numbers(o->d_k, rows_kv * p->dim_qk, "d_k", why, size) &&
           all_numbers(o->d_v, rows_kv * p->dim_v, "d_v", why, size) &&
           all_numbers(o->d_bias, pairs(c), "d_bias", why, size) && all_numbers(o->d_sink, p->heads_q, "d_sink", why, size);
}

bool oracle_bound(oracle *o, const check_case *c, char *why, size_t size) {
    const attn_problem *p = &c->problem;
    if (p->op == ATTN_KV_APPEND) return true;
    if (!results_sane(o, c, why, size)) return false;
    int64_t rows_q = c->rows_q * p->heads_q, rows_kv = c->rows_kv * p->heads_kv;
    o->o_error = must_alloc(rows_q, sizeof(double));
    o->lse_error = must_alloc(rows_q, sizeof(double));
    o->probs_error = must_alloc(pairs(c), sizeof(double));
    o->d_q_error = must_alloc(rows_q, sizeof(double));
    o->d_k_error = must_alloc(rows_kv, sizeof(double));
    o->d_v_error = must_alloc(rows_kv, sizeof(double));
    if (o->d_bias) o->d_bias_error = must_alloc(pairs(c), sizeof(double));
    if (o->d_sink) o->d_sink_error = must_alloc(p->heads_q, sizeof(double));
    bool wide = p->dtype == ATTN_F64; /* then ref is no more exact than what it judges */
    analysis a = {.o = o, .c = c, .unit = wide ? 0x1p-52 : 0x1p-24, .least = wide ? DBL_MIN : FLT_MIN};
    a.keep = 1 / (1 - p->dropout);
    a.k = must_alloc(p->max_kv, sizeof *a.k);
    a.v = must_alloc(p->max_kv, sizeof *a.v);
    a.e = must_alloc(p->max_kv, sizeof *a.e);
    bool sane = true;
    for (a.b = 0; sane && a.b < p->batch; a.b++) {
        for (a.h = 0; sane && a.h < p->heads_q; a.h++) {
            a.kv_head = a.h / (p->heads_q / p->heads_kv);
            if (a.h % (p->heads_q / p->heads_kv) == 0) measure_kv(&a);
            for (int i = 0; sane && i < p->max_q; i++) {
                sane = mask_agrees(&a, i, why, size);
                if (sane && i < c->seq[a.b].sq) bound_row(&a, i);
            }
        }
    }
    free(a.k);
    free(a.v);
    free(a.e);
    return sane;
}
