/*
 * The backward by products of bf16 (bf16.h): what bwd.c does with a strip of keys, for sequences that are not narrow, q, k, v and o all bf16; or, by tiles
 * of AMX, all float32, as three bf16 each, or all f16, as two.
 *
 * The strip's keys and values are packed into operands once, and so are q and d_o of each query tile (tile_rows). A tile meets the
 * strip in blocks of up to KEYS keys, and a block part by part, 32 rows each:
 *
 *     S^T = K q^T    d_P^T = V d_o^T    p and d_s, rounded to bf16    d_q^T += K^T d_s        then, for all rows of the tile:
 *     d_v += p d_o    d_k += d_s q
 *
 * Scores are transposed, [key][row], so the operands p and d_s of the last two come out as they lie. d_q of a tile is summed over all
 * strips in turns, as in bwd.c. Sums of d_k and d_v run over rows in ascending order, those of d_q over keys, in
 * steps of 32 that begin at multiples of 32: bits depend on neither the size of tiles and blocks nor on their classes (C5).
 *
 * Masked pairs have p = d_s = 0, which must not meet NaN or infinity (C2). The operands of the last three products have zeros in
 * their place; what that leaves out is added one by one, for the pairs that are allowed.
 *
 * In parts: of rows and keys with numbers that are too large to be lifted (bf16.h), or none, every pair that is allowed is worked by itself, in double
 * (work_pair), from the score that everybody else has: of tiles or, where there are no parts, of bwd.c. The operands of its row or key are zeros, and so are its p and d_s, so that nobody else's bits change; what it gives is summed up by itself, too.
 */
#include "bf16.h"

#include <math.h>
#include <string.h>

#include "../numeric.h"
#include "tile.h"

#ifdef ATTN_HAVE_BF16

enum {
    ROWS = 256,              /* of a tile, at most; a multiple of 32 */
    KEYS = 256,              /* of a block, at most; a multiple of ATTN_TILE_COLS */
    STRIP = ATTN_STRIP_KEYS, /* of a unit, at most */
    CLASSES = KEYS / ATTN_TILE_COLS,
    PARTS = ROWS / ATTN_BF16_ROWS,
    GROUP = PARTS / 2 /* parts of the smaller tile */
};

/*
 * Rows of a query tile. More are faster, as long as threads need not wait for one another: those that work on strips of one head take
 * turns at d_q, tile by tile, and there are hardly two of them where there are as many heads as threads. The parts of float32 and f16 are to stay in the
 * second cache, or in half of it.
 */
static int32_t tile_rows(const attn_plan *plan) {
    bool alone = plan->slots == 1 || (int64_t)plan->problem.batch * plan->problem.heads_kv >= plan->slots;
    const int32_t parts = !attn__splits(plan) ? (alone ? PARTS : GROUP) : plan->strip_keys < STRIP ? GROUP / 2 : GROUP;
    return parts * ATTN_BF16_ROWS;
}

/* One thread's memory; `rows` are those of a tile. */
typedef struct scratch {
    uint16_t *k, *v;               /* operands a: m over keys */
    uint16_t *k_t;                 /* K^T, m over dims; NaN and infinity are 0 */
    float *d_k, *d_v;              /* [dim / 16][STRIP][16] */
    uint16_t *q, *d_o;             /* operands b: n over rows */
    uint16_t *q_t, *d_o_t;         /* n over dims; NaN and infinity are 0 */
    float *d_q;                    /* [rows / 16][dim][16], rows of 32 in the order of attn__bf16_row */
    float *s, *d_p, *slope, *rest; /* of a part, [2][keys][16] */
    uint16_t *p, *d_s;             /* of a block, operands a, m over keys, k over rows */
    uint16_t *pairs;               /* d_s of a part, operand b */
    void *rows;                    /* rows that are changed before they are packed */
    float *out, *row;              /* [16][dim]; see tile_adjust */
    float *lse, *low, *delta;      /* [rows]; low: what lse as float has no room for */
    float *sum_p, *most_p;         /* [keys of a strip]: over the rows, where it matters that few weigh (attn__mixed) */
    float *pair;                   /* q, d_o, k and v of an odd pair */
    float *odd_q, *odd_k, *odd_v;  /* of odd pairs: d_q of the tile, d_k and d_v of the strip, [row or key][dim] */
} scratch;

/* As attn__lay_out, which it calls. */
static int64_t lay_out(scratch *m, char *at, const attn_plan *plan) {
    const attn_problem *p = &plan->problem;
    int64_t qk = attn__bf16_pad(p->dim_qk), v = attn__bf16_pad(p->dim_v), most = qk > v ? qk : v;
    int64_t half = sizeof(uint16_t), whole = sizeof(float), part = KEYS * ATTN_BF16_ROWS, rows = tile_rows(plan);
    const int32_t parts = attn__bf16_parts(p->dtype);
    const bool splits = parts > 1;
    const int64_t number = (int64_t)attn_dtype_size(p->dtype);
    const attn_room rooms[] = {
        {&m->k, attn__bf16_whole_of(parts, STRIP * qk) * half},
        {&m->v, attn__bf16_whole_of(parts, STRIP * v) * half},
        {&m->k_t, attn__bf16_whole_of(parts, STRIP * qk) * half},
        {&m->d_k, STRIP * qk * whole},
        {&m->d_v, STRIP * v * whole},
        {&m->q, attn__bf16_whole_of(parts, rows * qk) * half},
        {&m->d_o, attn__bf16_whole_of(parts, rows * v) * half},
        {&m->q_t, attn__bf16_whole_of(parts, rows * qk) * half},
        {&m->d_o_t, attn__bf16_whole_of(parts, rows * v) * half},
        {&m->d_q, rows * qk * whole},
        {&m->s, part * whole},
        {&m->d_p, part * whole},
        {&m->slope, part * whole},
        {&m->rest, part * whole},
        {&m->p, attn__bf16_whole_of(parts, KEYS * rows) * half},
        {&m->d_s, attn__bf16_whole_of(parts, KEYS * rows) * half},
        {&m->pairs, attn__bf16_whole_of(parts, part) * half},
        {&m->rows, (STRIP > rows ? STRIP : rows) * most * number},
        {&m->out, 16 * most * whole},
        {&m->row, KEYS * whole},
        {&m->lse, rows * whole},
        {&m->low, rows * whole},
        {&m->delta, rows * whole},
        {&m->sum_p, splits ? STRIP * whole : 0},
        {&m->most_p, splits ? STRIP * whole : 0},
        {&m->pair, splits ? 4 * most * whole : 0},
        {&m->odd_q, splits ? rows * qk * whole : 0},
        {&m->odd_k, splits ? STRIP * qk * whole : 0},
        {&m->odd_v, splits ? STRIP * v * whole : 0},
    };
    return attn__lay_out(at, rooms, sizeof rooms / sizeof rooms[0]);
}

