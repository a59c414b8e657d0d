"""The kernels of windows in Triton's interpreter against the formula in float64: forward and every gradient."""

from __future__ import annotations

import pytest
import torch
from helpers import cached
from structure_helpers import check, check_rounded, formula, tensors, value_and_gradients
from test_windows import dense, window_inputs

from tilewise.cache import calls
from tilewise.integrations.evoformer import window_pair_attention
from tilewise.windows import Geometry, config

pytest.importorskip("triton")
BRAIN, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(scope="module", autouse=True)
def registered():
    """In the place of the one that imports transformers, which is not needed here."""


def door(mask=None, q_block=4, k_block=12, edges="clip", **options):
    return lambda q, k, v, pair: window_pair_attention(
        q, k, v, pair, mask, q_block, k_block, edges, backend="triton", **options
    )


def right(inputs, mask=None, q_block=4, k_block=12, edges="clip", scale=None):
    N = inputs[0].shape[2]
    seen = None if mask is None else mask[:, None, None]
    return value_and_gradients(
        lambda q, k, v, pair: formula(q, k, v, dense(pair, N, q_block, k_block, edges), seen, scale),
        [x.double() for x in inputs],
    )


def launches():
    """Counts them, so that no case passes by another way."""
    from tilewise.backends.launch.launcher import Launch

    names, call = [], Launch.__call__

    def counted(self, *tensors):
        names.append(self.kernel.fn.__name__)
        call(self, *tensors)

    Launch.__call__ = counted
    return names, lambda: setattr(Launch, "__call__", call)


# --- values and gradients ---


