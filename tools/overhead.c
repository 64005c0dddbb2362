/*
 * `attn bench --suite overhead`: what attention costs where there is hardly any of it.
 *
 * A first call makes a context, a plan and the threads, and runs; once as the first thing that this process does, which
 * includes finding out what CPU this is, and again with a fresh context each time. A call with a plan is one of a few rows
 * and keys, again and again: what remains beside its few operations is the way from attn_run to the kernel and back. Batches
 * of calls are timed, for a clock that is read between each two would cost a part of what is measured. What a caller's
 * parallel_for costs is seen by one that runs two indices one after the other, in turns with a context of one thread; at
 * sizes of which both make the same units of work.
 */
#define _POSIX_C_SOURCE 200809L

#include <stdio.h>

#include "tool.h"
#include "workload.h"

enum { REPEAT = 31, CALLS = 32 };

/* Seconds: a core that had nothing to do, or now meets wider vectors, takes some milliseconds to come to its frequency. */
#define WARM_UP 0.02

typedef struct shape {
    int32_t rows, keys, heads;
} shape;

static attn_problem problem_of(shape s) {
    return (attn_problem){.size = sizeof(attn_problem),
                          .dtype = ATTN_F32,
                          .batch = 1,
                          .heads_q = s.heads,
                          .heads_kv = s.heads,
                          .dim_qk = 64,
                          .dim_v = 64,
                          .max_q = s.rows,
                          .max_kv = s.keys};
}

static void print_line(const char *what, shape s, int threads, double us, bool json) {
    if (json)
        printf("{\"suite\": \"overhead\", \"what\": \"%s\", \"rows\": %d, \"keys\": %d, \"heads\": %d, \"dim\": 64, "
               "\"threads\": %d, \"us\": %.6g}\n",
               what, s.rows, s.keys, s.heads, threads, us);
    else
        printf("%-52s %4d x %4d, %2d head%s of 64, %3d thread%s %10.2f us\n", what, s.rows, s.keys, s.heads,
               s.heads == 1 ? " " : "s", threads, threads == 1 ? " " : "s", us);
}

/* Microseconds from nothing to the first result. */
static attn_status first_call(const attn_config *config, const attn_problem *p, const tensors *t, double *us,
                              int *threads) {
    attn_context *context = NULL;
    double begin = tool_seconds();
    attn_status status = attn_context_create(&context, config);
    if (status == ATTN_OK) status = attn_forward(context, p, &t->buffers, NULL);
    *us = 1e6 * (tool_seconds() - begin);
    *threads = status == ATTN_OK ? attn_context_threads(context) : 0;
    attn_context_destroy(context);
    return status;
}

/* Large enough that every thread gets something to do. */
static attn_status time_first_calls(const attn_config *config, int repeat, bool json) {
    const shape s = {64, 64, 8};
    const attn_problem p = problem_of(s);
    double first, us[REPEAT];
    int threads = 0;
    tensors t;
    attn_status status = make_data(&t, &p, 0) ? ATTN_OK : ATTN_NO_MEMORY;
    if (status == ATTN_OK) status = first_call(config, &p, &t, &first, &threads);
    for (int n = 0; n < repeat && status == ATTN_OK; n++) status = first_call(config, &p, &t, &us[n], &threads);
    free_data(&t);
    if (status != ATTN_OK) return status;
    print_line("first call of the process: context, plan, threads", s, threads, first, json);
    print_line("first call of a further context", s, threads, median(us, repeat), json);
    return ATTN_OK;
}

/* The median over batches, for one call. */
static attn_status time_calls(const attn_context *context, attn_plan *plan, tensors *t, shape s, int repeat, bool json) {
    double us[REPEAT];
    attn_status status = ATTN_OK;
    double start = tool_seconds();
    for (int batch = 0; batch < repeat && status == ATTN_OK;) {
        double begin = tool_seconds();
        for (int n = 0; n < CALLS && status == ATTN_OK; n++) status = attn_run(plan, &t->buffers, NULL);
        if (begin - start >= WARM_UP) us[batch++] = 1e6 * (tool_seconds() - begin) / CALLS;
    }
    if (status == ATTN_OK) print_line("a call with a plan", s, attn_context_threads(context), median(us, repeat), json);
    return status;
}

