// Plan files: what is saved comes back; anything else is refused with one sentence.
#include "scheme/plan.hpp"

#include <gmock/gmock.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>

#include "base/safetensors.hpp"

namespace statepack {
namespace {

using ::testing::HasSubstr;
using Json = nlohmann::json;

Plan example() {
  Plan plan;
  plan.kind = "stepquant";
  plan.scheme = "stepquant:6";
  plan.model_fingerprint = "abc";
  plan.settings = {{"data", "wikitext"}, {"seed", "0"}};
  for (const int HV : {2, 4}) {
    const LayerShape shape{1, HV, 3, 5, HV == 2 ? Gate::kScalar : Gate::kChannel};
    LayerPlan layer;
    for (int i = 0; i < HV * 3; ++i) {
      layer.bits.push_back(i % 2 == 0 ? 6 : 16);
      layer.row_weight.push_back(0.5f + static_cast<float>(i));
    }
    layer.high.assign(static_cast<std::size_t>(HV), 1);
    if (HV == 4) {  // one layer without these: older files have none
      layer.row_scale.assign(layer.bits.size(), 1.75f);
      for (int i = 0; i < 9; ++i) layer.transform.push_back(0.125f * static_cast<float>(i * i));
      layer.guard = {0.5f, 0.0f, 0.25f, 8.0f};
    }
    plan.shapes.push_back(shape);
    plan.layers.push_back(layer);
  }
  return plan;
}

class PlanFile : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() /
              ("plan_test." + std::to_string(::getpid()) + "." +
               ::testing::UnitTest::GetInstance()->current_test_info()->name());
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::string path() const { return folder_ / "x.plan"; }

 private:
  std::filesystem::path folder_;
};

TEST_F(PlanFile, ComesBackWhole) {
  const Plan plan = example();
  ASSERT_TRUE(plan.save(path()).ok());
  const auto loaded = Plan::load(path());
  ASSERT_TRUE(loaded.ok()) << loaded.status().message();
  EXPECT_EQ(loaded->kind, plan.kind);
  EXPECT_EQ(loaded->scheme, plan.scheme);
  EXPECT_EQ(loaded->model_fingerprint, plan.model_fingerprint);
  EXPECT_EQ(loaded->settings, plan.settings);
  EXPECT_EQ(loaded->shapes, plan.shapes);
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(loaded->layers[i].bits, plan.layers[i].bits);
    EXPECT_EQ(loaded->layers[i].row_weight, plan.layers[i].row_weight);
    EXPECT_EQ(loaded->layers[i].high, plan.layers[i].high);
    EXPECT_EQ(loaded->layers[i].row_scale, plan.layers[i].row_scale);
    EXPECT_EQ(loaded->layers[i].transform, plan.layers[i].transform);
    EXPECT_EQ(loaded->layers[i].guard, plan.layers[i].guard);
  }
  EXPECT_EQ(loaded->fingerprint(), plan.fingerprint());
}

// Its JSON is for people, too: widths and heads can be read without this code.
TEST_F(PlanFile, SummarisesEveryLayer) {
  ASSERT_TRUE(example().save(path()).ok());
  const auto file = SafeTensors::open(path());
  ASSERT_TRUE(file.ok());
  const Json json = Json::parse(file->metadata().at("statepack"));
  EXPECT_EQ(json["layers"][0]["summary"]["rows_by_bits"]["16"], 3);
  EXPECT_EQ(json["layers"][0]["summary"]["mean_bits"], 11.0);
  EXPECT_EQ(json["layers"][0]["summary"]["high_heads"], (std::vector<int>{0, 1}));
}

TEST_F(PlanFile, RefusesGuardsThatAreNoCosts) {
  for (const float bad : {-1.0f, std::nanf(""), std::numeric_limits<float>::infinity()}) {
    Plan plan = example();
    plan.layers[1].guard[2] = bad;
    ASSERT_TRUE(plan.save(path()).ok());
    const auto loaded = Plan::load(path());
    ASSERT_FALSE(loaded.ok());
    EXPECT_EQ(loaded.status().code(), Code::kCorrupt);
    EXPECT_NE(loaded.status().message().find("head 2"), std::string::npos);
  }
}

TEST(PlanFingerprint, ChangesWithEverythingThatChangesBytes) {
  const Plan plan = example();
  const std::string before = plan.fingerprint();
  EXPECT_EQ(before.size(), 64u);
  std::vector<std::function<void(Plan&)>> changes = {
      [](Plan& p) { p.kind += "x"; },
      [](Plan& p) { p.model_fingerprint += "x"; },
      [](Plan& p) { p.layers[1].bits[2] = 4; },
      [](Plan& p) { p.layers[0].row_weight[1] += 1e-7f; },
      [](Plan& p) { p.layers[0].high[0] = 0; },
      [](Plan& p) { p.layers[1].row_scale[3] = 2; },
      [](Plan& p) { p.layers[1].transform[5] = 1; },
      [](Plan& p) { p.shapes[0].V = 6; },
      [](Plan& p) { p.shapes[0].gate = Gate::kChannel; },
      [](Plan& p) { p.layers.pop_back(), p.shapes.pop_back(); },
  };
  for (const auto& change : changes) {
    Plan other = plan;
    change(other);
    EXPECT_NE(other.fingerprint(), before);
  }
  Plan same = plan;
  same.settings["note"] = "made on a Tuesday";
  same.layers[1].guard.clear();
  EXPECT_EQ(same.fingerprint(), before);
}

