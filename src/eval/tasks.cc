#include "eval/tasks.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <numeric>

#include "base/file.hpp"
#include "base/hash.hpp"
#include "runtime/prompt.hpp"

namespace statepack {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::size_t kMaxTaskBytes = std::size_t{256} << 20;
constexpr std::string_view kAnswer = "answer:";
constexpr std::string_view kBlank = " \t\r\n\v\f";

// One line of the file; the caller adds file and line number to the error.
Result<TaskSample> parse_sample(std::string_view line, const Tokenizer& tokenizer,
                                const ChatTemplate& chat_template) {
  const auto bad = [](const std::string& what) { return Status(Code::kCorrupt, what); };
  const Json json = Json::parse(line, nullptr, false);
  if (!json.is_object()) return bad("is not a JSON object");
  TaskSample sample;
  const auto text = [&](const char* key, std::string* out, bool required) {
    const auto found = json.find(key);
    if (found == json.end()) return !required;
    if (!found->is_string()) return false;
    *out = found->get<std::string>();
    return true;
  };
  const auto number = [&](const char* key, std::int64_t* out, bool required) {
    const auto found = json.find(key);
    if (found == json.end()) return !required;
    if (!found->is_number_integer()) return false;
    *out = found->get<std::int64_t>();
    return *out >= 0;
  };
  if (!text("id", &sample.id, true) || sample.id.empty()) return bad("needs a text 'id'");
  if (!text("bucket", &sample.bucket, true)) return bad("needs a text 'bucket'");
  if (!text("kind", &sample.kind, false)) return bad("has a 'kind' that is not text");
  if (!text("answer", &sample.answer, true)) return bad("needs a text 'answer'");
  if (!number("size", &sample.size, false)) return bad("has a 'size' that is not a count");
  if (!number("max_new_tokens", &sample.max_new_tokens, true) || sample.max_new_tokens < 1) {
    return bad("needs 'max_new_tokens', a number of 1 or more");
  }
  sample.reference_tokens = sample.max_new_tokens;
  if (!number("reference_tokens", &sample.reference_tokens, false)) {
    return bad("has a 'reference_tokens' that is not a count");
  }
  const auto messages = json.find("messages");
  if (messages == json.end() || !messages->is_array() || messages->empty()) {
    return bad("needs 'messages', a list with at least one turn");
  }
  const Json& last = messages->back();
  if (last.is_object() && last.contains("content") && last["content"].is_string()) {
    sample.question = last["content"].get<std::string>();
  }
  SP_ASSIGN_OR_RETURN(sample.prompt,
                      encode_chat(tokenizer, chat_template, *messages, Json::object()));
  return sample;
}

/// Calls `take` for every line that is not blank. Its errors get file and line.
template <class Take>
Status for_each_line(const std::string& path, std::string_view text, Take take) {
  std::int64_t n_lines = 0;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    const std::string_view line = text.substr(begin, end - begin);
    begin = end + 1;
    ++n_lines;
    if (line.find_first_not_of(kBlank) == std::string_view::npos) continue;
    const Status status = take(line);
    if (!status.ok()) {
      return {status.code(), fmt::format("{}: line {} {}", path, n_lines, status.message())};
    }
  }
  return {};
}

}  // namespace

Result<std::vector<std::string>> load_ids(const std::string& path) {
  SP_ASSIGN_OR_RETURN(const std::string text, read_text_file(path, kMaxTaskBytes));
  std::vector<std::string> ids;
  SP_RETURN_IF_ERROR(for_each_line(path, text, [&](std::string_view line) -> Status {
    const Json json = Json::parse(line, nullptr, false);
    if (!json.is_object() || !json.contains("id") || !json["id"].is_string()) {
      return {Code::kCorrupt, "needs a text 'id'"};
    }
    ids.push_back(json["id"].get<std::string>());
    return {};
  }));
  return ids;
}

Result<Task> load_task(const std::string& path, const Tokenizer& tokenizer,
                       const ChatTemplate& chat_template) {
  SP_ASSIGN_OR_RETURN(const std::string text, read_text_file(path, kMaxTaskBytes));
  Task task;
  task.name = std::filesystem::path(path).stem().string();
  Sha256 sha;
  sha.update(text);
  task.digest = sha.hex();
  SP_RETURN_IF_ERROR(for_each_line(path, text, [&](std::string_view line) -> Status {
    SP_ASSIGN_OR_RETURN(TaskSample sample, parse_sample(line, tokenizer, chat_template));
    task.samples.push_back(std::move(sample));
    return {};
  }));
  if (task.samples.empty()) return Status(Code::kCorrupt, path + ": holds no samples");
  return task;
}

