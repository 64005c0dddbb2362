/*
 * The forward by products of bf16 (bf16.h): sequences that are not narrow, q, k, v and o all bf16; or, by tiles of AMX, all float32, as
 * three bf16 each, or all f16, as two. The rest is as in fwd.c: strips of query tiles share each load of keys, which is here a packing into operands of tiles; every row walks its keys in ascending order.
 *
 * An item of work is a tile of 32 rows against up to 256 keys: scores S, softmax, and the product of P and V. With the softmax of one item
 * come the scores of the next and P V of the one before, so that the tiles of AMX multiply while vectors make exponentials:
 *
 *     softmax 0        softmax 1        softmax 2
 *     S 1              P V 0, S 2       P V 1, S 3     ...
 *
 * Scores are raw dot products, which the softmax scales; masked pairs become -inf. With softcap, ALiBi, bias or a scale that is not
 * clearly above 0 all tiles are scaled first, by the same arithmetic. The bits of a row depend on neither its neighbours nor the class
 * of its tiles (C5).
 *
 * The softmax works in base 2, so scores beyond 2^127 / log2(e), of either sign, are too large for it; and a dot product that is not
 * scaled yet may overflow where its score does not. Where that can be, a row ends without a finite maximum or with a sum that is
 * no number above 0. Such rows are done again by fwd.c, a tile at a time, so that many of them (a bias of -FLT_MAX for padding) take no
 * longer than there. A scale next to 0 is left to it altogether: it could bring an overflow back among other scores.
 *
 * In parts: of float32 a product of P and V is summed by itself before O takes it in. Numbers that the parts do not have
 * (ATTN_SPLIT_MOST) are found as they are packed, and rows that see one are done again by fwd.c, too; so is a row with a result as small as
 * the parts are inexact, if it sees such a number. Sequences of no more than ATTN_LEAST_KEYS keys, which take longer to be packed and to wake
 * tiles up than to be multiplied, are left to fwd.c; and since a part of a longer one is to have the bits of such a sequence, so are all
 * rows that see no more keys.
 */
#include "bf16.h"

#include <math.h>
#include <string.h>

#include "../numeric.h"
#include "tile.h"

#ifdef ATTN_HAVE_BF16

/* Elements of S and of P, or of one of its parts. */
enum { P_SIZE = ATTN_BF16_KEYS * ATTN_BF16_ROWS };

enum { TILES = ATTN_BF16_KEYS / ATTN_TILE_COLS };

/* A query tile of the strip: two panels of 16 rows, of which the second may have none. */
typedef struct member {
    attn_rows panel[2];
    int32_t rows;
    uint16_t *q;                  /* operand b of the scores */
    float *o;                     /* [2][dim_v][16], unnormalised and transposed */
    float *max, *sum;             /* [32]; max in base 2, in parts not */
    uint32_t out;                 /* rows that see a number that the parts do not have, as bits */
    uint32_t tiny;                /* or have inexactly */
    uint32_t many;                /* or see more than ATTN_LEAST_KEYS */
    uint8_t seen[ATTN_BF16_ROWS]; /* keys, of the others */
} member;

/* One thread's memory. */
typedef struct scratch {
    member *tile;     /* of the strip: too many for a stack, which may have 128 KiB */
    float *s[2];      /* scores of this item and the next, [2][keys][16] */
    uint16_t *p[2];   /* probabilities of this item and the last, operand b */
    uint16_t *k, *v;  /* operands a */
    uint16_t *clean;  /* v with zeros for NaN and infinity */
    void *rows;       /* rows of k, v or q that do not lie a fixed distance apart, or are changed */
    float *out, *row; /* [16][dim_v]; see tile_adjust */
    float *alpha[2];  /* [32], of this item and the last */
    float *p_v;       /* three parts: P V of the last item, as o */
    uint16_t *q;      /* of all members, as the rest */
    float *o, *max, *sum;
} scratch;

