/*
 * The builders of build.h: what a problem needs is worked out from the problem alone, in rig_make.
 */
#define _GNU_SOURCE
#include "build.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "internal.h"
#include "numeric.h"
#include "schedule.h"

static const size_t default_limit = (size_t)256 << 20;

/* ---- random numbers ---- */

uint64_t random_bits(uint64_t *state) { /* splitmix64 */
    uint64_t z = *state += UINT64_C(0x9E3779B97F4A7C15);
    z = (z ^ z >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ z >> 27) * UINT64_C(0x94D049BB133111EB);
    return z ^ z >> 31;
}

/* Four uniform numbers added up: close enough to a bell for inputs, and far cheaper than the real thing. */
double random_normal(uint64_t *state) {
    uint64_t z = random_bits(state);
    double sum = (double)(z & 0xffff) + (double)(z >> 16 & 0xffff) + (double)(z >> 32 & 0xffff) + (double)(z >> 48);
    return (sum - 131070.0) * (1.7320508075688772 / 65536.0);
}

int32_t random_range(uint64_t *state, int32_t low, int32_t high) {
    return low + (int32_t)(random_bits(state) % (uint64_t)((int64_t)high - low + 1));
}

/* ---- memory ---- */

static void *own(rig *r, int64_t count, size_t each, rig_kind kind) {
    size_t bytes;
    if (r->blocks == RIG_BLOCKS || count < 0 || __builtin_mul_overflow((size_t)count, each, &bytes)) return NULL;
    size_t held = bytes;
    for (int i = 0; i < r->blocks; i++) held += r->block[i].bytes;
    if (held < bytes || held > (r->limit ? r->limit : default_limit)) return NULL;
    void *data = malloc(bytes ? bytes : 1);
    if (data) r->block[r->blocks++] = (rig_block){data, bytes, kind};
    return data;
}

void *rig_tensor(rig *r, attn_dtype dtype, int64_t count, rig_kind kind) {
    void *data = own(r, count, attn_dtype_size(dtype), kind);
    if (!data) return NULL;
    if (kind == RIG_OUTPUT) {
        memset(data, 0xA5, (size_t)count * attn_dtype_size(dtype));
    } else {
        double spread = dtype == ATTN_I8 ? 32 : 1;
        for (int64_t i = 0; i < count; i++) attn__store(dtype, data, i, spread * random_normal(&r->random));
    }
    return data;
}

int32_t *rig_ints(rig *r, int64_t count) {
    int32_t *data = own(r, count, sizeof *data, RIG_INPUT);
    if (data) memset(data, 0, (size_t)count * sizeof *data);
    return data;
}

void rig_reset(rig *r, unsigned char pattern) {
    for (int i = 0; i < r->blocks; i++)
        if (r->block[i].kind == RIG_OUTPUT) memset(r->block[i].data, pattern, r->block[i].bytes);
}

void rig_free(rig *r) {
    for (int i = 0; i < r->blocks; i++) free(r->block[i].data);
    r->blocks = 0;
}

/* ---- what a problem needs ---- */

attn_problem problem(attn_dtype dtype, int32_t batch, int32_t heads_q, int32_t heads_kv, int32_t max_q, int32_t max_kv,
                     int32_t dim) {
    return (attn_problem){.size = sizeof(attn_problem),
                          .dtype = dtype,
                          .batch = batch,
                          .heads_q = heads_q,
                          .heads_kv = heads_kv,
                          .max_q = max_q,
                          .max_kv = max_kv,
                          .dim_qk = dim};
}

static bool want_tensor(rig *r, attn_tensor *t, attn_dtype dtype, int64_t count, int64_t rows, int32_t heads, int32_t dim,
                        rig_kind kind) {
    if (t->data) return true;
    *t = attn_dense(NULL, rows, heads, dim);
    if (count > INT32_MAX || rows > INT32_MAX) return false; /* the product below stays in 63 bits: dims are at most 576 */
    int64_t elements;
    if (__builtin_mul_overflow(count * rows, (int64_t)heads * dim, &elements)) return false;
    t->data = rig_tensor(r, dtype, elements, kind);
    return t->data != NULL;
}