int64_t attn__bf16_bwd_scratch(const attn_plan *plan) {
    scratch unused;
    return lay_out(&unused, NULL, plan);
}

/* A strip of keys, and the query tile that it meets. */
typedef struct strip {
    const attn_plan *plan;
    const attn_buffers *f;
    const attn_problem *p;
    scratch m;
    int32_t j0, keys;     /* of the strip */
    int64_t qk, v;        /* dims, padded to 32 */
    int64_t down;         /* panels of p and d_s are so far apart */
    int32_t number_parts; /* of a number, while `parts` are those of the tile */
    int64_t part;         /* from part to part of p and d_s */
    bool splits;          /* are there several? */
    int32_t block;        /* keys of a block; fewer in parts, of which more would not stay in the second cache */
    float scale;          /* of the dot products, unless they are scaled already */
    bool scaled;          /* are they before p is made? */
    float lifted;         /* d_p is so many times too large, */
    float sum_lifted;     /* and sums of d_q, d_k and d_v */
    attn_rows panel[ROWS / 16];
    int32_t rows, parts;                           /* of the tile */
    bool bad_k[STRIP], bad_q[ROWS], bad_d_o[ROWS]; /* rows of which the operands leave something out */
    bool any_k, any_q, any_d_o;                    /* are there such? */
    bool odd_key[STRIP], odd_row[ROWS];            /* in parts: those of which pairs are worked by themselves */
    bool far_key[STRIP],
        far_row[ROWS]; /* and of which scores are bwd.c's: k or q has no parts either, lse is large, or of few keys */
    bool any_odd_key, any_odd_row, any_far_key, any_far_row; /* are there such? */
    bool had_odd;   /* have there been, in this strip? Then m.odd_k and m.odd_v have something, */
    bool has_odd_q; /* and, of this tile, m.odd_q. */
} strip;

static bool any_odd(const strip *s) { return s->any_odd_key || s->any_odd_row; }

static void add(float *to, const float *more, int64_t count) {
    for (int64_t n = 0; n < count; n++) to[n] += more[n];
}

/* m.odd_q, which is 0 when the tile first asks for it. */
static float *odd_d_q(strip *s) {
    if (!s->has_odd_q) memset(s->m.odd_q, 0, (size_t)(s->rows * s->qk) * sizeof *s->m.odd_q);
    s->has_odd_q = true;
    return s->m.odd_q;
}

/* From part to part of an operand of so many rows, or keys. */
static int64_t part_of(const strip *s, int64_t rows, int64_t dim) {
    return attn__bf16_part_of(s->number_parts, rows * dim);
}

/* ---- loading ---- */

static const void *kv_row(const strip *s, const attn_tensor *of, int32_t j) {
    const attn_rows *t = s->panel;
    return attn__tile_kv_row_f32(t, of, t->s.leftpad + j, NULL);
}

static const void *q_row(const strip *s, const attn_tensor *of, int32_t r) {
    const attn_rows *t = s->panel;
    const int64_t at = attn__q_offset(s->p, of, &t->s, t->i0 + r, t->h0);
    return (const char *)of->data + at * (int64_t)attn_dtype_size(s->p->dtype);
}

/* Marks rows with a number that is too large, times the lift, to have parts, or none. True: there are such. */
static bool mark(const attn_bf16_numbers *of, int32_t rows, int32_t dim, float lift, bool *marked) {
    bool any = false;
    for (int32_t r = 0; r < rows; r++) {
        for (int32_t n = 0; n < dim; n++)
            marked[r] |= attn__bf16_odd((float)attn__load(of->dtype, of->from, r * of->row + n) * lift) == ATTN_SPLIT_OUT;
        any |= marked[r];
    }
    return any;
}

/* The same with zeros in the place of marked rows, a copy in m.rows without gaps. */
static attn_bf16_numbers without(const strip *s, const attn_bf16_numbers *of, int32_t rows, int32_t dim,
                                 const bool *marked) {
    const size_t number = attn_dtype_size(of->dtype), bytes = (size_t)dim * number;
    for (int32_t r = 0; r < rows; r++) {
        char *to = (char *)s->m.rows + (size_t)r * bytes;
        if (marked[r])
            memset(to, 0, bytes);
        else
            memmove(to, (const char *)of->from + (size_t)(r * of->row) * number, bytes); /* it may be a copy already */
    }
    return (attn_bf16_numbers){s->m.rows, of->dtype, dim, of->factor};
}

/* k; or v, of which k_t is NULL. */
static void split_keys(strip *s, const attn_tensor *of, int32_t dim, uint16_t *a, uint16_t *k_t) {
    attn_bf16_numbers from = {kv_row(s, of, s->j0), s->p->kv_dtype, of->stride[1], k_t ? 1 : ATTN_LIFT_V};
    const int64_t part = part_of(s, STRIP, attn__bf16_pad(dim));
    const int found = attn__bf16_split_rows(a, part, &from, s->keys, dim);
    if (found & (k_t ? ATTN_SPLIT_IS_LARGE : ATTN_SPLIT_OUT)) {
        s->any_odd_key |= mark(&from, s->keys, dim, ATTN_LIFT_V, s->odd_key);
        if (k_t) s->any_far_key = mark(&from, s->keys, dim, 1, s->far_key);
        const attn_bf16_numbers clean = without(s, &from, s->keys, dim, k_t ? s->far_key : s->odd_key);
        if (found & ATTN_SPLIT_OUT) attn__bf16_split_rows(a, part, &clean, s->keys, dim);
        from = without(s, &from, s->keys, dim, s->odd_key);
    }
    from.factor = ATTN_LIFT_OTHERS;
    if (k_t) attn__bf16_split_columns(k_t, part, &from, s->keys, dim);
}

