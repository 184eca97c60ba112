#include "serve/server.hpp"

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <cstdlib>
#include <thread>

#include "runtime/sizing.hpp"
#include "serve/service.hpp"

namespace statepack::serve {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kExitInterrupted = 130;
/// Time to send the last words to clients once the engine has stopped.
constexpr std::chrono::seconds kLastWords{2};

class ServerImpl final : public Server {
 public:
  ServerImpl(const ServerOptions& options, ApiKeys keys, std::unique_ptr<Backend> backend,
             std::unique_ptr<HttpServer> http)
      : options_(options),
        backend_(std::move(backend)),
        http_(std::move(http)),
        service_(options_, std::move(keys), *backend_, *http_) {
    http_->on_head = [this](const HttpRequest& head) { return service_.check(head); };
    http_->on_request = [this](const ExchangePtr& exchange) { service_.handle(exchange); };
    http_->on_error = [this](int status, const std::string& message) {
      return service_.error(status, message);
    };
    http_->on_tick = [this] { tick(); };
    if (options_.handle_signals) http_->on_signal = [this] { on_signal(); };
  }

  ~ServerImpl() override {
    if (closer_.joinable()) closer_.join();
    if (loader_.joinable()) loader_.join();
    backend_->close(Clock::now());
  }

  std::uint16_t port() const override { return http_->port(); }
  Backend& backend() override { return *backend_; }
  void stop() override {
    http_->post([this] { begin_stop(); });
  }

  Status load() override {
    const Clock::time_point start = Clock::now();
    SP_RETURN_IF_ERROR(backend_->load());
    const StateSummary& s = backend_->summary();
    spdlog::info(
        "ready after {:.1f} s: state {}, {:.2f} bits a value ({:.2f} resident), {} slots "
        "of {}, {} in all; batches of {}, context {}",
        std::chrono::duration<double>(Clock::now() - start).count(), s.scheme, s.payload_bits,
        s.resident_bits, s.n_slots, format_bytes(s.bytes_per_slot),
        format_bytes(backend_->pool().bytes_allocated()), s.max_seqs, s.max_context);
    return {};
  }

  Status run() override {
    announce();
    Status loaded;
    loader_ = std::thread([this, &loaded] {
      loaded = load();
      if (!loaded.ok()) http_->stop();
    });
    http_->run();
    loader_.join();
    return loaded;
  }

  Status run_unloaded() override {
    http_->run();
    return {};
  }

 private:
  void announce() const {
    spdlog::info("http://{}/ answers; loading {}", http_->address(), options_.backend.model);
    const bool local = options_.host == "localhost" || options_.host == "::1" ||
                       options_.host.rfind("127.", 0) == 0;
    if (!local && options_.api_keys.empty() && options_.api_key_file.empty()) {
      spdlog::warn("{} can be reached from other machines and asks for no key; see --api-key-file",
                   http_->address());
    }
  }

  void on_signal() {
    if (stopping_) std::_Exit(kExitInterrupted);
    begin_stop();
  }

  void begin_stop() {
    if (std::exchange(stopping_, true)) return;
    spdlog::info("stopping: {} requests at work have {} ms", service_.n_generating(),
                 options_.grace.count());
    service_.stop_admitting();
    http_->stop_accepting();
    closer_ = std::thread([this] {
      const bool all = backend_->close(Clock::now() + options_.grace);
      http_->post([this, all] {
        if (!all) spdlog::warn("the grace is over: unfinished requests were cut off");
        end_ = Clock::now() + kLastWords;
      });
    });
  }

  void tick() {
    service_.tick();
    if (end_ != Clock::time_point::max() && (http_->n_answering() == 0 || Clock::now() > end_)) {
      http_->stop();
    }
  }

  ServerOptions options_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<HttpServer> http_;
  Service service_;
  std::thread loader_, closer_;
  bool stopping_ = false;
  Clock::time_point end_ = Clock::time_point::max();  ///< of the last words; max while serving
};

}  // namespace

Result<std::unique_ptr<Server>> Server::create(const ServerOptions& options) {
  SP_ASSIGN_OR_RETURN(ApiKeys keys, ApiKeys::load(options.api_keys, options.api_key_file));
  SP_ASSIGN_OR_RETURN(std::unique_ptr<Backend> backend, Backend::plan(options.backend));
  SP_ASSIGN_OR_RETURN(std::unique_ptr<HttpServer> http,
                      HttpServer::listen(options.host, options.port, options.limits));
  return std::unique_ptr<Server>(
      std::make_unique<ServerImpl>(options, std::move(keys), std::move(backend), std::move(http)));
}

}  // namespace statepack::serve
