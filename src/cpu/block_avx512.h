/*
 * The register block of AVX-512 by hand: mr rows (1 to 6) by four vectors, each sum in a register of its own over the whole of k.
 * Compilers keep them there or not, as the code around them changes; so this is assembly. micro.c's block() says what it does.
 *
 *   zmm0-3   four vectors of a row of b
 *   zmm4-7   elements of a, in all lanes
 *   zmm8-31  sums, row i in zmm(8 + 4 i) and the three after it
 *
 * Four steps of k are written out. Where k is a multiple of that, the first one is a product: sums that are cleared cost more, and all the
 * more as they are short. There are two kinds of block: along_*, where steps of k are neighbours in a, and across_*, where rows are.
 */
#ifndef ATTN_CPU_BLOCK_AVX512_H
#define ATTN_CPU_BLOCK_AVX512_H

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Woverlength-strings" /* of assembly */

/* clang-format off */

#ifdef ATTN_REAL_F64
#define SUFFIX "pd"
#define SPLAT "vbroadcastsd "
#define ELEMENT "8*"
#else
#define SUFFIX "ps"
#define SPLAT "vbroadcastss "
#define ELEMENT "4*"
#endif

/* What is done with the four registers of a row; a and c say where its element of a and its row of c are. */
#define CLEAR(r0, r1, r2, r3)                                                                                              \
    "vpxord %%zmm" #r0 ",%%zmm" #r0 ",%%zmm" #r0 "\n\tvpxord %%zmm" #r1 ",%%zmm" #r1 ",%%zmm" #r1 "\n\t"                   \
    "vpxord %%zmm" #r2 ",%%zmm" #r2 ",%%zmm" #r2 "\n\tvpxord %%zmm" #r3 ",%%zmm" #r3 ",%%zmm" #r3 "\n\t"
#define WITH_ELEMENT(op, r0, r1, r2, r3, spare, a)                                                                         \
    SPLAT a ",%%zmm" #spare "\n\t" op SUFFIX " %%zmm0,%%zmm" #spare ",%%zmm" #r0 "\n\t" op SUFFIX " %%zmm1,%%zmm" #spare   \
            ",%%zmm" #r1 "\n\t" op SUFFIX " %%zmm2,%%zmm" #spare ",%%zmm" #r2 "\n\t" op SUFFIX " %%zmm3,%%zmm" #spare      \
            ",%%zmm" #r3 "\n\t"
#define ADD(r0, r1, r2, r3, c)                                                                                             \
    "vadd" SUFFIX " 0" c ",%%zmm" #r0 ",%%zmm" #r0 "\n\tvadd" SUFFIX " 64" c ",%%zmm" #r1 ",%%zmm" #r1 "\n\t"              \
    "vadd" SUFFIX " 128" c ",%%zmm" #r2 ",%%zmm" #r2 "\n\tvadd" SUFFIX " 192" c ",%%zmm" #r3 ",%%zmm" #r3 "\n\t"
#define STORE(r0, r1, r2, r3, c)                                                                                           \
    "vmovups %%zmm" #r0 ",0" c "\n\tvmovups %%zmm" #r1 ",64" c "\n\t"                                                      \
    "vmovups %%zmm" #r2 ",128" c "\n\tvmovups %%zmm" #r3 ",192" c "\n\t"

/*
 * EACHn(DO, step): DO for the first n rows, one after the other: its number, its registers, a spare one, and its place in a along which k
 * runs, where rows 3 to 5 are reached from a second pointer. c is a pointer that goes from row to row: an address of two registers costs
 * a store or an addition more than it does a load.
 */
#define EACH1(DO, step) DO(0, 8, 9, 10, 11, 4, "(%[a])", step)
#define EACH2(DO, step) EACH1(DO, step) DO(1, 12, 13, 14, 15, 5, "(%[a],%[row])", step)
#define EACH3(DO, step) EACH2(DO, step) DO(2, 16, 17, 18, 19, 6, "(%[a],%[row],2)", step)
#define EACH4(DO, step) EACH3(DO, step) DO(3, 20, 21, 22, 23, 7, "(%[a3])", step)
#define EACH5(DO, step) EACH4(DO, step) DO(4, 24, 25, 26, 27, 4, "(%[a3],%[row])", step)
#define EACH6(DO, step) EACH5(DO, step) DO(5, 28, 29, 30, 31, 5, "(%[a3],%[row],2)", step)

