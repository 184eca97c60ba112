#include "model/jinja/lexer.hpp"

#include <algorithm>
#include <charconv>
#include <optional>

#include "model/jinja/error.hpp"
#include "model/jinja/text.hpp"
#include "model/utf8.hpp"

namespace statepack::jinja {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }

class Lexer {
 public:
  explicit Lexer(std::string_view source) {
    source_ = replace(replace(source, "\r\n", "\n", -1), "\r", "\n", -1);
    if (source_.ends_with('\n')) source_.pop_back();
  }

  std::vector<Token> run() {
    while (at_ < source_.size()) {
      const std::size_t tag = next_tag();
      const std::string_view text = view(at_, tag);
      if (tag == source_.size()) {
        add_text(text);
        at_ = tag;
        break;
      }
      const char kind = source_[tag + 1];
      const std::size_t after = tag + 2;
      const bool has_sign =
          after < source_.size() && (source_[after] == '-' || source_[after] == '+');
      const char sign = has_sign ? source_[after] : ' ';
      add_text(before_tag(text, sign, kind != '{'));
      if (kind == '%' && raw_block(tag)) continue;
      count_lines(text);
      at_ = after + (has_sign ? 1 : 0);
      if (kind == '#') {
        skip_comment();
      } else {
        read_tag(kind == '{');
      }
    }
    add(Token::Kind::kEnd, "");
    return std::move(tokens_);
  }

 private:
  [[noreturn]] void fail_here(const std::string& what) const {
    throw TemplateError{Code::kCorrupt, what, line_};
  }
  std::string_view view(std::size_t begin, std::size_t end) const {
    return std::string_view(source_).substr(begin, end - begin);
  }
  std::string_view rest() const { return std::string_view(source_).substr(at_); }
  void count_lines(std::string_view text) {
    line_ += static_cast<int>(std::count(text.begin(), text.end(), '\n'));
  }
  void advance(std::size_t n_bytes) {
    count_lines(rest().substr(0, n_bytes));
    at_ += n_bytes;
  }
  Token& add(Token::Kind kind, std::string_view text) {
    tokens_.push_back({.kind = kind, .text = std::string(text), .line = line_});
    return tokens_.back();
  }
  void add_text(std::string_view text) {
    if (!text.empty()) add(Token::Kind::kText, text);
  }
  void skip_space() {
    while (at_ < source_.size()) {
      const Utf8Step step = decode_utf8(rest());
      if (!is_python_space(step.character)) return;
      advance(step.n_bytes);
    }
  }
  std::size_t next_tag() const {
    for (std::size_t i = at_; i + 1 < source_.size(); ++i) {
      if (source_[i] == '{' &&
          (source_[i + 1] == '%' || source_[i + 1] == '{' || source_[i + 1] == '#')) {
        return i;
      }
    }
    return source_.size();
  }

  // What is kept of the text in front of a tag: '-' takes all white space off its end; without a
  // sign, white space alone on the tag's line goes (lstrip_blocks), except before {{.
  std::string_view before_tag(std::string_view text, char sign, bool lstrips) const {
    if (sign == '-') return strip(text, nullptr, Side::kRight);
    if (sign == '+' || !lstrips) return text;
    const std::size_t newline = text.rfind('\n');
    const std::size_t line_begin = newline == std::string_view::npos ? 0 : newline + 1;
    const bool starts_line = line_begin > 0 || at_ == 0 || source_[at_ - 1] == '\n';
    if (starts_line && strip(text.substr(line_begin), nullptr, Side::kBoth).empty()) {
      return text.substr(0, line_begin);
    }
    return text;
  }

  // The end of a tag whose last two characters are at `at_`: trim_blocks takes one newline.
  void end_tag(char sign, bool trims) {
    advance((sign == ' ' ? 0 : 1) + 2);
    if (sign == '-') {
      skip_space();
    } else if (sign == ' ' && trims && rest().starts_with('\n')) {
      advance(1);
    }
  }

  void skip_comment() {
    const std::size_t end = source_.find("#}", at_);
    if (end == std::string::npos) fail_here("a comment without its end '#}'");
    const char last = end > at_ ? source_[end - 1] : ' ';
    const char sign = last == '-' || last == '+' ? last : ' ';
    advance((sign == ' ' ? end : end - 1) - at_);
    end_tag(sign, true);
  }

