"""The operators beside PyTorch's tools: copy-on-write tensors, the profiler, the counter of FLOPs."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa
from torch.profiler import ProfilerActivity, profile
from torch.utils import flop_counter
from torch.utils.flop_counter import FlopCounterMode

from tilewise import attention, matmul, scaled_dot_product_attention, softmax
from tilewise.backends import address, storage_and_offset


def tensors(B=2, H=4, Hkv=2, M=5, N=7, D=8, Dv=8, dtype=torch.float32, requires_grad=True):
    return [
        torch.randn(shape, dtype=dtype, requires_grad=requires_grad)
        for shape in ((B, H, M, D), (B, Hkv, N, D), (B, Hkv, N, Dv))
    ]


# --- copy on write ---


def lazily(tensors):
    """Copies that share their memory with ``tensors`` until somebody writes to it."""
    return [torch._lazy_clone(x.detach()).requires_grad_(x.requires_grad) for x in tensors]


# The bias goes through tilewise's own tiles: PyTorch's fused kernel reads one as if to write, in PyTorch's call too.
@pytest.mark.parametrize(("terms", "biased"), [({"softcap": 3.0}, True), ({"causal": True}, False), ({}, False)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("trained", [False, True])
def test_tensors_that_are_copied_on_write_stay_shared(terms, biased, masked, dtype, trained):
    sources = tensors(dtype=dtype, requires_grad=trained)
    if biased:
        sources.append(torch.randn(1, 4, 5, 7, dtype=dtype, requires_grad=trained))
    if masked:
        sources.append(torch.rand(1, 1, 1, 7) < 0.7)
    before = [x.detach().clone() for x in sources]
    for _ in range(2):  # the first call prepares, the second finds that done
        lazy = lazily(sources)
        bias, mask = lazy[3] if biased else None, lazy[-1] if masked else None
        o = attention(*lazy[:3], bias=bias, mask=mask, **terms)
        if trained:
            o.backward(torch.randn_like(o))
        assert all(torch._C._is_cow_tensor(x) for x in lazy)
        assert all(torch.equal(x, y) for x, y in zip(sources, before, strict=True))


def test_the_sdpa_door_leaves_tensors_shared():
    sources = tensors(Hkv=4)
    lazy = lazily(sources)
    o = scaled_dot_product_attention(*lazy, is_causal=True)
    o.backward(torch.randn_like(o))
    assert all(torch._C._is_cow_tensor(x) for x in lazy)


def test_matmul_leaves_tensors_shared():
    a, b, c = lazily(torch.randn(3, 4, 4, requires_grad=True).unbind())
    y = matmul(a, b, c=c, beta=0.5)
    y.backward(torch.randn_like(y))
    assert all(torch._C._is_cow_tensor(x) for x in (a, b, c))


@pytest.mark.parametrize("of", dict.fromkeys([address, storage_and_offset]))
def test_an_address_is_that_of_the_first_element(of):
    x = torch.randn(4, 6)
    for view in (x, x[1:], x[:, 3:], x.flatten()[1:].view(-1)):
        assert of(view) == view.data_ptr()
    lazy, there = torch._lazy_clone(x), of(x)
    assert of(lazy) == there
    assert torch._C._is_cow_tensor(lazy)


# --- the profiler ---


def rows_of(call):
    """Name and input shapes of each row that a profile of ``call()`` has of tilewise, in order."""
    call()  # nothing is prepared in what is profiled
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as profiled:
        call()
    events = sorted(profiled.events(), key=lambda event: event.time_range.start)
    return [(event.name, event.input_shapes) for event in events if event.name.startswith("tilewise::")]


def shapes(*tensors):
    return [[] if x is None else list(x.shape) for x in tensors]


@pytest.mark.parametrize("door", [attention, scaled_dot_product_attention])
def test_a_profile_names_attention(door):
    q, k, v = tensors(Hkv=4)
    with torch.no_grad():
        assert rows_of(lambda: door(q, k, v)) == [("tilewise::attention", shapes(q, k, v, None, None, None))]
    o = torch.empty(2, 4, 5, 8)
    assert rows_of(lambda: door(q, k, v).sum().backward()) == [
        ("tilewise::attention", shapes(q, k, v, None, None, None)),
        ("tilewise::attention_backward", shapes(o, None, q, k, v, None, None, None, o, o[..., 0], None)),
    ]


@pytest.mark.parametrize("trained", [False, True])
def test_a_profile_names_the_blocks(trained):
    a, b, c, x, bias = (torch.randn(4, 4, requires_grad=trained) for _ in range(5))

    def product():
        y = matmul(a, b, c=c)
        if trained:
            y.sum().backward()

    def rows():
        p = softmax(x, bias=bias)
        if trained:
            p.sum().backward()

    product_row = ("tilewise::matmul", shapes(a, b, c))
    gradients = ("tilewise::matmul", shapes(a, b, None))
    assert rows_of(product) == [product_row] + [gradients] * (2 if trained else 0)
    names = ["tilewise::softmax", "tilewise::softmax_backward"]
    assert [name for name, _ in rows_of(rows)] == names[: 1 + trained]


# --- FLOPs ---

SIZES = [{}, {"Hkv": 4}, {"Hkv": 1, "Dv": 12}, {"M": 1, "N": 20, "D": 16}, {"M": 0}]


def flops_of(call):
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def torch_backward_flops(q, k, v):
    """Of the backward of PyTorch's fused attention, on tensors without numbers."""
    q, k, v = (x.detach().to("meta") for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    o, lse = q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3])
    count = torch.ops.aten._scaled_dot_product_flash_attention_backward
    none, size = torch.empty(0, device="meta"), (q.shape[2], k.shape[2])
    return flops_of(lambda: count(o, q, k, v, o, lse, none, none, *size, 0.0, False, none, none))


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("door", [attention, scaled_dot_product_attention])
def test_flops_of_the_forward_are_those_of_pytorchs_products(sizes, door):
    q, k, v = tensors(**sizes, requires_grad=False)
    more = {"enable_gqa": True} if door is scaled_dot_product_attention else {}
    with sdpa_kernel(SDPBackend.MATH):
        expected = flops_of(lambda: torch_sdpa(q, k, v, enable_gqa=True))
    assert expected == 2 * 2 * 4 * q.shape[2] * k.shape[2] * (q.shape[3] + v.shape[3])
    assert flops_of(lambda: door(q, k, v, **more)) == expected
    assert flops_of(lambda: attention(q, k, v, causal=True, window=(2, None), bias=torch.zeros(1, 1))) == expected


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("forward_outside", [False, True])
def test_flops_of_the_backward_are_those_of_pytorchs(sizes, forward_outside):
    q, k, v = tensors(**sizes)
    expected = torch_backward_flops(q, k, v)
    o = attention(q, k, v) if forward_outside else None
    with FlopCounterMode(display=False) as counter:
        (attention(q, k, v) if o is None else o).sum().backward()
    counts = counter.get_flop_counts()["Global"]
    assert counts[torch.ops.tilewise.attention_backward] == expected
    if q.shape[3] == v.shape[3] and not forward_outside:
        assert 2 * expected == 5 * counts[torch.ops.tilewise.attention]
    assert (torch.ops.tilewise.attention in counts) != forward_outside


