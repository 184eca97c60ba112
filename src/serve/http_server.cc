// The event loop on Boost.Beast's parser and Asio's sockets: the only file that includes them, for
// they take longer to compile than the rest of the server together. Callbacks, not coroutines:
// clang 14 does not compile libstdc++'s <coroutine>.
#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/signal_set.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>
#include <ctime>
#include <unordered_set>

#include "serve/http.hpp"

namespace statepack::serve {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using asio::ip::tcp;
using boost::system::error_code;
using Clock = std::chrono::steady_clock;
using TimePoint = Clock::time_point;

constexpr std::chrono::milliseconds kTick{50};
/// A peer that vanished (power, network) says nothing: after so many seconds of silence the kernel
/// asks, as often and in such a distance, and closes 60 s after the last sign of life. What was
/// sent and is not acknowledged has as long.
constexpr int kKeepIdle_s = 30, kKeepInterval_s = 10, kKeepProbes = 3;
constexpr unsigned kUnacknowledged_ms = 60'000;
/// After an answer that leaves part of a request unread: time and bytes granted to the client until
/// it has read the answer, since closing at once would let the kernel throw that away.
constexpr std::chrono::milliseconds kLingerTime{2000};
/// Read ahead of the request at work (a pipelining client): more stays in the kernel.
constexpr std::size_t kReadAhead = std::size_t{64} << 10;

std::string lower(std::string_view text) {
  std::string out(text);
  std::transform(out.begin(), out.end(), out.begin(),
                 [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c; });
  return out;
}

/// 0: there is no limit.
TimePoint after(std::chrono::milliseconds limit) {
  return limit.count() > 0 ? Clock::now() + limit : TimePoint::max();
}

std::string http_date() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  ::gmtime_r(&now, &utc);
  std::array<char, 40> text{};
  const std::size_t n = std::strftime(text.data(), text.size(), "%a, %d %b %Y %H:%M:%S GMT", &utc);
  return {text.data(), n};
}

void keep_alive(int fd) {
  const auto set = [fd](int level, int name, auto value) {
    (void)::setsockopt(fd, level, name, &value, sizeof value);  // without it the rest works still
  };
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, kKeepIdle_s);
  set(IPPROTO_TCP, TCP_KEEPINTVL, kKeepInterval_s);
  set(IPPROTO_TCP, TCP_KEEPCNT, kKeepProbes);
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, kUnacknowledged_ms);
}

class Connection;

class Loop final : public HttpServer {
 public:
  Loop(const HttpLimits& limits) : limits_(limits), acceptor_(io_), timer_(io_), signals_(io_) {}

  Status open(const std::string& host, std::uint16_t port);

  std::string address() const override {
    error_code ec;
    const tcp::endpoint end = acceptor_.local_endpoint(ec);
    const std::string ip = end.address().to_string(ec);
    return end.address().is_v6() ? fmt::format("[{}]:{}", ip, port_)
                                 : fmt::format("{}:{}", ip, port_);
  }
  std::uint16_t port() const override { return port_; }
  void run() override;
  void post(std::function<void()> task) override { asio::post(io_, std::move(task)); }
  void stop_accepting() override;
  void stop() override { io_.stop(); }
  std::int64_t n_connections() const override { return std::ssize(connections_); }
  std::int64_t n_answering() const override { return n_answering_; }

 private:
  friend class Connection;
  void accept();
  void tick();
  void wait_for_signal();
  void remove(const std::shared_ptr<Connection>& connection) { connections_.erase(connection); }

  HttpLimits limits_;
  asio::io_context io_{1};
  tcp::acceptor acceptor_;
  asio::steady_timer timer_;
  asio::signal_set signals_;
  std::uint16_t port_ = 0;
  bool draining_ = false;
  bool accepting_ = false;  ///< an accept is pending
  std::unordered_set<std::shared_ptr<Connection>> connections_;
  std::size_t bodies_bytes_ = 0;  ///< of all requests that are read or answered
  std::int64_t n_answering_ = 0;
  std::string date_;
  std::array<char, kReadAhead> scratch_{};  ///< every read lands here first: idle clients own none
};

