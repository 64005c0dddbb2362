/*
 * wgmma on the CPU; hopper.h says what is promised. A warpgroup has a queue of products. Threads issue them without waiting for each
 * other: the first one notes what is to be multiplied, the others must say the same. All wait together, and then the products are
 * done, in order, each as exact products added up in double and rounded once.
 */
#include "hopper.h"

#include <stdio.h>
#include <string.h>

#include "numeric.h"

enum {
    WARPGROUPS = 8,
    LANES = 128, /* threads of a warpgroup */
    ROWS = 64,
    DEPTH = 16,
    MOST_COLUMNS = 256,
    MOST_PRODUCTS = 64, /* under way in a warpgroup */
    MOST_ACCUMULATORS = 8,
    ROWS_8 = 8 * EMULATE_LINE_BYTES
};

/* Operands as they were when the product was issued. */
typedef struct operands {
    uint16_t a[ROWS][DEPTH];
    uint16_t b[DEPTH][MOST_COLUMNS];
} operands;

typedef struct product {
    emulate_product p;
    int accumulator;
    operands bits;
    const uint32_t *a_registers[LANES];
} product;

/* The registers d of a warpgroup while products are under way that add to them. */
typedef struct accumulator {
    int products; /* 0: free */
    int columns;
    float *d[LANES]; /* NULL: this thread has not come yet */
    float c[ROWS][MOST_COLUMNS];
} accumulator;

/* Counts run on through the block. */
typedef struct warpgroup {
    product products[MOST_PRODUCTS];
    accumulator accumulators[MOST_ACCUMULATORS];
    unsigned count, done;              /* products: begun, finished */
    unsigned groups, groups_done;      /* committed, finished */
    unsigned group_end[MOST_PRODUCTS]; /* products before the end of a group */
    unsigned issued[LANES], committed[LANES];
    uint8_t is_fenced[LANES];
    int waiting, left; /* threads that wait, for how many groups to be left */
    unsigned waits;    /* that are over */
} warpgroup;

static warpgroup all_warpgroups[EMULATE_CLUSTER][WARPGROUPS], *warpgroups = all_warpgroups[0];

static warpgroup *my_group(void) { return &warpgroups[threadIdx.x / LANES]; }
static unsigned my_lane(void) { return threadIdx.x % LANES; }

/* Row and column of number e of a thread's registers d. */
static int row_of(unsigned lane, int e) { return (int)(lane / 32 * 16 + lane % 32 / 4) + e / 2 % 2 * 8; }
static int column_of(unsigned lane, int e) { return e / 4 * 8 + (int)(lane % 4) * 2 + e % 2; }

/* ---- operands ---- */

typedef struct descriptor {
    uint32_t start, leading, stride;
} descriptor;

static descriptor decode(uint64_t bits, const char *name) {
    descriptor d = {(uint32_t)(bits & 0x3fff) << 4, (uint32_t)(bits >> 16 & 0x3fff) << 4,
                    (uint32_t)(bits >> 32 & 0x3fff) << 4};
    if (bits >> 62 != 1)
        emulate_fail("wgmma: the descriptor of %s has swizzle %d: want 1, 128 bytes", name, (int)(bits >> 62));
    if (bits >> 49 & 7) emulate_fail("wgmma: the descriptor of %s has a base offset", name);
    if (d.stride != ROWS_8)
        emulate_fail("wgmma: in %s 8 rows are %u bytes apart: want 1024, the tile of a tensor map", name, d.stride);
    if (d.start % ROWS_8 >= EMULATE_LINE_BYTES) emulate_fail("wgmma: %s begins at %u, inside of 8 rows", name, d.start);
    return d;
}

static void check_bounds(const descriptor *d, uint32_t last_row, uint32_t last_block, const char *name) {
    uint32_t end = d->start + last_block * d->leading + last_row / 8 * ROWS_8 + last_row % 8 * EMULATE_LINE_BYTES;
    if (d->start < EMULATE_SHARED_BASE ||
        end / EMULATE_LINE_BYTES * EMULATE_LINE_BYTES + EMULATE_LINE_BYTES > EMULATE_SHARED_BASE + emulate_shared_bytes)
        emulate_fail("wgmma: %s ends past the end of shared memory", name);
}

