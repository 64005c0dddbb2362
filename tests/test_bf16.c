/*
 * The micro-kernels of bf16 products (src/cpu/bf16.h), by AMX, AVX-512 BF16 or BFMMLA, each against plain C in double. Inputs are bf16
 * exactly, so products must be right to the accuracy of float sums. What packing may not read lies behind a guard page or is NaN, and
 * what it must write is NaN before.
 *
 * Without such products on the machine they are not run; without them in the library they are not here.
 */
#define _GNU_SOURCE
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "build.h"
#include "cpu/amx.h"
#include "cpu/bf16.h"
#include "cpu/features.h"
#include "cpu/micro.h"
#include "numeric.h"
#include "test.h"

#ifdef ATTN_HAVE_BF16

/* Of what needs no tiles. */
static bool skip_vectors(void) {
    if (attn__cpu_detect() & (ATTN_CPU_AVX512_BF16 | ATTN_CPU_NEON_BF16)) return false;
    test_skip("this machine has no AVX-512 BF16, or no BFMMLA");
    return true;
}

#ifdef ATTN_HAVE_AMX

static bool skip(void) {
    if (attn__amx_available()) return false;
    test_skip("this machine or its kernel has no AMX for bf16");
    return true;
}

/* ---- permission ---- */

static bool is_permitted(void) {
    enum { ARCH_GET_XCOMP_PERM = 0x1022, XFEATURE_XTILEDATA = 18 };
    uint64_t features = 0;
    CHECK(syscall(SYS_arch_prctl, ARCH_GET_XCOMP_PERM, &features) == 0);
    return features >> XFEATURE_XTILEDATA & 1;
}

static void make_plan(const char *isa, attn_dtype dtype) {
    use_isa(isa);
    attn_context *context = make_context(ATTN_BACKEND_CPU, 1);
    attn_problem p = problem(dtype, 1, 1, 1, 64, 64, 64);
    attn_plan *plan;
    if (CHECK_OK(attn_plan_create(&plan, context, &p))) attn_plan_destroy(plan);
    attn_context_destroy(context);
    use_isa(NULL);
}

/*
 * The system is asked for tiles when a plan takes them, not before. Other tests have asked already, and a new program has not: this
 * one, with FRESH in its environment.
 */
#define FRESH "ATTN_TEST_FRESH"
TEST(amx_permission_is_asked_for_when_amx_is_used) {
#ifdef ATTN_EMULATE_AMX
    test_skip("tiles are emulated: nobody is asked");
    return;
#endif
    if (!attn__amx_present()) {
        skip();
        return;
    }
    if (!getenv(FRESH)) {
        pid_t child = fork();
        if (child == 0) {
            if (setenv(FRESH, "1", 1) != 0 || !freopen("/dev/null", "w", stdout)) _exit(3);
            execl("/proc/self/exe", "attn-tests", "amx_permission_is_asked_for_when_amx_is_used", (char *)NULL);
            _exit(3);
        }
        int status = 0;
        CHECK(child > 0 && waitpid(child, &status, 0) == child);
        CHECK_SAY(status == 0, "see " FRESH "=1 attn-tests amx_permission; its status is %#x", (unsigned)status);
        return;
    }
    attn_kernel_info info;
    CHECK(strstr(attn_cpu_features(), "AMX") != NULL);
    for (int32_t n = 0; attn_kernel_get(n, &info, sizeof info) == ATTN_OK; n++) continue;
    make_plan("avx2", ATTN_BF16);
    make_plan("avx512", ATTN_BF16);
    make_plan("avx512bf16", ATTN_BF16);
    make_plan("avx512", ATTN_F32);
    make_plan(NULL, ATTN_F64);
    CHECK(!is_permitted());
    make_plan(NULL, ATTN_BF16);
    CHECK(is_permitted());
}

