"""One call of attention as a value, how its tensors are made, and the error rule that every backend is held to.

    max|x - ref64| <= 2 · max|same computation in plain torch, same dtype - ref64| + slack

for each of O, LSE, dQ, dK, dV and dBias, against the float64 reference. Nothing here uses tilewise.spec: what a query
sees is written down a second time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilewise import attention
from tilewise.backends.protocol import at_once
from tilewise.cache import calls

SLACK = 1e-5  # of the largest element of the reference
FEW = 100  # elements of a result
KEPT = 1 << 15  # scores of a case of which is kept what its results are held to
LAYOUTS = ("contiguous", "heads_last", "padded", "sliced", "expanded")
DROPOUT_SEED = (0x9ABCDEF012345678, -3)
NAMES = ("o", "lse", "dq", "dk", "dv", "dbias", "dsink")


@dataclass(frozen=True)
class Case:
    """A call of `tilewise.attention` and of its backward.

    bias, mask: which axes are full, a letter or 1 for each, "bhmn" to "1111"; "k" in place of "h" is Hkv heads,
    "r" in place of "b" a bias for each run of four batch elements (kernels alone).
    layout: of every tensor, see `lay_out`.
    planted: a value put into hidden keys and values (and a hidden bias): whole rows, and single elements of a row.
    bias_hides: a tenth of the bias is -inf. blind: some queries see nothing, by the mask or else the bias.
    lse: the loss uses the LSE too. grads: the inputs that need a gradient, letters of "qkvbs".
    sink: which axes it is full along, "h" or "bhm" to "111". sink_at: what is added to its numbers, which are as large
    as scores. sink_none: a quarter of them is -inf.
    dropout_p: with the seed `DROPOUT_SEED`. bias_scale: by which the bias's numbers are multiplied.
    """

    B: int = 2
    H: int = 2
    Hkv: int | None = None
    M: int = 129
    N: int = 127
    D: int = 32
    Dv: int | None = None
    dtype: torch.dtype = torch.float16
    bias: str | None = None
    bias_dtype: torch.dtype | None = None
    mask: str | None = None
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    scale: float | None = None
    layout: str = "contiguous"
    planted: float | None = None
    bias_hides: bool = False
    blind: bool = False
    lse: bool = True
    deterministic: bool = False
    grads: str = "qkvbs"
    sink: str | None = None
    sink_dtype: torch.dtype | None = None
    sink_at: float = 0.0
    sink_none: bool = False
    dropout_p: float = 0.0
    bias_scale: float = 1.0

    @property
    def kv_heads(self) -> int:
        return self.H if self.Hkv is None else self.Hkv

    @property
    def value_dim(self) -> int:
        return self.D if self.Dv is None else self.Dv

    def shape(self, axes: str) -> tuple[int, ...]:
        """Shape of a bias, mask or sink."""
        sizes = {"b": self.B, "r": self.B // 4, "h": self.H, "k": self.kv_heads, "m": self.M, "n": self.N, "1": 1}
        return tuple(sizes[axis] for axis in axes)

    @property
    def terms(self) -> dict:
        """The keyword arguments of `tilewise.attention` that are numbers."""
        named = {"causal": self.causal, "window": self.window, "softcap": self.softcap, "scale": self.scale}
        return named | ({"dropout_p": self.dropout_p, "dropout_seed": DROPOUT_SEED} if self.dropout_p else {})

    def __str__(self) -> str:
        """What differs from the default, as a test id."""
        words = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value == field.default:
                continue
            if isinstance(value, bool):
                words.append(field.name)
            elif isinstance(value, torch.dtype):
                of = field.name.partition("dtype")[0].replace("_", " ")
                words.append(of + str(value).removeprefix("torch."))
            elif field.name == "layout":
                words.append(value)
            else:
                words.append(f"{field.name}{' ' * (len(field.name) > 2)}{value}")
        return ", ".join(words).replace("(", "").replace(")", "") or "default"


class Tensors(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    mask: Tensor | None
    do: Tensor
    dlse: Tensor
    sink: Tensor | None = None


def _seed(case: Case) -> int:
    """Cases that knew of no sink, no dropout, no scale of the bias, draw what they drew."""
    text = repr(case).replace(", dropout_p=0.0", "").replace(", bias_scale=1.0", "")
    if case.sink is None:
        text = text.replace("grads='qkvbs'", "grads='qkvb'").partition(", sink=")[0] + ")"
    return zlib.crc32(text.encode())


def tensors(case: Case, device: str = "cpu", planted: bool = True, draw: int = 0) -> Tensors:
    """Random inputs and cotangents, the same for equal cases and draws; ``planted=False``: without planted values."""
    c = case
    generator = torch.Generator(device).manual_seed(_seed(case) + draw)

    def normal(*shape: int, dtype: torch.dtype = c.dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    q, k, v = normal(c.B, c.H, c.M, c.D), normal(c.B, c.kv_heads, c.N, c.D), normal(c.B, c.kv_heads, c.N, c.value_dim)
    do, dlse = normal(c.B, c.H, c.M, c.value_dim), normal(c.B, c.H, c.M, dtype=torch.float32)
    bias = mask = None
    if c.bias is not None:
        bias = (normal(*c.shape(c.bias), dtype=torch.float32) * c.bias_scale).to(c.bias_dtype or c.dtype)
        if c.bias_hides:
            hidden = torch.rand(bias.shape, generator=generator, device=device) < 0.1
            bias.masked_fill_(hidden, -math.inf)
    if c.mask is not None:
        mask = torch.rand(c.shape(c.mask), generator=generator, device=device) < 0.7
    sink = None
    if c.sink is not None:
        sink = normal(*c.shape(c.sink), dtype=c.sink_dtype or c.dtype).add_(c.sink_at)
        if c.sink_none:
            sink.masked_fill_(torch.rand(sink.shape, generator=generator, device=device) < 0.25, -math.inf)
    if c.blind:
        for x, hide in ((mask, False), (bias, -math.inf)):
            if x is not None and x.shape[2] > 1:
                x[:, :, [0, c.M // 2]] = hide
                break
        else:
            blind = c.causal and c.M > c.N
            assert blind, "blind: neither the mask nor the bias has a row for each query"

    if c.layout == "expanded":  # equal along the axes that get stride 0
        q, k, v = q[:1].expand_as(q), k[:, :1].expand_as(k), v[:, :1].expand_as(v)
        do, dlse = do[..., :1].expand_as(do), dlse[:1].expand_as(dlse)
        bias, mask = (None if x is None else x[:, :, :1].expand_as(x) for x in (bias, mask))
    if c.planted is not None:
        q, k, v, bias = (None if x is None else x.clone() for x in (q, k, v, bias))
        hidden = _hidden_keys(c, bias, mask)
        if planted:
            _plant(c, hidden, k, v, bias if mask is not None and c.mask[3] == "n" else None)
    if sink is not None and c.layout in ("heads_last", "sliced"):
        sink = torch.stack([sink, torch.full_like(sink, math.nan)], -1)[..., 0]  # no stride is that of a dense tensor
    made = (q, k, v, bias, mask, do, dlse)
    return Tensors(*(None if x is None else lay_out(x, c.layout, n) for n, x in enumerate(made)), sink)


def _hidden_keys(c: Case, bias: Tensor | None, mask: Tensor | None) -> list[int]:
    """Two keys that no query sees: hidden here by the mask or the bias, else found outside the band."""
    if mask is not None and c.mask[3] == "n":
        keys = [c.N // 3, c.N - 1]
        mask[..., keys] = False
    elif bias is not None and c.bias[3] == "n":
        keys = [c.N // 3, c.N - 1]
        bias[..., keys] = -math.inf
    else:
        keys = (~_in_band(c, "cpu").any(0)).nonzero().flatten().tolist()[-2:]
        assert len(keys) == 2, "planted: every query sees every key"
    return keys


def _plant(c: Case, hidden: list[int], k: Tensor, v: Tensor, bias: Tensor | None) -> None:
    one, other = hidden
    k[:, :, one, 0] = v[:, :, other, -1] = c.planted
    k[:, :, other] = v[:, :, one] = c.planted
    if bias is not None and c.bias[3] == "n":
        bias[..., one] = c.planted


def lay_out(x: Tensor, layout: str, which: int) -> Tensor:
    """The values of ``x`` in memory as ``layout`` says; memory between them is NaN (True in a mask).

    contiguous. heads_last: (B, M, H, D) by transpose; a bias or mask of shape [N, M]. padded: rows of 16-byte multiples
    that hold more than the tensor, as TMA can read it. sliced: rows of odd length at an odd offset. expanded: stride 0
    where the values repeat, batches of q, heads of k and v, rows of a bias, the last axis of do.
    """
    if layout == "contiguous":
        return x.contiguous()
    if layout == "heads_last":
        if x.dim() < 4:
            return x.mT.contiguous().mT
        axes = (-1, -2) if which in (3, 4) else (1, 2)
        return x.transpose(*axes).contiguous().transpose(*axes)
    if layout == "expanded":
        axis = {0: 0, 1: 1, 2: 1, 3: 2, 4: 2, 5: -1, 6: 0}[which]
        return x.narrow(axis, 0, 1).clone().expand_as(x)
    fill = True if x.dtype == torch.bool else math.nan
    if layout == "padded":
        buffer = x.new_full((*x.shape[:-2], x.shape[-2] + 3, (x.shape[-1] + 23) // 16 * 16), fill)
        view = buffer[..., : x.shape[-2], : x.shape[-1]]
    else:
        assert layout == "sliced"
        buffer = x.new_full((*x.shape[:-2], x.shape[-2] + 3, x.shape[-1] + 5 + x.shape[-1] % 2), fill)
        view = buffer[..., 1:-2, 2 : 2 + x.shape[-1]]
    view.copy_(x)
    return view


def _in_band(c: Case, device: str) -> Tensor:
    """Which keys causal and window leave to each query, [M, N]; aligned bottom-right."""
    distance = torch.arange(c.N, device=device) - (torch.arange(c.M, device=device) + c.N - c.M)[:, None]
    left, right = c.window or (None, None)
    seen = torch.ones_like(distance, dtype=torch.bool)
    if c.causal:
        seen &= distance <= 0
    if left is not None:
        seen &= distance >= -left
    if right is not None:
        seen &= distance <= right
    return seen


def _of_heads(x: Tensor, heads: int) -> Tensor:
    """(B, Hkv, ...) repeated for the query heads of each group."""
    return x if x.shape[1] in (1, heads) else x.repeat_interleave(heads // x.shape[1], 1)


def rows_of(sink: Tensor) -> Tensor:
    """(B|1, H|1, M|1)."""
    return sink if sink.dim() == 3 else sink[None, :, None]


def visible(case: Case, inputs: Tensors) -> Tensor:
    """Bool (B, H, M, N): which key takes part in which query's softmax."""
    seen = _in_band(case, inputs.q.device.type).expand(case.B, case.H, case.M, case.N)
    if inputs.mask is not None:
        seen = seen & _of_heads(inputs.mask, case.H)
    if inputs.bias is not None:
        seen = seen & (_of_heads(inputs.bias, case.H) != -math.inf)
    return seen


