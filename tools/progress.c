/*
 * A progress bar for commands that take longer than a breath. It writes to stderr, and only when that is a terminal, so logs
 * and pipes stay clean.
 */
#define _POSIX_C_SOURCE 200809L

#include <stdio.h>
#include <time.h>
#include <unistd.h>

#include "tool.h"

enum { WIDTH = 32 };

static bool drawn;
static double last_draw;

double tool_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void progress(const char *what, long done, long total) {
    double now = tool_seconds();
    if (total <= 0 || !isatty(STDERR_FILENO) || (drawn && done < total && now - last_draw < 0.1)) return;
    drawn = true;
    last_draw = now;
    char bar[WIDTH + 1];
    int filled = done >= total ? WIDTH : (int)(WIDTH * (double)done / (double)total);
    for (int i = 0; i < WIDTH; i++) bar[i] = i < filled ? '#' : '.';
    bar[WIDTH] = 0;
    fprintf(stderr, "\r%s [%s] %ld/%ld\033[K", what, bar, done, total);
    fflush(stderr);
}

void progress_end(void) {
    if (!drawn) return;
    drawn = false;
    fputs("\r\033[K", stderr);
    fflush(stderr);
}
