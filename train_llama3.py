#!/usr/bin/env python3
"""train_llama3.py -- the PyTorch reference: the model, data and order of the C trainers, and of their flags those that it has.

    python train_llama3.py                                  writes the tests' models and debug states to out/reference
    python train_llama3.py --model d4 --train X.bin ...     trains; --model takes a preset or a Hugging Face folder
    python train_llama3.py --write-model DIR --config hidden_size=48 ...         writes a small random model for tests
    python train_llama3.py --write-state F.safetensors --model DIR --batch B --seq T --steps N           writes its debug state

Initial weights, data order and learning rates are pure functions of the seed and the flags, the same as in C: weights from
the generator of llmc/base/rand.h, rows of tokens in the order of llmc/files/dataloader.h, rates by llmc/train/scheduler.h. So the
three trainers start from the same weights, see the same tokens and print the same losses. Model folders have Hugging Face's
format. The debug state (one safetensors file) holds what another implementation must reproduce: see write_state(). Runs on
one CPU or one CUDA device. Needs torch >= 2.2, numpy and safetensors; samples are text if `tokenizers` is installed too.
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
from dataclasses import asdict, dataclass, fields, replace

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
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
    rope_type: str = "default"  # or "llama3", which has the four fields below
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
        """Returns the FLOPs of forward and backward, with the causal half of attention, without recomputation."""
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
    """Returns a preset by name, or None. dN has N layers, and `vocab_size` tokens; other presets have their own vocabulary."""
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
    # RoPE is spelled the old way (rope_theta, rope_scaling), as in transformers 5 (rope_parameters), or both ways
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
    """Writes config.json. `spelling` of RoPE: old, new or both (old and new are for tests of readers)."""
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
# random numbers: llmc/base/rand.h on tensors. 32-bit words are int64; products wrap, but the words taken from them are right

RAND_INIT, RAND_SHUFFLE_SHARDS, RAND_SAMPLE, RAND_ORDER_ROWS, RAND_MIX, RAND_ADAPTERS = 0, 1, 3, 6, 7, 8
M32 = 0xFFFFFFFF


def philox(seed, purpose, stream, index):
    """Returns Philox 4x32-10 of an int `index`, or of each element of an int64 tensor: four ints or tensors of 32-bit words."""
    c0, c1, c2, c3 = index & M32, (index >> 32) & M32, stream, purpose
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


@torch.no_grad()
def rand_even_(x, bound, seed, tensor):
    """Fills x with numbers that are evenly spread in [-bound, bound): elements 2i and 2i+1 are those of draw i."""
    w = philox(seed, RAND_ADAPTERS, tensor, torch.arange((x.numel() + 1) // 2, dtype=torch.int64, device=x.device))
    pair = torch.stack((philox_double(w[0], w[1]), philox_double(w[2], w[3])), dim=1).view(-1)[:x.numel()]
    x.copy_((bound * (2.0 * pair - 1.0)).view_as(x))


def philox_below(seed, purpose, stream, index, n):
    w = philox(seed, purpose, stream, index)
    return ((w[0] << 32 | w[1]) * n) >> 64


def shuffled(n, seed, purpose, stream):
    """Returns a random order of n things: Fisher-Yates from the back; draw i gives the partner of place i."""
    order = list(range(n))
    for i in range(n - 1, 0, -1):
        j = philox_below(seed, purpose, stream, i, i + 1)
        order[i], order[j] = order[j], order[i]
    return order


def order_row(x, n, seed, shard, epoch):
    """Returns which row of a shard of n rows comes at place x of an epoch: P(x) of llmc/files/dataloader.h."""
    w = philox(seed, RAND_ORDER_ROWS, shard, epoch)
    key, a = w[0] << 32 | w[1], (math.isqrt(n - 1) + 2) // 2 * 2
    b = -(-n // a)
    while True:
        r, l = divmod(x, a)
        for i in range(0, 16, 2):
            l = (l + philox_below(key, RAND_ORDER_ROWS, i, r, a)) % a
            r = (r + philox_below(key, RAND_ORDER_ROWS, i + 1, l, b)) % b
        x = a * r + l
        if x < n:
            return x


# ----------------------------------------------------------------------------------------------------------------------
# the model. As in C, q, k, v are fused into one matrix, and gate, up into another: one product each


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
    """Rotates x (B, T, heads, HD) by position, pairing element i with i + HD/2. cos, sin (T, 1, HD/2), or (B, T, 1, HD/2), are
    always fp32."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


NATIVE_GQA = TORCH >= (2, 5)  # pick_sdpa() turns it off if repeated K and V are faster


def document_mask(starts):
    """Returns (B, 1, T, T): whether a query sees a key: one of its own document. starts (B, T) holds, for each token, the index
    inside its row of its document's first token."""
    t = torch.arange(starts.shape[1], device=starts.device)
    return ((starts[:, :, None] <= t) & (t <= t[:, None]))[:, None]


def attention(q, k, v, mask=None):
    """Computes attention of q (B, NH, T, HD) with k, v (B, NKV, T, HD): causal, or by a document_mask(). Query head h uses kv
    head h // group."""
    group, seen = q.shape[1] // k.shape[1], dict(attn_mask=mask, is_causal=mask is None)
    if group == 1:
        return F.scaled_dot_product_attention(q, k, v, **seen)
    if NATIVE_GQA:
        return F.scaled_dot_product_attention(q, k, v, **seen, enable_gqa=True)
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    return F.scaled_dot_product_attention(q, k, v, **seen)


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def scaled_fp8(x, largest, kind):
    """Returns x rounded to 8 bits with the scale by the largest absolute value, as llmc/quantise.h does: the values, not the 8
    bits."""
    mantissa, exponent = torch.frexp(largest)  # in [0.5, 1): 448 = 0.875 * 2^9, 57344 = 0.875 * 2^16
    top = 9 if kind == E4M3 else 16
    scale = torch.ldexp(torch.ones_like(largest), (exponent - top + (mantissa > 0.875)).clamp(min=-126))
    out = (x.float() / scale).to(kind).float() * scale
    return torch.where(largest == 0, x.float(), torch.where(largest.isfinite(), out, math.nan)).to(x.dtype)


def quantised(x, kind=E4M3):
    """Returns x with its rows in 8 bits with a scale each."""
    return scaled_fp8(x, x.float().abs().amax(dim=-1, keepdim=True), kind)


def quantised_whole(x, of, kind=E4M3):
    """Returns x, which is `of` or its 8-bit rows, in 8 bits with the one scale of `of`."""
    return scaled_fp8(x, of.float().abs().amax(), kind).flatten(0, -2)


class Fp8Product(torch.autograd.Function):
    """x W^T as --fp8 of train_llama3cu computes it: all three products have factors in 8 bits, dy's of the type `kind` and all
    others e4m3, those of the weight's gradient with one scale each, and of these dy comes from its 8-bit rows. factor: of dy,
    multiplied behind the products instead."""

    @staticmethod
    def forward(ctx, x, w, kind=E4M3, factor=1.0):
        ctx.save_for_backward(x, w)
        ctx.kind, ctx.factor = kind, factor
        return F.linear(quantised(x), quantised(w))

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dy = dy / ctx.factor
        rows = quantised(dy, ctx.kind)
        dx, dw = F.linear(rows, quantised(w.T)), quantised_whole(rows, dy, ctx.kind).T @ quantised_whole(x, x)
        return dx * ctx.factor, dw * ctx.factor, None, None


