"""oracles.py -- writes the oracles of the tests: models whose weights show every fault, and debug states of PyTorch's results.

A debug state is one safetensors file that another implementation must reproduce; see write_state(). 16-bit implementations are
judged by PyTorch's own errors in 16 bits, which the file's metadata holds.

    python3 -m dev.reference.oracles dev/test/pairs      writes those that are committed"""
import contextlib
import copy
import inspect
import math
import os
import sys

import torch
import torch.nn as nn

from dev.reference.config import Config, config_of, preset
from dev.reference.folders import save_tensors
from dev.reference.fp8 import fits_fp8, use_fp8
from dev.reference.log import die
from dev.reference.rand import philox, rand_normal_
from train_llama3 import (LORA_ON, MuonAndAdamW, adamw, adapters, add_lora, hf_tensors, init_weights, load_model, make_model,
                          save_adapters, save_model, trained_parameters, trained_tensors)

# ----------------------------------------------------------------------------------------------------------------------
# weights and tokens


@torch.no_grad()
def init_telling(model, seed, embedding_std=0.02):
    """Sets weights for tests, so large that every detail of the model shows in its logits: attention that is not flat, uneven
    gains, a first residual stream so small that eps matters. Larger weights would lift the errors of 16-bit runs. With these,
    rounding to BF16 changes the norm of a small gradient by 0.3 % (root mean square, seeds 500 to 529). 16-bit builds must
    keep it within 1 % where PyTorch does."""
    for ordinal, (name, w) in enumerate(hf_tensors(model)):
        if w.dim() == 1:
            rand_normal_(w, 0.25, seed, ordinal, mean=1.0)
        else:
            rand_normal_(w, embedding_std if "embed_tokens" in name else 0.08, seed, ordinal)


def random_tokens(c, B, T, seed):
    """Returns x, y (B, T) int64, y shifted by one. Nothing else draws from purpose 99 of the generator."""
    w = philox(seed, 99, 0, torch.arange(B * (T + 1), dtype=torch.int64))[0]
    rows = ((w * c.vocab_size) >> 32).view(B, T + 1)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


# ----------------------------------------------------------------------------------------------------------------------
# PyTorch's own errors in 16 bits

# the types of 16-bit builds with their loss scales; FP16's keeps small gradients out of the denormals
TYPES_16BIT = (("bf16", torch.bfloat16, 1.0), ("fp16", torch.float16, 1024.0))
FP8 = ("fp8", torch.bfloat16, 1.0)  # BF16 with --fp8
FP8_HEAD = ("fp8_head", torch.bfloat16, 1.0)  # and --fp8-head
RUNS_16BIT = 8
GRADIENT_RUNS_16BIT = 16


def perturbed(model, dtype, run):
    """Returns a copy of a model in which every weight differs by at most one rounding to `dtype`, in each run by another."""
    rounding, generator, out = torch.finfo(dtype).eps / 2, torch.Generator().manual_seed(run), copy.deepcopy(model)
    with torch.no_grad():
        for w in out.parameters():
            w.mul_(1 + rounding * (2 * torch.rand(w.shape, generator=generator) - 1).to(w.device))
    return out


def gradients(model, batch, loss_scale=1.0):
    """Returns {name: gradient in fp32} of the trained tensors."""
    model.zero_grad()
    (model(*batch) * loss_scale).backward()
    return {name: g.float() / loss_scale for name, g in trained_tensors(model, lambda p: p.grad)}


def as_kind(model, kind):
    """Makes a 16-bit model compute as a kind of run: "bf16", "fp16", "fp8" or "fp8_head". Returns the model."""
    return use_fp8(model, kind == "fp8_head") if kind.startswith("fp8") else model


def gradient_errors_16bit(model, dtype, loss_scale, batch, kind=""):
    """Compares the gradients of PyTorch's 16-bit runs with fp32 gradients from the same weights. Returns {name: (relative L2
    error, relative error of the norm)}, the largest errors of GRADIENT_RUNS_16BIT runs. "all" names all gradients as one
    vector, "logits" the logits. A `kind` with fp8 has the products of use_fp8().

    One run is no yardstick. The error of a norm is a sum of many roundings, and scatters about zero: in any arithmetic, some
    run has a small one. Each run starts from other perturbed() weights, so that all roundings are drawn anew."""
    worst = {}
    for run in range(GRADIENT_RUNS_16BIT):
        exact = perturbed(model, dtype, run)
        low = as_kind(copy.deepcopy(exact).to(dtype), kind)
        want, got = gradients(exact, batch), gradients(low, batch, loss_scale)
        for m, grads in ((exact, want), (low, got)):
            grads["all"] = torch.cat([g.flatten() for g in grads.values()])
            grads["logits"] = m.logits(batch[0], *batch[2:]).detach().float()
        for name, w in want.items():
            g, size = got[name], w.norm()
            errors = torch.stack(((g - w).norm() / size, (g.norm() / size - 1).abs()))
            worst[name] = torch.maximum(worst[name], errors) if run else errors
    return {name: errors.tolist() for name, errors in worst.items()}


