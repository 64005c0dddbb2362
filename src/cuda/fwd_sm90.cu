/*
 * Forward attention on Hopper: wgmma products, tiles by the tensor memory accelerator. One line FWD90 of variants.def is one build
 * of this file.
 *
 * A block stays on its multiprocessor and works through places (64 rows for each of its consumers, one head) until none is left.
 * Its warpgroups are the consumers, which multiply, and behind them the producers, four warps that see to it that they can:
 *
 *   loader     fetches Q, K and V, tile after tile, as buffers become empty
 *   scheduler  takes places ahead of time and tells of them (in plain lines that is so little that everybody does it)
 *   hands      run errands for the loader: what the accelerator cannot describe (pages, odd addresses) is gathered piece by piece, and
 *              V is cleaned where that turns out to be needed
 *
 * They meet at barriers in shared memory, a pair for each buffer: `full` (the bytes are there) and `empty` (every consumer is
 * done with it). Per tile of keys a consumer does
 *
 *     wait for K(n), take its turn
 *     S = Q K(n)^T             begins
 *     wait for V(n + 1)
 *     O += P V(n + 1)          begins; P is that of the tile before
 *     pass the turn on
 *     wait for S               K(n) is empty; LATE_TURN: and only then the turn is passed on
 *     softmax of S             beneath the second product, and beneath those of the other consumers
 *     wait for O               V(n + 1) is empty; O follows where a maximum moved; P is packed
 *
 * Turns (named barriers) keep consumers out of step: while one is at its softmax another one's products have the tensor cores.
 * The results leave through shared memory: where there are two buffers for Q, through the consumer's own rows of it; where there
 * is one, which the next place's Q wants early, through a buffer of K and V that the loader lends. All lines of a dtype and dim give
 * the same bits.
 *
 * A masked pair has P = 0, and 0 * V is 0, unless V is an infinity or NaN. Then O is not finite, and the block does the places of this
 * pass once more, carefully: V of tiles with a mask goes through the hands, which take out what is not finite, and it is added in
 * the end to the rows that do see it. The first time pays no more than a look at O.
 *
 * Numbers in shared memory that threads write: whoever has read them arrives by itself at the barrier that lets them be written
 * again. That is more arrivals than are needed, but then racecheck can follow.
 */
#include <float.h>
#include <stddef.h>

#include "score.cuh"
#include "wgmma.cuh"

/* ---- the line of the table ---- */

#define PIECE(...)
#define BWD(...)
#define BWD90(...)
#define FWD(...)
#define FWD90(name, dtype, dim, mostv, dimv, bn, consumers, stages, qbuf, takes)                                           \
    enum {                                                                                                                 \
        name##_DTYPE = ATTN_##dtype,                                                                                       \
        name##_DIM = dim,                                                                                                  \
        name##_DV = dimv,                                                                                                  \
        name##_SLICED = mostv > dimv,                                                                                      \
        name##_BN = bn,                                                                                                    \
        name##_CONSUMERS = consumers,                                                                                      \
        name##_STAGES = stages,                                                                                            \
        name##_QBUF = qbuf,                                                                                                \
        name##_TAKES = ATTN_TAKES_##takes                                                                                  \
    };
#ifndef VARIANTS
#define VARIANTS "variants.def"
#endif
#include VARIANTS
#undef PIECE
#undef FWD
#undef FWD90
#undef BWD
#undef BWD90
#define K_(variant, field) variant##_##field
#define K__(variant, field) K_(variant, field)
#define K(field) K__(VARIANT, field)