static void read_piece(uint16_t to[8], uint32_t at) {
    memcpy(to, shared + (emulate_swizzled(at) - EMULATE_SHARED_BASE), 16);
}

/* Rows of 16 numbers: to[row][0 to 15]. */
static void read_k_major(uint16_t (*to)[DEPTH], uint64_t bits, uint32_t rows, const char *name) {
    descriptor d = decode(bits, name);
    if (d.start % 32) emulate_fail("wgmma: %s begins at %u, want a multiple of 16 columns", name, d.start);
    check_bounds(&d, rows - 1, 0, name);
    for (uint32_t r = 0; r < rows; r++) {
        read_piece(to[r], d.start + r * EMULATE_LINE_BYTES);
        read_piece(to[r] + 8, d.start + r * EMULATE_LINE_BYTES + 16);
    }
}

/* 16 rows of numbers, in blocks of 64 columns. */
static void read_mn_major(uint16_t (*to)[MOST_COLUMNS], uint64_t bits, uint32_t columns, const char *name) {
    descriptor d = decode(bits, name);
    if (d.start % EMULATE_LINE_BYTES) emulate_fail("wgmma: %s begins at %u, want the first column", name, d.start);
    if (columns > 64 && d.leading % ROWS_8)
        emulate_fail("wgmma: blocks of 64 columns of %s are %u bytes apart", name, d.leading);
    check_bounds(&d, DEPTH - 1, (columns - 1) / 64, name);
    for (uint32_t k = 0; k < DEPTH; k++)
        for (uint32_t x = 0; x < columns; x += 8)
            read_piece(to[k] + x, d.start + x / 64 * d.leading + k * EMULATE_LINE_BYTES + x % 64 * 2);
}

/* What shared memory holds of the operands now. */
static void read_operands(operands *to, const emulate_product *p) {
    uint16_t rows[MOST_COLUMNS][DEPTH];
    if (p->a_registers) {
        read_mn_major(to->b, p->b, (uint32_t)p->columns, "b");
        return;
    }
    if (p->is_mn) {
        uint16_t across[DEPTH][MOST_COLUMNS];
        read_mn_major(across, p->a, ROWS, "a");
        for (int row = 0; row < ROWS; row++)
            for (int k = 0; k < DEPTH; k++) to->a[row][k] = across[k][row];
        read_mn_major(to->b, p->b, (uint32_t)p->columns, "b");
        return;
    }
    read_k_major(to->a, p->a, ROWS, "a");
    read_k_major(rows, p->b, (uint32_t)p->columns, "b");
    for (int x = 0; x < p->columns; x++)
        for (int k = 0; k < DEPTH; k++) to->b[k][x] = rows[x][k];
}

static void read_registers(uint16_t (*to)[DEPTH], unsigned lane, const uint32_t a[4]) {
    for (int r = 0; r < 4; r++) { /* registers 0, 2 have row g, 1, 3 row g + 8; 2, 3 the upper columns */
        uint16_t *at = &to[row_of(lane, 2 * (r % 2))][r / 2 * 8 + (int)(lane % 4) * 2];
        at[0] = (uint16_t)a[r];
        at[1] = (uint16_t)(a[r] >> 16);
    }
}

/* Fails unless the warp may read the rows: loads have been waited for, what threads wrote has been fenced. */
static void check_rows(uint64_t bits, uint32_t rows, uint32_t blocks) {
    uint32_t start = (uint32_t)(bits & 0x3fff) << 4, leading = (uint32_t)(bits >> 16 & 0x3fff) << 4;
    for (uint32_t block = 0; block < blocks; block++)
        for (uint32_t r = 0; r < rows; r++) {
            uint32_t at = start + block * leading + r * EMULATE_LINE_BYTES;
            emulate_check_waited(at);
            emulate_check_fenced(at, "wgmma");
        }
}

static void check_readable(const emulate_product *p) {
    if (p->a_registers || p->is_mn) {
        if (p->is_mn) check_rows(p->a, DEPTH, 1);
        check_rows(p->b, DEPTH, ((uint32_t)p->columns + 63) / 64);
    } else {
        check_rows(p->a, ROWS, 1);
        check_rows(p->b, (uint32_t)p->columns, 1);
    }
}

/* ---- issue ---- */

