/*
 * What the files of this program share:
 *
 *   main.c        options, prompts, the loop, the figures
 *   model.c       the transformer: weights and everything but attention, on the CPU
 *   attention.c   the KV cache in pages, and attention through libattn, on the CPU or a GPU
 *   gpu.c         memory of a GPU, as much of the CUDA driver as that takes
 *   pool.c        threads, for the model and for libattn
 *   npz.c         weights from a file of numpy.savez
 */
#ifndef GENERATE_H
#define GENERATE_H

#include <attn.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Prints "generate: ..." to stderr; always false. */
__attribute__((format(printf, 1, 2))) bool fail(const char *format, ...);
double seconds(void);

/* ---- pool.c ---- */

typedef struct pool pool;

pool *pool_create(int threads); /* NULL: no threads to be had */
void pool_destroy(pool *p);     /* NULL is ignored */

/* body(arg, index) for each index in [0, count), on all threads; returns 0. What attn_config.parallel_for wants. */
int pool_run(void *pool, void (*body)(void *arg, int32_t index), void *arg, int32_t count);

/* ---- npz.c ---- */

typedef struct npz npz;

npz *npz_open(const char *path); /* NULL: not a file that can be read; it has been said why */
void npz_close(npz *file);       /* NULL is ignored */

/* Copies the array of that name, dtype ("<f4", "<i4") and shape, of 4-byte elements in C order. */
bool npz_read(const npz *file, const char *name, const char *dtype, int dims, const int64_t *sizes, void *to);

/* ---- model.c ---- */

typedef struct shape {
    int32_t vocab, width, layers, heads, heads_kv, dim, mlp; /* dim: of a head; mlp: width of the hidden layer */
} shape;

typedef struct model model;
typedef struct attention attention;

/* The weights come from the file, or are random when path is NULL; then *s says the sizes, otherwise it receives them. */
model *model_create(shape *s, const char *path, uint64_t seed, pool *threads, int thread_count);
void model_destroy(model *m);
int64_t model_weights(const model *m); /* how many numbers */

/*
 * One step: rows tokens, of several sequences one after the other, which attention_begin knows. last[b] is the row whose logits
 * are wanted for sequence b, or -1; logits [wanted][vocab], those that are wanted one after the other.
 */
bool model_step(model *m, attention *a, const int32_t *tokens, int32_t rows, const int32_t *last, int32_t batch,
                float *logits);

/* ---- attention.c ---- */

typedef struct attention_settings {
    attn_context *context;
    bool gpu;
    attn_dtype dtype; /* of q, k, v and the cache: F32 or BF16. o is F32 */
    int32_t batch;
    int32_t page;   /* rows of a page */
    int32_t chunk;  /* most rows of a sequence in a step of the prefill */
    int64_t rows;   /* most rows of all sequences in a step */
    int32_t tokens; /* most that a sequence will have */
} attention_settings;

typedef struct attention_times {
    double run, copy; /* seconds: in attn_run, until it has ended; converting and copying to the GPU and back */
} attention_times;

attention *attention_create(const attention_settings *settings, const shape *s);
void attention_destroy(attention *a);
const char *attention_kernel(const attention *a, bool decode);
attention_times attention_spent(attention *a); /* since it was asked last */

/* A step begins: count[b] new tokens for each sequence, all of them 1 where it is a decode. Takes pages for them. */
bool attention_begin(attention *a, bool decode, const int32_t *count);

/*
 * Rotates q and k, appends k and v to the cache of that layer and attends, all in one call of libattn. q, o: [rows][heads][dim];
 * k, v: [rows][heads_kv][dim].
 */
bool attention_layer(attention *a, int32_t layer, const float *q, const float *k, const float *v, float *o);
void attention_end(attention *a);

/* ---- gpu.c ---- */

bool gpu_open(void); /* the first one */
void gpu_close(void);
void *gpu_alloc(size_t bytes); /* NULL: it has been said why */
void gpu_free(void *memory);   /* NULL is ignored */
bool gpu_put(void *to, const void *from, size_t bytes);
bool gpu_get(void *to, const void *from, size_t bytes); /* when all work before it has ended */
bool gpu_wait(void);

#endif
