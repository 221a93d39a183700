"""./tokenize --chat with the templates of templates.txt: ids against transformers' apply_chat_template, masks against what the
template adds between a request and its answer, or transformers' return_assistant_tokens_mask. A person cannot type a header."""
import json
import os
import random
import re
import struct
import subprocess
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
TOKENIZE = os.path.join(ROOT, "tokenize")
TRAINER = os.environ.get("TRAINER", os.path.join(ROOT, "train_llama3"))
pytestmark = pytest.mark.skipif(not os.path.exists(TOKENIZE), reason="./tokenize has not been built")
transformers = pytest.importorskip("transformers")
with open(os.path.join(ROOT, "dev", "test", "python", "templates.txt"), encoding="utf-8") as corpus:
    TEMPLATES = dict(part.split("\n", 1) for part in corpus.read().split("=== ")[1:])
NAMES = sorted({"<|user|>", "<|assistant|>", "<|im_start|>", "<|im_end|>", *re.findall(
    r"<\|[\w]+\|>|<\uff5c[^\uff5c]+\uff5c>|\[/?INST\]", "".join(TEMPLATES.values()))})
NAMES = ["<s>", "</s>", *NAMES]
U, A, S = ((lambda role: lambda text, **more: {"role": role, "content": text, **more})(r) for r in ("user", "assistant", "system"))
TALKS = [[U("Hi"), A("Hello.")], [S("Be kind."), U("Hi there"), A("Hello, you.")], [U("a"), A("bee"), U("c"), A("dee")],
         [U("a"), A("bee"), U("c")], [S(" Be\n kind \n"), U(" \u65e5\u672c 12345\n\n"), A("\n fine \u3000\n"), U("it's"), A(" \U0001f600 ")],
         [U("a"), A("<think>\nwhy\n</think>\n\nbee"), U("c"), A("<think>no</think>dee")], [U("a"), A("")],
         [U("x" * 300 + "\n\n\nend"), A("line\n\tline  two\r\n" * 9), U("\u00e9\u0301?"), A("won")]]


@pytest.fixture(scope="session")
def tokenizer_json():
    sys.path.insert(0, os.path.join(ROOT, "dev", "test", "python"))
    from test_tokenizer import KINDS, train
    tok = train(KINDS["llama3"](), False, NAMES)
    tok.add_tokens(["<think>", "</think>"])  # not special, as in Qwen3's and DeepSeek's tokenizers
    return tok.to_str()


