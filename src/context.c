/*
 * Context: which backend, whose memory, whose threads; and what happens to all that when the process forks.
 */
#include "cache.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* ---- allocation ---- */

static void *default_alloc(void *user, size_t bytes) {
    (void)user;
    return malloc(bytes);
}

static void default_free(void *user, void *memory) {
    (void)user;
    free(memory);
}

void *attn__alloc(const attn_context *context, size_t bytes) {
    void *memory = attn__fault(ATTN_FAULT_ALLOC) ? NULL : context->config.alloc(context->config.alloc_user, bytes);
    if (!memory) attn__fail(ATTN_NO_MEMORY, "alloc=%zu bytes: the allocator returned NULL", bytes);
    return memory;
}

void attn__free(const attn_context *context, void *memory) {
    if (memory) context->config.free(context->config.alloc_user, memory);
}

/* ---- threads ---- */

/* One call of attn__parallel: workers take the next index until there is none. */
typedef struct claim {
    int64_t count;
    void (*task)(void *arg, int64_t index, int32_t slot);
    void *arg;
    _Alignas(64) _Atomic int64_t next; /* a line of its own: all write it */
} claim;

static void claim_all(void *arg, int32_t slot) {
    claim *c = arg;
    for (int64_t n; (n = atomic_fetch_add_explicit(&c->next, 1, memory_order_relaxed)) < c->count;)
        c->task(c->arg, n, slot);
}

attn_status attn__parallel(const attn_context *context, int32_t slots, int64_t count,
                           void (*task)(void *arg, int64_t index, int32_t slot), void *arg) {
    claim c = {.count = count, .task = task, .arg = arg};
    if (count < slots) slots = (int32_t)count;
    if (slots <= 1) {
        claim_all(&c, 0);
        return ATTN_OK;
    }
    const attn_config *config = &context->config;
    if (context->pool) { /* sets the detail text itself */
        return attn__pool_for(context->pool, claim_all, &c, slots) ? ATTN_SYSTEM : ATTN_OK;
    }
    int error = config->parallel_for(config->parallel_user, claim_all, &c, slots);
    RETURN_IF(error, ATTN_SYSTEM, "parallel_for=%d: the caller's parallel_for did not return 0", error);
    return ATTN_OK;
}

/* ---- fork ---- */

/*
 * All contexts of the process. Around a fork every lock of every context is held, so that the child, in which only the forking
 * thread exists, finds them free and what they guard whole.
 */
static pthread_mutex_t contexts_mutex = PTHREAD_MUTEX_INITIALIZER;
static attn_context *contexts;

static void before_fork(void) {
    pthread_mutex_lock(&contexts_mutex);
    for (attn_context *c = contexts; c; c = c->next) {
        attn__cache_before_fork(c->cache);
        if (c->pool) attn__pool_before_fork(c->pool);
    }
}

static void after_fork(bool in_child) {
    for (attn_context *c = contexts; c; c = c->next) {
        if (c->pool) attn__pool_after_fork(c->pool, in_child);
        attn__cache_after_fork(c->cache);
    }
    pthread_mutex_unlock(&contexts_mutex);
}

static void after_fork_in_parent(void) { after_fork(false); }
static void after_fork_in_child(void) { after_fork(true); }
static int fork_error;
static void watch_forks(void) { fork_error = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child); }

static attn_status enlist(attn_context *context) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    RETURN_IF(fork_error, ATTN_SYSTEM, "pthread_atfork=%d: %s", fork_error, strerror(fork_error));
    pthread_mutex_lock(&contexts_mutex);
    context->next = contexts;
    contexts = context;
    pthread_mutex_unlock(&contexts_mutex);
    return ATTN_OK;
}

/* Does nothing for a context that was never in the list. */
static void delist(attn_context *context) {
    pthread_mutex_lock(&contexts_mutex);
    attn_context **at = &contexts;
    while (*at && *at != context) at = &(*at)->next;
    if (*at) *at = context->next;
    pthread_mutex_unlock(&contexts_mutex);
}

