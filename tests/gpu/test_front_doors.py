"""Each door on a device, once: structure models, jagged tensors, varlen_attn, padding-free models, DTensors, examples.

The CPU's tests have the cases; here each door meets the kernels. Results are held to the formula in float64, within
twice the error of the same formula in the call's dtype.
"""

from __future__ import annotations

import importlib.util
import math
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import python
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import tilewise.api  # noqa: F401  # before DTensors, which its operators meet later
from tilewise import attention, scaled_dot_product_attention, varlen_attn
from tilewise.integrations.evoformer import (
    DS4Sci_EvoformerAttention,
    attention_pair_bias,
    triangle_attention,
    window_pair_attention,
)

DEVICE = "cuda"
EXAMPLES = Path(__file__).parents[2] / "examples"
HALF = torch.bfloat16


def drawn(*shapes, dtype=HALF, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes]


def formula(q, k, v, bias=None, mask=None):
    """Heads before the length; a row that sees nothing is 0."""
    s = q @ k.mT * q.shape[-1] ** -0.5
    s = s if bias is None else s + bias
    s = s if mask is None else s.masked_fill(~mask, -torch.inf)
    seen = (s > -torch.inf).any(-1, keepdim=True)
    return s.where(seen, 0.0).softmax(-1).where(seen, 0.0).to(v.dtype) @ v


def value_and_gradients(function, inputs, wide=False):
    inputs = [(x.double() if wide else x).detach().requires_grad_() for x in inputs]
    o = function(*inputs)
    (do,) = drawn(o.shape, dtype=torch.float32, seed=9)
    return [o, *torch.autograd.grad(o, inputs, do.to(o.dtype))]


def hold(ours, theirs, inputs, planted=None):
    """Output and gradients, each within twice the formula's error in the same dtype; planted: inputs with NaN."""
    found = value_and_gradients(ours, inputs if planted is None else planted)
    exact, rounded = (value_and_gradients(theirs, inputs, wide) for wide in (True, False))
    for x, truth, other in zip(found, exact, rounded, strict=True):
        assert (x.shape, x.dtype) == (other.shape, other.dtype)
        slack = 1e-5 * truth.abs().max()
        assert (x.double() - truth).abs().max() <= 2 * (other.double() - truth).abs().max() + slack


# --- structure models ---


@pytest.mark.parametrize(("dtype", "B"), [(HALF, 1), (HALF, 2), (torch.float32, 1)], ids=str)
def test_triangle_attention(dtype, B):
    N, H, S, D = 20, 4, 150, 32
    inputs = drawn((B, N, H, S, D), (B, N, H, S, D), (B, N, H, S, D), (B, 1, H, S, S), dtype=dtype)
    mask = drawn((B, N, 1, 1, S), seed=1)[0] > -1
    mask[..., 7] = False
    mask[:, 3] = False
    planted = [inputs[0], *(x.index_fill(-2, torch.tensor([7], device=DEVICE), torch.nan) for x in inputs[1:3])]
    hold(lambda *x: triangle_attention(*x, mask), lambda *x: formula(*x, mask), inputs, [*planted, inputs[3]])


def test_evoformer():
    B, N, L, H, D = 1, 9, 130, 4, 24
    inputs = drawn(*3 * [(B, N, L, H, D)], (B, N, 1, 1, L), (B, 1, H, L, L))

    def theirs(q, k, v, rows, pairs):
        return formula(*(x.transpose(-3, -2) for x in (q, k, v)), rows + pairs).transpose(-3, -2)

    hold(lambda q, k, v, *biases: DS4Sci_EvoformerAttention(q, k, v, biases), theirs, inputs)


def test_pair_bias():
    B, samples, H, S, D = 1, 5, 4, 133, 48
    inputs = drawn(*3 * [(B, samples, H, S, D)], (B, H, S, S))
    mask = drawn((B, S), seed=1)[0] > -1
    hold(
        lambda *x: attention_pair_bias(*x, mask),
        lambda q, k, v, bias: formula(q, k, v, bias[:, None], mask[:, None, None, None]),
        inputs,
    )


