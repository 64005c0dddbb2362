/*
 * The host side of the cuda backend, on a stub of the driver (stub_driver.h): what is loaded, chosen, launched and refused, and
 * that every call of the driver may fail. No kernel runs here; results are compared on a GPU by `attn check --backend cuda`.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/cuda.h"
#include "cuda/flaw.h"
#include "cuda_rig.h"
#include "fault.h"
#include "test.h"

static rig small(void) { return (rig){.p = problem(ATTN_BF16, 2, 4, 2, 33, 65, 64)}; }

/* ---- what is missing is said ---- */

TEST(cuda_without_a_driver_says_why) {
    attn_context *context;
    Dl_info math = {0};
    double (*volatile function)(double) = cos;
    void *address;
    memcpy(&address, (void *)&function, sizeof address);
    CHECK(dladdr(address, &math) && math.dli_fname[0] == '/');
    stub_start();
    attn__driver_replace(NULL);
    setenv("ATTN_CUDA_DRIVER", "/nowhere/libcuda.so.1", 1);
    CHECK_STATUS(create_cuda(&context), ATTN_UNSUPPORTED, "backend=cuda: no CUDA driver (/nowhere/libcuda.so.1");
    CHECK(context == NULL);
    setenv("ATTN_CUDA_DRIVER", "libcuda.so.1", 1);
    CHECK_STATUS(create_cuda(&context), ATTN_INVALID, "ATTN_CUDA_DRIVER=libcuda.so.1: want an absolute path");
    setenv("ATTN_CUDA_DRIVER", math.dli_fname, 1);
    CHECK_STATUS(create_cuda(&context), ATTN_UNSUPPORTED, "has no cuDriverGetVersion");
    unsetenv("ATTN_CUDA_DRIVER");
    stub_start();
    CHECK_OK(create_cuda(&context)); /* a failure is not kept */
    attn_context_destroy(context);
    stub_stop();
}

TEST(cuda_that_cannot_serve_says_why) {
    attn_context *context;
    stub_start();
    stub.version = 11080;
    CHECK_STATUS(create_cuda(&context), ATTN_UNSUPPORTED, "for CUDA 11.8; want 12.0");
    stub_start();
    stub.init_error = ATTN_CU_NO_DEVICE;
    CHECK_STATUS(create_cuda(&context), ATTN_UNSUPPORTED, "no GPU");
    stub_start();
    stub.gpus = 0;
    CHECK_STATUS(create_cuda(&context), ATTN_UNSUPPORTED, "no GPU");
    stub_start();
    stub.init_error = 3;
    CHECK_STATUS(create_cuda(&context), ATTN_DEVICE, "cuInit=3: CUDA_ERROR_STUB, made to fail");
    stub_start();
    stub.arch[0] = 75;
    CHECK_STATUS(create_cuda(&context), ATTN_UNSUPPORTED, "Stub is sm_75, and sm_80 is the least");
    stub_start();
    stub.has_images = false;
    CHECK_STATUS(create_cuda(&context), ATTN_UNSUPPORTED, "built without GPU kernels");
    attn_kernel_info info;
    for (int32_t n = 0; attn_kernel_get(n, &info, sizeof info) == ATTN_OK; n++) {
        CHECK(strcmp(info.backend, "cuda") != 0 || !info.available);
    }
    stub_stop();
}

/* The library has all images or none, and each begins as a fatbin does. */
TEST(cuda_images_are_all_there_or_none) {
    bool any = attn__cuda_image(NULL) != NULL;
    for (int n = 0; n < ATTN_ENTRIES; n++) {
        const attn_cuda_entry *e = &attn__cuda_entries[n];
        const void *image = attn__cuda_image(e->file);
        uint32_t magic = 0;
        CHECK_SAY((image != NULL) == any, "%s of %s", e->name, e->file);
        if (image) memcpy(&magic, image, sizeof magic);
        CHECK_SAY(!image || magic == 0xba55ed50, "%s begins with %08x", e->file, (unsigned)magic);
        CHECK((uintptr_t)image % 64 == 0);
    }
    CHECK(attn__cuda_image("nothing.cu") == NULL);
}

/* ---- every call fails in turn ---- */

/* Merge and rotary on memory of the device; with one part more than a launch takes, so that merge needs memory of its own. */
static attn_status pieces(attn_context *context, void *stream) {
    enum { PARTS = ATTN_MERGE_PARTS + 1 };
    float *x = stub_memory(STUB_DEVICE, 0, 64 * sizeof *x), *o = stub_memory(STUB_DEVICE, 0, 64 * sizeof *o);
    attn_tensor parts[PARTS];
    const void *lse[PARTS];
    for (int n = 0; n < PARTS; n++) {
        parts[n] = attn_dense(x, 2, 2, 8);
        lse[n] = x;
    }
    attn_merge_args m = {.size = sizeof m, .dtype = ATTN_F32, .parts = PARTS, .batch = 1, .rows = 2, .heads = 2, .dim = 8};
    m.o_parts = parts;
    m.lse_parts = lse;
    m.o = attn_dense(o, 2, 2, 8);
    RETURN_IF_ERROR(attn_merge(context, &m, stream));
    attn_rotary_args r = {
        .size = sizeof r, .dtype = ATTN_F32, .batch = 1, .rows = 2, .heads = 2, .dim = 8, .rotary_dim = 8};
    r.rotary_len = 2;
    r.x = parts[0];
    r.y = m.o;
    r.cos = r.sin = x;
    return attn_rotary(context, &r, stream);
}

static bool failed_late; /* the call that failed was one of the context's end, where nobody can be told */

