/*
 * libattn: exact attention at hardware speed, from C.
 *
 * This header is the manual. Four words carry the whole interface:
 *
 *   problem   WHAT is to be computed: sizes, dtypes, mask kind, options. It holds no pointers.
 *   buffers   WHICH memory: tensors with strides, lengths, page table, workspace.
 *   plan      HOW it will be computed: the chosen kernel, its tiles and splits. Immutable, shared by threads.
 *   kernel    one row of one table: name, operation, dtype, tile sizes, what it needs of the machine.
 *
 * The shortest use is attn_forward(context, &problem, &buffers, NULL), which keeps its plans and its workspace inside the
 * context. Who wants to control both calls attn_plan_create once, asks attn_plan_workspace for a size, and calls attn_run
 * as often as needed: attn_run never allocates.
 *
 * What is computed, for query row i of sq and key column j of sk, with o = sk - sq (the last query sees the last key):
 *
 *    1. s = scale * dot(q_i, k_j)
 *    2. softcap c > 0:  s = c * tanh(s / c)
 *    3. ALiBi:          s = s - slope_h * |i + o - j|
 *    4. bias:           s = s + bias[b][h][i][j]
 *    5. allowed(i, j):  inside the sequence; causal: j <= i + o; window: i + o - left <= j <= i + o + right; FlashMask.
 *                       A pair that is not allowed has probability zero, whatever its memory holds.
 *    6. p_j = exp(s_j - lse), lse = log(sum_j exp(s_j) + exp(sink_h)), sums over the allowed j, the sink term if there is one
 *    7. lse is an output, natural logarithm, and may receive a gradient (d_lse)
 *    8. dropout: p_j is dropped by a pure function of (seed, offset, b, h, i, j); kept ones are scaled by 1 / (1 - dropout)
 *    9. query head h reads KV head h / (heads_q / heads_kv)
 *       o_i = sum_j p_j v_j
 *
 * What is promised:
 *
 *   C1  A row with no allowed key, or whose scores are all -inf, gives o = 0, lse = -inf and exactly zero gradients, with a
 *       sink too. Never NaN, unless an allowed input is NaN.
 *   C2  Results are bitwise independent of masked, padded or unused memory, NaN there included.
 *   C3  A bad argument returns an error that names the field, its value and what would do, before anything is written.
 *   C4  Every output element is written: padding rows of o with 0, of lse with -inf, of gradients with 0.
 *   C5  The same call gives the same bits, run after run, whatever else is in the batch, however the cache is paged, and
 *       however many threads there are.
 *   C6  Extra memory is O(sq + sk): nothing of size sq x sk is ever stored, except where you ask for it (probs, d_bias).
 *
 * F32 is computed in float; with ATTN_PRECISE all of it in double. With ATTN_PRECISE_FEW, on a CPU, sequences of at most 4 query rows (decoding) are
 * computed in double, and a row whose largest p is more than a 16th of their sum, and d_v of keys of which one row has more than an 8th of all p, once
 * more in double, as float would be less exact for them than for others; the backward takes lse for more exact than it can be stored. How long
 * a call takes depends on the data then.
 *
 * A known fault of backend cuda, but for F64 and ATTN_PRECISE: a score below about -2.3e38 is -inf there (with a bias of -FLT_MAX for all keys of a
 * row o is 0, and not the mean of v), and a dot product past the largest float is infinite, whatever the scale makes of it.
 *
 * Strides are counted in elements. A struct that you fill in begins with its size, so that it can grow: set it to sizeof, zero
 * the rest (a zero field is a default), then fill in what you need. Thread safety: one context and one plan may be used from
 * many threads at once, each call with buffers and workspace of its own. 64-bit machines only.
 */
#ifndef ATTN_H
#define ATTN_H

#include <stddef.h>
#include <stdint.h>

#define ATTN_VERSION_MAJOR 0
#define ATTN_VERSION_MINOR 1
#define ATTN_VERSION_PATCH 0
#define ATTN_VERSION (ATTN_VERSION_MAJOR * 10000 + ATTN_VERSION_MINOR * 100 + ATTN_VERSION_PATCH)

