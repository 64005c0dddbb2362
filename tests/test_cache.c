/*
 * Semantics 10 and 11 of attn.h: FlashMask, and the KV cache with left padding, pages, append and rotary embedding. Each is
 * held against a plain problem that means the same, on `ref` and on `cpu`.
 */
#define _GNU_SOURCE
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "build.h"
#include "numeric.h"
#include "schedule.h"
#include "test.h"

/* ---- 10: FlashMask ---- */

/* What the header says, written out once more: is row i masked for a key with these vectors? */
static bool flash_masks(bool causal, int vectors, const int32_t *v, int32_t i) {
    if (causal && vectors == 1) return i >= v[0];
    if (causal) return i >= v[0] && i < v[1];
    if (vectors == 2) return i >= v[0] || i < v[1];
    return (i >= v[0] && i < v[1]) || (i >= v[2] && i < v[3]);
}

typedef struct flash_kind {
    bool causal;
    int32_t vectors, heads;
} flash_kind;

/* A random mask of that kind against the same mask as a bias of -inf. */
static void check_flashmask(attn_context *context, attn_dtype dtype, double tolerance, flash_kind kind) {
    enum { B = 2, H = 4, KV = 2, SQ = 90, SK = 100 };
    rig a = {.p = problem(dtype, B, H, KV, SQ, SK, 12), .backward = true};
    rig b = a;
    a.p.flags = kind.causal ? ATTN_CAUSAL : 0;
    b.p.flags = a.p.flags | ATTN_BIAS;
    a.p.flashmask_vectors = kind.vectors;
    a.p.flashmask_heads = kind.heads;
    CHECK(rig_make(&a, 1) && rig_make(&b, 2));
    b.f.d_bias = (attn_matrix){0};
    int32_t *flash = (int32_t *)(uintptr_t)a.f.flashmask;
    for (int32_t n = 0; n < B * a.full.flashmask_heads * SK * kind.vectors; n++)
        flash[n] = random_range(&a.random, -5, SQ + 5); /* bounds past the ends and empty intervals too */
    for (int32_t n = 0; n < B; n++) {
        rig_copy(&b, n, &a, n);
        for (int32_t h = 0; h < H; h++)
            for (int32_t i = 0; i < SQ; i++)
                for (int32_t j = 0; j < SK; j++) {
                    int32_t head = kind.heads == KV ? h / (H / KV) : 0;
                    const int32_t *v = flash + ((n * a.full.flashmask_heads + head) * SK + j) * kind.vectors;
                    attn__store(dtype, b.f.bias.data, ((n * H + h) * SQ + i) * SK + j,
                                flash_masks(kind.causal, kind.vectors, v, i) ? -INFINITY : 0);
                }
    }
    CHECK_OK(rig_run(&a, context));
    CHECK_OK(rig_run(&b, context));
    rig_check_close(&a, &b, tolerance);
    rig_free(&a);
    rig_free(&b);
}

static void flashmask_kinds(attn_context *context, attn_dtype dtype, double tolerance) {
    for (int32_t heads = 0; heads <= 2; heads += 2) {
        check_flashmask(context, dtype, tolerance, (flash_kind){true, 1, heads});
        check_flashmask(context, dtype, tolerance, (flash_kind){true, 2, heads});
        check_flashmask(context, dtype, tolerance, (flash_kind){false, 2, heads});
        check_flashmask(context, dtype, tolerance, (flash_kind){false, 4, heads});
    }
}
TEST(s10_flashmask_is_a_bias_of_minus_infinity) { each_host(flashmask_kinds); }

/* ---- 11: append ---- */

enum { BATCH = 3, HEADS = 4, KV_HEADS = 2, MAX_KV = 120, NEW = 9, ROWS = 5, DIM = 16 };
static const int32_t used[BATCH] = {0, 50, MAX_KV - NEW};

static rig append_form(attn_dtype dtype) {
    rig r = {.p = problem(dtype, BATCH, HEADS, KV_HEADS, ROWS, MAX_KV, DIM)};
    r.p.flags = ATTN_APPEND | ATTN_USED_KV | ATTN_CAUSAL;
    r.p.max_new = NEW;
    r.f.used_kv = used;
    return r;
}

