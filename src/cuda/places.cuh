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
    uint32_t first;  /* head of its group; plain lines: batch * heads is below 2^31 */
    uint32_t index;  /* in the group */
    uint32_t number; /* of the place, counted by this block, in this pass; the highest bit: for the second time */
} path;

DEVICE void enter_group(const attn_cuda_args &a, path &w) {
    uint32_t groups = attn__divide(w.index, a.by_each);
    w.first += groups * (uint32_t)a.group;
    w.index -= groups * (uint32_t)(a.group * a.slots);
}
DEVICE path first_path(const attn_cuda_args &a) {
    path w = {0, (uint32_t)here((int)blockIdx.x), 0};
    enter_group(a, w);
    return w;
}
DEVICE void next_path(const attn_cuda_args &a, path &w) {
    w.index += w.number & 1 ? 2 * blockIdx.x + 1 : 2 * (gridDim.x - blockIdx.x) - 1;
    w.number++;
    enter_group(a, w);
}

DEVICE bool plain_place(const attn_cuda_args &a, const path &w, tile_place &at) {
    const uint32_t heads = (uint32_t)a.p.batch * (uint32_t)heads_of(a), left = heads - w.first;
    if (w.first >= heads) return false;
    const bool whole = left >= (uint32_t)a.group;
    const uint32_t size = whole ? (uint32_t)a.group : left;
    const uint32_t slot = whole ? attn__divide(w.index, a.by_group) : w.index / size;
    if (slot >= (uint32_t)a.row_tiles) return false;
    const uint32_t head = w.first + w.index - slot * size;
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

/*
 * Registers are scarce here. What changes once per place or pass is in shared memory, and only the first lane writes it.
 */

/* What the scheduler finds: nothing, but there may be more; a place, which is noted; the end. */
enum { FIND_NONE, FIND_PLACE, FIND_END };

/* In turn: the first lane looks. */
DEVICE int find_in_turn(const attn_cuda_args &a, const buffers &b) {
    const uint32_t each = (uint32_t)a.group * (uint32_t)a.slots, block = (uint32_t)here((int)blockIdx.x);
    const int64_t i = (int64_t)b.notes->next.pass * LOTS + b.notes->lot;
    const int64_t n = i * gridDim.x + (i & 1 ? gridDim.x - 1 - block : block);
    const int64_t group = n <= INT32_MAX ? attn__divide((uint32_t)n, a.by_each) : (int64_t)divide_slowly((uint64_t)n, each);
    if (n >= a.work) return FIND_END;
    return find_spot(a, b.notes->where, group * a.group, (uint32_t)(n - group * each)) ? FIND_PLACE : FIND_NONE;
}

/*
 * With a counter places are [sequence][slot][head], and those that packed sequences do not have are not counted. The scheduler
 * stands at 32 sequences, one to a lane, from notes.tally_b on.
 */

/* Row tiles of a sequence, or chunks; of a padded batch all that any may have: somebody has to fill what is padding. */
DEVICE int32_t slots_of(const attn_cuda_args &a, int32_t b) {
    if (b >= a.p.batch) return 0;
    if (!(a.p.flags & ATTN_VARLEN_Q)) return a.slots;
    const attn_seq s = sequence_at(a, b);
    if (s.sq == 0) return 0;
    return is_split(a, s) ? attn__max32(1, (s.sk + ATTN_CUDA_CHUNK - 1) / ATTN_CUDA_CHUNK) : (s.sq + BM - 1) / BM;
}
DEVICE void stand_at(const attn_cuda_args &a, const buffers &b, int32_t sequence, uint32_t before) {
    const int lane = threadIdx.x & 31;
    const int32_t slots = slots_of(a, sequence + lane);
    uint32_t end = (uint32_t)slots * (uint32_t)heads_of(a);
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
        const uint32_t others = __shfl_sync(~0u, end, (lane - by) & 31);
        if (lane >= by) end += others;
    }
    __syncwarp();
    b.notes->tallies[lane] = {slots, end + before};
    if (lane == 0) b.notes->tally_b = sequence;
    __syncwarp();
}

/* The next one: its number is noted, for the case that the pass is done again. */
DEVICE int find_next(const attn_cuda_args &a, const buffers &b) {
    const int lane = threadIdx.x & 31;
    uint32_t &lot = b.notes->lots[b.notes->lot];
    if (lane == 0 && !b.notes->next.careful)
        lot = b.notes->next.pass == 0 && b.notes->lot == 0 ? blockIdx.x : gridDim.x + atomicAdd(a.counter, 1u);
    __syncwarp();
    uint32_t some;
    for (;;) {
        some = __ballot_sync(~0u, lot < b.notes->tallies[lane].end);
        if (some) break;
        if (says(b.notes->tally_b >= a.p.batch - 32)) return FIND_END;
        stand_at(a, b, b.notes->tally_b + 32, b.notes->tallies[31].end);
    }
    if (lane == 0) {
        const int whose = __ffs(some) - 1;
        const int32_t slots = b.notes->tallies[whose].slots;
        const uint32_t heads = (uint32_t)heads_of(a), index = lot + (uint32_t)slots * heads - b.notes->tallies[whose].end;
        const int32_t slot = (int32_t)attn__divide(index, a.by_heads);
        b.notes->where = {b.notes->tally_b + whose, index - (uint32_t)slot * heads, slot,
                          (a.p.flags & ATTN_VARLEN_Q ? slots : a.row_tiles) - 1 - slot};
    }
    return FIND_PLACE;
}

