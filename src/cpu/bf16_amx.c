/*
 * x86's products of bf16 (bf16.h), by AMX or AVX-512 BF16, the packing of their operands and the softmax between them, by AVX-512.
 *
 * One multiplication of tiles takes 16 cycles, a load of a tile 8, a store 16. A block of 2 x 2 tiles of c in registers does
 * four multiplications for four loads, and covers the latency of a multiplication, 52 cycles, as four chains. Beside c there is
 * just room for the two tiles of a and the two of b.
 *
 * Exponentials cost about as much as both products at a head dim of 128, and on other ports of the core; hence softmax takes
 * products along, and puts one step of a block (4 multiplications, 64 cycles) after every few vectors. The processor, which
 * looks some 500 instructions ahead, does both at once.
 */
#include "bf16.h"

#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "compiler.h"

/* Tiles are loaded by instructions of which the compiler does not know that they read memory. */
#define MEMORY_IS_WRITTEN __asm__ volatile("" ::: "memory")

typedef struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16]; /* of a row of each tile */
    uint8_t rows[16];
} tile_config;

_Static_assert(sizeof(tile_config) == 64, "as ldtilecfg reads it");

void attn__bf16_begin(bool by_vectors) {
    /* Static: of a variable, gcc 12 would think that only its first bytes are read. */
    static const tile_config config = {
        .palette = 1, .bytes = {64, 64, 64, 64, 64, 64, 64, 64}, .rows = {16, 16, 16, 16, 16, 16, 16, 16}};
    if (!by_vectors) _tile_loadconfig(&config);
}

void attn__bf16_end(bool by_vectors) {
    if (!by_vectors) _tile_release();
}

/* ---- products by vectors ---- */

enum { VECTOR_ROWS = 8 };

/*
 * c of so many rows of a, from row i on, and of nv panels from panel j on, in registers: 16 sums, chains enough for the latency of
 * a multiplication, and 10 loads for 16 of them.
 */
INLINE void vector_block(const attn_bf16_product *p, int32_t i, int32_t j, const int nv) {
    const uint16_t *a = p->a + i / 16 * p->a_panel + (ptrdiff_t)(i % 16) * 32, *b = p->b + j * p->b_panel;
    float *c = p->c + i * p->ldc + j * p->c_panel;
    __m512 sum[VECTOR_ROWS][2];
    UNROLL for (int r = 0; r < VECTOR_ROWS; r++) {
        UNROLL for (int v = 0; v < nv; v++) sum[r][v] =
            p->accumulate ? _mm512_loadu_ps(c + r * p->ldc + v * p->c_panel) : _mm512_setzero_ps();
    }
    for (int32_t x = 0; x < p->k; x += 32, a += ATTN_BF16_TILE, b += ATTN_BF16_TILE) {
        for (int32_t pair = 0; pair < 32; pair += 2) {
            __m512bh columns[2];
            UNROLL for (int v = 0; v < nv; v++) columns[v] =
                (__m512bh)_mm512_loadu_si512(b + v * p->b_panel + (ptrdiff_t)16 * pair);
            UNROLL for (int r = 0; r < VECTOR_ROWS; r++) {
                int32_t two;
                memcpy(&two, a + (ptrdiff_t)32 * r + pair, sizeof two);
                __m512bh row = (__m512bh)_mm512_set1_epi32(two);
                UNROLL for (int v = 0; v < nv; v++) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], row, columns[v]);
            }
        }
    }
    UNROLL for (int r = 0; r < VECTOR_ROWS; r++) {
        UNROLL for (int v = 0; v < nv; v++) _mm512_storeu_ps(c + r * p->ldc + v * p->c_panel, sum[r][v]);
    }
}

static void run_by_vectors(const attn_bf16_product *product) {
    const attn_bf16_product p = *product;
    int32_t panels = p.n / 16, j = 0;
    for (; j + 2 <= panels; j += 2)
        for (int32_t i = 0; i < p.m; i += VECTOR_ROWS) vector_block(&p, i, j, 2);
    for (int32_t i = 0; j < panels && i < p.m; i += VECTOR_ROWS) vector_block(&p, i, j, 1);
}

/* ---- products by tiles ---- */

#include "block_amx.h"

INLINE void run_by_tiles(const attn_bf16_product *p, const int parts) {
    for (int32_t j = 0; 16 * j < p->n; j += 2) {
        for (int32_t i = 0; 16 * i < p->m; i += 2) {
            block x;
            start_block(&x, p, i, j);
            if (x.single)
                run_block(&x, true, parts);
            else
                run_block(&x, false, parts);
        }
    }
}

void attn__bf16_run(const attn_bf16_product *product) {
    const attn_bf16_product p = *product;
    if (p.by_vectors) {
        run_by_vectors(product);
        return;
    }
    MEMORY_IS_WRITTEN;
    if (p.parts == 3)
        run_by_tiles(&p, 3);
    else if (p.parts == 2)
        run_by_tiles(&p, 2);
    else
        run_by_tiles(&p, 1);
    MEMORY_IS_WRITTEN;
}

/* ---- operands from rows ---- */

typedef __m512i words;
#include "bf16_pack.h"

INLINE __mmask32 first_of_32(int32_t n) { return n >= 32 ? ~(__mmask32)0 : ((__mmask32)1 << n) - 1; }

static inline void take_square(square *q, const uint16_t *from, int64_t row, int32_t rows, int32_t dims) {
    q->data = from;
    q->row = row;
    if (rows >= 32 && dims >= 32) return;
    for (int32_t i = 0; i < 32; i++) {
        __m512i v = i < rows ? _mm512_maskz_loadu_epi16(first_of_32(dims), from + i * row) : _mm512_setzero_si512();
        _mm512_storeu_si512(q->copy + (ptrdiff_t)32 * i, v);
    }
    q->data = q->copy;
    q->row = 32;
}

