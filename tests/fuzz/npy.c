/*
 * Fuzz target for the .npy reader: the bytes are a file. Its header is parsed from memory, and the whole is read through a
 * file descriptor; what was accepted must be consistent with itself and with the bytes.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "npy.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define MUST(condition)                                                                                                    \
    do {                                                                                                                   \
        if (!(condition)) {                                                                                                \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                                                \
            abort();                                                                                                       \
        }                                                                                                                  \
    } while (0)

static void check_header(const npy_header *h, size_t size) {
    int64_t count = 1;
    MUST(h->dtype < NPY_DTYPES && h->ndim >= 0 && h->ndim <= NPY_MAX_DIMS && h->offset <= size);
    for (int n = 0; n < h->ndim; n++) {
        MUST(h->shape[n] >= 0);
        count = h->count ? count * h->shape[n] : 0; /* no overflow: it divides h->count */
    }
    MUST(count == h->count && h->bytes == (size_t)h->count * npy_dtype_size(h->dtype));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static int file = -1;
    static char path[64];
    if (file < 0) {
        MUST((file = memfd_create("npy", 0)) >= 0);
        snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    }
    npy_header header;
    char error[NPY_ERROR_SIZE] = "";
    npy_status parsed = npy_parse_header(data, size, &header, error, sizeof error);
    MUST(parsed == NPY_OK || (parsed == NPY_BAD && error[0]));
    if (parsed == NPY_OK) check_header(&header, size);

    MUST(ftruncate(file, 0) == 0 && pwrite(file, data, size, 0) == (ssize_t)size);
    npy_array array;
    npy_status read = npy_read(path, &array, error, sizeof error);
    MUST((read == NPY_OK) == (parsed == NPY_OK && header.bytes == size - header.offset));
    if (read == NPY_OK) MUST(memcmp(array.data, data + header.offset, header.bytes) == 0);
    npy_free(&array);
    return 0;
}
