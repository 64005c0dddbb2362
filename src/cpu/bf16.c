/* What is the same for all products of bf16 (bf16.h). */
#include "bf16.h"

#include "micro.h"

const uint16_t *attn__bf16_clean(uint16_t *to, const uint16_t *from, int64_t row, int32_t rows, int32_t dim, bool *bad) {
    for (int32_t i = 0; i < rows; i++) {
        bad[i] = false;
        for (int32_t x = 0; x < dim; x++) {
            uint16_t value = from[i * row + x];
            bad[i] |= attn__bf16_is_bad(value);
            to[(int64_t)i * dim + x] = attn__bf16_is_bad(value) ? 0 : value;
        }
    }
    return to;
}

void attn__bf16_transpose(const struct attn__micro_f32 *micro, float *to, int64_t ld, const float *panel, int32_t dim) {
    for (int32_t x = 0; x < dim; x += 16) micro->transpose(to + x, ld, panel + (ptrdiff_t)16 * x, 16, 16, 16);
}
