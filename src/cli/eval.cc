// statepack eval: tasks, forced decode, side-by-side answers, reports.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <map>
#include <set>

#include "base/file.hpp"
#include "base/hash.hpp"
#include "base/progress.hpp"
#include "cli/command.hpp"
#include "eval/html.hpp"
#include "eval/report.hpp"
#include "eval/results.hpp"
#include "eval/table.hpp"
#include "runtime/sizing.hpp"

namespace statepack::cli {
namespace {

using Clock = std::chrono::steady_clock;
using Schemes = std::vector<std::shared_ptr<const CompiledScheme>>;

constexpr std::int64_t kLongContext = 16384, kCompareSamples = 24;  // of --compare
constexpr std::size_t kShown = 80;  // characters of an answer on the terminal

struct Options {
  ModelOptions model;
  std::vector<std::string> states = {kReference};
  std::string compare;
  std::string data = "eval/data";
  std::vector<std::string> tasks;
  std::int64_t samples = 0;
  std::vector<std::string> without;
  TaskOptions task;
  std::vector<std::string> texts;
  std::vector<std::int64_t> contexts = {4096};
  std::int64_t windows = 0;
  std::int64_t window_batch = 8;
  bool chunked = false;
  std::string out;
  std::string markdown;
  std::string html;
  std::string harness;
  std::string report;
  std::vector<std::string> inputs;
  std::string replies;
  std::vector<std::string> ids;
  double max_kl = std::numeric_limits<double>::infinity();
  double max_drop = std::numeric_limits<double>::infinity();
};

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

Status write_file(const std::string& path, const std::string& text) {
  SP_ASSIGN_OR_RETURN(AtomicFile file, AtomicFile::create(path));
  SP_RETURN_IF_ERROR(file.write(text));
  return file.commit();
}

// "all" stands for every .jsonl of the data folder, by name.
Result<std::vector<std::string>> task_paths(const Options& options) {
  namespace fs = std::filesystem;
  std::vector<std::string> paths;
  for (const std::string& name : options.tasks) {
    if (name != "all") {
      paths.push_back(fs::path(name).extension() == ".jsonl"
                          ? name
                          : (fs::path(options.data) / (name + ".jsonl")).string());
      continue;
    }
    std::vector<std::string> found;
    std::error_code error;
    for (const auto& item : fs::directory_iterator(options.data, error)) {
      if (item.path().extension() == ".jsonl") found.push_back(item.path().string());
    }
    if (found.empty()) {
      return Status(Code::kNotFound, options.data +
                                         ": holds no task files (*.jsonl); name the "
                                         "folder with --data");
    }
    std::sort(found.begin(), found.end());
    paths.insert(paths.end(), found.begin(), found.end());
  }
  return paths;
}

Result<std::vector<Task>> load_tasks(const Session& session, const Options& options) {
  if (session.chat_template == nullptr) {
    return Status(Code::kNotFound,
                  options.model.model + ": tasks need the checkpoint's chat template");
  }
  SP_ASSIGN_OR_RETURN(const std::vector<std::string> paths, task_paths(options));
  std::vector<Task> tasks;
  for (const std::string& path : paths) {
    SP_ASSIGN_OR_RETURN(Task task, load_task(path, *session.tokenizer, *session.chat_template));
    tasks.push_back(std::move(task));
  }
  return tasks;
}

// Results that live in memory, and in a file when one is named.
class Book {
 public:
  static Result<Book> open(const Options& options, const Session& session) {
    Book book;
    book.path_ = options.out;
    const std::string& fingerprint = session.model->fingerprint();
    book.document_ = new_results(session.name, fingerprint);
    if (!options.out.empty() && std::filesystem::exists(options.out)) {
      SP_ASSIGN_OR_RETURN(book.document_, load_results(options.out));
      if (book.document_["model_fingerprint"] != fingerprint) {
        return Status(Code::kMismatch,
                      fmt::format("{}: holds results of another model ({}); name "
                                  "another file for -o",
                                  options.out, book.document_["model_name"].get<std::string>()));
      }
    }
    return book;
  }
  Json& run(const CompiledScheme& scheme) { return results_run(document_, scheme); }
  Status save() {
    compare_with_fp32(document_);
    return path_.empty() ? Status() : save_results(path_, document_);
  }
  const Json& document() const { return document_; }
  Json& document() { return document_; }

