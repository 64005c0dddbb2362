/*
 * attn_merge and attn_rotary under `attn check`: random arguments, gaps and unread parts NaN, results against what attn.h says,
 * worked out here. Rotated rows must agree to the last bit, merged ones within the rounding of weights and sums. Inputs must be
 * what they were, and the device must have nothing to say of their values.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "numeric.h"

enum { MOST_PARTS = 110, MOST_ARRAYS = 8 };

/* Arrays of one call; each is filled with 0xff. */
typedef struct arrays {
    rng rng;
    mirror m;
    int count;
    const char *name[MOST_ARRAYS];
    unsigned char *memory[MOST_ARRAYS], *sent[MOST_ARRAYS]; /* sent: as it was before the call */
    size_t bytes[MOST_ARRAYS];
} arrays;

static void *add_array(arrays *a, const char *name, int64_t count, size_t element) {
    int n = a->count++;
    a->name[n] = name;
    a->bytes[n] = (size_t)count * element;
    a->memory[n] = must_alloc(count, element);
    return memset(a->memory[n], 0xff, a->bytes[n]);
}

/* A tensor of [batch][rows][heads][dim] with gaps. */
static attn_tensor add_tensor(arrays *a, const char *name, attn_dtype dtype, int64_t batch, int64_t rows, int64_t heads,
                              int64_t dim) {
    attn_tensor t = attn_dense(NULL, rows, heads, dim);
    if (rng_chance(&a->rng, 50)) {
        t.stride[2] = dim + rng_range(&a->rng, 0, 5);
        t.stride[1] = t.stride[2] * heads + rng_range(&a->rng, 0, 5);
        t.stride[0] = t.stride[1] * rows + rng_range(&a->rng, 0, 5);
    }
    int64_t end = (batch - 1) * t.stride[0] + (rows - 1) * t.stride[1] + (heads - 1) * t.stride[2] + dim;
    t.data = add_array(a, name, batch && rows ? end : 0, attn_dtype_size(dtype));
    return t;
}

/* Everything to the device, at odd addresses too. */
static bool send(arrays *a, device *d) {
    a->m = (mirror){.d = d};
    for (int n = 0; n < a->count; n++) {
        size_t before = rng_chance(&a->rng, 50) ? 0 : 8 * (size_t)rng_range(&a->rng, 1, 31);
        if (!mirror_add(&a->m, a->name[n], a->memory[n], a->bytes[n], before, 0)) return false;
        a->sent[n] = must_alloc((int64_t)a->bytes[n], 1);
        memcpy(a->sent[n], a->memory[n], a->bytes[n]);
    }
    return mirror_upload(&a->m);
}

/* Ends a call that returned `status`: brings everything back, and judges all but the two outputs, of which one may be NULL. */
static void fetch(arrays *a, const contexts *j, const char *call, attn_status status, const void *out, const void *other,
                  verdict *v) {
    bool works = device_wait(j->device) && mirror_download(&a->m);
    if (status == ATTN_OK && works) status = attn_device_status(j->tested);
    if (status != ATTN_OK) verdict_fail(v, "%s: %s: %s", call, attn_status_name(status), attn_error_detail());
    if (!works) verdict_fail(v, "%s: the device failed; nothing more can be run", call);
    v->broken |= !works;
    const char *around = works ? mirror_damage(&a->m) : NULL;
    if (around) verdict_fail(v, "%s: %s: memory around it was changed", call, around);
    for (int n = 0; n < a->count && works; n++) {
        bool is_output = a->memory[n] == out || a->memory[n] == other;
        if (!is_output && memcmp(a->memory[n], a->sent[n], a->bytes[n]) != 0)
            verdict_fail(v, "%s: %s is an input and was changed", call, a->name[n]);
    }
}

static void free_arrays(arrays *a) {
    mirror_free(&a->m);
    for (int n = 0; n < a->count; n++) {
        free(a->memory[n]);
        free(a->sent[n]);
    }
}

static attn_dtype draw_dtype(rng *r, bool wide) {
    static const attn_dtype dtypes[] = {ATTN_F32, ATTN_F16, ATTN_BF16, ATTN_F64};
    return dtypes[rng_range(r, 0, wide ? 3 : 2)];
}

/* Is every byte of an output either judged (and wiped by then) or as it was? */
static bool gaps_intact(const arrays *a, const void *data) {
    for (int n = 0; n < a->count; n++) {
        if (a->memory[n] != data) continue;
        for (size_t at = 0; at < a->bytes[n]; at++)
            if (a->memory[n][at] != 0xff) return false;
    }
    return true;
}

