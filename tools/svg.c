/*
 * Draws the tile map of a plan: keys to the right, query rows downwards, skipped, full and partial tiles in three colours,
 * beside each row of tiles its place in the work list, and lines where rows are split into chunks of keys.
 *
 * A map of more than MAX_CELLS tiles a side is drawn with several tiles in a cell, so that a picture stays small whatever
 * the length; neighbours of one colour are one rectangle.
 */
#define _POSIX_C_SOURCE 200809L

#include "svg.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fault.h"
#include "mask.h"

enum { MAX_CELLS = 128, LEFT = 92, TOP = 104, SIDE = 640, RIGHT = 96, BOTTOM = 96 };

static const struct {
    const char *name, *colour;
} classes[3] = {
    [ATTN_TILE_SKIP] = {"skipped", "#e9edf2"},
    [ATTN_TILE_FULL] = {"full", "#2b6cb0"},
    [ATTN_TILE_PARTIAL] = {"partial", "#f6ad37"},
};

/* Cells of the picture; each covers tiles_per_cell tiles either way. */
typedef struct grid {
    const tile_summary *summary;
    int32_t tiles_per_cell, rows, cols;
    uint8_t *seen;  /* [rows][cols]: a bit for each class that the cell covers */
    int32_t *chunk; /* [rows][cols]: of its first tile */
    int32_t *order; /* [rows]: the least */
    double width, height;
} grid;

/* ---- walking ---- */

static int visit_summary(void *user, const attn_tile *t) {
    tile_summary *s = user;
    s->count[t->tile_class]++;
    if (t->rows > s->tile_rows) s->tile_rows = t->rows;
    if (t->cols > s->tile_cols) s->tile_cols = t->cols;
    if (t->row + t->rows > s->rows) s->rows = t->row + t->rows;
    if (t->col + t->cols > s->cols) s->cols = t->col + t->cols;
    if (t->chunk + 1 > s->chunks) s->chunks = t->chunk + 1;
    return 0;
}

attn_status tiles_summarize(const attn_plan *plan, const attn_buffers *buffers, int32_t batch, int32_t head,
                            tile_summary *summary) {
    *summary = (tile_summary){0};
    return attn_plan_tiles(plan, buffers, batch, head, visit_summary, summary);
}

static int visit_grid(void *user, const attn_tile *t) {
    grid *g = user;
    int32_t row = t->row / g->summary->tile_rows / g->tiles_per_cell,
            col = t->col / g->summary->tile_cols / g->tiles_per_cell;
    int32_t at = row * g->cols + col;
    if (!g->seen[at]) g->chunk[at] = t->chunk;
    g->seen[at] |= (uint8_t)(1 << t->tile_class);
    if (t->order < g->order[row]) g->order[row] = t->order;
    return 0;
}

static int cell_class(const grid *g, int32_t row, int32_t col) {
    int seen = g->seen[row * g->cols + col];
    return seen == 1 << ATTN_TILE_FULL ? ATTN_TILE_FULL : seen == 1 << ATTN_TILE_SKIP ? ATTN_TILE_SKIP : ATTN_TILE_PARTIAL;
}

/* ---- drawing ---- */

/* Where query row i and key j are in the picture. */
static double y_of(const grid *g, int32_t i) { return TOP + g->height * i / g->summary->rows; }
static double x_of(const grid *g, int32_t j) { return LEFT + g->width * j / g->summary->cols; }

/* Where a row or column of cells begins. */
static double cell_y(const grid *g, int32_t row) {
    int64_t i = (int64_t)row * g->tiles_per_cell * g->summary->tile_rows;
    return y_of(g, i < g->summary->rows ? (int32_t)i : g->summary->rows);
}
static double cell_x(const grid *g, int32_t col) {
    int64_t j = (int64_t)col * g->tiles_per_cell * g->summary->tile_cols;
    return x_of(g, j < g->summary->cols ? (int32_t)j : g->summary->cols);
}

