/*
 * What attn check does not look at, on the emulated GPU: that a sequence gives the same bits whether or not the plan may split it
 * (C5); merges of more parts than a launch takes; problems of more than a block takes at a time; and that values out of range in
 * device memory are brought into range and reported, and nothing past the end of an array is touched (C3).
 */
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/driver.h"
#include "numeric.h"

enum { MOST_ARRAYS = 64 };

static const attn_driver *driver;
static attn_context *context;
static attn_cu_pointer arrays[MOST_ARRAYS];
static int array_count, passed, failed;

static void must(int ok, const char *what) {
    if (ok) return;
    fprintf(stderr, "%s: %s\n", what, attn_error_detail());
    exit(1);
}

static void judge(int ok, const char *what) {
    passed += ok;
    failed += !ok;
    if (!ok) printf("FAILED: %s\n", what);
}

/* An array on the device: a copy, or zeros. */
static void *put(const void *from, size_t bytes) {
    attn_cu_pointer memory;
    must(array_count < MOST_ARRAYS && driver->cuMemAlloc(&memory, bytes ? bytes : 1) == 0, "cuMemAlloc");
    driver->cuMemsetD8(memory, 0, bytes ? bytes : 1);
    if (from) driver->cuMemcpyHtoD(memory, from, bytes);
    arrays[array_count++] = memory;
    return (void *)(uintptr_t)memory;
}

static void get(void *to, const void *from, size_t bytes) {
    driver->cuMemcpyDtoH(to, (attn_cu_pointer)(uintptr_t)from, bytes);
}

static void free_arrays(void) {
    while (array_count > 0) driver->cuMemFree(arrays[--array_count]);
}

/* ---- split or not ---- */

enum { ROWS = 3, HEADS = 4, DIM_QK = 72, DIM_V = 40, OUT_BYTES = ROWS * HEADS * (DIM_V + 1) * 8 };

/* `count` random numbers of the dtype, then NaN up to `room`. */
static void *put_numbers(bool wide, int64_t count, int64_t room) {
    size_t size = wide ? sizeof(double) : sizeof(float);
    void *host = malloc((size_t)room * size);
    must(host != NULL, "malloc");
    memset(host, 0xff, (size_t)room * size);
    for (int64_t n = 0; n < count; n++) {
        double x = (rand() % 2001 - 1000) / 500.0;
        if (wide)
            ((double *)host)[n] = x;
        else
            ((float *)host)[n] = (float)x;
    }
    void *device = put(host, (size_t)room * size);
    free(host);
    return device;
}

/* o and lse of `used` keys in a cache that has room for max_kv. */
static void attend(attn_dtype dtype, bool with_sink, int32_t used, int32_t max_kv, char *out) {
    const float sinks[HEADS] = {0.5f, 3, -INFINITY, 1};
    bool wide = dtype == ATTN_F64;
    size_t real = wide ? sizeof(double) : sizeof(float), o_bytes = ROWS * HEADS * DIM_V * real;
    attn_problem p = {.size = sizeof p, .op = ATTN_FORWARD, .dtype = dtype, .batch = 1, .heads_q = HEADS, .heads_kv = 2};
    p.dim_qk = DIM_QK;
    p.dim_v = DIM_V;
    p.max_q = ROWS;
    p.max_kv = max_kv;
    p.dropout = 0.1;
    p.flags = ATTN_USED_KV | ATTN_CAUSAL | (with_sink ? ATTN_SINK : 0);
    attn_buffers f = {.size = sizeof f, .seed = 5};
    srand(7);
    f.q = attn_dense(put_numbers(wide, ROWS * HEADS * DIM_QK, ROWS * HEADS * DIM_QK), ROWS, HEADS, DIM_QK);
    f.k = attn_dense(put_numbers(wide, (int64_t)used * 2 * DIM_QK, (int64_t)max_kv * 2 * DIM_QK), max_kv, 2, DIM_QK);
    f.v = attn_dense(put_numbers(wide, (int64_t)used * 2 * DIM_V, (int64_t)max_kv * 2 * DIM_V), max_kv, 2, DIM_V);
    f.o = attn_dense(put(NULL, o_bytes), ROWS, HEADS, DIM_V);
    f.lse = put(NULL, ROWS * HEADS * real);
    f.used_kv = put(&used, sizeof used);
    if (with_sink) f.sink = put(sinks, sizeof sinks);
    must(attn_forward(context, &p, &f, NULL) == ATTN_OK, "attn_forward");
    memset(out, 0, OUT_BYTES);
    get(out, f.o.data, o_bytes);
    get(out + o_bytes, f.lse, ROWS * HEADS * real);
    free_arrays();
}