 private:
  std::string path_;
  Json document_;
};

Status append_replies(const std::string& path, const std::string& scheme, const std::string& task,
                      const std::vector<SampleOutcome>& outcomes) {
  std::FILE* file = std::fopen(path.c_str(), "a");
  if (file == nullptr) return {Code::kIo, path + ": cannot be written"};
  bool written = true;
  for (const SampleOutcome& o : outcomes) {
    const Json line{{"scheme", scheme}, {"task", task},         {"id", o.id},
                    {"right", o.right}, {"tokens", o.n_tokens}, {"reply", o.text}};
    const std::string text = line.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
    written = written && std::fwrite(text.data(), 1, text.size(), file) == text.size();
  }
  written = std::fclose(file) == 0 && written;
  return written ? Status() : Status(Code::kIo, path + ": was not written whole");
}

std::int64_t expected_tokens(const std::vector<TaskSample>& samples) {
  std::int64_t n = 0;
  for (const TaskSample& sample : samples) n += sample.reference_tokens;
  return n;
}

// Time left over all tasks and schemes, from the tokens that have been waited for so far.
class Outlook {
 public:
  void expect(std::int64_t n_tokens) { n_left_ += n_tokens; }
  void done(std::int64_t n_tokens, double seconds) {
    n_left_ -= n_tokens;
    n_done_ += n_tokens;
    seconds_ += seconds;
  }
  std::string text() const {
    if (n_done_ == 0) return "";
    const double left = seconds_ * static_cast<double>(n_left_) / static_cast<double>(n_done_);
    return fmt::format("(all tasks: {:.0f} min)", std::ceil(left / 60));
  }

