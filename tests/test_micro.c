/* Micro-kernels of float; test_micro_f64.c has those of double. */
#include "micro_check.h"

TEST(micro_kernels_of_float_have_the_bits_of_plain_c) { check_micro(); }