static attn_status whole_life(rig *r, void *stream) {
    attn_context *context;
    failed_late = false;
    RETURN_IF_ERROR(create_cuda(&context));
    attn_status status = rig_plan_and_run(context, r, 0, stream);
    bool backward = r->p.op == ATTN_BACKWARD;
    attn_buffers f = backward ? rig_backward_buffers(r) : rig_forward_buffers(r);
    f.workspace = NULL;
    if (status == ATTN_OK) status = (backward ? attn_backward : attn_forward)(context, &r->p, &f, stream);
    if (status == ATTN_OK) status = pieces(context, stream);
    if (status == ATTN_OK) status = attn_device_status(context);
    bool failed = stub_failed() != NULL;
    attn_context_destroy(context);
    failed_late = stub_failed() && !failed;
    return status;
}

/* The work is done when the context is popped, and it can only fail when there is nothing to pop. A tensor without a map is read
   without one, and a kernel of which it is not known that it waits is not launched early. */
static bool is_silent(const char *call) {
    return strcmp(call, "cuCtxPopCurrent") == 0 || strcmp(call, "cuTensorMapEncodeTiled") == 0 ||
           strcmp(call, "cuKernelGetAttribute") == 0;
}

/* A run of many launches: append, rotation, FlashMask, split, packed q; more rows than are split may come, so a counter is cleared. */
static rig rich(void) {
    static int32_t cu[] = {0, 3, 5}, used[] = {1000, 7}, pos[] = {0, 0};
    rig r = {.p = problem(ATTN_F16, 2, 4, 2, 17, 1100, 64)};
    r.p.flags = ATTN_CAUSAL | ATTN_VARLEN_Q | ATTN_USED_KV | ATTN_APPEND | ATTN_ROTARY | ATTN_ROTARY_POS;
    r.p.total_q = 6;
    r.p.max_new = 2;
    r.p.rotary_dim = 32;
    r.p.rotary_len = 16;
    r.p.flashmask_vectors = 1;
    r.f.cu_q = cu;
    r.f.used_kv = used;
    r.f.rotary_pos = pos;
    r.probs = true;
    return r;
}

static void fail_each_call(rig r) {
    stub_start();
    if (!rig_make_on(&r, 0)) return;
    adopt_ints(&r);
    for (int way = 0; way < 3; way++) { /* without a context, with one of the caller's, with a stream */
        attn_cu_context current = way == 1 ? stub_context(0) : NULL;
        void *stream = way == 2 ? stub_stream(0) : NULL;
        const char *failed = "";
        long n = 0, allocations = 0;
        for (; failed && n < 1000; n++) {
            stub_start();
            stub_set_current(current);
            stub_fail(n, 719);
            attn_status status = whole_life(&r, stream);
            failed = stub_failed();
            allocations += failed && strcmp(failed, "cuMemAllocAsync") == 0;
            test_context("way %d, call %ld, %s", way, n, failed ? failed : "none");
            bool told = failed && !failed_late && !is_silent(failed);
            CHECK_STATUS(status, told ? ATTN_DEVICE : ATTN_OK, told ? failed : "");
            if (told && strcmp(failed, "cuDriverGetVersion") != 0)
                CHECK(strstr(attn_error_detail(), "=719: ") || strstr(attn_error_detail(), "LAUNCH_FAILED"));
            CHECK_SAY(stub_live() == 0, "%d still held", stub_live());
            CHECK(stub_depth() == (current ? 1 : 0));
            stub_fail(-1, 0);
            CHECK_OK(whole_life(&r, stream));
        }
        CHECK_SAY(n > 30 && n < 1000, "%ld calls", n - 1);
        CHECK_SAY(allocations == 2, "%ld allocations on the stream: want a workspace and the state of merge", allocations);
    }
    stub_stop();
    rig_free(&r);
}
TEST(cuda_each_call_of_the_driver_fails) { fail_each_call(rich()); }
TEST(cuda_each_call_of_a_backward_fails) { fail_each_call(rich_backward()); }

TEST(cuda_out_of_memory_is_said) {
    rig r = rich();
    stub_start();
    if (!rig_make_on(&r, 0)) return;
    adopt_ints(&r);
    attn_context *context = cuda_context();
    attn_buffers f = rig_forward_buffers(&r);
    CHECK_OK(attn_forward(context, &r.p, &f, NULL)); /* the plan is kept */
    int found = 0;
    for (long n = 0; n < 100; n++) {
        stub_fail(n, ATTN_CU_OUT_OF_MEMORY);
        attn_status status = attn_forward(context, &r.p, &f, NULL);
        const char *failed = stub_failed();
        if (!failed) break;
        if (strcmp(failed, "cuMemAllocAsync") != 0) continue;
        CHECK_STATUS(status, ATTN_NO_MEMORY, "cuMemAllocAsync=2");
        found++;
    }
    CHECK(found == 1);
    stub_fail(-1, 0);
    attn_context_destroy(context);
    CHECK(stub_live() == 0);
    stub_stop();
    rig_free(&r);
}

TEST(cuda_each_allocation_fails) {
    rig r = small();
    stub_start();
    if (!rig_make_on(&r, 0)) return;
    long n = 0, hit = 1;
    for (; hit && n < 100; n++) {
        test_context("allocation %ld", n);
        attn__fault_arm(ATTN_FAULT_ALLOC, n, 0);
        attn_status status = whole_life(&r, NULL);
        hit = attn__fault_hit(ATTN_FAULT_ALLOC);
        attn__fault_arm(ATTN_FAULT_ALLOC, -1, 0);
        CHECK(status == (hit ? ATTN_NO_MEMORY : ATTN_OK));
        CHECK(stub_live() == 0 && stub_depth() == 0);
    }
    CHECK(n > 3 && n < 100);
    stub_stop();
    rig_free(&r);
}