def unfused(case: Case, inputs: Tensors) -> tuple[Tensor, Tensor]:
    """o and lse by plain torch in the inputs' dtype; rows that see nothing are zeros, as plain torch cannot say."""
    q, k, v, bias, sink = *inputs[:4], inputs.sink
    scale = 1 / math.sqrt(case.D) if case.scale is None else case.scale
    s = (q @ _of_heads(k, case.H).mT) * scale
    if case.softcap is not None:
        s = torch.tanh(s / case.softcap) * case.softcap
    if bias is not None:
        s = (s + _of_heads(bias, case.H)).to(q.dtype)  # as `scores += bias` does
    seen = visible(case, inputs)
    s = s.masked_fill(~seen, -math.inf)
    if sink is not None:  # one more column, as transformers' eager attention of gpt-oss has it
        column = rows_of(sink).expand(s.shape[:3])[..., None].to(s.dtype)
        s, seen = torch.cat([s, column], -1), torch.cat([seen, column != -math.inf], -1)
    blind = ~seen.any(-1)
    s = s.masked_fill(blind[..., None], 0.0)
    p = torch.softmax(s, -1).masked_fill(blind[..., None], 0.0)
    p = p[..., : case.N]
    if case.dropout_p:
        kept = dropout_mask(case).to(p.device)
        p = torch.where(kept, p / (kept_share(case.dropout_p) or 1.0), 0.0)
    o = p @ _of_heads(v, case.H)
    return o, torch.logsumexp(s.float(), -1).masked_fill(blind, -math.inf)


