"""Hopper's dropout as it is written for registers, without a GPU: its functions run as Python on whole tiles, by a
model of what they ask of Gluon and of the few instructions of PTX in them."""

from __future__ import annotations

import re
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tilewise.spec import dropout
from tilewise.spec.dropout import Origin
from tilewise.spec.score import Band, Score

pytest.importorskip("triton")

from tilewise.backends.gluon.sm90.common import dropout as gluon_dropout
from tilewise.backends.kernels import dropout as twins

WORD, HALF = 2**32 - 1, torch.float16


class Tile:
    """Words of 32 bits, or float32; what is kept of a block of Gluon."""

    type = SimpleNamespace(layout=None)

    def __init__(self, x: Tensor) -> None:
        self.x = x if x.is_floating_point() or x.dtype == torch.bool else x & WORD
        self.shape = list(x.shape)

    def __getitem__(self, at: Any) -> Tile:
        return Tile(self.x[at])

    def reshape(self, shape: list[int]) -> Tile:
        return Tile(self.x.reshape(shape))

    def permute(self, axes: tuple[int, ...]) -> Tile:
        return Tile(self.x.permute(axes))

    def split(self) -> tuple[Tile, Tile]:
        low, high = self.x.unbind(-1)
        return Tile(low), Tile(high)

    def to(self, dtype: str, bitcast: bool = False) -> Tile:
        if bitcast and dtype == "float32":
            return Tile(words_as(self.x, torch.float32))
        return Tile(self.x.view(torch.int32).long()) if bitcast else self


def operation(name: str) -> Any:
    def apply(self: Tile, other: Any) -> Tile:
        return Tile(getattr(self.x, name)(getattr(other, "x", other)))

    return apply


for name in ("add", "and", "or", "xor", "lshift", "rshift", "floordiv", "eq"):
    setattr(Tile, f"__{name}__", operation(f"__{name}__"))


def words_as(x: Tensor, dtype: torch.dtype) -> Tensor:
    return (x - (x >> 31 << 32)).to(torch.int32).view(dtype)


def prmt(a: Tensor, b: Tensor, selector: Tensor) -> Tensor:
    both, found = a | b << 32, torch.zeros_like(a)
    for n in range(4):
        nibble = selector >> 4 * n & 15
        byte = both >> 8 * (nibble & 7) & 255
        found = found | torch.where(nibble & 8 > 0, torch.where(byte > 127, 255, 0), byte) << 8 * n
    return found


def compared(a: Tensor, b: Tensor, negated: bool) -> Tensor:
    """set.lt, or its negation, which NaN makes true, as .geu."""
    a, b = (words_as(x, HALF).unflatten(-1, (-1, 2)) for x in (a, b))
    found = a < b
    found = (found ^ negated).long() * 0xFFFF
    return found[..., 0] | found[..., 1] << 16


def run(asm: str, _: str, arguments: list[Any], *options: Any, **more_options: Any) -> Tile:
    shape = arguments[0].x
    registers = {f"${n}": torch.as_tensor(getattr(x, "x", x)) for n, x in enumerate(arguments, 1)}
    for line in asm.strip("{ }").split(";"):
        predicate, name, operands = re.fullmatch(r"\s*(@p )?(\S*) ?(.*)", line).groups()
        if not name or name == ".reg":
            continue
        to, *sources = operands.split(", ")
        a, *more = [
            (registers[x] if x in registers else torch.tensor(int(x, 0))).expand(shape.shape).contiguous()
            for x in sources
        ]
        if name == "prmt.b32":
            found = prmt(a, *more)
        elif name == "shfl.sync.bfly.b32":  # of a row's four threads the numbers have the lower bits
            assert [int(x) for x in (more[0].flatten()[0], more[1].flatten()[0])] == [4, 31]
            found = a.unflatten(1, (4, 2)).flip(2).flatten(1, 2)
        elif name == "abs.f16x2":
            found = a & 0x7FFF7FFF
        elif name == "mov.b32":
            found = a.contiguous().view(torch.int32).long() if a.is_floating_point() else a
        elif name == "xor.b32":
            found = a ^ more[0]
        elif name == "setp.ne.u32":
            found = a != more[0]
        else:
            found = compared(a, *more, {"set.lt.u32.f16x2": False, "set.geu.u32.f16x2": True}[name])
        registers[to] = torch.where(registers["p"], found, registers[to]) if predicate else found
    return Tile(registers["$0"])


