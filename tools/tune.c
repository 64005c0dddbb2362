/*
 * `attn tune`: times GPU kernels that differ by a knob or two, on one problem, and says what each knob brings; writes down which
 * of the library's kernels is the fastest, for plans to read (ATTN_TUNING).
 *
 * Kernels take turns, in rounds, so that a clock that drifts drifts for all of them; a turn is a run that does not count and a few
 * that do, back to back on copies of the tensors that together leave the cache. The time is the median of all of them.
 *
 * Before it is timed each kernel is held against the library's own choice on the same data. Kernels of one family with the same
 * number of keys per tile must give the same bits if they are the library's. With other tiles P is rounded against other maxima, so each row
 * may differ by what two results of the promised accuracy can: twice the bar in the mean, and twice that for one row of a few keys,
 * where rounding errors do not average out. What is wrong elsewhere differs by hundreds of times as much.
 */
#define _POSIX_C_SOURCE 200809L

#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "fault.h"
#include "ladder.h"
#include "numeric.h"
#include "tool.h"
#include "workload.h"

enum { RUNS = 8, MAX_ROUNDS = 100, ROUNDS = 9, MOST_TEXT = 1 << 16 };
#define ROW_BARS 4.0  /* so many times the promised accuracy may a row differ */
#define LSE_BAR 1e-5  /* lse is promised to 2e-6 in float, near 8 */
#define NAN_BYTE 0xff /* what results are filled with before a run */

typedef struct tune_settings {
    settings common;
    dtype_list dtypes;
    const char *kernels, *write;
    int32_t rounds;
    bool json;
} tune_settings;

#define AT(field) offsetof(tune_settings, field)

static const option options_tune[] = {
    {"kernels", "DIR", "what `make tune-kernels` made; default: the library's kernels only", parse_text, AT(kernels), 0},
    {"dtype", "TYPE", "bf16 (default), f16 or f32, or a list", parse_dtypes, AT(dtypes), 0},
    {"causal", NULL, "row i sees the keys up to i + sk - sq", NULL, 0, ATTN_CAUSAL},
    {"rounds", "N", "turns of each kernel; default 9", parse_int, AT(rounds), 0},
    {"write", "FILE", "a tuning file with the library's fastest kernels", parse_text, AT(write), 0},
    {"json", NULL, "one JSON object a line instead of a table", parse_switch, AT(json), 0},
    {0},
};

static const command tune = {
    "tune",
    "[OPTION]...",
    "Times the GPU kernels that take a problem, one beside the other, and says what each knob brings: a line is held\n"
    "against the earlier one from which it differs least, and against the first. dtypes and dims may be lists.\n"
    "A tuning file is read by plans when ATTN_TUNING names it by its absolute path.\n",
    "attn tune --kernels build/tune-kernels --heads 16 --dim 128 --seqlen 8192 --causal\n"
    "attn tune --dtype bf16,f16 --heads 16 --dim 64,128 --seqlen 4096 --batch 4 --write h200.tuning\n"
    "ATTN_TUNING=$PWD/h200.tuning attn plan --backend cuda --dtype bf16 --dim 128\n",
    {{"Options", options_tune}, {"Sizes", options_sizes}, {0}},
};

/* A kernel in the race. */
typedef struct candidate {
    attn_cuda_entry entry;
    char *image; /* of the folder's; NULL: the library's own */
    attn_cu_library library;
    attn_cu_kernel kernel;
    int registers, stack_bytes; /* of a thread; the stack has what is spilled, and arrays */
    bool same_bits, right;
    double most; /* largest difference of an element of o */
    double ms;   /* the median of: */
    int count;
    double times[MAX_ROUNDS * RUNS];
} candidate;

/* One problem, and all that race on it. */
typedef struct race {
    const place *at;
    const attn_gpu *gpu;
    attn_problem problem;
    attn_plan *plan;
    tensors d;
    copies *copies;
    attn_buffers buffers[MAX_COPIES]; /* checked */
    void *o, *lse;                    /* what the library's choice gives */
    ladder ladder;
    candidate *candidates;                 /* [ladder.count] */
    attn_cuda_entry entries[ATTN_ENTRIES]; /* the library's tables, with the candidate in the place of the plan's kernel */
    attn_cu_kernel kernels[ATTN_ENTRIES];
    int slot; /* that place */
} race;

