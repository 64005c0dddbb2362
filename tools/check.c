/*
 * `attn check`: random differential test of a backend against `ref`.
 *
 * For each number a case is drawn and its memory poisoned (cases.h), the oracle asked (compare.h), the backend run, and its
 * result judged row by row. Some cases run a second time with another number of threads and must give the same bits. A
 * failure prints the case in words and the command that repeats it alone.
 *
 * On a GPU every array is copied into an allocation of its own (device.h), just as large as it has to be, so that
 * compute-sanitizer sees the first byte too far, and is copied back for the judgement.
 */
#define _POSIX_C_SOURCE 200809L
#include "check.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "cases.h"
#include "compare.h"
#include "device.h"
#include "tool.h"

enum {
    SHOWN = 10,       /* failures that are described; the rest is counted */
    KERNELS = 128,    /* that are told apart */
    PIECES_EVERY = 8, /* with so many cases attn_merge and attn_rotary are tested once */
};

typedef struct check_settings {
    settings base;
    int32_t cases, only, repeat;
    uint64_t seed;
    bool seed_given, verbose, list, bars, copies;
    const char *features;
    case_filter filter;
} check_settings;

/* Which features, dtypes and operations the cases had. */
typedef struct coverage {
    long by_size[FEATURES][4]; /* drawn alone, with one other, with two, with more */
    uint64_t pairs[FEATURES];  /* bit b of pairs[a], a < b: drawn together */
    uint64_t triples[FEATURES][FEATURES];
    long kinds[3][ATTN_I8 + 1]; /* by operation and dtype */
    long kv_kinds[ATTN_I8 + 1];
    struct {
        const char *name;
        long count;
    } kernels[KERNELS]; /* as plans name them, in the order in which they came */
} coverage;

/* ---- one case ---- */

/* Is everything around the workspace as it was? */
static bool margins_intact(const unsigned char *begin, size_t watched, const unsigned char *data, size_t bytes) {
    for (const unsigned char *p = begin; p < begin + watched; p++) {
        if ((p < data || p >= data + bytes) && *p != 0xff) return false;
    }
    return true;
}

static void refuse(verdict *v, const char *who, attn_status status) {
    if (status != ATTN_OK) verdict_fail(v, "%s: %s: %s", who, attn_status_name(status), attn_error_detail());
}

/* The workspace of a plan, and the memory around it that is watched. */
typedef struct scratch {
    unsigned char *data, *begin;
    size_t bytes, watched;
} scratch;

/*
 * A copy lies like the array itself: it ends or begins where its allocation does, and on the other side there is a margin. It
 * has the same alignment, too, since that decides how a kernel reads.
 */
static bool add_to_mirror(mirror *m, const char *name, const void *data, size_t bytes, bool at_begin) {
    return mirror_add(m, name, data, bytes, at_begin ? 0 : (uintptr_t)data % 256, at_begin ? 64 : 0);
}

static bool mirror_case(mirror *m, check_case *c, const scratch *s) {
    for (int n = 0; n < c->block_count; n++) {
        const block *b = &c->blocks[n];
        size_t bytes = (size_t)b->count * (b->dtype ? attn_dtype_size(b->dtype) : sizeof(int32_t));
        if (!add_to_mirror(m, b->name, b->data, bytes, b->begin == b->data)) return false;
    }
    return (!s->data || add_to_mirror(m, "workspace", s->data, s->bytes, s->begin == s->data)) && mirror_upload(m);
}

/* Runs the plan, or the one-shot call where there is none, on the device's memory. */
static attn_status run_mirrored(check_case *c, attn_context *context, const contexts *j, const attn_plan *plan,
                                const scratch *s, verdict *v) {
    mirror m = {.d = j->device};
    void *stream = device_stream(j->device, 0);
    attn_status status = ATTN_OK;
    bool works = mirror_case(&m, c, s);
    if (works) {
        attn_buffers given = c->buffers, there;
        given.workspace = s->data;
        there = mirror_buffers(&m, &given);
        there.workspace_size = s->bytes;
        if (j->load) refuse(v, "load", load_run(j->load)); /* last: an upload would wait for it */
        status = plan                             ? attn_run(plan, &there, stream)
                 : c->problem.op == ATTN_FORWARD  ? attn_forward(context, &c->given, &there, stream)
                 : c->problem.op == ATTN_BACKWARD ? attn_backward(context, &c->given, &there, stream)
                                                  : attn_kv_append(context, &c->given, &there, stream);
        works = device_wait(j->device) && mirror_download(&m);
    }
    if (works && status == ATTN_OK) status = attn_device_status(context);
    if (works && mirror_damage(&m)) verdict_fail(v, "%s: memory around it was changed on the device", mirror_damage(&m));
    mirror_free(&m);
    if (!works) verdict_fail(v, "the device failed; nothing more can be run");
    v->broken |= !works;
    return status;
}

