/*
 * The backward of the cuda backend, its host side, on a stub of the driver (stub_driver.h): what is chosen, launched and refused.
 * That each call may fail is in test_cuda.c.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>

#include "cuda/cuda.h"
#include "cuda_rig.h"
#include "test.h"

/* The launches of a backward of these buffers, their names with a space after each. */
static const char *launches_of(attn_plan *plan, attn_buffers f) {
    static char names[512];
    names[0] = 0;
    f.workspace_size = attn_plan_workspace(plan);
    f.workspace = f.workspace_size ? stub_memory(STUB_DEVICE, 0, f.workspace_size) : NULL;
    stub_forget();
    if (!CHECK_OK(attn_run(plan, &f, NULL))) return names;
    for (int n = 0; n < stub_launches(); n++) {
        strncat(names, stub_launch_at(n)->name, sizeof names - strlen(names) - 2);
        strcat(names, " ");
    }
    return names;
}

TEST(cuda_backward_launches_what_is_wanted) {
    rig r = rich_backward();
    stub_start();
    if (!rig_make_on(&r, 0)) return;
    adopt_ints(&r);
    attn_context *context = cuda_context();
    attn_plan *plan;
    if (!CHECK_OK(attn_plan_create(&plan, context, &r.p))) return;
    attn_buffers f = rig_backward_buffers(&r);
    char kernel[64], all[512];
    snprintf(kernel, sizeof kernel, "%s", attn_plan_kernel(plan));
    snprintf(all, sizeof all, "bwd_delta ranges %s_q %s bwd_bias bwd_sink bwd_fill ", kernel, kernel);
    CHECK_SAY(strcmp(launches_of(plan, f), all) == 0, "%s", launches_of(plan, f));
    f.d_q.data = f.d_bias.data = NULL;
    f.d_sink = NULL;
    snprintf(all, sizeof all, "bwd_delta ranges %s bwd_fill ", kernel);
    CHECK_SAY(strcmp(launches_of(plan, f), all) == 0, "%s", launches_of(plan, f));
    f.d_k.data = NULL;
    CHECK(strcmp(launches_of(plan, f), all) == 0);
    f.d_v.data = NULL;
    CHECK(strcmp(launches_of(plan, f), "bwd_delta ranges bwd_fill ") == 0);
    attn_plan_destroy(plan);
    attn_context_destroy(context);
    CHECK(stub_live() == 0);
    stub_stop();
    rig_free(&r);
}

/* No sequences: a packed gradient is padding from end to end, sums along the batch are zero. */
TEST(cuda_backward_of_nothing_writes_zeros) {
    rig r = {.p = problem(ATTN_F32, 0, 2, 1, 5, 7, 16)};
    stub_start();
    r.p.op = ATTN_BACKWARD;
    r.p.flags = ATTN_VARLEN_Q | ATTN_VARLEN_KV | ATTN_SINK | ATTN_BIAS;
    r.p.total_q = 3;
    r.p.total_kv = 4;
    if (!rig_make_on(&r, 0)) return;
    attn_context *context = cuda_context();
    attn_plan *plan;
    if (!CHECK_OK(attn_plan_create(&plan, context, &r.p))) return;
    attn_buffers f = rig_backward_buffers(&r);
    f.d_bias = (attn_matrix){.data = stub_memory(STUB_DEVICE, 0, 5 * 7 * 4), .stride = {0, 0, 7, 1}};
    CHECK_SAY(strcmp(launches_of(plan, f), "bwd_delta bwd_bias bwd_sink bwd_fill ") == 0, "%s", launches_of(plan, f));
    attn_plan_destroy(plan);
    attn_context_destroy(context);
    CHECK(stub_live() == 0);
    stub_stop();
    rig_free(&r);
}

