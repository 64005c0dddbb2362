/*
 * Tests of the emulation itself: that copies, barriers and products of compute capability 9.0 do what they should, and that a kernel
 * which uses them wrongly is found out, with the right words. Each runs with the threads in every order.
 */
#define _GNU_SOURCE
#include "hopper_test.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "hopper.h"
#include "numeric.h"

enum { SHARED = 4 * TEST_ROWS * 128 + 256 };

static int passed, failed;

static void judge(int ok, const char *what, int number) {
    passed += ok;
    failed += !ok;
    if (!ok) printf("FAILED: %s (%d)\n", what, number);
}

#ifdef __aarch64__ /* a large argument is a pointer to it; the compiler's copy would not be aligned */
#define ENTRY(name)                                                                                                        \
    void name(const test_args *x);                                                                                         \
    static void run_##name(const void *args) { name(args); }
#else
#define ENTRY(name)                                                                                                        \
    void name(const test_args x);                                                                                          \
    static void run_##name(const void *args) { name(*(const test_args *)args); }
#endif
ENTRY(test_copy)
ENTRY(test_ring)
ENTRY(test_product)
ENTRY(test_fault)
ENTRY(test_relay)

static uint16_t random_number(int is_bf16) {
    float x = (float)(rand() % 2001 - 1000) / 500;
    return is_bf16 ? attn__to_bf16(x) : attn__to_f16(x);
}

static int encode(uint64_t *map, void *base, const uint64_t dims[5], const uint64_t strides[4], uint32_t rows,
                  uint32_t blocks) {
    const uint32_t box[5] = {64, rows, blocks, 1, 1}, steps[5] = {1, 1, 1, 1, 1};
    return emulate_map_encode(map, 6, 5, base, dims, strides, box, steps, 0, 3, 2, 0);
}

/* ---- copies ---- */

/* Two blocks of columns, which lie one after the other, and as far as a tensor's columns would. */
enum { COLUMNS = 72, ROWS = 20, BLOCKS = 2, HEADS = 3, BATCH = 2, TENSOR = BATCH * ROWS * HEADS * BLOCKS * COLUMNS };
static const uint64_t tensor_dims[5] = {COLUMNS, ROWS, BLOCKS, HEADS, BATCH};
static const uint64_t tensor_strides[4] = {2 * HEADS * BLOCKS * COLUMNS, 2 * COLUMNS, 2 * BLOCKS *COLUMNS,
                                           2 * ROWS *HEADS *BLOCKS *COLUMNS};

/* The number at these coordinates; NULL: there is none. */
static uint16_t *element(uint16_t *tensor, const int at[5], int x, int y, int z) {
    x += at[0];
    y += at[1];
    z += at[2];
    if (x < 0 || x >= COLUMNS || y < 0 || y >= ROWS || z < 0 || z >= BLOCKS || at[3] < 0 || at[3] >= HEADS || at[4] < 0 ||
        at[4] >= BATCH)
        return NULL;
    return &tensor[(((at[4] * ROWS + y) * HEADS + at[3]) * BLOCKS + z) * COLUMNS + x];
}

static void test_one_copy(int number, int rows, int blocks, const int from[5], const int to[5]) {
    static _Alignas(64) test_args x;
    static _Alignas(64) uint16_t in[TENSOR], out[TENSOR], raw[64 * 64];
    for (int n = 0; n < TENSOR; n++) in[n] = (uint16_t)(n + 1), out[n] = 0x5555;
    memset(raw, 0xa5, sizeof raw);
    judge(encode(x.in, in, tensor_dims, tensor_strides, (uint32_t)rows, (uint32_t)blocks) == 0, "map of a load", number);
    judge(encode(x.out, out, tensor_dims, tensor_strides, (uint32_t)rows, (uint32_t)blocks) == 0, "map of a store", number);
    memcpy(x.at_in, from, sizeof x.at_in);
    memcpy(x.at_out, to, sizeof x.at_out);
    x.rows = rows * blocks;
    x.raw = raw;
    emulate_launch(run_test_copy, &x, 1, 1, 1, 128, SHARED, 1);
    int same_raw = 1, same_out = 1;
    static uint16_t want[TENSOR];
    for (int n = 0; n < TENSOR; n++) want[n] = 0x5555;
    for (int y = 0; y < rows * blocks; y++) /* lines of the box */
        for (int c = 0; c < 64; c++) {
            const uint16_t *source = element(in, from, c, y % rows, y / rows);
            uint16_t *target = element(want, to, c, y % rows, y / rows), value = source ? *source : 0;
            same_raw &= raw[y * 64 + (((c / 8) ^ (y % 8)) * 8 + c % 8)] == value;
            if (target) *target = value;
        }
    same_out = memcmp(out, want, sizeof out) == 0;
    judge(same_raw, "a load puts the numbers where the swizzle says, zeros outside the tensor", number);
    judge(same_out, "a store writes what is inside the tensor", number);
}