#if defined(_WIN32)
#define ATTN_API
#else
#define ATTN_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- status ------------------------------------------------------------------------------------------------------- */

typedef enum attn_status {
    ATTN_OK = 0,
    ATTN_INVALID = 1,     /* a bad argument; nothing was written */
    ATTN_UNSUPPORTED = 2, /* a legal request that this backend or build does not serve; nothing was written */
    ATTN_NO_MEMORY = 3,   /* the allocator returned NULL */
    ATTN_SYSTEM = 4,      /* the operating system refused something, such as a thread */
    ATTN_DEVICE = 5       /* a GPU or its driver failed */
} attn_status;

/* "ATTN_OK", "ATTN_INVALID", ...; "unknown status" for anything else. Never NULL. */
ATTN_API const char *attn_status_name(attn_status status);

/* What went wrong in the last failing call of this thread: field, value, what would do. Never NULL; "" before any error. */
ATTN_API const char *attn_error_detail(void);

/* ATTN_VERSION of the library that is loaded, as opposed to that of the header. */
ATTN_API int attn_version(void);

/* ---- context ------------------------------------------------------------------------------------------------------ */

typedef enum attn_backend_id {
    ATTN_BACKEND_AUTO = 0, /* the fastest for data in host memory: cpu */
    ATTN_BACKEND_REF = 1,  /* the naive algorithm in double, one thread: the oracle of every test */
    ATTN_BACKEND_CPU = 2,  /* tiles, threads, SIMD */
    ATTN_BACKEND_CUDA = 3  /* NVIDIA GPUs from sm_80 on; data in their memory */
} attn_backend_id;

/*
 * The cuda backend. The library loads the CUDA driver (libcuda.so.1, for CUDA 12.0 or newer; ATTN_CUDA_DRIVER may name another
 * file by its absolute path) when its first context is made, and links nothing. A context serves all GPUs of the process: a call
 * runs on the device of its tensors, which must all be of that one device, or pinned or managed host memory; anything else is
 * refused by name before the call does anything. `stream` is a CUstream, or NULL for the default stream; the CUDA context is the
 * stream's, for NULL the one that is current, if it belongs to the device, and otherwise the device's primary context.
 *
 * attn_plan_create loads the kernels. attn_run neither allocates nor waits nor reads device memory, so it can be captured into a
 * CUDA graph, and lengths may change between replays; make the plan while a CUDA context of the device is current, so that the
 * kernels are there when the capture begins. attn_merge and attn_rotary load theirs in their first call. A workspace is device
 * memory; the one-shot calls take it from the stream (cuMemAllocAsync) and give it back to the stream.
 *
 * The environment's ATTN_TUNING may name, by its absolute path, a tuning file that `attn tune --write` made: a context reads it
 * when it is made, and its plans then take the kernels that were the fastest on that kind of GPU. Results keep their bits, as a
 * file can only choose among kernels with the same tiles of keys; attn_plan_describe says "tuned: FILE". A bad file is an error
 * that names the file and the line.
 *
 * From compute capability 9.0 on, kernels for few rows may begin while the kernel before them in the stream ends (programmatic
 * dependent launch); they read and write nothing before it has. That counts on it that such a kernel, if it is launched so itself,
 * waits for those before it; ATTN_CUDA_SERIAL=1 in the environment, when a context is made, leaves it off.
 *
 * Calls return when the work is queued. What a kernel meets (a fault of the device) shows in a later call as ATTN_DEVICE; see
 * attn_device_status for values out of range. After fork a child cannot use CUDA.
 */

typedef struct attn_context attn_context; /* backend, threads, plan cache */

/*
 * How a context gets memory and threads; zero fields mean malloc/free and the library's own thread pool.
 *
 * `parallel_for` calls body(body_arg, index) once for each index in [0, count), in any order, on any threads, one after the
 * other or all at once, and returns 0 when all of them have returned. count is at most `threads`. Any other return value
 * means that it could not; the call into the library then fails with ATTN_SYSTEM.
 */
