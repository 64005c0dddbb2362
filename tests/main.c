/*
 * The test runner: attn-tests [--list] [substring...]
 *
 * Runs the tests whose names contain any of the substrings (all of them without one), sorted by name, one line each with its
 * time. The last line is "N passed, N failed", with ", N not run" where tests said that they cannot be run here; the exit status is
 * 1 when a test failed. One that checks nothing, and does not say why, has failed. The name is printed before the test runs, so
 * that the last line before a crash says which one it was.
 */
#define _GNU_SOURCE
#include "test.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Failures of one test that are printed; the rest is only counted. */
enum { SHOWN = 10 };

static test_case *first;
static int failures;         /* of the running test */
static _Atomic bool checked; /* has it checked anything? Tests check in threads, too */
static const char *why_not;  /* it is not run; NULL: it is */
static char context[256];

void test_register(test_case *test) {
    test->next = first;
    first = test;
}

void test_context(const char *format, ...) {
    context[0] = 0;
    if (!format) return;
    va_list args;
    va_start(args, format);
    vsnprintf(context, sizeof context, format, args);
    va_end(args);
}

double test_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void test_skip(const char *why) { why_not = why; }

bool test_check(bool held, const char *file, int line, const char *format, ...) {
    checked = true;
    if (held) return true;
    if (failures++ >= SHOWN) return false;
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    printf("%s    %s:%d: %s%s%s%s\n", failures == 1 ? "\n" : "", file, line, text, context[0] ? " [" : "", context,
           context[0] ? "]" : "");
    return false;
}

bool test_close(double a, double b, double tolerance, const char *file, int line, const char *text) {
    return test_check(a == b || fabs(a - b) <= tolerance, file, line, "%s: %.17g against %.17g, off by %.3g, may be %.3g",
                      text, a, b, fabs(a - b), tolerance);
}

bool test_status(attn_status got, attn_status want, const char *detail, const char *file, int line, const char *text) {
    if (!test_check(got == want, file, line, "%s: %s instead of %s (detail: %s)", text, attn_status_name(got),
                    attn_status_name(want), attn_error_detail()))
        return false;
    return test_check(got == ATTN_OK || strstr(attn_error_detail(), detail) != NULL, file, line,
                      "%s: the detail \"%s\" does not contain \"%s\"", text, attn_error_detail(), detail);
}

static bool selected(const test_case *test, int count, char **substrings) {
    for (int i = 0; i < count; i++)
        if (strstr(test->name, substrings[i])) return true;
    return count == 0;
}

typedef enum outcome { PASSED, FAILED, NOT_RUN, OUTCOMES } outcome;

static outcome run(const test_case *test) {
    printf("%-64s ", test->name);
    fflush(stdout);
    failures = 0;
    checked = false;
    why_not = NULL;
    test_context(NULL);
    double start = test_seconds();
    test->run();
    double seconds = test_seconds() - start;
    if (checked && why_not) test_check(false, test->file, 0, "checked something, and then was left out: %s", why_not);
    if (!checked && !why_not) test_check(false, test->file, 0, "nothing is checked");
    if (failures > SHOWN) printf("    and %d more\n", failures - SHOWN);
    if (!checked)
        printf("not run: %s\n", why_not);
    else
        printf("%s %7.3f s\n", failures ? "FAILED" : "ok    ", seconds);
    fflush(stdout);
    return failures ? FAILED : checked ? PASSED : NOT_RUN;
}

static test_case *sort_by_name(test_case *list) {
    test_case *sorted = NULL;
    while (list) {
        test_case *test = list, **at = &sorted;
        list = list->next;
        while (*at && strcmp((*at)->name, test->name) < 0) at = &(*at)->next;
        test->next = *at;
        *at = test;
    }
    return sorted;
}

int main(int argc, char **argv) {
    bool list = argc > 1 && strcmp(argv[1], "--list") == 0;
    if (argc > 1 && argv[1][0] == '-' && !list) {
        fprintf(stderr, "usage: attn-tests [--list] [substring...]\n");
        return 2;
    }
    int arguments = list ? 2 : 1, count[OUTCOMES] = {0};
    first = sort_by_name(first);
    for (const test_case *test = first; test; test = test->next) {
        if (!selected(test, argc - arguments, argv + arguments)) continue;
        if (list)
            printf("%s\n", test->name);
        else
            count[run(test)]++;
    }
    if (list) return 0;
    if (count[PASSED] + count[FAILED] + count[NOT_RUN] == 0)
        fprintf(stderr, "no test has such a name; attn-tests --list shows them\n");
    printf("%d passed, %d failed", count[PASSED], count[FAILED]);
    if (count[NOT_RUN]) printf(", %d not run", count[NOT_RUN]);
    printf("\n");
    return count[FAILED] > 0 || count[PASSED] == 0;
}
