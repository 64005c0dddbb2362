/*
 * From .npy files to problem and buffers, for `attn run` and `attn plan`.
 *
 * Every input has a shape of named sizes, [batch][max_q][heads_q][dim_qk] for instance. A size is fixed by the first file or
 * option that mentions it; whatever disagrees later is refused with both names.
 */
#ifndef ATTN_INPUTS_H
#define ATTN_INPUTS_H

#include "npy.h"
#include "tool.h"

typedef enum input {
    IN_Q,
    IN_K,
    IN_V,
    IN_O,
    IN_LSE,
    IN_D_O,
    IN_D_LSE,
    IN_BIAS,
    IN_ALIBI,
    IN_SINK,
    IN_CU_Q,
    IN_CU_KV,
    IN_USED_Q,
    IN_USED_KV,
    IN_LEFTPAD,
    IN_BATCH_INDEX,
    IN_PAGE_TABLE,
    IN_FLASHMASK,
    IN_K_NEW,
    IN_V_NEW,
    IN_CU_NEW,
    IN_ROTARY_COS,
    IN_ROTARY_SIN,
    IN_ROTARY_POS,
    IN_Q_DESCALE,
    IN_K_DESCALE,
    IN_V_DESCALE,
    INPUTS
} input;

/* Sizes that shapes are written in, one letter each in inputs.c. */
typedef struct named_size {
    int64_t value;
    const char *origin; /* the file or option that fixed it; NULL: not yet */
} named_size;

typedef struct inputs {
    const char *path[INPUTS]; /* NULL: not given */
    bool bf16;                /* u2 files hold bf16 */
    attn_dtype fp8;           /* what u1 files hold */
    int32_t page_size;        /* as an option: must agree with k */
    int32_t max_q, max_kv;    /* as options, where packing or paging hides them */
    npy_array array[INPUTS];  /* what was read */
    int64_t dims[INPUTS][4];  /* its shape, filled up with ones from the left where dims may be left out */
    named_size sizes['z' - 'A' + 1];
} inputs;

/* What the settings of a command that reads files begin with. */
typedef struct file_settings {
    settings common;
    inputs in;
} file_settings;

extern const option options_tensors[]; /* --q, --k, --v, ..., --bf16, --fp8: for file_settings */
extern const option options_lengths[]; /* --cu-q, ..., --flashmask */
extern const option options_cache[];   /* --page-table, --k-new, --rotary-cos, ... */

/* Fixes a size by hand. */
void inputs_fix(inputs *in, char letter, int64_t value, const char *origin);

/* Reads every file that has a path, and sets sizes, dtypes and pointers. An exit code; messages are printed. */
int inputs_load(inputs *in, attn_problem *problem, attn_buffers *buffers);
void inputs_free(inputs *in);

/* The shape of a file or of a result that is shaped like it; ndim. */
int inputs_shape(const inputs *in, input which, const attn_problem *problem, int64_t dims[4]);

/* The .npy type that holds elements of a dtype. */
npy_dtype inputs_npy_dtype(attn_dtype dtype);

#endif
