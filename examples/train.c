/*
 * Forward and backward: gradient descent on q, k and v until attention gives the output that is asked for. Before that, the
 * gradient is compared with a finite difference, in double.
 */
#include <attn.h>
#include <math.h>
#include <stdio.h>

enum { ROWS = 12, HEADS = 2, DIM = 8, COUNT = ROWS * HEADS * DIM, STEPS = 200 };

/* What is learned, in one array so that a step is one loop: q, k and v. */
static double x[3 * COUNT], gradient[3 * COUNT];
static double o[COUNT], d_o[COUNT], target[COUNT], lse[HEADS * ROWS];

static void fill(double *values, size_t count) {
    static uint32_t state = 3;
    for (size_t i = 0; i < count; i++) {
        state = state * 1664525 + 1013904223;
        values[i] = (double)(state >> 8) / (1 << 23) - 1;
    }
}

/* loss = |o - target|^2 / 2, and its gradient where backward is set. */
static attn_status evaluate(attn_context *context, int backward, double *loss) {
    attn_problem problem = {
        .size = sizeof problem,
        .op = ATTN_FORWARD,
        .dtype = ATTN_F64,
        .flags = ATTN_CAUSAL,
        .batch = 1,
        .heads_q = HEADS,
        .heads_kv = HEADS,
        .dim_qk = DIM,
        .max_q = ROWS,
        .max_kv = ROWS,
    };
    attn_buffers buffers = {
        .size = sizeof buffers,
        .q = attn_dense(x, ROWS, HEADS, DIM),
        .k = attn_dense(x + COUNT, ROWS, HEADS, DIM),
        .v = attn_dense(x + 2 * COUNT, ROWS, HEADS, DIM),
        .o = attn_dense(o, ROWS, HEADS, DIM),
        .lse = lse, /* forward writes it, backward reads it */
    };
    attn_status status = attn_forward(context, &problem, &buffers, NULL);
    *loss = 0;
    for (int i = 0; i < COUNT; i++) {
        d_o[i] = o[i] - target[i];
        *loss += d_o[i] * d_o[i] / 2;
    }
    if (status != ATTN_OK || !backward) return status;
    problem.op = ATTN_BACKWARD;
    buffers.d_o = attn_dense(d_o, ROWS, HEADS, DIM);
    buffers.d_q = attn_dense(gradient, ROWS, HEADS, DIM);
    buffers.d_k = attn_dense(gradient + COUNT, ROWS, HEADS, DIM);
    buffers.d_v = attn_dense(gradient + 2 * COUNT, ROWS, HEADS, DIM);
    return attn_backward(context, &problem, &buffers, NULL);
}

/* Relative difference of the gradient along a random direction from (loss(x + h d) - loss(x - h d)) / 2h. */
static attn_status compare(attn_context *context, double *difference) {
    static double direction[3 * COUNT];
    const double h = 1e-5;
    double loss, up = 0, down = 0, slope = 0;
    fill(direction, 3 * COUNT);
    attn_status status = evaluate(context, 1, &loss);
    for (int i = 0; i < 3 * COUNT; i++) slope += gradient[i] * direction[i];
    for (int i = 0; i < 3 * COUNT; i++) x[i] += h * direction[i];
    if (status == ATTN_OK) status = evaluate(context, 0, &up);
    for (int i = 0; i < 3 * COUNT; i++) x[i] -= 2 * h * direction[i];
    if (status == ATTN_OK) status = evaluate(context, 0, &down);
    for (int i = 0; i < 3 * COUNT; i++) x[i] += h * direction[i];
    *difference = fabs((up - down) / (2 * h) - slope) / fabs(slope);
    return status;
}

int main(void) {
    attn_context *context;
    double difference = 0, first = 0, loss = 0;
    fill(x, 3 * COUNT);
    fill(target, COUNT);
    attn_status status = attn_context_create(&context, NULL);
    if (status == ATTN_OK) status = compare(context, &difference);
    for (int t = 0; t <= STEPS && status == ATTN_OK; t++) {
        status = evaluate(context, 1, &loss);
        if (t == 0) first = loss;
        for (int i = 0; i < 3 * COUNT; i++) x[i] -= 0.2 * gradient[i];
    }
    attn_context_destroy(context);
    if (status != ATTN_OK) {
        fprintf(stderr, "%s: %s\n", attn_status_name(status), attn_error_detail());
        return 1;
    }
    printf("gradient and finite difference differ by %.1e\n", difference);
    printf("loss %.3f, after %d steps %.3f\n", first, STEPS, loss);
    return !(difference < 1e-6 && loss < first / 10);
}
