// STEPQuant: a row scale from the row mean and the row's impact, a column scale fitted by weighted
// least squares, and a width for each key row that a plan has set (arXiv 2609.38169).
//
// Two forms. With a scalar gate (GDN) all rows of a head have one width and 2-bit heads use the
// levels -3, -1, 1, 3; with a gate per channel (KDA) every row has its own width, and row norms
// 2^(8-b) let one column scale serve all of them.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "codec/codec.hpp"
#include "codec/packed_read.hpp"

namespace statepack {

extern const CodecInfo kStepquantInfo;

/// Source    STEPQuant, sec. 4 (codec) and the released page layout.
/// Page      value columns are cut into tiles of T = min(16, V) (scalar gate) or min(4, V) (channel
///           gate). A head's tiles follow one another; in a tile the rows follow in order, each
///           with the run of its T codes. Rows of 16 bits (pivots) hold halves at even offsets, and
///           a tile's size is even. Behind the codes of all heads: f16 row scales, head-major, one
///           for each integer row (one for each group of columns in 2-bit scalar-gate rows); then
///           f16 column scales, V for each head that has an integer row.
/// Any V     the last tile and the last group are shorter when T or the group does not divide V;
///           each run there is filled to whole periods of its width (4, 2, 4, 1 codes for 2, 4, 6,
///           8 bits), as the layout asks of any run.
/// Numerics  f32 in one fixed order: row means through 16 lanes, column sums from row 0 upwards.
///           The same bytes on every machine. A restored integer value is the correctly rounded
///           product r * c * n * z, because r * c has 22 bits. NaN counts as 0, an infinity as the
///           largest float; pivots saturate at +-65504.
class StepquantCodec final : public LayerCodec {
 public:
  enum class Fit : std::uint8_t {
    kDual,  ///< the method: a scale from the row's mean and weight, column scales fitted
    kRows,  ///< for comparison: absmax / Q a row alone, no column scales, integers at 2 bits
  };
  /// `group`: columns that share a row scale in 2-bit rows of a scalar gate.
  /// `shape` has passed check_shape(). Errors: kMismatch (no plan, or one of another shape),
  /// kCorrupt (a width or weight that the codec has no meaning for, mixed rows with a scalar gate).
  static Result<std::unique_ptr<LayerCodec>> make(const LayerShape& shape, const LayerPlan* plan,
                                                  int group, Fit fit = Fit::kDual);

  const LayerShape& shape() const override { return shape_; }
  PayloadBytes payload() const override { return payload_; }
  std::size_t scratch_bytes() const override;
  void encode(int head, const float* X, std::uint8_t* page, const RoundingContext& at,
              CodecScratch scratch) const override;
  bool encode_rows(int head, RowSource& X, std::uint8_t* page, CodecScratch scratch) const override;
  void decode(int head, const std::uint8_t* page, float* X, CodecScratch scratch) const override;
  /// Where tiles are whole runs: a scalar gate, V and (at 2 bits) groups multiples of 16.
  bool read_two(int head, const std::uint8_t* page, const float* a, const float* b, float* p,
                float* r, CodecScratch scratch) const override;
  std::optional<PageMap> page_map() const override;

  /// What a page holds of one head, in canonical order: for tests and inspection.
  struct Dump {
    std::vector<int> z;    ///< [K][V] codes, 0 in pivot rows
    std::vector<float> r;  ///< [K][groups()] row scales without the norm n, 0 in pivot rows
    std::vector<float> c;  ///< [V] column scales, 1 without a fit; empty when all rows are pivots
  };
  Dump dump(int head, std::span<const std::uint8_t> page) const;

  int tile() const { return tile_; }
  /// Row scales of one row of this head.
  int groups(int head) const;
  /// Byte in the page at which the run of row i in the tile that starts at column `tile_begin`
  /// lies.
  std::int64_t run_offset(int head, int i, int tile_begin) const;
  /// Bytes in the page at which a head's row and column scales start.
  std::int64_t row_scales(int head) const { return heads_[static_cast<std::size_t>(head)].rows; }
  std::int64_t column_scales(int head) const {
    return heads_[static_cast<std::size_t>(head)].columns;
  }

 private:
  struct Row {
    std::int32_t offset = 0;       // in a full tile
    std::int32_t last_offset = 0;  // in the shorter last tile
    std::int64_t scale = 0;        // index of the row's first scale among the head's row scales
    std::uint8_t bits = 0;
    float weight = 1;
  };
  struct Head {
    std::int64_t codes = 0, rows = 0, columns = 0;  // bytes in the page
    std::int64_t stride = 0;                        // bytes of a full tile
    std::int64_t code_bytes = 0;                    // of all tiles
    std::int64_t n_row_scales = 0;
    std::int64_t first_weight = 0;  // in scale_weights_
    bool signed_magnitude = false;  // 2-bit scalar gate
    bool padded = false;            // some bytes of the tiles belong to no run
    int uniform_bits = 0;           // of all rows with a scalar gate, else 0
  };
  struct Arrays;

  bool whole_tiles(int head) const;
  CodeTiles tiles(int head, const std::uint8_t* page, int begin, int n) const;
  bool encode_tiles(int head, RowSource& X, std::uint8_t* page, const Arrays& a) const;
  void encode_by_rows(int head, const float* X, std::uint8_t* page, const Arrays& a) const;
  void read_columns_of(const Head& head, const std::uint8_t* page, std::uint16_t* half,
                       float* c) const;

  StepquantCodec() = default;
  const Row& row(int head, int i) const {
    return rows_[static_cast<std::size_t>(head) * static_cast<std::size_t>(shape_.K) +
                 static_cast<std::size_t>(i)];
  }
  float norm(const Row& row) const;  // n = 2^(8 - b) with a gate per channel, else 1
  void scatter(const Head& head, const Row& row, const std::uint8_t* run, std::uint8_t* page) const;
  void write_half(const Head& head, const Row& row, const float* x, std::uint8_t* page,
                  const Arrays& a) const;
  void gather(const Head& head, const Row& row, const std::uint8_t* page, std::uint8_t* run) const;

  LayerShape shape_;
  int tile_ = 0;  // T
  int n_full_tiles_ = 0;
  int last_tile_ = 0;  // columns of the shorter last tile, 0 when T divides V
  int group_ = 0;      // columns of a group
  Fit fit_ = Fit::kDual;
  std::vector<Head> heads_;
  std::vector<Row> rows_;             // [HV][K]
  std::vector<float> scale_weights_;  // the row's weight for each row scale, head-major
  PayloadBytes payload_;
};

}  // namespace statepack
