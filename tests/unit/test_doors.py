"""The doors (attention, explain, SDPA): what they take for a tensor and for a keyword, and what autocast does there."""

import inspect
import itertools
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.masked import MaskedTensor
from torch.nn.attention.bias import CausalBias, causal_lower_right, causal_upper_left
from torch.testing._internal.two_tensor import TwoTensor

from tilewise import attention, explain, scaled_dot_product_attention
from tilewise.integrations import flash_attn

B, H, M, N, D = 2, 3, 5, 7, 4


def tensors(M=M, N=N, dtype=torch.float64):
    gen = torch.Generator().manual_seed(0)
    return [torch.randn(B, H, n, D, generator=gen, dtype=torch.float64).to(dtype) for n in (M, N, N)]


def visible(variant, M, N):
    return torch.ones(M, N, dtype=torch.bool).tril(0 if variant is causal_upper_left else N - M)


def made(variant, M, N):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rows that see nothing are PyTorch's NaN; here they are 0
        return variant(M, N)


def value_and_gradients(function, inputs):
    leaves = [x.clone().requires_grad_() for x in inputs]
    o = function(*leaves)
    return o, *torch.autograd.grad(o.square().sum(), leaves)


# --- PyTorch's CausalBias, whose memory nobody ever wrote ---


@pytest.mark.parametrize(("M", "N"), [(5, 7), (7, 7), (7, 5), (1, 4)])
@pytest.mark.parametrize("variant", [causal_upper_left, causal_lower_right])
def test_a_causal_bias_is_a_band(variant, M, N):
    qkv, causal, mask = tensors(M, N), made(variant, M, N), visible(variant, M, N)
    expected = value_and_gradients(lambda q, k, v: attention(q, k, v, mask=mask, backend="reference"), qkv)
    for name, call in {
        "bias": lambda q, k, v: attention(q, k, v, bias=causal),
        "mask": lambda q, k, v: attention(q, k, v, mask=causal),
        "attn_mask": lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=causal),
        "attn_mask of three dimensions": lambda q, k, v: torch.stack(
            [scaled_dot_product_attention(*x, causal) for x in zip(q, k, v, strict=True)]
        ),
    }.items():
        got = value_and_gradients(call, qkv)
        assert type(got[0]) is torch.Tensor, name
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}")
    band = explain(*qkv, bias=causal).problem.score.band
    assert (band.lo, band.hi) == (None, 0 if variant is causal_upper_left else N - M)
    assert explain(*qkv, bias=causal).problem.bias is None


@pytest.mark.parametrize("variant", [causal_upper_left, causal_lower_right])
def test_a_causal_bias_as_pytorch_reads_it(variant):
    qkv = tensors()
    ours = scaled_dot_product_attention(*qkv, attn_mask=variant(M, N))
    torch.testing.assert_close(ours, F.scaled_dot_product_attention(*qkv, attn_mask=variant(M, N)))


@pytest.mark.parametrize("variant", [causal_upper_left, causal_lower_right])
def test_a_causal_bias_beside_other_terms(variant):
    qkv, mask = tensors(), torch.rand(M, N, generator=torch.Generator().manual_seed(1)) < 0.7
    bias, causal, seen = torch.randn(M, N), variant(M, N), visible(variant, M, N)
    torch.testing.assert_close(
        attention(*qkv, bias=bias, mask=causal, window=(3, 1)),
        attention(*qkv, bias=bias, mask=seen, window=(3, 1)),
    )
    torch.testing.assert_close(attention(*qkv, bias=causal, mask=mask), attention(*qkv, mask=mask & seen))
    both = {"bias": causal_upper_left(M, N), "mask": causal}
    torch.testing.assert_close(attention(*qkv, **both), attention(*qkv, mask=seen & visible(causal_upper_left, M, N)))


def test_a_causal_bias_after_a_call_with_a_tensor_of_its_shape():
    """Nothing that was remembered of the one serves the other."""
    qkv, causal = tensors(M, M), causal_lower_right(M, M)
    for _ in range(2):
        attention(*qkv, bias=torch.zeros(1, 1, M, M, dtype=torch.float64))
        torch.testing.assert_close(attention(*qkv, bias=causal), attention(*qkv, causal=True))