/* ---- pointers, devices, streams ---- */

TEST(cuda_refuses_memory_that_it_cannot_reach) {
    rig r = small();
    stub_start();
    stub.gpus = 2;
    if (!rig_make_on(&r, 0)) return;
    attn_context *context = cuda_context();
    attn_plan *plan;
    if (!CHECK_OK(attn_plan_create(&plan, context, &r.p))) return;
    attn_buffers good = rig_forward_buffers(&r);
    char text[64];
    static _Alignas(64) char pageable[1 << 17];
    void *elsewhere = stub_memory(STUB_DEVICE, 1, sizeof pageable), *pinned = stub_memory(STUB_PINNED, 1, sizeof pageable);
    void *managed = stub_memory(STUB_MANAGED, 1, sizeof pageable);
    stub_forget();
    for (int n = 0; n < 4; n++) {
        static const char *const names[] = {"q.data", "k.data", "lse", "workspace"};
        attn_buffers f = good;
        void **field[] = {&f.q.data, &f.k.data, &f.lse, &f.workspace};
        f.workspace_size = sizeof pageable;
        if (n == 3 && attn_plan_workspace(plan) == 0) continue; /* it is not looked at */
        *field[n] = pageable;
        snprintf(text, sizeof text, "%s=%p: is host memory that the GPU cannot reach", names[n], (void *)pageable);
        CHECK_STATUS(attn_run(plan, &f, NULL), ATTN_INVALID, text);
        *field[n] = elsewhere;
        snprintf(text, sizeof text,
                 n == 0 ? "is on device 0, and q.data is on device 1" : "%s=%p: is on device 1, and q.data", names[n],
                 elsewhere);
        CHECK_STATUS(attn_run(plan, &f, NULL), ATTN_INVALID, text);
        CHECK(stub_launches() == 0 && stub_depth() == 0);
        *field[n] = pinned;
        CHECK_OK(attn_run(plan, &f, NULL));
        *field[n] = managed;
        CHECK_OK(attn_run(plan, &f, NULL));
        CHECK(stub_launches() > 0);
        stub_forget();
    }
    snprintf(text, sizeof text, "stream=%p: is of device 1, and q.data is on device 0", (void *)stub_stream(1));
    CHECK_STATUS(attn_run(plan, &good, stub_stream(1)), ATTN_INVALID, text);
    CHECK(stub_launches() == 0 && stub_depth() == 0);
    attn_plan_destroy(plan);
    attn_context_destroy(context);
    CHECK(stub_live() == 0);
    stub_stop();
    rig_free(&r);
}

TEST(cuda_runs_where_the_memory_is) {
    rig r = small();
    stub_start();
    stub.gpus = 3;
    stub.arch[1] = 86;
    stub.shared_bytes[1] = 101376;
    stub.arch[2] = 75;
    if (!rig_make_on(&r, 1)) return;
    attn_context *context = cuda_context();
    for (int way = 0; way < 4; way++) { /* no context; another device's; the right one; a stream's */
        static const int current[] = {-1, 0, 1, 0};
        test_context("way %d", way);
        stub_set_current(current[way] < 0 ? NULL : stub_context(current[way]));
        stub_forget();
        CHECK_OK(rig_plan_and_run(context, &r, 1, way == 3 ? stub_stream(1) : NULL));
        const stub_launch *l = forward_launch();
        if (!CHECK(l != NULL)) return;
        CHECK((l->context == stub_context(1)) == (way >= 2)); /* otherwise the primary one */
        CHECK(l->stream == (way == 3 ? stub_stream(1) : NULL));
        CHECK(stub_depth() == (current[way] < 0 ? 0 : 1));
        const attn_cuda_entry *e = entry_named(l->name);
        CHECK(e && e->arch <= 86 && e->shared_bytes <= 101376 && l->shared_bytes == e->shared_bytes);
    }
    stub_set_current(NULL);
    rig other = small();
    if (!rig_make_on(&other, 2)) return;
    CHECK_STATUS(rig_plan_and_run(context, &other, 2, NULL), ATTN_UNSUPPORTED, "device 2: Stub is sm_75");
    CHECK(stub_depth() == 0);
    attn_context_destroy(context);
    CHECK(stub_live() == 0);
    stub_stop();
    rig_free(&r);
    rig_free(&other);
}

/* Where every new key is one that some row sees, decode brings it into the cache and rotates q itself. */
TEST(cuda_decode_appends_and_rotates_in_its_own_launch) {
    static int32_t used[400], rows[] = {3, 0};
    static const struct {
        const char *what;
        int32_t batch, max_new, window;
        uint32_t flags;
        attn_dtype table;
        bool probs;
        int launches;
    } cases[] = {
        {"one launch", 2, 2, 0, 0, ATTN_F32, false, 1},
        {"tables of float16", 2, 16, 0, 0, ATTN_F16, false, 1},
        {"tables of double", 2, 2, 0, 0, ATTN_F64, false, 3},
        {"many new keys", 2, 17, 0, 0, ATTN_F32, false, 3},
        {"a window", 2, 2, 1, ATTN_WINDOW, ATTN_F32, false, 1},
        {"an open window", 2, 16, -1, ATTN_WINDOW, ATTN_F32, false, 1},
        {"a window that hides new keys", 2, 3, 1, ATTN_WINDOW, ATTN_F32, false, 3},
        {"sequences without rows", 2, 2, 0, ATTN_USED_Q, ATTN_F32, false, 3},
        {"many sequences", 400, 2, 0, 0, ATTN_F32, false, 3},
        {"probabilities", 2, 2, 0, 0, ATTN_F32, true, 4},
    };
    for (size_t n = 0; n < sizeof cases / sizeof cases[0]; n++) {
        rig r = {.p = problem(ATTN_F16, cases[n].batch, 4, 2, 3, 40, 64), .probs = cases[n].probs};
        r.p.flags = ATTN_CAUSAL | ATTN_USED_KV | ATTN_APPEND | ATTN_ROTARY | cases[n].flags;
        r.p.max_new = cases[n].max_new;
        r.p.window_left = cases[n].window;
        r.p.rotary_dim = 32;
        r.p.rotary_len = 40;
        r.p.rotary_dtype = cases[n].table;
        r.f.used_kv = used;
        if (cases[n].flags & ATTN_USED_Q) r.f.used_q = rows;
        test_context("%s", cases[n].what);
        stub_start();
        if (!rig_make_on(&r, 0)) return;
        stub_adopt(STUB_DEVICE, 0, used, sizeof used);
        stub_adopt(STUB_DEVICE, 0, rows, sizeof rows);
        attn_context *context = cuda_context();
        stub_forget();
        CHECK_OK(rig_plan_and_run(context, &r, 0, NULL));
        CHECK(stub_launches() == cases[n].launches);
        CHECK(strncmp(stub_launch_at(stub_launches() - 1 - cases[n].probs)->name, "decode_", 7) == 0);
        attn_context_destroy(context);
        CHECK(stub_live() == 0);
        stub_stop();
        rig_free(&r);
    }
}

