// The program as its users meet it: a process with arguments, exit codes and messages.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/file.hpp"
#include "pool/pool.hpp"

namespace statepack {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

const std::string kModel = SP_SOURCE_DIR "/models/statepack-gdn";
const std::string kData = SP_SOURCE_DIR "/eval/data";

struct Outcome {
  int exit_code = -1;
  std::string out, err;
};

class CliTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::path(testing::TempDir()) / ("cli_" + std::to_string(::getpid()));
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  std::string text_of(const std::string& name) const {
    std::ifstream file(path(name), std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  void write(const std::string& name, const std::string& text) const {
    std::ofstream(path(name), std::ios::binary) << text;
  }

  pid_t start(const std::vector<std::string>& arguments, const std::string& input) {
    write("in", input);
    std::fflush(nullptr);  // else the child writes our buffers a second time
    const pid_t child = ::fork();
    if (child != 0) return child;
    if (std::freopen(path("in").c_str(), "r", stdin) == nullptr ||
        std::freopen(path("out").c_str(), "w", stdout) == nullptr ||
        std::freopen(path("err").c_str(), "w", stderr) == nullptr) {
      ::_exit(125);
    }
    std::vector<char*> argv = {const_cast<char*>("statepack")};
    for (const std::string& a : arguments) argv.push_back(const_cast<char*>(a.c_str()));
    argv.push_back(nullptr);
    ::execv(SP_PROGRAM, argv.data());
    ::_exit(126);
  }
  Outcome finish(pid_t child) {
    int status = 0;
    ::waitpid(child, &status, 0);
    return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), text_of("out"),
            text_of("err")};
  }
  Outcome run(const std::vector<std::string>& arguments, const std::string& input = "") {
    return finish(start(arguments, input));
  }
  // A JSON document on stdout, nothing on stderr, exit 0.
  json run_json(std::vector<std::string> arguments, const std::string& input = "") {
    arguments.emplace_back("--json");
    const Outcome o = run(arguments, input);
    EXPECT_EQ(o.exit_code, 0) << o.err;
    EXPECT_EQ(o.err, "");
    const json document = json::parse(o.out, nullptr, false);
    EXPECT_FALSE(document.is_discarded()) << o.out;
    return document;
  }
  void expect_refused(const std::vector<std::string>& arguments, const std::string& message) {
    const Outcome o = run(arguments);
    EXPECT_EQ(o.exit_code, 2) << o.out << o.err;
    EXPECT_THAT(o.err, AllOf(StartsWith("statepack: "), HasSubstr(message)));
    EXPECT_EQ(o.out, "");
  }

  fs::path folder_;
};

TEST_F(CliTest, HelpHasExamplesForEveryCommand) {
  for (const std::string command :
       {"generate", "calibrate", "eval", "inspect", "size", "bench", "version"}) {
    const Outcome o = run({command, "--help"});
    EXPECT_EQ(o.exit_code, 0);
    EXPECT_THAT(o.out, HasSubstr("Example")) << command;
    EXPECT_THAT(o.out, HasSubstr("--json")) << command;
  }
  EXPECT_THAT(run({"serve", "--help"}).out, HasSubstr("Example"));
  EXPECT_EQ(run({"--help"}).exit_code, 0);
  EXPECT_THAT(run({"--version"}).out, StartsWith("statepack "));
}

