/*
 * A query tile and what is done with it: the rows it holds, their scores against a tile of keys, products that skip masked
 * pairs. Compiled once per number type (real.h).
 */
#ifndef ATTN_CPU_TILE_H
#define ATTN_CPU_TILE_H

#include <math.h>

#include "../philox.h"
#include "micro.h"
#include "work.h"

/* Results have one kind of NaN: which of two a sum keeps goes by the order of its operands, which is the compiler's (C5). */
static inline double attn__one_nan(double x) { return x == x ? x : NAN; }

/*
 * Query rows of one KV head that are worked together: rows [i0, i0 + count) of `heads` neighbouring query heads, row
 * r = head * count + i. Long sequences have one head per tile; short ones as many as fit, so that K and V are read once.
 * Or, gathered, any rows of a KV head, and [i0, i0 + count) is what they lie in.
 */
typedef struct REAL(tile) {
    const attn_plan *plan;
    const attn_problem *p;
    const attn_buffers *f;
    const attn_micro *micro;
    attn_seq s;
    attn_mask mask;
    int32_t kv_head, h0, heads, i0, count;
    int32_t rows, width;        /* heads * count; padded to ATTN_LANES */
    bool narrow;                /* dot products are summed along vectors: attn__is_narrow */
    int32_t h[ATTN_TILE_ROWS];  /* query head of each row */
    int32_t i[ATTN_TILE_ROWS];  /* query row of each row */
    real slope[ATTN_TILE_ROWS]; /* of ALiBi */
    int32_t dim_qk, dim_v;      /* padded to ATTN_LANES: distance of rows in scratch */
    attn_philox dropout;
    real *guard; /* scratch of tile_gemm: ATTN_TILE_ROWS rows of the larger dim */
} REAL(tile);

typedef REAL(tile) attn_rows;

/*
 * Sets up the tile. pack: heads of a short sequence share a tile, and the result is false when query head h is not the first
 * of its tile, whose turn does its work: then *t is not touched. Otherwise the tile has one head.
 */
bool REAL(tile_make)(attn_rows *t, const attn_plan *plan, const attn_buffers *f, const attn_unit *unit, int32_t h,
                     bool pack);

/* The same of any rows of sequence b that read the same KV head, at most ATTN_TILE_ROWS. Not for tile_gemm with keys_first. */
void REAL(tile_gather)(attn_rows *t, const attn_plan *plan, const attn_buffers *f, int32_t b, const attn_place *rows,
                       int32_t count);

/* q of the tile, scaled, for tile_scores; a narrow tile's is for tile_narrow_scores, too, and that of others, transposed, for tile_dots. */
void REAL(tile_load_q)(const attn_rows *t, real *q);

/* Rows of a tensor shaped like q into x [rows][padded], the padding zero, and transposed, for tile_dots, into x_t unless that is NULL. */
void REAL(tile_load_rows)(const attn_rows *t, real *x, real *x_t, const attn_tensor *from, attn_dtype dtype, int32_t dim);

/* Keys (or values) [j0, j0 + keys) into [keys][dim_qk] (or [dim_v]), the padding zero. */
void REAL(tile_load_k)(const attn_rows *t, real *k, int32_t j0, int32_t keys);
void REAL(tile_load_v)(const attn_rows *t, real *v, int32_t j0, int32_t keys);

/*
 * s [keys][width]: dot products of keys (or values) [ldk] and the tile's rows, whose transpose is one [dim][columns] after the other, of
 * micro->strip columns each. In a PARTIAL tile s is not touched where a whole strip is masked.
 */
void REAL(tile_dots)(const attn_rows *t, real *s, const real *k, int64_t ldk, const real *x_t, int32_t dim, int32_t j0,
                     int32_t keys, int tile_class);

/* Class of the tile against keys [j0, j0 + keys), of which j0 is a multiple of ATTN_TILE_COLS. */
int REAL(tile_class)(const attn_rows *t, int32_t j0, int32_t keys);

/*
 * Scores of the tile's rows against loaded keys, into s [keys][width]: softcap, ALiBi and bias applied, masked pairs
 * -inf. slope, if not NULL and there is a softcap, receives its derivative; rest, if not NULL and there is ALiBi, what that rounds
 * off. scratch holds ATTN_TILE_COLS numbers.
 */
void REAL(tile_scores)(const attn_rows *t, real *s, real *slope, real *rest, const real *q_t, const real *k, int32_t j0,
                       int32_t keys, int tile_class, real *scratch);

/* From dot products, scaled, to scores: softcap, ALiBi, bias, mask; as tile_scores. */
void REAL(tile_adjust)(const attn_rows *t, real *s, real *slope, real *rest, int32_t j0, int32_t keys, int tile_class,
                       real *scratch);
void REAL(tile_mask)(const attn_rows *t, real *s, int32_t j0, int32_t keys); /* -inf where a pair is not allowed */

/* Rows [j0, ...) of k or v: where row `at` is, `before` being the row before it, or NULL; are they a fixed distance apart? */
const char *REAL(tile_kv_row)(const attn_rows *t, const attn_tensor *of, int32_t at, const char *before);
bool REAL(tile_in_one_page)(const attn_rows *t, int32_t j0, int32_t keys);

/* Writes o and lse of row r from what is not normalised yet: o [dim_v], the maximum, the sum of e^(s - max). */
void REAL(fwd_finish_row)(const attn_rows *t, int32_t r, const real *o, double max, double sum);

