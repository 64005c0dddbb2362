/*
 * Micro-kernels against loops of plain C that are written here, one number type at a time (cpu/real.h): products and dot products have the same
 * bits, for all fuse multiplications with additions, but for table `c` where the compiler may not count on such an instruction (x86-64 without
 * further options), and add in the order that micro.h says. Softmax of few columns has the bits of many, and elements are converted alike one by one and together.
 */
#ifndef MICRO_CHECK_H
#define MICRO_CHECK_H

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "build.h"
#include "cpu/features.h"
#include "cpu/micro.h"
#include "numeric.h"
#include "test.h"

#define ISA_ONLY(name, tables, dtype, id, bits, words) /* no tables of its own */
#define ISA(name, bits, words) extern const attn_micro REAL(micro_##name);
#include "cpu/isa.def"
#undef ISA

enum { MOST = 20 * 1024 };
static const attn_micro *micro; /* the one to check */
static const char *isa;         /* its name */
static bool fuses;              /* and whether it fuses */
static real a[MOST], b[MOST], want[MOST], have[MOST];
static uint32_t narrow[MOST]; /* of any dtype up to 32 bits */

static void fill(real *x, int count, uint64_t *random) {
    for (int n = 0; n < count; n++)
        x[n] = (real)random_range(random, -1000000, 1000000) / 524287; /* sums of such numbers are rounded */
}

static void same(const char *what, int32_t rows, int32_t keys, int32_t dim) {
    CHECK_SAY(memcmp(want, have, sizeof want) == 0, "%s, %s: %d rows, %d keys, dim %d", isa, what, rows, keys, dim);
}

static real add_product(real x, real y, real sum) {
    if (!fuses) return sum + x * y;
    return sizeof(real) == 4 ? (real)fmaf((float)x, (float)y, (float)sum) : (real)fma(x, y, sum);
}

/* Products with c as it was and on top of it; a either way round. */
static void check_gemm(int32_t m, int32_t n, int32_t k) {
    const int64_t lda = 100;
    for (int form = 0; form < 4; form++) {
        int64_t row = form & 1 ? 1 : lda, col = form & 1 ? lda : 1;
        memcpy(want, a, sizeof want);
        memcpy(have, a, sizeof have);
        for (int32_t i = 0; i < m; i++)
            for (int32_t j = 0; j < n; j++) {
                real sum = 0, *c = &want[i * (n + 16) + j];
                for (int32_t x = 0; x < k; x++) sum = add_product(a[i * row + x * col], b[x * n + j], sum);
                *c = form & 2 ? *c + sum : sum;
            }
        micro->gemm(have, n + 16, a, row, col, b, n, m, n, k, form & 2);
        same("gemm", m, k, n);
    }
}

static void check_dots(int32_t columns, int32_t keys, int32_t dim) {
    enum { BLOCK = 16, GROUP = 64 }; /* see micro.h */
    memcpy(want, a, sizeof want);
    memcpy(have, a, sizeof have);
    for (int32_t j = 0; j < keys; j++)
        for (int32_t r = 0; r < columns; r++) {
            real group = 0, sum = 0, *s = &want[j * 64 + r];
            for (int32_t x = 0; x < dim; x++) {
                sum = add_product(a[j * (dim + 3) + x], b[x * columns + r], sum);
                if ((x + 1) % BLOCK != 0 && x + 1 < dim) continue;
                group = x % GROUP < BLOCK ? sum : group + sum;
                sum = 0;
                if ((x + 1) % GROUP == 0 || x + 1 == dim) *s = x < GROUP ? group : *s + group;
            }
        }
    micro->dots(have, 64, a, dim + 3, b, columns, keys, dim);
    same("dots", columns, keys, dim);
}

/* Keys, or values, of that dtype, and the same in b as real. */
static attn_panel panel_of(attn_dtype dtype, int32_t rows, int32_t dim) {
    for (int n = 0; n < rows * dim; n++) {
        attn__store(dtype, narrow, n, (double)b[n]);
        b[n] = (real)attn__load(dtype, narrow, n);
    }
    return (attn_panel){narrow, dim, dtype, 0, dim, 8 << rows % 3}; /* no result depends on how many are worked at once */
}

/*
 * Dot products of few rows: as many chains as the table's vector has lanes, each over every so many-th dim, which are added by halves, or by
 * neighbours (SVE). Rows that are not there have zeros.
 */
static real chains(const real *x, const real *y, int32_t dim) {
    real sum[16] = {0};
    int lanes = (strstr(isa, "512") ? 64 : strstr(isa, "256") || strcmp(isa, "avx2") == 0 ? 32 : 16) / (int)sizeof(real);
    for (int32_t n = 0; n < dim; n++) sum[n % lanes] = add_product(y[n], x[n], sum[n % lanes]);
    for (int half = lanes / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++)
            sum[i] = strncmp(isa, "sve", 3) == 0 ? sum[2 * i] + sum[2 * i + 1] : sum[i] + sum[i + half];
    return sum[0];
}