TEST(cuda_backward_refuses_memory_that_it_cannot_reach) {
    rig r = rich_backward();
    stub_start();
    if (!rig_make_on(&r, 0)) return;
    adopt_ints(&r);
    attn_context *context = cuda_context();
    attn_plan *plan;
    if (!CHECK_OK(attn_plan_create(&plan, context, &r.p))) return;
    static const char *const names[] = {"d_o.data", "d_lse", "d_q.data", "d_k.data", "d_v.data", "d_bias.data", "d_sink"};
    static _Alignas(64) char pageable[1 << 17];
    for (int n = 0; n < 7; n++) {
        attn_buffers f = rig_backward_buffers(&r);
        f.workspace_size = attn_plan_workspace(plan);
        f.workspace = stub_memory(STUB_DEVICE, 0, f.workspace_size);
        const void *lse = f.d_lse;
        void **field[] = {&f.d_o.data, NULL, &f.d_q.data, &f.d_k.data, &f.d_v.data, &f.d_bias.data, NULL};
        if (field[n]) *field[n] = pageable;
        f.d_lse = n == 1 ? pageable : lse;
        if (n == 6) f.d_sink = (float *)(void *)pageable;
        char text[96];
        snprintf(text, sizeof text, "%s=%p: is host memory that the GPU cannot reach", names[n], (void *)pageable);
        stub_forget();
        CHECK_STATUS(attn_run(plan, &f, NULL), ATTN_INVALID, text);
        CHECK(stub_launches() == 0 && stub_depth() == 0);
    }
    attn_plan_destroy(plan);
    attn_context_destroy(context);
    CHECK(stub_live() == 0);
    stub_stop();
    rig_free(&r);
}

/* By dtype and dim alone; and the lines for d_k, d_v and for d_q come together. */
TEST(cuda_backward_chooses_the_kernel_by_dtype_and_dim) {
    static const struct {
        attn_dtype dtype;
        int32_t dim;
        const char *large, *small; /* with much shared memory, and with little */
    } rows[] = {
        {ATTN_BF16, 1, "bwd_sm80_bf16_d32", "bwd_sm80_bf16_d32"},
        {ATTN_BF16, 33, "bwd_sm80_bf16_d64_one", "bwd_sm80_bf16_d64"},
        {ATTN_BF16, 96, "bwd_sm80_bf16_d96_one", "bwd_sm80_bf16_d96"},
        {ATTN_BF16, 97, "bwd_sm80_bf16_d128_one", "bwd_sm80_bf16_d128"},
        {ATTN_BF16, 128, "bwd_sm80_bf16_d128_one", "bwd_sm80_bf16_d128"},
        {ATTN_BF16, 129, "bwd_sm80_bf16_d192_one", "bwd_sm80_bf16_d192"},
        {ATTN_BF16, 256, "bwd_sm80_bf16_d256_one", "bwd_sm80_bf16_d256"},
        {ATTN_F16, 128, "bwd_sm80_f16_d128", "bwd_sm80_f16_d128"},
        {ATTN_F16, 256, "bwd_sm80_f16_d256", "bwd_sm80_f16_d256"},
        {ATTN_F16, 257, "bwd_any", "bwd_any"},
        {ATTN_F32, 64, "bwd_any", "bwd_any"},
        {ATTN_F64, 64, "bwd_any", "bwd_any"},
    };
    for (int gpu = 0; gpu < 2; gpu++) {
        stub_start();
        stub.arch[0] = gpu ? 89 : 80;
        stub.shared_bytes[0] = gpu ? 101376 : 166912;
        attn_context *context = cuda_context();
        for (size_t n = 0; n < sizeof rows / sizeof rows[0]; n++) {
            attn_problem p = problem(rows[n].dtype, 2, 4, 2, 100, 300, rows[n].dim);
            attn_plan *plan;
            p.op = ATTN_BACKWARD;
            for (int way = 0; way < 2; way++) {
                if (way) p.flags = ATTN_CAUSAL | ATTN_ALIBI | ATTN_BIAS | ATTN_SINK | ATTN_LEFTPAD;
                if (!CHECK_OK(attn_plan_create(&plan, context, &p))) return;
                test_context("%s, dim %d, gpu %d", attn_dtype_name(rows[n].dtype), rows[n].dim, gpu);
                CHECK_SAY(strcmp(attn_plan_kernel(plan), gpu ? rows[n].small : rows[n].large) == 0, "%s",
                          attn_plan_kernel(plan));
                attn_plan_destroy(plan);
            }
        }
        attn_context_destroy(context);
        CHECK(stub_live() == 0);
        stub_stop();
    }
    for (int n = 0; n < ATTN_ENTRIES; n++) {
        const attn_cuda_entry *e = &attn__cuda_entries[n];
        char name[64];
        if (e->op != ATTN_BACKWARD || e->one || !e->by_keys) continue;
        snprintf(name, sizeof name, "%s_q", e->name);
        CHECK_SAY(strcmp(e[1].name, name) == 0 && !e[1].by_keys && e[1].dim == e->dim, "%s is followed by %s", e->name,
                  e[1].name);
    }
}

