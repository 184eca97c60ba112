// Results as Markdown tables.
#pragma once

#include <span>
#include <string>

#include "eval/results.hpp"

namespace statepack {

/// The report of one or more models' documents: for each one table over all, one for each task, one
/// by position. `command` is the line that made it. Missing pieces show as a dash.
std::string markdown_report(std::span<const Json> documents, const std::string& command);

/// The first of the tables, aligned for a terminal.
std::string overview_table(const Json& document);

}  // namespace statepack
