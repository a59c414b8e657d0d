"""Part 2: a small transformer with a trainable relative-position bias, trained twice side by side.

One copy uses tilewise, the other PyTorch's SDPA. Both start from the same weights and see the same batches of a play
by Shakespeare, so their losses must agree at every step up to float32 rounding.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import resources

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from tilewise_tools.demo.comparison import (
    Advance,
    Attend,
    Comparison,
    Spread,
    relative_difference,
    sdpa_causal_attention,
    tilewise_causal_attention,
    worst,
)

# Float32 rounding changes losses and gradients by about 1e-6, measured on a CPU and an H200. On the CPU a scale that
# is wrong by 0.1% changes the losses by 1.5e-4, a dbias that is wrong by 1% by 3e-3.
LOSS_TOLERANCE = 5e-5
GRADIENT_TOLERANCE = 2e-5
# A run stops after ENOUGH seconds, but not before FEWEST_STEPS.
ENOUGH, FEWEST_STEPS = 75.0, 20
SEED = 20


@dataclass(frozen=True)
class TrainingSettings:
    """Sizes of the run: ``length`` characters per sequence, ``batch`` sequences per step."""

    steps: int
    length: int
    batch: int
    layers: int
    heads: int
    width: int
    learning_rate: float
    warmup: int  # steps over which the learning rate rises
    buckets: int = 32
    max_distance: int = 128


# Low learning rates, so that training does not amplify rounding: at higher ones even two SDPA kernels diverge.
CPU = TrainingSettings(steps=200, length=128, batch=16, layers=3, heads=4, width=128, learning_rate=0.15, warmup=60)
CUDA = TrainingSettings(
    steps=300, length=512, batch=32, layers=4, heads=8, width=256, learning_rate=0.05, warmup=100, max_distance=256
)


def quick(settings: TrainingSettings) -> TrainingSettings:
    return replace(settings, steps=20, batch=8)


@dataclass(frozen=True)
class TrainingResult:
    """Losses of every step in nats per character, and the time of a step, for each of the two runs."""

    settings: TrainingSettings
    symbols: int
    tilewise_losses: list[float]
    sdpa_losses: list[float]
    tilewise_seconds: Spread
    sdpa_seconds: Spread
    gradient_difference: float  # relative, over all parameters, at the first step

    @property
    def loss_differences(self) -> list[float]:
        return [abs(a - b) for a, b in zip(self.tilewise_losses, self.sdpa_losses, strict=True)]

    @property
    def comparisons(self) -> list[Comparison]:
        return [
            Comparison("first gradients of every parameter, relative", self.gradient_difference, GRADIENT_TOLERANCE),
            Comparison(f"losses of {len(self.sdpa_losses)} steps", worst(self.loss_differences), LOSS_TOLERANCE),
        ]


def read_play() -> str:
    """Return *As You Like It*, which is in the public domain; see data/README.md."""
    return (resources.files("tilewise_tools.demo") / "data" / "as_you_like_it.txt").read_text(encoding="ascii")


def read_batches(settings: TrainingSettings) -> tuple[int, Iterator[Tensor]]:
    """Return the alphabet's size, and an iterator of one int64 (batch, length + 1) batch per step.

    Batches are equal in every run.
    """
    play = read_play()
    alphabet = sorted(set(play))
    text = torch.tensor([alphabet.index(c) for c in play], device="cpu")
    generator = torch.Generator().manual_seed(SEED)

    def batches() -> Iterator[Tensor]:
        for _ in range(settings.steps):
            size = settings.batch, 1
            starts = torch.randint(len(text) - settings.length, size, generator=generator, device="cpu")
            yield text[starts + torch.arange(settings.length + 1, device="cpu")]

    return len(alphabet), batches()


def distance_buckets(length: int, buckets: int, max_distance: int) -> Tensor:
    """Return the bucket of each (query, key) pair, int64 (length, length).

    The distance is the query's position minus the key's. The first half of the buckets holds one distance each, the
    second half logarithmic ranges up to ``max_distance``; larger distances share the last bucket. Keys after the query
    are in bucket 0, since causal attention hides them.
    Source: T5 (arXiv 1910.10683), section 2.1.
    """
    positions = torch.arange(length, device="cpu")
    distance = (positions[:, None] - positions[None, :]).clamp(min=0)
    exact = buckets // 2
    log_ratio = (distance.clamp(min=exact).float() / exact).log() / math.log(max_distance / exact)
    far = exact + (log_ratio * (buckets - exact)).long()
    return torch.where(distance < exact, distance, far.clamp(max=buckets - 1))


class Block(nn.Module):
    """Pre-norm transformer block with a given attention function."""

    def __init__(self, settings: TrainingSettings, attend: Attend) -> None:
        super().__init__()
        width = settings.width
        self.heads, self.attend = settings.heads, attend
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        B, S, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(B, S, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, H, S, D), a view
        o = self.attend(q, k, v, bias)
        x = x + self.out(o.transpose(1, 2).reshape(B, S, width))
        return x + self.mlp(self.norm_mlp(x))


class CharacterModel(nn.Module):
    """Next-character model whose only position information is a bias that all layers share, as in T5."""

    bucket: Tensor

    def __init__(self, symbols: int, settings: TrainingSettings, attend: Attend) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, settings.width)
        self.bias_table = nn.Embedding(settings.buckets, settings.heads)
        self.blocks = nn.ModuleList(Block(settings, attend) for _ in range(settings.layers))
        self.norm = nn.LayerNorm(settings.width)
        self.head = nn.Linear(settings.width, symbols)
        buckets = distance_buckets(settings.length, settings.buckets, settings.max_distance)
        self.register_buffer("bucket", buckets, persistent=False)

    def bias(self, characters: Tensor) -> Tensor:
        """Return the bias (1, H, S, S)."""
        bias: Tensor = self.bias_table(self.bucket)
        return bias.permute(2, 0, 1).unsqueeze(0).contiguous()

    def forward(self, characters: Tensor) -> Tensor:
        """Return logits (B, S, symbols) for characters (B, S), int64."""
        bias = self.bias(characters)
        x = self.embedding(characters)
        for block in self.blocks:
            x = block(x, bias)
        return self.head(self.norm(x))


class Run:
    """One model with its optimizer, losses and step times in seconds."""

    def __init__(
        self,
        symbols: int,
        settings: TrainingSettings,
        device: torch.device,
        attend: Attend,
        kind: type[CharacterModel] = CharacterModel,
    ) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            self.model = kind(symbols, settings, attend).to(device)
        # Not Adam: it hides a wrong factor in a gradient, and within 100 steps it makes runs that differ by rounding
        # diverge, even those of two SDPA kernels.
        rate = settings.learning_rate
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=rate, momentum=0.9, nesterov=True)
        self.schedule = LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / settings.warmup))
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        start = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.losses.append(loss.item())  # waits for the device
        self.seconds.append(time.perf_counter() - start)

    def gradients(self) -> list[Tensor]:
        return [p.new_zeros(p.shape) if p.grad is None else p.grad for p in self.model.parameters()]


def run(
    settings: TrainingSettings,
    device: torch.device,
    advance: Advance = lambda fraction: None,
    attend: Attend = tilewise_causal_attention,
) -> TrainingResult:
    """Train one copy with ``attend`` and one with SDPA, up to the settings' steps or `ENOUGH` seconds.

    Calls ``advance`` after each step of both, with fractions whose sum is at most 1.
    """
    symbols, batches = read_batches(settings)
    ours = Run(symbols, settings, device, attend)
    theirs = Run(symbols, settings, device, sdpa_causal_attention)
    gradient_difference = math.nan
    begin, done = time.perf_counter(), 0.0
    for step, cpu_batch in enumerate(batches):
        spent = (time.perf_counter() - begin) / ENOUGH
        if step >= FEWEST_STEPS and spent > 1:
            break
        batch = cpu_batch.to(device)
        # The first run alternates, so that the order does not bias the times.
        for one in (ours, theirs) if step % 2 == 0 else (theirs, ours):
            one.step(batch[:, :-1], batch[:, 1:])
        if step == 0:
            pairs = zip(ours.gradients(), theirs.gradients(), strict=True)
            gradient_difference = worst(relative_difference(a, b) for a, b in pairs)
        now = max((step + 1) / settings.steps, min(spent, 0.999))
        advance(now - done)
        done = now
    return TrainingResult(
        settings=settings,
        symbols=symbols,
        tilewise_losses=ours.losses,
        sdpa_losses=theirs.losses,
        tilewise_seconds=Spread.of(ours.seconds),
        sdpa_seconds=Spread.of(theirs.seconds),
        gradient_difference=gradient_difference,
    )


def describe(result: TrainingResult) -> list[str]:
    """Return the printed summary, as lines."""
    s, steps = result.settings, len(result.sdpa_losses)
    return [
        f"A {s.layers}-layer character model, whose only notion of position is a trainable bias (1, {s.heads}, "
        f"{s.length}, {s.length}), learns Shakespeare's As You Like It: once through tilewise, once through SDPA.",
        f"Loss {result.tilewise_losses[0]:.3f} -> {result.tilewise_losses[-1]:.3f} nats a character in {steps} steps "
        f"(guessing: {math.log(result.symbols):.3f}).",
        f"A step takes tilewise {result.tilewise_seconds}, SDPA {result.sdpa_seconds}, the median and the range of the "
        f"middle half. Times as fast: {result.tilewise_seconds.beside(result.sdpa_seconds)}.",
    ]
