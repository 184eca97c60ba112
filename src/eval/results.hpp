// Results of evaluation as one JSON document: written after every finished piece, so that a run
// that was stopped goes on where it was, and read again by the report.
//
// { "format": "statepack-eval-1", "model_name", "model_fingerprint", "runs": { SCHEME: RUN } }
// RUN has the keys of lm-evaluation-harness (results, configs, n-samples, higher_is_better,
// total_evaluation_time_seconds; metrics as "exact_match,none") and of our own: scheme (all
// options), plan_fingerprint, bits, plan_bits (mean width by layer and head, where there is a
// plan), samples (one entry a reply), stopped (the same of a piece that is not complete), forced
// (sums by position). Beside the runs, "heads" may say
// what the model's heads are like.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "calibrate/head_statistics.hpp"
#include "eval/forced.hpp"
#include "eval/tasks.hpp"
#include "scheme/layers.hpp"
#include "statepack/status.hpp"

namespace statepack {

using Json = nlohmann::ordered_json;

/// The scheme that all others are held against.
inline constexpr const char* kReference = "fp32";

/// The value behind a path of keys; null where one is missing.
const Json* find_value(const Json& json, std::initializer_list<std::string_view> path);

/// An empty document of a model.
Json new_results(const std::string& model_name, const std::string& model_fingerprint);
/// Errors: as read_text_file(); kCorrupt when it is not such a document.
Result<Json> load_results(const std::string& path);
Status save_results(const std::string& path, const Json& document);

/// The run of a scheme; starts a new one when there is none, or when it was made under another plan
/// or other defaults.
Json& results_run(Json& document, const CompiledScheme& scheme);

/// What a finished piece depends on. Two pieces with equal configurations need not run twice.
/// `without`: ids of samples that were left out before n_samples were picked.
Json task_config(const Task& task, std::int64_t n_samples, const TaskOptions& options,
                 const std::set<std::string>& without = {});
bool has_task(const Json& run, const std::string& task, const Json& config);
void record_task(Json& run, const Task& task, const Json& config,
                 const std::vector<SampleOutcome>& outcomes, double seconds);

/// Keeps the replies of a piece that was stopped: those of `outcomes` that came to their end.
void record_stopped(Json& run, const Task& task, const Json& config,
                    const std::vector<SampleOutcome>& outcomes, double seconds);
/// Replies to samples of the task that the run has already, without their texts: of a stopped
/// piece, and of one with other samples. A reply depends on its sample and the scheme alone. By id.
std::map<std::string, SampleOutcome> known_outcomes(const Json& run, const Task& task,
                                                    const Json& config, const TaskOptions& options);

/// `text` names the file; `digest` is of its tokens.
Json forced_config(const std::string& digest, const ForcedOptions& options);
/// The sums so far; empty ones when there are none or they have another configuration.
ForcedResult forced_so_far(const Json& run, const std::string& name, const Json& config);
void record_forced(Json& run, const std::string& name, const Json& config,
                   const ForcedResult& result, double seconds);
void record_perplexity(Json& run, const std::string& name, const Perplexity& perplexity);

/// What the heads of the model are like on the first `n_tokens` of a text ("heads").
void record_heads(Json& document, const std::string& text, std::int64_t n_tokens,
                  const std::vector<std::vector<HeadStatistics>>& heads);

/// A run as lm-evaluation-harness writes its results files: to be read by tools made for those.
Json harness_results(const Json& document, const std::string& scheme);

/// Adds to every task of every run the share of replies that are fp32's, and who is right alone.
void compare_with_fp32(Json& document);

/// The document without its entries by sample: what --json prints.
Json summary(const Json& document);

/// Joins the runs of several documents of one model; for each piece the one with more samples, and
/// the later one of two equals, wins. Errors: kMismatch for different models (unless one has no
/// name).
Result<Json> merge_results(const std::vector<Json>& documents);

/// The same by model, in the order in which models appear. Errors: as merge_results().
Result<std::vector<Json>> merge_by_model(const std::vector<Json>& documents);

}  // namespace statepack
