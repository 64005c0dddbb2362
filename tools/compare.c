/*
 * Judges results against the oracle, element by element: an element is right when it is the correct rounding, to its dtype, of
 * a number that lies within the row's bound of what ref says. Padding and rows without keys have a bound of zero: exactly 0.
 *
 * Each element is put back to what it held before the call once it has been judged. Whatever then differs from the state before
 * the call is memory that the call had no business to change.
 */
#include "compare.h"

#include <math.h>
#include <stdarg.h>
#include <string.h>

#include "numeric.h"

void verdict_fail(verdict *v, const char *format, ...) {
    va_list arguments;
    if (v->failed) return;
    v->failed = true;
    va_start(arguments, format);
    vsnprintf(v->why, sizeof v->why, format, arguments);
    va_end(arguments);
}

/* ---- one element ---- */

static double roundoff(attn_dtype dtype) {
    return dtype == ATTN_F64 ? 0x1p-53 : dtype == ATTN_F32 ? 0x1p-24 : dtype == ATTN_F16 ? 0x1p-11 : 0x1p-8;
}

/* What a result near zero may lose: half of the smallest f16, or what the arithmetic flushes to zero on its way there. */
static double underflow(const check_case *c, attn_dtype dtype) {
    return dtype == ATTN_F16 ? 0x1p-25 : c->problem.dtype == ATTN_F64 && dtype == ATTN_F64 ? 0x1p-1020 : 0x1p-124;
}

/* What the rounding of the result does not explain, in units of what is allowed: at most 1 is right. */
static double judge(const check_case *c, attn_dtype dtype, double got, double want, double error) {
    if (want == -INFINITY) return got == want ? 0 : INFINITY;
    if (want != want) return got != got ? 0 : INFINITY;
    double off = fabs(got - want);
    if (off == 0) return 0;
    if (!(off < INFINITY) || (error == 0 && want == 0)) return INFINITY;
    double rest = off - roundoff(dtype) * fabs(want) - underflow(c, dtype);
    return rest <= 0 ? 0 : rest / (error * (1 + roundoff(dtype)));
}

/* The worst element of a tensor. */
typedef struct worst {
    double ratio, got, want, error;
    int64_t index[4];
} worst;

static void note(worst *w, double ratio, double got, double want, double error, const int64_t index[4]) {
    if (ratio <= w->ratio) return;
    *w = (worst){ratio, got, want, error, {index[0], index[1], index[2], index[3]}};
}

static void conclude(verdict *v, const worst *w, const char *name, const char *axes) {
    if (w->ratio <= 1 && w->ratio > v->worst) {
        v->worst = w->ratio;
        v->worst_name = name;
    }
    if (w->ratio <= 1) return;
    verdict_fail(v,
                 "%s at %s %lld, %lld, %lld, %lld: got %.9g, want %.9g, off by %.3g, and %.3g is allowed before rounding",
                 name, axes, (long long)w->index[0], (long long)w->index[1], (long long)w->index[2], (long long)w->index[3],
                 w->got, w->want, fabs(w->got - w->want), w->error);
}

/* ---- tensors ---- */

/* A tensor of [batch][rows][heads][dim] against dense results and one bound for each row and head. */
static void compare_tensor(verdict *v, const check_case *c, const char *name, const attn_tensor *t, int64_t batch,
                           int64_t rows, int64_t heads, int64_t dim, const double *want, const double *error) {
    const block *b = block_find(c, name);
    if (!b) return;
    size_t element = attn_dtype_size(b->dtype);
    worst w = {0};
    for (int64_t n = 0; n < batch; n++) {
        for (int64_t row = 0; row < rows; row++) {
            for (int64_t h = 0; h < heads; h++) {
                int64_t at = (batch > 1 ? n * t->stride[0] : 0) + row * t->stride[1] + h * t->stride[2];
                int64_t line = (n * rows + row) * heads + h;
                for (int64_t x = 0; x < dim; x++) {
                    double got = attn__load(b->dtype, t->data, at + x);
                    double ratio = judge(c, b->dtype, got, want[line * dim + x], error[line]);
                    note(&w, ratio, got, want[line * dim + x], error[line], (const int64_t[4]){n, row, h, x});
                }
                block_wipe(b, (char *)t->data + at * (int64_t)element, (size_t)dim * element);
            }
        }
    }
    conclude(v, &w, name, "batch, row, head, dim");
}