/// A client's socket and the request on it. One read waits at all times, also while an answer is
/// computed: that is how a client that leaves is noticed.
class Connection final : public std::enable_shared_from_this<Connection> {
 public:
  Connection(Loop& loop, tcp::socket socket, std::string client)
      : loop_(loop), socket_(std::move(socket)), client_(std::move(client)) {}

  void begin();
  /// Answers 503 and ends: there are too many connections.
  void refuse();
  void on_tick(TimePoint now);
  void drain();
  void close();

 private:
  enum class Phase : std::uint8_t { kIdle, kHead, kBody, kAnswer, kLinger };

  class Answer final : public Exchange {
   public:
    Answer(std::shared_ptr<Connection> connection, HttpRequest request)
        : connection_(std::move(connection)), request_(std::move(request)) {}
    HttpRequest& request() override { return request_; }
    void respond(HttpResponse response) override {
      if (!open()) return;
      connection_->send_head(response, true);
      if (!connection_->head_only_) connection_->out_ += response.body;
      end();
    }
    void start(HttpResponse head) override {
      if (!open()) return;
      connection_->send_head(head, false);
      connection_->flush();
    }
    void write(std::string_view bytes) override {
      last_write_ = Clock::now();
      if (open() && !bytes.empty()) connection_->send_part(bytes);
    }
    void finish() override {
      if (!open()) return;
      if (connection_->chunked_ && !connection_->head_only_) connection_->out_ += "0\r\n\r\n";
      end();
    }
    bool open() const override { return connection_ != nullptr; }
    TimePoint last_write() const override { return last_write_; }
    void on_gone(std::function<void()> gone) override { gone_ = std::move(gone); }

    /// The client has gone.
    void drop() {
      const auto keep = std::exchange(connection_, nullptr);
      if (const auto gone = std::exchange(gone_, nullptr)) gone();
    }

   private:
    void end() {
      const auto connection = std::exchange(connection_, nullptr);
      gone_ = nullptr;
      connection->answered();
    }
    std::shared_ptr<Connection> connection_;  ///< null once closed or complete
    HttpRequest request_;
    std::function<void()> gone_;
    TimePoint last_write_ = Clock::now();
  };

  using Parser = http::request_parser<http::string_body>;

  void next_request();
  void wait_readable();
  void on_readable();
  void parse();
  bool read_head();
  void dispatch(std::optional<HttpResponse> refusal);
  HttpRequest head() const;
  /// An answer to a request that no handler sees; the connection ends with it.
  void reject(const HttpResponse& response);
  void reject(int status, const std::string& message) { reject(loop_.on_error(status, message)); }
  void reject(const error_code& ec);
  void send_head(const HttpResponse& response, bool whole);
  void send_part(std::string_view bytes);
  void answered();
  void flush();
  void write_some();
  void all_sent();
  void count_body(std::size_t n_bytes);
  void set_answering(bool on) {
    if (on != answering_) loop_.n_answering_ += on ? 1 : -1;
    answering_ = on;
  }

  Loop& loop_;
  tcp::socket socket_;
  std::string client_;
  Phase phase_ = Phase::kIdle;
  TimePoint deadline_ = TimePoint::max();  ///< of the phase
  bool closed_ = false;

  std::string in_;  ///< read, not parsed yet
  bool waiting_ = false;
  std::optional<Parser> parser_;
  bool head_read_ = false;
  std::size_t body_counted_ = 0;

