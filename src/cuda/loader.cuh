/*
 * The loader and its hands: how Q, K and V come into shared memory. fwd_sm90.cu says who they are and includes this.
 */
#ifndef ATTN_LOADER_CUH
#define ATTN_LOADER_CUH

/* ---- the loader, one warp ---- */

/* What is wanted of 32 tiles, with FlashMask: a lane looks at each. */
DEVICE void look(const attn_cuda_args &a, const buffers &b, const tile_place &at, int32_t top) {
    const int32_t n = top - (int32_t)(threadIdx.x & 31);
    int kind = ATTN_TILE_SKIP;
    if (n >= at.n_first) {
        kind = n * BN < at.all_from || n * BN + BN > at.all_to ? ATTN_TILE_PARTIAL : ATTN_TILE_FULL;
        int by_range = attn__mask_tile(&at.mask, at.row, at.row + at.rows, n * BN, n * BN + BN, range_of(a, at, n));
        if (by_range == ATTN_TILE_SKIP || kind == ATTN_TILE_FULL) kind = by_range;
    }
    const uint32_t wanted = __ballot_sync(~0u, kind != ATTN_TILE_SKIP),
                   partial = __ballot_sync(~0u, kind == ATTN_TILE_PARTIAL);
    if ((threadIdx.x & 31) == 0) b.notes->ahead = {top, wanted, partial};
}

/* With FlashMask: the next tile that is wanted, as tile_word. */
DEVICE int32_t find_tile(const attn_cuda_args &a, const buffers &b, const tile_place &at) {
    for (;;) {
        __syncwarp();
        const outlook o = b.notes->ahead;
        __syncwarp();
        const int bit = __ffs(o.wanted) - 1;
        if (o.wanted && (threadIdx.x & 31) == 0) b.notes->ahead.wanted = o.wanted & (o.wanted - 1);
        if (says(o.wanted)) return tile_word({o.top - bit, (o.partial >> bit & 1) != 0, false});
        if (says(o.top - 32 < at.n_first)) return NO_TILE;
        look(a, b, at, o.top - 32);
    }
}

/*
 * The first tile of a place, and the next one, as tile_word, in one register; below 0 when there is none. Without FlashMask all are wanted,
 * one after the other, and whether they have a mask is not said.
 */
DEVICE int32_t first_tile(const attn_cuda_args &a, const buffers &b, const tile_place &at) {
    if (!(ALL && a.ranges)) return at.n_last >= at.n_first ? at.n_last << 2 : NO_TILE;
    look(a, b, at, at.n_last);
    return find_tile(a, b, at);
}
DEVICE int32_t next_tile(const attn_cuda_args &a, const buffers &b, const tile_place &at, int32_t t) {
    if (!(ALL && a.ranges)) return t >> 2 > at.n_first ? (t & ~3) - 4 : NO_TILE;
    return find_tile(a, b, at);
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
    ring k; /* of the next K; that of V follows from it */
    ring q; /* plain lines; else it follows from the place's number */
} loader;

/* The bytes come by copies: the thread arrives for all hands. */
DEVICE void expect(uint32_t full, int bytes) {
    mbarrier_arrive_expect_tx(full, bytes);
    mbarrier_arrive_count(full, HANDS - 1);
}

/* Of the place at hand. */
DEVICE ring q_ring(const buffers &b, const loader &me, const stroll &s) {
    return OWN ? ring_at(number_at(b, s), QBUF) : me.q;
}

/*
 * Writes an errand; it is handed over by the barrier that is returned. n: tile of keys; r: which buffer, and the parity of `full` when it
 * is there.
 */
