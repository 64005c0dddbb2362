/*
 * Threads: the library's pool, one context used by many, plans and the plan cache under contention. All of it is run under
 * ThreadSanitizer too, by the word "pool" in the names; what forks is in test_fork.c, for which ThreadSanitizer has no mind.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "build.h"
#include "internal.h"
#include "test.h"

enum { THREADS = 8, FORMS = 4 };

/* A few problems of different shapes; number n is always the same one. */
static rig form(int n) {
    rig r = {.p = problem(ATTN_F32, 1 + n % 2, 4, 2, 20 + 30 * (n % 3), 90 + n, 16), .backward = n % 2 == 0};
    r.p.flags = n % 2 ? ATTN_CAUSAL : 0;
    if (n % FORMS == 3) {
        r.p.max_q = 1; /* split over keys */
        r.p.max_kv = 2100;
    }
    return r;
}

/* Runs `body` on so many threads at once; true when all of them returned true. */
typedef struct crew_member {
    bool (*body)(void *arg, int index);
    void *arg;
    int index;
    bool good;
} crew_member;

static void *crew_main(void *arg) {
    crew_member *m = arg;
    m->good = m->body(m->arg, m->index);
    return NULL;
}

static bool crew(int count, bool (*body)(void *arg, int index), void *arg) {
    crew_member members[THREADS];
    pthread_t ids[THREADS];
    bool good = true;
    int started = 0;
    for (; started < count; started++) {
        members[started] = (crew_member){body, arg, started, false};
        if (pthread_create(&ids[started], NULL, crew_main, &members[started])) break;
    }
    for (int n = 0; n < started; n++) {
        pthread_join(ids[n], NULL);
        good = good && members[n].good;
    }
    return good && started == count;
}

/* What each form gives on one thread, to compare with. */
typedef struct answers {
    rig right[FORMS];
    attn_context *context;
    attn_plan *plan;
} answers;

static void answers_make(answers *a, attn_context *context) {
    attn_context *alone = make_context(ATTN_BACKEND_CPU, 1);
    a->context = context;
    for (int n = 0; n < FORMS; n++) {
        a->right[n] = form(n);
        CHECK(rig_make(&a->right[n], 1));
        CHECK_OK(rig_call(&a->right[n], alone));
    }
    attn_context_destroy(alone);
}

static void answers_free(answers *a) {
    for (int n = 0; n < FORMS; n++) rig_free(&a->right[n]);
}

static bool call_all_forms(void *arg, int index) {
    const answers *a = arg;
    bool good = true;
    for (int round = 0; round < 6; round++) {
        int n = (index + round) % FORMS;
        rig r = form(n);
        good = rig_make(&r, 1) && rig_call(&r, a->context) == ATTN_OK && rig_same(&r, &a->right[n]) && good;
        rig_free(&r);
    }
    return good;
}

TEST(pool_many_threads_on_one_context) {
    answers a;
    answers_make(&a, make_context(ATTN_BACKEND_CPU, 3));
    CHECK(crew(THREADS, call_all_forms, &a));
    attn_context_destroy(a.context);
    answers_free(&a);
}

static bool own_context(void *arg, int index) {
    answers mine = *(const answers *)arg;
    mine.context = make_context(ATTN_BACKEND_CPU, 1 + index % 4);
    bool good = mine.context && call_all_forms(&mine, index);
    attn_context_destroy(mine.context);
    return good;
}

TEST(pool_several_contexts_at_once) {
    answers a;
    answers_make(&a, NULL);
    CHECK(crew(4, own_context, &a));
    answers_free(&a);
}

/* ---- one plan, many threads ---- */

static bool run_plan(void *arg, int index) {
    const answers *a = arg;
    size_t bytes = attn_plan_workspace(a->plan);
    void *workspace = aligned_alloc(64, (bytes + 127) / 64 * 64);
    bool good = workspace != NULL;
    (void)index;
    for (int round = 0; round < 10 && good; round++) {
        rig r = form(1);
        good = rig_make(&r, 1);
        attn_buffers f = rig_forward_buffers(&r);
        f.workspace = workspace;
        f.workspace_size = bytes;
        good = good && attn_run(a->plan, &f, NULL) == ATTN_OK && rig_same(&r, &a->right[1]);
        rig_free(&r);
    }
    free(workspace);
    return good;
}

