/* Options, --help and messages for the commands of `attn`; see tool.h. */
#define _POSIX_C_SOURCE 200809L

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fault.h"
#include "tool.h"

/* ---- messages ---- */

int tool_error(int code, const char *format, ...) {
    va_list args;
    fputs("attn: ", stderr);
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
    return code;
}

int tool_status(const char *what, attn_status status) {
    int code = status == ATTN_INVALID || status == ATTN_UNSUPPORTED ? TOOL_USAGE : TOOL_RUNTIME;
    return tool_error(code, "%s: %s: %s", what, attn_status_name(status), attn_error_detail());
}

void *tool_alloc(int64_t count, size_t bytes_each) {
    size_t bytes;
    void *memory = NULL;
    bool fits = count >= 0 && !__builtin_mul_overflow((size_t)count, bytes_each, &bytes) && bytes <= PTRDIFF_MAX;
    if (fits && !attn__fault(ATTN_FAULT_ALLOC)) memory = malloc(bytes ? bytes : 1);
    if (!memory) tool_error(TOOL_RUNTIME, "not enough memory for %lld elements of %zu bytes", (long long)count, bytes_each);
    return memory;
}

void tool_json(const char *text) {
    putchar('"');
    for (; *text; text++) {
        if (*text == '"' || *text == '\\') putchar('\\');
        putchar((unsigned char)*text < ' ' ? ' ' : *text);
    }
    putchar('"');
}

int tool_flush(void) {
    if (fflush(stdout) == 0 && !ferror(stdout)) return TOOL_OK;
    return tool_error(TOOL_RUNTIME, "standard output: %s", strerror(errno));
}

/* ---- values ---- */

const char *parse_switch(const char *text, void *target) {
    (void)text;
    *(bool *)target = true;
    return NULL;
}

/* The number that text begins with; what follows it, or NULL if there is none that fits. */
static const char *take_int(const char *text, int32_t *number) {
    char *end;
    errno = 0;
    long value = strtol(text, &end, 10);
    if (end == text || errno || value < INT32_MIN || value > INT32_MAX) return NULL;
    *number = (int32_t)value;
    return end;
}

const char *parse_int(const char *text, void *target) {
    text = take_int(text, target);
    return text && !*text ? NULL : "a whole number";
}

const char *parse_u64(const char *text, void *target) {
    char *end;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 0);
    if (end == text || *end || errno || strchr(text, '-')) return "a whole number from 0 to 2^64 - 1";
    *(uint64_t *)target = value;
    return NULL;
}

const char *parse_real(const char *text, void *target) {
    char *end;
    double value = strtod(text, &end);
    if (end == text || *end) return "a number";
    *(double *)target = value;
    return NULL;
}

const char *parse_text(const char *text, void *target) {
    *(const char **)target = text;
    return *text ? NULL : "a text that is not empty";
}

const char *parse_dtype(const char *text, void *target) {
    for (attn_dtype dtype = ATTN_F32; attn_dtype_size(dtype); dtype++) {
        if (strcmp(text, attn_dtype_name(dtype)) != 0) continue;
        *(attn_dtype *)target = dtype;
        return NULL;
    }
    return "f32, f16, bf16, f64, e4m3, e5m2 or i8";
}

const char *parse_dtypes(const char *text, void *target) {
    dtype_list *list = target;
    char one[16];
    int used;
    list->count = 0;
    do {
        if (list->count == MAX_DTYPES) return "a shorter list";
        if (sscanf(text, "%15[^,]%n", one, &used) != 1) return "a dtype or a list of them";
        const char *wanted = parse_dtype(one, &list->at[list->count++]);
        if (wanted) return wanted;
        text += used;
    } while (*text++ == ',');
    return text[-1] ? "a dtype or a list of them" : NULL;
}

const char *op_name(attn_op op) {
    static const char *const names[] = {"forward", "backward", "append"};
    return names[op];
}

const char *parse_op(const char *text, void *target) {
    for (attn_op op = ATTN_FORWARD; op <= ATTN_KV_APPEND; op++) {
        if (strcmp(text, op_name(op)) != 0) continue;
        *(attn_op *)target = op;
        return NULL;
    }
    return "forward, backward or append";
}

const char *parse_pairs(const char *text, void *target) {
    static const char *const wanted = "a number, a pair such as 32/8, or a list of them";
    int_pairs *pairs = target;
    pairs->count = 0;
    do {
        if (pairs->count == MAX_PAIRS) return "a shorter list";
        int32_t *pair = pairs->at[pairs->count++];
        text = take_int(text, &pair[0]);
        pair[1] = pair[0];
        if (text && *text == '/') text = take_int(text + 1, &pair[1]);
        if (!text || (*text && *text != ',')) return wanted;
    } while (*text++);
    return NULL;
}

static const char *parse_counts(const char *text, void *target) {
    const char *wanted = parse_pairs(text, target);
    return wanted || strchr(text, '/') ? "a number or a list of numbers" : NULL;
}

static const char *parse_backend(const char *text, void *target) {
    static const char *const names[] = {"auto", "ref", "cpu", "cuda"};
    for (int i = 0; i < 4; i++) {
        if (strcmp(text, names[i]) != 0) continue;
        *(attn_backend_id *)target = (attn_backend_id)i;
        return NULL;
    }
    return "auto, ref, cpu or cuda";
}