enum {
    DTYPE = K(DTYPE),
    DIM = K(DIM),
    DV = K(DV),
    SLICED = K(SLICED), /* of a wider V a block computes as many dims */
    BN = K(BN),
    CONSUMERS = K(CONSUMERS),
    STAGES = K(STAGES),
    QBUF = K(QBUF),
    OWN = K(TAKES) >= ATTN_TAKES_OWN, /* sequences and addresses of their own: the scheduler tells of places */
    ALL = K(TAKES) == ATTN_TAKES_ALL,
    BM = 64 * CONSUMERS,
    THREADS = 128 * CONSUMERS, /* that work on rows */
    MT = 1,
    NT = BN / 8,
    DT = DV / 8,
    PV_STEPS = BN / 16,
    EB = 2,
    PER_CHUNK = 8,
    QK_BLOCKS = (DIM + ATTN_MAP_COLS - 1) / ATTN_MAP_COLS,
    V_BLOCKS = (DV + ATTN_MAP_COLS - 1) / ATTN_MAP_COLS,
    ROW = 128, /* bytes of a row of a block of columns */
    Q_BYTES = BM * QK_BLOCKS * ROW,
    K_BYTES = BN * QK_BLOCKS * ROW,
    V_BYTES = BN * V_BLOCKS * ROW,
    TILES = 2 * STAGES, /* notes on tiles */
    ERRANDS = 4,
    PLACES = 2,
    HANDS = OWN ? 64 : 96,                  /* threads */
    LOTS = 128,                             /* of a pass */
    HAS_STEPS = ALL && DV <= 128,           /* code for each kind of tile: with a large O registers would run out */
    HAS_ROOM = HAS_STEPS && CONSUMERS == 2, /* registers for a bias that comes before S is there */
    LATE_TURN =
        ALL ? CONSUMERS == 2 : !OWN && CONSUMERS == 3, /* passed on when S is there, not when its product is begun */
    OUT_BYTES = 64 * V_BLOCKS * ROW,                   /* of a consumer */
    /* O leaves through its rows of Q, or, where the next Q wants these early, buffers of K and V, if it fits, or one of its own */
    FITS = OUT_BYTES <= K_BYTES && (CONSUMERS - 1) * OUT_BYTES <= V_BYTES,
    THROUGH_Q = QBUF == 2,
    LENDS = !THROUGH_Q && FITS,
    HAS_OUT = !THROUGH_Q && !FITS,
    OUT_ROWS = THROUGH_Q ? BM : 64,
    /* Measured, and so only where they pay. Consumers pass over the first tiles of a place that the rows of others alone see. */
    SKIPS = CONSUMERS == 3,
    WHOLE = OWN,                                   /* one request brings all blocks of columns of a tile, if they lie so */
    AHEAD = QBUF == 1 || (!OWN && CONSUMERS == 3), /* K of a tile is fetched before V of the one before it */
    /* 65,536 registers, 512 for each lane of four warps: some for the producers, the rest for the consumers */
    PRODUCER_REGISTERS = CONSUMERS == 3 ? 32
                         : DV > 192     ? 40
                                        : 56,
    CONSUMER_REGISTERS = ((CONSUMERS == 3 ? 512 : 504) - PRODUCER_REGISTERS) / CONSUMERS / 8 * 8
};
static_assert(!THROUGH_Q || DV <= DIM, "O has no way out");
static_assert(HAS_OUT == (QBUF == 1 && DV > DIM), "ATTN_HOPPER_BYTES counts otherwise");
enum { BARRIER_TURN = 1, BARRIER_STORE = 4, BARRIER_HANDS = 7 }; /* numbers of named barriers; as many as consumers */

#include "rows.cuh"

#include "product.cuh"

DEVICE void begin_qk(float s[MT][NT][4], uint64_t q, uint64_t k) {
    if (ALL)
        q = (q >> 32) << 32 | (uint32_t)here((int)q); /* else its steps are worked out ahead of the loop, and spilled */
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < DIM / 16; c++) {
        const uint32_t to_q = c / 4 * BM * ROW + c % 4 * 32, to_k = c / 4 * BN * ROW + c % 4 * 32;
        product_ss(BN, s[0][0], wgmma_step(q, 1, to_q), wgmma_step(k, 1, to_k), c > 0);
    }
    wgmma_commit_group();
}

DEVICE void begin_pv(float o[MT][DT][4], uint32_t p[PV_STEPS][MT][4], uint64_t v) {
    wgmma_fence();
#pragma unroll
    for (int ks = 0; ks < PV_STEPS; ks++) product_rs(DV, o[0][0], p[ks][0], wgmma_step(v, ks, 16 * ROW), 1);
    wgmma_commit_group();
}

/* ---- shared memory: Q, K, V, each in blocks of 64 columns of all rows; barriers; what producers tell ---- */

/* Which of several buffers is at hand, and the parity of its `full` barrier: it changes at every round. */
typedef struct ring {
    uint32_t at, parity;
} ring;
DEVICE void turn_ring(ring &r, uint32_t size) {
    if (++r.at == size) {
        r.at = 0;
        r.parity ^= 1;
    }
}
/* Where it was before that. */
DEVICE ring turned_back(const ring &r, uint32_t size) {
    return r.at ? ring{r.at - 1, r.parity} : ring{size - 1, r.parity ^ 1};
}
/* Where the notes on that tile of K are: twice as many. */
DEVICE uint32_t tile_at(const ring &k) { return k.at + k.parity * STAGES; }
/* Where it is after so many turns; size: a power of 2. */
DEVICE ring ring_at(uint32_t turns, uint32_t size) { return {turns % size, turns / size & 1}; }

