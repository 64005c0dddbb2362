/*
 * Where sequence b lies: row offsets and lengths from the integer arrays of the buffers. Integers only, no checks: values
 * have been validated (host) or clamped (device) before.
 */
#ifndef ATTN_SCHEDULE_H
#define ATTN_SCHEDULE_H

#include "attn.h"
#include "mask.h"

enum { ATTN_MAX_DIM = 576 }; /* of dim_qk and dim_v */

typedef struct attn_seq {
    int32_t b;        /* sequence */
    int32_t slot;     /* where its keys are: batch index of a contiguous cache, row of the page table */
    int32_t sq, sk;   /* query rows; keys, appended ones included, leftpad excluded */
    int32_t leftpad;  /* cache position of key 0 */
    int32_t used;     /* cache positions in use before the append */
    int32_t appended; /* rows of k_new */
    int64_t q_row;    /* packed: first row in q; otherwise 0 */
    int64_t kv_row;   /* packed: first row in k; otherwise 0 */
    int64_t new_row;  /* packed: first row in k_new; otherwise 0 */
} attn_seq;

ATTN_HD attn_seq attn__seq(const attn_problem *p, const attn_buffers *f, int32_t b) {
    attn_seq s;
    s.b = b;
    s.slot = p->flags & ATTN_BATCH_INDEX ? f->batch_index[b] : b;
    s.q_row = p->flags & ATTN_VARLEN_Q ? f->cu_q[b] : 0;
    s.sq = p->flags & ATTN_USED_Q ? f->used_q[b] : p->flags & ATTN_VARLEN_Q ? f->cu_q[b + 1] - f->cu_q[b] : p->max_q;
    s.kv_row = p->flags & ATTN_VARLEN_KV ? f->cu_kv[b] : 0;
    s.used = p->flags & ATTN_USED_KV     ? f->used_kv[b]
             : p->flags & ATTN_VARLEN_KV ? f->cu_kv[b + 1] - f->cu_kv[b]
                                         : p->max_kv;
    s.new_row = p->flags & ATTN_VARLEN_NEW ? f->cu_new[b] : 0;
    s.appended = !(p->flags & ATTN_APPEND) ? 0 : p->flags & ATTN_VARLEN_NEW ? f->cu_new[b + 1] - f->cu_new[b] : p->max_new;
    s.leftpad = p->flags & ATTN_LEFTPAD ? f->leftpad[b] : 0;
    s.sk = s.used + s.appended - s.leftpad;
    return s;
}

ATTN_HD attn_mask attn__seq_mask(const attn_problem *p, const attn_seq *s) {
    return attn__mask_make(s->sq, s->sk, (p->flags & ATTN_CAUSAL) != 0, (p->flags & ATTN_WINDOW) != 0, p->window_left,
                           p->window_right, p->flashmask_vectors);
}

/* Entries in a row of the page table. */
ATTN_HD int64_t attn__pages_per_slot(const attn_problem *p, const attn_buffers *f) {
    return f->page_table_stride ? f->page_table_stride : ((int64_t)p->max_kv + p->page_size - 1) / p->page_size;
}

/* Element offset of row i of sequence s, head h, in a tensor shaped like q (q, o, d_o, d_q). */
ATTN_HD int64_t attn__q_offset(const attn_problem *p, const attn_tensor *t, const attn_seq *s, int32_t i, int32_t h) {
    int64_t base = p->flags & ATTN_VARLEN_Q ? s->q_row * t->stride[1] : s->b * t->stride[0];
    return base + i * t->stride[1] + h * t->stride[2];
}

/* Page of position `at` of a sequence's cache. */
ATTN_HD int32_t attn__page_at(const attn_problem *p, const attn_buffers *f, const attn_seq *s, int32_t at) {
    return f->page_table[s->slot * attn__pages_per_slot(p, f) + at / p->page_size];
}

/* Element offset of cache position `at` (key j is at leftpad + j) of sequence s, KV head h, in k, v, d_k or d_v. */
ATTN_HD int64_t attn__kv_offset(const attn_problem *p, const attn_buffers *f, const attn_tensor *t, const attn_seq *s,
                                int32_t at, int32_t h) {
    int64_t head = h * t->stride[2];
    if (p->page_size) {
        return attn__page_at(p, f, s, at) * t->stride[0] + at % p->page_size * t->stride[1] + head;
    }
    int64_t base = p->flags & ATTN_VARLEN_KV ? s->kv_row * t->stride[1] : s->slot * t->stride[0];
    return base + at * t->stride[1] + head;
}

/* Element offset of row r of k_new or v_new. */
ATTN_HD int64_t attn__new_offset(const attn_problem *p, const attn_tensor *t, const attn_seq *s, int32_t r, int32_t h) {
    int64_t base = p->flags & ATTN_VARLEN_NEW ? s->new_row * t->stride[1] : s->b * t->stride[0];
    return base + r * t->stride[1] + h * t->stride[2];
}

/* Index of row i, head h in lse and d_lse. */
ATTN_HD int64_t attn__lse_index(const attn_problem *p, const attn_seq *s, int32_t i, int32_t h) {
    return p->flags & ATTN_VARLEN_Q ? h * p->total_q + s->q_row + i : ((int64_t)s->b * p->heads_q + h) * p->max_q + i;
}

/* The FlashMask vectors of key j of sequence s for KV head h. */
ATTN_HD const int32_t *attn__flash_at(const attn_problem *p, const attn_buffers *f, int32_t b, int32_t kv_head, int32_t j) {
    int32_t head = p->flashmask_heads == 1 ? 0 : kv_head;
    return f->flashmask + (((int64_t)b * p->flashmask_heads + head) * p->max_kv + j) * p->flashmask_vectors;
}

/* Element offset of (i, j) of sequence b and head h in bias, d_bias or probs. */
ATTN_HD int64_t attn__matrix_at(const attn_matrix *m, int64_t b, int64_t h, int64_t i, int64_t j) {
    return b * m->stride[0] + h * m->stride[1] + i * m->stride[2] + j * m->stride[3];
}

/* The factor of KV head h of sequence b in one of the descale arrays; 1 when there is none. */
ATTN_HD double attn__descale(const attn_buffers *f, const float *descale, int32_t b, int32_t kv_head) {
    return descale ? descale[b * f->descale_stride[0] + kv_head * f->descale_stride[1]] : 1.0;
}

/* Of k or v: what all of a sequence have in common, and what the key at a position of its cache has besides. */
ATTN_HD double attn__kv_descale(const attn_problem *p, const attn_buffers *f, const float *descale, int32_t b,
                                int32_t kv_head) {
    return p->flags & ATTN_DESCALE_PAGES ? 1.0 : attn__descale(f, descale, b, kv_head);
}
ATTN_HD double attn__page_descale(const attn_problem *p, const attn_buffers *f, const float *descale, const attn_seq *s,
                                  int32_t at, int32_t kv_head) {
    return p->flags & ATTN_DESCALE_PAGES ? attn__descale(f, descale, attn__page_at(p, f, s, at), kv_head) : 1.0;
}

/* Position for which k_new row 0 of sequence s is rotated, and how q row i goes on from there. */
ATTN_HD int32_t attn__rotary_pos(const attn_problem *p, const attn_buffers *f, const attn_seq *s) {
    return p->flags & ATTN_ROTARY_POS ? f->rotary_pos[s->b] : s->used;
}
ATTN_HD int32_t attn__rotary_q_step(const attn_problem *p) { return (p->flags & (ATTN_CAUSAL | ATTN_WINDOW)) != 0; }

#endif
