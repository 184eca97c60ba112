#!/usr/bin/env python3
"""Makes test/data/template_goldens.json: what Python's jinja2 renders, for test_chat_template.cc.

The environment is the one that `transformers` gives chat templates: an immutable sandbox, trim_blocks
and lstrip_blocks, loop controls, its own tojson, raise_exception and strftime_now. A case whose
rendering raises has "error": true; only that it fails is compared, and the text of raise_exception.
"""
import datetime
import json
import pathlib

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

ROOT = pathlib.Path(__file__).resolve().parents[2]
CLOCK = 1_700_000_000


class RaisedByTemplate(jinja2.exceptions.TemplateError):
    pass


class Generation(Extension):
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def environment():
    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                          sort_keys=sort_keys)

    def raise_exception(message):
        raise RaisedByTemplate(message)

    def strftime_now(form):
        return datetime.datetime.fromtimestamp(CLOCK, datetime.timezone.utc).strftime(form)

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                        extensions=[Generation, loopcontrols])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = strftime_now
    return env


WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "Weather of a city.\nToday only.",
    "parameters": {"type": "object", "properties": {
        "city": {"type": "string", "description": "Näme of the \"city\" <b>&'x'"},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "array", "items": {"type": "integer"}},
        "where": {"type": "object", "properties": {"lat": {"type": "number"}, "lon": {"type": ["number", "null"]}}}},
        "required": ["city"]}}}
