/*
 * The tuning file: which kernel was measured to be the fastest, on this kind of GPU, for a dtype and a dim of the table.
 *
 *     # a comment, up to the end of the line
 *     sm_90 bf16 d128 plain fwd_sm90_bf16_d128
 *     sm_90 bf16 d128 own   fwd_sm90_bf16_d128_own
 *     sm_90 bf16 d128 all   fwd_sm90_bf16_d128_all
 *
 * plain, own, all: what a line of variants.def has to take (`own`: Hopper's only). `attn tune --write` makes such files, and the environment's ATTN_TUNING names one, by its absolute path (a relative one would be whatever lies in the current
 * directory). A context reads it once, when it is made, so plans may be made by many threads.
 *
 * A file can make a run faster or slower, never different: it chooses among lines of the same family (FWD or FWD90), dtype, dim
 * and keys per tile, which all give the same bits. Anything else in it is an error that names the file and the line.
 */
#define _POSIX_C_SOURCE 200809L
#include "cuda.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

const char *const attn__cuda_takes_name[] = {"plain", "own", "all"};

/* "FILE:LINE: ..." */
static attn_status fail_at(const attn_cuda_tuning *t, int32_t number, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

static attn_status fail_at(const attn_cuda_tuning *t, int32_t number, const char *format, ...) {
    char text[224];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    return attn__fail(ATTN_INVALID, "%s:%d: %s", t->path, (int)number, text);
}

/* The words of a line as a row, as yet without its kernel. False: they make none. */
static bool parse_row(const char *text, attn_cuda_tuned *row, char name[64]) {
    char dtype[8], kind[8];
    int arch, dim, end = 0;
    int words = sscanf(text, "sm_%d %7s d%d %7s %63s %n", &arch, dtype, &dim, kind, name, &end);
    if (words != 5 || text[end]) return false;
    row->arch = arch;
    row->dim = dim;
    row->wanted = ATTN_TAKES_PLAIN;
    while (strcmp(kind, attn__cuda_takes_name[row->wanted]) != 0) {
        if (row->wanted++ == ATTN_TAKES_ALL) return false;
    }
    row->dtype = ATTN_DTYPE_DEFAULT;
    for (attn_dtype d = ATTN_F32; attn_dtype_size(d); d++) {
        if (strcmp(dtype, attn_dtype_name(d)) == 0) row->dtype = d;
    }
    return row->dtype != ATTN_DTYPE_DEFAULT;
}

/* Are two lines for the same dims? */
static bool has_dims_of(const attn_cuda_entry *e, const attn_cuda_entry *x) {
    return e->op == x->op && e->decode == x->decode && e->dtype == x->dtype && e->dim_qk == x->dim_qk &&
           e->most_v == x->most_v;
}

/* What the table would take for the row, and the dims of its kernel: of the lines the last. -1: it has none. */
static int first_choice(const attn_cuda_tuned *row, const attn_cuda_entry *like) {
    int choice = -1;
    for (int n = 0; n < ATTN_ENTRIES; n++) {
        const attn_cuda_entry *e = &attn__cuda_entries[n];
        if (has_dims_of(e, like) && attn__cuda_is_for(e, row->arch) && e->takes >= row->wanted) choice = n;
    }
    return choice;
}

/* May this kernel stand in for the table's first choice? */
static attn_status check_row(const attn_cuda *cuda, const attn_cuda_tuned *row, const char *name) {
    const attn_cuda_tuning *t = &cuda->tuning;
    if (row->entry < 0) return fail_at(t, row->line, "kernel=%s: `attn info` lists those there are", name);
    const attn_cuda_entry *e = &attn__cuda_entries[row->entry];
    int first = first_choice(row, e);
    if (!e->dtype || e->dtype != row->dtype || e->dim != row->dim || !attn__cuda_is_for(e, row->arch) || first < 0)
        return fail_at(t, row->line, "kernel=%s: is not for sm_%d %s d%d", name, row->arch, attn_dtype_name(row->dtype),
                       row->dim);
    if (e->takes < row->wanted)
        return fail_at(t, row->line, "kernel=%s: does not take every feature; want %s", name,
                       attn__cuda_takes_name[e->takes]);
    if (e->bn != attn__cuda_entries[first].bn)
        return fail_at(t, row->line, "kernel=%s: has tiles of %d keys, %s of %d: results would change", name, e->bn,
                       attn__cuda_entries[first].name, attn__cuda_entries[first].bn);
    if (e->hopper != attn__cuda_entries[first].hopper)
        return fail_at(t, row->line, "kernel=%s: is of another family than %s: results would change", name,
                       attn__cuda_entries[first].name);
    for (int32_t n = 0; n < cuda->state->gpus; n++) {
        const attn_gpu *gpu = &cuda->state->gpu[n];
        if (gpu->arch == row->arch && !attn__cuda_runs_on(e, gpu))
            return fail_at(t, row->line, "kernel=%s: wants %zu bytes of shared memory, %s has %d", name, e->shared_bytes,
                           gpu->name, (int)gpu->shared_bytes);
    }
    for (int32_t n = 0; n < t->count; n++) {
        const attn_cuda_tuned *r = &t->row[n];
        if (r->arch == row->arch && has_dims_of(&attn__cuda_entries[r->entry], e) && r->wanted == row->wanted)
            return fail_at(t, row->line, "sm_%d %s d%d %s: stands in line %d already", row->arch,
                           attn_dtype_name(row->dtype), row->dim, attn__cuda_takes_name[row->wanted], (int)r->line);
    }
    return ATTN_OK;
}

/* One line; the text may be changed. */
static attn_status take_line(attn_cuda *cuda, char *text, int32_t number) {
    attn_cuda_tuning *t = &cuda->tuning;
    attn_cuda_tuned row = {.entry = -1, .line = number};
    char name[64];
    text[strcspn(text, "#")] = 0;
    text += strspn(text, " \t\r");
    if (!*text) return ATTN_OK;
    if (!parse_row(text, &row, name))
        return fail_at(t, number, "'%.60s': want a line like sm_90 bf16 d128 plain KERNEL", text);
    for (int n = 0; n < ATTN_ENTRIES; n++) {
        const attn_cuda_entry *e = &attn__cuda_entries[n];
        if (e->dim && e->op == ATTN_FORWARD && !e->decode && strcmp(e->name, name) == 0) row.entry = n;
    }
    RETURN_IF_ERROR(check_row(cuda, &row, name));
    if (t->count == ATTN_MOST_TUNED) return fail_at(t, number, "more than %d lines", ATTN_MOST_TUNED);
    t->row[t->count++] = row;
    return ATTN_OK;
}

/* A part of the file, with the beginning of a line from the part before it. */
typedef struct line_reader {
    char text[256];
    size_t length;
    int32_t number;
} line_reader;

static attn_status take_bytes(attn_cuda *cuda, line_reader *r, const char *bytes, ssize_t count) {
    for (ssize_t n = 0; n < count; n++) {
        if (bytes[n] == '\n') {
            r->text[r->length] = 0;
            r->length = 0;
            RETURN_IF_ERROR(take_line(cuda, r->text, r->number++));
            continue;
        }
        if (!bytes[n]) return fail_at(&cuda->tuning, r->number, "a zero byte: no text file");
        if (r->length == sizeof r->text - 1)
            return fail_at(&cuda->tuning, r->number, "a line of more than %zu bytes", sizeof r->text - 1);
        r->text[r->length++] = bytes[n];
    }
    return ATTN_OK;
}

static attn_status read_file(attn_cuda *cuda, int fd) {
    line_reader r = {.number = 1};
    char bytes[1024];
    for (;;) {
        errno = EIO;
        ssize_t count = attn__fault(ATTN_FAULT_FILE) ? -1 : read(fd, bytes, sizeof bytes);
        if (count < 0 && errno == EINTR) continue;
        RETURN_IF(count < 0, ATTN_SYSTEM, "ATTN_TUNING=%s: cannot be read: %s", cuda->tuning.path, strerror(errno));
        if (count == 0) break;
        RETURN_IF_ERROR(take_bytes(cuda, &r, bytes, count));
    }
    return r.length ? take_bytes(cuda, &r, "\n", 1) : ATTN_OK;
}

attn_status attn__cuda_tuning_read(attn_cuda *cuda) {
    const char *path = getenv("ATTN_TUNING");
    if (!path || !*path) return ATTN_OK;
    RETURN_IF(*path != '/' || strlen(path) >= ATTN_TUNING_PATH, ATTN_INVALID,
              "ATTN_TUNING=%s: want an absolute path of less than %d bytes", path, ATTN_TUNING_PATH);
    strcpy(cuda->tuning.path, path);
    errno = EIO; /* what a fault leaves to be reported */
    int fd = attn__fault(ATTN_FAULT_FILE) ? -1 : open(path, O_RDONLY | O_CLOEXEC);
    RETURN_IF(fd < 0, errno == ENOENT || errno == ENOTDIR ? ATTN_INVALID : ATTN_SYSTEM,
              "ATTN_TUNING=%s: cannot be opened: %s", path, strerror(errno));
    attn_status status = read_file(cuda, fd);
    close(fd); /* nothing was written: it cannot fail in a way that matters */
    return status;
}

int attn__cuda_tuned(const attn_cuda *cuda, const attn_gpu *gpu, const attn_cuda_entry *instead_of,
                     attn_cuda_takes wanted) {
    for (int32_t n = 0; n < cuda->tuning.count; n++) {
        const attn_cuda_tuned *r = &cuda->tuning.row[n];
        if (r->arch == gpu->arch && has_dims_of(&attn__cuda_entries[r->entry], instead_of) && r->wanted == wanted)
            return r->entry;
    }
    return -1;
}
