#!/usr/bin/env python3
"""train_llama3.py -- the PyTorch reference: the same Llama 3, the same data order and the same flags as the C trainers.

    python train_llama3.py                                  regenerates the reference models and debug states of the tests
    python train_llama3.py --model d4 --train X.bin ...     trains; --model takes a preset or a Hugging Face folder
    python train_llama3.py --write-model DIR --config hidden_size=48 ...         a small random model with telling weights
    python train_llama3.py --write-state F.safetensors --model DIR --batch B --seq T --steps N           its debug state

Everything a run starts from is a pure function of its seed and shared with C: weights come from the generator of
llmc/rand.h, rows of tokens in the order of llmc/dataloader.h, rates from the formulas of llmc/scheduler.h. So the three
trainers start from the same weights, see the same tokens and print the same losses. Model folders are Hugging Face's;
the debug state (one safetensors file) holds what another implementation must reproduce: see write_state(). Runs on one
CPU or one CUDA device; needs torch >= 2.2, numpy and safetensors; samples are text where `tokenizers` is installed too.
"""
import argparse
import bisect
import contextlib
import copy
import glob
import json
import math
import os
import shutil
import sys
import time
from dataclasses import asdict, dataclass, field, fields, replace

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

TORCH = tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in torch.__version__.split(".")[:2])


def die(message, code=1):
    sys.stdout.flush()
    print(f"error: {message}", file=sys.stderr)
    sys.exit(code)


# ----------------------------------------------------------------------------------------------------------------------
# configuration: one dataclass, read from and written to config.json


@dataclass
class Config:
    vocab_size: int = 256
    hidden_size: int = 64
    intermediate_size: int = 256
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    head_dim: int = 16
    max_position_embeddings: int = 8192
    tie_word_embeddings: bool = False
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_type: str = "default"  # or llama3, which alone has the four below
    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    bos_token_id: int = None
    eos_token_id: list = None

    def rope(self):
        r = dict(rope_type=self.rope_type)
        if self.rope_type == "llama3":
            r |= {k: getattr(self, k) for k in LLAMA3_ROPE}
        return r

    def matmul_parameters(self):
        q, kv = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        block = self.hidden_size * (2 * q + 2 * kv + 3 * self.intermediate_size)
        return self.num_hidden_layers * block + self.vocab_size * self.hidden_size

    def flops_per_token(self, T):
        """Forward and backward, the causal half of attention; recomputation is never counted."""
        attention = self.num_hidden_layers * self.num_attention_heads * self.head_dim * T
        return 6 * (self.matmul_parameters() + attention)


LLAMA3_ROPE = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
META = dict(vocab_size=128256, rms_norm_eps=1e-5, rope_theta=500000.0, rope_type="llama3", max_position_embeddings=131072,
            bos_token_id=128000, eos_token_id=[128001])
PRESETS = {name: Config(hidden_size=C, intermediate_size=FF, num_hidden_layers=L, num_attention_heads=NH,
                        num_key_value_heads=8, head_dim=HD, tie_word_embeddings=tied, factor=factor, **META)
           for name, C, FF, L, NH, HD, tied, factor in (
               ("llama3.2-1b", 2048, 8192, 16, 32, 64, True, 32.0), ("llama3.2-3b", 3072, 8192, 28, 24, 128, True, 32.0),
               ("llama3.1-8b", 4096, 14336, 32, 32, 128, False, 8.0), ("llama3.1-70b", 8192, 28672, 80, 64, 128, False, 8.0))}


