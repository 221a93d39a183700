"""Tests --export: files of ./train_llama3, read by safetensors and by the gguf package, equal the source folder."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")
gguf = pytest.importorskip("gguf")
torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")

ROOT = Path(__file__).resolve().parents[3]
PAIRS = ROOT / "dev/test/pairs"
NAMES = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
         "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
         "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
BYTES = [chr(b) for b in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))]


def export(*flags):
    return subprocess.run([ROOT / "train_llama3", *map(str, flags)], capture_output=True, text=True, check=False)


def write_tokenizer(folder, vocab, pre=None, merges=None):
    """Writes a tokenizer.json of all bytes, the words of `merges`, and two special tokens; fits any vocabulary above 300."""
    extra = iter(range(0x100, 0x200))
    names = [chr(b) if chr(b) in BYTES else chr(next(extra)) for b in range(256)]
    merges = merges or [["t", "h"], ["th", "e"], ["Ġ", "the"], ["i", "n"]]
    names += ["".join(m) for m in merges]
    added = [{"id": len(names) + i, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False, "special": i < 2}
             for i, text in enumerate(["<|begin_of_text|>", "<|end_of_text|>", "[name]"])]
    assert len(names) + len(added) <= vocab
    (folder / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": pre or {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None, "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {name: i for i, name in enumerate(names)}, "merges": merges}}), encoding="utf-8")
    return names, added


def random_model(folder, hidden=64, ffn=160, heads=4, kv=2, layers=2, vocab=320, rope=None):
    """Writes a Llama folder with random weights and a tokenizer. Returns its tensors."""
    folder.mkdir()
    head = hidden // heads
    torch.manual_seed(7)
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}
    for i in range(layers):
        for name, shape in (("self_attn.q_proj", (heads * head, hidden)), ("self_attn.k_proj", (kv * head, hidden)),
                            ("self_attn.v_proj", (kv * head, hidden)), ("self_attn.o_proj", (hidden, heads * head)),
                            ("mlp.gate_proj", (ffn, hidden)), ("mlp.up_proj", (ffn, hidden)), ("mlp.down_proj", (hidden, ffn)),
                            ("input_layernorm", (hidden,)), ("post_attention_layernorm", (hidden,))):
            shapes[f"model.layers.{i}.{name}.weight"] = shape
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    tensors["lm_head.weight"][3] = 0  # a row of zeros has no scale
    safetensors.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = dict(model_type="llama", architectures=["LlamaForCausalLM"], vocab_size=vocab, hidden_size=hidden,
                  intermediate_size=ffn, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv,
                  rope_theta=500000.0, rms_norm_eps=1e-5, max_position_embeddings=2048, tie_word_embeddings=False)
    if rope:
        config["rope_scaling"] = rope
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return tensors, heads, kv


def expected(tensors, heads, kv):
    """Returns the tensors by their GGUF names; the rows of q and k as neighbours, as llama.cpp's converter places them."""
    result = {}
    for name, w in tensors.items():
        w = w.to(torch.float32).numpy()
        if ".q_proj." in name or ".k_proj." in name:
            n = heads if ".q_proj." in name else kv
            w = w.reshape(n, 2, w.shape[0] // n // 2, w.shape[1]).swapaxes(1, 2).reshape(w.shape)
        parts = name.split(".")
        if parts[1] == "layers":
            result[f"blk.{parts[2]}.{NAMES['.'.join(parts[3:-1])]}.weight"] = w
        else:
            result[{"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
                    "lm_head.weight": "output.weight"}[name]] = w
    return result


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0"])
def test_gguf_holds_every_tensor_as_the_gguf_package_packs_it(tmp_path, dtype):
    tensors, heads, kv = random_model(tmp_path / "m")
    write_tokenizer(tmp_path / "m", 320)
    done = export("--model", tmp_path / "m", "--export", tmp_path / "m.gguf", "--export-dtype", dtype)
    assert done.returncode == 0 and not done.stderr, done.stderr
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    want = expected(tensors, heads, kv)
    assert {t.name for t in reader.tensors} == set(want)
    kind = getattr(gguf.GGMLQuantizationType, dtype.upper())
    for t in reader.tensors:
        own = gguf.GGMLQuantizationType.F32 if want[t.name].ndim == 1 else kind
        assert t.tensor_type == own and list(t.shape) == list(reversed(want[t.name].shape)), t.name
        packed = gguf.quants.quantize(want[t.name], own)
        assert np.array_equal(t.data.view(np.uint8).ravel(), packed.view(np.uint8).ravel()), t.name


def test_rows_that_are_no_multiple_of_32_stay_f16(tmp_path):
    random_model(tmp_path / "m", ffn=136)
    write_tokenizer(tmp_path / "m", 320)
    assert export("--model", tmp_path / "m", "--export", tmp_path / "m.gguf", "--export-dtype", "q8_0").returncode == 0
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert kinds["blk.0.ffn_down.weight"] == "F16" and kinds["blk.0.ffn_up.weight"] == "Q8_0"


def test_gguf_tells_the_shape_of_the_model(tmp_path):
    random_model(tmp_path / "m")
    names, added = write_tokenizer(tmp_path / "m", 320)
    assert export("--model", tmp_path / "m", "--export", tmp_path / "m.gguf").returncode == 0
    field = {k: f.contents() for k, f in gguf.GGUFReader(tmp_path / "m.gguf").fields.items()}
    shape = dict(block_count=2, context_length=2048, embedding_length=64, feed_forward_length=160, vocab_size=320)
    assert {k: field[f"llama.{k}"] for k in shape} == shape
    assert field["llama.attention.head_count"] == 4 and field["llama.attention.head_count_kv"] == 2
    assert field["llama.rope.dimension_count"] == 16 and field["llama.rope.freq_base"] == 500000
    assert field["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)
    assert field["general.architecture"] == "llama" and field["general.name"] == "m"
    tokens = field["tokenizer.ggml.tokens"]
    assert tokens[:len(names)] == names and tokens[len(names):len(names) + 3] == [a["content"] for a in added]
    assert tokens[-1] == "[PAD319]" and len(set(tokens)) == 320
    assert field["tokenizer.ggml.token_type"] == [1] * len(names) + [3, 3, 4] + [5] * (320 - len(names) - 3)
    assert field["tokenizer.ggml.merges"] == ["t h", "th e", "Ġ the", "i n"]
    assert field["tokenizer.ggml.bos_token_id"] == len(names) and field["tokenizer.ggml.add_bos_token"] is False  # no post-processor


def test_of_several_chat_templates_the_default_one_is_taken(tmp_path):
    random_model(tmp_path / "m")
    write_tokenizer(tmp_path / "m", 320)
    templates = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ messages }}"}]
    (tmp_path / "m/tokenizer_config.json").write_text(json.dumps({"chat_template": templates}), encoding="utf-8")
    assert export("--model", tmp_path / "m", "--export", tmp_path / "m.gguf").returncode == 0
    field = gguf.GGUFReader(tmp_path / "m.gguf").fields["tokenizer.chat_template"]
    assert bytes(field.parts[field.data[0]]) == b"{{ messages }}"


