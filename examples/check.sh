#!/bin/sh
# Runs every example; each checks its own result and exits with 0 when it is right.
#
#   examples/check.sh BUILD
set -eu
build=${1:?usage: examples/check.sh BUILD}
count=0
for source in "$(dirname "$0")"/*.c; do
    echo "--- $(basename "$source")"
    "$build/example-$(basename "$source" .c)"
    count=$((count + 1))
done
echo "--- generate"
"$(dirname "$0")/generate/check.sh" "$build"
echo "$((count + 1)) passed"
