/* Random tensors, their copies, and what is counted: see workload.h. */
#include "workload.h"

#include <stdlib.h>
#include <string.h>

#include "mask.h"
#include "numeric.h"
#include "tool.h"

int open_place(place *at, const attn_config *config, const char *what) {
    attn_status status = attn_context_create(&at->context, config);
    if (status != ATTN_OK) return tool_status(what, status);
    at->d = device_open(at->context, false);
    return at->d ? TOOL_OK : TOOL_RUNTIME;
}

void close_place(place *at) {
    device_close(at->d);
    attn_context_destroy(at->context);
}

/* ---- tensors ---- */

void free_data(tensors *d) {
    for (int i = 0; i < TENSORS; i++) free(d->memory[i]);
}

/* Nearly normal numbers: the sum of four uniform ones, mean 0, variance 1. */
static void fill_random(attn_dtype dtype, void *memory, int64_t count, uint64_t *state) {
    for (int64_t i = 0; i < count; i++) {
        uint64_t x = *state += UINT64_C(0x9E3779B97F4A7C15);
        x = (x ^ x >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
        x = (x ^ x >> 27) * UINT64_C(0x94D049BB133111EB);
        x ^= x >> 31;
        int32_t sum = (int32_t)((x & 0xffff) + (x >> 16 & 0xffff) + (x >> 32 & 0xffff) + (x >> 48)) - 2 * 0xffff;
        attn__store(dtype, memory, i, sum * (1.7320508 / 65536));
    }
}

bool make_data(tensors *d, const attn_problem *p, uint64_t seed) {
    int64_t q = (int64_t)p->max_q * p->heads_q, kv = (int64_t)p->max_kv * p->heads_kv;
    if (__builtin_mul_overflow(q, p->batch, &q) || __builtin_mul_overflow(kv, p->batch, &kv)) q = kv = -1;
    bool fp8 = p->dtype == ATTN_E4M3 || p->dtype == ATTN_E5M2;
    attn_dtype in = p->kv_dtype ? p->kv_dtype : p->dtype, out = fp8 ? ATTN_BF16 : p->dtype,
               lse = attn__wide(p->dtype) ? ATTN_F64 : ATTN_F32;
    const struct {
        int64_t vectors;
        int32_t dim;
        attn_dtype dtype;
    } rows[TENSORS] = {
        [T_Q] = {q, p->dim_qk, p->dtype}, [T_K] = {kv, p->dim_qk, in},  [T_V] = {kv, p->dim_v, in},
        [T_O] = {q, p->dim_v, out},       [T_D_O] = {q, p->dim_v, out}, [T_D_Q] = {q, p->dim_qk, p->dtype},
        [T_D_K] = {kv, p->dim_qk, in},    [T_D_V] = {kv, p->dim_v, in}, [T_LSE] = {q, 1, lse},
    };
    memset(d, 0, sizeof *d);
    for (int i = 0; i < TENSORS; i++) {
        if (p->op == ATTN_FORWARD && i >= T_D_O && i <= T_D_V) continue;
        if (__builtin_mul_overflow(rows[i].vectors, rows[i].dim, &d->count[i])) d->count[i] = -1;
        d->dtype[i] = rows[i].dtype;
        d->memory[i] = tool_alloc(d->count[i], attn_dtype_size(rows[i].dtype));
        if (!d->memory[i]) return false;
        memory_prefer_huge(d->memory[i], (size_t)d->count[i] * attn_dtype_size(rows[i].dtype));
        if (i <= T_V || i == T_D_O) fill_random(d->dtype[i], d->memory[i], d->count[i], &seed);
    }
    attn_buffers *f = &d->buffers;
    f->size = sizeof *f;
    f->q = attn_dense(d->memory[T_Q], p->max_q, p->heads_q, p->dim_qk);
    f->k = attn_dense(d->memory[T_K], p->max_kv, p->heads_kv, p->dim_qk);
    f->v = attn_dense(d->memory[T_V], p->max_kv, p->heads_kv, p->dim_v);
    f->o = attn_dense(d->memory[T_O], p->max_q, p->heads_q, p->dim_v);
    f->lse = d->memory[T_LSE];
    if (p->op == ATTN_FORWARD) return true;
    f->d_o = attn_dense(d->memory[T_D_O], p->max_q, p->heads_q, p->dim_v);
    f->d_q = attn_dense(d->memory[T_D_Q], p->max_q, p->heads_q, p->dim_qk);
    f->d_k = attn_dense(d->memory[T_D_K], p->max_kv, p->heads_kv, p->dim_qk);
    f->d_v = attn_dense(d->memory[T_D_V], p->max_kv, p->heads_kv, p->dim_v);
    return true;
}

void free_copies(copies *c, device *d) {
    for (int n = 0; n < c->count; n++) mirror_free(&c->m[n]);
    device_free(d, c->workspace);
    free(c);
}

copies *make_copies(const tensors *from, device *d, size_t workspace_bytes) {
    copies *c = tool_alloc(1, sizeof *c);
    double bytes = 1;
    if (!c) return NULL;
    memset(c, 0, sizeof *c);
    for (int i = 0; i < TENSORS; i++) bytes += (double)from->count[i] * (double)attn_dtype_size(from->dtype[i]);
    double wanted = 1 + 2 * (double)device_cache_bytes(d) / bytes;
    int count = wanted > MAX_COPIES ? MAX_COPIES : (int)wanted;
    c->workspace = device_alloc(d, workspace_bytes);
    bool made = c->workspace;
    for (; c->count < count && made; c->count++) {
        mirror *m = &c->m[c->count];
        *m = (mirror){.d = d};
        for (int i = 0; i < TENSORS && made; i++)
            made = !from->memory[i] ||
                   mirror_add(m, "tensor", from->memory[i], (size_t)from->count[i] * attn_dtype_size(from->dtype[i]), 0, 0);
        made = made && mirror_upload(m);
        if (!made) continue;
        c->buffers[c->count] = mirror_buffers(m, &from->buffers);
        c->buffers[c->count].workspace = c->workspace;
        c->buffers[c->count].workspace_size = workspace_bytes;
    }
    if (made) return c;
    free_copies(c, d);
    return NULL;
}

/* ---- numbers ---- */

/* Pairs of a query and a key that the mask allows, in one sequence and head. */
static double allowed_pairs(const attn_problem *p) {
    attn_mask m = attn__mask_make(p->max_q, p->max_kv, (p->flags & ATTN_CAUSAL) != 0, (p->flags & ATTN_WINDOW) != 0,
                                  p->window_left, p->window_right, 0);
    double pairs = 0;
    for (int32_t i = 0; i < p->max_q; i++) {
        int32_t first, end;
        attn__mask_row(&m, i, &first, &end);
        if (end > first) pairs += end - first;
    }
    return pairs;
}

double count_flops(const attn_problem *p) {
    double forward = 2.0 * (p->dim_qk + p->dim_v) * p->batch * p->heads_q * allowed_pairs(p);
    return p->op == ATTN_BACKWARD ? 2.5 * forward : forward;
}

/*
 * Of 16 bits: p, or d_s, is rounded where products are of 16 bits, and the result in any case, by 1.66e-3 RMS each in bf16 and by an
 * eighth of that in f16: together 2.35e-3. It is less in a forward where few p count, for the largest is exact, and may be more, by chance, where
 * there are few numbers. Measured with AMX, bf16, 960 shapes from 16 x 16 x 16 on: at most 2.39e-3, gradients 2.88e-3.
 */
double accuracy_bar(const attn_problem *p, bool gpu) {
    switch (p->dtype) {
    case ATTN_F64: return 1e-13;
    case ATTN_F32: return gpu ? 1e-5 : p->op == ATTN_FORWARD ? 1e-6 : 5e-6;
    case ATTN_F16: return 3.2e-4;
    default: return p->op == ATTN_FORWARD ? 2.5e-3 : 3e-3;
    }
}

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double median(double *numbers, int count) {
    qsort(numbers, (size_t)count, sizeof *numbers, compare_doubles);
    return 0.5 * (numbers[count / 2] + numbers[(count - 1) / 2]);
}
