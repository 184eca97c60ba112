// Plans of kind "damp-rows": the eighth of each head's key rows that stays in half precision.
#include <algorithm>
#include <string>

#include "calibrate/allocate.hpp"
#include "calibrate/run.hpp"

namespace statepack {
namespace {

constexpr std::int64_t kInterval = 8, kHorizon = 256;
constexpr int kProtectedShare = 8;  // one row of so many: 16 of 128
constexpr std::uint8_t kProtectedBits = 16;

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

}  // namespace

// R_i = e_i sum_{tau <= horizon} prod_{s <= tau} lambda_i^2: the mean error of row i in the low
// format times how long one write's error is read. The published form takes the mean of the product
// over tokens; here it is a product of means (of errors, and of log retentions). Where a head has
// one gate, both order its rows as e_i does.
Status make_protected_rows(const CodecConfig& config, CalibrationRun& run, Calibration& result) {
  const std::vector<LayerShape>& shapes = run.shapes();
  const std::int64_t interval = run.options().interval > 0 ? run.options().interval : kInterval;
  const std::int64_t horizon = run.horizon(kHorizon);
  const auto low_bits = static_cast<std::uint8_t>(config.arg[0] - '0');
  std::vector<std::vector<LayerPlan>> variants(1);  // every row in the low format
  for (const LayerShape& shape : shapes) {
    LayerPlan plan;
    plan.bits.assign(at(std::int64_t{shape.n_value_heads} * shape.K), low_bits);
    variants[0].push_back(std::move(plan));
  }
  SP_ASSIGN_OR_RETURN(ErrorMeter meter,
                      ErrorMeter::make(config, shapes, variants, run.n_domains()));
  SP_RETURN_IF_ERROR(run.collect(run.draw_samples(interval), meter));

  for (int l = 0; l < static_cast<int>(shapes.size()); ++l) {
    const LayerShape& shape = shapes[at(l)];
    LayerPlan& plan = result.plan.layers.emplace_back();
    for (int h = 0; h < shape.n_value_heads; ++h) {
      std::vector<double> risk(at(shape.K), 0.0);
      for (const int domain : run.competing_domains()) {
        const ErrorMeter::Sums sums = run.sums(meter, l, h, domain);
        for (int i = 0; i < shape.K; ++i) {
          SP_ASSIGN_OR_RETURN(const double lifetime,
                              lifetime_weight(run.log_decay(l, h, i, domain), horizon + 1));
          const double error = sums.row_error[0][at(i)] / static_cast<double>(sums.n_states);
          risk[at(i)] = std::max(risk[at(i)], error * lifetime);
        }
      }
      const std::vector<std::uint8_t> chosen = top_units(risk, shape.K / kProtectedShare);
      for (int i = 0; i < shape.K; ++i) {
        plan.bits.push_back(chosen[at(i)] != 0 ? kProtectedBits : low_bits);
        if (chosen[at(i)] == 0) result.cost += risk[at(i)];
      }
    }
    LayerSummary& summary =
        result.layers.emplace_back(summarise_layer(run, meter, l, [&](int head, int row) {
          return plan.bits[at(std::int64_t{head} * shape.K + row)] == kProtectedBits ? -1 : 0;
        }));
    for (const std::uint8_t b : plan.bits) summary.mean_bits += b;
    summary.mean_bits /= static_cast<double>(plan.bits.size());
  }
  result.plan.settings["interval"] = std::to_string(interval);
  result.plan.settings["horizon"] = std::to_string(horizon);
  result.plan.settings["snapshots"] = std::to_string(run.options().n_snapshots);
  return {};
}

}  // namespace statepack
