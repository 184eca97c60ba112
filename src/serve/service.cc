#include "serve/service.hpp"

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <charconv>
#include <filesystem>

#include "delta/step.hpp"
#include "model/utf8.hpp"
#include "pool/prefix_file.hpp"
#include "runtime/prompt.hpp"
#include "serve/page.hpp"

namespace statepack::serve {
namespace {

constexpr std::string_view kLoading =
    R"({"error":{"code":503,"message":"Loading model","type":"unavailable_error"}})";

/// Of an answer in one piece, tokens and log-probabilities: each takes about 550 bytes of a chat's
/// answer until it is sent.
constexpr std::int64_t kMaxAnswerValues = std::int64_t{1} << 18;

/// Of the prefix cache's tree, in /status.
constexpr std::int64_t kMaxTreeNodes = 200;
/// Slots on their way to or from files at a time: each holds a copy of its state and rows.
constexpr int kMaxFileTasks = 4;

std::string percent_decoded(std::string_view text) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    unsigned value = 0;
    if (text[i] == '%' && i + 2 < text.size() &&
        std::from_chars(text.data() + i + 1, text.data() + i + 3, value, 16).ptr ==
            text.data() + i + 3) {
      out += static_cast<char>(value);
      i += 2;
    } else {
      out += text[i];
    }
  }
  return out;
}

/// A name that stays inside its folder and hides nothing.
bool is_plain_file_name(std::string_view name) {
  return !name.empty() && name.size() <= 200 && name.front() != '.' &&
         std::all_of(name.begin(), name.end(), [](char c) {
           return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                  c == '.' || c == '_' || c == '-';
         });
}

/// A message about the file at `path` as clients may read it: the server's folders are none of
/// their business.
std::string without_folder(std::string message, const std::string& path, const std::string& name) {
  std::error_code error;
  for (const std::string& shown : {path, std::filesystem::weakly_canonical(path, error).string()}) {
    if (shown.empty()) continue;
    for (std::size_t at = 0; (at = message.find(shown, at)) != std::string::npos;) {
      message.replace(at, shown.size(), name);
      at += name.size();
    }
  }
  return message;
}

bool is_json(std::string_view content_type) {
  content_type = content_type.substr(0, content_type.find(';'));
  while (!content_type.empty() && content_type.back() == ' ') content_type.remove_suffix(1);
  constexpr std::string_view kJson = "application/json";
  return std::equal(content_type.begin(), content_type.end(), kJson.begin(), kJson.end(),
                    [](char a, char b) { return a == b || (a >= 'A' && a <= 'Z' && a + 32 == b); });
}

/// Bytes of all texts in a value.
std::size_t text_bytes(const Json& value) {
  if (value.is_string()) return value.get_ref<const std::string&>().size();
  std::size_t n = 0;
  if (value.is_structured()) {
    for (const Json& item : value) n += text_bytes(item);
  }
  return n;
}

std::int64_t unix_seconds(std::chrono::system_clock::time_point time) {
  return std::chrono::duration_cast<std::chrono::seconds>(time.time_since_epoch()).count();
}

Json slot_json(const SlotView& slot) {
  return {{"id", slot.slot},
          {"state", slot_phase_name(slot.phase)},
          {"is_processing", slot.phase == SlotPhase::kPrompt || slot.phase == SlotPhase::kReply},
          {"id_task", slot.request},
          {"n_prompt", slot.n_prompt},
          {"n_prompt_cached", slot.n_cached},
          {"n_prompt_read", slot.n_prompt_read},
          {"n_decoded", slot.n_reply},
          {"position", slot.position},
          {"n_last", slot.n_last}};
}

}  // namespace

/// A slot on its way to or from a file.
struct Service::SlotFile {
  ExchangePtr exchange;
  std::int64_t slot = 0;
  std::string path, name;  ///< the file's: in full, and as the client may read it
  PrefixRecord record;
  std::chrono::steady_clock::time_point start;
};

Service::Service(const ServerOptions& options, ApiKeys keys, Backend& backend, HttpServer& http)
    : options_(options),
      keys_(std::move(keys)),
      backend_(backend),
      http_(http),
      model_names_(options.model_names),
      context_{
          backend, http, metrics_, writer_, "", options.request_timeout, options.ping_interval} {
  if (model_names_.empty()) {
    std::filesystem::path path(options.backend.model);
    if (!path.has_filename()) path = path.parent_path();
    model_names_.push_back(path.filename().string());
  }
  context_.model_name = model_names_.front();
}

// ---------------------------------------------------------------- routing