def test_llama3_rope_becomes_divisors(tmp_path):
    rope = dict(rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
    random_model(tmp_path / "m", rope=rope)
    write_tokenizer(tmp_path / "m", 320)
    assert export("--model", tmp_path / "m", "--export", tmp_path / "m.gguf").returncode == 0
    divisors = next(t.data for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors if t.name == "rope_freqs.weight")
    wave = 2 * np.pi * 500000.0 ** (np.arange(0, 16, 2) / 16)
    smooth = (64 / wave - 1) / 3
    want = np.where(wave < 16, 1, np.where(wave > 64, 32, 1 / ((1 - smooth) / 32 + smooth)))
    assert np.allclose(divisors, want, rtol=1e-5) and len(set(want)) > 2


def test_the_three_split_patterns_have_names_and_another_is_refused(tmp_path):
    random_model(tmp_path / "m")
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    llama = ("(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|%s| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|"
             "\\s+(?!\\S)|\\s+")

    def split(digits):
        step = {"type": "Split", "pattern": {"Regex": llama % digits}, "behavior": "Isolated", "invert": False}
        return {"type": "Sequence", "pretokenizers": [step, bytes_]}
    digits = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True},
                                                    {**bytes_, "use_regex": True}]}
    for pre, name in ((None, "gpt-2"), (digits, "smollm"), (split("\\p{N}{1,3}"), "llama-bpe")):
        write_tokenizer(tmp_path / "m", 320, pre)
        assert export("--model", tmp_path / "m", "--export", tmp_path / "m.gguf").returncode == 0
        assert gguf.GGUFReader(tmp_path / "m.gguf").fields["tokenizer.ggml.pre"].contents() == name
        (tmp_path / "m.gguf").unlink()
    write_tokenizer(tmp_path / "m", 320, split("\\p{N}"))
    done = export("--model", tmp_path / "m", "--export", tmp_path / "m.gguf")
    assert done.returncode == 1 and "split pattern" in done.stderr and done.stderr.count("error:") == 1
    assert not list(tmp_path.glob("m.gguf*"))
    unknown = {"type": "Split", "pattern": {"Regex": "a+"}, "behavior": "Isolated", "invert": False}
    write_tokenizer(tmp_path / "m", 320, {"type": "Sequence", "pretokenizers": [unknown, bytes_]})
    done = export("--model", tmp_path / "m", "--export", tmp_path / "m.gguf")
    assert done.returncode == 1 and done.stderr.startswith("error: ") and 'Regex is "a+", wanted' in done.stderr, done.stderr
    assert not list(tmp_path.glob("m.gguf*"))
    done = export("--model", tmp_path / "m", "--export", tmp_path / "x")
    assert done.returncode == 0 and "has none" not in done.stderr, "the file is copied as it is"
    assert (tmp_path / "x/tokenizer.json").read_bytes() == (tmp_path / "m/tokenizer.json").read_bytes()
    (tmp_path / "m/tokenizer.json").unlink()
    done = export("--model", tmp_path / "m", "--export", tmp_path / "y")
    assert done.stderr == "warning: there is no tokenizer: the export has none either\n"


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_a_folder_is_clean_and_equal(tmp_path, dtype):
    tensors, _, _ = random_model(tmp_path / "m")
    write_tokenizer(tmp_path / "m", 320)
    (tmp_path / "m/LICENSE").write_text("free", encoding="utf-8")
    (tmp_path / "m/trainer_state.json").write_text("{}", encoding="utf-8")
    done = export("--model", tmp_path / "m", "--export", tmp_path / "new/x", "--export-dtype", dtype)
    assert done.returncode == 0, done.stderr
    kind = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[dtype]
    got = safetensors.load_file(tmp_path / "new/x/model.safetensors")
    assert all(torch.equal(got[name], w.to(kind)) for name, w in tensors.items()) and len(got) == len(tensors)
    files = {p.name for p in (tmp_path / "new/x").iterdir()}
    assert files == {"model.safetensors.index.json", "config.json", "generation_config.json", "model.safetensors", "LICENSE",
                                                        "tokenizer.json", "tokenizer_config.json"}
    assert not list((tmp_path / "new").glob("*.tmp"))
    again = export("--model", tmp_path / "m", "--export", tmp_path / "new/x")
    assert again.returncode == 1 and "exists" in again.stderr
    slash = export("--model", tmp_path / "m", "--export", f"{tmp_path}/new/y/")
    assert slash.returncode == 0 and slash.stdout.endswith("/new/y\n"), slash.stderr


