/*
 * Floats as three bf16 (src/cpu/bf16.h), for the float32 kernel of AMX: how they are taken apart, the products of the parts, and the
 * softmax that makes p in parts. Inputs lie in memory of just their size, with NaN between rows, and what is written was NaN.
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

typedef struct floats {
    float *data;
    int64_t row;
    int32_t rows, dim;
} floats;

/* N(0,1) times 2^[low, high]. */
static floats floats_make(int32_t rows, int32_t dim, int64_t row, int32_t low, int32_t high, uint64_t *random) {
    const size_t bytes = (size_t)((rows - 1) * row + dim) * sizeof(float);
    floats m = {malloc(bytes), row, rows, dim};
    if (!m.data) abort();
    memset(m.data, 0xff, bytes);
    for (int32_t i = 0; i < rows; i++)
        for (int32_t x = 0; x < dim; x++)
            m.data[i * row + x] = ldexpf((float)random_normal(random), random_range(random, low, high));
    return m;
}

static float element(const floats *m, int32_t i, int32_t x) {
    return i < m->rows && x < m->dim ? m->data[i * m->row + x] : 0;
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

static double whole(const uint16_t *parts, int64_t part) {
    double sum = 0;
    for (int n = 0; n < 3; n++) sum += (double)attn__from_bf16(parts[n * part]);
    return sum;
}

static const int32_t sizes[][2] = {{32, 32}, {1, 1},    {33, 31}, {64, 128}, {96, 80},
                                   {31, 64}, {160, 96}, {70, 33}, {256, 40}};
enum { SIZES = sizeof sizes / sizeof sizes[0] };

TEST(amx_parts_of_a_float_add_up_to_it_each_in_its_place) {
    if (skip()) return;
    uint64_t random = 1;
    for (int n = 0; n < SIZES; n++) {
        const int32_t rows = sizes[n][0], dim = sizes[n][1], all_rows = pad(rows, 32), all_dims = pad(dim, 32);
        test_context("%d rows of %d", rows, dim);
        floats m = floats_make(rows, dim, dim + 7 * (n % 2), -70, 50, &random);
        const int64_t part = part_of(rows, dim);
        uint16_t *out[4];
        for (int i = 0; i < 4; i++) out[i] = room(2 * 3 * part);
        CHECK((attn__bf16_split_rows(out[0], part, m.data, m.row, rows, dim, 1) & (ATTN_SPLIT_OUT | ATTN_SPLIT_TINY)) == 0);
        CHECK((attn__bf16_split_columns(out[1], part, m.data, m.row, rows, dim, 1) & (ATTN_SPLIT_OUT | ATTN_SPLIT_TINY)) ==
              0);
        CHECK((attn__bf16_split_dims(out[2], part, m.data, m.row, rows, dim, 1) & (ATTN_SPLIT_OUT | ATTN_SPLIT_TINY)) == 0);
        attn__bf16_split_pairs(out[3], part, m.data, m.row, rows, dim, 0x1p5f);
        int wrong = 0;
        for (int32_t i = 0; i < all_rows; i++)
            for (int32_t x = 0; x < all_dims; x++) {
                const double want = (double)element(&m, i, x);
                wrong += whole(out[0] + attn__bf16_place_a(16 * (int64_t)all_dims, i, x), part) != want;
                wrong += whole(out[1] + attn__bf16_place_a(16 * (int64_t)all_rows, x, i), part) != want;
                if (i < pad(rows, 16))
                    wrong += whole(out[2] + attn__bf16_place_b(16 * (int64_t)all_dims, i, x), part) != want;
                if (x < pad(dim, 16))
                    wrong += whole(out[3] + attn__bf16_place_b(16 * (int64_t)all_rows, x, i), part) != want * 0x1p5;
            }
        CHECK_SAY(wrong == 0, "%d elements are wrong", wrong);
        for (int i = 0; i < 4; i++) free(out[i]);
        free(m.data);
    }
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
    uint64_t random = 2;
    floats m = floats_make(45, 40, 41, -3, 3, &random);
    const int64_t part = part_of(45, 40);
    uint16_t *a = room(2 * 3 * part);
    for (size_t n = 0; n < sizeof cases / sizeof cases[0]; n++) {
        CHECK_SAY(attn__bf16_odd(cases[n].x) == cases[n].odd, "%a", (double)cases[n].x);
        for (int32_t at = 0; at < 45 * 40; at += 37) {
            float *place = m.data + at / 40 * m.row + at % 40, before = *place;
            *place = cases[n].x;
            const int mask = ATTN_SPLIT_OUT | ATTN_SPLIT_TINY,
                      found[] = {attn__bf16_split_rows(a, part, m.data, m.row, 45, 40, 1) & mask,
                                 attn__bf16_split_columns(a, part, m.data, m.row, 45, 40, 1) & mask,
                                 attn__bf16_split_dims(a, part, m.data, m.row, 45, 40, 1) & mask};
            CHECK(!!(attn__bf16_split_rows(a, part, m.data, m.row, 45, 40, 1) & ATTN_SPLIT_IS_LARGE) ==
                  !(fabsf(cases[n].x) < 0x1.ffp15f));
            for (int i = 0; i < 3; i++) {
                CHECK_SAY((found[i] & ATTN_SPLIT_OUT) == (cases[n].odd & ATTN_SPLIT_OUT) &&
                              (cases[n].odd == 0 ? found[i] == 0 : (found[i] & cases[n].odd) != 0),
                          "%a at %d: found %d, want %d", (double)cases[n].x, at, found[i], cases[n].odd);
            }
            *place = before;
        }
    }
    free(a);
    free(m.data);
}

/* c against a b in double: as exact as sums of k floats that are rounded once for every 32. */
static void check_product(const float *c, const floats *a, const floats *b, double start) {
    const int64_t panel = 16 * (int64_t)pad(a->rows, 32);
    for (int32_t i = 0; i < a->rows; i++)
        for (int32_t j = 0; j < b->rows; j++) {
            double sum = start, size = fabs(start);
            for (int32_t x = 0; x < a->dim; x++) {
                const double product = (double)element(a, i, x) * (double)element(b, j, x);
                sum += product;
                size += fabs(product);
            }
            CHECK_CLOSE((double)c[i * 16 + j / 16 * panel + j % 16], sum,
                        (6 * (double)pad(a->dim, 32) / 32 + 4) * 0x1p-24 * size);
        }
}

static attn_bf16_product product_of(float *c, const uint16_t *a, int64_t a_part, const uint16_t *b, int64_t b_part,
                                    int32_t m, int32_t n, int32_t k) {
    return (attn_bf16_product){.c = c,
                               .ldc = 16,
                               .c_panel = 16 * (int64_t)pad(m, 32),
                               .a = a,
                               .a_panel = 16 * (int64_t)pad(k, 32),
                               .b = b,
                               .b_panel = 16 * (int64_t)pad(k, 32),
                               .a_part = a_part,
                               .b_part = b_part,
                               .m = pad(m, 32),
                               .n = pad(n, 16),
                               .k = pad(k, 32)};
}

TEST(amx_products_of_parts_are_as_exact_as_floats) {
    if (skip()) return;
    static const int32_t shapes[][3] = {{32, 32, 32}, {1, 1, 1}, {33, 17, 31}, {64, 16, 128}, {96, 48, 80}, {70, 130, 33}};
    uint64_t random = 3;
    attn__bf16_begin(false);
    for (size_t n = 0; n < sizeof shapes / sizeof shapes[0]; n++) {
        const int32_t m = shapes[n][0], cols = shapes[n][1], k = shapes[n][2];
        test_context("%d x %d x %d", m, cols, k);
        floats a = floats_make(m, k, k + 5, -10, 10, &random), b = floats_make(cols, k, k, -10, 10, &random);
        uint16_t *packed_a = room(6 * part_of(m, k)), *packed_b = room(6 * part_of(cols, k));
        const int64_t elements = (int64_t)pad(m, 32) * pad(cols, 16);
        float *c = room(4 * elements);
        attn__bf16_split_rows(packed_a, part_of(m, k), a.data, a.row, m, k, 1);
        attn__bf16_split_dims(packed_b, part_of(cols, k), b.data, b.row, cols, k, 1);
        attn_bf16_product p = product_of(c, packed_a, part_of(m, k), packed_b, part_of(cols, k), m, cols, k);
        attn__bf16_run(&p);
        check_product(c, &a, &b, 0);
        for (int64_t i = 0; i < elements; i++) c[i] = 0.75f;
        p.accumulate = true;
        attn__bf16_run(&p);
        check_product(c, &a, &b, 0.75);
        free(packed_a), free(packed_b), free(c), free(a.data), free(b.data);
    }
    attn__bf16_end(false);
}

/* ---- softmax ---- */

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

static void run(columns *c, const attn_bf16_product *products, int32_t count) {
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
                                            .p_panel = ALL * 16,
                                            .p_part = PART},
                       products, count);
}

