// Any bytes as a prefix file: refused, or a record that writes and reads back as it is.
//
// The first byte says whether the checksums are set right first: else nothing behind them would
// ever be reached.
#include <cstring>
#include <vector>

#include "base/check.hpp"
#include "base/hash.hpp"
#include "pool/prefix_file.hpp"

namespace {

using namespace statepack;

constexpr std::size_t kHashBytes = 16;

/// Offsets of the format as src/pool/prefix_file.cc gives it.
void repair_checksums(std::vector<std::byte>& bytes) {
  constexpr std::size_t kHeaderSizeAt = 12, kFixed = 48, kEntry = 32;
  std::uint32_t n_header = 0;
  if (bytes.size() < kFixed) return;
  std::memcpy(&n_header, bytes.data() + kHeaderSizeAt, sizeof n_header);
  if (n_header > bytes.size() || n_header < kFixed + kHashBytes) return;
  const auto put_hash = [&](std::size_t at, std::span<const std::byte> of) {
    const Hash128 hash = xxh3_128(of);
    std::memcpy(bytes.data() + at, hash.data(), hash.size());
  };
  std::size_t section = n_header;
  for (std::size_t at = kFixed; at + kEntry + kHashBytes <= n_header; at += kEntry) {
    std::int64_t n_bytes = 0;
    std::memcpy(&n_bytes, bytes.data() + at + sizeof n_bytes, sizeof n_bytes);
    if (n_bytes < 0 || static_cast<std::uint64_t>(n_bytes) > bytes.size() - section) break;
    const auto n = static_cast<std::size_t>(n_bytes);
    put_hash(at + 2 * sizeof n_bytes, std::span(bytes).subspan(section, n));
    section += n;
  }
  put_hash(n_header - kHashBytes, std::span(bytes).first(n_header - kHashBytes));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t n_bytes) {
  if (n_bytes == 0) return 0;
  const auto rest = std::as_bytes(std::span(data + 1, n_bytes - 1));
  std::vector<std::byte> bytes(rest.begin(), rest.end());
  if (data[0] >= 128) repair_checksums(bytes);
  const PrefixFileLimits limits{.max_tokens = 4096, .row_bytes = 24, .max_bytes = 1 << 20};
  const Result<PrefixRecord> record = read_prefix_file(bytes, limits);
  if (!record.ok()) {
    SP_CHECK(!record.status().message().empty(), "a refusal without a reason");
    return 0;
  }
  // What was read is whole: a cache takes it.
  PrefixCacheConfig config;
  config.mode = PrefixMode::kTurns;
  config.max_bytes = 1 << 22;
  const auto cache = PrefixCache::create(config, limits.row_bytes);
  SP_CHECK(cache.ok(), "the configuration is fine");
  for (const auto& snapshot : record->snapshots) {
    Lineage lineage;
    for (const Lineage::Run& run : record->lineage.runs()) {
      lineage.extend(std::min(run.end, snapshot->n_tokens), run.reader);
    }
    const auto n = static_cast<std::size_t>(snapshot->n_tokens);
    (*cache)->insert(std::span(record->tokens).first(n), lineage, snapshot,
                     [&](std::int64_t begin, std::int64_t end, std::byte* to) {
                       std::memcpy(to, record->rows.data() + begin * limits.row_bytes,
                                   static_cast<std::size_t>((end - begin) * limits.row_bytes));
                     });
  }
  SP_CHECK((*cache)->check().ok(), "the tree is damaged");
  PrefixCache::Hit hit = (*cache)->find(record->tokens, std::ssize(record->tokens));
  SP_CHECK(!hit || hit.record().rows == record->rows, "rows have changed");
  return 0;
}
