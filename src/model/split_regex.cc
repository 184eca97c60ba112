#include "model/split_regex.hpp"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <time.h>

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <iterator>
#include <optional>
#include <utility>

#include "model/utf8.hpp"

namespace statepack {
namespace {

constexpr std::size_t kMaxPatternBytes = 64 << 10;
// Back-tracking steps of one match. Published patterns are linear in the length of a run of like
// characters, and PCRE2's JIT counts far less than one step a byte for them.
constexpr std::uint32_t kMatchLimit = 10'000'000;
constexpr std::uint32_t kHeapLimitKib = 256 << 10;
constexpr std::size_t kJitStackBytes = 16 << 20;
// Published patterns take about 0.1 us a byte; a hostile one may be quadratic in the text without
// any single match being long.
constexpr double kMaxSeconds = 5;
constexpr double kMaxSecondsPerByte = 10e-6;
constexpr int kMatchesPerClockReading = 64;

struct NewerRange {
  char32_t first, last, stand_in;
};
constexpr NewerRange kNewerRanges[] = {
#include "model/unicode_since_14.inc"
};

// Replaces characters that PCRE2's tables lack by their stand-ins, which are as long in bytes.
// Empty when there are none: the usual case, found without decoding ASCII.
std::optional<std::string> with_stand_ins(std::string_view text) {
  std::optional<std::string> out;
  for (std::size_t i = 0; i < text.size();) {
    if (static_cast<unsigned char>(text[i]) < 0xE0) {  // all newer characters take 3 or 4 bytes
      ++i;
      continue;
    }
    const Utf8Step step = decode_utf8(text.substr(i));
    const auto range =
        std::lower_bound(std::begin(kNewerRanges), std::end(kNewerRanges), step.character,
                         [](const NewerRange& r, char32_t c) { return r.last < c; });
    if (range != std::end(kNewerRanges) && range->first <= step.character) {
      if (!out) out.emplace(text);
      std::string stand_in;
      append_utf8(stand_in, range->stand_in);
      out->replace(i, step.n_bytes, stand_in);
    }
    i += step.n_bytes;
  }
  return out;
}
static_assert(kNewerRanges[0].first >= 0x800);

// The one intersection of classes in published patterns (the Kimi family), which PCRE2 has no
// syntax for: the same sets as complements, since general categories partition the characters.
constexpr std::pair<std::string_view, std::string_view> kKnownClasses[] = {
    {R"([\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]])",
     R"([^\p{Ll}\p{N}\p{P}\p{S}\p{Z}\p{C}\p{Han}])"},
    {R"([\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]])",
     R"([^\p{Lu}\p{Lt}\p{N}\p{P}\p{S}\p{Z}\p{C}\p{Han}])"},
};

bool is_general_category(std::string_view name) {
  constexpr std::string_view kNames[] = {"C",  "Cc", "Cf", "Cn", "Co", "L",  "Ll", "Lm", "Lo",
                                         "Lt", "Lu", "M",  "Mc", "Me", "Mn", "N",  "Nd", "Nl",
                                         "No", "P",  "Pc", "Pd", "Pe", "Pf", "Pi", "Po", "Ps",
                                         "S",  "Sc", "Sk", "Sm", "So", "Z",  "Zl", "Zp", "Zs"};
  return std::find(std::begin(kNames), std::end(kNames), name) != std::end(kNames);
}

// Rewrites a pattern from Oniguruma's dialect to PCRE2's, construct by construct.
class Translator {
 public:
  explicit Translator(std::string_view pattern) : in_(pattern) {}

  // Empty when a construct is not known to mean the same; refused() then names it.
  std::optional<std::string> run() {
    while (i_ < in_.size()) {
      const bool fine = in_[i_] == '\\' ? escape() : in_class_ ? class_item() : item();
      if (!fine) return std::nullopt;
    }
    return out_;
  }
  const std::string& refused() const { return refused_; }

 private:
  bool refuse(std::size_t n_bytes) {
    refused_ = std::string(in_.substr(i_, n_bytes));
    return false;
  }
  bool copy(std::size_t n_bytes) {
    out_ += in_.substr(i_, n_bytes);
    i_ += n_bytes;
    return true;
  }
  bool put(std::string_view text, std::size_t n_bytes) {
    out_ += text;
    i_ += n_bytes;
    return true;
  }
  bool starts(std::string_view prefix) const { return in_.substr(i_).starts_with(prefix); }