static void test_split(void) {
    static const int32_t cases[][3] = {
        {300, 300, 1600}, {700, 700, 5000}, {512, 512, 513}, {513, 513, 4000}, {0, 16, 4000}}; /* keys; room, twice */
    static char once[OUT_BYTES], again[OUT_BYTES];
    for (size_t n = 0; n < sizeof cases / sizeof cases[0]; n++) {
        for (int kind = 0; kind < 4; kind++) {
            attn_dtype dtype = kind & 1 ? ATTN_F64 : ATTN_F32;
            attend(dtype, kind & 2, cases[n][0], cases[n][1], once);
            attend(dtype, kind & 2, cases[n][0], cases[n][2], again);
            char what[96];
            snprintf(what, sizeof what, "%d keys, %s, sink %d: room for %d or %d gives the same bits", (int)cases[n][0],
                     attn_dtype_name(dtype), kind >> 1, (int)cases[n][1], (int)cases[n][2]);
            judge(memcmp(once, again, OUT_BYTES) == 0, what);
        }
    }
}

/* ---- more parts than one launch of merge takes ---- */

enum { PARTS = 101, MERGE_ROWS = 2, MERGE_HEADS = 3, MERGE_DIM = 40, LINES = MERGE_ROWS * MERGE_HEADS };

/* Fills the parts. Every third has no keys, and NaN in o; the largest lse comes late, so that what was before is rescaled. */
static void make_parts(double (*o)[LINES * MERGE_DIM], double (*lse)[LINES]) {
    srand(11);
    for (int part = 0; part < PARTS; part++) {
        for (int line = 0; line < LINES; line++) {
            bool is_empty = part % 3 == 1 || line == 4;
            lse[part][line] = is_empty ? -INFINITY : (part < 70 ? part * 0.1 : 7 - part * 0.01) + rand() % 100 * 0.01;
            int row = line % MERGE_ROWS, head = line / MERGE_ROWS; /* lse is [head][row], o is [row][head] */
            for (int x = 0; x < MERGE_DIM; x++)
                o[part][(row * MERGE_HEADS + head) * MERGE_DIM + x] = is_empty ? NAN : (rand() % 2001 - 1000) / 500.0;
        }
    }
}

static void test_merge(void) {
    static double o[PARTS][LINES * MERGE_DIM], lse[PARTS][LINES];
    static double want_o[LINES * MERGE_DIM], want_lse[LINES], got_o[LINES * MERGE_DIM], got_lse[LINES];
    attn_tensor o_parts[PARTS], o_device[PARTS];
    const void *lse_parts[PARTS], *lse_device[PARTS];
    attn_config config = {.size = sizeof config, .backend = ATTN_BACKEND_REF};
    attn_context *ref;
    must(attn_context_create(&ref, &config) == ATTN_OK, "ref");
    make_parts(o, lse);
    const void *all_o = put(o, sizeof o), *all_lse = put(lse, sizeof lse);
    for (int n = 0; n < PARTS; n++) {
        o_parts[n] = attn_dense(o[n], MERGE_ROWS, MERGE_HEADS, MERGE_DIM);
        o_device[n] = attn_dense((double *)all_o + n * LINES * MERGE_DIM, MERGE_ROWS, MERGE_HEADS, MERGE_DIM);
        lse_parts[n] = lse[n];
        lse_device[n] = (const double *)all_lse + n * LINES;
    }
    attn_merge_args m = {.size = sizeof m, .dtype = ATTN_F64, .parts = PARTS, .batch = 1, .rows = MERGE_ROWS};
    m.heads = MERGE_HEADS;
    m.dim = MERGE_DIM;
    m.o_parts = o_parts;
    m.lse_parts = lse_parts;
    m.o = attn_dense(want_o, MERGE_ROWS, MERGE_HEADS, MERGE_DIM);
    m.lse = want_lse;
    must(attn_merge(ref, &m, NULL) == ATTN_OK, "attn_merge on ref");
    m.o_parts = o_device;
    m.lse_parts = lse_device;
    m.o.data = put(NULL, sizeof got_o);
    m.lse = put(NULL, sizeof got_lse);
    must(attn_merge(context, &m, NULL) == ATTN_OK, "attn_merge");
    get(got_o, m.o.data, sizeof got_o);
    get(got_lse, m.lse, sizeof got_lse);
    bool same = true; /* up to a few roundings of double, at numbers around 1 and 10 */
    for (int n = 0; n < LINES * MERGE_DIM; n++) same = same && fabs(got_o[n] - want_o[n]) < 1e-13;
    for (int n = 0; n < LINES; n++) same = same && (got_lse[n] == want_lse[n] || fabs(got_lse[n] - want_lse[n]) < 1e-13);
    judge(same, "a merge of 101 parts is that of ref");
    free_arrays();
    attn_context_destroy(ref);
}

