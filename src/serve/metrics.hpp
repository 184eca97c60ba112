// Counters and histograms in Prometheus' text format. A writer of our own: Debian's package of the
// usual library brings a web server and curl along.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace statepack::serve {

/// Seconds or counts by upper bounds. observe() from any thread.
class Histogram {
 public:
  explicit Histogram(std::vector<double> bounds);
  void observe(double value);

  std::span<const double> bounds() const { return bounds_; }
  std::int64_t count(std::size_t bucket) const;  ///< of that bucket alone; the last is +Inf
  double sum() const { return sum_.load(std::memory_order_relaxed); }

 private:
  std::vector<double> bounds_;
  std::vector<std::atomic<std::int64_t>> counts_;
  std::atomic<double> sum_{0};
};

/// Writes metrics of one name after the other, as the format wants them.
class MetricText {
 public:
  using Labels = std::initializer_list<std::pair<std::string_view, std::string_view>>;
  /// Labels of every sample; model_name, say.
  explicit MetricText(std::string common_labels) : common_(std::move(common_labels)) {}

  /// Names a metric and its type, "counter" or "gauge", before its samples.
  void head(std::string_view name, std::string_view type, std::string_view help);
  void sample(double value, Labels labels = {});
  void counter(std::string_view name, std::string_view help, double value);
  void gauge(std::string_view name, std::string_view help, double value);
  void histogram(std::string_view name, std::string_view help, const Histogram& histogram);

  const std::string& text() const { return text_; }

  /// `name="value"` with the value's quotes, backslashes and line ends escaped.
  static std::string label(std::string_view name, std::string_view value);

 private:
  void line(std::string_view name, const std::string& labels, double value);
  std::string common_, name_, text_;
};

/// What the server measures itself; what the engine counts is asked of it when it is wanted.
struct ServerMetrics {
  Histogram time_to_first_token_s{{0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5,
                                   0.75,  1,     2.5,  5,    7.5,  10,   20,   40,  80,   160}};
  Histogram inter_token_latency_s{{0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2,
                                   0.3, 0.4, 0.5, 0.75, 1, 2.5, 5}};
  Histogram e2e_latency_s{
      {0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 240, 480, 960}};
  Histogram queue_time_s{
      {0.001, 0.01, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 60, 120}};
  Histogram prompt_tokens{
      {1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000}};
  Histogram reply_tokens{{1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000}};
  std::atomic<std::int64_t> requests{0}, rejected{0}, disconnects{0};
};

}  // namespace statepack::serve
