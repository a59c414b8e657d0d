"""Batches without padding: several sequences in one row, by the keywords of flash attention or by their positions."""

import pytest
import torch
import transformers
from models import NO_SDPA, VOCAB, build, close

from tilewise.integrations import packed
from tilewise.integrations import transformers as integration

LENGTHS = (9, 1, 4, 13)


def features():
    gen = torch.Generator().manual_seed(4)
    return [{"input_ids": torch.randint(3, VOCAB, (n,), generator=gen).tolist()} for n in LENGTHS]


def flat(**options):
    return transformers.DataCollatorWithFlattening(**options)(features())


def padded():
    n = max(LENGTHS)
    ids = torch.zeros(len(LENGTHS), n, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for b, x in enumerate(features()):
        m = len(x["input_ids"])
        ids[b, :m] = torch.tensor(x["input_ids"])
        mask[b, :m], labels[b, 1:m] = 1, ids[b, 1:m]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def trained(model, batch):
    model.train().zero_grad()
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same(ours, theirs):
    close(ours[0], theirs[0])
    floor = 1e-6 * max(g.abs().max().item() for g in theirs[1].values())
    for name, g in theirs[1].items():
        close(ours[1][name], g, floor)


@pytest.fixture
def rows(monkeypatch):
    """The packed calls; a mask of queries and keys is an error."""
    seen = []
    attention = integration.packed_attention

    def spy(q, k, v, lengths, longest, **options):
        seen.append(options | {"lengths": lengths, "longest": longest})
        return attention(q, k, v, lengths, longest, **options)

    def refuse(*arguments, **options):
        raise AssertionError("a mask of M x N")

    monkeypatch.setattr(integration, "packed_attention", spy)
    monkeypatch.setattr(integration, "sdpa_mask", refuse)
    monkeypatch.setattr(packed, "visible", refuse)
    return seen


@pytest.mark.parametrize(("kind", "how"), [
    (kind, how) for kind in ("llama", "mistral", "gemma2", "gpt_oss")
    for how in ("keywords and positions", "keywords", "positions")
    if (kind, how) != ("gpt_oss", "positions")  # transformers asks for its mask without its positions
])  # fmt: skip
def test_losses_and_gradients_are_those_of_the_padded_batch(kind, how, rows):
    batch = flat(return_flash_attn_kwargs="keywords" in how)
    if how == "keywords":  # rotary positions then count from the row's start, which changes no difference of two
        del batch["position_ids"]
    model = build(kind, "tilewise")
    ours = trained(model, batch)
    assert [x["lengths"].cu_q.tolist() for x in rows] == [[0, 9, 10, 14, 27]] * 2
    assert all(x["longest"] == (13, 13) and x["causal"] for x in rows)
    assert any(x["window"] is not None for x in rows) == (kind != "llama")
    same(ours, trained(model, padded()))
    reference = build(kind, "eager" if kind in NO_SDPA else "sdpa")
    same(ours, trained(reference, padded()))


def test_several_rows_and_a_cache():
    """Rows of a batch are told apart too. Positions count without a cache only, as transformers has it; keywords do
    always."""
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None].expand(2, -1)
    ids = flat()["input_ids"].expand(2, -1).clone()
    ids[1] = ids[1].flip(0)
    model = build("llama", "tilewise")
    ours, theirs = (
        build("llama", i)(input_ids=ids, position_ids=positions, use_cache=False).logits for i in ("tilewise", "sdpa")
    )
    close(ours, theirs)
    batch = flat(return_flash_attn_kwargs=True)
    alone = model(**batch, use_cache=False).logits
    close(model(**batch, use_cache=True).logits, alone)
    close(ours[:1], alone)


@pytest.mark.parametrize("mask", ["padding", "bool", "float"])
def test_keywords_beside_a_mask_are_both(mask):
    batch = flat(return_flash_attn_kwargs=True)
    expected = build("llama", "tilewise")(**batch, use_cache=False).logits
    n = sum(LENGTHS)
    if mask == "padding":  # the last token, which the others do not see, is hidden
        batch["attention_mask"] = (torch.arange(n) < n - 1).long()[None]
    else:
        seen = torch.ones(1, 1, n, n, dtype=torch.bool).tril()
        lowest = torch.finfo(torch.float32).min
        batch["attention_mask"] = seen if mask == "bool" else torch.zeros(seen.shape).masked_fill(~seen, lowest)
    ours = build("llama", "tilewise")(**batch, use_cache=False).logits
    close(ours[:, : n - 1], expected[:, : n - 1])


def test_beside_a_position_bias(monkeypatch):
    """Which has a number for each query and key of a row."""
    module = torch.nn.Module()
    module.is_causal = True
    gen = torch.Generator().manual_seed(5)
    q, k, v, bias = (torch.randn(s, generator=gen) for s in ((1, 4, 5, 8), (1, 2, 5, 8), (1, 2, 5, 8), (1, 4, 5, 5)))
    cu = torch.tensor([0, 2, 5], dtype=torch.int32)
    keywords = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": torch.tensor(3), "max_length_k": 3}
    for mask, window in ((None, None), (cu[None].expand(3, -1), None), (cu[None, None].expand(2, 3, -1), 2)):
        o, _ = integration.attention_forward(module, q, k, v, mask, position_bias=bias, **keywords)
        for part in (slice(0, 2), slice(2, 5)):
            x, y, z = (t[:, :, part] for t in (q, k, v))
            options = {"causal": True, "window": None if window is None else (window - 1, 0)}
            expected = integration.attention(x, y, z, bias=bias[:, :, part, part], **options)
            torch.testing.assert_close(o[:, part], expected.transpose(1, 2))


def test_other_patterns_keep_a_mask_of_their_own():
    """Chunks, which positions tell apart too."""
    batch = flat()
    ours, theirs = (build("llama4", i)(**batch, use_cache=False).logits for i in ("tilewise", "sdpa"))
    close(ours, theirs)