std::span<const Service::Route> Service::routes() {
  static constexpr Route kRoutes[] = {
      {"GET", "/", &Service::get_page, true, false},
      {"GET", "/status.css", &Service::get_page, true, false},
      {"GET", "/status.js", &Service::get_page, true, false},
      {"GET", "/health", &Service::get_health, true, true},
      {"GET", "/health_generate", &Service::get_health_generate},
      {"GET", "/version", &Service::get_version, false, false},
      {"GET", "/v1/models", &Service::get_models},
      {"GET", "/v1/models/", &Service::get_models},
      {"GET", "/models", &Service::get_models},
      {"GET", "/metrics", &Service::get_metrics},
      {"GET", "/status", &Service::get_status},
      {"GET", "/slots", &Service::get_slots},
      {"POST", "/slots/", &Service::post_slot},
      {"POST", "/v1/chat/completions", &Service::post_chat},
      {"POST", "/chat/completions", &Service::post_chat},
      {"POST", "/v1/completions", &Service::post_completion},
      {"POST", "/completions", &Service::post_completion},
      {"POST", "/tokenize", &Service::post_tokenize},
      {"POST", "/detokenize", &Service::post_detokenize},
      {"POST", "/apply-template", &Service::post_template},
  };
  return kRoutes;
}

const Service::Route* Service::find(const HttpRequest& head, std::string* allowed) {
  for (const Route& route : routes()) {
    const bool below = route.path.size() > 1 && route.path.back() == '/';
    const bool fits = below ? head.path.size() > route.path.size() &&
                                  head.path.compare(0, route.path.size(), route.path) == 0
                            : head.path == route.path;
    if (!fits) continue;
    if (head.method == route.method) return &route;
    if (!allowed->empty()) *allowed += ", ";
    *allowed += route.method == "GET" ? "GET, HEAD" : route.method;
  }
  return nullptr;
}

bool Service::has_key(const HttpRequest& head) const {
  if (keys_.empty()) return true;
  constexpr std::string_view kBearer = "Bearer ";
  const std::string_view authorization = head.header("authorization");
  if (authorization.substr(0, kBearer.size()) == kBearer) {
    return keys_.accept(authorization.substr(kBearer.size()));
  }
  return keys_.accept(head.header("x-api-key"));
}

Headers Service::cors(const HttpRequest& head) const {
  const std::string_view origin = head.header("origin");
  if (origin.empty()) return {};
  for (const std::string& allowed : options_.cors_origins) {
    if (allowed == "*") return {{"Access-Control-Allow-Origin", "*"}};
    if (allowed == origin) return {{"Access-Control-Allow-Origin", allowed}, {"Vary", "Origin"}};
  }
  return {};
}

std::optional<HttpResponse> Service::check(const HttpRequest& head) const {
  const auto refuse = [&](HttpResponse response) {
    for (auto& header : cors(head)) response.headers.push_back(std::move(header));
    return response;
  };
  std::string allowed;
  const Route* route = find(head, &allowed);
  if (route == nullptr && allowed.empty()) {
    return refuse(
        to_response({404, fmt::format("there is nothing at {}", head.path), "NotFoundError", ""}));
  }
  if (route == nullptr) {
    if (head.method == "OPTIONS" && !cors(head).empty()) {  // a browser asks first
      HttpResponse response{204, "text/plain", "", {}};
      response.headers = {
          {"Access-Control-Allow-Methods", allowed},
          {"Access-Control-Allow-Headers", "authorization, content-type, x-api-key"},
          {"Access-Control-Max-Age", "600"}};
      return refuse(std::move(response));
    }
    HttpResponse response =
        to_response({405, fmt::format("{} takes {}, not {}", head.path, allowed, head.method),
                     "MethodNotAllowedError", ""});
    response.headers.emplace_back("Allow", allowed);
    return refuse(std::move(response));
  }
  if (!route->is_open && !has_key(head)) {
    HttpResponse response =
        to_response({401, "the API key is missing or wrong; send it as `Authorization: Bearer KEY`",
                     "authentication_error", ""});
    response.headers.emplace_back("WWW-Authenticate", "Bearer");
    return refuse(std::move(response));
  }
  if (!admitting_) return refuse(error(503, "the server is shutting down"));
  if (route->needs_model && !backend_.ready()) {
    return refuse({503, "application/json", std::string(kLoading), {{"Retry-After", "1"}}});
  }
  const bool from_elsewhere = !head.header("origin").empty() && cors(head).empty();
  if (route->handler == &Service::post_slot && from_elsewhere) {
    return refuse(to_response({403,
                               "slots are not changed for web pages of other origins; see "
                               "--cors-origin",
                               "PermissionDeniedError", ""}));
  }
  // A web page cannot send this type to another site without being asked first.
  if (head.method == "POST" && route->handler != &Service::post_slot &&
      !is_json(head.header("content-type"))) {
    return refuse(to_response({415, "the body must be JSON; send `Content-Type: application/json`",
                               "BadRequestError", ""}));
  }
  return std::nullopt;
}

void Service::handle(const ExchangePtr& exchange) {
  ++metrics_.requests;
  std::string allowed;
  const Route* route = find(exchange->request(), &allowed);
  (this->*route->handler)(exchange);  // check() let only known ones through
}

