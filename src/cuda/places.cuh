/*
 * Places: 64 query rows for each consumer of a block, one head. Where the blocks of a persistent kernel work, one place after the other.
 *
 * They are counted as [groups of heads][slot][head]. Where lengths are all alike (plain lines) blocks take them in turn, forwards
 * and backwards: the long ones, which come first, and the short ones then add up to the same for each. Otherwise a scheduler takes
 * them, so too, or, where there is a counter, the next one, ahead of time; it finds out what there is to do and tells of it
 * in shared memory.
 *
 * A pass is all that a block does, or, in lines for every feature, LOTS: of 32 places, or of those taken from the counter, which are
 * noted. After it everybody meets, and it is done again if some
 * consumer has asked for that.
 *
 * The kernel's file says before this one what rows.cuh wants, and: shared_notes, buffers, BARRIER, ring, PLACES, LOT, LOTS, TELL_....
 */
#ifndef ATTN_PLACES_CUH
#define ATTN_PLACES_CUH

/*
 * A vote says nothing new, but tells the compiler that all lanes agree. It has to know where products are under way; and what is
 * counted along a way that all take together, such as rings, then is in the registers that a warp has once. What plain lines know of
 * a tile it sees by itself.
 */
DEVICE bool says(bool x) { return __any_sync(~0u, x); }
DEVICE bool agrees(bool x) { return ALL ? says(x) : x; }

/* Everybody who is through with a pass meets here. Is it to be done again? */
DEVICE bool goes_again(const buffers &b, uint32_t pass) {
    mbarrier_arrive(BARRIER(b, pass, 0));
    mbarrier_wait_parity(BARRIER(b, pass, 0), pass & 1);
    return __any_sync(~0u, b.notes->again[pass & 1] == pass + 1);
}

/* ---- plain lines: all lengths alike, and everybody works places out ---- */

/* Where the block's next place is. */
typedef struct path {
    int64_t first;   /* head of its group */
    uint32_t index;  /* in the group */
    uint32_t number; /* of the place, counted by this block */
} path;

DEVICE void enter_group(const attn_cuda_args &a, path &w) {
    uint32_t groups = attn__divide(w.index, a.by_each);
    w.first += (int64_t)groups * a.group;
    w.index -= groups * (uint32_t)(a.group * a.slots);
}
DEVICE path first_path(const attn_cuda_args &a) {
    path w = {0, blockIdx.x, 0};
    enter_group(a, w);
    return w;
}
DEVICE void next_path(const attn_cuda_args &a, path &w) {
    w.index += w.number & 1 ? 2 * blockIdx.x + 1 : 2 * (gridDim.x - blockIdx.x) - 1;
    w.number++;
    enter_group(a, w);
}

DEVICE bool plain_place(const attn_cuda_args &a, const path &w, tile_place &at) {
    const int64_t heads = (int64_t)a.p.batch * a.p.heads_q, left = heads - w.first;
    if (left <= 0) return false;
    const bool whole = left >= a.group;
    const uint32_t size = whole ? (uint32_t)a.group : (uint32_t)left;
    const uint32_t slot = whole ? attn__divide(w.index, a.by_group) : w.index / size;
    if (slot >= (uint32_t)a.row_tiles) return false;
    const uint32_t head = (uint32_t)w.first + w.index - slot * size; /* plain lines: batch * heads_q is below 2^31 */
    at.s = {};
    at.s.b = at.s.slot = (int32_t)attn__divide(head, a.by_heads);
    at.s.sq = a.p.max_q;
    at.s.sk = a.p.max_kv;
    at.h = (int32_t)head - at.s.b * a.p.heads_q;
    at.kv_head = (int32_t)attn__divide((uint32_t)at.h, a.by_share);
    at.row = (a.row_tiles - 1 - (int32_t)slot) * BM;
    at.rows = attn__min32(BM, at.s.sq - at.row);
    at.mask = attn__seq_mask(&a.p, &at.s);
    int32_t from, to;
    attn__mask_rows(&at.mask, at.row, at.row + at.rows, &from, &to);
    attn__mask_rows_all(&at.mask, at.row, at.row + at.rows, &at.all_from, &at.all_to);
    at.n_first = from / BN;
    at.n_last = to > from ? (to - 1) / BN : -1;
    at.from = 0;
    at.to = at.s.sk;
    at.split = false;
    at.dv0 = at.chunk = 0;
    at.scale = a.scale_log2;
    at.raw = at.o_factor = 1;
    at.least = a.least;
    return true;
}

/* ---- the others: the scheduler, one warp ---- */

