#include "model/attention.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>
#include <vector>

#include "model/activations.hpp"
#include "model/attention_core.hpp"
#include "model/norms.hpp"

namespace statepack {
namespace {

constexpr std::int64_t kBlock = PagedKvCache::kTokens;
constexpr int kTileTokens = 64;  // queries of a prefill task; their scores fill 64 KB

class GatedAttention final : public Mixer {
 public:
  struct Parts {
    int n_heads = 0, n_kv_heads = 0, head_dim = 0;
    Linear q, k, v, out;  ///< rows of q: head_dim of query, then head_dim of gate, head by head
    std::vector<float> q_norm, k_norm;
    float eps = 0;
  };
  GatedAttention(Parts parts, int attention_layer)
      : p_(std::move(parts)),
        layer_(attention_layer),
        dim_(p_.head_dim),
        out_width_(p_.n_heads * dim_),
        kv_width_(p_.n_kv_heads * dim_) {}

  void prefill(const Pass& pass, const Segment& segment, const BlockInput& in, float* y) override;
  Status decode(const Pass& pass, const Batch& batch, const BlockInput& in, float* y) override;

 private:
  struct Rows {
    float *q, *k, *v;  ///< [n, heads, 2 * dim], [n, kv heads, dim] twice
    float* o;          ///< [n, heads, dim]
    float* tiles;      ///< scratch of each worker, tile_floats apart
    std::int64_t tile_floats;
  };
  Rows project(const Pass& pass, const BlockInput& in, int tile_rows) const;
  void place(const Pass& pass, const Rows& rows, std::int64_t r, const PagedKvCache& kv,
             std::int64_t position) const;
  void finish(const Pass& pass, const Rows& rows, float* y) const;
  const float* query(const Rows& rows, std::int64_t r, std::int64_t head) const {
    return rows.q + (r * p_.n_heads + head) * 2 * dim_;
  }
  // Inside its part of a cache block a layer keeps, for each kv head, all keys and then all values.
  float* keys(const PagedKvCache& kv, std::int64_t block, std::int64_t head) const {
    return kv.block(layer_, block) + head * 2 * kBlock * dim_;
  }
  void attend(AttentionTile& tile, const PagedKvCache& kv, std::int64_t head,
              std::int64_t n_visible, int step, std::int64_t n_tokens) const;

