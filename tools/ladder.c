/* Lines of a table of kernels, read from a file or taken from the library: see ladder.h. */
#define _POSIX_C_SOURCE 200809L
#include "ladder.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

#include "file.h"
#include "tool.h"

static const char *const knob_names[KNOB_COUNT] = {
#define KNOB(name) #name,
    KNOBS(KNOB)
#undef KNOB
};

/* ---- files ---- */

char *read_whole(const char *path) {
    struct stat st;
    int fd = file_open(path, O_RDONLY);
    if (fd < 0) {
        tool_error(TOOL_RUNTIME, "%s: cannot be opened: %s", path, strerror(errno));
        return NULL;
    }
    char *text = NULL;
    if (file_faulty(fstat(fd, &st)) != 0)
        tool_error(TOOL_RUNTIME, "%s: cannot be examined: %s", path, strerror(errno));
    else
        text = tool_alloc(st.st_size + 1, 1);
    bool whole = text && file_read(fd, text, (size_t)st.st_size, 0);
    if (text && !whole) tool_error(TOOL_RUNTIME, "%s: cannot be read: %s", path, strerror(errno));
    close(fd);
    if (whole) {
        text[st.st_size] = 0;
        return text;
    }
    free(text);
    return NULL;
}

/* ---- reading lines ---- */

static bool is_sensible(const rung *r) {
    const int32_t *k = r->knob;
    for (int n = 0; n < KNOB_COUNT; n++) {
        bool is_size = n <= KNOB_ctas || n == KNOB_qf || n == KNOB_kf || n == KNOB_vf;
        if (k[n] < (is_size ? 1 : 0) || k[n] > 1024) return false;
    }
    return k[KNOB_warps] <= 32 && k[KNOB_bm] % (16 * k[KNOB_warps]) == 0 && k[KNOB_bn] % 16 == 0 && k[KNOB_dim] % 16 == 0 &&
           k[KNOB_dimv] % 16 == 0 && k[KNOB_eager] <= 2 &&
           k[KNOB_held] * 32 <= k[KNOB_dim] * (int32_t)attn_dtype_size(r->dtype);
}

/* "FWD(name, 80, BF16, 128, ...)" */
static const char *parse_line(const char *line, size_t length, rung *r) {
    char text[256], dtype[8];
    int used = 0, arch;
    if (length >= sizeof text) return "a shorter line is wanted";
    memcpy(text, line, length);
    text[length] = 0;
    if (sscanf(text, "FWD( %63[a-z0-9_] , %d , %7[A-Z0-9] %n", r->name, &arch, dtype, &used) != 3)
        return "FWD(name, arch, dtype, ... is wanted";
    r->arch = arch;
    r->dtype = ATTN_DTYPE_DEFAULT;
    for (attn_dtype d = ATTN_F32; attn_dtype_size(d); d++)
        if (strcasecmp(dtype, attn_dtype_name(d)) == 0) r->dtype = d;
    if (r->dtype == ATTN_DTYPE_DEFAULT) return "its dtype is not known";
    const char *at = text + used;
    for (int n = 0; n < KNOB_COUNT; n++) {
        int number;
        used = 0;
        if (sscanf(at, ", %d %n", &number, &used) != 1 || !used) return "it has too few numbers";
        r->knob[n] = number;
        at += used;
    }
    if (strcmp(at, ")") != 0) return "it does not end after the last number";
    return is_sensible(r) ? NULL : "a number in it is out of range";
}

const char *ladder_parse(ladder *l, const char *text, int *number) {
    *number = 0;
    while (*text) {
        size_t length = strcspn(text, "\n");
        ++*number;
        if (strncmp(text, "FWD(", 4) == 0) {
            if (l->count == MOST_RUNGS) return "there are too many lines";
            rung *r = &l->at[l->count];
            *r = (rung){.entry = -1};
            const char *wrong = parse_line(text, length, r);
            if (wrong) return wrong;
            for (int n = 0; n < l->count; n++)
                if (strcmp(l->at[n].name, r->name) == 0) return "its name is taken";
            l->count++;
        }
        text += length + (text[length] == '\n');
    }
    return NULL;
}