static bool want_matrix(rig *r, attn_matrix *m, attn_dtype dtype, rig_kind kind) {
    const attn_problem *p = &r->full;
    if (m->data) return true;
    m->stride[3] = 1;
    m->stride[2] = p->max_kv;
    m->stride[1] = (int64_t)p->max_q * p->max_kv;
    if (__builtin_mul_overflow(m->stride[1], (int64_t)p->heads_q, &m->stride[0])) return false;
    /* One element even along a dim of extent 0: that is what d_bias has where a caller sets the stride to 0. */
    int64_t elements = (int64_t)(p->max_q ? p->max_q : 1) * (p->max_kv ? p->max_kv : 1);
    if (__builtin_mul_overflow(elements, (int64_t)p->heads_q, &elements) ||
        __builtin_mul_overflow(elements, (int64_t)(p->batch ? p->batch : 1), &elements))
        return false;
    m->data = rig_tensor(r, dtype, elements, kind);
    return m->data != NULL;
}

/* An integer array of the buffers; entry i is first + i * step. */
static bool want_ints(rig *r, const int32_t **array, bool wanted, int64_t count, int32_t first, int32_t step) {
    if (*array || !wanted) return true;
    int32_t *data = rig_ints(r, count);
    for (int64_t i = 0; data && i < count; i++) data[i] = (int32_t)(first + i * step);
    *array = data;
    return data != NULL;
}

static bool want_floats(rig *r, const float **array, bool wanted, int64_t count) {
    if (wanted && !*array) *array = rig_tensor(r, ATTN_F32, count, RIG_INPUT);
    return !wanted || *array;
}

/* Factors of either sign, away from zero: an append divides by them. */
static bool want_descale(rig *r, const float **array, bool wanted) {
    if (!wanted || *array) return true;
    bool of_pages = (r->full.flags & ATTN_DESCALE_PAGES) && array != &r->f.q_descale;
    int64_t count = (int64_t)(of_pages ? r->full.num_pages : r->full.batch) * r->full.heads_kv;
    float *data = rig_tensor(r, ATTN_F32, count, RIG_INPUT);
    for (int64_t i = 0; data && i < count; i++) data[i] += copysignf(0.5f, data[i]);
    *array = data;
    return data != NULL;
}

static bool want_lengths(rig *r) {
    const attn_problem *p = &r->full;
    attn_buffers *f = &r->f;
    uint32_t flags = p->flags;
    bool appends = p->op == ATTN_KV_APPEND || (p->flags & ATTN_APPEND);
    int32_t batch = p->batch, room = p->max_kv - (appends ? p->max_new : 0);
    int64_t slots = flags & ATTN_BATCH_INDEX ? p->cache_batch : batch;
    return want_ints(r, &f->cu_q, flags & ATTN_VARLEN_Q, (int64_t)batch + 1, 0,
                     batch ? (int32_t)(p->total_q / batch) : 0) &&
           want_ints(r, &f->cu_kv, flags & ATTN_VARLEN_KV, (int64_t)batch + 1, 0,
                     batch ? (int32_t)(p->total_kv / batch) : 0) &&
           want_ints(r, &f->cu_new, flags & ATTN_VARLEN_NEW, (int64_t)batch + 1, 0,
                     batch ? (int32_t)(p->total_new / batch) : 0) &&
           want_ints(r, &f->used_q, flags & ATTN_USED_Q, batch, p->max_q, 0) &&
           want_ints(r, &f->used_kv, flags & ATTN_USED_KV, batch, room, 0) &&
           want_ints(r, &f->leftpad, flags & ATTN_LEFTPAD, batch, 0, 0) &&
           want_ints(r, &f->batch_index, flags & ATTN_BATCH_INDEX, batch, 0, 1) &&
           want_ints(r, &f->rotary_pos, flags & ATTN_ROTARY_POS, batch, 0, 0) &&
           want_ints(r, &f->page_table, p->page_size > 0, p->page_size ? slots * attn__pages_per_slot(p, f) : 0, 0, 1) &&
           want_ints(r, &f->flashmask, p->flashmask_vectors > 0,
                     (int64_t)batch * p->flashmask_heads * p->max_kv * p->flashmask_vectors, 0, 0);
}

