"""`use_bias_terms`: models against their own eager attention, and without tensors of queries and keys."""

import copy

import pytest
import torch
import transformers
from models import BIAS_KINDS, T5_KINDS, B, N, build, close, padding, real, run, tokens
from torch.utils._python_dispatch import TorchDispatchMode

from tilewise.backends.cpu import tiled
from tilewise.bias import Alibi, RelativeBias, T5Bias
from tilewise.bias.canonical import dense
from tilewise.integrations import transformers as integration
from tilewise.integrations.position_bias import RelativeLogits, TableBias

DECODERS = ["inkling", "inkling2", "mpt", "bloom"]
# The eager attention of others is float32 within.
DOUBLE = {kind: torch.float64 for kind in BIAS_KINDS if kind in T5_KINDS or "deberta" in kind}


def terms(kind, **changes):
    return integration.use_bias_terms(build(kind, "eager", **changes))


def trained(model, kind, mask, **inputs):
    o = real(kind, mask, run(model, kind, mask, **inputs))
    cotangent = torch.randn(o.shape, dtype=o.dtype, generator=torch.Generator().manual_seed(2))
    (o * cotangent).sum().backward()
    return o.detach(), {name: p.grad for name, p in model.named_parameters()}


def agree(ours, theirs):
    """Outputs, and the gradient of every parameter; one that is 0 in exact arithmetic is the rounding of the others."""
    assert ours[0].dtype == theirs[0].dtype
    rtol = 1e-5 if ours[0].dtype == torch.float64 else 1e-4  # norms and scales are float32 in all models
    close(ours[0], theirs[0], rtol=rtol)
    floor = rtol / 100 * max(g.abs().max().item() for g in theirs[1].values() if g is not None)
    assert ours[1].keys() == theirs[1].keys()
    for name, g in theirs[1].items():
        if g is None:
            assert ours[1][name] is None
        else:
            close(ours[1][name], g, floor, rtol)


@pytest.mark.parametrize("side", [None, "right", "left"])
@pytest.mark.parametrize("kind", BIAS_KINDS)
def test_outputs_and_gradients(kind, side, calls):
    mask = padding(side)
    ours, theirs = (model.to(DOUBLE.get(kind, torch.float32)) for model in (terms(kind), build(kind, "eager")))
    agree(trained(ours.train(), kind, mask), trained(theirs.train(), kind, mask))
    assert len(calls) == (6 if kind in T5_KINDS else 2)


LONG = 211


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that an operation returns, counted in its storage."""

    def __init__(self):
        super().__init__()
        self.elements, self.by = 0, None

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        results = operation(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(results):
            if isinstance(x, torch.Tensor):
                elements = x.untyped_storage().nbytes() // x.element_size()
                if elements > self.elements:
                    self.elements, self.by = elements, (operation, tuple(x.shape))
        return results


@pytest.mark.parametrize("kind", [kind for kind in BIAS_KINDS if kind not in ("pop2piano", "switch")])
def test_no_tensor_of_queries_and_keys(kind, monkeypatch):
    """Not for one head and one batch element, neither in the model nor below, neither forward nor backward."""
    monkeypatch.setattr(tiled, "MAX_BLOCK_M", 64)
    monkeypatch.setattr(tiled, "BLOCK_N", 64)
    x = torch.randint(3, 48, (1, LONG), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(x)
    mask[:, :5] = 0
    inputs = {"input_ids": x, "attention_mask": mask}
    if kind in T5_KINDS:
        inputs |= {"decoder_input_ids": x, "decoder_attention_mask": mask}
    largest = {}
    for implementation in ("tilewise", "eager"):
        model = terms(kind) if implementation == "tilewise" else build(kind, implementation)
        with Largest() as mode:
            model(**inputs)[0].square().mean().backward()
        largest[implementation] = mode
    assert largest["tilewise"].elements < LONG * LONG, largest["tilewise"].by
    assert largest["eager"].elements >= 4 * LONG * LONG


def test_what_reaches_tilewise(calls):
    """Terms; on masks, what the model pads with."""
    for kind, expected in {
        "t5": [T5Bias] * 2 + [T5Bias, tuple] * 2,
        "umt5": [T5Bias] * 2 + [T5Bias, type(None)] * 2,
        "inkling": [RelativeBias] * 2,
        "inkling2": [RelativeBias] * 2,
        "mpt": [Alibi] * 2,
        "deberta": [tuple] * 2,
        "mpnet": [T5Bias] * 2,
    }.items():
        calls.clear()
        run(terms(kind), kind, padding("right"))
        assert [type(call["bias"]) for call in calls] == expected
        assert all(call["mask"].shape == (B, 1, 1, call["N"]) for call in calls)
        if kind == "deberta":
            assert [x.on for x in calls[0]["bias"]] == ["query", "key"]
        calls.clear()
        run(terms(kind), kind, None)
        assert all(call["mask"] is None for call in calls)


@pytest.mark.parametrize("kind", ["inkling", "inkling2"])
def test_attn_implementation_alone(kind, calls):
    """Without `use_bias_terms` the model's own tensor goes in; and the sinks of Inkling-2, of each query."""
    ours, theirs = build(kind, "tilewise"), build(kind, "eager")
    agree(trained(ours, kind, None), trained(theirs, kind, None))
    assert all(call["bias"].shape == (B, 4, N, N) for call in calls)
    assert all((call["sink"] is None) == (kind == "inkling") for call in calls)


