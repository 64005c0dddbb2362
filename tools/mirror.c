/* Host arrays and their copies where a backend can read them; see device.h. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "device.h"
#include "tool.h"

bool mirror_add(mirror *m, const char *name, const void *host, size_t bytes, size_t before, size_t after) {
    if (m->count == MIRROR_BLOCKS) {
        tool_error(TOOL_RUNTIME, "%s: one array more than the %d that a call can have", name, MIRROR_BLOCKS);
        return false;
    }
    mirror_block b = {name, (unsigned char *)(uintptr_t)host, bytes, before, after, false, NULL};
    if (!device_is_direct(m->d)) {
        b.memory = device_alloc(m->d, before + (bytes ? bytes : 1) + after); /* even nothing has an address there */
        if (!b.memory) return false;
    }
    m->block[m->count++] = b;
    return true;
}

void mirror_free(mirror *m) {
    for (int n = 0; n < m->count; n++) device_free(m->d, m->block[n].memory);
    m->count = 0;
}

bool mirror_upload(mirror *m) {
    bool done = true;
    for (int n = 0; n < m->count && done && !device_is_direct(m->d); n++) {
        const mirror_block *b = &m->block[n];
        if (b->before + b->after) done = device_fill(m->d, b->memory, 0xff, b->before + b->bytes + b->after);
        done = done && device_upload(m->d, b->memory + b->before, b->host, b->bytes);
    }
    return done;
}

bool mirror_download(mirror *m) {
    bool done = true;
    for (int n = 0; n < m->count && done && !device_is_direct(m->d); n++) {
        const mirror_block *b = &m->block[n];
        if (!b->input) done = device_download(m->d, b->host, b->memory + b->before, b->bytes);
    }
    return done;
}

const char *mirror_damage(const mirror *m) {
    for (int n = 0; n < m->count && !device_is_direct(m->d); n++) {
        const mirror_block *b = &m->block[n];
        unsigned char around[512];
        if (b->before + b->after == 0) continue;
        if (b->before + b->after > sizeof around || !device_download(m->d, around, b->memory, b->before) ||
            !device_download(m->d, around + b->before, b->memory + b->before + b->bytes, b->after))
            return b->name;
        for (size_t at = 0; at < b->before + b->after; at++)
            if (around[at] != 0xff) return b->name;
    }
    return NULL;
}

void *mirror_at(const mirror *m, const void *host) {
    if (!host || device_is_direct(m->d)) return (void *)(uintptr_t)host;
    for (int n = 0; n < m->count; n++) {
        const mirror_block *b = &m->block[n];
        size_t offset = (uintptr_t)host - (uintptr_t)b->host;
        if (offset < b->bytes || offset == 0) return b->memory + b->before + offset;
    }
    tool_error(TOOL_RUNTIME, "an array of the call at %p has no copy on the device", host);
    abort(); /* an error in this program; going on would hand a host address to a GPU */
}

attn_buffers mirror_buffers(const mirror *m, const attn_buffers *buffers) {
#define AT(field) offsetof(attn_buffers, field)
    static const size_t pointers[] = {
        AT(q.data),      AT(k.data),     AT(v.data),    AT(o.data),     AT(lse),         AT(d_o.data),   AT(d_lse),
        AT(d_q.data),    AT(d_k.data),   AT(d_v.data),  AT(bias.data),  AT(d_bias.data), AT(probs.data), AT(alibi),
        AT(sink),        AT(d_sink),     AT(cu_q),      AT(cu_kv),      AT(used_q),      AT(used_kv),    AT(leftpad),
        AT(batch_index), AT(page_table), AT(flashmask), AT(k_new.data), AT(v_new.data),  AT(cu_new),     AT(rotary_cos),
        AT(rotary_sin),  AT(rotary_pos), AT(q_descale), AT(k_descale),  AT(v_descale),   AT(workspace)};
    attn_buffers there = *buffers;
    for (size_t n = 0; n < sizeof pointers / sizeof *pointers && !device_is_direct(m->d); n++) {
        void *p;
        memcpy(&p, (const char *)buffers + pointers[n], sizeof p);
        p = mirror_at(m, p);
        memcpy((char *)&there + pointers[n], &p, sizeof p);
    }
    return there;
}
