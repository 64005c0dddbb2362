/* `attn info`: what this build can do on this machine. */
#include <stdio.h>
#include <string.h>

#include "tool.h"

typedef struct info_settings {
    settings common;
    bool json;
} info_settings;

static const option options_info[] = {
    {"json", NULL, "one JSON object", parse_switch, offsetof(info_settings, json), 0},
    {0},
};

static const command info = {
    "info",
    "[OPTION]...",
    "Prints the version, the backends, the features of this CPU and the table of kernels. The last kernel\n"
    "of an operation and type that is available is the one that is used.\n",
    "attn info\n"
    "attn info --json | python3 -m json.tool\n",
    {{"Options", options_info}, {"Machine", options_machine}, {0}},
};

/* Rows of a backend in the kernel table. */
static int kernels_of(const char *backend) {
    attn_kernel_info k;
    int count = 0;
    for (int32_t i = 0; attn_kernel_get(i, &k, sizeof k) == ATTN_OK; i++) count += strcmp(k.backend, backend) == 0;
    return count;
}

static const char *const backends[] = {"ref", "cpu", "cuda"};
enum { BACKENDS = sizeof backends / sizeof *backends };

static void print_text(int version, const char *backend, int threads) {
    printf("version   %d.%d.%d\nbackends ", version / 10000, version / 100 % 100, version % 100);
    for (int i = 0; i < BACKENDS; i++)
        if (kernels_of(backends[i])) printf(" %s%s", backends[i], strcmp(backends[i], backend) == 0 ? " (chosen)" : "");
    printf("\nthreads   %d\ncpu       %s\n\n", threads, attn_cpu_features());
    printf("%-8s %-16s %-9s %-7s %-10s %s\n", "backend", "kernel", "op", "tile", "available", "needs");
    attn_kernel_info k;
    for (int32_t i = 0; attn_kernel_get(i, &k, sizeof k) == ATTN_OK; i++) {
        char tile[32] = "-";
        if (k.rows) snprintf(tile, sizeof tile, "%dx%d", k.rows, k.cols);
        printf("%-8s %-16s %-9s %-7s %-10s %s\n", k.backend, k.name, op_name(k.op), tile, k.available ? "yes" : "no",
               *k.needs ? k.needs : "-");
    }
}

static void print_json(int version, const char *backend, int threads) {
    printf("{\"version\": \"%d.%d.%d\", \"backends\": [", version / 10000, version / 100 % 100, version % 100);
    for (int i = 0, n = 0; i < BACKENDS; i++)
        if (kernels_of(backends[i])) printf("%s\"%s\"", n++ ? ", " : "", backends[i]);
    printf("], \"chosen\": \"%s\", \"threads\": %d, \"cpu\": \"%s\", \"kernels\": [", backend, threads,
           attn_cpu_features());
    attn_kernel_info k;
    for (int32_t i = 0; attn_kernel_get(i, &k, sizeof k) == ATTN_OK; i++)
        printf("%s{\"name\": \"%s\", \"backend\": \"%s\", \"op\": \"%s\", \"rows\": %d, \"cols\": %d, \"needs\": \"%s\", "
               "\"available\": %s}",
               i ? ", " : "", k.name, k.backend, op_name(k.op), k.rows, k.cols, k.needs, k.available ? "true" : "false");
    printf("]}\n");
}

int cmd_info(int argc, char **argv) {
    info_settings s = {0};
    int code = options_parse(&info, &s, argc, argv);
    if (code != OPTIONS_GO) return code;
    attn_context *context;
    attn_status status = attn_context_create(&context, &s.common.config);
    if (status != ATTN_OK) return tool_status("info", status);
    (s.json ? print_json : print_text)(attn_version(), attn_context_backend(context), attn_context_threads(context));
    attn_context_destroy(context);
    return TOOL_OK;
}
