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
    CHECK(stub_calls("cuLaunchKernel") > 40 && stub_calls("cuMemAlloc") > 100);
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
 * Every call of the driver fails once: the command says so by its code, and holds nothing afterwards. Calls that give something
 * back, and those that close a context, may fail in silence: the result is there by then.
 */
TEST(device_bench_survives_each_failing_call) {
    long calls = 0;
    for (long n = 0; n < 2000; n++, calls++) {
        stub_start();
        stub_fail(n, 719);
        quiet();
        int code = call(cmd_bench, bench_words);
        loud();
        const char *failed = stub_failed();
        test_context("call %ld, %s", n, failed ? failed : "none");
        bool may_pass = failed && (strstr(failed, "Destroy") || strstr(failed, "Free") || strstr(failed, "Release") ||
                                   strstr(failed, "Unload") || strstr(failed, "Push") || strstr(failed, "Pop") ||
                                   strstr(failed, "GetAttribute"));
        CHECK(!failed || code != TOOL_OK || may_pass);
        CHECK(stub_live() == 0 && stub_depth() == 0);
        stub_stop();
        if (!failed) break;
    }
    test_context(NULL);
    CHECK(calls > 50 && calls < 2000);
}
