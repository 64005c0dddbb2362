/*
 * Tuning, on the stub of the driver: what a tuning file may say and what plans make of it; the ladder's table; and `attn tune`
 * from the options to the file, with kernels that are played by a function of ours.
 */
#define _POSIX_C_SOURCE 200809L

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cuda/cuda.h"
#include "cuda_rig.h"
#include "fault.h"
#include "ladder.h"
#include "test.h"
#include "tool.h"

/* ---- files ---- */

static char folder[32];

static const char *path_of(const char *name) {
    static char path[4][96];
    static int next;
    char *p = path[next++ % 4];
    snprintf(p, sizeof path[0], "%s/%s", folder, name);
    return p;
}

static void put_file(const char *name, const char *text) {
    FILE *file = fopen(path_of(name), "w");
    if (!CHECK(file != NULL)) return;
    CHECK(fwrite(text, 1, strlen(text), file) == strlen(text));
    CHECK(fclose(file) == 0);
}

static void get_file(const char *name, char *text, size_t bytes) {
    FILE *file = fopen(path_of(name), "r");
    size_t count = file ? fread(text, 1, bytes - 1, file) : 0;
    text[count] = 0;
    if (file) fclose(file);
}

static bool begin(void) {
    strcpy(folder, "/tmp/attn-test-XXXXXX");
    stub_start();
    return CHECK(mkdtemp(folder) != NULL);
}

static void end(void) {
    char remove_all[64];
    unsetenv("ATTN_TUNING");
    CHECK(stub_live() == 0);
    stub_stop();
    snprintf(remove_all, sizeof remove_all, "rm -rf %s", folder);
    CHECK(system(remove_all) == 0);
}

/* ---- the tuning file ---- */

/* A context with this text as its tuning file. */
static attn_status create_with(attn_context **context, const char *text) {
    put_file("tuning", text);
    setenv("ATTN_TUNING", path_of("tuning"), 1);
    return create_cuda(context);
}

static void check_plan(attn_context *context, const attn_problem *p, const char *kernel, bool tuned) {
    attn_plan *plan = NULL;
    char line[128];
    CHECK_OK(attn_plan_create(&plan, context, p));
    if (!plan) return;
    CHECK_SAY(strcmp(attn_plan_kernel(plan), kernel) == 0, "%s, want %s", attn_plan_kernel(plan), kernel);
    snprintf(line, sizeof line, "\ntuned: %s\n", path_of("tuning"));
    CHECK_SAY((strstr(attn_plan_describe(plan), line) != NULL) == tuned, "%s", attn_plan_describe(plan));
    attn_plan_destroy(plan);
}