static void check_narrow(attn_dtype dtype, int32_t rows, int32_t keys, int32_t dim, uint64_t *random) {
    static real q_t[256 * ATTN_LANES];
    const int32_t width = ATTN_LANES;
    if (!micro->readable(dtype)) return;
    fill(b, keys * dim, random);
    attn_panel panel = panel_of(dtype, keys, dim);
    memset(want, 0, sizeof want);
    memset(have, 0, sizeof have);
    for (int32_t j = 0; j < keys; j++)
        for (int32_t r = 0; r < rows; r++) want[j * width + r] = chains(a + r * dim, b + j * dim, dim);
    micro->narrow_dots(have, width, &panel, a, dim, rows, keys, dim);
    same(attn_dtype_name(dtype), rows, keys, dim);
    for (int32_t x = 0; x < dim; x++)
        for (int32_t r = 0; r < width; r++) q_t[x * width + r] = r < rows ? a[r * dim + x] : 0;
    micro->chain_dots(have, width, b, dim, q_t, keys, dim);
    same("chain_dots", rows, keys, dim);
    memcpy(want, a, sizeof want);
    memcpy(have, a, sizeof have);
    for (int32_t j = 0; j < keys; j++)
        for (int32_t r = 0; r < rows; r++)
            for (int32_t x = 0; x < dim; x++) {
                real *c = &want[r * dim + x];
                *c = add_product(a[j * width + r], b[j * dim + x], *c);
            }
    micro->narrow_gemm(have, dim, a, width, &panel, rows, dim, keys);
    same(attn_dtype_name(dtype), rows, keys, dim);
}

/* Scores with what they round off have the bits of scores without, and with it, in float, they are right to more digits than float has. */
static void check_alibi(uint64_t *random) {
    enum { KEYS = 64, WIDTH = 64, OFFSET = 11, COUNT = KEYS * WIDTH };
    static real rest[COUNT];
    real slope[WIDTH];
    int32_t row[WIDTH];
    for (int r = 0; r < WIDTH; r++) {
        slope[r] = (real)random_range(random, -1000000, 1000000) / (r % 5 ? 999983 : 9973);
        row[r] = (int32_t)random_range(random, 0, 1000);
    }
    for (int n = 0; n < COUNT; n++) have[n] = (real)random_range(random, -1000000, 1000000) / (n % 7 ? 65521 : 251);
    memcpy(a, have, sizeof a);
    memset(want, 0, sizeof want);
    memset(have + COUNT, 0, sizeof have - COUNT * sizeof *have);
    for (int n = 0; n < COUNT; n++)
        want[n] = add_product(-slope[n % WIDTH], (real)abs(row[n % WIDTH] + OFFSET - n / WIDTH), a[n]);
    micro->alibi(have, NULL, KEYS, WIDTH, slope, row, OFFSET);
    same("alibi", WIDTH, KEYS, 0);
    if (sizeof(real) != 4) return;
    memcpy(have, a, COUNT * sizeof *have);
    micro->alibi(have, rest, KEYS, WIDTH, slope, row, OFFSET);
    same("alibi with what it rounds off", WIDTH, KEYS, 0);
    for (int n = 0; n < COUNT; n++) {
        const double bias = (double)slope[n % WIDTH] * abs(row[n % WIDTH] + OFFSET - n / WIDTH),
                     exact = (double)a[n] - bias;
        const bool large = fabs((double)want[n]) >= 4096;
        const double wanted = large ? 0 : exact - (double)want[n];
        CHECK_SAY(fabs((double)rest[n] - wanted) <= (large ? 0 : 0x1p-46 * (fabs((double)a[n]) + fabs(bias))),
                  "%s, alibi: %.9g + %.9g for %.17g", isa, (double)want[n], (double)rest[n], exact);
    }
}

static bool same_number(real x, real y) { return memcmp(&x, &y, sizeof x) == 0 || (x != x && y != y); }

