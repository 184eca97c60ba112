#include "eval/figures.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "eval/plot.hpp"
#include "eval/report_tables.hpp"
#include "eval/statistics.hpp"

namespace statepack {
namespace {

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

double number(const Json& json, std::initializer_list<std::string_view> path) {
  const Json* found = find_value(json, path);
  return found != nullptr && found->is_number() ? found->get<double>() : kNone;
}

const Json& run_of(const Json& document, const std::string& name) { return document["runs"][name]; }

// The forced piece of the longest windows.
std::string longest_text(const Json& document) {
  std::string longest;
  std::int64_t most = 0;
  for (const std::string& piece : pieces_with(document, "kl,none")) {
    const std::int64_t context = forced_shape(document, piece).context;
    if (context > most) most = context, longest = piece;
  }
  return longest;
}

// A mean over the last eighth of the windows.
double late_kl(const Json& run, const std::string& piece) {
  const Json* buckets = find_value(run, {"forced", piece, "buckets"});
  if (buckets == nullptr || !buckets->is_array() || buckets->empty()) return kNone;
  const double n = number(buckets->back(), {"n"});
  return n > 0 ? number(buckets->back(), {"kl"}) / n : kNone;
}

// Of the tasks that every run has: otherwise the mean would compare different questions.
double mean_accuracy(const Json& document, const Json& run) {
  double sum = 0;
  int n = 0;
  for (const std::string& task : pieces_with(document, "exact_match,none")) {
    const bool everywhere =
        std::all_of(document["runs"].begin(), document["runs"].end(), [&](const Json& other) {
          return find_value(other, {"results", task}) != nullptr;
        });
    if (!everywhere) continue;
    sum += number(run, {"results", task, "exact_match,none"});
    ++n;
  }
  return n > 0 ? 100 * sum / n : kNone;
}

// One plot of a measure against resident bits, every scheme a point with its name.
void add_trade_off(const Json& document, const std::string& title, const std::string& y_label,
                   bool high, const std::function<double(const Json&)>& measure,
                   std::vector<std::string>& svgs) {
  Plot plot{.title = title,
            .x_label = "resident bits a state value",
            .y_label = y_label,
            .log_x = true,
            .log_y = !high,
            .width = 900,
            .height = 520};
  std::vector<double> bits, values;
  for (const std::string& name : scheme_names(document)) {
    const double x = number(run_of(document, name), {"bits", "resident"});
    const double y = measure(run_of(document, name));
    if (!(x > 0) || !std::isfinite(y) || (!high && !(y > 0))) continue;
    plot.series.push_back({name, {x}, {y}, false, true});
    bits.push_back(x);
    values.push_back(y);
  }
  if (bits.empty()) return;
  for (const std::size_t i : pareto_front(bits, values, high)) {
    plot.front_x.push_back(bits[i]);
    plot.front_y.push_back(values[i]);
  }
  plot.front_name = "no scheme here or below it in bits is better";
  svgs.push_back(svg(plot));
}

struct Range {
  const char* words;
  double below;
};
constexpr Range kRanges[] = {{"up to 5 bits", 5},
                             {"5 to 7 bits", 7},
                             {"7 to 10 bits", 10},
                             {"10 bits and more", std::numeric_limits<double>::infinity()}};

// A line a scheme, in plots by resident bits: thirty lines in one cannot be read.
void add_curves(const Json& document, const std::string& piece, const std::string& y_label,
                bool log_y, const std::function<double(const Json& bucket)>& value,
                std::vector<std::string>& svgs) {
  double from = 0;
  for (const Range& range : kRanges) {
    Plot plot{.title = fmt::format("{}, resident {}", y_label, range.words),
              .x_label = "position in the text, tokens",
              .y_label = y_label,
              .log_x = true,
              .log_y = log_y,
              .width = 530,
              .height = 330};
    for (const std::string& name : scheme_names(document)) {
      const double bits = number(run_of(document, name), {"bits", "resident"});
      if (name == kReference || !(bits >= from && bits < range.below)) continue;
      const Json* buckets = find_value(run_of(document, name), {"forced", piece, "buckets"});
      if (buckets == nullptr || !buckets->is_array()) continue;
      Series line{name, {}, {}, true, false};
      for (const Json& bucket : *buckets) {
        const double n = number(bucket, {"n"});
        if (!(n > 0)) continue;
        line.x.push_back((number(bucket, {"begin"}) + number(bucket, {"end"})) / 2);
        line.y.push_back(value(bucket) / n);
      }
      plot.series.push_back(std::move(line));
    }
    from = range.below;
    if (!plot.series.empty()) svgs.push_back(svg(plot));
  }
}

// A number of every head, layer by layer; NaN where it is missing (an infinite half-life).
std::vector<double> of_heads(const Json& document, const char* key) {
  std::vector<double> values;
  const Json* layers = find_value(document, {"heads", "layers"});
  if (layers == nullptr || !layers->is_array()) return values;
  for (const Json& layer : *layers) {
    for (const Json& head : layer) values.push_back(number(head, {key}));
  }
  return values;
}

void add_lifetimes(const Json& document, const std::string& piece, std::vector<std::string>& svgs) {
  const std::vector<double> half_lives = of_heads(document, "half_life");
  if (half_lives.empty()) return;
  for (const std::string& name : scheme_names(document)) {
    const Json* drifts = find_value(run_of(document, name), {"forced", piece, "drift"});
    if (name == kReference || drifts == nullptr || !drifts->is_array()) continue;
    const Json* last = nullptr;
    for (const Json& drift : *drifts) {
      if (number(drift, {"n_by_head"}) > 0) last = &drift;
    }
    if (last == nullptr || (*last)["by_head"].size() != half_lives.size()) continue;
    Series points{"a head", {}, {}, false, false};
    for (std::size_t h = 0; h < half_lives.size(); ++h) {
      const Json& sum = (*last)["by_head"][h];
      if (!std::isfinite(half_lives[h]) || !sum.is_number()) continue;
      points.x.push_back(half_lives[h]);
      points.y.push_back(sum.get<double>() / number(*last, {"n_by_head"}));
    }
    const double rho = spearman(points.x, points.y);
    Plot plot{.title = fmt::format("{}: rho {}", name,
                                   std::isfinite(rho) ? fmt::format("{:.2f}", rho) : "-"),
              .x_label = "half-life, tokens",
              .y_label = fmt::format("state error after {}", last->value("position", 0)),
              .log_x = true,
              .log_y = true,
              .width = 300,
              .height = 220,
              .legend = false};
    plot.series.push_back(std::move(points));
    svgs.push_back(svg(plot));
  }
}

void add_outliers(const Json& document, std::vector<std::string>& svgs) {
  const std::vector<double> rows = of_heads(document, "row_peak");
  const std::vector<double> columns = of_heads(document, "column_peak");
  if (rows.empty()) return;
  Plot plot{.title = "largest to median RMS of a head's rows and columns",
            .x_label = "head, layer by layer",
            .y_label = "largest / median",
            .log_y = true,
            .width = 900,
            .height = 320};
  plot.series = {{"key rows", {}, rows, false, false},
                 {"value columns", {}, columns, false, false}};
  for (Series& series : plot.series) {
    series.x.resize(series.y.size());
    std::iota(series.x.begin(), series.x.end(), 0.0);
  }
  svgs.push_back(svg(plot));
}

void add_plans(const Json& document, std::vector<std::string>& svgs) {
  for (const std::string& name : scheme_names(document)) {
    const Json* bits = find_value(run_of(document, name), {"plan_bits"});
    if (bits == nullptr || !bits->is_array()) continue;
    HeatMap map{name, "layer", "head", {}};
    for (const Json& layer : *bits) {
      auto& row = map.cells.emplace_back();
      for (const Json& head : layer) row.push_back(head.is_number() ? head.get<double>() : 0);
    }
    svgs.push_back(svg(map));
  }
}

}  // namespace

std::vector<std::size_t> pareto_front(const std::vector<double>& x, const std::vector<double>& y,
                                      bool high) {
  std::vector<std::size_t> order(x.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  const auto better = [&](double a, double b) { return high ? a > b : a < b; };
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return x[a] != x[b] ? x[a] < x[b] : better(y[a], y[b]);
  });
  std::vector<std::size_t> front;
  for (const std::size_t i : order) {
    if (front.empty() || better(y[i], y[front.back()])) front.push_back(i);
  }
  return front;
}

