/* Reads the input files of a problem and brings their shapes together; see inputs.h. */
#include "inputs.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- options ---- */

#define AT(field) offsetof(file_settings, in.field)
#define FILE_AT(which) offsetof(file_settings, in.path[which])

static const char *parse_fp8(const char *text, void *target) {
    const char *wanted = parse_dtype(text, target);
    attn_dtype dtype = *(attn_dtype *)target;
    return wanted || (dtype != ATTN_E4M3 && dtype != ATTN_E5M2) ? "e4m3 or e5m2" : NULL;
}

const option options_tensors[] = {
    {"q", "FILE", "queries [batch][rows][heads][dim], packed [total][heads][dim]", parse_text, FILE_AT(IN_Q), 0},
    {"k", "FILE", "keys, likewise; paged [pages][page size][heads][dim]", parse_text, FILE_AT(IN_K), 0},
    {"v", "FILE", "values, likewise", parse_text, FILE_AT(IN_V), 0},
    {"bf16", NULL, "u2 files hold bf16", parse_switch, AT(bf16), 0},
    {"fp8", "KIND", "u1 files hold e4m3 or e5m2", parse_fp8, AT(fp8), 0},
    {"bias", "FILE", "[batch][heads][rows][keys]; 1 or left out: broadcast", parse_text, FILE_AT(IN_BIAS), ATTN_BIAS},
    {"alibi", "FILE", "slopes [heads] or [batch][heads]", parse_text, FILE_AT(IN_ALIBI), ATTN_ALIBI},
    {"sink", "FILE", "[heads]", parse_text, FILE_AT(IN_SINK), ATTN_SINK},
    {"q-descale", "FILE", "[], [KV heads] or [batch][KV heads]", parse_text, FILE_AT(IN_Q_DESCALE), ATTN_DESCALE},
    {"k-descale", "FILE", "likewise, of the same shape", parse_text, FILE_AT(IN_K_DESCALE), ATTN_DESCALE},
    {"v-descale", "FILE", "likewise, of the same shape", parse_text, FILE_AT(IN_V_DESCALE), ATTN_DESCALE},
    {"descale-pages", NULL, "those of k and v are [pages][KV heads], of q [batch]...", NULL, 0, ATTN_DESCALE_PAGES},
    {0},
};

const option options_lengths[] = {
    {"cu-q", "FILE", "q is packed: row offsets [batch + 1]", parse_text, FILE_AT(IN_CU_Q), ATTN_VARLEN_Q},
    {"cu-kv", "FILE", "k and v are packed: row offsets [batch + 1]", parse_text, FILE_AT(IN_CU_KV), ATTN_VARLEN_KV},
    {"used-q", "FILE", "rows in use [batch]", parse_text, FILE_AT(IN_USED_Q), ATTN_USED_Q},
    {"used-kv", "FILE", "cache positions in use [batch]", parse_text, FILE_AT(IN_USED_KV), ATTN_USED_KV},
    {"leftpad", "FILE", "first cache position [batch]", parse_text, FILE_AT(IN_LEFTPAD), ATTN_LEFTPAD},
    {"max-q", "N", "most rows of a sequence; default: from --cu-q", parse_int, AT(max_q), 0},
    {"max-kv", "N", "most keys of a sequence; default: from --cu-kv or the pages", parse_int, AT(max_kv), 0},
    {"flashmask", "FILE", "[batch][1 or KV heads][keys][1, 2 or 4]", parse_text, FILE_AT(IN_FLASHMASK), 0},
    {0},
};

