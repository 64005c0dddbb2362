/*
 * The parts of the portable forward kernel that are not products: where a block works, how tiles get into shared memory, what is
 * done to scores, how O gets out. Reads the line VARIANT of variants.def.
 */
#ifndef ATTN_FWD_CUH
#define ATTN_FWD_CUH

#include "ptx.cuh"
#include "score.cuh"

#include <float.h>

/* ---- the line of the table ---- */

#define PIECE(entry, file)
#define FWD90(...)
#define BWD(...)
#define BWD90(...)
#define FWD(name, arch, dtype, dim, dimv, bm, bn, warps, ctas, async, eager, swizzle, qf, kf, vf, held, twice, first, all) \
    enum {                                                                                                                 \
        name##_DTYPE = ATTN_##dtype,                                                                                       \
        name##_DIM = dim,                                                                                                  \
        name##_DV = dimv,                                                                                                  \
        name##_BM = bm,                                                                                                    \
        name##_BN = bn,                                                                                                    \
        name##_WARPS = warps,                                                                                              \
        name##_CTAS = ctas,                                                                                                \
        name##_ASYNC = async,                                                                                              \
        name##_EAGER = eager,                                                                                              \
        name##_SWIZZLE = swizzle,                                                                                          \
        name##_QF = qf,                                                                                                    \
        name##_KF = kf,                                                                                                    \
        name##_VF = vf,                                                                                                    \
        name##_HELD = held,                                                                                                \
        name##_TWICE = twice,                                                                                              \
        name##_FIRST = first,                                                                                              \
        name##_ALL = all                                                                                                   \
    };
#ifndef VARIANTS /* which table: `attn tune` has one of its own */
#define VARIANTS "variants.def"
#endif
#include VARIANTS
#undef PIECE
#undef FWD
#undef FWD90
#undef BWD
#undef BWD90
#define K_(variant, field) variant##_##field
#define K__(variant, field) K_(variant, field)
#define K(field) K__(VARIANT, field)

enum {
    DTYPE = K(DTYPE),
    DIM = K(DIM),
    DV = K(DV),
    BM = K(BM),
    BN = K(BN),
    WARPS = K(WARPS),
    CTAS = K(CTAS),
    ASYNC = K(ASYNC),
    EAGER = K(EAGER),
    SWIZZLE = K(SWIZZLE),
    QF = K(QF),
    KF = K(KF),
    VF = K(VF),
    HELD = K(HELD),
    TWICE = K(TWICE),
    FIRST = K(FIRST),
    ALL = K(ALL),
    SLICED = DIM > DV,
    THREADS = 32 * WARPS,
    EB = DTYPE == ATTN_F32 ? 4 : 2,     /* bytes of an element */
    PER_CHUNK = 16 / EB,                /* elements of 16 bytes */
    QK_CHUNKS = DIM * EB / 16,          /* 16-byte pieces of a row of Q or K */
    V_CHUNKS = DV * EB / 16,            /* the same of V */
    MT = BM / WARPS / 16,               /* 16-row tiles of a warp */
    NT = BN / 8,                        /* 8-key tiles of S */
    DT = DV / 8,                        /* 8-column tiles of O */
    QK_STEPS = DIM * EB / 32,           /* a product takes 32 bytes of a row at a time: 16 dims, or 8 in float32 */
    PV_STEPS = BN * EB / 32,            /* likewise 16 keys, or 8 */
    STAGE_BYTES = BN * (DIM + DV) * EB, /* a tile of K and one of V */
    Q_KEPT = HELD ? (int)HELD : 1,      /* steps of Q that stay in registers; no array is empty */
    HAS_ROOM = 0                        /* bias is fetched when it is wanted */
};
static_assert(HELD <= QK_STEPS, "held: more steps than Q has");

/* ---- shared memory ---- */

/*
 * Address of a 16-byte piece. Eight rows of one column are read at a time (ldmatrix); they must lie in eight different groups of
 * four banks. Rows of a multiple of 128 bytes all begin in bank 0, so pieces are permuted by the row; otherwise two rows
 * share 128 bytes, and half of that does.
 */