 private:
  std::int64_t n_left_ = 0, n_done_ = 0;
  double seconds_ = 0;
};

// A task of a scheme that is not complete.
struct Piece {
  const Task* task;
  Json config;
  std::vector<SampleOutcome> outcomes;  // of all its samples, as far as they are known
  std::vector<std::size_t> open;        // outcomes that are not
  std::vector<TaskSample> samples;      // theirs
  std::int64_t n_tokens = 0;            // expected of them
};

Piece make_piece(const Task& task, Json config, const std::vector<TaskSample>& samples,
                 const std::map<std::string, SampleOutcome>& known) {
  Piece piece{&task, std::move(config), {}, {}, {}};
  for (const TaskSample& sample : samples) {
    const auto found = known.find(sample.id);
    piece.outcomes.push_back(found == known.end() ? SampleOutcome{} : found->second);
    if (found != known.end()) continue;
    piece.open.push_back(piece.outcomes.size() - 1);
    piece.samples.push_back(sample);
  }
  piece.n_tokens = expected_tokens(piece.samples);
  return piece;
}

// All tasks of a scheme at once, so that the last long replies of one do not leave the batch empty.
// A run that is stopped keeps the replies that have come to their end.
Status run_tasks(const Session& session, const Schemes& schemes, const Options& options,
                 Book& book) {
  SP_ASSIGN_OR_RETURN(const std::vector<Task> tasks, load_tasks(session, options));
  std::set<std::string> without;
  for (const std::string& path : options.without) {
    SP_ASSIGN_OR_RETURN(const std::vector<std::string> ids, load_ids(path));
    const auto is_known = [&](const std::string& id) {
      return std::any_of(tasks.begin(), tasks.end(), [&](const Task& task) {
        return std::any_of(task.samples.begin(), task.samples.end(),
                           [&](const TaskSample& sample) { return sample.id == id; });
      });
    };
    if (std::none_of(ids.begin(), ids.end(), is_known)) {
      return {
          Code::kInvalidArgument,
          fmt::format("--without {}: no sample of these tasks has one of its ids; name the file "
                      "that their plans were calibrated on",
                      path)};
    }
    without.insert(ids.begin(), ids.end());
  }
  std::vector<std::vector<Piece>> left;  // [scheme]
  Outlook outlook;
  for (const auto& scheme : schemes) {
    std::vector<Piece>& pieces = left.emplace_back();
    for (const Task& task : tasks) {
      std::vector<TaskSample> allowed = task.samples;
      std::erase_if(allowed, [&](const TaskSample& s) { return without.count(s.id) > 0; });
      if (allowed.empty()) {
        return {Code::kInvalidArgument,
                fmt::format("--without leaves no sample of task {}", task.name)};
      }
      const std::vector<TaskSample> samples = pick_evenly(allowed, options.samples);
      Json config = task_config(task, std::ssize(samples), options.task, without);
      const Json& run = book.run(*scheme);
      if (has_task(run, task.name, config)) continue;
      // --replies asks for texts, which results files do not hold.
      auto known = options.replies.empty() ? known_outcomes(run, task, config, options.task)
                                           : std::map<std::string, SampleOutcome>();
      pieces.push_back(make_piece(task, std::move(config), samples, known));
      outlook.expect(pieces.back().n_tokens);
    }
  }
  for (std::size_t s = 0; s < schemes.size(); ++s) {
    if (left[s].empty()) continue;
    const CompiledScheme& scheme = *schemes[s];
    const std::string name = scheme.scheme().name();
    std::vector<TaskSample> samples;
    std::int64_t n_tokens = 0;
    for (const Piece& piece : left[s]) {
      samples.insert(samples.end(), piece.samples.begin(), piece.samples.end());
      n_tokens += piece.n_tokens;
    }
    const Clock::time_point start = Clock::now();
    std::vector<SampleOutcome> all;
    Status status;
    GuardCounts guard;
    if (!samples.empty()) {
      Progress progress(fmt::format("{} ({} of {})", name, s + 1, schemes.size()), n_tokens);
      progress.note(outlook.text());
      status = run_task(*session.model, *session.threads, *session.tokenizer, schemes[s], samples,
                        options.task, &progress, &all, &guard);
    }
    if (guard.roundings > 0) {
      fmt::print(stderr, "guard of {} on its tasks: {} of {} roundings of a head, {:.2f} %\n", name,
                 guard.over, guard.roundings,
                 100 * static_cast<double>(guard.over) / static_cast<double>(guard.roundings));
    }
    if (!status.ok() && all.empty()) return status;  // nothing was asked for yet
    const double seconds = seconds_since(start);
    outlook.done(n_tokens, seconds);
    auto outcome = all.begin();
    for (Piece& piece : left[s]) {
      for (const std::size_t i : piece.open) piece.outcomes[i] = std::move(*outcome++);
      Json& run = book.run(scheme);
      const double share = seconds * static_cast<double>(piece.n_tokens) /
                           static_cast<double>(std::max<std::int64_t>(n_tokens, 1));
      if (!status.ok()) {
        record_stopped(run, *piece.task, piece.config, piece.outcomes, share);
        continue;
      }
      record_task(run, *piece.task, piece.config, piece.outcomes, share);
      if (!options.replies.empty()) {
        SP_RETURN_IF_ERROR(append_replies(options.replies, name, piece.task->name, piece.outcomes));
      }
    }
    SP_RETURN_IF_ERROR(book.save());
    SP_RETURN_IF_ERROR(status);
  }
  return {};
}

struct Text {
  std::string name;
  std::string digest;
  std::vector<std::int32_t> tokens;
};

Result<Text> load_text(const Session& session, const std::string& path) {
  Text text;
  text.name = std::filesystem::path(path).stem().string();
  SP_ASSIGN_OR_RETURN(text.tokens, encode_text(session, path));
  Sha256 sha;
  sha.update(std::as_bytes(std::span(text.tokens)));
  text.digest = sha.hex();
  return text;
}

std::int64_t windows_of(const Text& text, std::int64_t context, std::int64_t wanted) {
  const std::int64_t n = std::ssize(text.tokens) / context;
  return wanted > 0 ? std::min(wanted, n) : n;
}

Status too_short(const Text& text, std::int64_t context) {
  return {Code::kInvalidArgument,
          fmt::format("{} has {} tokens, less than one window of {}; lower --context", text.name,
                      text.tokens.size(), context)};
}

// All schemes read the same windows in lockstep. A scheme that has read some already (an earlier
// run was stopped, or the scheme is new in the list) joins where it is.
Status run_forced(const Session& session, const Schemes& schemes, const Text& text,
                  std::int64_t context, const Options& options, Book& book) {
  ForcedOptions forced;
  forced.context = context;
  forced.n_vocab = session.n_vocab();
  const std::int64_t n_windows = windows_of(text, context, options.windows);
  if (n_windows < 1) return too_short(text, context);
  const std::string piece = fmt::format("{}@{}", text.name, context);
  const Json config = forced_config(text.digest, forced);
  SP_ASSIGN_OR_RETURN(const auto reference, session.compile(kReference));
  const std::string reference_name = reference->scheme().name();

  std::vector<ForcedResult> results;
  std::int64_t n_left = 0;
  for (const auto& scheme : schemes) {
    results.push_back(forced_so_far(book.run(*scheme), piece, config));
    n_left += std::max<std::int64_t>(0, n_windows - results.back().n_windows);
  }
  if (n_left == 0) return {};
  Progress progress(piece, n_left * (context - 1));
  for (;;) {
    std::int64_t first = n_windows;
    for (const ForcedResult& r : results) first = std::min(first, r.n_windows);
    if (first == n_windows) return {};
    std::int64_t end = std::min(n_windows, first + options.window_batch);
    Schemes lanes = {reference};
    std::vector<std::size_t> lane_of;  // lane -> scheme
    std::size_t reference_at = schemes.size();
    for (std::size_t i = 0; i < schemes.size(); ++i) {
      if (results[i].n_windows > first) {
        end = std::min(end, results[i].n_windows);
      } else if (schemes[i]->scheme().name() == reference_name) {
        reference_at = i;
      } else {
        lanes.push_back(schemes[i]);
        lane_of.push_back(i);
      }
    }
    std::vector<ForcedResult> sums;
    sums.push_back(reference_at < schemes.size() ? results[reference_at]
                                                 : empty_forced_result(context));
    for (const std::size_t i : lane_of) sums.push_back(results[i]);
    const Clock::time_point start = Clock::now();
    SP_RETURN_IF_ERROR(forced_decode(*session.model, *session.threads, lanes, text.tokens, forced,
                                     first, end - first, sums, nullptr));
    const double seconds = seconds_since(start) / static_cast<double>(lanes.size());
    if (reference_at < schemes.size()) {
      results[reference_at] = sums[0];
      record_forced(book.run(*schemes[reference_at]), piece, config, sums[0], seconds);
    }
    for (std::size_t l = 0; l < lane_of.size(); ++l) {
      results[lane_of[l]] = sums[l + 1];
      record_forced(book.run(*lanes[l + 1]), piece, config, sums[l + 1], seconds);
    }
    const std::int64_t n_done = std::ssize(lane_of) + (reference_at < schemes.size() ? 1 : 0);
    progress.advance(n_done * (end - first) * (context - 1));
    SP_RETURN_IF_ERROR(book.save());
  }
}

// What the heads are like on the start of the first text, once a document.
Status look_at_heads(const Session& session, const Text& text, Book& book) {
  constexpr std::int64_t kTokens = 4096, kInterval = 64;
  const std::int64_t n = std::min(kTokens, std::ssize(text.tokens));
  if (book.document().contains("heads") || n < kInterval) return {};
  const std::vector<std::vector<std::int32_t>> segments = {
      {text.tokens.begin(), text.tokens.begin() + n}};
  SP_ASSIGN_OR_RETURN(const auto heads,
                      measure_heads(session.model->config().recurrent_shapes(), segments, kInterval,
                                    prefill_from_zero(*session.model)));
  record_heads(book.document(), text.name, n, heads);
  return {};
}

Status run_texts(const Session& session, const Schemes& schemes, const Options& options,
                 Book& book) {
  for (const std::string& path : options.texts) {
    SP_ASSIGN_OR_RETURN(const Text text, load_text(session, path));
    SP_RETURN_IF_ERROR(look_at_heads(session, text, book));
    for (const std::int64_t context : options.contexts) {
      if (!options.chunked) {
        SP_RETURN_IF_ERROR(run_forced(session, schemes, text, context, options, book));
        continue;
      }
      ForcedOptions forced;
      forced.context = context;
      forced.n_vocab = session.n_vocab();
      const std::int64_t n_windows = windows_of(text, context, options.windows);
      if (n_windows < 1) return too_short(text, context);
      SP_ASSIGN_OR_RETURN(const auto reference, session.compile(kReference));
      const std::string piece = fmt::format("{}@{} chunked", text.name, context);
      Progress progress(piece, n_windows * (context - 1));
      SP_ASSIGN_OR_RETURN(
          const Perplexity perplexity,
          chunked_perplexity(*session.model, text.tokens, forced, n_windows, &progress));
      record_perplexity(book.run(*reference), piece, perplexity);
      SP_RETURN_IF_ERROR(book.save());
    }
  }
  return {};
}

// Names every gate that failed on stderr.
int check_gates(const Json& document, const Options& options) {
  int exit_code = kExitOk;
  const auto number = [](const Json& result, const char* key, double missing) {
    const auto found = result.find(key);
    return found != result.end() && found->is_number() ? found->get<double>() : missing;
  };
  const auto fail = [&](const std::string& what) {
    std::fprintf(stderr, "statepack: gate failed: %s\n", what.c_str());
    exit_code = kExitGateFailed;
  };
  const Json& runs = document["runs"];
  bool any_kl = false;
  bool any_drop = false;
  for (const auto& [name, run] : runs.items()) {
    for (const auto& [piece, result] : run["results"].items()) {
      if (const double n_failed = number(result, "failed,none", 0); n_failed > 0) {
        fail(
            fmt::format("{} on {}: {:.0f} pieces ended with an error (a state that is not finite, "
                        "say)",
                        name, piece, n_failed));
      }
      any_kl = any_kl || result.contains("kl,none");
      const double kl = number(result, "kl,none", 0);
      if (!(kl <= options.max_kl)) {
        fail(fmt::format("{} on {}: KL {:.3g} is above {:.3g}", name, piece, kl, options.max_kl));
      }
      const auto reference = runs.find(kReference);
      if (reference == runs.end() || !(*reference)["results"].contains(piece)) continue;
      any_drop = any_drop || (name != kReference && result.contains("exact_match,none"));
      const double drop = number((*reference)["results"][piece], "exact_match,none", 0) -
                          number(result, "exact_match,none", 1);
      if (!(drop <= options.max_drop)) {
        fail(fmt::format("{} on {}: {:.1f} points below fp32, more than {:.1f}", name, piece,
                         100 * drop, 100 * options.max_drop));
      }
    }
  }
  if (std::isfinite(options.max_kl) && !any_kl) {
    fail("--max-kl was given, but no KL was measured; add --text");
  }
  if (std::isfinite(options.max_drop) && !any_drop) {
    fail(
        "--max-drop was given, but no task compares a scheme with fp32; add --tasks and fp32 to "
        "--state");
  }
  return exit_code;
}

std::string shortened(std::string text, std::size_t n) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  if (text.size() <= n) return text;
  std::size_t cut = n - 3;
  while (cut > 0 && (static_cast<unsigned char>(text[cut]) & 0xC0) == 0x80) --cut;
  return text.substr(0, cut) + "...";
}

// A wrong answer from shortly before it leaves the right one.
std::string from_first_difference(const std::string& answer, const std::string& right,
                                  std::size_t n) {
  const auto [at, other] = std::mismatch(answer.begin(), answer.end(), right.begin(), right.end());
  std::size_t begin = static_cast<std::size_t>(at - answer.begin());
  if (begin < n / 2) return shortened(answer, n);
  begin = answer.rfind(' ', begin - n / 4);
  return "..." + shortened(answer.substr(begin == std::string::npos ? 0 : begin), n - 3);
}

Result<std::vector<TaskSample>> samples_by_id(const Session& session, const Options& options) {
  Options all = options;
  if (all.tasks.empty()) all.tasks = {"all"};
  SP_ASSIGN_OR_RETURN(const std::vector<Task> tasks, load_tasks(session, all));
  std::vector<TaskSample> samples;
  for (const std::string& id : options.ids) {
    const std::size_t before = samples.size();
    for (const Task& task : tasks) {
      for (const TaskSample& sample : task.samples) {
        if (sample.id == id) samples.push_back(sample);
      }
    }
    if (samples.size() == before) {
      return Status(Code::kNotFound,
                    fmt::format("no task in {} has a sample '{}'", options.data, id));
    }
  }
  return samples;
}

// The same questions answered from every kind of state.
Result<int> side_by_side(const Session& session, const Schemes& schemes, const Options& options) {
  SP_ASSIGN_OR_RETURN(const std::vector<TaskSample> samples, samples_by_id(session, options));
  std::vector<std::vector<SampleOutcome>> outcomes;
  for (const auto& scheme : schemes) {
    Progress progress(scheme->scheme().name(), expected_tokens(samples));
    SP_RETURN_IF_ERROR(run_task(*session.model, *session.threads, *session.tokenizer, scheme,
                                samples, options.task, &progress, &outcomes.emplace_back()));
  }
  const Colours c = colours();
  Json questions = Json::array();
  for (std::size_t i = 0; i < samples.size(); ++i) {
    const TaskSample& sample = samples[i];
    Json answers = Json::array();
    if (!options.model.json) {
      print(fmt::format("{}{}{}  ({} tokens of prompt, {} of reply)\n  {}\n  right answer: {}\n",
                        c.bold, sample.id, c.off, sample.prompt.size(), sample.reference_tokens,
                        shortened(sample.question, 150), shortened(sample.answer, kShown)));
    }
    for (std::size_t s = 0; s < schemes.size(); ++s) {
      const SampleOutcome& o = outcomes[s][i];
      const std::string answer(answer_line(o.text));
      const SchemeBits bits = schemes[s]->bits();
      answers.push_back(Json{{"scheme", schemes[s]->scheme().name()},
                             {"right", o.right},
                             {"answer", answer},
                             {"tokens", o.n_tokens}});
      if (options.model.json) continue;
      const std::string shown = o.right ? shortened(answer, kShown)
                                : answer.empty()
                                    ? fmt::format("(no answer in {} tokens)", o.n_tokens)
                                    : from_first_difference(answer, sample.answer, kShown);
      print(fmt::format("  {:<22} {:>8}  {}{}{}  {}{}{}\n", schemes[s]->scheme().name(),
                        format_bytes(bits.page_bytes), o.right ? c.good : c.bad,
                        o.right ? "right" : "WRONG", c.off, o.right ? c.dim : "", shown, c.off));
    }
    if (!options.model.json) print("\n");
    questions.push_back(Json{{"id", sample.id},
                             {"question", sample.question},
                             {"answer", sample.answer},
                             {"answers", answers}});
  }

  Table table({"state", "payload bytes", "resident bytes", "payload bits", "resident bits",
               "x smaller than fp32", "right"});
  Json rows = Json::array();
  for (std::size_t s = 0; s < schemes.size(); ++s) {
    const SchemeBits bits = schemes[s]->bits();
    const std::int64_t resident = bits.page_bytes + bits.window_bytes + bits.cursor_bytes;
    const auto n_right = std::count_if(outcomes[s].begin(), outcomes[s].end(),
                                       [](const SampleOutcome& o) { return o.right; });
    const double ratio = static_cast<double>(4 * bits.n_values) / static_cast<double>(resident);
    table.add({schemes[s]->scheme().name(), fmt::format("{}", bits.page_bytes),
               fmt::format("{}", resident), fmt::format("{:.2f}", bits.payload),
               fmt::format("{:.2f}", bits.resident), fmt::format("{:.2f}", ratio),
               fmt::format("{} of {}", n_right, samples.size())});
    rows.push_back(Json{{"scheme", schemes[s]->scheme().name()},
                        {"payload_bytes", bits.page_bytes},
                        {"resident_bytes", resident},
                        {"payload_bits", bits.payload},
                        {"resident_bits", bits.resident},
                        {"ratio_to_fp32", ratio},
                        {"right", n_right},
                        {"samples", samples.size()}});
  }
  if (options.model.json) {
    print_json(Json{{"model", session.name}, {"schemes", rows}, {"questions", questions}});
  } else {
    print(table.text());
    print("\nbytes: recurrent state of one sequence; resident: with its open window and cursors\n");
  }
  return kExitOk;
}

std::string command_line(const Options& options) {
  std::string line = "statepack eval --report " + options.report;
  for (const std::string& input : options.inputs) line += " " + input;
  return line;
}

Result<int> report(const Options& options) {
  if (options.inputs.empty()) {
    return Status(Code::kInvalidArgument, "--report needs the results files that it is made of");
  }
  for (const std::string& input : options.inputs) {
    std::error_code none;
    if (std::filesystem::equivalent(options.report, input, none)) {
      return Status(Code::kInvalidArgument,
                    fmt::format("'{}' is one of the results files; name another file for --report",
                                options.report));
    }
  }
  std::vector<Json> documents;
  for (const std::string& input : options.inputs) {
    SP_ASSIGN_OR_RETURN(Json document, load_results(input));
    documents.push_back(std::move(document));
  }
  SP_ASSIGN_OR_RETURN(const std::vector<Json> models, merge_by_model(documents));
  const bool html = std::filesystem::path(options.report).extension() == ".html";
  SP_RETURN_IF_ERROR(
      write_file(options.report, html ? html_report(models, command_line(options))
                                      : markdown_report(models, command_line(options))));
  int exit_code = kExitOk;
  Json summaries = Json::array();
  for (const Json& model : models) {
    summaries.push_back(summary(model));
    if (!options.model.json) {
      if (models.size() > 1) print(model.value("model_name", "") + "\n");
      print(overview_table(model));
    }
    exit_code = std::max(exit_code, check_gates(model, options));
  }
  if (options.model.json) print_json(models.size() == 1 ? summaries[0] : summaries);
  return exit_code;
}

// The schemes of a list, one a line; "#" starts a comment.
Result<std::vector<std::string>> read_list(const std::string& path) {
  constexpr std::size_t kMaxBytes = 1 << 20;
  SP_ASSIGN_OR_RETURN(const std::string text, read_text_file(path, kMaxBytes));
  std::vector<std::string> names;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    std::string line = text.substr(begin, end - begin);
    begin = end + 1;
    line = line.substr(0, line.find('#'));
    line.erase(line.find_last_not_of(" \t\r") + 1);
    line.erase(0, line.find_first_not_of(" \t\r"));
    if (!line.empty()) names.push_back(line);
  }
  if (names.empty()) return Status(Code::kInvalidArgument, path + ": names no scheme");
  return names;
}