const option options_cache[] = {
    {"page-table", "FILE", "k and v are paged: pages [batch][entries]", parse_text, FILE_AT(IN_PAGE_TABLE), 0},
    {"page-size", "N", "rows of a page; must agree with k", parse_int, AT(page_size), 0},
    {"batch-index", "FILE", "slot in the cache [batch]", parse_text, FILE_AT(IN_BATCH_INDEX), ATTN_BATCH_INDEX},
    {"k-new", "FILE", "keys to append [batch][rows][KV heads][dim]", parse_text, FILE_AT(IN_K_NEW), 0},
    {"v-new", "FILE", "values to append", parse_text, FILE_AT(IN_V_NEW), 0},
    {"cu-new", "FILE", "k-new, v-new are packed: offsets [batch + 1]", parse_text, FILE_AT(IN_CU_NEW), ATTN_VARLEN_NEW},
    {"rotary-cos", "FILE", "[positions][rotary dim / 2]", parse_text, FILE_AT(IN_ROTARY_COS), ATTN_ROTARY},
    {"rotary-sin", "FILE", "likewise", parse_text, FILE_AT(IN_ROTARY_SIN), ATTN_ROTARY},
    {"rotary-interleaved", NULL, "pairs (0,1), (2,3), ... instead of halves", NULL, 0, ATTN_ROTARY_INTERLEAVED},
    {"rotary-pos", "FILE", "first position [batch]; default: used-kv", parse_text, FILE_AT(IN_ROTARY_POS), ATTN_ROTARY_POS},
    {0},
};

/* ---- shapes ---- */

/* The sizes, by letter. `least`: below it, zero would mean a default to the library and not an empty array. */
static const struct {
    char letter;
    int least;
    const char *name;
    size_t at;  /* in attn_problem */
    bool is_64; /* int64_t there */
} size_rows[] = {
    {'b', 0, "batch", offsetof(attn_problem, batch), false},
    {'q', 0, "max_q", offsetof(attn_problem, max_q), false},
    {'k', 0, "max_kv", offsetof(attn_problem, max_kv), false},
    {'H', 1, "heads_q", offsetof(attn_problem, heads_q), false},
    {'G', 1, "heads_kv", offsetof(attn_problem, heads_kv), false},
    {'d', 1, "dim_qk", offsetof(attn_problem, dim_qk), false},
    {'e', 1, "dim_v", offsetof(attn_problem, dim_v), false},
    {'T', 0, "total_q", offsetof(attn_problem, total_q), true},
    {'U', 0, "total_kv", offsetof(attn_problem, total_kv), true},
    {'N', 0, "total_new", offsetof(attn_problem, total_new), true},
    {'n', 0, "max_new", offsetof(attn_problem, max_new), false},
    {'P', 0, "num_pages", offsetof(attn_problem, num_pages), false},
    {'p', 1, "page_size", offsetof(attn_problem, page_size), false},
    {'c', 0, "cache_batch", offsetof(attn_problem, cache_batch), false},
    {'f', 1, "flashmask_heads", offsetof(attn_problem, flashmask_heads), false},
    {'m', 1, "flashmask_vectors", offsetof(attn_problem, flashmask_vectors), false},
    {'r', 1, "rotary_len", offsetof(attn_problem, rotary_len), false},
    {'s', 1, "rotary_dim / 2", SIZE_MAX, false},
    {'t', 1, "pages of a sequence", SIZE_MAX, false},
};
enum { SIZE_ROWS = sizeof size_rows / sizeof *size_rows };

typedef enum kind { KIND_Q, KIND_KV, KIND_OUT, KIND_LSE, KIND_BIAS, KIND_ROTARY, KIND_FLOAT, KIND_INT } kind;

/*
 * The inputs: what their elements are, where they go in attn_buffers, their shape, and their shape when `packed_by` is set.
 * A letter is a size, B is batch + 1, and a letter before ? may be 1 (broadcast), or left out if it comes first.
 */