DEVICE uint32_t new_errand(const buffers &b, const loader &me, const stroll &s, int what, int clean, int32_t n, ring r) {
    const ring own = ring_at(b.notes->given++, ERRANDS);
    errand &e = b.notes->errands[own.at];
    mbarrier_wait_parity(BARRIER(b, errand_empty, own.at), own.parity ^ 1);
    e.what = what;
    if (what != ERRAND_END) {
        e.clean = clean;
        e.to = what == ERRAND_Q ? b.q + r.at * Q_BYTES : what == ERRAND_K ? b.k + r.at * K_BYTES : b.v + r.at * V_BYTES;
        e.full = what == ERRAND_Q   ? BARRIER(b, q_full, r.at)
                 : what == ERRAND_K ? BARRIER(b, k_full, r.at)
                                    : BARRIER(b, v_full, r.at);
        e.empty = what == ERRAND_Q   ? BARRIER(b, q_empty, r.at)
                  : what == ERRAND_K ? BARRIER(b, k_empty, r.at)
                                     : BARRIER(b, v_empty, r.at);
        e.parity = r.parity ^ 1;
        e.number = number_at(b, s);
        e.q = q_ring(b, me, s);
        e.n = n;
        e.place = place_ring(s.turn).at;
    }
    return BARRIER(b, errand_full, own.at);
}

/* One thread. */
DEVICE void load_q(const attn_cuda_args90 &x, const buffers &b, const loader &me, const stroll &s, const tile_place &at,
                   bool is_seen) {
    const attn_cuda_args &a = x.a;
    const ring q = q_ring(b, me, s);
    const bool packed = OWN && (a.p.flags & ATTN_VARLEN_Q);
    mbarrier_wait_parity(BARRIER(b, q_empty, q.at), q.parity ^ 1);
    b.notes->is_seen[q.at] = is_seen;
    if (OWN && !(a.tma & ATTN_TMA_Q)) {
        mbarrier_arrive(new_errand(b, me, s, ERRAND_Q, CLEAN_NOTHING, 0, q));
        return;
    }
    const uint32_t full = BARRIER(b, q_full, q.at);
    expect(full, Q_BYTES);
    fetch_box(&x.q, x.whole & ATTN_WHOLE_Q, b.q + q.at * Q_BYTES, full, QK_BLOCKS, BM, 0,
              (int)(packed ? at.s.q_row : 0) + at.row, at.h, packed ? 0 : at.s.b);
}

/* The lane's box in a tile: its first key. Is there one? */
DEVICE int32_t key_of_box(const attn_cuda_args &a) { return OWN ? (here(threadIdx.x) & 31) * a.box : 0; }
DEVICE bool has_box(const attn_cuda_args &a) { return OWN ? key_of_box(a) < BN : (threadIdx.x & 31) == 0; }

/* The entry of cache position `at` in the page table: page_in_table without a division. */
DEVICE int32_t page_entry(const attn_cuda_args &a, const attn_seq &s, int32_t at) {
    const int64_t row =
        a.f.page_table_stride ? a.f.page_table_stride : (int64_t)attn__divide((uint32_t)a.p.max_kv - 1, a.by_page) + 1;
    return a.f.page_table[s.slot * row + (int32_t)attn__divide((uint32_t)at, a.by_page)];
}
DEVICE int32_t row_in_page(const attn_cuda_args &a, int32_t at) {
    return at - (int32_t)attn__divide((uint32_t)at, a.by_page) * a.p.page_size;
}

/* The page of the lane's box, as it stands in the table; asked for a tile ahead. One that is not there, and so zero, if the sequence ends before. */
DEVICE int32_t page_of_box(const attn_cuda_args &a, const tile_place &at, int32_t n) {
    if (!OWN || !a.p.page_size || n < 0) return 0;
    const int32_t key = n * BN + key_of_box(a);
    return has_box(a) && key < at.s.sk ? page_entry(a, at.s, at.s.leftpad + key) : a.p.num_pages;
}

/* Where that box lies. */
typedef struct box {
    int32_t row, head, batch;
} box;
DEVICE box find_box(const attn_cuda_args &a, const tile_place &at, int32_t n, int32_t page) {
    const bool packed = OWN && (a.p.flags & ATTN_VARLEN_KV);
    const int32_t key = n * BN + key_of_box(a), row = at.s.leftpad + key;
    if (!OWN || !a.p.page_size) return {row + (packed ? (int32_t)at.s.kv_row : 0), at.kv_head, packed ? 0 : at.s.slot};
    return {row_in_page(a, row), at.kv_head, has_box(a) && key < at.s.sk ? checked_page(a, at.s, page) : page};
}

