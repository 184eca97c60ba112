// The prefix cache against a plain list of what was put in, and its file format against damage.
#include "pool/prefix_cache.hpp"

#include <gmock/gmock.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <random>

#include "../base/temporary_folder.hpp"
#include "base/file.hpp"
#include "base/hash.hpp"
#include "pool/prefix_file.hpp"

namespace statepack {
namespace {

using ::testing::HasSubstr;
using Tokens = std::vector<std::int32_t>;

constexpr std::int64_t kRowBytes = 24;

/// The row of a token: nobody else's.
void put_row(std::uint64_t reader, std::int64_t position, std::int32_t token, std::byte* to) {
  const std::int64_t values[3] = {static_cast<std::int64_t>(reader), position, token};
  std::memcpy(to, values, kRowBytes);
}

std::vector<std::byte> rows_of(const Tokens& tokens, const Lineage& lineage, std::int64_t begin,
                               std::int64_t end) {
  std::vector<std::byte> rows(static_cast<std::size_t>((end - begin) * kRowBytes));
  for (std::int64_t t = begin; t < end; ++t) {
    put_row(lineage.at(t).reader, t, tokens[static_cast<std::size_t>(t)],
            rows.data() + (t - begin) * kRowBytes);
  }
  return rows;
}

PrefixCache::RowSource source(const Tokens& tokens, const Lineage& lineage) {
  return [&tokens, &lineage](std::int64_t begin, std::int64_t end, std::byte* to) {
    const std::vector<std::byte> rows = rows_of(tokens, lineage, begin, end);
    std::copy(rows.begin(), rows.end(), to);
  };
}

std::shared_ptr<const Snapshot> snapshot_of(const Tokens& tokens, std::byte mark = {},
                                            std::size_t n_bytes = 100) {
  auto snapshot = std::make_shared<Snapshot>();
  snapshot->bytes.assign(n_bytes, mark);
  snapshot->n_tokens = std::ssize(tokens);
  return snapshot;
}

Lineage cold(std::int64_t n_tokens) {
  Lineage lineage;
  lineage.extend(n_tokens, Lineage::kCold);
  return lineage;
}

std::unique_ptr<PrefixCache> make_cache(std::int64_t max_bytes, std::int64_t max_state_bytes = 0) {
  PrefixCacheConfig config;
  config.mode = PrefixMode::kTurns;
  config.max_bytes = max_bytes;
  config.max_state_bytes = max_state_bytes;
  return PrefixCache::create(config, kRowBytes).value();
}

PrefixKept put(PrefixCache& cache, const Tokens& tokens, const Lineage& lineage,
               std::byte mark = {}) {
  return cache.insert(tokens, lineage, snapshot_of(tokens, mark), source(tokens, lineage));
}

std::vector<std::byte> all_rows(const PrefixCache::Hit& hit) {
  std::vector<std::byte> rows;
  for (const auto& piece : hit.rows()) {
    EXPECT_EQ(std::ssize(piece.bytes), piece.n_tokens * kRowBytes);
    rows.insert(rows.end(), piece.bytes.begin(), piece.bytes.end());
  }
  return rows;
}

TEST(Lineage, JoinsRunsOfOneReader) {
  Lineage lineage;
  EXPECT_TRUE(lineage.cold());
  lineage.extend(4, Lineage::kCold);
  lineage.extend(9, Lineage::kCold);
  EXPECT_TRUE(lineage.cold());
  EXPECT_EQ(lineage.runs().size(), 1U);
  lineage.extend(9, 7);  // nothing
  lineage.extend(12, 7);
  EXPECT_FALSE(lineage.cold());
  EXPECT_EQ(lineage.at(8), (Lineage::Run{9, Lineage::kCold}));
  EXPECT_EQ(lineage.at(9), (Lineage::Run{12, 7}));
  EXPECT_EQ(lineage.n_tokens(), 12);
  EXPECT_NE(Lineage::new_reader(), Lineage::new_reader());
}

TEST(PrefixCache, ShowsItsTreeParentsFirst) {
  const auto cache = make_cache(1 << 20);
  put(*cache, {1, 2, 3, 4}, cold(4));
  put(*cache, {1, 2, 5}, cold(3));  // cuts the edge behind 2 tokens
  put(*cache, {7}, cold(1));
  const PrefixCache::Hit hit = cache->find(Tokens{7, 8}, 2);
  const auto views = cache->outline(10);
  const auto line = [](const PrefixNodeView& v) {
    return std::to_string(v.level) + ": " + std::to_string(v.n_tokens) + " +" +
           std::to_string(v.n_own_tokens) + ", " + std::to_string(v.state_bytes) + ", " +
           std::to_string(v.n_pins);
  };
  std::vector<std::string> lines;
  for (const PrefixNodeView& view : views) {
    lines.push_back(line(view));
    EXPECT_GE(view.age_s, 0);
  }
  EXPECT_THAT(lines, testing::ElementsAre("0: 2 +2, 0, 0", "1: 4 +2, 100, 0", "1: 3 +1, 100, 0",
                                          "0: 1 +1, 100, 1"));
  ASSERT_EQ(cache->outline(2).size(), 2U);
  EXPECT_EQ(line(cache->outline(2)[1]), lines[1]);
}

TEST(PrefixCache, FindsTheLongestThatIsShortEnough) {
  const auto cache = make_cache(1 << 20);
  const Tokens tokens = {5, 6, 7, 8, 9, 10};
  for (const std::int64_t n : {2, 4, 6}) {
    const Tokens part(tokens.begin(), tokens.begin() + n);
    EXPECT_EQ(put(*cache, part, cold(n), static_cast<std::byte>(n)), PrefixKept::kNew);
  }
  EXPECT_EQ(put(*cache, tokens, cold(6)), PrefixKept::kAlready);
  for (std::int64_t most = 0; most <= 7; ++most) {
    const PrefixCache::Hit hit = cache->find(tokens, most);
    const std::int64_t expected = std::min<std::int64_t>(6, most / 2 * 2);
    EXPECT_EQ(cache->match(tokens, most), expected);
    const PrefixCache::Hit peeked = cache->peek(tokens, most);
    EXPECT_EQ(peeked ? peeked.n_tokens() : 0, expected);
    if (expected == 0) {
      EXPECT_FALSE(hit);
      continue;
    }
    ASSERT_TRUE(hit);
    EXPECT_EQ(hit.n_tokens(), expected);
    EXPECT_EQ(hit.snapshot().bytes[0], static_cast<std::byte>(expected));
    EXPECT_EQ(all_rows(hit), rows_of(tokens, cold(6), 0, expected));
  }
  EXPECT_FALSE(cache->find(Tokens{6, 7}, 2));
  EXPECT_EQ(cache->stats().queries, 9);
  EXPECT_EQ(cache->stats().hits, 6);
  // Rows of a shared beginning are kept once.
  EXPECT_EQ(cache->stats().row_bytes, 6 * kRowBytes);
  EXPECT_TRUE(cache->check().ok());
}

TEST(PrefixCache, KeepsReadingsApart) {
  const auto cache = make_cache(1 << 20);
  const Tokens tokens = {1, 2, 3, 4, 5, 6};
  Lineage decoded = cold(3);
  decoded.extend(6, 42);
  ASSERT_EQ(put(*cache, tokens, decoded), PrefixKept::kNew);
  EXPECT_EQ(put(*cache, tokens, cold(6)), PrefixKept::kOtherReading);
  // Up to where they part, they are one.
  EXPECT_EQ(put(*cache, {1, 2, 3}, cold(3)), PrefixKept::kNew);
  EXPECT_EQ(put(*cache, {1, 2, 3, 4}, cold(4)), PrefixKept::kOtherReading);
  EXPECT_EQ(put(*cache, {1, 2, 3, 9}, cold(4)), PrefixKept::kNew);
  EXPECT_EQ(cache->find(tokens, 6).lineage().runs(), decoded.runs());
  EXPECT_TRUE(cache->check().ok()) << cache->check().message();
}

TEST(PrefixCache, WhatIsInUseStays) {
  const auto cache = make_cache(2500);
  ASSERT_EQ(put(*cache, {1, 2}, cold(2)), PrefixKept::kNew);
  PrefixCache::Hit hit = cache->find(Tokens{1, 2}, 2);
  ASSERT_TRUE(hit);
  for (int i = 0; i < 20; ++i) put(*cache, {10 + i, 3, 4}, cold(3));
  EXPECT_GT(cache->stats().evictions, 10);
  EXPECT_EQ(cache->match(Tokens{1, 2}, 2), 2);
  EXPECT_FALSE(cache->erase(Tokens{1, 2}));
  cache->clear();
  EXPECT_EQ(cache->stats().n_snapshots, 1);
  EXPECT_EQ(all_rows(hit), rows_of({1, 2}, cold(2), 0, 2));
  hit = {};
  EXPECT_TRUE(cache->erase(Tokens{1, 2}));
  EXPECT_EQ(cache->stats().bytes, 0);
  EXPECT_EQ(cache->stats().n_nodes, 0);
}

TEST(PrefixCache, DiscardsWhatIsOfNoUse) {
  const auto cache = make_cache(1 << 20);
  ASSERT_EQ(put(*cache, {1, 2}, cold(2)), PrefixKept::kNew);
  ASSERT_EQ(put(*cache, {1, 2, 3, 4}, cold(4)), PrefixKept::kNew);
  cache->discard(cache->find(Tokens{1, 2, 3, 4}, 4));
  EXPECT_EQ(cache->match(Tokens{1, 2, 3, 4}, 4), 2);
  EXPECT_EQ(cache->stats().hits, 0);
  EXPECT_EQ(cache->stats().hit_tokens, 0);
  EXPECT_EQ(cache->stats().corrupt, 1);
  EXPECT_TRUE(cache->check().ok());
}

TEST(PrefixCache, RefusesWhatCanNeverFit) {
  const auto cache = make_cache(1000);
  ASSERT_EQ(put(*cache, {1}, cold(1)), PrefixKept::kNew);
  EXPECT_EQ(put(*cache, Tokens(100, 2), cold(100)), PrefixKept::kNoRoom);
  EXPECT_EQ(cache->match(Tokens{1}, 1), 1);  // nothing went for it
  PrefixCacheConfig config;
  config.block_tokens = 0;
  EXPECT_THAT(PrefixCache::create(config, 1).status().message(), HasSubstr("every 0 tokens"));
}

TEST(PrefixCache, StatesHaveABoundOfTheirOwn) {
  PrefixCacheConfig config;
  config.mode = PrefixMode::kTurns;
  const std::int64_t n_state = std::ssize(snapshot_of({1, 2}, {})->bytes);
  config.max_state_bytes = 2 * n_state + n_state / 2;
  const auto cache = PrefixCache::create(config, kRowBytes).value();
  for (const Tokens& tokens : {Tokens{1, 2}, Tokens{3, 4}, Tokens{5, 6}}) {
    EXPECT_EQ(put(*cache, tokens, cold(2)), PrefixKept::kNew);
    ASSERT_TRUE(cache->check().ok()) << cache->check().message();
  }
  EXPECT_EQ(cache->stats().n_snapshots, 2);
  EXPECT_EQ(cache->stats().evictions, 1);
  EXPECT_EQ(cache->stats().state_bytes, 2 * n_state);
  EXPECT_EQ(cache->stats().max_state_bytes, config.max_state_bytes);
  EXPECT_EQ(cache->match(Tokens{1, 2, 9}, 2), 0) << "the least recently used one went";
  EXPECT_EQ(cache->match(Tokens{5, 6, 9}, 2), 2);

  config.max_state_bytes = n_state - 1;
  const auto none = PrefixCache::create(config, kRowBytes).value();
  EXPECT_EQ(put(*none, {1, 2}, cold(2)), PrefixKept::kNoRoom);
  config.max_state_bytes = -1;
  EXPECT_EQ(PrefixCache::create(config, kRowBytes).status().code(), Code::kInvalidArgument);
}

TEST(PrefixCache, ModesHaveNames) {
  for (const auto mode : {PrefixMode::kOff, PrefixMode::kBlocks, PrefixMode::kTurns}) {
    EXPECT_EQ(parse_prefix_mode(prefix_mode_name(mode)).value(), mode);
  }
  EXPECT_THAT(parse_prefix_mode("all").status().message(), HasSubstr("'all'"));
}

/// What a cache should know, as a list in order of use.
class Naive {
 public:
  struct Entry {
    Tokens tokens;
    Lineage lineage;
    std::byte mark;
  };
  std::vector<Entry> entries;  ///< least recently used first

