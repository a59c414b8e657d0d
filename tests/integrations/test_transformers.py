"""attn_implementation="tilewise" against transformers' own "eager" and "sdpa", on small random models of each kind."""

import copy
import logging

import pytest
import torch
import transformers
from memory_helpers import leftovers
from models import (
    DECODERS,
    GQA,
    KINDS,
    LARGE_HEADS,
    NO_LEFT_PADDING_IN_EAGER,
    NO_SDPA,
    SMALL,
    VOCAB,
    WINDOW,
    B,
    N,
    build,
    close,
    implementations,
    moderate,
    padding,
    real,
    run,
    tokens,
)
from pairwise import pairwise
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    sdpa_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from tilewise.integrations import transformers as integration


@pytest.mark.parametrize("kind", KINDS)
def test_no_tensor_outlives_a_step(kind):
    """No activation, and after ``del model`` no parameter and no gradient."""

    def step(c):
        model = build(kind, "tilewise").train()
        o = run(model, kind, padding("right"))
        o.square().sum().backward()
        c.made |= {name: x.detach() for name, x in model.named_parameters()}
        c.made |= {f"gradient of {name}": x.grad for name, x in model.named_parameters() if x.grad is not None}
        return o.detach()

    assert leftovers(step, 1, "cpu") == []


@pytest.mark.parametrize("side", [None, "right", "left"])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients(kind, side, calls):
    mask = padding(side)
    results = {}
    for implementation in ("tilewise", *implementations(kind)):
        model = build(kind, implementation).train()
        o = real(kind, mask, run(model, kind, mask))
        cotangent = torch.randn(o.shape, generator=torch.Generator().manual_seed(2))
        (o * cotangent).sum().backward()
        results[implementation] = o.detach(), {name: p.grad for name, p in model.named_parameters()}
    o, gradients = results.pop("tilewise")
    assert len(calls) == {"t5": 6, "gemma4 shared": 4}.get(kind, 2)
    assert any(g is not None and g.any() for g in gradients.values())
    for implementation, (expected, expected_gradients) in results.items():
        if implementation == "eager" and side == "left" and kind in NO_LEFT_PADDING_IN_EAGER:
            continue
        close(o, expected)
        # A gradient that is 0 in exact arithmetic (of a key bias) is the rounding of the others.
        floor = 1e-6 * max(g.abs().max().item() for g in expected_gradients.values() if g is not None)
        for name, g in expected_gradients.items():
            if g is None:
                assert gradients[name] is None
            else:
                close(gradients[name], g, floor)


def test_position_bias_is_trained(calls):
    model = build("t5", "tilewise")
    run(model, "t5", padding("right")).square().mean().backward()
    assert all(call["bias"].requires_grad == call["bias"].any().item() for call in calls)  # zeros across the stacks
    for stack in (model.encoder, model.decoder):
        assert stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight.grad.abs().max() > 1e-5


def test_sinks_are_trained(calls):
    """Those of gpt-oss, a logit for each head of each layer."""
    model = build("gpt_oss", "tilewise")
    run(model, "gpt_oss", None).square().mean().backward()
    for call, layer in zip(calls, model.model.layers, strict=True):
        assert call["sink"] is layer.self_attn.sinks
        assert (layer.self_attn.sinks.grad != 0).all()


