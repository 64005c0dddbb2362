/*
 * `attn bench`: times attention on random numbers, over every combination of the sizes that it is given, and says how far
 * that is from the two floors of the machine, arithmetic (peak.c) and memory (memory.c). With --check it runs the same data
 * through ref, too, in double. overhead.c has what a call costs besides.
 *
 * What is counted: 2 * (dim_qk + dim_v) operations for each allowed pair of a query and a key in the forward pass, 2.5 times
 * that in the backward pass; bytes are those of every tensor read or written once. The time is the median.
 *
 * On a GPU runs follow each other without a pause, with an event between each two of them, and take turns on as many copies of
 * the tensors as it takes to leave its cache. The peak there is that of its tensor cores, from its data sheet.
 */
#define _POSIX_C_SOURCE 200809L

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "numeric.h"
#include "tool.h"
#include "workload.h"

enum { MAX_RUNS = 1000, WARM_RUNS = 3, BATCH = 32 };

typedef struct bench_settings {
    settings common;
    dtype_list dtypes, kv_dtypes;
    bool json, check, cold;
    int32_t repeat;
    double seconds;
    const char *suite;
} bench_settings;

#define AT(field) offsetof(bench_settings, field)

static const option options_bench[] = {
    {"op", "OP", "forward (default) or backward", parse_op, AT(common.problem.op), 0},
    {"dtype", "TYPE", "f32 (default), f16, bf16, f64, e4m3, e5m2", parse_dtypes, AT(dtypes), 0},
    {"kv-dtype", "TYPE", "of k and v, where it is another one; also i8", parse_dtypes, AT(kv_dtypes), 0},
    {"cold", NULL, "tensors leave the CPU's caches before each run", parse_switch, AT(cold), 0},
    {"json", NULL, "one JSON object a line instead of a table", parse_switch, AT(json), 0},
    {"seconds", "S", "how long to run each shape; default 1", parse_real, AT(seconds), 0},
    {"repeat", "N", "how many runs of each shape, instead", parse_int, AT(repeat), 0},
    {"check", NULL, "compare with ref in double: relative RMS; exit 1 if it is too large", parse_switch, AT(check), 0},
    {"suite", "NAME", "demo: quick shapes; overhead: what a call costs", parse_text, AT(suite), 0},
    {0},
};

static const command bench = {
    "bench",
    "[OPTION]...",
    "Times attention on random data. Sizes and dtypes may be lists with commas: every combination is run.\n"
    "The time is the median of the runs after a first one; peak is the share of the arithmetic peak that a\n"
    "loop of multiply-adds reaches on this machine with as many threads, or that the data sheet of a GPU names.\n"
    "Bytes are those of every tensor once; read is the share of what as many threads read from memory in one\n"
    "sequential stream each, of memory that was thrown out of all caches before (not measured on a GPU). Tensors\n"
    "that fit into a cache can exceed it: --cold leaves the caches first, as a long decode does by itself.\n",
    "attn bench --heads 32/8 --dim 128 --seqlen 512,1024,2048 --causal\n"
    "attn bench --heads 32/8 --dim 128 --seqlen 1/32768 --dtype bf16 --threads 2 --json\n"
    "attn bench --heads 32/8 --dim 128 --seqlen 1/4096,16/4096 --batch 1,8 --kv-dtype f32,f16,bf16 --cold\n"
    "attn bench --op backward --seqlen 1024 --check\n"
    "attn bench --suite demo --check\n",
    {{"Options", options_bench},
     {"Sizes", options_sizes},
     {"Mask and scores", options_problem},
     {"Machine", options_machine},
     {0}},
};

/* One line of the result. */
typedef struct result {
    const char *backend, *kernel;
    int threads;
    double ms, gflops, gb_per_s;
    double peak, read; /* GFLOP/s and GB/s of the machine; 0: not known */
    double error;      /* relative RMS against exact results; < 0: not asked for */
} result;

/* o and lse for a backward pass. */
static attn_status run_forward(const place *at, const attn_problem *p, const attn_buffers *buffers) {
    attn_problem forward = *p;
    attn_buffers f = *buffers;
    forward.op = ATTN_FORWARD;
    f.d_o = f.d_q = f.d_k = f.d_v = (attn_tensor){0};
    return attn_forward(at->context, &forward, &f, device_stream(at->d, 0));
}

