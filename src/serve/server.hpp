// The OpenAI-compatible server: HTTP on one side, the engine on the other.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "serve/backend.hpp"
#include "serve/http.hpp"

namespace statepack::serve {

struct ServerOptions {
  BackendOptions backend;
  HttpLimits limits;
  std::string host = "127.0.0.1";
  std::uint16_t port = 8080;             ///< 0: a free one
  std::vector<std::string> model_names;  ///< of requests; the first in answers. None: the folder's
  std::vector<std::string> api_keys;     ///< none here or in the file: no key is asked for
  std::string api_key_file;
  std::vector<std::string> cors_origins;  ///< origins whose pages may call; "*": all
  std::string slot_save_folder;           ///< of /slots save and restore; "": refused
  std::chrono::milliseconds request_timeout{600'000};
  std::chrono::milliseconds ping_interval{15'000};
  std::chrono::milliseconds grace{30'000};  ///< for running requests once told to stop
  bool handle_signals = false;  ///< SIGINT and SIGTERM stop it; a second one ends at once
  std::string version;          ///< of /version
};

class Server {
 public:
  /// Decides all sizes, then listens; nothing is loaded or answered yet. Errors: as
  /// Backend::plan(), ApiKeys::load() and HttpServer::listen().
  static Result<std::unique_ptr<Server>> create(const ServerOptions& options);
  virtual ~Server() = default;

  virtual std::uint16_t port() const = 0;
  /// Answers, loads the model meanwhile, and returns once it was told to stop and running requests
  /// have finished or their grace is over. Errors: what kept the model from loading.
  virtual Status run() = 0;
  /// As a first signal does; from any thread.
  virtual void stop() = 0;
  /// Parts of run() for tests: serving without loading, and loading from another thread.
  virtual Status run_unloaded() = 0;
  virtual Status load() = 0;
  virtual Backend& backend() = 0;
};

}  // namespace statepack::serve
