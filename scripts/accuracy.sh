#!/bin/bash
# Runs the whole product of tests/package/test_accuracy.py, which takes hours of one core, in SHARDS processes of one thread.
#
#   scripts/accuracy.sh [SHARDS [FIRST [TURNS]]]      default: as many as there are cores, 0, 1
#
# Where that is too long for one call, TURNS calls do it: the points are dealt to SHARDS x TURNS shards, and a call runs those
# from FIRST to FIRST + SHARDS - 1, so FIRST is 0, then SHARDS, then 2 SHARDS, ... In the environment:
#
#   DTYPE="float16 bfloat16" LENGTHS="3,799 1,1"      only these
#   LIBATTN_CASES=1000 LIBATTN_SEED=5                 only so many points, at random; the seed is that of the data too
#   LIBATTN_FLOAT32=double                            float32 computed in double, or in "single" alone, where naive's luck counts
#   LIMIT_S=500                                       after so many seconds no other point is begun
#   PYTHON=.venv/bin/python                           one that has torch and pytest (python3)
#   LIBATTN_LIBRARY=/path/libattn.so                  the library (build/libattn.so)
#
# Failures are shown, and cases of "single" that were unlucky and passed with other data (test_accuracy.py: Unlucky); the logs, a line for
# each case, are in build/accuracy. The last line says "N passed, N failed, N not
# reached". Exit status: 1 when a case failed or a process ended before its time, 2 when some were not reached.
set -u
cd "$(dirname "$0")/.."
shards=${1:-$(nproc)} first=${2:-0} turns=${3:-1}
all=$((shards * turns))
export PYTHONPATH=$PWD/python${PYTHONPATH:+:$PYTHONPATH}
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 ATTN_NUM_THREADS=1

mkdir -p build/accuracy
logs=() running=()
for ((n = first; n < first + shards; n++)); do
    logs+=("build/accuracy/$n-of-$all.log")
    "${PYTHON:-python3}" tests/package/test_accuracy.py "$n" "$all" >"${logs[-1]}" 2>&1 &
    running+=($!)
done
trap 'kill "${running[@]}" 2>/dev/null' EXIT

# sum: of all logs, "CASES PASSED FAILED"
sum() {
    awk '/^cases /{n += $2} /^passed /{p++} /^FAILED /{f++} END {print n + 0, p + 0, f + 0}' "${logs[@]}"
}

waited=0
while [ -n "$(jobs -rp)" ]; do
    sleep 1
    waited=$((waited + 1))
    [ $((waited % 20)) != 0 ] || {
        read -r cases passed failed <<<"$(sum)"
        echo "$SECONDS s: $((passed + failed)) of $cases cases, $failed failed"
    }
done

grep -h -A 20 --no-group-separator '^FAILED ' "${logs[@]}" | grep -v '^passed \|^done' | head -n 100
dead=0
for log in "${logs[@]}"; do
    [ "$(tail -n 1 "$log")" = done ] && continue
    dead=$((dead + 1))
    echo "$log: the process ended before its time"
    tail -n 5 "$log"
done
read -r cases passed failed <<<"$(sum)"
missed=$((cases - passed - failed))
sed -n 's/.*Warning: \(unlucky .*\)/\1/p' "${logs[@]}"
echo "$(cat "${logs[@]}" | grep -c 'Warning: unlucky ') of those that passed were unlucky first, and passed with four other draws of data"
echo "$SECONDS s; logs are in build/accuracy"
echo "$passed passed, $failed failed, $missed not reached"
[ $failed = 0 ] && [ $dead = 0 ] && [ "$cases" -gt 0 ] || exit 1
[ $missed = 0 ] || exit 2
