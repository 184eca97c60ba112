// The C API: argument checks, preparation of raw inputs, and handles around the C++ parts.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>

#include "base/exp.hpp"
#include "capi/handles.hpp"
#include "delta/kernels.hpp"

namespace statepack::capi {

std::string& last_error() {
  thread_local std::string error;
  return error;
}

Status need_layer(const CompiledScheme& scheme, std::int32_t layer) {
  const auto n = static_cast<std::int32_t>(scheme.layers().size());
  if (layer >= 0 && layer < n) return {};
  return invalid("layer " + std::to_string(layer) +
                 " does not exist; the scheme was compiled for " + std::to_string(n) +
                 " recurrent layers, counted from 0");
}

Status check_step_args(const sp_step_args* args, const CompiledScheme& scheme) {
  SP_RETURN_IF_ERROR(need_struct(args, "args"));
  SP_RETURN_IF_ERROR(need_layer(scheme, args->layer));
  if (args->n_rows < 0) return invalid("n_rows " + std::to_string(args->n_rows) + " is negative");
  if (args->first_valid_slot < 1) {
    return invalid("first_valid_slot " + std::to_string(args->first_valid_slot) +
                   " would make slot 0 a slot; this pool's slots begin at 1");
  }
  if (args->n_rows == 0) return {};
  const std::pair<const void*, const char*> pointers[] = {{args->read_slots, "read_slots"},
                                                          {args->q, "q"},
                                                          {args->k, "k"},
                                                          {args->v, "v"},
                                                          {args->g, "g"},
                                                          {args->beta, "beta"},
                                                          {args->out, "out"}};
  for (const auto& [pointer, name] : pointers) SP_RETURN_IF_ERROR(need(pointer, name));
  if (args->gates != SP_GATES_FINISHED && args->gates != SP_GATES_RAW) {
    return invalid("gates " + std::to_string(args->gates) +
                   " is neither SP_GATES_FINISHED nor SP_GATES_RAW");
  }
  if (args->gates == SP_GATES_RAW) {
    SP_RETURN_IF_ERROR(need(args->A_log, "A_log"));
    SP_RETURN_IF_ERROR(need(args->dt_bias, "dt_bias"));
    if (!(args->lower_bound <= 0) || !std::isfinite(args->lower_bound)) {
      return invalid("lower_bound must be a negative number, or 0 for none");
    }
  }
  if (args->reserved != 0 || args->reserved_2 != 0) {
    return invalid("the reserved fields of args must be 0");
  }
  const LayerShape& s = scheme.layers()[static_cast<std::size_t>(args->layer)].shape;
  if (args->n_rows > 1 && args->out_stride < std::int64_t{s.n_value_heads} * s.V) {
    return invalid("out_stride " + std::to_string(args->out_stride) + " is less than the " +
                   std::to_string(std::int64_t{s.n_value_heads} * s.V) +
                   " floats of a row, so that rows would overwrite one another");
  }
  return {};
}

}  // namespace statepack::capi

using statepack::Code;
using statepack::Gate;
using statepack::LayerShape;
using statepack::LayerState;
using statepack::Result;
using statepack::Status;
using statepack::StepInput;
using statepack::capi::guarded;
using statepack::capi::invalid;
using statepack::capi::last_error;
using statepack::capi::need;
using statepack::capi::need_struct;

