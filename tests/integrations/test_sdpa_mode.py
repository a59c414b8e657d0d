"""PyTorch's scaled_dot_product_attention by tilewise: `tilewise.sdpa`, as a context and installed."""

import doctest
import inspect
import sys
import threading
import warnings

import pytest
import torch
import torch._inductor.config as inductor
import torch.nn.functional as F
from pairwise import pairwise
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention as by_name
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import tilewise

B, H, L, S, D = 2, 4, 11, 13, 8
PYTORCH = torch._C._nn.scaled_dot_product_attention
MODES = {"with": tilewise.sdpa, "install": lambda: installed()}
both = pytest.mark.parametrize("mode", list(MODES.values()), ids=list(MODES))
COMPILERS = pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
NO_DISK = inductor.patch(fx_graph_cache=False)  # by which a change of a fake kernel is not seen
JIT = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # PyTorch's own use


class installed:
    def __enter__(self):
        tilewise.sdpa.install()

    def __exit__(self, *error):
        tilewise.sdpa.uninstall()


@pytest.fixture(autouse=True)
def fresh():
    """Counts from 0; nothing is left behind."""
    tilewise.sdpa.report(reset=True)
    torch._dynamo.reset()
    yield
    assert F.scaled_dot_product_attention is by_name is PYTORCH
    assert torch.overrides._get_current_function_mode_stack() == []


def counts():
    return tuple(tilewise.sdpa.report(reset=True))


def tensors(heads=H, queries=L, dtype=torch.float64, **kind):
    gen = torch.Generator().manual_seed(0)
    sizes = ((H, queries), (heads, S), (heads, S))
    return [torch.randn(B, h, n, D, generator=gen, dtype=torch.float64).to(dtype).requires_grad_() for h, n in sizes]


def mask_of(kind, queries=L):
    gen = torch.Generator().manual_seed(1)
    if kind == "bool":
        mask = torch.rand(B, 1, queries, S, generator=gen) < 0.6
        mask[:, :, 2] = False  # a query that sees nothing
        return mask
    bias = torch.randn(H, queries, S, generator=gen, dtype=torch.float64)
    if kind == "hidden":
        return bias.masked_fill(torch.rand(queries, S, generator=gen) < 0.4, -torch.inf)
    return bias.requires_grad_() if kind == "float" else None