/// A file made by hand, so that each part of it can be made wrong.
struct Draft {
  Json json;
  std::map<std::string, std::tuple<DType, std::vector<std::int64_t>, std::vector<std::uint8_t>>>
      tensors;
  bool with_metadata = true;

  Draft() {
    json = {{"format_version", 1},
            {"kind", "stepquant"},
            {"scheme", "stepquant:6"},
            {"model_fingerprint", "abc"},
            {"settings", Json::object()},
            {"layers",
             {{{"n_key_heads", 1}, {"n_value_heads", 2}, {"K", 2}, {"V", 3}, {"gate", "scalar"}}}}};
    const std::vector<float> w = {1, 2, 3, 4};
    std::vector<std::uint8_t> raw(16);
    std::memcpy(raw.data(), w.data(), 16);
    tensors["layers.0.bits"] = {DType::kU8, {2, 2}, {6, 6, 4, 16}};
    tensors["layers.0.row_weight"] = {DType::kF32, {2, 2}, raw};
    tensors["layers.0.high"] = {DType::kU8, {2}, {0, 1}};
    Plan plan;
    plan.kind = "stepquant", plan.model_fingerprint = "abc";
    plan.shapes = {{1, 2, 2, 3, Gate::kScalar}};
    plan.layers.resize(1);
    plan.layers[0].bits = {6, 6, 4, 16};
    plan.layers[0].row_weight = w;
    plan.layers[0].high = {0, 1};
    json["fingerprint"] = plan.fingerprint();
  }
  std::string bytes() const {
    SafeTensorsWriter writer;
    if (with_metadata) writer.set_metadata("statepack", json.dump());
    for (const auto& [name, tensor] : tensors) {
      writer.add(name, std::get<0>(tensor), std::get<1>(tensor),
                 std::as_bytes(std::span(std::get<2>(tensor))));
    }
    return writer.serialize();
  }
  Result<Plan> parse() const {
    const std::string file = bytes();
    return Plan::parse(std::as_bytes(std::span(file.data(), file.size())), "p");
  }
};

TEST(PlanParse, ADraftIsFine) {
  const auto plan = Draft().parse();
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  EXPECT_EQ(plan->layers[0].row_weight[3], 4.0f);
}

