/*
 * Products of few rows by NEON, by hand, float and double: 4 keys against 4 rows or one, and 4 rows or one of p against 4 vectors of v.
 * Keys and values are read where they lie and widened in registers. micro.c's dot_block() and narrow_block() say what they do; the bits
 * are those of theirs.
 *
 * A step takes 32 bytes of q, that is two vectors, `lo` and `hi`, and as many elements of each key:
 *
 *   v0-3          lo, then hi, of four rows of q
 *   v4-7, v8-11   lo and hi of four keys
 *   v15           0
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
 * What two vectors are read from: a key's at an offset, values' at `byte` times SIZE, into `hi`, or both; LO and HI widen them. No address is
 * written back by a load: that would be an instruction more, and only four begin in a cycle.
 */
#define KEY_SAME(lo, hi, at) "ldr q" #lo ", [" at ", %[x]]\n\tldr q" #hi ", [" at ", %[y]]\n\t"
#define KEY_16(lo, hi, at) "ldr q" #hi ", [" at ", %[x]]\n\t"
#define KEY_8(lo, hi, at) "ldr d" #hi ", [" at ", %[x]]\n\t"
#define NEXT_SAME "add %[x], %[x], #32\n\tadd %[y], %[y], #32\n\t"
#define NEXT_16 "add %[x], %[x], #16\n\t"
#define NEXT_8 "add %[x], %[x], #8\n\t"
#define BYTES_SAME "64" /* of four vectors */
#define BYTES_16 "32"
#define BYTES_8 "16"
#define VALUES_SAME(lo0, hi0, lo1, hi1)                                                                                    \
    "ldr q" #lo0 ", [%[v]]\n\tldr q" #hi0 ", [%[v], #16]\n\tldr q" #lo1 ", [%[v], #32]\n\tldr q" #hi1 ", [%[v], #48]\n\t"
#define VALUES_16(lo0, hi0, lo1, hi1) "ldr q" #hi0 ", [%[v]]\n\tldr q" #hi1 ", [%[v], #16]\n\t"
#define VALUES_8(lo0, hi0, lo1, hi1) "ldr d" #hi0 ", [%[v]]\n\tldr d" #hi1 ", [%[v], #8]\n\t"
#define LO_SAME(lo, hi)
#define HI_SAME(lo, hi)
#ifdef ATTN_REAL_F64
#define T "2d"
#define KEY_F32 KEY_16
#define NEXT_F32 NEXT_16
#define VALUES_F32 VALUES_16
#define BYTES_F32 BYTES_16
#define LO_F32(lo, hi) "fcvtl v" #lo ".2d, v" #hi ".2s\n\t"
#define HI_F32(lo, hi) "fcvtl2 v" #hi ".2d, v" #hi ".4s\n\t"
#define KEY_F16 KEY_8
#define NEXT_F16 NEXT_8
#define VALUES_F16 VALUES_8
#define BYTES_F16 BYTES_8
#define LO_F16(lo, hi) "fcvtl v" #hi ".4s, v" #hi ".4h\n\t" LO_F32(lo, hi)
#define HI_F16 HI_F32
#define KEY_BF16 KEY_8
#define NEXT_BF16 NEXT_8
#define VALUES_BF16 VALUES_8
#define BYTES_BF16 BYTES_8
#define LO_BF16(lo, hi) "zip1 v" #hi ".8h, v15.8h, v" #hi ".8h\n\t" LO_F32(lo, hi)
#define HI_BF16 HI_F32
#else
#define T "4s"
#define KEY_F16 KEY_16
#define NEXT_F16 NEXT_16
#define VALUES_F16 VALUES_16
#define BYTES_F16 BYTES_16
#define LO_F16(lo, hi) "fcvtl v" #lo ".4s, v" #hi ".4h\n\t"
#define HI_F16(lo, hi) "fcvtl2 v" #hi ".4s, v" #hi ".8h\n\t"
#define KEY_BF16 KEY_16
#define NEXT_BF16 NEXT_16
#define VALUES_BF16 VALUES_16
#define BYTES_BF16 BYTES_16
#define LO_BF16(lo, hi) "zip1 v" #lo ".8h, v15.8h, v" #hi ".8h\n\t"
#define HI_BF16(lo, hi) "zip2 v" #hi ".8h, v15.8h, v" #hi ".8h\n\t"
#endif

