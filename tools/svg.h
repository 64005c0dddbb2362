/* The tile map of a plan as a picture. */
#ifndef ATTN_SVG_H
#define ATTN_SVG_H

#include "tool.h"

/* What a walk over the tiles of one sequence and head finds. */
typedef struct tile_summary {
    int64_t count[3];   /* by tile_class */
    int32_t rows, cols; /* of the map: query rows, keys */
    int32_t tile_rows, tile_cols;
    int32_t chunks; /* 1: not split */
} tile_summary;

attn_status tiles_summarize(const attn_plan *plan, const attn_buffers *buffers, int32_t batch, int32_t head,
                            tile_summary *summary);

/* Draws the map into a file, which is replaced only when the picture is complete. An exit code; messages are printed. */
int tiles_draw(const char *path, const char *title, const attn_plan *plan, const attn_buffers *buffers, int32_t batch,
               int32_t head, const tile_summary *summary);

#endif