typedef struct attn_config {
    size_t size;             /* sizeof(attn_config) */
    attn_backend_id backend; /* which backend */
    int32_t threads;         /* 0: the environment's ATTN_NUM_THREADS, else every CPU this process may use */
    void *(*alloc)(void *user,
                   size_t bytes);           /* alignment as malloc's; NULL means failure; both alloc and free, or neither */
    void (*free)(void *user, void *memory); /* never called with NULL */
    void *alloc_user;                       /* first argument of both */
    int (*parallel_for)(void *user, void (*body)(void *body_arg, int32_t index), void *body_arg, int32_t count);
    void *parallel_user; /* first argument of parallel_for */
} attn_config;

/* config may be NULL: every default. On failure *context is NULL. Starts the pool's threads. */
ATTN_API attn_status attn_context_create(attn_context **context, const attn_config *config);

/* Frees the context and its cached plans. Plans made by attn_plan_create must be destroyed first. NULL is ignored. */
ATTN_API void attn_context_destroy(attn_context *context);

/* "ref", "cpu" or "cuda", and the number of threads in use. */
ATTN_API const char *attn_context_backend(const attn_context *context);
ATTN_API int32_t attn_context_threads(const attn_context *context);

/*
 * Lengths, page numbers and slots of the cuda backend are read on the device, where nobody can refuse them before the run: a
 * value out of range is brought into range, and a sticky word says so. New keys whose slot, own page, used_kv, cu_kv or cu_new
 * is out of range, and those that the cache has no room for, are written nowhere. This reads the word and clears it:
 * ATTN_INVALID, and which array and sequence it was last. It does not wait for the device: call it when the stream has been
 * synchronised. Other backends check before they run, and so it is always ATTN_OK with them.
 */
ATTN_API attn_status attn_device_status(attn_context *context);

/* ---- problem ------------------------------------------------------------------------------------------------------ */

typedef enum attn_op {
    ATTN_FORWARD = 0,  /* o, lse and, if asked for, probs */
    ATTN_BACKWARD = 1, /* d_q, d_k, d_v and, if asked for, d_bias and d_sink, from q, k, v, o, lse and d_o */
    ATTN_KV_APPEND = 2 /* writes k_new and v_new into the cache (rotated if asked for) and computes no attention */
} attn_op;

typedef enum attn_dtype {
    ATTN_DTYPE_DEFAULT = 0, /* see the field */
    ATTN_F32 = 1,
    ATTN_F16 = 2,
    ATTN_BF16 =
        3, /* CPUs with AMX, AVX-512 BF16 or BFMMLA multiply by it: subnormal numbers (below 2^-126) count as 0, p is rounded */
    ATTN_F64 = 4,
    ATTN_E4M3 = 5, /* fp8, 4 exponent bits, no infinities ("fn"); inputs only */
    ATTN_E5M2 = 6, /* fp8, 5 exponent bits; inputs only */
    ATTN_I8 = 7    /* signed 8-bit integers times k_descale, v_descale; kv_dtype only */
} attn_dtype;