DEVICE uint32_t shared_at(uint32_t base, int row, int chunk, int chunks) {
    int swizzle = !SWIZZLE ? 0 : chunks % 8 == 0 ? row & 7 : row >> 1 & 3;
    return base + row * chunks * 16 + ((chunk ^ swizzle) << 4);
}

/*
 * The address of piece c + d of a row, from that of piece c, where these have no bit in common: one instruction or none. Rows
 * may be stepped over in eights by adding to the address.
 */
DEVICE uint32_t shared_piece(uint32_t piece, int d, int chunks) {
    const int mixed = chunks % 8 == 0 ? 7 : 3; /* bits of the piece's number that the swizzle changes */
    return (piece ^ ((d & mixed) << 4)) + ((d & ~mixed) << 4);
}
/* A product takes two pieces at a time: c is 0 or 1. */
DEVICE uint32_t shared_step(uint32_t piece, int step, int chunks) { return shared_piece(piece, 2 * step, chunks); }

DEVICE uint32_t v_piece(uint32_t shared_v, int row, int chunk) { return shared_at(shared_v, row, chunk, V_CHUNKS); }

#include "rows.cuh"

/* One piece of a row by elements: any dtype, any alignment. */
static __device__ __noinline__ uint4 gather(const void *data, attn_dtype dtype, int64_t from, int32_t count) {
    uint32_t word[4] = {0, 0, 0, 0};
    for (int x = 0; x < count; x++) {
        float value = (float)attn__load(dtype, data, from + x);
        if (EB == 4)
            word[x] = __float_as_uint(value);
        else
            word[x / 2] |= (uint32_t)(BF16 ? attn__to_bf16(value) : attn__to_f16(value)) << (x % 2 * 16);
    }
    return make_uint4(word[0], word[1], word[2], word[3]);
}

/* ---- tiles to shared memory ---- */

/* Can the rows of this tensor be read by load_rows? */
DEVICE bool reads_rows(const attn_cuda_args &a, attn_dtype dtype, bool paged) {
    return !ALL || (a.vector_ok && dtype == (attn_dtype)DTYPE && !paged);
}

/* Threads stand along a row as far as its number of 16-byte pieces has a power of two in it. */
#define ALONG(chunks) (((chunks) & -(chunks)) > 16 ? 16 : (chunks) & -(chunks))
DEVICE int threads_along(int chunks) { return ALONG(chunks); }

DEVICE void copy_chunk(uint32_t to, const uint8_t *from, int bytes) {
    if (ASYNC)
        cp_async_cg_zfill(to, from, bytes);
    else
        st_shared_v4(to, bytes == 16 ? *(const uint4 *)from : gather(from, (attn_dtype)DTYPE, 0, bytes / EB));
}

DEVICE void copy_whole_chunk(uint32_t to, const uint8_t *from) {
    if (ASYNC)
        cp_async_cg(to, from);
    else
        st_shared_v4(to, *(const uint4 *)from);
}

DEVICE void copy_chunk_if(uint32_t to, const uint8_t *from, bool wanted) {
    if (ASYNC)
        cp_async_cg_if(to, from, wanted);
    else if (wanted)
        copy_whole_chunk(to, from);
}

/*
 * Rows that lie at a fixed distance, in pieces of 16 bytes. What is past `valid` rows or
 * `dim` columns becomes zero.
 */
static __device__ __noinline__ void load_some_rows(uint32_t to, const uint8_t *from, int64_t row_bytes, int rows,
                                                   int chunks, int valid, int dim) {
    const int along = threads_along(chunks), step = THREADS / along;
    const int c0 = threadIdx.x % along, r0 = threadIdx.x / along;
    const uint8_t *start = from;
    from += r0 * row_bytes + c0 * 16;
#pragma unroll 1
    for (int row = r0; row < rows; row += step) {
#pragma unroll 1
        for (int c = c0; c < chunks; c += along) {
            int bytes = row < valid ? chunk_count(c, dim) * EB : 0;
            /* a row that is not there may be at no multiple of 16: a stride that is never used can be anything */
            copy_chunk(shared_at(to, row, c, chunks), bytes ? from + (c - c0) * 16 : start, bytes);
        }
        from += step * row_bytes;
    }
}

