#!/bin/bash
# Everything that is tested, in stages, with the time of each; two cores need about an hour with GPU kernels. The first stage that
# fails ends it: its output is shown, and the last line says "N passed, N failed" in any case.
#
#   CHECK_CASES=20000 FUZZ_SECONDS=60 JOBS=2 scripts/test.sh
#
# The full output of each stage is in build/test/.
set -u
cd "$(dirname "$0")/.."
jobs=${JOBS:-2}
check_cases=${CHECK_CASES:-20000}
fuzz_seconds=${FUZZ_SECONDS:-60}

logs=build/test
passed=0
not_run=()
began=$SECONDS

# stage NAME COMMAND...: a command that says "N passed" counts as so many, any other as one. On failure the lines around
# FAILED and the last ones are shown. A command that ends with 77 could not be run; its last line says why.
stage() {
    collect
    printf '%-58s ' "$1 ..."
    perform "$@"
    report "$1"
}

# beside NAME COMMAND...: a long stage that keeps one core busy. It runs beside those after it, and is told of when it has ended.
besides=()
beside() {
    if [ "$jobs" = 1 ]; then
        stage "$@"
        return
    fi
    printf '%-58s begun, beside those that follow\n' "$1 ..."
    set -m # a process group of its own, all of which ends if this script does
    perform "$@" &
    set +m
    besides+=("$!=$1")
}

end_besides() {
    local each
    for each in ${besides[@]+"${besides[@]}"}; do kill -- "-${each%%=*}" 2>/dev/null; done
}
trap end_besides EXIT

