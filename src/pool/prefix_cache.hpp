// Prefix cache: what sequences have read before, so that nobody reads it again.
//
// A radix tree over token ids. A node stands for the prefix that its path from the root spells; its
// edge owns the attention rows of its own tokens, once, for all prefixes below. Nodes where
// somebody stopped own a snapshot of the recurrent state too: a recurrent state cannot be cut back,
// so a prefix can be resumed only there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "pool/pool.hpp"

namespace statepack {

/// Where snapshots are taken.
enum class PrefixMode : std::uint8_t {
  kOff,
  kBlocks,  ///< at multiples of block_tokens inside prompts: a hit is bit-equal to a cold read
  /// There, and where a prompt and where a reply end: the next turn of a chat reads only what is
  /// new. Such a hit is bit-equal to a sequence that had never stopped, and not to a cold read of
  /// the whole conversation, whose reply would have been read as a prompt.
  kTurns,
};
/// "off", "blocks" or "turns". Errors: kInvalidArgument listing them.
Result<PrefixMode> parse_prefix_mode(std::string_view name);
std::string_view prefix_mode_name(PrefixMode mode);

struct PrefixCacheConfig {
  PrefixMode mode = PrefixMode::kOff;
  /// Tokens between two block ends. Part of the arithmetic: with the cache on, the state of every
  /// prompt passes through the scheme's rounding at each of them, cached or not.
  std::int64_t block_tokens = 256;
  std::int64_t max_bytes = std::int64_t{1} << 30;  ///< snapshots, attention rows and tokens
  std::int64_t max_state_bytes = 0;                ///< snapshots alone; 0: as far as max_bytes goes
};

/// Who read the tokens of a sequence. Tokens alone do not decide the bits of state and attention
/// rows: a reply that was decoded and the same text read as a prompt differ in the last digits.
/// Prefixes of different readings are kept apart, so that a node's state and rows always come from
/// one reading.
class Lineage {
 public:
  /// The reading that every cold prompt gives, whoever reads it.
  static constexpr std::uint64_t kCold = 0;
  struct Run {
    std::int64_t end = 0;  ///< one past the last token of the run
    std::uint64_t reader = kCold;
    bool operator==(const Run&) const = default;
  };
  /// A number that no other sequence has, in this process or in a file.
  static std::uint64_t new_reader();

  std::int64_t n_tokens() const { return runs_.empty() ? 0 : runs_.back().end; }
  const std::vector<Run>& runs() const { return runs_; }
  bool cold() const { return runs_.empty() || (runs_.size() == 1 && runs_[0].reader == kCold); }
  /// The tokens from n_tokens() to `end` were read by `reader`.
  void extend(std::int64_t end, std::uint64_t reader);
  /// The run that holds token `position`. Requires position < n_tokens().
  Run at(std::int64_t position) const;

 private:
  std::vector<Run> runs_;
};

struct PrefixCacheStats {
  std::int64_t n_snapshots = 0, n_nodes = 0;
  std::int64_t state_bytes = 0;  ///< of snapshots
  std::int64_t row_bytes = 0;    ///< of attention rows
  std::int64_t bytes = 0;        ///< both, tokens and bookkeeping: what max_bytes bounds
  std::int64_t max_bytes = 0, max_state_bytes = 0;
  std::int64_t n_pinned = 0;
  std::int64_t queries = 0, hits = 0;
  std::int64_t query_tokens = 0, hit_tokens = 0;
  std::int64_t insertions = 0, evictions = 0;
  std::int64_t corrupt = 0;  ///< snapshots that did not pass their checks when wanted
};

/// A prefix with everything that resuming it takes: what a file holds.
struct PrefixRecord {
  std::vector<std::int32_t> tokens;
  Lineage lineage;                ///< of all tokens
  std::int64_t block_tokens = 0;  ///< PrefixCacheConfig's, where it was read
  std::int64_t row_bytes = 0;     ///< attention rows of one token
  std::vector<std::byte> rows;    ///< of all tokens
  /// Shortest prefix first; the last one is of all tokens.
  std::vector<std::shared_ptr<const Snapshot>> snapshots;
};

/// A node of the tree, for people to look at.
struct PrefixNodeView {
  int level = 0;                  ///< 0: begins at the first token
  std::int64_t n_tokens = 0;      ///< of the whole prefix
  std::int64_t n_own_tokens = 0;  ///< beyond its parent's
  std::int64_t state_bytes = 0;   ///< of its snapshot; 0: it has none
  int n_pins = 0;
  double age_s = 0;  ///< since its snapshot was last used
};

/// What became of a snapshot that was offered.
enum class PrefixKept : std::uint8_t {
  kNew,
  kAlready,       ///< it was there; counts as used
  kNoRoom,        ///< larger than the cache, or all else is in use
  kOtherReading,  ///< another reading has the place
};

/// One thread at a time.
class PrefixCache {
 public:
  /// `row_bytes` attention rows of one token, all layers. Errors: kInvalidArgument (a block of no
  /// tokens, negative sizes).
  static Result<std::unique_ptr<PrefixCache>> create(const PrefixCacheConfig& config,
                                                     std::int64_t row_bytes);
  ~PrefixCache();
  PrefixCache(const PrefixCache&) = delete;
  PrefixCache& operator=(const PrefixCache&) = delete;

