/*
 * The case generator of `attn check`: draws problems. What lies in memory is the work of case_data.c.
 */
#include "cases.h"

#include <math.h>
#include <stdarg.h>
#include <string.h>

#include "tool.h"

/* ---- random numbers: splitmix64, a stream for each case ---- */

static uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

rng rng_make(uint64_t seed, uint64_t stream) { return (rng){mix(mix(seed) + stream * UINT64_C(0xd1342543de82ef95))}; }

uint64_t rng_next(rng *r) { return mix(r->state += UINT64_C(0x9e3779b97f4a7c15)); }

int32_t rng_range(rng *r, int32_t low, int32_t high) {
    return low + (int32_t)(rng_next(r) % (uint64_t)((int64_t)high - low + 1));
}

bool rng_chance(rng *r, int percent) { return rng_range(r, 0, 99) < percent; }

double rng_normal(rng *r) { /* the sum of four uniform numbers has variance 1/3 */
    uint64_t x = rng_next(r);
    double sum = (double)(x & 0xffff) + (double)(x >> 16 & 0xffff) + (double)(x >> 32 & 0xffff) + (double)(x >> 48);
    return (sum / 65535 - 2) * 1.7320508075688772;
}

static int32_t one_of(rng *r, const int32_t *list, int count) { return list[rng_range(r, 0, count - 1)]; }
#define ONE_OF(r, ...) one_of((r), (const int32_t[]){__VA_ARGS__}, (int)(sizeof(int32_t[]){__VA_ARGS__} / sizeof(int32_t)))

/* ---- features ---- */

static void gqa(check_case *c) { c->problem.heads_q *= ONE_OF(&c->rng, 2, 2, 3, 4, 5, 8); }

static int32_t draw_wide(rng *r) {
    return ONE_OF(r, 129, 136, 160, 184, 192, 192, 200, 224, 248, 255, 256, 256, rng_range(r, 129, 256));
}

static void dim_v(check_case *c) {
    if (c->wide) { /* the other one is any; either may be the larger */
        int32_t other = ONE_OF(&c->rng, 8, 64, 128, draw_wide(&c->rng), rng_range(&c->rng, 1, 256));
        *(rng_chance(&c->rng, 70) ? &c->problem.dim_v : &c->problem.dim_qk) = other;
        return;
    }
    static const int32_t pairs[][2] = {{192, 128}, {576, 512}, {512, 512}, {320, 384}, {64, 300}, {257, 40}, {64, 512},
                                       {64, 128},  {40, 8},    {1, 3},     {24, 80},   {128, 64}, {17, 5},   {40, 400}};
    const int32_t *pair = pairs[rng_range(&c->rng, 0, (int32_t)(sizeof pairs / sizeof pairs[0]) - 1)];
    c->problem.dim_qk = pair[0];
    c->problem.dim_v = rng_chance(&c->rng, 60) ? pair[1] : rng_range(&c->rng, 1, 100);
}

static bool not_f64(const check_case *c) { return c->problem.dtype != ATTN_F64; }
static bool f32(const check_case *c) { return c->problem.dtype == ATTN_F32; }
static bool f32_or_f64(const check_case *c) { return c->problem.dtype == ATTN_F32 || c->problem.dtype == ATTN_F64; }

static void mixed(check_case *c) {
    attn_problem *p = &c->problem;
    if (rng_chance(&c->rng, 70)) {
        p->kv_dtype = (attn_dtype)(p->op == ATTN_BACKWARD ? ONE_OF(&c->rng, ATTN_F32, ATTN_F16, ATTN_BF16)
                                                          : ONE_OF(&c->rng, ATTN_F32, ATTN_F16, ATTN_BF16, ATTN_E4M3,
                                                                   ATTN_E5M2, ATTN_I8, ATTN_I8));
    }
    if (p->kv_dtype == p->dtype || rng_chance(&c->rng, 50))
        p->out_dtype = (attn_dtype)ONE_OF(&c->rng, ATTN_F32, ATTN_F16, ATTN_BF16);
}

static void empty(check_case *c) {
    int which = rng_range(&c->rng, 0, 2);
    if (which == 0) c->problem.batch = 0;
    if (which == 1) c->problem.max_q = 0;
    if (which == 2) c->problem.max_kv = 0;
}

