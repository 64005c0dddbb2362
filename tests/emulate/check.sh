#!/bin/sh
# The small kernels of src/cuda on the CPU (driver.c says how): random problems against ref, and what attn check does not look at.
#
#   tests/emulate/check.sh BUILD [options of attn check]      BUILD: a build folder of this project, with GPU kernels
set -eu
cd "$(dirname "$0")/../.."
build=$1
shift
case $build in /*) ;; *) build=$PWD/$build ;; esac
out=$build/emulate
mkdir -p "$out"
flags="-O2 -g -fPIC -fvisibility=hidden -U_FORTIFY_SOURCE -ffp-contract=off -Wall -Wextra -Werror -I include -I src -I src/cuda -I tests/emulate"
cuda="${CXX:-c++} $flags -std=c++17 -x c++ -include tests/emulate/emulate.h"
fwd="-Wno-unknown-pragmas -Wno-enum-compare -Wno-int-in-bool-context -Wno-unused-parameter"
objects=
: >"$out/commands"
for source in $(sed -n 's/^PIECE([a-z_]*, \([a-z_]*\.cu\))$/\1/p' src/cuda/variants.def | sort -u); do
    echo "$cuda -c src/cuda/$source -o $out/$source.o" >>"$out/commands"
    objects="$objects $out/$source.o"
done
for kernel in $(sed -n 's/^FWD(\([a-z0-9_]*\),.*/\1/p' src/cuda/variants.def); do
    echo "$cuda $fwd -DVARIANT=$kernel -c src/cuda/fwd.cu -o $out/$kernel.o" >>"$out/commands"
    objects="$objects $out/$kernel.o"
done
xargs -P "$(nproc)" -d '\n' -n 1 sh -c <"$out/commands"
${CC:-cc} $flags -std=gnu11 -shared -o "$out/libemulated-cuda.so" tests/emulate/driver.c tests/emulate/fibers.c $objects -lm -lpthread
${CC:-cc} $flags -std=gnu11 -o "$out/pieces" tests/emulate/pieces.c "$build/libattn.a" -lm -lpthread -ldl
export ATTN_CUDA_DRIVER="$out/libemulated-cuda.so"
if [ $# -gt 0 ]; then
    exec "$build/attn" check --backend cuda "$@"
fi
"$out/pieces"
EMULATE_ORDER=reverse "$build/attn" check --backend cuda --small --cases 100 --seed 1
"$build/attn" check --backend cuda --small --cases 500 --seed 2
