/*
 * The oracle against numbers worked out by hand, so that it stands on something other than itself: each of the semantics 1 to 11
 * of attn.h in a case small enough to check with a pencil, and the masks against the words of the header.
 */
#include <math.h>
#include <string.h>

#include "build.h"
#include "numeric.h"
#include "philox.h"
#include "test.h"

static const double exact = 1e-14;

static attn_context *ref(void) { return make_context(ATTN_BACKEND_REF, 1); }

/* One sequence, one head, float64, the same dim for all. */
static rig small(int32_t rows, int32_t keys, int32_t dim, double *q, double *k, double *v) {
    rig r = {.p = problem(ATTN_F64, 1, 1, 1, rows, keys, dim), .probs = true};
    if (q) r.f.q = attn_dense(q, rows, 1, dim);
    if (k) r.f.k = attn_dense(k, keys, 1, dim);
    if (v) r.f.v = attn_dense(v, keys, 1, dim);
    return r;
}

/* Makes, runs forward, and gives the rig up on failure. */
static bool go(rig *r, attn_context *context) {
    if (!CHECK(context != NULL) || !CHECK(rig_make(r, 1))) return false;
    if (CHECK_OK(rig_run(r, context))) return true;
    rig_free(r);
    return false;
}

static double prob(const rig *r, int32_t b, int32_t h, int32_t i, int32_t j) {
    const int64_t *stride = r->f.probs.stride;
    return ((const double *)r->f.probs.data)[b * stride[0] + h * stride[1] + i * stride[2] + j * stride[3]];
}

TEST(s01_ref_two_by_two_by_hand) {
    double unit[] = {1, 0, 0, 1}, v[] = {4, 8, 12, 16};
    attn_context *context = ref();
    rig r = small(2, 2, 2, unit, unit, v);
    r.p.flags = ATTN_SCALE;
    r.p.scale = log(3); /* so that exp(s) is 3 on the diagonal and 1 beside it */
    if (go(&r, context)) {
        CHECK_CLOSE(rig_o(&r, 0, 0, 0, 0), 6, exact);
        CHECK_CLOSE(rig_o(&r, 0, 0, 0, 1), 10, exact);
        CHECK_CLOSE(rig_o(&r, 0, 1, 0, 0), 10, exact);
        CHECK_CLOSE(rig_o(&r, 0, 1, 0, 1), 14, 2 * exact);
        CHECK_CLOSE(rig_lse(&r, 0, 0, 0), log(4), exact);
        CHECK_CLOSE(prob(&r, 0, 0, 0, 0), 0.75, exact);
        CHECK_CLOSE(prob(&r, 0, 0, 1, 0), 0.25, exact);
        rig_free(&r);
    }
    attn_context_destroy(context);
}

TEST(s01_ref_scale_defaults_to_one_over_sqrt_dim) {
    double q[] = {1, 1, 1, 1}, k[] = {1, 1, 1, 1, 0, 0, 0, 0};
    attn_context *context = ref();
    rig r = small(1, 2, 4, q, k, NULL);
    if (go(&r, context)) { /* s = 4 / sqrt(4) and 0 */
        CHECK_CLOSE(rig_lse(&r, 0, 0, 0), log(exp(2) + 1), exact);
        rig_free(&r);
    }
    attn_context_destroy(context);
}

TEST(s01_ref_scale_zero_is_the_mean_of_v) {
    double v[] = {1, 2, 4, 8, 16};
    attn_context *context = ref();
    rig r = small(3, 5, 1, NULL, NULL, v);
    r.p.flags = ATTN_SCALE;
    if (go(&r, context)) {
        for (int i = 0; i < 3; i++) {
            CHECK_CLOSE(rig_o(&r, 0, i, 0, 0), 31.0 / 5, exact);
            CHECK_CLOSE(rig_lse(&r, 0, i, 0), log(5), exact);
        }
        rig_free(&r);
    }
    attn_context_destroy(context);
}