  std::shared_ptr<Answer> answer_;
  bool answering_ = false;
  bool complete_ = false;  ///< the answer is, though perhaps not sent
  bool keep_alive_ = false, head_only_ = false, chunked_ = false;
  std::string out_, sending_;
  std::size_t n_sent_ = 0;
  bool writing_ = false;
  bool overflowed_ = false;   ///< the client reads too slowly: it is about to be left
  bool input_ended_ = false;  ///< the client sends no more
  TimePoint write_deadline_ = TimePoint::max();
};

// ---------------------------------------------------------------- loop

Status Loop::open(const std::string& host, std::uint16_t port) {
  error_code ec;
  const auto fail = [&](std::string_view what) {
    return Status(Code::kIo, fmt::format("cannot {} {}:{}: {}; choose another --host or --port",
                                         what, host, port, ec.message()));
  };
  asio::ip::address address = asio::ip::make_address(host, ec);
  if (ec) {
    tcp::resolver resolver(io_);
    const auto found = resolver.resolve(host, std::to_string(port), ec);
    if (ec || found.empty()) return fail("resolve");
    address = found.begin()->endpoint().address();
  }
  const tcp::endpoint end(address, port);
  if (acceptor_.open(end.protocol(), ec)) return fail("open a socket for");
  acceptor_.set_option(tcp::acceptor::reuse_address(true), ec);
  if (acceptor_.bind(end, ec)) return fail("bind to");
  if (acceptor_.listen(4096, ec)) return fail("listen on");
  port_ = acceptor_.local_endpoint(ec).port();
  return {};
}

void Loop::run() {
  date_ = http_date();
  if (on_signal) wait_for_signal();
  accept();
  tick();
  io_.run();
  // Nobody reads signals from here on: the next one ends the process, whatever else is waited for.
  error_code ignored;
  signals_.clear(ignored);
  for (const auto& connection : std::unordered_set(connections_)) connection->close();
}

void Loop::wait_for_signal() {
  error_code ec;
  signals_.add(SIGINT, ec);
  signals_.add(SIGTERM, ec);
  signals_.async_wait([this](const error_code& error, int) {
    if (error) return;
    on_signal();
    wait_for_signal();
  });
}

void Loop::accept() {
  if (accepting_ || !acceptor_.is_open()) return;
  accepting_ = true;
  acceptor_.async_accept([this](const error_code& ec, tcp::socket socket) {
    accepting_ = false;
    // Out of file descriptors, say: the next tick tries again, so that the loop does not spin.
    if (ec) return;
    error_code ignored;
    const tcp::endpoint peer = socket.remote_endpoint(ignored);
    socket.set_option(tcp::no_delay(true), ignored);
    socket.non_blocking(true, ignored);
    keep_alive(socket.native_handle());
    const auto connection = std::make_shared<Connection>(
        *this, std::move(socket),
        fmt::format("{}:{}", peer.address().to_string(ignored), peer.port()));
    connections_.insert(connection);
    if (std::ssize(connections_) > limits_.max_connections) {
      connection->refuse();
    } else {
      connection->begin();
    }
    accept();
  });
}

void Loop::tick() {
  date_ = http_date();
  const TimePoint now = Clock::now();
  for (auto it = connections_.begin(); it != connections_.end();) {
    const std::shared_ptr<Connection> connection = *it++;  // it may remove itself
    connection->on_tick(now);
  }
  if (on_tick) on_tick();
  accept();
  timer_.expires_after(kTick);
  timer_.async_wait([this](const error_code& ec) {
    if (!ec) tick();
  });
}

void Loop::stop_accepting() {
  error_code ec;
  acceptor_.close(ec);
  draining_ = true;
  for (const auto& connection : std::unordered_set(connections_)) connection->drain();
}

// ---------------------------------------------------------------- connection: reading

void Connection::begin() {
  next_request();
  // A client that connects and says nothing is given no more time than one that speaks slowly.
  deadline_ = after(loop_.limits_.header_timeout);
}

