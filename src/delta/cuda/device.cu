#include "delta/cuda/device.hpp"

#include <algorithm>
#include <string>

#include "delta/cuda/kernels.cuh"

namespace statepack::cuda {
namespace {

constexpr int kMaxRows = 65535;         // of a grid
constexpr std::size_t kCounters = 256;  // bytes before the arrays of a workspace

Status unsupported(const std::string& what) {
  return {Code::kUnsupported, what + "; run this scheme on the CPU or choose another"};
}

KernelSet kernels_for(const PageMap& map, const Choice& choice) {
  Choice known = choice;  // kernels of full.cuh know the usual options only
  switch (map.family) {
    case PageFamily::kF32:
    case PageFamily::kBf16:
    case PageFamily::kF16:
      return dense_kernels(map.family, choice);
    case PageFamily::kInt:
      return int_kernels(map.heads.front().bits, choice);
    case PageFamily::kLeapquant:
      known.full =
          choice.full && !map.f16_scales && map.rounds == 1 && (map.rank == 4 || map.rank == 8);
      return map.clip ? KernelSet{} : leapquant_kernels(map.heads.front().bits, known);
    case PageFamily::kPace:
      known.full = choice.full && (map.affine || map.group == 64);
      return map.group % kWarpRows != 0 ? KernelSet{} : pace_kernels(map.affine, known);
    case PageFamily::kStepquant:
      break;
  }
  // Eight lanes share a row scale of 2-bit heads: 32 columns, or all of a narrower state.
  const bool grouped = std::any_of(map.heads.begin(), map.heads.end(),
                                   [](const HeadMap& head) { return head.signed_levels; });
  return grouped && map.group != 32 ? KernelSet{} : stepquant_kernels(choice);
}

}  // namespace

// ---------------------------------------------------------------------------------------------

Result<Workspace> Workspace::make(int max_rows) {
  if (max_rows < 1 || max_rows > kMaxRows) {
    return Status(Code::kInvalidArgument, "a workspace of " + std::to_string(max_rows) +
                                              " rows; it may hold 1 to " +
                                              std::to_string(kMaxRows));
  }
  Workspace work;
  work.max_rows_ = max_rows;
  SP_ASSIGN_OR_RETURN(work.memory_,
                      DeviceBytes::make(kCounters + 8 * static_cast<std::size_t>(max_rows)));
  return Result<Workspace>(std::move(work));  // nvcc does not move by itself
}

WorkView Workspace::view() const {
  WorkView view;
  auto* counters = reinterpret_cast<std::uint32_t*>(memory_.data());
  view.n_due = reinterpret_cast<std::int32_t*>(counters);
  view.n_exits = counters + 1;
  view.tickets = reinterpret_cast<std::uint32_t*>(memory_.data() + kCounters);
  view.due_rows = reinterpret_cast<std::int32_t*>(view.tickets + max_rows_);
  return view;
}

// ---------------------------------------------------------------------------------------------

struct DeviceLayer::Impl {
  LayerView view;
  Gate gate = Gate::kScalar;
  KernelSet kernels;
  DeviceBytes heads, rows, start;
  int rewrite_threads = 0, n_multiprocessors = 0, rewrite_blocks = 0;
  std::size_t step_shared = 0, rewrite_shared = 0, rewrite_step_shared = 0, dense_shared = 0;

