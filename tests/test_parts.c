/*
 * Numbers in bf16 parts (src/cpu/bf16.h), floats in three and halves in two, for the kernels of AMX: how they are taken
 * apart, the products of the parts, and the softmax and the gradients that make p and d_s in parts. Inputs lie in memory
 * of just their size, with NaN between rows, and what is written was NaN.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "build.h"
#include "cpu/amx.h"
#include "cpu/bf16.h"
#include "test.h"

#ifdef ATTN_HAVE_AMX

static bool skip(void) {
    if (attn__amx_available()) return false;
    test_skip("this machine or its kernel has no AMX for bf16");
    return true;
}

static void for_floats_and_halves(void (*check)(attn_dtype dtype)) {
    if (skip()) return;
    check(ATTN_F32);
    check(ATTN_F16);
}

static const char *name(attn_dtype dtype) { return dtype == ATTN_F16 ? "halves" : "floats"; }

typedef struct numbers {
    attn_bf16_numbers of; /* data */
    void *data;
    int32_t rows, dim;
} numbers;

static void numbers_put(numbers *m, int32_t i, int32_t x, double value) {
    attn__store(m->of.dtype, m->data, i * m->of.row + x, value);
}

/* N(0,1), which is no more than 3.5 here, times 2^[low, high]; of halves high is up to 14. */
static numbers numbers_make(attn_dtype dtype, int32_t rows, int32_t dim, int64_t row, int32_t low, int32_t high,
                            uint64_t *random) {
    const size_t bytes = (size_t)((rows - 1) * row + dim) * (size_t)attn__dtype_bytes(dtype);
    void *data = malloc(bytes);
    if (!data) abort();
    memset(data, 0xff, bytes);
    numbers m = {{data, dtype, row, 1}, data, rows, dim};
    for (int32_t i = 0; i < rows; i++)
        for (int32_t x = 0; x < dim; x++)
            numbers_put(&m, i, x, ldexp((float)random_normal(random), random_range(random, low, high)));
    return m;
}

static double element(const numbers *m, int32_t i, int32_t x) {
    return i < m->rows && x < m->dim ? attn__load(m->of.dtype, m->data, i * m->of.row + x) : 0;
}

static void *room(int64_t bytes) {
    void *p = aligned_alloc(64, (size_t)(bytes + 63) / 64 * 64);
    if (!p) abort();
    memset(p, 0xff, (size_t)(bytes + 63) / 64 * 64);
    return p;
}

static int32_t pad(int32_t n, int32_t to) { return (n + to - 1) / to * to; }

/* From part to part of an operand of x by y: one tile between them. */
static int64_t part_of(int32_t x, int32_t y) { return attn__bf16_pad(x) * attn__bf16_pad(y) + ATTN_BF16_TILE; }

static double whole(const uint16_t *p, int64_t part, int32_t parts) {
    double sum = 0;
    for (int32_t n = 0; n < parts; n++) sum += (double)attn__from_bf16(p[n * part]);
    return sum;
}

/* ---- taking apart ---- */

typedef int splitting(uint16_t *to, int64_t part, const attn_bf16_numbers *of, int32_t rows, int32_t dim);
enum { ROWS, COLUMNS, DIMS, PAIRS, WAYS };
static splitting *const split[] = {attn__bf16_split_rows, attn__bf16_split_columns, attn__bf16_split_dims,
                                   attn__bf16_split_pairs};

/* Where element (i, x) is in a part; -1: it has none. */
static int64_t place_of(int way, const numbers *m, int32_t i, int32_t x) {
    const int64_t rows = 16 * (int64_t)pad(m->rows, 32), dims = 16 * (int64_t)pad(m->dim, 32);
    if (way == ROWS) return attn__bf16_place_a(dims, i, x);
    if (way == COLUMNS) return attn__bf16_place_a(rows, x, i);
    if (way == DIMS) return i < pad(m->rows, 16) ? attn__bf16_place_b(dims, i, x) : -1;
    return x < pad(m->dim, 16) ? attn__bf16_place_b(rows, x, i) : -1;
}