/* Hopper has lines of its own, for what has no work for each element and can have maps; whatever the dim, if there is one. */
TEST(cuda_backward_on_hopper) {
    static const struct {
        attn_dtype dtype;
        int32_t dim;
        const char *plain, *other; /* other: with a feature, or without maps */
    } rows[] = {
        {ATTN_BF16, 8, "bwd_sm90_bf16_d64", "bwd_sm80_bf16_d32"},
        {ATTN_BF16, 64, "bwd_sm90_bf16_d64", "bwd_sm80_bf16_d64_one"},
        {ATTN_BF16, 72, "bwd_sm90_bf16_d128", "bwd_sm80_bf16_d96_one"},
        {ATTN_BF16, 128, "bwd_sm90_bf16_d128", "bwd_sm80_bf16_d128_one"},
        {ATTN_BF16, 136, "bwd_sm90_bf16_d192", "bwd_sm80_bf16_d192_one"},
        {ATTN_BF16, 256, "bwd_sm90_bf16_d256", "bwd_sm80_bf16_d256_one"},
        {ATTN_BF16, 264, "bwd_any", "bwd_any"},
        {ATTN_F16, 56, "bwd_sm90_f16_d64", "bwd_sm80_f16_d64"},
        {ATTN_F16, 128, "bwd_sm90_f16_d128", "bwd_sm80_f16_d128"},
        {ATTN_F16, 136, "bwd_sm90_f16_d192", "bwd_sm80_f16_d192"},
        {ATTN_F16, 256, "bwd_sm90_f16_d256", "bwd_sm80_f16_d256"},
    };
    stub_start();
    stub.arch[0] = 90;
    stub.shared_bytes[0] = 232448;
    attn_context *context = cuda_context();
    for (size_t n = 0; n < sizeof rows / sizeof rows[0]; n++)
        for (int way = 0; way < 3; way++) {
            attn_problem p = problem(rows[n].dtype, 2, 4, 2, 100, 300, rows[n].dim);
            attn_plan *plan;
            p.op = ATTN_BACKWARD;
            p.flags = way == 1 ? ATTN_CAUSAL | ATTN_SINK | ATTN_LEFTPAD : way == 2 ? ATTN_ALIBI : 0;
            if (!CHECK_OK(attn_plan_create(&plan, context, &p))) return;
            CHECK_SAY(strcmp(attn_plan_kernel(plan), way == 2 ? rows[n].other : rows[n].plain) == 0, "%s, dim %d: %s",
                      attn_dtype_name(rows[n].dtype), rows[n].dim, attn_plan_kernel(plan));
            attn_plan_destroy(plan);
        }
    attn_context_destroy(context);
    CHECK(stub_live() == 0);
    stub_stop();
}

/* Its launches; d_q is cleared where its sums have no order, and cast then; few keys have one always. Rows at odd addresses have the portable kernel. */
TEST(cuda_backward_on_hopper_launches) {
    static const struct {
        uint32_t flags;
        int32_t keys;
        bool unordered;
    } ways[] = {{0, 300, false}, {ATTN_UNORDERED, 300, false}, {ATTN_UNORDERED, 8192, true}};
    rig r = {.p = problem(ATTN_BF16, 2, 4, 2, 70, 8192, 128)};
    stub_start();
    stub.arch[0] = 90;
    stub.shared_bytes[0] = 232448;
    r.p.op = ATTN_BACKWARD;
    if (!rig_make_on(&r, 0)) return;
    attn_context *context = cuda_context();
    for (int way = 0; way < 3; way++) {
        const bool unordered = ways[way].unordered;
        attn_plan *plan;
        r.p.flags = ways[way].flags;
        r.p.max_kv = ways[way].keys;
        if (!CHECK_OK(attn_plan_create(&plan, context, &r.p))) return;
        CHECK((strstr(attn_plan_describe(plan), "d_q in any order") != NULL) == unordered);
        attn_buffers f = rig_backward_buffers(&r);
        const char *wants = unordered ? "bwd_delta bwd_sm90_bf16_d128 bwd_cast " : "bwd_delta bwd_sm90_bf16_d128 ";
        CHECK_SAY(strcmp(launches_of(plan, f), wants) == 0, "%s", launches_of(plan, f));
        CHECK(stub_calls("cuMemsetD32Async") == 1 + unordered);
        CHECK(stub_launch_at(1)->block[0] == 384 && stub_launch_at(1)->grid[0] == (unordered ? 256 : 12));
        if (unordered) CHECK(stub_launch_at(2)->grid[0] == 16);
        f.d_q.data = NULL;
        CHECK(strcmp(launches_of(plan, f), "bwd_delta bwd_sm90_bf16_d128 ") == 0);
        f = rig_backward_buffers(&r);
        f.q.data = (char *)f.q.data + 2;
        CHECK_SAY(strcmp(launches_of(plan, f), "bwd_delta bwd_sm80_bf16_d128_one ") == 0, "%s", launches_of(plan, f));
        attn_plan_destroy(plan);
    }
    attn_context_destroy(context);
    CHECK(stub_live() == 0);
    stub_stop();
    rig_free(&r);
}