/* ---- merge ---- */

typedef struct merge_case {
    arrays a;
    attn_merge_args args;
    attn_tensor o_parts[MOST_PARTS];
    const void *lse_parts[MOST_PARTS];
} merge_case;

static void make_merge(merge_case *k, bool small) {
    arrays *a = &k->a;
    rng *r = &a->rng;
    attn_merge_args *m = &k->args;
    m->size = sizeof *m;
    m->dtype = draw_dtype(r, true);
    m->out_dtype = m->dtype == ATTN_F64 ? ATTN_F64 : draw_dtype(r, false);
    bool many = rng_chance(r, 15); /* more than one launch can take */
    m->parts = many ? rng_range(r, 7, MOST_PARTS) : rng_range(r, 1, 6);
    m->batch = rng_range(r, 1, 3);
    m->rows = rng_range(r, 1, small || many ? 9 : 70);
    m->heads = rng_range(r, 1, 4);
    m->dim = small || rng_chance(r, 90) ? rng_range(r, 1, many ? 40 : 130) : 576;
    attn_dtype real = m->dtype == ATTN_F64 ? ATTN_F64 : ATTN_F32;
    int64_t count = (int64_t)m->batch * m->heads * m->rows;
    attn_tensor all = add_tensor(a, "o_parts", m->dtype, (int64_t)m->parts * m->batch, m->rows, m->heads, m->dim);
    char *all_lse = add_array(a, "lse_parts", m->parts * count, attn_dtype_size(real));
    for (int n = 0; n < m->parts; n++) {
        attn_tensor *t = &k->o_parts[n];
        *t = all;
        t->data = (char *)all.data + n * m->batch * all.stride[0] * (int64_t)attn_dtype_size(m->dtype);
        void *lse = all_lse + n * count * (int64_t)attn_dtype_size(real);
        k->lse_parts[n] = lse;
        for (int64_t at = 0; at < count; at++) { /* a part without keys: -inf, and its o holds NaN */
            int64_t i = at % m->rows, h = at / m->rows % m->heads, b = at / m->rows / m->heads;
            bool empty = rng_chance(r, 25);
            attn__store(real, lse, at, empty ? -INFINITY : 5 * rng_normal(r));
            int64_t row = b * t->stride[0] + i * t->stride[1] + h * t->stride[2];
            for (int32_t x = 0; x < m->dim && !empty; x++) attn__store(m->dtype, t->data, row + x, rng_normal(r));
        }
    }
    m->o = add_tensor(a, "o", m->out_dtype, m->batch, m->rows, m->heads, m->dim);
    m->lse = rng_chance(r, 80) ? add_array(a, "lse", count, attn_dtype_size(real)) : NULL;
}

static bool is_close(attn_dtype dtype, double got, double want, double error) {
    double half = dtype == ATTN_F64 ? 0x1p-53 : dtype == ATTN_F32 ? 0x1p-24 : dtype == ATTN_F16 ? 0x1p-11 : 0x1p-8;
    double under = dtype == ATTN_F16 ? 0x1p-25 : 0x1p-124;
    return got == want || fabs(got - want) <= half * fabs(want) + under + (1 + half) * error;
}