def held(size, edges, bias, programs):
    """One launch each way, of whatever is shared; each forward's program has one member, or all of them."""
    from tilewise.windows import launch

    N, q_block, k_block = size
    inputs = window_inputs((2, 3, N, 8), -(-N // q_block), q_block, k_block, bias, FLOAT)
    mask = tensors((2, N), seed=1)[0] > -0.5
    mask[0, :k_block] = False  # the first queries see nothing
    was, launch.PROGRAMS = launch.PROGRAMS, programs
    calls.clear()
    names, stop = launches()
    try:
        ours = value_and_gradients(door(mask, q_block, k_block, edges, scale=0.7), inputs)
    finally:
        stop()
        launch.PROGRAMS = was
    check(ours, right(inputs, mask, q_block, k_block, edges, 0.7), 1e-5)
    assert names == ["forward_kernel", "backward_kernel"]


@pytest.mark.parametrize(
    ("size", "edges", "bias", "programs"),
    [
        ((29, 8, 20), "clip", (1, 3), 1), ((29, 8, 20), "shift", (2, 1), 1000), ((21, 8, 13), "shift", (1, 1), 1),
        ((14, 3, 10), "clip", (2, 3), 1), ((11, 4, 16), "shift", (1, 3), 1000), ((9, 4, 4), "clip", (1, 1), 1),
    ],
)  # fmt: skip
def test_windows(interpreter, size, edges, bias, programs):
    interpreter(held, size, edges, bias, programs)


def of_alphafold():
    """In half precision, heads last, and a head dimension that no tile has."""
    N = 75
    inputs = window_inputs((1, 2, N, 24), 3, 32, 128, (1, 2), HALF)
    inputs[:3] = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs[:3]]
    inputs[3] = inputs[3].float().movedim(1, -1).contiguous().movedim(-1, 1)
    ours = value_and_gradients(door(None, 32, 128), inputs)
    assert [x.dtype for x in ours] == [HALF] * 4 + [FLOAT]
    assert ours[0].stride() == inputs[0].stride()
    assert ours[4].stride() == inputs[3].stride()
    check_rounded(ours, right(inputs, None, 32, 128), HALF)


def test_windows_of_alphafold(interpreter):
    interpreter(of_alphafold)


def no_bias_and_few_gradients():
    """Each alone, and those of keys beside those of queries; what is not asked for is not computed."""
    inputs = window_inputs((1, 2, 9, 8), 3, 4, 12, (1, 1), FLOAT)
    exact = right(inputs)
    nothing = value_and_gradients(lambda q, k, v: door()(q, k, v, None), inputs[:3])
    check(nothing, right([*inputs[:3], torch.zeros_like(inputs[3])])[:4], 1e-5)
    for wanted in ([0], [1], [2], [3], [0, 2]):
        leaves = [x.detach().requires_grad_(n in wanted) for n, x in enumerate(inputs)]
        o = door()(*leaves)
        loss = (o.double() * tensors(o.shape, seed=9)[0]).sum()
        check(torch.autograd.grad(loss, [leaves[n] for n in wanted]), [exact[1 + n] for n in wanted], 1e-5)
    with torch.no_grad():
        check([door()(*inputs)], exact[:1], 1e-5)


def test_no_bias_and_few_gradients(interpreter):
    interpreter(no_bias_and_few_gradients)


# --- what is hidden ---


def hides(which):
    """NaN and infinity in keys and values that the mask, the bias or the sequence's end hides; one query sees one."""
    inputs = window_inputs((1, 2, 21, 8), 6, 4, 12, (1, 2), FLOAT)
    mask = torch.ones(1, 21, dtype=torch.bool)
    planted = [x.clone() for x in inputs]
    if which == "mask":
        mask[:, [3, 20]] = False
        planted[1][:, :, [3, 20]] = planted[2][:, :, [3, 20]] = torch.nan
    elif which == "bias":  # key 9 of every block that could see it, which are those from 4 to 15
        for block in range(6):
            place = 9 - (4 * block - 4)
            if 0 <= place < 12:
                inputs[3][:, :, block, :, place] = planted[3][:, :, block, :, place] = -torch.inf
        planted[1][:, :, 9] = torch.nan
        planted[2][:, :, 9] = torch.inf
    else:
        planted[3][:, :, 0, :, :4] = planted[3][:, :, 5, 1:] = planted[3][:, :, 5, :, 5:] = torch.nan
    ours, theirs = value_and_gradients(door(mask), planted), right(inputs, mask)
    check(ours, theirs, 1e-5)
    if which == "outside":
        assert not ours[-1][planted[3].isnan()].any()


@pytest.mark.parametrize("which", ["mask", "bias", "outside"])
def test_what_is_hidden_stays_out(interpreter, which):
    interpreter(hides, which)


def shows():
    """NaN that a query sees is in its row, and in no other; NaN of a cotangent in what its query sees."""
    inputs = window_inputs((1, 1, 24, 8), 6, 4, 12, (1, 1), FLOAT)
    inputs[2][:, :, 9, 2] = torch.nan
    inputs[3][:, :, 1, 0, 9] = -torch.inf  # key 9, of the first query of block 1
    o = door()(*inputs)
    assert o.isnan().nonzero()[:, 2:].tolist() == [[row, 2] for row in range(5, 16)]
    inputs[2][:, :, 9, 2] = 0.0
    leaves = [x.requires_grad_() for x in inputs]
    do = torch.ones_like(o)
    do[:, :, 4, 3] = torch.nan  # sees keys 0 to 11 but 9
    dq, dk, dv, dbias = torch.autograd.grad(door()(*leaves), leaves, do)
    keys = [key for key in range(12) if key != 9]
    assert dv.isnan().nonzero()[:, 2:].tolist() == [[key, 3] for key in keys]
    assert dk.isnan().any(-1).nonzero()[:, 2].tolist() == keys
    assert dq.isnan().any(-1).nonzero()[:, 2].tolist() == [4]
    assert dbias.isnan().nonzero()[:, 2:].tolist() == [[1, 0, place] for place in range(12) if place != 9]


def test_what_is_seen_comes_through(interpreter):
    interpreter(shows)


def lowest():
    """Rows whose keys all have the lowest finite bias, or -1e9: the mean of what they see, forward and backward."""
    inputs = window_inputs((1, 1, 8, 8), 2, 4, 12, (1, 1), FLOAT)
    for number in (-1e9, torch.finfo(FLOAT).min):
        inputs[3][:, :, 0, 1] = number
        for x in inputs[:2]:
            x[..., 1, :] = 0.0  # so that scores do not matter
        ours = value_and_gradients(door(), inputs)
        theirs = right([*inputs[:3], inputs[3].clamp(min=-1e30)])
        check([ours[0][:, :, 1], *ours[3:]], [theirs[0][:, :, 1], *theirs[3:]], 1e-5)


def test_rows_of_the_lowest_bias(interpreter):
    interpreter(lowest)


# --- a call like an earlier one ---


def one_after_the_other():
    """Each differs from the one before in one thing that decides how it is computed, and comes twice."""
    q, k, v, pair = window_inputs((2, 2, 8, 8), 2, 4, 12, (1, 2), FLOAT)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    mask = torch.arange(8)[None] > 2
    calls = [
        ([q, k, v, pair], {}),
        ([q, k, v, pair], {"scale": 0.3}),
        ([q, k, v, pair], {"edges": "shift"}),
        ([q, k, v, pair], {"mask": mask}),
        ([q, k, v, pair], {"mask": mask.expand(2, -1)}),
        ([*turned, pair], {}),
        ([q, k, v, window_inputs((2, 2, 8, 8), 2, 4, 16, (1, 2), FLOAT)[3]], {"k_block": 16}),
        ([q, k, v, torch.cat([pair, pair + 1])], {}),
        ([q, k, v, pair.movedim(1, -1).contiguous().movedim(-1, 1)], {}),
        ([q, k, v, torch.stack([pair, pair], 3)[:, :, :, 0]], {}),  # rows of blocks that do not follow each other
        ([x[:, :, :4] for x in (q, k, v)] + [pair[:, :, :1]], {}),
    ]
    known = len(cached("window_pair_attention"))
    for turn in range(2):
        for inputs, options in calls:
            leaves = [torch.empty_strided(x.shape, x.stride()).copy_(x).requires_grad_() for x in inputs]
            o = door(**options)(*leaves)
            exact, seen = [x.double().requires_grad_() for x in inputs], options.get("mask")
            wide = dense(exact[3], o.shape[2], 4, options.get("k_block", 12), options.get("edges", "clip"))
            theirs = formula(*exact[:3], wide, None if seen is None else seen[:, None, None], options.get("scale"))
            # a cotangent that lies as o does, or in another order; and one number for all
            do = torch.ones_like(o) if turn else torch.ones_like(o).transpose(1, 2).contiguous().transpose(1, 2)
            loss, do = (o.sum(), None) if turn and not options else (o, do)
            check(
                [o, *torch.autograd.grad(loss, leaves, do)], [theirs, *torch.autograd.grad(theirs.sum(), exact)], 1e-5
            )
    assert len(cached("window_pair_attention")) == known + len(calls) - 1  # all but that whose bias is copied


def test_calls_that_differ_in_one_thing(interpreter):
    interpreter(one_after_the_other)


def precisions():
    """How PyTorch wants products of float32 is part of a call."""
    inputs = window_inputs((1, 1, 8, 32), 2, 4, 12, (1, 1), FLOAT)
    found = []
    for allowed in (False, True, False):
        torch.backends.cuda.matmul.allow_tf32 = allowed
        found.append(door()(*inputs))
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])


