/*
 * `attn run`: attention of .npy files. Inputs are read once and results are computed where they are written from, so that its
 * memory is inputs, results and the library's workspace. A GPU has copies of the inputs and results.
 */
#include <stdlib.h>
#include <string.h>

#include "device.h"
#include "inputs.h"

typedef enum output { OUT_O, OUT_LSE, OUT_PROBS, OUT_D_Q, OUT_D_K, OUT_D_V, OUT_D_BIAS, OUT_D_SINK, OUTPUTS } output;

typedef struct run_settings {
    file_settings files;
    const char *out[OUTPUTS];  /* paths of results; o and lse are inputs of the backward pass */
    const char *k_out, *v_out; /* caches after an append */
    void *result[OUTPUTS];     /* memory of results */
    attn_problem problem;
    attn_buffers buffers;
} run_settings;

#define IN_AT(which) offsetof(run_settings, files.in.path[which])
#define OUT_AT(which) offsetof(run_settings, out[which])

static const option options_run[] = {
    {"op", "OP", "forward (default), backward or append", parse_op, offsetof(run_settings, files.common.problem.op), 0},
    {"out-dtype", "TYPE", "of o: f32, f16, bf16, f64; default: that of q", parse_dtype,
     offsetof(run_settings, files.common.problem.out_dtype), 0},
    {"d-o", "FILE", "backward: gradient of o", parse_text, IN_AT(IN_D_O), 0},
    {"d-lse", "FILE", "backward: gradient of lse", parse_text, IN_AT(IN_D_LSE), 0},
    {0},
};

static const option options_results[] = {
    {"o", "FILE", "output; backward: an input, made by forward if not given", parse_text, OUT_AT(OUT_O), 0},
    {"lse", "FILE", "log-sum-exp [batch][heads][rows], packed [heads][total]; likewise", parse_text, OUT_AT(OUT_LSE), 0},
    {"probs", "FILE", "probabilities [batch][heads][rows][keys], dropped ones negative", parse_text, OUT_AT(OUT_PROBS), 0},
    {"d-q", "FILE", "gradient of q", parse_text, OUT_AT(OUT_D_Q), 0},
    {"d-k", "FILE", "gradient of k", parse_text, OUT_AT(OUT_D_K), 0},
    {"d-v", "FILE", "gradient of v", parse_text, OUT_AT(OUT_D_V), 0},
    {"d-bias", "FILE", "gradient of bias, summed where it is broadcast", parse_text, OUT_AT(OUT_D_BIAS), 0},
    {"d-sink", "FILE", "gradient of sink", parse_text, OUT_AT(OUT_D_SINK), 0},
    {"k-out", "FILE", "the cache of keys after an append", parse_text, offsetof(run_settings, k_out), 0},
    {"v-out", "FILE", "the cache of values after an append", parse_text, offsetof(run_settings, v_out), 0},
    {0},
};

static const command run = {
    "run",
    "--q FILE --k FILE --v FILE --o FILE [OPTION]...",
    "Computes attention of arrays in .npy files. Tensors are f2, f4 or f8, bf16 as u2 with --bf16, fp8 as u1\n"
    "with --fp8, and for k and v i1. Other numbers are f4 or f8, integers i4 or i8.\n",
    "attn run --q q.npy --k k.npy --v v.npy --o o.npy --lse lse.npy --causal\n"
    "attn run --q q.npy --k k.npy --v v.npy --o o.npy --cu-q cu.npy --cu-kv cu.npy --window 255,0\n"
    "attn run --op backward --q q.npy --k k.npy --v v.npy --d-o do.npy --d-q dq.npy --d-k dk.npy --d-v dv.npy\n"
    "attn run --q q.npy --k cache_k.npy --v cache_v.npy --used-kv used.npy --page-table pages.npy --o o.npy\n"
    "attn run --op append --k ck.npy --v cv.npy --used-kv n.npy --k-new k.npy --v-new v.npy --k-out ck.npy --v-out "
    "cv.npy\n",
    {{"Tensors", options_tensors},
     {"Operation", options_run},
     {"Results", options_results},
     {"Mask and scores", options_problem},
     {"Lengths and FlashMask", options_lengths},
     {"KV cache", options_cache},
     {"Machine", options_machine},
     {0}},
};

