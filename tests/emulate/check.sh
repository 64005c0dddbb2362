#!/bin/sh
# The kernels of src/cuda on the CPU (driver.c says how): random problems against ref, and what attn check does not look at.
#
#   tests/emulate/check.sh BUILD [options of attn check]      BUILD: a build folder of this project, with GPU kernels
#
# EMULATE_ONLY, a regular expression, limits the files of kernels that are compiled for it, for a look at a few of them: the others are
# not there then. With options only.
set -eu
cd "$(dirname "$0")/../.."
build=$1
shift
case $build in /*) ;; *) build=$PWD/$build ;; esac
out=$build/emulate
mkdir -p "$out"
flags="-O1 -fPIC -fvisibility=hidden -U_FORTIFY_SOURCE -ffp-contract=off -Wall -Wextra -Werror -Wno-psabi -I include -I src -I src/cuda -I tests/emulate"
cuda="${CXX:-c++} $flags -std=c++17 -x c++ -include tests/emulate/emulate.h"
fwd="-Wno-unknown-pragmas -Wno-enum-compare -Wno-int-in-bool-context -Wno-unused-parameter -Wno-maybe-uninitialized"
runtime="tests/emulate/fibers.c tests/emulate/hopper.c tests/emulate/products.c"
objects=
newest=$(ls -t src/*.h src/cuda/*.h src/cuda/*.cu* src/cuda/*.def include/attn.h tests/emulate/* | head -n 1)
compile() { # object, the rest: adds the command to the list, unless the object is up to date
    if ! echo "$1" | grep -Eq "${EMULATE_ONLY:-.}"; then return; fi
    object=$out/$1
    shift
    objects="$objects $object"
    if [ ! -e "$object" ] || [ "$newest" -nt "$object" ]; then echo "$cuda $* -o $object" >>"$out/commands"; fi
}
: >"$out/commands"
for source in $(sed -n 's/^PIECE([a-z_]*, \([a-z_]*\.cu\))$/\1/p' src/cuda/variants.def | sort -u); do
    dynamic= # shared memory, or instructions
    if grep -q 'extern __shared__\|include "ptx.cuh"' "src/cuda/$source"; then dynamic=-DVARIANT=none; fi
    compile "$source.o" -Wno-unknown-pragmas $dynamic -c "src/cuda/$source"
done
kernels_of() { sed -n 's/^FWD(\([a-z0-9_]*\),.*/\1/p' "src/cuda/$1"; }
tune=$out/tune # kernels that only attn tune runs: it wants files, and the emulated driver does not read them
mkdir -p "$tune"
cp src/cuda/tune.def "$tune"
for table in variants.def tune.def; do
    for kernel in $(kernels_of $table); do
        compile "$kernel.o" $fwd "'-DVARIANTS=\"$table\"'" "-DVARIANT=$kernel" -c src/cuda/fwd.cu
        if [ $table = tune.def ]; then echo emulated >"$tune/$kernel.fatbin"; fi
    done
done
for kernel in $(sed -n 's/^FWD90(\([a-z0-9_]*\),.*/\1/p' src/cuda/variants.def); do
    compile "$kernel.o" $fwd "-DVARIANT=$kernel" -c src/cuda/fwd_sm90.cu
done
for kernel in $(sed -n 's/^BWD(\([a-z0-9_]*\),.*/\1/p' src/cuda/variants.def); do
    case $kernel in *_one) source=bwd_one.cu ;; *) source=bwd.cu ;; esac
    compile "$kernel.o" $fwd "-DVARIANT=$kernel" -c src/cuda/$source
done
for kernel in $(sed -n 's/^BWD90(\([a-z0-9_]*\),.*/\1/p' src/cuda/variants.def); do
    case $kernel in *f16_d64 | *f16_d128) source=bwd_sm90.cu ;; *) source=bwd_sm90_wide.cu ;; esac
    compile "$kernel.o" $fwd "-DVARIANT=$kernel" -c src/cuda/$source
done
for kernel in $(sed -n 's/^DECODE(\([a-z0-9_]*\),.*/\1/p' src/cuda/variants.def); do
    compile "$kernel.o" $fwd "-DVARIANT=$kernel" -c src/cuda/decode.cu
done
for kernel in $(sed -n 's/^DECODE90(\([a-z0-9_]*\),.*/\1/p' src/cuda/variants.def); do
    compile "$kernel.o" $fwd "-DVARIANT=$kernel" -c src/cuda/decode_sm90.cu
done
kernels=$objects
compile hopper_test.o $fwd -DVARIANT=none -c tests/emulate/hopper_test.cu
xargs -r -P "$(nproc)" -d '\n' -n 1 sh -c <"$out/commands"
${CC:-cc} $flags -O3 -std=gnu11 -shared -o "$out/libemulated-cuda.so" tests/emulate/driver.c $runtime $kernels -lm -lpthread
if [ -z "${EMULATE_ONLY:-}" ]; then
    ${CC:-cc} $flags -O2 -std=gnu11 -o "$out/hopper-test" tests/emulate/hopper_test.c $runtime "$out/hopper_test.o" -lm