static attn_cuda *cuda_of(const race *r) { return r->at->context->cuda; }

/* ---- kernels ---- */

static attn_status load_folder_kernel(const race *r, candidate *c) {
    const attn_driver *d = cuda_of(r)->state->driver;
    RETURN_IF_DRIVER(d, cuLibraryLoadData, (&c->library, c->image, NULL, NULL, 0, NULL, NULL, 0));
    RETURN_IF_DRIVER(d, cuLibraryGetKernel, (&c->kernel, c->library, c->entry.name));
    RETURN_IF_DRIVER(d, cuKernelSetAttribute,
                     (ATTN_CU_FUNCTION_SHARED, (int)c->entry.shared_bytes, c->kernel, r->gpu->device));
    return ATTN_OK;
}

static attn_status load_library_kernel(const race *r, candidate *c, int entry) {
    RETURN_IF_ERROR(attn__cuda_load(cuda_of(r), &entry, 1, UINT32_C(1) << (r->gpu - cuda_of(r)->state->gpu)));
    c->kernel = cuda_of(r)->kernel[entry];
    return ATTN_OK;
}

static attn_status look_at_kernel(const race *r, candidate *c) {
    const attn_driver *d = cuda_of(r)->state->driver;
    RETURN_IF_DRIVER(d, cuKernelGetAttribute, (&c->registers, ATTN_CU_FUNCTION_REGISTERS, c->kernel, r->gpu->device));
    RETURN_IF_DRIVER(d, cuKernelGetAttribute, (&c->stack_bytes, ATTN_CU_FUNCTION_LOCAL, c->kernel, r->gpu->device));
    return ATTN_OK;
}

static int load_candidate(race *r, int n, const char *folder) {
    const rung *line = &r->ladder.at[n];
    candidate *c = &r->candidates[n];
    char path[PATH_MAX];
    c->entry = rung_entry(line);
    if (line->entry < 0) {
        if ((size_t)snprintf(path, sizeof path, "%s/%s.fatbin", folder, line->name) >= sizeof path)
            return tool_error(TOOL_USAGE, "%.64s...: the path is too long", folder);
        c->image = read_whole(path);
        if (!c->image) return TOOL_RUNTIME;
    }
    attn_status status = c->image ? load_folder_kernel(r, c) : load_library_kernel(r, c, line->entry);
    if (status == ATTN_OK) status = look_at_kernel(r, c);
    return status == ATTN_OK ? TOOL_OK : tool_status(line->name, status);
}

/* ---- runs ---- */

static attn_status launch(race *r, const candidate *c, int copy) {
    r->entries[r->slot] = c->entry;
    r->kernels[r->slot] = c->kernel;
    attn_cuda_run run = {.driver = cuda_of(r)->state->driver,
                         .entries = r->entries,
                         .kernels = r->kernels,
                         .stream = device_stream(r->at->d, 0),
                         .status = cuda_of(r)->status,
                         .forward = r->slot,
                         .decode = -1,
                         .vector_ok = true,
                         .sms = r->gpu->sms};
    attn__cuda_map(&run, r->plan, &r->buffers[copy]);
    return attn__cuda_forward(&run, r->plan, &r->buffers[copy]);
}

/* The plan itself, or a candidate, once, with its results in r->d. */
static int run_once(race *r, const candidate *c) {
    const tensors *d = &r->d;
    const attn_buffers *f = &r->buffers[0];
    device *where = r->at->d;
    size_t o_bytes = (size_t)d->count[T_O] * attn_dtype_size(d->dtype[T_O]);
    size_t lse_bytes = (size_t)d->count[T_LSE] * attn_dtype_size(d->dtype[T_LSE]);
    if (!device_fill(where, f->o.data, NAN_BYTE, o_bytes) || !device_fill(where, f->lse, NAN_BYTE, lse_bytes))
        return TOOL_RUNTIME;
    attn_status status = c ? launch(r, c, 0) : attn_run(r->plan, f, device_stream(where, 0));
    if (status != ATTN_OK) return tool_status(c ? c->entry.name : "tune", status);
    bool works = device_wait(where) && device_download(where, d->memory[T_O], f->o.data, o_bytes) &&
                 device_download(where, d->memory[T_LSE], f->lse, lse_bytes);
    return works ? TOOL_OK : TOOL_RUNTIME;
}

