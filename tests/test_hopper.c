/*
 * Hopper's kernels as the host sees them, on the stub of the driver: which problems they get and on which GPUs, what their tensor
 * maps say, how many blocks share the work, and that a tensor which can have no map is still served.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>

#include "cuda_rig.h"
#include "test.h"

/* ---- the table ---- */

/* Of a dtype and dim there is a kernel of each kind, which give the same bits and run on the same GPUs. */
TEST(hopper_lines_come_in_threes) {
    int lines = 0;
    for (int n = 0; n < ATTN_ENTRIES; n++) {
        const attn_cuda_entry *e = &attn__cuda_entries[n];
        int others = 0, portable = 0;
        if (!e->hopper || e->op == ATTN_BACKWARD || e->decode) continue;
        for (int k = 0; k < ATTN_ENTRIES; k++) {
            const attn_cuda_entry *x = &attn__cuda_entries[k];
            if (x->op != e->op || x->decode || x->dtype != e->dtype || x->dim != e->dim) continue;
            portable += !x->hopper;
            if (x->hopper && (x->dim_qk != e->dim_qk || x->most_v != e->most_v)) continue;
            CHECK_SAY(!x->hopper || x->bn == e->bn, "%s has other tiles than %s", x->name, e->name);
            if (!x->hopper || x->takes == e->takes) continue;
            others++;
        }
        CHECK_SAY(others == 2 && portable > 0, "%s", e->name);
        /* as much memory as every GPU of that kind has; one with room for some of them alone would give other bits for the rest */
        CHECK_SAY(e->arch == 90 && e->dim_qk % 16 == 0 && e->dim_v % 16 == 0 && e->shared_bytes <= 232448, "%s", e->name);
        CHECK_SAY(e->dim_v <= e->most_v && e->most_v <= 2 * e->dim_v &&
                      e->dim == (e->dim_qk > e->most_v ? e->dim_qk : e->most_v),
                  "%s", e->name);
        CHECK_SAY(e->bm <= 256 && e->bn <= 256 && e->bn % 16 == 0 && e->warps * 32 == 128 + 2 * e->bm, "%s", e->name);
        lines++;
    }
    CHECK_SAY(lines == 42, "%d lines", lines); /* two dtypes, five dims, two pairs of dims */
}

/* Rows are held in blocks of 64 columns: those of dim 96 take as much room as 128. Notes come on top. */
TEST(hopper_lines_have_room_for_their_tiles) {
    static const struct {
        const char *name;
        int32_t warps;
        size_t shared_bytes;
    } rows[] = {{"fwd_sm90_bf16_d128", 12, (2 * 128 * 128 + 2 * 128 * 256) * 2 + 2048},
                {"fwd_sm90_f16_d96_all", 12, (2 * 128 * 128 + 2 * 128 * 256) * 2 + 2048},
                {"fwd_sm90_f16_d64", 16, (2 * 192 * 64 + 2 * 128 * 128) * 2 + 2048},
                {"fwd_sm90_bf16_d64_all", 16, (2 * 192 * 64 + 3 * 128 * 128) * 2 + 2048},
                {"fwd_sm90_bf16_d192", 12, (128 * 192 + 2 * 112 * 384) * 2 + 2048},
                {"fwd_sm90_f16_d192_v128", 12, (128 * 192 + 2 * 128 * 320) * 2 + 2048},
                {"fwd_sm90_f16_d64_v512", 12, (128 * 64 + 128 * 256 + 2 * 96 * 320) * 2 + 2048},
                {"fwd_sm90_f16_d256", 12, (128 * 256 + 2 * 80 * 512) * 2 + 2048}};
    for (size_t n = 0; n < sizeof rows / sizeof rows[0]; n++) {
        const attn_cuda_entry *e = entry_named(rows[n].name);
        CHECK_SAY(e && e->shared_bytes == rows[n].shared_bytes && e->warps == rows[n].warps, "%s: %zu bytes, %d warps",
                  rows[n].name, e ? e->shared_bytes : 0, e ? (int)e->warps : 0);
    }
}

/* The name of the plan's kernel, of the one for rows that are not aligned, and of that with a feature. */
static void check_names(attn_context *context, attn_problem p, const char *name, const char *odd, const char *all) {
    attn_plan *plan;
    for (int way = 0; way < 2; way++) {
        if (way) {
            p.flags |= ATTN_SCALE;
            p.scale = -1;
        }
        if (!CHECK_OK(attn_plan_create(&plan, context, &p))) return;
        const char *want = way ? all : name;
        CHECK_SAY(strcmp(attn_plan_kernel(plan), want) == 0, "%s instead of %s", attn_plan_kernel(plan), want);
        if (!way) want = odd;
        CHECK_SAY(strcmp(attn__cuda_entries[plan->gpu_kernel[0][1]].name, want) == 0, "%s instead of %s for odd rows",
                  attn__cuda_entries[plan->gpu_kernel[0][1]].name, want);
        attn_plan_destroy(plan);
    }
}