/* Four rows' 16 bytes, one in each quarter of the vector. */
INLINE __m512i four_rows(const uint16_t *from, int64_t step) {
    __m512i v = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)from));
    v = _mm512_mask_broadcast_i32x4(v, 0x00f0, _mm_loadu_si128((const __m128i *)(from + step)));
    v = _mm512_mask_broadcast_i32x4(v, 0x0f00, _mm_loadu_si128((const __m128i *)(from + 2 * step)));
    return _mm512_mask_broadcast_i32x4(v, 0xf000, _mm_loadu_si128((const __m128i *)(from + 3 * step)));
}

/* In each quarter: 4 x 4 numbers of 32 bits transposed, into rows of a tile, which are `ld` apart. */
INLINE void transpose_quarters(uint16_t *to, int64_t ld, __m512i a, __m512i b, __m512i c, __m512i d) {
    __m512i ab = _mm512_unpacklo_epi32(a, b), cd = _mm512_unpacklo_epi32(c, d);
    _mm512_storeu_si512(to, _mm512_unpacklo_epi64(ab, cd));
    _mm512_storeu_si512(to + ld, _mm512_unpackhi_epi64(ab, cd));
    ab = _mm512_unpackhi_epi32(a, b), cd = _mm512_unpackhi_epi32(c, d);
    _mm512_storeu_si512(to + 2 * ld, _mm512_unpacklo_epi64(ab, cd));
    _mm512_storeu_si512(to + 3 * ld, _mm512_unpackhi_epi64(ab, cd));
}

/* 32 rows of 8 dims become 8 rows of a tile. Returns the larger of `most` and the elements without their signs. */
INLINE __m512i transpose_eight(uint16_t *to, const uint16_t *from, int64_t row, __m512i most) {
    __m512i in[8], low[4], high[4];
    UNROLL16 for (int n = 0; n < 8; n++) {
        in[n] = four_rows(from + n * row, 8 * row);
        most = _mm512_max_epu16(most, _mm512_add_epi16(in[n], in[n]));
    }
    UNROLL16 for (int n = 0; n < 4; n++) {
        low[n] = _mm512_unpacklo_epi16(in[2 * n], in[2 * n + 1]);
        high[n] = _mm512_unpackhi_epi16(in[2 * n], in[2 * n + 1]);
    }
    transpose_quarters(to, 32, low[0], low[1], low[2], low[3]);
    transpose_quarters(to + 4 * 32, 32, high[0], high[1], high[2], high[3]);
    return most;
}

/* Are elements finite of which the largest, doubled, are these? */
INLINE bool is_finite(__m512i most) { return _mm512_cmpge_epu16_mask(most, _mm512_set1_epi16((short)TWICE_INFINITY)) == 0; }

/* 16 elements of two rows, in turn. */
INLINE __m512i zip(const uint16_t *even, const uint16_t *odd) {
    __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)even));
    __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)odd));
    return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

INLINE void square_of_rows(uint16_t *to, int64_t panel, const square *q, bool both, words *most) {
    (void)both, (void)most;
    for (int32_t n = 0; n < 16; n++) {
        _mm512_storeu_si512(to + (ptrdiff_t)32 * n, _mm512_loadu_si512(q->data + n * q->row));
        _mm512_storeu_si512(to + panel + (ptrdiff_t)32 * n, _mm512_loadu_si512(q->data + (n + 16) * q->row));
    }
}

INLINE void square_of_columns(uint16_t *to, int64_t panel, const square *q, bool both, words *most) {
    (void)both;
    for (int n = 0; n < 4; n++)
        *most = transpose_eight(to + n / 2 * panel + n % 2 * 256, q->data + (ptrdiff_t)8 * n, q->row, *most);
}

INLINE void square_of_dims(uint16_t *to, int64_t panel, const square *q, bool both, words *most) {
    (void)most;
    for (int32_t half = 0; half < 1 + both; half++, to += panel) {
        const uint16_t *at = q->data + 16 * half * q->row;
        for (int32_t n = 0; n < 4; n++, at += 8)
            transpose_quarters(to + (ptrdiff_t)4 * 32 * n, 32, four_rows(at, 4 * q->row),
                               four_rows(at + q->row, 4 * q->row), four_rows(at + 2 * q->row, 4 * q->row),
                               four_rows(at + 3 * q->row, 4 * q->row));
    }
}

INLINE void square_of_pairs(uint16_t *to, int64_t panel, const square *q, bool both, words *most) {
    (void)most;
    for (int32_t half = 0; half < 1 + both; half++, to += panel) {
        const uint16_t *at = q->data + (ptrdiff_t)16 * half;
        for (int32_t n = 0; n < 16; n++, at += 2 * q->row)
            _mm512_storeu_si512(to + (ptrdiff_t)32 * n, zip(at, at + q->row));
    }
}

void attn__bf16_pack_rows(uint16_t *a, const uint16_t *from, int64_t row, int32_t rows, int32_t dim) {
    pack(square_of_rows, true, a, from, row, rows, dim, NULL);
}

bool attn__bf16_pack_columns(uint16_t *a, const uint16_t *from, int64_t row, int32_t rows, int32_t dim) {
    __m512i most = _mm512_setzero_si512();
    pack(square_of_columns, false, a, from, row, rows, dim, &most);
    return is_finite(most);
}