/* attn_problem.flags. A flag whose comment names buffers requires them, and without the flag those must be NULL. */
#define ATTN_CAUSAL (UINT32_C(1) << 0)       /* j <= i + sk - sq */
#define ATTN_WINDOW (UINT32_C(1) << 1)       /* window_left and window_right count; without it they must be 0 */
#define ATTN_SCALE (UINT32_C(1) << 2)        /* scale counts, even if 0; without it scale must be 0 and is 1/sqrt(dim_qk) */
#define ATTN_ALIBI (UINT32_C(1) << 3)        /* buffers alibi */
#define ATTN_BIAS (UINT32_C(1) << 4)         /* buffers bias; d_bias may be given too */
#define ATTN_SINK (UINT32_C(1) << 5)         /* buffers sink; d_sink may be given too */
#define ATTN_VARLEN_Q (UINT32_C(1) << 6)     /* q, o and their gradients are packed: buffers cu_q; problem total_q */
#define ATTN_VARLEN_KV (UINT32_C(1) << 7)    /* k, v and their gradients are packed: buffers cu_kv; problem total_kv */
#define ATTN_USED_Q (UINT32_C(1) << 8)       /* buffers used_q */
#define ATTN_USED_KV (UINT32_C(1) << 9)      /* buffers used_kv */
#define ATTN_LEFTPAD (UINT32_C(1) << 10)     /* buffers leftpad */
#define ATTN_BATCH_INDEX (UINT32_C(1) << 11) /* buffers batch_index; forward and append only */
#define ATTN_APPEND (UINT32_C(1) << 12)      /* forward: append k_new, v_new before attention; needs ATTN_USED_KV */
#define ATTN_VARLEN_NEW (UINT32_C(1) << 13)  /* k_new, v_new are packed: buffers cu_new; problem total_new */
#define ATTN_ROTARY (UINT32_C(1) << 14)      /* with an append: rotate q and k_new; buffers rotary_cos, rotary_sin */
#define ATTN_ROTARY_INTERLEAVED (UINT32_C(1) << 15) /* pairs (0,1), (2,3), ...; without it (0,d/2), (1,d/2+1), ... */
#define ATTN_ROTARY_POS (UINT32_C(1) << 16)         /* buffers rotary_pos; without it positions start at used_kv */
#define ATTN_DESCALE (UINT32_C(1) << 17)            /* buffers q_descale, k_descale, v_descale, at least one of them */
#define ATTN_PRECISE (UINT32_C(1) << 18)            /* F32 and F64: all arithmetic in double, results rounded once */
#define ATTN_UNORDERED                                                                                                     \
    (UINT32_C(1) << 19) /* backward: d_q may be summed in any order, without C5; cuda on Hopper does, if max_kv is large */
#define ATTN_PRECISE_FEW                                                                                                   \
    (UINT32_C(1) << 20) /* F32, cpu: what weighs few keys in double, see above; the others take no notice */
#define ATTN_DESCALE_PAGES (UINT32_C(1) << 21) /* k_descale, v_descale have numbers for pages; wants ATTN_DESCALE, pages */

/*
 * Limits: batch >= 0; heads_q a multiple of heads_kv; 1 <= dim_qk, dim_v <= 576; max_q, max_kv <= 2^30. batch, max_q and
 * max_kv may be 0. A plan made for one problem serves every call with these maxima: actual lengths are in the buffers.
 */
typedef struct attn_problem {
    size_t size;           /* sizeof(attn_problem) */
    attn_op op;            /* what to compute */
    attn_dtype dtype;      /* of q, d_q, k_new, v_new; must be set; not I8 */
    attn_dtype kv_dtype;   /* of k, v, d_k, d_v; default dtype. F64 goes with F64 only */
    attn_dtype out_dtype;  /* of o, d_o: F32, F16, BF16, F64; default dtype, or BF16 when that is fp8. F64 with F64 only */
    attn_dtype bias_dtype; /* of bias, d_bias: F32, F16, BF16, F64; default: dtype, or F32 when that is fp8 */
    attn_dtype rotary_dtype;   /* of rotary_cos, rotary_sin: F32, F16, BF16, F64; default: dtype, or F32 when that is fp8 */
    uint32_t flags;            /* ATTN_CAUSAL | ... */
    int32_t batch;             /* sequences */
    int32_t heads_q;           /* query heads */
    int32_t heads_kv;          /* KV heads; divides heads_q */
    int32_t dim_qk;            /* head dim of q and k */
    int32_t dim_v;             /* head dim of v and o; 0: dim_qk */
    int32_t max_q;             /* most query rows of a sequence; without ATTN_VARLEN_Q, the rows of q */
    int32_t max_kv;            /* most keys of a sequence, leftpad and appended ones included; contiguous: the rows of k */
    int64_t total_q;           /* ATTN_VARLEN_Q: rows of the packed q */
    int64_t total_kv;          /* ATTN_VARLEN_KV: rows of the packed k */
    int32_t window_left;       /* ATTN_WINDOW: keys visible before the diagonal; -1: all */
    int32_t window_right;      /* ATTN_WINDOW: keys visible after the diagonal; -1: all */
    int32_t flashmask_vectors; /* 0: no FlashMask. With ATTN_CAUSAL 1 or 2, without it 2 or 4: buffers flashmask */
    int32_t flashmask_heads;   /* heads of flashmask: 1 or heads_kv; 0: 1 */
    int32_t page_size;         /* rows of a page; 0: the cache is contiguous. Forward and append only: buffers page_table */
    int32_t num_pages;         /* page_size > 0: pages in k and v */
    int32_t cache_batch;       /* ATTN_BATCH_INDEX: slots in the cache; otherwise 0 */
    int32_t max_new;           /* append: rows of k_new, or with ATTN_VARLEN_NEW the most of a sequence */
    int64_t total_new;         /* ATTN_VARLEN_NEW: rows of the packed k_new */
    int32_t rotary_dim;        /* ATTN_ROTARY: how many of the dims are rotated; even, at most dim_qk */
    int32_t rotary_len;        /* ATTN_ROTARY: rows of rotary_cos */
    double scale;              /* ATTN_SCALE: any number from -1e30 to 1e30 */
    double softcap;            /* 0: none; otherwise 1e-30 to 1e30 */
    double dropout;            /* probability of dropping, 0 <= dropout < 1; rounded to a multiple of 2^-15 */
} attn_problem;