/* A weight exp(lse_p - lse) is off by the rounding of its argument, a sum of parts by that of each addition. */
static void judge_merge(merge_case *k, verdict *v) {
    const attn_merge_args *m = &k->args;
    attn_dtype real = m->dtype == ATTN_F64 ? ATTN_F64 : ATTN_F32;
    double unit = m->dtype == ATTN_F64 ? 0x1p-52 : 0x1p-24;
    for (int64_t at = 0; at < (int64_t)m->batch * m->heads * m->rows; at++) {
        int64_t i = at % m->rows, h = at / m->rows % m->heads, b = at / m->rows / m->heads;
        double lse[MOST_PARTS], most = -INFINITY, sum = 0;
        for (int n = 0; n < m->parts; n++) most = fmax(most, lse[n] = attn__load(real, k->lse_parts[n], at));
        for (int n = 0; n < m->parts; n++) sum += lse[n] == -INFINITY ? 0 : exp(lse[n] - most);
        double want_lse = sum == 0 ? -INFINITY : most + log(sum);
        char *row = (char *)m->o.data +
                    (b * m->o.stride[0] + i * m->o.stride[1] + h * m->o.stride[2]) * (int64_t)attn_dtype_size(m->out_dtype);
        for (int32_t x = 0; x < m->dim; x++) {
            double want = 0, error = 0, got = attn__load(m->out_dtype, row, x);
            for (int n = 0; n < m->parts; n++) {
                const attn_tensor *t = &k->o_parts[n];
                if (lse[n] == -INFINITY) continue;
                int64_t from = b * t->stride[0] + i * t->stride[1] + h * t->stride[2] + x;
                double term = exp(lse[n] - want_lse) * attn__load(m->dtype, t->data, from);
                want += term;
                error += unit * (4 * (fabs(lse[n]) + fabs(want_lse)) + 12) * fabs(term);
            }
            if (!is_close(m->out_dtype, got, want, error))
                verdict_fail(v, "attn_merge: o at %lld, %lld, %lld, %d: got %.9g, want %.9g", (long long)b, (long long)i,
                             (long long)h, x, got, want);
        }
        memset(row, 0xff, (size_t)m->dim * attn_dtype_size(m->out_dtype));
        double got = m->lse ? attn__load(real, m->lse, at) : want_lse;
        if (!is_close(real, got, want_lse, unit * (4 * fabs(want_lse) + 12)))
            verdict_fail(v, "attn_merge: lse %lld: got %.9g, want %.9g", (long long)at, got, want_lse);
    }
    if (!gaps_intact(&k->a, m->o.data)) verdict_fail(v, "attn_merge: memory between the rows of o was changed");
}

static void check_merge(const case_filter *filter, const contexts *j, rng r, verdict *v) {
    merge_case k = {.a = {.rng = r}};
    attn_merge_args *m = &k.args;
    make_merge(&k, filter->small);
    if (!send(&k.a, j->device)) {
        v->broken = true;
        verdict_fail(v, "attn_merge: the device failed");
    } else {
        attn_merge_args there = *m;
        attn_tensor o_parts[MOST_PARTS];
        const void *lse_parts[MOST_PARTS];
        for (int n = 0; n < m->parts; n++) {
            o_parts[n] = k.o_parts[n];
            o_parts[n].data = mirror_at(&k.a.m, k.o_parts[n].data);
            lse_parts[n] = mirror_at(&k.a.m, k.lse_parts[n]);
        }
        there.o_parts = o_parts;
        there.lse_parts = lse_parts;
        there.o.data = mirror_at(&k.a.m, m->o.data);
        there.lse = mirror_at(&k.a.m, m->lse);
        attn_status status = attn_merge(j->tested, &there, device_stream(j->device, 0));
        fetch(&k.a, j, "attn_merge", status, m->o.data, m->lse, v);
        if (!v->failed) judge_merge(&k, v);
    }
    free_arrays(&k.a);
}

/* ---- rotary ---- */

typedef struct rotary_case {
    arrays a;
    attn_rotary_args args;
} rotary_case;

static void make_rotary(rotary_case *k, bool small) {
    arrays *a = &k->a;
    rng *r = &a->rng;
    attn_rotary_args *m = &k->args;
    m->size = sizeof *m;
    m->dtype = draw_dtype(r, true);
    m->rotary_dtype = draw_dtype(r, true);
    m->batch = rng_range(r, 1, 4);
    m->rows = rng_range(r, 1, small ? 9 : 50);
    m->heads = rng_range(r, 1, 4);
    m->dim = rng_range(r, 2, small || rng_chance(r, 90) ? 130 : 576);
    m->rotary_dim = 2 * rng_range(r, 1, m->dim / 2);
    m->rotary_len = m->rows + rng_range(r, 0, 20);
    m->interleaved = rng_chance(r, 50);
    m->inverse = rng_chance(r, 50);
    int32_t *pos = NULL, *cu = NULL;
    if (rng_chance(r, 50)) m->pos = pos = add_array(a, "pos", m->batch, sizeof *pos);
    if (rng_chance(r, 50)) m->cu = cu = add_array(a, "cu", m->batch + 1, sizeof *cu);
    if (cu) cu[0] = rng_range(r, 0, 3);
    for (int b = 0; b < m->batch; b++) {
        if (pos) pos[b] = rng_range(r, 0, m->rotary_len - m->rows);
        if (cu) cu[b + 1] = cu[b] + rng_range(r, 0, m->rows);
    }
    if (cu) m->total = cu[m->batch] + rng_range(r, 0, 3);
    int64_t pairs = (int64_t)m->rotary_len * (m->rotary_dim / 2);
    void *cosine = add_array(a, "cos", pairs, attn_dtype_size(m->rotary_dtype));
    void *sine = add_array(a, "sin", pairs, attn_dtype_size(m->rotary_dtype));
    for (int64_t n = 0; n < pairs; n++) {
        attn__store(m->rotary_dtype, cosine, n, rng_normal(r));
        attn__store(m->rotary_dtype, sine, n, rng_normal(r));
    }
    m->cos = cosine, m->sin = sine;
    int64_t batch = cu ? 1 : m->batch, rows = cu ? m->total : m->rows;
    m->x = add_tensor(a, "x", m->dtype, batch, rows, m->heads, m->dim);
    m->y = rng_chance(r, 50) ? m->x : add_tensor(a, "y", m->dtype, batch, rows, m->heads, m->dim);
}

