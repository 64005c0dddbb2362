/*
 * A run as a row of launches on the caller's stream; args.h has the list. Nothing here looks at what buffers hold, allocates
 * (but for attn_merge of very many parts) or waits, so that a run can be captured in a graph.
 */
#include "cuda.h"
#include "numeric.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Launches a piece with so many warps, each of which works by itself. */
static attn_status launch_warps(const attn_cuda_run *run, int entry, int64_t warps, const void *args) {
    return attn__cuda_launch(run, entry, attn__ceil_div(warps, ATTN_CUDA_WARPS), 0, 32 * ATTN_CUDA_WARPS, 0, args);
}

/*
 * Under a causal mask long rows go first, over a group of heads: as many as leave a few blocks of each at work at a time, which then
 * share its keys in the L2 cache, and enough for the last group's short rows to fill the GPU to the end. Without a mask all
 * rows are alike, and one head after the other is best. Groups are of about one size.
 */
static int32_t heads_side_by_side(const attn_problem *p) {
    enum { HEADS = 32 };
    int64_t heads = (int64_t)p->batch * p->heads_q, groups = (heads + HEADS / 2) / HEADS;
    if (!(p->flags & ATTN_CAUSAL) || heads == 0) return 1;
    return (int32_t)attn__ceil_div(heads, groups ? groups : 1);
}

/* Blocks of Hopper's kernels: one to a multiprocessor. Work is done even if the driver knows of none. */
static int64_t blocks_of_hopper(const attn_cuda_run *run) { return run->sms > 0 ? run->sms : 1; }

/*
 * Hopper's blocks take places in turn, forwards and backwards. Under a causal mask, where a group of heads begins with its longest
 * places, each block gets the same sum, if the group has a multiple of twice as many places as there are blocks. Few heads are one
 * group; of the sizes that make such a multiple, rounded, that is taken which leaves least over: the slots of its last group, the shortest
 * ones, that do not go round, and what rounding adds for each group before it, which counts more, as in a simulation of many sizes. Keys of
 * more heads than MOST would not stay in the cache.
 */
static int32_t heads_of_hopper(const attn_problem *p, int64_t heads, int64_t row_tiles, int64_t blocks) {
    enum { MOST = 48 };
    const int64_t even = 2 * blocks;
    if (!(p->flags & ATTN_CAUSAL) || heads == 0 || row_tiles == 0) return 1;
    if (heads <= MOST) return (int32_t)heads;
    int64_t best = (even + row_tiles / 2) / row_tiles;
    if (best > MOST) return (int32_t)(best < heads ? best : heads);
    double least = INFINITY;
    for (int64_t group = 1; group <= MOST; group++) {
        const int64_t rounds = (group * row_tiles + even / 2) / even, last = heads % group ? heads % group : group;
        if (rounds == 0 || (even * rounds + row_tiles / 2) / row_tiles != group) continue;
        const double off = (double)llabs(group * row_tiles - even * rounds) / (double)group;
        const double over = (double)(last * row_tiles % even) / (double)last + 4 * off * (double)((heads - 1) / group);
        if (over > least) continue;
        least = over;
        best = group;
    }
    return (int32_t)best;
}

/* Where the parts of sequences that are split are. */
static void set_parts(const attn_plan *plan, attn_cuda_args *a) {
    a->part_o = attn__part(plan, &a->f, CUDA_PART_O);
    a->part_lse = attn__part(plan, &a->f, CUDA_PART_LSE);
    a->part_rows = attn__min32(a->p.max_q, ATTN_CUDA_SPLIT_ROWS);
}

/*
 * Does decode.cu bring the new keys into the cache and rotate q? Only keys that some row sees pass by it: no new one is behind the window of the
 * last row, and every sequence has rows. Where rows of V are in rows of K one is written over the other, in an order. A block does so for each
 * item that it has a part of, before it begins: where these are many, kernels of their own are faster.
 */
