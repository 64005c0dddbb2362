/*
 * What device code shares: the lengths of a sequence, checked on the spot, where its keys are, and where in the workspace its
 * partial results and ranges are.
 *
 * Lengths, slots and page numbers live in device memory, so the host cannot check them before a run. The device does: a value out
 * of range is brought into range, and the status word says which array held it and for which sequence.
 */
#ifndef ATTN_DEVICE_CUH
#define ATTN_DEVICE_CUH

#include "args.h"
#include "flaw.h"
#include "numeric.h"
#include "philox.h"
#include "schedule.h"

#define DEVICE static __device__ __forceinline__
#define KERNEL extern "C" __global__ void

DEVICE int32_t lane_index(void) { return (int32_t)(threadIdx.x % 32); }

/* The number of this block, counted over the whole grid. */
DEVICE int64_t block_index(void) { return blockIdx.x + (int64_t)blockIdx.y * gridDim.x; }

/* The last one to report stays; which one that is does not matter. */
DEVICE void report_to(uint64_t *status, int flaw, int32_t b) {
    *(volatile uint64_t *)status = (uint64_t)flaw << 32 | (uint32_t)b;
}
DEVICE void report(const attn_cuda_args &a, int flaw, int32_t b) { report_to(a.status, flaw, b); }

DEVICE int32_t clamped(const attn_cuda_args &a, int64_t x, int64_t least, int64_t most, int flaw, int32_t b) {
    if (x >= least && x <= most) return (int32_t)x;
    report(a, flaw, b);
    return (int32_t)(x < least ? least : most);
}

/* Rows of sequence b in a packed tensor: the first, and how many in *rows. */
DEVICE int32_t packed_rows(const attn_cuda_args &a, const int32_t *cu, int64_t total, int32_t most, int flaw, int32_t b,
                           int32_t *rows) {
    int32_t start = clamped(a, cu[b], 0, total, flaw, b);
    int64_t room = total - start;
    *rows = clamped(a, (int64_t)cu[b + 1] - start, 0, room < most ? room : most, flaw, b);
    return start;
}

/* Was there nothing to bring into range? */
DEVICE bool are_packed(const int32_t *cu, int64_t total, int32_t most, int32_t b) {
    const int64_t start = cu[b], end = cu[b + 1];
    return start >= 0 && end >= start && end <= total && end - start <= most;
}

/* As attn__seq (schedule.h), with every value in range. */
DEVICE attn_seq sequence(const attn_cuda_args &a, int32_t b) {
    const attn_problem &p = a.p;
    const attn_buffers &f = a.f;
    attn_seq s;
    s.b = b;
    s.slot = p.flags & ATTN_BATCH_INDEX ? clamped(a, f.batch_index[b], 0, p.cache_batch - 1, ATTN_FLAW_BATCH_INDEX, b) : b;
    int32_t rows = p.max_q, capacity = p.max_kv;
    s.q_row = p.flags & ATTN_VARLEN_Q ? packed_rows(a, f.cu_q, p.total_q, p.max_q, ATTN_FLAW_CU_Q, b, &rows) : 0;
    s.sq = p.flags & ATTN_USED_Q ? clamped(a, f.used_q[b], 0, rows, ATTN_FLAW_USED_Q, b) : rows;
    s.kv_row = p.flags & ATTN_VARLEN_KV ? packed_rows(a, f.cu_kv, p.total_kv, p.max_kv, ATTN_FLAW_CU_KV, b, &capacity) : 0;
    s.used = p.flags & ATTN_USED_KV ? clamped(a, f.used_kv[b], 0, capacity, ATTN_FLAW_USED_KV, b) : capacity;
    s.new_row = 0;
    s.appended = 0;
    if (p.flags & ATTN_APPEND) {
        s.appended = p.max_new;
        if (p.flags & ATTN_VARLEN_NEW)
            s.new_row = packed_rows(a, f.cu_new, p.total_new, p.max_new, ATTN_FLAW_CU_NEW, b, &s.appended);
        s.appended = clamped(a, s.appended, 0, capacity - s.used, ATTN_FLAW_USED_KV, b);
    }
    s.leftpad = p.flags & ATTN_LEFTPAD ? clamped(a, f.leftpad[b], 0, s.used, ATTN_FLAW_LEFTPAD, b) : 0;
    s.sk = s.used + s.appended - s.leftpad;
    return s;
}

