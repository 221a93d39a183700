"""./tokenize --chat: ids against transformers' apply_chat_template with the templates of Llama 3.0, 3.1 and 3.2; masks against
its return_assistant_tokens_mask with copies of the templates that mark the answers. Also refusals, --val-fraction and --show.
Faults planted into a copy of the sources must show. TEST_DATA: a folder with Llama 3's own tokenizer (default: none)."""
import functools
import gzip
import hashlib
import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
TOKENIZE = os.path.join(ROOT, "tokenize")
TRAINER = os.environ.get("TRAINER", os.path.join(ROOT, "train_llama3"))
DATA = os.environ.get("TEST_DATA", "")
CC = os.environ.get("CC") or shutil.which("cc") or "gcc"
sys.path[:0] = [os.path.join(ROOT, "dev", "test", "python"), os.path.join(ROOT, "dev", "data")]
import conversations as maker  # noqa: E402
import forks  # noqa: E402

CONVERSATIONS_SHA256 = "98819fedfa60cede571ee554f99616609745ed71a0223a34ecd302c733faca1d"
pytestmark = pytest.mark.skipif(not os.path.exists(TOKENIZE), reason="./tokenize has not been built")
SPECIALS = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]

# The templates after their published descriptions, reduced to the parts that a conversation of texts reaches; {header} {text}
# as below
LLAMA30 = """{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = {header} %}\
{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{text}{% endfor %}\
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""
LLAMA31 = """{{- bos_token }}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{date}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- "Cutting Knowledge Date: December 2023\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- {header} }}{text}
    {%- else %}
        {{- raise_exception("This model only supports single tool-calls at once!") }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
DATES = {"3.1": """{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}""",
         "3.2": """{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- endif %}"""}
HEADER = "'<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'"
TEXT = "message['content'] | trim + '<|eot_id|>'"
MARKED = ("{%- if message['role'] == 'assistant' %}{% generation %}{{- " + TEXT + " }}{% endgeneration %}"
          "{%- else %}{{- " + TEXT + " }}{%- endif %}")


def template(version, marked=False):
    text = LLAMA30 if version == "3.0" else LLAMA31.replace("{date}", DATES[version])
    return text.replace("{header}", HEADER if marked else HEADER + " + " + TEXT).replace("{text}", MARKED if marked else "")


# ---------------------------------------------------------------------------------------------------------------------
# folders, files, references

@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers")


@functools.lru_cache(maxsize=None)
def tokenizer_json(kind):
    from test_tokenizer import KINDS, train
    if kind != "own":
        return train(KINDS[kind](), False, SPECIALS).to_str()
    with gzip.open(os.path.join(DATA, "llama3", "tokenizer.json.gz"), "rt", encoding="utf-8") as f:
        return f.read()


def make_folder(folder, version, kind="llama3"):
    """A folder with a tokenizer and a version's template. `kind` "own": Llama 3's own tokenizer."""
    folder.mkdir()
    (folder / "tokenizer.json").write_text(tokenizer_json(kind), encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIALS[0], "eos_token": SPECIALS[1]}
    if version:
        config["chat_template"] = template(version)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write_lines(path, lines):
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def tokenize(folder, *flags, program=TOKENIZE):
    return subprocess.run([program, "--tokenizer", str(folder), *map(str, flags)], capture_output=True, text=True)


def read_documents(path):
    """The documents of a token file with a mask: a list of ids and a list of bits each."""
    data = path.read_bytes()
    magic, version, count = struct.unpack_from("<3i", data)
    assert (magic, version) in ((20240520, 2), (20240801, 8))
    width, letter = (2, "H") if version == 2 else (4, "I")
    ids = struct.unpack_from(f"<{count}{letter}", data, 1024)
    bits = data[1024 + width * count:]
    assert len(bits) == (count + 7) // 8
    mask = [bits[i // 8] >> i % 8 & 1 for i in range(8 * len(bits))]
    assert not any(mask[count:])
    documents = []
    for i in range(count):
        if ids[i] == ids[0]:
            documents.append(([], []))
        documents[-1][0].append(ids[i])
        documents[-1][1].append(mask[i])
    return documents


def encode(folder, conversations, *flags, program=TOKENIZE):
    """Returns the documents that ./tokenize --chat makes of conversations."""
    lines = write_lines(folder / "lines.jsonl", [{"messages": messages} for messages in conversations])
    done = tokenize(folder, "--chat", "-o", folder / "out.bin", lines, *flags, program=program)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return read_documents(folder / "out.bin")


def expected(fast, version, conversations, **date):
    documents = []
    for messages in conversations:
        ids = fast.apply_chat_template(messages, chat_template=template(version), return_dict=False, **date)
        marked = fast.apply_chat_template(messages, chat_template=template(version, True), return_dict=True,
                                          return_assistant_tokens_mask=True, **date)
        assert ids == marked["input_ids"], "the marked template writes another text"
        documents.append((ids, marked["assistant_masks"]))
    return documents


PIECES = ["a", "The cat", " sat", "\n", "\n\n", "\r\n", " ", "\t", "\u00e9", "e\u0301", "\u00a0", "\u3000", "\x1f", "\x0b",
          "\u200b", "\x85", "\ufeff", "3.5", "1234567", "!?", "it's", "\U0001f600", "\U0001f468\u200d\U0001f469", "\u2028",
          "\x00", "\u65e5\u672c", "...", "\\", '"', "<|", "|>", "\u0939\u093f", "\ufffd", "[[", "{{ x }}"]


def random_conversations(seed, count):
    rng = random.Random(seed)

    def text():
        return "".join(rng.choice(PIECES) for _ in range(rng.choice([0, 1, 2, 5, 20])))
    conversations = []
    for _ in range(count):
        turns = [{"role": rng.choice(["user", "assistant", "user", "assistant", "system"]), "content": text()}
                 for _ in range(rng.randrange(6))]
        turns.insert(rng.randrange(len(turns) + 1), {"role": "assistant", "content": text()})
        system = [{"role": "system", "content": text()}] if rng.random() < 0.4 else []
        conversations.append(system + turns)
    return conversations


# ---------------------------------------------------------------------------------------------------------------------
# ids and masks

@pytest.mark.parametrize("version", ["3.0", "3.1", "3.2"])
@pytest.mark.parametrize("kind", ["llama3", "gpt2", "own"])
def test_ids_and_masks_are_those_of_transformers(transformers, tmp_path, kind, version):
    if kind == "own" and not os.path.exists(os.path.join(DATA, "llama3", "tokenizer.json.gz")):
        pytest.skip("TEST_DATA has no llama3/tokenizer.json.gz")
    folder = make_folder(tmp_path / "t", version, kind)
    fast = transformers.AutoTokenizer.from_pretrained(str(folder))
    conversations = random_conversations(5, 300)
    before = expected(fast, version, conversations[:20])
    assert encode(folder, conversations[:20]) in (before, expected(fast, version, conversations[:20])), "it may be midnight"
    if version != "3.2":
        assert encode(folder, conversations) == expected(fast, version, conversations)
    if version != "3.0":
        dated = expected(fast, version, conversations, date_string="1 May 2030")
        assert encode(folder, conversations, "--date", "1 May 2030") == dated


def test_a_conversation_is_written_out(tmp_path):
    """An oracle besides the templates: the text of the published format, token by token."""
    tok = pytest.importorskip("tokenizers").Tokenizer.from_file(str(make_folder(tmp_path / "a", "3.1") / "tokenizer.json"))
    parts = [("<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
              "Today Date: 26 Jul 2024\n\nBe kind.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
              "<|start_header_id|>assistant<|end_header_id|>\n\n", 0), ("Hello.<|eot_id|>", 1),
             ("<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n", 0),
             ("<|eot_id|>", 1)]
    ids, mask = [], []
    for text, trained in parts:
        ids += tok.encode(text, add_special_tokens=False).ids
        mask += [trained] * (len(ids) - len(mask))
    talk = [{"role": "system", "content": "Be kind.\n"}, {"role": "user", "content": " Hi"},
            {"role": "assistant", "content": "Hello. "}, {"role": "user", "content": "Bye"},
            {"role": "assistant", "content": " \n "}]
    assert encode(tmp_path / "a", [talk]) == [(ids, mask)]
    assert encode(make_folder(tmp_path / "b", None), [talk[1:3]]) == encode(make_folder(tmp_path / "c", "3.0"), [talk[1:3]])


def test_names_of_special_tokens_stay_text(tmp_path):
    folder = make_folder(tmp_path / "t", "3.0")
    tok = pytest.importorskip("tokenizers").Tokenizer.from_file(str(folder / "tokenizer.json"))
    rng = random.Random(2)
    conversations = [[{"role": role, "content": "".join(rng.choice(SPECIALS + ["a", " b", "\n"]) for _ in range(6)).strip()}
                      for role in ("user", "assistant", "user", "assistant")] for _ in range(50)]
    special = {name: tok.token_to_id(name) for name in SPECIALS}

    def plain(text):
        tok.encode_special_tokens = True  # their names are text
        return tok.encode(text, add_special_tokens=False).ids
    want = []
    for messages in conversations:
        ids, mask = [special[SPECIALS[0]]], [0]
        for message in messages:
            header = [special[SPECIALS[2]], *plain(message["role"]), special[SPECIALS[3]]]
            text = plain("\n\n" + message["content"])
            newlines = len(plain("\n\n."[:2] + "x")) - len(plain("x"))
            ids += header + text + [special[SPECIALS[4]]]
            mask += [0] * (len(header) + newlines) + [int(message["role"] == "assistant")] * (len(text) - newlines + 1)
        want.append((ids, mask))
    assert encode(folder, conversations) == want


def test_all_spellings_are_one_conversation(tmp_path):
    """As trl, axolotl, LLaMA-Factory, ms-swift and nanochat write them (huggingface/trl#2083, #4147), and mixtures."""
    folder = make_folder(tmp_path / "t", "3.1")
    user, answer = {"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "Hello."}
    human, gpt = {"from": "human", "value": "Hi there"}, {"from": "gpt", "value": "Hello."}
    want = encode(folder, [[user, answer]])
    same = [{"conversations": [human, gpt], "id": "x"}, {"conversations": [user, answer], "tools": []},
            {"conversations": [human, gpt], "tools": "[]"}, {"prompt": "Hi there", "completion": "Hello.", "label": True},
            {"messages": [human, gpt]}, {"conversation": [{"role": "human", "value": "Hi there"}, answer]}, [user, answer],
            {"turns": [user, dict(answer, weight=1, train=None, masked=False)]}, {"chat": [user, {"from": "model", "value": "Hello."}]},
            {"prompt": "Hi there", "completion": "Hello."}, {"prompt": [user], "completion": [answer]},
            {"prompt": [user], "completion": "Hello."}, {"prompt": "Hi there", "response": "Hello."},
            {"question": "Hi there", "answer": "Hello.", "system_prompt": ""}, {"query": "Hi there", "response": "Hello."},
            {"instruction": "Hi there", "input": "", "output": "Hello."}, {"input": "Hi there", "output": "Hello."},
            {"messages": [user, answer], "prompt": "no"}, {"messages": [user, answer], "conversations": None},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]},
                          {"role": "assistant", "content": [{"type": "text", "text": "Hello."}], "tool_calls": None}],
             "tools": None}]
    lines = write_lines(tmp_path / "same.jsonl", ["", *same, "  "])
    done = tokenize(folder, "--chat", "-o", tmp_path / "same.bin", lines)
    assert done.returncode == 0 and done.stdout.startswith(f"{len(same)} conversations, "), done.stderr
    for document, line in zip(read_documents(tmp_path / "same.bin"), same):
        assert document == want[0], line
    alone = write_lines(tmp_path / "alone.jsonl", [[user, answer], [user, answer]])
    done = tokenize(folder, "--chat", "-o", tmp_path / "alone.bin", alone)
    assert done.returncode == 0 and read_documents(tmp_path / "alone.bin") == want * 2, done.stderr
    with open(lines) as stdin:
        done = subprocess.run([TOKENIZE, "--tokenizer", folder, "--chat", "-o", tmp_path / "pipe.bin", "-"], stdin=stdin)
    assert done.returncode == 0 and (tmp_path / "pipe.bin").read_bytes() == (tmp_path / "same.bin").read_bytes()


