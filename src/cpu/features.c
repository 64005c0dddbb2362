/* CPU features, from the compiler's run-time support: it asks cpuid, and the kernel whether it saves the registers. */
#include "features.h"

#include "amx.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__aarch64__)
#include <sys/auxv.h>
#endif
#if defined(__linux__)
#include <sys/prctl.h>
#endif

#if defined(__x86_64__)
#include <cpuid.h>

/* Not every compiler's __builtin_cpu_supports knows this one. That the registers are saved comes with AVX2. */
static int has_f16c(void) {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

#if defined(__aarch64__)
enum { HWCAP_OF_SVE = 1 << 22, HWCAP2_OF_BF16 = 1 << 14 };

/* Bits of an SVE vector, 0 without. A table is compiled for one length; one of 128 bits gains nothing over NEON. */
static int sve_bits(void) {
#if defined(PR_SVE_GET_VL)
    int bytes = getauxval(AT_HWCAP) & HWCAP_OF_SVE ? prctl(PR_SVE_GET_VL) : 0;
    return bytes > 0 ? (bytes & PR_SVE_VL_LEN_MASK) * 8 : 0;
#else
    return 0;
#endif
}
#endif

static uint32_t features;

static void detect(void) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c()) features |= ATTN_CPU_AVX2;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && (features & ATTN_CPU_AVX2))
        features |= ATTN_CPU_AVX512;
    if (__builtin_cpu_supports("avx512bf16") && (features & ATTN_CPU_AVX512)) features |= ATTN_CPU_AVX512_BF16;
#elif defined(__aarch64__)
    features |= ATTN_CPU_NEON;
    if (sve_bits() == 256) features |= ATTN_CPU_SVE256;
    if (sve_bits() == 512) features |= ATTN_CPU_SVE512;
    if (getauxval(AT_HWCAP2) & HWCAP2_OF_BF16) features |= ATTN_CPU_NEON_BF16;
#endif
    if (attn__amx_present()) features |= ATTN_CPU_AMX;
}

uint32_t attn__cpu_detect(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, detect);
    return features;
}

attn_status attn__cpu_allowed(uint32_t *allowed) {
    static const struct {
        const char *name;
        uint32_t needs;
    } isas[] = {
#define ISA(name, bits, words) {#name, bits},
#define ISA_ONLY(name, tables, dtype, id, bits, words) {#name, bits},
#include "isa.def"
#undef ISA
#undef ISA_ONLY
    };
    *allowed = attn__cpu_detect();
    const char *wanted = getenv("ATTN_CPU");
    if (!wanted ||
        !*wanted) { /* bf16 by vectors of AVX-512 is for who asks for it: where it was measured floats are faster */
        if (!(*allowed & ATTN_CPU_AMX)) *allowed &= ~(uint32_t)ATTN_CPU_AVX512_BF16;
        return ATTN_OK;
    }
    for (size_t n = 0; n < sizeof isas / sizeof isas[0]; n++) {
        if (strcmp(wanted, isas[n].name) != 0 || (isas[n].needs & ~*allowed)) continue;
        RETURN_IF((isas[n].needs & ATTN_CPU_AMX) && !attn__amx_available(), ATTN_SYSTEM,
                  "ATTN_CPU=%s: the system does not let this process use AMX", wanted);
        *allowed = isas[n].needs | ATTN_CPU_ASKED;
        return ATTN_OK;
    }
    return attn__fail(ATTN_UNSUPPORTED, "ATTN_CPU=%s: not an instruction set of this library and machine", wanted);
}

static char text[512];

static void write_text(void) {
#if defined(__x86_64__)
    snprintf(text, sizeof text, "x86-64:");
#define SAY(feature, name)                                                                                                 \
    if (__builtin_cpu_supports(feature)) strncat(text, " " name, sizeof text - strlen(text) - 1)
    SAY("sse2", "SSE2");
    SAY("avx", "AVX");
    SAY("avx2", "AVX2");
    SAY("fma", "FMA");
    if (has_f16c()) strncat(text, " F16C", sizeof text - strlen(text) - 1);
    SAY("avx512f", "AVX512F");
    SAY("avx512dq", "AVX512DQ");
    SAY("avx512bw", "AVX512BW");
    SAY("avx512vl", "AVX512VL");
    SAY("avx512vnni", "AVX512VNNI");
    SAY("avx512bf16", "AVX512BF16");
    if (attn__amx_present()) strncat(text, " AMX-BF16", sizeof text - strlen(text) - 1);
#undef SAY
#elif defined(__aarch64__)
    static const struct {
        unsigned long type, bit;
        const char *name;
    } bits[] = {{AT_HWCAP, 1ul << 10, " FP16"},
                {AT_HWCAP, 1ul << 20, " DOTPROD"},
                {AT_HWCAP2, HWCAP2_OF_BF16, " BF16"},
                {AT_HWCAP2, 1ul << 13, " I8MM"}};
    snprintf(text, sizeof text, "aarch64: NEON");
    for (size_t n = 0; n < sizeof bits / sizeof *bits; n++)
        if (getauxval(bits[n].type) & bits[n].bit) strncat(text, bits[n].name, sizeof text - strlen(text) - 1);
    size_t at = strlen(text);
    if (sve_bits() > 0) snprintf(text + at, sizeof text - at, " SVE%d", sve_bits());
#else
    snprintf(text, sizeof text, "plain C");
#endif
}

const char *attn_cpu_features(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, write_text);
    return text;
}