/* A problem without append whose cache is what that of `from` became; o and lse must agree. */
static void check_after_append(attn_context *context, const rig *from, double tolerance) {
    int32_t total[BATCH];
    for (int32_t b = 0; b < BATCH; b++) total[b] = used[b] + NEW;
    rig plain = {.p = problem(from->p.dtype, BATCH, HEADS, KV_HEADS, ROWS, MAX_KV, DIM)};
    plain.p.flags = ATTN_USED_KV | ATTN_CAUSAL;
    plain.f.used_kv = total;
    CHECK(rig_make(&plain, 3));
    for (int32_t b = 0; b < BATCH; b++) rig_copy(&plain, b, from, b);
    CHECK_OK(rig_run(&plain, context));
    rig_check_close(from, &plain, tolerance);
    rig_free(&plain);
}

static void *new_row(const rig *r, const attn_tensor *t, int32_t b, int32_t row, int32_t h) {
    attn_seq s = attn__seq(&r->full, &r->f, b);
    return (char *)t->data + attn__new_offset(&r->full, t, &s, row, h) * (int64_t)attn_dtype_size(r->full.dtype);
}

static void append_then_attend(attn_context *context, attn_dtype dtype, double tolerance) {
    static const int32_t page_sizes[] = {0, 7};
    for (int n = 0; n < 2; n++) {
        rig r = append_form(dtype), before = r;
        r.p.page_size = before.p.page_size = page_sizes[n];
        r.p.num_pages = before.p.num_pages = page_sizes[n] ? 3 * 18 : 0;
        CHECK(rig_make(&r, 4) && rig_make(&before, 4));
        CHECK_OK(rig_run(&r, context));
        size_t bytes = DIM * attn_dtype_size(dtype);
        for (int32_t b = 0; b < BATCH; b++)
            for (int32_t h = 0; h < KV_HEADS; h++)
                for (int32_t t = 0; t < MAX_KV; t++) {
                    int32_t row = t - used[b];
                    bool is_new = row >= 0 && row < NEW;
                    const void *k =
                        is_new ? new_row(&r, &r.f.k_new, b, row, h) : rig_key(&before, &before.f.k, dtype, b, t, h);
                    const void *v =
                        is_new ? new_row(&r, &r.f.v_new, b, row, h) : rig_key(&before, &before.f.v, dtype, b, t, h);
                    CHECK(memcmp(rig_key(&r, &r.f.k, dtype, b, t, h), k, bytes) == 0);
                    CHECK(memcmp(rig_key(&r, &r.f.v, dtype, b, t, h), v, bytes) == 0);
                }
        check_after_append(context, &r, tolerance);
        rig_free(&r);
        rig_free(&before);
    }
}
TEST(s11_append_writes_new_rows_and_nothing_else) { each_host(append_then_attend); }

static void kv_append_is_append(attn_context *context, attn_dtype dtype, double tolerance) {
    rig both = append_form(dtype), only = both;
    only.p.op = ATTN_KV_APPEND;
    CHECK(rig_make(&both, 5) && rig_make(&only, 5));
    int64_t cache = (int64_t)BATCH * MAX_KV * KV_HEADS * DIM, fresh = (int64_t)BATCH * NEW * KV_HEADS * DIM;
    size_t size = attn_dtype_size(dtype);
    memcpy(only.f.k.data, both.f.k.data, (size_t)cache * size);
    memcpy(only.f.v.data, both.f.v.data, (size_t)cache * size);
    memcpy(only.f.k_new.data, both.f.k_new.data, (size_t)fresh * size);
    memcpy(only.f.v_new.data, both.f.v_new.data, (size_t)fresh * size);
    CHECK_OK(rig_run(&both, context));
    CHECK_OK(rig_run(&only, context));
    CHECK(memcmp(only.f.k.data, both.f.k.data, (size_t)cache * size) == 0);
    CHECK(memcmp(only.f.v.data, both.f.v.data, (size_t)cache * size) == 0);
    rig_free(&both);
    rig_free(&only);
    (void)tolerance;
}
TEST(s11_kv_append_by_itself_is_the_append_of_a_forward) { each_host(kv_append_is_append); }

