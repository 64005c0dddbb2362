/*
 * The kernels' code: what nvcc made of variants.def, one fatbin per image, copied into the library by the assembler.
 *
 * The build says where the files are (ATTN_CUDA_IMAGES) and lists them in images.def; without kernels neither is there.
 */
#include "cuda.h"

#include <string.h>

#ifdef ATTN_CUDA_IMAGES
#define IMAGE(name)                                                                                                        \
    __asm__(".pushsection .rodata\n"                                                                                       \
            ".global attn__image_" #name "\n"                                                                              \
            ".hidden attn__image_" #name "\n"                                                                              \
            ".balign 64\n"                                                                                                 \
            "attn__image_" #name ":\n"                                                                                     \
            ".incbin \"" ATTN_CUDA_IMAGES "/" #name ".fatbin\"\n"                                                          \
            ".popsection\n");                                                                                              \
    extern const unsigned char attn__image_##name[];
#include "images.def"
#undef IMAGE
#endif

static const struct {
    const char *name;
    const unsigned char *start;
} images[] = {
#ifdef ATTN_CUDA_IMAGES
#define IMAGE(name) {#name, attn__image_##name},
#include "images.def"
#undef IMAGE
#endif
    {NULL, NULL},
};

static const void *(*replacement)(const char *file); /* a test's images */

void attn__cuda_image_replace(const void *(*image)(const char *file)) { replacement = image; }

const void *attn__cuda_image(const char *file) {
    if (replacement) return replacement(file);
    size_t length = strcspn(file ? file : "", ".");
    for (int n = 0; images[n].name; n++) {
        if (!file || (strncmp(images[n].name, file, length) == 0 && !images[n].name[length])) return images[n].start;
    }
    return NULL;
}