/* A step of softmax over the first columns has the bits that it has among others, with scores that are not there, not finite, and far apart. */
static void check_softmax(int32_t columns, int32_t keys, uint64_t *random) {
    const int32_t width = ATTN_LANES;
    real state[2][3][ATTN_LANES];
    for (int32_t n = 0; n < keys * width; n++) {
        int32_t kind = (int32_t)random_range(random, 0, 40);
        want[n] = kind == 0   ? (real)-INFINITY
                  : kind == 1 ? (real)NAN
                              : (real)random_range(random, -1000, 1000) / (kind == 2 ? 8 : 100);
        if (n % width == 0 && columns > 1) want[n] = (real)-INFINITY; /* a column that sees nothing */
    }
    memcpy(have, want, sizeof want);
    for (int r = 0; r < ATTN_LANES; r++)
        for (int i = 0; i < 2; i++) {
            state[i][0][r] = r % 3 == 0 ? (real)-INFINITY : (real)(r % 3 == 1 ? 0.25 : 20);
            state[i][1][r] = r % 3 == 0 ? 0 : 3;
            state[i][2][r] = 7;
        }
    micro->softmax(want, keys, width, ATTN_LANES, state[0][0], state[0][1], state[0][2]);
    micro->softmax(have, keys, width, columns, state[1][0], state[1][1], state[1][2]);
    for (int32_t r = 0; r < columns; r++) {
        for (int32_t j = 0; j < keys; j++)
            CHECK_SAY(same_number(want[j * width + r], have[j * width + r]),
                      "%s, softmax of %d columns, %d keys: key %d, column %d", isa, columns, keys, j, r);
        for (int i = 0; i < 3; i++)
            CHECK_SAY(same_number(state[0][i][r], state[1][i][r]), "%s, softmax of %d columns, %d keys: %s of column %d",
                      isa, columns, keys,
                      i == 0   ? "max"
                      : i == 1 ? "sum"
                               : "alpha",
                      r);
    }
}

/* Weights are e^x to 2 units in the last place, from 1 down to the smallest number that is not subnormal, and their sum is theirs. */
static void check_exponential(uint64_t *random) {
    enum { KEYS = MOST / ATTN_LANES };
    const double least = sizeof(real) == 4 ? -87.3 : -708.3, unit = sizeof(real) == 4 ? 0x1p-23 : 0x1p-52;
    real max[ATTN_LANES] = {0}, sum[ATTN_LANES] = {0}, alpha[ATTN_LANES];
    double worst = 0, sums[ATTN_LANES] = {0};
    for (int n = 0; n < KEYS * ATTN_LANES; n++) {
        double part = random_range(random, 0, 1 << 30) * 0x1p-30;
        have[n] = want[n] = (real)(n % 3 == 0 ? least * part : -part); /* all of the range, and near 0 */
    }
    micro->softmax(have, KEYS, ATTN_LANES, ATTN_LANES, max, sum, alpha);
    for (int n = 0; n < KEYS * ATTN_LANES; n++) {
        int exponent;
        long double exact = expl(want[n]);
        frexpl(exact, &exponent);
        worst = fmax(worst, (double)(fabsl(have[n] - exact) / ldexpl(unit, exponent - 1)));
        sums[n % ATTN_LANES] += (double)exact;
    }
    CHECK_SAY(worst <= 2, "%s: e^x is off by %.2f units in the last place", isa, worst);
    for (int r = 0; r < ATTN_LANES; r++) {
        CHECK_SAY(max[r] == 0 && alpha[r] == 1, "%s: the maximum is %g, alpha %g", isa, (double)max[r], (double)alpha[r]);
        CHECK_SAY(fabs(sum[r] - sums[r]) <= sqrt(KEYS) * unit * sums[r], "%s: the sum is %.9g and not %.9g", isa,
                  (double)sum[r], sums[r]);
    }
}

/* Of NaN only one kind is stored (C5). */
static void check_nan(attn_dtype dtype) {
    enum { COUNT = 37 };
    uint8_t stored[2][COUNT * sizeof(double)];
    const size_t size = attn_dtype_size(dtype);
    for (int32_t sign = 0; sign < 2; sign++) {
        for (int32_t n = 0; n < COUNT; n++) have[n] = (n + sign) % 2 ? (real)NAN : -(real)NAN;
        micro->store(stored[sign], dtype, have, 2, COUNT);
    }
    for (int32_t n = 0; n < COUNT; n++) {
        CHECK_SAY(memcmp(stored[0] + n * size, stored[1], size) == 0 && memcmp(stored[1] + n * size, stored[1], size) == 0,
                  "%s, NaN as %s: element %d", isa, attn_dtype_name(dtype), n);
        if (dtype != ATTN_I8)
            CHECK_SAY(isnan(attn__load(dtype, stored[0], n)), "%s, %s: no NaN", isa, attn_dtype_name(dtype));
    }
}