/* ---- several places for each block ---- */

enum { PLACE_BATCH = 2, PLACE_HEADS = 3, PLACE_ROWS = 200, PLACE_KEYS = 300, PLACE_MOST = 256 };

/* A tensor of random 16-bit numbers; with `odd`, rows begin at odd addresses. The same numbers on the host, and on the device. */
static attn_tensor put_halves(attn_dtype dtype, int rows, int dim, bool odd, bool on_device, uint16_t *host) {
    int64_t pitch = PLACE_HEADS * dim + (odd ? 1 : 0), count = (int64_t)PLACE_BATCH * rows * pitch;
    for (int64_t row = 0; row < PLACE_BATCH * rows; row++)
        for (int64_t n = 0; n < pitch; n++) {
            float x = n < PLACE_HEADS * dim ? (float)(rand() % 2001 - 1000) / 500 : 0;
            host[row * pitch + n] = dtype == ATTN_BF16 ? attn__to_bf16(x) : attn__to_f16(x);
        }
    return (attn_tensor){on_device ? put(host, (size_t)count * 2) : host, {rows * pitch, pitch, dim}};
}

/* o as numbers, of the cuda backend or of ref. */
static void attend_places(attn_context *where, attn_dtype dtype, int dim, uint32_t flags, bool odd, double scale,
                          uint16_t *o) {
    enum { NUMBERS = PLACE_BATCH * PLACE_KEYS * (PLACE_HEADS * PLACE_MOST + 1) };
    static uint16_t host[3][NUMBERS];
    attn_problem p = {.size = sizeof p, .op = ATTN_FORWARD, .dtype = dtype, .batch = PLACE_BATCH};
    p.heads_q = p.heads_kv = PLACE_HEADS;
    p.dim_qk = p.dim_v = dim;
    p.max_q = PLACE_ROWS;
    p.max_kv = PLACE_KEYS;
    p.flags = flags | ATTN_SCALE;
    p.window_left = flags & ATTN_WINDOW ? 90 : 0;
    p.scale = scale;
    attn_buffers f = {.size = sizeof f};
    bool device = where == context;
    srand(17);
    f.q = put_halves(dtype, PLACE_ROWS, dim, false, device, host[0]);
    f.k = put_halves(dtype, PLACE_KEYS, dim, false, device, host[1]);
    f.v = put_halves(dtype, PLACE_KEYS, dim, odd, device, host[2]);
    size_t bytes = (size_t)PLACE_BATCH * PLACE_ROWS * PLACE_HEADS * (size_t)dim * 2;
    f.o = attn_dense(device ? put(NULL, bytes) : o, PLACE_ROWS, PLACE_HEADS, dim);
    must(attn_forward(where, &p, &f, NULL) == ATTN_OK, "attn_forward");
    if (device) get(o, f.o.data, bytes);
    free_arrays();
}

/*
 * More rows, heads and keys than a block takes at a time, so that a persistent kernel comes round to each of its buffers again; with
 * a negative scale, so does the kernel for every feature. Odd addresses, for which there is another one, give the same bits.
 */
