#!/bin/sh
# example-generate gives a sequence the same tokens alone and in a batch, whatever the pages and the threads; and refuses what is
# wrong. tests/python/test_generate.py holds it against numpy. GENERATE_OPTIONS go to every run: "--backend cuda --dtype bf16".
#
#   examples/generate/check.sh BUILD
set -eu
program=$1/example-generate
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
tokens=9
long=$(seq -s , 3 7 290) # 42 tokens
p1="--prompt 5,17,2" p2="--prompt 400" p3="--prompt $long" p4="--prompt 9,8,7,6,5,4,3,2,1"

# run NAME OPTION...: tokens into a file
run() {
    name=$1
    shift
    "$program" --quiet --seed 3 --chunk 32 --tokens $tokens ${GENERATE_OPTIONS:-} "$@" >"$out/$name"
}
same() {
    cmp "$out/$1" "$out/$2" || {
        echo "generate: $3: the tokens differ"
        exit 1
    }
}

for temperature in 0 0.8; do
    run batch --temperature $temperature $p1 $p2 $p3 $p4
    [ "$(sort -u "$out/batch" | wc -l)" = 4 ] || {
        echo "generate: four prompts have not four continuations"
        exit 1
    }
    [ "$(wc -w <"$out/batch")" = $((4 * tokens)) ]
    for page in 1 7 64 1000; do
        run other --temperature $temperature --page $page $p1 $p2 $p3 $p4
        same batch other "pages of $page"
    done
    for threads in 1 2 5; do
        run other --temperature $temperature --threads $threads $p1 $p2 $p3 $p4
        same batch other "$threads threads"
    done
    : >"$out/alone"
    for prompt in "$p1" "$p2" "$p3" "$p4"; do
        run other --temperature $temperature --page 5 $prompt
        cat "$out/other" >>"$out/alone"
    done
    same batch alone "each prompt alone"
done
echo "generate: the same tokens alone and in a batch, whatever the pages and threads"

# refused CODE WORDS OPTION...
refused() {
    code=$1 words=$2 status=0
    shift 2
    "$program" "$@" >"$out/stdout" 2>"$out/stderr" || status=$?
    if [ $status != "$code" ] || [ -s "$out/stdout" ] || ! grep -q -- "$words" "$out/stderr"; then
        echo "generate $*: want status $code and a message with '$words', not $status and:"
        cat "$out/stderr"
        exit 1
    fi
}
refused 2 "--page 0: want a whole number from 1" --page 0
refused 2 "--tokens x: want a whole number" --tokens x
refused 2 "--tokens: want a value" --tokens
refused 2 "--pages: there is no such option" --pages 3
refused 2 "hello: want an option" hello
refused 2 "--prompt 1,,2: want numbers" --prompt 1,,2
refused 2 "--backend gpu: want cpu, cuda or ref" --backend gpu
refused 2 "--dtype f16: want f32 or bf16" --dtype f16
refused 2 "--temperature -1: want" --temperature -1
refused 1 "token 512: want less than 512" --prompt 512
refused 1 "heads-kv=3: want a divisor of heads=8" --heads-kv 3
refused 1 "dim=33: want an even number" --dim 33
refused 1 "nowhere.npz: No such file" --model "$out/nowhere.npz"
printf 'no archive at all' >"$out/bad.npz"
refused 1 "bad.npz: not a zip archive" --model "$out/bad.npz"
"$program" --help | grep -q -- --backend
echo "generate: what is wrong is refused"