/* Are the files there that the operation cannot do without? */
static int check_files(run_settings *s) {
    static const struct {
        attn_op op;
        input which;
        const char *option;
    } needed[] = {
        {ATTN_FORWARD, IN_Q, "--q"},           {ATTN_FORWARD, IN_K, "--k"},           {ATTN_FORWARD, IN_V, "--v"},
        {ATTN_BACKWARD, IN_Q, "--q"},          {ATTN_BACKWARD, IN_K, "--k"},          {ATTN_BACKWARD, IN_V, "--v"},
        {ATTN_BACKWARD, IN_D_O, "--d-o"},      {ATTN_KV_APPEND, IN_K, "--k"},         {ATTN_KV_APPEND, IN_V, "--v"},
        {ATTN_KV_APPEND, IN_K_NEW, "--k-new"}, {ATTN_KV_APPEND, IN_V_NEW, "--v-new"},
    };
    attn_op op = s->files.common.problem.op;
    inputs *in = &s->files.in;
    for (size_t i = 0; i < sizeof needed / sizeof *needed; i++)
        if (needed[i].op == op && !in->path[needed[i].which])
            return tool_error(TOOL_USAGE, "run: %s is wanted for --op %s", needed[i].option, op_name(op));
    if (op == ATTN_BACKWARD) {
        in->path[IN_O] = s->out[OUT_O];
        in->path[IN_LSE] = s->out[OUT_LSE];
        if (!in->path[IN_O] != !in->path[IN_LSE])
            return tool_error(TOOL_USAGE, "run: --o and --lse go together in --op backward: both, or neither");
    }
    bool backward = op == ATTN_BACKWARD, any = s->k_out || s->v_out;
    for (output i = 0; i < OUTPUTS; i++) {
        bool gradient = i >= OUT_D_Q, is_input = backward && i <= OUT_LSE;
        if (s->out[i] && !is_input && (gradient != backward || op == ATTN_KV_APPEND))
            return tool_error(TOOL_USAGE, "run: %s is no result of --op %s", s->out[i], op_name(op));
        any |= s->out[i] && !is_input;
    }
    if ((s->k_out || s->v_out) && !in->path[IN_K_NEW])
        return tool_error(TOOL_USAGE, "run: --k-out and --v-out are for appends, with --k-new and --v-new");
    return any ? TOOL_OK : tool_error(TOOL_USAGE, "run: nothing to write; name a file for a result");
}

/* The shape and element type of a result. */
static int result_shape(const run_settings *s, output which, int64_t dims[4], npy_dtype *dtype) {
    const attn_problem *p = &s->problem;
    const inputs *in = &s->files.in;
    attn_dtype kv = p->kv_dtype ? p->kv_dtype : p->dtype, wide = p->dtype == ATTN_F64 ? ATTN_F64 : ATTN_F32;
    bool fp8 = p->dtype == ATTN_E4M3 || p->dtype == ATTN_E5M2;
    attn_dtype out = p->out_dtype ? p->out_dtype : fp8 ? ATTN_BF16 : p->dtype;
    const int64_t full[4] = {p->batch, p->heads_q, p->max_q, p->max_kv};
    switch (which) {
    case OUT_O: *dtype = inputs_npy_dtype(out); return inputs_shape(in, IN_O, p, dims);
    case OUT_LSE: *dtype = inputs_npy_dtype(wide); return inputs_shape(in, IN_LSE, p, dims);
    case OUT_D_Q: *dtype = inputs_npy_dtype(p->dtype); return inputs_shape(in, IN_Q, p, dims);
    case OUT_D_K: *dtype = inputs_npy_dtype(kv); return inputs_shape(in, IN_K, p, dims);
    case OUT_D_V: *dtype = inputs_npy_dtype(kv); return inputs_shape(in, IN_V, p, dims);
    case OUT_D_BIAS: *dtype = inputs_npy_dtype(p->bias_dtype); return inputs_shape(in, IN_BIAS, p, dims);
    case OUT_D_SINK: *dtype = NPY_F4; return inputs_shape(in, IN_SINK, p, dims);
    default:
        *dtype = inputs_npy_dtype(wide);
        memcpy(dims, full, sizeof full);
        return 4;
    }
}

