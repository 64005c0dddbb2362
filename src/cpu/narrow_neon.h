/*
 * Products of few rows by NEON, by hand, float and double: 4 keys against 4 rows or one, and 4 rows or one of p against 4 vectors of v.
 * Keys and values are read where they lie and widened in registers. micro.c's dot_block() and narrow_block() say what they do; the bits
 * are those of theirs.
 *
 * A step takes 32 bytes of q, that is two vectors, `lo` and `hi`, and as many elements of each key:
 *
 *   v0-3, v4-7    lo and hi of four rows of q
 *   v8-11, v12-15 lo and hi of four keys
 *   v16-31        sums, key j and row r in v(16 + 4 j + r)
 */
#ifndef ATTN_CPU_NARROW_NEON_H
#define ATTN_CPU_NARROW_NEON_H

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Woverlength-strings" /* of assembly */

/* clang-format off */

#define ALL_REGISTERS                                                                                                      \
    "memory", "cc", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", "v14", "v15",  \
        "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28", "v29", "v30", "v31"

/*
 * What two vectors are read from: GET loads elements into `hi`, or both, and goes on behind them; LO and HI widen them.
 */
#define GET_SAME(lo, hi, at) "ldr q" #lo ", [" at "], #16\n\tldr q" #hi ", [" at "], #16\n\t"
#define LO_SAME(lo, hi)
#define HI_SAME(lo, hi)
#define GET_16(lo, hi, at) "ldr q" #hi ", [" at "], #16\n\t"
#define GET_8(lo, hi, at) "ldr d" #hi ", [" at "], #8\n\t"
#ifdef ATTN_REAL_F64
#define T "2d"
#define GET_F32 GET_16
#define LO_F32(lo, hi) "fcvtl v" #lo ".2d, v" #hi ".2s\n\t"
#define HI_F32(lo, hi) "fcvtl2 v" #hi ".2d, v" #hi ".4s\n\t"
#define GET_F16 GET_8
#define LO_F16(lo, hi) "fcvtl v" #hi ".4s, v" #hi ".4h\n\t" LO_F32(lo, hi)
#define HI_F16 HI_F32
#define GET_BF16 GET_8
#define LO_BF16(lo, hi) "shll v" #hi ".4s, v" #hi ".4h, #16\n\t" LO_F32(lo, hi)
#define HI_BF16 HI_F32
#else
#define T "4s"
#define GET_F16 GET_16
#define LO_F16(lo, hi) "fcvtl v" #lo ".4s, v" #hi ".4h\n\t"
#define HI_F16(lo, hi) "fcvtl2 v" #hi ".4s, v" #hi ".8h\n\t"
#define GET_BF16 GET_16
#define LO_BF16(lo, hi) "shll v" #lo ".4s, v" #hi ".4h, #16\n\t"
#define HI_BF16(lo, hi) "shll2 v" #hi ".4s, v" #hi ".8h, #16\n\t"
#endif

#define NONE(r) "movi v" #r ".4s, #0\n\t"
#define FUSE(to, x, y) "fmla v" #to "." T ", v" #x "." T ", v" #y "." T "\n\t"
#define PLUS(to, x, y) "fadd v" #to "." T ", v" #x "." T ", v" #y "." T "\n\t"

/* ---- dot products ---- */

#define GET_KEYS(TYPE)                                                                                                     \
    GET_##TYPE(8, 12, "%[k0]") GET_##TYPE(9, 13, "%[k1]") GET_##TYPE(10, 14, "%[k2]") GET_##TYPE(11, 15, "%[k3]")
/* All at once: other instructions between multiply-adds cost twice their time, unless they come in a row. */
#define WIDEN_KEYS(TYPE)                                                                                                   \
    LO_##TYPE(8, 12) LO_##TYPE(9, 13) LO_##TYPE(10, 14) LO_##TYPE(11, 15) HI_##TYPE(8, 12) HI_##TYPE(9, 13)                \
        HI_##TYPE(10, 14) HI_##TYPE(11, 15)
#define FUSE_4(r0, r1, r2, r3, key, q0, q1, q2, q3) FUSE(r0, key, q0) FUSE(r1, key, q1) FUSE(r2, key, q2) FUSE(r3, key, q3)

