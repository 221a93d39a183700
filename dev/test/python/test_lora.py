"""Tests LoRA of ./train_llama3 against the package peft: losses of a run that begins with peft's adapter, our checkpoint in
peft, the merged model. Also tests resuming, refusals, and a checkpoint's contents."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))
import forks  # noqa: E402
import train_llama3 as ref  # noqa: E402
from dev.reference import folders, oracles, tokenfiles  # noqa: E402

VOCAB, B, T, STEPS, LR = 97, 2, 32, 20, 5e-3
ATTENTION, FFN = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
TRAIN = ["--train", "data.bin", "--batch", B, "--seq", T, "--sample-tokens", 0, "--threads", 1, "--schedule", "constant",
         "--lr", LR]


def run(*flags, cwd=None, code=0, python=False):
    """Runs the trainer; returns its output. An error is one line, exit 1."""
    done = forks.train(cwd, *flags) if python else \
        subprocess.run([ROOT / "train_llama3", *map(str, flags)], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    if code:
        assert "\\x" not in done.stderr  # the hint is a line
        assert [line for line in done.stderr.splitlines() if not line.startswith(("  hint: ", "warning: "))] == \
            [line for line in done.stderr.splitlines() if line.startswith("error: ")][:1], done.stderr
    return done.stdout if code == 0 else done.stderr


def losses(folder):
    events = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [e["loss"] for e in events if e["event"] == "step"]


def base_model(folder, tied=False, seed=1):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(vocab_size=VOCAB, hidden_size=48, intermediate_size=72, num_hidden_layers=2, head_dim=16,
                                      num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied,
                                      initializer_range=0.2, bos_token_id=None, eos_token_id=None)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return model


def with_adapter(model, targets, rank, alpha, telling=True, **more):
    """Wraps a model in peft's adapters. `telling`: their B is not zero."""
    torch.manual_seed(3)
    config = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM", **more)
    wrapped = peft.get_peft_model(model, config)
    for name, w in wrapped.named_parameters():
        if telling and "lora_B" in name:
            torch.nn.init.normal_(w, std=0.1)
    return wrapped


@pytest.fixture
def work(tmp_path):
    tokens = np.arange(3000) * 7 % 89 + np.arange(3000) // 41 % 8
    head = np.zeros(256, dtype="<i4")
    head[:4] = (20240801, 7, len(tokens), VOCAB)
    (tmp_path / "data.bin").write_bytes(head.tobytes() + tokens.astype("<u4").tobytes())
    return tmp_path


def batches(work, count):
    loader = tokenfiles.DataLoader(str(work / "data.bin"), B, T, seed=42, shuffle=True)
    return [loader.next(torch.device("cpu"), VOCAB) for _ in range(count)]


def mean_loss(model, x, y):
    return torch.nn.functional.cross_entropy(model(x).logits.view(-1, VOCAB), y.view(-1))


