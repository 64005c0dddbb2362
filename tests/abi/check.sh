#!/bin/sh
# The exported symbols are those of symbols.txt, which are those of the header; nothing else, and nothing else is needed.
#
#   tests/abi/check.sh BUILD
set -eu
build=$(realpath "${1:?usage: tests/abi/check.sh BUILD}")
cd "$(dirname "$0")"
work=$build/test/abi
mkdir -p "$work"
export LC_ALL=C

sort symbols.txt >"$work/expected"
nm -D --defined-only "$build/libattn.so" | awk '{print $NF}' | sort >"$work/exported"
diff "$work/expected" "$work/exported" || {
    echo "libattn.so (>) does not export what tests/abi/symbols.txt (<) lists"
    exit 1
}

sed -n 's/^ATTN_API [^(]*[ *]\(attn_[a-z0-9_]*\)(.*/\1/p' ../../include/attn.h | sort >"$work/declared"
diff "$work/expected" "$work/declared" || {
    echo "include/attn.h (>) does not declare what tests/abi/symbols.txt (<) lists"
    exit 1
}

# A static library cannot hide its internal names, so they must keep to their prefix.
if nm -g --defined-only "$build/libattn.a" | awk 'NF == 3 && $3 !~ /^attn_/ {print $3; found = 1} END {exit !found}'; then
    echo "libattn.a defines the names above, which do not begin with attn_"
    exit 1
fi

major=$(sed -n 's/^#define ATTN_VERSION_MAJOR //p' ../../include/attn.h)
readelf -d "$build/libattn.so" | grep -q "SONAME.*\[libattn\.so\.$major\]" || {
    echo "the SONAME of libattn.so is not libattn.so.$major"
    exit 1
}
if readelf -d "$build/libattn.so" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' |
    grep -Ev '^(libc|libm|libpthread|libdl|ld-linux.*)\.so\.[0-9]+$'; then
    echo "libattn.so needs the libraries above, which it should not"
    exit 1
fi