def adamw_steps(master, opt, dtype, loss_scale, batch, steps, clip, kind=""):
    """Takes `steps` AdamW steps of `opt` on the fp32 weights of `master`. A copy in `dtype` computes the gradients, as in the
    trainers; kind: see as_kind(). batch: the arguments of the model's forward. Returns (2, steps): losses, and gradient norms
    before clipping."""
    rows, model = [], as_kind(copy.deepcopy(master).to(dtype), kind)
    for _ in range(steps):
        with torch.no_grad():
            for w, p in zip(master.parameters(), model.parameters()):
                p.copy_(w)
        model.zero_grad()
        loss = model(*batch)
        (loss * loss_scale).backward()
        for w, p in zip(trained_parameters(master), trained_parameters(model)):
            w.grad = p.grad.float() / loss_scale
        norm = nn.utils.clip_grad_norm_(trained_parameters(master), clip)
        opt.step()
        rows.append((loss.item(), norm.item()))
    return torch.tensor(rows).T


def errors_16bit(model, new_optimizer, dtype, loss_scale, batch, want, clip, kind=""):
    """Compares PyTorch's 16-bit runs with the fp32 run `want` (2, steps). Returns the largest relative error up to each step
    of RUNS_16BIT runs, each from other perturbed() weights."""
    worst = torch.zeros(want.shape)
    for run in range(RUNS_16BIT):
        master = perturbed(model, dtype, run)
        got = adamw_steps(master, new_optimizer(master), dtype, loss_scale, batch, want.shape[1], clip, kind)
        worst = torch.maximum(worst, (got / want - 1).abs())
    return worst.cummax(dim=1).values


# ----------------------------------------------------------------------------------------------------------------------
# debug states


@contextlib.contextmanager
def exact_muon():
    """Lets torch.optim.Muon compute in double, with its own code, what it computes in bfloat16."""
    muon = sys.modules.get("torch.optim._muon")
    if muon is None:  # PyTorch before 2.9
        yield
        return
    name, own = "_zeropower_via_newtonschulz", muon._zeropower_via_newtonschulz
    scope = vars(muon)
    source = inspect.getsource(own)
    exact = source.replace("torch.bfloat16", "torch.float64").replace(".bfloat16()", ".double()")  # 2.9 to 2.11 have the latter
    assert exact != source
    exec(exact, scope)
    try:
        yield
    finally:
        scope[name] = own


def errors_of_kinds(model, new_optimizer, batch, want, clip):
    """Returns the metadata of write_state() about PyTorch's own errors in every 16-bit kind that the model allows."""
    meta, kinds = {}, TYPES_16BIT
    if fits_fp8(model.c, batch[0].numel()):
        kinds += (FP8,) + ((FP8_HEAD,) if model.c.vocab_size % 16 == 0 else ())
    for kind, dtype, loss_scale in kinds:
        for name, errors in gradient_errors_16bit(model, dtype, loss_scale, batch, kind).items():
            for what, error in zip(("error", "norm_error"), errors):
                if math.isfinite(error):  # as below
                    meta[f"{kind}_{what}.{name}"] = f"{error:.4g}"
        errors = errors_16bit(model, new_optimizer, dtype, loss_scale, batch, want, clip, kind)
        for name, row in zip(("losses", "grad_norms"), errors):
            if row.isfinite().all():  # skip an FP16 run that overflows: it is no yardstick
                meta[f"{kind}_error.{name}"] = " ".join(f"{e:.4g}" for e in row.tolist())
    return meta


