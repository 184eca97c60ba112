// Plans of kind "klt": a transform for each key head, a scale and a width for each row of it.
//
//   W~ = W + 1e-3 mean(diag W) I,  W = sum over domains and value heads of W_d mean_j s_j
//   Y  = W~^(1/2) X, every column scaled to mean square 1;  C = mean of Y Y^T / V = U diag(mu) U^T
//   M  = U^T W~^(1/2)              unit errors cost 1 in every row, and rows are uncorrelated
//   E_i = max over d of (M^-T W_d M^-1)_ii mean_(n,j) s_j Z_ij^2,  r_i^2 = mean of Z_ij^2 over the
//   mean square of its column;  minimise sum_i E_i D(b_i) with mean b_i <= budget.
//
// M^T M = W~ whatever U is, so both statistics of Z are quadratic forms of moments of Y:
//   r_i^2 = u_i^T C_h u_i,  mean s_j Z_ij^2 = u_i^T F_d u_i,  F_d = mean of sum_j s_j y_j y_j^T / V
// and two passes over the text are enough: one for W and s, one for C and F. A third sees what
// roundings cost, for the guard.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <string>

#include "base/check.hpp"
#include "base/half.hpp"
#include "base/matrix.hpp"
#include "calibrate/allocate.hpp"
#include "calibrate/readout.hpp"
#include "calibrate/run.hpp"
#include "codec/klt/klt.hpp"
#include "delta/small_gemm.hpp"

namespace statepack {
namespace {

constexpr std::int64_t kInterval = 32;
constexpr double kRidge = 1e-3;  // of mean(diag W): bounds the condition of M by sqrt(K / kRidge)
constexpr double kGuardQuantile = 0.99;  // of the states of a domain
constexpr double kLeastScale = 0x1p-20;  // of rows that are zero in every state seen

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

// u^T A u
double form(const double* u, const double* A, int n) {
  double sum = 0;
  for (int i = 0; i < n; ++i) {
    double row = 0;
    for (int j = 0; j < n; ++j) row += A[std::int64_t{i} * n + j] * u[j];
    sum += u[i] * row;
  }
  return sum;
}

double mean(const double* x, std::int64_t n) {
  double sum = 0;
  for (std::int64_t i = 0; i < n; ++i) sum += x[i];
  return sum / static_cast<double>(n);
}

double percentile(std::vector<double> x, double p) {
  std::sort(x.begin(), x.end());
  return x[static_cast<std::size_t>(std::lround(p * static_cast<double>(x.size() - 1)))];
}

/// Of one key head.
struct Basis {
  std::vector<double> root, inverse_root;  ///< W~^(1/2) and W~^(-1/2), symmetric
  std::vector<float> root_f32;
  std::vector<double> U;                  ///< row i is u_i
  std::vector<double> feedback, weights;  ///< of gates of channels: B [K][K] and w [K]
};

/// Moments of Y of one value head.
struct Moments {
  std::vector<double> C;  ///< [K][K] sum over states of Y Y^T / V, columns scaled
  std::vector<std::vector<double>>
      F;  ///< [domain][K][K] sum over states of sum_j s_j y_j y_j^T / V
  std::vector<std::int64_t> n_states;  ///< [domain]
  std::vector<double> column_power;    ///< [V]
};

class Transforms {
 public:
  Transforms(const CodecConfig& config, CalibrationRun& run)
      : config_(config), run_(run), shapes_(run.shapes()) {}