/* Zeroes the elements of p [keys][width] that dropout drops. */
void REAL(tile_drop)(const attn_rows *t, real *p, int32_t j0, int32_t keys);

/*
 * c[m][n] += sum over k of a and b, where a is a tile of probabilities or of their gradients, [keys][width]. keys_first: m runs
 * over keys and k over rows, otherwise the other way round. b has a row for each k, ldb apart, all of it initialised. In a
 * PARTIAL tile whose b holds NaN or infinity, masked pairs are left out of the sums, so that these do not meet their zero (C2).
 */
void REAL(tile_gemm)(const attn_rows *t, real *c, int64_t ldc, const real *a, const real *b, int64_t ldb, int32_t n,
                     int32_t j0, int32_t keys, bool keys_first, int tile_class);

/*
 * The forward's tile_scores and tile_gemm for a narrow tile, from loading on: keys and values are read where they lie, or in
 * `room` when they must be converted. What is at `next`, if not NULL, will be wanted after them. The bits are the same.
 */
void REAL(tile_narrow_scores)(const attn_rows *t, real *s, const real *q, int32_t j0, int32_t keys, int tile_class,
                              const void *next, real *room, real *scratch);
void REAL(tile_narrow_gemm)(const attn_rows *t, real *c, const real *p, int32_t j0, int32_t keys, int tile_class,
                            const void *next, real *room);

/* Bytes of scratch that one thread needs. */
int64_t REAL(fwd_scratch)(const attn_plan *plan);
int64_t REAL(bwd_scratch)(const attn_problem *p);

/* The same for a problem that has sequences in both number types; and bytes of one row's partial result, or unfinished d_q. */
int64_t attn__fwd_scratch(const attn_plan *plan);
int64_t attn__bwd_scratch(const attn_plan *plan);
int64_t attn__bwd_d_q(const attn_plan *plan);
int64_t attn__fwd_partial(const attn_problem *p);

/* The kernels. A forward runs fwd_unit for each unit and head; if it is split, then fwd_fold for each sequence and head. */
void REAL(fwd_unit)(const attn_plan *plan, const attn_buffers *f, const attn_unit *unit, int32_t h, int32_t slot);
void REAL(fwd_fold)(const attn_plan *plan, const attn_buffers *f, int32_t b, int32_t h, int32_t slot);
/* Any rows of a sequence again, as tile_gather wants them. */
void REAL(fwd_rows)(const attn_plan *plan, const attn_buffers *f, int32_t b, const attn_place *rows, int32_t count,
                    int32_t slot);
attn_status REAL(probs_run)(const attn_plan *plan, const attn_buffers *f);

/*
 * The passes of a backward: rows of one sequence and head, and a better lse of them; a strip of keys; what one sequence and head add to a tile of d_bias (the first ATTN_TILE_ROWS * ATTN_TILE_COLS doubles of the slot's scratch), whose dims have `size`.
 */
void REAL(bwd_rows)(const attn_plan *plan, const attn_buffers *f, int32_t b, int32_t h, int32_t slot);
void REAL(bwd_keys)(const attn_plan *plan, const attn_buffers *f, const attn_unit *unit, int32_t kv_head, int32_t slot);
void REAL(bwd_restore)(const attn_plan *plan, const attn_buffers *f, int32_t b, int32_t h, int32_t row, int32_t slot);
void REAL(bwd_restore_rows)(const attn_plan *plan, const attn_buffers *f, int32_t b, const attn_place *rows, int32_t count,
                            int32_t slot); /* any rows, as tile_gather wants them */
void REAL(bwd_values)(const attn_plan *plan, const attn_buffers *f, const attn_unit *unit, int32_t kv_head,
                      int32_t slot); /* d_v alone of a tile of keys */
/* d_v of the unit's tiles with a key that few rows weigh, in double: sums and maxima of p over the rows, [keys], say so. */
void REAL(bwd_values_again)(const attn_plan *plan, const attn_buffers *f, const attn_unit *unit, int32_t kv_head,
                            int32_t slot, const real *sum, const real *most);
void REAL(bwd_bias)(const attn_plan *plan, const attn_buffers *f, const int64_t size[4], int32_t b, int32_t h,
                    int32_t row_tile, int32_t col_tile, int32_t slot);

/*
 * Strips take turns at d_q of a query tile, in the order of keys: `before` is the number of those before this one. In its turn a strip
 * goes on with each row (dim_qk, padded) where the one before it stopped, and leaves it to the next, or, the last one, writes the result.
 */
void REAL(bwd_begin_turn)(const attn_rows *t, int32_t before);
void REAL(bwd_end_turn)(const attn_rows *t, int32_t before);
void REAL(bwd_take_row)(const attn_rows *t, int32_t r, real *mine, bool is_first);
void REAL(bwd_give_row)(const attn_rows *t, int32_t r, real *mine, bool is_last);
real *REAL(bwd_unfinished)(const attn_rows *t, int32_t r); /* where strips leave row r for each other */
attn_row *REAL(bwd_row_of)(const attn_rows *t, int32_t r); /* what is known of it */

static inline int32_t attn__pad(int32_t n) { return (n + ATTN_LANES - 1) / ATTN_LANES * ATTN_LANES; }

#endif