static void long_kv(check_case *c) {
    attn_problem *p = &c->problem;
    p->max_kv = rng_range(&c->rng, 600, c->wide ? 1300 : 2500);
    p->max_q = ONE_OF(&c->rng, 1, 1, 1, 2, 3, 5, 17);
    p->batch = c->wide ? 1 : rng_range(&c->rng, 1, 3);
    if (p->dim_qk > 64 && !has(c, F_DIM_V) && !c->wide) p->dim_qk = p->dim_v = 64;
}

static void causal(check_case *c) { c->problem.flags |= ATTN_CAUSAL; }

static int32_t window_side(check_case *c) {
    int32_t most = c->problem.max_kv;
    return ONE_OF(&c->rng, -1, 0, 1, rng_range(&c->rng, 0, 20), rng_range(&c->rng, 0, most), most + 5, INT32_MAX);
}

static void window(check_case *c) {
    c->problem.flags |= ATTN_WINDOW;
    c->problem.window_left = window_side(c);
    c->problem.window_right = window_side(c);
}

static void scale(check_case *c) {
    double usual = 1 / sqrt(c->problem.dim_qk);
    const double choices[] = {0, -usual, usual * 1.37, 0.02, 1.5 * usual, -0.1 * usual};
    c->problem.flags |= ATTN_SCALE;
    c->problem.scale = choices[rng_range(&c->rng, 0, 5)];
}

static void softcap(check_case *c) {
    const double choices[] = {0.5, 1, 5, 15, 30, 50};
    c->problem.softcap = choices[rng_range(&c->rng, 0, 5)];
}

static void alibi(check_case *c) { c->problem.flags |= ATTN_ALIBI; }

static void bias(check_case *c) {
    c->problem.flags |= ATTN_BIAS;
    if (rng_chance(&c->rng, 50))
        c->problem.bias_dtype = (attn_dtype)ONE_OF(&c->rng, ATTN_F32, ATTN_F16, ATTN_BF16, ATTN_F64);
}

static void sink(check_case *c) { c->problem.flags |= ATTN_SINK; }

static void flashmask(check_case *c) {
    bool is_causal = c->problem.flags & ATTN_CAUSAL;
    c->problem.flashmask_vectors = is_causal ? ONE_OF(&c->rng, 1, 2) : ONE_OF(&c->rng, 2, 4);
    c->problem.flashmask_heads = rng_chance(&c->rng, 50) ? 1 : c->problem.heads_kv;
}

static void dropout(check_case *c) {
    const double choices[] = {0.1, 0.25, 0.5, 0.9, 0.0001};
    c->problem.dropout = choices[rng_range(&c->rng, 0, 4)];
}

static void varlen_q(check_case *c) { c->problem.flags |= ATTN_VARLEN_Q; }
static void varlen_kv(check_case *c) { c->problem.flags |= ATTN_VARLEN_KV; }
static void used_q(check_case *c) { c->problem.flags |= ATTN_USED_Q; }
static void used_kv(check_case *c) { c->problem.flags |= ATTN_USED_KV; }
static void leftpad(check_case *c) { c->problem.flags |= ATTN_LEFTPAD; }

static void batch_index(check_case *c) {
    c->problem.flags |= ATTN_BATCH_INDEX;
    c->problem.cache_batch = c->problem.batch + rng_range(&c->rng, 0, 3);
    if (c->problem.cache_batch == 0) c->problem.cache_batch = 1;
}

static void pages(check_case *c) {
    c->problem.page_size = ONE_OF(&c->rng, 1, 3, 16, 16, 64, 7, 256, rng_range(&c->rng, 1, 40));
}

static void append(check_case *c) { c->problem.flags |= ATTN_APPEND; }
static void varlen_new(check_case *c) { c->problem.flags |= ATTN_VARLEN_NEW; }

static void rotary(check_case *c) {
    attn_problem *p = &c->problem;
    p->flags |= ATTN_ROTARY;
    if (p->dim_qk < 2) p->dim_qk = 2;
    int32_t whole = p->dim_qk / 2;
    p->rotary_dim = 2 * (rng_chance(&c->rng, 50) ? whole : rng_range(&c->rng, 1, whole));
    if (rng_chance(&c->rng, 50)) p->rotary_dtype = (attn_dtype)ONE_OF(&c->rng, ATTN_F32, ATTN_F16, ATTN_BF16, ATTN_F64);
}

