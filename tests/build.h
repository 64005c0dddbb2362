/*
 * Builders for the tests: a rig is a problem with buffers that fit it exactly, filled with random numbers.
 *
 *     rig r = {.p = problem(ATTN_F32, 2, 4, 2, 33, 65, 32), .backward = true};
 *     r.p.flags = ATTN_CAUSAL | ATTN_USED_KV;
 *     r.f.used_kv = (int32_t[]){65, 7};
 *     CHECK(rig_make(&r, 1));          allocates what the problem needs and the test has not set
 *     CHECK_OK(rig_run(&r, context));  forward, then backward
 *     rig_free(&r);
 *
 * Every block is allocated to the byte, so that AddressSanitizer sees the first step past its end. Outputs start out as a
 * pattern, so that an element that was not written shows.
 */
#ifndef BUILD_H
#define BUILD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "attn.h"

enum { RIG_BLOCKS = 48 };

typedef enum rig_kind {
    RIG_INPUT,  /* random, read by the library */
    RIG_OUTPUT, /* starts out as the pattern */
    RIG_CACHE   /* random, and written by an append: compared like an output */
} rig_kind;

typedef struct rig_block {
    void *data;
    size_t bytes;
    rig_kind kind;
} rig_block;

typedef struct rig {
    attn_problem p;       /* as the test wrote it */
    attn_buffers f;       /* all strides dense */
    bool backward;        /* rig_run goes on with the backward pass */
    bool probs;           /* allocate probs too */
    bool clean_workspace; /* workspace of zeros instead of NaNs */
    size_t limit;         /* most bytes that rig_make may allocate; 0: 256 MiB */
    struct load *beside;  /* a GPU's work that is begun right before a run of this (check.h); NULL: none */
    attn_problem full;    /* p with every default filled in; set by rig_make */
    uint64_t random;      /* state of the generator */
    int blocks;
    rig_block block[RIG_BLOCKS];
} rig;

/* A forward problem; the rest of the fields is zero. */
attn_problem problem(attn_dtype dtype, int32_t batch, int32_t heads_q, int32_t heads_kv, int32_t max_q, int32_t max_kv,
                     int32_t dim);

/* False, and nothing is held, when the problem is not legal or its buffers would go over the limit. */
bool rig_make(rig *r, uint64_t seed);
void rig_free(rig *r);

/* Memory that rig_free frees: `count` elements of a dtype, N(0,1) or the pattern. NULL at the limit. */
void *rig_tensor(rig *r, attn_dtype dtype, int64_t count, rig_kind kind);
int32_t *rig_ints(rig *r, int64_t count);

/* Writes the pattern over all outputs. */
void rig_reset(rig *r, unsigned char pattern);

/* Plan and run, with a workspace that is exactly as large as it must be; backward too where the rig says so. */
attn_status rig_run(rig *r, attn_context *context);

attn_status rig_run_op(const rig *r, attn_context *context, attn_op op, attn_buffers f);

/* The same by the one-shot calls. */
attn_status rig_call(rig *r, attn_context *context);

/*
 * ATTN_TEST_BACKEND=cuda in the environment: what each_cpu and each_host run goes to the GPU instead, on copies in its memory.
 * ATTN_TEST_BACKEND=copies: the same with the cpu backend, to see that the tests stand it.
 * ATTN_TEST_DTYPE=bf16: each_cpu goes through that dtype alone, where an emulated GPU takes its time.
 * ATTN_TEST_ISA=neon: the same of the instruction sets of cpu_isa, where an emulated CPU does.
 * ATTN_TEST_REPEAT=1000: c5_reruns_* run so often, on a GPU beside other work; c5_latent_caches_of_any_shape has so many shapes.
 */
bool on_host(void);
struct device *test_device(const attn_context *context); /* its memory, of device.h; NULL: cannot be had */

/* What forward and backward take of the buffers: gradients do not go into forward, probs not into backward. */
attn_buffers rig_forward_buffers(const rig *r);
attn_buffers rig_backward_buffers(const rig *r);

/* Copies rows, keys and bias of sequence `from_b` into sequence `to_b`, as many as both have; KV heads are repeated. */
void rig_copy(rig *to, int32_t to_b, const rig *from, int32_t from_b);

/* Are all outputs of two rigs of one shape the same bits? */
bool rig_same(const rig *a, const rig *b);

/* The first `rows` rows of o and lse, with backward of d_q, of a sequence each; and the first `keys` keys of d_k, d_v. */
bool rig_same_rows(const rig *a, int32_t a_b, const rig *b, int32_t b_b, int32_t rows);
bool rig_same_keys(const rig *a, int32_t a_b, const rig *b, int32_t b_b, int32_t keys);

/* Rows and keys of a sequence. */
int32_t rig_sq(const rig *r, int32_t b);
int32_t rig_sk(const rig *r, int32_t b);

/* Address of row i (cache position `at`) of sequence b in a tensor shaped like q (like k). */
void *rig_row(const rig *r, const attn_tensor *t, attn_dtype dtype, int32_t b, int32_t i, int32_t h);
void *rig_key(const rig *r, const attn_tensor *t, attn_dtype dtype, int32_t b, int32_t at, int32_t h);

/* o[b][i][h][x] and lse[b][h][i] as numbers. */
double rig_o(const rig *r, int32_t b, int32_t i, int32_t h, int32_t x);
double rig_lse(const rig *r, int32_t b, int32_t i, int32_t h);

/* Writes NaN over the dims of a row. */
void fill_nan(attn_dtype dtype, void *row, int32_t dim);

/* Random numbers: 64 bits, N(0,1) nearly, an integer in [low, high]. */
uint64_t random_bits(uint64_t *state);
double random_normal(uint64_t *state);
int32_t random_range(uint64_t *state, int32_t low, int32_t high);

/* A context of the backend with so many threads; NULL when it cannot be made. */
attn_context *make_context(attn_backend_id backend, int32_t threads);

/* The instruction sets of the cpu backend that this machine has: "c", "avx2", ...; NULL past the end. */
const char *cpu_isa(int index);

/* Holds plans of the cpu backend to one of them, from here on; NULL: to none. */
void use_isa(const char *isa);

/* use_isa, and a cpu context that is seen to obey. */
attn_context *make_cpu_context(const char *isa, int32_t threads);

/* Checks o, lse and, with backward, d_q, d_k, d_v of all sequences, as far as both have keys, element by element. */
void rig_check_close(const rig *a, const rig *b, double tolerance);

/* A rig of the same inputs, made with the same seed, run on ref. */
rig rig_reference(const rig *r, uint64_t seed);

/* Of one head: row i of d_o becomes 0 but for a 1 in column i, so that column i of d_v will be p of row i; and the sum of that over keys. */
void rig_one_hot(const rig *r);
double rig_sum_of_p(const rig *r, int32_t row);

/* Calls body for ref and cpu (or ATTN_TEST_BACKEND), in float with a tolerance of 2e-5 and in double with one of 1e-12. */
void each_host(void (*body)(attn_context *context, attn_dtype dtype, double tolerance));

/* Head dims for which GPUs have kernels of their own; on the host, whose kernels are those of all dims, one of them. 0: past the end. */
int32_t wide_dim(int index);

/* Calls body for every instruction set (or ATTN_TEST_BACKEND) and every float dtype, on two threads; a failure says which. */
void each_cpu(void (*body)(attn_context *context, attn_dtype dtype));

#endif
