/* Micro-kernels of float by hand; test_micro_f64.c has those of double. */
#if defined(ATTN_HAVE_NEON) || defined(ATTN_HAVE_AVX2)
#include "micro_check.h"

TEST(micro_kernels_of_float_have_the_bits_of_plain_c) { check_micro(); }
#else
typedef int not_here; /* nothing is by hand that could have the bits of plain C */
#endif
