/*
 * Plans: the backend chooses its kernel row and lays out the workspace; here is what is common: references, the text that
 * describes the plan, and the arithmetic of the layout.
 */
#include "plan.h"

#include <stdio.h>
#include <string.h>

void attn__plan_say(attn_plan *plan, const char *format, ...) {
    size_t used = strlen(plan->text);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(plan->text + used, sizeof plan->text - used, format, arguments);
    va_end(arguments);
}

bool attn__plan_reserve(attn_plan *plan, int index, int64_t count, int64_t bytes_each) {
    int64_t bytes, end;
    if (__builtin_mul_overflow(count, bytes_each, &bytes) || bytes < 0 || bytes > INT64_MAX - 63) return false;
    bytes = (bytes + 63) / 64 * 64;
    if (__builtin_add_overflow((int64_t)plan->workspace, bytes, &end) || end > PTRDIFF_MAX) return false;
    plan->part[index] = plan->workspace;
    plan->workspace = (size_t)end;
    return true;
}

/* The problem in words. */
static void describe_problem(attn_plan *plan) {
    static const char *const names[] = {"forward", "backward", "kv-append"};
    static const struct {
        uint32_t flag;
        const char *name;
    } features[] = {
        {ATTN_CAUSAL, "causal"},
        {ATTN_WINDOW, "window"},
        {ATTN_ALIBI, "alibi"},
        {ATTN_BIAS, "bias"},
        {ATTN_SINK, "sink"},
        {ATTN_VARLEN_Q, "varlen-q"},
        {ATTN_VARLEN_KV, "varlen-kv"},
        {ATTN_USED_Q, "used-q"},
        {ATTN_USED_KV, "used-kv"},
        {ATTN_LEFTPAD, "leftpad"},
        {ATTN_APPEND, "append"},
        {ATTN_ROTARY, "rotary"},
        {ATTN_BATCH_INDEX, "batch-index"},
        {ATTN_DESCALE, "descale"},
        {ATTN_DESCALE_PAGES, "descale-pages"},
        {ATTN_PRECISE, "precise"},
        {ATTN_UNORDERED, "unordered"},
        {ATTN_PRECISE_FEW, "precise-few"},
    };
    const attn_problem *p = &plan->problem;
    attn__plan_say(plan, "problem: %s, batch %d, heads %d/%d, dim %d/%d, seqlen %d/%d, dtype %s/%s/%s", names[p->op],
                   p->batch, p->heads_q, p->heads_kv, p->dim_qk, p->dim_v, p->max_q, p->max_kv, attn_dtype_name(p->dtype),
                   attn_dtype_name(p->kv_dtype), attn_dtype_name(p->out_dtype));
    for (size_t n = 0; n < sizeof features / sizeof features[0]; n++) {
        if (p->flags & features[n].flag) attn__plan_say(plan, ", %s", features[n].name);
    }
    if (p->softcap > 0) attn__plan_say(plan, ", softcap %g", p->softcap);
    if (p->dropout > 0) attn__plan_say(plan, ", dropout %g", p->dropout);
    if (p->flashmask_vectors) attn__plan_say(plan, ", flashmask of %d", p->flashmask_vectors);
    if (p->page_size) attn__plan_say(plan, ", pages of %d", p->page_size);
    attn__plan_say(plan, "\nbackend: %s\n", plan->backend->name);
}

attn_status attn__plan_make(attn_plan **out, attn_context *context, const attn_problem *resolved) {
    attn_plan *plan = attn__alloc(context, sizeof *plan);
    if (!plan) return ATTN_NO_MEMORY;
    memset(plan, 0, sizeof *plan);
    plan->context = context;
    plan->problem = *resolved;
    plan->backend = context->backend;
    atomic_init(&plan->references, 1);
    describe_problem(plan);
    attn_status status = plan->backend->plan(plan);
    if (status != ATTN_OK) {
        attn__free(context, plan);
        return status;
    }
    attn__plan_say(plan, "workspace: %zu bytes\n", plan->workspace);
    *out = plan;
    return ATTN_OK;
}

attn_plan *attn__plan_hold(attn_plan *plan) {
    atomic_fetch_add(&plan->references, 1);
    return plan;
}

void attn__plan_release(attn_plan *plan) {
    if (plan && atomic_fetch_sub(&plan->references, 1) == 1) attn__free(plan->context, plan);
}
