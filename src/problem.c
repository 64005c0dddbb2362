/*
 * Validation of problems: every field is checked in the order of the header, every default is filled in, and an error names
 * the field, its value and what would do. Nothing else in the library looks at an unresolved problem.
 */
#include "internal.h"

#include <math.h>
#include <string.h>

#include "host.h"

enum { MAX_LENGTH = 1 << 30 };
#define MAX_NUMBER 1e30 /* of scale and softcap: far inside the range of float */

#define ALL_FLAGS ((ATTN_DESCALE_PAGES << 1) - 1)
#define APPEND_FLAGS                                                                                                       \
    (ATTN_CAUSAL | ATTN_WINDOW | ATTN_SCALE | ATTN_VARLEN_KV | ATTN_USED_KV | ATTN_LEFTPAD | ATTN_BATCH_INDEX |            \
     ATTN_APPEND | ATTN_VARLEN_NEW | ATTN_ROTARY | ATTN_ROTARY_INTERLEAVED | ATTN_ROTARY_POS | ATTN_DESCALE |              \
     ATTN_DESCALE_PAGES)

#define UNSUPPORTED_IF(condition, ...) RETURN_IF(condition, ATTN_UNSUPPORTED, __VA_ARGS__)

attn_status attn__struct_load(void *to, const void *from, size_t known, size_t first, const char *name) {
    enum { MOST = 1 << 16 };
    size_t size;
    memcpy(&size, from, sizeof size);
    INVALID_IF(size < first || size > MOST, "size=%zu: set it to sizeof(%s), %zu here", size, name, known);
    for (size_t n = known; n < size; n++) {
        INVALID_IF(((const char *)from)[n], "size=%zu: byte %zu of %s is set, and this library knows only %zu of them",
                   size, n, name, known);
    }
    memset(to, 0, known);
    memcpy(to, from, size < known ? size : known);
    memcpy(to, &known, sizeof known);
    return ATTN_OK;
}

static bool is_fp8(attn_dtype d) { return d == ATTN_E4M3 || d == ATTN_E5M2; }

static attn_status resolve_dtypes(attn_problem *p) {
    INVALID_IF(!attn__is_float(p->dtype) && !is_fp8(p->dtype), "dtype=%d: want ATTN_F32, F16, BF16, F64, E4M3 or E5M2",
               (int)p->dtype);
    if (p->kv_dtype == ATTN_DTYPE_DEFAULT) p->kv_dtype = p->dtype;
    INVALID_IF(attn_dtype_size(p->kv_dtype) == 0, "kv_dtype=%d: no such dtype", (int)p->kv_dtype);
    INVALID_IF((p->kv_dtype == ATTN_F64) != (p->dtype == ATTN_F64),
               "kv_dtype=%s: f64 goes with dtype f64 only, which is %s", attn_dtype_name(p->kv_dtype),
               attn_dtype_name(p->dtype));
    if (p->out_dtype == ATTN_DTYPE_DEFAULT) p->out_dtype = is_fp8(p->dtype) ? ATTN_BF16 : p->dtype;
    INVALID_IF(!attn__is_float(p->out_dtype), "out_dtype=%d: want ATTN_F32, F16, BF16 or F64", (int)p->out_dtype);
    INVALID_IF((p->out_dtype == ATTN_F64) != (p->dtype == ATTN_F64),
               "out_dtype=%s: f64 goes with dtype f64 only, which is %s", attn_dtype_name(p->out_dtype),
               attn_dtype_name(p->dtype));
    attn_dtype table = is_fp8(p->dtype) ? ATTN_F32 : p->dtype;
    if (p->bias_dtype == ATTN_DTYPE_DEFAULT) p->bias_dtype = table;
    INVALID_IF(!attn__is_float(p->bias_dtype), "bias_dtype=%d: want ATTN_F32, F16, BF16 or F64", (int)p->bias_dtype);
    if (p->rotary_dtype == ATTN_DTYPE_DEFAULT) p->rotary_dtype = table;
    INVALID_IF(!attn__is_float(p->rotary_dtype), "rotary_dtype=%d: want ATTN_F32, F16, BF16 or F64", (int)p->rotary_dtype);
    bool narrow = is_fp8(p->dtype) || is_fp8(p->kv_dtype) || p->kv_dtype == ATTN_I8;
    UNSUPPORTED_IF(narrow && p->op == ATTN_BACKWARD, "kv_dtype=%s: 8-bit dtypes have no backward; use f32, f16 or bf16",
                   attn_dtype_name(p->kv_dtype));
    return ATTN_OK;
}