static void interleaved(check_case *c) { c->problem.flags |= ATTN_ROTARY_INTERLEAVED; }
static void rotary_pos(check_case *c) { c->problem.flags |= ATTN_ROTARY_POS; }
static void precise(check_case *c) { c->problem.flags |= ATTN_PRECISE; }
static void precise_few(check_case *c) { c->problem.flags |= ATTN_PRECISE_FEW; }
static void descale(check_case *c) { c->problem.flags |= ATTN_DESCALE; }
static void descale_pages(check_case *c) { c->problem.flags |= ATTN_DESCALE_PAGES; }
static void memory_only(check_case *c) { (void)c; } /* no field of the problem: case_data.c looks at the bit */

enum { FWD = 1 << ATTN_FORWARD, BWD = 1 << ATTN_BACKWARD, APP = 1 << ATTN_KV_APPEND };
#define BIT FEATURE_BIT

/* In this order they are applied: sizes first, then what depends on them. */
static const struct feature {
    const char *name;
    int ops;                           /* operations that know it */
    uint64_t needs;                    /* features that come with it */
    uint64_t conflicts;                /* features that exclude it */
    bool (*fits)(const check_case *c); /* NULL: always */
    void (*apply)(check_case *c);      /* sets the fields of the problem */
    const char *help;
} table[FEATURES] = {
    [F_GQA] = {"gqa", FWD | BWD, 0, 0, NULL, gqa, "several query heads share a KV head"},
    [F_DIM_V] = {"dim_v", FWD | BWD | APP, 0, 0, NULL, dim_v, "dim_v differs from dim_qk"},
    [F_MIXED] = {"mixed", FWD | BWD | APP, 0, 0, not_f64, mixed, "kv_dtype or out_dtype differ from dtype"},
    [F_EMPTY] = {"empty", FWD | BWD | APP, 0, BIT(F_LONG_KV), NULL, empty, "batch, max_q or max_kv is 0"},
    [F_LONG_KV] = {"long_kv", FWD | BWD, 0, BIT(F_EMPTY), NULL, long_kv, "many keys, few queries"},
    [F_CAUSAL] = {"causal", FWD | BWD | APP, 0, 0, NULL, causal, "ATTN_CAUSAL"},
    [F_WINDOW] = {"window", FWD | BWD, 0, 0, NULL, window, "sliding window, open and closed sides"},
    [F_SCALE] = {"scale", FWD | BWD, 0, 0, NULL, scale, "zero, negative and odd scales"},
    [F_SOFTCAP] = {"softcap", FWD | BWD, 0, 0, NULL, softcap, "tanh cap on the scores"},
    [F_ALIBI] = {"alibi", FWD | BWD, 0, 0, NULL, alibi, "slopes for each head, or each batch and head"},
    [F_BIAS] = {"bias", FWD | BWD, 0, 0, NULL, bias, "additive bias, any dtype, any dim broadcast"},
    [F_SINK] = {"sink", FWD | BWD, 0, 0, NULL, sink, "attention sinks, -inf among them"},
    [F_FLASHMASK] = {"flashmask", FWD | BWD, 0, 0, NULL, flashmask, "1, 2 or 4 vectors, documents and noise"},
    [F_DROPOUT] = {"dropout", FWD | BWD, 0, 0, NULL, dropout, "Philox dropout"},
    [F_VARLEN_Q] = {"varlen_q", FWD | BWD, 0, 0, NULL, varlen_q, "packed queries, gaps at both ends"},
    [F_VARLEN_KV] = {"varlen_kv", FWD | BWD | APP, 0, BIT(F_BATCH_INDEX) | BIT(F_PAGES), NULL, varlen_kv, "packed keys"},
    [F_USED_Q] = {"used_q", FWD | BWD, 0, 0, NULL, used_q, "padding behind the queries"},
    [F_USED_KV] = {"used_kv", FWD | BWD, 0, 0, NULL, used_kv, "padding behind the keys"},
    [F_LEFTPAD] = {"leftpad", FWD | BWD | APP, 0, 0, NULL, leftpad, "padding before the keys"},
    [F_BATCH_INDEX] = {"batch_index", FWD | APP, 0, BIT(F_VARLEN_KV), NULL, batch_index, "slots of the cache by index"},
    [F_PAGES] = {"pages", FWD | APP, 0, BIT(F_VARLEN_KV), NULL, pages,
                 "paged cache, shuffled, shared, garbage in the table"},
    [F_APPEND] = {"append", FWD, BIT(F_USED_KV), 0, NULL, append, "new keys before attention, in the same call"},
    [F_VARLEN_NEW] = {"varlen_new", FWD | APP, BIT(F_APPEND), 0, NULL, varlen_new, "packed new keys"},
    [F_ROTARY] = {"rotary", FWD | APP, BIT(F_APPEND), 0, NULL, rotary, "rotary embedding, all or part of the dims"},
    [F_INTERLEAVED] = {"interleaved", FWD | APP, BIT(F_ROTARY), 0, NULL, interleaved, "rotary on neighbouring dims"},
    [F_ROTARY_POS] = {"rotary_pos", FWD | APP, BIT(F_ROTARY), 0, NULL, rotary_pos, "rotary positions of their own"},
    [F_DESCALE] = {"descale", FWD | APP, 0, 0, NULL, descale, "factors of q, k and v"},
    [F_DESCALE_PAGES] = {"descale_pages", FWD | APP, BIT(F_DESCALE) | BIT(F_PAGES), 0, NULL, descale_pages,
                         "factors of pages of k and v"},
    [F_PRECISE] = {"precise", FWD | BWD, 0, 0, f32_or_f64, precise, "float32 computed in double"},
    [F_PRECISE_FEW] = {"precise_few", FWD | BWD, 0, BIT(F_PRECISE), f32, precise_few,
                       "float32 with double where few keys count"},
    [F_PROBS] = {"probs", FWD, 0, 0, NULL, memory_only, "probabilities as an output"},
    [F_NO_LSE] = {"no_lse", FWD, 0, 0, NULL, memory_only, "lse not wanted"},
    [F_D_LSE] = {"d_lse", BWD, 0, 0, NULL, memory_only, "gradient into lse"},
    [F_D_BIAS] = {"d_bias", BWD, BIT(F_BIAS), 0, NULL, memory_only, "gradient of the bias, summed where broadcast"},
    [F_D_SINK] = {"d_sink", BWD, BIT(F_SINK), 0, NULL, memory_only, "gradient of the sinks"},
    [F_SOME_GRADIENTS] = {"some_gradients", BWD, 0, 0, NULL, memory_only, "some of d_q, d_k, d_v not wanted"},
    [F_RING] = {"ring", BWD, 0, 0, NULL, memory_only, "o and lse of a softmax over more keys than are here"},
    [F_NAN] = {"nan", FWD | BWD, 0, BIT(F_APPEND) | BIT(F_DROPOUT) | BIT(F_ALIBI), NULL, memory_only,
               "NaN in rows and keys that count: it reaches those who see them, and nobody else"},
    [F_LAYOUT] = {"layout", FWD | BWD | APP, 0, 0, NULL, memory_only, "permuted and padded tensors"},
    [F_NEGATIVE] = {"negative", FWD | BWD | APP, 0, 0, NULL, memory_only, "negative strides"},
    [F_BROADCAST] = {"broadcast", FWD | BWD | APP, 0, 0, NULL, memory_only, "zero strides of inputs"},
};

