/*
 * Many sequences that begin with the same text: its keys are stored once and read once for all of them, not for each.
 *
 * A step of decoding is a few calls. The queries and new keys are rotated; all queries attend to the shared keys, since none of
 * them may see less than the other; each attends to the keys of its own, appended to on the way; and the results are merged by
 * their lse, which is exact.
 *
 * The shared keys are cut into chunks, packed "sequences" of a batch, so that a GPU has something to do everywhere. The rows of each are
 * the queries of all sequences and of all heads that share a KV head, as a rotation writes them: [head][sequence][dim]. Every chunk reads
 * the same ones, by a stride of 0.
 *
 * Chunks are of a fixed size, and there are never fewer than PAD sequences, the last ones nobody's: how a row is worked may depend on how
 * many its "sequence" has, more than 16 or not, and so would on the others of the batch. Checked: the result is what attention to all keys in one
 * go gives, and a sequence has the same bits alone.
 */
#include <attn.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { BATCH = 40, PAD = 32, PADDED = (BATCH + PAD - 1) / PAD * PAD };
enum { SHARED = 600, OWN = 40, TOTAL = SHARED + OWN };
enum { CHUNK = 256, CHUNKS = (SHARED + CHUNK - 1) / CHUNK }; /* a GPU: 4096 keys, say */
enum { HEADS_Q = 4, HEADS_KV = 2, SHARE = HEADS_Q / HEADS_KV, DIM = 16, ROW_Q = HEADS_Q * DIM, ROW_KV = HEADS_KV * DIM };

static float shared_k[SHARED * ROW_KV], shared_v[SHARED * ROW_KV];
static float own_k[BATCH * OWN * ROW_KV], own_v[BATCH * OWN * ROW_KV];
static float all_k[BATCH * TOTAL * ROW_KV], all_v[BATCH * TOTAL * ROW_KV];
static float q[BATCH * ROW_Q], k_new[BATCH * ROW_KV], v_new[BATCH * ROW_KV];
static float rotary_cos[TOTAL * DIM / 2], rotary_sin[TOTAL * DIM / 2];
static int32_t used[BATCH]; /* keys of its own that each sequence has */

static void fill(float *x, size_t count, uint32_t *state) {
    for (size_t i = 0; i < count; i++) {
        *state = *state * 1664525 + 1013904223;
        x[i] = (float)(*state >> 8) / (1 << 23) - 1;
    }
}

static attn_problem problem_of(uint32_t flags, int32_t batch, int32_t max_q, int32_t max_kv) {
    return (attn_problem){
        .size = sizeof(attn_problem),
        .op = ATTN_FORWARD,
        .dtype = ATTN_F32,
        .flags = flags,
        .batch = batch,
        .heads_q = HEADS_Q,
        .heads_kv = HEADS_KV,
        .dim_qk = DIM,
        .max_q = max_q,
        .max_kv = max_kv,
    };
}

/* Rotates a row of each of `count` sequences, from `first` on, for the position that its new token has. */
static attn_status rotate(attn_context *context, int first, int count, const float *from, int heads, attn_tensor to) {
    int32_t pos[BATCH];
    for (int b = 0; b < count; b++) pos[b] = SHARED + used[first + b];
    attn_rotary_args args = {
        .size = sizeof args,
        .dtype = ATTN_F32,
        .batch = count,
        .rows = 1,
        .heads = heads,
        .dim = DIM,
        .rotary_dim = DIM,
        .rotary_len = TOTAL,
        .x = attn_dense((void *)(uintptr_t)from, 1, heads, DIM),
        .y = to,
        .cos = rotary_cos,
        .sin = rotary_sin,
        .pos = pos,
    };
    return attn_rotary(context, &args, NULL);
}

