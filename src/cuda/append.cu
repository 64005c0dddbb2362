/*
 * New keys and values go into the cache, rotated and converted where asked: what attn__host_append (host.c) does, to the bit.
 * One warp has one row of one KV head. This moves bytes and is not hot beside attention; rows that do not change are copied
 * in pieces as large as their addresses allow, the others number by number.
 */
#include "rotate.cuh"

DEVICE void copy_row(char *to, const char *from, int32_t bytes) {
    uint64_t together = (uint64_t)to | (uint64_t)from | (uint64_t)bytes;
    if (together % 16 == 0) {
        for (int32_t n = lane_index(); n < bytes / 16; n += 32) ((uint4 *)to)[n] = ((const uint4 *)from)[n];
    } else if (together % 4 == 0) {
        for (int32_t n = lane_index(); n < bytes / 4; n += 32) ((uint32_t *)to)[n] = ((const uint32_t *)from)[n];
    } else {
        for (int32_t n = lane_index(); n < bytes; n += 32) to[n] = from[n];
    }
}

DEVICE void append_row(const attn_cuda_args &a, const attn_seq &s, int32_t row, int32_t h, bool is_key) {
    const attn_problem &p = a.p;
    const attn_tensor &from = is_key ? a.f.k_new : a.f.v_new, &to = is_key ? a.f.k : a.f.v;
    int32_t dim = is_key ? p.dim_qk : p.dim_v;
    int64_t source = attn__new_offset(&p, &from, &s, row, h), target = cache_offset(a, to, s, s.used + row, h);
    attn_rotation r;
    bool rotated = is_key && (p.flags & ATTN_ROTARY) && rotation_at(a, s, row, &r);
    if (p.dtype == p.kv_dtype && !rotated) {
        int64_t size = attn__dtype_bytes(p.dtype);
        copy_row((char *)to.data + target * size, (const char *)from.data + source * size, (int32_t)(dim * size));
        return;
    }
    double descale = p.dtype == p.kv_dtype ? 1.0 : attn__descale(&a.f, is_key ? a.f.k_descale : a.f.v_descale, s.b, h);
    rotate_row(rotated ? &r : NULL, make_row(p.kv_dtype, to.data, target), make_row(p.dtype, from.data, source), dim,
               descale);
}

/* Warps: [batch][max_new][heads_kv]. */
KERNEL append(const __grid_constant__ attn_cuda_args a) {
    int64_t n = warp_index();
    if (n >= (int64_t)a.p.batch * a.p.max_new * a.p.heads_kv) return;
    int32_t h = (int32_t)(n % a.p.heads_kv), row = (int32_t)(n / a.p.heads_kv % a.p.max_new);
    attn_seq s = sequence(a, (int32_t)(n / a.p.heads_kv / a.p.max_new));
    if (row >= s.appended) return;
    append_row(a, s, row, h, true);
    append_row(a, s, row, h, false);
}