/*
 * Two steps: p, times 2^32, is e^(x - max) to 2 units in the last place of float and some more for what |x - max| is off by, down to where float has subnormal numbers;
 * sums are of those p; columns of nothing but -inf have none.
 */
TEST(amx_softmax_in_parts_against_double) {
    if (skip()) return;
    uint64_t random = 4;
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
        run(c, NULL, 0);
        for (int32_t r = 0; r < WIDTH; r++) {
            CHECK((double)c->max[r] == max[r]);
            CHECK_CLOSE((double)c->sum[r] * 0x1p-32, sum[r], 1e-6 * sum[r]);
            for (int32_t j = 0; j < ALL; j++) {
                const uint16_t *p = c->p + attn__bf16_place_b(ALL * 16, r, j);
                const double d = j < KEYS && r != 5 ? x[j][r] - max[r] : -INFINITY, want = exp(d);
                const double off = isfinite(d) ? want * (2 + 2 * fabs(d)) * 0x1p-24 : 0;
                CHECK_CLOSE(whole(p, PART) * 0x1p-32, want < 0x1p-126 && d < -87 ? whole(p, PART) * 0x1p-32 : want, off);
                CHECK(whole(p, PART) >= 0 && (d > -88 || whole(p, PART) < 0x1p-92));
            }
        }
    }
    attn__bf16_end(false);
    CHECK(c->max[5] == -INFINITY && c->sum[5] == 0);
    free(c);
}

