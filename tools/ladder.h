/*
 * The kernels that `attn tune` compares, as lines of a table: those of a folder that `make tune-kernels` fills (a copy of
 * src/cuda/tune.def, and a fatbin per line) and those of the library itself.
 */
#ifndef ATTN_LADDER_H
#define ATTN_LADDER_H

#include "cuda/cuda.h"

/* The numbers of a FWD line, in its order, from the fourth column on. */
#define KNOBS(X)                                                                                                           \
    X(dim)                                                                                                                 \
    X(dimv) X(bm) X(bn) X(warps) X(ctas) X(async) X(eager) X(swizzle) X(qf) X(kf) X(vf) X(held) X(twice) X(first) X(all)
enum {
#define KNOB(name) KNOB_##name,
    KNOBS(KNOB)
#undef KNOB
        KNOB_COUNT
};

typedef struct rung {
    char name[64];
    int32_t arch;
    attn_dtype dtype;
    int32_t knob[KNOB_COUNT];
    int32_t entry; /* the library's number of it; -1: it is the folder's */
    bool hopper;   /* a FWD90 line, which has only some of the knobs: the others are 0 */
} rung;

enum { MOST_RUNGS = 128 };

typedef struct ladder {
    int count;
    rung at[MOST_RUNGS];
} ladder;

/* Appends the FWD lines of a text. NULL, or what is wrong with line *number, counted from 1. */
const char *ladder_parse(ladder *l, const char *text, int *number);

/* Appends those of FOLDER/tune.def: TOOL_OK, or the exit code after a message. */
int ladder_read(ladder *l, const char *folder);

/* Appends the library's lines. */
void ladder_add_library(ladder *l);

/* Leaves only those of the dtype and dim of `like` that take the problem and run on the GPU. */
void ladder_keep(ladder *l, const attn_cuda_entry *like, const attn_problem *p, const attn_gpu *gpu);

/* The earlier rung of its family from which this one differs least, of several the last; -1: it is the first. */
int ladder_from(const ladder *l, int index);

/* "swizzle 0>1, eager 1>2"; "" when only the names differ. */
void rung_changes(const rung *from, const rung *to, char *text, size_t bytes);

/* The rung as a launch wants it; points to the name. */
attn_cuda_entry rung_entry(const rung *r);

/* A whole file, with a zero behind it; NULL: a message was printed. Freed by free. */
char *read_whole(const char *path);

#endif
