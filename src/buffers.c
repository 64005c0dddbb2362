/*
 * Validation of buffers against a resolved problem: pointers, alignment, strides, workspace; and, where the memory is the
 * host's, the values of lengths and page tables. All of it before anything is written.
 */
#include "host.h"

#include <stdio.h>
#include <string.h>

/* Distance in elements from the lowest to one past the highest element, or -1 when it leaves the address space. */
static int64_t extent(const int64_t *stride, const int64_t *size, int dims, int64_t inner, size_t element) {
    int64_t sum = inner;
    for (int n = 0; n < dims; n++) {
        int64_t step;
        if (size[n] == 0) return 0;
        if (stride[n] == INT64_MIN || __builtin_mul_overflow(stride[n] < 0 ? -stride[n] : stride[n], size[n] - 1, &step) ||
            __builtin_add_overflow(sum, step, &sum)) {
            return -1;
        }
    }
    int64_t bytes;
    return __builtin_mul_overflow(sum, (int64_t)element, &bytes) ? -1 : sum;
}

/* Of an element's size, which is a power of two: a division would take longer than all else that is checked. */
static bool is_aligned(const void *data, size_t size) { return ((uintptr_t)data & (size - 1)) == 0; }

/* Do two elements of an output share memory? Sorted by stride, each dim must step over all that the smaller ones cover. */
static bool overlaps_itself(const int64_t *stride, const int64_t *size, int dims, int64_t inner) {
    int64_t covered = inner;
    bool done[4] = {false};
    for (int round = 0; round < dims; round++) {
        int next = -1;
        int64_t least = 0;
        for (int n = 0; n < dims; n++) {
            int64_t step = stride[n] < 0 ? -stride[n] : stride[n];
            if (done[n] || (next >= 0 && step >= least)) continue;
            next = n;
            least = step;
        }
        done[next] = true;
        if (size[next] <= 1) continue;
        if (least < covered) return true;
        covered += least * (size[next] - 1);
    }
    return false;
}

static attn_status fail_stride(const char *name, const int64_t *stride, int dims, const char *why) {
    char fourth[24] = "";
    if (dims == 4) snprintf(fourth, sizeof fourth, ",%lld", (long long)stride[3]);
    return attn__fail(ATTN_INVALID, "%s.stride=%lld,%lld,%lld%s: %s", name, (long long)stride[0], (long long)stride[1],
                      (long long)stride[2], fourth, why);
}

/* Any strided array; `inner` elements are contiguous. */
static attn_status array_check(const char *name, const void *data, const int64_t *stride, const int64_t *size, int dims,
                               int64_t inner, attn_dtype dtype, bool is_output) {
    for (int n = 0; n < dims; n++) {
        if (size[n] == 0) return ATTN_OK; /* nothing there */
    }
    INVALID_IF(!data, "%s.data=NULL: want the tensor", name);
    size_t element = attn_dtype_size(dtype);
    INVALID_IF(!is_aligned(data, element), "%s.data=%p: want it aligned to the %zu bytes of %s", name, data, element,
               attn_dtype_name(dtype));
    if (extent(stride, size, dims, inner, element) < 0)
        return fail_stride(name, stride, dims, "the tensor does not fit into memory");
    if (is_output && overlaps_itself(stride, size, dims, inner))
        return fail_stride(name, stride, dims, "an output may not overlap itself");
    return ATTN_OK;
}

attn_status attn__tensor_check(const char *name, const attn_tensor *t, int64_t batch, int64_t rows, int64_t heads,
                               int64_t dim, attn_dtype dtype, bool is_output) {
    const int64_t size[3] = {batch, rows, heads};
    return array_check(name, t->data, t->stride, size, 3, dim, dtype, is_output);
}

/* ---- which buffers are there ---- */

static attn_status pointer_check(const char *name, const void *data, bool wanted, int64_t count, const char *why,
                                 attn_dtype dtype) {
    INVALID_IF(wanted && count > 0 && !data, "%s=NULL: wanted by %s", name, why);
    INVALID_IF(!wanted && data, "%s=%p: want NULL without %s", name, data, why);
    INVALID_IF(!is_aligned(data, attn_dtype_size(dtype)), "%s=%p: want it aligned to %zu bytes", name, data,
               attn_dtype_size(dtype));
    return ATTN_OK;
}