/* The usual case, all rows and all columns, without a test per piece; and without the other one in its way. */
DEVICE void load_rows(uint32_t to, const uint8_t *from, int64_t row_bytes, int rows, int chunks, int valid, int dim) {
    const int along = threads_along(chunks), step = THREADS / along;
    const int c0 = threadIdx.x % along, r0 = threadIdx.x / along;
    if (valid < rows || dim != chunks * PER_CHUNK) {
        load_some_rows(to, from, row_bytes, rows, chunks, valid, dim);
        return;
    }
    from += r0 * row_bytes + c0 * 16;
#pragma unroll
    for (int round = 0; round < (rows + step - 1) / step; round++) {
        int row = r0 + round * step;
        if (rows % step && row >= rows) break;
#pragma unroll
        for (int c = 0; c < chunks; c += along) copy_whole_chunk(shared_at(to, row, c0 + c, chunks), from + c * 16);
        from += step * row_bytes;
    }
}

typedef enum tile_tensor { TILE_Q, TILE_K, TILE_V } tile_tensor;

/* The same for rows anywhere (pages), of any dtype and alignment. row0: query row, or cache position. */
static __device__ __noinline__ void load_rows_anyhow(const attn_cuda_args &a, attn_seq s, int32_t head, tile_tensor which,
                                                     uint32_t to, int32_t row0, int rows, int chunks, int valid,
                                                     int column0, int dim) {
    const attn_tensor &t = which == TILE_Q ? a.f.q : which == TILE_K ? a.f.k : a.f.v;
    const attn_dtype dtype = which == TILE_Q ? a.p.dtype : a.p.kv_dtype;
    const bool pieces = ASYNC && a.vector_ok && dtype == (attn_dtype)DTYPE;
    for (int n = threadIdx.x; n < rows * chunks; n += THREADS) {
        int row = n / chunks, c = n % chunks, count = row < valid ? chunk_count(c, dim) : 0;
        uint32_t where = shared_at(to, row, c, chunks);
        int64_t offset = column0 + c * PER_CHUNK;
        if (count) {
            offset +=
                which == TILE_Q ? attn__q_offset(&a.p, &t, &s, row0 + row, head) : cache_offset(a, t, s, row0 + row, head);
        }
        if (pieces && count)
            cp_async_cg_zfill(where, (const uint8_t *)t.data + offset * EB, count * EB);
        else
            st_shared_v4(where, gather(t.data, dtype, offset, count));
    }
}

/* Where key 0 of this place is, if rows lie at a fixed distance. */
DEVICE void find_keys(const attn_cuda_args &a, tile_place &at) {
    if (!reads_rows(a, a.p.kv_dtype, a.p.page_size > 0)) return;
    at.k = (const uint8_t *)a.f.k.data + attn__kv_offset(&a.p, &a.f, &a.f.k, &at.s, at.s.leftpad, at.kv_head) * EB;
    at.v =
        (const uint8_t *)a.f.v.data + (attn__kv_offset(&a.p, &a.f, &a.f.v, &at.s, at.s.leftpad, at.kv_head) + at.dv0) * EB;
}

DEVICE void load_q(const attn_cuda_args &a, const tile_place &at, uint32_t to) {
    if (reads_rows(a, a.p.dtype, false)) {
        const uint8_t *from = (const uint8_t *)a.f.q.data + attn__q_offset(&a.p, &a.f.q, &at.s, at.row, at.h) * EB;
        load_rows(to, from, a.f.q.stride[1] * EB, BM, QK_CHUNKS, at.rows, a.p.dim_qk);
    } else {
        load_rows_anyhow(a, at.s, at.h, TILE_Q, to, at.row, BM, QK_CHUNKS, at.rows, 0, a.p.dim_qk);
    }
}

