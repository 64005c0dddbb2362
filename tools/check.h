/* What the files of `attn check` share besides cases and their judgement. */
#ifndef ATTN_CHECK_H
#define ATTN_CHECK_H

#include "attn.h"
#include "compare.h"
#include "device.h"

/* Work that keeps a GPU busy beside a case (load.c). */
typedef struct load load;

typedef struct contexts {
    attn_context *ref, *tested, *other; /* other: the same backend with another number of threads */
    device *device;                     /* memory of tested and other */
    load *load;                         /* NULL: nothing runs beside a case */
    char no_backward[256];              /* why the backend has no backward pass; "": it has */
} contexts;

/* The accuracy bars: N(0,1), 4096 x 4096 x 128, one head. Prints a table; TOOL_OK or TOOL_FAILED. */
int check_bars(const contexts *j);

/* attn_merge and attn_rotary on random arguments, drawn from seed and number (pieces.c). */
void check_pieces(const case_filter *filter, const contexts *j, uint64_t seed, long number, verdict *v);

/* A forward pass that fills a GPU for about a tenth of a millisecond. NULL: a message was printed. */
load *load_make(attn_context *context, device *d);
attn_status load_run(load *l); /* puts it into stream 1 */
void load_free(load *l);       /* NULL is ignored */

#endif