static const struct {
    const char *option;
    kind kind;
    size_t at;
    const char *shape, *packed;
    uint32_t packed_by;
} input_rows[INPUTS] = {
#define BUF(field) offsetof(attn_buffers, field)
    [IN_Q] = {"--q", KIND_Q, BUF(q), "bqHd", "THd", ATTN_VARLEN_Q},
    [IN_K] = {"--k", KIND_KV, BUF(k), "bkGd", "UGd", ATTN_VARLEN_KV},
    [IN_V] = {"--v", KIND_KV, BUF(v), "bkGe", "UGe", ATTN_VARLEN_KV},
    [IN_O] = {"--o", KIND_OUT, BUF(o), "bqHe", "THe", ATTN_VARLEN_Q},
    [IN_LSE] = {"--lse", KIND_LSE, BUF(lse), "bHq", "HT", ATTN_VARLEN_Q},
    [IN_D_O] = {"--d-o", KIND_OUT, BUF(d_o), "bqHe", "THe", ATTN_VARLEN_Q},
    [IN_D_LSE] = {"--d-lse", KIND_LSE, BUF(d_lse), "bHq", "HT", ATTN_VARLEN_Q},
    [IN_BIAS] = {"--bias", KIND_BIAS, BUF(bias), "b?H?q?k?", NULL, 0},
    [IN_ALIBI] = {"--alibi", KIND_FLOAT, BUF(alibi), "b?H", NULL, 0},
    [IN_SINK] = {"--sink", KIND_FLOAT, BUF(sink), "H", NULL, 0},
    [IN_CU_Q] = {"--cu-q", KIND_INT, BUF(cu_q), "B", NULL, 0},
    [IN_CU_KV] = {"--cu-kv", KIND_INT, BUF(cu_kv), "B", NULL, 0},
    [IN_USED_Q] = {"--used-q", KIND_INT, BUF(used_q), "b", NULL, 0},
    [IN_USED_KV] = {"--used-kv", KIND_INT, BUF(used_kv), "b", NULL, 0},
    [IN_LEFTPAD] = {"--leftpad", KIND_INT, BUF(leftpad), "b", NULL, 0},
    [IN_BATCH_INDEX] = {"--batch-index", KIND_INT, BUF(batch_index), "b", NULL, 0},
    [IN_PAGE_TABLE] = {"--page-table", KIND_INT, BUF(page_table), "bt", NULL, 0},
    [IN_FLASHMASK] = {"--flashmask", KIND_INT, BUF(flashmask), "bfkm", NULL, 0},
    [IN_K_NEW] = {"--k-new", KIND_Q, BUF(k_new), "bnGd", "NGd", ATTN_VARLEN_NEW},
    [IN_V_NEW] = {"--v-new", KIND_Q, BUF(v_new), "bnGe", "NGe", ATTN_VARLEN_NEW},
    [IN_CU_NEW] = {"--cu-new", KIND_INT, BUF(cu_new), "B", NULL, 0},
    [IN_ROTARY_COS] = {"--rotary-cos", KIND_ROTARY, BUF(rotary_cos), "rs", NULL, 0},
    [IN_ROTARY_SIN] = {"--rotary-sin", KIND_ROTARY, BUF(rotary_sin), "rs", NULL, 0},
    [IN_ROTARY_POS] = {"--rotary-pos", KIND_INT, BUF(rotary_pos), "b", NULL, 0},
    [IN_Q_DESCALE] = {"--q-descale", KIND_FLOAT, BUF(q_descale), "b?G?", NULL, 0},
    [IN_K_DESCALE] = {"--k-descale", KIND_FLOAT, BUF(k_descale), "b?G?", NULL, 0},
    [IN_V_DESCALE] = {"--v-descale", KIND_FLOAT, BUF(v_descale), "b?G?", NULL, 0},
};

/* A shape with its letters and question marks apart. */
typedef struct shape {
    int ndim;
    char letter[4];
    bool optional[4];
} shape;

static shape shape_of(const inputs *in, input which, const attn_problem *p) {
    const char *text = p->flags & input_rows[which].packed_by ? input_rows[which].packed : input_rows[which].shape;
    if (which == IN_K && in->path[IN_PAGE_TABLE]) text = "PpGd";
    if (which == IN_V && in->path[IN_PAGE_TABLE]) text = "PpGe";
    if ((which == IN_K_DESCALE || which == IN_V_DESCALE) && (p->flags & ATTN_DESCALE_PAGES)) text = "P?G?";
    bool slots = (p->flags & ATTN_BATCH_INDEX) && (which == IN_K || which == IN_V || which == IN_PAGE_TABLE);
    shape s = {0};
    for (; *text; text++) {
        if (*text == '?')
            s.optional[s.ndim - 1] = true;
        else
            s.letter[s.ndim++] = *text == 'b' && slots ? 'c' : *text;
    }
    return s;
}

static const named_size *size_at(const inputs *in, char letter) { return &in->sizes[letter - 'A']; }

void inputs_fix(inputs *in, char letter, int64_t value, const char *origin) {
    in->sizes[letter - 'A'] = (named_size){value, origin};
}

static const char *size_name(char letter) {
    if (letter == 'B') return "batch + 1";
    for (int i = 0; i < SIZE_ROWS; i++)
        if (size_rows[i].letter == letter) return size_rows[i].name;
    return "?";
}

