/*
 * `attn check --bars`: the accuracy that is promised, at one head of 4096 x 4096 x 128 with inputs from N(0,1).
 *
 * Truth is `ref` on the same inputs as doubles. Errors are relative RMS over the whole tensor, of 16 bits also over the worst row of o; lse in
 * absolute terms.
 */
#define _GNU_SOURCE /* M_PI */
#include <math.h>
#include <stdlib.h>

#include "cases.h"
#include "check.h"
#include "numeric.h"
#include "tool.h"

enum { LENGTH = 4096, DIM = 128, COUNT = LENGTH * DIM };

static const struct bar {
    attn_dtype dtype;
    double o, gpu_o; /* f32 on a GPU goes through three TF32 products: float32 to 1e-5 is what is promised there */
    double row;      /* of o; 0: no bar */
    double lse;
    double gradient, gpu_gradient; /* 0: no bar; attn-tests has those of 16 bits on the host */
} bars[] = {{ATTN_F32, 1e-6, 1e-5, 0, 2e-6, 5e-6, 5e-6},
            {ATTN_F16, 2.9e-4, 2.9e-4, 4e-4, 2e-6, 0, 3.2e-4},
            {ATTN_BF16, 2.3e-3, 2.3e-3, 3.3e-3, 2e-6, 0, 2.5e-3}};
enum { BARS = sizeof bars / sizeof bars[0] };

/* The tensors of one side, in one dtype. */
typedef struct side {
    attn_dtype dtype;
    void *q, *k, *v, *o, *d_o, *d_q, *d_k, *d_v, *lse;
} side;

static side side_make(attn_dtype dtype) {
    side s = {.dtype = dtype};
    void **tensors[] = {&s.q, &s.k, &s.v, &s.o, &s.d_o, &s.d_q, &s.d_k, &s.d_v};
    for (int n = 0; n < 8; n++) *tensors[n] = must_alloc(COUNT, attn_dtype_size(dtype));
    s.lse = must_alloc(LENGTH, sizeof(double));
    return s;
}

static void side_free(side *s) {
    void *all[] = {s->q, s->k, s->v, s->o, s->d_o, s->d_q, s->d_k, s->d_v, s->lse};
    for (int n = 0; n < 9; n++) free(all[n]);
}

/* Gaussian, by Box and Muller; the tested side gets it rounded to its dtype, and the true side what that rounding left. */
static void fill(rng *r, const side *tested, void *to, void *exact) {
    for (int n = 0; n < COUNT; n++) {
        double radius = sqrt(-2 * log(((double)(rng_next(r) >> 11) + 0.5) * 0x1p-53));
        attn__store(tested->dtype, to, n, radius * cos(2 * M_PI * (double)(rng_next(r) >> 11) * 0x1p-53));
        ((double *)exact)[n] = attn__load(tested->dtype, to, n);
    }
}

/* Runs it on the device's memory and brings the results back. */
static attn_status run_side(const side *s, attn_context *context, device *d, attn_op op) {
    attn_problem p = {.size = sizeof p,
                      .op = op,
                      .dtype = s->dtype,
                      .batch = 1,
                      .heads_q = 1,
                      .heads_kv = 1,
                      .dim_qk = DIM,
                      .max_q = LENGTH,
                      .max_kv = LENGTH};
    attn_buffers f = {.size = sizeof f, .lse = s->lse};
    f.q = attn_dense(s->q, LENGTH, 1, DIM);
    f.k = attn_dense(s->k, LENGTH, 1, DIM);
    f.v = attn_dense(s->v, LENGTH, 1, DIM);
    f.o = attn_dense(s->o, LENGTH, 1, DIM);
    if (op == ATTN_BACKWARD) {
        f.d_o = attn_dense(s->d_o, LENGTH, 1, DIM);
        f.d_q = attn_dense(s->d_q, LENGTH, 1, DIM);
        f.d_k = attn_dense(s->d_k, LENGTH, 1, DIM);
        f.d_v = attn_dense(s->d_v, LENGTH, 1, DIM);
    }
    mirror m = {.d = d};
    const void *const tensors[8] = {s->q, s->k, s->v, s->o, s->d_o, s->d_q, s->d_k, s->d_v};
    bool works = mirror_add(&m, "lse", s->lse, LENGTH * sizeof(double), 0, 0);
    for (int n = 0; n < 8 && works; n++)
        works = mirror_add(&m, "tensor", tensors[n], COUNT * attn_dtype_size(s->dtype), 0, 0);
    works = works && mirror_upload(&m);
    attn_status status = ATTN_OK;
    if (works) {
        f = mirror_buffers(&m, &f);
        status = (op == ATTN_FORWARD ? attn_forward : attn_backward)(context, &p, &f, device_stream(d, 0));
        works = device_wait(d) && mirror_download(&m);
        if (status == ATTN_OK && works) status = attn_device_status(context);
    }
    mirror_free(&m);
    if (!works) exit(TOOL_RUNTIME); /* it was said why */
    return status;
}

