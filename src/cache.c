/*
 * Plans and workspaces of the one-shot calls.
 *
 * Plans: a short array, most recently used first, compared by the bytes of the resolved problem. A plan in use is held by
 * a reference, so another thread may push it out of the array meanwhile. Workspaces: a few idle blocks; a call takes one that
 * is large enough or allocates, and puts it back. What does not fit in is freed.
 */
#include "cache.h"

#include "plan.h"

#include <pthread.h>
#include <string.h>

enum { PLANS = 64, BLOCKS = 8, ALIGN = 64 };

/* A workspace begins ALIGN bytes, or a little less, after its block; this header sits right before it. */
typedef struct block {
    void *memory; /* what the allocator gave */
    size_t bytes; /* usable from the workspace on */
} block;

struct attn_cache {
    pthread_mutex_t mutex;
    int32_t plans, blocks;
    attn_plan *plan[PLANS];
    void *idle[BLOCKS];
};

_Static_assert(sizeof(attn_problem) == 152, "attn_problem has no padding, so plans can be compared by bytes");

attn_status attn__cache_create(attn_cache **out, const attn_context *context) {
    attn_cache *cache = attn__alloc(context, sizeof *cache);
    if (!cache) return ATTN_NO_MEMORY;
    memset(cache, 0, sizeof *cache);
    pthread_mutex_init(&cache->mutex, NULL);
    *out = cache;
    return ATTN_OK;
}

static block *header_of(void *workspace) { return (block *)((char *)workspace - sizeof(block)); }

void attn__cache_destroy(attn_cache *cache, const attn_context *context) {
    if (!cache) return;
    for (int32_t n = 0; n < cache->plans; n++) attn__plan_release(cache->plan[n]);
    for (int32_t n = 0; n < cache->blocks; n++) attn__free(context, header_of(cache->idle[n])->memory);
    pthread_mutex_destroy(&cache->mutex);
    attn__free(context, cache);
}

/* Moves plan number n to the front. */
static void to_front(attn_cache *cache, int32_t n) {
    attn_plan *plan = cache->plan[n];
    memmove(&cache->plan[1], &cache->plan[0], (size_t)n * sizeof cache->plan[0]);
    cache->plan[0] = plan;
}

attn_status attn__cache_plan(attn_plan **out, attn_context *context, const attn_problem *problem) {
    attn_cache *cache = context->cache;
    attn_problem resolved;
    RETURN_IF_ERROR(attn__problem_resolve(&resolved, problem));
    pthread_mutex_lock(&cache->mutex);
    for (int32_t n = 0; n < cache->plans; n++) {
        if (memcmp(&cache->plan[n]->problem, &resolved, sizeof resolved) != 0) continue;
        to_front(cache, n);
        *out = attn__plan_hold(cache->plan[0]);
        pthread_mutex_unlock(&cache->mutex);
        return ATTN_OK;
    }
    pthread_mutex_unlock(&cache->mutex);
    RETURN_IF_ERROR(attn__plan_make(out, context, &resolved));
    attn_plan *pushed_out = NULL;
    pthread_mutex_lock(&cache->mutex); /* two threads may have made the same plan: a harmless double */
    if (cache->plans == PLANS)
        pushed_out = cache->plan[PLANS - 1];
    else
        cache->plans++;
    cache->plan[cache->plans - 1] = attn__plan_hold(*out);
    to_front(cache, cache->plans - 1);
    pthread_mutex_unlock(&cache->mutex);
    if (pushed_out) attn__plan_release(pushed_out);
    return ATTN_OK;
}

attn_status attn__cache_take(void **workspace, attn_context *context, size_t bytes) {
    attn_cache *cache = context->cache;
    *workspace = NULL;
    pthread_mutex_lock(&cache->mutex);
    int32_t best = -1; /* the smallest that is large enough */
    for (int32_t n = 0; n < cache->blocks; n++) {
        size_t size = header_of(cache->idle[n])->bytes;
        if (size >= bytes && (best < 0 || size < header_of(cache->idle[best])->bytes)) best = n;
    }
    if (best >= 0) {
        *workspace = cache->idle[best];
        cache->idle[best] = cache->idle[--cache->blocks];
    }
    pthread_mutex_unlock(&cache->mutex);
    if (*workspace) return ATTN_OK;
    RETURN_IF(bytes > SIZE_MAX - 2 * ALIGN, ATTN_NO_MEMORY, "workspace=%zu: too large", bytes);
    char *memory = attn__alloc(context, bytes + 2 * ALIGN);
    if (!memory) return ATTN_NO_MEMORY;
    char *start = (char *)(((uintptr_t)memory + sizeof(block) + ALIGN - 1) / ALIGN * ALIGN);
    *header_of(start) = (block){.memory = memory, .bytes = bytes};
    *workspace = start;
    return ATTN_OK;
}

/* Keeps the largest ones. */
void attn__cache_put(attn_context *context, void *workspace) {
    attn_cache *cache = context->cache;
    void *extra = workspace;
    pthread_mutex_lock(&cache->mutex);
    if (cache->blocks < BLOCKS) {
        cache->idle[cache->blocks++] = workspace;
        extra = NULL;
    }
    for (int32_t n = 0; n < cache->blocks && extra; n++) {
        if (header_of(cache->idle[n])->bytes >= header_of(extra)->bytes) continue;
        void *smaller = cache->idle[n];
        cache->idle[n] = extra;
        extra = smaller;
    }
    pthread_mutex_unlock(&cache->mutex);
    if (extra) attn__free(context, header_of(extra)->memory);
}

void attn__cache_before_fork(attn_cache *cache) { pthread_mutex_lock(&cache->mutex); }

void attn__cache_after_fork(attn_cache *cache) { pthread_mutex_unlock(&cache->mutex); }
