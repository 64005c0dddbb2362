/*
 * fork: the child has the context's memory and none of its threads. It must be able to go on with it, whatever the parent's
 * threads were doing at that moment, and the parent must not notice. A child that hangs is ended by its alarm and counts as
 * a failure.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "build.h"
#include "fault.h"
#include "test.h"

/* Forks that a test of a race makes. */
enum { FORKS = 40 };

static rig form(void) {
    rig r = {.p = problem(ATTN_F32, 2, 4, 2, 70, 90, 16), .backward = true};
    r.p.flags = ATTN_CAUSAL;
    return r;
}

/* Does this context compute what it did before? */
static bool gives(attn_context *context, const rig *right) {
    rig r = {.p = right->p, .backward = right->backward};
    bool good = rig_make(&r, 1) && rig_call(&r, context) == ATTN_OK && rig_same(&r, right);
    rig_free(&r);
    return good;
}

/* Forks; the child leaves with 0 when body returns true. */
static bool in_child(bool (*body)(attn_context *context, const rig *right), attn_context *context, const rig *right) {
    pid_t child = fork();
    if (child == 0) {
        alarm(30);
        _exit(body(context, right) ? 0 : 1);
    }
    int status = -1;
    return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

static bool calls_and_destroys(attn_context *context, const rig *right) {
    bool good = gives(context, right) && gives(context, right);
    attn_context_destroy(context);
    return good;
}

static bool only_destroys(attn_context *context, const rig *right) {
    (void)right;
    attn_context_destroy(context);
    return true;
}

static bool forks_again(attn_context *context, const rig *right) {
    return gives(context, right) && in_child(calls_and_destroys, context, right) && gives(context, right);
}

TEST(fork_while_idle_child_and_parent_work_on) {
    attn_context *context = make_context(ATTN_BACKEND_CPU, 3);
    rig right = form();
    CHECK(rig_make(&right, 1));
    CHECK_OK(rig_call(&right, context));
    CHECK(in_child(calls_and_destroys, context, &right));
    CHECK(in_child(only_destroys, context, &right));
    CHECK(in_child(forks_again, context, &right));
    CHECK(gives(context, &right));
    rig_free(&right);
    attn_context_destroy(context);
}

typedef struct hammer {
    attn_context *context;
    const rig *right;
    atomic_bool stop;
    atomic_int ready, wrong;
} hammer;

/*
 * Calls until told to stop. It allocates nothing meanwhile, and brings its own workspace so that the library does not either:
 * a child of a process whose threads were inside malloc is up to malloc, and AddressSanitizer's has no answer to it.
 */
static void *hammer_main(void *arg) {
    hammer *h = arg;
    rig r = {.p = h->right->p, .backward = h->right->backward};
    bool good = rig_make(&r, 1);
    r.f.workspace_size = 1 << 22;
    r.f.workspace = aligned_alloc(64, r.f.workspace_size);
    atomic_fetch_add(&h->ready, 1);
    while (!atomic_load(&h->stop)) {
        rig_reset(&r, 0x33);
        good = good && rig_call(&r, h->context) == ATTN_OK && rig_same(&r, h->right);
    }
    if (!good) atomic_fetch_add(&h->wrong, 1);
    free(r.f.workspace);
    rig_free(&r);
    return NULL;
}

/* Forks again and again while other threads call. */
static void check_fork_while_busy(rig right) {
    enum { CALLERS = 3 };
    attn_context *context = make_context(ATTN_BACKEND_CPU, 3);
    CHECK(rig_make(&right, 1));
    CHECK_OK(rig_call(&right, context));
    hammer h = {.context = context, .right = &right};
    pthread_t ids[CALLERS];
    for (int n = 0; n < CALLERS; n++)
        if (!CHECK(pthread_create(&ids[n], NULL, hammer_main, &h) == 0)) return;
    while (atomic_load(&h.ready) < CALLERS) usleep(1000);
    bool good = true;
    for (int n = 0; n < FORKS && good; n++) good = CHECK_SAY(in_child(calls_and_destroys, context, &right), "child %d", n);
    atomic_store(&h.stop, true);
    for (int n = 0; n < CALLERS; n++) pthread_join(ids[n], NULL);
    CHECK(h.wrong == 0);
    rig_free(&right);
    attn_context_destroy(context);
}

TEST(fork_while_busy_child_and_parent_work_on) { check_fork_while_busy(form()); }

/* Problems so small that most of the time is spent in the cache of plans. */
TEST(fork_while_the_plan_cache_is_busy) { check_fork_while_busy((rig){.p = problem(ATTN_F32, 1, 1, 1, 1, 1, 1)}); }

/* A child that gets no threads says so, and works as soon as it does. */
static bool without_threads(attn_context *context, const rig *right) {
    rig r = form();
    bool good = rig_make(&r, 1);
    for (long n = 0; n < 2; n++) {
        attn__fault_arm(ATTN_FAULT_THREAD, n, 1);
        good = good && rig_call(&r, context) == ATTN_SYSTEM && attn__fault_hit(ATTN_FAULT_THREAD) > 0;
    }
    attn__fault_arm(ATTN_FAULT_THREAD, -1, 0);
    rig_free(&r);
    return good && calls_and_destroys(context, right);
}

TEST(fork_child_that_gets_no_workers_says_so_and_then_works) {
    attn_context *context = make_context(ATTN_BACKEND_CPU, 3);
    rig right = form();
    CHECK(rig_make(&right, 1));
    CHECK_OK(rig_call(&right, context));
    CHECK(in_child(without_threads, context, &right));
    rig_free(&right);
    attn_context_destroy(context);
}