/* There is no paged cache in a backward: rows of k and v lie a fixed distance apart. */
static void load_keys(strip *s) {
    if (s->splits) {
        split_keys(s, &s->f->k, s->p->dim_qk, s->m.k, s->m.k_t);
        split_keys(s, &s->f->v, s->p->dim_v, s->m.v, NULL);
        return;
    }
    const uint16_t *k = kv_row(s, &s->f->k, s->j0), *v = kv_row(s, &s->f->v, s->j0);
    int64_t k_row = s->f->k.stride[1], v_row = s->f->v.stride[1];
    attn__bf16_pack_rows(s->m.k, k, k_row, s->keys, s->p->dim_qk);
    attn__bf16_pack_rows(s->m.v, v, v_row, s->keys, s->p->dim_v);
    s->any_k = !attn__bf16_pack_columns(s->m.k_t, k, k_row, s->keys, s->p->dim_qk);
    if (!s->any_k) return;
    k = attn__bf16_clean(s->m.rows, k, k_row, s->keys, s->p->dim_qk, s->bad_k);
    attn__bf16_pack_columns(s->m.k_t, k, s->p->dim_qk, s->keys, s->p->dim_qk);
}

/* q or d_o of the tile as operands b, `b` with n over rows and `b_t` with n over dims. Rows without a key become 0 (C1). True: bad has rows. */
static bool load_operands(strip *s, const attn_tensor *of, int32_t dim, uint16_t *b, uint16_t *b_t, bool *bad) {
    const void *from = q_row(s, of, 0);
    const int64_t padded = attn__bf16_pad(dim), part = part_of(s, tile_rows(s->plan), padded);
    const size_t number = attn_dtype_size(s->p->dtype), bytes = (size_t)dim * number;
    int64_t row = of->stride[1];
    bool is_empty = false;
    for (int32_t r = 0; r < s->rows; r++) is_empty |= s->m.lse[r] == INFINITY;
    for (int32_t r = 0; is_empty && r < s->rows; r++) {
        char *to = (char *)s->m.rows + (size_t)r * bytes;
        if (s->m.lse[r] == INFINITY)
            memset(to, 0, bytes);
        else
            memcpy(to, (const char *)from + (size_t)(r * row) * number, bytes);
    }
    if (is_empty) from = s->m.rows, row = dim;
    for (int n = 0; s->rows % 32 != 0 && n < s->number_parts; n++)
        memset(b + n * part, 0, (size_t)(attn__bf16_pad(s->rows) * padded) * sizeof *b);
    if (s->splits) {
        const bool is_q = of == &s->f->q;
        attn_bf16_numbers numbers = {from, s->p->dtype, row, is_q ? 1 : ATTN_LIFT_D_O};
        const int found = attn__bf16_split_dims(b, part, &numbers, s->rows, dim);
        if (found & (is_q ? ATTN_SPLIT_IS_LARGE : ATTN_SPLIT_OUT)) {
            s->any_odd_row |= mark(&numbers, s->rows, dim, is_q ? ATTN_LIFT_V : ATTN_LIFT_D_O, s->odd_row);
            if (is_q) s->any_far_row |= mark(&numbers, s->rows, dim, 1, s->far_row);
            const attn_bf16_numbers clean = without(s, &numbers, s->rows, dim, is_q ? s->far_row : s->odd_row);
            if (found & ATTN_SPLIT_OUT) attn__bf16_split_dims(b, part, &clean, s->rows, dim);
            numbers = without(s, &numbers, s->rows, dim, s->odd_row);
        }
        numbers.factor = ATTN_LIFT_OTHERS;
        attn__bf16_split_pairs(b_t, part, &numbers, s->rows, dim);
        return false;
    }
    attn__bf16_pack_dims(b, from, row, s->rows, dim);
    bool finite = attn__bf16_finite(from, row, s->rows, dim);
    if (!finite) from = attn__bf16_clean(s->m.rows, from, row, s->rows, dim, bad), row = dim;
    attn__bf16_pack_pairs(b_t, from, row, s->rows, dim);
    return !finite;
}

/* The tile of rows [i0, i0 + rows) of query head h. */
static void load_tile(strip *s, int32_t b, int32_t h, int32_t i0, int32_t rows) {
    const attn_row *of = attn__part(s->plan, s->f, CPU_ROWS);
    s->rows = rows;
    s->parts = (rows + 31) / 32;
    for (int32_t n = 0; n < 2 * s->parts; n++) { /* a panel without rows repeats the one before, and nobody looks at it */
        int32_t first = 16 * n < rows ? 16 * n : 16 * (n - 1);
        attn_unit part = {b, i0 + first, attn__min32(16, rows - first), -1};
        attn__tile_make_f32(&s->panel[n], s->plan, s->f, &part, h, false);
    }
    for (int32_t r = 0; r < 32 * s->parts; r++) {
        s->m.lse[r] = INFINITY; /* no key: p = 0 */
        s->m.low[r] = s->m.delta[r] = 0;
        if (r >= rows) continue;
        const attn_row *row = &of[attn__lse_index(s->p, &s->panel->s, i0 + r, h)];
        if (row->lse == -INFINITY) continue;
        s->m.lse[r] = (float)row->lse;
        s->m.low[r] = (float)(row->lse - (double)s->m.lse[r]);
        s->m.delta[r] = (float)row->delta;
    }
    memset(s->odd_row, 0, sizeof s->odd_row);
    memset(s->far_row, 0, sizeof s->far_row);
    s->any_odd_row = s->any_far_row = false;
    for (int32_t r = 0; s->splits && r < rows; r++) {
        s->odd_row[r] = fabsf(s->m.delta[r]) > ATTN_DELTA_MOST; /* NaN makes NaN by itself */
        s->any_odd_row |= s->odd_row[r];
    }
    s->any_q = load_operands(s, &s->f->q, s->p->dim_qk, s->m.q, s->m.q_t, s->bad_q);
    for (int32_t r = 0; s->splits && r < rows; r++) { /* only now: what is far before is left out of q */
        const attn_row *row = &of[attn__lse_index(s->p, &s->panel->s, i0 + r, h)];
        s->far_row[r] |= (row->own && attn__is_large(row->lse)) || (row->few && row->lse != -INFINITY);
        s->any_far_row |= s->far_row[r];
    }
    s->any_d_o = load_operands(s, &s->f->d_o, s->p->dim_v, s->m.d_o, s->m.d_o_t, s->bad_d_o);
    memset(s->m.d_q, 0, (size_t)(32 * s->parts * s->qk) * sizeof *s->m.d_q);
    s->has_odd_q = false;
    if (any_odd(s)) odd_d_q(s);
    if (!any_odd(s) || s->had_odd) return;
    s->had_odd = true;
    memset(s->m.odd_k, 0, (size_t)(STRIP * s->qk) * sizeof *s->m.odd_k);
    memset(s->m.odd_v, 0, (size_t)(STRIP * s->v) * sizeof *s->m.odd_v);
}

