/*
 * Backward by recomputation: from lse and delta = rowsum(d_o * o) - d_lse, nothing of size sq x sk is stored.
 *
 *   p = exp(s - lse)    d_p = d_o v^T    d_s = p (d_p - delta)    d_v = p^T d_o    d_k = scale d_s^T q    d_q = scale d_s k
 *
 * Here is what the passes (passes.c) do with one sequence:
 *   rows    lse, as given, and delta of each row
 *   restore a better lse of float32 that is wanted precise; of float32 and f16, if it is large (attn__is_large)
 *   keys    d_k and d_v of a strip of keys, over the heads of its group and their query tiles, and what the strip adds to d_q
 *   bias    what one sequence and head add to a tile of d_bias
 *
 * Float32 where few count (attn__mixed): restore does rows that weigh few keys again in double, and d_v of keys that few rows weigh is
 * made again in double, with that lse.
 *
 * The five products of a tile are done once. d_k and d_v belong to one thread. d_q is a sum over all strips, which take turns, in the
 * order of keys, so its bits depend on nothing else (C5).
 */
#define _GNU_SOURCE
#include "tile.h"

#include <math.h>
#include <sched.h>
#include <string.h>
#include <time.h>

#include "../numeric.h"

/* One thread's memory. */
typedef struct scratch {
    real *q, *q_t;         /* [rows][dim_qk], and transposed and scaled */
    real *d_o, *d_o_t;     /* [rows][dim_v], and transposed */
    real *k, *v;           /* [keys of a strip][dim_qk], [dim_v] */
    real *d_k, *d_v;       /* as k and v */
    real *p, *d_s, *slope; /* [cols][width] */
    real *d_q;             /* [rows][dim_qk]: the sum so far */
    real *lse, *low;       /* [width]: lse, and what real has no room for */
    real *delta;           /* [width] */
    real *sum_p, *most_p;  /* [keys of a strip]: over the rows */
    real *guard, *row;
    double *sum; /* a tile of d_bias; comes first, where the bias pass finds it */
} scratch;

/* Keys of a strip, at least a tile of them. */
static int64_t strip_keys(const attn_problem *p) {
    return attn__min32(ATTN_STRIP_KEYS, attn__pad(p->max_kv) + ATTN_TILE_COLS);
}

/* As attn__lay_out, which it calls. */
static int64_t lay_out(scratch *m, char *at, const attn_problem *p) {
    enum { TILE = ATTN_TILE_ROWS > ATTN_TILE_COLS ? ATTN_TILE_ROWS : ATTN_TILE_COLS, SCORES = TILE * TILE };
    const int64_t size = sizeof(real), keys = attn__min32(ATTN_STRIP_KEYS, attn__pad(p->max_kv) + TILE);
    int64_t qk = attn__pad(p->dim_qk), v = attn__pad(p->dim_v), most = qk > v ? qk : v;
    const attn_room rooms[] = {
        {&m->sum, SCORES * (int64_t)sizeof(double)},
        {&m->q, qk * TILE * size},
        {&m->q_t, qk * TILE * size},
        {&m->d_o, v * TILE * size},
        {&m->d_o_t, v * TILE * size},
        {&m->k, qk * keys * size},
        {&m->v, v * keys * size},
        {&m->d_k, qk * keys * size},
        {&m->d_v, v * keys * size},
        {&m->p, SCORES * size},
        {&m->d_s, SCORES * size},
        {&m->slope, SCORES * size},
        {&m->d_q, qk * TILE * size},
        {&m->lse, TILE * size},
        {&m->low, TILE * size},
        {&m->delta, TILE * size},
        {&m->sum_p, keys * size},
        {&m->most_p, keys * size},
        {&m->guard, most * TILE * size},
        {&m->row, (2 * most + TILE) * size},
    };
    return attn__lay_out(at, rooms, sizeof rooms / sizeof rooms[0]);
}

int64_t REAL(bwd_scratch)(const attn_problem *p) {
    scratch unused;
    return lay_out(&unused, NULL, p);
}

static void thread_scratch(const attn_plan *plan, const attn_buffers *f, int32_t slot, scratch *m) {
    lay_out(m, attn__slot(plan, f, slot), &plan->problem);
}

/* ---- rows: lse and delta ---- */

/* In eight chains: one would wait for each addition. */
static double dot(const real *a, const real *b, int32_t n) {
    enum { CHAINS = 8 };
    double part[CHAINS] = {0}, sum = 0;
    int32_t whole = n / CHAINS * CHAINS;
    for (int32_t x = 0; x < whole; x += CHAINS)
        for (int32_t c = 0; c < CHAINS; c++) part[c] += (double)a[x + c] * (double)b[x + c];
    for (int32_t x = whole; x < n; x++) sum += (double)a[x] * (double)b[x];
    for (int32_t c = 0; c < CHAINS; c++) sum += part[c];
    return sum;
}

