/* Work for a GPU beside which a case runs, so that blocks of both share multiprocessors and start in another order each time. */
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "tool.h"

enum { HEADS = 32, LENGTH = 1024, DIM = 128 };

struct load {
    device *d;
    attn_plan *plan;
    attn_buffers buffers;
    void *memory[6]; /* q, k, v, o, lse, workspace */
};

load *load_make(attn_context *context, device *d) {
    attn_problem p = {.size = sizeof p, .dtype = ATTN_BF16, .batch = 1, .heads_q = HEADS, .heads_kv = HEADS, .dim_qk = DIM};
    p.max_q = p.max_kv = LENGTH;
    load *l = tool_alloc(1, sizeof *l);
    if (!l) return NULL;
    memset(l, 0, sizeof *l);
    l->d = d;
    attn_status status = attn_plan_create(&l->plan, context, &p);
    bool made = status == ATTN_OK;
    if (!made) tool_status("check", status);
    for (int n = 0; n < 6 && made; n++) {
        size_t bytes = n < 4 ? (size_t)2 * HEADS * LENGTH * DIM : (size_t)4 * HEADS * LENGTH;
        if (n == 5) bytes = attn_plan_workspace(l->plan);
        l->memory[n] = device_alloc(d, bytes);
        made = l->memory[n] && device_fill(d, l->memory[n], 0, bytes);
    }
    if (!made) {
        load_free(l);
        return NULL;
    }
    attn_buffers *f = &l->buffers;
    attn_tensor *const tensors[4] = {&f->q, &f->k, &f->v, &f->o};
    f->size = sizeof *f;
    for (int n = 0; n < 4; n++) *tensors[n] = attn_dense(l->memory[n], LENGTH, HEADS, DIM);
    f->lse = l->memory[4];
    f->workspace = l->memory[5];
    f->workspace_size = attn_plan_workspace(l->plan);
    return l;
}

attn_status load_run(load *l) { return attn_run(l->plan, &l->buffers, device_stream(l->d, 1)); }

void load_free(load *l) {
    if (!l) return;
    device_wait(l->d);
    for (int n = 0; n < 6; n++) device_free(l->d, l->memory[n]);
    attn_plan_destroy(l->plan);
    free(l);
}