TEST(pool_one_plan_used_from_8_threads) {
    answers a;
    answers_make(&a, make_context(ATTN_BACKEND_CPU, 2));
    CHECK_OK(attn_plan_create(&a.plan, a.context, &a.right[1].p));
    CHECK(crew(THREADS, run_plan, &a));
    attn_plan_destroy(a.plan);
    attn_context_destroy(a.context);
    answers_free(&a);
}

/* ---- the plan cache of the one-shot calls ---- */

static bool many_problems(void *arg, int index) {
    attn_context *context = arg;
    for (int n = 0; n < 160; n++) { /* more than the cache holds, in an order of each thread's own */
        int length = 1 + (n * 37 + index * 11) % 160;
        rig r = {.p = problem(ATTN_F32, 1, 1, 1, 2, length, 4)};
        r.p.flags = ATTN_SCALE; /* scale 0: o is the mean of v, whatever the plan; so a wrong plan shows */
        bool good = rig_make(&r, 2) && rig_call(&r, context) == ATTN_OK;
        double sum = 0;
        for (int j = 0; good && j < length; j++) sum += ((float *)r.f.v.data)[j * 4];
        double off = good ? rig_o(&r, 0, 1, 0, 0) - sum / length : 1;
        rig_free(&r);
        if (off > 1e-5 || off < -1e-5) return false;
    }
    return true;
}

TEST(pool_plan_cache_under_contention) {
    attn_context *context = make_context(ATTN_BACKEND_CPU, 2);
    CHECK(crew(6, many_problems, context));
    attn_context_destroy(context);
}

/* ---- a call from inside a call ---- */

typedef struct nest {
    attn_context *inner;
    const answers *a;
    _Atomic int good, calls;
} nest;

static int parallel_for_that_calls(void *user, void (*body)(void *arg, int32_t index), void *arg, int32_t count) {
    nest *n = user;
    for (int32_t i = 0; i < count; i++) {
        rig r = form(1);
        n->calls++;
        n->good += rig_make(&r, 1) && rig_call(&r, n->inner) == ATTN_OK && rig_same(&r, &n->a->right[1]);
        rig_free(&r);
        body(arg, i);
    }
    return 0;
}

TEST(pool_call_from_inside_a_parallel_for) {
    answers a;
    answers_make(&a, make_context(ATTN_BACKEND_CPU, 3));
    nest n = {.inner = a.context, .a = &a};
    attn_config config = {.size = sizeof config,
                          .backend = ATTN_BACKEND_CPU,
                          .threads = 4,
                          .parallel_for = parallel_for_that_calls,
                          .parallel_user = &n};
    answers outer = a;
    if (!CHECK_OK(attn_context_create(&outer.context, &config))) return;
    CHECK(call_all_forms(&outer, 0));
    CHECK(n.calls > 0 && n.good == n.calls);
    attn_context_destroy(outer.context);
    attn_context_destroy(a.context);
    answers_free(&a);
}

/* ---- life ---- */

TEST(pool_destroyed_while_idle) {
    for (int n = 0; n < 60; n++) {
        attn_context *context = make_context(ATTN_BACKEND_CPU, 1 + n % 8);
        if (!CHECK(context != NULL)) return;
        CHECK(attn_context_threads(context) == 1 + n % 8);
        if (n % 3 == 0) {
            rig r = form(0);
            CHECK(rig_make(&r, 1));
            CHECK_OK(rig_call(&r, context));
            rig_free(&r);
        }
        attn_context_destroy(context);
    }
}

/* ---- the pool alone ---- */

enum { MOST = 40 }; /* indices of a job: more than there are threads */

/* A job counts how often each of its indices was run. */
typedef struct tally {
    attn_pool *pool;
    _Atomic int runs[MOST];
    int32_t depth; /* of jobs within jobs: the first index makes the next one */
    _Atomic int wrong;
} tally;

/* Has each of `count` indices been run once, and none beyond? */
static bool is_once_each(tally *t, int32_t count) {
    bool good = t->wrong == 0;
    for (int32_t n = 0; n < MOST; n++) good = good && t->runs[n] == (n < count);
    return good;
}

static void run_tally(void *arg, int32_t index);

/* The job is on the stack, and overwritten as soon as the call is back: whoever came late would find something else. */
static bool count_once_each(attn_pool *pool, int32_t count, int32_t depth) {
    tally t = {.pool = pool, .depth = depth};
    bool good = attn__pool_for(pool, run_tally, &t, count) == 0 && is_once_each(&t, count);
    memset(&t, 0xff, sizeof t);
    return good;
}

static void run_tally(void *arg, int32_t index) {
    tally *t = arg;
    t->runs[index]++;
    if (index == 0 && t->depth > 0 && !count_once_each(t->pool, 1 + t->depth % MOST, t->depth - 1)) t->wrong++;
}

