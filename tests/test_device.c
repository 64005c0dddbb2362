/*
 * The commands on a GPU, on a stub of the driver (stub_driver.h): memory goes there and back unharmed, everything is given back
 * whatever call fails, and `attn check` notices a GPU that computes nothing.
 */
#define _POSIX_C_SOURCE 200809L

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "build.h"
#include "cases.h"
#include "check.h"
#include "cuda/args.h"
#include "device.h"
#include "stub_driver.h"
#include "test.h"
#include "tool.h"

static int quiet_out, quiet_err;

/* What a command prints goes nowhere; loud() ends it. */
static void quiet(void) {
    fflush(stdout);
    fflush(stderr);
    quiet_out = dup(1);
    quiet_err = dup(2);
    int nowhere = open("/dev/null", O_WRONLY);
    dup2(nowhere, 1);
    dup2(nowhere, 2);
    close(nowhere);
}

static void loud(void) {
    fflush(stdout);
    fflush(stderr);
    dup2(quiet_out, 1);
    dup2(quiet_err, 2);
    close(quiet_out);
    close(quiet_err);
}

/* ---- mirrors ---- */

static void check_mirror(attn_context *context, bool copies) {
    device *d = device_open(context, copies);
    if (!CHECK(d != NULL)) return;
    unsigned char small[7] = "abcdef", large[1000], none[1] = {9};
    memset(large, 3, sizeof large);
    mirror m = {.d = d};
    CHECK(mirror_add(&m, "small", small, sizeof small, 24, 0) && mirror_add(&m, "large", large, sizeof large, 0, 64) &&
          mirror_add(&m, "none", none, 0, 0, 0));
    CHECK(mirror_upload(&m));
    attn_buffers f = {.size = sizeof f, .lse = small, .seed = 5}, there;
    f.q = attn_dense(large + 10, 2, 3, 4);
    f.used_kv = (const int32_t *)(const void *)none;
    there = mirror_buffers(&m, &f);
    CHECK(there.seed == 5 && there.q.stride[1] == 12 && there.k.data == NULL);
    CHECK(device_is_direct(d) == (there.lse == small) && there.used_kv != NULL);
    CHECK((uintptr_t)there.lse % 8 == 0 || device_is_direct(d));
    CHECK(device_fill(d, there.q.data, 7, 20) && device_wait(d) && mirror_download(&m));
    for (int n = 0; n < 1000; n++) CHECK(large[n] == (n >= 10 && n < 30 ? 7 : 3));
    CHECK(strcmp((char *)small, "abcdef") == 0 && none[0] == 9);
    CHECK(mirror_damage(&m) == NULL);
    if (!device_is_direct(d)) { /* one byte too far, one too early */
        CHECK(device_fill(d, (unsigned char *)there.q.data + 990, 7, 1) && mirror_damage(&m) &&
              strcmp(mirror_damage(&m), "large") == 0);
        CHECK(mirror_upload(&m) && mirror_damage(&m) == NULL);
        CHECK(device_fill(d, (unsigned char *)there.lse - 1, 7, 1) && mirror_damage(&m) &&
              strcmp(mirror_damage(&m), "small") == 0);
    }
    mirror_free(&m);
    device_close(d);
}

TEST(device_memory_goes_there_and_back) {
    attn_context *context = make_context(ATTN_BACKEND_CPU, 1);
    check_mirror(context, false);
    check_mirror(context, true);
    attn_context_destroy(context);
    stub_start();
    context = make_context(ATTN_BACKEND_CUDA, 1);
    if (CHECK(context != NULL)) check_mirror(context, false);
    attn_context_destroy(context);
    CHECK(stub_live() == 0 && stub_depth() == 0);
    stub_stop();
}

