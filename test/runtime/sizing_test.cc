#include "runtime/sizing.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace statepack {
namespace {

using testing::HasSubstr;

TEST(PublicModels, StateAndConvolutionAreThePublishedBytes) {
  const std::vector<std::tuple<std::string, std::int64_t, std::int64_t>> rows = {
      {"Qwen3.5-0.8B", 18874368, 1327104},       {"Qwen3.5-2B", 18874368, 1327104},
      {"Qwen3.5-4B", 50331648, 2359296},         {"Qwen3.5-9B", 50331648, 2359296},
      {"Qwen3.8-27B", 150994944, 5898240},       {"Qwen3.5-35B-A3B", 62914560, 2949120},
      {"Qwen3-Next-80B-A3B", 75497472, 3538944}, {"Qwen3.5-122B-A10B", 150994944, 5308416},
      {"Qwen3.5-397B-A17B", 188743680, 6635520}, {"Kimi-Linear-48B-A3B", 41943040, 2949120}};
  for (const auto& [name, state, conv] : rows) {
    const Result<ModelGeometry> model = find_public_model(name);
    ASSERT_TRUE(model.ok()) << name;
    EXPECT_EQ(model->state_bytes_f32(), state) << name;
    EXPECT_EQ(model->conv_floats * 4, conv) << name;
  }
}

TEST(PublicModels, NamesAreForgiving) {
  EXPECT_EQ(find_public_model("qwen3.8_27b")->name, "Qwen3.8-27B");
  EXPECT_EQ(find_public_model("kimi")->name, "Kimi-Linear-48B-A3B");
  EXPECT_EQ(find_public_model("397b")->name, "Qwen3.5-397B-A17B");
  const Status several = find_public_model("27b").status();
  EXPECT_EQ(several.code(), Code::kInvalidArgument);
  EXPECT_THAT(several.message(), HasSubstr("Qwen3.6-27B"));
  const Status none = find_public_model("llama").status();
  EXPECT_EQ(none.code(), Code::kNotFound);
  EXPECT_THAT(none.message(), HasSubstr("Kimi-Linear-48B-A3B"));
  EXPECT_FALSE(find_public_model("").ok());
}

TEST(Sizing, SequencesThatFit) {
  ModelGeometry model = find_public_model("qwen3.5-27b").value();
  const Scheme scheme = Scheme::parse("fp32").value();
  const auto compiled = CompiledScheme::make(scheme, model.shapes, nullptr, "").value();
  const SequenceMemory memory = sequence_memory(model, *compiled, 1000);
  EXPECT_EQ(memory.pages, 150994944);
  EXPECT_EQ(memory.kv, 65536000);
  EXPECT_EQ(sequences_that_fit(model, memory, model.weight_bytes - 1), 0);
  EXPECT_EQ(sequences_that_fit(model, memory, model.weight_bytes + 3 * memory.total()), 3);
  EXPECT_EQ(sequences_that_fit(model, memory, model.weight_bytes + 3 * memory.total() - 1), 2);
}

TEST(Sizing, NominalPlansCompileForEverySchemeThatNeedsOne) {
  const ModelGeometry model = find_public_model("qwen3.5-27b").value();
  const std::int64_t fp32 = model.state_bytes_f32();
  int n_schemes = 0;
  for (const CodecInfo* codec : all_codecs()) {
    for (const std::string_view arg : codec->args) {
      const std::string name = fmt::format("{}:{}", codec->name, arg);
      const Scheme scheme = Scheme::parse(name).value();
      if (!scheme.needs_plan()) continue;
      const Plan plan = nominal_plan(scheme, model.shapes).value();
      const auto compiled = CompiledScheme::make(scheme, model.shapes, &plan, "");
      ASSERT_TRUE(compiled.ok()) << compiled.status().message();
      const SchemeBits bits = (*compiled)->bits();
      EXPECT_LT(bits.page_bytes, fp32 / 3) << name;
      EXPECT_GT(bits.page_bytes, fp32 / 11) << name;
      ++n_schemes;
    }
  }
  EXPECT_GE(n_schemes, 9);
}

// The tables of bits that are published (docs/schemes.md).
TEST(Sizing, NominalPlansHaveTheBitsOfTheTables) {
  const std::vector<LayerShape> shapes = {{2, 4, 128, 128, Gate::kScalar}};
  const std::pair<const char*, double> tables[] = {
      {"damp:8", 9.875}, {"damp:4", 6.375}, {"damp:4-lean", 5.664}, {"pace:4/8", 5.656}};
  for (const auto& [name, bits] : tables) {
    const Scheme scheme = Scheme::parse(name).value();
    const Plan plan = nominal_plan(scheme, shapes).value();
    const auto compiled = CompiledScheme::make(scheme, shapes, &plan, "");
    ASSERT_TRUE(compiled.ok()) << compiled.status().message();
    EXPECT_NEAR((*compiled)->bits().payload, bits, 1e-3) << name;
  }
}

TEST(Bytes, ParseAndFormat) {
  EXPECT_EQ(*parse_bytes("1048576"), 1048576);
  EXPECT_EQ(*parse_bytes("80GiB"), std::int64_t{80} << 30);
  EXPECT_EQ(*parse_bytes("80 GB"), 80000000000);
  EXPECT_EQ(*parse_bytes("1.5k"), 1536);
  EXPECT_EQ(*parse_bytes("512MiB"), std::int64_t{512} << 20);
  for (const char* bad : {"", "GiB", "-1", "12 parsec", "1e300GB", "nan"}) {
    const Status status = parse_bytes(bad).status();
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << bad;
    EXPECT_THAT(status.message(), HasSubstr("not a size"));
  }
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(999), "999 B");
  EXPECT_EQ(format_bytes(1572864), "1.57 MB");
  EXPECT_EQ(format_bytes(50331648), "50.3 MB");
  EXPECT_EQ(format_bytes(999999), "1.00 MB");
  EXPECT_EQ(format_bytes(150994944), "151 MB");
}

}  // namespace
}  // namespace statepack