#define FAR "pldl1keep" /* where to: the first cache, which has room for what tile.c asks for */
#define NONE(r) "movi v" #r ".4s, #0\n\t"
#define FUSE(to, x, y) "fmla v" #to "." T ", v" #x "." T ", v" #y "." T "\n\t"
#define PLUS(to, x, y) "fadd v" #to "." T ", v" #x "." T ", v" #y "." T "\n\t"

/* ---- dot products ---- */

#define GET_KEYS(TYPE)                                                                                                     \
    KEY_##TYPE(4, 8, "%[k0]") KEY_##TYPE(5, 9, "%[k1]") KEY_##TYPE(6, 10, "%[k2]") KEY_##TYPE(7, 11, "%[k3]") NEXT_##TYPE
/* All at once: other instructions between multiply-adds cost twice their time, unless they come in a row. */
#define WIDEN_KEYS(TYPE)                                                                                                   \
    LO_##TYPE(4, 8) LO_##TYPE(5, 9) LO_##TYPE(6, 10) LO_##TYPE(7, 11) HI_##TYPE(4, 8) HI_##TYPE(5, 9) HI_##TYPE(6, 10)     \
        HI_##TYPE(7, 11)
#define ASK_KEYS                                                                                                           \
    "prfm " FAR ", [%[n0], %[x]]\n\tprfm " FAR ", [%[n1], %[x]]\n\tprfm " FAR ", [%[n2], %[x]]\n\tprfm " FAR ", [%[n3], %[x]]\n\t"
#define GET_Q_4                                                                                                            \
    "ldr q0, [%[q0], %[qx]]\n\tldr q1, [%[q1], %[qx]]\n\tldr q2, [%[q2], %[qx]]\n\tldr q3, [%[q3], %[qx]]\n\t"            \
    "add %[qx], %[qx], #16\n\t"
#define GET_Q_1 "ldr q0, [%[q0], %[qx]]\n\tadd %[qx], %[qx], #16\n\t"
#define FUSE_4(r0, r1, r2, r3, key) FUSE(r0, key, 0) FUSE(r1, key, 1) FUSE(r2, key, 2) FUSE(r3, key, 3)

#define DOT_STEP_4(TYPE)                                                                                                   \
    GET_KEYS(TYPE) GET_Q_4 WIDEN_KEYS(TYPE) FUSE_4(16, 17, 18, 19, 4) FUSE_4(20, 21, 22, 23, 5) FUSE_4(24, 25, 26, 27, 6)  \
    FUSE_4(28, 29, 30, 31, 7) GET_Q_4 FUSE_4(16, 17, 18, 19, 8) FUSE_4(20, 21, 22, 23, 9) FUSE_4(24, 25, 26, 27, 10)       \
    FUSE_4(28, 29, 30, 31, 11)

#define DOT_STEP_1(TYPE)                                                                                                   \
    GET_KEYS(TYPE) GET_Q_1 WIDEN_KEYS(TYPE) FUSE(16, 4, 0) FUSE(20, 5, 0) FUSE(24, 6, 0) FUSE(28, 7, 0)                    \
    GET_Q_1 FUSE(16, 8, 0) FUSE(20, 9, 0) FUSE(24, 10, 0) FUSE(28, 11, 0)

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

/* Distances in bytes; steps, even and > 0: of 32 bytes of a row of q. As many rows from n0 on, `pitch` apart, are asked for. */
#define DOTS(TYPE, CLEAR, STEP, PUT)                                                                                       \
    __asm__ volatile(NONE(15) CLEAR "1:\n\t" STEP(TYPE) ASK_KEYS STEP(TYPE) "subs %[n], %[n], #2\n\tb.ne 1b\n\t" PUT       \
                     : [s] "+&r"(s), [x] "+&r"(x), [y] "+&r"(y), [qx] "+&r"(qx), [n] "+&r"(steps)                          \
                     : [k0] "r"(k0), [k1] "r"(k1), [k2] "r"(k2), [k3] "r"(k3), [q0] "r"(q0), [q1] "r"(q1), [q2] "r"(q2),   \
                       [q3] "r"(q3), [n0] "r"(n0), [n1] "r"(n1), [n2] "r"(n2), [n3] "r"(n3), [width] "r"(width)            \
                     : ALL_REGISTERS)
