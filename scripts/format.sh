#!/bin/sh
# Checks that every C file is formatted as .clang-format says and keeps to its size: files have at most 900 lines, functions
# at most 80 unless they are micro-kernels. --fix formats. The result differs a little between versions of clang-format:
# 14 counts.
set -eu
cd "$(dirname "$0")/.."
format=$(command -v clang-format-14 || echo clang-format)
$format --version | grep -q 'version 14\.' || echo "formatting: this is $($format --version), which may differ from 14"

files=$(git ls-files --cached --others --exclude-standard '*.c' '*.h' '*.cpp' '*.cu' '*.cuh')
case ${1:-} in
--fix)
    $format -i $files
    exit
    ;;
'') ;;
*)
    echo "usage: scripts/format.sh [--fix]" >&2
    exit 2
    ;;
esac

$format --dry-run -Werror $files

# Formatted code begins a function in the first column and ends it with a brace there.
awk '
    FNR == 1 { begin = 0 }
    FNR == 901 { print FILENAME ": more than 900 lines"; bad = 1 }
    /^[a-zA-Z_]/ && !/[;:]$/ && !/^(typedef|struct|enum|union|extern|namespace)/ { begin = FNR }
    /^}$/ && begin {
        if (FNR - begin + 1 > 80 && FILENAME !~ /micro/) {
            print FILENAME ":" begin ": a function of " FNR - begin + 1 " lines"
            bad = 1
        }
        begin = 0
    }
    END { exit bad }' $files
echo "formatting: $(echo "$files" | wc -l) files are as they should be"
