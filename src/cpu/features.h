/* What this CPU can do. */
#ifndef ATTN_CPU_FEATURES_H
#define ATTN_CPU_FEATURES_H

#include <stdint.h>

enum {
    ATTN_CPU_AVX2 = 1 << 0,  /* AVX2, FMA and F16C */
    ATTN_CPU_AVX512 = 1 << 1 /* AVX-512 F, DQ, BW, VL */
};

/*
 * Features that kernels may use. The environment's ATTN_CPU limits them to those of one ISA (isa.def), for tests. An unknown
 * name gives -1, and so does one that this machine does not have.
 */
int32_t attn__cpu_features(void);

#endif