  Status make(Calibration& result) {
    SP_RETURN_IF_ERROR(check());
    ReadoutCollector readout(shapes_, run_.n_domains(), run_.options().segment_tokens,
                             run_.threads());
    SP_RETURN_IF_ERROR(run_.pass(readout));
    for (int l = 0; l < n_layers(); ++l) {
      for (int d = 0; d < run_.n_domains(); ++d) {
        sensitivity_.push_back(readout.sensitivity(l, d));
      }
    }
    for_each_key_head([&](int l, int key_head) { whiten(readout, l, key_head); });
    SP_RETURN_IF_ERROR(collect_moments());
    for_each_key_head([&](int l, int key_head) { diagonalise(l, key_head); });
    AllocationProblem problem;
    for (const klt::Width& width : klt::kWidths) problem.widths.push_back(width.bits);
    std::vector<double> energies;  // E_i of every row
    for (int l = 0; l < n_layers(); ++l) {
      for (int h = 0; h < shapes_[at(l)].n_value_heads; ++h) scale_rows(readout, l, h, energies);
    }
    for (const double energy : energies) {
      for (const klt::Width& width : klt::kWidths) {
        problem.costs.push_back(energy * width.distortion);
      }
    }
    double bits = 0;
    std::from_chars(config_.arg.data(), config_.arg.data() + config_.arg.size(), bits);
    problem.budget = static_cast<std::int64_t>(bits * static_cast<double>(energies.size()));
    SP_ASSIGN_OR_RETURN(const Allocation allocation, allocate_lagrangian(problem));
    result.cost = allocation.cost;
    report(readout, energies, allocation, result);
    SP_RETURN_IF_ERROR(guard());
    result.plan.layers = std::move(layers_);
    return {};
  }

 private:
  int n_layers() const { return static_cast<int>(shapes_.size()); }
  int n_domains() const { return run_.n_domains(); }

  Status check() const {
    if (run_.options().segment_tokens < 2 * kInterval) {
      return {Code::kInvalidArgument, "segments of " +
                                          std::to_string(run_.options().segment_tokens) +
                                          " tokens are too short to see what later tokens read; "
                                          "take at least " +
                                          std::to_string(2 * kInterval)};
    }
    return {};
  }

  // Key heads of all layers, in parallel; each has its own Basis and the value heads its Moments.
  template <class Fn>
  void for_each_key_head(const Fn& fn) {
    std::vector<std::pair<int, int>> heads;
    for (int l = 0; l < n_layers(); ++l) {
      for (int k = 0; k < shapes_[at(l)].n_key_heads; ++k) heads.emplace_back(l, k);
    }
    if (bases_.empty()) bases_.resize(heads.size());
    run_.threads().parallel_for(static_cast<std::int64_t>(heads.size()), [&](std::int64_t i, int) {
      fn(heads[at(i)].first, heads[at(i)].second);
    });
  }

  std::int64_t first_key_head(int layer) const {
    std::int64_t n = 0;
    for (int l = 0; l < layer; ++l) n += shapes_[at(l)].n_key_heads;
    return n;
  }
  std::int64_t first_value_head(int layer) const {
    std::int64_t n = 0;
    for (int l = 0; l < layer; ++l) n += shapes_[at(l)].n_value_heads;
    return n;
  }
  Basis& basis(int layer, int key_head) { return bases_[at(first_key_head(layer) + key_head)]; }
  Moments& moments(int layer, int head) { return moments_[at(first_value_head(layer) + head)]; }
  const std::vector<double>& sensitivity(int layer, int domain) const {
    return sensitivity_[at(std::int64_t{layer} * n_domains() + domain)];
  }

  void whiten(const ReadoutCollector& readout, int l, int key_head) {
    const LayerShape& shape = shapes_[at(l)];
    const int K = shape.K;
    const std::size_t n = at(std::int64_t{K} * K);
    std::vector<double> W(n, 0.0);
    for (int h = key_head * shape.group(); h < (key_head + 1) * shape.group(); ++h) {
      for (int d = 0; d < n_domains(); ++d) {
        const double s = mean(&sensitivity(l, d)[at(std::int64_t{h} * shape.V)], shape.V);
        const std::vector<double> Wd = readout.gramian(l, h, d);
        for (std::size_t e = 0; e < n; ++e) W[e] += s * Wd[e];
      }
    }
    double trace = 0;
    for (int i = 0; i < K; ++i) trace += W[at(std::int64_t{i} * (K + 1))];
    // Only the direction of W matters to M. A head that nobody reads gets the identity.
    const double unit = trace > 0 ? K / trace : 0;
    for (std::size_t e = 0; e < n; ++e) W[e] *= unit;
    for (int i = 0; i < K; ++i) W[at(std::int64_t{i} * (K + 1))] += unit > 0 ? kRidge : 1;
    Basis& b = basis(l, key_head);
    if (shape.gate == Gate::kChannel) return factor(W, K, b);
    std::vector<double> values(at(K)), E(n);
    symmetric_eigen(W, K, values, E);
    b.root.assign(n, 0.0);
    b.inverse_root.assign(n, 0.0);
    for (int e = 0; e < K; ++e) {
      const double* const vector = E.data() + std::int64_t{e} * K;
      // W is positive semidefinite but for rounding
      const double root = std::sqrt(std::max(values[at(e)], kRidge / 2));
      for (int i = 0; i < K; ++i) {
        for (int j = 0; j < K; ++j) {
          const double product = vector[i] * vector[j];
          b.root[at(std::int64_t{i} * K + j)] += root * product;
          b.inverse_root[at(std::int64_t{i} * K + j)] += product / root;
        }
      }
    }
    b.root_f32.assign(b.root.begin(), b.root.end());
  }