/* As attn__lay_out, which it calls. */
static int64_t lay_out(scratch *m, char *at, const attn_plan *plan) {
    const attn_problem *p = &plan->problem;
    int64_t qk = attn__bf16_pad(p->dim_qk), v = attn__bf16_pad(p->dim_v), rows = plan->strip * ATTN_TILE_ROWS;
    int64_t whole = sizeof(float);
    const int32_t parts = attn__bf16_parts(p->dtype);
    int64_t number = (int64_t)attn_dtype_size(p->dtype), half = sizeof(uint16_t);
    const attn_room rooms[] = {
        {&m->tile, rows / ATTN_BF16_ROWS * (int64_t)sizeof(member)},
        {&m->s[0], P_SIZE * whole},
        {&m->s[1], P_SIZE * whole},
        {&m->p[0], attn__bf16_whole_of(parts, P_SIZE) * half},
        {&m->p[1], attn__bf16_whole_of(parts, P_SIZE) * half},
        {&m->k, attn__bf16_whole_of(parts, ATTN_BF16_KEYS * qk) * half},
        {&m->v, attn__bf16_whole_of(parts, ATTN_BF16_KEYS * v) * half},
        {&m->clean, parts > 1 ? 0 : ATTN_BF16_KEYS * v * half},
        {&m->rows, ATTN_BF16_KEYS * (qk > v ? qk : v) * number},
        {&m->out, 16 * v * whole},
        {&m->row, ATTN_BF16_KEYS * whole},
        {&m->alpha[0], ATTN_BF16_ROWS * whole},
        {&m->alpha[1], ATTN_BF16_ROWS * whole},
        {&m->p_v, parts == 3 ? ATTN_BF16_ROWS * v * whole : 0},
        {&m->q, rows / ATTN_BF16_ROWS * attn__bf16_whole_of(parts, ATTN_BF16_ROWS * qk) * half},
        {&m->o, rows * v * whole},
        {&m->max, rows * whole},
        {&m->sum, rows * whole},
    };
    return attn__lay_out(at, rooms, sizeof rooms / sizeof rooms[0]);
}

int64_t attn__bf16_scratch(const attn_plan *plan) {
    scratch unused;
    return lay_out(&unused, NULL, plan);
}

/* ---- a strip ---- */

typedef struct strip {
    const attn_plan *plan;
    scratch m;
    int32_t count;
    int32_t k_at, v_at;       /* first keys of the blocks that m.k and m.v hold; -1: none */
    int32_t parts;            /* of a number */
    bool splits;              /* more than one */
    bool v_finite;            /* otherwise there are zeros for the rest: in m.clean, in parts in m.v */
    bool scaled;              /* are the scores scaled before the softmax? */
    float scale;              /* of q, k and the problem */
    bool bad[ATTN_BF16_KEYS]; /* keys that have something which is not finite */
    bool k_odd, v_odd;        /* in parts: are there numbers that the parts do not have, or have inexactly? */
    uint8_t k_is[ATTN_BF16_KEYS], v_is[ATTN_BF16_KEYS]; /* if so, of which keys, as below */
} strip;

enum {
    IS_OUT = ATTN_SPLIT_OUT,
    IS_TINY = ATTN_SPLIT_TINY,
    IS_NO_NUMBER = 8
}; /* NaN or infinity, which is not counted as out */

/* One piece of work: keys [first, first + keys) of the block at j0. */
typedef struct item {
    member *x;
    int32_t j0, first, keys;
    int class[TILES];
    bool full; /* every pair is allowed */
} item;

/* What numbers of this dtype are to it: as many elements from row to row as their vectors have. */
static const void *element(const void *data, attn_dtype dtype, int64_t at) {
    return (const char *)data + at * (int64_t)attn_dtype_size(dtype);
}

/* A copy of rows without gaps, which they become, with zeros for what the parts do not have; is[i]: what is odd of row i? */
static void clean_rows(void *to, attn_bf16_numbers *of, int32_t rows, int32_t dim, uint8_t *is) {
    for (int32_t i = 0; i < rows; i++) {
        is[i] = 0;
        for (int32_t n = 0; n < dim; n++) {
            const double x = attn__load(of->dtype, of->from, i * of->row + n);
            const int odd = attn__bf16_odd((float)x);
            is[i] |= (uint8_t)(odd == IS_OUT && !isfinite(x) ? IS_NO_NUMBER : odd);
            attn__store(of->dtype, to, (int64_t)i * dim + n, odd == IS_OUT ? 0 : x);
        }
    }
    of->from = to;
    of->row = dim;
}