static bool fuses(const attn_cuda_run *run, const attn_problem *p, const attn_buffers *f) {
    const uint32_t before = ATTN_APPEND | ATTN_ROTARY, without = ATTN_VARLEN_Q | ATTN_USED_Q;
    const attn_cuda_entry *e = &run->entries[run->forward];
    const bool hides = (p->flags & ATTN_WINDOW) && p->window_left >= 0 && p->window_left < p->max_new - 1;
    const int64_t rows = (int64_t)p->max_q * (p->heads_q / p->heads_kv);
    if (!e->decode || e->latent) return false;
    const int64_t items = (int64_t)p->batch * p->heads_kv * attn__ceil_div(rows, e->bm);
    return (p->flags & before) && !(p->flags & without) && !hides && p->rotary_dtype != ATTN_F64 && p->max_q > 0 &&
           p->max_new <= ATTN_CUDA_SPLIT_ROWS && f->k.data != f->v.data && !f->probs.data && items <= (int64_t)2 * run->sms;
}

static attn_cuda_args make_args(const attn_cuda_run *run, const attn_plan *plan, const attn_buffers *f) {
    const attn_problem *p = &plan->problem;
    attn_cuda_args a;
    memset(&a, 0, sizeof a);
    a.p = *p;
    a.f = *f;
    a.f.page_table_stride = p->page_size ? attn__pages_per_slot(p, f) : 0;
    a.by_page = attn__divider(attn__max32(p->page_size, 1));
    a.status = run->status;
    if (p->op != ATTN_FORWARD) return a;
    const attn_cuda_entry *forward = &run->entries[run->forward];
    if (p->flashmask_vectors) {
        a.ranges = attn__part(plan, f, CUDA_RANGES);
        a.range_cols = forward->bn;
        a.range_tiles = (int32_t)attn__ceil_div(p->max_kv, forward->bn);
    }
    a.chunks = run->decode >= 0 ? ATTN_SHORT_ELSEWHERE : plan->chunks;
    if (a.chunks > 0) set_parts(plan, &a);
    a.row_tiles = (int32_t)attn__ceil_div(p->max_q, forward->bm);
    a.slots = attn__max32(a.row_tiles, a.chunks);
    a.dv_blocks = (int32_t)attn__ceil_div(p->dim_v, forward->dim_v);
    a.heads = p->heads_q * a.dv_blocks;
    a.group = forward->hopper ? heads_of_hopper(p, (int64_t)p->batch * a.heads, a.row_tiles, blocks_of_hopper(run))
                              : heads_side_by_side(p) * a.dv_blocks;
    a.scale_log2 = attn__scale_log2(p);
    a.philox = attn__philox_make(f->seed, f->offset, p->dropout);
    a.least = a.scale_log2 > 1 ? -FLT_MAX / a.scale_log2 : -FLT_MAX;
    a.vector_ok = run->vector_ok;
    a.tma = run->tma;
    a.box = run->box;
    if (forward->hopper && forward->takes != ATTN_TAKES_PLAIN && attn__cuda_counts(p))
        a.counter = attn__part(plan, f, CUDA_COUNTER);
    a.by_group = attn__divider(a.group);
    a.by_each = attn__divider(attn__max32(a.group * a.slots, 1));
    a.by_heads = attn__divider(a.heads);
    a.by_share = attn__divider(p->heads_q / p->heads_kv);
    if (p->flags & ATTN_ROTARY) a.other_q = attn__cuda_rotated_q(plan, f);
    a.fuses = fuses(run, p, f);
    return a;
}

/* What the forward kernel reads: the cache with the new keys, the rotated q, FlashMask's ranges. */
static attn_status launch_before(const attn_cuda_run *run, attn_cuda_args *a) {
    const attn_problem *p = &a->p;
    if (a->fuses) return ATTN_OK;
    if (p->flags & ATTN_APPEND)
        RETURN_IF_ERROR(launch_warps(run, ATTN_ENTRY_append, (int64_t)p->batch * p->heads_kv * p->max_new, a));
    if (p->op != ATTN_FORWARD) return ATTN_OK;
    if (p->flags & ATTN_ROTARY) {
        RETURN_IF_ERROR(launch_warps(run, ATTN_ENTRY_rotate_q, (int64_t)p->batch * p->heads_q * p->max_q, a));
        a->f.q = a->other_q;
    }
    if (p->flashmask_vectors)
        RETURN_IF_ERROR(launch_warps(run, ATTN_ENTRY_ranges, (int64_t)p->batch * p->flashmask_heads * a->range_tiles, a));
    return ATTN_OK;
}

