"""fp8.py -- the products of --fp8 and --fp8-head of train_llama3cu, emulated: factors are rounded to 8 bits, then multiplied.

llmc/quantise.h has the rounding and the scales. use_fp8() changes a model of train_llama3.py."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def scaled_fp8(x, largest, kind):
    """Rounds x to 8 bits as llmc/quantise.h does; the scale follows from the largest absolute value. Returns the rounded values
    in the type of x, not the 8 bits."""
    mantissa, exponent = torch.frexp(largest)  # in [0.5, 1): 448 = 0.875 * 2^9, 57344 = 0.875 * 2^16
    top = 9 if kind == E4M3 else 16
    scale = torch.ldexp(torch.ones_like(largest), (exponent - top + (mantissa > 0.875)).clamp(min=-126))
    out = (x.float() / scale).to(kind).float() * scale
    return torch.where(largest == 0, x.float(), torch.where(largest.isfinite(), out, math.nan)).to(x.dtype)


def quantised(x, kind=E4M3):
    """Returns x with each row rounded to 8 bits by its own scale."""
    return scaled_fp8(x, x.float().abs().amax(dim=-1, keepdim=True), kind)


def quantised_whole(x, of, kind=E4M3):
    """Returns x as a matrix rounded to 8 bits by one scale, which follows from `of`. x is `of` or its 8-bit rows."""
    return scaled_fp8(x, of.float().abs().amax(), kind).flatten(0, -2)


class Fp8Product(torch.autograd.Function):
    """The product x W^T and its backward pass, as train_llama3cu --fp8 computes them.

    All factors of the three products are in 8 bits. dy has the type `kind`, every other factor is e4m3. The products y and dx
    take rows with a scale each. The product dW takes matrices with one scale each, and reads dy from its 8-bit rows. dy is
    divided by `factor` before it is rounded, and dx and dW are multiplied by `factor`."""

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


def fp8_head(h, w):
    """Returns logits. Their gradient has the factor 1 / tokens of the mean loss. The part of it that is no power of two, and so
    would be rounded with the gradient, is kept out as `factor`."""
    return Fp8Product.apply(h, w, E5M2, 2 * math.frexp(1 / h.shape[:-1].numel())[0])


def use_fp8(model, head=False):
    """Makes the linear layers of a model's blocks compute as with --fp8, and with `head` the head as with --fp8-head; adapters
    stay as they are. Returns the model."""
    for block in model.blocks:
        for layer in (block.qkv, block.o, block.gate_up, block.down):
            (layer.base if model.lora else layer).__class__ = Fp8Linear
    if head:
        model.project = fp8_head
    return model


def fits_fp8(c, tokens):
    """Returns whether --fp8 takes this model with micro-batches of `tokens` tokens: all widths are multiples of 16. --fp8-head
    also wants a vocabulary that is one."""
    heads = c.num_attention_heads + 2 * c.num_key_value_heads
    widths = (c.hidden_size, c.num_attention_heads * c.head_dim, heads * c.head_dim, c.intermediate_size, tokens)
    return all(n % 16 == 0 for n in widths)