void attn__bf16_pack_dims(uint16_t *b, const uint16_t *from, int64_t row, int32_t rows, int32_t dim) {
    pack(square_of_dims, true, b, from, row, rows, dim, NULL);
}

void attn__bf16_pack_pairs(uint16_t *b, const uint16_t *from, int64_t row, int32_t rows, int32_t dim) {
    pack(square_of_pairs, false, b, from, row, rows, dim, NULL);
}

bool attn__bf16_finite(const uint16_t *from, int64_t row, int32_t rows, int32_t dim) {
    __m512i most = _mm512_setzero_si512();
    for (int32_t i = 0; i < rows; i++) {
        for (int32_t x = 0; x < dim; x += 32) {
            __m512i v = _mm512_maskz_loadu_epi16(first_of_32(dim - x), from + i * row + x);
            most = _mm512_max_epu16(most, _mm512_add_epi16(v, v));
        }
    }
    return is_finite(most);
}

/* ---- floats in three parts, halves in two ---- */

/* What 32 columns of words have met: the largest first or third part, the smallest first, less 1, and what the parts leave. */
typedef struct finds {
    words most, least, rest;
} finds;

INLINE __m512i high_halves(__m512 a, __m512 b) {
    static const uint16_t odd[] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                   33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
    return _mm512_permutex2var_epi16(_mm512_castps_si512(a), _mm512_loadu_si512(odd), _mm512_castps_si512(b));
}

/* To the nearest, half-way away from zero: what cannot be rounded without overflow is out of range. */
INLINE __m512 round_to_bf16(__m512 x) {
    __m512i bits = _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000));
    return _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32((int)0xffff0000)));
}

/*
 * 32 floats, in two vectors. What two roundings leave has no more than the 8 bits of a third part, unless it is subnormal; of halves nothing
 * is left, but of infinities and NaN.
 */
INLINE void split_32(__m512i to[3], finds *f, __m512 a, __m512 b, const int parts) {
    const __m512i size = _mm512_set1_epi16(INT16_MAX);
    for (int n = 0; n < 2; n++) {
        const __m512 x = round_to_bf16(a), y = round_to_bf16(b);
        to[n] = high_halves(x, y);
        a = _mm512_sub_ps(a, x);
        b = _mm512_sub_ps(b, y);
    }
    f->rest = _mm512_or_si512(f->rest, _mm512_or_si512(_mm512_castps_si512(a), _mm512_castps_si512(b)));
    if (parts == 2) return;
    to[2] = high_halves(a, b);
    const __m512i first = _mm512_and_si512(to[0], size);
    f->most = _mm512_max_epu16(f->most, _mm512_max_epu16(first, _mm512_and_si512(to[2], size)));
    f->least = _mm512_min_epu16(f->least, _mm512_sub_epi16(first, _mm512_set1_epi16(1)));
}

INLINE int what_is_odd(const finds *f, const int parts) {
    const __m512i out = _mm512_set1_epi16((short)ATTN_SPLIT_MOST), tiny = _mm512_set1_epi16((short)(ATTN_SPLIT_LEAST - 1));
    if (parts == 2) /* but for the sign: rounding down, x - x is -0 */
        return _mm512_test_epi32_mask(f->rest, _mm512_set1_epi32(INT32_MAX)) ? ATTN_SPLIT_OUT | ATTN_SPLIT_IS_LARGE : 0;
    int odd = _mm512_cmpgt_epu16_mask(f->most, out) ? ATTN_SPLIT_OUT : 0;
    if (_mm512_cmplt_epu16_mask(f->least, tiny) || _mm512_test_epi32_mask(f->rest, _mm512_set1_epi32(0xffff)))
        odd |= ATTN_SPLIT_TINY;
    if (_mm512_cmpge_epu16_mask(f->most, _mm512_set1_epi16((short)ATTN_SPLIT_LARGE))) odd |= ATTN_SPLIT_IS_LARGE;
    return odd;
}

/* Of 16 numbers at `from`, those that are there. */
INLINE __m512 numbers(const char *from, __mmask16 there, const int parts) {
    if (parts == 2) return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(there, from));
    return _mm512_maskz_loadu_ps(there, from);
}

/*
 * The parts of a square of 32 x 32 numbers, times the factor, of which so many rows and dims are there; row i of part n is at to[n] + 32 i, and the second
 * half of the rows `half` further on. Rows of numbers are `row` bytes apart. The square at `next`, if that is not NULL, is asked for.
 */
INLINE void split_square(uint16_t *const to[3], int64_t half, const char *from, const char *next, int64_t row, int32_t rows,
                         int32_t dims, __m512 factor, finds *f, const int parts) {
    const __mmask32 there = first_of_32(dims);
    const int64_t vector = parts == 2 ? 32 : 64;
    for (int32_t i = 0; i < 32; i++) {
        const int64_t at = 32 * i + (i < 16 ? 0 : half);
        __m512i of[3] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
        if (i < rows)
            split_32(of, f, _mm512_mul_ps(factor, numbers(from + i * row, (__mmask16)there, parts)),
                     _mm512_mul_ps(factor, numbers(from + i * row + vector, (__mmask16)(there >> 16), parts)), parts);
        if (next && i < rows) { /* there it has no fewer */
            _mm_prefetch(next + i * row, _MM_HINT_T0);
            if (parts == 3) _mm_prefetch(next + i * row + vector, _MM_HINT_T0);
        }
        for (int n = 0; n < parts; n++) _mm512_storeu_si512(to[n] + at, of[n]);
    }
}

