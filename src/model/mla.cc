#include "model/mla.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "model/attention_core.hpp"
#include "model/norms.hpp"

namespace statepack {
namespace {

constexpr std::int64_t kBlock = PagedKvCache::kTokens;
constexpr int kTileTokens = 64;
constexpr int kTileHeads = 8;  // heads of one decode task; they read the same latents

// q = W_q x, a head's [q_n | q_r];  a = W_kva x;  c = RMSNorm(a[0:rank]), k_r = a[rank:].
// The cache keeps [c | k_r] of a token.
//   expanded   k_h = [W_UK,h c | k_r], v_h = W_UV,h c           (prefill: work shared by many
//   queries) absorbed   q'_h = W_UK,h^T q_n; score = q'_h c + q_r k_r; o_h = W_UV,h (sum p c)
//   (decode)
class Mla final : public Mixer {
 public:
  struct Parts {
    std::int64_t n_heads = 0, rank = 0, nope = 0, rope = 0, v_dim = 0;
    Linear q, kv_a, kv_b, out;
    std::vector<float> kv_a_norm;
    float eps = 0;
    std::vector<Linear> uk_t;  ///< W_UK,h^T [rank, nope] of each head
    std::vector<Linear> uv;    ///< W_UV,h [v_dim, rank] of each head
    std::unique_ptr<std::byte[]> uk_t_data;
  };
  Mla(Parts parts, int attention_layer)
      : p_(std::move(parts)),
        layer_(attention_layer),
        q_dim_(p_.nope + p_.rope),
        width_(p_.rank + p_.rope),
        scale_(1.0F / std::sqrt(static_cast<float>(q_dim_))) {}

  void prefill(const Pass& pass, const Segment& segment, const BlockInput& in, float* y) override;
  Status decode(const Pass& pass, const Batch& batch, const BlockInput& in, float* y) override;

 private:
  struct Rows {
    float* q;  ///< [n, heads, nope + rope]
    float* a;  ///< [n, rank + rope]
    float* o;  ///< [n, heads, v_dim]
  };
  Rows project(const Pass& pass, const BlockInput& in) const;
  void place(const Rows& rows, std::int64_t r, const PagedKvCache& kv, std::int64_t position) const;
  void finish(const Pass& pass, const Rows& rows, float* y) const;

