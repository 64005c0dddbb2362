/*
 * The memory of a test case: arrays against guard pages, poison, and values where the call may look.
 *
 * Everything is filled with 0xff first (NaN in every float format, -1 as an integer). Then values are written to exactly those
 * elements that attn.h says are read. A kernel that reads anything else turns its result into NaN or dies on a guard page.
 */
#define _GNU_SOURCE /* MAP_ANONYMOUS */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cases.h"
#include "numeric.h"
#include "tool.h"

enum { MARGIN = 64 }; /* bytes watched on the side that has no guard page */

/* ---- memory ---- */

void *must_alloc(int64_t count, size_t bytes_each) {
    void *memory = tool_alloc(count, bytes_each);
    if (!memory) exit(TOOL_RUNTIME);
    return memset(memory, 0, (size_t)count * bytes_each);
}

/* Mappings are kept from case to case: making them is what would cost time. */
typedef struct guarded {
    unsigned char *base; /* first byte that may be touched */
    size_t room;         /* bytes that may; a page on either side may not */
} guarded;

static void guarded_grow(guarded *g, size_t bytes) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE), room = (2 * bytes + page) / page * page;
    if (g->base) munmap(g->base - page, g->room + 2 * page);
    unsigned char *all = mmap(NULL, room + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (all == MAP_FAILED || mprotect(all + page, room, PROT_READ | PROT_WRITE) != 0)
        exit(tool_error(TOOL_RUNTIME, "no memory for a test case"));
    *g = (guarded){all + page, room};
}

unsigned char *guarded_bytes(check_case *c, size_t bytes, size_t align, unsigned char **begin, size_t *watched) {
    static guarded pool[CASE_BLOCKS + 2];
    guarded *g = &pool[c->guard_next++];
    if (g->room < bytes + align + MARGIN) guarded_grow(g, bytes + align + MARGIN);
    unsigned char *end = g->base + g->room, *data = g->base;
    if (rng_chance(&c->rng, 50)) { /* up against the page above */
        data = end - bytes;
        data -= (uintptr_t)data % align;
        *begin = data - MARGIN;
        *watched = (size_t)(end - *begin);
    } else {
        *begin = data;
        *watched = bytes + MARGIN;
    }
    memset(*begin, 0xff, *watched);
    return data;
}

static size_t element_size(attn_dtype dtype) { return dtype ? attn_dtype_size(dtype) : sizeof(int32_t); }

/* Adds an array and points the buffers at it. */
static void *add_block(check_case *c, const char *name, size_t pointer, attn_dtype dtype, block_role role, int64_t count,
                       int64_t origin) {
    block *b = &c->blocks[c->block_count++];
    size_t element = element_size(dtype);
    *b = (block){.name = name, .pointer = pointer, .dtype = dtype, .role = role, .count = count, .origin = origin};
    b->data = guarded_bytes(c, (size_t)count * element, element, &b->begin, &b->bytes);
    void *target = b->data + origin * (int64_t)element;
    memcpy((char *)&c->buffers + pointer, &target, sizeof target);
    return target;
}

/* Arrays that are float whatever the dtypes of the problem. */
static float *add_floats(check_case *c, const char *name, size_t pointer, block_role role, int64_t count) {
    float *data = add_block(c, name, pointer, ATTN_F32, role, count, 0);
    c->blocks[c->block_count - 1].fixed = true;
    return data;
}

static int32_t *add_ints(check_case *c, const char *name, size_t pointer, int64_t count) {
    return add_block(c, name, pointer, ATTN_DTYPE_DEFAULT, BLOCK_IN, count, 0);
}

#define AT(field) offsetof(attn_buffers, field)

/* ---- layouts ---- */

/* Draws strides for `dims` dims over `inner` contiguous elements; dims in `flat` get stride 0. Returns elements and origin. */
static int64_t lay_out(check_case *c, const int64_t *size, int dims, int64_t inner, unsigned flat, int64_t *stride,
                       int64_t *origin) {
    int order[4] = {0, 1, 2, 3}; /* outermost first */
    bool loose = has(c, F_LAYOUT), negative = has(c, F_NEGATIVE), empty = false;
    for (int n = dims - 1; loose && n > 0; n--) {
        int other = rng_range(&c->rng, 0, n), held = order[n];
        order[n] = order[other];
        order[other] = held;
    }
    int64_t step = inner + (loose ? rng_range(&c->rng, 0, 5) : 0), count = inner;
    *origin = 0;
    for (int n = dims - 1; n >= 0; n--) {
        int d = order[n];
        stride[d] = flat & 1u << d ? 0 : step;
        if (stride[d] == 0) continue; /* one element, even of none */
        if (size[d] == 0) empty = true;
        if (empty) continue;
        count += stride[d] * (size[d] - 1);
        step = step * size[d] + (loose ? rng_range(&c->rng, 0, 9) : 0);
        if (negative && rng_chance(&c->rng, 50)) {
            *origin += stride[d] * (size[d] - 1);
            stride[d] = -stride[d];
        }
    }
    if (empty) *origin = 0;
    return empty ? 0 : count;
}

