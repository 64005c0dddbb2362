/* Query tiles: loading, scores, masking. Everything that forward and backward have in common. */
#include "tile.h"

#include <math.h>
#include <string.h>

/* Row r of the tile is row i of query head h. */
static void put_row(attn_rows *t, int32_t r, int32_t h, int32_t i) {
    t->h[r] = h;
    t->i[r] = i;
    t->slope[r] = t->p->flags & ATTN_ALIBI ? (real)t->f->alibi[t->s.b * t->f->alibi_stride + h] : 0;
}

bool REAL(tile_make)(attn_rows *t, const attn_plan *plan, const attn_buffers *f, const attn_unit *unit, int32_t h,
                     bool pack) {
    const attn_problem *p = &plan->problem;
    attn_seq s = attn__seq(p, f, unit->b);
    int32_t group = p->heads_q / p->heads_kv, in_group = h % group;
    int32_t fit = pack && attn__is_short(s.sq) ? ATTN_TILE_ROWS / unit->rows : 1;
    if (in_group % fit != 0) return false; /* *t is left alone: it may be one past the last of a strip */
    t->plan = plan;
    t->p = p;
    t->f = f;
    t->micro = plan->kernel->REAL_MICRO;
    t->s = s;
    t->mask = attn__seq_mask(p, &t->s);
    t->kv_head = h / group;
    t->h0 = h;
    t->i0 = unit->row;
    t->count = unit->rows;
    t->heads = attn__min32(fit, group - in_group);
    t->rows = t->heads * t->count;
    t->width = attn__pad(t->rows);
    t->narrow = attn__is_narrow(&s);
    t->dim_qk = attn__pad(p->dim_qk);
    t->dim_v = attn__pad(p->dim_v);
    for (int32_t r = 0, n = 0, i = 0; r < t->width; r++) {
        put_row(t, r, h + n, t->i0 + i);
        if (r + 1 >= t->rows || ++i < t->count) continue; /* the padding repeats the last row */
        i = 0;
        n++;
    }
    if (p->dropout > 0) t->dropout = attn__philox_make(f->seed, f->offset, p->dropout);
    return true;
}

void REAL(tile_gather)(attn_rows *t, const attn_plan *plan, const attn_buffers *f, int32_t b, const attn_place *rows,
                       int32_t count) {
    int32_t first = rows[0].i, end = first + 1;
    for (int32_t r = 1; r < count; r++) {
        first = attn__min32(first, rows[r].i);
        end = attn__max32(end, rows[r].i + 1);
    }
    REAL(tile_make)(t, plan, f, &(attn_unit){b, first, 1, -1}, rows[0].h, false);
    t->count = end - first;
    t->rows = count;
    t->width = attn__pad(count);
    for (int32_t r = 0; r < t->width; r++) {
        const attn_place *row = &rows[attn__min32(r, count - 1)];
        put_row(t, r, row->h, row->i);
    }
}

/* Has a narrow tile so few rows that dot products are summed in the lanes of a vector? No result depends on it. */
static bool few_rows(const attn_rows *t) { return t->narrow && t->rows <= 4; }

/* Row r of q into to[dim_qk], not scaled. Rotation takes the way of the host's other code, which rounds as it must. */
static void load_q_row(const attn_rows *t, real *to, int32_t r) {
    const attn_problem *p = t->p;
    if (p->flags & ATTN_ROTARY) {
        double row[ATTN_MAX_DIM];
        attn__q_row(p, t->f, &t->s, t->i[r], t->h[r], row);
        for (int32_t x = 0; x < p->dim_qk; x++) to[x] = (real)row[x];
        return;
    }
    int64_t at = attn__q_offset(p, &t->f->q, &t->s, t->i[r], t->h[r]) * (int64_t)attn_dtype_size(p->dtype);
    t->micro->load(to, (const char *)t->f->q.data + at, p->dtype, p->dim_qk);
    real descale = (real)attn__descale(t->f, t->f->q_descale, t->s.b, t->kv_head);
    if (descale != 1) t->micro->scale(to, p->dim_qk, descale);
}

/* The strip of columns that column `first` belongs to: where it begins, and how many columns it has. */
static int32_t strip_of(const attn_rows *t, int32_t first, int32_t *columns) {
    int32_t begin = first / t->micro->strip * t->micro->strip;
    *columns = attn__min32(t->micro->strip, t->width - begin);
    return begin;
}