/* ---- one part ---- */

/* A part of the tile against keys [first, end) of the block that begins `at` keys into the strip; none: first = end. */
typedef struct item {
    int32_t n, at, first, end;
    int class[CLASSES];
} item;

static item make_item(const strip *s, int32_t n, int32_t at) {
    const attn_rows *t = &s->panel[2 * n];
    int32_t rows = attn__min32(32, s->rows - 32 * n), keys = attn__min32(s->block, s->keys - at);
    item w = {.n = n, .at = at};
    for (int32_t x = 0; x * ATTN_TILE_COLS < keys; x++) {
        int32_t first = x * ATTN_TILE_COLS, end = attn__min32(first + ATTN_TILE_COLS, keys), j0 = s->j0 + at;
        const attn_flash_range *range = attn__work_range(s->plan, s->f, t->s.b, t->kv_head, (j0 + first) / ATTN_TILE_COLS);
        w.class[x] = attn__mask_tile(&t->mask, t->i0, t->i0 + rows, j0 + first, j0 + end, range);
        if (w.class[x] == ATTN_TILE_SKIP) continue;
        if (w.end == 0) w.first = first;
        w.end = end;
    }
    return w;
}

/* c = a b, where a has keys and b rows of the part: scores, or d_p. */
static void score_product(const strip *s, const item *w, float *c, const uint16_t *a, const uint16_t *b, int64_t dim) {
    int32_t keys = (int32_t)attn__bf16_pad(w->end - w->first);
    attn__bf16_run(&(attn_bf16_product){.c = c,
                                        .ldc = 16,
                                        .c_panel = 16 * keys,
                                        .a = a + (w->at + w->first) * dim,
                                        .a_panel = 16 * dim,
                                        .b = b + 32 * w->n * dim,
                                        .b_panel = 16 * dim,
                                        .parts = s->number_parts,
                                        .a_part = part_of(s, STRIP, dim),
                                        .b_part = part_of(s, tile_rows(s->plan), dim),
                                        .exact = true,
                                        .m = keys,
                                        .n = ATTN_BF16_ROWS,
                                        .k = (int32_t)dim,
                                        .by_vectors = attn__by_vectors(s->plan)});
}

static bool any_far(const strip *s) { return s->any_far_key || s->any_far_row; }

/* Are scores scaled before p is made? To the same bits; those of fwd.c are. */
static bool is_scaled(const strip *s) { return s->scaled || any_far(s); }

static void fill(float *x, float value, int64_t count) {
    for (int64_t n = 0; n < count; n++) x[n] = value;
}

/* Where p or d_s of row r and key j of the block is in operand a. */
static int64_t place(const strip *s, int32_t r, int32_t j) { return attn__bf16_place_a(s->down, j, r); }

/* In eight chains: one would wait for each addition. */
static double dot(const float *a, const float *b, int32_t dim) {
    enum { CHAINS = 8 };
    double part[CHAINS] = {0}, sum = 0;
    const int32_t whole = dim / CHAINS * CHAINS;
    for (int32_t n = 0; n < whole; n += CHAINS)
        for (int32_t c = 0; c < CHAINS; c++) part[c] += (double)a[n + c] * (double)b[n + c];
    for (int32_t n = whole; n < dim; n++) sum += (double)a[n] * (double)b[n];
    for (int32_t c = 0; c < CHAINS; c++) sum += part[c];
    return sum;
}

static bool allowed(const strip *s, int32_t r, int32_t j) {
    const attn_rows *t = s->panel;
    const int32_t *flash = t->mask.vectors ? attn__flash_at(s->p, s->f, t->s.b, t->kv_head, j) : NULL;
    return attn__mask_allowed(&t->mask, t->i0 + r, j, flash);
}

/* Does dropout drop row r of the tile and key j of the strip? */
static bool is_dropped(const strip *s, int32_t r, int32_t j) {
    const attn_rows *t = s->panel;
    const uint32_t batch_head = (uint32_t)(t->s.b * s->p->heads_q + t->h0), key = (uint32_t)(s->j0 + j);
    uint32_t random[4];
    attn__philox4(&t->dropout, batch_head, (uint32_t)(t->i0 + r), key / ATTN_PHILOX_KEYS, random);
    return attn__drops(&t->dropout, random, key);
}

/* A row as floats; of halves in place n of m.pair. */
static const float *floats(const strip *s, int n, const void *row, int32_t dim) {
    if (s->p->dtype == ATTN_F32) return row;
    float *to = s->m.pair + n * (s->qk > s->v ? s->qk : s->v);
    s->panel->micro->load(to, row, s->p->dtype, dim);
    return to;
}

/* What row r of the tile and key j of the strip give to each other; of numbers that are odd, in double. */
static void work_pair(const strip *s, int32_t r, int32_t j, double p, double slope) {
    const int32_t dim_qk = s->p->dim_qk, dim_v = s->p->dim_v;
    const float *q = floats(s, 0, q_row(s, &s->f->q, r), dim_qk), *d_o = floats(s, 1, q_row(s, &s->f->d_o, r), dim_v),
                *k = floats(s, 2, kv_row(s, &s->f->k, s->j0 + j), dim_qk),
                *v = floats(s, 3, kv_row(s, &s->f->v, s->j0 + j), dim_v);
    const bool dropped = s->p->dropout > 0 && is_dropped(s, r, j);
    const double keep = dropped ? 0 : 1 / (1 - s->p->dropout), d_p = dropped ? 0 : keep * dot(d_o, v, dim_v);
    const double d_s = p == 0 ? 0 : p * (d_p - attn__bwd_row_of_f32(&s->panel[r / 16], r % 16)->delta) * slope;
    float *d_q = s->m.odd_q + r * s->qk, *d_k = s->m.odd_k + j * s->qk, *d_v = s->m.odd_v + j * s->v;
    for (int32_t x = 0; x < dim_qk; x++) {
        d_q[x] += (float)(d_s * (double)k[x]);
        d_k[x] += (float)(d_s * (double)q[x]);
    }
    for (int32_t x = 0; x < dim_v; x++) d_v[x] += (float)((dropped ? 0 : p) * (double)d_o[x]); /* NaN comes through */
}