/* ---- measuring ---- */

/* Throws the host's tensors out of the caches. */
static void flush_tensors(const tensors *t) {
    for (int i = 0; i < TENSORS; i++)
        if (t->memory[i]) memory_flush(t->memory[i], (size_t)t->count[i] * attn_dtype_size(t->dtype[i]));
}

/* `runs` runs, one after the other on the copies in turn; adds their times. cold, if not NULL, is flushed before them. */
static attn_status time_batch(const attn_plan *plan, const copies *c, device *d, const tensors *cold, int runs,
                              double *times) {
    attn_status status = ATTN_OK;
    if (cold) flush_tensors(cold);
    bool works = device_mark(d, 0);
    for (int n = 0; n < runs && status == ATTN_OK && works; n++) {
        status = attn_run(plan, &c->buffers[n % c->count], device_stream(d, 0));
        works = device_mark(d, n + 1);
    }
    works = device_wait(d) && works;
    for (int n = 0; n < runs && status == ATTN_OK && works; n++) works = device_between(d, n, n + 1, &times[n]);
    return status != ATTN_OK || works ? status : ATTN_DEVICE;
}

/* Runs the plan again and again; the median in milliseconds. */
static attn_status time_plan(const attn_plan *plan, const copies *c, const tensors *t, device *d, const bench_settings *s,
                             double *ms) {
    const tensors *cold = s->cold && !device_is_gpu(d) ? t : NULL; /* on a GPU copies take turns anyway */
    double times[MAX_RUNS + BATCH], begin = tool_seconds();
    int batch = device_is_gpu(d) ? BATCH : 1, warm = device_is_gpu(d) ? WARM_RUNS : 1, count = 0;
    attn_status status =
        time_batch(plan, c, d, cold, warm, times); /* touches the memory, wakes the threads, loads the kernel */
    double now = tool_seconds(), end = now + s->seconds;
    int least = s->repeat > 0 ? s->repeat : now - begin > s->seconds ? 1 : 3;
    if (status == ATTN_OK && times[warm - 1] > 1e3 * s->seconds / batch) batch = 1;
    while (status == ATTN_OK && count < MAX_RUNS && (count < least || (s->repeat <= 0 && now < end))) {
        int runs = s->repeat > 0 && s->repeat - count < batch ? s->repeat - count : batch;
        status = time_batch(plan, c, d, cold, runs, times + count);
        now = tool_seconds();
        count += runs;
    }
    if (status != ATTN_OK) return status;
    *ms = median(times, count);
    return ATTN_OK;
}

/* Measuring the floors takes a moment, and shapes share them. */
enum { FLOOR_F32, FLOOR_F64, FLOOR_READ, FLOORS };
static struct {
    int threads;
    double rate, alone; /* of so many threads, and of one; 0: not known yet */
} known[FLOORS];

static double measure_floor(int which, int threads) {
    return which == FLOOR_READ ? read_gb_per_s(threads) : peak_gflops(threads, which == FLOOR_F64);
}

static double cached_floor(int which, int threads) {
    if (known[which].threads == threads) return known[which].rate;
    double rate = measure_floor(which, threads);
    known[which].threads = rate > 0 ? threads : 0;
    known[which].rate = rate;
    return rate;
}

static double cached_alone(int which) {
    if (known[which].threads == 1) return known[which].rate;
    if (!(known[which].alone > 0)) known[which].alone = measure_floor(which, 1);
    return known[which].alone;
}

/* In GFLOP/s; 0: not known, < 0: could not be measured. */
static double find_peak(const result *r, const device *where, const attn_problem *p, attn_dtype tile) {
    if (device_is_gpu(where)) return 1e3 * device_peak_tflops(where, tile);
    return cached_floor(attn__wide(p->dtype) ? FLOOR_F64 : FLOOR_F32, r->threads);
}