typedef struct tile {
    int32_t n;
    bool partial; /* has a mask */
    bool last;    /* of its place */
} tile;
/* All of it in one register, where they are scarce. */
DEVICE int32_t tile_word(const tile &t) { return (int32_t)((uint32_t)t.n << 2 | (uint32_t)t.partial << 1 | t.last); }
DEVICE tile tile_of(int32_t word) { return {word >> 2, (word & 2) != 0, (word & 1) != 0}; }
DEVICE tile packed_tile(const tile &t) { return ALL ? tile_of(here(tile_word(t))) : t; }

enum { NO_TILE = -4 }; /* the word of tile -1 */

/* Tiles top, top - 1, ... top - 31 of a place: which are wanted, which have a mask. Bit 0 is top. */
typedef struct outlook {
    int32_t top;
    uint32_t wanted, partial;
} outlook;

enum { ERRAND_END = 0, ERRAND_CLEAN, ERRAND_Q, ERRAND_K, ERRAND_V };
typedef struct errand {
    int32_t what;
    int32_t clean;          /* V: CLEAN_... */
    uint32_t to, full;      /* the buffer and its barrier */
    uint32_t number;        /* of the place */
    uint32_t empty, parity; /* what the loader has waited for, before it wrote into the buffer */
    ring q;                 /* and before it wrote Q */
    int32_t n;              /* tile of keys */
    uint32_t place;         /* where that is told; consumers do not let go of it before the errand is done */
} errand;
enum { CLEAN_NOTHING, CLEAN_END, CLEAN_ALL }; /* V past the end of the sequence; whatever is not finite besides */

/* The scheduler's words. */
/* Row tiles of a sequence, or chunks, and the number of its last place and one. */
typedef struct tally {
    int32_t slots;
    uint32_t end;
} tally;
enum { TELL_PLACE, TELL_END, TELL_LAST }; /* a place; the pass is at its end; there is no other one */
typedef struct word {
    int32_t what;
    uint32_t number, pass; /* of the place, counted over all passes */
    int32_t careful;       /* for the second time */
} word;

typedef struct shared_notes {
    uint64_t q_full[QBUF], q_empty[QBUF], k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
    uint64_t errand_full[ERRANDS], errand_empty[ERRANDS], place_full[PLACES], place_empty[PLACES], pass;
    errand errands[ERRANDS];
    int32_t tiles[TILES];  /* tile_word */
    uint32_t dirty[2];     /* number of the last place, even or odd, some V of which was not finite: one more than that */
    uint32_t again[2];     /* the same of passes, some O of which was not finite: they are done again */
    int32_t is_seen[QBUF]; /* does any row of the place see any key? */
    uint32_t lots[LOTS];   /* the places that the scheduler took in this pass */
    word told[PLACES];
    outlook ahead;  /* the loader's */
    uint32_t given; /* errands, by the loader */
    word next;      /* that the scheduler will say */
    uint32_t lot;   /* the scheduler's next place in this pass, and where that is */
    spot where;
    uint32_t said;   /* places and ends that it has told */
    int32_t tally_b; /* where it stands: find_next */
    tally tallies[32];
    int32_t start;         /* the first sequence at which it stood when the pass began ... */
    uint32_t start_before; /* ... and the places before that: numbers only grow */
    tile_place
        places[PLACES > CONSUMERS ? (int)PLACES : (int)CONSUMERS]; /* plain lines: of a consumer, when it needs one ... */
    const attn_cuda_args *args; /* ... and where these are, which no register holds for that */
} shared_notes;
static_assert(sizeof(shared_notes) <= ATTN_HOPPER_NOTES, "give the notes more room");

typedef struct buffers {
    uint32_t q, out, k, v;
    shared_notes *notes;
} buffers;
#define BARRIER(b, field, n) ((b).v + (uint32_t)(STAGES * V_BYTES + offsetof(shared_notes, field) + 8 * (n)))

DEVICE buffers find_buffers(uint8_t *shared) {
    buffers b;
    b.q = shared_start();
    b.out = b.q + QBUF * Q_BYTES;
    b.k = b.out + HAS_OUT * CONSUMERS * OUT_BYTES;
    b.v = b.k + STAGES * K_BYTES;
    b.notes = (shared_notes *)shared_pointer(b.v + STAGES * V_BYTES);
    return b;
}