/* How many of the launches are early, those of kernels that wait; -1: another one is, too. */
static int early_launches(attn_context *context, rig *r) {
    int count = 0;
    stub_forget();
    CHECK_OK(rig_plan_and_run(context, r, 0, NULL));
    for (int n = 0; n < stub_launches(); n++) {
        const stub_launch *l = stub_launch_at(n);
        if (l->is_early && !entry_named(l->name)->waits) return -1;
        count += l->is_early;
    }
    return count;
}

/* From sm_90 on, with a driver that keeps it in graphs, unless the environment says no: decode, and neither the append nor the rotation of q before it. */
TEST(cuda_kernels_that_wait_are_launched_early) {
    static const struct {
        int arch, version;
        const char *serial;
        int want;
    } cases[] = {{90, 13000, NULL, 1}, {100, 12030, "0", 1}, {90, 12020, "", 0}, {89, 13000, NULL, 0}, {90, 13000, "1", 0}};
    for (size_t n = 0; n < sizeof cases / sizeof cases[0]; n++) {
        rig r = rich();
        r.p.max_q = 3; /* few rows, without FlashMask: decode */
        r.p.flashmask_vectors = 0;
        r.probs = false;
        test_context("case %zu", n);
        stub_start();
        stub.arch[0] = cases[n].arch;
        stub.version = cases[n].version;
        if (cases[n].serial) setenv("ATTN_CUDA_SERIAL", cases[n].serial, 1);
        if (!rig_make_on(&r, 0)) return;
        adopt_ints(&r);
        attn_context *context = cuda_context();
        CHECK(early_launches(context, &r) == cases[n].want);
        attn_context_destroy(context);
        unsetenv("ATTN_CUDA_SERIAL");
        CHECK(stub_live() == 0);
        stub_stop();
        rig_free(&r);
    }
}

/* A captured stream allows neither synchronisation nor allocation: a run may make these calls and no other. */
TEST(cuda_run_can_be_captured) {
    static const char *const allowed[] = {"cuPointerGetAttributes", "cuCtxGetCurrent",        "cuCtxGetDevice",
                                          "cuStreamGetCtx",         "cuCtxPushCurrent",       "cuCtxPopCurrent",
                                          "cuLaunchKernelEx",       "cuTensorMapEncodeTiled", "cuMemsetD32Async"};
    rig r = rich();
    stub_start();
    if (!rig_make_on(&r, 0)) return;
    adopt_ints(&r);
    attn_context *context = cuda_context();
    attn_plan *plan;
    if (!CHECK_OK(attn_plan_create(&plan, context, &r.p))) return;
    for (int way = 0; way < 2; way++) {
        if (way == 0) stub_set_current(stub_context(0));
        stub_forget();
        attn__fault_arm(ATTN_FAULT_ALLOC, 0, 1);
        CHECK_OK(rig_run_plan(plan, &r, 0, stub_stream(0)));
        CHECK(attn__fault_seen(ATTN_FAULT_ALLOC) == 0);
        attn__fault_arm(ATTN_FAULT_ALLOC, -1, 0);
        long known = 0;
        for (size_t n = 0; n < sizeof allowed / sizeof allowed[0]; n++) known += stub_calls(allowed[n]);
        CHECK_SAY(known == stub_calls(NULL), "%ld other calls", stub_calls(NULL) - known);
        CHECK(stub_calls("cuLaunchKernelEx") >= 5);
        CHECK(stub_calls("cuMemsetD32Async") == 1);
    }
    attn_plan_destroy(plan);
    attn_context_destroy(context);
    CHECK(stub_live() == 0);
    stub_stop();
    rig_free(&r);
}

/* ---- the status word ---- */

TEST(cuda_device_status_says_what_was_out_of_range) {
    rig r = small();
    stub_start();
    if (!rig_make_on(&r, 0)) return;
    CHECK_STATUS(attn_device_status(NULL), ATTN_INVALID, "context=NULL");
    attn_context *cpu = make_context(ATTN_BACKEND_CPU, 1), *context = cuda_context();
    CHECK_OK(attn_device_status(cpu));
    CHECK_OK(attn_device_status(context)); /* nothing has run */
    stub_forget();
    CHECK_OK(rig_plan_and_run(context, &r, 0, NULL));
    const stub_launch *l = forward_launch();
    if (!CHECK(l != NULL)) return;
    uint64_t *status = stub_args(l)->status;
    CHECK(status && *status == 0);
    *status = (uint64_t)ATTN_FLAW_USED_KV << 32 | 17;
    CHECK_STATUS(attn_device_status(context), ATTN_INVALID,
                 "used_kv[17]: out of range on the device; it was brought into range");
    CHECK_OK(attn_device_status(context));
    attn_context_destroy(context);
    attn_context_destroy(cpu);
    CHECK(stub_live() == 0);
    stub_stop();
    rig_free(&r);
}

