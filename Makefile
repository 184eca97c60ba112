# Short names for what people do most; CMake presets do the work (see CMakePresets.json).
JOBS ?= $(shell nproc)
PREFIX ?= /usr/local
CCACHE := $(if $(shell command -v ccache),-DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
CXX_SOURCES = $(shell git ls-files '*.c' '*.cc' '*.hpp' '*.h' '*.cu' '*.cuh')

SHELL := /bin/bash

.DEFAULT_GOAL := help
# Sources for clang-tidy, as patterns; all of ours unless given.
TIDY ?= $(CURDIR)/src/.*

.PHONY: help packages demo test build install format lint tidy clean

help:  ## Show this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

packages:  ## Install the Debian packages that are missing
	@cmake/install-packages.sh build

demo: packages  ## Ask a small model with an fp32 state and with states of a few bits
	@cmake --preset release $(CCACHE) >/dev/null
	@cmake --build --preset release --parallel $(JOBS) --target statepack
	@eval/demo.sh build/release/src/cli/statepack

test: packages  ## Build everything and run the tests
	cmake --preset dev $(CCACHE)
	cmake --build --preset dev --parallel $(JOBS)
	ctest --preset dev --parallel $(JOBS)

build: packages  ## Build everything, optimised
	cmake --preset release $(CCACHE)
	cmake --build --preset release --parallel $(JOBS)

install: build  ## Install program, libraries and headers under PREFIX
	cmake --install build/release --prefix $(PREFIX)

format:  ## Format the tracked C++ sources in place
	clang-format-14 -i $(CXX_SOURCES)

lint:  ## Check format and folder layering
	clang-format-14 --dry-run -Werror $(CXX_SOURCES)
	python3 cmake/check_layers.py

tidy:  ## Run clang-tidy on all sources (build/dev must be configured)
	@# The wrapper prints every command and clang's count of what it did not show: drop those lines.
	@set -o pipefail; run-clang-tidy-14 -p build/dev -j $(JOBS) -quiet $(TIDY) 2>&1 | \
	  sed -E '/^$$|warnings? generated|^clang-tidy-14 |^Suppressed|^Use -header-filter/d'

clean:  ## Remove all build folders
	rm -rf build