// The schemes to evaluate, each once. Of a list, those that lack a plan are left out with a word;
// one that the user named must have it.
Result<Schemes> compile_schemes(const Session& session, const Options& options) {
  Schemes schemes;
  const auto add = [&](std::shared_ptr<const CompiledScheme> scheme) {
    const auto same = [&](const auto& s) { return s->scheme() == scheme->scheme(); };
    if (std::none_of(schemes.begin(), schemes.end(), same)) schemes.push_back(std::move(scheme));
  };
  for (const std::string& name : options.states) {
    SP_ASSIGN_OR_RETURN(auto scheme, session.compile(name));
    add(std::move(scheme));
  }
  if (options.compare.empty()) return schemes;
  SP_ASSIGN_OR_RETURN(const std::vector<std::string> names, read_list(options.compare));
  for (const std::string& name : names) {
    SP_ASSIGN_OR_RETURN(const Scheme parsed, Scheme::parse(name));
    auto scheme = session.compile(name);
    if (!scheme.ok() && !parsed.needs_plan()) return scheme.status();
    if (!scheme.ok()) {
      std::fprintf(stderr, "statepack: left out %s: %s\n", name.c_str(),
                   scheme.status().message().c_str());
      continue;
    }
    add(std::move(scheme).value());
  }
  return schemes;
}

