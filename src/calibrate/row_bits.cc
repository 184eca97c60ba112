// Plans of kind "stepquant": row weights, a width for every unit, pivots (stepquant, section 3).
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "calibrate/allocate.hpp"
#include "calibrate/run.hpp"

namespace statepack {
namespace {

constexpr std::int64_t kInterval = 8, kHorizon = 2048;
// Pivots of the paper: 32 of 48 x 48 heads, 512 of 20 x 32 x 128 rows.
constexpr double kPivotHeads = 32.0 / 2304, kPivotRows = 512.0 / 81920;

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

/// What is allocated. In global order: layer, head, and row where every row has its own gate.
struct Unit {
  int layer, head;
  int row;  // -1: the whole head
};

class RowBits {
 public:
  RowBits(const CodecConfig& config, CalibrationRun& run)
      : config_(config),
        run_(run),
        shapes_(run.shapes()),
        by_row_(shapes_.front().gate == Gate::kChannel),
        solver_(by_row_ ? allocate_lagrangian : allocate_exact) {
    for (int l = 0; l < static_cast<int>(shapes_.size()); ++l) {
      for (int h = 0; h < shapes_[at(l)].n_value_heads; ++h) {
        if (by_row_) {
          for (int i = 0; i < shapes_[at(l)].K; ++i) units_.push_back({l, h, i});
        } else {
          units_.push_back({l, h, -1});
        }
      }
    }
  }

  Status make(Calibration& result) {
    if (config_.options.at("bits") != "planned") {
      return {Code::kInvalidArgument,
              "bits=" + config_.options.at("bits") +
                  " sets a plan's widths aside; calibrate without it, and name it when the plan is "
                  "used"};
    }
    SP_RETURN_IF_ERROR(choose_budget());
    const std::int64_t interval = run_.options().interval > 0 ? run_.options().interval : kInterval;
    samples_ = run_.draw_samples(interval);
    SP_RETURN_IF_ERROR(run_.collect(samples_));
    weigh_rows();

    std::vector<std::uint8_t> pivots(units_.size(), 0);
    SP_ASSIGN_OR_RETURN(ErrorMeter meter, measure(pivots));
    AllocationProblem problem{widths_, {}, nominal_ * n_units()};
    SP_ASSIGN_OR_RETURN(problem.costs, costs(meter));
    if (n_pivots_ > 0) {
      SP_ASSIGN_OR_RETURN(const std::vector<double> risk, pivot_risk(meter, problem));
      pivots = top_units(risk, n_pivots_);
      if (by_row_) {  // pivot rows leave the fit of the columns, which changes the others' errors
        SP_ASSIGN_OR_RETURN(meter, measure(pivots));
        SP_ASSIGN_OR_RETURN(problem.costs, costs(meter));
      }
    }
    problem.budget = budget_;
    SP_ASSIGN_OR_RETURN(const Allocation allocation, allocate_rest(problem, pivots, solver_));
    set_bits(allocation.bits, layers_);
    result.cost = allocation.cost;
    report(meter, interval, allocation, result);
    result.plan.layers = std::move(layers_);
    return {};
  }

 private:
  std::int64_t n_units() const { return static_cast<std::int64_t>(units_.size()); }

  Status choose_budget() {
    // The argument of a scheme that needs such a plan is its nominal bits.
    if (config_.arg == "4") {
      nominal_ = 4, widths_ = {2, 4, 6, 8};
    } else if (config_.arg == "6") {
      nominal_ = 6, widths_ = {4, 6, 8};
    } else if (config_.arg == "8") {
      nominal_ = 8, widths_ = {8};
    } else {
      return {Code::kUnsupported, "no candidate widths are known for '" + config_.arg +
                                      "' nominal bits; take 4, 6 or 8"};
    }
    n_pivots_ = run_.options().n_pivots;
    if (n_pivots_ < 0) {
      n_pivots_ =
          std::llround((by_row_ ? kPivotRows : kPivotHeads) * static_cast<double>(n_units()));
    }
    budget_ = nominal_ * n_units() - kPivotCharge * std::min(n_pivots_, n_units());
    if (n_pivots_ > n_units() || budget_ < (n_units() - n_pivots_) * widths_.front()) {
      return {Code::kInvalidArgument,
              std::to_string(n_pivots_) + " pivots do not fit the budget of " +
                  std::to_string(n_units()) + (by_row_ ? " rows" : " heads") + " at " +
                  std::to_string(nominal_) + " bits (a pivot is charged " +
                  std::to_string(kPivotCharge) + "); take fewer pivots"};
    }
    return {};
  }

