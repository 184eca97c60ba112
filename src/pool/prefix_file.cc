// The format, version 1. All numbers little-endian.
//
//   magic         8 bytes "SPPREF\r\n" (a text-mode transfer breaks it)
//   version       u32
//   n_header      u32   bytes from the magic to the header's checksum, that included
//   n_tokens      i64
//   block_tokens  i64
//   row_bytes     i64
//   n_snapshots   i64
//   sections      3 + n_snapshots times: i64 bytes unpacked, i64 bytes in the file, XXH3-128 of
//                 those in the file; tokens, lineage, attention rows, each snapshot
//   checksum      XXH3-128 of the header before it
//
// The sections follow the header in that order, each one zstd frame. Tokens are i32; the lineage is
// a list of i64 end, u64 reader; a snapshot has a header with fingerprints of its own.
#include "pool/prefix_file.hpp"

#include <zstd.h>

#include <algorithm>
#include <cstring>

#include "base/file.hpp"
#include "base/hash.hpp"
#include "pool/byte_io.hpp"

namespace statepack {
namespace {

constexpr std::string_view kMagic = "SPPREF\r\n";
constexpr std::uint32_t kVersion = 1;
constexpr std::size_t kFixedBytes = 48;
constexpr std::size_t kTableEntry = 2 * sizeof(std::int64_t) + sizeof(Hash128);
constexpr std::size_t kHashBytes = sizeof(Hash128);
constexpr std::int64_t kMaxSnapshots = std::int64_t{1} << 20;
constexpr std::int64_t kRunBytes = sizeof(std::int64_t) + sizeof(std::uint64_t);
// Packed states and f32 rows hardly shrink further: a higher level would only take time.
constexpr int kLevel = 1;
enum Section : std::size_t { kTokens, kLineage, kRows, kFirstSnapshot };

Status corrupt(const std::string& what) {
  return {Code::kCorrupt, "the prefix file " + what + "; save it again"};
}

std::string section_name(std::size_t i) {
  switch (i) {
    case kTokens:
      return "tokens";
    case kLineage:
      return "lineage";
    case kRows:
      return "attention rows";
    default:
      return "snapshot " + std::to_string(i - kFirstSnapshot);
  }
}

std::vector<std::byte> compress(std::span<const std::byte> raw) {
  std::vector<std::byte> packed(ZSTD_compressBound(raw.size()));
  // Cannot fail: the buffer has the size that the library asks for.
  packed.resize(ZSTD_compress(packed.data(), packed.size(), raw.data(), raw.size(), kLevel));
  packed.shrink_to_fit();
  return packed;
}

struct Table {
  std::int64_t n_raw = 0;
  std::span<const std::byte> packed;
};

Result<std::vector<std::byte>> unpack(const Table& section, std::size_t index) {
  std::vector<std::byte> raw(static_cast<std::size_t>(section.n_raw));
  const std::size_t n =
      ZSTD_decompress(raw.data(), raw.size(), section.packed.data(), section.packed.size());
  if (ZSTD_isError(n) != 0 || n != raw.size()) {
    return corrupt("has a section '" + section_name(index) + "' that does not unpack to its " +
                   std::to_string(raw.size()) + " bytes");
  }
  return raw;
}

}  // namespace

Result<std::int64_t> write_prefix_file(const std::string& path, const PrefixRecord& record) {
  ByteWriter runs;
  for (const Lineage::Run& run : record.lineage.runs()) {
    runs.number(run.end);
    runs.number(run.reader);
  }
  std::vector<std::vector<std::byte>> packed;
  std::vector<std::size_t> n_raw;
  const auto add = [&](std::span<const std::byte> raw) {
    n_raw.push_back(raw.size());
    packed.push_back(compress(raw));
  };
  add(std::as_bytes(std::span(record.tokens)));
  add(runs.bytes());
  add(record.rows);
  for (const auto& snapshot : record.snapshots) add(snapshot->bytes);

  ByteWriter header;
  header.raw(std::as_bytes(std::span(kMagic.data(), kMagic.size())));
  header.number(kVersion);
  header.number(static_cast<std::uint32_t>(kFixedBytes + packed.size() * kTableEntry + kHashBytes));
  header.number(std::int64_t{std::ssize(record.tokens)});
  header.number(record.block_tokens);
  header.number(record.row_bytes);
  header.number(std::int64_t{std::ssize(record.snapshots)});
  for (std::size_t i = 0; i < packed.size(); ++i) {
    header.number(static_cast<std::int64_t>(n_raw[i]));
    header.number(static_cast<std::int64_t>(packed[i].size()));
    header.hash(xxh3_128(packed[i]));
  }
  header.hash(xxh3_128(header.bytes()));

  SP_ASSIGN_OR_RETURN(AtomicFile file, AtomicFile::create(path));
  std::int64_t n_bytes = std::ssize(header.bytes());
  SP_RETURN_IF_ERROR(file.write(std::span<const std::byte>(header.bytes())));
  for (const std::vector<std::byte>& section : packed) {
    SP_RETURN_IF_ERROR(file.write(std::span<const std::byte>(section)));
    n_bytes += std::ssize(section);
  }
  SP_RETURN_IF_ERROR(file.commit());
  return n_bytes;
}

Result<PrefixRecord> read_prefix_file(std::span<const std::byte> file,
                                      const PrefixFileLimits& limits) {
  if (file.size() < kFixedBytes + kHashBytes ||
      std::memcmp(file.data(), kMagic.data(), kMagic.size()) != 0) {
    return corrupt("is none: it does not begin as prefix files do");
  }
  ByteReader start(file.subspan(kMagic.size(), kFixedBytes - kMagic.size()));
  const auto version = start.number<std::uint32_t>();
  if (version != kVersion) {
    return Status(Code::kUnsupported, "the prefix file has version " + std::to_string(version) +
                                          "; this program reads version " +
                                          std::to_string(kVersion));
  }
  const auto n_header = start.number<std::uint32_t>();
  const auto n_tokens = start.number<std::int64_t>();
  PrefixRecord record;
  record.block_tokens = start.number<std::int64_t>();
  record.row_bytes = start.number<std::int64_t>();
  const auto n_snapshots = start.number<std::int64_t>();
  if (n_snapshots < 1 || n_snapshots > kMaxSnapshots || n_tokens < n_snapshots) {
    return corrupt("counts " + std::to_string(n_snapshots) + " snapshots of " +
                   std::to_string(n_tokens) + " tokens");
  }
  const std::size_t n_sections = kFirstSnapshot + static_cast<std::size_t>(n_snapshots);
  if (n_header != kFixedBytes + n_sections * kTableEntry + kHashBytes || n_header > file.size()) {
    return corrupt("ends inside its header, or the header's size is damaged");
  }
  const auto header = file.first(n_header - kHashBytes);
  if (ByteReader(file.subspan(header.size(), kHashBytes)).hash() != xxh3_128(header)) {
    return corrupt("has a damaged header: its checksum does not match");
  }
  if (record.row_bytes != limits.row_bytes) {
    return Status(Code::kMismatch, "the prefix file keeps " + std::to_string(record.row_bytes) +
                                       " bytes of attention rows a token, this model " +
                                       std::to_string(limits.row_bytes) +
                                       "; use a file of the same model");
  }
  if (record.block_tokens < 1) return corrupt("has blocks of no tokens");
  if (n_tokens > limits.max_tokens) {
    return Status(Code::kExhausted,
                  "the prefix file holds " + std::to_string(n_tokens) + " tokens, and at most " +
                      std::to_string(limits.max_tokens) + " fit; raise the context length");
  }

  ByteReader table(header.subspan(kFixedBytes));
  std::vector<Table> sections(n_sections);
  std::size_t at = n_header;
  std::int64_t left = limits.max_bytes;
  for (std::size_t i = 0; i < n_sections; ++i) {
    sections[i].n_raw = table.number<std::int64_t>();
    const auto n_packed = table.number<std::int64_t>();
    const Hash128 hash = table.hash();
    if (sections[i].n_raw < 0 || n_packed < 0) return corrupt("has a damaged table of sections");
    if (static_cast<std::uint64_t>(n_packed) > file.size() - at) {
      return corrupt("ends inside its section '" + section_name(i) + "'");
    }
    if (sections[i].n_raw > left) {
      return Status(Code::kExhausted, "the prefix file unpacks to more than the " +
                                          std::to_string(limits.max_bytes) +
                                          " bytes that the prefix cache may take");
    }
    left -= sections[i].n_raw;
    sections[i].packed = file.subspan(at, static_cast<std::size_t>(n_packed));
    at += sections[i].packed.size();
    if (xxh3_128(sections[i].packed) != hash) {
      return corrupt("has a damaged section '" + section_name(i) +
                     "': its checksum does not match");
    }
  }
  if (at != file.size()) {
    return corrupt("has " + std::to_string(file.size() - at) + " bytes behind its end");
  }
  // No product overflows: tokens and row bytes are those of a cache that exists.
  const std::int64_t n_lineage = sections[kLineage].n_raw;
  if (sections[kTokens].n_raw != n_tokens * static_cast<std::int64_t>(sizeof(std::int32_t)) ||
      sections[kRows].n_raw != n_tokens * record.row_bytes || n_lineage == 0 ||
      n_lineage % kRunBytes != 0) {
    return corrupt("has sections of other sizes than its tokens ask for");
  }

  SP_ASSIGN_OR_RETURN(const std::vector<std::byte> tokens, unpack(sections[kTokens], kTokens));
  record.tokens.resize(static_cast<std::size_t>(n_tokens));
  std::memcpy(record.tokens.data(), tokens.data(), tokens.size());
  SP_ASSIGN_OR_RETURN(const std::vector<std::byte> runs, unpack(sections[kLineage], kLineage));
  for (ByteReader reader(runs); reader.n_left() > 0;) {
    const auto end = reader.number<std::int64_t>();
    const auto reader_number = reader.number<std::uint64_t>();
    if (end <= record.lineage.n_tokens() || end > n_tokens) return corrupt("has a damaged lineage");
    record.lineage.extend(end, reader_number);
  }
  if (record.lineage.n_tokens() != n_tokens) return corrupt("has a lineage of too few tokens");
  SP_ASSIGN_OR_RETURN(record.rows, unpack(sections[kRows], kRows));
  std::int64_t n_before = 0;
  for (std::size_t i = kFirstSnapshot; i < n_sections; ++i) {
    auto snapshot = std::make_shared<Snapshot>();
    SP_ASSIGN_OR_RETURN(snapshot->bytes, unpack(sections[i], i));
    SP_ASSIGN_OR_RETURN(const SnapshotInfo info, read_snapshot_info(snapshot->bytes));
    snapshot->n_tokens = info.n_tokens;
    snapshot->from_file = true;
    if (info.n_tokens <= n_before || info.n_tokens > n_tokens) {
      return corrupt("has a " + section_name(i) + " of " + std::to_string(info.n_tokens) +
                     " tokens behind one of " + std::to_string(n_before) + ", of " +
                     std::to_string(n_tokens));
    }
    n_before = info.n_tokens;
    record.snapshots.push_back(std::move(snapshot));
  }
  if (n_before != n_tokens) return corrupt("has no snapshot of all its tokens");
  return record;
}

}  // namespace statepack