HttpResponse Service::error(int status, const std::string& message) const {
  const char* type = status == 503 ? "unavailable_error" : "BadRequestError";
  return to_response({status, message, type, ""});
}

HttpResponse Service::to_response(const ApiError& error) const {
  HttpResponse response{error.status, "application/json", dump(error.body()), {}};
  if (error.status == 429 || error.status == 503) {
    response.headers.emplace_back("Retry-After", "1");
  }
  return response;
}

void Service::respond(const ExchangePtr& exchange, HttpResponse response) const {
  if (!exchange->open()) return;
  for (auto& header : cors(exchange->request())) response.headers.push_back(std::move(header));
  exchange->respond(std::move(response));
}

void Service::answer(const ExchangePtr& exchange, const Json& json) const {
  respond(exchange, {200, "application/json", dump(json), {}});
}

void Service::fail(const ExchangePtr& exchange, const ApiError& error) const {
  if (!exchange->open()) return;
  const HttpRequest& request = exchange->request();
  spdlog::info("{} {} status={} {}", request.client, request.path, error.status, error.message);
  respond(exchange, to_response(error));
}

void Service::tick() {
  const auto now = std::chrono::steady_clock::now();
  for (const auto& generation : generations_) generation->tick(now);
  std::erase_if(generations_, [](const auto& generation) { return generation->done(); });
  const std::chrono::duration<double> passed = now - rate_since_;
  if (passed.count() < 1 || !backend_.ready()) return;
  const std::int64_t n_reply = backend_.engine().stats().reply_tokens;
  reply_rate_ = static_cast<double>(n_reply - rate_tokens_) / passed.count();
  rate_tokens_ = n_reply;
  rate_since_ = now;
}

// ---------------------------------------------------------------- text

void Service::generate(const ExchangePtr& exchange, bool chat) {
  worker_.post([this, exchange, chat, body = std::move(exchange->request().body)] {
    auto encoded = std::make_shared<EncodedRequest>();
    const std::optional<ApiError> error = encode(body, chat, encoded.get());
    http_.post([this, exchange, encoded, error] {
      if (!exchange->open()) return;  // the client left while it waited
      if (!admitting_)
        return fail(exchange, {503, "the server is shutting down", "unavailable_error", ""});
      if (error) {
        ++metrics_.rejected;
        return fail(exchange, *error);
      }
      const auto generation = std::make_shared<Generation>(context_, exchange, std::move(*encoded),
                                                           cors(exchange->request()));
      generations_.push_back(generation);
      generation->begin();
    });
  });
}

std::optional<ApiError> Service::encode(const std::string& body, bool chat,
                                        EncodedRequest* out) const {
  Json json;
  if (auto error = parse_body(body, &json)) return error;
  GenerationRequest& request = out->request;
  if (auto error = chat ? read_chat_request(json, backend_.defaults(), &request)
                        : read_completion_request(json, backend_.defaults(), &request)) {
    return error;
  }
  if (!request.model.empty() &&
      std::find(model_names_.begin(), model_names_.end(), request.model) == model_names_.end()) {
    return ApiError{404,
                    fmt::format("there is no model '{}' here; this server has '{}'", request.model,
                                fmt::join(model_names_, "', '")),
                    "NotFoundError", "model"};
  }
  if (chat) {
    if (auto error = encode_chat_prompt(*request.chat, &out->prompts.emplace_back())) return error;
    return check_answer(*out);
  }
  for (const Prompt& prompt : request.prompts) {
    if (const auto* text = std::get_if<std::string>(&prompt)) {
      if (auto error = check_length(text->size(), "prompt")) return error;
      Result<std::vector<std::int32_t>> ids = backend_.tokenizer().try_encode(*text, true);
      if (!ids.ok()) return bad_request("prompt", ids.status().message());
      out->prompts.push_back(std::move(ids).value());
    } else {
      out->prompts.push_back(std::get<std::vector<std::int32_t>>(prompt));
    }
  }
  return check_answer(*out);
}

std::optional<ApiError> Service::check_answer(const EncodedRequest& encoded) const {
  const GenerationRequest& request = encoded.request;
  if (request.stream) return std::nullopt;
  const std::int64_t n_each = 1 + std::max(0, request.params.logprobs);
  std::int64_t n_values = 0;
  for (const std::vector<std::int32_t>& prompt : encoded.prompts) {
    const std::int64_t room =
        std::max<std::int64_t>(0, backend_.summary().max_context - std::ssize(prompt));
    n_values += request.n * std::min(room, request.max_tokens.value_or(room)) * n_each;
  }
  if (n_values <= kMaxAnswerValues) return std::nullopt;
  return bad_request(
      "max_tokens",
      fmt::format("the whole answer could hold {} tokens and log-probabilities (prompts x n x "
                  "max_tokens x (1 + top_logprobs)), and at most {} are collected; ask for less, "
                  "or stream",
                  n_values, kMaxAnswerValues));
}

