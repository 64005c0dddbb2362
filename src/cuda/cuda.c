/*
 * The cuda backend: its table of kernels, its plans, and the way from attn_run to the launches.
 *
 * A plan belongs to no device. It holds the best kernel for each GPU of the machine, twice: for rows that can be read in pieces
 * of 16 bytes, and for any others, because alignment is known only when the tensors are. The workspace is the same everywhere.
 */
#include "cuda.h"
#include "host.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- the table ---- */

const attn_cuda_entry attn__cuda_entries[ATTN_ENTRIES] = {
#define FWD(...)
#define FWD90(...)
#define BWD(...)
#define BWD90(...)
#define ONLY_ANY(entry, number) (ATTN_ENTRY_##entry == ATTN_ENTRY_fwd_any ? (number) : 0)
#define EITHER_ANY(entry, number) (ATTN_ENTRY_##entry == ATTN_ENTRY_bwd_any ? (number) : ONLY_ANY(entry, number))
#define IN_BWD_ANY(entry)                                                                                                  \
    (ATTN_ENTRY_##entry == ATTN_ENTRY_bwd_any || ATTN_ENTRY_##entry == ATTN_ENTRY_bwd_any_q ||                             \
     ATTN_ENTRY_##entry == ATTN_ENTRY_bwd_bias)
#define PIECE(entry, source)                                                                                               \
    [ATTN_ENTRY_##entry] = {.name = #entry,                                                                                \
                            .file = #source,                                                                               \
                            .arch = ATTN_LEAST_ARCH,                                                                       \
                            .dim_qk = ONLY_ANY(entry, ATTN_MAX_DIM),                                                       \
                            .most_v = ONLY_ANY(entry, ATTN_MAX_DIM),                                                       \
                            .dim = EITHER_ANY(entry, ATTN_MAX_DIM),                                                        \
                            .dim_v = ONLY_ANY(entry, ATTN_MAX_DIM),                                                        \
                            .bm = ONLY_ANY(entry, ATTN_ANY_ROWS),                                                          \
                            .bn = ONLY_ANY(entry, ATTN_ANY_COLS),                                                          \
                            .warps = ONLY_ANY(entry, ATTN_ANY_ROWS),                                                       \
                            .takes = ONLY_ANY(entry, ATTN_TAKES_ALL),                                                      \
                            .shared_bytes = IN_BWD_ANY(entry) ? ATTN_BWD_ANY_REALS * sizeof(double) : 0},
#include "variants.def"
#undef FWD
#undef FWD90
#undef BWD
#undef BWD90
#undef PIECE
#define FWD(id, least, type, most, v, m, n, w, ctas, async, eager, swizzle, qf, kf, vf, held, twice, first, every)         \
    [ATTN_ENTRY_##id] = {.name = #id,                                                                                      \
                         .file = #id,                                                                                      \
                         .arch = least,                                                                                    \
                         .dtype = ATTN_##type,                                                                             \
                         .dim_qk = most,                                                                                   \
                         .most_v = most,                                                                                   \
                         .dim = most,                                                                                      \
                         .dim_v = v,                                                                                       \
                         .bm = m,                                                                                          \
                         .bn = n,                                                                                          \
                         .warps = w,                                                                                       \
                         .takes = every ? ATTN_TAKES_ALL : ATTN_TAKES_PLAIN,                                               \
                         .shared_bytes = ATTN_TILE_BYTES(ATTN_##type, m, n, most, v, eager)},
#define FWD90(id, type, most, mostv, v, n, consumers, stages, qbuf, kind)                                                  \
    [ATTN_ENTRY_##id] = {.name = #id,                                                                                      \
                         .file = #id,                                                                                      \
                         .hopper = true,                                                                                   \
                         .arch = 90,                                                                                       \
                         .dtype = ATTN_##type,                                                                             \
                         .dim_qk = most,                                                                                   \
                         .most_v = mostv,                                                                                  \
                         .dim = (most) > (mostv) ? (most) : (mostv),                                                       \
                         .dim_v = v,                                                                                       \
                         .bm = 64 * (consumers),                                                                           \
                         .bn = n,                                                                                          \
                         .warps = 4 * ((consumers) + 1), /* the producer's four besides */                                 \
                         .takes = ATTN_TAKES_##kind,                                                                       \
                         .shared_bytes = ATTN_HOPPER_BYTES(64 * (consumers), n, most, v, stages, qbuf)},
#define SIDE_KEYS true
#define SIDE_ROWS false
#define SIDE_BOTH true
#define ONE_KEYS false
#define ONE_ROWS false
#define ONE_BOTH true
#define BWD(id, least, side, type, most, own, others, w, ctas, stages)                                                     \
    [ATTN_ENTRY_##id] = {.name = #id,                                                                                      \
                         .file = #id,                                                                                      \
                         .op = ATTN_BACKWARD,                                                                              \
                         .one = ONE_##side,                                                                                \
                         .by_keys = SIDE_##side,                                                                           \
                         .split = SIDE_##side && !ONE_##side && ATTN_BWD_SPLIT(own, w, most),                              \
                         .blocks = 1,                                                                                      \
                         .arch = least,                                                                                    \
                         .dtype = ATTN_##type,                                                                             \
                         .dim_qk = most,                                                                                   \
                         .most_v = most,                                                                                   \
                         .dim = most,                                                                                      \
                         .dim_v = most,                                                                                    \
                         .bm = SIDE_##side ? (others) : (own),                                                             \
                         .bn = SIDE_##side ? (own) : (others),                                                             \
                         .warps = w,                                                                                       \
                         .takes = ATTN_TAKES_ALL,                                                                          \
                         .shared_bytes = ATTN_BWD_BYTES(SIDE_##side, ONE_##side, most, own, others, stages)},
#define BWD90(id, type, most, m, n, pair, buffers)                                                                         \
    [ATTN_ENTRY_##id] = {.name = #id,                                                                                      \
                         .file = #id,                                                                                      \
                         .op = ATTN_BACKWARD,                                                                              \
                         .one = true,                                                                                      \
                         .by_keys = true,                                                                                  \
                         .hopper = true,                                                                                   \
                         .arch = 90,                                                                                       \
                         .dtype = ATTN_##type,                                                                             \
                         .dim_qk = most,                                                                                   \
                         .most_v = most,                                                                                   \
                         .dim = most,                                                                                      \
                         .dim_v = most,                                                                                    \
                         .bm = m,                                                                                          \
                         .bn = n,                                                                                          \
                         .blocks = (pair) ? (pair) : 1,                                                                    \
                         .warps = (pair) ? 16 : 12, /* three or two warpgroups, and the producers' four */                 \
                         .takes = ATTN_TAKES_OWN,                                                                          \
                         .shared_bytes = ATTN_BWD90_BYTES(most, m, n, pair, buffers)},
#define DECODE(id, least, type, most, m, n, stages, blocks, factors)                                                       \
    [ATTN_ENTRY_##id] = {.name = #id,                                                                                      \
                         .file = #id,                                                                                      \
                         .decode = true,                                                                                   \
                         .pages = factors,                                                                                 \
                         .waits = true,                                                                                    \
                         .arch = least,                                                                                    \
                         .dtype = ATTN_##type,                                                                             \
                         .dim_qk = most,                                                                                   \
                         .most_v = most,                                                                                   \
                         .dim = most,                                                                                      \
                         .dim_v = most,                                                                                    \
                         .bm = m,                                                                                          \
                         .bn = n,                                                                                          \
                         .warps = ATTN_DECODE_WARPS,                                                                       \
                         .takes = ATTN_TAKES_ALL,                                                                          \
                         .ctas = blocks,                                                                                   \
                         .shared_bytes = ATTN_DECODE_BYTES(ATTN_##type, most, m, n, stages, factors)},
#define DECODE90(id, type, dims, v, n, stages)                                                                             \
    [ATTN_ENTRY_##id] = {.name = #id,                                                                                      \
                         .file = #id,                                                                                      \
                         .decode = true,                                                                                   \
                         .latent = true,                                                                                   \
                         .hopper = true,                                                                                   \
                         .arch = 90,                                                                                       \
                         .dtype = ATTN_##type,                                                                             \
                         .dim_qk = dims,                                                                                   \
                         .most_v = v,                                                                                      \
                         .dim = dims,                                                                                      \
                         .dim_v = v,                                                                                       \
                         .bm = ATTN_DECODE90_ROWS,                                                                         \
                         .bn = n,                                                                                          \
                         .warps = ATTN_DECODE90_WARPS,                                                                     \
                         .takes = ATTN_TAKES_ALL,                                                                          \
                         .ctas = 1,                                                                                        \
                         .shared_bytes = ATTN_DECODE90_BYTES(dims, n, stages)},
#define PIECE(...)
#include "variants.def"
#undef FWD
#undef FWD90
#undef BWD
#undef BWD90
#undef PIECE
};

/* The rows that attn_kernel_get lists; the pieces besides append serve them and are not chosen among. */
static const attn_kernel kernels[] = {
    {.name = "append", .needs = "sm_80", .op = ATTN_KV_APPEND, .impl = &attn__cuda_entries[ATTN_ENTRY_append]},
    {.name = "fwd_any",
     .needs = "sm_80",
     .op = ATTN_FORWARD,
     .impl = &attn__cuda_entries[ATTN_ENTRY_fwd_any],
     .rows = ATTN_ANY_ROWS,
     .cols = ATTN_ANY_COLS},
    {.name = "bwd_any",
     .needs = "sm_80",
     .op = ATTN_BACKWARD,
     .impl = &attn__cuda_entries[ATTN_ENTRY_bwd_any],
     .rows = ATTN_ANY_COLS,
     .cols = ATTN_ANY_ROWS},
#define FWD(id, least, type, most, v, m, n, ...)                                                                           \
    {.name = #id,                                                                                                          \
     .needs = "sm_" #least,                                                                                                \
     .op = ATTN_FORWARD,                                                                                                   \
     .impl = &attn__cuda_entries[ATTN_ENTRY_##id],                                                                         \
     .rows = m,                                                                                                            \
     .cols = n},
#define FWD90(id, type, most, mostv, v, n, consumers, ...)                                                                 \
    {.name = #id,                                                                                                          \
     .needs = "sm_90a",                                                                                                    \
     .op = ATTN_FORWARD,                                                                                                   \
     .impl = &attn__cuda_entries[ATTN_ENTRY_##id],                                                                         \
     .rows = 64 * (consumers),                                                                                             \
     .cols = n},
#define BWD(id, least, side, type, most, own, others, ...) BWD_##side(id, least, own, others)
#define BWD_KEYS(id, least, own, others)                                                                                   \
    {.name = #id,                                                                                                          \
     .needs = "sm_" #least,                                                                                                \
     .op = ATTN_BACKWARD,                                                                                                  \
     .impl = &attn__cuda_entries[ATTN_ENTRY_##id],                                                                         \
     .rows = others,                                                                                                       \
     .cols = own},
#define BWD_ROWS(...) /* comes with the line before it */
#define BWD_BOTH BWD_KEYS
#define BWD90(id, type, most, m, n, ...)                                                                                   \
    {.name = #id,                                                                                                          \
     .needs = "sm_90a",                                                                                                    \
     .op = ATTN_BACKWARD,                                                                                                  \
     .impl = &attn__cuda_entries[ATTN_ENTRY_##id],                                                                         \
     .rows = m,                                                                                                            \
     .cols = n},
#define DECODE(id, least, type, most, m, n, ...)                                                                           \
    {.name = #id,                                                                                                          \
     .needs = "sm_" #least,                                                                                                \
     .op = ATTN_FORWARD,                                                                                                   \
     .impl = &attn__cuda_entries[ATTN_ENTRY_##id],                                                                         \
     .rows = m,                                                                                                            \
     .cols = n},
#define DECODE90(id, type, dims, v, n, ...)                                                                                \
    {.name = #id,                                                                                                          \
     .needs = "sm_90a",                                                                                                    \
     .op = ATTN_FORWARD,                                                                                                   \
     .impl = &attn__cuda_entries[ATTN_ENTRY_##id],                                                                         \
     .rows = ATTN_DECODE90_ROWS,                                                                                           \
     .cols = n},
#define PIECE(...)
#include "variants.def"
#undef FWD
#undef FWD90
#undef BWD
#undef BWD90
#undef PIECE
};
enum { KERNELS = sizeof kernels / sizeof kernels[0] };

static bool is_available(const attn_cuda_entry *e) {
    const attn_driver_state *state;
    bool runs = false;
    if (!attn__cuda_image(e->file) || attn__driver_open(&state) != ATTN_OK) return false;
    for (int32_t n = 0; n < state->gpus; n++) runs = runs || attn__cuda_runs_on(e, &state->gpu[n]);
    return runs;
}

static const attn_kernel *kernel(int32_t index, bool *available) {
    if (index < 0 || index >= KERNELS) return NULL;
    if (available) *available = is_available(kernels[index].impl);
    return &kernels[index];
}

/* ---- context ---- */

static void close_cuda(attn_context *context) {
    attn__cuda_unload(context->cuda);
    pthread_mutex_destroy(&context->cuda->mutex);
    attn__free(context, context->cuda);
    context->cuda = NULL;
}

enum { GRAPHS_KEEP_EARLY = 12030 }; /* the driver from which on a captured launch may begin early */

static attn_status open_cuda(attn_context *context) {
    const attn_driver_state *state;
    RETURN_IF(!attn__cuda_image(NULL), ATTN_UNSUPPORTED,
              "backend=cuda: this library was built without GPU kernels (no nvcc was found); use cpu");
    RETURN_IF_ERROR(attn__driver_open(&state));
    bool any = false;
    for (int32_t n = 0; n < state->gpus; n++) any = any || state->gpu[n].arch >= ATTN_LEAST_ARCH;
    RETURN_IF(!any, ATTN_UNSUPPORTED, "backend=cuda: %s is sm_%d, and sm_%d is the least that is served; use cpu",
              state->gpu[0].name, state->gpu[0].arch, ATTN_LEAST_ARCH);
    attn_cuda *cuda = attn__alloc(context, sizeof *cuda);
    if (!cuda) return ATTN_NO_MEMORY;
    memset(cuda, 0, sizeof *cuda);
    pthread_mutex_init(&cuda->mutex, NULL);
    cuda->state = state;
    const char *serial = getenv("ATTN_CUDA_SERIAL");
    cuda->early = state->version >= GRAPHS_KEEP_EARLY && !(serial && *serial && strcmp(serial, "0") != 0);
    context->cuda = cuda;
    attn_status status = attn__cuda_tuning_read(cuda);
    if (status != ATTN_OK) close_cuda(context);
    return status;
}

/* ---- plan: which kernel ---- */

/* In which dtype tiles are multiplied: one that holds q and the keys exactly. There are none in double: F64. */
static attn_dtype tile_dtype(const attn_problem *p) {
    bool kv_narrow = attn_dtype_size(p->kv_dtype) == 1;
    if (attn__wide_problem(p)) return ATTN_F64;
    if (p->dtype == ATTN_BF16 && (p->kv_dtype == ATTN_BF16 || kv_narrow)) return ATTN_BF16;
    bool half = p->dtype == ATTN_F16 || attn_dtype_size(p->dtype) == 1;
    return half && (p->kv_dtype == ATTN_F16 || kv_narrow) ? ATTN_F16 : ATTN_F32;
}

/*
 * A scale that is not positive, as the float that kernels multiply with, is a feature. Plain kernels want rows that are whole pieces of
 * 16 bytes, side by side; Hopper's besides that all sequences are alike: no lengths of their own, no split.
 */
attn_cuda_takes attn__cuda_wants(const attn_problem *p, bool hopper, bool aligned) {
    const int32_t piece = 16 / (int32_t)attn_dtype_size(p->dtype);
    const bool odd = !aligned || p->dim_qk % piece || p->dim_v % piece || p->page_size || p->kv_dtype != p->dtype ||
                     p->out_dtype != p->dtype;
    const bool own = (p->flags & ATTN_OWN_LENGTHS) || p->max_q <= ATTN_CUDA_SPLIT_ROWS;
    if ((p->flags & (ATTN_ALIBI | ATTN_BIAS | ATTN_DESCALE)) || p->softcap > 0 || p->dropout > 0 || p->flashmask_vectors ||
        !(attn__scale_log2(p) > 0))
        return ATTN_TAKES_ALL;
    if (hopper) return odd || own ? ATTN_TAKES_OWN : ATTN_TAKES_PLAIN;
    return odd ? ATTN_TAKES_ALL : ATTN_TAKES_PLAIN;
}

/*
 * Sequences of few rows go to a kernel of their own, whatever else is in the batch: whether there is one for them depends on the
 * device, dtype, dims and features.
 */
static bool decodes(const attn_cuda_entry *e, const attn_problem *p) {
    const bool narrow = e->dtype == ATTN_I8; /* keys of any 8 bits */
    const bool half = p->dtype == ATTN_F16 || p->dtype == ATTN_BF16;
    const bool same = p->dtype == e->dtype && p->kv_dtype == e->dtype && !(p->flags & ATTN_DESCALE);
    if (!e->decode || p->op != ATTN_FORWARD || e->pages != !!(p->flags & ATTN_DESCALE_PAGES)) return false;
    if (narrow ? !half || attn_dtype_size(p->kv_dtype) != 1 : !same) return false;
    if ((p->flags & ATTN_BIAS) || p->dropout > 0 || p->flashmask_vectors) return false;
    if (e->latent) return e->dim_qk == p->dim_qk && e->dim_v == p->dim_v && !(p->flags & ATTN_ALIBI);
    const int64_t rows = (int64_t)attn__min32(p->max_q, ATTN_CUDA_SPLIT_ROWS) * (p->heads_q / p->heads_kv);
    return e->dim >= p->dim_qk && e->dim >= p->dim_v && (e->pages || e->bm == 16 || rows <= e->bm);
}

bool attn__cuda_serves(const attn_cuda_entry *e, const attn_problem *p, bool aligned) {
    if (e->op == ATTN_BACKWARD) {
        const bool each =
            (p->flags & (ATTN_ALIBI | ATTN_BIAS)) || p->softcap > 0 || p->dropout > 0; /* work for each element */
        if (e->hopper && (!aligned || each)) return false;
        return e->dim_qk >= p->dim_qk && e->most_v >= p->dim_v && p->kv_dtype == p->dtype && p->out_dtype == p->dtype;
    }
    if (e->decode) return decodes(e, p) && p->max_q <= ATTN_CUDA_SPLIT_ROWS;
    if (p->flags & ATTN_DESCALE_PAGES) return false; /* one factor for all of a sequence's keys */
    return e->dim_qk >= p->dim_qk && e->most_v >= p->dim_v && e->takes >= attn__cuda_wants(p, e->hopper, aligned);
}

/* A backward of Hopper's before all others, even of a larger dim; otherwise the smaller dim. */
static bool is_better(const attn_cuda_entry *e, const attn_cuda_entry *than) {
    if (e->op == ATTN_BACKWARD && e->hopper != than->hopper) return e->hopper;
    return e->dim <= than->dim;
}

/* Of the rows that take the problem that of the least dim, and of several the last; fwd_any and bwd_any, the largest, take them all. */
static const attn_kernel *choose(const attn_problem *p, const attn_gpu *gpu, bool aligned) {
    const attn_kernel *chosen = &kernels[0];
    for (int32_t n = 0; n < KERNELS; n++) {
        const attn_cuda_entry *e = kernels[n].impl;
        if (e->decode) continue;
        bool any = e == &attn__cuda_entries[ATTN_ENTRY_fwd_any] || e == &attn__cuda_entries[ATTN_ENTRY_bwd_any];
        bool both = e->op != ATTN_BACKWARD || e->one || attn__cuda_runs_on(e + 1, gpu); /* d_q comes with d_k and d_v */
        bool fits = any || (e->dtype == tile_dtype(p) && attn__cuda_serves(e, p, aligned));
        if (kernels[n].op != p->op || !fits || !both || !attn__cuda_runs_on(e, gpu)) continue;
        if (chosen->op != p->op || is_better(e, chosen->impl)) chosen = &kernels[n];
    }
    return chosen;
}

/* The kernel for sequences of few rows, or NULL. */
static const attn_kernel *choose_decode(const attn_problem *p, const attn_gpu *gpu) {
    const attn_kernel *chosen = NULL;
    for (int32_t n = 0; n < KERNELS; n++) {
        const attn_cuda_entry *e = kernels[n].impl;
        if (!decodes(e, p) || !attn__cuda_runs_on(e, gpu)) continue;
        if (!chosen || is_better(e, chosen->impl)) chosen = &kernels[n];
    }
    return chosen;
}

/* May there be sequences of so few rows? */
static bool may_be_short(const attn_problem *p) {
    return p->max_q <= ATTN_CUDA_SPLIT_ROWS || (p->flags & (ATTN_VARLEN_Q | ATTN_USED_Q));
}

static int entry_of(const attn_kernel *k) { return (int)((const attn_cuda_entry *)k->impl - attn__cuda_entries); }

/* The same with the last word to the tuning file; *tuned is set when it had one. */
static const attn_kernel *choose_tuned(const attn_plan *plan, const attn_gpu *gpu, bool aligned, bool *tuned) {
    const attn_kernel *chosen = choose(&plan->problem, gpu, aligned);
    const attn_cuda_entry *e = chosen->impl;
    if (plan->problem.op != ATTN_FORWARD) return chosen;
    int entry = attn__cuda_tuned(plan->context->cuda, gpu, e, attn__cuda_wants(&plan->problem, e->hopper, aligned));
    for (int32_t n = 0; n < KERNELS && entry >= 0; n++) {
        if (entry_of(&kernels[n]) == entry) chosen = &kernels[n];
    }
    *tuned = *tuned || entry >= 0;
    return chosen;
}

/* For every GPU. The plan's own kernel is that of the current device, or of the first one that can run any. */
static attn_status choose_kernels(attn_plan *plan, uint32_t *gpus, bool *tuned) {
    const attn_driver_state *state = plan->context->cuda->state;
    attn_cu_context current = NULL;
    int device = -1;
    RETURN_IF_DRIVER(state->driver, cuCtxGetCurrent, (&current));
    if (current) RETURN_IF_DRIVER(state->driver, cuCtxGetDevice, (&device));
    *gpus = 0;
    for (int32_t n = 0; n < state->gpus; n++) {
        const attn_gpu *gpu = &state->gpu[n];
        plan->gpu_kernel[n][0] = plan->gpu_kernel[n][1] = plan->gpu_decode[n] = -1;
        if (gpu->arch < ATTN_LEAST_ARCH) continue;
        *gpus |= UINT32_C(1) << n;
        const attn_kernel *few = may_be_short(&plan->problem) ? choose_decode(&plan->problem, gpu) : NULL;
        const bool all_few = few && plan->problem.max_q <= ATTN_CUDA_SPLIT_ROWS;
        const attn_kernel *k = all_few ? few : choose_tuned(plan, gpu, true, tuned);
        plan->gpu_kernel[n][0] = (int16_t)entry_of(k);
        const bool takes_all = all_few && !((const attn_cuda_entry *)few->impl)->latent; /* tensors of any kind */
        plan->gpu_kernel[n][1] = (int16_t)entry_of(takes_all ? few : choose_tuned(plan, gpu, false, tuned));
        if (few) plan->gpu_decode[n] = (int16_t)entry_of(few);
        if (!plan->kernel || gpu->device == device) plan->kernel = k;
    }
    return ATTN_OK;
}

/* The GPU whose kernel the plan is described by. */
static int32_t gpu_of(const attn_plan *plan) {
    int32_t n = 0;
    while (plan->gpu_kernel[n][0] != entry_of(plan->kernel)) n++;
    return n;
}

static void describe_kernels(attn_plan *plan, bool tuned) {
    const attn_driver_state *state = plan->context->cuda->state;
    const attn_cuda_entry *own = plan->kernel->impl;
    bool told = false;
    attn__plan_say(plan, "kernel: %s\n", plan->kernel->name);
    if (plan->problem.op == ATTN_KV_APPEND) return;
    attn__plan_say(plan, "tiles: %d rows x %d keys\n", plan->kernel->rows, plan->kernel->cols);
    if (plan->problem.op == ATTN_BACKWARD)
        attn__plan_say(plan, "passes: %s\n",
                       !own->one                                                ? "2"
                       : own->hopper && !attn__cuda_takes_turns(&plan->problem) ? "1, d_q in any order"
                                                                                : "1, d_q in turns");
    for (int32_t n = 0; n < state->gpus; n++) {
        const int16_t *choice = plan->gpu_kernel[n];
        if (choice[0] < 0) continue;
        if (choice[0] != entry_of(plan->kernel))
            attn__plan_say(plan, "device %d, sm_%d: %s\n", state->gpu[n].device, state->gpu[n].arch,
                           attn__cuda_entries[choice[0]].name);
        if (choice[0] == entry_of(plan->kernel) && choice[1] != choice[0] && !told) {
            attn__plan_say(plan, "rows that are not 16-byte aligned%s: %s\n",
                           own->latent   ? ", v that is not the beginning of k"
                           : own->hopper ? ", strides that TMA does not take"
                                         : "",
                           attn__cuda_entries[choice[1]].name);
            told = true;
        }
    }
    if (tuned) attn__plan_say(plan, "tuned: %s\n", plan->context->cuda->tuning.path);
}

/* ---- plan: splits and workspace ---- */

/* Does a kernel of its own have the sequences of few rows on every device? */
static bool decodes_everywhere(const attn_plan *plan) {
    for (int32_t n = 0; n < plan->context->cuda->state->gpus; n++)
        if (plan->gpu_kernel[n][0] >= 0 && plan->gpu_decode[n] < 0) return false;
    return true;
}

/* Is it on one of them that of latent attention, which leaves parts, and may find tensors that it does not take? */
static bool decodes_latent(const attn_plan *plan) {
    for (int32_t n = 0; n < plan->context->cuda->state->gpus; n++)
        if (plan->gpu_decode[n] >= 0 && attn__cuda_entries[plan->gpu_decode[n]].latent) return true;
    return false;
}

/* Whether a sequence is split depends on its own rows only, so that results do not depend on the batch. */
static void choose_split(attn_plan *plan) {
    const attn_problem *p = &plan->problem;
    int64_t chunks = attn__ceil_div(p->max_kv, ATTN_CUDA_CHUNK);
    if (!may_be_short(p)) return;
    const bool everywhere = decodes_everywhere(plan), latent = decodes_latent(plan);
    if (everywhere) {
        if (p->max_q > ATTN_CUDA_SPLIT_ROWS)
            attn__plan_say(plan, "sequences of at most %d rows: %s\n", ATTN_CUDA_SPLIT_ROWS,
                           attn__cuda_entries[plan->gpu_decode[gpu_of(plan)]].name);
        attn__plan_say(plan, "split: %s in spans of %d keys", p->max_q > ATTN_CUDA_SPLIT_ROWS ? "these" : "all sequences",
                       latent ? ATTN_DECODE90_SPAN : ATTN_DECODE_SPAN);
        const int32_t pairs = ATTN_DECODE_PAIRS * ATTN_DECODE_SPAN;
        if (!latent && p->max_kv > pairs) attn__plan_say(plan, ", from key %d on two at a time", pairs);
        attn__plan_say(plan, "\n");
        if (!latent) return;
    }
    plan->chunks = chunks > 1 ? (int32_t)chunks : 0; /* latent: more than its spans */
    if (plan->chunks && !everywhere)
        attn__plan_say(plan, "split: sequences of at most %d rows in chunks of %d keys\n", ATTN_CUDA_SPLIT_ROWS,
                       ATTN_CUDA_CHUNK);
}

/* Elements between the rows of the rotated q. */
static int64_t rotated_row(const attn_problem *p) {
    int64_t piece = 16 / (int64_t)attn_dtype_size(p->dtype);
    return attn__ceil_div(p->dim_qk, piece) * piece;
}

/* Rows of q, o and lse, over all sequences and heads. */
static int64_t rows_of(const attn_problem *p) {
    return p->flags & ATTN_VARLEN_Q ? p->heads_q * p->total_q : (int64_t)p->batch * p->heads_q * p->max_q;
}

/* The least keys of a tile on any device: FlashMask's ranges are made for the one that runs. */
static int32_t least_cols(const attn_plan *plan) {
    int32_t least = ATTN_ANY_COLS;
    for (int32_t n = 0; n < plan->context->cuda->state->gpus; n++) {
        for (int k = 0; k < 2; k++) {
            int entry = plan->gpu_kernel[n][k];
            if (entry >= 0 && attn__cuda_entries[entry].bn < least) least = attn__cuda_entries[entry].bn;
        }
    }
    return least;
}

/* Is one of Hopper's kernels chosen for any device? */
static bool has_hopper(const attn_plan *plan) {
    for (int32_t n = 0; n < plan->context->cuda->state->gpus; n++) {
        for (int k = 0; k < 2; k++) {
            int entry = plan->gpu_kernel[n][k];
            if (entry >= 0 && attn__cuda_entries[entry].hopper) return true;
        }
    }
    return false;
}

/* Rows of part_o and part_lse: every sequence may be one that is split, and packed ones have total_q rows in all. */
static int64_t split_rows(const attn_problem *p) {
    int64_t rows = (int64_t)p->batch * attn__min32(p->max_q, ATTN_CUDA_SPLIT_ROWS);
    return p->flags & ATTN_VARLEN_Q && p->total_q < rows ? p->total_q : rows;
}

/*
 * Do Hopper's blocks share the work by a counter? Where places have more and less to do and nobody knows how much before the launch.
 * Under a causal mask one brought nothing, and it takes two microseconds to clear it.
 */
bool attn__cuda_counts(const attn_problem *p) {
    if (p->op != ATTN_FORWARD || p->batch == 0 || p->max_q <= ATTN_CUDA_SPLIT_ROWS) return false;
    return (p->flags & ATTN_OWN_LENGTHS) || p->flashmask_vectors;
}

bool attn__cuda_decode_sizes(const attn_cuda_entry *e, const attn_problem *p, int32_t sms, int32_t shared,
                             attn_cuda_decode *c, int64_t *blocks) {
    enum { SYSTEM = 1024 }; /* bytes of a block's shared memory; what a block can have is that short of what there is */
    const int64_t rows = (int64_t)attn__min32(p->max_q, ATTN_CUDA_SPLIT_ROWS) * (p->heads_q / p->heads_kv);
    const int64_t spans = attn__ceil_div(p->max_kv, ATTN_DECODE_SPAN), most = spans > 1 ? spans : 1;
    const int64_t room = ((int64_t)shared + SYSTEM) / ((int64_t)e->shared_bytes + SYSTEM);
    int64_t items, supers, spans_of_all;
    c->rows = (int32_t)(rows < e->bm ? rows : e->bm);
    c->blocks = (int32_t)(rows > 0 ? attn__ceil_div(rows, e->bm) : 1);
    c->supers = (int32_t)attn__ceil_div(most, ATTN_DECODE_SUPER);
    c->each = (int32_t)(most < ATTN_DECODE_SUPER ? most : ATTN_DECODE_SUPER);
    items = (int64_t)p->batch * p->heads_kv * c->blocks; /* at most batch * heads_q: 31 bits */
    if (__builtin_mul_overflow(items, c->supers, &supers) || __builtin_mul_overflow(items, most, &spans_of_all))
        return false;
    *blocks = (int64_t)(sms > 0 ? sms : 1) * (room < 1 ? 1 : room < e->ctas ? room : e->ctas);
    if (*blocks > spans_of_all) *blocks = spans_of_all;
    c->by_item = supers <= *blocks;
    c->shared = most == 1 || *blocks < 2 ? 0 : (int32_t)(c->by_item ? supers : *blocks - 1);
    return true;
}

/* Floats and counters (counter.cuh) of the workspace that a decode wants: enough for each device. */
static bool decode_room(const attn_plan *plan, int64_t *floats, int64_t *counters) {
    const attn_cuda *cuda = plan->context->cuda;
    const attn_problem *p = &plan->problem;
    *floats = *counters = 0;
    for (int32_t n = 0; n < cuda->state->gpus; n++) {
        if (plan->gpu_kernel[n][0] < 0 || plan->gpu_decode[n] < 0) continue;
        const attn_cuda_entry *e = &attn__cuda_entries[plan->gpu_decode[n]];
        if (e->latent) continue; /* it has parts */
        attn_cuda_decode c = {0};
        int64_t blocks, slots, some;
        if (!attn__cuda_decode_sizes(e, p, cuda->state->gpu[n].sms, cuda->state->gpu[n].shared_bytes, &c, &blocks))
            return false;
        const int64_t items = c.supers > 1 ? (int64_t)p->batch * p->heads_kv * c.blocks : 0;
        slots = items * c.supers + (int64_t)c.shared * c.each; /* attn__cuda_decode_sizes keeps both small */
        if (__builtin_mul_overflow(slots, attn__cuda_slot(e, &c), &some)) return false;
        if (some > *floats) *floats = some;
        if (c.shared + items > *counters) *counters = c.shared + items;
    }
    return true;
}

static attn_status lay_out(attn_plan *plan) {
    const attn_problem *p = &plan->problem;
    /* kernels count heads as often as blocks share their V, 256 dims each, in 31 bits */
    RETURN_IF((int64_t)p->batch * p->heads_q * attn__ceil_div(p->dim_v, 256) > INT32_MAX, ATTN_UNSUPPORTED,
              "heads_q=%d: so many heads of %d sequences with dim_v=%d are more than a GPU's kernel counts; use cpu",
              p->heads_q, p->batch, p->dim_v);
    int64_t real = attn__wide_problem(p) ? 8 : 4, rotated = p->flags & ATTN_ROTARY ? rows_of(p) : 0, parts;
    int64_t floats = 0, counters = 0, part_bytes;
    bool fits = !__builtin_mul_overflow(split_rows(p) * p->heads_q, (int64_t)plan->chunks, &parts) &&
                !__builtin_mul_overflow(parts, p->dim_v * real, &part_bytes) && decode_room(plan, &floats, &counters) &&
                !__builtin_mul_overflow(floats, (int64_t)sizeof(float), &floats);
    const int64_t counted = counters * (int64_t)sizeof(uint64_t);
    int64_t ranges = (int64_t)p->batch * p->flashmask_heads * attn__ceil_div(p->max_kv, least_cols(plan));
    fits = fits && attn__plan_reserve(plan, CUDA_PART_O, part_bytes > floats ? part_bytes : floats, 1) &&
           attn__plan_reserve(plan, CUDA_PART_LSE, parts * real > counted ? parts * real : counted, 1) &&
           attn__plan_reserve(plan, CUDA_RANGES, ranges, sizeof(attn_flash_range)) &&
           attn__plan_reserve(plan, CUDA_COUNTER, has_hopper(plan) && attn__cuda_counts(p), sizeof(uint32_t)) &&
           attn__plan_reserve(plan, CUDA_Q, rotated, rotated_row(p) * (int64_t)attn_dtype_size(p->dtype));
    RETURN_IF(!fits, ATTN_INVALID, "max_q=%d, max_kv=%d: the workspace does not fit into memory", p->max_q, p->max_kv);
    return ATTN_OK;
}

/* Packed sequences each begin with a tile of their own. */
int64_t attn__cuda_q_tiles(const attn_problem *p, int32_t rows) {
    return p->heads_q *
           (p->flags & ATTN_VARLEN_Q ? p->total_q / rows + p->batch : p->batch * attn__ceil_div(p->max_q, rows));
}

int64_t attn__cuda_d_q_rows(const attn_problem *p) { return attn__d_q_first(p, p->batch, p->total_q) * p->heads_q; }

/* Does the kernel leave d_q in the workspace, in float? Not where one block has all keys and writes d_q itself. */
static bool keeps_d_q(const attn_cuda_entry *e, const attn_problem *p) {
    return e->one && (p->max_kv > e->bn || (e->hopper && !attn__cuda_finishes(p)));
}

/* A number for each row, FlashMask's ranges, and in one pass the turns of d_q's tiles and d_q in float: enough for each device. */
static attn_status lay_out_backward(attn_plan *plan) {
    const attn_problem *p = &plan->problem;
    int64_t turns = 0, kept = 0;
    for (int32_t n = 0; n < 2 * plan->context->cuda->state->gpus; n++) {
        const int entry = plan->gpu_kernel[n / 2][n % 2];
        if (entry < 0 || !attn__cuda_entries[entry].one) continue;
        const attn_cuda_entry *e = &attn__cuda_entries[entry];
        const int64_t tiles = attn__cuda_q_tiles(p, e->bm);
        const int64_t fits = e->hopper && e->dtype == ATTN_F16 ? (int64_t)p->batch * p->heads_kv * ATTN_FITS : 0;
        if (tiles * e->blocks + 1 + fits > turns) turns = tiles * e->blocks + 1 + fits;
        if (keeps_d_q(e, p)) kept = attn__cuda_d_q_rows(p);
    }
    int64_t ranges = (int64_t)p->batch * p->flashmask_heads * attn__ceil_div(p->max_kv, ATTN_ANY_COLS);
    bool fits = attn__plan_reserve(plan, CUDA_ROWS, rows_of(p), attn__wide_problem(p) ? 8 : 4) &&
                attn__plan_reserve(plan, CUDA_RANGES, ranges, sizeof(attn_flash_range)) &&
                attn__plan_reserve(plan, CUDA_D_Q, kept, attn__d_q_columns(p) * (int64_t)sizeof(float)) &&
                attn__plan_reserve(plan, CUDA_TURNS, turns, sizeof(uint32_t));
    RETURN_IF(!fits, ATTN_INVALID, "max_q=%d, max_kv=%d: the workspace does not fit into memory", p->max_q, p->max_kv);
    return ATTN_OK;
}

attn_tensor attn__cuda_rotated_q(const attn_plan *plan, const attn_buffers *f) {
    const attn_problem *p = &plan->problem;
    return attn_dense(attn__part(plan, f, CUDA_Q), p->max_q, p->heads_q, rotated_row(p));
}

/* ---- plan: what is loaded for it ---- */

static attn_status load_plan(attn_plan *plan, uint32_t gpus) {
    const attn_problem *p = &plan->problem;
    attn_cuda *cuda = plan->context->cuda;
    int pieces[ATTN_ENTRIES], count = 0;
    if (p->flags & ATTN_APPEND) pieces[count++] = ATTN_ENTRY_append;
    if (p->op == ATTN_FORWARD) {
        pieces[count++] = ATTN_ENTRY_probs; /* whether they are wanted is known at the run */
        if (p->flags & ATTN_ROTARY) pieces[count++] = ATTN_ENTRY_rotate_q;
        if (p->flashmask_vectors) pieces[count++] = ATTN_ENTRY_ranges;
        if (plan->chunks) pieces[count++] = ATTN_ENTRY_fold;
        if (plan->chunks && decodes_latent(plan)) pieces[count++] = ATTN_ENTRY_fold_latent;
        if (p->flags & ATTN_VARLEN_Q) pieces[count++] = ATTN_ENTRY_fill;
    }
    RETURN_IF_ERROR(attn__cuda_load(cuda, pieces, count, gpus));
    for (int32_t n = 0; n < cuda->state->gpus && p->op == ATTN_FORWARD; n++) {
        const int forward[] = {plan->gpu_kernel[n][0], plan->gpu_kernel[n][1], plan->gpu_decode[n]};
        if (forward[0] >= 0) RETURN_IF_ERROR(attn__cuda_load(cuda, forward, forward[2] >= 0 ? 3 : 2, UINT32_C(1) << n));
    }
    return ATTN_OK;
}

/* Which gradients are wanted is known at the run. */
static attn_status load_backward(attn_plan *plan, uint32_t gpus) {
    const attn_problem *p = &plan->problem;
    attn_cuda *cuda = plan->context->cuda;
    int pieces[ATTN_ENTRIES], count = 0;
    pieces[count++] = ATTN_ENTRY_bwd_delta;
    if (p->flashmask_vectors) pieces[count++] = ATTN_ENTRY_ranges;
    if (p->flags & ATTN_BIAS) pieces[count++] = ATTN_ENTRY_bwd_bias;
    if (p->flags & ATTN_SINK) pieces[count++] = ATTN_ENTRY_bwd_sink;
    if (p->flags & ATTN_OWN_LENGTHS) pieces[count++] = ATTN_ENTRY_bwd_fill;
    if (has_hopper(plan) && !attn__cuda_finishes(p)) pieces[count++] = ATTN_ENTRY_bwd_cast;
    if (has_hopper(plan) && p->dtype == ATTN_F16) pieces[count++] = ATTN_ENTRY_bwd_fit;
    RETURN_IF_ERROR(attn__cuda_load(cuda, pieces, count, gpus));
    for (int32_t n = 0; n < 2 * cuda->state->gpus; n++) {
        const int entry = plan->gpu_kernel[n / 2][n % 2], kernel[] = {entry, entry + 1};
        if (entry >= 0)
            RETURN_IF_ERROR(attn__cuda_load(cuda, kernel, attn__cuda_entries[entry].one ? 1 : 2, UINT32_C(1) << n / 2));
    }
    return ATTN_OK;
}

static attn_status plan_cuda(attn_plan *plan) {
    uint32_t gpus = 0;
    bool tuned = false;
    RETURN_IF_ERROR(choose_kernels(plan, &gpus, &tuned));
    describe_kernels(plan, tuned);
    if (plan->problem.op == ATTN_BACKWARD) {
        RETURN_IF_ERROR(lay_out_backward(plan));
        return load_backward(plan, gpus);
    }
    if (plan->problem.op == ATTN_FORWARD) {
        choose_split(plan);
        RETURN_IF_ERROR(lay_out(plan));
    }
    return load_plan(plan, gpus);
}

/* ---- run ---- */

attn_status attn__cuda_launch(const attn_cuda_run *run, int entry, int64_t blocks, int64_t groups, int32_t threads,
                              size_t shared_bytes, const void *args) {
    const int64_t most = INT32_MAX, most_y = 65535;
    if (blocks <= 0) return ATTN_OK;
    int64_t x = blocks, y = groups < most_y ? groups : most_y, z = groups ? attn__ceil_div(groups, y) : 1;
    if (groups == 0) {
        y = attn__ceil_div(blocks, most);
        x = attn__ceil_div(blocks, y);
    }
    void *parameters[] = {(void *)(uintptr_t)args}; /* the driver knows its size, and what it is aligned to */
    RETURN_IF(x > most || y > most_y || z > most_y, ATTN_INVALID, "batch: %lld blocks of %s are more than a grid can have",
              (long long)blocks, run->entries[entry].name);
    attn_cu_attribute early = {.id = ATTN_CU_LAUNCH_EARLY, .value = 1};
    const attn_cu_launch launch = {.grid = {(unsigned)x, (unsigned)y, (unsigned)z},
                                   .block = {(unsigned)threads, 1, 1},
                                   .shared_bytes = (unsigned)shared_bytes,
                                   .stream = run->stream,
                                   .attributes = &early,
                                   .count = run->waits && run->waits[entry][run->gpu]};
    int error = run->driver->cuLaunchKernelEx(&launch, (attn_cu_function)(void *)run->kernels[entry], parameters, NULL);
    if (!error) return ATTN_OK;
    char call[80];
    snprintf(call, sizeof call, "cuLaunchKernelEx of %s", run->entries[entry].name);
    return attn__driver_fail(run->driver, error, call);
}

static attn_cuda_run start(const attn_cuda *cuda, const attn_cuda_place *place, void *stream) {
    return (attn_cuda_run){.driver = cuda->state->driver,
                           .entries = attn__cuda_entries,
                           .kernels = cuda->kernel,
                           .stream = stream,
                           .gpu = place->gpu,
                           .waits = cuda->waits,
                           .status = cuda->status,
                           .forward = -1,
                           .decode = -1,
                           .sms = cuda->state->gpu[place->gpu].sms,
                           .shared = cuda->state->gpu[place->gpu].shared_bytes};
}

static attn_status fail_gpu(const attn_gpu *gpu) {
    return attn__fail(ATTN_UNSUPPORTED, "device %d: %s is sm_%d, and sm_%d is the least that is served; use cpu",
                      gpu->device, gpu->name, gpu->arch, ATTN_LEAST_ARCH);
}

/* Which of the plan's two kernels these tensors get, and their maps with it. */
static void choose_here(attn_cuda_run *run, const int16_t choice[2], const attn_plan *plan, const attn_buffers *f) {
    run->vector_ok = attn__cuda_aligned(plan, f);
    if (run->decode >= 0 && run->entries[run->decode].latent && !(run->vector_ok && attn__cuda_latent(plan, f)))
        run->decode = -1;
    const bool is_decode = run->entries[choice[0]].decode;
    run->forward = choice[run->vector_ok && !(is_decode && run->decode < 0) ? 0 : 1];
    attn__cuda_map(run, plan, f);
    const attn_cuda_entry *e = &run->entries[run->forward];
    const bool wants_maps = e->hopper && (e->takes == ATTN_TAKES_PLAIN || e->op == ATTN_BACKWARD);
    if (!wants_maps || run->tma == ATTN_TMA_ALL) return;
    run->forward = choice[1]; /* it does without maps; the tile of q, and so the map, may be another one */
    attn__cuda_map(run, plan, f);
}

static attn_status run_here(const attn_plan *plan, const attn_buffers *f, void *stream, const attn_cuda_place *place) {
    const attn_cuda *cuda = plan->context->cuda;
    const int16_t *choice = plan->gpu_kernel[place->gpu];
    if (choice[0] < 0) return fail_gpu(&cuda->state->gpu[place->gpu]);
    attn_cuda_run run = start(cuda, place, stream);
    run.decode = plan->gpu_decode[place->gpu];
    if (plan->problem.op != ATTN_KV_APPEND) choose_here(&run, choice, plan, f); /* decode.cu's take any tensors */
    return plan->problem.op == ATTN_BACKWARD ? attn__cuda_backward(&run, plan, f) : attn__cuda_forward(&run, plan, f);
}

static attn_status run_cuda(const attn_plan *plan, const attn_buffers *f, void *stream) {
    attn_cuda *cuda = plan->context->cuda;
    attn_cuda_home home;
    attn_cuda_place place;
    RETURN_IF_ERROR(attn__cuda_find_buffers(cuda->state->driver, plan, f, &home));
    if (!home.any) return ATTN_OK; /* no memory, nothing to do */
    RETURN_IF_ERROR(attn__cuda_enter(cuda, &home, stream, &place));
    attn_status status = run_here(plan, f, stream, &place);
    attn__cuda_leave(&place);
    return status;
}

/* ---- workspace of one-shot calls: stream-ordered, so that it is free again when the kernels have run ---- */

static attn_status take(const attn_plan *plan, const attn_buffers *buffers, void *stream, void **workspace) {
    attn_cuda *cuda = plan->context->cuda;
    attn_cuda_home home;
    attn_cuda_place place;
    attn_buffers f = *buffers;
    attn_cu_pointer memory = 0;
    f.workspace = NULL;
    *workspace = NULL;
    RETURN_IF_ERROR(attn__cuda_find_buffers(cuda->state->driver, plan, &f, &home));
    RETURN_IF_ERROR(attn__cuda_enter(cuda, &home, stream, &place));
    int error = cuda->state->driver->cuMemAllocAsync(&memory, plan->workspace, stream);
    attn__cuda_leave(&place);
    if (error) return attn__driver_fail(cuda->state->driver, error, "cuMemAllocAsync");
    *workspace = (void *)(uintptr_t)memory;
    return ATTN_OK;
}

static attn_status put(const attn_plan *plan, const attn_buffers *f, void *stream, void *workspace) {
    attn_cuda *cuda = plan->context->cuda;
    attn_cuda_home home;
    attn_cuda_place place = {0};
    attn_status status = attn__cuda_find_buffers(cuda->state->driver, plan, f, &home);
    if (status == ATTN_OK) status = attn__cuda_enter(cuda, &home, stream, &place);
    int error = cuda->state->driver->cuMemFreeAsync((attn_cu_pointer)(uintptr_t)workspace, stream); /* tried in any case */
    attn__cuda_leave(&place);
    return error && status == ATTN_OK ? attn__driver_fail(cuda->state->driver, error, "cuMemFreeAsync") : status;
}

/* ---- pieces ---- */

/* Where a piece is to run, with its kernel loaded: merge and rotary have no plan that could have done it. */
static attn_status enter_piece(attn_cuda *cuda, int entry, const attn_cuda_home *home, void *stream,
                               attn_cuda_place *place) {
    RETURN_IF_ERROR(attn__cuda_enter(cuda, home, stream, place));
    const attn_gpu *gpu = &cuda->state->gpu[place->gpu];
    attn_status status =
        gpu->arch < ATTN_LEAST_ARCH ? fail_gpu(gpu) : attn__cuda_load(cuda, &entry, 1, UINT32_C(1) << place->gpu);
    if (status != ATTN_OK) attn__cuda_leave(place);
    return status;
}

static attn_status merge(attn_context *context, const attn_merge_args *args, void *stream) {
    attn_cuda *cuda = context->cuda;
    attn_cuda_home home;
    attn_cuda_place place;
    if (args->batch == 0 || args->rows == 0) return ATTN_OK;
    RETURN_IF_ERROR(attn__cuda_find_merge(cuda->state->driver, args, &home));
    RETURN_IF_ERROR(enter_piece(cuda, ATTN_ENTRY_merge, &home, stream, &place));
    attn_cuda_run run = start(cuda, &place, stream);
    attn_status status = attn__cuda_merge(&run, args);
    attn__cuda_leave(&place);
    return status;
}

static attn_status rotary(attn_context *context, const attn_rotary_args *args, void *stream) {
    attn_cuda *cuda = context->cuda;
    attn_cuda_home home;
    attn_cuda_place place;
    if (args->batch == 0 || (args->cu ? args->total : args->rows) == 0) return ATTN_OK;
    RETURN_IF_ERROR(attn__cuda_find_rotary(cuda->state->driver, args, &home));
    RETURN_IF_ERROR(enter_piece(cuda, ATTN_ENTRY_rotary, &home, stream, &place));
    attn_cuda_run run = start(cuda, &place, stream);
    attn_status status = attn__cuda_rotary(&run, args);
    attn__cuda_leave(&place);
    return status;
}

const attn_backend attn__backend_cuda = {
    .name = "cuda",
    .id = ATTN_BACKEND_CUDA,
    .open = open_cuda,
    .close = close_cuda,
    .kernel = kernel,
    .plan = plan_cuda,
    .run = run_cuda,
    .take = take,
    .put = put,
    .merge = merge,
    .rotary = rotary,
};
