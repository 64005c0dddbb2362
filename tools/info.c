/* `attn info`: what this build can do on this machine. */
#include <stdio.h>
#include <string.h>

#include "cuda/driver.h"
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
    "Prints the version, the backends that can be used, the features of this CPU, the GPUs or why there is\n"
    "none, and the table of kernels. The last kernel of an operation and type that is available is the one\n"
    "that is used.\n",
    "attn info\n"
    "attn info --json | python3 -m json.tool\n",
    {{"Options", options_info}, {"Machine", options_machine}, {0}},
};

/* Rows of a backend in the kernel table that this machine can run. */
static int kernels_of(const char *backend) {
    attn_kernel_info k;
    int count = 0;
    for (int32_t i = 0; attn_kernel_get(i, &k, sizeof k) == ATTN_OK; i++)
        count += k.available && strcmp(k.backend, backend) == 0;
    return count;
}

/* The driver and its GPUs; or NULL, and why[] says why the cuda backend cannot be used. */
static const attn_driver_state *find_gpus(char *why, size_t bytes) {
    attn_config config = {.size = sizeof config, .backend = ATTN_BACKEND_CUDA};
    attn_context *context;
    const attn_driver_state *state = NULL;
    if (attn_context_create(&context, &config) == ATTN_OK && attn__driver_open(&state) == ATTN_OK) {
        attn_context_destroy(context);
        return state;
    }
    const char *detail = attn_error_detail(), *prefix = "backend=cuda: ";
    if (strncmp(detail, prefix, strlen(prefix)) == 0) detail += strlen(prefix);
    snprintf(why, bytes, "%s", detail);
    return NULL;
}

static void print_gpus(void) {
    char why[512];
    const attn_driver_state *state = find_gpus(why, sizeof why);
    if (!state) {
        printf("cuda      not usable: %s\n", why);
        return;
    }
    printf("cuda      driver for CUDA %d.%d\n", state->version / 1000, state->version % 1000 / 10);
    for (int32_t n = 0; n < state->gpus; n++) {
        const attn_gpu *g = &state->gpu[n];
        printf("gpu %-5d %s, sm_%d, %d multiprocessors, %d bytes of shared memory for a block\n", g->device, g->name,
               g->arch, g->sms, g->shared_bytes);
    }
}

static void print_gpus_json(void) {
    char why[512];
    const attn_driver_state *state = find_gpus(why, sizeof why);
    if (!state) {
        printf("{\"usable\": false, \"why\": ");
        tool_json(why);
        printf("}");
        return;
    }
    printf("{\"usable\": true, \"driver\": \"%d.%d\", \"devices\": [", state->version / 1000, state->version % 1000 / 10);
    for (int32_t n = 0; n < state->gpus; n++) {
        const attn_gpu *g = &state->gpu[n];
        printf("%s{\"device\": %d, \"name\": ", n ? ", " : "", g->device);
        tool_json(g->name);
        printf(", \"arch\": %d, \"multiprocessors\": %d, \"shared_bytes\": %d}", g->arch, g->sms, g->shared_bytes);
    }
    printf("]}");
}

static const char *const backends[] = {"ref", "cpu", "cuda"};
enum { BACKENDS = sizeof backends / sizeof *backends };

static void print_text(int version, const char *backend, int threads) {
    printf("version   %d.%d.%d\nbackends ", version / 10000, version / 100 % 100, version % 100);
    for (int i = 0; i < BACKENDS; i++)
        if (kernels_of(backends[i])) printf(" %s%s", backends[i], strcmp(backends[i], backend) == 0 ? " (chosen)" : "");
    printf("\nthreads   %d\ncpu       %s\n", threads, attn_cpu_features());
    print_gpus();
    printf("\n%-8s %-26s %-9s %-7s %-10s %s\n", "backend", "kernel", "op", "tile", "available", "needs");
    attn_kernel_info k;
    for (int32_t i = 0; attn_kernel_get(i, &k, sizeof k) == ATTN_OK; i++) {
        char tile[32] = "-";
        if (k.rows) snprintf(tile, sizeof tile, "%dx%d", k.rows, k.cols);
        printf("%-8s %-26s %-9s %-7s %-10s %s\n", k.backend, k.name, op_name(k.op), tile, k.available ? "yes" : "no",
               *k.needs ? k.needs : "-");
    }
}

static void print_json(int version, const char *backend, int threads) {
    printf("{\"version\": \"%d.%d.%d\", \"backends\": [", version / 10000, version / 100 % 100, version % 100);
    for (int i = 0, n = 0; i < BACKENDS; i++)
        if (kernels_of(backends[i])) printf("%s\"%s\"", n++ ? ", " : "", backends[i]);
    printf("], \"chosen\": \"%s\", \"threads\": %d, \"cpu\": \"%s\", \"cuda\": ", backend, threads, attn_cpu_features());
    print_gpus_json();
    printf(", \"kernels\": [");
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