class Fp8Linear(nn.Linear):
    def forward(self, x):
        return Fp8Product.apply(x, self.weight)


def use_fp8(model, head=False):
    """Lets the linear layers of the blocks compute as with --fp8, with `head` also the head as with --fp8-head. Returns the
    model."""
    for block in model.blocks:
        for layer in (block.qkv, block.o, block.gate_up, block.down):
            layer.__class__ = Fp8Linear
    model.fp8_head = head
    return model


def fits_fp8(c, tokens):
    """Tells whether --fp8 takes this model and micro-batches of so many tokens. --fp8-head also wants the vocabulary so."""
    heads = c.num_attention_heads + 2 * c.num_key_value_heads
    widths = (c.hidden_size, c.num_attention_heads * c.head_dim, heads * c.head_dim, c.intermediate_size, tokens)
    return all(n % 16 == 0 for n in widths)


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
        self.lora = None  # of a model with adapters: rank, alpha and the names of their matrices, see add_lora()
        self.fp8_head = False  # see use_fp8()
        self.recompute_every = 0  # every Nth block keeps only its input and is recomputed in backward; 0: none

    def set_context(self, T, device):
        """Computes the RoPE tables of T positions, always in fp32."""
        angles = torch.arange(T, dtype=torch.float32)[:, None, None] * inverse_frequencies(self.c)
        self.cos, self.sin = angles.cos().to(device), angles.sin().to(device)
        return self

    def trunk(self, x, dtype=None, blocks=None, starts=None):
        """Maps tokens (B, T) to normed hidden states (B, T, C) through `blocks`, which may be compiled. `dtype`: type of the
        residual stream, by default that of the weights. starts (B, T): attention stays inside documents, and positions count
        from their starts, see document_mask()."""
        h = self.embedding(x)
        h = h if dtype is None else h.to(dtype)
        at = slice(x.shape[1]) if starts is None else torch.arange(x.shape[1], device=x.device) - starts
        cos, sin, mask = self.cos[at], self.sin[at], None if starts is None else document_mask(starts)
        for i, block in enumerate(blocks or self.blocks):
            if self.recompute_every and torch.is_grad_enabled() and i % self.recompute_every == 0:
                h = checkpoint(block, h, cos, sin, mask, use_reentrant=False)
            else:
                h = block(h, cos, sin, mask)
        return rms_norm(h, self.final_norm, self.c.rms_norm_eps)

    def logits(self, x, starts=None):
        h, w = self.trunk(x, starts=starts), self.head.weight
        if not self.fp8_head:
            return F.linear(h, w)
        return Fp8Product.apply(h, w, E5M2, 2 * math.frexp(1 / x.numel())[0])  # what of 1 / tokens is no power of two

    def forward(self, x, y, starts=None):
        """Returns the mean cross-entropy over the targets y (already shifted) that are not -1."""
        return F.cross_entropy(self.logits(x, starts).view(-1, self.c.vocab_size).float(), y.view(-1), ignore_index=-1)


def hf_tensors(model, pick=lambda p: p):
    """Yields (Hugging Face name, tensor) in the order of param_table() in llmc/config.h: the position is the tensor's ordinal.
    Tensors are views of the fused ones. `pick` maps a parameter to the wanted tensor, such as its gradient."""
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
    """Makes a model with uninitialized weights, since initializing a big model twice takes long."""
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


@torch.no_grad()
def init_telling(model, seed, embedding_std=0.02):
    """Weights for tests, large enough for every detail of the model to show in its logits: attention that is not flat, uneven
    gains, a first residual stream small enough for eps to matter. And no larger than that: rounding to BF16 takes the norm of
    a small gradient off by 0.3 % (root mean square, seeds 500 to 529), and 16-bit builds must keep it within 1 % where
    PyTorch does."""
    for ordinal, (name, w) in enumerate(hf_tensors(model)):
        if w.dim() == 1:
            rand_normal_(w, 0.25, seed, ordinal, mean=1.0)
        else:
            rand_normal_(w, embedding_std if "embed_tokens" in name else 0.08, seed, ordinal)


# ----------------------------------------------------------------------------------------------------------------------
# LoRA: y = x W^T + alpha / rank (x A^T) B^T beside frozen weights W


LORA_ON = {"qkvo": ["q_proj", "k_proj", "v_proj", "o_proj"], "ffn": ["gate_proj", "up_proj", "down_proj"]}
LORA_ON["all"] = LORA_ON["qkvo"] + LORA_ON["ffn"]


class Lora(nn.Module):
    """A fused product with the adapters of its parts, (name, rows) each; `on` names those that have some."""

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
    """Freezes the weights and adds adapters of zeros beside the matrices that `on` names."""
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


def adapter_config(folder):
    """Returns the adapter_config.json of a folder of adapters, or None."""
    path = os.path.join(folder, "adapter_config.json")
    if not os.path.exists(path):
        return None
    with open(path, encoding="utf-8") as f:
        return json.load(f)


def base_folder(folder):
    """Returns the folder of the base model, if the folder holds adapters, else the folder."""
    adapter = adapter_config(folder)
    return adapter["base_model_name_or_path"] if adapter else folder


def load_adapters(model, folder, adapter):
    add_lora(model, adapter["r"], adapter["lora_alpha"], adapter["target_modules"])
    with safe_open(os.path.join(folder, "adapter_model.safetensors"), framework="pt") as f, torch.no_grad():
        for name, w in adapters(model):
            w.copy_(f.get_tensor(name))
    return model


def save_adapters(model, folder, base):
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "adapter_config.json"), "w", encoding="utf-8") as f:
        json.dump(dict(peft_type="LORA", task_type="CAUSAL_LM", base_model_name_or_path=base, r=model.lora["rank"],
                       lora_alpha=model.lora["alpha"], lora_dropout=0.0, bias="none", target_modules=model.lora["on"]), f,
                  indent=2)
    save_file({name: w.detach().to("cpu", torch.float32).contiguous() for name, w in adapters(model)},
              os.path.join(folder, "adapter_model.safetensors"), metadata={"format": "pt"})


# ----------------------------------------------------------------------------------------------------------------------
# model folders


def load_model(folder, device="cpu", dtype=torch.float32):
    """Reads a model's folder, or one of adapters and its base."""
    adapter = adapter_config(folder)
    if adapter:
        return load_adapters(load_model(adapter["base_model_name_or_path"], device, dtype), folder, adapter)
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
    size = sum(w.numel() * w.element_size() for w in tensors.values())
    with open(os.path.join(folder, "model.safetensors.index.json"), "w", encoding="utf-8") as f:
        json.dump({"metadata": {"total_size": size}, "weight_map": {name: "model.safetensors" for name in tensors}}, f,
                  indent=2)


# ----------------------------------------------------------------------------------------------------------------------
# debug state


def adamw(model, lr, betas, eps, weight_decay, params=None):
    """Makes AdamW with decay on two-dimensional tensors, none on norms. `params`: what to update (default: the model's)."""
    params = trained_parameters(model) if params is None else params
    groups = [dict(params=[p for p in params if p.dim() > 1], weight_decay=weight_decay),
              dict(params=[p for p in params if p.dim() == 1], weight_decay=0.0)]
    fused = params[0].is_cuda or TORCH >= (2, 4)
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=fused)


def random_tokens(c, B, T, seed):
    """Returns x, y (B, T) int64, y shifted by one, drawn from a purpose and stream of the generator that nothing else uses."""
    w = philox(seed, 99, 0, torch.arange(B * (T + 1), dtype=torch.int64))[0]
    rows = ((w * c.vocab_size) >> 32).view(B, T + 1)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