static void packed_new_rows(attn_context *context, attn_dtype dtype, double tolerance) {
    rig packed = append_form(dtype), padded = packed;
    packed.p.flags |= ATTN_VARLEN_NEW;
    packed.p.total_new = BATCH * NEW;
    packed.f.cu_new = (int32_t[]){0, NEW, 2 * NEW, 3 * NEW}; /* the same memory, told in another way */
    CHECK(rig_make(&packed, 6) && rig_make(&padded, 6));
    CHECK_OK(rig_run(&packed, context));
    CHECK_OK(rig_run(&padded, context));
    CHECK(rig_same(&packed, &padded));
    rig_free(&packed);
    rig_free(&padded);
    rig ragged = append_form(dtype); /* and with lengths of its own, one of them 0 */
    ragged.p.flags |= ATTN_VARLEN_NEW;
    ragged.p.total_new = 12;
    ragged.f.cu_new = (int32_t[]){1, 1, 4, 12};
    CHECK(rig_make(&ragged, 7));
    CHECK_OK(rig_run(&ragged, context));
    CHECK(rig_sk(&ragged, 0) == 0 && rig_lse(&ragged, 0, 0, 0) == -INFINITY);
    for (int32_t row = 0; row < 3; row++)
        CHECK(memcmp(rig_key(&ragged, &ragged.f.k, dtype, 1, used[1] + row, 1),
                     new_row(&ragged, &ragged.f.k_new, 1, row, 1), DIM * attn_dtype_size(dtype)) == 0);
    rig_free(&ragged);
    (void)tolerance;
}
TEST(s11_packed_new_rows) { each_host(packed_new_rows); }

static void batch_index_slots(attn_context *context, attn_dtype dtype, double tolerance) {
    rig r = append_form(dtype);
    r.p.flags |= ATTN_BATCH_INDEX;
    r.p.cache_batch = 5;
    r.f.batch_index = (int32_t[]){3, 0, 4};
    CHECK(rig_make(&r, 8));
    CHECK_OK(rig_run(&r, context));
    check_after_append(context, &r, tolerance);
    rig_free(&r);
}
TEST(s11_append_into_slots_by_batch_index) { each_host(batch_index_slots); }

/* ---- 11: rotary ---- */

/* Rotates a row of doubles by the definition: pairs (0, 1), ... or (0, half), ... */
static void rotate_by_hand(double *x, int32_t dim, int32_t position, bool interleaved) {
    int32_t half = dim / 2;
    for (int32_t n = 0; n < half; n++) {
        double angle = position * pow(10000, -(double)n / half), c = cos(angle), s = sin(angle);
        double *first = interleaved ? &x[2 * n] : &x[n], *second = interleaved ? &x[2 * n + 1] : &x[n + half];
        double a = *first, b = *second;
        *first = a * c - b * s;
        *second = a * s + b * c;
    }
}

static void check_rotary(attn_context *context, attn_dtype dtype, double tolerance, uint32_t flags, int32_t rotary_dim) {
    static const int32_t positions[] = {7, 0, 100};
    rig r = append_form(dtype);
    r.p.flags |= ATTN_ROTARY | flags;
    r.p.rotary_dim = rotary_dim;
    r.p.rotary_len = 128;
    if (flags & ATTN_ROTARY_POS) r.f.rotary_pos = positions;
    CHECK(rig_make(&r, 9));
    rig given = {.p = problem(dtype, BATCH, HEADS, KV_HEADS, ROWS, MAX_KV, DIM)}; /* keeps q as it was */
    CHECK(rig_make(&given, 10));
    size_t q_bytes = (size_t)BATCH * ROWS * HEADS * DIM * attn_dtype_size(dtype);
    memcpy(given.f.q.data, r.f.q.data, q_bytes);
    CHECK_OK(rig_run(&r, context));
    CHECK(memcmp(given.f.q.data, r.f.q.data, q_bytes) == 0);
    bool interleaved = flags & ATTN_ROTARY_INTERLEAVED;
    for (int32_t b = 0; b < BATCH; b++) {
        int32_t first = flags & ATTN_ROTARY_POS ? positions[b] : used[b];
        double x[DIM];
        for (int32_t h = 0; h < KV_HEADS; h++)
            for (int32_t row = 0; row < NEW; row++) {
                for (int32_t n = 0; n < DIM; n++) x[n] = attn__load(dtype, new_row(&r, &r.f.k_new, b, row, h), n);
                rotate_by_hand(x, rotary_dim, first + row, interleaved);
                for (int32_t n = 0; n < DIM; n++)
                    CHECK_CLOSE(attn__load(dtype, rig_key(&r, &r.f.k, dtype, b, used[b] + row, h), n), x[n], tolerance);
            }
        for (int32_t h = 0; h < HEADS; h++) /* rotate q, to go on without rotary below */
            for (int32_t i = 0; i < ROWS; i++) {
                void *q = rig_row(&r, &r.f.q, dtype, b, i, h);
                for (int32_t n = 0; n < DIM; n++) x[n] = attn__load(dtype, q, n);
                rotate_by_hand(x, rotary_dim, first + i, interleaved);
                for (int32_t n = 0; n < DIM; n++) attn__store(dtype, q, n, x[n]);
            }
    }
    check_after_append(context, &r, tolerance);
    rig_free(&r);
    rig_free(&given);
}