TEST(PlanParse, CorruptPlansAreRefused) {
  struct Case {
    std::function<void(Draft&)> damage;
    Code code;
    std::string message;
  };
  const auto set_float = [](Draft& d, float x) {
    std::memcpy(std::get<2>(d.tensors["layers.0.row_weight"]).data() + 8, &x, 4);
  };
  const std::vector<Case> cases = {
      {[](Draft& d) { d.with_metadata = false; }, Code::kCorrupt,
       "p: no 'statepack' entry in the metadata, so this is not a plan; make one with `statepack "
       "calibrate`"},
      {[](Draft& d) { d.json = 3; }, Code::kCorrupt,
       "p: the plan's metadata is not a JSON object; calibrate again"},
      {[](Draft& d) { d.json["format_version"] = 2; }, Code::kUnsupported,
       "p: plan format version 2 is later than this build's 1; update statepack or calibrate "
       "again"},
      {[](Draft& d) { d.json["format_version"] = "1"; }, Code::kCorrupt,
       "p: the plan's metadata has no whole number 'format_version'; calibrate again"},
      {[](Draft& d) { d.json["format_version"] = 0; }, Code::kCorrupt,
       "p: the plan's metadata has 'format_version' 0, outside 1 to 1073741824; calibrate again"},
      {[](Draft& d) { d.json.erase("kind"); }, Code::kCorrupt,
       "p: the plan's metadata has no text 'kind'; calibrate again"},
      {[](Draft& d) { d.json["scheme"] = Json::array(); }, Code::kCorrupt,
       "p: the plan's metadata has no text 'scheme'; calibrate again"},
      {[](Draft& d) {
         d.json["settings"] = {{"seed", 0}};
       },
       Code::kCorrupt, "p: setting 'seed' in the metadata is not a text; calibrate again"},
      {[](Draft& d) { d.json["settings"] = 1; }, Code::kCorrupt,
       "p: 'settings' in the metadata is no object; calibrate again"},
      {[](Draft& d) { d.json["layers"] = Json::array(); }, Code::kCorrupt,
       "p: the plan's metadata has no list 'layers' of 1 to 4096 entries; calibrate again"},
      {[](Draft& d) { d.json["layers"][0] = 7; }, Code::kCorrupt,
       "p: an entry of 'layers' in the metadata is no object; calibrate again"},
      {[](Draft& d) { d.json["layers"][0]["K"] = 0; }, Code::kCorrupt,
       "p: the plan's metadata has 'K' 0, outside 1 to 4096; calibrate again"},
      {[](Draft& d) { d.json["layers"][0]["K"] = -1; }, Code::kCorrupt,
       "p: the plan's metadata has 'K' -1, outside 1 to 4096; calibrate again"},
      {[](Draft& d) { d.json["layers"][0]["K"] = std::numeric_limits<std::uint64_t>::max(); },
       Code::kCorrupt,
       "p: the plan's metadata has 'K' 18446744073709551615, outside 1 to 4096; calibrate again"},
      {[](Draft& d) { d.json["layers"][0]["gate"] = "vector"; }, Code::kCorrupt,
       "p: the plan's metadata has gate 'vector', which is neither 'scalar' nor 'channel'; "
       "calibrate again"},
      {[](Draft& d) { d.json["layers"][0]["n_key_heads"] = 3; }, Code::kCorrupt,
       "p: the plan's metadata has 2 value heads, not a multiple of its 3 key heads; calibrate "
       "again"},
      {[](Draft& d) { d.json["layers"][0]["n_value_heads"] = 4; }, Code::kMismatch,
       "'layers.0.bits'"},
      {[](Draft& d) { std::get<0>(d.tensors["layers.0.high"]) = DType::kI8; }, Code::kCorrupt,
       "p: tensor 'layers.0.high' is I8, but plans keep U8; calibrate again"},
      {[](Draft& d) { std::get<2>(d.tensors["layers.0.bits"])[3] = 7; }, Code::kCorrupt,
       "p: tensor 'layers.0.bits', head 1, row 1: a width of 7 bits does not exist; calibrate "
       "again"},
      {[&](Draft& d) { set_float(d, 0); }, Code::kCorrupt,
       "p: tensor 'layers.0.row_weight', head 1, row 0: the weight is not a positive finite "
       "number; calibrate again"},
      {[&](Draft& d) { set_float(d, std::nanf("")); }, Code::kCorrupt,
       "the weight is not a positive finite number"},
      {[&](Draft& d) { set_float(d, std::numeric_limits<float>::infinity()); }, Code::kCorrupt,
       "the weight is not a positive finite number"},
      {[](Draft& d) { std::get<2>(d.tensors["layers.0.high"])[1] = 2; }, Code::kCorrupt,
       "p: tensor 'layers.0.high', head 1: the mark 2 is neither 0 nor 1; calibrate again"},
      {[](Draft& d) { d.tensors["layers.1.bits"] = d.tensors["layers.0.bits"]; }, Code::kCorrupt,
       "p: tensor 'layers.1.bits' does not belong in a plan of 1 layers; calibrate again"},
      {[](Draft& d) { std::get<2>(d.tensors["layers.0.bits"])[0] = 4; }, Code::kCorrupt,
       "the file was altered"},
      {[](Draft& d) { d.json["model_fingerprint"] = "other"; }, Code::kCorrupt,
       "the file was altered"},
  };
  for (const Case& c : cases) {
    Draft draft;
    c.damage(draft);
    const auto plan = draft.parse();
    ASSERT_FALSE(plan.ok()) << c.message;
    EXPECT_EQ(plan.status().code(), c.code) << plan.status().message();
    EXPECT_THAT(plan.status().message(), HasSubstr(c.message));
  }
}

TEST(PlanParse, EveryTruncationIsRefused) {
  const std::string file = Draft().bytes();
  for (std::size_t n = 0; n < file.size(); ++n) {
    EXPECT_FALSE(Plan::parse(std::as_bytes(std::span(file.data(), n)), "p").ok()) << n;
  }
}

TEST(PlanParse, EveryFlippedBitIsRefusedOrMeansTheSame) {
  const std::string file = Draft().bytes();
  const auto good = Plan::parse(std::as_bytes(std::span(file.data(), file.size())), "p");
  for (std::size_t i = 0; i < 8 * file.size(); ++i) {
    std::string damaged = file;
    damaged[i / 8] = static_cast<char>(damaged[i / 8] ^ (1 << (i % 8)));
    const auto plan = Plan::parse(std::as_bytes(std::span(damaged.data(), damaged.size())), "p");
    // A bit of the scheme's name or of padding changes no packed byte and is not in the
    // fingerprint.
    if (plan.ok()) {
      EXPECT_EQ(plan->fingerprint(), good->fingerprint()) << i;
    }
  }
}

TEST(PlanLoad, AMissingFileIsNamed) {
  const auto plan = Plan::load("/nonexistent/x.plan");
  EXPECT_EQ(plan.status().code(), Code::kNotFound);
  EXPECT_THAT(plan.status().message(), HasSubstr("/nonexistent/x.plan"));
}

}  // namespace
}  // namespace statepack
