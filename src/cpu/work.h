/*
 * Work of the cpu backend, in integers: which query tiles and KV chunks there are, in which order, and what FlashMask says of
 * each column of tiles. The kernels (fwd.c, bwd.c) take it from here.
 *
 * Rules that the results depend on, and therefore never on batch, threads or workspace (C5):
 *   - key tiles begin at multiples of the tile's columns, counted from the sequence's key 0;
 *   - a sequence of at most ATTN_SPLIT_ROWS query rows is worked in chunks of ATTN_CHUNK keys, whose results are folded in
 *     order; whether the chunks run on one thread or on many is the plan's choice and changes nothing;
 *   - a sequence of at most ATTN_NARROW_ROWS rows, if it has more keys than that, is worked by other inner loops in the forward;
 *   - with ATTN_PRECISE_FEW such a sequence of float32 is worked in double, forward and backward, and a row of another is done
 *     again in double where its own probabilities say so (attn__mixed).
 */
#ifndef ATTN_CPU_WORK_H
#define ATTN_CPU_WORK_H

#include <math.h>
#include <stdatomic.h>

#include "../host.h"
#include "features.h"

enum {
    ATTN_TILE_ROWS = 64,   /* query rows of a tile, of every kernel */
    ATTN_TILE_COLS = 64,   /* keys of a tile */
    ATTN_STRIP_KEYS = 512, /* keys of a unit of the backward, at most (plan->strip_keys); a multiple of ATTN_TILE_COLS */
    ATTN_BF16_ROWS = 32,   /* query rows of a tile of fwd_bf16.c and bwd_bf16.c */
    ATTN_BF16_KEYS = 256,  /* keys that fwd_bf16.c works at once; a multiple of ATTN_TILE_COLS */
    ATTN_STRIP = 16,       /* the most query tiles that share a load of keys */
    ATTN_SPLIT_ROWS = 16,  /* at most so many rows: heads of a group share a tile, keys are worked in chunks */
    ATTN_NARROW_ROWS = 4,  /* at most so many: narrow, if there are more keys */
    ATTN_AHEAD =
        8, /* so many rows of k and v are asked for before they are read, as many as are worked at once; tile.c has exceptions */
    ATTN_CHUNK = 512,      /* keys of a chunk; a multiple of ATTN_TILE_COLS */
    ATTN_LEAST_SPLIT = 64, /* backward in parts: with fewer rows or keys by bwd.c; a tile, as FlashMask's documents are */
    ATTN_FLOAT_DIM = 64,   /* and float32 of no more dims, */
    ATTN_HALF_DIM = 16,    /* or f16 */
    ATTN_LEAST_KEYS = 4,   /* rows in parts that see no more keys are worked by fwd.c */
    ATTN_LARGE_LSE = 1024, /* a row of float32 or f16 with a larger one, either way: see attn__is_large */
    ATTN_FEW_KEYS = 16,    /* a row that weighs fewer keys is done in double: attn__mixed */
    ATTN_FEW_ROWS = 8      /* d_v of a key that fewer rows weigh is done in double */
};

/* plan->part of the cpu backend: where things are in the workspace. */
enum {
    CPU_UNITS,    /* attn_unit []: work over query rows */
    CPU_KV_UNITS, /* backward: attn_unit, work over keys */
    CPU_FLASH,    /* attn_flash_range [batch][flashmask_heads][tiles of max_kv] */
    CPU_SCRATCH,  /* [slots]: tiles of the threads */
    CPU_PARTIAL,  /* forward, split: [batch * heads_q * max_q][chunks][dim_v + 2] */
    CPU_ROWS,     /* backward: attn_row, as lse */
    CPU_D_Q       /* backward of more keys than a strip: d_q, unfinished, [as lse][dim_qk], in parts [2 dim_qk] */
};

/* What the backward knows of a row, whatever its number type. */
typedef struct attn_row {
    double lse;           /* -inf: no key. With it the p of float add up to 1 */
    double wide;          /* the same for those of double */
    double delta;         /* rowsum(d_o * o) - d_lse */
    _Atomic int32_t turn; /* the first row of a tile: strips of keys that have added to d_q */
    bool odd;             /* and: has the unfinished d_q of its rows a second part? See bwd_bf16.c. */
    bool own;             /* lse is of the keys that are here: restored */
    bool few;             /* in parts: it sees at most ATTN_LEAST_KEYS keys, so that the forward had scores of fwd.c */
} attn_row;