static void rotary_forms(attn_context *context, attn_dtype dtype, double tolerance) {
    check_rotary(context, dtype, tolerance, 0, DIM);
    check_rotary(context, dtype, tolerance, ATTN_ROTARY_INTERLEAVED, DIM);
    check_rotary(context, dtype, tolerance, ATTN_ROTARY_POS, 6);
    check_rotary(context, dtype, tolerance, ATTN_ROTARY_POS | ATTN_ROTARY_INTERLEAVED, 2);
}
TEST(s11_rotary_by_the_definition) { each_host(rotary_forms); }

static void rotary_there_and_back(attn_context *context, attn_dtype dtype, double tolerance) {
    enum { B = 2, S = 10, H = 3, D = 20, R = 12, COUNT = B * S * H * D };
    rig r = {.p = problem(dtype, B, H, H, S, S, D)};
    CHECK(rig_make(&r, 11));
    void *turned = rig_tensor(&r, dtype, COUNT, RIG_OUTPUT);
    void *c = rig_tensor(&r, ATTN_F64, 64 * R / 2, RIG_INPUT), *s = rig_tensor(&r, ATTN_F64, 64 * R / 2, RIG_INPUT);
    if (!CHECK(turned && c && s)) return;
    for (int n = 0; n < 64 * R / 2; n++) {
        double angle = ((double *)c)[n];
        ((double *)c)[n] = cos(angle);
        ((double *)s)[n] = sin(angle);
    }
    static const int32_t pos[] = {0, 54};
    attn_rotary_args args = {.size = sizeof args,
                             .dtype = dtype,
                             .rotary_dtype = ATTN_F64,
                             .batch = B,
                             .rows = S,
                             .heads = H,
                             .dim = D,
                             .rotary_dim = R,
                             .rotary_len = 64,
                             .x = r.f.q,
                             .y = attn_dense(turned, S, H, D),
                             .cos = c,
                             .sin = s,
                             .pos = pos};
    for (args.interleaved = 0; args.interleaved < 2; args.interleaved++) {
        args.x = r.f.q;
        args.inverse = 0;
        CHECK_OK(attn_rotary(context, &args, NULL));
        int different = 0;
        for (int n = 0; n < COUNT; n++)
            if (n % D < R) different += fabs(attn__load(dtype, turned, n) - attn__load(dtype, r.f.q.data, n)) > 0.01;
        CHECK(different > COUNT / 4);
        args.x = args.y; /* in place */
        args.inverse = 1;
        CHECK_OK(attn_rotary(context, &args, NULL));
        for (int n = 0; n < COUNT; n++)
            CHECK_CLOSE(attn__load(dtype, turned, n), attn__load(dtype, r.f.q.data, n), n % D < R ? tolerance : 0);
    }
    rig_free(&r);
}
TEST(s11_attn_rotary_there_and_back_in_place) { each_host(rotary_there_and_back); }

