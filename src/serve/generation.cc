#include "serve/generation.hpp"

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <cmath>

#include "model/utf8.hpp"

namespace statepack::serve {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kLowestLogprob = -9999;  // JSON has no minus infinity; vLLM's stand-in

std::string random_id(std::string_view prefix) {
  static thread_local std::mt19937_64 draw{std::random_device{}()};
  return fmt::format("{}-{:016x}{:016x}", prefix, draw(), draw());
}

double logprob_number(float logprob) { return std::max<double>(logprob, kLowestLogprob); }

std::string token_text(const Tokenizer& tokenizer, std::int32_t token) {
  return to_valid_utf8(tokenizer.token_bytes(token));
}

Json token_json(const Tokenizer& tokenizer, std::int32_t token, float logprob) {
  Json bytes = Json::array();
  for (const char c : tokenizer.token_bytes(token)) bytes.push_back(static_cast<unsigned char>(c));
  return {{"token", token_text(tokenizer, token)},
          {"logprob", logprob_number(logprob)},
          {"bytes", std::move(bytes)}};
}

double seconds_between(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

}  // namespace

/// News of one sequence: of one token, or of all since the start where nothing is streamed.
struct Generation::Piece {
  std::string text;
  std::vector<Choice> choices;  ///< of the reply's tokens, when log-probabilities are wanted
  std::int64_t n_prompt = 0, n_cached = 0, n_prompt_read = 0, n_reply = 0;
  RequestTimes times;
  std::optional<FinishReason> finish;
  Status status;
};

/// What has come of one sequence so far.
struct Generation::Answer {
  RequestId id = 0;
  std::string text;             ///< only where nothing is streamed
  std::vector<Choice> choices;  ///< likewise
  std::int64_t n_prompt = 0, n_cached = 0, n_reply = 0;
  std::int64_t text_offset = 0;  ///< characters of the tokens so far
  RequestTimes times;
  std::optional<FinishReason> finish;
  bool begun = false;  ///< its first chunk is out
};

Generation::Generation(GenerationContext& context, ExchangePtr exchange, EncodedRequest encoded,
                       Headers headers)
    : context_(context),
      exchange_(std::move(exchange)),
      headers_(std::move(headers)),
      request_(std::move(encoded.request)),
      prompts_(std::move(encoded.prompts)),
      id_(random_id(request_.chat ? "chatcmpl" : "cmpl")),
      created_unix_s_(std::chrono::duration_cast<std::chrono::seconds>(
                          std::chrono::system_clock::now().time_since_epoch())
                          .count()),
      start_(Clock::now()) {}

Generation::~Generation() = default;

void Generation::begin() {
  if (!exchange_->open()) return;
  answers_.resize(prompts_.size() * static_cast<std::size_t>(request_.n));
  n_left_ = answers_.size();
  exchange_->on_gone([self = shared_from_this()] {
    if (self->done_) return;
    self->done_ = true;
    ++self->context_.metrics.disconnects;
    self->cancel_all();
    self->log(0, "client left");
  });
  if (request_.max_tokens == 0) {  // echo alone
    for (std::size_t i = 0; i < answers_.size(); ++i) {
      answers_[i].n_prompt = std::ssize(prompts_[i / static_cast<std::size_t>(request_.n)]);
      answers_[i].finish = FinishReason::kLength;
    }
    n_left_ = 0;
  } else {
    submit();
    if (done_) return;
  }
  if (request_.stream) {
    HttpResponse head{200, "text/event-stream; charset=utf-8", "", headers_};
    head.headers.emplace_back("Cache-Control", "no-cache");
    head.headers.emplace_back("X-Accel-Buffering", "no");  // nginx holds answers back otherwise
    exchange_->start(std::move(head));
    streaming_ = true;
  }
  if (n_left_ > 0) return;
  if (request_.stream) {
    for (std::size_t i = 0; i < answers_.size(); ++i) {
      Piece piece;
      piece.finish = answers_[i].finish;
      send_piece(i, piece);
    }
  }
  finish();
}

void Generation::submit() {
  const auto n = static_cast<std::size_t>(request_.n);
  if (!request_.has_seed) request_.params.seed = std::random_device{}();
  for (std::size_t i = 0; i < answers_.size(); ++i) {
    Request request;
    request.prompt = prompts_[i / n];
    request.params = request_.params;
    request.params.sequence = i % n;
    const std::int64_t room = context_.backend.summary().max_context - std::ssize(request.prompt);
    request.params.max_tokens =
        std::max<std::int64_t>(1, std::min(room, request_.max_tokens.value_or(room)));
    if (context_.request_timeout.count() > 0) request.deadline = start_ + context_.request_timeout;
    const bool progress = request_.stream && request_.return_progress;
    request.progress = progress;

    // Runs on the engine's thread: what it has to tell goes to the loop's, token by token for a
    // stream and in one piece for a whole answer.
    const bool stream = request_.stream;
    const bool with_choices = request_.params.logprobs >= 0;
    auto callback = [self = shared_from_this(), i, stream, progress, with_choices, piece = Piece(),
                     last = Clock::now()](const TokenEvent& event) mutable {
      const bool is_token = std::ssize(event.tokens) > piece.n_reply;
      piece.text += event.text;
      if (is_token && with_choices && event.choice != nullptr) {
        piece.choices.push_back(*event.choice);
      }
      ServerMetrics& metrics = self->context_.metrics;
      if (is_token) {
        const Clock::time_point now = Clock::now();
        if (piece.n_reply == 0) {
          metrics.time_to_first_token_s.observe(event.times.queued + event.times.prompt);
          metrics.queue_time_s.observe(event.times.queued);
        } else {
          metrics.inter_token_latency_s.observe(seconds_between(last, now));
        }
        last = now;
      }
      piece.n_prompt = event.n_prompt;
      piece.n_cached = event.n_cached;
      piece.n_prompt_read = event.n_prompt_read;
      piece.n_reply = std::ssize(event.tokens);
      piece.times = event.times;
      piece.finish = event.finish;
      piece.status = event.status;
      const bool is_progress = event.choice == nullptr && !event.finish;
      const bool has_news = event.finish.has_value() || (is_progress && progress) ||
                            (!is_progress && (!piece.text.empty() || !piece.choices.empty()));
      if (!has_news || (!stream && !event.finish)) return;
      self->context_.http.post(
          [self, i, sent = piece]() mutable { self->on_piece(i, std::move(sent)); });
      piece.text.clear();
      piece.choices.clear();
    };
    const Result<RequestId> id =
        context_.backend.loop().submit(std::move(request), std::move(callback));
    if (!id.ok()) {
      ApiError error = to_api_error(id.status());
      if (error.status == 400) error.param = request_.chat ? "messages" : "prompt";
      return fail(error);
    }
    answers_[i].id = *id;
  }
}

void Generation::cancel_all() {
  for (const Answer& answer : answers_) {
    if (answer.id != 0 && !answer.finish) context_.backend.loop().cancel(answer.id);
  }
}

void Generation::tick(Clock::time_point now) {
  if (done_ || !request_.stream || context_.ping_interval.count() == 0) return;
  if (now - exchange_->last_write() >= context_.ping_interval) exchange_->write(": ping\n\n");
}

void Generation::on_piece(std::size_t index, Piece piece) {
  if (done_) return;
  Answer& answer = answers_[index];
  answer.n_prompt = piece.n_prompt;
  answer.n_cached = piece.n_cached;
  answer.n_reply = piece.n_reply;
  answer.times = piece.times;
  if (piece.finish == FinishReason::kError) return fail(to_api_error(piece.status));
  if (piece.finish == FinishReason::kDeadline) {
    return fail(
        {504, fmt::format("the request took longer than {} ms", context_.request_timeout.count()),
         "timeout_error", ""});
  }
  if (piece.finish == FinishReason::kCancelled) {
    return fail({503, "the server is shutting down", "unavailable_error", ""});
  }
  answer.finish = piece.finish;
  if (request_.stream) {
    send_piece(index, piece);
  } else {
    answer.text = std::move(piece.text);
    answer.choices = std::move(piece.choices);
  }
  if (answer.finish && --n_left_ == 0) finish();
}

void Generation::fail(const ApiError& error) {
  done_ = true;
  cancel_all();
  if (streaming_) {
    send(error.body());
    exchange_->write("data: [DONE]\n\n");
    exchange_->finish();
  } else {
    HttpResponse response{error.status, "application/json", dump(error.body()), headers_};
    if (error.status == 429 || error.status == 503) {
      response.headers.emplace_back("Retry-After", "1");
    }
    exchange_->respond(std::move(response));
  }
  log(error.status, error.message);
}

void Generation::finish() {
  ServerMetrics& metrics = context_.metrics;
  metrics.e2e_latency_s.observe(seconds_between(start_, Clock::now()));
  for (const Answer& answer : answers_) {
    metrics.prompt_tokens.observe(static_cast<double>(answer.n_prompt));
    metrics.reply_tokens.observe(static_cast<double>(answer.n_reply));
  }
  if (request_.stream) {
    if (request_.include_usage) {
      Json last = envelope(true);
      last["choices"] = Json::array();
      last["usage"] = usage();
      last["timings"] = timings();
      send(last);
    }
    done_ = true;
    exchange_->write("data: [DONE]\n\n");
    exchange_->finish();
    return log(200, "");
  }
  // Elsewhere, for a large answer takes a second to write down. Nothing of it changes any more.
  context_.writer.post([self = shared_from_this()] {
    self->context_.http.post([self, body = self->whole_answer()]() mutable {
      if (self->done_) return;  // the client left meanwhile
      self->done_ = true;
      self->exchange_->respond({200, "application/json", std::move(body), self->headers_});
      self->log(200, "");
    });
  });
}

std::string Generation::whole_answer() const {
  Json json = envelope(false);
  for (std::size_t i = 0; i < answers_.size(); ++i) {
    json["choices"].push_back(choice_json(answers_[i], i));
  }
  json["usage"] = usage();
  json["timings"] = timings();
  return dump(json);
}

void Generation::log(int status, std::string_view how) const {
  std::int64_t n_prompt = 0, n_cached = 0, n_reply = 0;
  double first_s = 0;
  std::string finish;
  for (const Answer& answer : answers_) {
    n_prompt += answer.n_prompt;
    n_cached += answer.n_cached;
    n_reply += answer.n_reply;
    first_s = std::max(first_s, answer.times.queued + answer.times.prompt);
    if (answer.finish) finish = finish_reason_name(*answer.finish);
  }
  spdlog::info(
      "{} {} {} status={} prompt={} cached={} reply={} finish={} first_ms={:.0f} "
      "total_ms={:.0f}{}{}",
      exchange_->request().client, exchange_->request().path, id_, status, n_prompt, n_cached,
      n_reply, finish.empty() ? "-" : finish, 1e3 * first_s,
      1e3 * seconds_between(start_, Clock::now()), how.empty() ? "" : " ", how);
}

// ---------------------------------------------------------------- JSON

void Generation::send(const Json& json) { exchange_->write("data: " + dump(json) + "\n\n"); }

Json Generation::envelope(bool chunk) const {
  const char* object = !request_.chat ? "text_completion"
                       : chunk        ? "chat.completion.chunk"
                                      : "chat.completion";
  return {{"id", id_},
          {"object", object},
          {"created", created_unix_s_},
          {"model", context_.model_name},
          {"choices", Json::array()}};
}

std::string Generation::prompt_text(std::size_t index) const {
  const std::size_t prompt = index / static_cast<std::size_t>(request_.n);
  if (const auto* text = std::get_if<std::string>(&request_.prompts[prompt])) return *text;
  return context_.backend.tokenizer().decode(prompts_[prompt], false);
}

Json Generation::choice_json(const Answer& answer, std::size_t index) const {
  Json json{{"index", index}};
  const bool wanted = request_.params.logprobs >= 0;
  if (request_.chat) {
    json["message"] = {{"role", "assistant"}, {"content", answer.text}};
    json["logprobs"] = wanted ? chat_logprobs(answer.choices) : Json(nullptr);
  } else {
    json["text"] = request_.echo ? prompt_text(index) + answer.text : answer.text;
    json["logprobs"] = wanted ? completion_logprobs(answer.choices, 0) : Json(nullptr);
  }
  json["finish_reason"] = finish_reason_name(*answer.finish);
  return json;
}

void Generation::send_piece(std::size_t index, const Piece& piece) {
  Answer& answer = answers_[index];
  if (!piece.finish && piece.text.empty() && piece.choices.empty()) {
    return send_progress(index, piece);
  }
  const bool wanted = request_.params.logprobs >= 0 && !piece.choices.empty();
  const bool first = !std::exchange(answer.begun, true);
  Json json = envelope(true);
  if (request_.include_usage) json["usage"] = nullptr;
  Json choice{{"index", index}};
  if (request_.chat) {
    if (first) {
      choice["delta"] = {{"role", "assistant"}, {"content", ""}};
      choice["logprobs"] = nullptr;
      choice["finish_reason"] = nullptr;
      json["choices"] = Json::array({choice});
      send(json);
    }
    choice["delta"] = Json::object();
    if (!piece.text.empty() || wanted) choice["delta"]["content"] = piece.text;
    choice["logprobs"] = wanted ? chat_logprobs(piece.choices) : Json(nullptr);
  } else {
    choice["text"] = request_.echo && first ? prompt_text(index) + piece.text : piece.text;
    choice["logprobs"] =
        wanted ? completion_logprobs(piece.choices, answer.text_offset) : Json(nullptr);
    for (const Choice& c : piece.choices) {
      answer.text_offset += static_cast<std::int64_t>(
          count_characters(token_text(context_.backend.tokenizer(), c.token)));
    }
  }
  choice["finish_reason"] =
      piece.finish ? Json(std::string(finish_reason_name(*piece.finish))) : Json(nullptr);
  json["choices"] = Json::array({choice});
  send(json);
}

void Generation::send_progress(std::size_t index, const Piece& piece) {
  Json json = envelope(true);
  json["prompt_progress"] = {{"index", index},
                             {"total", piece.n_prompt},
                             {"cache", piece.n_cached},
                             {"processed", piece.n_prompt_read},
                             {"time_ms", std::llround(1e3 * piece.times.prompt)}};
  send(json);
}

Json Generation::usage() const {
  std::int64_t n_prompt = 0, n_cached = 0, n_reply = 0;
  for (std::size_t i = 0; i < answers_.size(); ++i) {
    n_reply += answers_[i].n_reply;
    if (i % static_cast<std::size_t>(request_.n) != 0) continue;  // one prompt, read for each
    n_prompt += answers_[i].n_prompt;
    n_cached += answers_[i].n_cached;
  }
  return {{"prompt_tokens", n_prompt},
          {"completion_tokens", n_reply},
          {"total_tokens", n_prompt + n_reply},
          {"prompt_tokens_details", {{"cached_tokens", n_cached}}}};
}

Json Generation::timings() const {
  std::int64_t n_cached = 0, n_read = 0, n_reply = 0;
  RequestTimes times;  // the longest of each, for sequences run side by side
  for (const Answer& answer : answers_) {
    n_cached += answer.n_cached;
    n_read += answer.n_prompt - answer.n_cached;
    n_reply += answer.n_reply;
    times.queued = std::max(times.queued, answer.times.queued);
    times.prompt = std::max(times.prompt, answer.times.prompt);
    times.reply = std::max(times.reply, answer.times.reply);
  }
  const auto per = [](double a, double b) { return b > 0 ? a / b : 0; };
  return {{"queue_ms", 1e3 * times.queued},
          {"cache_n", n_cached},
          {"prompt_n", n_read},
          {"prompt_ms", 1e3 * times.prompt},
          {"prompt_per_second", per(static_cast<double>(n_read), times.prompt)},
          {"predicted_n", n_reply},
          {"predicted_ms", 1e3 * times.reply},
          {"predicted_per_second", per(static_cast<double>(n_reply), times.reply)}};
}

Json Generation::chat_logprobs(const std::vector<Choice>& choices) const {
  const Tokenizer& tokenizer = context_.backend.tokenizer();
  Json content = Json::array();
  for (const Choice& choice : choices) {
    Json token = token_json(tokenizer, choice.token, choice.logprob);
    token["top_logprobs"] = Json::array();
    for (const TokenLogprob& top : choice.top) {
      token["top_logprobs"].push_back(token_json(tokenizer, top.token, top.logprob));
    }
    content.push_back(std::move(token));
  }
  return {{"content", std::move(content)}};
}

Json Generation::completion_logprobs(const std::vector<Choice>& choices,
                                     std::int64_t text_offset) const {
  const Tokenizer& tokenizer = context_.backend.tokenizer();
  Json json{{"tokens", Json::array()},
            {"token_logprobs", Json::array()},
            {"top_logprobs", Json::array()},
            {"text_offset", Json::array()}};
  for (const Choice& choice : choices) {
    const std::string text = token_text(tokenizer, choice.token);
    json["tokens"].push_back(text);
    json["token_logprobs"].push_back(logprob_number(choice.logprob));
    json["text_offset"].push_back(text_offset);
    text_offset += static_cast<std::int64_t>(count_characters(text));
    Json tops = Json::object();
    for (const TokenLogprob& top : choice.top) {
      tops[token_text(tokenizer, top.token)] = logprob_number(top.logprob);
    }
    json["top_logprobs"].push_back(std::move(tops));
  }
  return json;
}

}  // namespace statepack::serve