static unsigned draw_flat(check_case *c, int dims, int percent) {
    unsigned flat = 0;
    for (int d = 0; d < dims; d++) {
        if (rng_chance(&c->rng, percent)) flat |= 1u << d;
    }
    return flat;
}

/* A tensor of [batch][rows][heads][dim]; batch -1: packed. */
static void add_tensor(check_case *c, const char *name, size_t pointer, attn_dtype dtype, block_role role, int64_t batch,
                       int64_t rows, int64_t heads, int64_t dim) {
    int64_t size[3] = {batch < 0 ? 1 : batch, rows, heads}, origin;
    attn_tensor t;
    unsigned flat = role == BLOCK_IN && has(c, F_BROADCAST) ? draw_flat(c, 3, 40) : 0;
    int64_t count = lay_out(c, size, 3, dim, flat, t.stride, &origin);
    if (batch < 0) t.stride[0] = rng_chance(&c->rng, 50) ? 0 : -1234567; /* a packed tensor has none, says attn.h */
    memcpy((char *)&c->buffers + pointer, &t, sizeof t);
    add_block(c, name, pointer, dtype, role, count, origin);
}

static void add_matrix(check_case *c, const char *name, size_t pointer, attn_dtype dtype, block_role role, unsigned flat) {
    const attn_problem *p = &c->problem;
    int64_t size[4] = {p->batch, p->heads_q, p->max_q, p->max_kv}, origin;
    attn_matrix m;
    int64_t count = lay_out(c, size, 4, 1, flat, m.stride, &origin);
    memcpy((char *)&c->buffers + pointer, &m, sizeof m);
    add_block(c, name, pointer, dtype, role, count, origin);
}

/* ---- integers ---- */

static void fill_lengths(check_case *c) {
    const attn_problem *p = &c->problem;
    uint32_t flags = p->flags;
    int32_t batch = p->batch;
    int32_t *cu_q = flags & ATTN_VARLEN_Q ? add_ints(c, "cu_q", AT(cu_q), batch + 1) : NULL;
    int32_t *cu_kv = flags & ATTN_VARLEN_KV ? add_ints(c, "cu_kv", AT(cu_kv), batch + 1) : NULL;
    int32_t *cu_new = flags & ATTN_VARLEN_NEW ? add_ints(c, "cu_new", AT(cu_new), batch + 1) : NULL;
    int32_t *used_q = flags & ATTN_USED_Q ? add_ints(c, "used_q", AT(used_q), batch) : NULL;
    int32_t *used_kv = flags & ATTN_USED_KV ? add_ints(c, "used_kv", AT(used_kv), batch) : NULL;
    int32_t *leftpad = flags & ATTN_LEFTPAD ? add_ints(c, "leftpad", AT(leftpad), batch) : NULL;
    int32_t *batch_index = flags & ATTN_BATCH_INDEX ? add_ints(c, "batch_index", AT(batch_index), batch) : NULL;
    int32_t *rotary_pos = flags & ATTN_ROTARY_POS ? add_ints(c, "rotary_pos", AT(rotary_pos), batch) : NULL;
    for (int b = 0; b < batch; b++) {
        const sequence *s = &c->seq[b];
        if (cu_q) cu_q[b] = (int32_t)s->first_q, cu_q[b + 1] = (int32_t)s->first_q + s->rows_q;
        if (cu_kv) cu_kv[b] = (int32_t)s->first_kv, cu_kv[b + 1] = (int32_t)s->first_kv + s->capacity;
        if (cu_new) cu_new[b] = (int32_t)s->first_new, cu_new[b + 1] = (int32_t)s->first_new + s->appended;
        if (used_q) used_q[b] = s->sq;
        if (used_kv) used_kv[b] = s->used;
        if (leftpad) leftpad[b] = s->leftpad;
        if (batch_index) batch_index[b] = s->slot;
        if (rotary_pos) rotary_pos[b] = s->rotary_pos;
    }
}