/* A Hopper kernel: one block to a multiprocessor, and each walks over its share of the work. */
static attn_status launch_hopper(const attn_cuda_run *run, const attn_cuda_args *a) {
    const attn_cuda_entry *forward = &run->entries[run->forward];
    int64_t groups = attn__ceil_div((int64_t)a->p.batch * a->heads, a->group), blocks = blocks_of_hopper(run);
    attn_cuda_args90 x;
    memset(&x, 0, sizeof x);
    x.q = run->map_q;
    x.k = run->map_k;
    x.v = run->map_v;
    x.o = run->map_o;
    x.a = *a;
    x.whole = run->whole;
    x.a.work = groups * a->group * a->slots; /* batch * heads is below 2^31 */
    RETURN_IF(forward->takes == ATTN_TAKES_PLAIN && a->tma != ATTN_TMA_ALL, ATTN_DEVICE,
              "kernel=%s: wants maps of all tensors, and the driver made none for some (bits %d)", forward->name, a->tma);
    if (x.a.work > INT32_MAX) x.a.counter = NULL; /* it has 32 bits */
    if (x.a.counter)
        RETURN_IF_DRIVER(run->driver, cuMemsetD32Async, ((attn_cu_pointer)(uintptr_t)x.a.counter, 0, 1, run->stream));
    return attn__cuda_launch(run, run->forward, x.a.work < blocks ? x.a.work : blocks, 0, 32 * forward->warps,
                             forward->shared_bytes, &x);
}

/* One of the others: a block to each piece of work. */
static attn_status launch_blocks(const attn_cuda_run *run, const attn_cuda_args *a) {
    const attn_cuda_entry *forward = &run->entries[run->forward];
    int64_t heads = (int64_t)a->p.batch * a->heads;
    bool any = forward->dtype == ATTN_DTYPE_DEFAULT; /* fwd_any numbers its blocks itself */
    int64_t groups = any ? 0 : attn__ceil_div(heads, a->group), each = (any ? heads : a->group) * (int64_t)a->slots;
    return attn__cuda_launch(run, run->forward, each, groups, 32 * forward->warps, forward->shared_bytes, a);
}

/* Sequences of few rows. */
static attn_status launch_decode(const attn_cuda_run *run, const attn_plan *plan, const attn_cuda_args *a) {
    const attn_cuda_entry *e = &run->entries[run->decode];
    attn_cuda_decode c;
    int64_t blocks;
    memset(&c, 0, sizeof c);
    c.a = *a;
    c.a.group = a->p.heads_q / a->p.heads_kv;
    if (a->fuses && (a->p.flags & ATTN_ROTARY)) {
        c.a.f.q = a->other_q;
        c.a.other_q = a->f.q;
    }
    attn__cuda_decode_sizes(e, &a->p, run->sms, run->shared, &c, &blocks); /* as the plan has seen */
    c.spans = attn__part(plan, &a->f, CUDA_SPANS);
    c.super_slots = c.spans + (size_t)c.shared * (size_t)c.each * (size_t)attn__cuda_slot(e, &c);
    c.counters = attn__part(plan, &a->f, CUDA_TICKETS);
    return attn__cuda_launch(run, run->decode, blocks, 0, 32 * e->warps, e->shared_bytes, &c);
}

/* The same where V is the beginning of K: one block to a multiprocessor. */
static attn_status launch_latent(const attn_cuda_run *run, const attn_plan *plan, attn_cuda_args a) {
    const attn_cuda_entry *e = &run->entries[run->decode];
    const int64_t spans = attn__ceil_div(a.p.max_kv, ATTN_DECODE90_SPAN), most = blocks_of_hopper(run);
    a.group = a.p.heads_q / a.p.heads_kv;
    const int64_t rows = (int64_t)attn__min32(a.p.max_q, ATTN_CUDA_SPLIT_ROWS) * a.group;
    const int64_t items = (int64_t)a.p.batch * a.p.heads_kv * attn__ceil_div(rows, ATTN_DECODE90_ROWS);
    a.chunks = spans > 1 ? (int32_t)spans : 0;
    if (a.chunks) set_parts(plan, &a);
    const int64_t each = spans > 1 ? spans : 1, blocks = items > most / each ? most : items * each;
    RETURN_IF_ERROR(attn__cuda_launch(run, run->decode, blocks, 0, 32 * e->warps, e->shared_bytes, &a));
    if (!a.chunks) return ATTN_OK;
    const int64_t parts = (int64_t)a.p.batch * a.p.heads_q * a.part_rows;
    return launch_warps(run, ATTN_ENTRY_fold_latent, parts * ATTN_FOLD_SLICES(a.chunks), &a);
}