static void rotary_packed(attn_context *context, attn_dtype dtype, double tolerance) {
    enum { TOTAL = 12, H = 2, D = 8 };
    rig r = {.p = problem(dtype, 1, H, H, TOTAL, 1, D)};
    CHECK(rig_make(&r, 12));
    double c[20 * D / 2], s[20 * D / 2];
    for (int n = 0; n < 20 * D / 2; n++) c[n] = 0, s[n] = 1 + n / (D / 2); /* times the row of the table, a quarter turn */
    void *out = rig_tensor(&r, dtype, TOTAL * H * D, RIG_INPUT);
    if (!CHECK(out != NULL)) return;
    double untouched = attn__load(dtype, out, 0);
    attn_rotary_args args = {.size = sizeof args,
                             .dtype = dtype,
                             .rotary_dtype = ATTN_F64,
                             .batch = 2,
                             .rows = 7,
                             .heads = H,
                             .dim = D,
                             .rotary_dim = D,
                             .rotary_len = 20,
                             .x = r.f.q,
                             .y = attn_dense(out, TOTAL, H, D),
                             .cos = c,
                             .sin = s,
                             .pos = (int32_t[]){0, 13},
                             .cu = (int32_t[]){1, 5, 12},
                             .total = TOTAL};
    CHECK_OK(attn_rotary(context, &args, NULL));
    CHECK(attn__load(dtype, out, 0) == untouched); /* row 0 is in no sequence */
    for (int row = 1; row < TOTAL; row++) {
        double turn = row < 5 ? 1 + row - 1 : 1 + 13 + row - 5;
        CHECK_CLOSE(attn__load(dtype, out, row * H * D), -turn * attn__load(dtype, r.f.q.data, row * H * D + D / 2),
                    turn * tolerance);
    }
    rig_free(&r);
}
TEST(s11_attn_rotary_of_packed_rows) { each_host(rotary_packed); }

/* ---- 11: a cache of 8 bits ---- */

static void quantised_cache(attn_context *context, attn_dtype dtype, double tolerance) {
    if (dtype == ATTN_F64) return; /* f64 goes with f64 only */
    static const attn_dtype kinds[] = {ATTN_E4M3, ATTN_E5M2, ATTN_I8};
    for (int n = 0; n < 3; n++) {
        rig r = append_form(dtype);
        r.p.flags |= ATTN_DESCALE;
        r.p.kv_dtype = kinds[n];
        static const float one = 1, k_factor = 0.25f, v_factor = 0.125f;
        r.f.q_descale = &one, r.f.k_descale = &k_factor, r.f.v_descale = &v_factor;
        CHECK(rig_make(&r, 13));
        attn__store(dtype, new_row(&r, &r.f.k_new, 0, 0, 0), 0, 1e9); /* saturates */
        CHECK_OK(rig_run(&r, context));
        double largest = kinds[n] == ATTN_E4M3 ? 448 : kinds[n] == ATTN_E5M2 ? 57344 : 127;
        CHECK(attn__load(kinds[n], rig_key(&r, &r.f.k, kinds[n], 0, used[0], 0), 0) == largest);
        double step = kinds[n] == ATTN_E4M3 ? 1 / 16.0 : kinds[n] == ATTN_E5M2 ? 1 / 8.0 : 0;
        for (int32_t row = 1; row < NEW; row++)
            for (int32_t x = 0; x < DIM; x++) {
                double v = attn__load(dtype, new_row(&r, &r.f.v_new, 1, row, 1), x);
                double stored = attn__load(kinds[n], rig_key(&r, &r.f.v, kinds[n], 1, used[1] + row, 1), x) * v_factor;
                CHECK_CLOSE(stored, v, fabs(v) * step + v_factor / 2);
            }
        rig_free(&r);
    }
    (void)tolerance;
}
TEST(s11_append_to_a_cache_of_8_bits_divides_and_saturates) { each_host(quantised_cache); }

/* ---- 11: factors of pages ---- */

static void swap_bytes(void *a, void *b, size_t bytes) {
    unsigned char *x = a, *y = b;
    for (size_t n = 0; n < bytes; n++) {
        unsigned char kept = x[n];
        x[n] = y[n], y[n] = kept;
    }
}

/* The last page becomes the first, and so on, with all that belongs to it. */
static void turn_pages(rig *r) {
    const attn_problem *p = &r->full;
    size_t size = attn_dtype_size(p->kv_dtype);
    for (int32_t n = 0; n < p->num_pages / 2; n++) {
        int64_t m = p->num_pages - 1 - n;
        for (int i = 0; i < 2; i++) {
            const attn_tensor *t = i ? &r->f.v : &r->f.k;
            size_t bytes = (size_t)t->stride[0] * size;
            swap_bytes((char *)t->data + (size_t)n * bytes, (char *)t->data + (size_t)m * bytes, bytes);
            float *factor = (float *)(uintptr_t)(i ? r->f.v_descale : r->f.k_descale);
            swap_bytes(factor + n * p->heads_kv, factor + m * p->heads_kv, (size_t)p->heads_kv * sizeof *factor);
        }
    }
    int32_t *table = (int32_t *)(uintptr_t)r->f.page_table;
    for (int64_t n = 0; n < p->batch * attn__pages_per_slot(p, &r->f); n++) table[n] = p->num_pages - 1 - table[n];
}

