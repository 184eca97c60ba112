#include "pool/prefix_cache.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <random>
#include <utility>

#include "base/check.hpp"

namespace statepack {

// Nodes that lose their snapshot stay while something hangs below them, and are not joined with an
// only child: the tokens and rows would be the same, and the copying would buy back a few hundred
// bytes.
struct PrefixCache::Node {
  Node* parent = nullptr;
  std::map<std::int32_t, std::unique_ptr<Node>> children;  ///< by the first token of their edge
  std::vector<std::int32_t> edge;                          ///< empty in the root alone
  std::vector<std::byte> rows;                             ///< of the edge's tokens
  std::uint64_t reader = Lineage::kCold;                   ///< of the edge's tokens
  std::int64_t depth = 0;                                  ///< tokens of the whole prefix
  std::shared_ptr<const Snapshot> snapshot;
  bool from_file = false;              ///< the snapshot is, and its values were not looked at
  std::list<Node*>::iterator recency;  ///< only with a snapshot, as the next
  std::chrono::steady_clock::time_point used;
  int n_pins = 0;

  std::int64_t n_snapshot_bytes() const {
    return snapshot == nullptr ? 0 : std::ssize(snapshot->bytes);
  }
};

namespace {

constexpr std::int64_t kMaxBlockTokens = std::int64_t{1} << 30;
/// What a node costs beside tokens, rows and snapshot: itself, its places in map and list.
constexpr std::int64_t kNodeBytes = 320;

std::int64_t n_common(std::span<const std::int32_t> a, std::span<const std::int32_t> b) {
  const auto [end, unused] = std::mismatch(a.begin(), a.end(), b.begin(), b.end());
  return end - a.begin();
}

}  // namespace

Result<PrefixMode> parse_prefix_mode(std::string_view name) {
  for (const PrefixMode mode : {PrefixMode::kOff, PrefixMode::kBlocks, PrefixMode::kTurns}) {
    if (name == prefix_mode_name(mode)) return mode;
  }
  std::string message = "the prefix cache has no mode '";
  message.append(name).append("'; use off, blocks or turns");
  return Status(Code::kInvalidArgument, std::move(message));
}

std::string_view prefix_mode_name(PrefixMode mode) {
  switch (mode) {
    case PrefixMode::kOff:
      return "off";
    case PrefixMode::kBlocks:
      return "blocks";
    case PrefixMode::kTurns:
      return "turns";
  }
  return "off";
}

std::uint64_t Lineage::new_reader() {
  static const std::uint64_t base = [] {
    std::random_device device;
    return std::uint64_t{device()} << 32 | device();
  }();
  static std::atomic<std::uint64_t> count{0};
  std::uint64_t number = kCold;
  while (number == kCold) {
    // The finaliser of splitmix64: numbers of one process never meet, those of two hardly ever.
    number = base + 0x9E3779B97F4A7C15ULL * ++count;
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9ULL;
    number = (number ^ (number >> 27)) * 0x94D049BB133111EBULL;
    number ^= number >> 31;
  }
  return number;
}

void Lineage::extend(std::int64_t end, std::uint64_t reader) {
  if (end <= n_tokens()) return;
  if (!runs_.empty() && runs_.back().reader == reader) {
    runs_.back().end = end;
  } else {
    runs_.push_back({end, reader});
  }
}

Lineage::Run Lineage::at(std::int64_t position) const {
  const auto run = std::upper_bound(runs_.begin(), runs_.end(), position,
                                    [](std::int64_t p, const Run& r) { return p < r.end; });
  SP_CHECK(run != runs_.end(), "the position lies inside the lineage");
  return *run;
}

Result<std::unique_ptr<PrefixCache>> PrefixCache::create(const PrefixCacheConfig& config,
                                                         std::int64_t row_bytes) {
  if (config.block_tokens < 1 || config.block_tokens > kMaxBlockTokens) {
    return Status(Code::kInvalidArgument,
                  "a prefix cache with a block end every " + std::to_string(config.block_tokens) +
                      " tokens cannot be; use 1 to " + std::to_string(kMaxBlockTokens));
  }
  if (config.max_bytes < 0 || config.max_state_bytes < 0 || row_bytes < 0) {
    return Status(Code::kInvalidArgument,
                  "a prefix cache of " + std::to_string(config.max_bytes) + " bytes, " +
                      std::to_string(config.max_state_bytes) + " of states, with rows of " +
                      std::to_string(row_bytes) + " cannot be; none may be negative");
  }
  return std::unique_ptr<PrefixCache>(new PrefixCache(config, row_bytes));
}

PrefixCache::PrefixCache(const PrefixCacheConfig& config, std::int64_t row_bytes)
    : config_(config), row_bytes_(row_bytes), root_(std::make_unique<Node>()) {
  if (config_.max_state_bytes == 0) config_.max_state_bytes = config_.max_bytes;
  stats_.max_bytes = config_.max_bytes;
  stats_.max_state_bytes = config_.max_state_bytes;
}

PrefixCache::~PrefixCache() { SP_CHECK(stats_.n_pinned == 0, "a hit outlives its cache"); }

PrefixCache::Hit::Hit(PrefixCache* cache, Node* node) : cache_(cache), node_(node) {
  if (node_ == nullptr) return;
  ++node_->n_pins;
  ++cache_->stats_.n_pinned;
}

PrefixCache::Hit::~Hit() { release(); }

PrefixCache::Hit::Hit(Hit&& other) noexcept
    : cache_(other.cache_), node_(std::exchange(other.node_, nullptr)) {}

PrefixCache::Hit& PrefixCache::Hit::operator=(Hit&& other) noexcept {
  std::swap(cache_, other.cache_);
  std::swap(node_, other.node_);  // the other's destructor unpins what we had
  return *this;
}

void PrefixCache::Hit::release() {
  if (node_ == nullptr) return;
  --cache_->stats_.n_pinned;
  Node* const node = std::exchange(node_, nullptr);
  if (--node->n_pins == 0) cache_->prune(node);
}

std::int64_t PrefixCache::Hit::n_tokens() const { return node_->depth; }

const Snapshot& PrefixCache::Hit::snapshot() const { return *node_->snapshot; }

bool PrefixCache::Hit::from_file() const { return node_->from_file; }

void PrefixCache::Hit::set_checked() { node_->from_file = false; }

std::vector<const PrefixCache::Node*> PrefixCache::Hit::path() const {
  std::vector<const Node*> nodes;
  for (const Node* node = node_; node->parent != nullptr; node = node->parent) {
    nodes.push_back(node);
  }
  std::reverse(nodes.begin(), nodes.end());
  return nodes;
}

PrefixRecord PrefixCache::Hit::record() const {
  PrefixRecord record;
  record.block_tokens = cache_->config_.block_tokens;
  record.row_bytes = cache_->row_bytes_;
  record.rows.reserve(static_cast<std::size_t>(n_tokens() * cache_->row_bytes_));
  for (const Node* node : path()) {
    record.tokens.insert(record.tokens.end(), node->edge.begin(), node->edge.end());
    record.rows.insert(record.rows.end(), node->rows.begin(), node->rows.end());
    record.lineage.extend(node->depth, node->reader);
    if (node->snapshot != nullptr) record.snapshots.push_back(node->snapshot);
  }
  return record;
}

Lineage PrefixCache::Hit::lineage() const {
  Lineage lineage;
  for (const Node* node : path()) lineage.extend(node->depth, node->reader);
  return lineage;
}

std::vector<PrefixCache::Hit::Rows> PrefixCache::Hit::rows() const {
  std::vector<Rows> rows;
  for (const Node* node : path()) rows.push_back({std::ssize(node->edge), node->rows});
  return rows;
}

PrefixCache::Place PrefixCache::walk(std::span<const std::int32_t> tokens,
                                     const std::function<void(Node*)>& passed) const {
  Place place{root_.get(), nullptr, 0};
  while (place.node->depth < std::ssize(tokens)) {
    const auto rest = tokens.subspan(static_cast<std::size_t>(place.node->depth));
    const auto child = place.node->children.find(rest.front());
    if (child == place.node->children.end()) break;
    const std::int64_t n = n_common(child->second->edge, rest);
    if (n < std::ssize(child->second->edge)) {
      place.inside = child->second.get();
      place.n_inside = n;
      break;
    }
    place.node = child->second.get();
    if (passed) passed(place.node);
  }
  return place;
}

PrefixCache::Node* PrefixCache::deepest(std::span<const std::int32_t> tokens,
                                        std::int64_t max_tokens) const {
  Node* best = nullptr;
  walk(tokens, [&](Node* node) {
    if (node->snapshot != nullptr && node->depth <= max_tokens) best = node;
  });
  return best;
}

PrefixCache::Node* PrefixCache::exactly(std::span<const std::int32_t> tokens) const {
  const Place place = walk(tokens, nullptr);
  return place.node->depth == std::ssize(tokens) && place.node->snapshot != nullptr ? place.node
                                                                                    : nullptr;
}

void PrefixCache::touch(Node* node) {
  recency_.splice(recency_.end(), recency_, node->recency);
  node->used = std::chrono::steady_clock::now();
}

PrefixCache::Hit PrefixCache::find(std::span<const std::int32_t> tokens, std::int64_t max_tokens) {
  Node* const node = deepest(tokens, max_tokens);
  ++stats_.queries;
  stats_.query_tokens += std::ssize(tokens);
  if (node == nullptr) return {};
  ++stats_.hits;
  stats_.hit_tokens += node->depth;
  touch(node);
  return {this, node};
}

PrefixCache::Hit PrefixCache::peek(std::span<const std::int32_t> tokens, std::int64_t max_tokens) {
  return {this, deepest(tokens, max_tokens)};
}

std::int64_t PrefixCache::match(std::span<const std::int32_t> tokens,
                                std::int64_t max_tokens) const {
  const Node* node = deepest(tokens, max_tokens);
  return node == nullptr ? 0 : node->depth;
}

void PrefixCache::discard(Hit hit) {
  Node* const node = hit.node_;
  --stats_.hits;
  stats_.hit_tokens -= node->depth;
  ++stats_.corrupt;
  if (node->n_pins == 1) drop_snapshot(node);  // unpinning prunes it
}

bool PrefixCache::refresh(std::span<const std::int32_t> tokens) {
  Node* const node = exactly(tokens);
  if (node != nullptr) touch(node);
  return node != nullptr;
}

PrefixKept PrefixCache::insert(std::span<const std::int32_t> tokens, const Lineage& lineage,
                               std::shared_ptr<const Snapshot> snapshot, const RowSource& rows) {
  const std::int64_t n_tokens = std::ssize(tokens);
  SP_CHECK(n_tokens > 0 && snapshot->n_tokens == n_tokens && lineage.n_tokens() == n_tokens,
           "a snapshot stands at the end of its tokens");
  // The place must have been read as these tokens were.
  const auto is_ours = [&](const Node* node, std::int64_t n) {
    const std::int64_t begin = node->depth - std::ssize(node->edge);
    const Lineage::Run run = lineage.at(begin);
    return run.reader == node->reader && run.end >= begin + n;
  };
  bool ours = true;
  Place place =
      walk(tokens, [&](Node* node) { ours = ours && is_ours(node, std::ssize(node->edge)); });
  if (place.inside != nullptr) ours = ours && is_ours(place.inside, place.n_inside);
  if (!ours) return PrefixKept::kOtherReading;
  if (place.node->depth == n_tokens && place.node->snapshot != nullptr) {
    touch(place.node);
    return PrefixKept::kAlready;
  }

  const std::int64_t n_known = place.node->depth + place.n_inside;
  std::int64_t n_new_nodes = place.inside != nullptr ? 1 : 0;
  for (std::int64_t at = n_known; at < n_tokens; at = lineage.at(at).end) ++n_new_nodes;
  const std::int64_t state_bytes = std::ssize(snapshot->bytes);
  const std::int64_t needed =
      state_bytes + n_new_nodes * kNodeBytes +
      (n_tokens - n_known) * (row_bytes_ + static_cast<std::int64_t>(sizeof(std::int32_t)));
  {
    // Whatever goes now, the place stays.
    const Hit pin(this, place.inside != nullptr ? place.inside : place.node);
    if (!make_room(needed, state_bytes)) return PrefixKept::kNoRoom;
    if (place.inside != nullptr) place.node = split(place.inside, place.n_inside);
    for (std::int64_t at = n_known; at < n_tokens;) {
      const Lineage::Run run = lineage.at(at);
      place.node = append(
          place.node,
          tokens.subspan(static_cast<std::size_t>(at), static_cast<std::size_t>(run.end - at)),
          run.reader, rows);
      at = run.end;
    }
    Node* const node = place.node;
    node->snapshot = std::move(snapshot);
    node->from_file = node->snapshot->from_file;
    node->recency = recency_.insert(recency_.end(), node);
    node->used = std::chrono::steady_clock::now();
    ++stats_.n_snapshots;
    ++stats_.insertions;
    stats_.state_bytes += node->n_snapshot_bytes();
    stats_.bytes += node->n_snapshot_bytes();
  }
  return PrefixKept::kNew;
}

PrefixCache::Node* PrefixCache::split(Node* node, std::int64_t n) {
  Node* const parent = node->parent;
  auto& place = parent->children.at(node->edge.front());
  auto upper = std::make_unique<Node>();
  upper->parent = parent;
  upper->reader = node->reader;
  upper->depth = parent->depth + n;
  const auto edge_at = node->edge.begin() + n;
  upper->edge.assign(node->edge.begin(), edge_at);
  node->edge.erase(node->edge.begin(), edge_at);
  const auto row_at = node->rows.begin() + n * row_bytes_;
  upper->rows.assign(node->rows.begin(), row_at);
  node->rows.erase(node->rows.begin(), row_at);
  node->rows.shrink_to_fit();
  node->parent = upper.get();
  upper->children.emplace(node->edge.front(), std::move(place));
  place = std::move(upper);
  ++stats_.n_nodes;
  stats_.bytes += kNodeBytes;
  return place.get();
}

PrefixCache::Node* PrefixCache::append(Node* parent, std::span<const std::int32_t> edge,
                                       std::uint64_t reader, const RowSource& rows) {
  auto node = std::make_unique<Node>();
  node->parent = parent;
  node->reader = reader;
  node->depth = parent->depth + std::ssize(edge);
  node->edge.assign(edge.begin(), edge.end());
  node->rows.resize(static_cast<std::size_t>(std::ssize(edge) * row_bytes_));
  rows(parent->depth, node->depth, node->rows.data());
  ++stats_.n_nodes;
  stats_.row_bytes += std::ssize(node->rows);
  stats_.bytes += edge_bytes(*node);
  return parent->children.emplace(edge.front(), std::move(node)).first->second.get();
}

std::int64_t PrefixCache::edge_bytes(const Node& node) const {
  return kNodeBytes + std::ssize(node.rows) + std::ssize(std::as_bytes(std::span(node.edge)));
}

bool PrefixCache::make_room(std::int64_t n_bytes, std::int64_t n_state_bytes) {
  if (n_bytes > config_.max_bytes || n_state_bytes > config_.max_state_bytes) return false;
  for (auto next = recency_.begin();
       stats_.bytes + n_bytes > config_.max_bytes ||
       stats_.state_bytes + n_state_bytes > config_.max_state_bytes;) {
    if (next == recency_.end()) return false;
    Node* const node = *next++;
    if (node->n_pins > 0) continue;
    drop_snapshot(node);
    ++stats_.evictions;
    prune(node);
  }
  return true;
}

void PrefixCache::drop_snapshot(Node* node) {
  stats_.state_bytes -= node->n_snapshot_bytes();
  stats_.bytes -= node->n_snapshot_bytes();
  --stats_.n_snapshots;
  recency_.erase(node->recency);
  node->snapshot.reset();
}

void PrefixCache::prune(Node* node) {
  while (node->parent != nullptr && node->snapshot == nullptr && node->children.empty() &&
         node->n_pins == 0) {
    Node* const parent = node->parent;
    --stats_.n_nodes;
    stats_.row_bytes -= std::ssize(node->rows);
    stats_.bytes -= edge_bytes(*node);
    // Out of the map first: the key is read from the node that goes.
    const auto place = parent->children.find(node->edge.front());
    parent->children.erase(place);
    node = parent;
  }
}

bool PrefixCache::erase(std::span<const std::int32_t> tokens) {
  Node* const node = exactly(tokens);
  if (node == nullptr || node->n_pins > 0) return false;
  drop_snapshot(node);
  prune(node);
  return true;
}

void PrefixCache::clear() {
  for (auto next = recency_.begin(); next != recency_.end();) {
    Node* const node = *next++;
    if (node->n_pins > 0) continue;
    drop_snapshot(node);
    prune(node);
  }
}

std::vector<PrefixCache::Hit> PrefixCache::longest() {
  std::vector<Hit> hits;
  for (Node* node : recency_) {
    if (node->children.empty()) hits.push_back(Hit(this, node));
  }
  return hits;
}

std::vector<PrefixNodeView> PrefixCache::outline(std::int64_t max_nodes) const {
  const auto now = std::chrono::steady_clock::now();
  std::vector<PrefixNodeView> views;
  std::vector<std::pair<const Node*, int>> todo{{root_.get(), -1}};  // with their levels
  while (!todo.empty()) {
    const auto [node, level] = todo.back();
    todo.pop_back();
    if (node->parent != nullptr) {
      if (std::ssize(views) == max_nodes) break;
      PrefixNodeView& view = views.emplace_back();
      view.level = level;
      view.n_tokens = node->depth;
      view.n_own_tokens = std::ssize(node->edge);
      view.state_bytes = node->n_snapshot_bytes();
      view.n_pins = node->n_pins;
      if (node->snapshot != nullptr) {
        view.age_s = std::chrono::duration<double>(now - node->used).count();
      }
    }
    for (auto child = node->children.rbegin(); child != node->children.rend(); ++child) {
      todo.emplace_back(child->second.get(), level + 1);
    }
  }
  return views;
}

Status PrefixCache::check() const {
  PrefixCacheStats found;
  std::string problem;
  const auto fail = [&](const Node* node, const std::string& what) {
    if (problem.empty()) problem = "node of " + std::to_string(node->depth) + " tokens: " + what;
  };
  std::vector<const Node*> todo{root_.get()};
  while (!todo.empty()) {
    const Node* node = todo.back();
    todo.pop_back();
    found.n_pinned += node->n_pins;
    for (const auto& [token, child] : node->children) {
      if (child->parent != node) fail(child.get(), "its parent is another");
      if (child->edge.empty() || child->edge.front() != token) fail(child.get(), "filed wrongly");
      if (child->depth != node->depth + std::ssize(child->edge)) fail(child.get(), "wrong depth");
      todo.push_back(child.get());
    }
    if (node->parent == nullptr) continue;
    ++found.n_nodes;
    found.row_bytes += std::ssize(node->rows);
    found.bytes += edge_bytes(*node) + node->n_snapshot_bytes();
    if (std::ssize(node->rows) != std::ssize(node->edge) * row_bytes_) fail(node, "rows missing");
    if (node->snapshot == nullptr) {
      if (node->children.empty() && node->n_pins == 0) fail(node, "of no use to anybody");
      continue;
    }
    ++found.n_snapshots;
    found.state_bytes += node->n_snapshot_bytes();
    if (node->snapshot->n_tokens != node->depth) fail(node, "a snapshot of another depth");
    if (*node->recency != node) fail(node, "its place in the order of use is another's");
  }
  if (found.n_nodes != stats_.n_nodes || found.n_snapshots != stats_.n_snapshots ||
      found.state_bytes != stats_.state_bytes || found.row_bytes != stats_.row_bytes ||
      found.bytes != stats_.bytes || found.n_pinned != stats_.n_pinned ||
      found.n_snapshots != std::ssize(recency_)) {
    fail(root_.get(), "the sums over all nodes are not those kept");
  }
  if (stats_.bytes > config_.max_bytes || stats_.state_bytes > config_.max_state_bytes) {
    fail(root_.get(), "more bytes than allowed");
  }
  return problem.empty() ? Status() : Status(Code::kCorrupt, problem);
}

}  // namespace statepack
