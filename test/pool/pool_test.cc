// Slots: bytes, lifetime, isolation, snapshots.
#include "pool/pool.hpp"

#include <gmock/gmock.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <random>
#include <thread>

#include "base/hash.hpp"

namespace statepack {
namespace {

using ::testing::HasSubstr;

constexpr int kH = 2, kHV = 4, kK = 16, kV = 32;
constexpr std::int64_t kConv = 37;

std::vector<LayerShape> shapes(Gate gate = Gate::kScalar) {
  return {{kH, kHV, kK, kV, gate}, {kH, kH, kV, kK, gate}};
}

std::shared_ptr<const CompiledScheme> compile(std::string_view name,
                                              const std::vector<LayerShape>& layers = shapes(),
                                              const std::string& model = "model-a",
                                              const Plan* plan = nullptr) {
  auto scheme = Scheme::parse(name);
  EXPECT_TRUE(scheme.ok()) << scheme.status().message();
  auto compiled = CompiledScheme::make(*scheme, layers, plan, model);
  EXPECT_TRUE(compiled.ok()) << compiled.status().message();
  return *compiled;
}

std::unique_ptr<StatePool> make_pool(std::shared_ptr<const CompiledScheme> scheme,
                                     std::int64_t n_slots = 5) {
  auto pool = StatePool::create(std::move(scheme), {.n_slots = n_slots, .conv_floats = kConv});
  EXPECT_TRUE(pool.ok()) << pool.status().message();
  return std::move(*pool);
}

/// One token through every layer of one slot; returns all outputs.
std::vector<float> token(StatePool& pool, std::int64_t slot, unsigned seed, ThreadPool& threads,
                         float poison = 0) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 0.3f);
  std::vector<float> outputs;
  for (std::size_t i = 0; i < pool.scheme().layers().size(); ++i) {
    const LayerShape& s = pool.scheme().layers()[i].shape;
    const auto vector = [&](int n) {
      std::vector<float> x(static_cast<std::size_t>(n));
      for (float& y : x) y = normal(random);
      return x;
    };
    const auto q = vector(s.n_key_heads * s.K), k = vector(s.n_key_heads * s.K);
    auto v = vector(s.n_value_heads * s.V), g = vector(s.n_value_heads * s.gate_width());
    auto beta = vector(s.n_value_heads);
    for (float& x : g) x = -std::fabs(x);
    for (float& x : beta) x = std::fabs(x);
    v[3] += poison;
    std::vector<float> out(v.size());
    StepInput in;
    in.n_rows = 1;
    in.read_slots = &slot;
    in.q = q.data(), in.k = k.data(), in.v = v.data(), in.g = g.data(), in.beta = beta.data();
    in.q_stride = in.k_stride = static_cast<std::int64_t>(q.size());
    in.v_stride = in.out_stride = static_cast<std::int64_t>(v.size());
    in.g_stride = static_cast<std::int64_t>(g.size());
    in.beta_stride = static_cast<std::int64_t>(beta.size());
    in.out = out.data();
    EXPECT_TRUE(step(pool.layer(static_cast<int>(i)), in, threads).ok());
    outputs.insert(outputs.end(), out.begin(), out.end());
  }
  pool.set_n_tokens(slot, pool.n_tokens(slot) + 1);
  float* conv = pool.conv(slot);
  for (int i = 0; i < kConv; ++i) conv[i] += normal(random);
  return outputs;
}

/// NaN equals itself here.
bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), 4 * a.size()) == 0;
}

const char* const kSchemes[] = {"fp32",
                                "int8",
                                "int4,period=5",
                                "int8,period=5,records=int8",
                                "bf16,period=5,records=mixed,mode=v",
                                "leapquant:8,period=5",
                                "pace:4,period=5"};

// ---------------------------------------------------------------------------------------------
// Bytes

