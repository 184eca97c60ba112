#include "statepack/scheme.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <numeric>
#include <vector>

#include "base/check.hpp"
#include "codec/codec.hpp"
#include "scheme/config.hpp"

namespace statepack {
namespace {

constexpr std::size_t kMaxName = 256;
constexpr int kMaxPeriod = 4096;
constexpr int kMaxPrefillPeriod = 1 << 20;
constexpr int kMaxSeed = 999'999'999;

template <class T>
struct Word {
  std::string_view text;
  T value;
};

constexpr std::array kRecords = {
    Word<Records>{"f32", Records::kF32}, Word<Records>{"bf16", Records::kBf16},
    Word<Records>{"int8", Records::kInt8}, Word<Records>{"mixed", Records::kMixed}};
constexpr std::array kModes = {Word<RecordMode>{"u", RecordMode::kU},
                               Word<RecordMode>{"v", RecordMode::kV}};
constexpr std::array kPhases = {Word<Phase>{"handover", Phase::kHandover},
                                Word<Phase>{"absolute", Phase::kAbsolute}};
constexpr std::array kBetas = {Word<bool>{"f32", false}, Word<bool>{"bf16", true}};
constexpr std::array kConvs = {Word<ConvFormat>{"f32", ConvFormat::kF32},
                               Word<ConvFormat>{"bf16", ConvFormat::kBf16}};
constexpr std::array kRoundings = {Word<Rounding>{"nearest", Rounding::kNearest},
                                   Word<Rounding>{"stochastic", Rounding::kStochastic},
                                   Word<Rounding>{"feedback", Rounding::kFeedback}};

// The options that every scheme has, in the order in which names print them.
constexpr std::array<std::string_view, 9> kKeys = {
    "period", "records", "mode", "phase", "prefill", "beta", "conv", "rounding", "seed"};

template <class T, std::size_t n>
std::string_view word_of(const std::array<Word<T>, n>& words, T value) {
  for (const Word<T>& word : words) {
    if (word.value == value) return word.text;
  }
  SP_CHECK(false, "a value without a word");
}

std::string join(const std::vector<std::string_view>& words) {
  std::string text;
  for (const std::string_view word : words) {
    if (!text.empty()) text += ", ";
    text += word;
  }
  return text;
}

/// Optimal string alignment distance: insertions, deletions, substitutions, swaps of neighbours.
std::size_t distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> before(b.size() + 1), above(b.size() + 1), row(b.size() + 1);
  std::iota(above.begin(), above.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({above[j] + 1, row[j - 1] + 1, above[j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        row[j] = std::min(row[j], before[j - 2] + 1);
      }
    }
    std::swap(before, above);
    std::swap(above, row);
  }
  return above[b.size()];
}

/// "; did you mean 'period'?" for the nearest word at most two edits away, or "".
std::string did_you_mean(std::string_view word, const std::vector<std::string_view>& known) {
  std::size_t best = std::min<std::size_t>(3, std::max<std::size_t>(word.size(), 2));
  std::string_view nearest;
  for (const std::string_view candidate : known) {
    const std::size_t d = distance(word, candidate);
    if (d < best) {
      best = d;
      nearest = candidate;
    }
  }
  return nearest.empty() ? "" : "; did you mean '" + std::string(nearest) + "'?";
}

Status bad(std::string_view name, Code code, const std::string& what) {
  return {code, "scheme '" + std::string(name) + "': " + what};
}

/// A whole number in its only spelling (no sign, no leading zeros) within [lo, hi], or nothing.
std::optional<int> whole_number(std::string_view text, int lo, int hi) {
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  if (number < lo || number > hi || std::to_string(number) != text) return std::nullopt;
  return number;
}

template <class T, std::size_t n>
Result<T> word_value(std::string_view name, std::string_view key, std::string_view text,
                     const std::array<Word<T>, n>& words) {
  std::vector<std::string_view> known;
  for (const Word<T>& word : words) {
    if (word.text == text) return word.value;
    known.push_back(word.text);
  }
  return bad(name, Code::kInvalidArgument,
             std::string(key) + "=" + std::string(text) + " is not known; use one of " +
                 join(known) + did_you_mean(text, known));
}

std::string prefill_word(int prefill_period) {
  return prefill_period == 0 ? "once" : std::to_string(prefill_period);
}

Result<int> prefill_value(std::string_view name, std::string_view text) {
  if (text == "once") return 0;
  const std::optional<int> n = whole_number(text, 1, kMaxPrefillPeriod);
  if (n.has_value()) return *n;
  return bad(name, Code::kInvalidArgument,
             "prefill=" + std::string(text) +
                 " is not allowed; give 'once' or a whole number of "
                 "tokens from 1 to " +
                 std::to_string(kMaxPrefillPeriod));
}

bool can_round(const CodecInfo& info, Rounding rounding) {
  return std::find(info.roundings.begin(), info.roundings.end(), rounding) != info.roundings.end();
}

/// The defaults of a codec as scheme fields.
Scheme default_scheme(const CodecConfig& config) {
  const SchemeDefaults defaults = config.info->defaults(config);
  Scheme scheme;
  scheme.codec = config.info->name;
  scheme.codec_arg = config.arg;
  scheme.period = defaults.period;
  const auto take = [](auto result) {
    SP_CHECK(result.ok(), "a codec's defaults are not words of scheme names");
    return *result;
  };
  scheme.records = take(word_value(config.info->name, "records", defaults.records, kRecords));
  scheme.phase = take(word_value(config.info->name, "phase", defaults.phase, kPhases));
  scheme.prefill_period = take(prefill_value(config.info->name, defaults.prefill));
  return scheme;
}

}  // namespace

Result<CodecConfig> codec_config(const Scheme& scheme) {
  const CodecInfo* info = find_codec(scheme.codec);
  if (info == nullptr) {
    return Status(Code::kInvalidArgument, "no codec is called '" + scheme.codec + "'");
  }
  const auto is_known = [&](std::string_view key) {
    return std::any_of(info->options.begin(), info->options.end(),
                       [&](const CodecOption& option) { return option.key == key; });
  };
  std::map<std::string, std::string> given;
  std::string_view rest = scheme.codec_options;
  while (!rest.empty()) {
    const std::string_view item = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(rest.size(), item.size() + 1));
    const std::size_t equals = item.find('=');
    if (equals == std::string_view::npos || !is_known(item.substr(0, equals))) {
      return Status(Code::kInvalidArgument,
                    "codec " + scheme.codec + " has no option '" + std::string(item) + "'");
    }
    given[std::string(item.substr(0, equals))] = item.substr(equals + 1);
  }
  return fill_config(*info, scheme.codec_arg, scheme.rounding, given);
}