/* Attention itself. */
static attn_status launch_rows(const attn_cuda_run *run, const attn_plan *plan, const attn_cuda_args *a) {
    const attn_problem *p = &a->p;
    int64_t heads = (int64_t)p->batch * p->heads_q;
    if (!run->entries[run->forward].decode)
        RETURN_IF_ERROR(run->entries[run->forward].hopper ? launch_hopper(run, a) : launch_blocks(run, a));
    if (run->decode >= 0)
        RETURN_IF_ERROR(run->entries[run->decode].latent ? launch_latent(run, plan, *a) : launch_decode(run, plan, a));
    if (a->chunks > 0)
        RETURN_IF_ERROR(launch_warps(run, ATTN_ENTRY_fold, heads * a->part_rows * attn__ceil_div(p->dim_v, 32), a));
    if (!a->f.probs.data) return ATTN_OK;
    return attn__cuda_launch(run, ATTN_ENTRY_probs, heads * attn__ceil_div(p->max_q, ATTN_ANY_ROWS), 0,
                             32 * ATTN_CUDA_WARPS, 0, a);
}

attn_status attn__cuda_forward(const attn_cuda_run *run, const attn_plan *plan, const attn_buffers *f) {
    attn_cuda_args a = make_args(run, plan, f);
    RETURN_IF_ERROR(launch_before(run, &a));
    if (a.p.op != ATTN_FORWARD) return ATTN_OK;
    if (a.p.max_q > 0) RETURN_IF_ERROR(launch_rows(run, plan, &a));
    return a.p.flags & ATTN_VARLEN_Q ? launch_warps(run, ATTN_ENTRY_fill, a.p.total_q, &a) : ATTN_OK;
}

/* ---- backward ---- */

/* One for each tile of rows and head, and for each block that adds to it at the same time. */
static int64_t turns_of(const attn_cuda_entry *e, const attn_problem *p) {
    return attn__cuda_q_tiles(p, e->bm) * e->blocks;
}

static attn_cuda_args make_backward(const attn_cuda_run *run, const attn_plan *plan, const attn_buffers *f) {
    const attn_problem *p = &plan->problem;
    attn_cuda_args a;
    memset(&a, 0, sizeof a);
    a.p = *p;
    if (attn__cuda_takes_turns(p)) a.p.flags &= ~ATTN_UNORDERED;
    a.f = *f;
    a.status = run->status;
    a.delta = attn__part(plan, f, CUDA_ROWS);
    const attn_cuda_entry *e = &run->entries[run->forward];
    if (e->hopper && e->dtype == ATTN_F16) a.fits = (uint32_t *)attn__part(plan, f, CUDA_TURNS) + turns_of(e, p) + 1;
    if (e->one && f->d_q.data) {
        a.part_o = attn__part(plan, f, CUDA_D_Q);
        a.turns = attn__part(plan, f, CUDA_TURNS);
        a.overlap = a.turns + turns_of(e, p);
        a.finishes = e->hopper && attn__cuda_finishes(p);
    }
    if (p->flashmask_vectors) {
        a.ranges = attn__part(plan, f, CUDA_RANGES);
        a.range_cols = ATTN_ANY_COLS;
        a.range_tiles = (int32_t)attn__ceil_div(p->max_kv, ATTN_ANY_COLS);
    }
    a.scale_log2 = attn__scale_log2(p);
    a.philox = attn__philox_make(f->seed, f->offset, p->dropout);
    a.vector_ok = run->vector_ok;
    return a;
}

/* Blocks of four rows or keys, each with shared memory for the numbers that the problem is computed in. */
static attn_status launch_plain(const attn_cuda_run *run, int entry, int64_t blocks, const attn_cuda_args *a) {
    const size_t real = attn__wide_problem(&a->p) ? sizeof(double) : sizeof(float);
    return attn__cuda_launch(run, entry, blocks, 0, 32 * ATTN_CUDA_WARPS, ATTN_BWD_ANY_REALS * real, a);
}