/* Products of parts along with softmax have the bits that they have alone, and so has softmax. */
TEST(amx_softmax_in_parts_with_products) {
    if (skip()) return;
    uint64_t random = 5;
    floats a = floats_make(96, 160, 160, 0, 0, &random), b = floats_make(48, 160, 160, 0, 0, &random);
    uint16_t *packed_a = room(6 * part_of(96, 160)), *packed_b = room(6 * part_of(48, 160));
    attn__bf16_split_rows(packed_a, part_of(96, 160), a.data, a.row, 96, 160, 1);
    attn__bf16_split_dims(packed_b, part_of(48, 160), b.data, b.row, 48, 160, 1);
    attn__bf16_begin(false);
    for (int count = 0; count <= 3; count++) {
        test_context("%d products", count);
        columns *alone = columns_make(), *along = columns_make();
        for (int i = 0; i < ALL * WIDTH; i++) alone->scores[i] = along->scores[i] = (float)random_normal(&random);
        float *c[2][3];
        attn_bf16_product p[3];
        for (int i = 0; i < count; i++) {
            for (int w = 0; w < 2; w++) {
                c[w][i] = room(4 * 96 * 48);
                for (int n = 0; n < 96 * 48; n++) c[w][i][n] = 1;
            }
            p[i] = product_of(c[0][i], packed_a, part_of(96, 160), packed_b, part_of(48, 160), 96, 48, 160);
            p[i].n = i == 1 ? 48 : 32;
            p[i].k = 64 + 32 * i;
            p[i].accumulate = i == 2;
            attn__bf16_run(&p[i]);
            p[i].c = c[1][i];
        }
        run(alone, NULL, 0);
        run(along, p, count);
        for (int32_t r = 0; r < WIDTH; r++) {
            CHECK(alone->sum[r] == along->sum[r] && alone->max[r] == along->max[r]);
            for (int32_t j = 0; j < ALL; j++)
                for (int n = 0; n < 3; n++) {
                    const int64_t at = n * (int64_t)PART + attn__bf16_place_b(ALL * 16, r, j);
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
    free(packed_a), free(packed_b), free(a.data), free(b.data);
}

/*
 * p and d_s of the backward in parts: p as exact as float's, though lse is large, down to where float has subnormal numbers, and d_s that of this p; all three
 * operands have the same parts.
 */
TEST(amx_gradients_in_parts_against_double) {
    if (skip()) return;
    enum { ROWS = 32, COUNT = 64, LIFTED = COUNT * ROWS + ATTN_BF16_TILE };
    uint64_t random = 6;
    for (int n = 0; n < 8; n++) {
        const bool with_slope = n & 1, with_rest = n & 2;
        float *array[4], *scores, lse[ROWS], low[ROWS], delta[ROWS];
        uint16_t *out[3];
        test_context("case %d", n);
        for (int i = 0; i < 3; i++) out[i] = room(6 * LIFTED);
        for (int32_t i = 0; i < 4; i++) {
            array[i] = room(4 * COUNT * ROWS);
            for (int32_t x = 0; x < COUNT * ROWS; x++) array[i][x] = (float)random_normal(&random) * (i == 3 ? 1e-6f : 1);
        }
        for (int32_t r = 0; r < ROWS; r++) {
            lse[r] = (float)r * 3 - 0.1f;
            low[r] = (float)random_normal(&random) * 1e-7f * lse[r];
            delta[r] = (float)random_normal(&random);
            if ((n & 4) && r == 7) lse[r] = INFINITY;
            if ((n & 4) && r == 20) lse[r] = NAN;
            array[0][r % 16 + r / 16 * COUNT * 16 + r * 16] = -INFINITY;
            array[1][r % 16 + r / 16 * COUNT * 16 + r * 16] = NAN;
        }
        scores = room(4 * COUNT * ROWS);
        memcpy(scores, array[0], 4 * COUNT * ROWS);
        attn__bf16_gradients(&(attn_bf16_gradients){.s = scores,
                                                    .d_p = array[1],
                                                    .slope = with_slope ? array[2] : NULL,
                                                    .rest = with_rest ? array[3] : NULL,
                                                    .panel = 16 * COUNT,
                                                    .keys = COUNT,
                                                    .scale = 0.125f,
                                                    .keep = 1.25f,
                                                    .lse = lse,
                                                    .delta = delta,
                                                    .low = low,
                                                    .keep_p = n == 0 || n == 7,
                                                    .p = out[0],
                                                    .d_s = out[1],
                                                    .down = ATTN_BF16_TILE,
                                                    .part = LIFTED,
                                                    .pairs = out[2],
                                                    .pairs_part = LIFTED});
        for (int32_t r = 0; r < ROWS; r++)
            for (int32_t j = 0; j < COUNT; j++) {
                const int64_t at = r % 16 + r / 16 * (COUNT * 16) + (int64_t)j * 16,
                              place = attn__bf16_place_a(ATTN_BF16_TILE, j, r), in = attn__bf16_column(r),
                              pair = attn__bf16_place_b(16 * COUNT, (int32_t)in, j);
                const double p = whole(out[0] + place, LIFTED) * 0x1p-24, d_s = whole(out[1] + place, LIFTED) * 0x1p-24,
                             t = 0.125 * (double)array[0][at] + (with_rest ? (double)array[3][at] : 0) - (double)lse[r] -
                                 (double)low[r],
                             want = j == r || lse[r] == INFINITY ? 0 : exp(t),
                             d = 1.25 * (double)array[1][at] - (double)delta[r],
                             slope = with_slope ? (double)array[2][at] : 1;
                if (r == 20 && (n & 4) && j != r) {
                    CHECK(isnan(p) && isnan(d_s));
                    continue;
                }
                CHECK_CLOSE(p, want, 2.5 * 0x1p-24 * want + 0x1p-149);
                if (n == 0 || n == 7) CHECK_CLOSE((double)scores[at] * 0x1p-24, p, 0x1p-149);
                if (want != 0)
                    CHECK_CLOSE(d_s, p * d * slope,
                                4 * 0x1p-24 * p * (fabs(d) + 2) * fabs(slope) + 0x1p-149 +
                                    (want < 0x1p-126 ? p * fabs(d * slope) : 0));
                else
                    CHECK(p == 0 && d_s == 0);
                for (int i = 0; i < 3; i++) CHECK(out[1][place + i * LIFTED] == out[2][pair + i * LIFTED]);
            }
        for (int i = 0; i < 3; i++) free(out[i]);
        for (int i = 0; i < 4; i++) free(array[i]);
        free(scores);
    }
}

TEST(amx_take_in) {
    if (skip()) return;
    float o[48 * 16], more[48 * 16], alpha[16];
    for (int n = 0; n < 48 * 16; n++) o[n] = (float)n, more[n] = 0.5f * (float)(n % 5);
    for (int r = 0; r < 16; r++) alpha[r] = r == 3 ? 0.25f : 1;
    attn__bf16_take_in(o, 48, alpha, more);
    for (int n = 0; n < 48 * 16; n++) CHECK(o[n] == (float)n * (n % 16 == 3 ? 0.25f : 1) + more[n]);
}

#endif