static attn_status run(check_case *c, attn_context *context, const contexts *j, verdict *v) {
    attn_plan *plan = NULL;
    scratch s = {NULL, NULL, 0, 0};
    if (c->one_shot) return run_mirrored(c, context, j, NULL, &s, v);
    attn_status status = attn_plan_create(&plan, context, &c->given);
    if (status != ATTN_OK) return status;
    int guard = c->guard_next;
    s.bytes = attn_plan_workspace(plan);
    s.data = guarded_bytes(c, s.bytes, 64, &s.begin, &s.watched);
    status = run_mirrored(c, context, j, plan, &s, v);
    if (!margins_intact(s.begin, s.watched, s.data, s.bytes))
        verdict_fail(v, "workspace: memory around its %zu bytes was changed", s.bytes);
    c->guard_next = guard;
    attn_plan_destroy(plan);
    return status;
}

/* Runs the case again on the other context: the same bits? The case is left with the first result. */
static void run_again(check_case *c, const contexts *j, int32_t times, verdict *v) {
    unsigned char *first[CASE_BLOCKS] = {0};
    for (int n = 0; n < c->block_count; n++) {
        first[n] = must_alloc((int64_t)c->blocks[n].bytes, 1);
        memcpy(first[n], c->blocks[n].begin, c->blocks[n].bytes);
    }
    for (int32_t time = 0; time < times && !v->failed; time++) {
        case_restore(c);
        refuse(v, attn_context_backend(j->other), run(c, j->other, j, v));
        for (int n = 0; n < c->block_count; n++)
            if (memcmp(c->blocks[n].begin, first[n], c->blocks[n].bytes) != 0)
                verdict_fail(v, "%s: other bits in run %d, with %d threads after %d", c->blocks[n].name, time + 2,
                             attn_context_threads(j->other), attn_context_threads(j->tested));
    }
    for (int n = 0; n < c->block_count; n++) {
        memcpy(c->blocks[n].begin, first[n], c->blocks[n].bytes);
        free(first[n]);
    }
}

/* The arithmetic of the kernels that the backend would take; for sequences of few rows attn_plan_describe says which, if it is another one. */
static ways find_ways(check_case *c, attn_context *tested, verdict *v) {
    static const char about_few[] = "sequences of at most ";
    attn_plan *plan;
    attn_status status = attn_plan_create(&plan, tested, &c->given);
    if (status == ATTN_OK) c->kernel = attn_plan_kernel(plan);
    const char *backend = attn_context_backend(tested), *said = status == ATTN_OK ? attn_plan_describe(plan) : "";
    ways how = {.many = arithmetic_of(backend, c->kernel ? c->kernel : "")};
    char few[64];
    for (said = strstr(said, about_few); said && !how.few_rows; said = strstr(said + 1, about_few)) {
        int32_t rows;
        if (sscanf(said + strlen(about_few), "%d rows: %63s", &rows, few) != 2)
            continue; /* says something else about them */
        how.few_rows = rows;
        how.few = arithmetic_of(backend, few);
    }
    refuse(v, backend, status);
    attn_plan_destroy(plan);
    return how;
}

static void check_case_run(check_case *c, const contexts *j, int32_t repeat, verdict *v) {
    oracle o;
    ways how = find_ways(c, j->tested, v);
    case_fill(c);
    refuse(v, "ref", oracle_run(&o, c, j->ref));
    case_seal(c);
    if (!v->failed) v->failed = !oracle_bound(&o, c, how, v->why, sizeof v->why);
    if (!v->failed) refuse(v, attn_context_backend(j->tested), run(c, j->tested, j, v));
    bool again = rng_chance(&c->rng, 15);
    if (!v->failed && (again || repeat > 1)) run_again(c, j, repeat, v);
    if (!v->failed) compare(v, c, &o);
    oracle_free(&o);
}

/* ---- report ---- */

/* The command that repeats one case, kept ready for the signal handler. */
static char repeat[512];

