"""Tests model folders against transformers and safetensors: each side opens what the other writes, with equal tensors and
equal logits. copy.c has our reader and writer."""

import json
import shutil
import subprocess
from pathlib import Path

import forks
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors")
pytest.importorskip("safetensors.torch")

HERE = Path(__file__).resolve().parent
LLAMA3 = dict(rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)


@pytest.fixture(scope="session")
def model_copy():
    program = forks.built("copy")

    def copy(source, target, dtype="F32"):
        Path(target).mkdir(exist_ok=True)
        return subprocess.run([str(program), str(source), str(target), dtype], capture_output=True, text=True)

    return copy


def make(tied=False, kv=2, rope=None, **more):
    torch.manual_seed(3)
    shape = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, head_dim=16)
    parameters = dict(rope or dict(rope_type="default"), rope_theta=500000.0)
    given = dict(num_key_value_heads=kv, tie_word_embeddings=tied, rope_parameters=parameters)
    config = transformers.LlamaConfig(**{**shape, **given, **more})
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():  # norms that are not all ones
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(torch.randn_like(p) * 0.1)
    return model


def load(folder, **more):
    return transformers.LlamaForCausalLM.from_pretrained(folder, **more).eval()


def logits(model):
    tokens = torch.arange(40).reshape(2, 20) * 7 % 97
    with torch.no_grad():
        return model(tokens).logits


def same_tensors(a, b):
    a, b = a.state_dict(), b.state_dict()
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shards", [False, True])
def test_every_dtype_tied_or_not_in_one_file_or_shards_comes_back_equal(model_copy, tmp_path, dtype, tied, shards):
    torch_dtype = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}[dtype]
    model = make(tied=tied).to(torch_dtype)
    model.save_pretrained(tmp_path / "hf", **({"max_shard_size": "8KB"} if shards else {}))
    assert (tmp_path / "hf/model.safetensors.index.json").exists() == shards
    done = model_copy(tmp_path / "hf", tmp_path / "ours", dtype)
    assert done.returncode == 0, done.stderr
    ours = load(tmp_path / "ours", dtype="auto")
    same_tensors(model, ours)
    # not `model` itself: .to(bfloat16) rounds its inv_freq too, loading does not
    assert torch.equal(logits(load(tmp_path / "hf", dtype="auto")), logits(ours))
    with safetensors.safe_open(tmp_path / "ours/model.safetensors", "pt") as f:
        assert f.metadata() == {"format": "pt"}
        assert ("lm_head.weight" in f.keys()) == (not tied)
        for name in f.keys():
            assert torch.equal(f.get_tensor(name), model.state_dict()[name])
        index = json.loads((tmp_path / "ours/model.safetensors.index.json").read_text())
        assert index["weight_map"] == {name: "model.safetensors" for name in f.keys()}
        sizes = [t.numel() * t.element_size() for t in map(f.get_tensor, f.keys())]
        assert index["metadata"] == {"total_size": sum(sizes)}


@pytest.mark.parametrize("kv", [1, 2, 4])
@pytest.mark.parametrize("factor", [None, 8.0, 32.0])
def test_rope_and_grouped_heads_survive_the_copy(model_copy, tmp_path, kv, factor):
    model = make(kv=kv, rope=dict(LLAMA3, factor=factor) if factor else None)
    model.save_pretrained(tmp_path / "hf")
    assert model_copy(tmp_path / "hf", tmp_path / "ours").returncode == 0
    ours = load(tmp_path / "ours")
    assert torch.equal(logits(model), logits(ours))
    config = json.loads((tmp_path / "ours/config.json").read_text())
    # transformers 4 reads rope_theta and rope_scaling, transformers 5 rope_parameters
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 500000.0
    assert config["dtype"] == config["torch_dtype"] == "float32"
    if factor:
        assert config["rope_scaling"]["factor"] == config["rope_parameters"]["factor"] == factor
        assert config["rope_scaling"]["rope_type"] == "llama3"
    else:
        assert config["rope_scaling"] is None