/* A pair of dims goes to Hopper's lines whatever else is asked for, or never; and on no other GPU. */
TEST(hopper_serves_its_dims_on_sm_90_alone) {
    static const struct {
        int32_t qk, v, portable;
        const char *hopper; /* NULL: none */
    } rows[] = {
        {1, 1, 32, NULL},           {32, 32, 32, NULL},           {33, 33, 64, "d64"},        {64, 64, 64, "d64"},
        {64, 16, 64, "d64"},        {16, 64, 64, "d64"},          {65, 65, 96, "d96"},        {96, 96, 96, "d96"},
        {97, 97, 128, "d128"},      {128, 128, 128, "d128"},      {64, 128, 128, "d128"},     {128, 129, 192, "d192"},
        {129, 129, 192, "d192"},    {192, 128, 192, "d192_v128"}, {136, 8, 192, "d192_v128"}, {192, 192, 192, "d192"},
        {193, 193, 256, "d256"},    {193, 128, 256, "d256"},      {256, 256, 256, "d256"},    {64, 256, 256, "d256"},
        {64, 257, 512, "d64_v512"}, {8, 512, 512, "d64_v512"},    {64, 512, 512, "d64_v512"}, {65, 512, 512, NULL},
        {512, 64, 512, NULL},       {257, 257, 512, NULL}};
    static const int archs[] = {80, 86, 89, 90, 100, 103, 120};
    for (size_t a = 0; a < sizeof archs / sizeof archs[0]; a++) {
        stub_start();
        stub.arch[0] = archs[a];
        attn_context *context = cuda_context();
        for (size_t n = 0; n < sizeof rows / sizeof rows[0]; n++) {
            for (int half = 0; half < 2; half++) {
                attn_problem p = problem(half ? ATTN_F16 : ATTN_BF16, 2, 4, 2, 100, 300, rows[n].qk);
                char name[3][64];
                const bool aligned = rows[n].qk % 8 == 0 && rows[n].v % 8 == 0, hopper = rows[n].hopper && archs[a] == 90;
                const char *const kinds[] = {"", hopper ? "_own" : "_all", "_all"};
                p.dim_v = rows[n].v;
                test_context("sm_%d, %s, dims %d and %d", archs[a], half ? "f16" : "bf16", p.dim_qk, p.dim_v);
                for (int kind = 0; kind < 3; kind++) {
                    char dims[16];
                    snprintf(dims, sizeof dims, "d%d", rows[n].portable);
                    snprintf(name[kind], sizeof name[kind], "fwd_sm%d_%s_%s%s", hopper ? 90 : 80, half ? "f16" : "bf16",
                             hopper ? rows[n].hopper : dims,
                             !hopper && rows[n].portable == 512 ? "" : kinds[kind ? kind : !aligned]);
                }
                check_names(context, p, name[0], name[1], name[2]);
            }
        }
        attn_context_destroy(context);
        CHECK(stub_live() == 0);
        stub_stop();
    }
}

/* ---- latent attention ---- */

/* v is the beginning of k, or lies elsewhere, or rows are odd: known at the run. */
TEST(hopper_decodes_latent_attention_where_v_is_k) {
    static const struct {
        const char *what, *kernel;
        int32_t rows, keys;
        uint32_t flags;
        unsigned blocks; /* 0: any */
        bool folds;
    } ways[] = {{"latent", "decode_sm90_bf16_d576_v512", 1, 3000, 0, 3 * 2 * 3, true},
                {"one span", "decode_sm90_bf16_d576_v512", 2, 700, ATTN_CAUSAL, 3 * 4, false},
                {"v elsewhere", "fwd_any", 1, 3000, 0, 0, true},
                {"odd rows", "fwd_any", 1, 3000, 0, 0, true},
                {"alibi", "fwd_any", 1, 3000, ATTN_ALIBI, 0, true},
                {"more rows", "fwd_any", 17, 3000, 0, 0, false}};
    for (int n = 0; n < 6; n++) {
        rig r = {.p = problem(ATTN_BF16, 3, 128, 1, ways[n].rows, ways[n].keys, 576)};
        r.p.dim_v = 512;
        r.p.flags = ways[n].flags;
        test_context("%s", ways[n].what);
        stub_start();
        if (!rig_make_on(&r, 0)) return;
        attn_context *context = cuda_context();
        attn_plan *plan;
        if (!CHECK_OK(attn_plan_create(&plan, context, &r.p))) return;
        CHECK((strstr(attn_plan_describe(plan), "v that is not the beginning of k: fwd_any") != NULL) == (n < 4));
        if (n != 2) r.f.v = r.f.k;
        if (n == 3) r.f.q.stride[0]++, r.f.q.data = stub_memory(STUB_DEVICE, 0, 1 << 20);
        CHECK_OK(rig_run_plan(plan, &r, 0, NULL));
        const stub_launch *l = forward_launch(), *last = stub_launch_at(stub_launches() - 1);
        if (!CHECK(l != NULL)) return;
        CHECK_SAY(strcmp(l->name, ways[n].kernel) == 0, "%s instead of %s", l->name, ways[n].kernel);
        CHECK_SAY(!ways[n].blocks || l->grid[0] == ways[n].blocks, "%u blocks", l->grid[0]);
        CHECK_SAY((strncmp(last->name, "fold", 4) == 0) == ways[n].folds, "%s is the last", last->name);
        CHECK((strcmp(last->name, "fold_latent") == 0) == (n == 0));
        attn_plan_destroy(plan);
        attn_context_destroy(context);
        CHECK(stub_live() == 0);
        stub_stop();
        rig_free(&r);
    }
}