/* ---- buffers ------------------------------------------------------------------------------------------------------ */

/*
 * Element [b][row][head][x] is at data + b*stride[0] + row*stride[1] + head*stride[2] + x. A packed tensor has no batch:
 * stride[0] is ignored. For paged k and v, stride[0] is the distance of pages. Tensors that are read may have zero
 * (broadcast) and negative strides; tensors that are written may overlap neither themselves nor others where nothing else is
 * said; v may be the beginning of the rows of k, as in latent attention: the same data and strides, and a smaller dim.
 * data is aligned to its dtype.
 */
typedef struct attn_tensor {
    void *data;
    int64_t stride[3]; /* batch (or page), row, head; the last dim is contiguous */
} attn_tensor;

/* Element [b][h][i][j] is at data + b*stride[0] + h*stride[1] + i*stride[2] + j*stride[3]; i and j count in the sequence. */
typedef struct attn_matrix {
    void *data;
    int64_t stride[4];
} attn_matrix;

/* Strides of a dense [batch][rows][heads][dim] tensor. */
static inline attn_tensor attn_dense(void *data, int64_t rows, int64_t heads, int64_t dim) {
    attn_tensor t;
    t.data = data;
    t.stride[0] = rows * heads * dim;
    t.stride[1] = heads * dim;
    t.stride[2] = dim;
    return t;
}

/*
 * Lengths. Sequence b has sq query rows and sk keys:
 *   sq = used_q[b], else cu_q[b+1] - cu_q[b], else max_q. Rows from sq on are padding.
 *   capacity = cu_kv[b+1] - cu_kv[b], else max_kv; n = used_kv[b] + appended, else capacity.
 *   Keys are the cache positions leftpad[b] <= t < n; sk = n - leftpad[b], and key j is at position leftpad[b] + j.
 * In the cache, sequence b lives in slot batch_index[b], else b: that is the batch index of a contiguous cache, or the row of
 * the page table. batch_index is not for packed KV. An append writes to the positions used_kv[b], used_kv[b] + 1, ...
 * What one sequence appends, no other one of the call may write or read.
 *
 * Rotary: k_new row r is rotated for position pos + r, q row i for position pos + i when causal or window is set and for pos
 * otherwise, where pos is rotary_pos[b], else used_kv[b]. Values are rotated in float32 (F64: in double) and rounded once:
 * q to dtype, keys to the kv_dtype of the cache, which holds them rotated. q itself is not changed.
 *
 * When kv_dtype differs from dtype, k_new and v_new are converted: divided by k_descale, v_descale and rounded to nearest,
 * saturating for E4M3, E5M2 and I8; when the dtypes are equal the descale cancels and the numbers are stored as they are.
 *
 * Backward: p comes from the lse that is given and delta from the given o, so they may belong to a softmax over more keys than
 * are here (ring attention); an lse of -inf is what marks a row without keys. On a CPU an lse of F32 that the keys here make by themselves is
 * taken to be theirs, not rounded: with ATTN_PRECISE or ATTN_PRECISE_FEW to within its last digit, with AMX, of F16 too, beyond 1024, to within 2^-20 of it, as
 * forward and backward may round scores differently. So a part of a softmax of which the other keys add no more than that to lse counts as the
 * whole: by one digit p are up to e^(|lse| 2^-23) times as large, by 2^-20 e^(|lse| 2^-20) times.
 *
 * FlashMask: for key j of sequence b, masked query rows are half-open intervals of flashmask[b][head][j][...]:
 *   causal, 1 vector:   rows >= v0                       full, 2 vectors: rows >= v0, or rows < v1
 *   causal, 2 vectors:  v0 <= rows < v1                  full, 4 vectors: v0 <= rows < v1, or v2 <= rows < v3
 */
