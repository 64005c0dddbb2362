/*
 * The commands of `attn` when the n-th allocation, thread start or file operation fails, for every n: each exits with the code
 * of a run-time failure, leaves no file behind that is not whole, leaks nothing (the address sanitizer looks), and works the
 * next time.
 */
#define _POSIX_C_SOURCE 200809L

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fault.h"
#include "npy.h"
#include "test.h"
#include "tool.h"

enum { MAX_FAULTS = 2000 };

/* A folder of its own with q, k, v and d_o in it, as the working directory; where it came from. */
typedef struct workplace {
    char folder[32], before[4096];
    int out, err; /* the real stdout and stderr: the commands print */
} workplace;

static bool enter(workplace *w) {
    static const int64_t shape[4] = {1, 70, 2, 8};
    static float data[70 * 2 * 8];
    char error[NPY_ERROR_SIZE];
    for (size_t i = 0; i < sizeof data / sizeof *data; i++) data[i] = (float)(i * 37 % 101) / 50 - 1;
    strcpy(w->folder, "/tmp/attn-test-XXXXXX");
    if (!CHECK(getcwd(w->before, sizeof w->before) && mkdtemp(w->folder) && chdir(w->folder) == 0)) return false;
    static const char *const names[] = {"q.npy", "k.npy", "v.npy", "do.npy"};
    for (int i = 0; i < 4; i++) CHECK(npy_write(names[i], NPY_F4, 4, shape, data, error, sizeof error) == NPY_OK);
    fflush(stdout);
    fflush(stderr);
    w->out = dup(1);
    w->err = dup(2);
    int null = open("/dev/null", O_WRONLY);
    bool quiet = dup2(null, 1) == 1 && dup2(null, 2) == 2;
    close(null);
    return CHECK(quiet);
}

/* Removes the folder; returns how many temporary files were in it. */
static int leave(const workplace *w) {
    int temporary = 0;
    DIR *folder = opendir(".");
    for (struct dirent *entry; folder && (entry = readdir(folder));) {
        temporary += strstr(entry->d_name, ".tmp-") != NULL;
        if (entry->d_name[0] != '.') unlink(entry->d_name);
    }
    if (folder) closedir(folder);
    fflush(stdout);
    fflush(stderr);
    dup2(w->out, 1);
    dup2(w->err, 2);
    close(w->out);
    close(w->err);
    CHECK(chdir(w->before) == 0 && rmdir(w->folder) == 0);
    return temporary;
}

/* Every fault of every kind, once and for good. Failures are counted first and reported when stderr is back. */
static void sweep(int (*call)(int, char **), int argc, char **argv) {
    workplace w;
    if (!enter(&w)) return;
    int faults = 0, wrong_code = 0, not_recovered = 0, unfinished = 0;
    for (int kind = 0; kind < ATTN_FAULT_KINDS; kind++) {
        for (int persistent = 0; persistent < 2; persistent++) {
            long after = 0, hit = 1;
            for (; hit && after < MAX_FAULTS; after++) {
                attn__fault_arm((attn_fault_kind)kind, after, persistent);
                int code = call(argc, argv);
                hit = attn__fault_hit((attn_fault_kind)kind);
                attn__fault_arm((attn_fault_kind)kind, -1, 0);
                faults += hit > 0;
                wrong_code += code != (hit ? TOOL_RUNTIME : TOOL_OK);
                not_recovered += hit && call(argc, argv) != TOOL_OK;
            }
            unfinished += hit > 0;
        }
    }
    int temporary = leave(&w);
    CHECK_SAY(faults > 0 && !unfinished, "%s: %d faults, %d kinds not finished", argv[0], faults, unfinished);
    CHECK_SAY(!wrong_code, "%s: %d of %d faults gave another exit code than 3", argv[0], wrong_code, faults);
    CHECK_SAY(!not_recovered, "%s: %d times the next call failed", argv[0], not_recovered);
    CHECK_SAY(!temporary, "%s: %d temporary files left", argv[0], temporary);
}

#define SWEEP(command, ...)                                                                                                \
    do {                                                                                                                   \
        char *argv[] = {__VA_ARGS__};                                                                                      \
        sweep(command, (int)(sizeof argv / sizeof *argv), argv);                                                           \
    } while (0)

TEST(fault_in_each_step_of_attn_run_forward) {
    SWEEP(cmd_run, "run", "--q", "q.npy", "--k", "k.npy", "--v", "v.npy", "--o", "o.npy", "--lse", "lse.npy", "--threads",
          "2");
}

TEST(fault_in_each_step_of_attn_run_backward) {
    SWEEP(cmd_run, "run", "--op", "backward", "--q", "q.npy", "--k", "k.npy", "--v", "v.npy", "--d-o", "do.npy", "--d-q",
          "dq.npy", "--threads", "2");
}

TEST(fault_in_each_step_of_attn_plan) {
    SWEEP(cmd_plan, "plan", "--seqlen", "200", "--flashmask-pattern", "document", "--svg", "x.svg");
}

TEST(fault_in_each_step_of_attn_bench) {
    SWEEP(cmd_bench, "bench", "--heads", "1", "--dim", "16", "--seqlen", "64", "--repeat", "1", "--check", "--threads", "2",
          "--op", "backward");
    SWEEP(cmd_bench, "bench", "--suite", "overhead", "--repeat", "1", "--threads", "2");
}

/* What is measured of the machine itself. The command keeps it, so that few faults of the sweep above meet it. */
TEST(fault_in_each_step_of_the_floors) {
    workplace w;
    if (!enter(&w)) return;
    int wrong = 0, faults = 0;
    for (int kind = ATTN_FAULT_ALLOC; kind <= ATTN_FAULT_THREAD; kind++) {
        for (int which = 0; which < 2; which++) {
            long after = 0, hit = 1;
            for (; hit && after < MAX_FAULTS; after++) {
                attn__fault_arm((attn_fault_kind)kind, after, 0);
                double rate = which ? read_gb_per_s(2) : peak_gflops(2, false);
                hit = attn__fault_hit((attn_fault_kind)kind);
                attn__fault_arm((attn_fault_kind)kind, -1, 0);
                faults += hit > 0;
                wrong += hit ? rate >= 0 : !(rate > 0);
            }
            wrong += hit > 0;
        }
    }
    leave(&w);
    CHECK_SAY(faults >= 7 && !wrong, "%d faults, %d with another result than wanted", faults, wrong);
}

TEST(fault_in_each_step_of_attn_info) { SWEEP(cmd_info, "info", "--threads", "2"); }