/* A turn: one run that does not count, then RUNS that do. */
static int take_turn(race *r, candidate *c) {
    device *d = r->at->d;
    attn_status status = launch(r, c, 0);
    bool works = device_mark(d, 0);
    for (int n = 0; n < RUNS && status == ATTN_OK && works; n++) {
        status = launch(r, c, (n + 1) % r->copies->count);
        works = device_mark(d, n + 1);
    }
    works = device_wait(d) && works;
    if (status != ATTN_OK) return tool_status(c->entry.name, status);
    for (int n = 0; n < RUNS && works; n++) works = device_between(d, n, n + 1, &c->times[c->count++]);
    return works ? TOOL_OK : TOOL_RUNTIME;
}

/* ---- comparing ---- */

/* The worst row's difference, relative to the row; *most: that of an element. Not finite: infinity. */
static double row_difference(const race *r, double *most) {
    const tensors *d = &r->d;
    int32_t dim = r->problem.dim_v;
    double worst = 0;
    *most = 0;
    for (int64_t row = 0; row < d->count[T_O]; row += dim) {
        double error = 0, norm = 0;
        for (int64_t i = row; i < row + dim; i++) {
            double want = attn__load(d->dtype[T_O], r->o, i);
            double difference = fabs(attn__load(d->dtype[T_O], d->memory[T_O], i) - want);
            error += difference * difference;
            norm += want * want;
            if (!(difference <= *most)) *most = difference; /* a NaN stays, or is followed by what is no better */
        }
        double relative = error == 0 ? 0 : sqrt(error / norm);
        if (!isfinite(relative)) return *most = INFINITY;
        if (relative > worst) worst = relative;
    }
    return worst;
}

static double lse_difference(const race *r) {
    const float *want = r->lse, *have = r->d.memory[T_LSE];
    double worst = 0;
    for (int64_t i = 0; i < r->d.count[T_LSE]; i++) {
        if (want[i] == have[i]) continue; /* -inf too */
        double difference = fabs((double)want[i] - have[i]);
        if (!(difference <= worst)) worst = isfinite(difference) ? difference : INFINITY;
    }
    return worst;
}

/* Of the library's choice's family and number of keys? Two such kernels of the library give the same bits. */
static bool has_same_tiles(const race *r, const candidate *c) {
    const attn_cuda_entry *own = &attn__cuda_entries[r->slot];
    return c->entry.bn == own->bn && c->entry.hopper == own->hopper;
}

static int compare(race *r, int n) {
    candidate *c = &r->candidates[n];
    const tensors *d = &r->d;
    int code = run_once(r, c);
    if (code != TOOL_OK) return code;
    bool same_tiles = has_same_tiles(r, c), own = r->ladder.at[n].entry >= 0;
    double row = row_difference(r, &c->most);
    c->same_bits = memcmp(r->o, d->memory[T_O], (size_t)d->count[T_O] * attn_dtype_size(d->dtype[T_O])) == 0 &&
                   memcmp(r->lse, d->memory[T_LSE], (size_t)d->count[T_LSE] * sizeof(float)) == 0;
    c->right = row <= ROW_BARS * accuracy_bar(&r->problem, true) && lse_difference(r) <= LSE_BAR &&
               (c->same_bits || !own || !same_tiles);
    return TOOL_OK;
}