std::optional<ApiError> Service::check_length(std::size_t n_bytes, const char* param) const {
  const std::int64_t most = backend_.summary().max_context * backend_.longest_token_bytes();
  if (static_cast<std::int64_t>(n_bytes) <= most) return std::nullopt;
  return bad_request(param, fmt::format("{} holds {} bytes of text, and the context of {} tokens "
                                        "holds {} at most; shorten it",
                                        param, n_bytes, backend_.summary().max_context, most));
}

std::optional<ApiError> Service::encode_chat_prompt(const ChatPrompt& chat,
                                                    std::vector<std::int32_t>* out) const {
  if (backend_.chat_template() == nullptr) {
    return not_supported("messages", "this model has no chat template; use /v1/completions");
  }
  if (auto error = check_length(text_bytes(chat.messages), "messages")) return error;
  Result<std::vector<std::int32_t>> ids =
      encode_chat(backend_.tokenizer(), *backend_.chat_template(), chat.messages, chat.variables,
                  chat.add_generation_prompt);
  if (!ids.ok()) {
    ApiError error = to_api_error(ids.status());
    error.param = "messages";
    return error;
  }
  *out = std::move(ids).value();
  return std::nullopt;
}

void Service::answer_later(const ExchangePtr& exchange, Work work) {
  worker_.post(
      [this, exchange, work = std::move(work), body = std::move(exchange->request().body)] {
        Json json;
        Json result;
        std::optional<ApiError> error = parse_body(body, &json);
        if (!error) error = work(json, &result);
        http_.post([this, exchange, error, result = std::move(result)] {
          if (error) {
            fail(exchange, *error);
          } else {
            answer(exchange, result);
          }
        });
      });
}

void Service::post_tokenize(const ExchangePtr& exchange) {
  answer_later(exchange, [this](const Json& body, Json* out) -> std::optional<ApiError> {
    std::vector<std::int32_t> ids;
    bool with_pieces = false;
    bool parse_special = true;
    Fields fields(body);
    fields.read("with_pieces", &with_pieces);
    fields.read("parse_special", &parse_special);
    if (fields.find("messages") != nullptr) {
      ChatPrompt chat;
      if (auto error = read_chat_prompt(body, &chat)) return error;
      if (auto error = encode_chat_prompt(chat, &ids)) return error;
    } else {
      std::string text;
      const char* name = fields.find("content") != nullptr ? "content" : "prompt";
      if (fields.find(name) == nullptr) fields.fail("prompt", "is missing");
      fields.read(name, &text);
      if (!fields.ok()) return fields.error();
      if (auto error = check_length(text.size(), name)) return error;
      Result<std::vector<std::int32_t>> encoded =
          backend_.tokenizer().try_encode(text, parse_special);
      if (!encoded.ok()) return bad_request(name, encoded.status().message());
      ids = std::move(encoded).value();
    }
    if (!fields.ok()) return fields.error();
    Json tokens = Json::array();
    for (const std::int32_t id : ids) {
      if (with_pieces) {
        tokens.push_back(
            {{"id", id}, {"piece", to_valid_utf8(backend_.tokenizer().token_bytes(id))}});
      } else {
        tokens.push_back(id);
      }
    }
    *out = {{"count", ids.size()},
            {"max_model_len", backend_.summary().max_context},
            {"tokens", std::move(tokens)}};
    return std::nullopt;
  });
}

void Service::post_detokenize(const ExchangePtr& exchange) {
  answer_later(exchange, [this](const Json& body, Json* out) -> std::optional<ApiError> {
    const Json* tokens = Fields(body).find("tokens");
    if (tokens == nullptr) return bad_request("tokens", "tokens is missing");
    std::vector<std::int32_t> ids;
    if (auto error = read_token_ids(*tokens, "tokens", &ids)) return error;
    const std::int32_t n = backend_.tokenizer().n_tokens();
    for (const std::int32_t id : ids) {
      if (id >= n) {
        return bad_request("tokens",
                           fmt::format("token {} is outside the vocabulary of {}", id, n));
      }
    }
    const std::string text = backend_.tokenizer().decode(ids, false);
    *out = {{"prompt", text}, {"content", text}};  // vLLM's name and llama-server's
    return std::nullopt;
  });
}

void Service::post_template(const ExchangePtr& exchange) {
  answer_later(exchange, [this](const Json& body, Json* out) -> std::optional<ApiError> {
    ChatPrompt chat;
    if (auto error = read_chat_prompt(body, &chat)) return error;
    if (backend_.chat_template() == nullptr) {
      return not_supported("messages", "this model has no chat template");
    }
    Result<std::string> text =
        backend_.chat_template()->render(chat.messages, chat.add_generation_prompt, chat.variables);
    if (!text.ok()) return to_api_error(text.status());
    *out = {{"prompt", *text}};
    return std::nullopt;
  });
}

