"""Fine-tuning T5 on a play by T5's own task: stretches of the text are cut out, and the decoder says what they were.

    python examples/t5_finetune.py                              # beside transformers' own attention: equal losses
    python examples/t5_finetune.py --model google/byt5-small    # a pretrained T5 of bytes, where it can be loaded

`use_bias_terms` has the model hand over its table of distance buckets (`tilewise.bias.t5_bias`), so that no bias of
queries and keys is made, and the table gets its gradient. Tokens are bytes, as ByT5 numbers them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from importlib.resources import files
from itertools import islice

import torch
from torch import Tensor
from transformers import PreTrainedModel, T5Config, T5ForConditionalGeneration

from tilewise.integrations.transformers import use_bias_terms
from tilewise_tools.demo.example import NONE, Trial, parse, report, train

SPECIAL = 3  # ids below are padding, the end and unknown; byte b is SPECIAL + b
LAST_SENTINEL = 258  # the first stretch that is cut out, and downwards: ByT5's
SPANS, SPAN = 4, 10  # stretches of a sequence, and bytes of each


def new_model() -> T5ForConditionalGeneration:
    config = T5Config(
        vocab_size=384, d_model=64, d_kv=16, d_ff=256, num_layers=2, num_decoder_layers=2, num_heads=4,
        dropout_rate=0.0, decoder_start_token_id=0, feed_forward_proj="gated-gelu",
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def batches(length: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Sequences without their stretches, and these: each follows the sentinel that stands in its place."""
    text = torch.tensor(list(files("tilewise_tools.demo").joinpath("data/as_you_like_it.txt").read_bytes())) + SPECIAL
    draw = torch.Generator().manual_seed(0)
    sentinels = LAST_SENTINEL - torch.arange(SPANS)
    part = length // SPANS  # each has one stretch, so that all sequences come out equally long
    while True:
        given, wanted = [], []
        for start in torch.randint(len(text) - length, (size,), generator=draw).tolist():
            for i, at in enumerate(torch.randint(part - SPAN + 1, (SPANS,), generator=draw).tolist()):
                piece = text[start + i * part : start + (i + 1) * part]
                given += [piece[:at], sentinels[i : i + 1], piece[at + SPAN :]]
                wanted += [sentinels[i : i + 1], piece[at : at + SPAN]]
        yield torch.cat(given).view(size, -1), torch.cat(wanted).view(size, -1)


def table_of(model: PreTrainedModel) -> Tensor:
    return model.get_encoder().block[0].layer[0].SelfAttention.relative_attention_bias.weight


def run(given: argparse.Namespace, ours: bool) -> Trial:
    """The loss of each step, in nats for each byte."""
    torch.manual_seed(0)
    model = T5ForConditionalGeneration.from_pretrained(given.model, dropout_rate=0.0) if given.model else new_model()
    if ours:
        model = use_bias_terms(model)
    else:
        model.set_attn_implementation("eager")
    model.to(given.device).train()
    before = table_of(model).detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr)

    def loss_of(text: Tensor, labels: Tensor) -> Tensor:
        return model(input_ids=text, labels=labels).loss

    name = "tilewise" if ours else "eager"
    found = train(name, loss_of, optimizer, islice(batches(given.length, given.batch), given.steps), given.device)
    moved = (table_of(model) - before).abs().max().item()
    print(f"{name}: the encoder's table of buckets moved by up to {moved:.4f}")
    return found


def main(arguments: Sequence[str] | None = None) -> dict[str, list[float]]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--length", type=int, default=256, help=f"bytes of a sequence, of which {SPANS * SPAN} are cut")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--model", help="a T5 of bytes to begin with; default: a small one with random weights")
    given = parse(parser, arguments, "eager", dtypes=False)
    runs = [run(given, ours) for ours in (True, False)[: 1 if given.against == NONE else 2]]
    report(runs, given.output, "t5_finetune", "T5 fills in what was cut out", "nats a byte")
    return {found.name: found.losses for found in runs}


if __name__ == "__main__":
    main()