/* Element of row `row` of sequence b in t. */
static int64_t rotary_at(const attn_rotary_args *m, const attn_tensor *t, int b, int row, int h) {
    return (m->cu ? m->cu[b] * t->stride[1] : b * t->stride[0]) + row * t->stride[1] + h * t->stride[2];
}

/* For every row that a sequence has: fills it and notes its values, or compares it with what it should have become, and wipes it. */
static void each_row(rotary_case *k, double *values, bool judge, verdict *v) {
    const attn_rotary_args *m = &k->args;
    const rotation r = {m->dtype, m->rotary_dtype, m->cos, m->sin, m->rotary_dim, m->interleaved, m->inverse};
    size_t element = attn_dtype_size(m->dtype);
    for (int b = 0; b < m->batch; b++) {
        for (int i = 0; i < (m->cu ? m->cu[b + 1] - m->cu[b] : m->rows); i++) {
            for (int h = 0; h < m->heads; h++, values += m->dim) {
                char *x = (char *)m->x.data + rotary_at(m, &m->x, b, i, h) * (int64_t)element;
                char *y = (char *)m->y.data + rotary_at(m, &m->y, b, i, h) * (int64_t)element;
                if (!judge) {
                    for (int n = 0; n < m->dim; n++) attn__store(m->dtype, x, n, rng_normal(&k->a.rng));
                    for (int n = 0; n < m->dim; n++) values[n] = attn__load(m->dtype, x, n);
                    continue;
                }
                double want[1];
                rotate_row(&r, values, (m->pos ? m->pos[b] : 0) + i);
                for (int n = 0; n < m->dim; n++) {
                    attn__store(m->dtype, want, 0, values[n]);
                    if (memcmp(want, y + (size_t)n * element, element) != 0)
                        verdict_fail(v, "attn_rotary: sequence %d, row %d, head %d, dim %d: got %.9g, want %.9g", b, i, h,
                                     n, attn__load(m->dtype, y, n), attn__load(m->dtype, want, 0));
                }
                memset(y, 0xff, (size_t)m->dim * element);
            }
        }
    }
}

static void check_rotary(const case_filter *filter, const contexts *j, rng r, verdict *v) {
    rotary_case k = {.a = {.rng = r}};
    attn_rotary_args *m = &k.args;
    make_rotary(&k, filter->small);
    double *values = must_alloc((int64_t)m->batch * m->rows * m->heads * m->dim, sizeof *values);
    each_row(&k, values, false, v);
    if (!send(&k.a, j->device)) {
        v->broken = true;
        verdict_fail(v, "attn_rotary: the device failed");
    } else {
        attn_rotary_args there = *m;
        there.x.data = mirror_at(&k.a.m, m->x.data);
        there.y.data = mirror_at(&k.a.m, m->y.data);
        there.cos = mirror_at(&k.a.m, m->cos);
        there.sin = mirror_at(&k.a.m, m->sin);
        there.pos = mirror_at(&k.a.m, m->pos);
        there.cu = mirror_at(&k.a.m, m->cu);
        attn_status status = attn_rotary(j->tested, &there, device_stream(j->device, 0));
        fetch(&k.a, j, "attn_rotary", status, m->y.data, NULL, v);
        if (!v->failed) each_row(&k, values, true, v);
        if (!v->failed && !gaps_intact(&k.a, m->y.data))
            verdict_fail(v, "attn_rotary: memory between the rows of y was changed");
    }
    free(values);
    free_arrays(&k.a);
}

void check_pieces(const case_filter *filter, const contexts *j, uint64_t seed, long number, verdict *v) {
    rng r = rng_make(seed ^ UINT64_C(0x706965636573), (uint64_t)number);
    check_merge(filter, j, rng_make(rng_next(&r), 0), v);
    if (!v->failed) check_rotary(filter, j, rng_make(rng_next(&r), 1), v);
}