TEST(PoolBytes, AreWhatTheMappingTakes) {
  for (const char* name : kSchemes) {
    for (const Gate gate : {Gate::kScalar, Gate::kChannel}) {
      const auto scheme = compile(name, shapes(gate));
      const auto pool = make_pool(scheme, 7);
      const SchemeBits bits = scheme->bits();
      // Pages, windows and cursors; the alignment of pages; convolution; header (16); free list and
      // flag (9); the slot rounded to cache lines.
      const std::int64_t parts = bits.page_bytes + bits.window_bytes + bits.cursor_bytes +
                                 bits.alignment_bytes + 4 * kConv + 16;
      const std::int64_t slot = (parts + 63) / 64 * 64;
      EXPECT_EQ(pool->bytes_per_slot(), slot + 9) << name;
      EXPECT_EQ(StatePool::bytes_per_slot(*scheme, kConv), slot + 9);
      const std::int64_t page = ::sysconf(_SC_PAGESIZE);
      EXPECT_EQ(pool->bytes_allocated(), (8 * slot + 7 * 9 + 1 + page - 1) / page * page) << name;
      // Every layer's page and window lie inside the slot, apart and aligned.
      const LayerState first = pool->layer(0), second = pool->layer(1);
      EXPECT_EQ(first.page_stride, slot);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(first.pages) % 16, 0u);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(second.pages) % 16, 0u);
      EXPECT_GE(first.windows - first.pages, scheme->layers()[0].codec->page_bytes());
      EXPECT_GE(second.pages - first.windows, scheme->layers()[0].window.n_bytes());
    }
  }
}

/// Address space of this process by the kernel's count, in bytes.
std::int64_t address_space() {
  std::ifstream statm("/proc/self/statm");
  std::int64_t pages = 0;
  statm >> pages;
  return pages * ::sysconf(_SC_PAGESIZE);
}

TEST(PoolBytes, AreWhatTheKernelCounts) {
#if defined(SP_SANITIZED)
  GTEST_SKIP() << "a sanitizer maps memory of its own";
#endif
  const auto scheme = compile("int8,period=16");
  const std::int64_t before = address_space();
  const auto pool = *StatePool::create(scheme, {.n_slots = 20000, .conv_floats = kConv});
  EXPECT_NEAR(static_cast<double>(address_space() - before),
              static_cast<double>(pool->bytes_allocated()), 1 << 20);
  EXPECT_GT(pool->bytes_allocated(), 100 << 20);
}

TEST(PoolCreate, NamesHowManySlotsWouldFit) {
  const auto scheme = compile("int8");
  const std::int64_t slot = StatePool::bytes_per_slot(*scheme, 0);
  const auto status = [&](PoolConfig config) { return StatePool::create(scheme, config).status(); };
  const Status full = status({.n_slots = 1000, .max_bytes = 100 * slot});
  EXPECT_EQ(full.code(), Code::kExhausted);
  // The sentinel slot and the last page take a little.
  EXPECT_EQ(full.message(),
            "a pool of 1000 slots of " + std::to_string(slot) + " bytes does not fit into " +
                std::to_string(100 * slot) + " bytes; " +
                std::to_string((100 * slot - (slot - 8) - 4096) / slot) + " slots would");
  const std::int64_t n = (100 * slot - (slot - 8) - 4096) / slot;
  const auto fits = StatePool::create(scheme, {.n_slots = n, .max_bytes = 100 * slot});
  ASSERT_TRUE(fits.ok());
  EXPECT_LE((*fits)->bytes_allocated(), 100 * slot);
  EXPECT_FALSE(StatePool::create(scheme, {.n_slots = n + 1, .max_bytes = 100 * slot}).ok());
  EXPECT_THAT(status({.n_slots = 1, .max_bytes = 10}).message(), HasSubstr("; 0 slots would"));
  // Products that overflow 64 bits are compared before they are formed.
  EXPECT_EQ(status({.n_slots = std::int64_t{1} << 32, .conv_floats = std::int64_t{1} << 32}).code(),
            Code::kExhausted);
  EXPECT_EQ(status({.n_slots = std::numeric_limits<std::int64_t>::max()}).code(),
            Code::kInvalidArgument);
  EXPECT_EQ(status({.n_slots = 0}).code(), Code::kInvalidArgument);
  EXPECT_EQ(status({.n_slots = 1, .conv_floats = -1}).code(), Code::kInvalidArgument);
  EXPECT_EQ(status({.n_slots = 1, .conv_floats = std::numeric_limits<std::int64_t>::max()}).code(),
            Code::kInvalidArgument);
}

