// LeapQuant: FP16 compensators take out the strongest directions, then a row scale smooths the
// residual and one scale a value column rounds it to 8, 6 or 4 bits (arXiv 2609.38166). It is meant
// for a state that is rounded once a window.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "codec/codec.hpp"

namespace statepack {

extern const CodecInfo kLeapquantInfo;

/// Restores    Shat = Ktil Util^T + diag(s_k) (Z / qmax) diag(s_v), Z in [-qmax, qmax],
///             qmax = 2^(bits-1) - 1.
/// Checkpoint  one a head, sections at multiples of 128 bytes: codes value-major [V][K]; at 6 bits
/// a
///             plane [V][ceil(K/2)] of low nibbles and then one [V][ceil(K/4)] of the two high
///             bits, at 4 bits [V][ceil(K/2)]; all two's complement, lowest index in the lowest
///             bits; s_k [K] and s_v [V], f32 or f16; `rank` rows of K + V halves, the key part
///             (which holds the singular value) first.
/// Numerics    f32 in one fixed order: dot products through 16 lanes, sums over rows from row 0
///             upwards. The same bytes on every machine. A state that is not finite is stored as
///             zero.
class LeapquantCodec final : public LayerCodec {
 public:
  struct Settings {
    int bits = 8;       ///< 8, 6, 4
    int rank = 4;       ///< compensators, 0 to 8
    int rounds = 1;     ///< of subspace iteration
    bool clip = false;  ///< shrink s_v where that lowers the squared error of its column
    bool f16_scales = false;
    bool smooth = true;  ///< off: every s_k is 1 and none is stored
  };
  /// Byte offsets within a head's checkpoint.
  struct Layout {
    std::int64_t codes = 0, high_bits = 0, row_scales = 0, column_scales = 0, compensators = 0;
    std::int64_t n_bytes = 0;
  };

  /// `shape` has passed check_shape().
  LeapquantCodec(const LayerShape& shape, const Settings& settings);

  const LayerShape& shape() const override { return shape_; }
  PayloadBytes payload() const override;
  std::size_t scratch_bytes() const override;
  void encode(int head, const float* X, std::uint8_t* page, const RoundingContext& at,
              CodecScratch scratch) const override;
  void decode(int head, const std::uint8_t* page, float* X, CodecScratch scratch) const override;
  bool read_two(int head, const std::uint8_t* page, const float* a, const float* b, float* p,
                float* r, CodecScratch scratch) const override;
  std::optional<PageMap> page_map() const override;

  const Layout& layout() const { return layout_; }

  /// What a page holds of one head, in canonical order: for tests and inspection.
  struct Dump {
    std::vector<int> z;               ///< [K][V]
    std::vector<float> s_k, s_v;      ///< [K], [V]
    std::vector<float> keys, values;  ///< [rank][K], [rank][V]
  };
  Dump dump(int head, std::span<const std::uint8_t> page) const;

  static constexpr int kMaxRank = 8;
  /// The start of every fit, [rank][V]: independent standard normal numbers that are part of the
  /// format. Column v of rank p is number 8 v + p of the sequence, whatever V and the rank are.
  /// Made with +, -, *, / and square roots in double only, so the same on every machine.
  static std::vector<float> start_matrix(int V, int rank);

 private:
  struct Arrays;
  bool whole_runs() const;
  bool smooth(const float* X, const Arrays& a) const;
  void pack(const Arrays& a, std::uint8_t* checkpoint) const;
  void unpack(const std::uint8_t* checkpoint, const Arrays& a) const;
  void round_scales(float* scales, std::int64_t n) const;
  void store_scales(const float* scales, std::int64_t n, std::uint8_t* to) const;
  void read_scales(const std::uint8_t* from, std::int64_t n, std::uint16_t* half,
                   float* scales) const;
  void read_row_scales(const std::uint8_t* checkpoint, const Arrays& a) const;
  void read_factors(const std::uint8_t* checkpoint, const Arrays& a) const;
  void shrink_column_scales(const Arrays& a, float qmax) const;

  LayerShape shape_;
  Settings settings_;
  Layout layout_;
  std::vector<float> start_;  // Q0 [rank][V]
};

}  // namespace statepack