TEST(tuning_file_changes_the_choice) {
    attn_context *context = NULL;
    if (!begin()) return;
    attn_problem p = problem(ATTN_BF16, 1, 2, 2, 100, 100, 128), other = problem(ATTN_BF16, 1, 2, 2, 100, 100, 64);
    CHECK_OK(create_cuda(&context));
    check_plan(context, &p, "fwd_sm90_bf16_d128", false);
    attn_context_destroy(context);
    CHECK_OK(create_with(&context, "# a comment\n\n  sm_90 bf16 d128 plain fwd_sm90_bf16_d128_all # 1 TFLOP/s\r\n"
                                   "sm_80 bf16 d64 plain fwd_sm80_bf16_d64_all")); /* of another GPU; no newline */
    check_plan(context, &p, "fwd_sm90_bf16_d128_all", true);
    check_plan(context, &other, "fwd_sm90_bf16_d64", false);
    p.dim_qk = p.dim_v = 120; /* the table's dim counts */
    check_plan(context, &p, "fwd_sm90_bf16_d128_all", true);
    p.page_size = 16; /* the line is for plain */
    p.num_pages = 20;
    check_plan(context, &p, "fwd_sm90_bf16_d128_own", false);
    p.page_size = p.num_pages = 0;
    attn_context_destroy(context);
    CHECK_OK(create_with(&context, "sm_90 bf16 d128 plain fwd_sm90_bf16_d128\n"));
    check_plan(context, &p, "fwd_sm90_bf16_d128", true);
    p.max_q = ATTN_CUDA_SPLIT_ROWS; /* few rows have a kernel of their own: the line is not for them */
    check_plan(context, &p, "decode_sm80_bf16_d128", false);
    p.max_q = 100;
    p.flags = ATTN_USED_KV;
    check_plan(context, &p, "fwd_sm90_bf16_d128_own", false);
    p.flags = 0;
    attn_context_destroy(context);
    CHECK_OK(create_with(&context, "sm_90 bf16 d128 own fwd_sm90_bf16_d128_all\n"));
    p.flags = ATTN_USED_KV;
    check_plan(context, &p, "fwd_sm90_bf16_d128_all", true);
    p.softcap = 3;
    check_plan(context, &p, "fwd_sm90_bf16_d128_all", false);
    attn_context_destroy(context);
    CHECK_OK(create_with(&context, "sm_90 bf16 d128 all fwd_sm90_bf16_d128_all\n"));
    check_plan(context, &p, "fwd_sm90_bf16_d128_all", true);
    p.flags = 0;
    attn_context_destroy(context);
    setenv("ATTN_TUNING", "", 1);
    CHECK_OK(create_cuda(&context));
    p.softcap = 0;
    check_plan(context, &p, "fwd_sm90_bf16_d128", false);
    attn_context_destroy(context);
    end();
}

TEST(tuning_file_with_a_bad_line_is_refused) {
    static const struct {
        const char *text, *detail;
    } rows[] = {
        {"sm_90 bf16 d128 plain fwd_nothing\n", "/tuning:1: kernel=fwd_nothing: `attn info` lists"},
        {"\n\nsm_90 bf16 d128 plain\n", "/tuning:3: 'sm_90 bf16 d128 plain': want a line like"},
        {"sm_90 bf16 d128 plain fwd_sm80_bf16_d128 more\n", "/tuning:1: "},
        {"sm_90 bf17 d128 plain fwd_sm80_bf16_d128\n", "/tuning:1: "},
        {"sm_90 bf16 d128 some fwd_sm80_bf16_d128\n", "/tuning:1: "},
        {"sm_90 bf16 d64 plain fwd_sm80_bf16_d128\n", "/tuning:1: kernel=fwd_sm80_bf16_d128: is not for sm_90 bf16 d64"},
        {"sm_90 f16 d128 plain fwd_sm80_bf16_d128\n", "/tuning:1: kernel=fwd_sm80_bf16_d128: is not for sm_90 f16 d128"},
        {"sm_75 bf16 d128 plain fwd_sm80_bf16_d128\n", "/tuning:1: kernel=fwd_sm80_bf16_d128: is not for sm_75"},
        {"sm_90 bf16 d128 all fwd_sm80_bf16_d128\n", "/tuning:1: kernel=fwd_sm80_bf16_d128: does not take every feature"},
        {"sm_80 bf16 d128 plain fwd_sm90_bf16_d128\n", "/tuning:1: kernel=fwd_sm90_bf16_d128: is not for sm_80"},
        {"sm_100 bf16 d128 plain fwd_sm90_bf16_d128\n", "/tuning:1: kernel=fwd_sm90_bf16_d128: is not for sm_100"},
        {"sm_90 bf16 d64 plain fwd_sm80_bf16_d64\n",
         "/tuning:1: kernel=fwd_sm80_bf16_d64: is of another family than fwd_sm90_bf16_d64: results would change"},
        {"sm_90 bf16 d128 all fwd_sm80_bf16_d128_all\n", "kernel=fwd_sm80_bf16_d128_all: has tiles of 64 keys, fwd_sm90"},
        {"sm_90 bf16 d128 own fwd_sm90_bf16_d128\n", "kernel=fwd_sm90_bf16_d128: does not take every feature; want plain"},
        {"sm_90 bf16 d128 all fwd_sm90_bf16_d128_own\n", "fwd_sm90_bf16_d128_own: does not take every feature; want own"},
        {"sm_90 bf16 d576 plain fwd_any\n", "/tuning:1: kernel=fwd_any: is not for"},
        {"sm_90 bf16 d128 plain append\n", "/tuning:1: kernel=append"},
        {"sm_90 bf16 d128 plain fwd_sm90_bf16_d128\nsm_90 bf16 d128 plain fwd_sm90_bf16_d128\n",
         "/tuning:2: sm_90 bf16 d128 plain: stands in line 1 already"},
    };
    attn_context *context;
    if (!begin()) return;
    for (size_t n = 0; n < sizeof rows / sizeof *rows; n++) {
        test_context("%s", rows[n].text);
        CHECK_STATUS(create_with(&context, rows[n].text), ATTN_INVALID, rows[n].detail);
        CHECK_STATUS(create_with(&context, rows[n].text), ATTN_INVALID, folder);
        CHECK(context == NULL && stub_live() == 0);
    }
    char text[4096];
    memset(text, 'x', 300);
    text[300] = 0;
    CHECK_STATUS(create_with(&context, text), ATTN_INVALID, "/tuning:1: a line of more than");
    memset(text, '#', 1); /* a comment may not be endless either */
    CHECK_STATUS(create_with(&context, text), ATTN_INVALID, "/tuning:1: a line of more than");
    test_context(NULL);
    end();
}