// ---------------------------------------------------------------------------------------------
// Lifetime

TEST(PoolSlots, AreHandedOutOnceAndComeBack) {
  const auto pool = make_pool(compile("int8"), 3);
  std::vector<std::int64_t> slots;
  for (int i = 0; i < 3; ++i) slots.push_back(*pool->alloc());
  EXPECT_THAT(slots, ::testing::UnorderedElementsAre(1, 2, 3));
  EXPECT_EQ(pool->n_free(), 0);
  const auto full = pool->alloc();
  EXPECT_EQ(full.status().code(), Code::kExhausted);
  EXPECT_EQ(full.status().message(), "all 3 slots are in use; free one or make a larger pool");
  pool->free(slots[1]);
  EXPECT_EQ(pool->state(slots[1]), SlotState::kFree);
  EXPECT_EQ(pool->n_free(), 1);
  EXPECT_EQ(*pool->alloc(), slots[1]);
}

TEST(PoolSlots, WrongUseIsRefused) {
  const auto pool = make_pool(compile("int8"), 3);
  const std::int64_t slot = *pool->alloc();
  pool->free(slot);
  EXPECT_EQ(pool->try_free(slot).message(),
            "slot " + std::to_string(slot) + " is free; allocate a slot before using it");
  for (const std::int64_t wrong : {std::int64_t{0}, std::int64_t{-1}, std::int64_t{4},
                                   std::numeric_limits<std::int64_t>::min()}) {
    EXPECT_EQ(pool->try_free(wrong).message(),
              "slot " + std::to_string(wrong) + " does not exist; the pool has slots 1 to 3");
    EXPECT_EQ(pool->copy(wrong, wrong).code(), Code::kInvalidArgument);
    EXPECT_EQ(pool->snapshot(wrong).status().code(), Code::kInvalidArgument);
    EXPECT_EQ(pool->restore(wrong, {}).code(), Code::kInvalidArgument);
  }
  EXPECT_EQ(pool->copy(slot, slot).code(), Code::kInvalidArgument) << "a free slot";
  EXPECT_EQ(pool->n_free(), 3);
}

TEST(PoolSlotsDeathTest, FreeingTwiceIsABug) {
  const auto pool = make_pool(compile("int8"), 2);
  const std::int64_t slot = *pool->alloc();
  pool->free(slot);
  EXPECT_DEATH(pool->free(slot), "is free");
}

// reports.md 18: a slot that other data has been in gives the answers of a new pool, and shows
// nothing of what was in it.
TEST(PoolSlots, ADirtySlotLeaksNothing) {
  ThreadPool threads(2);
  for (const char* name : kSchemes) {
    const auto pool = make_pool(compile(name), 1);
    std::int64_t slot = *pool->alloc();
    for (unsigned t = 0; t < 12; ++t) token(*pool, slot, 100 + t, threads);
    // Garbage in every byte that a slot owns.
    const LayerState state = pool->layer(0);
    std::memset(reinterpret_cast<std::uint8_t*>(state.faults) + slot * state.fault_stride + 8, 0xff,
                static_cast<std::size_t>(state.page_stride) - 24);
    pool->free(slot);
    slot = *pool->alloc();
    const auto fresh = make_pool(compile(name), 1);
    const std::int64_t other = *fresh->alloc();
    EXPECT_EQ(pool->n_tokens(slot), 0);
    for (int i = 0; i < kConv; ++i) EXPECT_EQ(pool->conv(slot)[i], 0.0f);
    for (unsigned t = 0; t < 12; ++t) {
      EXPECT_TRUE(same(token(*pool, slot, t, threads), token(*fresh, other, t, threads))) << name;
    }
    EXPECT_EQ(pool->snapshot(slot)->bytes, fresh->snapshot(other)->bytes) << name;
  }
}