fi
${CC:-cc} $flags -std=gnu11 -o "$out/pieces" tests/emulate/pieces.c "$build/libattn.a" -lm -lpthread -ldl
export ATTN_CUDA_DRIVER="$out/libemulated-cuda.so"
if [ $# -gt 0 ]; then
    exec "$build/attn" check --backend cuda "$@"
fi
"$out/hopper-test"
# Hopper's kernels: those of every dim against ref, and with NaN and infinities where some rows may see them and others not. With a
# negative scale it is the lines for every feature that do it, packed or of used lengths those for sequences of their own, otherwise the
# plain ones.
export EMULATE_ARCH=90
EMULATE_ORDER=random "$out/pieces" places
ATTN_TEST_DTYPE=bf16 ATTN_TEST_BACKEND=cuda "$build/attn-tests" c1_ c2_ c4_empty s01_ s09_inf c5_unused c5_align c5_s03 c5_cache c5_first c5_causal_prefix_of c5_varlen_of s02_softcap_of s09_gradient c5_rows_that c5_chunks latent
EMULATE_ORDER=random ATTN_TEST_DTYPE=f16 ATTN_TEST_BACKEND=cuda "$build/attn-tests" c2_nan_in_a c2_nan_in_pa s01_ s09_inf c5_align c5_paged_is latent
EMULATE_ORDER=random "$build/attn" check --backend cuda --op forward --dtype bf16 --cases 300 --seed 9
EMULATE_ORDER=reverse EMULATE_GUARD=before "$build/attn" check --backend cuda --op forward --dtype f16 --cases 150 --seed 4
EMULATE_ORDER=random "$build/attn" check --backend cuda --op backward --dtype bf16 --cases 100 --seed 8
EMULATE_ORDER=reverse EMULATE_GUARD=before "$build/attn" check --backend cuda --op backward --dtype bf16 --feature flashmask --cases 30 --seed 6
EMULATE_ORDER=random "$build/attn" check --backend cuda --op backward --dtype f16 --cases 100 --seed 8
EMULATE_ORDER=reverse "$build/attn" check --backend cuda --op backward --dtype f16 --feature flashmask --cases 30 --seed 6
export EMULATE_ARCH=80
"$out/pieces"
python=.venv/bin/python # which has numpy; scripts/setup.sh makes it
[ -x $python ] || python=python3
$python tests/emulate/decode.py "$build/attn"
# Where multiprocessors are many decode brings new keys into the cache itself, and rotates q.
EMULATE_SMS=50 EMULATE_ORDER=random "$build/attn" check --backend cuda --op forward --dtype bf16 --feature append --cases 80 --seed 11
EMULATE_SMS=50 "$build/attn" check --backend cuda --op forward --dtype f16 --feature append,rotary --cases 60 --seed 12
EMULATE_SMS=50 ATTN_TEST_DTYPE=bf16 ATTN_TEST_BACKEND=cuda "$build/attn-tests" s11_what_is_out c5_one_decode
ATTN_TEST_DTYPE=f16 ATTN_TEST_BACKEND=cuda "$build/attn-tests" s11_what_is_out
GENERATE_OPTIONS="--backend cuda --dtype bf16 --layers 1" examples/generate/check.sh "$build"
ATTN_TEST_BACKEND=cuda "$build/attn-tests" c1_ c4_empty s01_ s09_inf c5_unused c5_align c5_varlen_short c5_s03
# The lines of both tables give the same; with three tiles and columns past the dims.
"$build/attn" tune --kernels "$tune" --rounds 1 --heads 1 --dim 56/40 --seqlen 70/260
EMULATE_GUARD=before "$build/attn" tune --kernels "$tune" --rounds 1 --heads 1 --dim 120/104 --seqlen 70/200 --causal
"$build/attn" tune --kernels "$tune" --rounds 1 --heads 1 --dim 248/232 --seqlen 70/200 --causal
"$build/attn" check --backend cuda --small --cases 40 --seed 3 --feature dim_v
# The backward's: rows and keys of more than a tile, in the dtypes that have lines of their own.
EMULATE_ORDER=random "$build/attn" check --backend cuda --op backward --dtype bf16 --cases 60 --seed 5
EMULATE_GUARD=before "$build/attn" check --backend cuda --op backward --dtype f16 --cases 40 --seed 6
EMULATE_ORDER=reverse "$build/attn" check --backend cuda --op backward --dtype bf16 --feature flashmask --cases 30 --seed 7
EMULATE_ORDER=reverse EMULATE_GUARD=before "$build/attn" check --backend cuda --small --cases 100 --seed 1
"$build/attn" check --backend cuda --small --cases 500 --seed 2