/* From which number of keys on ATTN_UNORDERED does without an order: the larger dim decides. Elsewhere it never does. */
TEST(cuda_backward_without_an_order) {
    static const struct {
        int32_t dim_qk, dim_v, keys;
    } cases[] = {{64, 64, 8192}, {128, 128, 8192}, {129, 128, 2048}, {64, 136, 2048}, {256, 256, 2048}};
    for (int hopper = 0; hopper < 2; hopper++) {
        stub_start();
        stub.arch[0] = hopper ? 90 : 80;
        stub.shared_bytes[0] = hopper ? 232448 : 166912;
        attn_context *context = cuda_context();
        for (size_t n = 0; n < sizeof cases / sizeof cases[0]; n++)
            for (int way = 0; way < 3; way++) { /* too few keys, enough, enough and not asked for */
                attn_problem p = problem(ATTN_BF16, 2, 4, 2, 70, cases[n].keys - (way == 0), cases[n].dim_qk);
                attn_plan *plan;
                p.op = ATTN_BACKWARD;
                p.dim_v = cases[n].dim_v;
                p.flags = way == 2 ? 0 : ATTN_UNORDERED;
                if (!CHECK_OK(attn_plan_create(&plan, context, &p))) return;
                const bool none = strstr(attn_plan_describe(plan), "d_q in any order") != NULL;
                CHECK_SAY(none == (hopper && way == 1), "case %zu, way %d:\n%s", n, way, attn_plan_describe(plan));
                attn_plan_destroy(plan);
            }
        attn_context_destroy(context);
        CHECK(stub_live() == 0);
        stub_stop();
    }
}

/* Heads are in turn in groups that are about as large as each other: 20 of them as 10 and 10, and not 16 and 4. Long rows have smaller ones. */
TEST(cuda_backward_on_hopper_has_even_groups_of_heads) {
    static const struct {
        int32_t heads, rows, dim, group, groups;
    } cases[] = {
        {1, 70, 192, 1, 1},      {5, 70, 192, 5, 1},      {16, 70, 192, 16, 1},    {17, 70, 192, 9, 2},
        {20, 70, 192, 10, 2},    {42, 70, 96, 14, 3},     {64, 70, 256, 16, 4},    {196, 70, 64, 14, 14},
        {257, 70, 64, 13, 20},   {16, 8192, 128, 16, 1},  {16, 8192, 192, 8, 2},   {20, 8192, 192, 10, 2},
        {20, 16384, 256, 10, 2}, {50, 16384, 192, 10, 5}, {57, 16384, 192, 10, 6},
    };
    stub_start();
    stub.arch[0] = 90;
    stub.shared_bytes[0] = 232448;
    attn_context *context = cuda_context();
    for (size_t n = 0; n < sizeof cases / sizeof cases[0]; n++) {
        rig r = {.p = problem(ATTN_BF16, 1, cases[n].heads, cases[n].heads, 70, 64, cases[n].dim)};
        attn_plan *plan;
        r.p.op = ATTN_BACKWARD;
        if (!rig_make_on(&r, 0)) return;
        r.p.max_q = cases[n].rows; /* the stub reads none of them */
        if (!CHECK_OK(attn_plan_create(&plan, context, &r.p))) return;
        launches_of(plan, rig_backward_buffers(&r));
        const attn_cuda_args *a = stub_args(stub_launch_at(1));
        CHECK_SAY(a->group == cases[n].group && (int32_t)stub_launch_at(1)->grid[1] == cases[n].groups,
                  "case %zu: %u groups of %d", n, stub_launch_at(1)->grid[1], a->group);
        attn_plan_destroy(plan);
        rig_free(&r);
    }
    attn_context_destroy(context);
    CHECK(stub_live() == 0);
    stub_stop();
}

