/*
 * The oracle of `attn check`, and the judgement of a result against it: per row, with bounds from an error analysis.
 */
#ifndef ATTN_COMPARE_H
#define ATTN_COMPARE_H

#include "cases.h"

/*
 * What `ref` says. Results are dense, whatever the strides of the case: rows counted through the tensor, [row][head][dim];
 * lse as in attn.h; matrices [batch][heads_q][max_q][max_kv]. An `_error` is how far a result computed in the case's own
 * precision may lie off before it is rounded to its dtype: one number for each row and head (lse, matrices: each element).
 */
typedef struct oracle {
    attn_problem problem; /* as ref gets it: in f64, after the append */
    attn_buffers buffers;
    void *memory[CASE_BLOCKS];         /* what buffers points to: a copy of each block */
    unsigned char *cache[CASE_BLOCKS]; /* what a cache must hold after the append, in its own dtype */
    double *q;                         /* rotated queries, dense; NULL: not rotated */
    double *o, *lse, *probs, *d_q, *d_k, *d_v, *d_bias, *d_sink;
    double *o_error, *lse_error, *probs_error, *d_q_error, *d_k_error, *d_v_error, *d_bias_error, *d_sink_error;
} oracle;

/* Runs ref; fills in o and lse of a backward case. On failure attn_error_detail says why. */
attn_status oracle_run(oracle *o, check_case *c, attn_context *ref);

/* How a kernel computes, as far as errors go. */
typedef struct arithmetic {
    bool tensor; /* products of matrices by tensor cores, whose sums are cut off instead of rounded */
    attn_dtype
        tile; /* what the operands of products are; probabilities are rounded to it. F32: three TF32 products. Default: the
                                    number type of the arithmetic */
    bool one_fit; /* backward: all d_s of a sequence and KV head have one factor */
} arithmetic;

/* From the names that attn_context_backend and attn_plan_kernel give. */
arithmetic arithmetic_of(const char *backend, const char *kernel);

/* Of a plan: sequences of few rows may have a kernel of their own. */
typedef struct ways {
    arithmetic many, few;
    int32_t few_rows; /* at most; 0: all are computed alike */
} ways;

/* Works out the bounds (bounds.c). False, with the reason, when the oracle's own result cannot be right. */
bool oracle_bound(oracle *o, const check_case *c, ways how, char *why, size_t size);

void oracle_free(oracle *o);

/* The rotary embedding by the letter of attn.h: in float32, or in double for F64. */
typedef struct rotation {
    attn_dtype dtype, table; /* of the row, of cos and sin */
    const void *cos, *sin;   /* [positions][dim / 2] */
    int32_t dim;             /* how many of the dims are rotated */
    bool neighbours;         /* pairs (0,1), (2,3), ...; otherwise halves */
    bool inverse;
} rotation;
void rotate_row(const rotation *r, double *x, int64_t at); /* the row for position `at` */

int64_t case_pairs(const check_case *c); /* elements of a dense matrix */

typedef struct verdict {
    bool failed;
    bool broken;            /* the device is of no use any more */
    double worst;           /* largest error that passed, in units of what is allowed */
    const char *worst_name; /* its tensor */
    char why[512];          /* the first failing tensor's worst element */
} verdict;

/* Notes a failure, unless there was one before. */
void verdict_fail(verdict *v, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Judges what a run has left in the case's outputs, and wipes them. */
void compare(verdict *v, check_case *c, const oracle *o);

#endif