/* Tiles are for plans that have work for them: others do not ask, and do not wait for them to wake up. */
TEST(amx_kernels_are_taken_by_plans_they_pay_for) {
    static const struct {
        attn_op op;
        attn_dtype dtype;
        int32_t rows, keys, dim;
        float scale;
        const char *by_default, *asked_for; /* with ATTN_CPU=amx */
    } of[] = {
        {ATTN_FORWARD, ATTN_BF16, 1, 64, 64, 0, "fwd_amx_bf16", "fwd_amx_bf16"},
        {ATTN_FORWARD, ATTN_F32, 4, 4096, 64, 0, "fwd_avx512_f32", "fwd_avx512_f32"},
        {ATTN_FORWARD, ATTN_F32, 5, 4096, 64, 0, "fwd_amx_f32", "fwd_amx_f32"},
        {ATTN_FORWARD, ATTN_F16, 4, 4096, 64, 0, "fwd_avx512_f32", "fwd_avx512_f32"},
        {ATTN_FORWARD, ATTN_F16, 5, 4096, 64, 0, "fwd_amx_f16", "fwd_amx_f16"},
        {ATTN_BACKWARD, ATTN_BF16, 64, 64, 64, 0, "bwd_amx_bf16", "bwd_amx_bf16"},
        {ATTN_BACKWARD, ATTN_F32, 64, 64, 72, 0, "bwd_amx_f32", "bwd_amx_f32"},
        {ATTN_BACKWARD, ATTN_F32, 63, 64, 72, 0, "bwd_avx512_f32", "bwd_amx_f32"},
        {ATTN_BACKWARD, ATTN_F32, 64, 63, 72, 0, "bwd_avx512_f32", "bwd_amx_f32"},
        {ATTN_BACKWARD, ATTN_F32, 64, 64, 64, 0, "bwd_avx512_f32", "bwd_amx_f32"},
        {ATTN_BACKWARD, ATTN_F32, 4, 64, 72, 0, "bwd_avx512_f32", "bwd_avx512_f32"},
        {ATTN_BACKWARD, ATTN_F16, 64, 64, 17, 0, "bwd_amx_f16", "bwd_amx_f16"},
        {ATTN_BACKWARD, ATTN_F16, 64, 64, 16, 0, "bwd_avx512_f32", "bwd_amx_f16"},
        {ATTN_BACKWARD, ATTN_F16, 63, 64, 72, 0, "bwd_avx512_f32", "bwd_amx_f16"},
        {ATTN_BACKWARD, ATTN_F16, 64, 63, 72, 0, "bwd_avx512_f32", "bwd_amx_f16"},
        {ATTN_BACKWARD, ATTN_F32, 64, 64, 72, 0x1p20f, "bwd_amx_f32", "bwd_amx_f32"},
        {ATTN_BACKWARD, ATTN_F32, 64, 64, 72, 0x1.000002p20f, "bwd_avx512_f32", "bwd_avx512_f32"},
        {ATTN_BACKWARD, ATTN_F16, 64, 64, 72, 0x1p20f, "bwd_amx_f16", "bwd_amx_f16"},
        {ATTN_BACKWARD, ATTN_F16, 64, 64, 72, 0x1.000002p20f, "bwd_avx512_f32", "bwd_avx512_f32"},
    };
    if (skip()) return;
    for (size_t n = 0; n < 2 * sizeof of / sizeof *of; n++) {
        const char *wanted = n % 2 ? of[n / 2].asked_for : of[n / 2].by_default;
        use_isa(n % 2 ? "amx" : NULL);
        attn_context *context = make_context(ATTN_BACKEND_CPU, 1);
        attn_problem p = problem(of[n / 2].dtype, 1, 1, 1, of[n / 2].rows, of[n / 2].keys, of[n / 2].dim);
        attn_plan *plan;
        p.op = of[n / 2].op;
        if (of[n / 2].scale > 0) p.flags |= ATTN_SCALE, p.scale = of[n / 2].scale;
        if (CHECK_OK(attn_plan_create(&plan, context, &p))) {
            CHECK_SAY(strcmp(attn_plan_kernel(plan), wanted) == 0, "case %zu: %s, not %s", n, attn_plan_kernel(plan),
                      wanted);
            attn_plan_destroy(plan);
        }
        attn_context_destroy(context);
        use_isa(NULL);
    }
}

#endif

/* ---- inputs ---- */

static int32_t pad(int32_t n, int32_t to) { return (n + to - 1) / to * to; }

/* About N(0, 1), and exactly what bf16 has. */
static uint16_t random_bf16(uint64_t *random) { return attn__to_bf16((float)random_normal(random)); }

/* Rows that end where a page begins that cannot be read. Between the rows is NaN. */
typedef struct matrix {
    uint16_t *data;
    int64_t row;
    int32_t rows, dim;
    char *map;
    size_t map_size;
} matrix;

static matrix matrix_make(int32_t rows, int32_t dim, int64_t row, uint64_t *random) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE), bytes = (size_t)((rows - 1) * row + dim) * 2;
    size_t size = (bytes + page - 1) / page * page;
    matrix m = {.row = row, .rows = rows, .dim = dim, .map_size = size + page};
    m.map = mmap(NULL, m.map_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (m.map == MAP_FAILED || mprotect(m.map + size, page, PROT_NONE) != 0) abort();
    memset(m.map, 0xff, size);
    m.data = (uint16_t *)(m.map + size - bytes);
    for (int32_t i = 0; i < rows; i++)
        for (int32_t x = 0; x < dim; x++) m.data[i * row + x] = random_bf16(random);
    return m;
}

static void matrix_free(matrix *m) { munmap(m->map, m->map_size); }

/* 0 outside: what padding must be like. */
static uint16_t element(const matrix *m, int32_t i, int32_t x) {
    return i < m->rows && x < m->dim ? m->data[i * m->row + x] : 0;
}

static double value(const matrix *m, int32_t i, int32_t x) { return (double)attn__from_bf16(element(m, i, x)); }

/* Aligned as scratch is, and NaN. */
static void *room(int64_t bytes) {
    void *p = aligned_alloc(64, (size_t)(bytes + 63) / 64 * 64);
    if (!p) abort();
    memset(p, 0xff, (size_t)(bytes + 63) / 64 * 64);
    return p;
}

static const int32_t sizes[][3] = {{32, 32, 32}, {1, 1, 1},     {33, 17, 31},  {64, 16, 128}, {96, 48, 80},
                                   {31, 5, 64},  {160, 65, 96}, {70, 130, 33}, {256, 32, 256}};
enum { SIZES = sizeof sizes / sizeof sizes[0] };

/* The elements that a packed operand of x by y takes, one of which is m or n, the other k. */
static int64_t operand_size(int32_t x, int32_t y) { return attn__bf16_pad(x) * attn__bf16_pad(y); }

/* ---- packing ---- */

/* Where a packed operand has element (i, x): i of m or n, x of k, which is padded to `k`. */
static int64_t place_a(int32_t i, int32_t x, int32_t k) { return attn__bf16_place_a(16 * (int64_t)k, i, x); }

static int64_t place_b(int32_t i, int32_t x, int32_t k) { return attn__bf16_place_b(16 * (int64_t)k, i, x); }

/* A tile is the same wherever it is; in it, each element has a place of its own. */
TEST(bf16_tiles_have_a_place_for_every_element) {
    for (int operand = 0; operand < 2; operand++) {
        int64_t (*place)(int32_t, int32_t, int32_t) = operand ? place_b : place_a;
        bool taken[512] = {false};
        for (int32_t i = 0; i < 16; i++)
            for (int32_t x = 0; x < 32; x++) {
                int64_t at = place(i, x, 96);
                CHECK(at >= 0 && at < 512 && !taken[at]);
                taken[at] = true;
                CHECK(place(i + 16, x + 64, 96) == at + (3 + 2) * 512);
            }
    }
    for (int32_t r = 0; r < 32; r++) CHECK(attn__bf16_row(attn__bf16_column(r) / 16, attn__bf16_column(r) % 16) == r);
}