def steps(model, cache, pieces, mask, **inputs):
    outputs, begin = [], 0
    for piece in pieces:
        end = begin + piece
        key = "decoder_input_ids" if "encoder_outputs" in inputs else "input_ids"
        masks = {} if mask is None else {key.replace("input_ids", "attention_mask"): mask[:, :end]}
        out = model(**{key: tokens()[:, begin:end]}, **masks, past_key_values=cache, use_cache=True, **inputs)
        outputs.append(out.logits)
        begin = end
    return torch.cat(outputs, 1)


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_a_cache_by_either_name(name):
    """transformers 5.24 passes it to the attention as ``cache``: taken for an option, it would be lost."""
    cache = transformers.DynamicCache()
    mpt = terms("mpt").transformer.blocks[0].attn
    for length in (3, 2):
        x = torch.zeros(B, length, mpt.Wqkv.in_features)
        assert mpt(x, torch.ones(mpt.n_heads), **{name: cache})[0].shape == x.shape
    assert cache.get_seq_length() == 5


@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("kind", DECODERS)
def test_decoding_with_a_cache(kind, side, calls):
    """Piece by piece, a token at a time at the end, past windows and the extent of the bias: as the whole at once."""
    model, mask = terms(kind).eval(), padding(side)
    with torch.no_grad():
        whole = run(build(kind, "eager").eval(), kind, mask)
        cache = transformers.DynamicCache(config=model.config)
        pieces = steps(model, cache, [4, 5, 1, 1, 1, 1], mask)
    assert {call["M"] for call in calls} == {1, 4, 5}
    close(real(kind, mask, pieces), real(kind, mask, whole))


@pytest.mark.parametrize("kind", T5_KINDS)
def test_decoding_of_t5_with_a_cache(kind, calls):
    model, theirs = terms(kind).eval(), build(kind, "eager").eval()
    mask = padding("right")
    with torch.no_grad():
        whole = theirs(input_ids=tokens(), attention_mask=mask, decoder_input_ids=tokens()).logits
        encoded = model.get_encoder()(input_ids=tokens(), attention_mask=mask)
        cache = transformers.EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache())
        pieces = steps(model, cache, [4, 5, 1, 1, 1, 1], None, encoder_outputs=encoded, attention_mask=mask)
    close(pieces, whole)


@pytest.mark.parametrize("kind", ["t5", "umt5", *DECODERS])
def test_static_caches(kind, calls):
    """Longer than what they hold; positions count in tensors, and the mask tells what is there."""
    options = {"attention_mask": padding("left"), "max_new_tokens": 9, "do_sample": False, "disable_compile": True,
               "cache_implementation": "static"}  # fmt: skip
    # transformers' own Inkling does not run with a static cache where a layer has a window.
    changes = {"layer_types": ["hybrid", "hybrid"]} if "inkling" in kind else {}
    models = terms(kind, **changes), build(kind, "eager", **changes)
    ours, theirs = (model.eval().generate(tokens(), **options) for model in models)
    assert len(calls) >= 2 * 9
    assert ours.tolist() == theirs.tolist()
    assert len(ours.unique()) > 3


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize("kind", ["t5", "inkling", "bloom"])
def test_masks_of_the_users_own(kind, dtype):
    """Four dimensions beside a term; for the encoder of T5."""
    seen = torch.rand(B, 1, N, N, generator=torch.Generator().manual_seed(3)) < 0.5
    seen[..., 0] = True
    floating = torch.zeros(B, 1, N, N).masked_fill(~seen, torch.finfo(torch.float32).min)
    results = []
    for model, mask in ((terms(kind), seen if dtype == torch.bool else floating), (build(kind, "eager"), floating)):
        if kind == "inkling":
            mask = {"full_attention": mask, "sliding_attention": mask, "linear_attention": None}
        if kind == "bloom":  # which makes its ALiBi of two dimensions
            layer = model.transformer.h[0].self_attention
            x = torch.randn(B, N, 48, generator=torch.Generator().manual_seed(4))
            bias = torch.randn(B * 6, 1, N, generator=torch.Generator().manual_seed(5))
            results.append(layer(x, x, bias, mask)[0])
        elif kind == "t5":
            results.append(model.encoder(input_ids=tokens(), attention_mask=mask).last_hidden_state)
        else:
            results.append(model(input_ids=tokens(), attention_mask=mask).logits)
    close(*results)


