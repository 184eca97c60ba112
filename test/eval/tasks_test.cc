#include "eval/tasks.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>

namespace statepack {
namespace {

using testing::HasSubstr;

TEST(AnswerLine, TheLastOneCounts) {
  EXPECT_EQ(answer_line("answer: 42"), "42");
  EXPECT_EQ(answer_line("answer: 1\nno\nanswer:  a b \nrest"), "a b");
  EXPECT_EQ(answer_line("x answer:7"), "7");
  EXPECT_EQ(answer_line("answer:\n42"), "");
  EXPECT_EQ(answer_line("no such line"), "");
  EXPECT_EQ(answer_line(""), "");
  EXPECT_EQ(answer_line("answer: \t5\r"), "5");
}

TEST(IsRight, ExactAndNothingElse) {
  EXPECT_TRUE(is_right("1 + 1\nanswer: 2", "2"));
  EXPECT_FALSE(is_right("answer: 2.", "2"));
  EXPECT_FALSE(is_right("2", "2"));
  EXPECT_FALSE(is_right("answer: 2\nanswer: 3", "2"));
  EXPECT_FALSE(is_right("Answer: 2", "2"));
  EXPECT_FALSE(is_right("", ""));  // an empty answer still has to be given
  EXPECT_TRUE(is_right("answer:", ""));
}

std::vector<TaskSample> samples_of(const std::vector<std::pair<std::string, int>>& buckets) {
  std::vector<TaskSample> samples;
  for (const auto& [name, n] : buckets) {
    for (int i = 0; i < n; ++i) {
      TaskSample s;
      s.id = name + std::to_string(i);
      s.bucket = name;
      samples.push_back(s);
    }
  }
  return samples;
}

std::map<std::string, int> count(const std::vector<TaskSample>& samples) {
  std::map<std::string, int> n;
  for (const TaskSample& s : samples) ++n[s.bucket];
  return n;
}

TEST(PickEvenly, SharesOutOverBuckets) {
  const auto samples = samples_of({{"short", 50}, {"long", 50}, {"xlong", 50}});
  EXPECT_EQ(count(pick_evenly(samples, 30)),
            (std::map<std::string, int>{{"short", 10}, {"long", 10}, {"xlong", 10}}));
  // The remainder goes to the longest.
  EXPECT_EQ(count(pick_evenly(samples, 32)),
            (std::map<std::string, int>{{"short", 10}, {"long", 11}, {"xlong", 11}}));
  EXPECT_EQ(count(pick_evenly(samples, 1)), (std::map<std::string, int>{{"xlong", 1}}));
}

TEST(PickEvenly, SmallBucketsPassTheirShareOn) {
  const auto samples = samples_of({{"short", 50}, {"long", 2}});
  EXPECT_EQ(count(pick_evenly(samples, 20)),
            (std::map<std::string, int>{{"short", 18}, {"long", 2}}));
}

TEST(PickEvenly, IsEvenInsideABucketAndKeepsTheOrder) {
  const auto picked = pick_evenly(samples_of({{"a", 10}}), 5);
  std::vector<std::string> ids;
  for (const auto& s : picked) ids.push_back(s.id);
  EXPECT_EQ(ids, (std::vector<std::string>{"a0", "a2", "a4", "a6", "a8"}));
}

TEST(PickEvenly, AllWhenEnough) {
  const auto samples = samples_of({{"a", 3}, {"b", 4}});
  EXPECT_EQ(pick_evenly(samples, 0).size(), 7U);
  EXPECT_EQ(pick_evenly(samples, 7).size(), 7U);
  EXPECT_EQ(pick_evenly(samples, 700).size(), 7U);
}

class LoadTask : public testing::Test {
 protected:
  void SetUp() override {
    const std::string dir = SP_SOURCE_DIR "/models/statepack-gdn";
    tokenizer_ = Tokenizer::load(dir).value();
    template_ = ChatTemplate::load(dir).value();
    path_ = testing::TempDir() + "task_" + std::to_string(::getpid()) + ".jsonl";
  }
  void TearDown() override { std::filesystem::remove(path_); }
  Result<Task> load(const std::string& text) {
    std::ofstream(path_) << text;
    return load_task(path_, *tokenizer_, *template_);
  }
  std::unique_ptr<Tokenizer> tokenizer_;
  std::unique_ptr<ChatTemplate> template_;
  std::string path_;
};

TEST_F(LoadTask, TheProjectsFiles) {
  for (const std::string name : {"arith", "lists", "perm", "recall", "trace", "vartrack"}) {
    const auto task =
        load_task(SP_SOURCE_DIR "/eval/data/" + name + ".jsonl", *tokenizer_, *template_);
    ASSERT_TRUE(task.ok()) << task.status().message();
    EXPECT_EQ(task->name, name);
    EXPECT_EQ(task->samples.size(), 200U);
    for (const TaskSample& s : task->samples) {
      ASSERT_FALSE(s.answer.empty());
      ASSERT_GT(s.max_new_tokens, s.reference_tokens);
    }
  }
}

TEST_F(LoadTask, PromptsHaveTheStatedLength) {
  const auto task = load_task(SP_SOURCE_DIR "/eval/data/arith.jsonl", *tokenizer_, *template_);
  ASSERT_TRUE(task.ok());
  EXPECT_EQ(task->samples[0].id, "arith-short-0000");
  EXPECT_EQ(task->samples[0].prompt.size(), 19U);
}

TEST_F(LoadTask, BadLinesAreNamed) {
  const std::string good =
      R"({"id":"a","bucket":"short","messages":[{"role":"user","content":"x"}],"answer":"1","max_new_tokens":5})"
      "\n";
  EXPECT_TRUE(load(good).ok());
  EXPECT_TRUE(load(good + "\n\n").ok());
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", "holds no samples"},
      {good + "{", "line 2 is not a JSON object"},
      {"[1]\n", "line 1 is not a JSON object"},
      {R"({"bucket":"s"})", "'id'"},
      {R"({"id":"a"})", "'bucket'"},
      {R"({"id":"a","bucket":"s","messages":[]})", "'answer'"},
      {R"({"id":"a","bucket":"s","answer":"1","messages":[{"role":"user","content":"x"}]})",
       "'max_new_tokens'"},
      {R"({"id":"a","bucket":"s","answer":"1","max_new_tokens":-4,"messages":[{"role":"user","content":"x"}]})",
       "'max_new_tokens'"},
      {R"({"id":"a","bucket":"s","answer":"1","max_new_tokens":4,"messages":[]})", "'messages'"},
      {R"({"id":"a","bucket":"s","answer":"1","max_new_tokens":4,"messages":[{"role":"user"}]})",
       "line 1"},
  };
  for (const auto& [text, message] : cases) {
    const auto task = load(text);
    ASSERT_FALSE(task.ok()) << text;
    EXPECT_THAT(task.status().message(), HasSubstr(message)) << text;
    EXPECT_THAT(task.status().message(), HasSubstr(path_)) << text;
  }
}

}  // namespace
}  // namespace statepack