/*
 * Keys that rows [i0, i0 + rows) of query head h see, as far as ATTN_LEAST_KEYS + 1: as fwd_bf16.c counts them. Of a whole tile of rows at once, so that
 * FlashMask's tiles that none of them sees are passed over together.
 */
static void count_keys(const attn_plan *plan, const attn_buffers *f, const attn_seq *s, const attn_mask *mask, int32_t i0,
                       int32_t rows, int32_t h, int32_t *seen) {
    const int32_t kv_head = h / (plan->problem.heads_q / plan->problem.heads_kv);
    int32_t first, end, more = rows; /* rows that have not seen enough */
    for (int32_t r = 0; r < rows; r++) seen[r] = 0;
    attn__mask_rows(mask, i0, i0 + rows, &first, &end);
    for (int32_t j0 = first / ATTN_TILE_COLS * ATTN_TILE_COLS; more > 0 && j0 < end; j0 += ATTN_TILE_COLS) {
        const int32_t stop = attn__min32(j0 + ATTN_TILE_COLS, s->sk);
        const attn_flash_range *range = attn__work_range(plan, f, s->b, kv_head, j0 / ATTN_TILE_COLS);
        if (attn__mask_tile(mask, i0, i0 + rows, j0, stop, range) == ATTN_TILE_SKIP) continue;
        for (int32_t r = 0; r < rows; r++) {
            for (int32_t j = j0; j < stop && seen[r] <= ATTN_LEAST_KEYS; j++) {
                const int32_t *flash = mask->vectors ? attn__flash_at(&plan->problem, f, s->b, kv_head, j) : NULL;
                if (attn__mask_allowed(mask, i0 + r, j, flash) && ++seen[r] > ATTN_LEAST_KEYS) more--;
            }
        }
    }
}

void REAL(bwd_rows)(const attn_plan *plan, const attn_buffers *f, int32_t b, int32_t h, int32_t slot) {
    const attn_problem *p = &plan->problem;
    const attn_micro *micro = plan->kernel->REAL_MICRO;
    attn_seq s = attn__seq(p, f, b);
    attn_mask mask = attn__seq_mask(p, &s);
    attn_row *rows = attn__part(plan, f, CPU_ROWS);
    scratch m;
    thread_scratch(plan, f, slot, &m);
    real *o = m.row, *d_o = m.row + attn__pad(p->dim_v);
    int64_t size = (int64_t)attn_dtype_size(p->out_dtype);
    attn_dtype lse = attn__real_dtype(p->dtype);
    int32_t seen[ATTN_TILE_ROWS] = {0};
    for (int32_t i = 0; i < s.sq; i++) {
        micro->load(o, (const char *)f->o.data + attn__q_offset(p, &f->o, &s, i, h) * size, p->out_dtype, p->dim_v);
        micro->load(d_o, (const char *)f->d_o.data + attn__q_offset(p, &f->d_o, &s, i, h) * size, p->out_dtype, p->dim_v);
        double sum = dot(o, d_o, p->dim_v);
        int64_t at = attn__lse_index(p, &s, i, h);
        rows[at].lse = rows[at].wide = attn__load(lse, f->lse, at);
        rows[at].delta = sum - (f->d_lse ? attn__load(lse, f->d_lse, at) : 0);
        atomic_init(&rows[at].turn, 0);
        rows[at].odd = rows[at].own = false;
        if (attn__splits(plan) && i % ATTN_TILE_ROWS == 0)
            count_keys(plan, f, &s, &mask, i, attn__min32(ATTN_TILE_ROWS, s.sq - i), h, seen);
        rows[at].few = attn__splits(plan) && seen[i % ATTN_TILE_ROWS] <= ATTN_LEAST_KEYS;
        int32_t first, end;
        attn__mask_row(&mask, i, &first, &end);
        if (first < end || !f->d_q.data) continue;
        int64_t q_size = (int64_t)attn_dtype_size(p->dtype); /* a row that no strip may come by */
        memset((char *)f->d_q.data + attn__q_offset(p, &f->d_q, &s, i, h) * q_size, 0, (size_t)(p->dim_qk * q_size));
    }
}

/* ---- one tile ---- */

/* lse of the row, for p of this number type. */
static double *lse_of(attn_row *row) { return REAL_DTYPE == ATTN_F32 ? &row->lse : &row->wide; }

