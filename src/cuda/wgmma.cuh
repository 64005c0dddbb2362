/*
 * wgmma: products of a warpgroup, 64 rows at a time, that run beside it.
 *
 * d += a b with d in registers: thread 32 w + 4 g + t holds in d[4 j + e] the row 16 w + g + 8 (e / 2) and the column
 * 8 j + 2 t + e % 2. _ss takes a from shared memory, rows of K-major; _rs from registers, as mma.sync m16n8k16 has it. b is
 * K-major for _ss (rows of keys, columns of dims: Q K^T) and MN-major for _rs (rows of keys, columns of dims: P V). _mn is _ss with
 * both MN-major: a lies transposed, its 64 rows side by side.
 * With add = 0 d is overwritten. The order: wgmma_fence, products, wgmma_commit_group, wgmma_wait_group; until then d and the
 * registers of a belong to the products. How operands lie in shared memory is said in operand.cuh.
 */
#ifndef ATTN_WGMMA_CUH
#define ATTN_WGMMA_CUH

#include "operand.cuh"
#include "sm90.cuh"

PTX void wgmma_fence(void) { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
PTX void wgmma_commit_group(void) { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/* Until at most `left` groups are under way. */
#define wgmma_wait_group(left) asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(left) : "memory")

/* Operands %0 to %(n-1) in the text, and d[0] to d[n-1] as such, by eights. */

#define WGMMA_TEXT_8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define WGMMA_TEXT_16 WGMMA_TEXT_8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define WGMMA_TEXT_24 WGMMA_TEXT_16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define WGMMA_TEXT_32 WGMMA_TEXT_24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define WGMMA_TEXT_40 WGMMA_TEXT_32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define WGMMA_TEXT_48 WGMMA_TEXT_40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define WGMMA_TEXT_56 WGMMA_TEXT_48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define WGMMA_TEXT_64 WGMMA_TEXT_56 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define WGMMA_TEXT_72 WGMMA_TEXT_64 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define WGMMA_TEXT_80 WGMMA_TEXT_72 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define WGMMA_TEXT_88 WGMMA_TEXT_80 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define WGMMA_TEXT_96 WGMMA_TEXT_88 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define WGMMA_TEXT_104 WGMMA_TEXT_96 ",%96,%97,%98,%99,%100,%101,%102,%103"
#define WGMMA_TEXT_112 WGMMA_TEXT_104 ",%104,%105,%106,%107,%108,%109,%110,%111"
#define WGMMA_TEXT_120 WGMMA_TEXT_112 ",%112,%113,%114,%115,%116,%117,%118,%119"
#define WGMMA_TEXT_128 WGMMA_TEXT_120 ",%120,%121,%122,%123,%124,%125,%126,%127"
#define WGMMA_8(d, i, f) f(d[i]), f(d[i + 1]), f(d[i + 2]), f(d[i + 3]), f(d[i + 4]), f(d[i + 5]), f(d[i + 6]), f(d[i + 7])
#define WGMMA_D_8(d, f) WGMMA_8(d, 0, f)
#define WGMMA_D_16(d, f) WGMMA_D_8(d, f), WGMMA_8(d, 8, f)
#define WGMMA_D_24(d, f) WGMMA_D_16(d, f), WGMMA_8(d, 16, f)
#define WGMMA_D_32(d, f) WGMMA_D_24(d, f), WGMMA_8(d, 24, f)
#define WGMMA_D_40(d, f) WGMMA_D_32(d, f), WGMMA_8(d, 32, f)
#define WGMMA_D_48(d, f) WGMMA_D_40(d, f), WGMMA_8(d, 40, f)
#define WGMMA_D_56(d, f) WGMMA_D_48(d, f), WGMMA_8(d, 48, f)
#define WGMMA_D_64(d, f) WGMMA_D_56(d, f), WGMMA_8(d, 56, f)
#define WGMMA_D_72(d, f) WGMMA_D_64(d, f), WGMMA_8(d, 64, f)
#define WGMMA_D_80(d, f) WGMMA_D_72(d, f), WGMMA_8(d, 72, f)
#define WGMMA_D_88(d, f) WGMMA_D_80(d, f), WGMMA_8(d, 80, f)
#define WGMMA_D_96(d, f) WGMMA_D_88(d, f), WGMMA_8(d, 88, f)
#define WGMMA_D_104(d, f) WGMMA_D_96(d, f), WGMMA_8(d, 96, f)
#define WGMMA_D_112(d, f) WGMMA_D_104(d, f), WGMMA_8(d, 104, f)
#define WGMMA_D_120(d, f) WGMMA_D_112(d, f), WGMMA_8(d, 112, f)
#define WGMMA_D_128(d, f) WGMMA_D_120(d, f), WGMMA_8(d, 120, f)

/*
 * columns: of b; registers: columns / 2; r0 to r5: the numbers after them. The _set ones overwrite d, and the compiler knows: who reads what d
 * was before, or has written it, while other products are under way, makes ptxas wait for them all.
 */
#define WGMMA(columns, type, registers, r0, r1, r2, r3, r4, r5)                                                            \
    PTX void wgmma_m64n##columns##k16_ss_##type(float *d, uint64_t a, uint64_t b, int add) {                               \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #r2 ", 0; wgmma.mma_async.sync.aligned.m64n" #columns              \
                     "k16.f32." #type "." #type " {" WGMMA_TEXT_##registers "}, %" #r0 ", %" #r1 ", p, 1, 1, 0, 0; }"      \
                     : WGMMA_D_##registers(d, "+f")                                                                        \
                     : "l"(a), "l"(b), "r"(add));                                                                          \
    }                                                                                                                      \
    PTX void wgmma_m64n##columns##k16_ss_set_##type(float *d, uint64_t a, uint64_t b) {                                    \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." #type    \
                     "." #type " {" WGMMA_TEXT_##registers "}, %" #r0 ", %" #r1 ", p, 1, 1, 0, 0; }"                       \
                     : WGMMA_D_##registers(d, "=f")                                                                        \
                     : "l"(a), "l"(b));                                                                                    \
    }                                                                                                                      \
    PTX void wgmma_m64n##columns##k16_mn_##type(float *d, uint64_t a, uint64_t b, int add) {                               \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #r2 ", 0; wgmma.mma_async.sync.aligned.m64n" #columns              \
                     "k16.f32." #type "." #type " {" WGMMA_TEXT_##registers "}, %" #r0 ", %" #r1 ", p, 1, 1, 1, 1; }"      \
                     : WGMMA_D_##registers(d, "+f")                                                                        \
                     : "l"(a), "l"(b), "r"(add));                                                                          \
    }                                                                                                                      \
    PTX void wgmma_m64n##columns##k16_mn_set_##type(float *d, uint64_t a, uint64_t b) {                                    \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." #type    \
                     "." #type " {" WGMMA_TEXT_##registers "}, %" #r0 ", %" #r1 ", p, 1, 1, 1, 1; }"                       \
                     : WGMMA_D_##registers(d, "=f")                                                                        \
                     : "l"(a), "l"(b));                                                                                    \
    }                                                                                                                      \
    PTX void wgmma_m64n##columns##k16_rs_##type(float *d, const uint32_t *a, uint64_t b, int add) {                        \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #r5 ", 0; wgmma.mma_async.sync.aligned.m64n" #columns              \
                     "k16.f32." #type "." #type " {" WGMMA_TEXT_##registers "}, {%" #r0 ",%" #r1 ",%" #r2 ",%" #r3         \
                                                                            "}, %" #r4 ", p, 1, 1, 1; }"                   \
                     : WGMMA_D_##registers(d, "+f")                                                                        \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));                                      \
    }

