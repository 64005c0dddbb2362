/*
 * How far off a correct result may be: the error analysis behind `attn check`.
 *
 * Let u be the unit roundoff of the arithmetic (2^-24; f64 problems, and ATTN_PRECISE in a forward, 2^-53). A kernel computes
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
 *
 * Tensor cores (arithmetic.tensor) multiply exactly and add in float, but they cut off where others round. An error of up to
 * 2u of what the sum has reached goes one way, so these errors add up instead of cancelling. A sum of n products takes n / 8
 * additions of eight (f16, bf16), and on average it has reached half of its end:
 *
 *     dot(d) = 2 + d / 8                                      o_i is off by another u (2 + n / 8) sum_j p_ij max|v_j|
 *
 * - f32: a number is the sum of two TF32 ones, 2^-22 off; a product is three products, the fourth one, 2^-22 of it, is left
 *   out. That is 3 * 2^-22 = 12u of every product. The three products, in additions of four, make six times as many additions.
 * - f16, bf16: p is rounded to the tile's dtype before it meets v. The errors of the p_ij, at most r p_ij (r is 2^-11, 2^-8),
 *   are as good as independent of the v_j, except for what all of them have in common, which scales o_i as a whole; f16 loses
 *   2^-25 of the largest p of the row besides, to underflow:
 *
 *     o_i is off by another  r max|o_i| + 4 sqrt(sum_j (r p_ij max|v_j|)^2 + (2^-25 max p_i max|v_j|)^2)
 *
 *   4: four times the root of the mean square, were all errors as large as they can be; they are about half of that. Where
 *   strides of zero repeat values nothing is independent, and the sum of the absolute values takes the place of the root.
 *   In a backward p meets d_o, and d_s, rounded as well, q and k. The same reasoning, for what each of the three is a sum of:
 *
 *     d_v_j is off by another  r max|d_v_j| + 4 sqrt(sum_i (r p_ij max|d_o_i|)^2)
 *     d_k_j                    r max|d_k_j| + 4 |scale| sqrt(sum_i (r d_s_ij max|q_i|)^2)
 *     d_q_i                    r max|d_q_i| + 4 |scale| sqrt(sum_j (r d_s_ij max|k_j|)^2)      d_s_ij = p_ij (d_o_i v_j - delta_i)
 *
 *   Hopper's kernels bring d_s into the range of f16 by one factor for a sequence and KV head (arithmetic.one_fit), which leaves the largest
 *   d_s that there could be, m = dim_v max|d_o| max|v| + max|delta|, at 2^14 or more. So each d_s loses 2^-39 m to underflow besides.
 *
 * - Exponentials come from an instruction that is 2^-22 off, 4u.
 *
 * AMX, like AVX-512 BF16, rounds its sums like everybody else; of this only the rounding of p and d_s holds for it. Its f16 has p and d_s in two parts of 8
 * bits: what is left of the second is 2^-16 of them at most, and the product of it and the other factor's second part, which is left out, 2^-7 2^-8:
 * r is 1.5 2^-15. Arm's BFMMLA rounds to odd, by up to 2u
 * instead of u, but once for two products, which is 1.4 times as much in a sum: that has room in what is allowed.
 */
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "compare.h"

/*
 * The constants. A sum of n terms in any order whose roundings are independent is off by about u sqrt(n) / 2 of the sum of their
 * sizes at the outside; the 4 of sum_constant and the 2 of dot_constant are the few roundings around it (the exponential, the
 * product with alpha, the division, the store; scale times q, the product with scale). Of the numbers that are added to a
 * score four round at its size: softcap, ALiBi, bias, lse. There is little to take away: of 20,000 cases the largest error is
 * 0.84 of its bound (attn check --backend cpu --seed 1).
 *
 * Where strides of zero repeat a value, the roundings of a sum repeat too, and add up instead of cancelling.
 */
static double sum_constant(const check_case *c, double n) { return 4 + (has(c, F_BROADCAST) ? n / 4 : sqrt(n) / 2); }
static const double add_constant = 4;

/* The sum of d products. */
static double dot_constant(arithmetic how, double d) {
    if (!how.tensor) return 2 + sqrt(d) / 2;
    return how.tile == ATTN_F32 ? 14 + 6 * d / 8 : 2 + d / 8;
}

