#include "eval/html.hpp"

#include <fmt/format.h>

#include "eval/figures.hpp"
#include "eval/plot.hpp"
#include "eval/report_tables.hpp"

namespace statepack {
namespace {

constexpr std::string_view kStyle =
    "body{font:14px/1.45 sans-serif;color:#111;background:#fff;margin:2em auto;max-width:1100px;"
    "padding:0 1em}"
    "h1{font-size:1.5em}h2{font-size:1.25em;border-bottom:1px solid #999}h3{font-size:1.05em}"
    ".wide{overflow-x:auto}"
    "table{border-collapse:collapse;font-size:12px;font-variant-numeric:tabular-nums;"
    "white-space:nowrap;margin:.5em 0}"
    "th,td{padding:2px 8px;text-align:right;border-bottom:1px solid #ddd}"
    "th:first-child{text-align:left;font-weight:normal}thead th{border-bottom:1px solid #444;"
    "font-weight:bold}"
    ".figures{display:flex;flex-wrap:wrap;gap:12px}svg{max-width:100%;height:auto}"
    "@media print{body{margin:0;max-width:none}.wide{overflow:visible}table{font-size:7px}"
    "svg,tr{break-inside:avoid}h2,h3{break-after:avoid}}";

std::string table_section(const std::string& heading, const std::string& note, const Table& table) {
  return fmt::format("<h3>{}</h3>\n{}<div class=\"wide\">{}</div>\n", escape_html(heading),
                     note.empty() ? "" : "<p>" + escape_html(note) + "</p>\n", table.html());
}

}  // namespace

std::string html_report(std::span<const Json> documents, const std::string& command) {
  std::string out = fmt::format(
      "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">"
      "<meta name=\"viewport\" content=\"width=device-width\">"
      "<title>Accuracy</title><style>{}</style></head><body>\n<h1>Accuracy</h1>\n"
      "<p>Made by <code>{}</code>.</p>\n<ul>\n",
      kStyle, escape_html(command));
  for (const std::string& sentence : legend()) out += "<li>" + escape_html(sentence) + "</li>\n";
  out += "</ul>\n";
  for (const Json& document : documents) {
    out += fmt::format("<h2>{}</h2>\n<p>Model fingerprint <code>{:.16}</code>.</p>\n",
                       escape_html(document.value("model_name", "")),
                       escape_html(document.value("model_fingerprint", "")));
    out += table_section("All schemes", "", overview(document));
    for (const Figure& figure : figures(document)) {
      out += fmt::format("<h3>{}</h3>\n<p>{}</p>\n<div class=\"figures\">\n",
                         escape_html(figure.heading), escape_html(figure.note));
      for (const std::string& picture : figure.svgs) out += picture + "\n";
      out += "</div>\n";
    }
    for (const std::string& task : pieces_with(document, "exact_match,none")) {
      out += table_section("Task " + task, "", task_table(document, task));
    }
    for (const std::string& text : pieces_with(document, "kl,none")) {
      const ForcedShape shape = forced_shape(document, text);
      out += table_section("Text " + text,
                           fmt::format("{} windows of {} tokens, each from a zero state.",
                                       shape.n_windows, shape.context),
                           forced_table(document, text));
    }
  }
  return out + "</body></html>\n";
}

}  // namespace statepack