/* Of the sizes of groups from `most` down to half of it, the one whose last group lacks the fewest heads. */
static int32_t even_groups(int64_t heads, int64_t most) {
    int64_t best = most, least = INT64_MAX;
    for (int64_t group = most; 2 * group >= most && heads > most; group--) {
        const int64_t lacks = (group - heads % group) % group;
        if (lacks >= least) continue;
        least = lacks;
        best = group;
    }
    return (int32_t)(heads < best ? heads : best);
}

/*
 * In one pass the blocks of a head wait for each other, each about a tile behind the one before. So that this is little beside what a block
 * has to do, a GPU full of blocks shall have no more of one head than an eighth of its tiles of rows. With fewer heads side by side what
 * blocks share stays in the L2 cache, which counts for more on Hopper, where nobody waits who is less than two tiles behind; above dim 128 long rows
 * want still fewer, as was measured. Groups are about as large as each other: a few heads that are left would have the GPU for themselves, and
 * nearly all of their blocks wait.
 */
static int32_t heads_in_turn(const attn_cuda_run *run, const attn_problem *p, int64_t heads) {
    const attn_cuda_entry *e = &run->entries[run->forward];
    const int64_t tiles = attn__ceil_div(p->max_q, e->bm) * (p->heads_q / p->heads_kv);
    const int64_t of_one = tiles / 8 > 1 ? tiles / 8 : 1, group = attn__ceil_div(run->sms > 0 ? run->sms : 1, of_one);
    const int64_t least = e->hopper && e->dim > 128 ? 10 : 16, most = e->hopper ? 16 : group;
    return even_groups(heads, group < least ? least : group < most ? group : most);
}

/* d_k and d_v, or d_q: a block to each tile of keys of each KV head, or of rows of each query head; bwd_any numbers its blocks itself. */
static attn_status launch_gradient(const attn_cuda_run *run, int entry, attn_cuda_args a) {
    const attn_cuda_entry *e = &run->entries[entry];
    const attn_problem *p = &a.p;
    const bool any = e->dtype == ATTN_DTYPE_DEFAULT, keys = any ? entry == ATTN_ENTRY_bwd_any : e->by_keys;
    const int32_t own = any ? ATTN_ANY_ROWS : keys ? e->bn : e->bm;
    const int64_t heads = (int64_t)p->batch * (keys ? p->heads_kv : p->heads_q);
    const int64_t tiles = attn__ceil_div(keys ? p->max_kv : p->max_q, own);
    if (any) return launch_plain(run, entry, heads * tiles, &a);
    if (heads == 0) return ATTN_OK;
    a.group = (int32_t)(heads < heads_side_by_side(p) ? heads : heads_side_by_side(p));
    if (e->one) a.group = heads_in_turn(run, p, heads);
    a.row_tiles = (int32_t)tiles;
    a.slots = a.row_tiles * (e->split ? 2 : 1);
    attn_cuda_args90 x;
    if (e->hopper) {
        memset(&x, 0, sizeof x);
        x.q = run->map_q;
        x.k = run->map_k;
        x.v = run->map_v;
        x.o = run->map_o;
        x.a = a;
    }
    return attn__cuda_launch(run, entry, a.group * (int64_t)a.slots * e->blocks, attn__ceil_div(heads, a.group),
                             32 * e->warps, e->shared_bytes, e->hopper ? (const void *)&x : (const void *)&a);
}

/* The floats that Hopper's kernels have left become d_q: a block for each tile of rows and head. */
static attn_status launch_cast(const attn_cuda_run *run, attn_cuda_args a) {
    a.row_tiles = (int32_t)attn__ceil_div(a.p.max_q, ATTN_D_Q_ROWS);
    return attn__cuda_launch(run, ATTN_ENTRY_bwd_cast, (int64_t)a.p.batch * a.row_tiles * a.p.heads_q, 0, ATTN_CAST_THREADS,
                             0, &a);
}

