#include "serve/request.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "../base/temporary_folder.hpp"
#include "serve/keys.hpp"
#include "serve/metrics.hpp"

namespace statepack::serve {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

Json parsed(std::string_view text) {
  Json json;
  const auto error = parse_body(text, &json);
  EXPECT_FALSE(error) << error->message;
  return json;
}

std::string parse_error(std::string_view text) {
  Json json;
  const auto error = parse_body(text, &json);
  return error ? error->message : "";
}

GenerationRequest chat(std::string_view text) {
  GenerationRequest request;
  const auto error = read_chat_request(parsed(text), {}, &request);
  EXPECT_FALSE(error) << error->message;
  return request;
}

GenerationRequest completion(std::string_view text) {
  GenerationRequest request;
  const auto error = read_completion_request(parsed(text), {}, &request);
  EXPECT_FALSE(error) << error->message;
  return request;
}

// "status param" of what a chat request with these fields is refused with; "" when it is taken.
std::string chat_refusal(const std::string& fields) {
  GenerationRequest request;
  const auto error = read_chat_request(
      parsed(R"({"messages":[{"role":"user","content":"hi"}],)" + fields + "}"), {}, &request);
  return error ? fmt::format("{} {}", error->status, error->param) : "";
}

std::string completion_refusal(const std::string& fields) {
  GenerationRequest request;
  const auto error = read_completion_request(parsed("{" + fields + "}"), {}, &request);
  return error ? fmt::format("{} {}", error->status, error->param) : "";
}

TEST(ServeBody, IsBoundedAndNamesTheByte) {
  EXPECT_EQ(parse_error("{"), "the body is not valid JSON, around byte 2");
  EXPECT_EQ(parse_error(""), "the body is not valid JSON, around byte 1");
  EXPECT_EQ(parse_error("[1]"), "the body is a list; it must be an object");
  EXPECT_EQ(parse_error("null"), "the body is null; it must be an object");
  EXPECT_EQ(parse_error("{\"a\":1e999}"), "the body holds a number that is out of range");
  EXPECT_EQ(parse_error("{\"a\":\"\xff\"}"),
            "the body is not UTF-8 text: byte 6 (0xff) does not belong there");
  EXPECT_EQ(parse_error("{\"a\":" + std::string(64, '[')),
            "the body is nested deeper than 64 at byte 68");
  EXPECT_EQ(parse_error(std::string(1'000'000, '[')),
            "the body is nested deeper than 64 at byte 64");
  // Brackets in strings do not count.
  EXPECT_EQ(
      parse_error("{\"a\":\"" + std::string(100, '[') + "\\\"" + std::string(100, '{') + "\"}"),
      "");
  std::string wide = "{";
  for (int i = 0; i < 1025; ++i) wide += fmt::format("{}\"k{}\":0", i == 0 ? "" : ",", i);
  EXPECT_THAT(parse_error(wide + "}"), HasSubstr("more than 1024 fields in one object"));
}

TEST(ServeBody, KeepsTheOrderOfFields) {
  EXPECT_EQ(parsed(R"({"z":1,"a":{"y":2,"b":3}})").dump(), R"({"z":1,"a":{"y":2,"b":3}})");
}

TEST(ServeRequest, ReadsEveryFieldOfAChat) {
  const GenerationRequest r = chat(R"({
    "model": "m", "messages": [{"role": "developer", "content": [{"type": "text", "text": "a"},
      {"type": "text", "text": "b"}]}, {"role": "assistant", "content": null, "tool_calls":
      [{"function": {"name": "f", "arguments": "{\"z\": 1, \"a\": 2}"}}]}],
    "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "repetition_penalty": 1.1,
    "presence_penalty": 0.2, "frequency_penalty": -0.3, "seed": -1, "stop": ["x", "yy"], "n": 3,
    "max_tokens": 5, "max_completion_tokens": 7, "ignore_eos": true, "stream": true,
    "stream_options": {"include_usage": true}, "logprobs": true, "top_logprobs": 4,
    "return_progress": true, "tools": [{"type": "function"}], "reasoning_effort": "low",
    "chat_template_kwargs": {"enable_thinking": false}, "user": "ignored", "metadata": {"k": 1}})");
  EXPECT_EQ(r.model, "m");
  EXPECT_FLOAT_EQ(r.params.temperature, 0.5F);
  EXPECT_FLOAT_EQ(r.params.top_p, 0.9F);
  EXPECT_EQ(r.params.top_k, 40);
  EXPECT_FLOAT_EQ(r.params.min_p, 0.1F);
  EXPECT_FLOAT_EQ(r.params.repetition_penalty, 1.1F);
  EXPECT_FLOAT_EQ(r.params.presence_penalty, 0.2F);
  EXPECT_FLOAT_EQ(r.params.frequency_penalty, -0.3F);
  EXPECT_EQ(r.params.seed, ~std::uint64_t{0});
  EXPECT_TRUE(r.has_seed);
  EXPECT_THAT(r.params.stop, ElementsAre("x", "yy"));
  EXPECT_TRUE(r.params.ignore_eos);
  EXPECT_EQ(r.params.logprobs, 4);
  EXPECT_EQ(r.n, 3);
  EXPECT_EQ(r.max_tokens, 7);
  EXPECT_TRUE(r.stream && r.include_usage && r.return_progress);
  ASSERT_TRUE(r.chat.has_value());
  EXPECT_EQ(r.chat->messages.dump(),
            R"([{"role":"system","content":"ab"},{"role":"assistant","content":null,"tool_calls":)"
            R"([{"function":{"name":"f","arguments":{"z":1,"a":2}}}]}])");
  EXPECT_EQ(r.chat->variables.dump(),
            R"({"enable_thinking":false,"tools":[{"type":"function"}],"reasoning_effort":"low"})");
}

