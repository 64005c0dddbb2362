/*
 * Contexts for the tests: by backend, and for the cpu backend by instruction set, so that every row of its kernel table is
 * held to the same contract; and the comparison of results within a tolerance.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "build.h"
#include "numeric.h"
#include "test.h"

int32_t wide_dim(int index) {
    static const int32_t dims[] = {64, 128, 192, 256, 0}, one[] = {192, 0};
    return on_host() ? one[index] : dims[index];
}

attn_context *make_context(attn_backend_id backend, int32_t threads) {
    attn_context *context;
    attn_config config = {.size = sizeof config, .backend = backend, .threads = threads};
    return attn_context_create(&context, &config) == ATTN_OK ? context : NULL;
}

/* Kernel names are op_isa_dtype: the ISAs are those of the forward kernels that can run here; only ATTN_TEST_ISA, if set. */
const char *cpu_isa(int index) {
    static char isa[32];
    char name[sizeof isa];
    const char *only = getenv("ATTN_TEST_ISA");
    attn_kernel_info info;
    isa[0] = '\0';
    for (int32_t i = 0; attn_kernel_get(i, &info, sizeof info) == ATTN_OK; i++) {
        const char *dtype = strstr(info.name, "_f32");
        if (!dtype) dtype = strstr(info.name, "_bf16"); /* one that has only that */
        if (strcmp(info.backend, "cpu") != 0 || !info.available || strncmp(info.name, "fwd_", 4) != 0 || !dtype) continue;
        snprintf(name, sizeof name, "%.*s", (int)(dtype - info.name - 4), info.name + 4);
        if (strcmp(name, isa) == 0) continue; /* for another dtype */
        snprintf(isa, sizeof isa, "%s", name);
        if ((only && strcmp(only, isa) != 0) || index-- > 0) continue;
        return isa;
    }
    return NULL;
}

void use_isa(const char *isa) {
    if (isa)
        setenv("ATTN_CPU", isa, 1);
    else
        unsetenv("ATTN_CPU");
}

/*
 * From here on only what has gone wrong is a check: a test whose body checks nothing is to be found out (main.c).
 */
attn_context *make_cpu_context(const char *isa, int32_t threads) {
    use_isa(isa);
    attn_context *context = make_context(ATTN_BACKEND_CPU, threads);
    attn_problem p = problem(ATTN_BF16, 1, 1, 1, 1, 1, 1);
    attn_plan *plan;
    if (!context) return NULL;
    if (attn_plan_create(&plan, context, &p) != ATTN_OK) {
        CHECK_SAY(false, "ATTN_CPU=%s: %s", isa, attn_error_detail());
        return context;
    }
    char name[32];
    snprintf(name, sizeof name, "fwd_%s_", isa);
    if (strncmp(attn_plan_kernel(plan), name, strlen(name)) != 0)
        CHECK_SAY(false, "ATTN_CPU=%s gives %s", isa, attn_plan_kernel(plan));
    attn_plan_destroy(plan);
    return context;
}

/* The backend of ATTN_TEST_BACKEND; NULL when it cannot be had. */
static attn_context *make_tested_context(void) {
    const char *name = getenv("ATTN_TEST_BACKEND");
    attn_backend_id id = strcmp(name, "cuda") == 0 ? ATTN_BACKEND_CUDA : ATTN_BACKEND_CPU;
    if (id != ATTN_BACKEND_CUDA && strcmp(name, "copies") != 0) {
        CHECK_SAY(false, "ATTN_TEST_BACKEND=%s: want cuda or copies", name);
        return NULL;
    }
    attn_context *context = make_context(id, 2);
    if (!context) CHECK_SAY(false, "ATTN_TEST_BACKEND=%s: %s", name, attn_error_detail());
    return context;
}

static void each_dtype(const char *name, attn_context *context, void (*body)(attn_context *context, attn_dtype dtype)) {
    static const attn_dtype dtypes[] = {ATTN_F32, ATTN_F16, ATTN_BF16, ATTN_F64};
    const char *only = getenv("ATTN_TEST_DTYPE");
    int count = 0;
    for (size_t d = 0; d < sizeof dtypes / sizeof *dtypes && context; d++) {
        if (only && strcmp(only, attn_dtype_name(dtypes[d])) != 0) continue;
        test_context("%s %s", name, attn_dtype_name(dtypes[d]));
        body(context, dtypes[d]);
        count++;
    }
    if (!count && context) CHECK_SAY(false, "ATTN_TEST_DTYPE=%s: want f32, f16, bf16 or f64", only);
    test_context(NULL);
    attn_context_destroy(context);
}

