/*
 * Random test cases for `attn check`: a legal problem, its memory, and poison everywhere else.
 *
 * A case is a pure function of (seed, number, filter). It starts from a random base (operation, dtype, heads, dims, lengths)
 * and takes on features from one table; a row of the table is all that a new feature costs. Every array lies against a page
 * that cannot be touched, and what the call must not read holds NaN: gaps between strided rows, padding, unused cache
 * positions, bias outside the mask, outputs before they are written.
 *
 * Addresses, lengths and the mask are worked out here from the text of attn.h, not with the library's own helpers: an error
 * there would otherwise be the same on both sides of a comparison, and would not be seen.
 */
#ifndef ATTN_CASES_H
#define ATTN_CASES_H

#include <stdbool.h>
#include <stdio.h>

#include "attn.h"

enum { CASE_BATCH = 8, CASE_BLOCKS = 40, CASE_TEXT = 4096 };

/* ---- random numbers ---- */

typedef struct rng {
    uint64_t state;
} rng;

rng rng_make(uint64_t seed, uint64_t stream);
uint64_t rng_next(rng *r);
int32_t rng_range(rng *r, int32_t low, int32_t high); /* low <= x <= high */
bool rng_chance(rng *r, int percent);
double rng_normal(rng *r); /* mean 0, variance 1, within +-3.5 */

/* ---- features ---- */

typedef enum feature_id {
    F_GQA,
    F_DIM_V,
    F_MIXED,
    F_EMPTY,
    F_LONG_KV,
    F_CAUSAL,
    F_WINDOW,
    F_SCALE,
    F_SOFTCAP,
    F_ALIBI,
    F_BIAS,
    F_SINK,
    F_FLASHMASK,
    F_DROPOUT,
    F_VARLEN_Q,
    F_VARLEN_KV,
    F_USED_Q,
    F_USED_KV,
    F_LEFTPAD,
    F_BATCH_INDEX,
    F_PAGES,
    F_APPEND,
    F_VARLEN_NEW,
    F_ROTARY,
    F_INTERLEAVED,
    F_ROTARY_POS,
    F_DESCALE,
    F_DESCALE_PAGES,
    F_PRECISE,
    F_PRECISE_FEW,
    F_PROBS,
    F_NO_LSE,
    F_D_LSE,
    F_D_BIAS,
    F_D_SINK,
    F_SOME_GRADIENTS,
    F_RING,
    F_NAN,
    F_LAYOUT,
    F_NEGATIVE,
    F_BROADCAST,
    FEATURES
} feature_id;

#define FEATURE_BIT(id) (UINT64_C(1) << (id))

const char *feature_name(feature_id id);
const char *feature_help(feature_id id);
bool feature_find(const char *name, size_t length, feature_id *id);
bool feature_combines(uint64_t set); /* is there an operation that can have all of them? */

/* Which cases are wanted. */
typedef struct case_filter {
    int op;            /* attn_op, or -1: any */
    attn_dtype dtype;  /* DEFAULT: any */
    uint64_t features; /* every case has these */
    bool small;        /* few rows, keys and dims: for tools under which everything takes a thousand times as long */
    bool no_backward;  /* the backend has none: forward cases are drawn instead */
} case_filter;

/* ---- a case ---- */

typedef enum block_role {
    BLOCK_IN,   /* may not change */
    BLOCK_OUT,  /* its elements are written, all of them; the gaps between them may not change */
    BLOCK_CACHE /* appended rows are written, nothing else may change */
} block_role;

/* One array, in memory of its own. */
typedef struct block {
    const char *name;
    size_t pointer;   /* where in attn_buffers its pointer is */
    attn_dtype dtype; /* DEFAULT: int32_t */
    bool fixed;       /* float by definition, whatever the dtypes of the problem */
    block_role role;
    int64_t count;          /* elements */
    int64_t origin;         /* the element that the pointer points to */
    unsigned char *data;    /* element 0 */
    unsigned char *begin;   /* of the memory that is watched: data and a margin on the open side */
    size_t bytes;           /* of the memory that is watched */
    unsigned char *initial; /* what was there before the call */
} block;

