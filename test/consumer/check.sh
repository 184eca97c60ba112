#!/bin/bash
# check.sh BUILD_FOLDER: installs the build into a fresh prefix, then builds and runs the consumer
# against it, once through find_package and once through pkg-config.
set -euo pipefail
build=$(realpath "$1")
here=$(dirname "$(realpath "$0")")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cmake --install "$build" --prefix "$work/prefix" >/dev/null
"$work/prefix/bin/statepack" --version

# Public headers stand alone: each compiles without any other, and without the sources.
for header in "$work"/prefix/include/statepack/*; do
  case $header in
    *.h) echo "#include <statepack/${header##*/}>" | cc -std=c11 -Wall -Wextra -Werror -pedantic \
           -I "$work/prefix/include" -fsyntax-only -x c - ;;
  esac
  echo "#include <statepack/${header##*/}>" | c++ -std=c++20 -Wall -Wextra -Werror -pedantic \
    -I "$work/prefix/include" -fsyntax-only -x c++ -
done

cmake -S "$here" -B "$work/cmake" -DCMAKE_PREFIX_PATH="$work/prefix" >/dev/null
cmake --build "$work/cmake" >/dev/null
"$work/cmake/consumer"

export PKG_CONFIG_PATH=$work/prefix/lib/pkgconfig
# shellcheck disable=SC2046 # flags are words
c++ -std=c++20 "$here/consumer.cc" $(pkg-config --cflags --libs statepack) -o "$work/by-pkg-config"
"$work/by-pkg-config"