/* ---- maps ---- */

/* The launch of a Hopper kernel of that name, with its arguments. */
static const attn_cuda_args90 *hopper_launch(const char *name, const stub_launch **launch) {
    const stub_launch *l = forward_launch();
    if (!CHECK(l && l->args_bytes == sizeof(attn_cuda_args90))) return NULL;
    const attn_cuda_entry *e = entry_named(l->name);
    CHECK_SAY(strcmp(l->name, name) == 0, "%s instead of %s", l->name, name);
    CHECK(e->hopper && l->block[0] == 32u * (unsigned)e->warps && l->shared_bytes == e->shared_bytes);
    *launch = l;
    return (const attn_cuda_args90 *)(const void *)l->args;
}

/* Dims: column, row, head, batch; strides are those of the tensor, where they count. blocks: of columns, in a box. */
static void check_map(const char *name, const attn_tensor_map *map, const attn_tensor *t, const uint64_t dims[4],
                      unsigned box_rows, unsigned blocks, int type) {
    stub_map m;
    memcpy(&m, map, sizeof m);
    static const int order[3] = {1, 2, 0}, place[4] = {0, 1, 3, 4};
    CHECK_SAY(m.address == t->data && m.type == type, "%s: %p, type %d", name, m.address, m.type);
    CHECK_SAY(m.box[0] == 64 && m.box[1] == box_rows && m.box[2] == blocks && m.box[3] == 1 && m.box[4] == 1,
              "%s: %u x %u, %u of them", name, m.box[0], m.box[1], m.box[2]);
    CHECK_SAY(m.dims[2] == (blocks > 1 ? dims[0] / 64 : 1) && m.strides[1] == 128, "%s: %llu blocks", name,
              (unsigned long long)m.dims[2]);
    for (int n = 0; n < 4; n++)
        CHECK_SAY(m.dims[place[n]] == (n == 0 && blocks > 1 ? 64 : dims[n]), "%s: dim %d is %llu", name, n,
                  (unsigned long long)m.dims[place[n]]);
    for (int n = 0; n < 3; n++)
        CHECK_SAY(dims[n + 1] == 1 || m.strides[place[n + 1] - 1] == 2 * (uint64_t)t->stride[order[n]],
                  "%s: stride %d is %llu", name, n, (unsigned long long)m.strides[place[n + 1] - 1]);
}

