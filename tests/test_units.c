/*
 * Tile classes by exhaustion, the tile map of a plan, and the small public functions that say what is in the library.
 */
#define _GNU_SOURCE
#include <string.h>

#include "build.h"
#include "mask.h"
#include "test.h"

/* ---- tiles ---- */

/* The class of a tile against its elements: sound always; exact unless FlashMask ranges blur it. */
static void check_class(const attn_mask *m, int32_t i0, int32_t i1, int32_t j0, int32_t j1, const int32_t *flash) {
    int allowed = 0, total = (i1 - i0) * (j1 - j0);
    attn_flash_range range;
    for (int32_t j = j0; j < j1 && j < m->sk; j++) {
        for (int32_t i = i0; i < i1; i++) allowed += attn__mask_allowed(m, i, j, flash + j * m->vectors);
        if (m->vectors) attn__flash_extend(&range, attn__flash_load(m, flash + j * m->vectors), j == j0);
    }
    int got = attn__mask_tile(m, i0, i1, j0, j1, m->vectors && j0 < m->sk ? &range : NULL);
    int exact = allowed == 0 ? ATTN_TILE_SKIP : allowed == total ? ATTN_TILE_FULL : ATTN_TILE_PARTIAL;
    CHECK_SAY(got == exact || (m->vectors && got == ATTN_TILE_PARTIAL),
              "sq %d sk %d left %d right %d: tile [%d, %d) x [%d, %d) is %d, want %d", m->sq, m->sk, m->left, m->right, i0,
              i1, j0, j1, got, exact);
}

TEST(s05_tile_classes_by_exhaustion) {
    static const int32_t windows[][3] = {{0, -1, -1}, {1, -1, -1}, {0, 0, 0}, {0, 3, 1},
                                         {1, 2, -1},  {0, -1, 2},  {0, 1, -1}};
    uint64_t random = 1;
    for (int32_t sq = 1; sq <= 9; sq += 2)
        for (int32_t sk = 1; sk <= 10; sk += 3)
            for (size_t w = 0; w < sizeof windows / sizeof *windows; w++)
                for (int32_t vectors = 0; vectors <= 4; vectors++) {
                    bool causal = windows[w][0];
                    if (vectors == 3 || (causal ? vectors > 2 : vectors == 1)) continue;
                    attn_mask m = attn__mask_make(sq, sk, causal, 1, windows[w][1], windows[w][2], vectors);
                    int32_t flash[64];
                    for (int n = 0; n < 64; n++) flash[n] = random_range(&random, 0, sq);
                    for (int32_t i0 = 0; i0 < sq; i0++)
                        for (int32_t i1 = i0 + 1; i1 <= sq; i1++)
                            for (int32_t j0 = 0; j0 < sk; j0++)
                                for (int32_t j1 = j0 + 1; j1 <= sk + 1; j1++) check_class(&m, i0, i1, j0, j1, flash);
                }
}

/* What attn_plan_tiles is asked to prove, gathered while it visits. */
typedef struct tile_map {
    const attn_mask *mask;
    const int32_t *flash;
    int32_t sq, sk;
    unsigned char seen[300 * 300];
    int64_t skipped, full, partial;
} tile_map;

static int visit_tile(void *user, const attn_tile *tile) {
    tile_map *map = user;
    int64_t *const counts[] = {&map->skipped, &map->full, &map->partial};
    if (!CHECK(tile->tile_class >= 0 && tile->tile_class <= 2)) return 1;
    ++*counts[tile->tile_class];
    CHECK(tile->row >= 0 && tile->rows > 0 && tile->row + tile->rows <= map->sq);
    CHECK(tile->col >= 0 && tile->cols > 0 && tile->col + tile->cols <= map->sk);
    for (int32_t i = tile->row; i < tile->row + tile->rows; i++)
        for (int32_t j = tile->col; j < tile->col + tile->cols; j++) {
            map->seen[i * 300 + j]++;
            bool allowed = attn__mask_allowed(map->mask, i, j, map->flash + j * map->mask->vectors);
            CHECK(!(allowed && tile->tile_class == ATTN_TILE_SKIP) && !(!allowed && tile->tile_class == ATTN_TILE_FULL));
        }
    return 0;
}

TEST(s05_plan_tiles_cover_the_matrix_once) {
    static tile_map map;
    attn_context *context = make_context(ATTN_BACKEND_CPU, 1);
    for (int vectors = 0; vectors <= 1; vectors++) {
        enum { SQ = 290, SK = 300 };
        rig r = {.p = problem(ATTN_F32, 1, 1, 1, SQ, SK, 16)};
        r.p.flags = ATTN_CAUSAL;
        r.p.flashmask_vectors = vectors;
        CHECK(rig_make(&r, 1));
        for (int j = 0; vectors && j < SK; j++) ((int32_t *)(uintptr_t)r.f.flashmask)[j] = j < 150 ? 150 : SQ;
        attn_mask m = attn__mask_make(SQ, SK, 1, 0, 0, 0, vectors);
        memset(&map, 0, sizeof map);
        map.mask = &m, map.flash = r.f.flashmask, map.sq = SQ, map.sk = SK;
        attn_plan *plan;
        if (!CHECK_OK(attn_plan_create(&plan, context, &r.p))) return;
        CHECK_OK(attn_plan_tiles(plan, &r.f, 0, 0, visit_tile, &map));
        CHECK(map.skipped > 0 && map.full > 0 && map.partial > 0);
        int wrong = 0;
        for (int n = 0; n < SQ * SK; n++) wrong += map.seen[n / SK * 300 + n % SK] != 1;
        CHECK_SAY(wrong == 0, "%d elements are not in exactly one tile", wrong);
        attn_plan_destroy(plan);
        rig_free(&r);
    }
    attn_context_destroy(context);
}