static void pack_q(const strip *s, member *x) {
    const scratch *m = &s->m;
    const attn_rows *t = &x->panel[0];
    const attn_problem *p = t->p;
    const int64_t size = ATTN_BF16_ROWS * attn__bf16_pad(p->dim_qk);
    const void *from = element(t->f->q.data, p->dtype, attn__q_offset(p, &t->f->q, &t->s, t->i0, t->h0));
    int64_t row = t->f->q.stride[1];
    if (p->flags & ATTN_ROTARY) {
        double rotated[ATTN_MAX_DIM], descale = attn__descale(t->f, t->f->q_descale, t->s.b, t->kv_head);
        for (int32_t r = 0; r < x->rows; r++) {
            attn__q_row(p, t->f, &t->s, t->i0 + r, t->h0, rotated);
            for (int32_t n = 0; n < p->dim_qk; n++) /* as it was rounded: the factor is in the scale */
                attn__store(p->dtype, m->rows, (int64_t)r * p->dim_qk + n, descale != 0 ? rotated[n] / descale : 0);
        }
        from = m->rows;
        row = p->dim_qk;
    }
    if (x->rows <= 16) /* nothing is packed into the second panel */
        memset(x->q, 0, (size_t)attn__bf16_whole_of(s->parts, size) * sizeof *x->q);
    if (!s->splits) {
        attn__bf16_pack_dims(x->q, from, row, x->rows, p->dim_qk);
        return;
    }
    const int64_t part = attn__bf16_part_of(s->parts, size);
    attn_bf16_numbers of = {from, p->dtype, row, 1};
    if (!(attn__bf16_split_dims(x->q, part, &of, x->rows, p->dim_qk) & ATTN_SPLIT_OUT)) return;
    uint8_t is[ATTN_BF16_ROWS];
    clean_rows(m->rows, &of, x->rows, p->dim_qk, is);
    attn__bf16_split_dims(x->q, part, &of, x->rows, p->dim_qk);
    for (int32_t r = 0; r < x->rows; r++)
        if (is[r] & ~IS_TINY) x->out |= UINT32_C(1) << r;
}

/* The tile with these rows joins the strip. */
static void join(strip *s, const attn_buffers *f, const attn_unit *rows, int32_t h) {
    member *x = &s->m.tile[s->count];
    int64_t row = (int64_t)s->count * ATTN_BF16_ROWS;
    x->rows = rows->rows;
    for (int32_t n = 0; n < 2; n++) { /* a second panel without rows repeats the first, and nobody looks at it */
        int32_t first = 16 * n < x->rows ? 16 * n : 0;
        attn_unit part = {rows->b, rows->row + first, attn__min32(16, rows->rows - first), -1};
        attn__tile_make_f32(&x->panel[n], s->plan, f, &part, h, false);
    }
    int64_t qk = attn__bf16_pad(s->plan->problem.dim_qk), v = attn__bf16_pad(s->plan->problem.dim_v);
    x->q = s->m.q + s->count * attn__bf16_whole_of(s->parts, ATTN_BF16_ROWS * qk);
    x->o = s->m.o + row * v;
    x->max = s->m.max + row;
    x->sum = s->m.sum + row;
    x->out = x->tiny = x->many = 0;
    memset(x->seen, 0, sizeof x->seen);
    memset(x->o, 0, (size_t)(ATTN_BF16_ROWS * v) * sizeof *x->o);
    for (int32_t r = 0; r < ATTN_BF16_ROWS; r++) {
        x->max[r] = -INFINITY;
        x->sum[r] = 0;
    }
    s->count++;
    pack_q(s, x);
}

/* ---- keys ---- */

/* Rows [j0, j0 + keys) of k or v: where they lie, a fixed distance apart, or gathered. */
static const void *rows_of(strip *s, const attn_tensor *of, int32_t dim, int32_t j0, int32_t keys, int64_t *row) {
    const attn_rows *t = s->m.tile->panel;
    int32_t at = t->s.leftpad + j0;
    const char *from = attn__tile_kv_row_f32(t, of, at, NULL);
    const size_t bytes = (size_t)dim * attn_dtype_size(t->p->kv_dtype);
    *row = of->stride[1];
    if (attn__tile_in_one_page_f32(t, j0, keys)) return from;
    *row = dim;
    for (int32_t j = 0; j < keys; j++) {
        if (j > 0) from = attn__tile_kv_row_f32(t, of, at + j, from);
        memcpy((char *)s->m.rows + (size_t)j * bytes, from, bytes);
    }
    return s->m.rows;
}