TEST(PoolSlots, QuarantineLastsUntilFreed) {
  ThreadPool threads(1);
  for (const char* name : kSchemes) {
    const auto pool = make_pool(compile(name), 3);
    const std::int64_t bad = *pool->alloc(), good = *pool->alloc();
    token(*pool, bad, 1, threads);
    EXPECT_EQ(pool->nonfinite_total(), 0);
    const auto poisoned = token(*pool, bad, 2, threads, std::nanf(""));
    EXPECT_TRUE(std::isnan(poisoned[0])) << name;
    EXPECT_EQ(pool->state(bad), SlotState::kQuarantined);
    EXPECT_FALSE(pool->quarantined(good));
    EXPECT_EQ(pool->nonfinite_total(), 1);
    EXPECT_TRUE(std::isnan(token(*pool, bad, 3, threads)[0])) << "sticky";
    EXPECT_EQ(pool->nonfinite_total(), 1) << "a slot counts once";
    EXPECT_EQ(pool->snapshot(bad).status().code(), Code::kNotFinite);
    EXPECT_EQ(pool->copy(bad, good).code(), Code::kNotFinite);
    EXPECT_EQ(pool->copy(good, bad).code(), Code::kNotFinite);
    EXPECT_EQ(pool->restore(bad, pool->snapshot(good)->bytes).code(), Code::kNotFinite);
    pool->free(bad);
    EXPECT_EQ(pool->nonfinite_total(), 1);
    EXPECT_EQ(*pool->alloc(), bad);
    EXPECT_EQ(pool->state(bad), SlotState::kUsed);
    EXPECT_FALSE(std::isnan(token(*pool, bad, 1, threads)[0]));
  }
}

TEST(PoolSlots, CopiesContinueAlike) {
  ThreadPool threads(2);
  for (const char* name : kSchemes) {
    const auto pool = make_pool(compile(name), 3);
    const std::int64_t from = *pool->alloc(), to = *pool->alloc();
    for (unsigned t = 0; t < 8; ++t) token(*pool, from, t, threads);
    ASSERT_TRUE(pool->copy(from, to).ok());
    EXPECT_EQ(pool->n_tokens(to), 8);
    for (unsigned t = 8; t < 16; ++t) {
      EXPECT_TRUE(same(token(*pool, from, t, threads), token(*pool, to, t, threads))) << name;
    }
    EXPECT_EQ(pool->snapshot(from)->bytes, pool->snapshot(to)->bytes);
  }
}

// reports.md 20: after any number of threads allocate, use and free, every slot is free and none
// was ever held twice.
TEST(PoolSlots, ThreadsMayAllocateAndFree) {
  constexpr int kThreads = 6, kSlots = 8;
  const auto pool = make_pool(compile("int8,period=4"), kSlots);
  std::vector<std::atomic<int>> holders(kSlots + 1);
  std::atomic<int> doubles{0};
  std::vector<std::thread> workers;
  for (int w = 0; w < kThreads; ++w) {
    workers.emplace_back([&, w] {
      std::mt19937 random(static_cast<unsigned>(w));
      ThreadPool alone(1);
      for (int i = 0; i < 300; ++i) {
        const auto slot = pool->alloc();
        if (!slot.ok()) continue;
        if (holders[static_cast<std::size_t>(*slot)].fetch_add(1) != 0) doubles.fetch_add(1);
        if (i % 20 == 0)
          token(*pool, *slot, static_cast<unsigned>(random()), alone,
                i % 40 == 0 ? std::nanf("") : 0);
        (void)pool->nonfinite_total();
        (void)pool->n_free();
        holders[static_cast<std::size_t>(*slot)].fetch_sub(1);
        pool->free(*slot);
      }
    });
  }
  for (std::thread& worker : workers) worker.join();
  EXPECT_EQ(doubles.load(), 0);
  EXPECT_EQ(pool->n_free(), kSlots);
}

// ---------------------------------------------------------------------------------------------
// Snapshots