def value_and_gradients(call, leaves):
    o = call()
    cotangent = torch.randn(o.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return o, *torch.autograd.grad(o, leaves, cotangent.to(o.dtype))


# --- values and gradients, by all names ---

NAMES = {
    "attribute": lambda *a, **k: F.scaled_dot_product_attention(*a, **k),
    "imported": lambda *a, **k: by_name(*a, **k),
}


@pytest.mark.parametrize(
    ("sizes", "kind", "name", "mode"),
    pairwise([(H, L), (2, S), (1, 20)], [None, "bool", "float", "hidden"], NAMES, MODES),
    ids=str,
)
def test_values_and_gradients_are_pytorchs(sizes, kind, name, mode):
    heads, queries = sizes
    qkv, mask = tensors(heads, queries), mask_of(kind, queries)
    options = {"enable_gqa": heads not in (1, H), "scale": 0.3} | ({"is_causal": True} if kind is None else {})
    leaves = [*qkv, *([mask] if kind == "float" else [])]
    call = lambda: NAMES[name](*qkv, attn_mask=mask, **options)  # noqa: E731
    expected = value_and_gradients(call, leaves)
    with MODES[mode]():
        found = value_and_gradients(call, leaves)
    assert counts() == (1, {})
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_operators_are_covered():
    """An exported program calls them."""
    qkv = tensors()
    with tilewise.sdpa():
        for call in (torch.ops.aten.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default):
            torch.testing.assert_close(call(*qkv), by_name(*qkv))
    assert counts() == (4, {})


def test_dropout_is_tilewises():
    """Its random numbers, and the same in the backward."""
    qkv, bias = tensors(), mask_of("float")
    torch.manual_seed(0)
    expected = value_and_gradients(
        lambda: tilewise.scaled_dot_product_attention(*qkv, bias, dropout_p=0.3), [*qkv, bias]
    )
    torch.manual_seed(0)
    with tilewise.sdpa():
        found = value_and_gradients(lambda: by_name(*qkv, bias, 0.3), [*qkv, bias])
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@both
def test_autocast(mode):
    qkv = tensors(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16), mode():
        o = by_name(*qkv)
    assert o.dtype == torch.bfloat16
    torch.testing.assert_close(o.float(), by_name(*qkv), rtol=0.02, atol=0.02)
    assert counts() == (1, {})


def test_a_choice_among_pytorchs_kernels_has_no_effect():
    qkv = tensors()
    with tilewise.sdpa(), sdpa_kernel(SDPBackend.MATH):
        torch.testing.assert_close(by_name(*qkv), PYTORCH(*qkv))
    assert counts()[0] == 2


# --- modules of PyTorch ---


def encoder(**options):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, dtype=torch.float64, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


@both
@pytest.mark.parametrize("training", [True, False])
def test_modules(training, mode):
    model, x = encoder().train(training), torch.randn(2, 5, 16, dtype=torch.float64)
    attention = nn.MultiheadAttention(16, 2, dtype=torch.float64).train(training)
    leaves = [*model.parameters(), *attention.parameters()]
    call = lambda: attention(*[model(x)] * 3, need_weights=False)[0]  # noqa: E731
    expected = value_and_gradients(call, leaves)
    with mode():
        found = value_and_gradients(call, leaves)
    assert counts() == (3, {})
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("order", ["inside", "outside", "nested"])
def test_modules_under_other_modes(order):
    """Another mode sees multi_head_attention_forward too, and hands it on."""
    model, x = encoder(), torch.randn(2, 5, 16, dtype=torch.float64)
    device, ours = torch.device("cpu"), tilewise.sdpa()
    first, second = {"inside": (ours, device), "outside": (device, ours), "nested": (ours, tilewise.sdpa())}[order]
    with first, second:
        o = model(x)
    torch.testing.assert_close(o, model(x))
    assert counts() == (2, {})


def test_fast_paths_for_inference():
    """Within the mode PyTorch does not take them; installed, they are counted."""
    model, x = encoder().eval(), torch.randn(2, 5, 16, dtype=torch.float64)
    attention = nn.MultiheadAttention(16, 2, batch_first=True, dtype=torch.float64).eval()
    with torch.no_grad():
        expected = model(x)
        with tilewise.sdpa():
            torch.testing.assert_close(model(x), expected)
        assert counts() == (2, {})
        with installed():
            assert torch.equal(model(x), expected)
            attention(x, x, x, need_weights=False)
            by_tilewise, by_pytorch = counts()
            assert (by_tilewise, list(by_pytorch.values())) == (0, [3])
            assert "fast path" in next(iter(by_pytorch))
            torch.backends.mha.set_fastpath_enabled(False)
            try:
                torch.testing.assert_close(model(x), expected)
            finally:
                torch.backends.mha.set_fastpath_enabled(True)
        assert counts() == (2, {})


# --- what is left to PyTorch ---


def jagged(*lengths):
    parts = [torch.randn(n, 2, D) for n in lengths]
    return torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)


x = torch.randn(2, 2, 5, D)
LEFT = {
    "dropout_p is a tensor": lambda: F.scaled_dot_product_attention(x, x, x, dropout_p=torch.tensor(0.0)),
    "a head dimension is 0": lambda: F.scaled_dot_product_attention(x[..., :0], x[..., :0], x),
    "scale is a bool, infinite or NaN": lambda: F.scaled_dot_product_attention(x, x, x, scale=True),
    "query is of the class TwoTensor": lambda: F.scaled_dot_product_attention(*[TwoTensor(x, x)] * 3).a,
    "attn_mask is of the class Masked":
        lambda: F.scaled_dot_product_attention(x, x, x, x[0, 0, :, :5].as_subclass(Masked)),
}  # fmt: skip
REFUSED = {
    "query is torch.int32": lambda: F.scaled_dot_product_attention(*[x.int()] * 3),
    "key is nested or not strided, and not all are jagged": lambda: F.scaled_dot_product_attention(x, x.to_sparse(), x),
    "query is nested or not strided, and not all are jagged":
        lambda: F.scaled_dot_product_attention(jagged(2, 3), x, x),
    "query is jagged with holes": lambda: F.scaled_dot_product_attention(*[holes()] * 3),
    "is_causal of jagged tensors with other lengths of key than of query":
        lambda: F.scaled_dot_product_attention(jagged(2, 3), *[jagged(3, 4)] * 2, is_causal=True),
    "forward-mode derivatives": lambda: torch.func.jvp(lambda q: F.scaled_dot_product_attention(q, x, x), (x,), (x,)),
}  # fmt: skip


