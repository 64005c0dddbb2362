/* The pieces that are useful by themselves, on the host: merge of partial results by their lse, and rotary embedding. */
#include "host.h"
#include "numeric.h"

#include <math.h>

static attn_status check_shape(int32_t batch, int32_t rows, int32_t heads, int32_t dim) {
    INVALID_IF(batch < 0, "batch=%d: want 0 or more", batch);
    INVALID_IF(rows < 0, "rows=%d: want 0 or more", rows);
    INVALID_IF(heads < 1, "heads=%d: want 1 or more", heads);
    INVALID_IF(dim < 1 || dim > ATTN_MAX_DIM, "dim=%d: want 1 to %d", dim, ATTN_MAX_DIM);
    return ATTN_OK;
}

/* ---- merge ---- */

attn_status attn__merge_check(attn_merge_args *a, const attn_merge_args *args) {
    INVALID_IF(!args, "args=NULL: want an attn_merge_args");
    RETURN_IF_ERROR(attn__struct_load(a, args, sizeof *a, ATTN_MERGE_FIRST_SIZE, "attn_merge_args"));
    INVALID_IF(!attn__is_float(a->dtype), "dtype=%d: want ATTN_F32, F16, BF16 or F64", (int)a->dtype);
    if (a->out_dtype == ATTN_DTYPE_DEFAULT) a->out_dtype = a->dtype;
    INVALID_IF(!attn__is_float(a->out_dtype), "out_dtype=%d: want ATTN_F32, F16, BF16 or F64", (int)a->out_dtype);
    INVALID_IF((a->out_dtype == ATTN_F64) != (a->dtype == ATTN_F64),
               "out_dtype=%s: f64 goes with dtype f64 only, which is %s", attn_dtype_name(a->out_dtype),
               attn_dtype_name(a->dtype));
    INVALID_IF(a->parts < 1, "parts=%d: want 1 or more", a->parts);
    RETURN_IF_ERROR(check_shape(a->batch, a->rows, a->heads, a->dim));
    if (a->batch == 0 || a->rows == 0) return ATTN_OK;
    INVALID_IF(!a->o_parts, "o_parts=NULL: want %d tensors", a->parts);
    INVALID_IF(!a->lse_parts, "lse_parts=NULL: want %d arrays", a->parts);
    size_t real = attn__wide(a->dtype) ? sizeof(double) : sizeof(float);
    for (int32_t n = 0; n < a->parts; n++) {
        RETURN_IF_ERROR(
            attn__tensor_check("o_parts", &a->o_parts[n], a->batch, a->rows, a->heads, a->dim, a->dtype, false));
        INVALID_IF(!a->lse_parts[n], "lse_parts[%d]=NULL: want an array", n);
        INVALID_IF((uintptr_t)a->lse_parts[n] % real, "lse_parts[%d]=%p: want it aligned to %zu bytes", n, a->lse_parts[n],
                   real);
    }
    INVALID_IF((uintptr_t)a->lse % real, "lse=%p: want it aligned to %zu bytes", a->lse, real);
    return attn__tensor_check("o", &a->o, a->batch, a->rows, a->heads, a->dim, a->out_dtype, true);
}

/* One row: a part weighs exp(lse_p - lse); parts with nothing in them are not read. */
static void merge_row(const attn_merge_args *a, int32_t b, int32_t row, int32_t h) {
    attn_dtype real = attn__real_dtype(a->dtype);
    int64_t at = ((int64_t)b * a->heads + h) * a->rows + row;
    double most = -INFINITY, sum = 0, out[ATTN_MAX_DIM] = {0};
    for (int32_t n = 0; n < a->parts; n++) {
        double lse = attn__load(real, a->lse_parts[n], at);
        if (lse > most || lse != lse) most = lse;
    }
    for (int32_t n = 0; n < a->parts; n++) {
        double lse = attn__load(real, a->lse_parts[n], at);
        if (lse == -INFINITY) continue;
        double weight = exp(lse - most);
        const attn_tensor *t = &a->o_parts[n];
        int64_t from = b * t->stride[0] + row * t->stride[1] + h * t->stride[2];
        sum += weight;
        for (int32_t x = 0; x < a->dim; x++) out[x] += weight * attn__load(a->dtype, t->data, from + x);
    }
    int64_t to = b * a->o.stride[0] + row * a->o.stride[1] + h * a->o.stride[2];
    for (int32_t x = 0; x < a->dim; x++) attn__store(a->out_dtype, a->o.data, to + x, sum == 0 ? 0 : out[x] / sum);
    if (a->lse) attn__store(real, a->lse, at, sum == 0 ? -INFINITY : most + log(sum));
}

static void merge_rows(void *arg, int64_t index, int32_t slot) {
    const attn_merge_args *a = arg;
    (void)slot;
    for (int32_t row = 0; row < a->rows; row++) merge_row(a, (int32_t)(index / a->heads), row, (int32_t)(index % a->heads));
}

attn_status attn__host_merge(attn_context *context, const attn_merge_args *args, void *stream) {
    attn_merge_args a = *args;
    (void)stream;
    return attn__parallel(context, attn_context_threads(context), (int64_t)a.batch * a.heads, merge_rows, &a);
}

/* ---- rotary ---- */