def test_precision_is_part_of_a_call(interpreter):
    interpreter(precisions)


def errors():
    """An argument that equals one of an earlier call is still an error."""
    inputs = window_inputs((1, 1, 1, 8), 1, 1, 1, (1, 1), FLOAT)
    door(q_block=1, k_block=1, scale=1.0)(*inputs)
    found = []
    for options in (
        {"q_block": True, "k_block": 1}, {"q_block": 1, "k_block": 1.0}, {"q_block": 1, "k_block": 1, "scale": True},
        {"q_block": 1, "k_block": 1, "mask": torch.ones(1, 1)},
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError)) as error:
            door(**{"scale": 1.0, **options})(*inputs)
        found.append(str(error.value).split(":")[0])
    assert found == ["q_block", "k_block", "scale", "mask"]


def test_equal_arguments_of_another_type(interpreter):
    interpreter(errors)


# --- the operators ---


def operators():
    from torch.utils.flop_counter import FlopCounterMode

    import tilewise.windows.autograd  # noqa: F401

    q, k, v, pair = window_inputs((1, 1, 8, 8), 2, 4, 12, (1, 1), FLOAT)
    inputs = [x.requires_grad_() for x in (q, k, v[..., :4].contiguous(), pair)]
    mask = torch.arange(8)[None] > 2
    arguments = (*inputs, mask, 0.5, 4, 12, False)
    torch.library.opcheck(torch.ops.tilewise.window_attention.default, arguments, test_utils=(
        "test_schema", "test_autograd_registration", "test_faketensor",
    ))  # fmt: skip
    call = door(mask, scale=0.5)
    eager = value_and_gradients(call, inputs)
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    check(value_and_gradients(compiled, inputs), eager, 1e-6)
    with FlopCounterMode(display=False) as counter:
        call(*inputs).sum().backward()
    assert counter.get_total_flops() == 2 * 8 * 12 * ((1 + 3) * 8 + (1 + 2) * 4)
    q = inputs[0].detach()
    each = torch.vmap(lambda q: call(q, *(x.detach() for x in inputs[1:])))(torch.stack([q, 2 * q]))
    check(each, torch.stack([call(x, *inputs[1:]) for x in (q, 2 * q)]), 1e-6)


def test_the_operators(interpreter):
    interpreter(operators)


# --- which calls they take ---


@pytest.mark.parametrize(
    ("changes", "geometry"),
    [
        ({}, (64, 128)), ({}, (32, 512)), ({"dtype": torch.float64}, (32, 128)), ({"D": 256}, (32, 128)),
        ({"k": torch.float16}, (32, 128)), ({"bias": torch.float64}, (32, 128)), ({"N": 0}, (32, 128)),
    ],
)  # fmt: skip
def test_others_are_calls_of_attention(changes, geometry, monkeypatch):
    monkeypatch.setattr(config, "_runs_kernels", lambda device: True)
    shape = (1, 2, changes.get("N", 64), changes.get("D", 32))
    q = torch.empty(shape, dtype=changes.get("dtype", BRAIN))
    bias = torch.empty(1, 2, 2, *geometry, dtype=changes.get("bias", BRAIN))
    usual = torch.empty(1, 2, 64, 32, dtype=BRAIN)
    assert config.fits(usual, usual, usual, None, Geometry(32, 128, False))
    assert not config.fits(q, q.to(changes.get("k", q.dtype)), q, bias, Geometry(*geometry, False))