static void test_places(attn_dtype dtype, int dim, uint32_t flags) {
    enum { NUMBERS = PLACE_BATCH * PLACE_ROWS * PLACE_HEADS * PLACE_MOST };
    static uint16_t want[NUMBERS], got[NUMBERS], odd[NUMBERS];
    const double most = dtype == ATTN_BF16 ? 1.0 / 128 : 1.0 / 1024; /* roundings of P and of o, which is below 2 */
    const int count = PLACE_BATCH * PLACE_ROWS * PLACE_HEADS * dim;
    attn_config config = {.size = sizeof config, .backend = ATTN_BACKEND_REF};
    attn_context *ref;
    must(attn_context_create(&ref, &config) == ATTN_OK, "ref");
    for (int sign = -1; sign <= 1; sign += 2) {
        const double scale = sign / sqrt(dim);
        attend_places(ref, dtype, dim, flags, false, scale, want);
        attend_places(context, dtype, dim, flags, false, scale, got);
        attend_places(context, dtype, dim, flags, true, scale, odd);
        bool close = true;
        for (int n = 0; n < count; n++)
            close = close && fabs(attn__load(dtype, got, n) - attn__load(dtype, want, n)) <= most;
        char what[96];
        snprintf(what, sizeof what, "several places for a block: %s, dim %d, flags %x, sign %d", attn_dtype_name(dtype),
                 dim, (unsigned)flags, sign);
        judge(close, what);
        snprintf(what, sizeof what, "odd addresses give the same bits: %s, dim %d, flags %x, sign %d",
                 attn_dtype_name(dtype), dim, (unsigned)flags, sign);
        judge(memcmp(got, odd, (size_t)count * 2) == 0, what);
    }
    attn_context_destroy(ref);
}

/* ---- more places than a pass has ---- */

enum { MANY_BATCH = 70, MANY_HEADS = 10, MANY_ROWS = 20, MANY_KEYS = 40, MANY_MOST = 192 };

/*
 * Sequences of lengths of their own; V of key 25 is infinite in every third of them: some rows of a tile see it, others do not. Packed
 * ones have 0 to 20 rows, so that many have no place. Returns how many numbers o has.
 */
static int attend_many(attn_context *where, int dim, bool packed, uint16_t *o) {
    static uint16_t q[MANY_BATCH * MANY_ROWS * MANY_HEADS * MANY_MOST], k[MANY_BATCH * MANY_KEYS * MANY_MOST],
        v[MANY_BATCH * MANY_KEYS * MANY_MOST];
    const size_t bytes = (size_t)MANY_BATCH * MANY_ROWS * MANY_HEADS * (size_t)dim * 2;
    const int keys = MANY_BATCH * MANY_KEYS * dim;
    int32_t used[MANY_BATCH], cu_q[MANY_BATCH + 1] = {0};
    attn_problem p = {.size = sizeof p, .op = ATTN_FORWARD, .dtype = ATTN_BF16, .batch = MANY_BATCH};
    p.heads_q = MANY_HEADS;
    p.heads_kv = 1;
    p.dim_qk = p.dim_v = dim;
    p.max_q = MANY_ROWS;
    p.max_kv = MANY_KEYS;
    p.flags = ATTN_USED_KV | ATTN_CAUSAL | (packed ? ATTN_VARLEN_Q : 0);
    for (int b = 0; b < MANY_BATCH; b++) cu_q[b + 1] = cu_q[b] + (b % 4 == 1 ? 0 : b * 5 % (MANY_ROWS + 1));
    p.total_q = packed ? cu_q[MANY_BATCH] : 0;
    srand(23);
    for (size_t n = 0; n < sizeof q / sizeof *q; n++) q[n] = attn__to_bf16((float)(rand() % 2001 - 1000) / 500);
    for (int n = 0; n < keys; n++) {
        k[n] = attn__to_bf16((float)(rand() % 2001 - 1000) / 500);
        v[n] = attn__to_bf16((float)(rand() % 2001 - 1000) / 500);
        const int key = n / dim % MANY_KEYS, b = n / dim / MANY_KEYS;
        if (key == 25 && b % 3 == 0 && n % dim == b % dim) v[n] = attn__to_bf16(INFINITY);
    }
    for (int b = 0; b < MANY_BATCH; b++) used[b] = MANY_KEYS - b % 13;
    bool device = where == context;
    attn_buffers f = {.size = sizeof f};
    f.q = attn_dense(device ? put(q, bytes) : q, MANY_ROWS, MANY_HEADS, dim);
    f.k = attn_dense(device ? put(k, (size_t)keys * 2) : k, MANY_KEYS, 1, dim);
    f.v = attn_dense(device ? put(v, (size_t)keys * 2) : v, MANY_KEYS, 1, dim);
    f.used_kv = device ? put(used, sizeof used) : used;
    if (packed) f.cu_q = device ? put(cu_q, sizeof cu_q) : cu_q;
    f.o = attn_dense(device ? put(NULL, bytes) : o, MANY_ROWS, MANY_HEADS, dim);
    must(attn_forward(where, &p, &f, NULL) == ATTN_OK, "attn_forward");
    if (device) get(o, f.o.data, bytes);
    free_arrays();
    return (packed ? (int)p.total_q : MANY_BATCH * MANY_ROWS) * MANY_HEADS * dim;
}

