/* Plans as the one-shot calls and the public functions use them. */
#ifndef ATTN_PLAN_H
#define ATTN_PLAN_H

#include "internal.h"

/* A plan with one reference, from a resolved problem. */
attn_status attn__plan_make(attn_plan **plan, attn_context *context, const attn_problem *resolved);
attn_plan *attn__plan_hold(attn_plan *plan);
void attn__plan_release(attn_plan *plan);

#endif
