/*
 * How the tensors of a run lie: whether their rows can be read in pieces of 16 bytes, and, for Hopper's kernels, as tensor maps,
 * with which the tensor memory accelerator fetches and stores whole tiles.
 *
 * A map is made by the driver from the start, the sizes and the strides of a tensor; it is no more than 128 bytes that the
 * kernel is given among its arguments, so nothing is kept or freed. What no map can be made of (rows that are not aligned,
 * negative strides, pages of no multiple of 8 rows, another dtype) is no error: all kernels but the plain ones read such tensors without.
 */
#include "cuda.h"

#include <string.h>

/* One of the four. */
typedef struct view {
    attn_tensor t;
    int64_t size[3]; /* batch (pages, or 1 when packed), rows, heads: as t.stride */
    int32_t dim;
    attn_dtype dtype;
} view;

enum { VIEW_Q, VIEW_K, VIEW_V, VIEW_O, VIEWS };

static void view_all(const attn_plan *plan, const attn_buffers *f, view views[VIEWS]) {
    const attn_problem *p = &plan->problem;
    bool packed_q = p->flags & ATTN_VARLEN_Q, packed = p->flags & ATTN_VARLEN_KV;
    int64_t batch_q = packed_q ? 1 : p->batch, rows_q = packed_q ? p->total_q : p->max_q;
    int64_t batch = p->page_size ? p->num_pages : packed ? 1 : p->cache_batch;
    int64_t rows = p->page_size ? p->page_size : packed ? p->total_kv : p->max_kv;
    attn_tensor q = p->flags & ATTN_ROTARY ? attn__cuda_rotated_q(plan, f) : f->q;
    views[VIEW_Q] = (view){q, {batch_q, rows_q, p->heads_q}, p->dim_qk, p->dtype};
    views[VIEW_K] = (view){f->k, {batch, rows, p->heads_kv}, p->dim_qk, p->kv_dtype};
    views[VIEW_V] = (view){f->v, {batch, rows, p->heads_kv}, p->dim_v, p->kv_dtype};
    views[VIEW_O] = (view){p->op == ATTN_BACKWARD ? f->d_o : f->o, {batch_q, rows_q, p->heads_q}, p->dim_v, p->out_dtype};
}

/* Do rows start at multiples of 16 bytes? A stride of a dim with one element is not used. */
static bool is_aligned(const view *v) {
    int64_t bytes = (int64_t)attn_dtype_size(v->dtype);
    bool aligned = (uintptr_t)v->t.data % 16 == 0;
    for (int n = 0; n < 3; n++) aligned = aligned && (v->size[n] <= 1 || v->t.stride[n] * bytes % 16 == 0);
    return aligned;
}

bool attn__cuda_aligned(const attn_plan *plan, const attn_buffers *f) {
    view views[VIEWS];
    bool aligned = true;
    view_all(plan, f, views);
    for (int n = 0; n < VIEWS; n++) aligned = aligned && is_aligned(&views[n]);
    return aligned;
}

bool attn__cuda_latent(const attn_plan *plan, const attn_buffers *f) {
    view views[VIEWS];
    view_all(plan, f, views);
    bool same = f->k.data == f->v.data;
    for (int n = 0; n < 3; n++) same = same && (views[VIEW_K].size[n] <= 1 || f->k.stride[n] == f->v.stride[n]);
    return same;
}

