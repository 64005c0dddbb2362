/*
 * Causal attention with grouped heads: plan once, ask for the workspace, run as often as needed. At the end one row is
 * computed the naive way and compared.
 */
#include <attn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { BATCH = 2, ROWS = 300, HEADS_Q = 8, HEADS_KV = 2, DIM = 64 };

/* Numbers in [-1, 1], the same in every run. */
static float *random_floats(size_t count) {
    static uint32_t state = 1;
    float *x = malloc(count * sizeof *x);
    for (size_t i = 0; x && i < count; i++) {
        state = state * 1664525 + 1013904223;
        x[i] = (float)(state >> 8) / (1 << 23) - 1;
    }
    return x;
}

static int check(attn_status status) {
    if (status != ATTN_OK) fprintf(stderr, "%s: %s\n", attn_status_name(status), attn_error_detail());
    return status == ATTN_OK;
}

/* Largest difference of o in row i of head h, sequence b, from softmax(scale * q k^T) v in double. */
static double naive_difference(const float *q, const float *k, const float *v, const float *o, int b, int i, int h) {
    int kv_head = h / (HEADS_Q / HEADS_KV);
    const float *q_row = q + (((size_t)b * ROWS + i) * HEADS_Q + h) * DIM;
    const float *o_row = o + (((size_t)b * ROWS + i) * HEADS_Q + h) * DIM;
    double sum = 0, expected[DIM] = {0}, worst = 0;
    for (int j = 0; j <= i; j++) {
        size_t key = (((size_t)b * ROWS + j) * HEADS_KV + kv_head) * DIM;
        double s = 0;
        for (int x = 0; x < DIM; x++) s += (double)q_row[x] * k[key + x];
        double p = exp(s / sqrt(DIM));
        sum += p;
        for (int x = 0; x < DIM; x++) expected[x] += p * v[key + x];
    }
    for (int x = 0; x < DIM; x++) worst = fmax(worst, fabs(o_row[x] - expected[x] / sum));
    return worst;
}

int main(void) {
    attn_problem problem = {
        .size = sizeof problem,
        .op = ATTN_FORWARD,
        .dtype = ATTN_F32,
        .flags = ATTN_CAUSAL,
        .batch = BATCH,
        .heads_q = HEADS_Q,
        .heads_kv = HEADS_KV,
        .dim_qk = DIM,
        .max_q = ROWS,
        .max_kv = ROWS,
    };
    float *q = random_floats(BATCH * ROWS * HEADS_Q * DIM), *o = random_floats(BATCH * ROWS * HEADS_Q * DIM);
    float *k = random_floats(BATCH * ROWS * HEADS_KV * DIM), *v = random_floats(BATCH * ROWS * HEADS_KV * DIM);
    float *lse = random_floats(BATCH * HEADS_Q * ROWS);

    attn_context *context = NULL;
    attn_plan *plan = NULL;
    void *workspace = NULL;
    int ok = q && k && v && o && lse;
    ok = ok && check(attn_context_create(&context, NULL));
    ok = ok && check(attn_plan_create(&plan, context, &problem));
    if (ok) {
        size_t bytes = (attn_plan_workspace(plan) + 64) / 64 * 64; /* a multiple of the alignment, and never 0 */
        printf("%s", attn_plan_describe(plan));
        workspace = aligned_alloc(64, bytes);
        attn_buffers buffers = {
            .size = sizeof buffers,
            .q = attn_dense(q, ROWS, HEADS_Q, DIM),
            .k = attn_dense(k, ROWS, HEADS_KV, DIM),
            .v = attn_dense(v, ROWS, HEADS_KV, DIM),
            .o = attn_dense(o, ROWS, HEADS_Q, DIM),
            .lse = lse,
            .workspace = workspace,
            .workspace_size = bytes,
        };
        ok = workspace && check(attn_run(plan, &buffers, NULL));
    }
    if (ok) {
        double difference = naive_difference(q, k, v, o, BATCH - 1, ROWS - 1, HEADS_Q - 1);
        printf("last row of the last head: off by %.1e from the naive way\n", difference);
        ok = difference < 1e-6;
    }
    attn_plan_destroy(plan);
    attn_context_destroy(context);
    free(workspace);
    free(q);
    free(k);
    free(v);
    free(o);
    free(lse);
    return !ok;
}
