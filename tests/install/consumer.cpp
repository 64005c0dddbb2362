// The same from C++: the header compiles there, the functions have C linkage, and an error is told in words.
#include <attn.h>

#include <cstdio>
#include <cstring>
#include <vector>

int main() {
    std::vector<double> q{1, 2}, k{3, 4}, v{5, 6}, o(2);
    attn_problem problem{};
    problem.size = sizeof problem;
    problem.dtype = ATTN_F64;
    problem.batch = problem.heads_q = problem.heads_kv = problem.max_q = problem.max_kv = 1;
    problem.dim_qk = 2;
    problem.flags = ATTN_CAUSAL;
    attn_buffers buffers{};
    buffers.size = sizeof buffers;
    buffers.q = attn_dense(q.data(), 1, 1, 2);
    buffers.k = attn_dense(k.data(), 1, 1, 2);
    buffers.v = attn_dense(v.data(), 1, 1, 2);
    buffers.o = attn_dense(o.data(), 1, 1, 2);

    attn_context *context = nullptr;
    attn_status status = attn_context_create(&context, nullptr);
    if (status == ATTN_OK) status = attn_forward(context, &problem, &buffers, nullptr);
    problem.dim_qk = 577;
    attn_status refused = status == ATTN_OK ? attn_forward(context, &problem, &buffers, nullptr) : status;
    attn_context_destroy(context);
    std::printf("C++, %s: o = %g %g; then %s: %s\n", attn_status_name(status), o[0], o[1], attn_status_name(refused),
                attn_error_detail());
    bool right = status == ATTN_OK && o[0] == 5 && o[1] == 6;
    return !(right && refused == ATTN_INVALID && std::strstr(attn_error_detail(), "577"));
}
