/*
 * Rotary embedding: of q before attention, into the workspace, and attn_rotary. One warp has one row of one head. Positions come
 * from device memory: one that is outside of the tables is brought into them and reported.
 */
#include "rotate.cuh"
#include "warp.cuh"

/* Warps: [batch][max_q][heads_q]. The rotated q is dense and in the dtype of q. */
KERNEL rotate_q(const __grid_constant__ attn_cuda_args a) {
    const attn_problem &p = a.p;
    int64_t n = warp_index();
    if (n >= (int64_t)p.batch * p.max_q * p.heads_q) return;
    int32_t h = (int32_t)(n % p.heads_q), i = (int32_t)(n / p.heads_q % p.max_q);
    attn_seq s = sequence(a, (int32_t)(n / p.heads_q / p.max_q));
    if (i >= s.sq) return;
    attn_rotation r;
    bool rotated = rotation_at(a, s, i * attn__rotary_q_step(&p), &r);
    attn_tensor dense = a.other_q;
    rotate_row(rotated ? &r : NULL, make_row(p.dtype, dense.data, attn__q_offset(&p, &dense, &s, i, h)),
               make_row(p.dtype, a.f.q.data, attn__q_offset(&p, &a.f.q, &s, i, h)), p.dim_qk, 1.0);
}

/* Rows of sequence b: the first one in the packed tensor, and how many. */
DEVICE int32_t rotary_rows(const attn_cuda_rotary &c, int32_t b, int64_t *first) {
    const attn_rotary_args &r = c.r;
    *first = 0;
    if (!r.cu) return r.rows;
    int64_t start = r.cu[b], rows = (int64_t)r.cu[b + 1] - start;
    if (start < 0 || start > r.total || rows < 0 || rows > r.rows || start + rows > r.total) {
        report_to(c.status, ATTN_FLAW_CU, b);
        start = start < 0 ? 0 : start > r.total ? r.total : start;
        rows = r.cu[b + 1] - start;
        rows = rows > r.rows ? r.rows : rows;
        rows = rows > r.total - start ? r.total - start : rows;
    }
    *first = start;
    return (int32_t)rows; /* none, if it is negative */
}

/* Warps: [batch][rows][heads]. */
KERNEL rotary(const __grid_constant__ attn_cuda_rotary c) {
    const attn_rotary_args &r = c.r;
    int64_t n = warp_index(), first;
    if (n >= (int64_t)r.batch * r.rows * r.heads) return;
    int32_t h = (int32_t)(n % r.heads), row = (int32_t)(n / r.heads % r.rows), b = (int32_t)(n / r.heads / r.rows);
    if (row >= rotary_rows(c, b, &first)) return;
    int64_t pos = (r.pos ? r.pos[b] : 0) + (int64_t)row;
    if (pos < 0 || pos >= r.rotary_len) {
        report_to(c.status, ATTN_FLAW_POS, b);
        pos = pos < 0 ? 0 : r.rotary_len - 1;
    }
    attn_rotation turn;
    turn.dtype = r.dtype;
    turn.table_dtype = r.rotary_dtype;
    turn.cos = r.cos;
    turn.sin = r.sin;
    turn.table_row = pos * (r.rotary_dim / 2);
    turn.rotary_dim = r.rotary_dim;
    turn.interleaved = r.interleaved;
    turn.inverse = r.inverse;
    int64_t from = (r.cu ? 0 : b * r.x.stride[0]) + (first + row) * r.x.stride[1] + h * r.x.stride[2];
    int64_t to = (r.cu ? 0 : b * r.y.stride[0]) + (first + row) * r.y.stride[1] + h * r.y.stride[2];
    rotate_row(r.rotary_len ? &turn : NULL, make_row(r.dtype, r.y.data, to), make_row(r.dtype, r.x.data, from), r.dim, 1.0);
}