static void say_repeat(const check_settings *s, const char *backend, long number) {
    char threads[32] = "", op[32] = "", dtype[32] = "", again[32] = "";
    if (s->base.config.threads) snprintf(threads, sizeof threads, " --threads %d", s->base.config.threads);
    if (s->filter.op >= 0) snprintf(op, sizeof op, " --op %s", op_name((attn_op)s->filter.op));
    if (s->filter.dtype) snprintf(dtype, sizeof dtype, " --dtype %s", attn_dtype_name(s->filter.dtype));
    if (s->repeat > 1) snprintf(again, sizeof again, " --repeat %d", s->repeat);
    snprintf(repeat, sizeof repeat, "  repeat: attn check --backend %s%s --seed %llu --only %ld%s%s%s%s%s%s%.200s", backend,
             threads, (unsigned long long)s->seed, number, op, dtype, s->filter.small ? " --small" : "",
             s->copies ? " --copies" : "", again, s->features ? " --feature " : "", s->features ? s->features : "");
}

/* A kernel that runs into a guard page takes the program with it, but not without a word. */
static void on_signal(int signal) {
    static const char text[] = "\nattn: a kernel touched memory that is not its own\n";
    ssize_t done = write(STDERR_FILENO, text, sizeof text - 1);
    done = write(STDERR_FILENO, repeat, strlen(repeat));
    done = write(STDERR_FILENO, "\n", 1);
    (void)done;
    (void)signal;
    _exit(TOOL_FAILED);
}

static void count_coverage(coverage *k, const check_case *c) {
    int drawn = 0;
    for (int n = 0; n < FEATURES; n++) drawn += (c->drawn >> n) & 1;
    for (int a = 0; a < FEATURES; a++) {
        if (!(c->drawn & FEATURE_BIT(a))) continue;
        k->by_size[a][drawn > 4 ? 3 : drawn - 1]++;
        for (int b = a + 1; b < FEATURES; b++) {
            if (!(c->drawn & FEATURE_BIT(b))) continue;
            k->pairs[a] |= FEATURE_BIT(b);
            k->triples[a][b] |= c->drawn & ~((FEATURE_BIT(b) << 1) - 1);
        }
    }
    k->kinds[c->problem.op][c->problem.dtype]++;
    k->kv_kinds[c->problem.kv_dtype]++;
    for (int n = 0; n < KERNELS && c->kernel; n++) {
        if (k->kernels[n].name && strcmp(k->kernels[n].name, c->kernel) != 0) continue;
        k->kernels[n].name = c->kernel;
        k->kernels[n].count++;
        break;
    }
}

/* How many pairs and triples can be combined at all, and how many of them were. */
static void print_combinations(const coverage *k) {
    long pairs = 0, triples = 0, pairs_seen = 0, triples_seen = 0;
    for (int a = 0; a < FEATURES; a++) {
        for (int b = a + 1; b < FEATURES; b++) {
            if (!feature_combines(FEATURE_BIT(a) | FEATURE_BIT(b))) continue;
            pairs++;
            pairs_seen += (k->pairs[a] >> b) & 1;
            for (int c = b + 1; c < FEATURES; c++) {
                if (!feature_combines(FEATURE_BIT(a) | FEATURE_BIT(b) | FEATURE_BIT(c))) continue;
                triples++;
                triples_seen += (k->triples[a][b] >> c) & 1;
            }
        }
    }
    printf("pairs reached: %ld of %ld; triples reached: %ld of %ld\n\n", pairs_seen, pairs, triples_seen, triples);
}

static void print_coverage(const coverage *k) {
    printf("%-15s %8s %8s %8s %8s\n", "feature", "alone", "pairs", "triples", "more");
    for (int n = 0; n < FEATURES; n++) {
        const long *counts = k->by_size[n];
        printf("%-15s %8ld %8ld %8ld %8ld\n", feature_name((feature_id)n), counts[0], counts[1], counts[2], counts[3]);
    }
    print_combinations(k);
    printf("%-15s %8s %8s %8s %8s\n", "dtype", "forward", "backward", "append", "as kv");
    for (int d = ATTN_F32; d <= ATTN_I8; d++) {
        printf("%-15s %8ld %8ld %8ld %8ld\n", attn_dtype_name((attn_dtype)d), k->kinds[ATTN_FORWARD][d],
               k->kinds[ATTN_BACKWARD][d], k->kinds[ATTN_KV_APPEND][d], k->kv_kinds[d]);
    }
    printf("\n%-31s %8s\n", "kernel", "cases");
    for (int n = 0; n < KERNELS && k->kernels[n].name; n++) printf("%-31s %8ld\n", k->kernels[n].name, k->kernels[n].count);
}

