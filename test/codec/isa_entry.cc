#include "isa_entry.hpp"

#include <vector>

#include "codec/codec.hpp"

extern "C" bool SP_ISA_ENTRY(const IsaCase& test, std::uint8_t* page, std::int64_t page_bytes,
                             float* restored) {
  using namespace statepack;
  CodecConfig config{.info = find_codec(test.codec), .arg = test.arg, .options = {}};
  config.rounding = static_cast<Rounding>(test.rounding);
  if (config.info == nullptr) return false;
  for (int i = 0; i < test.n_options; ++i) {
    config.options[test.option_keys[i]] = test.option_values[i];
  }
  const LayerShape shape{test.n_key_heads, test.n_value_heads, test.K, test.V,
                         test.channel_gate ? Gate::kChannel : Gate::kScalar};
  const std::size_t n_rows = static_cast<std::size_t>(shape.n_value_heads * shape.K);
  LayerPlan plan;
  plan.bits.assign(test.bits, test.bits + n_rows);
  plan.row_weight.assign(test.row_weight, test.row_weight + n_rows);
  plan.row_scale.assign(test.row_scale, test.row_scale + n_rows);
  plan.high.assign(test.high, test.high + shape.n_value_heads);
  const auto codec = config.info->make(config, shape, &plan);
  if (!codec.ok() || codec.value()->page_bytes() != page_bytes) return false;
  const RoundingContext at{.seed = test.seed, .layer = test.layer, .step = test.step};
  std::vector<std::byte> scratch(codec.value()->scratch_bytes());
  for (int head = 0; head < shape.n_value_heads; ++head) {
    codec.value()->encode(head, test.X, page, at, {scratch});
    codec.value()->decode(head, page, restored + std::int64_t{head} * shape.K * shape.V, {scratch});
  }
  return true;
}