static attn_status time_shape(const place *at, shape s, int repeat, bool json) {
    const attn_problem p = problem_of(s);
    attn_plan *plan = NULL;
    tensors t;
    attn_status status = make_data(&t, &p, 0) ? attn_plan_create(&plan, at->context, &p) : ATTN_NO_MEMORY;
    size_t bytes = status == ATTN_OK ? attn_plan_workspace(plan) : 0;
    void *workspace = device_alloc(at->d, bytes);
    if (status == ATTN_OK && !workspace) status = ATTN_NO_MEMORY;
    t.buffers.workspace = workspace;
    t.buffers.workspace_size = bytes;
    if (status == ATTN_OK) status = time_calls(at->context, plan, &t, s, repeat, json);
    device_free(at->d, workspace);
    attn_plan_destroy(plan);
    free_data(&t);
    return status;
}

static int one_after_the_other(void *user, void (*body)(void *arg, int32_t index), void *arg, int32_t count) {
    (void)user;
    for (int32_t index = 0; index < count; index++) body(arg, index);
    return 0;
}

/* One thread, and a caller's parallel_for, in turns: medians. */
static attn_status time_hook(const attn_config *config, shape s, int repeat, bool json) {
    const char *what[2] = {"a call without a plan, one thread", "the same, by a caller's parallel_for"};
    const attn_problem p = problem_of(s);
    attn_config configs[2] = {*config, *config};
    attn_context *context[2] = {NULL, NULL};
    double us[2][REPEAT];
    tensors t;
    configs[0].threads = 1;
    configs[1].threads = 2;
    configs[1].parallel_for = one_after_the_other;
    attn_status status = make_data(&t, &p, 0) ? ATTN_OK : ATTN_NO_MEMORY;
    for (int n = 0; n < 2 && status == ATTN_OK; n++) status = attn_context_create(&context[n], &configs[n]);
    double start = tool_seconds();
    for (int batch = 0; batch < repeat && status == ATTN_OK;) {
        const bool counts = tool_seconds() - start >= WARM_UP;
        for (int n = 0; n < 2; n++) {
            double begin = tool_seconds();
            for (int x = 0; x < CALLS && status == ATTN_OK; x++) status = attn_forward(context[n], &p, &t.buffers, NULL);
            us[n][batch] = 1e6 * (tool_seconds() - begin) / CALLS;
        }
        batch += counts;
    }
    for (int n = 0; n < 2; n++) {
        if (status == ATTN_OK) print_line(what[n], s, n + 1, median(us[n], repeat), json);
        attn_context_destroy(context[n]);
    }
    free_data(&t);
    return status;
}

int bench_overhead(const attn_config *config, int repeat, bool json) {
    static const shape shapes[] = {{1, 1, 1}, {1, 64, 1}, {1, 64, 8}, {16, 64, 8}};
    static const shape hooked[] = {{1, 64, 8}, {16, 64, 8}, {64, 64, 8}};
    place at = {NULL, NULL};
    if (config->backend == ATTN_BACKEND_CUDA)
        return tool_error(TOOL_USAGE, "bench: --suite overhead is about calls on the host, --backend ref or cpu");
    if (repeat < 1 || repeat > REPEAT) repeat = REPEAT;
    attn_status status = time_first_calls(config, repeat, json);
    if (status != ATTN_OK) return tool_status("bench", status);
    int code = open_place(&at, config, "bench");
    for (size_t n = 0; n < sizeof shapes / sizeof *shapes && code == TOOL_OK; n++) {
        status = time_shape(&at, shapes[n], repeat, json);
        if (status != ATTN_OK) code = tool_status("bench", status);
    }
    for (size_t n = 0; n < sizeof hooked / sizeof *hooked && code == TOOL_OK && config->backend != ATTN_BACKEND_REF; n++) {
        status = time_hook(config, hooked[n], repeat, json);
        if (status != ATTN_OK) code = tool_status("bench", status);
    }
    close_place(&at);
    return code == TOOL_OK ? tool_flush() : code;
}
