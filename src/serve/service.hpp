// The endpoints: which request goes where, and what each answers.
#pragma once

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "serve/generation.hpp"
#include "serve/keys.hpp"
#include "serve/server.hpp"
#include "serve/worker.hpp"

namespace statepack::serve {

/// All functions run on the loop's thread, unless they say otherwise.
class Service {
 public:
  Service(const ServerOptions& options, ApiKeys keys, Backend& backend, HttpServer& http);

  /// Looks at a request before its body is read: path, method, key, type of the body, readiness.
  std::optional<HttpResponse> check(const HttpRequest& head) const;
  void handle(const ExchangePtr& exchange);
  HttpResponse error(int status, const std::string& message) const;
  /// Pings silent streams, forgets finished generations, measures the rate of reply tokens.
  void tick();
  /// From here on new requests are refused.
  void stop_admitting() { admitting_ = false; }
  std::int64_t n_generating() const {
    return std::count_if(generations_.begin(), generations_.end(),
                         [](const auto& generation) { return !generation->done(); });
  }

 private:
  using Handler = void (Service::*)(const ExchangePtr&);
  struct Route {
    std::string_view method, path;  ///< a path that ends in '/' stands for all below it
    Handler handler;
    bool is_open = false;     ///< needs no key
    bool needs_model = true;  ///< 503 until it is loaded
  };
  static std::span<const Route> routes();
  /// The route of a request; null, with the methods of its path in *allowed, when there is none.
  static const Route* find(const HttpRequest& head, std::string* allowed);

  void get_page(const ExchangePtr& exchange);
  void get_health(const ExchangePtr& exchange);
  void get_health_generate(const ExchangePtr& exchange);
  void get_version(const ExchangePtr& exchange);
  void get_models(const ExchangePtr& exchange);
  void get_metrics(const ExchangePtr& exchange);
  void get_status(const ExchangePtr& exchange);
  void get_slots(const ExchangePtr& exchange);
  void post_slot(const ExchangePtr& exchange);
  void post_chat(const ExchangePtr& exchange) { generate(exchange, true); }
  void post_completion(const ExchangePtr& exchange) { generate(exchange, false); }
  void post_tokenize(const ExchangePtr& exchange);
  void post_detokenize(const ExchangePtr& exchange);
  void post_template(const ExchangePtr& exchange);

  Json status_json(const std::vector<PrefixNodeView>& nodes) const;
  struct SlotFile;
  void save(const std::shared_ptr<SlotFile>& task);
  void restore(const std::shared_ptr<SlotFile>& task);
  /// Answers; from any thread.
  void end_slot_file(const SlotFile& task, const Result<SavedPrefix>& done);

  void generate(const ExchangePtr& exchange, bool chat);
  /// Parses and encodes, on the worker's thread.
  std::optional<ApiError> encode(const std::string& body, bool chat, EncodedRequest* out) const;
  /// Refuses text that cannot fit the context before time is spent on encoding it.
  std::optional<ApiError> check_length(std::size_t n_bytes, const char* param) const;
  /// Refuses what would pile up too much before it can be answered in one piece.
  std::optional<ApiError> check_answer(const EncodedRequest& encoded) const;
  std::optional<ApiError> encode_chat_prompt(const ChatPrompt& chat,
                                             std::vector<std::int32_t>* out) const;
  /// Answers with what `work` makes of the body; it runs on the worker's thread.
  using Work = std::function<std::optional<ApiError>(const Json& body, Json* answer)>;
  void answer_later(const ExchangePtr& exchange, Work work);

  void answer(const ExchangePtr& exchange, const Json& json) const;
  void respond(const ExchangePtr& exchange, HttpResponse response) const;
  void fail(const ExchangePtr& exchange, const ApiError& error) const;
  HttpResponse to_response(const ApiError& error) const;
  bool has_key(const HttpRequest& head) const;
  Headers cors(const HttpRequest& head) const;
  Json model_json(const std::string& name) const;

  const ServerOptions& options_;
  ApiKeys keys_;
  Backend& backend_;
  HttpServer& http_;
  ServerMetrics metrics_;
  std::vector<std::string> model_names_;
  GenerationContext context_;
  bool admitting_ = true;
  std::chrono::system_clock::time_point started_ = std::chrono::system_clock::now();
  std::vector<std::shared_ptr<Generation>> generations_;
  std::chrono::steady_clock::time_point rate_since_ = std::chrono::steady_clock::now();
  std::int64_t rate_tokens_ = 0;  ///< of all replies, at rate_since_
  double reply_rate_ = 0;         ///< tokens a second before it
  int n_file_tasks_ = 0;
  Worker worker_;  ///< parses and encodes; last, with the next two: their tasks use the others
  Worker writer_;  ///< writes whole answers down
  Worker files_;   ///< packs, writes and reads slots
};

}  // namespace statepack::serve
