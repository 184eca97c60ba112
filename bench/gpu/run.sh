#!/bin/sh
# Builds the kernels, checks them against the CPU, then times everything on the first GPU.
#
#   bench/gpu/run.sh [RESULTS]      results/gpu unless named: tests.txt, bench.json, fla.json
#
# With compute-sanitizer on the PATH a part of the tests runs under it too; with torch and fla-core
# (PyPI) installed the kernels of flash-linear-attention are timed on the same shapes.
set -eu
cd "$(dirname "$0")/../.."
results=${1:-results/gpu}
build=build/cuda
mkdir -p "$results"
cmake --preset cuda ${CUDA_ARCHITECTURES:+-DCMAKE_CUDA_ARCHITECTURES=$CUDA_ARCHITECTURES}
cmake --build "$build" --target test_cuda bench_gpu

"$build/test/cuda/test_cuda" --gtest_brief=1 | tee "$results/tests.txt"
if command -v compute-sanitizer >/dev/null; then
  for tool in memcheck racecheck initcheck synccheck; do
    compute-sanitizer --tool "$tool" --error-exitcode 1 "$build/test/cuda/test_cuda" \
      --gtest_brief=1 --gtest_filter='Device/SomeSchemes.*' | tee "$results/$tool.txt"
  done
fi
"$build/bench/gpu/bench_gpu" --out "$results/bench.json"
if python3 -c 'import fla.ops' 2>/dev/null; then
  python3 bench/gpu/time_fla.py --out "$results/fla.json"
fi