def expand_dims(x: Tile, axis: int) -> Tile:
    return Tile(x.x.unsqueeze(axis))


GLUON = SimpleNamespace(
    SliceLayout=lambda *_: None, uint32="uint32", float32="float32", inline_asm_elementwise=run,
    zeros=lambda shape, *_: Tile(torch.zeros(shape, dtype=torch.long)),
    arange=lambda begin, end, _: Tile(torch.arange(begin, end)),
    expand_dims=expand_dims, cast=lambda x, _: Tile(torch.tensor(x)),
    join=lambda x, y: Tile(torch.stack([x.x, y.x], -1)),
    where=lambda seen, x, y: Tile(torch.where(seen.x, x.x, y.x)), convert_layout=lambda x, *_, **__: x, constexpr=None,
)  # fmt: skip


def kept(words: dropout.Stream, m0: int, rows: Tile, n0: int, cols: Tile, terms: Any) -> Tile:
    at = terms.origin
    i, j = m0 + rows.x + at.query + at.query_rest, n0 + cols.x + at.key + at.key_rest
    return Tile(dropout.kept(words, i, j, terms.threshold))


@pytest.fixture(scope="module")
def functions() -> SimpleNamespace:
    scope: dict[str, Any] = {
        "gl": GLUON, "accumulator": lambda *_: None, "kept": kept, "philox2x32": lambda c0, c1, key: map(
            Tile, dropout.philox2x32(*torch.broadcast_tensors(c0.x, c1.x), key)
        ),
        "pair_of_rows": lambda x: Tile(dropout.pair_of_rows(x.x)),
        "four_of_columns": lambda x: Tile(dropout.four_of_columns(x.x)),
    }  # fmt: skip
    for name, function in vars(gluon_dropout).items():
        if hasattr(function, "fn") and function.fn.__module__ == gluon_dropout.__name__:
            scope[name] = FunctionType(function.fn.__code__, scope, name)
    return SimpleNamespace(**scope)


def test_number_of_a_key():
    """As the Triton kernels have it where they are compiled."""
    words = torch.randint(2**32, (100, 1), generator=torch.Generator().manual_seed(1))
    keys = torch.arange(32)
    scope = {"tl": GLUON, "_INTERPRET": False}
    number_of = FunctionType(twins.number_of.fn.__code__, scope)
    words, keys = torch.broadcast_tensors(words, keys)
    assert torch.equal(number_of(Tile(words), keys).x >> 16 & 0x7FFF, dropout.number_of(words, keys))


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.98, 1.0])
@pytest.mark.parametrize("origin", [Origin(), Origin(48, 16), Origin(5, 16)], ids=str)
def test_tiles(functions, p, origin):
    from tilewise.backends.gluon.score import dropout_bounds
    from tilewise.backends.kernels.score import OriginArgs as Places

    score = Score(1.0, None, Band(), dropout=dropout.threshold(p), origin=origin)
    bounds = {name: getattr(x, "value", x) for name, x in dropout_bounds(score).items()}
    terms = SimpleNamespace(**bounds, threshold=score.dropout, origin=Places.of(score))
    words = dropout.Stream(*map(torch.tensor, (0x9E3779B1, 0xC0FFEE11, 0x12345679)))
    m0, n0, c = 192, 256, SimpleNamespace(BLOCK_N=128)
    rows, cols = torch.arange(64)[:, None] + m0 + origin.query, torch.arange(128) + n0 + origin.key
    expected = ~dropout.kept(words, rows, cols, score.dropout)
    assert expected.any()

    like = Tile(torch.zeros(64, 64))
    pairs = functions.dropped_pairs(functions.dropout_words(words, m0, n0, terms, c), like, terms, c).x
    halves = torch.stack([pairs & 0xFFFF, pairs >> 16], -1).flatten(1)
    assert torch.equal(halves, expected * 0xFFFF)

    signed = functions.signed_by_dropout(Tile(torch.ones(128, 64)), words, m0, n0, terms).x
    assert torch.equal(signed, torch.where(expected.mT, -1.0, 1.0))