DEVICE void make_barriers(const buffers &b) {
    for (int n = 0; n < QBUF; n++) {
        mbarrier_init(BARRIER(b, q_full, n), HANDS);
        mbarrier_init(BARRIER(b, q_empty, n), THREADS);
        b.notes->is_seen[n] = 0;
    }
    for (int n = 0; n < STAGES; n++) {
        mbarrier_init(BARRIER(b, k_full, n), HANDS);
        mbarrier_init(BARRIER(b, v_full, n), HANDS);
        mbarrier_init(BARRIER(b, k_empty, n), THREADS);
        mbarrier_init(BARRIER(b, v_empty, n), THREADS);
    }
    for (int n = 0; n < ERRANDS; n++) {
        mbarrier_init(BARRIER(b, errand_full, n), 1);
        mbarrier_init(BARRIER(b, errand_empty, n), HANDS);
    }
    for (int n = 0; n < PLACES; n++) {
        mbarrier_init(BARRIER(b, place_full, n), 1);
        mbarrier_init(BARRIER(b, place_empty, n), THREADS + 32);
    }
    mbarrier_init(BARRIER(b, pass, 0), THREADS + (OWN ? 64 : 32));
    for (int n = 0; n < 2; n++) b.notes->dirty[n] = b.notes->again[n] = 0;
    b.notes->next = {};
    b.notes->given = b.notes->lot = b.notes->said = b.notes->start_before = 0;
    b.notes->start = 0;
    fence_mbarrier_init();
}

#include "places.cuh"

#include "loader.cuh"

/* ---- the consumers ---- */

/* What a consumer holds. */
typedef struct consumer {
    int number;
    ring q, k, v;
    int32_t n_first;          /* tile of keys, the last one of the place */
    int32_t n_last;           /* the first that these rows see; -1: none */
    int32_t all_from, all_to; /* keys that all of its rows see */
    bool has_huge;
    uint64_t of_q, of_k, of_v; /* operands, in the buffers at hand */
} consumer;

DEVICE bool is_first_thread(void) { return (thread_here() & 127) == 0; }
DEVICE void take_turn(const consumer &me) { bar_sync(BARRIER_TURN + me.number, 256); }
DEVICE void pass_turn(const consumer &me) { bar_arrive(BARRIER_TURN + (me.number + 1) % CONSUMERS, 256); }

/* Without features it is an argument of the kernel. */
DEVICE float scale_of(const attn_cuda_args &a, const tile_place &at) { return ALL ? at.scale : a.scale_log2; }

/* Scores become those of the features and the mask, and m and l follow their maximum; O has yet to, by `factor`, if the answer is yes. */
DEVICE bool follow_scores(const attn_cuda_args &a, const tile_place &at, bool &has_huge, float s[MT][NT][4], float m[MT][2],
                          float l[MT][2], float factor[MT][2], tile_extras &x, tile t, int kind) {
    float most[MT][2];
    scores(a, at, kind, t.n, s, x);
    if ((kind == STEP_ANY || kind == STEP_MASK) && agrees(t.partial)) mask_scores(a, at, t.n, s, x);
    bool raise = find_maximum(most, s, m);
    if (raise) has_huge = raise_maximum(factor, most, m, l, scale_of(a, at));
    return raise;
}

/* Exponentials of S, in place. has_huge: some maximum of the warp may be; in lines for every feature no register is left that would know. */
DEVICE void exponentials(float scale, bool has_huge, float s[MT][NT][4], float m[MT][2], float l[MT][2]) {
    float less[MT][2];
    if (ALL) has_huge = says(fmaxf(fabsf(__fmul_rn(m[0][0], scale)), fabsf(__fmul_rn(m[0][1], scale))) > HUGE_SCORE);
    subtract_maximum(less, s, m, scale, has_huge, 0, NT);
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float *y = &s[0][nt][2 * half];
            y[0] = ex2_approx(__fmaf_rn(y[0], scale, -less[0][half]));
            y[1] = ex2_approx(__fmaf_rn(y[1], scale, -less[0][half]));
            l[0][half] += y[0] + y[1];
        }
}