/* What the backward needs of a query tile. with_q: its rows too, not only their transpose. */
static void load_rows(const attn_rows *t, scratch *m, bool with_q) {
    attn_row *rows = attn__part(t->plan, t->f, CPU_ROWS);
    REAL(tile_load_q)(t, m->q_t);
    if (with_q) REAL(tile_load_rows)(t, m->q, NULL, &t->f->q, t->p->dtype, t->p->dim_qk);
    REAL(tile_load_rows)(t, m->d_o, m->d_o_t, &t->f->d_o, t->p->out_dtype, t->p->dim_v);
    for (int32_t r = 0; r < t->width; r++) {
        attn_row *row = &rows[attn__lse_index(t->p, &t->s, t->i[r], t->h[r])];
        double lse = *lse_of(row);
        bool is_empty = lse == -INFINITY;
        m->lse[r] = (real)(is_empty ? INFINITY : lse); /* no key: p = 0 */
        m->low[r] = is_empty ? 0 : (real)(lse - (double)m->lse[r]);
        m->delta[r] = (real)row->delta;
        if (r >= t->rows || !is_empty) continue;
        memset(m->d_o + (int64_t)r * t->dim_v, 0, (size_t)t->dim_v * sizeof(real)); /* NaN there must not meet p = 0 (C1) */
        if (with_q) memset(m->q + (int64_t)r * t->dim_qk, 0, (size_t)t->dim_qk * sizeof(real));
    }
}

/*
 * Keys far away have large scores, by ALiBi, and gradients that are small but wanted as exactly as others; what is rounded off such scores is
 * kept, in the place of d_s, which comes later. Double has room for it.
 */
static real *rest_of(const attn_rows *t, const scratch *m) {
    return (t->p->flags & ATTN_ALIBI) && REAL_DTYPE == ATTN_F32 ? m->d_s : NULL;
}

/* p of a tile against keys k, loaded; slope, if not NULL: the softcap's derivative; total, if not NULL, grows by p. */
static void probabilities(const attn_rows *t, scratch *m, const real *q_t, const real *k, const real *lse, const real *low,
                          int32_t j0, int32_t keys, int class, real *slope, double *total) {
    real *rest = rest_of(t, m);
    REAL(tile_scores)(t, m->p, slope, rest, q_t, k, j0, keys, class, m->row);
    t->micro->exp(m->p, rest, keys, t->width, lse, low, total);
}

/* p and d_s of a tile against keys k and values v, loaded; with_slope: through the softcap. */
static void gradients(const attn_rows *t, scratch *m, const real *k, const real *v, int32_t j0, int32_t keys, int class,
                      bool with_slope) {
    const attn_problem *p = t->p;
    real *slope = with_slope && p->softcap > 0 ? m->slope : NULL;
    probabilities(t, m, m->q_t, k, m->lse, m->low, j0, keys, class, slope, NULL);
    REAL(tile_dots)(t, m->d_s, v, t->dim_v, m->d_o_t, p->dim_v, j0, keys, class);
    if (p->dropout > 0) REAL(tile_drop)(t, m->d_s, j0, keys);
    t->micro->d_scores(m->d_s, m->p, slope, keys, t->width, m->delta, (real)(1 / (1 - p->dropout)));
}

/* ---- restore: a better lse ---- */

enum { RESTORE_TILES = ATTN_STRIP_KEYS / ATTN_TILE_ROWS };

/* A query tile, what is known of its lse, or what is used in its place, and the sums of its p by that, and the largest. */
typedef struct restored {
    attn_rows t;
    const real *q_t;
    double base[ATTN_TILE_ROWS];
    real lse[ATTN_TILE_ROWS], low[ATTN_TILE_ROWS];
    real most[ATTN_TILE_ROWS];
    double total[ATTN_TILE_ROWS];
} restored;

attn_row *REAL(bwd_row_of)(const attn_rows *t, int32_t r) {
    return (attn_row *)attn__part(t->plan, t->f, CPU_ROWS) + attn__lse_index(t->p, &t->s, t->i[r], t->h[r]);
}

static bool has_large(const attn_rows *t) {
    for (int32_t r = 0; r < t->rows; r++)
        if (attn__is_large(*lse_of(REAL(bwd_row_of)(t, r)))) return true;
    return false;
}

static void restore_make(restored *x, real *q_t, real *guard) {
    REAL(tile_load_q)(&x->t, q_t);
    x->q_t = q_t;
    x->t.guard = guard;
    for (int32_t r = 0; r < x->t.width; r++) {
        double lse = *lse_of(REAL(bwd_row_of)(&x->t, r));
        x->base[r] = lse;
        x->lse[r] = (real)(lse == -INFINITY ? INFINITY : lse);
        x->low[r] = lse == -INFINITY ? 0 : (real)(lse - (double)x->lse[r]);
        x->total[r] = x->most[r] = 0;
    }
}