CLOCK_TOOL = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def call(name, arguments, id="c0"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


CONVERSATIONS = {
    "one user": [user("  Hello, 世界! \n")],
    "system and user": [{"role": "system", "content": "  Be brief.\n"}, user("Hi")],
    "developer": [{"role": "developer", "content": "Be brief."}, user("Hi")],
    "earlier thoughts are dropped": [
        user("1+1?"), assistant("<think>\nadd\n</think>\n\n2"), user("2+2?"),
        assistant("4", reasoning_content="double"), user("3+3?")],
    "thoughts after the last query are kept": [
        user("Weather?"),
        assistant("Let me look.", reasoning_content=" need the tool ",
                  tool_calls=[call("get_weather", {"city": "Zürich", "days": [1, 2], "hot": True, "n": None,
                                                   "x": 1.5, "where": {"lat": 47.4, "lon": -1e-7}}),
                              call("clock", {}, "c1")]),
        {"role": "tool", "tool_call_id": "c0", "name": "get_weather", "content": "rain"},
        {"role": "tool", "tool_call_id": "c1", "content": "12:00"},
        assistant("<think>so</think>It rains.")],
    "tool result is the last": [
        user("a"), assistant("", tool_calls=[call("clock", {})]),
        {"role": "tool", "tool_call_id": "c0", "content": "noon"}],
    "arguments as text": [user("a"), assistant(None, tool_calls=[call("clock", "{\"a\": 1}")])],
    "a result from a user is no query": [
        user("q"), assistant("<think>t</think>a"), user("<tool_response>\nr\n</tool_response>"), assistant("b")],
    "parts": [user([{"type": "text", "text": "look "}, {"type": "image", "image": "x.png"},
                    {"type": "text", "text": " here"}])],
    "unknown part": [user([{"type": "noise"}])],
    "system not first": [user("a"), {"role": "system", "content": "b"}],
    "no user": [{"role": "system", "content": "b"}],
    "empty": [],
    "bad role": [user("a"), {"role": "robot", "content": "b"}],
    "content is a number": [{"role": "user", "content": 5}],
    "names": [{"role": "user", "name": "Ann", "content": "a"}, assistant("b"), user("c")],
    "hostile text": [user("{{ 7 * 7 }}{% raw %}<|im_end|>\u0000\u2028\ud7ff\U0001f600")],
    "comment": [user("a"), {"role": "comment", "content": "b"}, assistant("c")],
}

VARIABLES = [
    {},
    {"tools": [WEATHER, CLOCK_TOOL], "enable_thinking": False, "reasoning_effort": "high", "strict": True},
]

# Expressions and statements by themselves: (template, variables).
SNIPPETS = [
    # printing
    "{{ 1 }} {{ 1.0 }} {{ 1e16 }} {{ 1e15 }} {{ 0.1 }} {{ 1e-5 }} {{ 123456789.125 }} {{ -0.0 }} {{ 1e300*1e10 }}",
    "{{ true }} {{ False }} {{ none }} {{ None }} {{ nothing }}|{{ 'a' }}",
    "{{ [1, 'a', none, true, 1.5, [2], (3,), {'k': 'v', 2: [1]}] }}",
    "{{ ['it\\'s', 'say \"x\"', 'both \\' \"', 'tab\\t nl\\n \\\\ \\x00 \\u200b \\u00e9 \\U0001f600 \\x7f \\xa0'] }}",
    "{{ () }} {{ (1,) }} {{ (1, 2) }} {{ 1, 2 }} {{ [] }} {{ {} }}",
    "{{ 'a' 'b' \"c\" }} {{ 'a\\\nb' }} {{ '\\q \\101 \\x41' }}",
    "{{ [nothing] }} {{ {'a': nothing} }}",
    # arithmetic
    "{{ 7 // 2 }} {{ -7 // 2 }} {{ 7 % 3 }} {{ -7 % 3 }} {{ 7 % -3 }} {{ 7 / 2 }} {{ 2 ** 10 }} {{ 2 ** -1 }} {{ -2 ** 2 }}",
    "{{ 7.5 // 2 }} {{ -7.5 % 2 }} {{ 7.5 % -2 }} {{ 1 + 2 * 3 - 4 }} {{ (1 + 2) * 3 }} {{ 2 ** 3 ** 2 }}",
    "{{ 'ab' * 3 }} {{ 3 * 'ab' }} {{ [1] * 2 }} {{ [1] + [2] }} {{ 'a' + 'b' }} {{ (1,) + (2,) }} {{ true + 1 }}",
    "{{ 1 ~ 'a' ~ none ~ 1.5 ~ [1] }} {{ -1 }} {{ +1 }} {{ - -1 }} {{ 1 - -1 }} {{ -x|abs }}",
    "{{ 9223372036854775807 }} {{ -9223372036854775807 }} {{ 1_000 }} {{ 0x1f }} {{ 0b11 }} {{ 0o17 }} {{ 1.5e3 }}",
    "{{ 'a' + 1 }}", "{{ 1 + none }}", "{{ 1 / 0 }}", "{{ 1 % 0 }}", "{{ [1] + (2,) }}", "{{ nothing + 1 }}", "{{ 'a' - 'b' }}",
    # comparison and logic
    "{{ 1 == 1.0 }} {{ 1 == true }} {{ '1' == 1 }} {{ [1] == [1.0] }} {{ (1,) == [1] }} {{ {'a': 1} == {'a': 1.0} }}",
    "{{ 1 < 2 < 3 }} {{ 1 < 3 < 2 }} {{ 'a' < 'b' }} {{ 'Z' < 'a' }} {{ [1, 2] < [1, 3] }} {{ 1 != 2 }} {{ 2 >= 2 }}",
    "{{ 'a' in 'abc' }} {{ 'a' not in 'abc' }} {{ 1 in [1] }} {{ 'k' in {'k': 1} }} {{ 1 in nothing }} {{ not 'a' in 'b' }}",
    "{{ 1 < 'a' }}", "{{ none < 1 }}", "{{ 1 in 'abc' }}", "{{ 1 in 5 }}", "{{ nothing < 1 }}",
    "{{ 0 or 'x' }} {{ 1 and 'y' }} {{ '' or none }} {{ not 1 }} {{ not not 1 }} {{ 1 and 0 or 2 }}",
    "{{ 'a' if true }} {{ 'a' if false }} {{ 'a' if false else 'b' }} {{ 'a' if 0 else 'b' if 0 else 'c' }}",
    "{{ nothing == nothing2 }} {{ nothing == none }} {{ nothing is defined }} {{ nothing == '' }}",
    # tests
    "{{ 1 is number }} {{ true is number }} {{ true is boolean }} {{ 1 is boolean }} {{ 1 is integer }} {{ true is integer }} {{ 1.0 is float }}",
    "{{ 'a' is string }} {{ {} is mapping }} {{ [] is sequence }} {{ {} is sequence }} {{ 'a' is sequence }} {{ 1 is iterable }} {{ 'a' is iterable }} {{ nothing is iterable }} {{ nothing is sequence }}",
    "{{ none is none }} {{ 0 is none }} {{ x is defined }} {{ x is undefined }} {{ x is not none }} {{ true is true }} {{ 1 is true }} {{ false is false }}",
    "{{ 4 is even }} {{ 3 is odd }} {{ 6 is divisibleby 3 }} {{ 6 is divisibleby(4) }} {{ 1 is eq 1 }} {{ 1 is in [1, 2] }} {{ 1 is sameas true }} {{ 'a' is lower }} {{ 'A' is upper }} {{ '1' is upper }}",
    "{{ range is callable }} {{ 1 is callable }} {{ 2 is gt 1 }} {{ 2 is lt 1 }} {{ 2 is ge 2 }} {{ 2 is le 1 }} {{ 2 is ne 1 }}",
    "{{ 1 is string or true }} {{ 'a' if x is defined else 'b' }} {{ x is not string and true }}",
    # access
    "{{ d.a }} {{ d['a'] }} {{ d.missing }} {{ d['missing'] }} {{ d.get('a') }} {{ d.get('z') }} {{ d.get('z', 9) }} {{ d['items'] }}",
    "{{ l[0] }} {{ l[-1] }} {{ l[9] }} {{ l.0 }} {{ 'abc'[1] }} {{ 'äöü'[-1] }} {{ l[true] }}",
    "{{ l[1:] }} {{ l[:-1] }} {{ l[::-1] }} {{ l[::2] }} {{ l[3:1:-1] }} {{ l[-100:100] }} {{ 'äöüß'[1:3] }} {{ 'abc'[::-1] }} {{ (1,2,3)[1:] }} {{ l[5:] }} {{ l[none:2] }}",
    "{{ d.b.c }}", "{{ nothing.a }}", "{{ d.missing.a }}", "{{ nothing['a'] }}", "{{ l['a'] }}", "{{ l[::0] }}", "{{ d[1:2] }}", "{{ nothing() }}", "{{ 'a'() }}",
    "{{ d.items() | list }} {{ d.keys() | list }} {{ d.values() | list }} {{ {'items': 1}.items() | list }}",
    "{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %} {% for k in d %}{{ k }}{% endfor %}",
    # string methods
    "{{ '  a b '.strip() }}|{{ '  a '.lstrip() }}|{{ ' a  '.rstrip() }}|{{ 'xxaxx'.strip('x') }}|{{ 'abcba'.lstrip('ab') }}|{{ '\\u2003a\\x85'.strip() }}",
    "{{ 'a,b,,c'.split(',') }} {{ ' a  b '.split() }} {{ 'a b c'.split(' ', 1) }} {{ 'a b c'.rsplit(' ', 1) }} {{ ''.split(',') }} {{ ''.split() }} {{ ' a b '.split(none, 1) }} {{ 'aXbX'.split('X', maxsplit=1) }}",
    "{{ 'a\\nb\\r\\nc\\n'.splitlines() }} {{ 'a\\nb'.splitlines(true) }} {{ 'a-b-c'.partition('-') }} {{ 'a-b-c'.rpartition('-') }} {{ 'abc'.partition('-') }}",
    "{{ 'abc'.startswith('a') }} {{ 'abc'.startswith(('x', 'ab')) }} {{ 'abc'.endswith('bc') }} {{ 'abc'.removeprefix('a') }} {{ 'abc'.removesuffix('c') }}",
    "{{ 'aXbX'.replace('X', 'y') }} {{ 'aXbX'.replace('X', 'y', 1) }} {{ 'ab'.replace('', '-') }} {{ 'abc'.find('c') }} {{ 'abc'.find('z') }} {{ 'äbäb'.rfind('b') }} {{ 'aaa'.count('a') }} {{ '-'.join(['a', 'b']) }}",
    "{{ 'hello wORLD it\\'s'.title() }} {{ 'hELLO'.capitalize() }} {{ 'äé'.upper() }} {{ 'ÄÉ'.lower() }} {{ 'abc'.isalpha() }} {{ '12'.isdigit() }} {{ 'a1'.isalnum() }} {{ ' '.isspace() }} {{ 'AB'.isupper() }}",
    "{{ 'a'.nope() }}", "{{ 'a'.split('') }}", "{{ 'a'.strip(1) }}", "{{ l.append(1) }}", "{{ d.update({}) }}", "{{ 'a'.strip('a', 'b') }}",
    "{{ [1, 2, 1].count(1) }} {{ [1, 2].index(2) }}",
    # filters
    "{{ '  x ' | trim }}|{{ 'xax' | trim('x') }}|{{ 5 | trim }}|{{ [1, 2] | length }} {{ 'äö' | length }} {{ d | length }} {{ nothing | length }} {{ l | count }}",
    "{{ [1, 'a', none] | join(', ') }} {{ ['a', 'b'] | join }} {{ [{'n': 1}, {'n': 2}] | join('-', attribute='n') }} {{ 'abc' | join('.') }}",
    "{{ 'aBc' | upper }} {{ 'aBc' | lower }} {{ 'aBc dEf' | title }} {{ 'foo-bar (baz' | title }} {{ 'aBC' | capitalize }} {{ 'a.a' | replace('a', 'b') }} {{ 'aaa' | replace('a', 'b', 2) }} {{ 5 | replace('5', '6') }}",
    "{{ nothing | default('x') }} {{ '' | default('x') }}| {{ '' | default('x', true) }} {{ none | default('x') }} {{ none | d('x', boolean=true) }} {{ nothing | default }}",
    "{{ l | first }} {{ l | last }} {{ 'abc' | first }} {{ [] | first }}| {{ d | first }} {{ l | list }} {{ 'ab' | list }} {{ d | list }} {{ d | items | list }}",
    "{{ '12' | int }} {{ '12.7' | int }} {{ 'x' | int }} {{ 'x' | int(5) }} {{ 3.9 | int }} {{ -3.9 | int }} {{ '0x1f' | int(base=16) }} {{ ' 7 ' | int }} {{ true | int }} {{ none | int(3) }} {{ '1_0' | int }}",
    "{{ '1.5' | float }} {{ 'x' | float }} {{ 2 | float }} {{ 'x' | float(1.5) }} {{ '1e3' | float }} {{ 5 | string ~ 'a' }} {{ none | string }} {{ 'a<b' | safe }}",
    "{{ 2.5 | round }} {{ 3.5 | round }} {{ 2.675 | round(2) }} {{ 2.1 | round(0, 'ceil') }} {{ 2.9 | round(method='floor') }} {{ 5 | round }} {{ -3 | abs }} {{ 1.5 | abs }}",
    "{{ l | map('string') | list }} {{ ms | map(attribute='role') | list }} {{ ms | map(attribute='x', default='-') | list }} {{ ms | map(attribute='meta.n') | list }} {{ ['a', 'b'] | map('upper') | join }} {{ ['aa'] | map('replace', 'a', 'b') | list }}",
    "{{ ms | selectattr('role', 'equalto', 'user') | list | length }} {{ ms | selectattr('meta') | list | length }} {{ ms | rejectattr('role', 'eq', 'user') | map(attribute='role') | list }} {{ ms | selectattr('meta', 'defined') | list | length }} {{ ms | selectattr('role', 'in', ['user', 'tool']) | list | length }}",
    "{{ [0, 1, 2, none] | select | list }} {{ [1, 2, 3] | select('odd') | list }} {{ [1, 2, 3] | reject('odd') | list }} {{ [1, 5] | select('gt', 2) | list }}",
    "{{ [3, 1, 2] | sort }} {{ ['b', 'A', 'c'] | sort }} {{ ['b', 'A', 'c'] | sort(case_sensitive=true) }} {{ [3, 1] | sort(reverse=true) }} {{ ms | sort(attribute='role') | map(attribute='role') | list }} {{ l | reverse | list }} {{ 'äb' | reverse }}",
    "{{ [1, 2, 1] | unique | list }} {{ ['a', 'A', 'b'] | unique | list }} {{ [1, 5, 2] | max }} {{ ['b', 'A'] | min }} {{ [1, 2.5] | sum }} {{ ms | sum(attribute='meta.n', start=10) }} {{ {'b': 1, 'A': 2} | dictsort }} {{ {'b': 1, 'a': 2} | dictsort(by='value') }}",
    "{{ 'a\\nb\\n\\nc' | indent }}|{{ 'a\\nb' | indent(2, true) }}|{{ 'a\\n\\nb\\n' | indent(2, blank=true) }}|{{ 'a\\nb' | indent('> ') }}",
    "{{ d | tojson }} {{ l | tojson }} {{ 'é\"\\\\\\n\\x01\\x7f</b>\\u2028' | tojson }} {{ none | tojson }} {{ true | tojson }} {{ 1.0 | tojson }} {{ 1e20 | tojson }} {{ (1, 2) | tojson }} {{ {1: 2, none: 3, true: 4} | tojson }}",
    "{{ d | tojson(indent=2) }} {{ [] | tojson(indent=2) }} {{ {'a': []} | tojson(indent=4) }} {{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }} {{ 'é😀\\x7f' | tojson(ensure_ascii=true) }} {{ d | tojson(separators=(',', ':')) }} {{ [1, [2]] | tojson(indent='\\t') }} {{ [1] | tojson(indent=0) }}",
    "{{ nothing | tojson }}", "{{ d | first | nope }}", "{{ 5 | length }}", "{{ 5 | list }}", "{{ [1, 'a'] | sort }}", "{{ none | join }}", "{{ 5 | items | list }}", "{{ 'a' | abs }}", "{{ l | map | list }}",
    "{{ (1 if x else 2) | string | length }} {{ 'a' ~ 'b' | upper }} {{ -5 | abs }} {{ 'a b'.split() | map('upper') | join('-') }}",
    # statements
    "{% for i in [1, 2, 3] %}{{ loop.index }}/{{ loop.length }}:{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }};{% endfor %}",
    "{% for i in l if i != 20 %}{{ loop.previtem }}<{{ i }}>{{ loop.nextitem }} {{ loop.length }};{% else %}none{% endfor %}",
    "{% for i in [] %}x{% else %}empty{% endfor %} {% for i in nothing %}x{% else %}undef{% endfor %} {% for c in 'äb' %}{{ c }}.{% endfor %}",
    "{% for i in range(10) %}{% if i == 3 %}{% continue %}{% endif %}{% if i == 6 %}{% break %}{% endif %}{{ i }}{% endfor %}",
    "{% for i in range(2) %}{% for j in range(2, 6, 2) %}{{ i }}{{ j }}{{ loop.index }} {% endfor %}{{ loop.index }}{% endfor %} {{ range(5, 0, -2) | list }}",
    "{% for (a, b), c in [((1, 2), 3)] %}{{ a }}{{ b }}{{ c }}{% endfor %} {% set a, b = 1, 2 %}{{ a }}{{ b }} {% for i in 1, 2 %}{{ i }}{% endfor %}",
    "{% for i in l %}{{ loop.cycle('a', 'b') }}{% endfor %} {{ loop is defined }}",
    "{% set x = 1 %}{% for i in [1, 2] %}{{ x }}{% set x = x + 1 %}{{ x }} {% endfor %}{{ x }}{% if true %}{% set x = 9 %}{% endif %}{{ x }}",
    "{% set ns = namespace(n=0, l=[]) %}{% for i in [1, 2] %}{% set ns.n = ns.n + i %}{% set ns.l = ns.l + [i] %}{% endfor %}{{ ns.n }} {{ ns.l }} {{ ns.nope }} {% set ns2 = namespace({'a': 1}, b=2) %}{{ ns2.a }}{{ ns2['b'] }}",
    "{% set x %}a {{ 1 }} b{% endset %}[{{ x }}] {% set y | upper | trim %} abc {% endset %}[{{ y }}] {% filter upper %}abc {{ x }}{% endfilter %}",
    "{% macro m(a, b=2, c='x') %}{{ a }}-{{ b }}-{{ c }}{% endmacro %}{{ m(1) }} {{ m(1, 3) }} {{ m(1, c='y') }} {{ m() }} {{ m(b=1, a=2) }} {{ m('q') | upper }}",
    "{% macro m(a) %}{{ varargs }} {{ kwargs }}{% endmacro %}{{ m(1, 2, 3, k='v') }}",
    "{% macro outer() %}{{ g }}{{ caller('z') }}{% endmacro %}{% set g = 5 %}{% call(p) outer() %}<{{ p }}>{% endcall %} {% macro fact(n) %}{{ 1 if n <= 1 else n * (fact(n - 1) | int) }}{% endmacro %}{{ fact(5) }}",
    "{% macro m(a, b=a) %}{{ a }}{{ b }}{% endmacro %}{{ m(1) }} {% for i in [1, 2] %}{% macro in_loop() %}{{ i }}{% endmacro %}{{ in_loop() }}{% endfor %}",
    "{% with a = 1, b = 2 %}{{ a }}{{ b }}{% set c = 3 %}{% endwith %}{{ a }}{{ c }} {% if 0 %}a{% elif 1 %}b{% else %}c{% endif %} {% if nothing %}{% else %}e{% endif %}",
    "{% generation %}abc{% set q = 1 %}{{ q }}{% endgeneration %}{{ q }} {{ dict(a=1, b=2) }} {{ dict([('a', 1)]) }} {{ dict({'z': 1}, y=2) }}",
    "{{ raise_exception('Stop: ' ~ 5) }}", "{% if false %}{{ raise_exception('no') }}{% endif %}fine",
    "{% set x.y = 1 %}", "{% set nothing.y = 1 %}", "{% for a, b in [1] %}{% endfor %}", "{% for a, b in [(1, 2, 3)] %}{% endfor %}", "{% for i in 5 %}{% endfor %}", "{% for i in none %}{% endfor %}",
    "{% macro m(a) %}{% endmacro %}{{ m(1, 2) }}", "{% macro m(a) %}{% endmacro %}{{ m(z=1) }}", "{{ range(1000000) | list }}", "{{ 'a' | replace('a') }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    # white space
    "a\n  {% if true %}\n  b\n  {% endif %}\nc\n", "a {%- if true %} b {%- endif %} c", "a\n{{- ' x ' -}}\n b", "  {{ 1 }}\n  {# c #}\n  d {# e #}\nf",
    "a\n  {%+ if true %}b{% endif +%}\nc", "{% if true -%}\n\n  x\n{%- endif %}\n\ny\n\n", "{#- c -#}  a\n{#+ d #}\nb", "\n\n{% set x = 1 %}\n{% set y = 2 %}\n{{ x }}\n\n{{ y }}\n",
    "a\r\nb\rc\n{% if 1 %}\r\nd{% endif %}", "{% raw %}{{ x }} {% if %}{% endraw %}\nz", "{%- raw -%}  {{ y }}  {%- endraw -%}  z", "a  {% raw %}\n b {% endraw %}", "x{% if true %}\n\ny{% endif %}",
    "\t{% if true %}\t{% endif %}\t\nz", "{{ '\n' }}{% if true %}\n{% endif %}\n", "a{#\n multi\n line #}\nb", "{{ '{% not a tag %}' }} {{ '}}' }} {{ {'a': {'b': 1}}['a']['b'] }}", "{ { } } {a} %} #} }}", "{% if true: %}x{% endif %}",
    "{%if true%}a{%endif%}{{1}}{{-2-}}3", "  {%- if true -%}  a  {%- endif -%}  ", "line{% if true %}   \n  x{% endif %}   \n",
    # syntax errors
    "{{ 1 +", "{{ }}", "{% if %}{% endif %}", "{% if true %}", "{% endif %}", "{% for x %}{% endfor %}", "{{ (1 }}", "{{ [1, }}", "{{ 'abc }}", "{# x", "{% nope %}", "{{ a b }}", "{{ 1 | }}", "{{ x is }}", "{{ a. }}", "{% set 1 = 2 %}", "{% macro %}{% endmacro %}", "{% raw %}x", "{{ 1 $ 2 }}", "{{ '\\x4' }}", "{{ f(a=1, 2) }}", "{% break %}", "{% macro m(a=1, b) %}{% endmacro %}", "{{ x is string is none }}", "{{ ) }}", "{% else %}", "{% if 1 %}{% endfor %}",
]
SNIPPET_VARIABLES = {
    "x": 3, "d": {"a": 1, "z": "é", "items": [1]}, "l": [10, 20, 30, 40],
    "ms": [{"role": "user", "meta": {"n": 1}}, {"role": "assistant", "meta": {"n": 2}}, {"role": "tool", "meta": {"n": 3}}],
}
SNIPPET_VARIABLES["d"]["b"] = {"c": [1, {"e": None}]}


def render(source, messages, add_generation_prompt, variables):
    try:
        template = environment().from_string(source)
        return {"output": template.render(messages=messages, add_generation_prompt=add_generation_prompt,
                                          **{"tools": None, "documents": None, **variables})}
    except RaisedByTemplate as e:
        return {"error": True, "raised": str(e)}
    except (jinja2.exceptions.TemplateError, TypeError, ValueError, ZeroDivisionError, OverflowError, RecursionError,
            AttributeError, SyntaxError):
        return {"error": True}


def main():
    templates = {p.stem: p.read_text() for p in sorted((ROOT / "test/data/templates").glob("*.jinja"))}
    demo = json.loads((ROOT / "models/statepack-gdn/tokenizer_config.json").read_text())
    templates["demo"] = demo["chat_template"]
    cases = []
    for name, source in templates.items():
        for conversation in CONVERSATIONS:
            for v, variables in enumerate(VARIABLES):
                result = render(source, CONVERSATIONS[conversation], v == 0, variables)
                cases.append({"template": name, "conversation": conversation, "variables": v, "prompt": v == 0,
                              **result})
    snippets = [{"source": s, **render(s, [], False, SNIPPET_VARIABLES)} for s in SNIPPETS]
    out = {"clock_unix_s": CLOCK, "templates": templates, "conversations": CONVERSATIONS,
           "variables": VARIABLES, "cases": cases, "snippet_variables": SNIPPET_VARIABLES, "snippets": snippets}
    target = ROOT / "test/data/template_goldens.json"
    target.write_text(json.dumps(out, indent=0) + "\n")
    n_errors = sum("error" in c for c in cases + snippets)
    print(f"{len(cases)} cases, {len(snippets)} snippets, {n_errors} of them errors, {target.stat().st_size} bytes")


if __name__ == "__main__":
    main()