  void weigh_rows() {
    for (int l = 0; l < static_cast<int>(shapes_.size()); ++l) {
      const LayerShape& shape = shapes_[at(l)];
      LayerPlan& plan = layers_.emplace_back();
      plan.bits.assign(at(shape.n_value_heads) * at(shape.K), 0);
      for (int h = 0; h < shape.n_value_heads; ++h) {
        std::vector<double> omega;
        omega.reserve(at(shape.K));
        for (int i = 0; i < shape.K; ++i) {
          omega.push_back(run_.omega(l, h, i, CalibrationRun::kPooled));
        }
        const std::vector<float> w = row_factors(omega, run_.options().gamma);
        plan.row_weight.insert(plan.row_weight.end(), w.begin(), w.end());
      }
    }
  }

  /// Gives bits[u] to the rows of unit u.
  void set_bits(const std::vector<std::uint8_t>& bits, std::vector<LayerPlan>& layers) const {
    for (std::size_t u = 0; u < units_.size(); ++u) {
      const auto [l, h, row] = units_[u];
      const std::int64_t K = shapes_[at(l)].K;
      std::uint8_t* rows = layers[at(l)].bits.data() + h * K;
      if (row < 0) {
        std::fill(rows, rows + K, bits[u]);
      } else {
        rows[row] = bits[u];
      }
    }
  }

  /// One variant for each candidate, all units but the pivots at that width; and one in half
  /// precision where the choice of pivots compares with it.
  Result<ErrorMeter> measure(const std::vector<std::uint8_t>& pivots) {
    std::vector<int> widths = widths_;
    if (by_row_ && n_pivots_ > 0) widths.push_back(kPivotBits);
    std::vector<std::vector<LayerPlan>> variants;
    for (const int width : widths) {
      std::vector<std::uint8_t> bits(units_.size());
      for (std::size_t u = 0; u < bits.size(); ++u) {
        bits[u] = static_cast<std::uint8_t>(pivots[u] != 0 ? kPivotBits : width);
      }
      set_bits(bits, variants.emplace_back(layers_));
    }
    SP_ASSIGN_OR_RETURN(ErrorMeter meter,
                        ErrorMeter::make(config_, shapes_, variants, run_.n_domains()));
    SP_RETURN_IF_ERROR(run_.measure(samples_, meter));
    return meter;
  }

  /// d_u: mean squared error of a value in a variant; weighted by w_i^2 where the unit is a head.
  double distortion(const ErrorMeter::Sums& sums, std::size_t variant, const Unit& unit) const {
    const LayerShape& shape = shapes_[at(unit.layer)];
    const std::vector<double>& row_error = sums.row_error[variant];
    const double n_rows = static_cast<double>(sums.n_states) * shape.V;
    if (unit.row >= 0) return row_error[at(unit.row)] / n_rows;
    const float* w = layers_[at(unit.layer)].row_weight.data() + std::int64_t{unit.head} * shape.K;
    double sum = 0;
    for (int i = 0; i < shape.K; ++i) sum += double{w[i]} * w[i] * row_error[at(i)];
    return sum / (n_rows * shape.K);
  }