arithmetic arithmetic_of(const char *backend, const char *kernel) {
    static const struct {
        const char *mark;
        attn_dtype tile;
    } tiles[] = {{"_f32_d", ATTN_F32}, {"_f16_d", ATTN_F16}, {"_bf16_d", ATTN_BF16}, {"_kv8_d", ATTN_F16}};
    const int count = sizeof tiles / sizeof tiles[0];
    arithmetic how = {false, ATTN_DTYPE_DEFAULT, false};
    if (strcmp(backend, "cpu") == 0 && strstr(kernel, "_bf16")) how.tile = ATTN_BF16;
    if (strcmp(backend, "cpu") == 0 && strstr(kernel, "_amx_f16")) how.tile = ATTN_F16;
    for (int n = 0; n < count && strcmp(backend, "cuda") == 0; n++)
        if (strstr(kernel, tiles[n].mark)) how = (arithmetic){true, tiles[n].tile, strstr(kernel, "bwd_sm90_f16") != NULL};
    return how;
}

/* Euclidean norm and largest magnitude of a row. */
typedef struct magnitude {
    double norm, most;
} magnitude;

static magnitude measure(const attn_tensor *t, int64_t at, int32_t n, double factor) {
    magnitude m = {0, 0};
    for (int32_t x = 0; x < n; x++) {
        double value = fabs(((const double *)t->data)[at + x] * factor);
        if (value != value) continue; /* F_NAN: what it reaches is NaN and has no bound */
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
    arithmetic how;
    double unit;                         /* roundoff of the arithmetic */
    double least;                        /* its smallest normal number: probabilities below may vanish */
    double keep;                         /* 1 / (1 - dropout) */
    magnitude *k, *v;                    /* [max_kv] of this sequence and KV head */
    double *e;                           /* [max_kv]: e_ij of this row; 0: masked */
    double *d_k_rounding, *d_v_rounding; /* [as d_k, d_v without dims]: sums of squares, see rounding_add */
    double lost;                         /* of each d_s of this sequence and KV head: one_fit */
    int b, h, kv_head;
} analysis;

static void measure_kv(analysis *a) {
    const check_case *c = a->c;
    const attn_problem *p = &c->problem;
    const attn_buffers *f = &a->o->buffers;
    for (int j = 0; j < c->seq[a->b].sk; j++) {
        int position = c->seq[a->b].leftpad + j;
        double k_scale = case_kv_descale(c, c->buffers.k_descale, a->b, position, a->kv_head);
        double v_scale = case_kv_descale(c, c->buffers.v_descale, a->b, position, a->kv_head);
        a->k[j] = measure(&f->k, case_kv_at(c, &f->k, a->b, position, a->kv_head), p->dim_qk, k_scale);
        a->v[j] = measure(&f->v, case_kv_at(c, &f->v, a->b, position, a->kv_head), p->dim_v, v_scale);
    }
}

/* r of operands that are rounded for a product; 0: none are. */
static double operand_roundoff(const analysis *a) {
    if (a->how.tile == ATTN_F16) return a->how.tensor ? 0x1p-11 : 0x1.8p-15;
    return a->how.tile == ATTN_BF16 ? 0x1p-8 : 0;
}

/* Errors of which each is as large as `part`: independent, or not. What they come to. */
static void rounding_add(const analysis *a, double *sum, double part) {
    if (isfinite(part)) *sum += has(a->c, F_BROADCAST) ? part : part * part; /* F_NAN: what that reaches is NaN */
}
static double rounding_of(const analysis *a, double sum) { return has(a->c, F_BROADCAST) ? sum : 4 * sqrt(sum); }

static double dot_of(const attn_tensor *x, int64_t at, const attn_tensor *y, int64_t at_y, int32_t n) {
    double sum = 0;
    for (int32_t i = 0; i < n; i++) sum += ((const double *)x->data)[at + i] * ((const double *)y->data)[at_y + i];
    return sum;
}

static double largest(const double *x, int32_t n) {
    double most = 0;
    for (int32_t i = 0; i < n; i++) most = fmax(most, fabs(x[i]));
    return most;
}

/* delta of row i. */
static double delta_of(const analysis *a, int i) {
    const attn_buffers *f = &a->o->buffers;
    double delta = dot_of(&f->d_o, case_q_at(a->c, &f->d_o, a->b, i, a->h), &f->o, case_q_at(a->c, &f->o, a->b, i, a->h),
                          a->c->problem.dim_v);
    return f->d_lse ? delta - ((const double *)f->d_lse)[case_lse_at(a->c, a->b, i, a->h)] : delta;
}

/* What each d_s of the sequence and the KV head of head a->h loses to underflow. */
static double lost_of(analysis a) {
    const attn_problem *p = &a.c->problem;
    const attn_buffers *f = &a.o->buffers;
    double d_o = 0, v = 0, delta = 0;
    if (!a.how.one_fit || p->op != ATTN_BACKWARD) return 0;
    for (int j = 0; j < a.c->seq[a.b].sk; j++)
        if (isfinite(a.v[j].most)) v = fmax(v, a.v[j].most);
    for (int n = 0; n < p->heads_q / p->heads_kv; n++, a.h++) {
        for (int i = 0; i < a.c->seq[a.b].sq; i++) {
            double more = measure(&f->d_o, case_q_at(a.c, &f->d_o, a.b, i, a.h), p->dim_v, 1).most,
                   off = fabs(delta_of(&a, i));
            if (isfinite(more)) d_o = fmax(d_o, more);
            if (isfinite(off)) delta = fmax(delta, off);
        }
    }
    return 0x1p-39 * (p->dim_v * d_o * v + delta);
}

/* What rounding p and d_s of row i adds, to d_q now, to d_k and d_v when all rows have been here. */
static void round_operands(analysis *a, int i, magnitude q, magnitude d_o, const double *probs) {
    oracle *o = a->o;
    const check_case *c = a->c;
    const attn_problem *p = &c->problem;
    const attn_buffers *f = &o->buffers;
    double r = operand_roundoff(a), factor = fabs(p->scale), sum = 0;
    int64_t row = case_q_row(c, a->b, i) * p->heads_q + a->h, d_o_at = case_q_at(c, &f->d_o, a->b, i, a->h);
    if (r == 0) return;
    double delta = delta_of(a, i);
    for (int j = 0; j < c->seq[a->b].sk; j++) {
        if (a->e[j] == 0) continue;
        int position = c->seq[a->b].leftpad + j;
        int64_t kv = case_kv_row(c, a->b, position) * p->heads_kv + a->kv_head;
        double kept = signbit(probs[j]) ? 0 : a->keep; /* dropped: -p */
        double d_p = kept * dot_of(&f->d_o, d_o_at, &f->v, case_kv_at(c, &f->v, a->b, position, a->kv_head), p->dim_v);
        double d_s = hypot(r * probs[j] * (d_p - delta), a->lost);
        rounding_add(a, &a->d_v_rounding[kv], r * kept * fabs(probs[j]) * d_o.most);
        rounding_add(a, &a->d_k_rounding[kv], factor * d_s * q.most);
        rounding_add(a, &sum, factor * d_s * a->k[j].most);
    }
    o->d_q_error[row] += rounding_of(a, sum) + r * largest(o->d_q + row * p->dim_qk, p->dim_qk);
}

static void round_keys(analysis *a) {
    const attn_problem *p = &a->c->problem;
    double r = operand_roundoff(a);
    for (int64_t n = 0; r > 0 && n < a->c->rows_kv * p->heads_kv; n++) {
        a->o->d_k_error[n] += rounding_of(a, a->d_k_rounding[n]) + r * largest(a->o->d_k + n * p->dim_qk, p->dim_qk);
        a->o->d_v_error[n] += rounding_of(a, a->d_v_rounding[n]) + r * largest(a->o->d_v + n * p->dim_v, p->dim_v);
    }
}

/* What the gradients of row i allow; `q` and the e_ij are those of the row. */
static void bound_gradients(analysis *a, int i, magnitude q, const double *probs) {
    oracle *o = a->o;
    const check_case *c = a->c;
    const attn_problem *p = &c->problem;
    const attn_buffers *f = &o->buffers;
    int64_t row = case_q_row(c, a->b, i) * p->heads_q + a->h, lse_at = case_lse_at(c, a->b, i, a->h);
    magnitude d_o = measure(&f->d_o, case_q_at(c, &f->d_o, a->b, i, a->h), p->dim_v, 1);
    magnitude out = measure(&f->o, case_q_at(c, &f->o, a->b, i, a->h), p->dim_v, 1);
    double d_lse = f->d_lse ? fabs(((const double *)f->d_lse)[lse_at]) : 0, factor = fabs(p->scale);
    double dots = a->unit * dot_constant(a->how, p->dim_v);
    for (int j = 0; j < c->seq[a->b].sk; j++) {
        if (a->e[j] == 0) continue;
        double probability = fabs(probs[j]), e = a->e[j] + dots, g = d_o.norm * (a->keep * a->v[j].norm + out.norm) + d_lse;
        if (p->softcap > 0) e += a->unit * dot_constant(a->how, p->dim_qk) * factor * q.norm * a->k[j].norm / p->softcap;
        double off = (probability * e + a->least) * g;
        int64_t kv = case_kv_row(c, a->b, c->seq[a->b].leftpad + j) * p->heads_kv + a->kv_head;
        o->d_q_error[row] += factor * off * a->k[j].most;
        o->d_k_error[kv] += factor * off * q.most;
        o->d_v_error[kv] += a->keep * (probability * a->e[j] + a->least) * d_o.most;
        if (o->d_bias_error) o->d_bias_error[(((int64_t)a->b * p->heads_q + a->h) * p->max_q + i) * p->max_kv + j] = off;
    }
    round_operands(a, i, q, d_o, probs);
    if (!o->d_sink_error || !isfinite(c->buffers.sink[a->h])) return;
    double size = add_constant * (fabs(c->buffers.sink[a->h]) + fabs(o->lse[lse_at])) + sum_constant(c, (double)c->rows_q);
    o->d_sink_error[a->h] +=
        exp(c->buffers.sink[a->h] - o->lse[lse_at]) * (d_o.norm * out.norm + d_lse) * (a->unit * size + dots);
}

/* Of a value: weights are multiplied with it before they are rounded. */
static double page_factor(const analysis *a, int j) {
    const check_case *c = a->c;
    if (!(c->problem.flags & ATTN_DESCALE_PAGES)) return 1;
    return fmax(fabs(case_kv_descale(c, c->buffers.v_descale, a->b, c->seq[a->b].leftpad + j, a->kv_head)), DBL_MIN);
}

/* What the products of p and v add to the error of o; weight = sum p|v|. */
static double product_error(const analysis *a, int64_t row, int32_t keys, const double *probs, double weight) {
    const check_case *c = a->c;
    const attn_problem *p = &c->problem;
    if (a->how.tile == ATTN_DTYPE_DEFAULT) return 0;
    double error = a->how.tensor ? a->unit * dot_constant(a->how, keys) * weight : 0;
    if (a->how.tile == ATTN_F32) return error;
    double roundoff = operand_roundoff(a), lost = a->how.tile == ATTN_F16 && a->how.tensor ? 0x1p-25 : 0;
    double most = 0, squares = 0, sum = 0, out = 0;
    for (int j = 0; j < keys; j++) most = fmax(most, fabs(probs[j] * page_factor(a, j)));
    for (int j = 0; j < keys; j++) {
        if (a->e[j] == 0) continue;
        double part = roundoff * fabs(probs[j]) * a->v[j].most, under = lost * most * a->v[j].most / page_factor(a, j);
        squares += part * part + under * under;
        sum += part + under;
    }
    for (int x = 0; x < p->dim_v; x++) out = fmax(out, fabs(a->o->o[row * p->dim_v + x]) / a->keep);
    return error + roundoff * out + (has(c, F_BROADCAST) ? sum : 4 * sqrt(squares));
}

static void bound_row(analysis *a, int i) {
    oracle *o = a->o;
    const check_case *c = a->c;
    const attn_problem *p = &c->problem;
    const sequence *s = &c->seq[a->b];
    int64_t row = case_q_row(c, a->b, i) * p->heads_q + a->h, lse_at = case_lse_at(c, a->b, i, a->h);
    int64_t line = (((int64_t)a->b * p->heads_q + a->h) * p->max_q + i) * p->max_kv;
    const double *probs = o->probs + line;
    double lse = o->lse[lse_at], dot = dot_constant(a->how, p->dim_qk);
    if (lse == -INFINITY || lse != lse) return; /* exact: zeros, or NaN */
    int longer = s->sq * (p->heads_q / p->heads_kv) > s->sk ? s->sq * (p->heads_q / p->heads_kv) : s->sk;
    double q_scale = case_q_descale(c, a->b, a->kv_head);
    double sum = sum_constant(c, longer) + (a->how.tensor ? 4 : 0);
    magnitude q = measure(&o->buffers.q, case_q_at(c, &o->buffers.q, a->b, i, a->h), p->dim_qk, q_scale);
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
    o->o_error[row] = a->keep * (weighted + mean * weight + product_error(a, row, s->sk, probs, weight));
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
        if ((probs[j] != probs[j] && !has(c, F_NAN)) || (probs[j] != 0 && !allowed) ||
            (probs[j] == 0 && allowed && !may_vanish)) {
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
           all_numbers(o->probs, case_pairs(c), "probs", why, size) &&
           all_numbers(o->d_q, rows_q * p->dim_qk, "d_q", why, size) &&
           all_numbers(o->d_k, rows_kv * p->dim_qk, "d_k", why, size) &&
           all_numbers(o->d_v, rows_kv * p->dim_v, "d_v", why, size) &&
           all_numbers(o->d_bias, case_pairs(c), "d_bias", why, size) &&
           all_numbers(o->d_sink, p->heads_q, "d_sink", why, size);
}

bool oracle_bound(oracle *o, const check_case *c, ways how, char *why, size_t size) {
    const attn_problem *p = &c->problem;
    if (p->op == ATTN_KV_APPEND) return true;
    if (!has(c, F_NAN) && !results_sane(o, c, why, size)) return false;
    int64_t rows_q = c->rows_q * p->heads_q, rows_kv = c->rows_kv * p->heads_kv;
    o->o_error = must_alloc(rows_q, sizeof(double));
    o->lse_error = must_alloc(rows_q, sizeof(double));
    o->probs_error = must_alloc(case_pairs(c), sizeof(double));
    o->d_q_error = must_alloc(rows_q, sizeof(double));
    o->d_k_error = must_alloc(rows_kv, sizeof(double));
    o->d_v_error = must_alloc(rows_kv, sizeof(double));
    if (o->d_bias) o->d_bias_error = must_alloc(case_pairs(c), sizeof(double));
    if (o->d_sink) o->d_sink_error = must_alloc(p->heads_q, sizeof(double));
    /* In double ref is no more exact than what it judges. But the lse that a backward is given has been rounded to dtype. */
    bool wide = p->dtype == ATTN_F64 || (p->op == ATTN_FORWARD && (p->flags & ATTN_PRECISE));
    analysis a = {.o = o, .c = c, .unit = wide ? 0x1p-52 : 0x1p-24, .least = wide ? DBL_MIN : FLT_MIN};
    a.keep = 1 / (1 - p->dropout);
    a.k = must_alloc(p->max_kv, sizeof *a.k);
    a.v = must_alloc(p->max_kv, sizeof *a.v);
    a.e = must_alloc(p->max_kv, sizeof *a.e);
    a.d_k_rounding = must_alloc(rows_kv, sizeof(double));
    a.d_v_rounding = must_alloc(rows_kv, sizeof(double));
    bool sane = true;
    for (a.b = 0; sane && a.b < p->batch; a.b++) {
        a.how = how.few_rows > 0 && c->seq[a.b].sq <= how.few_rows ? how.few : how.many;
        for (a.h = 0; sane && a.h < p->heads_q; a.h++) {
            a.kv_head = a.h / (p->heads_q / p->heads_kv);
            if (a.h % (p->heads_q / p->heads_kv) == 0) {
                measure_kv(&a);
                a.lost = lost_of(a);
            }
            for (int i = 0; sane && i < p->max_q; i++) {
                sane = mask_agrees(&a, i, why, size);
                if (sane && i < c->seq[a.b].sq) bound_row(&a, i);
            }
        }
    }
    a.how = how.many; /* a backward is computed alike for all */
    if (sane && p->op == ATTN_BACKWARD) round_keys(&a);
    free(a.d_k_rounding);
    free(a.d_v_rounding);
    free(a.k);
    free(a.v);
    free(a.e);
    return sane;
}
