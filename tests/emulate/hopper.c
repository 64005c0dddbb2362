/* Barriers and copies of compute capability 9.0; hopper.h says what is promised. */
#include "hopper.h"

#include <stdio.h>
#include <string.h>

enum {
    MOST_BARRIERS = 64,
    MOST_COPIES = 256,
    MOST_BYTES = 512 * EMULATE_LINE_BYTES, /* of a copy */
    MOST_THREADS = 1024,
    WARPS = MOST_THREADS / 32,
    NAMED = 16,
    REGISTERS = 65536,
    LINES = EMULATE_SHARED_BYTES / EMULATE_LINE_BYTES + 1,
    COOKIE = 0x6d626172
};

typedef struct mbarrier {
    uint32_t at;
    int arrivals, missing; /* of a phase; still to come in this one */
    int64_t bytes;         /* that this phase is to wait for */
    unsigned phase;        /* phases that are over */
    unsigned thread;       /* that made it */
    int is_fenced;         /* after mbarrier_init: copies know of it */
} mbarrier;

/* A load, or a store, that is under way. */
typedef struct copy {
    int is_store, is_committed;
    unsigned thread;        /* store */
    int barrier;            /* load */
    const emulate_map *map; /* NULL: of so many bytes, without one */
    uint8_t *to;
    uint32_t bytes;
    int adds; /* floats */
    uint32_t shared;
    const uint8_t *source; /* load without a map, of memory; NULL: of another block's shared memory, from there */
    unsigned rank;
    uint32_t from;
    int at[EMULATE_RANK];
    uint8_t data[MOST_BYTES]; /* store, or load without a map: what it has read */
} copy;

/* Which load has filled a line of shared memory: so many phases of the barrier must be over. 0: none. */
typedef struct line {
    int barrier;
    unsigned phases;
} line;

int emulate_tracks_writes;

/* All that there is of a block. */
static struct world {
    mbarrier barriers[MOST_BARRIERS];
    int barrier_count;
    copy copies[MOST_COPIES];
    int copy_count;
    line lines[LINES];
    unsigned waited[WARPS][MOST_BARRIERS]; /* phases that a lane of the warp has seen to be over */
    unsigned fenced[WARPS][MOST_BARRIERS]; /* the same at its last fence: it may pass that on */
    unsigned passed_on[MOST_BARRIERS]
                      [MOST_BARRIERS]; /* by those that arrived at this mbarrier, to those that wait for it */
    struct named {
        int arrived, threads;
        unsigned generation;
        int votes[2]; /* was there a yes in this generation, and in the one before? by its parity */
    } named[NAMED];
    uint32_t written[EMULATE_SHARED_BYTES / 4]; /* who wrote a word, and the thread's count of fences then; 0: fenced */
    uint32_t fences[MOST_THREADS];
    int registers[MOST_THREADS / 128];
    int is_used; /* there were barriers */
} worlds[EMULATE_CLUSTER], *now = worlds;
static unsigned block_threads;

static uint8_t *shared_at(uint32_t at, uint32_t bytes) {
    if (at < EMULATE_SHARED_BASE || at - EMULATE_SHARED_BASE + bytes > emulate_shared_bytes)
        emulate_fail("past the end of shared memory: %u bytes at %u", bytes, at);
    return shared + (at - EMULATE_SHARED_BASE);
}

/* ---- who wrote what ---- */

static uint32_t mark_of(unsigned thread) { return (thread + 1) | now->fences[thread] << 11; }

void emulate_wrote(uint32_t to, uint32_t bytes) {
    uint32_t offset = to - EMULATE_SHARED_BASE;
    for (uint32_t n = offset / 4; n < (offset + bytes + 3) / 4; n++) now->written[n] = mark_of(threadIdx.x);
    now->lines[offset / EMULATE_LINE_BYTES].phases = 0;
}

