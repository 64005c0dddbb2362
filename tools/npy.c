/* The .npy reader and writer; see npy.h. */
#define _POSIX_C_SOURCE 200809L

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fault.h"
#include "file.h"
#include "npy.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "elements are used as they are in the file: little-endian");

static const struct {
    const char *name;
    size_t size;
} dtypes[NPY_DTYPES] = {
    [NPY_F2] = {"f2", 2}, [NPY_F4] = {"f4", 4}, [NPY_F8] = {"f8", 8}, [NPY_I1] = {"i1", 1},
    [NPY_I4] = {"i4", 4}, [NPY_I8] = {"i8", 8}, [NPY_U1] = {"u1", 1}, [NPY_U2] = {"u2", 2},
};

const char *npy_dtype_name(npy_dtype dtype) { return dtypes[dtype].name; }
size_t npy_dtype_size(npy_dtype dtype) { return dtypes[dtype].size; }

void npy_shape_text(int ndim, const int64_t *shape, char *text, size_t size) {
    size_t used = (size_t)snprintf(text, size, "(");
    for (int i = 0; i < ndim && used < size; i++)
        used += (size_t)snprintf(text + used, size - used, "%s%lld", i ? ", " : "", (long long)shape[i]);
    if (used < size) snprintf(text + used, size - used, ndim == 1 ? ",)" : ")");
}

/* ---- header ---- */

/* The dict of the header, and where the parser is in it. */
typedef struct cursor {
    const char *at, *end;
    char *error;
    size_t error_size;
} cursor;

__attribute__((format(printf, 2, 3))) static bool bad(cursor *c, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(c->error, c->error_size, format, args);
    va_end(args);
    return false;
}

static void skip_space(cursor *c) {
    while (c->at < c->end && (*c->at == ' ' || *c->at == '\t' || *c->at == '\n' || *c->at == '\r')) c->at++;
}

/* Takes the character if it comes next. */
static bool accept(cursor *c, char wanted) {
    skip_space(c);
    if (c->at == c->end || *c->at != wanted) return false;
    c->at++;
    return true;
}

static bool expect(cursor *c, char wanted, const char *where) {
    return accept(c, wanted) || bad(c, "malformed header: '%c' expected %s", wanted, where);
}

/* A quoted string without escapes, at most size - 1 printable characters. */
static bool parse_string(cursor *c, char *text, size_t size, const char *where) {
    skip_space(c);
    char quote = c->at < c->end ? *c->at : 0;
    if (quote != '\'' && quote != '"') return bad(c, "malformed header: a quoted string expected %s", where);
    size_t n = 0;
    for (c->at++; c->at < c->end && *c->at != quote; c->at++) {
        if (n + 1 >= size || !isprint((unsigned char)*c->at) || *c->at == '\\')
            return bad(c, "malformed header: the string %s is too long or has odd characters", where);
        text[n++] = *c->at;
    }
    text[n] = 0;
    return expect(c, quote, where);
}

static bool parse_descr(cursor *c, npy_header *h) {
    skip_space(c);
    if (c->at < c->end && (*c->at == '[' || *c->at == '('))
        return bad(c, "structured dtypes are not supported; save each field as an array of its own");
    char text[16];
    if (!parse_string(c, text, sizeof text, "after 'descr'")) return false;
    const char *name = text;
    char order = strchr("<>|=", text[0]) && text[0] ? *name++ : '<';
    if (*name == 'O') return bad(c, "object arrays are not supported (they would be unpickled)");
    for (int i = 0; i < NPY_DTYPES; i++) {
        if (strcmp(name, dtypes[i].name) != 0) continue;
        if (order == '>' && dtypes[i].size > 1)
            return bad(c, "big-endian dtype '%s'; convert it with astype('<%s')", text, name);
        h->dtype = (npy_dtype)i;
        return true;
    }
    return bad(c, "dtype '%s' is not supported; f2, f4, f8, i1, i4, i8, u1, u2 are", text);
}

static bool parse_order(cursor *c, bool *fortran) {
    skip_space(c);
    size_t left = (size_t)(c->end - c->at);
    *fortran = left >= 4 && memcmp(c->at, "True", 4) == 0;
    if (!*fortran && !(left >= 5 && memcmp(c->at, "False", 5) == 0))
        return bad(c, "malformed header: True or False expected after 'fortran_order'");
    c->at += *fortran ? 4 : 5;
    return true;
}

static bool parse_shape(cursor *c, npy_header *h) {
    if (!expect(c, '(', "after 'shape'")) return false;
    h->ndim = 0;
    while (!accept(c, ')')) {
        skip_space(c);
        if (c->at == c->end || !isdigit((unsigned char)*c->at))
            return bad(c, "malformed header: a dimension expected in 'shape'");
        if (h->ndim == NPY_MAX_DIMS) return bad(c, "more than %d dimensions", NPY_MAX_DIMS);
        int64_t value = 0;
        for (; c->at < c->end && isdigit((unsigned char)*c->at); c->at++)
            if (__builtin_mul_overflow(value, 10, &value) || __builtin_add_overflow(value, *c->at - '0', &value))
                return bad(c, "dimension %d does not fit into 64 bits", h->ndim);
        h->shape[h->ndim++] = value;
        if (accept(c, ',')) continue;
        if (h->ndim == 1) return bad(c, "malformed header: ',' expected in 'shape'"); /* (3) is a number, (3,) a tuple */
        if (!expect(c, ')', "at the end of 'shape'")) return false;
        return true;
    }
    return true;
}

