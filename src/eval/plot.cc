#include "eval/plot.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

namespace statepack {
namespace {

constexpr std::array<const char*, 7> kColours = {"#0072B2", "#D55E00", "#009E73", "#CC79A7",
                                                 "#000000", "#E69F00", "#56B4E9"};
constexpr std::size_t kMarkers = 7;
constexpr double kLeft = 64, kRight = 16, kTop = 30, kBottom = 46, kLegendRow = 15;
constexpr double kFont = 11, kLetter = 6.1;  // px; the mean width of a letter

std::string marker(std::size_t series, double x, double y, double r = 4) {
  const char* colour = kColours[series % kColours.size()];
  const auto shape = [&](const std::string& path, bool filled) {
    return fmt::format("<path d=\"{}\" fill=\"{}\" stroke=\"{}\" stroke-width=\"1.6\"/>", path,
                       filled ? colour : "none", colour);
  };
  switch ((series + series / kColours.size()) % kMarkers) {
    case 0:
      return fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"{:.1f}\" fill=\"{}\"/>", x, y, r,
                         colour);
    case 1:
      return shape(
          fmt::format("M{:.1f} {:.1f}h{:.1f}v{:.1f}h{:.1f}z", x - r, y - r, 2 * r, 2 * r, -2 * r),
          true);
    case 2:
      return shape(fmt::format("M{:.1f} {:.1f}l{:.1f} {:.1f}h{:.1f}z", x, y - r, r, 2 * r, -2 * r),
                   true);
    case 3:
      return shape(
          fmt::format("M{:.1f} {:.1f}l{:.1f} {:.1f}l{:.1f} {:.1f}l{:.1f} {:.1f}z", x, y - 1.3 * r,
                      1.3 * r, 1.3 * r, -1.3 * r, 1.3 * r, -1.3 * r, -1.3 * r),
          false);
    case 4:
      return shape(fmt::format("M{:.1f} {:.1f}l{:.1f} {:.1f}m0 {:.1f}l{:.1f} {:.1f}", x - r, y - r,
                               2 * r, 2 * r, -2 * r, -2 * r, 2 * r),
                   false);
    case 5:
      return shape(fmt::format("M{:.1f} {:.1f}h{:.1f}M{:.1f} {:.1f}v{:.1f}", x - r, y, 2 * r, x,
                               y - r, 2 * r),
                   false);
    default:
      return shape(
          fmt::format("M{:.1f} {:.1f}h{:.1f}l{:.1f} {:.1f}z", x - r, y - r, 2 * r, -r, 2 * r),
          false);
  }
}

std::string text(double x, double y, std::string_view anchor, const std::string& words,
                 std::string_view more = "") {
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\"{}>{}</text>", x, y, anchor,
                     more, escape_html(words));
}

// One axis: from data to pixels.
class Axis {
 public:
  Axis(bool log, double begin, double end) : log_(log), begin_(begin), end_(end) {}

  bool shows(double v) const { return std::isfinite(v) && (!log_ || v > 0); }
  void include(double v) {
    if (!shows(v)) return;
    low_ = std::min(low_, v);
    high_ = std::max(high_, v);
  }
  bool empty() const { return low_ > high_; }

  /// Widens the range a little, so that no point lies on the frame.
  void settle() {
    if (empty()) return;
    if (log_) {
      const double margin = std::max(0.03 * (std::log10(high_) - std::log10(low_)), 0.05);
      low_ = std::max(low_ * std::pow(10, -margin), std::numeric_limits<double>::denorm_min());
      high_ = std::min(high_ * std::pow(10, margin), std::numeric_limits<double>::max());
    } else {
      // Numbers that differ by rounding alone are one: ticks between them could not be told apart.
      const double largest = std::max(std::abs(low_), std::abs(high_));
      const double margin =
          high_ - low_ > 1e-9 * largest ? 0.04 * (high_ - low_) : std::max(1e-9, 0.1 * largest);
      low_ -= margin;
      high_ += margin;
    }
  }