/* Integer arrays: a flag and its buffer come together. */
static attn_status check_arrays(const attn_problem *p, const attn_buffers *f) {
    const struct {
        const char *name, *why;
        const void *data;
        bool wanted;
        int64_t count;
    } rows[] = {
        {"cu_q", "ATTN_VARLEN_Q", f->cu_q, p->flags & ATTN_VARLEN_Q, p->batch},
        {"cu_kv", "ATTN_VARLEN_KV", f->cu_kv, p->flags & ATTN_VARLEN_KV, p->batch},
        {"cu_new", "ATTN_VARLEN_NEW", f->cu_new, p->flags & ATTN_VARLEN_NEW, p->batch},
        {"used_q", "ATTN_USED_Q", f->used_q, p->flags & ATTN_USED_Q, p->batch},
        {"used_kv", "ATTN_USED_KV", f->used_kv, p->flags & ATTN_USED_KV, p->batch},
        {"leftpad", "ATTN_LEFTPAD", f->leftpad, p->flags & ATTN_LEFTPAD, p->batch},
        {"batch_index", "ATTN_BATCH_INDEX", f->batch_index, p->flags & ATTN_BATCH_INDEX, p->batch},
        {"rotary_pos", "ATTN_ROTARY_POS", f->rotary_pos, p->flags & ATTN_ROTARY_POS, p->batch},
        {"page_table", "page_size", f->page_table, p->page_size > 0, (int64_t)p->cache_batch * p->max_kv},
        {"flashmask", "flashmask_vectors", f->flashmask, p->flashmask_vectors > 0, (int64_t)p->batch * p->max_kv},
        {"alibi", "ATTN_ALIBI", f->alibi, p->flags & ATTN_ALIBI, p->batch},
        {"sink", "ATTN_SINK", f->sink, p->flags & ATTN_SINK, 1},
    };
    for (size_t n = 0; n < sizeof rows / sizeof rows[0]; n++)
        RETURN_IF_ERROR(pointer_check(rows[n].name, rows[n].data, rows[n].wanted, rows[n].count, rows[n].why, ATTN_F32));
    INVALID_IF(f->page_table_stride < 0, "page_table_stride=%lld: want 0 or more", (long long)f->page_table_stride);
    INVALID_IF(f->page_table_stride && p->page_size &&
                   f->page_table_stride < ((int64_t)p->max_kv + p->page_size - 1) / p->page_size,
               "page_table_stride=%lld: max_kv=%d wants %lld pages a row", (long long)f->page_table_stride, p->max_kv,
               ((long long)p->max_kv + p->page_size - 1) / p->page_size);
    const int64_t slots = p->cache_batch, batch = p->batch;
    INVALID_IF(extent(&f->page_table_stride, &slots, 1, 0, sizeof(int32_t)) < 0,
               "page_table_stride=%lld: the table does not fit into memory", (long long)f->page_table_stride);
    INVALID_IF(extent(&f->alibi_stride, &batch, 1, p->heads_q, sizeof(float)) < 0,
               "alibi_stride=%lld: the slopes do not fit into memory", (long long)f->alibi_stride);
    return ATTN_OK;
}

/* What belongs to an append, a rotation, scales. */
static attn_status check_append(const attn_problem *p, const attn_buffers *f) {
    bool append = p->flags & ATTN_APPEND, rotary = p->flags & ATTN_ROTARY, packed = p->flags & ATTN_VARLEN_NEW;
    INVALID_IF(!append && f->k_new.data, "k_new.data=%p: want NULL without ATTN_APPEND", f->k_new.data);
    INVALID_IF(!append && f->v_new.data, "v_new.data=%p: want NULL without ATTN_APPEND", f->v_new.data);
    if (append) {
        int64_t batch = packed ? p->batch > 0 : p->batch, rows = packed ? p->total_new : p->max_new;
        RETURN_IF_ERROR(attn__tensor_check("k_new", &f->k_new, batch, rows, p->heads_kv, p->dim_qk, p->dtype, false));
        RETURN_IF_ERROR(attn__tensor_check("v_new", &f->v_new, batch, rows, p->heads_kv, p->dim_v, p->dtype, false));
    }
    int64_t table = (int64_t)p->rotary_len * p->batch;
    RETURN_IF_ERROR(pointer_check("rotary_cos", f->rotary_cos, rotary, table, "ATTN_ROTARY", p->rotary_dtype));
    RETURN_IF_ERROR(pointer_check("rotary_sin", f->rotary_sin, rotary, table, "ATTN_ROTARY", p->rotary_dtype));
    bool of_pages = (p->flags & ATTN_DESCALE_PAGES) && p->num_pages > p->batch;
    const int64_t descales[2] = {of_pages ? p->num_pages : p->batch, p->heads_kv};
    INVALID_IF(extent(f->descale_stride, descales, 2, 1, sizeof(float)) < 0,
               "descale_stride=%lld,%lld: the factors do not fit into memory", (long long)f->descale_stride[0],
               (long long)f->descale_stride[1]);
    bool descale = p->flags & ATTN_DESCALE, any = f->q_descale || f->k_descale || f->v_descale;
    INVALID_IF(descale && !any && p->batch, "q_descale=NULL: ATTN_DESCALE wants q_descale, k_descale or v_descale");
    RETURN_IF_ERROR(pointer_check("q_descale", f->q_descale, descale, 0, "ATTN_DESCALE", ATTN_F32));
    RETURN_IF_ERROR(pointer_check("k_descale", f->k_descale, descale, 0, "ATTN_DESCALE", ATTN_F32));
    return pointer_check("v_descale", f->v_descale, descale, 0, "ATTN_DESCALE", ATTN_F32);
}