/*
 * The sequence that a row of a packed tensor can belong to, the last one that starts at or before it: those that start at the same
 * row are empty. -1: there is none.
 */
DEVICE int32_t sequence_from(const int32_t *cu, int32_t batch, int64_t row) {
    int32_t low = 0, high = batch; /* sequences below `low` start at or before the row, from `high` on after it */
    while (low < high) {
        int32_t middle = low + (high - low) / 2;
        if (cu[middle] <= row)
            low = middle + 1;
        else
            high = middle;
    }
    return low - 1;
}

/* The page of cache position `at`, as it stands in the table; a number out of range counts as 0, or the last one. */
DEVICE int32_t page_in_table(const attn_cuda_args &a, const attn_seq &s, int32_t at) {
    return a.f.page_table[s.slot * attn__pages_per_slot(&a.p, &a.f) + (int32_t)attn__divide((uint32_t)at, a.by_page)];
}
DEVICE int32_t checked_page(const attn_cuda_args &a, const attn_seq &s, int32_t page) {
    return clamped(a, page, 0, a.p.num_pages - 1, ATTN_FLAW_PAGE_TABLE, s.b);
}
DEVICE int32_t page_of(const attn_cuda_args &a, const attn_seq &s, int32_t at) {
    return checked_page(a, s, page_in_table(a, s, at));
}

/* Element offset of cache position `at` in k or v, as attn__kv_offset. */
DEVICE int64_t cache_offset(const attn_cuda_args &a, const attn_tensor &t, const attn_seq &s, int32_t at, int32_t head) {
    if (!a.p.page_size) return attn__kv_offset(&a.p, &a.f, &t, &s, at, head);
    return page_of(a, s, at) * t.stride[0] + at % a.p.page_size * t.stride[1] + head * t.stride[2];
}

/* As attn__page_descale. */
DEVICE double page_descale(const attn_cuda_args &a, const float *descale, const attn_seq &s, int32_t at, int32_t head) {
    return a.p.flags & ATTN_DESCALE_PAGES ? attn__descale(&a.f, descale, page_of(a, s, at), head) : 1.0;
}

/* Is the sequence split in chunks of keys? */
DEVICE bool is_split(const attn_cuda_args &a, const attn_seq &s) { return a.chunks > 0 && s.sq <= ATTN_CUDA_SPLIT_ROWS; }

/*
 * Index of row i, head h, chunk c in part_lse; times dim_v in part_o. Of packed sequences both the packed row and part_rows for
 * each sequence before leave room for all that come before, so the smaller of the two does, and neither bound is passed.
 */
DEVICE int64_t part_index(const attn_cuda_args &a, const attn_seq &s, int32_t i, int32_t h, int32_t c) {
    int64_t packed = a.p.flags & ATTN_VARLEN_Q ? s.q_row : INT64_MAX, first = (int64_t)s.b * a.part_rows;
    return ((packed < first ? packed : first) * a.p.heads_q + (int64_t)h * s.sq + i) * a.chunks + c;
}

/* d_q in float of head h, from row i on, the first one of a tile (attn__d_q_rows). */
DEVICE float *d_q_sums(const attn_cuda_args &a, const attn_seq &s, int32_t i, int32_t h) {
    const int64_t first = attn__d_q_first(&a.p, s.b, s.q_row) * a.p.heads_q + h * attn__d_q_rows(s.sq);
    return (float *)a.part_o + (first + i) * attn__d_q_columns(&a.p);
}

/* FlashMask: the range that `ranges` made for tile n of keys; there must be ranges. */
DEVICE const attn_flash_range *flash_range(const attn_cuda_args &a, int32_t b, int32_t kv_head, int32_t n) {
    int32_t head = a.p.flashmask_heads == 1 ? 0 : kv_head;
    return a.ranges + ((int64_t)b * a.p.flashmask_heads + head) * a.range_tiles + n;
}

#endif