/* "[batch][max_q][heads_q][dim_qk]" */
static const char *shape_text(const shape *s, char *text, size_t size) {
    size_t used = 0;
    text[0] = 0;
    for (int i = 0; i < s->ndim && used < size; i++)
        used += (size_t)snprintf(text + used, size - used, "[%s]", size_name(s->letter[i]));
    return text;
}

/* Fits the shape of one file into the sizes that are known, and fixes those that are not. */
static int unify(inputs *in, input which, const attn_problem *p) {
    const npy_header *h = &in->array[which].header;
    shape s = shape_of(in, which, p);
    char have[NPY_SHAPE_SIZE], want[NPY_SHAPE_SIZE];
    npy_shape_text(h->ndim, h->shape, have, sizeof have);
    shape_text(&s, want, sizeof want);
    const char *path = in->path[which], *name = input_rows[which].option;
    int missing = s.ndim - h->ndim;
    bool fits = missing >= 0;
    for (int i = 0; i < missing; i++) fits = fits && s.optional[i];
    if (!fits) return tool_error(TOOL_USAGE, "%s: shape %s; %s wants %s", path, have, name, want);
    for (int i = 0; i < s.ndim; i++) {
        int64_t dim = i < missing ? 1 : h->shape[i - missing];
        in->dims[which][i] = dim;
        if (s.optional[i] && dim == 1) continue;
        char letter = s.letter[i] == 'B' ? 'b' : s.letter[i];
        if (s.letter[i] == 'B') dim--;
        named_size *known = &in->sizes[letter - 'A'];
        if (!known->origin) *known = (named_size){dim, path};
        if (known->value != dim)
            return tool_error(TOOL_USAGE, "%s: shape %s, %s wants %s: %s would be %lld, but %s says %lld", path, have, name,
                              want, size_name(letter), (long long)dim, known->origin, (long long)known->value);
    }
    return TOOL_OK;
}

int inputs_shape(const inputs *in, input which, const attn_problem *p, int64_t dims[4]) {
    shape s = shape_of(in, which, p);
    for (int i = 0; i < s.ndim; i++) dims[i] = in->path[which] ? in->dims[which][i] : size_at(in, s.letter[i])->value;
    return s.ndim;
}

/* ---- element types ---- */

npy_dtype inputs_npy_dtype(attn_dtype dtype) {
    switch (dtype) {
    case ATTN_F16: return NPY_F2;
    case ATTN_BF16: return NPY_U2;
    case ATTN_F64: return NPY_F8;
    case ATTN_E4M3:
    case ATTN_E5M2: return NPY_U1;
    case ATTN_I8: return NPY_I1;
    default: return NPY_F4;
    }
}

/* The dtype of a tensor file must be *dtype, or becomes it. */
static int tensor_dtype(const inputs *in, input which, attn_dtype *dtype) {
    attn_dtype found = ATTN_DTYPE_DEFAULT;
    npy_dtype stored = in->array[which].header.dtype;
    const char *path = in->path[which];
    switch (stored) {
    case NPY_F2: found = ATTN_F16; break;
    case NPY_F4: found = ATTN_F32; break;
    case NPY_F8: found = ATTN_F64; break;
    case NPY_I1: found = ATTN_I8; break;
    case NPY_U2: found = in->bf16 ? ATTN_BF16 : ATTN_DTYPE_DEFAULT; break;
    case NPY_U1: found = in->fp8; break;
    default: break;
    }
    if (!found && stored == NPY_U2) return tool_error(TOOL_USAGE, "%s: u2; say --bf16 if it holds bf16", path);
    if (!found && stored == NPY_U1) return tool_error(TOOL_USAGE, "%s: u1; say --fp8 e4m3 or --fp8 e5m2", path);
    if (!found) return tool_error(TOOL_USAGE, "%s: %s cannot be elements of a tensor", path, npy_dtype_name(stored));
    if (!*dtype) *dtype = found;
    if (*dtype != found)
        return tool_error(TOOL_USAGE, "%s: %s where %s is wanted for %s", path, attn_dtype_name(found),
                          attn_dtype_name(*dtype), input_rows[which].option);
    return TOOL_OK;
}