@pytest.mark.parametrize("kind", ["t5", "inkling", "mpt", "deberta"])
def test_gradient_checkpointing(kind):
    results = []
    for checkpoints in (True, False):
        model = terms(kind).train()
        if checkpoints:
            model.activation_checkpointing_enable()
        results.append(trained(model, kind, padding("right"), **({} if kind == "deberta" else {"use_cache": False})))
    agree(*results)


def with_reentrant_checkpoints(kind, checkpoints):
    model = terms(kind).train()
    if checkpoints:
        model.activation_checkpointing_enable({"use_reentrant": True})
    embeddings = model.shared(tokens())
    return model, model(inputs_embeds=embeddings, decoder_inputs_embeds=embeddings, use_cache=False).logits


def test_checkpoints_that_would_lose_a_gradient():
    """T5's later layers use the table of the first; UMT5's have their own."""
    with pytest.raises(ValueError, match=r"position_bias: it was made without gradients .* use_reentrant=True"):
        with_reentrant_checkpoints("t5", True)[1].sum().backward()
    results = []
    for checkpoints in (True, False):
        model, o = with_reentrant_checkpoints("umt5", checkpoints)
        o.square().mean().backward()
        results.append((o.detach(), {name: p.grad for name, p in model.named_parameters()}))
    agree(*results)


def test_a_table_goes_along_to_other_devices():
    embedding, start = torch.nn.Embedding(32, 4), torch.tensor(3)
    bias = TableBias(embedding, torch.device("cpu"), 32, True, 128, start)
    here, there = (bias.bias(torch.device(device), True) for device in ("cpu", "meta"))
    assert here.table.device.type == here.query_start.device.type == "cpu"
    assert there.table.device.type == there.query_start.device.type == "meta"


def test_a_table_stays_what_it_is():
    """Of half precision float32, where the gradients of all layers are added up; with its settings elsewhere too."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        embedding = torch.nn.Embedding(32, 4, dtype=dtype)
        bias = TableBias(embedding, torch.device("cpu"), 32, False, 20, None)
        assert bias.term.table.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        for device in ("cpu", "meta"):
            term = bias.bias(torch.device(device), True)
            assert (term.bidirectional, term.max_distance, term.query_start) == (False, 20, None)


def test_relative_logits_of_positions_that_count_from_anywhere():
    states, proj = torch.randn(1, 2, 3, 4), torch.randn(4, 5)
    queries, keys = torch.arange(9, 12), torch.arange(6, 14)
    found = dense(RelativeLogits(states, proj, queries, keys).bias(states.device, False), 1, 2, 3, 8)
    back = queries[:, None] - keys
    values = (states @ proj).double().gather(-1, back.clamp(0, 4).expand(1, 2, 3, 8))
    torch.testing.assert_close(found, torch.where((back >= 0) & (back < 5), values, 0.0))


def test_relative_logits_are_scaled_in_float32():
    states, factor = torch.randn(1, 2, 3, 64, dtype=torch.bfloat16), 1 + torch.rand(1, 1, 3, 1)
    logits = RelativeLogits(states, torch.randn(64, 5).bfloat16(), torch.arange(3), torch.arange(3))
    scaled = (logits.float() * factor).to(torch.bfloat16)
    assert torch.equal(scaled.states, (states.float() * factor).bfloat16())
    assert scaled.proj is logits.proj


def test_tables_of_half_precision():
    """The sums that are a table's gradient are float32: nearer to float64's than the model's own."""
    results = {}
    for name, dtype in (("tilewise", torch.bfloat16), ("eager", torch.bfloat16), ("reference", torch.float64)):
        model = (terms("t5") if name == "tilewise" else build("t5", "eager")).to(torch.bfloat16).to(dtype)
        x = torch.randint(3, 48, (1, 200), generator=torch.Generator().manual_seed(1))
        model.encoder(input_ids=x).last_hidden_state.double().square().sum().backward()
        results[name] = model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.grad.double()
    reference = results.pop("reference")
    ours, theirs = ((x - reference).norm() / reference.norm() for x in results.values())
    assert ours < theirs