class Masked(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs)


def holes():
    starts, lengths = torch.tensor([0, 1]), torch.tensor([3, 4])
    return torch.nested.narrow(torch.randn(2, 6, 2, D), 1, starts, lengths, layout=torch.jagged).transpose(1, 2)


@both
@pytest.mark.parametrize("reason", LEFT)
def test_what_pytorch_computes(reason, mode):
    expected = LEFT[reason]()
    with mode():
        found = LEFT[reason]()
        assert str(tilewise.sdpa.report()).splitlines() == [
            "scaled_dot_product_attention: 0 by tilewise, 1 by PyTorch", f"  1 by PyTorch: {reason}"
        ]  # fmt: skip
        assert counts() == (0, {reason: 1})
    torch.testing.assert_close(found, expected, equal_nan=True)


@both
@pytest.mark.parametrize("reason", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_what_neither_computes_is_pytorchs_error(reason, mode):
    with pytest.raises((RuntimeError, TypeError, ValueError)) as expected:
        REFUSED[reason]()
    with mode(), pytest.raises(expected.type) as found:
        REFUSED[reason]()
    assert str(found.value)[:60] == str(expected.value)[:60]
    assert counts() == (0, {reason: 1})


def test_devices_without_a_backend():
    """A made-up tensor stands for one: no other device is here."""
    from tilewise.integrations import sdpa_calls

    class Elsewhere:
        dtype = torch.float32

        def __init__(self, kind):
            self.device = torch.device(kind, 0)

    assert sdpa_calls._of_device(Elsewhere("mps"), None) == "query is on mps"
    assert sdpa_calls._of_device(Elsewhere("meta"), None) is None


@pytest.mark.parametrize(("capability", "reason"), [
    ((7, 5), "needs compute capability 8.0 or later, this GPU has 7.5"), ((8, 0), None), ((12, 0), None)
])  # fmt: skip
def test_old_gpus(capability, reason, monkeypatch):
    from tilewise.integrations import sdpa_calls

    class OnGpu:
        dtype, device = torch.float32, torch.device("cuda", 0)

    class Precise(OnGpu):
        dtype = torch.float64

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    assert sdpa_calls._of_device(OnGpu(), None) == reason
    assert sdpa_calls._of_device(Precise(), None) == "float64 on a GPU"
    assert sdpa_calls._of_device(OnGpu(), Precise()) == "float64 on a GPU"
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert sdpa_calls._of_device(OnGpu(), None) == "needs an NVIDIA GPU, this PyTorch is built for ROCm"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_other_tensors_are_tilewises():
    parameter, buffer = nn.Parameter(x.clone()), nn.Buffer(x.clone())
    nested, mask = jagged(2, 3), causal_lower_right(5, 5)
    calls = [
        lambda: by_name(parameter, buffer, x),
        lambda: by_name(x, x, x, mask),
        lambda: by_name(*[nested] * 3).values(),
    ]
    for call in calls:
        expected = call()
        with tilewise.sdpa():
            torch.testing.assert_close(call(), expected)
        assert counts() == (1, {})


# --- contexts ---


def test_nesting_counts_once():
    qkv = tensors()
    left = lambda: by_name(*qkv, dropout_p=torch.tensor(0.0))  # noqa: E731
    with tilewise.sdpa(), tilewise.sdpa():
        by_name(*qkv)
        left()
    assert counts() == (1, {"dropout_p is a tensor": 1})
    with installed(), tilewise.sdpa():
        by_name(*qkv)
        left()
    assert counts() == (1, {"dropout_p is a tensor": 1})
    with tilewise.sdpa():
        with tilewise.sdpa():
            pass
        by_name(*qkv)
    by_name(*qkv)
    assert counts() == (1, {})


@both
def test_errors_end_the_mode(mode):
    with pytest.raises(ValueError, match="attn_mask"), mode():
        by_name(*tensors(), attn_mask=torch.zeros(3, 3))
    assert by_name is PYTORCH
    counts()
    by_name(*tensors())
    assert counts() == (0, {})


def in_thread(call):
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def test_threads():
    qkv = tensors()
    with tilewise.sdpa():
        in_thread(lambda: by_name(*qkv))
    assert counts() == (0, {})
    with installed():
        in_thread(lambda: by_name(*qkv))
        assert counts() == (1, {})
        in_thread(tilewise.sdpa.uninstall)
        by_name(*qkv)
    assert counts() == (0, {})


def test_install_covers_modules_to_come(tmp_path, monkeypatch):
    """They import the name from one that has it; after the end they have PyTorch's."""
    (tmp_path / "imported_later.py").write_text(
        "from torch.nn.functional import scaled_dot_product_attention as other\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with installed():
        import imported_later

        tilewise.sdpa.install()  # again: no change
        imported_later.other(*tensors())
        assert counts() == (1, {})
    assert imported_later.other is PYTORCH
    monkeypatch.delitem(sys.modules, "imported_later")


def test_torch_script_compiles_pytorchs():
    def call(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    with installed(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(call)
    assert "aten::scaled_dot_product_attention" in str(scripted.graph)


def test_symbolic_traces_keep_pytorchs():
    call = lambda q: F.scaled_dot_product_attention(q, q, q)  # noqa: E731
    with tilewise.sdpa():
        traced = torch.fx.symbolic_trace(call)
        assert counts() == (0, {"query is no tensor": 1})
        traced(x)
    assert PYTORCH in [node.target for node in traced.graph.nodes]
    assert counts() == (1, {})


# --- torch.compile ---


@COMPILERS
@NO_DISK
@JIT
@pytest.mark.parametrize("name", NAMES)
def test_compiled_inside(name, compiler):
    qkv, bias = tensors(dtype=torch.float32), mask_of("float").float().detach().requires_grad_()
    weight = torch.randn(D, D)
    # A product and no pointwise operation: what Inductor writes in C++ takes a compiler 20 seconds.
    call = lambda q, k, v, b: NAMES[name](q @ weight, k, v, b)  # noqa: E731
    compiled = torch.compile(call, fullgraph=True, backend=compiler)
    expected = value_and_gradients(lambda: call(*qkv, bias), [*qkv, bias])
    for mode in (tilewise.sdpa, installed):
        with mode():
            found = value_and_gradients(lambda: compiled(*qkv, bias), [*qkv, bias])
            compiled(*qkv, bias)
        assert counts() == (1, {}), mode
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        if mode is tilewise.sdpa:
            if compiler == "aot_eager":  # without the mode it is compiled anew: Inductor writes the softmax in C++
                torch.testing.assert_close(compiled(*qkv, bias), expected[0])
                assert counts() == (0, {})
            torch._dynamo.reset()


@COMPILERS
@NO_DISK
@JIT
def test_compiled_around(compiler):
    qkv = tensors(dtype=torch.float32)

    def call(q, k, v):
        with tilewise.sdpa(), tilewise.sdpa():
            o = by_name(q, k, v)
        return o, by_name(q, k, v)

    for o in torch.compile(call, fullgraph=True, backend=compiler)(*qkv):
        torch.testing.assert_close(o, PYTORCH(*qkv))
    assert counts() == (1, {})


def test_compiled_reasons_and_modules():
    model, data = encoder(), torch.randn(2, 5, 16, dtype=torch.float64)

    def call(data):
        o = by_name(data[..., :0], data[..., :0], data)
        return model(data) + o

    with tilewise.sdpa():
        found = torch.compile(call, fullgraph=True, backend="aot_eager")(data)
    torch.testing.assert_close(found, call(data))
    assert counts() == (2, {"a head dimension is 0": 1})


def test_exported_programs():
    class Model(nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    qkv = [x.detach() for x in tensors()]
    plain = torch.export.export(Model(), tuple(qkv))
    with tilewise.sdpa():
        ours = torch.export.export(Model(), tuple(qkv))
        counts()
        torch.testing.assert_close(plain.module()(*qkv), Model()(*qkv))
        assert counts() == (2, {})
    assert torch.ops.tilewise.attention.default in [node.target for node in ours.graph.nodes]
    torch.testing.assert_close(ours.module()(*qkv), Model()(*qkv))


# --- checkpoint ---


@pytest.mark.parametrize("backward", ["inside", "outside"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("levels", [1, 2])
def test_checkpoints_recompute_within(levels, reentrant, backward):
    qkv, bias = tensors(), mask_of("float")
    leaves = [*qkv, bias]

    def region(q, k, v, b):
        return by_name(q, k, v, b, 0.3).sin()

    def nested(*given):
        return checkpoint(region, *given, use_reentrant=reentrant) if levels == 2 else region(*given)

    def run(mode, within):
        torch.manual_seed(0)
        with mode():
            o = checkpoint(nested, *leaves, use_reentrant=reentrant)
            loss = o.square().sum()
            if within == "inside":
                loss.backward()
        if within == "outside":
            loss.backward()
        found = o.detach(), *(x.grad for x in leaves)
        for x in leaves:
            x.grad = None
        return found

    torch.manual_seed(0)
    o = tilewise.scaled_dot_product_attention(*leaves, dropout_p=0.3).sin()
    expected = o, *torch.autograd.grad(o.square().sum(), leaves)
    found = run(tilewise.sdpa, backward)
    by_tilewise, by_pytorch = counts()
    assert by_tilewise == 1 + (levels if reentrant else 1)
    assert by_pytorch == {}
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_that_begin_without_it_are_pytorchs(reentrant):
    tilewise.sdpa()  # the classes of checkpoint are changed from here on
    qkv = tensors()
    o = checkpoint(by_name, *qkv, use_reentrant=reentrant)
    o.sum().backward()
    assert counts() == (0, {})
    o = checkpoint(by_name, *qkv, use_reentrant=reentrant)
    in_thread(o.sum().backward)
    assert counts() == (0, {})


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_recompute_in_another_thread(reentrant):
    qkv = tensors()
    with tilewise.sdpa():
        o = checkpoint(by_name, *qkv, use_reentrant=reentrant)
    in_thread(o.sum().backward)
    assert counts() == (2, {})
    expected = torch.autograd.grad(by_name(*qkv).sum(), qkv)
    for x, grad in zip(qkv, expected, strict=True):
        torch.testing.assert_close(x.grad, grad)


# --- a model ---


@both
@pytest.mark.parametrize("kind", ["llama", "bert", "gpt2"])
def test_models_of_transformers(kind, mode):
    pytest.importorskip("transformers")
    from models import VOCAB, N, build

    model = build(kind, "sdpa").double()
    ids = torch.randint(1, VOCAB, (2, N), generator=torch.Generator().manual_seed(0))
    seen = torch.ones_like(ids)
    seen[1, :4] = 0
    leaves = [x for x in model.parameters() if x.requires_grad]

    def call():
        o = model(input_ids=ids, attention_mask=seen)[0] * seen[..., None]
        return o, *torch.autograd.grad(o.square().sum(), leaves, allow_unused=True)

    expected = call()
    with mode():
        found = call()
    by_tilewise, by_pytorch = counts()
    assert by_tilewise == model.config.num_hidden_layers
    assert by_pytorch == {}
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-7)


def test_the_example_runs():
    text = inspect.getdoc(tilewise.sdpa)
    example = doctest.DocTestParser().get_doctest(text, {"torch": torch, "tilewise": tilewise}, "sdpa", None, None)
    assert example.examples
    assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example).failed == 0