# the types of 16-bit builds with their loss scales; FP16's keeps small gradients out of the denormals
TYPES_16BIT = (("bf16", torch.bfloat16, 1.0), ("fp16", torch.float16, 1024.0))
FP8 = ("fp8", torch.bfloat16, 1.0)  # BF16 with --fp8
FP8_HEAD = ("fp8_head", torch.bfloat16, 1.0)  # and --fp8-head
RUNS_16BIT = 8
GRADIENT_RUNS_16BIT = 16


def perturbed(model, dtype, run):
    """Returns a copy of a model whose weights differ from it by at most one rounding to `dtype`, in each run others."""
    rounding, generator, out = torch.finfo(dtype).eps / 2, torch.Generator().manual_seed(run), copy.deepcopy(model)
    with torch.no_grad():
        for w in out.parameters():
            w.mul_(1 + rounding * (2 * torch.rand(w.shape, generator=generator) - 1).to(w.device))
    return out


def gradients(model, batch, loss_scale=1.0):
    """Returns {name: gradient in fp32} of what is trained."""
    model.zero_grad()
    (model(*batch) * loss_scale).backward()
    return {name: g.float() / loss_scale for name, g in trained_tensors(model, lambda p: p.grad)}


def as_kind(model, kind):
    """Returns a model of 16 bits that computes as a kind of run does: "bf16", "fp16", "fp8" or "fp8_head"."""
    return use_fp8(model, kind == "fp8_head") if kind.startswith("fp8") else model


def gradient_errors_16bit(model, dtype, loss_scale, batch, kind=""):
    """Returns how far the gradients of PyTorch's own 16-bit runs are off fp32's from the same weights, as {name: (relative L2
    error, relative error of the norm)}, the largest of GRADIENT_RUNS_16BIT runs; under "all" those of all gradients as one.
    Of a `kind` with fp8, products are those of use_fp8(), and under "logits" are the errors of the logits.

    One run is no yardstick: a norm's error is a sum of many roundings and scatters about zero, so that it is small in some run
    of any arithmetic. Each run starts from other perturbed() weights, which draws all roundings anew."""
    worst = {}
    for run in range(GRADIENT_RUNS_16BIT):
        exact = perturbed(model, dtype, run)
        low = as_kind(copy.deepcopy(exact).to(dtype), kind)
        want, got = gradients(exact, batch), gradients(low, batch, loss_scale)
        for m, grads in ((exact, want), (low, got)):
            grads["all"] = torch.cat([g.flatten() for g in grads.values()])
            if kind.startswith("fp8"):
                grads["logits"] = m.logits(batch[0], *batch[2:]).detach().float()
        for name, w in want.items():
            g, size = got[name], w.norm()
            errors = torch.stack(((g - w).norm() / size, (g.norm() / size - 1).abs()))
            worst[name] = torch.maximum(worst[name], errors) if run else errors
    return {name: errors.tolist() for name, errors in worst.items()}


def adamw_steps(master, opt, dtype, loss_scale, batch, steps, clip, kind=""):
    """Takes `steps` AdamW steps of `opt` on fp32 weights; a copy of them in `dtype` computes, as in the trainers and as_kind().
    batch: what the model's forward takes. Returns (2, steps): losses, and gradient norms before clipping."""
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
    """Returns how far PyTorch's own 16-bit runs deviate from the fp32 run `want` (2, steps): the largest relative error up to
    each step over RUNS_16BIT runs, each from weights that differ from the model's by at most one rounding to 16 bits."""
    worst = torch.zeros(want.shape)
    for run in range(RUNS_16BIT):
        master = perturbed(model, dtype, run)
        got = adamw_steps(master, new_optimizer(master), dtype, loss_scale, batch, want.shape[1], clip, kind)
        worst = torch.maximum(worst, (got / want - 1).abs())
    return worst.cummax(dim=1).values


def write_state(model, path, B, T, steps, seed=1337, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, clip=1.0,
                device_16bit=None, documents=None):
    """Writes what another implementation must reproduce from this fp32 model's weights, on one random batch:
      x, y I32 (B, T); with `documents`, a list of lengths for each row, starts I32 (B, T), see document_mask();
      logits F32 (B, T, V); loss F32 (); grad.<name> F32 of the loss by each tensor;
      losses, grad_norms F32 (steps): loss and global gradient norm before clipping at each of `steps` AdamW steps.
    Metadata holds the hyper-parameters as strings, and PyTorch's own errors in BF16 and FP16, the yardstick of 16-bit builds:
      bf16_error.<name>, fp16_error.<name>          the relative L2 error of a tensor's gradient: see gradient_errors_16bit()
      bf16_norm_error.<name>, ...                   the relative error of its norm; "all" as <name>: of all gradients as one
      bf16_error.losses, bf16_error.grad_norms, ... `steps` numbers each: see errors_16bit()
      fp8_error.<name>, ... "logits" as <name> too  of BF16 with --fp8, if it takes such a model (fits_fp8)
      fp8_head_error.<name>, ...                    and --fp8-head
    The 16-bit runs are computed on `device_16bit`, by default the model's device."""
    c = model.c
    device = model.final_norm.device
    batch = [t.to(device) for t in random_tokens(c, B, T, seed)]
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
        return adamw(m, lr, betas, eps, weight_decay)
    master = copy.deepcopy(model)
    want = adamw_steps(master, new_optimizer(master), torch.float32, 1.0, batch, steps, clip)
    out |= dict(losses=want[0], grad_norms=want[1])
    *batch, model = (t.to(device_16bit or device) for t in (*batch, copy.deepcopy(model)))
    model.set_context(T, batch[0].device)
    kinds = TYPES_16BIT
    if fits_fp8(c, B * T) and not model.lora:
        kinds += (FP8,) + ((FP8_HEAD,) if c.vocab_size % 16 == 0 else ())
    for kind, dtype, loss_scale in kinds:
        for name, errors in gradient_errors_16bit(model, dtype, loss_scale, batch, kind).items():
            for what, error in zip(("error", "norm_error"), errors):
                if math.isfinite(error):  # as below
                    meta[f"{kind}_{what}.{name}"] = f"{error:.4g}"
        errors = errors_16bit(model, new_optimizer, dtype, loss_scale, batch, want, clip, kind)
        for name, row in zip(("losses", "grad_norms"), errors):
            if row.isfinite().all():  # skip an FP16 run that overflows: it is no yardstick
                meta[f"{kind}_error.{name}"] = " ".join(f"{e:.4g}" for e in row.tolist())
    save_file({k: v.cpu().contiguous() for k, v in out.items()}, path, metadata={k: str(v) for k, v in meta.items()})
    return want[0].tolist(), want[1].tolist()


# The pairs under dev/test/pairs, folder NAME and file NAME.state.safetensors: odd shapes, each original RoPE length below T so
# that the factor shows, the first three config.json in another spelling each. The last has rows of documents. The seeds are
# fixed, not selected: 1 to 4.
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


# pairs with adapters beside the weights of others: their folders hold adapters alone
LORA_PAIRS = {
    "lora_all": dict(base="gqa2_untied_rope8", rank=3, alpha=4.5, on=LORA_ON["all"], batch=2, seq=24),
    "lora_some": dict(base="tied_gqa4_rope32", rank=8, alpha=16, on=["k_proj", "v_proj", "o_proj", "up_proj"], batch=2, seq=32),
}