/* The parts add up to the number times the factor, each in its place and nowhere else, and none of the numbers is odd. */
static void check_parts(const numbers *m) {
    const int32_t parts = attn__bf16_parts(m->of.dtype);
    const int64_t part = part_of(m->rows, m->dim);
    for (int way = 0; way < WAYS; way++) {
        uint16_t *out = room(2 * parts * part);
        const int found = split[way](out, part, &m->of, m->rows, m->dim);
        CHECK((found & (ATTN_SPLIT_OUT | ATTN_SPLIT_TINY)) == 0 && (parts == 3 || found == 0));
        int wrong = 0;
        for (int32_t i = 0; i < pad(m->rows, 32); i++)
            for (int32_t x = 0; x < pad(m->dim, 32); x++) {
                const int64_t place = place_of(way, m, i, x);
                wrong += place >= 0 && whole(out + place, part, parts) != element(m, i, x) * (double)m->of.factor;
            }
        for (int64_t n = 0; n < parts * part; n++) wrong += n % part >= part - ATTN_BF16_TILE && out[n] != 0xffff;
        CHECK_SAY(wrong == 0, "way %d: %d elements are wrong", way, wrong);
        free(out);
    }
}

static const int32_t sizes[][2] = {{32, 32}, {1, 1},    {33, 31}, {64, 128}, {96, 80},
                                   {31, 64}, {160, 96}, {70, 33}, {256, 40}};
static const int32_t powers[] = {0, 5, 28, 40}; /* the factors of the backward */
enum { SIZES = sizeof sizes / sizeof sizes[0], POWERS = sizeof powers / sizeof powers[0] };

static void parts_of(attn_dtype dtype) {
    uint64_t random = 1;
    for (int n = 0; n < SIZES * POWERS; n++) {
        const int32_t rows = sizes[n / POWERS][0], dim = sizes[n / POWERS][1], power = powers[n % POWERS];
        const bool half = dtype == ATTN_F16;
        test_context("%s, %d rows of %d, times 2^%d", name(dtype), rows, dim, power);
        numbers m =
            numbers_make(dtype, rows, dim, dim + 7 * (n / POWERS % 2), half ? -25 : -70, half ? 14 : 50 - power, &random);
        m.of.factor = ldexpf(1, power);
        check_parts(&m);
        free(m.data);
    }
}

TEST(amx_parts_add_up_to_the_number_each_in_its_place) { for_floats_and_halves(parts_of); }

static void set_mode(uint32_t mode) { __asm__ volatile("ldmxcsr %0" ::"m"(mode)); }

/* However the caller rounds. */
TEST(amx_parts_of_every_half) {
    static const uint32_t modes[] = {0x1f80, 0x3f80, 0x5f80, 0x7f80}; /* to nearest, down, up, to zero */
    if (skip()) return;
    enum { HALF = 0x7c00 }; /* of the finite ones; the others have a sign */
    uint64_t random = 0;
    numbers m = numbers_make(ATTN_F16, 256, 2 * HALF / 256, 2 * HALF / 256, 0, 0, &random);
    for (int n = 0; n < 2 * HALF; n++) ((uint16_t *)m.data)[n] = (uint16_t)(n < HALF ? n : 0x8000 + n - HALF);
    for (int n = 0; n < POWERS * 4; n++) {
        test_context("times 2^%d, MXCSR %#x", powers[n % POWERS], (unsigned)modes[n / POWERS]);
        m.of.factor = ldexpf(1, powers[n % POWERS]);
        set_mode(modes[n / POWERS]);
        check_parts(&m);
        set_mode(modes[0]);
    }
    free(m.data);
}

/* This number (its bits) here and there among others. */
static void check_odd(attn_dtype dtype, uint32_t bits, int odd, bool large) {
    const size_t size = (size_t)attn__dtype_bytes(dtype);
    uint64_t random = 2;
    numbers m = numbers_make(dtype, 45, 40, 41, -3, 3, &random);
    const int64_t part = part_of(45, 40);
    uint16_t *out = room(2 * 3 * part);
    for (int32_t at = 0; at < 45 * 40; at += 37) {
        char *place = (char *)m.data + (size_t)(at / 40 * m.of.row + at % 40) * size;
        uint32_t before;
        memcpy(&before, place, size);
        memcpy(place, &bits, size);
        for (int way = 0; way < WAYS; way++) {
            const int found = split[way](out, part, &m.of, 45, 40), is = found & (ATTN_SPLIT_OUT | ATTN_SPLIT_TINY);
            const bool right = (found & ATTN_SPLIT_OUT) == (odd & ATTN_SPLIT_OUT) && (odd == 0 ? is == 0 : (is & odd) != 0);
            CHECK_SAY(right && !!(found & ATTN_SPLIT_IS_LARGE) == large && (dtype == ATTN_F32 || is == odd),
                      "%s, %#x at %d, way %d: found %d, want %d", name(dtype), (unsigned)bits, at, way, found, odd);
        }
        memcpy(place, &before, size);
    }
    free(out);
    free(m.data);
}

