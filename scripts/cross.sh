#!/bin/bash
# The other architecture: cross-compiles the library, the command line and the tests for it into build-cross, and runs under
# qemu-user what can be afforded there, minutes of one core: the tests of numbers, semantics and contract that are quick, and
# a few hundred random problems for each instruction set that the emulated CPU has.
#
#   JOBS=2 CROSS_CASES=300 scripts/cross.sh
#
# From x86-64 it is aarch64 with NEON, SVE and BF16, from aarch64 x86-64 with AVX2, and, since few machines have SVE of more than 128
# bits, and not all have BF16, aarch64 itself (build-cross/sve). SVE is emulated with vectors of 512 bits, then of 256. Exit status 77:
# it could not be run, and the last line says why.
set -u
cd "$(dirname "$0")/.."
cases=${CROSS_CASES:-300}
build=build-cross

missing() {
    echo "$*"
    exit 77
}

case $(uname -m) in
x86_64 | amd64) other=aarch64 cpu=max,sve-max-vq=4 ;;
aarch64 | arm64) other=x86_64 cpu=max ;;
*) missing "there is no other architecture to emulate on $(uname -m)" ;;
esac
scripts/setup.sh cross || missing "a cross compiler for $other or qemu-user is missing; scripts/setup.sh cross says what to install"

# make FOLDER OPTION...: the command line and the tests.
make() {
    cmake -B "$1" -DATTN_CUDA=OFF -DATTN_WERROR=ON "${@:2}" &&
        cmake --build "$1" -j "${JOBS:-2}" --target attn_tool attn-tests || exit 1
}

passed=0
# run COMMAND...: the output is shown, and what has passed is counted.
run() {
    local log=$build/run.log
    "$@" 2>&1 | tee $log
    [ "${PIPESTATUS[0]}" = 0 ] || exit 1
    passed=$((passed + $(sed -n 's/.*\b\([0-9]\+\) passed.*/\1/p' $log | tail -n 1)))
}

# The bits of 1, 2, 7 and 16 threads.
threads="c5_threads_1_to_16_holes c5_threads_1_to_16_infinity c5_threads_1_to_16_split"

# Not here: other threads against threads and a process that forks, which an emulator has no more to say about; faults, long ones.
quick="isa_ kernel_ micro names_ numbers_ plan_describes property_ c1_ c2_ c3_ c4_ s01_ s02_ s03_ s04_
    s05_plan s06_ s07_ s08_ s10_ s11_ accuracy_f32_of accuracy_f32_gradients c5_paged $threads"

# For an instruction set that has kernels of bf16 alone, with that dtype: few machines that run this have such a one, and
# what they would see of its bits is seen here.
bitwise="c5_batch c5_cache c5_causal_prefix c5_chunks c5_first c5_one_ c5_rows c5_s09 c5_unwanted c5_used c5_varlen_is
    c5_varlen_with s09_inf"

# emulate FOLDER ISAS TESTS QEMU...: the tests, and the random problems for instruction sets whose names have such a beginning; for one
# that has kernels of bf16 alone, problems of bf16, and before them the tests that are bitwise.
emulate() {
    local folder=$1 wanted=$2 tests=$3 isas isa only
    shift 3
    "$@" "$folder/attn" info | sed -n 's/^cpu  *\(.*: .*\)/emulated CPU: \1/p'
    if "$@" "$folder/attn" info | grep -q 'fwd_neonbf16_bf16 .* no '; then
        echo "the library has neonbf16, and the emulated CPU has no BF16: its tests would be left out"
        exit 1
    fi
    run "$@" "$folder/attn-tests" $tests
    isas=$("$@" "$folder/attn" info | sed -nE "/^cpu .* yes /{
        s/.* fwd_(($wanted)[a-z0-9]*)_f32 .*/\1/p
        s/.* fwd_(($wanted)[a-z0-9]*)_(bf16) .*/\1=\3/p
    }")
    [ -n "$isas" ] || exit 1
    for isa in $isas; do
        only=
        echo "${isa%=*} kernels"
        case $isa in
        *=*)
            only="--dtype ${isa#*=}"
            run env ATTN_TEST_ISA="${isa%=*}" ATTN_TEST_DTYPE="${isa#*=}" "$@" "$folder/attn-tests" $bitwise
            ;;
        esac
        run env ATTN_CPU="${isa%=*}" "$@" "$folder/attn" check --backend cpu --cases "$cases" --seed 4 $only
    done
}

make $build -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=$other -DCMAKE_C_COMPILER="$other-linux-gnu-gcc"
[ $other = x86_64 ] || quick="$quick bf16_" # no emulated x86-64 multiplies bf16
emulate $build "" "$quick" qemu-$other -cpu $cpu -L /usr/$other-linux-gnu
if [ $other = aarch64 ]; then
    emulate $build sve "micro $threads" qemu-aarch64 -cpu max,sve-max-vq=2 -L /usr/aarch64-linux-gnu
elif command -v qemu-aarch64 >/dev/null; then
    make $build/sve
    emulate $build/sve "sve|neonbf16" "micro kernel_ bf16_ property_ accuracy_f32_of s01_ s02_ s03_ s06_ $threads" qemu-aarch64 -cpu max,sve-max-vq=4
    emulate $build/sve sve "micro $threads" qemu-aarch64 -cpu max,sve-max-vq=2
fi
echo "$passed passed, 0 failed"
