"""A bias of low rank of every size that a dtype has, by every function that takes one, and by every backend."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tilewise import TileMask, attention, varlen_attention
from tilewise.bias import low_rank_bias
from tilewise.distributed import context_parallel_attention
from tilewise.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func
from tilewise.varlen import varlen_attn

HALF, BRAIN, FLOAT, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
N, R = 32, 3


def distances(span, factor, dtype):
    """u and w of ``-factor * (x_i - x_j)^2``, whose terms are large and cancel out, and x from -span to span."""
    x = torch.linspace(-span, span, N, dtype=DOUBLE)
    one = torch.ones_like(x)
    u, w = torch.stack([x * x, one, x], -1), -factor * torch.stack([one, x * x, -2 * x], -1)
    return u[None, None].to(dtype), w[None, None].to(dtype)


def tensors(dtype, D, span=100.0, factor=1e-3, size_q=1.0, size_k=1.0):
    """q, k, v, u, w and do."""
    generator = torch.Generator().manual_seed(3)
    q, k, v, do = (torch.randn(1, 2, N, D, generator=generator, dtype=DOUBLE) for _ in range(4))
    return *(x.to(dtype) for x in (q * size_q, k * size_k, v)), *distances(span, factor, dtype), do.to(dtype)


def results(attend, inputs, dtype):
    """o and every gradient, in float64; (1, 2, N, D) is what ``attend`` gives."""
    *leaves, do = [x.detach().clone().to(dtype) for x in inputs]
    leaves = [x.requires_grad_() for x in leaves]
    o = attend(*leaves)
    return [x.detach().double() for x in (o, *torch.autograd.grad(o, leaves, do))]


def unfused(scale, hidden=None):
    def attend(q, k, v, u, w):
        s = q @ k.mT * scale + u @ w.mT
        return torch.softmax(s if hidden is None else s.masked_fill(hidden, -torch.inf), -1) @ v

    return attend


def noise_of_rounding(name, inputs, o):
    """What rounding o does to the gradients of u and w by the sum that is subtracted from dP, do by o. Four standard
    deviations, for independent rounding errors of half a step: see helpers.py."""
    if name not in "uw":
        return 0.0
    of_row = 2 * torch.finfo(inputs[0].dtype).eps * (inputs[5].double() * o).norm(dim=-1).sum(1)
    return float(of_row.max() * inputs[4].abs().max() if name == "u" else of_row.norm() * inputs[3].abs().max())


def follows_the_error_rule(attend, inputs, scale, hidden=None, noisy=False):
    """Of o and each gradient the error is at most twice that of unfused PyTorch in the same dtype. ``noisy``: where o
    is read again rounded."""
    dtype = inputs[0].dtype
    found, allowed = results(attend, inputs, dtype), results(unfused(scale, hidden), inputs, dtype)
    exact = results(unfused(scale, hidden), inputs, DOUBLE)
    # Large products that cancel out are summed beside those of q and k, in float32.
    u, w = (x.abs().amax((0, 1, 2)).double() for x in inputs[3:5])
    slack = torch.finfo(FLOAT).eps * (1 + float((u * w).max()))
    for name, x, y, z in zip("oqkvuw", found, allowed, exact, strict=True):
        ours, theirs = float((x - z).abs().max()), float((y - z).abs().max())
        noise = noise_of_rounding(name, inputs, exact[0]) if noisy else 0.0
        assert ours <= 2 * theirs + noise + slack * float(z.abs().max()), (name, ours, theirs, noise)


def by(backend, scale=None):
    return lambda q, k, v, u, w: attention(q, k, v, bias=low_rank_bias(u, w), scale=scale, backend=backend)


CASES = {
    "past float16 after division": {"D": 64},
    "another scale, rounded": {"D": 128, "span": 16.0, "factor": 1.0},
    "a small head": {"D": 32, "span": 200.0, "factor": 2e-4},
    "w large, u small": {"D": 64, "span": 0.01, "factor": 6e4},
    "a small scale": {"D": 16, "span": 1.0, "factor": 1.0, "scale": 1e-5},
    "a smaller one": {"D": 16, "span": 100.0, "factor": 1e-3, "scale": 1e-12, "size_q": 30.0, "size_k": 30.0},
    "a large scale": {"D": 16, "scale": 1e4, "size_q": 0.01, "size_k": 0.01},
    "scale 37": {"D": 64, "scale": 37.0, "size_q": 0.1, "size_k": 0.1},
    "q small and k large": {"D": 64, "size_q": 1e-3, "size_k": 1e3},
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))


def inputs_of(case, dtype):
    more = {name: x for name, x in case.items() if name != "scale"}
    return tensors(dtype, **more), case.get("scale")


@each_case
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", [HALF, BRAIN, FLOAT], ids=str)
def test_error_rule(backend, dtype, case):
    inputs, scale = inputs_of(case, dtype)
    # The CPU's backward reads o again, the reference computes it anew. On AMD CPUs oneDNN sums in another order.
    follows_the_error_rule(by(backend, scale), inputs, scale or case["D"] ** -0.5, noisy=backend == "cpu")


@each_case
@pytest.mark.parametrize("dtype", [HALF, FLOAT], ids=str)
def test_error_rule_of_triton(interpreter, dtype, case):
    inputs, scale = inputs_of(case, dtype)
    interpreter(follows_the_error_rule_by, "triton", inputs, scale, scale or case["D"] ** -0.5)


def follows_the_error_rule_by(backend, inputs, given, scale):
    follows_the_error_rule(by(backend, given), inputs, scale, noisy=True)


# --- by every function ---

OFFSETS = torch.tensor([0, 7, 20, 32])
OF = torch.tensor([0] * 7 + [1] * 13 + [2] * 12)  # of each row its sequence
LENGTHS = (OFFSETS, OFFSETS, 13, 13)


def heads_last(x):
    return x.transpose(1, 2)


def end_to_end(x):
    return x[0].transpose(0, 1)


def whole(o):
    return o.transpose(0, 1)[None]


def jagged(x):
    return torch.nested.nested_tensor_from_jagged(end_to_end(x), OFFSETS).transpose(1, 2)


def of_tiles(q, k, v, bias):
    return attention(q, k, v, bias=bias, mask=TileMask.from_mask_mod(lambda b, h, i, j: j >= 0, N, N))


DENSE = {
    "more leading dimensions": lambda q, k, v, bias: attention(q[None], k[None], v[None], bias=bias)[0],
    "beside a matrix": lambda q, k, v, bias: attention(q, k, v, bias=(bias, torch.zeros(N, N))),
    "a mask of tiles": of_tiles,
    "compiled": lambda q, k, v, bias: torch.compile(attention, backend="eager", fullgraph=True)(q, k, v, bias=bias),
    "flash_attn": lambda q, k, v, bias: heads_last(flash_attn_func(*map(heads_last, (q, k, v)), bias=bias)),
}
PACKED = {
    "varlen_attention": lambda q, k, v, bias: whole(varlen_attention(*map(end_to_end, (q, k, v)), *LENGTHS, bias=bias)),
    "its reference": lambda q, k, v, bias: whole(
        varlen_attention(*map(end_to_end, (q, k, v)), *LENGTHS, bias=bias, backend="reference")
    ),
    "varlen_attn": lambda q, k, v, bias: whole(varlen_attn(*map(end_to_end, (q, k, v)), *LENGTHS, bias=bias)),
    "flash_attn": lambda q, k, v, bias: whole(flash_attn_varlen_func(*map(end_to_end, (q, k, v)), *LENGTHS, bias=bias)),
    "jagged": lambda q, k, v, bias: whole(attention(*map(jagged, (q, k, v)), bias=bias).transpose(1, 2).values()),
}


def of_bias(function):
    return lambda q, k, v, u, w: function(q, k, v, low_rank_bias(u, w))


@pytest.mark.parametrize("function", DENSE.values(), ids=list(DENSE))
def test_dense(function):
    follows_the_error_rule(of_bias(function), tensors(HALF, 64), 0.125)


@pytest.mark.parametrize("function", PACKED.values(), ids=list(PACKED))
def test_packed(function):
    follows_the_error_rule(of_bias(function), tensors(HALF, 64), 0.125, hidden=OF[:, None] != OF)


@pytest.mark.parametrize("method", ["ring", "all_gather", "all_to_all"])
def test_context_parallel(one_rank, method):
    def attend(q, k, v, bias):
        return context_parallel_attention(q, k, v, bias=bias, mesh=one_rank, method=method)

    follows_the_error_rule(of_bias(attend), tensors(HALF, 64), 0.125)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


# --- limits ---


@pytest.mark.parametrize("D", [20, 100])  # whose scales are no powers of two
def test_the_widest_that_a_gpu_holds_whole(D):
    """Where head dimension and rank are 256 together, what u loses by division alone would make them more."""
    q, k, v, *_, do = tensors(FLOAT, D)
    generator = torch.Generator().manual_seed(4)
    u, w = (torch.randn(1, 2, N, 256 - D, generator=generator) for _ in range(2))
    follows_the_error_rule(by(None), (q, k, v, u, w, do), D**-0.5)


@pytest.mark.parametrize(("D", "rank"), [(254, 3), (300, 2)])
def test_more_than_256_columns(D, rank):
    q, k, v, *_, do = tensors(FLOAT, D)
    generator = torch.Generator().manual_seed(5)
    u, w = (torch.randn(1, 2, N, rank, generator=generator) for _ in range(2))
    wider, longer, _ = low_rank_bias(u, w).extended(q, k, D**-0.5)
    assert wider.shape[3] == longer.shape[3] == D + 2 * rank + -(D + 2 * rank) % 4
    follows_the_error_rule(by(None), (q, k, v, u, w, do), D**-0.5)


def test_what_is_hidden_may_be_anything():
    """In u and w of hidden rows and keys, as in q and k."""
    q, k, v, u, w, do = tensors(HALF, 64)
    hidden = torch.zeros(N, dtype=torch.bool)
    hidden[-5:] = True
    clean = None
    for backend in ("cpu", "reference"):
        for planted in (0.0, 65504.0, torch.inf, torch.nan):
            w[:, :, -5:] = planted
            masked = {"mask": ~hidden[None], "scale": 0.3, "backend": backend}
            found = results(
                of_bias(lambda q, k, v, bias, masked=masked: attention(q, k, v, bias=bias, **masked)),
                (q, k, v, u, w, do), HALF,
            )  # fmt: skip
            clean = found if planted == 0.0 else clean
            assert all(torch.equal(x, y) for x, y in zip(found, clean, strict=True)), (backend, planted)


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("dtype", [HALF, FLOAT], ids=str)
def test_infinities_hide(dtype, D):
    """-inf in w, by any row of u above 0, and the most negative number in the dtype."""
    q, k, v, _, _, do = tensors(dtype, D)
    u, w = torch.full((1, 1, N, 1), 1.1, dtype=dtype), torch.zeros(1, 1, N, 1, dtype=dtype)
    for value in (-torch.inf, torch.finfo(dtype).min):
        w[:, :, -9:] = value
        found, expected = (
            results(lambda q, k, v, more=more: attention(q, k, v, **more), (q, k, v, do), dtype)
            for more in ({"bias": low_rank_bias(u, w)}, {"mask": w[..., 0] == 0})
        )
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