  bool escape() {
    if (i_ + 1 >= in_.size()) return refuse(1);
    const char c = in_[i_ + 1];
    switch (c) {
      case 's':
        return put(R"(\p{wspace})", 2);  // PCRE2's own \s adds U+180E
      case 'S':
        return put(R"(\P{wspace})", 2);
      case 'd':
        return put(R"(\p{Nd})", 2);
      case 'D':
        return put(R"(\P{Nd})", 2);
      case 'r':
      case 'n':
      case 't':
      case 'f':
        return copy(2);
      case 'x':
      case 'u':
        return code_point(c);
      case 'p':
      case 'P':
        return property(c);
      default:
        return std::ispunct(static_cast<unsigned char>(c)) != 0 ? copy(2) : refuse(2);
    }
  }

  bool property(char p) {
    const std::size_t close = in_.find('}', i_);
    if (i_ + 2 >= in_.size() || in_[i_ + 2] != '{' || close == std::string_view::npos) {
      return refuse(3);
    }
    const std::string_view name = in_.substr(i_ + 3, close - i_ - 3);
    if (name.empty() || !std::all_of(name.begin(), name.end(),
                                     [](unsigned char c) { return std::isalpha(c) != 0; })) {
      return refuse(close + 1 - i_);
    }
    // A script's bare name means its extensions too in PCRE2, but not in Oniguruma.
    const std::string_view prefix = is_general_category(name) ? "" : "sc:";
    return put(std::string("\\") + p + "{" + std::string(prefix) + std::string(name) + "}",
               close + 1 - i_);
  }

  bool code_point(char c) {
    if (c == 'x' && starts("\\x{")) {
      const std::size_t close = in_.find('}', i_);
      return close == std::string_view::npos ? refuse(3) : copy(close + 1 - i_);
    }
    const std::size_t n_digits = c == 'x' ? 2 : 4;
    const std::string_view digits = in_.substr(std::min(i_ + 2, in_.size()), n_digits);
    if (digits.size() != n_digits ||
        !std::all_of(digits.begin(), digits.end(),
                     [](unsigned char d) { return std::isxdigit(d) != 0; })) {
      return refuse(2 + digits.size());
    }
    return put("\\x{" + std::string(digits) + "}", 2 + n_digits);
  }

  bool class_item() {
    if (starts("&&")) return refuse(2);
    if (in_[i_] == '[') return refuse(1);  // a set inside a set, or a POSIX class
    if (in_[i_] == ']') in_class_ = false;
    return copy(1);
  }

  bool item() {
    switch (in_[i_]) {
      case '[': {
        for (const auto& [theirs, ours] : kKnownClasses) {
          if (!starts(theirs)) continue;
          i_ += theirs.size();
          Translator inner(ours);
          out_ += *inner.run();
          return true;
        }
        const std::size_t n = starts("[^") ? 2 : 1;
        if (i_ + n < in_.size() && in_[i_ + n] == ']') return refuse(n + 1);
        in_class_ = true;
        return copy(n);
      }
      case '(': {
        if (!starts("(?")) return copy(1);
        for (const std::string_view group : {"(?:", "(?=", "(?!", "(?>", "(?<=", "(?<!", "(?i:"}) {
          if (starts(group)) return copy(group.size());
        }
        return refuse(4);
      }
      case '{':
        return repeat();
      default:
        return copy(1);
    }
  }

  // {n}, {n,} or {n,m}; {,m} and a possessive sign behind are read otherwise by the two engines.
  bool repeat() {
    const std::size_t close = in_.find('}', i_);
    if (close == std::string_view::npos) return refuse(1);
    const std::string_view body = in_.substr(i_ + 1, close - i_ - 1);
    const bool fine = !body.empty() && body[0] != ',' &&
                      std::count(body.begin(), body.end(), ',') <= 1 &&
                      body.find_first_not_of("0123456789,") == std::string_view::npos &&
                      (close + 1 >= in_.size() || in_[close + 1] != '+');
    return fine ? copy(close + 1 - i_) : refuse(close + 2 - i_);
  }