TEST_F(CliTest, WrongUseIsExitTwo) {
  expect_refused({}, "subcommand");
  expect_refused({"fly"}, "fly");
  expect_refused({"generate"}, "--model");
  expect_refused({"generate", "-m", kModel, "--temprature", "1"}, "--temprature");
  expect_refused({"generate", "-m", kModel, "-p", "x", "-t", "hot"}, "hot");
  expect_refused({"generate", "-m", kModel, "-p", "x", "-t", "-1"}, "temperature");
  expect_refused({"generate", "-m", kModel, "-p", "x", "--seed", "-1"}, "whole number");
  expect_refused({"generate", "-m", kModel, "-p", "x", "--seed", "18446744073709551616"}, "--seed");
  expect_refused({"calibrate", "-m", kModel, "--text", "x", "-o", "y", "--seed", "-1"}, "--seed");
  expect_refused({"generate", "-m", kModel, "-p", "-"}, "held no prompt");
  expect_refused({"eval", "-m", kModel, "--tasks", "perm", "--max-drop", "-1"}, "--max-drop");
  expect_refused({"eval", "-m", kModel}, "--tasks");
  expect_refused({"eval", "--tasks", "perm"}, "--model");
  expect_refused({"eval", "-m", kModel, "results.json"}, "--report");
  expect_refused({"eval", "--report", path("r.md")}, "results files");
  expect_refused({"eval", "-m", kModel, "--tasks", "perm", "-o", path("r"), "--html",
                  path("../") + fs::path(path("")).parent_path().filename().string() + "/r"},
                 "-o and --html both name");
  expect_refused({"calibrate", "-m", kModel, "-o", path("p")}, "--text");
  expect_refused({"size"}, "--list");
  expect_refused({"bench", "-m", kModel, "--batch", "0"}, "--batch");
}

TEST_F(CliTest, BadInputIsNamed) {
  expect_refused({"generate", "-m", path("none"), "-p", "x"}, "none");
  expect_refused({"generate", "-m", kModel, "-p", "x", "--state", "int9"}, "int9");
  expect_refused({"generate", "-m", kModel, "-p", "x", "--plan", path("p.safetensors")},
                 "p.safetensors");
  expect_refused({"eval", "-m", kModel, "--tasks", "juggling", "--data", kData}, "juggling.jsonl");
  expect_refused({"eval", "-m", kModel, "--tasks", "all", "--data", path("")}, "no task files");
  expect_refused({"eval", "-m", kModel, "--ids", "perm-no-1", "--data", kData}, "perm-no-1");
  expect_refused({"inspect", path("nothing")}, "nothing");
  expect_refused({"size", "gpt-5"}, "known models");
  expect_refused({"size", "kimi", "--memory", "lots"}, "lots");
  expect_refused({"calibrate", "-m", kModel, "--text", kData + "/README.md", "--scheme", "int8",
                  "-o", path("p")},
                 "needs no plan");
  expect_refused({"generate", "-m", kModel, "-p", "caf\xe9"},
                 "the prompt is not UTF-8 text: byte 3");
  expect_refused({"generate", "-m", kModel, "-p", "x", "--system", "\xff"}, "system message");
  write("latin1.txt", "na\xefve");
  expect_refused({"eval", "-m", kModel, "--text", path("latin1.txt")}, "latin1.txt is not UTF-8");
  expect_refused({"calibrate", "-m", kModel, "--text", path("latin1.txt"), "-o", path("p")},
                 "latin1.txt is not UTF-8");
  write("bad.safetensors", "not a plan");
  expect_refused({"inspect", path("bad.safetensors")}, "bad.safetensors");
  write("bad.snapshot", "not a snapshot");
  expect_refused({"inspect", path("bad.snapshot")}, "bad.snapshot");
  write("bad.json", "{}");
  expect_refused({"eval", "-m", kModel, "--tasks", "perm", "--data", kData, "-o", path("bad.json")},
                 "bad.json");
  expect_refused({"eval", "--report", path("r.md"), path("bad.json")}, "bad.json");
}

TEST_F(CliTest, APlanThatIsMissingComesWithTheCure) {
  fs::create_directories(path("m"));
  for (const auto& item : fs::directory_iterator(kModel)) {
    if (item.is_regular_file()) fs::create_symlink(item.path(), path("m") / item.path().filename());
  }
  expect_refused({"generate", "-m", path("m"), "-p", "x", "--state", "stepquant:6"},
                 "statepack calibrate");
}

