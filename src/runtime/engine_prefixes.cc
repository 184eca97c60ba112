// The engine's prefix cache to and from files.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <unordered_set>

#include "base/file.hpp"
#include "pool/prefix_file.hpp"
#include "runtime/engine_sequence.hpp"

namespace statepack {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kSuffix = ".spprefix";

Status with_path(const std::string& path, const Status& status) {
  return {status.code(), "'" + path + "': " + status.message()};
}

bool is_ours(const fs::path& path) { return path.extension() == kSuffix; }
/// What an interrupted save left behind.
bool is_remainder(const fs::path& path) {
  return path.filename().string().find(std::string(kSuffix) + ".tmp-") != std::string::npos;
}

}  // namespace

Status Engine::need_prefixes() const {
  if (prefixes_ != nullptr) return {};
  return {Code::kUnsupported, "there is no prefix cache; start with one to save and restore"};
}

Result<PrefixRecord> Engine::record_of(std::int64_t slot) {
  SP_RETURN_IF_ERROR(need_prefixes());
  if (slot < StatePool::kFirstValidSlot || slot > pool_.n_slots()) {
    return Status(Code::kInvalidArgument,
                  fmt::format("slot {} is not one of the pool's {} to {}", slot,
                              StatePool::kFirstValidSlot, pool_.n_slots()));
  }
  const auto has_slot = [&](const auto& sequence) { return sequence->slot == slot; };
  if (std::any_of(reading_.begin(), reading_.end(), has_slot)) {
    return Status(
        Code::kInvalidArgument,
        fmt::format("slot {} is still reading its prompt; save it once it replies", slot));
  }
  const auto running = std::find_if(running_.begin(), running_.end(), has_slot);
  if (running == running_.end()) {
    PrefixCache::Hit hit = longest_of(slot);
    if (hit) return hit.record();
    return Status(Code::kNotFound,
                  fmt::format("the prefix cache has nothing of slot {}'s last sequence", slot));
  }
  Sequence& sequence = **running;
  SP_ASSIGN_OR_RETURN(Snapshot snapshot, pool_.snapshot(slot));
  PrefixRecord record;
  record.tokens = sequence.tokens_read();
  record.lineage = sequence.lineage;
  record.lineage.extend(sequence.position, sequence.reader());
  record.block_tokens = prefixes_->config().block_tokens;
  record.row_bytes = prefixes_->row_bytes();
  record.rows.resize(static_cast<std::size_t>(sequence.position * record.row_bytes));
  sequence.kv->copy_rows(0, sequence.position, record.rows.data());
  record.snapshots.push_back(std::make_shared<const Snapshot>(std::move(snapshot)));
  return record;
}

PrefixCache::Hit Engine::longest_of(std::int64_t slot) {
  const auto& tokens = last_tokens_[static_cast<std::size_t>(slot - StatePool::kFirstValidSlot)];
  return prefixes_->peek(tokens, std::ssize(tokens));
}

Result<SavedPrefix> Engine::save_slot(std::int64_t slot, const std::string& path) {
  SP_ASSIGN_OR_RETURN(const PrefixRecord record, record_of(slot));
  SP_ASSIGN_OR_RETURN(const std::int64_t n_bytes, write_prefix_file(path, record));
  return SavedPrefix{std::ssize(record.tokens), std::ssize(record.snapshots), n_bytes};
}

Result<std::int64_t> Engine::erase_slot(std::int64_t slot) {
  SP_ASSIGN_OR_RETURN(PrefixRecord record, record_of(slot));
  if (!prefixes_->erase(record.tokens)) {
    return Status(Code::kInvalidArgument,
                  fmt::format("slot {} is in use; its sequence cannot be forgotten yet", slot));
  }
  last_tokens_[static_cast<std::size_t>(slot - StatePool::kFirstValidSlot)].clear();
  publish();
  return std::ssize(record.tokens);
}