/* What is out of range is found wherever it is, nothing else is taken for it, and what is tiny is not overlooked. */
TEST(amx_splitting_finds_what_is_odd) {
    if (skip()) return;
    const struct {
        float x;
        int odd;
    } cases[] = {{INFINITY, ATTN_SPLIT_OUT},
                 {-INFINITY, ATTN_SPLIT_OUT},
                 {attn__float(0x7fc00000), ATTN_SPLIT_OUT},
                 {attn__float(0x7fffffff), ATTN_SPLIT_OUT},
                 {attn__float(0xffffffff), ATTN_SPLIT_OUT},
                 {attn__float(0x7f800001), ATTN_SPLIT_OUT},
                 {3.4e38f, ATTN_SPLIT_OUT},
                 {-0x1.02p56f, ATTN_SPLIT_OUT},
                 {0x1.01p56f, ATTN_SPLIT_OUT}, /* half-way */
                 {0x1.00fffep56f, 0},
                 {-0x1p56f, 0},
                 {1, 0},
                 {65000, 0},
                 {-70000, 0},
                 {0, 0},
                 {-0.0f, 0},
                 {0x1p-102f, 0},
                 {0x1.fffffep-103f, 0}, /* its first part is 2^-102 */
                 {-0x1.fcp-103f, ATTN_SPLIT_TINY},
                 {0x1p-126f, ATTN_SPLIT_TINY},
                 {0x1p-134f, ATTN_SPLIT_TINY},
                 {-0x1p-149f, ATTN_SPLIT_TINY}};
    for (size_t n = 0; n < sizeof cases / sizeof cases[0]; n++) {
        CHECK_SAY(attn__bf16_odd(cases[n].x) == cases[n].odd, "%a", (double)cases[n].x);
        check_odd(ATTN_F32, attn__bits(cases[n].x), cases[n].odd, !(fabsf(cases[n].x) < 0x1.ffp15f));
    }
    static const uint16_t no_numbers[] = {0x7c00, 0xfc00, 0x7c01, 0xfc01, 0x7dff, 0x7e00, 0xfe00, 0x7fff, 0xffff},
                          fine[] = {0x7bff, 0xfbff, 0x0001, 0x8001, 0x03ff, 0x0400, 0, 0x8000, 0x3c00, 0x3c04};
    for (size_t n = 0; n < sizeof no_numbers / sizeof no_numbers[0]; n++)
        check_odd(ATTN_F16, no_numbers[n], ATTN_SPLIT_OUT, true);
    for (size_t n = 0; n < sizeof fine / sizeof fine[0]; n++) check_odd(ATTN_F16, fine[n], 0, false);
}

/* ---- products ---- */

typedef struct operand {
    numbers m;
    int way;
    uint16_t *packed;
    int64_t part;
} operand;

static operand operand_make(const numbers *m, int way) {
    operand x = {*m, way, NULL, part_of(m->rows, m->dim)};
    x.packed = room(2 * attn__bf16_parts(m->of.dtype) * x.part);
    split[way](x.packed, x.part, &m->of, m->rows, m->dim);
    return x;
}

static void operand_free(operand *x) { free(x->packed), free(x->m.data); }

static double second_part(const operand *x, int32_t row, int32_t dim) {
    return (double)attn__from_bf16(x->packed[x->part + place_of(x->way, &x->m, row, dim)]);
}

/*
 * c against a b in double: as exact as sums of k floats that are rounded once for every 32 and each product of parts.
 * Where the product of halves' second parts is left out, c is that close to the sum without it; and to the whole sum but
 * for 2^-16, as a second part, what rounding to 8 bits leaves, is no more than 2^-8 of its number.
 */