def kept_share(p: float) -> float:
    return 1 - round(p * 32768) / 32768


def dropout_mask(case: Case) -> Tensor:
    """Bool (B, H, M, N): which probabilities dropout keeps."""
    return _dropout_numbers(case.B, case.H, case.M, case.N) >= round(case.dropout_p * 32768)


@functools.lru_cache(maxsize=2)
def _dropout_numbers(*shape: int) -> Tensor:
    """Score by score, the generators in unsigned numbers."""
    seed, offset = (np.uint64(x % 2**64) for x in DROPOUT_SEED)
    b, h, i, j = (x.astype(np.uint64) for x in np.ogrid[tuple(map(slice, shape))])
    word, shift = np.uint64(2**32 - 1), np.uint64(32)
    c, key = [offset & word, offset >> shift, b, h], [seed & word, seed >> shift]
    with np.errstate(over="ignore"):
        for n in range(10):
            one, other = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
            k0, k1 = ((k + np.uint64(n * w)) & word for k, w in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True))
            c = [(other >> shift) ^ c[1] ^ k0, other & word, (one >> shift) ^ c[3] ^ k1, one & word]
        x0, x1 = (i // 16 * 8 + i % 8) ^ c[1], (j // 16 * 4 + j // 2 % 4) ^ c[2]
        for n in range(7):
            product = x0 * np.uint64(0xD256D193)
            x0, x1 = (product >> shift) ^ ((c[0] + np.uint64(n * 0x9E3779B9)) & word) ^ x1, product & word
    half = (np.where(i & 8 == 0, x0, x1) >> 16 * (j & 1)).astype(np.uint16)
    return torch.from_numpy((np.where(j & 8 == 0, half, half.byteswap()) & 0x7FFF).astype(np.int32))


class Results(NamedTuple):
    """Outputs and gradients; None where the case asks for none."""

    o: Tensor
    lse: Tensor
    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    dbias: Tensor | None
    dsink: Tensor | None = None


@contextlib.contextmanager
def poisoned_memory(device: str = "cpu") -> Iterator[None]:
    """Uninitialised memory is NaN: torch.empty fills it where deterministic algorithms are asked for. (The public way
    to ask for them imports Inductor, two seconds of each process.)"""
    before = torch.are_deterministic_algorithms_enabled()
    torch._C._set_deterministic_algorithms(True, warn_only=False)
    try:
        assert torch.empty(2, device=device).new_empty(3).isnan().all()
        yield
    finally:
        torch._C._set_deterministic_algorithms(before, warn_only=False)


def differentiate(case: Case, inputs: Tensors, function) -> Results:
    """``function(inputs)`` with o, lse and the gradients that the case asks for."""
    leaves = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "b": inputs.bias, "s": inputs.sink}
    leaves = {name: None if x is None else x.detach().requires_grad_(name in case.grads) for name, x in leaves.items()}
    q, k, v, bias, sink = leaves.values()
    o, lse = function(inputs._replace(q=q, k=k, v=v, bias=bias, sink=sink))
    wanted = [name for name, x in leaves.items() if x is not None and x.requires_grad]
    gradients = {}
    if wanted:
        pairs = [(o, inputs.do), (lse, inputs.dlse)][: 2 if case.lse else 1]
        pairs = [(x, d.to(x.dtype)) for x, d in pairs if x.requires_grad]  # plain torch: the LSE does not know of v
        outputs, cotangents = zip(*pairs, strict=True)
        found = torch.autograd.grad(outputs, [leaves[name] for name in wanted], cotangents)
        gradients = dict(zip(wanted, found, strict=True))
    return Results(o.detach(), lse.detach(), *(gradients.get(name) for name in "qkvbs"))