static const char *parse_window(const char *text, void *target) {
    attn_problem *p = target;
    text = take_int(text, &p->window_left);
    if (text) text = *text == ',' || *text == '/' ? take_int(text + 1, &p->window_right) : NULL;
    return text && !*text ? NULL : "two whole numbers such as 255,0 (-1: open)";
}

/* ---- shared options ---- */

#define AT(field) offsetof(settings, field)

const option options_machine[] = {
    {"backend", "NAME", "auto (default: cpu), ref, cpu or cuda", parse_backend, AT(config.backend), 0},
    {"threads", "N", "threads; default: ATTN_NUM_THREADS, else every CPU", parse_int, AT(config.threads), 0},
    {0},
};

const option options_problem[] = {
    {"causal", NULL, "row i sees the keys up to i + sk - sq", NULL, 0, ATTN_CAUSAL},
    {"window", "L,R", "keys L before to R after the diagonal; -1: open", parse_window, AT(problem), ATTN_WINDOW},
    {"scale", "X", "factor of q.k; default 1/sqrt(dim)", parse_real, AT(problem.scale), ATTN_SCALE},
    {"softcap", "C", "scores become C*tanh(s/C)", parse_real, AT(problem.softcap), 0},
    {"dropout", "P", "probability of dropping", parse_real, AT(problem.dropout), 0},
    {"precise", NULL, "f32: computed in double, rounded once", NULL, 0, ATTN_PRECISE},
    {"precise-few", NULL, "f32, cpu: in double what weighs few keys", NULL, 0, ATTN_PRECISE_FEW},
    {"unordered", NULL, "backward: d_q may be summed in any order", NULL, 0, ATTN_UNORDERED},
    {"seed", "N", "seed of dropout, or of random data", parse_u64, AT(seed), 0},
    {"offset", "N", "offset of the dropout generator", parse_u64, AT(offset), 0},
    {0},
};

const option options_sizes[] = {
    {"batch", "N", "sequences; default 1", parse_counts, AT(batch), 0},
    {"heads", "Q[/KV]", "query heads and KV heads; default 8", parse_pairs, AT(heads), 0},
    {"dim", "QK[/V]", "head dims; default 64", parse_pairs, AT(dim), 0},
    {"seqlen", "Q[/KV]", "query rows and keys; default 1024", parse_pairs, AT(seqlen), 0},
    {0},
};

/* ---- the parser ---- */

static void print_help(const command *c) {
    printf("Usage: attn %s %s\n\n%s", c->name, c->usage, c->summary);
    for (const option_group *g = c->groups; g->options; g++) {
        printf("\n%s:\n", g->title);
        for (const option *o = g->options; o->name; o++) {
            char left[64];
            snprintf(left, sizeof left, "--%s%s%s", o->name, o->metavar ? " " : "", o->metavar ? o->metavar : "");
            printf("  %-24s %s\n", left, o->help);
        }
    }
    printf("  %-24s %s\n\nExamples:\n", "--help", "this text");
    for (const char *line = c->examples; *line;) {
        int length = (int)strcspn(line, "\n");
        printf("  %.*s\n", length, line);
        line += length + (line[length] == '\n');
    }
}

/* name: as typed, without the dashes and without "=value". */
static const option *find(const command *c, const char *name, size_t length) {
    for (const option_group *g = c->groups; g->options; g++)
        for (const option *o = g->options; o->name; o++)
            if (strlen(o->name) == length && memcmp(o->name, name, length) == 0) return o;
    return NULL;
}

/* Applies argv[*at], and moves *at past a value of its own. */
static int parse_one(const command *c, void *target, int argc, char **argv, int *at) {
    const char *text = argv[*at], *value = strchr(text, '=');
    size_t length = value ? (size_t)(value - text) : strlen(text);
    const option *o = strncmp(text, "--", 2) == 0 ? find(c, text + 2, length - 2) : NULL;
    if (!o)
        return tool_error(TOOL_USAGE, "%s: %s '%s'; 'attn %s --help' lists the options", c->name,
                          *text == '-' ? "no such option" : "unexpected argument", text, c->name);
    if (value) value++;
    if (!o->metavar && value) return tool_error(TOOL_USAGE, "%s: --%s takes no value", c->name, o->name);
    if (o->metavar && !value) {
        if (*at + 1 == argc) return tool_error(TOOL_USAGE, "%s: --%s wants %s", c->name, o->name, o->metavar);
        value = argv[++*at];
    }
    const char *wanted = o->parse ? o->parse(value, (char *)target + o->at) : NULL;
    if (wanted) return tool_error(TOOL_USAGE, "%s: --%s '%s': %s is wanted", c->name, o->name, value, wanted);
    ((settings *)target)->problem.flags |= o->flag;
    return OPTIONS_GO;
}

int options_parse(const command *c, void *target, int argc, char **argv) {
    settings *s = target;
    s->problem.size = sizeof s->problem;
    s->config.size = sizeof s->config;
    parse_pairs("1", &s->batch);
    parse_pairs("8", &s->heads);
    parse_pairs("64", &s->dim);
    parse_pairs("1024", &s->seqlen);
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            print_help(c);
            return tool_flush();
        }
        int code = parse_one(c, target, argc, argv, &i);
        if (code != OPTIONS_GO) return code;
    }
    return OPTIONS_GO;
}