#define DO_CLEAR(i, r0, r1, r2, r3, spare, a, step) CLEAR(r0, r1, r2, r3)
#define DO_STORE(i, r0, r1, r2, r3, spare, a, step) STORE(r0, r1, r2, r3, "(%[c])") "add %[ldc],%[c]\n\t"
#define DO_ADD_STORE(i, r0, r1, r2, r3, spare, a, step)                                                                    \
    ADD(r0, r1, r2, r3, "(%[c])") DO_STORE(i, r0, r1, r2, r3, spare, a, step)
#define DO_ADD_GROUP(i, r0, r1, r2, r3, spare, a, step) ADD(r0, r1, r2, r3, "+256*" #i "(%[group])")
#define PRODUCT_ALONG(i, r0, r1, r2, r3, spare, a, step) WITH_ELEMENT("vmul", r0, r1, r2, r3, spare, ELEMENT #step a)
#define FUSE_ALONG(i, r0, r1, r2, r3, spare, a, step) WITH_ELEMENT("vfmadd231", r0, r1, r2, r3, spare, ELEMENT #step a)
#define PRODUCT_ACROSS(i, r0, r1, r2, r3, spare, a, step)                                                                  \
    WITH_ELEMENT("vmul", r0, r1, r2, r3, spare, ELEMENT #i OF_STEP##step("%[a]", "%[col]", "%[col3]"))
#define FUSE_ACROSS(i, r0, r1, r2, r3, spare, a, step)                                                                     \
    WITH_ELEMENT("vfmadd231", r0, r1, r2, r3, spare, ELEMENT #i OF_STEP##step("%[a]", "%[col]", "%[col3]"))

/* Where step 0 to 3 is, of steps that are so far apart. */
#define OF_STEP0(p, by, by3) "(" p ")"
#define OF_STEP1(p, by, by3) "(" p "," by ")"
#define OF_STEP2(p, by, by3) "(" p "," by ",2)"
#define OF_STEP3(p, by, by3) "(" p "," by3 ")"
#define LOAD_B(at)                                                                                                         \
    "vmovups 0" at ",%%zmm0\n\tvmovups 64" at ",%%zmm1\n\tvmovups 128" at ",%%zmm2\n\tvmovups 192" at ",%%zmm3\n\t"

#define ONE_STEP(mr, DO, step) LOAD_B(OF_STEP##step("%[b]", "%[ldb]", "%[ldb3]")) EACH##mr(DO, step)
#define FOUR_STEPS(mr, FIRST, DO, GO_ON)                                                                                   \
    ONE_STEP(mr, FIRST, 0)                                                                                                 \
    ONE_STEP(mr, DO, 1) ONE_STEP(mr, DO, 2) ONE_STEP(mr, DO, 3) "lea (%[b],%[ldb],4),%[b]\n\t" GO_ON

#define ALONG_BY(steps) "add $" ELEMENT steps ",%[a]\n\tadd $" ELEMENT steps ",%[a3]\n\t"
#define ACROSS_BY_4 "lea (%[a],%[col],4),%[a]\n\t"
#define ACROSS_BY_1 "add %[col],%[a]\n\t"

/* All sums over k; where GO_ON_n is, pointers to a go on by n steps. */
#define SUMS(mr, PRODUCT, FUSE, GO_ON_4, GO_ON_1)                                                                          \
    "test $3,%b[k]\n\tjnz 1f\n\t"                                                                                          \
    FOUR_STEPS(mr, PRODUCT, FUSE, GO_ON_4) "sub $4,%[k]\n\tjmp 2f\n"                                                       \
    "1:\n\t" EACH##mr(DO_CLEAR, 0)                                                                                         \
    "2:\n\tcmp $4,%[k]\n\tjl 4f\n\t.p2align 5\n"                                                                          \
    "3:\n\t" FOUR_STEPS(mr, FUSE, FUSE, GO_ON_4) "sub $4,%[k]\n\tcmp $4,%[k]\n\tjge 3b\n"                                 \
    "4:\n\ttest %[k],%[k]\n\tjz 6f\n"                                                                                     \
    "5:\n\t" ONE_STEP(mr, FUSE, 0) "add %[ldb],%[b]\n\t" GO_ON_1 "dec %[k]\n\tjnz 5b\n"                                  \
    "6:\n\t"
#define ADD_GROUP(mr) "test %[group],%[group]\n\tjz 7f\n\t" EACH##mr(DO_ADD_GROUP, 0) "7:\n\t"
#define ADD_AND_STORE(mr)                                                                                                  \
    "test %b[accumulate],%b[accumulate]\n\tjz 8f\n\t" EACH##mr(DO_ADD_STORE, 0) "jmp 9f\n"                                \
    "8:\n\t" EACH##mr(DO_STORE, 0)                                                                                         \
    "9:\n\t"

#define CLOBBERED                                                                                                          \
    "memory", "cc", "zmm0", "zmm1", "zmm2", "zmm3", "zmm4", "zmm5", "zmm6", "zmm7", "zmm8", "zmm9", "zmm10", "zmm11",      \
        "zmm12", "zmm13", "zmm14", "zmm15", "zmm16", "zmm17", "zmm18", "zmm19", "zmm20", "zmm21", "zmm22", "zmm23",        \
        "zmm24", "zmm25", "zmm26", "zmm27", "zmm28", "zmm29", "zmm30", "zmm31"

/*
 * Functions for each number of rows. All distances are in bytes here; k > 0. group, unless it is NULL, is [mr][4] vectors, whose sums
 * are added before those of c.
 */
#define BLOCK_OF(mr)                                                                                                       \
    INLINE void along_##mr(char *c, int64_t ldc, const char *group, const char *a, int64_t row, const char *b,             \
                           int64_t ldb, int64_t k, bool accumulate) {                                                      \
        const char *a3 = a + 3 * row;                                                                                      \
        __asm__ volatile(                                                                                                  \
            SUMS(mr, PRODUCT_ALONG, FUSE_ALONG, ALONG_BY("4"), ALONG_BY("1")) ADD_GROUP(mr) ADD_AND_STORE(mr)              \
            : [a] "+&r"(a), [a3] "+&r"(a3), [b] "+&r"(b), [k] "+&r"(k), [c] "+&r"(c)                                       \
            : [ldc] "r"(ldc), [group] "r"(group), [row] "r"(row), [ldb] "r"(ldb), [ldb3] "r"(3 * ldb),                     \
              [accumulate] "r"(accumulate)                                                                                 \
            : CLOBBERED);                                                                                                  \
    }                                                                                                                      \
    INLINE void across_##mr(char *c, int64_t ldc, const char *a, int64_t col, const char *b, int64_t ldb, int64_t k,       \
                            bool accumulate) {                                                                             \
        __asm__ volatile(                                                                                                  \
            SUMS(mr, PRODUCT_ACROSS, FUSE_ACROSS, ACROSS_BY_4, ACROSS_BY_1) ADD_AND_STORE(mr)                              \
            : [a] "+&r"(a), [b] "+&r"(b), [k] "+&r"(k), [c] "+&r"(c)                                                       \
            : [ldc] "r"(ldc), [col] "r"(col), [col3] "r"(3 * col), [ldb] "r"(ldb), [ldb3] "r"(3 * ldb),                    \
              [accumulate] "r"(accumulate)                                                                                 \
            : CLOBBERED);                                                                                                  \
    }
BLOCK_OF(1)
BLOCK_OF(2)
BLOCK_OF(3)
BLOCK_OF(4)
BLOCK_OF(5)
BLOCK_OF(6)

/* clang-format on */

#pragma GCC diagnostic pop

#endif
