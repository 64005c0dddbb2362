#!/bin/sh
# Checks that every C file of the repository is as .clang-format says; --fix makes it so.
set -eu
cd "$(dirname "$0")/.."

files=$(git ls-files --cached --others --exclude-standard '*.c' '*.h' '*.cpp' '*.cu' '*.cuh')
case ${1:-} in
--fix) clang-format -i $files ;;
'') clang-format --dry-run -Werror $files && echo "formatting: $(echo "$files" | wc -l) files are as they should be" ;;
*)
    echo "usage: scripts/format.sh [--fix]" >&2
    exit 2
    ;;
esac