Result<Scheme> Scheme::parse(std::string_view name) {
  if (name.size() > kMaxName) {
    return Status(Code::kInvalidArgument, "a scheme name of " + std::to_string(name.size()) +
                                              " bytes is too long; at most " +
                                              std::to_string(kMaxName) + " are allowed");
  }
  for (std::size_t i = 0; i < name.size(); ++i) {
    const unsigned char c = static_cast<unsigned char>(name[i]);
    if (c <= 0x20 || c >= 0x7f) {
      return Status(Code::kInvalidArgument,
                    "byte " + std::to_string(i) + " of the scheme name (value " +
                        std::to_string(c) +
                        ") is not a visible ASCII character; names look like "
                        "'stepquant:4,period=16'");
    }
  }

  // codec[:argument]
  std::vector<std::string_view> codecs;
  for (const CodecInfo* info : all_codecs()) codecs.push_back(info->name);
  const std::string_view head = name.substr(0, name.find(','));
  const std::size_t colon = head.find(':');
  const std::string_view word = head.substr(0, colon);
  CodecConfig config;
  config.info = find_codec(word);
  if (config.info == nullptr) {
    return bad(name, Code::kInvalidArgument,
               "no codec is called '" + std::string(word) + "'; known are " + join(codecs) +
                   did_you_mean(word, codecs));
  }
  const CodecInfo& info = *config.info;
  if (colon == std::string_view::npos) {
    if (!info.args.empty()) config.arg = info.args.front();
  } else {
    config.arg = head.substr(colon + 1);
    if (info.args.empty()) {
      return bad(name, Code::kInvalidArgument,
                 std::string(info.name) + " takes no ':" + config.arg + "'; leave it out");
    }
    if (!info.allows_arg(config.arg)) {
      const std::string allowed = info.arg_rule.has_value() ? std::string(info.arg_rule->words)
                                                            : "one of " + join(info.args);
      return bad(name, Code::kInvalidArgument,
                 std::string(info.name) + ":" + config.arg + " is not known; use " +
                     std::string(info.name) + ": with " + allowed);
    }
  }

  // key=value, each key once
  std::vector<std::string_view> keys(kKeys.begin(), kKeys.end());
  for (const CodecOption& option : info.options) keys.push_back(option.key);
  std::map<std::string_view, std::string_view> given;
  std::size_t at = head.size();
  while (at < name.size()) {
    const std::string_view rest = name.substr(at + 1);
    const std::string_view item = rest.substr(0, rest.find(','));
    at += 1 + item.size();
    const std::size_t equals = item.find('=');
    if (equals == std::string_view::npos || equals == 0 || equals + 1 == item.size()) {
      return bad(name, Code::kInvalidArgument,
                 "'" + std::string(item) + "' is not an option; write key=value between commas");
    }
    const std::string_view key = item.substr(0, equals);
    if (std::find(keys.begin(), keys.end(), key) == keys.end()) {
      return bad(name, Code::kInvalidArgument,
                 std::string(info.name) + " has no option '" + std::string(key) +
                     "'; allowed are " + join(keys) + did_you_mean(key, keys));
    }
    if (!given.emplace(key, item.substr(equals + 1)).second) {
      return bad(name, Code::kInvalidArgument,
                 "option '" + std::string(key) + "' is given twice; give it once");
    }
  }

  const auto text_of = [&](std::string_view key) -> std::optional<std::string_view> {
    const auto found = given.find(key);
    if (found == given.end()) return std::nullopt;
    return found->second;
  };
  Rounding rounding = Rounding::kNearest;
  if (const auto text = text_of("rounding")) {
    SP_ASSIGN_OR_RETURN(rounding, word_value(name, "rounding", *text, kRoundings));
    if (!can_round(info, rounding)) {
      std::vector<std::string_view> able;
      for (const CodecInfo* other : all_codecs()) {
        if (can_round(*other, rounding)) able.push_back(other->name);
      }
      return bad(name, Code::kUnsupported,
                 std::string(info.name) + " cannot round by rounding=" + std::string(*text) +
                     "; leave it out, or use one of " + join(able));
    }
  }
  std::map<std::string, std::string> codec_options;
  for (const CodecOption& option : info.options) {
    if (const auto text = text_of(option.key)) codec_options[std::string(option.key)] = *text;
  }
  config = fill_config(info, config.arg, rounding, codec_options);
  SP_RETURN_IF_ERROR(info.validate(config));
  Scheme scheme = default_scheme(config);
  scheme.rounding = rounding;
  for (const CodecOption& option : info.options) {
    const std::string& value = config.options[std::string(option.key)];
    if (value == info.default_option(config, option.key)) continue;
    if (!scheme.codec_options.empty()) scheme.codec_options += ",";
    scheme.codec_options += std::string(option.key) + "=" + value;
  }

  if (const auto text = text_of("period")) {
    const std::optional<int> n = whole_number(*text, 1, kMaxPeriod);
    if (!n.has_value()) {
      return bad(name, Code::kInvalidArgument,
                 "period=" + std::string(*text) +
                     " is not allowed; give a whole number of tokens "
                     "from 1 to " +
                     std::to_string(kMaxPeriod));
    }
    scheme.period = *n;
  }
  if (const auto text = text_of("records")) {
    SP_ASSIGN_OR_RETURN(scheme.records, word_value(name, "records", *text, kRecords));
  }
  if (const auto text = text_of("mode")) {
    SP_ASSIGN_OR_RETURN(scheme.mode, word_value(name, "mode", *text, kModes));
  }
  if (const auto text = text_of("phase")) {
    SP_ASSIGN_OR_RETURN(scheme.phase, word_value(name, "phase", *text, kPhases));
  }
  if (const auto text = text_of("prefill")) {
    SP_ASSIGN_OR_RETURN(scheme.prefill_period, prefill_value(name, *text));
  }
  if (const auto text = text_of("beta")) {
    SP_ASSIGN_OR_RETURN(scheme.beta_bf16, word_value(name, "beta", *text, kBetas));
  }
  if (const auto text = text_of("conv")) {
    SP_ASSIGN_OR_RETURN(scheme.conv, word_value(name, "conv", *text, kConvs));
  }
  if (const auto text = text_of("seed")) {
    if (rounding != Rounding::kStochastic) {
      return bad(name, Code::kInvalidArgument,
                 "seed= feeds stochastic rounding; leave it out or add rounding=stochastic");
    }
    const std::optional<int> n = whole_number(*text, 0, kMaxSeed);
    if (!n.has_value()) {
      return bad(name, Code::kInvalidArgument,
                 "seed=" + std::string(*text) + " is not allowed; give a whole number from 0 to " +
                     std::to_string(kMaxSeed));
    }
    scheme.seed = static_cast<std::uint64_t>(*n);
  }

  // Without a window there is nothing that these could apply to.
  if (scheme.period == 1) {
    for (const std::string_view key : {"records", "mode", "phase"}) {
      if (!text_of(key)) continue;
      return bad(name, Code::kInvalidArgument,
                 std::string(key) +
                     "= describes the window of updates, and with period=1 there is "
                     "none: every token is rounded at once; leave it out or add period=16");
    }
    scheme.records = Scheme{}.records;
    scheme.mode = Scheme{}.mode;
    scheme.phase = Scheme{}.phase;
  }
  return scheme;
}

