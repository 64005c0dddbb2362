/*
 * Counters in a workspace that nobody clears before the launch: a node for that takes as long as a small launch.
 *
 * A counter is a tag of 46 bits and, below it, how many are done. Who makes it full puts 0 there again, behind the tag, so after a run
 * every counter that it used is ready for the next, of whatever plan, as a graph replays them. Memory that holds anything else is no counter yet: who
 * meets it there starts over, and the first to put the tag and its own number in the place of what it has seen makes it one.
 *
 * What a workspace holds does not matter, unless it has the tag with a number behind it: one chance in 2^46 for a counter, if it is noise, and
 * no run leaves that behind whose lengths hold still while it runs. A kernel that is broken off takes its CUDA context with it, and so the workspace.
 */
#ifndef ATTN_COUNTER_CUH
#define ATTN_COUNTER_CUH

#include "device.cuh"
#include "ptx.cuh"

enum { COUNTER_BITS = 18 }; /* below the tag */
#define COUNTER_TAG UINT64_C(0xd1b54a32d19c0000)
static_assert(COUNTER_TAG << (64 - COUNTER_BITS) == 0, "the tag has no room for a number");
static_assert((1 << 30) / (ATTN_DECODE_SPAN * ATTN_DECODE_SUPER) < 1 << COUNTER_BITS,
              "an item has more supers than are counted");

DEVICE bool is_counter(uint64_t x) { return x >> COUNTER_BITS == COUNTER_TAG >> COUNTER_BITS; }

/* Of what was no counter: `seen` is what was there last. Returns it as it was before `done` was added. */
static __device__ __noinline__ uint64_t make_counter(uint64_t *at, uint64_t seen, uint32_t done) {
    while (!is_counter(seen)) {
        const uint64_t found = atom_cas_acq_rel_gpu(at, seen, COUNTER_TAG + done);
        if (found == seen) return COUNTER_TAG;
        seen = found;
    }
    return atom_add_acq_rel_gpu(at, done); /* somebody else has made it one, and it stays one */
}

/*
 * One thread of a block has added `done`: what the block wrote before, and a barrier after it, is seen by who adds later. Are all done now? That is
 * said once.
 */
DEVICE bool count_to(uint64_t *at, uint32_t done, uint32_t all) {
    uint64_t before = atom_add_acq_rel_gpu(at, done);
    if (!is_counter(before)) before = make_counter(at, before + done, done);
    if (before + done != COUNTER_TAG + all) return false;
    st_relaxed_gpu(at, COUNTER_TAG);
    return true;
}

#endif