TEST_F(CliTest, CorruptModelFoldersAreRefused) {
  const auto fresh = [&] {
    fs::remove_all(path("m"));
    fs::create_directories(path("m"));
    for (const auto& item : fs::directory_iterator(kModel)) {
      if (item.is_regular_file())
        fs::create_symlink(item.path(), path("m") / item.path().filename());
    }
  };
  const auto replace = [&](const std::string& file, const std::string& text) {
    fresh();
    fs::remove(path("m/" + file));
    write("m/" + file, text);
  };
  const std::vector<std::string> arguments = {"generate", "-m", path("m"), "-p", "x"};
  replace("config.json", "{");
  expect_refused(arguments, "config.json");
  replace("config.json", R"({"model_type": "llama"})");
  expect_refused(arguments, "llama");
  replace("tokenizer.json", "[]");
  expect_refused(arguments, "tokenizer.json");
  replace("model.safetensors.index.json", R"({"weight_map": {"a": "../../etc/passwd"}})");
  expect_refused(arguments, "model.safetensors.index.json");
  fresh();
  const std::string shard = "model-00002-of-00003.safetensors";
  const std::string bytes = read_text_file(kModel + "/" + shard, std::size_t{1} << 28).value();
  replace(shard, bytes.substr(0, bytes.size() / 2));
  expect_refused(arguments, shard);
  fresh();
  fs::remove(path("m") / fs::path(shard));
  expect_refused(arguments, shard);
}

TEST_F(CliTest, GenerateAnswersThroughEveryKindOfState) {
  for (const std::string state : {"fp32", "int8", "stepquant:6", "leapquant:8"}) {
    const json d =
        run_json({"generate", "-m", kModel, "-p", "Compute 929 + 957.", "--state", state});
    EXPECT_THAT(d["text"].get<std::string>(), HasSubstr("answer: 1886")) << state;
    EXPECT_EQ(d["finish_reason"], "stop");
    EXPECT_EQ(d["usage"]["prompt_tokens"], 19);
    EXPECT_EQ(d["state"]["scheme"], state);
    EXPECT_EQ(d["state"]["fp32_bytes"], 6 * 4 * 128 * 128 * 4);
    EXPECT_LE(d["state"]["payload_bytes"], d["state"]["fp32_bytes"]);
  }
}

TEST_F(CliTest, GenerateStreamsStopsAndContinuesPlainText) {
  const Outcome full = run({"generate", "-m", kModel, "-p", "Compute 929 + 957."});
  EXPECT_EQ(full.exit_code, 0);
  EXPECT_EQ(full.err, "");
  EXPECT_THAT(full.out, AllOf(HasSubstr("carry"), HasSubstr("answer: 1886\n")));
  const Outcome stopped =
      run({"generate", "-m", kModel, "-p", "Compute 929 + 957.", "--stop", "carry 0"});
  EXPECT_EQ(stopped.out, full.out.substr(0, full.out.find("carry 0")) + "\n");
  const Outcome from_stdin = run({"generate", "-m", kModel, "-p", "-"}, "Compute 929 + 957.");
  EXPECT_EQ(from_stdin.out, full.out);
  const json raw = run_json({"generate", "-m", kModel, "--raw", "-p", "The cat", "-n", "5",
                             "--ignore-eos", "--logprobs", "2"});
  EXPECT_EQ(raw["usage"]["completion_tokens"], 5);
  EXPECT_EQ(raw["finish_reason"], "length");
  EXPECT_EQ(raw["logprobs"].size(), 5U);
  EXPECT_EQ(raw["logprobs"][0]["top_logprobs"][0]["id"], raw["logprobs"][0]["id"]);
}

TEST_F(CliTest, SamplingRepeatsWithItsSeed) {
  const auto text = [&](const std::string& seed) {
    return run_json({"generate", "-m", kModel, "--raw", "-p", "Once", "-n", "12", "--ignore-eos",
                     "-t", "1", "--top-p", "0.95", "--seed", seed})["text"]
        .get<std::string>();
  };
  const std::string first = text("1");
  EXPECT_EQ(text("1"), first);
  EXPECT_NE(text("2"), first);
}

TEST_F(CliTest, ChatTakesATurnALine) {
  const Outcome o = run({"generate", "-m", kModel, "--json"},
                        "Compute 1 + 2.\n\n/clear\nCompute 929 + 957.\n/quit\nnever asked\n");
  EXPECT_EQ(o.exit_code, 0) << o.err;
  std::istringstream lines(o.out);
  std::vector<json> turns;
  for (std::string line; std::getline(lines, line);) turns.push_back(json::parse(line));
  ASSERT_EQ(turns.size(), 2U);
  EXPECT_EQ(turns[1]["usage"]["prompt_tokens"], 19);  // /clear forgot the first turn
  EXPECT_THAT(turns[1]["text"].get<std::string>(), HasSubstr("1886"));
}