TEST(device_time) {
    attn_context *context = make_context(ATTN_BACKEND_CPU, 1);
    device *d = device_open(context, false);
    CHECK(device_mark(d, 0));
    double begin = test_seconds();
    while (test_seconds() - begin < 0.01) continue;
    CHECK(device_mark(d, 1) && device_wait(d));
    double ms = 0;
    CHECK(device_between(d, 0, 1, &ms) && ms >= 9.9 && ms < 5000);
    CHECK(!device_is_gpu(d) && device_cache_bytes(d) == 0 && device_peak_tflops(d, ATTN_BF16) == 0);
    device_close(d);
    attn_context_destroy(context);
}

/* ---- commands ---- */

static int call(int (*run)(int argc, char **argv), const char *words) {
    char text[256], *argv[32];
    int argc = 0;
    snprintf(text, sizeof text, "%s", words);
    for (char *word = strtok(text, " "); word && argc < 32; word = strtok(NULL, " ")) argv[argc++] = word;
    return run(argc, argv);
}

/* The kernels of the stub write nothing: every case with a result must fail, and no call may be refused on the way. */
TEST(device_check_notices_a_gpu_that_computes_nothing) {
    stub_start();
    quiet();
    int code = call(cmd_check, "check --backend cuda --cases 40 --seed 1");
    int repeated = call(cmd_check, "check --backend cuda --cases 3 --seed 2 --small --repeat 2");
    loud();
    CHECK(code == TOOL_FAILED && repeated == TOOL_FAILED);
    CHECK(stub_calls("cuLaunchKernelEx") > 40 && stub_calls("cuMemAlloc") > 100);
    CHECK(stub_live() == 0 && stub_depth() == 0);
    stub_stop();
}

/* ---- what `attn check` must notice of merge and rotary, and --bars of the status word ---- */

static attn_context *piece_ref; /* computes for the kernels below */
static const char *piece_flaw;  /* what they do wrong: "input", "status" or nothing */
static bool piece_in_parts;     /* a merge of several launches was met: these kernels cannot do it */

/* merge and rotary done right, on host memory, and then the flaw. */
static double run_piece(const stub_launch *l) {
    unsigned char *input = NULL;
    if (strcmp(l->name, "merge") == 0) {
        const attn_cuda_merge *c = (const void *)l->args;
        attn_merge_args m = {.size = sizeof m, .dtype = c->dtype, .out_dtype = c->out_dtype, .parts = c->parts};
        m.batch = c->batch, m.rows = c->rows, m.heads = c->heads, m.dim = c->dim;
        m.o_parts = c->o_parts, m.lse_parts = c->lse_parts, m.o = c->o, m.lse = c->lse;
        piece_in_parts |= !c->is_first || !c->is_last;
        if (!piece_in_parts) CHECK_OK(attn_merge(piece_ref, &m, NULL));
        input = (unsigned char *)(uintptr_t)c->lse_parts[0];
    } else if (strcmp(l->name, "rotary") == 0) {
        const attn_cuda_rotary *c = (const void *)l->args;
        CHECK_OK(attn_rotary(piece_ref, &c->r, NULL));
        input = (unsigned char *)(uintptr_t)c->r.cos;
        if (strcmp(piece_flaw, "status") == 0) *c->status = UINT64_C(1) << 32;
    }
    if (input && strcmp(piece_flaw, "input") == 0) input[0] ^= 1;
    return 1;
}

/* How many of the first cases fail, of so many; *last is the verdict on the last of them. */
static int failing_pieces(const contexts *j, const char *flaw, int *cases, verdict *last) {
    int failed = 0;
    const case_filter filter = {.small = true};
    piece_flaw = flaw;
    *cases = 0;
    for (long n = 0; n < 12; n++) {
        verdict v = {0};
        piece_in_parts = false;
        check_pieces(&filter, j, 1, n, &v);
        if (piece_in_parts) continue;
        ++*cases;
        failed += v.failed;
        if (v.failed) *last = v;
    }
    return failed;
}

