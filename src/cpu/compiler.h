/* What the micro-kernels ask of the compiler. */
#ifndef ATTN_CPU_COMPILER_H
#define ATTN_CPU_COMPILER_H

#define INLINE static inline __attribute__((always_inline))

/* Before a loop of a known, small number of steps: they are written out, up to 8 or 16 of them. */
#ifdef __clang__
#define UNROLL _Pragma("unroll")
#define UNROLL16 _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 8")
#define UNROLL16 _Pragma("GCC unroll 16")
#endif

/*
 * Holds vector v in a register of its own. The compiler takes it for a new number from there on: it neither reads it again for each
 * use, nor puts other instructions in the place of those that made it, nor fuses these with what follows.
 */
#if defined(__x86_64__) && defined(__AVX512F__)
#define KEEP(v) __asm__("" : "+v"(v))
#elif defined(__x86_64__)
#define KEEP(v) __asm__("" : "+x"(v))
#elif defined(__aarch64__)
#define KEEP(v) __asm__("" : "+w"(v))
#else
#define KEEP(v) ((void)(v))
#endif

#endif