typedef struct attn_buffers {
    size_t size;            /* sizeof(attn_buffers) */
    attn_tensor q;          /* [batch][max_q][heads_q][dim_qk], packed: [total_q][heads_q][dim_qk] */
    attn_tensor k;          /* [batch][max_kv][heads_kv][dim_qk], packed [total_kv]..., paged [num_pages][page_size]... */
    attn_tensor v;          /* the same with dim_v */
    attn_tensor o;          /* [batch][max_q][heads_q][dim_v] or packed; out of forward, into backward */
    void *lse;              /* [batch][heads_q][max_q], packed [heads_q][total_q]; float, F64: double. Forward: or NULL */
    attn_tensor d_o;        /* backward, in: as o */
    const void *d_lse;      /* backward, in: as lse; NULL: zero */
    attn_tensor d_q;        /* backward, out: as q; data may be NULL: not wanted (the same for d_k and d_v) */
    attn_tensor d_k;        /* backward, out: as k */
    attn_tensor d_v;        /* backward, out: as v */
    attn_matrix bias;       /* [batch][heads_q][max_q][max_kv], any stride may be 0 */
    attn_matrix d_bias;     /* backward, out or NULL: along a dim of stride 0, even of extent 0, one element, the sum */
    attn_matrix probs;      /* forward, out or NULL: [batch][heads_q][max_q][max_kv] floats (F64: doubles), p before
                                    dropout, with its sign bit set where it is dropped */
    const float *alibi;     /* slopes [heads_q], or [batch][heads_q] when alibi_stride is not 0 */
    int64_t alibi_stride;   /* distance of the batches of alibi */
    const float *sink;      /* [heads_q] */
    float *d_sink;          /* backward, out or NULL: [heads_q] */
    const int32_t *cu_q;    /* [batch + 1], ascending row offsets into the packed q */
    const int32_t *cu_kv;   /* [batch + 1] */
    const int32_t *used_q;  /* [batch] */
    const int32_t *used_kv; /* [batch]; before the append, where there is one; leftpad included */
    const int32_t *leftpad; /* [batch]: first cache position of each sequence */
    const int32_t *batch_index; /* [batch]: slot in the cache */
    const int32_t *page_table;  /* [slots][page_table_stride]: page of each page_size positions */
    int64_t page_table_stride;  /* entries in a row of page_table; 0: ceil(max_kv / page_size) */
    const int32_t *flashmask;   /* [batch][flashmask_heads][max_kv][flashmask_vectors] */
    attn_tensor k_new;          /* [batch][max_new][heads_kv][dim_qk], packed [total_new]... */
    attn_tensor v_new;          /* the same with dim_v */
    const int32_t *cu_new;      /* [batch + 1] */
    const void *rotary_cos;     /* [rotary_len][rotary_dim / 2] */
    const void *rotary_sin;     /* [rotary_len][rotary_dim / 2] */
    const int32_t *rotary_pos;  /* [batch] */
    const float *q_descale;     /* element [b*descale_stride[0] + kv_head*descale_stride[1]] multiplies q; NULL: 1 */
    const float *k_descale;     /* likewise k; ATTN_DESCALE_PAGES: b is the page */
    const float *v_descale;     /* likewise v */
    int64_t descale_stride[2];  /* batch or page, KV head, of all three; zeros: one number for the tensor */
    uint64_t seed;              /* dropout generator */
    uint64_t offset;            /* dropout generator */
    /*
     * attn_run: at least attn_plan_workspace() bytes, 64-byte aligned; contents do not matter. On a GPU clear it if lengths were changed
     * while a run used it.
     */
    void *workspace;
    size_t workspace_size; /* bytes */
} attn_buffers;