/* Elements are converted to the same numbers one by one as many at once. */
static void check_conversion(attn_dtype dtype, uint64_t *random) {
    enum { COUNT = 1021 };
    static uint16_t half[2][COUNT];
    for (int base = 0; base < 65536; base += COUNT) {
        for (int n = 0; n < COUNT; n++) half[0][n] = (uint16_t)(base + n);
        micro->load(want, half[0], dtype, COUNT);
        for (int n = 0; n < COUNT; n++) {
            micro->load(&have[n], &half[0][n], dtype, 1);
            CHECK_SAY(same_number(want[n], have[n]), "%s, load: %s 0x%04x", isa, attn_dtype_name(dtype), half[0][n]);
        }
    }
    for (int round = 0; round < 40; round++) {
        for (int n = 0; n < COUNT; n++)
            a[n] = (real)(random_range(random, -1000000, 1000000) * pow(2, random_range(random, -50, 0)));
        micro->store(half[0], dtype, a, (real)1.25, COUNT);
        for (int n = 0; n < COUNT; n++) {
            micro->store(&half[1][n], dtype, &a[n], (real)1.25, 1);
            CHECK_SAY(half[0][n] == half[1][n], "%s, store: %s of %.9g", isa, attn_dtype_name(dtype), (double)a[n]);
        }
    }
}

/* Each byte is the number that it is, alone and among others. */
static void check_bytes(attn_dtype dtype) {
    uint8_t bytes[256];
    for (int n = 0; n < 256; n++) bytes[n] = (uint8_t)n;
    for (int first = 0; first < 17; first++) {
        micro->load(want, bytes + first, dtype, 256 - first);
        for (int n = first; n < 256; n++) {
            const real number = (real)attn__load(dtype, bytes, n);
            micro->load(have, bytes + n, dtype, 1);
            CHECK_SAY(same_number(want[n - first], number) && same_number(have[0], number), "%s, load: %s 0x%02x", isa,
                      attn_dtype_name(dtype), n);
        }
    }
}

static void check_elements(void) {
    uint64_t random = 8;
    check_bytes(ATTN_E4M3);
    check_bytes(ATTN_E5M2);
    check_bytes(ATTN_I8);
    check_conversion(ATTN_F16, &random);
    check_conversion(ATTN_BF16, &random);
    for (int dtype = ATTN_F32; attn_dtype_size((attn_dtype)dtype); dtype++) check_nan((attn_dtype)dtype);
    for (int32_t keys = 1; keys <= 64; keys += keys < 21 ? 1 : 43)
        for (int32_t columns = 1; columns <= ATTN_LANES; columns++) check_softmax(columns, keys, &random);
    check_exponential(&random);
    check_alibi(&random);
}

static void check_products(void) {
    static const int32_t dims[] = {16, 64, 80, 96, 128, 144, 192, 256};
    static const attn_dtype dtypes[] = {ATTN_F32, ATTN_F16, ATTN_BF16, ATTN_E4M3, ATTN_E5M2, ATTN_I8};
    uint64_t random = 7;
    fill(a, MOST, &random);
    fill(b, MOST, &random);
    for (int32_t m = 1; m <= 64; m += m < 20 ? 1 : 11)
        for (int32_t k = 1; k <= 64; k += k < 20 ? 3 : 5) check_gemm(m, 16 * (1 + (m + k) % 5), k);
    for (int32_t keys = 1; keys <= 64; keys += keys < 9 ? 1 : 5)
        for (int32_t dim = 1; dim <= 300; dim += dim % 4 == 3 ? 1 : dim < 70 ? 3 : 13) check_dots(ATTN_LANES, keys, dim);
    check_dots(ATTN_LANES, 64, 128);
    check_dots(ATTN_LANES, 64, 256);
    for (int32_t keys = 1; keys <= 64; keys += keys < 9 ? 1 : 5)
        for (int32_t dim = 1; dim <= 256; dim += dim < 20 ? 1 : 7) check_dots(64, keys, dim);
    for (size_t n = 0; n < sizeof dims / sizeof *dims; n++)
        for (int32_t keys = 1; keys <= 70; keys += 23)
            for (int32_t rows = 1; rows <= 8; rows++)
                for (size_t d = 0; d < sizeof dtypes / sizeof *dtypes; d++)
                    check_narrow(dtypes[d], rows, keys, dims[n], &random);
}

/* All tables that this machine can run. */
static void check_micro(void) {
#if defined(__FP_FAST_FMA) || defined(__aarch64__) || defined(__FMA__) /* clang does not always say the first */
    const bool always_fuses = true;
#else
    const bool always_fuses = false;
#endif
    static const struct {
        const char *name;
        const attn_micro *table;
        uint32_t needs;
    } tables[] = {
#define ISA(name, bits, words) {#name, &REAL(micro_##name), bits},
#include "cpu/isa.def"
#undef ISA
    };
    for (size_t n = 0; n < sizeof tables / sizeof *tables; n++) {
        if (tables[n].needs & ~attn__cpu_detect()) continue;
        isa = tables[n].name;
        micro = tables[n].table;
        fuses = tables[n].needs != 0 || always_fuses;
        check_elements();
        check_products();
    }
}

#endif