/* o of a row in double, and the largest sum of sizes of terms that any element of it has. */
static double expect_row(const rig *r, int32_t b, int32_t i, int32_t h, double *o) {
    const attn_problem *p = &r->full;
    int32_t kv_head = h / (p->heads_q / p->heads_kv), sk = rig_sk(r, b);
    double score[512], size[64] = {0}, most = -INFINITY, sum = 0, largest = 0;
    const char *q = rig_row(r, &r->f.q, p->dtype, b, i, h);
    for (int32_t j = 0; j < sk; j++) {
        int32_t page = r->f.page_table[b * attn__pages_per_slot(p, &r->f) + j / p->page_size];
        const char *k = rig_key(r, &r->f.k, p->kv_dtype, b, j, kv_head);
        double dot = 0;
        for (int32_t x = 0; x < p->dim_qk; x++) dot += attn__load(p->dtype, q, x) * attn__load(p->kv_dtype, k, x);
        score[j] =
            dot * p->scale * r->f.q_descale[b * p->heads_kv + kv_head] * r->f.k_descale[page * p->heads_kv + kv_head];
        most = fmax(most, score[j]);
    }
    for (int32_t x = 0; x < p->dim_v; x++) o[x] = 0;
    for (int32_t j = 0; j < sk; j++) {
        int32_t page = r->f.page_table[b * attn__pages_per_slot(p, &r->f) + j / p->page_size];
        const char *v = rig_key(r, &r->f.v, p->kv_dtype, b, j, kv_head);
        double weight = exp(score[j] - most), factor = r->f.v_descale[page * p->heads_kv + kv_head];
        sum += weight;
        for (int32_t x = 0; x < p->dim_v; x++) {
            double term = weight * factor * attn__load(p->kv_dtype, v, x);
            o[x] += term;
            size[x] += fabs(term);
        }
    }
    for (int32_t x = 0; x < p->dim_v; x++) {
        o[x] /= sum;
        largest = fmax(largest, size[x] / sum);
    }
    return largest;
}

/* Factors of v up to 2^60 apart and of either sign; those of pages that nobody sees are NaN. */
static void page_factors_of(attn_context *context, attn_dtype dtype, attn_dtype kind, int32_t rows) {
    enum { B = 3, H = 4, KV = 2, KEYS = 420, D = 64, SIZE = 12, EACH = KEYS / SIZE, ALL = B * EACH + 5 };
    double tolerance = dtype == ATTN_F64 ? 1e-11 : dtype == ATTN_F32 ? 1e-4 : 2e-3;
    rig r = {.p = problem(dtype, B, H, KV, rows, KEYS, D)};
    r.p.flags = ATTN_USED_KV | ATTN_DESCALE | ATTN_DESCALE_PAGES;
    r.p.kv_dtype = kind;
    r.p.out_dtype = dtype == ATTN_F64 ? ATTN_F64 : ATTN_F32;
    r.p.page_size = SIZE;
    r.p.num_pages = ALL;
    r.f.used_kv = (int32_t[]){KEYS, 1, 200};
    CHECK(rig_make(&r, 17));
    float *k_factor = (float *)(uintptr_t)r.f.k_descale, *v_factor = (float *)(uintptr_t)r.f.v_descale;
    for (int32_t n = 0; n < ALL * KV; n++) k_factor[n] = v_factor[n] = NAN;
    for (int32_t b = 0; b < B; b++)
        for (int32_t n = 0; n * SIZE < r.f.used_kv[b]; n++)
            for (int32_t h = 0; h < KV; h++) {
                int32_t at = r.f.page_table[b * EACH + n] * KV + h;
                int sign = random_range(&r.random, 0, 1) ? 1 : -1;
                k_factor[at] = sign * ldexpf(kind == ATTN_I8 ? 0.0625f : 1, random_range(&r.random, -4, 2));
                v_factor[at] = sign * ldexpf(1.1f, random_range(&r.random, -30, 30));
            }
    CHECK_OK(rig_run(&r, context));
    size_t bytes = (size_t)B * rows * H * D * attn_dtype_size(r.full.out_dtype);
    void *before = malloc(bytes);
    CHECK(before != NULL);
    memcpy(before, r.f.o.data, bytes);
    for (int32_t b = 0; b < B; b++)
        for (int32_t h = 0; h < H; h++)
            for (int32_t i = 0; i < rows; i++) {
                double o[D], largest = expect_row(&r, b, i, h, o);
                for (int32_t x = 0; x < D; x++) CHECK_CLOSE(rig_o(&r, b, i, h, x), o[x], tolerance * largest);
            }
    turn_pages(&r);
    rig_reset(&r, 0xa5);
    CHECK_OK(rig_run(&r, context));
    CHECK(memcmp(before, r.f.o.data, bytes) == 0);
    free(before);
    rig_free(&r);
}