TEST_F(CliTest, ATurnThatIsRefusedDoesNotEndTheChat) {
  const std::string too_long(4000, 'x');
  const Outcome o = run({"generate", "-m", kModel, "--json", "--max-context", "500"},
                        too_long + "\nCompute 929 + 957.\n");
  EXPECT_EQ(o.exit_code, 2);
  EXPECT_THAT(o.err, HasSubstr("the context holds 500"));
  const json turn = json::parse(o.out);
  EXPECT_EQ(turn["usage"]["prompt_tokens"], 19);  // the refused turn is no part of it
  EXPECT_THAT(turn["text"].get<std::string>(), HasSubstr("1886"));
}

TEST_F(CliTest, CalibrateInspectAndUseAPlan) {
  const std::string plan = path("plan.safetensors");
  const json made = run_json(
      {"calibrate", "-m", kModel, "--text", kData + "/wikitext2/wikitext2.valid.txt", "--scheme",
       "stepquant:6", "--segments", "2", "--seq-len", "256", "--snapshots", "4", "-o", plan});
  EXPECT_EQ(made["layers"].size(), 6U);
  const json seen = run_json({"inspect", plan});
  EXPECT_EQ(seen["kind"], "plan");
  EXPECT_EQ(seen["fingerprint"], made["fingerprint"]);
  EXPECT_EQ(seen["layers"][0]["heads"].size(), 4U);
  EXPECT_THAT(run({"inspect", plan}).out, HasSubstr("stepquant:6"));
  const json d = run_json({"generate", "-m", kModel, "-p", "Compute 929 + 957.", "--state",
                           "stepquant:6", "--plan", plan});
  EXPECT_THAT(d["text"].get<std::string>(), HasSubstr("answer: 1886"));
  const json size = run_json({"size", kModel, "--state", "stepquant:6", "--plan", plan});
  EXPECT_EQ(size["schemes"][0]["page_bytes"], d["state"]["payload_bytes"]);
  EXPECT_EQ(size["schemes"][0]["nominal"], false);
}

TEST_F(CliTest, InspectAndSizeAModel) {
  const json d = run_json({"inspect", kModel});
  EXPECT_EQ(d["kind"], "model");
  EXPECT_EQ(d["recurrent_layers"], 6);
  EXPECT_EQ(d["state_bytes_fp32"], 6 * 4 * 128 * 128 * 4);
  EXPECT_EQ(d["layers"][1]["resting_half_life"].size(), 4U);
  EXPECT_THAT(run({"inspect", kModel}).out, HasSubstr("gated delta"));

  const json size = run_json({"size", "qwen3.8-27b", "--state", "fp32", "--state", "stepquant:6",
                              "-c", "10", "--memory", "80GiB"});
  EXPECT_EQ(size["state_bytes_fp32"], 150994944);
  const json& fp32 = size["schemes"][0];
  EXPECT_EQ(fp32["page_bytes"], 150994944);
  EXPECT_EQ(fp32["concurrency"][0]["state_bytes"],
            10 * (150994944 + fp32["window_bytes"].get<int>() + fp32["cursor_bytes"].get<int>()));
  EXPECT_EQ(size["schemes"][1]["nominal"], true);
  EXPECT_GT(size["schemes"][1]["sequences_that_fit"], size["schemes"][0]["sequences_that_fit"]);
  const Outcome table = run({"size", "qwen3.8-27b"});
  EXPECT_THAT(table.out, AllOf(HasSubstr("fp32"), HasSubstr("151 MB"), HasSubstr("nominal")));
  EXPECT_EQ(run_json({"size", "--list"}).size(), 13U);
}