struct sp_pool {
  std::unique_ptr<statepack::StatePool> slots;
  std::unique_ptr<statepack::ThreadPool> threads;
};
namespace {

static_assert(SP_INVALID_ARGUMENT == static_cast<int>(Code::kInvalidArgument) &&
              SP_NOT_FOUND == static_cast<int>(Code::kNotFound) &&
              SP_CORRUPT == static_cast<int>(Code::kCorrupt) &&
              SP_UNSUPPORTED == static_cast<int>(Code::kUnsupported) &&
              SP_MISMATCH == static_cast<int>(Code::kMismatch) &&
              SP_EXHAUSTED == static_cast<int>(Code::kExhausted) &&
              SP_NOT_FINITE == static_cast<int>(Code::kNotFinite) &&
              SP_IO == static_cast<int>(Code::kIo) &&
              SP_INTERRUPTED == static_cast<int>(Code::kInterrupted));

Status need_slot(const sp_pool* pool, std::int64_t slot) {
  SP_RETURN_IF_ERROR(need(pool, "pool"));
  if (slot >= 1 && slot <= pool->slots->n_slots()) return {};
  return invalid("slot " + std::to_string(slot) + " does not exist; the pool has slots 1 to " +
                 std::to_string(pool->slots->n_slots()));
}

Status need_layer(const sp_pool* pool, std::int32_t layer) {
  SP_RETURN_IF_ERROR(need(pool, "pool"));
  return statepack::capi::need_layer(pool->slots->scheme(), layer);
}

Status need_used(const sp_pool* pool, std::int64_t slot) {
  SP_RETURN_IF_ERROR(need_slot(pool, slot));
  if (pool->slots->state(slot) != statepack::SlotState::kFree) return {};
  return invalid("slot " + std::to_string(slot) + " is free; allocate a slot before using it");
}

/// Slots in either width as 64-bit numbers.
Status widen(const void* slots, std::int32_t type, std::int32_t n,
             std::vector<std::int64_t>& wide) {
  wide.resize(static_cast<std::size_t>(n));
  if (type == SP_SLOTS_I64) {
    std::copy_n(static_cast<const std::int64_t*>(slots), n, wide.begin());
  } else if (type == SP_SLOTS_I32) {
    std::copy_n(static_cast<const std::int32_t*>(slots), n, wide.begin());
  } else {
    return invalid("slot_type " + std::to_string(type) +
                   " is neither SP_SLOTS_I64 nor SP_SLOTS_I32");
  }
  return {};
}

/// Slots that are no padding must be allocated: a free one would hand its contents to the next
/// owner.
Status need_all_used(const sp_pool* pool, std::int64_t first_valid_slot,
                     const std::vector<std::int64_t>& slots) {
  for (const std::int64_t slot : slots) {
    if (slot >= first_valid_slot) SP_RETURN_IF_ERROR(need_used(pool, slot));
  }
  return {};
}

/// x rsqrt(sum x^2 + 1e-6) scale, for every head of one row.
void normalise(const float* x, int n_heads, int width, float scale, float* y) {
  for (int h = 0; h < n_heads; ++h, x += width, y += width) {
    const float length = std::sqrt(statepack::kernel::dot(x, x, width) + 1e-6f);
    for (int i = 0; i < width; ++i) y[i] = x[i] / length * scale;
  }
}

float log_decay(const sp_step_args& args, float rate, float x) {
  if (args.lower_bound != 0) return args.lower_bound * statepack::sigmoid_f32(rate * x);
  const float softplus = x > 20 ? x : std::log1p(statepack::exp_f32(x));
  return -rate * softplus;
}

/// Finished gates of one row from raw ones.
void finish_gates(const sp_step_args& args, const LayerShape& s, std::int64_t row, float* g,
                  float* beta) {
  const float* a = args.g + row * args.g_stride;
  const float* b = args.beta + row * args.beta_stride;
  const int width = s.gate_width();
  for (int h = 0; h < s.n_value_heads; ++h) {
    const float rate = statepack::exp_f32(args.A_log[h]);
    for (int i = h * width; i < (h + 1) * width; ++i) {
      g[i] = log_decay(args, rate, a[i] + args.dt_bias[i]);
    }
    beta[h] = statepack::sigmoid_f32(b[h]);
  }
}

/// Prepared copies of q, k, g and beta; a thread keeps them between calls.
struct Prepared {
  std::vector<std::int64_t> read, write;
  std::vector<float> q, k, g, beta;

