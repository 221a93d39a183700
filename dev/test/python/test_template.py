"""The interpreter of chat templates (llmc/text/template.h) against jinja2 as transformers sets it up: the templates of
templates.txt over several talks, random templates of a grammar, and damaged templates. The text, the spans of {% generation %}
and whether there is an error are equal; so are the messages of raise_exception() and of undefined values. text_stub.c runs it."""
import datetime
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import forks
import pytest

chat = pytest.importorskip("transformers.utils.chat_template_utils")
HERE = Path(__file__).resolve().parent
# what the interpreter refuses by name although jinja2 takes it, or what prints a place in memory
REFUSED = re.compile("not known|cannot be printed|be sliced|64 bits|is nested more|takes more than|not valid UTF-8|the tags for, if")


class Noon(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2026, 11, 27, 12, 34, 56)


def user(content, **more):
    return {"role": "user", "content": content, **more}


def answer(content, **more):
    return {"role": "assistant", "content": content, **more}


def system(content):
    return {"role": "system", "content": content}


def call(arguments, name="weather", number="abcdefghi"):
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


TOOLS = [
    {"type": "function", "function": {
        "name": "weather", "description": "Tells the \"weather\" <in> a ☂ city",
        "parameters": {"type": "object", "required": ["city"], "properties": {
            "city": {"type": "string", "description": "its name"}, "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
            "days": {"type": ["integer", "null"]}, "hours": {"type": "array", "items": {"type": "number"}},
            "more": {"type": "object", "additionalProperties": {"type": "boolean"}}}},
        "return": {"type": "string"}}},
    {"type": "function", "function": {"name": "none", "description": "", "parameters": {"type": "object", "properties": {}}}}]
TALKS = [
    {"messages": [user("Hi")], "add_generation_prompt": True},
    {"messages": [system("Be  brief."), user("Hello there."), answer("Good day!"), user("And?"), answer("Well ...")]},
    {"messages": [user("  spaces \n"), answer("\n\n answer\t \n"), user(""), answer(""), user("x")], "add_generation_prompt": True},
    {"messages": [system("Ünï 中文 😀"), user("{{ messages }} {% if %} {# no #} <|im_end|> </s> [INST] <|eot_id|> 'q' \"d\" \\ \u200b\u2028"),
                  answer("<think>\nhm\n</think>\n\n<b>&amp;</b>"), user("\u00a0ok\u3000")], "add_generation_prompt": True},
    {"messages": [system("tools"), user("weather?"), {"role": "assistant", "tool_calls": [
        call({"city": "Köln", "days": 2, "x": 1.5, "y": True, "z": None, "hours": [1, "a", {"b": []}]})]},
        {"role": "tool", "name": "weather", "content": "{\"sky\": 5}", "tool_call_id": "abcdefghi"}, answer("It is blue."),
        user("thanks")], "tools": TOOLS, "add_generation_prompt": True},
    {"messages": [user("one"), answer("two", reasoning_content="why two\n"), user("three", name="Eve"),
                  answer("four", reasoning_content="why four", thinking="th", weight=0)], "enable_thinking": False},
    {"messages": [user([{"type": "text", "text": " part "}, {"type": "image"}, {"type": "text", "text": "two"}]),
                  answer([{"type": "text", "text": "both"}])], "documents": [{"title": "T", "text": "a\nb", "year": 1999}, {"text": "u"}],
     "add_generation_prompt": True, "date_string": "1 Jan 2025"},
    {"messages": [answer("first"), user("/no_think a"), user("b"), {"role": "assistant", "content": "", "tool_calls": [
        call("{\"city\": \"X\"}"), call({"city": "Y"}, "none", "12")]}, {"role": "tool", "content": "1"}, {"role": "weird", "content": "?"}],
     "tools": TOOLS[:1]},
    {"messages": []},
]


def variables(talk):
    return {"tools": None, "documents": None, "add_generation_prompt": False, "bos_token": "<s>", "eos_token": "</s>", **talk}