static void page_factors(attn_context *context, attn_dtype dtype) {
    static const attn_dtype kinds[] = {ATTN_E4M3, ATTN_E5M2, ATTN_I8};
    for (int32_t rows = 1; rows <= 19; rows += 9) { /* few, or not */
        page_factors_of(context, dtype, dtype, rows);
        for (int n = 0; n < 3 && dtype != ATTN_F64; n++) page_factors_of(context, dtype, kinds[n], rows);
    }
}
TEST(s11_factors_of_pages) { each_cpu(page_factors); }

/* ---- what is out of range ---- */

enum { SLOT = 128, PAGE = 16, PAGES = BATCH * SLOT / PAGE, SOME_NEW = 3, MIDDLE = 50 };

/*
 * What is wrong with the second of three sequences. The numbers are such that a GPU, which brings them into range, comes to the first
 * sequence's memory, or to the last one's.
 */
typedef struct flaw {
    const char *where;
    uint32_t
        flags; /* besides those of flawed_form; ATTN_VARLEN_... has INT32_MAX as the second one's end, which is the third one's start */
    int32_t page_size, used, page, number; /* page: of the table, gets the number; -1: none does */
    int32_t slot;                          /* ATTN_BATCH_INDEX */
    bool appends_nothing;
} flaw;

static rig flawed_form(attn_dtype dtype, const flaw *x, attn_op op, int32_t rows, int32_t dim) {
    rig r = {.p = problem(dtype, BATCH, HEADS, KV_HEADS, rows, SLOT, dim)};
    r.p.op = op;
    r.p.flags = ATTN_USED_KV | x->flags | (op == ATTN_FORWARD ? ATTN_APPEND | ATTN_CAUSAL : 0);
    r.p.max_new = SOME_NEW;
    r.p.page_size = x->page_size;
    r.p.num_pages = x->page_size ? PAGES : 0;
    r.p.total_kv = x->flags & ATTN_VARLEN_KV ? BATCH * SLOT : 0;
    r.p.total_new = x->flags & ATTN_VARLEN_NEW ? BATCH * SOME_NEW : 0;
    r.p.cache_batch = x->flags & ATTN_BATCH_INDEX ? BATCH : 0;
    return r;
}

static bool put(const int32_t *array, int at, int32_t number) {
    if (array) ((int32_t *)(uintptr_t)array)[at] = number;
    return array;
}

/* Lengths without a flaw, and with it. */
static bool make_lengths(rig *r, const flaw *x, bool wrong) {
    bool made = rig_make(r, 51) && put(r->f.used_kv, 0, 0) && put(r->f.used_kv, 1, wrong ? x->used : MIDDLE);
    if (!made || !wrong) return made;
    put(r->f.cu_kv, 2, INT32_MAX);
    put(r->f.cu_new, 2, INT32_MAX);
    put(r->f.batch_index, 1, x->slot);
    if (x->page >= 0) put(r->f.page_table, SLOT / PAGE + x->page, x->number);
    return true;
}

/* Is slot b of the caches the same? */
static bool same_cache(const rig *x, const rig *y, int32_t b) {
    const size_t slot = (size_t)(SLOT * KV_HEADS * x->p.dim_qk) * attn_dtype_size(x->p.dtype);
    return memcmp((char *)x->f.k.data + b * slot, (char *)y->f.k.data + b * slot, slot) == 0 &&
           memcmp((char *)x->f.v.data + b * slot, (char *)y->f.v.data + b * slot, slot) == 0;
}

