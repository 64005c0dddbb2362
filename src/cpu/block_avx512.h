/*
 * The register block of AVX-512 by hand: mr rows (1 to 6) by four vectors, each sum in a register of its own over the whole of k.
 * Compilers keep them there or not, as the code around them changes; so this is assembly. micro.c's block() says what it does.
 *
 *   zmm0-3   four vectors of a row of b
 *   zmm4-7   elements of a, in all lanes
 *   zmm8-31  sums, row i in zmm(8 + 4 i) and the three after it
 */
#ifndef ATTN_CPU_BLOCK_AVX512_H
#define ATTN_CPU_BLOCK_AVX512_H

#ifdef ATTN_REAL_F64
#define SUFFIX "pd"
#define SPLAT "vbroadcastsd "
#else
#define SUFFIX "ps"
#define SPLAT "vbroadcastss "
#endif

/* The steps of one row: its four registers and a spare one, where its element of a and its row of c are. */
#define CLEAR(r0, r1, r2, r3)                                                                                              \
    "vpxord %%zmm" #r0 ",%%zmm" #r0 ",%%zmm" #r0 "\n\tvpxord %%zmm" #r1 ",%%zmm" #r1 ",%%zmm" #r1 "\n\t"                   \
    "vpxord %%zmm" #r2 ",%%zmm" #r2 ",%%zmm" #r2 "\n\tvpxord %%zmm" #r3 ",%%zmm" #r3 ",%%zmm" #r3 "\n\t"
#define FUSE(r0, r1, r2, r3, spare, a)                                                                                     \
    SPLAT a ",%%zmm" #spare "\n\t"                                                                                         \
            "vfmadd231" SUFFIX " %%zmm0,%%zmm" #spare ",%%zmm" #r0 "\n\tvfmadd231" SUFFIX " %%zmm1,%%zmm" #spare           \
            ",%%zmm" #r1 "\n\tvfmadd231" SUFFIX " %%zmm2,%%zmm" #spare ",%%zmm" #r2 "\n\tvfmadd231" SUFFIX                 \
            " %%zmm3,%%zmm" #spare ",%%zmm" #r3 "\n\t"
#define ADD(r0, r1, r2, r3, c)                                                                                             \
    "vadd" SUFFIX " 0" c ",%%zmm" #r0 ",%%zmm" #r0 "\n\tvadd" SUFFIX " 64" c ",%%zmm" #r1 ",%%zmm" #r1 "\n\t"              \
    "vadd" SUFFIX " 128" c ",%%zmm" #r2 ",%%zmm" #r2 "\n\tvadd" SUFFIX " 192" c ",%%zmm" #r3 ",%%zmm" #r3 "\n\t"
#define STORE(r0, r1, r2, r3, c)                                                                                           \
    "vmovups %%zmm" #r0 ",0" c "\n\tvmovups %%zmm" #r1 ",64" c "\n\t"                                                      \
    "vmovups %%zmm" #r2 ",128" c "\n\tvmovups %%zmm" #r3 ",192" c "\n\t"

/* EACHn(STEP): the step for the first n rows, which count from 0. Rows 3 to 5 are reached from a second pointer. */
#define EACH1(STEP) STEP(8, 9, 10, 11, 4, "(%[p])")
#define EACH2(STEP) EACH1(STEP) STEP(12, 13, 14, 15, 5, "(%[p],%[row])")
#define EACH3(STEP) EACH2(STEP) STEP(16, 17, 18, 19, 6, "(%[p],%[row],2)")
#define EACH4(STEP) EACH3(STEP) STEP(20, 21, 22, 23, 7, "(%[p3])")
#define EACH5(STEP) EACH4(STEP) STEP(24, 25, 26, 27, 4, "(%[p3],%[row])")
#define EACH6(STEP) EACH5(STEP) STEP(28, 29, 30, 31, 5, "(%[p3],%[row],2)")

#define CLEAR_(r0, r1, r2, r3, spare, at) CLEAR(r0, r1, r2, r3)
#define ADD_(r0, r1, r2, r3, spare, at) ADD(r0, r1, r2, r3, at)
#define STORE_(r0, r1, r2, r3, spare, at) STORE(r0, r1, r2, r3, at)

#define CLOBBERED                                                                                                          \
    "memory", "cc", "zmm0", "zmm1", "zmm2", "zmm3", "zmm4", "zmm5", "zmm6", "zmm7", "zmm8", "zmm9", "zmm10", "zmm11",      \
        "zmm12", "zmm13", "zmm14", "zmm15", "zmm16", "zmm17", "zmm18", "zmm19", "zmm20", "zmm21", "zmm22", "zmm23",        \
        "zmm24", "zmm25", "zmm26", "zmm27", "zmm28", "zmm29", "zmm30", "zmm31"

/* One function for each number of rows. All distances are in bytes here; k > 0. */
#define BLOCK_OF(mr)                                                                                                       \
    INLINE void block_##mr(char *c, int64_t ldc, const char *a, int64_t row, int64_t col, const char *b, int64_t ldb,      \
                           int64_t k, bool accumulate) {                                                                   \
        const char *p = a, *p3 = a + 3 * row;                                                                              \
        int64_t step = row;                                                                                                \
        __asm__ volatile(EACH##mr(CLEAR_) ".p2align 5\n1:\n\t"                                                             \
                                          "vmovups (%[b]),%%zmm0\n\tvmovups 64(%[b]),%%zmm1\n\t"                           \
                                          "vmovups 128(%[b]),%%zmm2\n\tvmovups 192(%[b]),%%zmm3\n\t"                       \
                                          "add %[ldb],%[b]\n\t" EACH##mr(                                                  \
                                              FUSE) "add %[col],%[p]\n\tadd %[col],%[p3]\n\t"                              \
                                                    "dec %[k]\n\tjnz 1b\n\t"                                               \
                                                    "mov %[c],%[p]\n\tmov %[ldc],%[row]\n\tlea "                           \
                                                    "(%[row],%[row],2),%[p3]\n\tadd %[c],%[p3]\n\t"                        \
                                                    "test %b[accumulate],%b[accumulate]\n\tjz 2f\n\t" EACH##mr(            \
                                                        ADD_) "2:\n\t" EACH##mr(STORE_)                                    \
                         : [p] "+&r"(p), [p3] "+&r"(p3), [row] "+&r"(step), [b] "+&r"(b), [k] "+&r"(k)                     \
                         : [c] "r"(c), [ldc] "r"(ldc), [col] "r"(col), [ldb] "r"(ldb), [accumulate] "r"(accumulate)        \
                         : CLOBBERED);                                                                                     \
    }
BLOCK_OF(1)
BLOCK_OF(2)
BLOCK_OF(3)
BLOCK_OF(4)
BLOCK_OF(5)
BLOCK_OF(6)

#endif