static int32_t garbage(check_case *c) {
    const int32_t values[] = {-1, INT32_MIN, INT32_MAX, 1 << 20, c->problem.num_pages};
    return values[rng_range(&c->rng, 0, 4)];
}

/* Pages in random order, shared between sequences where nothing is written; garbage where no key is. */
static void fill_pages(check_case *c) {
    const attn_problem *p = &c->problem;
    int32_t slots = p->flags & ATTN_BATCH_INDEX ? p->cache_batch : p->batch;
    int32_t least = (p->max_kv + p->page_size - 1) / p->page_size, row = least + rng_range(&c->rng, 0, 3);
    c->buffers.page_table_stride = row == least && rng_chance(&c->rng, 50) ? 0 : row;
    int32_t *pages = add_ints(c, "page_table", AT(page_table), (int64_t)slots * row);
    for (int64_t n = 0; n < (int64_t)slots * row; n++) pages[n] = garbage(c);
    int32_t *order = must_alloc(p->num_pages, sizeof *order), next = 0;
    for (int32_t n = 0; n < p->num_pages; n++) {
        int32_t other = rng_range(&c->rng, 0, n);
        order[n] = order[other];
        order[other] = n;
    }
    for (int b = 0; b < p->batch; b++) {
        const sequence *s = &c->seq[b];
        if (s->sk == 0) continue;
        int32_t last = (s->leftpad + s->sk - 1) / p->page_size;
        for (int32_t n = s->leftpad / p->page_size; n <= last; n++) {
            bool shared = !case_appends(c) && rng_chance(&c->rng, 20);
            pages[(int64_t)s->slot * row + n] = shared ? rng_range(&c->rng, 0, p->num_pages - 1) : order[next++];
        }
    }
    free(order);
}

/* Row at which the document of row `row` ends, for documents that the bits of `cuts` begin. */
static int32_t document_end(const uint8_t *cuts, int32_t row, int32_t sq) {
    int32_t at = row < 0 ? 0 : row + 1;
    while (at < sq && !cuts[at]) at++;
    return at < sq ? at : sq;
}

static int32_t document_start(const uint8_t *cuts, int32_t row, int32_t sq) {
    int32_t at = row < sq ? row : sq - 1;
    while (at > 0 && !cuts[at]) at--;
    return at > 0 ? at : 0;
}

/* The vectors of one key: packed documents, or noise. */
static void fill_vectors(check_case *c, const uint8_t *cuts, const sequence *s, int32_t j, int32_t *v) {
    const attn_problem *p = &c->problem;
    int32_t n = p->flashmask_vectors, row = j - (s->sk - s->sq);
    for (int32_t x = 0; x < n; x++) v[x] = rng_chance(&c->rng, 3) ? garbage(c) : rng_range(&c->rng, -2, s->sq + 2);
    if (!cuts || rng_chance(&c->rng, 2)) return;
    int32_t end = document_end(cuts, row, s->sq), start = document_start(cuts, row, s->sq);
    bool is_causal = p->flags & ATTN_CAUSAL;
    v[0] = end;
    if (n == 2) v[1] = is_causal ? s->sq : start;
    if (n == 4) v[1] = s->sq, v[2] = 0, v[3] = start;
}

static void fill_flashmask(check_case *c) {
    const attn_problem *p = &c->problem;
    int64_t heads = p->flashmask_heads, vectors = p->flashmask_vectors;
    int32_t *mask = add_ints(c, "flashmask", AT(flashmask), p->batch * heads * p->max_kv * vectors);
    uint8_t *cuts = must_alloc((int64_t)p->max_q + 1, 1);
    for (int b = 0; b < p->batch; b++) {
        for (int64_t h = 0; h < heads; h++) {
            bool documents = rng_chance(&c->rng, 60);
            int often = rng_range(&c->rng, 2, 30);
            for (int32_t i = 0; i <= p->max_q; i++) cuts[i] = rng_chance(&c->rng, often);
            for (int32_t j = 0; j < p->max_kv; j++) {
                int32_t *v = mask + ((b * heads + h) * p->max_kv + j) * vectors;
                if (j < c->seq[b].sk)
                    fill_vectors(c, documents ? cuts : NULL, &c->seq[b], j, v);
                else
                    for (int64_t x = 0; x < vectors; x++) v[x] = garbage(c);
            }
        }
    }
    free(cuts);
}