TEST(hopper_is_given_maps_of_the_tensors) {
    static const struct {
        attn_dtype dtype;
        int32_t dim, dim_v, bm, bn;
        const char *name;
    } rows[] = {
        {ATTN_BF16, 64, 64, 192, 128, "fwd_sm90_bf16_d64"},    {ATTN_F16, 88, 80, 128, 128, "fwd_sm90_f16_d96"},
        {ATTN_F16, 40, 128, 128, 128, "fwd_sm90_f16_d128"},    {ATTN_BF16, 192, 128, 128, 128, "fwd_sm90_bf16_d192_v128"},
        {ATTN_BF16, 192, 136, 128, 112, "fwd_sm90_bf16_d192"}, {ATTN_F16, 64, 304, 128, 96, "fwd_sm90_f16_d64_v512"},
        {ATTN_BF16, 256, 200, 128, 80, "fwd_sm90_bf16_d256"}};
    for (size_t n = 0; n < sizeof rows / sizeof rows[0]; n++) {
        const stub_launch *l;
        rig r = {.p = problem(rows[n].dtype, 3, 4, 2, 33, 65, rows[n].dim)};
        r.p.dim_v = rows[n].dim_v;
        stub_start();
        if (!rig_make_on(&r, 0)) return;
        attn_context *context = cuda_context();
        int type = rows[n].dtype == ATTN_F16 ? ATTN_CU_MAP_F16 : ATTN_CU_MAP_BF16;
        uint64_t dim = (uint64_t)rows[n].dim, dim_v = (uint64_t)rows[n].dim_v;
        r.f.k.stride[2] = 8192; /* heads further apart than rows */
        r.f.k.data = stub_memory(STUB_DEVICE, 0, 1 << 20);
        r.f.v.stride[1] = 0; /* every key the same one */
        CHECK_OK(rig_plan_and_run(context, &r, 0, NULL));
        const attn_cuda_args90 *x = hopper_launch(rows[n].name, &l);
        if (!x) return;
        CHECK(x->a.tma == ATTN_TMA_ALL && x->a.vector_ok);
        check_map("q", &x->q, &r.f.q, (uint64_t[]){dim, 33, 4, 3}, (unsigned)rows[n].bm, 1, type);
        check_map("k", &x->k, &r.f.k, (uint64_t[]){dim, 65, 2, 3}, (unsigned)rows[n].bn, 1, type);
        check_map("v", &x->v, &r.f.v, (uint64_t[]){dim_v, 65, 2, 3}, (unsigned)rows[n].bn, 1, type);
        check_map("o", &x->o, &r.f.o, (uint64_t[]){dim_v, 33, 4, 3}, 64, 1, type);
        attn_context_destroy(context);
        CHECK(stub_live() == 0);
        stub_stop();
        rig_free(&r);
    }
}

/* Packed tensors are one batch; a cache has its slots; a rotated q lies in the workspace; one row, head or batch has no stride. */
TEST(hopper_maps_follow_lengths_and_rotation) {
    static int32_t cu_q[] = {0, 30, 50}, cu_kv[] = {0, 20, 90}, index[] = {4, 1}, used[] = {5, 6};
    for (int way = 0; way < 4; way++) {
        const stub_launch *l;
        rig r = {.p = problem(ATTN_BF16, 2, 4, 2, 33, 70, 64)};
        stub_start();
        test_context("way %d", way);
        if (way == 0) {
            r.p.flags = ATTN_VARLEN_Q | ATTN_VARLEN_KV;
            r.p.total_q = 51;
            r.p.total_kv = 95;
            r.f.cu_q = cu_q;
            r.f.cu_kv = cu_kv;
        } else if (way == 1) {
            r.p.flags = ATTN_BATCH_INDEX;
            r.p.cache_batch = 5;
            r.f.batch_index = index;
        } else if (way == 2) {
            r.p.flags = ATTN_APPEND | ATTN_USED_KV | ATTN_ROTARY | ATTN_CAUSAL;
            r.p.max_new = 1;
            r.p.rotary_dim = 16;
            r.p.rotary_len = 100;
            r.f.used_kv = used;
        } else {
            r.p.batch = r.p.heads_q = r.p.heads_kv = r.p.max_kv = 1;
            r.p.max_q = 17; /* one row is not this kernel's */
            r.p.flags = ATTN_USED_KV;
            r.f.used_kv = used;
        }
        if (!rig_make_on(&r, 0)) return;
        const int32_t *const own[] = {cu_q, cu_kv, index, used};
        for (int n = 0; n < 4; n++) stub_adopt(STUB_DEVICE, 0, (void *)(uintptr_t)own[n], 3 * sizeof(int32_t));
        attn_context *context = cuda_context();
        if (way == 3) r.f.q.stride[0] = r.f.k.stride[1] = r.f.o.stride[2] = -7; /* not looked at */
        CHECK_OK(rig_plan_and_run(context, &r, 0, NULL));
        const attn_cuda_args90 *x = hopper_launch("fwd_sm90_bf16_d64_own", &l);
        if (!x) return;
        static const uint64_t q[4][4] = {{64, 51, 4, 1}, {64, 33, 4, 2}, {64, 33, 4, 2}, {64, 17, 1, 1}};
        static const uint64_t k[4][4] = {{64, 95, 2, 1}, {64, 70, 2, 5}, {64, 70, 2, 2}, {64, 1, 1, 1}};
        CHECK(x->a.tma == ATTN_TMA_ALL && (x->a.f.q.data != r.f.q.data) == (way == 2));
        check_map("q", &x->q, &x->a.f.q, q[way], 192, 1, ATTN_CU_MAP_BF16);
        check_map("k", &x->k, &r.f.k, k[way], 128, 1, ATTN_CU_MAP_BF16);
        check_map("v", &x->v, &r.f.v, k[way], 128, 1, ATTN_CU_MAP_BF16);
        check_map("o", &x->o, &r.f.o, q[way], 64, 1, ATTN_CU_MAP_BF16);
        attn_context_destroy(context);
        CHECK(stub_live() == 0);
        stub_stop();
        rig_free(&r);
    }
}