// One file a scheme, named after it.
Status write_harness(const std::string& folder, const Json& document) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  for (const auto& [name, run] : document["runs"].items()) {
    std::string file = name;
    std::replace_if(
        file.begin(), file.end(), [](char c) { return c == ':' || c == '/' || c == ','; }, '_');
    SP_RETURN_IF_ERROR(
        write_file((std::filesystem::path(folder) / ("results_" + file + ".json")).string(),
                   harness_results(document, name).dump(2) + "\n"));
  }
  return {};
}

// Two outputs in one file would leave the last of them.
Status check_outputs(const Options& options) {
  const std::pair<const char*, const std::string*> outputs[] = {{"-o", &options.out},
                                                                {"--replies", &options.replies},
                                                                {"--markdown", &options.markdown},
                                                                {"--html", &options.html}};
  for (auto a = std::begin(outputs); a != std::end(outputs); ++a) {
    for (auto b = std::begin(outputs); b != a; ++b) {
      std::error_code none;
      const bool same = !a->second->empty() && !b->second->empty() &&
                        (std::filesystem::weakly_canonical(*a->second, none) ==
                             std::filesystem::weakly_canonical(*b->second, none) ||
                         std::filesystem::equivalent(*a->second, *b->second, none));
      if (same) {
        return {Code::kInvalidArgument,
                fmt::format("{} and {} both name '{}'; give each a file of its own", b->first,
                            a->first, *a->second)};
      }
    }
  }
  return {};
}