/* ---- creation ---- */

static attn_status choose_backend(const attn_backend **backend, attn_backend_id id) {
    switch (id) {
    case ATTN_BACKEND_REF: *backend = &attn__backend_ref; return ATTN_OK;
    case ATTN_BACKEND_AUTO:
    case ATTN_BACKEND_CPU: *backend = &attn__backend_cpu; return ATTN_OK;
    case ATTN_BACKEND_CUDA: *backend = &attn__backend_cuda; return ATTN_OK;
    }
    return attn__fail(ATTN_INVALID, "backend=%d: want ATTN_BACKEND_AUTO, _REF, _CPU or _CUDA", (int)id);
}

static attn_status choose_threads(int32_t *threads) {
    enum { MOST = 4096 };
    RETURN_IF(*threads < 0 || *threads > MOST, ATTN_INVALID, "threads=%d: want 0 (automatic) to %d", *threads, MOST);
    if (*threads) return ATTN_OK;
    const char *text = getenv("ATTN_NUM_THREADS");
    if (!text || !*text) {
        *threads = attn__cpu_count();
        return ATTN_OK;
    }
    char *end;
    errno = 0;
    long n = strtol(text, &end, 10);
    RETURN_IF(*end || errno || n < 1 || n > MOST, ATTN_INVALID, "ATTN_NUM_THREADS=%s: want a number from 1 to %d", text,
              MOST);
    *threads = (int32_t)n;
    return ATTN_OK;
}

static attn_status resolve_config(attn_config *resolved, const attn_config *config) {
    memset(resolved, 0, sizeof *resolved);
    if (config) RETURN_IF_ERROR(attn__struct_load(resolved, config, sizeof *config, ATTN_CONFIG_FIRST_SIZE, "attn_config"));
    RETURN_IF(!resolved->alloc != !resolved->free, ATTN_INVALID, "%s=NULL: give both alloc and free, or neither",
              resolved->alloc ? "free" : "alloc");
    if (!resolved->alloc) {
        resolved->alloc = default_alloc;
        resolved->free = default_free;
    }
    return choose_threads(&resolved->threads);
}

attn_status attn_context_create(attn_context **out, const attn_config *config) {
    RETURN_IF(!out, ATTN_INVALID, "context=NULL: want the address of an attn_context pointer");
    *out = NULL;
    attn_context start = {0};
    RETURN_IF_ERROR(resolve_config(&start.config, config));
    RETURN_IF_ERROR(choose_backend(&start.backend, start.config.backend));
    if (start.backend->open) RETURN_IF_ERROR(start.backend->open(&start));
    attn_context *context = attn__alloc(&start, sizeof *context);
    if (!context) {
        if (start.backend->close) start.backend->close(&start);
        return ATTN_NO_MEMORY;
    }
    *context = start;
    attn_status status = attn__cache_create(&context->cache, context);
    bool own_pool = !context->config.parallel_for && attn_context_threads(context) > 1;
    if (status == ATTN_OK && own_pool) status = attn__pool_create(&context->pool, context, context->config.threads);
    if (status == ATTN_OK) status = enlist(context);
    if (status != ATTN_OK) {
        attn_context_destroy(context);
        return status;
    }
    *out = context;
    return ATTN_OK;
}

void attn_context_destroy(attn_context *context) {
    if (!context) return;
    delist(context);
    attn__pool_destroy(context->pool);
    attn__cache_destroy(context->cache, context);
    if (context->backend->close) context->backend->close(context);
    attn_context copy = *context; /* the allocator is needed once more */
    attn__free(&copy, context);
}

const char *attn_context_backend(const attn_context *context) { return context ? context->backend->name : ""; }

int32_t attn_context_threads(const attn_context *context) {
    return !context ? 0 : context->backend == &attn__backend_cpu ? context->config.threads : 1;
}
