/* Rigs on the devices of the stub driver: see cuda_rig.h. */
#define _GNU_SOURCE
#include "cuda_rig.h"

#include <string.h>

#include "test.h"

attn_status create_cuda(attn_context **context) {
    attn_config config = {.size = sizeof config, .backend = ATTN_BACKEND_CUDA};
    return attn_context_create(context, &config);
}

attn_context *cuda_context(void) {
    attn_context *context = NULL;
    CHECK_OK(create_cuda(&context));
    return context;
}

bool rig_make_on(rig *r, int device) {
    if (!CHECK(rig_make(r, 1))) return false;
    for (int n = 0; n < r->blocks; n++) stub_adopt(STUB_DEVICE, device, r->block[n].data, r->block[n].bytes);
    return true;
}

attn_status rig_run_plan(attn_plan *plan, const rig *r, int device, void *stream) {
    attn_buffers f = r->p.op == ATTN_BACKWARD ? rig_backward_buffers(r) : rig_forward_buffers(r);
    f.workspace_size = attn_plan_workspace(plan);
    f.workspace = f.workspace_size ? stub_memory(STUB_DEVICE, device, f.workspace_size) : NULL;
    return attn_run(plan, &f, stream);
}

attn_status rig_plan_and_run(attn_context *context, const rig *r, int device, void *stream) {
    attn_plan *plan;
    RETURN_IF_ERROR(attn_plan_create(&plan, context, &r->p));
    attn_status status = rig_run_plan(plan, r, device, stream);
    attn_plan_destroy(plan);
    return status;
}

const attn_cuda_entry *entry_named(const char *name) {
    for (int n = 0; n < ATTN_ENTRIES; n++) {
        if (strcmp(attn__cuda_entries[n].name, name) == 0) return &attn__cuda_entries[n];
    }
    return NULL;
}

const stub_launch *forward_launch(void) {
    for (int n = 0; n < stub_launches(); n++) {
        const char *name = stub_launch_at(n)->name;
        if (strncmp(name, "fwd_", 4) == 0 || strncmp(name, "decode_", 7) == 0) return stub_launch_at(n);
    }
    return NULL;
}

rig rich_backward(void) {
    static int32_t cu[] = {0, 3, 5}, used[] = {100, 7};
    rig r = {.p = problem(ATTN_F16, 2, 4, 2, 17, 110, 64)};
    r.p.op = ATTN_BACKWARD;
    r.p.flags = ATTN_CAUSAL | ATTN_VARLEN_Q | ATTN_USED_KV | ATTN_SINK | ATTN_BIAS;
    r.p.total_q = 6;
    r.p.flashmask_vectors = 1;
    r.f.cu_q = cu;
    r.f.used_kv = used;
    return r;
}

void adopt_ints(const rig *r) {
    stub_adopt(STUB_DEVICE, 0, (void *)(uintptr_t)r->f.cu_q, 3 * sizeof(int32_t));
    stub_adopt(STUB_DEVICE, 0, (void *)(uintptr_t)r->f.used_kv, 2 * sizeof(int32_t));
    if (r->f.rotary_pos) stub_adopt(STUB_DEVICE, 0, (void *)(uintptr_t)r->f.rotary_pos, 2 * sizeof(int32_t));
}

size_t workspace_of(attn_context *context, attn_problem p) {
    attn_plan *plan;
    if (!CHECK_OK(attn_plan_create(&plan, context, &p))) return 0;
    size_t bytes = attn_plan_workspace(plan);
    attn_plan_destroy(plan);
    return bytes;
}
