#!/bin/bash
# Builds the Python wheel, installs it into a fresh virtual environment with CPU torch and transformers, and runs
# tests/package there.
#
#   scripts/test_package.sh [install | tests] [options of pytest]     one half of it; tests: in the environment that is there
#
# What the tests need besides is large, so it is kept in build/package-deps until tests/package/requirements.txt changes; the
# environment itself, build/package-venv, is made anew each time. A torch for the CPU is enough, but on x86-64 Linux pip's
# index has only the one with CUDA, 3 GB to download. Name a folder with a CPU wheel in PIP_FIND_LINKS and that one is taken.
# When it does not arrive within DEPS_SECONDS (300), the exit status is 77 and the last line says what was not tested.
set -eu
cd "$(dirname "$0")/.."
root=$PWD
deps=$root/build/package-deps
venv=$root/build/package-venv
wheels=$root/build/package-wheel
seconds_allowed=60
deps_seconds=${DEPS_SECONDS:-300}
bytes_allowed=$((20 << 20))
export PIP_DISABLE_PIP_VERSION_CHECK=1

half=both
case ${1:-} in install | tests)
    half=$1
    shift
    ;;
esac
run_tests() {
    cd tests/package
    exec "$venv/bin/python" -m pytest -q -rs "$@" # -rs: what was skipped, and why
}
[ $half != tests ] || run_tests "$@"

rm -rf "$venv" "$wheels"
mkdir -p build
# Where there is nvcc the GPU kernels are compiled first, once, and not in the time that is measured below.
cmake --preset release >/dev/null
cmake --build --preset release -j "${JOBS:-2}" --target attn_kernels
if grep -q '^ATTN_KERNELS:.*=compiled' build/CMakeCache.txt; then
    export SKBUILD_CMAKE_DEFINE="ATTN_CUDA_KERNELS_DIR=$root/build/kernels"
fi
python3 -m venv "$venv"
began=$SECONDS
"$venv/bin/pip" install --quiet .
took=$((SECONDS - began))
echo "pip install . took $took s"
[ $took -lt $seconds_allowed ] || {
    echo "want less than $seconds_allowed s"
    exit 1
}

if ! cmp -s tests/package/requirements.txt "$deps/requirements.txt"; then
    rm -rf "$deps"
    began=$SECONDS
    status=0
    timeout "$deps_seconds" "$venv/bin/pip" install --quiet --target "$deps" -r tests/package/requirements.txt || status=$?
    if [ $status = 124 ]; then
        rm -rf "$deps"
        echo "torch and transformers did not arrive within $deps_seconds s; only pip install . was tested"
        exit 77
    elif [ $status != 0 ]; then
        exit $status
    fi
    echo "torch and transformers took $((SECONDS - began)) s"
    cp tests/package/requirements.txt "$deps/"
fi
echo "$deps" >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/deps.pth"

# The source archive, and the wheel from that.
"$venv/bin/python" -m build --outdir "$wheels" . >build/package-wheel.log 2>&1 || {
    tail -n 30 build/package-wheel.log
    exit 1
}
size=$(stat -c %s "$wheels"/libattn-*-py3-none-*.whl)
echo "the wheel has $size bytes"
[ "$size" -lt $bytes_allowed ] || {
    echo "want less than $bytes_allowed"
    exit 1
}

[ $half = install ] || run_tests "$@"
