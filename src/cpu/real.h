/*
 * The number type of a kernel: float, or double when compiled with ATTN_REAL_F64 (for F64 problems). Files that include this
 * are compiled once for each, and REAL(name) gives the two their names: attn__name_f32 and attn__name_f64.
 */
#ifndef ATTN_CPU_REAL_H
#define ATTN_CPU_REAL_H

#ifdef ATTN_REAL_F64
typedef double real;
#define REAL_MICRO wider /* the field of attn_kernel that has the micro-kernels */
#define REAL(name) attn__##name##_f64
#define REAL_DTYPE ATTN_F64
#else
typedef float real;
#define REAL_MICRO impl
#define REAL(name) attn__##name##_f32
#define REAL_DTYPE ATTN_F32
#endif

#endif
