// Pages computed by make_codec_goldens.py, byte for byte, and what they restore to, bit for bit.
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "codec_cases.hpp"
#include "golden_hex.hpp"

namespace statepack {
namespace {

using nlohmann::json;
using testing::floats;
using testing::from_hex;

TEST(CodecGolden, PagesAndRestoredStatesMatchTheIndependentScript) {
  std::ifstream file(std::string(SP_SOURCE_DIR) + "/test/data/codec_goldens.json");
  const json document = json::parse(file);
  int n_cases = 0;
  for (const json& golden : document["cases"]) {
    const json& state = document["states"][golden["state"].get<std::size_t>()];
    const std::string rounding = golden.value("rounding", "nearest");
    CodecConfig config =
        testing::config_of(golden["codec"].get<std::string>(), golden["arg"].get<std::string>(),
                           golden["options"].get<std::map<std::string, std::string>>(),
                           rounding == "stochastic" ? Rounding::kStochastic
                           : rounding == "feedback" ? Rounding::kFeedback
                                                    : Rounding::kNearest);
    const std::string label = testing::name_of(config) + ", " + state["name"].get<std::string>();

    // The golden is the second of two heads, so that a page offset is in play.
    const LayerShape shape{1, 2, state["K"], state["V"], Gate::kScalar};
    LayerPlan plan;
    const std::uint8_t high = golden.value("high", false) ? 1 : 0;
    plan.high = {high, high};
    plan.bits.assign(2 * static_cast<std::size_t>(shape.K), 4);
    for (const int row : golden.value("protected", std::vector<int>())) {
      if (row >= shape.K) continue;
      for (const int head : {0, 1}) {
        plan.bits[static_cast<std::size_t>(head * shape.K + row)] = 16;
      }
    }
    const auto codec = config.info->make(config, shape, &plan);
    ASSERT_TRUE(codec.ok()) << codec.status().message();
    testing::Packed packed(**codec);

    const std::vector<std::uint8_t> want = from_hex(golden["page"]);
    ASSERT_EQ(packed.page.size(), 2 * want.size()) << label;
    RoundingContext at;
    at.seed = document["place"]["seed"].get<std::uint64_t>();
    at.layer = document["place"]["layer"].get<std::uint32_t>();
    at.step = document["place"]["step"].get<std::uint64_t>();
    const std::vector<float> X = floats(state["values"]);
    if (golden.contains("before")) {  // what is left over from the same state, smaller
      std::vector<float> smaller = X;
      for (float& x : smaller) x *= golden["before"].get<float>();
      packed.encode(1, smaller, at);
      at.before = packed.page.data();
    }
    packed.encode(1, X, at);
    const std::vector<std::uint8_t> got(
        packed.page.end() - static_cast<std::ptrdiff_t>(want.size()), packed.page.end());
    EXPECT_EQ(got, want) << label;

    const std::vector<float> restored = floats(golden["restored"]), back = packed.decode(1);
    ASSERT_EQ(back.size(), restored.size()) << label;
    for (std::size_t i = 0; i < back.size(); ++i)
      EXPECT_EQ(back[i], restored[i]) << label << " " << i;
    ++n_cases;
  }
  EXPECT_GT(n_cases, 800);
}

}  // namespace
}  // namespace statepack
