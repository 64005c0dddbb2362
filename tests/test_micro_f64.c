/* Micro-kernels of double by hand. */
#if defined(ATTN_HAVE_NEON) || defined(ATTN_HAVE_AVX2)
#define ATTN_REAL_F64 1
#include "micro_check.h"

TEST(micro_kernels_of_double_have_the_bits_of_plain_c) { check_micro(); }
#else
typedef int not_here;
#endif
