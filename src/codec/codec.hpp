// A codec turns one head's state into packed bytes and back.
//
// A state X is [K][V] f32, row-major: key channels are rows, value channels are columns. The packed
// bytes of all heads of one layer are a page; a LayerCodec is compiled for one layer (its shape,
// its plan entry) and knows where in the page each head's codes and scales lie, which need not be
// one run of bytes (STEPQuant keeps the scales of all heads behind all codes).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "codec/page_map.hpp"
#include "statepack/status.hpp"
#include "statepack/types.hpp"

namespace statepack {

/// What a plan says about one layer. A codec reads the fields it needs and refuses a plan that
/// lacks them; it ignores the others.
struct LayerPlan {
  /// [HV*K] width of each key row: 0, 2, 3, 4, 5, 6, 8 or 16 (half precision).
  std::vector<std::uint8_t> bits;
  /// [HV*K] w of STEPQuant, or the weights of klt's feedback; finite and > 0
  std::vector<float> row_weight;
  std::vector<std::uint8_t> high;  ///< [HV] 1 where PACE-4/8 keeps the head at 8 bits
  std::vector<float> row_scale;  ///< [HV*K] r of klt: a row's RMS to that of all rows, finite, > 0
  /// M of klt, [n][K][K] row-major, one for each key head (n = H) or value head (n = HV), every
  /// value an f16; empty: the identity.
  std::vector<float> transform;
  /// B of klt where no transform is possible, [HV][K][K] row-major, strictly lower, every value an
  /// f16; empty: 0. Row i is rounded at its value less what sum_l b_il of the errors of rows before
  /// it cost; row_weight then says what is left of an error in row i.
  std::vector<float> feedback;
  /// [HV] what klt's rounding of a head cost calibration, a high quantile over its states, in the
  /// units of LayerCodec::guard(), finite and >= 0; empty: not known.
  std::vector<float> guard;
};

/// Payload bytes of a page by what they hold. total() equals page_bytes() of the codec.
struct PayloadBytes {
  std::int64_t codes = 0;
  std::int64_t scales = 0;  ///< row, column and group scales
  std::int64_t zero_points = 0;
  std::int64_t pivots = 0;  ///< values kept in half precision
  std::int64_t compensators = 0;
  std::int64_t padding = 0;
  std::int64_t total() const {
    return codes + scales + zero_points + pivots + compensators + padding;
  }
};

/// What a rounding may depend on besides the state: the place that its random numbers belong to,
/// and what was left over the last time.
struct RoundingContext {
  // Equal numbers give equal bits, on every machine and in every batch. Requests share them, so
  // that one prompt has one answer whoever else is served.
  std::uint64_t seed = 0;   ///< of the scheme
  std::uint32_t layer = 0;  ///< recurrent layer, below 4096
  std::uint64_t step = 0;   ///< position of the last token in the state
  /// The page whose state was updated into X, for codecs that carry their rounding error on; null
  /// where there was none (a hand-over). It may be the page that is written.
  const std::uint8_t* before = nullptr;
};

/// Per-thread memory for encode and decode, so that neither allocates: sized by scratch_bytes().
struct CodecScratch {
  std::span<std::byte> bytes;
  /// Where a codec with a guard() leaves what a rounding costs; null: nobody asks.
  float* cost = nullptr;
};

/// A state that is made while it is packed, so that it never leaves the first-level cache.
class RowSource {
 public:
  virtual ~RowSource() = default;
  /// Rows begin to begin + n of X, [n][V], 1 <= n <= kMaxRows; every row is asked for once, in
  /// order. Valid until the next call.
  virtual const float* rows(int begin, int n) = 0;
  static constexpr int kMaxRows = 16;
};

class LayerCodec {
 public:
  virtual ~LayerCodec() = default;

  virtual const LayerShape& shape() const = 0;
  virtual PayloadBytes payload() const = 0;
  /// Bytes of one page, padding to its own alignment (at most 16) included.
  std::int64_t page_bytes() const { return payload().total(); }
  virtual std::size_t scratch_bytes() const = 0;

  /// Packs X [K][V], finite, of one value head into the page; touches only this head's bytes.
  /// Deterministic in X and `at`, of which most codecs use nothing: no dependence on thread,
  /// machine or (but for at.before) earlier page contents.
  virtual void encode(int head, const float* X, std::uint8_t* page, const RoundingContext& at,
                      CodecScratch scratch) const = 0;
  /// encode() in one pass over the rows of X, which need not be finite. False, with this head's
  /// bytes unspecified, where the codec has no such pass for this head or these values; the caller
  /// then makes all of X and calls encode().
  virtual bool encode_rows(int head, RowSource& X, std::uint8_t* page, CodecScratch scratch) const {
    (void)head, (void)X, (void)page, (void)scratch;
    return false;
  }
  /// Restores one head. A page of zero bytes decodes to the zero state in every codec.
  virtual void decode(int head, const std::uint8_t* page, float* X, CodecScratch scratch) const = 0;
  /// Rows begin to begin + n of what decode() restores, 1 <= n <= RowSource::kMaxRows, into X
  /// [n][V]. False, with nothing written, where the codec has no such way for this head.
  virtual bool decode_rows(int head, const std::uint8_t* page, int begin, int n, float* X) const {
    (void)head, (void)page, (void)begin, (void)n, (void)X;
    return false;
  }