/* Rows [first, first + ATTN_LANES) of the tile, x [row][ldx], to their place in x_t, as tile_dots wants it. */
static void put_columns(const attn_rows *t, real *x_t, const real *x, int64_t ldx, int32_t first, int32_t dim) {
    int32_t columns, begin = strip_of(t, first, &columns), count = attn__max32(0, attn__min32(ATTN_LANES, t->rows - first));
    t->micro->transpose(x_t + (int64_t)begin * dim + (first - begin), columns, x, ldx, count, dim);
}

void REAL(tile_load_q)(const attn_rows *t, real *q) {
    double factor = t->p->scale * attn__kv_descale(t->p, t->f, t->f->k_descale, t->s.b, t->kv_head);
    real rows[ATTN_LANES * ATTN_MAX_DIM], *to = few_rows(t) ? q : rows;
    int32_t dims = t->narrow ? t->dim_qk : t->p->dim_qk; /* a narrow tile's padding is multiplied, too */
    for (int32_t first = 0; first < t->width; first += ATTN_LANES) {
        int32_t count = attn__max32(0, attn__min32(ATTN_LANES, t->rows - first));
        for (int32_t r = 0; r < count; r++) {
            real *row = to + (int64_t)r * dims;
            load_q_row(t, row, first + r);
            if ((real)factor == factor) /* the same, and fast */
                t->micro->scale(row, t->p->dim_qk, (real)factor);
            for (int32_t x = 0; x < t->p->dim_qk && (real)factor != factor; x++) row[x] = (real)(row[x] * factor);
            for (int32_t x = t->p->dim_qk; x < dims; x++) row[x] = 0;
        }
        if (t->narrow && !few_rows(t))
            t->micro->transpose(q + first, t->width, rows, dims, count, dims);
        else if (!few_rows(t))
            put_columns(t, q, rows, dims, first, dims);
    }
}

void REAL(tile_load_rows)(const attn_rows *t, real *x, real *x_t, const attn_tensor *from, attn_dtype dtype, int32_t dim) {
    int64_t size = (int64_t)attn_dtype_size(dtype), padded = attn__pad(dim);
    for (int32_t r = 0; r < t->rows; r++) {
        int64_t at = attn__q_offset(t->p, from, &t->s, t->i[r], t->h[r]) * size;
        t->micro->load(x + r * padded, (const char *)from->data + at, dtype, dim);
        for (int64_t n = dim; n < padded; n++) x[r * padded + n] = 0;
    }
    for (int32_t r = 0; x_t && r < t->width; r += ATTN_LANES) put_columns(t, x_t, x + r * padded, padded, r, dim);
}

/* Where row `at` of k or v is, `before` being the row before it (or NULL): a fixed distance on, except from page to page. */
const char *REAL(tile_kv_row)(const attn_rows *t, const attn_tensor *of, int32_t at, const char *before) {
    const attn_problem *p = t->p;
    int64_t size = (int64_t)attn_dtype_size(p->kv_dtype);
    if (before && !(p->page_size && at % p->page_size == 0)) return before + of->stride[1] * size;
    return (const char *)of->data + attn__kv_offset(p, t->f, of, &t->s, at, t->kv_head) * size;
}

/* How far `keys` rows are apart, in elements; 0 where none follows another in its page: then the stride may be anything. */
static int64_t pitch_of(const attn_rows *t, const attn_tensor *of, int32_t keys) {
    return keys > 1 && t->p->page_size != 1 ? of->stride[1] : 0;
}

/* Of k or v; pages may have factors of their own. */
static void load_kv(const attn_rows *t, real *to, const attn_tensor *from, int32_t dim, int32_t padded, int32_t j0,
                    int32_t keys) {
    const float *factors = from == &t->f->k ? t->f->k_descale : t->f->v_descale;
    enum { AHEAD = 8, LINE = 64 }; /* rows that are asked for: where heads lie side by side they are far apart */
    const char *row = NULL;
    int64_t size = (int64_t)attn_dtype_size(t->p->kv_dtype), bytes = dim * size;
    int64_t ahead = AHEAD * pitch_of(t, from, keys) * size;
    for (int32_t j = 0; j < keys; j++, to += padded) {
        row = REAL(tile_kv_row)(t, from, t->s.leftpad + j0 + j, row);
        for (int64_t at = 0; at < bytes; at += LINE)
            __builtin_prefetch((const void *)((uintptr_t)row + (uintptr_t)(ahead + at)));
        t->micro->load(to, row, t->p->kv_dtype, dim);
        if (t->p->flags & ATTN_DESCALE_PAGES)
            t->micro->scale(to, dim,
                            (real)attn__page_descale(t->p, t->f, factors, &t->s, t->s.leftpad + j0 + j, t->kv_head));
        for (int32_t x = dim; x < padded; x++) to[x] = 0;
    }
}

