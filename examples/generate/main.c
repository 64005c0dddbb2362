/*
 * Generation by a small transformer whose attention is libattn's: several prompts of different lengths, a KV cache in pages, a
 * prefill in chunks and then one token after the other for all sequences at once. On the CPU all of it runs there; with
 * --backend cuda the cache is in the GPU's memory and attention runs there, and the rest of the model on the CPU.
 *
 * The same tokens come whatever the page size, the other sequences of the batch and the number of threads: libattn promises that
 * of attention (C5 in attn.h), and model.c keeps to it. examples/generate/check.sh looks.
 */
#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "generate.h"

enum { MOST_SEQUENCES = 4096, MOST_TOKENS = 1 << 20, BAD_USAGE = 2 };

typedef struct sequence {
    int32_t *tokens; /* the prompt, then what is generated */
    int32_t length, prompt, prefilled;
    uint64_t random; /* state of its own, from the seed and the prompt: other sequences do not matter */
} sequence;

typedef struct settings {
    const char *model, *backend, *dtype;
    shape shape;
    int32_t tokens, sequences, length, page, chunk, threads;
    double temperature;
    uint64_t seed;
    bool quiet;
} settings;

typedef struct phase {
    double seconds;
    int64_t tokens;
    attention_times attention;
} phase;

bool fail(const char *format, ...) {
    va_list args;
    fputs("generate: ", stderr);
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
    return false;
}

double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- options ---- */

static const char help[] =
    "usage: generate [options]\n"
    "\n"
    "Prefills prompts and generates tokens with a small transformer whose attention is libattn's. The tokens of each\n"
    "sequence are a line of standard output; progress and figures go to standard error.\n"
    "\n"
    "  --prompt IDS        a prompt, as 5,17,2; may be given several times\n"
    "  --sequences N       without --prompt: so many random prompts of different lengths (default 4)\n"
    "  --length N          ... of which the longest has so many tokens (default 48)\n"
    "  --tokens N          to generate for each sequence (default 32)\n"
    "  --temperature T     0: the likeliest token (default); larger: drawn at that temperature\n"
    "  --seed N            of random weights, prompts and draws (default 1)\n"
    "\n"
    "  --backend NAME      cpu (default), cuda: attention on the first GPU, the rest on the CPU; or ref\n"
    "  --dtype NAME        of q, k, v and the cache: f32 (default) or bf16\n"
    "  --page N            rows of a page of the cache (default 16)\n"
    "  --chunk N           tokens of a prompt that are prefilled at a time (default 256)\n"
    "  --threads N         (default: all CPUs)\n"
    "\n"
    "  --model FILE.npz    weights, as examples/generate/model.py makes them; without it they are random, and\n"
    "  --layers N --width N --heads N --heads-kv N --dim N --mlp N --vocab N\n"
    "                      say their sizes (default 4, 256, 8, 2, 32, 704, 512); dim is that of a head\n"
    "  --quiet             no progress and no figures\n"
    "  --help              this text\n";

/* Reads a number from `least` to `most`. */
static bool parse_int(const char *name, const char *text, int64_t least, int64_t most, int64_t *value) {
    char *end;
    errno = 0;
    long long number = strtoll(text, &end, 10);
    if (end == text || *end || errno || number < least || number > most)
        return fail("%s %s: want a whole number from %lld to %lld", name, text, (long long)least, (long long)most);
    *value = number;
    return true;
}

static bool parse_prompt(const char *text, sequence *s) {
    int32_t room = 1;
    for (const char *c = text; *c; c++) room += *c == ',';
    if (!(s->tokens = malloc((size_t)room * sizeof *s->tokens))) return fail("not enough memory");
    for (const char *c = text;; c++) {
        char *end;
        errno = 0;
        long id = strtol(c, &end, 10);
        if (end == c || errno || id < 0 || id > INT32_MAX || (*end && *end != ','))
            return fail("--prompt %s: want numbers of tokens with commas between them, as 5,17,2", text);
        s->tokens[s->length++] = (int32_t)id;
        if (!*end) break;
        c = end;
    }
    s->prompt = s->length;
    return s->length <= MOST_TOKENS || fail("--prompt: of %d tokens; want at most %d", s->length, MOST_TOKENS);
}