def peft_losses(model, data):
    """Trains the adapters with the trainer's AdamW; returns the loss before each step."""
    params = [p for p in model.parameters() if p.requires_grad]
    opt = torch.optim.AdamW(params, lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    out = []
    for x, y in data:
        opt.zero_grad()
        loss = mean_loss(model, x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        opt.step()
        out.append(loss.item())
    return out


@pytest.mark.parametrize("targets, rank, alpha, tied", [
    (ATTENTION + FFN, 4, 8, False), (["q_proj", "v_proj"], 3, 16, True), (["k_proj", "down_proj", "up_proj"], 5, 2.5, False),
    (ATTENTION, 33, 33, False)])
def test_losses_from_pefts_adapter_are_pefts(work, targets, rank, alpha, tied):
    model = with_adapter(base_model(work / "base", tied), targets, rank, alpha)
    model.peft_config["default"].base_model_name_or_path = str(work / "base")
    model.save_pretrained(work / "adapter")
    run("--model", "adapter", *TRAIN, "--steps", STEPS, "--out", "out", cwd=work)
    data = batches(work, STEPS)
    untrained = mean_loss(model, *data[-1]).item()
    want = peft_losses(model, data)
    got = losses(work / "out")
    assert np.abs(np.array(got) - want).max() <= 1e-4
    assert abs(want[-1] - untrained) > 1e-2  # the steps show
    # the last adapters are peft's too
    ours = load_file(work / "out/step_00000020/adapter_model.safetensors")
    theirs = peft.get_peft_model_state_dict(model)
    assert ours.keys() == theirs.keys()
    for name, w in ours.items():
        assert (w - theirs[name]).abs().max() <= 1e-4, name


@pytest.mark.parametrize("on", ["all", "ffn"])
def test_the_python_trainer_draws_the_same_adapters_and_prints_the_same_losses(work, on):
    base_model(work / "base", tied=on == "ffn")
    flags = ["--model", "base", "--lora", 5, "--lora-on", on, "--lora-alpha", 7, "--seed", 9, *TRAIN, "--steps", STEPS]
    run(*flags, "--total-batch", 2 * B * T, "--out", "c", cwd=work)
    run(*flags, "--total-batch", 2 * B * T, "--out", "py", "--device", "cpu", cwd=work, python=True)
    assert np.abs(np.array(losses(work / "c")) - losses(work / "py")).max() <= 1e-4
    ours, theirs = (load_file(work / f"{out}/step_00000020/adapter_model.safetensors") for out in ("c", "py"))
    assert ours.keys() == theirs.keys()
    for name, w in ours.items():
        assert (w - theirs[name]).abs().max() <= 1e-4, name
    # and each reads the other's checkpoint
    run("--model", "py/step_00000020", *TRAIN, "--steps", 3, "--out", "c2", cwd=work)
    run("--model", "c/step_00000020", *TRAIN, "--steps", 3, "--out", "py2", "--device", "cpu", cwd=work, python=True)
    assert np.abs(np.array(losses(work / "c2")) - losses(work / "py2")).max() <= 1e-4


@pytest.mark.parametrize("name", list(oracles.LORA_PAIRS))
def test_committed_pairs_equal_peft(monkeypatch, name):
    """The debug state's logits and gradients equal peft's, and the values of the script that wrote it."""
    monkeypatch.chdir(ROOT)  # the adapters name their base from there
    folder = ROOT / "dev/test/pairs" / name
    state = load_file(f"{folder}.state.safetensors")
    base = transformers.LlamaForCausalLM.from_pretrained(folders.base_folder(str(folder)), attn_implementation="eager").float()
    model = peft.PeftModel.from_pretrained(base, folder, is_trainable=True)
    x, y = state["x"].long(), state["y"].long()
    logits = model(x).logits
    assert (logits - state["logits"]).abs().max() <= 1e-4
    torch.nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), y.view(-1)).backward()
    grads = {n.replace(".default.", "."): p.grad for n, p in model.named_parameters() if p.requires_grad}
    assert {"grad." + n for n in grads} == {n for n in state if n.startswith("grad.")}
    for n, g in grads.items():
        assert (g - state["grad." + n]).abs().max() <= 1e-4 * g.abs().max(), n
    for (n, a), (_, b) in zip(ref.adapters(oracles.pair_model(name)), ref.adapters(ref.load_model(str(folder)))):
        assert (a - b).abs().max() <= 1e-7, n