/* Of the elements [from, to). */
static double rms_between(attn_dtype dtype, const void *got, const double *want, int from, int to) {
    double error = 0, size = 0;
    for (int n = from; n < to; n++) {
        double off = attn__load(dtype, got, n) - want[n];
        error += off * off;
        size += want[n] * want[n];
    }
    return sqrt(error / size);
}

static double relative_rms(attn_dtype dtype, const void *got, const double *want) {
    return rms_between(dtype, got, want, 0, COUNT);
}

static double worst_row(attn_dtype dtype, const void *got, const double *want) {
    double most = 0;
    for (int n = 0; n < COUNT; n += DIM) {
        double off = rms_between(dtype, got, want, n, n + DIM);
        if (isnan(off)) return off;
        most = fmax(most, off);
    }
    return most;
}

static double lse_error(const side *tested, const double *want) {
    double most = 0;
    for (int n = 0; n < LENGTH; n++) {
        double off = fabs(attn__load(ATTN_F32, tested->lse, n) - want[n]);
        if (isnan(off)) return off;
        most = fmax(most, off);
    }
    return most;
}

static void report(attn_dtype dtype, const char *what, double error, double bar, int *failed) {
    bool holds = error <= bar;
    progress_end();
    printf("%-6s %-6s %12.3g %12.3g  %s\n", attn_dtype_name(dtype), what, error, bar, holds ? "pass" : "FAIL");
    fflush(stdout);
    *failed += !holds;
}

/* One row of the table; passed and failed count its lines. */
static attn_status run_bar(const struct bar *bar, const contexts *j, device *host, long *done, int *failed) {
    rng r = rng_make(4096, (uint64_t)bar->dtype);
    side a = side_make(bar->dtype), truth = side_make(ATTN_F64);
    fill(&r, &a, a.q, truth.q);
    fill(&r, &a, a.k, truth.k);
    fill(&r, &a, a.v, truth.v);
    fill(&r, &a, a.d_o, truth.d_o);
    attn_status status = run_side(&a, j->tested, j->device, ATTN_FORWARD);
    if (status == ATTN_OK) status = run_side(&truth, j->ref, host, ATTN_FORWARD);
    if (status == ATTN_OK) {
        report(bar->dtype, "o", relative_rms(a.dtype, a.o, truth.o), device_is_gpu(j->device) ? bar->gpu_o : bar->o,
               failed);
        if (bar->row > 0) report(bar->dtype, "o, row", worst_row(a.dtype, a.o, truth.o), bar->row, failed);
        report(bar->dtype, "lse", lse_error(&a, truth.lse), bar->lse, failed);
        *done += 2 + (bar->row > 0);
    }
    const double most = device_is_gpu(j->device) ? bar->gpu_gradient : bar->gradient;
    bool backward = most > 0 && !j->no_backward[0];
    if (status == ATTN_OK && backward) status = run_side(&a, j->tested, j->device, ATTN_BACKWARD);
    if (status == ATTN_OK && backward) status = run_side(&truth, j->ref, host, ATTN_BACKWARD);
    if (status == ATTN_OK && backward) {
        report(bar->dtype, "d_q", relative_rms(a.dtype, a.d_q, truth.d_q), most, failed);
        report(bar->dtype, "d_k", relative_rms(a.dtype, a.d_k, truth.d_k), most, failed);
        report(bar->dtype, "d_v", relative_rms(a.dtype, a.d_v, truth.d_v), most, failed);
        *done += 3;
    }
    side_free(&a);
    side_free(&truth);
    return status;
}

int check_bars(const contexts *j) {
    int failed = 0;
    long done = 0;
    printf("backend %s, %d threads, %d queries x %d keys x %d dims, one head, N(0,1)\n", attn_context_backend(j->tested),
           attn_context_threads(j->tested), LENGTH, LENGTH, DIM);
    printf("%-6s %-6s %12s %12s\n", "dtype", "result", "error", "bar");
    device *host = device_open(j->ref, false);
    if (!host) return TOOL_RUNTIME;
    attn_status status = ATTN_OK;
    for (int n = 0; n < BARS && status == ATTN_OK; n++) {
        progress("bars", n, BARS);
        status = run_bar(&bars[n], j, host, &done, &failed);
    }
    device_close(host);
    progress_end();
    if (status != ATTN_OK) return tool_status("check --bars", status);
    if (j->no_backward[0]) printf("no gradients: %s\n", j->no_backward);
    printf("%ld passed, %d failed\n", done - failed, failed);
    return failed ? TOOL_FAILED : tool_flush();
}