/* numpy makes i8 and f8 unless told otherwise, so small arrays of these become what the library takes, in place. */
static int narrow(inputs *in, input which, npy_dtype wanted) {
    npy_array *a = &in->array[which];
    const char *path = in->path[which];
    if (a->header.dtype == wanted) return TOOL_OK;
    if (a->header.dtype != (wanted == NPY_I4 ? NPY_I8 : NPY_F8))
        return tool_error(TOOL_USAGE, "%s: %s where %s is wanted for %s", path, npy_dtype_name(a->header.dtype),
                          npy_dtype_name(wanted), input_rows[which].option);
    for (int64_t i = 0; i < a->header.count; i++) {
        if (wanted == NPY_I4) {
            int64_t value;
            memcpy(&value, (const char *)a->data + 8 * i, 8);
            int32_t small = (int32_t)value;
            if (small != value) return tool_error(TOOL_USAGE, "%s: %lld does not fit into 32 bits", path, (long long)value);
            memcpy((char *)a->data + 4 * i, &small, 4);
        } else {
            double value;
            memcpy(&value, (const char *)a->data + 8 * i, 8);
            float small = (float)value;
            memcpy((char *)a->data + 4 * i, &small, 4);
        }
    }
    a->header.dtype = wanted;
    return TOOL_OK;
}

static int check_dtype(inputs *in, input which, attn_problem *p) {
    attn_dtype lse = p->dtype == ATTN_F64 ? ATTN_F64 : ATTN_F32;
    switch (input_rows[which].kind) {
    case KIND_Q: return tensor_dtype(in, which, &p->dtype);
    case KIND_KV: return tensor_dtype(in, which, &p->kv_dtype);
    case KIND_OUT: return tensor_dtype(in, which, &p->out_dtype);
    case KIND_LSE: return tensor_dtype(in, which, &lse);
    case KIND_BIAS: return tensor_dtype(in, which, &p->bias_dtype);
    case KIND_ROTARY: return tensor_dtype(in, which, &p->rotary_dtype);
    case KIND_FLOAT: return narrow(in, which, NPY_F4);
    case KIND_INT: return narrow(in, which, NPY_I4);
    }
    return TOOL_OK;
}

/* ---- problem and buffers ---- */

/* The most that two neighbours in an array of offsets are apart. Whether the offsets make sense is for the library to say. */
static int64_t longest(const npy_array *cu) {
    const int32_t *at = cu->data;
    int64_t most = 0;
    for (int64_t i = 0; i + 1 < cu->header.count; i++) {
        int64_t length = (int64_t)at[i + 1] - at[i];
        if (length > most) most = length;
    }
    return most;
}

/* Sizes that no shape tells. */
static void derive_sizes(inputs *in) {
    const named_size *table = size_at(in, 't'), *page = size_at(in, 'p');
    if (!size_at(in, 'q')->origin && in->array[IN_CU_Q].data)
        inputs_fix(in, 'q', longest(&in->array[IN_CU_Q]), in->path[IN_CU_Q]);
    if (!size_at(in, 'k')->origin && in->array[IN_CU_KV].data)
        inputs_fix(in, 'k', longest(&in->array[IN_CU_KV]), in->path[IN_CU_KV]);
    if (!size_at(in, 'k')->origin && table->origin && page->origin && table->value <= INT32_MAX && page->value <= INT32_MAX)
        inputs_fix(in, 'k', table->value * page->value, table->origin);
    if (!size_at(in, 'n')->origin && in->array[IN_CU_NEW].data)
        inputs_fix(in, 'n', longest(&in->array[IN_CU_NEW]), in->path[IN_CU_NEW]);
    if (!size_at(in, 'H')->origin && size_at(in, 'G')->origin) /* an append knows no query heads */
        inputs_fix(in, 'H', size_at(in, 'G')->value, size_at(in, 'G')->origin);
}

