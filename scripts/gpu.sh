#!/bin/bash
# Everything that wants a GPU, on the machine that has one: builds, then tests and measures. CI has no GPU and runs none of it.
#
#   scripts/gpu.sh [-k KERNELS] [-o LOGS] [PART...]
#
#   build      the library, the command line and the tests, in build-gpu/
#   check      attn check against ref, CASES (5000) cases for each of SEEDS ("1 2 3"), and of backward ones alone; as many forward in
#              bf16 and f16, the dtypes for which a GPU may have kernels besides the portable ones
#   bars       the accuracy at 4096 x 4096 x 128
#   tests      the contract's tests (C1, C2, C4, C5), those of extreme numbers (s01, s02, s09), of values out of range and of factors (s11), every array
#              on the GPU
#   repeat     the same bits 1000 times, beside other work, for REPEAT_CASES (20) cases, and for 16 heads of q to 2 of k
#   sanitize   compute-sanitizer's four tools over SANITIZE_CASES (200) small cases each; SANITIZER names another program
#   package    the Python package's tests of CUDA tensors; wants torch and pytest
#   tune       the ladder of docs/kernels/forward-portable.md, and a tuning file; alone on the GPU; wants TUNE_KERNELS
#   peers      libattn beside torch's attention; alone on the GPU; wants torch
#   hopper     what Hopper's kernels are held to: cuDNN, fp16 beside bf16, more head dims; alone on the GPU; wants torch
#   masks      FlashMask patterns beside torch's FlexAttention; alone on the GPU; wants torch with Triton
#   features   what softcap, ALiBi, windows, GQA, varlen, dropout, sinks, pages, bias cost; alone on the GPU; wants torch
#   prefix     many sequences that share a prefix: the ways of docs/kernels/decode.md; alone on the GPU; wants torch
#   gradients  errors of gradients against float64, beside torch's, with outliers; wants torch
#   train      a small GPT with libattn's attention and with torch's, 200 steps; alone on the GPU; wants torch
#   generate   examples/generate with its attention on the GPU; tokens and time of Hugging Face generation beside eager's and sdpa's, alone on
#              the GPU; wants torch and transformers
#
# Without parts, all of them. Parts that only test run beside each other. KERNELS is a folder of ready-made fatbins (make
# kernels, on any machine with nvcc), for one that has no nvcc; the default is build/kernels if it holds any. TUNE_KERNELS
# (build/tune-kernels) is what make tune-kernels made. LOGS (gpu-logs) gets the full output. CMAKE and PYTHON name other
# programs than cmake and python3. The summary comes last; exit 1: something failed or could not be run.
set -u
cd "$(dirname "$0")/.."
all="build check bars tests repeat sanitize package tune peers hopper masks features prefix gradients train generate"
kernels=${ATTN_CUDA_KERNELS_DIR:-}
logs=gpu-logs
while getopts k:o: option; do
    case $option in
    k) kernels=$OPTARG ;;
    o) logs=$OPTARG ;;
    *)
        sed -n '2,29s/^# \{0,1\}//p' "$0" >&2
        exit 2
        ;;
    esac
done
shift $((OPTIND - 1))
parts=${*:-$all}
for part in $parts; do
    case " $all " in
    *" $part "*) ;;
    *)
        echo "gpu.sh: there is no part $part; there are: $all" >&2
        exit 2
        ;;
    esac