  // Matches `{%`, a sign, `word`, a sign, `%}` at `i`; gives the two signs and the byte behind.
  struct WordTag {
    char left = ' ';
    char right = ' ';
    std::size_t close = 0;  // where the right sign, or else the "%}", is
  };
  std::optional<WordTag> word_tag(std::size_t i, std::string_view word) const {
    WordTag tag;
    i += 2;
    const auto space = [&] {
      while (i < source_.size()) {
        const Utf8Step step = decode_utf8(std::string_view(source_).substr(i));
        if (!is_python_space(step.character)) break;
        i += step.n_bytes;
      }
    };
    const auto sign = [&] {
      if (i < source_.size() && (source_[i] == '-' || source_[i] == '+')) return source_[i++];
      return ' ';
    };
    tag.left = sign();
    space();
    if (!std::string_view(source_).substr(i).starts_with(word)) return std::nullopt;
    i += word.size();
    space();
    tag.close = i;
    tag.right = sign();
    if (!std::string_view(source_).substr(i).starts_with("%}")) return std::nullopt;
    return tag;
  }

  // {% raw %} ... {% endraw %} at `tag`: its content is text.
  bool raw_block(std::size_t tag) {
    const std::optional<WordTag> open = word_tag(tag, "raw");
    if (!open || open->right == '+') return false;
    advance(open->close - at_);
    end_tag(open->right, false);
    for (std::size_t i = source_.find("{%", at_); i != std::string::npos;
         i = source_.find("{%", i + 2)) {
      const std::optional<WordTag> close = word_tag(i, "endraw");
      if (!close) continue;
      add_text(before_tag(view(at_, i), close->left, true));
      advance(close->close - at_);
      end_tag(close->right, true);
      return true;
    }
    fail_here("{% raw %} without its {% endraw %}");
  }

  void read_tag(bool is_print) {
    using Kind = Token::Kind;
    add(is_print ? Kind::kPrintBegin : Kind::kBlockBegin, is_print ? "{{" : "{%");
    const std::string_view closer = is_print ? "}}" : "%}";
    std::string open;  // brackets that wait for their partner
    while (true) {
      skip_space();
      if (at_ == source_.size()) {
        fail_here("the template ends inside a tag; '" + std::string(closer) + "' is missing");
      }
      if (open.empty()) {
        const char c = source_[at_];
        const bool has_sign =
            (c == '-' || (c == '+' && !is_print)) && rest().substr(1).starts_with(closer);
        if (has_sign || rest().starts_with(closer)) {
          add(is_print ? Kind::kPrintEnd : Kind::kBlockEnd, closer);
          end_tag(has_sign ? c : ' ', !is_print);
          return;
        }
      }
      if (!number() && !name() && !string_literal()) operator_token(open);
    }
  }

  bool number() {
    const std::string_view text = rest();
    if (!is_digit(text[0])) return false;
    std::size_t n = 0;
    const auto digits = [&](std::size_t from) {  // digits and single underscores between them
      std::size_t i = from;
      while (i < text.size() &&
             (is_digit(text[i]) ||
              (text[i] == '_' && i > from && i + 1 < text.size() && is_digit(text[i + 1])))) {
        ++i;
      }
      return i;
    };
    const char base_letter = text.size() > 1 ? static_cast<char>(text[1] | 0x20) : ' ';
    const int base = text[0] != '0'       ? 10
                     : base_letter == 'x' ? 16
                     : base_letter == 'o' ? 8
                     : base_letter == 'b' ? 2
                                          : 10;
    bool is_float = false;
    if (base != 10) {
      n = 2;
      while (n < text.size() &&
             (std::isalnum(static_cast<unsigned char>(text[n])) != 0 || text[n] == '_')) {
        ++n;
      }
    } else {
      n = digits(0);
      const bool after_dot = at_ > 0 && source_[at_ - 1] == '.';
      if (!after_dot && n + 1 < text.size() && text[n] == '.' && is_digit(text[n + 1])) {
        n = digits(n + 1);
        is_float = true;
      }
      if (!after_dot && n < text.size() && (text[n] | 0x20) == 'e') {
        std::size_t i = n + 1;
        if (i < text.size() && (text[i] == '+' || text[i] == '-')) ++i;
        if (i < text.size() && is_digit(text[i])) {
          n = digits(i);
          is_float = true;
        }
      }
    }
    std::string plain(text.substr(base == 10 ? 0 : 2, base == 10 ? n : n - 2));
    std::erase(plain, '_');
    Token& token = add(is_float ? Token::Kind::kFloat : Token::Kind::kInteger, text.substr(0, n));
    const char* end = plain.data() + plain.size();
    const auto result = is_float ? std::from_chars(plain.data(), end, token.number)
                                 : std::from_chars(plain.data(), end, token.integer, base);
    if (result.ec != std::errc{} || result.ptr != end ||
        (!is_float && base == 10 && plain.size() > 1 && plain[0] == '0' && token.integer != 0)) {
      fail_here("'" + token.text + "' is not a number of 64 bits");
    }
    advance(n);
    return true;
  }

