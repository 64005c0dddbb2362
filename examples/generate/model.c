/*
 * A decoder-only transformer, in float on the CPU, all but its attention: RMSNorm, attention, RMSNorm, SwiGLU, with residuals.
 *
 * A number is a sum in an order of its own, whatever other rows there are and however many threads: so a sequence gets the same
 * tokens alone and in a batch.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "generate.h"

enum { EMBED, NORM, HEAD, FIRST_OF_LAYERS };
enum { ATTENTION_NORM, QUERY, KEY, VALUE, OUT, MLP_NORM, GATE, UP, DOWN, PER_LAYER };
enum { LANES = 16 };
static const float EPSILON = 1e-5f;

typedef struct weight {
    char name[40];
    int32_t rows, cols; /* rows 1: a norm */
    float *data;        /* [rows][cols]: a row for each output */
} weight;

struct model {
    shape shape;
    pool *threads;
    int thread_count;
    int count; /* of weights */
    weight *weights;
    float *data; /* theirs */
    int64_t numbers;
    int32_t room;                             /* rows that the arrays below have */
    float *x, *h, *q, *k, *v, *o, *gate, *up; /* [room][...] */
};

/* ---- weights ---- */

static void name_weights(model *m) {
    static const char *const names[PER_LAYER] = {"attention_norm", "q", "k", "v", "o", "mlp_norm", "gate", "up", "down"};
    const shape *s = &m->shape;
    const int32_t q = s->heads * s->dim, kv = s->heads_kv * s->dim;
    const int32_t sizes[PER_LAYER][2] = {{1, s->width},      {q, s->width},      {kv, s->width},
                                         {kv, s->width},     {s->width, q},      {1, s->width},
                                         {s->mlp, s->width}, {s->mlp, s->width}, {s->width, s->mlp}};
    m->weights[EMBED] = (weight){"embed", s->vocab, s->width, NULL};
    m->weights[NORM] = (weight){"norm", 1, s->width, NULL};
    m->weights[HEAD] = (weight){"head", s->vocab, s->width, NULL};
    for (int32_t layer = 0; layer < s->layers; layer++) {
        for (int n = 0; n < PER_LAYER; n++) {
            weight *w = &m->weights[FIRST_OF_LAYERS + layer * PER_LAYER + n];
            snprintf(w->name, sizeof w->name, "layer%d.%s", layer, names[n]);
            w->rows = sizes[n][0];
            w->cols = sizes[n][1];
        }
    }
    for (int n = 0; n < m->count; n++) m->numbers += (int64_t)m->weights[n].rows * m->weights[n].cols;
}

static bool read_shape(const npz *file, shape *s) {
    int32_t sizes[7];
    if (!npz_read(file, "shape", "<i4", 1, (int64_t[]){7}, sizes)) return false;
    *s = (shape){sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6]};
    return true;
}

static bool check_shape(const shape *s) {
    const struct {
        const char *name;
        int32_t value, most;
    } sizes[] = {{"vocab", s->vocab, 1 << 20},      {"width", s->width, 1 << 15}, {"layers", s->layers, 1 << 10},
                 {"heads", s->heads, 1 << 10},      {"mlp", s->mlp, 1 << 17},     {"dim", s->dim, 576},
                 {"heads-kv", s->heads_kv, 1 << 10}};
    for (size_t n = 0; n < sizeof sizes / sizeof *sizes; n++)
        if (sizes[n].value < 1 || sizes[n].value > sizes[n].most)
            return fail("%s=%d: want 1 to %d", sizes[n].name, sizes[n].value, sizes[n].most);
    if (s->heads % s->heads_kv) return fail("heads-kv=%d: want a divisor of heads=%d", s->heads_kv, s->heads);
    if (s->dim % 2) return fail("dim=%d: want an even number, for the rotary embedding", s->dim);
    if (s->vocab < 2) return fail("vocab=%d: want at least 2", s->vocab);
    return true;
}

static bool load(model *m, const npz *file) {
    for (int n = 0; n < m->count; n++) {
        const weight *w = &m->weights[n];
        const int64_t sizes[] = {w->rows, w->cols};
        bool norm = w->rows == 1 && strstr(w->name, "norm");
        if (!npz_read(file, w->name, "<f4", norm ? 1 : 2, norm ? sizes + 1 : sizes, w->data)) return false;
    }
    return true;
}

