/*
 * What the files of the `ref` backend share: the state of one run, and the scores of one query row.
 *
 * The oracle is worth as much as it is simple, so it works row by row. attn__ref_load brings the keys and values of one KV head
 * of one sequence into the workspace as doubles; attn__ref_scores lists the keys that a query row may see and computes their
 * scores. From there on nothing has to think of masks: what is not in the list does not exist (C1, C2).
 */
#ifndef ATTN_REF_H
#define ATTN_REF_H

#include "../host.h"
#include "../internal.h"
#include "../numeric.h"
#include "../philox.h"
#include "../schedule.h"

/* Rows of doubles are zero-filled to a multiple of this, so that inner loops have no tail. It divides ATTN_MAX_DIM. */
enum { REF_LANES = 8 };

/* plan->part: where things are in the workspace. */
enum {
    REF_K,    /* double [max_kv][pad_qk]: keys at hand, descaled */
    REF_V,    /* double [max_kv][pad_v]: values */
    REF_KEY,  /* int32_t [max_kv]: the allowed keys of the row at hand */
    REF_ROW,  /* double [4][max_kv]: what is known of each of them */
    REF_D_K,  /* backward: gradient of the keys, as REF_K */
    REF_D_V,  /* backward: of the values, as REF_V */
    REF_BIAS, /* backward: double [max_kv or 1], a row of d_bias */
    REF_SINK, /* backward: double [heads_q], d_sink */
};

typedef struct attn_ref {
    const attn_problem *p;
    const attn_buffers *f;
    attn_dtype lse_dtype;  /* of lse, d_lse and probs */
    int32_t pad_qk, pad_v; /* distance of rows in k, d_k and in v, d_v */
    attn_philox dropout;   /* which are dropped */
    double keep;           /* what the others are multiplied with */
    double *k, *v, *d_k, *d_v;
    double *d_bias, *d_sink; /* as REF_BIAS and REF_SINK */

    /* Set by attn__ref_load. */
    attn_seq s;
    attn_mask mask;
    int32_t kv_head; /* -1: nothing is loaded */

    /* Set by attn__ref_scores: the n-th allowed key of the row is key[n], 0 <= n < count. */
    int32_t count;
    int32_t *key;
    double *score;          /* its s, with softcap, ALiBi and bias */
    double *slope;          /* d s / d dot(q_i, k_j) */
    double q[ATTN_MAX_DIM]; /* the query row, rotated and descaled */

    /* Set by the backward, for the same row. */
    double *d_score;          /* gradient of score[n] */
    double *weight;           /* factor of the n-th key's value in o: its probability, with dropout */
    double d_sink_row;        /* gradient of the sink */
    double d_o[ATTN_MAX_DIM]; /* the row of d_o */
} attn_ref;

/* Makes the keys and values of KV head kv_head of sequence b the ones at hand. */
void attn__ref_load(attn_ref *r, int32_t b, int32_t kv_head);

/* The scores of row i of query head h, whose KV head is loaded. */
void attn__ref_scores(attn_ref *r, int32_t h, int32_t i);

/* n elements of a row in double, times factor, zero-filled to a multiple of REF_LANES. */
void attn__ref_row(attn_dtype dtype, const void *data, int64_t at, int32_t n, double factor, double *out);

void attn__ref_forward(attn_ref *r);
void attn__ref_backward(attn_ref *r);

static inline int32_t attn__ref_pad(int32_t n) { return (n + REF_LANES - 1) / REF_LANES * REF_LANES; }

/* Sum of a[x] * b[x]; the fixed number of partial sums is what lets a compiler use SIMD without changing the result. */
static inline double attn__ref_dot(const double *a, const double *b, int32_t padded) {
    double sum[REF_LANES] = {0}, total = 0;
    for (int32_t x = 0; x < padded; x += REF_LANES)
        for (int lane = 0; lane < REF_LANES; lane++) sum[lane] += a[x + lane] * b[x + lane];
    for (int lane = 0; lane < REF_LANES; lane++) total += sum[lane];
    return total;
}

static inline void attn__ref_add(double *restrict to, double factor, const double *restrict from, int32_t padded) {
    for (int32_t x = 0; x < padded; x++) to[x] += factor * from[x];
}

/* Is the pair (row i of head h, key j) of the sequence at hand dropped? */
static inline bool attn__ref_dropped(const attn_ref *r, int32_t h, int32_t i, int32_t j) {
    uint32_t batch_head = (uint32_t)r->s.b * (uint32_t)r->p->heads_q + (uint32_t)h;
    return r->dropout.threshold && attn__dropped(&r->dropout, batch_head, (uint32_t)i, (uint32_t)j);
}

#endif
