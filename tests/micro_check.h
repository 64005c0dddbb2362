/*
 * Micro-kernels by hand against those of plain C, one number type at a time (cpu/real.h): products and dot products have the same bits, for
 * all fuse multiplications with additions and add in the same order. Plain C is table `c` on aarch64, and on x86-64, where that one has
 * nothing to fuse with, what the compiler makes of the same C for AVX2. Dot products of few rows have an order that goes by the vector, so those
 * of other vectors than plain C's are held to chain_dots, which have another way to the same bits; softmax of few columns to that of many.
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

#if defined(__x86_64__)
#define PLAIN REAL(micro_avx2)
#define SAME_VECTORS REAL(micro_c) /* none of those that are checked */
#define MADE_FOR ATTN_CPU_AVX2
#else
#define PLAIN REAL(micro_c)
#define SAME_VECTORS REAL(micro_neon)
#define MADE_FOR 0
#endif

enum { MOST = 20 * 1024 };
static const attn_micro *micro; /* the one to check */
static const char *isa;         /* and its name */
static real a[MOST], b[MOST], want[MOST], have[MOST];
static uint32_t narrow[MOST]; /* of any dtype up to 32 bits */

static void fill(real *x, int count, uint64_t *random) {
    for (int n = 0; n < count; n++)
        x[n] = (real)random_range(random, -1000000, 1000000) / 524287; /* sums of such numbers are rounded */
}

static void same(const char *what, int32_t rows, int32_t keys, int32_t dim) {
    CHECK_SAY(memcmp(want, have, sizeof want) == 0, "%s, %s: %d rows, %d keys, dim %d", isa, what, rows, keys, dim);
}

/* Products with c as it was and on top of it; a either way round. */
static void check_gemm(int32_t m, int32_t n, int32_t k) {
    const int64_t lda = 100;
    for (int form = 0; form < 4; form++) {
        int64_t row = form & 1 ? 1 : lda, col = form & 1 ? lda : 1;
        memcpy(want, a, sizeof want);
        memcpy(have, a, sizeof have);
        PLAIN.gemm(want, n + 16, a, row, col, b, n, m, n, k, form & 2);
        micro->gemm(have, n + 16, a, row, col, b, n, m, n, k, form & 2);
        same("gemm", m, k, n);
    }
}

static void check_dots(int32_t columns, int32_t keys, int32_t dim) {
    memcpy(want, a, sizeof want);
    memcpy(have, a, sizeof have);
    PLAIN.dots(want, 64, a, dim + 3, b, columns, keys, dim);
    micro->dots(have, 64, a, dim + 3, b, columns, keys, dim);
    same("dots", columns, keys, dim);
}

/* Keys, or values, of that dtype, and the same in b as real. */
static attn_panel panel_of(attn_dtype dtype, int32_t rows, int32_t dim) {
    for (int n = 0; n < rows * dim; n++) {
        attn__store(dtype, narrow, n, (double)b[n]);
        b[n] = (real)attn__load(dtype, narrow, n);
    }
    return (attn_panel){narrow, dim, dtype, 0, dim};
}

/* What narrow_dots of q in a and keys in b should give: the products of rows that are not there are zero. */
static void chain_dots(int32_t rows, int32_t keys, int32_t dim) {
    static real q_t[256 * ATTN_LANES];
    for (int32_t x = 0; x < dim; x++)
        for (int32_t r = 0; r < ATTN_LANES; r++) q_t[x * ATTN_LANES + r] = r < rows ? a[r * dim + x] : 0;
    micro->chain_dots(want, ATTN_LANES, b, dim, q_t, keys, dim);
}

static void check_narrow(attn_dtype dtype, int32_t rows, int32_t keys, int32_t dim, uint64_t *random) {
    const int32_t width = ATTN_LANES;
    if (!micro->readable(dtype)) return;
    fill(b, keys * dim, random);
    attn_panel panel = panel_of(dtype, keys, dim), plain = {b, dim, REAL_DTYPE, 0, dim};
    memset(want, 0, sizeof want);
    memset(have, 0, sizeof have);
    micro->narrow_dots(have, width, &panel, a, dim, rows, keys, dim);
    if (micro == &SAME_VECTORS)
        PLAIN.narrow_dots(want, width, &plain, a, dim, rows, keys, dim);
    else
        chain_dots(rows, keys, dim);
    same(attn_dtype_name(dtype), rows, keys, dim);
    memcpy(want, a, sizeof want);
    memcpy(have, a, sizeof have);
    PLAIN.narrow_gemm(want, dim, a, width, &plain, rows, dim, keys);
    micro->narrow_gemm(have, dim, a, width, &panel, rows, dim, keys);
    same(attn_dtype_name(dtype), rows, keys, dim);
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

static void check_table(void) {
    static const int32_t dims[] = {16, 64, 80, 96, 128, 144, 192, 256};
    static const attn_dtype dtypes[] = {ATTN_F32, ATTN_F16, ATTN_BF16};
    uint64_t random = 7;
    check_conversion(ATTN_F16, &random);
    check_conversion(ATTN_BF16, &random);
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
    for (int32_t keys = 1; keys <= 64; keys += keys < 21 ? 1 : 43)
        for (int32_t columns = 1; columns <= ATTN_LANES; columns++) check_softmax(columns, keys, &random);
    for (size_t n = 0; n < sizeof dims / sizeof *dims; n++)
        for (int32_t keys = 1; keys <= 70; keys += 23)
            for (int32_t rows = 1; rows <= 8; rows++)
                for (int d = 0; d < 3; d++) check_narrow(dtypes[d], rows, keys, dims[n], &random);
}

/* All tables that this machine can run. */
static void check_micro(void) {
    static const struct {
        const char *name;
        const attn_micro *table;
        uint32_t needs;
    } tables[] = {
#define ISA(name, bits, words) {#name, &REAL(micro_##name), bits},
#include "cpu/isa.def"
#undef ISA
    };
    if (MADE_FOR & ~attn__cpu_detect()) {
        test_skip("this CPU has nothing to fuse multiplications and additions with");
        return;
    }
    for (size_t n = 1; n < sizeof tables / sizeof *tables; n++) {
        if (tables[n].needs & ~attn__cpu_detect()) continue;
        isa = tables[n].name;
        micro = tables[n].table;
        check_table();
    }
}

#endif
