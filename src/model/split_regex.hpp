// The pre-tokenizer's regular expression: cuts text into the pieces that BPE works on.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "statepack/status.hpp"

namespace statepack {

/// A pattern in the dialect of tokenizer.json (Oniguruma, Ruby syntax), run by PCRE2 with its JIT.
/// The two engines agree on the constructs that compile() lets through; the rest is refused, since
/// another reading of the pattern would give other tokens without a word. Characters assigned after
/// the Unicode 14 of PCRE2 10.42 are matched as an older one of the same category and length.
class SplitRegex {
 public:
  /// Errors: kUnsupported naming the construct, kCorrupt for a pattern that does not compile.
  static Result<SplitRegex> compile(std::string_view pattern, const std::string& label);
  SplitRegex(SplitRegex&&) noexcept;
  SplitRegex& operator=(SplitRegex&&) noexcept;
  ~SplitRegex();

  /// Calls `piece` with every non-empty match and every non-empty stretch between matches, in
  /// order: together they are `text` (valid UTF-8). Safe to call from many threads at once.
  /// Errors: kInvalidArgument when the pattern needs more work than its bounds allow on this text;
  /// the part not yet cut was then handed out as one last piece.
  Status split(std::string_view text, const std::function<void(std::string_view)>& piece) const;

 private:
  struct Impl;
  explicit SplitRegex(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace statepack