static attn_status check_kv(const attn_problem *p, const attn_buffers *f) {
    bool packed = p->flags & ATTN_VARLEN_KV, append = p->flags & ATTN_APPEND;
    int64_t batch = p->page_size ? p->num_pages : packed ? 1 : p->cache_batch;
    int64_t rows = p->page_size ? p->page_size : packed ? p->total_kv : p->max_kv;
    if (p->batch == 0 && !(packed && p->op == ATTN_BACKWARD)) return ATTN_OK; /* packed gradients are written even so */
    RETURN_IF_ERROR(attn__tensor_check("k", &f->k, batch, rows, p->heads_kv, p->dim_qk, p->kv_dtype, append));
    RETURN_IF_ERROR(attn__tensor_check("v", &f->v, batch, rows, p->heads_kv, p->dim_v, p->kv_dtype, append));
    if (p->op != ATTN_BACKWARD) return ATTN_OK;
    if (f->d_k.data)
        RETURN_IF_ERROR(attn__tensor_check("d_k", &f->d_k, batch, rows, p->heads_kv, p->dim_qk, p->kv_dtype, true));
    if (f->d_v.data)
        RETURN_IF_ERROR(attn__tensor_check("d_v", &f->d_v, batch, rows, p->heads_kv, p->dim_v, p->kv_dtype, true));
    return ATTN_OK;
}

/* bias, d_bias or probs. In d_bias a stride of 0 asks for a sum, so that dim has one element. */
static attn_status matrix_check(const char *name, const attn_problem *p, const attn_matrix *m, attn_dtype dtype,
                                bool is_output, bool zero_sums) {
    int64_t size[4] = {p->batch, p->heads_q, p->max_q, p->max_kv};
    for (int n = 0; n < 4 && zero_sums; n++) {
        if (m->stride[n] == 0) size[n] = 1;
    }
    return array_check(name, m->data, m->stride, size, 4, 1, dtype, is_output);
}

static attn_status check_matrices(const attn_problem *p, const attn_buffers *f) {
    bool bias = p->flags & ATTN_BIAS, sink = p->flags & ATTN_SINK, backward = p->op == ATTN_BACKWARD;
    INVALID_IF(!bias && f->bias.data, "bias.data=%p: want NULL without ATTN_BIAS", f->bias.data);
    INVALID_IF(!bias && backward && f->d_bias.data, "d_bias.data=%p: want NULL without ATTN_BIAS", f->d_bias.data);
    INVALID_IF(!sink && backward && f->d_sink, "d_sink=%p: want NULL without ATTN_SINK", (const void *)f->d_sink);
    INVALID_IF(!is_aligned(f->d_sink, sizeof(float)), "d_sink=%p: want it aligned to %zu bytes", (const void *)f->d_sink,
               sizeof(float));
    if (bias) RETURN_IF_ERROR(matrix_check("bias", p, &f->bias, p->bias_dtype, false, false));
    if (backward && f->d_bias.data) RETURN_IF_ERROR(matrix_check("d_bias", p, &f->d_bias, p->bias_dtype, true, true));
    if (!backward && f->probs.data) {
        attn_dtype dtype = p->dtype == ATTN_F64 ? ATTN_F64 : ATTN_F32;
        RETURN_IF_ERROR(matrix_check("probs", p, &f->probs, dtype, true, false));
    }
    return ATTN_OK;
}

