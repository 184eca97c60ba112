#include "eval/report.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <set>

#include "eval/figures.hpp"
#include "eval/html.hpp"
#include "eval/plot.hpp"
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

// Tags of an XML-like text are balanced: void elements of HTML aside.
void expect_balanced(const std::string& html) {
  std::vector<std::string> open;
  for (std::size_t at = html.find('<'); at != std::string::npos; at = html.find('<', at + 1)) {
    const std::size_t end = html.find('>', at);
    ASSERT_NE(end, std::string::npos);
    std::string tag = html.substr(at + 1, end - at - 1);
    if (tag[0] == '!' || tag.back() == '/' || tag.starts_with("meta")) continue;
    if (tag[0] != '/') {
      open.push_back(tag.substr(0, tag.find(' ')));
      continue;
    }
    ASSERT_FALSE(open.empty()) << tag;
    EXPECT_EQ(open.back(), tag.substr(1));
    open.pop_back();
  }
  EXPECT_TRUE(open.empty());
}

Json document_with_everything() {
  Json d = document();
  HeadStatistics head;
  std::vector<std::vector<HeadStatistics>> heads(1);
  for (int h = 0; h < 4; ++h) {
    head.half_life = 10 << h;
    head.row_peak = 2 + h;
    head.column_peak = 3;
    heads[0].push_back(head);
  }
  record_heads(d, "wiki", 4096, heads);
  Json& drift = d["runs"]["int4"]["forced"]["wiki@1024"]["drift"];
  drift[0]["n_by_head"] = 2;
  drift[0]["by_head"] = {0.2, 0.4, 0.6, 0.8};
  d["runs"]["int4"]["plan_bits"] = {{4, 6, 8, 16}};
  return d;
}

TEST(HtmlReport, IsOnePageThatNeedsNothingElse) {
  Json d = document_with_everything();
  d["model_name"] = "<b>&\"x";
  const std::string html = html_report({&d, 1}, "statepack eval --report a<b.html");
  expect_balanced(html);
  EXPECT_THAT(html, HasSubstr("&lt;b&gt;&amp;&quot;x"));
  EXPECT_THAT(html, HasSubstr("a&lt;b.html"));
  for (const char* outside : {"<script", "src=", "href=", "@import", "url(", "<link", "<b>"}) {
    EXPECT_THAT(html, Not(HasSubstr(outside)));
  }
  for (const char* heading :
       {"Accuracy against bits", "By position", "State error against half-life",
        "Outliers of the states", "Where plans spend their bits", "Task perm", "Text wiki@1024"}) {
    EXPECT_THAT(html, HasSubstr(heading));
  }
  // Error grows with half-life in every pair.
  EXPECT_THAT(html, HasSubstr("int4: rho 1.00"));
}