Result<int> evaluate(Options options) {
  if (!options.report.empty()) return report(options);
  if (!options.inputs.empty()) {
    return Status(
        Code::kInvalidArgument,
        fmt::format("'{}' is not an option; results files go with --report", options.inputs[0]));
  }
  if (options.model.model.empty()) return Status(Code::kInvalidArgument, "--model is required");
  SP_RETURN_IF_ERROR(check_outputs(options));
  if (!options.compare.empty() && options.tasks.empty() && options.texts.empty()) {
    options.tasks = {"all"};
    options.texts = {
        (std::filesystem::path(options.data) / "wikitext2" / "wikitext2.test.txt").string()};
    options.contexts = {kLongContext};
    if (options.samples == 0) options.samples = kCompareSamples;
    if (options.windows == 0) options.windows = 1;
  }
  if (options.tasks.empty() && options.texts.empty() && options.ids.empty()) {
    return Status(Code::kInvalidArgument,
                  "nothing to evaluate; name --tasks (\"all\"), --text or --ids");
  }
  SP_ASSIGN_OR_RETURN(const Session session, open_session(options.model));
  SP_ASSIGN_OR_RETURN(const Schemes schemes, compile_schemes(session, options));
  if (!options.ids.empty()) return side_by_side(session, schemes, options);

  SP_ASSIGN_OR_RETURN(Book book, Book::open(options, session));
  if (!options.tasks.empty()) SP_RETURN_IF_ERROR(run_tasks(session, schemes, options, book));
  SP_RETURN_IF_ERROR(run_texts(session, schemes, options, book));
  if (!options.markdown.empty()) {
    SP_RETURN_IF_ERROR(write_file(
        options.markdown,
        markdown_report({&book.document(), 1}, "statepack eval --model " + session.name + " ...")));
  }
  if (!options.html.empty()) {
    SP_RETURN_IF_ERROR(write_file(
        options.html,
        html_report({&book.document(), 1}, "statepack eval --model " + session.name + " ...")));
  }
  if (!options.harness.empty()) {
    SP_RETURN_IF_ERROR(write_harness(options.harness, book.document()));
  }
  if (options.model.json) {
    print_json(summary(book.document()));
  } else {
    print(overview_table(book.document()));
  }
  return check_gates(book.document(), options);
}

}  // namespace