DEVICE void pack_p(const attn_cuda_args &a, uint32_t p[PV_STEPS][MT][4], float s[MT][NT][4], const tile_extras &x,
                   int kind) {
#pragma unroll
    for (int ks = 0; ks < PV_STEPS; ks++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            p[ks][0][e] = pack(s[0][2 * ks + e / 2][e % 2 * 2], s[0][2 * ks + e / 2][e % 2 * 2 + 1]);
    if (!does(STEP_DROP, kind, drops(a))) return;
#pragma unroll
    for (int ks = 0; ks < PV_STEPS; ks++) drop(x, p[ks][0], 0, ks);
}

/* Is a key of tile n hidden from one of the consumer's rows, FlashMask aside? */
DEVICE bool hides(const consumer &me, int32_t n) { return n * BN < me.all_from || n * BN + BN > me.all_to; }

/* The tile at hand: without FlashMask they simply come one after the other. */
DEVICE tile tile_here(const attn_cuda_args &a, const buffers &b, const consumer &me, int32_t n) {
    if (ALL && a.ranges) { /* one lane of each warp reads it, that which arrives in let_go_of_k */
        int32_t word = 0;
        if ((threadIdx.x & 31) == 0) word = b.notes->tiles[tile_at(me.k)];
        return tile_of(__shfl_sync(~0u, word, 0));
    }
    return {n, hides(me, n), n == me.n_first};
}

DEVICE void wait_for_k(const buffers &b, const consumer &me) {
    mbarrier_wait_parity(BARRIER(b, k_full, me.k.at), me.k.parity);
}
DEVICE void wait_for_v(const buffers &b, const consumer &me) {
    mbarrier_wait_parity(BARRIER(b, v_full, me.v.at), me.v.parity);
}
DEVICE void turn_k(const buffers &b, consumer &me) {
    turn_ring(me.k, STAGES);
    me.of_k = me.k.at ? wgmma_step(me.of_k, 1, K_BYTES) : wgmma_k_major(b.k);
}
DEVICE void turn_v(const buffers &b, consumer &me) {
    turn_ring(me.v, STAGES);
    me.of_v = me.v.at ? wgmma_step(me.of_v, 1, V_BYTES) : wgmma_mn_major(b.v, BN * ROW);
}
/* A barrier that waits for all threads of the consumers: the first for all; where shared memory was read a lane for its warp, or each. */
DEVICE void arrive_for(uint32_t empty, int threads) {
    if (threadIdx.x % threads == 0) mbarrier_arrive_count(empty, threads);
}
DEVICE void arrive_by_warps(uint32_t empty) { arrive_for(empty, ALL ? 32 : 128); }
DEVICE void arrive_by_threads(uint32_t empty) { arrive_for(empty, OWN ? 1 : 128); }
DEVICE void let_go_of_k(const buffers &b, consumer &me, bool last) {
    arrive_by_warps(BARRIER(b, k_empty, me.k.at));
    if (!THROUGH_Q && last) arrive_by_threads(BARRIER(b, q_empty, me.q.at));
    turn_k(b, me);
}
DEVICE void let_go_of_v(const buffers &b, consumer &me) {
    arrive_by_warps(BARRIER(b, v_empty, me.v.at));
    turn_v(b, me);
}
/* What O has left through. */
DEVICE void let_go_of_out(const buffers &b, const consumer &me) {
    if (LENDS) {
        arrive_by_threads(BARRIER(b, k_empty, me.k.at));
        arrive_by_threads(BARRIER(b, v_empty, me.v.at));
    } else if (THROUGH_Q) {
        arrive_by_threads(BARRIER(b, q_empty, me.q.at));
    }
}

/* S of tile t and P V of the one before it. kind: STEP_..., a constant where this is called. */
DEVICE void step(const attn_cuda_args &a, const tile_place &at, consumer &me, const buffers &b, float o[MT][DT][4],
                 float s[MT][NT][4], uint32_t p[PV_STEPS][MT][4], float m[MT][2], float l[MT][2], tile t, int kind) {
    float factor[MT][2];
    tile_extras x = {};
    take_turn(me);
    begin_qk(s, me.of_q, me.of_k);
    wait_for_v(b, me);
    begin_pv(o, p, me.of_v);
    if (!LATE_TURN) pass_turn(me);
    if (ALL) make_extras(a, at, kind, t.n, x);
    wgmma_wait_group(1);
    if (LATE_TURN) pass_turn(me);
    let_go_of_k(b, me, agrees(t.last));
    bool raise = follow_scores(a, at, me.has_huge, s, m, l, factor, x, t, kind);
    exponentials(scale_of(a, at), me.has_huge, s, m, l);
    wgmma_wait_group(0);
    let_go_of_v(b, me);
    if (raise) rescale(o, factor);
    pack_p(a, p, s, x, kind);
}

/* S of the first tile of a place. */
DEVICE void first_step(const attn_cuda_args &a, const tile_place &at, consumer &me, const buffers &b, float s[MT][NT][4],
                       uint32_t p[PV_STEPS][MT][4], float m[MT][2], float l[MT][2], tile t, int kind) {
    float factor[MT][2];
    tile_extras x = {};
    take_turn(me);
    begin_qk(s, me.of_q, me.of_k);
    pass_turn(me);
    if (ALL) make_extras(a, at, kind, t.n, x);
    wgmma_wait_group(0);
    let_go_of_k(b, me, agrees(t.last));
    follow_scores(a, at, me.has_huge, s, m, l, factor, x, t, kind);
    exponentials(scale_of(a, at), me.has_huge, s, m, l);
    pack_p(a, p, s, x, kind);
}

/* A tile for the rows of other consumers. */
DEVICE void pass_over(const buffers &b, consumer &me, tile t) {
    take_turn(me);
    pass_turn(me);
    let_go_of_k(b, me, agrees(t.last));
    wait_for_v(b, me);
    let_go_of_v(b, me);
}

/* Each kind has code of its own, that does not jump over what others need. */
#define STEP_IF(which)                                                                                                     \
    if ((HAS_STEPS || which == STEP_PLAIN) && agrees(kind == which))                                                       \
        step(a, at, me, b, o, s, p, m, l, t, which);                                                                       \
    else
/* All tiles of one place. Says whether V held something that is not finite. */
DEVICE bool walk(const attn_cuda_args &a, const tile_place &at, consumer &me, const buffers &b, float o[MT][DT][4],
                 float m[MT][2], float l[MT][2], const stroll &where) {
    float s[MT][NT][4];
    uint32_t p[PV_STEPS][MT][4];
    const int masked = !ALL || at.step == STEP_PLAIN ? (int)STEP_MASK : (int)STEP_ANY;
    wait_for_k(b, me);
    tile t = tile_here(a, b, me, at.n_last);
    while (SKIPS && says(t.n > me.n_last)) {
        pass_over(b, me, t);
        if (agrees(t.last)) return false;
        wait_for_k(b, me);
        t = tile_here(a, b, me, t.n - 1);
    }
    if (HAS_STEPS && agrees(masked == STEP_MASK))
        first_step(a, at, me, b, s, p, m, l, t, STEP_MASK);
    else
        first_step(a, at, me, b, s, p, m, l, t, STEP_ANY);
    while (!agrees(t.last)) {
        wait_for_k(b, me);
        t = packed_tile(tile_here(a, b, me, t.n - 1));
        const int kind = t.partial ? masked : ALL ? (int)at.step : (int)STEP_PLAIN;
        STEP_IF(STEP_PLAIN)
        STEP_IF(STEP_MASK)
        STEP_IF(STEP_CAP)
        STEP_IF(STEP_ALIBI)
        STEP_IF(STEP_BIAS)
        STEP_IF(STEP_DROP) step(a, at, me, b, o, s, p, m, l, t, STEP_ANY);
    }
    wait_for_v(b, me);
    begin_pv(o, p, me.of_v);
    wgmma_wait_group(0);
    const uint32_t number = number_at(b, where);
    const bool dirty = b.notes->dirty[number & 1] == number + 1;
    let_go_of_v(b, me);
    return dirty;
}

/* ---- the end of a place ---- */

/*
 * Eight rows from row i on, element by element: partial results, other dtypes, odd addresses. As floats they are in the 16 rows
 * that are the warp's, so that no register of O is touched here, where ptxas does not see that the products are complete.
 */
static __device__ __noinline__ void store_rows(const attn_cuda_args &a, const tile_place &at, uint32_t rows, int32_t i0) {
    const attn_dtype dtype = at.split ? ATTN_F32 : a.p.out_dtype;
    void *const data = at.split ? a.part_o : a.f.o.data;
    for (int32_t i = i0; i < attn__min32(i0 + 8, at.s.sq); i++) {
        const int64_t to =
            at.split ? part_index(a, at.s, i, at.h, at.chunk) * a.p.dim_v : attn__q_offset(&a.p, &a.f.o, &at.s, i, at.h);
        for (int32_t c = threadIdx.x & 31; c < attn__min32(DV, a.p.dim_v - at.dv0); c += 32)
            store_number(dtype, data, to + at.dv0 + c,
                         __uint_as_float(ld_shared_b32(rows + c / 64 * OUT_ROWS * ROW + (i - i0) * 2 * ROW + c % 64 * 4)));
    }
}

/* O from registers to memory, through shared memory: rows of Q, or a buffer that is lent. */
DEVICE void store_o(const attn_cuda_args90 &x, const buffers &b, const tile_place &at, const consumer &me,
                    float o[MT][DT][4]) {
    const attn_cuda_args &a = x.a;
    const int lane = threadIdx.x & 31, first = (threadIdx.x >> 5 & 3) * 16, row0 = me.number * 64;
    const uint32_t out = THROUGH_Q        ? b.q + me.q.at * Q_BYTES + row0 * ROW
                         : HAS_OUT        ? b.out + me.number * OUT_BYTES
                         : me.number == 0 ? b.k + me.k.at * K_BYTES
                                          : b.v + me.v.at * V_BYTES + (me.number - 1) * OUT_BYTES;
    if (LENDS) { /* the loader has let go of both */
        wait_for_k(b, me);
        wait_for_v(b, me);
    }
    if (HAS_OUT) { /* what left last time has been read */
        if (is_first_thread()) cp_async_bulk_wait_group_read();
        bar_sync(BARRIER_STORE + me.number, 128);
    }
    if (OWN && (at.split || !a.vector_ok || a.p.out_dtype != (attn_dtype)DTYPE || a.p.dim_v % PER_CHUNK)) {
        const uint32_t rows = out + first * ROW;
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int x = 0; x < DT * 2; x++)
                st_shared_b32(rows + x / 16 * OUT_ROWS * ROW + (lane >> 2) * 2 * ROW +
                                  (x / 2 % 8 * 8 + (lane & 3) * 2 + x % 2) * 4,
                              __float_as_uint(o[0][x / 2][2 * half + x % 2]));
            __syncwarp();
            store_rows(a, at, rows, at.row + row0 + first + half * 8);
            __syncwarp();
        }
        fence_proxy_async();
        let_go_of_out(b, me);
        return;
    }
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int dt = 0; dt < DT; dt++)
            st_shared_b32(piece_at(out, OUT_ROWS, first + half * 8 + (lane >> 2), dt) + (lane & 3) * 4,
                          pack(o[0][dt][2 * half], o[0][dt][2 * half + 1]));
    if (!OWN || ((a.tma & ATTN_TMA_O) && row0 + 64 <= at.rows)) {
        const bool packed = a.p.flags & ATTN_VARLEN_Q;
        fence_proxy_async();
        bar_sync(BARRIER_STORE + me.number, 128);
        if (is_first_thread()) {
#pragma unroll 1
            for (int c = 0; c < V_BLOCKS; c++)
                cp_async_bulk_tensor_5d_store(&x.o, out + c * OUT_ROWS * ROW, (SLICED ? at.dv0 : 0) + c * ATTN_MAP_COLS,
                                              (int)(packed ? at.s.q_row : 0) + at.row + row0, 0, at.h, packed ? 0 : at.s.b);
            cp_async_bulk_commit_group();
            if (!HAS_OUT) cp_async_bulk_wait_group_read();
        }
        let_go_of_out(b, me);
        return;
    }
    __syncwarp();