TEST(Snapshot, RestoresBitForBitAtEveryWindowPhase) {
  ThreadPool threads(2);
  for (const char* name : kSchemes) {
    for (const Gate gate : {Gate::kScalar, Gate::kChannel}) {
      for (unsigned stop = 0; stop < 11; stop += 2) {
        const auto pool = make_pool(compile(name, shapes(gate)), 2);
        const std::int64_t slot = *pool->alloc();
        for (unsigned t = 0; t < stop; ++t) token(*pool, slot, t, threads);
        const auto snapshot = pool->snapshot(slot);
        ASSERT_TRUE(snapshot.ok());
        EXPECT_EQ(snapshot->n_tokens, stop);
        // Another pool, another slot number, and the slot has been used before.
        const auto other = make_pool(compile(name, shapes(gate)), 4);
        (void)*other->alloc();
        const std::int64_t to = *other->alloc();
        for (unsigned t = 0; t < 3; ++t) token(*other, to, 77 + t, threads);
        ASSERT_TRUE(other->restore(to, snapshot->bytes).ok());
        EXPECT_EQ(other->n_tokens(to), stop);
        EXPECT_EQ(other->snapshot(to)->bytes, snapshot->bytes) << name;
        for (unsigned t = stop; t < stop + 9; ++t) {
          EXPECT_TRUE(same(token(*pool, slot, t, threads), token(*other, to, t, threads)))
              << name << " stopped at " << stop << ", token " << t;
        }
        EXPECT_EQ(other->snapshot(to)->bytes, pool->snapshot(slot)->bytes);
      }
    }
  }
}

// PACE: a payload-only snapshot after a forced flush, restored, continues like a run with
// the same flush and no restore.
TEST(Snapshot, PayloadOnlyAfterAForcedFlush) {
  ThreadPool threads(1);
  const auto pool = make_pool(compile("pace:4,period=5"), 2);
  const std::int64_t slot = *pool->alloc();
  for (unsigned t = 0; t < 7; ++t) token(*pool, slot, t, threads);
  const auto open = pool->snapshot(slot, /*with_window=*/false);
  EXPECT_EQ(open.status().code(), Code::kInvalidArgument);
  EXPECT_EQ(open.status().message(),
            "slot " + std::to_string(slot) +
                " has 2 tokens in the window of recurrent layer 0, "
                "which a snapshot without windows would lose; flush it first");
  const std::int64_t slots[] = {slot};
  for (int layer = 0; layer < 2; ++layer) {
    ASSERT_TRUE(flush(pool->layer(layer), slots, threads).ok());
  }
  const auto payload = pool->snapshot(slot, false);
  ASSERT_TRUE(payload.ok());
  const SchemeBits bits = pool->scheme().bits();
  EXPECT_LT(static_cast<std::int64_t>(payload->bytes.size()), bits.page_bytes + 4 * kConv + 1024)
      << "a cached prefix pays for pages only";
  const auto other = make_pool(compile("pace:4,period=5"), 1);
  const std::int64_t to = *other->alloc();
  ASSERT_TRUE(other->restore(to, payload->bytes).ok());
  for (unsigned t = 7; t < 20; ++t) {
    EXPECT_TRUE(same(token(*pool, slot, t, threads), token(*other, to, t, threads)));
  }
}

TEST(Snapshot, SavesAndLoadsAFile) {
  ThreadPool threads(1);
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / ("pool_test." + std::to_string(::getpid()));
  std::filesystem::create_directories(folder);
  const std::string path = folder / "slot.snapshot";
  const auto pool = make_pool(compile("int8,period=5"), 2);
  const std::int64_t slot = *pool->alloc(), to = *pool->alloc();
  for (unsigned t = 0; t < 7; ++t) token(*pool, slot, t, threads);
  ASSERT_TRUE(pool->save(slot, path).ok());
  ASSERT_TRUE(pool->load(to, path).ok());
  EXPECT_EQ(pool->snapshot(slot)->bytes, pool->snapshot(to)->bytes);
  std::filesystem::resize_file(path, 100);
  const Status cut = pool->load(to, path);
  EXPECT_EQ(cut.code(), Code::kCorrupt);
  EXPECT_THAT(cut.message(), HasSubstr(path));
  EXPECT_EQ(pool->load(to, folder / "none").code(), Code::kNotFound);
  EXPECT_EQ(pool->save(slot, folder / "no" / "folder").code(), Code::kNotFound)
      << pool->save(slot, folder / "no" / "folder").message();
  std::filesystem::remove_all(folder);
}

