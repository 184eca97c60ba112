#!/bin/bash
# check.sh BUILD_FOLDER: installs the build into a fresh prefix, then builds and runs the consumers
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
    *.hpp) ;;
    *) echo "#include <statepack/${header##*/}>" | cc -std=c11 -Wall -Wextra -Werror -pedantic \
         -I "$work/prefix/include" -fsyntax-only -x c - ;;
  esac
  echo "#include <statepack/${header##*/}>" | c++ -std=c++20 -Wall -Wextra -Werror -pedantic \
    -I "$work/prefix/include" -fsyntax-only -x c++ -
done

cmake -S "$here" -B "$work/cmake" -DCMAKE_PREFIX_PATH="$work/prefix" >/dev/null
cmake --build "$work/cmake" >/dev/null
"$work/cmake/consumer_cxx"
"$work/cmake/consumer_c"

export PKG_CONFIG_PATH=$work/prefix/lib/pkgconfig
flags=$(pkg-config --cflags --libs statepack)
# shellcheck disable=SC2086 # flags are words
c++ -std=c++20 "$here/consumer.cc" $flags -o "$work/consumer_cxx"
# shellcheck disable=SC2086
cc -std=c11 "$here/consumer.c" $flags -o "$work/consumer_c"
"$work/consumer_cxx"
"$work/consumer_c"
