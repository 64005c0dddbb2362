/*
 * Generation with a KV cache in pages: a prompt is appended and attended to in one call, then one token after the other.
 * Keys and queries are rotated (RoPE) on the way. The pages lie in any order; the same steps with a contiguous cache give
 * the same bits, which is checked.
 */
#include <attn.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { BATCH = 2, PROMPT = 20, STEPS = 8, CAPACITY = 32, HEADS_Q = 4, HEADS_KV = 2, DIM = 16, PAGE = 4 };
enum { PAGES_EACH = CAPACITY / PAGE, PAGES = BATCH * PAGES_EACH };

static float cache_k[CAPACITY * BATCH * HEADS_KV * DIM], cache_v[CAPACITY * BATCH * HEADS_KV * DIM];
static float q[BATCH * PROMPT * HEADS_Q * DIM], o[BATCH * PROMPT * HEADS_Q * DIM];
static float k_new[BATCH * PROMPT * HEADS_KV * DIM], v_new[BATCH * PROMPT * HEADS_KV * DIM];
static float rotary_cos[CAPACITY * DIM / 2], rotary_sin[CAPACITY * DIM / 2];

static void fill(float *x, size_t count, uint32_t *state) {
    for (size_t i = 0; i < count; i++) {
        *state = *state * 1664525 + 1013904223;
        x[i] = (float)(*state >> 8) / (1 << 23) - 1;
    }
}

/* Appends `rows` new tokens to every sequence and attends from each of them to all that the cache then holds. */
static attn_status step(attn_context *context, int rows, int32_t *used, const int32_t *page_table) {
    attn_problem problem = {
        .size = sizeof problem,
        .op = ATTN_FORWARD,
        .dtype = ATTN_F32,
        .flags = ATTN_CAUSAL | ATTN_USED_KV | ATTN_APPEND | ATTN_ROTARY,
        .batch = BATCH,
        .heads_q = HEADS_Q,
        .heads_kv = HEADS_KV,
        .dim_qk = DIM,
        .max_q = rows,
        .max_kv = CAPACITY,
        .max_new = rows,
        .rotary_dim = DIM,
        .rotary_len = CAPACITY,
        .page_size = page_table ? PAGE : 0,
        .num_pages = page_table ? PAGES : 0,
    };
    int cache_rows = page_table ? PAGE : CAPACITY; /* rows of a page, or of a sequence */
    attn_buffers buffers = {
        .size = sizeof buffers,
        .q = attn_dense(q, rows, HEADS_Q, DIM),
        .k = attn_dense(cache_k, cache_rows, HEADS_KV, DIM),
        .v = attn_dense(cache_v, cache_rows, HEADS_KV, DIM),
        .o = attn_dense(o, rows, HEADS_Q, DIM),
        .k_new = attn_dense(k_new, rows, HEADS_KV, DIM),
        .v_new = attn_dense(v_new, rows, HEADS_KV, DIM),
        .used_kv = used,
        .page_table = page_table,
        .rotary_cos = rotary_cos,
        .rotary_sin = rotary_sin,
    };
    attn_status status = attn_forward(context, &problem, &buffers, NULL);
    for (int b = 0; b < BATCH && status == ATTN_OK; b++) used[b] += rows;
    return status;
}

/* The prompt and all steps; `last` receives the output of the last one. */
static attn_status generate(attn_context *context, const int32_t *page_table, float *last) {
    int32_t used[BATCH] = {0};
    uint32_t state = 7;
    attn_status status = ATTN_OK;
    for (int t = 0; t <= STEPS && status == ATTN_OK; t++) {
        size_t rows = t == 0 ? PROMPT : 1;
        fill(q, BATCH * rows * HEADS_Q * DIM, &state); /* a model would compute these from the tokens */
        fill(k_new, BATCH * rows * HEADS_KV * DIM, &state);
        fill(v_new, BATCH * rows * HEADS_KV * DIM, &state);
        status = step(context, (int)rows, used, page_table);
    }
    memcpy(last, o, BATCH * HEADS_Q * DIM * sizeof *last);
    return status;
}

int main(void) {
    static float paged[BATCH * HEADS_Q * DIM], contiguous[BATCH * HEADS_Q * DIM];
    int32_t page_table[PAGES]; /* [BATCH][PAGES_EACH]: the pages of the two sequences are interleaved, last one first */
    for (int b = 0; b < BATCH; b++)
        for (int n = 0; n < PAGES_EACH; n++) page_table[b * PAGES_EACH + n] = PAGES - 1 - (n * BATCH + b);
    for (int t = 0; t < CAPACITY; t++) {
        for (int x = 0; x < DIM / 2; x++) {
            double angle = t * pow(10000, -2.0 * x / DIM);
            rotary_cos[t * (DIM / 2) + x] = (float)cos(angle);
            rotary_sin[t * (DIM / 2) + x] = (float)sin(angle);
        }
    }

    attn_context *context;
    attn_status status = attn_context_create(&context, NULL);
    if (status == ATTN_OK) status = generate(context, page_table, paged);
    if (status == ATTN_OK) status = generate(context, NULL, contiguous);
    attn_context_destroy(context);
    if (status != ATTN_OK) {
        fprintf(stderr, "%s: %s\n", attn_status_name(status), attn_error_detail());
        return 1;
    }
    int same = memcmp(paged, contiguous, sizeof paged) == 0;
    printf("%d sequences, prompt of %d, %d tokens one by one: o[0] = %g\n", BATCH, PROMPT, STEPS, (double)paged[0]);
    printf("pages of %d rows in any order and a contiguous cache give %s bits\n", PAGE, same ? "the same" : "DIFFERENT");
    return !same;
}