/*
 * What has to be zero before blocks add to it or wait for it: turns, and d_q where its sums have no order, or where no block may come by a
 * tile of it although bwd_cast takes it for seen: FlashMask hides it, and lse is of other keys, too.
 */
static attn_status clear_turns(const attn_cuda_run *run, const attn_cuda_args *a) {
    const attn_cuda_entry *e = &run->entries[run->forward];
    const size_t floats = (size_t)(attn__cuda_d_q_rows(&a->p) * attn__d_q_columns(&a->p));
    const size_t turns = (size_t)turns_of(e, &a->p) + 1;
    RETURN_IF_DRIVER(run->driver, cuMemsetD32Async, ((attn_cu_pointer)(uintptr_t)a->turns, 0, turns, run->stream));
    const bool clear = e->hopper && ((a->p.flags & ATTN_UNORDERED) || a->ranges) && floats > 0;
    if (!clear) return ATTN_OK;
    RETURN_IF_DRIVER(run->driver, cuMemsetD32Async, ((attn_cu_pointer)(uintptr_t)a->part_o, 0, floats, run->stream));
    return ATTN_OK;
}

/* Float16 on Hopper: how large d_o, v and delta are. */
static attn_status launch_fit(const attn_cuda_run *run, const attn_cuda_args *a) {
    const attn_problem *p = &a->p;
    const int64_t count = (int64_t)p->batch * p->heads_kv * ATTN_FITS;
    if (count == 0) return ATTN_OK;
    RETURN_IF_DRIVER(run->driver, cuMemsetD32Async, ((attn_cu_pointer)(uintptr_t)a->fits, 0, (size_t)count, run->stream));
    return launch_warps(run, ATTN_ENTRY_bwd_fit,
                        (int64_t)p->batch * p->heads_q * attn__ceil_div(p->max_q, ATTN_DELTA_ROWS) +
                            (int64_t)p->batch * p->heads_kv * attn__ceil_div(p->max_kv, ATTN_DELTA_ROWS),
                        a);
}

/* d_bias has one element along a dim whose stride is 0. */
static attn_status launch_bias(const attn_cuda_run *run, const attn_cuda_args *a) {
    const attn_problem *p = &a->p;
    const int64_t *stride = a->f.d_bias.stride;
    const int64_t size[4] = {stride[0] ? p->batch : 1, stride[1] ? p->heads_q : 1,
                             stride[2] ? attn__ceil_div(p->max_q, ATTN_ANY_ROWS) : 1,
                             stride[3] ? attn__ceil_div(p->max_kv, ATTN_ANY_COLS) : 1};
    int64_t blocks = 1;
    for (int n = 0; n < 4; n++)
        RETURN_IF(__builtin_mul_overflow(blocks, size[n], &blocks), ATTN_INVALID,
                  "d_bias: more blocks than can be counted");
    return launch_plain(run, ATTN_ENTRY_bwd_bias, blocks, a);
}

/* What follows from the statistics of rows alone, and what no other kernel writes. */
static attn_status launch_after(const attn_cuda_run *run, const attn_cuda_args *a) {
    const attn_problem *p = &a->p;
    if (a->f.d_sink) RETURN_IF_ERROR(attn__cuda_launch(run, ATTN_ENTRY_bwd_sink, p->heads_q, 0, ATTN_SINK_THREADS, 0, a));
    if (!(p->flags & ATTN_OWN_LENGTHS)) return ATTN_OK;
    int64_t rows = p->flags & ATTN_VARLEN_Q ? p->total_q : (int64_t)p->batch * p->max_q;
    int64_t keys = p->flags & ATTN_VARLEN_KV ? p->total_kv : (int64_t)p->batch * p->max_kv;
    return launch_warps(run, ATTN_ENTRY_bwd_fill, rows + keys, a);
}