  /// Both reads of one head in one pass over its packed bytes: p_j = sum_i a_i X_ij and
  /// r_j = sum_i b_i X_ij with the X that decode() restores, in the codec's own order of f32 sums.
  /// `a`, `b` [K]; `p`, `r` [V]. False, with nothing written, where the codec has no such pass for
  /// this head; the caller then decodes.
  virtual bool read_two(int head, const std::uint8_t* page, const float* a, const float* b,
                        float* p, float* r, CodecScratch scratch) const {
    (void)head, (void)page, (void)a, (void)b, (void)p, (void)r, (void)scratch;
    return false;
  }

  /// Where the page holds this head as plain f32 [K][V] (the fp32 codec), that place; else nullptr.
  /// A step then works in place.
  virtual float* in_place(int head, std::uint8_t* page) const {
    (void)head, (void)page;
    return nullptr;
  }

  /// A codec may keep Z = M S instead of S. Then writes use M k and reads use M^-T q, M^-T k. These
  /// give row-major [K][K] matrices T of a value head such that the vector used is y_j = sum_i x_i
  /// T_ij, which are M^T and M^-1; nullptr for the identity. Heads that share one give one pointer.
  virtual const float* write_transform(int head) const { return (void)head, nullptr; }
  virtual const float* read_transform(int head) const { return (void)head, nullptr; }

  /// What one rounding of a head may cost before its states count as unlike those that the plan was
  /// made for; 0: the codec or its plan does not say. Costs are in units of the codec's own and
  /// known to encode alone.
  virtual float guard(int head) const { return (void)head, 0.0f; }

  /// Where everything lies in a page, or nothing where no kernel but this codec's own may read it.
  virtual std::optional<PageMap> page_map() const { return std::nullopt; }
};

/// A codec option as users write it after a comma: `rank=2`.
struct CodecOption {
  std::string_view key;
  std::string_view values;  ///< what is allowed, for help and errors: "row|column", "1..8"
  std::string_view help;
};

/// How a scheme is kept unless its name says otherwise (words of scheme/scheme.hpp).
struct SchemeDefaults {
  int period = 1;
  std::string_view records = "bf16";  ///< record format once period > 1
  std::string_view phase = "handover";
  std::string_view prefill = "once";
};

/// A codec with its argument and options: everything about it but the layer.
struct CodecConfig {
  const struct CodecInfo* info = nullptr;
  std::string arg;  ///< behind the colon, "" when the codec has none
  Rounding rounding = Rounding::kNearest;
  std::map<std::string, std::string> options;  ///< all of the codec's options, defaults filled in
};

/// One codec of the list. Everything that others need to know about it is asked here.
struct CodecInfo {
  std::string_view name;  ///< word of the scheme name, tag on disk
  std::uint16_t id;       ///< on disk; never reused
  std::string_view help;  ///< one line
  /// Allowed arguments, the first is the default; empty: none. Beside an `arg_rule`, the usual
  /// ones.
  std::vector<std::string_view> args;
  std::vector<CodecOption> options;
  /// What a plan must provide for this codec ("" = no plan): "stepquant", "pace-high", "damp-rows".
  /// The empty string for an argument that needs none (pace:4).
  std::string_view (*plan_kind)(const CodecConfig&);
  SchemeDefaults (*defaults)(const CodecConfig&);
  /// The value an option has when not named; may depend on the argument (rank of leapquant), the
  /// rounding rule and the options before it in the list, which the configuration holds.
  std::string (*default_option)(const CodecConfig&, std::string_view key);
  /// Checks the option values and their combination. Errors: kInvalidArgument, kUnsupported.
  Status (*validate)(const CodecConfig&);
  /// Compiles the codec for a layer. `plan` is null when the codec needs none. Errors:
  /// kUnsupported (a shape the format cannot hold), kMismatch (plan of another shape), kCorrupt.
  Result<std::unique_ptr<LayerCodec>> (*make)(const CodecConfig&, const LayerShape&,
                                              const LayerPlan* plan);
  std::vector<Rounding> roundings = {Rounding::kNearest};  ///< the rules that it can follow
  /// Where more arguments are allowed than a list can name: whether `arg` is one, in its only
  /// spelling, and what is allowed in words ("1 to 8 in steps of 0.25").
  struct ArgRule {
    bool (*allows)(std::string_view arg);
    std::string_view words;
  };
  std::optional<ArgRule> arg_rule = std::nullopt;

  bool allows_arg(std::string_view arg) const;
};

/// All codecs, in the order in which help lists them. Defined in codec/all.cc, the only list.
std::span<const CodecInfo* const> all_codecs();
const CodecInfo* find_codec(std::string_view name);

/// A configuration of a codec with every option that `given` does not name at its default. Values
/// are not checked.
CodecConfig fill_config(const CodecInfo& info, std::string_view arg, Rounding rounding = {},
                        const std::map<std::string, std::string>& given = {});

}  // namespace statepack