TEST_F(CliTest, BenchComparesSchemes) {
  const std::vector<std::string> arguments = {"bench", "-m",      kModel, "--state", "fp32",
                                              "int8",  "--batch", "1,3",  "--steps", "17"};
  const json d = run_json(arguments);
  ASSERT_EQ(d["benchmarks"].size(), 4U);
  const json& int8 = d["benchmarks"][3];
  EXPECT_EQ(int8["name"], "decode/int8/3");
  EXPECT_EQ(int8["iterations"], 17);
  EXPECT_EQ(d["benchmarks"][2]["speedup"], 1.0);
  EXPECT_GT(int8["speedup"], 0.0);
  EXPECT_GT(int8["items_per_second"], 0.0);
  EXPECT_LT(int8["resident_bytes"], d["benchmarks"][2]["resident_bytes"]);
  double shares = 0;
  for (const auto& [key, value] : int8.items()) {
    if (key.rfind("share_", 0) != 0) continue;
    EXPECT_GE(value.get<double>(), 0) << key;
    shares += value.get<double>();
  }
  EXPECT_GT(int8["share_state"], 0.0);
  EXPECT_NEAR(shares, 1, 1e-9);
  EXPECT_THAT(run(arguments).out, AllOf(HasSubstr("tokens/s"), HasSubstr("feed-forward %")));
  expect_refused({"bench", "-m", kModel, "--state", "fp32", "int9"}, "int9");
  // What is measured already is printed, whatever ends the run.
  const Outcome o =
      run({"bench", "-m", kModel, "--state", "int8", "--batch", "1,1000000", "--steps", "2"});
  EXPECT_EQ(o.exit_code, 2);
  EXPECT_THAT(o.out, HasSubstr("int8"));
  EXPECT_THAT(o.err, HasSubstr("1000000 slots"));
}

TEST_F(CliTest, EvalResumesReportsAndGates) {
  const std::string results = path("r.json");
  const std::vector<std::string> arguments = {"eval",      "-m",
                                              kModel,      "--state",
                                              "fp32",      "int4",
                                              "--tasks",   "arith",
                                              "--data",    kData,
                                              "--samples", "3",
                                              "--text",    kData + "/wikitext2/wikitext2.test.txt",
                                              "--context", "64",
                                              "--windows", "2",
                                              "-o",        results};
  const json first = run_json(arguments);
  EXPECT_TRUE(first["runs"]["int4"]["results"]["arith"]["exact_match,none"].is_number());
  EXPECT_EQ(first["runs"]["fp32"]["n-samples"]["arith"]["effective"], 3);
  EXPECT_EQ(first["runs"]["fp32"]["results"]["wikitext2.test@64"]["kl,none"], 0.0);
  EXPECT_GT(first["runs"]["int4"]["results"]["wikitext2.test@64"]["kl,none"], 0.0);
  const std::string before = text_of("r.json");
  const json again = run_json(arguments);  // nothing runs again: not even the times change
  EXPECT_EQ(text_of("r.json"), before);
  EXPECT_EQ(again, first);

  // More samples, two of them left out: known replies are taken over, and nothing shows it.
  std::ofstream(path("used.jsonl")) << R"({"id": "arith-short-0000"})"
                                    << "\n\n"
                                    << R"({"id": "arith-short-0001", "more": 1})"
                                    << "\n";
  const auto with_more = [&](const std::string& file) {
    std::vector<std::string> more = {
        "eval",  "-m",     kModel, "--state",   "fp32", "int4",      "--tasks",
        "arith", "--data", kData,  "--samples", "5",    "--without", path("used.jsonl"),
        "-o",    file};
    json runs = run_json(more)["runs"];
    for (json& r : runs) {
      r = json{{"results", r["results"]["arith"]}, {"config", r["configs"]["arith"]}};
    }
    return runs;
  };
  const json extended = with_more(results);
  EXPECT_EQ(extended, with_more(path("fresh.json")));
  EXPECT_TRUE(extended["fp32"]["config"].contains("without"));
  std::ofstream(path("used.jsonl")) << "{}";
  EXPECT_THAT(run({"eval", "-m", kModel, "--tasks", "arith", "--data", kData, "--without",
                   path("used.jsonl")})
                  .err,
              HasSubstr("used.jsonl: line 1 needs a text 'id'"));
  std::ofstream(path("used.jsonl")) << R"({"id": "elsewhere"})";
  EXPECT_THAT(run({"eval", "-m", kModel, "--tasks", "arith", "--data", kData, "--without",
                   path("used.jsonl")})
                  .err,
              HasSubstr("no sample of these tasks has one of its ids"));

  const Outcome report = run({"eval", "--report", path("report.md"), results});
  EXPECT_EQ(report.exit_code, 0) << report.err;
  EXPECT_THAT(text_of("report.md"), AllOf(HasSubstr("## arith"), HasSubstr("| int4")));
  const Outcome gate = run({"eval", "--report", path("report.md"), results, "--max-kl", "1e-9"});
  EXPECT_EQ(gate.exit_code, 1);
  EXPECT_THAT(gate.err, HasSubstr("gate failed: int4 on wikitext2.test@64"));
}