/* Where a place is that is told after so many others and ends. What follows from that is found anew each time. */
DEVICE ring place_ring(uint32_t turn) { return ring_at((uint32_t)here((int)turn), PLACES); }

DEVICE void wait_to_tell(const buffers &b) {
    const ring r = place_ring(b.notes->said);
    mbarrier_wait_parity(BARRIER(b, place_empty, r.at), r.parity ^ 1);
}
/* Tells of the place that is written there, or of an end. */
DEVICE void tell(const buffers &b, int what) {
    __syncwarp();
    if ((threadIdx.x & 31) == 0) {
        const uint32_t at = b.notes->said++ % PLACES;
        b.notes->told[at] = b.notes->next;
        b.notes->told[at].what = what;
        if (what == TELL_PLACE) b.notes->next.number++;
        mbarrier_arrive(BARRIER(b, place_full, at));
    }
    __syncwarp();
}

/* A lane works a place out, in shared memory, where it is told; all of them fill what is padding there. Is there something to do? */
DEVICE bool write_place(const attn_cuda_args &a, const buffers &b) {
    const int lane = threadIdx.x & 31;
    tile_place &at = b.notes->places[place_ring(b.notes->said).at];
    bool found = false;
    if (lane == 0) {
        at.pad_from = at.pad_to = 0;
        found = see_place(a, at, b.notes->where);
        at.gathers = !(a.tma & ATTN_TMA_KV) || (a.p.page_size && at.s.leftpad % a.box);
    }
    __syncwarp();
    if (at.pad_from < at.pad_to) fill_rows(a, at.s.b, at.h, at.pad_from, at.pad_to, lane, 32);
    return says(found);
}

/* Says whether this pass is the last one. */
DEVICE bool tell_pass(const attn_cuda_args &a, const buffers &b) {
    const bool first = (threadIdx.x & 31) == 0;
    for (;;) {
        const bool full = says(b.notes->lot == LOTS);
        int found = FIND_NONE;
        if (!full && a.counter)
            found = find_next(a, b);
        else if (!full && first)
            found = find_in_turn(a, b);
        const bool last = says(found == FIND_END);
        if (last || says(found == FIND_PLACE) || full) wait_to_tell(b);
        if (last || full) {
            tell(b, last ? TELL_LAST : TELL_END);
            return last;
        }
        if (says(found == FIND_PLACE) && write_place(a, b)) tell(b, TELL_PLACE);
        __syncwarp();
        if (first) b.notes->lot++;
        __syncwarp();
    }
}

DEVICE void schedule(const attn_cuda_args &a, const buffers &b) {
    for (;;) {
        if (a.counter) stand_at(a, b, b.notes->start, b.notes->start_before);
        const bool last = tell_pass(a, b), again = !b.notes->next.careful && goes_again(b, b.notes->next.pass);
        if (says(!again && last)) return;
        __syncwarp();
        if ((threadIdx.x & 31) == 0) {
            b.notes->next.careful = again;
            b.notes->lot = 0;
            if (!again) {
                b.notes->next.pass++;
                b.notes->start = b.notes->tally_b;
                b.notes->start_before =
                    b.notes->tallies[0].end - (uint32_t)b.notes->tallies[0].slots * (uint32_t)heads_of(a);
            }
        }
        __syncwarp();
    }
}

/* ---- where consumers and loader are ---- */

typedef struct stroll {
    path w;        /* plain lines */
    uint32_t turn; /* the others, which are told all that: places and ends until now */
} stroll;
DEVICE stroll start_stroll(const attn_cuda_args &a) {
    stroll s = {};
    if (!OWN) s.w = first_path(a);
    return s;
}
DEVICE const word &told_at(const buffers &b, const stroll &s) { return b.notes->told[place_ring(s.turn).at]; }
DEVICE uint32_t number_at(const buffers &b, const stroll &s) { return OWN ? told_at(b, s).number : s.w.number; }
DEVICE uint32_t pass_at(const buffers &b, const stroll &s) { return OWN ? told_at(b, s).pass : 0; }
DEVICE bool careful_at(const buffers &b, const stroll &s) { return OWN ? says(told_at(b, s).careful) : s.w.number >> 31; }

/* Each thread lets go of what it was told. */
DEVICE void go_on(const attn_cuda_args &a, const buffers &b, stroll &s) {
    if (OWN)
        mbarrier_arrive(BARRIER(b, place_empty, place_ring(s.turn++).at));
    else
        next_path(a, s.w);
}
/* Is there another place in this pass? `own` has room for it. */
DEVICE bool at_place(const attn_cuda_args &a, const buffers &b, const stroll &s, tile_place &own) {
    if (!OWN) return plain_place(a, s.w, own);
    const ring r = place_ring(s.turn);
    mbarrier_wait_parity(BARRIER(b, place_full, r.at), r.parity);
    return says(told_at(b, s).what == TELL_PLACE);
}
/* Is there another pass, or this one again? */
DEVICE bool start_again(const attn_cuda_args &a, const buffers &b, stroll &s) {
    const bool last = !OWN || says(told_at(b, s).what == TELL_LAST), careful = careful_at(b, s);
    const uint32_t pass = pass_at(b, s);
    go_on(a, b, s);
    if (careful || !goes_again(b, pass)) return !last;
    if (!OWN) s.w = first_path(a);
    if (!OWN) s.w.number |= 1u << 31;
    return true;
}
#define PLACE(b, s, own) (OWN ? (b).notes->places[place_ring((s).turn).at] : (own))

#endif