@pytest.mark.parametrize("edges", ["clip", "shift"])
def test_windows(edges):
    B, H, N, D = 2, 3, 333, 32
    blocks = -(-N // 32)
    inputs = drawn(*3 * [(B, H, N, D)], (1, H, blocks, 32, 128))
    mask = drawn((B, N), seed=1)[0] > -1
    begin = 32 * torch.arange(blocks, device=DEVICE) - 48
    begin = begin.clamp(0, N - 128) if edges == "shift" else begin
    place = (begin[:, None] + torch.arange(128, device=DEVICE)).repeat_interleave(32, 0)[:N]  # (N, 128): keys
    inside = (place >= 0) & (place < N)
    place = place.clamp(0, N - 1)
    seen = inside & mask[:, place]  # (B, N, 128)

    def theirs(q, k, v, bias):
        rows = bias.flatten(2, 3)[:, :, :N, None]  # (1, H, N, 1, 128)
        return formula(q[:, :, :, None], k[:, :, place], v[:, :, place], rows, seen[:, None, :, None])[:, :, :, 0]

    hold(lambda *x: window_pair_attention(*x, mask, edges=edges), theirs, inputs)


# --- packed batches by other doors ---

LENGTHS, H, HKV, D = (100, 1, 37, 260), 4, 2, 64


def causal_parts(q, k, v):
    """Of (total, heads, D), sequence by sequence."""
    found = []
    for x, y, z in zip(*(t.transpose(0, 1).split(LENGTHS, 1) for t in (q, k, v)), strict=True):
        y, z = (t.repeat_interleave(H // HKV, 0) for t in (y, z))
        found.append(formula(x, y, z, mask=torch.ones(x.shape[1], x.shape[1], device=DEVICE).bool().tril()))
    return torch.cat(found, 1).transpose(0, 1)


def packed():
    total = sum(LENGTHS)
    return drawn((total, H, D), (total, HKV, D), (total, HKV, D))


def offsets():
    return torch.tensor([0, *LENGTHS], device=DEVICE).cumsum(0)


@pytest.mark.parametrize("door", [attention, scaled_dot_product_attention], ids=lambda f: f.__name__)
def test_jagged(door):
    def ours(*tensors):
        places = offsets()
        x = [torch.nested.nested_tensor_from_jagged(t, places).transpose(1, 2) for t in tensors]
        if door is attention:
            return door(*x, causal=True).transpose(1, 2).values()
        return door(*x, is_causal=True, enable_gqa=True).transpose(1, 2).values()

    hold(ours, causal_parts, packed())


def test_varlen_attn():
    places = offsets().int()

    def ours(q, k, v):
        return varlen_attn(q, k, v, places, places, max(LENGTHS), max(LENGTHS), window_size=(-1, 0), enable_gqa=True)

    hold(ours, causal_parts, packed())


def test_a_padding_free_batch_of_transformers():
    """Loss and gradients are those of each sequence by itself, as transformers' own attention computes them."""
    transformers = pytest.importorskip("transformers")
    from tilewise.integrations.transformers import register

    register()
    config = transformers.LlamaConfig(
        vocab_size=48, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, max_position_embeddings=64, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    ids = torch.randint(3, 48, (29,), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    parts = ids.split((9, 1, 6, 13))

    def trained(implementation):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM._from_config(config, attn_implementation=implementation)
        model = model.to(DEVICE)
        if implementation == "tilewise":
            positions = torch.cat([torch.arange(len(x), device=DEVICE) for x in parts])
            logits = model(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits[0]
        else:
            logits = torch.cat([model(input_ids=x[None], use_cache=False).logits[0] for x in parts])
        loss = torch.nn.functional.cross_entropy(logits, ids)
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    for x, y in zip(trained("tilewise"), trained("sdpa"), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)


# --- DTensors ---


@pytest.fixture
def mesh(tmp_path):
    """Of one rank, this process."""
    dist.init_process_group(
        "nccl" if DEVICE == "cuda" else "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield init_device_mesh(DEVICE, (1,))
    dist.destroy_process_group()


# As of NCCL, which warns of a device that it was not told.
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("dim", [0, 1], ids=["batch", "heads"])
def test_dtensors(mesh, dim):
    inputs = drawn((2, H, 70, D), (2, H, 90, D), (2, H, 90, D), (1, H, 70, 90))
    bias_at = Shard(1) if dim else Replicate()

    def ours(q, k, v, bias):
        q, k, v = (DTensor.from_local(x, mesh, [Shard(dim)]) for x in (q, k, v))
        o = attention(q, k, v, bias=DTensor.from_local(bias, mesh, [bias_at]))
        assert o.placements == (Shard(dim),)
        return o.full_tensor()

    hold(ours, formula, inputs)


# --- examples ---


def ran(monkeypatch, name, arguments):
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # torch's compiler looks it up there
    spec.loader.exec_module(module)
    with tempfile.TemporaryDirectory() as folder:
        return module.main([*arguments.split(), "--device", DEVICE, "--output", folder])


@pytest.mark.parametrize(("name", "needs", "arguments"), [
    ("t5_finetune", "transformers", "--steps 8 --length 128 --batch 8 --against eager"),
    ("packed_alibi", None, "--steps 8 --room 1280 --width 96 --layers 2 --lr 1e-2 --against padded"),
    ("swin_digits", "sklearn", "--steps 12 --batch 16 --against sdpa"),
    ("pairformer", None, "--steps 8 --tokens 16 --batch 4 --against einsum"),
], ids=lambda x: x if x in ("t5_finetune", "packed_alibi", "swin_digits", "pairformer") else "")  # fmt: skip
def test_examples_learn_alike(monkeypatch, name, needs, arguments):
    """The losses of the same model in other code; those of later steps have drifted by rounding, to TF32 too."""
    if needs:
        pytest.importorskip(needs)
    ours, others = ran(monkeypatch, name, arguments).values()
    assert all(map(math.isfinite, ours))
    assert ours[-1] < ours[0]
    torch.testing.assert_close(ours[:2], others[:2], rtol=2e-3, atol=0.0)
    torch.testing.assert_close(ours, others, rtol=5e-2, atol=0.0)


# PyTorch's compiler warns of its own doings, differently in each release.
@pytest.mark.filterwarnings("default")
def test_from_flex(monkeypatch):
    apart = ran(monkeypatch, "from_flex", "--length 256")  # which itself asserts how far
    assert {"output", "gradient of table", "gradient of slopes"} <= apart.keys()


def test_long_context(tmp_path):
    """By itself: a process group of one rank."""
    script = EXAMPLES / "long_context.py"
    done = python(script, "--steps", "3", "--length", "512", "--output", tmp_path, timeout=600)
    assert f"bits a byte on 1 of {DEVICE}" in done.stdout