void REAL(tile_load_k)(const attn_rows *t, real *k, int32_t j0, int32_t keys) {
    load_kv(t, k, &t->f->k, t->p->dim_qk, t->dim_qk, j0, keys);
}

void REAL(tile_load_v)(const attn_rows *t, real *v, int32_t j0, int32_t keys) {
    load_kv(t, v, &t->f->v, t->p->dim_v, t->dim_v, j0, keys);
}

/* Do these rows lie in one page, a fixed distance apart? */
bool REAL(tile_in_one_page)(const attn_rows *t, int32_t j0, int32_t keys) {
    int32_t size = t->p->page_size;
    return !size || (t->s.leftpad + j0) % size + keys <= size;
}

/* So many rows as have so many bytes: whole blocks of four, at least ATTN_AHEAD, at most half a tile. */
static int32_t rows_of(int64_t all_bytes, int64_t bytes) {
    return attn__min32(attn__max32((int32_t)(all_bytes / bytes) / 4 * 4, ATTN_AHEAD), ATTN_TILE_COLS / 2);
}

/*
 * Rows of v, of so many bytes, `pitch` bytes apart, that are worked at once: 8 KB of those without gaps, for each time the sums of o go to
 * memory and back. Rows that are 4 KiB apart share the same lines of the first cache: a Neoverse-N1's has room for 16 of them, and some are
 * asked for ahead.
 */
static int32_t rows_at_once(int64_t bytes, int64_t pitch) { return pitch == bytes ? rows_of(8192, bytes) : ATTN_AHEAD; }

/* How many are asked for before they are read. Intel's cores fetch rows that follow each other by themselves, too, and want less of it. */
static int32_t rows_ahead(int64_t bytes, int64_t pitch) {
#if defined(__x86_64__)
    return pitch == bytes ? rows_of(4096, bytes) : pitch > bytes ? rows_of(6144, bytes) : ATTN_AHEAD;
#else
    return rows_at_once(bytes, pitch);
#endif
}

/*
 * Rows of k or v where they lie, if the micro-kernels can read them there; otherwise loaded into room. As they are worked, those some rows
 * further on are asked for.
 */
static attn_panel view(const attn_rows *t, const attn_tensor *of, int32_t dim, int32_t j0, int32_t keys, real *room) {
    const attn_problem *p = t->p;
    if (!t->micro->readable(p->kv_dtype) || !REAL(tile_in_one_page)(t, j0, keys) || dim % ATTN_LANES != 0 ||
        (p->flags & ATTN_DESCALE_PAGES)) {
        load_kv(t, room, of, dim, attn__pad(dim), j0, keys);
        return (attn_panel){room, attn__pad(dim), REAL_DTYPE, 0, attn__pad(dim), ATTN_AHEAD};
    }
    int64_t row = pitch_of(t, of, keys), size = (int64_t)attn_dtype_size(p->kv_dtype);
    int64_t ahead = rows_ahead(dim * size, row * size) * row;
    return (attn_panel){REAL(tile_kv_row)(t, of, t->s.leftpad + j0, NULL),
                        row,
                        p->kv_dtype,
                        ahead,
                        row,
                        rows_at_once(dim * size, row * size)};
}

/* The first rows of a panel of `keys`, or all that are left of it: the last ones, for which it is to ask for what comes next, come apart. */
static int32_t part_of(attn_panel *panel, int32_t dim, int32_t done, int32_t keys, const void *next) {
    int64_t size = (int64_t)attn_dtype_size(panel->dtype);
    int32_t first = keys - rows_ahead(dim * size, panel->row * size);
    if (panel->ahead == 0) return keys - done; /* a copy, for which others have asked, or one row */
    if (done == 0 && first > 0) return first;
    panel->data = (const char *)panel->data + done * panel->row * size;
    panel->ahead = next ? ((intptr_t)next - (intptr_t)panel->data) / size : 0;
    return keys - done;
}

int REAL(tile_class)(const attn_rows *t, int32_t j0, int32_t keys) {
    const attn_flash_range *range = attn__work_range(t->plan, t->f, t->s.b, t->kv_head, j0 / ATTN_TILE_COLS);
    return attn__mask_tile(&t->mask, t->i0, t->i0 + t->count, j0, j0 + keys, range);
}