static int fill_rates(result *r, const device *where, const attn_problem *p, const tensors *d) {
    double bytes = 0;
    for (int i = 0; i < TENSORS; i++) bytes += (double)d->count[i] * (double)attn_dtype_size(d->dtype[i]);
    r->peak = find_peak(r, where, p, d->dtype[T_O]); /* fp8 is multiplied in 16 bits, as its results are */
    if (r->peak < 0) return tool_error(TOOL_RUNTIME, "bench: the threads for measuring the peak could not be started");
    r->read = device_is_gpu(where) ? 0 : cached_floor(FLOOR_READ, r->threads);
    if (r->read < 0) return tool_error(TOOL_RUNTIME, "bench: no threads or no memory for measuring how fast it is read");
    r->gflops = 1e-6 * count_flops(p) / r->ms;
    r->gb_per_s = 1e-6 * bytes / r->ms;
    return TOOL_OK;
}

/* Of a rate that may not be known: then 0. */
static double share(double rate, double of) { return of > 0 ? rate / of : 0; }

/* ---- comparing ---- */

static double relative_rms(const tensors *d, int which, const double *exact) {
    double error = 0, norm = 0;
    for (int64_t i = 0; i < d->count[which]; i++) {
        double have = attn__load(d->dtype[which], d->memory[which], i);
        error += (have - exact[i]) * (have - exact[i]);
        norm += exact[i] * exact[i];
    }
    return error == 0 ? 0 : sqrt(error / norm);
}

/* The exact results: ref on the same inputs as doubles, of a backward for the o and lse that were given. */
static attn_status run_ref(const place *ref, const attn_problem *p, const tensors *d, tensors *exact) {
    static const int inputs[] = {T_Q, T_K, T_V, T_D_O, T_O, T_LSE}; /* the last two are a forward's outputs */
    for (int n = 0; n < (p->op == ATTN_FORWARD ? 3 : 6); n++) {
        int which = inputs[n];
        double *to = exact->memory[which];
        for (int64_t i = 0; i < d->count[which]; i++) to[i] = attn__load(d->dtype[which], d->memory[which], i);
    }
    exact->buffers.seed = d->buffers.seed;
    exact->buffers.offset = d->buffers.offset;
    return (p->op == ATTN_FORWARD ? attn_forward : attn_backward)(ref->context, p, &exact->buffers, NULL);
}

/* The worst relative RMS of the results. Those of 16 bits are not held to ref's own, which are rounded as well. */
static int compare_with_ref(result *r, const attn_problem *p, const tensors *d) {
    const int first = p->op == ATTN_FORWARD ? T_O : T_D_Q, last = p->op == ATTN_FORWARD ? T_O : T_D_V;
    attn_config config = {.size = sizeof config, .backend = ATTN_BACKEND_REF, .threads = 1};
    attn_problem wide = *p;
    place ref = {0};
    tensors exact = {0};
    wide.dtype = ATTN_F64;
    wide.kv_dtype = ATTN_DTYPE_DEFAULT;
    int code = make_data(&exact, &wide, 0) ? open_place(&ref, &config, "bench") : TOOL_RUNTIME;
    if (code == TOOL_OK) {
        attn_status status = run_ref(&ref, &wide, d, &exact);
        if (status != ATTN_OK) code = tool_status("bench", status);
    }
    r->error = 0;
    for (int i = first; i <= last && code == TOOL_OK; i++) {
        double error = relative_rms(d, i, exact.memory[i]);
        if (!(error <= r->error)) r->error = error; /* a NaN stays */
    }
    close_place(&ref);
    free_data(&exact);
    return code;
}

/* What --check lets pass: that of the coarser type, where gradients of k and v have another one than q. */
static double error_bar(const attn_problem *p, const result *r) {
    bool gpu = strcmp(r->backend, "cuda") == 0;
    attn_problem kv = *p;
    if (p->op == ATTN_BACKWARD && p->kv_dtype) kv.dtype = p->kv_dtype;
    double one = accuracy_bar(p, gpu), other = accuracy_bar(&kv, gpu);
    return one > other ? one : other;
}

/* ---- one shape ---- */

