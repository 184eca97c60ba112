#include "model/model.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "base/progress.hpp"
#include "model/activations.hpp"
#include "model/attention.hpp"
#include "model/block.hpp"
#include "model/delta_block.hpp"
#include "model/mla.hpp"
#include "model/mlp.hpp"
#include "model/moe.hpp"
#include "model/norms.hpp"
#include "model/weights.hpp"

namespace statepack {
namespace {

constexpr std::int64_t kSegment = 512;  // tokens of a prompt that go through the layers together

struct Layer {
  std::vector<float> mixer_norm, ffn_norm;
  std::unique_ptr<Mixer> mixer;
  std::unique_ptr<FeedForward> ffn;
};

Status bad(const std::string& what) { return Status(Code::kInvalidArgument, what); }

class CpuModel final : public Model {
 public:
  CpuModel(ModelConfig config, Weights weights, ThreadPool& threads)
      : config_(std::move(config)),
        weights_(std::move(weights)),
        threads_(threads),
        linear_(threads),
        rope_(config_.rotary_dim, config_.rope_theta) {}

  Status load();

  const ModelConfig& config() const override { return config_; }
  const std::string& fingerprint() const override { return fingerprint_; }
  std::int64_t weight_bytes() const override { return weights_.bytes_used(); }
  std::unique_ptr<KvCache> new_kv_cache() const override {
    return std::make_unique<PagedKvCache>(config_.n_attention_layers(),
                                          config_.kv_floats_per_layer(), config_.kv_run_floats());
  }
  DenseState new_dense_state() const override {
    DenseState state;
    state.S.resize(static_cast<std::size_t>(dense_floats()));
    state.conv.resize(static_cast<std::size_t>(config_.conv_floats()));
    return state;
  }

  Status prefill(std::span<const std::int32_t> tokens, std::int64_t position, DenseState& state,
                 KvCache& kv, int n_logits, float* logits, ChunkObserver* observer) override;
  Status decode(StatePool& pool, std::span<const DecodeRow> rows, float* logits) override;
  Status decode_groups(std::span<const DecodeGroup> groups, float* logits) override;
  void time_parts(PartTimes* times) override { clock_.watch(times); }

 private:
  Result<Layer> load_layer(std::size_t i);
  std::int64_t dense_floats() const {
    return static_cast<std::int64_t>(config_.recurrent_shapes().size()) *
           config_.recurrent.n_values();
  }
  Status check_token(std::int32_t token) const;
  Result<PagedKvCache*> check_cache(KvCache* kv, std::int64_t position) const;
  Status check_pool(StatePool& pool) const;

  Pass pass(GemmPath path, std::int64_t n_rows) {
    return {threads_, linear_, scratch_, rope_, clock_, path, static_cast<int>(n_rows)};
  }
  /// Runs all layers: `mix(mixer, input, result)` calls the mixer its way. h [n_rows, hidden] is
  /// updated but for the last sum, h + y, which is the head's.
  template <class Mix>
  Status run_layers(const Pass& pass, float* h, float* y, Mix mix);
  /// logits [n, vocab] of n rows of h + y.
  void head(const Pass& pass, const float* h, const float* y, std::int64_t n, float* logits);

