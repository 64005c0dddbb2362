/* `attn plan`: how a problem would be computed, in words, with its tiles counted, and as a picture. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "inputs.h"
#include "patterns.h"
#include "svg.h"

typedef struct plan_settings {
    file_settings files;
    const char *svg;
    const char *pattern;
    int32_t sequence, head;
    int32_t *flashmask; /* made from the pattern */
} plan_settings;

#define AT(field) offsetof(plan_settings, field)

static const option options_plan[] = {
    {"svg", "FILE", "draw the tile map of one sequence and head", parse_text, AT(svg), 0},
    {"sequence", "B", "which sequence; default 0", parse_int, AT(sequence), 0},
    {"head", "H", "which query head; default 0", parse_int, AT(head), 0},
    {"flashmask-pattern", "NAME", "a FlashMask without a file; see below", parse_text, AT(pattern), 0},
    {"op", "OP", "forward (default), backward or append", parse_op, AT(files.common.problem.op), 0},
    {"dtype", "TYPE", "f32 (default), f16, bf16, f64, e4m3, e5m2", parse_dtype, AT(files.common.problem.dtype), 0},
    {0},
};

static const command plan_command = {
    "plan",
    "[OPTION]...",
    "Describes the plan of a problem: the kernel, its tiles, its splits, its workspace. The tile map says of\n"
    "every tile of the score matrix whether it is skipped, computed in full, or computed with its mask, and\n"
    "in which order.\n\n"
    "FlashMask patterns: causal-document, document, share-question, sliding-window, global-window,\n"
    "two-way-window, prefix-lm, prefix-document, random-eviction.\n",
    "attn plan --heads 32/8 --dim 128 --seqlen 4096 --causal\n"
    "attn plan --seqlen 1024 --causal --window 255,0 --svg tiles.svg\n"
    "attn plan --seqlen 2048 --flashmask-pattern share-question --svg tiles.svg\n"
    "attn plan --batch 4 --seqlen 1/32768 --used-kv used.npy --sequence 2 --svg tiles.svg\n",
    {{"Options", options_plan},
     {"Sizes", options_sizes},
     {"Mask and scores", options_problem},
     {"Lengths and FlashMask", options_lengths},
     {"Machine", options_machine},
     {0}},
};

/* Sizes come from options, and files must agree with them. */
static int fix_sizes(plan_settings *s) {
    const settings *c = &s->files.common;
    inputs *in = &s->files.in;
    const attn_problem *p = &c->problem;
    const int_pairs *lists[] = {&c->batch, &c->heads, &c->dim, &c->seqlen};
    for (int i = 0; i < 4; i++)
        if (lists[i]->count > 1) return tool_error(TOOL_USAGE, "plan: one problem at a time; lists are for bench");
    if (!(p->flags & (ATTN_VARLEN_Q | ATTN_VARLEN_KV))) inputs_fix(in, 'b', c->batch.at[0][0], "--batch");
    if (!(p->flags & ATTN_VARLEN_Q)) inputs_fix(in, 'q', c->seqlen.at[0][0], "--seqlen");
    if (!(p->flags & ATTN_VARLEN_KV)) inputs_fix(in, 'k', c->seqlen.at[0][1], "--seqlen");
    inputs_fix(in, 'H', c->heads.at[0][0], "--heads");
    inputs_fix(in, 'G', c->heads.at[0][1], "--heads");
    inputs_fix(in, 'd', c->dim.at[0][0], "--dim");
    inputs_fix(in, 'e', c->dim.at[0][1], "--dim");
    return TOOL_OK;
}

/* The last offset is the number of packed rows; the check of the plan sees to the rest. */
static int64_t packed_rows(const npy_array *cu) {
    return cu->header.count ? ((const int32_t *)cu->data)[cu->header.count - 1] : 0;
}

static int make_flashmask(plan_settings *s, attn_problem *p, attn_buffers *f) {
    const pattern *chosen = pattern_find(s->pattern);
    if (!chosen) return tool_error(TOOL_USAGE, "plan: no pattern '%s'; 'attn plan --help' lists them", s->pattern);
    if (s->files.in.path[IN_FLASHMASK]) return tool_error(TOOL_USAGE, "plan: --flashmask or --flashmask-pattern, not both");
    if (p->flags & (ATTN_VARLEN_Q | ATTN_VARLEN_KV) || p->max_q != p->max_kv)
        return tool_error(TOOL_USAGE, "plan: patterns are for sequences with as many keys as rows");
    if (!chosen->causal && (p->flags & ATTN_CAUSAL))
        return tool_error(TOOL_USAGE, "plan: the pattern %s goes without --causal", chosen->name);
    if (chosen->causal) p->flags |= ATTN_CAUSAL;
    p->flashmask_vectors = chosen->vectors;
    int64_t keys = (int64_t)p->batch * p->max_kv;
    s->flashmask = tool_alloc(keys, (size_t)chosen->vectors * sizeof *s->flashmask);
    if (!s->flashmask) return TOOL_RUNTIME;
    for (int64_t n = 0; n < keys; n++)
        chosen->fill((int32_t)(n % p->max_kv), p->max_kv, s->flashmask + n * chosen->vectors);
    f->flashmask = s->flashmask;
    return TOOL_OK;
}