WGMMA(64, f16, 32, 32, 33, 34, 35, 36, 37)
WGMMA(64, bf16, 32, 32, 33, 34, 35, 36, 37)
WGMMA(80, f16, 40, 40, 41, 42, 43, 44, 45)
WGMMA(80, bf16, 40, 40, 41, 42, 43, 44, 45)
WGMMA(96, f16, 48, 48, 49, 50, 51, 52, 53)
WGMMA(96, bf16, 48, 48, 49, 50, 51, 52, 53)
WGMMA(112, f16, 56, 56, 57, 58, 59, 60, 61)
WGMMA(112, bf16, 56, 56, 57, 58, 59, 60, 61)
WGMMA(128, f16, 64, 64, 65, 66, 67, 68, 69)
WGMMA(128, bf16, 64, 64, 65, 66, 67, 68, 69)
WGMMA(144, f16, 72, 72, 73, 74, 75, 76, 77)
WGMMA(144, bf16, 72, 72, 73, 74, 75, 76, 77)
WGMMA(160, f16, 80, 80, 81, 82, 83, 84, 85)
WGMMA(160, bf16, 80, 80, 81, 82, 83, 84, 85)
WGMMA(176, f16, 88, 88, 89, 90, 91, 92, 93)
WGMMA(176, bf16, 88, 88, 89, 90, 91, 92, 93)
WGMMA(192, f16, 96, 96, 97, 98, 99, 100, 101)
WGMMA(192, bf16, 96, 96, 97, 98, 99, 100, 101)
WGMMA(256, f16, 128, 128, 129, 130, 131, 132, 133)
WGMMA(256, bf16, 128, 128, 129, 130, 131, 132, 133)
#undef WGMMA

#endif
