#include "eval/table.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "base/check.hpp"
#include "eval/plot.hpp"

namespace statepack {

Table::Table(std::vector<std::string> header) : rows_{std::move(header)} {}

void Table::add(std::vector<std::string> row) {
  SP_CHECK(row.size() == rows_[0].size(), "a row has a cell for every column");
  rows_.push_back(std::move(row));
}

std::string Table::markdown() const {
  const std::vector<std::size_t> width = widths();
  std::string out;
  for (std::size_t r = 0; r < rows_.size(); ++r) {
    out += "|";
    for (std::size_t c = 0; c < width.size(); ++c)
      out.append(" ").append(cell(r, c, width[c])).append(" |");
    out += "\n";
    if (r > 0) continue;
    out += "|";
    for (std::size_t c = 0; c < width.size(); ++c) {
      out += c == 0 ? std::string(width[c] + 2, '-') : std::string(width[c] + 1, '-') + ":";
      out += "|";
    }
    out += "\n";
  }
  return out;
}

std::string Table::text() const {
  const std::vector<std::size_t> width = widths();
  std::string out;
  for (std::size_t r = 0; r < rows_.size(); ++r) {
    std::string line;
    for (std::size_t c = 0; c < width.size(); ++c) line.append(cell(r, c, width[c])).append("  ");
    out += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
  }
  return out;
}

std::string Table::html() const {
  std::string out = "<table>\n";
  for (std::size_t r = 0; r < rows_.size(); ++r) {
    out += r == 0 ? "<thead><tr>" : "<tr>";
    for (std::size_t c = 0; c < rows_[r].size(); ++c) {
      const char* tag = r == 0 || c == 0 ? "th" : "td";
      out += fmt::format("<{0}>{1}</{0}>", tag, escape_html(rows_[r][c]));
    }
    out += r == 0 ? "</tr></thead>\n" : "</tr>\n";
  }
  return out + "</table>\n";
}

std::vector<std::size_t> Table::widths() const {
  std::vector<std::size_t> width(rows_[0].size());
  for (const auto& row : rows_) {
    for (std::size_t c = 0; c < width.size(); ++c) width[c] = std::max(width[c], row[c].size());
  }
  return width;
}

std::string Table::cell(std::size_t row, std::size_t column, std::size_t width) const {
  const std::string& text = rows_[row][column];
  const std::string blanks(width - text.size(), ' ');
  return column == 0 ? text + blanks : blanks + text;
}

}  // namespace statepack