static bool want_rotary(rig *r) {
    const attn_problem *p = &r->full;
    if (!(p->flags & ATTN_ROTARY) || r->f.rotary_cos) return true;
    int64_t half = p->rotary_dim / 2, count = p->rotary_len * half;
    void *c = rig_tensor(r, p->rotary_dtype, count, RIG_INPUT), *s = rig_tensor(r, p->rotary_dtype, count, RIG_INPUT);
    for (int64_t i = 0; c && s && i < count; i++) {
        double angle = (double)(i / half) * pow(10000, -(double)(i % half) / (double)half);
        attn__store(p->rotary_dtype, c, i, cos(angle));
        attn__store(p->rotary_dtype, s, i, sin(angle));
    }
    r->f.rotary_cos = c;
    r->f.rotary_sin = s;
    return c && s;
}

static bool want_gradients(rig *r, int64_t q_count, int64_t q_rows, int64_t k_count, int64_t k_rows, int64_t lse_count) {
    const attn_problem *p = &r->full;
    attn_buffers *f = &r->f;
    if (p->op != ATTN_BACKWARD && !r->backward) return true;
    if (!f->d_lse) f->d_lse = rig_tensor(r, attn__wide(p->dtype) ? ATTN_F64 : ATTN_F32, lse_count, RIG_INPUT);
    if (p->flags & ATTN_SINK && !f->d_sink) f->d_sink = rig_tensor(r, ATTN_F32, p->heads_q, RIG_OUTPUT);
    return f->d_lse && (!(p->flags & ATTN_SINK) || f->d_sink) &&
           want_tensor(r, &f->d_o, p->out_dtype, q_count, q_rows, p->heads_q, p->dim_v, RIG_INPUT) &&
           want_tensor(r, &f->d_q, p->dtype, q_count, q_rows, p->heads_q, p->dim_qk, RIG_OUTPUT) &&
           want_tensor(r, &f->d_k, p->kv_dtype, k_count, k_rows, p->heads_kv, p->dim_qk, RIG_OUTPUT) &&
           want_tensor(r, &f->d_v, p->kv_dtype, k_count, k_rows, p->heads_kv, p->dim_v, RIG_OUTPUT) &&
           (!(p->flags & ATTN_BIAS) || want_matrix(r, &f->d_bias, p->bias_dtype, RIG_OUTPUT));
}

static bool want_tensors(rig *r) {
    const attn_problem *p = &r->full;
    attn_buffers *f = &r->f;
    bool packed_q = p->flags & ATTN_VARLEN_Q, packed_kv = p->flags & ATTN_VARLEN_KV,
         packed_new = p->flags & ATTN_VARLEN_NEW;
    int64_t q_count = packed_q ? 1 : p->batch, q_rows = packed_q ? p->total_q : p->max_q;
    int64_t slots = p->flags & ATTN_BATCH_INDEX ? p->cache_batch : p->batch;
    int64_t k_count = p->page_size ? p->num_pages : packed_kv ? 1 : slots;
    int64_t k_rows = p->page_size ? p->page_size : packed_kv ? p->total_kv : p->max_kv;
    int64_t new_count = packed_new ? 1 : p->batch, new_rows = packed_new ? p->total_new : p->max_new;
    bool appends = p->op == ATTN_KV_APPEND || (p->flags & ATTN_APPEND), attends = p->op != ATTN_KV_APPEND;
    attn_dtype lse_dtype = attn__wide(p->dtype) ? ATTN_F64 : ATTN_F32;
    if (q_rows > INT32_MAX || q_count * q_rows > INT32_MAX) return false;
    int64_t lse_count = q_count * q_rows * p->heads_q;
    rig_kind cache = appends ? RIG_CACHE : RIG_INPUT;
    bool descale = p->flags & ATTN_DESCALE;
    if (descale && !f->q_descale) {
        f->descale_stride[0] = p->heads_kv;
        f->descale_stride[1] = 1;
    }
    if (attends && !f->lse && !(f->lse = rig_tensor(r, lse_dtype, lse_count, RIG_OUTPUT))) return false;
    return want_tensor(r, &f->k, p->kv_dtype, k_count, k_rows, p->heads_kv, p->dim_qk, cache) &&
           want_tensor(r, &f->v, p->kv_dtype, k_count, k_rows, p->heads_kv, p->dim_v, cache) &&
           (!attends || (want_tensor(r, &f->q, p->dtype, q_count, q_rows, p->heads_q, p->dim_qk, RIG_INPUT) &&
                         want_tensor(r, &f->o, p->out_dtype, q_count, q_rows, p->heads_q, p->dim_v, RIG_OUTPUT))) &&
           (!appends || (want_tensor(r, &f->k_new, p->dtype, new_count, new_rows, p->heads_kv, p->dim_qk, RIG_INPUT) &&
                         want_tensor(r, &f->v_new, p->dtype, new_count, new_rows, p->heads_kv, p->dim_v, RIG_INPUT))) &&
           (!(p->flags & ATTN_BIAS) || want_matrix(r, &f->bias, p->bias_dtype, RIG_INPUT)) &&
           (!r->probs || want_matrix(r, &f->probs, lse_dtype, RIG_OUTPUT)) &&
           want_floats(r, &f->alibi, p->flags & ATTN_ALIBI, p->heads_q) &&
           want_floats(r, &f->sink, p->flags & ATTN_SINK, p->heads_q) && want_descale(r, &f->q_descale, descale) &&
           want_descale(r, &f->k_descale, descale) && want_descale(r, &f->v_descale, descale) &&
           want_gradients(r, q_count, q_rows, k_count, k_rows, lse_count);
}

