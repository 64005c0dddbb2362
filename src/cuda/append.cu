/* New keys and values go into the cache, where decode.cu does not bring them there itself. */
#include "append.cuh"
#include "warp.cuh"

/* Warps: [batch][max_new][heads_kv]. */
KERNEL append(const __grid_constant__ attn_cuda_args a) {
    int64_t n = warp_index();
    if (n >= (int64_t)a.p.batch * a.p.max_new * a.p.heads_kv) return;
    int32_t h = (int32_t)(n % a.p.heads_kv), row = (int32_t)(n / a.p.heads_kv % a.p.max_new);
    attn_seq s = sequence(a, (int32_t)(n / a.p.heads_kv / a.p.max_new));
    if (row >= s.appended) return;
    append_row(a, s, row, h);
}
