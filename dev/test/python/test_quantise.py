"""Compares the 8-bit rows of llmc/quantise.h, as build/test_quantise --table prints them, with PyTorch's types and with the
emulation of --fp8 in dev/reference/fp8.py."""
import os
import subprocess
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
sys.path.insert(0, ROOT)
torch = pytest.importorskip("torch")
fp8 = pytest.importorskip("dev.reference.fp8")
PROGRAM = os.path.join(ROOT, "build", "test_quantise")


# an 8-bit type, its place in the table, its largest value and the largest value's bits
FORMATS = ((torch.float8_e4m3fn, 0, 448, 0x7E), (torch.float8_e5m2, 1, 57344, 0x7B))


@pytest.fixture(scope="module", params=FORMATS, ids=("e4m3", "e5m2"))
def table(request):
    """Returns a format and, for every bfloat16, its 8 bits, then the 8 bits and the scale of a row that holds it alone."""
    if not os.path.exists(PROGRAM):
        pytest.skip("build/test_quantise is missing: make build/test_quantise")
    lines = subprocess.run([PROGRAM, "--table"], stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    at = 3 * request.param[1]
    columns = list(zip(*(line.split()[at:at + 3] for line in lines)))
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    bits, row_bits = (torch.tensor([int(b) for b in c], dtype=torch.uint8) for c in columns[:2])
    return request.param, x, bits, row_bits, torch.tensor([float(s) for s in columns[2]])


def test_every_bfloat16_becomes_what_pytorch_makes_of_it(table):
    (kind, _, largest, largest_bits), x, bits, _, _ = table
    fits = x.float().abs() <= largest  # above, PyTorch gives NaN or infinity
    assert torch.equal(x[fits].to(kind).view(torch.uint8), bits[fits])
    above = x.float().abs() > largest
    assert torch.equal(bits[above] & 0x7F, torch.full_like(bits[above], largest_bits))
    assert bool((bits[x.isnan()] & 0x7F == 0x7F).all())


def test_the_emulation_has_the_same_rows(table):
    (kind, *_), x, _, row_bits, scale = table
    want = row_bits.view(kind).float() * scale
    got = fp8.quantised(x[:, None], kind)[:, 0].float()
    finite = x.isfinite()
    assert torch.equal(got[finite], want[finite])
    assert bool(got[~finite].isnan().all()) and bool(want[~finite].isnan().all())


def test_products_with_such_factors_are_near():
    generator = torch.Generator().manual_seed(1)
    x, w, dy = (torch.randn(*shape, generator=generator) for shape in ((3, 32, 64), (48, 64), (3, 32, 48)))
    x, w = x.requires_grad_(), w.requires_grad_()
    y = fp8.Fp8Product.apply(x, w)
    y.backward(dy)
    near = ((y, x @ w.T), (x.grad, dy @ w), (w.grad, dy.flatten(0, 1).T @ x.flatten(0, 1)))
    for got, want in near:
        error = ((got - want).norm() / want.norm()).item()
        assert 0.01 < error < 0.06, error


def test_a_transpose_has_one_scale_and_shifts_exponents():
    x = torch.tensor([[448., 3.25], [2. ** -7, 2. ** -8], [0, 0], [17 * 2. ** -14, -2. ** -11]])
    rows = fp8.quantised(x)
    assert torch.equal(rows[3], torch.tensor([16 * 2. ** -14, -2. ** -11]))  # 17 has a bit too many
    assert torch.equal(fp8.quantised_whole(rows, x), torch.tensor([[448., 3.25], [2. ** -7, 2. ** -8], [0, 0], [0, -0.]]))
    assert torch.equal(fp8.quantised_whole(x, x)[3], torch.tensor([2. ** -9, -0.]))  # rounds once, above the tie
