/*
 * The library's own thread pool, for contexts whose host has no parallel_for.
 *
 * A call puts its job (a body and a number of indices) into one of the pool's places and works on it itself; idle workers help with
 * whatever job has indices left. So several callers share the workers, a call never waits for another call's work to
 * begin, and a body may itself call into the pool: at worst it does its own job alone, as it does when all places are taken.
 *
 * None of that takes a lock: an index is claimed by counting down the place's ticket, and done by counting down what is left. Places
 * belong to the pool, so a worker that comes too late may look at one whose caller is gone; the ticket, which no two jobs share, does
 * not let it claim anything there. Who has nothing to do looks around for some ten microseconds, which is shorter than falling asleep and being
 * woken, and then sleeps on a condition; only for that there is the mutex.
 *
 * fork: the child has the pool's memory but none of its threads. The context holds the mutex across the fork (context.c), so
 * the child finds it free; it forgets the workers and jobs, and its first call starts workers of its own.
 */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

enum { LINE = 64 }; /* bytes that cores pass to each other */

/* Indices of a ticket that nobody has claimed; the other bits count the jobs of its place, for longer than anybody could be late. */
#define UNCLAIMED UINT64_C(0xffff)
#define NEXT_JOB (UNCLAIMED + 1)
#define SLEEPS (UINT32_C(1) << 31) /* in `left`: the caller is to be woken */

/* Of a job. Workers that look around read the first line all the time; what is written by each that is done has another. */
typedef struct place {
    _Alignas(LINE) _Atomic uint64_t ticket; /* last to be written: makes the other two valid */
    void (*_Atomic body)(void *arg, int32_t index);
    void *_Atomic arg;
    _Alignas(LINE) _Atomic uint32_t left; /* indices that are not done, or SLEEPS + so many */
    _Atomic bool taken;
} place;

enum { PLACES = 16 };

struct attn_pool {
    const attn_context *context;
    place *places;         /* [PLACES], behind the workers */
    pthread_mutex_t mutex; /* for the conditions, and who starts workers */
    pthread_cond_t work;   /* there is a job, or the pool is to stop */
    pthread_cond_t done;   /* a job is done whose caller sleeps */
    _Atomic bool asleep;   /* there may be workers that only the condition wakes; written under the mutex */
    _Atomic bool stop;
    int32_t threads;         /* workers wanted: callers' threads excluded */
    _Atomic int32_t started; /* workers running in this process; written under the mutex */
    pthread_t workers[];
};

int32_t attn__cpu_count(void) {
    cpu_set_t set;
    int count = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : (int)sysconf(_SC_NPROCESSORS_ONLN);
    return count < 1 ? 1 : count;
}

enum { LOOKS = 2000, LOOKS_BETWEEN_YIELDS = 64 }; /* so often, and then one sleeps */

/* Some ten nanoseconds after a look; on aarch64 `yield` would be none at all. Who shares a CPU with those it waits for lets them go on. */
static void pause_after(int look) {
    if (look % LOOKS_BETWEEN_YIELDS == LOOKS_BETWEEN_YIELDS - 1) sched_yield();
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");
#endif
}

/* Who sleeps has looked under the mutex: after it was free once, there is nobody between looking and sleeping. */
static void wake(attn_pool *pool, pthread_cond_t *condition) {
    pthread_mutex_lock(&pool->mutex);
    if (condition == &pool->work) pool->asleep = false;
    pthread_mutex_unlock(&pool->mutex);
    pthread_cond_broadcast(condition);
}

static bool has_work(place *at) { return (at->ticket & UNCLAIMED) != 0; }

/*
 * Runs indices of the job at a place until none is unclaimed. What was read of it before an index is claimed belongs to the job of that index: the
 * place goes to another one only after this index is done.
 */
static void work_on(attn_pool *pool, place *at) {
    for (uint64_t ticket = at->ticket; ticket & UNCLAIMED;) {
        void (*body)(void *, int32_t) = at->body;
        void *arg = at->arg;
        if (!atomic_compare_exchange_weak(&at->ticket, &ticket, ticket - 1)) continue;
        body(arg, (int32_t)(ticket & UNCLAIMED) - 1);
        if (atomic_fetch_sub(&at->left, 1) == SLEEPS + 1) wake(pool, &pool->done);
        ticket = at->ticket;
    }
}

/* The first place with something to do, or NULL. */
static place *find_work(attn_pool *pool) {
    for (int n = 0; n < PLACES; n++) {
        if (has_work(&pool->places[n])) return &pool->places[n];
    }
    return NULL;
}

static void sleep_until_there_is_work(attn_pool *pool) {
    pthread_mutex_lock(&pool->mutex);
    pool->asleep = true; /* before the last look: whoever comes after it sees this */
    if (!pool->stop && !find_work(pool)) pthread_cond_wait(&pool->work, &pool->mutex);
    pthread_mutex_unlock(&pool->mutex);
}