static void compare_like_q(verdict *v, const check_case *c, const char *name, const attn_tensor *t, int64_t dim,
                           const double *want, const double *error) {
    const attn_problem *p = &c->problem;
    bool packed = p->flags & ATTN_VARLEN_Q;
    compare_tensor(v, c, name, t, packed ? 1 : p->batch, packed ? p->total_q : p->max_q, p->heads_q, dim, want, error);
}

static void compare_like_kv(verdict *v, const check_case *c, const char *name, const attn_tensor *t, int64_t dim,
                            const double *want, const double *error) {
    const attn_problem *p = &c->problem;
    bool packed = p->flags & ATTN_VARLEN_KV;
    compare_tensor(v, c, name, t, packed ? 1 : p->batch, packed ? p->total_kv : p->max_kv, p->heads_kv, dim, want, error);
}

/* lse and d_sink: an array of `count` elements with a bound for each. */
static void compare_array(verdict *v, const check_case *c, const char *name, int64_t count, const double *want,
                          const double *error) {
    const block *b = block_find(c, name);
    if (!b) return;
    size_t element = attn_dtype_size(b->dtype);
    worst w = {0};
    for (int64_t n = 0; n < count; n++) {
        double got = attn__load(b->dtype, b->data, n);
        note(&w, judge(c, b->dtype, got, want[n], error[n]), got, want[n], error[n], (const int64_t[4]){n, 0, 0, 0});
        block_wipe(b, b->data + n * (int64_t)element, element);
    }
    conclude(v, &w, name, "index");
}

static void compare_probs(verdict *v, const check_case *c, const oracle *o) {
    const block *array = block_find(c, "probs");
    if (!array) return;
    const attn_problem *p = &c->problem;
    const attn_matrix *m = &c->buffers.probs;
    size_t element = attn_dtype_size(array->dtype);
    int64_t total = (int64_t)p->batch * p->heads_q * p->max_q * p->max_kv;
    worst w = {0};
    for (int64_t n = 0; n < total; n++) {
        int64_t j = n % p->max_kv, i = n / p->max_kv % p->max_q, bh = n / p->max_kv / p->max_q;
        int64_t h = bh % p->heads_q, b = bh / p->heads_q;
        int64_t at = b * m->stride[0] + h * m->stride[1] + i * m->stride[2] + j * m->stride[3];
        double got = attn__load(array->dtype, m->data, at), want = o->probs[n];
        double ratio = judge(c, array->dtype, got, want, o->probs_error[n]);
        note(&w, ratio, got, want, o->probs_error[n], (const int64_t[4]){b, h, i, j});
        block_wipe(array, (char *)m->data + at * (int64_t)element, element);
    }
    conclude(v, &w, "probs", "batch, head, row, key");
}

/* Index n of `count` along a dim, or all of them where the dim is summed. */
typedef struct span {
    int64_t first, end;
} span;

static span span_of(int64_t stride, int64_t at, int64_t count) { return stride ? (span){at, at + 1} : (span){0, count}; }

static void sum_bias(const attn_problem *p, const oracle *o, const span s[4], double *want, double *error) {
    *want = *error = 0;
    for (int64_t b = s[0].first; b < s[0].end; b++) {
        for (int64_t h = s[1].first; h < s[1].end; h++) {
            for (int64_t i = s[2].first; i < s[2].end; i++) {
                for (int64_t j = s[3].first; j < s[3].end; j++) {
                    int64_t at = ((b * p->heads_q + h) * p->max_q + i) * p->max_kv + j;
                    *want += o->d_bias[at];
                    *error += o->d_bias_error[at];
                }
            }
        }
    }
}