static int set_sizes(const inputs *in, attn_problem *p) {
    for (int i = 0; i < SIZE_ROWS; i++) {
        const named_size *s = size_at(in, size_rows[i].letter);
        if (!s->origin) continue;
        if (s->value < size_rows[i].least || s->value > (size_rows[i].is_64 ? INT64_MAX / 2 : INT32_MAX / 2))
            return tool_error(TOOL_USAGE, "%s: %s=%lld is out of range", s->origin, size_rows[i].name, (long long)s->value);
        int32_t value = (int32_t)s->value;
        if (size_rows[i].at == SIZE_MAX)
            continue;
        else if (size_rows[i].is_64)
            memcpy((char *)p + size_rows[i].at, &s->value, sizeof s->value);
        else
            memcpy((char *)p + size_rows[i].at, &value, sizeof value);
    }
    if (p->flags & ATTN_ROTARY) p->rotary_dim = (int32_t)(2 * size_at(in, 's')->value);
    if (in->array[IN_K_NEW].data && p->op == ATTN_FORWARD) p->flags |= ATTN_APPEND;
    return TOOL_OK;
}

/* All three descales share one pair of strides; where there is one sequence, or one page, any first one will do. */
static int set_descale_strides(const inputs *in, const attn_problem *p, attn_buffers *f) {
    const char *first = NULL;
    for (int n = 0; n < 6; n++) { /* those that take any come last */
        const input which = (input)(IN_Q_DESCALE + n % 3);
        const bool of_pages = which != IN_Q_DESCALE && (p->flags & ATTN_DESCALE_PAGES);
        const bool any = (of_pages ? p->num_pages : p->batch) == 1;
        if (!in->array[which].data || any != n / 3) continue;
        const int64_t *dims = in->dims[which];
        int64_t strides[2] = {dims[0] == 1 ? 0 : dims[1], dims[1] == 1 ? 0 : 1};
        if (any && first) strides[0] = f->descale_stride[0];
        if (first && memcmp(strides, f->descale_stride, sizeof strides) != 0)
            return tool_error(TOOL_USAGE, "%s: its shape differs from that of %s", in->path[which], first);
        memcpy(f->descale_stride, strides, sizeof strides);
        first = in->path[which];
    }
    return TOOL_OK;
}

static void set_pointer(const inputs *in, input which, const attn_problem *p, attn_buffers *f) {
    void *data = in->array[which].data, *target = (char *)f + input_rows[which].at;
    int64_t d[4] = {0};
    int ndim = inputs_shape(in, which, p, d);
    if (which == IN_BIAS) {
        attn_matrix m = {data, {d[1] * d[2] * d[3], d[2] * d[3], d[3], 1}};
        for (int i = 0; i < 4; i++)
            if (d[i] == 1) m.stride[i] = 0;
        f->bias = m;
    } else if (input_rows[which].kind <= KIND_OUT) {
        attn_tensor t = ndim == 4 ? attn_dense(data, d[1], d[2], d[3]) : attn_dense(data, 0, d[1], d[2]);
        memcpy(target, &t, sizeof t);
    } else {
        memcpy(target, &data, sizeof data);
    }
    if (which == IN_ALIBI && d[0] > 1) f->alibi_stride = d[1];
    if (which == IN_PAGE_TABLE) f->page_table_stride = d[1];
}

int inputs_load(inputs *in, attn_problem *p, attn_buffers *f) {
    char error[NPY_ERROR_SIZE];
    int code = TOOL_OK;
    if (in->page_size) inputs_fix(in, 'p', in->page_size, "--page-size");
    if (in->max_q) inputs_fix(in, 'q', in->max_q, "--max-q");
    if (in->max_kv) inputs_fix(in, 'k', in->max_kv, "--max-kv");
    for (input i = 0; i < INPUTS && code == TOOL_OK; i++) {
        if (!in->path[i]) continue;
        npy_status status = npy_read(in->path[i], &in->array[i], error, sizeof error);
        if (status != NPY_OK) return tool_error(status == NPY_BAD ? TOOL_USAGE : TOOL_RUNTIME, "%s", error);
        code = check_dtype(in, i, p);
        if (code == TOOL_OK) code = unify(in, i, p);
    }
    if (code != TOOL_OK) return code;
    derive_sizes(in);
    code = set_sizes(in, p);
    for (input i = 0; i < INPUTS && code == TOOL_OK; i++)
        if (in->path[i]) set_pointer(in, i, p, f);
    return code == TOOL_OK ? set_descale_strides(in, p, f) : code;
}

void inputs_free(inputs *in) {
    for (int i = 0; i < INPUTS; i++) npy_free(&in->array[i]);
}