  /// Gates of channels commute with no transform, so rows stay as they are and their errors alone
  /// are transformed, by feedback: W = (I + B)^T diag(w) (I + B), B strictly lower. Root and U
  /// become the identity, and the inverse root (I + B)^-1.
  static void factor(std::vector<double>& W, int K, Basis& b) {
    const std::size_t n = W.size();
    b.root.assign(n, 0.0);
    b.feedback.assign(n, 0.0);
    b.weights.assign(at(K), 0.0);
    for (int i = K - 1; i >= 0; --i) {  // the last variable is squared off first
      const double w = W[at(std::int64_t{i} * (K + 1))];
      b.weights[at(i)] = w;
      b.root[at(std::int64_t{i} * (K + 1))] = 1;
      double* const row = &b.feedback[at(std::int64_t{i} * K)];
      // Plans keep halves; what follows is of the rounded B.
      for (int l = 0; l < i; ++l) {
        row[l] = double{f16_to_f32(f32_to_f16(static_cast<float>(
            std::clamp(W[at(std::int64_t{i} * K + l)] / w, -65504.0, 65504.0))))};
      }
      for (int l = 0; l < i; ++l) {
        for (int m = 0; m < i; ++m) {
          W[at(std::int64_t{l} * K + m)] -=
              W[at(std::int64_t{i} * K + l)] * W[at(std::int64_t{i} * K + m)] / w;
        }
      }
    }
    // (I + B) X = I, row by row
    b.inverse_root = b.root;
    for (int i = 0; i < K; ++i) {
      for (int l = 0; l < i; ++l) {
        const double factor = b.feedback[at(std::int64_t{i} * K + l)];
        for (int m = 0; m <= l; ++m) {
          b.inverse_root[at(std::int64_t{i} * K + m)] -=
              factor * b.inverse_root[at(std::int64_t{l} * K + m)];
        }
      }
    }
    b.root_f32.assign(b.root.begin(), b.root.end());
  }

  Status collect_moments() {
    for (const LayerShape& shape : shapes_) {
      const std::size_t n = at(std::int64_t{shape.K} * shape.K);
      Moments zero;
      zero.C.assign(n, 0.0);
      zero.F.assign(at(n_domains()), std::vector<double>(n, 0.0));
      zero.n_states.assign(at(n_domains()), 0);
      zero.column_power.assign(at(shape.V), 0.0);
      moments_.insert(moments_.end(), at(shape.n_value_heads), zero);
    }
    const std::int64_t interval = run_.options().interval > 0 ? run_.options().interval : kInterval;
    samples_ = run_.every(interval);
    if (samples_.updates.front().empty()) {
      return {Code::kInvalidArgument, "the sampling interval of " + std::to_string(interval) +
                                          " tokens is longer than a segment; take a shorter one"};
    }
    const auto show = [&](int layer, int head, std::int64_t index, const float* X) {
      add_state(layer, head, samples_.domains[at(layer)][at(index)], X);
    };
    Collector collector(shapes_, n_domains(), samples_.updates, show, false);
    return run_.pass(collector);
  }

