/*
 * The cpu backend: its table of kernels, its plans, and the way from attn_run to a kernel.
 *
 * The table has the rows of plain C first and those that need more of the CPU after them; the last row that this machine can
 * run is taken. What an ISA brings is its table of micro-kernels; the loops around them are the same for all.
 */
#include "features.h"

#include "amx.h"
#include "tile.h"
#include "work.h"

/* Both number types of what tile.h declares for one. */
int64_t attn__fwd_scratch_f64(const attn_plan *plan);
int64_t attn__bwd_scratch_f64(const attn_problem *p);
void attn__fwd_unit_f64(const attn_plan *plan, const attn_buffers *f, const attn_unit *unit, int32_t h, int32_t slot);
void attn__fwd_fold_f64(const attn_plan *plan, const attn_buffers *f, int32_t b, int32_t h, int32_t slot);
attn_status attn__probs_run_f64(const attn_plan *plan, const attn_buffers *f);

/* The tables of the two number types are of different types; only the kernels of that type look inside. */
struct attn__micro_f64;
#define ISA(isa, bits, words)                                                                                              \
    extern const struct attn__micro_f32 attn__micro_##isa##_f32;                                                           \
    extern const struct attn__micro_f64 attn__micro_##isa##_f64;
#define ISA_ONLY(isa, tables, name, dtype, bits, words)
#include "isa.def"
#undef ISA
#undef ISA_ONLY

#define ROW(full_name, op_id, tables, real_name, only, is_wide, row_count, col_count, bits, words)                         \
    {.name = full_name,                                                                                                    \
     .needs = words,                                                                                                       \
     .op = op_id,                                                                                                          \
     .dtype = only,                                                                                                        \
     .wide = is_wide,                                                                                                      \
     .cpu = bits,                                                                                                          \
     .impl = &attn__micro_##tables##_##real_name,                                                                          \
     .wider = &attn__micro_##tables##_f64,                                                                                 \
     .rows = row_count,                                                                                                    \
     .cols = col_count},
