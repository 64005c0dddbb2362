/*
 * Forward: FlashAttention-2's loops. Query tiles are the units of work; each walks its key tiles in ascending order, skips
 * the masked ones, and keeps a running maximum, sum and unnormalised output per row; the division comes last.
 *
 * Short sequences (decode) are worked in chunks of keys. The results of the chunks are folded in ascending order, on one
 * thread as they come or, when the plan splits, by a second pass over what many threads have left in the workspace. Both ways
 * run the same arithmetic in the same order.
 *
 * Rows of float32 that turn out to weigh few keys are done again in double (attn__mixed), gathered from all tiles of a strip.
 */
#include "tile.h"

#include <math.h>
#include <string.h>

#include "../numeric.h"

/* Running result of a tile's rows. */
typedef struct state {
    real *o;   /* [rows][dim_v], unnormalised */
    real *max; /* [width] */
    real *sum; /* [width] */
} state;

/* A tile of a strip. */
typedef struct member {
    attn_rows t;
    real *q;           /* as tile_load_q leaves it */
    state now, folded; /* the chunk at hand; all chunks before it */
} member;

/* One thread's memory. */
typedef struct scratch {
    real *q;           /* of all tiles of the strip, as `now` is */
    real *k, *v, *s;   /* [cols][dim_qk], [cols][dim_v], [cols][width] */
    real *guard, *row; /* see tile_gemm; one row or column of anything */
    real *alpha;       /* [width] */
    state now, folded;
} scratch;

/* As attn__lay_out, which it calls. */
static int64_t lay_out(scratch *m, char *at, const attn_plan *plan) {
    const attn_problem *p = &plan->problem;
    bool may_be_short = attn__is_short(p->max_q) || (p->flags & (ATTN_VARLEN_Q | ATTN_USED_Q));
    const int64_t rows = plan->strip * ATTN_TILE_ROWS, folded = may_be_short ? rows : 0;
    int64_t qk = attn__pad(p->dim_qk), v = attn__pad(p->dim_v), most = qk > v ? qk : v;
    const int64_t size = sizeof(real);
    const attn_room rooms[] = {
        {&m->q, qk * rows * size},
        {&m->k, qk * ATTN_TILE_COLS * size},
        {&m->v, v * ATTN_TILE_COLS * size},
        {&m->s, ATTN_TILE_COLS * ATTN_TILE_ROWS * size},
        {&m->guard, most * ATTN_TILE_ROWS * size},
        {&m->row, (most + ATTN_TILE_COLS) * size},
        {&m->alpha, ATTN_TILE_ROWS * size},
        {&m->now.o, v * rows * size},
        {&m->now.max, rows * size},
        {&m->now.sum, rows * size},
        {&m->folded.o, v * folded * size},
        {&m->folded.max, folded * size},
        {&m->folded.sum, folded * size},
    };
    return attn__lay_out(at, rooms, sizeof rooms / sizeof rooms[0]);
}

int64_t REAL(fwd_scratch)(const attn_plan *plan) {
    scratch unused;
    return lay_out(&unused, NULL, plan);
}

static void clear(const attn_rows *t, const state *st) {
    memset(st->o, 0, (size_t)t->rows * (size_t)t->dim_v * sizeof(real));
    for (int32_t r = 0; r < t->width; r++) {
        st->max[r] = (real)-INFINITY;
        st->sum[r] = 0;
    }
}

/* Has the row met no score but -inf? (Scores of NaN leave the maximum where it was, and show in the sum.) */
static bool is_empty(double max, double sum) { return max == -INFINITY && sum == 0; }

/* acc (one row) takes in another row of results over later keys. */
static void fold_row(const attn_rows *t, real *o, real *max, real *sum, const real *o_part, real max_part, real sum_part) {
    if (is_empty(max_part, sum_part)) return;
    if (is_empty(*max, *sum)) { /* what is below does the same with factors of 0 and 1 */
        for (int32_t x = 0; x < t->dim_v; x++) o[x] = o_part[x] + 0;
        *sum = sum_part;
        *max = max_part;
        return;
    }
    real most = *max > max_part ? *max : max_part;
    real a = (real)exp(*max - most), b = (real)exp(max_part - most);
    for (int32_t x = 0; x < t->dim_v; x++) o[x] = o[x] * a + o_part[x] * b;
    *sum = *sum * a + sum_part * b;
    *max = most;
}

static void fold(const attn_rows *t, state *to, const state *part) {
    for (int32_t r = 0; r < t->rows; r++) {
        int64_t at = (int64_t)r * t->dim_v;
        fold_row(t, to->o + at, &to->max[r], &to->sum[r], part->o + at, part->max[r], part->sum[r]);
    }
}