static int find_accumulator(warpgroup *g, const float *d, int columns) {
    int unused = -1;
    for (int n = MOST_ACCUMULATORS - 1; n >= 0; n--) {
        if (!g->accumulators[n].products) unused = n;
        if (g->accumulators[n].products && g->accumulators[n].d[my_lane()] == d) return n;
    }
    if (unused < 0) emulate_fail("wgmma: more than %d accumulators under way", MOST_ACCUMULATORS);
    memset(g->accumulators[unused].d, 0, sizeof g->accumulators[unused].d);
    g->accumulators[unused].columns = columns;
    return unused;
}

/* The first thread of the warpgroup that comes to this product. */
static void begin_product(warpgroup *g, const emulate_product *p) {
    if (g->count - g->done == MOST_PRODUCTS) emulate_fail("more than %d products under way", MOST_PRODUCTS);
    product *to = &g->products[g->count++ % MOST_PRODUCTS];
    to->p = *p;
    read_operands(&to->bits, p);
    to->accumulator = find_accumulator(g, p->d, p->columns);
    if (g->accumulators[to->accumulator].columns != p->columns)
        emulate_fail("wgmma: accumulators of %d columns, while a product with %d is under way to the same", p->columns,
                     g->accumulators[to->accumulator].columns);
    g->accumulators[to->accumulator].products++;
}

/* The thread's registers become the product's: they are NaN until it is done. */
static void give_registers(accumulator *to, float *d) {
    unsigned lane = my_lane();
    if (to->d[lane] == d) return;
    if (to->d[lane]) emulate_fail("wgmma: this thread adds to other registers than the first one");
    to->d[lane] = d;
    for (int e = 0; e < to->columns / 2; e++) to->c[row_of(lane, e)][column_of(lane, e)] = d[e];
    memset(d, 0xff, (size_t)to->columns / 2 * sizeof *d);
}

void emulate_wgmma(emulate_product p) {
    warpgroup *g = my_group();
    unsigned lane = my_lane(), n = g->issued[lane]++;
    if (!g->is_fenced[lane]) emulate_fail("wgmma without wgmma_fence since the kernel began or since wgmma_wait_group");
    if (lane % 32 == 0) check_readable(&p);
    if (n == g->count) begin_product(g, &p);
    product *to = &g->products[n % MOST_PRODUCTS];
    const emulate_product *q = &to->p;
    if (q->columns != p.columns || q->is_bf16 != p.is_bf16 || q->add != p.add || q->b != p.b || q->a != p.a ||
        q->is_mn != p.is_mn || !q->a_registers != !p.a_registers)
        emulate_fail("wgmma: threads of the warpgroup ask for different products");
    to->a_registers[lane] = p.a_registers;
    if (p.a_registers) read_registers(to->bits.a, lane, p.a_registers);
    give_registers(&g->accumulators[to->accumulator], p.d);
}

void emulate_wgmma_fence(void) { my_group()->is_fenced[my_lane()] = 1; }

void emulate_wgmma_commit(void) {
    warpgroup *g = my_group();
    unsigned lane = my_lane(), n = g->committed[lane]++;
    if (n == g->groups) {
        if (g->groups - g->groups_done == MOST_PRODUCTS) emulate_fail("more than %d groups under way", MOST_PRODUCTS);
        g->group_end[g->groups++ % MOST_PRODUCTS] = g->issued[lane];
    }
    if (g->group_end[n % MOST_PRODUCTS] != g->issued[lane])
        emulate_fail("wgmma_commit_group: threads commit different groups");
}

/* ---- done ---- */

static void widen(double *to, const uint16_t *from, int count, int is_bf16) {
    for (int n = 0; n < count; n++) to[n] = (double)(is_bf16 ? attn__from_bf16(from[n]) : attn__from_f16(from[n]));
}

static void multiply(float (*c)[MOST_COLUMNS], const product *p) {
    static double a[ROWS][DEPTH], b[DEPTH][MOST_COLUMNS];
    const int columns = p->p.columns;
    widen(a[0], p->bits.a[0], ROWS * DEPTH, p->p.is_bf16);
    for (int k = 0; k < DEPTH; k++) widen(b[k], p->bits.b[k], columns, p->p.is_bf16);
    for (int row = 0; row < ROWS; row++) {
        double sum[MOST_COLUMNS];
        for (int x = 0; x < columns; x++) sum[x] = p->p.add ? (double)c[row][x] : 0;
        for (int k = 0; k < DEPTH; k++)
            for (int x = 0; x < columns; x++) sum[x] += a[row][k] * b[k][x];
        for (int x = 0; x < columns; x++) c[row][x] = (float)sum[x];
    }
}