/* Blocks take these from a counter, and one block, which here runs first, takes them all: 700, where a pass notes 128. */
static void test_many_places(int dim, bool packed) {
    enum { NUMBERS = MANY_BATCH * MANY_ROWS * MANY_HEADS * MANY_MOST };
    static uint16_t want[NUMBERS], got[NUMBERS];
    attn_config config = {.size = sizeof config, .backend = ATTN_BACKEND_REF};
    attn_context *ref;
    must(attn_context_create(&ref, &config) == ATTN_OK, "ref");
    const int numbers = attend_many(ref, dim, packed, want);
    attend_many(context, dim, packed, got);
    int wrong = 0, infinite = 0;
    for (int n = 0; n < numbers; n++) {
        double w = attn__load(ATTN_BF16, want, n), g = attn__load(ATTN_BF16, got, n);
        infinite += isinf(w) != 0;
        wrong += !(w == g || fabs(w - g) <= 1.0 / 64);
    }
    judge(infinite > 0 && wrong == 0, packed ? "packed sequences without rows, and infinities in V"
                                             : "more places than a pass has, and infinities in V");
    attn_context_destroy(ref);
}

/* ---- values out of range ---- */

static int32_t wild(int32_t most) {
    const int32_t values[] = {INT_MIN, INT_MAX, -1, most + 1, rand()};
    return rand() % 2 ? values[rand() % 5] : rand() % (most + 1);
}

static int32_t *put_wild(int64_t count, int32_t most) {
    int32_t *host = malloc((size_t)count * sizeof *host);
    must(host != NULL, "malloc");
    for (int64_t n = 0; n < count; n++) host[n] = wild(most);
    int32_t *device = put(host, (size_t)count * sizeof *host);
    free(host);
    return device;
}

static attn_tensor put_zeros(int64_t total, int64_t rows, int64_t heads, int64_t dim) {
    return attn_dense(put(NULL, (size_t)(total * heads * dim) * sizeof(float)), rows, heads, dim);
}

enum { BATCH = 5, NEW = 6, QUERIES = 9, PAGES = 20, DIM = 8, SLOTS = 6, TOTAL_Q = 30, TOTAL_NEW = 20 };

static attn_problem wild_problem(void) {
    attn_problem p = {.size = sizeof p, .op = rand() % 5 ? ATTN_FORWARD : ATTN_KV_APPEND, .dtype = ATTN_F32};
    p.batch = BATCH;
    p.heads_q = p.op == ATTN_FORWARD ? 2 : 1;
    p.heads_kv = 1;
    p.dim_qk = p.dim_v = DIM;
    p.max_q = QUERIES;
    p.max_kv = rand() % 3 ? 40 : 1100;
    p.max_new = NEW;
    p.rotary_dim = 4;
    p.rotary_len = rand() % 4 ? 30 : rand() % 2;
    p.flags = ATTN_USED_KV | ATTN_LEFTPAD | ATTN_APPEND | ATTN_ROTARY;
    const uint32_t maybe[] = {ATTN_ROTARY_POS, ATTN_VARLEN_NEW, ATTN_VARLEN_Q, ATTN_USED_Q, ATTN_CAUSAL};
    for (int n = 0; n < (p.op == ATTN_FORWARD ? 5 : 2); n++) p.flags |= rand() % 2 ? maybe[n] : 0;
    int cache = rand() % 4; /* paged, packed, slots, paged slots */
    if (cache == 0 || cache == 3) p.page_size = 7;
    if (cache == 1) p.flags |= ATTN_VARLEN_KV;
    if (cache >= 2) p.flags |= ATTN_BATCH_INDEX;
    p.num_pages = p.page_size ? PAGES : 0;
    p.cache_batch = p.flags & ATTN_BATCH_INDEX ? SLOTS : 0;
    p.total_q = p.flags & ATTN_VARLEN_Q ? TOTAL_Q : 0;
    p.total_kv = p.flags & ATTN_VARLEN_KV ? 2 * p.max_kv : 0;
    p.total_new = p.flags & ATTN_VARLEN_NEW ? TOTAL_NEW : 0;
    if (p.op == ATTN_FORWARD && rand() % 2) p.flashmask_vectors = p.flags & ATTN_CAUSAL ? 1 : 2;
    return p;
}