/* Memory for one result, and its place in the buffers. */
static int allocate_result(run_settings *s, output which) {
    int64_t d[4] = {0}, count = 1;
    npy_dtype dtype;
    int ndim = result_shape(s, which, d, &dtype);
    for (int i = 0; i < ndim; i++)
        if (__builtin_mul_overflow(count, d[i], &count)) count = -1;
    void *data = s->result[which] = tool_alloc(count, npy_dtype_size(dtype));
    if (!data) return TOOL_RUNTIME;
    attn_buffers *f = &s->buffers;
    attn_tensor t = ndim == 4 ? attn_dense(data, d[1], d[2], d[3]) : attn_dense(data, 0, d[1], d[2]);
    attn_matrix m = {data, {d[1] * d[2] * d[3], d[2] * d[3], d[3], 1}};
    switch (which) {
    case OUT_O: f->o = t; break;
    case OUT_LSE: f->lse = data; break;
    case OUT_PROBS: f->probs = m; break;
    case OUT_D_Q: f->d_q = t; break;
    case OUT_D_K: f->d_k = t; break;
    case OUT_D_V: f->d_v = t; break;
    case OUT_D_BIAS:
        f->d_bias = f->bias; /* the same broadcast */
        f->d_bias.data = data;
        break;
    default: f->d_sink = data; break;
    }
    return TOOL_OK;
}

static int allocate_results(run_settings *s) {
    attn_op op = s->problem.op;
    if (s->out[OUT_D_BIAS] && !s->files.in.path[IN_BIAS]) return tool_error(TOOL_USAGE, "run: --d-bias wants --bias");
    if (s->out[OUT_D_SINK] && !s->files.in.path[IN_SINK]) return tool_error(TOOL_USAGE, "run: --d-sink wants --sink");
    for (output i = 0; i < OUTPUTS; i++) {
        bool computed = i <= OUT_LSE && op == ATTN_BACKWARD && !s->files.in.path[IN_O];
        bool wanted = i <= OUT_LSE && op == ATTN_BACKWARD ? computed : s->out[i] || (i == OUT_O && op == ATTN_FORWARD);
        int code = wanted ? allocate_result(s, i) : TOOL_OK;
        if (code != TOOL_OK) return code;
    }
    return TOOL_OK;
}

/* The forward pass that a backward pass without --o and --lse starts from. */
static attn_status forward_first(attn_context *context, const run_settings *s, const attn_buffers *buffers, void *stream) {
    attn_problem p = s->problem;
    attn_buffers f = *buffers;
    p.op = ATTN_FORWARD;
    f.d_o = f.d_q = f.d_k = f.d_v = (attn_tensor){0};
    f.d_bias = (attn_matrix){0};
    f.d_lse = NULL;
    f.d_sink = NULL;
    return attn_forward(context, &p, &f, stream);
}

static attn_status compute(attn_context *context, const run_settings *s, const attn_buffers *f, void *stream) {
    switch (s->problem.op) {
    case ATTN_FORWARD: return attn_forward(context, &s->problem, f, stream);
    case ATTN_KV_APPEND: return attn_kv_append(context, &s->problem, f, stream);
    default: break;
    }
    attn_status status = s->result[OUT_O] ? forward_first(context, s, f, stream) : ATTN_OK;
    return status == ATTN_OK ? attn_backward(context, &s->problem, f, stream) : status;
}

