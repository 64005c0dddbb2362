#!/bin/sh
# Makes sure that this machine has what a target needs, and installs what is missing where it may.
#
#   scripts/setup.sh build     cmake and a C compiler
#   scripts/setup.sh test      the same, and what the tests need: pkg-config, a C++ compiler, clang, a Python
#                              environment, Python's own headers
#   scripts/setup.sh fuzz      build, and clang with libFuzzer
#   scripts/setup.sh cross     build, and a compiler and an emulator for the other architecture, aarch64 or x86-64
#   scripts/setup.sh format    clang-format
#
# Packages come from apt-get, as root or through a sudo that asks no password; otherwise the command to type is printed.
# It is quick and silent when everything is there. Exit 1: something necessary is missing. clang, Python's headers and the other
# architecture are not necessary for the tests: without them their report says what was not run.
set -eu
cd "$(dirname "$0")/.."

say() { echo "setup: $*"; }

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

may_install() {
    command -v apt-get >/dev/null && { [ "$(id -u)" = 0 ] || sudo -n true 2>/dev/null; }
}

updated=
# install WHY PACKAGE...
install() {
    why=$1
    shift
    if ! may_install; then
        say "missing: $* ($why). Please run: sudo apt-get install $*"
        return 1
    fi
    say "installing $* ($why) with apt-get"
    if [ -z "$updated" ]; then
        # It has been seen to wait for ever on a connection that was lost; a second try took a second. A broken third-party source
        # makes it fail; what we need may be there all the same.
        as_root timeout 90 apt-get -qq update || as_root timeout 180 apt-get -qq update ||
            say "apt-get update did not succeed everywhere; going on"
        updated=1
    fi
    as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "$@" >/dev/null
}

# The first that exists of the words given.
first_of() {
    for word in "$@"; do
        if command -v "$word" >/dev/null; then
            echo "$word"
            return
        fi
    done
}

has_cmake() {
    version=$(cmake --version 2>/dev/null | sed -n '1s/[^0-9]*\([0-9]*\)\.\([0-9]*\).*/\1 \2/p')
    [ -n "$version" ] && set -- $version && [ $(($1 * 100 + $2)) -ge 322 ]
}

has_libfuzzer() {
    command -v clang >/dev/null &&
        echo 'int LLVMFuzzerTestOneInput(const char *d, long n); int LLVMFuzzerTestOneInput(const char *d, long n) { return !d && n; }' |
        clang -x c -fsanitize=fuzzer,address,undefined -o /dev/null - 2>/dev/null
}

need_build() {
    [ -n "$(first_of "${CC:-cc}" cc gcc clang)" ] || install "the C compiler" gcc libc6-dev
    command -v make >/dev/null || install "cmake builds with it" make
    has_cmake || install "the build" cmake || return 1
    has_cmake || {
        say "cmake 3.22 or newer is needed; this is $(cmake --version | head -n 1)"
        return 1
    }
}

# Fails without a word of its own when clang cannot be had: the caller says what follows from it.
need_clang() {
    command -v clang >/dev/null || install "the second compiler, and the fuzz targets" clang || return 1
    has_libfuzzer && return
    major=$(clang -dumpversion | cut -d. -f1)
    install "libFuzzer" "libclang-rt-$major-dev" && has_libfuzzer
}

# The other architecture; Debian and Ubuntu name the compiler's package by the machine, and the C library's by the port.
need_cross() {
    case $(uname -m) in
    x86_64 | amd64) machine=aarch64 package=aarch64 port=arm64 ;;
    aarch64 | arm64) machine=x86_64 package=x86-64 port=amd64 ;;
    *) return 1 ;;
    esac
    command -v "$machine-linux-gnu-gcc" >/dev/null && [ -e "/usr/$machine-linux-gnu/include/stdio.h" ] ||
        install "the other architecture, $machine" "gcc-$package-linux-gnu" "libc6-dev-$port-cross" || return 1
    command -v "qemu-$machine" >/dev/null || install "running programs for $machine" qemu-user
}

need_python() {
    command -v python3 >/dev/null || install "the Python tests" python3
    [ .venv/done -nt tests/requirements.txt ] && return
    python3 -c 'import ensurepip, venv' 2>/dev/null || install "the Python tests" python3-venv
    say "making the Python environment .venv with what tests/requirements.txt pins"
    python3 -m venv .venv
    .venv/bin/python -m pip install -q --disable-pip-version-check -r tests/requirements.txt || {
        say "pip could not install tests/requirements.txt; the Python tests need it"
        return 1
    }
    touch .venv/done
}

has_python_headers() {
    python3 -c 'import os, sysconfig as s; raise SystemExit(not os.path.exists(s.get_path("include") + "/Python.h"))'
}

case ${1:-} in
build) need_build ;;
test)
    need_build
    command -v pkg-config >/dev/null || install "the test of the installed library" pkg-config
    [ -n "$(first_of c++ g++ clang++)" ] || install "the test that a C++ program can use the library" g++
    need_python
    has_python_headers || install "what torch.compile compiles includes Python.h" python3-dev ||
        say "no Python.h: the test of torch.compile with its own C++ will be reported as skipped"
    need_clang || say "no clang with libFuzzer: its build and the fuzz targets will be reported as not run"
    need_cross || say "no compiler or no emulator for the other architecture: its tests will be reported as not run"
    ;;
cross)
    need_build
    need_cross
    ;;
fuzz)
    need_build
    need_clang || {
        say "the fuzz targets need clang with libFuzzer"
        exit 1
    }
    ;;
format)
    [ -n "$(first_of clang-format-14 clang-format)" ] || install "the formatting" clang-format-14 ||
        install "the formatting; 14 is not to be had" clang-format
    ;;
*)
    echo "usage: scripts/setup.sh build|test|fuzz|cross|format" >&2
    exit 2
    ;;
esac
