/*
 * Faults: each allocation, thread start and file operation is made to fail in turn, once (transient) or from then on
 * (persistent). Every time the call must come back with an error, leave nothing allocated, and work when it is called again.
 * The library is a build with ATTN_FAULTS; memory is counted by the caller's allocator, and by AddressSanitizer where that is on.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "build.h"
#include "fault.h"
#include "npy.h"
#include "test.h"

/* ---- an allocator that counts, and can fail by itself ---- */

typedef struct counting {
    atomic_long live;  /* blocks that have not been freed */
    atomic_long calls; /* of alloc */
    long fail_at;      /* this call returns NULL; negative: none */
} counting;

static void *count_alloc(void *user, size_t bytes) {
    counting *c = user;
    long call = atomic_fetch_add(&c->calls, 1);
    void *memory = call == c->fail_at ? NULL : malloc(bytes);
    if (memory) atomic_fetch_add(&c->live, 1);
    return memory;
}

static void count_free(void *user, void *memory) {
    counting *c = user;
    atomic_fetch_sub(&c->live, 1);
    free(memory);
}

static attn_status counted_context(attn_context **context, counting *c, attn_backend_id backend) {
    attn_config config = {
        .size = sizeof config, .backend = backend, .threads = 3, .alloc = count_alloc, .free = count_free, .alloc_user = c};
    return attn_context_create(context, &config);
}

static rig form(void) {
    rig r = {.p = problem(ATTN_F32, 2, 4, 2, 70, 90, 16), .backward = true};
    r.p.flags = ATTN_CAUSAL | ATTN_SINK;
    return r;
}

/* ---- what is made to fail: each returns a status, and has freed all it took ---- */

typedef attn_status scenario(counting *c, rig *r, attn_backend_id backend);

/* Context, plan, run, destroy. */
static attn_status whole_life(counting *c, rig *r, attn_backend_id backend) {
    attn_context *context = NULL;
    attn_status status = counted_context(&context, c, backend);
    if (status == ATTN_OK) status = rig_run(r, context);
    CHECK(status == ATTN_OK || attn_error_detail()[0] != 0);
    attn_context_destroy(context);
    return status;
}

/* One-shot forward and backward, which keep plans and workspaces in the context. */
static attn_status one_shot(counting *c, rig *r, attn_backend_id backend) {
    attn_context *context = NULL;
    attn_status status = counted_context(&context, c, backend);
    if (status == ATTN_OK) status = rig_call(r, context);
    attn_context_destroy(context);
    return status;
}

static int visit_tile(void *user, const attn_tile *tile) {
    (void)tile;
    ++*(int *)user;
    return 0;
}

static attn_status tile_map(counting *c, rig *r, attn_backend_id backend) {
    attn_context *context = NULL;
    attn_plan *plan = NULL;
    int tiles = 0;
    attn_status status = counted_context(&context, c, backend);
    if (status == ATTN_OK) status = attn_plan_create(&plan, context, &r->p);
    if (status == ATTN_OK) status = attn_plan_tiles(plan, &r->f, 0, 0, visit_tile, &tiles);
    CHECK((status == ATTN_OK) == (tiles > 0));
    attn_plan_destroy(plan);
    attn_context_destroy(context);
    return status;
}

/* Lets operation n fail for n = 0, 1, ... until none is left to fail; persistent likewise. */
static void each_fault(attn_fault_kind kind, scenario *run, attn_backend_id backend, attn_status expected) {
    rig right = form(), r = form();
    counting c = {.fail_at = -1};
    CHECK(rig_make(&right, 1) && rig_make(&r, 1));
    alarm(120); /* a hang ends the program, with the test's name as its last word */
    CHECK_OK(run(&c, &right, backend));
    for (int persistent = 0; persistent < 2; persistent++) {
        long n = 0, hit = 1;
        for (; hit && n < 1000; n++) {
            test_context("backend %d, kind %d, operation %ld, %s", (int)backend, (int)kind, n,
                         persistent ? "persistent" : "transient");
            attn__fault_arm(kind, n, persistent);
            attn_status status = run(&c, &r, backend);
            hit = attn__fault_hit(kind);
            attn__fault_arm(kind, -1, 0);
            CHECK_SAY(status == (hit ? expected : ATTN_OK), "status %s", attn_status_name(status));
            CHECK(atomic_load(&c.live) == 0);
            rig_reset(&r, 0x77);
            CHECK_OK(run(&c, &r, backend));
            CHECK(run == tile_map || rig_same(&r, &right));
        }
        CHECK_SAY(n > 1 && n < 1000, "%ld operations", n - 1); /* the last one found nothing left to fail */
    }
    alarm(0);
    test_context(NULL);
    rig_free(&right);
    rig_free(&r);
}