/* The library's choice: its results are kept, and must be numbers. */
static int run_reference(race *r) {
    tensors *d = &r->d;
    int code = run_once(r, NULL);
    if (code != TOOL_OK) return code;
    memcpy(r->o, d->memory[T_O], (size_t)d->count[T_O] * attn_dtype_size(d->dtype[T_O]));
    memcpy(r->lse, d->memory[T_LSE], (size_t)d->count[T_LSE] * sizeof(float));
    double most;
    if (!isfinite(row_difference(r, &most)))
        return tool_error(TOOL_FAILED, "tune: %s gives results that are not finite", attn_plan_kernel(r->plan));
    return TOOL_OK;
}

/* ---- a race ---- */

static void race_free(race *r) {
    for (int n = 0; r->candidates && n < r->ladder.count; n++) {
        if (r->candidates[n].library) cuda_of(r)->state->driver->cuLibraryUnload(r->candidates[n].library);
        free(r->candidates[n].image);
    }
    free(r->candidates);
    free(r->o);
    free(r->lse);
    if (r->copies) free_copies(r->copies, r->at->d);
    free_data(&r->d);
    attn_plan_destroy(r->plan);
    free(r);
}

/* Memory for the tensors, here and there. */
static int make_tensors(race *r, uint64_t seed) {
    if (!make_data(&r->d, &r->problem, seed)) return TOOL_RUNTIME;
    r->copies = make_copies(&r->d, r->at->d, attn_plan_workspace(r->plan));
    r->o = tool_alloc(r->d.count[T_O], attn_dtype_size(r->d.dtype[T_O]));
    r->lse = tool_alloc(r->d.count[T_LSE], sizeof(float));
    if (!r->copies || !r->o || !r->lse) return TOOL_RUNTIME;
    for (int n = 0; n < r->copies->count; n++) {
        attn_status status = attn__buffers_check(&r->buffers[n], r->plan, &r->copies->buffers[n]);
        if (status != ATTN_OK) return tool_status("tune", status);
    }
    return TOOL_OK;
}

static int make_ladder(race *r, const tune_settings *s) {
    const attn_cuda_entry *own = r->plan->kernel->impl;
    int code = s->kernels ? ladder_read(&r->ladder, s->kernels) : TOOL_OK;
    if (code != TOOL_OK) return code;
    ladder_add_library(&r->ladder);
    ladder_keep(&r->ladder, own, &r->problem, r->gpu);
    r->slot = (int)(own - attn__cuda_entries);
    if (own->decode) return tool_error(TOOL_USAGE, "tune: so few rows have one kernel, %s", own->name);
    memcpy(r->entries, attn__cuda_entries, sizeof r->entries);
    r->candidates = tool_alloc(r->ladder.count, sizeof *r->candidates);
    if (!r->candidates) return TOOL_RUNTIME;
    memset(r->candidates, 0, (size_t)r->ladder.count * sizeof *r->candidates);
    for (int n = 0; n < r->ladder.count && code == TOOL_OK; n++) code = load_candidate(r, n, s->kernels);
    memcpy(r->kernels, cuda_of(r)->kernel, sizeof r->kernels);
    return code;
}

static int prepare(race *r, const tune_settings *s) {
    attn_status status = attn_plan_create(&r->plan, r->at->context, &r->problem);
    if (status != ATTN_OK) return tool_status("tune", status);
    r->problem = r->plan->problem;
    const attn_cuda_entry *own = r->plan->kernel->impl;
    size_t each = attn_dtype_size(r->problem.dtype);
    if (!own->dtype)
        return tool_error(TOOL_USAGE, "tune: --dim %d: only %s takes it; there is nothing to choose", r->problem.dim_qk,
                          own->name);
    if (r->problem.dim_qk * each % 16 || r->problem.dim_v * each % 16)
        return tool_error(TOOL_USAGE, "tune: --dim %d/%d: rows must be multiples of 16 bytes", r->problem.dim_qk,
                          r->problem.dim_v);
    int code = make_tensors(r, s->common.seed);
    return code == TOOL_OK ? make_ladder(r, s) : code;
}