  double at(double v) const {
    const double share = log_ ? (std::log(v) - std::log(low_)) / (std::log(high_) - std::log(low_))
                              : (v - low_) / (high_ - low_);
    return begin_ + share * (end_ - begin_);
  }

  std::vector<double> ticks() const {
    std::vector<double> ticks;
    if (log_) {
      const double decades = std::log10(high_) - std::log10(low_);
      const int stride = static_cast<int>(std::ceil(decades / 7));
      for (int e = static_cast<int>(std::floor(std::log10(low_))); e <= std::log10(high_); ++e) {
        if (stride > 1 && e % stride != 0) continue;
        for (const double m : {1.0, 2.0, 5.0}) {
          const double v = m * std::pow(10, e);
          if ((m == 1 || decades < 2) && v >= low_ && v <= high_) ticks.push_back(v);
        }
      }
      return ticks;
    }
    const double raw = (high_ - low_) / 6;
    const double magnitude = std::pow(10, std::floor(std::log10(raw)));
    double step = magnitude;
    for (const double m : {2.0, 5.0, 10.0}) {
      if (raw > step) step = m * magnitude;
    }
    const double first = std::ceil(low_ / step);
    for (int i = 0; i <= kMostTicks && (first + i) * step <= high_; ++i) {
      ticks.push_back((first + i) * step);
    }
    return ticks;
  }

 private:
  static constexpr int kMostTicks = 12;  // a step is a sixth of the range or more
  bool log_;
  double begin_, end_;
  double low_ = std::numeric_limits<double>::infinity();
  double high_ = -std::numeric_limits<double>::infinity();
};

struct Box {
  double x, y, width, height;
  bool overlaps(const Box& o) const {
    return x < o.x + o.width && o.x < x + width && y < o.y + o.height && o.y < y + height;
  }
};

// Names beside points, each where it covers no other name or point as far as that is possible.
class Labels {
 public:
  Labels(double left, double right) : left_(left), right_(right) {}
  void avoid(double x, double y) { taken_.push_back({x - 5, y - 5, 10, 10}); }
  std::string place(double x, double y, const std::string& words) {
    const double width = kLetter * static_cast<double>(words.size());
    constexpr std::array<std::array<double, 2>, 10> kOffsets = {{{8, 4},
                                                                 {8, -7},
                                                                 {8, 15},
                                                                 {-8, 4},
                                                                 {-8, -7},
                                                                 {-8, 15},
                                                                 {8, -18},
                                                                 {8, 26},
                                                                 {-8, -18},
                                                                 {-8, 26}}};
    std::array<double, 2> best = kOffsets[0];
    for (const auto& offset : kOffsets) {
      const Box box = box_of(x, y, offset, width);
      const bool free = box.x >= left_ && box.x + box.width <= right_ &&
                        std::none_of(taken_.begin(), taken_.end(),
                                     [&](const Box& other) { return box.overlaps(other); });
      if (!free) continue;
      best = offset;
      break;
    }
    taken_.push_back(box_of(x, y, best, width));
    return text(x + best[0], y + best[1], best[0] < 0 ? "end" : "start", words,
                " paint-order=\"stroke\" stroke=\"#fff\" stroke-width=\"3\"");
  }

 private:
  static Box box_of(double x, double y, const std::array<double, 2>& offset, double width) {
    const double left = offset[0] < 0 ? x + offset[0] - width : x + offset[0];
    return {left, y + offset[1] - kFont + 2, width, kFont};
  }
  double left_, right_;
  std::vector<Box> taken_;
};

std::string open_svg(double width, double height, const std::string& title) {
  return fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0:.0f} {1:.0f}\" "
      "width=\"{0:.0f}\" height=\"{1:.0f}\" role=\"img\" font-family=\"sans-serif\" "
      "font-size=\"{2:.0f}\"><title>{3}</title><rect width=\"100%\" height=\"100%\" "
      "fill=\"#fff\"/>",
      width, height, kFont, escape_html(title));
}

