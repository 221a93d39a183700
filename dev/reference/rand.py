"""rand.py -- llmc/base/rand.h on tensors: random numbers as pure functions of seed, purpose, stream and index.

Words of 32 bits are held in int64. Products wrap in 64 bits, but every word that is taken from them is right. The orders of
llmc/files/dataloader.h are here, too."""
import math

import torch

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
    """Returns a double in [0, 1) made of 53 bits of two words."""
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
    """Fills x with numbers evenly spread in [-bound, bound): draw i gives elements 2i and 2i+1."""
    w = philox(seed, RAND_ADAPTERS, tensor, torch.arange((x.numel() + 1) // 2, dtype=torch.int64, device=x.device))
    pair = torch.stack((philox_double(w[0], w[1]), philox_double(w[2], w[3])), dim=1).view(-1)[:x.numel()]
    x.copy_((bound * (2.0 * pair - 1.0)).view_as(x))


def philox_below(seed, purpose, stream, index, n):
    """Returns an int in [0, n)."""
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
