#define _GNU_SOURCE
/* Whether AMX can be used: what the processor has, what the system saves, what the kernel allows this process. */
#include <pthread.h>

#include "amx.h"

#if defined(ATTN_HAVE_AMX) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

/* The registers that the system saves, of those that xsave can. */
static uint64_t saved(void) {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

static bool has_instructions(void) {
    enum { OSXSAVE = 1 << 27, AMX_BF16 = 1 << 22, AMX_TILE = 1 << 24, AVX512_BF16 = 1 << 5, XTILE = 3 << 17 };
    unsigned a, b, c, d;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512dq") ||
        !__builtin_cpu_supports("avx512vl"))
        return false;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & OSXSAVE) || (saved() & XTILE) != XTILE) return false;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & AMX_BF16) || !(d & AMX_TILE)) return false;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & AVX512_BF16);
}

/* Since Linux 5.16 tiles are only for processes that have asked. Older kernels answer that there is no such request. */
enum { ARCH_GET_XCOMP_SUPP = 0x1021, ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };

static bool can_be_permitted(void) {
    uint64_t features = 0;
    return syscall(SYS_arch_prctl, ARCH_GET_XCOMP_SUPP, &features) == 0 && (features >> XFEATURE_XTILEDATA & 1);
}

static bool is_permitted(void) { return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0; }
#else
static bool has_instructions(void) { return false; }
static bool can_be_permitted(void) { return false; }
static bool is_permitted(void) { return false; }
#endif

static bool present, available;

static void detect(void) { present = has_instructions() && can_be_permitted(); }

static void ask(void) { available = attn__amx_present() && is_permitted(); }

bool attn__amx_present(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, detect);
    return present;
}

bool attn__amx_available(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, ask);
    return available;
}