std::string heading(const std::string& words) {
  return text(8, 16, "start", words, " font-weight=\"bold\" font-size=\"12\"");
}

}  // namespace

std::string escape_html(std::string_view raw) {
  std::string out;
  for (const char c : raw) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

std::string svg(const Plot& plot) {
  // The legend stands below, as many names a row as fit.
  std::size_t longest = plot.front_name.size();
  for (const Series& s : plot.series) longest = std::max(longest, s.name.size());
  const double entry_width = kLetter * static_cast<double>(longest) + 30;
  const auto per_row = static_cast<std::size_t>(
      std::max(1.0, std::floor((plot.width - kLeft - kRight) / entry_width)));
  std::vector<std::size_t> in_legend;
  if (plot.legend) {
    for (std::size_t s = 0; s < plot.series.size(); ++s) {
      if (!plot.series[s].label) in_legend.push_back(s);
    }
  }
  const std::size_t n_entries = in_legend.size() + (plot.front_name.empty() ? 0 : 1);
  const std::size_t n_legend_rows = (n_entries + per_row - 1) / per_row;
  const double legend_height = kLegendRow * static_cast<double>(n_legend_rows);
  const double bottom = plot.height - kBottom;

  Axis x(plot.log_x, kLeft, plot.width - kRight), y(plot.log_y, bottom, kTop);
  for (const Series& s : plot.series) {
    for (std::size_t i = 0; i < s.x.size(); ++i) {
      if (!x.shows(s.x[i]) || !y.shows(s.y[i])) continue;
      x.include(s.x[i]);
      y.include(s.y[i]);
    }
  }
  std::string out =
      open_svg(plot.width, plot.height + legend_height, plot.title) + heading(plot.title);
  if (x.empty()) return out + text(kLeft, kTop + 20, "start", "nothing was measured") + "</svg>";
  x.settle();
  y.settle();

  for (const double v : x.ticks()) {
    out += fmt::format("<path d=\"M{0:.1f} {1:.1f}V{2:.1f}\" stroke=\"#ddd\"/>", x.at(v), kTop,
                       bottom);
    out += text(x.at(v), bottom + 14, "middle", fmt::format("{:.4g}", v));
  }
  for (const double v : y.ticks()) {
    out += fmt::format("<path d=\"M{0:.1f} {1:.1f}H{2:.1f}\" stroke=\"#ddd\"/>", kLeft, y.at(v),
                       plot.width - kRight);
    out += text(kLeft - 5, y.at(v) + 4, "end", fmt::format("{:.3g}", v));
  }
  out += fmt::format(
      "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" fill=\"none\" "
      "stroke=\"#444\"/>",
      kLeft, kTop, plot.width - kRight - kLeft, bottom - kTop);
  out += text((kLeft + plot.width - kRight) / 2, bottom + 32, "middle", plot.x_label);
  out += text(0, 0, "middle", plot.y_label,
              fmt::format(" transform=\"translate(14 {:.1f}) rotate(-90)\"", (kTop + bottom) / 2));

  if (!plot.front_x.empty()) {
    std::string path;
    for (std::size_t i = 0; i < plot.front_x.size(); ++i) {
      const double px = x.at(plot.front_x[i]), py = y.at(plot.front_y[i]);
      path += path.empty() ? fmt::format("M{:.1f} {:.1f}", px, py)
                           : fmt::format("H{:.1f}V{:.1f}", px, py);
    }
    path += fmt::format("H{:.1f}", plot.width - kRight);
    out += fmt::format(
        "<path d=\"{}\" fill=\"none\" stroke=\"#777\" stroke-width=\"1.5\" "
        "stroke-dasharray=\"5 3\"/>",
        path);
  }

  Labels labels(kLeft, plot.width - 2);
  std::string points, names;
  for (std::size_t s = 0; s < plot.series.size(); ++s) {
    const Series& series = plot.series[s];
    std::string path;
    for (std::size_t i = 0; i < series.x.size(); ++i) {
      if (!x.shows(series.x[i]) || !y.shows(series.y[i])) continue;
      const double px = x.at(series.x[i]), py = y.at(series.y[i]);
      path += fmt::format("{}{:.1f} {:.1f}", path.empty() ? "M" : "L", px, py);
      points += marker(s, px, py, series.line ? 2.6 : 3.6);
      if (series.label) labels.avoid(px, py);
    }
    if (series.line) {
      out += fmt::format("<path d=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"1.4\"/>", path,
                         kColours[s % kColours.size()]);
    }
  }
  for (const Series& series : plot.series) {
    if (!series.label) continue;
    for (std::size_t i = 0; i < series.x.size(); ++i) {
      if (x.shows(series.x[i]) && y.shows(series.y[i])) {
        names += labels.place(x.at(series.x[i]), y.at(series.y[i]), series.name);
      }
    }
  }
  out += points + names;

  for (std::size_t e = 0; e < n_entries; ++e) {
    const std::size_t row = e / per_row, column = e % per_row;
    const double ex = kLeft + entry_width * static_cast<double>(column);
    const double ey = plot.height + kLegendRow * static_cast<double>(row) + 4;
    if (e < in_legend.size()) {
      out += marker(in_legend[e], ex + 6, ey - 4) +
             text(ex + 16, ey, "start", plot.series[in_legend[e]].name);
    } else {
      out += fmt::format(
          "<path d=\"M{:.1f} {:.1f}h12\" stroke=\"#777\" stroke-width=\"1.5\" "
          "stroke-dasharray=\"5 3\"/>",
          ex, ey - 4);
      out += text(ex + 16, ey, "start", plot.front_name);
    }
  }
  return out + "</svg>";
}

std::string svg(const HeatMap& map) {
  constexpr double kCellHeight = 18, kMaxWidth = 900;
  std::size_t n_columns = 0;
  double least = std::numeric_limits<double>::infinity(), most = -least;
  for (const auto& row : map.cells) {
    n_columns = std::max(n_columns, row.size());
    for (const double v : row) least = std::min(least, v), most = std::max(most, v);
  }
  const double cell = std::clamp(
      (kMaxWidth - kLeft) / static_cast<double>(std::max<std::size_t>(n_columns, 1)), 6.0, 44.0);
  const double width = kLeft + cell * static_cast<double>(n_columns) + kRight;
  const double height = kTop + kCellHeight * static_cast<double>(map.cells.size()) + 24;
  std::string out = open_svg(std::max(width, 260.0), height, map.title) + heading(map.title);
  for (std::size_t r = 0; r < map.cells.size(); ++r) {
    const double y = kTop + kCellHeight * static_cast<double>(r);
    out += text(kLeft - 6, y + 13, "end", fmt::format("{} {}", map.row_label, r));
    for (std::size_t c = 0; c < map.cells[r].size(); ++c) {
      const double v = map.cells[r][c];
      const double share = most > least ? (v - least) / (most - least) : 0;
      const int grey = static_cast<int>(245 - 190 * share);  // one hue: reads the same in print
      const double x = kLeft + cell * static_cast<double>(c);
      out += fmt::format(
          "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" "
          "fill=\"rgb({},{},{})\"><title>{} {}, {} {}: {:.4g}</title></rect>",
          x, y, cell - 1, kCellHeight - 1, grey, grey, std::min(255, grey + 25),
          escape_html(map.row_label), r, escape_html(map.column_label), c, v);
      if (cell >= 22) {
        out += text(x + (cell - 1) / 2, y + 13, "middle", fmt::format("{:.3g}", v),
                    share > 0.5 ? " fill=\"#fff\"" : "");
      }
    }
  }
  out += text(kLeft, height - 8, "start",
              fmt::format("{} 0 to {}, left to right", map.column_label,
                          std::max<std::size_t>(n_columns, 1) - 1));
  return out + "</svg>";
}

}  // namespace statepack