def run(case: Case, backend: str, device: str = "cpu", inputs: Tensors | None = None) -> Results:
    """The case through `tilewise.attention`, in poisoned memory."""
    inputs = tensors(case, device) if inputs is None else inputs
    with poisoned_memory(device):
        return differentiate(case, inputs, lambda x: call(case, backend, x))


def call(case: Case, backend: str, x: Tensors) -> tuple[Tensor, Tensor]:
    return attention(x.q, x.k, x.v, bias=x.bias, mask=x.mask, sink=x.sink, **case.terms, return_lse=True,
                     deterministic=case.deterministic, backend=backend)  # fmt: skip


def reference(case: Case, inputs: Tensors) -> Results:
    """The reference on float64 copies."""
    copies = Tensors(*(x.double() if x is not None and x.is_floating_point() else x for x in inputs))
    return differentiate(case, copies, lambda x: call(case, "reference", x))


def check(case: Case, backend: str, device: str = "cpu") -> dict[str, float]:
    """Hold a backend to the error rule, each result on its own; returns error / allowed error of each."""
    return hold(case, run(case, backend, device), device)


def hold(case: Case, results: Results, device: str = "cpu", inputs: Tensors | None = None) -> dict[str, float]:
    """Hold results of the case to the error rule; ``inputs`` if they are others than those of `tensors`.

    What is exact is compared exactly: shapes and dtypes, rows that see nothing, hidden keys, nothing else infinite.
    """
    small = inputs is None and device == "cpu" and case.B * case.H * case.M * case.N <= KEPT
    clean, exact, seen, yardstick = (_kept_bounds if small else _bounds)(case, device, inputs)
    _check_exact(case, results, clean, seen)
    known = _has_lse(clean, seen)
    ratios = {}
    more: dict[str, float] | None = None if inputs is None else {}
    for name, error in _errors(case, results, exact, known).items():
        largest = _largest(_finite_rows(name, getattr(exact, name), known))
        allowed = 2 * yardstick[name] + SLACK * largest
        if error > allowed:  # what few results need, and takes longer than all before
            if more is None:
                more = _more_draws(case, device, exact)
            allowed += 2 * max(more.get(name, 0.0) - yardstick[name], 0.0)
            if name == "dbias" and case.bias[3] == "1":
                allowed += _noise_of_delta(case, exact.o, clean.do, exact.dbias.shape)
            if name in ("dq", "dk", "dbias") and not case.lse and case.sink is None and seen.sum(-1).max() <= 1:
                allowed += _noise_of_cancelling(case, name, exact.o, clean, seen)
        ratios[name] = error / allowed if error else 0.0
        assert error <= allowed, (
            f"{case}: {name} is off by {error:.3e}, allowed {allowed:.3e} "
            f"(unfused {yardstick[name]:.3e}, largest element {largest:.3e})"
        )
    return ratios