// ---------------------------------------------------------------- models, health

Json Service::model_json(const std::string& name) const {
  return {{"id", name},
          {"object", "model"},
          {"created", unix_seconds(started_)},
          {"owned_by", "statepack"},
          {"max_model_len", backend_.summary().max_context},
          {"state_scheme", backend_.summary().scheme}};
}

void Service::get_models(const ExchangePtr& exchange) {
  constexpr std::string_view kOne = "/v1/models/";
  const std::string& path = exchange->request().path;
  if (path.size() > kOne.size()) {
    const std::string name = percent_decoded(std::string_view(path).substr(kOne.size()));
    if (std::find(model_names_.begin(), model_names_.end(), name) != model_names_.end()) {
      return answer(exchange, model_json(name));
    }
    return fail(exchange, {404,
                           fmt::format("there is no model '{}' here; this server has '{}'",
                                       to_valid_utf8(name), fmt::join(model_names_, "', '")),
                           "NotFoundError", "model"});
  }
  Json list{{"object", "list"}, {"data", Json::array()}};
  for (const std::string& name : model_names_) list["data"].push_back(model_json(name));
  answer(exchange, list);
}

void Service::get_health(const ExchangePtr& exchange) { answer(exchange, Json{{"status", "ok"}}); }

void Service::get_health_generate(const ExchangePtr& exchange) {
  Request request;
  request.prompt = {0};
  request.params.max_tokens = 1;
  request.params.ignore_eos = true;
  if (options_.request_timeout.count() > 0) {
    request.deadline = std::chrono::steady_clock::now() + options_.request_timeout;
  }
  const Result<RequestId> id =
      backend_.loop().submit(std::move(request), [this, exchange](const TokenEvent& event) {
        if (!event.finish) return;
        const bool well = *event.finish == FinishReason::kLength;
        http_.post([this, exchange, well, why = event.status.message()] {
          if (well) return answer(exchange, Json{{"status", "ok"}});
          fail(exchange, {503, why.empty() ? "no token came" : why, "unavailable_error", ""});
        });
      });
  if (!id.ok()) {
    return fail(exchange, {503, id.status().message(), "unavailable_error", ""});
  }
  exchange->on_gone([this, request_id = *id] { backend_.loop().cancel(request_id); });
}

void Service::get_version(const ExchangePtr& exchange) {
  answer(exchange, Json{{"version", options_.version}});
}

// ---------------------------------------------------------------- slots

void Service::get_slots(const ExchangePtr& exchange) {
  Json list = Json::array();
  for (const SlotView& slot : backend_.engine().slots()) {
    Json json = slot_json(slot);
    json["n_ctx"] = backend_.summary().max_context;
    list.push_back(std::move(json));
  }
  answer(exchange, list);
}

void Service::post_slot(const ExchangePtr& exchange) {
  const HttpRequest& request = exchange->request();
  const std::string_view text =
      std::string_view(request.path).substr(std::string_view("/slots/").size());
  std::int64_t slot = 0;
  const auto [end, parse_error] = std::from_chars(text.data(), text.data() + text.size(), slot);
  if (parse_error != std::errc() || end != text.data() + text.size() || slot < 1 ||
      slot > backend_.summary().n_slots) {
    return fail(exchange, {404,
                           fmt::format("there is no slot '{}'; slots are 1 to {}", text,
                                       backend_.summary().n_slots),
                           "NotFoundError", ""});
  }
  const std::string action(request.parameter("action"));
  if (action != "save" && action != "restore" && action != "erase") {
    return fail(exchange, bad_request("action",
                                      "action must be save, restore or erase: POST "
                                      "/slots/{id}?action=save"));
  }
  std::string path;
  std::string name;
  if (action != "erase") {
    if (options_.slot_save_folder.empty()) {
      return fail(exchange, not_supported("action",
                                          "slots are saved and restored only where the "
                                          "server was started with --slot-save-path"));
    }
    Json body;
    if (const auto error = parse_body(request.body, &body)) return fail(exchange, *error);
    Fields fields(body);
    fields.read("filename", &name);
    if (!is_plain_file_name(name)) {
      fields.fail("filename",
                  "must be a file name of letters, digits, '.', '_' and '-', not "
                  "beginning with '.'");
    }
    if (!fields.ok()) return fail(exchange, *fields.error());
    path = (std::filesystem::path(options_.slot_save_folder) / name).string();
  }
  if (action == "erase") {
    const Status posted = backend_.loop().post([this, exchange, slot] {
      const Result<std::int64_t> n = backend_.engine().erase_slot(slot);
      http_.post([this, exchange, slot, n] {
        if (!n.ok()) return fail(exchange, to_api_error(n.status()));
        answer(exchange, Json{{"id_slot", slot}, {"n_erased", *n}});
      });
    });
    if (!posted.ok()) fail(exchange, to_api_error(posted));
    return;
  }
  if (n_file_tasks_ >= kMaxFileTasks) {
    return fail(exchange, {429,
                           fmt::format("{} slots are being saved or restored, which is the limit; "
                                       "try again later",
                                       kMaxFileTasks),
                           "rate_limit_error", ""});
  }
  ++n_file_tasks_;
  const auto task = std::make_shared<SlotFile>();
  *task = {exchange, slot, path, name, {}, std::chrono::steady_clock::now()};
  if (action == "save") {
    save(task);
  } else {
    restore(task);
  }
}