static void compare_d_bias(verdict *v, const check_case *c, const oracle *o) {
    const block *array = block_find(c, "d_bias");
    if (!array || array->count == 0) return;
    const attn_problem *p = &c->problem;
    const attn_matrix *m = &c->buffers.d_bias;
    size_t element = attn_dtype_size(array->dtype);
    const int64_t full[4] = {p->batch, p->heads_q, p->max_q, p->max_kv};
    int64_t size[4], total = 1;
    for (int d = 0; d < 4; d++) total *= size[d] = m->stride[d] ? full[d] : 1;
    worst w = {0};
    for (int64_t n = 0; n < total; n++) {
        int64_t index[4], rest = n, at = 0;
        span spans[4];
        for (int d = 3; d >= 0; d--) {
            index[d] = rest % size[d];
            rest /= size[d];
            at += index[d] * m->stride[d];
            spans[d] = span_of(m->stride[d], index[d], full[d]);
        }
        double got = attn__load(array->dtype, m->data, at), want, error;
        sum_bias(p, o, spans, &want, &error);
        note(&w, judge(c, array->dtype, got, want, error), got, want, error, index);
        block_wipe(array, (char *)m->data + at * (int64_t)element, element);
    }
    conclude(v, &w, "d_bias", "batch, head, row, key");
}

/* Caches after an append: bit for bit what attn.h says, and what was not appended is as it was. */
static void compare_cache(verdict *v, const check_case *c, const oracle *o, const char *name, const attn_tensor *t,
                          int64_t dim) {
    const block *array = block_find(c, name);
    const attn_problem *p = &c->problem;
    size_t element = attn_dtype_size(array->dtype);
    const unsigned char *want = o->cache[array - c->blocks];
    for (int64_t n = 0; n < array->count && !v->failed; n++) {
        if (memcmp(array->data + n * (int64_t)element, want + n * (int64_t)element, element) == 0) continue;
        verdict_fail(v, "%s: element %lld of its memory is %.9g, and should be %.9g", name, (long long)n,
                     attn__load(array->dtype, array->data, n), attn__load(array->dtype, want, n));
    }
    for (int b = 0; b < p->batch; b++) {
        for (int r = 0; r < c->seq[b].appended; r++) {
            for (int h = 0; h < p->heads_kv; h++) {
                int64_t at = case_kv_at(c, t, b, c->seq[b].used + r, h);
                block_wipe(array, (char *)t->data + at * (int64_t)element, (size_t)dim * element);
            }
        }
    }
}

void compare(verdict *v, check_case *c, const oracle *o) {
    const attn_problem *p = &c->problem;
    const attn_buffers *f = &c->buffers;
    if (p->op == ATTN_FORWARD) {
        compare_like_q(v, c, "o", &f->o, p->dim_v, o->o, o->o_error);
        compare_array(v, c, "lse", c->rows_q * p->heads_q, o->lse, o->lse_error);
        compare_probs(v, c, o);
    }
    if (p->op == ATTN_BACKWARD) {
        compare_like_q(v, c, "d_q", &f->d_q, p->dim_qk, o->d_q, o->d_q_error);
        compare_like_kv(v, c, "d_k", &f->d_k, p->dim_qk, o->d_k, o->d_k_error);
        compare_like_kv(v, c, "d_v", &f->d_v, p->dim_v, o->d_v, o->d_v_error);
        compare_d_bias(v, c, o);
        compare_array(v, c, "d_sink", p->heads_q, o->d_sink, o->d_sink_error);
    }
    if (case_appends(c)) {
        compare_cache(v, c, o, "k", &f->k, p->dim_qk);
        compare_cache(v, c, o, "v", &f->v, p->dim_v);
    }
    const char *damaged = case_damage(c);
    if (damaged) verdict_fail(v, "%s: memory that is not an output was changed", damaged);
}