def _bounds(case: Case, device: str, inputs: Tensors | None) -> tuple[Tensors, Results, Tensor, dict[str, float]]:
    """What results are held to: the inputs, the reference of them, who sees what, and plain torch's errors."""
    clean = tensors(case, device, planted=False) if inputs is None else inputs
    exact = reference(case, clean)
    seen = visible(case, clean)
    return clean, exact, seen, _errors(case, unfused_results(case, clean), exact, _has_lse(clean, seen))


_kept_bounds = functools.lru_cache(maxsize=128)(_bounds)  # one case is computed on several routes


def _more_draws(case: Case, device: str, exact: Results) -> dict[str, float]:
    """Plain torch's largest errors in seven more draws, of the results that have few elements: the largest of few
    errors says little about their size."""
    results = {name: x for name, x in zip(NAMES, exact, strict=True) if x is not None}
    tiny = min(x.numel() for x in results.values()) < FEW  # else those of which a band or a mask leaves few
    few = [name for name, x in results.items() if tiny or 0 < x.count_nonzero() < FEW]
    found = dict.fromkeys(few, 0.0)
    for draw in range(1, 8 if few else 1):
        again = tensors(case, device, planted=False, draw=draw)
        errors = _errors(case, unfused_results(case, again), reference(case, again),
                         _has_lse(again, visible(case, again)))  # fmt: skip
        found = {name: max(found[name], errors[name]) for name in few}
    return found