/* Runs the plan; the kernel that does without maps must be taken, with these maps and no others. */
static void check_without(attn_plan *plan, const attn_buffers *f, int32_t tma) {
    const stub_launch *l;
    static const attn_tensor_map none;
    stub_forget();
    CHECK_OK(attn_run(plan, f, NULL));
    const attn_cuda_args90 *x = hopper_launch("fwd_sm90_bf16_d64_own", &l);
    if (!x) return;
    CHECK_SAY(x->a.tma == tma, "bits %d instead of %d", x->a.tma, tma);
    CHECK((tma & ATTN_TMA_Q) || memcmp(&x->q, &none, sizeof none) == 0);
    CHECK((tma & ATTN_TMA_O) || memcmp(&x->o, &none, sizeof none) == 0);
}

TEST(hopper_serves_tensors_that_have_no_map) {
    rig r = {.p = problem(ATTN_BF16, 2, 4, 2, 33, 65, 64)};
    stub_start();
    if (!rig_make_on(&r, 0)) return;
    attn_context *context = cuda_context();
    attn_plan *plan;
    if (!CHECK_OK(attn_plan_create(&plan, context, &r.p))) return;
    CHECK(strcmp(attn_plan_kernel(plan), "fwd_sm90_bf16_d64") == 0);
    attn_buffers good = rig_forward_buffers(&r), f;
    const void *const start[] = {good.q.data, good.k.data, good.v.data, good.o.data};
    static const int32_t without[] = {ATTN_TMA_KV | ATTN_TMA_O, ATTN_TMA_Q | ATTN_TMA_O, ATTN_TMA_Q | ATTN_TMA_O,
                                      ATTN_TMA_Q | ATTN_TMA_KV};
    for (int n = 0; n < 4; n++) {
        test_context("the driver refuses tensor %d", n);
        stub.unmappable = start[n];
        check_without(plan, &good, without[n]);
        stub.unmappable = NULL;
        test_context("tensor %d is not aligned", n);
        f = good;
        attn_tensor *t[] = {&f.q, &f.k, &f.v, &f.o};
        t[n]->data = (char *)stub_memory(STUB_DEVICE, 0, 1 << 20) + 2;
        check_without(plan, &f, without[n]);
    }
    test_context("keys backwards");
    f = good;
    f.k.data = (char *)f.k.data + 64 * f.k.stride[1] * 2;
    f.k.stride[1] = -f.k.stride[1];
    stub_forget();
    check_without(plan, &f, ATTN_TMA_Q | ATTN_TMA_O);
    CHECK(stub_calls("cuTensorMapEncodeTiled") <= 4); /* q and o, for either kernel */
    test_context("sequences too far apart");
    f = good;
    f.v.stride[0] = INT64_C(1) << 39;
    check_without(plan, &f, ATTN_TMA_Q | ATTN_TMA_O);
    attn_plan_destroy(plan);
    attn_context_destroy(context);
    CHECK(stub_live() == 0);
    stub_stop();
    rig_free(&r);
}

/* A call that fails once is no error either: the other kernel gets what maps there are. */
TEST(hopper_survives_each_map_that_fails) {
    rig r = {.p = problem(ATTN_BF16, 2, 4, 2, 33, 65, 64)};
    stub_start();
    if (!rig_make_on(&r, 0)) return;
    attn_context *context = cuda_context();
    attn_plan *plan;
    if (!CHECK_OK(attn_plan_create(&plan, context, &r.p))) return;
    int found = 0;
    const char *failed = "";
    for (long n = 0; failed && n < 100; n++) {
        stub_forget();
        stub_fail(n, 719);
        attn_status status = rig_run_plan(plan, &r, 0, NULL);
        failed = stub_failed();
        if (!failed || strcmp(failed, "cuTensorMapEncodeTiled") != 0) continue;
        const stub_launch *l;
        CHECK_OK(status);
        const attn_cuda_args90 *x = hopper_launch("fwd_sm90_bf16_d64_own", &l);
        CHECK(x && x->a.tma == ATTN_TMA_ALL); /* the second time it worked */
        found++;
    }
    CHECK_SAY(found == 4, "%d maps", found);
    stub_fail(-1, 0);
    attn_plan_destroy(plan);
    attn_context_destroy(context);
    CHECK(stub_live() == 0);
    stub_stop();
    rig_free(&r);
}

