/*
 * Backward attention with mma.sync, for every NVIDIA GPU since Ampere. One line of variants.def is one build of this file; a line of
 * side KEYS makes d_k and d_v, one of side ROWS d_q. Both are the same walk, with rows and keys in each other's place:
 *
 *     a block keeps OWN keys (rows) in shared memory, K and V (Q and d_o), and their sums in registers: d_k, d_v (d_q);
 *     it walks over tiles of the others, Q and d_o of the heads of its group (K and V). Per tile:
 *
 *     wait for it              barrier 1: it is there for all warps, and nobody reads the one before any more
 *     fetch the next one       into the other buffer; with stages = 1, when all are done with this one: barrier 2
 *     S = own . others         scores of SUB of the others: K Q^T (Q K^T)
 *     D = own . others         gradient of P: V d_o^T (d_o V^T)
 *     P = exp2(S - lse)        with softcap, ALiBi, bias where there are any; masked where the tile is partial
 *     d_s = P (D - delta)      times the softcap's derivative
 *     d_v += P d_o             P and d_s stay in registers: as the tensor cores leave a product, so they want their left operand
 *     d_k += d_s Q             (d_q += d_s K)
 *
 * Wide heads have no room for both sums: blocks then make either d_k or d_v (SPLIT). A partial tile has one more barrier
 * (holds_nonfinite). Every sum has one owner, and the order of tiles is fixed: the same bits every time.
 */
#include "bwd.cuh"

/* ---- products ---- */

/* Where the right operand of the product below begins, the rows of a tile from `first` on. */
DEVICE uint32_t rows_from(uint32_t others, int first) {
    const int lane = threadIdx.x & 31;
    return shared_at(others, first + (lane & 15), lane >> 4);
}

/* sums += w . others, with SUB rows of a tensor so many bytes behind `right`. */
DEVICE void add_product(float sums[MT][DT][4], const float w[MT][NT][4], uint32_t right, int bytes) {
#pragma unroll
    for (int step = 0; step < NT / 2; step++) {
        uint32_t x[MT][4], y[4];
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
#pragma unroll
            for (int part = 0; part < 2; part++) {
                const float *from = w[mt][2 * step + part];
                x[mt][2 * part] = pack(from[0], from[1]);
                x[mt][2 * part + 1] = pack(from[2], from[3]);
            }
#pragma unroll
        for (int n = 0; n < DIM / 16; n++) {
            ldmatrix_x4_trans(y, shared_step(right, n) + bytes + step * 16 * CHUNKS * 16);
#pragma unroll
            for (int mt = 0; mt < MT; mt++) multiply(sums[mt][2 * n], sums[mt][2 * n + 1], x[mt], y);
        }
    }
}

/* ---- a tile ---- */

/* Sums: d_k or d_q, or with SPLIT d_v; and d_v, TWO. factor: of the first. */
typedef struct totals {
    float one[MT][DT][4], two[MT][DT][4];
    float factor[MT][2];
} totals;

/* The others of a sub-tile are added to the sums; bad: some of them are not finite, and not everybody may see them. */
DEVICE void add_others(const place &at, totals &sum, float s[MT][NT][4], float d[MT][NT][4], uint32_t tile, int first,
                       bool bad) {
    const uint32_t one = tile + (SPLIT && !at.for_k ? (int)TILE_BYTES : 0), two = tile + TILE_BYTES;
    if (FITS && BY_KEYS) {
        EACH(mt, nt, e) s[mt][nt][e] *= P_FACTOR;
    }
    if (!SPLIT || at.for_k) {
        if (FITS) fit(d, sum.one, sum.factor);
        if (!TWO) EACH(mt, nt, e) s[mt][nt][e] = d[mt][nt][e];
    }
    float(*w)[NT][4] = TWO ? d : s;
    if (bad) {
        add_bad(sum.one, w, one, first);
        if (TWO) add_bad(sum.two, s, two, first);
        __syncthreads();
        clear_nonfinite(one, first);
        if (TWO) clear_nonfinite(two, first);
        __syncthreads();
    }
    const uint32_t right = (uint32_t)here((int)rows_from(tile, first));
    if (TWO) add_product(sum.two, s, right, TILE_BYTES);
    if (SPLIT)
        add_product(sum.one, w, right + (at.for_k ? 0 : (int)TILE_BYTES), 0);
    else
        add_product(sum.one, w, right, 0);
}

