/* Whether AMX can be used (amx_cpu.c). */
#ifndef ATTN_CPU_AMX_H
#define ATTN_CPU_AMX_H

#include "../internal.h"

/* Has this machine what bf16_amx.c needs (AMX tiles, AMX bf16, AVX-512 F BW DQ VL BF16), and a kernel that knows of it? */
bool attn__amx_present(void);

/*
 * It has, and the kernel lets this process use it: the first call asks, for all threads of the process, then and later. From then on
 * a signal saves 8 KiB more on the stack that it comes in on; so only who is about to use AMX may ask.
 */
bool attn__amx_available(void);

#endif
