/*
 * The loader and its hands: how Q, K and V come into shared memory. fwd_sm90.cu says who they are and includes this.
 */
#ifndef ATTN_LOADER_CUH
#define ATTN_LOADER_CUH

/* ---- the loader, one warp ---- */

/* Tiles top, top - 1, ... top - 31 of a place: which are wanted, which have a mask. Bit 0 is top. */
typedef struct outlook {
    int32_t top;
    uint32_t wanted, partial;
} outlook;

DEVICE outlook look(const attn_cuda_args &a, const tile_place &at, int32_t top) {
    const int32_t n = top - (int32_t)(threadIdx.x & 31);
    int kind = ATTN_TILE_SKIP;
    if (n >= at.n_first) {
        kind = n * BN < at.all_from || n * BN + BN > at.all_to ? ATTN_TILE_PARTIAL : ATTN_TILE_FULL;
        if (ALL && a.ranges) {
            int by_range = attn__mask_tile(&at.mask, at.row, at.row + at.rows, n * BN, n * BN + BN, range_of(a, at, n));
            if (by_range == ATTN_TILE_SKIP || kind == ATTN_TILE_FULL) kind = by_range;
        }
    }
    return {top, __ballot_sync(~0u, kind != ATTN_TILE_SKIP), __ballot_sync(~0u, kind == ATTN_TILE_PARTIAL)};
}

/*
 * The next tile; n is -1 when there is none. Without FlashMask all are wanted, one after the other, and whether they have a mask only
 * matters to the loader when it has to be careful.
 */
DEVICE tile next_tile_of(const attn_cuda_args &a, const tile_place &at, outlook &o, int32_t n_first, bool careful) {
    tile t = {-1, false, false};
    if (ALL && a.ranges) {
        while (!o.wanted && o.top - 32 >= n_first) o = look(a, at, o.top - 32);
        if (o.wanted) {
            const int bit = __ffs(o.wanted) - 1;
            t.n = o.top - bit;
            t.partial = o.partial >> bit & 1;
            o.wanted &= o.wanted - 1;
        }
    } else if (o.top >= n_first) {
        t.n = o.top--;
        t.partial = careful && (t.n * BN < at.all_from || t.n * BN + BN > at.all_to);
    }
    return t;
}

/* A box of rows, in all blocks of columns of a tile that has so many rows; by one request, if it is whole. */
DEVICE void fetch_box(const attn_tensor_map *map, bool whole, uint32_t to, uint32_t full, int blocks, int rows,
                      int32_t column, int32_t row, int32_t head, int32_t batch) {
    if (WHOLE && blocks > 1 && whole) {
        cp_async_bulk_tensor_5d_load(to, map, full, 0, row, column / ATTN_MAP_COLS, head, batch);
        return;
    }
#pragma unroll
    for (int c = 0; c < blocks; c++)
        cp_async_bulk_tensor_5d_load(to + c * rows * ROW, map, full, column + c * ATTN_MAP_COLS, row, 0, head, batch);
}

typedef struct loader {
    ring q, k, v, errands;
    uint32_t tile; /* number of the next K */
} loader;

/* The bytes come by copies: the thread arrives for all hands. */
DEVICE void expect(uint32_t full, int bytes) {
    mbarrier_arrive_expect_tx(full, bytes);
    mbarrier_arrive_count(full, HANDS - 1);
}

/* Writes an errand; it is handed over by the barrier that is returned. n: tile of keys. */
DEVICE uint32_t new_errand(const buffers &b, loader &me, const stroll &s, const tile_place &at, int what, int clean,
                           int32_t n, uint32_t to, uint32_t full, uint32_t empty, uint32_t parity) {
    const uint32_t place = me.errands.at;
    errand &e = b.notes->errands[place];
    mbarrier_wait_parity(BARRIER(b, errand_empty, place), me.errands.parity ^ 1);
    e.what = what;
    e.clean = clean;
    e.to = to;
    e.full = full;
    e.number = s.number;
    e.empty = empty;
    e.parity = parity;
    e.q = what == ERRAND_Q ? me.q : turned_back(me.q, QBUF);
    if (OWN && what != ERRAND_END) {
        e.row = what == ERRAND_Q ? at.row : at.s.leftpad + n * BN;
        e.left = what == ERRAND_Q ? at.rows : at.s.sk - n * BN;
        e.head = what == ERRAND_Q ? at.h : at.kv_head;
        e.column = what == ERRAND_V ? at.dv0 : 0;
        e.s = at.s;
    }
    turn_ring(me.errands, ERRANDS);
    return BARRIER(b, errand_full, place);
}

