/*
 * The register blocks of NEON by hand, float32. Compilers spill sums that are arrays, and copy what a multiply-add overwrites; so this is
 * assembly. Elements of one operand are taken from a vector of four of them (fmla by element): a load of one element into all lanes
 * would take a turn of the multipliers. micro.c's block() and dots_block() say what the blocks do; the bits are those of theirs.
 */
#ifndef ATTN_CPU_BLOCK_NEON_H
#define ATTN_CPU_BLOCK_NEON_H

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Woverlength-strings" /* of assembly */

/* clang-format off */

#define REGISTERS                                                                                                          \
    "memory", "cc", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", "v14", "v15",  \
        "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28", "v29", "v30", "v31"

#define ZERO(r) "movi v" #r ".4s, #0\n\t"
#define FMLA(to, b, a, e) "fmla v" #to ".4s, v" #b ".4s, v" #a ".s[" #e "]\n\t"
#define FADD(to, x) "fadd v" #to ".4s, v" #to ".4s, v" #x ".4s\n\t"

#define WITH(STEP, ...) STEP(__VA_ARGS__)
#define OF_BLOCK 16, 17, 18, 19, 20, 21, 22, 23
#define OF_GROUP 24, 25, 26, 27, 28, 29, 30, 31
#define OF_SECOND 8, 9, 10, 11, 12, 13, 14, 15
#define CLEAR_8(r0, r1, r2, r3, r4, r5, r6, r7) ZERO(r0) ZERO(r1) ZERO(r2) ZERO(r3) ZERO(r4) ZERO(r5) ZERO(r6) ZERO(r7)

/* ---- products: 4 rows by 4 vectors, sums in v16 to v31, a row of b in v4 to v7 ---- */

#define FMLA4(r0, r1, r2, r3, a, e) FMLA(r0, 4, a, e) FMLA(r1, 5, a, e) FMLA(r2, 6, a, e) FMLA(r3, 7, a, e)
#define LOAD_B "ldr q4, [%[b]]\n\tldr q5, [%[b], #16]\n\tldr q6, [%[b], #32]\n\tldr q7, [%[b], #48]\n\tadd %[b], %[b], %[ldb]\n\t"
#define CLEAR_16                                                                                                           \
    ZERO(16) ZERO(17) ZERO(18) ZERO(19) ZERO(20) ZERO(21) ZERO(22) ZERO(23) ZERO(24) ZERO(25) ZERO(26) ZERO(27) ZERO(28)   \
        ZERO(29) ZERO(30) ZERO(31)

#define TIMES_4(STEP) STEP STEP STEP STEP

/* One step of k. Elements of a: of four rows in v0; of row i in place e of v<i>. */
#define STEP_ACROSS                                                                                                        \
    "ldr q0, [%[a]]\n\tadd %[a], %[a], %[lda]\n\t" LOAD_B FMLA4(16, 17, 18, 19, 0, 0) FMLA4(20, 21, 22, 23, 0, 1)          \
        FMLA4(24, 25, 26, 27, 0, 2) FMLA4(28, 29, 30, 31, 0, 3)
#define STEP_ALONG(e)                                                                                                      \
    LOAD_B FMLA4(16, 17, 18, 19, 0, e) FMLA4(20, 21, 22, 23, 1, e) FMLA4(24, 25, 26, 27, 2, e) FMLA4(28, 29, 30, 31, 3, e)
#define STEPS_ALONG                                                                                                        \
    "ldr q0, [%[a]], #16\n\tldr q1, [%[a1]], #16\n\tldr q2, [%[a2]], #16\n\tldr q3, [%[a3]], #16\n\t"                       \
    STEP_ALONG(0) STEP_ALONG(1) STEP_ALONG(2) STEP_ALONG(3)

/* The sums of a row meet c, by way of v0 to v3, and go there. */
#define ADD_ROW(r0, r1, r2, r3)                                                                                            \
    "ldp q0, q1, [%[a]]\n\tldp q2, q3, [%[a], #32]\n\t" FADD(r0, 0) FADD(r1, 1) FADD(r2, 2) FADD(r3, 3)                    \
        "add %[a], %[a], %[ldc]\n\t"
#define PUT_ROW(r0, r1, r2, r3)                                                                                            \
    "stp q" #r0 ", q" #r1 ", [%[c]]\n\tstp q" #r2 ", q" #r3 ", [%[c], #32]\n\tadd %[c], %[c], %[ldc]\n\t"