/* One piece of work: rows [row, row + rows) of sequence b (or keys, in the backward: a strip), for every head. */
typedef struct attn_unit {
    int32_t b;
    int32_t row, rows;
    int32_t chunk; /* the chunk to work; -1: all of them */
} attn_unit;

/* A row of o, wherever it is. */
typedef struct attn_place {
    int32_t h, i;
} attn_place;

/*
 * Units of all sequences, the most expensive first, but those of keys in the order of keys, on which d_q depends. Returns how
 * many; never more than the plan reserved. Comes after attn__work_flash, whose ranges say what is skipped.
 */
int64_t attn__work_rows(const attn_plan *plan, const attn_buffers *f, attn_unit *units);
int64_t attn__work_keys(const attn_plan *plan, const attn_buffers *f, attn_unit *units);

/* A part of a thread's scratch: `field` is the address of the pointer to it. */
typedef struct attn_room {
    void *field;
    int64_t bytes;
} attn_room;

/* Lays rooms out from `at` on, each 64-byte aligned, or only counts when at is NULL. Returns their bytes. */
int64_t attn__lay_out(char *at, const attn_room *rooms, size_t count);

/* The most units that any lengths can give. */
int64_t attn__work_rows_most(const attn_plan *plan);
int64_t attn__work_keys_most(const attn_plan *plan);

/* FlashMask of every column of tiles, into the workspace. */
attn_status attn__work_flash(const attn_plan *plan, const attn_buffers *f);

/* The range of key tile `tile` of sequence b; NULL when there is no FlashMask. */
const attn_flash_range *attn__work_range(const attn_plan *plan, const attn_buffers *f, int32_t b, int32_t kv_head,
                                         int32_t tile);

/* Is a sequence of that many rows worked with heads packed and keys in chunks? (By products of bf16 neither: attn__takes_bf16.) */
static inline bool attn__is_short(int32_t sq) { return sq <= ATTN_SPLIT_ROWS; }

/*
 * Does the forward sum the dot products of sequence s along vectors, not across them? Where rows are few. Not where keys are few
 * too: that may be the beginning of a longer causal sequence, whose bits it is to have.
 */
static inline bool attn__is_narrow(const attn_seq *s) { return s->sq <= ATTN_NARROW_ROWS && s->sk > ATTN_NARROW_ROWS; }

/* Can a sequence of this problem be? */
static inline bool attn__may_be_narrow(const attn_problem *p) {
    return p->max_q <= ATTN_NARROW_ROWS || (p->flags & (ATTN_VARLEN_Q | ATTN_USED_Q)) != 0;
}

/*
 * ATTN_PRECISE_FEW: float32 in general, and double where that does not do: where few rows are there or few keys count, rounding errors do not even out, and
 * the error of a row may be several times that of another computation that happens to round well. Few count where the largest
 * of the numbers that are summed, e^(s - max) of a row or p of a key, is much of the sum. The row (of d_v: its tile of keys) is
 * done again in double then. It is decided by what was computed for it, which depends on nothing else (C5).
 */
static inline bool attn__mixed(const attn_problem *p) { return p->dtype == ATTN_F32 && (p->flags & ATTN_PRECISE_FEW); }

/* Is sequence s worked in double? All of F64, float32 that is wanted precise, and few rows of float32 if they are. */
static inline bool attn__in_double(const attn_problem *p, const attn_seq *s) {
    return attn__wide_problem(p) || (attn__mixed(p) && attn__is_narrow(s));
}

static inline bool attn__sequence_in_double(const attn_plan *plan, const attn_buffers *f, int32_t b) {
    attn_seq s = attn__seq(&plan->problem, f, b);
    return attn__in_double(&plan->problem, &s);
}

/* Is this dtype one whose numbers tiles of AMX have in parts (bf16.h)? */
static inline bool attn__in_parts(attn_dtype dtype) { return dtype == ATTN_F32 || dtype == ATTN_F16; }