bool rig_make(rig *r, uint64_t seed) {
    r->random = seed;
    r->f.size = sizeof r->f;
    if (attn__problem_resolve(&r->full, &r->p) == ATTN_OK && want_lengths(r) && want_rotary(r) && want_tensors(r))
        return true;
    rig_free(r);
    return false;
}

/* ---- runs ---- */

attn_buffers rig_forward_buffers(const rig *r) {
    attn_buffers f = r->f;
    f.d_o = f.d_q = f.d_k = f.d_v = (attn_tensor){0};
    f.d_bias = (attn_matrix){0};
    f.d_lse = NULL;
    f.d_sink = NULL;
    return f;
}

attn_buffers rig_backward_buffers(const rig *r) {
    attn_buffers f = r->f;
    f.probs = (attn_matrix){0};
    return f;
}

/* Small arrays that tests write down themselves, and how many elements of four bytes they have. */
static bool mirror_own(mirror *m, const rig *r, const attn_buffers *f) {
    const attn_problem *p = &r->full;
    int64_t batch = p->batch, slots = p->flags & ATTN_BATCH_INDEX ? p->cache_batch : batch;
    int64_t descales = (batch - 1) * f->descale_stride[0] + (p->heads_kv - 1) * f->descale_stride[1] + 1;
    int64_t of_pages = p->flags & ATTN_DESCALE_PAGES ? (p->num_pages - batch) * f->descale_stride[0] + descales : descales;
    const struct {
        const void *data;
        int64_t count;
    } own[] = {{f->cu_q, batch + 1},
               {f->cu_kv, batch + 1},
               {f->cu_new, batch + 1},
               {f->used_q, batch},
               {f->used_kv, batch},
               {f->leftpad, batch},
               {f->batch_index, batch},
               {f->rotary_pos, batch},
               {f->page_table, p->page_size ? slots * attn__pages_per_slot(p, f) : 0},
               {f->flashmask, batch * p->flashmask_heads * p->max_kv * p->flashmask_vectors},
               {f->alibi, (batch - 1) * f->alibi_stride + p->heads_q},
               {f->sink, p->heads_q},
               {f->q_descale, descales},
               {f->k_descale, of_pages},
               {f->v_descale, of_pages}};
    for (size_t n = 0; n < sizeof own / sizeof *own; n++) {
        bool known = !own[n].data;
        for (int i = 0; i < m->count; i++) known = known || m->block[i].host == own[n].data;
        if (known) continue;
        if (!mirror_add(m, "array", own[n].data, (size_t)own[n].count * 4, 0, 0)) return false;
        m->block[m->count - 1].input = true;
    }
    return true;
}

/* Few rows on a GPU: twice in the same workspace, as a graph replays it. What the first run leaves there does not matter. */
static attn_status run_there(const rig *r, const attn_problem *p, mirror *m, const attn_plan *plan,
                             const attn_buffers *there, void *stream) {
    attn_status status = attn_run(plan, there, stream);
    if (status != ATTN_OK || p->op != ATTN_FORWARD || p->max_q > 16 || device_is_direct(m->d)) return status;
    bool works = device_wait(m->d);
    for (int n = 0; n < r->blocks && works; n++)
        if (r->block[n].kind == RIG_OUTPUT) works = device_fill(m->d, m->block[n].memory, 0xa7, r->block[n].bytes);
    return works && device_wait(m->d) ? attn_run(plan, there, stream) : ATTN_DEVICE;
}