const char *feature_name(feature_id id) { return table[id].name; }
const char *feature_help(feature_id id) { return table[id].help; }

bool feature_find(const char *name, size_t length, feature_id *id) {
    for (int n = 0; n < FEATURES; n++) {
        if (strlen(table[n].name) != length || memcmp(table[n].name, name, length) != 0) continue;
        *id = (feature_id)n;
        return true;
    }
    return false;
}

/* `set` and all that its members need. */
static uint64_t with_needs(const check_case *c, uint64_t set) {
    for (uint64_t before = 0; before != set;) {
        before = set;
        for (int n = 0; n < FEATURES; n++) {
            if (set & BIT(n)) set |= table[n].needs;
        }
    }
    /* The operation KV_APPEND is an append by itself. */
    if (c->problem.op == ATTN_KV_APPEND) set &= ~(BIT(F_APPEND) | BIT(F_USED_KV));
    return set;
}

static bool can_have(const check_case *c, uint64_t set) {
    set = with_needs(c, set);
    for (int n = 0; n < FEATURES; n++) {
        const struct feature *f = &table[n];
        if (!(set & BIT(n))) continue;
        if (!(f->ops & 1 << c->problem.op) || (set & f->conflicts) || (f->fits && !f->fits(c))) return false;
    }
    return true;
}