  LaunchArgs args(const PoolView& pool, const Workspace& work) const {
    LaunchArgs a;
    a.layer = view;
    a.pool = pool;
    a.work = work.view();
    return a;
  }
  /// Blocks stride over heads of rows, so that their number need not be known on the host.
  Status rewrite(const LaunchArgs& a, int most_rows, void* stream, bool of_step) const {
    const int n_blocks = std::min(rewrite_blocks, most_rows * view.n_value_heads);
    return check(launch(of_step ? kernels.rewrite_step : kernels.rewrite, n_blocks, 1,
                        rewrite_threads, of_step ? rewrite_step_shared : rewrite_shared, stream, a),
                 "a rewrite of pages");
  }
};

DeviceLayer::DeviceLayer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
DeviceLayer::~DeviceLayer() = default;
const LayerView& DeviceLayer::view() const { return impl_->view; }

Result<std::unique_ptr<DeviceLayer>> DeviceLayer::make(const CompiledLayer& layer,
                                                       const Scheme& scheme) {
  const LayerShape& shape = layer.shape;
  const std::string what = "scheme " + scheme.name() + " with K " + std::to_string(shape.K) +
                           " and V " + std::to_string(shape.V);
  const auto fits = [](int width) { return width % 16 == 0 && width <= kMaxWidth; };
  if (!fits(shape.K) || !fits(shape.V) || shape.V > 2 * shape.K) {
    return unsupported(what +
                       " has no kernel: K and V must be multiples of 16 up to 128, and V at "
                       "most 2 K");
  }
  if (scheme.period > kMaxRecords || (scheme.period > 1 && scheme.mode == RecordMode::kV)) {
    return unsupported(what + " has no kernel: windows hold at most 32 records, and those u");
  }
  const std::optional<PageMap> map = layer.codec->page_map();
  if (!map.has_value()) return unsupported(what + " has no kernel: its pages are not mapped");

  auto impl = std::make_unique<Impl>();
  impl->gate = shape.gate;
  // The kernels of full.cuh read records in words, so they need them at multiples of words.
  const WindowMap records = layer.window.map();
  const bool in_words =
      records.values % 4 == 0 && records.gates % 4 == 0 && records.totals % 8 == 0;
  impl->kernels =
      kernels_for(*map, {.gate = shape.gate,
                         .full = shape.K == kMaxWidth && shape.V == kMaxWidth && in_words,
                         .per_step = scheme.period == 1,
                         .records = layer.window.records()});
  if (impl->kernels.step == nullptr) return unsupported(what + " has no kernel for its options");

  SP_ASSIGN_OR_RETURN(impl->heads, upload(std::span(map->heads)));
  SP_ASSIGN_OR_RETURN(impl->rows, upload(std::span(map->rows)));
  SP_ASSIGN_OR_RETURN(impl->start, upload(std::span(map->start)));
  LayerView& view = impl->view;
  view.n_key_heads = shape.n_key_heads;
  view.n_value_heads = shape.n_value_heads;
  view.heads_per_key = shape.n_value_heads / shape.n_key_heads;
  view.heads_per_key_inverse =
      static_cast<std::uint32_t>((std::uint64_t{1} << 32) / view.heads_per_key + 1);
  view.K = shape.K;
  view.V = shape.V;
  view.period = scheme.period;
  view.absolute_phase = scheme.phase == Phase::kAbsolute;
  view.beta_bf16 = scheme.beta_bf16;
  view.window.map = layer.window.map();
  view.window.records = layer.window.records();
  view.codec.heads = reinterpret_cast<const HeadMap*>(impl->heads.data());
  view.codec.rows = reinterpret_cast<const RowMap*>(impl->rows.data());
  view.codec.start = reinterpret_cast<const float*>(impl->start.data());
  view.codec.high_bits = map->high_bits;
  view.codec.compensators = map->compensators;
  view.codec.group = map->group;
  view.codec.tile = map->tile;
  view.codec.rank = map->rank;
  view.codec.rounds = map->rounds;
  view.codec.affine = map->affine;
  view.codec.f16_scales = map->f16_scales;

  int device = 0, major = 0;
  SP_RETURN_IF_ERROR(check(cudaGetDevice(&device), "finding the device"));
  SP_RETURN_IF_ERROR(
      check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
            "asking for the compute capability"));
  if (major < 8) return unsupported("a device before compute capability 8.0 has no kernels");
  SP_RETURN_IF_ERROR(check(
      cudaDeviceGetAttribute(&impl->n_multiprocessors, cudaDevAttrMultiProcessorCount, device),
      "counting multiprocessors"));

  const auto shared = [&](int (*bytes)(const LayerView&)) {
    return static_cast<std::size_t>(bytes(view));
  };
  impl->rewrite_threads = 32 * shape.K / kWarpRows;  // a state lies in registers
  impl->step_shared = shared(impl->kernels.step_shared);
  impl->rewrite_shared = shared(impl->kernels.rewrite_shared);
  impl->rewrite_step_shared = shared(impl->kernels.rewrite_step_shared);
  impl->dense_shared = 4 * static_cast<std::size_t>(Shared::floats(1, 0, 0, kMaxWidth));
  // A limit belongs to the kernel, which layers of other sizes share: raise it to the most there
  // is.
  int most_shared = 0;
  SP_RETURN_IF_ERROR(
      check(cudaDeviceGetAttribute(&most_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
            "asking for the shared memory of a block"));
  if (std::max({impl->step_shared, impl->rewrite_shared, impl->rewrite_step_shared}) >
      static_cast<std::size_t>(most_shared)) {
    return unsupported(what + " needs more shared memory than this device's " +
                       std::to_string(most_shared) + " bytes a block");
  }
  for (Kernel kernel : {impl->kernels.step, impl->kernels.rewrite, impl->kernels.rewrite_step}) {
    SP_RETURN_IF_ERROR(
        check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                   cudaFuncAttributeMaxDynamicSharedMemorySize, most_shared),
              "allowing " + std::to_string(most_shared) + " bytes of shared memory"));
  }
  int resident = 0;
  SP_RETURN_IF_ERROR(check(
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(
          &resident, impl->kernels.rewrite_step, impl->rewrite_threads, impl->rewrite_step_shared),
      "asking for the occupancy"));
  impl->rewrite_blocks = std::max(1, resident) * impl->n_multiprocessors;
  return std::unique_ptr<DeviceLayer>(new DeviceLayer(std::move(impl)));
}