static void draw_cells(FILE *out, const grid *g) {
    for (int32_t row = 0; row < g->rows; row++) {
        double y = cell_y(g, row), height = cell_y(g, row + 1) - y;
        for (int32_t col = 0, end; col < g->cols; col = end) {
            int of = cell_class(g, row, col);
            for (end = col + 1; end < g->cols && cell_class(g, row, end) == of;) end++;
            if (of == ATTN_TILE_SKIP) continue; /* the background has its colour */
            fprintf(out, "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" fill=\"%s\"/>\n", cell_x(g, col), y,
                    cell_x(g, end) - cell_x(g, col), height, classes[of].colour);
        }
    }
    double step = g->width / g->cols < g->height / g->rows ? g->width / g->cols : g->height / g->rows;
    fprintf(out, "<path stroke=\"#fff\" stroke-width=\"%.2f\" d=\"", step > 12 ? 1.0 : step / 12);
    for (int32_t row = 1; row < g->rows; row++) fprintf(out, "M%d %.1fh%.1f", LEFT, cell_y(g, row), g->width);
    for (int32_t col = 1; col < g->cols; col++) fprintf(out, "M%.1f %dv%.1f", cell_x(g, col), TOP, g->height);
    fprintf(out, "\"/>\n");
}

/* A step such as 1, 2, 5, 10, 20, ... that gives at most `most` ticks. */
static int32_t tick_step(int32_t length, int most) {
    int64_t step = 1;
    for (int i = 0; length / step > most; i++) step = i % 3 == 1 ? step / 2 * 5 : step * 2;
    return (int32_t)step;
}

/* Powers of two where lengths are such, as they mostly are; ticks are at least `spacing` pixels apart. */
static int32_t axis_step(int32_t length, double pixels, int spacing) {
    int most = pixels < spacing ? 1 : (int)(pixels / spacing);
    if (length % 64) return tick_step(length, most);
    int32_t step = 64;
    while (length / step > most) step *= 2;
    return step;
}

static void draw_axes(FILE *out, const grid *g) {
    const tile_summary *s = g->summary;
    int32_t step = axis_step(s->cols, g->width, 70);
    for (int64_t j = 0; j <= s->cols; j += step)
        fprintf(out, "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%d</text>\n", x_of(g, (int32_t)j), TOP - 6, (int)j);
    step = axis_step(s->rows, g->height, 30);
    for (int64_t i = 0; i <= s->rows; i += step)
        fprintf(out, "<text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%d</text>\n", LEFT - 6, y_of(g, (int32_t)i) + 4,
                (int)i);
    fprintf(out, "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\" class=\"axis\">keys j</text>\n", LEFT + g->width / 2,
            TOP - 24);
    double middle = TOP + g->height / 2;
    fprintf(out,
            "<text x=\"26\" y=\"%.1f\" text-anchor=\"middle\" class=\"axis\" transform=\"rotate(-90 26 %.1f)\">query rows "
            "i</text>\n",
            middle, middle);
}

/* Beside each row its place in the work list, and a bar that is dark for what is worked first. */
static void draw_order(FILE *out, const grid *g) {
    double x = LEFT + g->width + 8, last_text = -1e9;
    int32_t most = 1;
    for (int32_t row = 0; row < g->rows; row++)
        if (g->order[row] > most && g->order[row] < INT32_MAX) most = g->order[row];
    for (int32_t row = 0; row < g->rows; row++) {
        double y = cell_y(g, row), height = cell_y(g, row + 1) - y, middle = y + height / 2 + 4;
        if (g->order[row] == INT32_MAX) continue;
        fprintf(out, "<rect x=\"%.1f\" y=\"%.1f\" width=\"10\" height=\"%.1f\" fill=\"#4a3f8f\" fill-opacity=\"%.2f\"/>\n",
                x, y, height, 1 - 0.85 * g->order[row] / most);
        if (middle - last_text < 13) continue;
        last_text = middle;
        fprintf(out, "<text x=\"%.1f\" y=\"%.1f\">%d</text>\n", x + 15, middle, g->order[row]);
    }
    fprintf(out, "<text x=\"%.1f\" y=\"%d\" class=\"axis\">order</text>\n", x, TOP - 24);
}