  static float* sized(std::vector<float>& x, std::int64_t n) {
    if (static_cast<std::int64_t>(x.size()) < n) x.resize(static_cast<std::size_t>(n));
    return x.data();
  }
};

Status check_step(const sp_pool* pool, const sp_step_args* args) {
  SP_RETURN_IF_ERROR(need(pool, "pool"));
  return statepack::capi::check_step_args(args, pool->slots->scheme());
}

Status run_step(sp_pool* pool, const sp_step_args* args) {
  SP_RETURN_IF_ERROR(check_step(pool, args));
  if (args->n_rows == 0) return {};
  const LayerState state = pool->slots->layer(args->layer);
  const LayerShape& s = state.layer->shape;
  const std::int64_t B = args->n_rows;
  thread_local Prepared prepared;
  StepInput in;
  SP_RETURN_IF_ERROR(widen(args->read_slots, args->slot_type, args->n_rows, prepared.read));
  SP_RETURN_IF_ERROR(need_all_used(pool, args->first_valid_slot, prepared.read));
  in.read_slots = prepared.read.data();
  if (args->write_slots != nullptr) {
    SP_RETURN_IF_ERROR(widen(args->write_slots, args->slot_type, args->n_rows, prepared.write));
    SP_RETURN_IF_ERROR(need_all_used(pool, args->first_valid_slot, prepared.write));
    in.write_slots = prepared.write.data();
  }
  in.n_rows = args->n_rows;
  in.first_valid_slot = args->first_valid_slot;
  in.q = args->q, in.q_stride = args->q_stride;
  in.k = args->k, in.k_stride = args->k_stride;
  in.v = args->v, in.v_stride = args->v_stride;
  in.g = args->g, in.g_stride = args->g_stride;
  in.beta = args->beta, in.beta_stride = args->beta_stride;
  in.out = args->out, in.out_stride = args->out_stride;
  in.positions = args->positions;

  const bool raw_keys = args->normalise != 0, raw_gates = args->gates == SP_GATES_RAW;
  const std::int64_t key_width = std::int64_t{s.n_key_heads} * s.K;
  const std::int64_t gate_width = std::int64_t{s.n_value_heads} * s.gate_width();
  float *q = nullptr, *k = nullptr, *g = nullptr, *beta = nullptr;
  if (raw_keys) {
    in.q = q = Prepared::sized(prepared.q, B * key_width), in.q_stride = key_width;
    in.k = k = Prepared::sized(prepared.k, B * key_width), in.k_stride = key_width;
  }
  if (raw_gates) {
    in.g = g = Prepared::sized(prepared.g, B * gate_width), in.g_stride = gate_width;
    in.beta = beta = Prepared::sized(prepared.beta, B * s.n_value_heads);
    in.beta_stride = s.n_value_heads;
  }
  if (raw_keys || raw_gates) {
    pool->threads->parallel_for(B, [&](std::int64_t row, int) {
      if (raw_keys) {
        const float scale = 1.0f / std::sqrt(static_cast<float>(s.K));
        normalise(args->q + row * args->q_stride, s.n_key_heads, s.K, scale, q + row * key_width);
        normalise(args->k + row * args->k_stride, s.n_key_heads, s.K, 1, k + row * key_width);
      }
      if (raw_gates) {
        finish_gates(*args, s, row, g + row * gate_width, beta + row * s.n_value_heads);
      }
    });
  }
  return step(state, in, *pool->threads);
}

Status check_layout(const LayerShape& s, int32_t layout, std::int64_t head_stride) {
  if (layout != SP_LAYOUT_KEY_MAJOR && layout != SP_LAYOUT_VALUE_MAJOR) {
    return invalid("layout " + std::to_string(layout) +
                   " is neither SP_LAYOUT_KEY_MAJOR nor SP_LAYOUT_VALUE_MAJOR");
  }
  if (head_stride == 0 || head_stride >= std::int64_t{s.K} * s.V) return {};
  return invalid("head_stride " + std::to_string(head_stride) + " is less than a state of " +
                 std::to_string(s.K) + " x " + std::to_string(s.V) + " floats; use 0 for dense");
}

/// Copies states between the caller's layout and [HV][K][V].
void copy_states(const LayerShape& s, const float* from, std::int64_t from_stride, float* to,
                 std::int64_t to_stride, bool transpose, int n_rows, int n_columns) {
  for (int h = 0; h < s.n_value_heads; ++h, from += from_stride, to += to_stride) {
    if (!transpose) {
      std::copy_n(from, std::int64_t{n_rows} * n_columns, to);
      continue;
    }
    for (std::int64_t i = 0; i < n_rows; ++i) {  // from [rows][columns] to [columns][rows]
      for (std::int64_t j = 0; j < n_columns; ++j) to[j * n_rows + i] = from[i * n_columns + j];
    }
  }
}

}  // namespace