#define FINISH_16                                                                                                          \
    "cbz %[accumulate], 9f\n\tmov %[a], %[c]\n\t" ADD_ROW(16, 17, 18, 19) ADD_ROW(20, 21, 22, 23) ADD_ROW(24, 25, 26, 27) \
        ADD_ROW(28, 29, 30, 31) "9:\n\t" PUT_ROW(16, 17, 18, 19) PUT_ROW(20, 21, 22, 23) PUT_ROW(24, 25, 26, 27)           \
            PUT_ROW(28, 29, 30, 31)
#define ASK_C                                                                                                              \
    "prfm pstl1keep, [%[c]]\n\tprfm pstl1keep, [%[c], %[ldc]]\n\tadd %[p], %[c], %[ldc], lsl #1\n\t"                       \
    "prfm pstl1keep, [%[p]]\n\tprfm pstl1keep, [%[p], %[ldc]]\n\t"

/* a is [k][lda], rows side by side. Distances in bytes; k > 0. */
INLINE void block_across(char *c, int64_t ldc, const char *a, int64_t lda, const char *b, int64_t ldb, int64_t k,
                         int64_t accumulate) {
    const char *p;
    __asm__ volatile(CLEAR_16 ASK_C "subs %[k], %[k], #16\n\tb.lt 2f\n"
                                    "1:\n\t" TIMES_4(TIMES_4(STEP_ACROSS)) "subs %[k], %[k], #16\n\tb.ge 1b\n"
                                    "2:\n\tadds %[k], %[k], #16\n\tb.eq 4f\n"
                                    "3:\n\t" STEP_ACROSS "subs %[k], %[k], #1\n\tb.ne 3b\n"
                                    "4:\n\t" FINISH_16
                     : [c] "+&r"(c), [a] "+&r"(a), [b] "+&r"(b), [k] "+&r"(k), [p] "=&r"(p)
                     : [ldc] "r"(ldc), [lda] "r"(lda), [ldb] "r"(ldb), [accumulate] "r"(accumulate)
                     : REGISTERS);
}

/* The same for 6 rows, sums in v8 to v31: so much longer between the ends of blocks, where the multipliers run dry. */
#define STEP_ACROSS_6                                                                                                      \
    "ldr q0, [%[a]]\n\tldr d1, [%[a], #16]\n\tadd %[a], %[a], %[lda]\n\t" LOAD_B FMLA4(8, 9, 10, 11, 0, 0)                 \
        FMLA4(12, 13, 14, 15, 0, 1) FMLA4(16, 17, 18, 19, 0, 2) FMLA4(20, 21, 22, 23, 0, 3) FMLA4(24, 25, 26, 27, 1, 0)    \
            FMLA4(28, 29, 30, 31, 1, 1)
INLINE void block_across_6(char *c, int64_t ldc, const char *a, int64_t lda, const char *b, int64_t ldb, int64_t k,
                           int64_t accumulate) {
    const char *p;
    __asm__ volatile(WITH(CLEAR_8, OF_SECOND) CLEAR_16 ASK_C
                     "add %[p], %[p], %[ldc], lsl #1\n\tprfm pstl1keep, [%[p]]\n\tprfm pstl1keep, [%[p], %[ldc]]\n\t"
                     "subs %[k], %[k], #8\n\tb.lt 2f\n"
                     "1:\n\t" TIMES_4(STEP_ACROSS_6 STEP_ACROSS_6) "subs %[k], %[k], #8\n\tb.ge 1b\n"
                     "2:\n\tadds %[k], %[k], #8\n\tb.eq 4f\n"
                     "3:\n\t" STEP_ACROSS_6 "subs %[k], %[k], #1\n\tb.ne 3b\n"
                     "4:\n\tcbz %[accumulate], 9f\n\tmov %[a], %[c]\n\t" ADD_ROW(8, 9, 10, 11) ADD_ROW(12, 13, 14, 15)
                         ADD_ROW(16, 17, 18, 19) ADD_ROW(20, 21, 22, 23) ADD_ROW(24, 25, 26, 27) ADD_ROW(28, 29, 30, 31)
                     "9:\n\t" PUT_ROW(8, 9, 10, 11) PUT_ROW(12, 13, 14, 15) PUT_ROW(16, 17, 18, 19) PUT_ROW(20, 21, 22, 23)
                         PUT_ROW(24, 25, 26, 27) PUT_ROW(28, 29, 30, 31)
                     : [c] "+&r"(c), [a] "+&r"(a), [b] "+&r"(b), [k] "+&r"(k), [p] "=&r"(p)
                     : [ldc] "r"(ldc), [lda] "r"(lda), [ldb] "r"(ldb), [accumulate] "r"(accumulate)
                     : REGISTERS);
}