void add_eval(CLI::App& app, Command* command) {
  CLI::App* sub = app.add_subcommand(
      "eval",
      "Tasks by greedy replies; perplexity, KL and top-1 against fp32 by position; reports");
  const auto o = std::make_shared<Options>();
  add_model_options(*sub, &o->model);
  sub->get_option("--model")->required(false);
  sub->add_option("--state", o->states, "Schemes: " + scheme_help())
      ->capture_default_str()
      ->type_name("SCHEME");
  sub->add_option("--compare", o->compare,
                  "Compare the schemes of this list (one a line), by default on all tasks with 24 "
                  "samples each and one window of 16,384 tokens")
      ->type_name("FILE");
  sub->add_option("--data", o->data, "Folder of task files")
      ->capture_default_str()
      ->type_name("DIR");
  sub->add_option("--tasks", o->tasks, "Tasks by name, files, or \"all\" of --data")
      ->delimiter(',');
  sub->add_option("--samples", o->samples, "Samples of a task, evenly over its buckets; 0: all")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 30));
  sub->add_option(
         "--without", o->without,
         "Leave out samples whose ids stand in this JSONL file: what plans were calibrated "
         "on; may be given again")
      ->type_name("FILE");
  sub->add_option("--max-new-tokens", o->task.max_new_tokens,
                  "Cut replies here; 0: where each sample says")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 30));
  sub->add_option("--batch", o->task.batch, "Replies at the same time")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  sub->add_option(
         "--text", o->texts,
         "Text to read by forced decode, or .jsonl with one conversation (messages) a line; "
         "may be given again")
      ->type_name("FILE");
  sub->add_option("--context", o->contexts, "Tokens of a window of text")
      ->delimiter(',')
      ->check(CLI::Range(std::int64_t{2}, std::int64_t{1} << 24))
      ->capture_default_str();
  sub->add_option("--windows", o->windows, "Windows to read, from the text's start; 0: all")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 30));
  sub->add_option("--window-batch", o->window_batch,
                  "Windows at the same time; each takes an attention cache for every scheme")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  sub->add_flag("--chunked", o->chunked, "Read the text by chunked prefill instead: fp32, fast");
  sub->add_option("-o,--out", o->out,
                  "Results file; pieces that it holds already are not run again")
      ->type_name("FILE");
  sub->add_option("--replies", o->replies, "Append every reply to this JSONL file")
      ->type_name("FILE");
  sub->add_option("--markdown", o->markdown, "Write the report of this run")->type_name("FILE");
  sub->add_option("--html", o->html, "Write the report of this run as one HTML page with figures")
      ->type_name("FILE");
  sub->add_option("--harness", o->harness,
                  "Write a results file for each scheme as lm-evaluation-harness does")
      ->type_name("DIR");
  sub->add_option("--report", o->report,
                  "Write the report of results files (.html: with figures), and run nothing")
      ->type_name("FILE");
  sub->add_option("results", o->inputs, "Results files, for --report");
  sub->add_option("--ids", o->ids, "Answer these samples side by side")->delimiter(',');
  sub->add_option("--max-kl", o->max_kl, "Gate: exit 1 when a mean KL is above")
      ->check(CLI::NonNegativeNumber)
      ->type_name("NATS");
  sub->add_option("--max-drop", o->max_drop,
                  "Gate: exit 1 when a task falls further below fp32 (0.05: five points)")
      ->check(CLI::NonNegativeNumber)
      ->type_name("SHARE");
  sub->footer(
      "Examples:\n"
      "  statepack eval -m models/statepack-gdn --state fp32 int4 stepquant:6 --tasks perm,trace "
      "--samples 60 -o results/tasks.json\n"
      "  statepack eval -m models/statepack-gdn --state fp32 stepquant:6 --text "
      "eval/data/wikitext2/wikitext2.test.txt --context 4096 -o results/text.json\n"
      "  statepack eval -m models/statepack-gdn --compare eval/schemes/rivals.txt "
      "-o results/rivals.json --html results/rivals.html\n"
      "  statepack eval --report docs/accuracy.md results/tasks.json results/text.json");
  sub->callback([o, command] { *command = [o] { return evaluate(*o); }; });
}

}  // namespace statepack::cli