/* A vector's worth: a compiler makes vectors of it. */
static void keep_larger(real *restrict most, const real *restrict p) {
    for (int r = 0; r < ATTN_LANES; r++) most[r] = p[r] > most[r] ? p[r] : most[r];
}

/* Scores that are large can be further from an lse of others than e^x reaches: the largest one is used in its place. */
static void restore_from_maxima(restored *x, scratch *m, int32_t first, int32_t end) {
    const attn_rows *t = &x->t;
    real max[ATTN_TILE_ROWS];
    if (!has_large(t)) return;
    for (int32_t r = 0; r < t->width; r++) max[r] = (real)-INFINITY;
    for (int32_t j0 = first / ATTN_TILE_COLS * ATTN_TILE_COLS; j0 < end; j0 += ATTN_TILE_COLS) {
        int32_t keys = attn__min32(ATTN_TILE_COLS, t->mask.sk - j0);
        int class = REAL(tile_class)(t, j0, keys);
        if (class == ATTN_TILE_SKIP) continue;
        REAL(tile_load_k)(t, m->k, j0, keys);
        REAL(tile_scores)(t, m->p, NULL, rest_of(t, m), x->q_t, m->k, j0, keys, class, m->row);
        for (int32_t j = 0; j < keys; j++)
            for (int32_t r = 0; r < t->width; r += ATTN_LANES) keep_larger(max + r, m->p + j * t->width + r);
    }
    for (int32_t r = 0; r < t->width; r++) {
        if (!attn__is_large(x->base[r]) || !isfinite(max[r])) continue;
        x->base[r] = (double)(x->lse[r] = max[r]);
        x->low[r] = 0;
    }
}

/* Tile x meets keys that are loaded. */
static void restore_keys(restored *x, scratch *m, int32_t j0, int32_t keys) {
    const attn_rows *t = &x->t;
    int class = REAL(tile_class)(t, j0, keys);
    if (class == ATTN_TILE_SKIP) return;
    probabilities(t, m, x->q_t, m->k, x->lse, x->low, j0, keys, class, NULL, x->total);
    if (REAL_DTYPE != ATTN_F32 || !attn__mixed(t->p)) return;
    for (int32_t j = 0; j < keys; j++)
        for (int32_t r = 0; r < t->width; r += ATTN_LANES) keep_larger(x->most + r, m->p + j * t->width + r);
}

/* The lse with which the row's p add up to 1. */
static double restored_lse(const restored *x, int32_t r) {
    const attn_rows *t = &x->t;
    double total = x->total[r] + (t->p->flags & ATTN_SINK ? exp((double)t->f->sink[t->h[r]] - x->base[r]) : 0);
    double sum = x->base[r] + log(total);
    return attn__is_large(sum) && fabs(sum) >= 0x1p23 ? (double)(real)sum
                                                      : sum; /* exp adds less than 1 to what real has room for */
}

/*
 * Gives lse back digits that float32 had no room for, which are worth more than all else that is rounded in p: with the right
 * lse the row's p add up to 1, and x->total says how far they are from it. Only where that can be rounding, of lse, or of
 * a large one by tiles of its scores; otherwise it belongs to a softmax over more keys than are here (attn.h).
 */
static void restore_row(const restored *x, int32_t r) {
    const attn_rows *t = &x->t;
    attn_row *row = REAL(bwd_row_of)(t, r);
    double lse = *lse_of(row);
    if (!isfinite(lse)) return; /* of +inf, too, the logarithm would make NaN */
    const bool large = attn__is_large(lse);
    if (!large && !attn__restores_all(t->p)) return;
    double sum = restored_lse(x, r), ulp = 0x1p-23 * (fabs(lse) > 1 ? fabs(lse) : 1);
    const int most = large && attn__restores_large(t->plan, &t->s) && !attn__in_double(t->p, &t->s) ? 8 : 1;
    if (!row->own && !(fabs(sum - lse) <= most * ulp)) return;
    row->own = true;
    *lse_of(row) = sum;
}