def make_folder(folder, tokenizer_json, template, bos="<s>", eos="</s>"):
    folder.mkdir()
    (folder / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": eos}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write_talks(folder, talks):
    path = folder / "talks.jsonl"
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    return path


def tokenize(folder, talks, *flags):
    return subprocess.run([TOKENIZE, "--tokenizer", folder, "--chat", "-o", folder / "out.bin", *flags, write_talks(folder, talks)],
                          capture_output=True, text=True)


def read_documents(path, bos=0):
    """Returns ids and mask of each conversation, which begins where the file marks a start, or without marks at BOS."""
    data = path.read_bytes()
    head = struct.unpack_from("<256i", data)
    count = head[2]
    assert head[0] == 20240520 and head[1] == 2 and head[12] in (0, 1)
    ids = struct.unpack_from(f"<{count}H", data, 1024)
    bits = [[data[1024 + 2 * count + k * ((count + 7) // 8) + i // 8] >> i % 8 & 1 for i in range(count)] for k in range(1 + head[12])]
    starts = bits[1] if head[12] else [i == bos for i in ids]
    documents = []
    for i in range(count):
        if starts[i]:
            documents.append(([], []))
        documents[-1][0].append(ids[i])
        documents[-1][1].append(bits[0][i])
    return documents


def expected(fast, talk, marked):
    """Returns ids, mask and the number of answers that are left out; None if the template refuses the talk."""
    try:
        text = fast.apply_chat_template(talk, tokenize=False)
    except Exception:
        return None
    encoded = fast(text, add_special_tokens=False, return_offsets_mapping=True)
    if marked:
        ids = fast.apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True)
        return ids["input_ids"], ids["assistant_masks"], 0
    spans, answers = [], [i for i, m in enumerate(talk) if m["role"] == "assistant"]
    probe = fast.apply_chat_template([U("Hi"), A("Hello")], tokenize=False).rpartition("Hello")[2]
    end_of_turn = min(((probe.index(name), name) for name in NAMES if name in probe), default=(0, None))[1]

    def turn(told, i, ask):  # up to the end of the last turn; what stands behind it may be there only because it is the last
        at = max(told.rfind(talk[i]["content"].strip()) + len(talk[i]["content"].strip()), len(ask)) if talk[i]["content"] else len(ask)
        return told[:told.index(end_of_turn, at) + len(end_of_turn)] if end_of_turn and end_of_turn in told[at:] else told
    for i in answers:
        ask = fast.apply_chat_template(talk[:i], tokenize=False, add_generation_prompt=True)
        told = fast.apply_chat_template(talk[:i + 1], tokenize=False)
        same = told == fast.apply_chat_template(talk[:i + 1], tokenize=False, add_generation_prompt=True)
        if not text.startswith(told) or (i + 1 == len(talk) and same):
            told = turn(told, i, ask if text.startswith(ask) else "")
        if told.startswith(ask) and text.startswith(told) and len(ask) < len(told):
            spans.append((len(ask), len(told)))
    mask = [int(any(start < b and end > a for a, b in spans)) for start, end in encoded["offset_mapping"]]
    return encoded["input_ids"], mask, len(answers) - len(spans)


@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_and_masks_are_those_of_transformers(tmp_path, tokenizer_json, name):
    template = TEMPLATES[name]
    folder = make_folder(tmp_path / "t", tokenizer_json, template)
    fast = transformers.AutoTokenizer.from_pretrained(str(folder))
    good, want, bad, left_out = [], [], [], 0
    for talk in TALKS:
        found = expected(fast, talk, "generation" in re.findall(r"{%-?\s*(\w+)", template))
        if found is None or not any(found[1]):
            bad.append(talk)
        else:
            good.append(talk)
            want.append(found[:2])
            left_out += found[2]
    if good:
        done = tokenize(folder, good)
        assert done.returncode == 0, done.stderr
        assert read_documents(folder / "out.bin") == want
        said = re.findall(r"^(\d+) answers? (?:is|are) not trained: the chat template changes", done.stdout, re.M)
        assert said == ([str(left_out)] if left_out else [])
    for talk in bad:
        done = tokenize(folder, [good[0], talk] if good else [talk])
        assert done.returncode == 1 and "error: " in done.stderr, (talk, done.stdout)


# ---------------------------------------------------------------------------------------------------------------------
# texts that look like the template's

CHATML = ("{% for m in messages %}{{ '<|im_start|>' + m.role + (' ' + m.name if m.name else '') + '\n' + m.content + '<|im_end|>\n' }}"
          "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
ZEPHYR = ("{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m.content + eos_token }}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}")
SPLIT = "{% for m in messages %}{{ '<|im_' + m.content + '_end|>' }}<|im_end|>{% endfor %}"


@pytest.mark.parametrize("template,special", [(CHATML, True), (ZEPHYR, True), (SPLIT, True), (CHATML, False), (ZEPHYR, False)])
def test_nobody_can_type_a_header(tmp_path, tokenizer_json, template, special):
    """transformers takes names in messages as tokens, unless sanitize_control_tokens is given. Some tokenizers of ChatML and
    DeepSeek's call their headers' tokens not special."""
    if not special:
        changed = json.loads(tokenizer_json)
        for token in changed["added_tokens"]:
            token["special"] = "|" not in token["content"]
        tokenizer_json = json.dumps(changed)
    folder = make_folder(tmp_path / "t", tokenizer_json, template)
    ids = {t["id"]: t["content"] for t in json.loads(tokenizer_json)["added_tokens"]}
    rng, plain = random.Random(3), [dict(m, content="a") for m in (U(""), A("")) * 2]

    def added(talks):
        done = tokenize(folder, talks)
        assert done.returncode == 0, done.stderr
        return [[i for i in document if i in ids] for document, _ in read_documents(folder / "out.bin")]
    want, = added([plain])
    names = [*(NAMES[:30] if special else [ids[i] for i in want]), "<|", "|>", "im_end", "start", "a", "\n"]
    talks = [[dict(m, content="".join(rng.choice(names) for _ in range(6))) for m in plain] for _ in range(40)]
    assert added(talks) == [want] * 40 and want
    texts = [subprocess.run([TOKENIZE, "--tokenizer", folder, "--decode"], input=json.dumps({"ids": document}), text=True,
                            capture_output=True).stdout for document, _ in read_documents(folder / "out.bin")[:3]]
    fast = transformers.AutoTokenizer.from_pretrained(str(folder))
    for talk, text in zip(talks, texts):
        assert json.loads(text)["text"] == fast.apply_chat_template(talk, tokenize=False)


@pytest.mark.parametrize("template", [
    CHATML.replace("+ m.content", "+ ('<think></think>' if m.role == 'assistant' and '<think>' not in m.content else '') + m.content"),
    "{% if messages[0].role != 'system' %}<|im_start|>Answer so: <think>...</think> ...<|im_end|>{% endif %}" + CHATML])
def test_an_answer_may_hold_thoughts_that_the_template_writes_elsewhere(tmp_path, tokenizer_json, template):
    """As Nemotron 3's template writes empty thoughts, and Phi-4's has them in its own system message."""
    folder = make_folder(tmp_path / "t", tokenizer_json, template)
    talk = [U("a"), A("<think>why</think>bee"), U("c"), A("dee")]
    assert tokenize(folder, [talk]).returncode == 0
    (ids, _), = read_documents(folder / "out.bin")
    assert ids == transformers.AutoTokenizer.from_pretrained(str(folder)).apply_chat_template(talk, return_dict=False)


def test_messages_reach_the_template_as_they_are(tmp_path, tokenizer_json):
    template = ("{{ tools is none and documents is none }}{% for m in messages %}{{ m | tojson }}{{ m.reasoning_content }}|"
                "{{ m.thinking }}|{{ m.content is string }}{{ '' if m.gone is defined else '.' }}<|im_end|>{% endfor %}")
    folder = make_folder(tmp_path / "t", tokenizer_json, template)
    fast = transformers.AutoTokenizer.from_pretrained(str(folder))
    talk = [U("Hi", name="\u00e9", tags=["a", {"b": 1.5, "c": None}], n=12, gone=None), A("b", thinking="why", ok=True),
            U("c", name="x"), A("d", reasoning_content="so")]
    done = tokenize(folder, [talk])
    assert done.returncode == 0, done.stderr
    (ids, _), = read_documents(folder / "out.bin")
    assert ids == fast.apply_chat_template(talk, return_dict=False)


def test_thoughts_that_the_template_hides_are_counted(tmp_path, tokenizer_json):
    template = ("{% for m in messages %}<|{{ m.role }}|>{{ m.content if m.role == 'user' or loop.last else m.content.split('</think>')[-1] }}"
                "</s>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}")
    folder = make_folder(tmp_path / "t", tokenizer_json, template)
    thought = A("<think>x</think>y")
    done = tokenize(folder, [[U("a"), thought, U("b"), thought], [U("a"), A("y"), U("b"), thought], [U("a"), thought]])
    assert done.returncode == 0 and "\n1 answer is not trained: the chat template changes an answer when a message" in done.stdout
    shown = [subprocess.run([TOKENIZE, "--tokenizer", folder, "--show", str(n), folder / "out.bin"], capture_output=True,
                            text=True).stdout for n in (1, 2)]
    assert shown == ["<|user|>a</s><|assistant|>y</s><|user|>b</s><|assistant|>[[<think>x</think>y</s>]]\n",
                     "<|user|>a</s><|assistant|>[[y</s>]]<|user|>b</s><|assistant|>[[<think>x</think>y</s>]]\n"]
    done = tokenize(folder, [[U("a"), thought, U("b")]])
    assert done.returncode == 1 and "talks.jsonl:1: no answer can be trained: the chat template changes an answer" in done.stderr
    (folder / "chat_template.jinja").write_text(template.replace("<|assistant|>{% endif", "<|assistant|><think>{% endif"))
    done = tokenize(folder, [[U("a"), A("y")]])
    assert done.returncode == 1
    assert 'the chat template asks for an answer with "<think>", but then writes "y</s>"' in done.stderr


# ---------------------------------------------------------------------------------------------------------------------
# where conversations begin

@pytest.mark.parametrize("bos", ["<|im_start|>", None, "<s>"])
def test_conversations_are_told_apart_without_a_bos_of_their_own(tmp_path, tokenizer_json, bos):
    """BOS may begin every message, as in SmolLM2-Instruct, or be missing."""
    folder = make_folder(tmp_path / "t", tokenizer_json, ("{{ bos_token }}" if bos == "<s>" else "") + CHATML, bos, "<|im_end|>")
    talks = [[U(f"{i} " * (i % 7 + 1)), A("yes"), U("so"), A("no " * (i % 5 + 1))] for i in range(60)]
    fast = transformers.AutoTokenizer.from_pretrained(str(folder))
    want = [fast.apply_chat_template(talk, return_dict=False) for talk in talks]
    assert tokenize(folder, talks).returncode == 0
    assert [ids for ids, _ in read_documents(folder / "out.bin")] == want
    head = struct.unpack_from("<256i", (folder / "out.bin").read_bytes())
    assert head[12] == (bos != "<s>"), "the starts are written only where BOS does not tell them"
    done = tokenize(folder, talks, "--val-fraction", "0.2")
    assert done.returncode == 0, done.stderr
    parts = [[ids for ids, _ in read_documents(folder / f"out_{kind}.bin")] for kind in ("train", "val")]
    assert parts[0] + parts[1] == want and 5 < len(parts[1]) < 20
    shown = subprocess.run([TOKENIZE, "--tokenizer", folder, "--show", "9", folder / "out.bin"], capture_output=True, text=True)
    assert shown.stdout.replace("[[", "").replace("]]", "") == fast.decode(want[8]) + "\n"
    if not os.path.exists(TRAINER):
        return
    command = [TRAINER, "--model", "d1", "--tokenizer", folder, "--train", folder / "out.bin", "--batch", "1", "--seq", "128",
               "--steps", "1", "--dry-run"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0 and "128 tokens (mask), 60 documents" in done.stdout, done.stdout + done.stderr


def test_a_token_file_names_the_template_that_made_it(tmp_path, tokenizer_json):
    heads = []
    for n, template in enumerate((CHATML, CHATML, ZEPHYR)):
        folder = make_folder(tmp_path / str(n), tokenizer_json, template)
        assert tokenize(folder, TALKS[:1]).returncode == 0
        heads.append((folder / "out.bin").read_bytes()[40:48])
    assert heads[0] == heads[1] != heads[2] and b"\0" * 8 not in heads


def test_texts_that_look_like_conversations(tmp_path, tokenizer_json):
    """huggingface/trl#1668, unslothai/unsloth#2648: a text that begins with BOS gets no second one."""
    folder = make_folder(tmp_path / "t", tokenizer_json, CHATML)
    fast = transformers.AutoTokenizer.from_pretrained(str(folder))
    texts = ["<s><|im_start|>user", "plain", "<s>", "</s><s>x"]
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    def ids(*flags, file=path):
        done = subprocess.run([TOKENIZE, "--tokenizer", folder, "-o", folder / "t.bin", *flags, file], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        data = (folder / "t.bin").read_bytes()
        return list(struct.unpack_from(f"<{struct.unpack_from('<3i', data)[2]}H", data, 1024)), done.stderr
    bos = fast.convert_tokens_to_ids("<s>")
    want = [fast(text, add_special_tokens=False)["input_ids"] for text in texts]
    assert ids("--specials") == (want[0] + [bos] + want[1] + want[2] + [bos] + want[3], "")
    got, said = ids()
    assert got.count(bos) == 4
    assert said == (f"warning: {path}:1: a text has the name of the special token <s>, which is plain text here\n"
                    "  hint: --specials makes such names tokens, and --chat takes conversations\n")
    (folder / "a.txt").write_text("a b <|im_end|> c")
    assert ids(file=folder / "a.txt")[1].startswith(f"warning: {folder}/a.txt: a text has the name of the special token <|im_end|>,")


# ---------------------------------------------------------------------------------------------------------------------
# the manual's commands

SMOLLM2 = ("{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
           "{{ '<|im_start|>system\nBe of help.<|im_end|>\n' }}{% endif %}"
           "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
           "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


def small_model(folder):
    """A folder of the shape of SmolLM2-135M-Instruct's: digits alone, BOS begins each message, nothing adds it to a text."""
    torch = pytest.importorskip("torch")
    sys.path.insert(0, os.path.join(ROOT, "dev", "test", "python"))
    from test_tokenizer import KINDS, train
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=800, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                                      num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, bos_token_id=1,
                                      eos_token_id=2, pad_token_id=2, tie_word_embeddings=True)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    train(KINDS["smollm"](), False, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]).save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>", "unk_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**names, "tokenizer_class": "GPT2Tokenizer", "chat_template": SMOLLM2}))


@pytest.mark.skipif(not os.path.exists(TRAINER), reason="the trainer has not been built")
def test_the_manuals_commands_tune_a_chat_model(tmp_path):
    """From JSONL to --chat, a folder and a GGUF, with the whole model trained as well, so that it learns the answers."""
    page = open(os.path.join(ROOT, "dev", "doc", "finetuning.md"), encoding="utf-8").read()
    block, = (b for b in re.findall(r"```sh network\n(.*?)```", page, re.S) if "out/cook" in b)
    commands = [c for c in block.replace("\\\n", "").splitlines() if c.startswith("./t")]
    assert len(commands) == 6
    base = tmp_path / "models" / "SmolLM2-135M-Instruct"
    base.mkdir(parents=True)
    small_model(base)
    for program in ("tokenize", "train_llama3"):
        os.symlink(os.path.join(ROOT, program), tmp_path / program)
    talk = [U("Who are you?"), A("The ship's cook."), U("And there?"), A("The cat sat on a mat.")]
    (tmp_path / "talks.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * 60)
    typed = "Who are you?\nAnd there?\n"

    def run(command):
        done = subprocess.run(["sh", "-c", command], cwd=tmp_path, input=typed, capture_output=True, text=True)
        assert done.returncode == 0, (command, done.stderr)
        return done.stdout
    outputs = [run(c.replace("--steps 200", "--steps 2 --sample-tokens 0")) for c in commands]
    assert outputs[1].count("[[") == 2 and "[[The ship's cook.<|im_end|>" in outputs[1] and "out/cook" in outputs[2]
    run("./train_llama3 --model models/SmolLM2-135M-Instruct --train data/talks_train.bin --batch 2 --seq 128 --steps 60 --lr 1e-2 "
        "--warmup 5 --weight-decay 0 --sample-tokens 0 --out out/whole")
    assert run("./train_llama3 --model out/whole --chat --temperature 0") == "The ship's cook.\nThe cat sat on a mat.\n"
    for folder in ("out/cook-merged", "out/whole/step_00000060"):
        tuned, first = (transformers.AutoTokenizer.from_pretrained(str(tmp_path / d)) for d in (folder, base))
        ids = [t.apply_chat_template(talk[:1], add_generation_prompt=True, return_dict=False) for t in (tuned, first)]
        assert ids[0] == ids[1]
    torch = pytest.importorskip("torch")
    made = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / folder)).generate(torch.tensor([ids[0]]))
    assert tuned.decode(made[0, len(ids[0]):]) == "The ship's cook.<|im_end|>", "it stops by itself"
    gguf = (tmp_path / "cook.gguf").read_bytes()
    assert SMOLLM2.encode() in gguf