/* Lines where the chunk changes from one cell to the next in the same row, and in the first row the chunk's number. */
static void draw_chunks(FILE *out, const grid *g) {
    if (g->summary->chunks < 2) return;
    fprintf(out, "<path stroke=\"#1a202c\" stroke-width=\"2.5\" d=\"");
    for (int32_t row = 0; row < g->rows; row++)
        for (int32_t col = 1; col < g->cols; col++)
            if (g->chunk[row * g->cols + col] != g->chunk[row * g->cols + col - 1])
                fprintf(out, "M%.1f %.1fV%.1f", cell_x(g, col), cell_y(g, row), cell_y(g, row + 1));
    fprintf(out, "\"/>\n");
    double y = (cell_y(g, 0) + cell_y(g, 1)) / 2 + 4;
    for (int32_t col = 0, end; col < g->cols; col = end) {
        for (end = col + 1; end < g->cols && g->chunk[end] == g->chunk[col];) end++;
        double left = cell_x(g, col), right = cell_x(g, end);
        if (right - left >= 16)
            fprintf(out, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\" class=\"chunk\">%d</text>\n",
                    (left + right) / 2, y, g->chunk[col]);
    }
}

static void draw_legend(FILE *out, const grid *g) {
    const tile_summary *s = g->summary;
    double x = LEFT, y = TOP + g->height + 22;
    int64_t total = s->count[0] + s->count[1] + s->count[2];
    static const int shown[3] = {ATTN_TILE_FULL, ATTN_TILE_PARTIAL, ATTN_TILE_SKIP};
    for (int i = 0; i < 3; i++, x += 170) {
        double share = total ? 100.0 * (double)s->count[shown[i]] / (double)total : 0;
        fprintf(out, "<rect x=\"%.1f\" y=\"%.1f\" width=\"14\" height=\"14\" fill=\"%s\" stroke=\"#a0aec0\"/>\n", x, y,
                classes[shown[i]].colour);
        fprintf(out, "<text x=\"%.1f\" y=\"%.1f\">%s: %lld (%.1f%%)</text>\n", x + 20, y + 11, classes[shown[i]].name,
                (long long)s->count[shown[i]], share);
    }
    fprintf(out, "<text x=\"%d\" y=\"%.1f\">tile %d x %d", LEFT, y + 34, s->tile_rows, s->tile_cols);
    if (g->tiles_per_cell > 1) fprintf(out, "; one cell is %d x %d tiles", g->tiles_per_cell, g->tiles_per_cell);
    fprintf(out, "; order: place of a row of tiles in the work list, dark first</text>\n");
    if (s->chunks > 1)
        fprintf(out,
                "<text x=\"%d\" y=\"%.1f\">black lines: the keys are split into %d chunks, worked apart and merged in "
                "order</text>\n",
                LEFT, y + 52, s->chunks);
}

static void draw(FILE *out, const char *title, const attn_plan *plan, const grid *g) {
    double width = LEFT + g->width + RIGHT, height = TOP + g->height + BOTTOM;
    fprintf(out,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%.0f\" height=\"%.0f\" viewBox=\"0 0 %.0f %.0f\" "
            "font-family=\"Helvetica, Arial, sans-serif\" font-size=\"12\" fill=\"#2d3748\">\n"
            "<style>.axis{font-size:13px;font-weight:bold}.title{font-size:16px;font-weight:bold}"
            ".chunk{font-size:10px;font-weight:bold;fill:#fff;stroke:#1a202c;stroke-width:2px;paint-order:stroke}</style>\n"
            "<rect width=\"100%%\" height=\"100%%\" fill=\"#fff\"/>\n"
            "<text x=\"%d\" y=\"30\" class=\"title\">%s</text>\n<text x=\"%d\" y=\"50\">kernel %s</text>\n"
            "<rect x=\"%d\" y=\"%d\" width=\"%.1f\" height=\"%.1f\" fill=\"%s\"/>\n",
            width, height, width, height, LEFT, title, LEFT, attn_plan_kernel(plan), LEFT, TOP, g->width, g->height,
            classes[ATTN_TILE_SKIP].colour);
    draw_cells(out, g);
    draw_chunks(out, g);
    fprintf(out, "<rect x=\"%d\" y=\"%d\" width=\"%.1f\" height=\"%.1f\" fill=\"none\" stroke=\"#718096\"/>\n", LEFT, TOP,
            g->width, g->height);
    draw_axes(out, g);
    draw_order(out, g);
    draw_legend(out, g);
    fprintf(out, "</svg>\n");
}