// Every part of a results file in turn is of another kind, or missing: the file is refused, or a
// report of it can be made.
TEST(HtmlReport, DamagedResultsAreRefusedOrReported) {
  const Json good = document_with_everything();
  const std::string path = testing::TempDir() + "damaged_" + std::to_string(::getpid()) + ".json";
  int n_refused = 0, n_reported = 0;
  const auto try_one = [&](const Json& bad) {
    std::ofstream(path) << bad.dump();
    const auto loaded = load_results(path);
    if (!loaded.ok()) {
      EXPECT_EQ(loaded.status().code(), Code::kCorrupt);
      ++n_refused;
      return;
    }
    const auto models = merge_by_model({*loaded});
    if (!models.ok()) return;
    EXPECT_FALSE(html_report(*models, "c").empty());
    EXPECT_FALSE(markdown_report(*models, "c").empty());
    ++n_reported;
  };
  const Json flat = good.flatten();
  std::set<std::string> places;
  for (const auto& [place, value] : flat.items()) {
    for (std::size_t end = place.find('/', 1); end != std::string::npos;
         end = place.find('/', end + 1)) {
      places.insert(place.substr(0, end));
    }
    places.insert(place);
  }
  for (const std::string& place : places) {
    const Json::json_pointer at(place);
    for (const Json& other : {Json(7), Json("x"), Json(), Json{7}, Json::object(), Json(-1e300)}) {
      SCOPED_TRACE(place + " = " + other.dump());
      Json bad = good;
      bad[at] = other;
      ASSERT_NO_THROW(try_one(bad));
    }
    Json bad = good;
    Json& parent = bad[at.parent_pointer()];
    if (!parent.is_object()) continue;
    parent.erase(at.back());
    SCOPED_TRACE(place + " missing");
    ASSERT_NO_THROW(try_one(bad));
  }
  // A sum that was not finite is null in a file that is whole.
  Json endless = good;
  for (const char* key : {"nll", "kl", "excess_squares"}) {
    endless["runs"]["int4"]["forced"]["wiki@1024"]["buckets"][0][key] = nullptr;
  }
  const int n_before = n_reported;
  try_one(endless);
  EXPECT_EQ(n_reported, n_before + 1);
  EXPECT_GT(n_refused, 100);
  EXPECT_GT(n_reported, 100);
  std::filesystem::remove(path);
}

TEST(HtmlReport, LeavesOutFiguresWithoutNumbers) {
  Json d = document();
  d["runs"]["int4"].erase("forced");
  const std::string html = html_report({&d, 1}, "c");
  expect_balanced(html);
  EXPECT_THAT(html, HasSubstr("Accuracy against bits"));
  EXPECT_THAT(html, Not(HasSubstr("State error against half-life")));
  const Json nothing = new_results("m", "f");
  expect_balanced(html_report({&nothing, 1}, "c"));
}

TEST(Figures, ParetoFrontHasWhatNothingBeats) {
  //                              a  b  c  d   e: c is beaten by b, d by a; e has most
  const std::vector<double> bits = {4, 6, 8, 4, 32}, right = {50, 80, 70, 40, 90};
  EXPECT_EQ(pareto_front(bits, right, true), (std::vector<std::size_t>{0, 1, 4}));
  const std::vector<double> kl = {0.5, 0.1, 0.2, 0.9, 0.01};
  EXPECT_EQ(pareto_front(bits, kl, false), (std::vector<std::size_t>{0, 1, 4}));
  EXPECT_TRUE(pareto_front({}, {}, true).empty());
}

TEST(Plot, LeavesOutWhatAnAxisCannotShow) {
  Plot plot{.title = "t", .x_label = "x", .y_label = "y", .log_y = true};
  plot.series.push_back({"s", {1, 2, 3}, {0, -1, NAN}, true, false});
  EXPECT_THAT(svg(plot), HasSubstr("nothing was measured"));
  plot.series[0].y = {0, 1, INFINITY};
  const std::string one = svg(plot);
  expect_balanced(one);
  EXPECT_THAT(one, Not(HasSubstr("nan")));
  EXPECT_THAT(one, Not(HasSubstr("inf\"")));
}

TEST(Plot, NumbersThatDifferByRoundingShareATick) {
  Plot plot{.title = "t", .x_label = "x", .y_label = "y"};
  // 100 (0.3 + 0.0) / 2 and 100 (0.2 + 0.1) / 2 are neighbours.
  plot.series.push_back({"s", {4, 8}, {100 * (0.3 + 0.0) / 2, 100 * (0.2 + 0.1) / 2}, true, false});
  ASSERT_NE(plot.series[0].y[0], plot.series[0].y[1]);
  const std::string near = svg(plot);
  expect_balanced(near);
  EXPECT_LT(near.size(), 20000U);
  for (const bool log : {false, true}) {
    plot.log_y = log;
    plot.series[0].y = {5e-324, 1.7e308};
    const std::string far = svg(plot);
    expect_balanced(far);
    EXPECT_LT(far.size(), 20000U);
  }
}

}  // namespace
}  // namespace statepack