  std::size_t exactly(const Tokens& tokens) const {
    std::size_t i = 0;
    while (i < entries.size() && entries[i].tokens != tokens) ++i;
    return i;
  }
  bool conflicts(const Tokens& tokens, const Lineage& lineage) const {
    return std::any_of(entries.begin(), entries.end(), [&](const Entry& e) {
      for (std::size_t t = 0; t < std::min(tokens.size(), e.tokens.size()); ++t) {
        if (tokens[t] != e.tokens[t]) return false;
        const auto at = static_cast<std::int64_t>(t);
        if (lineage.at(at).reader != e.lineage.at(at).reader) return true;
      }
      return false;
    });
  }
  std::size_t longest(const Tokens& tokens, std::int64_t max_tokens) const {
    std::size_t best = entries.size();
    for (std::size_t i = 0; i < entries.size(); ++i) {
      const Tokens& t = entries[i].tokens;
      if (std::ssize(t) > max_tokens || t.size() > tokens.size()) continue;
      if (!std::equal(t.begin(), t.end(), tokens.begin())) continue;
      if (best == entries.size() || t.size() > entries[best].tokens.size()) best = i;
    }
    return best;
  }
  void use(std::size_t i) {
    std::rotate(entries.begin() + static_cast<std::ptrdiff_t>(i),
                entries.begin() + static_cast<std::ptrdiff_t>(i) + 1, entries.end());
  }
};

class PrefixCacheProperty : public testing::TestWithParam<unsigned> {};

TEST_P(PrefixCacheProperty, AgreesWithAList) {
  std::mt19937 random(GetParam());
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  // Every other one has a bound of states as well: 3 to 22 of them.
  const std::int64_t max_bytes = 2500 + below(20000);
  const auto cache = make_cache(max_bytes, below(2) == 0 ? 0 : 300 + 100 * below(20));
  Naive naive;
  struct Pin {
    PrefixCache::Hit hit;
    Tokens tokens;
  };
  std::vector<Pin> pins;
  const auto pinned = [&](const Tokens& tokens) {
    return std::any_of(pins.begin(), pins.end(), [&](const Pin& p) { return p.tokens == tokens; });
  };
  int n_hits = 0, n_evicted = 0, n_refused = 0;
  for (int round = 0; round < 8000; ++round) {
    Tokens tokens(static_cast<std::size_t>(1 + below(20)));
    for (auto& t : tokens) t = below(round % 3 == 0 ? 2 : 4);
    const auto n = std::ssize(tokens);
    switch (below(10)) {
      case 0: {  // forget
        const std::size_t i = naive.exactly(tokens);
        const bool there = i < naive.entries.size() && !pinned(tokens);
        ASSERT_EQ(cache->erase(tokens), there);
        if (there) naive.entries.erase(naive.entries.begin() + static_cast<std::ptrdiff_t>(i));
        break;
      }
      case 1:  // let go
        if (!pins.empty()) {
          pins.erase(pins.begin() + below(static_cast<int>(pins.size())));
        }
        break;
      case 2:
      case 3:
      case 4: {  // look up
        const std::int64_t most = below(static_cast<int>(n) + 2);
        const std::size_t i = naive.longest(tokens, most);
        PrefixCache::Hit hit = cache->find(tokens, most);
        ASSERT_EQ(static_cast<bool>(hit), i < naive.entries.size());
        if (!hit) break;
        ++n_hits;
        const Naive::Entry e = naive.entries[i];
        ASSERT_EQ(hit.n_tokens(), std::ssize(e.tokens));
        ASSERT_EQ(hit.snapshot().bytes[0], e.mark);
        ASSERT_EQ(hit.lineage().runs(), e.lineage.runs());
        ASSERT_EQ(all_rows(hit), rows_of(e.tokens, e.lineage, 0, hit.n_tokens()));
        const PrefixRecord record = hit.record();
        ASSERT_EQ(record.tokens, e.tokens);
        ASSERT_EQ(record.rows, all_rows(hit));
        ASSERT_EQ(record.snapshots.back()->n_tokens, hit.n_tokens());
        naive.use(i);
        if (pins.size() < 4 && below(4) == 0) pins.push_back({std::move(hit), e.tokens});
        break;
      }
      default: {  // put
        Lineage lineage = cold(1 + below(static_cast<int>(n)));
        lineage.extend(n, static_cast<std::uint64_t>(below(3)));
        const auto mark = static_cast<std::byte>(below(256));
        const bool conflict = naive.conflicts(tokens, lineage);
        const std::size_t i = naive.exactly(tokens);
        const PrefixKept kept = put(*cache, tokens, lineage, mark);
        if (conflict) {
          ASSERT_EQ(kept, PrefixKept::kOtherReading);
          ++n_refused;
        } else if (i < naive.entries.size()) {
          ASSERT_EQ(kept, PrefixKept::kAlready);
          naive.use(i);
        } else {
          ASSERT_TRUE(kept == PrefixKept::kNew || kept == PrefixKept::kNoRoom);
          // What went is what was used least recently and by nobody now: the list up to a point.
          // One entry may be spared, where the new one is attached.
          const auto gone = [&](const Naive::Entry& e) {
            return cache->match(e.tokens, std::ssize(e.tokens)) != std::ssize(e.tokens);
          };
          const auto last_gone =
              std::find_if(naive.entries.rbegin(), naive.entries.rend(), gone).base();
          int n_spared = 0;
          for (auto e = naive.entries.begin(); e != last_gone; ++e) {
            if (gone(*e)) {
              ASSERT_FALSE(pinned(e->tokens));
              ++n_evicted;
            } else if (!pinned(e->tokens)) {
              ASSERT_EQ(e->tokens.front(), tokens.front());
              ++n_spared;
            }
          }
          ASSERT_LE(n_spared, 1);
          std::erase_if(naive.entries, gone);
          if (kept == PrefixKept::kNew) naive.entries.push_back({tokens, lineage, mark});
        }
      }
    }
    const Status status = cache->check();
    ASSERT_TRUE(status.ok()) << round << ": " << status.message();
    ASSERT_EQ(cache->stats().n_snapshots, std::ssize(naive.entries));
    ASSERT_EQ(cache->stats().n_pinned, std::ssize(pins));
  }
  EXPECT_GT(n_hits, 50);
  EXPECT_GT(n_evicted, 20);
  EXPECT_GT(n_refused, 20);
  pins.clear();
  cache->clear();
  EXPECT_EQ(cache->stats().bytes, 0);
  EXPECT_EQ(cache->stats().n_nodes, 0);
}

INSTANTIATE_TEST_SUITE_P(Seeds, PrefixCacheProperty, testing::Range(0U, 12U));

// ---- files ----

/// A record with real snapshots of a small pool.
PrefixRecord make_record(std::int64_t n_tokens, unsigned seed) {
  const auto scheme = CompiledScheme::make(Scheme::parse("fp32").value(),
                                           {{1, 1, 8, 8, Gate::kScalar}}, nullptr, "model")
                          .value();
  const auto pool = StatePool::create(scheme, {.n_slots = 1, .conv_floats = 8}).value();
  const std::int64_t slot = pool->alloc().value();
  std::mt19937 random(seed);
  PrefixRecord record;
  for (std::int64_t i = 0; i < n_tokens; ++i) {
    record.tokens.push_back(static_cast<std::int32_t>(random() % 50));
  }
  record.block_tokens = 256;
  record.row_bytes = kRowBytes;
  record.lineage = cold(n_tokens / 2);
  record.lineage.extend(n_tokens, 42);
  record.rows.resize(static_cast<std::size_t>(n_tokens * kRowBytes));
  for (auto& b : record.rows) b = static_cast<std::byte>(random());
  for (const std::int64_t n : {n_tokens / 2, n_tokens}) {
    pool->set_n_tokens(slot, n);
    pool->conv(slot)[0] = static_cast<float>(random() % 1000);
    record.snapshots.push_back(std::make_shared<const Snapshot>(pool->snapshot(slot).value()));
  }
  return record;
}

bool same(const PrefixRecord& a, const PrefixRecord& b) {
  return a.tokens == b.tokens && a.lineage.runs() == b.lineage.runs() &&
         a.block_tokens == b.block_tokens && a.row_bytes == b.row_bytes && a.rows == b.rows &&
         std::equal(a.snapshots.begin(), a.snapshots.end(), b.snapshots.begin(), b.snapshots.end(),
                    [](const auto& x, const auto& y) {
                      return x->bytes == y->bytes && x->n_tokens == y->n_tokens;
                    });
}

constexpr PrefixFileLimits kLimits{1 << 20, kRowBytes, 1 << 28};

Result<PrefixRecord> read(const std::string& path, const PrefixFileLimits& limits = kLimits) {
  SP_ASSIGN_OR_RETURN(const auto file, MappedFile::open(path));
  return read_prefix_file(file->bytes(), limits);
}

TEST(PrefixFile, ComesBackAsItWas) {
  const TemporaryFolder folder;
  const PrefixRecord record = make_record(40, 1);
  const std::string path = folder / "a";
  const auto n_bytes = write_prefix_file(path, record);
  ASSERT_TRUE(n_bytes.ok()) << n_bytes.status().message();
  EXPECT_EQ(*n_bytes, static_cast<std::int64_t>(std::filesystem::file_size(path)));
  const auto back = read(path);
  ASSERT_TRUE(back.ok()) << back.status().message();
  EXPECT_TRUE(same(*back, record));
}

TEST(PrefixFile, EveryDamagedByteIsSeen) {
  const TemporaryFolder folder;
  ASSERT_TRUE(write_prefix_file(folder / "a", make_record(40, 1)).ok());
  const auto file = MappedFile::open(folder / "a").value();
  const std::vector<std::byte> good(file->bytes().begin(), file->bytes().end());
  for (std::size_t i = 0; i < good.size(); ++i) {
    std::vector<std::byte> bad = good;
    bad[i] ^= std::byte{0x10};
    EXPECT_FALSE(read_prefix_file(bad, kLimits).ok()) << i;
  }
  for (std::size_t n = 0; n < good.size(); ++n) {
    EXPECT_FALSE(read_prefix_file(std::span(good).first(n), kLimits).ok()) << n;
  }
  std::vector<std::byte> longer = good;
  longer.push_back({});
  EXPECT_THAT(read_prefix_file(longer, kLimits).status().message(), HasSubstr("behind its end"));
}

TEST(PrefixFile, SaysWhatDoesNotFit) {
  const TemporaryFolder folder;
  const std::string path = folder / "a";
  ASSERT_TRUE(write_prefix_file(path, make_record(40, 1)).ok());
  PrefixFileLimits limits = kLimits;
  limits.max_tokens = 39;
  EXPECT_THAT(read(path, limits).status().message(), HasSubstr("40 tokens, and at most 39"));
  limits = kLimits;
  limits.row_bytes = 48;
  EXPECT_EQ(read(path, limits).status().code(), Code::kMismatch);
  limits = kLimits;
  limits.max_bytes = 1500;
  EXPECT_THAT(read(path, limits).status().message(), HasSubstr("more than the 1500 bytes"));
  folder.put("b",
             "a text of another kind, long enough to have a header of the same size, and more, "
             "until it is long enough");
  EXPECT_THAT(read(folder / "b").status().message(), HasSubstr("does not begin"));
}

TEST(PrefixFile, AKillLeavesTheOldFileOrTheNew) {
  const TemporaryFolder folder;
  const std::string path = folder / "a";
  // Large enough for a write to be interrupted in its middle.
  const PrefixRecord records[2] = {make_record(20000, 1), make_record(20000, 2)};
  ASSERT_TRUE(write_prefix_file(path, records[0]).ok());
  std::mt19937 random(7);
  int n_seen[2] = {};
  for (int round = 0; round < 40; ++round) {
    const pid_t child = fork();
    if (child == 0) {
      for (int i = 1;; ++i) (void)write_prefix_file(path, records[i % 2]);
    }
    usleep(static_cast<useconds_t>(random() % 20000));
    ASSERT_EQ(kill(child, SIGKILL), 0);
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    const auto back = read(path);
    ASSERT_TRUE(back.ok()) << back.status().message();
    const bool second = same(*back, records[1]);
    ASSERT_TRUE(second || same(*back, records[0]));
    ++n_seen[second ? 1 : 0];
  }
  EXPECT_GT(n_seen[0], 0);
  EXPECT_GT(n_seen[1], 0);
}

TEST(PrefixFile, AFullDiskKeepsTheOldFile) {
  const TemporaryFolder folder;
  const std::string path = folder / "a";
  const PrefixRecord record = make_record(40, 1);
  ASSERT_TRUE(write_prefix_file(path, record).ok());
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = signal(SIGXFSZ, SIG_IGN);
  const rlimit small{4096, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const auto written = write_prefix_file(path, make_record(20000, 2));
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  signal(SIGXFSZ, handler);
  EXPECT_EQ(written.status().code(), Code::kIo);
  EXPECT_THAT(written.status().message(), HasSubstr(path));
  EXPECT_EQ(folder.n_files(), 1);
  const auto back = read(path);
  ASSERT_TRUE(back.ok());
  EXPECT_TRUE(same(*back, record));
}

}  // namespace
}  // namespace statepack