/* ---- numbers ---- */

static void fill_row(check_case *c, attn_dtype dtype, void *data, int64_t at, int32_t n, double size) {
    int32_t most = c->problem.flags & ATTN_DESCALE ? 127 : 3;
    for (int32_t x = 0; x < n; x++)
        attn__store(dtype, data, at + x, dtype == ATTN_I8 ? rng_range(&c->rng, -most, most) : size * rng_normal(&c->rng));
}

static attn_dtype lse_dtype(const check_case *c) { return c->problem.dtype == ATTN_F64 ? ATTN_F64 : ATTN_F32; }

static void fill_floats(check_case *c) {
    const attn_problem *p = &c->problem;
    if (p->flags & ATTN_ALIBI) {
        bool per_batch = rng_chance(&c->rng, 50);
        int64_t stride = per_batch ? p->heads_q + rng_range(&c->rng, 0, 3) : 0;
        int64_t batches = per_batch ? p->batch : p->batch > 0;
        float *slopes = add_floats(c, "alibi", AT(alibi), BLOCK_IN, batches ? (batches - 1) * stride + p->heads_q : 0);
        c->buffers.alibi_stride = stride;
        for (int64_t b = 0; b < batches; b++) {
            for (int h = 0; h < p->heads_q; h++)
                slopes[b * stride + h] = rng_chance(&c->rng, 10) ? 0 : (float)ldexp(1 + rng_normal(&c->rng) / 8, -h - 1);
        }
    }
    if (p->flags & ATTN_SINK) {
        float *sinks = add_floats(c, "sink", AT(sink), BLOCK_IN, p->heads_q);
        for (int h = 0; h < p->heads_q; h++) {
            int kind = rng_range(&c->rng, 0, 9);
            sinks[h] = kind == 0 ? -INFINITY : kind == 1 ? 60 : (float)(2 * rng_normal(&c->rng));
        }
    }
    if (!(p->flags & ATTN_DESCALE)) return;
    bool per_batch = rng_chance(&c->rng, 50), per_head = rng_chance(&c->rng, 50);
    int64_t step_h = per_head ? rng_range(&c->rng, 1, 2) : 0, step_b = per_batch ? step_h * p->heads_kv + 1 : 0;
    c->buffers.descale_stride[0] = step_b;
    c->buffers.descale_stride[1] = step_h;
    int64_t pages = p->flags & ATTN_DESCALE_PAGES ? p->num_pages : p->batch;
    static const struct {
        const char *name;
        size_t pointer;
    } which[3] = {{"q_descale", AT(q_descale)}, {"k_descale", AT(k_descale)}, {"v_descale", AT(v_descale)}};
    int present = rng_range(&c->rng, 1, 7);
    for (int n = 0; n < 3; n++) {
        bool is_int = n > 0 && p->kv_dtype == ATTN_I8;
        if (!(present & 1 << n) && !is_int) continue;
        int64_t rows = n > 0 ? pages : p->batch;
        int64_t count = rows ? (rows - 1) * step_b + (p->heads_kv - 1) * step_h + 1 : 1;
        float *factor = add_floats(c, which[n].name, which[n].pointer, BLOCK_IN, count);
        for (int64_t b = 0; b < rows; b++) {
            for (int h = 0; h < p->heads_kv; h++)
                factor[b * step_b + h * step_h] = (float)((is_int ? 0.02 : 1) * exp(0.3 * rng_normal(&c->rng)));
        }
    }
}

/* Rows of cos and sin that a position of this case asks for. */
static void fill_rotary(check_case *c) {
    const attn_problem *p = &c->problem;
    int64_t pairs = p->rotary_dim / 2;
    void *cosine = add_block(c, "rotary_cos", AT(rotary_cos), p->rotary_dtype, BLOCK_IN, p->rotary_len * pairs, 0);
    void *sine = add_block(c, "rotary_sin", AT(rotary_sin), p->rotary_dtype, BLOCK_IN, p->rotary_len * pairs, 0);
    for (int64_t row = 0; row < p->rotary_len; row++) {
        bool wanted = false;
        for (int b = 0; b < p->batch; b++) {
            const sequence *s = &c->seq[b];
            int32_t q_rows = p->op != ATTN_FORWARD ? 0 : p->flags & (ATTN_CAUSAL | ATTN_WINDOW) ? s->sq : s->sq > 0;
            int32_t rows = q_rows > s->appended ? q_rows : s->appended;
            if (row >= s->rotary_pos && row < s->rotary_pos + rows) wanted = true;
        }
        for (int64_t x = 0; wanted && x < pairs; x++) {
            double angle = 3 * rng_normal(&c->rng);
            attn__store(p->rotary_dtype, cosine, row * pairs + x, cos(angle));
            attn__store(p->rotary_dtype, sine, row * pairs + x, sin(angle));
        }
    }
}

