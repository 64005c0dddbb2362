/*
 * C3: wrong calls. Each starts from a legal call, changes one thing, and must come back with its status and a detail text that
 * names the field and its value, before any output byte has changed. A case is one line:
 *
 *     WRONG(FORM, ATTN_INVALID, "field=value", the change)
 *
 * with p the problem, f the buffers, and INTS(name) an integer array of the buffers that may be written to. Every case goes
 * through the one-shot call and through plan and run, on `ref` and on `cpu`.
 */
#define _GNU_SOURCE
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "build.h"
#include "test.h"

enum { B = 2, HQ = 4, HKV = 2, SQ = 6, SK = 16, D = 8, NEW = 3, PAGE = 4, PAGES = 10, ROTARY_LEN = 20 };

/* The legal calls that the cases start from. */
typedef enum form_id {
    PLAIN,
    RICH,
    BACKWARD,
    VARLEN,
    USED,
    PAGED,
    APPEND,
    PACKED_APPEND,
    KV_APPEND,
    FLASH,
    FP8,
    FORMS
} form_id;

typedef struct wrong_call {
    rig r;
    struct {
        attn_problem p;
        char tail[64]; /* so that a size that is too large can be told with memory behind it */
    } problem;
    struct {
        attn_buffers f;
        char tail[64];
    } buffers;
    attn_status status;
    const char *detail, *text;
} wrong_call;

static rig form(form_id id) {
    rig r = {.p = problem(ATTN_F32, B, HQ, HKV, SQ, SK, D)};
    switch (id) {
    case PLAIN: break;
    case RICH: r.p.flags = ATTN_ALIBI | ATTN_BIAS | ATTN_SINK | ATTN_WINDOW; break;
    case BACKWARD:
        r.p.op = ATTN_BACKWARD;
        r.p.flags = ATTN_BIAS | ATTN_SINK;
        break;
    case VARLEN:
        r.p.flags = ATTN_VARLEN_Q | ATTN_VARLEN_KV;
        r.p.total_q = 2 * SQ, r.p.total_kv = 2 * SK;
        break;
    case USED: r.p.flags = ATTN_USED_Q | ATTN_USED_KV | ATTN_LEFTPAD; break;
    case PAGED:
        r.p.flags = ATTN_USED_KV;
        r.p.page_size = PAGE, r.p.num_pages = PAGES;
        break;
    case KV_APPEND: r.p.op = ATTN_KV_APPEND; /* fall through */
    case APPEND:
        r.p.flags = ATTN_APPEND | ATTN_USED_KV | ATTN_ROTARY | ATTN_ROTARY_POS | ATTN_BATCH_INDEX;
        r.p.max_new = NEW, r.p.cache_batch = 3, r.p.rotary_dim = 4, r.p.rotary_len = ROTARY_LEN;
        break;
    case PACKED_APPEND:
        r.p.flags = ATTN_APPEND | ATTN_USED_KV | ATTN_VARLEN_NEW | ATTN_ROTARY;
        r.p.max_new = NEW, r.p.total_new = 2 * NEW, r.p.rotary_dim = 4, r.p.rotary_len = ROTARY_LEN;
        break;
    case FLASH:
        r.p.flags = ATTN_CAUSAL;
        r.p.flashmask_vectors = 1;
        break;
    case FP8:
        r.p.dtype = ATTN_E4M3;
        r.p.flags = ATTN_DESCALE;
        break;
    case FORMS: break;
    }
    return r;
}

static void start(wrong_call *c, form_id id, attn_status status, const char *detail, const char *text) {
    *c = (wrong_call){.r = form(id), .status = status, .detail = detail, .text = text};
    CHECK(rig_make(&c->r, 1));
    c->problem.p = c->r.p;
    c->buffers.f = c->r.p.op == ATTN_BACKWARD ? rig_backward_buffers(&c->r) : rig_forward_buffers(&c->r);
}

