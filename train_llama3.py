#!/usr/bin/env python3
"""train_llama3.py -- the same program as train_llama3.c in PyTorch: model, data, order of steps, and the flags that they need.

    python3 train_llama3.py                                  writes the tests' models and debug states to out/reference
    python3 train_llama3.py --model d4 --train X.bin ...     trains; --model takes a preset or a Hugging Face folder
    python3 train_llama3.py --write-model DIR --config hidden_size=48 ...         writes a small random model for tests
    python3 train_llama3.py --write-state F.safetensors --model DIR --batch B --seq T --steps N           writes its debug state

Read this file from top to bottom: model, first weights, adapters, update, training step, generation, training loop, command
line. Files of dev/reference hold the rest: random numbers (rand.py), configuration (config.py), token files (tokenfiles.py),
model folders (folders.py), text, log, 8-bit products (fp8.py) and the states that tests compare with (oracles.py).

Initial weights, data order and learning rates are pure functions of the seed and the flags, the same as in C. So the three
trainers start from the same weights, see the same tokens and print the same losses. A run writes OUT/log.jsonl with the events
of the C trainers, and at its end the model folder OUT/step_NNNNNNNN. It saves no state, and cannot be resumed. Runs on one CPU
or one CUDA device. Needs torch >= 2.2, numpy and safetensors; samples are text if `tokenizers` is installed.
"""
import argparse
import math
import os
import secrets
import shutil
import sys
import time
from dataclasses import asdict

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))  # finds dev from any working directory
import dev.errors  # noqa: F401  first: see there
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from dev.reference.config import DIALLED, dial_of, preset, presets, read_config, settle
from dev.reference.folders import (adapter_config, base_folder, checkpoints, model_of, read_adapters, read_weights,
                                   write_adapters, write_weights)
from dev.reference.log import Log, StepTable, counted, die, mark
from dev.reference.rand import RAND_SAMPLE, philox, philox_double, rand_even_, rand_normal_
from dev.reference.tables import c_flags, flag_value, gpu_peak, version
from dev.reference.text import Text
from dev.reference.tokenfiles import DataLoader, mix_parts, train_loader

TORCH = tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in torch.__version__.split(".")[:2])

# ----------------------------------------------------------------------------------------------------------------------
# model. As in C, q, k, v are fused into one matrix, and gate, up into another: one product each


def inverse_frequencies(c):
    """Returns (head_dim / 2,) fp32, computed by exactly the operations of Hugging Face's LlamaRotaryEmbedding."""
    inv = 1.0 / (c.rope_theta ** (torch.arange(0, c.head_dim, 2, dtype=torch.int64).float() / c.head_dim))
    if c.rope_type == "default":
        return inv
    low_wavelen = c.original_max_position_embeddings / c.low_freq_factor
    high_wavelen = c.original_max_position_embeddings / c.high_freq_factor
    wavelen = 2 * math.pi / inv
    scaled = torch.where(wavelen > low_wavelen, inv / c.factor, inv)
    smooth = (c.original_max_position_embeddings / wavelen - c.low_freq_factor) / (c.high_freq_factor - c.low_freq_factor)
    smoothed = (1 - smooth) * scaled / c.factor + smooth * scaled
    medium = ~(wavelen < high_wavelen) & ~(wavelen > low_wavelen)
    return torch.where(medium, smoothed, scaled)