TEST(s02_ref_softcap_by_hand) {
    double q[] = {1}, k[] = {1, 0}, v[] = {1, 0};
    attn_context *context = ref();
    rig r = small(1, 2, 1, q, k, v);
    r.p.flags = ATTN_SCALE;
    r.p.scale = log(3);
    r.p.softcap = 2; /* 2 tanh(log(3) / 2) = 1 */
    if (go(&r, context)) {
        CHECK_CLOSE(rig_o(&r, 0, 0, 0, 0), exp(1) / (exp(1) + 1), exact);
        CHECK_CLOSE(rig_lse(&r, 0, 0, 0), log(exp(1) + 1), exact);
        rig_free(&r);
    }
    attn_context_destroy(context);
}

/* The last query is level with the last key: of 2 rows and 3 keys, row 0 is level with key 1. */
TEST(s03_ref_alibi_by_hand) {
    double v[] = {1, 10, 100};
    float slope[] = {1};
    attn_context *context = ref();
    rig r = small(2, 3, 1, NULL, NULL, v);
    r.p.flags = ATTN_SCALE | ATTN_ALIBI;
    r.f.alibi = slope;
    if (go(&r, context)) {
        double e = exp(-1), sum0 = e + 1 + e, sum1 = e * e + e + 1;
        CHECK_CLOSE(rig_o(&r, 0, 0, 0, 0), (1 * e + 10 + 100 * e) / sum0, 10 * exact);
        CHECK_CLOSE(rig_o(&r, 0, 1, 0, 0), (1 * e * e + 10 * e + 100) / sum1, 10 * exact);
        CHECK_CLOSE(rig_lse(&r, 0, 0, 0), log(sum0), exact);
        CHECK_CLOSE(rig_lse(&r, 0, 1, 0), log(sum1), exact);
        rig_free(&r);
    }
    attn_context_destroy(context);
}

/* ALiBi and bias are added after the softcap, not before. */
TEST(s04_ref_bias_by_hand) {
    double q[] = {1}, k[] = {1, 0}, v[] = {1, 0};
    float slope[] = {1}, bias[] = {9, 0}; /* read backwards, by a negative stride */
    attn_context *context = ref();
    rig r = small(1, 2, 1, q, k, v);
    r.p.flags = ATTN_SCALE | ATTN_ALIBI | ATTN_BIAS;
    r.p.bias_dtype = ATTN_F32;
    r.p.scale = log(3);
    r.p.softcap = 2;
    r.f.alibi = slope;
    r.f.bias = (attn_matrix){&bias[1], {0, 0, 0, -1}};
    if (go(&r, context)) { /* s = 1 - 1 + 0 and 0 - 0 + 9 */
        CHECK_CLOSE(rig_o(&r, 0, 0, 0, 0), 1 / (1 + exp(9)), exact);
        CHECK_CLOSE(rig_lse(&r, 0, 0, 0), log(1 + exp(9)), exact);
        rig_free(&r);
    }
    attn_context_destroy(context);
}

TEST(s06_ref_sink_by_hand) {
    double v[] = {4, 8, 12};
    float sink[] = {0};
    attn_context *context = ref();
    rig r = small(1, 3, 1, NULL, NULL, v);
    r.p.flags = ATTN_SCALE | ATTN_SINK;
    r.f.sink = sink;
    if (go(&r, context)) { /* three keys and the sink share alike */
        CHECK_CLOSE(rig_o(&r, 0, 0, 0, 0), 6, exact);
        CHECK_CLOSE(rig_lse(&r, 0, 0, 0), log(4), exact);
        CHECK_CLOSE(prob(&r, 0, 0, 0, 1), 0.25, exact);
        rig_free(&r);
    }
    attn_context_destroy(context);
}

/* Scores in the thousands neither overflow nor lose their differences. */
TEST(s06_ref_softmax_of_large_scores) {
    double q[] = {1}, k[] = {-5000, 5000, 4999}, v[] = {7, 1, 0};
    attn_context *context = ref();
    rig r = small(1, 3, 1, q, k, v);
    if (go(&r, context)) {
        CHECK_CLOSE(rig_o(&r, 0, 0, 0, 0), 1 / (1 + exp(-1)), exact);
        CHECK_CLOSE(rig_lse(&r, 0, 0, 0), 5000 + log(1 + exp(-1)), 1e-12);
        rig_free(&r);
    }
    attn_context_destroy(context);
}