/* Which rows see a key, which keys are seen. When not strict, all of them count as such. */
static void find_seen(check_case *c) {
    const attn_problem *p = &c->problem;
    int group = p->heads_q / p->heads_kv;
    c->row_seen = must_alloc((int64_t)p->batch * p->heads_q * p->max_q, 1);
    c->key_seen = must_alloc((int64_t)p->batch * p->heads_kv * p->max_kv, 1);
    for (int b = 0; b < p->batch; b++) {
        for (int h = 0; h < p->heads_q; h++) {
            uint8_t *row = c->row_seen + ((int64_t)b * p->heads_q + h) * p->max_q;
            uint8_t *key = c->key_seen + ((int64_t)b * p->heads_kv + h / group) * p->max_kv;
            for (int i = 0; i < c->seq[b].sq; i++) {
                row[i] |= !c->strict;
                for (int j = 0; j < c->seq[b].sk; j++) {
                    if (case_allowed(c, b, h, i, j)) row[i] = key[j] = 1;
                }
            }
            for (int j = 0; j < c->seq[b].sk; j++) key[j] |= !c->strict;
        }
    }
}

/* Rows of q or d_o that count. */
static void fill_like_q(check_case *c, const attn_tensor *t, attn_dtype dtype, int32_t dim, double size) {
    const attn_problem *p = &c->problem;
    for (int b = 0; b < p->batch; b++) {
        for (int h = 0; h < p->heads_q; h++) {
            const uint8_t *row = c->row_seen + ((int64_t)b * p->heads_q + h) * p->max_q;
            for (int i = 0; i < c->seq[b].sq; i++) {
                if (row[i]) fill_row(c, dtype, t->data, case_q_at(c, t, b, i, h), dim, size);
            }
        }
    }
}

static void fill_cache(check_case *c) {
    const attn_problem *p = &c->problem;
    const attn_buffers *f = &c->buffers;
    for (int b = 0; b < p->batch && p->op != ATTN_KV_APPEND; b++) {
        const sequence *s = &c->seq[b];
        for (int h = 0; h < p->heads_kv; h++) {
            const uint8_t *key = c->key_seen + ((int64_t)b * p->heads_kv + h) * p->max_kv;
            for (int j = 0; j < s->used - s->leftpad; j++) {
                if (!key[j]) continue;
                fill_row(c, p->kv_dtype, f->k.data, case_kv_at(c, &f->k, b, s->leftpad + j, h), p->dim_qk, 1);
                fill_row(c, p->kv_dtype, f->v.data, case_kv_at(c, &f->v, b, s->leftpad + j, h), p->dim_v, 1);
            }
        }
    }
    if (!case_appends(c)) return;
    for (int b = 0; b < p->batch; b++) {
        for (int r = 0; r < c->seq[b].appended; r++) {
            int64_t row = c->seq[b].first_new + r, batch = p->flags & ATTN_VARLEN_NEW ? 0 : b;
            for (int h = 0; h < p->heads_kv; h++) {
                const int64_t *k = f->k_new.stride, *v = f->v_new.stride;
                fill_row(c, p->dtype, f->k_new.data, batch * k[0] + row * k[1] + h * k[2], p->dim_qk, 1);
                fill_row(c, p->dtype, f->v_new.data, batch * v[0] + row * v[1] + h * v[2], p->dim_v, 1);
            }
        }
    }
}

/* One element of one row of a tensor becomes NaN; i8 has none. */
static void fill_nan(check_case *c, const attn_tensor *t, attn_dtype dtype, int64_t at, int32_t dim) {
    if (dtype != ATTN_I8) attn__store(dtype, t->data, at + rng_range(&c->rng, 0, dim - 1), NAN);
}

