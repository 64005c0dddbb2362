/* Lists of work for the cpu backend: made anew in each run, from the lengths, in the workspace. */
#include "work.h"

#include <string.h>

/*
 * Costs are sorted by buckets, eight to a factor of two: linear, stable, in place. The list is generated twice, once to
 * count and once to put each unit where it belongs.
 */
enum { BUCKETS = 64 * 8 };

typedef struct sorter {
    const attn_plan *plan;
    const attn_buffers *f;
    attn_unit *units; /* NULL while counting */
    int first, end;   /* buckets outside of [first, end) have none: a list of one unit is not to cost a walk over all */
    int64_t start[BUCKETS];
} sorter;

/* Expensive units come first: bucket 0 has the highest cost. */
static int bucket_of(int64_t cost) {
    if (cost < 8) return BUCKETS - 1 - (int)cost;
    int log2 = 63 - __builtin_clzll((unsigned long long)cost);
    return BUCKETS - 1 - (log2 * 8 + (int)(cost >> (log2 - 3) & 7));
}

static void add(sorter *to, attn_unit unit, int64_t cost) {
    int bucket = bucket_of(cost);
    int64_t at = to->start[bucket]++;
    if (to->units) {
        to->units[at] = unit;
        return;
    }
    to->first = attn__min32(to->first, bucket);
    to->end = attn__max32(to->end, bucket + 1);
}

/* From counts to first places. Returns the sum. */
static int64_t counted(sorter *s, attn_unit *units) {
    int64_t sum = 0;
    for (int n = s->first; n < s->end; n++) {
        int64_t count = s->start[n];
        s->start[n] = sum;
        sum += count;
    }
    s->units = units;
    return sum;
}

/* Is each chunk a unit of its own? */
static bool splits(const attn_plan *plan) { return plan->partials > 0; }

/*
 * Score elements that rows [i0, i1) and keys [j0, j1) of a sequence cost. With FlashMask, skipped tiles cost nothing; heads may
 * differ in theirs, and the first one speaks for all.
 */
static int64_t cost_of(const attn_plan *plan, const attn_buffers *f, const attn_seq *s, const attn_mask *mask, int32_t i0,
                       int32_t i1, int32_t j0, int32_t j1) {
    if (i0 >= i1 || j0 >= j1) return 0;
    if (!mask->vectors) return (int64_t)(i1 - i0) * (j1 - j0);
    int64_t cost = 0;
    for (int32_t i = i0 / ATTN_TILE_ROWS * ATTN_TILE_ROWS; i < i1; i += ATTN_TILE_ROWS) {
        int32_t i_end = attn__min32(i + ATTN_TILE_ROWS, s->sq);
        for (int32_t tile = j0 / ATTN_TILE_COLS; tile <= (j1 - 1) / ATTN_TILE_COLS; tile++) {
            int32_t j = tile * ATTN_TILE_COLS, j_end = attn__min32(j + ATTN_TILE_COLS, s->sk);
            int class = attn__mask_tile(mask, i, i_end, j, j_end, attn__work_range(plan, f, s->b, 0, tile));
            if (class != ATTN_TILE_SKIP) cost += (int64_t)(i_end - i) * (j_end - j);
        }
    }
    return cost;
}

/* Query tiles of one sequence. A short one is a single tile, or one per chunk that its rows can see. */
static void rows_of_sequence(sorter *to, const attn_seq *s) {
    const attn_plan *plan = to->plan;
    attn_mask mask = attn__seq_mask(&plan->problem, s);
    int32_t step = plan->strip_rows;
    for (int32_t row = 0; row < s->sq; row += step) {
        int32_t rows = attn__min32(step, s->sq - row), first, end;
        attn__mask_rows(&mask, row, row + rows, &first, &end);
        if (splits(plan) && attn__is_short(s->sq) && !attn__takes_bf16(plan, s) && first < end) {
            for (int32_t chunk = first / ATTN_CHUNK; chunk <= (end - 1) / ATTN_CHUNK; chunk++) {
                int32_t from = attn__max32(first, chunk * ATTN_CHUNK), stop = attn__min32(end, (chunk + 1) * ATTN_CHUNK);
                add(to, (attn_unit){s->b, row, rows, chunk}, cost_of(plan, to->f, s, &mask, row, row + rows, from, stop));
            }
        } else {
            add(to, (attn_unit){s->b, row, rows, -1}, cost_of(plan, to->f, s, &mask, row, row + rows, first, end));
        }
    }
}

/* Strips of keys of one sequence. They take turns at d_q, so each comes after those that it waits for. */
static void keys_of_sequence(sorter *to, const attn_seq *s) {
    const int32_t strip = to->plan->strip_keys;
    for (int32_t key = 0; key < s->sk; key += strip)
        add(to, (attn_unit){s->b, key, attn__min32(strip, s->sk - key), -1}, s->sk - key);
}