def test_autocast():
    for kind in ("t5", "inkling", "inkling2", "deberta"):
        with torch.autocast("cpu", torch.bfloat16):
            ours, theirs = (run(model.eval(), kind, None) for model in (terms(kind), build(kind, "eager")))
        assert ours.dtype == theirs.dtype
        assert (ours - theirs).float().square().mean() < 2e-2 * theirs.float().square().mean()


@pytest.mark.parametrize("kind", ["t5", "inkling", "mpt", "bloom", "deberta"])
def test_the_models_own_code_comes_back(kind, calls):
    theirs = build(kind, "eager").eval()
    model = integration.use_bias_terms(integration.use_bias_terms(copy.deepcopy(theirs)))
    assert model.state_dict().keys() == theirs.state_dict().keys()
    run(model, kind, padding("right"))
    assert len(calls) == (6 if kind == "t5" else 2)
    model.config._attn_implementation = "eager"
    if kind in ("t5", "inkling"):
        model.set_attn_implementation("tilewise")
        model.set_attn_implementation("eager")
    assert torch.equal(run(model, kind, padding("right")), run(theirs, kind, padding("right")))
    assert len(calls) == (6 if kind == "t5" else 2)


@pytest.mark.parametrize("kind", ["t5", "inkling", "mpt", "deberta"])
def test_copies_are_independent(kind):
    """A copy of the model uses its own parameters."""
    model = terms(kind).eval()
    other = copy.deepcopy(model)
    expected = run(model, kind, None)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert torch.equal(run(other, kind, None), expected)


def test_hooks_of_accelerate_are_kept():
    """accelerate puts a method of its own on the instance, and calls the one it found by `_old_forward`."""
    model, seen = build("inkling", "eager").eval(), []
    for layer in model.model.layers:
        module = layer.self_attn.rel_logits_proj
        module._old_forward = module.forward

        def hooked(*args, module=module):
            seen.append(module)
            return module._old_forward(*args)

        module.forward = hooked
    theirs = run(build("inkling", "eager").eval(), "inkling", None)
    close(run(integration.use_bias_terms(model), "inkling", None), theirs)
    assert len(seen) == 2


@pytest.mark.parametrize("kind", ["umt5", "mpt", "bloom", "deberta"])
def test_dropout_of_the_attention_is_passed_on(kind, monkeypatch):
    """In training mode alone; these call tilewise by code that is not transformers'."""
    seen = []

    def spy(*args, dropout=0.0, **options):
        seen.append(dropout)
        return integration.attention_forward(*args, **options)

    changes = {
        "umt5": {"dropout_rate": 0.25},
        "mpt": {"attn_config": {"attn_pdrop": 1}},
        "bloom": {"attention_dropout": 0.25},
        "deberta": {"attention_probs_dropout_prob": 0.25},
    }[kind]
    model = terms(kind, **changes)
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "tilewise", spy)
    run(model.train(), kind, None)
    assert set(seen) == {1 if kind == "mpt" else 0.25}
    seen.clear()
    run(model.eval(), kind, None)
    assert set(seen) == {0.0}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("mpt", {"attn_config": {"alibi_bias_max": 3, "clip_qkv": 0.7, "softmax_scale": 0.6}}),
        ("t5", {"relative_attention_num_buckets": 10, "relative_attention_max_distance": 6}),
        ("umt5", {"relative_attention_num_buckets": 10, "relative_attention_max_distance": 6}),
        ("deberta", {"share_att_key": False, "pos_att_type": ["p2c"]}),
    ],
)
def test_settings_that_small_models_leave_at_their_defaults(kind, changes):
    results = []
    for model in (terms(kind, **changes), build(kind, "eager", **changes)):
        results.append(trained(model.train().to(DOUBLE.get(kind, torch.float32)), kind, None))
    agree(*results)


@pytest.mark.parametrize(
    ("kind", "changes"), [("bloom", {"hidden_dropout": 0.25}), ("deberta", {"hidden_dropout_prob": 0.25})]
)
def test_dropout_beside_the_attention(kind, changes):
    """Of the output, and of embeddings of distances: drawn in the model's own order."""
    results = []
    for model in (terms(kind, **changes), build(kind, "eager", **changes)):
        torch.manual_seed(3)
        results.append(trained(model.train().to(DOUBLE.get(kind, torch.float32)), kind, None))
    agree(*results)