Status Engine::check_record(const PrefixRecord& record) const {
  if (record.block_tokens != prefixes_->config().block_tokens) {
    return {
        Code::kMismatch,
        fmt::format("its states were rounded every {} tokens of the prompt, here they are every "
                    "{}; use the same block length",
                    record.block_tokens, prefixes_->config().block_tokens)};
  }
  for (const std::int32_t token : record.tokens) {
    if (token >= 0 && token < n_vocab_) continue;
    return {Code::kMismatch,
            fmt::format("its token {} is outside the vocabulary of {}", token, n_vocab_)};
  }
  // States are looked at when one is resumed: they have to be unpacked for it.
  std::vector<float> row(static_cast<std::size_t>(record.row_bytes) / sizeof(float));
  for (std::int64_t i = 0; i < std::ssize(record.tokens); ++i) {
    std::memcpy(row.data(), record.rows.data() + i * record.row_bytes, row.size() * sizeof(float));
    if (all_finite(row)) continue;
    return {Code::kCorrupt, fmt::format("the attention row of its token {} is not finite", i)};
  }
  for (const auto& snapshot : record.snapshots) SP_RETURN_IF_ERROR(pool_.check(snapshot->bytes));
  return {};
}

Result<PrefixRecord> Engine::read_record(const std::string& path, std::int64_t* n_bytes) const {
  SP_RETURN_IF_ERROR(need_prefixes());
  SP_ASSIGN_OR_RETURN(const auto file, MappedFile::open(path));
  *n_bytes = std::ssize(file->bytes());
  const PrefixFileLimits limits{config_.max_context, prefixes_->row_bytes(),
                                prefixes_->config().max_bytes};
  Result<PrefixRecord> record = read_prefix_file(file->bytes(), limits);
  if (!record.ok()) return with_path(path, record.status());
  if (Status status = check_record(*record); !status.ok()) return with_path(path, status);
  return record;
}

Result<SavedPrefix> Engine::keep_record(const PrefixRecord& record) {
  SP_RETURN_IF_ERROR(need_prefixes());
  const PrefixCacheConfig& config = prefixes_->config();
  const auto prefix = [&](std::int64_t n) {
    return std::span(record.tokens).first(static_cast<std::size_t>(n));
  };
  const auto rows = [&](std::int64_t begin, std::int64_t end, std::byte* to) {
    std::copy(record.rows.begin() + begin * record.row_bytes,
              record.rows.begin() + end * record.row_bytes, to);
  };
  bool other_reading = false;
  std::int64_t n_largest = -1;  // bytes of a state that had no room
  std::vector<std::int64_t> kept_at;
  for (const auto& snapshot : record.snapshots) {
    const std::int64_t n = snapshot->n_tokens;
    Lineage lineage;
    for (const Lineage::Run& run : record.lineage.runs()) {
      lineage.extend(std::min(run.end, n), run.reader);
    }
    // In mode kBlocks every hit equals a cold read: what does not stays out.
    const bool as_cold = lineage.cold() && n % config.block_tokens == 0;
    if (config.mode == PrefixMode::kBlocks && !as_cold) continue;
    const PrefixKept kept = prefixes_->insert(prefix(n), lineage, snapshot, rows);
    other_reading = other_reading || kept == PrefixKept::kOtherReading;
    if (kept == PrefixKept::kNoRoom) {
      n_largest = std::max<std::int64_t>(n_largest, std::ssize(snapshot->bytes));
    }
    if (kept == PrefixKept::kNew || kept == PrefixKept::kAlready) kept_at.push_back(n);
  }
  publish();
  SavedPrefix saved;
  for (const std::int64_t n : kept_at) {  // a later one may have taken an earlier one's room
    if (prefixes_->match(prefix(n), n) != n) continue;
    saved.n_tokens = n;
    ++saved.n_snapshots;
  }
  if (saved.n_snapshots > 0) return saved;
  if (other_reading) {
    return Status(Code::kMismatch,
                  "the prefix cache has the same tokens from another reading; forget those first, "
                  "or go on with them");
  }
  if (n_largest > config.max_state_bytes) {
    return Status(Code::kExhausted,
                  fmt::format("its state takes {} bytes, and the prefix cache may keep {} bytes of "
                              "states; raise that bound",
                              n_largest, config.max_state_bytes));
  }
  if (n_largest >= 0) {
    return Status(Code::kExhausted,
                  fmt::format("its state of {} bytes and the attention rows of its {} tokens are "
                              "more than the prefix cache's {} bytes; raise that bound",
                              n_largest, record.tokens.size(), config.max_bytes));
  }
  return Status(Code::kMismatch,
                fmt::format("none of its states stands at the end of a block of {} tokens of a "
                            "prompt, where a prefix cache in mode {} keeps them",
                            config.block_tokens, prefix_mode_name(config.mode)));
}