void emulate_check_fenced(uint32_t at, const char *who) {
    uint32_t first = (at - EMULATE_SHARED_BASE) / EMULATE_LINE_BYTES * EMULATE_LINE_BYTES / 4;
    for (uint32_t n = first; n < first + EMULATE_LINE_BYTES / 4; n++) {
        if (!now->written[n] || n * 4 >= emulate_shared_bytes) continue;
        unsigned writer = (now->written[n] & 2047) - 1;
        if (now->written[n] == mark_of(writer))
            emulate_fail("%s meets byte %u of shared memory, which thread %u wrote without fence_proxy_async after it", who,
                         n * 4, writer);
        now->written[n] = 0; /* fenced since */
    }
}

void emulate_fence_proxy_async(void) {
    now->fences[threadIdx.x]++;
    memcpy(now->fenced[threadIdx.x / 32], now->waited[threadIdx.x / 32], sizeof now->fenced[0]);
}

static void take_over(unsigned *into, const unsigned *from) {
    for (int n = 0; n < MOST_BARRIERS; n++)
        if (into[n] < from[n]) into[n] = from[n];
}

/* ---- mbarriers ---- */

static int find_barrier(uint32_t at) {
    uint32_t word[2];
    if (at % 8) emulate_fail("an mbarrier at %u, which is no multiple of 8", at);
    memcpy(word, shared_at(at, 8), 8);
    if (word[0] != COOKIE || word[1] >= (uint32_t)now->barrier_count || now->barriers[word[1]].at != at)
        emulate_fail("there is no mbarrier at byte %u of shared memory: never made, or overwritten",
                     at - EMULATE_SHARED_BASE);
    return (int)word[1];
}

void emulate_mbarrier_init(uint32_t at, int arrivals) {
    uint32_t word[2];
    if (at % 8) emulate_fail("an mbarrier at %u, which is no multiple of 8", at);
    memcpy(word, shared_at(at, 8), 8);
    if (word[0] == COOKIE) emulate_fail("mbarrier_init of the mbarrier at byte %u again", at - EMULATE_SHARED_BASE);
    if (now->barrier_count == MOST_BARRIERS) emulate_fail("more than %d mbarriers", MOST_BARRIERS);
    if (arrivals < 1 || arrivals > (1 << 20) - 1) emulate_fail("mbarrier_init: arrivals=%d", arrivals);
    mbarrier *b = &now->barriers[now->barrier_count];
    *b = (mbarrier){.at = at, .arrivals = arrivals, .missing = arrivals, .thread = threadIdx.x};
    word[0] = COOKIE;
    word[1] = (uint32_t)now->barrier_count++;
    memcpy(shared_at(at, 8), word, 8);
    emulate_tracks_writes = now->is_used = 1;
}

void emulate_fence_mbarrier_init(void) {
    for (int n = 0; n < now->barrier_count; n++)
        if (now->barriers[n].thread == threadIdx.x) now->barriers[n].is_fenced = 1;
}

static int64_t bytes_of(const emulate_map *m) {
    int64_t bytes = EMULATE_LINE_BYTES;
    for (int d = 1; d < EMULATE_RANK; d++) bytes *= m->box[d];
    return bytes;
}

static int64_t bytes_of_copy(const copy *c) { return c->map ? bytes_of(c->map) : c->bytes; }

static int64_t bytes_under_way(int barrier) {
    int64_t bytes = 0;
    for (int n = 0; n < now->copy_count; n++)
        if (!now->copies[n].is_store && now->copies[n].barrier == barrier) bytes += bytes_of_copy(&now->copies[n]);
    return bytes;
}

static void end_phase(mbarrier *b) {
    b->phase++;
    b->missing = b->arrivals;
    b->bytes = 0;
}

static void arrive(uint32_t at, int arrivals, int bytes) {
    int n = find_barrier(at);
    mbarrier *b = &now->barriers[n];
    if (bytes < 0 || b->bytes + bytes >= 1 << 20) emulate_fail("mbarrier %d: %d bytes more are too many", n, bytes);
    if (b->missing < arrivals)
        emulate_fail("mbarrier %d (at byte %u): all %d arrivals of phase %u have come, and nobody has waited for its bytes",
                     n, at - EMULATE_SHARED_BASE, b->arrivals, b->phase);
    b->bytes += bytes;
    b->missing -= arrivals;
    if (b->missing == 0 && b->bytes == 0 && bytes_under_way(n) == 0) end_phase(b);
}