static int visit_chunk(void *user, const attn_tile *tile) {
    int32_t *most = user;
    if (tile->chunk > *most) *most = tile->chunk;
    return 0;
}

/* The plan's words and its tiles say which sequences are worked in chunks of 512 keys: up to 16 rows, by products of bf16 up to 4. */
static void chunks(attn_context *context, attn_dtype dtype) {
    static const int32_t rows[] = {1, 4, 5, 16, 17};
    for (size_t n = 0; n < sizeof rows / sizeof *rows; n++) {
        rig r = {.p = problem(dtype, 1, 2, 1, rows[n], 3000, 16)};
        int32_t limit, most = 0;
        attn_plan *plan;
        CHECK(rig_make(&r, 1));
        if (!CHECK_OK(attn_plan_create(&plan, context, &r.p))) return;
        limit = strstr(attn_plan_kernel(plan), "_bf16") ? 4 : 16;
        CHECK(
            strstr(attn_plan_describe(plan), limit == 4 ? "of at most 4 rows in chunks" : "of at most 16 rows in chunks"));
        CHECK_OK(attn_plan_tiles(plan, &r.f, 0, 0, visit_chunk, &most));
        CHECK_SAY(most == (rows[n] <= limit ? 5 : 0), "%d rows: %d chunks, at most %d rows are split", rows[n], most + 1,
                  limit);
        attn_plan_destroy(plan);
        rig_free(&r);
    }
}
TEST(s05_plan_tiles_say_which_are_chunks) {
    if (on_host()) each_cpu(chunks);
    if (!on_host()) test_skip("only the cpu backend tells its tiles");
}

/* ---- what is in the library ---- */

TEST(names_and_versions) {
    CHECK(attn_version() == ATTN_VERSION);
    CHECK(strcmp(attn_status_name(ATTN_NO_MEMORY), "ATTN_NO_MEMORY") == 0);
    CHECK(strcmp(attn_status_name((attn_status)99), "unknown status") == 0);
    CHECK(strcmp(attn_dtype_name(ATTN_BF16), "bf16") == 0 && strcmp(attn_dtype_name((attn_dtype)99), "unknown") == 0);
    CHECK(attn_dtype_size(ATTN_F64) == 8 && attn_dtype_size(ATTN_DTYPE_DEFAULT) == 0);
    CHECK(attn_cpu_features() != NULL && attn_cpu_features()[0] != 0 && attn_cpu_features() == attn_cpu_features());
}

TEST(kernel_table_is_well_formed) {
    attn_kernel_info info;
    int32_t count = 0, available = 0;
    for (; attn_kernel_get(count, &info, sizeof info) == ATTN_OK; count++) {
        CHECK(info.name && info.name[0] && info.needs);
        CHECK(!strcmp(info.backend, "ref") || !strcmp(info.backend, "cpu") || !strcmp(info.backend, "cuda"));
        available += info.available;
        for (int32_t n = 0; n < count; n++) { /* names are unique */
            attn_kernel_info other;
            CHECK_OK(attn_kernel_get(n, &other, sizeof other));
            CHECK_SAY(strcmp(other.name, info.name) != 0, "%s twice", info.name);
        }
    }
    CHECK(count > 0 && available > 0);
    CHECK_STATUS(attn_kernel_get(count, &info, sizeof info), ATTN_INVALID, "index=");
    CHECK_STATUS(attn_kernel_get(-1, &info, sizeof info), ATTN_INVALID, "index=-1");
}

TEST(plan_describes_itself) {
    for (attn_backend_id backend = ATTN_BACKEND_REF; backend <= ATTN_BACKEND_CPU; backend++) {
        attn_context *context = make_context(backend, 2);
        attn_problem p = problem(ATTN_F32, 1, 8, 2, 100, 200, 64);
        p.flags = ATTN_CAUSAL;
        attn_plan *plan;
        if (!CHECK_OK(attn_plan_create(&plan, context, &p))) return;
        const char *text = attn_plan_describe(plan);
        CHECK(strstr(text, "causal") && strstr(text, attn_context_backend(context)) && strstr(text, "workspace: "));
        CHECK(attn_plan_kernel(plan)[0] != 0 && strstr(text, attn_plan_kernel(plan)));
        attn_plan_destroy(plan);
        attn_context_destroy(context);
    }
}