TEST(bf16_packing_puts_every_element_in_its_place) {
    if (skip_vectors()) return;
    uint64_t random = 1;
    for (int n = 0; n < SIZES; n++) {
        int32_t rows = sizes[n][0], dim = sizes[n][2], all_rows = pad(rows, 32), all_dims = pad(dim, 32);
        test_context("%d rows of %d", rows, dim);
        matrix m = matrix_make(rows, dim, dim + 7 * (n % 2), &random);
        int64_t size = operand_size(rows, dim);
        uint16_t *out[4];
        for (int i = 0; i < 4; i++) out[i] = room(2 * size);
        attn__bf16_pack_rows(out[0], m.data, m.row, rows, dim);
        CHECK(attn__bf16_pack_columns(out[1], m.data, m.row, rows, dim));
        attn__bf16_pack_dims(out[2], m.data, m.row, rows, dim);
        attn__bf16_pack_pairs(out[3], m.data, m.row, rows, dim);
        int wrong = 0;
        for (int32_t i = 0; i < all_rows; i++)
            for (int32_t x = 0; x < all_dims; x++) {
                uint16_t want = element(&m, i, x);
                wrong += out[0][place_a(i, x, all_dims)] != want;
                wrong += out[1][place_a(x, i, all_rows)] != want;
                if (i < pad(rows, 16)) wrong += out[2][place_b(i, x, all_dims)] != want;
                if (x < pad(dim, 16)) wrong += out[3][place_b(x, i, all_rows)] != want;
            }
        CHECK_SAY(wrong == 0, "%d elements are wrong", wrong);
        for (int i = 0; i < 4; i++) free(out[i]);
        matrix_free(&m);
    }
}

TEST(bf16_pack_columns_finds_what_is_not_finite) {
    if (skip_vectors()) return;
    static const struct {
        uint16_t bits;
        bool finite;
    } cases[] = {{0x7f80, false}, {0xff80, false}, {0x7fc0, false}, {0xffff, false},
                 {0x7f7f, true},  {0xff7f, true},  {0x8000, true},  {0x0001, true}};
    uint64_t random = 2;
    matrix m = matrix_make(45, 40, 41, &random);
    uint16_t *a = room(2 * operand_size(45, 40));
    for (size_t n = 0; n < sizeof cases / sizeof cases[0]; n++)
        for (int32_t at = 0; at < 45 * 40; at += 37) {
            uint16_t *place = m.data + at / 40 * m.row + at % 40, before = *place;
            *place = cases[n].bits;
            CHECK_SAY(attn__bf16_pack_columns(a, m.data, m.row, 45, 40) == cases[n].finite, "%04x at %d", cases[n].bits,
                      at);
            *place = before;
        }
    free(a);
    matrix_free(&m);
}

/* ---- products ---- */

/* c against a b in double, where a [m][k] and b [n][k]; a sum of k terms is off by k roundings of at most the sum of sizes. */
static void check_product(const float *c, int64_t ldc, int64_t c_panel, const matrix *a, const matrix *b, double start) {
    for (int32_t i = 0; i < a->rows; i++)
        for (int32_t j = 0; j < b->rows; j++) {
            double sum = start, size = fabs(start);
            for (int32_t x = 0; x < a->dim; x++) {
                sum += value(a, i, x) * value(b, j, x);
                size += fabs(value(a, i, x) * value(b, j, x));
            }
            CHECK_CLOSE((double)c[i * ldc + j / 16 * c_panel + j % 16], sum, (a->dim + 2) * 0x1p-24 * size);
        }
}

static void check_products(bool by_vectors) {
    uint64_t random = 3;
    attn__bf16_begin(by_vectors);
    for (int n = 0; n < 2 * SIZES; n++) {
        int32_t m = sizes[n / 2][0], cols = sizes[n / 2][1], k = sizes[n / 2][2];
        int32_t all_m = pad(m, 32), all_n = pad(cols, 16), all_k = pad(k, 32);
        bool panels = n % 2;
        test_context("%d x %d x %d%s", m, cols, k, panels ? ", c in panels" : "");
        matrix a = matrix_make(m, k, k + 5 * (n % 3), &random), b = matrix_make(cols, k, k + 3, &random);
        uint16_t *packed_a = room(2 * operand_size(m, k)), *packed_b = room(2 * operand_size(cols, k));
        float *c = room(4 * (int64_t)all_m * all_n), *again = room(4 * (int64_t)all_m * all_n);
        attn__bf16_pack_rows(packed_a, a.data, a.row, m, k);
        attn__bf16_pack_dims(packed_b, b.data, b.row, cols, k);
        attn_bf16_product p = {.c = c,
                               .ldc = panels ? 16 : all_n,
                               .c_panel = panels ? 16 * (int64_t)all_m : 16,
                               .a = packed_a,
                               .a_panel = 16 * (int64_t)all_k,
                               .b = packed_b,
                               .b_panel = 16 * (int64_t)all_k,
                               .m = all_m,
                               .n = all_n,
                               .k = all_k,
                               .by_vectors = by_vectors};
        attn__bf16_run(&p);
        check_product(c, p.ldc, p.c_panel, &a, &b, 0);
        for (int32_t i = 0; i < all_m * all_n; i++) again[i] = 0.75f;
        p.c = again;
        p.accumulate = true;
        attn__bf16_run(&p);
        check_product(again, p.ldc, p.c_panel, &a, &b, 0.75);
        free(packed_a), free(packed_b), free(c), free(again);
        matrix_free(&a), matrix_free(&b);
    }
    attn__bf16_end(by_vectors);
}

#ifdef ATTN_HAVE_AMX
TEST(amx_products_are_right_to_the_accuracy_of_float) {
    if (!skip()) check_products(false);
}
#endif

