// Any bytes as a snapshot: refused, or a slot that steps, flushes and snapshots again.
//
// The first byte chooses the pool and whether the checksums are set right first: else nothing
// behind them would ever be reached.
#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "base/check.hpp"
#include "base/hash.hpp"
#include "pool/pool.hpp"

namespace {

using namespace statepack;

constexpr LayerShape kLayer{1, 2, 32, 32, Gate::kScalar};
constexpr std::size_t kHashBytes = 16;

/// Offsets of the format as src/pool/snapshot.cc gives it.
void repair_checksums(std::vector<std::byte>& bytes) {
  constexpr std::size_t kHeaderSizeAt = 24;
  constexpr std::size_t kTable = 4 * (8 + kHashBytes);
  std::uint32_t n_header = 0;
  if (bytes.size() < kHeaderSizeAt + sizeof n_header) return;
  std::memcpy(&n_header, bytes.data() + kHeaderSizeAt, sizeof n_header);
  if (n_header > bytes.size() || n_header < kHeaderSizeAt + kTable + kHashBytes) return;
  const auto put_hash = [&](std::size_t at, std::span<const std::byte> of) {
    const Hash128 hash = xxh3_128(of);
    std::memcpy(bytes.data() + at, hash.data(), hash.size());
  };
  std::size_t section = n_header;
  for (std::size_t at = n_header - kHashBytes - kTable; at < n_header - kHashBytes; at += 24) {
    std::int64_t n_bytes = 0;
    std::memcpy(&n_bytes, bytes.data() + at, sizeof n_bytes);
    if (n_bytes < 0 || static_cast<std::uint64_t>(n_bytes) > bytes.size() - section) break;
    const auto n = static_cast<std::size_t>(n_bytes);
    put_hash(at + 8, std::span(bytes).subspan(section, n));
    section += n;
  }
  put_hash(n_header - kHashBytes, std::span(bytes).first(n_header - kHashBytes));
}

std::unique_ptr<StatePool> make_pool(const char* name) {
  const auto scheme = Scheme::parse(name);
  SP_CHECK(scheme.ok(), "the schemes of this target exist");
  const auto compiled = CompiledScheme::make(*scheme, {kLayer, kLayer}, nullptr, "model");
  SP_CHECK(compiled.ok(), "the schemes of this target fit its layers");
  auto pool = StatePool::create(*compiled, {.n_slots = 1, .conv_floats = 8});
  SP_CHECK(pool.ok(), "a tiny pool fits");
  return std::move(*pool);
}

/// A token through every layer of the slot, then a flush: whatever the pages hold, nothing outside
/// the slot is touched.
void use(StatePool& pool, std::int64_t slot, ThreadPool& threads) {
  const std::array<float, 32> q{0.5F, -0.25F}, k{0.6F, 0.8F};
  const std::array<float, 64> v{1, -2, 3};
  const std::array<float, 2> g{-0.1F, -2}, beta{0.5F, 1};
  std::array<float, 64> out{};
  const StepInput input{.n_rows = 1,
                        .read_slots = &slot,
                        .q = q.data(),
                        .k = k.data(),
                        .v = v.data(),
                        .g = g.data(),
                        .beta = beta.data(),
                        .q_stride = 32,
                        .k_stride = 32,
                        .v_stride = 64,
                        .g_stride = 2,
                        .beta_stride = 2,
                        .out = out.data(),
                        .out_stride = 64};
  std::vector<float> dense(static_cast<std::size_t>(kLayer.n_values()));
  for (int layer = 0; layer < 2; ++layer) {
    const LayerState state = pool.layer(layer);
    (void)step(state, input, threads);
    (void)restore_dense(state, slot, dense.data(), threads);
    (void)flush(state, std::span(&slot, 1), threads);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t n_bytes) {
  static ThreadPool threads(1);
  static const std::array pools = {make_pool("fp32"), make_pool("int4,period=4"),
                                   make_pool("int8,period=4,records=int8"), make_pool("pace:4")};
  if (n_bytes == 0) return 0;
  StatePool& pool = *pools[data[0] % pools.size()];
  const auto rest = std::as_bytes(std::span(data + 1, n_bytes - 1));
  std::vector<std::byte> bytes(rest.begin(), rest.end());
  if (data[0] >= 128) repair_checksums(bytes);

  const auto slot = pool.alloc();
  SP_CHECK(slot.ok(), "the slot was given back");
  if (pool.restore(*slot, bytes).ok()) {
    if (const auto first = pool.snapshot(*slot); first.ok()) {
      SP_CHECK(pool.restore(*slot, first->bytes).ok(), "our own snapshot is refused");
      const auto second = pool.snapshot(*slot);
      SP_CHECK(second.ok() && second->bytes == first->bytes, "a snapshot is not stable");
    }
    use(pool, *slot, threads);
  }
  pool.free(*slot);
  return 0;
}
