/* The instructions of tiles.h as functions; and what src/cpu/amx_cpu.c says where there are tiles, in whose place this file is compiled. */
#include "tiles.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

#include "cpu/amx.h"

bool attn__amx_present(void) { return true; }
bool attn__amx_available(void) { return true; }

enum { TILES = 8, ROWS = 16, FLUSH = 0x8040 /* subnormal results and operands are zero */ };

static _Thread_local struct {
    bool configured;
    __m512i tile[TILES][ROWS];
} state;

/* The processor would fault. */
static void need_config(void) {
    if (!state.configured) abort();
}

static unsigned mode(unsigned wanted) {
    const unsigned before = _mm_getcsr();
    __asm__ volatile("ldmxcsr %0" ::"m"(wanted) : "memory");
    return before;
}

void emulated_tile_config(const void *config) {
    static const uint8_t wanted[] = {1, 0};
    if (memcmp(config, wanted, sizeof wanted) != 0) abort();
    memset(state.tile, 0, sizeof state.tile);
    state.configured = true;
}

void emulated_tile_release(void) {
    need_config();
    state.configured = false;
}

void emulated_tile_zero(int tile) {
    need_config();
    memset(state.tile[tile], 0, sizeof state.tile[tile]);
}

void emulated_tile_load(int tile, const void *from, long long bytes) {
    need_config();
    for (int n = 0; n < ROWS; n++) state.tile[tile][n] = _mm512_loadu_si512((const char *)from + n * bytes);
}

void emulated_tile_store(int tile, void *to, long long bytes) {
    need_config();
    for (int n = 0; n < ROWS; n++) _mm512_storeu_si512((char *)to + n * bytes, state.tile[tile][n]);
}

static __m512 even(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
static __m512 odd(__m512i pairs) {
    return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000)));
}

void emulated_tile_multiply(int c, int a, int b) {
    need_config();
    const unsigned before = mode(_mm_getcsr() | FLUSH);
    for (int m = 0; m < ROWS; m++) {
        uint32_t pairs[16];
        memcpy(pairs, &state.tile[a][m], sizeof pairs);
        __m512 sums[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
        for (int k = 0; k < ROWS; k++) {
            const __m512i pair = _mm512_set1_epi32((int)pairs[k]), row = state.tile[b][k];
            sums[0] = _mm512_fmadd_ps(even(pair), even(row), sums[0]);
            sums[1] = _mm512_fmadd_ps(odd(pair), odd(row), sums[1]);
        }
        const __m512 sum = _mm512_add_ps(_mm512_castsi512_ps(state.tile[c][m]), _mm512_add_ps(sums[0], sums[1]));
        state.tile[c][m] = _mm512_castps_si512(sum);
    }
    mode(before);
}

__m512 emulated_dot_pairs(__m512 sum, __m512i a, __m512i b) {
    const unsigned before = mode(_mm_getcsr() | FLUSH);
    __asm__ volatile("" : "+v"(sum), "+v"(a), "+v"(b)); /* not used before the mode is changed */
    __m512 result = _mm512_fmadd_ps(odd(a), odd(b), sum);
    result = _mm512_fmadd_ps(even(a), even(b), result);
    __asm__ volatile("" : "+v"(result)); /* nor made after it is changed back */
    mode(before);
    return result;
}

/* To the nearest, half-way to even; subnormal numbers are zero, NaN stays one. */
static __m256i narrow(__m512 x) {
    const __m512i bits = _mm512_castps_si512(x), half = _mm512_set1_epi32(0x7fff);
    const __m512i last = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(half, last));
    const __m512i size = _mm512_and_si512(bits, _mm512_set1_epi32(INT32_MAX));
    const __mmask16 tiny = _mm512_cmplt_epu32_mask(size, _mm512_set1_epi32(0x00800000));
    const __mmask16 none = _mm512_cmpgt_epu32_mask(size, _mm512_set1_epi32(0x7f800000));
    rounded = _mm512_mask_and_epi32(rounded, tiny, bits, _mm512_set1_epi32(INT32_MIN));
    rounded = _mm512_mask_or_epi32(rounded, none, bits, _mm512_set1_epi32(0x00400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}

__m512i emulated_narrow(__m512 high, __m512 low) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(narrow(low)), narrow(high), 1);
}