TEST(bf16_vectors_products_are_right_to_the_accuracy_of_float) {
    if (!skip_vectors()) check_products(true);
}

/* The five products of the backward are this one with other operands: k over rows of both. */
static void check_products_over_rows(bool by_vectors) {
    uint64_t random = 4;
    attn__bf16_begin(by_vectors);
    for (int n = 0; n < SIZES; n++) {
        int32_t k = sizes[n][0], m = sizes[n][2], cols = sizes[n][1], all_k = pad(k, 32);
        test_context("%d rows of %d and %d", k, m, cols);
        matrix a = matrix_make(k, m, m + 1, &random), b = matrix_make(k, cols, cols, &random);
        uint16_t *packed_a = room(2 * operand_size(k, m)), *packed_b = room(2 * operand_size(k, cols));
        int64_t ldc = pad(cols, 16);
        float *c = room(4 * pad(m, 32) * ldc);
        attn__bf16_pack_columns(packed_a, a.data, a.row, k, m);
        attn__bf16_pack_pairs(packed_b, b.data, b.row, k, cols);
        attn_bf16_product p = {.c = c,
                               .ldc = ldc,
                               .c_panel = 16,
                               .a = packed_a,
                               .a_panel = 16 * (int64_t)all_k,
                               .b = packed_b,
                               .b_panel = 16 * (int64_t)all_k,
                               .m = pad(m, 32),
                               .n = pad(cols, 16),
                               .k = all_k,
                               .by_vectors = by_vectors};
        attn__bf16_run(&p);
        for (int32_t i = 0; i < m; i++)
            for (int32_t j = 0; j < cols; j++) {
                double sum = 0, size = 0;
                for (int32_t x = 0; x < k; x++) {
                    sum += value(&a, x, i) * value(&b, x, j);
                    size += fabs(value(&a, x, i) * value(&b, x, j));
                }
                CHECK_CLOSE((double)c[i * ldc + j], sum, (k + 2) * 0x1p-24 * size);
            }
        free(packed_a), free(packed_b), free(c);
        matrix_free(&a), matrix_free(&b);
    }
    attn__bf16_end(by_vectors);
}

#ifdef ATTN_HAVE_AMX
TEST(amx_products_over_rows) {
    if (!skip()) check_products_over_rows(false);
}
#endif

TEST(bf16_vectors_products_over_rows) {
    if (!skip_vectors()) check_products_over_rows(true);
}

#ifdef ATTN_HAVE_AMX

/* A thread that is made later may use tiles, too. */
static void *use_tiles(void *wrong) {
    uint16_t *a = room(2 * 1024), *b = room(2 * 512);
    float *c = room(4 * 512);
    for (int n = 0; n < 1024; n++) a[n] = 0x3f80, b[n / 2] = 0x4000;
    attn__bf16_begin(false);
    attn__bf16_run(&(attn_bf16_product){.c = c,
                                        .ldc = 16,
                                        .c_panel = 16,
                                        .a = a,
                                        .a_panel = 16 * (int64_t)32,
                                        .b = b,
                                        .b_panel = 512,
                                        .m = 32,
                                        .n = 16,
                                        .k = 32});
    attn__bf16_end(false);
    for (int n = 0; n < 512; n++) *(int *)wrong += c[n] != 64;
    free(a), free(b), free(c);
    return NULL;
}

TEST(amx_works_in_threads) {
    if (skip()) return;
    pthread_t threads[4];
    int wrong[4] = {0};
    for (int n = 0; n < 4; n++) CHECK(pthread_create(&threads[n], NULL, use_tiles, &wrong[n]) == 0);
    for (int n = 0; n < 4; n++) {
        pthread_join(threads[n], NULL);
        CHECK(wrong[n] == 0);
    }
}

#endif

/* ---- scores as operands ---- */

/* One case of attn__bf16_gradients: what it is given, [32][keys] each, and whether there are a slope and a rest. */
typedef struct gradients {
    int32_t keys;
    float *s, *d_p, *slope, *rest, lse[32], delta[32];
    bool with_slope, with_rest;
} gradients;

/* Where row r and key j are in panels. */
static int64_t in_panels(int32_t r, int32_t j, int32_t keys) { return ((int64_t)r / 16 * keys + j) * 16 + r % 16; }

static void check_pair(const gradients *g, int32_t r, int32_t j, uint16_t p, uint16_t d_s) {
    int64_t at = in_panels(r, j, g->keys);
    double t = 0.125 * (double)g->s[at] + (g->with_rest ? (double)g->rest[at] : 0) - (double)g->lse[r];
    double want_p = exp(t), want = want_p * (1.5 * (double)g->d_p[at] - (double)g->delta[r]);
    if (g->with_slope) want *= (double)g->slope[at];
    if (g->s[at] == -INFINITY || g->lse[r] == INFINITY) want_p = want = 0;
    if (want_p != want_p) {
        CHECK(isnan(attn__from_bf16(p)) && isnan(attn__from_bf16(d_s)));
        return;
    }
    if (want_p >= 0x1p128) {
        CHECK_SAY(p == 0x7f80, "p of row %d, key %d: %04x instead of infinity", r, j, p);
        CHECK_SAY(d_s == (want < 0 ? 0xff80 : 0x7f80), "d_s of row %d, key %d: %04x", r, j, d_s);
        return;
    }
    CHECK_SAY(fabs((double)attn__from_bf16(p) - want_p) <= 0x1.01p-9 * want_p * 2, "p of row %d, key %d", r, j);
    if (want_p == 0)
        CHECK(d_s << 1 == 0);
    else
        CHECK_SAY(fabs((double)attn__from_bf16(d_s) - want) <= 0x1.01p-8 * fabs(want) + 1e-6 * want_p,
                  "d_s of row %d, key %d", r, j);
}