#pragma unroll 1
    for (int n = lane; n < 16 * V_BLOCKS * 8; n += 32) {
        int row = first + n / (V_BLOCKS * 8), c = n % (V_BLOCKS * 8);
        uint4 y = ld_shared_v4(piece_at(out, OUT_ROWS, row, c));
        if (row0 + row < at.rows && at.dv0 + c * PER_CHUNK < a.p.dim_v)
            *(uint4 *)((uint8_t *)a.f.o.data +
                       (attn__q_offset(&a.p, &a.f.o, &at.s, at.row + row0 + row, at.h) + at.dv0 + c * PER_CHUNK) * EB) = y;
    }
    fence_proxy_async(); /* what comes next comes from the accelerator */
    let_go_of_out(b, me);
}

/*
 * What clean_v took out of V, added to the results of those rows that see it: such a term is p * v = v for any p > 0. Rare, so slow: the
 * threads of a consumer stand along the columns, and look at V in memory again.
 */
static __device__ __noinline__ void add_nonfinite(const attn_cuda_args &a, const tile_place &at) {
    const int32_t row0 = at.row + (thread_here() & ~127) / 2, rows = attn__min32(at.row + at.rows, row0 + 64);
    const attn_dtype dtype = at.split ? ATTN_F32 : a.p.out_dtype;
    void *const data = at.split ? a.part_o : a.f.o.data;
#pragma unroll 1
    for (int32_t j = at.n_first * BN; j < attn__min32(at.s.sk, (at.n_last + 1) * BN); j++)
#pragma unroll 1
        for (int32_t c = at.dv0 + (thread_here() & 127); c < attn__min32(at.dv0 + DV, a.p.dim_v); c += 128) {
            const int64_t from = cache_offset(a, a.f.v, at.s, at.s.leftpad + j, at.kv_head) + c;
            const float v = (float)attn__load(a.p.kv_dtype, a.f.v.data, from) * at.o_factor;
            if (fabsf(v) < INFINITY || (CLIPS && (j < at.from || j >= at.to))) continue;
            const int32_t *flash = at.mask.vectors ? attn__flash_at(&a.p, &a.f, at.s.b, at.kv_head, j) : NULL;
#pragma unroll 1
            for (int32_t i = row0; i < rows; i++) {
                if (!attn__mask_allowed(&at.mask, i, j, flash)) continue;
                if (drops(a) && is_dropped(a, at, i, j)) continue;
                const int64_t to = c + (at.split ? part_index(a, at.s, i, at.h, at.chunk) * a.p.dim_v
                                                 : attn__q_offset(&a.p, &a.f.o, &at.s, i, at.h));
                store_number(dtype, data, to, attn__load_float(dtype, data, to) + v);
            }
        }
}

