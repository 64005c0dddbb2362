/*
 * C3 for what is not a problem or a buffer: NULL arguments, the wrong function for an op, workspaces, and the fields of
 * attn_config, attn_merge_args and attn_rotary_args.
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "build.h"
#include "test.h"

/* ---- NULL, op, workspace ---- */

TEST(c3_null_arguments) {
    attn_context *context = make_context(ATTN_BACKEND_CPU, 1);
    rig r = {.p = problem(ATTN_F32, 1, 1, 1, 4, 4, 8)};
    CHECK(rig_make(&r, 1));
    attn_plan *plan;
    CHECK_STATUS(attn_context_create(NULL, NULL), ATTN_INVALID, "context=NULL");
    CHECK_STATUS(attn_plan_create(NULL, context, &r.p), ATTN_INVALID, "plan=NULL");
    CHECK_STATUS(attn_plan_create(&plan, NULL, &r.p), ATTN_INVALID, "context=NULL");
    CHECK_STATUS(attn_plan_create(&plan, context, NULL), ATTN_INVALID, "problem=NULL");
    CHECK(plan == NULL);
    CHECK_STATUS(attn_run(NULL, &r.f, NULL), ATTN_INVALID, "plan=NULL");
    CHECK_STATUS(attn_forward(NULL, &r.p, &r.f, NULL), ATTN_INVALID, "context=NULL");
    CHECK_STATUS(attn_forward(context, NULL, &r.f, NULL), ATTN_INVALID, "problem=NULL");
    CHECK_STATUS(attn_forward(context, &r.p, NULL, NULL), ATTN_INVALID, "buffers=NULL");
    CHECK_STATUS(attn_merge(context, NULL, NULL), ATTN_INVALID, "args=NULL");
    CHECK_STATUS(attn_rotary(context, NULL, NULL), ATTN_INVALID, "args=NULL");
    CHECK_STATUS(attn_kernel_get(0, NULL, sizeof(attn_kernel_info)), ATTN_INVALID, "info=NULL");
    attn_context_destroy(NULL);
    attn_plan_destroy(NULL);
    rig_free(&r);
    attn_context_destroy(context);
}

TEST(c3_op_and_function_must_agree) {
    attn_context *context = make_context(ATTN_BACKEND_CPU, 1);
    rig r = {.p = problem(ATTN_F32, 1, 1, 1, 4, 4, 8)};
    CHECK(rig_make(&r, 1));
    CHECK_STATUS(attn_backward(context, &r.p, &r.f, NULL), ATTN_INVALID, "op=0");
    CHECK_STATUS(attn_kv_append(context, &r.p, &r.f, NULL), ATTN_INVALID, "op=0");
    r.p.op = ATTN_BACKWARD;
    CHECK_STATUS(attn_forward(context, &r.p, &r.f, NULL), ATTN_INVALID, "op=1");
    rig_free(&r);
    attn_context_destroy(context);
}

TEST(c3_short_missing_and_misaligned_workspace) {
    for (attn_backend_id backend = ATTN_BACKEND_REF; backend <= ATTN_BACKEND_CPU; backend++) {
        attn_context *context = make_context(backend, 2);
        rig r = {.p = problem(ATTN_F32, 2, 2, 2, 90, 90, 24)}, untouched = r;
        CHECK(rig_make(&r, 1) && rig_make(&untouched, 1));
        attn_plan *plan;
        if (!CHECK_OK(attn_plan_create(&plan, context, &r.p))) return;
        size_t bytes = attn_plan_workspace(plan);
        CHECK(bytes > 0);
        char *memory = aligned_alloc(64, (bytes + 127) / 64 * 64);
        r.f.workspace = memory;
        r.f.workspace_size = bytes - 1;
        CHECK_STATUS(attn_run(plan, &r.f, NULL), ATTN_INVALID, "workspace_size=");
        r.f.workspace_size = 0;
        CHECK_STATUS(attn_run(plan, &r.f, NULL), ATTN_INVALID, "workspace_size=0");
        r.f.workspace = memory + 8;
        r.f.workspace_size = bytes;
        CHECK_STATUS(attn_run(plan, &r.f, NULL), ATTN_INVALID, "workspace=");
        r.f.workspace = NULL;
        CHECK_STATUS(attn_run(plan, &r.f, NULL), ATTN_INVALID, "workspace=NULL");
        CHECK(rig_same(&r, &untouched));
        r.f.workspace = memory;
        CHECK_OK(attn_run(plan, &r.f, NULL));
        r.f.workspace_size = bytes - 1; /* the one-shot call has its own when this one will not do */
        CHECK_OK(attn_forward(context, &r.p, &r.f, NULL));
        free(memory);
        attn_plan_destroy(plan);
        rig_free(&r);
        rig_free(&untouched);
        attn_context_destroy(context);
    }
}