void emulate_mbarrier_arrive(uint32_t at, int arrivals, int bytes) {
    take_over(now->passed_on[find_barrier(at)], now->fenced[threadIdx.x / 32]);
    arrive(at, arrivals, bytes);
    emulate_pause();
}

/* ---- addresses in the cluster: that in the block, and above it the block's number plus 1 ---- */

enum { RANK_SHIFT = 24 };

uint32_t emulate_mapa(uint32_t at, unsigned rank) {
    shared_at(at, 1);
    return at | (rank + 1) << RANK_SHIFT;
}
static unsigned rank_of(uint32_t at) {
    if (!(at >> RANK_SHIFT)) emulate_fail("%u is no address in the cluster: want one of mapa", at);
    return (at >> RANK_SHIFT) - 1;
}
static uint32_t within(uint32_t at) { return at & ((1u << RANK_SHIFT) - 1); }

/* What those who wait there may read is not followed: it is what others have brought. */
void emulate_mbarrier_arrive_remote(uint32_t at) {
    const unsigned mine = emulate_rank;
    emulate_enter(rank_of(at));
    arrive(within(at), 1, 0);
    emulate_enter(mine);
    emulate_pause();
}

static void land(int barrier);

static int is_phase_over(const emulate_wait *w) {
    int n = find_barrier(w->what);
    mbarrier *b = &now->barriers[n];
    if ((b->phase & 1) == w->until && b->missing == 0 && b->bytes == bytes_under_way(n)) {
        land(n);
        end_phase(b);
    }
    if ((b->phase & 1) == w->until) return 0;
    now->waited[threadIdx.x / 32][n] = b->phase;
    take_over(now->waited[threadIdx.x / 32], now->passed_on[n]);
    return 1;
}

static void describe_phase(const emulate_wait *w, char *text, size_t bytes) {
    int n = find_barrier(w->what);
    const mbarrier *b = &now->barriers[n];
    snprintf(
        text, bytes,
        "wait for parity %u of mbarrier %d (at byte %u), which is in phase %u: %d of %d arrivals are missing, %lld bytes "
        "expected, %lld under way",
        w->until, n, b->at - EMULATE_SHARED_BASE, b->phase, b->missing, b->arrivals, (long long)b->bytes,
        (long long)bytes_under_way(n));
}

void emulate_mbarrier_wait(uint32_t at, uint32_t parity) {
    find_barrier(at);
    if (parity > 1) emulate_fail("mbarrier_wait_parity: parity=%u", parity);
    emulate_wait_for((emulate_wait){is_phase_over, describe_phase, at, parity});
}

/* ---- named barriers ---- */

static int is_named_over(const emulate_wait *w) { return now->named[w->what].generation != w->until; }

static void describe_named(const emulate_wait *w, char *text, size_t bytes) {
    const struct named *b = &now->named[w->what];
    snprintf(text, bytes, "wait at barrier %u, to which %d of %d threads have come", w->what, b->arrived, b->threads);
}

static struct named *come_to(int barrier, int threads, int vote) {
    if (barrier < 1 || barrier >= NAMED)
        emulate_fail("barrier %d: want 1 to %d; 0 is that of __syncthreads", barrier, NAMED - 1);
    if (threads < 32 || threads % 32 || (unsigned)threads > block_threads)
        emulate_fail("barrier %d of %d threads: want whole warps of the block", barrier, threads);
    struct named *b = &now->named[barrier];
    if (b->arrived && b->threads != threads)
        emulate_fail("barrier %d of %d threads here, of %d elsewhere", barrier, threads, b->threads);
    b->threads = threads;
    b->votes[b->generation % 2] |= vote;
    if (++b->arrived == threads) {
        b->arrived = 0;
        b->generation++;
        b->votes[b->generation % 2] = 0;
    }
    return b;
}

void emulate_bar_arrive(int barrier, int threads) {
    come_to(barrier, threads, 0);
    emulate_pause();
}

