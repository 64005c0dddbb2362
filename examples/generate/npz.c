/*
 * Files of numpy.savez: a zip archive without compression, in which each member NAME.npy is an array. The directory at the end
 * says where members are; every offset and length is held against the file before it is followed. Not for savez_compressed, nor
 * for files of 2 GiB and more, which have zip64's records. Checksums are not looked at.
 */
#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "generate.h"

struct npz {
    const char *path;
    const unsigned char *bytes;
    size_t size;
    size_t directory, entries; /* where the directory begins, how many members it has */
};

enum { END_BYTES = 22, ENTRY_BYTES = 46, LOCAL_BYTES = 30, MOST_COMMENT = 65535 };
enum { END_MAGIC = 0x06054b50, ENTRY_MAGIC = 0x02014b50, LOCAL_MAGIC = 0x04034b50 };

static uint32_t u16(const unsigned char *p) { return (uint32_t)p[0] | (uint32_t)p[1] << 8; }
static uint32_t u32(const unsigned char *p) { return u16(p) | u16(p + 2) << 16; }

/* Are there so many bytes at that place? */
static bool inside(const npz *f, size_t at, size_t bytes) { return at <= f->size && bytes <= f->size - at; }

static bool find_directory(npz *f) {
    size_t last = f->size > END_BYTES + MOST_COMMENT ? f->size - END_BYTES - MOST_COMMENT : 0;
    for (size_t at = f->size < END_BYTES ? 0 : f->size - END_BYTES + 1; at-- > last;) {
        const unsigned char *p = f->bytes + at;
        if (u32(p) != END_MAGIC || u16(p + 20) != f->size - at - END_BYTES) continue;
        f->entries = u16(p + 10);
        f->directory = u32(p + 16);
        if (f->entries == 0xffff || f->directory == 0xffffffff)
            return fail("%s: a zip64 archive, of 2 GiB or more; such files are not read here", f->path);
        return true;
    }
    return fail("%s: not a zip archive, as numpy.savez makes it", f->path);
}

npz *npz_open(const char *path) {
    npz *f = calloc(1, sizeof *f);
    if (!f) {
        fail("not enough memory");
        return NULL;
    }
    f->path = path;
    struct stat stat;
    int fd = open(path, O_RDONLY);
    bool opened = fd >= 0 && fstat(fd, &stat) == 0;
    if (!opened)
        fail("%s: %s", path, strerror(errno));
    else if (!S_ISREG(stat.st_mode) || stat.st_size == 0)
        opened = fail("%s: not a file with something in it", path);
    if (opened) {
        f->size = (size_t)stat.st_size;
        void *bytes = mmap(NULL, f->size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (bytes == MAP_FAILED)
            opened = fail("%s: %s", path, strerror(errno));
        else
            f->bytes = bytes;
    }
    if (fd >= 0) close(fd);
    if (opened && find_directory(f)) return f;
    npz_close(f);
    return NULL;
}

void npz_close(npz *f) {
    if (f && f->bytes) munmap((void *)(uintptr_t)f->bytes, f->size);
    free(f);
}

/* The member NAME.npy: where its bytes are and how many. */
static bool find_member(const npz *f, const char *name, size_t *at, size_t *bytes) {
    size_t length = strlen(name), entry = f->directory;
    for (size_t n = 0; n < f->entries; n++) {
        if (!inside(f, entry, ENTRY_BYTES) || u32(f->bytes + entry) != ENTRY_MAGIC)
            return fail("%s: the directory of the archive is damaged", f->path);
        const unsigned char *p = f->bytes + entry;
        size_t named = u16(p + 28), whole = ENTRY_BYTES + named + u16(p + 30) + u16(p + 32);
        if (!inside(f, entry, whole)) return fail("%s: the directory of the archive is damaged", f->path);
        entry += whole;
        if (named != length + 4 || memcmp(p + ENTRY_BYTES, name, length) != 0) continue;
        if (memcmp(p + ENTRY_BYTES + length, ".npy", 4) != 0) continue;
        if (u16(p + 10) != 0) return fail("%s: %s is compressed; use numpy.savez, which is not", f->path, name);
        size_t local = u32(p + 42);
        *bytes = u32(p + 20);
        if (local == 0xffffffff || *bytes == 0xffffffff)
            return fail("%s: a zip64 archive, of 2 GiB or more; such files are not read here", f->path);
        if (!inside(f, local, LOCAL_BYTES) || u32(f->bytes + local) != LOCAL_MAGIC)
            return fail("%s: %s is not where the directory of the archive says", f->path, name);
        *at = local + LOCAL_BYTES + u16(f->bytes + local + 26) + u16(f->bytes + local + 28);
        return inside(f, *at, *bytes) || fail("%s: the file ends inside of %s", f->path, name);
    }
    return fail("%s: there is no array %s in it", f->path, name);
}

bool npz_read(const npz *f, const char *name, const char *dtype, int dims, const int64_t *sizes, void *to) {
    size_t at = 0, bytes = 0, count = 1;
    if (!find_member(f, name, &at, &bytes)) return false;
    const unsigned char *p = f->bytes + at;
    if (bytes < 12 || memcmp(p, "\x93NUMPY", 6) != 0) return fail("%s: %s is not an array", f->path, name);
    size_t start = p[6] == 1 ? 10 : 12, header = start == 10 ? u16(p + 8) : u32(p + 8);
    if (header > bytes - start) return fail("%s: the file ends inside of %s", f->path, name);

    /* The header as numpy writes it, up to the padding after it. */
    char want[256];
    int used = snprintf(want, sizeof want, "{'descr': '%s', 'fortran_order': False, 'shape': (", dtype);
    const int begin = used;
    for (int n = 0; n < dims; n++) {
        count *= (size_t)sizes[n];
        used += snprintf(want + used, sizeof want - (size_t)used, "%s%lld%s", n ? " " : "", (long long)sizes[n],
                         n + 1 < dims || dims == 1 ? "," : "");
    }
    snprintf(want + used, sizeof want - (size_t)used, ")");
    if (header <= strlen(want) || memcmp(p + start, want, strlen(want)) != 0)
        return fail("%s: %s is not of the shape %s, dtype %s and C order", f->path, name, want + begin - 1, dtype);
    if (bytes - start - header != count * 4) return fail("%s: %s has not as many elements as it says", f->path, name);
    memcpy(to, p + start + header, count * 4);
    return true;
}