/* Calls the library on the rig's memory, or on copies where the context's backend wants them; plan NULL: a one-shot call. */
static attn_status call_there(const rig *r, attn_context *context, const attn_plan *plan, const attn_problem *p,
                              const attn_buffers *f) {
    mirror m = {.d = test_device(context)};
    attn_status status = ATTN_NO_MEMORY;
    bool works = m.d != NULL;
    for (int n = 0; n < r->blocks && works; n++) works = mirror_add(&m, "block", r->block[n].data, r->block[n].bytes, 0, 0);
    if (works && f->workspace) works = mirror_add(&m, "workspace", f->workspace, f->workspace_size, 0, 0);
    if (works && mirror_own(&m, r, f) && mirror_upload(&m)) {
        attn_buffers there = mirror_buffers(&m, f);
        void *stream = device_stream(m.d, 0);
        status = r->beside ? load_run(r->beside) : ATTN_OK; /* last: an upload would wait for it */
        status = status != ATTN_OK        ? status
                 : plan                   ? run_there(r, p, &m, plan, &there, stream)
                 : p->op == ATTN_FORWARD  ? attn_forward(context, p, &there, stream)
                 : p->op == ATTN_BACKWARD ? attn_backward(context, p, &there, stream)
                                          : attn_kv_append(context, p, &there, stream);
        works = device_wait(m.d) && mirror_download(&m);
        if (status == ATTN_OK) status = works ? attn_device_status(context) : ATTN_DEVICE;
    }
    if (m.d) mirror_free(&m);
    return status;
}

attn_status rig_run_op(const rig *r, attn_context *context, attn_op op, attn_buffers f) {
    attn_problem p = r->p;
    p.op = op;
    attn_plan *plan;
    attn_status status = attn_plan_create(&plan, context, &p);
    if (status != ATTN_OK) return status;
    f.workspace_size = attn_plan_workspace(plan);
    f.workspace = aligned_alloc(64, (f.workspace_size + 63) / 64 * 64 + 64);
    if (f.workspace) memset(f.workspace, r->clean_workspace ? 0 : 0xFF, f.workspace_size);
    status = f.workspace ? call_there(r, context, plan, &p, &f) : ATTN_NO_MEMORY;
    free(f.workspace);
    attn_plan_destroy(plan);
    return status;
}

attn_status rig_run(rig *r, attn_context *context) {
    if (r->p.op == ATTN_BACKWARD) return rig_run_op(r, context, ATTN_BACKWARD, rig_backward_buffers(r));
    attn_status status = rig_run_op(r, context, r->p.op, rig_forward_buffers(r));
    return status == ATTN_OK && r->backward ? rig_run_op(r, context, ATTN_BACKWARD, rig_backward_buffers(r)) : status;
}

attn_status rig_call(rig *r, attn_context *context) {
    attn_buffers forward = rig_forward_buffers(r), backward = rig_backward_buffers(r);
    if (r->p.op != ATTN_FORWARD)
        return call_there(r, context, NULL, &r->p, r->p.op == ATTN_BACKWARD ? &backward : &forward);
    attn_status status = call_there(r, context, NULL, &r->p, &forward);
    if (status != ATTN_OK || !r->backward) return status;
    attn_problem p = r->p;
    p.op = ATTN_BACKWARD;
    return call_there(r, context, NULL, &p, &backward);
}

/* ---- where ---- */

bool on_host(void) { return !getenv("ATTN_TEST_BACKEND"); }

/* Is the context one that works on copies? */
static bool wants_copies(const attn_context *context) {
    const char *wish = getenv("ATTN_TEST_BACKEND"), *backend = attn_context_backend(context);
    return strcmp(backend, "cuda") == 0 || (wish && strcmp(wish, "copies") == 0 && strcmp(backend, "cpu") == 0);
}

device *test_device(const attn_context *context) {
    static device *direct, *other; /* for the life of the process */
    device **d = wants_copies(context) ? &other : &direct;
    if (!*d) *d = device_open(context, wants_copies(context));
    return *d;
}

/* ---- access ---- */

int32_t rig_sq(const rig *r, int32_t b) { return attn__seq(&r->full, &r->f, b).sq; }
int32_t rig_sk(const rig *r, int32_t b) { return attn__seq(&r->full, &r->f, b).sk; }