/* q is packed by steps: lo of four rows, then hi of them. */
#define DOT_STEP_4(TYPE)                                                                                                   \
    GET_KEYS(TYPE)                                                                                                         \
    "ldr q0, [%[q]]\n\tldr q1, [%[q], #16]\n\tldr q2, [%[q], #32]\n\tldr q3, [%[q], #48]\n\t"                              \
    "ldr q4, [%[q], #64]\n\tldr q5, [%[q], #80]\n\tldr q6, [%[q], #96]\n\tldr q7, [%[q], #112]\n\tadd %[q], %[q], #128\n\t" \
    WIDEN_KEYS(TYPE)                                                                                                       \
    FUSE_4(16, 17, 18, 19, 8, 0, 1, 2, 3) FUSE_4(20, 21, 22, 23, 9, 0, 1, 2, 3)                                            \
    FUSE_4(24, 25, 26, 27, 10, 0, 1, 2, 3) FUSE_4(28, 29, 30, 31, 11, 0, 1, 2, 3)                                          \
    FUSE_4(16, 17, 18, 19, 12, 4, 5, 6, 7) FUSE_4(20, 21, 22, 23, 13, 4, 5, 6, 7)                                          \
    FUSE_4(24, 25, 26, 27, 14, 4, 5, 6, 7) FUSE_4(28, 29, 30, 31, 15, 4, 5, 6, 7)

#define DOT_STEP_1(TYPE)                                                                                                   \
    GET_KEYS(TYPE) "ldr q0, [%[q]], #16\n\tldr q4, [%[q]], #16\n\t"                                                        \
    WIDEN_KEYS(TYPE) FUSE(16, 8, 0) FUSE(20, 9, 0) FUSE(24, 10, 0) FUSE(28, 11, 0)                                         \
    FUSE(16, 12, 4) FUSE(20, 13, 4) FUSE(24, 14, 4) FUSE(28, 15, 4)

/* Sums of the lanes, by halves, of four vectors, or one, to a key's place in s. */
#ifdef ATTN_REAL_F64
#define PUT_4(r0, r1, r2, r3)                                                                                              \
    "faddp v" #r0 ".2d, v" #r0 ".2d, v" #r1 ".2d\n\tfaddp v" #r2 ".2d, v" #r2 ".2d, v" #r3 ".2d\n\t"                       \
    "stp q" #r0 ", q" #r2 ", [%[s]]\n\tadd %[s], %[s], %[width]\n\t"
#define PUT_1(r0) "faddp d" #r0 ", v" #r0 ".2d\n\tstr d" #r0 ", [%[s]]\n\tadd %[s], %[s], %[width]\n\t"
#else
#define PUT_4(r0, r1, r2, r3)                                                                                              \
    "zip1 v0.2d, v" #r0 ".2d, v" #r1 ".2d\n\tzip2 v1.2d, v" #r0 ".2d, v" #r1 ".2d\n\t"                                     \
    "zip1 v2.2d, v" #r2 ".2d, v" #r3 ".2d\n\tzip2 v3.2d, v" #r2 ".2d, v" #r3 ".2d\n\t" PLUS(0, 0, 1) PLUS(2, 2, 3)         \
    "faddp v0.4s, v0.4s, v2.4s\n\tstr q0, [%[s]]\n\tadd %[s], %[s], %[width]\n\t"
#define PUT_1(r0)                                                                                                          \
    "ext v0.16b, v" #r0 ".16b, v" #r0 ".16b, #8\n\tfadd v0.2s, v0.2s, v" #r0 ".2s\n\tfaddp s0, v0.2s\n\t"                  \
    "str s0, [%[s]]\n\tadd %[s], %[s], %[width]\n\t"
#endif

#define CLEAR_SUMS                                                                                                         \
    NONE(16) NONE(17) NONE(18) NONE(19) NONE(20) NONE(21) NONE(22) NONE(23) NONE(24) NONE(25) NONE(26) NONE(27) NONE(28)   \
        NONE(29) NONE(30) NONE(31)