/* {'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }: each key once, in any order, and nothing else. */
static bool parse_dict(cursor *c, npy_header *h) {
    static const char *const keys[] = {"descr", "fortran_order", "shape"};
    bool seen[3] = {false, false, false}, fortran = false;
    if (!expect(c, '{', "at the beginning")) return false;
    while (!accept(c, '}')) {
        char key[32];
        int which = 0;
        if (!parse_string(c, key, sizeof key, "as a key")) return false;
        while (which < 3 && strcmp(key, keys[which]) != 0) which++;
        if (which == 3) return bad(c, "malformed header: unknown key '%s'", key);
        if (seen[which]) return bad(c, "malformed header: key '%s' twice", key);
        seen[which] = true;
        if (!expect(c, ':', "after a key")) return false;
        if (!(which == 0 ? parse_descr(c, h) : which == 1 ? parse_order(c, &fortran) : parse_shape(c, h))) return false;
        if (accept(c, ',')) continue;
        if (!expect(c, '}', "at the end")) return false;
        break;
    }
    for (int i = 0; i < 3; i++)
        if (!seen[i]) return bad(c, "malformed header: no '%s'", keys[i]);
    skip_space(c);
    if (c->at != c->end) return bad(c, "malformed header: something follows the dict");
    if (fortran && h->ndim > 1) return bad(c, "Fortran order is not supported; convert it with numpy.ascontiguousarray");
    return true;
}

static bool compute_size(cursor *c, npy_header *h) {
    bool empty = false, overflow = false;
    int64_t bytes = (int64_t)dtypes[h->dtype].size;
    h->count = 1;
    for (int i = 0; i < h->ndim; i++) {
        empty |= h->shape[i] == 0;
        overflow |= __builtin_mul_overflow(h->count, h->shape[i], &h->count);
    }
    overflow |= __builtin_mul_overflow(bytes, h->count, &bytes) || bytes > INT64_MAX / 2;
    if (overflow && !empty) return bad(c, "the product of the shape overflows");
    if (empty) h->count = bytes = 0;
    h->bytes = (size_t)bytes;
    return true;
}

npy_status npy_parse_header(const void *block, size_t size, npy_header *header, char *error, size_t error_size) {
    const unsigned char *p = block;
    cursor c = {NULL, NULL, error, error_size};
    npy_header h = {0};
    memset(header, 0, sizeof *header);
    bool ok = (size >= 10 && memcmp(p, "\x93NUMPY", 6) == 0) || bad(&c, "not a .npy file");
    ok = ok && ((p[6] >= 1 && p[6] <= 3 && p[7] == 0) || bad(&c, "version %d.%d; 1.0, 2.0 and 3.0 are known", p[6], p[7]));
    size_t start = ok && p[6] > 1 ? 12 : 10;
    ok = ok && (size >= start || bad(&c, "the file ends inside the header"));
    if (!ok) return NPY_BAD;
    size_t length = (size_t)p[8] | (size_t)p[9] << 8;
    if (start == 12) length |= (size_t)p[10] << 16 | (size_t)p[11] << 24;
    ok = length <= NPY_MAX_HEADER || bad(&c, "header of %zu bytes; at most %d are taken", length, NPY_MAX_HEADER);
    ok = ok && (size - start >= length || bad(&c, "the file ends inside the header"));
    if (!ok) return NPY_BAD;
    c.at = (const char *)p + start;
    c.end = c.at + length;
    h.offset = start + length;
    if (!parse_dict(&c, &h) || !compute_size(&c, &h)) return NPY_BAD;
    *header = h;
    return NPY_OK;
}

/* ---- memory and errors ---- */

static void *allocate(size_t bytes) { return attn__fault(ATTN_FAULT_ALLOC) ? NULL : malloc(bytes ? bytes : 1); }

__attribute__((format(printf, 4, 5))) static npy_status fail(npy_status status, char *error, size_t size,
                                                             const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(error, size, format, args);
    va_end(args);
    return status;
}

/* ---- reading ---- */