def write_state(model, path, B, T, steps, seed=1337, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, clip=1.0,
                device_16bit=None, documents=None, rule="adamw"):
    """Writes the debug state of this fp32 model's weights on one random batch:
      x, y I32 (B, T); with `documents`, a list of lengths for each row, starts I32 (B, T), see document_mask();
      logits F32 (B, T, V); loss F32 (); grad.<name> F32 of the loss by each tensor;
      losses, grad_norms F32 (steps): loss and global gradient norm before clipping at each of `steps` steps of the optimizer
      `rule`; with "muon" weight.<name> F32, the weights after these steps.
    Metadata holds the hyper-parameters as strings, and PyTorch's own errors in BF16 and FP16, the yardstick of 16-bit builds:
      bf16_error.<name>, fp16_error.<name>          the relative L2 error of a tensor's gradient: see gradient_errors_16bit();
                                                    <name> "logits": of the logits
      bf16_norm_error.<name>, ...                   the relative error of its norm; <name> "all": of all gradients as one
      bf16_error.losses, bf16_error.grad_norms, ... `steps` numbers each: see errors_16bit()
      fp8_error.<name>, ...                         of BF16 with --fp8, if fits_fp8()
      fp8_head_error.<name>, ...                    the same with --fp8-head
    The 16-bit runs are computed on `device_16bit`, by default the model's device. Returns losses and gradient norms."""
    device = model.final_norm.device
    batch = [t.to(device) for t in random_tokens(model.c, B, T, seed)]
    if documents:
        rows = [[sum(row[:i]) for i, n in enumerate(row) for _ in range(n)] for row in documents]
        batch.append(torch.tensor(rows, device=device))
    model.set_context(T, device)
    out = {name: t.int() for name, t in zip(("x", "y", "starts"), batch)}
    out |= dict(logits=model.logits(batch[0], *batch[2:]).detach())
    loss = model(*batch)
    loss.backward()
    out |= dict(loss=loss.detach()) | {"grad." + name: g.clone() for name, g in trained_tensors(model, lambda p: p.grad)}
    meta = dict(steps=steps, learning_rate=lr, beta1=betas[0], beta2=betas[1], eps=eps, weight_decay=weight_decay,
                grad_clip=clip)
    model.zero_grad()

    def new_optimizer(m):
        return (MuonAndAdamW if rule == "muon" else adamw)(m, lr, betas, eps, weight_decay, trained_parameters(m))
    master = copy.deepcopy(model)
    with exact_muon():
        want = adamw_steps(master, new_optimizer(master), torch.float32, 1.0, batch, steps, clip)
    out |= dict(losses=want[0], grad_norms=want[1])
    if rule != "adamw":
        meta["optimizer"] = rule
        out |= {"weight." + name: w.detach().clone() for name, w in trained_tensors(master)}
    *batch, model = (t.to(device_16bit or device) for t in (*batch, copy.deepcopy(model)))
    model.set_context(T, batch[0].device)
    meta |= errors_of_kinds(model, new_optimizer, batch, want, clip)
    save_tensors({k: v.cpu().contiguous() for k, v in out.items()}, path, {k: str(v) for k, v in meta.items()})
    return want[0].tolist(), want[1].tolist()


# ----------------------------------------------------------------------------------------------------------------------
# pairs

# The pairs under dev/test/pairs: folder NAME and file NAME.state.safetensors. Shapes are odd. The original length of RoPE is
# below T, so that the factor shows. The spelling of config.json varies.
PAIRS = {
    "gqa2_untied_rope8": dict(
        config=dict(vocab_size=97, hidden_size=40, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2,
                    head_dim=12, rms_norm_eps=1e-4, rope_theta=100.0, rope_type="llama3", factor=8.0,
                    original_max_position_embeddings=16), batch=2, seq=24, spelling="new"),
    "tied_gqa4_rope32": dict(
        config=dict(vocab_size=131, hidden_size=40, intermediate_size=88, num_attention_heads=4, num_key_value_heads=1,
                    head_dim=16, rms_norm_eps=1e-3, rope_theta=100.0, rope_type="llama3", factor=32.0,
                    original_max_position_embeddings=8, tie_word_embeddings=True), batch=2, seq=32, spelling="both"),
    "mha_odd": dict(
        rule="muon",
        config=dict(vocab_size=97, hidden_size=40, intermediate_size=120, num_attention_heads=2, num_key_value_heads=2,
                    head_dim=10, rms_norm_eps=1e-4, rope_theta=500.0, rope_type="llama3", factor=8.0,
                    low_freq_factor=0.5, high_freq_factor=3.0, original_max_position_embeddings=12),
        batch=3, seq=17, spelling="old"),
    "documents": dict(
        config=dict(vocab_size=61, hidden_size=24, intermediate_size=40, num_attention_heads=2, num_key_value_heads=1,
                    head_dim=16, rms_norm_eps=1e-4, rope_theta=100.0, rope_type="llama3", factor=8.0,
                    original_max_position_embeddings=16),
        batch=3, seq=32, spelling="new", documents=[[5, 1, 14, 12], [32], [3, 4] * 4 + [1] * 4]),
    "fp8": dict(
        config=dict(vocab_size=97, hidden_size=48, intermediate_size=80, num_attention_heads=4, num_key_value_heads=2,
                    head_dim=8, rms_norm_eps=1e-4, rope_theta=100.0, rope_type="llama3", factor=8.0,
                    original_max_position_embeddings=16),
        batch=2, seq=24, spelling="new"),
    "fp8_head": dict(
        config=dict(vocab_size=112, hidden_size=48, intermediate_size=80, num_attention_heads=4, num_key_value_heads=2,
                    head_dim=8, rms_norm_eps=1e-4, rope_theta=100.0, rope_type="llama3", factor=8.0,
                    original_max_position_embeddings=16, tie_word_embeddings=True),
        batch=2, seq=24, spelling="new"),
}