/* One thread. */
DEVICE void load_q(const attn_cuda_args90 &x, const buffers &b, loader &me, const stroll &s, const tile_place &at,
                   bool is_seen) {
    const attn_cuda_args &a = x.a;
    const uint32_t to = b.q + me.q.at * Q_BYTES, full = BARRIER(b, q_full, me.q.at), empty = BARRIER(b, q_empty, me.q.at);
    const bool packed = a.p.flags & ATTN_VARLEN_Q;
    mbarrier_wait_parity(empty, me.q.parity ^ 1);
    b.notes->is_seen[me.q.at] = is_seen;
    if (OWN && !(a.tma & ATTN_TMA_Q)) {
        mbarrier_arrive(new_errand(b, me, s, at, ERRAND_Q, CLEAN_NOTHING, 0, to, full, empty, me.q.parity ^ 1));
        return;
    }
    expect(full, Q_BYTES);
    fetch_box(&x.q, x.whole & ATTN_WHOLE_Q, to, full, QK_BLOCKS, BM, 0, (int)(packed ? at.s.q_row : 0) + at.row, at.h,
              packed ? 0 : at.s.b);
}

/* Where K and V of a place lie: what is read for every tile, which in shared memory would take long. */
typedef struct source {
    int32_t row, batch;   /* of key 0; with pages its position and its slot */
    int32_t head, column; /* of K and V, of V */
    int32_t keys;
    uint32_t key, offset; /* of the lane's box, in a tile: its first key; bytes */
    bool has_box;         /* the lane has one */
    bool gathers;         /* the accelerator does not know the way */
} source;
DEVICE source source_of(const attn_cuda_args &a, const tile_place &at) {
    const bool packed = a.p.flags & ATTN_VARLEN_KV;
    source from;
    from.row = at.s.leftpad + (packed ? (int32_t)at.s.kv_row : 0);
    from.batch = packed ? 0 : at.s.slot;
    from.head = at.kv_head;
    from.column = SLICED ? at.dv0 : 0;
    from.keys = at.s.sk;
    from.key = OWN ? (threadIdx.x & 31) * a.box : 0;
    from.offset = from.key * ROW;
    from.has_box = (int32_t)(threadIdx.x & 31) < (OWN ? BN / a.box : 1);
    from.gathers = OWN && (!(a.tma & ATTN_TMA_KV) || (a.p.page_size && at.s.leftpad % a.box));
    return from;
}

/* The page of the lane's box, as it stands in the table; asked for a tile ahead. One that is not there, and so zero, if the sequence ends before. */
DEVICE int32_t page_of_box(const attn_cuda_args &a, const tile_place &at, const source &from, int32_t n) {
    if (!OWN || !a.p.page_size || n < 0) return 0;
    const int32_t key = n * BN + (int32_t)from.key;
    return from.has_box && key < from.keys ? page_in_table(a, at.s, from.row + key) : a.p.num_pages;
}

/* Where that box lies. */
typedef struct box {
    int32_t row, batch;
} box;
DEVICE box find_box(const attn_cuda_args &a, const tile_place &at, const source &from, int32_t n, int32_t page) {
    const int32_t key = n * BN + (int32_t)from.key, row = from.row + key;
    if (!OWN || !a.p.page_size) return {row, from.batch};
    return {row - (int32_t)attn__divide((uint32_t)row, a.by_page) * a.p.page_size,
            from.has_box && key < from.keys ? checked_page(a, at.s, page) : page};
}

/* The whole warp: a lane for each box. */
DEVICE void fetch_boxes(const source &from, const attn_tensor_map *map, bool whole, uint32_t to, uint32_t full, int blocks,
                        int32_t column, box at) {
    if (from.has_box) fetch_box(map, whole, to + from.offset, full, blocks, BN, column, at.row, from.head, at.batch);
}

/*
 * How soon a buffer is filled again after it became empty decides how fast the kernel is (sixty instructions more once cost a tenth). So all that
 * can be known before is worked out before the wait, and bytes are expected when they have been sent for: they may even arrive before that,
 * the phase is not complete without the arrivals.
 */
DEVICE void load_k(const attn_cuda_args90 &x, const buffers &b, loader &me, const tile_place &at, const source &from,
                   const stroll &s, tile t, int32_t page) {
    const uint32_t to = b.k + me.k.at * K_BYTES, full = BARRIER(b, k_full, me.k.at), empty = BARRIER(b, k_empty, me.k.at);
    const bool first = (threadIdx.x & 31) == 0;
    const box place = find_box(x.a, at, from, t.n, page);
    mbarrier_wait_parity(empty, me.k.parity ^ 1);
    if (!from.gathers) fetch_boxes(from, &x.k, x.whole & ATTN_WHOLE_K, to, full, QK_BLOCKS, 0, place);
    if (ALL && first) b.notes->tiles[me.tile % TILES] = tile_word(t);
    if (!from.gathers) {
        if (first) expect(full, K_BYTES);
    } else if (first) {
        mbarrier_arrive(new_errand(b, me, s, at, ERRAND_K, CLEAN_NOTHING, t.n, to, full, empty, me.k.parity ^ 1));
    }
    turn_ring(me.k, STAGES);
    me.tile++;
}