/* Scores of one panel and keys [first, first + keys) of the block whose row or key is far: scaled, as fwd.c and bwd.c have them. */
static void far_scores(const strip *s, const item *w, int32_t n, int32_t first, int32_t keys) {
    const attn_rows *t = &s->panel[2 * w->n + n];
    float scores[ATTN_TILE_COLS * 16], *to = s->m.s + 16 * (n * attn__bf16_pad(w->end - w->first) - w->first);
    const int32_t j0 = s->j0 + w->at + first;
    bool any = s->any_far_key;
    for (int32_t c = 0; c < t->rows; c++) any |= s->far_row[32 * w->n + 16 * n + c];
    if (!any) return;
    attn__tile_load_q_f32(t, s->m.out);
    attn__tile_load_k_f32(t, s->m.rows, j0, keys);
    attn__tile_dots_f32(t, scores, s->m.rows, t->dim_qk, s->m.out, s->p->dim_qk, j0, keys,
                        w->class[first / ATTN_TILE_COLS]);
    for (int32_t j = first; j < first + keys; j++)
        for (int32_t c = 0; c < t->rows; c++)
            if (s->far_key[w->at + j] || s->far_row[32 * w->n + 16 * n + c]) to[16 * j + c] = scores[16 * (j - first) + c];
}

/* The pairs of them that have an odd row or key: all that comes of them; and then -inf, so that they do not meet the operands. */
static void odd_pairs(const strip *s, const item *w, int32_t n, int32_t first, int32_t keys) {
    for (int32_t j = first; j < first + keys; j++) {
        const int32_t in_strip = w->at + j;
        for (int32_t c = 0; c < 16 && (s->odd_key[in_strip] || s->any_odd_row); c++) {
            const int32_t r = 32 * w->n + 16 * n + c;
            const int64_t at = 16 * (n * attn__bf16_pad(w->end - w->first) + j - w->first) + c;
            if (!s->odd_key[in_strip] && !s->odd_row[r]) continue;
            const float score = is_scaled(s) ? s->m.s[at] : s->m.s[at] * s->scale;
            const double rest = s->p->flags & ATTN_ALIBI ? (double)s->m.rest[at] : 0,
                         slope = s->p->softcap > 0 ? (double)s->m.slope[at] : 1;
            s->m.s[at] = -INFINITY;
            if (s->m.lse[r] == INFINITY || /* no key, or no row */
                !allowed(s, r, s->j0 + in_strip))
                continue;
            const double p = score == -INFINITY ? 0 : exp((double)score + rest - (double)s->m.lse[r] - (double)s->m.low[r]);
            const float lifted = (float)(p * (double)ATTN_LIFT_P);
            work_pair(s, r, in_strip, p, slope);
            s->m.sum_p[in_strip] += lifted;
            s->m.most_p[in_strip] = fmaxf(s->m.most_p[in_strip], lifted);
        }
    }
}

/* From dot products to scores, one panel and up to ATTN_TILE_COLS keys, `first` into the block. */
static void prepare_tile(const strip *s, const item *w, int32_t n, int32_t first, int32_t keys) {
    const attn_rows *t = &s->panel[2 * w->n + n];
    int class = w->class[first / ATTN_TILE_COLS];
    int64_t at = 16 * (n * attn__bf16_pad(w->end - w->first) + first - w->first);
    float *slope = s->p->softcap > 0 ? s->m.slope + at : NULL, *rest = s->p->flags & ATTN_ALIBI ? s->m.rest + at : NULL;
    const bool has_odd = any_odd(s), in_tile = class != ATTN_TILE_SKIP;
    if (!in_tile) fill(s->m.s + at, -INFINITY, keys * 16);
    if (in_tile && is_scaled(s)) t->micro->scale(s->m.s + at, keys * 16, (float)s->p->scale);
    if (in_tile && any_far(s)) far_scores(s, w, n, first, keys);
    if (in_tile && s->scaled)
        attn__tile_adjust_f32(t, s->m.s + at, slope, rest, s->j0 + w->at + first, keys, class, s->m.row);
    else if (class == ATTN_TILE_PARTIAL)
        attn__tile_mask_f32(t, s->m.s + at, s->j0 + w->at + first, keys);
    if (in_tile && has_odd) odd_pairs(s, w, n, first, keys);
    if (s->p->dropout > 0) attn__tile_drop_f32(t, s->m.d_p + at, s->j0 + w->at + first, keys);
}

static void prepare(const strip *s, const item *w) {
    int32_t keys = w->end - w->first;
    for (int32_t n = 0; n < 2; n++) {
        for (int32_t j = w->first; j < w->end; j += ATTN_TILE_COLS)
            prepare_tile(s, w, n, j, attn__min32(ATTN_TILE_COLS, w->end - j));
        fill(s->m.s + 16 * (n * attn__bf16_pad(keys) + keys), -INFINITY,
             16 * (attn__bf16_pad(keys) - keys)); /* keys that are not there */
    }
}

static void drop(const strip *s, const item *w) {
    const attn_rows *t = s->panel;
    uint32_t batch_head = (uint32_t)(t->s.b * s->p->heads_q + t->h0), random[4];
    for (int32_t r = 32 * w->n; r < attn__min32(32 * (w->n + 1), s->rows); r++) {
        for (int32_t j = w->first; j < w->end; j++) { /* first is a multiple of 8 */
            uint32_t key = (uint32_t)(s->j0 + w->at + j);
            if (j % ATTN_PHILOX_KEYS == 0)
                attn__philox4(&t->dropout, batch_head, (uint32_t)(t->i0 + r), key / ATTN_PHILOX_KEYS, random);
            if (!attn__drops(&t->dropout, random, key)) continue;
            for (int n = 0; n < s->number_parts; n++) s->m.p[place(s, r, j) + n * s->part] = 0;
        }
    }
}