PAIR_SEEDS = {"gqa2_untied_rope8": 1, "tied_gqa4_rope32": 2, "mha_odd": 3, "documents": 4, "lora_all": 4, "lora_some": 5,
              "fp8": 6, "fp8_head": 7}


def pair_seed(name):
    return PAIR_SEEDS[name]


def pair_model(name):
    if name in LORA_PAIRS:
        pair = LORA_PAIRS[name]
        model = pair_model(pair["base"])
        add_lora(model, pair["rank"], pair["alpha"], pair["on"])
        for ordinal, (_, w) in enumerate(adapters(model)):
            rand_normal_(w, 0.2, pair_seed(name), ordinal)
        return model
    model = make_model(Config(**PAIRS[name]["config"]))
    init_telling(model, pair_seed(name), embedding_std=0.1)
    return model


def write_pair_state(model, name, path):
    """Writes the state of ten steps at the default rate, with a weight decay large enough to show."""
    torch.set_num_threads(1)  # such small models are slower on several threads
    p = (PAIRS | LORA_PAIRS)[name]
    return write_state(model, path, p["batch"], p["seq"], 10, pair_seed(name), weight_decay=2.0, documents=p.get("documents"))


def write_pairs(out):
    for name, pair in (PAIRS | LORA_PAIRS).items():
        model = pair_model(name)
        if model.lora:
            save_adapters(model, os.path.join(out, name), os.path.join(out, pair["base"]))
        else:
            save_model(model, os.path.join(out, name), spelling=pair["spelling"])
        path = os.path.join(out, name + ".state.safetensors")
        losses, norms = write_pair_state(model, name, path)
        print(f"{path}: loss {losses[0]:.4f} -> {losses[-1]:.4f}, gradient norm {norms[0]:.3f} -> {norms[-1]:.3f}")


# ----------------------------------------------------------------------------------------------------------------------
# data: token files and the orders of llmc/files/dataloader.h and mix.h, for one process


ROWS_WINDOW = 256


class TokenFile:
    def __init__(self, path):
        head = np.fromfile(path, dtype="<i4", count=256)
        kinds = {(20240520, 1): ("<u2", False), (20240801, 7): ("<u4", False),
                 (20240520, 2): ("<u2", True), (20240801, 8): ("<u4", True)}
        kind, self.masked = kinds.get((int(head[0]), int(head[1])) if len(head) == 256 else None, (None, False))
        if kind is None:
            die(f"{path}: is no token file\n  hint: make one from text with ./tokenize --tokenizer DIR -o OUT.bin FILE")
        if head[10 if head[8] == 1 else 8:].any():  # word 9 is a checksum; --dry-run of the C trainers checks it
            die(f"{path}: words 8 to 255 of the header are not zero, nor a 1 and a checksum")
        count, self.vocab_size, self.path = int(head[4:6].view("<u8")[0]) or int(head[2]), int(head[3]), path
        size, end = os.path.getsize(path), 1024 + count * np.dtype(kind).itemsize
        if size != end + (count + 7) // 8 * self.masked:
            die(f"{path}: token count is {count}, but the file of {size} bytes holds another number of tokens")
        self.tokens = np.memmap(path, dtype=kind, mode="r", offset=1024, shape=(count,))
        self.mask = np.memmap(path, dtype="u1", mode="r", offset=end) if self.masked else None  # one bit a token

    def trained(self, first, last):
        """Returns whether each token first ... last - 1 is trained as a target."""
        if not self.masked:
            return np.ones(max(0, last - first), dtype=bool)
        bits = np.unpackbits(self.mask[first // 8:(last + 7) // 8], bitorder="little")
        return bits[first % 8:first % 8 + max(0, last - first)].astype(bool)

    def make_rows(self, T, documents, bos):
        """Finds the rows of T tokens: `pieces` of each (first, length), as in llmc/files/rows.h; None: all multiples of T."""
        count, cross = len(self.tokens), documents == "cross"
        if count < (T + 1 if cross else 2):
            die(f"{self.path}: holds {count} tokens, wanted at least {T + 1}, one row of --seq {T} and its last target")
        self.rows, self.pieces, self.documents = (count - 1) // T, None, documents
        if cross and not self.masked:
            return
        if cross:
            pieces = [(i * T, T) for i in range(self.rows)]
        else:
            starts = np.flatnonzero(self.tokens == bos)
            if len(starts) == 0:
                die(f"{self.path}: holds no BOS token (id {bos}), so nothing tells where its documents begin")
            edges = sorted({0, *starts.tolist(), count})
            pieces = [(i, min(T, end - i)) for start, end in zip(edges, edges[1:]) for i in range(start, end, T)]
        self.pieces, window = [], []
        for first, length in pieces:
            if self.trained(first + 1, min(first + length + 1, count)).any():
                self.place(window, first, length, T)
        self.pieces += [row for _, row in window]
        self.rows = len(self.pieces)
        if not self.pieces:
            die(f"{self.path}: holds no trained token in rows of --seq {T}")

    def place(self, window, first, length, T):
        """Puts a piece into the row with the least room that is enough. window: [room, pieces] of the open rows, the oldest
        first."""
        fits = [w for w in window if w[0] >= length]
        if not fits and len(window) == (ROWS_WINDOW if self.masked else 1):
            self.close(window, min(window, key=lambda w: w[0]))
        if not fits:
            window.append([T, []])
        row = min(fits, key=lambda w: w[0]) if fits else window[-1]
        row[0] -= length
        row[1].append((first, length))
        if row[0] == 0:
            self.close(window, row)

    def close(self, window, row):
        self.pieces.append(row[1])
        del window[next(i for i, w in enumerate(window) if w is row)]

    def read(self, row, T):
        """Returns tokens, targets and starts of a row, (3, T)."""
        out, at = np.zeros((3, T), dtype=np.int64), 0
        out[1] = -1
        for first, length in [(row * T, T)] if self.pieces is None else self.pieces[row]:
            end = min(first + length + 1, len(self.tokens))
            targets = np.where(self.trained(first + 1, end), self.tokens[first + 1:end].astype(np.int64), -1)
            out[0, at:at + length] = self.tokens[first:first + length]
            out[1, at:at + len(targets)] = targets
            out[2, at:at + length] = at
            at += length
        out[2, at:] = at
        return out if self.documents == "mask" else out[:2]


class DataLoader:
    """Reads rows of T tokens from the files that match a pattern. `row` counts the rows read so far, over all epochs."""

    def __init__(self, pattern, B, T, seed=0, shuffle=False, documents="auto", bos=None):
        paths = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern), key=os.fsencode)
        if not paths:
            die(f"{pattern}: no such token file, and no file matches this as a pattern")
        self.files = [TokenFile(p) for p in paths]
        masked = self.files[0].masked
        self.documents = documents if documents != "auto" else "mask" if masked else "cross"
        if any(f.masked != masked for f in self.files):
            die(f"{pattern}: files with and without a mask, wanted all alike")
        if self.documents != "cross" and bos is None:
            die(f"{pattern}: the tokenizer that made it is not known\n  hint: give it as --tokenizer, or --documents cross")
        for f in self.files:
            f.make_rows(T, self.documents, bos)
        self.B, self.T, self.seed, self.shuffle, self.row = B, T, seed, shuffle, 0
        self.rows_per_epoch = sum(f.rows for f in self.files)
        self.num_tokens = sum(len(f.tokens) for f in self.files)
        self.vocab_size = max(f.vocab_size for f in self.files)
        self.usual_vocab = {2: 50257, 4: 128256}[self.files[0].tokens.itemsize]  # for files without one: GPT-2's, Llama 3's
        self.epoch, self.partial = -1, any(f.pieces is not None for f in self.files)  # partial: some targets are -1

    def locate(self, row):
        """Returns (file, row in the file) of row `row` of the stream."""
        epoch, at = divmod(row, self.rows_per_epoch)
        if epoch != self.epoch:
            n = len(self.files)
            self.epoch = epoch
            self.order = shuffled(n, self.seed, RAND_SHUFFLE_SHARDS, epoch) if self.shuffle else list(range(n))
            self.starts = np.cumsum([0] + [self.files[i].rows for i in self.order]).tolist()
        place = bisect.bisect_right(self.starts, at) - 1
        i, at = self.order[place], at - self.starts[place]
        f = self.files[i]
        return f, order_row(at, f.rows, self.seed, i, epoch) if self.shuffle else at

    def next(self, device, vocab_size, B=None):
        """Returns the next B rows, int64 on the device: inputs, targets, -1 where they are not trained, and with documents that
        do not see each other the starts of these, each (B, T)."""
        B = B or self.B
        rows = np.zeros((3 if self.documents == "mask" else 2, B, self.T), dtype=np.int64)
        for b in range(B):
            f, i = self.locate(self.row + b)
            row = f.read(i, self.T)
            rows[:len(row), b] = row
            if rows[:2, b].max() >= vocab_size:
                die(f"{f.path}: row {i} holds token {rows[:2, b].max()}, but the vocabulary has {vocab_size}")
        self.row += B
        out = [torch.from_numpy(r.copy()) for r in rows]
        return [t.pin_memory().to(device, non_blocking=True) for t in out] if device.type == "cuda" else out