TEST(Snapshot, MismatchesNameBothSides) {
  ThreadPool threads(1);
  const auto take = [&](std::shared_ptr<const CompiledScheme> scheme, std::int64_t conv = kConv) {
    auto pool = StatePool::create(std::move(scheme), {.n_slots = 1, .conv_floats = conv});
    return (*pool)->snapshot(*(*pool)->alloc())->bytes;
  };
  const auto ours = make_pool(compile("int8,period=5"), 1);
  const std::int64_t slot = *ours->alloc();
  for (unsigned t = 0; t < 3; ++t) token(*ours, slot, t, threads);
  const auto before = ours->snapshot(slot)->bytes;
  const auto message = [&](const std::vector<std::byte>& bytes) {
    const Status status = ours->restore(slot, bytes);
    EXPECT_EQ(status.code(), Code::kMismatch) << status.message();
    EXPECT_EQ(ours->snapshot(slot)->bytes, before) << "a refused restore changes nothing";
    return status.message();
  };
  EXPECT_EQ(message(take(compile("int8,period=5", shapes(), "model-b"))),
            "the snapshot was taken with model 'model-b', but this pool has 'model-a'; restore it "
            "into a pool like its own");
  EXPECT_THAT(message(take(compile("int8,period=6"))),
              ::testing::AllOf(HasSubstr("scheme 'int8,period=6,"), HasSubstr("'int8,period=5,")));
  EXPECT_EQ(message(take(compile("int8,period=5", {shapes()[0]}))),
            "the snapshot was taken with recurrent layers: 1, but this pool has 2; restore it into "
            "a pool like its own");
  EXPECT_EQ(message(take(compile("int8,period=5", {shapes()[1], shapes()[1]}))),
            "the snapshot was taken with recurrent layer 0 of 2 key heads, 2 value heads, K 32, V "
            "16, scalar gates, but this pool has 2 key heads, 4 value heads, K 16, V 32, scalar "
            "gates; restore it into a pool like its own");
  EXPECT_EQ(message(take(compile("int8,period=5"), 36)),
            "the snapshot was taken with convolution history of 144 bytes, but this pool has 148 "
            "bytes; restore it into a pool like its own");

  Plan plan;
  plan.kind = "pace-high", plan.scheme = "pace:4/8", plan.model_fingerprint = "model-a";
  plan.shapes = shapes();
  plan.layers.resize(2);
  plan.layers[0].high = {1, 0, 0, 0};
  plan.layers[1].high = {1, 0};
  const auto planned = make_pool(compile("pace:4/8", shapes(), "model-a", &plan), 1);
  const std::int64_t to = *planned->alloc();
  Plan other = plan;
  other.layers[1].high = {0, 1};
  const Status status =
      planned->restore(to, take(compile("pace:4/8", shapes(), "model-a", &other)));
  EXPECT_EQ(status.message(), "the snapshot was taken with plan '" + other.fingerprint() +
                                  "', but this pool has '" + plan.fingerprint() +
                                  "'; restore it into a pool like its own");
}

/// A snapshot with an open window, its header's checksum made right again after `damage`.
std::vector<std::byte> forged(const std::vector<std::byte>& good,
                              const std::function<void(std::vector<std::byte>&)>& damage) {
  std::vector<std::byte> bytes = good;
  damage(bytes);
  std::uint32_t n_header = 0;
  std::memcpy(&n_header, bytes.data() + 24, 4);
  const Hash128 hash = xxh3_128(std::span(bytes).first(n_header - 16));
  std::memcpy(bytes.data() + n_header - 16, hash.data(), 16);
  return bytes;
}

