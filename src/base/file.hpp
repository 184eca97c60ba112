// Files from outside are mapped and checked; files of ours appear whole or not at all.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "statepack/status.hpp"

namespace statepack {

/// A read-only mapping of a whole regular file.
class MappedFile {
 public:
  /// Errors: kNotFound, kIo (a directory or device, no permission), each naming the path.
  static Result<std::shared_ptr<const MappedFile>> open(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return {data_, n_bytes_}; }
  const std::string& path() const { return path_; }

 private:
  MappedFile() = default;
  const std::byte* data_ = nullptr;
  std::size_t n_bytes_ = 0;
  std::string path_;
};

/// Reads a text file of at most `max_bytes`. Errors: kNotFound, kIo, kCorrupt when larger.
Result<std::string> read_text_file(const std::string& path, std::size_t max_bytes);

/// Writes a file through a temporary one in the same folder, fsync and rename, so that a reader
/// sees the old file or the new one and never a half. The destructor of an unfinished writer
/// removes the temporary file.
class AtomicFile {
 public:
  static Result<AtomicFile> create(const std::string& path);
  ~AtomicFile();
  AtomicFile(AtomicFile&& other) noexcept;
  AtomicFile& operator=(AtomicFile&& other) noexcept;

  Status write(std::span<const std::byte> bytes);
  Status write(std::string_view text);
  /// fsync, rename over the target, fsync of the folder.
  Status commit();

 private:
  AtomicFile() = default;
  int fd_ = -1;
  std::string path_;
  std::string temporary_path_;
};

}  // namespace statepack