/* One option that has a value; false: a bad one. */
static bool parse_value(settings *s, const char *name, const char *text) {
    const struct {
        const char *name;
        int32_t *target;
        int32_t least, most;
    } numbers[] = {
        {"--tokens", &s->tokens, 1, MOST_TOKENS},   {"--sequences", &s->sequences, 1, MOST_SEQUENCES},
        {"--length", &s->length, 1, MOST_TOKENS},   {"--page", &s->page, 1, MOST_TOKENS},
        {"--chunk", &s->chunk, 1, MOST_TOKENS},     {"--threads", &s->threads, 1, 256},
        {"--layers", &s->shape.layers, 1, 1 << 10}, {"--width", &s->shape.width, 1, 1 << 15},
        {"--heads", &s->shape.heads, 1, 1 << 10},   {"--heads-kv", &s->shape.heads_kv, 1, 1 << 10},
        {"--dim", &s->shape.dim, 2, 576},           {"--mlp", &s->shape.mlp, 1, 1 << 17},
        {"--vocab", &s->shape.vocab, 2, 1 << 20},
    };
    int64_t value = 0;
    for (size_t n = 0; n < sizeof numbers / sizeof *numbers; n++) {
        if (strcmp(name, numbers[n].name) != 0) continue;
        if (!parse_int(name, text, numbers[n].least, numbers[n].most, &value)) return false;
        *numbers[n].target = (int32_t)value;
        return true;
    }
    if (strcmp(name, "--seed") == 0) {
        if (!parse_int(name, text, 0, INT64_MAX, &value)) return false;
        s->seed = (uint64_t)value;
    } else if (strcmp(name, "--temperature") == 0) {
        char *end;
        s->temperature = strtod(text, &end);
        if (end == text || *end || !(s->temperature >= 0 && s->temperature <= 1000))
            return fail("%s %s: want a number from 0 to 1000", name, text);
    } else if (strcmp(name, "--backend") == 0) {
        if (strcmp(text, "cpu") != 0 && strcmp(text, "cuda") != 0 && strcmp(text, "ref") != 0)
            return fail("%s %s: want cpu, cuda or ref", name, text);
        s->backend = text;
    } else if (strcmp(name, "--dtype") == 0) {
        if (strcmp(text, "f32") != 0 && strcmp(text, "bf16") != 0) return fail("%s %s: want f32 or bf16", name, text);
        s->dtype = text;
    } else if (strcmp(name, "--model") == 0) {
        s->model = text;
    } else {
        return fail("%s: there is no such option; --help lists them", name);
    }
    return true;
}

/* -1: go on; otherwise the code to exit with. */
static int parse(int argc, char **argv, settings *s, sequence *sequences, int32_t *count) {
    for (int n = 1; n < argc; n++) {
        if (strcmp(argv[n], "--help") == 0) {
            fputs(help, stdout);
            return 0;
        }
        if (strcmp(argv[n], "--quiet") == 0) {
            s->quiet = true;
            continue;
        }
        if (strncmp(argv[n], "--", 2) != 0) return fail("%s: want an option; --help lists them", argv[n]), BAD_USAGE;
        if (n + 1 == argc) return fail("%s: want a value after it, or there is no such option", argv[n]), BAD_USAGE;
        if (strcmp(argv[n], "--prompt") == 0) {
            if (*count == MOST_SEQUENCES) return fail("--prompt: at most %d of them", MOST_SEQUENCES), BAD_USAGE;
            if (!parse_prompt(argv[n + 1], &sequences[(*count)++])) return BAD_USAGE;
        } else if (!parse_value(s, argv[n], argv[n + 1])) {
            return BAD_USAGE;
        }
        n++;
    }
    return -1;
}