/* Fills in everything but the error, and brings the results back to the host. */
static int measure(const place *at, const attn_plan *plan, const attn_problem *p, const bench_settings *s, tensors *d,
                   result *r) {
    d->buffers.seed = s->common.seed;
    d->buffers.offset = s->common.offset;
    copies *c = make_copies(d, at->d, attn_plan_workspace(plan));
    if (!c) return TOOL_RUNTIME;
    attn_status status = ATTN_OK;
    for (int n = 0; n < c->count && p->op == ATTN_BACKWARD && status == ATTN_OK; n++)
        status = run_forward(at, p, &c->buffers[n]);
    if (status == ATTN_OK) status = time_plan(plan, c, d, at->d, s, &r->ms);
    bool fetched = status != ATTN_OK || mirror_download(&c->m[0]);
    free_copies(c, at->d);
    if (status != ATTN_OK) return tool_status("bench", status);
    return fetched ? fill_rates(r, at->d, p, d) : TOOL_RUNTIME;
}

static int bench_one(const place *at, const attn_problem *p, const bench_settings *s, result *r) {
    attn_plan *plan;
    attn_status status = attn_plan_create(&plan, at->context, p); /* refuses sizes that make no sense */
    if (status != ATTN_OK) return tool_status("bench", status);
    *r = (result){.backend = attn_context_backend(at->context),
                  .kernel = attn_plan_kernel(plan),
                  .threads = attn_context_threads(at->context),
                  .error = -1};
    tensors d;
    int code = make_data(&d, p, s->common.seed) ? measure(at, plan, p, s, &d, r) : TOOL_RUNTIME;
    if (code == TOOL_OK && s->check && strcmp(r->backend, "ref") != 0) code = compare_with_ref(r, p, &d);
    free_data(&d);
    attn_plan_destroy(plan);
    return code;
}

/* ---- output ---- */

/* "128", or "192/128" when they differ. */
static const char *pair_text(char text[32], int32_t a, int32_t b) {
    snprintf(text, 32, a == b ? "%d" : "%d/%d", a, b);
    return text;
}

static const char *kv_name(const attn_problem *p) { return attn_dtype_name(p->kv_dtype ? p->kv_dtype : p->dtype); }

static void print_json(const attn_problem *p, const result *r, const bench_settings *s) {
    char dim[32];
    const char *quote = p->dim_qk == p->dim_v ? "" : "\"";
    printf("{\"op\": \"%s\", \"backend\": \"%s\", \"kernel\": \"%s\", \"dtype\": \"%s\", \"kv_dtype\": \"%s\", "
           "\"batch\": %d, \"heads_q\": %d, \"heads_kv\": %d, \"dim\": %s%s%s, \"seqlen_q\": %d, \"seqlen_kv\": %d, "
           "\"causal\": %s, \"threads\": %d, \"ms\": %.6g, \"gflops\": %.6g, \"gb_per_s\": %.6g, \"peak_gflops\": %.6g, "
           "\"peak_fraction\": %.6g, \"read_gb_per_s\": %.6g, \"read_fraction\": %.6g",
           op_name(p->op), r->backend, r->kernel, attn_dtype_name(p->dtype), kv_name(p), p->batch, p->heads_q, p->heads_kv,
           quote, pair_text(dim, p->dim_qk, p->dim_v), quote, p->max_q, p->max_kv,
           p->flags & ATTN_CAUSAL ? "true" : "false", r->threads, r->ms, r->gflops, r->gb_per_s, r->peak,
           share(r->gflops, r->peak), r->read, share(r->gb_per_s, r->read));
    if (s->cold) printf(", \"cold\": true");
    if (p->flags & ATTN_WINDOW) printf(", \"window\": [%d, %d]", p->window_left, p->window_right);
    if (s->check && !(r->error < 0)) printf(isnan(r->error) ? ", \"error\": null" : ", \"error\": %.3g", r->error);
    printf("}\n");
}

static void print_head(const bench_settings *s) {
    printf("%-8s %-9s %-28s %-11s %-7s %-16s %3s %9s %8s %5s %7s %5s%s\n", "op", "dtype", "batch x heads x seqlen x dim",
           "mask", "backend", "kernel", "thr", "ms", "GFLOP/s", "peak", "GB/s", "read", s->check ? "    error" : "");
}

/* "37%", "-" where it is not known what that would be a share of. */
static const char *percent(char text[16], double rate, double of) {
    if (of > 0)
        snprintf(text, 16, "%.0f%%", 100 * rate / of);
    else
        strcpy(text, "-");
    return text;
}

