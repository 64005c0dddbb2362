/*
 * Rigs (build.h) on the devices of the stub driver (stub_driver.h), plans of theirs, and the launches that they make: what the
 * tests of the cuda backend's host side share.
 */
#ifndef CUDA_RIG_H
#define CUDA_RIG_H

#include "build.h"
#include "cuda/cuda.h"
#include "stub_driver.h"

/* A context of the cuda backend; the second checks that there is one. */
attn_status create_cuda(attn_context **context);
attn_context *cuda_context(void);

/* rig_make, with memory that is the device's. */
bool rig_make_on(rig *r, int device);

/* Runs a plan of the rig's problem, with a workspace on the device; or makes the plan as well. */
attn_status rig_run_plan(attn_plan *plan, const rig *r, int device, void *stream);
attn_status rig_plan_and_run(attn_context *context, const rig *r, int device, void *stream);

/* A row of the table of kernels; NULL: there is none of that name. */
const attn_cuda_entry *entry_named(const char *name);

/* The launch of the forward kernel among those that were written down; NULL: there is none. */
const stub_launch *forward_launch(void);

/* A backward with every gradient, FlashMask and lengths. */
rig rich_backward(void);

/* Makes the integers of a rig (cu_q, used_kv, rotary_pos) memory of device 0. */
void adopt_ints(const rig *r);

/* Bytes of workspace of a plan for the problem; 0, and a failed check, if there is none. */
size_t workspace_of(attn_context *context, attn_problem p);

#endif