/* Lot k of a pass, `before` it having been others: this lane's place, or one past the end. */
DEVICE int64_t place_of(const attn_cuda_args &a, const buffers &b, int64_t before, int k, bool again) {
    const uint32_t lane = threadIdx.x & 31;
    if (!a.counter) {
        const int64_t i = (before + k) * 32 + lane;
        return i * gridDim.x + (i & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    }
    if (lane == 0 && !again)
        b.notes->lots[k] = before + k == 0 ? blockIdx.x * LOT : (gridDim.x * LOT + atomicAdd(a.counter, (uint32_t)LOT));
    __syncwarp();
    return lane < LOT ? (int64_t)b.notes->lots[k] + lane : INT64_MAX;
}

/* One to a lane: is there anything to do? Padding is filled on the way. */
DEVICE bool find(const attn_cuda_args &a, tile_place &at, int64_t n) {
    const uint32_t each = (uint32_t)a.group * (uint32_t)a.slots;
    const int64_t group = n <= INT32_MAX ? attn__divide((uint32_t)n, a.by_each) : n / each;
    at.pad_from = at.pad_to = 0;
    const bool found = n < a.work && find_place(a, at, group * a.group, (uint32_t)(n - group * each));
    for (uint32_t left = __ballot_sync(~0u, at.pad_from < at.pad_to); left; left &= left - 1) {
        const int from = __ffs(left) - 1;
        fill_rows(a, __shfl_sync(~0u, at.s.b, from), __shfl_sync(~0u, at.h, from), __shfl_sync(~0u, at.pad_from, from),
                  __shfl_sync(~0u, at.pad_to, from), threadIdx.x & 31, 32);
    }
    return found;
}

/* One lane tells of its place, or of an end. */
DEVICE void tell(const buffers &b, const ring &r, int what, const tile_place &at) {
    mbarrier_wait_parity(BARRIER(b, place_empty, r.at), r.parity ^ 1);
    b.notes->told[r.at] = what;
    if (what == TELL_PLACE) b.notes->places[r.at] = at;
    mbarrier_arrive(BARRIER(b, place_full, r.at));
}

/* Says whether this pass is the last one. */
DEVICE bool tell_pass(const attn_cuda_args &a, const buffers &b, ring &r, int64_t before, bool again) {
    const int lane = threadIdx.x & 31;
    bool last = false;
    tile_place at;
    for (int k = 0; k < LOTS && !last; k++) {
        const int64_t n = place_of(a, b, before, k, again);
        last = !__any_sync(~0u, n < a.work);
        for (uint32_t left = __ballot_sync(~0u, !last && find(a, at, n)); left; left &= left - 1) {
            if (lane == __ffs(left) - 1) tell(b, r, TELL_PLACE, at);
            __syncwarp();
            turn_ring(r, PLACES);
        }
    }
    if (lane == 0) tell(b, r, last ? TELL_LAST : TELL_END, at);
    __syncwarp();
    turn_ring(r, PLACES);
    return last;
}

DEVICE void schedule(const attn_cuda_args &a, const buffers &b) {
    ring r = {};
    bool again = false;
    for (uint32_t pass = 0;;) {
        const bool last = tell_pass(a, b, r, (int64_t)pass * LOTS, again);
        again = !again && goes_again(b, pass);
        if (again) continue;
        pass++;
        if (last) return;
    }
}

/* ---- where consumers and loader are ---- */

typedef struct stroll {
    path w;          /* plain lines */
    ring r;          /* the others */
    uint32_t number; /* of the place, counted over all passes */
    uint32_t pass;
    bool careful; /* for the second time */
} stroll;
DEVICE stroll start_stroll(const attn_cuda_args &a) {
    stroll s = {};
    if (!ALL) s.w = first_path(a);
    return s;
}

/* Each thread lets go of what it was told. */
DEVICE void go_on(const attn_cuda_args &a, const buffers &b, stroll &s) {
    if (ALL) {
        mbarrier_arrive(BARRIER(b, place_empty, s.r.at));
        turn_ring(s.r, PLACES);
    } else {
        next_path(a, s.w);
    }
}
DEVICE void leave_place(const attn_cuda_args &a, const buffers &b, stroll &s) {
    go_on(a, b, s);
    s.number++;
}
/* Is there another place in this pass? `own` has room for it. */
DEVICE bool at_place(const attn_cuda_args &a, const buffers &b, const stroll &s, tile_place &own) {
    if (!ALL) return plain_place(a, s.w, own);
    mbarrier_wait_parity(BARRIER(b, place_full, s.r.at), s.r.parity);
    return says(b.notes->told[s.r.at] == TELL_PLACE);
}
/* Is there another pass, or this one again? */
DEVICE bool start_again(const attn_cuda_args &a, const buffers &b, stroll &s) {
    const bool last = !ALL || says(b.notes->told[s.r.at] == TELL_LAST);
    go_on(a, b, s);
    s.careful = !s.careful && goes_again(b, s.pass);
    if (!s.careful) {
        s.pass++;
        return !last;
    }
    if (!ALL) s.w = first_path(a);
    return true;
}
#define PLACE(b, s, own) (ALL ? (b).notes->places[(s).r.at] : (own))

#endif
