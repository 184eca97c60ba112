#include "eval/results.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>

namespace statepack {
namespace {

using testing::HasSubstr;

std::shared_ptr<const CompiledScheme> compiled(const std::string& name) {
  const std::vector<LayerShape> shapes = {{2, 4, 128, 128, Gate::kScalar}};
  return CompiledScheme::make(Scheme::parse(name).value(), shapes, nullptr, "").value();
}

Task task_of(std::int64_t n) {
  Task task;
  task.name = "perm";
  task.digest = "d";
  task.samples.resize(static_cast<std::size_t>(n));
  for (std::size_t i = 0; i < task.samples.size(); ++i) task.samples[i].id = std::to_string(i);
  return task;
}

std::vector<SampleOutcome> outcomes_of(const std::vector<std::pair<bool, std::string>>& replies) {
  std::vector<SampleOutcome> outcomes;
  for (std::size_t i = 0; i < replies.size(); ++i) {
    SampleOutcome o;
    o.id = std::to_string(i);
    o.bucket = i % 2 == 0 ? "short" : "long";
    o.right = replies[i].first;
    o.hash = replies[i].second;
    o.n_tokens = 10;
    outcomes.push_back(o);
  }
  return outcomes;
}

class ResultsTest : public testing::Test {
 protected:
  void SetUp() override {
    path_ = testing::TempDir() + "results_" + std::to_string(::getpid()) + ".json";
    std::filesystem::remove(path_);
  }
  void TearDown() override { std::filesystem::remove(path_); }
  std::string path_;
};

TEST_F(ResultsTest, ATaskIsRecordedOnceAndComparedWithFp32) {
  Json document = new_results("m", "f");
  const Task task = task_of(4);
  const Json config = task_config(task, 4, {});
  Json& fp32 = results_run(document, *compiled("fp32"));
  EXPECT_FALSE(has_task(fp32, "perm", config));
  record_task(fp32, task, config,
              outcomes_of({{true, "a"}, {true, "b"}, {true, "c"}, {false, "d"}}), 1.5);
  record_task(results_run(document, *compiled("int4")), task, config,
              outcomes_of({{true, "a"}, {false, "x"}, {true, "y"}, {true, "z"}}), 2);
  compare_with_fp32(document);
  ASSERT_TRUE(save_results(path_, document).ok());
  const auto loaded = load_results(path_);
  ASSERT_TRUE(loaded.ok()) << loaded.status().message();
  EXPECT_EQ(*loaded, document);

  const Json& run = (*loaded)["runs"]["int4"];
  EXPECT_TRUE(has_task(run, "perm", config));
  TaskOptions cut;
  cut.max_new_tokens = 5;
  EXPECT_FALSE(has_task(run, "perm", task_config(task, 4, cut)));
  EXPECT_FALSE(has_task(run, "perm", task_config(task, 3, {})));
  const Json& result = run["results"]["perm"];
  EXPECT_EQ(result["exact_match,none"], 0.75);
  EXPECT_EQ(result["reply_tokens,none"], 10.0);
  EXPECT_EQ(result["same_as_fp32,none"], 0.25);
  EXPECT_EQ(result["right_only_here,none"], 1);
  EXPECT_EQ(result["right_only_fp32,none"], 1);
  EXPECT_EQ(result["p_value,none"], 1.0);
  EXPECT_EQ(result["buckets"]["short"], (Json{{"n", 2}, {"right", 2}}));
  EXPECT_EQ(result["buckets"]["long"], (Json{{"n", 2}, {"right", 1}}));
  EXPECT_EQ(run["total_evaluation_time_seconds"], 2.0);
  EXPECT_FALSE(summary(*loaded)["runs"]["int4"].contains("samples"));
}

TEST_F(ResultsTest, RepliesAreNotAskedForTwice) {
  Json document = new_results("m", "f");
  Task task = task_of(4);
  for (std::size_t i = 0; i < task.samples.size(); ++i) {
    task.samples[i].max_new_tokens = i == 1 ? 10 : 20;
  }
  Json& run = results_run(document, *compiled("int8"));
  std::vector<SampleOutcome> outcomes =
      outcomes_of({{true, "a"}, {false, "b"}, {true, "c"}, {false, ""}});
  outcomes[2].status = {Code::kNotFinite, "a state that is not finite"};
  const Json config = task_config(task, 4, {});
  record_stopped(run, task, config, outcomes, 1.5);
  record_stopped(run, task, config, {outcomes.begin(), outcomes.begin() + 1},
                 1);  // less is kept out
  EXPECT_EQ(run["total_evaluation_time_seconds"], 2.5);
  EXPECT_FALSE(has_task(run, "perm", config));
  ASSERT_TRUE(save_results(path_, document).ok());
  const auto loaded = load_results(path_);
  ASSERT_TRUE(loaded.ok()) << loaded.status().message();
  EXPECT_FALSE(summary(*loaded)["runs"]["int8"].contains("stopped"));

  // What came to its end and did not fail, whatever the number of samples wanted.
  const auto known = known_outcomes((*loaded)["runs"]["int8"], task, task_config(task, 3, {}), {});
  ASSERT_EQ(known.size(), 2U);
  EXPECT_TRUE(known.at("0").right);
  EXPECT_FALSE(known.at("0").truncated);
  EXPECT_EQ(known.at("0").hash, "a");
  EXPECT_EQ(known.at("0").n_tokens, 10);
  EXPECT_FALSE(known.at("1").right);
  EXPECT_TRUE(known.at("1").truncated) << "10 tokens are all that it may have";
  // Not for other limits or another file.
  TaskOptions cut;
  cut.max_new_tokens = 5;
  EXPECT_TRUE(known_outcomes(run, task, task_config(task, 4, cut), cut).empty());
  Task other = task;
  other.digest = "other";
  EXPECT_TRUE(known_outcomes(run, other, task_config(other, 4, {}), {}).empty());

  outcomes[2].status = {};
  outcomes[3].hash = "d";
  record_task(run, task, config, outcomes, 1);
  EXPECT_FALSE(run.contains("stopped"));
  EXPECT_EQ(known_outcomes(run, task, task_config(task, 2, {}), {}).size(), 4U);
  // A fourth of the samples left out is another piece, of the same replies.
  const Json without = task_config(task, 3, {}, {"3", "elsewhere"});
  EXPECT_NE(without, task_config(task, 3, {}));
  EXPECT_EQ(task_config(task, 4, {}, {"elsewhere"}), config);
  EXPECT_EQ(known_outcomes(run, task, without, {}).size(), 4U);

  // A smaller piece forgets nothing of a larger one, complete or stopped.
  record_task(run, task, task_config(task, 1, {}), {outcomes[2]}, 1);
  EXPECT_EQ(run["samples"]["perm"].size(), 1U);
  EXPECT_EQ(known_outcomes(run, task, config, {}).size(), 4U);
  record_stopped(run, task, config, {outcomes[3]}, 1);
  EXPECT_EQ(known_outcomes(run, task, config, {}).size(), 4U);
  // Replies of another file of the same name make way, however many they are.
  record_stopped(run, other, task_config(other, 4, {}), {outcomes[0]}, 1);
  EXPECT_EQ(known_outcomes(run, other, task_config(other, 4, {}), {}).size(), 1U);
}

TEST_F(ResultsTest, ARunOfOtherOptionsStartsAgain) {
  Json document = new_results("m", "f");
  const Task task = task_of(1);
  record_task(results_run(document, *compiled("int8")), task, task_config(task, 1, {}),
              outcomes_of({{true, "a"}}), 1);
  EXPECT_TRUE(results_run(document, *compiled("int8"))["results"].contains("perm"));
  document["runs"]["int8"]["plan_fingerprint"] = "another";
  EXPECT_FALSE(results_run(document, *compiled("int8"))["results"].contains("perm"));
}

ForcedResult some_forced(std::int64_t context, std::int64_t n_windows) {
  ForcedResult r = empty_forced_result(context);
  r.n_windows = n_windows;
  for (PositionBucket& b : r.buckets) {
    b.n = (b.end - b.begin) * n_windows;
    b.nll = 2.0 / 3 * static_cast<double>(b.n);
    b.reference_nll = 0.5 * static_cast<double>(b.n);
    b.kl = 0.1 * static_cast<double>(b.n);
    b.n_agree = b.n / 2;
  }
  for (StateDrift& d : r.drift) {
    d.n = 3;
    d.relative_error = 1.0 / 3;
    d.n_by_head = 1;
    d.by_head = {0.25, 1.0 / 7};
  }
  return r;
}

TEST_F(ResultsTest, ForcedSumsGoOnWhereTheyWere) {
  ForcedOptions options;
  options.context = 1024;
  const Json config = forced_config("digest", options);
  Json document = new_results("m", "f");
  Json& run = results_run(document, *compiled("int8"));
  EXPECT_EQ(forced_so_far(run, "text@1024", config).n_windows, 0);
  const ForcedResult some = some_forced(1024, 5);
  record_forced(run, "text@1024", config, some, 1);
  ASSERT_TRUE(save_results(path_, document).ok());
  const Json loaded = load_results(path_).value();
  const ForcedResult back = forced_so_far(loaded["runs"]["int8"], "text@1024", config);
  EXPECT_EQ(back.n_windows, 5);
  ASSERT_EQ(back.buckets.size(), some.buckets.size());
  for (std::size_t i = 0; i < some.buckets.size(); ++i) {
    EXPECT_EQ(back.buckets[i].n, some.buckets[i].n);
    EXPECT_EQ(back.buckets[i].nll, some.buckets[i].nll);  // bit for bit through JSON
    EXPECT_EQ(back.buckets[i].n_agree, some.buckets[i].n_agree);
  }
  EXPECT_EQ(back.drift[0].relative_error, some.drift[0].relative_error);
  EXPECT_EQ(back.drift[0].by_head, some.drift[0].by_head);
  EXPECT_EQ(back.drift[0].n_by_head, 1);
  EXPECT_EQ(
      forced_so_far(loaded["runs"]["int8"], "text@1024", forced_config("other", options)).n_windows,
      0);
  // A sum that was not finite: nothing can be added to it, so the piece starts again.
  for (const auto& [list, key] :
       {std::pair("buckets", "kl"), std::pair("drift", "relative_error")}) {
    Json damaged = loaded["runs"]["int8"];
    damaged["forced"]["text@1024"][list][0][key] = nullptr;
    EXPECT_EQ(forced_so_far(damaged, "text@1024", config).n_windows, 0) << list;
  }
  const Json& result = loaded["runs"]["int8"]["results"]["text@1024"];
  EXPECT_NEAR(result["perplexity,none"].get<double>(), std::exp(2.0 / 3), 1e-12);
  EXPECT_NEAR(result["excess_nll,none"].get<double>(), 2.0 / 3 - 0.5, 1e-12);
  EXPECT_NEAR(result["kl,none"].get<double>(), 0.1, 1e-12);
}

TEST_F(ResultsTest, HarnessFilesHoldARunAlone) {
  Json document = new_results("m", "f");
  const Task task = task_of(2);
  record_task(results_run(document, *compiled("int8")), task, task_config(task, 2, {}),
              outcomes_of({{true, "a"}, {false, "b"}}), 1.5);
  const Json harness = harness_results(document, "int8");
  EXPECT_EQ(harness["results"]["perm"]["exact_match,none"], 0.5);
  EXPECT_FALSE(harness["results"]["perm"].contains("buckets"));  // no metric of theirs
  for (const char* key :
       {"group_subtasks", "configs", "versions", "n-shot", "n-samples", "higher_is_better"}) {
    EXPECT_TRUE(harness[key].contains("perm")) << key;
  }
  EXPECT_EQ(harness["model_name"], "m");
  EXPECT_THAT(harness["config"]["model_args"]["state"].get<std::string>(), HasSubstr("int8,"));
}

// A file of an earlier version names fewer options; it is the same scheme.
TEST_F(ResultsTest, ShorterNamesOfTheSameSchemeGoOn) {
  Json document = new_results("m", "f");
  const Task task = task_of(1);
  record_task(results_run(document, *compiled("int8")), task, task_config(task, 1, {}),
              outcomes_of({{true, "a"}}), 1);
  document["runs"]["int8"]["scheme"] =
      "int8,period=1,prefill=once,beta=f32,rounding=nearest,layout=row,group=none,axis=value";
  EXPECT_TRUE(results_run(document, *compiled("int8"))["results"].contains("perm"));
  document["runs"]["int8"]["scheme"] = "int8,layout=column";
  EXPECT_FALSE(results_run(document, *compiled("int8"))["results"].contains("perm"));
}

TEST_F(ResultsTest, HeadsAndPlansAreKeptWhenMerged) {
  Json document = new_results("m", "f");
  HeadStatistics endless;
  endless.half_life = INFINITY;
  record_heads(document, "text", 64, {{endless, HeadStatistics{.half_life = 12}}});
  const auto merged = merge_results({new_results("m", "f"), document});
  ASSERT_TRUE(merged.ok());
  EXPECT_EQ((*merged)["heads"]["layers"][0][1]["half_life"], 12.0);
  ASSERT_TRUE(save_results(path_, *merged).ok());
  EXPECT_TRUE(load_results(path_).value()["heads"]["layers"][0][0]["half_life"].is_null());
}

TEST_F(ResultsTest, MergeTakesTheLargerPieceAndRefusesMixtures) {
  const Task task = task_of(2);
  Json small = new_results("m", "f");
  record_task(results_run(small, *compiled("int8")), task, task_config(task, 1, {}),
              outcomes_of({{true, "a"}}), 1);
  Json large = new_results("m", "f");
  record_task(results_run(large, *compiled("int8")), task, task_config(task, 2, {}),
              outcomes_of({{true, "a"}, {false, "b"}}), 1);
  record_task(results_run(large, *compiled("fp32")), task, task_config(task, 2, {}),
              outcomes_of({{true, "a"}, {false, "b"}}), 1);
  for (const auto& documents : {std::vector<Json>{small, large}, std::vector<Json>{large, small}}) {
    const auto merged = merge_results(documents);
    ASSERT_TRUE(merged.ok());
    EXPECT_EQ((*merged)["runs"]["int8"]["results"]["perm"]["exact_match,none"], 0.5);
    EXPECT_EQ((*merged)["runs"]["int8"]["results"]["perm"]["same_as_fp32,none"], 1.0);
  }
  EXPECT_EQ(merge_results({small, new_results("m", "g")}).status().code(), Code::kMismatch);
  Json other_plan = large;
  other_plan["runs"]["int8"]["plan_fingerprint"] = "p";
  EXPECT_EQ(merge_results({small, other_plan}).status().code(), Code::kMismatch);
}

TEST_F(ResultsTest, RefusesOtherFiles) {
  const Json good = [] {
    Json document = new_results("m", "f");
    const Task task = task_of(1);
    record_task(results_run(document, *compiled("int8")), task, task_config(task, 1, {}),
                outcomes_of({{true, "a"}}), 1);
    return document;
  }();
  std::vector<std::string> texts = {"", "[]", "{}", "{\"format\": \"statepack-eval-1\"}", "null"};
  const auto spoilt = [&](const std::function<void(Json&)>& change) {
    Json bad = good;
    change(bad);
    texts.push_back(bad.dump());
  };
  spoilt([](Json& d) { d["format"] = "statepack-eval-2"; });
  spoilt([](Json& d) { d["runs"]["int8"] = 4; });
  spoilt([](Json& d) { d["runs"]["int8"]["results"]["perm"] = 4; });
  spoilt([](Json& d) { d["runs"]["int8"]["samples"]["perm"][0].erase("hash"); });
  spoilt([](Json& d) { d["runs"]["int8"]["samples"]["perm"][0] = "x"; });
  spoilt([](Json& d) { d["runs"]["int8"].erase("bits"); });
  spoilt([](Json& d) { d["runs"]["int8"]["results"]["perm"]["buckets"]["short"]["n"] = "x"; });
  spoilt([](Json& d) { d["runs"]["int8"]["forced"]["t"] = {{"buckets", {7}}}; });
  spoilt([](Json& d) { d["heads"] = 7; });
  spoilt([](Json& d) { d.erase("model_name"); });
  for (const std::string& text : texts) {
    std::ofstream(path_) << text;
    const auto loaded = load_results(path_);
    ASSERT_FALSE(loaded.ok()) << text;
    EXPECT_EQ(loaded.status().code(), Code::kCorrupt);
    EXPECT_THAT(loaded.status().message(), HasSubstr(path_));
  }
  std::ofstream(path_) << good.dump();
  EXPECT_TRUE(load_results(path_).ok());
  EXPECT_EQ(load_results(path_ + ".none").status().code(), Code::kNotFound);
}

TEST(EmptyForcedResult, BucketsCoverTheContextAndEndAtTheMarks) {
  for (const std::int64_t context : {2, 64, 65, 100, 1024, 4096, 5000, 16384}) {
    const ForcedResult r = empty_forced_result(context);
    std::int64_t at = 0;
    for (const PositionBucket& b : r.buckets) {
      EXPECT_EQ(b.begin, at);
      EXPECT_LT(b.begin, b.end);
      at = b.end;
    }
    EXPECT_EQ(at, context - 1);
  }
  const ForcedResult r = empty_forced_result(16384);
  for (const std::int64_t mark : {128, 1024, 4096}) {
    const auto found = std::find_if(r.buckets.begin(), r.buckets.end(),
                                    [&](const PositionBucket& b) { return b.end == mark; });
    ASSERT_NE(found, r.buckets.end()) << mark;
    EXPECT_EQ(found->begin, mark / 8 * 7);
  }
  EXPECT_EQ(r.buckets.back().begin, 16384 / 8 * 7);
}

}  // namespace
}  // namespace statepack