/* The map of a tensor, of boxes of so many rows and blocks of columns. False: it can have none. */
static bool make_map(const attn_driver *driver, const view *v, int32_t rows, int32_t blocks, attn_tensor_map *map) {
    enum { ROW = 1, HEAD = 2, BATCH = 0 }; /* in t.stride and size; a map counts from the innermost dim on */
    static const int order[3] = {ROW, HEAD, BATCH};
    static const int place[3] = {1, 3, 4}; /* in a map; between rows and heads it has blocks of columns */
    const unsigned box[5] = {ATTN_MAP_COLS, (unsigned)rows, (unsigned)blocks, 1, 1}, steps[5] = {1, 1, 1, 1, 1};
    const int64_t each = (int64_t)attn_dtype_size(v->dtype), most_stride = INT64_C(1) << 40;
    const int64_t row_bytes = attn__ceil_div(v->dim * each, 16) * 16;
    uint64_t dims[5], strides[4];
    memset(map, 0, sizeof *map);
    if (!is_aligned(v)) return false;
    dims[0] = (uint64_t)(blocks > 1 ? ATTN_MAP_COLS : v->dim);
    dims[2] = (uint64_t)(blocks > 1 ? v->dim / ATTN_MAP_COLS : 1);
    strides[1] = (uint64_t)(ATTN_MAP_COLS * each);
    for (int n = 0; n < 3; n++) {
        int64_t size = v->size[order[n]];
        int64_t bytes =
            size > 1 ? v->t.stride[order[n]] * each : row_bytes; /* an unused one may be anything: not for the driver */
        if (size < 1 || size > INT32_MAX || bytes < 0 || bytes >= most_stride) return false;
        dims[place[n]] = (uint64_t)size;
        strides[place[n] - 1] = (uint64_t)bytes;
    }
    int type = v->dtype == ATTN_F16 ? ATTN_CU_MAP_F16 : ATTN_CU_MAP_BF16;
    return driver->cuTensorMapEncodeTiled(map, type, 5, v->t.data, dims, strides, box, steps, ATTN_CU_MAP_PLAIN,
                                          ATTN_CU_MAP_SWIZZLE_128, ATTN_CU_MAP_L2_128,
                                          ATTN_CU_MAP_FILL_ZERO) == ATTN_CU_SUCCESS;
}

/* What divides both a tile and a page; pages are of consecutive rows, tiles of consecutive boxes. */
static int32_t rows_of_box(int32_t bn, int32_t page_size) {
    int32_t a = bn, b = page_size;
    while (b) {
        int32_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

/* Blocks of columns that a request brings: all of a tile's, if both the tensor and the box of rows are whole; otherwise one. */
static int32_t blocks_of(const view *v, int32_t dims, bool whole_rows) {
    return whole_rows && v->dim % ATTN_MAP_COLS == 0 ? (int32_t)ATTN_MAP_BLOCKS(dims) : 1;
}

void attn__cuda_map(attn_cuda_run *run, const attn_plan *plan, const attn_buffers *f) {
    const attn_cuda_entry *e = &run->entries[run->forward];
    view views[VIEWS];
    run->tma = run->whole = 0;
    if (!e->hopper || e->decode) return;
    view_all(plan, f, views);
    bool may_q = views[VIEW_Q].dtype == e->dtype, may_o = views[VIEW_O].dtype == e->dtype;
    run->box = rows_of_box(e->op == ATTN_BACKWARD ? e->bn / e->blocks : e->bn, plan->problem.page_size);
    bool may_kv = views[VIEW_K].dtype == e->dtype && run->box % 8 == 0; /* the swizzle repeats every 8 rows */
    const bool may_whole = e->op == ATTN_FORWARD && e->takes != ATTN_TAKES_PLAIN,
               whole_box = may_whole && run->box == e->bn;
    const int32_t blocks_q = blocks_of(&views[VIEW_Q], e->dim_qk, may_whole);
    const int32_t blocks_k = blocks_of(&views[VIEW_K], e->dim_qk, whole_box);
    const int32_t blocks_v = blocks_of(&views[VIEW_V], e->dim_v, whole_box);
    run->whole = (blocks_q > 1) * ATTN_WHOLE_Q | (blocks_k > 1) * ATTN_WHOLE_K | (blocks_v > 1) * ATTN_WHOLE_V;
    if (may_q && make_map(run->driver, &views[VIEW_Q], e->bm, blocks_q, &run->map_q)) run->tma |= ATTN_TMA_Q;
    if (may_kv && make_map(run->driver, &views[VIEW_K], run->box, blocks_k, &run->map_k) &&
        make_map(run->driver, &views[VIEW_V], run->box, blocks_v, &run->map_v))
        run->tma |= ATTN_TMA_KV;
    const int32_t rows_o = e->op == ATTN_BACKWARD ? e->bm : (int32_t)ATTN_MAP_O_ROWS; /* d_o is read as q is */
    if (may_o && make_map(run->driver, &views[VIEW_O], rows_o, 1, &run->map_o)) run->tma |= ATTN_TMA_O;
}
