// What a running sequence really costs: resident memory of a decoding process, read from the
// kernel.
#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "model/model.hpp"
#include "runtime/plan_library.hpp"

namespace statepack {
namespace {

#if defined(SP_SANITIZED)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

constexpr int kTokens = 18;  // one flush of a window of 16

struct Cost {
  std::int64_t rss = 0;   ///< growth of the resident set from the loaded model to the last token
  std::int64_t pool = 0;  ///< bytes_per_slot of the pool
  std::int64_t kv = 0;    ///< what the tokens touched of one sequence's attention cache
};

std::int64_t resident_bytes() {
  std::FILE* file = std::fopen("/proc/self/statm", "r");
  if (file == nullptr) return -1;
  long total = 0;
  long resident = 0;
  const int n = std::fscanf(file, "%ld %ld", &total, &resident);
  std::fclose(file);
  return n == 2 ? std::int64_t{resident} * sysconf(_SC_PAGESIZE) : -1;
}

Status measure(const std::string& scheme_name, std::int64_t n_sequences, Cost* cost) {
  const std::string dir = SP_SOURCE_DIR "/models/statepack-gdn";
  mallopt(M_MMAP_THRESHOLD, 64 * 1024);
  ThreadPool threads(1);
  SP_ASSIGN_OR_RETURN(const std::unique_ptr<Model> model, Model::load(dir, threads));
  SP_ASSIGN_OR_RETURN(const PlanLibrary plans, PlanLibrary::open(dir, {}));
  SP_ASSIGN_OR_RETURN(const Scheme scheme, Scheme::parse(scheme_name));
  SP_ASSIGN_OR_RETURN(auto compiled, plans.compile(scheme, model->config().recurrent_shapes(),
                                                   model->fingerprint()));
  const std::int64_t vocab = model->config().vocab;
  std::vector<float> logits(static_cast<std::size_t>(n_sequences * vocab));

  const auto run = [&](std::int64_t n) -> Status {
    PoolConfig config;
    config.n_slots = n;
    config.conv_floats = model->config().conv_floats();
    SP_ASSIGN_OR_RETURN(const std::unique_ptr<StatePool> pool, StatePool::create(compiled, config));
    std::vector<std::unique_ptr<KvCache>> caches;
    std::vector<DecodeRow> rows;
    for (std::int64_t i = 0; i < n; ++i) {
      SP_ASSIGN_OR_RETURN(const std::int64_t slot, pool->alloc());
      caches.push_back(model->new_kv_cache());
      rows.push_back({slot, caches.back().get(), static_cast<std::int32_t>(100 + i), 0});
    }
    const std::int64_t before = resident_bytes();
    for (int t = 0; t < kTokens; ++t) {
      SP_RETURN_IF_ERROR(model->decode(*pool, rows, logits.data()));
      for (DecodeRow& row : rows) {
        pool->set_n_tokens(row.slot, ++row.position);
        row.token = static_cast<std::int32_t>((row.token * 31 + 7) % vocab);
      }
    }
    cost->rss = resident_bytes() - before;
    cost->pool = pool->bytes_per_slot();
    cost->kv = kTokens * model->config().kv_bytes_per_token();
    return {};
  };
  // A first round makes the workspaces of this batch, which stay; what its pool and caches took
  // goes back to the system (blocks of this size are mappings of their own).
  SP_RETURN_IF_ERROR(run(n_sequences));
  *cost = {};
  return run(n_sequences);
}

// Measured in a process of its own, so that no earlier test's freed memory hides growth.
Cost measure_in_child(const std::string& scheme, std::int64_t n_sequences) {
  int ends[2];
  EXPECT_EQ(pipe(ends), 0);
  const pid_t child = fork();
  if (child == 0) {
    Cost cost;
    const Status status = measure(scheme, n_sequences, &cost);
    if (!status.ok()) std::fprintf(stderr, "%s\n", status.message().c_str());
    const bool sent = status.ok() && write(ends[1], &cost, sizeof cost) == sizeof cost;
    _exit(sent ? 0 : 1);
  }
  close(ends[1]);
  Cost cost;
  EXPECT_EQ(read(ends[0], &cost, sizeof cost), static_cast<ssize_t>(sizeof cost)) << scheme;
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0) << scheme;
  return cost;
}

TEST(Memory, DecodingManySequencesTakesTheirResidentBytesAndNothingMore) {
  if (kSanitized) GTEST_SKIP() << "the sanitizer's own memory would be measured";
  constexpr std::int64_t kSequences = 256;
  for (const char* scheme : {"fp32", "stepquant:4", "pace:4/8"}) {
    const Cost cost = measure_in_child(scheme, kSequences);
    const std::int64_t counted = cost.pool + cost.kv;
    const std::int64_t measured = cost.rss / kSequences;
    RecordProperty(scheme, std::to_string(measured));
    std::printf(
        "%-12s %8ld bytes a sequence measured; counted %8ld: pool %ld, attention cache %ld\n",
        scheme, measured, counted, cost.pool, cost.kv);
    // The kernel gives whole pages: a sequence's slot and the ends of its cache's blocks are
    // rounded.
    EXPECT_LE(measured, counted + 8 * 4096) << scheme;
    EXPECT_GE(measured, counted - 4096) << scheme;
  }
}

}  // namespace
}  // namespace statepack