int emulate_bar_sync(int barrier, int threads, int vote) {
    unsigned generation = barrier >= 0 && barrier < NAMED ? now->named[barrier].generation : 0;
    const struct named *b = come_to(barrier, threads, vote);
    emulate_wait_for((emulate_wait){is_named_over, describe_named, (uint32_t)barrier, generation});
    if (b->generation != generation + 1) emulate_fail("barrier %d was over twice before this thread had left it", barrier);
    return b->votes[generation % 2];
}

/* ---- copies ---- */

int emulate_map_encode(void *map, int type, uint32_t rank, void *base, const uint64_t *dims, const uint64_t *strides,
                       const uint32_t *box, const uint32_t *steps, int interleave, int swizzle, int promotion, int fill) {
    enum { F16 = 6, BF16 = 9, LAST_TYPE = 12, SWIZZLE_128 = 3, REFUSED = 1, NOT_EMULATED = 801 };
    emulate_map m = {.magic = EMULATE_MAP_MAGIC, .base = base};
    if (!map || (uintptr_t)map % 64 || !base || (uintptr_t)base % 16 || rank < 1 || rank > 5) return REFUSED;
    if (type < 0 || type > LAST_TYPE || interleave < 0 || interleave > 2 || swizzle < 0 || swizzle > SWIZZLE_128 ||
        promotion < 0 || promotion > 3 || fill < 0 || fill > 1)
        return REFUSED;
    if (rank != EMULATE_RANK || (type != F16 && type != BF16) || interleave || swizzle != SWIZZLE_128 || fill)
        return NOT_EMULATED;
    for (uint32_t n = 0; n < rank; n++) {
        if (dims[n] < 1 || dims[n] > UINT64_C(1) << 32 || box[n] < 1 || box[n] > 256 || steps[n] < 1 || steps[n] > 8)
            return REFUSED;
        if (steps[n] != 1) return NOT_EMULATED;
        m.dims[n] = dims[n];
        m.box[n] = box[n];
    }
    for (uint32_t n = 0; n + 1 < rank; n++) {
        if (strides[n] % 16 || strides[n] >= UINT64_C(1) << 40) return REFUSED;
        m.strides[n] = strides[n];
    }
    if (box[0] * 2 % 16 || box[0] * 2 > EMULATE_LINE_BYTES) return REFUSED; /* the swizzle bounds the columns */
    if (box[0] * 2 != EMULATE_LINE_BYTES) return NOT_EMULATED;
    memset(map, 0, 128);
    memcpy(map, &m, sizeof m);
    return 0;
}

static const emulate_map *checked_map(const void *map) {
    const emulate_map *m = map;
    if ((uintptr_t)map % 64) emulate_fail("a tensor map that is not aligned to 64 bytes");
    if (m->magic != EMULATE_MAP_MAGIC) emulate_fail("this is no tensor map: the host has not made it");
    return m;
}

/* Where line n of the box begins in memory; NULL: outside the tensor. *from, *to: its columns that are inside. */
static uint8_t *line_of(const copy *c, uint32_t n, int *from, int *to) {
    const emulate_map *m = c->map;
    uint8_t *start = m->base;
    for (int d = 1; d < EMULATE_RANK; n /= m->box[d++]) {
        int64_t at = (int64_t)c->at[d] + n % m->box[d];
        if (at < 0 || (uint64_t)at >= m->dims[d]) return NULL;
        start += (uint64_t)at * m->strides[d - 1];
    }
    int64_t left = -(int64_t)c->at[0], right = (int64_t)m->dims[0] - c->at[0], columns = EMULATE_LINE_BYTES / 2;
    *from = (int)(left < 0 ? 0 : left > columns ? columns : left);
    *to = (int)(right < *from ? *from : right > columns ? columns : right);
    return start + (int64_t)c->at[0] * 2;
}