bool feature_combines(uint64_t set) {
    check_case c = {.problem = {.dtype = ATTN_F32}};
    for (int op = ATTN_FORWARD; op <= ATTN_KV_APPEND; op++) {
        c.problem.op = (attn_op)op;
        if (can_have(&c, set)) return true;
    }
    return false;
}

/* ---- the base ---- */

/*
 * A fifth of the cases has a dim of 129 to 256: most of them in 16 bits, for which GPUs have kernels of their own there. They keep
 * it when they shrink, and have few heads, so that the oracle can pay for them.
 */
static bool draw_whether_wide(check_case *c) {
    bool half = c->problem.dtype == ATTN_F16 || c->problem.dtype == ATTN_BF16;
    return rng_chance(&c->rng, half ? 30 : 12);
}

static int32_t draw_length(rng *r) {
    int32_t edge = ONE_OF(r, 16, 32, 64, 128);
    return ONE_OF(r, 1, 2, rng_range(r, 2, 9), rng_range(r, 3, 20), rng_range(r, 10, 40), edge - 1, edge, edge + 1,
                  rng_range(r, 1, 150));
}

static int32_t draw_dim(rng *r) {
    if (rng_chance(r, 3)) return ONE_OF(r, 264, rng_range(r, 257, 575), 512, 576);
    return ONE_OF(r, 1, 2, 3, 5, 8, 15, 16, 17, 24, 32, 33, 40, 64, 64, 80, 96, 128, rng_range(r, 1, 130));
}

static void draw_base(check_case *c, const case_filter *filter) {
    rng *r = &c->rng;
    attn_problem *p = &c->problem;
    memset(p, 0, sizeof *p);
    p->size = sizeof *p;
    int kind = rng_range(r, 0, 99);
    p->op = filter->op >= 0 ? (attn_op)filter->op : kind < 52 ? ATTN_FORWARD : kind < 92 ? ATTN_BACKWARD : ATTN_KV_APPEND;
    c->left_out = p->op == ATTN_BACKWARD && filter->no_backward;
    if (c->left_out) p->op = ATTN_FORWARD;
    p->dtype = filter->dtype            ? filter->dtype
               : p->op == ATTN_BACKWARD ? (attn_dtype)ONE_OF(r, ATTN_F32, ATTN_F32, ATTN_F16, ATTN_BF16, ATTN_F64)
                                        : (attn_dtype)ONE_OF(r, ATTN_F32, ATTN_F32, ATTN_F32, ATTN_F16, ATTN_F16, ATTN_BF16,
                                                             ATTN_BF16, ATTN_F64, ATTN_F64, ATTN_E4M3, ATTN_E5M2);
    p->batch = ONE_OF(r, 1, 1, 2, 2, 3, 4, 5);
    p->heads_q = p->heads_kv = ONE_OF(r, 1, 1, 1, 2, 2, 3, 4);
    c->wide = draw_whether_wide(c);
    p->dim_qk = p->dim_v = c->wide ? draw_wide(r) : draw_dim(r);
    p->max_q = draw_length(r);
    p->max_kv = rng_chance(r, 20) ? p->max_q : draw_length(r);
    if (c->wide && p->batch > 2) p->batch = 2;
    if (c->wide && p->heads_kv > 2) p->heads_q = p->heads_kv = 2;
    if (!filter->small) return;
    if (p->batch > 3) p->batch = 3;
    if (p->max_q > 65) p->max_q = rng_range(r, 1, 65);
    if (p->max_kv > 65) p->max_kv = rng_range(r, 1, 65);
}

/* What a feature has made long: as many keys as it takes to be split, and no more. */
static void draw_small(check_case *c) {
    attn_problem *p = &c->problem;
    if (p->heads_q / p->heads_kv > 3) p->heads_q = 3 * p->heads_kv;
    if (!has(c, F_LONG_KV)) return;
    p->max_kv = rng_range(&c->rng, 500, 1100);
    p->batch = p->heads_q = p->heads_kv = 1;
}