static void fill_nans(check_case *c) {
    const attn_problem *p = &c->problem;
    const attn_buffers *f = &c->buffers;
    for (int b = 0; b < p->batch; b++) {
        const sequence *s = &c->seq[b];
        int which = rng_range(&c->rng, 0, 3), h = rng_range(&c->rng, 0, p->heads_kv - 1);
        int position = s->sk > 0 ? s->leftpad + rng_range(&c->rng, 0, s->sk - 1) : 0;
        if (which == 0 && s->sk > 0) fill_nan(c, &f->k, p->kv_dtype, case_kv_at(c, &f->k, b, position, h), p->dim_qk);
        if (which == 1 && s->sk > 0) fill_nan(c, &f->v, p->kv_dtype, case_kv_at(c, &f->v, b, position, h), p->dim_v);
        if (which == 2 && s->sq > 0)
            fill_nan(c, &f->q, p->dtype, case_q_at(c, &f->q, b, rng_range(&c->rng, 0, s->sq - 1), h), p->dim_qk);
    }
}

static void fill_bias(check_case *c) {
    const attn_problem *p = &c->problem;
    const attn_matrix *m = &c->buffers.bias;
    bool holes = rng_chance(&c->rng, 10) && !has(c, F_NAN); /* -inf in a bias masks */
    for (int b = 0; b < p->batch; b++) {
        for (int h = 0; h < p->heads_q; h++) {
            for (int i = 0; i < c->seq[b].sq; i++) {
                for (int j = 0; j < c->seq[b].sk; j++) {
                    if (c->strict && !case_allowed(c, b, h, i, j)) continue;
                    double x = holes && rng_chance(&c->rng, 10) ? -INFINITY : rng_normal(&c->rng);
                    int64_t at = b * m->stride[0] + h * m->stride[1] + i * m->stride[2] + j * m->stride[3];
                    attn__store(p->bias_dtype, m->data, at, x);
                }
            }
        }
    }
}

/* ---- the whole ---- */

static void add_kv_tensors(check_case *c) {
    const attn_problem *p = &c->problem;
    int64_t slots = p->flags & ATTN_BATCH_INDEX ? p->cache_batch : p->batch;
    int64_t batch = p->page_size ? p->num_pages : p->flags & ATTN_VARLEN_KV ? -1 : slots;
    int64_t rows = p->page_size ? p->page_size : p->flags & ATTN_VARLEN_KV ? p->total_kv : p->max_kv;
    block_role role = case_appends(c) ? BLOCK_CACHE : BLOCK_IN;
    add_tensor(c, "k", AT(k), p->kv_dtype, role, batch, rows, p->heads_kv, p->dim_qk);
    add_tensor(c, "v", AT(v), p->kv_dtype, role, batch, rows, p->heads_kv, p->dim_v);
    if (case_appends(c)) {
        int64_t new_batch = p->flags & ATTN_VARLEN_NEW ? -1 : p->batch;
        int64_t new_rows = p->flags & ATTN_VARLEN_NEW ? p->total_new : p->max_new;
        add_tensor(c, "k_new", AT(k_new), p->dtype, BLOCK_IN, new_batch, new_rows, p->heads_kv, p->dim_qk);
        add_tensor(c, "v_new", AT(v_new), p->dtype, BLOCK_IN, new_batch, new_rows, p->heads_kv, p->dim_v);
    }
    if (p->op != ATTN_BACKWARD) return;
    int dropped = has(c, F_SOME_GRADIENTS) ? rng_range(&c->rng, 1, 7) : 0;
    int64_t q_batch = p->flags & ATTN_VARLEN_Q ? -1 : p->batch, q_rows = p->flags & ATTN_VARLEN_Q ? p->total_q : p->max_q;
    if (!(dropped & 1)) add_tensor(c, "d_q", AT(d_q), p->dtype, BLOCK_OUT, q_batch, q_rows, p->heads_q, p->dim_qk);
    if (!(dropped & 2)) add_tensor(c, "d_k", AT(d_k), p->kv_dtype, BLOCK_OUT, batch, rows, p->heads_kv, p->dim_qk);
    if (!(dropped & 4)) add_tensor(c, "d_v", AT(d_v), p->kv_dtype, BLOCK_OUT, batch, rows, p->heads_kv, p->dim_v);
}

