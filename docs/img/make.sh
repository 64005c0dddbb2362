#!/bin/sh
# Draws the tile maps of docs/algorithm.md anew, each with the one command that made it:
#
#   docs/img/make.sh [FOLDER]        into this folder, or into another one to compare
#
# ATTN names the program, build/attn by default. path.svg and backward.svg are drawn by hand and not touched.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
attn=${ATTN:-$here/../../build/attn}
out=${1:-$here}

# A picture names its kernel, so it is made with the one that every machine has, on a number of threads that is written here:
# so many that each row of tiles is a piece of work of its own, not a strip of them.
export ATTN_CPU=c

# draw NAME OPTION...
draw() {
    name=$1
    shift
    "$attn" plan --backend cpu --threads 32 --dim 64 "$@" --svg "$out/$name.svg" >/dev/null
    echo "$out/$name.svg"
}

draw full --seqlen 512
draw causal --seqlen 1024 --causal
draw causal-aligned --seqlen 256/1024 --causal
draw window --seqlen 1024 --causal --window 255,0
draw decode --heads 32/8 --seqlen 1/8192
draw flashmask-causal-1 --seqlen 2048 --flashmask-pattern share-question
draw flashmask-causal-2 --seqlen 2048 --flashmask-pattern global-window
draw flashmask-full-2 --seqlen 2048 --flashmask-pattern prefix-document
draw flashmask-full-4 --seqlen 2048 --flashmask-pattern two-way-window
