/*
 * A new key and value go into the cache, rotated and converted where asked: what attn__host_append (host.c) does, to the bit. One warp has
 * one row of one KV head. Rows that do not change are copied 16 bytes at a time where their addresses allow it, byte by byte elsewhere; those that
 * do, number by number.
 */
#ifndef ATTN_APPEND_CUH
#define ATTN_APPEND_CUH

#include "rotate.cuh"

/* Every so many-th lane's part of a row. */
DEVICE void copy_row(char *to, const char *from, int32_t bytes, int32_t lane, int32_t lanes) {
    if (((uint64_t)to | (uint64_t)from | (uint64_t)bytes) % 16 == 0) {
        for (int32_t n = lane; n < bytes / 16; n += lanes) ((uint4 *)to)[n] = ((const uint4 *)from)[n];
    } else {
        for (int32_t n = lane; n < bytes; n += lanes) to[n] = from[n];
    }
}

/* Has new row `row` a place of its own? What a number out of range is brought to may be somebody else's. */
DEVICE bool has_place(const attn_cuda_args &a, const attn_seq &s, int32_t row) {
    const attn_problem &p = a.p;
    if ((p.flags & ATTN_BATCH_INDEX) && a.f.batch_index[s.b] != s.slot) return false;
    if ((p.flags & ATTN_USED_KV) && a.f.used_kv[s.b] != s.used) return false;
    if ((p.flags & ATTN_VARLEN_KV) && !are_packed(a.f.cu_kv, p.total_kv, p.max_kv, s.b)) return false;
    if ((p.flags & ATTN_VARLEN_NEW) && !are_packed(a.f.cu_new, p.total_new, p.max_new, s.b)) return false;
    if (!p.page_size) return true;
    const int32_t page = page_in_table(a, s, s.used + row);
    return page == checked_page(a, s, page);
}

/* Key or value `row` of those that are new to the sequence. */
DEVICE void append_one(const attn_cuda_args &a, const attn_seq &s, int32_t row, int32_t h, bool is_key) {
    const attn_problem &p = a.p;
    const attn_tensor &from = is_key ? a.f.k_new : a.f.v_new, &to = is_key ? a.f.k : a.f.v;
    int32_t dim = is_key ? p.dim_qk : p.dim_v;
    int64_t source = attn__new_offset(&p, &from, &s, row, h), target = cache_offset(a, to, s, s.used + row, h);
    attn_rotation r;
    bool rotated = is_key && (p.flags & ATTN_ROTARY) && rotation_at(a, s, row, &r);
    if (p.dtype == p.kv_dtype && !rotated) {
        int64_t size = attn__dtype_bytes(p.dtype);
        copy_row((char *)to.data + target * size, (const char *)from.data + source * size, (int32_t)(dim * size),
                 lane_index(), 32);
        return;
    }
    const float *factors = is_key ? a.f.k_descale : a.f.v_descale;
    double descale = p.dtype == p.kv_dtype
                         ? 1.0
                         : attn__kv_descale(&p, &a.f, factors, s.b, h) * page_descale(a, factors, s, s.used + row, h);
    rotate_row(rotated ? &r : NULL, make_row(p.kv_dtype, to.data, target), make_row(p.dtype, from.data, source), dim,
               descale);
}

DEVICE void append_row(const attn_cuda_args &a, const attn_seq &s, int32_t row, int32_t h) {
    if (!has_place(a, s, row)) return;
#pragma unroll 1
    for (int is_key = 1; is_key >= 0; is_key--) append_one(a, s, row, h, is_key);
}

#endif