# pairs with adapters beside the weights of another pair: their folders hold adapters alone
LORA_PAIRS = {
    "lora_all": dict(base="gqa2_untied_rope8", rank=3, alpha=4.5, on=LORA_ON["all"], batch=2, seq=24),
    "lora_some": dict(base="fp8_head", rank=8, alpha=16, on=["k_proj", "v_proj", "o_proj", "up_proj"], batch=2, seq=24),
}

# fixed, not selected
PAIR_SEEDS = {"gqa2_untied_rope8": 1, "tied_gqa4_rope32": 2, "mha_odd": 3, "documents": 4, "lora_all": 4, "lora_some": 5,
              "fp8": 6, "fp8_head": 7}


def pair_model(name):
    if name in LORA_PAIRS:
        pair = LORA_PAIRS[name]
        model = pair_model(pair["base"])
        add_lora(model, pair["rank"], pair["alpha"], pair["on"])
        for ordinal, (_, w) in enumerate(adapters(model)):
            rand_normal_(w, 0.2, PAIR_SEEDS[name], ordinal)
        return model
    model = make_model(Config(**PAIRS[name]["config"]))
    init_telling(model, PAIR_SEEDS[name], embedding_std=0.1)
    return model


def write_pair_state(model, name, path):
    """Writes the state of ten steps at the default rate, with a weight decay large enough to show."""
    torch.set_num_threads(1)  # such small models are slower on several threads
    p = (PAIRS | LORA_PAIRS)[name]
    return write_state(model, path, p["batch"], p["seq"], 10, PAIR_SEEDS[name], weight_decay=2.0, documents=p.get("documents"),
                       rule=p.get("rule", "adamw"))


def write_pairs(out):
    for name, pair in (PAIRS | LORA_PAIRS).items():
        model = pair_model(name)
        if model.lora:
            save_adapters(model, os.path.join(out, name), os.path.join(out, pair["base"]))
        else:
            save_model(model, os.path.join(out, name), spelling=pair["spelling"])
        path = os.path.join(out, name + ".state.safetensors")
        print_state(path, *write_pair_state(model, name, path))


# ----------------------------------------------------------------------------------------------------------------------
# command line


def print_state(path, losses, norms):
    print(f"{path}: loss {losses[0]:.4f} -> {losses[-1]:.4f}, gradient norm {norms[0]:.3f} -> {norms[-1]:.3f}")


def write(a):
    """Writes the model of --write-model and the state of --write-state; without both, all pairs to out/reference."""
    device = torch.device(a.device or "cpu")
    if not a.write_model and not a.write_state:
        out = os.path.join("out", "reference")
        write_pairs(out)
        print(f"wrote {out}; check them with ./test_llama3 {out}/NAME {out}/NAME.state.safetensors")
    if a.write_model:
        c = config_of(a.config) if a.config else preset(a.model, 257) or die(f"--model {a.model}: is no preset", 2)
        model = make_model(c, device)
        init_telling(model, a.seed, a.embedding_std) if a.config else init_weights(model, a.seed)
        save_model(model, a.write_model)
    if a.write_state:
        model = load_model(a.write_model or a.model, device)
        print_state(a.write_state, *write_state(model, a.write_state, a.batch, a.seq, max(1, a.steps), a.seed, a.lr,
                                                (a.beta1, a.beta2), a.eps, a.weight_decay, a.grad_clip))


if __name__ == "__main__":
    write_pairs(sys.argv[1])
