/* What the one-shot calls keep in the context between calls: plans and workspaces. */
#ifndef ATTN_CACHE_H
#define ATTN_CACHE_H

#include "internal.h"

attn_status attn__cache_create(attn_cache **cache, const attn_context *context);
void attn__cache_destroy(attn_cache *cache, const attn_context *context);

/* The plan of a problem, from the cache or made now; give it back with attn__plan_release. */
attn_status attn__cache_plan(attn_plan **plan, attn_context *context, const attn_problem *problem);

/* A workspace of at least `bytes`, 64-byte aligned; give it back with attn__cache_put. */
attn_status attn__cache_take(void **workspace, attn_context *context, size_t bytes);
void attn__cache_put(attn_context *context, void *workspace);

/* Around fork: nobody changes the cache from `before` to `after`. */
void attn__cache_before_fork(attn_cache *cache);
void attn__cache_after_fork(attn_cache *cache);

#endif
