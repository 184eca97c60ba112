#include "model/chat_template.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <nlohmann/json.hpp>

namespace statepack {
namespace {

using nlohmann::ordered_json;
using testing::HasSubstr;

const std::string kSource = SP_SOURCE_DIR;

ordered_json goldens() {
  std::ifstream file(kSource + "/test/data/template_goldens.json");
  return ordered_json::parse(file);
}

Result<std::string> render(const std::string& source, const ordered_json& messages, bool prompt,
                           ordered_json variables, std::int64_t clock = 0) {
  if (variables.is_null()) variables = ordered_json::object();
  variables["clock_unix_s"] = clock;
  auto compiled = ChatTemplate::compile(source);
  if (!compiled.ok()) return compiled.status();
  return (*compiled)->render(messages, prompt, variables);
}

std::string render_ok(const std::string& source, const ordered_json& variables = {}) {
  const Result<std::string> result = render(source, ordered_json::array(), false, variables);
  EXPECT_TRUE(result.ok()) << source << ": " << result.status().message();
  return result.ok() ? *result : "";
}

void expect_golden(const Result<std::string>& got, const ordered_json& golden,
                   const std::string& what) {
  if (golden.contains("error")) {
    EXPECT_FALSE(got.ok()) << what << "\nrendered: " << (got.ok() ? *got : "");
    if (golden.contains("raised") && !got.ok()) {
      EXPECT_EQ(got.status().code(), Code::kInvalidArgument);
      EXPECT_THAT(got.status().message(), HasSubstr(golden["raised"].get<std::string>())) << what;
    }
    return;
  }
  ASSERT_TRUE(got.ok()) << what << ": " << got.status().message();
  EXPECT_EQ(*got, golden["output"].get<std::string>()) << what;
}

TEST(ChatTemplate, RendersWholeTemplatesAsJinja2) {
  const ordered_json g = goldens();
  ASSERT_GT(g["cases"].size(), 100u);
  for (const auto& c : g["cases"]) {
    const std::string name = c["template"];
    const std::string conversation = c["conversation"];
    const auto got = render(g["templates"][name], g["conversations"][conversation], c["prompt"],
                            g["variables"][c["variables"].get<std::size_t>()], g["clock_unix_s"]);
    expect_golden(got, c, name + ", " + conversation + ", " + c["variables"].dump());
  }
}

TEST(ChatTemplate, RendersSnippetsAsJinja2) {
  const ordered_json g = goldens();
  ASSERT_GT(g["snippets"].size(), 100u);
  for (const auto& s : g["snippets"]) {
    const std::string source = s["source"];
    expect_golden(render(source, ordered_json::array(), false, g["snippet_variables"]), s, source);
  }
}

TEST(ChatTemplate, RendersTheDemoCheckpoint) {
  auto loaded = ChatTemplate::load(kSource + "/models/statepack-gdn");
  ASSERT_TRUE(loaded.ok()) << loaded.status().message();
  const nlohmann::json messages = {{{"role", "user"}, {"content", "Hi"}}};
  const auto text = (*loaded)->render(messages, true, nlohmann::json::object());
  ASSERT_TRUE(text.ok()) << text.status().message();
  EXPECT_EQ(*text, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
}

TEST(ChatTemplate, KeepsTheOrderOfKeysOfOrderedJson) {
  auto compiled = ChatTemplate::compile("{{ tools | tojson }}");
  ASSERT_TRUE(compiled.ok());
  const std::string text = R"({"tools": [{"type": "f", "a": {"z": 1, "b": 2.5}}]})";
  const auto none = ordered_json::array();
  EXPECT_EQ(*(*compiled)->render(none, false, ordered_json::parse(text)),
            R"([{"type": "f", "a": {"z": 1, "b": 2.5}}])");
  EXPECT_EQ(*(*compiled)->render(nlohmann::json::array(), false, nlohmann::json::parse(text)),
            R"([{"a": {"b": 2.5, "z": 1}, "type": "f"}])");
}

TEST(ChatTemplate, GivesToolsAndDocumentsAsNoneUnlessTold) {
  EXPECT_EQ(render_ok("{{ tools is none }} {{ documents is none }} {{ other is defined }}"),
            "True True False");
  EXPECT_EQ(render_ok("{{ tools | length }}", {{"tools", {1, 2}}}), "2");
}

TEST(ChatTemplate, NumbersFromJson) {
  EXPECT_EQ(
      render_ok("{{ a }} {{ b }} {{ c }} {{ d | tojson }}",
                {{"a", 9223372036854775807}, {"b", 18446744073709551615u}, {"c", -5}, {"d", 0.1}}),
      "9223372036854775807 1.8446744073709552e+19 -5 0.1");
}

TEST(ChatTemplate, InvalidBytesOfValuesBecomeReplacementCharacters) {
  EXPECT_EQ(render_ok("{{ a }}", {{"a", "x\xff\xc3"}}), "x\xEF\xBF\xBD\xEF\xBF\xBD");
}

TEST(ChatTemplate, StrftimeNowNeedsTheClockOfTheCaller) {
  auto compiled = ChatTemplate::compile("{{ strftime_now('%d %b %Y %H:%M') }}");
  ASSERT_TRUE(compiled.ok());
  const ordered_json none = ordered_json::array();
  EXPECT_EQ(*(*compiled)->render(none, false, {{"clock_unix_s", 1700000000}}), "14 Nov 2023 22:13");
  const auto missing = (*compiled)->render(none, false, ordered_json::object());
  ASSERT_FALSE(missing.ok());
  EXPECT_EQ(missing.status().code(), Code::kInvalidArgument);
  EXPECT_THAT(missing.status().message(), HasSubstr("clock_unix_s"));
}

struct ErrorCase {
  const char* source;
  Code code;
  const char* line;
  const char* part;
};

TEST(ChatTemplate, ErrorsNameLineAndConstruct) {
  const ErrorCase cases[] = {
      {"a\n{% if x %}\nb", Code::kCorrupt, "line 3", "'endif' is missing for the tag of line 2"},
      {"a\n\n{{ 1 + }}", Code::kCorrupt, "line 3", "expected an expression, got '}}'"},
      {"{% for x in y %}{% endif %}", Code::kCorrupt, "line 1", "unexpected tag 'endif'"},
      {"\n{{ x | wordwrap }}", Code::kUnsupported, "line 2", "no filter 'wordwrap'; supported are"},
      {"{{ x is escaped }}", Code::kUnsupported, "line 1", "no test 'escaped'"},
      {"\n\n\n{% include 'x' %}", Code::kUnsupported, "line 4", "'include' is not supported"},
      {"{{ f(*x) }}", Code::kUnsupported, "line 1", "'*' and '**' arguments"},
      {"{% for x in y recursive %}{% endfor %}", Code::kUnsupported, "line 1", "recursive loops"},
      {"{{ 'abc }}", Code::kCorrupt, "line 1", "closing quote"},
      {"{{ 99999999999999999999 }}", Code::kCorrupt, "line 1", "not a number of 64 bits"},
      {"{{ x", Code::kCorrupt, "line 1", "ends inside a tag"},
      {"\xff", Code::kCorrupt, "", "not valid UTF-8"},
      {"x\n{%- if true %}\n{{ none.a.b }}{% endif %}", Code::kInvalidArgument, "line 3",
       "has no attribute 'a'"},
      {"\n{{ messages[0].content }}", Code::kInvalidArgument, "line 2", "has no element 0"},
      {"\n\n{{ 'a' + 1 }}", Code::kInvalidArgument, "line 3", "str + int; '~' joins"},
      {"{{ raise_exception('Stop it.') }}", Code::kInvalidArgument, "line 1", "Stop it."},
      {"{{ [range] }}", Code::kInvalidArgument, "line 1", "cannot be stored in a list"},
      {"{{ namespace(a=namespace()) }}", Code::kInvalidArgument, "line 1", "cannot be stored"},
      {"{{ 9223372036854775807 + 1 }}", Code::kInvalidArgument, "line 1", "64 bits"},
      {"{{ -9223372036854775807 - 2 }}", Code::kInvalidArgument, "line 1", "64 bits"},
      {"{{ 2 ** 64 }}", Code::kInvalidArgument, "line 1", "64 bits"},
      {"{{ (-9223372036854775807 - 1) // -1 }}", Code::kInvalidArgument, "line 1", "64 bits"},
      {"{{ {[1]: 2} }}", Code::kInvalidArgument, "line 1", "key of a dict"},
      {"{{ 'a' | map('nope') | list }}", Code::kInvalidArgument, "line 1", "no filter 'nope'"},
      {"{{ 'a'.format(1) }}", Code::kInvalidArgument, "line 1", "has no attribute 'format'"},
      {"{{ x.append(1) }}", Code::kInvalidArgument, "line 1", "'append' would change a list"},
  };
  for (const ErrorCase& c : cases) {
    const auto got = render(c.source, ordered_json::array(), false, {{"x", {1}}});
    ASSERT_FALSE(got.ok()) << c.source << "\nrendered: " << *got;
    EXPECT_EQ(got.status().code(), c.code) << c.source << ": " << got.status().message();
    EXPECT_THAT(got.status().message(), HasSubstr(c.part)) << c.source;
    EXPECT_THAT(got.status().message(), HasSubstr(c.line)) << c.source;
  }
}

TEST(ChatTemplate, DocumentationListsEveryFilterAndTest) {
  std::ifstream file(kSource + "/docs/templates.md");
  std::stringstream docs;
  docs << file.rdbuf();
  for (const char* source : {"{{ x | nope }}", "{{ x is nope }}"}) {
    std::string names = ChatTemplate::compile(source).status().message();
    names.erase(0, names.find("supported are ") + 14);
    std::erase(names, ',');
    EXPECT_THAT(docs.str(), HasSubstr("`" + names + "`"));
  }
}

TEST(ChatTemplate, BoundsWorkMemoryAndDepth) {
  const std::string nest_lists = "{% set ns = namespace(x=[1]) %}{% for i in range(40) %}";
  const std::string many = "{% for i in range(99999) %}";
  const std::vector<std::string> sources = {
      many + many + "{% endfor %}{% endfor %}",
      "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% "
      "endfor %}",
      "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% "
      "endfor %}",
      "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% "
      "endfor %}",
      "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s.replace('', "
      "ns.s) %}{% endfor %}",
      "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s | join(ns.s) "
      "%}{% endfor %}",
      // A list that holds itself twice, again and again: its text has 2^40 items.
      nest_lists + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
      nest_lists + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x | tojson }}",
      nest_lists +
          "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{% set y = ns.x[:] %}{{ y == ns.x + [] }}"
          "{{ [ns.x] == [[ns.x[0], ns.x[1][:]]] }}",
      "{% set ns = namespace(x=[]) %}{% for i in range(999) %}{% set ns.x = [ns.x] %}{% endfor %}",
      "{% set ns = namespace(x={}) %}{% for i in range(999) %}{% set ns.x = {'a': ns.x} %}{% "
      "endfor %}",
      "{{ 'ab' * 99999999999 }}",
      "{{ [1] * 99999999999 }}",
      "{{ '' * 9223372036854775807 }}{{ [] * 9223372036854775807 }}" + many + many +
          "{% endfor %}{% endfor %}",
      "{{ range(9223372036854775807) }}",
      "{{ [[1]] | tojson(indent=999999) }}",
      "{{ 'a\nb' | indent(9999999) }}",
      "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
      "{% macro m() %}{% call m() %}{% endcall %}{% endmacro %}{{ m() }}",
      std::string(100000, '(') + "{{ " + std::string(100000, '(') + " }}",
      "{{ " + std::string(100000, '-') + "1 }}",
      "{{ " + std::string(100000, '[') + std::string(100000, ']') + " }}",
      [] {
        std::string s = "{{ 1";
        for (int i = 0; i < 100000; ++i) s += " + 1";
        return s + " }}";
      }(),
      [] {
        std::string s = "{{ x";
        for (int i = 0; i < 100000; ++i) s += ".a";
        return s + " }}";
      }(),
      [] {
        std::string s = "{{ x";
        for (int i = 0; i < 100000; ++i) s += " | list";
        return s + " }}";
      }(),
      [] {
        std::string s;
        for (int i = 0; i < 50000; ++i) s += "{% if 1 %}";
        return s;
      }(),
      [] {
        std::string s = "{{ ";
        for (int i = 0; i < 50000; ++i) s += "not ";
        return s + "1 }}";
      }(),
  };
  for (const std::string& source : sources) {
    const std::clock_t start = std::clock();
    const auto got = render(source, ordered_json::array(), false, {});
    EXPECT_FALSE(got.ok()) << source.substr(0, 120);
    EXPECT_LT(std::clock() - start, 20 * CLOCKS_PER_SEC) << source.substr(0, 120);
  }
}

TEST(ChatTemplate, RefusesVariablesNestedTooDeeply) {
  ordered_json deep = 1;
  for (int i = 0; i < 300; ++i) deep = ordered_json::array({std::move(deep)});
  const auto got = render("x", deep, false, {});
  ASSERT_FALSE(got.ok());
  EXPECT_THAT(got.status().message(), HasSubstr("nested too deeply"));
  EXPECT_FALSE(render("x", ordered_json::array(), false, {{"a", deep}}).ok());
}

TEST(ChatTemplate, LongConversationsStayWithinTheBounds) {
  const ordered_json g = goldens();
  ordered_json messages = ordered_json::array();
  for (int i = 0; i < 2000; ++i) {
    messages.push_back({{"role", "user"}, {"content", "question " + std::to_string(i)}});
    messages.push_back({{"role", "assistant"}, {"content", "<think>\na\n</think>\n\nb"}});
  }
  messages.push_back({{"role", "user"}, {"content", std::string(8 << 20, 'x')}});
  for (const char* name : {"thinking_tools", "role_markers", "effort", "demo"}) {
    const auto got = render(g["templates"][name], messages, true, {});
    EXPECT_TRUE(got.ok()) << name << ": " << got.status().message();
  }
}

TEST(ChatTemplate, RendersFromManyThreads) {
  auto compiled = ChatTemplate::compile(
      "{% macro m(x) %}<{{ x }}>{% endmacro %}{% for i in range(200) %}{{ m(i + base) }}{% endfor "
      "%}");
  ASSERT_TRUE(compiled.ok());
  std::atomic<int> n_wrong = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::string want;
      for (int i = 0; i < 200; ++i) want.append("<").append(std::to_string(i + t)).append(">");
      for (int n = 0; n < 20; ++n) {
        const auto got = (*compiled)->render(ordered_json::array(), false, {{"base", t}});
        if (!got.ok() || *got != want) ++n_wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(n_wrong, 0);
}

class ChatTemplateFiles : public testing::Test {
 protected:
  void SetUp() override {
    dir_ = testing::TempDir() + "/chat_template_" +
           testing::UnitTest::GetInstance()->current_test_info()->name();
    std::filesystem::create_directories(dir_);
  }
  void TearDown() override { std::filesystem::remove_all(dir_); }
  void write(const std::string& name, const std::string& text) const {
    std::ofstream(dir_ + "/" + name) << text;
  }
  std::string load_error() const {
    const auto loaded = ChatTemplate::load(dir_);
    EXPECT_FALSE(loaded.ok());
    return loaded.ok() ? "" : loaded.status().message();
  }
  std::string load_and_render() const {
    const auto loaded = ChatTemplate::load(dir_);
    if (!loaded.ok()) return loaded.status().message();
    const auto text = (*loaded)->render(ordered_json::array(), false, ordered_json::object());
    return text.ok() ? *text : text.status().message();
  }
  std::string dir_;
};

TEST_F(ChatTemplateFiles, PrefersTheTemplateFileAndTakesSpecialTokens) {
  write("tokenizer_config.json",
        R"({"chat_template": "config", "bos_token": "<s>", "eos_token": {"content": "</s>"}})");
  EXPECT_EQ(load_and_render(), "config");
  write("chat_template.jinja", "{{ bos_token }}file{{ eos_token }}{{ pad_token is defined }}");
  EXPECT_EQ(load_and_render(), "<s>file</s>False");
}

TEST_F(ChatTemplateFiles, TakesTheDefaultOfNamedTemplates) {
  write(
      "tokenizer_config.json",
      R"({"chat_template": [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]})");
  EXPECT_EQ(load_and_render(), "d");
}

TEST_F(ChatTemplateFiles, ErrorsNameTheFile) {
  EXPECT_THAT(load_error(), HasSubstr("has no chat template"));
  write("tokenizer_config.json", "{");
  EXPECT_THAT(load_error(), HasSubstr("tokenizer_config.json: not valid JSON"));
  write("tokenizer_config.json", "[]");
  EXPECT_THAT(load_error(), HasSubstr("not a JSON object"));
  write("tokenizer_config.json", R"({"chat_template": 5})");
  EXPECT_THAT(load_error(), HasSubstr("'chat_template' is neither"));
  write("tokenizer_config.json", R"({"chat_template": [{"name": "rag"}, 7]})");
  EXPECT_THAT(load_error(), HasSubstr("'chat_template' is neither"));
  write("tokenizer_config.json", R"({"chat_template": "{% if %}"})");
  EXPECT_THAT(load_error(), HasSubstr("tokenizer_config.json: chat template, line 1"));
  write("chat_template.jinja", "{{");
  EXPECT_THAT(load_error(), HasSubstr("chat_template.jinja: chat template, line 1"));
  write("tokenizer_config.json", std::string(100000, '['));
  EXPECT_THAT(load_error(), HasSubstr("nested deeper"));
}

}  // namespace
}  // namespace statepack
