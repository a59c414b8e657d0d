"""Of the processes of test_distributed.py what they do with packed batches; distributed_child.py runs it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from distributed_child import (
    BRAIN,
    DOUBLE,
    NOT,
    SEEN,
    TYPE,
    VALUE,
    WHOLE,
    Case,
    D,
    Dv,
    H,
    Hkv,
    Kind,
    _leaves,
    _loss,
    _qkv,
)
from pairwise import pairwise
from processes import raises
from torch.distributed.device_mesh import DeviceMesh

from tilewise import varlen_attention
from tilewise.bias import RaggedBias, RelativeBias, alibi, low_rank_bias, t5_bias
from tilewise.distributed import (
    context_parallel_varlen_attention,
    documents,
    explain_context_parallel_varlen,
    shard,
    unshard,
)
from tilewise.distributed import documents as packed_module

LENGTHS = (5, 1, 0, 19, 7)
OFFSETS = tuple(itertools.accumulate(LENGTHS, initial=0))
T = OFFSETS[-1]
PACKED: dict[str, Kind] = {
    "plain": ({}, lambda t: {}),
    "keys": ({"x": ((H, T), 1)}, lambda t: {"bias": t["x"]}),
    "keys for all heads": ({"x": ((T,), 0)}, lambda t: {"bias": t["x"]}),
    "rows": ({"x": ((H, T, 1), 1), "s": ((H, T), 1)}, lambda t: {"bias": t["x"], "sink": t["s"]}),
    "low rank": ({"u": ((1, H, T, 3), 2), "w": ((1, Hkv, T, 3), 2)}, lambda t: {"bias": low_rank_bias(t["u"], t["w"])}),
    "values per query": ({"x": ((T, H, 9), 0)}, lambda t: {"bias": RelativeBias(t["x"], lo=-7)}),
    "values per key": (
        {"x": ((T, Hkv, 9), 0)}, lambda t: {"bias": RelativeBias(t["x"], lo=-7, on="key", outside="clamp")}
    ),
    "several": (
        {"x": ((1, T), 1), "z": ((16, H), WHOLE), "y": ((H,), WHOLE), "s": ((H,), WHOLE)},
        lambda t: {"bias": (t["x"], t5_bias(t["z"], False, 12), alibi(t["y"])), "sink": t["s"]},
    ),
}  # fmt: skip


def _packed_cases(size: int) -> list[Case]:
    methods = ("all_gather", "all_to_all")
    found = [Case(*row) for row in pairwise(methods, PACKED, ("causal", "window"), (None, "document"))]
    for balancer in (None, "document"):
        found += [Case(method, "keys", "all", balancer) for method in methods]
        found += [
            Case("all_to_all", "several", "both sides", balancer, more={"dropout_p": 0.3, "dropout_seed": (1, 2)}),
            Case("all_gather", "plain", "causal", balancer, BRAIN, lse=False),
        ]
    # Each sequence is one rank's, and nothing is sent; of four ranks two have no part of what others send each other;
    # heads in one group.
    is_local = [
        Case("all_gather", kind, "causal", "document", more=more)
        for kind, more in itertools.product(
            ("keys", "several"),
            ({"lengths": (8,) * 4}, {"lengths": (5, 5, 4, 4, 4, 4, 2, 2, 2)}, {"groups": 1}),
        )
    ]
    return (found if size == 2 else found[::3]) + is_local


def check_packed(case: Case, mesh: DeviceMesh) -> None:
    """Of sequences that ranks cut anywhere, of one token and of none."""
    torch.manual_seed(1)
    lengths = case.more.get("lengths", LENGTHS)
    offsets = tuple(itertools.accumulate(lengths, initial=0))
    more = {name: x for name, x in case.more.items() if name not in ("lengths", "groups")}
    shapes, build = PACKED[case.kind]
    shapes = {"q": ((T, H, D), 0), "k": ((T, Hkv, D), 0), "v": ((T, Hkv, Dv), 0), **shapes}
    tensors = {name: torch.randn(shape, dtype=DOUBLE).to(case.dtype) for name, (shape, _) in shapes.items()}
    cu, terms = torch.tensor(offsets), {**SEEN[case.seen], **more}

    def part(x, axis):
        return x if axis is None else shard(x, mesh, case.balancer, axis, cu_seqlens=offsets)

    whole = _leaves(case, tensors)
    local = _leaves(case, {name: part(x, shapes[name][1]) for name, x in tensors.items()})
    packed = cu, cu, max(lengths), max(lengths)
    expected, expected_lse = varlen_attention(
        *(whole[x] for x in "qkv"), *packed, **build(whole), **terms, return_lse=True
    )
    with patch.object(packed_module, "GROUP_FLOPS", math.inf if "groups" in case.more else 0.0):
        found = context_parallel_varlen_attention(
            *(local[x] for x in "qkv"), cu, **build(local), **terms, mesh=mesh, method=case.method,
            load_balancer=case.balancer, return_lse=case.lse,
        )  # fmt: skip
    o, lse = found if case.lse else (found, None)
    close = {DOUBLE: {}, BRAIN: {"rtol": 2e-2, "atol": 4e-2}}[case.dtype]
    torch.testing.assert_close(o, part(expected, 0), msg=lambda text: f"o: {text}", **close)
    torch.testing.assert_close(unshard(o, mesh, case.balancer, 0, cu_seqlens=cu), expected, **close)
    do, dlse = torch.randn_like(expected), torch.randn_like(expected_lse)
    if lse is not None:
        torch.testing.assert_close(lse, part(expected_lse, 1), msg=lambda text: f"lse: {text}", **close)
    _loss(expected, expected_lse if case.lse else None, do, dlse).backward()
    _loss(o, lse, part(do, 0), part(dlse, 1)).backward()
    for name, x in whole.items():
        torch.testing.assert_close(
            local[name].grad, part(x.grad, shapes[name][1]), msg=lambda text, name=name: f"d{name}: {text}", **close
        )


# Of packed batches: this rank's tokens, cu_seqlens and the rest.
PACKED_ERRORS: dict[str, tuple[Callable[[int, int], tuple[list, Any, dict]], type[Exception], str]] = {
    "other lengths": (
        lambda r, n: (_qkv(4, 2, 8), (0, 3 - r % 2, 4 * n), {}), VALUE, "^cu_seqlens: must be alike on all ranks"
    ),
    "tokens that do not divide": (
        lambda r, n: (_qkv(4, 2, 8), (0, 4 * n + 1), {}), VALUE, r"^cu_seqlens: \d+ tokens do not divide by"
    ),
    "other tokens": (lambda r, n: (_qkv(5, 2, 8), (0, 4 * n), {}), VALUE, "^q: expected this rank's 4 of the"),
    "lengths that descend": (lambda r, n: (_qkv(4, 2, 8), (0, 5, 4), {}), VALUE, "^cu_seqlens: must not descend"),
    "lengths from 1": (lambda r, n: (_qkv(4, 2, 8), (1, 5), {}), VALUE, "^cu_seqlens: begins with 0"),
    "lengths of floats": (lambda r, n: (_qkv(4, 2, 8), torch.zeros(3), {}), VALUE, "^cu_seqlens: expected int32 or"),
    "a balancer of sequences": (
        lambda r, n: (_qkv(4, 2, 8), (0, 4 * n), {"load_balancer": "head_tail"}), VALUE,
        "^load_balancer: of a packed batch must be None or 'document'",
    ),
    "the ring": (
        lambda r, n: (_qkv(4, 2, 8), (0, 4 * n), {"method": "ring"}), VALUE,
        "^method: 'ring' cannot run this call: it takes no packed batches",
    ),
    "dropout that gathers": (
        lambda r, n: (_qkv(4, 2, 8), (0, 4 * n), {"method": "all_gather", "dropout_p": 0.5}), VALUE,
        "^method: 'all_gather' cannot run this call: dropout counts",
    ),
    "a window of both sides": (
        lambda r, n: (_qkv(4, 2, 8), (0, 4 * n), {"method": "all_gather", "window": (2, 1)}), VALUE,
        "^method: 'all_gather' cannot run this call: a window of a packed batch",
    ),
    "a start": (
        lambda r, n: (
            _qkv(4, 2, 8), (0, 4 * n),
            {"method": "all_gather", "causal": True, "bias": alibi(torch.ones(2), query_start=1)},
        ), VALUE, "^method: 'all_gather' cannot run this call: Alibi of a packed batch counts from the last",
    ),
    "a padded bias": (
        lambda r, n: (_qkv(4, 2, 8), (0, 4 * n), {"bias": torch.zeros(1, 2, 4, 4)}), NOT, "^bias: .* no padded tensor"
    ),
    "a bias of other tokens": (
        lambda r, n: (_qkv(4, 2, 8), (0, 4 * n), {"bias": torch.zeros(2, 5)}), VALUE, "^bias: shape .* is neither along"
    ),
    "a ragged bias": (
        lambda r, n: (_qkv(4, 2, 8), (0, 4 * n), {"bias": RaggedBias(torch.zeros(1, 9), torch.tensor([0, 9]))}), NOT,
        "^bias: RaggedBias is not taken",
    ),
    "a mask": (
        lambda r, n: (_qkv(4, 2, 8), (0, 4 * n), {"mask": torch.ones(1)}), TYPE, "an unexpected keyword argument 'mask'"
    ),
}  # fmt: skip


def check_packed_error(name: str, mesh: DeviceMesh) -> None:
    arguments, kind, words = PACKED_ERRORS[name]
    qkv, offsets, terms = arguments(mesh.get_local_rank(), mesh.size())
    raises(kind, words, context_parallel_varlen_attention, *qkv, offsets, **{"mesh": mesh, **terms})


def check_documents(mesh: DeviceMesh) -> None:
    """Every rank has as many tokens and about as many pairs; each token is one rank's; few sequences are several's."""
    generator = torch.Generator().manual_seed(3)
    for size, longest in itertools.product((1, 2, 3, 4, 8), (90, 900)):
        lengths = torch.randint(0, 90, (141,), generator=generator).tolist()
        lengths[7] = longest
        lengths[-1] += -sum(lengths) % size
        offsets = tuple(itertools.accumulate(lengths, initial=0))
        split = documents.documents_of(size, True, offsets)
        rows = [split.rows(rank) for rank in range(size)]
        assert {len(x) for x in rows} == {offsets[-1] // size}
        assert sorted(torch.cat(rows).tolist()) == list(range(offsets[-1]))
        pairs = [split.pairs(rank, True) for rank in range(size)]
        assert sum(pairs) == sum(n * (n + 1) // 2 for n in lengths)
        assert max(pairs) < 1.03 * sum(pairs) / size
        holders = torch.stack([split.seen_lengths(rank) > 0 for rank in range(size)]).sum(0)
        assert (holders > 1).sum() <= size
        assert (holders[7] > 1) == (longest**2 > sum(n * n for n in lengths) / size)
    # As many tokens are not as many pairs: of three that are long one is everybody's on two ranks.
    offsets = tuple(itertools.accumulate([400] * 3 + [20] * 60, initial=0))
    for size in (2, 3, 4, 8):
        split = documents.documents_of(size, True, offsets)
        pairs = [split.pairs(rank, True) for rank in range(size)]
        assert max(pairs) < 1.03 * sum(pairs) / size
        assert sum(x.lengths for x in split.spans(0)).sum() == offsets[-1] // size
    q, k, v = (torch.zeros(32, heads, 64, dtype=BRAIN, requires_grad=True) for heads in (8, 4, 4))
    offsets = (0, 32 * mesh.size())
    plan = explain_context_parallel_varlen(q, k, v, offsets, mesh=mesh, causal=True, load_balancer="document")
    assert plan.method in ("all_gather", "all_to_all")
    assert len(set(plan.flops)) == 1
    assert "ring: not supported, it takes no packed batches" in str(plan)
    terms = {"mesh": mesh, "dropout_p": 0.1}
    assert explain_context_parallel_varlen(q, k, v, offsets, **terms).method == "all_to_all"
    raises(ValueError, "^tensor: expected 64 of the 64 tokens", shard, q, mesh, "document", cu_seqlens=(0, 64))


def checks_of_packed(size: int) -> dict[str, tuple]:
    found: dict[str, tuple] = {f"packed: {case}": (check_packed, case) for case in _packed_cases(size)}
    found |= {f"packed error: {name}": (check_packed_error, name) for name in PACKED_ERRORS}
    return found | {"documents": (check_documents,)}