static void check_product(const float *c, const operand *a, const operand *b, double start, bool exact) {
    const int64_t panel = 16 * (int64_t)pad(a->m.rows, 32);
    const bool half = a->m.of.dtype == ATTN_F16;
    const int32_t products = half ? 3 + exact : 6, dim = a->m.dim;
    for (int32_t i = 0; i < a->m.rows; i++)
        for (int32_t j = 0; j < b->m.rows; j++) {
            double sum = start, size = fabs(start), left_out = 0;
            for (int32_t x = 0; x < dim; x++) {
                const double product = element(&a->m, i, x) * element(&b->m, j, x);
                sum += product;
                size += fabs(product);
                if (half && !exact) left_out += second_part(a, i, x) * second_part(b, j, x);
            }
            const double got = (double)c[i * 16 + j / 16 * panel + j % 16],
                         off = (products * (double)pad(dim, 32) / 32 + 4) * 0x1p-24 * size;
            CHECK_CLOSE(got, sum - left_out, off);
            CHECK_CLOSE(got, sum, off + (left_out != 0 ? 0x1p-16 * size : 0));
        }
}

static attn_bf16_product product_of(float *c, const operand *a, const operand *b, bool exact) {
    const int32_t m = a->m.rows, n = b->m.rows, k = a->m.dim;
    return (attn_bf16_product){.c = c,
                               .ldc = 16,
                               .c_panel = 16 * (int64_t)pad(m, 32),
                               .a = a->packed,
                               .a_panel = 16 * (int64_t)pad(k, 32),
                               .b = b->packed,
                               .b_panel = 16 * (int64_t)pad(k, 32),
                               .parts = attn__bf16_parts(a->m.of.dtype),
                               .a_part = a->part,
                               .b_part = b->part,
                               .m = pad(m, 32),
                               .n = pad(n, 16),
                               .k = pad(k, 32),
                               .exact = exact};
}

/*
 * Row 0 of either operand of halves is of 1 + 2^-8, whose second part, -2^-8, is as large as any: without the product of
 * second parts their sum is off by 2^-16, much more than an exact one may be.
 */
static void products_of(attn_dtype dtype) {
    static const int32_t shapes[][3] = {{32, 32, 32}, {1, 1, 1}, {33, 17, 31}, {64, 16, 128}, {96, 48, 80}, {70, 130, 33}};
    const int32_t low = dtype == ATTN_F16 ? -24 : -10, high = dtype == ATTN_F16 ? 14 : 10;
    uint64_t random = 3;
    attn__bf16_begin(false);
    for (size_t n = 0; n < 2 * sizeof shapes / sizeof shapes[0]; n++) {
        const int32_t m = shapes[n / 2][0], cols = shapes[n / 2][1], k = shapes[n / 2][2];
        const bool exact = n % 2;
        test_context("%s, %d x %d x %d%s", name(dtype), m, cols, k, exact ? ", exact" : "");
        numbers of_a = numbers_make(dtype, m, k, k + 5, low, high, &random),
                of_b = numbers_make(dtype, cols, k, k, low, high, &random);
        for (int32_t x = 0; dtype == ATTN_F16 && x < k; x++)
            numbers_put(&of_a, 0, x, 1 + 0x1p-8), numbers_put(&of_b, 0, x, 1 + 0x1p-8);
        operand a = operand_make(&of_a, ROWS), b = operand_make(&of_b, DIMS);
        const int64_t elements = (int64_t)pad(m, 32) * pad(cols, 16);
        float *c = room(4 * elements);
        attn_bf16_product p = product_of(c, &a, &b, exact);
        attn__bf16_run(&p);
        check_product(c, &a, &b, 0, exact);
        for (int64_t i = 0; i < elements; i++) c[i] = 0.75f;
        p.accumulate = true;
        attn__bf16_run(&p);
        check_product(c, &a, &b, 0.75, exact);
        operand_free(&a), operand_free(&b), free(c);
    }
    attn__bf16_end(false);
}

TEST(amx_products_of_parts_are_as_exact_as_floats) { for_floats_and_halves(products_of); }

/* ---- softmax ---- */

/*
 * What two parts of p or d_s may be off by, of the number: the first is its first 8 bits, cut off, and the second what
 * is left, less than 2^-7, rounded to 8 bits, which is off by 2^-9 of that at most. Three parts are all of it.
 */
static double rounded_off(int32_t parts) { return parts == 2 ? 0x1p-16 : 0; }