DEVICE void load_v(const attn_cuda_args90 &x, const buffers &b, loader &me, const tile_place &at, const source &from,
                   const stroll &s, tile t, int32_t page) {
    const uint32_t to = b.v + me.v.at * V_BYTES, empty = BARRIER(b, v_empty, me.v.at), parity = me.v.parity ^ 1;
    const bool first = (threadIdx.x & 31) == 0,
               ends = OWN && t.n * BN + BN > from.keys; /* what comes then may be anything */
    const int clean = s.careful && t.partial ? CLEAN_ALL : ends ? CLEAN_END : CLEAN_NOTHING;
    const box place = find_box(x.a, at, from, t.n, page);
    const uint32_t full = BARRIER(b, v_full, me.v.at);
    mbarrier_wait_parity(empty, parity);
    if (!from.gathers && !clean) {
        fetch_boxes(from, &x.v, x.whole & ATTN_WHOLE_V, to, full, V_BLOCKS, from.column, place);
        if (first) expect(full, V_BYTES);
    } else {
        uint32_t handed = 0;
        if (first) {
            handed = new_errand(b, me, s, at, from.gathers ? ERRAND_V : ERRAND_CLEAN, clean, t.n, to, full, empty, parity);
            if (from.gathers)
                mbarrier_arrive(handed);
            else
                mbarrier_arrive_expect_tx(handed, V_BYTES);
        }
        handed = __shfl_sync(~0u, handed, 0);
        if (!from.gathers) fetch_boxes(from, &x.v, x.whole & ATTN_WHOLE_V, to, handed, V_BLOCKS, from.column, place);
    }
    turn_ring(me.v, STAGES);
}

/* One thread: the next buffers of K and V are for O. */
DEVICE void lend(const buffers &b, const loader &me) {
    mbarrier_wait_parity(BARRIER(b, k_empty, me.k.at), me.k.parity ^ 1);
    mbarrier_wait_parity(BARRIER(b, v_empty, me.v.at), me.v.parity ^ 1);
    mbarrier_arrive_count(BARRIER(b, k_full, me.k.at), HANDS);
    mbarrier_arrive_count(BARRIER(b, v_full, me.v.at), HANDS);
}

/*
 * The whole warp. Buffers become empty in the order K(n), V(n + 1), K(n - 1), V(n), and where AHEAD is set they are filled so: K of a
 * tile before V of the one that comes before it.
 */
DEVICE void load_place(const attn_cuda_args90 &x, const buffers &b, loader &me, const stroll &s, const tile_place &at) {
    const attn_cuda_args &a = x.a;
    const bool first = (threadIdx.x & 31) == 0;
    const source from = source_of(a, at);
    const int32_t n_first = at.n_first;
    outlook o = {at.n_last, 0, 0};
    if (ALL && a.ranges) o = look(a, at, at.n_last);
    tile t = next_tile_of(a, at, o, n_first, s.careful), before = {-1, false, false};
    if (first) load_q(x, b, me, s, at, t.n >= 0);
    turn_ring(me.q, QBUF);
    int32_t page = page_of_box(a, at, from, t.n), page_before = 0;
    while (t.n >= 0) {
        const tile next = next_tile_of(a, at, o, n_first, s.careful);
        const int32_t next_page = page_of_box(a, at, from, next.n);
        t.last = next.n < 0;
        load_k(x, b, me, at, from, s, t, page);
        if (!AHEAD) load_v(x, b, me, at, from, s, t, page);
        if (AHEAD && before.n >= 0) load_v(x, b, me, at, from, s, before, page_before);
        before = t;
        page_before = page;
        t = next;
        page = next_page;
    }
    if (AHEAD && before.n >= 0) load_v(x, b, me, at, from, s, before, page_before);
    if (LENDS) {
        if (first) lend(b, me);
        turn_ring(me.k, STAGES);
        turn_ring(me.v, STAGES);
    }
    __syncwarp();
}

DEVICE void load(const attn_cuda_args90 &x, const buffers &b) {
    const attn_cuda_args &a = x.a;
    const bool first = (threadIdx.x & 31) == 0;
    stroll s = start_stroll(a);
    tile_place own;
    loader me = {};
    do {
        for (; at_place(a, b, s, own); leave_place(a, b, s)) load_place(x, b, me, s, PLACE(b, s, own));
    } while (start_again(a, b, s));
    if (first) mbarrier_arrive(new_errand(b, me, s, own, ERRAND_END, CLEAN_NOTHING, 0, 0, 0, 0, 0));
}

