/*
 * The library's own thread pool, for contexts whose host has no parallel_for.
 *
 * A call publishes a job (a body and a number of indices) in the pool's list and works on it itself; idle workers help with
 * whatever job is in the list. So several callers share the workers, a call never waits for another call's work to
 * begin, and a body may itself call into the pool: at worst it does its own job alone. Who has nothing to do looks around for some
 * microseconds, which is shorter than falling asleep and being woken, and then sleeps on a condition.
 *
 * fork: the child has the pool's memory but none of its threads. The context holds the mutex across the fork (context.c), so
 * the child finds the pool consistent; it forgets the workers and jobs, and its first call starts workers of its own.
 */
#define _GNU_SOURCE
#include "internal.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

typedef struct job {
    void (*body)(void *arg, int32_t index);
    void *arg;
    int32_t count;           /* indices in all */
    int32_t next;            /* first index that nobody has claimed */
    _Atomic int32_t running; /* indices claimed and not yet done; written under the mutex, read by whoever waits */
    struct job *link;
} job;

struct attn_pool {
    const attn_context *context;
    pthread_mutex_t mutex; /* guards everything below */
    pthread_cond_t work;   /* a job has unclaimed indices, or the pool is to stop */
    pthread_cond_t done;   /* some job has lost its last running index */
    job *jobs;             /* those with unclaimed indices, oldest first */
    _Atomic int32_t open;  /* how many those are; written under the mutex, read by whoever looks around */
    int32_t asleep;        /* workers that only the condition wakes */
    bool stop;
    int32_t threads; /* workers wanted: callers' threads excluded */
    int32_t started; /* workers running in this process */
    pthread_t workers[];
};

int32_t attn__cpu_count(void) {
    cpu_set_t set;
    int count = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : (int)sysconf(_SC_NPROCESSORS_ONLN);
    return count < 1 ? 1 : count;
}

/* Looks at *value for some microseconds, until it is zero, or not zero. Called without the mutex. */
static void look_around(_Atomic int32_t *value, bool until_zero) {
    enum { LOOKS = 2000 };
    for (int n = 0; n < LOOKS && (atomic_load_explicit(value, memory_order_relaxed) == 0) != until_zero; n++) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        __asm__ volatile("yield");
#endif
    }
}

/* Runs indices of j until none is unclaimed. Called and returns with the mutex held. */
static void work_on(attn_pool *pool, job *j) {
    while (j->next < j->count) {
        int32_t index = j->next++;
        j->running++;
        if (j->next == j->count) { /* nothing left to claim: out of the list */
            job **at = &pool->jobs;
            while (*at != j) at = &(*at)->link;
            *at = j->link;
            pool->open--;
        }
        pthread_mutex_unlock(&pool->mutex);
        j->body(j->arg, index);
        pthread_mutex_lock(&pool->mutex);
        if (--j->running == 0 && j->next == j->count) pthread_cond_broadcast(&pool->done);
    }
}

static void *worker(void *arg) {
    attn_pool *pool = arg;
    pthread_mutex_lock(&pool->mutex);
    while (!pool->stop) {
        if (!pool->jobs) {
            pthread_mutex_unlock(&pool->mutex);
            look_around(&pool->open, false);
            pthread_mutex_lock(&pool->mutex);
        }
        if (pool->jobs) {
            work_on(pool, pool->jobs);
        } else if (!pool->stop) {
            pool->asleep++;
            pthread_cond_wait(&pool->work, &pool->mutex);
            pool->asleep--;
        }
    }
    pthread_mutex_unlock(&pool->mutex);
    return NULL;
}

/* Starts the workers that do not run yet. Called with the mutex held. */
static attn_status start_workers(attn_pool *pool) {
    while (pool->started < pool->threads) {
        pthread_t *thread = &pool->workers[pool->started];
        int error = attn__fault(ATTN_FAULT_THREAD) ? EAGAIN : pthread_create(thread, NULL, worker, pool);
        RETURN_IF(error, ATTN_SYSTEM, "threads=%d: thread %d could not be started: %s; use fewer", pool->threads + 1,
                  pool->started + 2, strerror(error));
        pool->started++;
    }
    return ATTN_OK;
}

attn_status attn__pool_create(attn_pool **out, attn_context *context, int32_t threads) {
    int32_t workers = threads - 1; /* the caller is one */
    attn_pool *pool = attn__alloc(context, sizeof *pool + (size_t)workers * sizeof pool->workers[0]);
    if (!pool) return ATTN_NO_MEMORY;
    memset(pool, 0, sizeof *pool);
    pool->context = context;
    pool->threads = workers;
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->work, NULL);
    pthread_cond_init(&pool->done, NULL);
    pthread_mutex_lock(&pool->mutex);
    attn_status status = start_workers(pool);
    pthread_mutex_unlock(&pool->mutex);
    if (status != ATTN_OK)
        attn__pool_destroy(pool);
    else
        *out = pool;
    return status;
}

void attn__pool_destroy(attn_pool *pool) {
    if (!pool) return;
    pthread_mutex_lock(&pool->mutex);
    pool->stop = true;
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->mutex);
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
        pool->asleep = 0;
        pool->jobs = NULL; /* their callers are the parent's */
        pool->open = 0;
        pthread_cond_init(&pool->work, NULL);
        pthread_cond_init(&pool->done, NULL);
    }
    pthread_mutex_unlock(&pool->mutex);
}

int attn__pool_for(void *arg, void (*body)(void *body_arg, int32_t index), void *body_arg, int32_t count) {
    attn_pool *pool = arg;
    job j = {.body = body, .arg = body_arg, .count = count};
    if (count <= 0) return 0;
    pthread_mutex_lock(&pool->mutex);
    if (start_workers(pool) != ATTN_OK) { /* after a fork; otherwise they run */
        pthread_mutex_unlock(&pool->mutex);
        return -1;
    }
    job **at = &pool->jobs;
    while (*at) at = &(*at)->link;
    *at = &j;
    pool->open++;
    if (count > 1 && pool->asleep > 0) pthread_cond_broadcast(&pool->work);
    work_on(pool, &j);
    if (j.running > 0) {
        pthread_mutex_unlock(&pool->mutex);
        look_around(&j.running, true);
        pthread_mutex_lock(&pool->mutex);
    }
    while (j.running > 0) pthread_cond_wait(&pool->done, &pool->mutex);
    pthread_mutex_unlock(&pool->mutex);
    return 0;
}