/* ---- choice of kernel, split, workspace ---- */

typedef struct feature {
    const char *name;
    bool all;     /* beyond what the plain kernels do */
    bool lengths; /* beyond what the plain ones of Hopper do, but not its OWN ones */
    int32_t rows; /* 0: 100 */
    uint32_t flags;
    double scale, softcap, dropout;
    int32_t vectors, page_size;
    attn_dtype out_dtype;
} feature;

/* The last row of the least dim that fits; fwd_any when no other does, and for factors of pages. */
static const attn_cuda_entry *best_row(attn_dtype tile, int32_t dim, bool odd, const feature *x) {
    const attn_cuda_entry *best = &attn__cuda_entries[ATTN_ENTRY_fwd_any];
    for (int n = 0; n < ATTN_ENTRIES && !(x->flags & ATTN_DESCALE_PAGES); n++) {
        const attn_cuda_entry *e = &attn__cuda_entries[n];
        bool has_code = e->hopper ? stub.arch[0] == 90 : e->arch <= stub.arch[0];
        bool is_plain = !x->all && !odd && !(e->hopper && x->lengths);
        bool takes = e->takes == ATTN_TAKES_ALL || (e->takes == ATTN_TAKES_OWN && !x->all) || is_plain;
        bool fits = e->op == ATTN_FORWARD && !e->decode && e->dtype == tile && e->dim_qk >= dim && e->most_v >= dim &&
                    takes && has_code && e->shared_bytes <= (size_t)stub.shared_bytes[0] && n != ATTN_ENTRY_fwd_any;
        if (fits && e->dim <= best->dim) best = e;
    }
    return best;
}

/* So many rows, with heads that share a KV head, of q, k and v of one dtype, or ATTN_I8: of k and v of 8 bits. Up to 8, and with factors of pages, these are lines of 8. */
static const attn_cuda_entry *best_decode(attn_dtype dtype, int32_t dim, int32_t rows, bool pages) {
    const attn_cuda_entry *best = NULL;
    for (int n = 0; n < ATTN_ENTRIES; n++) {
        const attn_cuda_entry *e = &attn__cuda_entries[n];
        const bool fits = e->decode && !e->latent && e->dtype == dtype && e->dim >= dim && e->pages == pages &&
                          e->bm == (rows <= 8 || pages ? 8 : 16) && e->shared_bytes <= (size_t)stub.shared_bytes[0];
        if (fits && (!best || e->dim < best->dim)) best = e;
    }
    return best;
}

static void check_choice(attn_context *context, attn_dtype q, attn_dtype kv, attn_dtype tile, int32_t dim,
                         const feature *x) {
    attn_problem p = problem(q, 2, 4, 2, x->rows ? x->rows : 100, 300, dim);
    attn_plan *plan;
    p.kv_dtype = kv;
    p.flags |= x->flags;
    p.scale = x->scale;
    p.softcap = x->softcap;
    p.dropout = x->dropout;
    p.flashmask_vectors = x->vectors;
    p.page_size = x->page_size;
    p.num_pages = x->page_size ? 100 : 0;
    p.out_dtype = q == ATTN_F64 ? ATTN_F64 : x->out_dtype;
    p.cache_batch = p.flags & ATTN_BATCH_INDEX ? 5 : 0;
    p.window_left = p.flags & ATTN_WINDOW ? 7 : 0;
    p.total_q = p.flags & ATTN_VARLEN_Q ? 150 : 0;
    p.total_kv = p.flags & ATTN_VARLEN_KV ? 400 : 0;
    p.max_new = p.flags & ATTN_APPEND ? 3 : 0;
    test_context("%s/%s, dim %d, %s", attn_dtype_name(q), attn_dtype_name(kv), dim, x->name);
    if (!CHECK_OK(attn_plan_create(&plan, context, &p))) return;
    bool out_differs = attn_dtype_size(q) == 1 || (x->out_dtype && x->out_dtype != q);
    bool odd = x->page_size || kv != q || out_differs || dim * attn_dtype_size(q) % 16;
    const bool is_narrow = attn_dtype_size(kv) == 1 && (q == ATTN_F16 || q == ATTN_BF16);
    const bool is_short = x->rows && x->rows <= ATTN_CUDA_SPLIT_ROWS && (is_narrow || kv == q) &&
                          !(x->flags & (is_narrow ? ATTN_BIAS : ATTN_BIAS | ATTN_DESCALE));
    const bool pages = x->flags & ATTN_DESCALE_PAGES;
    const attn_cuda_entry *few = is_short ? best_decode(is_narrow ? ATTN_I8 : q, dim, 2 * x->rows, pages) : NULL;
    const attn_cuda_entry *want = few ? few : best_row(tile, dim, odd, x);
    const attn_cuda_entry *e = entry_named(attn_plan_kernel(plan));
    CHECK_SAY(e == want, "%s instead of %s", e->name, want->name);
    CHECK(e->takes == ATTN_TAKES_ALL || !x->all);
    attn_plan_destroy(plan);
}