  void add_state(int l, int h, int domain, const float* X) {
    const LayerShape& shape = shapes_[at(l)];
    const int K = shape.K, V = shape.V;
    Moments& m = moments(l, h);
    ++m.n_states[at(domain)];
    const Basis& b = basis(l, shape.key_head(h));
    std::vector<float> Y(at(std::int64_t{K} * V)), scaled(Y.size()),
        product(at(std::int64_t{K} * K));
    small_gemm(K, V, K, b.root_f32.data(), K, 1, X, V, Y.data(), V, false);
    std::vector<double> power(at(V), 0.0);
    for (int i = 0; i < K; ++i) {
      for (int j = 0; j < V; ++j) {
        const double y = Y[at(std::int64_t{i} * V + j)];
        power[at(j)] += y * y / K;
      }
    }
    for (int j = 0; j < V; ++j) m.column_power[at(j)] += power[at(j)];
    const double* const s = &sensitivity(l, domain)[at(std::int64_t{h} * V)];
    // sum_j f_j y_j y_j^T / V; the second factor transposed, [V][K].
    const auto add = [&](const auto& factor, std::vector<double>& to) {
      for (int j = 0; j < V; ++j) {
        const double f = factor(j) / V;
        for (int i = 0; i < K; ++i) {
          scaled[at(std::int64_t{j} * K + i)] =
              static_cast<float>(f * Y[at(std::int64_t{i} * V + j)]);
        }
      }
      small_gemm(K, K, V, Y.data(), V, 1, scaled.data(), K, product.data(), K, false);
      for (std::size_t e = 0; e < to.size(); ++e) to[e] += product[e];
    };
    // A column of zeros has no direction, and one far below the others is rounding.
    const double least = 1e-12 * *std::max_element(power.begin(), power.end());
    add([&](int j) { return power[at(j)] > least ? 1 / power[at(j)] : 0.0; }, m.C);
    add([&](int j) { return s[j]; }, m.F[at(domain)]);
  }

  void diagonalise(int l, int key_head) {
    const LayerShape& shape = shapes_[at(l)];
    const int K = shape.K;
    std::vector<double> C(at(std::int64_t{K} * K), 0.0), values(at(K));
    for (int h = key_head * shape.group(); h < (key_head + 1) * shape.group(); ++h) {
      const Moments& m = moments(l, h);
      // Symmetric but for the order of f32 sums.
      for (int i = 0; i < K; ++i) {
        for (int j = 0; j < K; ++j) {
          C[at(std::int64_t{i} * K + j)] +=
              0.5 * (m.C[at(std::int64_t{i} * K + j)] + m.C[at(std::int64_t{j} * K + i)]);
        }
      }
    }
    Basis& b = basis(l, key_head);
    if (shape.gate == Gate::kChannel) {
      b.U = b.root;
      return;
    }
    b.U.resize(C.size());
    symmetric_eigen(C, K, values, b.U);
  }

  /// M = U^T W~^(1/2) in halves, scaled so that columns of Z have RMS 1 on the average.
  std::vector<float> transform_of(int l, int key_head) {
    const LayerShape& shape = shapes_[at(l)];
    const int K = shape.K;
    double power = 0, n = 0;
    for (int h = key_head * shape.group(); h < (key_head + 1) * shape.group(); ++h) {
      const Moments& m = moments(l, h);
      for (const double p : m.column_power) power += p;
      for (const std::int64_t states : m.n_states) n += static_cast<double>(states * shape.V);
    }
    const double scale = power > 0 ? 1 / std::sqrt(power / n) : 1;
    const Basis& b = basis(l, key_head);
    std::vector<float> M(at(std::int64_t{K} * K));
    for (int i = 0; i < K; ++i) {
      for (int j = 0; j < K; ++j) {
        double sum = 0;
        for (int e = 0; e < K; ++e) {
          sum += b.U[at(std::int64_t{i} * K + e)] * b.root[at(std::int64_t{e} * K + j)];
        }
        // Plans keep halves; the codec inverts what it reads, so rounding M costs no exactness.
        const double x = std::clamp(scale * sum, -65504.0, 65504.0);
        M[at(std::int64_t{i} * K + j)] = f16_to_f32(f32_to_f16(static_cast<float>(x)));
      }
    }
    return M;
  }