// The engine's thread gives or takes the record, between two steps; files_ packs and writes, or
// reads and checks, so that replies flow on meanwhile.
void Service::save(const std::shared_ptr<SlotFile>& task) {
  const Status posted = backend_.loop().post([this, task] {
    Result<PrefixRecord> record = backend_.engine().record_of(task->slot);
    if (!record.ok()) return end_slot_file(*task, record.status());
    task->record = *std::move(record);
    files_.post([this, task] {
      const PrefixRecord& r = task->record;
      const Result<std::int64_t> n_bytes = write_prefix_file(task->path, r);
      if (!n_bytes.ok()) return end_slot_file(*task, n_bytes.status());
      end_slot_file(*task, SavedPrefix{std::ssize(r.tokens), std::ssize(r.snapshots), *n_bytes});
    });
  });
  if (!posted.ok()) end_slot_file(*task, posted);
}

void Service::restore(const std::shared_ptr<SlotFile>& task) {
  files_.post([this, task] {
    std::int64_t n_bytes = 0;
    Result<PrefixRecord> record = backend_.engine().read_record(task->path, &n_bytes);
    if (!record.ok()) return end_slot_file(*task, record.status());
    task->record = *std::move(record);
    const Status posted = backend_.loop().post([this, task, n_bytes] {
      Result<SavedPrefix> kept = backend_.engine().keep_record(task->record);
      if (!kept.ok()) {
        return end_slot_file(*task,
                             Status(kept.status().code(),
                                    fmt::format("'{}': {}", task->name, kept.status().message())));
      }
      kept->n_bytes = n_bytes;
      end_slot_file(*task, kept);
    });
    if (!posted.ok()) end_slot_file(*task, posted);
  });
}

void Service::end_slot_file(const SlotFile& task, const Result<SavedPrefix>& done) {
  const std::chrono::duration<double, std::milli> took =
      std::chrono::steady_clock::now() - task.start;
  http_.post([this, exchange = task.exchange, slot = task.slot, path = task.path, name = task.name,
              done, took] {
    --n_file_tasks_;
    if (!done.ok()) {
      ApiError error = to_api_error(done.status());
      // Nobody has to wait here: what does not fit now never will.
      if (done.status().code() == Code::kExhausted) error = bad_request("filename", error.message);
      error.message = without_folder(error.message, path, name);
      return fail(exchange, error);
    }
    const bool saves = exchange->request().parameter("action") == "save";
    answer(exchange, Json{{"id_slot", slot},
                          {"filename", name},
                          {saves ? "n_saved" : "n_restored", done->n_tokens},
                          {saves ? "n_written" : "n_read", done->n_bytes},
                          {"timings", {{saves ? "save_ms" : "restore_ms", took.count()}}}});
  });
}

// ---------------------------------------------------------------- status, metrics, page

void Service::get_status(const ExchangePtr& exchange) {
  // The tree belongs to the engine's thread; where that has ended, the rest is shown without it.
  const Status posted = backend_.loop().post([this, exchange] {
    http_.post([this, exchange, nodes = backend_.engine().prefix_nodes(kMaxTreeNodes)] {
      answer(exchange, status_json(nodes));
    });
  });
  if (!posted.ok()) answer(exchange, status_json({}));
}