def test_queries_of_their_own_in_deberta():
    results = []
    x, queries = torch.randn(2, B, N, 32)
    for model in (terms("deberta"), build("deberta", "eager")):
        encoder = model.eval().encoder
        mask, relative_pos = encoder.get_attention_mask(torch.ones(B, N)), encoder.get_rel_pos(x)
        attention = encoder.layer[0].attention.self
        inputs = {"query_states": queries, "relative_pos": relative_pos, "rel_embeddings": encoder.get_rel_embedding()}
        results.append(attention(x, mask, **inputs)[0])
    close(*results)


COMPILED = {
    "t5": lambda model: model.encoder.block[0].layer[0],
    "inkling": lambda model: model.model.layers[1].self_attn,
    "mpt": lambda model: model.transformer.blocks[0].attn,
    "deberta": lambda model: model.encoder.layer[0].attention,
}


@pytest.mark.parametrize("kind", COMPILED)
def test_attention_compiles_without_a_graph_break(kind):
    torch._dynamo.reset()
    model = terms(kind).eval()  # Inkling's second layer multiplies its bias by a factor of each query
    layer, x = COMPILED[kind](model), torch.randn(B, N, 48 if kind == "mpt" else 32)
    inputs = {"attention_mask": None}
    if kind == "mpt":
        inputs["position_bias"] = model.transformer.build_mpt_alibi_tensor(6, N)
    if kind == "deberta":
        inputs |= {"relative_pos": model.encoder.get_rel_pos(x)}
        inputs |= {"rel_embeddings": model.encoder.get_rel_embedding().detach()}
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    with torch.no_grad():
        close(compiled(x, **inputs)[0], layer(x, **inputs)[0])


@pytest.mark.parametrize(
    "name",
    [
        "InklingForConditionalGeneration", "Inkling2ForConditionalGeneration", "T5EncoderModel",
        "MusicgenForConditionalGeneration", "BloomForSequenceClassification", "MptForSequenceClassification",
        "DebertaV2ForMaskedLM", "MPNetForMaskedLM",
    ],
)  # fmt: skip
def test_models_around_those_that_are_known(name):
    """Every submodel runs by "tilewise"; made without memory."""
    cls = getattr(transformers, name)
    with torch.device("meta"):
        model = integration.use_bias_terms(cls(cls.config_class()))
    models = [module for module in model.modules() if isinstance(module, transformers.PreTrainedModel)]
    assert {module.config._attn_implementation for module in models} == {"tilewise"}


@pytest.mark.parametrize("name", ["DebertaModel", "FalconModel", "LongT5Model", "UdopModel"])
def test_models_that_are_not_known(name):
    cls = getattr(transformers, name)
    with torch.device("meta"):
        model = cls(cls.config_class())
    with pytest.raises(ValueError, match=f"model: no part of {name} has a position bias that is known here"):
        integration.use_bias_terms(model)


def test_refusals():
    with pytest.raises(TypeError, match="model: expected a PreTrainedModel of transformers, got Linear"):
        integration.use_bias_terms(torch.nn.Linear(1, 1))
    model = build("bert", "eager")
    with pytest.raises(
        ValueError, match="model: no part of BertModel has a position bias that is known here; known are those of Bloom"
    ):
        integration.use_bias_terms(model)
    assert model.config._attn_implementation == "eager"
    with pytest.raises(ValueError, match="slow_but_exact: a Bloom that"):
        terms("bloom", slow_but_exact=True, pretraining_tp=2)
    with pytest.raises(ValueError, match=r"MptModel makes a mask of four dimensions bool, got torch\.float32"):
        run(terms("mpt"), "mpt", torch.zeros(B, 1, N, N))
    encoder, x = terms("deberta").encoder, torch.randn(B, N, 32)
    with pytest.raises(ValueError, match="relative_pos: distances of the user's own are not taken"):
        encoder(x, torch.ones(B, N), relative_pos=torch.zeros(1, N, N, dtype=torch.long))
    model = build("mpt", "eager")
    model.transformer.blocks[1].attn.forward = lambda *args, **kwargs: None
    with pytest.raises(ValueError, match=r"model: MptAttention\.forward of an instance has been replaced already"):
        integration.use_bias_terms(model)
    assert model.config._attn_implementation == "eager"
    q = torch.randn(1, 2, 3, 4)
    for options in ({"sinks": torch.zeros(1, 2, 3)}, {"sinks": torch.zeros(1, 2, 3, 1), "s_aux": torch.zeros(2)}):
        with pytest.raises(ValueError, match=r"sinks: expected \(B, H, M, 1\) and no s_aux, got \(1, 2, 3"):
            integration.attention_forward(torch.nn.Module(), q, q, q, None, **options)