enum { KEYS = 75, WIDTH = 32, ALL = 96, PART = ALL * WIDTH + ATTN_BF16_TILE };

typedef struct columns {
    float scores[ALL * WIDTH], max[WIDTH], sum[WIDTH], alpha[WIDTH];
    uint16_t p[3 * PART];
} columns;

static float *score(columns *c, int32_t j, int32_t r) { return &c->scores[r / 16 * ALL * 16 + j * 16 + r % 16]; }

static columns *columns_make(void) {
    columns *c = room(sizeof *c);
    for (int r = 0; r < WIDTH; r++) {
        c->max[r] = -INFINITY;
        c->sum[r] = 0;
    }
    return c;
}

static void run(columns *c, int32_t parts, const attn_bf16_product *products, int32_t count) {
    attn__bf16_softmax(&(attn_bf16_softmax){.s = c->scores,
                                            .s_panel = ALL * 16,
                                            .keys = KEYS,
                                            .width = WIDTH,
                                            .scale = 0.5f,
                                            .factor = 1.44269504088896340736f,
                                            .max = c->max,
                                            .sum = c->sum,
                                            .alpha = c->alpha,
                                            .p = c->p,
                                            .parts = parts,
                                            .p_panel = ALL * 16,
                                            .p_part = PART},
                       products, count);
}

/*
 * Two steps: p, times 2^32, is e^(x - max) to 2 units in the last place of float and some more for what |x - max| is off
 * by, down to where float has subnormal numbers, but for what is rounded off; there that is more than what is flushed,
 * 2^-158. Sums are of p before they are rounded; columns of nothing but -inf have none.
 */
static void softmax_of(attn_dtype dtype) {
    const int32_t parts = attn__bf16_parts(dtype);
    uint64_t random = 4;
    test_context("%s", name(dtype));
    columns *c = columns_make();
    double max[WIDTH], sum[WIDTH];
    for (int r = 0; r < WIDTH; r++) max[r] = -INFINITY, sum[r] = 0;
    attn__bf16_begin(false);
    for (int step = 0; step < 2; step++) {
        double x[KEYS][WIDTH];
        for (int32_t r = 0; r < WIDTH; r++) {
            const double before = max[r];
            for (int32_t j = 0; j < KEYS; j++) {
                *score(c, j, r) = r == 5 || j % 7 == r ? -INFINITY : ldexpf((float)random_normal(&random), r % 8);
                x[j][r] = 0.5 * (double)*score(c, j, r); /* exact */
                max[r] = fmax(max[r], x[j][r]);
            }
            if (r == 5) continue;
            sum[r] *= exp(before - max[r]);
            for (int32_t j = 0; j < KEYS; j++) sum[r] += exp(x[j][r] - max[r]);
        }
        run(c, parts, NULL, 0);
        for (int32_t r = 0; r < WIDTH; r++) {
            CHECK((double)c->max[r] == max[r]);
            CHECK_CLOSE((double)c->sum[r] * 0x1p-32, sum[r], 1e-6 * sum[r]);
            for (int32_t j = 0; j < ALL; j++) {
                const uint16_t *p = c->p + attn__bf16_place_b(ALL * 16, r, j);
                const double d = j < KEYS && r != 5 ? x[j][r] - max[r] : -INFINITY, want = exp(d),
                             got = whole(p, PART, parts) * 0x1p-32;
                const double off = isfinite(d) ? want * (2 + 2 * fabs(d)) * 0x1p-24 : 0;
                if (want >= 0x1p-126 || d == -INFINITY) CHECK_CLOSE(got, want, off + want * rounded_off(parts));
                CHECK(got >= 0 && (d > -88 || got < 0x1p-124));
                CHECK(parts == 3 || p[2 * PART] == 0xffff);
            }
        }
    }
    attn__bf16_end(false);
    CHECK(c->max[5] == -INFINITY && c->sum[5] == 0);
    free(c);
}

TEST(amx_softmax_in_parts_against_double) { for_floats_and_halves(softmax_of); }