TEST(fault_in_each_allocation_of_a_whole_life) {
    each_fault(ATTN_FAULT_ALLOC, whole_life, ATTN_BACKEND_CPU, ATTN_NO_MEMORY);
    each_fault(ATTN_FAULT_ALLOC, whole_life, ATTN_BACKEND_REF, ATTN_NO_MEMORY);
}

TEST(fault_in_each_allocation_of_one_shot_calls) {
    each_fault(ATTN_FAULT_ALLOC, one_shot, ATTN_BACKEND_CPU, ATTN_NO_MEMORY);
    each_fault(ATTN_FAULT_ALLOC, one_shot, ATTN_BACKEND_REF, ATTN_NO_MEMORY);
}

TEST(fault_in_each_allocation_of_a_tile_map) { each_fault(ATTN_FAULT_ALLOC, tile_map, ATTN_BACKEND_CPU, ATTN_NO_MEMORY); }

TEST(fault_in_each_thread_start) {
    each_fault(ATTN_FAULT_THREAD, whole_life, ATTN_BACKEND_CPU, ATTN_SYSTEM);
    each_fault(ATTN_FAULT_THREAD, one_shot, ATTN_BACKEND_CPU, ATTN_SYSTEM);
}

/* The context lives on: what failed in it must not be remembered. */
TEST(fault_in_each_allocation_of_a_living_context) {
    for (int persistent = 0; persistent < 2; persistent++) {
        counting c = {.fail_at = -1};
        attn_context *context;
        rig right = form(), r = form();
        CHECK(rig_make(&right, 1) && rig_make(&r, 1));
        if (!CHECK_OK(counted_context(&context, &c, ATTN_BACKEND_CPU))) return;
        long n = 0, hit = 1;
        for (; hit && n < 1000; n++) {
            attn__fault_arm(ATTN_FAULT_ALLOC, n, persistent);
            attn_status status = rig_call(&r, context);
            hit = attn__fault_hit(ATTN_FAULT_ALLOC);
            attn__fault_arm(ATTN_FAULT_ALLOC, -1, 0);
            CHECK(status == (hit ? ATTN_NO_MEMORY : ATTN_OK));
        }
        CHECK(n > 1);
        CHECK_OK(rig_call(&right, context));
        CHECK_OK(rig_call(&r, context));
        CHECK(rig_same(&r, &right));
        attn_context_destroy(context);
        CHECK(atomic_load(&c.live) == 0);
        rig_free(&right);
        rig_free(&r);
    }
}

/* The caller's own allocator says no. */
TEST(fault_in_the_callers_allocator) {
    rig r = form();
    CHECK(rig_make(&r, 1));
    attn_status status = ATTN_NO_MEMORY;
    long n = 0;
    for (; status == ATTN_NO_MEMORY && n < 1000; n++) {
        counting c = {.fail_at = n};
        status = one_shot(&c, &r, ATTN_BACKEND_CPU);
        CHECK(atomic_load(&c.live) == 0);
        CHECK((atomic_load(&c.calls) > n) == (status == ATTN_NO_MEMORY));
    }
    CHECK(n > 1 && status == ATTN_OK);
    rig_free(&r);
}

TEST(plan_and_run_do_not_allocate_behind_the_callers_back) {
    counting c = {.fail_at = -1};
    attn_context *context;
    attn_plan *plan;
    rig r = form();
    CHECK(rig_make(&r, 1));
    if (!CHECK_OK(counted_context(&context, &c, ATTN_BACKEND_CPU))) return;
    if (!CHECK_OK(attn_plan_create(&plan, context, &r.p))) return;
    attn_buffers f = rig_forward_buffers(&r);
    f.workspace_size = attn_plan_workspace(plan);
    f.workspace = aligned_alloc(64, (f.workspace_size + 127) / 64 * 64);
    long calls = atomic_load(&c.calls);
    attn__fault_arm(ATTN_FAULT_ALLOC, 0, 1);
    CHECK_OK(attn_run(plan, &f, NULL));
    attn__fault_arm(ATTN_FAULT_ALLOC, -1, 0);
    CHECK(atomic_load(&c.calls) == calls);
    free(f.workspace);
    attn_plan_destroy(plan);
    attn_context_destroy(context);
    CHECK(atomic_load(&c.live) == 0);
    rig_free(&r);
}