/* Are the operands still what they were? */
static void check_unchanged(const product *p) {
    static operands now;
    const operands *then = &p->bits;
    read_operands(&now, &p->p);
    if (p->p.a_registers)
        for (unsigned lane = 0; lane < LANES; lane++) read_registers(now.a, lane, p->a_registers[lane]);
    if (memcmp(now.a, then->a, sizeof now.a)) {
        if (p->p.a_registers) emulate_fail("wgmma: registers of a were written while the product was under way");
        emulate_fail("wgmma: shared memory of a (from byte %u on) was written while the product was under way",
                     (unsigned)((p->p.a & 0x3fff) << 4) - EMULATE_SHARED_BASE);
    }
    for (int k = 0; k < DEPTH; k++)
        if (memcmp(now.b[k], then->b[k], (size_t)p->p.columns * 2))
            emulate_fail("wgmma: shared memory of b (from byte %u on) was written while the product was under way",
                         (unsigned)((p->p.b & 0x3fff) << 4) - EMULATE_SHARED_BASE);
}

static void finish_product(warpgroup *g) {
    const product *p = &g->products[g->done++ % MOST_PRODUCTS];
    accumulator *to = &g->accumulators[p->accumulator];
    check_unchanged(p);
    multiply(to->c, p);
    if (--to->products) return; /* more is to come */
    for (unsigned lane = 0; lane < LANES; lane++)
        for (int e = 0; e < to->columns / 2; e++) to->d[lane][e] = to->c[row_of(lane, e)][column_of(lane, e)];
}

/* The whole warpgroup waits. */
static void finish_groups(warpgroup *g) {
    for (unsigned lane = 0; lane < LANES; lane++)
        if (g->issued[lane] != g->count || g->committed[lane] != g->groups)
            emulate_fail(
                "wgmma_wait_group: thread %u of the warpgroup has issued %u products in %u groups, others %u in %u", lane,
                g->issued[lane], g->committed[lane], g->count, g->groups);
    while (g->groups - g->groups_done > (unsigned)g->left) {
        unsigned end = g->group_end[g->groups_done++ % MOST_PRODUCTS];
        while (g->done != end) finish_product(g);
    }
}

static int is_wait_over(const emulate_wait *w) { return warpgroups[w->what].waits != w->until; }

static void describe_wait(const emulate_wait *w, char *text, size_t bytes) {
    snprintf(text, bytes, "wait at wgmma_wait_group, to which %d of %d threads of the warpgroup have come",
             warpgroups[w->what].waiting, (int)LANES);
}

void emulate_wgmma_wait(int left) {
    warpgroup *g = my_group();
    unsigned waits = g->waits;
    if (g->waiting && g->left != left) emulate_fail("wgmma_wait_group: %d here, %d in another thread", left, g->left);
    g->left = left;
    g->is_fenced[my_lane()] = 0;
    if (++g->waiting == LANES) {
        finish_groups(g);
        g->waiting = 0;
        g->waits++;
    }
    emulate_wait_for((emulate_wait){is_wait_over, describe_wait, threadIdx.x / LANES, waits});
}

/* ---- a block ---- */

void emulate_products_enter(unsigned rank) { warpgroups = all_warpgroups[rank]; }

void emulate_products_begin(void) {
    for (int n = 0; n < WARPGROUPS; n++) {
        warpgroup *g = &warpgroups[n];
        g->count = g->done = g->groups = g->groups_done = g->waits = 0;
        g->waiting = 0;
        memset(g->issued, 0, sizeof g->issued);
        memset(g->committed, 0, sizeof g->committed);
        memset(g->is_fenced, 0, sizeof g->is_fenced);
        for (int k = 0; k < MOST_ACCUMULATORS; k++) g->accumulators[k].products = 0;
    }
}

void emulate_products_end(unsigned threads) {
    for (unsigned n = 0; n * LANES < threads; n++)
        if (warpgroups[n].done != warpgroups[n].count)
            emulate_fail("the block ends with %u products under way in warpgroup %u",
                         warpgroups[n].count - warpgroups[n].done, n);
}
