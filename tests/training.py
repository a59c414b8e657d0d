"""A small transformer with a trainable pair bias that learns a play: the demo's, through an attention of choice."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from tilewise import attention, explain
from tilewise_tools.demo import training
from tilewise_tools.demo.comparison import Attend

# 200 characters are two tiles of keys and four of queries, the last of each not full, of heads of 32 dimensions.
SETTINGS = training.TrainingSettings(
    steps=300, length=200, batch=2, layers=2, heads=2, width=64, learning_rate=0.05, warmup=60
)

# A bias moves by its gradient times the square of this, about as far as other parameters do, so that an error in dBias
# shows. With twice this, or this learning rate, 300 steps amplify rounding.
GAIN = 8.0


class SharedBiasModel(training.CharacterModel):
    """All sequences have the demo's bias of distances, (1, H, S, S)."""

    def __init__(self, symbols: int, settings: training.TrainingSettings, attend: Attend) -> None:
        super().__init__(symbols, settings, attend)
        with torch.no_grad():
            self.bias_table.weight /= GAIN

    def bias(self, characters: Tensor) -> Tensor:
        return GAIN * super().bias(characters)


class PairBiasModel(SharedBiasModel):
    """Its bias also depends on the two characters that a pair is of: each sequence has one, (B, H, S, S)."""

    def __init__(self, symbols: int, settings: training.TrainingSettings, attend: Attend) -> None:
        super().__init__(symbols, settings, attend)
        self.pair_table = nn.Embedding(symbols * symbols, settings.heads)
        nn.init.zeros_(self.pair_table.weight)

    def bias(self, characters: Tensor) -> Tensor:
        pairs = characters[:, :, None] * self.embedding.num_embeddings + characters[:, None, :]
        return (super().bias(characters) + GAIN * self.pair_table(pairs).permute(0, 3, 1, 2)).contiguous()


MODELS = {"shared": SharedBiasModel, "each": PairBiasModel}


def through(backend: str, dtype: torch.dtype = torch.float32) -> Attend:
    """A backend's attention in ``dtype``, of a model in float32; its gradients must be its own."""

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        q, k, v, bias = (x.to(dtype) for x in (q, k, v, bias))
        assert explain(q, k, v, bias=bias, causal=True, backend=backend).plan.backward == backend
        return attention(q, k, v, bias=bias, causal=True, backend=backend).float()

    return attend


def unfused(dtype: torch.dtype) -> Attend:
    """The same in plain torch."""

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        q, k, v, bias = (x.to(dtype) for x in (q, k, v, bias))
        future = torch.ones(bias.shape[-2:], dtype=torch.bool, device=bias.device).triu(1)
        s = q @ k.mT / math.sqrt(q.shape[-1]) + bias
        return (s.masked_fill(future, -torch.inf).softmax(-1) @ v).float()

    return attend


def losses(kind: str, attend: Attend, steps: int = SETTINGS.steps, device: str = "cpu") -> Tensor:
    """Of each step, nats a character, float64."""
    symbols, batches = training.read_batches(SETTINGS)
    run = training.Run(symbols, SETTINGS, torch.device(device), attend, MODELS[kind])
    for _, batch in zip(range(steps), batches, strict=False):
        batch = batch.to(device)
        run.step(batch[:, :-1], batch[:, 1:])
    return torch.tensor(run.losses, dtype=torch.float64)
