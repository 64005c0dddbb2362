/*
 * The forward pass of `ref`: for each query row the textbook softmax in two passes over its allowed keys.
 */
#include "ref.h"

/*
 * Turns r->score into probabilities and returns lse. A row whose scores are all -inf (a bias may hold them) counts as one
 * without keys, C1.
 */
static double softmax(attn_ref *r, int32_t h) {
    bool has_sink = (r->p->flags & ATTN_SINK) != 0, has_key = false;
    double max = has_sink ? r->f->sink[h] : -INFINITY, sum = 0;
    for (int32_t n = 0; n < r->count; n++) {
        if (r->score[n] != -INFINITY) has_key = true;
        if (r->score[n] > max) max = r->score[n];
    }
    if (!has_key) max = 0;
    for (int32_t n = 0; n < r->count; n++) sum += r->score[n] = exp(r->score[n] - max);
    if (!has_key) return -INFINITY;
    if (has_sink) sum += exp(r->f->sink[h] - max);
    for (int32_t n = 0; n < r->count; n++) r->score[n] /= sum;
    return max + log(sum);
}

static void write_o(attn_ref *r, int32_t h, int32_t i) {
    const attn_problem *p = r->p;
    double o[ATTN_MAX_DIM] = {0};
    for (int32_t n = 0; n < r->count; n++)
        attn__ref_add(o, attn__ref_dropped(r, h, i, r->key[n]) ? 0 : r->score[n] * r->keep,
                      r->v + (int64_t)r->key[n] * r->pad_v, r->pad_v);
    int64_t at = attn__q_offset(p, &r->f->o, &r->s, i, h);
    for (int32_t x = 0; x < p->dim_v; x++) attn__store(p->out_dtype, r->f->o.data, at + x, o[x]);
}

/* One row of probs, past the end of the sequence too. */
static void write_probs(const attn_ref *r, int32_t h, int32_t i, int32_t count) {
    const attn_matrix *m = &r->f->probs;
    for (int32_t j = 0; j < r->p->max_kv; j++) attn__store(r->lse_dtype, m->data, attn__matrix_at(m, r->s.b, h, i, j), 0);
    for (int32_t n = 0; n < count; n++) {
        double sign = attn__ref_dropped(r, h, i, r->key[n]) ? -1 : 1;
        attn__store(r->lse_dtype, m->data, attn__matrix_at(m, r->s.b, h, i, r->key[n]), sign * r->score[n]);
    }
}

static void forward_head(attn_ref *r, int32_t h) {
    for (int32_t i = 0; i < r->s.sq; i++) {
        attn__ref_scores(r, h, i);
        double lse = softmax(r, h);
        write_o(r, h, i);
        if (r->f->lse) attn__store(r->lse_dtype, r->f->lse, attn__lse_index(r->p, &r->s, i, h), lse);
        if (r->f->probs.data) write_probs(r, h, i, r->count);
    }
    for (int32_t i = r->s.sq; r->f->probs.data && i < r->p->max_q; i++) write_probs(r, h, i, 0);
}

void attn__ref_forward(attn_ref *r) {
    if (r->p->max_q == 0) return; /* nothing to write, however many sequences and heads there are */
    for (int32_t b = 0; b < r->p->batch; b++) {
        if (attn__seq(r->p, r->f, b).sq == 0 && !r->f->probs.data) continue;
        for (int32_t h = 0; h < r->p->heads_q; h++) {
            attn__ref_load(r, b, h / (r->p->heads_q / r->p->heads_kv));
            forward_head(r, h);
        }
    }
}