  Parts p_;
  int layer_;
  std::int64_t q_dim_, width_;
  float scale_;
};

Mla::Rows Mla::project(const Pass& pass, const BlockInput& in) const {
  const std::int64_t n = pass.n_rows, H = p_.q.n_in();
  Rows rows;
  rows.q = pass.scratch.take(n * p_.n_heads * q_dim_);
  rows.a = pass.scratch.take(n * width_);
  rows.o = pass.scratch.take(n * p_.n_heads * p_.v_dim);
  const LinearJob jobs[] = {{&p_.q, in.x, H, n, rows.q, p_.n_heads * q_dim_},
                            {&p_.kv_a, in.x, H, n, rows.a, width_}};
  pass.linear.run(jobs, pass.path, in.make);
  pass.clock.lap(Part::kProjections);
  return rows;
}

void Mla::place(const Rows& rows, std::int64_t r, const PagedKvCache& kv,
                std::int64_t position) const {
  const float* a = rows.a + r * width_;
  float* to = kv.block(layer_, position / kBlock) + position % kBlock * width_;
  rms_norm(a, p_.kv_a_norm.data(), p_.rank, p_.eps, to);
  std::copy_n(a + p_.rank, p_.rope, to + p_.rank);
}

void Mla::finish(const Pass& pass, const Rows& rows, float* y) const {
  pass.clock.lap(Part::kAttention);
  const std::int64_t width = p_.n_heads * p_.v_dim;
  const LinearJob job{&p_.out, rows.o, width, pass.n_rows, y, p_.out.n_out()};
  pass.linear.run({&job, 1}, pass.path);
  pass.clock.lap(Part::kProjections);
}

void Mla::prefill(const Pass& pass, const Segment& segment, const BlockInput& in, float* y) {
  const Scratch::Mark mark(pass.scratch);
  const Rows rows = project(pass, in);
  pass.threads.parallel_for(
      pass.n_rows, [&](std::int64_t r, int) { place(rows, r, segment.kv, segment.position + r); });

  // Block by block, so that expanded keys never exist for the whole context. The tiles of all heads
  // wait for the next block.
  const std::int64_t expanded = p_.nope + p_.v_dim, kv_width = p_.n_heads * expanded;
  float* kv = pass.scratch.take(kBlock * kv_width);
  float* k = pass.scratch.take(p_.n_heads * kBlock * q_dim_);
  const std::int64_t n_tiles = (pass.n_rows + kTileTokens - 1) / kTileTokens;
  const std::int64_t tile_floats = AttentionTile::scratch_floats(kTileTokens, q_dim_);
  float* tile_scratch = pass.scratch.take(n_tiles * p_.n_heads * tile_floats);
  std::vector<AttentionTile> tiles;
  for (std::int64_t task = 0; task < n_tiles * p_.n_heads; ++task) {
    const std::int64_t head = task % p_.n_heads, first = task / p_.n_heads * kTileTokens;
    const int n = static_cast<int>(std::min<std::int64_t>(kTileTokens, pass.n_rows - first));
    tiles.emplace_back(n, q_dim_, p_.v_dim, scale_, rows.o + (first * p_.n_heads + head) * p_.v_dim,
                       p_.n_heads * p_.v_dim, tile_scratch + task * tile_floats);
    for (int r = 0; r < n; ++r) {
      tiles.back().set_query(r, rows.q + ((first + r) * p_.n_heads + head) * q_dim_);
    }
  }
  const std::int64_t n_tokens = segment.position + pass.n_rows;
  for (std::int64_t at = 0; at < n_tokens; at += kBlock) {
    const std::int64_t n = std::min(kBlock, n_tokens - at);
    const float* latent = segment.kv.block(layer_, at / kBlock);
    const LinearJob job{&p_.kv_b, latent, width_, n, kv, kv_width};
    pass.linear.run({&job, 1}, pass.path);
    pass.threads.parallel_for(n, [&](std::int64_t t, int) {
      for (std::int64_t h = 0; h < p_.n_heads; ++h) {
        float* to = k + (h * kBlock + t) * q_dim_;
        std::copy_n(kv + t * kv_width + h * expanded, p_.nope, to);
        std::copy_n(latent + t * width_ + p_.rank, p_.rope, to + p_.nope);
      }
    });
    pass.threads.parallel_for(n_tiles * p_.n_heads, [&](std::int64_t task, int) {
      const std::int64_t head = task % p_.n_heads, first = task / p_.n_heads * kTileTokens;
      tiles[static_cast<std::size_t>(task)].take(
          {k + head * kBlock * q_dim_, q_dim_, kv + head * expanded + p_.nope, kv_width,
           static_cast<int>(n)},
          segment.position + first + 1 - at, 1);
    });
  }
  for (AttentionTile& tile : tiles) tile.finish();
  finish(pass, rows, y);
}

Status Mla::decode(const Pass& pass, const Batch& batch, const BlockInput& in, float* y) {
  const Scratch::Mark mark(pass.scratch);
  const std::int64_t n = pass.n_rows, heads = p_.n_heads;
  const Rows rows = project(pass, in);
  // [q' | q_r] of every head, and the attended latents.
  float* q = pass.scratch.take(n * heads * width_);
  float* latent = pass.scratch.take(n * heads * p_.rank);
  std::vector<LinearJob> jobs;
  for (std::int64_t h = 0; h < heads; ++h) {
    jobs.push_back({&p_.uk_t[static_cast<std::size_t>(h)], rows.q + h * q_dim_, heads * q_dim_, n,
                    q + h * width_, heads * width_});
  }
  pass.linear.run(jobs, pass.path);
  pass.threads.parallel_for(n, [&](std::int64_t r, int) {
    const auto i = static_cast<std::size_t>(r);
    place(rows, r, *batch.kv[i], batch.positions[i]);
    for (std::int64_t h = 0; h < heads; ++h) {
      std::copy_n(rows.q + (r * heads + h) * q_dim_ + p_.nope, p_.rope,
                  q + (r * heads + h) * width_ + p_.rank);
    }
  });
  const auto n_in_tile = static_cast<int>(std::min<std::int64_t>(batch.longest_run, kTileTokens));
  const std::int64_t tile_floats =
      AttentionTile::scratch_floats(std::max(kTileHeads, n_in_tile), width_);
  float* tile_scratch = pass.scratch.take(tile_floats * pass.threads.n_threads());
  const std::vector<RowRun> tiles = cut_runs(batch.runs, kTileTokens);
  const std::int64_t n_groups = (heads + kTileHeads - 1) / kTileHeads;
  const auto attend = [&](AttentionTile& tile, std::size_t row, int step, std::int64_t n_tokens) {
    for (std::int64_t at = 0; at < n_tokens; at += kBlock) {
      const float* block = batch.kv[row]->block(layer_, at / kBlock);
      const int n_keys = static_cast<int>(std::min(kBlock, n_tokens - at));
      tile.take({block, width_, block, width_, n_keys}, batch.positions[row] + 1 - at, step);
    }
    tile.finish();
  };
  pass.threads.parallel_for(std::ssize(tiles) * n_groups, [&](std::int64_t task, int worker) {
    const RowRun& of = tiles[static_cast<std::size_t>(task / n_groups)];
    const std::int64_t r = of.first, first = task % n_groups * kTileHeads;
    const auto row = static_cast<std::size_t>(r);
    const int n_heads = static_cast<int>(std::min<std::int64_t>(kTileHeads, heads - first));
    float* const scratch = tile_scratch + worker * tile_floats;
    float* const out = latent + (r * heads + first) * p_.rank;
    const float* const of_head = q + (r * heads + first) * width_;
    if (of.n == 1) {
      AttentionTile tile(n_heads, width_, p_.rank, scale_, out, p_.rank, scratch);
      for (int h = 0; h < n_heads; ++h) tile.set_query(h, of_head + h * width_);
      attend(tile, row, 0, batch.positions[row] + 1);
      return;
    }
    for (int h = 0; h < n_heads; ++h) {
      AttentionTile tile(static_cast<int>(of.n), width_, p_.rank, scale_, out + h * p_.rank,
                         heads * p_.rank, scratch);
      for (int t = 0; t < of.n; ++t) tile.set_query(t, of_head + (t * heads + h) * width_);
      attend(tile, row, 1, batch.positions[row] + of.n);
    }
  });
  jobs.clear();
  for (std::int64_t h = 0; h < heads; ++h) {
    jobs.push_back({&p_.uv[static_cast<std::size_t>(h)], latent + h * p_.rank, heads * p_.rank, n,
                    rows.o + h * p_.v_dim, heads * p_.v_dim});
  }
  pass.linear.run(jobs, pass.path);
  finish(pass, rows, y);
  return {};
}

}  // namespace

Result<std::unique_ptr<Mixer>> load_mla(Weights& weights, const ModelConfig& config,
                                        const std::string& prefix, int attention_layer) {
  const std::string at = prefix + "self_attn.";
  const std::int64_t H = config.hidden;
  Mla::Parts p;
  p.n_heads = config.n_heads;
  p.rank = config.kv_lora_rank;
  p.nope = config.qk_nope_head_dim;
  p.rope = config.qk_rope_head_dim;
  p.v_dim = config.v_head_dim;
  p.eps = config.kv_a_norm_eps;
  const std::int64_t expanded = p.nope + p.v_dim;
  SP_ASSIGN_OR_RETURN(p.q, weights.matrix(at + "q_proj.weight", p.n_heads * (p.nope + p.rope), H));
  SP_ASSIGN_OR_RETURN(p.kv_a, weights.matrix(at + "kv_a_proj_with_mqa.weight", p.rank + p.rope, H));
  SP_ASSIGN_OR_RETURN(p.kv_b,
                      weights.matrix(at + "kv_b_proj.weight", p.n_heads * expanded, p.rank));
  SP_ASSIGN_OR_RETURN(p.out, weights.matrix(at + "o_proj.weight", H, p.n_heads * p.v_dim));
  SP_ASSIGN_OR_RETURN(p.kv_a_norm, weights.norm(at + "kv_a_layernorm.weight", p.rank, false));

  // Absorption multiplies by W_UK transposed: the one weight that is copied, as stored, so that
  // decode reads rows.
  const auto size = static_cast<std::int64_t>(dtype_bytes(p.kv_b.dtype()));
  p.uk_t_data.reset(new std::byte[static_cast<std::size_t>(p.n_heads * p.nope * p.rank * size)]);
  for (std::int64_t h = 0; h < p.n_heads; ++h) {
    std::byte* to = p.uk_t_data.get() + h * p.nope * p.rank * size;
    for (std::int64_t i = 0; i < p.nope; ++i) {
      const std::byte* from = p.kv_b.row(h * expanded + i);
      for (std::int64_t c = 0; c < p.rank; ++c) {
        std::memcpy(to + (c * p.nope + i) * size, from + c * size, static_cast<std::size_t>(size));
      }
    }
    p.uk_t.push_back(weights.for_products(Linear(p.kv_b.dtype(), to, p.rank, p.nope)));
    p.uv.push_back(p.kv_b.rows(h * expanded + p.nope, p.v_dim));
  }
  return std::unique_ptr<Mixer>(new Mla(std::move(p), attention_layer));
}

}  // namespace statepack