static void *at_element(const attn_tensor *t, attn_dtype dtype, int64_t element) {
    return (char *)t->data + element * (int64_t)attn_dtype_size(dtype);
}

void *rig_row(const rig *r, const attn_tensor *t, attn_dtype dtype, int32_t b, int32_t i, int32_t h) {
    attn_seq s = attn__seq(&r->full, &r->f, b);
    return at_element(t, dtype, attn__q_offset(&r->full, t, &s, i, h));
}

void *rig_key(const rig *r, const attn_tensor *t, attn_dtype dtype, int32_t b, int32_t at, int32_t h) {
    attn_seq s = attn__seq(&r->full, &r->f, b);
    return at_element(t, dtype, attn__kv_offset(&r->full, &r->f, t, &s, at, h));
}

static attn_dtype lse_dtype(const rig *r) { return attn__wide(r->full.dtype) ? ATTN_F64 : ATTN_F32; }

static int64_t lse_at(const rig *r, int32_t b, int32_t i, int32_t h) {
    attn_seq s = attn__seq(&r->full, &r->f, b);
    return attn__lse_index(&r->full, &s, i, h);
}

double rig_o(const rig *r, int32_t b, int32_t i, int32_t h, int32_t x) {
    return attn__load(r->full.out_dtype, rig_row(r, &r->f.o, r->full.out_dtype, b, i, h), x);
}

double rig_lse(const rig *r, int32_t b, int32_t i, int32_t h) {
    return attn__load(lse_dtype(r), r->f.lse, lse_at(r, b, i, h));
}

void fill_nan(attn_dtype dtype, void *row, int32_t dim) {
    for (int32_t x = 0; x < dim; x++) attn__store(dtype, row, x, NAN);
}

/* ---- copies and comparisons ---- */

static void copy_matrix(rig *to, int32_t to_b, const rig *from, int32_t from_b, int32_t rows, int32_t keys) {
    const attn_matrix *x = &to->f.bias, *y = &from->f.bias;
    if (!x->data || !y->data) return;
    for (int32_t h = 0; h < to->full.heads_q; h++)
        for (int32_t i = 0; i < rows; i++)
            for (int32_t j = 0; j < keys; j++)
                attn__store(to->full.bias_dtype, x->data,
                            to_b * x->stride[0] + h * x->stride[1] + i * x->stride[2] + j * x->stride[3],
                            attn__load(from->full.bias_dtype, y->data,
                                       from_b * y->stride[0] + h * y->stride[1] + i * y->stride[2] + j * y->stride[3]));
}

static void copy_row(rig *to, const attn_tensor *x, int32_t to_b, const rig *from, const attn_tensor *y, int32_t from_b,
                     attn_dtype dtype, int32_t i, int32_t h, int32_t dim) {
    memcpy(rig_row(to, x, dtype, to_b, i, h), rig_row(from, y, dtype, from_b, i, h), (size_t)dim * attn_dtype_size(dtype));
}

static void copy_key(rig *to, const attn_tensor *x, int32_t to_at, int32_t to_b, const rig *from, const attn_tensor *y,
                     int32_t from_at, int32_t from_b, int32_t h, int32_t dim) {
    attn_dtype dtype = to->full.kv_dtype;
    int32_t from_h = h * from->full.heads_kv / to->full.heads_kv;
    memcpy(rig_key(to, x, dtype, to_b, to_at, h), rig_key(from, y, dtype, from_b, from_at, from_h),
           (size_t)dim * attn_dtype_size(dtype));
}

