/*
 * The test harness. TEST(name) { ... } registers itself; the checks below report file and line and let the test go on, so
 * that one run shows everything that is wrong. A test that cannot go on returns by itself:
 *
 *     TEST(c1_row_without_key_gives_zero) {
 *         CHECK(o[0] == 0);
 *         CHECK_CLOSE(lse, expected, 1e-6);
 *         CHECK_STATUS(attn_forward(...), ATTN_INVALID, "heads_kv=");
 *         if (!CHECK(p != NULL)) return;
 *     }
 *
 * Names begin with what they show: c1_ ... c6_ for the contract, s01_ ... s11_ for the semantics, as in attn.h.
 */
#ifndef TEST_H
#define TEST_H

#include <stdbool.h>

#include "attn.h"

typedef struct test_case {
    const char *name, *file;
    void (*run)(void);
    struct test_case *next;
} test_case;

void test_register(test_case *test);

/* Each returns whether the check held. */
bool test_check(bool held, const char *file, int line, const char *format, ...) __attribute__((format(printf, 4, 5)));
bool test_close(double a, double b, double tolerance, const char *file, int line, const char *text);
bool test_status(attn_status got, attn_status want, const char *detail, const char *file, int line, const char *text);

/* This test cannot be run here, and why: it is counted apart, and may return without a check. */
void test_skip(const char *why);

/* A word for the failures that follow, such as the case of a table: shown with each of them. NULL: none. */
void test_context(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Seconds of a clock that only moves forward. */
double test_seconds(void);

#define TEST(name)                                                                                                         \
    static void test_##name(void);                                                                                         \
    __attribute__((constructor)) static void register_##name(void) {                                                       \
        static test_case self = {#name, __FILE__, test_##name, 0};                                                         \
        test_register(&self);                                                                                              \
    }                                                                                                                      \
    static void test_##name(void)

#define CHECK(condition) test_check((condition), __FILE__, __LINE__, "%s", #condition)

/* Like CHECK, with a text of its own, printf style. */
#define CHECK_SAY(condition, ...) test_check((condition), __FILE__, __LINE__, __VA_ARGS__)

/* |a - b| <= tolerance; NaN is close to nothing, an infinity to itself. */
#define CHECK_CLOSE(a, b, tolerance) test_close((a), (b), (tolerance), __FILE__, __LINE__, #a " ~ " #b)

/* The status, and that the detail text contains `detail`; "" asks nothing of it. */
#define CHECK_STATUS(expression, status, detail)                                                                           \
    test_status((expression), (status), (detail), __FILE__, __LINE__, #expression)
#define CHECK_OK(expression) CHECK_STATUS(expression, ATTN_OK, "")

#endif