TEST_F(CliTest, ComparesAListOfSchemes) {
  write("list", "# two of them\nint4   # 4 bits\n\nklt:7\nstepquant:6,bits=uniform\r\nint4\n");
  const std::vector<std::string> arguments = {"eval",
                                              "-m",
                                              kModel,
                                              "--compare",
                                              path("list"),
                                              "--tasks",
                                              "arith",
                                              "--data",
                                              kData,
                                              "--samples",
                                              "2",
                                              "--text",
                                              kData + "/wikitext2/wikitext2.test.txt",
                                              "--context",
                                              "256",
                                              "--windows",
                                              "1",
                                              "--html",
                                              path("r.html"),
                                              "--harness",
                                              path("harness"),
                                              "--json"};
  const Outcome o = run(arguments);
  ASSERT_EQ(o.exit_code, 0) << o.err;
  EXPECT_THAT(o.err, StartsWith("statepack: left out klt:7: "));
  const json d = json::parse(o.out);
  ASSERT_EQ(d["runs"].size(), 3U);  // fp32 first; klt:7 has no plan
  EXPECT_EQ(d["runs"].begin().key(), "fp32");
  EXPECT_TRUE(d["runs"].contains("int4") && d["runs"].contains("stepquant:6,bits=uniform"));
  EXPECT_EQ(d["runs"]["stepquant:6,bits=uniform"]["plan_bits"].size(), 6U);
  EXPECT_EQ(d["heads"]["layers"][0].size(), 4U);
  EXPECT_THAT(text_of("r.html"), AllOf(HasSubstr("<svg"), HasSubstr("int4: rho")));
  const json harness = json::parse(text_of("harness/results_stepquant_6_bits=uniform.json"));
  EXPECT_TRUE(harness["results"]["arith"]["exact_match,none"].is_number());

  write("wrong", "int4\nint9\n");
  expect_refused({"eval", "-m", kModel, "--compare", path("wrong")}, "int9");
  write("empty", "# nothing\n");
  expect_refused({"eval", "-m", kModel, "--compare", path("empty")}, "names no scheme");
  expect_refused({"eval", "-m", kModel, "--compare", path("none")}, "none");
  // The lists beside the data parse.
  for (const auto& file : fs::directory_iterator(SP_SOURCE_DIR "/eval/schemes")) {
    std::ifstream list(file.path());
    for (std::string line; std::getline(list, line);) {
      if (line.empty() || line[0] == '#') continue;
      EXPECT_TRUE(Scheme::parse(line).ok()) << file.path() << ": " << line;
    }
  }
}