/* A step of the sequences [first, first + count); o: [PADDED][HEADS_Q][DIM]. */
static attn_status step(attn_context *context, int first, int count, float *o) {
    static float turned_q[PADDED * ROW_Q], turned_k[BATCH * ROW_KV]; /* [HEADS_Q][rows][DIM]; [count][HEADS_KV][DIM] */
    static float o_shared[CHUNKS * PADDED * ROW_Q], lse_shared[CHUNKS * HEADS_Q * PADDED];
    static float o_own[PADDED * ROW_Q], lse_own[HEADS_Q * PADDED];
    const int32_t rows = (count + PAD - 1) / PAD * PAD, each = rows * HEADS_Q; /* of a part's lse */
    const attn_tensor by_head = {turned_q, {DIM, DIM, rows * DIM}};            /* as [rows][HEADS_Q][DIM] */
    int32_t cu_chunk[CHUNKS + 1], cu_each[BATCH + 1];
    for (int n = 0; n <= CHUNKS; n++) cu_chunk[n] = n < CHUNKS ? n * CHUNK : SHARED;
    for (int n = 0; n <= count; n++) cu_each[n] = n;

    attn_status status = rotate(context, first, count, q + first * ROW_Q, HEADS_Q, by_head);
    if (status == ATTN_OK)
        status = rotate(context, first, count, k_new + first * ROW_KV, HEADS_KV, attn_dense(turned_k, 1, HEADS_KV, DIM));
    if (status != ATTN_OK) return status;

    /* The shared keys: as many query heads as KV heads, and the rows of a head are those of all that share it. */
    attn_problem problem = problem_of(ATTN_VARLEN_KV, CHUNKS, rows * SHARE, CHUNK);
    problem.heads_q = HEADS_KV;
    problem.total_kv = SHARED;
    attn_buffers shared = {
        .size = sizeof shared,
        .q = {turned_q, {0, DIM, rows * SHARE * DIM}},
        .k = attn_dense(shared_k, SHARED, HEADS_KV, DIM),
        .v = attn_dense(shared_v, SHARED, HEADS_KV, DIM),
        .o = {o_shared, {each * DIM, DIM, rows * SHARE * DIM}},
        .lse = lse_shared, /* [CHUNKS][HEADS_KV][SHARE * rows], which is [CHUNKS][HEADS_Q][rows] */
        .cu_kv = cu_chunk,
    };
    status = attn_forward(context, &problem, &shared, NULL);
    if (status != ATTN_OK) return status;

    /* The keys of their own: a row each, packed, so that lse is [HEADS_Q][rows], and a new key; rows of nobody get lse = -inf. */
    problem = problem_of(ATTN_VARLEN_Q | ATTN_USED_KV | ATTN_APPEND, count, 1, OWN);
    problem.total_q = rows;
    problem.max_new = 1;
    attn_buffers own = {
        .size = sizeof own,
        .q = by_head,
        .k = attn_dense(own_k + first * OWN * ROW_KV, OWN, HEADS_KV, DIM),
        .v = attn_dense(own_v + first * OWN * ROW_KV, OWN, HEADS_KV, DIM),
        .o = attn_dense(o_own, rows, HEADS_Q, DIM),
        .lse = lse_own,
        .cu_q = cu_each,
        .used_kv = used + first,
        .k_new = attn_dense(turned_k, 1, HEADS_KV, DIM),
        .v_new = attn_dense(v_new + first * ROW_KV, 1, HEADS_KV, DIM),
    };
    status = attn_forward(context, &problem, &own, NULL);
    if (status != ATTN_OK) return status;

    attn_tensor o_parts[CHUNKS + 1] = {[CHUNKS] = own.o};
    const void *lse_parts[CHUNKS + 1] = {[CHUNKS] = lse_own};
    for (int n = 0; n < CHUNKS; n++) {
        o_parts[n] = (attn_tensor){o_shared + n * each * DIM, {0, DIM, rows * DIM}};
        lse_parts[n] = lse_shared + n * each;
    }
    attn_merge_args merge = {
        .size = sizeof merge,
        .dtype = ATTN_F32,
        .parts = CHUNKS + 1,
        .batch = 1,
        .rows = rows,
        .heads = HEADS_Q,
        .dim = DIM,
        .o_parts = o_parts,
        .lse_parts = lse_parts,
        .o = attn_dense(o, rows, HEADS_Q, DIM),
    };
    return attn_merge(context, &merge, NULL);
}

