/*
 * The list of work of decode's kernels, and a block's share of it. The kernel's file says before this one: ROWS (of an item), SPAN (keys
 * that are worked by themselves), PAIRS_FROM (from that span on, an even number, an even one and the next are worked as one; 0: never), BN
 * (keys of a tile, a unit of work), SPAN_TILES, WARPS and THREADS (of a block).
 */
#ifndef ATTN_DECODE_LIST_CUH
#define ATTN_DECODE_LIST_CUH

#include "score.cuh"

/* ---- the list of work: [sequence][KV head][rows][span] ---- */

/* Where a block is in the list: an item, and the spans of it that are the block's. Work is counted in units of a tile. */
typedef struct walk {
    attn_seq s;
    int32_t head, block;    /* KV head; which ROWS rows of it */
    int32_t blocks;         /* of the sequence's rows: 0, and it is none of ours */
    int32_t from, to;       /* keys that any row sees */
    int32_t first;          /* the span that they begin in */
    int32_t tiles;          /* from there on */
    int32_t span, span_end; /* of the item, counted from `first`, that are this block's */
    int64_t before;         /* units of the list before the item */
} walk;

/* What a block has of the list. */
typedef struct share {
    int64_t from, to; /* units: the spans that begin there */
    int64_t all;      /* units of the whole list */
} share;

/* What the threads of a block tell each other to begin with. */
typedef struct list_notes {
    int64_t sums[WARPS];
    int64_t before; /* units before sequence b */
    int32_t b;
    share mine;
} list_notes;

/* x / by, neither of them negative; most often both fit into 32 bits. */
static __device__ __noinline__ int64_t long_quotient(int64_t x, int64_t by) { return x / by; }
DEVICE int64_t quotient(int64_t x, int64_t by) {
    if (((uint64_t)x | (uint64_t)by) >> 32 == 0) return (uint32_t)x / (uint32_t)by;
    return long_quotient(x, by);
}

/* The first unit of block n. */
DEVICE int64_t share_of(int64_t all, uint32_t n) { return quotient(all * n + gridDim.x - 1, gridDim.x); }

DEVICE int32_t spans_of(const walk &w) { return attn__max32(1, (w.tiles + SPAN_TILES - 1) / SPAN_TILES); }

/* The first span of the item that begins so many units on or later, and not in the middle of two that are worked as one. */
DEVICE int32_t span_from(const walk &w, int64_t units) {
    const int32_t span = (int32_t)((uint64_t)(units + SPAN_TILES - 1) / SPAN_TILES), at = w.first + span;
    return PAIRS_FROM && at >= PAIRS_FROM ? attn__min32(span + (at & 1), spans_of(w)) : span;
}

/* An item has one unit even without keys: somebody has to write its results. */
DEVICE int32_t units_of(const walk &w) { return attn__max32(1, w.tiles); }

/* The list's next sequence. The lengths of most batches are in memory; where they are all alike they are not. */
DEVICE void see_sequence(const attn_cuda_args &a, walk &w, int32_t b) {
    if (a.p.flags & ATTN_OWN_LENGTHS) {
        w.s = sequence(a, b);
    } else {
        w.s = {};
        w.s.b = w.s.slot = b;
        w.s.sq = a.p.max_q;
        w.s.sk = w.s.used = a.p.max_kv;
    }
    w.head = w.block = 0;
    w.from = w.to = w.first = w.tiles = 0;
    w.blocks = w.s.sq > ATTN_CUDA_SPLIT_ROWS ? 0 : attn__max32(1, (w.s.sq * a.group + ROWS - 1) / ROWS);
    if (w.s.sq == 0) return;
    const attn_mask mask = attn__seq_mask(&a.p, &w.s);
    attn__mask_rows(&mask, 0, w.s.sq, &w.from, &w.to);
    if (w.from >= w.to) w.from = w.to = 0;
    w.first = w.from / SPAN;
    if (PAIRS_FROM && w.first >= PAIRS_FROM) w.first &= ~1;
    w.tiles = (w.to - w.first * SPAN + BN - 1) / BN;
}

/* Units of a sequence. */
DEVICE int64_t work_of(const attn_cuda_args &a, const walk &w) { return (int64_t)units_of(w) * w.blocks * a.p.heads_kv; }

/* From the item at hand on, the first of which the block has a part. Is there one? */
DEVICE bool find_part(const attn_cuda_args &a, walk &w, const share &mine) {
    for (;;) {
        if (w.blocks) {
            const int64_t from = mine.from - w.before, to = mine.to - w.before;
            if (to <= 0) return false;
            const int32_t spans = spans_of(w);
            w.span = from <= 0 ? 0 : span_from(w, from);
            w.span_end = to >= (int64_t)spans * SPAN_TILES ? spans : span_from(w, to);
            if (w.span < w.span_end) return true;
            w.before += units_of(w);
            if (++w.block < w.blocks) continue;
            w.block = 0;
            if (++w.head < a.p.heads_kv) continue;
        }
        if (w.s.b + 1 >= a.p.batch) return false;
        see_sequence(a, w, w.s.b + 1);
    }
}

