// A server in this process, with the model that the project ships, on a free port.
#pragma once

#include <spdlog/spdlog.h>

#include <thread>

#include "client.hpp"
#include "serve/server.hpp"

namespace statepack::serve {

class ServerRig {
 public:
  static ServerOptions options() {
    ServerOptions o;
    o.backend.model = std::string(SP_SOURCE_DIR) + "/models/statepack-gdn";
    o.backend.state = "int8";
    o.backend.threads = 2;
    o.backend.pool_slots = 8;
    o.backend.max_context = 2048;
    o.port = 0;
    o.version = "test";
    return o;
  }

  explicit ServerRig(const ServerOptions& options, bool loaded = true) {
    spdlog::set_level(spdlog::level::off);
    auto created = Server::create(options);
    EXPECT_TRUE(created.ok()) << created.status().message();
    server_ = std::move(created).value();
    thread_ = std::thread([this] { EXPECT_TRUE(server_->run_unloaded().ok()); });
    if (loaded) load();
  }
  ~ServerRig() { stop(); }

  void load() {
    const Status status = server_->load();
    EXPECT_TRUE(status.ok()) << status.message();
  }
  void stop() {
    server_->stop();
    if (thread_.joinable()) thread_.join();
  }

  Server& server() { return *server_; }
  std::uint16_t port() const { return server_->port(); }

  Reply ask(std::string_view text) const {
    Client client(port());
    client.send(text);
    return client.read_reply();
  }
  Reply get(std::string_view path, std::string_view headers = "") const {
    return ask(get_text(path, headers));
  }
  Reply post(std::string_view path, const Json& body, std::string_view headers = "") const {
    return ask(post_text(path, body.dump(), headers));
  }

  std::int64_t n_used_slots() {
    const StatePool& pool = server_->backend().pool();
    return pool.n_slots() - pool.n_free();
  }
  EngineStats stats() { return server_->backend().engine().stats(); }
  /// Waits until no request runs or waits; false if that takes too long.
  bool wait_idle() {
    for (int i = 0; i < 4000; ++i) {
      if (stats().n_running == 0 && stats().n_waiting == 0 && n_used_slots() == 0) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return false;
  }
  /// Waits until `n` requests run; false if that takes too long.
  bool wait_running(std::int64_t n) {
    for (int i = 0; i < 4000; ++i) {
      if (stats().n_running >= n) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return false;
  }

 private:
  std::unique_ptr<Server> server_;
  std::thread thread_;
};

}  // namespace statepack::serve