void rig_copy(rig *to, int32_t to_b, const rig *from, int32_t from_b) {
    const attn_problem *p = &to->full;
    attn_seq s = attn__seq(p, &to->f, to_b), t = attn__seq(&from->full, &from->f, from_b);
    int32_t rows = attn__min32(s.sq, t.sq), keys = attn__min32(s.sk, t.sk);
    for (int32_t h = 0; h < p->heads_q; h++)
        for (int32_t i = 0; i < rows; i++) {
            copy_row(to, &to->f.q, to_b, from, &from->f.q, from_b, p->dtype, i, h, p->dim_qk);
            if (!to->f.d_o.data || !from->f.d_o.data) continue;
            copy_row(to, &to->f.d_o, to_b, from, &from->f.d_o, from_b, p->out_dtype, i, h, p->dim_v);
            attn__store(lse_dtype(to), (void *)to->f.d_lse, lse_at(to, to_b, i, h),
                        attn__load(lse_dtype(from), from->f.d_lse, lse_at(from, from_b, i, h)));
        }
    for (int32_t h = 0; h < p->heads_kv; h++)
        for (int32_t j = 0; j < keys; j++) {
            copy_key(to, &to->f.k, s.leftpad + j, to_b, from, &from->f.k, t.leftpad + j, from_b, h, p->dim_qk);
            copy_key(to, &to->f.v, s.leftpad + j, to_b, from, &from->f.v, t.leftpad + j, from_b, h, p->dim_v);
        }
    copy_matrix(to, to_b, from, from_b, rows, keys);
}

/* Is block n a result of what was run? */
static bool is_result(const rig *r, int n) {
    const attn_buffers *f = &r->f;
    const void *gradients[] = {f->d_q.data, f->d_k.data, f->d_v.data, f->d_bias.data, f->d_sink}, *data = r->block[n].data;
    bool gradient = false;
    for (int i = 0; i < 5; i++) gradient = gradient || gradients[i] == data;
    return r->block[n].kind != RIG_INPUT && (!gradient || r->backward || r->p.op == ATTN_BACKWARD);
}

bool rig_same(const rig *a, const rig *b) {
    int i = 0, j = 0;
    for (;;) {
        while (i < a->blocks && !is_result(a, i)) i++;
        while (j < b->blocks && !is_result(b, j)) j++;
        if (i == a->blocks || j == b->blocks) return i == a->blocks && j == b->blocks;
        if (a->block[i].bytes != b->block[j].bytes || memcmp(a->block[i].data, b->block[j].data, a->block[i].bytes) != 0)
            return false;
        i++, j++;
    }
}

static bool same_row(const rig *a, const attn_tensor *x, int32_t a_b, const rig *b, const attn_tensor *y, int32_t b_b,
                     attn_dtype dtype, int32_t i, int32_t h, int32_t dim) {
    return memcmp(rig_row(a, x, dtype, a_b, i, h), rig_row(b, y, dtype, b_b, i, h), (size_t)dim * attn_dtype_size(dtype)) ==
           0;
}

bool rig_same_rows(const rig *a, int32_t a_b, const rig *b, int32_t b_b, int32_t rows) {
    const attn_problem *p = &a->full;
    size_t lse_size = attn_dtype_size(lse_dtype(a));
    for (int32_t h = 0; h < p->heads_q; h++)
        for (int32_t i = 0; i < rows; i++) {
            const char *x = (const char *)a->f.lse + lse_at(a, a_b, i, h) * (int64_t)lse_size;
            const char *y = (const char *)b->f.lse + lse_at(b, b_b, i, h) * (int64_t)lse_size;
            if (memcmp(x, y, lse_size) != 0) return false;
            if (!same_row(a, &a->f.o, a_b, b, &b->f.o, b_b, p->out_dtype, i, h, p->dim_v)) return false;
            if (a->backward && !same_row(a, &a->f.d_q, a_b, b, &b->f.d_q, b_b, p->dtype, i, h, p->dim_qk)) return false;
        }
    return true;
}

bool rig_same_keys(const rig *a, int32_t a_b, const rig *b, int32_t b_b, int32_t keys) {
    const attn_problem *p = &a->full;
    int32_t a_pad = attn__seq(p, &a->f, a_b).leftpad, b_pad = attn__seq(&b->full, &b->f, b_b).leftpad;
    size_t size = attn_dtype_size(p->kv_dtype);
    for (int32_t h = 0; h < p->heads_kv; h++)
        for (int32_t j = 0; j < keys; j++) {
            if (memcmp(rig_key(a, &a->f.d_k, p->kv_dtype, a_b, a_pad + j, h),
                       rig_key(b, &b->f.d_k, p->kv_dtype, b_b, b_pad + j, h), (size_t)p->dim_qk * size) != 0 ||
                memcmp(rig_key(a, &a->f.d_v, p->kv_dtype, a_b, a_pad + j, h),
                       rig_key(b, &b->f.d_v, p->kv_dtype, b_b, b_pad + j, h), (size_t)p->dim_v * size) != 0)
                return false;
        }
    return true;
}
