// A scheme is all that decides how a state is kept: codec, window, rounding rule, prefill rule.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "statepack/status.hpp"
#include "statepack/types.hpp"

namespace statepack {

/// How the updates of an open window are stored.
enum class Records : std::uint8_t {
  kF32,    ///< k, u f32; log gate f32
  kBf16,   ///< k, u bf16; scalar log gate f32, or per-channel factors f16
  kInt8,   ///< k, u int8 with one f16 scale a vector; log gate f16
  kMixed,  ///< k 4 bits with one f16 scale, u bf16; scalar log gate f32, per-channel log gate f16
};

/// What a record holds: the finished correction u, or the raw v and beta, replayed in order.
enum class RecordMode : std::uint8_t { kU, kV };

/// From where windows are counted: the hand-over of the prompt, or absolute token positions.
enum class Phase : std::uint8_t { kHandover, kAbsolute };

/// How a slot keeps the history of the short convolutions. Each of its values, an input of the
/// convolution, is rounded once, when it leaves the token that made it; nothing accumulates.
enum class ConvFormat : std::uint8_t { kF32, kBf16 };

/// A parsed scheme name. Cheap to copy; prints back to the string that it was parsed from, with
/// options in a fixed order and defaults left out: `stepquant:4,period=16,records=int8`.
struct Scheme {
  std::string codec;                 ///< "stepquant"
  std::string codec_arg;             ///< "4", "" when the codec takes none
  std::string codec_options;         ///< the codec's own non-default options: "rank=2,clip=on"
  int period = 1;                    ///< tokens between two roundings; 1 rounds at every token
  Records records = Records::kBf16;  ///< meaningful when period > 1
  RecordMode mode = RecordMode::kU;
  Phase phase = Phase::kHandover;
  int prefill_period = 0;  ///< 0: one rounding at the hand-over; else every so many prompt tokens
  bool beta_bf16 = false;  ///< round beta to bf16 first, as one published kernel does
  ConvFormat conv = ConvFormat::kF32;
  Rounding rounding = Rounding::kNearest;
  std::uint64_t seed = 0;  ///< of stochastic rounding

  /// Parses and validates. Errors: kInvalidArgument or kUnsupported with the reason and the remedy.
  static Result<Scheme> parse(std::string_view name);
  std::string name() const;  ///< shortest form
  /// Every option written out, except `conv=f32`: files from before there was a `conv` have names
  /// without it, and must keep comparing equal.
  std::string full_name() const;
  bool needs_plan() const;
  bool operator==(const Scheme&) const = default;
};

}  // namespace statepack