TEST(s08_ref_dropout_follows_the_generator) {
    enum { BATCH = 2, HEADS = 3, ROWS = 5, KEYS = 11 };
    attn_context *context = ref();
    rig r = {.p = problem(ATTN_F64, BATCH, HEADS, 1, ROWS, KEYS, 1), .probs = true};
    r.p.flags = ATTN_SCALE;
    r.p.dropout = 0.25;
    r.f.seed = UINT64_C(0x123456789abcdef0);
    r.f.offset = UINT64_C(0xfedcba9876543210);
    if (!go(&r, context)) return;
    attn_philox g = attn__philox_make(r.f.seed, r.f.offset, 0.25);
    int dropped = 0;
    for (int b = 0; b < BATCH; b++) {
        const double *v = rig_key(&r, &r.f.v, ATTN_F64, b, 0, 0);
        for (int h = 0; h < HEADS; h++) {
            for (int i = 0; i < ROWS; i++) {
                double sum = 0;
                for (int j = 0; j < KEYS; j++) {
                    bool drop = attn__dropped(&g, (uint32_t)(b * HEADS + h), (uint32_t)i, (uint32_t)j);
                    double p = prob(&r, b, h, i, j);
                    CHECK(!signbit(p) == !drop);
                    CHECK_CLOSE(fabs(p), 1.0 / KEYS, exact);
                    if (!drop) sum += v[j] / KEYS / 0.75;
                    dropped += drop;
                }
                CHECK_CLOSE(rig_o(&r, b, i, h, 0), sum, exact);
                CHECK_CLOSE(rig_lse(&r, b, i, h), log(KEYS), exact);
            }
        }
    }
    CHECK(dropped > 330 / 4 - 40 && dropped < 330 / 4 + 40); /* five standard deviations */
    rig_free(&r);
    attn_context_destroy(context);
}

TEST(s09_ref_query_heads_share_kv_heads) {
    double v[] = {1, 2, 3};
    attn_context *context = ref();
    rig r = {.p = problem(ATTN_F64, 1, 6, 3, 1, 1, 1)};
    r.f.v = attn_dense(v, 1, 3, 1);
    if (go(&r, context)) {
        for (int h = 0; h < 6; h++) CHECK(rig_o(&r, 0, 0, h, 0) == v[h / 2]);
        rig_free(&r);
    }
    attn_context_destroy(context);
}

/* ---- masks, by the words of the header ---- */

/* Is the pair masked, given the n vectors of key j? */
static bool flash_says(bool causal, int n, const int32_t *v, int i) {
    if (n == 1) return i >= v[0];
    if (n == 2 && causal) return v[0] <= i && i < v[1];
    if (n == 2) return i >= v[0] || i < v[1];
    return (v[0] <= i && i < v[1]) || (v[2] <= i && i < v[3]);
}

static bool header_says(const attn_problem *p, const int32_t *vectors, int i, int j) {
    int o = p->max_kv - p->max_q;
    bool causal = p->flags & ATTN_CAUSAL, window = p->flags & ATTN_WINDOW;
    if (causal && j > i + o) return false;
    if (window && p->window_left >= 0 && j < i + o - p->window_left) return false;
    if (window && p->window_right >= 0 && j > i + o + p->window_right) return false;
    int n = p->flashmask_vectors;
    return n == 0 || !flash_says(causal, n, vectors + j * n, i);
}

/* Exactly the allowed pairs have a probability, the same for each with a scale of 0. */
static void check_mask(const attn_problem *p, attn_context *context, uint64_t seed) {
    int32_t vectors[4 * 16];
    for (int n = 0; n < 4 * 16; n++) vectors[n] = random_range(&seed, 0, p->max_q);
    rig r = {.p = *p, .probs = true};
    if (p->flashmask_vectors) r.f.flashmask = vectors;
    test_context("flags %x, window %d,%d, %d vectors, %dx%d", (unsigned)p->flags, p->window_left, p->window_right,
                 p->flashmask_vectors, p->max_q, p->max_kv);
    if (!go(&r, context)) return;
    for (int i = 0; i < p->max_q; i++) {
        int count = 0;
        for (int j = 0; j < p->max_kv; j++) count += header_says(p, vectors, i, j);
        for (int j = 0; j < p->max_kv; j++)
            CHECK_CLOSE(prob(&r, 0, 0, i, j), header_says(p, vectors, i, j) ? 1.0 / count : 0, exact);
        CHECK_CLOSE(rig_lse(&r, 0, i, 0), count ? log(count) : -INFINITY, exact);
    }
    rig_free(&r);
}