TEST(tuning_file_that_cannot_be_read_is_refused) {
    attn_context *context;
    char text[400];
    if (!begin()) return;
    setenv("ATTN_TUNING", "tuning", 1);
    CHECK_STATUS(create_cuda(&context), ATTN_INVALID, "ATTN_TUNING=tuning: want an absolute path");
    setenv("ATTN_TUNING", path_of("nothing"), 1);
    CHECK_STATUS(create_cuda(&context), ATTN_INVALID, "/nothing: cannot be opened: No such file");
    setenv("ATTN_TUNING", folder, 1);
    CHECK_STATUS(create_cuda(&context), ATTN_SYSTEM, "cannot be read");
    memset(text, '/', sizeof text - 1);
    text[sizeof text - 1] = 0;
    setenv("ATTN_TUNING", text, 1);
    CHECK_STATUS(create_cuda(&context), ATTN_INVALID, "want an absolute path of less than");
    stub_start();
    stub.shared_bytes[0] = 50000;
    CHECK_STATUS(create_with(&context, "sm_90 bf16 d128 plain fwd_sm90_bf16_d128\n"), ATTN_INVALID,
                 "bytes of shared memory, Stub has 50000");
    stub_start(); /* a line for another kind of GPU is not held against this one */
    stub.shared_bytes[0] = 50000;
    CHECK_OK(create_with(&context, "sm_80 bf16 d128 plain fwd_sm80_bf16_d128\n"));
    attn_context_destroy(context);
    end();
}

TEST(tuning_file_faults) {
    attn_context *context;
    if (!begin()) return;
    put_file("tuning", "sm_90 bf16 d128 plain fwd_sm90_bf16_d128_all\n");
    setenv("ATTN_TUNING", path_of("tuning"), 1);
    for (int kind = 0; kind < 2; kind++) {
        attn_fault_kind which = kind ? ATTN_FAULT_FILE : ATTN_FAULT_ALLOC;
        long hit = 1, after = 0;
        for (; hit && after < 100; after++) {
            attn__fault_arm(which, after, 0);
            attn_status status = create_cuda(&context);
            hit = attn__fault_hit(which);
            attn__fault_arm(which, -1, 0);
            CHECK_SAY(status == (!hit   ? ATTN_OK
                                 : kind ? ATTN_SYSTEM
                                        : ATTN_NO_MEMORY),
                      "fault %ld: %s", after, attn_status_name(status));
            attn_context_destroy(context);
            CHECK(stub_live() == 0);
        }
        CHECK_SAY(after > 2 && after < 100, "%ld faults", after);
    }
    end();
}