static int run_race(race *r, int rounds) {
    int code = run_reference(r), count = r->ladder.count;
    for (int n = 0; n < count && code == TOOL_OK; n++) {
        progress("comparing", n, count);
        code = compare(r, n);
    }
    for (int n = 0; n < rounds * count && code == TOOL_OK; n++) {
        progress("timing", n, (long)rounds * count);
        code = take_turn(r, &r->candidates[n % count]);
    }
    progress_end();
    for (int n = 0; n < count && code == TOOL_OK; n++) {
        candidate *c = &r->candidates[n];
        c->ms = median(c->times, c->count);
    }
    return code;
}

/* ---- output ---- */

static void version_text(char text[16]) {
    int version = attn_version();
    snprintf(text, 16, "%d.%d.%d", version / 10000, version / 100 % 100, version % 100);
}

static double tflops(const race *r, const candidate *c) { return 1e-9 * count_flops(&r->problem) / c->ms; }

static void print_head(const race *r) {
    const attn_problem *p = &r->problem;
    char version[16];
    version_text(version);
    printf("%s, sm_%d, driver for CUDA %d.%d, libattn %s\n", r->gpu->name, r->gpu->arch, cuda_of(r)->state->version / 1000,
           cuda_of(r)->state->version % 1000 / 10, version);
    printf("%s, batch %d, heads %d/%d, dim %d/%d, seqlen %d/%d, %s\n", attn_dtype_name(p->dtype), p->batch, p->heads_q,
           p->heads_kv, p->dim_qk, p->dim_v, p->max_q, p->max_kv, p->flags & ATTN_CAUSAL ? "causal" : "full");
    printf("%3s  %-28s %-36s %4s %9s %8s %8s %8s  %s\n", "", "kernel", "changes", "from", "registers", "TFLOP/s", "on that",
           "on 1", "difference");
}

/* The share by which a is faster than b, in percent. */
static double gain(const candidate *a, const candidate *b) { return 100 * (b->ms / a->ms - 1); }

static void print_row(const race *r, int n) {
    const candidate *c = &r->candidates[n];
    int from = ladder_from(&r->ladder, n);
    char changes[256] = "", registers[32], difference[32] = "same bits", base[16] = "", on_that[16] = "", on_first[16] = "";
    if (from >= 0) {
        rung_changes(&r->ladder.at[from], &r->ladder.at[n], changes, sizeof changes);
        snprintf(base, sizeof base, "%d", from + 1);
        snprintf(on_that, sizeof on_that, "%+.1f%%", gain(c, &r->candidates[from]));
        snprintf(on_first, sizeof on_first, "%+.1f%%", gain(c, &r->candidates[0]));
    }
    snprintf(registers, sizeof registers, c->stack_bytes ? "%d+%dB" : "%d", c->registers, c->stack_bytes);
    if (!c->same_bits) snprintf(difference, sizeof difference, "%.1e", c->most);
    printf("%3d  %-28s %-36s %4s %9s %8.1f %8s %8s  %s%s\n", n + 1, c->entry.name, changes, base, registers, tflops(r, c),
           on_that, on_first, difference, c->right ? "" : " WRONG");
}

static void print_json(const race *r, int n) {
    const attn_problem *p = &r->problem;
    const candidate *c = &r->candidates[n];
    const rung *line = &r->ladder.at[n];
    int from = ladder_from(&r->ladder, n);
    char changes[256] = "", most[32] = "null";
    if (from >= 0) rung_changes(&r->ladder.at[from], line, changes, sizeof changes);
    if (isfinite(c->most)) snprintf(most, sizeof most, "%.3g", c->most);
    printf("{\"gpu\": ");
    tool_json(r->gpu->name);
    printf(", \"sm\": %d, \"dtype\": \"%s\", \"batch\": %d, \"heads_q\": %d, \"heads_kv\": %d, \"dim_qk\": "
           "%d, \"dim_v\": %d, \"seqlen_q\": %d, \"seqlen_kv\": %d, \"causal\": %s, \"kernel\": \"%s\", \"library\": %s, ",
           r->gpu->arch, attn_dtype_name(p->dtype), p->batch, p->heads_q, p->heads_kv, p->dim_qk, p->dim_v, p->max_q,
           p->max_kv, p->flags & ATTN_CAUSAL ? "true" : "false", c->entry.name, line->entry >= 0 ? "true" : "false");
    printf("\"changes\": \"%s\", \"from\": %s%s%s, \"registers\": %d, \"stack_bytes\": %d, \"shared_bytes\": %zu, \"ms\": "
           "%.6g, \"tflops\": %.6g, \"difference\": %s, \"same_bits\": %s, \"right\": %s}\n",
           changes, from < 0 ? "" : "\"", from < 0 ? "null" : r->ladder.at[from].name, from < 0 ? "" : "\"", c->registers,
           c->stack_bytes, c->entry.shared_bytes, c->ms, tflops(r, c), most, c->same_bits ? "true" : "false",
           c->right ? "true" : "false");
}

