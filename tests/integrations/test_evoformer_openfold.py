"""OpenFold's attention: `openfold_attention` against its formula, and in the packages that have it."""

from functools import partial

import pytest
import torch
from structure_helpers import DTYPES, check, check_rounded, tensors, value_and_gradients, with_nan

from tilewise.integrations.evoformer import openfold_attention

H, Q, K, D, DV = 2, 5, 7, 8, 6


@pytest.fixture(scope="module", autouse=True)
def registered():
    """In the place of the one that imports transformers, which is not needed here."""


def _attention(query, key, value, biases):
    """OpenFold's, in one dtype."""
    a = query @ key.mT
    for b in biases:
        a = a + b
    return a.softmax(-1) @ value


def inputs(lead, *biases, dtype=torch.float64):
    return tensors((*lead, H, Q, D), (*lead, H, K, D), (*lead, H, K, DV), *biases, dtype=dtype)


def mask_bias(shape, hidden=-1e9, dtype=torch.float64):
    """Key 0 is visible everywhere."""
    seen = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.7
    seen[..., 0] = True
    return torch.zeros(shape, dtype=dtype).masked_fill(~seen, hidden)


LEADS = {  # leading dimensions, shapes of the pair bias and of the mask's
    "none": ((), (H, Q, K), (1, 1, K)),
    "one": ((3,), (H, Q, K), (3, 1, 1, K)),
    "rows": ((2, 3), (2, 1, H, Q, K), (2, 3, 1, 1, K)),
    "one structure": ((1, 3), (1, 1, H, Q, K), (1, 3, 1, 1, K)),
    "templates": ((2, 3, 2), (2, 1, 1, H, Q, K), (2, 3, 2, 1, 1, K)),
    "shared": ((2, 3), (H, 1, K), (1, K)),
}


@pytest.mark.parametrize("mask_biases", [False, True])
@pytest.mark.parametrize("lead", LEADS)
def test_outputs_and_gradients(lead, mask_biases):
    lead, pair, keys = LEADS[lead]
    given, mask = inputs(lead, pair), mask_bias(keys)

    def call(function):
        return lambda q, k, v, b: function(q, k, v, [mask, b])

    ours = value_and_gradients(call(partial(openfold_attention, mask_biases=mask_biases)), given)
    check(ours, value_and_gradients(call(_attention), given))


@pytest.mark.parametrize("biases", [0, 1, 3])
def test_any_number_of_biases(biases):
    given = inputs((2, 3), *[(2, 1, H, Q, K), (2, 3, 1, 1, K), (1, 1, H, 1, K)][:biases])
    ours = value_and_gradients(lambda q, k, v, *b: openfold_attention(q, k, v, b, True), given)
    check(ours, value_and_gradients(lambda q, k, v, *b: _attention(q, k, v, b), given))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [-1e4, -1e9, -torch.inf])
def test_masks_in_any_dtype(hidden, dtype):
    """-1e4 is -9,984 in bfloat16."""
    given, mask = inputs((2,), (1, H, Q, K), dtype=dtype), mask_bias((2, 1, 1, K), hidden).to(dtype)
    call = partial(openfold_attention, mask_biases=True)
    ours = value_and_gradients(lambda q, k, v, b: call(q, k, v, [b, mask]), given)
    exact = value_and_gradients(lambda q, k, v, b: _attention(q, k, v, [b, mask]), [x.double() for x in given])
    check_rounded(ours, exact, dtype)


def test_hidden_keys_have_no_effect():
    """Nor do rows that see nothing; without mask_biases they are OpenFold's mean of the values."""
    q, k, v = inputs((2,))
    mask = mask_bias((2, 1, 1, K))
    mask[0, ..., 3], mask[1] = -1e9, -1e9
    planted = with_nan(v[:1], -2, 3)
    call = partial(openfold_attention, mask_biases=True)
    assert not call(q, k, v, [mask])[1].any()
    assert torch.equal(call(q[:1], k[:1], planted, [mask[:1]]), call(q[:1], k[:1], v[:1], [mask[:1]]))
    check([openfold_attention(q, k, v, [mask])[1]], [_attention(q, k, v, [mask])[1]], 1e-6)


