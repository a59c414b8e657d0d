"""Fine-tuning T5 on a play by T5's own task: stretches of the text are cut out, and the decoder says what they were.

    python examples/t5_finetune.py                              # a small T5 with random weights
    python examples/t5_finetune.py --model google/byt5-small    # a pretrained one of bytes, where it can be loaded
    python examples/t5_finetune.py --against eager              # transformers' own attention: the same losses

`use_bias_terms` has the model hand over its table of distance buckets (`tilewise.bias.t5_bias`), so that no bias of
queries and keys is made, and the table gets its gradient. Tokens are bytes, as ByT5 numbers them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from importlib.resources import files

import torch
from torch import Tensor
from transformers import PreTrainedModel, T5Config, T5ForConditionalGeneration

from tilewise.integrations.transformers import use_bias_terms

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


def train(given: argparse.Namespace, ours: bool) -> list[float]:
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
    losses, start = [], time.perf_counter()
    for step, (text, labels) in zip(range(given.steps), batches(given.length, given.batch), strict=False):
        loss = model(input_ids=text.to(given.device), labels=labels.to(given.device)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 10 == 0 or step == given.steps - 1:
            print(f"step {step + 1:4d}: loss {losses[-1]:.4f}")
    moved = (table_of(model) - before).abs().max().item()
    print(f"{model.config._attn_implementation}: {time.perf_counter() - start:.1f} s; the encoder's table of buckets "
          f"moved by up to {moved:.4f}")  # fmt: skip
    return losses


def main(arguments: Sequence[str] | None = None) -> dict[str, list[float]]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--length", type=int, default=256, help=f"bytes of a sequence, of which {SPANS * SPAN} are cut")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--model", help="a T5 of bytes to begin with; default: a small one with random weights")
    parser.add_argument("--against", choices=["eager"], help="also train by transformers' own attention")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args(arguments)
    losses = {"tilewise": train(given, ours=True)}
    if given.against:
        losses[given.against] = train(given, ours=False)
        most = max(abs(a - b) for a, b in zip(*losses.values(), strict=True))
        print(f"losses of tilewise and {given.against} differ by {most:.1e} at most")
    return losses


if __name__ == "__main__":
    main()