int ladder_read(ladder *l, const char *folder) {
    char path[PATH_MAX];
    int number;
    if ((size_t)snprintf(path, sizeof path, "%s/tune.def", folder) >= sizeof path)
        return tool_error(TOOL_USAGE, "%.64s...: the path is too long", folder);
    char *text = read_whole(path);
    if (!text) return TOOL_RUNTIME;
    const char *wrong = ladder_parse(l, text, &number);
    free(text);
    return wrong ? tool_error(TOOL_USAGE, "%s:%d: %s", path, number, wrong) : TOOL_OK;
}

void ladder_add_library(ladder *l) {
    static const rung rungs[] = {
#define PIECE(...)
#define BWD(...)
#define BWD90(...)
#define FWD(id, least, type, ...)                                                                                          \
    {.name = #id, .arch = (least), .dtype = ATTN_##type, .knob = {__VA_ARGS__}, .entry = ATTN_ENTRY_##id},
#define FWD90(id, type, most, mostv, v, n, consumers, stages, qbuf, takes)                                                 \
    {.name = #id,                                                                                                          \
     .arch = 90,                                                                                                           \
     .dtype = ATTN_##type,                                                                                                 \
     .knob = {[KNOB_dim] = (most) > (mostv) ? (most) : (mostv),                                                            \
              [KNOB_dimv] = (v),                                                                                           \
              [KNOB_bm] = 64 * (consumers),                                                                                \
              [KNOB_bn] = (n),                                                                                             \
              [KNOB_warps] = 4 * ((consumers) + 1),                                                                        \
              [KNOB_ctas] = 1,                                                                                             \
              [KNOB_all] = ATTN_TAKES_##takes == ATTN_TAKES_ALL},                                                          \
     .entry = ATTN_ENTRY_##id,                                                                                             \
     .hopper = true},
#include "cuda/variants.def"
#undef FWD
#undef FWD90
#undef BWD
#undef BWD90
#undef PIECE
    };
    for (size_t n = 0; n < sizeof rungs / sizeof *rungs && l->count < MOST_RUNGS; n++) l->at[l->count++] = rungs[n];
}

/* ---- comparing lines ---- */

attn_cuda_entry rung_entry(const rung *r) {
    const int32_t *k = r->knob;
    if (r->hopper) return attn__cuda_entries[r->entry]; /* stages and buffers of Q are no knobs */
    return (attn_cuda_entry){
        .name = r->name,
        .file = r->name,
        .arch = r->arch,
        .dtype = r->dtype,
        .dim_qk = k[KNOB_dim],
        .most_v = k[KNOB_dim],
        .dim = k[KNOB_dim],
        .dim_v = k[KNOB_dimv],
        .bm = k[KNOB_bm],
        .bn = k[KNOB_bn],
        .warps = k[KNOB_warps],
        .takes = k[KNOB_all] ? ATTN_TAKES_ALL : ATTN_TAKES_PLAIN,
        .shared_bytes = ATTN_TILE_BYTES(r->dtype, k[KNOB_bm], k[KNOB_bn], k[KNOB_dim], k[KNOB_dimv], k[KNOB_eager])};
}

void ladder_keep(ladder *l, const attn_cuda_entry *like, const attn_problem *p, const attn_gpu *gpu) {
    int kept = 0;
    for (int n = 0; n < l->count; n++) {
        attn_cuda_entry e = rung_entry(&l->at[n]);
        if (e.dtype == like->dtype && e.dim == like->dim && attn__cuda_serves(&e, p, true) && attn__cuda_runs_on(&e, gpu))
            l->at[kept++] = l->at[n];
    }
    l->count = kept;
}

static int differences(const rung *a, const rung *b) {
    int count = 0;
    for (int n = 0; n < KNOB_COUNT; n++) count += a->knob[n] != b->knob[n];
    return count;
}

int ladder_from(const ladder *l, int index) {
    int from = -1, least = KNOB_COUNT + 1;
    for (int n = 0; n < index; n++) {
        int count = differences(&l->at[n], &l->at[index]);
        if (count > least || l->at[n].hopper != l->at[index].hopper) continue;
        from = n;
        least = count;
    }
    return from;
}

void rung_changes(const rung *from, const rung *to, char *text, size_t bytes) {
    size_t used = 0;
    *text = 0;
    for (int n = 0; n < KNOB_COUNT && used < bytes; n++) {
        if (from->knob[n] == to->knob[n]) continue;
        used += (size_t)snprintf(text + used, bytes - used, "%s%s %d>%d", used ? ", " : "", knob_names[n], from->knob[n],
                                 to->knob[n]);
    }
}