/* The whole warp: a lane for each box. */
DEVICE void fetch_boxes(const attn_cuda_args &a, const attn_tensor_map *map, bool whole, uint32_t to, uint32_t full,
                        int blocks, int32_t column, box at) {
    if (has_box(a)) fetch_box(map, whole, to + key_of_box(a) * ROW, full, blocks, BN, column, at.row, at.head, at.batch);
}

/*
 * How soon a buffer is filled again after it became empty decides how fast the kernel is (sixty instructions more once cost a tenth). So all that
 * can be known before is worked out before the wait, and bytes are expected when they have been sent for: they may even arrive before that,
 * the phase is not complete without the arrivals.
 */
DEVICE void load_k(const attn_cuda_args90 &x, const buffers &b, const loader &me, const stroll &s, const tile_place &own,
                   int32_t t, int32_t page) {
    const tile_place &at = PLACE(b, s, own);
    const uint32_t full = BARRIER(b, k_full, me.k.at);
    const bool first = (threadIdx.x & 31) == 0, gathers = OWN && says(at.gathers);
    const box place = find_box(x.a, at, t >> 2, page);
    mbarrier_wait_parity(BARRIER(b, k_empty, me.k.at), me.k.parity ^ 1);
    if (!gathers) fetch_boxes(x.a, &x.k, x.whole & ATTN_WHOLE_K, b.k + me.k.at * K_BYTES, full, QK_BLOCKS, 0, place);
    if (ALL && first) b.notes->tiles[tile_at(me.k)] = t;
    if (!gathers) {
        if (first) expect(full, K_BYTES);
    } else if (first) {
        mbarrier_arrive(new_errand(b, me, s, ERRAND_K, CLEAN_NOTHING, t >> 2, me.k));
    }
}

/* What the hands are to do to a tile of V: where there is a mask, if this is the second time; at the end what comes may be anything. */
DEVICE int cleaning_of(const attn_cuda_args &a, const buffers &b, const stroll &s, const tile_place &at, int32_t t) {
    const int32_t j = (t >> 2) * BN;
    if (careful_at(b, s) && (ALL && a.ranges ? (t & 2) != 0 : j < at.all_from || j + BN > at.all_to)) return CLEAN_ALL;
    return OWN && j + BN > at.s.sk ? CLEAN_END : CLEAN_NOTHING;
}

DEVICE void load_v(const attn_cuda_args90 &x, const buffers &b, const loader &me, const stroll &s, const tile_place &own,
                   ring v, int32_t t, int32_t page) {
    const tile_place &at = PLACE(b, s, own);
    const uint32_t to = b.v + v.at * V_BYTES, full = BARRIER(b, v_full, v.at);
    const bool first = (threadIdx.x & 31) == 0, gathers = OWN && says(at.gathers);
    const int clean = cleaning_of(x.a, b, s, at, t);
    const int32_t column = SLICED ? at.dv0 : 0;
    const box place = find_box(x.a, at, t >> 2, page);
    mbarrier_wait_parity(BARRIER(b, v_empty, v.at), v.parity ^ 1);
    if (!gathers && !clean) {
        fetch_boxes(x.a, &x.v, x.whole & ATTN_WHOLE_V, to, full, V_BLOCKS, column, place);
        if (first) expect(full, V_BYTES);
    } else {
        uint32_t handed = 0;
        if (first) {
            handed = new_errand(b, me, s, gathers ? ERRAND_V : ERRAND_CLEAN, clean, t >> 2, v);
            if (gathers)
                mbarrier_arrive(handed);
            else
                mbarrier_arrive_expect_tx(handed, V_BYTES);
        }
        handed = __shfl_sync(~0u, handed, 0);
        if (!gathers) fetch_boxes(x.a, &x.v, x.whole & ATTN_WHOLE_V, to, handed, V_BLOCKS, column, place);
    }
}

/* One thread: the next buffers of K and V are for O. */
DEVICE void lend(const buffers &b, const loader &me) {
    mbarrier_wait_parity(BARRIER(b, k_empty, me.k.at), me.k.parity ^ 1);
    mbarrier_wait_parity(BARRIER(b, v_empty, me.k.at), me.k.parity ^ 1);
    mbarrier_arrive_count(BARRIER(b, k_full, me.k.at), HANDS);
    mbarrier_arrive_count(BARRIER(b, v_full, me.k.at), HANDS);
}