/* At dim 256 the blocks of a tile of keys are a pair; float16 has its sizes looked up before, whatever is wanted. */
TEST(cuda_backward_on_hopper_in_pairs) {
    rig r = {.p = problem(ATTN_F16, 2, 4, 2, 70, 300, 256)};
    attn_plan *plan;
    stub_start();
    stub.arch[0] = 90;
    stub.shared_bytes[0] = 232448;
    r.p.op = ATTN_BACKWARD;
    if (!rig_make_on(&r, 0)) return;
    attn_context *context = cuda_context();
    if (!CHECK_OK(attn_plan_create(&plan, context, &r.p))) return;
    attn_buffers f = rig_backward_buffers(&r);
    CHECK_SAY(strcmp(launches_of(plan, f), "bwd_delta bwd_fit bwd_sm90_f16_d256 ") == 0, "%s", launches_of(plan, f));
    CHECK(stub_calls("cuMemsetD32Async") == 2);
    CHECK(stub_launch_at(2)->block[0] == 512 && stub_launch_at(2)->grid[0] == 24);
    f.d_q.data = NULL;
    CHECK(strcmp(launches_of(plan, f), "bwd_delta bwd_fit bwd_sm90_f16_d256 ") == 0);
    attn_plan_destroy(plan);
    attn_context_destroy(context);
    CHECK(stub_live() == 0);
    stub_stop();
    rig_free(&r);
}

/* In one pass the turns are cleared before the kernel, if d_q is wanted. */
TEST(cuda_backward_in_one_pass) {
    rig r = {.p = problem(ATTN_BF16, 2, 4, 2, 70, 300, 128)};
    stub_start();
    stub.arch[0] = 80;
    r.p.op = ATTN_BACKWARD;
    if (!rig_make_on(&r, 0)) return;
    attn_context *context = cuda_context();
    attn_plan *plan;
    if (!CHECK_OK(attn_plan_create(&plan, context, &r.p))) return;
    attn_buffers f = rig_backward_buffers(&r);
    CHECK(strcmp(launches_of(plan, f), "bwd_delta bwd_sm80_bf16_d128_one ") == 0);
    CHECK(stub_calls("cuMemsetD32Async") == 1);
    const attn_cuda_args *a = stub_args(stub_launch_at(1));
    CHECK(a->turns && a->part_o && a->group == 4 && a->slots == 3 && stub_launch_at(1)->grid[0] == 12);
    f.d_k.data = f.d_v.data = NULL;
    CHECK(strcmp(launches_of(plan, f), "bwd_delta bwd_sm80_bf16_d128_one ") == 0);
    f = rig_backward_buffers(&r);
    f.d_q.data = NULL;
    CHECK(strcmp(launches_of(plan, f), "bwd_delta bwd_sm80_bf16_d128_one ") == 0);
    CHECK(stub_calls("cuMemsetD32Async") == 0 && !stub_args(stub_launch_at(1))->turns);
    attn_plan_destroy(plan);
    attn_context_destroy(context);
    CHECK(stub_live() == 0);
    stub_stop();
    rig_free(&r);
}

