/*
 * What the commands of `attn` share: exit codes, messages, the option parser, the progress bar.
 *
 * A command is one row of the table in attn.c. It declares its options as tables of rows, one line each; parsing and the
 * text of --help both come from these rows, so that they cannot disagree.
 */
#ifndef ATTN_TOOL_H
#define ATTN_TOOL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "attn.h"

/* Exit codes, as the manual page documents them. */
enum {
    TOOL_OK = 0,
    TOOL_FAILED = 1, /* a check or a comparison failed */
    TOOL_USAGE = 2,  /* bad option, bad input file, a problem that the library refuses */
    TOOL_RUNTIME = 3 /* no memory, no thread, a file that cannot be read or written */
};

int cmd_info(int argc, char **argv);
int cmd_run(int argc, char **argv);
int cmd_check(int argc, char **argv);
int cmd_bench(int argc, char **argv);
int cmd_plan(int argc, char **argv);
int cmd_tune(int argc, char **argv);

/* ---- messages (args.c) ---- */

/* Prints "attn: ..." to stderr and returns code. */
int tool_error(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Prints the library's detail text and returns the exit code that goes with the status. */
int tool_status(const char *what, attn_status status);

/* malloc of count * bytes_each that reports its failure; the sizes may come from a file. Freed by free. */
void *tool_alloc(int64_t count, size_t bytes_each);

/* Prints text as a JSON string, quotes included; control characters become spaces. */
void tool_json(const char *text);

/* Standard output has been written for good: TOOL_OK, or a message and TOOL_RUNTIME (a full disk, a closed pipe). */
int tool_flush(void);

/* ---- options (args.c) ---- */

/* "1/32768,512": pairs a/b; a number alone is the pair of itself. */
enum { MAX_PAIRS = 32 };
typedef struct int_pairs {
    int32_t count;
    int32_t at[MAX_PAIRS][2];
} int_pairs;

enum { MAX_DTYPES = 8 };
typedef struct dtype_list {
    int count;
    attn_dtype at[MAX_DTYPES];
} dtype_list;

/* What the options that several commands share fill in. A command's own settings begin with it. */
typedef struct settings {
    attn_problem problem; /* flags and options; sizes come from --heads and its like, or from the files */
    attn_config config;   /* backend, threads */
    uint64_t seed, offset;
    int_pairs batch, heads, dim, seqlen; /* plan: one each; bench: every combination */
} settings;

/* Turns text into *target; on failure returns what was wanted, "a whole number" for instance, and NULL on success. */
typedef const char *(*option_parse)(const char *text, void *target);

typedef struct option {
    const char *name;    /* without the dashes; NULL ends a table */
    const char *metavar; /* NULL: takes no value */
    const char *help;    /* one line */
    option_parse parse;  /* NULL: only sets the flag */
    size_t at;           /* offset of the target in the command's settings */
    uint32_t flag;       /* bits for settings.problem.flags */
} option;

typedef struct option_group {
    const char *title;
    const option *options;
} option_group;

typedef struct command {
    const char *name;
    const char *usage;      /* after "attn NAME" */
    const char *summary;    /* what it does: a few lines, each ends with a newline */
    const char *examples;   /* each line ends with a newline */
    option_group groups[8]; /* the last one has options NULL */
} command;

enum { OPTIONS_GO = -1 }; /* the parser is content: go on */

/* Fills settings, whose size the command knows and zeroed. OPTIONS_GO, or the code to exit with (0 after --help). */
int options_parse(const command *command, void *settings, int argc, char **argv);

const char *parse_switch(const char *text, void *target); /* bool; for options without a value */
const char *parse_int(const char *text, void *target);    /* int32_t */
const char *parse_u64(const char *text, void *target);    /* uint64_t, 0x... allowed */
const char *parse_real(const char *text, void *target);   /* double */
const char *parse_text(const char *text, void *target);   /* const char * */
const char *parse_dtype(const char *text, void *target);  /* attn_dtype */
const char *parse_dtypes(const char *text, void *target); /* dtype_list */
const char *parse_op(const char *text, void *target);     /* attn_op */
const char *parse_pairs(const char *text, void *target);  /* int_pairs */

/* "forward", "backward", "append". */
const char *op_name(attn_op op);

/* Tables for settings: --backend, --threads; --causal, --window, --scale ...; --batch, --heads, --dim, --seqlen. */
extern const option options_machine[];
extern const option options_problem[];
extern const option options_sizes[];

/* ---- the two floors: peak.c, memory.c ---- */

/* Measures how many GFLOP/s of fused multiply-adds that many threads reach together; wide: in double. < 0: no threads. */
double peak_gflops(int threads, bool wide);

/* Measures how many GB/s that many threads together read from memory, past all caches. < 0: no threads, no memory. */
double read_gb_per_s(int threads);

/* Threads that a floor is measured with: no more than CPUs, where more would take turns, each at full speed. */
int peak_threads(int threads);

/* body(element) for each of so many elements, each on a thread of its own, once all of them are there. False: they were not. */
bool run_together(int threads, void (*body)(void *), void *args, size_t arg_bytes);

/* Out of every cache, as far as the CPU lets a program do that. */
void memory_flush(const void *memory, size_t bytes);

/* Asks for huge pages where this memory has room for them: what is measured is to be reading, not the search for pages. */
void memory_prefer_huge(void *memory, size_t bytes);

/* ---- time and progress (progress.c) ---- */

double tool_seconds(void); /* a clock that only goes forward */

/* Draws a bar on stderr, if that is a terminal, at most ten times a second. progress_end wipes it. */
void progress(const char *what, long done, long total);
void progress_end(void);

#endif
