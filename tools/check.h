/* What the files of `attn check` share besides cases and their judgement. */
#ifndef ATTN_CHECK_H
#define ATTN_CHECK_H

#include "attn.h"

/* The accuracy bars: N(0,1), 4096 x 4096 x 128, one head. Prints a table; TOOL_OK or TOOL_FAILED. */
int check_bars(attn_context *ref, attn_context *tested);

#endif