/* Distances in bytes; dims: steps of 32 bytes of a row of q, > 0. */
#define NARROW_DOTS(TYPE)                                                                                                  \
    INLINE void dots_4_##TYPE(char *s, int64_t width, const char *k0, int64_t ldk, const char *q, int64_t dims) {          \
        const char *k1 = k0 + ldk, *k2 = k1 + ldk, *k3 = k2 + ldk;                                                         \
        __asm__ volatile(CLEAR_SUMS "1:\n\t" DOT_STEP_4(TYPE) "subs %[n], %[n], #1\n\tb.ne 1b\n\t" PUT_4(16, 17, 18, 19)   \
                             PUT_4(20, 21, 22, 23) PUT_4(24, 25, 26, 27) PUT_4(28, 29, 30, 31)                             \
                         : [s] "+&r"(s), [k0] "+&r"(k0), [k1] "+&r"(k1), [k2] "+&r"(k2), [k3] "+&r"(k3), [q] "+&r"(q),     \
                           [n] "+&r"(dims)                                                                                 \
                         : [width] "r"(width)                                                                              \
                         : ALL_REGISTERS);                                                                                 \
    }                                                                                                                      \
    INLINE void dots_1_##TYPE(char *s, int64_t width, const char *k0, int64_t ldk, const char *q, int64_t dims) {          \
        const char *k1 = k0 + ldk, *k2 = k1 + ldk, *k3 = k2 + ldk;                                                         \
        __asm__ volatile(NONE(16) NONE(20) NONE(24) NONE(28) "1:\n\t" DOT_STEP_1(TYPE) "subs %[n], %[n], #1\n\tb.ne 1b\n\t" \
                             PUT_1(16) PUT_1(20) PUT_1(24) PUT_1(28)                                                       \
                         : [s] "+&r"(s), [k0] "+&r"(k0), [k1] "+&r"(k1), [k2] "+&r"(k2), [k3] "+&r"(k3), [q] "+&r"(q),     \
                           [n] "+&r"(dims)                                                                                 \
                         : [width] "r"(width)                                                                              \
                         : ALL_REGISTERS);                                                                                 \
    }

/*
 * ---- p v ----
 *
 *   v0-1, v2-3   p of a key and the next: of four rows, or one
 *   v4-7, v8-11  four vectors of v of each
 *   v16-31       sums of row r in v(16 + 4 r) and the three after it
 */
#define GET_V(TYPE, lo0, hi0, lo1, hi1)                                                                                    \
    "mov %[at], %[v]\n\tadd %[v], %[v], %[ldv]\n\t" GET_##TYPE(lo0, hi0, "%[at]") GET_##TYPE(lo1, hi1, "%[at]")
#define WIDEN_V(TYPE, lo0, hi0, lo1, hi1) LO_##TYPE(lo0, hi0) LO_##TYPE(lo1, hi1) HI_##TYPE(lo0, hi0) HI_##TYPE(lo1, hi1)
#ifdef ATTN_REAL_F64
#define BY(to, x, p, e) "fmla v" #to ".2d, v" #x ".2d, v" #p ".d[" #e "]\n\t"
#define GET_P_4(p0, p1) "ldr q" #p0 ", [%[p]]\n\tldr q" #p1 ", [%[p], #16]\n\tadd %[p], %[p], %[width]\n\t"
#define GET_P_1(p0) "ldr d" #p0 ", [%[p]]\n\tadd %[p], %[p], %[width]\n\t"
#define ROWS_4(p0, p1, x0, x1, x2, x3)                                                                                     \
    BY_ROW(16, 17, 18, 19, x0, x1, x2, x3, p0, 0) BY_ROW(20, 21, 22, 23, x0, x1, x2, x3, p0, 1)                            \
        BY_ROW(24, 25, 26, 27, x0, x1, x2, x3, p1, 0) BY_ROW(28, 29, 30, 31, x0, x1, x2, x3, p1, 1)