TEST(s05_ref_masks_are_what_the_header_says) {
    static const int32_t sizes[][2] = {{1, 1}, {4, 4}, {3, 7}, {7, 3}, {1, 6}, {6, 1}};
    attn_context *context = ref();
    for (size_t n = 0; n < sizeof sizes / sizeof *sizes; n++) {
        for (int causal = 0; causal < 2; causal++) {
            attn_problem p = problem(ATTN_F64, 1, 1, 1, sizes[n][0], sizes[n][1], 1);
            p.flags = ATTN_SCALE | (causal ? ATTN_CAUSAL : 0);
            check_mask(&p, context, 1);
            p.flags |= ATTN_WINDOW;
            for (p.window_left = -1; p.window_left < 5; p.window_left++)
                for (p.window_right = -1; p.window_right < 5; p.window_right++) check_mask(&p, context, 1);
        }
    }
    attn_context_destroy(context);
    test_context(NULL);
}

TEST(s10_ref_flashmask_is_what_the_header_says) {
    static const struct {
        uint32_t flags;
        int32_t vectors;
    } kinds[] = {{ATTN_CAUSAL, 1}, {ATTN_CAUSAL, 2}, {0, 2}, {0, 4}, {ATTN_WINDOW, 4}};
    attn_context *context = ref();
    for (size_t n = 0; n < sizeof kinds / sizeof *kinds; n++) {
        for (uint64_t seed = 1; seed <= 20; seed++) {
            attn_problem p = problem(ATTN_F64, 1, 1, 1, seed % 2 ? 9 : 5, 7, 1);
            p.flags = ATTN_SCALE | kinds[n].flags;
            p.flashmask_vectors = kinds[n].vectors;
            if (kinds[n].flags & ATTN_WINDOW) p.window_left = 2, p.window_right = 3;
            check_mask(&p, context, seed);
        }
    }
    attn_context_destroy(context);
    test_context(NULL);
}

/* ---- the cache ---- */

/* v holds powers of two, so that the sum over the keys tells which of them were read. */
TEST(s11_ref_cache_by_hand) {
    enum { SLOTS = 3, PAGES = 6, PAGE = 3 };
    static const int32_t batch_index[] = {2, 0}, used[] = {5, 4}, leftpad[] = {1, 2};
    /* Entries past the used length are wild. */
    static const int32_t table[SLOTS][2] = {{4, 1}, {999, -7}, {0, 5}};
    double v[PAGES * PAGE];
    for (int n = 0; n < PAGES * PAGE; n++) v[n] = ldexp(1, n);
    attn_context *context = ref();
    rig r = {.p = problem(ATTN_F64, 2, 1, 1, 1, 6, 1)};
    r.p.flags = ATTN_SCALE | ATTN_USED_KV | ATTN_LEFTPAD | ATTN_BATCH_INDEX;
    r.p.page_size = PAGE;
    r.p.num_pages = PAGES;
    r.p.cache_batch = SLOTS;
    r.f.used_kv = used;
    r.f.leftpad = leftpad;
    r.f.batch_index = batch_index;
    r.f.page_table = table[0];
    r.f.v = attn_dense(v, PAGE, 1, 1);
    if (go(&r, context)) { /* slot 2: rows 1, 2 of page 0, rows 0, 1 of page 5; slot 0: row 2 of page 4, row 0 of page 1 */
        CHECK_CLOSE(rig_o(&r, 0, 0, 0, 0) * 4, v[1] + v[2] + v[15] + v[16], exact);
        CHECK_CLOSE(rig_o(&r, 1, 0, 0, 0) * 2, v[14] + v[3], exact);
        rig_free(&r);
    }
    attn_context_destroy(context);
}