/* Bytes of a result. */
static size_t result_bytes(const run_settings *s, output which) {
    int64_t d[4], count = 1;
    npy_dtype dtype;
    int ndim = result_shape(s, which, d, &dtype);
    for (int i = 0; i < ndim; i++) count *= d[i];
    return (size_t)count * npy_dtype_size(dtype);
}

static bool mirror_files(mirror *m, const run_settings *s) {
    bool added = true;
    for (input i = 0; i < INPUTS && added; i++) {
        const npy_array *a = &s->files.in.array[i];
        if (a->data)
            added = mirror_add(m, "input", a->data, (size_t)a->header.count * npy_dtype_size(a->header.dtype), 0, 0);
    }
    for (output i = 0; i < OUTPUTS && added; i++)
        if (s->result[i]) added = mirror_add(m, "result", s->result[i], result_bytes(s, i), 0, 0);
    return added && mirror_upload(m);
}

/* Computes on the memory of the context's device; results and caches end up on the host. */
static int compute_there(attn_context *context, const run_settings *s) {
    mirror m = {.d = device_open(context, false)};
    if (!m.d) return TOOL_RUNTIME;
    int code = mirror_files(&m, s) ? TOOL_OK : TOOL_RUNTIME;
    if (code == TOOL_OK) {
        attn_buffers f = mirror_buffers(&m, &s->buffers);
        attn_status status = compute(context, s, &f, device_stream(m.d, 0));
        bool works = device_wait(m.d) && mirror_download(&m);
        if (status == ATTN_OK && works) status = attn_device_status(context);
        code = status != ATTN_OK ? tool_status("run", status) : works ? TOOL_OK : TOOL_RUNTIME;
    }
    mirror_free(&m);
    device_close(m.d);
    return code;
}

static int write_one(const char *path, npy_dtype dtype, int ndim, const int64_t *dims, const void *data) {
    char error[NPY_ERROR_SIZE];
    npy_status status = npy_write(path, dtype, ndim, dims, data, error, sizeof error);
    return status == NPY_OK ? TOOL_OK : tool_error(status == NPY_BAD ? TOOL_USAGE : TOOL_RUNTIME, "%s", error);
}

static int write_results(run_settings *s) {
    int64_t dims[4];
    npy_dtype dtype;
    int code = TOOL_OK;
    for (output i = 0; i < OUTPUTS && code == TOOL_OK; i++) {
        if (!s->result[i] || !s->out[i]) continue;
        int ndim = result_shape(s, i, dims, &dtype);
        code = write_one(s->out[i], dtype, ndim, dims, s->result[i]);
    }
    const char *const cache_paths[2] = {s->k_out, s->v_out};
    for (int i = 0; i < 2 && code == TOOL_OK; i++) {
        const npy_array *cache = &s->files.in.array[i ? IN_V : IN_K];
        const npy_header *h = &cache->header;
        if (cache_paths[i]) code = write_one(cache_paths[i], h->dtype, h->ndim, h->shape, cache->data);
    }
    return code;
}

static int run_files(run_settings *s) {
    s->buffers.size = sizeof s->buffers;
    s->buffers.seed = s->files.common.seed;
    s->buffers.offset = s->files.common.offset;
    s->problem = s->files.common.problem;
    int code = inputs_load(&s->files.in, &s->problem, &s->buffers);
    if (code == TOOL_OK) code = allocate_results(s);
    if (code != TOOL_OK) return code;
    attn_context *context;
    attn_status status = attn_context_create(&context, &s->files.common.config);
    code = status == ATTN_OK ? compute_there(context, s) : tool_status("run", status);
    attn_context_destroy(context);
    return code == TOOL_OK ? write_results(s) : code;
}

int cmd_run(int argc, char **argv) {
    run_settings s = {0};
    int code = options_parse(&run, &s, argc, argv);
    if (code != OPTIONS_GO) return code;
    code = check_files(&s);
    if (code == TOOL_OK) code = run_files(&s);
    inputs_free(&s.files.in);
    for (int i = 0; i < OUTPUTS; i++) free(s.result[i]);
    return code;
}