MIX_BLOCK = 4096


def names_files(text):
    return os.path.exists(text) or bool(glob.glob(text))


def mix_part(text):
    """Returns (pattern, weight) of the part that a --train begins with, and its length; weight 0: it has none."""
    ends = [i for i in range(len(text), -1, -1) if i == len(text) or text[i] == ","]
    for n in ends:  # what is left behind if nothing is found is the first comma's
        whole = text[:n]
        pattern, colon, number = whole.rpartition(":")
        if names_files(whole):
            return whole, 0, n
        if colon and "," not in number and names_files(pattern):
            break
    try:
        weight = float(number) if colon else None
    except ValueError:
        weight = 0 if names_files(pattern) else None
    if weight is None:
        return whole, 0, n
    if not 0 < weight <= 1e9:
        die(f"--train: the weight of {pattern} is {number}, wanted a number above 0, at most 1e9")
    return pattern, weight, n


def mix_parts(text):
    """Returns [(pattern, weight), ...] of a --train."""
    parts = []
    while True:
        *part, n = mix_part(text)
        parts.append(part)
        if n == len(text):
            break
        text = text[n + 1:]
    for pattern, weight in parts:
        if not pattern:
            die("--train: a part is empty, wanted PATTERN:WEIGHT between commas")
        if len(parts) > 1 and not weight:
            die(f"--train: {pattern} has no weight, wanted one for each of the {len(parts)} parts")
    return parts


class MixLoader(DataLoader):
    """Reads the rows of several sources in the order of llmc/files/mix.h."""

    def __init__(self, parts, B, T, seed, documents="auto", bos=None):
        self.sources = [DataLoader(pattern, B, T, seed, True, documents, bos) for pattern, _ in parts]
        self.documents = "mask" if any(s.documents == "mask" for s in self.sources) else "cross"
        total = sum(weight for _, weight in parts)
        quota = [weight / total * MIX_BLOCK for _, weight in parts]
        self.share = [int(q) for q in quota]
        for _ in range(MIX_BLOCK - sum(self.share)):
            rest = [q - n for q, n in zip(quota, self.share)]
            most = 0
            for i in range(1, len(rest)):
                most = i if rest[i] > rest[most] + 1e-6 else most
            self.share[most] += 1
        if 0 in self.share:
            die(f"--train: the weight of {parts[self.share.index(0)][0]} is too small for one row in {MIX_BLOCK}")
        self.files, self.partial = [f for s in self.sources for f in s.files], any(s.partial for s in self.sources)
        self.B, self.T, self.seed, self.row, self.block = B, T, seed, 0, -1
        self.rows_per_epoch = sum(s.rows_per_epoch for s in self.sources)
        self.num_tokens = sum(s.num_tokens for s in self.sources)
        self.vocab_size = max(s.vocab_size for s in self.sources)
        self.usual_vocab = max(s.usual_vocab for s in self.sources)

    def source(self, row):
        """Returns the source of row `row` of the stream, and which of its own rows that is."""
        block, i = divmod(row, MIX_BLOCK)
        if block != self.block:
            of_place = np.repeat(np.arange(len(self.share)), self.share)
            self.of_row = of_place[shuffled(MIX_BLOCK, self.seed, RAND_MIX, block)]
            self.block = block
        s = int(self.of_row[i])
        return s, block * self.share[s] + int((self.of_row[:i] == s).sum())

    def locate(self, row):
        s, position = self.source(row)
        return self.sources[s].locate(position)


# ----------------------------------------------------------------------------------------------------------------------
# one step's arithmetic