/* One tile of others. */
DEVICE void step(const attn_cuda_args &a, totals &sum, uint32_t base, uint32_t count, const stats (*own_stats)[2]) {
    const uint32_t stage = count % STAGES;
    const uint32_t tile = base + AT_TILES + stage * STAGE_BYTES, of_stats = base + AT_STATS + stage * STATS_BYTES;
    const note &w = note_of(base, count);
    const place &at = place_of(base);
    const bool partial = (BY_KEYS && clear_empty_rows(tile, of_stats)) || w.partial;
    const bool bad = partial && holds_nonfinite(tile);
#pragma unroll 1
    for (int first = 0; first < OTHERS; first += SUB) {
        float s[MT][NT][4], d[MT][NT][4];
        const uint32_t left = (uint32_t)here((int)left_of(base)), right = (uint32_t)here((int)right_of(tile, first));
        product(s, left, right, 0, 0);
        if (!SPLIT || at.for_k) {
            product(d, left, right, OWN_BYTES, TILE_BYTES);
        } else {
            EACH(mt, nt, e) d[mt][nt][e] = 0;
        }
        weigh(a, at, w.h, s, d, partial, w.n * OTHERS + first, of_stats + first * 8, own_stats);
        add_others(at, sum, s, d, tile, first, bad);
    }
}

/* ---- the walk ---- */

/* The note of the first tile from here on. The last warp. */
DEVICE void make_note(const attn_cuda_args &a, const place &at, walk w, note &to) {
    find_tile(a, at, w);
    __syncwarp();
    if (threadIdx.x % 32 == 0) write_note(a, at, w, to);
    __syncwarp();
}
DEVICE void make_next_note(const attn_cuda_args &a, uint32_t base, uint32_t count) {
    const note &last = note_of(base, count - 1);
    make_note(a, place_of(base), next_tile({last.h, last.n, false, last.done}), note_of(base, count));
}

DEVICE void walk_others(const attn_cuda_args &a, totals &sum, uint32_t base, const stats (*own_stats)[2]) {
    uint32_t count = 0;
    if (makes_notes()) {
        const place &at = place_of(base);
        make_note(a, at, {at.h, first_tile(at), false, false}, note_of(base, 0));
        make_next_note(a, base, 1);
    }
    __syncthreads();
    if (note_of(base, 0).done) return;
    load_own(a, place_of(base), base);
    fetch(a, base, 0);
#pragma unroll 1
    do {
        cp_async_wait_all();
        __syncthreads(); /* 1 */
        if (STAGES == 2) fetch(a, base, count + 1);
        if (makes_notes()) make_next_note(a, base, count + 2);
        step(a, sum, base, count, own_stats);
        if (STAGES == 1) __syncthreads(); /* 2 */
        if (STAGES == 1) fetch(a, base, count + 1);
        count++;
    } while (!note_of(base, count).done);
}

KERNEL __launch_bounds__(THREADS, CTAS) VARIANT(const __grid_constant__ attn_cuda_args a) {
    extern __shared__ __align__(128) uint8_t shared[];
    const uint32_t base = (uint32_t)here((int)cvta_shared(shared));
    {
        place found;
        if (!find_place(a, found)) return;
        find_others(a, found);
        if (threadIdx.x == 0) notes_of(base).at = found;
    }
    __syncthreads();
    const place &at = place_of(base);
    totals sum = {};
    stats own_stats[MT][2];
    bool empty[MT][2];
    float ones[MT][2];
#pragma unroll
    for (int r = 0; r < 2 * MT; r++) {
        ones[r / 2][r % 2] = 1;
        sum.factor[r / 2][r % 2] = first_factor();
        own_stats[r / 2][r % 2] = BY_KEYS ? stats{0, 0} : row_stats(a, at, at.h, own_at(at, r / 2, r % 2));
        empty[r / 2][r % 2] = own_stats[r / 2][r % 2].lse == -INFINITY;
        own_stats[r / 2][r % 2].lse = safe_lse(own_stats[r / 2][r % 2].lse);
    }
    walk_others(a, sum, base, own_stats);
    const float scale = (float)a.p.scale, keep = (float)(1 / (1 - a.p.dropout)) / P_FACTOR;
    if (!BY_KEYS) {
        store_sums(a, at, a.f.d_q, sum.one, a.p.dim_qk, scale, sum.factor, empty);
    } else if (TWO) {
        store_sums(a, at, a.f.d_k, sum.one, a.p.dim_qk, scale, sum.factor, empty);
        store_sums(a, at, a.f.d_v, sum.two, a.p.dim_v, keep, ones, empty);
    } else if (at.for_k) {
        store_sums(a, at, a.f.d_k, sum.one, a.p.dim_qk, scale, sum.factor, empty);
    } else {
        store_sums(a, at, a.f.d_v, sum.one, a.p.dim_v, keep, ones, empty);
    }
}