static void print_case(const check_case *c, const verdict *v, double ms) {
    static char text[CASE_TEXT];
    case_describe(c, text, sizeof text);
    progress_end();
    printf("case %ld: %s, %.1f ms\n%s", c->number, v->failed ? "FAILED" : "passed", ms, text);
    if (v->failed) printf("  %s\n%s\n", v->why, repeat);
}

/* ---- the command ---- */

static const char *parse_filter_op(const char *text, void *target) {
    attn_op op;
    const char *wanted = parse_op(text, &op);
    if (!wanted) *(int *)target = (int)op;
    return wanted;
}

static const char *parse_seed(const char *text, void *target) {
    check_settings *s = (check_settings *)((char *)target - offsetof(check_settings, seed));
    s->seed_given = true;
    return parse_u64(text, target);
}

#define AT(field) offsetof(check_settings, field)
static const option options_check[] = {
    {"cases", "N", "how many cases (default 2000)", parse_int, AT(cases), 0},
    {"seed", "N", "seed; default: a new one each time, which is printed", parse_seed, AT(seed), 0},
    {"only", "N", "case N alone", parse_int, AT(only), 0},
    {"op", "NAME", "forward, backward or append only", parse_filter_op, AT(filter.op), 0},
    {"dtype", "NAME", "this dtype of q only", parse_dtype, AT(filter.dtype), 0},
    {"feature", "A,B...", "only cases that have all of these features", parse_text, AT(features), 0},
    {"small", NULL, "few rows, keys and dims, for compute-sanitizer and its like", parse_switch, AT(filter.small), 0},
    {"repeat", "N", "run every case N times more, on a busy GPU if it is one: the same bits", parse_int, AT(repeat), 0},
    {"copies", NULL, "host backends too work on copies, each in an allocation of its size", parse_switch, AT(copies), 0},
    {"list-features", NULL, "the features and what they are", parse_switch, AT(list), 0},
    {"verbose", NULL, "describe every case, not only the failing ones", parse_switch, AT(verbose), 0},
    {"bars", NULL, "the accuracy bars at 4096 x 4096 x 128 instead of random cases", parse_switch, AT(bars), 0},
    {0},
};

static const command check_command = {
    .name = "check",
    .usage = "[--backend cpu] [--cases 2000] [--seed N] [options]",
    .summary =
        "Runs random problems on a backend and compares every row with the `ref` backend. Memory that does not matter\n"
        "is NaN, arrays lie against guard pages, on a GPU at the end of allocations. The last line is\n"
        "`N passed, N failed`.\n",
    .examples = "attn check --backend cpu --cases 20000 --seed 1\n"
                "attn check --backend cpu --feature causal,dropout --op backward\n"
                "attn check --backend cpu --seed 1 --only 4711\n"
                "attn check --backend cpu --bars\n",
    .groups = {{"Which", options_check}, {"Machine", options_machine}, {NULL, NULL}},
};

static int parse_features(check_settings *s) {
    const char *at = s->features ? s->features : "";
    while (*at) {
        size_t length = strcspn(at, ",");
        feature_id id;
        if (!feature_find(at, length, &id))
            return tool_error(TOOL_USAGE, "--feature: no feature is called %.*s; attn check --list-features names them",
                              (int)length, at);
        s->filter.features |= FEATURE_BIT(id);
        at += length + (at[length] == ',');
    }
    return TOOL_OK;
}

/* Does the backend have a backward pass? If not, why. */
static attn_status find_backward(contexts *j, case_filter *filter) {
    attn_problem p = {.size = sizeof p, .op = ATTN_BACKWARD, .dtype = ATTN_F32, .batch = 1, .heads_q = 1, .heads_kv = 1};
    p.dim_qk = p.max_q = p.max_kv = 1;
    attn_plan *plan;
    attn_status status = attn_plan_create(&plan, j->tested, &p);
    attn_plan_destroy(plan);
    filter->no_backward = status == ATTN_UNSUPPORTED;
    snprintf(j->no_backward, sizeof j->no_backward, "%s", filter->no_backward ? attn_error_detail() : "");
    return filter->no_backward ? ATTN_OK : status;
}