/* Where the values of tile t, or its keys, from j0 on begin; NULL: there are none. */
static const void *begin_of(const attn_rows *t, const attn_tensor *of, int32_t j0) {
    return j0 < t->s.sk ? REAL(tile_kv_row)(t, of, t->s.leftpad + j0, NULL) : NULL;
}

/* Keys of few rows, if they can be read where they are: most are read once, so that copying them first costs as much. NULL: they are loaded. */
static const real *keys_in_place(const attn_rows *t, int32_t j0, int32_t keys) {
    const attn_problem *p = t->p;
    const bool is_array =
        keys > 1 && p->page_size != 1 && REAL(tile_in_one_page)(t, j0, keys); /* else a stride may be anything */
    const bool as_it_is = p->kv_dtype == REAL_DTYPE && p->dim_qk == t->dim_qk && !(p->flags & ATTN_DESCALE_PAGES);
    return attn__is_short(t->s.sq) && is_array && as_it_is ? begin_of(t, &t->f->k, j0) : NULL;
}

/* One tile of keys, which are loaded; a narrow tile sees to that by itself, and asks for what is at `next` in the end. */
static void work_tile(const member *x, scratch *m, int32_t j0, int32_t keys, int class, const void *next) {
    const attn_rows *t = &x->t;
    const real *k = t->narrow ? NULL : keys_in_place(t, j0, keys);
    if (t->narrow) {
        REAL(tile_narrow_scores)(t, m->s, x->q, j0, keys, class, begin_of(t, &t->f->v, j0), m->k, m->row);
    } else {
        REAL(tile_dots)(t, m->s, k ? k : m->k, k ? t->f->k.stride[1] : t->dim_qk, x->q, t->p->dim_qk, j0, keys, class);
        REAL(tile_adjust)(t, m->s, NULL, NULL, j0, keys, class, m->row);
    }
    t->micro->softmax(m->s, keys, t->width, t->rows, x->now.max, x->now.sum, m->alpha);
    if (t->p->dropout > 0) REAL(tile_drop)(t, m->s, j0, keys);
    for (int32_t r = 0; r < t->rows; r++) {
        if (m->alpha[r] != 1) t->micro->scale(x->now.o + (int64_t)r * t->dim_v, t->dim_v, m->alpha[r]);
    }
    if (t->narrow)
        REAL(tile_narrow_gemm)(t, x->now.o, m->s, j0, keys, class, next, m->v);
    else
        REAL(tile_gemm)(t, x->now.o, t->dim_v, m->s, m->v, t->dim_v, t->dim_v, j0, keys, false, class);
}

/* Keys [first, end) of the rows of a strip. */
static void work_keys(const member *strip, int32_t count, scratch *m, int32_t first, int32_t end) {
    for (int32_t n = 0; n < count; n++) clear(&strip[n].t, &strip[n].now);
    for (int32_t j0 = first / ATTN_TILE_COLS * ATTN_TILE_COLS; j0 < end; j0 += ATTN_TILE_COLS) {
        int32_t keys = attn__min32(ATTN_TILE_COLS, end - j0); /* nobody sees those after them */
        int32_t loaded = -1;                                  /* the KV head whose keys are loaded */
        for (int32_t n = 0; n < count; n++) {
            int class = REAL(tile_class)(&strip[n].t, j0, keys);
            if (class == ATTN_TILE_SKIP) continue;
            if (strip[n].t.kv_head != loaded && !strip->t.narrow) {
                if (!keys_in_place(&strip[n].t, j0, keys)) REAL(tile_load_k)(&strip[n].t, m->k, j0, keys);
                REAL(tile_load_v)(&strip[n].t, m->v, j0, keys);
                loaded = strip[n].t.kv_head;
            }
            const attn_rows *after = n + 1 < count ? &strip[n + 1].t : &strip->t; /* whose keys come next */
            work_tile(&strip[n], m, j0, keys, class,
                      strip->t.narrow ? begin_of(after, &after->f->k, n + 1 < count ? j0 : j0 + ATTN_TILE_COLS) : NULL);
        }
    }
}

/* Divides, adds the sink, writes o and lse of row r. */
void REAL(fwd_finish_row)(const attn_rows *t, int32_t r, const real *o, double max, double sum) {
    const attn_problem *p = t->p;
    const attn_buffers *f = t->f;
    char *to =
        (char *)f->o.data + attn__q_offset(p, &f->o, &t->s, t->i[r], t->h[r]) * (int64_t)attn_dtype_size(p->out_dtype);
    double lse = -INFINITY, factor = 0;
    if (is_empty(max, sum)) { /* C1 */
        memset(to, 0, (size_t)p->dim_v * attn_dtype_size(p->out_dtype));
    } else {
        double total = sum, most = max, weight = 1;
        if (p->flags & ATTN_SINK) {
            double sink = f->sink[t->h[r]];
            most = sink > most ? sink : most;
            weight = exp(max - most);
            total = total * weight + exp(sink - most);
        }
        factor = weight / total / (1 - p->dropout) * attn__kv_descale(p, f, f->v_descale, t->s.b, t->kv_head);
        lse = attn__one_nan(most + log(total));
        t->micro->store(to, p->out_dtype, o, (real)factor, p->dim_v);
    }
    if (f->lse) attn__store(attn__real_dtype(p->dtype), f->lse, attn__lse_index(p, &t->s, t->i[r], t->h[r]), lse);
}