static int64_t make_list(const attn_plan *plan, const attn_buffers *f, attn_unit *units,
                         void (*of_sequence)(sorter *to, const attn_seq *s)) {
    sorter s = {.plan = plan, .f = f, .first = BUCKETS};
    int64_t count = 0;
    for (int pass = 0; pass < 2; pass++) {
        for (int32_t b = 0; b < plan->problem.batch; b++) {
            attn_seq seq = attn__seq(&plan->problem, f, b);
            of_sequence(&s, &seq);
        }
        if (pass == 0) count = counted(&s, units);
    }
    return count;
}

int64_t attn__work_rows(const attn_plan *plan, const attn_buffers *f, attn_unit *units) {
    return make_list(plan, f, units, rows_of_sequence);
}

int64_t attn__work_keys(const attn_plan *plan, const attn_buffers *f, attn_unit *units) {
    return make_list(plan, f, units, keys_of_sequence);
}

int64_t attn__work_rows_most(const attn_plan *plan) {
    const attn_problem *p = &plan->problem;
    int64_t tiles = attn__ceil_div(p->max_q, ATTN_TILE_ROWS);
    if (splits(plan) && attn__ceil_div(p->max_kv, ATTN_CHUNK) > tiles) tiles = attn__ceil_div(p->max_kv, ATTN_CHUNK);
    int64_t most = p->batch * tiles;
    if ((p->flags & ATTN_VARLEN_Q) && !splits(plan)) {
        int64_t packed = p->total_q / ATTN_TILE_ROWS + p->batch;
        most = most < packed ? most : packed;
    }
    return most;
}

int64_t attn__work_keys_most(const attn_plan *plan) {
    const attn_problem *p = &plan->problem;
    int64_t most = p->batch * attn__ceil_div(p->max_kv, plan->strip_keys);
    if (p->flags & ATTN_VARLEN_KV) {
        int64_t packed = p->total_kv / plan->strip_keys + p->batch;
        most = most < packed ? most : packed;
    }
    return most;
}

int64_t attn__lay_out(char *at, const attn_room *rooms, size_t count) {
    int64_t used = 0;
    for (size_t n = 0; n < count; n++) {
        if (at) memcpy(rooms[n].field, &(char *){at + used}, sizeof(char *));
        used += attn__ceil_div(rooms[n].bytes, 64) * 64;
    }
    return used;
}

/* ---- FlashMask ---- */

typedef struct flash_job {
    const attn_plan *plan;
    const attn_buffers *f;
} flash_job;

static int64_t range_index(const attn_problem *p, int32_t b, int32_t head) {
    return ((int64_t)b * p->flashmask_heads + head) * attn__ceil_div(p->max_kv, ATTN_TILE_COLS);
}

/* One sequence and head: minima and maxima of each column of tiles. */
static void flash_of_sequence(void *arg, int64_t index, int32_t slot) {
    const flash_job *job = arg;
    const attn_problem *p = &job->plan->problem;
    int32_t b = (int32_t)(index / p->flashmask_heads), head = (int32_t)(index % p->flashmask_heads);
    attn_seq s = attn__seq(p, job->f, b);
    attn_mask mask = attn__seq_mask(p, &s);
    attn_flash_range *ranges = (attn_flash_range *)attn__part(job->plan, job->f, CPU_FLASH) + range_index(p, b, head);
    (void)slot;
    for (int32_t j = 0; j < s.sk; j++) {
        attn_flash v = attn__flash_load(&mask, attn__flash_at(p, job->f, b, head, j));
        attn__flash_extend(&ranges[j / ATTN_TILE_COLS], v, j % ATTN_TILE_COLS == 0);
    }
}

attn_status attn__work_flash(const attn_plan *plan, const attn_buffers *f) {
    const attn_problem *p = &plan->problem;
    if (!p->flashmask_vectors) return ATTN_OK;
    flash_job job = {plan, f};
    return attn__parallel(plan->context, plan->slots, (int64_t)p->batch * p->flashmask_heads, flash_of_sequence, &job);
}

const attn_flash_range *attn__work_range(const attn_plan *plan, const attn_buffers *f, int32_t b, int32_t kv_head,
                                         int32_t tile) {
    const attn_problem *p = &plan->problem;
    if (!p->flashmask_vectors) return NULL;
    const attn_flash_range *ranges = attn__part(plan, f, CPU_FLASH);
    return &ranges[range_index(p, b, p->flashmask_heads == 1 ? 0 : kv_head) + tile];
}