TEST(Snapshot, HostileBytesGetOneClearMessage) {
  ThreadPool threads(1);
  const auto pool = make_pool(compile("int8,period=5"), 1);
  const std::int64_t slot = *pool->alloc();
  for (unsigned t = 0; t < 3; ++t) token(*pool, slot, t, threads);
  const std::vector<std::byte> good = pool->snapshot(slot)->bytes;
  std::uint32_t n_header = 0;
  std::memcpy(&n_header, good.data() + 24, 4);
  const std::size_t table = n_header - 16 - 4 * 24;  // sections: bytes, hash
  const auto put = [](std::vector<std::byte>& bytes, std::size_t at, auto value) {
    std::memcpy(bytes.data() + at, &value, sizeof value);
  };
  /// Changes a cursor, with its section's checksum made right, too.
  const auto cursor = [&](std::int32_t fill, std::int32_t limit) {
    return forged(good, [&](std::vector<std::byte>& b) {
      std::int64_t pages = 0;
      std::memcpy(&pages, b.data() + table, 8);
      const std::size_t at = n_header + static_cast<std::size_t>(pages);
      put(b, at, fill), put(b, at + 4, limit);
      const Hash128 hash = xxh3_128(std::span(b).subspan(at, 16));
      std::memcpy(b.data() + table + 24 + 8, hash.data(), 16);
    });
  };
  struct Case {
    std::vector<std::byte> bytes;
    Code code;
    std::string message;
  };
  std::vector<std::byte> long_one = good;
  long_one.push_back(std::byte{0});
  const Case cases[] = {
      {{}, Code::kCorrupt, "the snapshot does not begin like one; take a new one"},
      {std::vector<std::byte>(200), Code::kCorrupt, "does not begin like one"},
      {{good.begin(), good.begin() + 30}, Code::kCorrupt, "ends inside its header"},
      {{good.begin(), good.begin() + n_header - 1}, Code::kCorrupt, "ends inside its header"},
      {{good.begin(), good.begin() + n_header}, Code::kCorrupt, "ends inside its section 'pages'"},
      {{good.begin(), good.end() - 1},
       Code::kCorrupt,
       "ends inside its section 'convolution history'"},
      {long_one, Code::kCorrupt, "has 1 bytes behind its end"},
      {forged(good, [&](auto& b) { put(b, 8, std::uint32_t{9}); }), Code::kUnsupported,
       "the snapshot has format version 9, but this build reads version 1; update statepack or "
       "take a new one"},
      {forged(good, [&](auto& b) { put(b, 12, std::uint32_t{2}); }), Code::kCorrupt,
       "is not marked valid: its writer never finished"},
      {forged(good, [&](auto& b) { put(b, 12, std::uint32_t{0xffffffff}); }), Code::kCorrupt,
       "has unknown flags"},
      {forged(good, [&](auto& b) { put(b, 16, std::int64_t{-4}); }), Code::kCorrupt,
       "counts -4 tokens"},
      {forged(good, [&](auto& b) { put(b, 32, std::uint32_t{0xfffffff0}); }), Code::kCorrupt,
       "has a header shorter than its own texts"},
      {forged(good, [&](auto& b) { put(b, 28, std::uint32_t{0xffffffff}); }), Code::kCorrupt,
       "has a damaged table of layers"},
      {forged(good, [&](auto& b) { put(b, table, std::int64_t{-1}); }), Code::kCorrupt,
       "has a damaged table of sections"},
      {forged(good, [&](auto& b) { put(b, table, std::numeric_limits<std::int64_t>::max()); }),
       Code::kCorrupt, "ends inside its section 'pages'"},
      {forged(good, [&](auto& b) { put(b, table - 4, std::int32_t{7}); }), Code::kCorrupt,
       "has a damaged table of layers"},
      {cursor(5, 0), Code::kCorrupt,
       "has a window of 5 records, complete at 0, in recurrent layer 0, which period 5 cannot "
       "have"},
      {cursor(-1, 0), Code::kCorrupt, "has a window of -1 records"},
      {cursor(2, 2), Code::kCorrupt, "has a window of 2 records, complete at 2"},
      {cursor(0, 6), Code::kCorrupt, "complete at 6"},
      {cursor(0, -1), Code::kCorrupt, "complete at -1"},
      {cursor(0x7fffffff, 0x7fffffff), Code::kCorrupt, "cannot have"},
  };
  for (const Case& c : cases) {
    const Status status = pool->restore(slot, c.bytes);
    EXPECT_EQ(status.code(), c.code) << status.message();
    EXPECT_THAT(status.message(), HasSubstr(c.message));
    EXPECT_EQ(pool->snapshot(slot)->bytes, good) << "a refused restore changes nothing";
  }
  ASSERT_TRUE(pool->restore(slot, good).ok());
}