static void test_copies(void) {
    const int places[][5] = {{0, 0, 0, 0, 0},   {64, 0, 1, 1, 1}, {0, 16, 0, 2, 0}, {-5, -3, 0, 1, 1},
                             {64, 19, 1, 0, 0}, {72, 0, 0, 0, 0}, {0, 20, 0, 0, 0}, {0, 0, 1, 3, 0},
                             {0, 0, 0, 0, -1},  {8, 1, 0, 2, 1},  {0, 0, 2, 0, 0},  {0, 8, -1, 1, 0}};
    const int count = sizeof places / sizeof places[0];
    for (int n = 0; n < count; n++) test_one_copy(n, n % 2 ? 16 : 8, 1 + n / 2 % 2, places[n], places[(n * 5 + 1) % count]);
}

/* What the driver refuses. */
static void test_maps(void) {
    static _Alignas(64) uint64_t map[32];
    static _Alignas(16) uint16_t data[64];
    const uint64_t good_dims[5] = {64, 2, 1, 1, 1}, good_strides[4] = {128, 256, 256, 256};
    judge(encode(map, data, good_dims, good_strides, 256, 1) == 0, "a map as it should be", 0);
    judge(encode(map, data + 4, good_dims, good_strides, 8, 1) == 1, "a base of 8 bytes", 0);
    judge(encode(map + 1, data, good_dims, good_strides, 8, 1) == 1, "a map that is not aligned", 0);
    judge(encode(map, data, good_dims, good_strides, 257, 1) == 1, "a box of 257 rows", 0);
    judge(encode(map, data, good_dims, good_strides, 0, 1) == 1, "a box of no rows", 0);
    for (int n = 0; n < 4; n++) {
        uint64_t strides[4] = {128, 256, 256, 256};
        strides[n] = 136;
        judge(encode(map, data, good_dims, strides, 8, 1) == 1, "a stride of 136 bytes", n);
        strides[n] = UINT64_C(1) << 40;
        judge(encode(map, data, good_dims, strides, 8, 1) == 1, "a stride of 2^40 bytes", n);
    }
    for (int n = 0; n < 5; n++) {
        uint64_t dims[5] = {64, 2, 1, 1, 1};
        dims[n] = 0;
        judge(encode(map, data, dims, good_strides, 8, 1) == 1, "an empty dim", n);
    }
}

static void test_phases(void) {
    static _Alignas(64) test_args x;
    static _Alignas(64) uint16_t in[TEST_LOADS * TEST_ROWS * 64];
    const uint64_t dims[5] = {64, TEST_LOADS * TEST_ROWS, 1, 1, 1}, strides[4] = {128, 128, 128, 128};
    float sums[TEST_ROWS], want[TEST_ROWS] = {0};
    for (int n = 0; n < TEST_LOADS * TEST_ROWS; n++) {
        float value = (float)(n * n % 97);
        in[n * 64] = attn__to_f16(value);
        want[n % TEST_ROWS] += value;
    }
    judge(encode(x.in, in, dims, strides, TEST_ROWS, 1) == 0, "map", 0);
    x.d = sums;
    emulate_launch(run_test_ring, &x, 1, 1, 1, 160, SHARED, 1);
    judge(memcmp(sums, want, sizeof want) == 0, "loads through a ring of buffers", 0);
}

/* ---- products ---- */

static double number_of(uint16_t x, int is_bf16) { return (double)(is_bf16 ? attn__from_bf16(x) : attn__from_f16(x)); }