static copy *new_copy(const emulate_map *map, uint32_t at_shared, const int at[EMULATE_RANK], const char *who) {
    int64_t bytes = bytes_of(map);
    if (now->copy_count == MOST_COPIES) emulate_fail("more than %d copies under way", MOST_COPIES);
    if (bytes > MOST_BYTES) emulate_fail("a copy of %lld bytes: the emulation has no room for it", (long long)bytes);
    if (at_shared % EMULATE_LINE_BYTES)
        emulate_fail("%s: its address in shared memory, %u, is no multiple of 128", who, at_shared);
    shared_at(at_shared, (uint32_t)bytes);
    for (int64_t n = 0; n < bytes; n += EMULATE_LINE_BYTES) emulate_check_fenced(at_shared + (uint32_t)n, who);
    copy *c = &now->copies[now->copy_count++];
    c->map = map;
    c->shared = at_shared;
    c->is_store = c->is_committed = 0;
    c->thread = threadIdx.x;
    memcpy(c->at, at, sizeof c->at);
    return c;
}

/* Index of the copy's data of column x of line n. */
static uint32_t swizzled_offset(const copy *c, uint32_t n, int x) {
    uint32_t at = c->shared + n * EMULATE_LINE_BYTES + (uint32_t)x * 2;
    return emulate_swizzled(at) - c->shared;
}

static void begin_load(copy *c, uint32_t barrier) {
    int n = find_barrier(barrier);
    if (!now->barriers[n].is_fenced) emulate_fail("mbarrier %d: no fence_mbarrier_init since it was made", n);
    size_t bytes = (size_t)bytes_of_copy(c);
    c->barrier = n;
    memset(shared_at(c->shared, (uint32_t)bytes), 0xff, bytes);
    for (size_t k = 0; k < bytes / EMULATE_LINE_BYTES; k++)
        now->lines[(c->shared - EMULATE_SHARED_BASE) / EMULATE_LINE_BYTES + k] = (line){n, now->barriers[n].phase + 1};
}

void emulate_tensor_load(uint32_t to, const void *map, uint32_t barrier, const int at[EMULATE_RANK]) {
    begin_load(new_copy(checked_map(map), to, at, "a load"), barrier);
    emulate_pause();
}

void emulate_tensor_load_multicast(uint32_t to, const void *map, uint32_t barrier, const int at[EMULATE_RANK],
                                   unsigned mask) {
    const unsigned mine = emulate_rank;
    for (unsigned rank = 0; mask >> rank; rank++) {
        if (!(mask >> rank & 1)) continue;
        emulate_enter(rank);
        begin_load(new_copy(checked_map(map), to, at, "a load"), barrier);
    }
    emulate_enter(mine);
    emulate_pause();
}

/* From another block, which must not have changed it since. */
static void land_from_block(const copy *c, uint8_t *target) {
    const unsigned mine = emulate_rank;
    emulate_enter(c->rank);
    if (memcmp(c->data, shared_at(c->from, c->bytes), c->bytes))
        emulate_fail("shared memory from byte %u on was written while a copy to another block was reading it",
                     c->from - EMULATE_SHARED_BASE);
    emulate_enter(mine);
    memcpy(target, c->data, c->bytes);
}

/* From memory, which nobody must have changed since. */
static void land_from_memory(const copy *c, uint8_t *target) {
    if (memcmp(c->data, c->source, c->bytes)) emulate_fail("memory was written while a load was reading it");
    memcpy(target, c->data, c->bytes);
}

static void land_one(const copy *c) {
    uint8_t *target = shared_at(c->shared, (uint32_t)bytes_of_copy(c));
    for (int64_t n = 0; n < bytes_of_copy(c); n++)
        if (target[n] != 0xff)
            emulate_fail("byte %u of shared memory was written under a load that was under way there",
                         (unsigned)(c->shared - EMULATE_SHARED_BASE + n));
    if (!c->map) {
        if (c->source)
            land_from_memory(c, target);
        else
            land_from_block(c, target);
        return;
    }
    memset(target, 0, (size_t)bytes_of(c->map));
    for (uint32_t n = 0; n < bytes_of(c->map) / EMULATE_LINE_BYTES; n++) {
        int from, to;
        const uint8_t *line = line_of(c, n, &from, &to);
        if (!line) continue;
        for (int x = from; x < to; x++) memcpy(target + swizzled_offset(c, n, x), line + 2 * x, 2);
    }
}

