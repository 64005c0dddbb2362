/*
 * The count-down behind fault.h, for the tests: each kind of operation has a number of successes left. Atomic, because
 * operations come from many threads at once; a test that wants to know which one fails uses one thread.
 */
#include "fault.h"

#ifdef ATTN_FAULTS

#include <stdatomic.h>

typedef struct counter {
    _Atomic long after; /* operations that pass; negative: off */
    _Atomic int persistent;
    _Atomic long seen, hit;
} counter;

static counter counters[ATTN_FAULT_KINDS] = {{.after = -1}, {.after = -1}, {.after = -1}};

void attn__fault_arm(attn_fault_kind kind, long after, int persistent) {
    counter *c = &counters[kind];
    c->after = -1; /* off while the rest changes */
    c->persistent = persistent;
    c->seen = 0;
    c->hit = 0;
    c->after = after;
}

long attn__fault_seen(attn_fault_kind kind) { return counters[kind].seen; }
long attn__fault_hit(attn_fault_kind kind) { return counters[kind].hit; }

int attn__fault(attn_fault_kind kind) {
    counter *c = &counters[kind];
    long index = c->seen++, after = c->after;
    int fails = after >= 0 && (c->persistent ? index >= after : index == after);
    if (fails) c->hit++;
    return fails;
}

#endif