#define NARROW_DOTS(TYPE)                                                                                                  \
    INLINE void dots_##TYPE(bool four, char *s, int64_t width, const char *k0, int64_t ldk, const char *q0,                \
                            const char *q1, const char *q2, const char *q3, int64_t steps, const char *n0,                 \
                            int64_t pitch) {                                                                               \
        const char *k1 = k0 + ldk, *k2 = k1 + ldk, *k3 = k2 + ldk;                                                         \
        const char *n1 = n0 + pitch, *n2 = n1 + pitch, *n3 = n2 + pitch;                                                   \
        int64_t x = 0, y = 16, qx = 0;                                                                                     \
        if (four)                                                                                                          \
            DOTS(TYPE, CLEAR_SUMS, DOT_STEP_4,                                                                             \
                 PUT_4(16, 17, 18, 19) PUT_4(20, 21, 22, 23) PUT_4(24, 25, 26, 27) PUT_4(28, 29, 30, 31));                 \
        else                                                                                                               \
            DOTS(TYPE, NONE(16) NONE(20) NONE(24) NONE(28), DOT_STEP_1, PUT_1(16) PUT_1(20) PUT_1(24) PUT_1(28));          \
    }

/*
 * ---- p v ----
 *
 *   v0-1, v2-3   p of a key and the next: of four rows, or one
 *   v4-7, v8-11  four vectors of v of each
 *   v15          0
 *   v16-31       sums of row r in v(16 + 4 r) and the three after it
 */
#define GET_V(TYPE, lo0, hi0, lo1, hi1) VALUES_##TYPE(lo0, hi0, lo1, hi1) "prfm " FAR ", [%[next]]\n\tadd %[v], %[v], %[ldv]\n\tadd %[next], %[next], %[pitch]\n\t"
#define WIDEN_V(TYPE, lo0, hi0, lo1, hi1) LO_##TYPE(lo0, hi0) LO_##TYPE(lo1, hi1) HI_##TYPE(lo0, hi0) HI_##TYPE(lo1, hi1)
#ifdef ATTN_REAL_F64
#define BY(to, x, p, e) "fmla v" #to ".2d, v" #x ".2d, v" #p ".d[" #e "]\n\t"
#define GET_P_4(p0, p1) "ldr q" #p0 ", [%[p]]\n\tldr q" #p1 ", [%[p], #16]\n\tadd %[p], %[p], %[width]\n\t"
#define GET_P_1(p0, unused) "ldr d" #p0 ", [%[p]]\n\tadd %[p], %[p], %[width]\n\t"
#define ROWS_4(p0, p1, x0, x1, x2, x3)                                                                                     \
    BY_ROW(16, 17, 18, 19, x0, x1, x2, x3, p0, 0) BY_ROW(20, 21, 22, 23, x0, x1, x2, x3, p0, 1)                            \
        BY_ROW(24, 25, 26, 27, x0, x1, x2, x3, p1, 0) BY_ROW(28, 29, 30, 31, x0, x1, x2, x3, p1, 1)
#else
#define BY(to, x, p, e) "fmla v" #to ".4s, v" #x ".4s, v" #p ".s[" #e "]\n\t"
#define GET_P_4(p0, p1) "ldr q" #p0 ", [%[p]]\n\tadd %[p], %[p], %[width]\n\t"
#define GET_P_1(p0, unused) "ldr s" #p0 ", [%[p]]\n\tadd %[p], %[p], %[width]\n\t"
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

/*
 * The sums [row][lds], so many blocks of four vectors, go on with so many keys, > 0, two by two. What is `ahead` of the values is asked
 * for. The loop over blocks is in here: what a compiler puts between them costs as much as three keys.
 */