void REAL(bwd_restore_rows)(const attn_plan *plan, const attn_buffers *f, int32_t b, const attn_place *rows, int32_t count,
                            int32_t slot) {
    restored x;
    scratch m;
    int32_t first, end;
    thread_scratch(plan, f, slot, &m);
    REAL(tile_gather)(&x.t, plan, f, b, rows, count);
    restore_make(&x, m.q_t, m.guard);
    attn__mask_rows(&x.t.mask, x.t.i0, x.t.i0 + x.t.count, &first, &end);
    restore_from_maxima(&x, &m, first, end);
    for (int32_t j0 = first / ATTN_TILE_COLS * ATTN_TILE_COLS; j0 < end; j0 += ATTN_TILE_COLS) {
        int32_t keys = attn__min32(ATTN_TILE_COLS, x.t.mask.sk - j0);
        REAL(tile_load_k)(&x.t, m.k, j0, keys);
        restore_keys(&x, &m, j0, keys);
    }
    for (int32_t r = 0; r < count; r++) restore_row(&x, r);
}

void attn__bwd_restore_rows_f64(const attn_plan *plan, const attn_buffers *f, int32_t b, const attn_place *rows,
                                int32_t count, int32_t slot);

/* Rows from `row` on, at most ATTN_STRIP_KEYS of them: their q_t lie where d_k will, which has room for as many keys. */
void REAL(bwd_restore)(const attn_plan *plan, const attn_buffers *f, int32_t b, int32_t h, int32_t row, int32_t slot) {
    attn_seq s = attn__seq(&plan->problem, f, b);
    attn_mask mask = attn__seq_mask(&plan->problem, &s);
    int32_t stop = attn__min32(row + ATTN_STRIP_KEYS, s.sq), most = (int32_t)strip_keys(&plan->problem) / ATTN_TILE_ROWS;
    restored tile[RESTORE_TILES];
    attn_place again[RESTORE_TILES * ATTN_TILE_ROWS]; /* rows that weigh few keys, or whose lse in double is another */
    double here[RESTORE_TILES * ATTN_TILE_ROWS];      /* and what it is of these scores */
    int32_t doubtful = 0;
    scratch m;
    if (!attn__restores_all(&plan->problem) && !attn__restores_large(plan, &s)) return;
    thread_scratch(plan, f, slot, &m);
    while (row < stop) { /* once, but where there are few keys */
        int32_t count = 0, first, end, from = row;
        for (; row < stop && count < most; row += ATTN_TILE_ROWS) {
            attn_unit unit = {b, row, attn__min32(ATTN_TILE_ROWS, stop - row), -1};
            if (!REAL(tile_make)(&tile[count].t, plan, f, &unit, h, true)) return;
            if (!attn__restores_all(&plan->problem) && !has_large(&tile[count].t)) continue;
            restore_make(&tile[count], m.d_k + (int64_t)count * ATTN_TILE_ROWS * tile->t.dim_qk, m.guard);
            count++;
        }
        if (count == 0) continue;
        attn__mask_rows(&mask, from, attn__min32(row, stop), &first, &end);
        for (int32_t n = 0; n < count; n++) restore_from_maxima(&tile[n], &m, first, end);
        for (int32_t j0 = first / ATTN_TILE_COLS * ATTN_TILE_COLS; j0 < end; j0 += ATTN_TILE_COLS) {
            int32_t keys = attn__min32(ATTN_TILE_COLS, s.sk - j0);
            REAL(tile_load_k)(&tile->t, m.k, j0, keys);
            for (int32_t n = 0; n < count; n++) restore_keys(&tile[n], &m, j0, keys);
        }
        for (int32_t n = 0; n < count; n++) {
            for (int32_t r = 0; r < tile[n].t.rows; r++) {
                const attn_rows *t = &tile[n].t;
                const bool differs = REAL_DTYPE == ATTN_F32 && attn__mixed(t->p) &&
                                     attn__is_large(REAL(bwd_row_of)(t, r)->wide); /* as given, still */
                restore_row(&tile[n], r);
                if (differs || attn__few(tile[n].total[r], (double)tile[n].most[r], ATTN_FEW_KEYS)) {
                    here[doubtful] = restored_lse(&tile[n], r);
                    again[doubtful++] = (attn_place){t->h[r], t->i[r]}; /* that starts from lse as given */
                } else {
                    REAL(bwd_row_of)(t, r)->wide = *lse_of(REAL(bwd_row_of)(t, r));
                }
            }
        }
    }
    for (int32_t n = 0, count; n < doubtful; n += count) { /* the scratch is theirs now */
        count = attn__gather(&plan->problem, again + n, doubtful - n);
        attn__bwd_restore_rows_f64(plan, f, b, again + n, count, slot);
    }
    for (int32_t n = 0; n < doubtful; n++) { /* lse is of the keys that are here if it is so by either of the two scores */
        attn_row *done =
            (attn_row *)attn__part(plan, f, CPU_ROWS) + attn__lse_index(&plan->problem, &s, again[n].i, again[n].h);
        if (done->own && isfinite(here[n])) done->lse = here[n];
    }
}

