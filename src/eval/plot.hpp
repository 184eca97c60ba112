// Plots as SVG text: no scripts, no fonts from elsewhere. Colours are told apart by people with any
// colour vision (Okabe and Ito's), and each series has a marker of its own for print.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace statepack {

struct Series {
  std::string name;
  std::vector<double> x, y;  ///< of equal length; points that an axis cannot show are left out
  bool line = false;         ///< joined in the order given
  bool label = false;        ///< names beside points instead of in the legend
};

struct Plot {
  std::string title, x_label, y_label;
  bool log_x = false, log_y = false;
  int width = 640, height = 400;  ///< px
  bool legend = true;
  std::vector<Series> series = {};
  /// A step line through these points, from low x to high, named `front_name`.
  std::vector<double> front_x = {}, front_y = {};
  std::string front_name = {};
};

/// One <svg> element. Empty plots say so.
std::string svg(const Plot& plot);

/// A row of cells for each entry, darker for larger numbers, each with its number: bits by layer
/// and head.
struct HeatMap {
  std::string title, row_label, column_label;
  std::vector<std::vector<double>> cells = {};  ///< [row][column]
};
std::string svg(const HeatMap& map);

/// &, <, >, " as character references.
std::string escape_html(std::string_view text);

}  // namespace statepack
