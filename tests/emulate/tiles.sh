#!/bin/bash
# The kernels of AMX and AVX-512 BF16 on an x86-64 that has AVX-512 but not these: the library with functions in the place of the instructions
# (tiles.h), in build-tiles; every test, and random problems for each of the dtypes that have such kernels.
#
#   JOBS=2 TILES_CASES=1000 tests/emulate/tiles.sh
#
# Exit status 77: it could not be run, and the last line says why.
set -u
cd "$(dirname "$0")/../.."
build=build-tiles
cases=${TILES_CASES:-1000}

grep -q '^flags.* avx512f .*avx512dq.* avx512bw .*avx512vl' /proc/cpuinfo 2>/dev/null || {
    echo "this CPU has no AVX-512"
    exit 77
}
cmake -B $build -DATTN_CUDA=OFF -DATTN_WERROR=ON -DATTN_EMULATE_AMX=ON &&
    cmake --build $build -j "${JOBS:-2}" --target attn_tool attn-tests || exit 1

passed=0
# run COMMAND...: the output is shown, and what has passed is counted.
run() {
    "$@" 2>&1 | tee $build/run.log
    [ "${PIPESTATUS[0]}" = 0 ] || exit 1
    passed=$((passed + $(sed -n 's/.*\b\([0-9]\+\) passed.*/\1/p' $build/run.log | tail -n 1)))
}

run $build/attn-tests
for dtype in f32 f16; do run $build/attn check --backend cpu --cases "$cases" --seed 8 --dtype $dtype; done # as kernels are taken by themselves
for only in amx=f32 amx=f16 amx=bf16 avx512bf16=bf16; do
    echo "${only%=*} kernels, ${only#*=}"
    run env ATTN_CPU="${only%=*}" $build/attn check --backend cpu --cases "$cases" --seed 7 --dtype "${only#*=}"
done
echo "$passed passed, 0 failed"