static attn_status check_q(const attn_problem *p, const attn_buffers *f) {
    bool packed = p->flags & ATTN_VARLEN_Q, backward = p->op == ATTN_BACKWARD;
    int64_t batch = packed ? 1 : p->batch, rows = packed ? p->total_q : p->max_q;
    RETURN_IF_ERROR(attn__tensor_check("q", &f->q, batch, rows, p->heads_q, p->dim_qk, p->dtype, false));
    RETURN_IF_ERROR(attn__tensor_check("o", &f->o, batch, rows, p->heads_q, p->dim_v, p->out_dtype, !backward));
    size_t real = p->dtype == ATTN_F64 ? 8 : 4;
    INVALID_IF(!is_aligned(f->lse, real), "lse=%p: want it aligned to %zu bytes", f->lse, real);
    if (!backward) return ATTN_OK;
    INVALID_IF(!f->lse && batch * rows > 0, "lse=NULL: backward wants the lse of the forward");
    INVALID_IF(!is_aligned(f->d_lse, real), "d_lse=%p: want it aligned to %zu bytes", f->d_lse, real);
    RETURN_IF_ERROR(attn__tensor_check("d_o", &f->d_o, batch, rows, p->heads_q, p->dim_v, p->out_dtype, false));
    if (f->d_q.data)
        RETURN_IF_ERROR(attn__tensor_check("d_q", &f->d_q, batch, rows, p->heads_q, p->dim_qk, p->dtype, true));
    return ATTN_OK;
}

/* ---- values, where the host can read them ---- */

static attn_status check_offsets(const char *name, const int32_t *cu, int32_t batch, int64_t total, int32_t most,
                                 const char *most_name) {
    for (int32_t b = 0; b <= batch; b++) {
        INVALID_IF(cu[b] < 0 || cu[b] > total, "%s[%d]=%d: want 0 to the %lld rows of the packed tensor", name, b, cu[b],
                   (long long)total);
        INVALID_IF(b && cu[b] < cu[b - 1], "%s[%d]=%d: want ascending offsets, and the one before is %d", name, b, cu[b],
                   cu[b - 1]);
        INVALID_IF(b && cu[b] - cu[b - 1] > most, "%s[%d]=%d: sequence %d has %d rows, more than %s=%d", name, b, cu[b],
                   b - 1, cu[b] - cu[b - 1], most_name, most);
    }
    return ATTN_OK;
}

/* Lengths of sequence b, in 64 bits: they are not yet known to be sane. */
static attn_status check_lengths(const attn_problem *p, const attn_buffers *f, int32_t b) {
    if (p->flags & ATTN_USED_Q) {
        int32_t rows = p->flags & ATTN_VARLEN_Q ? f->cu_q[b + 1] - f->cu_q[b] : p->max_q;
        INVALID_IF(f->used_q[b] < 0 || f->used_q[b] > rows, "used_q[%d]=%d: want 0 to %d", b, f->used_q[b], rows);
    }
    int32_t capacity = p->flags & ATTN_VARLEN_KV ? f->cu_kv[b + 1] - f->cu_kv[b] : p->max_kv;
    int64_t used = p->flags & ATTN_USED_KV ? f->used_kv[b] : capacity;
    int64_t appended = !(p->flags & ATTN_APPEND)    ? 0
                       : p->flags & ATTN_VARLEN_NEW ? f->cu_new[b + 1] - f->cu_new[b]
                                                    : p->max_new;
    INVALID_IF(used < 0 || used > capacity, "used_kv[%d]=%lld: want 0 to %d", b, (long long)used, capacity);
    INVALID_IF(used + appended > capacity, "used_kv[%d]=%lld: %lld appended rows do not fit into max_kv=%d", b,
               (long long)used, (long long)appended, capacity);
    if (p->flags & ATTN_LEFTPAD)
        INVALID_IF(f->leftpad[b] < 0 || f->leftpad[b] > used, "leftpad[%d]=%d: want 0 to the %lld positions in use", b,
                   f->leftpad[b], (long long)used);
    if (p->flags & ATTN_BATCH_INDEX)
        INVALID_IF(f->batch_index[b] < 0 || f->batch_index[b] >= p->cache_batch, "batch_index[%d]=%d: want 0 to %d", b,
                   f->batch_index[b], p->cache_batch - 1);
    return ATTN_OK;
}