def learning_rate(a, step):
    """Returns the rate of `step`, counted from 0, by the formulas of llmc/train/scheduler.h."""
    f = a.final_lr_frac
    if step < a.warmup:
        return a.lr * (step + 1) / a.warmup

    def progress(first):
        return 1.0 if step >= a.steps else max(0.0, (step - first) / max(1, a.steps - first))
    p = progress(a.warmup)
    if a.schedule == "cosine":
        return a.lr * (f + (1.0 - f) * 0.5 * (1.0 + math.cos(math.pi * p)))
    if a.schedule == "linear":
        return a.lr * (1.0 - (1.0 - f) * p)
    if a.schedule == "wsd":
        return a.lr * (f + (1.0 - f) * (1.0 - math.sqrt(progress(a.steps - a.steps // 5))))
    return a.lr


def pick_sdpa(c, B, T, device, dtype):
    """On CUDA, times forward and backward of each attention backend at the run's own shape, with native GQA and with
    repeated K and V, and selects the fastest. Returns its name."""
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
    On CUDA, blocks are compiled one by one, and the head processes chunks of tokens, so that the full logits never exist.
    On the CPU, where logits are small, the whole model is compiled at once."""

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
        self.opt = adamw(model, a.lr, (a.beta1, a.beta2), a.eps, a.weight_decay, self.masters)

    def amp(self):
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.a.dtype == "autocast")

    def micro_step(self, x, y, trained, share, starts=None):
        """Adds `share` times the gradient of the mean loss of the batch's `trained` targets; returns share * loss on the
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
        """Generates `count` tokens after `ids`, sampled as in llmc/run/jobs/sampler.h. Keys and values are not cached."""
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

# dense bf16 tensor-core peaks in TFLOP/s, in the order of llmc/train/mfu.h, where the first match wins; 0: no bf16 units
PEAKS = {
    "B300": 2250.0, "B200": 2250.0, "GH200": 989.4, "H200 NVL": 835.5, "H200": 989.4, "H100 NVL": 835.5, "H100 PCIe": 756.5,
    "H100": 989.4, "H800": 989.4, "H20": 148.0, "A100": 312.0, "A800": 312.0, "A40": 149.7, "A30": 165.1, "A10G": 70.0,
    "A10": 125.0, "A2": 18.0, "L40S": 362.0, "L40": 181.0, "L4": 121.0, "T4": 0.0, "V100 PCIE": 0.0, "V100": 0.0,
    "RTX PRO 6000": 503.8, "RTX 6000 Ada": 364.2, "RTX A6000": 154.8, "RTX 5090": 209.5, "RTX 5080": 112.6,
    "RTX 5070 Ti": 87.9, "RTX 5070": 61.7, "RTX 4090 D": 147.0, "RTX 4090": 165.2, "RTX 4080 SUPER": 104.4, "RTX 4080": 97.5,
    "RTX 4070 Ti SUPER": 88.2, "RTX 4070 Ti": 80.2, "RTX 4070 SUPER": 71.0, "RTX 4070": 58.3, "RTX 4060 Ti": 44.1,
    "RTX 4060": 30.2, "RTX 3090 Ti": 80.0, "RTX 3090": 71.2, "RTX 3080 Ti": 68.2, "RTX 3080": 59.5, "RTX 3070": 40.6,
    "RTX 3060": 25.4, "RTX 2080 Ti": 0.0,
}


def gpu_peak(name):
    """Returns the peak of a device in TFLOP/s by the driver's name for it; 0: unknown. The first entry wins whose words are
    in the name, whole and in order. MIG instances and laptop boards are unknown."""
    if any(other in name for other in ("Laptop", "Max-Q", "MIG")):
        return 0.0
    for key, peak in PEAKS.items():
        words = iter(name.lower().translate(str.maketrans("-_/()", "     ")).split())
        if all(word in words for word in key.lower().split()):
            return peak
    return 0.0


class Text:
    """Encodes prompts and decodes samples, with tokenizer.json and the package `tokenizers`; without them, texts are ids."""

    def __init__(self, path):
        self.tok, self.folder, self.vocab_size = None, path if path and os.path.isdir(path) else os.path.dirname(path or ""), 0
        path = os.path.join(path, "tokenizer.json") if path and os.path.isdir(path) else path
        if path and os.path.basename(path) == "tokenizer.json" and os.path.exists(path):
            with open(path, encoding="utf-8") as f:
                j = json.load(f)
            ids = list(j["model"]["vocab"].values()) + [t["id"] for t in j.get("added_tokens", [])]
            self.vocab_size = max(ids) + 1
            with contextlib.suppress(ImportError):
                from tokenizers import Tokenizer
                self.tok = Tokenizer.from_file(path)

    def encode(self, text, c):
        ids = self.tok.encode(text, add_special_tokens=False).ids if self.tok else []
        return ([c.bos_token_id] if c.bos_token_id is not None else []) + ids or [0]

    def id(self, special):
        return self.tok.token_to_id(special) if self.tok else None

    def decode(self, ids):
        return self.tok.decode(ids) if self.tok else " ".join(map(str, ids))


class Run:
    """Writes the output of a run: screen, OUT/log.jsonl and OUT/step_NNNNNNNN."""

    def __init__(self, a, engine, text, loader):
        self.a, self.engine, self.text, self.loader = a, engine, text, loader
        try:
            os.makedirs(a.out, exist_ok=True)
        except OSError as error:
            die(f"{a.out}: cannot make the folder: {error.strerror}")
        self.log_path = os.path.join(a.out, "log.jsonl")

    def log(self, event, **values):
        with open(self.log_path, "a", encoding="utf-8") as f:
            f.write(json.dumps(dict(event=event, **values)) + "\n")

    def start_log(self, step):
        """Empties the log, or on resume cuts it back to `step` steps."""
        lines = []
        if step and os.path.exists(self.log_path):
            with open(self.log_path, encoding="utf-8") as f:
                lines = [line for line in f if json.loads(line)["step"] <= step and json.loads(line)["event"] != "end"]
        with open(self.log_path, "w", encoding="utf-8") as f:
            f.writelines(lines)

    def checkpoint(self, step):
        """Writes OUT/step_NNNNNNNN, a model folder with optimizer.pt, under a temporary name, then renames it."""
        final = os.path.join(self.a.out, f"step_{step:08d}")
        part, e = final + ".tmp", self.engine
        shutil.rmtree(part, ignore_errors=True)
        if e.model.lora:
            save_adapters(e.model, part, os.path.abspath(base_folder(self.a.model)))
        else:
            dtypes = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
            save_model(e.model, part, dtypes.get(self.a.export_dtype))
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            if self.text.folder and os.path.exists(os.path.join(self.text.folder, name)):
                shutil.copy(os.path.join(self.text.folder, name), part)
        state = dict(step=step, row=self.loader.row, optimizer=e.opt.state_dict())
        if e.masters is not e.params:
            state["masters"] = e.masters
        torch.save(state, os.path.join(part, "optimizer.pt"))
        shutil.rmtree(final, ignore_errors=True)
        os.rename(part, final)
        self.log("checkpoint", step=step, path=final)
        old = sorted(glob.glob(os.path.join(self.a.out, "step_" + "[0-9]" * 8)))
        for path in old[:-self.a.keep] if self.a.keep else []:
            if not (self.a.major_every and int(path[-8:]) % self.a.major_every == 0):
                shutil.rmtree(path)
        return final


def peak_memory(device):
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    with open("/proc/self/status", encoding="ascii") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith("VmHWM"))


def mark(device):
    """Returns a point in time of the device, for milliseconds(): on a GPU one that the work queued so far must reach."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(begin, end):
    """Returns the time between two marks; on a GPU, waits for the second."""
    if isinstance(end, float):
        return (end - begin) * 1e3
    end.synchronize()
    return begin.elapsed_time(end)


def clock(seconds):
    s = int(seconds + 0.5)
    return f"{s // 3600}:{s // 60 % 60:02d}:{s % 60:02d}" if s >= 3600 else f"{s // 60}:{s % 60:02d}"


def train(a):
    device = torch.device(a.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    a.dtype = a.dtype or ("autocast" if device.type == "cuda" else "fp32")
    if a.threads:
        torch.set_num_threads(a.threads)
    weights = torch.bfloat16 if a.dtype in ("bf16", "master") else torch.float32
    folder, resumed = a.model, None
    if a.resume is not None:
        folder = a.resume or max(glob.glob(os.path.join(a.out, "step_" + "[0-9]" * 8)), default=None)
        if not folder or not os.path.exists(os.path.join(folder, "optimizer.pt")):
            die(f"{folder or a.out}: no checkpoint to resume from")
        resumed = torch.load(os.path.join(folder, "optimizer.pt"), map_location=device, weights_only=True)
    parts = mix_parts(a.train)
    is_folder = os.path.isdir(folder)
    text = Text(a.tokenizer or (base_folder(folder) if is_folder else os.path.dirname(parts[0][0])))
    c = read_config(base_folder(folder)) if is_folder else None
    bos = next((i for i in (text.id("<|begin_of_text|>"), c and c.bos_token_id) if i is not None), None)
    loader = (MixLoader(parts, a.batch, a.seq, a.seed, a.documents, bos) if len(parts) > 1 else
              DataLoader(parts[0][0], a.batch, a.seq, a.seed, True, a.documents, bos))
    val = DataLoader(a.val, a.batch, a.seq, documents=a.documents, bos=bos) if a.val else None
    c = c or preset(folder, text.vocab_size or loader.vocab_size or loader.usual_vocab)
    if c is None:
        die(f"--model: {folder} is neither a folder nor a preset, wanted a Hugging Face folder, dN, {', '.join(PRESETS)}")
    if not is_folder and c.bos_token_id is None:
        c.bos_token_id = text.id("<|begin_of_text|>")
        c.eos_token_id = [i for i in [text.id("<|end_of_text|>")] if i is not None] or None
    micro = a.batch * a.seq
    a.total_batch = a.total_batch or micro
    if a.total_batch % micro:
        die(f"--total-batch: is {a.total_batch}, wanted a multiple of batch * seq = {micro}")
    accumulate = a.total_batch // micro
    if a.steps < 0:
        a.steps = max(1, loader.rows_per_epoch * a.seq // a.total_batch)
    if loader.vocab_size > c.vocab_size:
        die(f"{loader.files[0].path}: vocabulary is {loader.vocab_size} tokens, but the model has only {c.vocab_size}")

    # model
    sdpa = pick_sdpa(c, a.batch, a.seq, device, torch.float32 if a.dtype == "fp32" else torch.bfloat16)
    model = load_model(folder, device, weights) if is_folder else make_model(c, device, weights)
    if not is_folder:
        init_weights(model, a.seed)
    if a.lora and not model.lora:
        add_lora(model, a.lora, a.lora_alpha or 2.0 * a.lora, LORA_ON[a.lora_on])
        init_adapters(model, a.seed)
    model.set_context(max(a.seq, min(a.sample_tokens + len(a.prompt) + 1, 2048)), device)
    model.recompute_every = a.recompute_every
    engine = Engine(model, a, device)
    start = 0
    if resumed:
        start, loader.row = resumed["step"], resumed["row"]
        engine.opt.load_state_dict(resumed["optimizer"])
        for master, saved in zip(engine.masters, resumed.get("masters", [])):
            master.copy_(saved)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    peak = gpu_peak(name) * 1e12 if a.dtype != "fp32" else 0.0  # fp32 shows no MFU
    flops = c.flops_per_token(a.seq) * a.total_batch
    count = sum(p.numel() for p in model.parameters())
    print(f"PyTorch {torch.__version__}, {name}, {a.dtype}{', compiled' if a.compile else ''}, attention: {sdpa}")
    print(f"model   {a.model}: {count:,} parameters, vocabulary {c.vocab_size}, width {c.hidden_size}, "
          f"{c.num_hidden_layers} layers, {c.num_attention_heads} heads, {c.num_key_value_heads} kv heads of {c.head_dim}, "
          f"ffn {c.intermediate_size}, {'tied' if c.tie_word_embeddings else 'untied'}")
    if model.lora:
        print(f"lora    rank {model.lora['rank']}, alpha {model.lora['alpha']:g}, on {' '.join(model.lora['on'])}: "
              f"{sum(p.numel() for p in engine.params):,} parameters are trained")
    print(f"plan    {a.steps} steps of {a.total_batch} tokens ({accumulate} x {a.batch} x {a.seq}), "
          f"{a.steps * a.total_batch / max(1, loader.rows_per_epoch * a.seq):.2f} epochs of {loader.num_tokens:,} tokens")
    run = Run(a, engine, text, loader)
    run.start_log(start)
    run.log("resume" if resumed else "config", step=start, trainer="train_llama3.py", torch=torch.__version__, device=name,
            sdpa=sdpa, parameters=count, flops_per_step=flops, options={k: v for k, v in vars(a).items()}, model=asdict(c))

    times, last, width = [], {}, len(str(a.steps))

    def report(step, numbers, lr, begin, end):
        ms = milliseconds(begin, end)  # waits for the step, and so for its numbers
        loss, norm = numbers.tolist()
        if len(times) % 40 == 0:
            print(f"{'step':>{2 * width + 1}} {'loss':>9} {'gnorm':>8} {'lr':>9} {'ms':>8} {'tok/s':>9} "
                  f"{'MFU' if peak else 'flop/s':>6} {'mem':>7} {'eta':>8}")
        times.append(ms)
        last.update(step=step, loss=loss)
        rate = flops / ms * 1e3
        mfu = f"{100 * rate / peak:.1f}%" if peak else f"{rate / 1e9:.3g}G" if rate < 1e12 else f"{rate / 1e12:.3g}T"
        recent = sorted(times[-20:])[len(times[-20:]) // 2]
        print(f"{step:>{width}}/{a.steps} {loss:9.4f} {norm:8.3f} {lr:9.2e} {ms:8.1f} {a.total_batch / ms * 1e3:9,.0f} "
              f"{mfu:>6} {peak_memory(device) / 2**30:6.2f}G {clock((stop - step) * recent / 1e3):>8}", flush=True)
        run.log("step", step=step, loss=loss, gnorm=norm, lr=lr, ms=round(ms, 4), tok_s=round(a.total_batch / ms * 1e3, 1))
        if not math.isfinite(loss) or not math.isfinite(norm):
            die(f"step {step}: loss is {loss} and the gradient's norm {norm}")

    def validate(step):
        val.row, total, trained, rows = 0, 0.0, 0, min(a.val_batches * a.batch, val.rows_per_epoch)
        while val.row < rows:
            loss, count = engine.evaluate(*val.next(device, c.vocab_size, min(a.batch, rows - val.row)))
            total, trained = total + loss, trained + count
        loss = total / trained
        print(f"validation loss {loss:.4f} at step {step}")
        run.log("val", step=step, loss=loss)
        last["val"] = loss

    def sample(step):
        start = text.encode(a.prompt, c)
        out = a.prompt + text.decode(engine.sample(start, a.sample_tokens, step)[len(start):])
        print(f"sample  {out}")
        run.log("sample", step=step, text=out)

    stop = min(a.steps, a.stop_after or a.steps)
    pending, begun, path = None, time.perf_counter(), None
    for step in range(start, stop):
        begin, lr, loss = mark(device), learning_rate(a, step), 0.0
        batches = [loader.next(device, c.vocab_size) for _ in range(accumulate)]
        counts = [int((y >= 0).sum()) if loader.partial else y.numel() for _, y, *_ in batches]
        for (x, y, *starts), count in zip(batches, counts):  # a step's loss is the mean over its trained targets
            loss = loss + engine.micro_step(x, y, count, count / sum(counts), *starts)
        norm = engine.update(lr)
        numbers = torch.stack((loss.float(), norm.float())).to("cpu", non_blocking=True)
        end, done = mark(device), step + 1
        if pending:
            report(*pending)
        pending = (done, numbers, lr, begin, end)
        due = [every and done % every == 0 or done == stop for every in (a.val_every, a.sample_every, a.checkpoint_every)]
        if device.type != "cuda" or any(due):  # read a GPU's numbers one step late, so that it never waits for the host
            report(*pending)
            pending = None
        if due[0] and val:
            validate(done)
        if due[1] and a.sample_tokens:
            sample(done)
        if due[2]:
            path = run.checkpoint(done)
    if not times:
        die(f"nothing to do: the run is at step {start} of {stop}", 2)
    median = sorted(times)[len(times) // 2]
    run.log("end", step=stop, loss=last["loss"], median_ms=median, peak_memory=peak_memory(device),
            seconds=round(time.perf_counter() - begun, 3))
    print(f"done    {stop} steps in {clock(time.perf_counter() - begun)}, loss {last['loss']:.4f}"
          + (f", validation {last['val']:.4f}" if "val" in last else "")
          + f", median {median:.1f} ms a step, {a.total_batch / median * 1e3:,.0f} tokens/s, peak memory "
          f"{peak_memory(device) / 2**30:.2f} GiB\nsaved   {path}")


# ----------------------------------------------------------------------------------------------------------------------
# command line: words of llmc/run/cli/options.def

# name, aliases, type or choices, default, help
FLAGS = (
    ("model", "-e", str, "d4", "Hugging Face model folder, or a preset for a new model: dN, " + ", ".join(PRESETS)),
    ("tokenizer", "", str, None, "folder with tokenizer.json, for samples and a preset's vocabulary"),
    ("train", "-i", str, None, "token files for training (a pattern), or several by weight: 'a*.bin:0.7,b.bin:0.3'"),
    ("val", "-j", str, None, "token files for validation (a pattern)"),
    ("documents", "", ("auto", "cross", "pack", "mask"), "auto",
     "rows of documents; auto: mask for data with a mask, else cross"),
    ("out", "-o", str, "out", "folder for checkpoints and log.jsonl"),
    ("export-dtype", "", ("auto", "f32", "bf16", "f16"), "auto", "type of the weights in checkpoints"),
    ("steps", "-x", int, -1, "optimizer steps; -1: one epoch"),
    ("batch", "-b", int, 4, "rows per micro-batch"),
    ("seq", "-t", int, 256, "tokens per row"),
    ("total-batch", "-d", int, 0, "tokens per optimizer step; 0: batch * seq"),
    ("lr", "-l", float, 3e-4, "peak learning rate"),
    ("warmup", "-u", int, 0, "steps of linear learning-rate warm-up"),
    ("schedule", "-k", ("cosine", "linear", "constant", "wsd"), "cosine", "learning rate after the warm-up"),
    ("final-lr-frac", "-q", float, 0.1, "final learning rate, as a fraction of --lr"),
    ("weight-decay", "-c", float, 0.1, "AdamW's weight decay, applied to every matrix"),
    ("beta1", "", float, 0.9, "AdamW's decay rate of the first moment"),
    ("beta2", "", float, 0.95, "AdamW's decay rate of the second moment"),
    ("eps", "", float, 1e-8, "AdamW's epsilon"),
    ("grad-clip", "", float, 1.0, "clip the gradient to this norm; 0: no clipping"),
    ("lora", "", int, 0, "train adapters of this rank beside the frozen weights of --model; 0: off"),
    ("lora-alpha", "", float, 0.0, "scale the adapters' product by this / rank; 0: twice the rank"),
    ("lora-on", "", ("qkvo", "ffn", "all"), "all", "matrices with adapters"),
    ("seed", "", int, 42, "seed of initial weights, data order and samples"),
    ("threads", "", int, 0, "CPU threads; 0: PyTorch's choice"),
    ("val-every", "-v", int, 100, "validate every N steps and at the end; 0: only at the end"),
    ("val-batches", "-m", int, 20, "batches per validation; fewer if the file is shorter"),
    ("sample-every", "-s", int, 100, "print a sample every N steps and at the end; 0: only at the end"),
    ("sample-tokens", "-g", int, 64, "tokens per sample; 0: no samples"),
    ("checkpoint-every", "-n", int, 0, "write a checkpoint every N steps and at the end; 0: only at the end"),
    ("keep", "-nk", int, 0, "keep the newest N checkpoints; 0: all"),
    ("major-every", "-nm", int, 0, "always keep the checkpoint of every N-th step; 0: off"),
    ("stop-after", "", int, 0, "end this process at step N, with the schedule of --steps; 0: off"),
    ("prompt", "", str, "", "prompt of the samples"),
    ("temperature", "", float, 0.8, "sampling temperature; 0: always the most probable token"),
    ("top-k", "", int, 0, "sample from the N most probable tokens; 0: from all"),
    ("top-p", "", float, 0.95, "sample from the smallest set of tokens with at least this total probability; 1: from all"),
    ("device", "", str, None, "cpu or cuda"),
    ("dtype", "", ("fp32", "autocast", "master", "bf16"), None, "default: autocast on CUDA, else fp32"),
    ("recompute-every", "", int, 0, "recompute every Nth block in backward; 0: none"),
    ("write-state", "", str, None, "write the debug state of --model with --batch, --seq, --steps, --lr, ... to this file"),
    ("write-model", "", str, None, "write a random model (--model PRESET, or --config) to this folder"),
    ("embedding-std", "", float, 0.02, "standard deviation of the embedding in --config models"),
)
METAVARS = {str: "TEXT", int: "N", float: "F"}


def parse_arguments(argv):
    argv = [a.split("=")[0].replace("_", "-") + a[len(a.split("=")[0]):] if a.startswith("--") else a for a in argv]
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
                                usage="train_llama3.py [--FLAG VALUE ...]")
    for name, alias, kind, default, text in FLAGS:
        what = dict(choices=kind) if isinstance(kind, tuple) else dict(type=kind, metavar=METAVARS[kind])
        text = text if default in (None, "") else f"{text} ({default})"
        p.add_argument("--" + name, *alias.split(), default=default, help=text, **what)
    p.add_argument("--resume", "-y", nargs="?", const="", metavar="PATH",
                   help="resume from a checkpoint, by default the newest in --out")
    p.add_argument("--compile", action="store_true", help="use torch.compile")
    p.add_argument("--config", nargs="+", metavar="KEY=VALUE", help="fields of config.json for --write-model")
    a = p.parse_args(argv)
    for name in ("batch", "seq"):
        if getattr(a, name) < 1:
            die(f"--{name}: is {getattr(a, name)}, wanted an integer from 1", 2)
    return a


def config_of(pairs):
    types = {f.name: type(getattr(Config(), f.name)) for f in fields(Config)}
    c = Config()
    for pair in pairs:
        key, _, value = pair.partition("=")
        if key not in types or types[key] is type(None):
            die(f"--config {key}: unknown, wanted one of {', '.join(types)}", 2)
        setattr(c, key, value.lower() in ("1", "true", "yes") if types[key] is bool else types[key](value))
    return c


def main():
    a = parse_arguments(sys.argv[1:])
    device = torch.device(a.device or "cpu")
    if len(sys.argv) == 1:
        out = os.path.join("out", "reference")
        write_pairs(out)
        print(f"wrote {out}; check them with ./test_llama3 {out}/NAME {out}/NAME.state.safetensors")
        return
    if a.write_model:
        c = config_of(a.config) if a.config else preset(a.model, 257) or die(f"--model {a.model}: is no preset", 2)
        model = make_model(c, device)
        init_telling(model, a.seed, a.embedding_std) if a.config else init_weights(model, a.seed)
        save_model(model, a.write_model)
    if a.write_state:
        folder = a.write_model or a.model
        losses, norms = write_state(load_model(folder, device), a.write_state, a.batch, a.seq, max(1, a.steps), a.seed, a.lr,
                                    (a.beta1, a.beta2), a.eps, a.weight_decay, a.grad_clip)
        print(f"{a.write_state}: loss {losses[0]:.4f} -> {losses[-1]:.4f}, gradient norm {norms[0]:.3f} -> {norms[-1]:.3f}")
    elif not a.write_model:
        if not a.train:
            tales = "dev/data/tinytales/tinytales_train.bin"
            if not os.path.exists(tales):
                die(f"--train: is not given, and the default {tales} does not exist\n  hint: make {tales}")
            a.train, a.val = tales, a.val or tales.replace("_train", "_val")
        train(a)


if __name__ == "__main__":
    main()