/* ---- the ladder's table ---- */

static const char tune_text[] =
#define FWD(...) "FWD(" #__VA_ARGS__ ")\n"
#include "cuda/tune.def"
#undef FWD
    ;

TEST(tuning_ladder_is_a_table) {
    static ladder l, library;
    const char *wrong;
    int number;
    l.count = library.count = 0;
    wrong = ladder_parse(&l, tune_text, &number);
    CHECK_SAY(!wrong, "line %d: %s", number, wrong ? wrong : "");
    CHECK(l.count >= 24);
    ladder_add_library(&library);
    for (int n = 0; n < l.count; n++) {
        for (int k = 0; k < library.count; k++)
            CHECK_SAY(strcmp(l.at[n].name, library.at[k].name) != 0, "%s", l.at[n].name);
        int rows = l.at[n].knob[KNOB_bm] / l.at[n].knob[KNOB_warps];
        CHECK_SAY(rows == 16 || rows == 32, "%s: %d rows of a warp", l.at[n].name, rows);
        CHECK_SAY(l.at[n].dtype == ATTN_BF16, "%s", l.at[n].name);
    }
    for (int n = 0; n < library.count; n++) { /* the same numbers as the library's own table has */
        attn_cuda_entry mine = rung_entry(&library.at[n]);
        const attn_cuda_entry *e = &attn__cuda_entries[library.at[n].entry];
        CHECK_SAY(strcmp(mine.name, e->name) == 0 && mine.arch == e->arch && mine.dtype == e->dtype && mine.dim == e->dim &&
                      mine.dim_v == e->dim_v && mine.bm == e->bm && mine.bn == e->bn && mine.warps == e->warps &&
                      mine.dim_qk == e->dim_qk && mine.most_v == e->most_v && mine.takes == e->takes &&
                      mine.shared_bytes == e->shared_bytes,
                  "%s", e->name);
    }
    /* The whole ladders begin plain, and no line repeats another one. */
    for (int32_t dim = 64; dim <= 256; dim *= 2) {
        static ladder part;
        attn_gpu gpu = {.arch = 90, .shared_bytes = 232448};
        char changes[256];
        part = l;
        attn_problem p, asked = problem(ATTN_BF16, 1, 1, 1, 100, 100, dim);
        CHECK_OK(attn__problem_resolve(&p, &asked));
        ladder_keep(&part, &(attn_cuda_entry){.dtype = ATTN_BF16, .dim = dim}, &p, &gpu);
        CHECK(part.count >= (dim == 256 ? 2 : 12));
        CHECK(ladder_from(&part, 0) == -1 && (dim == 256 || strstr(part.at[0].name, "plain")));
        for (int n = 1; n < part.count; n++) {
            rung_changes(&part.at[ladder_from(&part, n)], &part.at[n], changes, sizeof changes);
            CHECK_SAY(*changes, "%s is the line before it", part.at[n].name);
        }
    }
}

TEST(tuning_ladder_with_a_bad_line_is_refused) {
    static const struct {
        const char *text, *wrong;
    } rows[] = {
        {"FWD(a, 80, BF16, 64)\n", "too few numbers"},
        {"\nFWD(a, 80, BF17, 64, 64, 64, 64, 4, 2, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0)", "its dtype is not known"},
        {"FWD(a, 80, BF16, 64, 64, 64, 64, 4, 2, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0)", "does not end"},
        {"FWD(a, 80, BF16, 64, 64, 64, 64, 0, 2, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0)", "out of range"},
        {"FWD(a, 80, BF16, 64, 64, 72, 64, 4, 2, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0)", "out of range"},
        {"FWD(a, 80, BF16, 64, 64, 64, 64, 4, 2, 0, 3, 0, 1, 1, 1, 0, 0, 0, 0)", "out of range"},
        {"FWD(a, 80, BF16, 64, 64, 64, 64, 4, 2, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0)", "out of range"},
        {"FWD(a, 80, BF16, 64, 64, 64, 64, 4, 2, 0, 0, 0, 1, 1, 1, 5, 0, 0, 0)", "out of range"},
        {"FWD(A, 80)", "is wanted"},
        {"FWD(a, 80, BF16, 64, 64, 64, 64, 4, 2, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0)\n"
         "FWD(a, 80, BF16, 64, 64, 64, 64, 4, 2, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0)",
         "its name is taken"},
    };
    for (size_t n = 0; n < sizeof rows / sizeof *rows; n++) {
        static ladder l;
        int number;
        l.count = 0;
        const char *wrong = ladder_parse(&l, rows[n].text, &number);
        CHECK_SAY(wrong && strstr(wrong, rows[n].wrong), "%s: %s", rows[n].text, wrong ? wrong : "nothing");
        CHECK(number == (int)(n == 1 || n == 9) + 1);
    }
}