def test_every_rope_spelling_gives_transformers_logits(model_copy, tmp_path):
    model = make(rope=LLAMA3)
    model.save_pretrained(tmp_path / "hf")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    parameters = config.pop("rope_parameters")
    theta = parameters.pop("rope_theta")
    old = dict(parameters)
    old["type"] = old.pop("rope_type")
    for i, rope in enumerate((
        dict(rope_theta=theta, rope_scaling=parameters),
        dict(rope_theta=theta, rope_scaling=old),
        dict(rope_parameters=dict(parameters, rope_theta=theta)),
        dict(rope_theta=theta, rope_parameters=parameters),
        dict(rope_theta=theta, rope_scaling=parameters, rope_parameters=dict(parameters, rope_theta=theta)),
        dict(rope_theta=theta, rope_scaling=dict(parameters, original_max_position_embeddings=4096), original_max_position_embeddings=16),
    )):
        (tmp_path / "hf/config.json").write_text(json.dumps({**config, **rope}))
        done = model_copy(tmp_path / "hf", tmp_path / f"ours{i}")
        assert done.returncode == 0, done.stderr
        assert torch.equal(logits(model), logits(load(tmp_path / f"ours{i}"))), rope


def test_rounding_to_16_bits_is_pytorchs(model_copy, tmp_path):
    model = make()
    with torch.no_grad():  # halfway cases, subnormals, overflow
        flat = model.model.embed_tokens.weight.view(-1)
        ties = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, 2.9802322e-08]
        special = torch.tensor(ties + [65519.0, 65520.0, 1e-7, 6e-8, 3e-8, -0.0, 3e38, 1e-40])
        flat[: len(special)] = special
        flat[100:2000] = torch.exp(torch.randn(1900) * 12)
    for name, dtype in (("BF16", torch.bfloat16), ("F16", torch.float16)):
        model.save_pretrained(tmp_path / "hf")
        if dtype == torch.float16:  # a finite weight that would become infinite is refused
            refused = model_copy(tmp_path / "hf", tmp_path / name, name)
            assert refused.returncode == 1 and "embed_tokens" in refused.stderr, refused.stderr
            with torch.no_grad():
                flat.clamp_(max=65519.0)
            model.save_pretrained(tmp_path / "hf")
        made = model_copy(tmp_path / "hf", tmp_path / name, name)
        assert made.returncode == 0, made.stderr
        with safetensors.safe_open(tmp_path / name / "model.safetensors", "pt") as f:
            for key in f.keys():
                want = model.state_dict()[key].to(dtype)
                assert torch.equal(f.get_tensor(key).view(torch.int16), want.view(torch.int16)), key


def test_mixed_dtypes_inv_freq_and_an_equal_head_are_read(model_copy, tmp_path):
    model = make(tied=True)
    model.save_pretrained(tmp_path / "hf")
    tensors = {k: v.clone() for k, v in model.state_dict().items()}
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.bfloat16)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    safetensors.torch.save_file(tensors, tmp_path / "hf/model.safetensors", {"format": "pt"})
    done = model_copy(tmp_path / "hf", tmp_path / "ours")
    assert done.returncode == 0, done.stderr
    with safetensors.safe_open(tmp_path / "ours/model.safetensors", "pt") as f:
        assert "lm_head.weight" not in f.keys() and not any("inv_freq" in k for k in f.keys())
        assert torch.equal(f.get_tensor("model.norm.weight"), tensors["model.norm.weight"].float())
    tensors["lm_head.weight"][3, 5] += 1
    safetensors.torch.save_file(tensors, tmp_path / "hf/model.safetensors", {"format": "pt"})
    done = model_copy(tmp_path / "hf", tmp_path / "ours")
    assert done.returncode == 1 and "lm_head.weight[3, 5]" in done.stderr


HEAD, INV_FREQ = "lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"