def opcheck(operator: torch._ops.OpOverload, arguments: Sequence[Any], traced: bool) -> None:
    """`torch.library.opcheck`. traced: also with symbols for sizes, which is nearly all of its time."""
    tests = ["test_schema", "test_autograd_registration", "test_faketensor"]
    torch.library.opcheck(operator, tuple(arguments), test_utils=tests + ["test_aot_dispatch_dynamic"] * traced)


def unfused_results(case: Case, inputs: Tensors) -> Results:
    return differentiate(case, inputs, lambda x: unfused(case, x))


def _has_lse(inputs: Tensors, seen: Tensor) -> Tensor:
    """Rows, (B, H, M), that see some key, or a sink."""
    found = seen.any(-1)
    return found if inputs.sink is None else found | (rows_of(inputs.sink) != -math.inf)


def _errors(case: Case, results: Results, exact: Results, known: Tensor) -> dict[str, float]:
    """Largest difference of each result that the case asks for."""
    errors = {}
    for name, x, y in zip(NAMES, results, exact, strict=True):
        if y is None:
            assert x is None, f"{name}: a gradient that nobody asked for"
            continue
        errors[name] = _largest(_finite_rows(name, x, known).double() - _finite_rows(name, y, known))
        assert math.isfinite(errors[name]), f"{case}: {name} is not finite"
    return errors


def _finite_rows(name: str, x: Tensor, known: Tensor) -> Tensor:
    """0 in place of the LSE's -inf; `_check_exact` has compared those."""
    return x.masked_fill(~known, 0.0) if name == "lse" else x


def _noise_of_delta(case: Case, o: Tensor, do: Tensor, shape: torch.Size) -> float:
    """What rounding O does to the gradient of a bias that is constant along the keys.

    Adding a constant to a row leaves its softmax alone: without the LSE that gradient is rowsum(dP∘P - dO∘O) = 0,
    and what remains of it is the rounding of O in the second sum. Four standard deviations, for independent rounding
    errors: 4u · sqrt(sum of (dO∘O)² over the rows that share an element).
    """
    squares = (do.double() * o).square().sum(-1, keepdim=True)
    if shape[1] not in (1, case.H):
        squares = squares.unflatten(1, (shape[1], -1)).sum(2)
    return 2 * torch.finfo(case.dtype).eps * math.sqrt(_largest(squares.sum_to_size(shape)))