static void test_one_product(int columns, int is_bf16, int from_registers) {
    static _Alignas(64) test_args x;
    static uint16_t a[64 * TEST_DEPTH], b[TEST_DEPTH * 256];
    static float d[64 * 256];
    for (int n = 0; n < 64 * TEST_DEPTH; n++) a[n] = random_number(is_bf16);
    for (int n = 0; n < TEST_DEPTH * columns; n++) b[n] = random_number(is_bf16);
    memset(d, 0xff, sizeof d);
    x.a = a;
    x.b = b;
    x.d = d;
    x.columns = columns;
    x.is_bf16 = is_bf16;
    x.from_registers = from_registers;
    emulate_launch(run_test_product, &x, 1, 1, 1, 128, SHARED, 1);
    int close = 1;
    for (int i = 0; i < 64; i++)
        for (int j = 0; j < columns; j++) {
            double want = 1 + j;
            for (int k = 0; k < TEST_DEPTH; k++)
                want += number_of(a[i * TEST_DEPTH + k], is_bf16) *
                        number_of(b[from_registers ? k * columns + j : j * TEST_DEPTH + k], is_bf16);
            close &= fabs((double)d[i * columns + j] - want) < 1e-4; /* four roundings of numbers below 1000 */
        }
    judge(close, from_registers ? "a product from registers" : "a product from shared memory", columns + is_bf16);
}

static void test_products(void) {
    const int columns[] = {64, 80, 96, 112, 128, 144, 160, 176, 192, 256};
    for (int n = 0; n < 10; n++)
        for (int kind = 0; kind < 4; kind++) test_one_product(columns[n], kind % 2, kind / 2);
}

/* ---- faults ---- */

/* What the load of test_fault and test_relay fetches: [TEST_ROWS][64]. */
static uint16_t *fault_numbers(void) {
    static _Alignas(64) uint16_t in[TEST_ROWS * 64];
    return in;
}

static test_args *fault_args(void) {
    static _Alignas(64) test_args x;
    static _Alignas(64) uint16_t out[64 * 64];
    uint16_t *in = fault_numbers();
    static float d[128];
    const uint64_t dims[5] = {64, TEST_ROWS, 1, 1, 1}, out_dims[5] = {64, 64, 1, 1, 1}, strides[4] = {128, 128, 128, 128};
    for (int n = 0; n < TEST_ROWS * 64; n++) in[n] = random_number(0);
    judge(encode(x.in, in, dims, strides, TEST_ROWS, 1) == 0 && encode(x.out, out, out_dims, strides, 8, 1) == 0, "maps",
          0);
    x.d = d;
    return &x;
}

/* Runs it in a process of its own; what it said. Did it end by abort()? */
static int run_and_listen(const test_args *x, char *said, size_t bytes) {
    const bool relays = x->fault >= FAULT_RELAY_NO_FENCE;
    int ends[2], status;
    if (pipe(ends)) return 0;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], 2);
        emulate_launch(relays ? run_test_relay : run_test_fault, x, 1, 1, 1, relays ? 160 : 128, SHARED, 1);
        _exit(0);
    }
    close(ends[1]);
    size_t have = 0;
    for (ssize_t got; have + 1 < bytes && (got = read(ends[0], said + have, bytes - 1 - have)) > 0;) have += (size_t)got;
    said[have] = 0;
    close(ends[0]);
    return waitpid(child, &status, 0) == child && WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
}