static int visit_nothing(void *user, const attn_tile *tile) {
    (void)user, (void)tile;
    return 0;
}

TEST(c3_wrong_plan_tiles) {
    attn_context *cpu = make_context(ATTN_BACKEND_CPU, 1), *ref = make_context(ATTN_BACKEND_REF, 1);
    attn_problem p = problem(ATTN_F32, 2, 2, 1, 10, 10, 8);
    attn_buffers f = {.size = sizeof f};
    attn_plan *plan, *naive;
    if (!CHECK_OK(attn_plan_create(&plan, cpu, &p)) || !CHECK_OK(attn_plan_create(&naive, ref, &p))) return;
    CHECK_STATUS(attn_plan_tiles(plan, &f, 2, 0, visit_nothing, NULL), ATTN_INVALID, "batch=2");
    CHECK_STATUS(attn_plan_tiles(plan, &f, -1, 0, visit_nothing, NULL), ATTN_INVALID, "batch=-1");
    CHECK_STATUS(attn_plan_tiles(plan, &f, 0, 2, visit_nothing, NULL), ATTN_INVALID, "head=2");
    CHECK_STATUS(attn_plan_tiles(plan, &f, 0, 0, NULL, NULL), ATTN_INVALID, "visit=NULL");
    CHECK_STATUS(attn_plan_tiles(NULL, &f, 0, 0, visit_nothing, NULL), ATTN_INVALID, "plan=NULL");
    CHECK_STATUS(attn_plan_tiles(plan, NULL, 0, 0, visit_nothing, NULL), ATTN_INVALID, "buffers=NULL");
    CHECK_STATUS(attn_plan_tiles(naive, &f, 0, 0, visit_nothing, NULL), ATTN_UNSUPPORTED, "plan=");
    attn_plan_destroy(plan);
    attn_plan_destroy(naive);
    attn_context_destroy(cpu);
    attn_context_destroy(ref);
}

/* ---- config ---- */

static void *some_alloc(void *user, size_t bytes) {
    (void)user;
    return malloc(bytes);
}

static void some_free(void *user, void *memory) {
    (void)user;
    free(memory);
}

static void check_config(attn_config config, attn_status status, const char *detail) {
    attn_context *context = (attn_context *)&config; /* anything that is not NULL */
    test_context("%s", detail);
    CHECK_STATUS(attn_context_create(&context, &config), status, detail);
    CHECK(context == NULL);
    test_context(NULL);
}

TEST(c3_wrong_config) {
    const attn_config good = {.size = sizeof good, .threads = 1};
    attn_config c = good;
    c.size = 0;
    check_config(c, ATTN_INVALID, "size=0");
    c.size = sizeof c - 1;
    check_config(c, ATTN_INVALID, "size=");
    c = good;
    c.backend = (attn_backend_id)4;
    check_config(c, ATTN_INVALID, "backend=4");
    c.backend = (attn_backend_id)-1;
    check_config(c, ATTN_INVALID, "backend=-1");
    c = good;
    c.threads = -1;
    check_config(c, ATTN_INVALID, "threads=-1");
    c.threads = INT32_MAX;
    check_config(c, ATTN_INVALID, "threads=2147483647");
    c = good;
    c.alloc = some_alloc;
    check_config(c, ATTN_INVALID, "free=NULL");
    c = good;
    c.free = some_free;
    check_config(c, ATTN_INVALID, "alloc=NULL");
}

/* ---- merge ---- */

enum { ROWS = 4, HEADS = 2, DIM = 8, PARTS = 3, COUNT = 2 * ROWS * HEADS * DIM };