/* ---- keys: d_k, d_v, and d_q in turns ---- */

static _Atomic int32_t *turn_of(const attn_rows *t) { return &REAL(bwd_row_of)(t, 0)->turn; }

real *REAL(bwd_unfinished)(const attn_rows *t, int32_t r) {
    int64_t row = attn__lse_index(t->p, &t->s, t->i[r], t->h[r]);
    return (real *)((char *)attn__part(t->plan, t->f, CPU_D_Q) + row * attn__bwd_d_q(t->plan));
}

/*
 * Waits until as many strips have added to the tile's d_q as come before this one. They have been claimed, so they are at work, or
 * would be: a thread of a lower real-time priority gets the processor only when this one sleeps.
 */
void REAL(bwd_begin_turn)(const attn_rows *t, int32_t before) {
    for (int n = 0; atomic_load_explicit(turn_of(t), memory_order_acquire) != before; n += n < 100000) {
        if (n >= 100000)
            nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
        else if (n > 1000)
            sched_yield();
    }
}

void REAL(bwd_end_turn)(const attn_rows *t, int32_t before) {
    atomic_store_explicit(turn_of(t), before + 1, memory_order_release);
}

void REAL(bwd_take_row)(const attn_rows *t, int32_t r, real *mine, bool is_first) {
    size_t bytes = (size_t)t->dim_qk * sizeof *mine;
    if (is_first)
        memset(mine, 0, bytes);
    else
        memcpy(mine, REAL(bwd_unfinished)(t, r), bytes);
}

void REAL(bwd_give_row)(const attn_rows *t, int32_t r, real *mine, bool is_last) {
    const attn_problem *p = t->p;
    const attn_tensor *to = &t->f->d_q;
    int64_t at = attn__q_offset(p, to, &t->s, t->i[r], t->h[r]) * (int64_t)attn_dtype_size(p->dtype);
    bool is_empty = REAL(bwd_row_of)(t, r)->lse == -INFINITY; /* its d_s, 0, may have met infinite keys (C1) */
    if (is_empty) memset(mine, 0, (size_t)t->dim_qk * sizeof *mine);
    if (is_last)
        t->micro->store((char *)to->data + at, p->dtype, mine, (real)p->scale, p->dim_qk);
    else
        memcpy(REAL(bwd_unfinished)(t, r), mine, (size_t)t->dim_qk * sizeof *mine);
}

/* m->d_q as the strips before this one have left it; `before` so many. */
static void take_turn(const attn_rows *t, scratch *m, int32_t before) {
    REAL(bwd_begin_turn)(t, before);
    for (int32_t r = 0; r < t->rows; r++) REAL(bwd_take_row)(t, r, m->d_q + (int64_t)r * t->dim_qk, before == 0);
}

/* The strip after this one may go on; the last one writes the result. */
static void give_turn(const attn_rows *t, scratch *m, int32_t before, bool is_last) {
    for (int32_t r = 0; r < t->rows; r++) REAL(bwd_give_row)(t, r, m->d_q + (int64_t)r * t->dim_qk, is_last);
    REAL(bwd_end_turn)(t, before);
}

/* One query tile against one key tile, `at` keys into the strip. */
static void add_tile(const attn_rows *t, scratch *m, int32_t j0, int32_t at, int32_t keys) {
    const attn_buffers *f = t->f;
    real *k = m->k + (int64_t)at * t->dim_qk, *v = m->v + (int64_t)at * t->dim_v;
    int class = REAL(tile_class)(t, j0, keys);
    if (class == ATTN_TILE_SKIP) return;
    gradients(t, m, k, v, j0, keys, class, true);
    if (f->d_q.data) REAL(tile_gemm)(t, m->d_q, t->dim_qk, m->d_s, k, t->dim_qk, t->dim_qk, j0, keys, false, class);
    if (f->d_k.data) REAL(tile_gemm)
    (t, m->d_k + (int64_t)at * t->dim_qk, t->dim_qk, m->d_s, m->q, t->dim_qk, t->dim_qk, j0, keys, true, class);
    if (!f->d_v.data) return;
    if (REAL_DTYPE == ATTN_F32 && attn__mixed(t->p))
        t->micro->weigh(m->p, keys, t->width, t->rows, m->sum_p + at, m->most_p + at);
    if (t->p->dropout > 0) REAL(tile_drop)(t, m->p, j0, keys);
    REAL(tile_gemm)(t, m->d_v + (int64_t)at * t->dim_v, t->dim_v, m->p, m->d_o, t->dim_v, t->dim_v, j0, keys, true, class);
}