/* Everything that a flawed call leaves in memory, beside what the same call leaves without the flaw. */
static void check_flaw(attn_context *context, attn_dtype dtype, const flaw *x, attn_op op, int32_t rows, int32_t dim) {
    rig right = flawed_form(dtype, x, op, rows, dim), wrong = right, before = right;
    const bool on_gpu = strcmp(attn_context_backend(context), "cuda") == 0;
    const bool is_met =
        !on_gpu || op == ATTN_FORWARD || x->page < 0 || x->appends_nothing; /* an append looks at its own page alone */
    const bool spoils_next = x->flags & (ATTN_VARLEN_KV | ATTN_VARLEN_NEW);
    if (!CHECK(make_lengths(&right, x, false) && make_lengths(&wrong, x, true) && make_lengths(&before, x, true))) return;
    CHECK_OK(rig_run(&right, context));
    CHECK_STATUS(rig_run(&wrong, context), is_met ? ATTN_INVALID : ATTN_OK, is_met ? x->where : "");
    CHECK_OK(attn_device_status(context)); /* it is said once */
    if (!on_gpu) CHECK_SAY(rig_same(&wrong, &before), "%s: a call that is refused writes nothing", x->where);
    for (int32_t b = 0; b < BATCH && on_gpu; b++) {
        const bool is_flawed = b == 1 || (b == 2 && spoils_next);
        if (is_flawed && !x->appends_nothing) continue;
        CHECK_SAY(same_cache(&wrong, is_flawed ? &before : &right, b), "%s: cache of sequence %d", x->where, b);
        if (op == ATTN_FORWARD && !is_flawed)
            CHECK_SAY(rig_same_rows(&wrong, b, &right, b, rows), "%s: rows of sequence %d", x->where, b);
    }
    rig_free(&right);
    rig_free(&wrong);
    rig_free(&before);
}

static void out_of_range(attn_context *context, attn_dtype dtype) {
    static const flaw flaws[] = {
        {"used_kv[1]", 0, 0, SLOT - SOME_NEW + 1, -1, 0, 1, false}, /* the append ends past the capacity */
        {"used_kv[1]", 0, PAGE, SLOT - SOME_NEW + 1, -1, 0, 1, false},
        {"used_kv[1]", 0, 0, INT32_MAX, -1, 0, 1, true},
        {"used_kv[1]", 0, PAGE, INT32_MAX, -1, 0, 1, true},
        {"used_kv[1]", 0, PAGE, -1, -1, 0, 1, true},
        {"page_table[1]", 0, PAGE, MIDDLE, 1, PAGES, 1, false}, /* a page that is read */
        {"page_table[1]", 0, PAGE, MIDDLE, 0, -1, 1, false},
        {"page_table[1]", 0, PAGE, MIDDLE, MIDDLE / PAGE, -1, 1, true}, /* the page of the new keys */
        {"page_table[1]", 0, PAGE, MIDDLE, MIDDLE / PAGE, INT32_MAX, 1, true},
        {"batch_index[1]", ATTN_BATCH_INDEX, 0, MIDDLE, -1, 0, BATCH, true},
        {"batch_index[1]", ATTN_BATCH_INDEX, PAGE, MIDDLE, -1, 0, -1, true},
        {"kv[", ATTN_VARLEN_KV, 0, SLOT - 1, -1, 0, 1, true}, /* cu_kv, or used_kv of the third */
        {"cu_new[", ATTN_VARLEN_NEW, PAGE, MIDDLE, -1, 0, 1, true},
    };
    static const int32_t rows[] = {1, 5, 40}, dims[] = {16, 64, 128};
    for (size_t n = 0; n < sizeof flaws / sizeof *flaws; n++)
        for (int d = 0; d < (on_host() ? 1 : 3); d++) {
            for (int r = 0; r < 3; r++) check_flaw(context, dtype, &flaws[n], ATTN_FORWARD, rows[r], dims[d]);
            check_flaw(context, dtype, &flaws[n], ATTN_KV_APPEND, 0, dims[d]);
        }
}
TEST(s11_what_is_out_of_range_is_said_and_harms_nobody_else) { each_cpu(out_of_range); }