Json Service::status_json(const std::vector<PrefixNodeView>& nodes) const {
  const StateSummary& s = backend_.summary();
  const EngineStats e = backend_.engine().stats();
  Json slots = Json::array();
  std::int64_t n_used = 0;
  for (const SlotView& slot : backend_.engine().slots()) {
    n_used += slot.phase == SlotPhase::kFree ? 0 : 1;
    slots.push_back(slot_json(slot));
  }
  const std::chrono::duration<double> up = std::chrono::system_clock::now() - started_;
  Json tree = Json::array();
  for (const PrefixNodeView& node : nodes) {
    tree.push_back({{"level", node.level},
                    {"tokens", node.n_tokens},
                    {"own_tokens", node.n_own_tokens},
                    {"state_bytes", node.state_bytes},
                    {"pins", node.n_pins},
                    {"age_s", node.state_bytes > 0 ? Json(node.age_s) : Json(nullptr)}});
  }
  return Json{
      {"version", options_.version},
      {"model", context_.model_name},
      {"uptime_s", up.count()},
      {"state",
       {{"scheme", s.scheme},
        {"payload_bits", s.payload_bits},
        {"resident_bits", s.resident_bits},
        {"bytes_per_slot", s.bytes_per_slot},
        {"slots", s.n_slots},
        {"used", n_used},
        {"nonfinite", e.nonfinite},
        {"guarded_roundings", e.guard.roundings},
        {"over_guard", e.guard.over},
        {"flushes", e.flushes}}},
      {"requests",
       {{"running", e.n_running},
        {"reading", e.n_prompts},
        {"waiting", e.n_waiting},
        {"finished", e.n_ended()},
        {"failed", e.n_finished(FinishReason::kError)},
        {"connections", http_.n_connections()}}},
      {"tokens",
       {{"prompt", e.prompt_tokens}, {"cached", e.cached_tokens}, {"reply", e.reply_tokens}}},
      {"decode", {{"steps", e.decode_steps}, {"rows", e.decode_rows}}},
      {"kv", {{"reserved_bytes", e.kv_bytes_reserved}, {"limit_bytes", e.kv_bytes_limit}}},
      {"prefix_cache",
       {{"mode", prefix_mode_name(options_.backend.prefix_cache.mode)},
        {"snapshots", e.prefix.n_snapshots},
        {"nodes", e.prefix.n_nodes},
        {"state_bytes", e.prefix.state_bytes},
        {"row_bytes", e.prefix.row_bytes},
        {"bytes", e.prefix.bytes},
        {"max_bytes", e.prefix.max_bytes},
        {"max_state_bytes", e.prefix.max_state_bytes},
        {"queries", e.prefix.queries},
        {"hits", e.prefix.hits},
        {"evictions", e.prefix.evictions},
        {"tree", std::move(tree)}}},
      {"slots", std::move(slots)}};
}