static void softmax_with_products_of(attn_dtype dtype) {
    const int32_t parts = attn__bf16_parts(dtype);
    uint64_t random = 5;
    const numbers of_a = numbers_make(dtype, 96, 160, 160, 0, 0, &random),
                  of_b = numbers_make(dtype, 48, 160, 160, 0, 0, &random);
    operand a = operand_make(&of_a, ROWS), b = operand_make(&of_b, DIMS);
    attn__bf16_begin(false);
    for (int n = 0; n < 8; n++) {
        const int count = n / 2;
        test_context("%s, case %d, %d products", name(dtype), n, count);
        columns *alone = columns_make(), *along = columns_make();
        for (int i = 0; i < ALL * WIDTH; i++) alone->scores[i] = along->scores[i] = (float)random_normal(&random);
        float *c[2][3];
        attn_bf16_product p[3];
        for (int i = 0; i < count; i++) {
            for (int w = 0; w < 2; w++) {
                c[w][i] = room(4 * 96 * 48);
                for (int e = 0; e < 96 * 48; e++) c[w][i][e] = 1;
            }
            p[i] = product_of(c[0][i], &a, &b, (n + i) % 2);
            p[i].n = i == 1 ? 48 : 32;
            p[i].k = 64 + 32 * i;
            p[i].accumulate = i == 2;
            attn__bf16_run(&p[i]);
            p[i].c = c[1][i];
        }
        run(alone, parts, NULL, 0);
        run(along, parts, p, count);
        for (int32_t r = 0; r < WIDTH; r++) {
            CHECK(alone->sum[r] == along->sum[r] && alone->max[r] == along->max[r]);
            for (int32_t j = 0; j < ALL; j++)
                for (int32_t part = 0; part < parts; part++) {
                    const int64_t at = part * (int64_t)PART + attn__bf16_place_b(ALL * 16, r, j);
                    CHECK(alone->p[at] == along->p[at]);
                }
        }
        for (int i = 0; i < count; i++) {
            CHECK(memcmp(c[0][i], c[1][i], 4 * 96 * 48) == 0);
            free(c[0][i]), free(c[1][i]);
        }
        free(alone), free(along);
    }
    attn__bf16_end(false);
    operand_free(&a), operand_free(&b);
}

/* Products of parts along with softmax have the bits that they have alone, and so has softmax. */
TEST(amx_softmax_in_parts_with_products) { for_floats_and_halves(softmax_with_products_of); }

/* ---- gradients ---- */

enum { LANES = 32, COUNT = 64, LIFTED = COUNT * LANES + ATTN_BF16_TILE };

typedef struct gradients {
    float s[COUNT * LANES], d_p[COUNT * LANES], slope[COUNT * LANES], rest[COUNT * LANES], scores[COUNT * LANES];
    float lse[LANES], low[LANES], delta[LANES];
    uint16_t p[3 * LIFTED], d_s[3 * LIFTED], pairs[3 * LIFTED];
    bool with_slope, with_rest, keep_p, odd_lse;
} gradients;

/* Of one key and row. */
static void check_gradient(const gradients *g, int32_t j, int32_t r, int32_t parts) {
    const int64_t at = r % 16 + r / 16 * (COUNT * 16) + (int64_t)j * 16, place = attn__bf16_place_a(ATTN_BF16_TILE, j, r),
                  pair = attn__bf16_place_b(16 * COUNT, attn__bf16_column(r), j);
    const double p = whole(g->p + place, LIFTED, parts) * 0x1p-24, d_s = whole(g->d_s + place, LIFTED, parts) * 0x1p-24,
                 t = 0.125 * (double)g->s[at] + (g->with_rest ? (double)g->rest[at] : 0) - (double)g->lse[r] -
                     (double)g->low[r],
                 want = j == r || g->lse[r] == INFINITY ? 0 : exp(t), d = 1.25 * (double)g->d_p[at] - (double)g->delta[r],
                 slope = g->with_slope ? (double)g->slope[at] : 1;
    for (int32_t n = 0; n < 3; n++) {
        CHECK(g->d_s[place + n * LIFTED] == g->pairs[pair + n * LIFTED]);
        CHECK(n < parts || (g->p[place + n * LIFTED] == 0xffff && g->d_s[place + n * LIFTED] == 0xffff));
    }
    if (isnan(g->lse[r]) && j != r) {
        CHECK(isnan(p) && isnan(d_s));
        return;
    }
    const double off = rounded_off(parts);
    CHECK_CLOSE(p, want, (2.5 * 0x1p-24 + off) * want + 0x1p-149);
    /* d_s is made of p before that is rounded. */
    const double kept = (double)g->scores[at] * 0x1p-24,
                 whole_p = g->keep_p    ? kept
                           : parts == 3 ? p
                                        : want,
                 units = g->keep_p || parts == 3 ? 4 : 4 + 2.5;
    if (g->keep_p) CHECK_CLOSE(p, kept, off * kept + 0x1p-149);
    if (g->keep_p) CHECK_CLOSE(kept, want, 2.5 * 0x1p-24 * want + 0x1p-149);
    if (want != 0)
        CHECK_CLOSE(d_s, whole_p * d * slope,
                    units * 0x1p-24 * whole_p * (fabs(d) + 2) * fabs(slope) + 0x1p-149 +
                        (want < 0x1p-126 ? 1 : off) * whole_p * fabs(d * slope));
    else
        CHECK(p == 0 && d_s == 0);
}

