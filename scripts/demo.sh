#!/bin/sh
# The demonstration: builds the command line, asks what it sees of this machine, draws how one problem is cut into tiles,
# then measures a few problems and compares their results with the reference.
set -eu
cd "$(dirname "$0")/.."
picture=build/demo/tiles.svg

scripts/setup.sh build
mkdir -p build/demo
echo "building in build/ (what the compiler says goes to build/demo/build.log)"
{ cmake --preset release && cmake --build --preset release -j "${JOBS:-2}" --target attn_tool; } >build/demo/build.log 2>&1 || {
    tail -n 40 build/demo/build.log
    exit 1
}

echo
build/attn info
echo
build/attn plan --seqlen 1024 --heads 8/2 --dim 64 --causal --window 384,0 --svg $picture
echo
echo "Its tiles (skipped, full and partial, in the order of work) are drawn in $picture"
echo
build/attn bench --suite demo --check