TEST(cuda_chooses_the_kernel_by_dtype_dim_and_feature) {
    static const struct {
        attn_dtype q, kv, tile;
    } dtypes[] = {
        {ATTN_F32, ATTN_F32, ATTN_F32},   {ATTN_F16, ATTN_F16, ATTN_F16},    {ATTN_BF16, ATTN_BF16, ATTN_BF16},
        {ATTN_F16, ATTN_E4M3, ATTN_F16},  {ATTN_BF16, ATTN_E5M2, ATTN_BF16}, {ATTN_BF16, ATTN_I8, ATTN_BF16},
        {ATTN_F16, ATTN_BF16, ATTN_F32},  {ATTN_BF16, ATTN_F16, ATTN_F32},   {ATTN_F16, ATTN_F32, ATTN_F32},
        {ATTN_E4M3, ATTN_E4M3, ATTN_F16}, {ATTN_E4M3, ATTN_BF16, ATTN_F32},  {ATTN_F64, ATTN_F64, ATTN_F64},
    };
    static const feature features[] = {
        {"plain", .all = false},
        {"causal, window, sink", .flags = ATTN_CAUSAL | ATTN_WINDOW | ATTN_SINK},
        {"lengths", .lengths = true, .flags = ATTN_USED_Q | ATTN_USED_KV | ATTN_LEFTPAD | ATTN_BATCH_INDEX},
        {"used_q", .lengths = true, .flags = ATTN_USED_Q},
        {"used_kv", .lengths = true, .flags = ATTN_USED_KV},
        {"left padding", .lengths = true, .flags = ATTN_LEFTPAD},
        {"slots", .lengths = true, .flags = ATTN_BATCH_INDEX},
        {"packed q", .lengths = true, .flags = ATTN_VARLEN_Q},
        {"packed kv", .lengths = true, .flags = ATTN_VARLEN_KV},
        {"append", .lengths = true, .flags = ATTN_APPEND | ATTN_USED_KV},
        {"few enough rows to be split", .lengths = true, .rows = ATTN_CUDA_SPLIT_ROWS},
        {"one row more", .rows = ATTN_CUDA_SPLIT_ROWS + 1},
        {"eight rows, two heads of a group together", .lengths = true, .rows = 4},
        {"more than eight", .lengths = true, .rows = 5},
        {"few rows, descale", .all = true, .rows = 1, .flags = ATTN_DESCALE},
        {"few rows, factors of pages", .all = true, .rows = 1, .flags = ATTN_DESCALE | ATTN_DESCALE_PAGES, .page_size = 16},
        {"factors of pages", .all = true, .flags = ATTN_DESCALE | ATTN_DESCALE_PAGES, .page_size = 16},
        {"few rows, bias", .all = true, .rows = 1, .flags = ATTN_BIAS},
        {"alibi", .all = true, .flags = ATTN_ALIBI},
        {"bias", .all = true, .flags = ATTN_BIAS},
        {"descale", .all = true, .flags = ATTN_DESCALE},
        {"softcap", .all = true, .softcap = 30},
        {"dropout", .all = true, .dropout = 0.1},
        {"flashmask", .all = true, .flags = ATTN_CAUSAL, .vectors = 1},
        {"pages", .page_size = 16},
        {"negative scale", .all = true, .flags = ATTN_SCALE, .scale = -1},
        {"scale that is zero in float", .all = true, .flags = ATTN_SCALE, .scale = 1e-60},
        {"out", .out_dtype = ATTN_F32},
    };
    static const int32_t dims[] = {1, 30, 32, 33, 40, 64, 80, 96, 128, 192, 256, 257, 512, 576};
    static const int gpus[][2] = {{90, 232448}, {89, 101376}, {100, 232448}, {90, 100000}};
    for (size_t gpu = 0; gpu < sizeof gpus / sizeof gpus[0]; gpu++) {
        stub_start();
        stub.arch[0] = gpus[gpu][0];
        stub.shared_bytes[0] = gpus[gpu][1];
        attn_context *context = cuda_context();
        for (size_t t = 0; t < sizeof dtypes / sizeof dtypes[0]; t++) {
            for (size_t d = 0; d < sizeof dims / sizeof dims[0]; d++) {
                for (size_t x = 0; x < sizeof features / sizeof features[0]; x++) {
                    attn_dtype out = features[x].out_dtype;
                    if (out && dtypes[t].q == ATTN_F64) continue;
                    feature one = features[x];
                    check_choice(context, dtypes[t].q, dtypes[t].kv, dtypes[t].tile, dims[d], &one);
                }
            }
        }
        attn_context_destroy(context);
        CHECK(stub_live() == 0);
        stub_stop();
    }
}

static void check_division(uint32_t by) {
    const attn_divider d = attn__divider((int32_t)by);
    const uint32_t most = INT32_MAX, last = most / by * by;
    const uint32_t x[] = {0, 1, by - 1, by, last - 1, last, most - 1, most, most / 2, most / 3 * 2};
    for (size_t n = 0; n < sizeof x / sizeof x[0]; n++)
        CHECK_SAY(attn__divide(x[n], d) == x[n] / by, "%u / %u is not %u", x[n], by, attn__divide(x[n], d));
}

/* Blocks find their head by divisions that are multiplications: exact for every number below 2^31, at the ends above all. */
TEST(cuda_divides_by_multiplication) {
    for (int bit = 0; bit <= 31; bit++) {
        for (int more = -1; more <= 1; more++) {
            int64_t by = (INT64_C(1) << bit) + more;
            if (by >= 1 && by <= INT32_MAX) check_division((uint32_t)by);
        }
    }
}