std::vector<Figure> figures(const Json& document) {
  std::vector<Figure> all;
  const auto add = [&](Figure figure) {
    if (!figure.svgs.empty()) all.push_back(std::move(figure));
  };
  const std::string text = longest_text(document);

  Figure trade{"Accuracy against bits",
               "Left and up (accuracy) or left and down (KL) is better. The dashed line joins the "
               "schemes that no other beats at equal or fewer resident bits.",
               {}};
  add_trade_off(
      document, "mean over tasks", "right answers, %", true,
      [&](const Json& run) { return mean_accuracy(document, run); }, trade.svgs);
  if (!text.empty()) {
    add_trade_off(
        document, fmt::format("KL to fp32 at the end of {}", text), "KL, nats", false,
        [&](const Json& run) { return late_kl(run, text); }, trade.svgs);
  }
  add(std::move(trade));

  if (!text.empty()) {
    Figure by_position{
        "By position",
        fmt::format("Forced decode of {}: both read the same text token by token.", text),
        {}};
    add_curves(
        document, text, "KL to fp32, nats", true, [](const Json& b) { return number(b, {"kl"}); },
        by_position.svgs);
    add_curves(
        document, text, "excess loss over fp32, nats", false,
        [](const Json& b) { return number(b, {"nll"}) - number(b, {"reference_nll"}); },
        by_position.svgs);
    add(std::move(by_position));
    Figure lifetimes{"State error against half-life",
                     "One point a head: how far its state is from fp32's, against the tokens after "
                     "which its gate has forgotten half. rho is Spearman's rank correlation.",
                     {}};
    add_lifetimes(document, text, lifetimes.svgs);
    add(std::move(lifetimes));
  }
  Figure outliers{"Outliers of the states", "Of fp32 states on the text named below.", {}};
  if (const Json* heads = find_value(document, {"heads"}); heads != nullptr) {
    outliers.note = fmt::format("Of fp32 states along {} tokens of {}.", heads->value("tokens", 0),
                                heads->value("text", ""));
  }
  add_outliers(document, outliers.svgs);
  add(std::move(outliers));
  Figure plans{"Where plans spend their bits",
               "Mean width of a head's rows; 16 stands for half precision.",
               {}};
  add_plans(document, plans.svgs);
  add(std::move(plans));
  return all;
}

}  // namespace statepack