#else
#define BY(to, x, p, e) "fmla v" #to ".4s, v" #x ".4s, v" #p ".s[" #e "]\n\t"
#define GET_P_4(p0, p1) "ldr q" #p0 ", [%[p]]\n\tadd %[p], %[p], %[width]\n\t"
#define GET_P_1(p0) "ldr s" #p0 ", [%[p]]\n\tadd %[p], %[p], %[width]\n\t"
#define ROWS_4(p0, p1, x0, x1, x2, x3)                                                                                     \
    BY_ROW(16, 17, 18, 19, x0, x1, x2, x3, p0, 0) BY_ROW(20, 21, 22, 23, x0, x1, x2, x3, p0, 1)                            \
        BY_ROW(24, 25, 26, 27, x0, x1, x2, x3, p0, 2) BY_ROW(28, 29, 30, 31, x0, x1, x2, x3, p0, 3)
#endif
#define BY_ROW(r0, r1, r2, r3, x0, x1, x2, x3, p, e) BY(r0, x0, p, e) BY(r1, x1, p, e) BY(r2, x2, p, e) BY(r3, x3, p, e)
#define SUM_ROW(op, pointer, r0, r1, r2, r3)                                                                               \
    op " q" #r0 ", [%[" #pointer "]]\n\t" op " q" #r1 ", [%[" #pointer "], #16]\n\t" op " q" #r2 ", [%[" #pointer          \
       "], #32]\n\t" op " q" #r3 ", [%[" #pointer "], #48]\n\t"
#define SUM_ROWS(op)                                                                                                       \
    "mov %[at], %[sum]\n\t" SUM_ROW(op, at, 16, 17, 18, 19) "add %[at], %[at], %[lds]\n\t"                                 \
        SUM_ROW(op, at, 20, 21, 22, 23) "add %[at], %[at], %[lds]\n\t" SUM_ROW(op, at, 24, 25, 26, 27)                     \
            "add %[at], %[at], %[lds]\n\t" SUM_ROW(op, at, 28, 29, 30, 31)

/* The sums [row][lds] go on with so many keys, > 0, two by two. */
#define NARROW_SUMS(TYPE)                                                                                                  \
    INLINE void sums_4_##TYPE(char *sum, int64_t lds, const char *p, int64_t width, const char *v, int64_t ldv,            \
                              int64_t keys) {                                                                              \
        char *at;                                                                                                          \
        __asm__ volatile(SUM_ROWS("ldr") "subs %[n], %[n], #2\n\tb.lt 2f\n1:\n\t" GET_V(TYPE, 4, 5, 6, 7) GET_P_4(0, 1)    \
                             GET_V(TYPE, 8, 9, 10, 11) GET_P_4(2, 3) WIDEN_V(TYPE, 4, 5, 6, 7)                             \
                                 WIDEN_V(TYPE, 8, 9, 10, 11) ROWS_4(0, 1, 4, 5, 6, 7) ROWS_4(2, 3, 8, 9, 10, 11)           \
                         "subs %[n], %[n], #2\n\tb.ge 1b\n2:\n\ttbz %[n], #0, 3f\n\t" GET_V(TYPE, 4, 5, 6, 7) GET_P_4(0, 1) \
                             WIDEN_V(TYPE, 4, 5, 6, 7) ROWS_4(0, 1, 4, 5, 6, 7) "3:\n\t" SUM_ROWS("str")                   \
                         : [p] "+&r"(p), [v] "+&r"(v), [n] "+&r"(keys), [at] "=&r"(at)                                     \
                         : [sum] "r"(sum), [lds] "r"(lds), [width] "r"(width), [ldv] "r"(ldv)                              \
                         : ALL_REGISTERS);                                                                                 \
    }                                                                                                                      \
    INLINE void sums_1_##TYPE(char *sum, const char *p, int64_t width, const char *v, int64_t ldv, int64_t keys) {         \
        char *at;                                                                                                          \
        __asm__ volatile(SUM_ROW("ldr", sum, 16, 17, 18, 19) "subs %[n], %[n], #2\n\tb.lt 2f\n1:\n\t"                      \
                             GET_V(TYPE, 4, 5, 6, 7) GET_P_1(0) GET_V(TYPE, 8, 9, 10, 11) GET_P_1(2)                       \
                                 WIDEN_V(TYPE, 4, 5, 6, 7) WIDEN_V(TYPE, 8, 9, 10, 11)                                     \
                                     BY_ROW(16, 17, 18, 19, 4, 5, 6, 7, 0, 0) BY_ROW(16, 17, 18, 19, 8, 9, 10, 11, 2, 0)   \
                         "subs %[n], %[n], #2\n\tb.ge 1b\n2:\n\ttbz %[n], #0, 3f\n\t" GET_V(TYPE, 4, 5, 6, 7) GET_P_1(0)    \
                             WIDEN_V(TYPE, 4, 5, 6, 7) BY_ROW(16, 17, 18, 19, 4, 5, 6, 7, 0, 0) "3:\n\t"                  \
                                 SUM_ROW("str", sum, 16, 17, 18, 19)                                                       \
                         : [p] "+&r"(p), [v] "+&r"(v), [n] "+&r"(keys), [at] "=&r"(at)                                     \
                         : [sum] "r"(sum), [width] "r"(width), [ldv] "r"(ldv)                                              \
                         : ALL_REGISTERS);                                                                                 \
    }