/* ---- plan and run ------------------------------------------------------------------------------------------------- */

typedef struct attn_plan attn_plan;

/* Checks the problem and chooses a kernel. On failure *plan is NULL. */
ATTN_API attn_status attn_plan_create(attn_plan **plan, attn_context *context, const attn_problem *problem);
ATTN_API void attn_plan_destroy(attn_plan *plan); /* NULL is ignored */

/*
 * Bytes of workspace that attn_run needs. Of a backward on a GPU: a float (F64 and ATTN_PRECISE: a double) for each row of lse, and at most d_q in float,
 * with dim_qk rounded up to 8 and, where rows are packed or max_q is no multiple of 16, up to 8 rows more for each sequence and head. Besides at most
 * 8 bytes for every 64 rows of a sequence and head, or a part of them (packed: 8 once more), 12 for each sequence and KV head, 32 for every 32 keys
 * of a head of FlashMask, and 256. docs/kernels/backward.md has the formula.
 */
ATTN_API size_t attn_plan_workspace(const attn_plan *plan);

/* The plan in words, one fact a line: backend, kernel, tiles, splits, workspace. Lives as long as the plan. */
ATTN_API const char *attn_plan_describe(const attn_plan *plan);

/* The name of the kernel row, "fwd_avx2_f32" for instance. Lives as long as the library. */
ATTN_API const char *attn_plan_kernel(const attn_plan *plan);

/* Runs the plan. Checks the buffers first. `stream` is a CUstream, or NULL, for the cuda backend and ignored by the others. */
ATTN_API attn_status attn_run(const attn_plan *plan, const attn_buffers *buffers, void *stream);

/*
 * The same in one call, with plans and workspace kept inside the context. A workspace in the buffers is used if it is large
 * enough and ignored otherwise. A few workspaces, the largest ones, wait in the context for the next call until it is destroyed.
 * attn_forward wants op ATTN_FORWARD and so on.
 */
ATTN_API attn_status attn_forward(attn_context *context, const attn_problem *problem, const attn_buffers *buffers,
                                  void *stream);
ATTN_API attn_status attn_backward(attn_context *context, const attn_problem *problem, const attn_buffers *buffers,
                                   void *stream);
ATTN_API attn_status attn_kv_append(attn_context *context, const attn_problem *problem, const attn_buffers *buffers,
                                    void *stream);

/* One tile of the score matrix, as attn_plan_tiles reports it. */
typedef struct attn_tile {
    int32_t row, rows;  /* query rows [row, row + rows) */
    int32_t col, cols;  /* keys [col, col + cols) */
    int32_t tile_class; /* 0: skipped (nothing allowed), 1: full (all allowed, no mask work), 2: partial */
    int32_t order;      /* place of its query tile in the work list, 0 first; tiles that are worked together share it */
    int32_t chunk;      /* KV chunk that it belongs to; all 0 where the rows are not split */
} attn_tile;

/*
 * Calls visit for every tile of one sequence and query head, in the order in which they are worked; skipped tiles too. A non-
 * zero return value of visit stops it. Forward plans of the cpu backend; others give ATTN_UNSUPPORTED. From the buffers
 * only lengths, page table and flashmask are read; tensors may be NULL, what flags announce may not.
 */