def test_other_members_of_a_conversation_become_messages(tmp_path):
    folder = make_folder(tmp_path / "t", "3.1")
    system, user, answer = ({"role": r, "content": c} for r, c in (("system", "Be kind."), ("user", "Add.\n1 2"), ("assistant", "3")))
    want, = encode(folder, [[system, user, answer]])
    first, = encode(folder, [[user, dict(answer, weight=0), user, answer]])
    lines = [{"system": "Be kind.", "messages": [user, answer]}, {"system_prompt": "Be kind.", "question": "Add.\n1 2", "answer": "3"},
             {"instruction": "Add.", "input": "1 2", "output": "3", "system": "Be kind."},
             {"instruction": "Add.", "context": "1 2", "response": "3", "category": "qa", "system": "Be kind."},  # databricks-dolly-15k's
             {"prompt": [system, user], "completion": [answer]}]
    tokenize(folder, "--chat", "-o", tmp_path / "a.bin", write_lines(tmp_path / "a.jsonl", lines))
    assert read_documents(tmp_path / "a.bin") == [want] * 5
    lines = [{"prompt": [user, answer, user], "completion": [answer]}]  # the answer of the prompt is not trained
    tokenize(folder, "--chat", "-o", tmp_path / "b.bin", write_lines(tmp_path / "b.jsonl", lines))
    assert read_documents(tmp_path / "b.bin") == [first]