/*
 * The whole warp. Buffers become empty in the order K(n), V(n + 1), K(n - 1), V(n), and where AHEAD is set they are filled so: K of a
 * tile before V of the one that comes before it.
 */
DEVICE void load_place(const attn_cuda_args90 &x, const buffers &b, loader &me, const stroll &s, const tile_place &own) {
    const attn_cuda_args &a = x.a;
    const bool first = (threadIdx.x & 31) == 0;
    int32_t t = first_tile(a, b, PLACE(b, s, own)), before = NO_TILE;
    if (first) load_q(x, b, me, s, PLACE(b, s, own), t >= 0);
    int32_t page = page_of_box(a, PLACE(b, s, own), t >> 2), page_before = 0;
    while (t >= 0) {
        const int32_t next = next_tile(a, b, PLACE(b, s, own), t), next_page = page_of_box(a, PLACE(b, s, own), next >> 2);
        if (ALL) t |= next < 0; /* the last one */
        load_k(x, b, me, s, own, t, page);
        if (!AHEAD) load_v(x, b, me, s, own, me.k, t, page);
        if (AHEAD && before >= 0) load_v(x, b, me, s, own, turned_back(me.k, STAGES), before, page_before);
        turn_ring(me.k, STAGES);
        before = t;
        page_before = page;
        t = ALL ? next : next_tile(a, b, PLACE(b, s, own), t);
        page = next_page;
    }
    if (AHEAD && before >= 0) load_v(x, b, me, s, own, turned_back(me.k, STAGES), before, page_before);
    if (!OWN) turn_ring(me.q, QBUF);
    if (LENDS) {
        if (first) lend(b, me);
        turn_ring(me.k, STAGES);
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
        for (; at_place(a, b, s, own); go_on(a, b, s)) load_place(x, b, me, s, own);
    } while (start_again(a, b, s));
    if (first) mbarrier_arrive(new_errand(b, me, s, ERRAND_END, CLEAN_NOTHING, 0, {}));
}

/* ---- the hands ---- */

/* Where a 16-byte piece lies: blocks of 64 columns of all rows, pieces permuted by the row. */
DEVICE uint32_t piece_at(uint32_t tile, int rows, int row, int chunk) {
    return tile + (chunk >> 3) * rows * ROW + row * ROW + (((chunk ^ row) & 7) << 4);
}

DEVICE int hand_here(void) { return here(threadIdx.x) - (THREADS + 128 - HANDS); }

/* Element `column` of row `row` of the place, or of key `row`. */
DEVICE int64_t offset_of(const attn_cuda_args &a, const tile_place &at, const attn_tensor &t, bool is_q, int32_t row,
                         int32_t column) {
    if (is_q) return attn__q_offset(&a.p, &t, &at.s, at.row + row, at.h) + column;
    const int32_t key = at.s.leftpad + row;
    if (!a.p.page_size) return attn__kv_offset(&a.p, &a.f, &t, &at.s, key, at.kv_head) + column;
    return checked_page(a, at.s, page_entry(a, at.s, key)) * t.stride[0] + row_in_page(a, key) * t.stride[1] +
           at.kv_head * t.stride[2] + column;
}

/* 16 bytes by elements: any dtype, any alignment. Slow, and little code. */
DEVICE void gather_piece(uint32_t piece, const void *data, attn_dtype dtype, int64_t from, int count) {
#pragma unroll 1
    for (int x = 0; x < PER_CHUNK; x += 2) {
        const float low = x < count ? (float)attn__load(dtype, data, from + x) : 0;
        const float high = x + 1 < count ? (float)attn__load(dtype, data, from + x + 1) : 0;
        st_shared_b32(piece + x * EB, BF16 ? attn__to_bf16(low) | (uint32_t)attn__to_bf16(high) << 16
                                           : attn__to_f16(low) | (uint32_t)attn__to_f16(high) << 16);
    }
}