static attn_status check_flags(const attn_problem *p) {
    INVALID_IF(p->flags & ~ALL_FLAGS, "flags=0x%x: unknown bits 0x%x", (unsigned)p->flags,
               (unsigned)(p->flags & ~ALL_FLAGS));
    INVALID_IF(p->op == ATTN_KV_APPEND && (p->flags & ~APPEND_FLAGS),
               "flags=0x%x: bits 0x%x mean nothing to ATTN_KV_APPEND", (unsigned)p->flags,
               (unsigned)(p->flags & ~APPEND_FLAGS));
    INVALID_IF((p->flags & ATTN_PRECISE) && p->dtype != ATTN_F32 && p->dtype != ATTN_F64,
               "flags=0x%x: ATTN_PRECISE is for dtype f32 and f64, which is %s", (unsigned)p->flags,
               attn_dtype_name(p->dtype));
    INVALID_IF((p->flags & ATTN_PRECISE_FEW) &&
                   ((p->dtype != ATTN_F32 && p->dtype != ATTN_F64) || (p->flags & ATTN_PRECISE)),
               "flags=0x%x: ATTN_PRECISE_FEW is for dtype f32 and f64, which is %s, without ATTN_PRECISE",
               (unsigned)p->flags, attn_dtype_name(p->dtype));
    uint32_t inference = ATTN_APPEND | ATTN_BATCH_INDEX | ATTN_DESCALE;
    UNSUPPORTED_IF(p->op == ATTN_BACKWARD && (p->flags & inference),
                   "flags=0x%x: ATTN_APPEND, ATTN_BATCH_INDEX and ATTN_DESCALE have no backward", (unsigned)p->flags);
    INVALID_IF((p->flags & ATTN_DESCALE_PAGES) && (!(p->flags & ATTN_DESCALE) || p->page_size == 0),
               "flags=0x%x: ATTN_DESCALE_PAGES wants ATTN_DESCALE and a page_size", (unsigned)p->flags);
    uint32_t of_append = ATTN_VARLEN_NEW | ATTN_ROTARY;
    INVALID_IF((p->flags & of_append) && !(p->flags & ATTN_APPEND),
               "flags=0x%x: ATTN_VARLEN_NEW and ATTN_ROTARY want ATTN_APPEND (attn_rotary rotates by itself)",
               (unsigned)p->flags);
    uint32_t of_rotary = ATTN_ROTARY_INTERLEAVED | ATTN_ROTARY_POS;
    INVALID_IF((p->flags & of_rotary) && !(p->flags & ATTN_ROTARY),
               "flags=0x%x: ATTN_ROTARY_INTERLEAVED and ATTN_ROTARY_POS want ATTN_ROTARY", (unsigned)p->flags);
    INVALID_IF((p->flags & ATTN_APPEND) && !(p->flags & ATTN_USED_KV),
               "flags=0x%x: ATTN_APPEND wants ATTN_USED_KV, to know where to write", (unsigned)p->flags);
    INVALID_IF((p->flags & ATTN_VARLEN_KV) && (p->flags & ATTN_BATCH_INDEX),
               "flags=0x%x: ATTN_BATCH_INDEX is for a cache with slots, not for ATTN_VARLEN_KV", (unsigned)p->flags);
    return ATTN_OK;
}

/* Is a*b*c at most 2^48? Keeps every byte count far from overflow. */
static bool product_fits(int64_t a, int64_t b, int64_t c) {
    int64_t ab, abc;
    return !__builtin_mul_overflow(a, b, &ab) && !__builtin_mul_overflow(ab, c, &abc) && abc <= INT64_C(1) << 48;
}