void Connection::refuse() {
  HttpResponse response =
      loop_.on_error(503, fmt::format("the server has its {} connections; try again later",
                                      loop_.limits_.max_connections));
  parser_.emplace();
  wait_readable();
  reject(response);
}

void Connection::next_request() {
  parser_.emplace();
  parser_->header_limit(static_cast<std::uint32_t>(loop_.limits_.max_header_bytes));
  parser_->body_limit(loop_.limits_.max_body_bytes);
  head_read_ = head_only_ = complete_ = false;
  phase_ = Phase::kIdle;
  deadline_ = after(loop_.limits_.idle_timeout);
  if (!in_.empty()) parse();
  wait_readable();
}

void Connection::wait_readable() {
  if (waiting_ || closed_) return;
  if (phase_ == Phase::kAnswer && in_.size() >= kReadAhead) return;
  waiting_ = true;
  socket_.async_wait(tcp::socket::wait_read, [self = shared_from_this()](const error_code& ec) {
    self->waiting_ = false;
    if (ec) {
      self->close();
    } else {
      self->on_readable();
    }
  });
}

void Connection::on_readable() {
  if (closed_) return;
  error_code ec;
  const std::size_t n = socket_.read_some(asio::buffer(loop_.scratch_), ec);
  if (ec == asio::error::would_block) return wait_readable();
  if (ec == asio::error::eof && phase_ == Phase::kLinger && writing_) {
    input_ended_ = true;  // it may still read what it is told
    return;
  }
  if (ec) return close();
  if (phase_ != Phase::kLinger) {
    in_.append(loop_.scratch_.data(), n);
    if (phase_ != Phase::kAnswer) parse();
  }
  wait_readable();
}

void Connection::parse() {
  while (!closed_ && phase_ != Phase::kAnswer && phase_ != Phase::kLinger && !in_.empty()) {
    if (phase_ == Phase::kIdle) {
      // Old clients send an empty line behind a body.
      if (in_.compare(0, 2, "\r\n") == 0) {
        in_.erase(0, 2);
        continue;
      }
      phase_ = Phase::kHead;
      deadline_ = after(loop_.limits_.header_timeout);
    }
    error_code ec;
    const std::size_t n = parser_->put(asio::const_buffer(in_.data(), in_.size()), ec);
    in_.erase(0, n);
    if (ec && ec != http::error::need_more) return reject(ec);
    if (parser_->is_header_done()) {
      if (!head_read_ && !read_head()) return;
      count_body(parser_->get().body().size());
      if (loop_.bodies_bytes_ > loop_.limits_.max_bodies_bytes) {
        return reject(503,
                      "the requests at work hold all the memory that is set aside for their "
                      "bodies; try again later");
      }
    }
    if (parser_->is_done()) return dispatch(std::nullopt);
    if (ec || n == 0) {  // more is needed; a head or a chunk's head may not wait for ever
      if (in_.size() > loop_.limits_.max_header_bytes) {
        reject(parser_->is_header_done() ? 400 : 431,
               fmt::format("the {} is longer than {} bytes",
                           parser_->is_header_done() ? "head of a chunk" : "head of the request",
                           loop_.limits_.max_header_bytes));
      }
      return;
    }
  }
}

// What is known once the head is there. False: the request was refused.
bool Connection::read_head() {
  head_read_ = true;
  phase_ = Phase::kBody;
  deadline_ = after(loop_.limits_.body_timeout);
  const auto& message = parser_->get();
  head_only_ = message.method() == http::verb::head;
  keep_alive_ = message.keep_alive() && !loop_.draining_;
  if (message.version() >= 11 && message.count(http::field::host) != 1) {
    reject(400, "an HTTP/1.1 request has one Host header");
    return false;
  }
  if (const auto response = loop_.on_head(head())) {
    if (parser_->is_done()) {
      dispatch(response);  // nothing is left unread: the connection may live on
    } else {
      reject(*response);
    }
    return false;
  }
  const std::string expect = lower(message[http::field::expect]);
  if (expect.empty() || parser_->is_done()) return true;
  if (expect != "100-continue") {
    reject(417, fmt::format("Expect can only be 100-continue here"));
    return false;
  }
  if (in_.empty()) {  // else the body is on its way already
    out_ += "HTTP/1.1 100 Continue\r\n\r\n";
    flush();
  }
  return true;
}