TEST(ServeRequest, TakesNullForNothing) {
  const GenerationRequest r = chat(
      R"({"messages":[{"role":"user","content":"hi"}],"temperature":null,"stop":null,"n":null,
          "seed":null,"stream":null,"logprobs":null,"max_tokens":null,"tools":null,
          "logit_bias":null,"response_format":{"type":"text"},"suffix":"","best_of":1})");
  EXPECT_EQ(r.n, 1);
  EXPECT_FALSE(r.has_seed);
  EXPECT_FALSE(r.max_tokens.has_value());
  EXPECT_EQ(r.params.logprobs, -1);
}

TEST(ServeRequest, ReadsPromptsOfAllForms) {
  const auto one = [](std::string_view text) { return completion(text).prompts; };
  using Ids = std::vector<std::int32_t>;
  EXPECT_THAT(one(R"({"prompt":"a"})"), ElementsAre(Prompt("a")));
  EXPECT_THAT(one(R"({"prompt":["a","b"]})"), ElementsAre(Prompt("a"), Prompt("b")));
  EXPECT_THAT(one(R"({"prompt":[1,2]})"), ElementsAre(Prompt(Ids{1, 2})));
  EXPECT_THAT(one(R"({"prompt":[[1],[2,3]]})"), ElementsAre(Prompt(Ids{1}), Prompt(Ids{2, 3})));
  EXPECT_EQ(completion(R"({"prompt":"a"})").max_tokens, 16);
  EXPECT_EQ(completion(R"({"prompt":"a","echo":true,"max_tokens":0})").max_tokens, 0);
  EXPECT_EQ(completion(R"({"prompt":"a","logprobs":0})").params.logprobs, 0);
}

