/*
 * Of which device the memory of a call is. The driver knows every allocation, so a pointer that a kernel could not read is
 * refused by name before anything runs. Device memory says its device; pinned and managed memory can be reached from all of them.
 */
#include "cuda.h"

#include <stdio.h>

static attn_status look(const attn_driver *d, attn_cuda_home *home, const char *name, const void *data) {
    int attributes[] = {ATTN_CU_POINTER_TYPE, ATTN_CU_POINTER_MANAGED, ATTN_CU_POINTER_DEVICE};
    unsigned type = 0, managed = 0;
    int device = -1;
    void *values[] = {&type, &managed, &device};
    if (!data) return ATTN_OK;
    home->any = true;
    RETURN_IF_DRIVER(d, cuPointerGetAttributes, (3, attributes, values, (attn_cu_pointer)(uintptr_t)data));
    INVALID_IF(type != ATTN_CU_MEMORY_HOST && type != ATTN_CU_MEMORY_DEVICE && !managed,
               "%s=%p: is host memory that the GPU cannot reach; want device, managed or pinned memory", name, data);
    if (managed || type == ATTN_CU_MEMORY_HOST) {
        if (home->hint < 0) home->hint = device;
        return ATTN_OK;
    }
    if (home->device < 0) {
        home->device = device;
        home->name = name;
    }
    INVALID_IF(device != home->device, "%s=%p: is on device %d, and %s is on device %d", name, data, device, home->name,
               home->device);
    return ATTN_OK;
}

static attn_cuda_home nowhere(void) { return (attn_cuda_home){.device = -1, .hint = -1, .name = ""}; }

typedef struct named {
    const char *name;
    const void *data;
} named;

static attn_status look_at_all(const attn_driver *d, attn_cuda_home *home, const named *list, size_t count) {
    for (size_t n = 0; n < count; n++) RETURN_IF_ERROR(look(d, home, list[n].name, list[n].data));
    return ATTN_OK;
}

attn_status attn__cuda_find_buffers(const attn_driver *d, const attn_plan *plan, const attn_buffers *f,
                                    attn_cuda_home *home) {
    const named of_attention[] = {
        {"q.data", f->q.data}, {"o.data", f->o.data},         {"lse", f->lse},     {"bias.data", f->bias.data},
        {"cu_q", f->cu_q},     {"probs.data", f->probs.data}, {"alibi", f->alibi}, {"sink", f->sink},
        {"used_q", f->used_q}, {"flashmask", f->flashmask},
    };
    const named of_gradients[] = {
        {"d_o.data", f->d_o.data}, {"d_lse", f->d_lse},       {"d_q.data", f->d_q.data},
        {"d_k.data", f->d_k.data}, {"d_v.data", f->d_v.data}, {"d_bias.data", f->d_bias.data},
        {"d_sink", f->d_sink},
    };
    const named of_keys[] = {
        {"k.data", f->k.data},
        {"v.data", f->v.data},
        {"cu_kv", f->cu_kv},
        {"used_kv", f->used_kv},
        {"leftpad", f->leftpad},
        {"batch_index", f->batch_index},
        {"page_table", f->page_table},
        {"k_new.data", f->k_new.data},
        {"v_new.data", f->v_new.data},
        {"cu_new", f->cu_new},
        {"rotary_cos", f->rotary_cos},
        {"rotary_sin", f->rotary_sin},
        {"rotary_pos", f->rotary_pos},
        {"q_descale", f->q_descale},
        {"k_descale", f->k_descale},
        {"v_descale", f->v_descale},
        {"workspace", plan->workspace ? f->workspace : NULL},
    };
    *home = nowhere();
    if (plan->problem.op != ATTN_KV_APPEND)
        RETURN_IF_ERROR(look_at_all(d, home, of_attention, sizeof of_attention / sizeof of_attention[0]));
    if (plan->problem.op == ATTN_BACKWARD)
        RETURN_IF_ERROR(look_at_all(d, home, of_gradients, sizeof of_gradients / sizeof of_gradients[0]));
    return look_at_all(d, home, of_keys, sizeof of_keys / sizeof of_keys[0]);
}

attn_status attn__cuda_find_merge(const attn_driver *d, const attn_merge_args *a, attn_cuda_home *home) {
    const named list[] = {{"o.data", a->o.data}, {"lse", a->lse}};
    *home = nowhere();
    RETURN_IF_ERROR(look_at_all(d, home, list, sizeof list / sizeof list[0]));
    for (int32_t n = 0; n < a->parts; n++) {
        char name[2][40]; /* of pointers that differ from o.data in their device, so home keeps neither */
        snprintf(name[0], sizeof name[0], "o_parts[%d].data", n);
        snprintf(name[1], sizeof name[1], "lse_parts[%d]", n);
        attn_cuda_home here = *home;
        RETURN_IF_ERROR(look(d, &here, name[0], a->o_parts[n].data));
        RETURN_IF_ERROR(look(d, &here, name[1], a->lse_parts[n]));
        if (home->device < 0 && here.device >= 0) here.name = "a part";
        *home = here;
    }
    return ATTN_OK;
}

attn_status attn__cuda_find_rotary(const attn_driver *d, const attn_rotary_args *a, attn_cuda_home *home) {
    const named list[] = {{"x.data", a->x.data}, {"y.data", a->y.data}, {"cos", a->cos},
                          {"sin", a->sin},       {"pos", a->pos},       {"cu", a->cu}};
    *home = nowhere();
    return look_at_all(d, home, list, sizeof list / sizeof list[0]);
}
