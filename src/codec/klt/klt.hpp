// klt: the state in a basis that later reads make diagonal, with a width for each row of it.
//
// A scalar gate commutes with any invertible matrix on the key axis, so the page keeps Z = M S, and
// the step reads at M^-T q and M^-T k and writes at M k. Calibration chooses M such that errors in
// different rows cost the same and do not add up (calibrate/readout.hpp); a row that no query reads
// then costs nothing and gets 0 bits. Gates of channels allow no such M; a plan may then have rows
// rounded with feedback. Method and measurements: docs/klt.md.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "codec/codec.hpp"
#include "codec/klt/fit.hpp"
#include "codec/klt/head_fit.hpp"
#include "codec/packed_read.hpp"

namespace statepack {

extern const CodecInfo kKltInfo;

namespace klt {

/// Widths that a row may have, and the mean squared error that the best uniform mid-rise quantiser
/// of that many bits leaves of a unit Gaussian.
struct Width {
  int bits;
  float step;         ///< Delta; 0 where nothing is kept
  double distortion;  ///< D(b)
};
inline constexpr std::array<Width, 7> kWidths = {{{0, 0.0f, 1.0},
                                                  {2, 0.9957f, 0.1188},
                                                  {3, 0.586f, 0.03744},
                                                  {4, 0.3352f, 0.01154},
                                                  {5, 0.1881f, 0.00349},
                                                  {6, 0.1041f, 0.00104},
                                                  {8, 0.0308f, 8.8e-5}}};

/// A rounding counts as outside what calibration saw when it costs this many times the plan's
/// guard.
inline constexpr float kGuardFactor = 2;

}  // namespace klt

/// Page      head by head: the rows of each width, widest first, then f16 column scales, V, then
/// the
///           row factors in the order of the codes, 2 bits each (neither where a head has no bits).
///           Rows of one width are cut into tiles of 16 columns: in a tile the rows follow in
///           ascending order, each with the run of its 16 codes, 2 b bytes; the last tile is
///           narrower where 16 does not divide V, its runs whole bytes.
/// Fit       (1) y_ij = Z_ij / r_i; (2) c0_j = f16(max(sqrt(mean over rows with bits of y_ij^2),
///           max_i |y_ij| / T_i)), T = max(L / 0.65, 3.8), L = (2^b - 1)/2 Delta; (3) f_i of 0.5,
///           0.75, 1, 1.5, the first with the least sum_j max(|y_ij| - f L c0_j, 0)^2 +
///           (f Delta)^2 / 12 sum_j c0_j^2; (4) u_ij = clamp(floor(y_ij / (c0_j f_i Delta)) +
///           2^(b-1), 0, 2^b - 1), value v = (u - (2^b - 1) / 2) f_i Delta; (5) c_j = f16(sum_i
///           r_i^2 v_ij y_ij / sum_i r_i^2 v_ij^2), codes kept. Restored: (r_i f_i Delta c_j)
///           (v_ij / (f_i Delta)). A column scale may be 0 and means zeros.
///           With feedback B: (5) gives c_j; then rows in ascending order, those without bits too:
///           t_ij = Z_ij - sum_{l<i} b_il (Zhat_lj - Z_lj), codes of t_ij / (r_i f_i c_j Delta).
/// Numerics  f32; quotients by r_i, c0_j and f_i Delta are products with rounded reciprocals, sums
///           over rows run in ascending order, those over columns as fit.hpp says. The same bytes
///           on every machine. The squared error of a column's kept rows is at most their energy:
///           c_j = 0 would leave that.
class KltCodec final : public LayerCodec {
 public:
  /// `shape` has passed check_shape(). Errors: kMismatch (no plan, or one of another shape),
  /// kCorrupt (a width that klt does not know, a scale that is not positive, a singular transform).
  static Result<std::unique_ptr<LayerCodec>> make(const LayerShape& shape, const LayerPlan* plan);

  const LayerShape& shape() const override { return shape_; }
  PayloadBytes payload() const override { return payload_; }
  std::size_t scratch_bytes() const override;
  void encode(int head, const float* X, std::uint8_t* page, const RoundingContext& at,
              CodecScratch scratch) const override;
  bool encode_rows(int head, RowSource& X, std::uint8_t* page, CodecScratch scratch) const override;
  void decode(int head, const std::uint8_t* page, float* X, CodecScratch scratch) const override;
  /// Where 16 divides V.
  bool read_two(int head, const std::uint8_t* page, const float* a, const float* b, float* p,
                float* r, CodecScratch scratch) const override;
  /// Of sum_ij (Z_ij - Zhat_ij)^2 / (K V), rows without bits included: a unit error costs the same
  /// in every row.
  float guard(int head) const override { return this->head(head).guard; }
  const float* write_transform(int head) const override { return transform(M_transposed_, head); }
  const float* read_transform(int head) const override { return transform(M_inverse_, head); }

 private:
  /// The rows of one width.
  struct Group {
    klt::Quantiser quantiser;
    RunCodes codes = RunCodes::kMidrise4;
    float times = 1,
          offset = 0;           ///< v / Delta of code u is (times u - offset) in units of `factors`
    int first = 0, n_rows = 0;  ///< in Head::rows
    std::int64_t at = 0;        ///< bytes in the page
  };
  struct Head {
    std::vector<Group> groups;
    std::vector<std::int32_t> rows;   ///< of the groups, one after the other
    std::vector<float> factors;       ///< of `rows`: r Delta, half of that at 2 bits
    std::vector<std::int32_t> group;  ///< [K] of a row, -1: no bits
    std::vector<std::int32_t> kept;   ///< rows with bits, ascending
    std::vector<klt::RowFit> fits;    ///< of `kept`
    std::int64_t columns = 0;         ///< bytes in the page
    float guard = 0;                  ///< see guard()
    std::vector<float> feedback;      ///< [K][K], or empty
    std::vector<float> row_weight;    ///< [K] beside it
  };
  struct Arrays;

  /// f of the rows in the order of Head::rows, from the page.
  void load_factors(const Head& head, const std::uint8_t* page, float* f) const;

  KltCodec() = default;
  const Head& head(int h) const { return heads_[static_cast<std::size_t>(h)]; }
  const float* transform(const std::vector<float>& of, int h) const;
  void fit_rows(int head, RowSource& X, std::uint8_t* page, CodecScratch scratch) const;
  void encode_fed(const Head& head, const float* Z, std::uint8_t* page, CodecScratch scratch) const;
  CodeTiles tiles(const Group& group, const std::uint8_t* page) const;
  void scatter(const Group& group, int place, const std::uint8_t* run, std::uint8_t* page) const;
  void gather(const Group& group, int place, const std::uint8_t* page, std::uint8_t* run) const;

  LayerShape shape_;
  int n_full_tiles_ = 0;
  int last_tile_ = 0;  // columns of a narrower last tile
  bool feeds_back_ = false;
  std::vector<Head> heads_;
  std::vector<float> M_transposed_, M_inverse_;  // [n][K][K], n = H or HV, or empty
  PayloadBytes payload_;
};

}  // namespace statepack