TEST(cuda_backward_workspace_is_a_number_a_row) {
    stub_start();
    stub.arch[0] = 80;
    attn_context *context = cuda_context();
    attn_problem p = problem(ATTN_BF16, 3, 4, 2, 100, 2048, 100);
    p.op = ATTN_BACKWARD; /* in one pass: d_q, too, rows and columns rounded up, and the turns of two tiles of each head */
    CHECK(workspace_of(context, p) == 3 * 4 * (100 * 4 + 104 * 104 * 4) + 128);
    p.flags = ATTN_VARLEN_Q;
    p.total_q = 160;
    CHECK(workspace_of(context, p) == 4 * (160 * 4 + (160 + 3 * 8) * 104 * 4) + 128);
    p = problem(ATTN_BF16, 3, 4, 2, 100, 128, 100);
    p.op = ATTN_BACKWARD; /* one block has all keys of a head: nobody has to wait for its d_q */
    CHECK(workspace_of(context, p) == 3 * 4 * 100 * 4 + 128);
    p = problem(ATTN_F16, 3, 4, 2, 100, 2048, 64);
    p.op = ATTN_BACKWARD;
    CHECK(workspace_of(context, p) == 3 * 4 * 100 * 4);
    p.flags = ATTN_VARLEN_Q;
    p.total_q = 48;
    CHECK(workspace_of(context, p) == 48 * 4 * 4);
    p.flashmask_vectors = 2;
    CHECK(workspace_of(context, p) == 48 * 4 * 4 + 3 * 64 * 32); /* batch, tiles of 32 keys, two times four numbers */
    p = problem(ATTN_F64, 3, 4, 2, 100, 2048, 64);
    p.op = ATTN_BACKWARD;
    CHECK(workspace_of(context, p) == 3 * 4 * 100 * 8);
    attn_context_destroy(context);
    CHECK(stub_live() == 0);
    stub_stop();
}

/*
 * What docs/kernels/backward.md says that the workspace is, part by part. rows, blocks: of the line, 0 rows in two passes; keeps: is there
 * d_q in float?
 */
static size_t documented(const attn_problem *p, int64_t rows, int64_t blocks, bool fits, bool keeps) {
    const bool packed = p->flags & ATTN_VARLEN_Q;
    const int64_t heads = (int64_t)p->heads_q * p->batch, rest = p->max_q % 16;
    const int64_t all = packed ? p->heads_q * p->total_q : heads * p->max_q;
    const int64_t stored = packed ? (p->total_q < 8 * p->batch ? 2 * all : all + 8 * heads)
                                  : heads * (p->max_q - rest + (rest < 8 ? 2 * rest : 16));
    const int64_t tiles = !rows    ? 0
                          : packed ? p->heads_q * (p->total_q / rows + p->batch)
                                   : heads * ((p->max_q + rows - 1) / rows);
    const int64_t turns = rows ? tiles * blocks + 1 + (fits ? 3 * p->batch * p->heads_kv : 0) : 0;
    const int64_t parts[] = {4 * all, rows && keeps ? 4 * stored * ((p->dim_qk + 7) / 8 * 8) : 0, 4 * turns};
    size_t sum = 0;
    for (int n = 0; n < 3; n++) sum += (size_t)(parts[n] + 63) / 64 * 64;
    return sum;
}

/*
 * The formula, on Hopper and elsewhere, and the bound: d_q in float and two floats for each row, where dims are multiples of 8 and rows of
 * 16, or long sequences. It is d_q in float and one for each row, at most 7 columns, 8 rows for each sequence and head, 4 or 8 bytes for each of
 * their tiles, and a few for each sequence. ATTN_UNORDERED changes nothing.
 */