/* Heads are counted as often as blocks share their V: no plan for more than can be counted. */
TEST(cuda_refuses_more_heads_than_it_counts) {
    stub_start();
    attn_context *context = cuda_context();
    attn_problem p = problem(ATTN_BF16, 1, 1 << 30, 1, 1, 1, 64);
    attn_plan *plan = NULL;
    p.dim_v = 512;
    p.flags = ATTN_VARLEN_Q;
    p.total_q = 0;
    CHECK(attn_plan_create(&plan, context, &p) == ATTN_UNSUPPORTED && strstr(attn_error_detail(), "heads_q=1073741824"));
    p.dim_v = 64;
    CHECK_OK(attn_plan_create(&plan, context, &p));
    attn_plan_destroy(plan);
    attn_context_destroy(context);
    CHECK(stub_live() == 0);
    stub_stop();
}

/* Moves a tensor's start by one element. */
TEST(cuda_takes_rows_of_any_alignment) {
    rig r = {.p = problem(ATTN_BF16, 2, 4, 2, 33, 64, 64)};
    stub_start();
    if (!rig_make_on(&r, 0)) return;
    attn_context *context = cuda_context();
    attn_plan *plan;
    if (!CHECK_OK(attn_plan_create(&plan, context, &r.p))) return;
    char line[128];
    for (int way = 0; way < 6; way++) {
        attn_buffers f = rig_forward_buffers(&r);
        f.workspace = stub_memory(STUB_DEVICE, 0, 1 << 20);
        f.workspace_size = 1 << 20;
        attn_tensor *t[] = {&f.q, &f.k, &f.v};
        char *room = stub_memory(STUB_DEVICE, 0, 1 << 20);
        if (way < 3) t[way]->data = room + 2;
        if (way == 3) f.k = attn_dense(room, 64, 2, 65);
        if (way == 4) f.k = attn_dense(room, 64, 2, 72); /* aligned: rows of 144 bytes */
        bool aligned = way >= 4;
        test_context("way %d", way);
        stub_forget();
        CHECK_OK(attn_run(plan, &f, NULL));
        const stub_launch *l = forward_launch();
        if (!CHECK(l != NULL)) return;
        const attn_cuda_entry *e = entry_named(l->name);
        CHECK(stub_args(l)->vector_ok == aligned);
        CHECK(e->takes != ATTN_TAKES_PLAIN || aligned);
        CHECK(!aligned || strcmp(l->name, attn_plan_kernel(plan)) == 0);
        snprintf(line, sizeof line, "rows that are not 16-byte aligned, strides that TMA does not take: %s\n", l->name);
        if (strcmp(l->name, attn_plan_kernel(plan)) != 0) CHECK(strstr(attn_plan_describe(plan), line) != NULL);
    }
    attn_plan_destroy(plan);
    attn_context_destroy(context);
    stub_stop();
    rig_free(&r);
}

TEST(cuda_workspace_is_as_large_as_documented) {
    stub_start();
    attn_context *context = cuda_context();
    attn_problem p = problem(ATTN_BF16, 3, 4, 2, 1, 2048, 64);
    size_t parts = 3 * 4 * 1 * 4; /* batch, heads, rows, chunks of 512 keys */
    const size_t counters = 64;
    CHECK(workspace_of(context, p) ==
          3 * 2 * 4 * 2 * 66 * 4 + counters); /* batch, KV heads, spans, rows of the group, dim + 2 */
    p.max_kv = 1024;
    CHECK(workspace_of(context, p) == 3 * 2 * 2 * 2 * 66 * 4 + counters);
    p.max_kv = 512;
    CHECK(workspace_of(context, p) == 0); /* one span */
    p.max_kv = 16385;                     /* three supers */
    CHECK(workspace_of(context, p) == (3 * 2 * 3 * 16 + 3 * 2 * 3) * 2 * 66 * 4 + 32 + 3 * counters);
    p.batch = 1000; /* no more of them are shared than blocks end in: 132 multiprocessors have two each */
    CHECK(workspace_of(context, p) == (263 * 16 + 1000 * 2 * 3) * 2 * 66 * 4 + (263 + 2000) / 8 * 64 + 64);
    p.batch = 3;
    p.max_kv = 2048;
    p.max_q = 17;
    CHECK(workspace_of(context, p) == 0); /* no sequence is short */
    const size_t counter =
        64;                /* a number, on a cache line of its own: Hopper's kernels for sequences of different lengths */
    p.flags = ATTN_USED_Q; /* one may be short */
    CHECK(workspace_of(context, p) ==
          3 * 2 * 2 * 4 * 16 * 66 * 4 + 2 * counters + counter); /* its 32 rows are two times 16 */
    p.dropout = 0.5;                                             /* chunks */
    CHECK(workspace_of(context, p) == 16 * parts * (64 * 4 + 4) + counter);
    p.flags = ATTN_VARLEN_Q; /* no more rows than all sequences have together: 19 of four heads, four chunks ... */
    p.total_q = 19;
    CHECK(workspace_of(context, p) == 19 * 4 * 4 * (64 * 4 + 4) + counter);
    p.total_q = 1000; /* ... and no more than 16 of each of the three */
    CHECK(workspace_of(context, p) == 16 * parts * (64 * 4 + 4) + counter);
    p = problem(ATTN_F64, 3, 4, 2, 1, 2048, 64);
    CHECK(workspace_of(context, p) == parts * (64 * 8 + 8));
    p = problem(ATTN_F16, 2, 4, 2, 40, 100, 36);
    p.flags = ATTN_APPEND | ATTN_USED_KV | ATTN_ROTARY | ATTN_CAUSAL;
    p.max_new = 1;
    p.rotary_dim = 2;
    p.rotary_len = 100;
    CHECK(workspace_of(context, p) == 2 * 40 * 4 * 40 * 2 + counter); /* rows of 36 numbers are padded to 40 */
    p = problem(ATTN_F16, 3, 4, 2, 40, 600, 64);
    p.flashmask_vectors = 2;
    p.flashmask_heads = 2;
    CHECK(workspace_of(context, p) ==
          3 * 2 * 19 * 32 + counter); /* batch, heads, tiles of 32 keys, two times four numbers */
    p.dim_qk = p.dim_v = 512;
    CHECK(workspace_of(context, p) == 3 * 2 * 38 * 32); /* that kernel's tiles have 16 */
    p = problem(ATTN_F16, 1 << 20, 64, 64, 16, 1 << 20, 576);
    attn_plan *plan;
    CHECK_STATUS(attn_plan_create(&plan, context, &p), ATTN_OK, ""); /* 2^60 bytes are many, and can be counted */
    attn_plan_destroy(plan);
    attn_context_destroy(context);
    CHECK(stub_live() == 0);
    stub_stop();
}

