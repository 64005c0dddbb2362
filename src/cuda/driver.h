/*
 * The CUDA driver as a table of functions, filled with dlopen and dlsym, so that one library runs with and without a GPU and no
 * CUDA header is needed to build it. Types and constants are declared here, with the values of the driver API's documentation.
 */
#ifndef ATTN_CUDA_DRIVER_H
#define ATTN_CUDA_DRIVER_H

#include "internal.h"

typedef struct attn_cu_context_s *attn_cu_context;
typedef struct attn_cu_stream_s *attn_cu_stream;
typedef struct attn_cu_event_s *attn_cu_event;
typedef struct attn_cu_library_s *attn_cu_library;
typedef struct attn_cu_kernel_s *attn_cu_kernel;
typedef struct attn_cu_function_s *attn_cu_function;
typedef unsigned long long attn_cu_pointer;

/* CUlaunchAttribute: of its value, which is 64 bytes, the attributes in use have an int. */
typedef struct attn_cu_attribute {
    _Alignas(8) int id;
    int padding, value, rest[15];
} attn_cu_attribute;
_Static_assert(sizeof(attn_cu_attribute) == 72, "as the driver has it");

/* CUlaunchConfig. */
typedef struct attn_cu_launch {
    unsigned grid[3], block[3], shared_bytes;
    attn_cu_stream stream;
    attn_cu_attribute *attributes;
    unsigned count; /* of them */
} attn_cu_launch;

/* Values of the driver API. */
enum {
    ATTN_CU_SUCCESS = 0,
    ATTN_CU_OUT_OF_MEMORY = 2,
    ATTN_CU_NO_DEVICE = 100,

    ATTN_CU_DEVICE_SMS = 16,        /* CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT */
    ATTN_CU_DEVICE_MAJOR = 75,      /* ..._COMPUTE_CAPABILITY_MAJOR */
    ATTN_CU_DEVICE_MINOR = 76,      /* ..._COMPUTE_CAPABILITY_MINOR */
    ATTN_CU_DEVICE_SHARED = 97,     /* ..._MAX_SHARED_MEMORY_PER_BLOCK_OPTIN */
    ATTN_CU_POINTER_TYPE = 2,       /* CU_POINTER_ATTRIBUTE_MEMORY_TYPE */
    ATTN_CU_POINTER_MANAGED = 8,    /* ..._IS_MANAGED */
    ATTN_CU_POINTER_DEVICE = 9,     /* ..._DEVICE_ORDINAL */
    ATTN_CU_MEMORY_HOST = 1,        /* CU_MEMORYTYPE_HOST; 0 is memory that the driver does not know */
    ATTN_CU_MEMORY_DEVICE = 2,      /* CU_MEMORYTYPE_DEVICE */
    ATTN_CU_HOST_PORTABLE = 1,      /* CU_MEMHOSTALLOC_PORTABLE */
    ATTN_CU_HOST_MAPPED = 2,        /* CU_MEMHOSTALLOC_DEVICEMAP */
    ATTN_CU_FUNCTION_LOCAL = 3,     /* CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES: what registers spill to */
    ATTN_CU_FUNCTION_REGISTERS = 4, /* ..._NUM_REGS */
    ATTN_CU_FUNCTION_PTX = 5,       /* ..._PTX_VERSION: what architecture it was compiled for, times ten */
    ATTN_CU_FUNCTION_SHARED = 8,    /* CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES */
    ATTN_CU_LAUNCH_EARLY = 6,       /* CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION */
    ATTN_CU_STREAM_PER_THREAD = 2,  /* streams 0, 1 and 2 are names, not handles */
    ATTN_CU_MAP_F16 = 6,            /* CU_TENSOR_MAP_DATA_TYPE_FLOAT16 */
    ATTN_CU_MAP_BF16 = 9,           /* ..._BFLOAT16 */
    ATTN_CU_MAP_PLAIN = 0,          /* CU_TENSOR_MAP_INTERLEAVE_NONE */
    ATTN_CU_MAP_SWIZZLE_128 = 3,    /* CU_TENSOR_MAP_SWIZZLE_128B */
    ATTN_CU_MAP_L2_128 = 2,         /* CU_TENSOR_MAP_L2_PROMOTION_L2_128B */
    ATTN_CU_MAP_FILL_ZERO = 0       /* CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE: what is outside reads as 0 */
};

typedef struct attn_driver {
#define ENTRY(name, symbol, arguments) int(*name) arguments;
#include "driver.def"
#undef ENTRY
} attn_driver;

typedef struct attn_gpu {
    int32_t device;       /* the driver's number, which is the ordinal */
    int32_t arch;         /* compute capability times ten: 80, 90 */
    int32_t shared_bytes; /* most that a block can have */
    int32_t sms;
    char name[64];
} attn_gpu;

/* The driver and what was found with it. */
typedef struct attn_driver_state {
    const attn_driver *driver;
    int32_t version; /* 13000: CUDA 13.0 */
    int32_t gpus;    /* at least 1 */
    attn_gpu gpu[ATTN_MOST_GPUS];
} attn_driver_state;

/*
 * Loads the driver, initialises it and lists the devices, once per process; after a failure the next call tries again. The
 * state lives as long as the process. ATTN_UNSUPPORTED: there is no driver, it is too old, or there is no device; ATTN_DEVICE: a
 * call failed.
 */
attn_status attn__driver_open(const attn_driver_state **state);

/* For tests: from here on this table is the driver; NULL: the real one. No context of the cuda backend may be alive. */
void attn__driver_replace(const attn_driver *driver);

/* Says "call=error: name, text" with what the driver calls the error; ATTN_NO_MEMORY when it is that, otherwise ATTN_DEVICE. */
attn_status attn__driver_fail(const attn_driver *driver, int error, const char *call);

/* RETURN_IF_ERROR for a call of the driver: RETURN_IF_DRIVER(d, cuMemFree, (pointer)). */
#define RETURN_IF_DRIVER(driver, call, arguments)                                                                          \
    do {                                                                                                                   \
        int error_ = (driver)->call arguments;                                                                             \
        if (error_) return attn__driver_fail((driver), error_, #call);                                                     \
    } while (0)

#endif
