#include "eval/report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <vector>

#include "eval/report_tables.hpp"

namespace statepack {
namespace {

constexpr std::string_view kDash = "-";
constexpr std::int64_t kMarks[] = {64, 256, 1024, 4096, 16384};

const Json* result_of(const Json& run, const std::string& piece) {
  const auto found = run["results"].find(piece);
  return found == run["results"].end() ? nullptr : &*found;
}

// The number under `key`, printed by `format`; a dash when it is missing.
std::string number(const Json* json, const char* key, std::string_view format, double scale = 1) {
  if (json == nullptr) return std::string(kDash);
  const auto found = json->find(key);
  if (found == json->end() || !found->is_number()) return std::string(kDash);
  return fmt::format(fmt::runtime(format), found->get<double>() * scale);
}

}  // namespace

std::vector<std::string> scheme_names(const Json& document) {
  std::vector<std::string> names;
  for (const auto& [name, run] : document["runs"].items()) names.push_back(name);
  std::stable_partition(names.begin(), names.end(), [](const auto& n) { return n == "fp32"; });
  return names;
}

std::vector<std::string> pieces_with(const Json& document, const char* metric) {
  std::vector<std::string> names;
  for (const Json& run : document["runs"]) {
    for (const auto& [name, result] : run["results"].items()) {
      if (result.contains(metric) && std::find(names.begin(), names.end(), name) == names.end()) {
        names.push_back(name);
      }
    }
  }
  return names;
}

namespace {

// A mean over the bucket that ends at `mark` tokens, i.e. over [7/8 mark, mark): of `piece`, or
// when it is empty of the forced piece with most positions there; a dash when no window was that
// long. A window's last token is read by no one, hence `mark`
// - 1.
const Json* bucket_before(const Json& run, std::int64_t mark, const std::string& piece) {
  const auto forced = run.find("forced");
  if (forced == run.end()) return nullptr;
  const Json* largest = nullptr;
  std::int64_t n_largest = 0;
  for (const auto& [name, sums] : forced->items()) {
    if (!piece.empty() && name != piece) continue;
    const auto buckets = sums.find("buckets");
    if (buckets == sums.end() || !buckets->is_array()) continue;
    for (const Json& b : *buckets) {
      const std::int64_t end = b.value("end", std::int64_t{0});
      const std::int64_t n = b.value("n", std::int64_t{0});
      if ((end == mark || end == mark - 1) && n > n_largest) {
        largest = &b;
        n_largest = n;
      }
    }
  }
  return largest;
}

std::string mean_of(const Json* bucket, const char* key, std::string_view format) {
  if (bucket == nullptr) return std::string(kDash);
  const double n = static_cast<double>(bucket->value("n", std::int64_t{1}));
  return number(bucket, key, format, 1 / n);
}

// A sum that is not finite is null in the file.
std::string excess_of(const Json* bucket) {
  const Json* nll = bucket == nullptr ? nullptr : find_value(*bucket, {"nll"});
  const Json* reference = bucket == nullptr ? nullptr : find_value(*bucket, {"reference_nll"});
  if (nll == nullptr || !nll->is_number() || reference == nullptr || !reference->is_number()) {
    return std::string(kDash);
  }
  return fmt::format("{:.4f}", (nll->get<double>() - reference->get<double>()) /
                                   static_cast<double>(bucket->value("n", std::int64_t{1})));
}

std::string mark_name(std::int64_t mark) {
  return mark >= 1024 ? fmt::format("{}k", mark / 1024) : fmt::format("{}", mark);
}

}  // namespace

Table overview(const Json& document) {
  const std::vector<std::string> tasks = pieces_with(document, "exact_match,none");
  const std::vector<std::string> texts = pieces_with(document, "perplexity,none");
  std::vector<std::string> header = {"scheme", "payload bits", "resident bits", "fp32 / resident"};
  for (const auto& task : tasks) header.push_back(task + " %");
  for (const auto& text : texts) header.push_back("ppl " + text);
  for (const std::int64_t mark : {1024, 4096, 16384}) header.push_back("KL " + mark_name(mark));
  Table table(header);
  for (const std::string& name : scheme_names(document)) {
    const Json& run = document["runs"][name];
    const Json* bits = &run["bits"];
    std::vector<std::string> row = {name, number(bits, "payload", "{:.2f}"),
                                    number(bits, "resident", "{:.2f}")};
    const double resident = bits->value("resident", 0.0);
    row.push_back(resident > 0 ? fmt::format("{:.2f}", 32 / resident) : std::string(kDash));
    for (const auto& task : tasks) {
      row.push_back(number(result_of(run, task), "exact_match,none", "{:.1f}", 100));
    }
    for (const auto& text : texts) {
      row.push_back(number(result_of(run, text), "perplexity,none", "{:.2f}"));
    }
    for (const std::int64_t mark : {1024, 4096, 16384}) {
      row.push_back(mean_of(bucket_before(run, mark, ""), "kl", "{:.2e}"));
    }
    table.add(row);
  }
  return table;
}

namespace {

// Buckets of a task in the order of its first run.
std::vector<std::string> bucket_names(const Json& document, const std::string& task) {
  for (const Json& run : document["runs"]) {
    const Json* result = result_of(run, task);
    if (result == nullptr || !result->contains("buckets")) continue;
    std::vector<std::string> names;
    for (const auto& [name, counts] : (*result)["buckets"].items()) names.push_back(name);
    return names;
  }
  return {};
}

std::string bucket_share(const Json* result, const std::string& bucket) {
  if (result == nullptr || !result->contains("buckets")) return std::string(kDash);
  const Json& buckets = (*result)["buckets"];
  const auto found = buckets.find(bucket);
  if (found == buckets.end()) return std::string(kDash);
  const double n = found->value("n", 1.0);
  return fmt::format("{:.0f}", 100 * found->value("right", 0.0) / n);
}

}  // namespace

Table task_table(const Json& document, const std::string& task) {
  const std::vector<std::string> buckets = bucket_names(document, task);
  std::vector<std::string> header = {"scheme", "n", "right %", "95 % interval"};
  for (const auto& bucket : buckets) header.push_back(bucket + " %");
  for (const char* h :
       {"reply tokens", "cut off", "same as fp32 %", "only here / only fp32", "p"}) {
    header.emplace_back(h);
  }
  Table table(header);
  for (const std::string& name : scheme_names(document)) {
    const Json& run = document["runs"][name];
    const Json* result = result_of(run, task);
    if (result == nullptr) continue;
    const auto n = run["n-samples"].find(task);
    std::vector<std::string> row = {
        name, n == run["n-samples"].end() ? std::string(kDash) : number(&*n, "effective", "{:.0f}"),
        number(result, "exact_match,none", "{:.1f}", 100),
        number(result, "exact_match_low,none", "{:.1f}", 100) + " to " +
            number(result, "exact_match_high,none", "{:.1f}", 100)};
    for (const auto& bucket : buckets) row.push_back(bucket_share(result, bucket));
    row.push_back(number(result, "reply_tokens,none", "{:.0f}"));
    row.push_back(number(result, "truncated,none", "{:.0f}"));
    row.push_back(number(result, "same_as_fp32,none", "{:.0f}", 100));
    row.push_back(number(result, "right_only_here,none", "{:.0f}") + " / " +
                  number(result, "right_only_fp32,none", "{:.0f}"));
    row.push_back(number(result, "p_value,none", "{:.2g}"));
    table.add(row);
  }
  return table;
}

ForcedShape forced_shape(const Json& document, const std::string& piece) {
  ForcedShape shape;
  for (const Json& run : document["runs"]) {
    const auto forced = run.find("forced");
    if (forced == run.end() || !forced->contains(piece)) continue;
    const Json& sums = (*forced)[piece];
    shape.n_windows = std::max(shape.n_windows, sums.value("n_windows", std::int64_t{0}));
    if (run["configs"].contains(piece)) {
      shape.context = run["configs"][piece].value("context", std::int64_t{0});
    }
  }
  return shape;
}

Table forced_table(const Json& document, const std::string& piece) {
  std::vector<std::int64_t> marks;
  std::vector<std::int64_t> drifts;
  const std::int64_t context = forced_shape(document, piece).context;
  for (const std::int64_t mark : kMarks) {
    if (mark <= context) marks.push_back(mark);
    if (mark <= context && mark >= 256) drifts.push_back(mark);
  }
  std::vector<std::string> header = {"scheme",  "ppl", "excess nats", "+-",
                                     "top-1 %", "KL",  "KL max"};
  for (const auto mark : marks) header.push_back("KL " + mark_name(mark));
  for (const auto mark : marks) header.push_back("top-1 " + mark_name(mark));
  for (const auto mark : marks) header.push_back("excess " + mark_name(mark));
  for (const auto mark : drifts) header.push_back("state error " + mark_name(mark));
  Table table(header);
  for (const std::string& name : scheme_names(document)) {
    const Json& run = document["runs"][name];
    const Json* result = result_of(run, piece);
    const auto forced = run.find("forced");
    if (result == nullptr || forced == run.end() || !forced->contains(piece)) continue;
    std::vector<std::string> row = {name,
                                    number(result, "perplexity,none", "{:.3f}"),
                                    number(result, "excess_nll,none", "{:.4f}"),
                                    number(result, "excess_nll_stderr,none", "{:.4f}"),
                                    number(result, "top1_agreement,none", "{:.2f}", 100),
                                    number(result, "kl,none", "{:.2e}"),
                                    number(result, "kl_max,none", "{:.2g}")};
    for (const auto mark : marks) {
      row.push_back(mean_of(bucket_before(run, mark, piece), "kl", "{:.2e}"));
    }
    for (const auto mark : marks) {
      const Json* b = bucket_before(run, mark, piece);
      const double n = b == nullptr ? 1 : static_cast<double>(b->value("n", std::int64_t{1}));
      row.push_back(number(b, "n_agree", "{:.2f}", 100 / n));
    }
    for (const auto mark : marks) {
      const Json* b = bucket_before(run, mark, piece);
      row.push_back(excess_of(b));
    }
    for (const auto mark : drifts) {
      std::string cell(kDash);
      const auto drift = (*forced)[piece].find("drift");
      if (drift != (*forced)[piece].end() && drift->is_array()) {
        for (const Json& d : *drift) {
          if (d.value("position", std::int64_t{0}) == mark && d.value("n", std::int64_t{0}) > 0) {
            cell = mean_of(&d, "relative_error", "{:.4f}");
          }
        }
      }
      row.push_back(cell);
    }
    table.add(row);
  }
  return table;
}

std::vector<std::string> legend() {
  std::vector<std::string> sentences;
  sentences.emplace_back(
      "payload bits: bits per state value of a packed state, scales and padding included; resident "
      "bits: with the open window and its cursors. Counted from the bytes that are allocated.");
  sentences.emplace_back(
      "tasks: share of greedy replies whose answer line is exactly right. Intervals are Wilson's; "
      "p "
      "is the exact McNemar test against fp32 on the same samples.");
  sentences.emplace_back(
      "KL: KL(fp32 || scheme) in nats when both read the same text token by token through their "
      "states; \"KL 1k\" is the mean over the last eighth before 1,024 tokens, [896, 1024), and so "
      "are the top-1 agreement in % and the excess nats there.");
  sentences.emplace_back("ppl: perplexity of the same reading, every window from a zero state.");
  sentences.emplace_back(
      "guard: roundings of one head that cost more than twice what the plan's calibration saw of "
      "it.");
  sentences.emplace_back("state error: |S - S_fp32| / |S_fp32|, mean over windows and layers.");
  return sentences;
}

std::string overview_table(const Json& document) {
  std::string text = overview(document).text();
  for (const std::string& name : scheme_names(document)) {
    const Json* forced = find_value(document["runs"][name], {"forced"});
    if (forced == nullptr) continue;
    for (const auto& [piece, sums] : forced->items()) {
      const auto n = sums.value("guarded_roundings", std::int64_t{0});
      if (n == 0) continue;
      const auto over = sums.value("over_guard", std::int64_t{0});
      text += fmt::format("guard of {} on {}: {} of {} roundings of a head, {:.2f} %\n", name,
                          piece, over, n, 100 * static_cast<double>(over) / static_cast<double>(n));
    }
  }
  return text;
}

std::string markdown_report(std::span<const Json> documents, const std::string& command) {
  const bool one = documents.size() == 1;
  std::string out = fmt::format("# Accuracy{}\n\nMade by `{}`; do not edit.\n\n",
                                one ? " of " + documents[0].value("model_name", "") : "", command);
  for (const std::string& sentence : legend()) out += "- " + sentence + "\n";
  out += "\n";
  const std::string_view heading = one ? "##" : "###";
  for (const Json& document : documents) {
    if (!one) out += fmt::format("## {}\n\n", document.value("model_name", ""));
    out += fmt::format("Model fingerprint `{:.16}`.\n\n{}\n",
                       document.value("model_fingerprint", ""), overview(document).markdown());
    for (const auto& task : pieces_with(document, "exact_match,none")) {
      out += fmt::format("{} {}\n\n{}\n", heading, task, task_table(document, task).markdown());
    }
    for (const auto& text : pieces_with(document, "kl,none")) {
      const ForcedShape shape = forced_shape(document, text);
      out += fmt::format("{} {}\n\n{} windows of {} tokens, each from a zero state.\n\n{}\n",
                         heading, text, shape.n_windows, shape.context,
                         forced_table(document, text).markdown());
    }
  }
  out.resize(out.find_last_not_of('\n') + 2);
  return out;
}

}  // namespace statepack