/* Of a variance that keeps that of the numbers; queries and keys are larger, so that attention prefers some keys to others. */
static void randomise(model *m, uint64_t state) {
    for (int n = 0; n < m->count; n++) {
        const weight *w = &m->weights[n];
        const int which = n < FIRST_OF_LAYERS ? -1 : (n - FIRST_OF_LAYERS) % PER_LAYER;
        const bool norm = n == NORM || which == ATTENTION_NORM || which == MLP_NORM;
        double most = sqrt(3.0 / w->cols) * (which == QUERY || which == KEY ? 1.5 : 1);
        if (n == EMBED) most = 1;
        for (int64_t i = 0; i < (int64_t)w->rows * w->cols; i++) {
            state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
            double uniform = (double)(state >> 40) / (1 << 23) - 1;
            w->data[i] = (float)(norm ? 1 + 0.2 * uniform : most * uniform);
        }
    }
}

model *model_create(shape *s, const char *path, uint64_t seed, pool *threads, int thread_count) {
    npz *file = path ? npz_open(path) : NULL;
    model *m = calloc(1, sizeof *m);
    bool made = m && (!path || (file && read_shape(file, s))) && check_shape(s);
    if (made) {
        m->shape = *s;
        m->threads = threads;
        m->thread_count = thread_count;
        m->count = FIRST_OF_LAYERS + s->layers * PER_LAYER;
        m->weights = calloc((size_t)m->count, sizeof *m->weights);
        if (m->weights) name_weights(m);
        m->data = m->weights ? malloc((size_t)m->numbers * sizeof *m->data) : NULL;
        made = m->data || fail("not enough memory for the weights");
    }
    float *next = made ? m->data : NULL;
    for (int n = 0; made && n < m->count; n++) {
        m->weights[n].data = next;
        next += (int64_t)m->weights[n].rows * m->weights[n].cols;
    }
    if (made && path)
        made = load(m, file);
    else if (made)
        randomise(m, seed);
    npz_close(file);
    if (made) return m;
    model_destroy(m);
    return NULL;
}

static void free_room(model *m) {
    float *arrays[] = {m->x, m->h, m->q, m->k, m->v, m->o, m->gate, m->up};
    for (size_t n = 0; n < sizeof arrays / sizeof *arrays; n++) free(arrays[n]);
    m->x = m->h = m->q = m->k = m->v = m->o = m->gate = m->up = NULL;
    m->room = 0;
}

void model_destroy(model *m) {
    if (!m) return;
    free_room(m);
    free(m->weights);
    free(m->data);
    free(m);
}

int64_t model_weights(const model *m) { return m->numbers; }

/* ---- arithmetic ---- */

typedef struct product {
    const float *x; /* [rows][cols] */
    const weight *w;
    float *y; /* [rows][w->rows] */
    int32_t rows, parts;
    bool add; /* to what is in y */
} product;

/* y[r] = x[r] . w for `rows` rows of x, which the compiler knows; each is summed in LANES parts, whatever rows is. */
static inline void dots(const float *x, int32_t rows, const float *w, int32_t cols, float *y, int64_t stride, bool add) {
    float sum[4][LANES] = {{0}};
    int32_t c = 0;
    for (; c + LANES <= cols; c += LANES)
        for (int32_t r = 0; r < rows; r++)
            for (int32_t l = 0; l < LANES; l++) sum[r][l] += x[(int64_t)r * cols + c + l] * w[c + l];
    for (int32_t r = 0; r < rows; r++) {
        float all = 0;
        for (int32_t l = 0; l < cols - c; l++) sum[r][l] += x[(int64_t)r * cols + c + l] * w[c + l];
        for (int32_t l = 0; l < LANES; l++) all += sum[r][l];
        y[r * stride] = add ? y[r * stride] + all : all;
    }
}

