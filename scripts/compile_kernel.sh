#!/bin/sh
# Compiles one GPU kernel. What the compiler says (registers, shared memory, spills, warnings) stays beside the result, where
# scripts/check_kernels.py reads it; a failure is shown.
#
#   scripts/compile_kernel.sh OUT NVCC ARGUMENT...      makes OUT.fatbin and OUT.log
set -eu
out=$1
shift
new=$out.new.$$ # a build that is interrupted leaves no half file behind
trap 'rm -f "$new"' EXIT
if ! "$@" -Xptxas -v -Xfatbin=-compress-all -o "$new" >"$out.log" 2>&1; then
    echo "$*"
    cat "$out.log"
    exit 1
fi >&2
mv "$new" "$out.fatbin"