static void gradients_fill(gradients *g, uint64_t *random) {
    float *const arrays[] = {g->s, g->d_p, g->slope, g->rest};
    for (int i = 0; i < 4; i++)
        for (int32_t x = 0; x < COUNT * LANES; x++) arrays[i][x] = (float)random_normal(random) * (i == 3 ? 1e-6f : 1);
    for (int32_t r = 0; r < LANES; r++) {
        g->lse[r] = (float)r * 3 - 0.1f;
        g->low[r] = (float)random_normal(random) * 1e-7f * g->lse[r];
        g->delta[r] = (float)random_normal(random);
        if (g->odd_lse && r == 7) g->lse[r] = INFINITY;
        if (g->odd_lse && r == 20) g->lse[r] = NAN;
        g->s[r % 16 + r / 16 * COUNT * 16 + r * 16] = -INFINITY;
        g->d_p[r % 16 + r / 16 * COUNT * 16 + r * 16] = NAN;
    }
    memcpy(g->scores, g->s, sizeof g->scores);
}

/*
 * p and d_s of the backward in parts: p as exact as float's, though lse is large, down to where float has subnormal
 * numbers, and d_s that of this p, both but for what is rounded off; all three operands have the same parts. Case 8 is
 * the plainest.
 */
static void gradients_of(attn_dtype dtype) {
    const int32_t parts = attn__bf16_parts(dtype);
    uint64_t random = 6;
    for (int n = 0; n < 9; n++) {
        gradients *g = room(sizeof *g);
        g->with_slope = n & 1, g->with_rest = n & 2, g->odd_lse = n & 4, g->keep_p = n == 0 || n == 7;
        test_context("%s, case %d", name(dtype), n);
        gradients_fill(g, &random);
        attn__bf16_gradients(&(attn_bf16_gradients){.s = g->scores,
                                                    .d_p = g->d_p,
                                                    .slope = g->with_slope ? g->slope : NULL,
                                                    .rest = g->with_rest ? g->rest : NULL,
                                                    .panel = 16 * COUNT,
                                                    .keys = COUNT,
                                                    .scale = 0.125f,
                                                    .keep = 1.25f,
                                                    .lse = g->lse,
                                                    .delta = g->delta,
                                                    .low = g->low,
                                                    .keep_p = g->keep_p,
                                                    .p = g->p,
                                                    .d_s = g->d_s,
                                                    .parts = parts,
                                                    .down = ATTN_BF16_TILE,
                                                    .part = LIFTED,
                                                    .pairs = g->pairs,
                                                    .pairs_part = LIFTED});
        for (int32_t r = 0; r < LANES; r++)
            for (int32_t j = 0; j < COUNT; j++) check_gradient(g, j, r, parts);
        free(g);
    }
}

TEST(amx_gradients_in_parts_against_double) { for_floats_and_halves(gradients_of); }

TEST(amx_take_in) {
    if (skip()) return;
    float o[48 * 16], more[48 * 16], alpha[16];
    for (int n = 0; n < 48 * 16; n++) o[n] = (float)n, more[n] = 0.5f * (float)(n % 5);
    for (int r = 0; r < 16; r++) alpha[r] = r == 3 ? 0.25f : 1;
    attn__bf16_take_in(o, 48, alpha, more);
    for (int n = 0; n < 48 * 16; n++) CHECK(o[n] == (float)n * (n % 16 == 3 ? 0.25f : 1) + more[n]);
}

#endif