@pytest.mark.parametrize("tied", [False, True])
def test_names_and_indexes_are_read_as_transformers_reads_them(model_copy, tmp_path, tied):
    """Old indexes list inv_freq or a tied head that no shard has, or shards have one that no index lists (Blaizzy/mlx-vlm#1827,
    vllm-project/vllm#54230)."""
    model = make(tied=tied)
    model.save_pretrained(tmp_path / "hf", max_shard_size="16KB")
    weight_map = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())["weight_map"]
    files = sorted(set(weight_map.values()))
    norm, ours = "model.norm.weight", iter(range(99))

    def opens(index=lambda names: names, tensors=lambda names: names, oracle=True):
        """Changes the index, and the tensors of every file; returns what our reader says, or asserts that it read the model."""
        folder, copy = tmp_path / f"in{next(ours)}", tmp_path / f"out{next(ours)}"
        shutil.copytree(tmp_path / "hf", folder)
        changed = {"metadata": {}, "weight_map": index(dict(weight_map))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(changed))
        for file in files:
            held = safetensors.torch.load_file(folder / file)
            safetensors.torch.save_file(tensors(held), folder / file, {"format": "pt"})
        done = model_copy(folder, copy)
        if done.returncode == 0:
            same_tensors(model, load(copy))
            assert not oracle or torch.equal(logits(load(folder)), logits(model))
        return done.stderr
    assert not opens(lambda names: names | {INV_FREQ: files[0]}) and not opens(lambda names: names | {norm: files[0]})
    assert not opens(tensors=lambda held: held | ({INV_FREQ: torch.ones(4)} if norm in held else {}))
    assert not opens(lambda names: {name: file for name, file in names.items() if name != norm})
    assert not opens(lambda names: names | {"a": files[0]})
    # a model without its head has other names, and its config.json another architecture
    assert not opens(tensors=lambda held: {name.removeprefix("model."): w for name, w in held.items()})
    assert not opens(tensors=lambda held: {"model." + name: w for name, w in held.items()})
    if tied:
        assert not opens(lambda names: names | {HEAD: files[0]})
        assert not opens(tensors=lambda held: held | {HEAD: w.clone() for name, w in held.items() if "embed" in name})
        transformers.LlamaModel.from_pretrained(tmp_path / "hf").save_pretrained(tmp_path / "inner")
        assert model_copy(tmp_path / "inner", tmp_path / "whole").returncode == 0
        same_tensors(model, load(tmp_path / "whole"))
    # what we do not compute, or cannot know, is refused
    assert '"x.bias" is not part of' in opens(tensors=lambda held: held | ({"x.bias": torch.ones(2)} if norm in held else {}))
    assert f'"{norm}" is missing' in opens(tensors=lambda held: {name: w for name, w in held.items() if name != norm} or
                                           {INV_FREQ: torch.ones(4)}, oracle=False)
    assert f'"_orig_mod.{norm}"' in opens(  # torch.compile()'s prefix (huggingface/transformers#28041)
        tensors=lambda held: {("_orig_mod." if name == norm else "") + name: w for name, w in held.items()})
    assert "which is not in the folder" in opens(lambda names: names | {INV_FREQ: "gone.safetensors"})


def test_of_two_tensors_with_one_name_the_last_file_counts_as_in_transformers(model_copy, tmp_path):
    make().save_pretrained(tmp_path / "hf", max_shard_size="16KB")
    weight_map = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())["weight_map"]
    files, name = sorted(set(weight_map.values())), "model.layers.1.mlp.up_proj.weight"
    assert files[0] < weight_map[name] < files[-1]
    for file, shape in ((files[0], (48, 32)), (files[0], (2, 2)), (files[-1], (48, 32))):
        shutil.copytree(tmp_path / "hf", tmp_path / "two", dirs_exist_ok=True)
        held = safetensors.torch.load_file(tmp_path / "two" / file)
        safetensors.torch.save_file(held | {name: torch.rand(shape)}, tmp_path / "two" / file, {"format": "pt"})
        done = model_copy(tmp_path / "two", tmp_path / "ours")
        assert done.returncode == 0, done.stderr
        same_tensors(load(tmp_path / "two"), load(tmp_path / "ours"))


@pytest.mark.parametrize("more, part", [
    (dict(attention_bias=True), "attention_bias is true"),
    (dict(mlp_bias=True), "mlp_bias is true"),
    (dict(hidden_act="gelu"), "hidden_act is \"gelu\""),
    (dict(rope=dict(rope_type="linear", factor=2.0)), "rope_type is \"linear\""),
])
def test_models_that_would_be_computed_wrongly_are_refused(model_copy, tmp_path, more, part):
    make(**more).save_pretrained(tmp_path / "hf")
    done = model_copy(tmp_path / "hf", tmp_path / "ours")
    assert done.returncode == 1 and part in done.stderr and "config.json" in done.stderr, done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_other_architectures_are_refused_by_name(model_copy, tmp_path):
    shape = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
    config = transformers.MistralConfig(**shape, num_key_value_heads=2)
    transformers.MistralForCausalLM(config).save_pretrained(tmp_path / "hf")
    done = model_copy(tmp_path / "hf", tmp_path / "ours")
    assert done.returncode == 1 and "model_type is \"mistral\"" in done.stderr


def test_generation_config_opens(model_copy, tmp_path):
    model = make(bos_token_id=5, eos_token_id=[6, 7])
    model.save_pretrained(tmp_path / "hf")
    assert model_copy(tmp_path / "hf", tmp_path / "ours").returncode == 0
    generation = transformers.GenerationConfig.from_pretrained(tmp_path / "ours")
    assert generation.bos_token_id == 5 and generation.eos_token_id == [6, 7]
    assert load(tmp_path / "ours").config.eos_token_id == [6, 7]
