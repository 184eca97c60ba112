// A copy of all codecs compiled for one instruction set alone, without function clones. The copy
// lives in a namespace of its own (statepack is a macro there), so only plain C types cross.
#pragma once

#include <cstddef>
#include <cstdint>

struct IsaCase {
  const char* codec;
  const char* arg;
  const char* const* option_keys;
  const char* const* option_values;
  int n_options;
  int n_key_heads, n_value_heads, K, V;
  bool channel_gate;
  int rounding;  // Rounding; drawn at the place that follows
  std::uint64_t seed, step;
  std::uint32_t layer;
  const std::uint8_t* bits;  // LayerPlan, [HV*K], [HV*K], [HV*K], [HV]
  const float* row_weight;
  const float* row_scale;
  const std::uint8_t* high;
  const float* X;  // [K][V], encoded as every head
};

/// Encodes into `page` [page_bytes] and decodes into `restored` [HV][K][V]. False when the copy
/// cannot make the codec or has another page size.
using IsaRun = bool(const IsaCase&, std::uint8_t* page, std::int64_t page_bytes, float* restored);

extern "C" IsaRun codec_run_portable;
extern "C" IsaRun codec_run_v3;