attn_status attn__cuda_backward(const attn_cuda_run *run, const attn_plan *plan, const attn_buffers *f) {
    const attn_cuda_args a = make_backward(run, plan, f);
    const attn_problem *p = &a.p;
    const bool packed = p->flags & ATTN_VARLEN_Q;
    const int64_t rows = packed ? p->total_q : p->max_q, heads = packed ? 1 : p->batch;
    const attn_cuda_entry *e = &run->entries[run->forward];
    attn_cuda_args first = a;
    if (e->hopper && !a.finishes) first.turns = NULL; /* bwd_cast writes all rows of d_q */
    if (a.turns) RETURN_IF_ERROR(clear_turns(run, &a));
    RETURN_IF_ERROR(
        launch_warps(run, ATTN_ENTRY_bwd_delta, heads * p->heads_q * attn__ceil_div(rows, ATTN_DELTA_ROWS), &first));
    if (a.ranges)
        RETURN_IF_ERROR(launch_warps(run, ATTN_ENTRY_ranges, (int64_t)p->batch * p->flashmask_heads * a.range_tiles, &a));
    if (a.fits) RETURN_IF_ERROR(launch_fit(run, &a));
    const bool one = run->entries[run->forward].one;
    if (f->d_q.data && !one) RETURN_IF_ERROR(launch_gradient(run, run->forward + 1, a));
    if (f->d_k.data || f->d_v.data || (f->d_q.data && one)) RETURN_IF_ERROR(launch_gradient(run, run->forward, a));
    if (f->d_q.data && run->entries[run->forward].hopper && !a.finishes) RETURN_IF_ERROR(launch_cast(run, a));
    if (f->d_bias.data) RETURN_IF_ERROR(launch_bias(run, &a));
    return launch_after(run, &a);
}

/* ---- pieces ---- */

/* Rows of all heads and sequences; false when they are too many to be counted. */
static bool count_rows(int32_t batch, int32_t heads, int32_t rows, int64_t *count) {
    return !__builtin_mul_overflow((int64_t)batch * heads, (int64_t)rows, count);
}

/* Parts [first, ...) of the merge in one launch; returns how many they are. */
static int32_t take_parts(attn_cuda_merge *m, const attn_merge_args *args, int32_t first) {
    m->parts = attn__min32(args->parts - first, ATTN_MERGE_PARTS);
    for (int32_t n = 0; n < m->parts; n++) {
        m->o_parts[n] = args->o_parts[first + n];
        m->lse_parts[n] = args->lse_parts[first + n];
    }
    m->is_first = first == 0;
    m->is_last = first + m->parts == args->parts;
    return m->parts;
}

attn_status attn__cuda_merge(const attn_cuda_run *run, const attn_merge_args *args) {
    attn_cuda_merge m;
    memset(&m, 0, sizeof m);
    m.dtype = args->dtype;
    m.out_dtype = args->out_dtype;
    m.batch = args->batch;
    m.rows = args->rows;
    m.heads = args->heads;
    m.dim = args->dim;
    m.o = args->o;
    m.lse = args->lse;
    int64_t rows, bytes;
    bool fits = count_rows(args->batch, args->heads, args->rows, &rows) &&
                !__builtin_mul_overflow(rows, (int64_t)sizeof(double) * (args->dim + 2), &bytes);
    RETURN_IF(!fits, ATTN_INVALID, "rows=%d: so many rows do not fit into memory", args->rows);
    attn_cu_pointer state = 0;
    if (args->parts > ATTN_MERGE_PARTS)
        RETURN_IF_DRIVER(run->driver, cuMemAllocAsync, (&state, (size_t)bytes, run->stream));
    m.state = (double *)(uintptr_t)state;
    attn_status status = ATTN_OK;
    for (int32_t first = 0; first < args->parts && status == ATTN_OK;) {
        first += take_parts(&m, args, first);
        status = launch_warps(run, ATTN_ENTRY_merge, rows, &m);
    }
    int error = state ? run->driver->cuMemFreeAsync(state, run->stream) : 0;
    return error && status == ATTN_OK ? attn__driver_fail(run->driver, error, "cuMemFreeAsync") : status;
}

attn_status attn__cuda_rotary(const attn_cuda_run *run, const attn_rotary_args *args) {
    attn_cuda_rotary c;
    memset(&c, 0, sizeof c);
    c.r = *args;
    c.status = run->status;
    int64_t rows;
    RETURN_IF(!count_rows(args->batch, args->heads, args->rows, &rows), ATTN_INVALID,
              "rows=%d: so many rows of %d sequences and %d heads are more than a grid can have", args->rows, args->batch,
              args->heads);
    return launch_warps(run, ATTN_ENTRY_rotary, rows, &c);
}