/* Keys of the tile's [j0, j0 + keys), counted from j0, that any of its rows [first, first + rows) may see before FlashMask. */
static void seen_keys(const attn_rows *t, int32_t first, int32_t rows, int32_t j0, int32_t keys, int32_t *from,
                      int32_t *to) {
    *from = keys, *to = 0;
    for (int32_t r = first; r < attn__min32(first + rows, t->rows); r++) {
        int32_t begin, end;
        attn__mask_row(&t->mask, t->i[r], &begin, &end);
        *from = attn__min32(*from, attn__max32(begin - j0, 0));
        *to = attn__max32(*to, attn__min32(end - j0, keys));
    }
}

void REAL(tile_dots)(const attn_rows *t, real *s, const real *k, int64_t ldk, const real *x_t, int32_t dim, int32_t j0,
                     int32_t keys, int tile_class) {
    for (int32_t first = 0, columns; first < t->width; first += columns) {
        int32_t from = 0, to = keys;
        strip_of(t, first, &columns);
        if (tile_class == ATTN_TILE_PARTIAL) seen_keys(t, first, columns, j0, keys, &from, &to);
        if (from < to)
            t->micro->dots(s + (int64_t)from * t->width + first, t->width, k + from * ldk, ldk, x_t + (int64_t)first * dim,
                           columns, to - from, dim);
    }
}

/* One row of bias at a time: keys are the direction in which it is usually contiguous. What the window hides is not read. */
static void add_bias(const attn_rows *t, real *s, int32_t j0, int32_t keys, real *scratch) {
    const attn_matrix *m = &t->f->bias;
    int64_t size = (int64_t)attn_dtype_size(t->p->bias_dtype);
    for (int32_t r = 0; r < t->rows; r++) {
        int32_t first, end;
        attn__mask_row(&t->mask, t->i[r], &first, &end);
        first = attn__max32(first, j0) - j0;
        end = attn__min32(end, j0 + keys) - j0;
        if (first >= end) continue;
        int64_t row = t->s.b * m->stride[0] + t->h[r] * m->stride[1] + t->i[r] * m->stride[2];
        if (m->stride[3] == 1) {
            t->micro->load(scratch + first, (const char *)m->data + (row + j0 + first) * size, t->p->bias_dtype,
                           end - first);
        } else {
            for (int32_t j = first; j < end; j++)
                t->micro->load(scratch + j, (const char *)m->data + (row + (j0 + j) * m->stride[3]) * size,
                               t->p->bias_dtype, 1);
        }
        for (int32_t j = first; j < end; j++) s[(int64_t)j * t->width + r] += scratch[j];
    }
}

/* Do the tile's rows follow each other? */
static bool in_order(const attn_rows *t) {
    for (int32_t r = 0; r < t->rows; r++)
        if (t->i[r] != t->i0 + r) return false;
    return true;
}

/* -inf in the columns of rows in order that do not see key j, which is there; those past the last row go with it. */
static void hide_rows(const attn_rows *t, real *s, int32_t j) {
    int32_t first, end;
    attn__mask_cols(&t->mask, j, j + 1, &first, &end);
    first = first - t->i0 < t->rows ? first - t->i0 : t->width;
    end = end - t->i0 < t->rows ? attn__max32(end - t->i0, 0) : t->width;
    for (int32_t r = 0; r < first; r++) s[r] = (real)-INFINITY;
    for (int32_t r = end; r < t->width; r++) s[r] = (real)-INFINITY;
}

/* -inf wherever the pair is not allowed. */
void REAL(tile_mask)(const attn_rows *t, real *s, int32_t j0, int32_t keys) {
    const bool ordered = in_order(t);
    int32_t first[ATTN_TILE_ROWS], end[ATTN_TILE_ROWS];
    for (int32_t r = 0; r < t->width && !ordered; r++) attn__mask_row(&t->mask, t->i[r], &first[r], &end[r]);
    for (int32_t j = 0; j < keys; j++) {
        real *row = s + (int64_t)j * t->width;
        if (ordered) hide_rows(t, row, j0 + j);
        for (int32_t r = 0; r < t->width && !ordered; r++)
            row[r] = j0 + j < first[r] || j0 + j >= end[r] ? (real)-INFINITY : row[r];
        if (!t->mask.vectors) continue;
        attn_flash v = attn__flash_load(&t->mask, attn__flash_at(t->p, t->f, t->s.b, t->kv_head, j0 + j));
        for (int32_t r = 0; r < t->width; r++) row[r] = attn__flash_masked(v, t->i[r]) ? (real)-INFINITY : row[r];
    }
}