def rms_norm(x, weight, eps):
    if x.dtype == torch.float32 and TORCH >= (2, 4):
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    xf = x.float()
    return (xf * torch.rsqrt(xf.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight.to(x.dtype)


def rope(x, cos, sin):
    """Rotates x (B, T, heads, HD) by position, pairing element i with i + HD/2. cos, sin: (T, 1, HD/2) or (B, T, 1, HD/2),
    always fp32."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


NATIVE_GQA = TORCH >= (2, 5)  # pick_sdpa() turns it off if repeated K and V are faster


def document_mask(starts):
    """Returns (B, 1, T, T): whether a query sees a key. It sees its document up to itself. starts (B, T): the index in the row
    at which each token's document starts."""
    t = torch.arange(starts.shape[1], device=starts.device)
    return ((starts[:, :, None] <= t) & (t <= t[:, None]))[:, None]


def attention(q, k, v, mask=None):
    """Returns the attention of q (B, NH, T, HD) to k, v (B, NKV, T, HD), causal or by a document_mask(). Query head h reads kv
    head h // group."""
    group, seen = q.shape[1] // k.shape[1], dict(attn_mask=mask, is_causal=mask is None)
    if group == 1:
        return F.scaled_dot_product_attention(q, k, v, **seen)
    if NATIVE_GQA:
        return F.scaled_dot_product_attention(q, k, v, **seen, enable_gqa=True)
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    return F.scaled_dot_product_attention(q, k, v, **seen)


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads, self.kv, self.hd, self.eps = c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.rms_norm_eps
        self.input_norm = nn.Parameter(torch.ones(c.hidden_size))
        self.qkv = nn.Linear(c.hidden_size, (self.heads + 2 * self.kv) * self.hd, bias=False)
        self.o = nn.Linear(self.heads * self.hd, c.hidden_size, bias=False)
        self.post_norm = nn.Parameter(torch.ones(c.hidden_size))
        self.gate_up = nn.Linear(c.hidden_size, 2 * c.intermediate_size, bias=False)
        self.down = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x, cos, sin, mask=None):
        B, T, _ = x.shape
        qkv = self.qkv(rms_norm(x, self.input_norm, self.eps))
        q, k, v = qkv.view(B, T, -1, self.hd).split((self.heads, self.kv, self.kv), dim=2)
        y = attention(rope(q, cos, sin).transpose(1, 2), rope(k, cos, sin).transpose(1, 2), v.transpose(1, 2), mask)
        x = x + self.o(y.transpose(1, 2).reshape(B, T, -1))
        gate, up = self.gate_up(rms_norm(x, self.post_norm, self.eps)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.embedding = nn.Embedding(c.vocab_size, c.hidden_size)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.num_hidden_layers))
        self.final_norm = nn.Parameter(torch.ones(c.hidden_size))
        self.head = self.embedding if c.tie_word_embeddings else nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        self.cos = self.sin = None
        self.lora = None  # with adapters: their rank, alpha and matrices, see add_lora()
        self.project = F.linear  # the head's product: use_fp8() of dev/reference/fp8.py replaces it
        self.recompute_blocks = 0  # these first blocks keep only their inputs and are recomputed in backward

    def set_context(self, T, device):
        """Computes the RoPE tables of T positions, always in fp32."""
        angles = torch.arange(T, dtype=torch.float32)[:, None, None] * inverse_frequencies(self.c)
        self.cos, self.sin = angles.cos().to(device), angles.sin().to(device)
        return self

    def trunk(self, x, dtype=None, blocks=None, starts=None):
        """Maps tokens (B, T) to normed hidden states (B, T, C). dtype: the type of the residual stream, by default the type of
        the weights. blocks: compiled blocks, by default the model's own. With starts (B, T), attention stays inside documents
        and positions count from their starts, see document_mask()."""
        h = self.embedding(x)
        h = h if dtype is None else h.to(dtype)
        at = slice(x.shape[1]) if starts is None else torch.arange(x.shape[1], device=x.device) - starts
        cos, sin, mask = self.cos[at], self.sin[at], None if starts is None else document_mask(starts)
        for i, block in enumerate(blocks or self.blocks):
            if i < self.recompute_blocks and torch.is_grad_enabled():
                h = checkpoint(block, h, cos, sin, mask, use_reentrant=False)
            else:
                h = block(h, cos, sin, mask)
        return rms_norm(h, self.final_norm, self.c.rms_norm_eps)

    def logits(self, x, starts=None):
        return self.project(self.trunk(x, starts=starts), self.head.weight)

    def forward(self, x, y, starts=None):
        """Returns the mean cross-entropy over the targets y (already shifted) that are not -1."""
        return F.cross_entropy(self.logits(x, starts).view(-1, self.c.vocab_size).float(), y.view(-1), ignore_index=-1)


def hf_tensors(model, pick=lambda p: p):
    """Yields (Hugging Face name, tensor) in the order of param_table() in llmc/config.h. The place in this order is the
    tensor's ordinal, from which its random numbers follow. Tensors are views of the fused matrices. `pick` maps a parameter
    to the wanted tensor, such as its gradient."""
    c = model.c
    q, kv, ffn = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim, c.intermediate_size
    yield "model.embed_tokens.weight", pick(model.embedding.weight)
    for i, b in enumerate(model.blocks):
        at = f"model.layers.{i}."
        yield at + "input_layernorm.weight", pick(b.input_norm)
        for name, part in zip("qkv", pick(b.qkv.weight).split((q, kv, kv))):
            yield at + f"self_attn.{name}_proj.weight", part
        yield at + "self_attn.o_proj.weight", pick(b.o.weight)
        yield at + "post_attention_layernorm.weight", pick(b.post_norm)
        for name, part in zip(("gate", "up"), pick(b.gate_up.weight).split((ffn, ffn))):
            yield at + f"mlp.{name}_proj.weight", part
        yield at + "mlp.down_proj.weight", pick(b.down.weight)
    yield "model.norm.weight", pick(model.final_norm)
    if not c.tie_word_embeddings:
        yield "lm_head.weight", pick(model.head.weight)


def make_model(c, device="cpu", dtype=torch.float32):
    """Makes a model with uninitialized weights: initializing a big model twice takes long."""
    with torch.device("meta"):
        model = Llama(c)
    return model.to(dtype).to_empty(device=device)


@torch.no_grad()
def init_weights(model, seed):
    """Sets the initial weights of the C trainers: N(0, 0.02), residual projections N(0, 0.02 / sqrt(2L)), norm gains 1."""
    for ordinal, (name, w) in enumerate(hf_tensors(model)):
        if w.dim() == 1:
            w.fill_(1.0)
        else:
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            rand_normal_(w, 0.02 / math.sqrt(2.0 * model.c.num_hidden_layers) if residual else 0.02, seed, ordinal)


# ----------------------------------------------------------------------------------------------------------------------
# LoRA: y = x W^T + alpha / rank (x A^T) B^T beside frozen weights W