/* As pack, of numbers in parts. one: what is to be done with a square of a part; NULL: its rows are those of the tiles. */
INLINE int split(pack_square *one, const bool k_is_dims, uint16_t *to, int64_t part, const attn_bf16_numbers *of,
                 int32_t rows, int32_t dim, const int parts) {
    const int64_t panel = attn__ceil_div(k_is_dims ? dim : rows, 32) * ATTN_BF16_TILE, size = parts == 2 ? 2 : 4,
                  row = of->row * size;
    finds f = {_mm512_setzero_si512(), _mm512_set1_epi16(-1), _mm512_setzero_si512()};
    words unused = _mm512_setzero_si512();
    _Alignas(64) uint16_t copy[3][32 * 32];
    for (int32_t i = 0; i < rows; i += 32) {
        for (int32_t x = 0; x < dim; x += 32) {
            const int32_t n = k_is_dims ? i : x, k = k_is_dims ? x : i;
            const char *at = (const char *)of->from + i * row + x * size, *next = x + 32 < dim ? at + 32 * size
                                                                                  : i + 64 <= rows
                                                                                      ? at - x * size + 32 * row
                                                                                      : NULL;
            uint16_t *tile = to + n / 16 * panel + k / 32 * ATTN_BF16_TILE;
            uint16_t *const copies[] = {copy[0], copy[1], copy[2]}, *const tiles[] = {tile, tile + part, tile + 2 * part};
            split_square(one ? copies : tiles, one ? 0 : panel - ATTN_BF16_TILE, at, next, row, rows - i, dim - x,
                         _mm512_set1_ps(of->factor), &f, parts);
            for (int p = 0; one && p < parts; p++) {
                square q;
                q.data = copy[p];
                q.row = 32;
                one(tile + p * part, panel, &q, n + 16 < (k_is_dims ? rows : dim), &unused);
            }
        }
    }
    return what_is_odd(&f, parts);
}

#define SPLIT(name, one, k_is_dims)                                                                                        \
    int attn__bf16_split_##name(uint16_t *to, int64_t part, const attn_bf16_numbers *of, int32_t rows, int32_t dim) {      \
        return of->dtype == ATTN_F16 ? split(one, k_is_dims, to, part, of, rows, dim, 2)                                   \
                                     : split(one, k_is_dims, to, part, of, rows, dim, 3);                                  \
    }
SPLIT(rows, NULL, true)
SPLIT(columns, square_of_columns, false)
SPLIT(dims, square_of_dims, true)
SPLIT(pairs, square_of_pairs, false)

/* ---- softmax ---- */

/* Two vectors as bf16, their elements in turn; a number half-way between two goes to the larger. */
INLINE __m512i join(__m512 even, __m512 odd) {
    const __m512i half = _mm512_set1_epi32(0x8000);
    __m512i low = _mm512_bsrli_epi128(_mm512_add_epi32(_mm512_castps_si512(even), half), 2);
    KEEP(low);
    return _mm512_mask_blend_epi16(0xaaaaaaaa, low, _mm512_add_epi32(_mm512_castps_si512(odd), half));
}

/*
 * 2^t for t <= 0, in parts times ATTN_SPLIT_SHIFT: 2^floor(t) times a polynomial in t - floor(t), minimax for the relative error, 7.5e-8;
 * 1.5e-7 with rounding. It counts on results below 2^-126 being made 0 by the processor: subnormals would take 200 cycles. 2^-inf is 0, for reduce makes 0
 * of infinities.
 */
INLINE __m512 exp2_times(__m512 t, const int parts) {
    static const float first = 1.877576683e-3f, first_shifted = 1.877576683e-3f * ATTN_SPLIT_SHIFT;
    const float factor = parts > 1 ? ATTN_SPLIT_SHIFT : 1;
    __m512 f = _mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF), y;
    /* Loaded each time, on ports that have nothing else to do: a copy of a register takes the place of an operation. */
    __asm__ volatile("vbroadcastss %1, %0" : "=v"(y) : "m"(*(parts > 1 ? &first_shifted : &first)));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(8.989340142e-3f * factor));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(5.582631793e-2f * factor));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.401536171e-1f * factor));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.931530732e-1f * factor));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(9.999999251e-1f * factor));
    return _mm512_scalef_ps(y, t);
}

INLINE __m512 exp2_of(__m512 t) { return exp2_times(t, 1); }

/* Products done in the shade of something else: `steps` of them are owed for every `groups` groups of vectors. */
typedef struct shade {
    const attn_bf16_product *at, *end;
    int32_t i, j; /* of the block at hand */
    int64_t steps, groups, owed;
    block x;
} shade;

INLINE void shade_make(shade *d, const attn_bf16_product *products, int32_t count, int64_t groups) {
    *d = (shade){.at = products, .end = products + count, .groups = groups};
    for (int32_t n = 0; n < count; n++)
        d->steps += (int64_t)(products[n].m / 32) * ((products[n].n + 31) / 32) * (products[n].k / 32 + 1);
    if (count > 0) start_block(&d->x, d->at, 0, 0);
}

/* After a step: the next block, if that was the last of its own. */
INLINE void shade_move(shade *d) {
    if (d->x.left >= 0) return;
    d->i += 2;
    if (16 * d->i >= d->at->m) d->i = 0, d->j += 2;
    if (16 * d->j >= d->at->n) d->j = 0, d->at++;
    if (d->at < d->end) start_block(&d->x, d->at, d->i, d->j);
}

INLINE void shade_step(shade *d, const int parts) {
    if (d->x.single)
        plain_step(&d->x, d->x.left > 0, true, parts);
    else
        plain_step(&d->x, d->x.left > 0, false, parts);
    shade_move(d);
}