typedef struct merge_call {
    float o_parts[PARTS][COUNT], lse_parts[PARTS][COUNT / DIM + 1], o[COUNT], lse[COUNT / DIM + 1];
    attn_tensor tensors[PARTS];
    const void *lses[PARTS];
    attn_merge_args args;
} merge_call;

static void merge_start(merge_call *c) {
    memset(c, 0, sizeof *c);
    for (int n = 0; n < PARTS; n++) {
        c->tensors[n] = attn_dense(c->o_parts[n], ROWS, HEADS, DIM);
        c->lses[n] = c->lse_parts[n];
    }
    memset(c->o, 0x5A, sizeof c->o);
    memset(c->lse, 0x5A, sizeof c->lse);
    c->args = (attn_merge_args){.size = sizeof c->args,
                                .dtype = ATTN_F32,
                                .parts = PARTS,
                                .batch = 2,
                                .rows = ROWS,
                                .heads = HEADS,
                                .dim = DIM,
                                .o_parts = c->tensors,
                                .lse_parts = c->lses,
                                .o = attn_dense(c->o, ROWS, HEADS, DIM),
                                .lse = c->lse};
}

#define WRONG(field, ...)                                                                                                  \
    if (at++ == wanted) {                                                                                                  \
        *detail = field;                                                                                                   \
        __VA_ARGS__;                                                                                                       \
        return true;                                                                                                       \
    }

static bool wrong_merge(int wanted, merge_call *c, const char **detail) {
    attn_merge_args *a = &c->args;
    int at = 0;
    WRONG("size=4", a->size = 4)
    WRONG("dtype=0", a->dtype = ATTN_DTYPE_DEFAULT)
    WRONG("dtype=5", a->dtype = ATTN_E4M3)
    WRONG("out_dtype=f64", a->out_dtype = ATTN_F64)
    WRONG("out_dtype=7", a->out_dtype = ATTN_I8)
    WRONG("parts=0", a->parts = 0)
    WRONG("parts=-1", a->parts = -1)
    WRONG("batch=-2", a->batch = -2)
    WRONG("rows=-4", a->rows = -4)
    WRONG("heads=0", a->heads = 0)
    WRONG("dim=0", a->dim = 0)
    WRONG("dim=577", a->dim = 577)
    WRONG("o_parts=NULL", a->o_parts = NULL)
    WRONG("lse_parts=NULL", a->lse_parts = NULL)
    WRONG("data=NULL", c->tensors[1].data = NULL)
    WRONG("lse_parts[2]=NULL", c->lses[2] = NULL)
    WRONG("lse_parts[1]=0x", c->lses[1] = (char *)c->lse_parts[1] + 2)
    WRONG("lse=0x", a->lse = (char *)c->lse + 1)
    WRONG("stride=", c->tensors[0].stride[0] = INT64_MAX)
    WRONG("o.data=NULL", a->o.data = NULL)
    WRONG("o.data=0x", a->o.data = (char *)c->o + 1)
    WRONG("o.stride=", a->o.stride[1] = 0)
    return false;
}

TEST(c3_wrong_merge) {
    static merge_call c;
    attn_context *context = make_context(ATTN_BACKEND_CPU, 2);
    merge_start(&c);
    CHECK_OK(attn_merge(context, &c.args, NULL));
    const char *detail;
    for (int n = 0; merge_start(&c), wrong_merge(n, &c, &detail); n++) {
        test_context("%s", detail);
        CHECK_STATUS(attn_merge(context, &c.args, NULL), ATTN_INVALID, detail);
        for (size_t i = 0; i < sizeof c.o; i++) CHECK(((unsigned char *)c.o)[i] == 0x5A);
        for (size_t i = 0; i < sizeof c.lse; i++) CHECK(((unsigned char *)c.lse)[i] == 0x5A);
    }
    attn_context_destroy(context);
}

/* ---- rotary ---- */

typedef struct rotary_call {
    float x[COUNT], y[COUNT], cos[10 * 2 + 1], sin[10 * 2 + 1];
    int32_t pos[2], cu[3];
    attn_rotary_args args;
} rotary_call;