/* One query tile against the strip. Its d_q goes on from the tile of keys before: the sum does not know of strips (C5). */
static void work_queries(const attn_rows *t, scratch *m, const attn_unit *unit) {
    int32_t first, end, keys = t->plan->strip_keys, strip = unit->row / keys;
    attn__mask_rows(&t->mask, t->i0, t->i0 + t->count, &first, &end);
    if (first >= end || strip < first / keys || strip > (end - 1) / keys) return;
    int32_t before = strip - first / keys;
    load_rows(t, m, true);
    if (t->f->d_q.data) take_turn(t, m, before);
    for (int32_t at = 0; at < unit->rows; at += ATTN_TILE_COLS)
        add_tile(t, m, unit->row + at, at, attn__min32(ATTN_TILE_COLS, unit->rows - at));
    if (t->f->d_q.data) give_turn(t, m, before, strip == (end - 1) / keys);
}

static void store_kv(const attn_rows *t, const attn_tensor *to, const real *from, int32_t dim, double factor, int32_t j0,
                     int32_t keys) {
    if (!to->data) return;
    int64_t size = (int64_t)attn_dtype_size(t->p->kv_dtype);
    for (int32_t j = 0; j < keys; j++) {
        int64_t at = attn__kv_offset(t->p, t->f, to, &t->s, t->s.leftpad + j0 + j, t->kv_head) * size;
        t->micro->store((char *)to->data + at, t->p->kv_dtype, from + (int64_t)j * attn__pad(dim), (real)factor, dim);
    }
}

/* The same for d_v alone, and no more keys than a tile has. */
void REAL(bwd_values)(const attn_plan *plan, const attn_buffers *f, const attn_unit *unit, int32_t kv_head, int32_t slot) {
    const attn_problem *p = &plan->problem;
    int32_t group = p->heads_q / p->heads_kv, j0 = unit->row, keys = unit->rows, first, end;
    attn_rows t;
    scratch m;
    thread_scratch(plan, f, slot, &m);
    REAL(tile_make)(&t, plan, f, &(attn_unit){unit->b, 0, 1, -1}, kv_head * group, false);
    memset(m.d_v, 0, (size_t)keys * (size_t)t.dim_v * sizeof(real));
    attn__mask_cols(&t.mask, j0, j0 + keys, &first, &end);
    REAL(tile_load_k)(&t, m.k, j0, keys);
    for (int32_t h = kv_head * group; h < (kv_head + 1) * group; h++) {
        for (int32_t i0 = first / ATTN_TILE_ROWS * ATTN_TILE_ROWS; i0 < end; i0 += ATTN_TILE_ROWS) {
            attn_unit rows = {unit->b, i0, attn__min32(ATTN_TILE_ROWS, t.mask.sq - i0), -1};
            attn_rows q;
            if (!REAL(tile_make)(&q, plan, f, &rows, h, true)) continue;
            int class = REAL(tile_class)(&q, j0, keys);
            if (class == ATTN_TILE_SKIP) continue;
            q.guard = m.guard;
            load_rows(&q, &m, false);
            probabilities(&q, &m, m.q_t, m.k, m.lse, m.low, j0, keys, class, NULL, NULL);
            if (p->dropout > 0) REAL(tile_drop)(&q, m.p, j0, keys);
            REAL(tile_gemm)(&q, m.d_v, t.dim_v, m.p, m.d_o, t.dim_v, t.dim_v, j0, keys, true, class);
        }
    }
    store_kv(&t, &f->d_v, m.d_v, p->dim_v, 1 / (1 - p->dropout), j0, keys);
}

void attn__bwd_values_f64(const attn_plan *plan, const attn_buffers *f, const attn_unit *unit, int32_t kv_head,
                          int32_t slot);

void REAL(bwd_values_again)(const attn_plan *plan, const attn_buffers *f, const attn_unit *unit, int32_t kv_head,
                            int32_t slot, const real *sum, const real *most) {
    uint32_t tiles = 0; /* with such a key, as bits: the scratch, where the sums are, is theirs then */
    for (int32_t j = 0; j < unit->rows; j++)
        if (attn__few((double)sum[j], (double)most[j], ATTN_FEW_ROWS)) tiles |= UINT32_C(1) << j / ATTN_TILE_COLS;
    for (int32_t at = 0; at < unit->rows; at += ATTN_TILE_COLS) {
        attn_unit tile = {unit->b, unit->row + at, attn__min32(ATTN_TILE_COLS, unit->rows - at), -1};
        if (tiles >> at / ATTN_TILE_COLS & 1) attn__bwd_values_f64(plan, f, &tile, kv_head, slot);
    }
}