HttpRequest Connection::head() const {
  const auto& message = parser_->get();
  HttpRequest request;
  request.method = head_only_ ? std::string("GET") : std::string(message.method_string());
  const std::string_view target = message.target();
  const std::size_t mark = target.find('?');
  request.path = target.substr(0, mark);
  if (mark != std::string_view::npos) request.query = target.substr(mark + 1);
  for (const auto& field : message) {
    request.headers.emplace_back(lower(field.name_string()), std::string(field.value()));
  }
  request.client = client_;
  return request;
}

void Connection::dispatch(std::optional<HttpResponse> refusal) {
  HttpRequest request = head();
  request.body = std::move(parser_->get().body());
  phase_ = Phase::kAnswer;
  deadline_ = TimePoint::max();
  set_answering(true);
  const auto answer = std::make_shared<Answer>(shared_from_this(), std::move(request));
  answer_ = answer;
  if (refusal.has_value()) {
    answer->respond(*std::move(refusal));
  } else {
    loop_.on_request(answer);
  }
}

void Connection::count_body(std::size_t n_bytes) {
  loop_.bodies_bytes_ += n_bytes - body_counted_;
  body_counted_ = n_bytes;
}

// ---------------------------------------------------------------- connection: writing

void Connection::reject(const error_code& ec) {
  const HttpLimits& limits = loop_.limits_;
  if (ec == http::error::header_limit) {
    reject(431,
           fmt::format("the head of the request is longer than {} bytes", limits.max_header_bytes));
  } else if (ec == http::error::body_limit) {
    reject(413, fmt::format("the body of the request is longer than {} bytes; send less, or start "
                            "the server with a larger --max-body-bytes",
                            limits.max_body_bytes));
  } else if (ec == http::error::bad_version) {
    reject(505, "this server speaks HTTP/1.1");
  } else {
    reject(400, fmt::format("the request is not valid HTTP/1.1 ({})", ec.message()));
  }
}

void Connection::reject(const HttpResponse& response) {
  phase_ = Phase::kLinger;  // what is still to come is read and thrown away
  deadline_ = TimePoint::max();
  keep_alive_ = false;
  in_.clear();
  set_answering(true);
  send_head(response, true);
  if (!head_only_) out_ += response.body;
  answered();
}

void Connection::send_head(const HttpResponse& response, bool whole) {
  const bool is_1_1 = parser_->get().version() >= 11;
  keep_alive_ = keep_alive_ && !loop_.draining_ && (whole || is_1_1);
  chunked_ = !whole && is_1_1;
  const std::string_view reason =
      http::obsolete_reason(http::int_to_status(static_cast<unsigned>(response.status)));
  out_ += fmt::format("HTTP/1.1 {} {}\r\nDate: {}\r\nContent-Type: {}\r\nConnection: {}\r\n",
                      response.status, reason, loop_.date_, response.content_type,
                      keep_alive_ ? "keep-alive" : "close");
  if (whole) out_ += fmt::format("Content-Length: {}\r\n", response.body.size());
  if (chunked_) out_ += "Transfer-Encoding: chunked\r\n";
  for (const auto& [name, value] : response.headers) out_ += fmt::format("{}: {}\r\n", name, value);
  out_ += "\r\n";
}

