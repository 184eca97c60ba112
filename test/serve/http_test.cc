#include "serve/http.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <netinet/tcp.h>

#include <atomic>
#include <thread>

#include "client.hpp"

namespace statepack::serve {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// An event loop whose handlers tell what they were asked.
struct Rig {
  std::unique_ptr<HttpServer> http;
  std::thread thread;
  std::atomic<int> n_gone{0}, n_requests{0}, n_held{0};
  std::vector<ExchangePtr> held;  // on the loop's thread

  explicit Rig(const HttpLimits& limits = {}) {
    http = HttpServer::listen("127.0.0.1", 0, limits).value();
    http->on_head = [](const HttpRequest& head) -> std::optional<HttpResponse> {
      if (head.path == "/refused") return HttpResponse{401, "text/plain", "no", {}};
      return std::nullopt;
    };
    http->on_error = [](int status, const std::string& message) {
      return HttpResponse{status, "text/plain", message, {{"Retry-After", "1"}}};
    };
    http->on_request = [this](const ExchangePtr& exchange) { handle(exchange); };
    thread = std::thread([this] { http->run(); });
  }
  ~Rig() {
    http->stop();
    thread.join();
    held.clear();
  }

  void handle(const ExchangePtr& exchange) {
    ++n_requests;
    HttpRequest& request = exchange->request();
    exchange->on_gone([this] { ++n_gone; });
    if (request.path == "/held") {
      held.push_back(exchange);
      ++n_held;
      return;
    }
    if (request.path == "/stream") {
      exchange->start({200, "text/plain", "", {}});
      exchange->write("one ");
      exchange->write("two");
      exchange->finish();
      return;
    }
    if (request.path == "/flood") {
      exchange->start({200, "text/plain", "", {}});
      flood(exchange);
      return;
    }
    exchange->respond(
        {200,
         "text/plain",
         request.method + ' ' + request.path + '?' + request.query + ' ' + request.body,
         {}});
  }

  // Writes on and on, a piece a turn of the loop.
  void flood(const ExchangePtr& exchange) {
    exchange->write(std::string(65536, 'x'));
    if (exchange->open()) http->post([this, exchange] { flood(exchange); });
  }

  void release() {
    http->post([this] {
      for (const ExchangePtr& exchange : held) exchange->respond({200, "text/plain", "late", {}});
      held.clear();
    });
  }