static void print_row(const attn_problem *p, const result *r, const bench_settings *s) {
    char heads[32], dim[32], seqlen[32], shape[128], mask[32] = "full", dtype[32], peak[16], read[16];
    snprintf(shape, sizeof shape, "%d x %s x %s x %s", p->batch, pair_text(heads, p->heads_q, p->heads_kv),
             pair_text(seqlen, p->max_q, p->max_kv), pair_text(dim, p->dim_qk, p->dim_v));
    if (p->flags & ATTN_CAUSAL) strcpy(mask, "causal");
    if (p->flags & ATTN_WINDOW) snprintf(mask, sizeof mask, "%d,%d", p->window_left, p->window_right);
    bool mixed = p->kv_dtype && p->kv_dtype != p->dtype;
    snprintf(dtype, sizeof dtype, mixed ? "%s/%s" : "%s", attn_dtype_name(p->dtype), kv_name(p));
    printf("%-8s %-9s %-28s %-11s %-7s %-16s %3d %9.3f %8.1f %5s %7.1f %5s", op_name(p->op), dtype, shape, mask, r->backend,
           r->kernel, r->threads, r->ms, r->gflops, percent(peak, r->gflops, r->peak), r->gb_per_s,
           percent(read, r->gb_per_s, r->read));
    if (s->check && r->error < 0) printf("        -");
    if (s->check && !(r->error < 0)) printf("  %7.1e", r->error);
    printf("\n");
}

/* What 100% are, under a table, and what of that one thread does. */
static int print_floors(void) {
    static const char *const units[FLOORS] = {"GFLOP/s f32", "GFLOP/s f64", "GB/s read"};
    const int threads = known[FLOOR_READ].threads;
    double rates[FLOORS];
    for (int count = threads; count > 0; count = count > 1) { /* none: a GPU */
        const char *before = " ";
        for (int which = 0; which < FLOORS; which++) {
            rates[which] = known[which].threads != threads ? 0 : count == threads ? known[which].rate : cached_alone(which);
            if (rates[which] < 0)
                return tool_error(TOOL_RUNTIME, "bench: no threads or no memory for measuring what one thread does");
        }
        printf("measured here, %d thread%s:", count, count == 1 ? "" : "s");
        for (int which = 0; which < FLOORS; which++) {
            if (!(rates[which] > 0)) continue;
            printf("%s%.1f %s", before, rates[which], units[which]);
            before = ", ";
        }
        printf("\n");
    }
    return TOOL_OK;
}

/* Measures one shape and prints its line. */
static int bench_line(const place *at, const attn_problem *p, const bench_settings *s) {
    result r;
    int code = bench_one(at, p, s, &r);
    if (code != TOOL_OK) return code;
    (s->json ? print_json : print_row)(p, &r, s);
    fflush(stdout);
    if (s->check && strcmp(r.backend, "ref") != 0 && !(r.error <= error_bar(p, &r)))
        return tool_error(TOOL_FAILED, "bench: the error is above %g", error_bar(p, &r));
    return TOOL_OK;
}

/* ---- what to measure ---- */