/* Maps are of the tiles' dtype. */
TEST(hopper_maps_only_what_is_of_its_dtype) {
    static const struct {
        attn_dtype q, kv, out;
        int32_t tma;
    } ways[] = {{ATTN_F16, ATTN_E4M3, ATTN_F16, ATTN_TMA_Q | ATTN_TMA_O},
                {ATTN_F16, ATTN_F16, ATTN_F32, ATTN_TMA_Q | ATTN_TMA_KV},
                {ATTN_E4M3, ATTN_E4M3, ATTN_F16, ATTN_TMA_O}};
    for (int way = 0; way < 3; way++) {
        const stub_launch *l;
        rig r = {.p = problem(ways[way].q, 2, 4, 2, 33, 64, 128)};
        test_context("way %d", way);
        stub_start();
        r.p.kv_dtype = ways[way].kv;
        r.p.out_dtype = ways[way].out;
        if (!rig_make_on(&r, 0)) return;
        attn_context *context = cuda_context();
        CHECK_OK(rig_plan_and_run(context, &r, 0, NULL));
        const attn_cuda_args90 *x = hopper_launch("fwd_sm90_f16_d128_own", &l);
        CHECK_SAY(x && x->a.tma == ways[way].tma, "bits %d", x ? x->a.tma : -1);
        CHECK_SAY(x && x->a.box == 128, "boxes of %d rows", x ? x->a.box : -1);
        attn_context_destroy(context);
        CHECK(stub_live() == 0);
        stub_stop();
        rig_free(&r);
    }
}

/* A page is a batch of the map, and boxes have as many rows as divide both a tile and a page; no map below 8 of them. */
TEST(hopper_maps_pages_of_whole_boxes) {
    static const struct {
        int32_t dim, page_size, box;
    } ways[] = {{128, 16, 16}, {128, 256, 128}, {128, 24, 8},  {128, 8, 8},    {128, 12, 4},  {128, 7, 1},
                {128, 1, 1},   {64, 64, 64},    {256, 64, 16}, {256, 160, 80}, {192, 16, 16}, {192, 32, 16}};
    for (size_t way = 0; way < sizeof ways / sizeof ways[0]; way++) {
        const stub_launch *l;
        const int32_t pages = 700 / ways[way].page_size + 2;
        const bool maps = ways[way].box >= 8;
        const int32_t bn = ways[way].dim == 256 ? 80 : ways[way].dim == 192 ? 112 : 128;
        rig r = {.p = problem(ATTN_F16, 2, 4, 2, 33, 300, ways[way].dim)};
        char name[64];
        test_context("dim %d, pages of %d", ways[way].dim, ways[way].page_size);
        stub_start();
        r.p.page_size = ways[way].page_size;
        r.p.num_pages = pages + 2;
        if (!rig_make_on(&r, 0)) return;
        attn_context *context = cuda_context();
        CHECK_OK(rig_plan_and_run(context, &r, 0, NULL));
        snprintf(name, sizeof name, "fwd_sm90_f16_d%d_own", ways[way].dim);
        const attn_cuda_args90 *x = hopper_launch(name, &l);
        if (!x) return;
        CHECK_SAY(x->a.tma == (maps ? ATTN_TMA_ALL : ATTN_TMA_Q | ATTN_TMA_O), "bits %d", x->a.tma);
        CHECK_SAY(x->a.box == ways[way].box, "boxes of %d rows", x->a.box);
        const uint64_t dims[4] = {(uint64_t)ways[way].dim, (uint64_t)ways[way].page_size, 2, (uint64_t)r.p.num_pages};
        if (maps) {
            const unsigned blocks = ways[way].box == bn ? (unsigned)ways[way].dim / 64 : 1; /* a page is whole tiles */
            CHECK(x->whole == (ways[way].dim == 64 ? 0 : ATTN_WHOLE_Q | (blocks > 1 ? ATTN_WHOLE_K | ATTN_WHOLE_V : 0)));
            check_map("k", &x->k, &r.f.k, dims, (unsigned)ways[way].box, blocks, ATTN_CU_MAP_F16);
            check_map("v", &x->v, &r.f.v, dims, (unsigned)ways[way].box, blocks, ATTN_CU_MAP_F16);
        }
        attn_context_destroy(context);
        CHECK(stub_live() == 0);
        stub_stop();
        rig_free(&r);
    }
}

/* ---- work ---- */

/* Runs the problem; the arguments of the launch, which was of this kernel. Nothing is computed: tensors are as large as one likes. */
static const attn_cuda_args *run_work(attn_context *context, const attn_problem *p, const char *kernel, unsigned *blocks) {
    const stub_launch *l;
    void *memory = stub_memory(STUB_DEVICE, 0, 4096);
    rig r = {.p = *p, .f = {.size = sizeof r.f, .lse = memory}};
    r.f.q = r.f.o = attn_dense(memory, p->max_q, p->heads_q, p->dim_qk);
    r.f.k = r.f.v = attn_dense(memory, p->max_kv, p->heads_kv, p->dim_qk);
    stub_forget();
    CHECK_OK(rig_plan_and_run(context, &r, 0, NULL));
    const attn_cuda_args90 *x = hopper_launch(kernel, &l);
    if (!x) return NULL;
    CHECK_SAY(l->grid[1] == 1 && l->grid[2] == 1, "%u, %u", l->grid[1], l->grid[2]);
    *blocks = l->grid[0];
    return &x->a;
}