/* Position 0 leaves all as it is, position 1 is a quarter turn of the first pair and a sixth of the second. */
TEST(s11_ref_rotary_by_hand) {
    const double sin60 = sqrt(3) / 2, cosines[] = {1, 1, 0, 0.5}, sines[] = {0, 0, 1, sin60};
    double x[] = {1, 0.5, 3, 5, 9, 1, 0.5, 3, 5, 9}, y[10];
    const double want[2][5] = {{-3, 0.25 - 5 * sin60, 1, 2.5 + 0.5 * sin60, 9}, /* pairs (1, 3) and (0.5, 5) */
                               {-0.5, 1, 1.5 - 5 * sin60, 2.5 + 3 * sin60, 9}}; /* pairs (1, 0.5) and (3, 5) */
    attn_context *context = ref();
    for (int interleaved = 0; interleaved < 2; interleaved++) {
        attn_rotary_args a = {.size = sizeof a, .dtype = ATTN_F64, .batch = 1, .rows = 2, .heads = 1, .dim = 5};
        a.rotary_dim = 4;
        a.rotary_len = 2;
        a.interleaved = interleaved;
        a.x = attn_dense(x, 2, 1, 5);
        a.y = attn_dense(y, 2, 1, 5);
        a.cos = cosines;
        a.sin = sines;
        test_context("interleaved %d", interleaved);
        CHECK_OK(attn_rotary(context, &a, NULL));
        for (int n = 0; n < 5; n++) {
            CHECK(y[n] == x[n]);
            CHECK_CLOSE(y[5 + n], want[interleaved][n], exact);
        }
        a.inverse = 1;
        a.x = a.y;
        CHECK_OK(attn_rotary(context, &a, NULL));
        for (int n = 0; n < 10; n++) CHECK_CLOSE(y[n], x[n], exact);
    }
    attn_context_destroy(context);
    test_context(NULL);
}

/* One key is in the cache and two are appended; position 1 is a quarter turn, position 2 a half. */
TEST(s11_ref_append_with_rotary_by_hand) {
    static const double cosines[] = {1, 0, -1}, sines[] = {0, 1, 0};
    static const int32_t used[] = {1};
    attn_context *context = ref();
    for (int causal = 0; causal < 2; causal++) {
        double q[] = {1, 0, 1, 0}, fresh[] = {1, 0, 1, 0}, k[] = {2, 3, NAN, NAN, NAN, NAN}, v[] = {1, NAN, NAN},
               v_new[] = {2, 4};
        rig r = small(2, 3, 2, q, k, NULL);
        r.p.dim_v = 1;
        r.p.flags = ATTN_SCALE | ATTN_USED_KV | ATTN_APPEND | ATTN_ROTARY | (causal ? ATTN_CAUSAL : 0);
        r.p.scale = 1;
        r.p.max_new = 2;
        r.p.rotary_dim = 2;
        r.p.rotary_len = 3;
        r.f.v = attn_dense(v, 3, 1, 1);
        r.f.k_new = attn_dense(fresh, 2, 1, 2);
        r.f.v_new = attn_dense(v_new, 2, 1, 1);
        r.f.used_kv = used;
        r.f.rotary_cos = cosines;
        r.f.rotary_sin = sines;
        test_context("causal %d", causal);
        if (!go(&r, context)) break;
        CHECK(k[0] == 2 && k[1] == 3 && k[2] == 0 && k[3] == 1 && k[4] == -1 && k[5] == 0);
        CHECK(v[0] == 1 && v[1] == 2 && v[2] == 4 && q[0] == 1 && q[1] == 0);
        /* Causal: row 0 becomes (0, 1) and sees two keys, row 1 becomes (-1, 0). Otherwise both are (0, 1) and see all. */
        double sum0 = exp(3) + exp(1) + (causal ? 0 : 1), sum1 = causal ? exp(-2) + 1 + exp(1) : sum0;
        CHECK_CLOSE(rig_lse(&r, 0, 0, 0), log(sum0), exact);
        CHECK_CLOSE(rig_lse(&r, 0, 1, 0), log(sum1), exact);
        CHECK_CLOSE(rig_o(&r, 0, 0, 0, 0), (exp(3) + 2 * exp(1) + (causal ? 0 : 4)) / sum0, exact);
        rig_free(&r);
    }
    attn_context_destroy(context);
    test_context(NULL);
}

