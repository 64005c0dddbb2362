/* `attn`, the command line of the library: main, the table of commands, the general help. */
#include <stdio.h>
#include <string.h>

#include "tool.h"

static const struct {
    const char *name, *what;
    int (*run)(int argc, char **argv);
} commands[] = {
    {"info", "backends, CPU features and kernels of this build", cmd_info},
    {"run", "attention of .npy files: forward, backward or KV append", cmd_run},
    {"check", "random differential test of a backend against ref", cmd_check},
    {"bench", "times attention; a table or JSON lines", cmd_bench},
    {"plan", "how a problem would be computed, in words and as a picture", cmd_plan},
    {"tune", "times GPU kernels knob by knob; writes a tuning file", cmd_tune},
};
enum { COMMANDS = sizeof commands / sizeof *commands };

static int help(FILE *out) {
    fprintf(out, "Usage: attn COMMAND [OPTION]...\n\nExact attention from the command line.\n\nCommands:\n");
    for (int i = 0; i < COMMANDS; i++) fprintf(out, "  %-8s %s\n", commands[i].name, commands[i].what);
    fprintf(out,
            "\n'attn COMMAND --help' describes a command, with examples. 'attn --version' prints the version.\n"
            "\nExit codes: 0 success; 1 a check or comparison failed; 2 bad usage or bad input; 3 run-time failure.\n");
    return TOOL_OK;
}

static int dispatch(int argc, char **argv) {
    const char *name = argc > 1 ? argv[1] : "";
    for (int i = 0; i < COMMANDS; i++)
        if (strcmp(name, commands[i].name) == 0) return commands[i].run(argc - 1, argv + 1);
    if (strcmp(name, "help") == 0 && argc > 2) {
        char *again[] = {argv[0], argv[2], "--help"};
        return strcmp(argv[2], "help") == 0 ? help(stdout) : dispatch(3, again);
    }
    if (strcmp(name, "help") == 0 || strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0) return help(stdout);
    if (strcmp(name, "--version") == 0) {
        int version = attn_version();
        printf("attn %d.%d.%d\n", version / 10000, version / 100 % 100, version % 100);
        return TOOL_OK;
    }
    if (*name) tool_error(TOOL_USAGE, "no such command '%s'", name);
    help(stderr);
    return TOOL_USAGE;
}

int main(int argc, char **argv) {
    int code = dispatch(argc, argv);
    int flushed = tool_flush();
    return code ? code : flushed;
}