CAUSAL_ERRORS = {
    "of other lengths": (
        attention, {"bias": causal_upper_left(N, N)}, ValueError,
        "bias: the CausalBias is for 7 queries and 7 keys, the call has 5 and 7"),
    "of other lengths, as a mask": (
        attention, {"mask": causal_lower_right(M, M)}, ValueError,
        "mask: the CausalBias is for 5 queries and 5 keys, the call has 5 and 7"),
    "of other lengths, SDPA": (
        scaled_dot_product_attention, {"attn_mask": causal_lower_right(M, M)}, ValueError,
        "attn_mask: the CausalBias is for 5 queries and 5 keys, the call has 5 and 7"),
    "beside causal": (
        attention, {"bias": causal_upper_left(M, N), "causal": True}, ValueError,
        "bias: a CausalBias says by itself what is hidden; leave causal=True out"),
    "beside is_causal": (
        scaled_dot_product_attention, {"attn_mask": causal_upper_left(M, N), "is_causal": True}, ValueError,
        "attn_mask: a CausalBias says by itself what is hidden; leave is_causal=True out"),
}  # fmt: skip


@pytest.mark.parametrize("name", CAUSAL_ERRORS)
def test_errors_of_a_causal_bias(name):
    door, arguments, error, message = CAUSAL_ERRORS[name]
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        door(*tensors(), **arguments)
    q, k, v = tensors()
    with pytest.raises(ValueError, match=r"^v: expected 4 dimensions"):
        attention(q, k, v[0], bias=causal_upper_left(M, N))
    with pytest.raises(ValueError, match=r"^q: expected 4 dimensions"):
        attention(q[0], k, v, bias=causal_upper_left(M, N))


@pytest.mark.parametrize("variant", [causal_upper_left, causal_lower_right])
def test_a_causal_bias_compiles_without_a_graph_break(variant):
    def call(q, k, v, causal):
        return scaled_dot_product_attention(q, k, v, causal) + attention(q, k, v, bias=causal)

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    qkv, causal = tensors(), variant(M, N)
    torch.testing.assert_close(compiled(*qkv, causal), call(*qkv, causal))


# --- other classes ---


class Tagged(torch.Tensor):
    """Its memory with a name to it."""

    tag = "tagged"


