/*
 * The backward, pass by pass:
 *   rows    lse and delta of each row
 *   restore a better lse, of float32 that is wanted precise, all of it or where few count; of float32 and f16, of rows whose lse is large, where a forward may
 *           have had other scores (attn__restores_large)
 *   keys    d_k and d_v of a strip of keys, and its share of d_q, in turns
 *   sink    d_sink of a head
 *   bias    a tile of d_bias: over every sequence and head that is summed into it
 * Every sum has one order, whatever the threads do (C5).
 *
 * bwd.c has what a pass does with one sequence, in float or in double as suits that sequence (attn__in_double); bwd_bf16.c has the
 * keys of bf16.
 */
#include <math.h>
#include <string.h>

#include "../numeric.h"
#include "tile.h"

/* Both number types of what tile.h declares for one. */
void attn__bwd_rows_f64(const attn_plan *plan, const attn_buffers *f, int32_t b, int32_t h, int32_t slot);
void attn__bwd_keys_f64(const attn_plan *plan, const attn_buffers *f, const attn_unit *unit, int32_t kv_head, int32_t slot);
void attn__bwd_restore_f64(const attn_plan *plan, const attn_buffers *f, int32_t b, int32_t h, int32_t row, int32_t slot);
void attn__bwd_bias_f64(const attn_plan *plan, const attn_buffers *f, const int64_t size[4], int32_t b, int32_t h,
                        int32_t row_tile, int32_t col_tile, int32_t slot);

typedef struct job {
    const attn_plan *plan;
    const attn_buffers *f;
    const attn_unit *units; /* of the pass at hand */
    int64_t size[4];        /* bias pass: elements of d_bias along each dim */
} job;

static void work_rows(void *arg, int64_t index, int32_t slot) {
    const job *j = arg;
    int32_t heads = j->plan->problem.heads_q, b = (int32_t)(index / heads);
    (attn__sequence_in_double(j->plan, j->f, b) ? attn__bwd_rows_f64 : attn__bwd_rows_f32)(j->plan, j->f, b,
                                                                                           (int32_t)(index % heads), slot);
}

static void work_restore(void *arg, int64_t index, int32_t slot) {
    const job *j = arg;
    int32_t heads = j->plan->problem.heads_q, batch = j->plan->problem.batch;
    int32_t h = (int32_t)(index % heads), b = (int32_t)(index / heads % batch);
    int32_t row = (int32_t)(index / heads / batch) * ATTN_STRIP_KEYS; /* as many rows at a time */
    (attn__sequence_in_double(j->plan, j->f, b) ? attn__bwd_restore_f64 : attn__bwd_restore_f32)(j->plan, j->f, b, h, row,
                                                                                                 slot);
}

/* The sink's probability times its gradient, over all rows of the head that have a key. */
static void work_sink(void *arg, int64_t h, int32_t slot) {
    const job *j = arg;
    const attn_problem *p = &j->plan->problem;
    const attn_row *rows = attn__part(j->plan, j->f, CPU_ROWS);
    double sum = 0;
    (void)slot;
    for (int32_t b = 0; b < p->batch; b++) {
        attn_seq s = attn__seq(p, j->f, b);
        for (int32_t i = 0; i < s.sq; i++) {
            const attn_row *row = &rows[attn__lse_index(p, &s, i, (int32_t)h)];
            if (row->lse != -INFINITY) sum -= exp((double)j->f->sink[h] - row->wide) * row->delta;
        }
    }
    j->f->d_sink[h] = (float)attn__one_nan(sum);
}

static void work_keys(void *arg, int64_t index, int32_t slot) {
    const job *j = arg;
    int32_t heads = j->plan->problem.heads_kv;
    const attn_unit *unit = &j->units[index / heads];
    attn_seq s = attn__seq(&j->plan->problem, j->f, unit->b);
    if (attn__takes_bf16(j->plan, &s)) {
        attn__bf16_keys(j->plan, j->f, unit, (int32_t)(index % heads), slot);
        return;
    }
    (attn__sequence_in_double(j->plan, j->f, unit->b) ? attn__bwd_keys_f64 : attn__bwd_keys_f32)(
        j->plan, j->f, unit, (int32_t)(index % heads), slot);
}

