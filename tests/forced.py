"""What a test chooses that a call decides by itself: a number of splits, where dropout counts from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import torch
from helpers import Case, check

from tilewise import clear_caches
from tilewise.backends import Inputs
from tilewise.operator.autograd import attention_op
from tilewise.spec import dropout
from tilewise.spec.score import Band, Score, ScoreNumbers


@contextlib.contextmanager
def forced_splits(splits: int) -> Iterator[None]:
    """Forwards of few queries run in so many splits, whatever their sizes; what was prepared before is forgotten."""
    from tilewise.backends.triton import launch, resized

    chosen = launch.splits, resized.shared_by
    launch.splits = lambda problem, config: splits if problem.few_queries else 1
    # A second call of the same structure is a resized one, also where its lengths are those of the first.
    resized.shared_by = lambda problem, *_: splits if problem.few_queries else 1
    clear_caches()
    try:
        yield
    finally:
        launch.splits, resized.shared_by = chosen
        clear_caches()


def check_split(case: Case, splits: int, device: str = "cpu") -> dict[str, float]:
    """`helpers.check` of the triton backend in so many splits."""
    with forced_splits(splits):
        return check(case, "triton", device)


def check_origin(
    backend: str, origin: dropout.Origin, deterministic: bool, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> None:
    """A part of a call drops what the whole one does: against float64, by the generator's own numbers."""
    generator = torch.Generator().manual_seed(3)
    q, do = (torch.randn(2, 4, 19, 16, generator=generator).to(device, dtype) for _ in range(2))
    k, v = (torch.randn(2, 2, 35, 16, generator=generator).to(device, dtype) for _ in range(2))
    leaves, seed = [x.requires_grad_() for x in (q, k, v)], torch.tensor([2**40 + 1, 7], device=device)
    score = replace(Score.of(Band(hi=16), 16, dropout_p=0.3), origin=origin)
    assert ScoreNumbers.of(score, False, backend).score == score
    o, *_ = attention_op(Inputs(q, k, v, None, None, None, seed=seed), score, deterministic, backend)
    b, h, i, j = torch.meshgrid(*(torch.arange(n, device=device) for n in (2, 4, 19, 35)), indexing="ij")
    kept = dropout.kept(
        dropout.stream(seed, b, h + origin.head), i + origin.query, j + origin.key, score.dropout
    )  # fmt: skip
    s = (q.double() @ k.double().repeat_interleave(2, 1).mT / 4).masked_fill(j - i > 16, -torch.inf)
    p = torch.softmax(s, -1) * torch.where(kept, dropout.weight(score.dropout), 0.0)
    expected = p @ v.double().repeat_interleave(2, 1)
    # A probability that is wrongly dropped or kept is worth a tenth and more.
    near = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(o.double(), expected, **near)
    found, wanted = (torch.autograd.grad((x * do).sum(), leaves) for x in (o, expected))
    torch.testing.assert_close(found, wanted, **near)