/* ---- prompts and tokens ---- */

static uint64_t draw(uint64_t *state) {
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

/* Makes prompts where there are none, and room for what will be generated. */
static bool prepare(const settings *s, sequence *sequences, int32_t *count) {
    const bool made_up = *count == 0;
    if (made_up) *count = s->sequences;
    uint64_t state = s->seed ^ 0x70726f6d7074;
    for (int32_t b = 0; b < *count; b++) {
        sequence *q = &sequences[b];
        if (made_up) { /* of the length that is asked for, and shorter and shorter ones */
            q->length = q->prompt = s->length - (int32_t)((int64_t)(s->length - 1) * b / *count);
        }
        int32_t *tokens = realloc(q->tokens, (size_t)(q->prompt + s->tokens) * sizeof *tokens);
        if (!tokens) return fail("not enough memory");
        q->tokens = tokens;
        q->random = s->seed;
        for (int32_t n = 0; n < q->prompt; n++) {
            if (made_up) tokens[n] = (int32_t)(draw(&state) % (uint64_t)s->shape.vocab);
            if (tokens[n] >= s->shape.vocab)
                return fail("--prompt: token %d: want less than %d, the size of the vocabulary", tokens[n], s->shape.vocab);
            q->random = (q->random ^ (uint64_t)tokens[n]) * UINT64_C(0x100000001b3);
        }
    }
    return true;
}

/* The next token; *margin becomes the distance of the two largest logits, if that is less. */
static int32_t choose(const float *logits, int32_t vocab, double temperature, uint64_t *random, double *margin) {
    int32_t best = logits[1] > logits[0], second = !best;
    for (int32_t n = 2; n < vocab; n++) {
        if (logits[n] > logits[best]) {
            second = best;
            best = n;
        } else if (logits[n] > logits[second]) {
            second = n;
        }
    }
    *margin = fmin(*margin, (double)logits[best] - logits[second]);
    if (temperature == 0) return best;
    double sum = 0, at = 0;
    for (int32_t n = 0; n < vocab; n++) sum += exp(((double)logits[n] - logits[best]) / temperature);
    const double wanted = sum * ((double)(draw(random) >> 11) / 9007199254740992.0);
    for (int32_t n = 0; n < vocab; n++) {
        at += exp(((double)logits[n] - logits[best]) / temperature);
        if (at > wanted) return n;
    }
    return best;
}

/* ---- generating ---- */

typedef struct run {
    const settings *settings;
    sequence *sequences;
    int32_t count;
    model *model;
    attention *attention;
    int32_t *tokens, *new_tokens, *last; /* [rows], [count], [count] */
    float *logits;                       /* [count][vocab] */
    double margin;
} run;

static void progress(run *r, const char *what, int64_t done, int64_t of) {
    if (r->settings->quiet || !isatty(STDERR_FILENO)) return;
    fprintf(stderr, "\r%s: %lld of %lld tokens%s", what, (long long)done, (long long)of, done < of ? "" : "\r\033[K");
    fflush(stderr);
}

/* One step of all sequences; what each is given is in tokens, new_tokens and last. */
static bool step(run *r, bool decode, int32_t rows) {
    const shape *s = &r->settings->shape;
    if (!attention_begin(r->attention, decode, r->new_tokens) ||
        !model_step(r->model, r->attention, r->tokens, rows, r->last, r->count, r->logits))
        return false;
    const float *logits = r->logits;
    for (int32_t b = 0; b < r->count; b++) {
        sequence *q = &r->sequences[b];
        if (r->last[b] < 0) continue;
        q->tokens[q->length++] = choose(logits, s->vocab, r->settings->temperature, &q->random, &r->margin);
        logits += s->vocab;
    }
    return true;
}

static bool prefill(run *r, phase *p) {
    int64_t of = 0;
    for (int32_t b = 0; b < r->count; b++) of += r->sequences[b].prompt;
    const double began = seconds();
    while (p->tokens < of) {
        int32_t rows = 0;
        for (int32_t b = 0; b < r->count; b++) { /* where a chunk ends depends on its own sequence alone */
            sequence *q = &r->sequences[b];
            const int32_t left = q->prompt - q->prefilled, now = left < r->settings->chunk ? left : r->settings->chunk;
            for (int32_t n = 0; n < now; n++) r->tokens[rows + n] = q->tokens[q->prefilled + n];
            rows += now;
            r->new_tokens[b] = now;
            r->last[b] = now > 0 && now == left ? rows - 1 : -1;
            q->prefilled += now;
        }
        if (!step(r, false, rows)) return false;
        p->tokens += rows;
        progress(r, "prefill", p->tokens, of);
    }
    p->seconds = seconds() - began;
    p->attention = attention_spent(r->attention);
    return true;
}

static bool decode(run *r, phase *p) {
    const int32_t steps = r->settings->tokens - 1; /* the prefill has given the first one */
    const double began = seconds();
    for (int32_t n = 0; n < steps; n++) {
        for (int32_t b = 0; b < r->count; b++) {
            r->tokens[b] = r->sequences[b].tokens[r->sequences[b].length - 1];
            r->new_tokens[b] = 1;
            r->last[b] = b;
        }
        if (!step(r, true, r->count)) return false;
        p->tokens += r->count;
        progress(r, "decode", p->tokens, (int64_t)steps * r->count);
    }
    p->seconds = seconds() - began;
    p->attention = attention_spent(r->attention);
    return true;
}

/* ---- the program ---- */

static void say(const char *name, const phase *p, const char *kernel, bool copies) {
    if (p->tokens == 0) return;
    const double share = 100 / p->seconds;
    fprintf(stderr, "%-8s %lld tokens in %.3f s: %.1f tokens/s; attention %.1f %% of it", name, (long long)p->tokens,
            p->seconds, (double)p->tokens / p->seconds, share * (p->attention.run + p->attention.copy));
    if (copies) fprintf(stderr, ", %.1f running and %.1f copying", share * p->attention.run, share * p->attention.copy);
    fprintf(stderr, " (%s)\n", kernel);
}

static void report(const run *r, const phase *first, const phase *rest, attn_context *context) {
    const settings *s = r->settings;
    const shape *m = &s->shape;
    const bool gpu = strcmp(s->backend, "cuda") == 0, copies = gpu || strcmp(s->dtype, "f32") != 0;
    fprintf(
        stderr,
        "model    %.1f million weights, %s: %d layers of width %d, %d heads of %d (%d of keys), mlp %d, vocabulary %d\n",
        (double)model_weights(r->model) / 1e6, s->model ? s->model : "random", m->layers, m->width, m->heads, m->dim,
        m->heads_kv, m->mlp, m->vocab);
    fprintf(stderr, "runs on  attention in %s on the %s, cache in pages of %d; the rest in f32 on the CPU, %d threads\n",
            s->dtype, gpu ? "GPU" : attn_context_backend(context), s->page, s->threads);
    say("prefill", first, attention_kernel(r->attention, false), copies);
    say("decode", rest, attention_kernel(r->attention, true), copies);
    if (s->temperature == 0) fprintf(stderr, "margin   the two largest logits were at least %.3g apart\n", r->margin);
}

static bool generate(run *r, attn_context *context) {
    const settings *s = r->settings;
    const bool gpu = strcmp(s->backend, "cuda") == 0;
    attention_settings a = {
        .context = context,
        .gpu = gpu,
        .dtype = strcmp(s->dtype, "bf16") == 0 ? ATTN_BF16 : ATTN_F32,
        .batch = r->count,
        .page = s->page,
        .chunk = s->chunk,
    };
    for (int32_t b = 0; b < r->count; b++) {
        const sequence *q = &r->sequences[b];
        a.rows += q->prompt < s->chunk ? q->prompt : s->chunk;
        if (q->prompt + s->tokens > a.tokens) a.tokens = q->prompt + s->tokens;
    }
    const size_t count = (size_t)r->count, rows = (size_t)a.rows;
    r->tokens = malloc(rows * sizeof *r->tokens); /* at least one for each sequence */
    r->new_tokens = malloc(count * sizeof *r->new_tokens);
    r->last = malloc(count * sizeof *r->last);
    r->logits = malloc(count * (size_t)s->shape.vocab * sizeof *r->logits);
    if (!r->tokens || !r->new_tokens || !r->last || !r->logits) return fail("not enough memory");
    r->margin = INFINITY;
    phase first = {0}, rest = {0};
    r->attention = attention_create(&a, &s->shape);
    if (!r->attention || !prefill(r, &first) || !decode(r, &rest)) return false;
    if (attn_device_status(context) != ATTN_OK) return fail("%s", attn_error_detail());
    for (int32_t b = 0; b < r->count; b++) {
        const sequence *q = &r->sequences[b];
        for (int32_t n = q->prompt; n < q->length; n++) printf("%d%c", q->tokens[n], n + 1 < q->length ? ' ' : '\n');
    }
    if (!s->quiet) report(r, &first, &rest, context);
    return true;
}

/* Everything that is made once the options are known. */
static bool work(settings *s, sequence *sequences, int32_t count) {
    const bool gpu = strcmp(s->backend, "cuda") == 0;
    if (s->threads == 0) {
        long cpus = sysconf(_SC_NPROCESSORS_ONLN);
        s->threads = cpus < 1 ? 1 : cpus > 256 ? 256 : (int32_t)cpus;
    }
    run r = {.settings = s, .sequences = sequences, .count = count};
    attn_context *context = NULL;
    pool *threads = pool_create(s->threads);
    bool done = threads || fail("--threads %d: not so many to be had", s->threads);
    done = done && (r.model = model_create(&s->shape, s->model, s->seed, threads, s->threads));
    done = done && prepare(s, sequences, &r.count) && (!gpu || gpu_open());
    if (done) {
        attn_config config = {
            .size = sizeof config,
            .backend = gpu                              ? ATTN_BACKEND_CUDA
                       : strcmp(s->backend, "ref") == 0 ? ATTN_BACKEND_REF
                                                        : ATTN_BACKEND_CPU,
            .threads = s->threads,
            .parallel_for = pool_run, /* the model's threads are attention's, too */
            .parallel_user = threads,
        };
        attn_status status = attn_context_create(&context, &config);
        done = status == ATTN_OK || fail("%s: %s", attn_status_name(status), attn_error_detail());
    }
    done = done && generate(&r, context);
    attention_destroy(r.attention);
    attn_context_destroy(context);
    if (gpu) gpu_close();
    model_destroy(r.model);
    pool_destroy(threads);
    free(r.tokens);
    free(r.new_tokens);
    free(r.last);
    free(r.logits);
    return done;
}

int main(int argc, char **argv) {
    settings s = {
        .backend = "cpu",
        .dtype = "f32",
        .shape = {.vocab = 512, .width = 256, .layers = 4, .heads = 8, .heads_kv = 2, .dim = 32, .mlp = 704},
        .tokens = 32,
        .sequences = 4,
        .length = 48,
        .page = 16,
        .chunk = 256,
        .seed = 1,
    };
    static sequence sequences[MOST_SEQUENCES];
    int32_t count = 0;
    int code = parse(argc, argv, &s, sequences, &count);
    if (code < 0) code = work(&s, sequences, count) ? 0 : 1;
    if (code == 0 && (fflush(stdout) != 0 || ferror(stdout))) code = fail("standard output: %s", strerror(errno)) ? 0 : 1;
    for (int32_t b = 0; b < MOST_SEQUENCES; b++) free(sequences[b].tokens);
    return code;
}
