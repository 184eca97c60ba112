#include "serve/keys.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "base/file.hpp"
#include "base/hash.hpp"

namespace statepack::serve {
namespace {

std::string digest(std::string_view key) {
  Sha256 sha;
  sha.update(key);
  return sha.hex();
}

std::string_view trimmed(std::string_view line) {
  const std::size_t begin = line.find_first_not_of(" \t\r");
  if (begin == std::string_view::npos) return {};
  return line.substr(begin, line.find_last_not_of(" \t\r") - begin + 1);
}

Status check(std::string_view key, std::string_view where) {
  const bool printable =
      std::all_of(key.begin(), key.end(), [](char c) { return c > ' ' && c <= '~'; });
  if (!key.empty() && printable) return {};
  return {Code::kInvalidArgument,
          fmt::format("{}: a key is one or more printable ASCII characters without spaces", where)};
}

}  // namespace

Result<ApiKeys> ApiKeys::load(const std::vector<std::string>& keys, const std::string& file) {
  ApiKeys all;
  for (const std::string& key : keys) {
    SP_RETURN_IF_ERROR(check(key, "--api-key"));
    all.digests_.push_back(digest(key));
  }
  if (file.empty()) return all;
  SP_ASSIGN_OR_RETURN(const std::string text, read_text_file(file, std::size_t{1} << 20));
  std::size_t n_found = 0;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    const std::string_view line = trimmed(std::string_view(text).substr(begin, end - begin));
    begin = end + 1;
    if (line.empty() || line.front() == '#') continue;
    SP_RETURN_IF_ERROR(check(line, file));
    all.digests_.push_back(digest(line));
    ++n_found;
  }
  if (n_found == 0) {
    return Status(Code::kInvalidArgument, file + ": holds no key; write one a line");
  }
  return all;
}

bool ApiKeys::accept(std::string_view key) const {
  const std::string wanted = digest(key);
  unsigned any = 0;
  for (const std::string& have : digests_) {
    unsigned difference = 0;
    for (std::size_t i = 0; i < have.size(); ++i) {
      difference |= static_cast<unsigned>(static_cast<unsigned char>(have[i] ^ wanted[i]));
    }
    any |= static_cast<unsigned>(difference == 0);
  }
  return any != 0;
}

}  // namespace statepack::serve