#define INTS(name) ((int32_t *)(uintptr_t)f->name)
#define SHIFTED(name, bytes) (void *)((char *)(uintptr_t)f->name + (bytes))
#define WRONG(form, expected, field, ...)                                                                                  \
    if (at++ == wanted) {                                                                                                  \
        start(c, form, expected, field, #__VA_ARGS__);                                                                     \
        __VA_ARGS__;                                                                                                       \
        return true;                                                                                                       \
    }
#define WRONG_BEGIN                                                                                                        \
    attn_problem *p = &c->problem.p;                                                                                       \
    attn_buffers *f = &c->buffers.f;                                                                                       \
    int at = 0;                                                                                                            \
    (void)p, (void)f;

static bool wrong_sizes(int wanted, wrong_call *c) {
    WRONG_BEGIN
    WRONG(PLAIN, ATTN_INVALID, "size=0", p->size = 0)
    WRONG(PLAIN, ATTN_INVALID, "size=8", p->size = 8)
    WRONG(PLAIN, ATTN_INVALID, "size=", p->size = sizeof *p + 64, c->problem.tail[5] = 1)
    WRONG(PLAIN, ATTN_INVALID, "size=", p->size = SIZE_MAX)
    WRONG(PLAIN, ATTN_INVALID, "size=0", f->size = 0)
    WRONG(PLAIN, ATTN_INVALID, "size=", f->size = sizeof *f / 2)
    WRONG(PLAIN, ATTN_INVALID, "size=", f->size = sizeof *f + 64, c->buffers.tail[63] = 1)
    WRONG(PLAIN, ATTN_INVALID, "op=3", p->op = (attn_op)3)
    WRONG(PLAIN, ATTN_INVALID, "op=-1", p->op = (attn_op)-1)
    WRONG(PLAIN, ATTN_INVALID, "batch=-1", p->batch = -1)
    WRONG(PLAIN, ATTN_INVALID, "batch=2147483647", p->batch = INT32_MAX)
    WRONG(PLAIN, ATTN_INVALID, "heads_q=0", p->heads_q = 0)
    WRONG(PLAIN, ATTN_INVALID, "heads_q=-4", p->heads_q = -4)
    WRONG(PLAIN, ATTN_INVALID, "heads_q=5", p->heads_q = 5)
    WRONG(PLAIN, ATTN_INVALID, "heads_kv=0", p->heads_kv = 0)
    WRONG(PLAIN, ATTN_INVALID, "heads_kv=-2", p->heads_kv = -2)
    WRONG(PLAIN, ATTN_INVALID, "heads_q=4: want a multiple of heads_kv, which is 8", p->heads_kv = 8)
    WRONG(PLAIN, ATTN_INVALID, "dim_qk=0", p->dim_qk = 0)
    WRONG(PLAIN, ATTN_INVALID, "dim_qk=-8", p->dim_qk = -8)
    WRONG(PLAIN, ATTN_INVALID, "dim_qk=577", p->dim_qk = 577)
    WRONG(PLAIN, ATTN_INVALID, "dim_v=577", p->dim_v = 577)
    WRONG(PLAIN, ATTN_INVALID, "dim_v=-1", p->dim_v = -1)
    WRONG(PLAIN, ATTN_INVALID, "max_q=-1", p->max_q = -1)
    WRONG(PLAIN, ATTN_INVALID, "max_q=1073741825", p->max_q = (1 << 30) + 1)
    WRONG(PLAIN, ATTN_INVALID, "max_kv=-1", p->max_kv = -1)
    WRONG(PLAIN, ATTN_INVALID, "max_kv=2147483647", p->max_kv = INT32_MAX)
    WRONG(PLAIN, ATTN_INVALID, "max_q=1073741824", p->max_q = 1 << 30, p->batch = 1 << 20)
    WRONG(PLAIN, ATTN_INVALID, "max_kv=1073741824", p->max_kv = 1 << 30, p->batch = 1 << 20)
    WRONG(VARLEN, ATTN_INVALID, "total_q=-1", p->total_q = -1)
    WRONG(VARLEN, ATTN_INVALID, "total_q=4294967296", p->total_q = INT64_C(1) << 32)
    WRONG(VARLEN, ATTN_INVALID, "total_kv=-7", p->total_kv = -7)
    WRONG(PLAIN, ATTN_INVALID, "total_q=12", p->total_q = 12)
    WRONG(PLAIN, ATTN_INVALID, "total_kv=5", p->total_kv = 5)
    WRONG(PLAIN, ATTN_INVALID, "total_new=5", p->total_new = 5)
    return false;
}

static bool wrong_dtypes(int wanted, wrong_call *c) {
    WRONG_BEGIN
    WRONG(PLAIN, ATTN_INVALID, "dtype=0", p->dtype = ATTN_DTYPE_DEFAULT)
    WRONG(PLAIN, ATTN_INVALID, "dtype=7", p->dtype = ATTN_I8)
    WRONG(PLAIN, ATTN_INVALID, "dtype=99", p->dtype = (attn_dtype)99)
    WRONG(PLAIN, ATTN_INVALID, "kv_dtype=99", p->kv_dtype = (attn_dtype)99)
    WRONG(PLAIN, ATTN_INVALID, "kv_dtype=f64", p->kv_dtype = ATTN_F64)
    WRONG(PLAIN, ATTN_INVALID, "kv_dtype=f32", p->dtype = ATTN_F64, p->kv_dtype = ATTN_F32)
    WRONG(PLAIN, ATTN_INVALID, "out_dtype=f64", p->out_dtype = ATTN_F64)
    WRONG(PLAIN, ATTN_INVALID, "out_dtype=bf16", p->dtype = ATTN_F64, p->out_dtype = ATTN_BF16)
    WRONG(PLAIN, ATTN_INVALID, "out_dtype=5", p->out_dtype = ATTN_E4M3)
    WRONG(PLAIN, ATTN_INVALID, "out_dtype=-1", p->out_dtype = (attn_dtype)-1)
    WRONG(RICH, ATTN_INVALID, "bias_dtype=6", p->bias_dtype = ATTN_E5M2)
    WRONG(RICH, ATTN_INVALID, "bias_dtype=8", p->bias_dtype = (attn_dtype)8)
    WRONG(APPEND, ATTN_INVALID, "rotary_dtype=7", p->rotary_dtype = ATTN_I8)
    WRONG(BACKWARD, ATTN_UNSUPPORTED, "kv_dtype=e4m3", p->dtype = ATTN_E4M3)
    WRONG(BACKWARD, ATTN_UNSUPPORTED, "kv_dtype=i8", p->kv_dtype = ATTN_I8)
    WRONG(PLAIN, ATTN_INVALID, "scale=nan", p->flags = ATTN_SCALE, p->scale = NAN)
    WRONG(PLAIN, ATTN_INVALID, "scale=inf", p->flags = ATTN_SCALE, p->scale = INFINITY)
    WRONG(PLAIN, ATTN_INVALID, "scale=-inf", p->flags = ATTN_SCALE, p->scale = -INFINITY)
    WRONG(PLAIN, ATTN_INVALID, "scale=0.5", p->scale = 0.5)
    WRONG(PLAIN, ATTN_INVALID, "scale=nan", p->scale = NAN)
    WRONG(PLAIN, ATTN_INVALID, "softcap=-1", p->softcap = -1)
    WRONG(PLAIN, ATTN_INVALID, "softcap=nan", p->softcap = NAN)
    WRONG(PLAIN, ATTN_INVALID, "softcap=inf", p->softcap = INFINITY)
    WRONG(PLAIN, ATTN_INVALID, "dropout=1", p->dropout = 1)
    WRONG(PLAIN, ATTN_INVALID, "dropout=-0.1", p->dropout = -0.1)
    WRONG(PLAIN, ATTN_INVALID, "dropout=nan", p->dropout = NAN)
    WRONG(PLAIN, ATTN_INVALID, "dropout=inf", p->dropout = INFINITY)
    WRONG(KV_APPEND, ATTN_INVALID, "softcap=2", p->softcap = 2)
    WRONG(KV_APPEND, ATTN_INVALID, "dropout=0.5", p->dropout = 0.5)
    return false;
}

static bool wrong_flags(int wanted, wrong_call *c) {
    WRONG_BEGIN
    WRONG(PLAIN, ATTN_INVALID, "flags=0x80000000", p->flags = UINT32_C(1) << 31)
    WRONG(PLAIN, ATTN_INVALID, "flags=0x200000", p->flags = ATTN_PRECISE_FEW << 1)
    WRONG(PLAIN, ATTN_INVALID, "flags=0x40000: ATTN_PRECISE", p->flags = ATTN_PRECISE, p->dtype = ATTN_BF16)
    WRONG(PLAIN, ATTN_INVALID, "flags=0x100000: ATTN_PRECISE_FEW", p->flags = ATTN_PRECISE_FEW, p->dtype = ATTN_BF16)
    WRONG(PLAIN, ATTN_INVALID, "flags=0x140000: ATTN_PRECISE_FEW", p->flags = ATTN_PRECISE_FEW | ATTN_PRECISE)
    WRONG(KV_APPEND, ATTN_INVALID, "flags=0x", p->flags |= ATTN_BIAS)
    WRONG(PLAIN, ATTN_INVALID, "flags=0x4000", p->flags = ATTN_ROTARY)
    WRONG(PLAIN, ATTN_INVALID, "flags=0x2000", p->flags = ATTN_VARLEN_NEW)
    WRONG(PLAIN, ATTN_INVALID, "flags=0x1000", p->flags = ATTN_APPEND)
    WRONG(PACKED_APPEND, ATTN_INVALID, "flags=0x", p->flags ^= ATTN_ROTARY | ATTN_ROTARY_INTERLEAVED)
    WRONG(PACKED_APPEND, ATTN_INVALID, "flags=0x", p->flags ^= ATTN_ROTARY | ATTN_ROTARY_POS)
    WRONG(APPEND, ATTN_INVALID, "flags=0x", p->flags |= ATTN_VARLEN_KV)
    WRONG(BACKWARD, ATTN_UNSUPPORTED, "flags=0x", p->flags |= ATTN_BATCH_INDEX)
    WRONG(BACKWARD, ATTN_UNSUPPORTED, "flags=0x", p->flags |= ATTN_DESCALE)
    WRONG(BACKWARD, ATTN_UNSUPPORTED, "flags=0x", p->flags |= ATTN_APPEND | ATTN_USED_KV)
    WRONG(BACKWARD, ATTN_UNSUPPORTED, "page_size=4", p->page_size = 4, p->num_pages = 8)
    WRONG(RICH, ATTN_INVALID, "window_left=-2", p->window_left = -2)
    WRONG(RICH, ATTN_INVALID, "window_right=-2147483648", p->window_right = INT32_MIN)
    WRONG(PLAIN, ATTN_INVALID, "window_left=1", p->window_left = 1)
    WRONG(PLAIN, ATTN_INVALID, "window_right=-1", p->window_right = -1)
    WRONG(FLASH, ATTN_INVALID, "flashmask_vectors=-1", p->flashmask_vectors = -1)
    WRONG(FLASH, ATTN_INVALID, "flashmask_vectors=3", p->flashmask_vectors = 3)
    WRONG(FLASH, ATTN_INVALID, "flashmask_vectors=4", p->flashmask_vectors = 4)
    WRONG(FLASH, ATTN_INVALID, "flashmask_vectors=1", p->flags = 0)
    WRONG(FLASH, ATTN_INVALID, "flashmask_vectors=3", p->flags = 0, p->flashmask_vectors = 3)
    WRONG(FLASH, ATTN_INVALID, "flashmask_vectors=5", p->flags = 0, p->flashmask_vectors = 5)
    WRONG(FLASH, ATTN_INVALID, "flashmask_heads=3", p->flashmask_heads = 3)
    WRONG(FLASH, ATTN_INVALID, "flashmask_heads=-1", p->flashmask_heads = -1)
    WRONG(PLAIN, ATTN_INVALID, "flashmask_heads=1", p->flashmask_heads = 1)
    WRONG(KV_APPEND, ATTN_INVALID, "flashmask_vectors=2", p->flashmask_vectors = 2)
    WRONG(PAGED, ATTN_INVALID, "page_size=-4", p->page_size = -4)
    WRONG(PAGED, ATTN_INVALID, "ATTN_DESCALE_PAGES wants ATTN_DESCALE", p->flags |= ATTN_DESCALE_PAGES)
    WRONG(FP8, ATTN_INVALID, "ATTN_DESCALE_PAGES wants ATTN_DESCALE and a page_size", p->flags |= ATTN_DESCALE_PAGES)
    WRONG(PAGED, ATTN_INVALID, "num_pages=-1", p->num_pages = -1)
    WRONG(PAGED, ATTN_INVALID, "num_pages=10", p->page_size = 0)
    WRONG(VARLEN, ATTN_INVALID, "page_size=4", p->page_size = 4)
    WRONG(APPEND, ATTN_INVALID, "cache_batch=0", p->cache_batch = 0)
    WRONG(APPEND, ATTN_INVALID, "cache_batch=-3", p->cache_batch = -3)
    WRONG(PLAIN, ATTN_INVALID, "cache_batch=2", p->cache_batch = 2)
    WRONG(APPEND, ATTN_INVALID, "max_new=-1", p->max_new = -1)
    WRONG(PLAIN, ATTN_INVALID, "max_new=3", p->max_new = 3)
    WRONG(APPEND, ATTN_INVALID, "rotary_dim=3", p->rotary_dim = 3)
    WRONG(APPEND, ATTN_INVALID, "rotary_dim=0", p->rotary_dim = 0)
    WRONG(APPEND, ATTN_INVALID, "rotary_dim=10", p->rotary_dim = 10)
    WRONG(APPEND, ATTN_INVALID, "rotary_len=-1", p->rotary_len = -1)
    WRONG(PLAIN, ATTN_INVALID, "rotary_dim=4", p->rotary_dim = 4)
    WRONG(PLAIN, ATTN_INVALID, "rotary_len=4", p->rotary_len = 4)
    return false;
}

static bool wrong_tensors(int wanted, wrong_call *c) {
    WRONG_BEGIN
    WRONG(PLAIN, ATTN_INVALID, "q.data=NULL", f->q.data = NULL)
    WRONG(PLAIN, ATTN_INVALID, "k.data=NULL", f->k.data = NULL)
    WRONG(PLAIN, ATTN_INVALID, "v.data=NULL", f->v.data = NULL)
    WRONG(PLAIN, ATTN_INVALID, "o.data=NULL", f->o.data = NULL)
    WRONG(BACKWARD, ATTN_INVALID, "d_o.data=NULL", f->d_o.data = NULL)
    WRONG(BACKWARD, ATTN_INVALID, "o.data=NULL", f->o.data = NULL)
    WRONG(BACKWARD, ATTN_INVALID, "lse=NULL", f->lse = NULL)
    WRONG(APPEND, ATTN_INVALID, "k_new.data=NULL", f->k_new.data = NULL)
    WRONG(APPEND, ATTN_INVALID, "v_new.data=NULL", f->v_new.data = NULL)
    WRONG(KV_APPEND, ATTN_INVALID, "k.data=NULL", f->k.data = NULL)
    WRONG(RICH, ATTN_INVALID, "bias.data=NULL", f->bias.data = NULL)
    WRONG(PLAIN, ATTN_INVALID, "q.data=", f->q.data = SHIFTED(q.data, 2))
    WRONG(PLAIN, ATTN_INVALID, "k.data=", f->k.data = SHIFTED(k.data, 1))
    WRONG(PLAIN, ATTN_INVALID, "v.data=", f->v.data = SHIFTED(v.data, 3))
    WRONG(PLAIN, ATTN_INVALID, "o.data=", f->o.data = SHIFTED(o.data, 2))
    WRONG(PLAIN, ATTN_INVALID, "lse=", f->lse = SHIFTED(lse, 1))
    WRONG(BACKWARD, ATTN_INVALID, "d_lse=", f->d_lse = SHIFTED(d_lse, 2))
    WRONG(BACKWARD, ATTN_INVALID, "d_q.data=", f->d_q.data = SHIFTED(d_q.data, 2))
    WRONG(BACKWARD, ATTN_INVALID, "d_sink=", f->d_sink = SHIFTED(d_sink, 2))
    WRONG(RICH, ATTN_INVALID, "bias.data=", f->bias.data = SHIFTED(bias.data, 1))
    WRONG(RICH, ATTN_INVALID, "alibi=", f->alibi = SHIFTED(alibi, 2))
    WRONG(APPEND, ATTN_INVALID, "rotary_cos=", f->rotary_cos = SHIFTED(rotary_cos, 1))
    WRONG(PLAIN, ATTN_INVALID, "o.stride=", f->o.stride[1] = 0)
    WRONG(PLAIN, ATTN_INVALID, "o.stride=", f->o.stride[2] = D - 1)
    WRONG(PLAIN, ATTN_INVALID, "o.stride=", f->o.stride[0] = 0)
    WRONG(PLAIN, ATTN_INVALID, "o.stride=", f->o.stride[0] = HQ * D)
    WRONG(BACKWARD, ATTN_INVALID, "d_q.stride=", f->d_q.stride[2] = 0)
    WRONG(BACKWARD, ATTN_INVALID, "d_k.stride=", f->d_k.stride[1] = 0)
    WRONG(BACKWARD, ATTN_INVALID, "d_v.stride=", f->d_v.stride[0] = 1)
    WRONG(BACKWARD, ATTN_INVALID, "d_bias.stride=", f->d_bias.stride[2] = 1)
    WRONG(APPEND, ATTN_INVALID, "k.stride=", f->k.stride[1] = 0)
    WRONG(KV_APPEND, ATTN_INVALID, "v.stride=", f->v.stride[2] = 0)
    WRONG(PLAIN, ATTN_INVALID, "q.stride=", f->q.stride[0] = INT64_MAX)
    WRONG(PLAIN, ATTN_INVALID, "k.stride=", f->k.stride[1] = INT64_MIN)
    WRONG(PLAIN, ATTN_INVALID, "v.stride=", f->v.stride[2] = INT64_MAX / 2)
    WRONG(RICH, ATTN_INVALID, "bias.stride=", f->bias.stride[3] = INT64_MAX)
    WRONG(RICH, ATTN_INVALID, "alibi_stride=", f->alibi_stride = INT64_MAX)
    WRONG(FP8, ATTN_INVALID, "descale_stride=", f->descale_stride[0] = INT64_MAX)
    WRONG(PLAIN, ATTN_INVALID, "probs.stride=", f->probs.data = f->o.data)
    return false;
}

static bool wrong_arrays(int wanted, wrong_call *c) {
    static int32_t zeros[64];
    WRONG_BEGIN
    WRONG(VARLEN, ATTN_INVALID, "cu_q=NULL", f->cu_q = NULL)
    WRONG(VARLEN, ATTN_INVALID, "cu_kv=NULL", f->cu_kv = NULL)
    WRONG(PACKED_APPEND, ATTN_INVALID, "cu_new=NULL", f->cu_new = NULL)
    WRONG(USED, ATTN_INVALID, "used_q=NULL", f->used_q = NULL)
    WRONG(USED, ATTN_INVALID, "used_kv=NULL", f->used_kv = NULL)
    WRONG(USED, ATTN_INVALID, "leftpad=NULL", f->leftpad = NULL)
    WRONG(APPEND, ATTN_INVALID, "batch_index=NULL", f->batch_index = NULL)
    WRONG(APPEND, ATTN_INVALID, "rotary_pos=NULL", f->rotary_pos = NULL)
    WRONG(APPEND, ATTN_INVALID, "rotary_cos=NULL", f->rotary_cos = NULL)
    WRONG(APPEND, ATTN_INVALID, "rotary_sin=NULL", f->rotary_sin = NULL)
    WRONG(PAGED, ATTN_INVALID, "page_table=NULL", f->page_table = NULL)
    WRONG(FLASH, ATTN_INVALID, "flashmask=NULL", f->flashmask = NULL)
    WRONG(RICH, ATTN_INVALID, "alibi=NULL", f->alibi = NULL)
    WRONG(RICH, ATTN_INVALID, "sink=NULL", f->sink = NULL)
    WRONG(FP8, ATTN_INVALID, "q_descale=NULL", f->q_descale = f->k_descale = f->v_descale = NULL)
    WRONG(PLAIN, ATTN_INVALID, "cu_q=0x", f->cu_q = zeros)
    WRONG(PLAIN, ATTN_INVALID, "cu_kv=0x", f->cu_kv = zeros)
    WRONG(PLAIN, ATTN_INVALID, "cu_new=0x", f->cu_new = zeros)
    WRONG(PLAIN, ATTN_INVALID, "used_q=0x", f->used_q = zeros)
    WRONG(PLAIN, ATTN_INVALID, "used_kv=0x", f->used_kv = zeros)
    WRONG(PLAIN, ATTN_INVALID, "leftpad=0x", f->leftpad = zeros)
    WRONG(PLAIN, ATTN_INVALID, "batch_index=0x", f->batch_index = zeros)
    WRONG(PLAIN, ATTN_INVALID, "rotary_pos=0x", f->rotary_pos = zeros)
    WRONG(PLAIN, ATTN_INVALID, "page_table=0x", f->page_table = zeros)
    WRONG(PLAIN, ATTN_INVALID, "flashmask=0x", f->flashmask = zeros)
    WRONG(PLAIN, ATTN_INVALID, "alibi=0x", f->alibi = (float *)zeros)
    WRONG(PLAIN, ATTN_INVALID, "sink=0x", f->sink = (float *)zeros)
    WRONG(PLAIN, ATTN_INVALID, "bias.data=0x", f->bias.data = zeros)
    WRONG(PLAIN, ATTN_INVALID, "k_new.data=0x", f->k_new.data = zeros)
    WRONG(PLAIN, ATTN_INVALID, "v_new.data=0x", f->v_new.data = zeros)
    WRONG(PLAIN, ATTN_INVALID, "rotary_cos=0x", f->rotary_cos = zeros)
    WRONG(PLAIN, ATTN_INVALID, "rotary_sin=0x", f->rotary_sin = zeros)
    WRONG(PLAIN, ATTN_INVALID, "k_descale=0x", f->k_descale = (float *)zeros)
    WRONG(BACKWARD, ATTN_INVALID, "d_bias.data=0x", p->flags ^= ATTN_BIAS, f->bias.data = NULL)
    WRONG(BACKWARD, ATTN_INVALID, "d_sink=0x", p->flags ^= ATTN_SINK, f->sink = NULL)
    WRONG(USED, ATTN_INVALID, "used_q=0x", f->used_q = SHIFTED(used_q, 1))
    WRONG(PAGED, ATTN_INVALID, "page_table_stride=-1", f->page_table_stride = -1)
    WRONG(PAGED, ATTN_INVALID, "page_table_stride=3", f->page_table_stride = 3)
    WRONG(PAGED, ATTN_INVALID, "page_table_stride=9223372036854775807", f->page_table_stride = INT64_MAX)
    return false;
}

static bool wrong_values(int wanted, wrong_call *c) {
    WRONG_BEGIN
    WRONG(VARLEN, ATTN_INVALID, "cu_q[0]=-1", INTS(cu_q)[0] = -1)
    WRONG(VARLEN, ATTN_INVALID, "cu_q[1]=", INTS(cu_q)[1] = 2 * SQ + 1)
    WRONG(VARLEN, ATTN_INVALID, "cu_q[2]=3", INTS(cu_q)[2] = 3)
    WRONG(VARLEN, ATTN_INVALID, "cu_q[1]=7", INTS(cu_q)[1] = SQ + 1)
    WRONG(VARLEN, ATTN_INVALID, "cu_kv[2]=33", INTS(cu_kv)[2] = 2 * SK + 1)
    WRONG(VARLEN, ATTN_INVALID, "cu_kv[1]=-2147483648", INTS(cu_kv)[1] = INT32_MIN)
    WRONG(VARLEN, ATTN_INVALID, "cu_kv[2]=2147483647", INTS(cu_kv)[2] = INT32_MAX)
    WRONG(PACKED_APPEND, ATTN_INVALID, "cu_new[1]=4", INTS(cu_new)[1] = NEW + 1)
    WRONG(PACKED_APPEND, ATTN_INVALID, "cu_new[2]=7", INTS(cu_new)[2] = 2 * NEW + 1)
    WRONG(USED, ATTN_INVALID, "used_q[0]=-1", INTS(used_q)[0] = -1)
    WRONG(USED, ATTN_INVALID, "used_q[1]=7", INTS(used_q)[1] = SQ + 1)
    WRONG(USED, ATTN_INVALID, "used_kv[1]=17", INTS(used_kv)[1] = SK + 1)
    WRONG(USED, ATTN_INVALID, "used_kv[0]=-2147483648", INTS(used_kv)[0] = INT32_MIN)
    WRONG(USED, ATTN_INVALID, "leftpad[0]=-1", INTS(leftpad)[0] = -1)
    WRONG(USED, ATTN_INVALID, "leftpad[1]=6", INTS(used_kv)[1] = 5, INTS(leftpad)[1] = 6)
    WRONG(USED, ATTN_INVALID, "leftpad[1]=2147483647", INTS(leftpad)[1] = INT32_MAX)
    WRONG(APPEND, ATTN_INVALID, "used_kv[1]=14", INTS(used_kv)[1] = SK - NEW + 1)
    WRONG(APPEND, ATTN_INVALID, "used_kv[0]=2147483647", INTS(used_kv)[0] = INT32_MAX)
    WRONG(KV_APPEND, ATTN_INVALID, "used_kv[1]=-1", INTS(used_kv)[1] = -1)
    WRONG(APPEND, ATTN_INVALID, "batch_index[0]=3", INTS(batch_index)[0] = 3)
    WRONG(APPEND, ATTN_INVALID, "batch_index[1]=-1", INTS(batch_index)[1] = -1)
    WRONG(APPEND, ATTN_INVALID, "rotary_pos[1]=18", INTS(rotary_pos)[1] = ROTARY_LEN - NEW + 1)
    WRONG(APPEND, ATTN_INVALID, "rotary_pos[0]=-1", INTS(rotary_pos)[0] = -1)
    WRONG(APPEND, ATTN_INVALID, "rotary_pos[0]=2147483647", INTS(rotary_pos)[0] = INT32_MAX)
    WRONG(PACKED_APPEND, ATTN_INVALID, "used_kv[0]=13", p->rotary_len = 15)
    WRONG(PAGED, ATTN_INVALID, "page_table[0][0]=10", INTS(page_table)[0] = PAGES)
    WRONG(PAGED, ATTN_INVALID, "page_table[1][3]=-1", INTS(page_table)[7] = -1)
    WRONG(PAGED, ATTN_INVALID, "page_table[1][0]=2147483647", INTS(page_table)[4] = INT32_MAX)
    WRONG(PAGED, ATTN_INVALID, "page_table[0][1]=12", INTS(used_kv)[0] = 5, INTS(page_table)[1] = 12)
    WRONG(PAGED, ATTN_INVALID, "page_table[0][0]=0", p->num_pages = 0)
    return false;
}

/* ---- the runner ---- */

typedef struct snapshot {
    unsigned char *bytes[RIG_BLOCKS];
} snapshot;

static void keep(snapshot *s, const rig *r) {
    for (int n = 0; n < r->blocks; n++) {
        s->bytes[n] = malloc(r->block[n].bytes + 1);
        if (CHECK(s->bytes[n] != NULL)) memcpy(s->bytes[n], r->block[n].data, r->block[n].bytes);
    }
}

/* Nothing may have changed, inputs included. */
static void check_kept(snapshot *s, const rig *r) {
    for (int n = 0; n < r->blocks; n++) {
        CHECK_SAY(memcmp(s->bytes[n], r->block[n].data, r->block[n].bytes) == 0, "block %d was written to", n);
        free(s->bytes[n]);
    }
}

static attn_status call_once(attn_context *context, const wrong_call *c) {
    const attn_problem *p = &c->problem.p;
    const attn_buffers *f = &c->buffers.f;
    switch (c->r.p.op) {
    case ATTN_BACKWARD: return attn_backward(context, p, f, NULL);
    case ATTN_KV_APPEND: return attn_kv_append(context, p, f, NULL);
    default: return attn_forward(context, p, f, NULL);
    }
}

static attn_status call_plan(attn_context *context, wrong_call *c) {
    attn_plan *plan = (attn_plan *)c;
    attn_status status = attn_plan_create(&plan, context, &c->problem.p);
    if (status != ATTN_OK) {
        CHECK(plan == NULL);
        return status;
    }
    c->buffers.f.workspace_size = attn_plan_workspace(plan);
    c->buffers.f.workspace = aligned_alloc(64, (c->buffers.f.workspace_size + 127) / 64 * 64);
    status = attn_run(plan, &c->buffers.f, NULL);
    free(c->buffers.f.workspace);
    attn_plan_destroy(plan);
    return status;
}

/* Runs all cases of one list and says how many there are. */
static int check_list(const char *name, bool (*list)(int wanted, wrong_call *c)) {
    static wrong_call c;
    int count = 0;
    for (attn_backend_id backend = ATTN_BACKEND_REF; backend <= ATTN_BACKEND_CPU; backend++) {
        attn_context *context = make_context(backend, 2);
        if (!CHECK(context != NULL)) return 0;
        for (count = 0; list(count, &c); count++) {
            snapshot before;
            test_context("%s, %s: %s", attn_context_backend(context), name, c.text);
            keep(&before, &c.r);
            CHECK_STATUS(call_once(context, &c), c.status, c.detail);
            CHECK_STATUS(call_plan(context, &c), c.status, c.detail);
            check_kept(&before, &c.r);
            rig_free(&c.r);
        }
        attn_context_destroy(context);
    }
    test_context(NULL);
    return count;
}

TEST(c3_wrong_sizes) { CHECK(check_list("sizes", wrong_sizes) >= 30); }
TEST(c3_wrong_dtypes_and_numbers) { CHECK(check_list("dtypes", wrong_dtypes) >= 25); }
TEST(c3_wrong_flags_masks_and_cache) { CHECK(check_list("flags", wrong_flags) >= 40); }
TEST(c3_wrong_tensors) { CHECK(check_list("tensors", wrong_tensors) >= 35); }
TEST(c3_wrong_arrays) { CHECK(check_list("arrays", wrong_arrays) >= 35); }
TEST(c3_wrong_values) { CHECK(check_list("values", wrong_values) >= 25); }

/* The forms that the cases start from are legal: otherwise the cases prove nothing. */
TEST(c3_forms_are_legal) {
    static wrong_call c;
    for (attn_backend_id backend = ATTN_BACKEND_REF; backend <= ATTN_BACKEND_CPU; backend++) {
        attn_context *context = make_context(backend, 2);
        for (int id = 0; id < FORMS; id++) {
            test_context("%s, form %d", attn_context_backend(context), id);
            start(&c, (form_id)id, ATTN_OK, "", "");
            CHECK_OK(call_once(context, &c));
            CHECK_OK(call_plan(context, &c));
            rig_free(&c.r);
        }
        attn_context_destroy(context);
    }
}

/* What lies past the used part may be anything; a struct of a newer header is taken if its news are zero. */
TEST(c3_values_that_do_not_count_are_not_looked_at) {
    static wrong_call c;
    attn_context *context = make_context(ATTN_BACKEND_CPU, 2);
    start(&c, PAGED, ATTN_OK, "", "");
    attn_buffers *f = &c.buffers.f;
    INTS(used_kv)[0] = 5, INTS(used_kv)[1] = 0;
    for (int n = 0; n < 8; n++)
        if (n > 1) INTS(page_table)[n] = n % 2 ? -1 : INT32_MAX;
    CHECK_OK(call_once(context, &c));
    c.problem.p.size = sizeof c.problem.p + 64;
    f->size = sizeof *f + 64;
    CHECK_OK(call_once(context, &c));
    rig_free(&c.r);
    attn_context_destroy(context);
}