/* The header of an open file; it names the path in its errors. */
static npy_status read_header(int fd, const char *path, npy_header *h, char *error, size_t error_size) {
    struct stat st;
    if (file_faulty(fstat(fd, &st)) != 0)
        return fail(NPY_SYSTEM, error, error_size, "%s: cannot be examined: %s", path, strerror(errno));
    if (!S_ISREG(st.st_mode)) return fail(NPY_BAD, error, error_size, "%s: not a regular file", path);
    size_t head = st.st_size < 12 + NPY_MAX_HEADER ? (size_t)st.st_size : 12 + NPY_MAX_HEADER;
    void *block = allocate(head);
    if (!block) return fail(NPY_NO_MEMORY, error, error_size, "%s: not enough memory", path);
    char what[NPY_ERROR_SIZE / 2];
    npy_status status;
    if (!file_read(fd, block, head, 0)) {
        status = fail(NPY_SYSTEM, error, error_size, "%s: cannot be read: %s", path, strerror(errno));
    } else if ((status = npy_parse_header(block, head, h, what, sizeof what)) != NPY_OK) {
        fail(status, error, error_size, "%s: %s", path, what);
    } else if (h->bytes != (size_t)st.st_size - h->offset) {
        char shape[NPY_SHAPE_SIZE];
        npy_shape_text(h->ndim, h->shape, shape, sizeof shape);
        status = fail(NPY_BAD, error, error_size, "%s: shape %s of %s needs %zu bytes of data; the file has %zu", path,
                      shape, npy_dtype_name(h->dtype), h->bytes, (size_t)st.st_size - h->offset);
    }
    free(block);
    return status;
}

npy_status npy_read(const char *path, npy_array *array, char *error, size_t error_size) {
    memset(array, 0, sizeof *array);
    int fd = file_open(path, O_RDONLY);
    if (fd < 0) {
        npy_status kind = errno == ENOENT || errno == ENOTDIR ? NPY_BAD : NPY_SYSTEM;
        return fail(kind, error, error_size, "%s: cannot be opened: %s", path, strerror(errno));
    }
    npy_header *h = &array->header;
    npy_status status = read_header(fd, path, h, error, error_size);
    if (status == NPY_OK && !(array->data = allocate(h->bytes)))
        status = fail(NPY_NO_MEMORY, error, error_size, "%s: not enough memory for %zu bytes", path, h->bytes);
    if (status == NPY_OK && !file_read(fd, array->data, h->bytes, (off_t)h->offset))
        status = fail(NPY_SYSTEM, error, error_size, "%s: cannot be read: %s", path, strerror(errno));
    if (file_close(fd) != 0 && status == NPY_OK)
        status = fail(NPY_SYSTEM, error, error_size, "%s: cannot be closed: %s", path, strerror(errno));
    if (status != NPY_OK) npy_free(array);
    return status;
}

void npy_free(npy_array *array) {
    free(array->data);
    memset(array, 0, sizeof *array);
}

/* ---- writing ---- */

/* Magic, version 1.0, length and dict, padded with spaces so that the data is 64-byte aligned. Returns its length. */
static size_t format_header(npy_dtype dtype, int ndim, const int64_t *shape, char *text, size_t size) {
    char dims[NPY_SHAPE_SIZE];
    npy_shape_text(ndim, shape, dims, sizeof dims);
    size_t used = 10 + (size_t)snprintf(text + 10, size - 10, "{'descr': '%c%s', 'fortran_order': False, 'shape': %s, }",
                                        dtypes[dtype].size == 1 ? '|' : '<', dtypes[dtype].name, dims);
    size_t total = (used + 1 + 63) / 64 * 64, length = total - 10;
    memset(text + used, ' ', total - used);
    text[total - 1] = '\n';
    memcpy(text, "\x93NUMPY\x01", 8);
    text[8] = (char)(length & 0xff);
    text[9] = (char)(length >> 8);
    return total;
}

npy_status npy_write(const char *path, npy_dtype dtype, int ndim, const int64_t *shape, const void *data, char *error,
                     size_t error_size) {
    char temporary[PATH_MAX], head[512];
    struct stat st;
    if ((size_t)snprintf(temporary, sizeof temporary, "%s.tmp-%ld", path, (long)getpid()) >= sizeof temporary)
        return fail(NPY_BAD, error, error_size, "%.64s...: the path is too long", path);
    /* The rename at the end would put a file in the place of a device or a directory. */
    if (file_faulty(stat(path, &st)) != 0) {
        if (errno != ENOENT) return fail(NPY_SYSTEM, error, error_size, "%s: %s", path, strerror(errno));
    } else if (!S_ISREG(st.st_mode)) {
        return fail(NPY_BAD, error, error_size, "%s: not a regular file", path);
    }
    size_t bytes = dtypes[dtype].size;
    for (int i = 0; i < ndim; i++) bytes *= (size_t)shape[i];
    size_t head_bytes = format_header(dtype, ndim, shape, head, sizeof head);
    int fd = file_open(temporary, O_WRONLY | O_CREAT | O_EXCL);
    if (fd < 0) return fail(NPY_SYSTEM, error, error_size, "%s: cannot be created: %s", path, strerror(errno));
    bool written = file_write(fd, head, head_bytes) && file_write(fd, data, bytes);
    int reason = errno;
    if (file_close(fd) != 0 && written) {
        written = false;
        reason = errno;
    }
    if (written && file_faulty(0) == 0 && rename(temporary, path) == 0) return NPY_OK;
    if (written) reason = errno;
    unlink(temporary);
    return fail(NPY_SYSTEM, error, error_size, "%s: cannot be written: %s", path, strerror(reason));
}
