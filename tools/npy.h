/*
 * .npy files, the format of numpy.save: one array a file, little-endian, C order.
 *
 * The reader trusts nothing: the header's length is capped, its text is parsed by a small grammar, products of the shape are
 * checked for overflow and against the size of the file before anything is allocated. The writer goes through a temporary
 * file beside the target, so that a failure leaves no half-written array behind.
 */
#ifndef ATTN_NPY_H
#define ATTN_NPY_H

#include <stddef.h>
#include <stdint.h>

enum { NPY_MAX_DIMS = 8, NPY_MAX_HEADER = 65536, NPY_ERROR_SIZE = 512, NPY_SHAPE_SIZE = 192 };

typedef enum npy_status {
    NPY_OK = 0,
    NPY_BAD,      /* what the file holds is not what this reader takes */
    NPY_SYSTEM,   /* the operating system refused: open, read, write, rename ... */
    NPY_NO_MEMORY /* the data does not fit into memory */
} npy_status;

typedef enum npy_dtype { NPY_F2, NPY_F4, NPY_F8, NPY_I1, NPY_I4, NPY_I8, NPY_U1, NPY_U2, NPY_DTYPES } npy_dtype;

typedef struct npy_header {
    npy_dtype dtype;
    int ndim;
    int64_t shape[NPY_MAX_DIMS];
    int64_t count; /* elements: the product of the shape */
    size_t bytes;  /* of the data */
    size_t offset; /* of the data in the file */
} npy_header;

typedef struct npy_array {
    npy_header header;
    void *data; /* aligned as malloc's; not NULL even when there are no elements */
} npy_array;

/* "f4" and so on; bytes of an element. */
const char *npy_dtype_name(npy_dtype dtype);
size_t npy_dtype_size(npy_dtype dtype);

/* "(2, 128, 8, 64)", cut short if it does not fit. */
void npy_shape_text(int ndim, const int64_t *shape, char *text, size_t size);

/*
 * Parses what a file begins with. The block holds the file, or at least its first 12 + NPY_MAX_HEADER bytes. On failure
 * `error` says what is wrong. Whether the data is there is for the caller to see: offset + bytes against the file's size.
 */
npy_status npy_parse_header(const void *block, size_t size, npy_header *header, char *error, size_t error_size);

/* Reads a file; error begins with its path. On failure *array is zeroed. */
npy_status npy_read(const char *path, npy_array *array, char *error, size_t error_size);
void npy_free(npy_array *array); /* and zeroes it; a zeroed one is ignored */

/* Writes a file, replacing the one that is there only when all is written. */
npy_status npy_write(const char *path, npy_dtype dtype, int ndim, const int64_t *shape, const void *data, char *error,
                     size_t error_size);

#endif