LORA_ON = {"qkvo": ["q_proj", "k_proj", "v_proj", "o_proj"], "ffn": ["gate_proj", "up_proj", "down_proj"]}
LORA_ON["all"] = LORA_ON["qkvo"] + LORA_ON["ffn"]


class Lora(nn.Module):
    """A fused product whose parts, (name, rows) each, may have adapters. `on`: the names of all parts with adapters."""

    def __init__(self, base, parts, rank, scale, on):
        super().__init__()
        like = dict(device=base.weight.device, dtype=base.weight.dtype)
        self.base, self.parts, self.scale = base, parts, scale
        self.a = nn.ParameterDict({name: torch.zeros(rank, base.in_features, **like) for name, _ in parts if name in on})
        self.b = nn.ParameterDict({name: torch.zeros(rows, rank, **like) for name, rows in parts if name in on})

    @property
    def weight(self):
        return self.base.weight

    def forward(self, x):
        added = [self.scale * F.linear(F.linear(x, self.a[name]), self.b[name]) if name in self.a else
                 x.new_zeros(*x.shape[:-1], rows) for name, rows in self.parts]
        return self.base(x) + torch.cat(added, dim=-1)


def add_lora(model, rank, alpha, on):
    """Freezes the weights, and adds adapters of zeros beside the matrices in `on`."""
    c, scale = model.c, alpha / rank
    q, kv, ffn = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim, c.intermediate_size
    model.requires_grad_(False)
    for b in model.blocks:
        b.qkv = Lora(b.qkv, [("q_proj", q), ("k_proj", kv), ("v_proj", kv)], rank, scale, on)
        b.o = Lora(b.o, [("o_proj", c.hidden_size)], rank, scale, on)
        b.gate_up = Lora(b.gate_up, [("gate_proj", ffn), ("up_proj", ffn)], rank, scale, on)
        b.down = Lora(b.down, [("down_proj", c.hidden_size)], rank, scale, on)
    model.lora = dict(rank=rank, alpha=alpha, on=on)


def adapters(model, pick=lambda p: p):
    """Yields (PEFT's name, tensor) in the order of trained_table() in llmc/config.h."""
    for i, block in enumerate(model.blocks):
        for part, module in ((block.qkv, "self_attn"), (block.o, "self_attn"), (block.gate_up, "mlp"), (block.down, "mlp")):
            on = [name for name, _ in part.parts if name in part.a]  # a ParameterDict has another order
            for letter, tensors in (("A", part.a), ("B", part.b)):
                for name in on:
                    yield f"base_model.model.model.layers.{i}.{module}.{name}.lora_{letter}.weight", pick(tensors[name])


def trained_tensors(model, pick=lambda p: p):
    return adapters(model, pick) if model.lora else hf_tensors(model, pick)


def trained_parameters(model):
    return [p for p in model.parameters() if p.requires_grad]


@torch.no_grad()
def init_adapters(model, seed):
    """Sets the initial adapters of the C trainers: A as PEFT draws it, B zero."""
    for ordinal, (name, w) in enumerate(adapters(model)):
        if "lora_A" in name:
            rand_even_(w, 1 / math.sqrt(w.shape[1]), seed, ordinal)


# ----------------------------------------------------------------------------------------------------------------------
# model folders


def load_model(folder, device="cpu", dtype=torch.float32):
    """Reads a model folder, or a folder of adapters and their base."""
    adapter = adapter_config(folder)
    if adapter:
        model = load_model(adapter["base_model_name_or_path"], device, dtype)
        add_lora(model, adapter["r"], adapter["lora_alpha"], adapter["target_modules"])
        read_adapters(folder, adapters(model))
        return model
    model = make_model(read_config(folder), device, dtype)
    read_weights(folder, hf_tensors(model), model.c.tie_word_embeddings)
    return model


def save_model(model, folder, dtype=None, spelling="both"):
    write_weights(folder, model.c, hf_tensors(model), dtype or model.final_norm.dtype, spelling)


def save_adapters(model, folder, base):
    write_adapters(folder, adapters(model), model.lora, base)


# ----------------------------------------------------------------------------------------------------------------------
# update


def adamw(model, lr, betas, eps, weight_decay, params=None):
    """Makes AdamW with decay on two-dimensional tensors, none on norms. params: by default the model's trained ones."""
    params = trained_parameters(model) if params is None else params
    groups = [dict(params=[p for p in params if p.dim() > 1], weight_decay=weight_decay),
              dict(params=[p for p in params if p.dim() == 1], weight_decay=0.0)]
    fused = params[0].is_cuda or TORCH >= (2, 4)
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=fused)