void Service::get_metrics(const ExchangePtr& exchange) {
  const StateSummary& s = backend_.summary();
  const EngineStats e = backend_.engine().stats();
  std::int64_t n_used = 0, n_quarantined = 0;
  for (std::int64_t slot = 1; slot <= s.n_slots; ++slot) {
    const SlotState state = backend_.pool().state(slot);
    n_used += state == SlotState::kUsed ? 1 : 0;
    n_quarantined += state == SlotState::kQuarantined ? 1 : 0;
  }
  const auto number = [](std::int64_t n) { return static_cast<double>(n); };
  MetricText m(MetricText::label("model_name", context_.model_name));

  m.head("statepack:build_info", "gauge", "Version and scheme, as labels.");
  m.sample(1, {{"version", options_.version}, {"scheme", s.scheme}});
  m.gauge("statepack:num_requests_running", "Requests whose prompt is read or whose reply is made.",
          number(e.n_running));
  m.gauge("statepack:num_requests_waiting", "Requests in the queue.", number(e.n_waiting));
  m.gauge("statepack:requests_processing", "num_requests_running by llama-server's name.",
          number(e.n_running));
  m.gauge("statepack:requests_deferred", "num_requests_waiting by llama-server's name.",
          number(e.n_waiting));
  m.counter("statepack:num_preemptions_total",
            "Always 0: a request is admitted once all that it can need is set aside.", 0);
  m.gauge("statepack:gen_throughput", "Reply tokens a second, over the last second.", reply_rate_);
  m.gauge("statepack:max_num_seqs", "Sequences of a full batch.", number(s.max_seqs));
  m.gauge("statepack:n_busy_slots_per_decode", "Sequences of an average decode step.",
          e.decode_steps > 0 ? number(e.decode_rows) / number(e.decode_steps) : 0);
  m.counter("statepack:prompt_tokens_total", "Prompt tokens read; cached ones are not counted.",
            number(e.prompt_tokens));
  m.counter("statepack:cached_tokens_total", "Prompt tokens taken from the prefix cache.",
            number(e.cached_tokens));
  m.counter("statepack:generation_tokens_total", "Tokens of replies.", number(e.reply_tokens));
  m.counter("statepack:decode_steps_total", "Decode steps of the whole batch.",
            number(e.decode_steps));
  m.head("statepack:request_success_total", "counter",
         "Requests that came to an end, by reason; cancelled ones were left by their clients.");
  for (std::size_t i = 0; i < kNFinishReasons; ++i) {
    m.sample(number(e.finished[i]),
             {{"finished_reason", finish_reason_name(static_cast<FinishReason>(i))}});
  }
  m.counter("statepack:corrupted_requests_total", "Requests that ended with an error of the model.",
            number(e.n_finished(FinishReason::kError)));

  m.head("statepack:state_pool_slots", "gauge", "Slots of the state pool by what they are.");
  m.sample(number(n_used), {{"state", "used"}});
  m.sample(number(s.n_slots - n_used - n_quarantined), {{"state", "free"}});
  m.sample(number(n_quarantined), {{"state", "quarantined"}});
  m.gauge("statepack:state_usage_perc", "Share of the state pool's slots in use, 1 is all.",
          number(n_used) / number(s.n_slots));
  m.gauge("statepack:state_bytes_per_slot", "Bytes of one slot, all of it.",
          number(s.bytes_per_slot));
  m.head("statepack:state_bits", "gauge", "Bits a state value costs.");
  m.sample(s.payload_bits, {{"kind", "payload"}});
  m.sample(s.resident_bits, {{"kind", "resident"}});
  m.counter("statepack:state_flush_total", "Complete windows that were rounded into their pages.",
            number(e.flushes));
  m.counter("statepack:state_nonfinite_total", "Slots quarantined for a state that was not finite.",
            number(e.nonfinite));
  m.counter("statepack:state_guarded_roundings_total",
            "Roundings of one head where the plan says what they may cost.",
            number(e.guard.roundings));
  m.counter("statepack:state_guard_total",
            "Of them, those that cost more: states unlike the plan's calibration texts.",
            number(e.guard.over));
  m.head("statepack:kernel_served_total", "counter",
         "Decoded rows by the kernels that served them.");
  m.sample(number(e.decode_rows), {{"impl", simd_target()}});
  m.gauge("statepack:kv_cache_usage_perc",
          "Share of the attention cache that admitted requests may fill, 1 is all.",
          e.kv_bytes_limit > 0 ? number(e.kv_bytes_reserved) / number(e.kv_bytes_limit) : 0);

  m.counter("statepack:prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.",
            number(e.prefix.query_tokens));
  m.counter("statepack:prefix_cache_hits_total", "Of them, tokens that were found.",
            number(e.prefix.hit_tokens));
  m.gauge(
      "statepack:cache_hit_rate", "Their share since the start, 1 is all.",
      e.prefix.query_tokens > 0 ? number(e.prefix.hit_tokens) / number(e.prefix.query_tokens) : 0);
  m.gauge("statepack:prefix_cache_snapshots", "States kept.", number(e.prefix.n_snapshots));
  m.gauge("statepack:prefix_cache_bytes", "Bytes of states, attention rows and tokens.",
          number(e.prefix.bytes));
  m.gauge("statepack:prefix_cache_max_bytes", "Most bytes it may take.",
          number(e.prefix.max_bytes));
  m.gauge("statepack:prefix_cache_state_bytes", "Of its bytes, those of states.",
          number(e.prefix.state_bytes));
  m.gauge("statepack:prefix_cache_max_state_bytes", "Most bytes that states may take.",
          number(e.prefix.max_state_bytes));
  m.counter("statepack:prefix_cache_evictions_total", "States dropped for newer ones.",
            number(e.prefix.evictions));

  m.histogram("statepack:time_to_first_token_seconds", "From submission to the first token.",
              metrics_.time_to_first_token_s);
  m.histogram("statepack:inter_token_latency_seconds", "From one token of a reply to the next.",
              metrics_.inter_token_latency_s);
  m.histogram("statepack:e2e_request_latency_seconds", "From submission to the whole answer.",
              metrics_.e2e_latency_s);
  m.histogram("statepack:request_queue_time_seconds", "In the queue.", metrics_.queue_time_s);
  m.histogram("statepack:request_prompt_tokens", "Prompt tokens of a request.",
              metrics_.prompt_tokens);
  m.histogram("statepack:request_generation_tokens", "Reply tokens of a request.",
              metrics_.reply_tokens);

  m.gauge("statepack:http_connections", "Open connections.", number(http_.n_connections()));
  m.counter("statepack:http_requests_total", "Requests that reached an endpoint.",
            number(metrics_.requests.load()));
  m.counter("statepack:http_rejected_total", "Requests for text that could not be read.",
            number(metrics_.rejected.load()));
  m.counter("statepack:http_disconnects_total", "Clients that left before their answer.",
            number(metrics_.disconnects.load()));
  respond(exchange, {200, "text/plain; version=0.0.4; charset=utf-8", m.text(), {}});
}

void Service::get_page(const ExchangePtr& exchange) {
  const std::string& path = exchange->request().path;
  HttpResponse response;
  if (path == "/status.css") {
    response = {200, "text/css; charset=utf-8", std::string(kPageCss), {}};
  } else if (path == "/status.js") {
    response = {200, "text/javascript; charset=utf-8", std::string(kPageJs), {}};
  } else {
    response = {200, "text/html; charset=utf-8", std::string(kPageHtml), {}};
  }
  response.headers = {{"Content-Security-Policy",
                       "default-src 'none'; script-src 'self'; style-src 'self'; connect-src "
                       "'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"},
                      {"X-Content-Type-Options", "nosniff"},
                      {"Referrer-Policy", "no-referrer"},
                      {"Cache-Control", "no-cache"}};
  respond(exchange, std::move(response));
}

}  // namespace statepack::serve