/* ---- attn tune ---- */

/*
 * Every kernel gives ones, up to rounding of the portable family's; "swizzle" gives twos. The one for every feature is the fastest,
 * eager1 the slowest.
 */
static double play(const stub_launch *launch) {
    const attn_cuda_args *a = stub_args(launch);
    uint16_t value = strstr(launch->name, "_swizzle") ? 0x4000 : strstr(launch->name, "fwd_sm80") ? 0x3f81 : 0x3f80;
    int64_t rows = (int64_t)a->p.batch * a->p.heads_q * a->p.max_q;
    for (int64_t n = 0; n < rows * a->p.dim_v; n++) ((uint16_t *)a->f.o.data)[n] = value;
    for (int64_t n = 0; n < rows; n++) ((float *)a->f.lse)[n] = 1;
    return strstr(launch->name, "_all") ? 1 : strstr(launch->name, "_eager1") ? 4 : 2;
}

/* Calls the command with its output in a file of the folder. */
static int call_tune(int argc, char **argv) {
    fflush(stdout);
    fflush(stderr);
    int out = dup(1), err = dup(2), file = open(path_of("out"), O_WRONLY | O_CREAT | O_TRUNC, 0666);
    dup2(file, 1);
    dup2(file, 2);
    close(file);
    int code = cmd_tune(argc, argv);
    fflush(stdout);
    fflush(stderr);
    dup2(out, 1);
    dup2(err, 2);
    close(out);
    close(err);
    return code;
}

static bool begin_tune(void) {
    static ladder l;
    int number;
    char name[80];
    if (!begin()) return false;
    stub.kernel = play;
    put_file("tune.def", tune_text);
    l.count = 0;
    ladder_parse(&l, tune_text, &number);
    for (int n = 0; n < l.count; n++) {
        snprintf(name, sizeof name, "%s.fatbin", l.at[n].name);
        put_file(name, "image");
    }
    return true;
}

TEST(tune_marks_what_is_wrong_and_writes_what_is_fastest) {
    static char text[65536];
    attn_context *context = NULL;
    char file[64];
    if (!begin_tune()) return;
    snprintf(file, sizeof file, "%s/tuning", folder);
    char *argv[] = {"tune",     "--kernels", folder,     "--heads", "1",       "--dim", "128",
                    "--seqlen", "64",        "--rounds", "2",       "--write", file};
    CHECK(call_tune(13, argv) == TOOL_FAILED);
    get_file("out", text, sizeof text);
    char *line = strstr(text, "tune_d128_swizzle");
    CHECK_SAY(line && strstr(line, "swizzle 0>1") && strstr(line, "WRONG") && strstr(line, "WRONG") < strchr(line, '\n'),
              "%s", text);
    CHECK(strstr(text, "same bits") && strstr(text, "1 kernels are wrong") && !strstr(text, "tune_d64"));
    line = strstr(text, "tune_d128_twice"); /* twice as fast as eager1, which is line 4, and as fast as the first */
    CHECK_SAY(line && strstr(line, "twice 0>1") && strstr(line, "   4       168") && strstr(line, "+100.0%    +0.0%"), "%s",
              text);
    get_file("tuning", text, sizeof text);
    CHECK_SAY(strncmp(text, "# libattn ", 10) == 0 && strstr(text, "Stub, driver for CUDA 13.0, "), "%s", text);
    CHECK(strstr(text, "sm_90 bf16 d128 plain fwd_sm90_bf16_d128_all # "));
    CHECK(strstr(text, "sm_90 bf16 d128 own   fwd_sm90_bf16_d128_all # "));
    CHECK(strstr(text, "sm_90 bf16 d128 all   fwd_sm90_bf16_d128_all # "));
    setenv("ATTN_TUNING", file, 1);
    CHECK_OK(create_cuda(&context));
    attn_problem p = problem(ATTN_BF16, 1, 2, 2, 100, 100, 128);
    check_plan(context, &p, "fwd_sm90_bf16_d128_all", true);
    attn_context_destroy(context);
    end();
}