class MuonAndAdamW:
    """torch.optim.Muon on the matrices of the blocks, each as Hugging Face stores it, and adamw() on the other weights. `masters`
    are those of the trained parameters. A scale other than PyTorch's multiplies Muon's rate, but not its decay."""

    def __init__(self, model, lr, betas, eps, weight_decay, masters, momentum=0.95, scale=0.2):
        self.model, self.of, self.factor = model, dict(zip(trained_parameters(model), masters)), scale / 0.2
        self.matrices = self.pick(lambda p: self.of[p].detach())
        joined = [part.weight for b in model.blocks for part in (b.qkv, b.o, b.gate_up, b.down)]
        rest = [w for p, w in self.of.items() if all(p is not q for q in joined)]
        self.muon = torch.optim.Muon(self.matrices, lr, weight_decay / self.factor, momentum, adjust_lr_fn="match_rms_adamw")
        self.adamw = adamw(model, lr, betas, eps, weight_decay, rest)
        self.param_groups = self.adamw.param_groups

    def pick(self, of):
        return [part for name, part in hf_tensors(self.model, of) if name.endswith("_proj.weight")]

    def step(self):
        for w, grad in zip(self.matrices, self.pick(lambda p: self.of[p].grad)):
            w.grad = grad
        self.muon.param_groups[0]["lr"] = self.param_groups[0]["lr"] * self.factor
        self.muon.step()
        self.adamw.step()

    def zero_grad(self):
        for w in (*self.matrices, *self.of.values()):
            w.grad = None


def optimizer(model, a, masters):
    """Makes the optimizer of --optimizer. Muon trains no adapters."""
    rule = a.lr, (a.beta1, a.beta2), a.eps, a.weight_decay, masters
    if a.optimizer == "adamw" or model.lora:
        return adamw(model, *rule)
    if not hasattr(torch.optim, "Muon"):
        die(f"--optimizer muon: needs PyTorch 2.9 or later, but this is {torch.__version__}")
    return MuonAndAdamW(model, *rule, a.muon_momentum, a.muon_lr_scale)


def schedule(a):
    """Returns the highest rate and the phases (from, to, first, last, shape), as in llmc/optim/schedule.h."""
    falls, most = a.schedule == "wsd" or a.decay > 0, max(a.steps - a.warmup, 0)
    fall = min(a.decay, most) if a.decay else a.steps // 5
    decay = max(a.warmup, a.steps - fall) if falls else a.warmup
    end = decay + fall if falls else a.warmup + most
    shape = {"1-sqrt": "root"}.get(a.decay_shape, a.decay_shape) if falls else "cosine" if a.schedule == "cosine" else "linear"
    final = 1.0 if a.schedule == "constant" and not falls else a.final_lr_frac
    return a.lr, [(0, a.warmup, 0.0, 1.0, "rise"), (a.warmup, decay, 1.0, 1.0, "linear"),
                  (decay, end, 1.0, final, shape)]


def check_schedule(a):
    """Refuses what plan_check_decay() of llmc/run/session/plan.h refuses."""
    if not a.decay and a.decay_shape != "1-sqrt" and a.schedule != "wsd":
        die("--decay-shape: is of no use without --decay N or --schedule wsd")
    if a.decay and a.schedule in ("cosine", "linear"):
        die(f"--decay: the schedule is {a.schedule}, whose rate always falls, wanted --schedule wsd or constant")
    if a.decay and a.decay + a.warmup > a.steps:
        die(f"--decay: {a.decay} steps and --warmup {a.warmup} do not fit into the {a.steps} steps of the run")


def learning_rate(schedule, step):
    """Returns the learning rate of `step`, counted from 0: that of the last phase that has begun."""
    lr, phases = schedule
    begin, end, first, last, shape = [phase for phase in phases if phase[0] <= step][-1]
    n = end - begin
    p = 1.0 if step >= end else (step - begin) / n
    if shape == "rise":
        return lr * (first * n + (last - first) * min(step - begin + 1, n)) / n
    if shape == "cosine":
        return lr * (last + (first - last) * 0.5 * (1.0 + math.cos(math.pi * p)))
    if shape == "root":
        return lr * (last + (first - last) * (1.0 - math.sqrt(p)))
    return lr * (first - (first - last) * p)


# ----------------------------------------------------------------------------------------------------------------------
# training step and generation


def pick_sdpa(c, B, T, device, dtype):
    """Selects the fastest attention backend on CUDA. Times forward and backward of each at the run's own shape, with native GQA
    and with repeated K and V. Returns the backend's name."""
    global NATIVE_GQA
    if device.type != "cuda":
        return "default"
    cuda, H, KV, HD = torch.backends.cuda, c.num_attention_heads, c.num_key_value_heads, c.head_dim

    def use(name):
        for other in ("cudnn", "flash", "mem_efficient", "math"):
            if hasattr(cuda, f"enable_{other}_sdp"):
                getattr(cuda, f"enable_{other}_sdp")(other == name)
    times = {}
    for name in ("cudnn", "flash", "mem_efficient"):
        for native in (True, False) if H != KV and TORCH >= (2, 5) else (False,):
            use(name)
            NATIVE_GQA = native
            try:  # the layout in the model: q and k packed after RoPE, v a view of the fused product
                q, k = (torch.randn(B, T, n, HD, device=device, dtype=dtype) for n in (H, KV))
                v = torch.randn(B, T, (H + 2 * KV) * HD, device=device, dtype=dtype)[..., -KV * HD:].view(B, T, KV, HD)
                q, k, v = (t.transpose(1, 2).requires_grad_() for t in (q, k, v))
                for i in range(8):
                    if i == 3:
                        torch.cuda.synchronize()
                        start = time.perf_counter()
                    out = attention(q, k, v)
                    torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
                torch.cuda.synchronize()
                times[name, native] = time.perf_counter() - start
            except RuntimeError:  # this backend has no kernel for the shape
                pass
    if not times:
        use("math")
        return "math"
    name, NATIVE_GQA = min(times, key=times.get)
    use(name)
    return name + ("" if NATIVE_GQA or H == KV else " with repeated K, V")


