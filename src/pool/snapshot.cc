// The snapshot format, version 1. All numbers little-endian.
//
//   magic      8 bytes "SPSNAP\r\n" (a text-mode transfer breaks it)
//   version    u32
//   flags      u32   bit 0: valid (set last by the writer), bit 1: windows are included
//   n_tokens   i64
//   n_header   u32   bytes from the magic to the header's checksum, that included
//   n_layers   u32
//   scheme, plan fingerprint, model fingerprint: each u32 length, then text
//   layers     n_layers times: i32 key heads, value heads, K, V, gate (0 scalar, 1 channel)
//   sections   4 times: i64 bytes, XXH3-128 of them; pages, cursors, windows, conv history
//   checksum   XXH3-128 of the header before it
//
// The sections follow the header in that order, each the concatenation over layers.
#include <algorithm>
#include <array>
#include <cstring>

#include "base/check.hpp"
#include "base/hash.hpp"
#include "pool/byte_io.hpp"
#include "pool/impl.hpp"

namespace statepack {
namespace {

constexpr std::string_view kMagic = "SPSNAP\r\n";
constexpr std::uint32_t kVersion = 1;
constexpr std::uint32_t kValid = 1, kHasWindows = 2;
constexpr std::size_t kHeaderSizeAt = 24;
constexpr std::size_t kHashBytes = sizeof(Hash128);
constexpr std::array<std::string_view, 4> kSections = {"pages", "cursors", "windows",
                                                       "convolution history"};

Status corrupt(const std::string& what) {
  return {Code::kCorrupt, "the snapshot " + what + "; take a new one"};
}
Status mismatch(const std::string& what, const std::string& theirs, const std::string& ours) {
  return {Code::kMismatch, "the snapshot was taken with " + what + " " + theirs +
                               ", but this pool has " + ours +
                               "; restore it into a pool like its own"};
}

std::string quoted(const std::string& text) { return text.empty() ? "(none)" : "'" + text + "'"; }

std::string describe(const LayerShape& shape) {
  return std::to_string(shape.n_key_heads) + " key heads, " + std::to_string(shape.n_value_heads) +
         " value heads, K " + std::to_string(shape.K) + ", V " + std::to_string(shape.V) +
         (shape.gate == Gate::kScalar ? ", scalar gates" : ", per-channel gates");
}

/// The four sections of a slot as they would be stored.
struct SectionSizes {
  std::array<std::int64_t, 4> bytes{};
  SectionSizes(const SlotLayout& layout, bool with_windows) {
    for (const SlotLayout::Layer& layer : layout.layers) {
      bytes[0] += layer.page_bytes;
      bytes[1] += static_cast<std::int64_t>(sizeof(Cursor));
      bytes[2] += with_windows ? layer.window_bytes : 0;
    }
    bytes[3] = layout.conv_bytes;
  }
};

}  // namespace

Snapshot write_snapshot(const StatePool::Impl& pool, std::int64_t slot, bool with_window) {
  const SlotLayout& layout = pool.layout;
  const std::uint8_t* from = pool.slot(slot);
  const bool any_open = std::any_of(
      layout.layers.begin(), layout.layers.end(),
      [&](const SlotLayout::Layer& layer) { return pool.cursor(slot, layer).fill > 0; });
  // An empty window holds nothing that a later step reads.
  with_window = with_window && any_open;

  std::array<ByteWriter, 4> sections;
  const auto put = [&](ByteWriter& writer, std::int64_t at, std::int64_t n_bytes) {
    writer.raw(std::as_bytes(std::span(from + at, static_cast<std::size_t>(n_bytes))));
  };
  for (const SlotLayout::Layer& layer : layout.layers) {
    put(sections[0], layer.page, layer.page_bytes);
    sections[1].number(pool.cursor(slot, layer).fill);
    sections[1].number(pool.cursor(slot, layer).limit);
    if (with_window) put(sections[2], layer.window, layer.window_bytes);
  }
  put(sections[3], layout.conv, layout.conv_bytes);

  ByteWriter out;
  out.raw(std::as_bytes(std::span(kMagic.data(), kMagic.size())));
  out.number(kVersion);
  out.number(kValid | (with_window ? kHasWindows : 0));
  out.number(pool.header(slot).n_tokens);
  SP_CHECK(out.bytes().size() == kHeaderSizeAt, "the header's size has moved");
  out.number(std::uint32_t{0});  // of the header: filled in below
  out.number(static_cast<std::uint32_t>(layout.layers.size()));
  out.text(pool.scheme->scheme().full_name());
  out.text(pool.scheme->plan_fingerprint());
  out.text(pool.scheme->model_fingerprint());
  for (const CompiledLayer& layer : pool.scheme->layers()) {
    for (const int n : {layer.shape.n_key_heads, layer.shape.n_value_heads, layer.shape.K,
                        layer.shape.V, layer.shape.gate == Gate::kScalar ? 0 : 1}) {
      out.number(static_cast<std::int32_t>(n));
    }
  }
  for (ByteWriter& section : sections) {
    out.number(static_cast<std::int64_t>(section.bytes().size()));
    out.hash(xxh3_128(section.bytes()));
  }
  const auto n_header = static_cast<std::uint32_t>(out.bytes().size() + kHashBytes);
  std::memcpy(out.bytes().data() + kHeaderSizeAt, &n_header, sizeof n_header);
  out.hash(xxh3_128(out.bytes()));
  for (ByteWriter& section : sections) out.raw(section.bytes());

  Snapshot snapshot;
  snapshot.n_tokens = pool.header(slot).n_tokens;
  snapshot.bytes = std::move(out.bytes());
  return snapshot;
}

namespace {

// What follows the magic, with every checksum compared; whose snapshot it is is the caller's
// question.
struct Contents {
  bool with_windows = false;
  SnapshotInfo info;
  std::array<std::span<const std::byte>, 4> sections;
};

Result<Contents> read_contents(std::span<const std::byte> bytes) {
  ByteReader in(bytes);
  const auto magic = in.raw(kMagic.size());
  if (!in.ok() || std::memcmp(magic.data(), kMagic.data(), kMagic.size()) != 0) {
    return corrupt("does not begin like one");
  }
  const auto version = in.number<std::uint32_t>();
  if (in.ok() && version != kVersion) {
    return Status(Code::kUnsupported, "the snapshot has format version " + std::to_string(version) +
                                          ", but this build reads version " +
                                          std::to_string(kVersion) +
                                          "; update statepack or take a new one");
  }
  Contents contents;
  SnapshotInfo& info = contents.info;
  const auto flags = in.number<std::uint32_t>();
  info.n_tokens = in.number<std::int64_t>();
  const auto n_header = in.number<std::uint32_t>();
  const auto n_layers = in.number<std::uint32_t>();
  if (!in.ok() || n_header < kHeaderSizeAt + 2 * sizeof(std::uint32_t) + kHashBytes ||
      n_header > bytes.size()) {
    return corrupt("ends inside its header");
  }
  const auto header = bytes.first(n_header - kHashBytes);
  const Hash128 expected = ByteReader(bytes.subspan(header.size(), kHashBytes)).hash();
  if (xxh3_128(header) != expected) {
    return corrupt("has a damaged header: its checksum does not match");
  }
  // From here on the header is what some writer wrote; that writer need not have been ours.
  if ((flags & kValid) == 0) return corrupt("is not marked valid: its writer never finished");
  if ((flags & ~(kValid | kHasWindows)) != 0) return corrupt("has unknown flags");
  if (info.n_tokens < 0) return corrupt("counts " + std::to_string(info.n_tokens) + " tokens");
  contents.with_windows = (flags & kHasWindows) != 0;
  ByteReader fields(header.subspan(kHeaderSizeAt + 2 * sizeof(std::uint32_t)));
  info.scheme = fields.text();
  info.plan_fingerprint = fields.text();
  info.model_fingerprint = fields.text();
  if (!fields.ok()) return corrupt("has a header shorter than its own texts");
  for (std::uint32_t i = 0; i < n_layers; ++i) {
    LayerShape shape;
    shape.n_key_heads = fields.number<std::int32_t>();
    shape.n_value_heads = fields.number<std::int32_t>();
    shape.K = fields.number<std::int32_t>();
    shape.V = fields.number<std::int32_t>();
    const auto gate = fields.number<std::int32_t>();
    shape.gate = gate == 0 ? Gate::kScalar : Gate::kChannel;
    if (!fields.ok() || gate < 0 || gate > 1) return corrupt("has a damaged table of layers");
    info.shapes.push_back(shape);
  }
  std::array<Hash128, 4> hashes;
  std::size_t at = n_header;
  for (std::size_t i = 0; i < kSections.size(); ++i) {
    const auto n_bytes = fields.number<std::int64_t>();
    hashes[i] = fields.hash();
    if (!fields.ok() || n_bytes < 0) return corrupt("has a damaged table of sections");
    if (static_cast<std::uint64_t>(n_bytes) > bytes.size() - at) {
      return corrupt("ends inside its section '" + std::string(kSections[i]) + "'");
    }
    contents.sections[i] = bytes.subspan(at, static_cast<std::size_t>(n_bytes));
    at += contents.sections[i].size();
  }
  if (fields.n_left() != 0) return corrupt("has a header longer than its contents");
  if (at != bytes.size()) {
    return corrupt("has " + std::to_string(bytes.size() - at) + " bytes behind its end");
  }
  for (std::size_t i = 0; i < kSections.size(); ++i) {
    if (xxh3_128(contents.sections[i]) != hashes[i]) {
      return corrupt("has a damaged section '" + std::string(kSections[i]) +
                     "': its checksum does not match");
    }
  }
  info.page_bytes = std::ssize(contents.sections[0]);
  info.cursor_bytes = std::ssize(contents.sections[1]);
  info.window_bytes = std::ssize(contents.sections[2]);
  info.conv_bytes = std::ssize(contents.sections[3]);
  return contents;
}

}  // namespace

Result<SnapshotInfo> read_snapshot_info(std::span<const std::byte> snapshot) {
  SP_ASSIGN_OR_RETURN(Contents contents, read_contents(snapshot));
  return std::move(contents.info);
}

namespace {

/// A snapshot that fits the pool, and its cursors.
struct Checked {
  Contents contents;
  std::vector<Cursor> cursors;
};

Result<Checked> check_contents(const StatePool::Impl& pool, std::span<const std::byte> bytes) {
  SP_ASSIGN_OR_RETURN(Contents contents, read_contents(bytes));
  const SnapshotInfo& theirs = contents.info;
  const CompiledScheme& ours = *pool.scheme;
  // By meaning: a name written by another version may spell out fewer options.
  const Result<Scheme> their_scheme = Scheme::parse(theirs.scheme);
  if (!their_scheme.ok() || *their_scheme != ours.scheme()) {
    return mismatch("scheme", quoted(theirs.scheme), quoted(ours.scheme().full_name()));
  }
  if (theirs.plan_fingerprint != ours.plan_fingerprint()) {
    return mismatch("plan", quoted(theirs.plan_fingerprint), quoted(ours.plan_fingerprint()));
  }
  if (theirs.model_fingerprint != ours.model_fingerprint()) {
    return mismatch("model", quoted(theirs.model_fingerprint), quoted(ours.model_fingerprint()));
  }
  if (theirs.shapes.size() != ours.layers().size()) {
    return mismatch("recurrent layers:", std::to_string(theirs.shapes.size()),
                    std::to_string(ours.layers().size()));
  }
  for (std::size_t i = 0; i < ours.layers().size(); ++i) {
    if (theirs.shapes[i] == ours.layers()[i].shape) continue;
    return mismatch("recurrent layer " + std::to_string(i) + " of", describe(theirs.shapes[i]),
                    describe(ours.layers()[i].shape));
  }
  const bool with_windows = contents.with_windows;
  const auto& sections = contents.sections;
  const SectionSizes want(pool.layout, with_windows);
  for (std::size_t i = 0; i < sections.size(); ++i) {
    if (std::ssize(sections[i]) != want.bytes[i]) {
      return mismatch(std::string(kSections[i]) + " of",
                      std::to_string(sections[i].size()) + " bytes",
                      std::to_string(want.bytes[i]) + " bytes");
    }
  }
  const int period = ours.scheme().period;
  std::vector<Cursor> cursors;
  ByteReader cursor_reader(sections[1]);
  for (std::size_t i = 0; i < ours.layers().size(); ++i) {
    Cursor cursor;
    cursor.fill = cursor_reader.number<std::int32_t>();
    cursor.limit = cursor_reader.number<std::int32_t>();
    const int limit = cursor.limit == 0 ? period : cursor.limit;
    if (cursor.fill < 0 || cursor.limit < 0 || limit > period || cursor.fill >= limit ||
        (cursor.fill > 0 && !with_windows)) {
      return corrupt("has a window of " + std::to_string(cursor.fill) + " records, complete at " +
                     std::to_string(cursor.limit) + ", in recurrent layer " + std::to_string(i) +
                     ", which period " + std::to_string(period) + " cannot have");
    }
    cursors.push_back(cursor);
  }
  return Checked{std::move(contents), std::move(cursors)};
}

}  // namespace

Status check_snapshot(const StatePool::Impl& pool, std::span<const std::byte> bytes) {
  return check_contents(pool, bytes).status();
}

Status read_snapshot(StatePool::Impl& pool, std::int64_t slot, std::span<const std::byte> bytes) {
  SP_ASSIGN_OR_RETURN(const Checked checked, check_contents(pool, bytes));
  const auto& [contents, cursors] = checked;
  const auto& sections = contents.sections;

  // Everything is checked: only now the slot changes.
  std::uint8_t* to = pool.slot(slot);
  const std::span<std::uint8_t> contents_of_slot = pool.contents(slot);
  std::fill(contents_of_slot.begin(), contents_of_slot.end(), std::uint8_t{0});
  pool.header(slot).n_tokens = contents.info.n_tokens;
  ByteReader pages(sections[0]), windows(sections[2]);
  const auto take = [&](ByteReader& reader, std::int64_t offset, std::int64_t n_bytes) {
    const auto data = reader.raw(static_cast<std::size_t>(n_bytes));
    if (!data.empty()) std::memcpy(to + offset, data.data(), data.size());
  };
  for (std::size_t i = 0; i < cursors.size(); ++i) {
    const SlotLayout::Layer& layer = pool.layout.layers[i];
    take(pages, layer.page, layer.page_bytes);
    if (contents.with_windows) take(windows, layer.window, layer.window_bytes);
    pool.cursor(slot, layer) = cursors[i];
  }
  ByteReader conv(sections[3]);
  take(conv, pool.layout.conv, pool.layout.conv_bytes);
  return {};
}

}  // namespace statepack
