// The figures of a report, from a results document.
#pragma once

#include <string>
#include <vector>

#include "eval/results.hpp"

namespace statepack {

/// A figure or a set of small ones, and what is to be seen.
struct Figure {
  std::string heading;
  std::string note;
  std::vector<std::string> svgs;
};

/// Those that the document has numbers for: accuracy and KL against resident bits with their Pareto
/// fronts, KL and excess loss by position, state error against half-life by head with Spearman's
/// rho, outliers of rows and columns, bits by head of each plan.
std::vector<Figure> figures(const Json& document);

/// Indices of the points that no other beats: with fewer x and more (`high` true) or less y, or
/// equal in one and better in the other. In order of x.
std::vector<std::size_t> pareto_front(const std::vector<double>& x, const std::vector<double>& y,
                                      bool high);

}  // namespace statepack