static void add_d_q(const strip *s, const item *w) {
    int32_t keys = (int32_t)attn__bf16_pad(w->end - w->first);
    attn__bf16_run(&(attn_bf16_product){.c = s->m.d_q + 32 * w->n * s->qk,
                                        .ldc = 16,
                                        .c_panel = 16 * s->qk,
                                        .a = s->m.k_t + (w->at + w->first) / 32 * ATTN_BF16_TILE,
                                        .a_panel = 16 * attn__bf16_pad(s->keys),
                                        .b = s->m.pairs,
                                        .b_panel = 16 * keys,
                                        .parts = s->number_parts,
                                        .a_part = part_of(s, STRIP, s->qk),
                                        .b_part = part_of(s, KEYS, ATTN_BF16_ROWS),
                                        .m = (int32_t)s->qk,
                                        .n = ATTN_BF16_ROWS,
                                        .k = keys,
                                        .accumulate = true,
                                        .by_vectors = attn__by_vectors(s->plan)});
}

/* What rows give to the sums and maxima of their keys' p. */
static void weigh(const strip *s, const item *w) {
    const int32_t keys = w->end - w->first, at = w->at + w->first;
    for (int32_t n = 0; n < 2; n++) {
        const int32_t rows = attn__min32(16, s->rows - 32 * w->n - 16 * n);
        const float *p = s->m.s + 16 * n * attn__bf16_pad(keys);
        if (rows > 0) s->panel->micro->weigh(p, keys, 16, rows, s->m.sum_p + at, s->m.most_p + at);
    }
}

/* p and d_s of a part, and its share of d_q. */
static void work_part(const strip *s, const item *w) {
    score_product(s, w, s->m.s, s->m.k, s->m.q, s->qk);
    score_product(s, w, s->m.d_p, s->m.v, s->m.d_o, s->v);
    prepare(s, w);
    attn__bf16_gradients(&(attn_bf16_gradients){.s = s->m.s,
                                                .d_p = s->m.d_p,
                                                .slope = s->p->softcap > 0 ? s->m.slope : NULL,
                                                .rest = s->p->flags & ATTN_ALIBI ? s->m.rest : NULL,
                                                .panel = 16 * attn__bf16_pad(w->end - w->first),
                                                .keys = (int32_t)attn__bf16_pad(w->end - w->first),
                                                .scale = is_scaled(s) ? 1 : s->scale,
                                                .keep = (float)(1 / (1 - s->p->dropout)) / s->lifted,
                                                .lse = s->m.lse + 32 * w->n,
                                                .low = s->m.low + 32 * w->n,
                                                .delta = s->m.delta + 32 * w->n,
                                                .keep_p = attn__mixed(s->p),
                                                .p = s->m.p + place(s, 32 * w->n, w->first),
                                                .d_s = s->m.d_s + place(s, 32 * w->n, w->first),
                                                .down = s->down,
                                                .parts = s->number_parts,
                                                .part = s->part,
                                                .pairs = s->m.pairs,
                                                .pairs_part = part_of(s, KEYS, ATTN_BF16_ROWS)});
    if (attn__mixed(s->p)) weigh(s, w);
    if (s->p->dropout > 0) drop(s, w);
    if (s->f->d_q.data) add_d_q(s, w);
}

/* ---- one block ---- */

/* c += a b, where a has keys [first, end) of the block and b rows of parts [n, n_end): d_v, or d_k. */
static void add_product(const strip *s, float *c, const uint16_t *a, const uint16_t *b, int32_t dim, const item *all,
                        int32_t n_end) {
    int64_t b_panel = (int64_t)s->parts * ATTN_BF16_TILE;
    attn__bf16_run(&(attn_bf16_product){.c = c + 16 * (all->at + all->first),
                                        .ldc = 16,
                                        .c_panel = 16 * STRIP,
                                        .a = a + place(s, 32 * all->n, all->first),
                                        .a_panel = s->down,
                                        .b = b + (int64_t)all->n * ATTN_BF16_TILE,
                                        .b_panel = b_panel,
                                        .parts = s->number_parts,
                                        .a_part = s->part,
                                        .b_part = part_of(s, tile_rows(s->plan), attn__bf16_pad(dim)),
                                        .m = (int32_t)attn__bf16_pad(all->end - all->first),
                                        .n = (dim + 15) / 16 * 16,
                                        .k = 32 * (n_end - all->n),
                                        .accumulate = true,
                                        .by_vectors = attn__by_vectors(s->plan)});
}

/* The parts [*n, *n_end) of [from, to) that have the tile of keys from j on, and what is between them; *n = -1: none. */
static void find_parts(const item *part, int32_t from, int32_t to, int32_t j, int32_t *n, int32_t *n_end) {
    *n = *n_end = -1;
    for (int32_t x = from; x < to; x++) {
        if (j < part[x].first || j >= part[x].end) continue;
        if (*n < 0) *n = x;
        *n_end = x + 1;
    }
}

/*
 * d_v and d_k of the block's keys, each from the parts of [from, to) that have it: on the diagonal, where p and d_s of the others are 0,
 * they are fewer.
 */
static void add_to_keys(const strip *s, const item *part, int32_t from, int32_t to, const item *all) {
    item run = {.at = all->at, .first = all->first};
    int32_t n_end, next, next_end;
    find_parts(part, from, to, run.first, &run.n, &n_end);
    for (int32_t j = all->first; j < all->end; j += ATTN_TILE_COLS) {
        bool is_last = j + ATTN_TILE_COLS >= all->end;
        if (!is_last) find_parts(part, from, to, j + ATTN_TILE_COLS, &next, &next_end);
        if (!is_last && next == run.n && next_end == n_end) continue;
        run.end = attn__min32(j + ATTN_TILE_COLS, all->end);
        if (run.n >= 0 && s->f->d_v.data) add_product(s, s->m.d_v, s->m.p, s->m.d_o_t, s->p->dim_v, &run, n_end);
        if (run.n >= 0 && s->f->d_k.data) add_product(s, s->m.d_k, s->m.d_s, s->m.q_t, s->p->dim_qk, &run, n_end);
        if (!is_last) run.n = next, n_end = next_end, run.first = run.end;
    }
}