  /// Row scales of a value head, and its E_i behind `energies`.
  void scale_rows(const ReadoutCollector& readout, int l, int h, std::vector<double>& energies) {
    const LayerShape& shape = shapes_[at(l)];
    const int K = shape.K;
    if (h == 0) layers_.emplace_back();
    LayerPlan& plan = layers_.back();
    const Basis& b = basis(l, shape.key_head(h));
    if (shape.gate == Gate::kChannel) {
      plan.feedback.insert(plan.feedback.end(), b.feedback.begin(), b.feedback.end());
      for (const double w : b.weights) plan.row_weight.push_back(static_cast<float>(w));
    } else if (h % shape.group() == 0) {
      const std::vector<float> M = transform_of(l, shape.key_head(h));
      plan.transform.insert(plan.transform.end(), M.begin(), M.end());
    }
    const Moments& m = moments(l, h);
    std::int64_t n_states = 0;
    for (const std::int64_t n : m.n_states) n_states += n;
    std::vector<double> energy(at(K), 0.0);
    std::vector<std::vector<double>> W;
    W.reserve(at(n_domains()));
    for (int d = 0; d < n_domains(); ++d) W.push_back(readout.gramian(l, h, d));
    std::vector<double> direction(at(K));
    const bool pooled = run_.options().combine == CombineDomains::kMean;
    for (int i = 0; i < K; ++i) {
      const double* const u = b.U.data() + std::int64_t{i} * K;
      for (int e = 0; e < K; ++e) {  // column i of M^-1, up to the scale that E_i does not have
        direction[at(e)] = 0;
        for (int j = 0; j < K; ++j) {
          direction[at(e)] += b.inverse_root[at(std::int64_t{e} * K + j)] * u[j];
        }
      }
      for (int d = 0; d < n_domains(); ++d) {
        const double cost = form(direction.data(), W[at(d)].data(), K) *
                            form(u, m.F[at(d)].data(), K) / static_cast<double>(m.n_states[at(d)]);
        energy[at(i)] = pooled ? energy[at(i)] + cost / n_domains() : std::max(energy[at(i)], cost);
      }
      const double r =
          std::sqrt(std::max(form(u, m.C.data(), K) / static_cast<double>(n_states), 0.0));
      plan.row_scale.push_back(static_cast<float>(std::max(r, kLeastScale)));
    }
    for (const double e : energy) energies.push_back(std::max(e, 0.0));
  }

  void report(const ReadoutCollector& readout, const std::vector<double>& energies,
              const Allocation& allocation, Calibration& result) {
    std::size_t row = 0;
    for (int l = 0; l < n_layers(); ++l) {
      const LayerShape& shape = shapes_[at(l)];
      LayerPlan& plan = layers_[at(l)];
      LayerSummary& summary = result.layers.emplace_back();
      std::vector<double> half_lives, spreads, row_peaks, column_peaks;
      double kept = 0, whole = 0;
      for (int h = 0; h < shape.n_value_heads; ++h) {
        std::vector<double> reads(at(shape.K), 0.0), rows, columns;
        for (int d = 0; d < n_domains(); ++d) {
          const std::vector<double> W = readout.gramian(l, h, d);
          for (int i = 0; i < shape.K; ++i) reads[at(i)] += W[at(std::int64_t{i} * (shape.K + 1))];
        }
        for (int i = 0; i < shape.K; ++i, ++row) {
          plan.bits.push_back(allocation.bits[row]);
          summary.mean_bits += allocation.bits[row];
          const auto width =
              std::find_if(klt::kWidths.begin(), klt::kWidths.end(),
                           [&](const klt::Width& w) { return w.bits == allocation.bits[row]; });
          kept += energies[row] * width->distortion;
          whole += energies[row];
          rows.push_back(double{plan.row_scale[at(std::int64_t{h} * shape.K + i)]});
        }
        for (const double p : moments(l, h).column_power) columns.push_back(std::sqrt(p));
        const auto ratio = [](double a, double b) { return b > 0 ? a / b : 1; };
        half_lives.push_back(std::log(2.0) / std::max(-readout.log_decay(l, h), 1e-300));
        spreads.push_back(ratio(percentile(reads, 0.9), percentile(reads, 0.1)));
        row_peaks.push_back(ratio(percentile(rows, 1), percentile(rows, 0.5)));
        column_peaks.push_back(ratio(percentile(columns, 1), percentile(columns, 0.5)));
      }
      summary.mean_bits /= static_cast<double>(plan.bits.size());
      summary.half_life_min = percentile(half_lives, 0);
      summary.half_life_max = percentile(half_lives, 1);
      summary.omega_spread = percentile(spreads, 0.5);
      summary.row_peak = percentile(row_peaks, 0.5);
      summary.column_peak = percentile(column_peaks, 0.5);
      summary.relative_error = whole > 0 ? std::sqrt(kept / whole) : 0;
    }
    auto& settings = result.plan.settings;
    settings["interval"] =
        std::to_string(samples_.updates.front().size() > 1
                           ? samples_.updates.front()[1] - samples_.updates.front()[0]
                           : kInterval);
    settings["snapshots"] = std::to_string(samples_.updates.front().size());
    settings["gramian_interval"] = std::to_string(kGramianInterval);
    settings["rows"] = std::to_string(energies.size());
    settings["used_bits"] = std::to_string(allocation.n_bits);
  }

