#include "model/moe.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "model/activations.hpp"
#include "model/mlp.hpp"

namespace statepack {
namespace {

class Moe final : public FeedForward {
 public:
  struct Parts {
    Router router;
    Linear gate;
    std::vector<Mlp> experts;
    Mlp shared;          ///< n_out 0: none
    Linear shared_gate;  ///< n_out 0: the shared expert counts in full
  };
  explicit Moe(Parts parts) : p_(std::move(parts)) {}
  void run(const Pass& pass, const BlockInput& block, float* y) override;

 private:
  Parts p_;
};

// Rows of one expert lie together; every row then adds up its experts in the order of their
// numbers, so that its sum does not depend on which rows share them.
void Moe::run(const Pass& pass, const BlockInput& block, float* y) {
  const Scratch::Mark mark(pass.scratch);
  const std::int64_t n = pass.n_rows, H = p_.gate.n_in(), E = p_.router.n_experts;
  const std::int64_t k = p_.router.top_k, F = p_.experts[0].gate.n_out();
  const std::int64_t F_shared = p_.shared.gate.n_out();

  const float* const x = block.x;
  float* logits = pass.scratch.take(n * E);
  float* shared_gate = pass.scratch.take(n);
  std::vector<LinearJob> jobs{{&p_.gate, x, H, n, logits, E}};
  if (p_.shared_gate.n_out() > 0) jobs.push_back({&p_.shared_gate, x, H, n, shared_gate, 1});
  pass.linear.run(jobs, pass.path, block.make);
  std::vector<Router::Choice> chosen(static_cast<std::size_t>(n * k));
  pass.threads.parallel_for(n, [&](std::int64_t r, int) {
    p_.router.choose(logits + r * E, std::span(chosen).subspan(static_cast<std::size_t>(r * k),
                                                               static_cast<std::size_t>(k)));
  });

  // place[r * k + i]: where the i-th choice of row r lies among the rows sorted by expert.
  std::vector<std::int64_t> begin(static_cast<std::size_t>(E) + 1, 0), place(chosen.size());
  for (const Router::Choice& c : chosen) ++begin[static_cast<std::size_t>(c.expert) + 1];
  for (std::size_t e = 0; e < static_cast<std::size_t>(E); ++e) begin[e + 1] += begin[e];
  std::vector<std::int64_t> next(begin.begin(), begin.end() - 1);
  for (std::size_t i = 0; i < chosen.size(); ++i) {
    place[i] = next[static_cast<std::size_t>(chosen[i].expert)]++;
  }

  float* in = pass.scratch.take(n * k * H);
  float* gate = pass.scratch.take(n * k * F);
  float* up = pass.scratch.take(n * k * F);
  float* out = pass.scratch.take(n * k * H);
  float* gate_shared = pass.scratch.take(n * F_shared);
  float* up_shared = pass.scratch.take(n * F_shared);
  float* out_shared = pass.scratch.take(n * H);
  pass.threads.parallel_for(n * k, [&](std::int64_t i, int) {
    std::copy_n(x + i / k * H, H, in + place[static_cast<std::size_t>(i)] * H);
  });

  jobs.clear();
  std::vector<LinearJob> down;
  for (std::size_t e = 0; e < p_.experts.size(); ++e) {
    const std::int64_t first = begin[e], n_rows = begin[e + 1] - first;
    if (n_rows == 0) continue;
    const Mlp& mlp = p_.experts[e];
    jobs.push_back({&mlp.gate, in + first * H, H, n_rows, gate + first * F, F});
    jobs.push_back({&mlp.up, in + first * H, H, n_rows, up + first * F, F});
    down.push_back({&mlp.down, gate + first * F, F, n_rows, out + first * H, H});
  }
  if (F_shared > 0) {
    jobs.push_back({&p_.shared.gate, x, H, n, gate_shared, F_shared});
    jobs.push_back({&p_.shared.up, x, H, n, up_shared, F_shared});
    down.push_back({&p_.shared.down, gate_shared, F_shared, n, out_shared, H});
  }
  pass.linear.run(jobs, pass.path);
  pass.threads.parallel_for(n * k,
                            [&](std::int64_t i, int) { silu_times(gate + i * F, up + i * F, F); });
  pass.threads.parallel_for(n, [&](std::int64_t r, int) {
    silu_times(gate_shared + r * F_shared, up_shared + r * F_shared, F_shared);
  });
  pass.linear.run(down, pass.path);

  pass.threads.parallel_for(n, [&](std::int64_t r, int) {
    float* sum = y + r * H;
    std::fill_n(sum, H, 0.0F);
    for (std::int64_t i = r * k; i < (r + 1) * k; ++i) {
      const auto at = static_cast<std::size_t>(i);
      add_scaled(sum, chosen[at].weight, out + place[at] * H, H);
    }
    if (F_shared == 0) return;
    if (p_.shared_gate.n_out() > 0) {
      float weight;
      sigmoid(shared_gate + r, 1, &weight);
      add_scaled(sum, weight, out_shared + r * H, H);
    } else {
      add(sum, out_shared + r * H, H);
    }
  });
}

// Qwen stores experts fused ([E, 2F, H]: F gate rows, then F up rows) or one by one; Kimi one by
// one under other names.
Result<std::vector<Mlp>> load_experts(Weights& weights, const ModelConfig& config,
                                      const std::string& at) {
  const std::int64_t E = config.n_experts, F = config.moe_intermediate, H = config.hidden;
  std::vector<Mlp> experts;
  if (weights.has(at + "experts.gate_up_proj")) {
    SP_ASSIGN_OR_RETURN(const std::vector<Linear> gate_up,
                        weights.matrices(at + "experts.gate_up_proj", E, 2 * F, H));
    SP_ASSIGN_OR_RETURN(const std::vector<Linear> down,
                        weights.matrices(at + "experts.down_proj", E, H, F));
    for (std::size_t e = 0; e < gate_up.size(); ++e) {
      experts.push_back({gate_up[e].rows(0, F), gate_up[e].rows(F, F), down[e]});
    }
    return experts;
  }
  const bool kimi = config.family == ModelFamily::kKimiLinear;
  for (std::int64_t e = 0; e < E; ++e) {
    const std::string expert = at + "experts." + std::to_string(e) + ".";
    SP_ASSIGN_OR_RETURN(Mlp mlp, kimi ? Mlp::load(weights, expert, H, F, "w1", "w3", "w2")
                                      : Mlp::load(weights, expert, H, F));
    experts.push_back(std::move(mlp));
  }
  return experts;
}

}  // namespace

void Router::choose(const float* logits, std::span<Choice> chosen) const {
  const auto n = static_cast<std::size_t>(n_experts);
  std::vector<float> score(logits, logits + n);
  if (sigmoid) {
    statepack::sigmoid(logits, n_experts, score.data());
  } else {
    const float top = *std::max_element(score.begin(), score.end());
    float sum = 0;
    for (float& s : score) sum += s = std::exp(s - top);
    for (float& s : score) s /= sum;
  }
  std::vector<float> rank = score;
  for (std::size_t e = 0; e < bias.size(); ++e) rank[e] += bias[e];
  if (biased_weights) score = rank;

  std::vector<int> order(n);
  for (std::size_t e = 0; e < n; ++e) {
    order[e] = static_cast<int>(e);
    if (std::isnan(rank[e])) rank[e] = -INFINITY;  // an order for the sort; the weight stays NaN
  }
  const auto top = order.begin() + static_cast<std::ptrdiff_t>(chosen.size());
  std::partial_sort(order.begin(), top, order.end(), [&](int a, int b) {
    const float x = rank[static_cast<std::size_t>(a)], y = rank[static_cast<std::size_t>(b)];
    return x != y ? x > y : a < b;
  });
  std::sort(order.begin(), top);
  float sum = 0;
  for (std::size_t i = 0; i < chosen.size(); ++i) {
    chosen[i] = {order[i], score[static_cast<std::size_t>(order[i])]};
    sum += chosen[i].weight;
  }
  const float factor = normalise ? scaling / (sum + (sigmoid ? 1e-20F : 0.0F)) : scaling;
  for (Choice& c : chosen) c.weight *= factor;
}

Result<std::unique_ptr<FeedForward>> load_moe(Weights& weights, const ModelConfig& config,
                                              const std::string& prefix) {
  const bool kimi = config.family == ModelFamily::kKimiLinear;
  const std::string at = prefix + (kimi ? "block_sparse_moe." : "mlp.");
  const std::int64_t H = config.hidden;
  Moe::Parts p;
  p.router.n_experts = config.n_experts;
  p.router.top_k = config.n_experts_per_token;
  p.router.sigmoid = config.router_sigmoid;
  p.router.normalise = config.norm_topk_prob;
  p.router.biased_weights = config.router_biased_weights;
  p.router.scaling = config.routed_scaling;
  SP_ASSIGN_OR_RETURN(p.gate, weights.matrix(at + "gate.weight", config.n_experts, H));
  SP_ASSIGN_OR_RETURN(p.experts, load_experts(weights, config, at));
  if (kimi) {
    SP_ASSIGN_OR_RETURN(p.router.bias,
                        weights.values(at + "gate.e_score_correction_bias", {config.n_experts}));
  }
  if (config.n_shared_experts > 0) {
    const std::string name = at + (kimi ? "shared_experts." : "shared_expert.");
    SP_ASSIGN_OR_RETURN(p.shared, Mlp::load(weights, name, H, config.shared_intermediate));
    if (!kimi) {
      SP_ASSIGN_OR_RETURN(p.shared_gate, weights.matrix(at + "shared_expert_gate.weight", 1, H));
    }
  }
  return std::unique_ptr<FeedForward>(new Moe(std::move(p)));
}

}  // namespace statepack