static attn_buffers wild_buffers(const attn_problem *p) {
    attn_buffers f = {.size = sizeof f};
    int32_t slots = p->flags & ATTN_BATCH_INDEX ? SLOTS : BATCH, rows = p->page_size ? p->page_size : p->max_kv;
    int64_t kv = p->page_size ? PAGES * p->page_size : p->total_kv ? p->total_kv : (int64_t)slots * p->max_kv;
    int64_t q = p->total_q ? p->total_q : BATCH * QUERIES, fresh = p->total_new ? p->total_new : BATCH * NEW;
    f.k = put_zeros(kv, rows, 1, DIM);
    f.v = put_zeros(kv, rows, 1, DIM);
    f.k_new = put_zeros(fresh, NEW, 1, DIM);
    f.v_new = put_zeros(fresh, NEW, 1, DIM);
    f.rotary_cos = put(NULL, (size_t)p->rotary_len * 2 * sizeof(float));
    f.rotary_sin = put(NULL, (size_t)p->rotary_len * 2 * sizeof(float));
    f.used_kv = put_wild(BATCH, p->max_kv);
    f.leftpad = put_wild(BATCH, p->max_kv);
    if (p->flags & ATTN_ROTARY_POS) f.rotary_pos = put_wild(BATCH, 30);
    if (p->flags & ATTN_VARLEN_NEW) f.cu_new = put_wild(BATCH + 1, TOTAL_NEW);
    if (p->flags & ATTN_VARLEN_KV) f.cu_kv = put_wild(BATCH + 1, (int32_t)p->total_kv);
    if (p->flags & ATTN_BATCH_INDEX) f.batch_index = put_wild(BATCH, SLOTS - 1);
    if (p->page_size) f.page_table = put_wild(slots * ((p->max_kv + p->page_size - 1) / p->page_size), PAGES - 1);
    if (p->op != ATTN_FORWARD) return f;
    f.q = put_zeros(q, QUERIES, 2, DIM);
    f.o = put_zeros(q, QUERIES, 2, DIM);
    f.lse = put(NULL, (size_t)q * 2 * sizeof(float));
    if (p->flags & ATTN_VARLEN_Q) f.cu_q = put_wild(BATCH + 1, TOTAL_Q);
    if (p->flags & ATTN_USED_Q) f.used_q = put_wild(BATCH, QUERIES);
    if (p->flashmask_vectors) f.flashmask = put_wild((int64_t)BATCH * p->max_kv * p->flashmask_vectors, QUERIES);
    if (rand() % 3 == 0) {
        int64_t m = p->max_kv;
        f.probs = (attn_matrix){put(NULL, (size_t)(BATCH * 2 * QUERIES * m) * sizeof(float)),
                                {2 * QUERIES * m, QUERIES * m, m, 1}};
    }
    return f;
}

static void test_wild_values(void) {
    const int rounds = 150;
    int reported = 0;
    for (int seed = 0; seed < rounds; seed++) {
        srand((unsigned)seed);
        attn_problem p = wild_problem();
        attn_buffers f = wild_buffers(&p);
        attn_status status =
            p.op == ATTN_FORWARD ? attn_forward(context, &p, &f, NULL) : attn_kv_append(context, &p, &f, NULL);
        must(status == ATTN_OK, "a run with values out of range");
        reported += attn_device_status(context) == ATTN_INVALID;
        judge(attn_device_status(context) == ATTN_OK, "the status word is cleared by reading it");
        free_arrays();
    }
    /* Ten values of which half are wild: a round without any would be a rare one. */
    judge(reported >= rounds - 5, "values out of range are reported");
}

