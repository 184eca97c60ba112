// The tables and the numbers behind them that the Markdown and the HTML report share.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "eval/results.hpp"
#include "eval/table.hpp"

namespace statepack {

/// The schemes of a document, fp32 first.
std::vector<std::string> scheme_names(const Json& document);
/// The names of the pieces that have `metric` in any run: "exact_match,none" for tasks, "kl,none"
/// for texts.
std::vector<std::string> pieces_with(const Json& document, const char* metric);

Table overview(const Json& document);
Table task_table(const Json& document, const std::string& task);

/// How a text was read.
struct ForcedShape {
  std::int64_t n_windows = 0, context = 0;
};
ForcedShape forced_shape(const Json& document, const std::string& piece);
Table forced_table(const Json& document, const std::string& piece);

/// What the columns mean, one sentence each.
std::vector<std::string> legend();

}  // namespace statepack
