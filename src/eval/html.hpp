// Results as one HTML page that needs nothing but itself: tables and figures, no scripts, no
// network.
#pragma once

#include <span>
#include <string>

#include "eval/results.hpp"

namespace statepack {

/// The page of one or more models' documents; `command` is the line that made it.
std::string html_report(std::span<const Json> documents, const std::string& command);

}  // namespace statepack