TEST_F(CliTest, InspectShowsHeadsValuesAndSpending) {
  const std::string text = kData + "/wikitext2/wikitext2.valid.txt";
  const json d = run_json({"inspect", kModel, "--text", text, "--tokens", "256"});
  ASSERT_EQ(d["heads_on_text"].size(), 6U);
  const json& head = d["heads_on_text"][0][0];
  EXPECT_GT(head["half_life"].get<double>(), 0);
  EXPECT_GE(head["lifetime"].get<double>(), 1);
  EXPECT_LE(head["lifetime"].get<double>(), 2048);
  EXPECT_GE(head["row_peak"].get<double>(), 1);
  EXPECT_GE(head["omega_p90_p10"].get<double>(), 1);
  expect_refused({"inspect", kModel, "--text", path("none")}, "none");
  // Conversations are read as such: with the template's words, not as JSON.
  std::string chat;
  for (int i = 0; i < 20; ++i) {
    chat += R"({"messages": [{"role": "user", "content": "Compute 1 + 2."},)"
            R"( {"role": "assistant", "content": "3"}]})"
            "\n";
  }
  write("chat.jsonl", chat);
  write("chat.txt", chat);
  EXPECT_NE(run_json({"inspect", kModel, "--text", path("chat.jsonl")})["heads_on_text"],
            run_json({"inspect", kModel, "--text", path("chat.txt")})["heads_on_text"]);
  write("broken.jsonl", "{");
  expect_refused({"inspect", kModel, "--text", path("broken.jsonl")}, "broken.jsonl");

  const json plan = run_json({"inspect", kModel + "/plans/stepquant-4.safetensors"});
  std::int64_t n_rows = 0;
  for (const auto& [width, rows] : plan["rows_by_bits"].items()) n_rows += rows["rows"].get<int>();
  EXPECT_EQ(n_rows, 6 * 4 * 128);
  std::int64_t n_bytes = 0;
  for (const auto& [part, bytes] : plan["page_parts"].items()) n_bytes += bytes.get<int>();
  EXPECT_EQ(n_bytes, plan["page_bytes"].get<int>());

  // A state of known values: one row 40 times the others.
  const LayerShape shape{1, 2, 16, 16, Gate::kScalar};
  auto scheme = CompiledScheme::make(Scheme::parse("fp32").value(), {shape}, nullptr, "m").value();
  PoolConfig config;
  config.n_slots = 1;
  const auto pool = std::move(*StatePool::create(scheme, config));
  const std::int64_t slot = *pool->alloc();
  std::vector<float> S(512, 0.5f);
  std::fill_n(S.begin() + 16 * 3, 16, -20.0f);
  ThreadPool threads(1);
  ASSERT_TRUE(hand_over(pool->layer(0), slot, S.data(), 9, threads).ok());
  ASSERT_TRUE(pool->save(slot, path("one.snapshot")).ok());
  const json state = run_json({"inspect", path("one.snapshot")});
  EXPECT_DOUBLE_EQ(state["values"][0][0]["row_peak"].get<double>(), 40);
  EXPECT_DOUBLE_EQ(state["values"][0][0]["column_peak"].get<double>(), 1);
  EXPECT_DOUBLE_EQ(state["values"][0][0]["largest"].get<double>(), 20);
  EXPECT_DOUBLE_EQ(state["values"][0][1]["rms"].get<double>(), 0.5);
  EXPECT_THAT(run({"inspect", path("one.snapshot")}).out, HasSubstr("row max/median"));

  // The same beside a convolution history of two bytes a value.
  scheme =
      CompiledScheme::make(Scheme::parse("fp32,conv=bf16").value(), {shape}, nullptr, "m").value();
  config.conv_floats = 6;
  const auto narrow = std::move(*StatePool::create(scheme, config));
  const std::int64_t other = *narrow->alloc();
  ASSERT_TRUE(hand_over(narrow->layer(0), other, S.data(), 9, threads).ok());
  ASSERT_TRUE(narrow->save(other, path("narrow.snapshot")).ok());
  EXPECT_EQ(run_json({"inspect", path("narrow.snapshot")})["values"], state["values"]);
}

TEST_F(CliTest, SideBySide) {
  const json d = run_json({"eval", "-m", kModel, "--state", "fp32", "--state", "int8", "--ids",
                           "arith-short-0000,lists-short-0000", "--data", kData});
  EXPECT_EQ(d["schemes"].size(), 2U);
  EXPECT_EQ(d["questions"][0]["answers"][0]["answer"], "1886");
  EXPECT_EQ(d["questions"][1]["id"], "lists-short-0000");
  const Outcome o =
      run({"eval", "-m", kModel, "--state", "fp32", "--ids", "arith-short-0000", "--data", kData});
  EXPECT_THAT(o.out,
              AllOf(HasSubstr("right answer: 1886"), HasSubstr("1 of 1"), Not(HasSubstr("\x1b"))));
}