extern "C" {

int sp_api_version(void) { return SP_API_VERSION; }

const char* sp_code_name(int code) {
  if (code < SP_OK || code > SP_INTERRUPTED) return "unknown";
  return statepack::code_name(static_cast<Code>(code)).data();  // names are string literals
}

const char* sp_last_error(void) { return last_error().c_str(); }

sp_code sp_scheme_print(const char* name, int full, char* text, size_t capacity, size_t* n_needed) {
  return guarded([&]() -> Status {
    SP_RETURN_IF_ERROR(need(name, "name"));
    SP_ASSIGN_OR_RETURN(const auto scheme, statepack::Scheme::parse(name));
    const std::string printed = full != 0 ? scheme.full_name() : scheme.name();
    if (n_needed != nullptr) *n_needed = printed.size() + 1;
    if (text == nullptr) return {};
    if (capacity < printed.size() + 1) {
      return invalid("the printed name takes " + std::to_string(printed.size() + 1) +
                     " bytes, but capacity is " + std::to_string(capacity));
    }
    std::memcpy(text, printed.c_str(), printed.size() + 1);
    return {};
  });
}

sp_code sp_scheme_compile(const char* name, const sp_layer_shape* layers, int32_t n_layers,
                          const char* plan_path, const char* model_fingerprint,
                          sp_scheme** scheme) {
  return guarded([&]() -> Status {
    SP_RETURN_IF_ERROR(need(name, "name"));
    SP_RETURN_IF_ERROR(need(layers, "layers"));
    SP_RETURN_IF_ERROR(need(scheme, "scheme"));
    SP_ASSIGN_OR_RETURN(const auto parsed, statepack::Scheme::parse(name));
    std::vector<LayerShape> shapes;
    for (std::int32_t i = 0; i < n_layers; ++i) {
      const sp_layer_shape& s = layers[i];
      if (s.gate != SP_GATE_SCALAR && s.gate != SP_GATE_CHANNEL) {
        return invalid("layers[" + std::to_string(i) + "].gate " + std::to_string(s.gate) +
                       " is neither SP_GATE_SCALAR nor SP_GATE_CHANNEL");
      }
      shapes.push_back({s.n_key_heads, s.n_value_heads, s.K, s.V,
                        s.gate == SP_GATE_SCALAR ? Gate::kScalar : Gate::kChannel});
    }
    std::optional<statepack::Plan> plan;
    if (plan_path != nullptr) {
      SP_ASSIGN_OR_RETURN(plan, statepack::Plan::load(plan_path));
    }
    SP_ASSIGN_OR_RETURN(auto compiled, statepack::CompiledScheme::make(
                                           parsed, shapes, plan.has_value() ? &*plan : nullptr,
                                           model_fingerprint == nullptr ? "" : model_fingerprint));
    *scheme = new sp_scheme{std::move(compiled)};
    return {};
  });
}

void sp_scheme_destroy(sp_scheme* scheme) { delete scheme; }

sp_code sp_scheme_bits(const sp_scheme* scheme, sp_bits* bits) {
  return guarded([&]() -> Status {
    SP_RETURN_IF_ERROR(need(scheme, "scheme"));
    SP_RETURN_IF_ERROR(need_struct(bits, "bits"));
    const statepack::SchemeBits b = scheme->compiled->bits();
    bits->payload_bits = b.payload;
    bits->resident_bits = b.resident;
    bits->page_bytes = b.page_bytes;
    bits->window_bytes = b.window_bytes;
    bits->cursor_bytes = b.cursor_bytes;
    bits->n_values = b.n_values;
    return {};
  });
}

sp_code sp_scheme_bytes_per_slot(const sp_scheme* scheme, int64_t conv_floats, int64_t* n_bytes) {
  return guarded([&]() -> Status {
    SP_RETURN_IF_ERROR(need(scheme, "scheme"));
    SP_RETURN_IF_ERROR(need(n_bytes, "n_bytes"));
    if (conv_floats < 0 || conv_floats > std::int64_t{1} << 32) {
      return invalid("conv_floats " + std::to_string(conv_floats) + " is not a size");
    }
    *n_bytes = statepack::StatePool::bytes_per_slot(*scheme->compiled, conv_floats);
    return {};
  });
}

sp_code sp_pool_create(const sp_scheme* scheme, const sp_pool_config* config, sp_pool** pool) {
  return guarded([&]() -> Status {
    SP_RETURN_IF_ERROR(need(scheme, "scheme"));
    SP_RETURN_IF_ERROR(need(pool, "pool"));
    SP_RETURN_IF_ERROR(need_struct(config, "config"));
    if (config->device != SP_DEVICE_CPU || config->device_index != 0) {
      return Status(Code::kUnsupported, "device " + std::to_string(config->device) + ", index " +
                                            std::to_string(config->device_index) +
                                            " is not in this build; use SP_DEVICE_CPU, index 0");
    }
    if (config->n_threads < 0) {
      return invalid("n_threads " + std::to_string(config->n_threads) + " is negative");
    }
    auto made = std::make_unique<sp_pool>();
    SP_ASSIGN_OR_RETURN(made->slots, statepack::StatePool::create(
                                         scheme->compiled, {.n_slots = config->n_slots,
                                                            .conv_floats = config->conv_floats,
                                                            .max_bytes = config->max_bytes}));
    made->threads = std::make_unique<statepack::ThreadPool>(config->n_threads);
    *pool = made.release();
    return {};
  });
}

void sp_pool_destroy(sp_pool* pool) { delete pool; }

int64_t sp_pool_n_slots(const sp_pool* pool) {
  return pool == nullptr ? 0 : pool->slots->n_slots();
}
int64_t sp_pool_n_free(const sp_pool* pool) { return pool == nullptr ? 0 : pool->slots->n_free(); }
int64_t sp_pool_bytes_allocated(const sp_pool* pool) {
  return pool == nullptr ? 0 : pool->slots->bytes_allocated();
}
int64_t sp_pool_nonfinite_total(const sp_pool* pool) {
  return pool == nullptr ? 0 : pool->slots->nonfinite_total();
}

sp_code sp_slot_alloc(sp_pool* pool, int64_t* slot) {
  return guarded([&]() -> Status {
    SP_RETURN_IF_ERROR(need(pool, "pool"));
    SP_RETURN_IF_ERROR(need(slot, "slot"));
    SP_ASSIGN_OR_RETURN(*slot, pool->slots->alloc());
    return {};
  });
}

sp_code sp_slot_free(sp_pool* pool, int64_t slot) {
  return guarded([&]() -> Status {
    SP_RETURN_IF_ERROR(need(pool, "pool"));
    return pool->slots->try_free(slot);
  });
}

sp_code sp_slot_get_state(const sp_pool* pool, int64_t slot, sp_slot_state* state) {
  return guarded([&]() -> Status {
    SP_RETURN_IF_ERROR(need_slot(pool, slot));
    SP_RETURN_IF_ERROR(need(state, "state"));
    switch (pool->slots->state(slot)) {
      case statepack::SlotState::kFree:
        *state = SP_SLOT_FREE;
        break;
      case statepack::SlotState::kUsed:
        *state = SP_SLOT_USED;
        break;
      case statepack::SlotState::kQuarantined:
        *state = SP_SLOT_QUARANTINED;
        break;
    }
    return {};
  });
}

sp_code sp_slot_get_tokens(const sp_pool* pool, int64_t slot, int64_t* n_tokens) {
  return guarded([&]() -> Status {
    SP_RETURN_IF_ERROR(need_used(pool, slot));
    SP_RETURN_IF_ERROR(need(n_tokens, "n_tokens"));
    *n_tokens = pool->slots->n_tokens(slot);
    return {};
  });
}

sp_code sp_slot_set_tokens(sp_pool* pool, int64_t slot, int64_t n_tokens) {
  return guarded([&]() -> Status {
    SP_RETURN_IF_ERROR(need_used(pool, slot));
    if (n_tokens < 0) return invalid("n_tokens " + std::to_string(n_tokens) + " is negative");
    pool->slots->set_n_tokens(slot, n_tokens);
    return {};
  });
}

sp_code sp_slot_conv(sp_pool* pool, int64_t slot, float** conv) {
  return guarded([&]() -> Status {
    SP_RETURN_IF_ERROR(need_used(pool, slot));
    SP_RETURN_IF_ERROR(need(conv, "conv"));
    if (pool->slots->scheme().scheme().conv != statepack::ConvFormat::kF32) {
      return {statepack::Code::kUnsupported,
              "the pool's scheme keeps the convolution history in bf16; leave conv= out to read "
              "and write it as f32, or keep it elsewhere (conv_floats 0)"};
    }
    *conv = pool->slots->conv(slot);
    return {};
  });
}

sp_code sp_slot_copy(sp_pool* pool, int64_t from, int64_t to) {
  return guarded([&]() -> Status {
    SP_RETURN_IF_ERROR(need(pool, "pool"));
    return pool->slots->copy(from, to);
  });
}

sp_code sp_slot_snapshot(const sp_pool* pool, int64_t slot, int with_windows,
                         sp_snapshot** snapshot) {
  return guarded([&]() -> Status {
    SP_RETURN_IF_ERROR(need(pool, "pool"));
    SP_RETURN_IF_ERROR(need(snapshot, "snapshot"));
    SP_ASSIGN_OR_RETURN(auto taken, pool->slots->snapshot(slot, with_windows != 0));
    *snapshot = new sp_snapshot{std::move(taken)};
    return {};
  });
}

const void* sp_snapshot_data(const sp_snapshot* snapshot, size_t* n_bytes) {
  if (n_bytes != nullptr) *n_bytes = snapshot == nullptr ? 0 : snapshot->snapshot.bytes.size();
  return snapshot == nullptr ? nullptr : snapshot->snapshot.bytes.data();
}

void sp_snapshot_destroy(sp_snapshot* snapshot) { delete snapshot; }

sp_code sp_slot_restore(sp_pool* pool, int64_t slot, const void* data, size_t n_bytes) {
  return guarded([&]() -> Status {
    SP_RETURN_IF_ERROR(need(pool, "pool"));
    SP_RETURN_IF_ERROR(need(data, "data"));
    return pool->slots->restore(slot, {static_cast<const std::byte*>(data), n_bytes});
  });
}

sp_code sp_slot_save(const sp_pool* pool, int64_t slot, const char* path) {
  return guarded([&]() -> Status {
    SP_RETURN_IF_ERROR(need(pool, "pool"));
    SP_RETURN_IF_ERROR(need(path, "path"));
    return pool->slots->save(slot, path);
  });
}

sp_code sp_slot_load(sp_pool* pool, int64_t slot, const char* path) {
  return guarded([&]() -> Status {
    SP_RETURN_IF_ERROR(need(pool, "pool"));
    SP_RETURN_IF_ERROR(need(path, "path"));
    return pool->slots->load(slot, path);
  });
}

sp_code sp_hand_over(sp_pool* pool, int32_t layer, int64_t slot, const float* S, int32_t layout,
                     int64_t head_stride, int64_t n_tokens) {
  return guarded([&]() -> Status {
    SP_RETURN_IF_ERROR(need_layer(pool, layer));
    SP_RETURN_IF_ERROR(need_used(pool, slot));
    SP_RETURN_IF_ERROR(need(S, "S"));
    const LayerState state = pool->slots->layer(layer);
    const LayerShape& s = state.layer->shape;
    SP_RETURN_IF_ERROR(check_layout(s, layout, head_stride));
    const std::int64_t n = std::int64_t{s.K} * s.V;
    std::vector<float> dense;
    if (layout == SP_LAYOUT_VALUE_MAJOR || (head_stride != 0 && head_stride != n)) {
      dense.resize(static_cast<std::size_t>(s.n_values()));
      const bool transpose = layout == SP_LAYOUT_VALUE_MAJOR;
      copy_states(s, S, head_stride == 0 ? n : head_stride, dense.data(), n, transpose,
                  transpose ? s.V : s.K, transpose ? s.K : s.V);
      S = dense.data();
    }
    return statepack::hand_over(state, slot, S, n_tokens, *pool->threads);
  });
}

sp_code sp_restore_dense(sp_pool* pool, int32_t layer, int64_t slot, float* S, int32_t layout,
                         int64_t head_stride) {
  return guarded([&]() -> Status {
    SP_RETURN_IF_ERROR(need_layer(pool, layer));
    SP_RETURN_IF_ERROR(need_used(pool, slot));
    SP_RETURN_IF_ERROR(need(S, "S"));
    const LayerState state = pool->slots->layer(layer);
    const LayerShape& s = state.layer->shape;
    SP_RETURN_IF_ERROR(check_layout(s, layout, head_stride));
    const std::int64_t n = std::int64_t{s.K} * s.V;
    std::vector<float> dense(static_cast<std::size_t>(s.n_values()));
    SP_RETURN_IF_ERROR(statepack::restore_dense(state, slot, dense.data(), *pool->threads));
    copy_states(s, dense.data(), n, S, head_stride == 0 ? n : head_stride,
                layout == SP_LAYOUT_VALUE_MAJOR, s.K, s.V);
    return {};
  });
}

sp_code sp_step(sp_pool* pool, const sp_step_args* args) {
  return guarded([&] { return run_step(pool, args); });
}

sp_code sp_flush(sp_pool* pool, int32_t layer, const void* slots, int32_t slot_type,
                 int32_t n_slots) {
  return guarded([&]() -> Status {
    if (layer != -1) SP_RETURN_IF_ERROR(need_layer(pool, layer));
    SP_RETURN_IF_ERROR(need(pool, "pool"));
    SP_RETURN_IF_ERROR(need(slots, "slots"));
    if (n_slots < 0) return invalid("n_slots " + std::to_string(n_slots) + " is negative");
    std::vector<std::int64_t> list;
    SP_RETURN_IF_ERROR(widen(slots, slot_type, n_slots, list));
    SP_RETURN_IF_ERROR(need_all_used(pool, std::numeric_limits<std::int64_t>::min(), list));
    const auto n_layers = static_cast<std::int32_t>(pool->slots->scheme().layers().size());
    for (std::int32_t i = layer == -1 ? 0 : layer; i < (layer == -1 ? n_layers : layer + 1); ++i) {
      SP_RETURN_IF_ERROR(statepack::flush(pool->slots->layer(i), list, *pool->threads));
    }
    return {};
  });
}

}  // extern "C"