static void rotary_start(rotary_call *c, bool packed) {
    memset(c, 0, sizeof *c);
    memset(c->y, 0x5A, sizeof c->y);
    memcpy(c->pos, (int32_t[]){1, 2}, sizeof c->pos);
    memcpy(c->cu, (int32_t[]){0, ROWS, 2 * ROWS}, sizeof c->cu);
    c->args = (attn_rotary_args){.size = sizeof c->args,
                                 .dtype = ATTN_F32,
                                 .batch = 2,
                                 .rows = ROWS,
                                 .heads = HEADS,
                                 .dim = DIM,
                                 .rotary_dim = 4,
                                 .rotary_len = 10,
                                 .x = attn_dense(c->x, ROWS, HEADS, DIM),
                                 .y = attn_dense(c->y, ROWS, HEADS, DIM),
                                 .cos = c->cos,
                                 .sin = c->sin,
                                 .pos = c->pos,
                                 .cu = packed ? c->cu : NULL,
                                 .total = packed ? 2 * ROWS : 0};
}

static bool wrong_rotary(int wanted, rotary_call *c, const char **detail) {
    attn_rotary_args *a = &c->args;
    int at = 0;
    WRONG("size=1", a->size = 1)
    WRONG("dtype=5", a->dtype = ATTN_E4M3)
    WRONG("dtype=0", a->dtype = ATTN_DTYPE_DEFAULT)
    WRONG("rotary_dtype=6", a->rotary_dtype = ATTN_E5M2)
    WRONG("batch=-1", a->batch = -1)
    WRONG("rows=-1", a->rows = -1)
    WRONG("heads=0", a->heads = 0)
    WRONG("dim=577", a->dim = 577)
    WRONG("rotary_dim=5", a->rotary_dim = 5)
    WRONG("rotary_dim=0", a->rotary_dim = 0)
    WRONG("rotary_dim=10", a->rotary_dim = 10)
    WRONG("rotary_len=-1", a->rotary_len = -1)
    WRONG("interleaved=2", a->interleaved = 2)
    WRONG("inverse=-1", a->inverse = -1)
    WRONG("total=3", a->cu = NULL, a->total = 3)
    WRONG("total=-1", a->cu = c->cu, a->total = -1)
    WRONG("x.data=NULL", a->x.data = NULL)
    WRONG("y.data=NULL", a->y.data = NULL)
    WRONG("x.data=0x", a->x.data = (char *)c->x + 1)
    WRONG("y.stride=", a->y.stride[2] = 3)
    WRONG("cos=NULL", a->cos = NULL)
    WRONG("sin=NULL", a->sin = NULL)
    WRONG("cos=0x", a->cos = (char *)c->cos + 1)
    WRONG("sin=0x", a->sin = (char *)c->sin + 2)
    WRONG("pos[1]=7", c->pos[1] = 7)
    WRONG("pos[0]=-1", c->pos[0] = -1)
    WRONG("pos[0]=2147483647", c->pos[0] = INT32_MAX)
    WRONG("cu[1]=", a->cu = c->cu, a->total = 2 * ROWS, c->cu[0] = -1)
    WRONG("cu[2]=9", a->cu = c->cu, a->total = 2 * ROWS, c->cu[2] = 2 * ROWS + 1)
    WRONG("cu[2]=3", a->cu = c->cu, a->total = 2 * ROWS, c->cu[2] = 3)
    WRONG("cu[1]=5", a->cu = c->cu, a->total = 2 * ROWS, c->cu[1] = ROWS + 1)
    return false;
}

TEST(c3_wrong_rotary) {
    static rotary_call c;
    attn_context *context = make_context(ATTN_BACKEND_CPU, 2);
    for (int packed = 0; packed < 2; packed++) {
        rotary_start(&c, packed);
        CHECK_OK(attn_rotary(context, &c.args, NULL));
    }
    const char *detail;
    for (int n = 0; rotary_start(&c, false), wrong_rotary(n, &c, &detail); n++) {
        test_context("%s", detail);
        CHECK_STATUS(attn_rotary(context, &c.args, NULL), ATTN_INVALID, detail);
        for (size_t i = 0; i < sizeof c.y; i++) CHECK(((unsigned char *)c.y)[i] == 0x5A);
    }
    attn_context_destroy(context);
}