def preset(name, vocab_size):
    """A preset by name, or None. dN is `depth N`; only its vocabulary comes from the tokenizer."""
    if name in PRESETS:
        return replace(PRESETS[name])
    if not (name[:1] == "d" and name[1:].isdigit() and 1 <= int(name[1:]) <= 1024 and name[1] != "0"):
        return None
    N = int(name[1:])
    kv = max(k for k in range(1, N + 1) if N % k == 0 and k <= max(1, N / 3))
    ffn = -(-(-(-64 * N * 8 // 3)) // 256) * 256
    return Config(vocab_size=vocab_size, hidden_size=64 * N, intermediate_size=ffn, num_hidden_layers=N,
                  num_attention_heads=N, num_key_value_heads=kv, head_dim=64, rms_norm_eps=1e-5, rope_theta=500000.0)


def read_config(folder):
    path = os.path.join(folder, "config.json")
    try:
        with open(path, encoding="utf-8") as f:
            j = {k: v for k, v in json.load(f).items() if v is not None}  # null means absent
    except (OSError, ValueError, AttributeError) as e:
        die(f"{path}: {e}")
    for key, wanted in dict(model_type="llama", hidden_act="silu", attention_bias=False, mlp_bias=False,
                            partial_rotary_factor=1.0).items():
        if j.get(key, wanted) != wanted:
            die(f"{path}: {key} is {j[key]!r}, wanted {wanted!r}")
    try:
        c = Config(vocab_size=j["vocab_size"], hidden_size=j["hidden_size"], intermediate_size=j["intermediate_size"],
                   num_hidden_layers=j["num_hidden_layers"], num_attention_heads=j["num_attention_heads"])
    except KeyError as e:
        die(f"{path}: {e.args[0]} is missing")
    c.num_key_value_heads = j.get("num_key_value_heads", c.num_attention_heads)
    c.head_dim = j.get("head_dim", c.hidden_size // c.num_attention_heads)
    for key in ("max_position_embeddings", "tie_word_embeddings", "rms_norm_eps", "bos_token_id"):
        setattr(c, key, j.get(key, getattr(c, key)))
    eos = j.get("eos_token_id")
    c.eos_token_id = eos if isinstance(eos, list) or eos is None else [eos]
    # RoPE in the old spelling (rope_theta, rope_scaling), in that of transformers 5 (rope_parameters), or in both
    old = dict(j.get("rope_scaling", {}))
    if "rope_theta" in j:
        old["rope_theta"] = j["rope_theta"]
    rope = {}
    for name, spelling in (("rope_scaling", old), ("rope_parameters", dict(j.get("rope_parameters", {})))):
        if "type" in spelling:
            spelling.setdefault("rope_type", spelling.pop("type"))
        for k, v in spelling.items():
            if v is not None and rope.setdefault(k, v) != v:
                die(f"{path}: {name} says {k} is {v!r}, but elsewhere it is {rope[k]!r}")
    c.rope_type, c.rope_theta = rope.get("rope_type", "default"), float(rope.get("rope_theta", 10000.0))
    if c.rope_type not in ("default", "llama3") or rope.get("partial_rotary_factor", 1.0) != 1.0:
        die(f"{path}: RoPE is {rope}, wanted type default or llama3")
    if c.rope_type == "llama3":
        for k in LLAMA3_ROPE:
            if k not in rope:
                die(f"{path}: RoPE type llama3 lacks {k}")
            setattr(c, k, rope[k])
    if c.num_key_value_heads < 1 or c.num_attention_heads % c.num_key_value_heads or c.head_dim % 2:
        die(f"{path}: num_key_value_heads {c.num_key_value_heads} must divide {c.num_attention_heads}, and head_dim "
            f"{c.head_dim} must be even")
    return c


def write_config(c, folder, dtype, spelling="both"):
    """Writes config.json; `spelling` old, new or both is that of RoPE (one alone only for tests of readers)."""
    j = dict(architectures=["LlamaForCausalLM"], model_type="llama", attention_bias=False, attention_dropout=0.0,
             mlp_bias=False, hidden_act="silu", initializer_range=0.02, use_cache=True, dtype=dtype, torch_dtype=dtype)
    for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                "num_key_value_heads", "head_dim", "max_position_embeddings", "tie_word_embeddings", "rms_norm_eps",
                "bos_token_id"):
        j[key] = getattr(c, key)
    j["eos_token_id"] = c.eos_token_id[0] if c.eos_token_id and len(c.eos_token_id) == 1 else c.eos_token_id
    if spelling in ("old", "both"):
        j["rope_theta"] = c.rope_theta
        j["rope_scaling"] = c.rope() if c.rope_type != "default" else None
        if spelling == "old" and c.rope_type != "default":
            j["rope_scaling"]["type"] = j["rope_scaling"].pop("rope_type")
    if spelling in ("new", "both"):
        j["rope_parameters"] = dict(c.rope(), rope_theta=c.rope_theta)
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as f:
        f.write(json.dumps(j, indent=2, sort_keys=True) + "\n")


# ----------------------------------------------------------------------------------------------------------------------
# random numbers: llmc/rand.h on tensors. 32-bit words live in int64; products wrap, and their high words come out right

RAND_INIT, RAND_SHUFFLE_SHARDS, RAND_SHUFFLE_ROWS = 0, 1, 2
M32 = 0xFFFFFFFF


def philox(seed, purpose, stream, index):
    """Philox 4x32-10 of each element of the int64 tensor `index`: four int64 tensors of 32-bit words."""
    c0, c1 = index & M32, (index >> 32) & M32
    c2, c3 = torch.full_like(index, stream), torch.full_like(index, purpose)
    k0, k1 = seed & M32, (seed >> 32) & M32
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = ((p1 >> 32) & M32) ^ c1 ^ k0, p1 & M32
        c2, c3 = ((p0 >> 32) & M32) ^ c3 ^ k1, p0 & M32
        k0, k1 = (k0 + 0x9E3779B9) & M32, (k1 + 0xBB67AE85) & M32
    return c0, c1, c2, c3


def philox_double(high, low):
    return (((high << 21) | (low >> 11)).double()) * 2.0**-53


@torch.no_grad()
def rand_normal_(x, std, seed, tensor, mean=0.0):
    """Fills x with normals: elements 2i and 2i+1 are the Box-Muller pair of draw i, in double, rounded once."""
    flat = x.view(-1)
    for lo in range(0, flat.numel(), 1 << 22):
        part = flat[lo:lo + (1 << 22)]
        index = torch.arange(lo // 2, (lo + part.numel() + 1) // 2, dtype=torch.int64, device=x.device)
        w = philox(seed, RAND_INIT, tensor, index)
        radius = torch.sqrt(-2.0 * torch.log(1.0 - philox_double(w[0], w[1])))
        angle = (2.0 * math.pi) * philox_double(w[2], w[3])
        pair = torch.stack((std * (radius * torch.cos(angle)), std * (radius * torch.sin(angle))), dim=1)
        part.copy_((mean + pair.view(-1)[:part.numel()]) if mean else pair.view(-1)[:part.numel()])


def permutation(n, seed, purpose, stream, base):
    """The order of n things: Fisher-Yates from the back, the partner of place i drawn at index base + i."""
    i = torch.arange(n, dtype=torch.int64)
    w = philox(seed, purpose, stream, base + i)
    high, low, count = (t.numpy().astype(np.uint64) for t in (w[0], w[1], i + 1))
    with np.errstate(over="ignore"):  # the high word of a 64 x 64 bit product; count < 2^32
        partner = ((high * count + ((low * count) >> np.uint64(32))) >> np.uint64(32)).tolist()
    order = list(range(n))
    for k in range(n - 1, 0, -1):
        order[k], order[partner[k]] = order[partner[k]], order[k]
    return order


# ----------------------------------------------------------------------------------------------------------------------
# the model. q, k, v rows lie in one matrix and gate, up in another, as in C: one product serves them


def inverse_frequencies(c):
    """(head_dim / 2,) fp32, in exactly the operations of Hugging Face's LlamaRotaryEmbedding."""
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
    """Rotates x (B, heads, T, HD) by position, halves paired; cos, sin (T, HD/2) are fp32 also where x is not."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


NATIVE_GQA = TORCH >= (2, 5)  # pick_sdpa() may find repeated K and V faster


def attention(q, k, v):
    """Causal attention of q (B, NH, T, HD) with k, v (B, NKV, T, HD); query head h uses kv head h // group."""
    group = q.shape[1] // k.shape[1]
    if group == 1:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    if NATIVE_GQA:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


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

    def forward(self, x, cos, sin):
        B, T, _ = x.shape
        qkv = self.qkv(rms_norm(x, self.input_norm, self.eps))
        q, k, v = qkv.view(B, T, -1, self.hd).transpose(1, 2).split((self.heads, self.kv, self.kv), dim=1)
        y = attention(rope(q, cos, sin), rope(k, cos, sin), v)
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
        self.recompute_every = 0  # every Nth block keeps only its input and runs again in backward; 0: none

    def set_context(self, T, device):
        """Makes the RoPE tables of T positions, in fp32 whatever the model's type."""
        angles = torch.arange(T, dtype=torch.float32)[:, None] * inverse_frequencies(self.c)[None, :]
        self.cos, self.sin = angles.cos().to(device), angles.sin().to(device)
        return self

    def trunk(self, x, dtype=None):
        """Tokens (B, T) to normed hidden states (B, T, C); `dtype` is that of the residual stream, default the weights'."""
        h = self.embedding(x)
        h = h if dtype is None else h.to(dtype)
        cos, sin = self.cos[:x.shape[1]], self.sin[:x.shape[1]]
        for i, block in enumerate(self.blocks):
            if self.recompute_every and self.training and i % self.recompute_every == 0:
                h = torch.utils.checkpoint.checkpoint(block, h, cos, sin, use_reentrant=False)
            else:
                h = block(h, cos, sin)
        return rms_norm(h, self.final_norm, self.c.rms_norm_eps)

    def logits(self, x):
        return F.linear(self.trunk(x), self.head.weight)

    def forward(self, x, y):
        """Mean cross-entropy over all B * T targets y (already shifted)."""
        return F.cross_entropy(self.logits(x).view(-1, self.c.vocab_size).float(), y.view(-1))


def hf_tensors(model, pick=lambda p: p):
    """(Hugging Face name, tensor) in the order of param_table() in llmc/config.h: the position is the tensor's ordinal.
    Tensors are views of the fused ones; `pick` maps a parameter to what is wanted of it, such as its gradient."""
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
    """A model with unset weights; big ones are never initialised twice."""
    with torch.device("meta"):
        model = Llama(c)
    return model.to(dtype).to_empty(device=device)


@torch.no_grad()
def init_weights(model, seed):
    """What the C trainers start from: N(0, 0.02), residual projections N(0, 0.02 / sqrt(2L)), norm gains 1."""
    for ordinal, (name, w) in enumerate(hf_tensors(model)):
        if w.dim() == 1:
            w.fill_(1.0)
        else:
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            rand_normal_(w, 0.02 / math.sqrt(2.0 * model.c.num_hidden_layers) if residual else 0.02, seed, ordinal)


@torch.no_grad()
def init_telling(model, seed, embedding_std=0.02):
    """Weights for tests, large enough for every detail of the model to show in its logits: sharp attention, uneven gains,
    a first residual stream small enough for eps to matter."""
    for ordinal, (name, w) in enumerate(hf_tensors(model)):
        if w.dim() == 1:
            rand_normal_(w, 0.25, seed, ordinal, mean=1.0)
        else:
            rand_normal_(w, embedding_std if "embed_tokens" in name else 0.2, seed, ordinal)


# ----------------------------------------------------------------------------------------------------------------------
# model folders


def load_model(folder, device="cpu", dtype=torch.float32):
    c = read_config(folder)
    index, paths = os.path.join(folder, "model.safetensors.index.json"), [os.path.join(folder, "model.safetensors")]
    if not os.path.exists(paths[0]) and os.path.exists(index):
        with open(index, encoding="utf-8") as f:
            paths = [os.path.join(folder, p) for p in sorted(set(json.load(f)["weight_map"].values()))]
    model = make_model(c, device, dtype)
    wanted = dict(hf_tensors(model))
    head = None
    for path in paths:
        try:
            with safe_open(path, framework="pt") as f, torch.no_grad():
                for name in f.keys():
                    w = f.get_tensor(name)
                    if name.endswith("inv_freq"):
                        continue
                    if name == "lm_head.weight" and c.tie_word_embeddings:
                        head = w
                    elif name not in wanted:
                        die(f"{path}: tensor {name} is unknown or there twice")
                    elif wanted[name].shape != w.shape:
                        die(f"{path}: {name} has shape {list(w.shape)}, wanted {list(wanted[name].shape)}")
                    else:
                        wanted.pop(name).copy_(w)
        except (OSError, SafetensorError) as e:
            die(f"{path}: {e}")
    if wanted:
        die(f"{paths[0]}: tensor {next(iter(wanted))} is missing")
    if head is not None and not torch.equal(head.to(device, dtype), model.embedding.weight.detach()):
        die(f"{folder}: lm_head.weight differs from the embedding, but tie_word_embeddings is true")
    return model


def save_model(model, folder, dtype=None, spelling="both"):
    os.makedirs(folder, exist_ok=True)
    dtype = dtype or model.final_norm.dtype
    write_config(model.c, folder, str(dtype).split(".")[1], spelling)
    tensors = {name: w.detach().to("cpu", dtype).contiguous() for name, w in hf_tensors(model)}
    save_file(tensors, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})


# ----------------------------------------------------------------------------------------------------------------------
# debug state


def adamw(model, lr, betas, eps, weight_decay, params=None):
    """AdamW with decay on every tensor of two dimensions and none on norms. `params`: what to update (default: the model's)."""
    params = list(model.parameters()) if params is None else params
    groups = [dict(params=[p for p in params if p.dim() > 1], weight_decay=weight_decay),
              dict(params=[p for p in params if p.dim() == 1], weight_decay=0.0)]
    fused = params[0].is_cuda or TORCH >= (2, 4)
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=fused)


def random_tokens(c, B, T, seed):
    """x, y (B, T) int64, y being x one place on, from the generator's words (purpose and stream of no other use)."""
    w = philox(seed, 99, 0, torch.arange(B * (T + 1), dtype=torch.int64))[0]
    rows = ((w * c.vocab_size) >> 32).view(B, T + 1)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def write_state(model, path, B, T, steps, seed=1337, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, clip=1.0):
    """Writes what another implementation must reproduce from this fp32 model's weights, on one random batch:
      x, y I32 (B, T); logits F32 (B, T, V); loss F32 (); grad.<name> F32 of the loss by each tensor;
      losses, grad_norms F32 (steps): loss and global gradient norm before clipping at each of `steps` AdamW steps.
    Metadata holds the hyper-parameters as strings, and under `bf16_error.<name>` and `fp16_error.<name>` the relative L2
    error of PyTorch's own gradient when weights and activations have 16 bits: the yardstick of 16-bit builds."""
    c = model.c
    device = model.final_norm.device
    x, y = (t.to(device) for t in random_tokens(c, B, T, seed))
    model.set_context(T, device)
    out = dict(x=x.int(), y=y.int(), logits=model.logits(x).detach())
    loss = model(x, y)
    loss.backward()
    grads = {name: g.clone() for name, g in hf_tensors(model, lambda p: p.grad)}
    out |= dict(loss=loss.detach()) | {"grad." + name: g for name, g in grads.items()}
    meta = dict(steps=steps, learning_rate=lr, beta1=betas[0], beta2=betas[1], eps=eps, weight_decay=weight_decay,
                grad_clip=clip)
    for kind, dtype, scale in (("bf16", torch.bfloat16, 1.0), ("fp16", torch.float16, 1024.0)):
        model.zero_grad()
        half = copy.deepcopy(model).to(dtype)
        (half(x, y) * scale).backward()
        for name, g in hf_tensors(half, lambda p: p.grad):
            error = (g.float() / scale - grads[name]).norm() / grads[name].norm()
            meta[f"{kind}_error.{name}"] = f"{error.item():.4g}"
    model = copy.deepcopy(model)
    opt = adamw(model, lr, betas, eps, weight_decay)
    losses, norms = [], []
    for _ in range(steps):
        opt.zero_grad()
        loss = model(x, y)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        opt.step()
        losses.append(loss.item())
    out |= dict(losses=torch.tensor(losses), grad_norms=torch.tensor(norms))
    save_file({k: v.cpu().contiguous() for k, v in out.items()}, path, metadata={k: str(v) for k, v in meta.items()})
    return losses, norms


# The pairs under dev/test/pairs: odd shapes, each original RoPE length below T so that the factor shows, each config.json
# in another spelling. Folder NAME and file NAME.state.safetensors.
PAIRS = {
    "gqa2_untied_rope8": dict(
        config=dict(vocab_size=97, hidden_size=40, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2,
                    head_dim=12, rms_norm_eps=1e-5, rope_theta=10000.0, rope_type="llama3", factor=8.0,
                    original_max_position_embeddings=16), batch=2, seq=24, embedding_std=0.02, spelling="new"),
    "tied_gqa4_rope32": dict(
        config=dict(vocab_size=131, hidden_size=32, intermediate_size=88, num_attention_heads=4, num_key_value_heads=1,
                    head_dim=16, rms_norm_eps=1e-3, rope_theta=500000.0, rope_type="llama3", factor=32.0,
                    original_max_position_embeddings=8, tie_word_embeddings=True),
        batch=2, seq=32, embedding_std=0.15, spelling="both"),
    "mha_odd": dict(
        config=dict(vocab_size=97, hidden_size=32, intermediate_size=136, num_attention_heads=2, num_key_value_heads=2,
                    head_dim=10, rms_norm_eps=1e-4, rope_theta=1000.0, rope_type="llama3", factor=8.0,
                    low_freq_factor=0.5, high_freq_factor=3.0, original_max_position_embeddings=12),
        batch=3, seq=17, embedding_std=0.04, spelling="old"),
}


def write_pairs(out):
    for i, (name, p) in enumerate(PAIRS.items()):
        model = make_model(Config(**p["config"]))
        init_telling(model, 100 + i, p["embedding_std"])
        save_model(model, os.path.join(out, name), spelling=p["spelling"])
        path = os.path.join(out, name + ".state.safetensors")
        losses, norms = write_state(model, path, p["batch"], p["seq"], 10, seed=200 + i, lr=3e-3)
        print(f"{path}: loss {losses[0]:.4f} -> {losses[-1]:.4f}, gradient norm {norms[0]:.3f} -> {norms[-1]:.3f}")
