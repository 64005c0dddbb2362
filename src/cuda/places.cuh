/*
 * Places: 64 query rows for each consumer of a block, one head. Where the blocks of a persistent kernel work, one place after the other.
 *
 * They are counted as [groups of heads][slot][head]. Where lengths are all alike (plain lines) blocks take them in turn, forwards
 * and backwards: the long ones, which come first, and the short ones then add up to the same for each. Otherwise a scheduler takes
 * them, so too, or, where there is a counter, the next one of [sequence][slot][head], ahead of time; it finds out what there is to do
 * and tells of it in shared memory.
 *
 * A pass is all that a block does, or, in the other lines, LOTS places; those taken from the counter are noted.
 * After it everybody meets, and it is done again if some consumer has asked for that.
 *
 * The kernel's file says before this one what rows.cuh wants, and: OWN, shared_notes, buffers, BARRIER, ring, PLACES, LOTS, TELL_....
 */
#ifndef ATTN_PLACES_CUH
#define ATTN_PLACES_CUH

/*
 * A vote says nothing new, but tells the compiler that all lanes agree. It has to know where products are under way; and what is
 * counted along a way that all take together, such as rings, then is in the registers that a warp has once. What plain lines know of
 * a tile it sees by itself.
 */
DEVICE bool says(bool x) { return __any_sync(~0u, x); }
DEVICE bool agrees(bool x) { return OWN ? says(x) : x; }

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
    const int64_t heads = (int64_t)a.p.batch * heads_of(a), left = heads - w.first;
    if (left <= 0) return false;
    const bool whole = left >= a.group;
    const uint32_t size = whole ? (uint32_t)a.group : (uint32_t)left;
    const uint32_t slot = whole ? attn__divide(w.index, a.by_group) : w.index / size;
    if (slot >= (uint32_t)a.row_tiles) return false;
    const uint32_t head = (uint32_t)w.first + w.index - slot * size; /* plain lines: batch * heads is below 2^31 */
    at.s = {};
    at.s.b = at.s.slot = (int32_t)attn__divide(head, a.by_heads);
    at.s.sq = a.p.max_q;
    at.s.sk = a.p.max_kv;
    see_head(a, at, head - (uint32_t)(at.s.b * heads_of(a)));
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
    at.chunk = 0;
    at.scale = a.scale_log2;
    at.raw = at.o_factor = 1;
    at.least = a.least;
    return true;
}

/* ---- the others: the scheduler, one warp ---- */

/* In turn: number i of the block's places. Is there one? last: nor will there be. */
DEVICE bool find_in_turn(const attn_cuda_args &a, spot &x, int64_t i, bool &last) {
    const uint32_t each = (uint32_t)a.group * (uint32_t)a.slots;
    const int64_t n = i * gridDim.x + (i & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    const int64_t group = n <= INT32_MAX ? attn__divide((uint32_t)n, a.by_each) : n / each;
    last = n >= a.work;
    return !last && find_spot(a, x, group * a.group, (uint32_t)(n - group * each));
}

/*
 * With a counter places are [sequence][slot][head], and those that packed sequences do not have are not counted. The scheduler
 * stands at 32 sequences, one to a lane.
 */
typedef struct tally {
    int32_t b;     /* of the first lane */
    int32_t slots; /* of the lane's sequence */
    uint32_t end;  /* number of its last place, and one */
} tally;

/* Row tiles of a sequence, or chunks; of a padded batch all that any may have: somebody has to fill what is padding. */
DEVICE int32_t slots_of(const attn_cuda_args &a, int32_t b) {
    if (b >= a.p.batch) return 0;
    if (!(a.p.flags & ATTN_VARLEN_Q)) return a.slots;
    const attn_seq s = sequence_at(a, b);
    if (s.sq == 0) return 0;
    return is_split(a, s) ? attn__max32(1, (s.sk + ATTN_CUDA_CHUNK - 1) / ATTN_CUDA_CHUNK) : (s.sq + BM - 1) / BM;
}
DEVICE tally tally_from(const attn_cuda_args &a, int32_t b, uint32_t before) {
    tally t = {b, slots_of(a, b + (int32_t)(threadIdx.x & 31)), 0};
    t.end = (uint32_t)t.slots * (uint32_t)heads_of(a);
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
        const int lane = threadIdx.x & 31;
        const uint32_t others = __shfl_sync(~0u, t.end, (lane - by) & 31);
        if (lane >= by) t.end += others;
    }
    t.end += before;
    return t;
}

