#include "serve/metrics.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace statepack::serve {

Histogram::Histogram(std::vector<double> bounds)
    : bounds_(std::move(bounds)), counts_(bounds_.size() + 1) {}

void Histogram::observe(double value) {
  const auto bucket = std::lower_bound(bounds_.begin(), bounds_.end(), value) - bounds_.begin();
  counts_[static_cast<std::size_t>(bucket)].fetch_add(1, std::memory_order_relaxed);
  sum_.fetch_add(value, std::memory_order_relaxed);
}

std::int64_t Histogram::count(std::size_t bucket) const {
  return counts_[bucket].load(std::memory_order_relaxed);
}

std::string MetricText::label(std::string_view name, std::string_view value) {
  std::string text = fmt::format("{}=\"", name);
  for (const char c : value) {
    if (c == '\n') {
      text += "\\n";
      continue;
    }
    if (c == '"' || c == '\\') text += '\\';
    text += c;
  }
  return text + '"';
}

void MetricText::head(std::string_view name, std::string_view type, std::string_view help) {
  name_ = name;
  text_ += fmt::format("# HELP {0} {1}\n# TYPE {0} {2}\n", name, help, type);
}

void MetricText::sample(double value, Labels labels) {
  std::string all = common_;
  for (const auto& [name, text] : labels) {
    if (!all.empty()) all += ',';
    all += label(name, text);
  }
  line(name_, all, value);
}

void MetricText::line(std::string_view name, const std::string& labels, double value) {
  text_ += fmt::format("{}{}{}{} {}\n", name, labels.empty() ? "" : "{", labels,
                       labels.empty() ? "" : "}", value);
}

void MetricText::counter(std::string_view name, std::string_view help, double value) {
  head(name, "counter", help);
  sample(value);
}

void MetricText::gauge(std::string_view name, std::string_view help, double value) {
  head(name, "gauge", help);
  sample(value);
}

void MetricText::histogram(std::string_view name, std::string_view help,
                           const Histogram& histogram) {
  head(name, "histogram", help);
  const std::string separator = common_.empty() ? "" : ",";
  std::int64_t total = 0;
  for (std::size_t i = 0; i <= histogram.bounds().size(); ++i) {
    total += histogram.count(i);
    const std::string bound = i < histogram.bounds().size()
                                  ? fmt::format("{}", histogram.bounds()[i])
                                  : std::string("+Inf");
    line(fmt::format("{}_bucket", name), common_ + separator + label("le", bound),
         static_cast<double>(total));
  }
  line(fmt::format("{}_sum", name), common_, histogram.sum());
  line(fmt::format("{}_count", name), common_, static_cast<double>(total));
}

}  // namespace statepack::serve
