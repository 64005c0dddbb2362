# The commands of this project; CMake (CMakePresets.json) does the work. Each target does its own set-up.
PREFIX ?= /usr/local
FUZZ_SECONDS ?= 600
JOBS ?= $(shell nproc 2>/dev/null || echo 2)

MAKEFLAGS += --no-print-directory

.PHONY: all demo test test-cross test-gpu install kernels check-kernels tune-kernels fuzz format check-format clean help
all:
	@scripts/setup.sh build
	@cmake --preset release >/dev/null
	@cmake --build --preset release -j $(JOBS)

demo:
	@JOBS=$(JOBS) scripts/demo.sh

test:
	@JOBS=$(JOBS) scripts/test.sh

install: all
	cmake --install build --prefix $(PREFIX)

kernels:
	@scripts/setup.sh build
	@cmake --preset release >/dev/null
	@cmake --build --preset release -j $(JOBS) --target attn_kernels

tune-kernels:
	@scripts/setup.sh build
	@cmake --preset release >/dev/null
	@cmake --build --preset release -j $(JOBS) --target attn_tune_kernels

test-cross:
	@JOBS=$(JOBS) scripts/cross.sh

test-gpu:
	@scripts/gpu.sh

check-kernels: kernels
	@scripts/check_kernels.py

fuzz:
	@scripts/setup.sh fuzz
	@JOBS=$(JOBS) scripts/fuzz.sh $(FUZZ_SECONDS)

format:
	@scripts/setup.sh format
	@scripts/format.sh --fix

check-format:
	@scripts/setup.sh format
	@scripts/format.sh

clean:
	rm -rf build build-asan build-clang build-cpu build-cross build-fuzz build-gpu build-tiles build-tsan

help:
	@echo "make               build the library and the command line in build/"
	@echo "make demo          build, draw the tiles of an attention problem, measure and check a few more"
	@echo "make test          everything that is tested: with sanitizers, with clang, fuzzed; about an hour on two cores with GPU kernels"
	@echo "make test-cross    the other architecture, aarch64 or x86-64, cross-compiled and under qemu-user; make test does it, too"
	@echo "make test-gpu      what wants a GPU; scripts/gpu.sh says what its parts are"
	@echo "make install       install to PREFIX (now $(PREFIX)); DESTDIR is honoured"
	@echo "make kernels       compile the GPU kernels only, to build/kernels; make check-kernels holds them to their budget"
	@echo "make tune-kernels  compile the kernels that 'attn tune' compares, to build/tune-kernels"
	@echo "make fuzz          each fuzz target for FUZZ_SECONDS (now $(FUZZ_SECONDS))"
	@echo "make format        format the sources; make check-format only says what is not as it should be"
	@echo "make clean         remove the build folders"
