#include "runtime/decode_bench.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "fake_model.hpp"
#include "statepack/scheme.hpp"

namespace statepack {
namespace {

using testing::HasSubstr;

const std::string kTiny = SP_SOURCE_DIR "/test/data/tiny/";

TEST(Percentile, IsAValueThatOccurs) {
  EXPECT_EQ(percentile({}, 50), 0);
  EXPECT_EQ(percentile({7}, 95), 7);
  EXPECT_EQ(percentile({5, 1, 4, 2, 3}, 50), 3);
  EXPECT_EQ(percentile({5, 1, 4, 2, 3}, 0), 1);
  EXPECT_EQ(percentile({5, 1, 4, 2, 3}, 100), 5);
  EXPECT_EQ(percentile({10, 20}, 95), 20);
}

class DecodeBenchTest : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    auto model = Model::load(kTiny + GetParam(), threads_);
    ASSERT_TRUE(model.ok()) << model.status().message();
    model_ = std::move(*model);
  }
  Result<std::unique_ptr<DecodeBench>> make(const char* state, const DecodeBenchConfig& config) {
    const auto scheme = CompiledScheme::make(*Scheme::parse(state),
                                             model_->config().recurrent_shapes(), nullptr, "");
    return DecodeBench::create(*model_, *scheme, threads_, config);
  }

  ThreadPool threads_{2};
  std::unique_ptr<Model> model_;
};

TEST_P(DecodeBenchTest, AccountsForAllOfTheTime) {
  const auto bench = make("int8", {.n_sequences = 5, .n_prompt = 3});
  ASSERT_TRUE(bench.ok()) << bench.status().message();
  for (int i = 0; i < 20; ++i) ASSERT_TRUE((*bench)->step().ok());
  const DecodeFigures f = (*bench)->figures();
  EXPECT_EQ(f.n_steps, 20);
  const auto& ns = (*bench)->step_ns();
  const auto total = std::accumulate(ns.begin(), ns.end(), std::int64_t{0});
  EXPECT_NEAR(f.tokens_per_s, 1e9 * 5 * 20 / double(total), 1e-6 * f.tokens_per_s);
  EXPECT_LE(f.p50_us, f.p95_us);
  EXPECT_GT(f.cpu_us, 0);
  EXPECT_EQ(std::accumulate(f.part_ns.begin(), f.part_ns.end(), f.other_ns), total);
  EXPECT_GT(f.other_ns, 0);
  for (std::size_t p = 0; p < kNParts; ++p) EXPECT_GT(f.part_ns[p], 0) << kPartNames[p];
  EXPECT_GT(f.payload_bytes, 0);
  EXPECT_GE(f.resident_bytes, f.payload_bytes);
  EXPECT_GE(f.pool_bytes, 5 * f.resident_bytes);
}

// The digest is that of the greedy replies, whatever the number of steps behind them.
TEST_P(DecodeBenchTest, TheDigestTellsRepliesApart) {
  const auto digest = [&](const char* state, int n_sequences, int n_steps) {
    const auto bench = make(state, {.n_sequences = n_sequences, .n_prompt = 4});
    EXPECT_TRUE(bench.ok());
    for (int i = 0; i < n_steps; ++i) EXPECT_TRUE((*bench)->step().ok());
    return (*bench)->figures().digest;
  };
  const std::string fp32 = digest("fp32", 6, 20);
  EXPECT_EQ(fp32, digest("fp32", 6, 25));
  EXPECT_NE(fp32, digest("fp32", 7, 20));
  EXPECT_NE(fp32, digest("int4", 6, 20));
}

TEST_P(DecodeBenchTest, RefusesWhatCannotRun) {
  EXPECT_THAT(make("fp32", {.n_sequences = 0}).status().message(),
              HasSubstr("0 sequences with prompts of 16 tokens; both must be 1 or more"));
  const std::int64_t context = model_->config().max_position;
  EXPECT_THAT(make("fp32", {.n_sequences = 1, .n_prompt = context}).status().message(),
              HasSubstr("shorten the prompt"));
  const auto bench = make("fp32", {.n_sequences = 2, .n_prompt = context - 6});
  ASSERT_TRUE(bench.ok()) << bench.status().message();
  Status status;
  int n_steps = 0;
  for (; status.ok() && n_steps < 10; ++n_steps) status = (*bench)->step();
  EXPECT_EQ(status.code(), Code::kExhausted);
  EXPECT_GT(n_steps, 1);
}

TEST(DecodeBenchOfFailures, APromptThatCannotBeReadEndsIt) {
  FakeModel model;
  model.fail_prefill = true;
  ThreadPool threads(1);
  const auto scheme =
      CompiledScheme::make(*Scheme::parse("fp32"), model.config().recurrent_shapes(), nullptr, "");
  const auto bench = DecodeBench::create(model, *scheme, threads, {.n_sequences = 2});
  EXPECT_EQ(bench.status().code(), Code::kExhausted);
  EXPECT_THAT(bench.status().message(), HasSubstr("no memory for the cache"));
}

INSTANTIATE_TEST_SUITE_P(Models, DecodeBenchTest, testing::Values("next", "kimi"));

}  // namespace
}  // namespace statepack
