// HTTP/1.1 as the server needs it: bounded, one thread, and a client that leaves is noticed at
// once.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "statepack/status.hpp"

namespace statepack::serve {

using Headers = std::vector<std::pair<std::string, std::string>>;

struct HttpRequest {
  std::string method;  ///< "GET"; a HEAD request reads as GET and is answered without a body
  std::string path;    ///< the target up to '?', as sent
  std::string query;   ///< what follows '?'
  Headers headers;     ///< names in lower case
  std::string body;
  std::string client;  ///< "127.0.0.1:40312"

  /// Value of the first header of that (lower-case) name; "" when there is none.
  std::string_view header(std::string_view name) const;
  /// Value of a `name=value` pair of the query, as sent; "" when there is none.
  std::string_view parameter(std::string_view name) const;
};

struct HttpResponse {
  int status = 200;
  std::string content_type = "application/json";
  std::string body;
  Headers headers = {};  ///< beyond Content-Type, Content-Length, Connection and Date
};

struct HttpLimits {
  std::int64_t max_connections = 4096;                    ///< more get 503 with Retry-After
  std::size_t max_header_bytes = std::size_t{16} << 10;   ///< of a request's head; 431
  std::size_t max_body_bytes = std::size_t{8} << 20;      ///< of one request; 413
  std::size_t max_bodies_bytes = std::size_t{256} << 20;  ///< of all requests at a time; 503
  /// Of a stream, waiting for a client to read them: more, and the client counts as gone.
  std::size_t max_unsent_bytes = std::size_t{1} << 20;
  /// Of all four: 0 is no limit.
  std::chrono::milliseconds header_timeout{10'000};  ///< from the first byte to the head's end
  std::chrono::milliseconds body_timeout{60'000};    ///< from there to the body's end
  std::chrono::milliseconds idle_timeout{60'000};    ///< without a request on an open connection
  std::chrono::milliseconds write_timeout{20'000};   ///< without a byte taken by the client
};

/// One request and its answer: respond(), or start() and any write()s and finish(). All of it on
/// the loop's thread. Once the client has gone every call does nothing.
class Exchange {
 public:
  virtual ~Exchange() = default;
  virtual HttpRequest& request() = 0;
  virtual void respond(HttpResponse response) = 0;
  /// Begins an answer of unknown length (`body` is not looked at).
  virtual void start(HttpResponse head) = 0;
  virtual void write(std::string_view bytes) = 0;
  virtual void finish() = 0;
  /// False once the answer is complete or the client has gone.
  virtual bool open() const = 0;
  /// When something was last written; the start of the exchange at first.
  virtual std::chrono::steady_clock::time_point last_write() const = 0;
  /// `gone` is called once if the client leaves, or stops reading, before the answer is complete.
  virtual void on_gone(std::function<void()> gone) = 0;
};
using ExchangePtr = std::shared_ptr<Exchange>;

/// The event loop: it owns the sockets and runs every callback on the thread that calls run().
class HttpServer {
 public:
  /// Binds and listens; connections are accepted once run() is called. Port 0 takes a free one.
  /// Errors: kIo naming the address.
  static Result<std::unique_ptr<HttpServer>> listen(const std::string& host, std::uint16_t port,
                                                    const HttpLimits& limits);
  virtual ~HttpServer() = default;

  virtual std::string address() const = 0;  ///< "127.0.0.1:8080"
  virtual std::uint16_t port() const = 0;

  /// Looks at a head before its body is read; a response here refuses the request.
  std::function<std::optional<HttpResponse>(const HttpRequest&)> on_head;
  std::function<void(const ExchangePtr&)> on_request;
  /// Makes the body of an error that is found below the handlers (bad HTTP, too large, too many).
  std::function<HttpResponse(int status, const std::string& message)> on_error;
  std::function<void()> on_tick;    ///< every 50 ms or so
  std::function<void()> on_signal;  ///< SIGINT or SIGTERM; unset leaves both to their old handlers

  /// Serves until stop().
  virtual void run() = 0;
  /// Runs `task` on the loop's thread; from any thread.
  virtual void post(std::function<void()> task) = 0;
  /// No new connection, none kept alive after its answer.
  virtual void stop_accepting() = 0;
  /// Ends run() at once; what is still unsent is lost. From any thread.
  virtual void stop() = 0;

  virtual std::int64_t n_connections() const = 0;
  /// Requests whose answers are not complete, or not taken by the client yet.
  virtual std::int64_t n_answering() const = 0;
};

}  // namespace statepack::serve
