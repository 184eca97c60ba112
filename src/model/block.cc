#include "model/block.hpp"

#include <algorithm>

namespace statepack {

std::vector<RowRun> cut_runs(std::span<const RowRun> runs, std::int64_t n) {
  std::vector<RowRun> pieces;
  for (const RowRun& run : runs) {
    for (std::int64_t at = 0; at < run.n; at += n) {
      pieces.push_back({run.first + at, std::min(n, run.n - at), run.group});
    }
  }
  return pieces;
}

}  // namespace statepack