  bool name() {
    const auto is_name_byte = [](char c) {
      return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' ||
             static_cast<unsigned char>(c) >= 0x80;
    };
    std::size_t n = 0;
    while (at_ + n < source_.size() && is_name_byte(source_[at_ + n])) ++n;
    if (n == 0) return false;
    add(Token::Kind::kName, rest().substr(0, n));
    advance(n);
    return true;
  }

  bool string_literal() {
    const char quote = source_[at_];
    if (quote != '\'' && quote != '"') return false;
    std::size_t end = at_ + 1;
    while (end < source_.size() && source_[end] != quote) end += source_[end] == '\\' ? 2 : 1;
    if (end >= source_.size()) fail_here("a string without its closing quote");
    add(Token::Kind::kString, unescape(view(at_ + 1, end)));
    advance(end + 1 - at_);
    return true;
  }

  // Python's escapes.
  std::string unescape(std::string_view text) const {
    std::string out;
    while (!text.empty()) {
      const std::size_t plain = std::min(text.find('\\'), text.size());
      out += text.substr(0, plain);
      text.remove_prefix(plain);
      if (text.size() < 2) break;
      const char c = text[1];
      constexpr std::string_view kFrom = "\\'\"abfnrtv";
      constexpr std::string_view kTo = "\\'\"\a\b\f\n\r\t\v";
      if (const std::size_t simple = kFrom.find(c); simple != std::string_view::npos) {
        out += kTo[simple];
        text.remove_prefix(2);
      } else if (c == '\n') {
        text.remove_prefix(2);
      } else if (c == 'x' || c == 'u' || c == 'U') {
        const std::size_t n = c == 'x' ? 2 : c == 'u' ? 4 : 8;
        code_point(out, text.substr(2, n), n, 16);
        text.remove_prefix(2 + n);
      } else if (c >= '0' && c <= '7') {
        std::size_t n = 1;
        while (n < 3 && n + 1 < text.size() && text[n + 1] >= '0' && text[n + 1] <= '7') ++n;
        code_point(out, text.substr(1, n), n, 8);
        text.remove_prefix(1 + n);
      } else if (c == 'N') {
        fail_here("'\\N' escapes are not supported; write the character");
      } else {  // not an escape: the backslash stays
        out += '\\';
        text.remove_prefix(1);
      }
    }
    return out;
  }
  void code_point(std::string& out, std::string_view digits, std::size_t n, int base) const {
    std::uint32_t value = 0;
    const char* end = digits.data() + digits.size();
    const auto result = std::from_chars(digits.data(), end, value, base);
    if (digits.size() != n || result.ec != std::errc{} || result.ptr != end || value > 0x10FFFF ||
        (value >= 0xD800 && value < 0xE000)) {
      fail_here("a string has an escape that is not a character");
    }
    append_utf8(out, value);
  }

  void operator_token(std::string& open) {
    constexpr std::string_view kTwo[] = {"//", "**", "==", "!=", ">=", "<="};
    constexpr std::string_view kOne = "+-/*%~[](){}><=.:|,;";
    std::string_view op;
    for (const std::string_view two : kTwo) {
      if (rest().starts_with(two)) op = two;
    }
    if (op.empty()) op = rest().substr(0, 1);
    const char c = op[0];
    if (op.size() == 1 && kOne.find(c) == std::string_view::npos) {
      fail_here("unexpected character '" +
                std::string(rest().substr(0, decode_utf8(rest()).n_bytes)) + "' in a tag");
    }
    if (c == '(' || c == '[' || c == '{') {
      open += c == '(' ? ')' : c == '[' ? ']' : '}';
    } else if (c == ')' || c == ']' || c == '}') {
      if (open.empty() || open.back() != c) {
        fail_here("unexpected '" + std::string(1, c) + "'" +
                  (open.empty() ? "" : ", expected '" + open.substr(open.size() - 1) + "'"));
      }
      open.pop_back();
    }
    add(Token::Kind::kOperator, op);
    advance(op.size());
  }

  std::string source_;
  std::size_t at_ = 0;
  int line_ = 1;
  std::vector<Token> tokens_;
};

}  // namespace

std::vector<Token> tokenize(std::string_view source) { return Lexer(source).run(); }

}  // namespace statepack::jinja