/* The same with a copy of the shared keys in front of each sequence's own, in one call. */
static attn_status step_plain(attn_context *context, float *o) {
    int32_t used_all[BATCH];
    for (int b = 0; b < BATCH; b++) {
        float *k = all_k + b * TOTAL * ROW_KV, *v = all_v + b * TOTAL * ROW_KV;
        memcpy(k, shared_k, sizeof shared_k);
        memcpy(v, shared_v, sizeof shared_v);
        memcpy(k + SHARED * ROW_KV, own_k + b * OWN * ROW_KV, OWN * ROW_KV * sizeof *k);
        memcpy(v + SHARED * ROW_KV, own_v + b * OWN * ROW_KV, OWN * ROW_KV * sizeof *v);
        used_all[b] = SHARED + used[b];
    }
    attn_problem problem = problem_of(ATTN_USED_KV | ATTN_APPEND | ATTN_ROTARY, BATCH, 1, TOTAL);
    problem.max_new = 1;
    problem.rotary_dim = DIM;
    problem.rotary_len = TOTAL;
    attn_buffers buffers = {
        .size = sizeof buffers,
        .q = attn_dense(q, 1, HEADS_Q, DIM),
        .k = attn_dense(all_k, TOTAL, HEADS_KV, DIM),
        .v = attn_dense(all_v, TOTAL, HEADS_KV, DIM),
        .o = attn_dense(o, 1, HEADS_Q, DIM),
        .used_kv = used_all,
        .k_new = attn_dense(k_new, 1, HEADS_KV, DIM),
        .v_new = attn_dense(v_new, 1, HEADS_KV, DIM),
        .rotary_cos = rotary_cos,
        .rotary_sin = rotary_sin,
    };
    return attn_forward(context, &problem, &buffers, NULL);
}

int main(void) {
    static float o[PADDED * ROW_Q], plain[BATCH * ROW_Q], alone[PADDED * ROW_Q];
    uint32_t state = 5;
    fill(shared_k, SHARED * ROW_KV, &state);
    fill(shared_v, SHARED * ROW_KV, &state);
    fill(own_k, BATCH * OWN * ROW_KV, &state);
    fill(own_v, BATCH * OWN * ROW_KV, &state);
    fill(q, BATCH * ROW_Q, &state);
    fill(k_new, BATCH * ROW_KV, &state);
    fill(v_new, BATCH * ROW_KV, &state);
    for (int b = 0; b < BATCH; b++) used[b] = b * 7 % OWN; /* the first one has none yet */
    for (int t = 0; t < TOTAL; t++) {
        for (int x = 0; x < DIM / 2; x++) {
            double angle = t * pow(10000, -2.0 * x / DIM);
            rotary_cos[t * (DIM / 2) + x] = (float)cos(angle);
            rotary_sin[t * (DIM / 2) + x] = (float)sin(angle);
        }
    }

    attn_context *context;
    attn_status status = attn_context_create(&context, NULL);
    if (status == ATTN_OK) status = step_plain(context, plain);
    if (status == ATTN_OK) status = step(context, 0, BATCH, o);
    int same = 1;
    for (int b = 0; b < BATCH && status == ATTN_OK; b++) { /* appends the same key once more */
        status = step(context, b, 1, alone);
        same = same && memcmp(alone, o + b * ROW_Q, ROW_Q * sizeof *o) == 0;
    }
    attn_context_destroy(context);
    if (status != ATTN_OK) {
        fprintf(stderr, "%s: %s\n", attn_status_name(status), attn_error_detail());
        return 1;
    }
    double worst = 0;
    for (int i = 0; i < BATCH * ROW_Q; i++)
        if (!(fabs((double)o[i] - plain[i]) <= worst)) worst = fabs((double)o[i] - plain[i]);
    printf("%d sequences, %d shared keys and up to %d of their own: largest difference from one call %g\n", BATCH, SHARED,
           OWN, worst);
    printf("each sequence has %s bits alone\n", same ? "the same" : "DIFFERENT");
    return !(worst < 1e-6 && same);
}