  /// What roundings of each head cost on the states seen, a third pass over them: the domain in
  /// which most, and there nearly the largest.
  Status guard() {
    std::vector<std::unique_ptr<LayerCodec>> codecs;
    std::vector<std::vector<float>> costs(moments_.size());  // [value head of all layers][state]
    for (int l = 0; l < n_layers(); ++l) {
      SP_ASSIGN_OR_RETURN(auto codec, KltCodec::make(shapes_[at(l)], &layers_[at(l)]));
      codecs.push_back(std::move(codec));
    }
    const auto show = [&](int l, int h, std::int64_t, const float* X) {
      const LayerCodec& codec = *codecs[at(l)];
      const int K = shapes_[at(l)].K, V = shapes_[at(l)].V;
      std::vector<float> Z(X, X + std::int64_t{K} * V);
      std::vector<std::uint8_t> page(at(codec.page_bytes()));
      std::vector<std::byte> scratch(codec.scratch_bytes());
      if (const float* Mt = codec.write_transform(h)) {
        small_gemm(K, V, K, Mt, 1, K, X, V, Z.data(), V, false);
      }
      float cost = 0;
      codec.encode(h, Z.data(), page.data(), {}, {scratch, &cost});
      costs[at(first_value_head(l) + h)].push_back(cost);
    };
    Collector collector(shapes_, n_domains(), samples_.updates, show, false);
    SP_RETURN_IF_ERROR(run_.pass(collector));
    for (int l = 0; l < n_layers(); ++l) {
      for (int h = 0; h < shapes_[at(l)].n_value_heads; ++h) {
        std::vector<std::vector<double>> by_domain(at(n_domains()));
        const std::vector<float>& seen = costs[at(first_value_head(l) + h)];
        for (std::size_t i = 0; i < seen.size(); ++i) {
          by_domain[at(samples_.domains[at(l)][i])].push_back(double{seen[i]});
        }
        double most = 0;
        for (const std::vector<double>& of : by_domain) {
          if (!of.empty()) most = std::max(most, percentile(of, kGuardQuantile));
        }
        layers_[at(l)].guard.push_back(static_cast<float>(most));
      }
    }
    return {};
  }

  const CodecConfig& config_;
  CalibrationRun& run_;
  const std::vector<LayerShape>& shapes_;
  std::vector<std::vector<double>> sensitivity_;  // [layer][domain] of [HV][V]
  std::vector<Basis> bases_;                      // key heads of all layers
  std::vector<Moments> moments_;                  // value heads of all layers
  Samples samples_;
  std::vector<LayerPlan> layers_;
};

}  // namespace

Status make_transforms(const CodecConfig& config, CalibrationRun& run, Calibration& result) {
  return Transforms(config, run).make(result);
}

}  // namespace statepack