static int open_contexts(check_settings *s, contexts *j) {
    attn_config ref = {.size = sizeof ref, .backend = ATTN_BACKEND_REF, .threads = 1}, tested = s->base.config;
    tested.size = sizeof tested;
    attn_status status = attn_context_create(&j->ref, &ref);
    if (status == ATTN_OK) status = attn_context_create(&j->tested, &tested);
    if (status == ATTN_OK) {
        tested.threads = attn_context_threads(j->tested) == 3 ? 1 : 3;
        status = attn_context_create(&j->other, &tested);
    }
    if (status == ATTN_OK) status = find_backward(j, &s->filter);
    if (status != ATTN_OK) return tool_status("check", status);
    if (s->filter.no_backward && s->filter.op == ATTN_BACKWARD) return tool_error(TOOL_USAGE, "check: %s", j->no_backward);
    j->device = device_open(j->tested, s->copies);
    if (!j->device) return TOOL_RUNTIME;
    if (s->repeat > 1 && device_is_gpu(j->device)) {
        j->load = load_make(j->other, j->device);
        if (!j->load) return TOOL_RUNTIME;
    }
    return TOOL_OK;
}

static void close_contexts(contexts *j) {
    load_free(j->load);
    if (j->device) device_close(j->device);
    attn_context_destroy(j->other);
    attn_context_destroy(j->tested);
    attn_context_destroy(j->ref);
}

static double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

static int run_cases(const check_settings *s, const contexts *j) {
    static coverage reached;
    static check_case c;
    const char *backend = attn_context_backend(j->tested);
    long first = s->only >= 0 ? s->only : 0, end = s->only >= 0 ? first + 1 : s->cases, passed = 0, failed = 0;
    long left_out = 0;
    verdict closest = {.worst_name = "none"};
    long closest_case = 0;
    printf("backend %s, %d threads%s%s, seed %llu\n", backend, attn_context_threads(j->tested),
           device_is_gpu(j->device) ? ", " : "", device_name(j->device), (unsigned long long)s->seed);
    fflush(stdout);
    bool broken = false;
    for (long n = first; n < end && !broken; n++) {
        verdict v = {.failed = false};
        double start = now_ms();
        say_repeat(s, backend, n);
        if (!case_draw(&c, &s->filter, s->seed, n))
            return tool_error(TOOL_USAGE, "--feature, --op, --dtype: no case can have all of these");
        check_case_run(&c, j, s->repeat, &v);
        if (n % PIECES_EVERY == 0 && !v.failed) check_pieces(&s->filter, j, s->seed, n, &v);
        left_out += c.left_out;
        count_coverage(&reached, &c);
        if (v.worst > closest.worst) {
            closest = v;
            closest_case = n;
        }
        v.failed ? failed++ : passed++;
        broken = v.broken;
        if (s->verbose || (v.failed && failed <= SHOWN)) print_case(&c, &v, now_ms() - start);
        case_free(&c);
        progress("check", n + 1 - first, end - first);
    }
    progress_end();
    if (s->only < 0) print_coverage(&reached);
    printf("\nlargest error that passed, rounding of the result apart: %.2f of what is allowed (%s of case %ld)\n",
           closest.worst, closest.worst_name, closest_case);
    if (left_out) printf("%ld cases that would have been backward ones were forward ones: %s\n", left_out, j->no_backward);
    printf("%ld passed, %ld failed\n", passed, failed);
    return failed ? TOOL_FAILED : tool_flush();
}

static void list_features(void) {
    for (int n = 0; n < FEATURES; n++) printf("%-15s %s\n", feature_name((feature_id)n), feature_help((feature_id)n));
}

int cmd_check(int argc, char **argv) {
    check_settings s = {.cases = 2000, .only = -1, .repeat = 1, .filter = {.op = -1}};
    int code = options_parse(&check_command, &s, argc, argv);
    if (code != OPTIONS_GO) return code;
    code = parse_features(&s);
    if (code != TOOL_OK) return code;
    if (s.cases < 1) return tool_error(TOOL_USAGE, "--cases %d: 1 or more are wanted", s.cases);
    if (s.repeat < 1) return tool_error(TOOL_USAGE, "--repeat %d: 1 or more are wanted", s.repeat);
    if (s.list) {
        list_features();
        return tool_flush();
    }
    if (!s.seed_given) s.seed = (uint64_t)time(NULL) * 1000003u + (uint64_t)getpid();
    contexts j = {0};
    code = open_contexts(&s, &j);
    if (code == TOOL_OK && s.bars) {
        code = check_bars(&j);
    } else if (code == TOOL_OK) {
        signal(SIGSEGV, on_signal);
        signal(SIGBUS, on_signal);
        code = run_cases(&s, &j);
    }
    close_contexts(&j);
    return code;
}