def cross_entropy_sum(h, weight, targets):
    return F.cross_entropy(F.linear(h, weight).float(), targets, ignore_index=-1, reduction="sum")


class Engine:
    """Runs a model's forward, backward and update under --dtype and --compile.

    fp32       weights, gradients, moments and arithmetic in fp32
    autocast   the same storage, matrix products and residual stream in bf16
    master     bf16 weights and gradients, fp32 master weights and moments
    bf16       all in bf16
    On CUDA, blocks are compiled one by one, and the head processes chunks of tokens, so the full logits never exist. On the CPU
    logits are small, and the whole model is compiled at once."""

    CHUNK = 8192

    def __init__(self, model, a, device):
        self.model, self.a, self.device = model, a, device
        self.params = trained_parameters(model)
        self.stream = torch.bfloat16 if a.dtype == "autocast" else None
        self.blocks, self.ce, self.whole = list(model.blocks), cross_entropy_sum, model
        if a.compile:
            torch.set_float32_matmul_precision("highest" if a.dtype == "fp32" else "high")
            limit = "recompile_limit" if hasattr(torch._dynamo.config, "recompile_limit") else "cache_size_limit"
            setattr(torch._dynamo.config, limit, 256)  # all layers share one compiled block: allow guards for each
            if device.type == "cuda":
                self.blocks, self.ce = [torch.compile(b) for b in self.blocks], torch.compile(cross_entropy_sum)
            else:
                self.whole = torch.compile(model)
        self.masters = [p.detach().float() for p in self.params] if a.dtype == "master" else self.params
        self.opt = optimizer(model, a, self.masters)

    def amp(self):
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.a.dtype == "autocast")

    def micro_step(self, x, y, trained, share, starts=None):
        """Adds the gradient of share * loss, the mean loss of the batch's `trained` targets. Returns share * loss on the
        device."""
        if self.device.type != "cuda":
            with self.amp():
                loss = self.whole(x, y, starts)
            loss = loss if share == 1.0 else loss * share
            loss.backward()
            return loss.detach()
        with self.amp():
            h = self.model.trunk(x, self.stream, self.blocks, starts)
        leaves = [part.detach().requires_grad_() for part in h.view(-1, h.shape[-1]).split(self.CHUNK)]
        total = 0.0
        for part, targets in zip(leaves, y.view(-1).split(self.CHUNK)):
            with self.amp():
                loss = self.ce(part, self.model.head.weight, targets) * (share / trained)
            loss.backward()
            total = total + loss.detach()
        h.backward(torch.cat([part.grad for part in leaves]).view_as(h))
        return total

    def loss_sum(self, x, y, starts=None):
        """Returns the summed loss of a batch, for use without gradients."""
        with self.amp():
            h = self.model.trunk(x, self.stream, starts=starts).view(-1, self.model.c.hidden_size)
            parts = zip(h.split(self.CHUNK), y.view(-1).split(self.CHUNK))
            return sum(cross_entropy_sum(part, self.model.head.weight, t) for part, t in parts)

    @torch.no_grad()
    def evaluate(self, x, y, starts=None):
        """Returns the sum of a batch's losses, and the number of its trained targets."""
        return self.loss_sum(x, y, starts).item(), (y >= 0).sum().item()

    def update(self, lr):
        """Clips, updates and clears the gradients; returns the gradient norm before clipping, on the device."""
        norm = nn.utils.clip_grad_norm_(self.params, self.a.grad_clip if self.a.grad_clip > 0 else float("inf"))
        for group in self.opt.param_groups:
            group["lr"] = lr
        if self.masters is not self.params:
            for master, p in zip(self.masters, self.params):
                master.grad = p.grad.float()
        self.opt.step()
        self.opt.zero_grad()
        if self.masters is not self.params:
            with torch.no_grad():
                torch._foreach_copy_(self.params, self.masters)
            for p in self.params:
                p.grad = None
        return norm

    @torch.no_grad()
    def sample(self, ids, count, step):
        """Returns `ids` and `count` more tokens, sampled as in llmc/run/loop/sampler.h. Keys and values are not cached."""
        a, ids = self.a, list(ids)
        for i in range(count):
            with self.amp():
                x = torch.tensor([ids[-self.model.cos.shape[0]:]], device=self.device)
                logits = F.linear(self.model.trunk(x, self.stream)[0, -1], self.model.head.weight).double().cpu()
            if a.temperature == 0:
                ids.append(int(logits.argmax()))
                continue
            w = torch.exp((logits - logits.max()) / a.temperature)
            ranked, order = w.sort(descending=True, stable=True)
            ranked = ranked[:a.top_k] if a.top_k else ranked
            if a.top_p < 1.0:
                ranked = ranked[:1 + int((ranked.cumsum(0) < a.top_p * ranked.sum()).sum())]
            kept = torch.zeros_like(w)
            kept[order[:len(ranked)]] = ranked
            word = philox(a.seed, RAND_SAMPLE, step, torch.tensor([i]))
            target = kept.sum() * philox_double(word[0], word[1])
            ids.append(min(len(w) - 1, int((kept.cumsum(0) <= target).sum())))
        return ids


