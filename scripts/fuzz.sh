#!/bin/sh
# Builds the fuzz targets and runs each for so many seconds, starting from its committed corpus, JOBS at a time.
#
#   scripts/fuzz.sh SECONDS
#
# What is found new stays in build-fuzz/corpus/, a failing input in build-fuzz/crash-*. Exit 1: a target failed.
set -eu
cd "$(dirname "$0")/.."
seconds=${1:?usage: scripts/fuzz.sh SECONDS}
jobs=${JOBS:-2}

cmake --preset fuzz >/dev/null
cmake --build --preset fuzz -j "$jobs" --target fuzz-targets >build-fuzz/build.log || {
    tail -n 40 build-fuzz/build.log
    exit 1
}

# fuzz TARGET: the report is shown when it fails.
fuzz() {
    name=$1 new=build-fuzz/corpus/$1 log=build-fuzz/$1.log
    mkdir -p "$new"
    if build-fuzz/fuzz-"$name" -max_total_time="$seconds" -timeout=20 -rss_limit_mb=2048 -print_final_stats=1 \
        -artifact_prefix=build-fuzz/crash-"$name"- "$new" tests/fuzz/corpus/"$name" >"$log" 2>&1; then
        echo "fuzz $name: $(sed -n 's/^stat::number_of_executed_units: *//p' "$log") inputs in $seconds s, no failure"
    else
        tail -n 60 "$log"
        echo "fuzz $name: FAILED; the input is kept as build-fuzz/crash-$name-*"
        return 1
    fi
}

passed=0 failed=0 running=''
wait_all() {
    for pid in $running; do
        if wait "$pid"; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
    done
    running=''
}

for source in tests/fuzz/*.c; do
    fuzz "$(basename "$source" .c)" &
    running="$running $!"
    [ "$(echo "$running" | wc -w)" -lt "$jobs" ] || wait_all
done
wait_all
echo "$passed passed, $failed failed"
[ "$failed" = 0 ] && [ "$passed" -gt 0 ]