TEST(ServeRequest, NamesTheFieldAtFault) {
  EXPECT_EQ(chat_refusal(R"("temperature":"hot")"), "400 temperature");
  EXPECT_EQ(chat_refusal(R"("temperature":-1)"), "400 temperature");
  EXPECT_EQ(chat_refusal(R"("top_p":0)"), "400 top_p");
  EXPECT_EQ(chat_refusal(R"("top_p":1.5)"), "400 top_p");
  EXPECT_EQ(chat_refusal(R"("top_k":1.5)"), "400 top_k");
  EXPECT_EQ(chat_refusal(R"("top_k":-2)"), "400 top_k");
  EXPECT_EQ(chat_refusal(R"("repetition_penalty":0)"), "400 repetition_penalty");
  EXPECT_EQ(chat_refusal(R"("n":0)"), "400 n");
  EXPECT_EQ(chat_refusal(R"("n":129)"), "400 n");
  EXPECT_EQ(chat_refusal(R"("n":true)"), "400 n");
  EXPECT_EQ(chat_refusal(R"("max_tokens":0)"), "400 max_tokens");
  EXPECT_EQ(chat_refusal(R"("max_completion_tokens":-1)"), "400 max_completion_tokens");
  EXPECT_EQ(chat_refusal(R"("seed":18446744073709551615)"), "400 seed");
  EXPECT_EQ(chat_refusal(R"("stop":5)"), "400 stop");
  EXPECT_EQ(chat_refusal(R"("stop":[""])"), "400 stop");
  EXPECT_EQ(chat_refusal(R"("stop":["a",1])"), "400 stop");
  EXPECT_EQ(chat_refusal(R"("stream":1)"), "400 stream");
  EXPECT_EQ(chat_refusal(R"("stream_options":{})"), "400 stream_options");
  EXPECT_EQ(chat_refusal(R"("stream":true,"stream_options":{"include_usage":1})"),
            "400 stream_options.include_usage");
  EXPECT_EQ(chat_refusal(R"("top_logprobs":2)"), "400 top_logprobs");
  EXPECT_EQ(chat_refusal(R"("logprobs":true,"top_logprobs":21)"), "400 top_logprobs");
  EXPECT_EQ(chat_refusal(R"("model":7)"), "400 model");
  EXPECT_EQ(chat_refusal(R"("tools":{})"), "400 tools");
  EXPECT_EQ(chat_refusal(R"("tools":[1])"), "400 tools");
  EXPECT_EQ(chat_refusal(R"("chat_template_kwargs":[])"), "400 chat_template_kwargs");
  EXPECT_EQ(completion_refusal(""), "400 prompt");
  EXPECT_EQ(completion_refusal(R"("prompt":[])"), "400 prompt");
  EXPECT_EQ(completion_refusal(R"("prompt":7)"), "400 prompt");
  EXPECT_EQ(completion_refusal(R"("prompt":[1,-2])"), "400 prompt");
  EXPECT_EQ(completion_refusal(R"("prompt":[1,2.5])"), "400 prompt");
  EXPECT_EQ(completion_refusal(R"("prompt":[1,99999999999])"), "400 prompt");
  EXPECT_EQ(completion_refusal(R"("prompt":["a",{}])"), "400 prompt[1]");
  EXPECT_EQ(completion_refusal(R"("prompt":["a","b","c","d","e","f","g","h","i"],"n":128)"),
            "400 n");
  EXPECT_EQ(completion_refusal(R"("prompt":"a","max_tokens":0)"), "400 max_tokens");
}

TEST(ServeRequest, NamesTheMessageAtFault) {
  const auto refusal = [](const std::string& messages) {
    GenerationRequest request;
    const auto error = read_chat_request(parsed("{\"messages\":" + messages + "}"), {}, &request);
    return error ? error->param : "";
  };
  EXPECT_EQ(refusal("[]"), "messages");
  EXPECT_EQ(refusal("\"hi\""), "messages");
  EXPECT_EQ(refusal("[1]"), "messages[0]");
  EXPECT_EQ(refusal(R"([{"content":"x"}])"), "messages[0].role");
  EXPECT_EQ(refusal(R"([{"role":"user","content":"x"},{"role":"king","content":"x"}])"),
            "messages[1].role");
  EXPECT_EQ(refusal(R"([{"role":"user"}])"), "messages[0].content");
  EXPECT_EQ(refusal(R"([{"role":"user","content":7}])"), "messages[0].content");
  EXPECT_EQ(refusal(R"([{"role":"user","content":[{"type":"image_url"}]}])"),
            "messages[0].content");
}