namespace {

/// Both printed forms: options in fixed order, those at their default left out unless `full`.
std::string print(const Scheme& scheme, bool full) {
  const Result<CodecConfig> config = codec_config(scheme);
  SP_CHECK(config.ok(), "a Scheme that parse() did not make");
  const Scheme defaults = default_scheme(*config);
  std::string text = scheme.codec;
  if (!scheme.codec_arg.empty()) text += ":" + scheme.codec_arg;
  const auto put = [&](std::string_view key, std::string_view value) {
    text += "," + std::string(key) + "=" + std::string(value);
  };
  const bool window = scheme.period > 1;
  if (full || scheme.period != defaults.period) put("period", std::to_string(scheme.period));
  if (window && (full || scheme.records != defaults.records)) {
    put("records", word_of(kRecords, scheme.records));
  }
  if (window && (full || scheme.mode != defaults.mode)) put("mode", word_of(kModes, scheme.mode));
  if (window && (full || scheme.phase != defaults.phase)) {
    put("phase", word_of(kPhases, scheme.phase));
  }
  if (full || scheme.prefill_period != defaults.prefill_period) {
    put("prefill", prefill_word(scheme.prefill_period));
  }
  if (full || scheme.beta_bf16) put("beta", word_of(kBetas, scheme.beta_bf16));
  if (scheme.conv != ConvFormat::kF32) put("conv", word_of(kConvs, scheme.conv));
  if (full || scheme.rounding != Rounding::kNearest) {
    put("rounding", word_of(kRoundings, scheme.rounding));
  }
  if (scheme.rounding == Rounding::kStochastic && (full || scheme.seed != 0)) {
    put("seed", std::to_string(scheme.seed));
  }
  if (full) {
    for (const CodecOption& option : config->info->options) {
      put(option.key, config->options.at(std::string(option.key)));
    }
  } else if (!scheme.codec_options.empty()) {
    text += "," + scheme.codec_options;
  }
  return text;
}

}  // namespace

std::string Scheme::name() const { return print(*this, false); }
std::string Scheme::full_name() const { return print(*this, true); }

bool Scheme::needs_plan() const {
  const Result<CodecConfig> config = codec_config(*this);
  SP_CHECK(config.ok(), "a Scheme that parse() did not make");
  return !config->info->plan_kind(*config).empty();
}

}  // namespace statepack