  ModelConfig config_;
  Weights weights_;
  ThreadPool& threads_;
  LinearRunner linear_;
  Scratch scratch_;
  RopeTable rope_;
  PartClock clock_;
  std::string fingerprint_;
  Linear embedding_, head_;
  std::vector<float> final_norm_;
  std::vector<Layer> layers_;
};

Status CpuModel::load() {
  // Text-only exports and multimodal checkpoints keep the same layers under different prefixes.
  const std::string wanted = config_.tensor_prefix;
  bool found = false;
  for (const std::string& prefix :
       {wanted, std::string("model.language_model."), std::string("model.")}) {
    if (found || !weights_.has(prefix + "embed_tokens.weight")) continue;
    config_.tensor_prefix = prefix;
    found = true;
  }
  if (!found) {
    return Status(Code::kNotFound, weights_.label() + ": there is no tensor '" + wanted +
                                       "embed_tokens.weight'; it is not a complete text model");
  }
  const std::string& prefix = config_.tensor_prefix;
  const bool zero_centred = config_.family != ModelFamily::kKimiLinear;
  SP_ASSIGN_OR_RETURN(
      embedding_, weights_.table(prefix + "embed_tokens.weight", config_.vocab, config_.hidden));
  if (config_.tied_head) {
    head_ = weights_.for_products(embedding_);
  } else {
    SP_ASSIGN_OR_RETURN(head_, weights_.matrix("lm_head.weight", config_.vocab, config_.hidden));
  }
  SP_ASSIGN_OR_RETURN(final_norm_,
                      weights_.norm(prefix + "norm.weight", config_.hidden, zero_centred));
  for (std::size_t i = 0; i < config_.layers.size(); ++i) {
    SP_ASSIGN_OR_RETURN(Layer layer, load_layer(i));
    layers_.push_back(std::move(layer));
  }
  fingerprint_ = statepack::fingerprint(weights_.checkpoint(), config_.canonical());
  return {};
}

Result<Layer> CpuModel::load_layer(std::size_t i) {
  const std::string prefix = config_.tensor_prefix + "layers." + std::to_string(i) + ".";
  const bool zero_centred = config_.family != ModelFamily::kKimiLinear;
  int n_recurrent = 0;
  for (std::size_t j = 0; j < i; ++j) n_recurrent += config_.is_recurrent(j) ? 1 : 0;
  const int n_attention = static_cast<int>(i) - n_recurrent;

  const auto mixer = [&]() -> Result<std::unique_ptr<Mixer>> {
    switch (config_.layers[i].kind) {
      case LayerKind::kGdn:
        return load_gdn(weights_, config_, prefix, n_recurrent);
      case LayerKind::kKda:
        return load_kda(weights_, config_, prefix, n_recurrent);
      case LayerKind::kMla:
        return load_mla(weights_, config_, prefix, n_attention);
      case LayerKind::kGatedAttention:
        break;
    }
    return load_gated_attention(weights_, config_, prefix, n_attention);
  };
  Layer layer;
  SP_ASSIGN_OR_RETURN(layer.mixer_norm, weights_.norm(prefix + "input_layernorm.weight",
                                                      config_.hidden, zero_centred));
  SP_ASSIGN_OR_RETURN(layer.ffn_norm, weights_.norm(prefix + "post_attention_layernorm.weight",
                                                    config_.hidden, zero_centred));
  SP_ASSIGN_OR_RETURN(layer.mixer, mixer());
  SP_ASSIGN_OR_RETURN(layer.ffn, config_.layers[i].moe ? load_moe(weights_, config_, prefix)
                                                       : load_dense_mlp(weights_, config_, prefix));
  return layer;
}

// h += Mixer(N1(h)); h += FFN(N2(h)), layer by layer (docs/models.md 4).
template <class Mix>
Status CpuModel::run_layers(const Pass& pass, float* h, float* y, Mix mix) {
  const std::int64_t H = config_.hidden;
  const Scratch::Mark mark(scratch_);
  float* x = scratch_.take(pass.n_rows * H);
  const auto normed = [&](const std::vector<float>& scale, bool add_y) -> RowMaker {
    return [=, this, s = scale.data()](std::int64_t r) {
      if (add_y) add(h + r * H, y + r * H, H);
      rms_norm(h + r * H, s, H, config_.rms_norm_eps, x + r * H);
    };
  };
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    Layer& layer = layers_[i];
    const RowMaker mixer_input = normed(layer.mixer_norm, i > 0);
    SP_RETURN_IF_ERROR(mix(*layer.mixer, BlockInput{x, mixer_input}, y));
    const RowMaker ffn_input = normed(layer.ffn_norm, true);
    layer.ffn->run(pass, {x, ffn_input}, y);
    clock_.lap(Part::kFeedForward);
  }
  return {};
}

void CpuModel::head(const Pass& pass, const float* h, const float* y, std::int64_t n,
                    float* logits) {
  const std::int64_t H = config_.hidden;
  const Scratch::Mark mark(scratch_);
  float* x = scratch_.take(n * H);
  const LinearJob job{&head_, x, H, n, logits, config_.vocab};
  linear_.run({&job, 1}, pass.path, [&](std::int64_t r) {
    float* row = x + r * H;
    std::copy_n(h + r * H, H, row);
    add(row, y + r * H, H);
    rms_norm(row, final_norm_.data(), H, config_.rms_norm_eps, row);
  });
  clock_.lap(Part::kHead);
}

Status CpuModel::check_token(std::int32_t token) const {
  if (token >= 0 && token < config_.vocab) return {};
  return bad("token " + std::to_string(token) + " is outside the model's vocabulary of " +
             std::to_string(config_.vocab));
}

Result<PagedKvCache*> CpuModel::check_cache(KvCache* kv, std::int64_t position) const {
  auto* cache = dynamic_cast<PagedKvCache*>(kv);
  if (cache == nullptr ||
      !cache->fits(config_.n_attention_layers(), config_.kv_floats_per_layer())) {
    return bad("the attention cache is not of this model; make it with new_kv_cache()");
  }
  if (position != cache->n_tokens()) {
    return bad("position " + std::to_string(position) + " does not follow the attention cache of " +
               std::to_string(cache->n_tokens()) + " tokens");
  }
  return cache;
}

Status CpuModel::prefill(std::span<const std::int32_t> tokens, std::int64_t position,
                         DenseState& state, KvCache& kv, int n_logits, float* logits,
                         ChunkObserver* observer) {
  const auto n_tokens = static_cast<std::int64_t>(tokens.size());
  SP_ASSIGN_OR_RETURN(PagedKvCache* const cache, check_cache(&kv, position));
  for (std::int32_t token : tokens) SP_RETURN_IF_ERROR(check_token(token));
  if (n_logits < 0 || n_logits > n_tokens || (n_logits > 0 && logits == nullptr)) {
    return bad("logits of the last " + std::to_string(n_logits) + " of " +
               std::to_string(n_tokens) + " tokens cannot be given");
  }
  if (static_cast<std::int64_t>(state.S.size()) != dense_floats() ||
      static_cast<std::int64_t>(state.conv.size()) != config_.conv_floats()) {
    return bad("the dense state is not of this model; make it with new_dense_state()");
  }
  const std::int64_t H = config_.hidden;
  for (std::int64_t begin = 0; begin < n_tokens; begin += kSegment) {
    if (interrupted())
      return Status(Code::kInterrupted, "stopped on request while reading a prompt");
    const std::int64_t n = std::min(kSegment, n_tokens - begin);
    clock_.start();
    SP_RETURN_IF_ERROR(cache->reserve(position + begin + n));
    std::vector<std::int64_t> positions(static_cast<std::size_t>(n));
    for (std::int64_t i = 0; i < n; ++i) {
      positions[static_cast<std::size_t>(i)] = position + begin + i;
    }
    rope_.set_positions(positions);

    const Scratch::Mark mark(scratch_);
    const Pass p = pass(GemmPath::kPrefill, n);
    float* h = scratch_.take(n * H);
    float* y = scratch_.take(n * H);
    const Segment segment{position + begin, state, *cache, observer, h};
    for (std::int64_t i = 0; i < n; ++i) {
      embedding_.widen(tokens[static_cast<std::size_t>(begin + i)], 0, H, h + i * H);
    }
    clock_.lap(Part::kEmbedding);
    SP_RETURN_IF_ERROR(run_layers(p, h, y, [&](Mixer& mixer, const BlockInput& in, float* out) {
      mixer.prefill(p, segment, in, out);
      return Status();
    }));
    cache->set_n_tokens(position + begin + n);

    const std::int64_t first_logit = n_tokens - n_logits;  // in this call's tokens
    const std::int64_t skip = std::max<std::int64_t>(first_logit - begin, 0);
    if (skip < n) {
      head(p, h + skip * H, y + skip * H, n - skip,
           logits + (begin + skip - first_logit) * config_.vocab);
    }
  }
  return {};
}

Status CpuModel::check_pool(StatePool& pool) const {
  const auto& layers = pool.scheme().layers();
  const std::vector<LayerShape> shapes = config_.recurrent_shapes();
  bool same = layers.size() == shapes.size();
  for (std::size_t i = 0; same && i < shapes.size(); ++i) same = layers[i].shape == shapes[i];
  if (!same) {
    return Status(Code::kMismatch,
                  "the state pool was made for other recurrent layers; "
                  "make it from this model's recurrent_shapes()");
  }
  if (pool.conv_floats() != config_.conv_floats()) {
    return Status(Code::kMismatch, "the state pool keeps " + std::to_string(pool.conv_floats()) +
                                       " floats of convolution history a slot; this model needs " +
                                       std::to_string(config_.conv_floats()));
  }
  return {};
}

Status CpuModel::decode(StatePool& pool, std::span<const DecodeRow> rows, float* logits) {
  const DecodeGroup group{&pool, rows};
  return decode_groups({&group, 1}, logits);
}

Status CpuModel::decode_groups(std::span<const DecodeGroup> groups, float* logits) {
  clock_.start();
  // Everything is checked before anything is written.
  std::vector<std::int64_t> slots, positions;
  std::vector<std::int32_t> tokens;
  std::vector<PagedKvCache*> caches;
  std::vector<StatePool*> pools;  // of the rows
  std::vector<RowRun> runs;
  std::int64_t longest_run = 1;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const DecodeGroup& group = groups[g];
    StatePool& pool = *group.pool;
    SP_RETURN_IF_ERROR(check_pool(pool));
    if (std::find(pools.begin(), pools.end(), &pool) != pools.end()) {
      return bad("two groups of a batch share a pool");
    }
    std::vector<std::int64_t> run_slots;
    for (const DecodeRow& row : group.rows) {
      SP_RETURN_IF_ERROR(check_token(row.token));
      if (row.slot < StatePool::kFirstValidSlot || row.slot > pool.n_slots()) {
        return bad("slot " + std::to_string(row.slot) + " is not one of the pool's 1.." +
                   std::to_string(pool.n_slots()));
      }
      const bool follows = &row != group.rows.data() && row.slot == slots.back() &&
                           row.kv == caches.back() && row.position == positions.back() + 1;
      if (follows) {
        longest_run = std::max(longest_run, ++runs.back().n);
      } else {
        runs.push_back({std::ssize(slots), 1, static_cast<int>(g)});
        run_slots.push_back(row.slot);
      }
      SP_ASSIGN_OR_RETURN(PagedKvCache* const cache,
                          follows ? caches.back() : check_cache(row.kv, row.position));
      slots.push_back(row.slot);
      positions.push_back(row.position);
      tokens.push_back(row.token);
      caches.push_back(cache);
      pools.push_back(&pool);
    }
    std::sort(run_slots.begin(), run_slots.end());
    if (std::adjacent_find(run_slots.begin(), run_slots.end()) != run_slots.end()) {
      return bad(
          "two rows of a batch share a slot or an attention cache, and are no run of tokens");
    }
  }
  std::vector<PagedKvCache*> sorted_caches;
  sorted_caches.reserve(runs.size());
  for (const RowRun& run : runs) {
    sorted_caches.push_back(caches[static_cast<std::size_t>(run.first)]);
  }
  std::sort(sorted_caches.begin(), sorted_caches.end());
  if (std::adjacent_find(sorted_caches.begin(), sorted_caches.end()) != sorted_caches.end()) {
    return bad("two rows of a batch share a slot or an attention cache, and are no run of tokens");
  }
  const std::size_t n = slots.size();
  for (std::size_t i = 0; i < n; ++i) SP_RETURN_IF_ERROR(caches[i]->reserve(positions[i] + 1));
  rope_.set_positions(positions);