Status DeviceLayer::step(const PoolView& pool, const TokenView& token, const Workspace& work,
                         void* stream) const {
  const Impl& impl = *impl_;
  if (token.n_rows == 0) return {};
  if (token.n_rows < 0 || token.n_rows > work.max_rows()) {
    return {Code::kInvalidArgument, std::to_string(token.n_rows) +
                                        " rows do not fit a workspace of " +
                                        std::to_string(work.max_rows())};
  }
  if (token.read_slots == nullptr || token.q == nullptr || token.k == nullptr ||
      token.v == nullptr || token.g == nullptr || token.beta == nullptr || token.out == nullptr ||
      (token.raw_gates && (token.A_log == nullptr || token.dt_bias == nullptr))) {
    return {Code::kInvalidArgument, "a pointer of the token is null"};
  }
  LaunchArgs a = impl.args(pool, work);
  a.token = token;
  const int n_heads = token.n_rows * impl.view.n_value_heads;
  if (impl.view.period == 1) {
    if (impl.kernels.dense == nullptr) {
      return impl.rewrite(a, token.n_rows, stream, true);
    }
    const int n_tiles = (impl.view.V + kDenseColumns - 1) / kDenseColumns;
    return check(launch(impl.kernels.dense, impl.view.n_value_heads * n_tiles, token.n_rows,
                        32 * kDenseWarps, impl.dense_shared, stream, a),
                 "a step over dense pages");
  }
  // Where all heads are resident at once, one launch for due and other rows saves the second.
  if (n_heads <= impl.rewrite_blocks && !impl.kernels.full) {
    return impl.rewrite(a, token.n_rows, stream, true);
  }
  SP_RETURN_IF_ERROR(check(launch(impl.kernels.step, impl.view.n_value_heads, token.n_rows,
                                  impl.kernels.step_threads, impl.step_shared, stream, a),
                           "a step"));
  a.rewrite = Rewrite::kDueRows;
  return impl.rewrite(a, token.n_rows, stream, true);
}

Status DeviceLayer::flush(const PoolView& pool, const std::int64_t* slots, int n,
                          const Workspace& work, void* stream) const {
  if (n == 0 || impl_->view.period == 1) return {};
  if (n < 0 || n > work.max_rows() || slots == nullptr) {
    return {Code::kInvalidArgument, "a flush of " + std::to_string(n) +
                                        " slots needs their list and a workspace of as many rows"};
  }
  LaunchArgs a = impl_->args(pool, work);
  a.token.n_rows = n;
  a.token.read_slots = slots;
  a.rewrite = Rewrite::kFlush;
  return impl_->rewrite(a, n, stream, impl_->kernels.full);
}

Status DeviceLayer::hand_over(const PoolView& pool, std::int64_t slot, const float* S,
                              std::int64_t n_tokens, const Workspace& work, void* stream) const {
  if (slot < 0 || slot >= pool.n_slots || n_tokens < 0 || S == nullptr) {
    return {Code::kInvalidArgument, "a hand-over to slot " + std::to_string(slot) + " after " +
                                        std::to_string(n_tokens) +
                                        " tokens: slot, count or state is none"};
  }
  LaunchArgs a = impl_->args(pool, work);
  a.token.n_rows = 1;
  a.token.first_valid_slot = 0;
  a.slot = slot;
  a.dense = const_cast<float*>(S);  // only read
  const int period = impl_->view.period;
  if (impl_->view.absolute_phase && period > 1) {
    a.limit = static_cast<std::int32_t>((period - n_tokens % period) % period);
  }
  a.rewrite = Rewrite::kHandOver;
  return impl_->rewrite(a, 1, stream, impl_->kernels.full);
}

Status DeviceLayer::restore_dense(const PoolView& pool, std::int64_t slot, float* S,
                                  const Workspace& work, void* stream) const {
  if (slot < 0 || slot >= pool.n_slots || S == nullptr) {
    return {Code::kInvalidArgument, "slot " + std::to_string(slot) + " or its state is none"};
  }
  LaunchArgs a = impl_->args(pool, work);
  a.token.n_rows = 1;
  a.token.first_valid_slot = 0;
  a.slot = slot;
  a.dense = S;
  a.rewrite = Rewrite::kRestore;
  return impl_->rewrite(a, 1, stream, false);
}

}  // namespace statepack::cuda