Result<SavedPrefix> Engine::load_prefix(const std::string& path) {
  std::int64_t n_bytes = 0;
  SP_ASSIGN_OR_RETURN(const PrefixRecord record, read_record(path, &n_bytes));
  Result<SavedPrefix> saved = keep_record(record);
  if (!saved.ok()) return with_path(path, saved.status());
  saved->n_bytes = n_bytes;
  return saved;
}

Result<SavedPrefix> Engine::save_prefixes(const std::string& folder) {
  SP_RETURN_IF_ERROR(need_prefixes());
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) {
    return Status(Code::kIo, fmt::format("'{}' cannot be made: {}", folder, error.message()));
  }
  SavedPrefix saved;
  std::unordered_set<std::string> written;
  std::unordered_set<const Snapshot*> known;  // shared beginnings: each snapshot in one file only
  // The order of names is the order of use. What was used last goes to the disk first: should it
  // fill up, that is there.
  const std::vector<PrefixCache::Hit> hits = prefixes_->longest();
  for (std::size_t i = hits.size(); i-- > 0;) {
    PrefixRecord record = hits[i].record();
    std::erase_if(record.snapshots,
                  [&](const auto& snapshot) { return !known.insert(snapshot.get()).second; });
    const std::string name = fmt::format("{:08}{}", i, kSuffix);
    SP_ASSIGN_OR_RETURN(const std::int64_t n_bytes,
                        write_prefix_file((fs::path(folder) / name).string(), record));
    written.insert(name);
    saved.n_tokens += std::ssize(record.tokens);
    saved.n_snapshots += std::ssize(record.snapshots);
    saved.n_bytes += n_bytes;
  }
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, error)) {
    const bool old = is_ours(entry.path()) && !written.contains(entry.path().filename().string());
    if (!old && !is_remainder(entry.path())) continue;
    std::error_code ignored;  // what cannot be removed is loaded once more: no harm
    fs::remove(entry.path(), ignored);
  }
  return saved;
}

Result<SavedPrefix> Engine::load_prefixes(const std::string& folder, std::vector<Status>* skipped) {
  SP_RETURN_IF_ERROR(need_prefixes());
  std::error_code error;
  std::vector<std::string> paths;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, error)) {
    if (is_ours(entry.path())) paths.push_back(entry.path().string());
  }
  if (error == std::errc::no_such_file_or_directory) return SavedPrefix{};  // never saved
  if (error) {
    return Status(Code::kIo, fmt::format("'{}' cannot be read: {}", folder, error.message()));
  }
  std::sort(paths.begin(), paths.end());
  SavedPrefix loaded;
  for (const std::string& path : paths) {
    const Result<SavedPrefix> one = load_prefix(path);
    if (!one.ok()) {
      if (skipped != nullptr) skipped->push_back(one.status());
      continue;
    }
    loaded.n_bytes += one->n_bytes;
  }
  for (const PrefixCache::Hit& hit : prefixes_->longest()) loaded.n_tokens += hit.n_tokens();
  loaded.n_snapshots = prefixes_->stats().n_snapshots;
  return loaded;
}

std::vector<PrefixNodeView> Engine::prefix_nodes(std::int64_t max_nodes) const {
  return prefixes_ == nullptr ? std::vector<PrefixNodeView>() : prefixes_->outline(max_nodes);
}

void Engine::clear_prefixes() {
  if (prefixes_ == nullptr) return;
  prefixes_->clear();
  publish();
}

}  // namespace statepack