  Reply ask(std::string_view text) {
    Client client(http->port());
    client.send(text);
    return client.read_reply();
  }
  template <class Condition>
  bool wait_for(Condition condition) {
    for (int i = 0; i < 2000; ++i) {
      if (condition()) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return false;
  }
  std::int64_t n_connections() {
    std::atomic<std::int64_t> n{-1};
    http->post([&] { n = http->n_connections(); });
    wait_for([&] { return n >= 0; });
    return n;
  }
};

TEST(Http, AnswersOnOneConnectionOneAfterTheOther) {
  Rig rig;
  Client client(rig.http->port());
  client.send(get_text("/a?x=1&y=2"));
  Reply reply = client.read_reply();
  EXPECT_EQ(reply.status, 200);
  EXPECT_EQ(reply.body, "GET /a?x=1&y=2 ");
  EXPECT_EQ(reply.header("Connection"), "keep-alive");
  EXPECT_EQ(reply.header("Content-Type"), "text/plain");
  EXPECT_NE(reply.header("Date"), "");
  client.send(post_text("/b", "body"));
  EXPECT_EQ(client.read_reply().body, "POST /b? body");
}

TEST(Http, AnswersPipelinedRequestsInOrder) {
  Rig rig;
  Client client(rig.http->port());
  std::string all;
  for (int i = 0; i < 100; ++i) all += post_text("/" + std::to_string(i), std::to_string(i));
  client.send(all);
  for (int i = 0; i < 100; ++i) {
    const std::string n = std::to_string(i);
    ASSERT_EQ(client.read_reply().body, "POST /" + n + "? " + n);
  }
}

TEST(Http, TakesARequestInPiecesOfAnySize) {
  Rig rig;
  const std::string text = post_text("/pieces", "0123456789");
  Client client(rig.http->port());
  for (const char c : text) {
    client.send({&c, 1});
    if (c == '\n') std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_EQ(client.read_reply().body, "POST /pieces? 0123456789");
}

TEST(Http, TakesChunkedBodies) {
  Rig rig;
  const Reply reply = rig.ask(
      "POST /c HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
      "3\r\nabc\r\n4;ext=1\r\ndefg\r\n0\r\nTrailer: t\r\n\r\n");
  EXPECT_EQ(reply.status, 200);
  EXPECT_EQ(reply.body, "POST /c? abcdefg");
}

TEST(Http, InvitesABodyThatWaitsToBeAskedFor) {
  Rig rig;
  Client client(rig.http->port());
  client.send("POST /e HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n");
  const Reply invitation = client.read_reply();
  EXPECT_EQ(invitation.head, "HTTP/1.1 100 Continue\r\n\r\n");
  client.send("ok");
  EXPECT_EQ(client.read_reply().body, "POST /e? ok");

  const Reply other =
      rig.ask("POST /e HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: coffee\r\n\r\n");
  EXPECT_EQ(other.status, 417);
}

TEST(Http, RefusesFromTheHeadAloneWithoutReadingTheBody) {
  Rig rig;
  Client client(rig.http->port());
  client.send("POST /refused HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n");
  const Reply reply = client.read_reply();
  EXPECT_EQ(reply.status, 401);
  EXPECT_EQ(reply.header("Connection"), "close");
  EXPECT_EQ(rig.n_requests, 0);
  client.close();
  // Without a body the connection lives on.
  Client second(rig.http->port());
  second.send(get_text("/refused"));
  EXPECT_EQ(second.read_reply().header("Connection"), "keep-alive");
  second.send(get_text("/again"));
  EXPECT_EQ(second.read_reply().status, 200);
}

TEST(Http, AnswersHeadWithoutABody) {
  Rig rig;
  Client client(rig.http->port());
  client.send("HEAD /h HTTP/1.1\r\nHost: x\r\n\r\n");
  const Reply reply = client.read_reply(false);
  EXPECT_EQ(reply.status, 200);
  EXPECT_EQ(reply.header("Content-Length"), "8");  // of "GET /h? "
  client.send(get_text("/next"));
  EXPECT_EQ(client.read_reply().body, "GET /next? ");
}

TEST(Http, StreamsInChunksAndToOldClientsUntilTheEnd) {
  Rig rig;
  Client client(rig.http->port());
  client.send(get_text("/stream"));
  Reply reply = client.read_reply();
  EXPECT_EQ(reply.header("Transfer-Encoding"), "chunked");
  EXPECT_EQ(reply.body, "one two");
  client.send(get_text("/after"));
  EXPECT_EQ(client.read_reply().status, 200);

  Client old(rig.http->port());
  old.send("GET /stream HTTP/1.0\r\n\r\n");
  reply = old.read_reply();
  EXPECT_EQ(reply.header("Transfer-Encoding"), "");
  EXPECT_EQ(reply.header("Connection"), "close");
  EXPECT_EQ(reply.body, "one two");
}

TEST(Http, SaysWhatIsWrongWithARequest) {
  HttpLimits limits;
  limits.max_header_bytes = 1024;
  limits.max_body_bytes = 100;
  Rig rig(limits);
  const auto status = [&](std::string_view text) { return rig.ask(text).status; };
  EXPECT_EQ(status("nonsense\r\n\r\n"), 400);
  EXPECT_EQ(status("GET /\r\n\r\n"), 400);
  EXPECT_EQ(status("GET / HTTP/2.0\r\n\r\n"), 505);
  EXPECT_EQ(status("GET / HTTP/1.1\r\n\r\n"), 400);  // no Host
  EXPECT_EQ(status("GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"), 400);
  EXPECT_EQ(status("GET / HTTP/1.1\r\nHost: a\r\nbad field\r\n\r\n"), 400);
  EXPECT_EQ(status("GET /\x01 HTTP/1.1\r\nHost: a\r\n\r\n"), 400);
  EXPECT_EQ(status("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n"), 400);
  EXPECT_EQ(status("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n"),
            400);
  // Both lengths at once: the seam at which requests are smuggled past a proxy.
  EXPECT_EQ(status("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n"
                   "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
            400);
  EXPECT_EQ(status("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"), 400);
  EXPECT_EQ(status("GET /" + std::string(2000, 'a') + " HTTP/1.1\r\nHost: a\r\n\r\n"), 431);
  EXPECT_EQ(status("GET / HTTP/1.1\r\nHost: a\r\nX: " + std::string(2000, 'a') + "\r\n\r\n"), 431);
  EXPECT_EQ(status("GET / HTTP/1.1\r\nHost: a\r\nX: " + std::string(2000, 'a')), 431);  // no end
  EXPECT_EQ(status(post_text("/", std::string(100, 'b'))), 200);
  const Reply large = rig.ask(post_text("/", std::string(101, 'b')));
  EXPECT_EQ(large.status, 413);
  EXPECT_THAT(large.body, HasSubstr("longer than 100 bytes"));
  EXPECT_EQ(status("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n65\r\n" +
                   std::string(101, 'b') + "\r\n0\r\n\r\n"),
            413);
  // A chunk's head that never ends.
  EXPECT_EQ(status("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1;" +
                   std::string(100'000, 'e')),
            400);
}

TEST(Http, EndsRequestsThatDoNotArrive) {
  HttpLimits limits;
  limits.header_timeout = std::chrono::milliseconds(500);
  limits.body_timeout = std::chrono::milliseconds(500);
  limits.idle_timeout = std::chrono::milliseconds(500);
  Rig rig(limits);
  Client silent(rig.http->port());
  Client half(rig.http->port());
  half.send("GET / HTTP/1.1\r\nHo");
  Client bodyless(rig.http->port());
  bodyless.send("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\nabc");
  Client idle(rig.http->port());
  idle.send(get_text("/"));
  EXPECT_EQ(idle.read_reply().status, 200);

  EXPECT_TRUE(silent.at_end());
  Reply reply = half.read_reply();
  EXPECT_EQ(reply.status, 408);
  EXPECT_THAT(reply.body, HasSubstr("head of the request took longer than 500 ms"));
  reply = bodyless.read_reply();
  EXPECT_EQ(reply.status, 408);
  EXPECT_THAT(reply.body, HasSubstr("body of the request took longer than 500 ms"));
  EXPECT_TRUE(idle.at_end());
}

TEST(Http, TakesZeroForNoLimit) {
  HttpLimits limits;
  limits.header_timeout = limits.body_timeout = limits.idle_timeout = limits.write_timeout =
      std::chrono::milliseconds(0);
  Rig rig(limits);
  Client client(rig.http->port());
  const auto pause = [] { std::this_thread::sleep_for(std::chrono::milliseconds(120)); };
  pause();  // more than two ticks: each would end a connection whose time is over
  client.send("POST /z HTTP/1.1\r\nHo");
  pause();
  client.send("st: a\r\nContent-Length: 4\r\n\r\nbo");
  pause();
  client.send("dy");
  EXPECT_EQ(client.read_reply().body, "POST /z? body");
  pause();
  client.send(get_text("/again"));
  EXPECT_EQ(client.read_reply().body, "GET /again? ");
}

// The server's end of a client's connection: both are in this process.
int server_end(const Client& client) {
  for (int fd = 3; fd < 1024; ++fd) {
    sockaddr_in peer{};
    socklen_t n_bytes = sizeof peer;
    if (::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &n_bytes) != 0) continue;
    if (peer.sin_family == AF_INET && ntohs(peer.sin_port) == client.local_port()) return fd;
  }
  return -1;
}

TEST(Http, AsksSilentPeersWhetherTheyLive) {
  Rig rig;
  Client client(rig.http->port());
  client.send(get_text("/"));
  ASSERT_EQ(client.read_reply().status, 200);
  const int fd = server_end(client);
  ASSERT_GE(fd, 0);
  const auto option = [&](int level, int name) {
    int value = -1;
    socklen_t n_bytes = sizeof value;
    EXPECT_EQ(::getsockopt(fd, level, name, &value, &n_bytes), 0);
    return value;
  };
  EXPECT_EQ(option(SOL_SOCKET, SO_KEEPALIVE), 1);
  EXPECT_EQ(option(IPPROTO_TCP, TCP_KEEPIDLE), 30);
  EXPECT_EQ(option(IPPROTO_TCP, TCP_KEEPINTVL), 10);
  EXPECT_EQ(option(IPPROTO_TCP, TCP_KEEPCNT), 3);
  EXPECT_EQ(option(IPPROTO_TCP, TCP_USER_TIMEOUT), 60'000);
}

TEST(Http, NoticesAClientThatLeavesWhileItWaits) {
  Rig rig;
  Client stays(rig.http->port());
  stays.send(get_text("/held"));
  {
    Client leaves(rig.http->port());
    leaves.send(get_text("/held"));
    ASSERT_TRUE(rig.wait_for([&] { return rig.n_held == 2; }));
    EXPECT_EQ(rig.n_gone, 0);
  }
  EXPECT_TRUE(rig.wait_for([&] { return rig.n_gone == 1; }));
  rig.release();
  EXPECT_EQ(stays.read_reply().body, "late");
}

TEST(Http, LeavesAClientThatDoesNotReadAndServesTheOthers) {
  HttpLimits limits;
  limits.max_unsent_bytes = std::size_t{1} << 20;
  Rig rig(limits);
  Client slow(rig.http->port(), 4096);
  slow.send(get_text("/flood"));
  EXPECT_EQ(rig.ask(get_text("/quick")).body, "GET /quick? ");
  EXPECT_TRUE(rig.wait_for([&] { return rig.n_gone == 1; }));
}

TEST(Http, LeavesAClientThatTakesNoByteInTime) {
  HttpLimits limits;
  limits.write_timeout = std::chrono::milliseconds(200);
  limits.max_unsent_bytes = std::size_t{1} << 30;
  Rig rig(limits);
  Client slow(rig.http->port(), 4096);
  slow.send(get_text("/held"));
  ASSERT_TRUE(rig.wait_for([&] { return rig.n_held == 1; }));
  rig.http->post([&] {
    rig.held[0]->start({200, "text/plain", "", {}});
    rig.held[0]->write(std::string(std::size_t{32} << 20, 'x'));
  });
  EXPECT_TRUE(rig.wait_for([&] { return rig.n_gone == 1; }));
}

TEST(Http, TurnsConnectionsAwayAboveTheLimit) {
  HttpLimits limits;
  limits.max_connections = 3;
  Rig rig(limits);
  std::vector<Client> clients;
  for (int i = 0; i < 3; ++i) {
    clients.emplace_back(rig.http->port());
    clients.back().send(get_text("/"));
    EXPECT_EQ(clients.back().read_reply().status, 200);
  }
  const Reply reply = rig.ask(get_text("/"));
  EXPECT_EQ(reply.status, 503);
  EXPECT_EQ(reply.header("Retry-After"), "1");
  EXPECT_THAT(reply.body, HasSubstr("its 3 connections"));
  clients.pop_back();
  EXPECT_TRUE(rig.wait_for([&] { return rig.n_connections() == 2; }));
  EXPECT_EQ(rig.ask(get_text("/")).status, 200);
}

TEST(Http, BoundsTheBodiesOfAllRequestsTogether) {
  HttpLimits limits;
  limits.max_bodies_bytes = 1000;
  Rig rig(limits);
  Client first(rig.http->port());
  first.send(post_text("/held", std::string(900, 'a')));
  ASSERT_TRUE(rig.wait_for([&] { return rig.n_held == 1; }));
  EXPECT_EQ(rig.ask(post_text("/", std::string(200, 'b'))).status, 503);
  rig.release();
  EXPECT_EQ(first.read_reply().status, 200);
  EXPECT_EQ(rig.ask(post_text("/", std::string(200, 'b'))).status, 200);
}

TEST(Http, FinishesAnswersAfterItStopsAccepting) {
  Rig rig;
  Client busy(rig.http->port());
  busy.send(get_text("/held"));
  Client idle(rig.http->port());
  idle.send(get_text("/"));
  EXPECT_EQ(idle.read_reply().status, 200);
  ASSERT_TRUE(rig.wait_for([&] { return rig.n_held == 1; }));
  rig.http->post([&] { rig.http->stop_accepting(); });
  EXPECT_TRUE(idle.at_end());
  rig.release();
  const Reply reply = busy.read_reply();
  EXPECT_EQ(reply.body, "late");
  EXPECT_EQ(reply.header("Connection"), "close");
  EXPECT_TRUE(busy.at_end());
}

TEST(Http, NamesTheAddressThatCannotBeBound) {
  Rig rig;
  const auto second = HttpServer::listen("127.0.0.1", rig.http->port(), {});
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.status().code(), Code::kIo);
  EXPECT_THAT(second.status().message(),
              HasSubstr("127.0.0.1:" + std::to_string(rig.http->port())));
}

}  // namespace
}  // namespace statepack::serve