static int32_t keys_of(const strip *s, int32_t j0) { return attn__min32(ATTN_BF16_KEYS, s->m.tile->panel->mask.sk - j0); }

static void need_k(strip *s, int32_t j0) {
    const attn_rows *t = s->m.tile->panel;
    const int32_t keys = keys_of(s, j0), dim = t->p->dim_qk;
    int64_t row;
    if (s->k_at == j0) return;
    const void *from = rows_of(s, &t->f->k, dim, j0, keys, &row);
    s->k_at = j0;
    if (!s->splits) {
        attn__bf16_pack_rows(s->m.k, from, row, keys, dim);
        return;
    }
    const int64_t part = attn__bf16_part_of(s->parts, ATTN_BF16_KEYS * attn__bf16_pad(dim));
    attn_bf16_numbers of = {from, t->p->kv_dtype, row, 1};
    s->k_odd = attn__bf16_split_rows(s->m.k, part, &of, keys, dim) & ATTN_SPLIT_OUT;
    if (!s->k_odd) return; /* a score is off by nothing that counts where numbers are tiny */
    clean_rows(s->m.rows, &of, keys, dim, s->k_is);
    attn__bf16_split_rows(s->m.k, part, &of, keys, dim);
    for (int32_t j = 0; j < keys; j++) s->k_is[j] = s->k_is[j] & ~IS_TINY ? IS_OUT : 0;
}

static void need_v(strip *s, int32_t j0) {
    const attn_rows *t = s->m.tile->panel;
    int32_t keys = keys_of(s, j0), dim = t->p->dim_v;
    int64_t row;
    if (s->v_at == j0) return;
    const void *from = rows_of(s, &t->f->v, dim, j0, keys, &row);
    s->v_at = j0;
    if (s->splits) {
        const int64_t part = attn__bf16_part_of(s->parts, ATTN_BF16_KEYS * attn__bf16_pad(dim));
        attn_bf16_numbers of = {from, t->p->kv_dtype, row, 1};
        const int odd = attn__bf16_split_columns(s->m.v, part, &of, keys, dim) & (ATTN_SPLIT_OUT | ATTN_SPLIT_TINY);
        s->v_odd = odd != 0;
        s->v_finite = true;
        if (!odd) return;
        clean_rows(s->m.rows, &of, keys, dim, s->v_is);
        if (odd & ATTN_SPLIT_OUT) attn__bf16_split_columns(s->m.v, part, &of, keys, dim);
        for (int32_t j = 0; j < keys; j++) { /* there are zeros in the place of what is not finite */
            s->bad[j] = s->v_is[j] & IS_NO_NUMBER;
            s->v_finite &= !s->bad[j];
        }
        return;
    }
    s->v_finite = attn__bf16_pack_columns(s->m.v, from, row, keys, dim);
    if (s->v_finite) return;
    from = attn__bf16_clean(s->m.rows, from, row, keys, dim, s->bad);
    attn__bf16_pack_columns(s->m.clean, from, dim, keys, dim);
}

/* ---- one item ---- */

/* What member x has to do in the block at j0; false: nothing. */
static bool make_item(item *w, member *x, int32_t j0, int32_t keys) {
    const attn_rows *t = x->panel;
    *w = (item){.x = x, .j0 = j0, .first = -1, .full = true};
    int32_t end = 0;
    for (int32_t n = 0; n * ATTN_TILE_COLS < keys; n++) {
        int32_t at = n * ATTN_TILE_COLS, stop = attn__min32(at + ATTN_TILE_COLS, keys);
        const attn_flash_range *range = attn__work_range(t->plan, t->f, t->s.b, t->kv_head, (j0 + at) / ATTN_TILE_COLS);
        w->class[n] = attn__mask_tile(&t->mask, t->i0, t->i0 + x->rows, j0 + at, j0 + stop, range);
        if (w->class[n] == ATTN_TILE_SKIP) continue;
        if (w->first < 0) w->first = at;
        end = stop;
    }
    w->keys = end - w->first;
    for (int32_t at = w->first; w->first >= 0 && at < end; at += ATTN_TILE_COLS)
        w->full &= w->class[at / ATTN_TILE_COLS] == ATTN_TILE_FULL;
    return w->first >= 0;
}