#define SUMS(TYPE, GET_SUMS, PUT_SUMS, GET_P, PRODUCTS_0, PRODUCTS_1)                                                      \
    __asm__ volatile(NONE(15) "4:\n\tmov %[v], %[v0]\n\tmov %[next], %[n0]\n\tmov %[p], %[p0]\n\tsubs %[n], %[keys], #2\n\t" GET_SUMS "b.lt 2f\n1:\n\t"  \
                     GET_V(TYPE, 4, 5, 6, 7) GET_P(0, 1) GET_V(TYPE, 8, 9, 10, 11) GET_P(2, 3) WIDEN_V(TYPE, 4, 5, 6, 7)   \
                         WIDEN_V(TYPE, 8, 9, 10, 11) PRODUCTS_0 PRODUCTS_1                                                 \
                     "subs %[n], %[n], #2\n\tb.ge 1b\n2:\n\ttbz %[n], #0, 3f\n\t" GET_V(TYPE, 4, 5, 6, 7) GET_P(0, 1)     \
                         WIDEN_V(TYPE, 4, 5, 6, 7) PRODUCTS_0 "3:\n\t" PUT_SUMS                                            \
                     "add %[sum], %[sum], #64\n\tadd %[v0], %[v0], #" BYTES_##TYPE "\n\tadd %[n0], %[n0], #" BYTES_##TYPE "\n\t"     \
                     "subs %[blocks], %[blocks], #1\n\tb.ne 4b"                                                                                             \
                     : [sum] "+&r"(sum), [v0] "+&r"(v0), [blocks] "+&r"(blocks), [p] "=&r"(p), [v] "=&r"(v), [n] "=&r"(n), \
                       [at] "=&r"(at), [n0] "+&r"(n0), [next] "=&r"(next)                                                  \
                     : [p0] "r"(p0), [lds] "r"(lds), [width] "r"(width), [ldv] "r"(ldv), [keys] "r"(keys),                 \
                       [pitch] "r"(pitch)                                                                                  \
                     : ALL_REGISTERS)
#define NARROW_SUMS(TYPE)                                                                                                  \
    INLINE void sums_##TYPE(bool four, char *sum, int64_t lds, const char *p0, int64_t width, const char *v0, int64_t ldv, \
                            int64_t keys, const char *n0, int64_t pitch, int64_t blocks) {                                 \
        const char *p, *v, *next;                                                                                                 \
        char *at;                                                                                                          \
        int64_t n;                                                                                                         \
        if (four)                                                                                                          \
            SUMS(TYPE, SUM_ROWS("ldr"), SUM_ROWS("str"), GET_P_4, ROWS_4(0, 1, 4, 5, 6, 7), ROWS_4(2, 3, 8, 9, 10, 11));   \
        else                                                                                                               \
            SUMS(TYPE, SUM_ROW("ldr", sum, 16, 17, 18, 19), SUM_ROW("str", sum, 16, 17, 18, 19), GET_P_1,                  \
                 BY_ROW(16, 17, 18, 19, 4, 5, 6, 7, 0, 0), BY_ROW(16, 17, 18, 19, 8, 9, 10, 11, 2, 0));                    \
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

enum { NARROW_ROWS = 4 };

/* Four keys at a time against up to four rows; in the place of rows that are not there comes the first one again. */
INLINE void dots_by_hand(const attn_dtype of, real *s, int32_t width, const void *k, int64_t ldk, const char *next,
                         int64_t pitch, const real *q, int64_t ldq, int32_t rows, int32_t keys, int32_t dim) {
    const int64_t B = sizeof(real), size = dtype_bytes(of), steps = dim / (2 * VL);
    const char *row[NARROW_ROWS];
    for (int32_t r = 0; r < NARROW_ROWS; r++) row[r] = (const char *)(q + (r < rows ? r : 0) * ldq);
    for (int32_t j = 0; j < keys; j += 4, s += 4 * width)
        BY_DTYPE(dots, rows > 1, (char *)s, width * B, (const char *)k + j * ldk * size, ldk * size, row[0], row[1], row[2],
                 row[3], steps, next + j * pitch, pitch);
}

/* c[m][ldc], so many blocks of four vectors, goes on with some keys. */
INLINE void sums_by_hand(const attn_dtype of, real *c, int64_t ldc, const real *p, int32_t width, const void *v,
                         int64_t ldv, const char *next, int64_t pitch, int32_t m, int32_t blocks, int32_t keys) {
    const int64_t B = sizeof(real), size = (int64_t)dtype_bytes(of);
    for (int32_t r = 0, rows; r < m; r += rows, c += rows * ldc, p += rows) {
        rows = m - r >= NARROW_ROWS ? NARROW_ROWS : 1;
        BY_DTYPE(sums, rows > 1, (char *)c, ldc * B, (const char *)p, width * B, (const char *)v, ldv * size, keys, next,
                 pitch, blocks);
    }
}

#endif