 private:
  struct Node;

 public:
  /// A cached prefix in use: nothing of it is evicted while this lives. Must not outlive the cache.
  class Hit {
   public:
    Hit() = default;
    ~Hit();
    Hit(Hit&& other) noexcept;
    Hit& operator=(Hit&& other) noexcept;
    explicit operator bool() const { return node_ != nullptr; }

    std::int64_t n_tokens() const;
    const Snapshot& snapshot() const;
    Lineage lineage() const;
    /// Whether the snapshot came from a file and set_checked() was not called for it yet.
    bool from_file() const;
    void set_checked();  ///< its values were looked at: they are finite
    struct Rows {
      std::int64_t n_tokens;
      std::span<const std::byte> bytes;
    };
    std::vector<Rows> rows() const;  ///< attention rows of all tokens, piece by piece
    PrefixRecord record() const;     ///< a copy of it all, with the snapshots on the way
   private:
    friend class PrefixCache;
    Hit(PrefixCache* cache, Node* node);
    void release();
    std::vector<const Node*> path() const;  ///< without the root
    PrefixCache* cache_ = nullptr;
    Node* node_ = nullptr;
  };

  /// The longest prefix of `tokens` that has a snapshot and at most `max_tokens` tokens; empty when
  /// there is none. Counts as a query and a use.
  Hit find(std::span<const std::int32_t> tokens, std::int64_t max_tokens);
  /// As find(), for those who do not mean to resume it: counts as neither query nor use.
  Hit peek(std::span<const std::int32_t> tokens, std::int64_t max_tokens);
  /// Tokens that find() would find; counts as nothing.
  std::int64_t match(std::span<const std::int32_t> tokens, std::int64_t max_tokens) const;
  /// The prefix was of no use after all: its snapshot goes, and the query counts as a miss.
  void discard(Hit hit);

  /// Writes the attention rows of tokens [begin, end) to `to`.
  using RowSource = std::function<void(std::int64_t begin, std::int64_t end, std::byte* to)>;
  /// Keeps a snapshot of `tokens`; what was not used for longest goes when it does not fit. Rows
  /// are asked for only where the tree has none yet. Requires snapshot->n_tokens == tokens.size()
  /// == lineage.n_tokens() > 0.
  PrefixKept insert(std::span<const std::int32_t> tokens, const Lineage& lineage,
                    std::shared_ptr<const Snapshot> snapshot, const RowSource& rows);
  /// Whether exactly these tokens have a snapshot; counts as a use of it. Saves making one in vain.
  bool refresh(std::span<const std::int32_t> tokens);
  /// Forgets the snapshot of exactly these tokens, and what nothing else needs; true if there was
  /// one that is not in use.
  bool erase(std::span<const std::int32_t> tokens);
  void clear();  ///< all but what is in use
  /// The prefixes that no other one continues, least recently used first.
  std::vector<Hit> longest();

  /// The tree from the root on, children behind their parents; at most `max_nodes` nodes.
  std::vector<PrefixNodeView> outline(std::int64_t max_nodes) const;

  const PrefixCacheConfig& config() const { return config_; }
  std::int64_t row_bytes() const { return row_bytes_; }
  const PrefixCacheStats& stats() const { return stats_; }

  /// Checks every invariant by walking the tree; for tests. Errors: the first that does not hold.
  Status check() const;

 private:
  /// Where tokens end or leave the tree: behind `node`, or n_inside tokens into the edge of its
  /// child `inside`.
  struct Place {
    Node* node;
    Node* inside;
    std::int64_t n_inside;
  };
  PrefixCache(const PrefixCacheConfig& config, std::int64_t row_bytes);
  /// `passed` sees every node on the way that the tokens reach the end of; may be null.
  Place walk(std::span<const std::int32_t> tokens, const std::function<void(Node*)>& passed) const;
  Node* deepest(std::span<const std::int32_t> tokens, std::int64_t max_tokens) const;
  Node* exactly(std::span<const std::int32_t> tokens) const;
  void touch(Node* node);  ///< used now
  /// Cuts the edge of `node` behind n tokens; returns the new upper node.
  Node* split(Node* node, std::int64_t n);
  Node* append(Node* parent, std::span<const std::int32_t> edge, std::uint64_t reader,
               const RowSource& rows);
  std::int64_t edge_bytes(const Node& node) const;
  /// Of n_bytes more, n_state_bytes of them of a snapshot. False when what is in use leaves none.
  bool make_room(std::int64_t n_bytes, std::int64_t n_state_bytes);
  void drop_snapshot(Node* node);
  /// Removes `node` and its ancestors as far as nothing needs them.
  void prune(Node* node);

  PrefixCacheConfig config_;
  std::int64_t row_bytes_;
  std::unique_ptr<Node> root_;
  std::list<Node*> recency_;  ///< nodes with a snapshot, least recently used first
  PrefixCacheStats stats_;
};

}  // namespace statepack
