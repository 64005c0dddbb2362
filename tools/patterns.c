/*
 * FlashMask patterns, each a function from a key to the rows that may not see it. Sequences are square; documents and
 * windows are fixed shares of the length, chosen so that a picture shows them well.
 */
#include "patterns.h"

#include <stddef.h>
#include <string.h>

/* Where documents end, in hundredths of the sequence. */
static const int32_t document_ends[] = {30, 45, 75, 85, 100};

/* [*begin, *end): the document of key j. */
static void document(int32_t j, int32_t n, int32_t *begin, int32_t *end) {
    *begin = *end = 0;
    for (int i = 0; *end <= j; i++) {
        *begin = *end;
        *end = (int32_t)((int64_t)n * document_ends[i] / 100);
    }
}

static void causal_document(int32_t j, int32_t n, int32_t *v) {
    int32_t begin;
    document(j, n, &begin, &v[0]);
}

static void whole_document(int32_t j, int32_t n, int32_t *v) { document(j, n, &v[1], &v[0]); }

/* Each half is a question, two fifths of it, and three answers that see the question but not each other. */
static void share_question(int32_t j, int32_t n, int32_t *v) {
    int32_t begin = j < n / 2 ? 0 : n / 2, length = j < n / 2 ? n / 2 : n - n / 2;
    int32_t fifth = (int32_t)((int64_t)(j - begin) * 5 / length);
    v[0] = fifth < 2 ? begin + length : begin + (int32_t)(((int64_t)length * (fifth + 1) + 4) / 5);
}

static void sliding_window(int32_t j, int32_t n, int32_t *v) { v[0] = j + n / 5; }

static void global_window(int32_t j, int32_t n, int32_t *v) {
    v[0] = j < n / 10 ? n : j + n / 5;
    v[1] = n;
}

/* To both sides; the first keys are seen by all rows, and the first rows see all keys. */
static void two_way_window(int32_t j, int32_t n, int32_t *v) {
    int32_t first = n / 10;
    v[0] = j < first ? n : j + n / 5;
    v[1] = n;
    v[2] = first;
    v[3] = j - n / 5 + 1;
}

static void prefix(int32_t j, int32_t begin, int32_t end, int32_t *v) {
    v[0] = end;
    v[1] = j < begin + (end - begin) * 2 / 5 ? begin : j;
}

static void prefix_lm(int32_t j, int32_t n, int32_t *v) { prefix(j, 0, n, v); }

static void prefix_document(int32_t j, int32_t n, int32_t *v) {
    int32_t begin, end;
    document(j, n, &begin, &end);
    prefix(j, begin, end, v);
}

/* Keys leave a cache at a time that looks like chance. */
static void random_eviction(int32_t j, int32_t n, int32_t *v) {
    uint32_t x = (uint32_t)j * UINT32_C(2654435761);
    x = (x ^ x >> 15) * UINT32_C(2246822519);
    v[0] = j + 1 + (int32_t)((x >> 8) % (uint32_t)n);
}

const pattern patterns[] = {
    {"causal-document", "documents one after the other, causal in each", true, 1, causal_document},
    {"document", "documents, each sees all of itself", false, 2, whole_document},
    {"share-question", "answers see their question, not each other", true, 1, share_question},
    {"sliding-window", "the last fifth", true, 1, sliding_window},
    {"global-window", "a window, and the first keys for everybody", true, 2, global_window},
    {"two-way-window", "a window to both sides, and the first keys and rows", false, 4, two_way_window},
    {"prefix-lm", "a prefix seen by all, then causal", false, 2, prefix_lm},
    {"prefix-document", "the same in each document", false, 2, prefix_document},
    {"random-eviction", "keys leave at random", true, 1, random_eviction},
    {0},
};

const pattern *pattern_find(const char *name) {
    for (const pattern *p = patterns; p->name; p++)
        if (strcmp(p->name, name) == 0) return p;
    return NULL;
}