ATTN_API attn_status attn_plan_tiles(const attn_plan *plan, const attn_buffers *buffers, int32_t batch, int32_t head,
                                     int (*visit)(void *user, const attn_tile *tile), void *user);

/* ---- pieces ------------------------------------------------------------------------------------------------------- */

/*
 * Merges partial results of the same queries over disjoint sets of keys: lse = log(sum exp(lse_p)), o = sum exp(lse_p - lse)
 * o_p, in the order of the parts. A part with lse = -inf counts nothing, whatever its o holds. A sink belongs
 * into one of the parts only. Outputs may not overlap inputs.
 */
typedef struct attn_merge_args {
    size_t size;          /* sizeof(attn_merge_args) */
    attn_dtype dtype;     /* of the parts: F32, F16, BF16, F64 */
    attn_dtype out_dtype; /* of o; default dtype. F64 with F64 only */
    int32_t parts;        /* at least 1 */
    int32_t batch, rows, heads, dim;
    const attn_tensor *o_parts;   /* [parts] tensors, each [batch][rows][heads][dim] */
    const void *const *lse_parts; /* [parts] arrays, each [batch][heads][rows]; float, F64: double */
    attn_tensor o;                /* out */
    void *lse;                    /* out, or NULL */
} attn_merge_args;
ATTN_API attn_status attn_merge(attn_context *context, const attn_merge_args *args, void *stream);

/* Rotary embedding of x into y, which may be the same tensor. Dims from rotary_dim on are copied. */
typedef struct attn_rotary_args {
    size_t size;                     /* sizeof(attn_rotary_args) */
    attn_dtype dtype;                /* of x and y: F32, F16, BF16, F64 */
    attn_dtype rotary_dtype;         /* of cos and sin; default dtype */
    int32_t batch, rows, heads, dim; /* packed: rows is the most of a sequence */
    int32_t rotary_dim;              /* even, at most dim */
    int32_t rotary_len;              /* rows of cos and sin */
    int32_t interleaved;             /* 1: pairs (0,1), (2,3), ...; 0: halves */
    int32_t inverse;                 /* 1: rotate back (the gradient of a rotation) */
    attn_tensor x, y;                /* [batch][rows][heads][dim], packed [total][heads][dim] */
    const void *cos, *sin;           /* [rotary_len][rotary_dim / 2] */
    const int32_t *pos;              /* [batch]: position of row 0; NULL: 0 */
    const int32_t *cu;               /* [batch + 1]: the tensors are packed; NULL: they are not */
    int64_t total;                   /* with cu: rows of the packed tensors; rows that no sequence covers are left alone */
} attn_rotary_args;
ATTN_API attn_status attn_rotary(attn_context *context, const attn_rotary_args *args, void *stream);

/* ---- what is in this library -------------------------------------------------------------------------------------- */

typedef struct attn_kernel_info {
    const char *name;    /* fwd_avx2_f32 */
    const char *backend; /* cpu */
    const char *needs;   /* "AVX2, FMA", "" for nothing */
    attn_op op;
    int32_t rows, cols; /* tile of the score matrix; 0: none */
    int32_t available;  /* 1: this machine can run it */
} attn_kernel_info;

/*
 * Row `index` of the kernel table, into the first `size` (sizeof *info) bytes of *info; ATTN_INVALID past its end. Rows of the
 * cuda backend load and initialise the CUDA driver, to know whether they are available.
 */
ATTN_API attn_status attn_kernel_get(int32_t index, attn_kernel_info *info, size_t size);

/* "x86-64: SSE2 AVX2 FMA ..." of this machine; the same text for the life of the process. */
ATTN_API const char *attn_cpu_features(void);

/* "f32", "bf16", ...; bytes of an element. "unknown" and 0 for anything that is no dtype. */
ATTN_API const char *attn_dtype_name(attn_dtype dtype);
ATTN_API size_t attn_dtype_size(attn_dtype dtype);

#ifdef __cplusplus
}
#endif

#endif
