/* A pool of threads: the caller is one of them. Jobs are handed out one by one under a lock; there are few of them. */
#include <pthread.h>
#include <stdlib.h>

#include "generate.h"

enum { MOST_THREADS = 256 };

struct pool {
    pthread_mutex_t lock;
    pthread_cond_t begin, done;
    pthread_t thread[MOST_THREADS];
    int threads; /* besides the caller */
    bool ending;
    void (*body)(void *arg, int32_t index);
    void *arg;
    int32_t next, count, running; /* of the jobs */
};

/* Takes jobs as long as there are some; holds the lock when it is called and when it returns. */
static void work(pool *p) {
    while (p->next < p->count) {
        int32_t index = p->next++;
        p->running++;
        pthread_mutex_unlock(&p->lock);
        p->body(p->arg, index);
        pthread_mutex_lock(&p->lock);
        p->running--;
    }
    if (p->running == 0) pthread_cond_broadcast(&p->done);
}

static void *main_of_thread(void *arg) {
    pool *p = arg;
    pthread_mutex_lock(&p->lock);
    while (!p->ending) {
        work(p);
        if (!p->ending) pthread_cond_wait(&p->begin, &p->lock);
    }
    pthread_mutex_unlock(&p->lock);
    return NULL;
}

int pool_run(void *pool_of, void (*body)(void *arg, int32_t index), void *arg, int32_t count) {
    pool *p = pool_of;
    pthread_mutex_lock(&p->lock);
    p->body = body;
    p->arg = arg;
    p->next = 0;
    p->count = count;
    if (count > 1) pthread_cond_broadcast(&p->begin);
    work(p);
    while (p->running > 0) pthread_cond_wait(&p->done, &p->lock);
    pthread_mutex_unlock(&p->lock);
    return 0;
}

pool *pool_create(int threads) {
    pool *p = calloc(1, sizeof *p);
    if (!p) return NULL;
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->begin, NULL);
    pthread_cond_init(&p->done, NULL);
    while (p->threads < threads - 1 && p->threads < MOST_THREADS) {
        if (pthread_create(&p->thread[p->threads], NULL, main_of_thread, p) != 0) {
            pool_destroy(p);
            return NULL;
        }
        p->threads++;
    }
    return p;
}

void pool_destroy(pool *p) {
    if (!p) return;
    pthread_mutex_lock(&p->lock);
    p->ending = true;
    pthread_cond_broadcast(&p->begin);
    pthread_mutex_unlock(&p->lock);
    for (int n = 0; n < p->threads; n++) pthread_join(p->thread[n], NULL);
    pthread_cond_destroy(&p->done);
    pthread_cond_destroy(&p->begin);
    pthread_mutex_destroy(&p->lock);
    free(p);
}
