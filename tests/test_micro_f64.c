/* Micro-kernels of double. */
#define ATTN_REAL_F64 1
#include "micro_check.h"

TEST(micro_kernels_of_double_have_the_bits_of_plain_c) { check_micro(); }