DEVICE void load_kv(const attn_cuda_args &a, const tile_place &at, tile_tensor which, const uint8_t *rows,
                    int64_t row_bytes, uint32_t to, int32_t n, int chunks, int column0, int dim, bool maybe_short) {
    int32_t j0 = n * BN, valid = maybe_short ? at.s.sk - j0 : (int)BN;
    if (reads_rows(a, a.p.kv_dtype, a.p.page_size > 0))
        load_rows(to, rows + j0 * row_bytes, row_bytes, BN, chunks, valid, dim);
    else
        load_rows_anyhow(a, at.s, at.kv_head, which, to, at.s.leftpad + j0, BN, chunks, valid, column0, dim);
}

/*
 * Tiles of K and V after the first one, in plain kernels: full, of rows at a fixed distance. A thread brings the same pieces of
 * every tile, row by row upwards through all of them, so that little is left to do for each; and a round at a time, so that
 * this little runs beneath a product.
 */
typedef struct fetch {
    const uint8_t *k, *v; /* the thread's pieces that come next */
    uint32_t to;          /* where that of K goes in a tile's last round; V's is a tile further on */
    /* The low bits of `to` count the thread's pieces of a row: two bits for K, two for V. */
} fetch;

/* What fetching this way wants of a line: tiles of K and V alike, whole rounds, and a swizzle that repeats with each round. */
enum { FETCHES = !ALL && EAGER != 0, ROUND_ROWS = THREADS / ALONG(QK_CHUNKS) };
static_assert(!FETCHES || DIM == DV, "plain kernels want dim = dimv");
static_assert(!FETCHES || (BN % ROUND_ROWS == 0 && ROUND_ROWS % 8 == 0), "want other warps or bn for this dim");
static_assert(!FETCHES || QK_CHUNKS / ALONG(QK_CHUNKS) <= 3, "a thread has more pieces of a row than two bits count");

/* The thread's pieces of a row that is `dim` long. */
DEVICE uint32_t fetch_count(int column, int dim) {
    const int along = threads_along(QK_CHUNKS), left = dim / PER_CHUNK - column;
    return left > 0 ? (uint32_t)(left + along - 1) / along : 0;
}

/* K begins with the tile before tile n_k, V with that before tile n_v. */
DEVICE fetch make_fetch(const attn_cuda_args &a, const tile_place &at, int32_t n_k, int32_t n_v, uint32_t shared_k) {
    const int along = threads_along(QK_CHUNKS), column = threadIdx.x % along;
    const int row = BN - THREADS / along + threadIdx.x / along;
    fetch f;
    f.k = at.k + ((n_k - 1) * (int64_t)BN + row) * a.f.k.stride[1] * EB + column * 16;
    f.v = at.v + ((n_v - 1) * (int64_t)BN + row) * a.f.v.stride[1] * EB + column * 16;
    f.to = here(shared_at(shared_k, row, column, QK_CHUNKS) | fetch_count(column, a.p.dim_qk) |
                fetch_count(column, a.p.dim_v) << 2);
    return f;
}

/* Round `round` of a tile; returns where the next one is. */
DEVICE const uint8_t *fetch_round(const uint8_t *from, int64_t row_bytes, uint32_t to, int round, int chunks, int count) {
    const int along = threads_along(chunks), rows = THREADS / along;
#pragma unroll
    for (int c = 0; c < chunks / along; c++)
        copy_chunk_if(to - round * rows * chunks * 16 + c * along * 16, from + c * along * 16, c < count);
    return here_pointer(from - rows * row_bytes);
}

/* Pieces past `dim` columns, which no fetch ever writes, become zero. */
static __device__ __noinline__ void clear_columns(uint32_t to, int rows, int chunks, int dim) {
    for (int n = threadIdx.x; n < rows * chunks; n += THREADS)
        if (n % chunks * PER_CHUNK >= dim)
            st_shared_v4(shared_at(to, n / chunks, n % chunks, chunks), make_uint4(0, 0, 0, 0));
}

/* maybe_short: the tile may reach past the last key; only the first one that is walked can. */
DEVICE void load_k(const attn_cuda_args &a, const tile_place &at, uint32_t to, int32_t n, bool maybe_short) {
    load_kv(a, at, TILE_K, at.k, a.f.k.stride[1] * EB, to, n, QK_CHUNKS, 0, a.p.dim_qk, maybe_short);
}