TEST(device_check_notices_pieces_that_change_inputs_or_report_values) {
    stub_start();
    stub.kernel = run_piece;
    contexts j = {.tested = make_context(ATTN_BACKEND_CUDA, 1)};
    piece_ref = make_context(ATTN_BACKEND_REF, 1);
    j.device = j.tested ? device_open(j.tested, false) : NULL;
    static const struct {
        const char *flaw, *why;
    } flaws[] = {{"", ""}, {"input", "lse_parts is an input"}, {"status", "out of range on the device"}};
    for (int n = 0; n < 3 && CHECK(j.device && piece_ref); n++) {
        verdict last = {0};
        int cases, failed = failing_pieces(&j, flaws[n].flaw, &cases, &last);
        CHECK_SAY(cases > 6 && failed == (n == 0 ? 0 : cases), "\"%s\": %d of %d cases fail", flaws[n].flaw, failed, cases);
        CHECK_SAY(strstr(last.why, flaws[n].why) != NULL, "\"%s\": %s", flaws[n].flaw, last.why);
    }
    device_close(j.device);
    attn_context_destroy(j.tested);
    attn_context_destroy(piece_ref);
    CHECK(stub_live() == 0 && stub_depth() == 0);
    stub_stop();
}

static double report_value(const stub_launch *l) {
    if (strncmp(l->name, "fwd_", 4) == 0) *stub_args(l)->status = UINT64_C(1) << 32;
    return 1;
}

/* Were the word not read, the command would go on, and end with TOOL_FAILED over results that were not computed. */
TEST(device_bars_read_the_status_word) {
    stub_start();
    stub.kernel = report_value;
    quiet();
    int code = call(cmd_check, "check --backend cuda --bars");
    loud();
    CHECK_SAY(code == TOOL_USAGE, "exit code %d", code);
    CHECK(stub_live() == 0 && stub_depth() == 0);
    stub_stop();
}

static const char *const bench_words = "bench --backend cuda --seqlen 9 --heads 2 --dim 8 --dtype bf16 --repeat 2";

TEST(device_bench_gives_everything_back) {
    stub_start();
    quiet();
    int code = call(cmd_bench, bench_words);
    loud();
    CHECK(code == TOOL_OK);
    CHECK(stub_live() == 0 && stub_depth() == 0);
    stub_stop();
}

/*
 * Calls that may fail in silence: those that give something back, since the result is there by then; the question whether a kernel
 * waits, without which it is not launched early; and once each the question how large the cache is, without which inputs do not take turns, and the return to a context that is about to be closed.
 */
static bool may_be_silent(const char *call, int *asked, int *entered) {
    static const char *const ends[] = {"cuKernelGetAttribute", "cuCtxPopCurrent", "cuMemFree",
                                       "cuMemFreeAsync",       "cuMemFreeHost",   "cuEventDestroy",
                                       "cuStreamDestroy",      "cuLibraryUnload", "cuDevicePrimaryCtxRelease"};
    for (size_t n = 0; n < sizeof ends / sizeof *ends; n++)
        if (strcmp(call, ends[n]) == 0) return true;
    if (strcmp(call, "cuDeviceGetAttribute") == 0) return ++*asked == 1;
    return strcmp(call, "cuCtxPushCurrent") == 0 && ++*entered == 1;
}

/* Every call of the driver fails once: the command says so by its code, and holds nothing afterwards. */
TEST(device_bench_survives_each_failing_call) {
    long calls = 0;
    int asked = 0, entered = 0;
    for (long n = 0; n < 2000; n++, calls++) {
        stub_start();
        stub_fail(n, 719);
        quiet();
        int code = call(cmd_bench, bench_words);
        loud();
        const char *failed = stub_failed();
        test_context("call %ld, %s", n, failed ? failed : "none");
        CHECK(!failed || code != TOOL_OK || may_be_silent(failed, &asked, &entered));
        CHECK(stub_live() == 0 && stub_depth() == 0);
        stub_stop();
        if (!failed) break;
    }
    test_context(NULL);
    CHECK(calls > 50 && calls < 2000);
    CHECK(asked == 1 && entered == 1);
}