/* ---- the file ---- */

static int write_file(const char *path, const char *title, const attn_plan *plan, const grid *g) {
    char temporary[PATH_MAX];
    if ((size_t)snprintf(temporary, sizeof temporary, "%s.tmp-%ld", path, (long)getpid()) >= sizeof temporary)
        return tool_error(TOOL_USAGE, "%.64s...: the path is too long", path);
    errno = EIO; /* what a fault leaves to be reported */
    FILE *out = attn__fault(ATTN_FAULT_FILE) ? NULL : fopen(temporary, "wx");
    if (!out) return tool_error(TOOL_RUNTIME, "%s: cannot be created: %s", path, strerror(errno));
    draw(out, title, plan, g);
    bool written = !ferror(out) && !attn__fault(ATTN_FAULT_FILE);
    written = fclose(out) == 0 && written;
    if (written && !attn__fault(ATTN_FAULT_FILE) && rename(temporary, path) == 0) return TOOL_OK;
    int reason = errno;
    unlink(temporary);
    return tool_error(TOOL_RUNTIME, "%s: cannot be written: %s", path, strerror(reason));
}

static int32_t cells(int32_t length, int32_t tile, int32_t tiles_per_cell) {
    int32_t tiles = (length + tile - 1) / tile;
    return (tiles + tiles_per_cell - 1) / tiles_per_cell;
}

int tiles_draw(const char *path, const char *title, const attn_plan *plan, const attn_buffers *buffers, int32_t batch,
               int32_t head, const tile_summary *summary) {
    const tile_summary *s = summary;
    if (!s->rows || !s->cols) return tool_error(TOOL_USAGE, "%s: there are no tiles to draw", path);
    grid g = {.summary = s, .tiles_per_cell = 1};
    while (cells(s->rows, s->tile_rows, g.tiles_per_cell) > MAX_CELLS ||
           cells(s->cols, s->tile_cols, g.tiles_per_cell) > MAX_CELLS)
        g.tiles_per_cell *= 2;
    g.rows = cells(s->rows, s->tile_rows, g.tiles_per_cell);
    g.cols = cells(s->cols, s->tile_cols, g.tiles_per_cell);
    g.width = g.height = SIDE;
    double ratio = (double)s->rows / s->cols; /* true to scale, unless that leaves nothing to see */
    if (ratio < 1) g.height = ratio < 0.08 ? 0.08 * SIDE : ratio * SIDE;
    if (ratio > 1) g.width = ratio > 4 ? 0.25 * SIDE : SIDE / ratio;
    int64_t area = (int64_t)g.rows * g.cols;
    g.seen = tool_alloc(area, sizeof *g.seen);
    g.chunk = tool_alloc(area, sizeof *g.chunk);
    g.order = tool_alloc(g.rows, sizeof *g.order);
    int code = g.seen && g.chunk && g.order ? TOOL_OK : TOOL_RUNTIME;
    if (code == TOOL_OK) {
        memset(g.seen, 0, (size_t)area);
        memset(g.chunk, 0, (size_t)area * sizeof *g.chunk);
        for (int32_t row = 0; row < g.rows; row++) g.order[row] = INT32_MAX;
        attn_status status = attn_plan_tiles(plan, buffers, batch, head, visit_grid, &g);
        code = status == ATTN_OK ? write_file(path, title, plan, &g) : tool_status("plan", status);
    }
    free(g.seen);
    free(g.chunk);
    free(g.order);
    return code;
}