/* ---- .npy files ---- */

static int entries(const char *directory) {
    DIR *d = opendir(directory);
    int count = 0;
    while (d && readdir(d)) count++;
    if (d) closedir(d);
    return count - 2; /* . and .. */
}

typedef struct npy_place {
    char directory[64], path[96];
} npy_place;

static bool npy_place_make(npy_place *p) {
    const char *base = getenv("TMPDIR");
    if (!base || strlen(base) > 32) base = "/tmp";
    snprintf(p->directory, sizeof p->directory, "%s/attn-test-XXXXXX", base);
    if (!mkdtemp(p->directory)) return false;
    snprintf(p->path, sizeof p->path, "%s/a.npy", p->directory);
    return true;
}

static const int64_t shape[] = {3, 5};
static const float numbers[2][15] = {{1, 2, 3}, {4, 5, 6, 7}};

/* Does the file hold these numbers? */
static bool holds(const char *path, const float *wanted) {
    npy_array a;
    char error[NPY_ERROR_SIZE];
    bool good = npy_read(path, &a, error, sizeof error) == NPY_OK && a.header.dtype == NPY_F4 && a.header.ndim == 2 &&
                a.header.shape[0] == 3 && a.header.shape[1] == 5 && memcmp(a.data, wanted, sizeof numbers[0]) == 0;
    npy_free(&a);
    return good;
}

/* Writing over a file that is there: afterwards it holds the old numbers or the new ones, and nothing else lies about. */
TEST(fault_in_each_file_operation_of_npy_write) {
    npy_place place;
    if (!CHECK(npy_place_make(&place))) return;
    char error[NPY_ERROR_SIZE];
    for (int persistent = 0; persistent < 2; persistent++) {
        long n = 0, hit = 1;
        for (; hit && n < 100; n++) {
            test_context("operation %ld, %s", n, persistent ? "persistent" : "transient");
            CHECK(npy_write(place.path, NPY_F4, 2, shape, numbers[0], error, sizeof error) == NPY_OK);
            attn__fault_arm(ATTN_FAULT_FILE, n, persistent);
            error[0] = 0;
            npy_status status = npy_write(place.path, NPY_F4, 2, shape, numbers[1], error, sizeof error);
            hit = attn__fault_hit(ATTN_FAULT_FILE);
            attn__fault_arm(ATTN_FAULT_FILE, -1, 0);
            CHECK((status == NPY_OK) == (hit == 0));
            CHECK(status == NPY_OK || strstr(error, place.path) != NULL);
            CHECK(holds(place.path, numbers[status == NPY_OK]));
            CHECK_SAY(entries(place.directory) == 1, "%d files", entries(place.directory));
        }
        CHECK_SAY(n > 4 && n < 100, "%ld operations", n - 1);
    }
    unlink(place.path);
    rmdir(place.directory);
}

static void each_npy_read_fault(attn_fault_kind kind, npy_status expected) {
    npy_place place;
    if (!CHECK(npy_place_make(&place))) return;
    char error[NPY_ERROR_SIZE];
    CHECK(npy_write(place.path, NPY_F4, 2, shape, numbers[0], error, sizeof error) == NPY_OK);
    for (int persistent = 0; persistent < 2; persistent++) {
        long n = 0, hit = 1;
        for (; hit && n < 100; n++) {
            npy_array a;
            test_context("operation %ld, %s", n, persistent ? "persistent" : "transient");
            attn__fault_arm(kind, n, persistent);
            npy_status status = npy_read(place.path, &a, error, sizeof error);
            hit = attn__fault_hit(kind);
            attn__fault_arm(kind, -1, 0);
            CHECK(status == (hit ? expected : NPY_OK));
            if (status != NPY_OK) CHECK(a.data == NULL && strstr(error, place.path) != NULL);
            npy_free(&a);
            CHECK(holds(place.path, numbers[0]));
        }
        CHECK_SAY(n > 2 && n < 100, "%ld operations", n - 1);
    }
    unlink(place.path);
    rmdir(place.directory);
}

TEST(fault_in_each_file_operation_of_npy_read) { each_npy_read_fault(ATTN_FAULT_FILE, NPY_SYSTEM); }
TEST(fault_in_each_allocation_of_npy_read) { each_npy_read_fault(ATTN_FAULT_ALLOC, NPY_NO_MEMORY); }
