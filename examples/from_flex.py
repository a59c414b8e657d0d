"""A layer of attention written for FlexAttention, moved over to tilewise: equal outputs, equal gradients.

    python examples/from_flex.py

The layer has a score_mod (a soft cap, then a learned bias by distance for each head, then ALiBi) and a BlockMask
(documents, causal). `tilewise.integrations.flex` takes both as they are. What becomes of each, there and by hand:

    block_mask                          mask=, the same object; or causal=True and TileMask.documents, without mask_mod
    20 * tanh(score / 20)               softcap=20
    table[h, clamped distance]          a term of bias=, RelativeBias; its gradient goes to the table
    -slopes[h] * |q_idx - kv_idx|       another, alibi

On the CPU FlexAttention has the gradients of what a score_mod captures, and refuses those of q, k and v: there these
are held to differences of its outputs, and all is float64. On a GPU, where it is compiled, they are held to its own.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import tilewise
from tilewise import TileMask
from tilewise.bias import Alibi, RelativeBias, alibi, alibi_slopes
from tilewise.integrations import flex
from tilewise_tools.demo.example import Trial, draw_apart, parse, table

WIDTH, HEADS, REACH, CAP = 64, 4, 16, 20.0


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.table = nn.Parameter(torch.randn(HEADS, 2 * REACH + 1))
        self.slopes = nn.Parameter(alibi_slopes(HEADS))

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind(0)

    def score_mod(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        score = CAP * torch.tanh(score / CAP)
        score = score + self.table[h, (kv_idx - q_idx).clamp(-REACH, REACH) + REACH]
        return score - self.slopes[h] * (q_idx - kv_idx).abs()

    def before(self, q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask) -> Tensor:
        function = torch.compile(flex_attention) if q.is_cuda else flex_attention
        return function(q, k, v, score_mod=self.score_mod, block_mask=block_mask)

    def after(self, q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask) -> Tensor:
        return flex.flex_attention(q, k, v, score_mod=self.score_mod, block_mask=block_mask)

    def by_hand(self, q: Tensor, k: Tensor, v: Tensor, mask: TileMask) -> Tensor:
        return tilewise.attention(q, k, v, bias=self.bias(), softcap=CAP, mask=mask, causal=True)

    def bias(self) -> tuple[RelativeBias, Alibi]:
        return RelativeBias(self.table[None, :, None], lo=-REACH, outside="clamp"), alibi(self.slopes)


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """How far apart they are, for each of what is compared."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--documents", type=int, default=3)
    given = parse(parser, arguments, "flex", dtypes=False)
    torch.manual_seed(0)
    on_cpu = given.device == "cpu"
    like = {"device": given.device, "dtype": torch.float64 if on_cpu else torch.float32}
    layer, x = Layer().to(**like), torch.randn(2, given.length, WIDTH).to(**like)
    document = torch.arange(given.length, device=given.device) * given.documents // given.length

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (document[q_idx] == document[kv_idx]) & (q_idx >= kv_idx)

    block_mask = create_block_mask(mask_mod, None, None, given.length, given.length, device=given.device)
    # On the CPU FlexAttention computes all scores, and says so in a warning.
    warnings.filterwarnings("ignore", "flex_attention called without torch.compile", UserWarning)

    parts = [y.detach().requires_grad_() for y in layer.heads(x)]
    captured = [layer.table, layer.slopes]
    o = layer.after(*parts, block_mask)
    do = torch.randn_like(o)
    found = torch.autograd.grad(o, parts + captured, do)

    apart = {}
    if on_cpu:
        by_flex = layer.before(*(y.detach() for y in parts), block_mask)
        expected = torch.autograd.grad(by_flex, captured, do)
        for i, name in enumerate("qkv"):
            along, step = torch.randn_like(parts[i]), 1e-5
            ends = []
            for sign in (1, -1):
                moved = [y.detach() + (sign * step * along if y is parts[i] else 0) for y in parts]
                ends.append((layer.before(*moved, block_mask) * do).sum())
            slope = (ends[0] - ends[1]) / (2 * step)
            apart[f"gradient of {name}, along a random direction"] = relative((found[i] * along).sum(), slope)
    else:
        by_flex = layer.before(*parts, block_mask)
        expected = torch.autograd.grad(by_flex, parts + captured, do)
    names = ("q", "k", "v", "table", "slopes")[-len(expected) :]
    for name, ours, theirs in zip(names, found[-len(expected) :], expected, strict=True):
        apart[f"gradient of {name}"] = relative(ours, theirs)
    apart["output"] = relative(o, by_flex)
    # A mask by tiles that no mask_mod is asked for, and causal=True beside it.
    by_hand = layer.by_hand(*parts, TileMask.documents(document))
    apart["output by hand, with TileMask.documents"] = relative(by_hand, by_flex)
    most = 1e-6 if on_cpu else 2e-3  # on a GPU products may be rounded to TF32
    print(f"largest difference, of the largest number; less than {most:.0e} is rounding:")
    for name, difference in apart.items():
        print(f"  {name}: {difference:.1e}")
    assert max(apart.values()) < most, f"FlexAttention and tilewise differ by more than {most}"
    print(tilewise.explain(*parts, bias=layer.bias(), mask=block_mask, softcap=CAP))
    runs = [Trial("tilewise"), Trial("flex")]
    detached = [y.detach() for y in parts]
    with torch.no_grad():
        for _ in range(8):
            for run, forward in zip(runs, (layer.after, layer.before), strict=True):
                run.measure(partial(forward, *detached, block_mask), given.device)
    print("a step is a forward; on a CPU FlexAttention computes all scores" if on_cpu else "a step is a forward")
    table(runs)
    draw_apart(given.output / "from_flex.png", "From FlexAttention to tilewise", apart, most, runs)
    return apart


def relative(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, of the largest number."""
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


if __name__ == "__main__":
    main()
