// Where everything lies in the page of one layer, for readers that are no LayerCodec: the kernels
// of an accelerator. A codec fills this from the numbers that its own encode and decode use.
#pragma once

#include <cstdint>
#include <vector>

namespace statepack {

enum class PageFamily : std::uint8_t { kF32, kBf16, kF16, kInt, kLeapquant, kPace, kStepquant };

/// The bytes of one value head; offsets count from the start of the page.
struct HeadMap {
  std::int64_t codes = 0;       ///< where they start
  std::int64_t code_bytes = 0;  ///< kLeapquant, kPace, kInt: all of the head, scales included
  std::int64_t row_scales = 0;
  std::int64_t column_scales = 0;
  std::int32_t n_row_scales = 0;
  std::int32_t stride = 0;  ///< kStepquant: bytes of a tile; kPace: of a column
  std::int32_t bits = 0;
  bool signed_levels = false;  ///< kStepquant: levels -3, -1, 1, 3
};

/// kStepquant: one key row.
struct RowMap {
  std::int32_t offset = 0;  ///< of its run in a tile
  std::int32_t scale = 0;   ///< index of its first scale among those of the head
  std::int32_t bits = 0;    ///< 16: a pivot, kept as halves
  float weight = 1;
};

struct PageMap {
  PageFamily family = PageFamily::kF32;
  std::vector<HeadMap> heads = {};  ///< [HV]
  std::vector<RowMap> rows = {};    ///< kStepquant: [HV][K]
  int group = 0;                    ///< kPace: keys of a group; kStepquant: columns of a group
  int tile = 0;                     ///< kStepquant: columns of a tile
  bool affine = false;              ///< kPace: zero points behind the scales
  // kLeapquant: bytes within a head, and how it is fitted.
  std::int64_t high_bits = 0, compensators = 0;
  int rank = 0, rounds = 0;
  bool f16_scales = false, clip = false;
  std::vector<float> start = {};  ///< Q0 [rank][V]
};

}  // namespace statepack