class Quiet(torch.Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl


class Image(torch.Tensor):
    """As torchvision's tv_tensors, fastai's and MONAI's classes do it; CausalBias too, and that is the trouble."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


class Portrait(Image):
    pass


def arguments(q, k, v, bias, mask):
    """The same call of each door."""
    yield "attention", ("q", "k", "v", "bias", "mask"), lambda: attention(q, k, v, bias=bias, mask=mask)
    yield "explain", ("q", "k", "v", "bias", "mask"), lambda: explain(q, k, v, bias=bias, mask=mask)
    names = ("query", "key", "value", "attn_mask", "attn_mask")
    yield "sdpa", names, lambda: scaled_dot_product_attention(q, k, v, bias if mask is None else mask)


def with_one(which, made):
    """Arguments of a call whose number ``which`` is made of the ordinary one."""
    ordinary = [*tensors(dtype=torch.float32), torch.randn(1, 1, M, N), torch.rand(1, 1, M, N) < 0.7]
    ordinary[which] = made(ordinary[which])
    if which != 4:
        ordinary[4] = None
    return ordinary


@pytest.mark.parametrize("which", range(5))
@pytest.mark.parametrize("kind", [Image, Portrait, MaskedTensor])
@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
def test_a_class_with_a_torch_function_is_refused_by_name(which, kind):
    def make(x):
        return MaskedTensor(x, torch.ones_like(x, dtype=torch.bool)) if kind is MaskedTensor else x.as_subclass(kind)

    for _, names, call in arguments(*with_one(which, make)):
        with pytest.raises(TypeError, match=f"^{names[which]}: expected a plain torch.Tensor, got {kind.__name__}, "):
            call()


@pytest.mark.parametrize("which", range(3))
def test_a_causal_bias_is_no_query_key_or_value(which):
    for _, names, call in arguments(*with_one(which, lambda x: causal_upper_left(M, N))):
        with pytest.raises(TypeError, match=f"^{names[which]}: expected a plain torch.Tensor, got CausalBias, "):
            call()


def test_as_subclass_is_the_way_out():
    """Which the error names; gradients pass it."""
    q, k, v = tensors()
    image = q.clone().requires_grad_().as_subclass(Image)
    torch.testing.assert_close(attention(image.as_subclass(torch.Tensor), k, v), attention(q, k, v))


@pytest.mark.parametrize("which", range(5))
@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.as_subclass(Tagged),
        lambda x: x.as_subclass(Quiet),
        lambda x: torch.nn.Parameter(x, requires_grad=False),
        lambda x: torch.nn.Buffer(x),
        lambda x: TwoTensor(x, x.clone()),
    ],
    ids=["attributes", "no torch_function", "parameter", "buffer", "dispatch"],
)
def test_a_class_that_is_its_memory_or_dispatches_is_computed(which, make):
    given = with_one(which, make)
    plain = [x.a if isinstance(x, TwoTensor) else x for x in given]
    plain = [None if x is None else x.as_subclass(torch.Tensor) for x in plain]
    for (door, _, call), (_, _, expected) in zip(arguments(*given), arguments(*plain), strict=True):
        if door != "explain":
            got = call()
            got = got.a if isinstance(got, TwoTensor) else got
            torch.testing.assert_close(got.as_subclass(torch.Tensor), expected())
        else:
            assert str(call()) == str(expected())


def test_a_class_is_refused_under_torch_compile_too():
    q, k, v = tensors()
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, causal=True), backend="aot_eager")
    with pytest.raises(TypeError, match=r"^v: expected a plain torch.Tensor, got Image, "):
        compiled(q, k, v.as_subclass(Image))


@pytest.mark.parametrize("which", range(5))
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_tensors_without_strides_are_refused_by_name(which):
    """Of nested tensors those of layout strided too, which have no shape; also where a plain call went before."""
    kinds = {
        "a nested tensor": lambda x: torch.nested.nested_tensor(list(x), layout=torch.strided),
        "layout torch.sparse_coo": lambda x: x.to_sparse(),
        "layout torch.sparse_csr": lambda x: x[0, 0].to_sparse_csr(),
    }
    for _, _, call in arguments(*with_one(which, lambda x: x)):
        call()
    for kind, make in kinds.items():
        for _, names, call in arguments(*with_one(which, make)):
            message = f"{names[which]}: expected a dense tensor (layout torch.strided), got {kind}"
            with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
                call()


def test_jagged_tensors_are_refused_by_name():
    jagged = torch.nested.nested_tensor([torch.zeros(H, M, D)] * B, layout=torch.jagged)
    for call in (attention, explain):  # beside others that are none
        with pytest.raises(TypeError, match=r"^q: expected a dense tensor .* got a nested tensor$"):
            call(jagged, *tensors()[1:])


# --- under autocast ---


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtypes", [
    (torch.float32, torch.float32, torch.float32),
    (torch.float32, torch.float32, torch.bfloat16),
    (torch.float32, torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    (torch.float64, torch.float64, torch.float64),
])  # fmt: skip
def test_autocast_casts_q_k_and_v(dtypes, with_bias, causal):
    """As it does for PyTorch's function; the second call is the usual one, and one without autocast is neither."""
    qkv = [x.to(dtype) for x, dtype in zip(tensors(M, M), dtypes, strict=True)]
    expected_dtype = torch.float64 if dtypes[0] == torch.float64 else torch.bfloat16
    bias = torch.randn(1, H, M, M, dtype=torch.float64 if dtypes[0] == torch.float64 else torch.float32)
    leaves = [x.clone().requires_grad_() for x in (*qkv, *([bias] if with_bias else []))]
    terms = {"bias": leaves[3]} if with_bias else {}
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            o, lse = attention(*leaves[:3], causal=causal, return_lse=True, **terms)
            assert explain(*leaves[:3], causal=causal, **terms).problem.dtype == expected_dtype
        assert o.dtype == expected_dtype
        assert lse.dtype == (torch.float64 if dtypes[0] == torch.float64 else torch.float32)
        gradients = torch.autograd.grad(o.double().square().sum(), leaves)
        assert [x.dtype for x in gradients] == [x.dtype for x in leaves]
        by_hand = [x.to(expected_dtype) for x in leaves[:3]]
        torch.testing.assert_close(o, attention(*by_hand, causal=causal, **terms), rtol=0, atol=0)
        if len(set(dtypes)) == 1:
            assert attention(*leaves[:3], causal=causal, **terms).dtype == dtypes[0]
        else:
            with pytest.raises(TypeError, match="dtype must equal q's"):
                attention(*leaves[:3], causal=causal, **terms)


def test_autocast_as_pytorch_has_it():
    q, k, v = tensors(dtype=torch.float32)
    for dtypes in itertools.product((torch.float32, torch.bfloat16), repeat=3):
        inputs = [x.to(dtype) for x, dtype in zip((q, k, v), dtypes, strict=True)]
        with torch.autocast("cpu", torch.bfloat16):
            ours, theirs = attention(*inputs), F.scaled_dot_product_attention(*inputs)
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_autocast_names_the_dtypes_that_came(which):
    """float64 beside another dtype, and what is not floating: nothing is cast."""
    arguments = dict(zip("qkv", tensors(dtype=torch.float32), strict=True))
    with torch.autocast("cpu", torch.bfloat16):
        mixed = arguments | {which: arguments[which].double()}
        with pytest.raises(TypeError, match=r"dtype must equal q's, got torch.float(64|32) with q torch.float(64|32)$"):
            attention(**mixed)
        with pytest.raises(TypeError, match=f"^{which}: dtype must (be|equal).* got torch.int64"):
            attention(**(arguments | {which: arguments[which].long()}))
        with pytest.raises(TypeError, match=f"^{which}: expected a torch.Tensor, got NoneType$"):
            attention(**(arguments | {which: None}))


def test_autocast_of_another_device_changes_nothing():
    qkv = tensors(dtype=torch.float32)
    with torch.autocast("cuda", torch.bfloat16) if torch.cuda.is_available() else torch.autocast("cpu", enabled=False):
        assert attention(*qkv).dtype == torch.float32
    meta = [x.to("meta") for x in qkv]
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(*meta).dtype == torch.float32


def test_autocast_under_torch_compile():
    qkv = tensors(dtype=torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, causal=True), fullgraph=True, backend="aot_eager")
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(compiled(*qkv), attention(*qkv, causal=True))
        assert compiled(*qkv).dtype == torch.float32