/* Workspace of a one-shot call comes from the stream and goes back to it; the caller's is used where it is large enough. */
TEST(cuda_one_shot_takes_workspace_from_the_stream) {
    rig r = {.p = problem(ATTN_BF16, 1, 2, 2, 1, 1024, 64)};
    stub_start();
    if (!rig_make_on(&r, 0)) return;
    attn_context *context = cuda_context();
    attn_buffers f = rig_forward_buffers(&r);
    CHECK_OK(attn_forward(context, &r.p, &f, stub_stream(0)));
    CHECK(stub_calls("cuMemAllocAsync") == 1 && stub_calls("cuMemFreeAsync") == 1);
    f.workspace_size = 1 << 20;
    f.workspace = stub_memory(STUB_DEVICE, 0, f.workspace_size);
    CHECK_OK(attn_forward(context, &r.p, &f, stub_stream(0)));
    CHECK(stub_calls("cuMemAllocAsync") == 1);
    attn_context_destroy(context);
    CHECK(stub_live() == 0);
    stub_stop();
    rig_free(&r);
}

TEST(cuda_grids_reach_past_two_billion_blocks) {
    stub_start();
    attn_context *context = cuda_context();
    rig r = small();
    if (!rig_make_on(&r, 0)) return;
    CHECK_OK(rig_plan_and_run(context, &r, 0, NULL)); /* loads probs */
    stub_set_current(stub_context(0));
    attn_cuda_run run = {
        .driver = context->cuda->state->driver, .entries = attn__cuda_entries, .kernels = context->cuda->kernel};
    static const int64_t counts[] = {1, INT32_MAX, INT64_C(1) << 31, (INT64_C(1) << 31) + 5, INT64_C(123456789012)};
    attn_cuda_args args = {.part_rows = 7};
    for (size_t n = 0; n < sizeof counts / sizeof counts[0]; n++) {
        stub_forget();
        test_context("%lld blocks", (long long)counts[n]);
        CHECK_OK(attn__cuda_launch(&run, ATTN_ENTRY_probs, counts[n], 0, 32, 0, &args));
        if (!CHECK(stub_launches() == 1)) return;
        const stub_launch *l = stub_launch_at(0);
        int64_t blocks = (int64_t)l->grid[0] * l->grid[1];
        CHECK(blocks >= counts[n] && blocks - counts[n] < l->grid[1] && l->grid[0] <= INT32_MAX);
        CHECK(l->args_bytes == sizeof args && memcmp(l->args, &args, sizeof args) == 0);
    }
    stub_forget();
    CHECK_OK(attn__cuda_launch(&run, ATTN_ENTRY_probs, 0, 0, 32, 0, &args));
    CHECK(stub_launches() == 0);
    CHECK_STATUS(attn__cuda_launch(&run, ATTN_ENTRY_probs, INT64_C(1) << 50, 0, 32, 0, &args), ATTN_INVALID,
                 "more than a grid can have");
    attn_context_destroy(context);
    stub_stop();
    rig_free(&r);
}

/* ---- threads ---- */

typedef struct worker {
    attn_context *context;
    rig *r;
    int failures;
} worker;

static void *work(void *arg) {
    worker *w = arg;
    attn_buffers f = rig_forward_buffers(w->r);
    for (int n = 0; n < 50; n++) {
        w->failures += rig_plan_and_run(w->context, w->r, 0, n % 2 ? stub_stream(0) : NULL) != ATTN_OK;
        w->failures += attn_forward(w->context, &w->r->p, &f, NULL) != ATTN_OK;
        w->failures += pieces(w->context, NULL) != ATTN_OK;
        w->failures += attn_device_status(w->context) != ATTN_OK;
    }
    return NULL;
}

TEST(cuda_threads_share_a_context) {
    enum { THREADS = 4 };
    rig r[THREADS];
    worker workers[THREADS];
    pthread_t threads[THREADS];
    stub_start();
    attn_context *context = cuda_context();
    for (int n = 0; n < THREADS; n++) {
        r[n] = (rig){.p = problem(n % 2 ? ATTN_F32 : ATTN_F16, 1, 2, 1, 1 + 20 * n, 600, 16 << n)};
        if (!rig_make_on(&r[n], 0)) return;
        workers[n] = (worker){.context = context, .r = &r[n]};
        CHECK(pthread_create(&threads[n], NULL, work, &workers[n]) == 0);
    }
    for (int n = 0; n < THREADS; n++) {
        pthread_join(threads[n], NULL);
        CHECK_SAY(workers[n].failures == 0, "thread %d failed %d times", n, workers[n].failures);
    }
    CHECK(stub_calls("cuMemHostAlloc") == 1 && stub_calls("cuLibraryLoadData") <= ATTN_ENTRIES);
    CHECK(stub_calls("cuDevicePrimaryCtxRetain") == 1);
    attn_context_destroy(context);
    CHECK(stub_live() == 0);
    stub_stop();
    for (int n = 0; n < THREADS; n++) rig_free(&r[n]);
}
