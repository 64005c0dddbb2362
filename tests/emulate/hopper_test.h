/* What the kernels of hopper_test.cu are given by hopper_test.c. */
#ifndef EMULATE_HOPPER_TEST_H
#define EMULATE_HOPPER_TEST_H

#include <stdint.h>

enum { TEST_ROWS = 128, TEST_DEPTH = 64, TEST_STAGES = 2, TEST_LOADS = 7 };

/* What test_fault does wrong. */
typedef enum test_fault_kind {
    FAULT_NONE,
    FAULT_NO_ARRIVAL,
    FAULT_WRONG_BYTES,
    FAULT_TOO_MANY_ARRIVALS,
    FAULT_NO_WAIT,
    FAULT_EARLY_RELEASE,
    FAULT_EARLY_REGISTERS,
    FAULT_EARLY_READ,
    FAULT_NO_FENCE_OF_PRODUCT,
    FAULT_NO_FENCE_OF_STORE,
    FAULT_NO_FENCE_OF_REGISTERS,
    FAULT_STORE_OVERWRITTEN,
    FAULT_STORE_NOT_WAITED,
    FAULT_LOAD_NOT_WAITED,
    FAULT_LOAD_OVERWRITTEN,
    FAULT_PRODUCT_NOT_WAITED,
    FAULT_HALF_WARPGROUP,
    FAULT_BARRIER_COUNTS,
    FAULT_BARRIER_MISSING,
    FAULT_BARRIER_OVERWRITTEN,
    FAULT_BARRIER_NOT_FENCED,
    FAULT_NO_MAP,
    FAULT_REGISTERS,
    FAULT_DESCRIPTOR,
    FAULT_RELAY_NO_FENCE, /* of test_relay, as what follows */
    FAULT_RELAY_EARLY_FENCE,
    FAULT_RELAY_NO_WAIT,
    FAULT_RELAY_ELSEWHERE
} test_fault_kind;

typedef struct test_args {
    uint64_t in[16] __attribute__((aligned(64))), out[16], none[16]; /* tensor maps; none: zeros */
    int at_in[5], at_out[5];
    int rows;              /* test_copy: of the box, in all its blocks */
    uint16_t *raw;         /* test_copy: [rows][64], shared memory as it was after the load */
    float *d;              /* [64][columns] */
    const uint16_t *a, *b; /* test_product: [64][TEST_DEPTH]; [columns][TEST_DEPTH], from registers [TEST_DEPTH][columns] */
    int columns, is_bf16, from_registers;
    int fault;
} test_args;

#endif