/* to[x] += weight * from[x] where that is NaN or infinity; elements of `to` are in panels of 16, `panel` apart. */
static void add_bad(float *to, int64_t panel, float weight, const uint16_t *from, int32_t dim) {
    for (int32_t x = 0; x < dim; x++)
        if (attn__bf16_is_bad(from[x])) to[x / 16 * panel + x % 16] += weight * attn__from_bf16(from[x]);
}

/* The same for d_q, where dims are 16 apart. */
static void add_bad_d_q(const strip *s, int32_t r, float weight, const uint16_t *k) {
    int32_t in = attn__bf16_column(r % 32);
    float *to = s->m.d_q + (r / 32 * 32 + in / 16 * 16) * s->qk + in % 16;
    for (int32_t x = 0; x < s->p->dim_qk; x++)
        if (attn__bf16_is_bad(k[x])) to[(int64_t)x * 16] += weight * attn__from_bf16(k[x]);
}

/* What the operands leave out, of parts [from, to) and keys [first, end) of the block, for the pairs that are allowed. */
static void add_left_out(const strip *s, int32_t from, int32_t to, const item *all) {
    const scratch *m = &s->m;
    const int32_t end = attn__min32(32 * to, s->rows);
    for (int32_t j = all->first; (s->any_k || s->any_q || s->any_d_o) && j < all->end; j++) {
        int32_t in_strip = all->at + j;
        for (int32_t r = 32 * from; r < end; r++) {
            bool bad_k = s->any_k && s->bad_k[in_strip], bad_q = s->any_q && s->bad_q[r],
                 bad_o = s->any_d_o && s->bad_d_o[r];
            if (!(bad_k || bad_q || bad_o) || !allowed(s, r, s->j0 + in_strip)) continue;
            float p = attn__from_bf16(m->p[place(s, r, j)]), d_s = attn__from_bf16(m->d_s[place(s, r, j)]);
            if (bad_k) add_bad_d_q(s, r, d_s, kv_row(s, &s->f->k, s->j0 + in_strip));
            if (bad_q) add_bad(m->d_k + in_strip * 16, 16 * STRIP, d_s, q_row(s, &s->f->q, r), s->p->dim_qk);
            if (bad_o) add_bad(m->d_v + in_strip * 16, 16 * STRIP, p, q_row(s, &s->f->d_o, r), s->p->dim_v);
        }
    }
}

/* Zeros for p and d_s of part n and keys [first, end), both multiples of 16: tiles. */
static void clear(const strip *s, int32_t n, int32_t first, int32_t end) {
    for (int32_t j = first; j < end; j += 16) {
        for (int i = 0; i < s->number_parts; i++) {
            memset(s->m.p + place(s, 32 * n, j) + i * s->part, 0, ATTN_BF16_TILE * sizeof(uint16_t));
            memset(s->m.d_s + place(s, 32 * n, j) + i * s->part, 0, ATTN_BF16_TILE * sizeof(uint16_t));
        }
    }
}

/*
 * May d_k and d_v of the block be summed over all parts at once? A group by itself has the same bits, but where infinity meets a sum that
 * may have passed all numbers, and where zeros are added, which make 0 of −0.
 */
static bool is_whole(const strip *s, const item *part, const item *all) {
    bool whole = !s->any_q && !s->any_d_o;
    for (int32_t n = 0; n < s->parts; n++) whole = whole && part[n].first == all->first && part[n].end == all->end;
    return whole;
}

/* The tile against the block that begins `at` keys into the strip. */
static void work_block(const strip *s, int32_t at) {
    item part[PARTS], all = {.n = -1, .at = at, .first = KEYS};
    int32_t n_end = 0;
    for (int32_t n = 0; n < s->parts; n++) {
        part[n] = make_item(s, n, at);
        if (part[n].end == 0) continue;
        if (all.n < 0) all.n = n;
        n_end = n + 1;
        all.first = attn__min32(all.first, part[n].first);
        all.end = attn__max32(all.end, part[n].end);
    }
    if (all.n < 0) return;
    for (int32_t n = all.n; n < n_end; n++) {
        if (part[n].end > 0) work_part(s, &part[n]);
        int32_t end = all.first + (int32_t)attn__bf16_pad(all.end - all.first),
                mine = part[n].end > 0 ? part[n].first : end;
        clear(s, n, all.first, mine);
        if (part[n].end > 0) clear(s, n, mine + (int32_t)attn__bf16_pad(part[n].end - mine), end);
    }
    int32_t step = is_whole(s, part, &all) ? s->parts : GROUP;
    for (int32_t n = 0; n < s->parts; n += step) {
        int32_t to = attn__min32(n + step, s->parts);
        add_to_keys(s, part, n, to, &all);
        add_left_out(s, n, to, &all);
    }
}

/* ---- a tile and a strip ---- */

/* Where column c of panel n of d_q is a row of the tile: the panel of 16 rows that it belongs to, or NULL. */
static const attn_rows *row_of(const strip *s, int32_t n, int32_t c, int32_t *r) {
    *r = n / 2 * 32 + attn__bf16_row(n % 2, c);
    return *r < s->rows ? &s->panel[*r / 16] : NULL;
}

/* What odd pairs give to unfinished row r of d_q. */
static float *second_part(const attn_rows *t, int32_t r) { return attn__bwd_unfinished_f32(t, r % 16) + t->dim_qk; }

/* d_q as the strips before this one have left it; in parts lifted, and by itself what is of odd pairs. */
static void take_turn(strip *s, int32_t before) {
    int32_t r;
    attn__bwd_begin_turn_f32(s->panel, before);
    const bool is_odd = before > 0 && attn__bwd_row_of_f32(s->panel, 0)->odd;
    float *odd = is_odd ? odd_d_q(s) : NULL;
    for (int32_t n = 0; before > 0 && n < 2 * s->parts; n++) {
        memset(s->m.out, 0, (size_t)(16 * s->qk) * sizeof *s->m.out);
        for (int32_t c = 0; c < 16; c++) {
            const attn_rows *t = row_of(s, n, c, &r);
            if (t) attn__bwd_take_row_f32(t, r % 16, s->m.out + c * s->qk, false);
            if (t && is_odd) memcpy(odd + r * s->qk, second_part(t, r), (size_t)t->dim_qk * sizeof *odd);
        }
        s->panel->micro->transpose(s->m.d_q + 16 * n * s->qk, 16, s->m.out, s->qk, 16, (int32_t)s->qk);
    }
}

