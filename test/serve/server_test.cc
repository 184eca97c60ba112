// The whole server on real sockets, with the model that the project ships.
#include "serve/server.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sys/resource.h>

#include <cmath>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <future>
#include <limits>
#include <set>
#include <span>

#include "../base/temporary_folder.hpp"
#include "base/file.hpp"
#include "delta/step.hpp"
#include "pool/prefix_file.hpp"
#include "server_rig.hpp"

namespace statepack::serve {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

Json user(const std::string& text) {
  return Json{{"messages", Json::array({{{"role", "user"}, {"content", text}}})}};
}

Json prompt(const Json& text, std::int64_t max_tokens = 8) {
  return Json{{"prompt", text}, {"max_tokens", max_tokens}, {"temperature", 0}};
}

Json with(Json json, const Json& more) {
  json.update(more);
  return json;
}

// A reply that goes on until somebody ends it.
Json endless() { return with(prompt("Once upon a time", 2000), {{"ignore_eos", true}}); }

// The one server that tests share which leave it as they found it.
class ServeTest : public testing::Test {
 public:
  static void SetUpTestSuite() { rig_ = std::make_unique<ServerRig>(ServerRig::options()); }
  static void TearDownTestSuite() { rig_.reset(); }

 protected:
  void TearDown() override { EXPECT_TRUE(rig().wait_idle()); }
  static ServerRig& rig() { return *rig_; }
  static Reply completion(const Json& body) { return rig().post("/v1/completions", body); }
  static Reply chat(const Json& body) { return rig().post("/v1/chat/completions", body); }

