// Evaluation on the project's own model, kept short.
#include <gtest/gtest.h>

#include <cmath>

#include "base/file.hpp"
#include "eval/forced.hpp"
#include "eval/tasks.hpp"

namespace statepack {
namespace {

class EvalModelTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    const std::string dir = SP_SOURCE_DIR "/models/statepack-gdn";
    threads_ = std::make_unique<ThreadPool>();
    auto model = Model::load(dir, *threads_);
    ASSERT_TRUE(model.ok()) << model.status().message();
    model_ = std::move(model).value();
    tokenizer_ = Tokenizer::load(dir).value();
    template_ = ChatTemplate::load(dir).value();
    const std::string text =
        read_text_file(SP_SOURCE_DIR "/eval/data/wikitext2/wikitext2.test.txt", 1 << 24).value();
    tokens_ = tokenizer_->encode(text.substr(0, 40000), false);
  }
  static void TearDownTestSuite() {
    model_.reset();
    threads_.reset();
  }
  static std::shared_ptr<const CompiledScheme> compile(const std::string& name) {
    return CompiledScheme::make(Scheme::parse(name).value(), model_->config().recurrent_shapes(),
                                nullptr, model_->fingerprint())
        .value();
  }
  static ForcedOptions options(std::int64_t context) {
    ForcedOptions o;
    o.context = context;
    o.n_vocab = tokenizer_->n_tokens();
    return o;
  }
  static std::unique_ptr<ThreadPool> threads_;
  static std::unique_ptr<Model> model_;
  static std::unique_ptr<Tokenizer> tokenizer_;
  static std::unique_ptr<ChatTemplate> template_;
  static std::vector<std::int32_t> tokens_;
};
std::unique_ptr<ThreadPool> EvalModelTest::threads_;
std::unique_ptr<Model> EvalModelTest::model_;
std::unique_ptr<Tokenizer> EvalModelTest::tokenizer_;
std::unique_ptr<ChatTemplate> EvalModelTest::template_;
std::vector<std::int32_t> EvalModelTest::tokens_;

TEST_F(EvalModelTest, ForcedDecodeOfFp32IsChunkedPerplexity) {
  const std::vector<std::shared_ptr<const CompiledScheme>> schemes = {compile("fp32"),
                                                                      compile("fp32")};
  std::vector<ForcedResult> results(2, empty_forced_result(280));
  ASSERT_TRUE(
      forced_decode(*model_, *threads_, schemes, tokens_, options(280), 0, 2, results, nullptr)
          .ok());
  const auto chunked = chunked_perplexity(*model_, tokens_, options(280), 2, nullptr);
  ASSERT_TRUE(chunked.ok());
  const PositionBucket total = results[0].total();
  EXPECT_EQ(total.n, 2 * 279);
  EXPECT_EQ(chunked->n_tokens, total.n);
  // The same sums in another order: f32 rounding of the two paths, far below a milli-nat a token.
  EXPECT_NEAR(total.nll / static_cast<double>(total.n), chunked->nll / static_cast<double>(total.n),
              1e-4);
  // Two lanes of one scheme never differ.
  const PositionBucket twin = results[1].total();
  EXPECT_EQ(twin.nll, total.nll);
  EXPECT_EQ(twin.n_agree, twin.n);
  EXPECT_LT(twin.kl, 1e-9);
  EXPECT_EQ(results[1].drift[0].relative_error, 0);
  EXPECT_EQ(results[1].drift[0].n, 2 * 6);  // two windows, six recurrent layers
  EXPECT_EQ(results[1].drift[0].by_head, std::vector<double>(6 * 4, 0.0));
  EXPECT_EQ(results[1].drift[0].n_by_head, 2);
}