TEST(cuda_backward_workspace_is_at_most_d_q_in_float_and_two_numbers_a_row) {
    static const struct {
        int32_t arch;
        attn_dtype dtype;
        int32_t least, most, rows, blocks; /* dims that a line serves, of both q and v */
    } lines[] = {
        {90, ATTN_BF16, 1, 64, 128, 1},  {90, ATTN_BF16, 65, 128, 64, 1},  {90, ATTN_BF16, 129, 192, 64, 1},
        {90, ATTN_F16, 1, 64, 128, 1},   {90, ATTN_BF16, 193, 256, 64, 2}, {90, ATTN_F16, 65, 128, 64, 1},
        {90, ATTN_F16, 129, 192, 64, 1}, {90, ATTN_F16, 193, 256, 64, 2},  {80, ATTN_BF16, 33, 64, 128, 1},
        {80, ATTN_BF16, 65, 256, 64, 1}, {80, ATTN_BF16, 1, 32, 0, 0},     {80, ATTN_F16, 1, 256, 0, 0},
        {80, ATTN_F32, 1, 256, 0, 0},
    };
    static const struct {
        int32_t batch, max_q, total_q; /* total_q > 0: packed */
    } shapes[] = {
        {3, 1024, 0},    {3, 700, 0}, {3, 1, 0},     {3, 8, 0},    {3, 25, 0},      {3, 700, 1500},
        {3, 1024, 1024}, {90, 3, 90}, {90, 30, 900}, {2, 2100, 0}, {2, 3000, 4200},
    };
    for (size_t n = 0; n < sizeof lines / sizeof lines[0]; n++) {
        const int32_t rows = lines[n].rows, blocks = lines[n].blocks, most = lines[n].most;
        const bool hopper = lines[n].arch == 90, fits = hopper && lines[n].dtype == ATTN_F16;
        stub_start();
        stub.arch[0] = lines[n].arch;
        stub.shared_bytes[0] = hopper ? 232448 : 166912;
        attn_context *context = cuda_context();
        for (int32_t step = 0; step < most - lines[n].least + 6; step += 5)
            for (size_t m = 0; m < sizeof shapes / sizeof shapes[0]; m++) {
                const int32_t dim = most - step > lines[n].least ? most - step : lines[n].least;
                attn_problem p = problem(lines[n].dtype, shapes[m].batch, 16, 2, shapes[m].max_q, 2000, dim);
                p.op = ATTN_BACKWARD;
                p.dim_v = step % 2 ? most : dim; /* the larger one decides which line it is */
                p.flags = shapes[m].total_q ? ATTN_VARLEN_Q : 0;
                p.total_q = shapes[m].total_q;
                const size_t have = workspace_of(context, p), want = documented(&p, rows, blocks, fits, true);
                test_context("sm_%d, %s, dim %d, shape %zu", lines[n].arch, attn_dtype_name(lines[n].dtype), dim, m);
                CHECK_SAY(have == want, "%zu bytes, and not %zu", have, want);
                const size_t heads = 16 * (size_t)p.batch,
                             all = p.total_q ? 16 * (size_t)p.total_q : heads * (size_t)p.max_q;
                const size_t parts = all * (4 * (size_t)dim + 4), columns = ((size_t)dim + 7) / 8 * 8;
                const size_t turns = (all / 64 + 2 * heads) * 8 + 24 * (size_t)p.batch + 4 + 192;
                const bool even = p.total_q == 0 && p.max_q % 16 == 0;
                CHECK(have <= parts + all * (columns - (size_t)dim) * 4 + (even ? 0 : heads * 8 * columns * 4) + turns);
                if (dim % 8 == 0 && (even || all >= heads * (9 * columns + 64))) CHECK(have <= parts + 4 * all);
                p.flags |= ATTN_UNORDERED;
                CHECK(workspace_of(context, p) == want);
                p.max_kv = 8192; /* without an order */
                CHECK(workspace_of(context, p) == want);
                p.max_kv = 64; /* a block has them all */
                CHECK(workspace_of(context, p) == documented(&p, rows, blocks, fits, false));
                p.flags &= ~ATTN_UNORDERED;
                CHECK(workspace_of(context, p) == documented(&p, rows, blocks, fits, false));
            }
        attn_context_destroy(context);
        CHECK(stub_live() == 0);
        stub_stop();
    }
    test_context(NULL);
}

/* Places of sequences in it follow one another, whatever their lengths, and end within it. */
TEST(cuda_backward_d_q_in_float_has_room_for_all_sequences) {
    enum { BATCH = 40 };
    uint64_t random = 1;
    for (int round = 0; round < 2000; round++) {
        attn_problem p = problem(ATTN_BF16, BATCH, 1, 1, 0, 1, 8);
        int32_t length[BATCH];
        int64_t row = 0, end = 0;
        p.flags = ATTN_VARLEN_Q;
        for (int b = 0; b < BATCH; b++) {
            length[b] = random_range(&random, 0, round % 4 == 0 ? 2 : round % 4 == 1 ? 19 : 299);
            p.total_q += length[b];
        }
        for (int b = 0; b < BATCH; b++) {
            const int64_t first = attn__d_q_first(&p, b, row);
            CHECK(first >= end);
            end = first + attn__d_q_rows(length[b]);
            row += length[b];
        }
        CHECK(end <= attn__d_q_first(&p, BATCH, p.total_q));
    }
}