/* Does any of these numbers of the thread miss to be finite? Infinite sums of finite ones cost no more than time. */
DEVICE bool holds_nonfinite(float o[MT][DT][4]) {
    float sum[2] = {};
#pragma unroll
    for (int n = 0; n < DT * 4; n++) sum[n & 1] += fabsf(o[0][n / 4][n % 4]);
    return !(sum[0] + sum[1] < INFINITY);
}

/* May keys be masked by more than the end of the tensor, beyond which all is zero? */
DEVICE bool masks(const attn_cuda_args &a) { return OWN || (a.p.flags & (ATTN_CAUSAL | ATTN_WINDOW)); }

/* One place. */
DEVICE void work_at(const attn_cuda_args90 &x, const buffers &b, consumer &me, const stroll &s, const tile_place &at) {
    const attn_cuda_args &a = x.a;
    const int32_t row0 = at.row + me.number * 64;
    float o[MT][DT][4] = {}, m[MT][2] = {{at.least, at.least}}, l[MT][2] = {};
    bool dirty = false;
    me.has_huge = true;
    me.n_first = at.n_first;
    if (OWN) me.q = ring_at(number_at(b, s), QBUF);
    me.of_q = wgmma_k_major(b.q + me.q.at * Q_BYTES + (DV > 192 ? here(me.number) : me.number) * 64 * ROW);
    attn__mask_rows_all(&at.mask, row0, attn__min32(row0 + 64, at.s.sq), &me.all_from, &me.all_to);
    if (SKIPS) {
        int32_t from, to;
        attn__mask_rows(&at.mask, row0, attn__min32(row0 + 64, at.s.sq), &from, &to);
        me.n_last = to > from && row0 < at.s.sq ? (to - 1) / BN : -1;
    }
    if (OWN && CLIPS) {
        me.all_from = attn__max32(me.all_from, at.from);
        me.all_to = attn__min32(me.all_to, at.to);
    }
    mbarrier_wait_parity(BARRIER(b, q_full, me.q.at), me.q.parity);
    if (says(OWN ? b.notes->is_seen[me.q.at] : at.n_last >= 0))
        dirty = walk(a, at, me, b, o, m, l, s);
    else if (!THROUGH_Q) /* each for itself: nobody is to miss that Q was full */
        mbarrier_arrive(BARRIER(b, q_empty, me.q.at));
    if (OWN) me.q = ring_at(number_at(b, s), QBUF); /* read again: no register holds it meanwhile */
    if (masks(a) && !careful_at(b, s) && holds_nonfinite(o)) b.notes->again[pass_at(b, s) & 1] = pass_at(b, s) + 1;
    finish(a, at, o, m, l);
    store_o(x, b, at, me, o);
    if (LENDS) {
        turn_k(b, me);
        turn_v(b, me);
    }
    if (!OWN) turn_ring(me.q, QBUF);
    if (dirty) {
        tile_place &again = b.notes->places[me.number]; /* plain lines: what is in registers stays there */
        if (!OWN && is_first_thread()) plain_place(a, s.w, again);
        if (is_first_thread()) cp_async_bulk_wait_group();
        fence_proxy_async_global();
        bar_sync(BARRIER_STORE + me.number, 128);
        add_nonfinite(OWN ? a : *b.notes->args, OWN ? at : again);
    }
}