static void check_gradients(const gradients *g) {
    int64_t count = 32 * (int64_t)g->keys;
    uint16_t *p = room(2 * count), *d_s = room(2 * count), *pairs = room(2 * count);
    attn__bf16_gradients(&(attn_bf16_gradients){.s = g->s,
                                                .d_p = g->d_p,
                                                .slope = g->with_slope ? g->slope : NULL,
                                                .rest = g->with_rest ? g->rest : NULL,
                                                .panel = 16 * (int64_t)g->keys,
                                                .keys = g->keys,
                                                .scale = 0.125f,
                                                .keep = 1.5f,
                                                .lse = g->lse,
                                                .delta = g->delta,
                                                .p = p,
                                                .d_s = d_s,
                                                .down = ATTN_BF16_TILE,
                                                .pairs = pairs});
    for (int32_t j = 0; j < g->keys; j++) {
        for (int32_t n = 0; n < 32; n++) {
            int32_t r = attn__bf16_row(n / 16, n % 16);
            int64_t at = place_a(j, r, 32);
            check_pair(g, r, j, p[at], d_s[at]);
            CHECK_SAY(pairs[place_b(n, j, g->keys)] == d_s[at], "pairs: row %d, key %d", r, j);
        }
    }
    free(p), free(d_s), free(pairs);
}

TEST(bf16_gradients_against_double) {
    if (skip_vectors()) return;
    uint64_t random = 5;
    for (int n = 0; n < 16; n++) {
        gradients g = {.keys = 32 + n % 3 * 32, .with_slope = n & 1, .with_rest = n & 2};
        float **arrays[] = {&g.s, &g.d_p, &g.slope, &g.rest};
        int64_t count = 32 * (int64_t)g.keys;
        test_context("case %d", n);
        for (int a = 0; a < 4; a++) {
            *arrays[a] = room(4 * count);
            for (int64_t i = 0; i < count; i++) (*arrays[a])[i] = (float)(random_range(&random, -1000000, 1000000) * 1e-5);
        }
        for (int r = 0; r < 32; r++) {
            g.lse[r] = (float)(random_range(&random, -1000, 1000) * 1e-3);
            g.delta[r] = (float)(random_range(&random, -1000, 1000) * 1e-3);
        }
        if (n & 4) g.lse[3] = NAN, g.lse[20] = INFINITY;
        for (int32_t j = 0; j < g.keys; j += 5) { /* masked: nothing else matters */
            int64_t at = in_panels((j + 3) % 32, j, g.keys);
            g.s[at] = -INFINITY;
            g.d_p[at] = NAN;
            g.slope[at] = INFINITY;
            if (n & 2) g.rest[at] = NAN;
        }
        check_gradients(&g);
        for (int a = 0; a < 4; a++) free(*arrays[a]);
    }
}

/* An lse that is not that of the scores: p of 2^128 and more is infinity, however much more, and below it is a number. */
TEST(bf16_gradients_past_all_numbers) {
    if (skip_vectors()) return;
    enum { ROWS = 32, KEYS = 32 };
    static const float logs[] = {88.3f, 88.8f, 90, 133, 177.4f, 177.5f, 178, 355, 1000, 1e10f, 1e37f, INFINITY, NAN, 3};
    const int count = sizeof logs / sizeof *logs;
    for (int n = 0; n < 4; n++) {
        gradients g = {.keys = KEYS, .with_slope = n & 1, .with_rest = n & 2};
        float **arrays[] = {&g.s, &g.d_p, &g.slope, &g.rest};
        test_context("case %d", n);
        for (int a = 0; a < 4; a++) *arrays[a] = room(4 * ROWS * KEYS);
        for (int32_t r = 0; r < ROWS; r++) {
            g.lse[r] = n && r == 20 ? INFINITY : (float)-r;
            g.delta[r] = 0.25f;
            for (int32_t j = 0; j < KEYS; j++) {
                int64_t at = in_panels(r, j, KEYS);
                g.s[at] = 8 * (logs[(r + j) % count] - (float)r - (g.with_rest ? 5 : 0));
                g.rest[at] = 5;
                g.d_p[at] = j % 2 ? -0.25f : 0.5f; /* d_s is no larger than p */
                g.slope[at] = j % 3 ? -0.5f : 1;
            }
        }
        check_gradients(&g);
        for (int a = 0; a < 4; a++) free(*arrays[a]);
    }
}

/* ---- softmax ---- */

/* A step's arrays. Scores are in panels, [width / 16][keys][16]. */
typedef struct softmax {
    attn_bf16_softmax m;
    float *scores; /* as m.s, kept */
    int32_t all;   /* keys padded */
} softmax;

static softmax softmax_make(int32_t keys, int32_t width, float factor) {
    softmax x = {.all = pad(keys, 32)};
    x.m = (attn_bf16_softmax){.s = room(4 * (int64_t)keys * width),
                              .s_panel = 16 * (int64_t)keys,
                              .keys = keys,
                              .width = width,
                              .scale = 1,
                              .factor = factor,
                              .max = room(4 * width),
                              .sum = room(4 * width),
                              .alpha = room(4 * width),
                              .p = room(2 * (int64_t)x.all * width),
                              .p_panel = 16 * (int64_t)x.all};
    x.scores = room(4 * (int64_t)keys * width);
    for (int32_t r = 0; r < width; r++) x.m.max[r] = -INFINITY, x.m.sum[r] = 0;
    return x;
}

static void softmax_free(softmax *x) {
    free(x->m.s), free(x->m.max), free(x->m.sum), free(x->m.alpha), free(x->m.p), free(x->scores);
}

static float *score(softmax *x, int32_t j, int32_t r) { return x->scores + r / 16 * x->m.s_panel + j * 16 + r % 16; }

static float p_of(const softmax *x, int32_t j, int32_t r) { return attn__from_bf16(x->m.p[place_b(r, j, x->all)]); }