static attn_status resolve_sizes(attn_problem *p) {
    INVALID_IF(p->batch < 0, "batch=%d: want 0 or more", p->batch);
    INVALID_IF(p->heads_q < 1, "heads_q=%d: want 1 or more", p->heads_q);
    INVALID_IF(p->heads_kv < 1, "heads_kv=%d: want 1 or more", p->heads_kv);
    INVALID_IF(p->heads_q % p->heads_kv, "heads_q=%d: want a multiple of heads_kv, which is %d", p->heads_q, p->heads_kv);
    INVALID_IF((int64_t)p->batch * p->heads_q > INT32_MAX, "batch=%d: batch * heads_q must stay below 2^31", p->batch);
    INVALID_IF(p->dim_qk < 1 || p->dim_qk > ATTN_MAX_DIM, "dim_qk=%d: want 1 to %d", p->dim_qk, ATTN_MAX_DIM);
    if (p->dim_v == 0) p->dim_v = p->dim_qk;
    INVALID_IF(p->dim_v < 1 || p->dim_v > ATTN_MAX_DIM, "dim_v=%d: want 1 to %d, or 0 for dim_qk", p->dim_v, ATTN_MAX_DIM);
    INVALID_IF(p->max_q < 0 || p->max_q > MAX_LENGTH, "max_q=%d: want 0 to %d", p->max_q, MAX_LENGTH);
    INVALID_IF(p->max_kv < 0 || p->max_kv > MAX_LENGTH, "max_kv=%d: want 0 to %d", p->max_kv, MAX_LENGTH);
    INVALID_IF(!product_fits(p->batch, p->heads_q, p->max_q), "max_q=%d: batch * heads_q * max_q must be at most 2^48",
               p->max_q);
    INVALID_IF(!product_fits(p->batch, p->heads_kv * 4LL, p->max_kv),
               "max_kv=%d: batch * heads_kv * max_kv must be at most 2^46", p->max_kv);
    struct {
        const char *name, *flag_name;
        uint32_t flag;
        int64_t value;
    } const totals[] = {{"total_q", "ATTN_VARLEN_Q", ATTN_VARLEN_Q, p->total_q},
                        {"total_kv", "ATTN_VARLEN_KV", ATTN_VARLEN_KV, p->total_kv},
                        {"total_new", "ATTN_VARLEN_NEW", ATTN_VARLEN_NEW, p->total_new}};
    for (int n = 0; n < 3; n++) {
        bool on = (p->flags & totals[n].flag) != 0;
        INVALID_IF(on && (totals[n].value < 0 || totals[n].value > INT32_MAX), "%s=%lld: want 0 to 2^31 - 1",
                   totals[n].name, (long long)totals[n].value);
        INVALID_IF(!on && totals[n].value, "%s=%lld: want 0 without %s", totals[n].name, (long long)totals[n].value,
                   totals[n].flag_name);
    }
    return ATTN_OK;
}

static attn_status resolve_mask(attn_problem *p) {
    if (p->flags & ATTN_WINDOW) {
        INVALID_IF(p->window_left < -1, "window_left=%d: want -1 (open) or more", p->window_left);
        INVALID_IF(p->window_right < -1, "window_right=%d: want -1 (open) or more", p->window_right);
    } else {
        INVALID_IF(p->window_left, "window_left=%d: want 0 without ATTN_WINDOW", p->window_left);
        INVALID_IF(p->window_right, "window_right=%d: want 0 without ATTN_WINDOW", p->window_right);
    }
    int32_t n = p->flashmask_vectors;
    if (p->flags & ATTN_CAUSAL)
        INVALID_IF(n < 0 || n > 2, "flashmask_vectors=%d: want 0, 1 or 2 with ATTN_CAUSAL", n);
    else
        INVALID_IF(n != 0 && n != 2 && n != 4, "flashmask_vectors=%d: want 0, 2 or 4 without ATTN_CAUSAL", n);
    if (n && p->flashmask_heads == 0) p->flashmask_heads = 1;
    INVALID_IF(!n && p->flashmask_heads, "flashmask_heads=%d: want 0 without flashmask_vectors", p->flashmask_heads);
    INVALID_IF(n && p->flashmask_heads != 1 && p->flashmask_heads != p->heads_kv,
               "flashmask_heads=%d: want 1 or heads_kv, which is %d", p->flashmask_heads, p->heads_kv);
    INVALID_IF(n && p->op == ATTN_KV_APPEND, "flashmask_vectors=%d: means nothing to ATTN_KV_APPEND", n);
    return ATTN_OK;
}