/* A random number of features on top of the ones that are asked for. */
static bool draw_features(check_case *c, const case_filter *filter) {
    c->drawn = filter->features;
    if (!can_have(c, c->drawn)) return false;
    int more = ONE_OF(&c->rng, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 5, 7);
    for (int tries = 0; more > 0 && tries < 40; tries++) {
        uint64_t bit = BIT(rng_range(&c->rng, 0, FEATURES - 1));
        if ((c->drawn & bit) || !can_have(c, c->drawn | bit)) continue;
        c->drawn |= bit;
        more--;
    }
    c->features = with_needs(c, c->drawn);
    return true;
}

/* Multiplications of the naive algorithm. */
static double cost(const attn_problem *p) {
    double pairs = (double)p->batch * p->heads_q * p->max_q * p->max_kv;
    return pairs * (p->dim_qk + p->dim_v + 8) * (p->op == ATTN_BACKWARD ? 2.5 : 1);
}

/* Makes the case smaller until the oracle can pay for it; lengths go last, since their values around tile edges matter. */
static void shrink(check_case *c) {
    attn_problem *p = &c->problem;
    double budget = 40e3 * pow(400, rng_range(&c->rng, 0, 1000) / 1000.0);
    while (cost(p) > budget) {
        if (p->batch > 2) {
            p->batch--;
        } else if (p->heads_kv > 1) {
            p->heads_q = p->heads_q / p->heads_kv * (p->heads_kv - 1);
            p->heads_kv--;
        } else if (p->dim_qk > 32 && p->dim_qk == p->dim_v && !c->wide) {
            p->dim_qk = p->dim_v = rng_range(&c->rng, 1, p->dim_qk - 1);
        } else if (p->heads_q > 2) {
            p->heads_q--;
        } else if (p->batch > 1) {
            p->batch--;
        } else if (p->max_q > p->max_kv) {
            p->max_q = (p->max_q + 1) / 2;
        } else if (p->max_kv > 1) {
            p->max_kv = has(c, F_LONG_KV) && p->max_q > 1 ? p->max_kv : (p->max_kv + 1) / 2;
            if (has(c, F_LONG_KV) && p->max_q > 1) p->max_q--;
        } else {
            break;
        }
    }
}

/* ---- lengths ---- */

/* Often the ends, otherwise anything between. */
static int32_t draw_between(rng *r, int32_t low, int32_t high) {
    int kind = rng_range(r, 0, 9);
    return kind < 3 ? high : kind == 3 ? low : rng_range(r, low, high);
}

static void draw_sequence(check_case *c, int b) {
    const attn_problem *p = &c->problem;
    rng *r = &c->rng;
    sequence *s = &c->seq[b];
    bool appends = case_appends(c);
    memset(s, 0, sizeof *s);
    s->rows_q = p->flags & ATTN_VARLEN_Q ? draw_between(r, 0, p->max_q) : p->max_q;
    s->sq = p->flags & ATTN_USED_Q ? draw_between(r, 0, s->rows_q) : s->rows_q;
    s->appended = !appends ? 0 : p->flags & ATTN_VARLEN_NEW ? draw_between(r, 0, p->max_new) : p->max_new;
    s->capacity = p->flags & ATTN_VARLEN_KV ? draw_between(r, s->appended, p->max_kv) : p->max_kv;
    s->used = p->flags & ATTN_USED_KV ? draw_between(r, 0, s->capacity - s->appended) : s->capacity;
    s->leftpad = p->flags & ATTN_LEFTPAD ? draw_between(r, 0, rng_chance(r, 80) ? s->used / 2 : s->used) : 0;
    s->sk = s->used + s->appended - s->leftpad;
    s->slot = b;
    s->rotary_pos = p->flags & ATTN_ROTARY_POS ? rng_range(r, 0, 30) : s->used;
}