static void work_bias(void *arg, int64_t index, int32_t slot) {
    const job *j = arg;
    const attn_problem *p = &j->plan->problem;
    const attn_matrix *to = &j->f->d_bias;
    int64_t col_tiles = attn__ceil_div(j->size[3], ATTN_TILE_COLS), row_tiles = attn__ceil_div(j->size[2], ATTN_TILE_ROWS);
    int32_t col_tile = (int32_t)(index % col_tiles), row_tile = (int32_t)(index / col_tiles % row_tiles);
    int32_t h = (int32_t)(index / col_tiles / row_tiles % j->size[1]),
            b = (int32_t)(index / col_tiles / row_tiles / j->size[1]);
    double *sum = (double *)(void *)attn__slot(j->plan, j->f, slot);
    memset(sum, 0, sizeof(double) * ATTN_TILE_ROWS * ATTN_TILE_COLS);
    for (int32_t from_b = b; from_b < (j->size[0] > 1 ? b + 1 : p->batch); from_b++)
        for (int32_t from_h = h; from_h < (j->size[1] > 1 ? h + 1 : p->heads_q); from_h++)
            (attn__sequence_in_double(j->plan, j->f, from_b) ? attn__bwd_bias_f64 : attn__bwd_bias_f32)(
                j->plan, j->f, j->size, from_b, from_h, row_tile, col_tile, slot);
    for (int64_t i = row_tile * ATTN_TILE_ROWS; i < j->size[2] && i < (row_tile + 1) * ATTN_TILE_ROWS; i++) {
        for (int64_t col = col_tile * ATTN_TILE_COLS; col < j->size[3] && col < (col_tile + 1) * ATTN_TILE_COLS; col++) {
            int64_t at = b * to->stride[0] + h * to->stride[1] + i * to->stride[2] + col * to->stride[3];
            double x = sum[i % ATTN_TILE_ROWS * ATTN_TILE_COLS + col % ATTN_TILE_COLS];
            attn__store(p->bias_dtype, to->data, at, attn__one_nan(x));
        }
    }
}

static attn_status run_bias(job *j) {
    const attn_problem *p = &j->plan->problem;
    const int64_t full[4] = {p->batch, p->heads_q, p->max_q, p->max_kv};
    for (int n = 0; n < 4; n++) {
        j->size[n] = j->f->d_bias.stride[n] == 0 ? 1 : full[n];
        if (j->size[n] == 0) return ATTN_OK; /* no element */
    }
    int64_t tiles = attn__ceil_div(j->size[2], ATTN_TILE_ROWS) * attn__ceil_div(j->size[3], ATTN_TILE_COLS);
    return attn__parallel(j->plan->context, j->plan->slots, j->size[0] * j->size[1] * tiles, work_bias, j);
}

attn_status attn__backward(const attn_plan *plan, const attn_buffers *f) {
    const attn_problem *p = &plan->problem;
    const attn_context *context = plan->context;
    job j = {.plan = plan, .f = f};
    RETURN_IF_ERROR(attn__work_flash(plan, f));
    RETURN_IF_ERROR(attn__parallel(context, plan->slots, (int64_t)p->batch * p->heads_q, work_rows, &j));
    int64_t strips = attn__ceil_div(p->max_q, ATTN_STRIP_KEYS) * p->batch * p->heads_q;
    bool restore = (p->dtype == ATTN_F32 && attn__restores_all(p)) || attn__may_restore_large(plan);
    if (restore) RETURN_IF_ERROR(attn__parallel(context, plan->slots, strips, work_restore, &j));
    if (f->d_sink) RETURN_IF_ERROR(attn__parallel(context, plan->slots, p->heads_q, work_sink, &j));
    if (f->d_q.data || f->d_k.data || f->d_v.data) {
        attn_unit *units = attn__part(plan, f, CPU_KV_UNITS);
        int64_t count = attn__work_keys(plan, f, units);
        j.units = units;
        RETURN_IF_ERROR(attn__parallel(context, plan->slots, count * p->heads_kv, work_keys, &j));
    }
    return f->d_bias.data ? run_bias(&j) : ATTN_OK;
}