static attn_status resolve_cache(attn_problem *p) {
    INVALID_IF(p->page_size < 0, "page_size=%d: want 0 (not paged) or more", p->page_size);
    INVALID_IF(p->num_pages < 0, "num_pages=%d: want 0 or more", p->num_pages);
    INVALID_IF(!p->page_size && p->num_pages, "num_pages=%d: want 0 without page_size", p->num_pages);
    INVALID_IF(p->page_size && (p->flags & ATTN_VARLEN_KV),
               "page_size=%d: a cache is paged or packed (ATTN_VARLEN_KV), not both", p->page_size);
    UNSUPPORTED_IF(p->page_size && p->op == ATTN_BACKWARD,
                   "page_size=%d: a paged cache has no backward, since sequences may share pages", p->page_size);
    if (p->flags & ATTN_BATCH_INDEX) {
        INVALID_IF(p->cache_batch < 0 || (p->cache_batch == 0 && p->batch > 0), "cache_batch=%d: want the number of slots",
                   p->cache_batch);
    } else {
        INVALID_IF(p->cache_batch, "cache_batch=%d: want 0 without ATTN_BATCH_INDEX", p->cache_batch);
        p->cache_batch = p->batch;
    }
    if (p->flags & ATTN_APPEND)
        INVALID_IF(p->max_new < 0 || p->max_new > MAX_LENGTH, "max_new=%d: want 0 to %d", p->max_new, MAX_LENGTH);
    else
        INVALID_IF(p->max_new, "max_new=%d: want 0 without ATTN_APPEND", p->max_new);
    if (p->flags & ATTN_ROTARY) {
        INVALID_IF(p->rotary_dim < 2 || p->rotary_dim % 2 || p->rotary_dim > p->dim_qk,
                   "rotary_dim=%d: want an even number from 2 to dim_qk, which is %d", p->rotary_dim, p->dim_qk);
        INVALID_IF(p->rotary_len < 0, "rotary_len=%d: want 0 or more", p->rotary_len);
    } else {
        INVALID_IF(p->rotary_dim, "rotary_dim=%d: want 0 without ATTN_ROTARY", p->rotary_dim);
        INVALID_IF(p->rotary_len, "rotary_len=%d: want 0 without ATTN_ROTARY", p->rotary_len);
    }
    return ATTN_OK;
}

static attn_status resolve_numbers(attn_problem *p) {
    if (p->flags & ATTN_SCALE) {
        INVALID_IF(!(fabs(p->scale) <= MAX_NUMBER), "scale=%g: want a number from -%g to %g", p->scale, MAX_NUMBER,
                   MAX_NUMBER);
    } else {
        INVALID_IF(p->scale != 0, "scale=%g: want 0 without ATTN_SCALE", p->scale);
        p->scale = 1.0 / sqrt(p->dim_qk);
        p->flags |= ATTN_SCALE;
    }
    INVALID_IF(p->softcap != 0 && !(p->softcap >= 1 / MAX_NUMBER && p->softcap <= MAX_NUMBER),
               "softcap=%g: want 0 (none) or a number from %g to %g", p->softcap, 1 / MAX_NUMBER, MAX_NUMBER);
    INVALID_IF(!(p->dropout >= 0 && p->dropout < 1), "dropout=%g: want 0 to below 1", p->dropout);
    INVALID_IF(p->op == ATTN_KV_APPEND && p->softcap > 0, "softcap=%g: means nothing to ATTN_KV_APPEND", p->softcap);
    INVALID_IF(p->op == ATTN_KV_APPEND && p->dropout > 0, "dropout=%g: means nothing to ATTN_KV_APPEND", p->dropout);
    return ATTN_OK;
}

attn_status attn__problem_resolve(attn_problem *p, const attn_problem *problem) {
    INVALID_IF(!problem, "problem=NULL: want an attn_problem");
    RETURN_IF_ERROR(attn__struct_load(p, problem, sizeof *p, ATTN_PROBLEM_FIRST_SIZE, "attn_problem"));
    INVALID_IF(p->op != ATTN_FORWARD && p->op != ATTN_BACKWARD && p->op != ATTN_KV_APPEND,
               "op=%d: want ATTN_FORWARD, ATTN_BACKWARD or ATTN_KV_APPEND", (int)p->op);
    if (p->op == ATTN_KV_APPEND) p->flags |= ATTN_APPEND;
    RETURN_IF_ERROR(resolve_dtypes(p));
    RETURN_IF_ERROR(check_flags(p));
    RETURN_IF_ERROR(resolve_sizes(p));
    RETURN_IF_ERROR(resolve_mask(p));
    RETURN_IF_ERROR(resolve_cache(p));
    return resolve_numbers(p);
}