  std::string_view in_;
  std::size_t i_ = 0;
  bool in_class_ = false;
  std::string out_;
  std::string refused_;
};

struct CodeFree {
  void operator()(pcre2_code* p) const { pcre2_code_free(p); }
};
struct CompileContextFree {
  void operator()(pcre2_compile_context* p) const { pcre2_compile_context_free(p); }
};
struct MatchContextFree {
  void operator()(pcre2_match_context* p) const { pcre2_match_context_free(p); }
};
struct MatchDataFree {
  void operator()(pcre2_match_data* p) const { pcre2_match_data_free(p); }
};
struct JitStackFree {
  void operator()(pcre2_jit_stack* p) const { pcre2_jit_stack_free(p); }
};

double thread_seconds() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

std::string pcre2_message(int code) {
  PCRE2_UCHAR buffer[256] = {};
  pcre2_get_error_message(code, buffer, sizeof(buffer));
  return reinterpret_cast<const char*>(buffer);
}

}  // namespace

struct SplitRegex::Impl {
  std::unique_ptr<pcre2_code, CodeFree> code;
  std::string label;
};

SplitRegex::SplitRegex(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
SplitRegex::SplitRegex(SplitRegex&&) noexcept = default;
SplitRegex& SplitRegex::operator=(SplitRegex&&) noexcept = default;
SplitRegex::~SplitRegex() = default;

Result<SplitRegex> SplitRegex::compile(std::string_view pattern, const std::string& label) {
  if (pattern.size() > kMaxPatternBytes) {
    return Status(Code::kUnsupported, label + ": a pattern of " + std::to_string(pattern.size()) +
                                          " bytes; at most " + std::to_string(kMaxPatternBytes) +
                                          " are taken");
  }
  Translator translator(pattern);
  const std::optional<std::string> translated = translator.run();
  if (!translated) {
    return Status(Code::kUnsupported,
                  label + ": '" + to_valid_utf8(translator.refused()) +
                      "' is not supported in a pattern: it could be read in two ways; rewrite it "
                      "with \\p{..}, \\s, sets without nesting, and (?:, (?i:, (?=, (?! groups");
  }
  std::unique_ptr<pcre2_compile_context, CompileContextFree> context(
      pcre2_compile_context_create(nullptr));
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  int error = 0;
  PCRE2_SIZE offset = 0;
  // MULTILINE: '^' and '$' mean lines in Oniguruma's Ruby syntax, always.
  auto impl = std::make_unique<Impl>();
  impl->label = label;
  impl->code.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated->data()),
                                 translated->size(), PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE,
                                 &error, &offset, context.get()));
  if (impl->code == nullptr) {
    return Status(Code::kCorrupt,
                  label + ": the pattern does not compile: " + pcre2_message(error) +
                      ", near byte " + std::to_string(offset) + " of " + *translated);
  }
  // Without a JIT (a hardened kernel, say) pcre2_match interprets: slower, the same result.
  pcre2_jit_compile(impl->code.get(), PCRE2_JIT_COMPLETE);
  return SplitRegex(std::move(impl));
}

Status SplitRegex::split(std::string_view text,
                         const std::function<void(std::string_view)>& piece) const {
  const std::optional<std::string> replaced = with_stand_ins(text);
  const std::string_view subject = replaced ? *replaced : text;
  std::unique_ptr<pcre2_match_context, MatchContextFree> context(
      pcre2_match_context_create(nullptr));
  pcre2_set_match_limit(context.get(), kMatchLimit);
  pcre2_set_heap_limit(context.get(), kHeapLimitKib);
  std::unique_ptr<pcre2_match_data, MatchDataFree> data(pcre2_match_data_create(1, nullptr));
  std::unique_ptr<pcre2_jit_stack, JitStackFree> jit_stack;

  const double deadline =
      thread_seconds() + kMaxSeconds + kMaxSecondsPerByte * static_cast<double>(text.size());
  const auto give_up = [&](std::size_t at, const std::string& why) {
    if (at < text.size()) piece(text.substr(at));
    return Status(Code::kInvalidArgument,
                  impl_->label + ": the pattern gave up at byte " + std::to_string(at) + " of " +
                      std::to_string(text.size()) + " (" + why + "); shorten the text");
  };
  std::size_t done = 0;                     // everything before has been handed out
  std::size_t start = 0;                    // where the next search begins
  std::optional<std::size_t> previous_end;  // of the last match
  for (std::int64_t n = 1; start < text.size(); ++n) {
    if (n % kMatchesPerClockReading == 0 && thread_seconds() > deadline) {
      return give_up(done, "out of time");
    }
    int rc = pcre2_match(impl_->code.get(), reinterpret_cast<PCRE2_SPTR>(subject.data()),
                         subject.size(), start, PCRE2_NO_UTF_CHECK, data.get(), context.get());
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT && jit_stack == nullptr) {
      jit_stack.reset(pcre2_jit_stack_create(kJitStackBytes / 8, kJitStackBytes, nullptr));
      pcre2_jit_stack_assign(context.get(), nullptr, jit_stack.get());
      --n;
      continue;
    }
    if (rc == PCRE2_ERROR_NOMATCH) break;
    if (rc < 0) return give_up(done, pcre2_message(rc));
    const PCRE2_SIZE* range = pcre2_get_ovector_pointer(data.get());
    const std::size_t first = range[0];
    const std::size_t last = range[1];
    if (first == last && previous_end == last) {  // an empty match right behind a match is none
      start += decode_utf8(text.substr(start)).n_bytes;
      continue;
    }
    if (first > done) piece(text.substr(done, first - done));
    if (last > first) piece(text.substr(first, last - first));
    done = start = last;
    previous_end = last;
  }
  if (done < text.size()) piece(text.substr(done));
  return {};
}

}  // namespace statepack
