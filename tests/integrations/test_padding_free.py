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


def trained(model, batch, use_cache=False):
    model.train().zero_grad()
    loss = model(**batch, use_cache=use_cache).loss
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
    (kind, how) for kind in ("llama", "mistral", "gemma2", "gpt_oss", "gemma4", "deepseek_v3")
    for how in ("keywords and positions", "keywords", "positions", "positions and cache", "positions and mask")
])  # fmt: skip
def test_losses_and_gradients_are_those_of_the_padded_batch(kind, how, rows):
    batch = flat(return_flash_attn_kwargs="keywords" in how)
    if how == "keywords":  # rotary positions then count from the row's start, which changes no difference of two
        del batch["position_ids"]
    if "mask" in how:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    model = build(kind, "tilewise")
    ours = trained(model, batch, use_cache="cache" in how)
    assert [x["lengths"].cu_q.tolist() for x in rows] == [[0, 9, 10, 14, 27]] * 2
    assert all(x["longest"] == (13, 13) and x["causal"] for x in rows)
    assert any(x["window"] is not None for x in rows) == (kind not in ("llama", "deepseek_v3"))
    same(ours, trained(model, padded()))
    reference = build(kind, "eager" if kind in NO_SDPA else "sdpa")
    same(ours, trained(reference, padded()))


@pytest.mark.parametrize("how", ["keywords", "keywords and positions", "positions", "positions and cache"])
def test_layers_that_share_keys(how):
    """Those of Gemma 4, whose mask has five dimensions; where transformers itself reads the positions, four."""
    batch = flat(return_flash_attn_kwargs="keywords" in how)
    if how == "keywords":
        del batch["position_ids"]
    kind = "gemma4 shared"
    ours = trained(build(kind, "tilewise"), batch, use_cache="cache" in how)
    same(ours, trained(build(kind, "eager"), padded()))


@pytest.mark.parametrize("use_cache", [False, True])
def test_layers_that_share_keys_refuse_the_last_queries_of_a_packed_batch(use_cache):
    batch = flat(return_flash_attn_kwargs=True)
    del batch["labels"]
    with pytest.raises(ValueError, match="logits_to_keep: expected 0 beside cu_seq_lens_q"):
        build("gemma4 shared", "tilewise")(**batch, logits_to_keep=2, use_cache=use_cache)


def test_several_rows_and_a_cache():
    """In several rows positions count where transformers itself looks at them, without a cache and a mask. Keywords
    count always."""
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


# Positions alone, (1, M) as flash_attention_2 reads them: beside a cache, a mask of ones, in encoders.

SEQUENCES = [torch.tensor([x["input_ids"]]) for x in features()]
ROW = torch.cat(SEQUENCES, 1)
ENCODERS = {"bert": 0, "roberta": 1}  # and what their positions begin at


def restarts(begin=0):
    return torch.cat([torch.arange(begin, begin + n) for n in LENGTHS])[None]


def result(model, **inputs):
    out = model(**inputs)
    return out.logits if "logits" in out else out.last_hidden_state


def one_by_one(model, begin=0):
    return torch.cat(
        [result(model, input_ids=x, position_ids=torch.arange(begin, begin + x.shape[1])[None]) for x in SEQUENCES], 1
    )


@pytest.mark.parametrize(("kind", "cache", "mask"), [
    *[(kind, cache, mask) for kind in ("llama", "mistral", "gpt2", "gpt_oss", "bert decoder")
      for cache, mask in ((True, False), (False, True), (True, True))],
    *[(kind, None, mask) for kind in ENCODERS for mask in (False, True)],
])  # fmt: skip
@torch.no_grad()
def test_each_sequence_sees_itself_alone(kind, cache, mask, rows):
    model, begin = build(kind, "tilewise").eval(), ENCODERS.get(kind, 0)
    inputs = {"input_ids": ROW, "position_ids": restarts(begin)}
    inputs |= {} if cache is None else {"use_cache": cache}
    inputs |= {"attention_mask": torch.ones_like(ROW)} if mask else {}
    ours = result(model, **inputs)
    assert [x["lengths"].cu_q.tolist() for x in rows] == [[0, 9, 10, 14, 27]] * 2
    close(ours, one_by_one(model, begin))