static void softmax_run(softmax *x, const attn_bf16_product *products, int32_t count) {
    memcpy(x->m.s, x->scores, 4 * (size_t)x->m.keys * (size_t)x->m.width);
    attn__bf16_softmax(&x->m, products, count);
}

/* Column r after a step from (max, sum), against double. Errors: of the argument's rounding, of the exponential, of the sum. */
static void check_column(softmax *x, int32_t r, float max, float sum) {
    double largest = -INFINITY, total = 0;
    for (int32_t j = 0; j < x->m.keys; j++) largest = fmax(largest, (double)*score(x, j, r) * (double)x->m.factor);
    double now = (double)x->m.max[r], alpha = exp2((double)max - now);
    CHECK(x->m.max[r] == (float)fmax(largest, (double)max));
    CHECK_CLOSE((double)x->m.alpha[r], alpha < 0x1p-126 ? 0 : alpha,
                now == (double)max ? 0 : alpha * (2e-7 + ((double)max - now) * -0x1p-24));
    for (int32_t j = 0; j < x->m.keys; j++) {
        double t = (double)*score(x, j, r) * (double)x->m.factor - now, p = exp2(t);
        total += p;
        double error = p * (1e-6 + fabs(t) * 0x1p-24), half = ldexp(1, ilogb(p + error) - 8);
        if (p < 0x1p-126) error = half = 0x1p-126;
        CHECK_CLOSE((double)p_of(x, j, r), p, error + half);
    }
    for (int32_t j = x->m.keys; j < x->all; j++) CHECK(p_of(x, j, r) == 0);
    total += (double)sum * exp2((double)max - now);
    CHECK_CLOSE((double)x->m.sum[r], total, total * 8e-7);
}

TEST(bf16_softmax_against_double) {
    if (skip_vectors()) return;
    static const double spreads[] = {0.01, 3, 40, 1000};
    uint64_t random = 6;
    for (int n = 0; n < 16; n++) {
        int32_t keys = (int32_t[]){1, 7, 8, 32, 63, 64, 130, 257}[n / 2];
        int32_t width = 16 + 16 * (n % 3);
        softmax x = softmax_make(keys, width, 0.125f * 1.44269504f);
        float max[64], sum[64];
        for (int step = 0; step < 6; step++) {
            test_context("%d keys, %d columns, step %d", keys, width, step);
            for (int32_t j = 0; j < keys; j++)
                for (int32_t r = 0; r < width; r++)
                    *score(&x, j, r) =
                        (float)(random_range(&random, -10000, 10000) * 1e-4 * spreads[r % 4] + (step == 4 ? 50 : 0));
            memcpy(max, x.m.max, 4 * (size_t)width);
            memcpy(sum, x.m.sum, 4 * (size_t)width);
            softmax_run(&x, NULL, 0);
            for (int32_t r = 0; r < width; r++) check_column(&x, r, max[r], sum[r]);
        }
        softmax_free(&x);
    }
}

TEST(bf16_softmax_of_large_scores) {
    if (skip_vectors()) return;
    softmax x = softmax_make(40, 16, 1.44269504f);
    for (int32_t j = 0; j < 40; j++)
        for (int32_t r = 0; r < 16; r++)
            *score(&x, j, r) = (float)((r % 2 ? -1 : 1) * pow(10, 4 + 2 * (r / 2)) * (1 + 0.01 * j));
    softmax_run(&x, NULL, 0);
    for (int32_t r = 0; r < 16; r++) { /* one key has it all */
        int32_t best = r % 2 ? 0 : 39;
        for (int32_t j = 0; j < 40; j++)
            if (j != best) CHECK_SAY(p_of(&x, j, r) == 0, "column %d, key %d: %g", r, j, (double)p_of(&x, j, r));
        double largest = (double)*score(&x, best, r) * (double)x.m.factor;
        CHECK_CLOSE((double)p_of(&x, best, r), 1, 0.05);
        CHECK_CLOSE((double)x.m.max[r] + log2((double)x.m.sum[r]), largest, fabs(largest) * 0x1p-23);
    }
    softmax_free(&x);
}

TEST(bf16_softmax_of_what_is_not_finite) {
    if (skip_vectors()) return;
    softmax x = softmax_make(35, 16, 0.7f);
    for (int step = 0; step < 2; step++) {
        for (int32_t j = 0; j < 35; j++)
            for (int32_t r = 0; r < 16; r++) *score(&x, j, r) = r < 4 || (j % 3 == 0) ? -INFINITY : (float)(j - r);
        *score(&x, 34, 3) = 2; /* the only one of its column */
        *score(&x, 5, 8) = NAN;
        *score(&x, 6, 9) = attn__float(0x7fffffff); /* another NaN */
        *score(&x, 7, 10) = INFINITY;
        softmax_run(&x, NULL, 0);
        for (int32_t r = 0; r < 3; r++) {
            CHECK(x.m.max[r] == -INFINITY && x.m.sum[r] == 0);
            for (int32_t j = 0; j < 35; j++) CHECK(p_of(&x, j, r) == 0);
        }
        for (int32_t j = 0; j < 34; j++) CHECK(p_of(&x, j, 3) == 0);
        CHECK(p_of(&x, 34, 3) > 0 && isfinite(x.m.sum[3]) && x.m.sum[3] > 0);
        for (int32_t j = 0; j < 35; j += 3) CHECK(p_of(&x, j, 12) == 0);
        CHECK(isnan(x.m.sum[8]) && isnan(x.m.sum[9]) && isnan(x.m.sum[10]) && isnan(p_of(&x, 5, 8)));
        CHECK(isfinite(x.m.sum[11]) && isfinite(x.m.sum[7]) && x.m.sum[7] > 0);
    }
    softmax_free(&x);
}