  /// Largest over the competing domains of L_u * value(sums, unit, c): [unit][n].
  template <class F>
  Result<std::vector<double>> lifetime_costs(const ErrorMeter& meter, std::size_t n,
                                             const F& value) const {
    std::vector<double> costs(units_.size() * n, -std::numeric_limits<double>::infinity());
    for (const int domain : run_.competing_domains()) {
      ErrorMeter::Sums sums;
      for (std::size_t u = 0; u < units_.size(); ++u) {
        const Unit& unit = units_[u];
        if (unit.row <= 0) sums = run_.sums(meter, unit.layer, unit.head, domain);
        SP_ASSIGN_OR_RETURN(
            const double lifetime,
            lifetime_weight(run_.log_decay(unit.layer, unit.head, std::max(unit.row, 0), domain),
                            run_.horizon(kHorizon)));
        for (std::size_t c = 0; c < n; ++c) {
          costs[u * n + c] = std::max(costs[u * n + c], lifetime * value(sums, unit, c));
        }
      }
    }
    return costs;
  }

  Result<std::vector<double>> costs(const ErrorMeter& meter) const {
    return lifetime_costs(meter, widths_.size(),
                          [&](const ErrorMeter::Sums& sums, const Unit& unit, std::size_t c) {
                            return distortion(sums, c, unit);
                          });
  }

  /// Of rows: L_u (d_u(8) - d_u(16)). Of heads: the cost that the allocation without pivots leaves.
  Result<std::vector<double>> pivot_risk(const ErrorMeter& meter,
                                         const AllocationProblem& problem) const {
    if (by_row_) {
      const std::size_t half = widths_.size();
      return lifetime_costs(
          meter, 1, [&](const ErrorMeter::Sums& sums, const Unit& unit, std::size_t) {
            return distortion(sums, half - 1, unit) - distortion(sums, half, unit);
          });
    }
    SP_ASSIGN_OR_RETURN(const Allocation free, solver_(problem));
    std::vector<double> risk;
    for (std::int64_t u = 0; u < n_units(); ++u) {
      risk.push_back(problem.costs_of(u)[candidate(free.bits[at(u)])]);
    }
    return risk;
  }

  std::ptrdiff_t candidate(int bits) const {
    return std::find(widths_.begin(), widths_.end(), bits) - widths_.begin();
  }

  void report(const ErrorMeter& meter, std::int64_t interval, const Allocation& allocation,
              Calibration& result) const {
    for (int l = 0; l < static_cast<int>(shapes_.size()); ++l) {
      const std::vector<std::uint8_t>& bits = layers_[at(l)].bits;
      LayerSummary& summary =
          result.layers.emplace_back(summarise_layer(run_, meter, l, [&](int head, int row) {
            const int width = bits[at(std::int64_t{head} * shapes_[at(l)].K + row)];
            return width == kPivotBits ? -1 : static_cast<int>(candidate(width));
          }));
      for (const std::uint8_t b : bits) summary.mean_bits += b;
      summary.mean_bits /= static_cast<double>(bits.size());
    }
    std::string candidates;
    for (const int width : widths_) {
      if (!candidates.empty()) candidates += ',';
      candidates += std::to_string(width);
    }
    auto& settings = result.plan.settings;
    settings["candidates"] = candidates;
    settings["gamma"] = std::to_string(run_.options().gamma);
    settings["horizon"] = std::to_string(run_.horizon(kHorizon));
    settings["interval"] = std::to_string(interval);
    settings["snapshots"] = std::to_string(samples_.updates.front().size());
    settings["units"] = std::to_string(n_units()) + (by_row_ ? " rows" : " heads");
    settings["pivots"] = std::to_string(n_pivots_);
    settings["budget_bits"] = std::to_string(budget_);
    settings["used_bits"] = std::to_string(allocation.n_bits);
  }

  const CodecConfig& config_;
  CalibrationRun& run_;
  const std::vector<LayerShape>& shapes_;
  bool by_row_;
  AllocationSolver solver_;
  std::vector<Unit> units_;
  std::vector<int> widths_;   // candidates
  std::int64_t nominal_ = 0;  // mean bits of a unit, pivots charged
  std::int64_t n_pivots_ = 0;
  std::int64_t budget_ = 0;  // bits of the units that are no pivots
  Samples samples_;
  std::vector<LayerPlan> layers_;
};

}  // namespace

Status make_row_bits(const CodecConfig& config, CalibrationRun& run, Calibration& result) {
  return RowBits(config, run).make(result);
}

}  // namespace statepack