# ----------------------------------------------------------------------------------------------------------------------
# training


class Training:
    """A run: its data, its model and optimizer, and its log."""

    def __init__(self, a):
        found = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
        if a.device and a.device.split(":")[0] not in found:
            die(f"--device: is {a.device}, wanted {' or '.join(found)}, which PyTorch finds here", 2)
        self.a, self.device = a, torch.device(a.device or found[0])
        a.dtype = a.dtype or ("autocast" if self.device.type == "cuda" else "fp32")
        if a.threads:
            torch.set_num_threads(a.threads)
        found = checkpoints(a.out)
        if found:
            die(f"--out: {a.out} holds the checkpoints of another run, up to step {int(found[-1][-8:])}\n"
                "  hint: give another --out")
        folder = model_of(a.model)
        self.open_data(folder)
        self.open_model(folder)
        self.last, self.val_loss = min(a.steps, a.stop_after or a.steps), None
        self.open_log()

    def open_data(self, folder):
        """Opens tokenizer, configuration and token files; sets the tokens of a step and the number of steps."""
        a, parts, is_folder = self.a, mix_parts(self.a.train), os.path.isdir(folder)
        own = folder if os.path.exists(os.path.join(folder, "tokenizer.json")) else is_folder and base_folder(folder)
        self.text = text = Text(a.tokenizer or own or os.path.dirname(parts[0][0]), fresh=not is_folder)
        c = read_config(base_folder(folder)) if is_folder else None
        bos = next((i for i in (text.id("<|begin_of_text|>"), c and c.bos_token_id) if i is not None), None)
        self.val = DataLoader(a.val, 1, a.seq, documents=a.documents, bos=bos) if a.val else None
        self.loader = loader = train_loader(parts, a.batch or 1, a.seq, a.seed, a.documents, bos, self.val)
        self.c = c = c or preset(folder, text.vocab_size or loader.vocab_size or loader.usual_vocab)
        if c is None:
            die(f"--model: {folder} is neither a folder nor a preset, wanted a Hugging Face folder, dN, {', '.join(presets())}")
        if not is_folder and c.bos_token_id is None:
            c.bos_token_id = text.id("<|begin_of_text|>")
            c.eos_token_id = [i for i in [text.id("<|end_of_text|>")] if i is not None] or None
        turn = text.learn_turn(loader.files)
        if turn is not None and turn not in (c.eos_token_id or []):
            c.eos_token_id = (c.eos_token_id or []) + [turn]
        dial = not is_folder and folder not in presets() and not a.lora
        settle(a, dial_of(a, c.matmul_parameters(), loader.rows_per_epoch, self.device.type == "cuda") if dial else {})
        loader.set_batch(a.batch)
        micro = a.batch * a.seq
        a.total_batch = a.total_batch or micro
        if a.total_batch % micro:
            die(f"--total-batch: is {a.total_batch}, wanted a multiple of batch * seq = {micro}")
        self.micro_batches = a.total_batch // micro
        if a.steps == 0:
            die("--steps: is 0, wanted at least one step", 2)
        if a.steps < 0:
            a.steps = loader.epoch_steps(a.total_batch // a.seq)
        check_schedule(a)
        if loader.vocab_size > c.vocab_size:
            die(f"{loader.files[0].path}: vocabulary is {loader.vocab_size} tokens, but the model has only {c.vocab_size}")

    def open_model(self, folder):
        a, c, device = self.a, self.c, self.device
        weights = torch.bfloat16 if a.dtype in ("bf16", "master") else torch.float32
        self.sdpa = pick_sdpa(c, a.batch, a.seq, device, torch.float32 if a.dtype == "fp32" else torch.bfloat16)
        if os.path.isdir(folder):
            model = load_model(folder, device, weights)
            model.c = c  # with the end of a turn
        else:
            model = make_model(c, device, weights)
            init_weights(model, a.seed)
        if a.lora and not model.lora:
            add_lora(model, a.lora, a.lora_alpha or 2.0 * a.lora, LORA_ON[a.lora_on])
            init_adapters(model, a.seed)
        model.set_context(max(a.seq, min(a.sample_tokens + len(a.prompt) + 1, 2048)), device)
        model.recompute_blocks = a.recompute_blocks
        self.engine = Engine(model, a, device)

    def open_log(self):
        """Prints the run's model and plan, and begins its log."""
        a, c, model = self.a, self.c, self.engine.model
        cuda = self.device.type == "cuda"
        name = torch.cuda.get_device_name(self.device) if cuda else f"CPU, {counted(torch.get_num_threads(), 'thread')}"
        peak = gpu_peak(name) * 1e12 if a.dtype != "fp32" else 0.0  # fp32 shows no MFU
        flops = c.flops_per_token(a.seq) * a.total_batch
        count = sum(p.numel() for p in model.parameters())
        print(f"PyTorch {torch.__version__}, {name}, {a.dtype}{', compiled' if a.compile else ''}, attention: {self.sdpa}")
        print(f"model   {a.model}: {count:,} parameters, vocabulary {c.vocab_size}, width {c.hidden_size}, "
              f"{counted(c.num_hidden_layers, 'layer')}, {counted(c.num_attention_heads, 'head')}, "
              f"{counted(c.num_key_value_heads, 'kv head')} of {c.head_dim}, "
              f"ffn {c.intermediate_size}, {'tied' if c.tie_word_embeddings else 'untied'}")
        if model.lora:
            print(f"lora    rank {model.lora['rank']}, alpha {model.lora['alpha']:g}, on {' '.join(model.lora['on'])}: "
                  f"{sum(p.numel() for p in self.engine.params):,} parameters are trained")
        epochs = a.steps * a.total_batch / max(1, self.loader.rows_per_epoch * a.seq)
        print(f"plan    {counted(a.steps, 'step')} of {a.total_batch} tokens ({self.micro_batches} x {a.batch} x {a.seq}), "
              f"{epochs:.2f} epochs of {self.loader.num_tokens:,} tokens")
        self.log = Log(a.out)
        self.log.add("config", version=version(), time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                     run=secrets.token_hex(8), program="train_llama3.py", precision=a.dtype, machine=name, argv=sys.argv,
                     options=vars(a), model=dict(parameters=count, **asdict(c)), train_tokens=self.loader.num_tokens,
                     torch=torch.__version__, attention=self.sdpa)
        self.table = StepTable(self.log, self.device, a.steps, self.last, a.total_batch, flops, peak)

    def step(self, lr):
        """Takes a step. Returns its loss and gradient norm, on their way to the host; the number of its trained targets (None:
        all are trained); the padding of all rows so far; and the loss on each source's targets, if there are several."""
        self.loader.row_sources = []
        batches, loss = [self.loader.next(self.device, self.c.vocab_size) for _ in range(self.micro_batches)], 0.0
        counts = [int((y >= 0).sum()) if self.loader.partial else y.numel() for _, y, *_ in batches]
        sources = self.source_losses(batches)
        for (x, y, *starts), count in zip(batches, counts):  # a step's loss is the mean over its trained targets
            loss = loss + self.engine.micro_step(x, y, count, count / sum(counts), *starts)
        norm = self.engine.update(lr)
        numbers = torch.stack((loss.float(), norm.float())).to("cpu", non_blocking=True)
        return numbers, sum(counts) if self.loader.partial else None, self.loader.padding, sources

    def source_losses(self, batches):
        """Returns the mean loss on the targets of each source, None for one without a row; None if there is one source."""
        loader = self.loader
        if not loader.row_sources:
            return None
        sums = [[0.0, 0] for _ in loader.sources]
        for of_rows, tensors in zip(loader.row_sources, batches):
            for s in set(of_rows):
                rows = [i for i, source in enumerate(of_rows) if source == s]
                sums[s] = [a + b for a, b in zip(sums[s], self.engine.evaluate(*(t[rows] for t in tensors)))]
        return [loss / count if count else None for loss, count in sums]

    def validate(self, step):
        a, val, total, trained = self.a, self.val, 0.0, 0
        val.row, rows = 0, min(a.val_batches * a.batch, val.rows_per_epoch)
        while val.row < rows:
            loss, count = self.engine.evaluate(*val.next(self.device, self.c.vocab_size, min(a.batch, rows - val.row)))
            total, trained = total + loss, trained + count
        self.val_loss = total / trained
        print(f"validation loss {self.val_loss:.4f} at step {step}")
        self.log.add("val", step=step, loss=self.val_loss)

    def sample(self, step):
        start = self.text.encode(self.a.prompt, self.c.bos_token_id)
        ids = self.engine.sample(start, self.a.sample_tokens, step)
        out = self.a.prompt + self.text.decode(ids[len(start):])
        print(f"sample  {out}")
        self.log.add("sample", step=step, text=out)

    def save(self):
        """Writes the model folder OUT/step_NNNNNNNN, under a temporary name, then renames it. Returns its path."""
        a, model, final = self.a, self.engine.model, os.path.join(self.a.out, f"step_{self.last:08d}")
        part = final + ".tmp"
        shutil.rmtree(part, ignore_errors=True)
        if model.lora:
            save_adapters(model, part, os.path.abspath(base_folder(a.model)))
        else:
            save_model(model, part, dict(f32=torch.float32, bf16=torch.bfloat16, f16=torch.float16).get(a.export_dtype))
        self.text.save(part, self.c)
        os.rename(part, final)
        return final


def train(a):
    t, pending = Training(a), None
    rates = schedule(a)
    for step in range(t.last):
        begin, lr = mark(t.device), learning_rate(rates, step)
        numbers, *counts = t.step(lr)
        end, done = mark(t.device), step + 1
        if pending:
            t.table.add(*pending)
        pending = (done, numbers, counts, lr, begin, end)
        due = [every and done % every == 0 or done == t.last for every in (a.val_every, a.sample_every)]
        if t.device.type != "cuda" or any(due):  # a GPU's numbers are read one step late, so that it never waits for the host
            t.table.add(*pending)
            pending = None
        if due[0] and t.val:
            t.validate(done)
        if due[1] and a.sample_tokens:
            t.sample(done)
    t.table.close(t.val_loss, t.save(), "done" if t.last == a.steps else "stop-after")


# ----------------------------------------------------------------------------------------------------------------------
# command line

# the flags of llmc/run/cli/options.def that this trainer has
SHARED = """model tokenizer train val documents out export-dtype steps batch seq total-batch lr warmup schedule final-lr-frac
    decay decay-shape optimizer muon-momentum muon-lr-scale weight-decay beta1 beta2 eps grad-clip lora lora-alpha lora-on seed
    threads val-every val-batches sample-every sample-tokens stop-after prompt temperature top-k top-p""".split()
# value and help, where they differ from those in options.def
CHANGED = {
    "tokenizer": ("PATH", "tokenizer.json or its folder, for samples and a preset's vocabulary"),
    "export-dtype": ("auto|f32|bf16|f16", "type of the weights in checkpoints; auto: the type in memory"),
    "decay": ("N", "the rate of --schedule wsd or constant falls in the last N steps; 0: wsd in the last fifth, constant never"),
    "threads": ("N", "CPU threads; 0: PyTorch's choice"),
    "temperature": ("F", "sampling temperature; 0: always the most probable token"),
}
# the flags of this trainer alone, in the form of c_flags()
OWN = {
    "device": ("STRING", [], None, 0, 0, "cpu|cuda", "device; default: cuda if PyTorch finds a GPU"),
    "dtype": ("CHOICE", [], None, 0, 0, "fp32|autocast|master|bf16", "see Engine; default: autocast on CUDA, else fp32"),
    "recompute-blocks": ("INT", [], "0", 0, 2e9, "N", "recompute the first N blocks in backward"),
    "write-state": ("STRING", [], None, 0, 0, "FILE",
                    "write the debug state of --model with --batch, --seq, --steps, --lr, ... to this file"),
    "write-model": ("STRING", [], None, 0, 0, "DIR", "write a random model (--model PRESET, or --config) to this folder"),
    "embedding-std": ("FLOAT", [], "0.02", 0, 1e30, "F", "standard deviation of the embedding in --config models"),
}


def parse_arguments(argv):
    argv = [a.split("=")[0].replace("_", "-") + a[len(a.split("=")[0]):] if a.startswith("--") else a for a in argv]
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
                                usage="train_llama3.py [--FLAG VALUE ...]")
    c = c_flags()
    flags = {name: (*c[name][:5], *CHANGED.get(name, c[name][5:])) for name in SHARED} | OWN
    for name, (_, aliases, default, _, _, value, text) in flags.items():
        text = text.replace("%", "%%") + (f" ({default})" if default else "")
        p.add_argument("--" + name, *aliases, default=None if name in DIALLED else default, metavar=value, help=text)
    p.add_argument("--compile", action="store_true", help="use torch.compile")
    p.add_argument("--config", nargs="+", metavar="KEY=VALUE", help="fields of config.json for --write-model")
    theirs = {word: name for name in c.keys() - {*SHARED, "help"} for word in ("--" + name, *c[name][1])}
    for word in argv:
        if word.split("=")[0] in theirs:
            die(f"--{theirs[word.split('=')[0]]}: is a flag of the C trainers, which train_llama3.py does not have", 2)
    a = p.parse_args(argv)
    for name, (kind, _, _, low, high, value, _) in flags.items():
        field = name.replace("-", "_")
        text, wanted = getattr(a, field), None
        if kind in ("INT", "LONG", "FLOAT") and text is not None:
            number = flag_value(kind, text)
            if number is None or not low <= number <= high:
                wanted = f"a number from {low:.10g} to {high:.10g}" if kind == "FLOAT" else \
                    f"an integer from {low:.0f} to {high:.16g}"
            setattr(a, field, number)
        elif kind == "CHOICE" and text is not None and text not in value.split("|"):
            wanted = f"one of {value}"
        elif text == "" and value != "TEXT":
            die(f"--{name}: is empty, wanted {value}", 2)
        if wanted:
            die(f'--{name}: is "{text}", wanted {wanted}', 2)
    return a


def main():
    a = parse_arguments(sys.argv[1:])
    if len(sys.argv) == 1 or a.write_model or a.write_state:
        settle(a, {})
        from dev.reference import oracles  # which imports this file
        oracles.write(a)
        return
    if not a.train:
        tales = "dev/data/tinytales/tinytales_train.bin"
        if not os.path.exists(tales):
            die(f"--train: is not given, and the default {tales} does not exist\n  hint: make {tales}")
        a.train, a.val = tales, a.val or tales.replace("_train", "_val")
    train(a)


if __name__ == "__main__":
    sys.modules["train_llama3"] = sys.modules["__main__"]  # oracles.py imports this file by its name
    main()
