"""Calls of every public function, forward and backward, and which of a call's tensors outlive it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import tilewise
from tilewise import TileMask, attention
from tilewise.bias import RaggedBias, RelativeBias, alibi, low_rank_bias, t5_bias
from tilewise.integrations import evoformer, flash_attn

H, Hkv, D, Dv = 2, 1, 16, 8


class Call:
    """Makes the tensors of one call, all of which it knows by name. n: what the lengths follow from."""

    def __init__(self, n: int, device: str, backend: str | None, dtype: torch.dtype) -> None:
        self.n, self.device, self.dtype = n, device, dtype
        self.backend: dict[str, Any] = {} if backend is None else {"backend": backend}
        self.made: dict[str, Tensor] = {}

    def normal(self, *shape: int) -> Tensor:
        return self._known(torch.randn(shape, device=self.device).to(self.dtype).requires_grad_())

    def seen(self, *shape: int) -> Tensor:
        return self._known(torch.rand(shape, device=self.device) < 0.8)

    def ints(self, *values: int) -> Tensor:
        return self._known(torch.tensor(values, dtype=torch.int32, device=self.device))

    def qkv(self, queries: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        M = self.n if queries is None else queries
        return self.normal(2, H, M, D), self.normal(2, Hkv, self.n, D), self.normal(2, Hkv, self.n, Dv)

    def rows(self) -> tuple[Any, ...]:
        """A packed batch of two sequences: q, k, v, offsets and longest of both."""
        total = 2 * self.n + 1
        cu = self.ints(0, self.n, total)
        qkv = self.normal(total, H, D), self.normal(total, Hkv, D), self.normal(total, Hkv, Dv)
        return *qkv, cu, cu, self.n + 1, self.n + 1

    def _known(self, x: Tensor) -> Tensor:
        self.made[f"input {len(self.made)} {tuple(x.shape)}"] = x
        return x


def _nested(c: Call) -> tuple[Any, ...]:
    from torch.nested import nested_tensor_from_jagged as jagged

    q, k, v, cu, *_ = c.rows()
    return tuple(jagged(x, cu).transpose(1, 2) for x in (q, k, v))


def _t5(c: Call) -> Tensor:
    return attention(*c.qkv(), bias=t5_bias(c.normal(32, H), True), **c.backend)


def _of_distance(c: Call) -> Tensor:
    bias = RelativeBias(c.normal(1, H, c.n, 9), lo=-4)
    return attention(*c.qkv(), bias=bias, causal=True, **c.backend)


def _low_rank(c: Call) -> Tensor:
    return attention(*c.qkv(), bias=low_rank_bias(c.normal(1, H, c.n, 3), c.normal(1, Hkv, c.n, 3)), **c.backend)


def _tiles(c: Call) -> Tensor:
    mask = TileMask.documents(torch.arange(c.n, device=c.device) // 9, block=64)
    return attention(*c.qkv(), mask=mask, **c.backend)


def _selected_keys(c: Call) -> Tensor:
    return attention(*c.qkv(), mask=tilewise.dynamic_mask(c.normal(1, 1, 1, c.n), keep=5), **c.backend)


def _ragged(c: Call) -> Tensor:
    pairs = c.n**2, (c.n + 1) ** 2
    return tilewise.varlen_attention(
        *c.rows(), bias=RaggedBias(c.normal(H, sum(pairs)), c.ints(0, pairs[0], sum(pairs))), **c.backend
    )


def _two_parts(c: Call) -> Any:
    parts = [attention(*c.qkv(), return_lse=True, **c.backend) for _ in range(2)]
    return tilewise.merge_attention([o for o, _ in parts], [lse for _, lse in parts])


def _packed_heads(c: Call) -> Tensor:
    return flash_attn.flash_attn_qkvpacked_func(c.normal(2, c.n, 3, H, D), alibi_slopes=c.normal(H).detach().float())


def _packed_key_heads(c: Call) -> Tensor:
    return flash_attn.flash_attn_kvpacked_func(c.normal(2, c.n, H, D), c.normal(2, c.n, 2, Hkv, D), causal=True)


def _varlen_packed_heads(c: Call) -> Tensor:
    *_, cu, _, longest, _ = c.rows()
    return flash_attn.flash_attn_varlen_qkvpacked_func(c.normal(2 * c.n + 1, 3, H, D), cu, longest)


def _varlen_packed_key_heads(c: Call) -> Tensor:
    q, _, _, *lengths = c.rows()
    return flash_attn.flash_attn_varlen_kvpacked_func(q, c.normal(2 * c.n + 1, 2, Hkv, D), *lengths)


def _triangle(c: Call) -> Tensor:
    x = [c.normal(1, 5, H, c.n, D) for _ in range(3)]
    return evoformer.triangle_attention(*x, c.normal(1, 1, H, c.n, c.n), c.seen(1, 5, 1, 1, c.n))


def _evoformer(c: Call) -> Tensor:
    x = [c.normal(2, 3, c.n, H, D) for _ in range(3)]
    return evoformer.DS4Sci_EvoformerAttention(*x, [c.normal(2, 3, 1, 1, c.n), c.normal(2, 1, H, c.n, c.n)])


def _pair_bias(c: Call) -> Tensor:
    x = [c.normal(1, 3, H, c.n, D) for _ in range(3)]
    return evoformer.attention_pair_bias(*x, c.normal(1, H, c.n, c.n))


def _windows(c: Call) -> Tensor:
    x, blocks = [c.normal(1, H, c.n, D) for _ in range(3)], -(-c.n // 16)
    return evoformer.window_pair_attention(*x, c.normal(1, H, blocks, 16, 32), c.seen(1, c.n), 16, 32, **c.backend)


# With backend=, so that each is asked for all of them.
OF_BACKENDS: dict[str, Callable[[Call], Any]] = {
    "attention": lambda c: attention(*c.qkv(), return_lse=True, **c.backend),
    "attention, everything": lambda c: attention(
        *c.qkv(), bias=c.normal(1, H, c.n, c.n), mask=c.seen(2, 1, c.n, c.n), sink=c.normal(H), window=(30, 0),
        softcap=9.0, return_lse=True, **c.backend,
    ),
    "attention, dropout": lambda c: attention(*c.qkv(), dropout_p=0.2, **c.backend),
    "attention, deterministic": lambda c: attention(
        *c.qkv(), bias=c.normal(1, 1, c.n, c.n), deterministic=True, **c.backend
    ),
    "attention, one query": lambda c: attention(*c.qkv(1), **c.backend),
    "attention, no keys": lambda c: attention(
        c.normal(1, H, c.n, D), c.normal(1, H, 0, D), c.normal(1, H, 0, D), **c.backend
    ),
    "attention, leading dimensions": lambda c: attention(
        *(c.normal(2, 2, H, c.n, D) for _ in range(3)), bias=c.normal(2, H, c.n, c.n), **c.backend
    ),
    "attention, t5_bias": _t5,
    "attention, alibi": lambda c: attention(*c.qkv(), bias=alibi(c.normal(H)), causal=True, **c.backend),
    "attention, RelativeBias": _of_distance,
    "attention, low_rank_bias": _low_rank,
    "attention, TileMask": _tiles,
    "attention, dynamic_mask": _selected_keys,
    "varlen_attention": lambda c: tilewise.varlen_attention(
        *c.rows(), bias=c.normal(1, H, c.n + 1, c.n + 1), causal=True, return_lse=True, **c.backend
    ),
    "varlen_attention, sink": lambda c: tilewise.varlen_attention(*c.rows(), sink=c.normal(H), **c.backend),
    "varlen_attention, RaggedBias": _ragged,
    "merge_attention": _two_parts,
}  # fmt: skip
# The plan chooses.
OTHERS: dict[str, Callable[[Call], Any]] = {
    "scaled_dot_product_attention": lambda c: tilewise.scaled_dot_product_attention(
        *c.qkv(), c.normal(c.n, c.n), enable_gqa=True
    ),
    "scaled_dot_product_attention, dropout": lambda c: tilewise.scaled_dot_product_attention(
        *(c.normal(2, H, c.n, D) for _ in range(3)), dropout_p=0.1, is_causal=True
    ),
    "varlen_attn": lambda c: tilewise.varlen_attn(*c.rows(), window_size=(-1, 0), enable_gqa=True),
    "flash_attn_func": lambda c: flash_attn.flash_attn_func(
        c.normal(2, c.n, H, D), *(c.normal(2, c.n, Hkv, D) for _ in range(2)), bias=c.normal(1, H, c.n, c.n)
    ),
    "flash_attn_kvpacked_func": _packed_key_heads,
    "flash_attn_qkvpacked_func": _packed_heads,
    "flash_attn_varlen_func": lambda c: flash_attn.flash_attn_varlen_func(*c.rows(), causal=True),
    "flash_attn_varlen_kvpacked_func": _varlen_packed_key_heads,
    "flash_attn_varlen_qkvpacked_func": _varlen_packed_heads,
    "triangle_attention": _triangle,
    "DS4Sci_EvoformerAttention": _evoformer,
    "attention_pair_bias": _pair_bias,
    "softmax": lambda c: tilewise.softmax(
        c.normal(2, H, c.n, c.n), scale=0.3, bias=c.normal(1, H, c.n, c.n), mask=c.seen(2, 1, c.n, c.n)
    ),
}  # fmt: skip
# In tests of their own, for what they import is slow to.
NESTED: dict[str, Callable[[Call], Any]] = {
    "attention, nested tensors": lambda c: attention(*_nested(c)).values(),
    "scaled_dot_product_attention, nested tensors": lambda c: tilewise.scaled_dot_product_attention(
        *_nested(c), enable_gqa=True
    ).values(),
}
# Whose backends are others, or not all of them.
OF_CPU_AND_TRITON: dict[str, Callable[[Call], Any]] = {
    "window_pair_attention": _windows,
    "matmul": lambda c: tilewise.matmul(c.normal(2, c.n, 40), c.normal(40, 24), c=c.normal(24), **c.backend),
}


def calls(backend: str | None) -> dict[str, Callable[[Call], Any]]:
    """Those that a backend computes, or of None, for which the plan chooses, all."""
    if backend is None:
        return OF_BACKENDS | OTHERS | OF_CPU_AND_TRITON
    return OF_BACKENDS | (OF_CPU_AND_TRITON if backend != "reference" else {})


def _tensors(x: Any) -> list[Tensor]:
    return [x] if isinstance(x, Tensor) else [x for x in x if isinstance(x, Tensor)]


def _differentiated(function: Callable[[Call], Any], call: Call) -> dict[str, Tensor]:
    """All tensors that go in and come out."""
    outputs = _tensors(function(call))
    found = dict(call.made)
    if outputs[0].requires_grad:
        loss = sum(x.double().square().sum() for x in outputs)
        leaves = {name: x for name, x in call.made.items() if x.requires_grad}
        grads = torch.autograd.grad(loss, leaves.values(), allow_unused=True)
        found |= {f"gradient of {name}": x for name, x in zip(leaves, grads, strict=True) if x is not None}
    return found | {f"output {i}": x for i, x in enumerate(outputs)}


def _has_memory(x: object) -> bool:
    return issubclass(type(x), Tensor) and not x.is_meta  # type: ignore[attr-defined]


def leftovers(
    function: Callable[[Call], Any], n: int, device: str, backend: str | None = None, dtype: torch.dtype = torch.float32
) -> list[str]:
    """What of a call with lengths that none had before is alive after it: tensors that went in or came out by their
    names, memory that others share with them too; all others by their shapes; and on a GPU by their bytes."""
    _differentiated(function, Call(n - 1, device, backend, dtype))  # what is kept whatever the lengths
    gc.collect()
    gc.freeze()  # of what is made from here on alone Python tells
    found = []
    for words in ("", ", again"):
        allocated = torch.cuda.memory_allocated() if device == "cuda" else None
        named = _differentiated(function, Call(n, device, backend, dtype))
        kept = {name: StorageWeakRef(x.untyped_storage()) for name, x in named.items()}
        del named
        end = time.monotonic() + 2
        while (left := _left(kept, allocated)) and time.monotonic() < end:
            time.sleep(0.01)  # threads of gloo let go of what they have sent a moment later
        found += [f"{name}{words}" for name in left]
    return found


def _left(kept: dict[str, StorageWeakRef], allocated: int | None) -> list[str]:
    gc.collect()
    found = [name for name, x in kept.items() if not x.expired()]
    found += [f"a tensor {tuple(x.shape)}" for x in gc.get_objects() if _has_memory(x)]
    if allocated is not None and torch.cuda.memory_allocated() > allocated:
        found.append(f"{torch.cuda.memory_allocated() - allocated} bytes")
    return found


def leftovers_of(name: str, n: int, device: str, backend: str | None, dtype: torch.dtype = torch.float32) -> list[str]:
    """`leftovers` of a call by its name, for a process that cannot be handed functions."""
    return leftovers(calls(backend)[name], n, device, backend, dtype)
