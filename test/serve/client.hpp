// A client on a plain socket: it sends exactly the bytes that a test wants, and reads what comes.
#pragma once

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace statepack::serve {

using Json = nlohmann::ordered_json;

struct Reply {
  int status = 0;  ///< 0: the connection ended before an answer
  std::string head;
  std::string body;

  Json json() const { return Json::parse(body, nullptr, false); }
  /// Value of a header, "" when there is none.
  std::string header(std::string_view name) const {
    const std::string key = "\r\n" + std::string(name) + ": ";
    const std::size_t at = head.find(key);
    if (at == std::string::npos) return "";
    return head.substr(at + key.size(), head.find("\r\n", at + 2) - at - key.size());
  }
};

class Client {
 public:
  static constexpr int kWait_ms = 20'000;  ///< for a byte, before a test gives up

  /// `receive_bytes` > 0 bounds the kernel's buffer, for clients that read slowly.
  explicit Client(std::uint16_t port, int receive_bytes = 0)
      : fd_(::socket(AF_INET, SOCK_STREAM, 0)) {
    if (receive_bytes > 0) {
      ::setsockopt(fd_, SOL_SOCKET, SO_RCVBUF, &receive_bytes, sizeof receive_bytes);
    }
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const int rc = ::connect(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof address);
    EXPECT_EQ(rc, 0);
  }
  ~Client() { close(); }
  Client(Client&& other) noexcept
      : fd_(std::exchange(other.fd_, -1)), buffer_(std::move(other.buffer_)) {}
  Client& operator=(Client&&) = delete;

  void close() {
    if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  }

  /// Ends the sending half: what it means to send is sent.
  void end_sending() { ::shutdown(fd_, SHUT_WR); }
  std::uint16_t local_port() const {
    sockaddr_in address{};
    socklen_t n_bytes = sizeof address;
    ::getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &n_bytes);
    return ntohs(address.sin_port);
  }

  void send(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t n = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (n <= 0) return;  // the server has closed: the answer, or its absence, is what is tested
      bytes.remove_prefix(static_cast<std::size_t>(n));
    }
  }

  /// More bytes into the buffer; false at the end of the connection.
  bool read_some() {
    pollfd wait{fd_, POLLIN, 0};
    if (::poll(&wait, 1, kWait_ms) != 1) {
      ADD_FAILURE() << "nothing came for " << kWait_ms << " ms";
      return false;
    }
    char bytes[16384];
    const ssize_t n = ::recv(fd_, bytes, sizeof bytes, 0);
    if (n <= 0) return false;
    buffer_.append(bytes, static_cast<std::size_t>(n));
    return true;
  }

  /// Everything up to and with `mark`; "" when the connection ends before.
  std::string read_until(std::string_view mark) {
    std::size_t at = 0;
    while ((at = buffer_.find(mark)) == std::string::npos) {
      if (!read_some()) return "";
    }
    return take(at + mark.size());
  }

  /// One answer, chunks put together. `has_body` false for the answer to HEAD.
  Reply read_reply(bool has_body = true) {
    Reply reply;
    reply.head = read_until("\r\n\r\n");
    if (reply.head.size() < 12) return reply;
    reply.status = std::stoi(reply.head.substr(9, 3));
    if (!has_body || reply.status == 100 || reply.status == 204) return reply;
    if (reply.header("Transfer-Encoding") == "chunked") {
      for (;;) {
        const std::string size = read_until("\r\n");
        if (size.empty()) return reply;
        const std::size_t n = std::stoul(size, nullptr, 16);
        reply.body += read_bytes(n);
        read_until("\r\n");
        if (n == 0) return reply;
      }
    }
    const std::string length = reply.header("Content-Length");
    if (!length.empty()) {
      reply.body = read_bytes(std::stoul(length));
    } else {
      while (read_some()) {
      }
      reply.body = take(buffer_.size());
    }
    return reply;
  }

  /// True when the server has closed and sent nothing more.
  bool at_end() { return buffer_.empty() && !read_some() && buffer_.empty(); }

 private:
  std::string take(std::size_t n) {
    std::string taken = buffer_.substr(0, n);
    buffer_.erase(0, n);
    return taken;
  }
  std::string read_bytes(std::size_t n) {
    while (buffer_.size() < n && read_some()) {
    }
    return take(std::min(n, buffer_.size()));
  }

  int fd_;
  std::string buffer_;
};

inline std::string get_text(std::string_view path, std::string_view headers = "") {
  return "GET " + std::string(path) + " HTTP/1.1\r\nHost: test\r\n" + std::string(headers) + "\r\n";
}

inline std::string post_text(std::string_view path, std::string_view body,
                             std::string_view headers = "") {
  return "POST " + std::string(path) + " HTTP/1.1\r\nHost: test\r\n" +
         "Content-Type: application/json\r\nContent-Length: " + std::to_string(body.size()) +
         "\r\n" + std::string(headers) + "\r\n" + std::string(body);
}

/// The data of all events of a stream, without its comments; "[DONE]" is the last.
inline std::vector<std::string> events(std::string_view stream) {
  std::vector<std::string> list;
  while (!stream.empty()) {
    const std::size_t end = std::min(stream.find("\n\n"), stream.size());
    const std::string_view event = stream.substr(0, end);
    if (event.substr(0, 6) == "data: ") list.emplace_back(event.substr(6));
    stream.remove_prefix(std::min(end + 2, stream.size()));
  }
  return list;
}

}  // namespace statepack::serve