def templates():
    for part in re.split(r"^=== ", (HERE / "templates.txt").read_text(encoding="utf-8"), flags=re.M)[1:]:
        yield part.split("\n", 1)


class Program:
    """text_stub.c render: one answer a line."""
    def __init__(self):
        self.process = subprocess.Popen([forks.built("text_stub"), "render"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def render(self, template, values):
        self.process.stdin.write(json.dumps({"template": template, "variables": values}) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


@pytest.fixture(scope="module")
def program():
    return Program()


def expected(template, values):
    """What transformers renders: text and spans in bytes, or an error."""
    blocks, spans = [], []  # spans count characters of what was written until then
    try:
        compiled = chat._compile_jinja_template(template)
        with compiled.environment.activate_tracker(blocks, spans):
            for block in compiled.generate(**values):
                blocks.append(block)
        text = "".join(blocks)
        text.encode()
    except Exception as error:  # of whatever kind: a template may do anything
        return {"error": str(error), "kind": type(error).__name__}
    ends = [0]
    for character in text:
        ends.append(ends[-1] + len(character.encode()))
    return {"text": text, "generations": [[ends[at] if at < len(ends) else at for at in span] for span in spans]}


def differs(program, template, values):
    """Says how the interpreter's answer differs from transformers'; None: not at all."""
    ours, theirs = program.render(template, values), expected(template, values)
    if "error" in ours and "error" in theirs:
        told = theirs["kind"] in ("TemplateError", "UndefinedError") and "inline if-expression" not in theirs["error"]
        return (ours, theirs) if told and theirs["error"].split("\n")[0][:90] not in ours["error"] and not REFUSED.search(ours["error"]) else None
    if theirs.get("kind") == "TemplateAssertionError":  # an unknown filter or test: jinja2 asks for all of them before it renders
        return None
    if "error" in ours or "error" in theirs or ours["text"] != theirs["text"]:
        return ours, theirs
    inside = [span for span in theirs["generations"] if span[1] <= len(ours["text"].encode())]
    if [span for span in ours["generations"] if span[1] <= len(ours["text"].encode())] != inside and (ours["text"] + template).isascii():
        return ours, theirs
    return None if len(ours["marks"]) == len(ours["text"].encode()) else (ours, "marks")


@pytest.fixture(autouse=True)
def noon(monkeypatch):
    monkeypatch.setattr(chat, "datetime", Noon)


@pytest.mark.parametrize("name,template", [pytest.param(*pair, id=pair[0]) for pair in templates()])
def test_a_template_of_our_own_renders_as_in_transformers(program, name, template):
    found = [differs(program, template, variables(talk)) for talk in TALKS]
    assert found == [None] * len(TALKS)


def test_data_is_told_from_the_template(program):
    """Letters that only data has are never the template's, and those that only the template has never data."""
    letters = {ord(c): chr(0x4E00 + ord(c)) for c in map(chr, range(0x21, 0x7F))}
    talk = variables({"messages": [{"role": role, "content": text.translate(letters), "name": "甲"} for role, text in
                                   [("system", "be <s>"), ("user", " hi <|im_end|> "), ("assistant", "</think>ok"), ("user", "[INST]")]]})
    seen = 0
    for name, template in templates():
        out = program.render(template, talk)
        if "error" in out:
            continue
        data = "".join("0" * len(c.encode()) if "\u4E00" < c < "\u4F00" else "1" * len(c.encode()) if c in "<|>" else "." * len(c.encode())
                       for c in out["text"])
        wrong = [i for i, (want, mark) in enumerate(zip(data, out["marks"])) if want != "." and want != mark]
        plain = not re.search("tojson|namespace\\(total|\\[nothing|minicpm|glm|1e100", template + name)
        assert not [i for i in wrong if data[i] == "0"], name
        assert not wrong or not plain, (name, out["text"][wrong[0]:][:40])
        seen += plain
    assert seen > 25


# ---------------------------------------------------------------------------------------------------------------------
# random templates

NAMES = ["m", "messages", "tools", "x", "ns.a", "n", "s", "d", "loop.index", "loop.last", "bos_token", "nothing", "l", "f", "m.role",
         "m.content", "m['content']", "messages[0]", "messages[-1].role", "d.a", "d['b']", "tools[0].function", "none", "true", "false", "u"]
CONSTANTS = ["1", "0", "-2", "3.5", "'a'", "'user'", "\"b c\"", "''", "[]", "[1, 'x', none]", "{}", "{'a': 1, 'b': [2]}", "(1, 2)", "' x\\n'", "'é'"]
FILTERS = ["trim", "length", "upper", "lower", "title", "capitalize", "string", "int", "list", "first", "last", "join", "join(', ')",
           "tojson", "tojson(indent=2)", "default('d')", "default(1, true)", "reverse|list", "sort",
           "dictsort", "replace('a', 'b')", "safe", "count"]
LISTS = ["items", "map('upper')", "map(attribute='role')", "map(attribute='a.b', default='z')", "select", "reject('none')", "selectattr('role')",
         "selectattr('role', 'eq', 'user')", "rejectattr('content')", "select('string')", "rejectattr('role', 'in', ['user'])", "map('length')"]
TESTS = ["defined", "undefined", "none", "string", "number", "mapping", "sequence", "iterable", "boolean", "integer", "float", "odd", "even",
         "true", "false", "eq 1", "in [1, 'a']", "divisibleby 2", "callable", "sameas none", "ne 'a'"]
METHODS = ["strip()", "split()", "split('a')", "split(' ', 1)", "upper()", "lower()", "lstrip('a')", "rstrip()", "startswith('a')", "endswith('b')",
           "replace('a', 'x')", "title()", "capitalize()", "get('a')", "get('z', 5)", "items()|list", "keys()|list", "values()|list",
           "join(['p', 'q'])", "append(1)", "role", "a", "items", "nothing"]
VALUES = variables({"messages": [system(" Be é. "), user("Hello a b"), answer("ab</think>\n\nc", tool_calls=[call({"a": 1, "b": [True]})]), user("")],
                    "tools": TOOLS[:1], "n": 7, "f": 2.5, "s": "a Bc a\nd", "d": {"b": 1, "a": "z", "C": [3, 1]}, "l": [3, 1, 2, 1], "u": "straße ΑΣ ǆ"})


def expression(r, depth=0):
    """Makes an expression of Jinja."""
    def e():
        return expression(r, depth + 1)
    if depth > 3 or r.random() < 0.3:
        return r.choice(NAMES if r.random() < 0.7 else CONSTANTS)
    return r.choice([
        lambda: f"{e()} {r.choice(['+', '-', '*', '/', '//', '%', '~', '~', '~', '+'])} {e()}",
        lambda: f"{e()} {r.choice(['==', '!=', '<', '>', '<=', '>=', 'in', 'not in'])} {e()}",
        lambda: f"{e()} {r.choice(['and', 'or'])} {e()}", lambda: f"not {e()}", lambda: f"({e()})", lambda: f"-({e()})",
        lambda: f"{r.choice(['messages', 'l', 'd', 's'])}|{r.choice(LISTS)}|list", lambda: f"{e()} if {e()} else {e()}", lambda: f"({e()} if {e()})",
        lambda: f"{e()}|{r.choice(FILTERS)}", lambda: f"({e()})|{r.choice(FILTERS)}|{r.choice(FILTERS)}",
        lambda: f"{e()} is {r.choice(['', 'not '])}{r.choice(TESTS)}", lambda: f"({e()}).{r.choice(METHODS)}",
        lambda: f"{r.choice(NAMES)}.{r.choice(METHODS)}", lambda: f"({e()})[{e()}]",
        lambda: f"({e()})[{r.choice(['1:', ':-1', '::2', '::-1', '-2:', '1:3', ':'])}]", lambda: f"[{e()}, {e()}]", lambda: f"{{'k': {e()}}}",
        lambda: f"mac({e()})", lambda: f"range({r.randrange(4)})|list", lambda: f"namespace(a={e()})",
    ])()


def block(r, depth=0):
    """Makes text and statements."""
    def b():
        return "".join(block(r, depth + 1) for _ in range(r.randrange(1, 3)))
    left, right = r.choice(["{%", "{%-", "{%", "{%-", "{%+"]), r.choice(["%}", "-%}", "%}"])

    def tag(text):
        return f"{left} {text} {right}"
    if depth > 3 or r.random() < 0.35:
        return r.choice([" a", "\n", "  \n\t", "b\n", "<|x|>", " ", "{# c #}", "{#- c\n -#}\n", "é"])
    return r.choice([
        lambda: f"{r.choice(['{{', '{{-'])} {expression(r)} {r.choice(['}}', '-}}'])}", lambda: f"{{{{ {expression(r)} }}}}",
        lambda: f"{{{{ {expression(r)} }}}}", lambda: tag(f"if {expression(r)}") + b() + r.choice(["", tag("else") + b()]) + tag("endif"),
        lambda: tag(f"if {expression(r)}") + b() + tag(f"elif {expression(r)}") + b() + tag("endif"),
        lambda: tag(f"for m in {r.choice(['messages', 'messages', 'l', 'd', expression(r)])}") + b() + tag("endfor"),
        lambda: tag(f"for k, v in d.items(){r.choice(['', ' if ' + expression(r)])}") + b() + tag("else") + b() + tag("endfor"),
        lambda: tag(f"for x in messages if {expression(r)}") + b() + tag(r.choice(["break", "continue", "set q = 1"])) + tag("endfor"),
        lambda: tag(f"set {r.choice(['x', 'ns.a', 'm', 'x, m', 'q'])} = {expression(r)}"), lambda: tag("set x") + b() + tag("endset"),
        lambda: tag("generation") + b() + tag("endgeneration"), lambda: tag(f"filter {r.choice(['trim', 'upper'])}") + b() + tag("endfilter"),
        lambda: tag("macro mac(x, n=1)") + b() + tag("endmacro"),
    ])()


def random_template(r):
    return "{% set ns = namespace(a=0) %}{% macro mac(x) %}<{{ x }}>{% endmacro %}" + "".join(block(r) for _ in range(r.randrange(1, 6)))


def damage(r, text):
    """Cuts, doubles, swaps or replaces a few pieces of a template."""
    pieces = re.findall(r"\w+|\s+|[{}%#-]+|.", text, re.S)
    for _ in range(r.randrange(1, 4)):
        i, k = r.randrange(len(pieces)), r.randrange(len(pieces))
        pieces[i] = r.choice(["", pieces[i] * 2, pieces[k], pieces[k] + pieces[i], r.choice(NAMES), r.choice(FILTERS), " ", "-", "|", "(", ")", "'"])
    return "".join(pieces)


def examine(program, made, values):
    wrong = []
    for template in made:
        found = differs(program, template, values)
        refused = found and "error" in found[0] and REFUSED.search(found[0]["error"])
        address = found and "text" in found[1] and re.search(r"0x[0-9a-f]{6}", found[1]["text"])
        if found and not refused and not address:
            wrong.append((template, *found))
    assert not wrong, f"{len(wrong)} of {len(made)}: {wrong[:2]}"


SEED = int(os.environ.get("SEED", 1))
COUNT = int(os.environ.get("TEMPLATES", 500))


def test_random_templates_render_as_in_transformers(program):
    r = random.Random(SEED)
    examine(program, [random_template(r) for _ in range(COUNT)], VALUES)


def test_damaged_templates_render_as_in_transformers_or_fail_as_there(program):
    r = random.Random(SEED)
    whole = [text for _, text in templates()]
    for talk in (TALKS[1], TALKS[4]):
        examine(program, [damage(r, r.choice(whole)) for _ in range(COUNT // 2)], variables(talk))


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