TEST_F(EvalModelTest, CoarserStatesAreFurtherAway) {
  const std::vector<std::shared_ptr<const CompiledScheme>> schemes = {
      compile("fp32"), compile("int8"), compile("int4")};
  std::vector<ForcedResult> results(3, empty_forced_result(257));
  ASSERT_TRUE(
      forced_decode(*model_, *threads_, schemes, tokens_, options(257), 0, 1, results, nullptr)
          .ok());
  EXPECT_GT(results[1].total().kl, 0);
  EXPECT_GT(results[2].total().kl, 10 * results[1].total().kl);
  EXPECT_GT(results[2].drift[0].relative_error, 3 * results[1].drift[0].relative_error);
  EXPECT_LT(results[2].total().n_agree, results[1].total().n_agree);
  // Heads make up their layer: a layer's error lies between those of its heads.
  const StateDrift& drift = results[2].drift[0];
  const auto [least, most] = std::minmax_element(drift.by_head.begin(), drift.by_head.end());
  const double mean = drift.relative_error / static_cast<double>(drift.n);
  EXPECT_GT(mean, *least);
  EXPECT_LT(mean, *most);
}

TEST_F(EvalModelTest, WindowsAddUpHoweverTheyAreGrouped) {
  const std::vector<std::shared_ptr<const CompiledScheme>> schemes = {compile("fp32"),
                                                                      compile("int8")};
  std::vector<ForcedResult> together(2, empty_forced_result(100));
  std::vector<ForcedResult> apart(2, empty_forced_result(100));
  const ForcedOptions o = options(100);
  ASSERT_TRUE(forced_decode(*model_, *threads_, schemes, tokens_, o, 0, 3, together, nullptr).ok());
  ASSERT_TRUE(forced_decode(*model_, *threads_, schemes, tokens_, o, 0, 1, apart, nullptr).ok());
  ASSERT_TRUE(forced_decode(*model_, *threads_, schemes, tokens_, o, 1, 2, apart, nullptr).ok());
  EXPECT_EQ(together[1].n_windows, apart[1].n_windows);
  const PositionBucket a = together[1].total();
  const PositionBucket b = apart[1].total();
  EXPECT_EQ(a.n, b.n);
  EXPECT_EQ(a.n_agree, b.n_agree);
  EXPECT_EQ(a.kl_max, b.kl_max);
  EXPECT_NEAR(a.nll, b.nll, 1e-10 * a.nll);  // f64 sums of equal terms in another order
  EXPECT_NEAR(a.kl, b.kl, 1e-10 * a.kl);
}

TEST_F(EvalModelTest, WindowsPastTheTextAreRefused) {
  const std::vector<std::shared_ptr<const CompiledScheme>> schemes = {compile("fp32")};
  std::vector<ForcedResult> results(1, empty_forced_result(1 << 20));
  const Status status =
      forced_decode(*model_, *threads_, schemes, tokens_, options(1 << 20), 0, 1, results, nullptr);
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_FALSE(chunked_perplexity(*model_, tokens_, options(1), 1, nullptr).ok());
}

TEST_F(EvalModelTest, AnswersSimpleTasksInAnyBatch) {
  const auto task = load_task(SP_SOURCE_DIR "/eval/data/arith.jsonl", *tokenizer_, *template_);
  ASSERT_TRUE(task.ok());
  const std::vector<TaskSample> samples(task->samples.begin(), task->samples.begin() + 3);
  TaskOptions wide;
  TaskOptions narrow;
  narrow.batch = 2;
  const auto run = [&](const TaskOptions& options) {
    std::vector<SampleOutcome> outcomes;
    const Status status = run_task(*model_, *threads_, *tokenizer_, compile("fp32"), samples,
                                   options, nullptr, &outcomes);
    EXPECT_TRUE(status.ok()) << status.message();
    return outcomes;
  };
  const auto a = run(wide);
  const auto b = run(narrow);
  for (std::size_t i = 0; i < samples.size(); ++i) {
    EXPECT_TRUE(a[i].right) << a[i].text;
    EXPECT_EQ(a[i].id, samples[i].id);
    EXPECT_EQ(a[i].hash, b[i].hash);
    EXPECT_EQ(a[i].n_tokens + 1, samples[i].reference_tokens);  // which counts the end token
  }
  TaskOptions cut;
  cut.max_new_tokens = 3;
  const auto c = run(cut);
  EXPECT_TRUE(c[0].truncated);
  EXPECT_FALSE(c[0].right);
  EXPECT_EQ(c[0].n_tokens, 3);
}

}  // namespace
}  // namespace statepack