/*
 * Is the lse of a row of float32 or f16 so large that it must be of the very scores that are met with it? Tiles of AMX, vectors and double do not round scores
 * alike, and p = e^(s - lse) is off by e^(what they differ by). Where the forward may have had scores of tiles, the backward works such rows with
 * scores of bwd.c's, whatever kernel there is, and with the lse of these (restore), if it is near the one that is given.
 */
static inline bool attn__is_large(double lse) { return fabs(lse) > ATTN_LARGE_LSE && isfinite(lse); }
static inline bool attn__may_restore_large(const attn_plan *plan) {
    return (plan->context->cpu & ATTN_CPU_AMX) && attn__in_parts(plan->problem.dtype);
}
static inline bool attn__restores_large(const attn_plan *plan, const attn_seq *s) {
    return attn__may_restore_large(plan) && !attn__is_narrow(s);
}

/* Is every lse of float32 restored, not only those that are large? */
static inline bool attn__restores_all(const attn_problem *p) { return attn__wide_problem(p) || attn__mixed(p); }

static inline bool attn__few(double sum, double most, int32_t few) { return sum < few * most; }

/* As many of these rows, whose heads ascend, as make a tile: of one KV head. */
static inline int32_t attn__gather(const attn_problem *p, const attn_place *rows, int32_t count) {
    int32_t group = p->heads_q / p->heads_kv, n = 1;
    while (n < count && n < ATTN_TILE_ROWS && rows[n].h / group == rows[0].h / group) n++;
    return n;
}

/* Tiles that the heads of one group make, when each has so few rows. */
static inline int32_t attn__short_tiles(const attn_problem *p, int32_t rows) {
    int32_t fit = ATTN_TILE_ROWS / attn__max32(rows, 1);
    return (p->heads_q / p->heads_kv + fit - 1) / fit;
}

/* The scratch of a slot. */
static inline char *attn__slot(const attn_plan *plan, const attn_buffers *f, int32_t slot) {
    return (char *)attn__part(plan, f, CPU_SCRATCH) + slot * plan->scratch;
}

/* Does the plan work long sequences by fwd_bf16.c or bwd_bf16.c? */
static inline bool attn__by_bf16(const attn_plan *plan) {
    return (plan->kernel->cpu & (ATTN_CPU_AVX512_BF16 | ATTN_CPU_NEON_BF16)) != 0;
}

/* And if so, their products by vectors instead of tiles of AMX? */
static inline bool attn__by_vectors(const attn_plan *plan) { return (plan->kernel->cpu & ATTN_CPU_AMX) == 0; }

/* Of numbers in parts? */
static inline bool attn__splits(const attn_plan *plan) {
    return attn__by_bf16(plan) && attn__in_parts(plan->problem.dtype);
}

/* The most rows of a sequence that it leaves to fwd.c, if there are more keys: packing them would not pay. Few of both are worked as many are: attn__is_narrow. */
static inline int32_t attn__rows_left(const attn_plan *plan) {
    return attn__splits(plan) ? ATTN_SPLIT_ROWS : ATTN_NARROW_ROWS;
}

/* Does it take sequence s? */
static inline bool attn__takes_bf16(const attn_plan *plan, const attn_seq *s) {
    const bool asked = plan->context->cpu & ATTN_CPU_ASKED;
    if (attn__splits(plan) && plan->problem.op == ATTN_BACKWARD && !asked)
        return s->sq >= ATTN_LEAST_SPLIT && s->sk >= ATTN_LEAST_SPLIT;
    if (!attn__by_bf16(plan) || attn__is_narrow(s) || (attn__splits(plan) && s->sk <= ATTN_LEAST_KEYS)) return false;
    return !(s->sq <= attn__rows_left(plan) && s->sk > attn__rows_left(plan));
}
void attn__bf16_unit(const attn_plan *plan, const attn_buffers *f, const attn_unit *unit, int32_t h, int32_t slot);
int64_t attn__bf16_scratch(const attn_plan *plan);
void attn__bf16_keys(const attn_plan *plan, const attn_buffers *f, const attn_unit *unit, int32_t kv_head, int32_t slot);
int64_t attn__bf16_bwd_scratch(const attn_plan *plan);

/* The backward (passes.c). */
attn_status attn__backward(const attn_plan *plan, const attn_buffers *f);

#endif