/* a is [row][lda], four steps of k side by side. */
INLINE void block_along(char *c, int64_t ldc, const char *a, int64_t lda, const char *b, int64_t ldb, int64_t k,
                        int64_t accumulate) {
    const char *a1 = a + lda, *a2 = a1 + lda, *a3 = a2 + lda, *p;
    __asm__ volatile(
        CLEAR_16 ASK_C "subs %[k], %[k], #16\n\tb.lt 2f\n"
                       "1:\n\t" TIMES_4(STEPS_ALONG) "subs %[k], %[k], #16\n\tb.ge 1b\n"
                       "2:\n\tadds %[k], %[k], #16\n\tb.eq 4f\n"
                       "3:\n\tldr s0, [%[a]], #4\n\tldr s1, [%[a1]], #4\n\tldr s2, [%[a2]], #4\n\tldr s3, [%[a3]], #4\n\t"
        STEP_ALONG(0) "subs %[k], %[k], #1\n\tb.ne 3b\n"
                      "4:\n\t" FINISH_16
        : [c] "+&r"(c), [a] "+&r"(a), [a1] "+&r"(a1), [a2] "+&r"(a2), [a3] "+&r"(a3), [b] "+&r"(b), [k] "+&r"(k), [p] "=&r"(p)
        : [ldc] "r"(ldc), [ldb] "r"(ldb), [accumulate] "r"(accumulate)
        : REGISTERS);
}

/*
 * ---- dot products: 4 keys by 2 vectors of rows ----
 *
 *   v0-3    four dims of each key
 *   v4-7    two vectors of q_t of each of two dims, in turns
 *   v16-23  sums of the block of dims at hand, key i in v(16 + 2 i) and the next
 *   v24-31  sums of the group
 *   v8-15   sums of a second group
 */
#define DIM(r0, r1, r2, r3, r4, r5, r6, r7, b0, b1, e)                                                                     \
    "ldr q" #b0 ", [%[q]]\n\tldr q" #b1 ", [%[q], #16]\n\tadd %[q], %[q], %[ldq]\n\t" FMLA2(r0, r1, b0, b1, 0, e)          \
        FMLA2(r2, r3, b0, b1, 1, e) FMLA2(r4, r5, b0, b1, 2, e) FMLA2(r6, r7, b0, b1, 3, e)
#define FMLA2(r0, r1, b0, b1, a, e) FMLA(r0, b0, a, e) FMLA(r1, b1, a, e)
#define DIMS_4(r0, r1, r2, r3, r4, r5, r6, r7)                                                                             \
    "ldr q0, [%[k0]], #16\n\tldr q1, [%[k1]], #16\n\tldr q2, [%[k2]], #16\n\tldr q3, [%[k3]], #16\n\t"                     \
    DIM(r0, r1, r2, r3, r4, r5, r6, r7, 4, 5, 0) DIM(r0, r1, r2, r3, r4, r5, r6, r7, 6, 7, 1)                              \
    DIM(r0, r1, r2, r3, r4, r5, r6, r7, 4, 5, 2) DIM(r0, r1, r2, r3, r4, r5, r6, r7, 6, 7, 3)

#define BLOCK_INTO(of) WITH(CLEAR_8, of) TIMES_4(WITH(DIMS_4, of))
#define MEET(r0, r1, r2, r3, r4, r5, r6, r7)                                                                               \
    FADD(r0, 16) FADD(r1, 17) FADD(r2, 18) FADD(r3, 19) FADD(r4, 20) FADD(r5, 21) FADD(r6, 22) FADD(r7, 23)
/* By products with 1, in v15: faster by half a percent than sums. */
#define MEET_GROUP                                                                                                         \
    FMLA(24, 16, 15, 0) FMLA(25, 17, 15, 0) FMLA(26, 18, 15, 0) FMLA(27, 19, 15, 0) FMLA(28, 20, 15, 0)                    \
        FMLA(29, 21, 15, 0) FMLA(30, 22, 15, 0) FMLA(31, 23, 15, 0)
