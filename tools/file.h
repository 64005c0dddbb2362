/*
 * File operations of the command line. Each counts as one that can be made to fail (fault.h), and says why by errno, as the system's
 * own do.
 */
#ifndef ATTN_FILE_H
#define ATTN_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

/* The result of an operation, or -1 with errno = EIO where it is to fail. */
int file_faulty(int result);

int file_open(const char *path, int flags); /* -1: not */
int file_close(int fd);                     /* closes in any case; only the result can be made to fail */

/* So many bytes from an offset on, no fewer; all bytes. */
bool file_read(int fd, void *data, size_t bytes, off_t offset);
bool file_write(int fd, const void *data, size_t bytes);

#endif