/* Few rows have one kernel, so there is nothing to choose. */
TEST(tune_leaves_out_kernels_that_do_not_take_the_problem) {
    static char text[65536];
    char file[64];
    for (int rows = ATTN_CUDA_SPLIT_ROWS; rows <= ATTN_CUDA_SPLIT_ROWS + 1; rows++) {
        char seqlen[16];
        bool takes = rows > ATTN_CUDA_SPLIT_ROWS;
        test_context("%d rows", rows);
        if (!begin_tune()) return;
        snprintf(file, sizeof file, "%s/tuning", folder);
        snprintf(seqlen, sizeof seqlen, "%d/64", rows);
        char *argv[] = {"tune",     "--heads", "1",        "--dim", "128",     "--dtype", "bf16",
                        "--seqlen", seqlen,    "--rounds", "1",     "--write", file};
        CHECK(call_tune(13, argv) == (takes ? TOOL_OK : TOOL_USAGE));
        if (!takes) {
            end();
            continue;
        }
        get_file("out", text, sizeof text);
        CHECK_SAY(strstr(text, "fwd_sm90_bf16_d128 ") != NULL, "%s", text);
        CHECK_SAY(strstr(text, "fwd_sm90_bf16_d128_all ") && strstr(text, "fwd_sm80_bf16_d128 "), "%s", text);
        get_file("tuning", text, sizeof text);
        CHECK_SAY(strstr(text, " plain ") && strstr(text, " own ") && strstr(text, " all "), "%s", text);
        end();
    }
}

TEST(tune_prints_json_of_the_librarys_kernels) {
    static char text[65536];
    char file[64];
    if (!begin_tune()) return;
    snprintf(file, sizeof file, "%s/tuning", folder);
    char *argv[] = {"tune", "--heads",  "2/1",      "--dim", "64,128", "--dtype", "bf16", "--seqlen",
                    "64",   "--causal", "--rounds", "1",     "--json", "--write", file};
    CHECK(call_tune(15, argv) == TOOL_OK);
    get_file("tuning", text, sizeof text); /* of one family, though tiles of 64 dims have as many keys in the other */
    CHECK_SAY(strstr(text, "bf16 d64 plain fwd_sm90_bf16_d64_all # ") && !strstr(text, "fwd_sm80"), "%s", text);
    get_file("out", text, sizeof text);
    CHECK_SAY(strstr(text, "{\"gpu\": \"Stub\", \"sm\": 90, ") == text && strstr(text, "\"stack_bytes\": "), "%s", text);
    CHECK_SAY(strstr(text, "\"kernel\": \"fwd_sm80_bf16_d64\", \"library\": true") && strstr(text, "\"right\": true}\n") &&
                  strstr(text, "\"kernel\": \"fwd_sm80_bf16_d128_all\"") && !strstr(text, "tune_d"),
              "%s", text);
    end();
}