/* ---- the hands ---- */

/* Where a 16-byte piece lies: blocks of 64 columns of all rows, pieces permuted by the row. */
DEVICE uint32_t piece_at(uint32_t tile, int rows, int row, int chunk) {
    return tile + (chunk >> 3) * rows * ROW + row * ROW + (((chunk ^ row) & 7) << 4);
}

/* A tile piece by piece; rows that are not of the sequence become zero. */
DEVICE void gather_tile(const attn_cuda_args &a, const errand &e, const attn_tensor &t, bool is_q, int rows, int blocks,
                        int dim, int hand) {
    const attn_dtype dtype = is_q ? a.p.dtype : a.p.kv_dtype;
    const bool whole = a.vector_ok && dtype == (attn_dtype)DTYPE;
    for (int n = hand; n < rows * blocks * 8; n += HANDS) {
        const int row = n / (blocks * 8), c = n % (blocks * 8), count = row < e.left ? chunk_count(c, dim - e.column) : 0;
        const uint32_t piece = piece_at(e.to, rows, row, c);
        const int64_t from = !count ? 0
                                    : e.column + c * PER_CHUNK +
                                          (is_q ? attn__q_offset(&a.p, &t, &e.s, e.row + row, e.head)
                                                : cache_offset(a, t, e.s, e.row + row, e.head));
        if (whole && count == PER_CHUNK)
            cp_async_cg(piece, (const uint8_t *)t.data + from * EB);
        else
            st_shared_v4(piece, count ? gather(t.data, dtype, from, count) : make_uint4(0, 0, 0, 0));
    }
    cp_async_wait_all();
}

DEVICE uint32_t finite_part(uint32_t x) {
    const int which = nonfinite_word(x);
    return x & ((which & 1 ? 0 : 0xffffu) | (which & 2 ? 0 : 0xffff0000u));
}

/* Rows of V that are not of this sequence become zero. */
DEVICE void clean_end(const errand &e, int hand) {
    for (int n = e.left * (ROW / 16) + hand; n < BN * (ROW / 16); n += HANDS)
#pragma unroll
        for (int c = 0; c < V_BLOCKS; c++) st_shared_v4(e.to + c * BN * ROW + n * 16, make_uint4(0, 0, 0, 0));
}

/*
 * A product gives 0 * NaN = NaN to a row that may not see the key. So what is not finite becomes zero in V, and the place is noted
 * as one whose results have to be put right (add_nonfinite).
 */
DEVICE void clean_v(const buffers &b, const errand &e, int hand) {
    bool found = false;
#pragma unroll 4
    for (int n = hand; n < V_BYTES / 16; n += HANDS) {
        const uint32_t at = e.to + n * 16;
        const uint4 x = ld_shared_v4(at);
        if (!nonfinite_word(larger_halves(larger_halves(larger_halves(larger_halves(0, x.x), x.y), x.z), x.w))) continue;
        st_shared_v4(at, make_uint4(finite_part(x.x), finite_part(x.y), finite_part(x.z), finite_part(x.w)));
        found = true;
    }
    if (found) b.notes->dirty[e.number & 1] = e.number + 1;
}

DEVICE void run_errands(const attn_cuda_args &a, const buffers &b) {
    const int hand = threadIdx.x - (THREADS + 128 - HANDS);
    for (ring r = {};; turn_ring(r, ERRANDS)) {
        mbarrier_wait_parity(BARRIER(b, errand_full, r.at), r.parity);
        const errand &e = b.notes->errands[r.at];
        if (e.what == ERRAND_END) return;
        mbarrier_wait_parity(e.empty, e.parity);
        if (THROUGH_Q)
            mbarrier_wait_parity(BARRIER(b, q_empty, e.q.at), e.q.parity ^ 1); /* else Q may be empty again by now */
        if (OWN && e.what == ERRAND_Q) gather_tile(a, e, a.f.q, true, BM, QK_BLOCKS, a.p.dim_qk, hand);
        if (OWN && e.what == ERRAND_K) gather_tile(a, e, a.f.k, false, BN, QK_BLOCKS, a.p.dim_qk, hand);
        if (OWN && e.what == ERRAND_V) gather_tile(a, e, a.f.v, false, BN, V_BLOCKS, a.p.dim_v, hand);
        if (OWN && e.what == ERRAND_CLEAN) clean_end(e, hand);
        if (e.clean == CLEAN_ALL) {
            if (OWN) bar_sync(BARRIER_HANDS, HANDS);
            clean_v(b, e, hand);
        }
        fence_proxy_async();
        mbarrier_arrive(e.full);
        mbarrier_arrive(BARRIER(b, errand_empty, r.at));
    }
}

#endif