 private:
  static std::unique_ptr<ServerRig> rig_;
};
std::unique_ptr<ServerRig> ServeTest::rig_;

TEST_F(ServeTest, AnswersAChat) {
  const Reply reply = chat(with(user("Compute 12 + 30."), {{"max_tokens", 40}}));
  ASSERT_EQ(reply.status, 200) << reply.body;
  const Json json = reply.json();
  EXPECT_EQ(json["object"], "chat.completion");
  EXPECT_THAT(json["id"].get<std::string>(), HasSubstr("chatcmpl-"));
  EXPECT_EQ(json["model"], "statepack-gdn");
  ASSERT_EQ(json["choices"].size(), 1U);
  const Json& choice = json["choices"][0];
  EXPECT_EQ(choice["index"], 0);
  EXPECT_EQ(choice["message"]["role"], "assistant");
  EXPECT_NE(choice["message"]["content"], "");
  EXPECT_TRUE(choice["finish_reason"] == "stop" || choice["finish_reason"] == "length");
  EXPECT_TRUE(choice["logprobs"].is_null());
  const Json& usage = json["usage"];
  EXPECT_GT(usage["prompt_tokens"], 5);
  EXPECT_GT(usage["completion_tokens"], 0);
  EXPECT_EQ(usage["total_tokens"].get<int>(),
            usage["prompt_tokens"].get<int>() + usage["completion_tokens"].get<int>());
  EXPECT_TRUE(usage["prompt_tokens_details"]["cached_tokens"].is_number());
  EXPECT_GT(json["timings"]["predicted_ms"], 0);
}

TEST_F(ServeTest, StreamsWhatItWouldAnswerAtOnce) {
  const Json body = with(user("Compute 12 + 30."), {{"max_tokens", 40}});
  const std::string whole = chat(body).json()["choices"][0]["message"]["content"];
  const Reply reply =
      chat(with(body, {{"stream", true}, {"stream_options", {{"include_usage", true}}}}));
  ASSERT_EQ(reply.status, 200);
  EXPECT_EQ(reply.header("Content-Type"), "text/event-stream; charset=utf-8");
  const std::vector<std::string> list = events(reply.body);
  ASSERT_GE(list.size(), 4U);
  EXPECT_EQ(list.back(), "[DONE]");
  std::string text;
  std::string finish;
  for (std::size_t i = 0; i + 2 < list.size(); ++i) {
    const Json chunk = Json::parse(list[i]);
    EXPECT_EQ(chunk["object"], "chat.completion.chunk");
    EXPECT_TRUE(chunk["usage"].is_null());
    const Json& choice = chunk["choices"][0];
    if (i == 0) {
      EXPECT_EQ(choice["delta"].dump(), R"({"role":"assistant","content":""})");
    }
    text += choice["delta"].value("content", "");
    if (!choice["finish_reason"].is_null()) finish = choice["finish_reason"];
  }
  EXPECT_EQ(text, whole);
  EXPECT_NE(finish, "");
  const Json last = Json::parse(list[list.size() - 2]);
  EXPECT_EQ(last["choices"].size(), 0U);
  EXPECT_GT(last["usage"]["completion_tokens"], 0);
}

TEST_F(ServeTest, CompletesPromptsOfAllForms) {
  const Reply reply = completion(prompt("Once upon a time"));
  ASSERT_EQ(reply.status, 200) << reply.body;
  const std::string text = reply.json()["choices"][0]["text"];
  EXPECT_EQ(reply.json()["object"], "text_completion");
  EXPECT_EQ(reply.json()["usage"]["completion_tokens"], 8);

  const Json ids = rig().post("/tokenize", {{"prompt", "Once upon a time"}}).json()["tokens"];
  EXPECT_EQ(completion(prompt(ids)).json()["choices"][0]["text"], text);
  const Json both = completion(prompt({"Once upon a time", "Compute 1 + 1."})).json();
  ASSERT_EQ(both["choices"].size(), 2U);
  EXPECT_EQ(both["choices"][0]["text"], text);
  EXPECT_EQ(both["choices"][1]["index"], 1);
  EXPECT_EQ(completion(prompt(Json::array({ids, ids}))).json()["choices"][1]["text"], text);
  EXPECT_EQ(
      completion(with(prompt("Once upon a time"), {{"echo", true}})).json()["choices"][0]["text"],
      "Once upon a time" + text);
  EXPECT_EQ(completion(with(prompt("Once", 0), {{"echo", true}})).json()["choices"][0]["text"],
            "Once");
}

TEST_F(ServeTest, DrawsNAnswersThatTheSeedFixes) {
  const Json body =
      with(prompt("Once upon a time", 12), {{"n", 4}, {"temperature", 1.5}, {"seed", 7}});
  const Json first = completion(body).json();
  const Json second = completion(body).json();
  ASSERT_EQ(first["choices"].size(), 4U);
  EXPECT_EQ(first["choices"], second["choices"]);
  std::set<std::string> texts;
  for (const Json& choice : first["choices"]) texts.insert(choice["text"]);
  EXPECT_GT(texts.size(), 1U);
  // One prompt, however many answers.
  EXPECT_EQ(first["usage"]["prompt_tokens"],
            completion(prompt("Once upon a time")).json()["usage"]["prompt_tokens"]);
}

TEST_F(ServeTest, GivesLogProbabilities) {
  const Json legacy =
      completion(with(prompt("Once upon a time", 3), {{"logprobs", 2}})).json()["choices"][0];
  const Json& lists = legacy["logprobs"];
  ASSERT_EQ(lists["tokens"].size(), 3U);
  EXPECT_EQ(lists["top_logprobs"][0].size(), 2U);
  EXPECT_EQ(lists["text_offset"][0], 0);
  EXPECT_LE(lists["token_logprobs"][0], 0);
  std::string text;
  for (const Json& token : lists["tokens"]) text += token.get<std::string>();
  EXPECT_EQ(text, legacy["text"]);

  const Json body =
      with(user("Hello"),
           {{"max_tokens", 3}, {"temperature", 0}, {"logprobs", true}, {"top_logprobs", 2}});
  const Json content = chat(body).json()["choices"][0]["logprobs"]["content"];
  ASSERT_GE(content.size(), 1U);
  EXPECT_EQ(content[0]["top_logprobs"].size(), 2U);
  EXPECT_EQ(content[0]["top_logprobs"][0]["token"], content[0]["token"]);  // greedy
  Json streamed = Json::array();
  for (const std::string& event : events(chat(with(body, {{"stream", true}})).body)) {
    if (event == "[DONE]") break;
    const Json choice = Json::parse(event)["choices"][0];
    if (choice["logprobs"].is_null()) continue;
    for (const Json& token : choice["logprobs"]["content"]) streamed.push_back(token);
  }
  EXPECT_EQ(streamed, content);
}

TEST_F(ServeTest, EndsAtStopTexts) {
  const std::string text = completion(prompt("Once upon a time", 16)).json()["choices"][0]["text"];
  ASSERT_GT(text.size(), 8U);
  const std::string stop = text.substr(5, 3);
  const Json stopped = completion(with(prompt("Once upon a time", 16), {{"stop", stop}})).json();
  EXPECT_EQ(stopped["choices"][0]["finish_reason"], "stop");
  EXPECT_EQ(stopped["choices"][0]["text"], text.substr(0, text.find(stop)));
}

TEST_F(ServeTest, AnswersTheSameAloneAndInACrowd) {
  const Json body = prompt("Once upon a time", 24);
  const std::string alone = completion(body).json()["choices"][0]["text"];
  std::vector<Client> clients;
  for (int i = 0; i < 24; ++i) {
    clients.emplace_back(rig().port());
    clients.back().send(post_text("/v1/completions", body.dump()));
  }
  for (Client& client : clients) {
    EXPECT_EQ(client.read_reply().json()["choices"][0]["text"], alone);
  }
}

TEST_F(ServeTest, SaysWhatItRefuses) {
  const auto error = [](const Reply& reply) {
    const Json json = reply.json()["error"];
    return std::to_string(reply.status) + " " + json["type"].get<std::string>() + " " +
           (json["param"].is_null() ? "-" : json["param"].get<std::string>());
  };
  EXPECT_EQ(error(completion({{"prompt", 7}})), "400 BadRequestError prompt");
  EXPECT_EQ(error(completion({{"prompt", ""}})), "400 BadRequestError prompt");
  EXPECT_EQ(error(completion({{"prompt", {1, 9000}}})), "400 BadRequestError prompt");
  EXPECT_EQ(error(completion({{"prompt", "x"}, {"model", "gpt-4"}})), "404 NotFoundError model");
  EXPECT_EQ(error(completion({{"prompt", "x"}, {"suffix", "y"}})),
            "501 not_supported_error suffix");
  EXPECT_EQ(error(chat({{"messages", Json::array()}})), "400 BadRequestError messages");
  const Reply malformed = rig().ask(post_text("/v1/completions", "{\"prompt\":"));
  EXPECT_EQ(malformed.status, 400);
  EXPECT_EQ(malformed.json()["error"]["message"], "the body is not valid JSON, around byte 11");

  std::string words;
  for (int i = 0; i < 2100; ++i) words += " word";
  const Reply over = completion(prompt(words));
  EXPECT_EQ(error(over), "400 BadRequestError prompt");
  EXPECT_THAT(over.json()["error"]["message"].get<std::string>(), HasSubstr("context holds 2048"));
  EXPECT_THAT(over.json()["error"]["message"].get<std::string>(), HasSubstr("2100"));
  const Json longest = completion(prompt(std::string(2'000'000, 'a'))).json()["error"];
  EXPECT_THAT(longest["message"].get<std::string>(), HasSubstr("2000000 bytes of text"));
  EXPECT_THAT(longest["message"].get<std::string>(), HasSubstr("context of 2048 tokens"));
  EXPECT_THAT(rig().post("/tokenize", {{"content", std::string(2'000'000, 'a')}}).body,
              HasSubstr("content holds 2000000 bytes of text"));

  const Reply many = completion(with(prompt("x", 2000), {{"n", 100}, {"logprobs", 4}}));
  EXPECT_EQ(error(many), "400 BadRequestError max_tokens");
  EXPECT_EQ(many.json()["error"]["message"],
            "the whole answer could hold 1000000 tokens and log-probabilities (prompts x n x "
            "max_tokens x (1 + top_logprobs)), and at most 262144 are collected; ask for less, or "
            "stream");
}

TEST_F(ServeTest, KnowsItsPathsMethodsAndTypes) {
  Reply reply = rig().get("/nowhere");
  EXPECT_EQ(reply.status, 404);
  EXPECT_EQ(reply.json()["error"]["message"], "there is nothing at /nowhere");
  reply = rig().get("/v1/completions");
  EXPECT_EQ(reply.status, 405);
  EXPECT_EQ(reply.header("Allow"), "POST");
  reply = rig().ask("DELETE /health HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_EQ(reply.status, 405);
  EXPECT_EQ(reply.header("Allow"), "GET, HEAD");
  reply = rig().ask(
      "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: text/plain\r\n"
      "Content-Length: 2\r\n\r\n{}");
  EXPECT_EQ(reply.status, 415);
  Client client(rig().port());
  client.send("HEAD /health HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_EQ(client.read_reply(false).status, 200);
  EXPECT_EQ(rig().ask("OPTIONS /v1/models HTTP/1.1\r\nHost: x\r\nOrigin: http://a\r\n\r\n").status,
            405);
  EXPECT_EQ(rig().get("/health", "Origin: http://a\r\n").header("Access-Control-Allow-Origin"), "");
}

TEST_F(ServeTest, AnswersTheSmallEndpoints) {
  EXPECT_EQ(rig().get("/health").body, R"({"status":"ok"})");
  EXPECT_EQ(rig().get("/health_generate").body, R"({"status":"ok"})");
  EXPECT_EQ(rig().get("/version").body, R"({"version":"test"})");
  const Json models = rig().get("/v1/models").json();
  EXPECT_EQ(models["object"], "list");
  EXPECT_EQ(models["data"][0]["id"], "statepack-gdn");
  EXPECT_EQ(models["data"][0]["max_model_len"], 2048);
  EXPECT_EQ(rig().get("/v1/models/statepack%2Dgdn").json()["id"], "statepack-gdn");
  EXPECT_EQ(rig().get("/v1/models/other").status, 404);

  const Json tokens = rig().post("/tokenize", {{"content", "Once upon"}}).json();
  EXPECT_EQ(tokens["count"], tokens["tokens"].size());
  EXPECT_EQ(rig().post("/detokenize", {{"tokens", tokens["tokens"]}}).json()["content"],
            "Once upon");
  EXPECT_EQ(rig().post("/detokenize", {{"tokens", {99999}}}).status, 400);
  EXPECT_EQ(rig().post("/tokenize", {{"content", 1}}).json()["error"]["param"], "content");
  const Json pieces =
      rig().post("/tokenize", {{"content", "Once upon"}, {"with_pieces", true}}).json();
  EXPECT_EQ(pieces["tokens"][0]["id"], tokens["tokens"][0]);
  const std::string text = rig().post("/apply-template", user("Hello")).json()["prompt"];
  EXPECT_THAT(text, HasSubstr("Hello"));
  EXPECT_EQ(rig().post("/tokenize", {{"content", text}}).json()["tokens"],
            rig().post("/tokenize", user("Hello")).json()["tokens"]);
}

TEST_F(ServeTest, ShowsStatusMetricsSlotsAndPage) {
  ASSERT_EQ(completion(prompt("Once upon a time")).status, 200);
  ASSERT_TRUE(rig().wait_idle());
  const Reply metrics = rig().get("/metrics");
  EXPECT_THAT(metrics.header("Content-Type"), HasSubstr("text/plain; version=0.0.4"));
  for (const char* line :
       {"statepack:state_pool_slots{model_name=\"statepack-gdn\",state=\"used\"} 0\n",
        "statepack:state_pool_slots{model_name=\"statepack-gdn\",state=\"free\"} 8\n",
        "statepack:num_requests_running{model_name=\"statepack-gdn\"} 0\n",
        "# TYPE statepack:time_to_first_token_seconds histogram\n",
        "statepack:state_nonfinite_total{model_name=\"statepack-gdn\"} 0\n",
        "statepack:state_guard_total{model_name=\"statepack-gdn\"} 0\n",
        "statepack:requests_processing{model_name=\"statepack-gdn\"} 0\n",
        "statepack:requests_deferred{model_name=\"statepack-gdn\"} 0\n",
        "# TYPE statepack:num_preemptions_total counter\n",
        "statepack:num_preemptions_total{model_name=\"statepack-gdn\"} 0\n",
        "# TYPE statepack:gen_throughput gauge\n", "# TYPE statepack:cache_hit_rate gauge\n"}) {
    EXPECT_THAT(metrics.body, HasSubstr(line));
  }
  EXPECT_THAT(metrics.body, HasSubstr("statepack:kernel_served_total{model_name=\"statepack-gdn\","
                                      "impl=\"" +
                                      std::string(simd_target()) + "\"} "));
  const Json status = rig().get("/status").json();
  EXPECT_EQ(status["state"]["scheme"], "int8");
  EXPECT_EQ(status["state"]["slots"], 8);
  EXPECT_GT(status["tokens"]["reply"], 0);
  const Json& cache = status["prefix_cache"];
  EXPECT_EQ(cache["tree"].size(), std::min<std::size_t>(200, cache["nodes"].get<std::size_t>()));
  ASSERT_GT(cache["tree"].size(), 0U);
  EXPECT_EQ(cache["tree"][0]["level"], 0);
  EXPECT_EQ(cache["tree"][0]["tokens"], cache["tree"][0]["own_tokens"]);
  const Json slots = rig().get("/slots").json();
  ASSERT_EQ(slots.size(), 8U);
  EXPECT_EQ(slots[0]["id"], 1);
  EXPECT_EQ(slots[0]["state"], "free");
  const Reply page = rig().get("/");
  EXPECT_EQ(page.status, 200);
  EXPECT_THAT(page.header("Content-Security-Policy"), HasSubstr("default-src 'none'"));
  EXPECT_THAT(page.body, HasSubstr("<title>StatePack</title>"));
  EXPECT_EQ(rig().get("/status.js").header("Content-Type"), "text/javascript; charset=utf-8");
  EXPECT_EQ(rig().get("/status.css").status, 200);
}

// ---------------------------------------------------------------- clients that leave

// What was done for a client after the server had noticed that it left. The engine's thread is held
// meanwhile, so that nothing depends on who is faster.
struct Afterwards {
  std::int64_t decode_steps = 0, prompt_tokens = 0, n_cancelled = 0;
};

template <class Leave>
Afterwards after_leaving(ServerRig& rig, Leave leave) {
  const auto disconnects = [&] {
    const std::string text = rig.get("/metrics").body;
    return text.substr(text.find("\nstatepack:http_disconnects_total"));
  };
  EngineStats noted;
  EXPECT_TRUE(rig.server()
                  .backend()
                  .loop()
                  .call([&] {
                    const std::string before = disconnects();
                    leave();
                    for (int i = 0; i < 2000 && disconnects() == before; ++i) {
                      std::this_thread::sleep_for(std::chrono::milliseconds(5));
                    }
                    noted = rig.stats();
                  })
                  .ok());
  EXPECT_TRUE(rig.wait_idle());
  const EngineStats now = rig.stats();
  return {now.decode_steps - noted.decode_steps, now.prompt_tokens - noted.prompt_tokens,
          now.n_finished(FinishReason::kCancelled) - noted.n_finished(FinishReason::kCancelled)};
}

TEST_F(ServeTest, FreesTheSlotOfAClientThatLeavesAStream) {
  Client client(rig().port());
  client.send(post_text("/v1/completions", with(endless(), {{"stream", true}}).dump()));
  client.read_until("data: ");
  const Afterwards after = after_leaving(rig(), [&] { client.close(); });
  EXPECT_LE(after.decode_steps, 2);
  EXPECT_EQ(after.n_cancelled, 1);
}

TEST_F(ServeTest, FreesTheSlotOfAClientThatEndsItsSendingHalf) {
  Client client(rig().port());
  client.send(post_text("/v1/completions", with(endless(), {{"stream", true}}).dump()));
  client.read_until("data: ");
  const Afterwards after = after_leaving(rig(), [&] { client.end_sending(); });
  EXPECT_LE(after.decode_steps, 2);
  EXPECT_EQ(after.n_cancelled, 1);
  EXPECT_EQ(client.read_until("[DONE]"), "");  // the connection ends, the stream does not
}

TEST_F(ServeTest, FreesTheSlotOfAClientThatLeavesAWholeAnswer) {
  Client client(rig().port());
  client.send(post_text("/v1/completions", endless().dump()));
  ASSERT_TRUE(rig().wait_running(1));
  const Afterwards after = after_leaving(rig(), [&] { client.close(); });
  EXPECT_LE(after.decode_steps, 2);
  EXPECT_EQ(after.n_cancelled, 1);
}

TEST_F(ServeTest, FreesTheSlotOfAClientThatLeavesWhileItsPromptIsRead) {
  std::string words;
  for (int i = 0; i < 1900; ++i) words += " word";
  const std::int64_t replies = rig().stats().reply_tokens;
  Client client(rig().port());
  EngineLoop& loop = rig().server().backend().loop();
  // Behind this task comes a step, which reads a part of the prompt, and then the next task.
  ASSERT_TRUE(
      loop.call([&] {
            client.send(post_text("/v1/completions", with(endless(), {{"prompt", words}}).dump()));
            for (int i = 0; i < 20000 && rig().stats().n_waiting == 0; ++i) {
              std::this_thread::sleep_for(std::chrono::milliseconds(1));
            }
            ASSERT_EQ(rig().stats().n_waiting, 1);
            ASSERT_TRUE(loop.post([&] { EXPECT_EQ(rig().stats().n_prompts, 1); }).ok());
          })
          .ok());
  const Afterwards after = after_leaving(rig(), [&] { client.close(); });
  EXPECT_LE(after.decode_steps, 2);
  EXPECT_EQ(after.n_cancelled, 1);
  EXPECT_LE(rig().stats().reply_tokens - replies, 2);
}

TEST_F(ServeTest, CountsSlotsAndAttentionCacheApart) {
  Client client(rig().port());
  client.send(post_text("/v1/completions", with(endless(), {{"stream", true}}).dump()));
  client.read_until("data: ");
  ASSERT_TRUE(rig().wait_running(1));  // figures are those of the last whole step
  const std::string text = rig().get("/metrics").body;
  const auto value = [&](const std::string& name) {
    const std::size_t at = text.find("\nstatepack:" + name + "{");
    return std::stod(text.substr(text.find("} ", at) + 2));
  };
  EXPECT_DOUBLE_EQ(value("state_usage_perc"), 1.0 / 8);
  EXPECT_GT(value("kv_cache_usage_perc"), 0);
  EXPECT_LT(value("kv_cache_usage_perc"), 1.0 / 8);
  EXPECT_EQ(value("requests_processing"), 1);
}

TEST_F(ServeTest, FreesEverySlotOfManyClientsThatLeave) {
  for (int round = 0; round < 5; ++round) {
    std::vector<Client> clients;
    for (int i = 0; i < 40; ++i) {
      clients.emplace_back(rig().port());
      clients.back().send(
          post_text("/v1/completions", with(endless(), {{"stream", i % 2 == 0}}).dump()));
    }
    // Some reply by now, some read their prompts, most wait.
    std::this_thread::sleep_for(std::chrono::milliseconds(10 * round));
  }
  EXPECT_TRUE(rig().wait_idle());
}

TEST_F(ServeTest, KeepsAPipelinedRequestForLater) {
  Client client(rig().port());
  client.send(post_text("/v1/completions", prompt("Once upon a time").dump()) +
              get_text("/health"));
  EXPECT_EQ(client.read_reply().status, 200);
  EXPECT_EQ(client.read_reply().body, R"({"status":"ok"})");
}

// ---------------------------------------------------------------- servers of their own

TEST(Serve, SaysThatItLoads) {
  ServerRig rig(ServerRig::options(), false);
  const std::string loading =
      R"({"error":{"code":503,"message":"Loading model","type":"unavailable_error"}})";
  for (const char* path : {"/health", "/v1/models", "/metrics", "/slots"}) {
    const Reply reply = rig.get(path);
    EXPECT_EQ(reply.status, 503) << path;
    EXPECT_EQ(reply.body, loading) << path;
    EXPECT_EQ(reply.header("Retry-After"), "1");
  }
  EXPECT_EQ(rig.post("/v1/completions", prompt("x")).body, loading);
  EXPECT_EQ(rig.get("/").status, 200);
  EXPECT_EQ(rig.get("/version").status, 200);
  rig.load();
  EXPECT_EQ(rig.get("/health").body, R"({"status":"ok"})");
}

TEST(Serve, TakesZeroForNoLimitOfARequest) {
  ServerOptions options = ServerRig::options();
  options.request_timeout = std::chrono::milliseconds(0);
  ServerRig rig(options);
  const Reply reply = rig.get("/health_generate");
  EXPECT_EQ(reply.status, 200);
  EXPECT_EQ(reply.body, R"({"status":"ok"})");
}

TEST(Serve, SaysWhatIsTooLargeOrTooSlow) {
  ServerOptions options = ServerRig::options();
  options.limits.max_body_bytes = 100;
  options.limits.max_header_bytes = 1024;
  options.limits.header_timeout = options.limits.body_timeout = std::chrono::milliseconds(300);
  ServerRig rig(options);
  Reply reply = rig.ask(post_text("/v1/completions", std::string(101, 'x')));
  EXPECT_EQ(reply.status, 413);
  EXPECT_EQ(reply.body,
            R"({"error":{"message":"the body of the request is longer than 100 bytes; send less, )"
            R"(or start the server with a larger --max-body-bytes","type":"BadRequestError",)"
            R"("param":null,"code":413}})");
  reply = rig.get("/health", "X: " + std::string(2000, 'a') + "\r\n");
  EXPECT_EQ(reply.status, 431);
  EXPECT_EQ(reply.body,
            R"({"error":{"message":"the head of the request is longer than 1024 bytes","type":)"
            R"("BadRequestError","param":null,"code":431}})");
  reply = rig.ask("GET /health HTTP/1.1\r\nHo");
  EXPECT_EQ(reply.status, 408);
  EXPECT_EQ(reply.body,
            R"({"error":{"message":"the head of the request took longer than 300 ms","type":)"
            R"("BadRequestError","param":null,"code":408}})");
  reply = rig.ask(
      "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
      "Content-Length: 10\r\n\r\n{");
  EXPECT_EQ(reply.status, 408);
  EXPECT_EQ(reply.body,
            R"({"error":{"message":"the body of the request took longer than 300 ms","type":)"
            R"("BadRequestError","param":null,"code":408}})");
}

TEST(Serve, AsksForAKey) {
  ServerOptions options = ServerRig::options();
  options.api_keys = {"secret"};
  ServerRig rig(options, false);
  Reply reply = rig.get("/v1/models");
  EXPECT_EQ(reply.status, 401);
  EXPECT_EQ(reply.header("WWW-Authenticate"), "Bearer");
  EXPECT_EQ(reply.json()["error"]["type"], "authentication_error");
  EXPECT_EQ(rig.get("/v1/models", "Authorization: Bearer secreT\r\n").status, 401);
  EXPECT_EQ(rig.get("/v1/models", "Authorization: Basic secret\r\n").status, 401);
  EXPECT_EQ(rig.get("/version", "Authorization: Bearer secret\r\n").status, 200);
  EXPECT_EQ(rig.get("/version", "X-Api-Key: secret\r\n").status, 200);
  EXPECT_EQ(rig.get("/").status, 200);        // the page holds nothing secret
  EXPECT_EQ(rig.get("/health").status, 503);  // open, though not ready
}

TEST(Serve, LetsTheOriginsInThatItWasToldOf) {
  ServerOptions options = ServerRig::options();
  options.cors_origins = {"http://a"};
  ServerRig rig(options, false);
  const Reply reply =
      rig.ask("OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: x\r\nOrigin: http://a\r\n\r\n");
  EXPECT_EQ(reply.status, 204);
  EXPECT_EQ(reply.header("Access-Control-Allow-Origin"), "http://a");
  EXPECT_EQ(reply.header("Access-Control-Allow-Methods"), "POST");
  EXPECT_EQ(rig.get("/version", "Origin: http://a\r\n").header("Access-Control-Allow-Origin"),
            "http://a");
  EXPECT_EQ(rig.get("/version", "Origin: http://b\r\n").header("Access-Control-Allow-Origin"), "");
}

TEST(Serve, TurnsRequestsAwayWhenTheQueueIsFull) {
  ServerOptions options = ServerRig::options();
  options.backend.pool_slots = 1;
  options.backend.max_queue = 1;
  ServerRig rig(options);
  Client running(rig.port());
  running.send(post_text("/v1/completions", with(endless(), {{"stream", true}}).dump()));
  running.read_until("data: ");
  Client waiting(rig.port());
  waiting.send(post_text("/v1/completions", prompt("x").dump()));
  for (int i = 0; i < 1000 && rig.stats().n_waiting == 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  const Reply reply = rig.post("/v1/completions", prompt("y"));
  EXPECT_EQ(reply.status, 429);
  EXPECT_EQ(reply.header("Retry-After"), "1");
  EXPECT_THAT(reply.json()["error"]["message"].get<std::string>(), HasSubstr("1 requests wait"));
  running.close();
  EXPECT_EQ(waiting.read_reply().status, 200);
}

TEST(Serve, EndsARequestThatTakesTooLong) {
  ServerOptions options = ServerRig::options();
  options.request_timeout = std::chrono::milliseconds(150);
  ServerRig rig(options);
  const Reply reply = rig.post("/v1/completions", endless());
  EXPECT_EQ(reply.status, 504);
  EXPECT_EQ(reply.json()["error"]["type"], "timeout_error");
  // Within a stream the error is a line of it.
  const std::vector<std::string> list =
      events(rig.post("/v1/completions", with(endless(), {{"stream", true}})).body);
  ASSERT_GE(list.size(), 2U);
  EXPECT_EQ(list.back(), "[DONE]");
  EXPECT_EQ(Json::parse(list[list.size() - 2])["error"]["code"], 504);
}

TEST(Serve, SendsPingsAndProgress) {
  ServerOptions options = ServerRig::options();
  options.backend.pool_slots = 1;
  options.ping_interval = std::chrono::milliseconds(60);
  ServerRig rig(options);
  Client first(rig.port());
  first.send(post_text("/v1/completions", with(endless(), {{"stream", true}}).dump()));
  first.read_until("data: ");
  Client second(rig.port());  // has to wait, and hears of it
  std::string words;
  for (int i = 0; i < 1200; ++i) words += " word";
  second.send(post_text("/v1/completions",
                        with(prompt(words), {{"stream", true}, {"return_progress", true}}).dump()));
  EXPECT_NE(second.read_until(": ping\n\n"), "");
  first.close();
  const std::string line = second.read_until("\"time_ms\"");
  EXPECT_THAT(line, HasSubstr("\"prompt_progress\":{\"index\":0,\"total\":"));
}

TEST(Serve, FinishesWhatRunsAndCutsTheRestOff) {
  ServerOptions options = ServerRig::options();
  options.grace = std::chrono::milliseconds(1500);
  ServerRig rig(options);
  Client quick(rig.port());
  quick.send(post_text("/v1/completions", prompt("Once upon a time", 4).dump()));
  Client slow(rig.port());
  slow.send(post_text("/v1/completions",
                      with(endless(), {{"stream", true}, {"max_tokens", 2000}}).dump()));
  slow.read_until("data: ");
  Client kept(rig.port());
  kept.send(get_text("/health"));
  EXPECT_EQ(kept.read_reply().status, 200);
  rig.stop();
  EXPECT_EQ(quick.read_reply().status, 200);
  EXPECT_THAT(slow.read_until("[DONE]"), testing::AnyOf(HasSubstr("the server is shutting down"),
                                                        HasSubstr("\"finish_reason\":\"length\"")));
  EXPECT_TRUE(kept.at_end());
}

TEST(Serve, RefusesSizesThatDoNotFitBeforeItLoads) {
  ServerOptions options = ServerRig::options();
  const auto refusal = [&] { return Server::create(options).status().message(); };
  options.backend.max_seqs = 9;
  EXPECT_THAT(refusal(),
              HasSubstr("--max-num-seqs 9 needs as many state slots, and the pool has 8"));
  EXPECT_THAT(refusal(), HasSubstr("pass --max-num-seqs 8"));
  options = ServerRig::options();
  options.backend.pool_slots = 0;
  options.backend.pool_bytes = 1000;
  EXPECT_THAT(refusal(), HasSubstr("--state-pool-bytes 1000 holds no slot"));
  options.backend.pool_bytes = std::int64_t{64} << 20;
  options.backend.pool_slots = 100'000;
  EXPECT_THAT(refusal(), HasSubstr("does not fit into --state-pool-bytes 67108864"));
  options = ServerRig::options();
  options.backend.max_context = 1 << 20;
  EXPECT_THAT(refusal(), HasSubstr("--max-model-len 1048576 is more than the 8192 tokens"));
  options = ServerRig::options();
  options.backend.kv_bytes = 1 << 20;
  EXPECT_THAT(refusal(), HasSubstr("--kv-cache-bytes 1048576 is less than"));
  options = ServerRig::options();
  options.backend.prefix_cache.max_state_bytes = 1000;
  EXPECT_THAT(refusal(), HasSubstr("--prefix-cache-state-bytes 1000 keeps nothing: a state takes"));
  options.backend.prefix_cache.max_state_bytes = 0;
  options.backend.prefix_cache.max_bytes = 1000;
  EXPECT_THAT(refusal(), HasSubstr("--prefix-cache-bytes 1000 keeps nothing: a state takes"));
  options.backend.prefix_cache.mode = PrefixMode::kOff;
  EXPECT_EQ(refusal(), "");
  options = ServerRig::options();
  options.backend.pool_slots = 1 << 24;
  EXPECT_THAT(refusal(), HasSubstr("slots would"));
  options = ServerRig::options();
  options.backend.model = "/nowhere";
  EXPECT_THAT(refusal(), HasSubstr("/nowhere"));
}

TEST(Serve, SavesAndRestoresWhatASlotHasRead) {
  const TemporaryFolder folder;
  ServerOptions options = ServerRig::options();
  options.slot_save_folder = folder.path();
  Json turn = user("Remember the number 4711.");
  turn.update(Json{{"max_tokens", 16}, {"temperature", 0}});
  std::int64_t n_saved = 0;
  {
    ServerRig rig(options);
    const Json first = rig.post("/v1/chat/completions", turn).json();
    turn["messages"].push_back(first["choices"][0]["message"]);
    turn["messages"].push_back({{"role", "user"}, {"content", "Which number?"}});
    ASSERT_TRUE(rig.wait_idle());
    std::int64_t slot = 0;
    for (const Json& view : rig.get("/slots").json()) {
      if (view["n_last"] > 0) slot = view["id"];
    }
    ASSERT_GT(slot, 0);
    const std::string path = "/slots/" + std::to_string(slot) + "?action=";
    const Reply saved = rig.post(path + "save", {{"filename", "a.slot"}});
    ASSERT_EQ(saved.status, 200) << saved.body;
    n_saved = saved.json()["n_saved"];
    EXPECT_GT(n_saved, 0);
    EXPECT_EQ(saved.json()["n_written"], std::filesystem::file_size(folder / "a.slot"));
    for (const char* name : {"../a", "", ".a", "a/b", "a b"}) {
      EXPECT_EQ(rig.post(path + "save", {{"filename", name}}).json()["error"]["param"], "filename");
    }
    EXPECT_EQ(rig.post("/slots/99?action=save", {{"filename", "a"}}).status, 404);
    EXPECT_EQ(rig.post("/slots/1?action=sing", {{"filename", "a"}}).status, 400);
    EXPECT_EQ(rig.post(path + "erase", Json::object(), "Origin: http://evil\r\n").status, 403);
    EXPECT_EQ(rig.post(path + "erase", Json::object()).status, 200);
  }
  ServerRig rig(options);  // another process, as far as memory goes
  const Reply restored = rig.post("/slots/1?action=restore", {{"filename", "a.slot"}});
  ASSERT_EQ(restored.status, 200) << restored.body;
  EXPECT_EQ(restored.json()["n_restored"], n_saved);
  EXPECT_EQ(rig.post("/slots/1?action=restore", {{"filename", "b.slot"}}).status, 404);
  // The next turn reads only what is new.
  const Json next = rig.post("/v1/chat/completions", turn).json();
  EXPECT_EQ(next["usage"]["prompt_tokens_details"]["cached_tokens"], n_saved);
}

// A chat of two turns, the first answered, and its state in a file of the save folder.
struct SavedChat {
  Json next_turn;
  std::int64_t n_saved = 0;
  std::string path;  // of its slot: "/slots/3?action="
};
SavedChat save_chat(ServerRig& rig, const std::string& filename) {
  SavedChat chat;
  chat.next_turn =
      with(user("Remember the number 4711."), {{"max_tokens", 16}, {"temperature", 0}});
  const Json first = rig.post("/v1/chat/completions", chat.next_turn).json();
  chat.next_turn["messages"].push_back(first["choices"][0]["message"]);
  chat.next_turn["messages"].push_back({{"role", "user"}, {"content", "Which number?"}});
  EXPECT_TRUE(rig.wait_idle());
  for (const Json& view : rig.get("/slots").json()) {
    if (view["n_last"] > 0) chat.path = "/slots/" + view["id"].dump() + "?action=";
  }
  const Reply saved = rig.post(chat.path + "save", {{"filename", filename}});
  EXPECT_EQ(saved.status, 200) << saved.body;
  chat.n_saved = saved.json().value("n_saved", 0);
  return chat;
}

std::string content(const Reply& reply) { return reply.json()["choices"][0]["message"]["content"]; }
int cached_tokens(const Reply& reply) {
  return reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"];
}

TEST(Serve, RefusesADamagedSaveAndGoesOn) {
  const TemporaryFolder folder;
  ServerOptions options = ServerRig::options();
  options.slot_save_folder = folder.path();
  const SavedChat chat = save_chat(*std::make_unique<ServerRig>(options), "a");
  const std::string good = read_text_file(folder / "a", std::size_t{1} << 24).value();
  ServerRig rig(options);  // its prefix cache is empty
  const auto refusal = [&](std::string file) {
    folder.put("b", file);
    const Reply reply = rig.post("/slots/1?action=restore", {{"filename", "b"}});
    EXPECT_EQ(reply.status, 400) << reply.body;
    EXPECT_EQ(reply.json()["error"]["type"], "BadRequestError");
    return reply.json()["error"]["message"].get<std::string>();
  };
  EXPECT_THAT(refusal(""), HasSubstr("does not begin"));
  EXPECT_THAT(refusal(good.substr(0, good.size() / 2)), HasSubstr("'b': "));
  for (const std::size_t at : {std::size_t{20}, good.size() / 3, good.size() - 1}) {
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ 16);
    EXPECT_THAT(refusal(bad), HasSubstr("checksum does not match"));
  }
  // Nothing of them was taken, no folder of the server's was named, and the server serves.
  EXPECT_EQ(rig.post("/slots/1?action=restore", {{"filename", "c"}}).json()["error"]["message"],
            "'c' cannot be opened: No such file or directory");
  const Reply cold = rig.post("/v1/chat/completions", chat.next_turn);
  EXPECT_EQ(cached_tokens(cold), 0);
  folder.put("b", good);
  EXPECT_EQ(rig.post("/slots/1?action=restore", {{"filename", "b"}}).status, 200);
}

TEST(Serve, AFullDiskKeepsTheOldSave) {
  const TemporaryFolder folder;
  ServerOptions options = ServerRig::options();
  options.slot_save_folder = folder.path();
  ServerRig rig(options);
  const SavedChat chat = save_chat(rig, "a");
  const std::string before = read_text_file(folder / "a", std::size_t{1} << 24).value();
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &limit), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{4096, limit.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const Reply refused = rig.post(chat.path + "save", {{"filename", "a"}});
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(refused.status, 500);
  EXPECT_EQ(refused.json()["error"]["type"], "server_error");
  EXPECT_THAT(refused.json()["error"]["message"].get<std::string>(), HasSubstr("File too large"));
  EXPECT_EQ(folder.n_files(), 1);
  EXPECT_EQ(read_text_file(folder / "a", std::size_t{1} << 24).value(), before);
  EXPECT_EQ(rig.post(chat.path + "save", {{"filename", "a"}}).status, 200);
}

TEST(Serve, ReadsAPromptAgainWhoseSavedStateIsNotFinite) {
  const TemporaryFolder folder;
  ServerOptions options = ServerRig::options();
  options.backend.state = "fp32";
  options.slot_save_folder = folder.path();
  const SavedChat chat = save_chat(*std::make_unique<ServerRig>(options), "a");
  const Reply cold =
      std::make_unique<ServerRig>(options)->post("/v1/chat/completions", chat.next_turn);
  ASSERT_EQ(cached_tokens(cold), 0);
  ServerRig rig(options);  // its prefix cache is empty

  const auto forge = [&](auto change) {
    const std::string file = read_text_file(folder / "a", std::size_t{1} << 24).value();
    PrefixFileLimits limits{options.backend.max_context,
                            rig.server().backend().summary().kv_bytes_per_token, 1 << 30};
    PrefixRecord record = read_prefix_file(std::as_bytes(std::span(file)), limits).value();
    const ModelConfig config = ModelConfig::load(options.backend.model).value();
    const SnapshotInfo info = read_snapshot_info(record.snapshots.back()->bytes).value();
    const auto scheme = PlanLibrary::open(options.backend.model, {})
                            .value()
                            .compile(Scheme::parse("fp32").value(), config.recurrent_shapes(),
                                     info.model_fingerprint)
                            .value();
    const auto pool =
        StatePool::create(scheme, {.n_slots = 1, .conv_floats = config.conv_floats()});
    const std::int64_t slot = (*pool)->alloc().value();
    EXPECT_TRUE((*pool)->restore(slot, record.snapshots.back()->bytes).ok());
    change(record, **pool, slot);
    record.snapshots.back() = std::make_shared<const Snapshot>((*pool)->snapshot(slot).value());
    EXPECT_TRUE(write_prefix_file(folder / "b", record).ok());
    return rig.post("/slots/1?action=restore", {{"filename", "b"}});
  };
  const float nan = std::numeric_limits<float>::quiet_NaN();
  // In an attention row: refused.
  const Reply refused = forge([&](PrefixRecord& record, StatePool&, std::int64_t) {
    std::memcpy(record.rows.data() + 3 * record.row_bytes, &nan, sizeof nan);
  });
  EXPECT_EQ(refused.status, 400);
  EXPECT_THAT(refused.json()["error"]["message"].get<std::string>(),
              HasSubstr("the attention row of its token 3 is not finite"));
  // In the state: taken, found out by who would use it, and forgotten.
  const Reply taken = forge([&](PrefixRecord&, StatePool& pool, std::int64_t slot) {
    const LayerState layer = pool.layer(2);
    std::memcpy(layer.pages + slot * layer.page_stride + 400, &nan, sizeof nan);
  });
  EXPECT_EQ(taken.status, 200) << taken.body;
  const Reply again = rig.post("/v1/chat/completions", chat.next_turn);
  ASSERT_EQ(again.status, 200) << again.body;
  EXPECT_EQ(cached_tokens(again), 0);
  EXPECT_EQ(content(again), content(cold));
  EXPECT_EQ(rig.stats().prefix.corrupt, 1);
}

TEST(Serve, AStateThatIsNotFiniteFailsItsRequestAndNoOther) {
  ServerOptions options = ServerRig::options();
  options.backend.prefix_cache.mode = PrefixMode::kOff;
  ServerRig rig(options);
  // With log-probabilities: a text may survive what its numbers do not.
  const Json other = with(prompt("Once upon a time", 40), {{"logprobs", 3}});
  const Json expected = rig.post("/v1/completions", other).json()["choices"];
  ASSERT_EQ(expected[0]["logprobs"]["token_logprobs"].size(), 40U);
  ASSERT_TRUE(rig.wait_idle());  // or its slot could be taken for the victim's
  auto victim = std::async(std::launch::async, [&] {
    return rig.post("/v1/completions", with(endless(), {{"prompt", "The list is"}}));
  });
  ASSERT_TRUE(rig.wait_running(1));
  std::int64_t slot = 0;
  while (slot == 0) {  // until it has replied a token: a prompt's history is still elsewhere
    for (const Json& view : rig.get("/slots").json()) {
      if (view["n_decoded"] > 0) slot = view["id"];
    }
  }
  std::vector<std::future<Reply>> others;
  for (int i = 0; i < 3; ++i) {
    others.push_back(
        std::async(std::launch::async, [&] { return rig.post("/v1/completions", other); }));
  }
  ASSERT_TRUE(rig.wait_running(4));
  // What a broken memory or kernel would do; nothing in the server writes to another's slot.
  auto& pool = const_cast<StatePool&>(rig.server().backend().pool());
  ASSERT_TRUE(rig.server()
                  .backend()
                  .loop()
                  .call([&] { pool.conv(slot)[5] = std::numeric_limits<float>::quiet_NaN(); })
                  .ok());
  const Reply failed = victim.get();
  EXPECT_EQ(failed.status, 500);
  EXPECT_EQ(failed.json()["error"]["type"], "server_error");
  EXPECT_THAT(failed.json()["error"]["message"].get<std::string>(),
              testing::MatchesRegex("the state became non-finite at token [0-9]+ of the sequence; "
                                    "its slot was quarantined and no other request is affected"));
  for (auto& reply : others) EXPECT_EQ(reply.get().json()["choices"], expected);
  EXPECT_THAT(rig.get("/metrics").body,
              HasSubstr("\nstatepack:state_nonfinite_total{model_name=\"statepack-gdn\"} 1\n"));
  ASSERT_TRUE(rig.wait_idle());
  // The slot serves again, zeroed.
  for (int i = 0; i < 8; ++i) {
    EXPECT_EQ(rig.post("/v1/completions", other).json()["choices"], expected);
  }
}

TEST(Serve, ReadsOnlyWhatIsNewInTheNextTurn) {
  ServerRig rig(ServerRig::options());
  Json body = with(user("Compute 12 + 30."), {{"max_tokens", 40}, {"temperature", 0}});
  const Json first = rig.post("/v1/chat/completions", body).json();
  body["messages"].push_back(first["choices"][0]["message"]);
  body["messages"].push_back({{"role", "user"}, {"content", "And 5 more?"}});
  const Json second = rig.post("/v1/chat/completions", body).json();
  EXPECT_GE(second["usage"]["prompt_tokens_details"]["cached_tokens"],
            first["usage"]["prompt_tokens"]);
}

// The tokens in a file of saved slots.
std::vector<std::int32_t> saved_tokens(ServerRig& rig, const std::string& path) {
  const std::string file = read_text_file(path, std::size_t{1} << 28).value();
  const StateSummary& s = rig.server().backend().summary();
  return read_prefix_file(std::as_bytes(std::span(file)),
                          {s.max_context, s.kv_bytes_per_token, std::int64_t{1} << 30})
      .value()
      .tokens;
}

TEST(Serve, CachesEveryTokenThatATurnHasRead) {
  const TemporaryFolder folder;
  ServerOptions options = ServerRig::options();
  options.backend.max_context = 8192;
  options.backend.prefix_cache.block_tokens = 64;
  options.slot_save_folder = folder.path();
  ServerRig rig(options);
  for (const std::int64_t n : {1, 63, 64, 65, 127, 128, 129, 4097}) {
    std::vector<std::int32_t> ids;
    for (std::int64_t i = 0; i < n; ++i) {
      ids.push_back(static_cast<std::int32_t>(10 + (7 * i + 31 * n) % 1000));
    }
    const Json first =
        rig.post("/v1/completions", with(prompt(ids, 5), {{"ignore_eos", true}})).json();
    ASSERT_EQ(first["usage"]["prompt_tokens"], n);
    ASSERT_EQ(first["usage"]["completion_tokens"], 5);
    ASSERT_EQ(first["choices"][0]["finish_reason"], "length");
    ASSERT_EQ(cached_tokens(Reply{200, "", first.dump()}), 0) << n;
    // What the state has read: the last token of such a reply is not among it.
    ASSERT_TRUE(rig.wait_idle());
    for (const Json& view : rig.get("/slots").json()) {
      if (view["n_last"] != n + 4) continue;
      EXPECT_EQ(rig.post("/slots/" + view["id"].dump() + "?action=save", {{"filename", "a"}})
                    .json()["n_saved"],
                n + 4);
    }
    std::vector<std::int32_t> next = saved_tokens(rig, folder / "a");
    ASSERT_EQ(std::ssize(next), n + 4);
    ASSERT_TRUE(std::equal(ids.begin(), ids.end(), next.begin()));
    next.insert(next.end(), {20, 21, 22});
    const Json second = rig.post("/v1/completions", prompt(next, 1)).json();
    EXPECT_EQ(second["usage"]["prompt_tokens"], n + 7);
    EXPECT_EQ(cached_tokens(Reply{200, "", second.dump()}), n + 5 - 1) << n;
    EXPECT_EQ(second["timings"]["prompt_n"], 3);
  }

  // Disk and compression keep nobody waiting: a slot is written, and a file refused, while the
  // engine's thread is held.
  EngineLoop& loop = rig.server().backend().loop();
  std::int64_t slot = 0;
  for (const Json& view : rig.get("/slots").json()) {
    if (view["n_last"] > 4000) slot = view["id"];
  }
  ASSERT_GT(slot, 0);
  Client saver(rig.port());
  std::promise<Reply> saved;
  ASSERT_TRUE(loop.call([&] {
                    saver.send(post_text("/slots/" + std::to_string(slot) + "?action=save",
                                         R"({"filename": "b"})"));
                    // Two answers later the server has seen it, and the engine's part is queued.
                    EXPECT_EQ(rig.get("/health").status, 200);
                    EXPECT_EQ(rig.get("/health").status, 200);
                    ASSERT_TRUE(loop.post([&] { saved.set_value(saver.read_reply()); }).ok());
                  })
                  .ok());
  EXPECT_EQ(saved.get_future().get().status, 200);
  folder.put("c", "no slot at all");
  ASSERT_TRUE(loop.call([&] {
                    EXPECT_EQ(rig.post("/slots/1?action=restore", {{"filename", "c"}}).status, 400);
                  })
                  .ok());
}

TEST(Serve, ASlotThatNeverFitsIsABadRequest) {
  const TemporaryFolder folder;
  ServerOptions options = ServerRig::options();
  options.slot_save_folder = folder.path();
  const SavedChat chat = save_chat(*std::make_unique<ServerRig>(options), "a");
  options.backend.max_context = 16;
  ServerRig rig(options);
  const Reply reply = rig.post("/slots/1?action=restore", {{"filename", "a"}});
  EXPECT_EQ(reply.status, 400);
  EXPECT_EQ(reply.header("Retry-After"), "");
  EXPECT_EQ(reply.json()["error"]["param"], "filename");
  EXPECT_THAT(reply.json()["error"]["message"].get<std::string>(),
              testing::MatchesRegex("'a': the prefix file holds [0-9]+ tokens, and at most 16 fit; "
                                    "raise the context length"));
}

TEST(Serve, ARestartedServerAnswersAsOneThatNeverStopped) {
  const TemporaryFolder slots, prefixes;
  ServerOptions options = ServerRig::options();
  options.slot_save_folder = slots.path();
  options.backend.prefix_folder = prefixes / "cache";
  SavedChat chat;
  Reply expected;
  {
    ServerRig rig(options);
    chat = save_chat(rig, "a");
    // The cache on disk is of now: what comes after it is not in there.
    ASSERT_TRUE(rig.server()
                    .backend()
                    .loop()
                    .call([&] {
                      EXPECT_TRUE(
                          rig.server().backend().engine().save_prefixes(prefixes / "then").ok());
                    })
                    .ok());
    expected = rig.post("/v1/chat/completions", chat.next_turn);
  }
  const auto check = [&](ServerRig& rig) {
    const Reply reply = rig.post("/v1/chat/completions", chat.next_turn);
    EXPECT_EQ(content(reply), content(expected));
    const Json json = reply.json();
    EXPECT_EQ(json["timings"]["prompt_n"],
              json["usage"]["prompt_tokens"].get<std::int64_t>() - chat.n_saved);
    EXPECT_EQ(json["timings"]["prompt_n"], expected.json()["timings"]["prompt_n"]);
    EXPECT_EQ(json["usage"], expected.json()["usage"]);
  };
  options.backend.prefix_folder = prefixes / "then";
  {
    ServerRig rig(options);
    check(rig);
  }
  options.backend.prefix_folder = "";
  ServerRig rig(options);
  ASSERT_EQ(rig.post("/slots/1?action=restore", {{"filename", "a"}}).json()["n_restored"],
            chat.n_saved);
  check(rig);
}

}  // namespace
}  // namespace statepack::serve
