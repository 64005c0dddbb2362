/*
 * Fault injection: a build with ATTN_FAULTS lets a test make the n-th allocation, thread start or file operation fail, once or
 * from then on. In every other build the checks are constants and vanish.
 */
#ifndef ATTN_FAULT_H
#define ATTN_FAULT_H

typedef enum attn_fault_kind { ATTN_FAULT_ALLOC, ATTN_FAULT_THREAD, ATTN_FAULT_FILE, ATTN_FAULT_KINDS } attn_fault_kind;

#ifdef ATTN_FAULTS
/* Lets `after` operations of that kind pass and fails the next one; persistent: and all later ones. after < 0: off. */
void attn__fault_arm(attn_fault_kind kind, long after, int persistent);
/* How many operations of that kind were seen since the last arming, and how many of them failed. */
long attn__fault_seen(attn_fault_kind kind);
long attn__fault_hit(attn_fault_kind kind);
/* Should this operation fail? */
int attn__fault(attn_fault_kind kind);
#else
#define attn__fault(kind) 0
#endif

#endif
