/* Status names and the thread-local detail text that every failing call leaves behind. */
#include "internal.h"
#include "numeric.h"

#include <stdio.h>

static _Thread_local char detail[512];

const char *attn_status_name(attn_status status) {
    switch (status) {
    case ATTN_OK: return "ATTN_OK";
    case ATTN_INVALID: return "ATTN_INVALID";
    case ATTN_UNSUPPORTED: return "ATTN_UNSUPPORTED";
    case ATTN_NO_MEMORY: return "ATTN_NO_MEMORY";
    case ATTN_SYSTEM: return "ATTN_SYSTEM";
    case ATTN_DEVICE: return "ATTN_DEVICE";
    }
    return "unknown status";
}

const char *attn_error_detail(void) { return detail; }

attn_status attn__fail(attn_status status, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(detail, sizeof detail, format, arguments);
    va_end(arguments);
    return status;
}

const char *attn_dtype_name(attn_dtype dtype) {
    switch (dtype) {
    case ATTN_F32: return "f32";
    case ATTN_F16: return "f16";
    case ATTN_BF16: return "bf16";
    case ATTN_F64: return "f64";
    case ATTN_E4M3: return "e4m3";
    case ATTN_E5M2: return "e5m2";
    case ATTN_I8: return "i8";
    default: return "unknown";
    }
}

size_t attn_dtype_size(attn_dtype dtype) { return (size_t)attn__dtype_bytes(dtype); }