# collect [all]: tells of what ran beside and has ended, or waits for it.
collect() {
    local each still=()
    for each in ${besides[@]+"${besides[@]}"}; do
        if [ $# = 0 ] && kill -0 "${each%%=*}" 2>/dev/null; then
            still+=("$each")
            continue
        fi
        wait "${each%%=*}" 2>/dev/null
        printf '%-58s ' "${each#*=} ..."
        report "${each#*=}"
    done
    besides=(${still[@]+"${still[@]}"})
}

log_of() { echo "$logs/$(tr -cs 'A-Za-z0-9\n' - <<<"$1").$2"; }

# perform NAME COMMAND...: its output, its status and the seconds that it took, into files.
perform() {
    local start=$SECONDS log end
    log=$(log_of "$1" log) end=$(log_of "$1" end)
    rm -f "$end"
    shift
    "$@" >"$log" 2>&1 </dev/null
    echo "$? $((SECONDS - start))" >"$end"
}

report() {
    local name=$1 log status took
    log=$(log_of "$name" log)
    read -r status took <"$(log_of "$name" end)" || status=1 took=0
    if [ "$status" = 77 ]; then
        printf 'not run: %s\n' "$(tail -n 1 "$log")"
        not_run+=("$name")
        return
    elif [ "$status" = 0 ]; then
        local count without
        count=$(sed -n 's/.*\b\([0-9]\+\) passed.*/\1/p' "$log" | tail -n 1)
        passed=$((passed + ${count:-1}))
        without=$(sed -n 's/.*\b\([0-9]\+\) \(skipped\|not run\).*/, \1 of its tests not run here/p' "$log" | tail -n 1)
        printf '%6s passed %5d s%s\n' "${count:-1}" "$took" "$without"
        return
    fi
    printf 'FAILED %5d s\n\n' "$took"
    grep -B 10 FAILED "$log" | tail -n 60
    echo ...
    tail -n 20 "$log"
    local failed
    failed=$(sed -n 's/.*\b\([0-9]\+\) failed.*/\1/p' "$log" | tail -n 1)
    [ "${failed:-0}" -gt 0 ] || failed=1
    printf '\nmake test stopped at the stage "%s"; all of its output is in %s\n' "$name" "$log"
    printf '%d passed, %d failed\n' "$passed" "$failed"
    exit 1
}

# skip NAME WHY
skip() {
    printf '%-58s not run: %s\n' "$1 ..." "$2"
    not_run+=("$1")
}

# build PRESET TARGET...
build() {
    local preset=$1
    shift
    cmake --preset "$preset" && cmake --build --preset "$preset" -j "$jobs" ${1:+--target "$@"}
}

scripts/setup.sh test || {
    echo "make test could not be set up: see above"
    echo "0 passed, 1 failed"
    exit 1
}
mkdir -p $logs

stage "build, gcc or the default compiler" build release
stage "tests" build/attn-tests
# Seeds are fixed, so that a failure can be repeated. The kernels are the best that this machine can run, which come last in
# the table; then the others.
stage "attn check, $check_cases random cases" build/attn check --backend cpu --cases "$check_cases" --seed 1
for isa in $(build/attn info | sed -n 's/^cpu .*fwd_\(.*\)_b\?f\(32\|16\) .* yes .*/\1/p' | uniq | sed '$d'); do
    stage "attn check, $isa kernels" env ATTN_CPU="$isa" build/attn check --backend cpu --cases $((check_cases / 4)) --seed 2
done
# The way that a GPU run takes, on a machine that may have none: arrays are copied to where the backend works, and back.
stage "tests on copies" env ATTN_TEST_BACKEND=copies build/attn-tests c1_ c2_ c4_ c5_
stage "attn check on copies" build/attn check --backend cpu --copies --cases $((check_cases / 20)) --seed 3
stage "attn check, accuracy at 4096 x 4096 x 128" build/attn check --backend cpu --bars
if grep -q '^ATTN_KERNELS:.*=compiled' build/CMakeCache.txt; then
    stage "GPU kernels: registers, shared memory, spills" scripts/check_kernels.py
else
    skip "GPU kernels: registers, shared memory, spills" "nvcc is missing"
fi
stage "examples" examples/check.sh build
stage "exported symbols" tests/abi/check.sh build
stage "installed library, README example" tests/install/check.sh build
stage "Python tests" .venv/bin/python -m pytest -q tests/python
stage "Python package, built and installed" scripts/test_package.sh install
if [ -e build/package-deps/requirements.txt ]; then
    beside "Python package, tests" scripts/test_package.sh tests
else
    skip "Python package, tests" "torch and transformers are missing"
fi
if grep -q '^ATTN_KERNELS:.*=none' build/CMakeCache.txt; then # the library refuses the cuda backend
    skip "CUDA: kernels on an emulated GPU" "the library has no GPU kernels: nvcc is missing"
elif ! command -v c++ >/dev/null; then
    skip "CUDA: kernels on an emulated GPU" "there is no C++ compiler"
else
    stage "CUDA: kernels on an emulated GPU" tests/emulate/check.sh build
fi
beside "the other architecture, under qemu-user" env JOBS="$jobs" scripts/cross.sh
stage "AMX and AVX-512 BF16, as functions" env JOBS="$jobs" tests/emulate/tiles.sh

stage "build, Address- and UndefinedBehaviorSanitizer" build asan attn-tests
stage "tests, Address- and UndefinedBehaviorSanitizer" build-asan/attn-tests
stage "build, ThreadSanitizer" build tsan attn-tests
# Not the fork_ tests: ThreadSanitizer does not follow threads into a child.
stage "tests of threads, ThreadSanitizer" build-tsan/attn-tests pool_ c5_threads callers_ fault_in_each_thread cuda_threads

if command -v clang >/dev/null; then
    stage "build, clang" build clang
    stage "tests, clang" build-clang/attn-tests
else
    skip "build and tests, clang" "clang is missing"
fi
collect all
if scripts/setup.sh fuzz >/dev/null 2>&1; then
    stage "fuzz targets, $fuzz_seconds s each" env JOBS="$jobs" scripts/fuzz.sh "$fuzz_seconds"
else
    skip "fuzz targets" "clang with libFuzzer is missing"
fi

printf '\n%d min %d s' $(((SECONDS - began) / 60)) $(((SECONDS - began) % 60))
[ ${#not_run[@]} = 0 ] || printf '; %d stages NOT RUN, see above' ${#not_run[@]}
printf '\n%d passed, 0 failed\n' "$passed"
