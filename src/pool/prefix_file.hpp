// A cached prefix as a file: tokens, who read them, attention rows, snapshots.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "pool/prefix_cache.hpp"

namespace statepack {

/// What a reader can take: bounds are compared before anything is allocated.
struct PrefixFileLimits {
  std::int64_t max_tokens = 0;
  std::int64_t row_bytes = 0;  ///< exactly these
  std::int64_t max_bytes = 0;  ///< of everything, unpacked
};

/// Writes through a temporary file, fsync and rename: an interrupted or failed write leaves the old
/// file. Returns the file's bytes. Errors: kIo.
Result<std::int64_t> write_prefix_file(const std::string& path, const PrefixRecord& record);

/// The reverse. Snapshots pass their own checks (read_snapshot_info()) and stand at growing numbers
/// of tokens, the last at all of them; whether they fit a pool, and tokens a vocabulary, is the
/// caller's question. Errors: kCorrupt (what), kUnsupported (a later version), kMismatch (rows of
/// another model), kExhausted (larger than `limits`: both numbers).
Result<PrefixRecord> read_prefix_file(std::span<const std::byte> file,
                                      const PrefixFileLimits& limits);

}  // namespace statepack
