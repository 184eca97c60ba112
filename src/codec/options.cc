#include "codec/options.hpp"

#include <algorithm>
#include <charconv>

#include "base/check.hpp"

namespace statepack {

std::string codec_label(const CodecConfig& config) {
  std::string label(config.info->name);
  if (!config.arg.empty()) label += ":" + config.arg;
  return label;
}

const std::string& option(const CodecConfig& config, std::string_view key) {
  const auto it = config.options.find(std::string(key));
  SP_CHECK(it != config.options.end(), "a codec configuration lacks one of its options");
  return it->second;
}

Status check_choice(const CodecConfig& config, std::string_view key) {
  const std::string& value = option(config, key);
  for (const CodecOption& candidate : config.info->options) {
    if (candidate.key != key) continue;
    std::string_view rest = candidate.values;
    while (!rest.empty()) {
      const std::string_view word = rest.substr(0, rest.find('|'));
      if (word == value) return {};
      rest.remove_prefix(std::min(word.size() + 1, rest.size()));
    }
    return {Code::kInvalidArgument, codec_label(config) + ": " + std::string(key) + "=" + value +
                                        " is not known; use one of " +
                                        std::string(candidate.values)};
  }
  SP_CHECK(false, "a codec checks an option that it does not list");
}

Result<int> int_option(const CodecConfig& config, std::string_view key, int lo, int hi) {
  const std::string& value = option(config, key);
  int number = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  // The printed form must be the only one, so that a scheme has one name: no "032".
  const bool whole =
      error == std::errc() && end == value.data() + value.size() && std::to_string(number) == value;
  if (!whole || number < lo || number > hi) {
    return Status(Code::kInvalidArgument, codec_label(config) + ": " + std::string(key) + "=" +
                                              value + " is not allowed; give a whole number from " +
                                              std::to_string(lo) + " to " + std::to_string(hi));
  }
  return number;
}

Status check_shape(const CodecConfig& config, const LayerShape& shape) {
  constexpr int kMax = 65536;
  const auto fits = [](int n) { return n >= 1 && n <= kMax; };
  if (!fits(shape.n_key_heads) || !fits(shape.n_value_heads) || !fits(shape.K) || !fits(shape.V) ||
      shape.n_value_heads % shape.n_key_heads != 0) {
    return {Code::kUnsupported,
            codec_label(config) + ": a layer of " + std::to_string(shape.n_key_heads) +
                " key heads, " + std::to_string(shape.n_value_heads) + " value heads and " +
                std::to_string(shape.K) + "x" + std::to_string(shape.V) +
                " states cannot be packed; counts and widths must be 1 to 65536 and value heads a "
                "multiple of key heads"};
  }
  return {};
}

}  // namespace statepack