TEST(Snapshot, TellsAboutItselfWithoutAPool) {
  ThreadPool threads(1);
  const auto pool = make_pool(compile("int8,period=5"), 1);
  const std::int64_t slot = *pool->alloc();
  for (unsigned t = 0; t < 3; ++t) token(*pool, slot, t, threads);
  const auto info = read_snapshot_info(pool->snapshot(slot)->bytes);
  ASSERT_TRUE(info.ok()) << info.status().message();
  EXPECT_EQ(info->scheme, pool->scheme().scheme().full_name());
  EXPECT_EQ(info->model_fingerprint, "model-a");
  EXPECT_EQ(info->n_tokens, 3);
  EXPECT_EQ(info->shapes, shapes());
  const SchemeBits bits = pool->scheme().bits();
  EXPECT_EQ(info->page_bytes, bits.page_bytes);
  EXPECT_EQ(info->window_bytes, bits.window_bytes);
  EXPECT_EQ(info->cursor_bytes, bits.cursor_bytes);
  EXPECT_EQ(info->conv_bytes, 4 * kConv);
  EXPECT_EQ(read_snapshot_info({}).status().code(), Code::kCorrupt);
}

TEST(Snapshot, EveryFlippedBitAndTruncationIsRefused) {
  ThreadPool threads(1);
  const auto pool = make_pool(compile("int4,period=5", {{1, 1, 8, 8, Gate::kScalar}}), 1);
  const std::int64_t slot = *pool->alloc();
  for (unsigned t = 0; t < 3; ++t) token(*pool, slot, t, threads);
  const std::vector<std::byte> good = pool->snapshot(slot)->bytes;
  std::uint32_t n_header = 0;
  std::memcpy(&n_header, good.data() + 24, 4);
  for (std::size_t i = 0; i < 8 * good.size(); ++i) {
    std::vector<std::byte> damaged = good;
    damaged[i / 8] ^= static_cast<std::byte>(1 << (i % 8));
    const Status status = pool->restore(slot, damaged);
    ASSERT_FALSE(status.ok()) << "bit " << i;
    if (i / 8 >= n_header) {
      EXPECT_THAT(status.message(), HasSubstr("its checksum does not match"));
    }
  }
  for (std::size_t n = 0; n < good.size(); ++n) {
    ASSERT_FALSE(pool->restore(slot, std::span(good).first(n)).ok()) << n;
  }
  EXPECT_EQ(pool->snapshot(slot)->bytes, good);
}

TEST(ConvFormat, Bf16TakesHalfAndRoundsOnce) {
  const auto scheme = compile("int8,period=4,conv=bf16");
  const auto pool = make_pool(scheme);
  const auto f32_pool = make_pool(compile("int8,period=4"));
  EXPECT_EQ(pool->bytes_per_slot(), StatePool::bytes_per_slot(*scheme, kConv));
  // Slots are multiples of 64 bytes, so half of 37 values saves one such piece or two.
  const std::int64_t saved = f32_pool->bytes_per_slot() - pool->bytes_per_slot();
  EXPECT_TRUE(saved == 64 || saved == 128) << saved;

  const std::int64_t slot = pool->alloc().value();
  std::vector<float> values(kConv), back(kConv);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = std::sin(static_cast<float>(i));
  pool->store_conv(slot, values.data());
  pool->load_conv(slot, back.data());
  for (std::size_t i = 0; i < values.size(); ++i) {
    EXPECT_LE(std::fabs(back[i] - values[i]), std::fabs(values[i]) * 0x1p-8f);
  }
  pool->store_conv(slot, back.data());
  std::vector<float> again(kConv);
  pool->load_conv(slot, again.data());
  EXPECT_EQ(again, back);

  const Snapshot snapshot = pool->snapshot(slot).value();
  const std::int64_t other = pool->alloc().value();
  ASSERT_TRUE(pool->restore(other, snapshot.bytes).ok());
  pool->load_conv(other, again.data());
  EXPECT_EQ(again, back);
  EXPECT_TRUE(pool->check(snapshot.bytes).ok());
  const Status refused = f32_pool->check(snapshot.bytes);
  EXPECT_EQ(refused.code(), Code::kMismatch);
  EXPECT_THAT(refused.message(), HasSubstr("conv=bf16"));
  EXPECT_EQ(f32_pool->restore(f32_pool->alloc().value(), snapshot.bytes).code(), Code::kMismatch);
}

}  // namespace
}  // namespace statepack