/* Slots: any for reading; distinct ones for writing. */
static void draw_slots(check_case *c) {
    const attn_problem *p = &c->problem;
    if (!(p->flags & ATTN_BATCH_INDEX)) return;
    bool taken[CASE_BATCH + 8] = {false};
    for (int b = 0; b < p->batch; b++) {
        int32_t slot = rng_range(&c->rng, 0, p->cache_batch - 1);
        while (case_appends(c) && taken[slot]) slot = (slot + 1) % p->cache_batch;
        taken[slot] = true;
        c->seq[b].slot = slot;
    }
}

static void draw_lengths(check_case *c) {
    attn_problem *p = &c->problem;
    rng *r = &c->rng;
    if (case_appends(c)) {
        p->flags |= ATTN_USED_KV;
        p->max_new = ONE_OF(r, 1, 1, rng_range(r, 0, 5), rng_range(r, 0, 20), p->max_kv);
        if (p->max_new > p->max_kv) p->max_new = p->max_kv;
    }
    bool packed_q = p->flags & ATTN_VARLEN_Q, packed_kv = p->flags & ATTN_VARLEN_KV,
         packed_new = p->flags & ATTN_VARLEN_NEW;
    int64_t at_q = packed_q ? rng_range(r, 0, 3) : 0, at_kv = packed_kv ? rng_range(r, 0, 3) : 0;
    int64_t at_new = packed_new ? rng_range(r, 0, 3) : 0;
    int32_t rotary_end = 0;
    for (int b = 0; b < p->batch; b++) {
        sequence *s = &c->seq[b];
        draw_sequence(c, b);
        s->first_q = at_q;
        s->first_kv = at_kv;
        s->first_new = at_new;
        at_q += packed_q ? s->rows_q : 0;
        at_kv += packed_kv ? s->capacity : 0;
        at_new += packed_new ? s->appended : 0;
        int32_t rotated = s->appended > s->sq ? s->appended : s->sq;
        if (s->rotary_pos + rotated > rotary_end) rotary_end = s->rotary_pos + rotated;
    }
    if (packed_q) p->total_q = at_q + rng_range(r, 0, 3);
    if (packed_kv) p->total_kv = at_kv + rng_range(r, 0, 3);
    if (packed_new) p->total_new = at_new + rng_range(r, 0, 3);
    if (p->flags & ATTN_ROTARY) p->rotary_len = rotary_end + rng_range(r, 0, 3);
    draw_slots(c);
    int32_t slots = p->flags & ATTN_BATCH_INDEX ? p->cache_batch : p->batch;
    c->rows_q = packed_q ? p->total_q : (int64_t)p->batch * p->max_q;
    c->rows_kv = packed_kv ? p->total_kv : (int64_t)slots * p->max_kv;
    if (p->page_size) {
        int32_t per_slot = (p->max_kv + p->page_size - 1) / p->page_size;
        p->num_pages = per_slot * slots + rng_range(r, 0, 4);
    }
}

/* ---- the whole ---- */

static bool is_fp8(attn_dtype d) { return d == ATTN_E4M3 || d == ATTN_E5M2; }

/* Fills in the defaults that attn.h names; `given` keeps some of them open. */
static void settle_defaults(check_case *c) {
    attn_problem *p = &c->problem;
    bool narrow = is_fp8(p->dtype);
    attn_problem open = *p;
    if (!p->kv_dtype) p->kv_dtype = p->dtype;
    if (!p->out_dtype) p->out_dtype = narrow ? ATTN_BF16 : p->dtype;
    if (!p->bias_dtype) p->bias_dtype = narrow ? ATTN_F32 : p->dtype;
    if (!p->rotary_dtype) p->rotary_dtype = narrow ? ATTN_F32 : p->dtype;
    if (!(p->flags & ATTN_SCALE)) p->scale = 1 / sqrt(p->dim_qk);
    if (open.dim_v == open.dim_qk) open.dim_v = 0;
    if (open.flashmask_heads == 1) open.flashmask_heads = 0;
    c->given = rng_chance(&c->rng, 50) ? open : *p;
    c->given.scale = open.scale;
}