static bool tiny_jobs(void *arg, int index) {
    attn_context *context = arg;
    bool good = true;
    for (int n = 0; n < 2000 && good; n++) {
        if (n % 500 == 499) usleep(3000); /* workers fall asleep */
        good = count_once_each(context->pool, (n + index) % MOST, n % 10 == 0 ? index : 0);
    }
    return good;
}

TEST(pool_runs_each_index_once) {
    for (int32_t threads = 2; threads <= 9; threads += 7) {
        attn_context *context = make_context(ATTN_BACKEND_CPU, threads);
        CHECK(tiny_jobs(context, 0));
        CHECK(crew(THREADS, tiny_jobs, context));
        attn_context_destroy(context);
    }
}

/* More jobs at once than the pool has places for. */
TEST(pool_more_jobs_than_places) {
    attn_context *context = make_context(ATTN_BACKEND_CPU, 4);
    for (int n = 0; n < 50; n++) CHECK(count_once_each(context->pool, MOST, 100));
    attn_context_destroy(context);
}

TEST(pool_destroyed_right_after_a_job) {
    for (int n = 0; n < 100; n++) {
        attn_context *context = make_context(ATTN_BACKEND_CPU, 2 + n % 4);
        CHECK(count_once_each(context->pool, 1 + n % MOST, n % 3));
        attn_context_destroy(context);
    }
}

/* A worker takes longer than its caller looks around: that one sleeps and is woken, and so are workers for the next job. */
typedef struct slow_job {
    pthread_t caller;
    _Atomic int begun, done; /* by workers; by all */
} slow_job;

static void take_long(void *arg, int32_t index) {
    slow_job *x = arg;
    if (pthread_equal(pthread_self(), x->caller)) {
        for (int n = 0; n < 20000 && x->begun == 0; n++) usleep(100); /* so that there is something to wait for */
    } else {
        x->begun++;
        usleep(3000);
    }
    x->done++;
    (void)index;
}

TEST(pool_caller_that_sleeps_is_woken) {
    attn_context *context = make_context(ATTN_BACKEND_CPU, 2);
    for (int n = 0; n < 30; n++) {
        slow_job x = {.caller = pthread_self()};
        CHECK(attn__pool_for(context->pool, take_long, &x, 2) == 0);
        CHECK(x.begun == 1 && x.done == 2);
    }
    attn_context_destroy(context);
}

/* ---- stacks ---- */

/* Frames of code that is not optimised, or that a sanitizer looks through, say nothing of what the library needs. */
#ifdef __has_feature
#define SANITIZED (__has_feature(address_sanitizer) || __has_feature(thread_sanitizer))
#elif defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#else
#define SANITIZED 0
#endif
#if defined(__OPTIMIZE__) && !SANITIZED
enum { STACK_BYTES = 96 << 10 };
#else
enum { STACK_BYTES = 8 << 20 };
#endif

typedef struct small_thread {
    void (*body)(void *arg, int32_t index);
    void *arg;
    int32_t index;
} small_thread;

static void *small_thread_main(void *arg) {
    small_thread *t = arg;
    t->body(t->arg, t->index);
    return NULL;
}

static int on_small_stacks(void *user, void (*body)(void *arg, int32_t index), void *arg, int32_t count) {
    pthread_attr_t attributes;
    long least = sysconf(_SC_THREAD_STACK_MIN); /* 128 KiB on aarch64, where pages may have 64 */
    size_t bytes = least > STACK_BYTES ? (size_t)least : STACK_BYTES;
    bool good = pthread_attr_init(&attributes) == 0 && pthread_attr_setstacksize(&attributes, bytes) == 0;
    (void)user;
    for (int32_t n = 0; n < count && good; n++) {
        small_thread t = {body, arg, n};
        pthread_t id;
        good = pthread_create(&id, &attributes, small_thread_main, &t) == 0 && pthread_join(id, NULL) == 0;
    }
    pthread_attr_destroy(&attributes);
    return good ? 0 : -1;
}