static void test_faults(void) {
    const struct {
        test_fault_kind fault;
        const char *says;
    } cases[] = {
        {FAULT_NO_ARRIVAL, "threads 0 to 127 wait for parity 0 of mbarrier 0 (at byte 65536), which is in phase 0: 1 of 1 "
                           "arrivals are missing, 0 bytes expected, 16384 under way"},
        {FAULT_WRONG_BYTES, "0 of 1 arrivals are missing, 16400 bytes expected, 16384 under way"},
        {FAULT_TOO_MANY_ARRIVALS, "mbarrier 0 (at byte 65536): all 1 arrivals of phase 0 have come"},
        {FAULT_NO_WAIT, "this warp has not waited for phase 0 of mbarrier 0"},
        {FAULT_EARLY_RELEASE, "wgmma: shared memory of b (from byte 0 on) was written while the product was under way"},
        {FAULT_EARLY_REGISTERS, "wgmma: registers of a were written while the product was under way"},
        {FAULT_NO_FENCE_OF_PRODUCT,
         "wgmma meets byte 8192 of shared memory, which thread 70 wrote without fence_proxy_async"},
        {FAULT_NO_FENCE_OF_STORE,
         "a store meets byte 16384 of shared memory, which thread 0 wrote without fence_proxy_async"},
        {FAULT_NO_FENCE_OF_REGISTERS, "wgmma without wgmma_fence"},
        {FAULT_STORE_OVERWRITTEN, "shared memory from byte 16384 on was written while a store was reading it"},
        {FAULT_STORE_NOT_WAITED, "the block ends with a store under way"},
        {FAULT_LOAD_NOT_WAITED, "the block ends with a load under way"},
        {FAULT_LOAD_OVERWRITTEN, "byte 4 of shared memory was written under a load"},
        {FAULT_PRODUCT_NOT_WAITED, "the block ends with 2 products under way in warpgroup 0"},
        {FAULT_HALF_WARPGROUP, "wait at wgmma_wait_group, to which 64 of 128 threads of the warpgroup have come"},
        {FAULT_BARRIER_COUNTS, "threads here, of "},
        {FAULT_BARRIER_MISSING, "threads 0 to 63 wait at barrier 2, to which 64 of 128 threads have come"},
        {FAULT_BARRIER_OVERWRITTEN, "there is no mbarrier at byte 65536"},
        {FAULT_BARRIER_NOT_FENCED, "mbarrier 0: no fence_mbarrier_init"},
        {FAULT_NO_MAP, "this is no tensor map"},
        {FAULT_REGISTERS, "setmaxnreg of 256"},
        {FAULT_DESCRIPTOR, "wgmma: b begins at 1280, inside of 8 rows"},
        {FAULT_RELAY_NO_FENCE, "this warp has not waited for phase 0 of mbarrier 0"},
        {FAULT_RELAY_EARLY_FENCE, "this warp has not waited for phase 0 of mbarrier 0"},
        {FAULT_RELAY_NO_WAIT, "this warp has not waited for phase 0 of mbarrier 0"},
        {FAULT_RELAY_ELSEWHERE, "this warp has not waited for phase 0 of mbarrier 0"},
    };
    test_args *x = fault_args();
    for (size_t n = 0; n < sizeof cases / sizeof cases[0]; n++) {
        char said[4096];
        x->fault = cases[n].fault;
        int ended = run_and_listen(x, said, sizeof said), ok = ended && strstr(said, cases[n].says);
        judge(ok, cases[n].says, (int)cases[n].fault);
        if (!ok) printf("  it %s, and said: %s\n", ended ? "failed" : "did not fail", said);
    }
    x->fault = FAULT_NONE;
    emulate_launch(run_test_fault, x, 1, 1, 1, 128, SHARED, 1);
    int finite = 1, nan = 1;
    for (int n = 0; n < 128; n++) finite &= isfinite(x->d[n]) != 0;
    x->fault = FAULT_EARLY_READ;
    emulate_launch(run_test_fault, x, 1, 1, 1, 128, SHARED, 1);
    for (int n = 0; n < 128; n++) nan &= isnan(x->d[n]) != 0;
    judge(finite, "nothing is wrong with the kernel of the faults but its faults", 0);
    judge(nan, "accumulators that are read early are NaN", 0);
}

/* Who fences after a wait and then arrives somewhere passes the wait on to those who wait there. */
static void test_relays(void) {
    test_args *x = fault_args();
    const uint16_t *in = fault_numbers();
    int close = 1;
    x->fault = FAULT_NONE;
    memset(x->d, 0xff, 128 * sizeof *x->d);
    emulate_launch(run_test_relay, x, 1, 1, 1, 160, SHARED, 1);
    for (int thread = 0; thread < 128; thread++) {
        int row = thread / 32 * 16 + thread % 32 / 4, column = 64 + thread % 4 * 2;
        double want = 0;
        for (int k = 0; k < 16; k++) want += number_of(in[row * 64 + k], 0) * number_of(in[column * 64 + k], 0);
        close &= fabs((double)x->d[thread] - want) < 1e-4; /* a few roundings of numbers below 100 */
    }
    judge(close, "a wait that is passed on by a fence and an arrival counts", 0);
}

int main(void) {
    const char *const orders[] = {"forward", "reverse", "random"};
    for (int n = 0; n < 3; n++) {
        setenv("EMULATE_ORDER", orders[n], 1);
        srand(3);
        test_maps();
        test_copies();
        test_phases();
        test_products();
        test_faults();
        test_relays();
    }
    printf("%d passed, %d failed\n", passed, failed);
    return failed > 0;
}