/* Sequence b, as attn.h defines it. */
typedef struct sequence {
    int32_t rows_q, sq;                   /* room and length */
    int32_t capacity, used, appended;     /* of the cache */
    int32_t leftpad, sk;                  /* key j is at position leftpad + j */
    int32_t slot;                         /* in the cache */
    int32_t rotary_pos;                   /* of the first new row */
    int64_t first_q, first_kv, first_new; /* rows in packed tensors, otherwise 0 */
} sequence;

typedef struct check_case {
    rng rng;
    uint64_t seed;
    long number;
    uint64_t drawn;       /* features that were drawn */
    uint64_t features;    /* those and the ones that they need */
    const char *kernel;   /* that the backend's plan names; NULL: none */
    bool left_out;        /* would have been a backward case, if the filter let it */
    attn_problem problem; /* every default filled in */
    attn_problem given;   /* the same with defaults left to the library, here and there */
    attn_buffers buffers;
    sequence seq[CASE_BATCH];
    bool strict;       /* keys and rows that the mask hides altogether are NaN too */
    bool one_shot;     /* attn_forward instead of a plan */
    bool wide;         /* a dim is to be in 129 to 256 */
    double q_size;     /* standard deviation of q */
    int64_t rows_q;    /* rows of q: total_q, or batch * max_q */
    int64_t rows_kv;   /* rows of k without pages: total_kv, or slots * max_kv */
    double *ring;      /* F_RING: [heads_q][rows_q], what other keys add to lse */
    uint8_t *row_seen; /* [batch][heads_q][max_q]: sees at least one key */
    uint8_t *key_seen; /* [batch][heads_kv][max_kv]: seen by at least one row */
    block blocks[CASE_BLOCKS];
    int block_count;
    int guard_next;
} check_case;

/* Draws the problem. False when the filter asks for what cannot be combined. */
bool case_draw(check_case *c, const case_filter *filter, uint64_t seed, long number);

/* The case in words. */
void case_describe(const check_case *c, char *text, size_t size);

/* ---- its memory (case_data.c) ---- */

/* Allocates and fills everything except o and lse of a backward, which come from a forward. */
void case_fill(check_case *c);

/* Notes what every block holds; from here on only outputs may change. */
void case_seal(check_case *c);

/* Puts every block back to what case_seal saw. */
void case_restore(check_case *c);

/* NULL, or the name of a block that changed where it may not. Outputs must have been wiped with block_wipe. */
const char *case_damage(const check_case *c);

void case_free(check_case *c);

/* Memory, zeroed, or the end of the program with a message: a test that cannot get its memory has nothing to say. */
void *must_alloc(int64_t count, size_t bytes_each);

/* Memory between two pages that cannot be touched, kept for the next case; 0xff throughout. */
unsigned char *guarded_bytes(check_case *c, size_t bytes, size_t align, unsigned char **begin, size_t *watched);

const block *block_find(const check_case *c, const char *name);

/* Puts `bytes` bytes at p, part of the block, back to their initial contents. */
void block_wipe(const block *b, void *p, size_t bytes);

/* ---- semantics, from the text of attn.h ---- */

/* May row i of query head h of sequence b see key j? */
bool case_allowed(const check_case *c, int b, int h, int i, int j);

/* Element offsets of row i in a tensor like q, and of cache position t in a tensor like k. */
int64_t case_q_at(const check_case *c, const attn_tensor *t, int b, int64_t i, int h);
int64_t case_kv_at(const check_case *c, const attn_tensor *t, int b, int position, int kv_head);
int64_t case_lse_at(const check_case *c, int b, int i, int h);
double case_q_descale(const check_case *c, int b, int kv_head);
double case_kv_descale(const check_case *c, const float *descale, int b, int position, int kv_head);

/* Row of sequence b's row i (key at position t) when rows are counted through the whole tensor. */
int64_t case_q_row(const check_case *c, int b, int i);
int64_t case_kv_row(const check_case *c, int b, int position);

static inline bool has(const check_case *c, feature_id id) { return c->features & FEATURE_BIT(id); }
static inline bool case_appends(const check_case *c) {
    return c->problem.op == ATTN_KV_APPEND || (c->problem.flags & ATTN_APPEND);
}

#endif
