#!/bin/bash
# What wants a CPU that CI does not have (AVX-512, AVX-512 BF16, AMX; SVE, BF16 of Arm): builds, then tests and measures on the machine at hand, which
# should have nothing else to do. Five minutes on 16 cores.
#
#   scripts/cpu.sh [-o LOGS] [PART...]
#
#   build      the library, the command line and the tests, in build-cpu/
#   tests      attn-tests: those of micro-kernels, AMX, contract and accuracy
#   check      attn check against ref for each instruction set of the machine, CASES (1000) cases each
#   bars       the accuracy at 4096 x 4096 x 128, for the last three of them
#   bench      prefill, backward and decode, one thread and all, by each instruction set that has kernels of its own for some dtypes, and the
#              one below it; cost against length; what a call costs
#   peers      libattn beside torch's attention; wants torch
#
# Without parts, all of them. LOGS (build-cpu/logs) gets the full output, a file for each part. PYTHON names another program than
# python3. The summary comes last; exit 1: something failed or could not be run.
set -u -o pipefail
cd "$(dirname "$0")/.."
all="build tests check bars bench peers"
logs=build-cpu/logs
while getopts o: option; do
    case $option in
    o) logs=$OPTARG ;;
    *)
        sed -n '2,17s/^# \{0,1\}//p' "$0" >&2
        exit 2
        ;;
    esac
done
shift $((OPTIND - 1))
python=${PYTHON:-python3}
build=build-cpu
attn=$build/attn
mkdir -p "$logs"
export LIBATTN_LIBRARY=$PWD/$build/libattn.so
cores=$(nproc)

# The instruction sets of this machine, weakest first.
isas() { $attn info | sed -n 's/^cpu .* fwd_\([a-z0-9]*\)_\(f32\|bf16\) .* yes .*/\1/p' | awk '!seen[$0]++' | grep .; }

build() {
    cmake -B $build -DCMAKE_BUILD_TYPE=Release -DATTN_CUDA=OFF >/dev/null &&
        cmake --build $build -j "$cores" --target attn_tool attn_shared attn-tests 2>&1 | tail -n 3 &&
        $attn info
}

tests() {
    timeout 200 $build/attn-tests amx_ bf16_ micro isa_ kernel_ numbers_ property_ c1_ c2_ c4_ c5_ accuracy_ plan_ s01_ s09_
}

check() {
    local status=0
    isas || return 1
    for isa in $(isas); do
        echo "== $isa"
        ATTN_CPU=$isa $attn check --backend cpu --cases "${CASES:-1000}" --seed 6 || status=1
    done
    return $status
}

bars() {
    local status=0
    isas || return 1
    for isa in $(isas | tail -n 3); do
        echo "== $isa"
        ATTN_CPU=$isa timeout 100 $attn check --bars --backend cpu || status=1
    done
    return $status
}

bench() {
    local bench="$attn bench --backend cpu --seconds 0.3"
    isas || return 1
    local status=0
    for isa in $(isas | tail -n 3); do
        for threads in 1 "$cores"; do
            echo "== $isa, $threads threads"
            ATTN_CPU=$isa $bench --threads "$threads" --heads 16 --dim 64,128 --seqlen 2048 --dtype bf16 || status=1
            ATTN_CPU=$isa $bench --threads "$threads" --heads 16 --dim 128 --seqlen 2048 --dtype f32,f16,bf16 --causal || status=1
            ATTN_CPU=$isa $bench --threads "$threads" --heads 16 --dim 128 --seqlen 1024 --dtype f16,bf16 --op backward || status=1
            ATTN_CPU=$isa $bench --threads "$threads" --heads 32/8 --dim 128 --seqlen 1/32768 --dtype f32,bf16 || status=1
        done
    done
    $bench --suite overhead || status=1
    $python bench/length_cpu.py --heads 1 --dim 64 --rounds 1 || status=1
    $python bench/length_cpu.py --heads "$cores" --dim 64 --rounds 1 --threads "$cores" || status=1
    $python bench/length_cpu.py --heads "$cores" --dim 128 --rounds 1 --threads "$cores" --full || status=1
    return $status
}

peers() {
    local cases='(prefill|backward)-d128-s2048-causal-(f32|f16|bf16)|decode-k(4096|32768)-b1-(f32|bf16)'
    for threads in 1 "$cores"; do
        $python bench/peers_cpu.py --threads "$threads" --seconds 0.5 --peers torch --cases "$cases" || return 1
    done
}

summary=
for part in ${*:-$all}; do
    case " $all " in
    *" $part "*) ;;
    *)
        echo "cpu.sh: there is no part $part; there are: $all" >&2
        exit 2
        ;;
    esac
    echo "---- $part"
    begin=$SECONDS
    if $part >"$logs/$part.txt" 2>&1; then word=passed; else word=FAILED; fi
    tail -n 25 "$logs/$part.txt"
    summary="$summary$part: $word, $((SECONDS - begin)) s"$'\n'
done
echo "----"
printf %s "$summary"
case $summary in *FAILED*) exit 1 ;; esac
