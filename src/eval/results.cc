#include "eval/results.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "base/file.hpp"
#include "base/hash.hpp"
#include "eval/statistics.hpp"

namespace statepack {
namespace {

constexpr std::string_view kFormat = "statepack-eval-1";
constexpr std::size_t kMaxBytes = std::size_t{256} << 20;

Json bucket_json(const PositionBucket& b) {
  return Json{{"begin", b.begin},
              {"end", b.end},
              {"n", b.n},
              {"nll", b.nll},
              {"reference_nll", b.reference_nll},
              {"excess_squares", b.excess_squares},
              {"kl", b.kl},
              {"kl_max", b.kl_max},
              {"n_agree", b.n_agree}};
}

// A results file is the user's own, but may be half of an older format: fields of the wrong kind
// read as zero, and a bucket that does not fit is refused by the caller.
template <class T>
T value_or(const Json& json, const char* key, T other) {
  const auto found = json.find(key);
  if (found == json.end() || !found->is_number()) return other;
  return found->get<T>();
}

std::string text_or_empty(const Json& json, const char* key) {
  const auto found = json.find(key);
  return found != json.end() && found->is_string() ? found->get<std::string>() : "";
}

bool is_true(const Json& json, const char* key) {
  const auto found = json.find(key);
  return found != json.end() && found->is_boolean() && found->get<bool>();
}

PositionBucket bucket_of(const Json& json) {
  PositionBucket b;
  b.begin = value_or<std::int64_t>(json, "begin", -1);
  b.end = value_or<std::int64_t>(json, "end", -1);
  b.n = value_or<std::int64_t>(json, "n", 0);
  b.nll = value_or(json, "nll", 0.0);
  b.reference_nll = value_or(json, "reference_nll", 0.0);
  b.excess_squares = value_or(json, "excess_squares", 0.0);
  b.kl = value_or(json, "kl", 0.0);
  b.kl_max = value_or(json, "kl_max", 0.0);
  b.n_agree = value_or<std::int64_t>(json, "n_agree", 0);
  return b;
}

void add_seconds(Json& run, double seconds) {
  run["total_evaluation_time_seconds"] =
      value_or(run, "total_evaluation_time_seconds", 0.0) + seconds;
}

bool is_text(const Json& json, const char* key) {
  const auto found = json.find(key);
  return found != json.end() && found->is_string();
}

bool all_objects(const Json& parts) {
  return std::all_of(parts.begin(), parts.end(), [](const Json& part) { return part.is_object(); });
}
bool all_numbers(const Json& parts) {
  return std::all_of(parts.begin(), parts.end(), [](const Json& part) { return part.is_number(); });
}

// Counts are integers; sums are numbers, or null where they were not finite when they were written.
bool is_count_or_sum(const std::string& key, const Json& value) {
  static const std::set<std::string> kCounts = {
      "begin",     "end",      "n",         "n_agree",           "position",
      "n_by_head", "n_failed", "n_windows", "guarded_roundings", "over_guard"};
  if (kCounts.count(key) > 0) return value.is_number_integer();
  return value.is_number() || value.is_null();
}

// Sums of a forced decode: two lists of objects beside numbers; drift may hold sums by head, too.
bool is_forced(const Json& forced) {
  if (!forced.is_object()) return false;
  for (const auto& [key, value] : forced.items()) {
    if (key != "buckets" && key != "drift" && !is_count_or_sum(key, value)) return false;
  }
  for (const char* key : {"buckets", "drift"}) {
    const auto list = forced.find(key);
    if (list == forced.end() || !list->is_array() || !all_objects(*list)) return false;
    for (const Json& part : *list) {
      for (const auto& [name, value] : part.items()) {
        if (name == "by_head" ? !value.is_array() : !is_count_or_sum(name, value)) return false;
      }
      if (part.contains("by_head") != part.contains("n_by_head")) return false;
    }
  }
  return true;
}

// What record_heads() writes.
bool are_heads(const Json& heads) {
  const Json* tokens = heads.is_object() ? find_value(heads, {"tokens"}) : nullptr;
  return tokens != nullptr && tokens->is_number_integer() && is_text(heads, "text");
}

// The parts that later code takes for granted.
bool is_run(const Json& run) {
  if (!run.is_object() || !is_text(run, "scheme") || !is_text(run, "plan_fingerprint"))
    return false;
  for (const char* key : {"bits", "results", "configs", "n-samples", "higher_is_better"}) {
    const auto part = run.find(key);
    if (part == run.end() || !part->is_object()) return false;
  }
  for (const char* key : {"results", "configs", "n-samples", "higher_is_better"}) {
    if (!all_objects(run[key])) return false;
  }
  if (!all_numbers(run["bits"])) return false;
  for (const Json& config : run["configs"]) {
    const auto context = config.find("context");
    if (context != config.end() && !context->is_number_integer()) return false;
  }
  for (const Json& result : run["results"]) {
    const auto buckets = result.find("buckets");
    if (buckets == result.end()) continue;
    if (!buckets->is_object() || !all_objects(*buckets)) return false;
    if (!std::all_of(buckets->begin(), buckets->end(), all_numbers)) return false;
  }
  for (const char* key : {"samples", "forced", "stopped"}) {
    const auto part = run.find(key);
    if (part == run.end()) continue;
    if (!part->is_object()) return false;
  }
  if (const auto forced = run.find("forced"); forced != run.end()) {
    if (!std::all_of(forced->begin(), forced->end(), is_forced)) return false;
  }
  const Json* samples = find_value(run, {"samples"});
  if (samples == nullptr) return true;
  for (const Json& list : *samples) {
    if (!list.is_array()) return false;
    for (const Json& sample : list) {
      const auto right = sample.is_object() ? sample.find("right") : sample.end();
      if (!sample.is_object() || !is_text(sample, "id") || !is_text(sample, "hash") ||
          right == sample.end() || !right->is_boolean()) {
        return false;
      }
    }
  }
  return true;
}

// By meaning: a name written by another version may spell out fewer options.
bool same_scheme(const std::string& a, const std::string& b) {
  if (a == b) return true;
  const Result<Scheme> left = Scheme::parse(a), right = Scheme::parse(b);
  return left.ok() && right.ok() && *left == *right;
}

// Mean width by layer and head.
void record_plan_bits(Json& run, const CompiledScheme& scheme) {
  if (scheme.plan_fingerprint().empty()) return;
  Json layers = Json::array();
  for (const CompiledLayer& layer : scheme.layers()) {
    Json heads = Json::array();
    const auto K = static_cast<std::size_t>(layer.shape.K);
    for (std::size_t h = 0; h < static_cast<std::size_t>(layer.shape.n_value_heads); ++h) {
      if (layer.plan.bits.empty()) {
        heads.push_back(layer.plan.high[h] != 0 ? 8 : 4);
        continue;
      }
      double sum = 0;
      for (std::size_t i = 0; i < K; ++i) sum += layer.plan.bits[h * K + i];
      heads.push_back(sum / static_cast<double>(K));
    }
    layers.push_back(std::move(heads));
  }
  run["plan_bits"] = std::move(layers);
}

std::int64_t piece_size(const Json& run, const std::string& name) {
  const Json* n = find_value(run, {"n-samples", name, "effective"});
  return n != nullptr && n->is_number_integer() ? n->get<std::int64_t>() : 0;
}

}  // namespace

const Json* find_value(const Json& json, std::initializer_list<std::string_view> path) {
  const Json* at = &json;
  for (const std::string_view key : path) {
    if (!at->is_object()) return nullptr;
    const auto found = at->find(key);
    if (found == at->end()) return nullptr;
    at = &*found;
  }
  return at;
}

Json new_results(const std::string& model_name, const std::string& model_fingerprint) {
  return Json{{"format", kFormat},
              {"model_name", model_name},
              {"model_fingerprint", model_fingerprint},
              {"runs", Json::object()}};
}

Result<Json> load_results(const std::string& path) {
  SP_ASSIGN_OR_RETURN(const std::string text, read_text_file(path, kMaxBytes));
  Json document = Json::parse(text, nullptr, false);
  const Json* runs = document.is_object() ? find_value(document, {"runs"}) : nullptr;
  const bool right = runs != nullptr && document.value("format", Json()) == kFormat &&
                     is_text(document, "model_name") && is_text(document, "model_fingerprint") &&
                     runs->is_object() && std::all_of(runs->begin(), runs->end(), is_run) &&
                     (!document.contains("heads") || are_heads(document["heads"]));
  if (!right) {
    return Status(Code::kCorrupt,
                  path + ": is not a results file of `statepack eval`; name another file for -o");
  }
  return document;
}

Status save_results(const std::string& path, const Json& document) {
  SP_ASSIGN_OR_RETURN(AtomicFile file, AtomicFile::create(path));
  SP_RETURN_IF_ERROR(file.write(document.dump(1) + "\n"));
  return file.commit();
}

Json& results_run(Json& document, const CompiledScheme& scheme) {
  Json& run = document["runs"][scheme.scheme().name()];
  const Json* had_scheme = find_value(run, {"scheme"});
  const Json* had_plan = find_value(run, {"plan_fingerprint"});
  if (had_scheme != nullptr &&
      same_scheme(had_scheme->get<std::string>(), scheme.scheme().full_name()) &&
      had_plan != nullptr && *had_plan == scheme.plan_fingerprint()) {
    record_plan_bits(run, scheme);  // files of older versions have none
    return run;
  }
  const SchemeBits bits = scheme.bits();
  run = Json{{"scheme", scheme.scheme().full_name()},
             {"plan_fingerprint", scheme.plan_fingerprint()},
             {"bits",
              {{"payload", bits.payload},
               {"resident", bits.resident},
               {"page_bytes", bits.page_bytes},
               {"window_bytes", bits.window_bytes},
               {"cursor_bytes", bits.cursor_bytes},
               {"n_values", bits.n_values}}},
             {"results", Json::object()},
             {"configs", Json::object()},
             {"n-samples", Json::object()},
             {"higher_is_better", Json::object()},
             {"total_evaluation_time_seconds", 0.0}};
  record_plan_bits(run, scheme);
  return run;
}

void record_heads(Json& document, const std::string& text, std::int64_t n_tokens,
                  const std::vector<std::vector<HeadStatistics>>& heads) {
  Json layers = Json::array();
  for (const auto& layer : heads) {
    Json list = Json::array();
    for (const HeadStatistics& h : layer) {
      list.push_back(Json{{"half_life", h.half_life},  // infinite: null
                          {"half_life_min", h.half_life_min},
                          {"half_life_max", h.half_life_max},
                          {"lifetime", h.lifetime},
                          {"omega_spread", h.omega_spread},
                          {"row_peak", h.row_peak},
                          {"column_peak", h.column_peak},
                          {"rms", h.rms}});
    }
    layers.push_back(std::move(list));
  }
  document["heads"] = Json{{"text", text}, {"tokens", n_tokens}, {"layers", std::move(layers)}};
}

Json harness_results(const Json& document, const std::string& scheme) {
  const Json& run = document["runs"][scheme];
  Json out = Json::object();
  out["results"] = Json::object();
  for (const auto& [piece, result] : run["results"].items()) {
    Json& to = out["results"][piece];
    for (const auto& [key, value] : result.items()) {
      if (key == "alias" || key.find(',') != std::string::npos) to[key] = value;
    }
  }
  out["group_subtasks"] = Json::object();
  out["configs"] = run["configs"];
  out["versions"] = Json::object();
  out["n-shot"] = Json::object();
  for (const auto& [piece, result] : out["results"].items()) {
    out["group_subtasks"][piece] = Json::array();
    out["versions"][piece] = 1;
    out["n-shot"][piece] = 0;
  }
  out["higher_is_better"] = run["higher_is_better"];
  out["n-samples"] = run["n-samples"];
  out["config"] = Json{
      {"model", "statepack"},
      {"model_args",
       {{"pretrained", document.value("model_name", "")}, {"state", run.value("scheme", "")}}}};
  out["model_source"] = "statepack";
  out["model_name"] = document.value("model_name", "");
  out["model_sha"] = document.value("model_fingerprint", "");
  out["total_evaluation_time_seconds"] =
      std::to_string(value_or(run, "total_evaluation_time_seconds", 0.0));
  return out;
}

Json task_config(const Task& task, std::int64_t n_samples, const TaskOptions& options,
                 const std::set<std::string>& without) {
  Json config{{"task", task.name},
              {"output_type", "generate_until"},
              {"digest", task.digest},
              {"samples", n_samples},
              {"max_new_tokens", options.max_new_tokens}};
  std::string ids;
  for (const TaskSample& sample : task.samples) {
    if (without.count(sample.id) > 0) ids += sample.id + "\n";
  }
  if (!ids.empty()) config["without"] = to_hex(xxh3_128(std::as_bytes(std::span(ids))));
  return config;
}

bool has_task(const Json& run, const std::string& task, const Json& config) {
  const Json* had = find_value(run, {"configs", task});
  return had != nullptr && *had == config && find_value(run, {"results", task}) != nullptr;
}

namespace {

Json sample_entry(const SampleOutcome& o) {
  Json entry{{"id", o.id}, {"right", o.right}, {"tokens", o.n_tokens}, {"hash", o.hash}};
  if (!o.status.ok()) entry["failed"] = true;
  return entry;
}

/// Whether replies of both are replies to the same samples with the same limits.
bool same_samples(const Json* had, const Json& config) {
  return had != nullptr && had->is_object() && had->value("digest", Json()) == config["digest"] &&
         had->value("max_new_tokens", Json()) == config["max_new_tokens"];
}

/// Adds what `others` holds of samples that `entries` does not; failed replies are not kept.
void add_others(Json& entries, const Json* others) {
  if (others == nullptr || !others->is_array()) return;
  std::set<std::string> ids;
  for (const Json& entry : entries) ids.insert(text_or_empty(entry, "id"));
  for (const Json& entry : *others) {
    if (!entry.is_object() || is_true(entry, "failed")) continue;
    if (ids.insert(text_or_empty(entry, "id")).second) entries.push_back(entry);
  }
}

void keep_stopped(Json& run, const std::string& task, const Json& config, Json samples) {
  run["stopped"][task] = Json{{"config", config}, {"samples", std::move(samples)}};
}

}  // namespace

void record_stopped(Json& run, const Task& task, const Json& config,
                    const std::vector<SampleOutcome>& outcomes, double seconds) {
  add_seconds(run, seconds);
  Json samples = Json::array();
  for (const SampleOutcome& o : outcomes) {
    if (!o.hash.empty()) samples.push_back(sample_entry(o));
  }
  if (same_samples(find_value(run, {"stopped", task.name, "config"}), config)) {
    add_others(samples, find_value(run, {"stopped", task.name, "samples"}));
  }
  if (!samples.empty()) keep_stopped(run, task.name, config, std::move(samples));
}

std::map<std::string, SampleOutcome> known_outcomes(const Json& run, const Task& task,
                                                    const Json& config,
                                                    const TaskOptions& options) {
  std::map<std::string, const TaskSample*> samples;
  for (const TaskSample& sample : task.samples) samples[sample.id] = &sample;
  std::map<std::string, SampleOutcome> known;
  const auto take = [&](const Json* entries) {
    if (entries == nullptr || !entries->is_array()) return;
    for (const Json& entry : *entries) {
      if (!entry.is_object() || is_true(entry, "failed")) continue;
      SampleOutcome o;
      o.id = text_or_empty(entry, "id");
      o.right = is_true(entry, "right");
      o.n_tokens = value_or<std::int64_t>(entry, "tokens", -1);
      o.hash = text_or_empty(entry, "hash");
      const auto found = samples.find(o.id);
      if (found == samples.end() || o.hash.empty() || o.n_tokens < 0) continue;
      o.bucket = found->second->bucket;
      o.truncated = o.n_tokens >= reply_limit(*found->second, options);
      known.emplace(o.id, std::move(o));
    }
  };
  const Json* failed = find_value(run, {"results", task.name, "failed,none"});
  const bool any_failed = failed != nullptr && *failed != 0;  // older files do not say which
  if (same_samples(find_value(run, {"configs", task.name}), config) && !any_failed) {
    take(find_value(run, {"samples", task.name}));
  }
  if (same_samples(find_value(run, {"stopped", task.name, "config"}), config)) {
    take(find_value(run, {"stopped", task.name, "samples"}));
  }
  return known;
}

void record_task(Json& run, const Task& task, const Json& config,
                 const std::vector<SampleOutcome>& outcomes, double seconds) {
  const auto n = std::ssize(outcomes);
  std::int64_t n_right = 0;
  std::int64_t n_tokens = 0;
  std::int64_t n_truncated = 0;
  std::int64_t n_failed = 0;
  Json buckets = Json::object();
  Json samples = Json::array();
  std::vector<std::string> order;  // of the buckets: first seen first
  std::map<std::string, std::pair<std::int64_t, std::int64_t>> counts;
  for (const SampleOutcome& o : outcomes) {
    n_right += o.right ? 1 : 0;
    n_tokens += o.n_tokens;
    n_truncated += o.truncated ? 1 : 0;
    n_failed += o.status.ok() ? 0 : 1;
    if (counts.find(o.bucket) == counts.end()) order.push_back(o.bucket);
    auto& [right, all] = counts[o.bucket];
    right += o.right ? 1 : 0;
    ++all;
    samples.push_back(sample_entry(o));
  }
  for (const std::string& name : order) {
    buckets[name] = Json{{"n", counts[name].second}, {"right", counts[name].first}};
  }
  const double share = static_cast<double>(n_right) / static_cast<double>(n);
  const Interval interval = wilson(n_right, n);
  run["results"][task.name] =
      Json{{"alias", task.name},
           {"exact_match,none", share},
           {"exact_match_stderr,none",
            n > 1 ? std::sqrt(share * (1 - share) / static_cast<double>(n - 1)) : 0.0},
           {"exact_match_low,none", interval.low},
           {"exact_match_high,none", interval.high},
           {"reply_tokens,none", static_cast<double>(n_tokens) / static_cast<double>(n)},
           {"truncated,none", n_truncated},
           {"failed,none", n_failed},
           {"buckets", buckets}};
  // Replies to samples outside of this piece stay known: a later run may ask for more.
  Json all = samples;
  if (same_samples(find_value(run, {"configs", task.name}), config)) {
    add_others(all, find_value(run, {"samples", task.name}));
  }
  if (same_samples(find_value(run, {"stopped", task.name, "config"}), config)) {
    add_others(all, find_value(run, {"stopped", task.name, "samples"}));
  }
  const bool any_others = all.size() > samples.size();
  run["configs"][task.name] = config;
  run["n-samples"][task.name] = Json{{"original", std::ssize(task.samples)}, {"effective", n}};
  run["higher_is_better"][task.name] = Json{{"exact_match", true}};
  run["samples"][task.name] = std::move(samples);
  if (any_others) {
    keep_stopped(run, task.name, config, std::move(all));
  } else if (run.contains("stopped")) {
    run["stopped"].erase(task.name);
    if (run["stopped"].empty()) run.erase("stopped");
  }
  add_seconds(run, seconds);
}

Json forced_config(const std::string& digest, const ForcedOptions& options) {
  return Json{
      {"output_type", "loglikelihood_rolling"}, {"digest", digest}, {"context", options.context}};
}

namespace {

// A sum that was not finite when it was written. Nothing can be added to it.
bool has_null(const Json& json) {
  if (!json.is_structured()) return json.is_null();
  return std::any_of(json.begin(), json.end(), has_null);
}

}  // namespace

ForcedResult forced_so_far(const Json& run, const std::string& name, const Json& config) {
  ForcedResult empty = empty_forced_result(config["context"].get<std::int64_t>());
  const Json* had = find_value(run, {"configs", name});
  const Json* forced = find_value(run, {"forced", name});
  if (had == nullptr || *had != config || forced == nullptr) return empty;
  ForcedResult result = empty;
  result.n_windows = value_or<std::int64_t>(*forced, "n_windows", 0);
  result.n_failed = value_or<std::int64_t>(*forced, "n_failed", 0);
  result.guard.roundings = value_or<std::int64_t>(*forced, "guarded_roundings", 0);
  result.guard.over = value_or<std::int64_t>(*forced, "over_guard", 0);
  const Json* buckets = find_value(*forced, {"buckets"});
  const Json* drift = find_value(*forced, {"drift"});
  if (buckets == nullptr || !buckets->is_array() || buckets->size() != result.buckets.size() ||
      drift == nullptr || !drift->is_array() || drift->size() != result.drift.size() ||
      has_null(*buckets) || has_null(*drift)) {
    return empty;
  }
  for (std::size_t i = 0; i < result.buckets.size(); ++i) {
    const PositionBucket b = bucket_of((*buckets)[i]);
    if (b.begin != result.buckets[i].begin || b.end != result.buckets[i].end) return empty;
    result.buckets[i] = b;
  }
  for (std::size_t i = 0; i < result.drift.size(); ++i) {
    result.drift[i].n = value_or<std::int64_t>((*drift)[i], "n", 0);
    result.drift[i].relative_error = value_or((*drift)[i], "relative_error", 0.0);
    const Json* by_head = find_value((*drift)[i], {"by_head"});
    if (by_head == nullptr || !by_head->is_array()) continue;
    result.drift[i].n_by_head = value_or<std::int64_t>((*drift)[i], "n_by_head", 0);
    for (const Json& sum : *by_head) {
      result.drift[i].by_head.push_back(sum.is_number() ? sum.get<double>() : 0.0);
    }
  }
  return result;
}

void record_forced(Json& run, const std::string& name, const Json& config,
                   const ForcedResult& result, double seconds) {
  Json sums{{"n_windows", result.n_windows}, {"n_failed", result.n_failed}};
  sums["buckets"] = Json::array();
  for (const PositionBucket& b : result.buckets) sums["buckets"].push_back(bucket_json(b));
  sums["drift"] = Json::array();
  for (const StateDrift& d : result.drift) {
    Json drift{{"position", d.position}, {"n", d.n}, {"relative_error", d.relative_error}};
    if (!d.by_head.empty()) {
      drift["n_by_head"] = d.n_by_head;
      drift["by_head"] = d.by_head;
    }
    sums["drift"].push_back(std::move(drift));
  }
  if (result.guard.roundings > 0) {
    sums["guarded_roundings"] = result.guard.roundings;
    sums["over_guard"] = result.guard.over;
  }
  run["forced"][name] = std::move(sums);
  run["configs"][name] = config;
  const PositionBucket total = result.total();
  const auto n = static_cast<double>(std::max<std::int64_t>(1, total.n));
  const double excess = (total.nll - total.reference_nll) / n;
  const double variance = std::max(0.0, total.excess_squares / n - excess * excess);
  run["results"][name] = Json{{"alias", name},
                              {"perplexity,none", std::exp(total.nll / n)},
                              {"excess_nll,none", excess},
                              {"excess_nll_stderr,none", std::sqrt(variance / n)},
                              {"kl,none", total.kl / n},
                              {"kl_max,none", total.kl_max},
                              {"top1_agreement,none", static_cast<double>(total.n_agree) / n},
                              {"failed,none", result.n_failed}};
  if (total.n == 0) {  // every window failed: there is no mean to report
    for (auto& [key, value] : run["results"][name].items()) {
      if (value.is_number_float()) value = nullptr;
    }
  }
  if (result.guard.roundings > 0) {
    run["results"][name]["over_guard,none"] =
        static_cast<double>(result.guard.over) / static_cast<double>(result.guard.roundings);
  }
  run["n-samples"][name] = Json{{"original", total.n}, {"effective", total.n}};
  run["higher_is_better"][name] =
      Json{{"perplexity", false}, {"kl", false}, {"top1_agreement", true}};
  add_seconds(run, seconds);
}

void record_perplexity(Json& run, const std::string& name, const Perplexity& perplexity) {
  run["results"][name] = Json{
      {"alias", name},
      {"perplexity,none", std::exp(perplexity.nll / static_cast<double>(perplexity.n_tokens))}};
  run["n-samples"][name] =
      Json{{"original", perplexity.n_tokens}, {"effective", perplexity.n_tokens}};
  run["higher_is_better"][name] = Json{{"perplexity", false}};
}

void compare_with_fp32(Json& document) {
  struct Reply {
    bool right;
    std::string hash;
  };
  const Json* reference = find_value(document, {"runs", kReference, "samples"});
  if (reference == nullptr || !reference->is_object()) return;
  for (const auto& [task, list] : reference->items()) {
    std::map<std::string, Reply> replies;
    for (const Json& sample : list) {
      replies[sample.value("id", "")] = {sample.value("right", false), sample.value("hash", "")};
    }
    for (auto& [name, run] : document["runs"].items()) {
      const Json* samples = find_value(run, {"samples", task});
      if (samples == nullptr || find_value(run, {"results", task}) == nullptr) continue;
      std::int64_t n = 0;
      std::int64_t n_same = 0;
      std::int64_t only_here = 0;
      std::int64_t only_fp32 = 0;
      for (const Json& sample : *samples) {
        const auto found = replies.find(sample.value("id", ""));
        if (found == replies.end()) continue;
        const bool right = sample.value("right", false);
        ++n;
        n_same += sample.value("hash", "") == found->second.hash ? 1 : 0;
        only_here += right && !found->second.right ? 1 : 0;
        only_fp32 += !right && found->second.right ? 1 : 0;
      }
      if (n == 0) continue;
      Json& result = run["results"][task];
      result["same_as_fp32,none"] = static_cast<double>(n_same) / static_cast<double>(n);
      result["right_only_here,none"] = only_here;
      result["right_only_fp32,none"] = only_fp32;
      result["p_value,none"] = mcnemar(only_here, only_fp32);
    }
  }
}

Json summary(const Json& document) {
  Json out = document;
  for (auto& [name, run] : out["runs"].items()) {
    run.erase("samples");
    run.erase("forced");
    run.erase("stopped");
  }
  return out;
}

Result<std::vector<Json>> merge_by_model(const std::vector<Json>& documents) {
  std::vector<std::vector<Json>> groups;
  for (const Json& document : documents) {
    const auto same = [&](const std::vector<Json>& group) {
      return group[0].value("model_fingerprint", "") == document.value("model_fingerprint", "");
    };
    const auto group = std::find_if(groups.begin(), groups.end(), same);
    if (group == groups.end()) {
      groups.push_back({document});
    } else {
      group->push_back(document);
    }
  }
  std::vector<Json> merged;
  for (const std::vector<Json>& group : groups) {
    SP_ASSIGN_OR_RETURN(Json of_model, merge_results(group));
    merged.push_back(std::move(of_model));
  }
  return merged;
}

Result<Json> merge_results(const std::vector<Json>& documents) {
  Json merged = new_results("", "");
  for (const Json& document : documents) {
    for (const char* key : {"model_name", "model_fingerprint"}) {
      const std::string theirs = document.value(key, "");
      const std::string ours = merged.value(key, "");
      if (ours.empty()) {
        merged[key] = theirs;
      } else if (!theirs.empty() && theirs != ours) {
        return Status(Code::kMismatch,
                      fmt::format("the results are of two models ({} {} and {}); report them apart",
                                  key, ours, theirs));
      }
    }
    if (document.contains("heads") && !merged.contains("heads"))
      merged["heads"] = document["heads"];
    for (const auto& [name, run] : document["runs"].items()) {
      Json& to = merged["runs"][name];
      if (!to.is_object()) {
        to = run;
        continue;
      }
      if (to.value("plan_fingerprint", "") != run.value("plan_fingerprint", "") ||
          !same_scheme(to.value("scheme", ""), run.value("scheme", ""))) {
        return Status(
            Code::kMismatch,
            fmt::format("the results hold two different runs of {} (another plan or other "
                        "options); report them apart",
                        name));
      }
      const Json* results = find_value(run, {"results"});
      if (results == nullptr || !results->is_object()) continue;
      for (const auto& [piece, result] : results->items()) {
        if (piece_size(to, piece) > piece_size(run, piece)) continue;
        for (const char* part :
             {"results", "configs", "n-samples", "higher_is_better", "samples", "forced"}) {
          if (const Json* from = find_value(run, {part, piece}); from != nullptr)
            to[part][piece] = *from;
        }
      }
      add_seconds(to, value_or(run, "total_evaluation_time_seconds", 0.0));
    }
  }
  compare_with_fp32(merged);
  return merged;
}

}  // namespace statepack