/* C5: a column has the same bits wherever it is, and whatever the others are. */
TEST(bf16_softmax_columns_do_not_know_of_each_other) {
    if (skip_vectors()) return;
    enum { KEYS = 77 };
    uint64_t random = 7;
    softmax one = softmax_make(KEYS, 16, 0.2f), many = softmax_make(KEYS, 48, 0.2f);
    for (int step = 0; step < 3; step++) {
        for (int32_t j = 0; j < KEYS; j++) {
            for (int32_t r = 0; r < 48; r++)
                *score(&many, j, r) = (float)random_range(&random, -100, 100) * powf(10, r % 9);
            for (int32_t r = 0; r < 16; r++) *score(&one, j, r) = r == 3 ? *score(&many, j, 37) : 0;
        }
        softmax_run(&one, NULL, 0);
        softmax_run(&many, NULL, 0);
        for (int32_t j = 0; j < KEYS; j++) CHECK(p_of(&one, j, 3) == p_of(&many, j, 37));
        CHECK(one.m.max[3] == many.m.max[37] && one.m.sum[3] == many.m.sum[37] && one.m.alpha[3] == many.m.alpha[37]);
    }
    softmax_free(&one);
    softmax_free(&many);
}

/* The processor's mode of floating-point arithmetic, the usual one, one of a caller's that rounds up, and the bits that count. */
#if defined(__aarch64__)
enum { USUAL = 0, UPWARDS = 1 << 22, MODE_BITS = ~0 };

static uint32_t get_mode(void) {
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    return (uint32_t)mode;
}

static void set_mode(uint32_t mode) { __asm__ volatile("msr fpcr, %0" ::"r"((uint64_t)mode)); }
#else
enum { USUAL = 0x1f80, UPWARDS = 0x5f80, MODE_BITS = 0xffc0 }; /* the rest is what has happened */

static uint32_t get_mode(void) {
    uint32_t mode;
    __asm__ volatile("stmxcsr %0" : "=m"(mode));
    return mode;
}

static void set_mode(uint32_t mode) { __asm__ volatile("ldmxcsr %0" ::"m"(mode)); }
#endif

/* Products along with softmax have the bits that they have alone, and so has softmax; the processor's mode is as before. */
static void check_softmax_with_products(bool by_vectors) {
    uint64_t random = 8;
    attn__bf16_begin(by_vectors);
    for (int n = 0; n < 12; n++) {
        int32_t keys = (int32_t[]){3, 64, 200}[n % 3], width = n % 2 ? 48 : 32, count = n / 3;
        test_context("%d keys, %d columns, %d products", keys, width, count);
        softmax alone = softmax_make(keys, width, 0.3f), along = softmax_make(keys, width, 0.3f);
        for (int32_t i = 0; i < keys * width; i++)
            alone.scores[i] = along.scores[i] = (float)random_range(&random, -2000, 2000) * 0.01f;
        matrix a = matrix_make(96, 160, 160, &random), b = matrix_make(48, 160, 160, &random);
        uint16_t *packed = room(2 * operand_size(48, 160)), *packed_a = room(2 * operand_size(96, 160));
        attn__bf16_pack_dims(packed, b.data, b.row, 48, 160);
        attn__bf16_pack_rows(packed_a, a.data, a.row, 96, 160);
        float *c[2][3];
        attn_bf16_product p[3];
        for (int i = 0; i < count; i++) {
            for (int w = 0; w < 2; w++) {
                c[w][i] = room(4 * 96 * 48);
                for (int e = 0; e < 96 * 48; e++) c[w][i][e] = 1;
            }
            p[i] = (attn_bf16_product){.c = c[0][i],
                                       .ldc = 16,
                                       .c_panel = 16 * 96,
                                       .a = packed_a,
                                       .a_panel = 16 * 160,
                                       .b = packed,
                                       .b_panel = 16 * 160,
                                       .m = 96,
                                       .n = i == 1 ? 48 : 32,
                                       .k = 64 + 32 * i,
                                       .accumulate = i == 2,
                                       .by_vectors = by_vectors};
            attn__bf16_run(&p[i]);
            p[i].c = c[1][i];
        }
        set_mode(UPWARDS);
        softmax_run(&alone, NULL, 0);
        softmax_run(&along, p, count);
        uint32_t mode = get_mode();
        set_mode(USUAL);
        CHECK((mode & (uint32_t)MODE_BITS) == UPWARDS);
        CHECK(memcmp(alone.m.p, along.m.p, 2 * (size_t)alone.all * (size_t)width) == 0);
        CHECK(memcmp(alone.m.sum, along.m.sum, 4 * (size_t)width) == 0);
        for (int i = 0; i < count; i++) {
            CHECK(memcmp(c[0][i], c[1][i], 4 * 96 * 48) == 0);
            free(c[0][i]), free(c[1][i]);
        }
        free(packed), free(packed_a);
        matrix_free(&a), matrix_free(&b);
        softmax_free(&alone), softmax_free(&along);
    }
    attn__bf16_end(by_vectors);
}

#ifdef ATTN_HAVE_AMX
TEST(amx_softmax_with_products) {
    if (!skip()) check_softmax_with_products(false);
}
#endif

TEST(bf16_vectors_with_softmax) {
    if (!skip_vectors()) check_softmax_with_products(true);
}

/* ---- the rest ---- */

extern const struct attn__micro_f32 attn__micro_c_f32;

TEST(bf16_rescale_and_transpose) {
    if (skip_vectors()) return;
    float panel[48 * 16], alpha[16], to[16 * 50], before[48 * 16];
    for (int n = 0; n < 48 * 16; n++) before[n] = panel[n] = (float)n;
    for (int r = 0; r < 16; r++) alpha[r] = 1;
    attn__bf16_rescale(panel, 48, alpha);
    CHECK(memcmp(panel, before, sizeof panel) == 0);
    alpha[3] = 0.25f;
    attn__bf16_rescale(panel, 48, alpha);
    for (int n = 0; n < 48 * 16; n++) CHECK(panel[n] == before[n] * (n % 16 == 3 ? 0.25f : 1));
    for (int n = 0; n < 16 * 50; n++) to[n] = -1;
    attn__bf16_transpose(&attn__micro_c_f32, to, 50, before, 48);
    for (int r = 0; r < 16; r++)
        for (int x = 0; x < 50; x++) CHECK(to[r * 50 + x] == (x < 48 ? before[x * 16 + r] : -1));
}