void REAL(bwd_keys)(const attn_plan *plan, const attn_buffers *f, const attn_unit *unit, int32_t kv_head, int32_t slot) {
    const attn_problem *p = &plan->problem;
    int32_t group = p->heads_q / p->heads_kv, j0 = unit->row, keys = unit->rows, first, end;
    attn_rows t;
    scratch m;
    thread_scratch(plan, f, slot, &m);
    REAL(tile_make)(&t, plan, f, &(attn_unit){unit->b, 0, 1, -1}, kv_head * group, false);
    memset(m.d_k, 0, (size_t)keys * (size_t)t.dim_qk * sizeof(real));
    memset(m.d_v, 0, (size_t)keys * (size_t)t.dim_v * sizeof(real));
    memset(m.sum_p, 0, (size_t)keys * sizeof(real));
    memset(m.most_p, 0, (size_t)keys * sizeof(real));
    attn__mask_cols(&t.mask, j0, j0 + keys, &first, &end);
    if (first < end) {
        REAL(tile_load_k)(&t, m.k, j0, keys);
        REAL(tile_load_v)(&t, m.v, j0, keys);
    }
    for (int32_t h = kv_head * group; h < (kv_head + 1) * group; h++) {
        for (int32_t i0 = first / ATTN_TILE_ROWS * ATTN_TILE_ROWS; i0 < end; i0 += ATTN_TILE_ROWS) {
            attn_unit rows = {unit->b, i0, attn__min32(ATTN_TILE_ROWS, t.mask.sq - i0), -1};
            attn_rows q;
            if (!REAL(tile_make)(&q, plan, f, &rows, h, true)) continue;
            q.guard = m.guard;
            work_queries(&q, &m, unit);
        }
    }
    store_kv(&t, &f->d_k, m.d_k, p->dim_qk, p->scale, j0, keys);
    store_kv(&t, &f->d_v, m.d_v, p->dim_v, 1 / (1 - p->dropout), j0, keys);
    REAL(bwd_values_again)(plan, f, unit, kv_head, slot, m.sum_p, m.most_p);
}

/* ---- bias ---- */

/* Adds d_s of one tile of scores to the sums; a dim that is summed up has one element. */
static void add_to_bias(const attn_rows *t, scratch *m, const int64_t size[4], int32_t j0) {
    int32_t keys = attn__min32(ATTN_TILE_COLS, t->mask.sk - j0);
    int class = REAL(tile_class)(t, j0, keys);
    if (class == ATTN_TILE_SKIP) return;
    REAL(tile_load_k)(t, m->k, j0, keys);
    REAL(tile_load_v)(t, m->v, j0, keys);
    gradients(t, m, m->k, m->v, j0, keys, class, false);
    for (int32_t r = 0; r < t->rows; r++) {
        for (int32_t col = 0; col < keys; col++) {
            int32_t to_row = size[2] > 1 ? r : 0, to_col = size[3] > 1 ? col : 0;
            m->sum[to_row * ATTN_TILE_COLS + to_col] += (double)m->d_s[(int64_t)col * t->width + r];
        }
    }
}

void REAL(bwd_bias)(const attn_plan *plan, const attn_buffers *f, const int64_t size[4], int32_t b, int32_t h,
                    int32_t row_tile, int32_t col_tile, int32_t slot) {
    attn_seq s = attn__seq(&plan->problem, f, b);
    int32_t i0 = size[2] > 1 ? row_tile * ATTN_TILE_ROWS : 0, i1 = size[2] > 1 ? i0 + ATTN_TILE_ROWS : s.sq;
    int32_t j0 = size[3] > 1 ? col_tile * ATTN_TILE_COLS : 0, j1 = size[3] > 1 ? j0 + ATTN_TILE_COLS : s.sk;
    scratch m;
    thread_scratch(plan, f, slot, &m);
    for (int32_t i = i0; i < attn__min32(i1, s.sq); i += ATTN_TILE_ROWS) {
        attn_unit rows = {b, i, attn__min32(ATTN_TILE_ROWS, s.sq - i), -1};
        attn_rows t;
        REAL(tile_make)(&t, plan, f, &rows, h, false);
        t.guard = m.guard;
        load_rows(&t, &m, false);
        for (int32_t col = j0; col < attn__min32(j1, s.sk); col += ATTN_TILE_COLS) add_to_bias(&t, &m, size, col);
    }
}