def _noise_of_cancelling(case: Case, name: str, o: Tensor, inputs: Tensors, seen: Tensor) -> float:
    """What is left of dP - D where rows see one key: there the two are equal, and unfused torch subtracts P·dP itself.

    Each is a sum over the dimensions in float32, in an order of its own; the rest is what meets it on its way to an
    element of the gradient: the keys of a query, the queries of a key, or those that share a bias.
    """
    noise = torch.finfo(torch.float32).eps * (inputs.do.double() * o).abs().sum(-1, keepdim=True) * seen
    if name == "dq":
        return _largest(noise.sum(-1)) * _largest(inputs.k)
    if name == "dk":
        return _largest(noise.sum(-2).unflatten(1, (case.kv_heads, -1)).sum(2)) * _largest(inputs.q)
    shape = inputs.bias.shape
    if shape[1] not in (1, case.H):
        noise = noise.unflatten(1, (shape[1], -1)).sum(2)
    return _largest(noise.sum_to_size(shape))


def _check_exact(case: Case, results: Results, inputs: Tensors, seen: Tensor) -> None:
    o, lse, dq, dk, dv, dbias, dsink = results
    blind = ~seen.any(-1)
    assert o.shape == (case.B, case.H, case.M, case.value_dim)
    assert lse.shape == (case.B, case.H, case.M)
    assert (o.dtype, lse.dtype) == (case.dtype, torch.float32)
    for gradient, x in zip(results[2:], (*inputs[:4], inputs.sink), strict=True):
        assert gradient is None or (gradient.shape, gradient.dtype) == (x.shape, x.dtype)
    for name, x in zip(NAMES, results, strict=True):
        if x is not None and name != "lse":
            assert x.isfinite().all(), f"{name}: {int((~x.isfinite()).sum())} of {x.numel()} elements are not finite"
    known = _has_lse(inputs, seen)
    assert torch.equal(lse == -math.inf, ~known), "lse: -inf is the mark of rows that see nothing, and of no other"
    assert lse[known].isfinite().all(), "lse: not finite"
    if inputs.sink is not None:
        sink = rows_of(inputs.sink).expand_as(lse)
        assert dsink is None or (dsink[inputs.sink == -math.inf] == 0).all(), "dsink: not 0 where there is no sink"
        torch.testing.assert_close(
            lse[blind], sink[blind].to(lse.dtype), rtol=1e-6, atol=0, msg=lambda text: f"lse: {text}"
        )
    assert (o[blind] == 0).all(), "o: not 0 in a row that sees nothing"
    assert dq is None or (dq[blind] == 0).all(), "dq: not 0 in a row that sees nothing"
    unseen = ~seen.any(2).unflatten(1, (case.kv_heads, -1)).any(2)
    for name, gradient in (("dk", dk), ("dv", dv)):
        assert gradient is None or (gradient[unseen] == 0).all(), f"{name}: not 0 for a key that nobody sees"
    if dbias is not None:
        touched = seen.unflatten(1, (-1, case.H // dbias.shape[1])).any(2) if dbias.shape[1] > 1 else seen
        for axis in range(4):
            if dbias.shape[axis] == 1:
                touched = touched.any(axis, keepdim=True)
        assert (dbias[~touched] == 0).all(), "dbias: not 0 where the bias touches no visible pair"


def _largest(x: Tensor) -> float:
    """max|x|, NaN where there is one."""
    return x.abs().max().item() if x.numel() else 0.0


def compute_by(monkeypatch, backend, **passes) -> None:
    """For one test a backend's "forward" or "backward" is another function of the same arguments.

    What is kept of calls before computes by others, and what is kept now goes with the test.
    """
    monkeypatch.setattr(backend, "prepare", {**backend.prepare, **{name: at_once(f) for name, f in passes.items()}})
    empty_cache(monkeypatch)


def cached(name: str) -> dict:
    """What `calls` has under keys that begin with ``name``."""
    return {key: value for key, value in (calls._older | calls._recent).items() if key[0] == name}


def empty_cache(monkeypatch) -> None:
    """For one test, no call has been prepared before; what it prepares goes with it."""
    for name in ("_recent", "_older"):
        monkeypatch.setattr(calls, name, {})