  Parts p_;
  int layer_;
  std::int64_t dim_, out_width_, kv_width_;
};

GatedAttention::Rows GatedAttention::project(const Pass& pass, const BlockInput& in,
                                             int tile_rows) const {
  const std::int64_t n = pass.n_rows, H = p_.q.n_in();
  Rows rows;
  rows.q = pass.scratch.take(n * 2 * out_width_);
  rows.k = pass.scratch.take(n * kv_width_);
  rows.v = pass.scratch.take(n * kv_width_);
  rows.o = pass.scratch.take(n * out_width_);
  rows.tile_floats = AttentionTile::scratch_floats(tile_rows, dim_);
  rows.tiles = pass.scratch.take(rows.tile_floats * pass.threads.n_threads());
  const LinearJob jobs[] = {{&p_.q, in.x, H, n, rows.q, 2 * out_width_},
                            {&p_.k, in.x, H, n, rows.k, kv_width_},
                            {&p_.v, in.x, H, n, rows.v, kv_width_}};
  pass.linear.run(jobs, pass.path, in.make);
  pass.clock.lap(Part::kProjections);
  return rows;
}

// Norms and rotates the queries and keys of row r and writes its keys and values to the cache.
void GatedAttention::place(const Pass& pass, const Rows& rows, std::int64_t r,
                           const PagedKvCache& kv, std::int64_t position) const {
  for (std::int64_t h = 0; h < p_.n_heads; ++h) {
    float* q = rows.q + (r * p_.n_heads + h) * 2 * dim_;
    rms_norm(q, p_.q_norm.data(), dim_, p_.eps, q);
    pass.rope.rotate(r, q);
  }
  for (std::int64_t h = 0; h < p_.n_kv_heads; ++h) {
    float* k = rows.k + r * kv_width_ + h * dim_;
    rms_norm(k, p_.k_norm.data(), dim_, p_.eps, k);
    pass.rope.rotate(r, k);
    float* to = keys(kv, position / kBlock, h) + position % kBlock * dim_;
    std::copy_n(k, dim_, to);
    std::copy_n(rows.v + r * kv_width_ + h * dim_, dim_, to + kBlock * dim_);
  }
}

void GatedAttention::attend(AttentionTile& tile, const PagedKvCache& kv, std::int64_t head,
                            std::int64_t n_visible, int step, std::int64_t n_tokens) const {
  for (std::int64_t at = 0; at < n_tokens; at += kBlock) {
    const float* k = keys(kv, at / kBlock, head);
    const int n = static_cast<int>(std::min(kBlock, n_tokens - at));
    tile.take({k, dim_, k + kBlock * dim_, dim_, n}, n_visible - at, step);
  }
  tile.finish();
}

// Output gates, then the output matrix.
void GatedAttention::finish(const Pass& pass, const Rows& rows, float* y) const {
  pass.clock.lap(Part::kAttention);
  const LinearJob job{&p_.out, rows.o, out_width_, pass.n_rows, y, p_.out.n_out()};
  pass.linear.run({&job, 1}, pass.path, [&](std::int64_t r) {
    for (std::int64_t h = 0; h < p_.n_heads; ++h) {
      times_sigmoid(rows.o + r * out_width_ + h * dim_, query(rows, r, h) + dim_, dim_);
    }
  });
  pass.clock.lap(Part::kProjections);
}

void GatedAttention::prefill(const Pass& pass, const Segment& segment, const BlockInput& in,
                             float* y) {
  const Scratch::Mark mark(pass.scratch);
  const Rows rows = project(pass, in, kTileTokens);
  pass.threads.parallel_for(pass.n_rows, [&](std::int64_t r, int) {
    place(pass, rows, r, segment.kv, segment.position + r);
  });
  const std::int64_t n_tiles = (pass.n_rows + kTileTokens - 1) / kTileTokens;
  const float scale = 1.0F / std::sqrt(static_cast<float>(dim_));
  pass.threads.parallel_for(n_tiles * p_.n_heads, [&](std::int64_t task, int worker) {
    const std::int64_t head = task % p_.n_heads, first = task / p_.n_heads * kTileTokens;
    const int n = static_cast<int>(std::min<std::int64_t>(kTileTokens, pass.n_rows - first));
    AttentionTile tile(n, dim_, dim_, scale, rows.o + first * out_width_ + head * dim_, out_width_,
                       rows.tiles + worker * rows.tile_floats);
    for (int r = 0; r < n; ++r) tile.set_query(r, query(rows, first + r, head));
    const std::int64_t position = segment.position + first;
    attend(tile, segment.kv, head * p_.n_kv_heads / p_.n_heads, position + 1, 1, position + n);
  });
  finish(pass, rows, y);
}

Status GatedAttention::decode(const Pass& pass, const Batch& batch, const BlockInput& in,
                              float* y) {
  const Scratch::Mark mark(pass.scratch);
  const int group = p_.n_heads / p_.n_kv_heads;
  // A token's heads of one key head share a tile; the tokens of a run share one a head.
  const std::int64_t n_in_tile = std::min<std::int64_t>(batch.longest_run, kTileTokens);
  const Rows rows = project(pass, in, std::max(group, static_cast<int>(n_in_tile)));
  const float scale = 1.0F / std::sqrt(static_cast<float>(dim_));
  pass.threads.parallel_for(pass.n_rows, [&](std::int64_t r, int) {
    const auto i = static_cast<std::size_t>(r);
    place(pass, rows, r, *batch.kv[i], batch.positions[i]);
  });
  const std::vector<RowRun> tiles = cut_runs(batch.runs, kTileTokens);
  pass.threads.parallel_for(std::ssize(tiles) * p_.n_kv_heads, [&](std::int64_t task, int worker) {
    const RowRun& of = tiles[static_cast<std::size_t>(task / p_.n_kv_heads)];
    const std::int64_t r = of.first, kv_head = task % p_.n_kv_heads, head = kv_head * group;
    const PagedKvCache& kv = *batch.kv[static_cast<std::size_t>(r)];
    const std::int64_t n_visible = batch.positions[static_cast<std::size_t>(r)] + 1;
    float* const scratch = rows.tiles + worker * rows.tile_floats;
    float* const out = rows.o + r * out_width_ + head * dim_;
    if (of.n == 1) {
      AttentionTile tile(group, dim_, dim_, scale, out, dim_, scratch);
      for (int j = 0; j < group; ++j) tile.set_query(j, query(rows, r, head + j));
      attend(tile, kv, kv_head, n_visible, 0, n_visible);
      return;
    }
    for (int j = 0; j < group; ++j) {
      AttentionTile tile(static_cast<int>(of.n), dim_, dim_, scale, out + j * dim_, out_width_,
                         scratch);
      for (int t = 0; t < of.n; ++t) tile.set_query(t, query(rows, r + t, head + j));
      attend(tile, kv, kv_head, n_visible, 1, n_visible + of.n - 1);
    }
  });
  finish(pass, rows, y);
  return {};
}

}  // namespace

Result<std::unique_ptr<Mixer>> load_gated_attention(Weights& weights, const ModelConfig& config,
                                                    const std::string& prefix,
                                                    int attention_layer) {
  const std::string at = prefix + "self_attn.";
  const std::int64_t H = config.hidden, dim = config.head_dim;
  GatedAttention::Parts p;
  p.n_heads = config.n_heads;
  p.n_kv_heads = config.n_kv_heads;
  p.head_dim = config.head_dim;
  p.eps = config.rms_norm_eps;
  SP_ASSIGN_OR_RETURN(p.q, weights.matrix(at + "q_proj.weight", 2 * p.n_heads * dim, H));
  SP_ASSIGN_OR_RETURN(p.k, weights.matrix(at + "k_proj.weight", p.n_kv_heads * dim, H));
  SP_ASSIGN_OR_RETURN(p.v, weights.matrix(at + "v_proj.weight", p.n_kv_heads * dim, H));
  SP_ASSIGN_OR_RETURN(p.out, weights.matrix(at + "o_proj.weight", H, p.n_heads * dim));
  SP_ASSIGN_OR_RETURN(p.q_norm, weights.norm(at + "q_norm.weight", dim, true));
  SP_ASSIGN_OR_RETURN(p.k_norm, weights.norm(at + "k_norm.weight", dim, true));
  return std::unique_ptr<Mixer>(new GatedAttention(std::move(p), attention_layer));
}

}  // namespace statepack
