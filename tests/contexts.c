/*
 * Contexts for the tests: by backend, and for the cpu backend by instruction set, so that every row of its kernel table is
 * held to the same contract.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "build.h"
#include "test.h"

attn_context *make_context(attn_backend_id backend, int32_t threads) {
    attn_context *context;
    attn_config config = {.size = sizeof config, .backend = backend, .threads = threads};
    return attn_context_create(&context, &config) == ATTN_OK ? context : NULL;
}

/* Kernel names are op_isa_dtype. */
static bool isa_available(const char *isa) {
    char middle[32];
    snprintf(middle, sizeof middle, "_%s_", isa);
    attn_kernel_info info;
    for (int32_t i = 0; attn_kernel_get(i, &info) == ATTN_OK; i++)
        if (strcmp(info.backend, "cpu") == 0 && info.available && strstr(info.name, middle)) return true;
    return false;
}

const char *cpu_isa(int index) {
    static const char *const names[] = {"c", "avx2", "avx512", "neon"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (isa_available(names[i]) && index-- == 0) return names[i];
    return NULL;
}

attn_context *make_cpu_context(const char *isa, int32_t threads) {
    setenv("ATTN_CPU", isa, 1);
    attn_context *context = make_context(ATTN_BACKEND_CPU, threads);
    unsetenv("ATTN_CPU");
    return context;
}

void each_cpu(void (*body)(attn_context *context, attn_dtype dtype)) {
    static const attn_dtype dtypes[] = {ATTN_F32, ATTN_F16, ATTN_BF16, ATTN_F64};
    CHECK(cpu_isa(0) != NULL);
    const char *isa;
    for (int i = 0; (isa = cpu_isa(i)) != NULL; i++) {
        attn_context *context = make_cpu_context(isa, 2);
        if (!CHECK(context != NULL)) return;
        for (size_t d = 0; d < sizeof dtypes / sizeof *dtypes; d++) {
            test_context("%s %s", isa, attn_dtype_name(dtypes[d]));
            body(context, dtypes[d]);
        }
        attn_context_destroy(context);
    }
    test_context(NULL);
}
