/*
 * AMX and AVX-512 BF16 on a CPU that has AVX-512 but neither: included before src/cpu/bf16_amx.c and features.c, it puts functions (tiles.c) in
 * the place of the instructions. Slow, and their order of sums and their rounding are the instructions' own: even and odd k of a tile apart, to the nearest, subnormal
 * numbers zero in and out. ATTN_EMULATE_AMX=ON builds the library that way (tests/emulate/tiles.sh), for tests.
 */
#ifndef ATTN_EMULATE_TILES_H
#define ATTN_EMULATE_TILES_H

#include <immintrin.h>
#include <string.h>

void emulated_tile_config(const void *config);
void emulated_tile_release(void);
void emulated_tile_zero(int tile);
void emulated_tile_load(int tile, const void *from, long long bytes);
void emulated_tile_store(int tile, void *to, long long bytes);
void emulated_tile_multiply(int c, int a, int b);
__m512 emulated_dot_pairs(__m512 sum, __m512i a, __m512i b);
__m512i emulated_narrow(__m512 high, __m512 low);

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _mm512_dpbf16_ps
#undef _mm512_cvtne2ps_pbh
#define _tile_loadconfig(config) emulated_tile_config(config)
#define _tile_release() emulated_tile_release()
#define _tile_zero(tile) emulated_tile_zero(tile)
#define _tile_loadd(tile, from, bytes) emulated_tile_load(tile, from, bytes)
#define _tile_stored(tile, to, bytes) emulated_tile_store(tile, to, bytes)
#define _tile_dpbf16ps(c, a, b) emulated_tile_multiply(c, a, b)
#define _mm512_dpbf16_ps(sum, a, b) emulated_dot_pairs(sum, (__m512i)(a), (__m512i)(b))
#define _mm512_cvtne2ps_pbh(high, low) emulated_narrow(high, low)

#define __builtin_cpu_supports(name) (strcmp(name, "avx512bf16") == 0 || __builtin_cpu_supports(name))

#endif