/* The next one: its number is noted, for the case that the pass is done again. */
DEVICE bool find_next(const attn_cuda_args &a, const buffers &b, spot &x, tally &t, int64_t before, int k, bool again,
                      bool &last) {
    const int lane = threadIdx.x & 31;
    if (lane == 0 && !again) b.notes->lots[k] = before + k == 0 ? blockIdx.x : gridDim.x + atomicAdd(a.counter, 1u);
    __syncwarp();
    const uint32_t n = b.notes->lots[k];
    uint32_t here;
    for (;;) {
        here = __ballot_sync(~0u, n < t.end);
        last = !here && t.b >= a.p.batch - 32;
        if (here || last) break;
        t = tally_from(a, t.b + 32, __shfl_sync(~0u, t.end, 31));
    }
    if (last) return false;
    const int whose = __ffs(here) - 1;
    const int32_t slots = __shfl_sync(~0u, t.slots, whose);
    const uint32_t heads = (uint32_t)heads_of(a), index = n + (uint32_t)slots * heads - __shfl_sync(~0u, t.end, whose);
    x.slot = (int32_t)attn__divide(index, a.by_heads);
    x.batch = t.b + whose;
    x.head = index - (uint32_t)x.slot * heads;
    x.tile = (a.p.flags & ATTN_VARLEN_Q ? slots : a.row_tiles) - 1 - x.slot;
    return true;
}

/* Tells of the place that is written there, or of an end. */
DEVICE void tell(const buffers &b, ring &r, int what) {
    if ((threadIdx.x & 31) == 0) {
        b.notes->told[r.at] = what;
        mbarrier_arrive(BARRIER(b, place_full, r.at));
    }
    turn_ring(r, PLACES);
}

/* A lane works a place out, in shared memory, where it is told; all of them fill what is padding there. Is there something to do? */
DEVICE bool write_place(const attn_cuda_args &a, tile_place &at, const spot &x) {
    const int lane = threadIdx.x & 31;
    bool found = false;
    if (lane == 0) {
        at.pad_from = at.pad_to = 0;
        found = see_place(a, at, x);
    }
    __syncwarp();
    if (at.pad_from < at.pad_to) fill_rows(a, at.s.b, at.h, at.pad_from, at.pad_to, lane, 32);
    return says(found);
}

/* Says whether this pass is the last one. t: where the scheduler stands. */
DEVICE bool tell_pass(const attn_cuda_args &a, const buffers &b, ring &r, tally &t, int64_t before, bool again) {
    bool last = false;
    for (int k = 0; k < LOTS && !last; k++) {
        spot x;
        if (!(a.counter ? find_next(a, b, x, t, before, k, again, last) : find_in_turn(a, x, before + k, last))) continue;
        mbarrier_wait_parity(BARRIER(b, place_empty, r.at), r.parity ^ 1);
        if (write_place(a, b.notes->places[r.at], x)) tell(b, r, TELL_PLACE);
    }
    mbarrier_wait_parity(BARRIER(b, place_empty, r.at), r.parity ^ 1);
    tell(b, r, last ? TELL_LAST : TELL_END);
    return last;
}

DEVICE void schedule(const attn_cuda_args &a, const buffers &b) {
    ring r = {};
    bool again = false;
    tally start = {}; /* where it stood when the pass began: numbers only grow */
    if (a.counter) start = tally_from(a, 0, 0);
    for (uint32_t pass = 0;;) {
        tally t = start;
        const bool last = tell_pass(a, b, r, t, (int64_t)pass * LOTS, again);
        again = !again && goes_again(b, pass);
        if (again) continue;
        start = t;
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
    if (!OWN) s.w = first_path(a);
    return s;
}

/* Each thread lets go of what it was told. */
DEVICE void go_on(const attn_cuda_args &a, const buffers &b, stroll &s) {
    if (OWN) {
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
    if (!OWN) return plain_place(a, s.w, own);
    mbarrier_wait_parity(BARRIER(b, place_full, s.r.at), s.r.parity);
    return says(b.notes->told[s.r.at] == TELL_PLACE);
}
/* Is there another pass, or this one again? */
DEVICE bool start_again(const attn_cuda_args &a, const buffers &b, stroll &s) {
    const bool last = !OWN || says(b.notes->told[s.r.at] == TELL_LAST);
    go_on(a, b, s);
    s.careful = !s.careful && goes_again(b, s.pass);
    if (!s.careful) {
        s.pass++;
        return !last;
    }
    if (!OWN) s.w = first_path(a);
    return true;
}
#define PLACE(b, s, own) (OWN ? (b).notes->places[(s).r.at] : (own))

#endif