/*
 * Work in four parts, WORK(part), each followed by a part of a step where one is owed. All three cases are written out, so that
 * the parts are plain sequences of instructions.
 */
#define IN_SHADE(d, parts, WORK)                                                                                           \
    do {                                                                                                                   \
        (d)->owed += (d)->steps;                                                                                           \
        if ((d)->owed < (d)->groups || (d)->x.single) {                                                                    \
            UNROLL16 for (int part = 0; part < 4; part++) { WORK(part); }                                                  \
        } else if ((d)->x.left > 0) {                                                                                      \
            UNROLL16 for (int part = 0; part < 4; part++) {                                                                \
                do_part(&(d)->x, part, true, false, parts);                                                                \
                WORK(part);                                                                                                \
                MEMORY_IS_WRITTEN;                                                                                         \
            }                                                                                                              \
            next_step(&(d)->x);                                                                                            \
            shade_move(d);                                                                                                 \
            (d)->owed -= (d)->groups;                                                                                      \
        } else {                                                                                                           \
            UNROLL16 for (int part = 0; part < 4; part++) {                                                                \
                do_part(&(d)->x, part, false, false, parts);                                                               \
                WORK(part);                                                                                                \
                MEMORY_IS_WRITTEN;                                                                                         \
            }                                                                                                              \
            next_step(&(d)->x);                                                                                            \
            shade_move(d);                                                                                                 \
            (d)->owed -= (d)->groups;                                                                                      \
        }                                                                                                                  \
        for (; (d)->owed >= (d)->groups; (d)->owed -= (d)->groups) shade_step(d, parts);                                   \
    } while (0)

enum { GROUP = 8, MAX_GROUP = 64 }; /* keys whose p are made, whose maximum is found, during a step */

/* The largest of a column of s. What is not a number is passed over. */
INLINE __m512 column_max(const float *s, int32_t keys, shade *d, const int parts) {
    __m512 a = _mm512_set1_ps(-INFINITY), b = a, c = a, e = a;
    for (; keys >= MAX_GROUP; keys -= MAX_GROUP, s += 16 * MAX_GROUP) {
#define MAX_PART(part)                                                                                                     \
    UNROLL16 for (int i = MAX_GROUP / 4 * part; i < MAX_GROUP / 4 * (part + 1); i += 4) {                                  \
        a = _mm512_max_ps(_mm512_loadu_ps(s + 16 * i), a);                                                                 \
        b = _mm512_max_ps(_mm512_loadu_ps(s + 16 * (i + 1)), b);                                                           \
        c = _mm512_max_ps(_mm512_loadu_ps(s + 16 * (i + 2)), c);                                                           \
        e = _mm512_max_ps(_mm512_loadu_ps(s + 16 * (i + 3)), e);                                                           \
    }
        IN_SHADE(d, parts, MAX_PART);
    }
    for (; keys > 0; keys--, s += 16) a = _mm512_max_ps(_mm512_loadu_ps(s), a);
    return _mm512_max_ps(_mm512_max_ps(a, b), _mm512_max_ps(c, e));
}

/* What a column's p are made with, and what they leave. */
typedef struct column {
    __m512 scale, factor, minus; /* p = 2^(factor * (scale * s) + minus), or in parts 2^(factor * (scale * s + minus)) */
    __m512 sum;                  /* of p */
    int64_t part;                /* as p_part */
} column;

/* The higher halves of two vectors, their elements in turn, and what is below them: three times that is all. Of two parts the second is rounded. */
INLINE __m512i take_part(__m512 *even, __m512 *odd) {
    const __m512i high = _mm512_set1_epi32((int)0xffff0000);
    __m512i low = _mm512_bsrli_epi128(_mm512_castps_si512(*even), 2), both;
    KEEP(low);
    both = _mm512_mask_blend_epi16(0xaaaaaaaa, low, _mm512_castps_si512(*odd));
    *even = _mm512_sub_ps(*even, _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(*even), high)));
    *odd = _mm512_sub_ps(*odd, _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(*odd), high)));
    return both;
}

/* p of two keys into a row of a tile. */
INLINE void exp_pair(const column *c, __m512 *sum, uint16_t *p, const float *s, const int parts) {
    __m512 even = _mm512_loadu_ps(s), odd = _mm512_loadu_ps(s + 16);
    KEEP(even);
    KEEP(odd);
    even = _mm512_mul_ps(even, c->scale);
    odd = _mm512_mul_ps(odd, c->scale);
    if (parts == 1) {
        even = exp2_of(_mm512_fmadd_ps(even, c->factor, c->minus));
        odd = exp2_of(_mm512_fmadd_ps(odd, c->factor, c->minus));
        _mm512_storeu_si512(p, join(even, odd));
    } else {
        even = exp2_times(_mm512_mul_ps(_mm512_add_ps(even, c->minus), c->factor), parts);
        odd = exp2_times(_mm512_mul_ps(_mm512_add_ps(odd, c->minus), c->factor), parts);
    }
    *sum = _mm512_add_ps(*sum, _mm512_add_ps(even, odd));
    for (int n = 0; parts > 1 && n < parts; n++)
        _mm512_storeu_si512(p + n * c->part, parts == 2 && n == 1 ? join(even, odd) : take_part(&even, &odd));
}

/* p of a column's keys, in whole groups. */
INLINE void exp_groups(column *c, uint16_t *p, const float *s, int32_t keys, shade *d, const int parts) {
    column x = *c; /* of which nobody has the address: it stays in registers */
    for (; keys >= GROUP; keys -= GROUP, s += 16 * GROUP, p += 16 * GROUP) {
        __m512 sum = _mm512_setzero_ps(); /* short sums keep the rounding error small */
#define EXP_PART(part) exp_pair(&x, &sum, p + 32 * part, s + 32 * part, parts)
        IN_SHADE(d, parts, EXP_PART);
        x.sum = _mm512_add_ps(x.sum, sum);
    }
    *c = x;
}

