// One request for text on its way: its sequences in the engine, its answer on the wire.
#pragma once

#include <chrono>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "serve/backend.hpp"
#include "serve/http.hpp"
#include "serve/metrics.hpp"
#include "serve/request.hpp"
#include "serve/worker.hpp"

namespace statepack::serve {

/// What generations share. All of it outlives them.
struct GenerationContext {
  Backend& backend;
  HttpServer& http;
  ServerMetrics& metrics;
  Worker& writer;  ///< of whole answers
  std::string model_name;
  std::chrono::milliseconds request_timeout{0};  ///< from submission to the last token; 0: none
  std::chrono::milliseconds ping_interval{0};    ///< of a silent stream; 0: none
};

/// A request whose prompts are encoded already, one row of tokens for each.
struct EncodedRequest {
  GenerationRequest request;
  std::vector<std::vector<std::int32_t>> prompts;
};

class Generation : public std::enable_shared_from_this<Generation> {
 public:
  /// `headers` go with the answer.
  Generation(GenerationContext& context, ExchangePtr exchange, EncodedRequest encoded,
             Headers headers);
  ~Generation();

  /// Submits all sequences; the answer follows by itself. On the loop's thread.
  void begin();
  /// Keeps a silent stream alive.
  void tick(std::chrono::steady_clock::time_point now);
  bool done() const { return done_; }

 private:
  struct Answer;
  struct Piece;
  void submit();
  void on_piece(std::size_t index, Piece piece);
  void fail(const ApiError& error);
  void finish();
  std::string whole_answer() const;
  void cancel_all();
  void log(int status, std::string_view how) const;

  void send(const Json& json);
  Json envelope(bool chunk) const;
  Json choice_json(const Answer& answer, std::size_t index) const;
  void send_piece(std::size_t index, const Piece& piece);
  void send_progress(std::size_t index, const Piece& piece);
  Json usage() const;
  Json timings() const;
  Json chat_logprobs(const std::vector<Choice>& choices) const;
  Json completion_logprobs(const std::vector<Choice>& choices, std::int64_t text_offset) const;
  std::string prompt_text(std::size_t index) const;

  GenerationContext& context_;
  ExchangePtr exchange_;
  Headers headers_;
  GenerationRequest request_;
  std::vector<std::vector<std::int32_t>> prompts_;
  std::vector<Answer> answers_;  ///< of prompt i / n, the (i % n)th
  std::size_t n_left_ = 0;
  bool streaming_ = false;  ///< the head of a stream is out: errors follow inside it
  bool done_ = false;
  std::string id_;
  std::int64_t created_unix_s_ = 0;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace statepack::serve