static void finish_row(const attn_rows *t, const state *st, int32_t r) {
    REAL(fwd_finish_row)(t, r, st->o + (int64_t)r * t->dim_v, st->max[r], st->sum[r]);
}

/* Rows of a strip that are to be done again in double. */
typedef struct doubtful {
    int32_t count;
    attn_place rows[ATTN_STRIP * ATTN_TILE_ROWS];
} doubtful;

static bool is_doubtful(const attn_rows *t, real sum) {
    return REAL_DTYPE == ATTN_F32 && attn__mixed(t->p) && sum > 0 && attn__few(sum, 1, ATTN_FEW_KEYS);
}

static void finish(const attn_rows *t, const state *st, doubtful *again) {
    for (int32_t r = 0; r < t->rows; r++) {
        if (is_doubtful(t, st->sum[r]))
            again->rows[again->count++] = (attn_place){t->h[r], t->i[r]};
        else
            finish_row(t, st, r);
    }
}

void attn__fwd_rows_f64(const attn_plan *plan, const attn_buffers *f, int32_t b, const attn_place *rows, int32_t count,
                        int32_t slot);

/* Comes last: the scratch is theirs now. */
static void finish_again(const attn_plan *plan, const attn_buffers *f, int32_t b, const doubtful *again, int32_t slot) {
    for (int32_t n = 0, count; n < again->count; n += count) {
        count = attn__gather(&plan->problem, again->rows + n, again->count - n);
        attn__fwd_rows_f64(plan, f, b, again->rows + n, count, slot);
    }
}

/* ---- chunks that other threads fold ---- */

/* The partial result of one row and chunk: dim_v numbers of o, then max and sum. */
static real *partial_of(const attn_rows *t, int32_t r, int32_t chunk) {
    const attn_problem *p = t->p;
    int64_t row = ((int64_t)t->s.b * p->heads_q + t->h[r]) * p->max_q + t->i[r];
    int64_t chunks = attn__ceil_div(p->max_kv, ATTN_CHUNK);
    return (real *)((char *)attn__part(t->plan, t->f, CPU_PARTIAL) + (row * chunks + chunk) * attn__fwd_partial(p));
}

static void keep_partial(const attn_rows *t, const state *st, int32_t chunk) {
    for (int32_t r = 0; r < t->rows; r++) {
        real *to = partial_of(t, r, chunk);
        memcpy(to, st->o + (int64_t)r * t->dim_v, (size_t)t->dim_v * sizeof(real));
        to[t->dim_v] = st->max[r];
        to[t->dim_v + 1] = st->sum[r];
    }
}

static void thread_scratch(const attn_rows *t, int32_t slot, scratch *m) {
    lay_out(m, attn__slot(t->plan, t->f, slot), t->plan);
}

/* Second pass of a split run: all rows of one sequence and head. */
void REAL(fwd_fold)(const attn_plan *plan, const attn_buffers *f, int32_t b, int32_t h, int32_t slot) {
    attn_rows t;
    scratch m;
    int32_t first, end;
    attn_unit unit = {.b = b, .row = 0, .rows = attn__seq(&plan->problem, f, b).sq, .chunk = -1};
    if (unit.rows == 0 || !REAL(tile_make)(&t, plan, f, &unit, h, true)) return;
    if (attn__takes_bf16(plan, &t.s)) return; /* it does not split */
    attn__mask_rows(&t.mask, 0, t.count, &first, &end);
    if (first >= end) return; /* done by the first pass */
    thread_scratch(&t, slot, &m);
    clear(&t, &m.folded);
    for (int32_t r = 0; r < t.rows; r++) {
        real *o = m.folded.o + (int64_t)r * t.dim_v;
        for (int32_t chunk = first / ATTN_CHUNK; chunk <= (end - 1) / ATTN_CHUNK; chunk++) {
            const real *part = partial_of(&t, r, chunk);
            fold_row(&t, o, &m.folded.max[r], &m.folded.sum[r], part, part[t.dim_v], part[t.dim_v + 1]);
        }
    }
    doubtful again;
    again.count = 0;
    finish(&t, &m.folded, &again);
    finish_again(plan, f, b, &again, slot);
}

/* ---- the kernel ---- */