TEST(hopper_blocks_share_the_work) {
    static const struct {
        int32_t batch, heads, rows, keys;
        uint32_t flags;
        int sms;
        int64_t work;
        unsigned blocks;
        bool own;
    } cases[] = {
        {2, 4, 33, 65, 0, 132, 8, 8, false},                          /* a tile of each head */
        {1, 1, 17, 1, 0, 132, 1, 1, false},                           /* the least that there can be */
        {1, 1, 1, 1, 0, 132, 1, 1, true},                             /* the same of few rows */
        {1, 3, 44 * 192, 10, 0, 132, 3 * 44, 132, false},             /* just one each */
        {1, 3, 44 * 192 + 1, 10, 0, 132, 3 * 45, 132, false},         /* the 133rd and on are somebody's second */
        {1, 2, 1, 3000, 0, 132, 2 * 6, 12, true},                     /* six chunks */
        {50, 1, 20 * 192, 64, ATTN_CAUSAL, 132, 52 * 20, 132, false}, /* groups of 26: 20 * 26 is nearly 4 * 132 */
        {53, 1, 20 * 192, 64, ATTN_CAUSAL, 132, 80 * 20, 132, false}, /* of 40: and the last one may be short */
        {3, 4, 33, 65, ATTN_CAUSAL, 0, 12, 1, false},                 /* a driver that knows of no multiprocessor */
        {3, 4, 33, 65, 0, 0, 12, 1, false},
        {3, 4, 1, 3000, ATTN_CAUSAL, 0, 12 * 6, 1, true},
        {3, 4, 33, 65, ATTN_CAUSAL, 5, 12, 5, false},
    };
    for (size_t n = 0; n < sizeof cases / sizeof cases[0]; n++) {
        attn_problem p = problem(ATTN_BF16, cases[n].batch, cases[n].heads, 1, cases[n].rows, cases[n].keys, 64);
        unsigned blocks;
        p.flags = cases[n].flags;
        if (cases[n].own) p.dtype = ATTN_E4M3; /* otherwise few rows are not this kernel's */
        test_context("case %d", (int)n);
        stub_start();
        stub.sms = cases[n].sms;
        attn_context *context = cuda_context();
        const attn_cuda_args *a =
            run_work(context, &p, cases[n].own ? "fwd_sm90_f16_d64_own" : "fwd_sm90_bf16_d64", &blocks);
        if (!a) return;
        CHECK_SAY(a->work == cases[n].work, "%lld pieces", (long long)a->work);
        CHECK_SAY(blocks == cases[n].blocks, "%u blocks", blocks);
        attn_context_destroy(context);
        CHECK(stub_live() == 0);
        stub_stop();
    }
}

/*
 * Under a causal mask blocks take places forwards, then backwards: long rows and short ones add up if a group has twice as many
 * places as there are blocks, or a multiple of that, as nearly as whole heads allow. Up to 48 heads are a group, more if it takes them to
 * go round once. Without a mask all rows are alike.
 */
static void check_group(attn_context *context, int32_t tiles, int32_t heads, bool is_small) {
    const int64_t even = 2 * (int64_t)stub.sms;
    attn_problem p = problem(ATTN_BF16, 1, heads, 1, tiles * (is_small ? 192 : 128), 16, is_small ? 64 : 128);
    for (int causal = 0; causal < 2; causal++) {
        unsigned blocks;
        p.flags = causal ? ATTN_CAUSAL : 0;
        test_context("dim %d, %d tiles, %d heads, causal %d", p.dim_qk, tiles, heads, causal);
        const attn_cuda_args *a = run_work(context, &p, is_small ? "fwd_sm90_bf16_d64" : "fwd_sm90_bf16_d128", &blocks);
        if (!a) return;
        CHECK_SAY(a->row_tiles == tiles && a->slots == tiles, "%d tiles", a->row_tiles);
        if (!causal) {
            CHECK_SAY(a->group == 1, "groups of %d heads", a->group);
        } else if (a->group < heads) {
            int64_t places = (int64_t)a->group * tiles, past = places % even, off = past < even - past ? past : even - past;
            /* half a head more or less */
            CHECK_SAY(2 * off <= tiles, "%lld places, %lld off", (long long)places, (long long)off);
            CHECK_SAY(a->group <= 48 || places <= even + tiles, "groups of %d heads", a->group);
        } else {
            CHECK_SAY(a->group == heads, "groups of %d heads", a->group);
        }
        const uint32_t each = (uint32_t)a->group * (uint32_t)a->slots,
                       index[] = {0, each - 1, each, 5 * each - 1, INT32_MAX};
        for (int n = 0; n < 5; n++)
            CHECK_SAY(attn__divide(index[n], a->by_each) == index[n] / each, "%u / %u", index[n], each);
    }
}