@pytest.mark.parametrize(
    ("a", "b"), [((6, 4), (4, 5)), ((3, 6, 4), (4, 5)), ((2, 1, 6, 4), (3, 4, 5)), ((3, 1, 4),) * 2]
)
@pytest.mark.parametrize("forward_outside", [False, True])
def test_flops_of_products(a, b, forward_outside):
    a, b = torch.randn(a, requires_grad=True), torch.randn(b, requires_grad=True)
    b = b.mT if a.shape == b.shape else b

    def total(product):
        y = product(a, b) if forward_outside else None
        return flops_of(lambda: (product(a, b) if y is None else y).sum().backward())

    assert total(matmul) == total(torch.matmul) > 0


def test_flops_of_softmax_are_none_as_pytorch_has_it():
    x = torch.randn(4, 4, requires_grad=True)
    assert flops_of(lambda: softmax(x).sum().backward()) == flops_of(lambda: torch.softmax(x, -1).sum().backward()) == 0


def test_flops_are_counted_by_modules():
    class Layer(torch.nn.Module):
        def forward(self, q):
            return attention(q, q, q)

    q = torch.randn(1, 2, 3, 8, requires_grad=True)
    layer = torch.nn.Sequential(Layer(), Layer())
    with FlopCounterMode(display=False) as counter:
        layer(q).sum().backward()
    one = 4 * 2 * 3 * 3 * 8
    assert counter.get_flop_counts()["Sequential.0"][torch.ops.tilewise.attention] == one
    assert counter.get_total_flops() == 2 * one + 2 * one * 5 // 2


def test_a_counter_that_was_made_before_the_operators(monkeypatch):
    """It has a copy of what was registered by then."""
    for name in ("attention", "attention_backward", "matmul"):
        monkeypatch.delitem(flop_counter.flop_registry, getattr(torch.ops.tilewise, name))
    q, k, v = tensors()
    counter = FlopCounterMode(display=False)
    with counter:
        attention(q, k, v).sum().backward()
        matmul(q.detach(), k.detach().mT[:, :1])
    assert counter.get_total_flops() == 2 * 2 * 4 * 5 * 7 * (8 + 8) * 7 // 2 + 2 * 2 * 4 * 5 * 7 * 8
