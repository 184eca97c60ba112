// Pages computed by make_codec_goldens.py, byte for byte, and what they restore to, bit for bit.
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "codec_cases.hpp"

namespace statepack {
namespace {

using nlohmann::json;

std::vector<std::uint8_t> from_hex(const std::string& hex) {
  std::vector<std::uint8_t> bytes;
  for (std::size_t i = 0; i + 1 < hex.size(); i += 2) {
    bytes.push_back(static_cast<std::uint8_t>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

std::vector<float> floats(const std::string& hex) {
  const std::vector<std::uint8_t> bytes = from_hex(hex);
  std::vector<float> values(bytes.size() / sizeof(float));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

TEST(CodecGolden, PagesAndRestoredStatesMatchTheIndependentScript) {
  std::ifstream file(std::string(SP_SOURCE_DIR) + "/test/data/codec_goldens.json");
  const json document = json::parse(file);
  int n_cases = 0;
  for (const json& golden : document["cases"]) {
    const json& state = document["states"][golden["state"].get<std::size_t>()];
    CodecConfig config =
        testing::config_of(golden["codec"].get<std::string>(), golden["arg"].get<std::string>());
    for (const auto& [key, value] : golden["options"].items()) config.options[key] = value;
    const std::string label = testing::name_of(config) + ", " + state["name"].get<std::string>();

    // The golden is the second of two heads, so that a page offset is in play.
    const LayerShape shape{1, 2, state["K"], state["V"], Gate::kScalar};
    LayerPlan plan;
    const std::uint8_t high = golden.value("high", false) ? 1 : 0;
    plan.high = {high, high};
    const auto codec = config.info->make(config, shape, &plan);
    ASSERT_TRUE(codec.ok()) << codec.status().message();
    testing::Packed packed(**codec);

    const std::vector<std::uint8_t> want = from_hex(golden["page"]);
    ASSERT_EQ(packed.page.size(), 2 * want.size()) << label;
    packed.encode(1, floats(state["values"]));
    const std::vector<std::uint8_t> got(
        packed.page.begin() + static_cast<std::ptrdiff_t>(want.size()), packed.page.end());
    EXPECT_EQ(got, want) << label;

    const std::vector<float> restored = floats(golden["restored"]), back = packed.decode(1);
    ASSERT_EQ(back.size(), restored.size()) << label;
    for (std::size_t i = 0; i < back.size(); ++i)
      ASSERT_EQ(back[i], restored[i]) << label << " " << i;
    ++n_cases;
  }
  EXPECT_GT(n_cases, 400);
}

}  // namespace
}  // namespace statepack