def test_bad_requests_write_nothing(tmp_path):
    random_model(tmp_path / "m")
    done = export("--model", tmp_path / "m", "--export", tmp_path / "x.gguf")
    assert done.returncode == 1 and "no tokenizer" in done.stderr
    write_tokenizer(tmp_path / "m", 320)
    done = export("--model", tmp_path / "m", "--export", tmp_path / "x", "--export-dtype", "q8_0")
    assert done.returncode == 2 and "q8_0" in done.stderr
    done = export("--model", tmp_path / "m", "--export", tmp_path / "x.gguf", "--eval")
    assert done.returncode == 2 and "two jobs" in done.stderr
    done = export("--model", tmp_path / "m", "--export", "")
    assert done.returncode == 2 and "error: --export: is empty" in done.stderr
    bad = shutil.copytree(tmp_path / "m", tmp_path / "bad")
    tensors = safetensors.load_file(bad / "model.safetensors")
    tensors["model.norm.weight"][5] = float("nan")
    safetensors.save_file(tensors, bad / "model.safetensors", metadata={"format": "pt"})
    done = export("--model", bad, "--export", tmp_path / "x.gguf")
    assert done.returncode == 1 and "model.norm.weight is nan at [5]" in done.stderr
    assert not list(tmp_path.glob("x*"))


def test_loaders_that_take_every_safetensors_file_take_the_weights_alone(tmp_path):
    """vLLM's and SGLang's rule for a local folder: all *.safetensors, without files that an index does not name."""
    data = tmp_path / "d.bin"
    text = tmp_path / "t.txt"
    text.write_text("a word and another\n" * 200, encoding="utf-8")
    assert subprocess.run([ROOT / "tokenize", "-o", data, text], capture_output=True, check=False).returncode == 0
    done = export("--model", "d1", "--train", data, "--seq", 16, "--batch", 1, "--steps", 1, "--sample-tokens", 0,
                  "--threads", 1, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    step = tmp_path / "out/step_00000001"
    assert export("--model", step, "--export", tmp_path / "clean").returncode == 0
    for folder in (step, tmp_path / "clean"):
        index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
        taken = {p.name for p in folder.glob("*.safetensors")} & set(index["weight_map"].values())
        assert taken == {"model.safetensors"}
        assert set(safetensors.load_file(folder / "model.safetensors")) == set(index["weight_map"])
    assert (step / "state_rank00000.safetensors").exists()