TEST(tune_refuses_what_makes_no_sense) {
    static const struct {
        const char *option, *value, *text;
    } rows[] = {
        {"--dtype", "f64", "there is no choice"},       {"--dim", "576", "only fwd_any takes it"},
        {"--dim", "60", "multiples of 16 bytes"},       {"--seqlen", "64,128", "one --seqlen"},
        {"--rounds", "0", "--rounds from 1"},           {"--rounds", "101", "--rounds from 1"},
        {"--kernels", "/nowhere", "/nowhere/tune.def"}, {"--softcap", "1", "no such option"},
    };
    static char text[4096];
    if (!begin_tune()) return;
    for (size_t n = 0; n < sizeof rows / sizeof *rows; n++) {
        char name[32], value[32];
        snprintf(name, sizeof name, "%s", rows[n].option);
        snprintf(value, sizeof value, "%s", rows[n].value);
        char *argv[] = {"tune", "--rounds", "1", name, value};
        int code = call_tune(5, argv);
        get_file("out", text, sizeof text);
        CHECK_SAY(code == (strcmp(value, "/nowhere") == 0 ? TOOL_RUNTIME : TOOL_USAGE) && strstr(text, rows[n].text),
                  "%s %s: %d, %s", name, value, code, text);
        CHECK(stub_live() == 0);
    }
    put_file("tune.def", "\nFWD(a, 80, BF16, 64)\n");
    char *argv[] = {"tune", "--rounds", "1", "--kernels", folder};
    CHECK(call_tune(5, argv) == TOOL_USAGE);
    get_file("out", text, sizeof text);
    CHECK_SAY(strstr(text, "/tune.def:2: it has too few numbers"), "%s", text);
    end();
}

/* Each call of the driver, each allocation and each file operation fails once: an error, and nothing is left. */
TEST(tune_faults) {
    char file[64];
    if (!begin_tune()) return;
    put_file("tune.def", "FWD(tune_d64_plain, 80, BF16, 64, 64, 64, 64, 4, 2, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0)\n");
    snprintf(file, sizeof file, "%s/tuning", folder);
    char *argv[] = {"tune", "--kernels", folder, "--heads", "1", "--seqlen", "17", "--rounds", "1", "--write", file};
    enum { ARGC = sizeof argv / sizeof *argv, DRIVER = ATTN_FAULT_KINDS };
    CHECK(call_tune(ARGC, argv) == TOOL_OK);
    for (int kind = 0; kind <= DRIVER; kind++) {
        long hit = 1, after = 0;
        int wrong = 0;
        for (; hit && after < 2000; after++) {
            if (kind < DRIVER)
                attn__fault_arm((attn_fault_kind)kind, after, 0);
            else
                stub_fail(after, 719);
            int code = call_tune(ARGC, argv);
            const char *failed = stub_failed();
            hit = kind < DRIVER ? attn__fault_hit((attn_fault_kind)kind) : failed != NULL;
            if (kind < DRIVER) attn__fault_arm((attn_fault_kind)kind, -1, 0);
            stub_fail(-1, 0);
            /* what gives something back, or goes where it is given back, a cache size that is not known, and, where the kernel takes
               every feature, a tensor without a map, are no failures */
            bool harmless = failed && (strstr(failed, "Destroy") || strstr(failed, "Push") || strstr(failed, "Free") ||
                                       strstr(failed, "Unload") || strstr(failed, "Pop") || strstr(failed, "Release") ||
                                       strstr(failed, "TensorMap"));
            bool cache = kind == DRIVER && failed && strcmp(failed, "cuDeviceGetAttribute") == 0;
            wrong += code != (hit ? TOOL_RUNTIME : TOOL_OK) && !((harmless || cache) && code == TOOL_OK);
            if (wrong == 1)
                CHECK_SAY(false, "kind %d, fault %ld (%s): exit %d", kind, after, failed ? failed : "", code), wrong++;
            CHECK(stub_live() == 0 && stub_depth() == 0);
        }
        CHECK_SAY(after < 2000 && (after > 3 || kind == ATTN_FAULT_THREAD), "kind %d: %ld faults", kind, after);
    }
    end();
}