/* ---- number formats ---- */

/* The elements of a dense tensor [batch][rows][heads][dim] as doubles, times their descale, into one of float64. */
static void widen(const rig *from, const attn_tensor *t, attn_dtype dtype, double *to, int32_t rows, int32_t heads,
                  const float *descale) {
    int32_t dim = from->p.dim_qk, heads_kv = from->p.heads_kv;
    for (int32_t n = 0; n < from->p.batch * rows * heads * dim; n++) {
        int32_t b = n / (rows * heads * dim), h = n / dim % heads / (heads / heads_kv);
        to[n] = attn__load(dtype, t->data, n) * (descale ? descale[b * heads_kv + h] : 1);
    }
}

/* The same numbers in a narrow format and in float64 give the same result, but for one rounding at the end. */
TEST(s01_ref_dtypes_differ_only_by_the_last_rounding) {
    enum { BATCH = 2, ROWS = 5, KEYS = 6, DIM = 7 };
    static const attn_dtype kinds[][3] = {{ATTN_F32, ATTN_F32, ATTN_F32},    {ATTN_F16, ATTN_F16, ATTN_F16},
                                          {ATTN_BF16, ATTN_BF16, ATTN_BF16}, {ATTN_F32, ATTN_F16, ATTN_BF16},
                                          {ATTN_F16, ATTN_E4M3, ATTN_F16},   {ATTN_E4M3, ATTN_E4M3, ATTN_BF16},
                                          {ATTN_E5M2, ATTN_E5M2, ATTN_F32},  {ATTN_BF16, ATTN_I8, ATTN_BF16}};
    attn_context *context = ref();
    for (size_t n = 0; n < 2 * sizeof kinds / sizeof *kinds; n++) {
        const attn_dtype *kind = kinds[n / 2];
        rig narrow = {.p = problem(kind[0], BATCH, 4, 2, ROWS, KEYS, DIM)};
        rig wide = {.p = problem(ATTN_F64, BATCH, 4, 2, ROWS, KEYS, DIM)};
        narrow.p.kv_dtype = kind[1];
        narrow.p.out_dtype = kind[2];
        if (n % 2) narrow.p.flags = ATTN_DESCALE;
        test_context("%s %s %s, descale %d", attn_dtype_name(kind[0]), attn_dtype_name(kind[1]), attn_dtype_name(kind[2]),
                     (int)n % 2);
        if (!go(&narrow, context) || !CHECK(rig_make(&wide, 1))) break;
        widen(&narrow, &narrow.f.q, kind[0], wide.f.q.data, ROWS, 4, narrow.f.q_descale);
        widen(&narrow, &narrow.f.k, kind[1], wide.f.k.data, KEYS, 2, narrow.f.k_descale);
        widen(&narrow, &narrow.f.v, kind[1], wide.f.v.data, KEYS, 2, narrow.f.v_descale);
        CHECK_OK(rig_run(&wide, context));
        for (int m = 0; m < BATCH * ROWS * 4 * DIM; m++) {
            double rounded[1];
            attn__store(kind[2], rounded, 0, ((const double *)wide.f.o.data)[m]);
            CHECK(attn__load(kind[2], rounded, 0) == attn__load(kind[2], narrow.f.o.data, m));
        }
        for (int m = 0; m < BATCH * ROWS * 4; m++)
            CHECK(((const float *)narrow.f.lse)[m] == (float)((const double *)wide.f.lse)[m]);
        rig_free(&narrow);
        rig_free(&wide);
    }
    attn_context_destroy(context);
    test_context(NULL);
}

/* ---- the contract ---- */