@pytest.fixture
def flash(monkeypatch):
    """Register transformers' own code for flash_attention_2, run by our functions; its name."""
    utils = pytest.importorskip("transformers.modeling_flash_attention_utils")
    from transformers.integrations import flash_attention
    from transformers.masking_utils import flash_attention_mask

    from tilewise.integrations import flash_attn

    def varlen(*tensors, max_seqlen_q, max_seqlen_k, **options):
        return flash_attn.flash_attn_varlen_func(
            *tensors, max_seqlen_q=int(max_seqlen_q), max_seqlen_k=int(max_seqlen_k), **options
        )

    process = utils._lazy_define_process_function(flash_attn.flash_attn_varlen_func)
    found = (flash_attn.flash_attn_func, varlen, None, utils._pad_input, utils._unpad_input), (process, dict)
    monkeypatch.setattr(utils, "lazy_import_flash_attention", lambda *_, **__: found)
    transformers.AttentionInterface.register("stand-in", flash_attention.flash_attention_forward)
    transformers.AttentionMaskInterface.register("stand-in", flash_attention_mask)
    yield "stand-in"
    del transformers.AttentionInterface._global_mapping["stand-in"]
    del transformers.AttentionMaskInterface._global_mapping["stand-in"]


POSITIONS = {
    "none": None,
    "one sequence": torch.arange(27),
    "from 5": torch.arange(5, 32),
    "restarts": restarts()[0],
    "restarts from 2": restarts(2)[0],
    "a gap": torch.cat([torch.arange(9), torch.arange(20, 38)]),
    "another begin": torch.cat([torch.arange(9), torch.arange(3, 12), torch.arange(9)]),
    "equal": torch.zeros(27, dtype=torch.long),
}


@pytest.mark.parametrize("kind", ["mistral", "bert"])
@torch.no_grad()
def test_as_flash_attention_2_reads_them(kind, flash):
    """With a cache, and beside every mask. The rows of padding, which it cuts out, do not count."""
    ours, theirs = (build(kind, name).eval() for name in ("tilewise", flash))
    at = torch.arange(27)
    for positions in POSITIONS.values():
        for seen in (None, at >= 0, at >= 4, at < 20):
            inputs = {"input_ids": ROW, "position_ids": None if positions is None else positions[None]}
            inputs |= {"attention_mask": None if seen is None else seen.long()[None]}
            inputs |= {} if kind == "bert" else {"use_cache": True}
            rows = slice(None) if seen is None else seen
            close(result(ours, **inputs)[0, rows], result(theirs, **inputs)[0, rows])


@torch.no_grad()
def test_a_row_that_begins_within_a_sequence(rows):
    """Where the first position is not the smallest, flash_attention_2 leaves the first rows unwritten."""
    model = build("llama", "tilewise").eval()
    positions = restarts()[:, 5:]
    ours = result(model, input_ids=ROW[:, 5:], position_ids=positions, use_cache=True)
    assert rows[0]["lengths"].cu_q.tolist() == [0, 4, 5, 9, 22]
    close(ours[:, 4:], one_by_one(model)[:, 9:])


@torch.no_grad()
def test_positions_are_read_once_a_forward(monkeypatch):
    """The first layer reads them for all; a change in place is seen, and what is found goes when they go."""
    seen = []
    offsets = packed._offsets
    monkeypatch.setattr(packed, "_offsets", lambda first: seen.append(first.shape) or offsets(first))
    model, positions = build("llama", "tilewise").eval(), restarts()
    one = result(model, input_ids=ROW, position_ids=positions, use_cache=True)
    assert len(seen) == 1
    positions.copy_(torch.arange(27))
    other = result(model, input_ids=ROW, position_ids=positions, use_cache=True)
    assert len(seen) == 2
    close(other, result(model, input_ids=ROW, use_cache=True))
    with torch.inference_mode():
        close(result(model, input_ids=ROW, position_ids=restarts(), use_cache=True), one)
    assert len(packed._found) == 1
    del positions
    assert not packed._found