DEVICE void load_v(const attn_cuda_args &a, const tile_place &at, uint32_t to, int32_t n, bool maybe_short) {
    load_kv(a, at, TILE_V, at.v, a.f.v.stride[1] * EB, to, n, V_CHUNKS, at.dv0, a.p.dim_v - at.dv0, maybe_short);
}

/* ---- infinities and NaN in V, where some pairs are masked; in float32 always, because lo of an infinity is NaN ---- */

/* Does any thread see one in V? A barrier of the whole block. */
DEVICE bool holds_nonfinite(uint32_t shared_v) {
    uint32_t most = 0;
    bool found = false;
#pragma unroll 4
    for (int n = threadIdx.x; n < BN * V_CHUNKS; n += THREADS) {
        uint4 x = ld_shared_v4(shared_v + n * 16);
        if (WIDE)
            found |= nonfinite_word(x.x) | nonfinite_word(x.y) | nonfinite_word(x.z) | nonfinite_word(x.w);
        else
            most = larger_halves(larger_halves(larger_halves(larger_halves(most, x.x), x.y), x.z), x.w);
    }
    return __syncthreads_or(found || (!WIDE && nonfinite_word(most)));
}

/* Key first + j of the tile, for the rows that see it. */
DEVICE void add_nonfinite_key(float o[MT][DT][4], const uint64_t sees[MT][2], int first, int j, uint32_t shared_v) {
#pragma unroll
    for (int dt = 0; dt < DT; dt++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
            int column = dt * 8 + (threadIdx.x & 3) * 2 + c;
            uint32_t piece = v_piece(shared_v, first + j, column / PER_CHUNK);
            uint32_t word = ld_shared_b32((piece + column % PER_CHUNK * EB) & ~3u);
            uint16_t half_word = (uint16_t)(word >> 16 * c);
            if (!(nonfinite_word(word) >> (WIDE ? 0 : c) & 1)) continue;
            float v = WIDE ? __uint_as_float(word) : BF16 ? attn__from_bf16(half_word) : cvt_f32_f16(half_word);
#pragma unroll
            for (int mt = 0; mt < MT; mt++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    if (sees[mt][half] >> j & 1) o[mt][dt][2 * half + c] += v;
        }
}

/*
 * A product gives 0 * NaN = NaN to a row that may not see the key. So what is not finite is taken out of V and added here to
 * the rows that see it: such a term is p * v = v for any p > 0. Rare, so slow.
 */
DEVICE void add_nonfinite(float o[MT][DT][4], uint32_t p[PV_STEPS][MT][4], uint32_t shared_v) {
    enum { PART = NT < 8 ? (int)NT : 8 }; /* 8-key tiles whose keys fit into 64 bits */
    const int t = threadIdx.x & 3;
#pragma unroll
    for (int part = 0; part < NT; part += PART) {
        uint64_t sees[MT][2]; /* bit j: the row sees key part * 8 + j */
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                uint64_t bits = 0;
#pragma unroll
                for (int n = 0; n < PART; n++) {
                    int nt = part + n;
                    bool first = WIDE ? p[nt % PV_STEPS][mt][half] : p[nt / 2][mt][nt % 2 * 2 + half] & 0xffff;
                    bool second = WIDE ? p[nt % PV_STEPS][mt][half + 2] : p[nt / 2][mt][nt % 2 * 2 + half] >> 16;
                    bits |= (uint64_t)(first | second << 1) << (n * 8 + 2 * t);
                }
                bits |= __shfl_xor_sync(~0u, bits, 1);
                sees[mt][half] = bits | __shfl_xor_sync(~0u, bits, 2);
            }
#pragma unroll 1
        for (int j = 0; j < PART * 8; j++) add_nonfinite_key(o, sees, part * 8, j, shared_v);
    }
    __syncthreads();
    for (int n = threadIdx.x; n < BN * V_CHUNKS * 4; n += THREADS) {
        uint32_t word = ld_shared_b32(shared_v + n * 4);
        int which = nonfinite_word(word);
        if (which)
            st_shared_b32(shared_v + n * 4, WIDE ? 0 : word & ((which & 1 ? 0 : 0xffffu) | (which & 2 ? 0 : 0xffff0000u)));
    }
    __syncthreads();
}