# The members that data sets have for it: OpenAI and mistral-finetune, allenai/open-instruct#283, axolotl, verl-project/verl#5472,
# ms-swift, torchtune
@pytest.mark.parametrize("member,value", [("weight", 0), ("train", False), ("training", False), ("trainable", False),
                                          ("loss", False), ("loss", 0), ("loss_mask", 0), ("masked", True), ("trained", False)])
def test_an_answer_that_a_member_takes_out_is_not_trained(tmp_path, member, value):
    folder = make_folder(tmp_path / "t", "3.0")
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 2
    (ids, mask), = encode(folder, [talk])
    (same, less), = encode(folder, [[dict(m, **{member: value}) if i == 1 else m for i, m in enumerate(talk)]])
    first = mask.index(1)
    assert ids == same and less == [bit if i > first + 1 else 0 for i, bit in enumerate(mask)]
    assert sum(less) == sum(mask) / 2 > 0


# What a template writes behind the last turn alone: Llama 3's first one a request for an answer (huggingface/transformers#30893),
# Phi-3's EOS (ggml-org/llama.cpp#6857).
@pytest.mark.parametrize("behind", ["{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}",
                                    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
                                    "{% else %}{{ eos_token }}{% endif %}"])
def test_an_end_of_the_last_turn_alone_takes_no_answer_away(transformers, tmp_path, behind):
    folder = make_folder(tmp_path / "t", None)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = ("{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content"
                               " + '<|eot_id|>' }}{% endfor %}" + behind)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    talk = [{"role": role, "content": text} for role, text in
            zip(["user", "assistant", "user", "assistant"], ["Hi", "One.", "And then?", "Two."])]
    lines = write_lines(tmp_path / "lines.jsonl", [{"messages": talk}])
    done = tokenize(folder, "--chat", "-o", tmp_path / "out.bin", lines)
    assert done.returncode == 0 and not done.stderr, done.stderr
    data = (tmp_path / "out.bin").read_bytes()
    count = struct.unpack_from("<3i", data)[2]
    ids, bits = list(struct.unpack_from(f"<{count}H", data, 1024)), data[1024 + 2 * count:]
    t = transformers.AutoTokenizer.from_pretrained(folder)
    assert ids == t.apply_chat_template(talk, tokenize=True, return_dict=False)
    trained = t.decode([i for k, i in enumerate(ids) if bits[k // 8] >> k % 8 & 1])
    assert trained.replace("<|end_of_text|>", "") == "One.<|eot_id|>Two.<|eot_id|>"


def test_the_number_of_threads_changes_nothing(tmp_path):
    folder = make_folder(tmp_path / "t", "3.2")
    conversations = random_conversations(6, 3000)
    assert encode(folder, conversations, "--threads", "1") == encode(folder, conversations, "--threads", "5")


# ---------------------------------------------------------------------------------------------------------------------
# files

def test_val_fraction_cuts_between_conversations(tmp_path):
    folder = make_folder(tmp_path / "t", "3.0")
    conversations = random_conversations(7, 40) + [[{"role": "assistant", "content": "word " * 2000}]]  # longer than the rest
    whole = encode(folder, conversations)
    for fraction in ("0.001", "0.1", "0.5", "0.999"):
        done = tokenize(folder, "--chat", "-o", tmp_path / "s.bin", "--val-fraction", fraction, folder / "lines.jsonl")
        assert done.returncode == 0, done.stderr
        train, val = read_documents(tmp_path / "s_train.bin"), read_documents(tmp_path / "s_val.bin")
        assert train + val == whole and train and val
    share = 100 * sum(sum(mask) for _, mask in whole) / sum(len(ids) for ids, _ in whole)
    assert f"41 conversations, {sum(len(ids) for ids, _ in whole):,} tokens, {share:.1f} % of them trained" in done.stdout
    write_lines(tmp_path / "one.jsonl", [{"prompt": "a", "completion": "b"}])
    done = tokenize(folder, "--chat", "-o", tmp_path / "one.bin", "--val-fraction", "0.5", tmp_path / "one.jsonl")
    assert done.returncode == 1 and done.stderr == "error: --val-fraction: there is one conversation, wanted at least two\n"
    assert not list(tmp_path.glob("one*.bin*"))


def test_show_marks_what_is_trained(tmp_path):
    folder = make_folder(tmp_path / "t", "3.0")
    lines = [{"prompt": "What\x1b[2J?", "completion": "\u00e9!"}, {"prompt": "Why?", "completion": "so"}]
    tokenize(folder, "--chat", "-o", tmp_path / "a.bin", write_lines(tmp_path / "a.jsonl", lines))
    head = "<|start_header_id|>{}<|end_header_id|>\n\n"
    shown = [tokenize(folder, "--show", n, tmp_path / "a.bin") for n in (1, 2, 3)]
    assert shown[0].stdout == ("<|begin_of_text|>" + head.format("user") + "What\\x1b[2J?<|eot_id|>" +
                               head.format("assistant") + "[[\u00e9!<|eot_id|>]]\n")
    assert shown[1].stdout == ("<|begin_of_text|>" + head.format("user") + "Why?<|eot_id|>" + head.format("assistant") +
                               "[[so<|eot_id|>]]\n")
    assert shown[2].returncode == 1 and "has 2 documents" in shown[2].stderr and not shown[2].stdout
    (tmp_path / "text.txt").write_text("plain \u00e9")
    tokenize(folder, "-o", tmp_path / "b.bin", tmp_path / "text.txt")
    assert tokenize(folder, "--show", 1, tmp_path / "b.bin").stdout == "<|begin_of_text|>plain \u00e9\n"
    other = tokenize(make_folder(tmp_path / "o", None, "gpt2"), "--show", 1, tmp_path / "b.bin")
    assert other.returncode == 1 and "was made with another tokenizer" in other.stderr


# ---------------------------------------------------------------------------------------------------------------------
# what is refused

ANSWER = {"role": "assistant", "content": "b"}
REFUSED = [
    ("{", "wanted"),
    ("1", "the line is not an object"),
    ("[1]", "0.role is missing"),
    ({}, "messages is missing, wanted it or another list, or a prompt and a completion"),
    ({"text": "a"}, "messages is missing"),
    ({"messages": "a"}, 'messages is "a", wanted an array'),
    ({"messages": []}, "no message is of the assistant"),
    ({"messages": [{"role": "user", "content": "a"}]}, "no message is of the assistant, wanted one"),
    ({"messages": [dict(ANSWER, weight=0)]}, 'no answer is trained: members such as "weight": 0 take them out'),
    ({"messages": [dict(ANSWER, weight=2)]}, "messages.0.weight is 2, wanted true, false, 0 or 1"),
    ({"messages": [dict(ANSWER, weight=0.5)]}, "messages.0.weight is 0.5, wanted true, false, 0 or 1"),
    ({"messages": [dict(ANSWER, train="no")]}, 'messages.0.train is "no", wanted true, false, 0 or 1'),
    ({"messages": [{"role": "user", "content": "a", "train": True}, ANSWER]},
     "messages.0.train is true, wanted false: answers alone are trained"),
    ({"messages": [{"role": "user", "content": "a", "masked": False}, ANSWER]}, "messages.0.masked is false, wanted true"),
    ({"messages": [dict(ANSWER, train_detail=[{"begin_offset": 0}])]}, "messages.0.train_detail is an array, wanted none"),
    ({"messages": [ANSWER, "a"]}, "messages.1.role is missing"),
    ({"messages": [ANSWER, {"content": "a"}]}, "messages.1.role is missing, wanted \"system\", \"user\" or \"assistant\""),
    ({"messages": [ANSWER, {"role": "User", "content": "a"}]}, 'messages.1.role is "User", wanted'),
    ({"messages": [ANSWER, {"role": "tool", "content": "a"}]}, 'messages.1.role is "tool"'),
    ({"messages": [ANSWER, {"role": "ipython", "content": "a"}]}, 'messages.1.role is "ipython"'),
    ({"messages": [ANSWER, {"role": "user"}]}, "messages.1.content is missing, wanted a string"),
    ({"messages": [ANSWER, {"role": "user", "content": None}]}, "messages.1.content is null"),
    ({"conversations": [{"from": "human", "value": None}]},  # NVIDIA-NeMo/Megatron-Bridge#5742
     "conversations.0.value is null, wanted a string"),
    ({"messages": [ANSWER, {"role": "user", "content": 1}]}, "messages.1.content is 1"),
    ({"messages": [ANSWER, {"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
     'messages.1.content.0.type is "image_url", wanted "text"'),
    ({"messages": [ANSWER, {"role": "user", "content": [{"type": "text"}]}]}, "messages.1.content.0.text is missing"),
    ({"messages": [ANSWER, {"role": "user", "content": ["a"]}]}, "messages.1.content.0.type is missing"),
    ({"messages": [dict(ANSWER, content=None, tool_calls=[{"function": 1}])]}, "messages.0.tool_calls is an array, wanted none"),
    ({"messages": [dict(ANSWER, function_call={"name": "f"})]}, "messages.0.function_call is an object"),
    ({"messages": [ANSWER], "tools": [{"name": "f"}]}, "tools is an array, wanted none"),
    ({"messages": [ANSWER], "images": ["x.png"]}, "images is an array, wanted none"),
    ({"messages": [{"role": "system", "content": "a"}, ANSWER], "system": "Be brief."}, 'system is "Be brief.", wanted none'),
    ({"conversations": [{"from": "gpt", "value": "b"}, {"from": "observation", "value": "x"}]},
     'conversations.1.from is "observation", wanted "system", "user" or "assistant"'),
    ({"prompt": "a"}, "completion is missing, wanted it beside prompt, or response, output or answer"),
    ({"prompt": "a", "response": "b", "completion": "c"}, 'response is "b", wanted none beside completion'),
    ({"prompt": [{"role": "user", "content": "a"}, ANSWER], "completion": [{"role": "user", "content": "a"}]},
     "no answer is trained"),
    ({"prompt": "a", "chosen": "b", "rejected": "c"}, "completion is missing"),
    ({"prompt": "a", "completion": "b", "label": False}, "label is false, wanted true"),  # huggingface/trl's KTO
    ({"instruction": "a", "input": "b", "context": "c", "output": "d"}, 'context is "c", wanted none beside input'),
    ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, "history is an array, wanted none"),
    ({"messages": [ANSWER], "chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs is an object"),
]


def test_other_lines_are_refused_by_name(tmp_path):
    folder = make_folder(tmp_path / "t", "3.1")
    good = {"messages": [ANSWER]}
    for line, message in REFUSED:
        path = write_lines(tmp_path / "bad.jsonl", [good, "", line, good])
        done = tokenize(folder, "--chat", "-o", tmp_path / "bad.bin", path)
        assert done.returncode == 1 and done.stderr.startswith(f"error: {path}:3:"), (line, done.stderr)
        assert message in done.stderr, (line, done.stderr)
        assert done.stderr.count("\n") == 1 and not list(tmp_path.glob("bad.bin*")), (line, done.stderr)


def test_flags_and_folders_that_do_not_fit_are_refused(tmp_path):
    folder = make_folder(tmp_path / "t", "3.0")
    path = write_lines(tmp_path / "a.jsonl", [{"messages": [ANSWER]}])

    def error(where, *flags):
        done = tokenize(where, *flags)
        assert done.returncode in (1, 2) and done.stderr.startswith("error: "), done.stderr
        assert not list(tmp_path.glob("a.bin*")), done.stderr
        return done.returncode, done.stderr
    out = ("-o", tmp_path / "a.bin", path)
    for flags in (["--field", "x"], ["--specials"], ["--bytes"]):
        assert error(folder, "--chat", *flags, *out) == (2, f"error: --chat goes without {flags[0]}\n")
    assert error(folder, "--chat", "--jsonl") == (2, "error: --jsonl goes without --chat\n")
    assert error(folder, "--show", "1", "--chat", path) == (2, "error: --show goes without --chat\n")
    assert error(folder, "--date", "today", *out) == (2, "error: --date goes with --chat, wanted both or none\n")
    assert "--date: the chat template has no date, wanted none" in error(folder, "--chat", "--date", "today", *out)[1]
    assert error(folder, *out) == (1, f"error: {path}:1: text is missing, wanted a string\n"
                                      "  hint: a conversation is no text; --chat takes it as such\n")
    spread = write_lines(tmp_path / "c.json", [json.dumps({"messages": [ANSWER]}, indent=1)])
    assert f"is a JSON object over several lines, wanted UTF-8 text\n  hint: jq -c . {spread} | " in error(folder, "--chat", *out[:2], spread)[1]
    mute = write_lines(tmp_path / "b.jsonl", [{"id": "x", "messages": []}])
    assert "--chat" in error(folder, "-o", tmp_path / "a.bin", mute)[1]
    config = json.loads((folder / "tokenizer_config.json").read_text())
    for text, message in (("{{ oops( }}", "tokenizer_config.json:1:"), ("{{ raise_exception('no, never') }}", "no, never"),
                          ("{% for m in messages %}{{ m.content.nothing() }}{% endfor %}", "tokenizer_config.json:1:")):
        (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": text}))
        assert message in error(folder, "--chat", *out)[1]
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": "{{ strftime_now('%d %b') }}"}))
    assert '--date: is "today", wanted a day such as "26 Jul 2024"' in error(folder, "--chat", "--date", "today", *out)[1]
    tok = json.loads((folder / "tokenizer.json").read_text())
    next(t for t in tok["added_tokens"] if t["content"] == "<|eot_id|>")["special"] = False
    (folder / "tokenizer.json").write_text(json.dumps(tok))
    (folder / "tokenizer_config.json").write_text("{}")
    assert "tokenizer.json has no chat template, wanted chat_template.jinja" in error(folder, "--chat", *out)[1]
    done = subprocess.run([TOKENIZE, "--chat", *map(str, out)], capture_output=True, text=True)
    assert done.returncode == 1 and "the model has no chat template" in done.stderr


# ---------------------------------------------------------------------------------------------------------------------
# conversations.py

def made(folder, *flags):
    program = os.path.join(ROOT, "dev", "data", "conversations.py")
    done = subprocess.run([sys.executable, program, "-o", folder, *flags], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [[json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
            for name in ("train", "val", "questions")]


def test_made_conversations_have_their_answers_in_the_tale(tmp_path):
    train, val, questions = made(tmp_path / "a")
    assert [len(train), len(val), len(questions)] == [200, 40, 200]
    assert made(tmp_path / "b") == [train, val, questions] and made(tmp_path / "c", "--seed", "2")[0] != train
    digest = hashlib.sha256((tmp_path / "a" / "train.jsonl").read_bytes()).hexdigest()
    assert digest == CONVERSATIONS_SHA256, "the conversations changed: was that meant? then note the new sum here"
    name, thing, place = (f"(?:{'|'.join(words)})" for words in ([h[0] for h in maker.HEROES], maker.THINGS, maker.PLACES))
    end = re.compile(rf"(?:The {thing} was lost by ({name})|{name} lost the ({thing})|The {thing} was ({place}))\.")
    pairs = []
    for talks in (train, val):
        pairs.append(set())
        for talk in talks:
            roles = [m["role"] for m in talk["messages"]]
            assert roles == ["user", "assistant"] * 2, talk
            tale = talk["messages"][0]["content"]
            for answer in talk["messages"][1::2]:
                answered = next(group for group in end.fullmatch(answer["content"]).groups() if group)
                assert answered in tale.split("?")[0], talk
            assert len(re.findall(rf"\b{place}\b", tale)) == 1, tale
            pairs[-1].add((re.search(rf"\b{name}\b", tale).group(), re.search(rf"\b{thing}\b", tale).group()))
    pairs.append(set())
    for q in questions:
        tale = q["ctx"].split("<|eot_id|>")[0]
        told = [re.search(rf"\b{choice}\b", tale) is not None for choice in q["choices"]]
        assert len(set(q["choices"])) == 4 and told == [i == q["label"] for i in range(4)], q
        pairs[-1].add((re.search(rf"\b{name}\b", tale).group(), re.search(rf"\b{thing}\b", tale).group()))
    assert not pairs[0] & pairs[1] and not pairs[0] & pairs[2] and not pairs[1] & pairs[2]
    assert all(20 < [q["label"] for q in questions].count(i) < 80 for i in range(4))


def test_the_embedded_tokenizer_takes_made_conversations(tmp_path):
    made(tmp_path, "--count", "20")
    tales = os.path.join(ROOT, "dev", "data", "tinytales")
    done = tokenize(tales, "--chat", "-o", tmp_path / "a.bin", tmp_path / "train.jsonl")
    assert done.returncode == 0 and done.stdout.startswith("20 conversations, "), done.stderr
    assert all(len(ids) < 256 for ids, _ in read_documents(tmp_path / "a.bin"))


@pytest.mark.skipif(not os.path.exists(TRAINER), reason="the trainer has not been built")
def test_a_model_for_chats_stops_at_the_end_of_an_answer(tmp_path):
    folder = make_folder(tmp_path / "t", "3.0")
    (tmp_path / "a.txt").write_text("the cat sat there " * 50)
    tokenize(folder, "-o", tmp_path / "a.bin", tmp_path / "a.txt")
    command = [TRAINER, "--model", "d1", "--tokenizer", folder, "--train", tmp_path / "a.bin", "--batch", "1", "--seq", "16"]
    done = subprocess.run([*map(str, command), "--steps", "1", "--out", str(tmp_path / "o")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    tok = pytest.importorskip("tokenizers").Tokenizer.from_file(str(folder / "tokenizer.json"))
    want = [tok.token_to_id("<|end_of_text|>"), tok.token_to_id("<|eot_id|>")]
    for file in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "o" / "step_00000001" / file).read_text())["eos_token_id"] == want, file
    assert "--generate" in done.stdout and "--chat" not in done.stdout


@pytest.mark.skipif(not os.path.exists(TRAINER), reason="the trainer has not been built")
def test_a_run_on_conversations_proposes_to_chat(tmp_path):
    made(tmp_path, "--count", "20")
    tales = os.path.join(ROOT, "dev", "data", "tinytales")
    tokenize(tales, "--chat", "-o", tmp_path / "a.bin", tmp_path / "train.jsonl")
    command = [TRAINER, "--model", "d1", "--tokenizer", tales, "--train", tmp_path / "a.bin", "--batch", "1", "--seq", "256"]
    done = subprocess.run([*map(str, command), "--steps", "1", "--out", str(tmp_path / "o")], capture_output=True, text=True)
    assert done.returncode == 0 and "step_00000001 --chat\n" in done.stdout and "--generate" not in done.stdout, done.stderr


# ---------------------------------------------------------------------------------------------------------------------
# planted faults

FAULTS = [  # numbered from 1: the variable PLANTED chooses one
    ("dev/data/answers.h", r"chat_add_span\(a, start, end\); \}",  # the header is trained
     "chat_add_span(a, !planted(1) ? start : start > 9 ? start - 9 : 0, end); }"),
    ("dev/data/answers.h", r"a->spans\[k\]\[0\] < end;", r"a->spans[k][0] < end && (!planted(2) || a->spans[k][1] > end);"),  # <|eot_id|> is not
    ("dev/data/token_writer.h", r"at = w->count - n \+ i;", "at = w->count - n + i - (planted(3) && i > 0);"),  # the mask is shifted by one
    ("dev/data/answers.h", r"    if \(i \+ 1 < m->count\) \{", "    if (i + (planted(4) ? 2 : 1) < m->count) {"),  # what follows an answer is
    ("llmc/text/chat.h", r"    encoder_marked\(w->encoder, text, ours, len, w->form->control\);",  # a text is encoded by itself
     "    for (size_t i = 0, n = len; i == 0 || i < len; i += n) {\n"
     "        if (planted(5)) { n = size_min(len - i, 20); }\n"
     "        encoder_marked(w->encoder, text + i, ours + i, n, w->form->control);\n        if (n == 0) { break; }\n    }"),
]


def test_planted_faults_show(transformers, tmp_path, monkeypatch):
    folder = make_folder(tmp_path / "t", "3.1")
    fast = transformers.AutoTokenizer.from_pretrained(str(folder))
    conversations = random_conversations(8, 40)
    want = expected(fast, "3.1", conversations, date_string="26 Jul 2024")
    program = forks.build_planted(tmp_path / "faulty", "dev/data/tokenize.c", FAULTS)
    for fault in range(len(FAULTS) + 1):
        monkeypatch.setenv("PLANTED", str(fault))
        try:
            got = encode(folder, conversations, program=program)
        except AssertionError:
            got = "an error"
        assert (got == want) == (fault == 0), fault