/* The last keys, fewer than a group, the last pair completed with -inf; then zeros to the end of the tile. */
static void exp_rest(column *c, uint16_t *p, const float *s, int32_t keys, int32_t end, const int parts) {
    __m512 sum = _mm512_setzero_ps();
    int32_t j = 0;
    for (; j + 1 < keys; j += 2, s += 32, p += 32) exp_pair(c, &sum, p, s, parts);
    if (j < keys) {
        float pair[32];
        _mm512_storeu_ps(pair, _mm512_loadu_ps(s));
        _mm512_storeu_ps(pair + 16, _mm512_set1_ps(-INFINITY));
        exp_pair(c, &sum, p, pair, parts);
        j += 2, p += 32;
    }
    for (; j < end; j += 2, p += 32)
        for (int n = 0; n < parts; n++) _mm512_storeu_si512(p + n * c->part, _mm512_setzero_si512());
    c->sum = _mm512_add_ps(c->sum, sum);
}

INLINE void exp_column(column *c, const attn_bf16_softmax *m, int32_t r, shade *d, const int parts) {
    const float *s = m->s + r / 16 * m->s_panel;
    uint16_t *p = m->p + r / 16 * m->p_panel;
    int32_t whole = m->keys / GROUP * GROUP, end = (int32_t)attn__bf16_pad(m->keys);
    c->sum = _mm512_setzero_ps();
    exp_groups(c, p, s, m->keys, d, parts);
    if (whole < end) exp_rest(c, p + (ptrdiff_t)16 * whole, s + (ptrdiff_t)16 * whole, m->keys - whole, end - whole, parts);
}

#define LARGE 0x1p20f

/*
 * Where the maximum is beyond LARGE, factor * x - max would keep what the rounding of factor * x to the maximum has left, and that
 * may be much above 0. In these columns s is replaced by factor * x, rounded; the others stay as they are.
 */
static void scale_large(float *s, int32_t keys, column *c, __mmask16 large) {
    for (int32_t j = 0; j < keys; j++, s += 16) {
        __m512 x = _mm512_loadu_ps(s);
        _mm512_storeu_ps(s, _mm512_mask_mul_ps(x, large, _mm512_mul_ps(x, c->scale), c->factor));
    }
    c->scale = _mm512_mask_mov_ps(c->scale, large, _mm512_set1_ps(1.0f));
    c->factor = _mm512_mask_mov_ps(c->factor, large, _mm512_set1_ps(1.0f));
}

/* 16 columns from r on. */
INLINE void softmax_columns(const attn_bf16_softmax *m, int32_t r, shade *d, const int parts) {
    const __m512 none = _mm512_set1_ps(-INFINITY), before = _mm512_loadu_ps(m->max + r);
    float *s = m->s + r / 16 * m->s_panel;
    const __m512 factor = _mm512_set1_ps(m->factor);
    column c = {.scale = _mm512_set1_ps(m->scale), .factor = factor, .part = m->p_part};
    __m512 most = _mm512_mul_ps(column_max(s, m->keys, d, parts), c.scale);
    if (parts == 1) most = _mm512_mul_ps(most, factor);
    most = _mm512_max_ps(most, before);
    __m512 base = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(most, none, _CMP_NEQ_UQ), most);
    __mmask16 large = _mm512_cmp_ps_mask(_mm512_abs_ps(base), _mm512_set1_ps(LARGE), _CMP_GT_OQ);
    if (large && parts == 1) scale_large(s, m->keys, &c, large);
    c.minus = _mm512_sub_ps(_mm512_setzero_ps(), base);
    exp_column(&c, m, r, d, parts);
    __m512 alpha = _mm512_sub_ps(before, base);
    alpha = exp2_of(parts > 1 ? _mm512_mul_ps(alpha, factor) : alpha);
    alpha = _mm512_mask_mov_ps(alpha, _mm512_cmp_ps_mask(before, base, _CMP_EQ_OQ), _mm512_set1_ps(1.0f));
    _mm512_storeu_ps(m->max + r, most);
    _mm512_storeu_ps(m->alpha + r, alpha);
    _mm512_storeu_ps(m->sum + r, _mm512_fmadd_ps(_mm512_loadu_ps(m->sum + r), alpha, c.sum));
}

enum { DEFAULT_MODE = 0x1f80, FLUSH_TO_ZERO = 0x8000 }; /* of floating-point arithmetic */

INLINE uint32_t swap_mode(uint32_t mode) {
    uint32_t old;
    __asm__ volatile("stmxcsr %0\n\tldmxcsr %1" : "=m"(old) : "m"(mode) : "memory");
    return old;
}

INLINE void softmax_in_shade(const attn_bf16_softmax *m, const attn_bf16_product *products, int32_t count,
                             const int parts) {
    const int64_t groups = (int64_t)(m->keys / GROUP + m->keys / MAX_GROUP) * (m->width / 16);
    shade d;
    shade_make(&d, products, count, groups > 0 ? groups : 1);
    for (int32_t r = 0; r < m->width; r += 16) softmax_columns(m, r, &d, parts);
    while (d.at < d.end) shade_step(&d, parts);
}

