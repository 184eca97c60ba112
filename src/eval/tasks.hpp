// Tasks with one right answer, scored by greedy replies. File format and scoring rule: the README
// of eval/data.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/progress.hpp"
#include "model/chat_template.hpp"
#include "model/model.hpp"
#include "model/tokenizer.hpp"
#include "runtime/engine.hpp"
#include "statepack/status.hpp"

namespace statepack {

struct TaskSample {
  std::string id, bucket, kind;
  std::int64_t size = 0;
  std::string question;  ///< the last user turn
  std::string answer;
  std::vector<std::int32_t> prompt;
  std::int64_t reference_tokens = 0;  ///< of the expected reply
  std::int64_t max_new_tokens = 0;
};

struct Task {
  std::string name;    ///< the file's name without folder and ending
  std::string digest;  ///< of the file's bytes
  std::vector<TaskSample> samples;
};

/// Reads a JSONL file: one object a line with id, bucket, size, messages, answer, max_new_tokens
/// and optionally kind, reference_tokens. Errors: as read_text_file(); kCorrupt naming file, line
/// and field.
Result<Task> load_task(const std::string& path, const Tokenizer& tokenizer,
                       const ChatTemplate& chat_template);

/// `n` samples taken evenly over the buckets, and evenly inside each; a remainder goes to the last
/// (longest) buckets. 0, or more than there are, gives all. Order of the file.
std::vector<TaskSample> pick_evenly(const std::vector<TaskSample>& samples, std::int64_t n);

/// The "id" of every line of a JSONL file. Errors: as read_text_file(); kCorrupt naming file and
/// line.
Result<std::vector<std::string>> load_ids(const std::string& path);

/// The text after the last "answer:" up to the end of that line, stripped; empty without one.
std::string_view answer_line(std::string_view reply);
inline bool is_right(std::string_view reply, std::string_view answer) {
  return answer_line(reply) == answer && reply.find("answer:") != std::string_view::npos;
}

struct SampleOutcome {
  std::string id, bucket;
  bool right = false;
  bool truncated = false;     ///< ran into max_new_tokens
  std::int64_t n_tokens = 0;  ///< of the reply, without its end token
  std::string hash;           ///< of the reply's tokens; empty until the reply has come to its end
  std::string text;
  Status status;  ///< why the reply ended, when it failed (counts as wrong)
};

struct TaskOptions {
  std::int64_t batch = 128;         ///< replies at the same time
  std::int64_t max_new_tokens = 0;  ///< cuts every sample's own limit; 0: does not
};

/// Tokens that a reply to the sample may have.
std::int64_t reply_limit(const TaskSample& sample, const TaskOptions& options);

/// Greedy replies to all samples, longest first so that the batch stays full. `outcomes` in the
/// order of the samples, whatever the batch. Adds to `guard`. Errors: kInterrupted (replies that
/// ended before are in `outcomes`), and as Engine and StatePool.
Status run_task(Model& model, ThreadPool& threads, const Tokenizer& tokenizer,
                const std::shared_ptr<const CompiledScheme>& scheme,
                std::span<const TaskSample> samples, const TaskOptions& options, Progress* progress,
                std::vector<SampleOutcome>* outcomes, GuardCounts* guard = nullptr);

}  // namespace statepack
