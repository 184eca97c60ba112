#include "eval/report.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "eval/table.hpp"

namespace statepack {
namespace {

using testing::HasSubstr;
using testing::Not;

TEST(Table, MarkdownAndTextAreAligned) {
  Table table({"scheme", "a"});
  table.add({"x", "1.25"});
  EXPECT_EQ(table.markdown(), "| scheme |    a |\n|--------|-----:|\n| x      | 1.25 |\n");
  EXPECT_EQ(table.text(), "scheme     a\nx       1.25\n");
}

Json document() {
  const std::vector<LayerShape> shapes = {{2, 4, 128, 128, Gate::kScalar}};
  Json d = new_results("tiny", "0123456789abcdef0123");
  for (const std::string name : {"int4", "fp32"}) {
    const auto scheme =
        CompiledScheme::make(Scheme::parse(name).value(), shapes, nullptr, "").value();
    Json& run = results_run(d, *scheme);
    Task task;
    task.name = "perm";
    task.samples.resize(2);
    std::vector<SampleOutcome> outcomes(2);
    for (std::size_t i = 0; i < 2; ++i) {
      outcomes[i].id = std::to_string(i);
      outcomes[i].bucket = i == 0 ? "short" : "long";
      outcomes[i].right = name == "fp32" || i == 0;
      outcomes[i].n_tokens = 7;
    }
    record_task(run, task, task_config(task, 2, {}), outcomes, 1);
    if (name != "int4") continue;
    ForcedOptions options;
    options.context = 1024;
    ForcedResult forced = empty_forced_result(1024);
    forced.n_windows = 3;
    for (PositionBucket& b : forced.buckets) {
      b.n = 10;
      b.kl = b.end == 1023 ? 0.5 : 0.1;
      b.nll = 20;
      b.reference_nll = 19;
    }
    record_forced(run, "wiki@1024", forced_config("x", options), forced, 1);
  }
  compare_with_fp32(d);
  return d;
}

TEST(Report, HasTheTablesWithFp32First) {
  const Json d = document();
  const std::string text = markdown_report({&d, 1}, "statepack eval --report x");
  EXPECT_THAT(text, HasSubstr("# Accuracy of tiny"));
  EXPECT_THAT(text, HasSubstr("`statepack eval --report x`"));
  EXPECT_THAT(text, HasSubstr("## perm"));
  EXPECT_THAT(text, HasSubstr("## wiki@1024"));
  EXPECT_THAT(text, HasSubstr("3 windows of 1024 tokens"));
  EXPECT_LT(text.find("| fp32"), text.find("| int4"));
  EXPECT_THAT(text, HasSubstr("5.00e-02"));  // KL of the last eighth before 1,024
  EXPECT_THAT(text, HasSubstr("50.0"));
  EXPECT_THAT(text, HasSubstr("0 / 1"));
}

TEST(Report, MissingPiecesAreDashes) {
  Json d = document();
  d["runs"]["int4"]["results"].erase("perm");
  const std::string overview = overview_table(d);
  EXPECT_THAT(overview, HasSubstr("-"));
  EXPECT_THAT(markdown_report({&d, 1}, "c"), HasSubstr("100.0"));
  const Json nothing = new_results("m", "f");
  EXPECT_THAT(markdown_report({&nothing, 1}, "c"), Not(HasSubstr("##")));
}

TEST(Report, TwoModelsStandOneAfterTheOther) {
  Json other = document();
  other["model_name"] = "small";
  other["model_fingerprint"] = "fedc";
  const auto models = merge_by_model({document(), other, document()});
  ASSERT_TRUE(models.ok()) << models.status().message();
  ASSERT_EQ(models->size(), 2U);
  const std::string text = markdown_report(*models, "c");
  const std::size_t first = text.find("\n## tiny\n"), second = text.find("\n## small\n");
  ASSERT_NE(first, std::string::npos);
  ASSERT_NE(second, std::string::npos);
  EXPECT_LT(first, text.find("### perm"));
  EXPECT_LT(text.find("### wiki@1024"), second);
  EXPECT_LT(second, text.rfind("### perm"));
}

}  // namespace
}  // namespace statepack