/* The strip after this one may go on; the last one writes the result. */
static void give_turn(const strip *s, int32_t before, bool is_last) {
    int32_t r;
    for (int32_t n = 0; n < 2 * s->parts; n++) {
        attn__bf16_transpose(s->panel->micro, s->m.out, s->qk, s->m.d_q + 16 * n * s->qk, (int32_t)s->qk);
        if (s->splits && is_last) s->panel->micro->scale(s->m.out, (int32_t)(16 * s->qk), 1 / s->sum_lifted);
        for (int32_t c = 0; c < 16; c++) {
            const attn_rows *t = row_of(s, n, c, &r);
            float *row = s->m.out + c * s->qk, *odd = s->m.odd_q + r * s->qk;
            if (t && s->has_odd_q && is_last) add(row, odd, s->p->dim_qk);
            if (t && s->has_odd_q && !is_last) memcpy(second_part(t, r), odd, (size_t)t->dim_qk * sizeof *odd);
            if (t) attn__bwd_give_row_f32(t, r % 16, row, is_last);
        }
    }
    if (s->has_odd_q) attn__bwd_row_of_f32(s->panel, 0)->odd = 1;
    attn__bwd_end_turn_f32(s->panel, before);
}

static void work_tile(strip *s, int32_t b, int32_t h, int32_t i0, int32_t rows) {
    const int32_t keys = s->plan->strip_keys, number = s->j0 / keys;
    int32_t first, end;
    attn__mask_rows(&s->panel->mask, i0, i0 + rows, &first, &end);
    if (first >= end || number < first / keys || number > (end - 1) / keys) return;
    int32_t before = number - first / keys;
    load_tile(s, b, h, i0, rows);
    if (s->f->d_q.data) take_turn(s, before);
    for (int32_t at = 0; at < s->keys; at += s->block) work_block(s, at);
    if (s->f->d_q.data) give_turn(s, before, number == (end - 1) / keys);
}

static void store(const strip *s, const attn_tensor *to, const float *from, const float *odd, int32_t dim, double factor) {
    const attn_rows *t = s->panel;
    for (int32_t j = 0; to->data && j < s->keys; j++) {
        int64_t at = attn__kv_offset(s->p, s->f, to, &t->s, t->s.leftpad + s->j0 + j, t->kv_head);
        for (int32_t x = 0; x < dim; x += 16)
            memcpy(s->m.out + x, from + (int64_t)x * STRIP + (int64_t)j * 16, 16 * sizeof *s->m.out);
        if (s->splits) t->micro->scale(s->m.out, (int32_t)attn__bf16_pad(dim), 1 / s->sum_lifted);
        if (s->had_odd) add(s->m.out, odd + j * attn__bf16_pad(dim), dim);
        char *row = (char *)to->data + at * (int64_t)attn_dtype_size(s->p->kv_dtype);
        t->micro->store(row, s->p->kv_dtype, s->m.out, (float)factor, dim);
    }
}

void attn__bf16_keys(const attn_plan *plan, const attn_buffers *f, const attn_unit *unit, int32_t kv_head, int32_t slot) {
    const attn_problem *p = &plan->problem;
    int32_t group = p->heads_q / p->heads_kv, step = tile_rows(plan), first, end;
    strip s = {.plan = plan, .f = f, .p = p, .j0 = unit->row, .keys = unit->rows};
    lay_out(&s.m, attn__slot(plan, f, slot), plan);
    s.qk = attn__bf16_pad(p->dim_qk);
    s.v = attn__bf16_pad(p->dim_v);
    s.down = step / 32 * ATTN_BF16_TILE;
    s.number_parts = attn__bf16_parts(p->dtype);
    s.splits = s.number_parts > 1;
    s.part = part_of(&s, KEYS, step);
    s.block = s.splits ? KEYS / 2 : KEYS;
    s.scale = (float)p->scale;
    s.lifted = s.splits ? ATTN_LIFT_V * ATTN_LIFT_D_O : 1;
    s.sum_lifted = s.splits ? ATTN_LIFT_P * ATTN_LIFT_OTHERS : 1;
    s.scaled = p->softcap > 0 || (p->flags & (ATTN_ALIBI | ATTN_BIAS)) || !(s.scale > 1e-30f && s.scale < 1e30f);
    attn__tile_make_f32(s.panel, plan, f, &(attn_unit){unit->b, 0, 1, -1}, kv_head * group, false);
    const size_t panel = (size_t)(16 * attn__bf16_pad(s.keys)) * sizeof(float);
    for (int64_t x = 0; x < s.qk; x += 16) memset(s.m.d_k + x * STRIP, 0, panel);
    for (int64_t x = 0; x < s.v; x += 16) memset(s.m.d_v + x * STRIP, 0, panel);
    for (int32_t j = 0; s.splits && j < STRIP; j++) s.m.sum_p[j] = s.m.most_p[j] = 0;
    attn__mask_cols(&s.panel->mask, s.j0, s.j0 + s.keys, &first, &end);
    if (first < end) load_keys(&s);
    attn__bf16_begin(attn__by_vectors(plan));
    for (int32_t h = kv_head * group; h < (kv_head + 1) * group; h++) {
        for (int32_t i0 = first / step * step; i0 < end; i0 += step)
            work_tile(&s, unit->b, h, i0, attn__min32(step, s.panel->mask.sq - i0));
    }
    attn__bf16_end(attn__by_vectors(plan));
    store(&s, &f->d_k, s.m.d_k, s.m.odd_k, p->dim_qk, p->scale);
    store(&s, &f->d_v, s.m.d_v, s.m.odd_v, p->dim_v, 1 / (1 - p->dropout));
    if (attn__mixed(p) && f->d_v.data) attn__bwd_values_again_f32(plan, f, unit, kv_head, slot, s.m.sum_p, s.m.most_p);
}

#else

void attn__bf16_keys(const attn_plan *plan, const attn_buffers *f, const attn_unit *unit, int32_t kv_head, int32_t slot) {
    (void)plan, (void)f, (void)unit, (void)kv_head, (void)slot; /* no plan has this kernel */
}
int64_t attn__bf16_bwd_scratch(const attn_plan *plan) {
    (void)plan;
    return 0;
}

#endif