/* ---- the tuning file ---- */

typedef struct outcome {
    size_t used;
    char text[MOST_TEXT];
} outcome;

/* The fastest of the library's kernels that may stand in for its choice; -1: none is right. */
static int fastest(const race *r, attn_cuda_takes wanted) {
    int best = -1;
    for (int n = 0; n < r->ladder.count; n++) {
        const candidate *c = &r->candidates[n];
        bool may = r->ladder.at[n].entry >= 0 && c->right && c->entry.takes >= wanted && has_same_tiles(r, c);
        if (may && (best < 0 || c->ms < r->candidates[best].ms)) best = n;
    }
    return best;
}

/* What was measured on a problem for kernels that take every feature says nothing of plain ones. */
static void note_fastest(const race *r, outcome *out, bool json) {
    const bool hopper = attn__cuda_entries[r->slot].hopper;
    for (attn_cuda_takes wanted = attn__cuda_wants(&r->problem, hopper, true); wanted <= ATTN_TAKES_ALL; wanted++) {
        int best = hopper || wanted != ATTN_TAKES_OWN ? fastest(r, wanted) : -1;
        if (best < 0) continue;
        const candidate *c = &r->candidates[best];
        if (!json) printf("fastest %-5s %s\n", attn__cuda_takes_name[wanted], c->entry.name);
        int length = snprintf(out->text + out->used, MOST_TEXT - out->used, "sm_%d %s d%d %-5s %s # %.1f TFLOP/s\n",
                              r->gpu->arch, attn_dtype_name(c->entry.dtype), c->entry.dim, attn__cuda_takes_name[wanted],
                              c->entry.name, tflops(r, c));
        if ((size_t)length < MOST_TEXT - out->used) out->used += (size_t)length;
    }
}

static void print_file(FILE *file, const place *at, const tune_settings *s, const outcome *out) {
    const attn_driver_state *state = at->context->cuda->state;
    char version[16], date[32];
    time_t now = time(NULL);
    struct tm utc;
    version_text(version);
    strftime(date, sizeof date, "%Y-%m-%d", gmtime_r(&now, &utc));
    fprintf(file, "# libattn %s, %s, driver for CUDA %d.%d, %s\n", version, state->gpu[0].name, state->version / 1000,
            state->version % 1000 / 10, date);
    fprintf(file, "# attn tune --batch %d --heads %d/%d --seqlen %d/%d%s\n", s->common.batch.at[0][0],
            s->common.heads.at[0][0], s->common.heads.at[0][1], s->common.seqlen.at[0][0], s->common.seqlen.at[0][1],
            s->common.problem.flags & ATTN_CAUSAL ? " --causal" : "");
    fwrite(out->text, 1, out->used, file);
}

static int write_file(const place *at, const tune_settings *s, const outcome *out) {
    char temporary[PATH_MAX];
    if ((size_t)snprintf(temporary, sizeof temporary, "%s.tmp-%ld", s->write, (long)getpid()) >= sizeof temporary)
        return tool_error(TOOL_USAGE, "%.64s...: the path is too long", s->write);
    errno = EIO; /* what a fault leaves to be reported */
    FILE *file = attn__fault(ATTN_FAULT_FILE) ? NULL : fopen(temporary, "wx");
    if (!file) return tool_error(TOOL_RUNTIME, "%s: cannot be created: %s", s->write, strerror(errno));
    print_file(file, at, s, out);
    bool written = !ferror(file) && !attn__fault(ATTN_FAULT_FILE);
    written = fclose(file) == 0 && written;
    if (written && !attn__fault(ATTN_FAULT_FILE) && rename(temporary, s->write) == 0) return TOOL_OK;
    int reason = errno;
    unlink(temporary);
    return tool_error(TOOL_RUNTIME, "%s: cannot be written: %s", s->write, strerror(reason));
}

