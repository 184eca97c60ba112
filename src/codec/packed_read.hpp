// S^T a and S^T b over packed codes in one pass, for every layout that keeps 16 codes together.
//
// A run is 16 consecutive codes of one width. Codes stay small integers (or halves) until they meet
// a and b: row scales belong into a and b beforehand, column scales onto the sums afterwards. The
// sums are f32 with fused multiply-adds where the machine has them, so their last bits depend on
// the instruction set, and on nothing else.
#pragma once

#include <cstdint>

namespace statepack {

/// How 16 codes lie in a run, and the number c that a code u stands for.
enum class RunCodes : std::uint8_t {
  kSigned8,    ///< 16 bytes, two's complement
  kSigned6,    ///< 8 bytes of low nibbles, and elsewhere 4 bytes of the two high bits
  kSigned4,    ///< 8 bytes, two's complement
  kUnsigned8,  ///< 16 bytes; c = u
  kUnsigned4,  ///< 8 bytes; c = u
  kOffset8,    ///< 16 bytes; c = u - 127
  kOffset6,    ///< 12 bytes; c = u - 31. The 4 bytes behind the last run must be readable
  kOffset4,    ///< 8 bytes; c = u - 7
  kLevels2,    ///< 4 bytes; c = 2 u - 3
  kHalf,       ///< 32 bytes, f16
  // Mid-rise codes of b bits, c = u - (2^b - 1) / 2; at 2 bits kLevels2 has twice that. The 16
  // bytes from the last run on must be readable.
  kMidrise3,  ///< 6 bytes
  kMidrise4,  ///< 8 bytes
  kMidrise5,  ///< 10 bytes
  kMidrise6,  ///< 12 bytes
  kMidrise8,  ///< 16 bytes
};

inline constexpr int kRunLength = 16;

constexpr std::int64_t run_bytes(RunCodes codes) {
  switch (codes) {
    case RunCodes::kHalf:
      return 32;
    case RunCodes::kOffset6:
    case RunCodes::kMidrise6:
      return 12;
    case RunCodes::kMidrise5:
      return 10;
    case RunCodes::kSigned6:
    case RunCodes::kSigned4:
    case RunCodes::kUnsigned4:
    case RunCodes::kOffset4:
    case RunCodes::kMidrise4:
      return 8;
    case RunCodes::kMidrise3:
      return 6;
    case RunCodes::kLevels2:
      return 4;
    default:
      return 16;
  }
}

/// Columns whose K codes lie one behind the other, K a multiple of 16.
struct CodeColumns {
  RunCodes codes = RunCodes::kSigned8;
  const std::uint8_t* first = nullptr;
  std::int64_t stride = 0;             ///< bytes from column to column
  const std::uint8_t* high = nullptr;  ///< the plane of high bits (kSigned6)
  std::int64_t high_stride = 0;
  int K = 0, V = 0;
  int group = 0;  ///< keys that are summed apart, a multiple of 16; the last group may be shorter
  /// Where not null: the halves of the first column's group scales s_gj, `stride` bytes from those
  /// of the next.
  const std::uint8_t* scales = nullptr;
};

/// p[g][j] = sum over the keys i of group g of a_i c_ij, and r likewise with b: both
/// [ceil(K / group)][V]. With scales, p_j = sum_g s_gj times that, [V]. `packed` [2 K] is scratch.
void read_columns(const CodeColumns& columns, const float* a, const float* b, float* packed,
                  float* p, float* r);

/// Tiles of 16 columns in each of which K runs follow one another, one a row.
struct CodeTiles {
  RunCodes codes = RunCodes::kOffset8;
  const std::uint8_t* first = nullptr;
  std::int64_t stride = 0;  ///< bytes from tile to tile
  int K = 0, n_tiles = 0;
};

/// p_j = sum_i a_i c_ij and r_j = sum_i b_i c_ij for the 16 n_tiles columns of the tiles.
void read_tiles(const CodeTiles& tiles, const float* a, const float* b, float* p, float* r);

/// x_ij = (r_i s_j) c_ij for the same columns, r_i = r[i * r_stride]; rows of X are X_stride floats
/// apart. Row i of the tiles becomes row places[i] of X, or row i where `places` is null.
void restore_tiles(const CodeTiles& tiles, const float* r, int r_stride, const float* s, float* X,
                   int X_stride, const std::int32_t* places = nullptr);

/// Adds a state of low rank to both reads: p_j += sum_m (sum_i a_i key_mi) value_mj, r likewise
/// with b. Factor m is K halves of key and then V halves of value, behind factor m - 1.
void read_low_rank(const std::uint8_t* factors, int rank, int K, int V, const float* a,
                   const float* b, float* p, float* r);

}  // namespace statepack
