"""Tests that a folder says of its texts what it says to transformers: the table of dev/doc/generating.md, a row of SHAPES for each
of its facts. text_stub.c prints ours. Then what training makes of a model must be in every folder that it writes."""
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")
sys.path.insert(0, str(Path(__file__).parent))
import forks  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
TALES = ROOT / "dev/data/tinytales/tokenizer.json"
TRAINER, TOKENIZE = ROOT / "train_llama3", ROOT / "tokenize"
BOS, EOS, EOT, EOM, PAD = "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"
PROMPT = f"{BOS}The fox"
transformers.logging.set_verbosity_error()


def template(*before, after=()):
    """Returns a post-processor with these tokens before a text and behind it."""
    def parts(names):
        return [{"SpecialToken": {"id": name, "type_id": 0}} for name in names]
    single = parts(before) + [{"Sequence": {"id": "A", "type_id": 0}}] + parts(after)
    return {"type": "TemplateProcessing", "single": single, "pair": single + [{"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {name: {"id": name, "ids": [IDS[name]], "tokens": [name]} for name in (*before, *after)}}


IDS = {t["content"]: t["id"] for t in json.loads(TALES.read_text())["added_tokens"]} if TALES.exists() else {}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
NAMES = {"bos_token": BOS, "eos_token": EOS, "tokenizer_class": "PreTrainedTokenizerFast"}
ADDED = {"content": EOT, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
MAP = {"bos_token": EOM, "eos_token": ADDED, "pad_token": PAD}

# post: the post-processor; config: members of tokenizer_config.json, None for no file; gen: generation_config.json; model: members
# of config.json; files: others
SHAPES = {
    "plain": {},
    "without a post-processor": dict(post=None),
    "a post-processor that adds nothing": dict(post=BYTE_LEVEL),
    "one in a sequence": dict(post=lambda: {"type": "Sequence", "processors": [BYTE_LEVEL, template(BOS)]}),
    "two in a sequence": dict(post=lambda: {"type": "Sequence", "processors": [template(BOS), template(EOM)]}),
    "two tokens before": dict(post=lambda: template(BOS, EOM)),
    "a token that is not BOS": dict(post=lambda: template(EOM)),
    "a token behind": dict(post=lambda: template(BOS, after=[EOS])),
    "of Roberta's kind": dict(post=lambda: {"type": "RobertaProcessing", "sep": [EOS, IDS[EOS]], "cls": [BOS, IDS[BOS]],
                                            "trim_offsets": True, "add_prefix_space": False}),
    "add_bos_token false": dict(config={"add_bos_token": False}),
    "add_bos_token true without a post-processor": dict(post=None, config={"add_bos_token": True, "add_eos_token": True}),
    "another class": dict(config={"tokenizer_class": "LlamaTokenizer", "add_bos_token": False}),
    "no tokenizer_config.json": dict(config=None),
    "names in special_tokens_map.json": dict(config={"bos_token": None, "eos_token": None}, files={"special_tokens_map.json": MAP}),
    "special_tokens_map.json wins": dict(files={"special_tokens_map.json": MAP}),
    "null in special_tokens_map.json": dict(files={"special_tokens_map.json": {"bos_token": None}}),
    "added_tokens_decoder wins": dict(config={"added_tokens_decoder": {str(IDS.get(EOT, 0)): ADDED | {"special": True}}},
                                      files={"special_tokens_map.json": MAP}),
    "a name as an object": dict(config={"eos_token": ADDED | {"__type": "AddedToken"}}),
    "a name of model.vocab": dict(config={"eos_token": "!"}),
    "a new name": dict(config={"eos_token": "<|im_end|>"}),
    "an empty name": dict(config={"bos_token": "", "eos_token": ""}),
    "pad": dict(config={"pad_token": PAD}),
    "end tokens in generation_config.json": dict(gen={"eos_token_id": [IDS.get(EOT), IDS.get(EOS)]}),
    "one end token there": dict(gen={"eos_token_id": IDS.get(EOT), "do_sample": True}),
    "end tokens in config.json": dict(model={"eos_token_id": [IDS.get(EOT), IDS.get(EOM)]}),
    "no end token": dict(model={"eos_token_id": None, "bos_token_id": None}, gen={"do_sample": False}),
    "an end token of no model": dict(gen={"eos_token_id": [IDS.get(EOT), 99999]}),
    "chat_template.jinja": dict(config={"chat_template": "inline"}, files={"chat_template.jinja": "{{ 1 }}\r\nfile\n"}),
    "an inline template": dict(config={"chat_template": "{{ '\n' }}é"}),
    "a list of templates": dict(config={"chat_template": [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]}),
    "an object of templates": dict(config={"chat_template": {"default": "d", "rag": "r"}}),
    "more templates": dict(files={"chat_template.jinja": "file", "additional_chat_templates/rag.jinja": "r"}),
    "the template of a processor": dict(files={"chat_template.json": {"chat_template": "legacy"}}),
}


def write(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8", newline="")


def make_shape(folder, post=lambda: template(BOS), config=(), gen=None, model=(), files=()):
    tokenizer = json.loads(TALES.read_text())
    tokenizer["post_processor"] = post() if callable(post) else post
    write(folder / "tokenizer.json", tokenizer)
    if config is not None:
        write(folder / "tokenizer_config.json", {k: v for k, v in (NAMES | dict(config)).items() if v is not None})
    shape = dict(model_type="llama", vocab_size=2048, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                 num_attention_heads=4, bos_token_id=IDS[BOS], eos_token_id=IDS[EOS])
    write(folder / "config.json", shape | dict(model))
    for name, value in (dict(files) | ({"generation_config.json": gen} if gen else {})).items():
        write(folder / name, value)


@pytest.fixture(scope="module")
def rules(tmp_path_factory):
    """What our reader says of every shape, by its name, and the folders."""
    if not TALES.exists():
        pytest.skip("the tokenizer of tinytales is not there (make dev/data/tinytales/tinytales_train.bin)")
    work = tmp_path_factory.mktemp("rules")
    for name, shape in SHAPES.items():
        make_shape(work / name, **shape)
    done = subprocess.run([forks.built("text_stub"), "rules", PROMPT, *(work / name for name in SHAPES)], capture_output=True, text=True, check=True)
    return {name: json.loads(line) for name, line in zip(SHAPES, done.stdout.splitlines())}, work


def ids_of(value):
    return set(value if isinstance(value, list) else [] if value is None else [value])


@pytest.mark.parametrize("name", SHAPES)
def test_a_folder_says_what_it_says_to_transformers(rules, name):
    ours, folder = rules[0][name], rules[1] / name
    t = transformers.AutoTokenizer.from_pretrained(folder)
    c = transformers.AutoConfig.from_pretrained(folder)
    x = t("x", add_special_tokens=False).input_ids
    around = t("x").input_ids
    behind = around[around.index(x[0]) + 1:]
    assert ours["start"] == around[:around.index(x[0])]
    whole = t(PROMPT).input_ids
    assert ours["prompt"] == whole[:len(whole) - len(behind)]
    assert (ours["bos"], ours["eos"], ours["pad"]) == tuple(n or None for n in (t.bos_token, t.eos_token, t.pad_token))
    assert ours["pad_id"] == (-1 if t.pad_token_id is None else t.pad_token_id)
    templates = t.chat_template
    assert ours["template"] == (templates["default"] if isinstance(templates, dict) else templates)
    gen = transformers.GenerationConfig.from_pretrained(folder) if (folder / "generation_config.json").exists() else None
    ends = ids_of(c.eos_token_id) | ids_of(gen and gen.eos_token_id) | ids_of(t.eos_token_id)
    ends = {i for i in ends if i < 2048 and i < len(t) - (name == "a new name")}
    usual = {IDS[BOS], IDS[EOS]}  # ours: a text ends at BOS, too, and a tokenizer without names has the usual ones
    assert ends <= set(ours["ends"]) <= ends | usual | ids_of(t.bos_token_id) | ids_of(c.bos_token_id)
    assert ours["draws"] == bool(gen and gen.do_sample)


# ----------------------------------------------------------------------------------------------------------------------
# texts


def run(*words, **more):
    return subprocess.run([str(w) for w in words], capture_output=True, text=True, check=False, **more)


def make_model(folder, seed=2, std=0.06, gen=(), tok_config=(), **config):
    """Writes a small base model as transformers does, with the tokenizer of tinytales."""
    torch.manual_seed(seed)
    shape = dict(hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                 vocab_size=2048, max_position_embeddings=256, rms_norm_eps=1e-5, bos_token_id=IDS[BOS], eos_token_id=IDS[EOS])
    m = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(shape | config)))
    with torch.no_grad():
        for p in m.parameters():
            if p.dim() > 1:
                p.normal_(0, std)
    m.save_pretrained(folder)
    shutil.copy(TALES, folder)
    write(folder / "tokenizer_config.json", NAMES | dict(tok_config))
    write(folder / "generation_config.json", dict(bos_token_id=IDS[BOS], eos_token_id=IDS[EOS]) | dict(gen))
    return folder


@pytest.mark.skipif(not TRAINER.exists() or not TALES.exists(), reason="train_llama3 and tinytales are not built")
@pytest.mark.parametrize("gen", [{}, {"repetition_penalty": 1.4}, {"repetition_penalty": 0.7},
                                 {"do_sample": True, "temperature": 0.7, "top_k": 1, "repetition_penalty": 1.2}, {"max_new_tokens": 7}])
def test_a_text_is_that_of_transformers_without_a_flag(tmp_path, gen):
    """huggingface/transformers#34304: do_sample, the penalty and the most tokens of generation_config.json decide."""
    folder = make_model(tmp_path / "m", std=0.2, gen=gen)
    t, m = transformers.AutoTokenizer.from_pretrained(folder), transformers.AutoModelForCausalLM.from_pretrained(folder)
    most = {} if "max_new_tokens" in gen else {"max_new_tokens": 24}
    ids = m.generate(**t("The fox", return_tensors="pt"), **most)[0]
    done = run(TRAINER, "--model", folder, "--generate", "The fox", *(["--tokens", 24] if most else []))
    assert done.returncode == 0 and done.stdout.rstrip("\n") == t.decode(ids, skip_special_tokens=True).rstrip("\n"), done.stderr
    assert ("repetition_penalty" in done.stderr) == ("repetition_penalty" in gen)


# ----------------------------------------------------------------------------------------------------------------------
# what training makes of a model


FORM = "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>{{ m.content }}<|eot_id|>{% endfor %}" \
       "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>{% endif %}"


def answer_of(folder):
    """Returns how transformers answers with what the folder says, and the tokens of the answer."""
    t, m = transformers.AutoTokenizer.from_pretrained(folder), transformers.AutoModelForCausalLM.from_pretrained(folder)
    talk = [{"role": "user", "content": "What did the fox find?"}]
    x = t.apply_chat_template(talk, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = m.generate(**x, max_length=200)[0][x["input_ids"].shape[1]:].tolist()
    return t.decode(ids, skip_special_tokens=True).strip(), ids


def said(folder, file, key):
    return json.loads((folder / file).read_text()).get(key)


@pytest.mark.skipif(not TRAINER.exists() or not TALES.exists(), reason="train_llama3 and tinytales are not built")
@pytest.mark.parametrize("program, form", [("c", "built-in"), ("c", "link"), ("py", "link"), pytest.param(
    "py", "built-in", marks=pytest.mark.skipif(os.environ.get("FULL") != "1", reason="FULL=1 runs the Python trainer on both forms"))])
def test_a_base_tuned_on_conversations_ends_its_answers(tmp_path, program, form):
    """hiyouga/LlamaFactory#7454, vllm-project/vllm#4180: the saved base had no template and its old end token."""
    base = make_model(tmp_path / "base", gen={"_kept": [1, 2]}, pad_token_id=5, _unknown={"a": 1})
    if form == "link":
        write(tmp_path / "elsewhere", FORM)
        (base / "chat_template.jinja").symlink_to(tmp_path / "elsewhere")
    talk = tmp_path / "talk.jsonl"
    write(talk, json.dumps({"prompt": "What did the fox find?", "completion": "The fox found a lamp."}) + "\n")
    assert run(TOKENIZE, "--tokenizer", base, "--chat", "-o", tmp_path / "talk.bin", talk).returncode == 0
    flags = ["--model", base, "--train", tmp_path / "talk.bin", "--seq", 64, "--batch", 1, "--lr", 3e-3, "--warmup", 5,
             "--sample-tokens", 0, "--threads", 1]

    def tune(*more):
        return run(TRAINER, *flags, *more) if program == "c" else forks.train(tmp_path, *flags, *more)
    done = tune("--steps", 60, "--out", tmp_path / "run")
    assert done.returncode == 0 and "template" not in done.stderr, done.stderr
    tuned = tmp_path / "run/step_00000060"
    text, ids = answer_of(tuned)
    assert text == "The fox found a lamp." and ids[-1] == IDS[EOT] and ids.count(IDS[EOT]) == 1
    for file in ("config.json", "generation_config.json"):
        assert said(tuned, file, "eos_token_id") == [IDS[EOS], IDS[EOT]]
    assert (tuned / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    assert (said(tuned, "tokenizer_config.json", "chat_template") is None) == (form != "built-in")
    assert form == "built-in" or (tuned / "chat_template.jinja").read_text() == FORM
    assert said(tuned, "config.json", "pad_token_id") == 5 and said(tuned, "config.json", "_unknown") == {"a": 1}
    assert said(tuned, "generation_config.json", "_kept") == [1, 2]
    # the same of adapters, and of what is made of them by the C program
    done = tune("--steps", 1, "--lora", 4, "--out", tmp_path / "lora")
    assert done.returncode == 0, done.stderr
    lora = tmp_path / "lora/step_00000001"
    assert said(lora, "generation_config.json", "eos_token_id") == [IDS[EOS], IDS[EOT]]
    for target in ("merged", "m.gguf"):
        assert run(TRAINER, "--model", lora, "--export", tmp_path / target).returncode == 0
    assert said(tmp_path / "merged", "config.json", "eos_token_id") == [IDS[EOS], IDS[EOT]]
    wanted = transformers.AutoTokenizer.from_pretrained(tuned).chat_template
    for folder in (lora, tmp_path / "merged"):
        assert transformers.AutoTokenizer.from_pretrained(folder).chat_template == wanted
    keys = gguf.GGUFReader(tmp_path / "m.gguf").fields
    found = {k: keys[f"tokenizer.{k}"].contents() for k in ("chat_template", "ggml.eos_token_id", "ggml.eot_token_id",
                                                            "ggml.padding_token_id", "ggml.add_bos_token")}
    assert list(found.values()) == [wanted, IDS[EOS], IDS[EOT], 5, True]


@pytest.mark.skipif(not TRAINER.exists() or not TALES.exists(), reason="train_llama3 and tinytales are not built")
def test_a_model_that_is_not_trained_on_answers_says_what_it_said(tmp_path):
    base = make_model(tmp_path / "base", tok_config={"clean_up_tokenization_spaces": True})
    rag = "additional_chat_templates/rag.jinja"  # where transformers 5 saves the templates that have names (its #36588)
    write(base / rag, "{{ messages }}")
    text = tmp_path / "text.txt"
    write(text, "The fox found a lamp. " * 40)
    assert run(TOKENIZE, "--tokenizer", base, "-o", tmp_path / "text.bin", text).returncode == 0
    done = run(TRAINER, "--model", base, "--train", tmp_path / "text.bin", "--seq", 32, "--batch", 1, "--steps", 1,
               "--sample-tokens", 0, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", rag):
        assert (tmp_path / "run/step_00000001" / file).read_bytes() == (base / file).read_bytes()
    assert said(tmp_path / "run/step_00000001", "config.json", "eos_token_id") == IDS[EOS]