DEVICE void consume(const attn_cuda_args90 &x, const buffers &b) {
    const attn_cuda_args &a = x.a;
    consumer me = {};
    me.number = __shfl_sync(~0u, threadIdx.x >> 7, 0);
    me.of_k = wgmma_k_major(b.k);
    me.of_v = wgmma_mn_major(b.v, BN * ROW);
    if (me.number == CONSUMERS - 1) bar_arrive(BARRIER_TURN, 256); /* the first turn is the first consumer's */
    stroll s = start_stroll(a);
    tile_place own;
    do {
        for (; at_place(a, b, s, own); go_on(a, b, s)) work_at(x, b, me, s, PLACE(b, s, own));
        if (is_first_thread()) cp_async_bulk_wait_group(); /* before the same rows are stored again */
    } while (start_again(a, b, s));
}

KERNEL __launch_bounds__(THREADS + 128, 1) VARIANT(const __grid_constant__ attn_cuda_args90 x) {
    extern __shared__ __align__(1024) uint8_t shared[];
    const buffers b = find_buffers(shared);
    if (cvta_shared(shared) != shared_start()) __trap();
    if (threadIdx.x == 0) {
        make_barriers(b);
        b.notes->args = &x.a;
    }
    __syncthreads();
    if (threadIdx.x >= THREADS) {
        setmaxnreg_dec(PRODUCER_REGISTERS);
        if (threadIdx.x < THREADS + 32)
            load(x, b);
        else if (OWN && threadIdx.x < THREADS + 64)
            schedule(x.a, b);
        else
            run_errands(x.a, b);
    } else {
        setmaxnreg_inc(CONSUMER_REGISTERS);
        consume(x, b);
    }
}