/* Rows of the item that see odd keys. Those that are known need not be looked at again. */
static void look_for(const item *w, bool any, const uint8_t *is) {
    member *x = w->x;
    const attn_rows *t = x->panel;
    const uint32_t all = x->rows < 32 ? (UINT32_C(1) << x->rows) - 1 : UINT32_MAX;
    for (int32_t j = w->first; any && x->out != all && j < w->first + w->keys; j++) {
        const int32_t *flash = t->mask.vectors ? attn__flash_at(t->p, t->f, t->s.b, t->kv_head, w->j0 + j) : NULL;
        for (int32_t r = 0; is[j] && r < x->rows; r++) {
            const uint32_t bit = UINT32_C(1) << r;
            if (!attn__mask_allowed(&t->mask, t->i0 + r, w->j0 + j, flash)) continue;
            if (is[j] & IS_OUT) x->out |= bit;
            if (is[j] & IS_TINY) x->tiny |= bit;
        }
    }
}

static attn_bf16_product scores(const strip *s, const item *w, int place) {
    look_for(w, s->k_odd, s->k_is);
    int32_t dim = (int32_t)attn__bf16_pad(s->plan->problem.dim_qk), keys = (int32_t)attn__bf16_pad(w->keys);
    return (attn_bf16_product){.c = s->m.s[place],
                               .ldc = 16,
                               .c_panel = 16 * keys,
                               .a = s->m.k + (int64_t)w->first * dim,
                               .a_panel = 16 * dim,
                               .b = w->x->q,
                               .b_panel = 16 * dim,
                               .parts = s->parts,
                               .a_part = attn__bf16_part_of(s->parts, ATTN_BF16_KEYS * dim),
                               .b_part = attn__bf16_part_of(s->parts, ATTN_BF16_ROWS * dim),
                               .exact = true,
                               .m = keys,
                               .n = ATTN_BF16_ROWS,
                               .k = dim,
                               .by_vectors = attn__by_vectors(s->plan)};
}

/* Is a product of P and V summed by itself before O takes it in? That makes o as exact as float. */
static bool is_apart(const strip *s) { return s->parts == 3; }

static attn_bf16_product p_v(const strip *s, const item *w, int place) {
    look_for(w, s->v_odd, s->v_is);
    int32_t dim = (int32_t)attn__bf16_pad(s->plan->problem.dim_v), block = (int32_t)attn__bf16_pad(keys_of(s, w->j0));
    const uint16_t *v = s->v_finite || w->full || s->splits ? s->m.v : s->m.clean;
    return (attn_bf16_product){.c = is_apart(s) ? s->m.p_v : w->x->o,
                               .ldc = 16,
                               .c_panel = 16 * dim,
                               .a = v + w->first / 32 * ATTN_BF16_TILE,
                               .a_panel = 16 * block,
                               .b = s->m.p[place],
                               .b_panel = 16 * attn__bf16_pad(w->keys),
                               .parts = s->parts,
                               .a_part = attn__bf16_part_of(s->parts, ATTN_BF16_KEYS * dim),
                               .b_part = attn__bf16_part_of(s->parts, P_SIZE),
                               .m = dim,
                               .n = ATTN_BF16_ROWS,
                               .k = (int32_t)attn__bf16_pad(w->keys),
                               .accumulate = !is_apart(s),
                               .by_vectors = attn__by_vectors(s->plan)};
}

/* Counts the keys of the item that rows see, as far as it matters. */
static void count_keys(const item *w) {
    member *x = w->x;
    const attn_rows *t = x->panel;
    const uint32_t all = x->rows < 32 ? (UINT32_C(1) << x->rows) - 1 : UINT32_MAX;
    for (int32_t at = w->first; x->many != all && at < w->first + w->keys; at += ATTN_TILE_COLS) {
        const int32_t begin = w->j0 + at, end = w->j0 + attn__min32(at + ATTN_TILE_COLS, w->first + w->keys);
        const int class = w->class[at / ATTN_TILE_COLS];
        if (class == ATTN_TILE_SKIP) continue;
        if (class == ATTN_TILE_FULL && end - begin > ATTN_LEAST_KEYS) x->many = all;
        for (int32_t r = 0; r < x->rows; r++) {
            for (int32_t j = begin; !(x->many >> r & 1) && j < end; j++) {
                const int32_t *flash = t->mask.vectors ? attn__flash_at(t->p, t->f, t->s.b, t->kv_head, j) : NULL;
                if (attn__mask_allowed(&t->mask, t->i0 + r, j, flash) && ++x->seen[r] > ATTN_LEAST_KEYS)
                    x->many |= UINT32_C(1) << r;
            }
        }
    }
}