/* From dot products to scores. */
void REAL(tile_adjust)(const attn_rows *t, real *s, real *slope, real *rest, int32_t j0, int32_t keys, int tile_class,
                       real *scratch) {
    const attn_problem *p = t->p;
    if (p->softcap > 0) t->micro->softcap(s, slope, keys * t->width, (real)p->softcap);
    if (p->flags & ATTN_ALIBI) t->micro->alibi(s, rest, keys, t->width, t->slope, t->i, t->mask.sk - t->mask.sq - j0);
    if (p->flags & ATTN_BIAS) add_bias(t, s, j0, keys, scratch);
    if (tile_class == ATTN_TILE_PARTIAL) REAL(tile_mask)(t, s, j0, keys);
}

void REAL(tile_scores)(const attn_rows *t, real *s, real *slope, real *rest, const real *q_t, const real *k, int32_t j0,
                       int32_t keys, int tile_class, real *scratch) {
    const attn_panel loaded = {k, t->dim_qk, REAL_DTYPE, 0, t->dim_qk, ATTN_AHEAD};
    if (few_rows(t))
        t->micro->narrow_dots(s, t->width, &loaded, q_t, t->dim_qk, t->rows, keys, t->dim_qk);
    else if (t->narrow)
        t->micro->chain_dots(s, t->width, k, t->dim_qk, q_t, keys, t->dim_qk);
    else
        REAL(tile_dots)(t, s, k, t->dim_qk, q_t, t->p->dim_qk, j0, keys, tile_class);
    REAL(tile_adjust)(t, s, slope, rest, j0, keys, tile_class, scratch);
}

void REAL(tile_narrow_scores)(const attn_rows *t, real *s, const real *q, int32_t j0, int32_t keys, int tile_class,
                              const void *next, real *room, real *scratch) {
    enum { PORTION = 16 }; /* keys that are converted at once: they stay in the first cache until they are used */
    if (few_rows(t)) {
        attn_panel k = view(t, &t->f->k, t->p->dim_qk, j0, keys, room);
        for (int32_t j = 0, some; j < keys; j += some) {
            some = part_of(&k, t->p->dim_qk, j, keys, next);
            t->micro->narrow_dots(s + (int64_t)j * t->width, t->width, &k, q, t->dim_qk, t->rows, some, t->dim_qk);
        }
    }
    for (int32_t j = 0; !few_rows(t) && j < keys; j += PORTION) {
        int32_t count = attn__min32(PORTION, keys - j);
        REAL(tile_load_k)(t, room, j0 + j, count);
        t->micro->chain_dots(s + (int64_t)j * t->width, t->width, room, t->dim_qk, q, count, t->dim_qk);
    }
    REAL(tile_adjust)(t, s, NULL, NULL, j0, keys, tile_class, scratch);
}

void REAL(tile_drop)(const attn_rows *t, real *p, int32_t j0, int32_t keys) {
    for (int32_t r = 0; r < t->rows; r++) {
        uint32_t batch_head = (uint32_t)(t->s.b * t->p->heads_q + t->h[r]), random[4];
        for (int32_t j = 0; j < keys; j++) { /* j0 is a multiple of 8 */
            uint32_t key = (uint32_t)(j0 + j);
            if (j % ATTN_PHILOX_KEYS == 0)
                attn__philox4(&t->dropout, batch_head, (uint32_t)t->i[r], key / ATTN_PHILOX_KEYS, random);
            if (attn__drops(&t->dropout, random, key)) p[(int64_t)j * t->width + r] = 0;
        }
    }
}

/*
 * Masked pairs left out: each row of c is made with a copy of b in which the rows it may not see are zero. Slow, and the same
 * arithmetic in the same order as the plain product, so the same bits where the plain one would have been finite.
 */