#define ANY ATTN_DTYPE_DEFAULT
#define ISA(isa, bits, words)                                                                                              \
    ROW("fwd_" #isa "_f32", ATTN_FORWARD, isa, f32, ANY, false, ATTN_TILE_ROWS, ATTN_TILE_COLS, bits, words)               \
    ROW("fwd_" #isa "_f64", ATTN_FORWARD, isa, f64, ANY, true, ATTN_TILE_ROWS, ATTN_TILE_COLS, bits, words)                \
    ROW("bwd_" #isa "_f32", ATTN_BACKWARD, isa, f32, ANY, false, ATTN_TILE_ROWS, ATTN_TILE_COLS, bits, words)              \
    ROW("bwd_" #isa "_f64", ATTN_BACKWARD, isa, f64, ANY, true, ATTN_TILE_ROWS, ATTN_TILE_COLS, bits, words)
#define ISA_ONLY(isa, tables, name, dtype, bits, words)                                                                    \
    ROW("fwd_" #isa "_" #name, ATTN_FORWARD, tables, f32, dtype, false, ATTN_BF16_ROWS, ATTN_BF16_KEYS, bits, words)       \
    ROW("bwd_" #isa "_" #name, ATTN_BACKWARD, tables, f32, dtype, false, ATTN_BF16_ROWS, ATTN_TILE_COLS, bits, words)

static const attn_kernel kernels[] = {
    {.name = "append_c", .needs = "", .op = ATTN_KV_APPEND},
#include "isa.def"
};
#undef ISA
#undef ISA_ONLY
#undef ANY
#undef ROW

enum { KERNELS = sizeof kernels / sizeof kernels[0] };

static bool runs_on(const attn_kernel *k, uint32_t features) { return (k->cpu & ~features) == 0; }

static const attn_kernel *kernel(int32_t index, bool *available) {
    if (index < 0 || index >= KERNELS) return NULL;
    if (available) *available = runs_on(&kernels[index], attn__cpu_detect());
    return &kernels[index];
}

static attn_status open_cpu(attn_context *context) { return attn__cpu_allowed(&context->cpu); }

/* Comes after all that would leave the kernel out: it asks the system. */
static bool is_permitted(const attn_kernel *k) { return !(k->cpu & ATTN_CPU_AMX) || attn__amx_available(); }

/* Products of bf16 by vectors do not stand in for tiles that the system does not permit; see attn__cpu_allowed. */
static bool is_by_vectors(const attn_kernel *k) { return (k->cpu & ATTN_CPU_AVX512_BF16) && !(k->cpu & ATTN_CPU_AMX); }

static void choose_kernel(attn_plan *plan) {
    const attn_problem *p = &plan->problem;
    bool wide = p->dtype == ATTN_F64;
    for (int32_t n = 0; n < KERNELS; n++) {
        const attn_kernel *k = &kernels[n];
        bool fits = k->op == p->op && (k->wide == wide || p->op == ATTN_KV_APPEND);
        /* A result of more bits is wanted as exact as they are: not by products of bf16. */
        if (k->dtype && (k->dtype != p->dtype || k->dtype != p->kv_dtype || k->dtype != p->out_dtype)) fits = false;
        if (k->dtype && (p->flags & ATTN_DESCALE_PAGES)) fits = false; /* they take keys as they are */
        if (k->dtype && attn__wide_problem(p)) fits = false;
        if (attn__in_parts(k->dtype) && p->op == ATTN_BACKWARD && !(fabs(p->scale) <= 0x1p20))
            fits = false; /* fwd_bf16.c looks by itself: descales are a part of it there */
        if (attn__in_parts(k->dtype) && p->max_q <= ATTN_NARROW_ROWS) fits = false; /* attn__takes_bf16 leaves them all */
        if (attn__in_parts(k->dtype) && p->op == ATTN_BACKWARD && !(plan->context->cpu & ATTN_CPU_ASKED) &&
            (p->max_q < ATTN_LEAST_SPLIT || p->max_kv < ATTN_LEAST_SPLIT ||
             p->dim_qk <= (k->dtype == ATTN_F32 ? ATTN_FLOAT_DIM : ATTN_HALF_DIM)))
            fits = false; /* where p and d_s in parts are too much of it; ATTN_CPU=amx takes it all the same */
        if (is_by_vectors(k) && (plan->context->cpu & ATTN_CPU_AMX)) fits = false;
        if (fits && runs_on(k, plan->context->cpu) && is_permitted(k)) plan->kernel = k;
    }
}

/* Can a sequence of this problem be worked in double? */
static bool may_be_in_double(const attn_problem *p) {
    return attn__wide_problem(p) || (attn__mixed(p) && attn__may_be_narrow(p));
}

/* Or a part of one? */
static bool has_double(const attn_problem *p) { return may_be_in_double(p) || attn__mixed(p); }

int64_t attn__fwd_scratch(const attn_plan *plan) { /* double takes the more of it */
    int64_t bytes = has_double(&plan->problem) ? attn__fwd_scratch_f64(plan) : attn__fwd_scratch_f32(plan);
    int64_t bf16 = attn__by_bf16(plan) ? attn__bf16_scratch(plan) : 0;
    return bf16 > bytes ? bf16 : bytes;
}

int64_t attn__bwd_scratch(const attn_plan *plan) {
    const attn_problem *p = &plan->problem;
    int64_t bytes = has_double(p) ? attn__bwd_scratch_f64(p) : attn__bwd_scratch_f32(p);
    int64_t bf16 = attn__by_bf16(plan) ? attn__bf16_bwd_scratch(plan) : 0;
    return bf16 > bytes ? bf16 : bytes;
}

int64_t attn__bwd_d_q(const attn_plan *plan) { /* padded as float is, which is as much or more */
    const attn_problem *p = &plan->problem;
    const bool is_wide = may_be_in_double(p) || attn__splits(plan); /* two floats are as much as a double */
    return attn__pad(p->dim_qk) * (int64_t)(is_wide ? sizeof(double) : sizeof(float));
}

int64_t attn__fwd_partial(const attn_problem *p) { /* o, padded as float is, which is as much or more; maximum and sum */
    return (attn__pad(p->dim_v) + 2) * (int64_t)(may_be_in_double(p) ? sizeof(double) : sizeof(float));
}

/*
 * Split-KV pays when rows are few; it costs memory for partial results. Where that would be much (many sequences, so there
 * is work for all threads anyway) the chunks of a sequence run on one thread, with the same result.
 */
static void choose_split(attn_plan *plan) {
    const attn_problem *p = &plan->problem;
    const int64_t most_bytes = 64 << 20;
    int64_t rows = (int64_t)p->batch * p->heads_q * p->max_q, chunks = attn__ceil_div(p->max_kv, ATTN_CHUNK);
    bool split = p->op == ATTN_FORWARD && attn__is_short(p->max_q) && chunks > 1 && rows > 0 && plan->slots > 1 &&
                 rows <= most_bytes / attn__fwd_partial(p) / chunks;
    plan->partials = split ? rows * chunks : 0;
}

/* No more threads, and scratch for them, than there are pieces of work in a pass. */
static void limit_threads(attn_plan *plan) {
    const attn_problem *p = &plan->problem;
    int64_t rows = attn__work_rows_most(plan) * p->heads_q, keys = attn__work_keys_most(plan) * p->heads_kv;
    int64_t most = p->op == ATTN_BACKWARD && keys > rows ? keys : rows;
    if (plan->slots > most) plan->slots = most > 1 ? (int32_t)most : 1;
}

/*
 * Loading keys, which converts and packs them, costs a fifth of the arithmetic of one tile; a strip shares it. Where rows are few a
 * strip has the heads that lie side by side, so that memory is read as it lies. Shorter strips where threads would have to wait
 * for the last long one; packing for products of bf16 costs a third, so strips of those stay longer, and where rows are few it is most of the
 * work. No result depends on it.
 */
static void choose_strip(attn_plan *plan) {
    const attn_problem *p = &plan->problem;
    bool is_short = attn__is_short(p->max_q);
    const bool is_narrow = p->max_q <= ATTN_NARROW_ROWS, by_bf16 = attn__by_bf16(plan) && !(is_short && attn__splits(plan));
    const int64_t units_per_thread = is_narrow ? 2 : is_short ? (by_bf16 ? 1 : 4) : by_bf16 ? 4 : 8;
    const int64_t most_bytes = 768 << 10; /* q and o of a strip stay in a cache of 1 MiB */
    int64_t tiles = is_short ? p->batch * p->heads_kv * attn__short_tiles(p, p->max_q) : 0;
    const bool by_chunks = plan->partials > 0 && (!by_bf16 || is_narrow);
    if (is_short && by_chunks) tiles *= attn__ceil_div(p->max_kv, ATTN_CHUNK);
    if (!is_short) tiles = (int64_t)p->batch * p->heads_q * attn__ceil_div(p->max_q, ATTN_TILE_ROWS);
    plan->strip = p->op == ATTN_FORWARD ? ATTN_STRIP : 1;
    while (plan->strip > 1 && plan->slots > 1) {
        /* Of short ones loading is a tenth, packing half. */
        const int64_t units = is_short || plan->strip > 4 ? units_per_thread : by_bf16 ? 2 : 4;
        if (tiles / plan->strip >= units * plan->slots) break;
        plan->strip /= 2;
    }
    const int64_t tile_bytes = ATTN_TILE_ROWS * (int64_t)(p->dim_qk + p->dim_v) * (int64_t)sizeof(float);
    while (!is_short && plan->strip > 1 && plan->strip * tile_bytes > most_bytes) plan->strip /= 2;
    plan->strip_heads = attn__min32(plan->strip, p->heads_q / p->heads_kv);
    plan->strip_rows = plan->strip / plan->strip_heads * ATTN_TILE_ROWS;
}

/*
 * Keys of a unit of the backward. Long ones share each load of a query tile; those of numbers in parts, whose operands are large, are halved where threads are many, of
 * which two may have one second cache. No result depends on it.
 */
static void choose_strip_keys(attn_plan *plan) {
    plan->strip_keys = attn__splits(plan) && plan->slots >= 4 ? ATTN_STRIP_KEYS / 2 : ATTN_STRIP_KEYS;
}

static attn_status lay_out(attn_plan *plan) {
    const attn_problem *p = &plan->problem;
    bool forward = p->op == ATTN_FORWARD;
    plan->scratch = forward ? attn__fwd_scratch(plan) : attn__bwd_scratch(plan);
    int64_t ranges = (int64_t)p->batch * p->flashmask_heads * attn__ceil_div(p->max_kv, ATTN_TILE_COLS);
    int64_t lse = p->flags & ATTN_VARLEN_Q ? p->heads_q * p->total_q : (int64_t)p->batch * p->heads_q * p->max_q;
    bool fits = attn__plan_reserve(plan, CPU_UNITS, attn__work_rows_most(plan), sizeof(attn_unit)) &&
                attn__plan_reserve(plan, CPU_KV_UNITS, forward ? 0 : attn__work_keys_most(plan), sizeof(attn_unit)) &&
                attn__plan_reserve(plan, CPU_FLASH, ranges, sizeof(attn_flash_range)) &&
                attn__plan_reserve(plan, CPU_SCRATCH, plan->slots, plan->scratch) &&
                attn__plan_reserve(plan, CPU_PARTIAL, plan->partials, attn__fwd_partial(p)) &&
                attn__plan_reserve(plan, CPU_ROWS, forward ? 0 : lse, sizeof(attn_row)) &&
                attn__plan_reserve(plan, CPU_D_Q, forward || p->max_kv <= plan->strip_keys ? 0 : lse, attn__bwd_d_q(plan));
    RETURN_IF(!fits, ATTN_INVALID, "max_q=%d, max_kv=%d: the workspace does not fit into memory", p->max_q, p->max_kv);
    return ATTN_OK;
}

static attn_status plan_cpu(attn_plan *plan) {
    choose_kernel(plan);
    plan->slots = plan->context->config.threads;
    attn__plan_say(plan, "kernel: %s\n", plan->kernel->name);
    if (plan->problem.op == ATTN_KV_APPEND) return ATTN_OK;
    choose_split(plan);
    choose_strip(plan);
    choose_strip_keys(plan);
    limit_threads(plan);
    attn__plan_say(plan, "threads: %d\n", plan->slots);
    attn__plan_say(plan, "tiles: %d rows x %d keys\n", plan->kernel->rows, plan->kernel->cols);
    attn__plan_say(plan, "split: sequences of at most %d rows in chunks of %d keys%s\n",
                   attn__by_bf16(plan) ? attn__rows_left(plan) : ATTN_SPLIT_ROWS, ATTN_CHUNK,
                   plan->partials ? ", over all threads" : ", each on one thread");
    if (!plan->kernel->wide && attn__wide_problem(&plan->problem))
        attn__plan_say(plan, "in double: all sequences\n");
    else if (!plan->kernel->wide && may_be_in_double(&plan->problem))
        attn__plan_say(plan, "in double: sequences of at most %d rows, with more keys\n", ATTN_NARROW_ROWS);
    if (attn__mixed(&plan->problem))
        attn__plan_say(plan, "in double, again: what weighs fewer than %d keys\n", ATTN_FEW_KEYS);
    return lay_out(plan);
}

/* ---- the run ---- */

typedef struct job {
    const attn_plan *plan;
    const attn_buffers *f;
    const attn_unit *units;
    int64_t count; /* of units */
} job;

static void work_unit(void *arg, int64_t index, int32_t slot) {
    const job *j = arg;
    const attn_problem *p = &j->plan->problem;
    int32_t heads = p->heads_q;
    /* Its keys may still be near; few rows read each key but once, and of causal ones the longest of all heads shall not be last. */
    bool by_head = !attn__is_short(p->max_q) && (j->plan->slots == 1 || !(p->flags & ATTN_CAUSAL));
    const attn_unit *unit = &j->units[by_head ? index % j->count : index / heads];
    int32_t h = (int32_t)(by_head ? index / j->count : index % heads);
    attn_seq s = attn__seq(p, j->f, unit->b);
    void (*work)(const attn_plan *, const attn_buffers *, const attn_unit *, int32_t, int32_t) =
        attn__takes_bf16(j->plan, &s) ? attn__bf16_unit
        : attn__in_double(p, &s)      ? attn__fwd_unit_f64
                                      : attn__fwd_unit_f32;
    work(j->plan, j->f, unit, h, slot);
}

static void fold_sequence(void *arg, int64_t index, int32_t slot) {
    const job *j = arg;
    int32_t heads = j->plan->problem.heads_q, b = (int32_t)(index / heads);
    (attn__sequence_in_double(j->plan, j->f, b) ? attn__fwd_fold_f64 : attn__fwd_fold_f32)(j->plan, j->f, b,
                                                                                           (int32_t)(index % heads), slot);
}

static attn_status forward(const attn_plan *plan, const attn_buffers *f) {
    attn_unit *units = attn__part(plan, f, CPU_UNITS);
    job j = {plan, f, units, 0};
    const attn_problem *p = &plan->problem;
    RETURN_IF_ERROR(attn__work_flash(plan, f));
    j.count = attn__work_rows(plan, f, units);
    RETURN_IF_ERROR(attn__parallel(plan->context, plan->slots, j.count * p->heads_q, work_unit, &j));
    if (plan->partials > 0)
        RETURN_IF_ERROR(attn__parallel(plan->context, plan->slots, (int64_t)p->batch * p->heads_q, fold_sequence, &j));
    if (!f->probs.data) return ATTN_OK;
    return attn__wide_problem(&plan->problem) ? attn__probs_run_f64(plan, f) : attn__probs_run_f32(plan, f);
}

static attn_status run_cpu(const attn_plan *plan, const attn_buffers *f, void *stream) {
    const attn_problem *p = &plan->problem;
    (void)stream;
    if (p->flags & ATTN_APPEND) RETURN_IF_ERROR(attn__host_append(plan, f));
    if (p->op == ATTN_KV_APPEND) return ATTN_OK;
    RETURN_IF_ERROR(attn__host_fill_padding(plan, f));
    return p->op == ATTN_FORWARD ? forward(plan, f) : attn__backward(plan, f);
}

/* ---- the tile map ---- */

/* Tiles of one unit, in the order in which the forward walks them. Returns the visitor's answer. */
static int visit_unit(const attn_plan *plan, const attn_buffers *f, const attn_unit *unit, int32_t kv_head, int32_t order,
                      int (*visit)(void *user, const attn_tile *tile), void *user) {
    attn_seq s = attn__seq(&plan->problem, f, unit->b);
    attn_mask mask = attn__seq_mask(&plan->problem, &s);
    int32_t tile_rows = attn__takes_bf16(plan, &s) ? ATTN_BF16_ROWS : ATTN_TILE_ROWS;
    int32_t row_tiles = (unit->rows + tile_rows - 1) / tile_rows;
    for (int64_t n = 0; n < attn__ceil_div(s.sk, ATTN_TILE_COLS) * row_tiles; n++) {
        int32_t j0 = (int32_t)(n / row_tiles) * ATTN_TILE_COLS, keys = attn__min32(ATTN_TILE_COLS, s.sk - j0);
        int32_t i0 = unit->row + (int32_t)(n % row_tiles) * tile_rows;
        int32_t rows = attn__min32(tile_rows, unit->row + unit->rows - i0);
        int32_t chunk = attn__is_short(s.sq) && !attn__takes_bf16(plan, &s) ? j0 / ATTN_CHUNK : 0;
        if (unit->chunk >= 0 && chunk != unit->chunk) continue;
        attn_tile tile = {.row = i0, .rows = rows, .col = j0, .cols = keys, .order = order, .chunk = chunk};
        const attn_flash_range *range = attn__work_range(plan, f, unit->b, kv_head, j0 / ATTN_TILE_COLS);
        tile.tile_class = attn__mask_tile(&mask, i0, i0 + rows, j0, j0 + keys, range);
        int stop = visit(user, &tile);
        if (stop) return stop;
    }
    return 0;
}

static attn_status tiles(const attn_plan *plan, const attn_buffers *buffers, int32_t batch, int32_t head,
                         int (*visit)(void *user, const attn_tile *tile), void *user) {
    attn_buffers f = *buffers;
    void *memory = attn__alloc(plan->context, plan->workspace + 1);
    if (!memory) return ATTN_NO_MEMORY;
    f.workspace = memory;
    attn_unit *units = attn__part(plan, &f, CPU_UNITS);
    attn_status status = attn__work_flash(plan, &f);
    int64_t count = status == ATTN_OK ? attn__work_rows(plan, &f, units) : 0;
    int32_t order = 0, group = plan->problem.heads_q / plan->problem.heads_kv;
    for (int64_t n = 0; n < count; n++) {
        if (units[n].b == batch && visit_unit(plan, &f, &units[n], head / group, order++, visit, user)) break;
    }
    attn__free(plan->context, memory);
    return status;
}

const attn_backend attn__backend_cpu = {
    .name = "cpu",
    .id = ATTN_BACKEND_CPU,
    .host = true,
    .open = open_cpu,
    .kernel = kernel,
    .plan = plan_cpu,
    .run = run_cpu,
    .tiles = tiles,
    .merge = attn__host_merge,
    .rotary = attn__host_rotary,
};