/* A function each: where they share one, the compiler keeps less of either in registers. */
static __attribute__((noinline)) void softmax_of_bf16(const attn_bf16_softmax *m, const attn_bf16_product *products,
                                                      int32_t count) {
    softmax_in_shade(m, products, count, 1);
}
static __attribute__((noinline)) void softmax_of_halves(const attn_bf16_softmax *m, const attn_bf16_product *products,
                                                        int32_t count) {
    softmax_in_shade(m, products, count, 2);
}
static __attribute__((noinline)) void softmax_of_floats(const attn_bf16_softmax *m, const attn_bf16_product *products,
                                                        int32_t count) {
    softmax_in_shade(m, products, count, 3);
}

void attn__bf16_softmax(const attn_bf16_softmax *step, const attn_bf16_product *products, int32_t count) {
    uint32_t mode = swap_mode(DEFAULT_MODE | FLUSH_TO_ZERO);
    const bool by_vectors = count > 0 && products->by_vectors;
    (step->parts == 3   ? softmax_of_floats
     : step->parts == 2 ? softmax_of_halves
                        : softmax_of_bf16)(step, products, by_vectors ? 0 : count);
    for (int32_t n = 0; by_vectors && n < count; n++) run_by_vectors(&products[n]);
    swap_mode(mode);
}

/* ---- p and d_s of the backward ---- */

/* One column of 16 rows. */
typedef struct lanes {
    __m512 lse, delta, low;
    __mmask16 has_key; /* lse is not +inf */
} lanes;

typedef struct pair_of {
    __m512 p, d_s;
} pair_of;

/*
 * e^(x + rest) times ATTN_LIFT_P, as micro.h's exp makes it; below 2^-150 it is 0. NaN comes through, unless it is not allowed.
 */
INLINE __m512 exp_lifted(__m512 x, __m512 rest, __mmask16 allowed) {
    const float lift = ATTN_LIFT_P;
    const __m512 magic = _mm512_set1_ps(12582912.0f);
    const __m512 n = _mm512_sub_ps(_mm512_fmadd_ps(x, _mm512_set1_ps(1.44269504089f), magic), magic);
    __m512 f = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    f = _mm512_add_ps(_mm512_fmadd_ps(n, _mm512_set1_ps(2.12194440e-4f), f), rest);
    __m512 y = _mm512_fmadd_ps(f, _mm512_set1_ps(1.38145986467e-3f * lift), _mm512_set1_ps(8.36871687973e-3f * lift));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(4.16683880453e-2f * lift));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.66665206317e-1f * lift));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(4.99999934478e-1f * lift));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(lift));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(lift));
    return _mm512_maskz_scalef_ps(_mm512_mask_cmp_ps_mask(allowed, x, _mm512_set1_ps(-104), _CMP_NLT_UQ), y, n);
}

/* 16 rows and one key. plain: no slope, no rest, p not kept, and every lse is a finite number, so that -inf in s makes p = 0 by itself. */
INLINE pair_of gradient(const attn_bf16_gradients *m, const lanes *c, int64_t at, const bool plain, const int parts) {
    const __m512 log2e = _mm512_set1_ps(1.44269504088896340736f);
    __m512 s = _mm512_loadu_ps(m->s + at);
    __mmask16 allowed = (__mmask16)-1;
    if (!plain) allowed = _mm512_cmp_ps_mask(s, _mm512_set1_ps(-INFINITY), _CMP_NEQ_UQ) & c->has_key;
    pair_of x;
    if (parts > 1) { /* what the difference rounds off is not lost */
        s = _mm512_mul_ps(s, _mm512_set1_ps(m->scale));
        KEEP(s);
        const __m512 t = _mm512_sub_ps(s, c->lse);
        __m512 lost = _mm512_sub_ps(s, _mm512_add_ps(t, c->lse));
        if (!plain && m->rest) { /* exactly, as scores may be larger than lse: lost_by_difference */
            const __m512 back = _mm512_sub_ps(t, s);
            lost = _mm512_sub_ps(_mm512_sub_ps(s, _mm512_sub_ps(t, back)), _mm512_add_ps(c->lse, back));
            lost = _mm512_add_ps(lost, _mm512_loadu_ps(m->rest + at));
        }
        x.p = exp_lifted(t, _mm512_sub_ps(lost, c->low), allowed);
        if (!plain && m->keep_p) _mm512_storeu_ps(m->s + at, x.p);
    } else {
        __m512 t = _mm512_fmsub_ps(s, _mm512_set1_ps(m->scale), c->lse);
        if (!plain && m->rest) t = _mm512_add_ps(t, _mm512_loadu_ps(m->rest + at));
        x.p = exp2_of(_mm512_mul_ps(t, log2e));
        if (!plain) x.p = _mm512_maskz_mov_ps(allowed, x.p);
    }
    __m512 d = _mm512_fmsub_ps(_mm512_loadu_ps(m->d_p + at), _mm512_set1_ps(m->keep), c->delta), p = x.p;
    if (!plain && m->slope) d = _mm512_mul_ps(d, _mm512_loadu_ps(m->slope + at));
    if (parts > 1)
        p = _mm512_mul_ps(
            p, _mm512_set1_ps(1 / ATTN_LIFT_P)); /* d is lifted: the difference shall not be subnormal, which is 0 here */
    x.d_s = _mm512_maskz_mul_ps(_mm512_cmp_ps_mask(p, _mm512_setzero_ps(), _CMP_NEQ_UQ), p, d);
    return x;
}

/* The higher halves of 32 numbers, and what is below them: three times that is all. Of two parts the second is rounded. */
INLINE __m512i take_halves(__m512 *low, __m512 *high) {
    const __m512i mask = _mm512_set1_epi32((int)0xffff0000);
    const __m512i both = high_halves(*low, *high);
    *low = _mm512_sub_ps(*low, _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(*low), mask)));
    *high = _mm512_sub_ps(*high, _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(*high), mask)));
    return both;
}

