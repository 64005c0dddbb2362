/* The public functions: check, delegate. */
#include "cache.h"
#include "plan.h"

#include <string.h>

int attn_version(void) { return ATTN_VERSION; }

attn_status attn_plan_create(attn_plan **plan, attn_context *context, const attn_problem *problem) {
    RETURN_IF(!plan, ATTN_INVALID, "plan=NULL: want the address of an attn_plan pointer");
    *plan = NULL;
    RETURN_IF(!context, ATTN_INVALID, "context=NULL: make one with attn_context_create");
    attn_problem resolved;
    RETURN_IF_ERROR(attn__problem_resolve(&resolved, problem));
    return attn__plan_make(plan, context, &resolved);
}

void attn_plan_destroy(attn_plan *plan) { attn__plan_release(plan); }

size_t attn_plan_workspace(const attn_plan *plan) { return plan ? plan->workspace : 0; }

const char *attn_plan_describe(const attn_plan *plan) { return plan ? plan->text : ""; }

const char *attn_plan_kernel(const attn_plan *plan) { return plan ? plan->kernel->name : ""; }

attn_status attn_run(const attn_plan *plan, const attn_buffers *buffers, void *stream) {
    attn_buffers checked;
    RETURN_IF_ERROR(attn__buffers_check(&checked, plan, buffers));
    return plan->backend->run(plan, &checked, stream);
}

/* A one-shot call: plan from the cache, workspace from the caller or from the cache. */
static attn_status run_once(attn_context *context, attn_op op, const attn_problem *problem, const attn_buffers *buffers,
                            void *stream) {
    RETURN_IF(!context, ATTN_INVALID, "context=NULL: make one with attn_context_create");
    attn_plan *plan;
    const attn_backend *backend = context->backend;
    RETURN_IF_ERROR(attn__cache_plan(&plan, context, problem));
    attn_status status = ATTN_OK;
    if (plan->problem.op != op)
        status = attn__fail(ATTN_INVALID, "op=%d: this function wants op=%d", (int)plan->problem.op, (int)op);
    attn_buffers with_workspace = {0};
    void *taken = NULL;
    if (status == ATTN_OK) status = attn__buffers_load(&with_workspace, buffers);
    bool own = !with_workspace.workspace || with_workspace.workspace_size < plan->workspace;
    if (status == ATTN_OK && own && plan->workspace) {
        status = backend->take ? backend->take(plan, &with_workspace, stream, &taken)
                               : attn__cache_take(&taken, context, plan->workspace);
        with_workspace.workspace = taken;
        with_workspace.workspace_size = plan->workspace;
    }
    if (status == ATTN_OK) status = attn_run(plan, &with_workspace, stream);
    if (taken && backend->put) {
        attn_status freed = backend->put(plan, &with_workspace, stream, taken);
        if (status == ATTN_OK) status = freed;
    } else if (taken) {
        attn__cache_put(context, taken);
    }
    attn__plan_release(plan);
    return status;
}

attn_status attn_forward(attn_context *context, const attn_problem *problem, const attn_buffers *buffers, void *stream) {
    return run_once(context, ATTN_FORWARD, problem, buffers, stream);
}

attn_status attn_backward(attn_context *context, const attn_problem *problem, const attn_buffers *buffers, void *stream) {
    return run_once(context, ATTN_BACKWARD, problem, buffers, stream);
}

attn_status attn_kv_append(attn_context *context, const attn_problem *problem, const attn_buffers *buffers, void *stream) {
    return run_once(context, ATTN_KV_APPEND, problem, buffers, stream);
}

attn_status attn_plan_tiles(const attn_plan *plan, const attn_buffers *buffers, int32_t batch, int32_t head,
                            int (*visit)(void *user, const attn_tile *tile), void *user) {
    attn_buffers checked;
    RETURN_IF(!visit, ATTN_INVALID, "visit=NULL: want a function");
    RETURN_IF_ERROR(attn__lengths_check(&checked, plan, buffers));
    const attn_problem *p = &plan->problem;
    RETURN_IF(!plan->backend->tiles || p->op != ATTN_FORWARD, ATTN_UNSUPPORTED,
              "plan=%s: only forward plans of the cpu backend can list their tiles", plan->kernel->name);
    RETURN_IF(batch < 0 || batch >= p->batch, ATTN_INVALID, "batch=%d: want 0 to %d", batch, p->batch - 1);
    RETURN_IF(head < 0 || head >= p->heads_q, ATTN_INVALID, "head=%d: want 0 to %d", head, p->heads_q - 1);
    return plan->backend->tiles(plan, &checked, batch, head, visit, user);
}

attn_status attn_merge(attn_context *context, const attn_merge_args *args, void *stream) {
    RETURN_IF(!context, ATTN_INVALID, "context=NULL: make one with attn_context_create");
    attn_merge_args checked;
    RETURN_IF_ERROR(attn__merge_check(&checked, args));
    return context->backend->merge(context, &checked, stream);
}

attn_status attn_rotary(attn_context *context, const attn_rotary_args *args, void *stream) {
    RETURN_IF(!context, ATTN_INVALID, "context=NULL: make one with attn_context_create");
    attn_rotary_args checked;
    RETURN_IF_ERROR(attn__rotary_check(&checked, args, context->backend->host));
    return context->backend->rotary(context, &checked, stream);
}

attn_status attn_kernel_get(int32_t index, attn_kernel_info *info, size_t size) {
    static const attn_backend *const backends[] = {&attn__backend_ref, &attn__backend_cpu, &attn__backend_cuda};
    RETURN_IF(!info, ATTN_INVALID, "info=NULL: want an attn_kernel_info");
    int32_t at = index;
    for (size_t n = 0; n < sizeof backends / sizeof backends[0] && at >= 0; n++) {
        bool available;
        int32_t rows = 0;
        while (backends[n]->kernel(rows, NULL) && rows < at) rows++;
        const attn_kernel *k = backends[n]->kernel(rows, &available);
        if (k) {
            attn_kernel_info row = {.name = k->name,
                                    .backend = backends[n]->name,
                                    .needs = k->needs,
                                    .op = k->op,
                                    .rows = k->rows,
                                    .cols = k->cols,
                                    .available = available};
            memcpy(info, &row, size < sizeof row ? size : sizeof row);
            return ATTN_OK;
        }
        at -= rows;
    }
    return attn__fail(ATTN_INVALID, "index=%d: the kernel table has no such row", index);
}
