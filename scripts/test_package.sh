#!/bin/bash
# Builds the Python wheel, installs it into a fresh virtual environment with CPU torch and transformers, and runs
# tests/package there. Arguments go to pytest. The environment is build/package-venv; nothing of the checkout's own Python is
# used.
set -eu
cd "$(dirname "$0")/.."
venv=build/package-venv
wheels=build/package-wheel
seconds_allowed=60
bytes_allowed=$((20 << 20))

rm -rf $venv $wheels
python3 -m venv $venv
began=$SECONDS
$venv/bin/pip install --quiet --disable-pip-version-check .
took=$((SECONDS - began))
echo "pip install . took $took s"
[ $took -lt $seconds_allowed ] || { echo "that is $seconds_allowed s or more"; exit 1; }

$venv/bin/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir $wheels .
size=$(stat -c %s $wheels/libattn-*-py3-none-*.whl)
echo "the wheel has $size bytes"
[ "$size" -lt $bytes_allowed ] || { echo "that is $bytes_allowed bytes or more"; exit 1; }

$venv/bin/pip install --quiet --disable-pip-version-check -r tests/package/requirements.txt
cd tests/package
../../$venv/bin/python -m pytest -q "$@"
