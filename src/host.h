/*
 * What the host backends share: rows of q as attention sees them, KV append, rotary embedding, merge, padding of outputs.
 */
#ifndef ATTN_HOST_H
#define ATTN_HOST_H

#include "internal.h"
#include "rotate.h"
#include "schedule.h"

/* Rotates the row x in place, in float32, or in double for F64. */
void attn__rotate(const attn_rotation *r, double *x);

/* Row i of head h of q, in double: rotated and rounded to its dtype where the problem says so, then times q_descale. */
void attn__q_row(const attn_problem *p, const attn_buffers *f, const attn_seq *s, int32_t i, int32_t h, double *out);

/* Writes k_new and v_new into the cache. */
attn_status attn__host_append(const attn_plan *plan, const attn_buffers *f);

/* C4: fills what no sequence covers: rows of o, lse, d_q, d_k, d_v that are padding. */
attn_status attn__host_fill_padding(const attn_plan *plan, const attn_buffers *f);

attn_status attn__host_merge(attn_context *context, const attn_merge_args *args, void *stream);
attn_status attn__host_rotary(attn_context *context, const attn_rotary_args *args, void *stream);

#endif