@pytest.mark.parametrize("how", ["greedy", "padding", "pieces", "lookup", "assisted", "beams", "static"])
def test_generation_of_one_row(how, monkeypatch):
    """One sequence, whose positions go on from the cache: nothing is packed, and the tokens are those of eager."""
    monkeypatch.setattr(integration, "packed_attention", None)
    prompt = torch.cat([ROW[:, :9]] * 2, 1)
    options = {"max_new_tokens": 8, "do_sample": False, "disable_compile": True}
    if how == "padding":
        options["attention_mask"] = (torch.arange(18) >= 5).long()[None]
    options |= {
        "pieces": {"prefill_chunk_size": 5}, "lookup": {"prompt_lookup_num_tokens": 3}, "beams": {"num_beams": 3},
        "static": {"cache_implementation": "static"},
    }.get(how, {})  # fmt: skip
    found = []
    for name in ("tilewise", "eager"):
        model = build("mistral" if how == "greedy" else "llama", name).eval()
        assistant = {"assistant_model": build("llama", name).eval()} if how == "assisted" else {}
        found.append(model.generate(prompt, **options, **assistant).tolist())
    assert found[0] == found[1]


@pytest.mark.parametrize("form", ["none", "keys", "window", "encoder"])
def test_in_a_graph(form):
    """A graph cannot wait for the number of sequences: it gets a mask by tiles, of padding too, and has no break. The
    forms are those of a mask that is not read there."""
    torch._dynamo.reset()
    layer = torch.nn.Module()
    layer.is_causal = form != "encoder"
    gen = torch.Generator().manual_seed(6)
    q, k, v = (torch.randn(1, heads, 27, 8, generator=gen) for heads in (4, 2, 2))

    def attend(mask, positions):
        return integration.attention_forward(layer, q, k, v, mask, position_ids=positions)[0]

    def of(seen):
        forms = {"keys": seen, "window": seen[:, None].expand(1, 5, 27), "encoder": seen[:, None, None]}
        return forms.get(form)

    graph = torch.compile(attend, fullgraph=True, backend="aot_eager")
    full = torch.ones(1, 27, dtype=torch.bool)
    eager = torch.ones(1, 5, 1, dtype=torch.bool) if form == "window" else None
    expected = attend(eager, restarts())
    assert not torch.allclose(expected, attend(eager, None))
    close(graph(of(full), restarts()), expected)
    if form != "none":
        at = torch.arange(27)[None]
        padding = at >= 9
        for positions in (at, (at - 9).where(padding, 1)):
            close(graph(of(padding), positions)[:, 9:], attend(of(padding), None)[:, 9:])


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@torch.no_grad()
def test_in_a_trace():
    """A trace of torch.jit, whose sizes are tensors, gets a bool mask."""
    encoder = build("roberta", "tilewise", num_hidden_layers=1).eval().requires_grad_(False)
    inputs = {"input_ids": ROW, "position_ids": restarts(1), "attention_mask": torch.ones_like(ROW)}
    traced = torch.jit.trace(lambda *x: result(encoder, **dict(zip(inputs, x, strict=True))), tuple(inputs.values()))
    close(traced(*inputs.values()), one_by_one(encoder, 1))


@torch.no_grad()
def test_cross_attention_has_other_keys():
    """The positions of the decoder say nothing of them, though there may be as many."""
    changes = {"is_decoder": True, "add_cross_attention": True}
    ours, theirs = (build("roberta", name, **changes).eval() for name in ("tilewise", "eager"))
    inputs = {"input_ids": ROW, "position_ids": restarts(1), "encoder_hidden_states": torch.randn(1, 27, 32)}
    number = torch.arange(4).repeat_interleave(torch.tensor(LENGTHS))
    seen = (number[:, None] == number) & torch.ones(27, 27, dtype=torch.bool).tril()
    lowest = torch.finfo(torch.float32).min
    mask = torch.zeros(27, 27).masked_fill(~seen, lowest)[None, None]
    close(result(ours, **inputs), result(theirs, **inputs, attention_mask=mask))


# Beside other masks and biases.


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
