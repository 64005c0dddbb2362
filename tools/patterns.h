/* FlashMask patterns by name, for pictures and experiments without files. */
#ifndef ATTN_PATTERNS_H
#define ATTN_PATTERNS_H

#include <stdbool.h>
#include <stdint.h>

typedef struct pattern {
    const char *name, *what;
    bool causal;                                    /* goes with ATTN_CAUSAL, or without it */
    int32_t vectors;                                /* for each key */
    void (*fill)(int32_t j, int32_t n, int32_t *v); /* the vectors of key j of n */
} pattern;

extern const pattern patterns[]; /* the last one has name NULL */

const pattern *pattern_find(const char *name); /* NULL: there is none */

#endif
