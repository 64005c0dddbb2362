/* What this CPU can do. */
#ifndef ATTN_CPU_FEATURES_H
#define ATTN_CPU_FEATURES_H

#include "../internal.h"

enum {
    ATTN_CPU_AVX2 = 1 << 0,   /* AVX2, FMA and F16C */
    ATTN_CPU_AVX512 = 1 << 1, /* AVX-512 F, DQ, BW, VL */
    ATTN_CPU_AVX512_BF16 = 1 << 2,
    ATTN_CPU_AMX = 1 << 3,       /* AMX tiles of bf16; the system has to be asked before they are used (amx.h) */
    ATTN_CPU_NEON = 1 << 4,      /* aarch64: all of them have it */
    ATTN_CPU_SVE256 = 1 << 5,    /* SVE whose vectors have 256 bits, as the process began; */
    ATTN_CPU_SVE512 = 1 << 6,    /* or 512 */
    ATTN_CPU_NEON_BF16 = 1 << 7, /* bfmmla and conversions to bf16 */
    ATTN_CPU_ASKED = 1 << 8 /* ATTN_CPU is set: its kernels are taken where they can be, also where others are faster */
};

/* What this machine has. */
uint32_t attn__cpu_detect(void);

/*
 * What kernels may use: all of it, or, for tests, what one ISA of isa.def needs, named by the environment's ATTN_CPU. An error
 * when there is no such ISA, in the table or on this machine.
 */
attn_status attn__cpu_allowed(uint32_t *features);

#endif