/* Pages and rotary positions of sequence s, whose lengths are known to be sane. */
static attn_status check_places(const attn_problem *p, const attn_buffers *f, const attn_seq *s) {
    if (p->page_size && s->sk > 0) {
        const int32_t *row = f->page_table + s->slot * attn__pages_per_slot(p, f);
        for (int32_t n = s->leftpad / p->page_size; n <= (s->leftpad + s->sk - 1) / p->page_size; n++)
            INVALID_IF(row[n] < 0 || row[n] >= p->num_pages, "page_table[%d][%d]=%d: want less than num_pages=%d", s->slot,
                       n, row[n], p->num_pages);
    }
    if (p->flags & ATTN_ROTARY) {
        int64_t first = attn__rotary_pos(p, f, s), rows = s->appended;
        if (p->op == ATTN_FORWARD && s->sq > 0) {
            int32_t q_rows = attn__rotary_q_step(p) ? s->sq : 1;
            rows = rows > q_rows ? rows : q_rows;
        }
        INVALID_IF(first < 0 || first + rows > p->rotary_len, "%s[%d]=%lld: rows to position %lld, and rotary_len=%d",
                   p->flags & ATTN_ROTARY_POS ? "rotary_pos" : "used_kv", s->b, (long long)first,
                   (long long)(first + rows - 1), p->rotary_len);
    }
    return ATTN_OK;
}

static attn_status check_values(const attn_problem *p, const attn_buffers *f) {
    if (p->batch == 0) return ATTN_OK;
    if (p->flags & ATTN_VARLEN_Q) RETURN_IF_ERROR(check_offsets("cu_q", f->cu_q, p->batch, p->total_q, p->max_q, "max_q"));
    if (p->flags & ATTN_VARLEN_KV)
        RETURN_IF_ERROR(check_offsets("cu_kv", f->cu_kv, p->batch, p->total_kv, p->max_kv, "max_kv"));
    if (p->flags & ATTN_VARLEN_NEW)
        RETURN_IF_ERROR(check_offsets("cu_new", f->cu_new, p->batch, p->total_new, p->max_new, "max_new"));
    for (int32_t b = 0; b < p->batch; b++) {
        RETURN_IF_ERROR(check_lengths(p, f, b));
        attn_seq s = attn__seq(p, f, b);
        RETURN_IF_ERROR(check_places(p, f, &s));
    }
    return ATTN_OK;
}

/* ---- the whole ---- */

attn_status attn__buffers_load(attn_buffers *loaded, const attn_buffers *buffers) {
    INVALID_IF(!buffers, "buffers=NULL: want an attn_buffers");
    return attn__struct_load(loaded, buffers, sizeof *loaded, ATTN_BUFFERS_FIRST_SIZE, "attn_buffers");
}

attn_status attn__lengths_check(attn_buffers *f, const attn_plan *plan, const attn_buffers *buffers) {
    INVALID_IF(!plan, "plan=NULL: make one with attn_plan_create");
    RETURN_IF_ERROR(attn__buffers_load(f, buffers));
    RETURN_IF_ERROR(check_arrays(&plan->problem, f));
    return plan->backend->host ? check_values(&plan->problem, f) : ATTN_OK;
}

attn_status attn__buffers_check(attn_buffers *f, const attn_plan *plan, const attn_buffers *buffers) {
    RETURN_IF_ERROR(attn__lengths_check(f, plan, buffers));
    const attn_problem *p = &plan->problem;
    RETURN_IF_ERROR(check_kv(p, f));
    RETURN_IF_ERROR(check_append(p, f));
    if (p->op != ATTN_KV_APPEND) {
        RETURN_IF_ERROR(check_q(p, f));
        RETURN_IF_ERROR(check_matrices(p, f));
    }
    if (plan->workspace) {
        INVALID_IF(!f->workspace, "workspace=NULL: want %zu bytes (attn_plan_workspace)", plan->workspace);
        INVALID_IF(!is_aligned(f->workspace, 64), "workspace=%p: want it aligned to 64 bytes", f->workspace);
        INVALID_IF(f->workspace_size < plan->workspace, "workspace_size=%zu: want %zu bytes (attn_plan_workspace)",
                   f->workspace_size, plan->workspace);
    }
    return ATTN_OK;
}