TEST_F(CliTest, ServeNamesWhatItCannotUse) {
  expect_refused({"serve"}, "--model DIR");
  expect_refused({"serve", "-m", path("none")}, "none");
  expect_refused({"serve", "-m", kModel, "--port", "65536"}, "--port");
  expect_refused({"serve", "-m", kModel, "--host", "256.0.0.1"}, "256.0.0.1:8080");
  expect_refused({"serve", "-m", kModel, "--prefix-cache", "some"}, "'some'");
  expect_refused({"serve", "-m", kModel, "--prefix-cache", "off", "--prefix-cache-path", path("p")},
                 "--prefix-cache blocks or turns");
  expect_refused({"serve", "-m", kModel, "--state-pool-bytes", "lots"}, "lots");
  expect_refused({"serve", "-m", kModel, "-np", "9", "--state-pool-slots", "8"},
                 "pass --max-num-seqs 8");
  expect_refused({"serve", "-m", kModel, "--state", "int8,conv=f32", "--conv-state-dtype", "bf16"},
                 "--conv-state-dtype bf16 says otherwise than --state int8,conv=f32");
  // The same value twice is no contradiction: what is refused is the next thing.
  expect_refused({"serve", "-m", kModel, "--state", "int8,conv=bf16", "--conv-state-dtype", "bf16",
                  "-np", "9", "--state-pool-slots", "8"},
                 "pass --max-num-seqs 8");
  expect_refused({"serve", "-m", kModel, "--prefix-cache-state-bytes", "1kB"},
                 "--prefix-cache-state-bytes 1000 keeps nothing");
  expect_refused({"serve", "-m", kModel, "--api-key-file", path("keys")}, "keys");
  expect_refused({"serve", "--config", path("none.toml")}, "none.toml");
  write("c.toml", "model = \"x\"\nmax-nums = 4\n");
  expect_refused({"serve", "--config", path("c.toml")},
                 "c.toml: line 2: there is no option 'max-nums'");
  write("c.toml", "port = \"high\"\n");
  expect_refused({"serve", "--config", path("c.toml")}, "c.toml: line 1");
  write("c.toml", "port = [\n");
  expect_refused({"serve", "--config", path("c.toml")}, "c.toml");
}

TEST_F(CliTest, ServeTakesOptionsFromTheLineTheEnvironmentAndTheFileAndEndsOnASignal) {
  write("c.toml", "model = \"" + kModel + "\"\nstate = \"fp32\"\nport = 0\nmax-num-seqs = 4\n" +
                      "max-model-len = 1024\n");
  ::setenv("STATEPACK_MAX_NUM_SEQS", "6", 1);
  const pid_t child = start({"serve", "--config", path("c.toml"), "--state", "int8",
                             "--prefix-cache-path", path("prefixes")},
                            "");
  ::unsetenv("STATEPACK_MAX_NUM_SEQS");
  for (int i = 0; i < 1000 && text_of("err").find("ready after") == std::string::npos; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  ::kill(child, SIGTERM);
  const Outcome o = finish(child);
  EXPECT_EQ(o.exit_code, 0) << o.err;
  EXPECT_THAT(o.err, AllOf(HasSubstr("state int8, "), HasSubstr("6 slots"),
                           HasSubstr("batches of 6, context 1024"),
                           HasSubstr("prefix cache: 0 tokens"), HasSubstr(" stopped\n")));
}

TEST_F(CliTest, AnInterruptEndsCleanly) {
  const std::string results = path("r.json");
  const pid_t child = start(
      {"eval", "-m", kModel, "--state", "fp32", "--tasks", "trace", "--data", kData, "-o", results},
      "");
  std::this_thread::sleep_for(std::chrono::milliseconds(1500));
  ::kill(child, SIGINT);
  const Outcome o = finish(child);
  EXPECT_EQ(o.exit_code, 130) << o.err;
  EXPECT_THAT(o.err, HasSubstr("stopped on request"));
  // Half a task is no result; replies that had ended may be there for the next run.
  const json document = json::parse(text_of("r.json"));
  EXPECT_TRUE(document.at("runs").at("fp32").at("results").empty());
}

}  // namespace
}  // namespace statepack