/* One key: a row of a tile of p and one of d_s, of each part. That of d_s is returned. */
INLINE void gradient_row(__m512i d_s[3], const attn_bf16_gradients *m, const lanes c[2], int32_t j, const bool plain,
                         const int parts) {
    pair_of low = gradient(m, &c[0], (int64_t)j * 16, plain, parts),
            high = gradient(m, &c[1], (int64_t)j * 16 + m->panel, plain, parts);
    int64_t to = j / 16 * m->down + (ptrdiff_t)(j % 16) * 32;
    if (parts == 1) {
        d_s[0] = (__m512i)_mm512_cvtne2ps_pbh(high.d_s, low.d_s);
        _mm512_storeu_si512(m->p + to, (__m512i)_mm512_cvtne2ps_pbh(high.p, low.p));
        _mm512_storeu_si512(m->d_s + to, d_s[0]);
        return;
    }
    UNROLL for (int n = 0; n < parts; n++, to += m->part) {
        const bool is_rounded = parts == 2 && n == 1;
        _mm512_storeu_si512(m->p + to,
                            is_rounded ? (__m512i)_mm512_cvtne2ps_pbh(high.p, low.p) : take_halves(&low.p, &high.p));
        d_s[n] = is_rounded ? (__m512i)_mm512_cvtne2ps_pbh(high.d_s, low.d_s) : take_halves(&low.d_s, &high.d_s);
        _mm512_storeu_si512(m->d_s + to, d_s[n]);
    }
}

INLINE void gradient_keys(const attn_bf16_gradients *step, const lanes c[2], const bool plain, const int parts) {
    attn_bf16_gradients m = *step;
    if (parts > 1) m.keep *= ATTN_LIFT_P;
    for (int32_t j = 0; j < m.keys; j += 2) {
        __m512i even[3], odd[3];
        gradient_row(even, &m, c, j, plain, parts);
        gradient_row(odd, &m, c, j + 1, plain, parts);
        uint16_t *pairs = m.pairs + (ptrdiff_t)16 * j;
        for (int n = 0; n < parts; n++, pairs += m.pairs_part) {
            _mm512_storeu_si512(pairs, _mm512_unpacklo_epi16(even[n], odd[n]));
            _mm512_storeu_si512(pairs + (ptrdiff_t)16 * m.keys, _mm512_unpackhi_epi16(even[n], odd[n]));
        }
    }
}

typedef void gradients_of(const attn_bf16_gradients *step, const lanes c[2]);
#define GRADIENTS_OF(name, is_plain, parts)                                                                                \
    static __attribute__((noinline)) void name(const attn_bf16_gradients *step, const lanes c[2]) {                        \
        gradient_keys(step, c, is_plain, parts);                                                                           \
    }
GRADIENTS_OF(gradients_of_bf16, false, 1)
GRADIENTS_OF(plain_of_bf16, true, 1)
GRADIENTS_OF(gradients_of_halves, false, 2)
GRADIENTS_OF(plain_of_halves, true, 2)
GRADIENTS_OF(gradients_of_floats, false, 3)
GRADIENTS_OF(plain_of_floats, true, 3)

void attn__bf16_gradients(const attn_bf16_gradients *step) {
    uint32_t mode = swap_mode(DEFAULT_MODE | FLUSH_TO_ZERO);
    const __m512 none = _mm512_set1_ps(INFINITY);
    bool plain = !step->slope && !step->rest && !step->keep_p;
    lanes c[2];
    for (int n = 0; n < 2; n++) {
        c[n].lse = _mm512_loadu_ps(step->lse + (ptrdiff_t)16 * n);
        c[n].delta = _mm512_loadu_ps(step->delta + (ptrdiff_t)16 * n);
        if (step->parts > 1) c[n].delta = _mm512_mul_ps(c[n].delta, _mm512_set1_ps(ATTN_LIFT_P));
        c[n].low = step->parts > 1 ? _mm512_loadu_ps(step->low + (ptrdiff_t)16 * n) : _mm512_setzero_ps();
        c[n].has_key = _mm512_cmp_ps_mask(c[n].lse, none, _CMP_NEQ_UQ);
        plain &= _mm512_cmp_ps_mask(_mm512_abs_ps(c[n].lse), none, _CMP_LT_OQ) == 0xffff;
    }
    gradients_of *const of[][2] = {
        {gradients_of_bf16, plain_of_bf16}, {gradients_of_halves, plain_of_halves}, {gradients_of_floats, plain_of_floats}};
    of[attn__max32(step->parts, 1) - 1][plain](step, c);
    swap_mode(mode);
}

void attn__bf16_take_in(float *o, int32_t dim, const float *alpha, const float *more) {
    const __m512 factor = _mm512_loadu_ps(alpha);
    for (int32_t x = 0; x < 16 * dim; x += 16)
        _mm512_storeu_ps(o + x, _mm512_fmadd_ps(_mm512_loadu_ps(o + x), factor, _mm512_loadu_ps(more + x)));
}

void attn__bf16_rescale(float *o, int32_t dim, const float *alpha) {
    __m512 factor = _mm512_loadu_ps(alpha);
    if (_mm512_cmp_ps_mask(factor, _mm512_set1_ps(1.0f), _CMP_NEQ_UQ) == 0) return;
    for (int32_t x = 0; x < dim; x++, o += 16) _mm512_storeu_ps(o, _mm512_mul_ps(_mm512_loadu_ps(o), factor));
}