/* q, o, lse and their gradients. */
static void add_q_tensors(check_case *c) {
    const attn_problem *p = &c->problem;
    bool backward = p->op == ATTN_BACKWARD;
    int64_t batch = p->flags & ATTN_VARLEN_Q ? -1 : p->batch, rows = p->flags & ATTN_VARLEN_Q ? p->total_q : p->max_q;
    int64_t lse_count = c->rows_q * p->heads_q;
    add_tensor(c, "q", AT(q), p->dtype, BLOCK_IN, batch, rows, p->heads_q, p->dim_qk);
    uint64_t features = c->features;
    c->features &= ~FEATURE_BIT(F_BROADCAST); /* o is a result, in the backward too */
    add_tensor(c, "o", AT(o), p->out_dtype, backward ? BLOCK_IN : BLOCK_OUT, batch, rows, p->heads_q, p->dim_v);
    c->features = features;
    if (backward || !has(c, F_NO_LSE))
        add_block(c, "lse", AT(lse), lse_dtype(c), backward ? BLOCK_IN : BLOCK_OUT, lse_count, 0);
    if (has(c, F_PROBS)) add_matrix(c, "probs", AT(probs), lse_dtype(c), BLOCK_OUT, 0);
    if (!backward) return;
    add_tensor(c, "d_o", AT(d_o), p->out_dtype, BLOCK_IN, batch, rows, p->heads_q, p->dim_v);
    if (has(c, F_D_BIAS)) add_matrix(c, "d_bias", AT(d_bias), p->bias_dtype, BLOCK_OUT, draw_flat(c, 4, 25));
    if (has(c, F_D_SINK)) add_floats(c, "d_sink", AT(d_sink), BLOCK_OUT, p->heads_q);
}

static void fill_backward(check_case *c) {
    const attn_problem *p = &c->problem;
    fill_like_q(c, &c->buffers.d_o, p->out_dtype, p->dim_v, 1);
    if (has(c, F_D_LSE)) {
        void *d_lse = add_block(c, "d_lse", AT(d_lse), lse_dtype(c), BLOCK_IN, c->rows_q * p->heads_q, 0);
        for (int b = 0; b < p->batch; b++) {
            for (int h = 0; h < p->heads_q; h++) {
                for (int i = 0; i < c->seq[b].sq; i++)
                    attn__store(lse_dtype(c), d_lse, case_lse_at(c, b, i, h), rng_normal(&c->rng));
            }
        }
    }
    if (!has(c, F_RING)) return;
    c->ring = must_alloc(c->rows_q * p->heads_q, sizeof *c->ring);
    for (int64_t n = 0; n < c->rows_q * p->heads_q; n++) c->ring[n] = fabs(rng_normal(&c->rng));
}

void case_fill(check_case *c) {
    const attn_problem *p = &c->problem;
    c->buffers.size = sizeof c->buffers;
    fill_lengths(c);
    if (p->page_size) fill_pages(c);
    if (p->flashmask_vectors) fill_flashmask(c);
    find_seen(c);
    add_kv_tensors(c);
    fill_floats(c);
    if (p->flags & ATTN_ROTARY) fill_rotary(c);
    fill_cache(c);
    if (p->op == ATTN_KV_APPEND) return;
    add_q_tensors(c);
    fill_like_q(c, &c->buffers.q, p->dtype, p->dim_qk, c->q_size);
    if (p->flags & ATTN_BIAS) {
        add_matrix(c, "bias", AT(bias), p->bias_dtype, BLOCK_IN, draw_flat(c, 4, 25));
        fill_bias(c);
    }
    if (p->dropout > 0) {
        c->buffers.seed = rng_next(&c->rng);
        c->buffers.offset = rng_next(&c->rng) >> (rng_chance(&c->rng, 50) ? 0 : 40);
    }
    if (has(c, F_NAN)) fill_nans(c);
    if (p->op == ATTN_BACKWARD) fill_backward(c);
}

void case_seal(check_case *c) {
    for (int n = 0; n < c->block_count; n++) {
        block *b = &c->blocks[n];
        b->initial = must_alloc((int64_t)b->bytes, 1);
        memcpy(b->initial, b->begin, b->bytes);
    }
}

void case_restore(check_case *c) {
    for (int n = 0; n < c->block_count; n++) memcpy(c->blocks[n].begin, c->blocks[n].initial, c->blocks[n].bytes);
}

void block_wipe(const block *b, void *p, size_t bytes) { memcpy(p, b->initial + ((unsigned char *)p - b->begin), bytes); }

const char *case_damage(const check_case *c) {
    for (int n = 0; n < c->block_count; n++) {
        const block *b = &c->blocks[n];
        if (memcmp(b->begin, b->initial, b->bytes) != 0) return b->name;
    }
    return NULL;
}