/* From dot products to scores. */
static void prepare(const strip *s, const item *w, int place) {
    for (int32_t at = w->first; (s->scaled || !w->full) && at < w->first + w->keys; at += ATTN_TILE_COLS) {
        int32_t keys = attn__min32(ATTN_TILE_COLS, w->first + w->keys - at);
        int class = w->class[at / ATTN_TILE_COLS];
        for (int32_t n = 0; n < 2; n++) {
            const attn_rows *t = &w->x->panel[n];
            float *tile = s->m.s[place] + n * 16 * attn__bf16_pad(w->keys) + (int64_t)(at - w->first) * 16;
            if (class == ATTN_TILE_SKIP) {
                for (int32_t i = 0; i < keys * 16; i++) tile[i] = -INFINITY;
            } else if (s->scaled) {
                t->micro->scale(tile, keys * 16, s->scale);
                attn__tile_adjust_f32(t, tile, NULL, NULL, w->j0 + at, keys, class, s->m.row);
            } else if (class == ATTN_TILE_PARTIAL) {
                attn__tile_mask_f32(t, tile, w->j0 + at, keys);
            }
        }
    }
}

/* Where p of row r and key j of the item is in operand b. */
static int64_t p_place(const item *w, int32_t r, int32_t j) {
    return attn__bf16_place_b(16 * attn__bf16_pad(w->keys), r, j);
}

static void drop(const strip *s, const item *w, uint16_t *p) {
    const attn_rows *t = w->x->panel;
    uint32_t batch_head = (uint32_t)(t->s.b * t->p->heads_q + t->h0), random[4];
    for (int32_t r = 0; r < w->x->rows; r++) {
        for (int32_t j = 0; j < w->keys; j++) { /* keys begin at a multiple of 8 */
            uint32_t key = (uint32_t)(w->j0 + w->first + j);
            if (j % ATTN_PHILOX_KEYS == 0)
                attn__philox4(&t->dropout, batch_head, (uint32_t)(t->i0 + r), key / ATTN_PHILOX_KEYS, random);
            if (!attn__drops(&t->dropout, random, key)) continue;
            for (int n = 0; n < s->parts; n++) p[n * attn__bf16_part_of(s->parts, P_SIZE) + p_place(w, r, j)] = 0;
        }
    }
}

/* p of row r and key j of the item, whole. */
static float p_at(const strip *s, const item *w, const uint16_t *p, int32_t r, int32_t j) {
    float whole = 0;
    for (int n = s->parts - 1; n >= 0; n--)
        whole += attn__from_bf16(p[n * attn__bf16_part_of(s->parts, P_SIZE) + p_place(w, r, j)]);
    return whole;
}

/* What has been left out of V, for the rows that see it. */
static void add_bad(const strip *s, const item *w, const uint16_t *p) {
    const attn_rows *t = w->x->panel;
    int32_t dim = t->p->dim_v;
    for (int32_t j = w->first; !s->v_finite && !(w->full && !s->splits) && j < w->first + w->keys; j++) {
        if (!s->bad[j]) continue;
        const char *v = attn__tile_kv_row_f32(t, &t->f->v, t->s.leftpad + w->j0 + j, NULL);
        const int32_t *flash = t->mask.vectors ? attn__flash_at(t->p, t->f, t->s.b, t->kv_head, w->j0 + j) : NULL;
        for (int32_t r = 0; r < w->x->rows; r++) {
            if (!attn__mask_allowed(&t->mask, t->i0 + r, w->j0 + j, flash)) continue;
            float weight = p_at(s, w, p, r, j - w->first);
            float *o = w->x->o + r / 16 * (16 * attn__bf16_pad(dim)) + r % 16;
            for (int32_t x = 0; x < dim; x++) {
                const float value = (float)attn__load(t->p->kv_dtype, v, x);
                if (!isfinite(value)) o[(int64_t)x * 16] += weight * value;
            }
        }
    }
}

/* O times alpha; and where it is apart, what the item adds to it. */
static void rescale(const strip *s, const item *w, const float *alpha) {
    const int32_t dim = (int32_t)attn__bf16_pad(s->plan->problem.dim_v);
    for (int32_t r = 0; r < ATTN_BF16_ROWS; r += 16) {
        float *o = w->x->o + (int64_t)r * dim;
        if (is_apart(s))
            attn__bf16_take_in(o, dim, alpha + r, s->m.p_v + (int64_t)r * dim);
        else
            attn__bf16_rescale(o, dim, alpha + r);
    }
}

