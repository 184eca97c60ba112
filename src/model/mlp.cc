#include "model/mlp.hpp"

#include <utility>

#include "model/activations.hpp"

namespace statepack {
namespace {

class DenseMlp final : public FeedForward {
 public:
  explicit DenseMlp(Mlp mlp) : mlp_(std::move(mlp)) {}

  void run(const Pass& pass, const BlockInput& in, float* y) override {
    const Scratch::Mark mark(pass.scratch);
    const std::int64_t n = pass.n_rows, H = mlp_.gate.n_in(), I = mlp_.gate.n_out();
    if (pass.linear.run_gated({&mlp_.gate, in.x, H, n, nullptr, 0}, mlp_.up,
                              {&mlp_.down, nullptr, 0, n, y, H}, in.make, silu_times)) {
      return;
    }
    float* gate = pass.scratch.take(n * I);
    float* up = pass.scratch.take(n * I);
    const LinearJob jobs[] = {{&mlp_.gate, in.x, H, n, gate, I}, {&mlp_.up, in.x, H, n, up, I}};
    pass.linear.run(jobs, pass.path, in.make);
    const LinearJob down{&mlp_.down, gate, I, n, y, H};
    pass.linear.run({&down, 1}, pass.path,
                    [&](std::int64_t r) { silu_times(gate + r * I, up + r * I, I); });
  }

 private:
  Mlp mlp_;
};

}  // namespace

Result<Mlp> Mlp::load(Weights& weights, const std::string& prefix, std::int64_t hidden,
                      std::int64_t intermediate, const char* gate, const char* up,
                      const char* down) {
  Mlp mlp;
  SP_ASSIGN_OR_RETURN(mlp.gate, weights.matrix(prefix + gate + ".weight", intermediate, hidden));
  SP_ASSIGN_OR_RETURN(mlp.up, weights.matrix(prefix + up + ".weight", intermediate, hidden));
  SP_ASSIGN_OR_RETURN(mlp.down, weights.matrix(prefix + down + ".weight", hidden, intermediate));
  return mlp;
}

Result<std::unique_ptr<FeedForward>> load_dense_mlp(Weights& weights, const ModelConfig& config,
                                                    const std::string& prefix) {
  SP_ASSIGN_OR_RETURN(Mlp mlp,
                      Mlp::load(weights, prefix + "mlp.", config.hidden, config.intermediate));
  return std::unique_ptr<FeedForward>(new DenseMlp(std::move(mlp)));
}

}  // namespace statepack