/* Where sequences lie and for which positions they are rotated. */
static attn_status check_positions(const attn_rotary_args *a) {
    for (int32_t b = 0; b < a->batch; b++) {
        int64_t rows = a->rows;
        if (a->cu) {
            INVALID_IF(a->cu[b] < 0 || a->cu[b + 1] < a->cu[b] || a->cu[b + 1] > a->total,
                       "cu[%d]=%d: want ascending offsets up to total=%lld", b + 1, a->cu[b + 1], (long long)a->total);
            rows = a->cu[b + 1] - a->cu[b];
            INVALID_IF(rows > a->rows, "cu[%d]=%d: sequence %d has %lld rows, more than rows=%d", b + 1, a->cu[b + 1], b,
                       (long long)rows, a->rows);
        }
        int64_t first = a->pos ? a->pos[b] : 0;
        INVALID_IF(first < 0 || (rows > 0 && first + rows > a->rotary_len),
                   "pos[%d]=%lld: %lld rows from there, and rotary_len=%d", b, (long long)first, (long long)rows,
                   a->rotary_len);
    }
    return ATTN_OK;
}

attn_status attn__rotary_check(attn_rotary_args *a, const attn_rotary_args *args, bool host) {
    INVALID_IF(!args, "args=NULL: want an attn_rotary_args");
    RETURN_IF_ERROR(attn__struct_load(a, args, sizeof *a, ATTN_ROTARY_FIRST_SIZE, "attn_rotary_args"));
    INVALID_IF(!attn__is_float(a->dtype), "dtype=%d: want ATTN_F32, F16, BF16 or F64", (int)a->dtype);
    if (a->rotary_dtype == ATTN_DTYPE_DEFAULT) a->rotary_dtype = a->dtype;
    INVALID_IF(!attn__is_float(a->rotary_dtype), "rotary_dtype=%d: want ATTN_F32, F16, BF16 or F64", (int)a->rotary_dtype);
    RETURN_IF_ERROR(check_shape(a->batch, a->rows, a->heads, a->dim));
    INVALID_IF(a->rotary_dim < 2 || a->rotary_dim % 2 || a->rotary_dim > a->dim,
               "rotary_dim=%d: want an even number from 2 to dim, which is %d", a->rotary_dim, a->dim);
    INVALID_IF(a->rotary_len < 0, "rotary_len=%d: want 0 or more", a->rotary_len);
    INVALID_IF(a->interleaved != 0 && a->interleaved != 1, "interleaved=%d: want 0 or 1", a->interleaved);
    INVALID_IF(a->inverse != 0 && a->inverse != 1, "inverse=%d: want 0 or 1", a->inverse);
    INVALID_IF(!a->cu && a->total, "total=%lld: want 0 without cu", (long long)a->total);
    INVALID_IF(a->total < 0 || a->total > INT32_MAX, "total=%lld: want 0 to 2^31 - 1", (long long)a->total);
    int64_t batch = a->cu ? a->batch > 0 : a->batch, rows = a->cu ? a->total : a->rows;
    if (batch == 0 || rows == 0) return host && a->cu ? check_positions(a) : ATTN_OK;
    RETURN_IF_ERROR(attn__tensor_check("x", &a->x, batch, rows, a->heads, a->dim, a->dtype, false));
    RETURN_IF_ERROR(attn__tensor_check("y", &a->y, batch, rows, a->heads, a->dim, a->dtype, true));
    INVALID_IF(a->rotary_len && !a->cos, "cos=NULL: want %d rows", a->rotary_len);
    INVALID_IF(a->rotary_len && !a->sin, "sin=NULL: want %d rows", a->rotary_len);
    size_t element = attn_dtype_size(a->rotary_dtype);
    INVALID_IF((uintptr_t)a->cos % element, "cos=%p: want it aligned to %zu bytes", a->cos, element);
    INVALID_IF((uintptr_t)a->sin % element, "sin=%p: want it aligned to %zu bytes", a->sin, element);
    return host ? check_positions(a) : ATTN_OK;
}

static void rotary_sequence(void *arg, int64_t index, int32_t slot) {
    const attn_rotary_args *a = arg;
    int32_t b = (int32_t)(index / a->heads), h = (int32_t)(index % a->heads);
    int64_t first = a->cu ? a->cu[b] : 0, rows = a->cu ? a->cu[b + 1] - first : a->rows, pos = a->pos ? a->pos[b] : 0;
    (void)slot;
    for (int64_t row = 0; row < rows; row++) {
        double x[ATTN_MAX_DIM];
        int64_t from = (a->cu ? 0 : b * a->x.stride[0]) + (first + row) * a->x.stride[1] + h * a->x.stride[2];
        int64_t to = (a->cu ? 0 : b * a->y.stride[0]) + (first + row) * a->y.stride[1] + h * a->y.stride[2];
        for (int32_t n = 0; n < a->dim; n++) x[n] = attn__load(a->dtype, a->x.data, from + n);
        attn_rotation r = {.dtype = a->dtype,
                           .table_dtype = a->rotary_dtype,
                           .cos = a->cos,
                           .sin = a->sin,
                           .table_row = (pos + row) * (a->rotary_dim / 2),
                           .rotary_dim = a->rotary_dim,
                           .interleaved = a->interleaved,
                           .inverse = a->inverse};
        attn__rotate(&r, x);
        for (int32_t n = 0; n < a->dim; n++) attn__store(a->dtype, a->y.data, to + n, x[n]);
    }
}

attn_status attn__host_rotary(attn_context *context, const attn_rotary_args *args, void *stream) {
    attn_rotary_args a = *args;
    (void)stream;
    if (a.batch == 0 || (a.cu ? a.total : a.rows) == 0) return ATTN_OK;
    return attn__parallel(context, attn_context_threads(context), (int64_t)a.batch * a.heads, rotary_sequence, &a);
}