/* musl gives a thread 128 KiB. Here are the deepest ways: the largest dims, few rows and many, rows that AMX has to do again. */
static void small_stacks(const char *isa, attn_dtype dtype, int32_t rows, bool overflows) {
    use_isa(isa);
    attn_context *context;
    attn_config config = {
        .size = sizeof config, .backend = ATTN_BACKEND_CPU, .threads = 2, .parallel_for = on_small_stacks};
    rig r = {.p = problem(dtype, 1, 4, 1, rows, 100, 576), .backward = true};
    r.p.flags = ATTN_CAUSAL | ATTN_ALIBI;
    r.p.dropout = 0.1;
    if (overflows) r.p.flags |= ATTN_SCALE, r.p.scale = 1e30;
    test_context("%s %s, %d rows", isa, attn_dtype_name(dtype), rows);
    if (CHECK_OK(attn_context_create(&context, &config)) && CHECK(rig_make(&r, 1))) CHECK_OK(rig_run(&r, context));
    rig_free(&r);
    attn_context_destroy(context);
    use_isa(NULL);
}

TEST(stacks_of_96_kib_are_enough) {
    static const attn_dtype dtypes[] = {ATTN_F32, ATTN_BF16, ATTN_F64};
    const char *isa;
    for (int n = 0; (isa = cpu_isa(n)) != NULL; n++)
        for (int c = 0; c < 9; c++) small_stacks(isa, dtypes[c % 3], c / 3 ? 70 : 4, c / 3 > 1);
}

/* ---- size ---- */

static int32_t threads_of(const char *environment, int32_t config_threads) {
    if (environment)
        setenv("ATTN_NUM_THREADS", environment, 1);
    else
        unsetenv("ATTN_NUM_THREADS");
    attn_context *context = make_context(ATTN_BACKEND_CPU, config_threads);
    int32_t threads = context ? attn_context_threads(context) : -1;
    attn_context_destroy(context);
    unsetenv("ATTN_NUM_THREADS");
    return threads;
}

TEST(pool_size_from_environment) {
    int32_t machine = threads_of(NULL, 0);
    CHECK(machine >= 1 && machine <= sysconf(_SC_NPROCESSORS_CONF));
    CHECK(threads_of("3", 0) == 3);
    CHECK(threads_of("3", 2) == 2); /* the config goes first */
    CHECK(threads_of("", 0) == machine);
    static const char *const garbage[] = {"abc", "0", "-1", "3 threads", "1e3", "99999999999999999999", "4097"};
    for (size_t n = 0; n < sizeof garbage / sizeof *garbage; n++) {
        test_context("ATTN_NUM_THREADS=%s", garbage[n]);
        setenv("ATTN_NUM_THREADS", garbage[n], 1);
        attn_context *context;
        char detail[64] = "ATTN_NUM_THREADS=";
        strncat(detail, garbage[n], 40);
        CHECK_STATUS(attn_context_create(&context, NULL), ATTN_INVALID, detail);
        unsetenv("ATTN_NUM_THREADS");
    }
}

/* ---- errors belong to their thread ---- */

static bool own_error(void *arg, int index) {
    attn_context *context = arg;
    char wanted[32] = "batch=-0:";
    wanted[7] = (char)('1' + index);
    for (int n = 0; n < 200; n++) {
        attn_problem p = problem(ATTN_F32, -1 - index, 1, 1, 1, 1, 1);
        attn_plan *plan;
        if (attn_plan_create(&plan, context, &p) != ATTN_INVALID) return false;
        if (strncmp(attn_error_detail(), wanted, strlen(wanted)) != 0) return false;
    }
    return true;
}

TEST(pool_error_detail_belongs_to_its_thread) {
    attn_context *context = make_context(ATTN_BACKEND_CPU, 2);
    CHECK(crew(THREADS, own_error, context));
    attn_context_destroy(context);
}

static int refuses(void *user, void (*body)(void *arg, int32_t index), void *arg, int32_t count) {
    (void)user, (void)body, (void)arg, (void)count;
    return 77;
}

TEST(isa_that_is_not_there_is_an_error) {
    attn_context *context;
    use_isa("avx1024");
    CHECK_STATUS(attn_context_create(&context, NULL), ATTN_UNSUPPORTED, "ATTN_CPU=avx1024");
    use_isa(NULL);
}

TEST(callers_parallel_for_that_fails_is_an_error) {
    attn_context *context;
    attn_config config = {.size = sizeof config, .backend = ATTN_BACKEND_CPU, .threads = 4, .parallel_for = refuses};
    if (!CHECK_OK(attn_context_create(&context, &config))) return;
    rig r = {.p = problem(ATTN_F32, 4, 4, 4, 100, 100, 16)};
    CHECK(rig_make(&r, 1));
    CHECK_STATUS(rig_run(&r, context), ATTN_SYSTEM, "parallel_for=77");
    rig_free(&r);
    attn_context_destroy(context);
}