@pytest.mark.parametrize("side", [None, "right"])
@pytest.mark.parametrize("kind", ["bert", "llama", "mistral", "gemma2", "gemma4", "gemma4 shared", "deepseek_v3", "t5"])
def test_no_square_mask(kind, side, calls):
    """Causality and windows stay numbers; padding is one row of keys."""
    run(build(kind, "tilewise"), kind, padding(side))
    for call in calls:
        assert call["mask"] is None if side is None else call["mask"].shape == (B, 1, 1, call["N"])
    causal = [call["causal"] for call in calls]
    assert causal == {"bert": [False] * 2, "t5": [False] * 2 + [True, False] * 2}.get(kind, [True] * len(calls))
    windows = [call["window"] for call in calls]
    window = (WINDOW - 1, 0)
    everything = None if side is None else (N - 1, 0)
    assert windows == {
        "mistral": [window] * 2, "gemma2": [None, window], "gemma4": [window, None],
        "gemma4 shared": [window, everything] * 2,
    }.get(kind, [None] * len(calls))  # fmt: skip


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", [*DECODERS, "t5"])
def test_generate(kind, cache, calls):
    """Greedy decoding past the window, from prompts padded on the left: the same tokens."""
    options = {"attention_mask": padding("left"), "max_new_tokens": 9, "do_sample": False, "disable_compile": True}
    if cache == "static":
        options["cache_implementation"] = "static"
    reference = "eager" if kind in {*NO_SDPA, *LARGE_HEADS} else "sdpa"
    ours, theirs = (build(kind, i).eval().generate(tokens(), **options) for i in ("tilewise", reference))
    assert len(calls) >= 2 * 9
    assert ours.tolist() == theirs.tolist()
    assert len(ours.unique()) > 3


@pytest.mark.parametrize("kind", LARGE_HEADS)
def test_generate_without_padding(kind, calls):
    """Their masks are short forms then, with cached keys too."""
    options = {"max_new_tokens": 9, "do_sample": False}
    ours, theirs = (build(kind, i).eval().generate(tokens(), **options) for i in ("tilewise", "eager"))
    assert all(call["mask"] is None for call in calls)
    assert any(call["M"] == 1 < call["N"] for call in calls)
    assert ours.tolist() == theirs.tolist()
    assert len(ours.unique()) > 3


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("keep", [1, 3])
def test_layers_that_crop_their_queries(keep, side, calls):
    """Those of Gemma 4 that share keys compute the last queries alone, as many as the model returns."""
    mask = padding(side)
    with torch.no_grad():
        ours, theirs = (
            run(build("gemma4 shared", i).eval(), "gemma4 shared", mask, logits_to_keep=keep)
            for i in ("tilewise", "eager")
        )
    assert [call["M"] for call in calls] == [N, N, keep, keep]
    assert ours.shape == (B, keep, VOCAB)
    seen = slice(1, None) if side == "right" else slice(None)  # the first row's last tokens are padding
    close(ours[seen], theirs[seen])


@pytest.mark.parametrize("bidirectional", [None, "vision"])
def test_gemma4_beside_its_encoders(bidirectional, calls):
    """The audio encoder computes its attention by itself. The tokens of an image may see each other in a window."""
    vision = SMALL | GQA | {"num_attention_heads": 2, "num_hidden_layers": 1}
    audio = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = KINDS["gemma4 shared"][2] | {"use_bidirectional_attention": bidirectional}
    config = transformers.Gemma4Config(text_config=text, vision_config=vision, audio_config=audio)
    of_images = torch.zeros(B, N, dtype=torch.long)
    of_images[:, 5:8] = 1
    inputs = {"attention_mask": padding("left"), "mm_token_type_ids": of_images}
    results = []
    for implementation in ("eager", {"text_config": "tilewise"}):
        model = transformers.Gemma4ForConditionalGeneration._from_config(config, attn_implementation=implementation)
        moderate(model.eval(), "gemma4")
        generated = model.generate(tokens(), **inputs, max_new_tokens=4, do_sample=False)
        results.append((real(None, inputs["attention_mask"], model(tokens(), **inputs).logits), generated))
    (theirs, their_tokens), (ours, our_tokens) = results
    assert len(calls) == 4 * 5
    close(ours, theirs)
    assert our_tokens.tolist() == their_tokens.tolist()


