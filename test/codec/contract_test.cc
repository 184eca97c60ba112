// The contract of LayerCodec, held by every codec of the list in every configuration.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <set>

#include "codec/codec.hpp"
#include "codec_cases.hpp"

namespace statepack {
namespace {

using testing::all_configs;
using testing::name_of;
using testing::shapes_for;
using testing::test_plan;
using testing::test_shapes;
using testing::test_states;

std::unique_ptr<LayerCodec> make(const CodecConfig& config, const LayerShape& shape) {
  const LayerPlan plan = test_plan(shape, config);
  Result<std::unique_ptr<LayerCodec>> codec =
      config.info->make(config, shape, config.info->plan_kind(config).empty() ? nullptr : &plan);
  if (!codec.ok()) {
    // A format may be unable to hold a shape, and says so; with default options it holds usual
    // ones.
    EXPECT_EQ(codec.status().code(), Code::kUnsupported) << codec.status().message();
    const CodecConfig usual = testing::default_config(*config.info, config.arg, config.rounding);
    EXPECT_TRUE(shape.K % 16 != 0 || shape.V % 16 != 0 || config.options != usual.options)
        << codec.status().message();
    return nullptr;
  }
  return std::move(codec).value();
}

std::string where(const CodecConfig& config, const LayerShape& shape, std::string_view state = "") {
  return name_of(config) + " " + std::to_string(shape.n_value_heads) + "x" +
         std::to_string(shape.K) + "x" + std::to_string(shape.V) + " " + std::string(state);
}

TEST(CodecList, NamesIdsAndDefaultsAreSound) {
  std::set<std::string_view> names;
  std::set<int> ids;
  for (const CodecInfo* info : all_codecs()) {
    EXPECT_TRUE(names.insert(info->name).second) << info->name;
    EXPECT_TRUE(ids.insert(info->id).second) << info->name;
    EXPECT_EQ(find_codec(info->name), info);
    EXPECT_FALSE(info->help.empty());
    std::vector<std::string_view> args = info->args;
    if (args.empty()) args.push_back("");
    for (const std::string_view arg : args) {
      for (const Rounding rounding : info->roundings) {
        const CodecConfig config = testing::default_config(*info, arg, rounding);
        EXPECT_TRUE(info->validate(config).ok()) << info->validate(config).message();
      }
      const CodecConfig config = testing::default_config(*info, arg);
      const SchemeDefaults defaults = info->defaults(config);
      EXPECT_GE(defaults.period, 1);
      EXPECT_FALSE(defaults.records.empty() || defaults.phase.empty() || defaults.prefill.empty());
    }
  }
  EXPECT_EQ(find_codec("int7"), nullptr);
  EXPECT_EQ(find_codec(""), nullptr);
}

// One head's encode writes the same bytes whatever the page and the scratch held before, and the
// heads' bytes are disjoint and fill the page up to its padding.
TEST(CodecContract, WritesItsOwnBytesAndAllOfThem) {
  for (const CodecConfig& config : all_configs()) {
    for (const LayerShape& shape : shapes_for(config)) {
      const std::unique_ptr<LayerCodec> codec = make(config, shape);
      if (codec == nullptr) continue;
      ASSERT_EQ(codec->shape(), shape);
      const std::size_t n = static_cast<std::size_t>(codec->page_bytes());
      ASSERT_EQ(codec->payload().total(), codec->page_bytes());
      const std::vector<float> X = test_states(shape.K, shape.V)[3].values;

      std::vector<int> owner(n, -1);
      for (int head = 0; head < shape.n_value_heads; ++head) {
        // Pages of zeros and of ones: a byte that still differs was not written. Guards behind
        // them.
        constexpr std::size_t kGuard = 64;
        std::vector<std::uint8_t> zeros(n + kGuard, 0x00), ones(n + kGuard, 0xff);
        std::vector<std::byte> clean(codec->scratch_bytes(), std::byte{0});
        std::vector<std::byte> dirty(codec->scratch_bytes() + 1, std::byte{0xa7});
        codec->encode(head, X.data(), zeros.data(), testing::kAnyRounding, {clean});
        codec->encode(head, X.data(), ones.data(), testing::kAnyRounding,
                      {std::span(dirty).subspan(1)});
        for (std::size_t i = 0; i < n + kGuard; ++i) {
          if (zeros[i] == 0x00 && ones[i] == 0xff) continue;
          ASSERT_EQ(zeros[i], ones[i]) << where(config, shape) << " byte " << i;
          ASSERT_LT(i, n) << where(config, shape) << " wrote behind the page";
          ASSERT_EQ(owner[i], -1) << where(config, shape) << " heads share byte " << i;
          owner[i] = head;
        }
      }
      const std::int64_t written =
          std::count_if(owner.begin(), owner.end(), [](int h) { return h >= 0; });
      EXPECT_LE(written, codec->page_bytes()) << where(config, shape);
      EXPECT_GE(written, codec->page_bytes() - codec->payload().padding) << where(config, shape);
    }
  }
}

TEST(CodecContract, DecodesOnlyItsHeadToTheSameValuesFromAnyScratch) {
  for (const CodecConfig& config : all_configs()) {
    for (const LayerShape& shape : shapes_for(config)) {
      const std::unique_ptr<LayerCodec> codec = make(config, shape);
      if (codec == nullptr) continue;
      testing::Packed packed(*codec);
      const auto states = test_states(shape.K, shape.V);
      for (int head = 0; head < shape.n_value_heads; ++head) packed.encode(head, states[0].values);
      const std::vector<std::uint8_t> before = packed.page;
      for (int head = 0; head < shape.n_value_heads; ++head) {
        const std::vector<float> first = packed.decode(head);
        EXPECT_EQ(packed.page, before);
        std::vector<std::byte> dirty(codec->scratch_bytes() + 3, std::byte{0x5b});
        std::vector<float> second(first.size() + 1, 7.0f);
        codec->decode(head, packed.page.data(), second.data(), {std::span(dirty).subspan(3)});
        ASSERT_EQ(std::memcmp(first.data(), second.data(), first.size() * sizeof(float)), 0)
            << where(config, shape);
        ASSERT_EQ(second.back(), 7.0f);
        // Another head's change must not show.
        const int other = (head + 1) % shape.n_value_heads;
        if (other == head) continue;
        packed.encode(other, states[4].values);
        EXPECT_EQ(packed.decode(head), first) << where(config, shape);
        packed.page = before;
      }
    }
  }
}

TEST(CodecContract, ZeroPageIsTheZeroState) {
  for (const CodecConfig& config : all_configs()) {
    for (const LayerShape& shape : shapes_for(config)) {
      const std::unique_ptr<LayerCodec> codec = make(config, shape);
      if (codec == nullptr) continue;
      testing::Packed packed(*codec);
      for (int head = 0; head < shape.n_value_heads; ++head) {
        for (const float x : packed.decode(head)) ASSERT_EQ(x, 0.0f) << where(config, shape);
      }
    }
  }
}

// Finite stays finite, zero stays zero, and no ordinary state gets worse than one not kept at all.
TEST(CodecContract, KeepsStatesFiniteZeroAndClose) {
  for (const CodecConfig& config : all_configs()) {
    for (const LayerShape& shape : shapes_for(config)) {
      const std::unique_ptr<LayerCodec> codec = make(config, shape);
      if (codec == nullptr) continue;
      testing::Packed packed(*codec);
      for (const testing::TestState& state : test_states(shape.K, shape.V)) {
        for (int head = 0; head < shape.n_value_heads; ++head) {
          packed.encode(head, state.values);
          const std::vector<float> back = packed.decode(head);
          double energy = 0, error = 0, peak = 0;
          for (std::size_t i = 0; i < back.size(); ++i) {
            ASSERT_TRUE(std::isfinite(back[i])) << where(config, shape, state.name);
            const double x = state.values[i], d = double{back[i]} - x;
            peak = std::max(peak, std::fabs(x));
            energy += x * x;
            error += d * d;
          }
          if (peak == 0) {  // formats without a zero level (2-bit STEPQuant) come this close
            EXPECT_LE(error, 1e-20 * static_cast<double>(back.size()))
                << where(config, shape, state.name);
          } else if (peak > 1e-20 && peak < 1e20) {  // f16 scales reach no further
            EXPECT_LE(error, energy) << where(config, shape, state.name) << " head " << head;
          }
        }
      }
    }
  }
}

TEST(CodecContract, PlaceInThePageIsTheState) {
  for (const CodecConfig& config : all_configs()) {
    const LayerShape shape = test_shapes()[1];
    const std::unique_ptr<LayerCodec> codec = make(config, shape);
    if (codec == nullptr) continue;
    testing::Packed packed(*codec);
    for (int head = 0; head < shape.n_value_heads; ++head) {
      float* const place = codec->in_place(head, packed.page.data());
      if (place == nullptr) continue;
      packed.encode(head, test_states(shape.K, shape.V)[0].values);
      const std::vector<float> decoded = packed.decode(head);
      ASSERT_EQ(std::memcmp(place, decoded.data(), decoded.size() * sizeof(float)), 0);
      const std::vector<std::uint8_t> before = packed.page;
      codec->encode(head, place, packed.page.data(), {}, {});
      EXPECT_EQ(packed.page, before);
    }
  }
}

TEST(CodecContract, RefusesImpossibleShapes) {
  for (const CodecConfig& config : all_configs()) {
    const LayerShape good = test_shapes()[1];
    const LayerPlan plan = test_plan(good, config);
    for (const LayerShape bad : {LayerShape{2, 4, 0, 128}, LayerShape{2, 4, 64, -1},
                                 LayerShape{2, 0, 64, 128}, LayerShape{0, 4, 64, 128},
                                 LayerShape{3, 4, 64, 128}, LayerShape{1, 1, 1 << 30, 1 << 30}}) {
      const auto result = config.info->make(config, bad, &plan);
      ASSERT_FALSE(result.ok()) << name_of(config);
      EXPECT_EQ(result.status().code(), Code::kUnsupported) << result.status().message();
      EXPECT_EQ(result.status().message().find(config.info->name), 0u) << result.status().message();
    }
    if (config.info->plan_kind(config).empty()) continue;
    EXPECT_FALSE(config.info->make(config, good, nullptr).ok()) << name_of(config);
    const LayerShape other{2, 6, 64, 128};
    const auto result = config.info->make(config, other, &plan);
    ASSERT_FALSE(result.ok()) << name_of(config);
    EXPECT_EQ(result.status().code(), Code::kMismatch) << result.status().message();
  }
}

}  // namespace
}  // namespace statepack
