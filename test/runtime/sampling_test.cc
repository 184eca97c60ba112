#include "runtime/sampling.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <numeric>

namespace statepack {
namespace {

using testing::HasSubstr;

std::vector<float> logits_of(const std::vector<double>& probabilities) {
  std::vector<float> x;
  for (const double p : probabilities) x.push_back(static_cast<float>(std::log(p)));
  return x;
}

std::int32_t one(const SamplingParams& params, std::span<const float> logits, std::int64_t position,
                 std::span<const std::int32_t> prompt = {}) {
  SamplerScratch scratch;
  const Sampler sampler(params, prompt);
  const Result<Choice> choice = sampler.sample(logits, position, scratch);
  EXPECT_TRUE(choice.ok()) << choice.status().message();
  return choice.ok() ? choice->token : -1;
}

// Counts of n draws at positions 0 .. n-1.
std::vector<int> counts(const SamplingParams& params, const std::vector<float>& logits, int n) {
  std::vector<int> result(logits.size());
  for (int i = 0; i < n; ++i) ++result[static_cast<std::size_t>(one(params, logits, i))];
  return result;
}

// Every share within five standard deviations of its binomial.
void expect_shares(const std::vector<int>& got, const std::vector<double>& p, int n) {
  for (std::size_t i = 0; i < p.size(); ++i) {
    const double sigma = std::sqrt(n * p[i] * (1 - p[i]));
    EXPECT_NEAR(got[i], n * p[i], 5 * sigma + 1e-9) << "token " << i;
  }
}

TEST(Sampler, DefaultsAreGreedy) {
  EXPECT_EQ(one({}, std::vector<float>{0.1F, 3.0F, 2.9F}, 0), 1);
  SamplingParams top1;
  top1.temperature = 2;
  top1.top_k = 1;
  for (int i = 0; i < 50; ++i) EXPECT_EQ(one(top1, std::vector<float>{0.1F, 3.0F, 2.9F}, i), 1);
}

TEST(Sampler, DrawsFollowTheDistribution) {
  const std::vector<double> p = {0.5, 0.3, 0.15, 0.05};
  SamplingParams params;
  params.temperature = 1;
  params.seed = 7;
  expect_shares(counts(params, logits_of(p), 20000), p, 20000);
}

TEST(Sampler, TemperatureSharpens) {
  const std::vector<double> p = {0.5, 0.3, 0.2};
  SamplingParams params;
  params.temperature = 0.5;  // squares the odds
  const double sum = 0.25 + 0.09 + 0.04;
  expect_shares(counts(params, logits_of(p), 20000), {0.25 / sum, 0.09 / sum, 0.04 / sum}, 20000);
}

TEST(Sampler, TopKKeepsTheBestAndTiesGoLow) {
  SamplingParams params;
  params.temperature = 1;
  params.top_k = 2;
  const std::vector<double> p = {0.1, 0.3, 0.3, 0.3};
  expect_shares(counts(params, logits_of(p), 20000), {0, 0.5, 0.5, 0}, 20000);
}

TEST(Sampler, TopPKeepsTheFewestThatHoldTheMass) {
  const std::vector<double> p = {0.05, 0.4, 0.25, 0.3};
  SamplingParams params;
  params.temperature = 1;
  params.top_p = 0.65F;  // 0.4 + 0.3 >= 0.65
  expect_shares(counts(params, logits_of(p), 20000), {0, 0.4 / 0.7, 0, 0.3 / 0.7}, 20000);
  params.top_p = 1e-6F;  // the best one always stays
  expect_shares(counts(params, logits_of(p), 200), {0, 1, 0, 0}, 200);
}

TEST(Sampler, TopPSortsPastItsFirstRun) {
  // 1,000 equal tokens: 0.9 of the mass is 900 of them, the lowest ids.
  SamplingParams params;
  params.temperature = 1;
  params.top_p = 0.8995F;
  const std::vector<int> got = counts(params, std::vector<float>(1000, 1.5F), 5000);
  EXPECT_GT(std::accumulate(got.begin(), got.begin() + 900, 0), 4999);
  EXPECT_EQ(std::accumulate(got.begin() + 900, got.end(), 0), 0);
}

TEST(Sampler, MinPIsRelativeToTheBest) {
  const std::vector<double> p = {0.5, 0.26, 0.2, 0.04};
  SamplingParams params;
  params.temperature = 1;
  params.min_p = 0.5F;  // 0.25 and more
  expect_shares(counts(params, logits_of(p), 20000), {0.5 / 0.76, 0.26 / 0.76, 0, 0}, 20000);
  params.min_p = 1;
  expect_shares(counts(params, logits_of(p), 200), {1, 0, 0, 0}, 200);
}

TEST(Sampler, MaskedTokensAreNeverDrawn) {
  std::vector<float> x(64, -std::numeric_limits<float>::infinity());
  x[5] = 0;
  x[60] = -200;  // exp underflows: as good as masked
  SamplingParams params;
  params.temperature = 1;
  for (int i = 0; i < 100; ++i) EXPECT_EQ(one(params, x, i), 5);
}

TEST(Sampler, DependsOnSeedSequenceAndPositionAlone) {
  SamplingParams params;
  params.temperature = 1;
  params.seed = 11;
  const std::vector<float> x(1000, 0.0F);
  const auto draws = [&](SamplingParams p) {
    std::vector<std::int32_t> out;
    for (int i = 0; i < 64; ++i) out.push_back(one(p, x, i));
    return out;
  };
  const auto first = draws(params);
  EXPECT_EQ(draws(params), first);
  SamplingParams other_seed = params;
  other_seed.seed = 12;
  SamplingParams other_sequence = params;
  other_sequence.sequence = 1;
  EXPECT_NE(draws(other_seed), first);
  EXPECT_NE(draws(other_sequence), first);
  EXPECT_NE(draws(other_seed), draws(other_sequence));
}

TEST(Sampler, RepetitionPenaltyCountsPromptAndReply) {
  SamplingParams params;
  params.repetition_penalty = 2;
  const std::vector<std::int32_t> prompt = {1};
  EXPECT_EQ(one(params, std::vector<float>{3.0F, 5.0F, 2.0F}, 0, prompt), 0);     // 5 / 2 < 3
  EXPECT_EQ(one(params, std::vector<float>{-3.0F, -2.0F, -9.0F}, 0, prompt), 0);  // -2 * 2 < -3
  SamplerScratch scratch;
  Sampler sampler(params, {});
  sampler.accept(1);
  EXPECT_EQ(sampler.sample(std::vector<float>{3.0F, 5.0F, 2.0F}, 0, scratch)->token, 0);
}

TEST(Sampler, PresenceAndFrequencyCountTheReplyOnly) {
  SamplingParams params;
  params.presence_penalty = 1;
  params.frequency_penalty = 0.5;
  const std::vector<float> x = {5.0F, 3.2F};
  const std::vector<std::int32_t> prompt = {0, 0, 0};
  Sampler sampler(params, prompt);
  SamplerScratch scratch;
  EXPECT_EQ(sampler.sample(x, 0, scratch)->token, 0);
  sampler.accept(0);  // 5 - 1.5 = 3.5
  EXPECT_EQ(sampler.sample(x, 1, scratch)->token, 0);
  sampler.accept(0);  // 5 - 2 = 3
  EXPECT_EQ(sampler.sample(x, 2, scratch)->token, 1);
}

TEST(Sampler, PenalisedTokensOutsideTheVocabularyAreIgnored) {
  SamplingParams params;
  params.repetition_penalty = 2;
  const std::vector<std::int32_t> prompt = {7, -1};
  EXPECT_EQ(one(params, std::vector<float>{1.0F, 2.0F}, 0, prompt), 1);
}

TEST(Sampler, LogprobsAreTheModelsOwn) {
  SamplingParams params;
  params.logprobs = 2;
  params.repetition_penalty = 10;
  const std::vector<std::int32_t> prompt = {0};
  const std::vector<double> p = {0.6, 0.3, 0.1};
  std::vector<float> x = logits_of(p);
  for (float& v : x) v += 4;  // a constant changes nothing; all positive, so the penalty bites
  SamplerScratch scratch;
  const Result<Choice> choice = Sampler(params, prompt).sample(x, 0, scratch);
  ASSERT_TRUE(choice.ok());
  EXPECT_EQ(choice->token, 1);
  EXPECT_NEAR(choice->logprob, std::log(0.3), 1e-6);
  ASSERT_EQ(choice->top.size(), 2U);
  EXPECT_EQ(choice->top[0].token, 0);
  EXPECT_NEAR(choice->top[0].logprob, std::log(0.6), 1e-6);
  EXPECT_EQ(choice->top[1].token, 1);
}

TEST(Sampler, LogprobsOfMoreTokensThanThereAre) {
  SamplingParams params;
  params.logprobs = 20;
  SamplerScratch scratch;
  EXPECT_EQ(Sampler(params, {}).sample(std::vector<float>{1, 2}, 0, scratch)->top.size(), 2U);
}

TEST(Sampler, NotFiniteLogitsAreAnError) {
  SamplerScratch scratch;
  const std::vector<float> x = {1.0F, std::numeric_limits<float>::quiet_NaN()};
  const Result<Choice> choice = Sampler({}, {}).sample(x, 9, scratch);
  ASSERT_FALSE(choice.ok());
  EXPECT_EQ(choice.status().code(), Code::kNotFinite);
  EXPECT_THAT(choice.status().message(), HasSubstr("position 9"));
}

TEST(SamplingParams, RefusesWhatMakesNoSense) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<std::pair<std::function<void(SamplingParams&)>, std::string>> cases = {
      {[](auto& p) { p.temperature = -1; }, "temperature"},
      {[&](auto& p) { p.temperature = nan; }, "temperature"},
      {[](auto& p) { p.top_k = -1; }, "top_k"},
      {[](auto& p) { p.top_p = 0; }, "top_p"},
      {[](auto& p) { p.top_p = 1.5; }, "top_p"},
      {[](auto& p) { p.min_p = 2; }, "min_p"},
      {[](auto& p) { p.repetition_penalty = 0; }, "repetition_penalty"},
      {[&](auto& p) { p.presence_penalty = nan; }, "presence_penalty"},
      {[](auto& p) { p.frequency_penalty = 1e9F; }, "frequency_penalty"},
      {[](auto& p) { p.max_tokens = 0; }, "max_tokens"},
      {[](auto& p) { p.logprobs = -2; }, "logprobs"},
      {[](auto& p) {
         p.stop = {"a", ""};
       },
       "stop string"},
  };
  EXPECT_TRUE(SamplingParams().validate().ok());
  for (const auto& [spoil, word] : cases) {
    SamplingParams params;
    spoil(params);
    const Status status = params.validate();
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << word;
    EXPECT_THAT(status.message(), HasSubstr(word));
  }
}

std::string feed(StopStrings& stops, const std::vector<std::string>& pieces) {
  std::string out;
  for (const std::string& piece : pieces) out += stops.push(piece);
  return out;
}

TEST(StopStrings, AreFoundAcrossPieces) {
  StopStrings stops({"STOP"});
  EXPECT_EQ(feed(stops, {"abc S", "T", "OP def"}), "abc ");
  EXPECT_TRUE(stops.matched());
  EXPECT_EQ(stops.push("more"), "");
  EXPECT_EQ(stops.finish(), "");
}

TEST(StopStrings, HoldBackOnlyWhatMayBecomeOne) {
  StopStrings stops({"\n\n", "END."});
  EXPECT_EQ(stops.push("line\n"), "line");
  EXPECT_EQ(stops.push("x EN"), "\nx ");
  EXPECT_EQ(stops.push("D!"), "END!");
  EXPECT_EQ(stops.push("E"), "");
  EXPECT_FALSE(stops.matched());
  EXPECT_EQ(stops.finish(), "E");
}

TEST(StopStrings, SelfOverlapIsNotLost) {
  StopStrings stops({"aab"});
  EXPECT_EQ(feed(stops, {"a", "a", "a", "a", "b"}), "aa");
  EXPECT_TRUE(stops.matched());
}

TEST(StopStrings, TheFirstInTheTextWins) {
  StopStrings stops({"world", "lo"});
  EXPECT_EQ(stops.push("hello world"), "hel");
}

TEST(StopStrings, NoneLetEverythingThrough) {
  StopStrings stops({});
  EXPECT_EQ(feed(stops, {"a", "", "b"}), "ab");
  EXPECT_EQ(stops.finish(), "");
}

// Whatever the cuts, the text before the stop string is the same.
TEST(StopStrings, CutsDoNotMatter) {
  const std::string text = "ababcababdabab|abc";
  const std::vector<std::string> stop_texts = {"ababd", "abc|"};
  for (std::size_t cut1 = 0; cut1 <= text.size(); ++cut1) {
    for (std::size_t cut2 = cut1; cut2 <= text.size(); ++cut2) {
      StopStrings stops(stop_texts);
      const std::string out =
          feed(stops, {text.substr(0, cut1), text.substr(cut1, cut2 - cut1), text.substr(cut2)});
      ASSERT_TRUE(stops.matched());
      ASSERT_EQ(out, "ababc") << cut1 << " " << cut2;
    }
  }
}

}  // namespace
}  // namespace statepack