@pytest.mark.parametrize(
    ("kind", "side", "pieces"), pairwise(DECODERS, [None, "left"], [(8, 5), (3, 4, 6), (12, 1)]), ids=str
)
def test_a_prompt_in_pieces(kind, side, pieces, calls):
    """With a cache, M < N: what one forward gives for all positions, several give piece by piece."""
    model, mask = build(kind, "tilewise").eval(), padding(side)
    with torch.no_grad():
        whole = run(model, kind, mask)
        cache, outputs, begin = transformers.DynamicCache(config=model.config), [], 0
        for piece in pieces:
            end = begin + piece
            out = model(
                input_ids=tokens()[:, begin:end],
                attention_mask=None if mask is None else mask[:, :end],
                position_ids=torch.arange(begin, end)[None].expand(B, -1),
                past_key_values=cache,
                use_cache=True,
            )
            outputs.append(out.logits)
            begin = end
    assert any(call["M"] < call["N"] for call in calls)
    close(real(kind, mask, torch.cat(outputs, 1)), real(kind, mask, whole))


@pytest.mark.parametrize("shape", [(B, 1, N, N), (1, 1, N, N), (B, 1, 1, N), (B, 4, N, N)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_masks_of_the_users_own(kind, shape, dtype):
    """Four dimensions are the whole truth: neither causality nor the window is added to them."""
    seen = torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.5
    seen[..., 0] = True
    mask = seen if dtype == torch.bool else torch.zeros(shape).masked_fill(~seen, torch.finfo(dtype).min)
    close(*(run(build(kind, i), kind, mask) for i in ("tilewise", "sdpa")))


def test_packed_sequences():
    """Several sequences in one row, told by their positions."""
    positions = torch.cat([torch.arange(6), torch.arange(N - 6)])[None].expand(B, -1)
    for kind in ("llama", "mistral"):
        ours, theirs = (build(kind, i)(input_ids=tokens(), position_ids=positions).logits for i in ("tilewise", "sdpa"))
        close(ours, theirs)


def test_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        for kind in ("bert", "llama"):
            ours, theirs = (run(build(kind, i), kind, padding("right")) for i in ("tilewise", "sdpa"))
            error = (ours - theirs).float().square().mean() / theirs.float().square().mean()
            assert error < 1e-3


def test_autocast_of_a_rotary_model(monkeypatch):
    """Rotary embeddings leave queries and keys in float32 beside bfloat16 values (a cache would make them float32)."""
    dtypes = set()

    def spy(module, q, k, v, *rest, **options):
        dtypes.add((q.dtype, k.dtype, v.dtype))
        return integration.attention_forward(module, q, k, v, *rest, **options)

    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "tilewise", spy)
    results = {}
    for implementation in ("tilewise", "sdpa"):
        model = build("llama", implementation).train()
        with torch.autocast("cpu", torch.bfloat16):
            o = run(model, "llama", None, use_cache=False)
        o.float().square().mean().backward()
        results[implementation] = [o.detach(), *(p.grad for p in model.parameters())]
    assert dtypes == {(torch.float32, torch.float32, torch.bfloat16)}
    for ours, theirs in zip(*results.values(), strict=True):
        assert ours.dtype == theirs.dtype
        assert (ours - theirs).float().norm() < 0.05 * theirs.float().norm()


class Layer(torch.nn.Module):
    def __init__(self, is_causal):
        super().__init__()
        self.is_causal = is_causal


def both(layer_is_causal, q, k, v, mask=None, **options):
    """`attention_forward` and transformers' own for sdpa, of the same arguments."""
    sdpa = transformers.AttentionInterface()["sdpa"]
    (ours, weights), (theirs, _) = (f(Layer(layer_is_causal), q, k, v, mask, **options) for f in
                                    (integration.attention_forward, sdpa))  # fmt: skip
    assert weights is None
    assert ours.is_contiguous()
    assert ours.dtype == theirs.dtype
    return ours, theirs


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama", "t5"])
def test_output_attentions(kind, calls, monkeypatch):
    """The weights do not exist: as with transformers' sdpa, one warning, and nothing in their place."""
    transformers.utils.logging.warning_once.cache_clear()
    messages = {"transformers.tilewise": [], "transformers.integrations.sdpa_attention": []}
    for name, said in messages.items():
        monkeypatch.setattr(logging.getLogger(name), "warning", said.append)
    outputs = []
    for implementation in ("tilewise", "sdpa"):
        model = build(kind, implementation).eval()
        inputs = {"decoder_input_ids": tokens()} if kind == "t5" else {}
        outputs.append(model(tokens(), **inputs, output_attentions=True))
    ours, theirs = outputs
    close(ours[0], theirs[0])
    assert len(calls) == (6 if kind == "t5" else 2)
    assert ours.keys() == theirs.keys()
    names = [name for name in ours if "attentions" in name]
    assert names
    assert all(ours[name] == theirs[name] == () for name in names)
    ours, theirs = messages.values()
    assert len(ours) == len(theirs) == (kind != "gpt2")  # whose layers are not told
    assert all(m.startswith("output_attentions: ") and 'use attn_implementation="eager"' in m for m in ours)


def test_queries_of_batch_one_are_broadcast():
    q, k, v = torch.randn(1, 4, 3, 8), torch.randn(B, 4, 6, 8), torch.randn(B, 4, 6, 8)
    close(*both(False, q, k, v))


def test_autocast_of_one_layer():
    """Queries and keys may reach a layer in float32 where rotary embeddings or norms are."""
    q, k, v = torch.randn(B, 4, 3, 8), torch.randn(B, 2, 6, 8), torch.randn(B, 2, 6, 8).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = both(False, q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("form", ["none", "bool", "float"])
@pytest.mark.parametrize("is_causal", [True, False])
def test_position_bias_beside_a_mask(is_causal, form):
    torch.manual_seed(0)
    q, k, v, bias = torch.randn(B, 4, 6, 8), torch.randn(B, 4, 6, 8), torch.randn(B, 4, 6, 5), torch.randn(1, 4, 6, 6)
    mask = {"none": None, "bool": torch.rand(B, 1, 6, 6) < 0.7, "float": torch.randn(B, 1, 6, 6)}[form]
    if form == "bool":
        mask[..., 0] = True
    bias.requires_grad_()
    ours, theirs = both(is_causal, q, k, v, mask, position_bias=bias, scaling=0.5)
    close(ours, theirs)
    close(*(torch.autograd.grad(o.square().sum(), bias)[0] for o in (ours, theirs)))


@pytest.mark.parametrize("argument", [True, False, None])
@pytest.mark.parametrize("is_causal", [True, False])
def test_the_argument_comes_before_the_layers_own(is_causal, argument):
    x = torch.randn(B, 4, 6, 8)
    close(*both(is_causal, x, x, x, is_causal=argument))


def test_compiles_without_a_graph_break():
    torch._dynamo.reset()
    for kind, mask in (("llama", None), ("mistral", padding("left")), ("bert", padding("right"))):
        model = build(kind, "tilewise", num_hidden_layers=1).eval()
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        with torch.no_grad():
            ours = run(compiled, kind, mask)
            theirs = run(model, kind, mask)
            close(real(kind, mask, ours), real(kind, mask, theirs))


# The mask function by itself: each of its short forms, written out, is what transformers' own function says.


def written_out(mask, batch, M, N):
    """The pairs that `attention_forward` shows to a layer that is causal, as (batch, 1, M, N)."""
    distance = torch.arange(N)[None, :] - (torch.arange(M)[:, None] + N - M)
    causal = distance <= 0
    if mask is None:
        return causal.expand(batch, 1, M, N)
    if mask.dim() == 2:
        return causal & mask[:, None, None, :]
    if mask.dim() == 3:
        return (causal & (distance > -mask.shape[1]) & mask[:, None, :1, :]).expand(batch, 1, M, N)
    return mask.expand(batch, 1, M, N)


CAUSAL_PATTERNS = {
    "causal": (causal_mask_function, None, {}),
    "window": (sliding_window_causal_mask_function(WINDOW), WINDOW, {"sliding_window": WINDOW}),
    "wide window": (sliding_window_causal_mask_function(40), 40, {"sliding_window": 40}),
    "chunks": (chunked_causal_mask_function(WINDOW, torch.zeros(B, dtype=torch.int)), WINDOW,
               {"attention_chunk_size": WINDOW}),
    "chunks beside a window": (chunked_causal_mask_function(WINDOW, torch.zeros(B, dtype=torch.int)), WINDOW,
                               {"attention_chunk_size": WINDOW, "sliding_window": WINDOW}),
}  # fmt: skip


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("pattern", CAUSAL_PATTERNS)
def test_short_forms_say_what_the_full_mask_says(pattern, padded):
    function, size, fields = CAUSAL_PATTERNS[pattern]
    config = transformers.PreTrainedConfig()
    for name, value in fields.items():
        setattr(config, name, value)
    cropping = copy.copy(config)  # layers that crop the queries of a mask, see `test_layers_that_crop_their_queries`
    cropping.model_type, cropping.num_kv_shared_layers = "gemma4_text", 1
    short_forms = 0
    for M in (1, 2, 6, 13):
        for q_offset in (0, 3, 9):
            # all keys; a sliding cache; a static one, longer than what it holds
            for kv_offset, length in ((0, q_offset + M), (q_offset // 2, q_offset - q_offset // 2 + M), (0, 25)):
                attention_mask = None
                if padded:
                    attention_mask = torch.ones(B, q_offset + M, dtype=torch.bool)
                    attention_mask[0, : (q_offset + M) // 2] = False
                arguments = {
                    "batch_size": B, "q_length": M, "kv_length": length, "q_offset": q_offset, "kv_offset": kv_offset,
                    "mask_function": function, "attention_mask": attention_mask, "local_size": size,
                }  # fmt: skip
                ours = integration.attention_mask(**arguments, config=config, allow_is_causal_skip=True)
                theirs = sdpa_mask(**arguments, allow_is_causal_skip=False)
                assert torch.equal(written_out(ours, B, M, length), theirs)
                if ours is None or ours.dim() < 4:
                    short_forms += 1
                    assert ours is None or ours.untyped_storage().nbytes() <= B * (q_offset + M)
                if ours is not None and ours.dim() < 4:  # generate() or an outer model may hand it on
                    again = integration.attention_mask(**(arguments | {"attention_mask": ours}), config=config)
                    assert torch.equal(again, ours)
                full = integration.attention_mask(**arguments, config=config, allow_is_causal_skip=False)
                assert torch.equal(full, theirs)
                croppable = integration.attention_mask(**arguments, config=cropping)
                for last in (1, M):
                    cropped = None if croppable is None else croppable[:, :, -last:, :]
                    cropped = cropped[:, 0, 0] if cropped is not None and cropped.dim() == 5 else cropped
                    assert torch.equal(written_out(cropped, B, last, length), theirs[:, :, -last:])
                assert (croppable is None or croppable.dim() == 5) == (ours is None or ours.dim() < 4)
    # of 12 cases each with all keys and with a sliding cache; a padded sliding cache needs kv_offset == 0, or a window
    expected = {"causal": 24, "window": 24, "wide window": 24}
    assert short_forms >= expected.get(pattern, 0) * (0.6 if padded else 1)


@pytest.mark.parametrize("padded", [False, True])
def test_masks_without_causality(padded):
    attention_mask = padding("left").bool() if padded else None
    arguments = {"batch_size": B, "q_length": 4, "kv_length": N, "attention_mask": attention_mask,
                 "allow_is_causal_skip": False}  # fmt: skip
    short = integration.attention_mask(
        **arguments, mask_function=bidirectional_mask_function, allow_is_bidirectional_skip=True
    )
    assert torch.equal(short, attention_mask[:, None, None]) if padded else short is None
    for function in (
        bidirectional_mask_function,
        sliding_window_bidirectional_mask_function(2),
        and_masks(bidirectional_mask_function, lambda b, h, q, k: k != q),
    ):
        theirs = sdpa_mask(**arguments, mask_function=function)
        assert torch.equal(integration.attention_mask(**arguments, mask_function=function), theirs)


def test_static_offsets_are_not_read():
    """A static cache counts in a tensor; reading it would break a compiled graph."""
    mask = integration.attention_mask(batch_size=B, q_length=4, kv_length=4, q_offset=torch.tensor(0))
    assert mask.shape == (B, 1, 4, 4)


def test_an_answer_that_comes_back_is_kept():
    config = transformers.MistralConfig(sliding_window=WINDOW)
    arguments = {"batch_size": B, "q_length": N, "kv_length": N, "local_size": WINDOW, "config": config,
                 "mask_function": sliding_window_causal_mask_function(WINDOW)}  # fmt: skip
    for attention_mask in (None, padding("left").bool()):
        mask = integration.attention_mask(**arguments, attention_mask=attention_mask)
        assert mask.dim() == 3
        assert integration.attention_mask(**arguments, attention_mask=mask.contiguous()).equal(mask)


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_model_that_crops_its_mask(side, calls):
    """Pix2Struct's layers index the mask by four dimensions."""
    config = transformers.Pix2StructTextConfig(
        vocab_size=VOCAB, hidden_size=32, num_layers=2, num_heads=4, d_kv=8, d_ff=32, dropout_rate=0.0, pad_token_id=0
    )
    config.initializer_range = 0.02  # which its model reads, and its config does not have
    mask, outputs = padding(side), []
    for implementation in ("tilewise", "eager"):
        torch.manual_seed(0)
        model = transformers.Pix2StructTextModel._from_config(config, attn_implementation=implementation).eval()
        o = model(tokens(), attention_mask=mask, encoder_hidden_states=torch.ones(B, 5, 32)).logits
        outputs.append(o[mask.bool()])
    close(*outputs)
    assert len(calls) == 4


@pytest.mark.parametrize(
    ("kind", "option"),
    [("bert", "attention_probs_dropout_prob"), ("llama", "attention_dropout"), ("t5", "dropout_rate")],
)
def test_dropout(kind, option, calls):
    """In training mode a model hands it on, in eval mode 0; torch.manual_seed repeats it, and so does a checkpoint."""
    model = build(kind, "tilewise", **{option: 0.25})
    results = []
    for seed, mode in ((1, "train"), (1, "train"), (2, "train"), (1, "checkpoint"), (1, "eval"), (2, "eval")):
        if mode == "checkpoint":
            model.activation_checkpointing_enable()
        model.train(mode != "eval").zero_grad()
        calls.clear()
        torch.manual_seed(seed)
        o = run(model, kind, None)
        assert {call["dropout_p"] for call in calls} == {0.0 if mode == "eval" else 0.25}
        o.square().sum().backward()
        results.append([o, *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    first, again, other, recomputed, evaluated, unmoved = results
    torch.testing.assert_close(first, again)
    torch.testing.assert_close(first, recomputed)
    torch.testing.assert_close(evaluated, unmoved)
    assert not torch.allclose(first[0], other[0])
    assert not torch.allclose(first[0], evaluated[0])


def test_errors():
    with pytest.raises(ValueError, match=r"attention_mask: expected 2 or 4 dimensions, got shape \(2, 13, 13\)"):
        run(build("llama", "tilewise"), "llama", torch.ones(B, N, N, dtype=torch.bool))
    q = torch.randn(1, 2, 3, 4)
    for name in ("indices", "block_indices", "cache"):
        with pytest.raises(NotImplementedError, match=f"^{name}: .* is not implemented"):
            integration.attention_forward(torch.nn.Module(), q, q, q, None, **{name: torch.zeros(2)})
        integration.attention_forward(torch.nn.Module(), q, q, q, None, **{name: None})