/* What the last key, its value and its column of the bias hold does not matter to rows that do not see it. */
TEST(c2_ref_masked_memory_does_not_matter) {
    enum { LENGTH = 6, DIM = 3 };
    attn_context *context = ref();
    rig r = {.p = problem(ATTN_F64, 1, 1, 1, LENGTH, LENGTH, DIM), .backward = true};
    double o[LENGTH * DIM], d_q[LENGTH * DIM], d_bias[LENGTH * LENGTH];
    r.p.flags = ATTN_CAUSAL | ATTN_BIAS;
    if (!go(&r, context)) return;
    memcpy(o, r.f.o.data, sizeof o);
    memcpy(d_q, r.f.d_q.data, sizeof d_q);
    memcpy(d_bias, r.f.d_bias.data, sizeof d_bias);
    fill_nan(ATTN_F64, rig_key(&r, &r.f.k, ATTN_F64, 0, LENGTH - 1, 0), DIM);
    fill_nan(ATTN_F64, rig_key(&r, &r.f.v, ATTN_F64, 0, LENGTH - 1, 0), DIM);
    for (int i = 0; i < LENGTH; i++) ((double *)r.f.bias.data)[i * LENGTH + LENGTH - 1] = NAN;
    CHECK_OK(rig_run(&r, context));
    CHECK(memcmp(o, r.f.o.data, (LENGTH - 1) * DIM * sizeof *o) == 0);
    CHECK(memcmp(d_q, r.f.d_q.data, (LENGTH - 1) * DIM * sizeof *d_q) == 0);
    CHECK(memcmp(d_bias, r.f.d_bias.data, (LENGTH - 1) * LENGTH * sizeof *d_bias) == 0);
    CHECK(isnan(rig_o(&r, 0, LENGTH - 1, 0, 0)));
    rig_free(&r);
    attn_context_destroy(context);
}

TEST(c1_ref_row_without_a_key) {
    float sink[] = {2};
    attn_context *context = ref();
    for (int with_sink = 0; with_sink < 2; with_sink++) {
        rig r = small(3, 2, 1, NULL, NULL, NULL); /* causal: row 0 is before the first key */
        r.p.flags = ATTN_CAUSAL | (with_sink ? ATTN_SINK : 0);
        if (with_sink) r.f.sink = sink;
        if (!go(&r, context)) break;
        CHECK(rig_o(&r, 0, 0, 0, 0) == 0);
        CHECK(rig_lse(&r, 0, 0, 0) == -INFINITY);
        CHECK(prob(&r, 0, 0, 0, 0) == 0 && prob(&r, 0, 0, 0, 1) == 0);
        CHECK(rig_o(&r, 0, 1, 0, 0) != 0);
        CHECK(rig_lse(&r, 0, 1, 0) > -INFINITY);
        rig_free(&r);
    }
    attn_context_destroy(context);
}

/* probs and d_bias are written whole, past the ends of the sequences too. */
TEST(c4_ref_probs_and_d_bias_are_written_everywhere) {
    enum { BATCH = 2, HEADS = 2, ROWS = 4, KEYS = 5 };
    static const int32_t used_q[] = {3, 0}, used_kv[] = {2, 5};
    attn_context *context = ref();
    rig r = {.p = problem(ATTN_F64, BATCH, HEADS, 1, ROWS, KEYS, 2), .backward = true, .probs = true};
    r.p.flags = ATTN_BIAS | ATTN_USED_Q | ATTN_USED_KV;
    r.f.used_q = used_q;
    r.f.used_kv = used_kv;
    if (!go(&r, context)) return;
    for (int n = 0; n < BATCH * HEADS * ROWS * KEYS; n++) {
        int b = n / (HEADS * ROWS * KEYS), i = n / KEYS % ROWS, j = n % KEYS;
        bool inside = i < used_q[b] && j < used_kv[b];
        double p = ((const double *)r.f.probs.data)[n], d = ((const double *)r.f.d_bias.data)[n];
        CHECK(inside ? p > 0 && p < 1 : p == 0);
        CHECK(inside ? d != 0 && fabs(d) < 100 : d == 0);
    }
    rig_free(&r);
    attn_context_destroy(context);
}