/* One of p->parts ranges of outputs. */
static void multiply_part(void *arg, int32_t index) {
    const product *p = arg;
    const int32_t outs = p->w->rows, cols = p->w->cols;
    const int32_t begin = (int32_t)((int64_t)outs * index / p->parts),
                  end = (int32_t)((int64_t)outs * (index + 1) / p->parts);
    for (int32_t out = begin; out < end; out++) {
        const float *w = p->w->data + (int64_t)out * cols;
        int32_t r = 0;
        for (; r + 4 <= p->rows; r += 4)
            dots(p->x + (int64_t)r * cols, 4, w, cols, p->y + (int64_t)r * outs + out, outs, p->add);
        for (; r < p->rows; r++) dots(p->x + (int64_t)r * cols, 1, w, cols, p->y + (int64_t)r * outs + out, outs, p->add);
    }
}

static void multiply(model *m, const weight *w, const float *x, int32_t rows, float *y, bool add) {
    product p = {x, w, y, rows, m->thread_count, add};
    pool_run(m->threads, multiply_part, &p, p.parts);
}

static void norm(const weight *w, const float *x, int32_t rows, float *y) {
    for (int32_t r = 0; r < rows; r++, x += w->cols, y += w->cols) {
        double sum = 0;
        for (int32_t c = 0; c < w->cols; c++) sum += (double)x[c] * x[c];
        float factor = (float)(1 / sqrt(sum / w->cols + EPSILON));
        for (int32_t c = 0; c < w->cols; c++) y[c] = x[c] * factor * w->data[c];
    }
}

static void swiglu(float *gate, const float *up, int64_t count) {
    for (int64_t i = 0; i < count; i++) gate[i] = gate[i] / (1 + expf(-gate[i])) * up[i];
}

/* ---- a step ---- */

static bool make_room(model *m, int32_t rows) {
    if (rows <= m->room) return true;
    const shape *s = &m->shape;
    const size_t n = (size_t)rows * sizeof(float), q = (size_t)s->heads * (size_t)s->dim,
                 kv = (size_t)s->heads_kv * (size_t)s->dim;
    free_room(m);
    bool made = (m->x = malloc(n * (size_t)s->width)) && (m->h = malloc(n * (size_t)s->width)) && (m->q = malloc(n * q)) &&
                (m->k = malloc(n * kv)) && (m->v = malloc(n * kv)) && (m->o = malloc(n * q)) &&
                (m->gate = malloc(n * (size_t)s->mlp)) && (m->up = malloc(n * (size_t)s->mlp));
    if (made) m->room = rows;
    return made || fail("not enough memory for a step of %d tokens", rows);
}

bool model_step(model *m, attention *a, const int32_t *tokens, int32_t rows, const int32_t *last, int32_t batch,
                float *logits) {
    const shape *s = &m->shape;
    const size_t row_bytes = (size_t)s->width * sizeof(float);
    if (!make_room(m, rows > batch ? rows : batch)) return false;
    for (int32_t r = 0; r < rows; r++)
        memcpy(m->x + (int64_t)r * s->width, m->weights[EMBED].data + (int64_t)tokens[r] * s->width, row_bytes);
    for (int32_t layer = 0; layer < s->layers; layer++) {
        const weight *w = &m->weights[FIRST_OF_LAYERS + layer * PER_LAYER];
        norm(&w[ATTENTION_NORM], m->x, rows, m->h);
        multiply(m, &w[QUERY], m->h, rows, m->q, false);
        multiply(m, &w[KEY], m->h, rows, m->k, false);
        multiply(m, &w[VALUE], m->h, rows, m->v, false);
        if (!attention_layer(a, layer, m->q, m->k, m->v, m->o)) return false;
        multiply(m, &w[OUT], m->o, rows, m->x, true);
        norm(&w[MLP_NORM], m->x, rows, m->h);
        multiply(m, &w[GATE], m->h, rows, m->gate, false);
        multiply(m, &w[UP], m->h, rows, m->up, false);
        swiglu(m->gate, m->up, (int64_t)rows * s->mlp);
        multiply(m, &w[DOWN], m->gate, rows, m->x, true);
    }
    attention_end(a);
    int32_t wanted = 0;
    for (int32_t b = 0; b < batch; b++)
        if (last[b] >= 0) memcpy(m->h + (int64_t)wanted++ * s->width, m->x + (int64_t)last[b] * s->width, row_bytes);
    norm(&m->weights[NORM], m->h, wanted, m->h);
    multiply(m, &m->weights[HEAD], m->h, wanted, logits, false);
    return true;
}