void each_cpu(void (*body)(attn_context *context, attn_dtype dtype)) {
    if (!on_host()) {
        each_dtype(getenv("ATTN_TEST_BACKEND"), make_tested_context(), body);
        return;
    }
    if (!cpu_isa(0)) CHECK_SAY(false, "no instruction set");
    const char *isa;
    for (int i = 0; (isa = cpu_isa(i)) != NULL; i++) {
        attn_context *context = make_cpu_context(isa, 2);
        if (!context) {
            CHECK_SAY(false, "no context: %s", attn_error_detail());
            return;
        }
        each_dtype(isa, context, body);
        use_isa(NULL);
    }
}

void each_host(void (*body)(attn_context *context, attn_dtype dtype, double tolerance)) {
    for (attn_backend_id backend = ATTN_BACKEND_REF; backend <= ATTN_BACKEND_CPU; backend++) {
        if (!on_host() && backend == ATTN_BACKEND_REF) continue;
        attn_context *context = on_host() ? make_context(backend, 2) : make_tested_context();
        if (!context) {
            CHECK_SAY(false, "no context: %s", attn_error_detail());
            return;
        }
        test_context("%s f32", attn_context_backend(context));
        body(context, ATTN_F32, 2e-5);
        test_context("%s f64", attn_context_backend(context));
        body(context, ATTN_F64, 1e-12);
        attn_context_destroy(context);
    }
    test_context(NULL);
}

static void check_rows(const rig *a, const rig *b, int32_t n, double tolerance) {
    const attn_problem *p = &a->full;
    for (int32_t h = 0; h < p->heads_q; h++)
        for (int32_t i = 0; i < rig_sq(a, n); i++) {
            CHECK_CLOSE(rig_lse(a, n, i, h), rig_lse(b, n, i, h), tolerance);
            for (int32_t x = 0; x < p->dim_v; x++) CHECK_CLOSE(rig_o(a, n, i, h, x), rig_o(b, n, i, h, x), tolerance);
            for (int32_t x = 0; a->backward && x < p->dim_qk; x++)
                CHECK_CLOSE(attn__load(p->dtype, rig_row(a, &a->f.d_q, p->dtype, n, i, h), x),
                            attn__load(p->dtype, rig_row(b, &b->f.d_q, p->dtype, n, i, h), x), tolerance);
        }
}

static void check_keys(const rig *a, const rig *b, int32_t n, double tolerance) {
    const attn_problem *p = &a->full;
    int32_t keys = rig_sk(a, n) < rig_sk(b, n) ? rig_sk(a, n) : rig_sk(b, n);
    for (int32_t h = 0; h < p->heads_kv; h++)
        for (int32_t j = 0; j < keys; j++) {
            for (int32_t x = 0; x < p->dim_qk; x++)
                CHECK_CLOSE(attn__load(p->kv_dtype, rig_key(a, &a->f.d_k, p->kv_dtype, n, j, h), x),
                            attn__load(p->kv_dtype, rig_key(b, &b->f.d_k, p->kv_dtype, n, j, h), x), tolerance);
            for (int32_t x = 0; x < p->dim_v; x++)
                CHECK_CLOSE(attn__load(p->kv_dtype, rig_key(a, &a->f.d_v, p->kv_dtype, n, j, h), x),
                            attn__load(p->kv_dtype, rig_key(b, &b->f.d_v, p->kv_dtype, n, j, h), x), tolerance);
        }
}

void rig_check_close(const rig *a, const rig *b, double tolerance) {
    for (int32_t n = 0; n < a->full.batch; n++) {
        check_rows(a, b, n, tolerance);
        if (a->backward) check_keys(a, b, n, tolerance);
    }
}

rig rig_reference(const rig *r, uint64_t seed) {
    rig expected = {.p = r->p, .backward = r->backward};
    attn_context *ref = make_context(ATTN_BACKEND_REF, 1);
    CHECK(rig_make(&expected, seed));
    for (int n = 0; n < r->blocks && n < expected.blocks; n++)
        if (r->block[n].kind == RIG_INPUT) memcpy(expected.block[n].data, r->block[n].data, r->block[n].bytes);
    CHECK_OK(rig_run(&expected, ref));
    attn_context_destroy(ref);
    return expected;
}

void rig_one_hot(const rig *r) {
    const int32_t dim = r->full.dim_v;
    for (int32_t x = 0; x < r->p.max_q * dim; x++) attn__store(r->p.dtype, r->f.d_o.data, x, x / dim == x % dim);
}
double rig_sum_of_p(const rig *r, int32_t row) {
    double sum = 0;
    for (int32_t j = 0; j < r->p.max_kv; j++)
        sum += attn__load(r->full.kv_dtype, r->f.d_v.data, (int64_t)j * r->full.dim_v + row);
    return sum;
}