void Connection::send_part(std::string_view bytes) {
  if (head_only_ || overflowed_) return;
  if (out_.size() + sending_.size() - n_sent_ + bytes.size() > loop_.limits_.max_unsent_bytes) {
    overflowed_ = true;
    // Later, since the caller is in the middle of its own work.
    loop_.post([self = shared_from_this()] { self->close(); });
    return;
  }
  if (chunked_) {
    fmt::format_to(std::back_inserter(out_), "{:x}\r\n{}\r\n", bytes.size(), bytes);
  } else {
    out_ += bytes;
  }
  flush();
}

void Connection::answered() {
  answer_.reset();
  complete_ = true;
  flush();
}

void Connection::flush() {
  if (writing_ || closed_ || out_.empty()) return;
  writing_ = true;
  sending_ = std::exchange(out_, {});
  n_sent_ = 0;
  write_some();
}

void Connection::write_some() {
  write_deadline_ = after(loop_.limits_.write_timeout);
  socket_.async_write_some(asio::buffer(sending_.data() + n_sent_, sending_.size() - n_sent_),
                           [self = shared_from_this()](const error_code& ec, std::size_t n) {
                             Connection& c = *self;
                             if (c.closed_) return;
                             if (ec) return c.close();
                             c.n_sent_ += n;
                             if (c.n_sent_ < c.sending_.size()) return c.write_some();
                             c.writing_ = false;
                             c.write_deadline_ = TimePoint::max();
                             c.sending_ = {};
                             c.n_sent_ = 0;
                             if (!c.out_.empty()) {
                               c.flush();
                             } else if (c.complete_) {
                               c.all_sent();
                             }
                           });
}

void Connection::all_sent() {
  count_body(0);
  set_answering(false);
  // The answer may have promised more before the draining began; a close is then allowed, too.
  if (keep_alive_ && !loop_.draining_) return next_request();
  error_code ec;
  socket_.shutdown(tcp::socket::shutdown_send, ec);
  if (input_ended_) return close();
  phase_ = Phase::kLinger;
  deadline_ = Clock::now() + kLingerTime;
  in_.clear();
  wait_readable();
}

void Connection::on_tick(TimePoint now) {
  if (now > write_deadline_) return close();
  if (now <= deadline_) return;
  switch (phase_) {
    case Phase::kHead:
      return reject(408, fmt::format("the head of the request took longer than {} ms",
                                     loop_.limits_.header_timeout.count()));
    case Phase::kBody:
      return reject(408, fmt::format("the body of the request took longer than {} ms",
                                     loop_.limits_.body_timeout.count()));
    case Phase::kIdle:
    case Phase::kAnswer:
    case Phase::kLinger:
      return close();
  }
}

void Connection::drain() {
  if (phase_ == Phase::kIdle) close();
}

void Connection::close() {
  if (closed_) return;
  closed_ = true;
  const auto self = shared_from_this();
  error_code ec;
  socket_.close(ec);
  count_body(0);
  set_answering(false);
  if (const auto answer = std::exchange(answer_, nullptr)) answer->drop();
  loop_.remove(self);
}

}  // namespace

std::string_view HttpRequest::header(std::string_view name) const {
  for (const auto& [key, value] : headers) {
    if (key == name) return value;
  }
  return {};
}

std::string_view HttpRequest::parameter(std::string_view name) const {
  for (std::string_view rest = query; !rest.empty();) {
    const std::size_t end = std::min(rest.find('&'), rest.size());
    const std::string_view pair = rest.substr(0, end);
    rest.remove_prefix(std::min(end + 1, rest.size()));
    const std::size_t equals = pair.find('=');
    if (equals != std::string_view::npos && pair.substr(0, equals) == name) {
      return pair.substr(equals + 1);
    }
  }
  return {};
}

Result<std::unique_ptr<HttpServer>> HttpServer::listen(const std::string& host, std::uint16_t port,
                                                       const HttpLimits& limits) {
  auto loop = std::make_unique<Loop>(limits);
  SP_RETURN_IF_ERROR(loop->open(host, port));
  return std::unique_ptr<HttpServer>(std::move(loop));
}

}  // namespace statepack::serve