std::vector<TaskSample> pick_evenly(const std::vector<TaskSample>& samples, std::int64_t n) {
  if (n <= 0 || n >= std::ssize(samples)) return samples;
  std::vector<std::string> names;
  std::vector<std::vector<std::size_t>> buckets;
  for (std::size_t i = 0; i < samples.size(); ++i) {
    const auto found = std::find(names.begin(), names.end(), samples[i].bucket);
    if (found == names.end()) {
      names.push_back(samples[i].bucket);
      buckets.emplace_back();
    }
    const auto b = static_cast<std::size_t>(
        std::find(names.begin(), names.end(), samples[i].bucket) - names.begin());
    buckets[b].push_back(i);
  }
  // Buckets too small for their share pass the rest on: take one at a time, longest bucket first.
  std::vector<std::size_t> shares(buckets.size());
  for (std::int64_t left = n; left > 0;) {
    for (std::size_t b = buckets.size(); b-- > 0 && left > 0;) {
      if (shares[b] < buckets[b].size()) {
        ++shares[b];
        --left;
      }
    }
  }
  std::vector<std::size_t> taken;
  for (std::size_t b = 0; b < buckets.size(); ++b) {
    for (std::size_t i = 0; i < shares[b]; ++i) {
      taken.push_back(buckets[b][i * buckets[b].size() / shares[b]]);
    }
  }
  std::sort(taken.begin(), taken.end());
  std::vector<TaskSample> picked;
  picked.reserve(taken.size());
  for (const std::size_t i : taken) picked.push_back(samples[i]);
  return picked;
}

std::string_view answer_line(std::string_view reply) {
  const std::size_t at = reply.rfind(kAnswer);
  if (at == std::string_view::npos) return {};
  std::string_view line = reply.substr(at + kAnswer.size());
  line = line.substr(0, line.find('\n'));
  const std::size_t first = line.find_first_not_of(kBlank);
  if (first == std::string_view::npos) return {};
  return line.substr(first, line.find_last_not_of(kBlank) - first + 1);
}

std::int64_t reply_limit(const TaskSample& sample, const TaskOptions& options) {
  return options.max_new_tokens > 0 ? std::min(options.max_new_tokens, sample.max_new_tokens)
                                    : sample.max_new_tokens;
}

Status run_task(Model& model, ThreadPool& threads, const Tokenizer& tokenizer,
                const std::shared_ptr<const CompiledScheme>& scheme,
                std::span<const TaskSample> samples, const TaskOptions& options, Progress* progress,
                std::vector<SampleOutcome>* outcomes, GuardCounts* guard) {
  PoolConfig pool_config;
  pool_config.n_slots = std::min(options.batch, std::ssize(samples));
  pool_config.conv_floats = model.config().conv_floats();
  SP_ASSIGN_OR_RETURN(const std::unique_ptr<StatePool> pool,
                      StatePool::create(scheme, pool_config));
  EngineConfig config;
  config.max_batch = pool_config.n_slots;
  config.prefill_budget = INT64_MAX;  // nobody waits for a token: a full batch first
  for (const TaskSample& s : samples) {
    config.max_context = std::max(
        config.max_context, std::ssize(s.prompt) + std::max<std::int64_t>(1, s.max_new_tokens));
  }
  SP_ASSIGN_OR_RETURN(const std::unique_ptr<Engine> engine,
                      Engine::create(model, *pool, threads, &tokenizer, config));

  std::vector<std::size_t> order(samples.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return samples[a].reference_tokens > samples[b].reference_tokens;
  });

  outcomes->assign(samples.size(), {});
  for (const std::size_t i : order) {
    const TaskSample& sample = samples[i];
    SampleOutcome& outcome = (*outcomes)[i];
    outcome.id = sample.id;
    outcome.bucket = sample.bucket;
    Request request;
    request.prompt = sample.prompt;
    request.params.max_tokens = reply_limit(sample, options);
    const auto on_token = [&outcome, &sample, progress](const TokenEvent& event) {
      outcome.text += event.text;
      const std::int64_t n = std::ssize(event.tokens);
      if (progress != nullptr && event.choice != nullptr && n < sample.reference_tokens) {
        progress->advance(1);
      }
      if (!event.finish.has_value()) return;
      if (progress != nullptr)
        progress->advance(std::max<std::int64_t>(0, sample.reference_tokens - n));
      outcome.n_tokens = n;
      outcome.truncated = *event.finish == FinishReason::kLength;
      outcome.status = event.status;
      outcome.hash = to_hex(xxh3_128(std::as_bytes(event.tokens)));
      outcome.right = event.status.ok() && is_right(outcome.text, sample.answer);
    };
    SP_ASSIGN_OR_RETURN([[maybe_unused]] const RequestId id,
                        engine->submit(std::move(request), on_token));
  }
  SP_RETURN_IF_ERROR(engine->run());
  if (guard != nullptr) {
    const GuardCounts counts = pool->guard_counts();
    guard->roundings += counts.roundings;
    guard->over += counts.over;
  }
  return {};
}

}  // namespace statepack