def test_a_checkpoint_is_pefts_folder_and_opens_there(work):
    base = base_model(work / "base")
    out = run("--model", "base", "--lora", 4, *TRAIN, "--steps", 10, "--out", "out", cwd=work)
    assert "lora    rank 4, alpha 8, on q_proj k_proj v_proj o_proj gate_proj up_proj down_proj" in out
    step = work / "out/step_00000010"
    names = {p.name for p in step.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "state_rank00000.safetensors", "trainer_state.json"} <= names
    assert not names & {"config.json", "model.safetensors", "model.safetensors.index.json"}
    state = load_file(step / "state_rank00000.safetensors")
    assert {name.split(".", 1)[1] for name in state} == set(load_file(step / "adapter_model.safetensors"))
    model = peft.PeftModel.from_pretrained(base, step)
    x, y = batches(work, 1)[0]
    merged = mean_loss(model, x, y).item()
    with model.disable_adapter():
        assert abs(mean_loss(model, x, y).item() - merged) > 1e-2
    whole = tokenfiles.DataLoader(str(work / "data.bin"), 1, T)
    rows = [whole.next(torch.device("cpu"), VOCAB) for _ in range(whole.rows_per_epoch)]
    want = np.mean([mean_loss(model, x, y).item() for x, y in rows])
    shown = run("--model", "out", "--eval", "--val", "data.bin", "--seq", T, cwd=work)
    assert abs(float(shown.split("loss ")[1].split()[0]) - want) <= 1e-5
    # text: greedy ids equal the ids of transformers
    prompt = torch.tensor([[5, 12, 19]])
    ids = model.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=0)[0, 3:].tolist()
    shown = run("--model", step, "--generate", "5 12 19", "--tokens", 12, "--temperature", 0, cwd=work)
    assert shown.split()[-12:] == [str(i) for i in ids]
    assert "whole " in run("--verify", step)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_export_merges_as_peft_does(work, dtype):
    base_model(work / "first").to(dtype).save_pretrained(work / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(work / "base", dtype=dtype)
    model = with_adapter(base, ATTENTION + FFN, 4, 8)
    model.save_pretrained(work / "adapter")
    run("--model", work / "adapter", "--export", work / "merged", "--lora-base", work / "base")
    run("--model", work / "adapter", "--export", work / "merged.gguf", "--lora-base", work / "base", code=1)  # no tokenizer
    got, want = load_file(work / "merged/model.safetensors"), model.merge_and_unload().state_dict()
    untouched = load_file(work / "base/model.safetensors")
    assert "adapter_config.json" not in {p.name for p in (work / "merged").iterdir()}
    changed = 0
    for name, w in got.items():
        assert w.dtype == dtype
        step = torch.finfo(dtype).eps * want[name].float().abs()
        assert ((w.float() - want[name].float()).abs() <= step + 1e-7).all(), name
        changed += not torch.equal(w, untouched[name])
    assert changed == 14


def test_a_run_resumes_to_the_same_bits(work):
    base_model(work / "base")
    flags = ["--model", "base", "--lora", 4, "--lora-on", "ffn", *TRAIN, "--steps", 12, "--total-batch", 2 * B * T]
    run(*flags, "--out", "a", cwd=work)
    run(*flags, "--out", "b", "--stop-after", 5, "--threads", 2, cwd=work)
    run("--out", "b", "--resume", cwd=work)
    # killed in the middle of a step
    killed = subprocess.Popen([ROOT / "train_llama3", *map(str, flags), "--out", "c", "--checkpoint-every", "1"], cwd=work,
                              stdout=subprocess.DEVNULL)
    while len(list((work / "c").glob("step_????????"))) < 3 and killed.poll() is None:
        time.sleep(0.002)
    killed.kill()
    killed.wait()
    run("--out", "c", "--resume", cwd=work)
    for out in ("b", "c"):
        assert losses(work / "a") == losses(work / out)
        for name in ("adapter_model.safetensors", "state_rank00000.safetensors", "adapter_config.json"):
            assert (work / "a/step_00000012" / name).read_bytes() == (work / out / "step_00000012" / name).read_bytes()
    saved = [json.loads((work / out / "step_00000012/trainer_state.json").read_text()) for out in ("a", "b")]
    assert saved[0]["options"] == saved[1]["options"] and saved[0]["base_crc32c"] == saved[1]["base_crc32c"]
    assert json.loads((work / "b/step_00000012/adapter_config.json").read_text())["target_modules"] == FFN
    # the base may move
    shutil.move(work / "base", work / "moved")
    error = run("--out", "b", "--resume", "--steps", 14, cwd=work, code=1)
    assert "is no folder here" in error and "--lora-base" in error
    run("--verify", "b", cwd=work, code=1)
    assert "whole " in run("--verify", "b", "--lora-base", "moved", cwd=work)
    run("--out", "b", "--resume", "--steps", 14, "--lora-base", "moved", cwd=work)
    run("--out", "b", "--resume", "--steps", 15, cwd=work)


def test_only_the_adapters_take_memory_of_the_optimizer(work):
    base_model(work / "base")

    def memory(*flags):
        out = run("--model", "d4", *TRAIN, *flags, "--dry-run", cwd=work)
        return {line[8:30].strip(): float(line.split()[-2]) * {"KiB": 2**-10, "MiB": 1, "GiB": 2**10}[line.split()[-1]]
                for line in out.splitlines() if line.startswith("memory") and "need" not in line}
    full, lora = memory(), memory("--lora", 8)
    assert lora["weights"] == full["weights"] and full["gradients"] > 8
    for name in ("gradients", "m", "v", "adapters"):
        assert lora[name] <= 2, name


SPELLINGS = [  # `targets` and other arguments of peft.LoraConfig. 2 layers have so few matrices that all-linear becomes names
    dict(targets="all-linear"), dict(targets=["self_attn.q_proj", "mlp.down_proj"]),  # vllm-project/vllm#9275
    dict(targets=r".*\.(q_proj|v_proj)"), dict(targets=r".*proj", exclude_modules=["o_proj", "up_proj"]),
    dict(targets=None), dict(targets=["q_proj"], bias="all"), dict(targets=["q_proj"], use_rslora=True),
    dict(targets=["q_proj", "k_proj"], rank_pattern={"q_proj": 6, "k_proj": 6}),
    dict(targets=["v_proj"], layers_to_transform=[0, 1]), dict(targets=["o_proj"], fan_in_fan_out=True),
    *(dict(targets=["q_proj"], init_lora_weights=start) for start in (False, "gaussian", "orthogonal", "mica", "eva"))]


def loss_of(work, folder, *flags):
    shown = run("--model", folder, "--eval", "--val", "val.bin", "--seq", T, "--threads", 1, *flags, cwd=work)
    return float(shown.split("loss ")[1].split()[0])


def test_every_spelling_of_an_adapter_is_read_as_peft_reads_it(work):
    base_model(work / "base")
    header, tokens = np.split(np.fromfile(work / "data.bin", dtype="<i4"), [256])
    header[2] = 2 * T + 1
    np.concatenate([header, tokens[:2 * T + 1]]).tofile(work / "val.bin")
    x, y = (torch.from_numpy(tokens[i:2 * T + i].reshape(2, T)).long() for i in (0, 1))
    for i, spelling in enumerate(SPELLINGS):
        before = transformers.LlamaForCausalLM.from_pretrained(work / "base")
        model = with_adapter(before, rank=4, alpha=8, **spelling)
        model.save_pretrained(work / f"a{i}")
        with torch.no_grad():
            assert abs(loss_of(work, f"a{i}") - mean_loss(model, x, y).item()) <= 1e-5, spelling
    config = json.loads((work / "a2/adapter_config.json").read_text())
    tensors, want = load_file(work / "a2/adapter_model.safetensors"), loss_of(work, "a2")
    assert abs(want - loss_of(work, "base")) > 1e-3

    def written(change, name=lambda name: name):
        (work / "a2/adapter_config.json").write_text(json.dumps(config | change))
        save_file({name(n): w for n, w in tensors.items()}, work / "a2/adapter_model.safetensors")
        return loss_of(work, "a2")
    # names that transformers takes, one that peft takes, members that change nothing
    assert written({}, lambda n: n.removeprefix("base_model.model.")) == want
    assert written({}, lambda n: n.removeprefix("base_model.model.model.")) == want
    assert written({}, lambda n: n.replace(".weight", ".default.weight")) == want
    assert written({"loftq_config": {"loftq_bits": 4}, "corda_config": {"cache_file": "x"}, "new_group_size": 16}) == want
    # with the base's config.json beside it, it is the same adapter; with the weights, too, both readings are named
    shutil.copy(work / "base/config.json", work / "a2")
    assert loss_of(work, "a2") == want
    shutil.copy(work / "base/model.safetensors", work / "a2")
    assert "a whole model and adapters" in run("--model", "a2", "--generate", "1", cwd=work, code=1)
    assert loss_of(work, "a2", "--lora-base", "a2") == loss_of(work, "a2", "--lora-base", "base") == want
    out = run("--model", "a2", "--lora-base", "a2", *TRAIN, "--steps", 1, "--out", "out", cwd=work)
    assert "on q_proj v_proj" in out


def test_what_is_no_adapter_of_this_kind_is_refused(work):
    model = with_adapter(base_model(work / "base"), ATTENTION, 4, 8)
    model.save_pretrained(work / "adapter")
    config = json.loads((work / "adapter/adapter_config.json").read_text()) | {"base_model_name_or_path": str(work / "base")}
    tensors = load_file(work / "adapter/adapter_model.safetensors")
    first = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"

    def refused():
        return run("--model", "adapter", *TRAIN, "--steps", 2, "--out", "out", cwd=work, code=1)
    for change, part in [
            ({"peft_type": "IA3"}, 'peft_type is "IA3"'), ({"use_dora": True}, "use_dora is true"),
            ({"use_of_2027": True}, "use_of_2027 is true"), ({"kasa_config": {"rank": 2}}, "kasa_config is an object"),
            ({"r": 5}, "lora_A.weight.shape is [4, 48], wanted [5, 48]"),
            ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern is an object"),
            ({"modules_to_save": ["embed_tokens"]}, "modules_to_save is an array"), ({"lora_alpha": "x"}, 'lora_alpha is "x"'),
            ({"init_lora_weights": "pissa"}, 'init_lora_weights is "pissa"'),
            ({"init_lora_weights": "lora_ga"}, "this start changes the base's weights"),
            ({"target_modules": ["q_proj", "k_proj", "o_proj"]}, "target_modules does not name v_proj"),
            ({"layers_to_transform": [1]}, "layers_to_transform names 1 layers"),
            ({"base_model_name_or_path": None}, 'base_model_name_or_path is ""'),
            ({"base_model_name_or_path": "meta-llama/Llama-3.2-1B"}, "model.py meta-llama/Llama-3.2-1B downloads it"),
            ({"base_model_name_or_path": "/gone/to/base"}, "with --lora-base DIR\n")]:
        (work / "adapter/adapter_config.json").write_text(json.dumps(config | change))
        assert part in refused()
    (work / "adapter/adapter_config.json").write_text(json.dumps(config))
    for changed, part in [({first: torch.zeros(4, 40)}, "shape is [4, 40]"), ({first: torch.full((4, 48), np.nan)}, "is nan"),
                          ({"extra": torch.zeros(1)}, '"extra" is not one of'),
                          ({first.replace("q_proj", "gate_proj"): torch.zeros(4, 48)}, "does not name gate_proj"),
                          ({first: tensors[first].to(torch.int8)}, "dtype is I8")]:
        save_file(tensors | changed, work / "adapter/adapter_model.safetensors")
        assert part in refused()
    # layers without adapters, ranks that differ (EVA's), the old format of peft
    for options, part in [({"layers_to_transform": [1]}, "wanted the same adapters in every layer"),
                          ({"rank_pattern": {"layers.0.self_attn.q_proj": 2}}, "rank_pattern is an object, wanted one rank for all")]:
        model = with_adapter(transformers.LlamaForCausalLM.from_pretrained(work / "base"), ["q_proj"], 4, 8, **options)
        model.save_pretrained(work / "adapter")
        assert part in refused()
    model.save_pretrained(work / "adapter", safe_serialization=False)
    (work / "adapter/adapter_model.safetensors").unlink()
    assert "holds adapter_model.bin" in refused()
    peft.AutoPeftModelForCausalLM.from_pretrained(work / "adapter").save_pretrained(work / "again")  # as the hint says
    assert (work / "again/adapter_model.safetensors").exists() and not (work / "out").exists()


def test_flags_that_do_not_fit_are_refused(work):
    base_model(work / "base")
    base_model(work / "other", seed=2)
    run("--model", "base", "--lora", 4, *TRAIN, "--steps", 2, "--out", "lora", cwd=work)
    run("--model", "base", *TRAIN, "--steps", 2, "--out", "full", cwd=work)
    before = sorted(p.name for p in work.iterdir())
    for flags, part in [
            (["--model", "d2", "--lora", 4, "--out", "x"], "d2 is a new model"),
            (["--model", "work", "--lora", 4], "neither a folder"),
            (["--model", "base", "--lora-alpha", 4, "--out", "x"], "without --lora R"),
            (["--model", "base", "--lora-on", "ffn", "--out", "x"], "without --lora R"),
            (["--model", "base", "--lora-base", "base", "--out", "x"], "base holds no adapters"),
            (["--model", "base", "--lora", 4, "--lora-base", "other", "--out", "x"], "new adapters stand beside"),
            (["--model", "base", "--lora", 4, "--lora-alpha", 1e-9, "--out", "x"], "at least 1e-06"),
            (["--resume", "--out", "full", "--lora", 4, "--steps", 4], "trains all weights"),
            (["--resume", "--out", "lora", "--lora", 8, "--steps", 4], "have rank 4"),
            (["--resume", "--out", "lora", "--lora-base", "other", "--steps", 4], "were trained beside weights with"),
            (["--model", "lora", "--lora-base", "other", "--out", "x"], "were trained beside weights with"),
            (["--model", "lora", "--lora-alpha", 3, "--out", "x"], "have 8"),
            (["--model", "lora", "--lora-on", "ffn", "--out", "x"], "other matrices"),
            (["--model", "lora", "--lora-base", "lora/step_00000002", "--out", "x"], "wanted their base model"),
            (["--model", "lora", "--lora-base", "full", "--out", "x"], "did you mean full/step_00000002?")]:
        error = run(*TRAIN, "--steps", 4, *flags, cwd=work, code=1)
        assert part in error, error
    done = subprocess.run([ROOT / "train_llama3", "--model", "base", "--lora-r", "4"], cwd=work, capture_output=True, text=True,
                          check=False)
    assert done.returncode == 2 and "did you mean --lora?" in done.stderr
    assert "were trained beside" in run("--model", "lora", "--lora-base", "other", "--generate", "1 2", cwd=work, code=1)
    assert "were trained beside" in run("--model", "lora", "--lora-base", "other", "--export", "y", cwd=work, code=1)
    run("--verify", "lora", "--lora-base", "other", cwd=work, code=1)
    assert sorted(p.name for p in work.iterdir()) == before
    assert [p.name for p in (work / "lora").iterdir() if p.is_dir()] == ["step_00000002"]
