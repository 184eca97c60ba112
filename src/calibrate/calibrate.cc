#include "calibrate/calibrate.hpp"

#include <array>
#include <cstdio>
#include <utility>

#include "base/hash.hpp"
#include "calibrate/run.hpp"
#include "scheme/config.hpp"

namespace statepack {
namespace {

constexpr std::int64_t kMaxSegments = 1 << 20, kMaxSegmentTokens = 1 << 24;

Status invalid(std::string message) { return {Code::kInvalidArgument, std::move(message)}; }

Status check_range(const std::string& what, std::int64_t value, std::int64_t lo, std::int64_t hi) {
  if (lo <= value && value <= hi) return {};
  return invalid(what + " is " + std::to_string(value) + "; take " + std::to_string(lo) + " to " +
                 std::to_string(hi));
}

Status check_options(const CalibrationOptions& options, std::span<const CalibrationText> texts) {
  if (texts.empty()) return invalid("there is no text to calibrate on; name at least one");
  // Every text has at least one segment and one snapshot.
  const auto n_texts = static_cast<std::int64_t>(texts.size());
  SP_RETURN_IF_ERROR(
      check_range("the number of segments", options.n_segments, n_texts, kMaxSegments));
  SP_RETURN_IF_ERROR(
      check_range("the number of snapshots", options.n_snapshots, n_texts, kMaxSegments));
  SP_RETURN_IF_ERROR(check_range("the length of a segment in tokens", options.segment_tokens, 1,
                                 kMaxSegmentTokens));
  SP_RETURN_IF_ERROR(check_range("the sampling interval in tokens (0: the scheme's own)",
                                 options.interval, 0, kMaxSegmentTokens));
  if (options.horizon != -1) {
    SP_RETURN_IF_ERROR(check_range("the horizon in tokens", options.horizon, 1, 1 << 30));
  }
  SP_RETURN_IF_ERROR(check_range("the number of pivots (-1: the paper's share)", options.n_pivots,
                                 -1, std::int64_t{1} << 40));
  if (!(options.gamma >= 0 && options.gamma <= 1)) {
    return invalid("gamma is " + std::to_string(options.gamma) + "; take 0 to 1");
  }
  for (const CalibrationText& text : texts) {
    if (static_cast<std::int64_t>(text.tokens.size()) >= options.segment_tokens) continue;
    return invalid("text '" + text.name + "' has " + std::to_string(text.tokens.size()) +
                   " tokens, fewer than one segment of " + std::to_string(options.segment_tokens) +
                   "; give more text or take shorter segments");
  }
  return {};
}

/// Bits are shared out over all layers, so their units must be of one kind and size.
Status check_shapes(const std::vector<LayerShape>& shapes) {
  if (shapes.empty()) return invalid("the model has no recurrent layer, so no state to calibrate");
  const LayerShape& first = shapes.front();
  for (const LayerShape& shape : shapes) {
    if (shape.K == first.K && shape.V == first.V && shape.gate == first.gate) continue;
    return {Code::kUnsupported,
            "recurrent layers of different widths or kinds of gate cannot share one bit budget; "
            "calibration needs all of them alike but for their heads"};
  }
  return {};
}

std::string sha256_of(const std::vector<std::int32_t>& tokens) {
  Sha256 sha;
  for (const std::int32_t token : tokens) {  // little-endian on every machine
    const auto id = static_cast<std::uint32_t>(token);
    const std::array<std::byte, 4> bytes = {std::byte(id & 0xff), std::byte(id >> 8 & 0xff),
                                            std::byte(id >> 16 & 0xff), std::byte(id >> 24)};
    sha.update(bytes);
  }
  return sha.hex();
}

void describe_data(std::span<const CalibrationText> texts, const CalibrationOptions& options,
                   std::map<std::string, std::string>& settings) {
  for (std::size_t d = 0; d < texts.size(); ++d) {
    const std::string key = "text." + std::to_string(d) + ".";
    settings[key + "name"] = texts[d].name;
    settings[key + "tokens"] = std::to_string(texts[d].tokens.size());
    settings[key + "sha256"] = sha256_of(texts[d].tokens);
  }
  settings["segments"] = std::to_string(options.n_segments);
  settings["segment_tokens"] = std::to_string(options.segment_tokens);
  settings["seed"] = std::to_string(options.seed);
  settings["combine"] = options.combine == CombineDomains::kMean ? "mean" : "max";
}

}  // namespace

std::string LayerSummary::text() const {
  char line[256];
  std::snprintf(line, sizeof line,
                "%.3f bits, half-life %.3g to %.3g tokens, omega P90/P10 %.3g, peak/median RMS of "
                "rows %.3g, of columns %.3g, error/state %.3g",
                mean_bits, half_life_min, half_life_max, omega_spread, row_peak, column_peak,
                relative_error);
  return line;
}

Result<Calibration> calibrate(const Scheme& scheme, const std::vector<LayerShape>& shapes,
                              const std::string& model_fingerprint,
                              std::span<const CalibrationText> texts,
                              const CalibrationOptions& given, const PrefillPass& prefill,
                              ThreadPool& threads) {
  SP_ASSIGN_OR_RETURN(const CodecConfig config, codec_config(scheme));
  const std::string kind(config.info->plan_kind(config));
  CalibrationOptions options = given;
  if (!options.combine) {
    options.combine = kind == "klt" ? CombineDomains::kMax : CombineDomains::kMean;
  }
  if (kind.empty()) {
    return invalid("scheme " + scheme.name() + " needs no plan; use it as it is");
  }
  SP_RETURN_IF_ERROR(check_shapes(shapes));
  SP_RETURN_IF_ERROR(check_options(options, texts));

  CalibrationRun run(shapes, texts, options, prefill, threads);
  Calibration result;
  result.plan.kind = kind;
  result.plan.scheme = scheme.name();
  result.plan.model_fingerprint = model_fingerprint;
  result.plan.shapes = shapes;
  describe_data(texts, options, result.plan.settings);
  if (kind == "stepquant") {
    SP_RETURN_IF_ERROR(make_row_bits(config, run, result));
  } else if (kind == "pace-high") {
    SP_RETURN_IF_ERROR(make_high_heads(config, scheme.period, run, result));
  } else if (kind == "damp-rows") {
    SP_RETURN_IF_ERROR(make_protected_rows(config, run, result));
  } else if (kind == "klt") {
    SP_RETURN_IF_ERROR(make_transforms(config, run, result));
  } else {
    return Status(Code::kUnsupported, "scheme " + scheme.name() + " needs a plan of kind '" + kind +
                                          "', which this build cannot calibrate");
  }
  for (std::size_t l = 0; l < result.layers.size(); ++l) {
    result.plan.settings["layer." + std::to_string(l)] = result.layers[l].text();
  }
  result.prefill_s = run.prefill_s();
  result.distortion_s = run.distortion_s();
  result.n_passes = run.n_passes();
  return result;
}

}  // namespace statepack