/* The product of P and V is made: what o still lacks of it. */
static void take_in(const strip *s, const item *w, int place) {
    if (is_apart(s)) rescale(s, w, s->m.alpha[place]);
    add_bad(s, w, s->m.p[place]);
}

/* ---- all items of a strip ---- */

/* The item after that of member n - 1 in the block at *j0; false at the end. */
static bool next_item(strip *s, item *w, int32_t *n, int32_t *j0, int32_t end) {
    for (; *j0 < end; *j0 += ATTN_BF16_KEYS, *n = 0) {
        while (*n < s->count)
            if (make_item(w, &s->m.tile[(*n)++], *j0, keys_of(s, *j0))) return true;
    }
    return false;
}

static void work_items(strip *s, int32_t first, int32_t end) {
    item last, now, next;
    bool is_last = false, more;
    int32_t n = 0, j0 = first / ATTN_BF16_KEYS * ATTN_BF16_KEYS;
    if (!next_item(s, &now, &n, &j0, end)) return;
    need_k(s, now.j0);
    attn_bf16_product product[2] = {scores(s, &now, 0)};
    attn__bf16_run(product);
    for (int place = 0;; place ^= 1) {
        int32_t count = 0;
        if (is_last) {
            need_v(s, last.j0);
            product[count++] = p_v(s, &last, place ^ 1);
        }
        more = next_item(s, &next, &n, &j0, end);
        if (more) {
            need_k(s, next.j0);
            product[count++] = scores(s, &next, place ^ 1);
        }
        if (s->splits) count_keys(&now);
        prepare(s, &now, place);
        attn_bf16_softmax step = {.s = s->m.s[place],
                                  .s_panel = 16 * attn__bf16_pad(now.keys),
                                  .keys = now.keys,
                                  .width = ATTN_BF16_ROWS,
                                  .scale = s->scaled ? 1 : s->scale,
                                  .factor = 1.44269504088896340736f,
                                  .max = now.x->max,
                                  .sum = now.x->sum,
                                  .alpha = s->m.alpha[place],
                                  .p = s->m.p[place],
                                  .p_panel = 16 * attn__bf16_pad(now.keys),
                                  .parts = s->parts,
                                  .p_part = attn__bf16_part_of(s->parts, P_SIZE)};
        attn__bf16_softmax(&step, product, count);
        if (is_last) take_in(s, &last, place ^ 1);
        if (s->plan->problem.dropout > 0) drop(s, &now, s->m.p[place]);
        if (!is_apart(s)) rescale(s, &now, s->m.alpha[place]);
        last = now;
        is_last = true;
        if (!more) {
            need_v(s, last.j0);
            product[0] = p_v(s, &last, place);
            attn__bf16_run(product);
            take_in(s, &last, place);
            return;
        }
        now = next;
    }
}

/* Of results in parts: next to what they may be off by? */
static bool is_tiny(const float *out, int32_t dim, float sum) {
    bool any = false;
    const float least = 4 * sum * attn__from_bf16(ATTN_SPLIT_LEAST);
    for (int32_t n = 0; n < dim; n++) any |= !(fabsf(out[n]) >= least);
    return any;
}

/* How a row that is done again is: as fwd.c does it, or in double for what else it would find. */
enum { IS_FINE = -1, BY_FLOATS, IN_DOUBLE, WAYS };

/* Which of it for row r, which is given as it is before the division? A row whose window is empty has the same result in any case. */
static int way_of(const strip *s, const member *x, int32_t r, const float *out, float sum) {
    const attn_rows *t = &x->panel[r / 16];
    int32_t first, end;
    attn__mask_row(&t->mask, t->i[r % 16], &first, &end);
    if (first >= end) return IS_FINE;
    if (!(x->max[r] < INFINITY && sum > 0)) return BY_FLOATS;
    if (!s->splits) return IS_FINE;
    if (!(x->many >> r & 1) || (x->out >> r & 1) || ((x->tiny >> r & 1) && is_tiny(out, t->p->dim_v, sum)))
        return BY_FLOATS;
    return attn__mixed(t->p) && attn__few(sum, 1, ATTN_FEW_KEYS) ? IN_DOUBLE : IS_FINE;
}

