// Plans of kind "pace-high": the quarter of each layer's heads that stays at 8 bits (pace, section
// 8).
#include <algorithm>
#include <string>

#include "calibrate/allocate.hpp"
#include "calibrate/run.hpp"

namespace statepack {
namespace {

constexpr std::int64_t kInterval = 256;
constexpr double kLowBits = 4, kHighBits = 8;

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

}  // namespace

Status make_high_heads(const CodecConfig& config, int period, CalibrationRun& run,
                       Calibration& result) {
  const std::vector<LayerShape>& shapes = run.shapes();
  const std::int64_t interval = run.options().interval > 0 ? run.options().interval : kInterval;
  // Two variants: all heads low, all heads high. Only the first ranks; the second is for the
  // report.
  std::vector<std::vector<LayerPlan>> variants(2);
  for (const LayerShape& shape : shapes) {
    for (const int high : {0, 1}) {
      variants[at(high)].emplace_back().high.assign(at(shape.n_value_heads),
                                                    static_cast<std::uint8_t>(high));
    }
  }
  SP_ASSIGN_OR_RETURN(ErrorMeter meter,
                      ErrorMeter::make(config, shapes, variants, run.n_domains()));
  SP_RETURN_IF_ERROR(run.collect(run.every(interval), meter));

  for (int l = 0; l < static_cast<int>(shapes.size()); ++l) {
    const LayerShape& shape = shapes[at(l)];
    std::vector<double> risk(at(shape.n_value_heads), 0.0);
    for (const int domain : run.competing_domains()) {
      for (int h = 0; h < shape.n_value_heads; ++h) {
        // E_h = e_h / (1 - a_h^(2 dP)), row by row: with one gate a head that is the same, with a
        // gate for each channel every row forgets at its own pace.
        const ErrorMeter::Sums sums = run.sums(meter, l, h, domain);
        double energy = 0;
        for (int i = 0; i < shape.K; ++i) {
          energy += residual_error(sums.row_error[0][at(i)] / static_cast<double>(sums.n_states),
                                   run.log_decay(l, h, i, domain), period);
        }
        risk[at(h)] = std::max(risk[at(h)], energy);
      }
    }
    const int n_high = (shape.n_value_heads + 3) / 4;
    LayerPlan& plan = result.plan.layers.emplace_back();
    plan.high = top_units(risk, n_high);
    for (std::size_t h = 0; h < risk.size(); ++h) {
      if (plan.high[h] == 0) result.cost += risk[h];
    }
    LayerSummary& summary = result.layers.emplace_back(
        summarise_layer(run, meter, l, [&](int head, int) { return int{plan.high[at(head)]}; }));
    summary.mean_bits = kLowBits + (kHighBits - kLowBits) * n_high / shape.n_value_heads;
  }
  result.plan.settings["interval"] = std::to_string(interval);
  result.plan.settings["period"] = std::to_string(period);
  return {};
}

}  // namespace statepack