TEST(ServeRequest, RefusesWhatItCannotHonour) {
  EXPECT_EQ(chat_refusal(R"("logit_bias":{"5":1})"), "501 logit_bias");
  EXPECT_EQ(chat_refusal(R"("response_format":{"type":"json_object"})"), "501 response_format");
  EXPECT_EQ(chat_refusal(R"("tool_choice":"required")"), "501 tool_choice");
  EXPECT_EQ(chat_refusal(R"("stop_token_ids":[3])"), "501 stop_token_ids");
  EXPECT_EQ(chat_refusal(R"("guided_json":{"a":1})"), "501 guided_json");
  EXPECT_EQ(completion_refusal(R"("prompt":"a","suffix":"b")"), "501 suffix");
  EXPECT_EQ(completion_refusal(R"("prompt":"a","best_of":3)"), "501 best_of");
  EXPECT_EQ(completion_refusal(R"("prompt":"a","echo":true,"logprobs":1)"), "501 echo");
  EXPECT_EQ(chat_refusal(R"("logit_bias":{},"tool_choice":"auto","best_of":1)"), "");
}

TEST(ServeErrors, HaveOpenAIsForm) {
  EXPECT_EQ(dump(bad_request("n", "n is 0").body()),
            R"({"error":{"message":"n is 0","type":"BadRequestError","param":"n","code":400}})");
  EXPECT_EQ(to_api_error({Code::kExhausted, "full"}).status, 429);
  EXPECT_EQ(to_api_error({Code::kInterrupted, "bye"}).status, 503);
  EXPECT_EQ(to_api_error({Code::kNotFinite, "nan"}).status, 500);
  EXPECT_EQ(to_api_error({Code::kUnsupported, "no"}).type, "not_supported_error");
}

TEST(ServeKeys, ComeFromTheFileAndAreComparedWhole) {
  const TemporaryFolder folder;
  const std::string path = folder.path() + "/keys";
  std::ofstream(path) << "# of the office\n\n  first \r\nsecond";
  const auto keys = ApiKeys::load({"third"}, path);
  ASSERT_TRUE(keys.ok()) << keys.status().message();
  for (const char* key : {"first", "second", "third"}) EXPECT_TRUE(keys->accept(key)) << key;
  for (const char* key : {"", "firs", "first ", "FIRST", "# of the office"}) {
    EXPECT_FALSE(keys->accept(key)) << key;
  }
  std::ofstream(path) << "# none\n";
  EXPECT_EQ(ApiKeys::load({}, path).status().message(), path + ": holds no key; write one a line");
  EXPECT_EQ(ApiKeys::load({}, path + "2").status().code(), Code::kNotFound);
  EXPECT_EQ(ApiKeys::load({"a b"}, "").status().code(), Code::kInvalidArgument);
}

TEST(ServeMetrics, AreWrittenAsPrometheusReadsThem) {
  Histogram histogram({1, 2.5});
  for (const double value : {0.5, 1.0, 2.0, 7.0}) histogram.observe(value);
  MetricText text(MetricText::label("model_name", "a\"b\\c\nd"));
  text.head("pool", "gauge", "Slots.");
  text.sample(3, {{"state", "used"}});
  text.histogram("wait", "Seconds.", histogram);
  const std::string label = R"(model_name="a\"b\\c\nd")";
  EXPECT_EQ(text.text(), "# HELP pool Slots.\n# TYPE pool gauge\npool{" + label +
                             ",state=\"used\"} 3\n" +
                             "# HELP wait Seconds.\n# TYPE wait histogram\n" + "wait_bucket{" +
                             label + ",le=\"1\"} 2\n" + "wait_bucket{" + label +
                             ",le=\"2.5\"} 3\n" + "wait_bucket{" + label + ",le=\"+Inf\"} 4\n" +
                             "wait_sum{" + label + "} 10.5\n" + "wait_count{" + label + "} 4\n");
}

}  // namespace
}  // namespace statepack::serve
