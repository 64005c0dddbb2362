#!/bin/sh
# The installed library serves projects outside the tree: a CMake one and a pkg-config one, C and C++, shared and static;
# and the example in the README compiles against it and runs.
#
#   tests/install/check.sh BUILD
set -eu
build=$(realpath "${1:?usage: tests/install/check.sh BUILD}")
here=$(realpath "$(dirname "$0")")
work=$build/test/install
rm -rf "$work"
mkdir -p "$work"
cp -r "$here/cmake" "$here/pkg-config" "$here/consumer.c" "$here/consumer.cpp" "$work"

cmake --install "$build" --prefix "$work/first" >"$work/install.log"
mv "$work/first" "$work/moved" # an installed tree can be moved
prefix=$work/moved
test -x "$prefix/bin/attn"
test -f "$prefix/include/attn.h"

echo "CMake: find_package(attn)"
cmake -S "$work/cmake" -B "$work/cmake/build" -DCMAKE_PREFIX_PATH="$prefix" >"$work/cmake.log"
cmake --build "$work/cmake/build" >>"$work/cmake.log"
for program in consumer consumer_static consumer_cpp; do
    "$work/cmake/build/$program"
done

echo "make: pkg-config attn"
PKG_CONFIG_PATH=$(dirname "$(find "$prefix" -name attn.pc)")
LD_LIBRARY_PATH=$(pkg-config --variable=libdir "$PKG_CONFIG_PATH/attn.pc")
export PKG_CONFIG_PATH LD_LIBRARY_PATH
make -C "$work/pkg-config" >"$work/make.log"
for program in consumer consumer_static consumer_cpp; do
    "$work/pkg-config/$program"
done

echo "README: the C example"
awk '/^```c$/ {inside = 1; next} /^```$/ {inside = 0} inside' "$here/../../README.md" >"$work/readme.c"
grep -q 'int main' "$work/readme.c"
${CC:-cc} -std=c11 -Wall -Wextra -Wpedantic -Werror "$work/readme.c" $(pkg-config --cflags --libs attn) -lm -o "$work/readme"
"$work/readme"