/* The same of a backward. Blocks that take turns must not wait for ever where lengths make no sense. */
static void test_wild_gradients(void) {
    enum { ROWS_Q = 150, ALL_Q = 400, KEYS = 300, ALL_KV = 700 };
    static const attn_dtype dtypes[] = {ATTN_BF16, ATTN_F16, ATTN_F32, ATTN_BF16};
    const int rounds = 24;
    int reported = 0;
    for (int seed = 0; seed < rounds; seed++) {
        srand((unsigned)seed);
        attn_problem p = {.size = sizeof p, .op = ATTN_BACKWARD, .dtype = dtypes[seed % 4], .batch = BATCH, .heads_q = 2};
        const int32_t wide = seed % 3 ? 40 : 160; /* on Hopper: its two kernels */
        p.heads_kv = 1;
        p.dim_qk = p.dim_v = wide;
        p.max_q = ROWS_Q;
        p.max_kv = KEYS;
        p.flags = ATTN_VARLEN_Q | ATTN_VARLEN_KV | ATTN_LEFTPAD | (rand() % 2 ? ATTN_USED_Q | ATTN_USED_KV : 0);
        p.flags |= rand() % 2 ? ATTN_CAUSAL : 0;
        p.total_q = ALL_Q;
        p.total_kv = ALL_KV;
        if (rand() % 2) p.flashmask_vectors = p.flags & ATTN_CAUSAL ? 1 : 2;
        attn_buffers f = {.size = sizeof f, .cu_q = put_wild(BATCH + 1, ALL_Q), .cu_kv = put_wild(BATCH + 1, ALL_KV)};
        f.leftpad = put_wild(BATCH, 40);
        if (p.flags & ATTN_USED_Q) f.used_q = put_wild(BATCH, ROWS_Q);
        if (p.flags & ATTN_USED_KV) f.used_kv = put_wild(BATCH, KEYS);
        if (p.flashmask_vectors) f.flashmask = put_wild((int64_t)BATCH * KEYS * p.flashmask_vectors, ROWS_Q);
        attn_tensor *const of_q[] = {&f.q, &f.o, &f.d_o, &f.d_q}, *const of_kv[] = {&f.k, &f.v, &f.d_k, &f.d_v};
        for (int n = 0; n < 4; n++) {
            *of_q[n] = put_zeros(ALL_Q, ALL_Q, 2, wide);
            *of_kv[n] = put_zeros(ALL_KV, ALL_KV, 1, wide);
        }
        f.lse = put(NULL, (size_t)ALL_Q * 2 * sizeof(float));
        must(attn_backward(context, &p, &f, NULL) == ATTN_OK, "a backward with values out of range");
        reported += attn_device_status(context) == ATTN_INVALID;
        free_arrays();
    }
    judge(reported >= rounds - 2, "values out of range are reported by a backward");
}

/* pieces [places]: all tests, or only those of places and of wild gradients, for a GPU of another kind. */
int main(int count, char **words) {
    bool all = count < 2 || strcmp(words[1], "places") != 0;
    attn_config config = {.size = sizeof config, .backend = ATTN_BACKEND_CUDA};
    const attn_driver_state *state;
    attn_cu_context current;
    must(attn_context_create(&context, &config) == ATTN_OK, "attn_context_create");
    must(attn__driver_open(&state) == ATTN_OK, "attn__driver_open");
    driver = state->driver;
    must(driver->cuDevicePrimaryCtxRetain(&current, 0) == 0 && driver->cuCtxPushCurrent(current) == 0, "context");
    if (all) test_split();
    if (all) test_merge();
    const uint32_t window = ATTN_CAUSAL | ATTN_WINDOW, masks[] = {0, ATTN_CAUSAL, window};
    for (int n = 0; n < 3; n++) {
        test_places(ATTN_BF16, 64, masks[n]);
        test_places(ATTN_F16, 128, masks[n]);
    }
    test_places(ATTN_F16, 96, ATTN_CAUSAL);
    test_places(ATTN_BF16, 192, window);
    test_places(ATTN_BF16, 256, 0);
    test_many_places(64, false);
    test_many_places(192, false);
    test_many_places(64, true);
    if (all) test_wild_values();
    test_wild_gradients();
    attn_context_destroy(context);
    printf("%d passed, %d failed\n", passed, failed);
    return failed > 0;
}