  const Scratch::Mark mark(scratch_);
  const auto n_rows = static_cast<std::int64_t>(n);
  const std::int64_t H = config_.hidden;
  // A quarantined slot is not written: its run works on a history that nobody reads again. Where
  // slots keep bf16, runs work on widened copies.
  std::vector<float*> conv;         // of the runs
  std::vector<std::size_t> copied;  // runs
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const auto row = static_cast<std::size_t>(runs[i].first);
    const bool quarantined = pools[row]->quarantined(slots[row]);
    if (!quarantined && pools[row]->scheme().scheme().conv == ConvFormat::kF32) {
      conv.push_back(pools[row]->conv(slots[row]));
      continue;
    }
    conv.push_back(scratch_.take(config_.conv_floats()));
    if (quarantined) {
      std::fill_n(conv.back(), config_.conv_floats(), 0.0F);
    } else {
      copied.push_back(i);
    }
  }
  const auto for_each_copy = [&](auto move) {
    threads_.parallel_for(std::ssize(copied), [&](std::int64_t i, int) {
      const std::size_t run = copied[static_cast<std::size_t>(i)];
      const auto row = static_cast<std::size_t>(runs[run].first);
      move(*pools[row], slots[row], conv[run]);
    });
  };
  for_each_copy(
      [](const StatePool& pool, std::int64_t slot, float* copy) { pool.load_conv(slot, copy); });
  const Pass p = pass(GemmPath::kInvariant, n_rows);
  const Batch batch{groups, runs, longest_run, slots, positions, caches, conv};
  float* h = scratch_.take(n_rows * H);
  float* y = scratch_.take(n_rows * H);
  for (std::size_t i = 0; i < n; ++i) {
    embedding_.widen(tokens[i], 0, H, h + static_cast<std::int64_t>(i) * H);
  }
  clock_.lap(Part::kEmbedding);
  SP_RETURN_IF_ERROR(run_layers(p, h, y, [&](Mixer& mixer, const BlockInput& in, float* out) {
    return mixer.decode(p, batch, in, out);
  }));
  for_each_copy(
      [](StatePool& pool, std::int64_t slot, const float* copy) { pool.store_conv(slot, copy); });
  for (std::size_t i = 0; i < n; ++i) caches[i]->set_n_tokens(positions[i] + 1);
  head(p, h, y, n_rows, logits);
  for (std::size_t i = 0; i < n; ++i) {
    if (!pools[i]->quarantined(slots[i])) continue;
    std::fill_n(logits + static_cast<std::int64_t>(i) * config_.vocab, config_.vocab,
                std::numeric_limits<float>::quiet_NaN());
  }
  return {};
}

}  // namespace

Status Model::decode_groups(std::span<const DecodeGroup> groups, float* logits) {
  for (const DecodeGroup& group : groups) {
    SP_RETURN_IF_ERROR(decode(*group.pool, group.rows, logits));
    logits += std::ssize(group.rows) * config().vocab;
  }
  return {};
}

Result<std::unique_ptr<Model>> Model::load(const std::string& dir, ThreadPool& threads,
                                           std::int64_t spare_bytes) {
  SP_ASSIGN_OR_RETURN(ModelConfig config, ModelConfig::load(dir));
  SP_ASSIGN_OR_RETURN(Checkpoint checkpoint, Checkpoint::open(dir));
  auto model = std::make_unique<CpuModel>(
      std::move(config), Weights(std::move(checkpoint), dir, threads, spare_bytes), threads);
  SP_RETURN_IF_ERROR(model->load());
  return std::unique_ptr<Model>(std::move(model));
}

}  // namespace statepack