/* Rows of all members that are done again, each way. */
typedef struct doubtful {
    int32_t count[WAYS];
    attn_place rows[WAYS][ATTN_STRIP * ATTN_TILE_ROWS];
} doubtful;

static void finish(const strip *s, const member *x, doubtful *again) {
    int32_t dim = (int32_t)attn__bf16_pad(s->plan->problem.dim_v);
    for (int32_t r = 0; r < x->rows; r++) {
        float *out = s->m.out + (int64_t)(r % 16) * dim;
        if (r % 16 == 0) attn__bf16_transpose(x->panel->micro, s->m.out, dim, x->o + (int64_t)r * dim, dim);
        const float sum = s->splits ? x->sum[r] * (1 / ATTN_SPLIT_SHIFT) : x->sum[r];
        const double max = s->splits ? x->max[r] : x->max[r] * 0.69314718055994530942; /* not in base 2 */
        if (s->splits) x->panel->micro->scale(out, dim, 1 / ATTN_SPLIT_SHIFT);
        attn__fwd_finish_row_f32(&x->panel[r / 16], r % 16, out, max, sum);
        const int way = way_of(s, x, r, out, sum);
        if (way != IS_FINE) again->rows[way][again->count[way]++] = (attn_place){x->panel->h0, x->panel->i0 + r};
    }
}

void attn__fwd_rows_f64(const attn_plan *plan, const attn_buffers *f, int32_t b, const attn_place *rows, int32_t count,
                        int32_t slot);

void attn__bf16_unit(const attn_plan *plan, const attn_buffers *f, const attn_unit *unit, int32_t h, int32_t slot) {
    const attn_problem *p = &plan->problem;
    int32_t group = p->heads_q / p->heads_kv, fit = plan->strip_heads, first, end;
    if (h % group % fit != 0) return;
    strip s;
    s.plan = plan;
    s.count = 0;
    s.k_at = s.v_at = -1;
    s.k_odd = s.v_odd = false;
    s.parts = attn__bf16_parts(p->dtype);
    s.splits = s.parts > 1;
    lay_out(&s.m, attn__slot(plan, f, slot), plan);
    double descale =
        attn__descale(f, f->q_descale, unit->b, h / group) * attn__descale(f, f->k_descale, unit->b, h / group);
    s.scale = (float)(p->scale * descale);
    s.scaled = p->softcap > 0 || (p->flags & (ATTN_ALIBI | ATTN_BIAS)) || !(s.scale > 1e-30f && s.scale < 1e30f);
    for (int32_t n = h; n < h + attn__min32(fit, group - h % group); n++) {
        for (int32_t i = 0; i < unit->rows; i += ATTN_BF16_ROWS) {
            attn_unit rows = {unit->b, unit->row + i, attn__min32(ATTN_BF16_ROWS, unit->rows - i), -1};
            join(&s, f, &rows, n);
        }
    }
    attn__mask_rows(&s.m.tile->panel->mask, unit->row, unit->row + unit->rows, &first, &end);
    if (!(fabsf(s.scale) < 1e-30f) && !(s.splits && !(fabsf(s.scale) <= 0x1p20f))) {
        attn__bf16_begin(attn__by_vectors(plan));
        work_items(&s, first, end);
        attn__bf16_end(attn__by_vectors(plan));
    }
    doubtful again;
    again.count[BY_FLOATS] = again.count[IN_DOUBLE] = 0;
    for (int32_t n = 0; n < s.count; n++) finish(&s, &s.m.tile[n], &again);
    for (int way = 0; way < WAYS; way++) { /* the scratch is theirs now */
        for (int32_t n = 0, some; n < again.count[way]; n += some) {
            some = attn__gather(p, again.rows[way] + n, again.count[way] - n);
            (way == IN_DOUBLE ? attn__fwd_rows_f64 : attn__fwd_rows_f32)(plan, f, unit->b, again.rows[way] + n, some, slot);
        }
    }
}

#else

void attn__bf16_unit(const attn_plan *plan, const attn_buffers *f, const attn_unit *unit, int32_t h, int32_t slot) {
    (void)plan, (void)f, (void)unit, (void)h, (void)slot; /* no plan has this kernel */
}
int64_t attn__bf16_scratch(const attn_plan *plan) {
    (void)plan;
    return 0;
}

#endif