/* The warp's next part: its first lane finds it. Is there one? */
DEVICE bool next_part(const attn_cuda_args &a, walk &warps, const share &mine) {
    bool found = false;
    __syncwarp(); /* nobody reads the part before any more */
    if ((threadIdx.x & 31) == 0) {
        walk w = warps;
        w.span = w.span_end;
        if (w.span >= spans_of(w)) { /* otherwise the rest is the next block's */
            w.before += units_of(w);
            if (++w.block >= w.blocks) {
                w.block = 0;
                if (++w.head >= a.p.heads_kv) w.blocks = 0; /* through with it */
            }
            found = find_part(a, w, mine);
        }
        warps = w;
    }
    __syncwarp();
    return __any_sync(~0u, found);
}

/*
 * Counts the work of all sequences, and finds that with which the block begins. A thread has some that follow each other. Is there
 * anything to do?
 */
DEVICE bool start_walk(const attn_cuda_args &a, list_notes &notes, walk &w) {
    share mine;
    const int32_t lane = (int32_t)threadIdx.x & 31, warp = (int32_t)threadIdx.x >> 5, batch = a.p.batch;
    int64_t before = 0;
    int32_t b = 0;
    if ((a.p.flags & ATTN_OWN_LENGTHS) && batch > 1) {
        const int32_t each = (batch + THREADS - 1) / THREADS, first = attn__min32((int32_t)threadIdx.x * each, batch);
        const int32_t end = attn__min32(first + each, batch);
        int64_t own = 0;
        for (b = first; b < end; b++) {
            see_sequence(a, w, b);
            own += work_of(a, w);
        }
        uint64_t sum = (uint64_t)own; /* of the lanes up to this one */
        for (int by = 1; by < 32; by *= 2) {
            const uint64_t others = __shfl_sync(~0u, sum, (lane - by) & 31);
            if (lane >= by) sum += others;
        }
        if (lane == 31) notes.sums[warp] = (int64_t)sum;
        __syncthreads();
        before = (int64_t)sum - own;
        mine.all = 0;
        for (int n = 0; n < WARPS; n++) {
            if (n < warp) before += notes.sums[n];
            mine.all += notes.sums[n];
        }
        mine.from = share_of(mine.all, blockIdx.x);
        if (before <= mine.from && mine.from < before + own) { /* one thread of the block, if there is work at all */
            for (b = first; b < end; b++) {
                see_sequence(a, w, b);
                if (mine.from < before + work_of(a, w)) break;
                before += work_of(a, w);
            }
            notes.b = b;
            notes.before = before;
        }
        __syncthreads();
        if (mine.from >= mine.all) return false;
        b = notes.b;
        before = notes.before;
        see_sequence(a, w, b);
    } else { /* all alike, or one alone: sequences are items of another kind */
        see_sequence(a, w, 0);
        const int64_t each = work_of(a, w);
        mine.all = each * batch;
        mine.from = share_of(mine.all, blockIdx.x);
        if (mine.from >= mine.all) return false;
        b = (int32_t)quotient(mine.from, each);
        before = b * each;
        if (batch > 1) w.s.b = w.s.slot = b;
    }
    mine.to = share_of(mine.all, blockIdx.x + 1);
    const uint32_t item = (uint32_t)quotient(mine.from - before, units_of(w));
    w.before = before + (int64_t)item * units_of(w);
    w.head = (int32_t)(item / (uint32_t)w.blocks);
    w.block = (int32_t)(item % (uint32_t)w.blocks);
    if (threadIdx.x == 0) notes.mine = mine; /* the caller has a barrier before anybody asks */
    return find_part(a, w, mine);
}

/* o = 0 and lse = -inf for rows that are padding, where no other kernel comes by. */
static __device__ __noinline__ void fill_padding(const attn_cuda_args &a, int32_t b, int32_t head, int32_t from,
                                                 int32_t threads) {
    const int32_t group = a.group;
    attn_seq s = {};
    s.b = b;
    for (int32_t i = from; i < a.p.max_q; i++)
        for (int32_t h = head * group; h < head * group + group; h++) {
            const int64_t at = attn__q_offset(&a.p, &a.f.o, &s, i, h);
            for (int32_t x = threadIdx.x; x < a.p.dim_v; x += threads) attn__store(a.p.out_dtype, a.f.o.data, at + x, 0);
            if (threadIdx.x == 0 && a.f.lse) ((float *)a.f.lse)[attn__lse_index(&a.p, &s, i, h)] = -INFINITY;
        }
}

#endif
