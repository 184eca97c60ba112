// Compiled schemes: what they refuse, and bits counted as the papers' tables have them.
#include "scheme/layers.hpp"

#include <gmock/gmock.h>

#include <algorithm>
#include <random>

#include "statepack/scheme.hpp"

namespace statepack {
namespace {

using ::testing::HasSubstr;

std::vector<LayerShape> layers(int n, int H, int HV, Gate gate = Gate::kScalar) {
  return std::vector<LayerShape>(static_cast<std::size_t>(n), LayerShape{H, HV, 128, 128, gate});
}

/// One head of 4 is high; heads (rows where gates are per channel) get `widths` in a shuffled
/// order.
Plan plan_for(const std::string& kind, const std::string& scheme,
              const std::vector<LayerShape>& shapes,
              const std::vector<std::pair<int, std::uint8_t>>& widths = {}) {
  Plan plan;
  plan.kind = kind, plan.scheme = scheme, plan.model_fingerprint = "model", plan.shapes = shapes;
  std::vector<std::uint8_t> units;
  for (const auto& [n, bits] : widths) units.insert(units.end(), static_cast<std::size_t>(n), bits);
  std::mt19937 random(1);  // no head should consist of pivots alone
  std::shuffle(units.begin(), units.end(), random);
  std::size_t unit = 0;
  for (const LayerShape& s : shapes) {
    LayerPlan layer;
    for (int h = 0; h < s.n_value_heads; ++h) {
      layer.high.push_back(h % 4 == 0);
      for (int i = 0; i < s.K; ++i) {
        const bool next = s.gate == Gate::kChannel || i == 0;
        if (!units.empty()) layer.bits.push_back(next ? units[unit++] : layer.bits.back());
        layer.row_weight.push_back(1);
      }
    }
    plan.layers.push_back(layer);
  }
  return plan;
}

SchemeBits bits_of(const std::string& name, const std::vector<LayerShape>& shapes,
                   const Plan* plan = nullptr) {
  const auto scheme = Scheme::parse(name);
  EXPECT_TRUE(scheme.ok()) << scheme.status().message();
  const auto compiled = CompiledScheme::make(*scheme, shapes, plan, "model");
  EXPECT_TRUE(compiled.ok()) << compiled.status().message();
  return (*compiled)->bits();
}

/// Resident bits as published: without key scales and cursors, which are ours and reported apart.
double published_resident(const SchemeBits& bits) {
  const std::int64_t apart = bits.window_parts.key_scales + bits.window_parts.padding;
  return 8.0 * static_cast<double>(bits.page_bytes + bits.window_bytes - apart) /
         static_cast<double>(bits.n_values);
}

// PACE's accounting.
TEST(Bits, PaceTable) {
  struct Row {
    const char* name;
    int gamma;
    double payload, resident;
  };
  const Row rows[] = {{"pace:4", 2, 4.25, 5.015625},
                      {"pace:4", 3, 4.25, 4.932291666666667},
                      {"pace:4/8", 2, 5.65625, 6.421875},
                      {"pace:4/8", 3, 5.65625, 6.338541666666667},
                      {"pace:4/8,records=mixed", 2, 5.65625, 6.796875},
                      {"pace:4/8,records=mixed", 3, 5.65625, 6.755208333333333}};
  for (const Row& row : rows) {
    const auto shapes = layers(3, 16, 16 * row.gamma);
    const Plan plan = plan_for("pace-high", "pace:4/8", shapes);
    const SchemeBits bits = bits_of(row.name, shapes, &plan);
    EXPECT_DOUBLE_EQ(bits.payload, row.payload) << row.name;
    EXPECT_NEAR(published_resident(bits), row.resident, 1e-12) << row.name;
    // 16 dP / (gamma dk dv) for key scales, then the cursors: 8 bytes a layer.
    EXPECT_NEAR(8.0 * static_cast<double>(bits.window_parts.key_scales) /
                    static_cast<double>(bits.n_values),
                16.0 * 8 / (row.gamma * 128 * 128), 1e-12);
    EXPECT_EQ(bits.cursor_bytes, 3 * 8);
    EXPECT_EQ(bits.alignment_bytes, 0);
    EXPECT_DOUBLE_EQ(bits.resident,
                     8.0 * static_cast<double>(bits.page_bytes + bits.window_bytes + 24) /
                         static_cast<double>(bits.n_values));
  }
  const auto qwen = layers(48, 16, 48);
  const Plan plan = plan_for("pace-high", "pace:4/8", qwen);
  EXPECT_EQ(bits_of("fp32", qwen).page_bytes, 150994944);
  EXPECT_EQ(bits_of("pace:4", qwen).page_bytes, 20054016);
  EXPECT_EQ(bits_of("pace:4/8", qwen, &plan).page_bytes, 26689536);
}

// What others buffer: 16 records of bf16 keys, shared by two value heads, bf16 corrections and an
// f32 gate, 3.03 bits as published; or the raw values and beta of a chunk.
TEST(Bits, WindowsOfOtherCodecs) {
  const auto shapes = layers(3, 16, 32);
  const auto resident = [&](const std::string& name) {
    return published_resident(bits_of(name, shapes));
  };
  const double ring = 16 * (16.0 * 128 / 2 + 16.0 * 128 + 32) / 16384;
  EXPECT_NEAR(ring, 3.03, 0.005);
  EXPECT_NEAR(resident("fp32,period=16"), 32 + ring, 1e-12);
  for (const char* name : {"bf16,period=16", "fp16,period=16"}) {
    EXPECT_NEAR(resident(name), 16 + ring, 1e-12) << name;
  }
  for (const char* name :
       {"int8,period=16,layout=column,scale=f32", "fp8,period=16,layout=column,scale=f32"}) {
    EXPECT_NEAR(resident(name), 8.25 + ring, 1e-12) << name;
  }
  // Raw k, v, beta and gate of 64 tokens.
  EXPECT_NEAR(resident("fp32,period=64,mode=v"), 32 + 4 * ring + 64 * 32.0 / 16384, 1e-12);
}

// STEPQuant's accounting: the full budget, allocated somehow.
TEST(Bits, StepQuantTable) {
  const auto gdn = layers(48, 16, 48);
  const auto kda = layers(20, 32, 32, Gate::kChannel);
  struct Row {
    const char* name;
    bool is_gdn;
    std::vector<std::pair<int, std::uint8_t>> widths;
    std::int64_t codes, pivots, scales, total;
  };
  // GDN: 2272 heads share 6 * 2304 - 8 * 32 = 13568 bits, or 8960 at nominal 4.
  // KDA: 81408 rows share 4 * 81920 - 8 * 512 = 323584 bits; 487424 at 6, 651264 at 8.
  const Row rows[] = {
      {"stepquant:6",
       true,
       {{32, 16}, {32, 4}, {2240, 6}},
       27787264,
       1048576,
       2 * 581632,
       29999104},
      {"stepquant:4", true, {{32, 16}, {2272, 4}}, 0, 1048576, 2 * 581632, 0},
      {"stepquant:8", true, {{32, 16}, {2272, 8}}, 37224448, 1048576, 2 * 581632, 39436288},
      {"stepquant:8", false, {{512, 16}, {81408, 8}}, 10420224, 131072, 162816 + 163840, 10877952},
      {"stepquant:6",
       false,
       {{512, 16}, {512, 4}, {80896, 6}},
       7798784,
       131072,
       162816 + 163840,
       8256512},
      {"stepquant:4",
       false,
       {{512, 16}, {1024, 2}, {80384, 4}},
       5177344,
       131072,
       162816 + 163840,
       5635072},
  };
  for (const Row& row : rows) {
    const auto& shapes = row.is_gdn ? gdn : kda;
    const Plan plan = plan_for("stepquant", row.name, shapes, row.widths);
    const SchemeBits bits = bits_of(row.name, shapes, &plan);
    std::int64_t code_bits = 0, units = 0;
    for (const auto& [n, b] : row.widths) {
      if (b != 16) code_bits += std::int64_t{n} * b, units += n;
    }
    const std::int64_t per_unit = row.is_gdn ? 128 * 128 : 128;
    EXPECT_EQ(bits.parts.codes, code_bits * per_unit / 8) << row.name;
    EXPECT_EQ(bits.parts.pivots, row.pivots) << row.name;
    EXPECT_EQ(bits.parts.scales, row.scales) << row.name;
    if (code_bits * per_unit / 8 == row.codes) {  // the widths above use the budget exactly
      EXPECT_EQ(bits.page_bytes - bits.parts.padding, row.total) << row.name;
    }
    EXPECT_EQ(bits.parts.total(), bits.page_bytes);
  }
}

// LeapQuant's accounting: 19456, 15360 and 13312 bytes a head; windows as in window_test.
TEST(Bits, LeapQuantTable) {
  const auto shapes = layers(2, 1, 1);
  EXPECT_EQ(bits_of("leapquant:8", shapes).page_bytes, 2 * 19456);
  EXPECT_EQ(bits_of("leapquant:6", shapes).page_bytes, 2 * 15360);
  EXPECT_EQ(bits_of("leapquant:4", shapes).page_bytes, 2 * 13312);
  EXPECT_DOUBLE_EQ(bits_of("leapquant:4", shapes).payload, 6.5);
  EXPECT_EQ(bits_of("leapquant:8", shapes).window_bytes, 2 * (8192 + 64));
  const auto kda = layers(2, 1, 1, Gate::kChannel);
  EXPECT_EQ(bits_of("leapquant:8", kda).window_bytes, 2 * (8192 + 4096 + 512));
}

TEST(Compile, RefusesWhatDoesNotFit) {
  const auto shapes = layers(2, 2, 4);
  const Plan good = plan_for("stepquant", "stepquant:6", shapes, {{8, 6}});
  const auto message = [&](const std::string& name, const std::vector<LayerShape>& s,
                           const Plan* plan, Code code) {
    const auto compiled = CompiledScheme::make(*Scheme::parse(name), s, plan, "model");
    EXPECT_EQ(compiled.status().code(), code) << compiled.status().message();
    return compiled.status().message();
  };
  EXPECT_EQ(message("stepquant:6", shapes, nullptr, Code::kInvalidArgument),
            "scheme stepquant:6 needs a calibrated plan; make one with `statepack calibrate` and "
            "pass it with --plan");
  EXPECT_EQ(
      message("stepquant:4", shapes, &good, Code::kMismatch),
      "the plan was made for scheme 'stepquant:6', not for stepquant:4; use the plan's scheme "
      "or calibrate for this one");
  EXPECT_EQ(message("pace:4/8", shapes, &good, Code::kMismatch),
            "the plan is of kind 'stepquant', but scheme pace:4/8 needs one of kind 'pace-high'; "
            "calibrate for this scheme");
  EXPECT_EQ(message("stepquant:6", layers(3, 2, 4), &good, Code::kMismatch),
            "the plan describes 2 recurrent layers, but the model has 3; calibrate on this model");
  EXPECT_EQ(message("stepquant:6", layers(2, 1, 4), &good, Code::kMismatch),
            "recurrent layer 0 has 2 key heads, 4 value heads, K 128, V 128, scalar gates in the "
            "plan, but 1 key heads, 4 value heads, K 128, V 128, scalar gates in the model; "
            "calibrate on this model");
  Plan foreign = good;
  foreign.model_fingerprint = "other";
  EXPECT_EQ(
      message("stepquant:6", shapes, &foreign, Code::kMismatch),
      "the plan was made for the model with fingerprint 'other', but this model's is 'model'; "
      "calibrate on this checkpoint");
  Plan unweighted = good;
  unweighted.layers[1].row_weight.clear();
  EXPECT_THAT(CompiledScheme::make(*Scheme::parse("stepquant:6"), shapes, &unweighted, "model")
                  .status()
                  .message(),
              HasSubstr("recurrent layer 1: "));
  EXPECT_THAT(message("fp32", {}, nullptr, Code::kInvalidArgument),
              HasSubstr("0 recurrent layers"));
  for (const LayerShape& bad :
       {LayerShape{2, 3, 16, 16, Gate::kScalar}, LayerShape{0, 0, 16, 16, Gate::kScalar},
        LayerShape{1, 1, 1 << 30, 1 << 30, Gate::kScalar}, LayerShape{1, 1, 16, -1, Gate::kScalar},
        LayerShape{1 << 30, 1 << 30, 16, 16, Gate::kScalar}}) {
    EXPECT_THAT(message("fp32", {bad}, nullptr, Code::kInvalidArgument),
                HasSubstr("is not a shape a state can have"));
  }
}

// One plan may be offered to a list of schemes, and a caller without a model may skip that check.
TEST(Compile, IgnoresAPlanItDoesNotNeed) {
  const auto shapes = layers(1, 2, 4);
  const Plan plan = plan_for("stepquant", "stepquant:6", shapes, {{4, 6}});
  const auto plain = CompiledScheme::make(*Scheme::parse("int8"), shapes, &plan, "model");
  ASSERT_TRUE(plain.ok());
  EXPECT_EQ((*plain)->plan_fingerprint(), "");
  const auto planned = CompiledScheme::make(*Scheme::parse("stepquant:6"), shapes, &plan, "");
  ASSERT_TRUE(planned.ok()) << planned.status().message();
  EXPECT_EQ((*planned)->plan_fingerprint(), plan.fingerprint());
}

}  // namespace
}  // namespace statepack
