// What every codec is tried on: configurations from its own option lists, layer shapes, plans for
// them, and states that are hard to keep.
#pragma once

#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "codec/codec.hpp"

namespace statepack::testing {

/// A generator of its own, so that cases are the same everywhere.
class Random {
 public:
  explicit Random(std::uint32_t seed) : state_(seed) {}
  /// Uniform in [-0.5, 0.5): the generator of the published golden states.
  float next() {
    state_ = 1664525u * state_ + 1013904223u;
    return static_cast<float>(state_ >> 8) * 0x1p-24f - 0.5f;
  }

 private:
  std::uint32_t state_;
};

/// Where roundings are drawn when it does not matter where.
inline constexpr RoundingContext kAnyRounding{.seed = 1, .layer = 2, .step = 3};

inline CodecConfig default_config(const CodecInfo& info, std::string_view arg,
                                  Rounding rounding = Rounding::kNearest) {
  return fill_config(info, arg, rounding);
}

inline CodecConfig config_of(std::string_view codec, std::string_view arg,
                             const std::map<std::string, std::string>& options = {},
                             Rounding rounding = Rounding::kNearest) {
  return fill_config(*find_codec(codec), arg, rounding, options);
}

inline std::string name_of(const CodecConfig& config) {
  std::string name(config.info->name);
  if (!config.arg.empty()) name += ":" + config.arg;
  if (config.rounding == Rounding::kStochastic) name += ",rounding=stochastic";
  if (config.rounding == Rounding::kFeedback) name += ",rounding=feedback";
  for (const auto& [key, value] : config.options) name += "," + key + "=" + value;
  return name;
}

/// Words to try for an option: those of "a|b|c", and a few numbers for a range "1..8".
inline std::vector<std::string> candidate_values(const CodecOption& option) {
  std::vector<std::string> words;
  for (std::string_view rest = option.values; !rest.empty();) {
    const std::string_view word = rest.substr(0, rest.find('|'));
    rest.remove_prefix(word.size() < rest.size() ? word.size() + 1 : word.size());
    if (word.find("..") == std::string_view::npos) {
      words.emplace_back(word);
    } else {
      for (const char* number : {"1", "4", "7"}) words.emplace_back(number);
    }
  }
  return words;
}

#if defined(SP_SANITIZED)  // sanitizers slow everything twentyfold
inline constexpr std::size_t kMaxNamed = 2;
inline constexpr std::int64_t kMaxValues = 20000, kMaxValuesWithOptions = 4000;
#else
inline constexpr std::size_t kMaxNamed = 3;
inline constexpr std::int64_t kMaxValues = 1 << 20, kMaxValuesWithOptions = 20000;
#endif

/// The valid combinations of candidate values of a codec in which at most three (two) are named.
inline void add_configs(const CodecInfo& info, std::string_view arg, Rounding rounding,
                        std::vector<CodecConfig>& valid) {
  std::vector<std::map<std::string, std::string>> grown(1);
  for (const CodecOption& option : info.options) {
    const std::size_t n = grown.size();
    for (std::size_t i = 0; i < n; ++i) {
      if (grown[i].size() == kMaxNamed) continue;
      for (const std::string& value : candidate_values(option)) {
        grown.push_back(grown[i]);
        grown.back()[std::string(option.key)] = value;
      }
    }
  }
  std::set<std::map<std::string, std::string>> seen;
  for (const auto& given : grown) {
    CodecConfig config = fill_config(info, arg, rounding, given);
    if (info.validate(config).ok() && seen.insert(config.options).second) {
      valid.push_back(std::move(config));
    }
  }
}

/// Every argument of every codec under every rule of rounding that it knows.
inline std::vector<CodecConfig> all_configs() {
  std::vector<CodecConfig> valid;
  for (const CodecInfo* info : all_codecs()) {
    std::vector<std::string_view> args = info->args;
    if (args.empty()) args.push_back("");
    for (const std::string_view arg : args) {
      for (const Rounding rounding : info->roundings) add_configs(*info, arg, rounding, valid);
    }
  }
  return valid;
}

inline std::vector<LayerShape> test_shapes() {
  return {{1, 1, 16, 16, Gate::kScalar},   {2, 4, 64, 128, Gate::kScalar},
          {1, 2, 128, 64, Gate::kScalar},  {2, 2, 96, 192, Gate::kScalar},
          {2, 4, 16, 16, Gate::kScalar},   {2, 4, 128, 128, Gate::kScalar},
          {2, 2, 64, 128, Gate::kChannel}, {3, 3, 16, 16, Gate::kChannel},
          {1, 3, 13, 7, Gate::kScalar},    {1, 2, 33, 50, Gate::kScalar},
          {1, 2, 1, 5, Gate::kScalar},     {1, 2, 9, 1, Gate::kChannel}};
}

/// All shapes for a codec as it is by default, the small ones for every combination of options.
inline std::vector<LayerShape> shapes_for(const CodecConfig& config) {
  const bool by_default =
      config.options == default_config(*config.info, config.arg, config.rounding).options;
  const std::int64_t most = by_default ? kMaxValues : kMaxValuesWithOptions;
  std::vector<LayerShape> shapes = test_shapes();
  std::erase_if(shapes, [&](const LayerShape& shape) { return shape.n_values() > most; });
  return shapes;
}

/// A plan for this codec with something in it: all widths, weights from 1/2 to 2.
inline LayerPlan test_plan(const LayerShape& shape, const CodecConfig& config) {
  constexpr std::uint8_t kWidths[] = {4, 6, 2, 8, 16};
  constexpr std::uint8_t kRowWidths[] = {4, 0, 3, 8, 5, 2, 6, 4, 3, 0, 2};
  const bool by_row = config.info->plan_kind(config) == "klt";
  LayerPlan plan;
  Random random(17);
  for (int h = 0; h < shape.n_value_heads; ++h) {
    for (int i = 0; i < shape.K; ++i) {
      const int unit = shape.gate == Gate::kScalar ? h : h + i;
      // Klt: the third head has no bits at all.
      plan.bits.push_back(!by_row ? kWidths[unit % 5] : h == 2 ? 0 : kRowWidths[(h + i) % 11]);
      plan.row_weight.push_back(std::exp2(2 * random.next()));
      plan.row_scale.push_back(std::exp2(6 * random.next()));
    }
    plan.high.push_back(h % 2 == 0 ? 1 : 0);
  }
  return plan;
}

struct TestState {
  std::string_view name;
  std::vector<float> values;  ///< [K][V]
};

/// Finite states, hard ones among them.
inline std::vector<TestState> test_states(int K, int V) {
  const auto fill = [&](auto value) {
    std::vector<float> X;
    for (int i = 0; i < K; ++i) {
      for (int j = 0; j < V; ++j) X.push_back(value(i, j));
    }
    return X;
  };
  Random random(static_cast<std::uint32_t>(K * 1000 + V));
  const auto noise = [&](int, int) { return random.next(); };
  return {
      {"noise", fill(noise)},
      {"zeros", fill([](int, int) { return 0.0f; })},
      {"negative zeros", fill([](int, int) { return -0.0f; })},
      {"mixed magnitudes", fill([&](int i, int j) {
         return random.next() * std::exp2(static_cast<float>(i % 5 - 2 + j % 7 - 3));
       })},
      {"one hot row",
       fill([&](int i, int) { return random.next() * (i == K / 2 ? 1e4f : 1e-2f); })},
      {"one hot column",
       fill([&](int, int j) { return random.next() * (j == V / 3 ? 1e3f : 1.f); })},
      {"one value", fill([&](int i, int j) { return i == K - 1 && j == V - 1 ? 3.0f : 0.0f; })},
      {"huge", fill([&](int, int) { return random.next() * 1e30f; })},
      {"largest", fill([](int i, int j) { return (i + j) % 2 == 0 ? 1e37f : -1e37f; })},
      {"tiny", fill([&](int, int) { return random.next() * 1e-30f; })},
      {"subnormal", fill([&](int, int) { return random.next() * 1e-42f; })},
      {"rank one", fill([](int i, int j) {
         return std::sin(static_cast<float>(i) + 1) * std::cos(static_cast<float>(j) + 1);
       })},
      {"constant", fill([](int, int) { return 0.7f; })},
      {"negative", fill([&](int, int) { return random.next() - 2; })},
      {"alternating", fill([](int i, int j) { return (i + j) % 2 == 0 ? 1.0f : -1.0f; })},
  };
}

/// A codec with memory to run it in.
class Packed {
 public:
  explicit Packed(const LayerCodec& codec)
      : codec_(&codec),
        page(static_cast<std::size_t>(codec.page_bytes())),
        scratch_(codec.scratch_bytes()) {}
  explicit Packed(std::unique_ptr<LayerCodec> codec) : Packed(*codec) { owned_ = std::move(codec); }

  void encode(int head, const std::vector<float>& X, const RoundingContext& at = kAnyRounding) {
    codec_->encode(head, X.data(), page.data(), at, {scratch_});
  }
  std::vector<float> decode(int head) {
    std::vector<float> X(static_cast<std::size_t>(codec_->shape().K * codec_->shape().V), NAN);
    codec_->decode(head, page.data(), X.data(), {scratch_});
    return X;
  }

 private:
  std::unique_ptr<LayerCodec> owned_;
  const LayerCodec* codec_;

 public:
  std::vector<std::uint8_t> page;

 private:
  std::vector<std::byte> scratch_;
};

}  // namespace statepack::testing