/* ---- the command ---- */

static int tune_one(const place *at, const attn_problem *p, const tune_settings *s, outcome *out) {
    race *r = tool_alloc(1, sizeof *r);
    if (!r) return TOOL_RUNTIME;
    memset(r, 0, sizeof *r);
    r->at = at;
    r->gpu = &at->context->cuda->state->gpu[0]; /* device_open takes the first one */
    r->problem = *p;
    int code = prepare(r, s), wrong = 0;
    if (code == TOOL_OK) code = run_race(r, s->rounds);
    if (code == TOOL_OK) {
        if (!s->json) print_head(r);
        for (int n = 0; n < r->ladder.count; n++) {
            (s->json ? print_json : print_row)(r, n);
            wrong += !r->candidates[n].right;
        }
        note_fastest(r, out, s->json);
        code = tool_flush();
        if (wrong && code == TOOL_OK) code = tool_error(TOOL_FAILED, "tune: %d kernels are wrong", wrong);
    }
    race_free(r);
    return code;
}

static int tune_all(const place *at, const tune_settings *s, outcome *out) {
    const settings *c = &s->common;
    int code = TOOL_OK, worst = TOOL_OK;
    for (int n = 0; n < s->dtypes.count * c->dim.count && code <= TOOL_FAILED; n++) {
        attn_problem p = c->problem;
        p.dtype = s->dtypes.at[n / c->dim.count];
        p.dim_qk = c->dim.at[n % c->dim.count][0];
        p.dim_v = c->dim.at[n % c->dim.count][1];
        p.batch = c->batch.at[0][0];
        p.heads_q = c->heads.at[0][0];
        p.heads_kv = c->heads.at[0][1];
        p.max_q = c->seqlen.at[0][0];
        p.max_kv = c->seqlen.at[0][1];
        code = tune_one(at, &p, s, out);
        if (code > worst) worst = code;
    }
    if (s->write && worst <= TOOL_FAILED) code = write_file(at, s, out);
    return code > worst ? code : worst;
}

int cmd_tune(int argc, char **argv) {
    tune_settings s = {.rounds = ROUNDS, .dtypes = {1, {ATTN_BF16}}};
    int code = options_parse(&tune, &s, argc, argv);
    if (code != OPTIONS_GO) return code;
    if (s.common.batch.count > 1 || s.common.heads.count > 1 || s.common.seqlen.count > 1)
        return tool_error(TOOL_USAGE, "tune: one --batch, one --heads and one --seqlen; lists are for --dtype and --dim");
    if (s.rounds < 1 || s.rounds > MAX_ROUNDS) return tool_error(TOOL_USAGE, "tune: --rounds from 1 to %d", MAX_ROUNDS);
    for (int n = 0; n < s.dtypes.count; n++)
        if (s.dtypes.at[n] != ATTN_BF16 && s.dtypes.at[n] != ATTN_F16 && s.dtypes.at[n] != ATTN_F32)
            return tool_error(TOOL_USAGE, "tune: --dtype %s: there is no choice; bf16, f16 or f32 is wanted",
                              attn_dtype_name(s.dtypes.at[n]));
    s.common.config.backend = ATTN_BACKEND_CUDA;
    s.common.config.threads = 1;
    outcome *out = tool_alloc(1, sizeof *out);
    if (!out) return TOOL_RUNTIME;
    out->used = 0;
    place at = {NULL, NULL};
    code = open_place(&at, &s.common.config, "tune");
    if (code == TOOL_OK) code = tune_all(&at, &s, out);
    close_place(&at);
    free(out);
    return code;
}