/* The loads of the barrier's phase arrive. */
static void land(int barrier) {
    int left = 0;
    for (int n = 0; n < now->copy_count; n++) {
        if (!now->copies[n].is_store && now->copies[n].barrier == barrier)
            land_one(&now->copies[n]);
        else if (left++ != n)
            now->copies[left - 1] = now->copies[n];
    }
    now->copy_count = left;
}

void emulate_check_waited(uint32_t at) {
    const line *l = &now->lines[(at - EMULATE_SHARED_BASE) / EMULATE_LINE_BYTES];
    if (l->phases && now->waited[threadIdx.x / 32][l->barrier] < l->phases)
        emulate_fail(
            "byte %u of shared memory is read, which a load fills, and this warp has not waited for phase %u of mbarrier "
            "%d (at byte %u)",
            at - EMULATE_SHARED_BASE, l->phases - 1, l->barrier, now->barriers[l->barrier].at - EMULATE_SHARED_BASE);
}

void emulate_tensor_store(const void *map, uint32_t from, const int at[EMULATE_RANK]) {
    copy *c = new_copy(checked_map(map), from, at, "a store");
    size_t bytes = (size_t)bytes_of(c->map);
    c->is_store = 1;
    memcpy(c->data, shared_at(from, (uint32_t)bytes), bytes);
}

/* Of so many bytes, without a map. */
static copy *new_bytes(uint32_t at_shared, uint32_t bytes, const char *who) {
    if (at_shared % 16 || bytes % 16)
        emulate_fail("cp.async.bulk of %u bytes at %u: want multiples of 16", bytes, at_shared);
    if (now->copy_count == MOST_COPIES) emulate_fail("more than %d copies under way", MOST_COPIES);
    if (bytes > MOST_BYTES) emulate_fail("a copy of %u bytes: the emulation has no room for it", bytes);
    for (uint32_t n = 0; n < bytes; n += EMULATE_LINE_BYTES) emulate_check_fenced(at_shared + n, who);
    copy *c = &now->copies[now->copy_count++];
    c->map = NULL;
    c->source = NULL;
    c->bytes = bytes;
    c->shared = at_shared;
    c->is_store = c->is_committed = 0;
    c->thread = threadIdx.x;
    return c;
}

void emulate_bulk_store(void *to, uint32_t from, uint32_t bytes, int adds) {
    if ((uintptr_t)to % 16) emulate_fail("cp.async.bulk to %p: want a multiple of 16", to);
    copy *c = new_bytes(from, bytes, "a store");
    c->to = to;
    c->adds = adds;
    c->is_store = 1;
    memcpy(c->data, shared_at(from, bytes), bytes);
}

void emulate_bulk_load(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier) {
    if ((uintptr_t)from % 16) emulate_fail("cp.async.bulk from %p: want a multiple of 16", from);
    copy *c = new_bytes(to, bytes, "a load");
    c->source = from;
    memcpy(c->data, from, bytes);
    begin_load(c, barrier);
    emulate_pause();
}

void emulate_bulk_to_block(uint32_t to, uint32_t from, uint32_t bytes, uint32_t barrier) {
    static uint8_t data[MOST_BYTES];
    const unsigned mine = emulate_rank;
    if (rank_of(to) != rank_of(barrier)) emulate_fail("a copy to one block, and its mbarrier in another");
    if (from % 16 || bytes > MOST_BYTES) emulate_fail("cp.async.bulk of %u bytes from %u", bytes, from);
    for (uint32_t n = 0; n < bytes; n += EMULATE_LINE_BYTES) emulate_check_fenced(from + n, "a copy to another block");
    memcpy(data, shared_at(from, bytes), bytes);
    emulate_enter(rank_of(to));
    copy *c = new_bytes(within(to), bytes, "a copy from another block");
    c->rank = mine;
    c->from = from;
    memcpy(c->data, data, bytes);
    begin_load(c, within(barrier));
    emulate_enter(mine);
    emulate_pause();
}