#define ADD_KEY(r0, r1) "ldp q0, q1, [%[q]]\n\tadd %[q], %[q], %[lds]\n\t" FADD(r0, 0) FADD(r1, 1)
#define ADD_KEYS ADD_KEY(24, 25) ADD_KEY(26, 27) ADD_KEY(28, 29) ADD_KEY(30, 31)
#define PUT_KEY(r0, r1) "stp q" #r0 ", q" #r1 ", [%[s]]\n\tadd %[s], %[s], %[lds]\n\t"
#define PUT_KEYS PUT_KEY(24, 25) PUT_KEY(26, 27) PUT_KEY(28, 29) PUT_KEY(30, 31)

/*
 * s [key][lds] from keys [ldk] and q_t [dim][ldq]: a group of dims, `blocks` of 16 and then four times `rest`, not both zero. Distances
 * in bytes.
 */
INLINE void dots_of_group(char *s, int64_t lds, const char *k, int64_t ldk, const char *q, int64_t ldq, int64_t blocks,
                          int64_t rest, int64_t accumulate) {
    const char *k1 = k + ldk, *k2 = k1 + ldk, *k3 = k2 + ldk;
    __asm__ volatile("fmov v15.4s, #1.0\n\tcbz %[blocks], 6f\n\t" BLOCK_INTO(OF_GROUP) "subs %[blocks], %[blocks], #1\n\tb.eq 2f\n"
                     "1:\n\t" BLOCK_INTO(OF_BLOCK) MEET_GROUP "subs %[blocks], %[blocks], #1\n\tb.ne 1b\n"
                     "2:\n\tcbz %[rest], 4f\n\t" WITH(CLEAR_8, OF_BLOCK) 
                     "3:\n\t" WITH(DIMS_4, OF_BLOCK) "subs %[rest], %[rest], #1\n\tb.ne 3b\n\t" MEET_GROUP
                     "4:\n\tcbz %[accumulate], 5f\n\tmov %[q], %[s]\n\t" ADD_KEYS
                     "5:\n\t" PUT_KEYS "b 7f\n"
                     "6:\n\t" WITH(CLEAR_8, OF_GROUP) "b 2b\n7:\n"
                     : [s] "+&r"(s), [k0] "+&r"(k), [k1] "+&r"(k1), [k2] "+&r"(k2), [k3] "+&r"(k3), [q] "+&r"(q),
                       [blocks] "+&r"(blocks), [rest] "+&r"(rest)
                     : [lds] "r"(lds), [ldq] "r"(ldq), [accumulate] "r"(accumulate)
                     : REGISTERS);
}

/* The same of two groups of four blocks. */
INLINE void dots_of_two_groups(char *s, int64_t lds, const char *k, int64_t ldk, const char *q, int64_t ldq,
                               int64_t accumulate) {
    const char *k1 = k + ldk, *k2 = k1 + ldk, *k3 = k2 + ldk;
    int64_t blocks;
    __asm__ volatile(BLOCK_INTO(OF_GROUP) "mov %[blocks], #3\n"
                     "1:\n\t" BLOCK_INTO(OF_BLOCK) WITH(MEET, OF_GROUP) "subs %[blocks], %[blocks], #1\n\tb.ne 1b\n\t"
                     BLOCK_INTO(OF_SECOND) "mov %[blocks], #3\n"
                     "2:\n\t" BLOCK_INTO(OF_BLOCK) WITH(MEET, OF_SECOND) "subs %[blocks], %[blocks], #1\n\tb.ne 2b\n\t"
                     "cbz %[accumulate], 3f\n\tmov %[q], %[s]\n\t" ADD_KEYS
                     "3:\n\t" FADD(24, 8) FADD(25, 9) FADD(26, 10) FADD(27, 11) FADD(28, 12) FADD(29, 13) FADD(30, 14)
                     FADD(31, 15) PUT_KEYS
                     : [s] "+&r"(s), [k0] "+&r"(k), [k1] "+&r"(k1), [k2] "+&r"(k2), [k3] "+&r"(k3), [q] "+&r"(q),
                       [blocks] "=&r"(blocks)
                     : [lds] "r"(lds), [ldq] "r"(ldq), [accumulate] "r"(accumulate)
                     : REGISTERS);
}

/* clang-format on */
#pragma GCC diagnostic pop

#endif