# --- keywords ---


@pytest.mark.parametrize(
    ("keyword", "hint"),
    [
        ("attn_mask", "mask= (bool, True = attend) or bias= (float, added to the scores)"),
        ("is_causal", "causal=, aligned bottom-right"),
        ("softmax_scale", "scale="),
        ("dropout", "dropout_p="),
        ("window_size", "window=(left, right), with None for no limit"),
        ("alibi_slopes", "bias="),
        ("enable_gqa", "k and v with fewer heads as they are"),
    ],
)
def test_another_librarys_keyword_gets_a_hint(keyword, hint):
    for door in (attention, explain):
        name = door.__name__
        start = f"{name}() got an unexpected keyword argument '{keyword}'; tilewise.{name} takes {hint}"
        with pytest.raises(TypeError, match=f"^{re.escape(start)}"):
            door(*tensors(), **{keyword: None})


def flash(q, k, v, **options):
    return flash_attn.flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), **options)


def flash_varlen(q, k, v, **options):
    ends = torch.tensor([0, N])
    return flash_attn.flash_attn_varlen_func(k[0], k[0], v[0], ends, ends, N, N, **options)


@pytest.mark.parametrize(
    ("function", "keyword", "hint"),
    [
        (scaled_dot_product_attention, "causal", "is_causal=, aligned top-left; tilewise.attention(causal=) is"),
        (scaled_dot_product_attention, "bias", "attn_mask= (bool, True = attend, or float"),
        (scaled_dot_product_attention, "sink", "no such thing; tilewise.attention does, as sink="),
        (flash, "attn_mask", "bias= (float, added to the scores"),
        (flash, "scale", "softmax_scale="),
        (flash_varlen, "attn_mask", "bias= (float, added to the scores"),
        (flash_varlen, "s_aux", "no such thing; tilewise.attention does, as sink="),
    ],
)
def test_hints_of_other_signatures(function, keyword, hint):
    start = rf"\w+\(\) got an unexpected keyword argument '{keyword}'; [\w.]+ takes {re.escape(hint)}"
    with pytest.raises(TypeError, match=f"^{start}"):
        function(*tensors(), **{keyword: None})


def test_names_and_places_of_q_k_and_v():
    q, k, v = tensors()
    with pytest.raises(TypeError, match=r"^attention\(\) got an unexpected keyword argument 'query'; .* takes q=$"):
        attention(query=q, key=k, value=v)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'value'; tilewise.attention takes v=$"):
        attention(q, k, value=v)
    for more in ((None,), (q, 0.0)):
        words = rf"^attention\(\) takes 3 positional arguments but {3 + len(more)} were given; .* by name: mask= \(bool"
        with pytest.raises(TypeError, match=words):
            attention(q, k, v, *more)
    for given, missing in (((), "q"), ((q,), "k"), ((q, k), "v")):
        with pytest.raises(TypeError, match=f"^{missing}: expected a torch.Tensor, got NoneType$"):
            attention(*given)
    required = list(inspect.signature(attention).parameters.values())[:3]
    assert [(x.name, x.default) for x in required] == [(name, inspect.Parameter.empty) for name in "qkv"]


def test_an_unknown_keyword_is_pythons_error():
    with pytest.raises(TypeError, match=r"^attention\(\) got an unexpected keyword argument 'biass'$"):
        attention(*tensors(), biass=None)
    assert "unknown" not in inspect.signature(attention).parameters
    kinds = {p.kind for p in inspect.signature(attention).parameters.values()}
    assert kinds == {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}


def test_auto_is_the_plans_own_choice():
    qkv = tensors()
    torch.testing.assert_close(attention(*qkv, backend="auto"), attention(*qkv), rtol=0, atol=0)
    assert explain(*qkv, backend="auto").plan == explain(*qkv).plan


def test_causal_biases_are_still_what_the_tests_take_them_for():
    """If PyTorch one day writes their memory, or gives them no __torch_function__, this file should be read again."""
    assert issubclass(CausalBias, torch.Tensor)
    assert "__torch_function__" in vars(CausalBias)
