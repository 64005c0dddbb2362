/*
 * Attention probabilities, for those who ask to see them: a tile of rows at a time, twice over the keys, first for maximum and
 * sum, then to write. Elements outside of sequences and of masks are written as 0.
 */
#include "tile.h"

#include <math.h>
#include <string.h>

typedef struct job {
    const attn_plan *plan;
    const attn_buffers *f;
    int64_t tiles; /* of max_q */
} job;

/* plan->workspace has room for the forward's scratch; this lays out its own over it. */
typedef struct scratch {
    real *q_t, *k, *s, *guard, *row, *max, *sum, *alpha; /* alpha becomes 1 / the whole sum */
} scratch;

static scratch lay_out(real *at, const attn_problem *p) {
    int64_t qk = attn__pad(p->dim_qk), v = attn__pad(p->dim_v), most = qk > v ? qk : v;
    scratch m;
    m.q_t = at;
    m.k = m.q_t + qk * ATTN_TILE_ROWS;
    m.s = m.k + qk * ATTN_TILE_COLS;
    m.guard = m.s + ATTN_TILE_COLS * ATTN_TILE_ROWS;
    m.row = m.guard + most * ATTN_TILE_ROWS;
    m.max = m.row + most + ATTN_TILE_COLS;
    m.sum = m.max + ATTN_TILE_ROWS;
    m.alpha = m.sum + ATTN_TILE_ROWS;
    return m;
}

/* Of F32 they are floats, whatever they are computed in. */
static void store(const job *j, int64_t at, real value) {
    if (attn__wide(j->plan->problem.dtype))
        ((double *)j->f->probs.data)[at] = attn__one_nan((double)value);
    else
        ((float *)j->f->probs.data)[at] = (float)attn__one_nan((double)value);
}

static void write_zeros(const job *j, int32_t b, int32_t h, int32_t i, int32_t first, int32_t end) {
    const attn_matrix *m = &j->f->probs;
    int64_t row = attn__matrix_at(m, b, h, i, 0);
    for (int32_t col = first; col < end; col++) store(j, row + col * m->stride[3], 0);
}

/* The scores of key tile j0, or false when it is skipped. */
static bool scores(const attn_rows *t, scratch *m, int32_t j0, int32_t keys) {
    int class = REAL(tile_class)(t, j0, keys);
    if (class == ATTN_TILE_SKIP) return false;
    REAL(tile_load_k)(t, m->k, j0, keys);
    REAL(tile_scores)(t, m->s, NULL, NULL, m->q_t, m->k, j0, keys, class, m->row);
    return true;
}

/* p of key tile j0 into memory; the sign bit says what is dropped. */
static void write_tile(const job *j, const attn_rows *t, const scratch *from, int32_t j0, int32_t keys) {
    const attn_matrix *m = &j->f->probs;
    for (int32_t r = 0; r < t->rows; r++) {
        int64_t row = attn__matrix_at(m, t->s.b, t->h[r], t->i[r], 0);
        uint32_t batch_head = (uint32_t)(t->s.b * t->p->heads_q + t->h[r]);
        for (int32_t col = 0; col < keys; col++) {
            const int32_t *flash = t->mask.vectors ? attn__flash_at(t->p, t->f, t->s.b, t->kv_head, j0 + col) : NULL;
            bool allowed = attn__mask_allowed(&t->mask, t->i[r], j0 + col, flash);
            bool dropped = allowed && t->p->dropout > 0 &&
                           attn__dropped(&t->dropout, batch_head, (uint32_t)t->i[r], (uint32_t)(j0 + col));
            real value = from->s[(int64_t)col * t->width + r] * from->alpha[r];
            store(j, row + (j0 + col) * m->stride[3], !allowed ? 0 : dropped ? -value : value);
        }
    }
}

/* What e^(s - max) is multiplied with; a row without keys gets 0, as all its p are. */
static void to_factors(const attn_rows *t, scratch *m) {
    for (int32_t r = 0; r < t->width; r++) {
        double sum = m->sum[r];
        if (t->p->flags & ATTN_SINK) sum += exp((double)t->f->sink[t->h[r]] - (double)m->max[r]);
        m->alpha[r] = m->max[r] == (real)-INFINITY && m->sum[r] == 0 ? 0 : (real)(1 / sum);
    }
}

static void work_tile(void *arg, int64_t index, int32_t slot) {
    const job *j = arg;
    const attn_problem *p = &j->plan->problem;
    int32_t h = (int32_t)(index % p->heads_q), b = (int32_t)(index / p->heads_q / j->tiles);
    int32_t i0 = (int32_t)(index / p->heads_q % j->tiles) * ATTN_TILE_ROWS, i1 = attn__min32(i0 + ATTN_TILE_ROWS, p->max_q);
    attn_seq s = attn__seq(p, j->f, b);
    for (int32_t i = i0; i < i1; i++) write_zeros(j, b, h, i, i < s.sq ? s.sk : 0, p->max_kv);
    attn_unit unit = {.b = b, .row = i0, .rows = attn__min32(i1, s.sq) - i0, .chunk = -1};
    attn_rows t;
    if (unit.rows <= 0 || !REAL(tile_make)(&t, j->plan, j->f, &unit, h, false)) return;
    scratch m = lay_out((real *)(void *)attn__slot(j->plan, j->f, slot), p);
    t.guard = m.guard;
    REAL(tile_load_q)(&t, m.q_t);
    for (int32_t r = 0; r < t.width; r++) {
        m.max[r] = (real)-INFINITY;
        m.sum[r] = 0;
    }
    for (int32_t j0 = 0; j0 < s.sk; j0 += ATTN_TILE_COLS) {
        int32_t keys = attn__min32(ATTN_TILE_COLS, s.sk - j0);
        if (scores(&t, &m, j0, keys)) t.micro->softmax(m.s, keys, t.width, t.width, m.max, m.sum, m.alpha);
    }
    to_factors(&t, &m);
    for (int32_t j0 = 0; j0 < s.sk; j0 += ATTN_TILE_COLS) {
        int32_t keys = attn__min32(ATTN_TILE_COLS, s.sk - j0);
        if (scores(&t, &m, j0, keys)) {
            t.micro->exp(m.s, NULL, keys, t.width, m.max, NULL, NULL);
            write_tile(j, &t, &m, j0, keys);
        } else {
            for (int32_t r = 0; r < t.rows; r++) write_zeros(j, b, t.h[r], t.i[r], j0, j0 + keys);
        }
    }
}

attn_status REAL(probs_run)(const attn_plan *plan, const attn_buffers *f) {
    const attn_problem *p = &plan->problem;
    job j = {plan, f, attn__ceil_div(p->max_q, ATTN_TILE_ROWS)};
    return attn__parallel(plan->context, plan->slots, p->batch * j.tiles * p->heads_q, work_tile, &j);
}