/* Quick shapes of every kind, on ref and cpu: what `make demo` shows. */
static int run_demo(const bench_settings *s) {
    static const struct {
        attn_op op;
        attn_dtype dtype;
        int32_t heads_q, heads_kv, q, kv, dim_qk, dim_v, left;
        uint32_t flags;
    } rows[] = {
        {ATTN_FORWARD, ATTN_F32, 8, 8, 512, 512, 64, 64, 0, 0},
        {ATTN_FORWARD, ATTN_F32, 8, 2, 768, 768, 64, 64, 0, ATTN_CAUSAL},
        {ATTN_FORWARD, ATTN_F32, 4, 4, 1024, 1024, 64, 64, 128, ATTN_CAUSAL | ATTN_WINDOW},
        {ATTN_FORWARD, ATTN_F32, 32, 8, 1, 8192, 128, 128, 0, 0},
        {ATTN_FORWARD, ATTN_BF16, 8, 2, 512, 512, 128, 128, 0, ATTN_CAUSAL},
        {ATTN_FORWARD, ATTN_F16, 4, 4, 384, 384, 192, 128, 0, ATTN_CAUSAL},
        {ATTN_BACKWARD, ATTN_F32, 4, 4, 512, 512, 64, 64, 0, ATTN_CAUSAL},
    };
    static const attn_backend_id backends[2] = {ATTN_BACKEND_REF, ATTN_BACKEND_CPU};
    enum { ROWS = sizeof rows / sizeof *rows };
    place places[2] = {{NULL, NULL}, {NULL, NULL}};
    int code = TOOL_OK, worst = TOOL_OK;
    for (int i = 0; i < 2 && code == TOOL_OK; i++) {
        attn_config config = {.size = sizeof config, .backend = backends[i], .threads = s->common.config.threads};
        code = open_place(&places[i], &config, "bench");
    }
    if (!s->json && code == TOOL_OK) print_head(s);
    for (int n = 0; n < 2 * ROWS && code <= TOOL_FAILED; n++) {
        int i = n / 2;
        attn_problem p = {.size = sizeof p, .op = rows[i].op, .dtype = rows[i].dtype, .flags = rows[i].flags, .batch = 1};
        p.heads_q = rows[i].heads_q;
        p.heads_kv = rows[i].heads_kv;
        p.max_q = rows[i].q;
        p.max_kv = rows[i].kv;
        p.dim_qk = rows[i].dim_qk;
        p.dim_v = rows[i].dim_v;
        p.window_left = rows[i].left;
        code = bench_line(&places[n % 2], &p, s);
        if (code > worst) worst = code;
    }
    if (!s->json && code <= TOOL_FAILED) code = print_floors();
    for (int i = 0; i < 2; i++) close_place(&places[i]);
    return worst > code ? worst : code;
}

/* Every combination of the lists. */
static int run_sweep(const bench_settings *s) {
    const settings *c = &s->common;
    place at = {NULL, NULL};
    int code = open_place(&at, &c->config, "bench"), worst = code;
    int64_t total =
        (int64_t)s->dtypes.count * s->kv_dtypes.count * c->batch.count * c->heads.count * c->dim.count * c->seqlen.count;
    if (!s->json && code == TOOL_OK) print_head(s);
    for (int64_t n = 0; n < total && code <= TOOL_FAILED; n++) {
        int64_t rest = n;
        attn_problem p = c->problem;
        const int32_t *seqlen = c->seqlen.at[rest % c->seqlen.count];
        rest /= c->seqlen.count;
        const int32_t *dim = c->dim.at[rest % c->dim.count];
        rest /= c->dim.count;
        const int32_t *heads = c->heads.at[rest % c->heads.count];
        rest /= c->heads.count;
        p.batch = c->batch.at[rest % c->batch.count][0];
        rest /= c->batch.count;
        p.kv_dtype = s->kv_dtypes.at[rest % s->kv_dtypes.count];
        p.dtype = s->dtypes.at[rest / s->kv_dtypes.count];
        p.max_q = seqlen[0];
        p.max_kv = seqlen[1];
        p.dim_qk = dim[0];
        p.dim_v = dim[1];
        p.heads_q = heads[0];
        p.heads_kv = heads[1];
        code = bench_line(&at, &p, s);
        if (code > worst) worst = code;
    }
    if (!s->json && code <= TOOL_FAILED) code = print_floors();
    close_place(&at);
    return code > worst ? code : worst;
}

int cmd_bench(int argc, char **argv) {
    bench_settings s = {.seconds = 1, .dtypes = {1, {ATTN_F32}}, .kv_dtypes = {1, {ATTN_DTYPE_DEFAULT}}};
    int code = options_parse(&bench, &s, argc, argv);
    if (code != OPTIONS_GO) return code;
    if (s.common.problem.op == ATTN_KV_APPEND) return tool_error(TOOL_USAGE, "bench: --op forward or backward");
    if (!(s.seconds > 0) || s.repeat < 0 || s.repeat > MAX_RUNS)
        return tool_error(TOOL_USAGE, "bench: --seconds above 0, --repeat from 1 to %d", MAX_RUNS);
    if (!s.suite) return run_sweep(&s);
    if (strcmp(s.suite, "overhead") == 0) return bench_overhead(&s.common.config, s.repeat, s.json);
    if (strcmp(s.suite, "demo") != 0)
        return tool_error(TOOL_USAGE, "bench: --suite '%s'; there are demo and overhead", s.suite);
    s.seconds = 0.2;
    return run_demo(&s);
}