const block *block_find(const check_case *c, const char *name) {
    for (int n = 0; n < c->block_count; n++) {
        if (strcmp(c->blocks[n].name, name) == 0) return &c->blocks[n];
    }
    return NULL;
}

void case_free(check_case *c) {
    for (int n = 0; n < c->block_count; n++) free(c->blocks[n].initial);
    free(c->ring);
    free(c->row_seen);
    free(c->key_seen);
    c->block_count = 0;
    c->ring = NULL;
    c->row_seen = c->key_seen = NULL;
}

/* ---- semantics ---- */

bool case_allowed(const check_case *c, int b, int h, int i, int j) {
    const attn_problem *p = &c->problem;
    const sequence *s = &c->seq[b];
    int64_t diagonal = (int64_t)i + s->sk - s->sq;
    bool is_causal = p->flags & ATTN_CAUSAL;
    if (i >= s->sq || j >= s->sk || (is_causal && j > diagonal)) return false;
    if (p->flags & ATTN_WINDOW) {
        if (p->window_left >= 0 && j < diagonal - p->window_left) return false;
        if (p->window_right >= 0 && j > diagonal + p->window_right) return false;
    }
    if (!p->flashmask_vectors) return true;
    int kv_head = h / (p->heads_q / p->heads_kv), head = p->flashmask_heads == 1 ? 0 : kv_head;
    int64_t column = ((int64_t)b * p->flashmask_heads + head) * p->max_kv + j;
    const int32_t *v = c->buffers.flashmask + column * p->flashmask_vectors;
    if (p->flashmask_vectors == 1) return i < v[0];
    if (p->flashmask_vectors == 4) return !(i >= v[0] && i < v[1]) && !(i >= v[2] && i < v[3]);
    return is_causal ? !(i >= v[0] && i < v[1]) : i < v[0] && i >= v[1];
}

int64_t case_q_at(const check_case *c, const attn_tensor *t, int b, int64_t i, int h) {
    bool packed = c->problem.flags & ATTN_VARLEN_Q;
    return (packed ? 0 : b * t->stride[0]) + (c->seq[b].first_q + i) * t->stride[1] + h * t->stride[2];
}

static int64_t page_at(const check_case *c, int b, int position) {
    const attn_problem *p = &c->problem;
    int64_t least = (p->max_kv + p->page_size - 1) / p->page_size;
    int64_t row = c->buffers.page_table_stride ? c->buffers.page_table_stride : least;
    return c->buffers.page_table[c->seq[b].slot * row + position / p->page_size];
}

int64_t case_kv_at(const check_case *c, const attn_tensor *t, int b, int position, int kv_head) {
    const attn_problem *p = &c->problem;
    const sequence *s = &c->seq[b];
    int64_t head = kv_head * t->stride[2];
    if (p->page_size) {
        return page_at(c, b, position) * t->stride[0] + position % p->page_size * t->stride[1] + head;
    }
    bool packed = p->flags & ATTN_VARLEN_KV;
    return (packed ? 0 : s->slot * t->stride[0]) + (s->first_kv + position) * t->stride[1] + head;
}

int64_t case_lse_at(const check_case *c, int b, int i, int h) {
    const attn_problem *p = &c->problem;
    return p->flags & ATTN_VARLEN_Q ? h * p->total_q + c->seq[b].first_q + i : ((int64_t)b * p->heads_q + h) * p->max_q + i;
}

int64_t case_q_row(const check_case *c, int b, int i) {
    return c->problem.flags & ATTN_VARLEN_Q ? c->seq[b].first_q + i : (int64_t)b * c->problem.max_q + i;
}

int64_t case_kv_row(const check_case *c, int b, int position) {
    return c->problem.flags & ATTN_VARLEN_KV ? c->seq[b].first_kv + position : (int64_t)b * c->problem.max_kv + position;
}

static double factor_at(const check_case *c, const float *descale, int64_t n, int kv_head) {
    const int64_t *stride = c->buffers.descale_stride;
    return descale ? descale[n * stride[0] + kv_head * stride[1]] : 1;
}

double case_q_descale(const check_case *c, int b, int kv_head) { return factor_at(c, c->buffers.q_descale, b, kv_head); }

double case_kv_descale(const check_case *c, const float *descale, int b, int position, int kv_head) {
    return factor_at(c, descale, c->problem.flags & ATTN_DESCALE_PAGES ? page_at(c, b, position) : b, kv_head);
}