static void *worker(void *arg) {
    attn_pool *pool = arg;
    for (int looks = 0; !pool->stop; looks++) {
        place *at = find_work(pool);
        if (at) {
            work_on(pool, at);
            looks = 0;
        } else if (looks < LOOKS) {
            pause_after(looks);
        } else {
            sleep_until_there_is_work(pool);
            looks = 0;
        }
    }
    return NULL;
}

/* Starts the workers that do not run yet. */
static attn_status start_workers(attn_pool *pool) {
    if (pool->started == pool->threads) return ATTN_OK;
    pthread_mutex_lock(&pool->mutex);
    int error = 0;
    while (pool->started < pool->threads) {
        pthread_t *thread = &pool->workers[pool->started];
        error = attn__fault(ATTN_FAULT_THREAD) ? EAGAIN : pthread_create(thread, NULL, worker, pool);
        if (error) break;
        pool->started++;
    }
    pthread_mutex_unlock(&pool->mutex);
    RETURN_IF(error, ATTN_SYSTEM, "threads=%d: thread %d could not be started: %s; use fewer", pool->threads + 1,
              pool->started + 2, strerror(error));
    return ATTN_OK;
}

attn_status attn__pool_create(attn_pool **out, attn_context *context, int32_t threads) {
    int32_t workers = threads - 1; /* the caller is one */
    size_t bytes = sizeof(attn_pool) + (size_t)workers * sizeof(pthread_t);
    attn_pool *pool = attn__alloc(context, bytes + LINE + PLACES * sizeof(place));
    if (!pool) return ATTN_NO_MEMORY;
    memset(pool, 0, bytes + LINE + PLACES * sizeof(place));
    pool->context = context;
    pool->places = (place *)(((uintptr_t)pool + bytes + LINE - 1) / LINE * LINE);
    pool->threads = workers;
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->work, NULL);
    pthread_cond_init(&pool->done, NULL);
    attn_status status = start_workers(pool);
    if (status != ATTN_OK)
        attn__pool_destroy(pool);
    else
        *out = pool;
    return status;
}

void attn__pool_destroy(attn_pool *pool) {
    if (!pool) return;
    pool->stop = true;
    wake(pool, &pool->work);
    for (int32_t n = 0; n < pool->started; n++) pthread_join(pool->workers[n], NULL);
    pthread_cond_destroy(&pool->done);
    pthread_cond_destroy(&pool->work);
    pthread_mutex_destroy(&pool->mutex);
    attn__free(pool->context, pool);
}

void attn__pool_before_fork(attn_pool *pool) { pthread_mutex_lock(&pool->mutex); }

void attn__pool_after_fork(attn_pool *pool, bool in_child) {
    if (in_child) {
        pool->started = 0;
        pool->asleep = false;
        for (int n = 0; n < PLACES; n++) { /* their callers are the parent's */
            pool->places[n].ticket &= ~UNCLAIMED;
            pool->places[n].taken = false;
        }
        pthread_cond_init(&pool->work, NULL);
        pthread_cond_init(&pool->done, NULL);
    }
    pthread_mutex_unlock(&pool->mutex);
}

/* A place that is nobody else's until it is given back, or NULL. */
static place *take_place(attn_pool *pool) {
    for (int n = 0; n < PLACES; n++) {
        place *at = &pool->places[n];
        if (!at->taken && !atomic_exchange(&at->taken, true)) return at;
    }
    return NULL;
}

static void wait_for(attn_pool *pool, place *at) {
    for (int looks = 0; looks < LOOKS; looks++) {
        if (at->left == 0) return;
        pause_after(looks);
    }
    if (atomic_fetch_or(&at->left, SLEEPS) == 0) return;
    pthread_mutex_lock(&pool->mutex);
    while (at->left != SLEEPS) pthread_cond_wait(&pool->done, &pool->mutex);
    pthread_mutex_unlock(&pool->mutex);
}

int attn__pool_for(void *arg, void (*body)(void *body_arg, int32_t index), void *body_arg, int32_t count) {
    attn_pool *pool = arg;
    if (start_workers(pool) != ATTN_OK) return -1;                                   /* after a fork; otherwise they run */
    place *at = count > 1 && (uint64_t)count <= UNCLAIMED ? take_place(pool) : NULL; /* no context has so many threads */
    if (!at) {
        for (int32_t n = 0; n < count; n++) body(body_arg, n);
        return 0;
    }
    atomic_store_explicit(&at->body, body, memory_order_relaxed); /* a line that workers look at: better written once */
    atomic_store_explicit(&at->arg, body_arg, memory_order_relaxed);
    atomic_store_explicit(&at->left, (uint32_t)count, memory_order_relaxed);
    at->ticket = (at->ticket & ~UNCLAIMED) + NEXT_JOB + (uint64_t)count;
    if (pool->asleep) wake(pool, &pool->work);
    work_on(pool, at);
    wait_for(pool, at);
    at->taken = false;
    return 0;
}
