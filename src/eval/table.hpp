// Tables of text: Markdown that is aligned in the file too, or plain columns for a terminal.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace statepack {

/// The first column is words (left), the others are numbers (right). Every row has as many cells as
/// the header; cells are ASCII.
class Table {
 public:
  explicit Table(std::vector<std::string> header);
  void add(std::vector<std::string> row);
  std::string markdown() const;
  std::string text() const;
  std::string html() const;  ///< one <table>

 private:
  std::vector<std::size_t> widths() const;
  std::string cell(std::size_t row, std::size_t column, std::size_t width) const;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace statepack