#define NARROW(TYPE) NARROW_DOTS(TYPE) NARROW_SUMS(TYPE)
NARROW(SAME)
#ifdef ATTN_REAL_F64
NARROW(F32)
#endif
NARROW(F16)
NARROW(BF16)
#undef T

/* clang-format on */
#pragma GCC diagnostic pop

/* ---- by dtype ---- */

#ifdef ATTN_REAL_F64
#define LAST(call) call##_F32
#else
#define LAST(call) call##_BF16
#endif
#define BY_DTYPE(call, ...)                                                                                                \
    do {                                                                                                                   \
        if (of == REAL_DTYPE)                                                                                              \
            call##_SAME(__VA_ARGS__);                                                                                      \
        else if (of == ATTN_F16)                                                                                           \
            call##_F16(__VA_ARGS__);                                                                                       \
        else if (of == ATTN_BF16)                                                                                          \
            call##_BF16(__VA_ARGS__);                                                                                      \
        else                                                                                                               \
            LAST(call)(__VA_ARGS__);                                                                                       \
    } while (0)

enum { NARROW_ROWS = 4, PACKED = NARROW_ROWS * ATTN_MAX_DIM };

/* Up to four rows of q as dots_4 wants them; rows that are not there are zero. */
INLINE void pack_rows(real *packed, const real *q, int64_t ldq, int32_t rows, int32_t dim) {
    for (int32_t x = 0; x < dim; x += 2 * VL) {
        UNROLL for (int i = 0; i < 2 * NARROW_ROWS; i++) {
            int r = i % NARROW_ROWS;
            store(packed + x * NARROW_ROWS + i * VL, r < rows ? load(q + r * ldq + x + i / NARROW_ROWS * VL) : (vreal){0});
        }
    }
}

/* Four keys against a row, or up to four, packed. */
INLINE void dots_of_4_keys(const attn_dtype of, real *s, int32_t width, const void *k, int64_t at, int64_t ldk,
                           const real *q, int32_t rows, int32_t dim) {
    const int64_t B = sizeof(real), size = dtype_bytes(of), steps = dim / (2 * VL);
    const char *key = (const char *)k + at * size;
    if (rows == 1)
        BY_DTYPE(dots_1, (char *)s, width * B, key, ldk * size, (const char *)q, steps);
    else
        BY_DTYPE(dots_4, (char *)s, width * B, key, ldk * size, (const char *)q, steps);
}

INLINE bool sums_by_hand_narrow(const int mr, const int nv, const attn_dtype of, real *sum, int64_t lds, const real *p,
                                int32_t width, const void *v, int64_t at, int64_t ldv, int32_t keys) {
    const int64_t B = sizeof(real), size = (int64_t)dtype_bytes(of);
    const char *value = (const char *)v + at * size;
    if (nv != 4) return false;
    if (mr == 4) BY_DTYPE(sums_4, (char *)sum, lds * B, (const char *)p, width * B, value, ldv * size, keys);
    if (mr == 1) BY_DTYPE(sums_1, (char *)sum, (const char *)p, width * B, value, ldv * size, keys);
    return mr == 4 || mr == 1;
}

#endif