def test_what_is_a_mask():
    """By its shape, and a trained bias never."""
    q, k, v, keys, heads = inputs((2,), (2, 1, 1, K), (2, H, 1, K))
    call = partial(openfold_attention, mask_biases=True)
    for biases in ([keys.requires_grad_()], [heads], [keys.expand(2, 1, Q, K).detach()]):
        check([call(q, k, v, biases)], [_attention(q, k, v, biases)])
    masks = [mask_bias((2, 1, 1, K)), mask_bias((1, K)).roll(1, -1).index_fill(-1, torch.tensor(0), 0.0)]
    check([call(q, k, v, masks)], [_attention(q, k, v, masks)])


def test_compiled():
    q, k, v, pair = inputs((2, 3), (2, 1, H, Q, K))
    call = lambda *x: openfold_attention(*x[:3], x[3:], mask_biases=True)  # noqa: E731
    given = (q, k, v, mask_bias((2, 3, 1, 1, K)), pair)
    torch.testing.assert_close(torch.compile(call, fullgraph=True, backend="aot_eager")(*given), call(*given))


ERRORS = {
    "biases: expected a list of tensors, got Tensor": (0, {}),
    "biases[0]: expected a torch.Tensor, got NoneType": ([None], {}),
    "biases[0]: with mask_biases=True a bias of shape (2, 1, 1, 7) must be 0 or at most -1e4, and holds other numbers; "
    "mask_biases=False adds it as it is": ([torch.full((2, 1, 1, K), -3.0)], {"mask_biases": True}),
    "mask_biases: expected a bool, got 1": ([], {"mask_biases": 1}),
    "use_high_precision: expected a bool, got None": ([], {"use_high_precision": None}),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors(message):
    q, k, v = inputs((2,))
    biases, options = ERRORS[message]
    with pytest.raises((TypeError, ValueError)) as error:
        openfold_attention(q, k, v, q if biases == 0 else biases, **options)
    assert str(error.value).startswith(message)


# --- in the packages, where they are installed ---

PACKAGES = {  # the module that has the function, and the one of TriangleAttention
    "openfold.model.primitives": "openfold.model.triangular_attention",
    "openfold3.core.model.primitives.attention": "openfold3.core.model.layers.triangular_attention",
    "boltz.model.layers.triangular_attention.primitives": "boltz.model.layers.triangular_attention.attention",
    "protenix.model.triangular.layers": "protenix.model.triangular.triangular",
}


@pytest.mark.parametrize("home", PACKAGES)
@pytest.mark.filterwarnings("ignore")
def test_in_the_packages(home, monkeypatch):
    """Their triangle attention with random weights: the last ones are made as zeros."""
    monkeypatch.setenv("LAYERNORM_TYPE", "torch")  # Protenix compiles one for GPUs otherwise
    home, made = pytest.importorskip(home), pytest.importorskip(PACKAGES[home])
    torch.manual_seed(0)
    model = made.TriangleAttention(16, 8, 2)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    x = torch.randn(2, 20, 20, 16, requires_grad=True)
    mask = (torch.rand(2, 20, 20) < 0.8).float()
    mask[..., 0] = 1
    leaves = [x, *model.parameters()]

    def run():
        o = model(x, mask=mask)
        return o, *torch.autograd.grad(o.square().sum(), leaves)

    expected, calls = run(), []

    def counted(*given, **named):
        calls.append(len(given))
        return openfold_attention(*given, **named, mask_biases=True)

    monkeypatch.setattr(home, "_attention", counted)
    found = run()
    assert calls
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * b.abs().max().item())
