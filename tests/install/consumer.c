/* A program outside the tree. One key: the answer is that key's value, whatever the query. */
#include <attn.h>
#include <stdio.h>

int main(void) {
    float q[2] = {1, 2}, k[2] = {3, 4}, v[2] = {5, 6}, o[2] = {0, 0};
    attn_problem problem = {.size = sizeof problem, .dtype = ATTN_F32, .batch = 1, .heads_q = 1, .heads_kv = 1};
    problem.dim_qk = 2;
    problem.max_q = problem.max_kv = 1;
    attn_buffers buffers = {.size = sizeof buffers, .q = attn_dense(q, 1, 1, 2), .k = attn_dense(k, 1, 1, 2)};
    buffers.v = attn_dense(v, 1, 1, 2);
    buffers.o = attn_dense(o, 1, 1, 2);
    attn_context *context;
    attn_status status = attn_context_create(&context, NULL);
    if (status == ATTN_OK) status = attn_forward(context, &problem, &buffers, NULL);
    attn_context_destroy(context);
    if (status != ATTN_OK) printf("%s: %s\n", attn_status_name(status), attn_error_detail());
    printf("C, header %d, library %d: o = %g %g\n", ATTN_VERSION, attn_version(), (double)o[0], (double)o[1]);
    return !(status == ATTN_OK && attn_version() == ATTN_VERSION && o[0] == 5 && o[1] == 6);
}
