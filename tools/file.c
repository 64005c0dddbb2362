/* File operations that a test can make fail; see file.h. */
#define _POSIX_C_SOURCE 200809L
#include "file.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include "fault.h"

int file_faulty(int result) {
    if (!attn__fault(ATTN_FAULT_FILE)) return result;
    errno = EIO;
    return -1;
}

int file_open(const char *path, int flags) { return file_faulty(0) ? -1 : open(path, flags | O_CLOEXEC, 0666); }
int file_close(int fd) { return file_faulty(close(fd)); }

bool file_read(int fd, void *data, size_t bytes, off_t offset) {
    while (bytes) {
        ssize_t n = file_faulty(0) ? -1 : pread(fd, data, bytes, offset);
        if (n < 0 && errno == EINTR) continue;
        if (n == 0) errno = EIO; /* the file has shrunk since fstat */
        if (n <= 0) return false;
        data = (char *)data + n;
        bytes -= (size_t)n;
        offset += n;
    }
    return true;
}

bool file_write(int fd, const void *data, size_t bytes) {
    while (bytes) {
        ssize_t n = file_faulty(0) ? -1 : write(fd, data, bytes);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        data = (const char *)data + n;
        bytes -= (size_t)n;
    }
    return true;
}