/* A tile joins the strip. */
static void join(member *strip, int32_t place, scratch *m, int32_t slot) {
    member *x = &strip[place];
    int64_t row = (int64_t)place * ATTN_TILE_ROWS, o = row * x->t.dim_v;
    if (place == 0) thread_scratch(&x->t, slot, m);
    x->q = m->q + row * x->t.dim_qk;
    x->now = (state){m->now.o + o, m->now.max + row, m->now.sum + row};
    x->folded = (state){m->folded.o + o, m->folded.max + row, m->folded.sum + row};
    x->t.guard = m->guard;
    REAL(tile_load_q)(&x->t, x->q);
}

/* The strip of a long sequence that begins with head h, or none: tiles of rows of as many heads of the group as fit. */
static int32_t make_long(member *strip, scratch *m, const attn_plan *plan, const attn_buffers *f, const attn_unit *unit,
                         int32_t h, int32_t slot) {
    int32_t group = plan->problem.heads_q / plan->problem.heads_kv, fit = plan->strip_heads, count = 0;
    if (h % group % fit != 0) return 0;
    for (int32_t n = h; n < h + attn__min32(fit, group - h % group); n++) {
        for (int32_t i = 0; i < unit->rows; i += ATTN_TILE_ROWS, count++) {
            attn_unit tile = {unit->b, unit->row + i, attn__min32(ATTN_TILE_ROWS, unit->rows - i), -1};
            REAL(tile_make)(&strip[count].t, plan, f, &tile, n, false);
            join(strip, count, m, slot);
        }
    }
    return count;
}

/* The same of a short sequence: all tiles of as many groups as fit, or only the tile that begins with head h. */
static int32_t make_short(member *strip, scratch *m, const attn_plan *plan, const attn_buffers *f, const attn_unit *unit,
                          int32_t h, int32_t slot) {
    const attn_problem *p = &plan->problem;
    int32_t groups = plan->strip / attn__short_tiles(p, unit->rows), heads = groups * (p->heads_q / p->heads_kv), count = 0;
    if (groups > 0 && h % heads != 0) return 0;
    for (int32_t n = h; n < attn__min32(h + attn__max32(heads, 1), p->heads_q); n++) {
        if (!REAL(tile_make)(&strip[count].t, plan, f, unit, n, true)) continue;
        join(strip, count++, m, slot);
    }
    return count;
}

void REAL(fwd_unit)(const attn_plan *plan, const attn_buffers *f, const attn_unit *unit, int32_t h, int32_t slot) {
    member strip[ATTN_STRIP];
    scratch m;
    attn_seq s = attn__seq(&plan->problem, f, unit->b);
    attn_mask mask = attn__seq_mask(&plan->problem, &s);
    bool is_short = attn__is_short(s.sq);
    int32_t count = (is_short ? make_short : make_long)(strip, &m, plan, f, unit, h, slot), first, end;
    attn__mask_rows(&mask, unit->row, unit->row + unit->rows, &first, &end);
    if (count == 0) return;
    doubtful again;
    again.count = 0;
    if (!is_short || unit->chunk >= 0) {
        int32_t from = is_short ? unit->chunk * ATTN_CHUNK : first, to = is_short ? from + ATTN_CHUNK : end;
        work_keys(strip, count, &m, attn__max32(first, from), attn__min32(end, to));
        for (int32_t n = 0; n < count; n++) {
            if (is_short)
                keep_partial(&strip[n].t, &strip[n].now, unit->chunk);
            else
                finish(&strip[n].t, &strip[n].now, &again);
        }
        finish_again(plan, f, s.b, &again, slot);
        return;
    }
    for (int32_t n = 0; n < count; n++) clear(&strip[n].t, &strip[n].folded);
    for (int32_t stop; first < end; first = stop) {
        stop = attn__min32(end, (first / ATTN_CHUNK + 1) * ATTN_CHUNK);
        work_keys(strip, count, &m, first, stop);
        for (int32_t n = 0; n < count; n++) fold(&strip[n].t, &strip[n].folded, &strip[n].now);
    }
    for (int32_t n = 0; n < count; n++) finish(&strip[n].t, &strip[n].folded, &again);
    finish_again(plan, f, s.b, &again, slot);
}

void REAL(fwd_rows)(const attn_plan *plan, const attn_buffers *f, int32_t b, const attn_place *rows, int32_t count,
                    int32_t slot) {
    member x;
    scratch m;
    int32_t first, end;
    REAL(tile_gather)(&x.t, plan, f, b, rows, count);
    join(&x, 0, &m, slot);
    attn__mask_rows(&x.t.mask, x.t.i0, x.t.i0 + x.t.count, &first, &end);
    work_keys(&x, 1, &m, first, end);
    doubtful again = {.count = 0};
    finish(&x.t, &x.now, &again);
    finish_again(plan, f, b, &again, slot);
}