TEST(hopper_groups_of_heads_are_even) {
    static const int32_t tiles[] = {1, 2, 3, 8, 11, 16, 40, 100, 132, 264, 300, 1000, 10000};
    static const int sms[] = {132, 114, 7, 1};
    for (size_t s = 0; s < sizeof sms / sizeof sms[0]; s++) {
        stub_start();
        stub.sms = sms[s];
        attn_context *context = cuda_context();
        for (size_t n = 0; n < sizeof tiles / sizeof tiles[0]; n++)
            for (int way = 0; way < 4; way++) check_group(context, tiles[n], way < 2 ? 3 : 600, way % 2);
        attn_context_destroy(context);
        CHECK(stub_live() == 0);
        stub_stop();
    }
}

/* Under a causal mask no block has much more to do than others: places are dealt as places.cuh does it, in rows of keys. */
TEST(hopper_blocks_get_the_same_work) {
    enum { BLOCKS = 132, ROWS = 128 };
    static const int32_t cases[][2] = {{512, 4},  {256, 8}, {128, 16}, {64, 32}, {32, 64},
                                       {16, 128}, {64, 43}, {40, 17},  {256, 21}};
    stub_start();
    stub.sms = BLOCKS;
    attn_context *context = cuda_context();
    for (size_t n = 0; n < sizeof cases / sizeof cases[0]; n++) {
        const int32_t heads = cases[n][0], tiles = cases[n][1];
        attn_problem p = problem(ATTN_BF16, 1, heads, 1, tiles * ROWS, tiles * ROWS, 128);
        p.flags = ATTN_CAUSAL;
        unsigned blocks;
        const attn_cuda_args *a = run_work(context, &p, "fwd_sm90_bf16_d128", &blocks);
        if (!a) break;
        int64_t work[BLOCKS] = {0}, most = 0, all = 0;
        for (int32_t place = 0; place < heads * tiles; place++) {
            const int32_t round = place / BLOCKS, at = place % BLOCKS, block = round % 2 ? BLOCKS - 1 - at : at;
            const int32_t left = heads - place / (a->group * tiles) * a->group, size = left < a->group ? left : a->group;
            const int32_t length = tiles - place % (a->group * tiles) / size + 2; /* 2: what a place takes besides */
            work[block] += length;
            all += length;
            if (work[block] > most) most = work[block];
        }
        CHECK_SAY((double)most * BLOCKS < 1.06 * (double)all, "%d heads, %d tiles, groups of %d: %.3f times the mean",
                  heads, tiles, a->group, (double)most * BLOCKS / (double)all);
    }
    attn_context_destroy(context);
    CHECK(stub_live() == 0);
    stub_stop();
}

/* Who launches by hand, as `attn tune` does, is told when the plain kernel cannot be had. */
TEST(hopper_plain_kernel_is_not_launched_without_maps) {
    rig r = {.p = problem(ATTN_BF16, 2, 4, 2, 33, 65, 64)};
    stub_start();
    if (!rig_make_on(&r, 0)) return;
    attn_context *context = cuda_context();
    attn_plan *plan;
    if (!CHECK_OK(attn_plan_create(&plan, context, &r.p))) return;
    attn_buffers f = rig_forward_buffers(&r);
    stub_set_current(stub_context(0));
    attn_cuda_run run = {.driver = context->cuda->state->driver, .entries = attn__cuda_entries, .sms = 132};
    run.kernels = context->cuda->kernel;
    run.forward = ATTN_ENTRY_fwd_sm90_bf16_d64;
    run.decode = -1;
    for (int way = 0; way < 2; way++) {
        stub.unmappable = way ? NULL : f.v.data;
        stub_forget();
        attn__cuda_map(&run, plan, &f);
        attn_status status = attn__cuda_forward(&run, plan, &f);
        CHECK_STATUS(status, way ? ATTN_OK : ATTN_DEVICE, way ? "" : "kernel=fwd_sm90_bf16_d64: wants maps");
        CHECK((forward_launch() != NULL) == way);
    }
    attn_plan_destroy(plan);
    attn_context_destroy(context);
    CHECK(stub_live() == 0);
    stub_stop();
    rig_free(&r);
}
