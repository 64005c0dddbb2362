#!/bin/sh
# The demonstration: what the library sees of this machine, a picture of how one problem is cut into tiles, and a table of
# a few problems, measured and compared with the reference.
set -eu
cd "$(dirname "$0")/.."

picture=build/demo/tiles.svg
mkdir -p build/demo
build/attn info
echo
build/attn plan --seqlen 1024 --heads 8/2 --dim 64 --causal --window 384/0 --svg $picture
echo
echo "The tiles of that plan (skipped, full, partial, and their order) are drawn in $picture"
echo
build/attn bench --suite demo --check