void emulate_bulk_commit(void) {
    for (int n = 0; n < now->copy_count; n++)
        if (now->copies[n].is_store && now->copies[n].thread == threadIdx.x) now->copies[n].is_committed = 1;
}

/* A store without a map. */
static void finish_bytes(const copy *c) {
    for (uint32_t n = 0; n < c->bytes; n += 4) {
        float x, sum;
        memcpy(&x, c->data + n, 4);
        memcpy(&sum, c->to + n, 4);
        sum += x;
        memcpy(c->to + n, c->adds ? (const void *)&sum : (const void *)(c->data + n), 4);
    }
}

static void finish_store(const copy *c) {
    uint32_t bytes = c->map ? (uint32_t)bytes_of(c->map) : c->bytes;
    if (memcmp(c->data, shared_at(c->shared, bytes), bytes))
        emulate_fail("shared memory from byte %u on was written while a store was reading it",
                     c->shared - EMULATE_SHARED_BASE);
    if (!c->map) {
        finish_bytes(c);
        return;
    }
    for (uint32_t n = 0; n < bytes / EMULATE_LINE_BYTES; n++) {
        int from, to;
        uint8_t *line = line_of(c, n, &from, &to);
        if (!line) continue;
        for (int x = from; x < to; x++) memcpy(line + 2 * x, c->data + swizzled_offset(c, n, x), 2);
    }
}

/* Memory may be written as soon as shared memory has been read, so both waits are the same here. */
void emulate_bulk_wait(int only_read) {
    int left = 0;
    (void)only_read;
    for (int n = 0; n < now->copy_count; n++) {
        if (now->copies[n].is_store && now->copies[n].is_committed && now->copies[n].thread == threadIdx.x)
            finish_store(&now->copies[n]);
        else if (left++ != n)
            now->copies[left - 1] = now->copies[n];
    }
    now->copy_count = left;
}

/* ---- registers ---- */

void emulate_setmaxnreg(int count, int grows) {
    int own = REGISTERS / (int)block_threads / 8 * 8, *mine = &now->registers[threadIdx.x / 128];
    if (count < 24 || count > 256 || count % 8)
        emulate_fail("setmaxnreg of %d: want a multiple of 8 from 24 to 256", count);
    if (*mine && *mine != count) emulate_fail("setmaxnreg of %d, after %d in the same warpgroup", count, *mine);
    if (grows ? count < own : count > own) emulate_fail("setmaxnreg of %d: the block starts with %d", count, own);
    *mine = count;
}

/* Growing waits until others have given registers away: more than the block has would never come. */
static void check_registers(void) {
    int own = REGISTERS / (int)block_threads / 8 * 8, groups = (int)block_threads / 128, sum = 0;
    if (block_threads % 128) return;
    for (int n = 0; n < groups; n++) sum += now->registers[n] ? now->registers[n] : own;
    if (sum > groups * own)
        emulate_fail("setmaxnreg: %d registers for one thread of each warpgroup, there are %d", sum, groups * own);
}

/* ---- a block ---- */

void emulate_hopper_enter(unsigned rank) {
    now = &worlds[rank];
    emulate_products_enter(rank);
}

void emulate_hopper_begin(unsigned threads) {
    if (now->is_used) { /* the block before had barriers; what it left must not be found */
        memset(now->lines, 0, sizeof now->lines);
        memset(now->waited, 0, sizeof now->waited);
        memset(now->fenced, 0, sizeof now->fenced);
        memset(now->passed_on, 0, sizeof now->passed_on);
        memset(now->written, 0, sizeof now->written);
        memset(now->fences, 0, sizeof now->fences);
    }
    memset(now->named, 0, sizeof now->named);
    memset(now->registers, 0, sizeof now->registers);
    if (now == worlds) emulate_tracks_writes = 0;
    now->is_used = now->barrier_count = now->copy_count = 0;
    block_threads = threads;
    emulate_products_begin();
}

void emulate_hopper_end(void) {
    if (now->copy_count)
        emulate_fail("the block ends with a %s under way that nobody has waited for",
                     now->copies[0].is_store ? "store" : "load");
    check_registers();
    emulate_products_end(block_threads);
}