/* ---- O to memory ---- */

/* Element by element: float32, partial results, other dtypes, odd addresses. */
enum { STORE_UNROLL = WIDE ? 128 : 1 };
DEVICE void store_elements(const attn_cuda_args &a, const tile_place &at, const float (*o)[DT][4]) {
    const int t = threadIdx.x & 3;
#pragma unroll STORE_UNROLL
    for (int mt = 0; mt < MT; mt++)
#pragma unroll STORE_UNROLL
        for (int half = 0; half < 2; half++) {
            int32_t i = row_of(at, mt, half);
            if (i >= at.s.sq) continue;
            attn_dtype dtype = at.split ? ATTN_F32 : a.p.out_dtype;
            void *data = at.split ? a.part_o : a.f.o.data;
            int64_t row = at.split ? part_index(a, at.s, i, at.h, at.chunk) * a.p.dim_v
                                   : attn__q_offset(&a.p, &a.f.o, &at.s, i, at.h);
#pragma unroll STORE_UNROLL
            for (int dt = 0; dt < DT; dt++)
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    int column = at.dv0 + dt * 8 + 2 * t + c;
                    if (column < a.p.dim_v) store_number(dtype, data, row + column, o[mt][dt][2 * half + c]);
                }
        }
}

/* For 16-bit numbers this is rare, and would be a third of the code: o goes by memory, so that it can stand by itself. */
static __device__ __noinline__ void store_from_memory(const attn_cuda_args &a, const tile_place &at,
                                                      const float (*o)[DT][4]) {
    store_elements(a, at, o);
}

/* 16-bit results go through the warp's own rows of shared Q, to leave in pieces of 16 bytes. */
DEVICE void store_o(const attn_cuda_args &a, const tile_place &at, float o[MT][DT][4], uint32_t shared_q) {
    if (WIDE) {
        store_elements(a, at, o);
        return;
    }
    if (at.split || !a.vector_ok || a.p.out_dtype != (attn_dtype)DTYPE || a.p.dim_v % PER_CHUNK) {
        float copy[MT][DT][4];
#pragma unroll
        for (int n = 0; n < MT * DT * 4; n++) copy[n / (DT * 4)][n / 4 % DT][n % 4] = o[n / (DT * 4)][n / 4 % DT][n % 4];
        store_from_memory(a, at, copy);
        return;
    }
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, first = warp * MT * 16;
    const uint32_t piece = shared_at(shared_q, first + (lane >> 2), 0, V_CHUNKS) + (lane & 3) * 4;
    __syncwarp();
#pragma unroll
    for (int r = 0; r < 2 * MT; r++)
#pragma unroll
        for (int dt = 0; dt < DT; dt++)
            st_shared_b32(shared_piece(piece, dt, V_CHUNKS) + r * 8 * V_CHUNKS * 16,
                          pack(o[r / 2][dt][r % 2 * 2], o[r / 2][dt][r % 2 * 2 + 1]));
    __syncwarp();
    /* `along` lanes stand along a row; the swizzle of their rows changes at most in one bit */
    const int along = V_CHUNKS % 8 ? 4 : 8, rows = 32 / along, row = lane / along, c0 = lane % along;
    const uint32_t from = shared_at(shared_q, first + row, c0, V_CHUNKS);
    uint8_t *to = (uint8_t *)a.f.o.data + (attn__q_offset(&a.p, &a.f.o, &at.s, at.row + first + row, at.h) + at.dv0) * EB;
#pragma unroll
    for (int n = 0; n < MT * 16 / rows; n++) {
#pragma unroll
        for (int c = 0; c < V_CHUNKS; c += along) {
            uint4 x = ld_shared_v4((from ^ (SWIZZLE * n * rows & 4) << 4) + (n * rows * V_CHUNKS + c) * 16);
            bool wanted = first + row + n * rows < at.rows && (c0 + c) * PER_CHUNK < a.p.dim_v - at.dv0;
            if (wanted) *(uint4 *)(to + (c0 + c) * 16) = x;
        }
        to += rows * a.f.o.stride[1] * EB;
    }
}

#endif
