/*
 * What `attn bench` and `attn tune` measure with: random tensors of one shape, copies of them where the backend can read them,
 * and what is counted.
 */
#ifndef ATTN_WORKLOAD_H
#define ATTN_WORKLOAD_H

#include "device.h"

/* Where to measure. */
typedef struct place {
    attn_context *context;
    device *d;
} place;

/* TOOL_OK, or the exit code after a message that begins with `what`; close_place in either case. */
int open_place(place *at, const attn_config *config, const char *what);
void close_place(place *at);

/* ---- tensors ---- */

enum { T_Q, T_K, T_V, T_O, T_D_O, T_D_Q, T_D_K, T_D_V, T_LSE, TENSORS };

typedef struct tensors {
    void *memory[TENSORS];
    int64_t count[TENSORS];
    attn_dtype dtype[TENSORS];
    attn_buffers buffers;
} tensors;

/* Tensors of one shape, inputs filled. False: no memory, and free_data is wanted all the same. */
bool make_data(tensors *d, const attn_problem *p, uint64_t seed);
void free_data(tensors *d);

enum { MAX_COPIES = 8 };

/* The tensors where the backend can read them, as often as it takes to leave a GPU's cache. */
typedef struct copies {
    int count;
    mirror m[MAX_COPIES];
    attn_buffers buffers[MAX_COPIES];
    void *workspace;
} copies;

/* On the host there is one, the tensors themselves. NULL: a message was printed. */
copies *make_copies(const tensors *from, device *d, size_t workspace_bytes);
void free_copies(copies *c, device *d);

/* ---- numbers ---- */

/* Operations: 2 * (dim_qk + dim_v) for each allowed pair of a query and a key; backward 2.5 times that. */
double count_flops(const attn_problem *p);

/* How large the relative RMS of results against exact ones may be, whatever the shape. */
double accuracy_bar(const attn_problem *p, bool gpu);

/* Of so many numbers, which are sorted. */
double median(double *numbers, int count);

/* ---- overhead.c ---- */

/*
 * `attn bench --suite overhead`: what a first call and a small one cost besides the arithmetic. Medians of so many, at
 * most and by default 31. An exit code.
 */
int bench_overhead(const attn_config *config, int repeat, bool json);

#endif
