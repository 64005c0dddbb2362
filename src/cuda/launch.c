/* Placeholder until the row of launches is there: refuses, so that nothing is taken for computed. */
#include "cuda.h"

attn_status attn__cuda_forward(const attn_cuda_run *run, const attn_plan *plan, const attn_buffers *f) {
    (void)run, (void)plan, (void)f;
    return attn__fail(ATTN_UNSUPPORTED, "backend=cuda: the launches are not written yet");
}

attn_status attn__cuda_merge(const attn_cuda_run *run, const attn_merge_args *args) {
    (void)run, (void)args;
    return attn__fail(ATTN_UNSUPPORTED, "backend=cuda: the launches are not written yet");
}

attn_status attn__cuda_rotary(const attn_cuda_run *run, const attn_rotary_args *args) {
    (void)run, (void)args;
    return attn__fail(ATTN_UNSUPPORTED, "backend=cuda: the launches are not written yet");
}