static void gemm_guarded(const attn_rows *t, real *c, int64_t ldc, const real *a, const real *b, int64_t ldb, int32_t n,
                         int32_t j0, int32_t keys, bool keys_first) {
    int32_t m_end = keys_first ? keys : t->rows, k_end = keys_first ? t->rows : keys;
    for (int32_t m = 0; m < m_end; m++) {
        for (int32_t k = 0; k < k_end; k++) {
            int32_t r = keys_first ? k : m, j = keys_first ? m : k;
            const int32_t *flash = t->mask.vectors ? attn__flash_at(t->p, t->f, t->s.b, t->kv_head, j0 + j) : NULL;
            bool allowed = attn__mask_allowed(&t->mask, t->i[r], j0 + j, flash);
            for (int32_t e = 0; e < n; e++) t->guard[k * ldb + e] = allowed ? b[k * ldb + e] : 0;
        }
        if (keys_first)
            t->micro->gemm(c + m * ldc, ldc, a + (int64_t)m * t->width, t->width, 1, t->guard, ldb, 1, n, k_end, true);
        else
            t->micro->gemm(c + m * ldc, ldc, a + m, 1, t->width, t->guard, ldb, 1, n, k_end, true);
    }
}

/* Rows of the tile, counted from its first one, that may see any of keys [first, end). */
static void seeing_rows(const attn_rows *t, int32_t first, int32_t end, int32_t *from, int32_t *to) {
    *from = 0, *to = t->rows;
    if (t->heads > 1) return;
    attn__mask_cols(&t->mask, first, end, from, to);
    *from = attn__max32(*from - t->i0, 0);
    *to = attn__min32(*to - t->i0, t->rows);
}

/* Some rows of c at a time, without the pairs that are masked for all of them: their a is 0, and b is finite. */
static void gemm_partial(const attn_rows *t, real *c, int64_t ldc, const real *a, const real *b, int64_t ldb, int32_t n,
                         int32_t j0, int32_t keys, bool keys_first) {
    enum { SOME = 12 }; /* whole blocks of registers, with every ISA */
    int32_t m = keys_first ? keys : t->rows, from, to;
    for (int32_t x = 0; x < m; x += SOME) {
        int32_t count = attn__min32(SOME, m - x);
        if (keys_first)
            seeing_rows(t, j0 + x, j0 + x + count, &from, &to);
        else
            seen_keys(t, x, count, j0, keys, &from, &to);
        if (from >= to) continue;
        if (keys_first)
            t->micro->gemm(c + x * ldc, ldc, a + (int64_t)x * t->width + from, t->width, 1, b + from * ldb, ldb, count, n,
                           to - from, true);
        else
            t->micro->gemm(c + x * ldc, ldc, a + x + (int64_t)from * t->width, 1, t->width, b + from * ldb, ldb, count, n,
                           to - from, true);
    }
}

void REAL(tile_gemm)(const attn_rows *t, real *c, int64_t ldc, const real *a, const real *b, int64_t ldb, int32_t n,
                     int32_t j0, int32_t keys, bool keys_first, int tile_class) {
    int32_t m = keys_first ? keys : t->rows, k = keys_first ? t->rows : keys;
    if (tile_class == ATTN_TILE_PARTIAL && !t->micro->finite(b, k * ldb)) {
        gemm_guarded(t, c, ldc, a, b, ldb, n, j0, keys, keys_first);
    } else if (tile_class == ATTN_TILE_PARTIAL) {
        gemm_partial(t, c, ldc, a, b, ldb, n, j0, keys, keys_first);
    } else if (keys_first) {
        t->micro->gemm(c, ldc, a, t->width, 1, b, ldb, m, n, k, true);
    } else {
        t->micro->gemm(c, ldc, a, 1, t->width, b, ldb, m, n, k, true);
    }
}

void REAL(tile_narrow_gemm)(const attn_rows *t, real *c, const real *p, int32_t j0, int32_t keys, int tile_class,
                            const void *next, real *room) {
    if (t->rows <= 8 && tile_class == ATTN_TILE_FULL) { /* with more rows it pays to convert first */
        attn_panel v = view(t, &t->f->v, t->p->dim_v, j0, keys, room);
        memset(t->guard, 0, (size_t)t->rows * (size_t)t->dim_v * sizeof(real));
        for (int32_t j = 0, some; j < keys; j += some) {
            some = part_of(&v, t->p->dim_v, j, keys, next);
            t->micro->narrow_gemm(t->guard, t->dim_v, p + (int64_t)j * t->width, t->width, &v, t->rows, t->dim_v, some);
        }
        t->micro->add(c, t->guard, t->rows * t->dim_v);
    } else {
        REAL(tile_load_v)(t, room, j0, keys);
        REAL(tile_gemm)(t, c, t->dim_v, p, room, t->dim_v, t->dim_v, j0, keys, false, tile_class);
    }
}