/* A tile piece by piece; rows that are not of the sequence become zero. */
DEVICE void gather_tile(const attn_cuda_args &a, const buffers &b, const errand &e, const attn_tensor &t, int rows,
                        int blocks, int dim) {
    const tile_place &at = b.notes->places[e.place];
    const bool is_q = &t == &a.f.q;
    const int32_t first = is_q ? 0 : e.n * BN, left = is_q ? at.rows : at.s.sk - e.n * BN;
    const int32_t column = &t == &a.f.v ? at.dv0 : 0;
    const attn_dtype dtype = is_q ? a.p.dtype : a.p.kv_dtype;
#pragma unroll 1
    for (int n = hand_here(); n < rows * blocks * 8; n += HANDS) {
        const int row = n / (blocks * 8), c = n % (blocks * 8), count = row < left ? chunk_count(c, dim - column) : 0;
        const uint32_t piece = piece_at(e.to, rows, row, c);
        const int64_t from = count ? offset_of(a, at, t, is_q, first + row, column + c * PER_CHUNK) : 0;
        if (a.vector_ok && dtype == (attn_dtype)DTYPE && count == PER_CHUNK)
            cp_async_cg(piece, (const uint8_t *)t.data + from * EB);
        else
            gather_piece(piece, t.data, dtype, from, count);
    }
    cp_async_wait_all();
}

DEVICE uint32_t finite_part(uint32_t x) {
    const int which = nonfinite_word(x);
    return x & ((which & 1 ? 0 : 0xffffu) | (which & 2 ? 0 : 0xffff0000u));
}

/* Rows of V that are not of this sequence become zero. */
DEVICE void clean_end(const buffers &b, const errand &e) {
    const int32_t left = attn__min32(b.notes->places[e.place].s.sk - e.n * BN, BN);
    for (int n = left * (ROW / 16) + hand_here(); n < BN * (ROW / 16); n += HANDS)
#pragma unroll
        for (int c = 0; c < V_BLOCKS; c++) st_shared_v4(e.to + c * BN * ROW + n * 16, make_uint4(0, 0, 0, 0));
}

/*
 * A product gives 0 * NaN = NaN to a row that may not see the key. So what is not finite becomes zero in V, and the place is noted
 * as one whose results have to be put right (add_nonfinite).
 */
DEVICE void clean_v(const buffers &b, const errand &e) {
    bool found = false;
#pragma unroll 4
    for (int n = hand_here(); n < V_BYTES / 16; n += HANDS) {
        const uint32_t at = e.to + n * 16;
        const uint4 x = ld_shared_v4(at);
        if (!nonfinite_word(larger_halves(larger_halves(larger_halves(larger_halves(0, x.x), x.y), x.z), x.w))) continue;
        st_shared_v4(at, make_uint4(finite_part(x.x), finite_part(x.y), finite_part(x.z), finite_part(x.w)));
        found = true;
    }
    if (found) b.notes->dirty[e.number & 1] = e.number + 1;
}

DEVICE void run_errands(const attn_cuda_args &a, const buffers &b) {
    for (uint32_t errands = 0;; errands++) {
        const ring r = ring_at(errands, ERRANDS);
        mbarrier_wait_parity(BARRIER(b, errand_full, r.at), r.parity);
        const errand &e = b.notes->errands[r.at];
        if (e.what == ERRAND_END) return;
        mbarrier_wait_parity(e.empty, e.parity);
        if (THROUGH_Q)
            mbarrier_wait_parity(BARRIER(b, q_empty, e.q.at), e.q.parity ^ 1); /* else Q may be empty again by now */
        if (OWN && e.what == ERRAND_Q) gather_tile(a, b, e, a.f.q, BM, QK_BLOCKS, a.p.dim_qk);
        if (OWN && e.what == ERRAND_K) gather_tile(a, b, e, a.f.k, BN, QK_BLOCKS, a.p.dim_qk);
        if (OWN && e.what == ERRAND_V) gather_tile(a, b, e, a.f.v, BN, V_BLOCKS, a.p.dim_v);
        if (OWN && e.what == ERRAND_CLEAN) clean_end(b, e);
        if (e.clean == CLEAN_ALL) {
            if (OWN) bar_sync(BARRIER_HANDS, HANDS);
            clean_v(b, e);
        }
        fence_proxy_async();
        mbarrier_arrive(e.full);
        mbarrier_arrive(BARRIER(b, errand_empty, r.at));
    }
}

#endif