/* What is in the picture, in a line. */
static void make_title(char *title, size_t size, const plan_settings *s, const attn_problem *p) {
    char mask[96] = "full";
    if (p->flags & ATTN_CAUSAL) strcpy(mask, "causal");
    if (p->flags & ATTN_WINDOW)
        snprintf(mask, sizeof mask, "%swindow %d, %d", p->flags & ATTN_CAUSAL ? "causal, " : "", p->window_left,
                 p->window_right);
    if (p->flashmask_vectors && s->pattern) snprintf(mask, sizeof mask, "FlashMask %s", s->pattern);
    if (p->flashmask_vectors && !s->pattern)
        snprintf(mask, sizeof mask, "FlashMask of %d%s", p->flashmask_vectors, p->flags & ATTN_CAUSAL ? ", causal" : "");
    snprintf(title, size, "%d query rows x %d keys, %s", p->max_q, p->max_kv, mask);
    if (p->batch > 1 || s->head) {
        size_t used = strlen(title);
        snprintf(title + used, size - used, "; sequence %d, head %d", s->sequence, s->head);
    }
}

static int describe_tiles(const plan_settings *s, const attn_plan *plan, const attn_problem *p, const attn_buffers *f) {
    tile_summary t;
    attn_status status = tiles_summarize(plan, f, s->sequence, s->head, &t);
    if (status == ATTN_UNSUPPORTED && !s->svg) return TOOL_OK; /* a plan without tiles has been described */
    if (status != ATTN_OK) return tool_status("plan", status);
    int64_t total = t.count[0] + t.count[1] + t.count[2];
    static const char *const names[3] = {"skipped", "full", "partial"};
    printf("tiles of sequence %d, head %d: %lld", s->sequence, s->head, (long long)total);
    for (int i = 0; i < 3; i++)
        printf(", %lld %s (%.1f%%)", (long long)t.count[i], names[i],
               total ? 100.0 * (double)t.count[i] / (double)total : 0);
    printf("\nchunks: %d\n", t.chunks);
    if (!s->svg) return TOOL_OK;
    char title[256];
    make_title(title, sizeof title, s, p);
    int code = tiles_draw(s->svg, title, plan, f, s->sequence, s->head, &t);
    if (code == TOOL_OK) printf("picture: %s\n", s->svg);
    return code;
}

static int plan_problem(plan_settings *s) {
    attn_problem p = s->files.common.problem;
    attn_buffers f = {.size = sizeof f};
    if (!p.dtype) p.dtype = ATTN_F32;
    int code = fix_sizes(s);
    if (code == TOOL_OK) code = inputs_load(&s->files.in, &p, &f);
    if (code != TOOL_OK) return code;
    if (p.flags & ATTN_VARLEN_Q) p.total_q = packed_rows(&s->files.in.array[IN_CU_Q]);
    if (p.flags & ATTN_VARLEN_KV) p.total_kv = packed_rows(&s->files.in.array[IN_CU_KV]);
    if (s->pattern) code = make_flashmask(s, &p, &f);
    if (code != TOOL_OK) return code;
    attn_context *context;
    attn_plan *plan = NULL;
    attn_status status = attn_context_create(&context, &s->files.common.config);
    if (status == ATTN_OK) status = attn_plan_create(&plan, context, &p);
    if (status != ATTN_OK) {
        code = tool_status("plan", status);
    } else {
        fputs(attn_plan_describe(plan), stdout);
        code = describe_tiles(s, plan, &p, &f);
    }
    attn_plan_destroy(plan);
    attn_context_destroy(context);
    return code;
}

int cmd_plan(int argc, char **argv) {
    plan_settings s = {0};
    int code = options_parse(&plan_command, &s, argc, argv);
    if (code == OPTIONS_GO) code = plan_problem(&s);
    inputs_free(&s.files.in);
    free(s.flashmask);
    return code;
}