bool case_draw(check_case *c, const case_filter *filter, uint64_t seed, long number) {
    memset(c, 0, sizeof *c);
    c->rng = rng_make(seed, (uint64_t)number);
    c->seed = seed;
    c->number = number;
    bool drawn = false;
    for (int tries = 0; !drawn && tries < 200; tries++) {
        draw_base(c, filter);
        bool is_legal = c->problem.dtype != ATTN_I8 && !(c->problem.op == ATTN_BACKWARD && is_fp8(c->problem.dtype));
        drawn = is_legal && draw_features(c, filter);
    }
    if (!drawn) return false;
    for (int n = 0; n < FEATURES; n++) {
        if (has(c, (feature_id)n) && n <= F_LONG_KV) table[n].apply(c);
    }
    if (filter->small) draw_small(c);
    shrink(c);
    for (int n = F_LONG_KV + 1; n < FEATURES; n++) {
        if (has(c, (feature_id)n)) table[n].apply(c);
    }
    draw_lengths(c);
    settle_defaults(c);
    c->strict = rng_chance(&c->rng, 50);
    c->one_shot = rng_chance(&c->rng, 25);
    c->q_size = rng_chance(&c->rng, 85) || has(c, F_NAN) ? 1 : rng_chance(&c->rng, 50) ? 4 : 20;
    return true;
}

/* ---- in words ---- */

typedef struct text {
    char *at;
    size_t left;
} text;

static void say(text *t, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void say(text *t, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(t->at, t->left, format, arguments);
    va_end(arguments);
    size_t step = length < 0 ? 0 : (size_t)length < t->left ? (size_t)length : t->left - 1;
    t->at += step;
    t->left -= step;
}

static void say_options(text *t, const check_case *c) {
    const attn_problem *p = &c->problem;
    if (p->flags & ATTN_WINDOW) say(t, "  window %d, %d\n", p->window_left, p->window_right);
    if (p->flags & ATTN_SCALE) say(t, "  scale %g\n", p->scale);
    if (p->softcap > 0) say(t, "  softcap %g\n", p->softcap);
    if (p->dropout > 0)
        say(t, "  dropout %g, seed %#llx, offset %#llx\n", p->dropout, (unsigned long long)c->buffers.seed,
            (unsigned long long)c->buffers.offset);
    if (p->flags & ATTN_BIAS)
        say(t, "  bias %s, strides %lld, %lld, %lld, %lld\n", attn_dtype_name(p->bias_dtype),
            (long long)c->buffers.bias.stride[0], (long long)c->buffers.bias.stride[1],
            (long long)c->buffers.bias.stride[2], (long long)c->buffers.bias.stride[3]);
    if (p->flashmask_vectors) say(t, "  flashmask of %d vectors, %d heads\n", p->flashmask_vectors, p->flashmask_heads);
    if (p->page_size) say(t, "  %d pages of %d rows\n", p->num_pages, p->page_size);
    if (p->flags & ATTN_BATCH_INDEX) say(t, "  %d slots in the cache\n", p->cache_batch);
    if (p->flags & ATTN_ROTARY)
        say(t, "  rotary on %d dims, %s table of %d rows\n", p->rotary_dim, attn_dtype_name(p->rotary_dtype),
            p->rotary_len);
    if (c->strict) say(t, "  what the mask hides altogether is NaN\n");
    if (c->one_shot) say(t, "  one-shot call\n");
}

void case_describe(const check_case *c, char *out, size_t size) {
    const attn_problem *p = &c->problem;
    text t = {out, size};
    say(&t, "  %s %s, kv %s, out %s, batch %d, heads %d/%d, dims %d/%d, at most %d queries x %d keys\n", op_name(p->op),
        attn_dtype_name(p->dtype), attn_dtype_name(p->kv_dtype), attn_dtype_name(p->out_dtype), p->batch, p->heads_q,
        p->heads_kv, p->dim_qk, p->dim_v, p->max_q, p->max_kv);
    say(&t, "  features:");
    for (int n = 0; n < FEATURES; n++) {
        if (has(c, (feature_id)n)) say(&t, " %s", table[n].name);
    }
    say(&t, "%s\n", c->features ? "" : " none");
    say_options(&t, c);
    for (int b = 0; b < p->batch; b++) {
        const sequence *s = &c->seq[b];
        say(&t, "  sequence %d: %d queries, %d keys", b, s->sq, s->sk);
        if (s->leftpad) say(&t, " after %d of padding", s->leftpad);
        if (s->appended) say(&t, ", %d of them new", s->appended);
        if (s->slot != b) say(&t, ", in slot %d", s->slot);
        say(&t, "\n");
    }
}