done
cmake=${CMAKE:-cmake}
python=${PYTHON:-python3}
build=build-gpu
attn=$build/attn
mkdir -p "$logs"
logs=$(cd "$logs" && pwd)
if [ -z "$kernels" ] && ls build/kernels/*.fatbin >/dev/null 2>&1; then kernels=$PWD/build/kernels; fi
if [ -n "$kernels" ]; then kernels=$(cd "$kernels" && pwd); fi

wants() { case " $parts " in *" $1 "*) true ;; *) false ;; esac }

# start NAME COMMAND...: in the background, its output in LOGS/NAME.log. finish waits for all and says how they went.
names=()
pids=()
start() {
    local name=$1
    shift
    {
        local began=$SECONDS code=0
        "$@" >"$logs/$name.log" 2>&1 || code=$?
        echo "$code $((SECONDS - began))" >"$logs/$name.end"
    } &
    names+=("$name")
    pids+=($!)
}

summary=()
failed=0
finish() {
    local n code seconds word
    for n in "${!names[@]}"; do
        wait "${pids[$n]}"
        read -r code seconds <"$logs/${names[$n]}.end"
        rm -f "$logs/${names[$n]}.end"
        word=ok
        if [ "$code" != 0 ]; then
            word=FAILED
            failed=$((failed + 1))
            echo "---- ${names[$n]} failed with status $code; the end of $logs/${names[$n]}.log:"
            tail -n 30 "$logs/${names[$n]}.log"
        fi
        summary+=("$(printf '%-20s %-7s %4d s  %s' "${names[$n]}" $word "$seconds" "$(tail -n 1 "$logs/${names[$n]}.log" | cut -c1-90)")")
    done
    names=()
    pids=()
}

missing=0
skip() {
    missing=$((missing + 1))
    summary+=("$(printf '%-20s NOT RUN %s' "$1" "$2")")
}

build_all() {
    # shellcheck disable=SC2086
    "$cmake" -S . -B $build -DCMAKE_BUILD_TYPE=Release -DATTN_CUDA=ON ${kernels:+-DATTN_CUDA_KERNELS_DIR="$kernels"} &&
        "$cmake" --build $build -j "$(nproc)" --target attn_tool attn_shared attn-tests example-generate &&
        $attn info --backend cuda
}

if wants build; then
    start build build_all
    finish
fi
[ -x $attn ] || {
    printf '%s\n' "${summary[@]}"
    echo "gpu.sh: $attn is not there; the part build makes it"
    exit 1
}

if wants check; then
    for seed in ${SEEDS:-1 2 3}; do
        start "check-$seed" $attn check --backend cuda --cases "${CASES:-5000}" --seed "$seed"
        start "backward-$seed" $attn check --backend cuda --op backward --cases "${CASES:-5000}" --seed "$seed"
    done
    for dtype in bf16 f16; do
        start "check-$dtype" $attn check --backend cuda --op forward --dtype $dtype --cases "${CASES:-5000}" --seed 4
    done
fi
if wants bars; then start bars $attn check --backend cuda --bars; fi
if wants tests; then start tests env ATTN_TEST_BACKEND=cuda $build/attn-tests c1_ c2_ c4_ c5_ s01_ s02_softcap_of s09_ s11_what_is_out s11_factors; fi
if wants repeat; then
    start repeat $attn check --backend cuda --cases "${REPEAT_CASES:-20}" --repeat 1000 --seed 5
    start repeat-backward $attn check --backend cuda --op backward --feature gqa,varlen_q,window \
        --cases "${REPEAT_CASES:-20}" --repeat 1000 --seed 6
    for dtype in bf16 f16; do
        start "repeat-heads-$dtype" env ATTN_TEST_BACKEND=cuda ATTN_TEST_DTYPE=$dtype ATTN_TEST_REPEAT=1000 \
            $build/attn-tests c5_reruns
    done
fi
finish

if wants sanitize; then
    sanitizer=${SANITIZER:-$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -n 1)}
    if [ -n "$sanitizer" ]; then
        for tool in memcheck racecheck initcheck synccheck; do
            start "$tool" "$sanitizer" --tool $tool --error-exitcode 9 \
                $attn check --backend cuda --small --cases "${SANITIZE_CASES:-200}" --seed 7
            start "$tool-backward" "$sanitizer" --tool $tool --error-exitcode 9 \
                $attn check --backend cuda --op backward --small --cases "${SANITIZE_CASES:-200}" --seed 8
        done
        finish
    else
        skip sanitize "compute-sanitizer is not there"
    fi
fi

export LIBATTN_LIBRARY=$PWD/$build/libattn.so PYTHONPATH=$PWD/python${PYTHONPATH:+:$PYTHONPATH}
if wants package; then
    if "$python" -c 'import torch, pytest' 2>"$logs/package.log"; then
        start package env LIBATTN_WANT_GPU=1 "$python" -m pytest -q -rs -p no:cacheprovider tests/package/test_cuda.py
        finish
    else
        skip package "$(tail -n 1 "$logs/package.log")"
    fi
fi
tune_all() {
    local dim mask code=0
    for dim in 128 64; do
        for mask in "" --causal; do
            # shellcheck disable=SC2086
            $attn tune --kernels "$tune_kernels" --dim $dim --heads $((2048 / dim)) --batch 2 --seqlen 8192 $mask || code=$?
            echo
        done
    done
    $attn tune --dtype bf16,f16,f32 --dim 32,64,96,128,192,256 --heads 16 --batch 2 --seqlen 4096 --causal \
        --write "$logs/gpu.tuning" || code=$?
    ATTN_TUNING=$logs/gpu.tuning $attn plan --backend cuda --dtype bf16 --dim 128 || code=$?
    return $code
}
if wants tune; then
    tune_kernels=${TUNE_KERNELS:-build/tune-kernels}
    if [ -e "$tune_kernels/tune.def" ]; then
        start tune tune_all
        finish
    else
        skip tune "$tune_kernels/tune.def is not there; make tune-kernels makes it"
    fi
fi
if wants generate; then
    for dtype in f32 bf16; do
        start example-$dtype env GENERATE_OPTIONS="--backend cuda --dtype $dtype" examples/generate/check.sh $build
    done
    finish
fi
# compare PART SCRIPT OPTION...: one script of bench/, alone on the GPU; its table is shown. It wants the modules of $wanted.
wanted=torch
compare() {
    local part=$1
    shift
    if ! wants "$part"; then return; fi
    if "$python" -c "import $wanted" 2>"$logs/$part.log"; then
        start "$part" "$python" "$@" --json "$logs/$part.jsonl"
        finish
        cat "$logs/$part.log"
    else
        skip "$part" "$(tail -n 1 "$logs/$part.log")"
    fi
}
compare peers bench/peers.py
compare hopper bench/peers.py --hopper
compare masks bench/masks.py
compare features bench/features.py
compare prefix bench/prefix.py
compare gradients bench/gradients.py
compare train bench/train.py
wanted="torch, transformers"
compare generate bench/generate_hf.py

echo
printf '%s\n' "${summary[@]}"
echo "$failed failed, $missing not run"
[ $failed = 0 ] && [ $missing = 0 ]
