#include "base/file.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <system_error>
#include <utility>

namespace statepack {
namespace {

Status system_error(int error, const std::string& path, const char* action) {
  const bool missing = error == ENOENT || error == ENOTDIR;
  return {missing ? Code::kNotFound : Code::kIo,
          "'" + path + "' cannot be " + action + ": " + std::generic_category().message(error)};
}

int open_retrying(const char* path, int flags, mode_t mode = 0) {
  int fd;
  do {
    fd = ::open(path, flags | O_CLOEXEC, mode);
  } while (fd < 0 && errno == EINTR);
  return fd;
}

/// Closes on every way out.
struct Descriptor {
  int fd;
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
};

std::string folder_of(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

}  // namespace

Result<std::shared_ptr<const MappedFile>> MappedFile::open(const std::string& path) {
  // O_NONBLOCK: opening a pipe that nobody writes to must not hang; regular files ignore it.
  const Descriptor file{open_retrying(path.c_str(), O_RDONLY | O_NONBLOCK)};
  if (file.fd < 0) return system_error(errno, path, "opened");
  struct stat info {};
  if (::fstat(file.fd, &info) != 0) return system_error(errno, path, "read");
  if (!S_ISREG(info.st_mode)) {
    return Status(Code::kIo, "'" + path + "' is not a regular file; give the path of a file");
  }
  std::shared_ptr<MappedFile> mapped(new MappedFile);
  mapped->path_ = path;
  if (info.st_size > 0) {
    const auto n_bytes = static_cast<std::size_t>(info.st_size);
    void* data = ::mmap(nullptr, n_bytes, PROT_READ, MAP_PRIVATE, file.fd, 0);
    if (data == MAP_FAILED) return system_error(errno, path, "mapped");
    mapped->data_ = static_cast<const std::byte*>(data);
    mapped->n_bytes_ = n_bytes;
  }
  return std::shared_ptr<const MappedFile>(std::move(mapped));
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), n_bytes_);
}

Result<std::string> read_text_file(const std::string& path, std::size_t max_bytes) {
  const Descriptor file{open_retrying(path.c_str(), O_RDONLY)};
  if (file.fd < 0) return system_error(errno, path, "opened");
  // No trust in the size that the system reports: pipes have none, and files grow.
  std::string text;
  for (;;) {
    constexpr std::size_t kBlock = std::size_t{1} << 16;
    const std::size_t n_old = text.size();
    text.resize(n_old + kBlock);
    const ssize_t n_read = ::read(file.fd, text.data() + n_old, kBlock);
    if (n_read < 0 && errno != EINTR) return system_error(errno, path, "read");
    text.resize(n_old + static_cast<std::size_t>(std::max<ssize_t>(n_read, 0)));
    if (text.size() > max_bytes) {
      return Status(Code::kCorrupt, "'" + path + "' is larger than " + std::to_string(max_bytes) +
                                        " bytes, the most that is read from such a file");
    }
    if (n_read == 0) return text;
  }
}

Result<AtomicFile> AtomicFile::create(const std::string& path) {
  AtomicFile file;
  file.path_ = path;
  struct stat info {};
  if (::stat(path.c_str(), &info) == 0) {
    // A rename would replace the folder, device or link itself: refuse the first two and follow the
    // third.
    if (!S_ISREG(info.st_mode)) {
      return Status(Code::kIo,
                    "'" + path + "' exists and is not a regular file; choose another name");
    }
    char* resolved = ::realpath(path.c_str(), nullptr);
    if (resolved == nullptr) return system_error(errno, path, "written");
    file.path_ = resolved;
    std::free(resolved);
  }
  // O_EXCL with a counter and not mkstemp: the file gets the permissions of the user's umask.
  static std::atomic<unsigned> counter{0};
  do {
    file.temporary_path_ =
        file.path_ + ".tmp-" + std::to_string(::getpid()) + "-" + std::to_string(counter++);
    file.fd_ = open_retrying(file.temporary_path_.c_str(), O_WRONLY | O_CREAT | O_EXCL, 0666);
  } while (file.fd_ < 0 && errno == EEXIST);
  if (file.fd_ < 0) {
    const int error = errno;
    file.temporary_path_.clear();
    return system_error(error, path, "written");
  }
  return file;
}

AtomicFile::~AtomicFile() {
  if (fd_ < 0) return;
  ::close(fd_);
  ::unlink(temporary_path_.c_str());
}

AtomicFile::AtomicFile(AtomicFile&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)),
      path_(std::move(other.path_)),
      temporary_path_(std::move(other.temporary_path_)) {}

AtomicFile& AtomicFile::operator=(AtomicFile&& other) noexcept {
  std::swap(fd_, other.fd_);  // the other's destructor removes what we had
  std::swap(path_, other.path_);
  std::swap(temporary_path_, other.temporary_path_);
  return *this;
}

Status AtomicFile::write(std::span<const std::byte> bytes) {
  if (fd_ < 0) return {Code::kIo, "'" + path_ + "' was already finished; create it anew"};
  while (!bytes.empty()) {
    const ssize_t n_written = ::write(fd_, bytes.data(), bytes.size());
    if (n_written < 0) {
      if (errno == EINTR) continue;
      return system_error(errno, path_, "written");
    }
    bytes = bytes.subspan(static_cast<std::size_t>(n_written));
  }
  return {};
}

Status AtomicFile::write(std::string_view text) {
  return write(std::as_bytes(std::span(text.data(), text.size())));
}

Status AtomicFile::commit() {
  if (fd_ < 0) return {Code::kIo, "'" + path_ + "' was already finished; create it anew"};
  const int fd = std::exchange(fd_, -1);
  const bool synced = ::fsync(fd) == 0;
  int error = synced ? 0 : errno;
  // Some file systems report a full disk only on close.
  if (::close(fd) != 0 && error == 0) error = errno;
  if (error == 0 && ::rename(temporary_path_.c_str(), path_.c_str()) != 0) error = errno;
  if (error != 0) {
    ::unlink(temporary_path_.c_str());
    return system_error(error, path_, "written");
  }
  // The file is in place; a folder that cannot be synchronised (some network mounts) only loses
  // durability against power failure.
  const Descriptor folder{open_retrying(folder_of(path_).c_str(), O_RDONLY | O_DIRECTORY)};
  if (folder.fd >= 0) ::fsync(folder.fd);
  return {};
}

}  // namespace statepack