/*
 * Attention put together from the parts, keys in two blocks. An element of o is off by the rounding of each p, 2^-9 of it, so by at
 * most 2^-9 of the mean of |v|; and lse, as p is not rounded in the sum, by float's errors of the scores.
 */
static void check_attention_from_the_parts(bool by_vectors) {
    enum { ROWS = 21, KEYS = 107, DIM = 72, DIM_V = 40, BLOCK = 64, ALL_ROWS = 32, ALL_DIM = 96, ALL_V = 64 };
    uint64_t random = 9;
    matrix q = matrix_make(ROWS, DIM, DIM + 3, &random), k = matrix_make(KEYS, DIM, DIM, &random),
           v = matrix_make(KEYS, DIM_V, DIM_V + 9, &random);
    uint16_t *packed_q = room(2 * operand_size(ROWS, DIM)), *packed_k = room(2 * BLOCK * ALL_DIM),
             *packed_v = room(2 * BLOCK * ALL_V), *p = room(2 * BLOCK * ALL_ROWS);
    float *s = room(4 * BLOCK * ALL_ROWS), *o = room(4 * ALL_V * ALL_ROWS), *out = room(4 * ALL_ROWS * ALL_V);
    float max[ALL_ROWS], sum[ALL_ROWS], alpha[ALL_ROWS];
    double scale = 1 / sqrt(DIM);
    for (int r = 0; r < ALL_ROWS; r++) max[r] = -INFINITY, sum[r] = 0;
    memset(o, 0, 4 * ALL_V * ALL_ROWS);
    attn__bf16_begin(by_vectors);
    attn__bf16_pack_dims(packed_q, q.data, q.row, ROWS, DIM);
    for (int32_t j = 0; j < KEYS; j += BLOCK) {
        int32_t keys = KEYS - j < BLOCK ? KEYS - j : BLOCK, all = pad(keys, 32);
        attn__bf16_pack_rows(packed_k, k.data + j * k.row, k.row, keys, DIM);
        CHECK(attn__bf16_pack_columns(packed_v, v.data + j * v.row, v.row, keys, DIM_V));
        attn__bf16_run(&(attn_bf16_product){.c = s,
                                            .ldc = 16,
                                            .c_panel = BLOCK * 16,
                                            .a = packed_k,
                                            .a_panel = 16 * (int64_t)ALL_DIM,
                                            .b = packed_q,
                                            .b_panel = ALL_DIM * 16,
                                            .m = all,
                                            .n = ALL_ROWS,
                                            .k = ALL_DIM,
                                            .by_vectors = by_vectors});
        attn__bf16_softmax(&(attn_bf16_softmax){.s = s,
                                                .s_panel = BLOCK * 16,
                                                .keys = keys,
                                                .width = ALL_ROWS,
                                                .scale = (float)scale,
                                                .factor = (float)ATTN_LOG2E,
                                                .max = max,
                                                .sum = sum,
                                                .alpha = alpha,
                                                .p = p,
                                                .p_panel = 16 * (int64_t)all},
                           NULL, 0);
        for (int r = 0; r < ALL_ROWS; r += 16) attn__bf16_rescale(o + r * ALL_V, ALL_V, alpha + r);
        attn__bf16_run(&(attn_bf16_product){.c = o,
                                            .ldc = 16,
                                            .c_panel = ALL_V * 16,
                                            .a = packed_v,
                                            .a_panel = 16 * (int64_t)all,
                                            .b = p,
                                            .b_panel = 16 * (int64_t)all,
                                            .m = ALL_V,
                                            .n = ALL_ROWS,
                                            .k = all,
                                            .accumulate = true,
                                            .by_vectors = by_vectors});
    }
    attn__bf16_end(by_vectors);
    for (int r = 0; r < ALL_ROWS; r += 16)
        attn__bf16_transpose(&attn__micro_c_f32, out + r * ALL_V, ALL_V, o + r * ALL_V, ALL_V);
    for (int32_t i = 0; i < ROWS; i++) {
        double weight[KEYS], most = -INFINITY, total = 0;
        for (int32_t j = 0; j < KEYS; j++) {
            weight[j] = 0;
            for (int32_t x = 0; x < DIM; x++) weight[j] += value(&q, i, x) * value(&k, j, x) * scale;
            most = fmax(most, weight[j]);
        }
        for (int32_t j = 0; j < KEYS; j++) total += weight[j] = exp(weight[j] - most);
        CHECK_CLOSE(((double)max[i] + log2((double)sum[i])) / ATTN_LOG2E, most + log(total), 2e-6);
        for (int32_t x = 0; x < DIM_V; x++) {
            double want = 0, size = 0;
            for (int32_t j = 0; j < KEYS; j++) {
                want += weight[j] / total * value(&v, j, x);
                size += weight[j] / total * fabs(value(&v, j, x));
            }
            CHECK_CLOSE((double)(out[i * ALL_V + x] / sum[i]), want, size * (0x1p-9 + 1e-5));
        }
    }
    free(packed_q), free(packed_k), free(packed_v), free(p), free(s), free(o), free(out);
    matrix_free(&q), matrix_free(&k), matrix_free(&v);
}

#ifdef ATTN_HAVE_AMX
TEST(amx_attention_from_the_parts) {
    if (!skip()) check_attention_from_the_parts(false);
}
#endif

TEST(bf16_vectors_attention_from_the_parts) {
    if (!skip_vectors()) check_attention_from_the_parts(true);
}

#else

TEST(bf16_products_are_not_in_this_library) { CHECK(!attn__amx_available()); }

#endif
