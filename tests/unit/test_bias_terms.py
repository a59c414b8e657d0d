"""Bias terms by their rules and models: dense, in a backend's form, tile by tile, and their gradients."""

import pytest
import torch
from bias_helpers import (
    DOUBLE,
    HKV,
    INF,
    STARTS,
    B,
    H,
    by_tiles,
    check,
    expected,
    gradient_by_tiles,
    normal,
    of_transformers,
    positions,
)

from tilewise.bias import (
    RaggedBias,
    RelativeBias,
    alibi,
    alibi_slopes,
    log_buckets,
    low_rank_bias,
    relative_logits,
    swin_bias,
    t5_bias,
    t5_buckets,
)
from tilewise.bias.canonical import canonical, dense
from tilewise.spec.relative import add_gradient, hidden_band, skewed, tile
from tilewise.spec.score import Band


@pytest.mark.parametrize("reverse", [False, True], ids=["ascending", "descending"])
@pytest.mark.parametrize("outside", [0.0, -INF, "clamp"], ids=["zero", "hidden", "clamp"])
@pytest.mark.parametrize("on", ["query", "key", "all"])
def test_every_rule_axis_order_and_start(on, outside, reverse):
    M, N = 13, 18
    for starts in STARTS.values():
        for R, lo in ((6, -3), (40, -20)):
            rows = {"query": M, "key": N, "all": 1}[on]
            settings = {"lo": lo, "reverse": reverse, "outside": outside, "on": "key" if on == "key" else "query"}
            check(normal(B, H, rows, R), M, N, **settings, **starts)


@pytest.mark.parametrize("shape", [(B, H), (B, HKV), (B, 1), (1, H), (1, HKV), (1, 1)], ids=str)
@pytest.mark.parametrize("on", ["query", "key", "all"])
def test_broadcast_values(on, shape):
    M, N = 11, 7
    rows = {"query": M, "key": N, "all": 1}[on]
    for starts in (STARTS["default"], STARTS["tensor"]):
        for outside in (0.0, "clamp"):
            settings = {"lo": -4, "reverse": on == "key", "outside": outside, "on": "key" if on == "key" else "query"}
            check(normal(*shape, rows, 5), M, N, **settings, **starts)


@pytest.mark.parametrize(("M", "N", "R"), [(1, 17, 6), (17, 1, 6), (1, 1, 1), (23, 9, 1), (4, 30, 90), (30, 4, 3)])
def test_lengths_off_every_tile(M, N, R):
    for on, rows in (("query", M), ("key", N), ("query", 1)):
        for outside in (0.0, -INF, "clamp"):
            check(normal(1, H, rows, R), M, N, lo=-R // 2, outside=outside, on=on)


@pytest.mark.parametrize("on", ["query", "key"])
@pytest.mark.parametrize("outside", [0.0, -INF, "clamp"], ids=["zero", "hidden", "clamp"])
def test_each_kind_of_tile_occurs(on, outside):
    word = {0.0: "zero", -INF: "hidden", "clamp": "clamp"}[outside]
    check(normal(B, H, 40, 12), 40, 40, {"inside", "cut", word}, lo=-6, outside=outside, on=on)


def test_a_tile_inside_is_a_view():
    values = normal(B, H, 40, 30)
    relative = canonical(RelativeBias(values, lo=-15), B, H, H, 40, 40).query
    part = tile(relative, slice(10, 15), slice(12, 16))
    assert part.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()
    assert part.shape == (B, H, 5, 4)


def test_a_clamped_tile_is_one_column():
    values = normal(B, H, 40, 3)
    for on, shape in (("query", (B, H, 5, 1)), ("key", (B, H, 1, 4))):
        relative = canonical(RelativeBias(values, lo=-1, outside="clamp", on=on), B, H, H, 40, 40)
        assert tile(relative.query or relative.key, slice(30, 35), slice(4, 8)).shape == shape


def test_a_backend_cuts_heads_as_it_likes():
    """As the CPU's does: (batches, heads, group, rows, R)."""
    M, N = 9, 12
    values, starts = normal(B, H, M, 7), {"query_start": torch.tensor([2, 5])}
    relative = canonical(RelativeBias(values, lo=-3, **starts), B, H, HKV, M, N).query
    want = expected(values, M, N, lo=-3, **starts)
    batches = slice(1, 2)
    part = relative._replace(values=values.unflatten(1, (HKV, -1))[batches, 1:], shift=relative.shift[batches])
    found = tile(part, slice(2, 7), slice(3, 9))
    assert torch.equal(found, want.unflatten(1, (HKV, -1))[batches, 1:, :, 2:7, 3:9])
    sums = torch.zeros_like(part.values)
    add_gradient(sums, found, part, slice(2, 7), slice(3, 9))
    assert torch.equal(sums[..., 2:7, :].sum(-1) != 0, torch.ones(1, 1, H // HKV, 5, dtype=torch.bool))


@pytest.mark.parametrize("reverse", [False, True], ids=["ascending", "descending"])
@pytest.mark.parametrize("outside", [0.0, -INF, "clamp"], ids=["zero", "hidden", "clamp"])
def test_buckets(outside, reverse):
    M, N = 12, 15
    buckets = torch.tensor([3, 0, 0, 1, 4, 2, 2, 2, 1])
    for on, rows in (("query", M), ("key", N), ("query", 1)):
        for starts in STARTS.values():
            settings = {"lo": -4, "reverse": reverse, "outside": outside, "on": on, "buckets": buckets}
            check(normal(B, H, rows, 5), M, N, **settings, **starts)


def test_the_start_of_a_call_by_default_is_the_last_query_at_the_last_key():
    values = normal(1, 1, 1, 1)
    full = dense(RelativeBias(values, lo=0), 1, 1, 3, 5)[0, 0]
    assert torch.equal(full != 0, torch.eye(5, dtype=torch.bool)[2:])


# --- what outside=-inf hides by numbers alone ---


@pytest.mark.parametrize("reverse", [False, True])
def test_a_hidden_outside_is_a_band(reverse):
    M, N = 9, 14
    for on, rows in (("query", M), ("key", N), ("query", 1)):
        term = RelativeBias(torch.zeros(1, 1, rows, 6), lo=-2, reverse=reverse, outside=-INF, on=on, query_start=2)
        band = canonical(term, 1, 1, 1, M, N).band
        distance = torch.arange(N) - torch.arange(M)[:, None]
        visible = (distance >= band.lo) & (distance <= band.hi)
        assert torch.equal(dense(term, 1, 1, M, N)[0, 0] == 0, visible)


def test_bands_of_two_terms_meet():
    terms = (
        RelativeBias(torch.zeros(1, 1, 8, 9), lo=-4, outside=-INF),
        RelativeBias(torch.zeros(1, 1, 8, 9), lo=-2, outside=-INF, on="key"),
        RelativeBias(torch.zeros(1, 1, 1, 9), lo=-9, outside=-INF),
    )
    assert canonical(terms, 1, 1, 1, 8, 8).band == Band(-2, -1)


def test_no_band_of_what_only_the_device_knows():
    term = RelativeBias(torch.zeros(1, 1, 8, 9), lo=-4, outside=-INF, query_start=torch.tensor([3]))
    relative = canonical(term, 1, 1, 1, 8, 8).query
    assert hidden_band(relative) is None
    assert canonical(RelativeBias(torch.zeros(1, 1, 8, 9), lo=-4), 1, 1, 1, 8, 8).band == Band()


# --- T5, ALiBi, DeBERTa, Inkling, Swin ---


def test_t5_buckets_are_those_of_transformers():
    (theirs_of,) = of_transformers("t5", "_relative_position_bucket")
    distance = torch.arange(-3000, 3000)
    for buckets, most in ((32, 128), (32, 20), (8, 1000), (64, 2500)):
        for both in (False, True):
            theirs = theirs_of(distance, both, buckets, most)
            ours = t5_buckets(distance, buckets=buckets, bidirectional=both, max_distance=most)
            assert torch.equal(ours, theirs)
            assert (ours[distance <= -most] == ours[0]).all()
            assert (ours[distance >= most] == ours[-1]).all()


def test_t5_buckets_by_the_paper():
    distance = torch.tensor([0, 1, 7, 8, 15, 16, 127, 128, 5000, -1, -8, -128])
    found = t5_buckets(-distance, buckets=32, bidirectional=False)
    assert found.tolist() == [0, 1, 7, 8, 15, 16, 31, 31, 31, 0, 0, 0]
    found = t5_buckets(distance, buckets=32, bidirectional=True)
    assert found.tolist() == [0, 17, 23, 24, 25, 26, 31, 31, 31, 1, 8, 15]


@pytest.mark.parametrize("both", [False, True], ids=["decoder", "encoder"])
@pytest.mark.parametrize("starts", STARTS)
def test_t5(both, starts):
    M, N, buckets, most = 37, 61, 8, 12
    table = normal(buckets, H).requires_grad_()
    term = t5_bias(table, both, most, **STARTS[starts])
    index = t5_buckets(positions(M, N, **STARTS[starts]), buckets=buckets, bidirectional=both, max_distance=most)
    check_toeplitz(term, table, table[index[:, 0]].permute(0, 3, 1, 2), M, N)


@pytest.mark.parametrize("form", ["absolute", "signed"])
@pytest.mark.parametrize("shape", [(H,), (B, H), (1,)], ids=str)
@pytest.mark.parametrize("starts", STARTS)
def test_alibi(form, shape, starts):
    M, N = 19, 30
    slopes = normal(*shape).requires_grad_()
    distance = positions(M, N, **STARTS[starts])
    factor = slopes[..., None, None] if slopes.dim() == 2 else slopes[None, :, None, None]
    want = factor * (distance if form == "signed" else -distance.abs())
    check_toeplitz(alibi(slopes, form, **STARTS[starts]), slopes, want, M, N)


def check_toeplitz(term, parameter, want, M, N):
    ds = torch.randn(B, H, M, N, dtype=DOUBLE)
    want = want.expand(B, H, M, N)
    (grad,) = torch.autograd.grad(want, parameter, ds, retain_graph=True)
    full = dense(term, B, H, M, N)
    torch.testing.assert_close(full, want)
    torch.testing.assert_close(torch.autograd.grad(full, parameter, ds)[0], grad)
    relative = canonical(term, B, H, HKV, M, N).toeplitz
    vector = relative.values
    relative = relative._replace(values=vector.detach())
    torch.testing.assert_close(by_tiles(relative, M, N)[0], want.detach()[:, : vector.shape[1]])
    (found,) = torch.autograd.grad(vector, parameter, gradient_by_tiles(relative, ds))
    torch.testing.assert_close(found, grad)


def test_alibi_slopes():
    assert torch.equal(alibi_slopes(8), 2.0 ** -torch.arange(1, 9))
    assert torch.allclose(alibi_slopes(3), torch.tensor([2**-4.0, 2**-8.0, 2**-2.0]))
    build, _ = of_transformers("bloom", "build_alibi_tensor", "_get_alibi_slopes")
    for heads in (1, 2, 6, 12, 16, 20, 71, 112):
        theirs = build(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
        torch.testing.assert_close(alibi_slopes(heads), theirs)


def test_signed_alibi_is_blooms_but_for_a_constant_a_row():
    build, _ = of_transformers("bloom", "build_alibi_tensor", "_get_alibi_slopes")
    theirs = build(torch.ones(1, 9), H, torch.float32).view(1, H, 1, 9)
    apart = dense(alibi(alibi_slopes(H), "signed"), 1, H, 9, 9) - theirs
    torch.testing.assert_close(apart, apart[..., :1].expand_as(apart))


def test_deberta():
    """Both of its biases, beside the model's own function over a matrix of distances."""
    build, buckets_of = of_transformers("deberta_v2", "build_relative_position", "make_log_bucket_position")
    span, most, M = 8, 24, 70
    ids = build(torch.empty(1, M, 1), torch.empty(1, M, 1), span, most)[0]
    d = torch.arange(-most, most)
    buckets = (log_buckets(d, buckets=span, max_distance=most) + span).clamp(0, 2 * span - 1)
    settings = {"lo": -most, "reverse": True, "outside": "clamp", "buckets": buckets}
    c2p, p2c = normal(1, H, M, 2 * span), normal(1, H, M, 2 * span)
    theirs = c2p.gather(-1, (ids + span).clamp(0, 2 * span - 1).expand(1, H, M, M))
    assert torch.equal(dense(RelativeBias(c2p, **settings), 1, H, M, M), theirs)
    theirs = p2c.gather(-1, (-ids + span).clamp(0, 2 * span - 1).expand(1, H, M, M)).mT
    assert torch.equal(dense(RelativeBias(p2c, on="key", **settings), 1, H, M, M), theirs)
    d = torch.arange(-2000, 2000)
    for span, most in ((256, 512), (16, 100)):
        theirs = buckets_of(d, span, most).long()
        assert torch.equal(log_buckets(d, buckets=span, max_distance=most), theirs)


@pytest.mark.parametrize(("M", "N", "R"), [(9, 9, 4), (16, 16, 5), (8, 21, 30), (1, 12, 6)])
def test_inkling(M, N, R):
    """Entry r is for the key r positions before; nothing from distance R on, nor for keys after the query."""
    states, proj = normal(B, M, H, 3).transpose(1, 2).requires_grad_(), normal(3, R).requires_grad_()
    distance = (torch.arange(M) + N - M)[:, None] - torch.arange(N)
    index = distance.clamp(0, R - 1).expand(B, H, M, N)
    want = (states @ proj).gather(-1, index).masked_fill((distance < 0) | (distance >= R), 0.0)
    plain = dense(RelativeBias(states @ proj, lo=0, reverse=True), B, H, M, N)
    torch.testing.assert_close(plain, want)
    check_logits(relative_logits(states, proj, lo=0, reverse=True), states, proj, want)


def test_inkling_is_transformers():
    (logits,) = of_transformers("inkling", "InklingRelativeLogits")
    layer = logits(3, 7).double()
    torch.nn.init.normal_(layer.proj)
    states = normal(B, 12, H, 3)
    theirs = layer(states, torch.arange(12), torch.arange(12))
    term = relative_logits(states.transpose(1, 2), layer.proj, lo=0, reverse=True)
    torch.testing.assert_close(dense(term, B, H, 12, 12), theirs)


def check_logits(term, states, proj, want):
    B, H, M, N = want.shape
    ds = torch.randn_like(want)
    full = dense(term, B, H, M, N)
    torch.testing.assert_close(full, want)
    for ours, theirs in zip(
        torch.autograd.grad(full, (states, proj), ds, retain_graph=True),
        torch.autograd.grad(want, (states, proj), ds, retain_graph=True),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, DOUBLE], ids=str)
@pytest.mark.parametrize("outside", [0.0, -INF, "clamp"], ids=["zero", "hidden", "clamp"])
def test_logits_lie_where_tma_reads_them(outside, dtype):
    for R in (5, 16, 17):
        for M in (16, 19):
            states = normal(B, M, H, 4, dtype=dtype).transpose(1, 2)
            proj = normal(*(H, 4, R)[M % 2 :], dtype=dtype)
            for reverse in (False, True):
                term = relative_logits(states, proj, lo=-2, reverse=reverse, outside=outside)
                assert not term.reverse
                view = skewed(term.values)
                assert all(stride * dtype.itemsize % 16 == 0 for stride in view.stride()[:-1])
                assert term.values.stride(3) == 1
                assert outside == -INF or term.values.shape[3] < R + 8
                plain = RelativeBias(states @ proj, lo=-2, reverse=reverse, outside=outside)
                torch.testing.assert_close(dense(term, B, H, M, 21).to(dtype), dense(plain, B, H, M, 21).to(dtype))


def test_logits_have_the_gradients_of_the_product():
    for outside in (0.0, "clamp"):
        for reverse in (False, True):
            states, proj = normal(B, H, 7, 3).requires_grad_(), normal(H, 3, 6).requires_grad_()
            settings = {"lo": -2, "reverse": reverse, "outside": outside}
            want = expected(states @ proj, 7, 11, **settings)
            check_logits(relative_logits(states, proj, **settings), states, proj, want)


def test_a_sheared_view_holds_the_bias_and_stays_inside():
    for values in (normal(B, H, 6, 4), normal(B, H, 6, 9)[..., 2:6], normal(B, 6, H, 4).transpose(1, 2)):
        view = skewed(values)
        assert view.shape == (B, H, 6, 9)
        for r in range(6):
            assert torch.equal(view[:, :, r, r : r + 4], values[:, :, r])
    with pytest.raises(ValueError, match=r"^values: expected rows of contiguous elements, got strides \(0, 1\)"):
        skewed(normal(1, 1, 1, 4).expand(1, 1, 6, 4))


def test_swin():
    (theirs,) = of_transformers("swin", "SwinRelativePositionBias")
    for window in ((7, 7), (2, 3)):
        layer = theirs(H, window)
        torch.nn.init.normal_(layer.relative_position_bias_table)
        table = layer.relative_position_bias_table
        assert torch.equal(swin_bias(table, window), layer())
        swin_bias(table.bfloat16(), window).sum().backward()
        assert table.grad.sum() == H * (window[0] * window[1]) ** 2


# --- 16 bits ---


def test_a_gradient_of_a_16_bit_table_is_summed_in_float32():
    """Within one rounding of the sum in float64; summed in bfloat16, as by indexing outside, it is far off."""
    M = N = 256
    ds = torch.rand(1, H, M, N) + 0.5
    parameters = {
        "t5": (lambda x: t5_bias(x, True, 64), normal(16, H, dtype=torch.bfloat16)),
        "alibi": (alibi, alibi_slopes(H).bfloat16()),
        "clamp": (lambda x: RelativeBias(x, lo=-8, outside="clamp"), normal(1, H, 1, 17, dtype=torch.bfloat16)),
        "starts": (
            lambda x: RelativeBias(x, lo=-8, outside="clamp", query_start=torch.tensor(3)),
            normal(1, H, 1, 17, dtype=torch.bfloat16),
        ),
    }
    for name, (make, parameter) in parameters.items():
        parameter.requires_grad_()
        vector = canonical(make(parameter), 1, H, H, M, N).toeplitz
        assert vector.values.dtype == torch.float32
        sums = gradient_by_tiles(vector._replace(values=vector.values.detach()), ds, 64, 64)
        (found,) = torch.autograd.grad(vector.values, parameter, sums)
        (exact,) = torch.autograd.grad(dense(make(parameter), 1, H, M, N), parameter, ds.double())
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, exact), name  # both rounded once, from sums that agree to 1e-6


def test_values_of_16_bits_stay_so_in_tiles():
    values = normal(B, H, 20, 8, dtype=torch.bfloat16)
    relative = canonical(RelativeBias(values, lo=-4, reverse=True), B, H, H, 20, 20).query
    assert tile(relative, slice(0, 5), slice(0, 5)).dtype == torch.bfloat16
    gathered = relative._replace(shift=torch.tensor([1, 2]))
    assert tile(gathered, slice(0, 5), slice(0, 5)).dtype == torch.bfloat16
    sums = torch.zeros(B, H, 20, 8)
    add_gradient(sums, torch.ones(B, H, 5, 5), relative, slice(0, 5), slice(0, 5))
    assert sums.sum() == B * H * (25 - 1)  # the corner at distance 4 is outside


@pytest.mark.parametrize(
    "term",
    [
        RelativeBias(normal(1, H, 5, 9), lo=-4, outside="clamp", query_start=torch.tensor([3])),
        t5_bias(normal(32, H), True),
        alibi(normal(H), "signed"),
        low_rank_bias(normal(1, H, 5, 3), normal(1, H, 7, 3)),
        RaggedBias(normal(H, 20), torch.tensor([0, 20])),
    ],
    ids=lambda term: type(term).__name__,
)
def test_a_file_with_a_term(tmp_path, term):
    """torch.load allows it by default, as it allows tensors."""
    torch.save(term, tmp_path / "term.pt")
    found = torch.load(tmp_path / "term.pt", weights_only=True)
    assert type(found) is type(term)
    for name, x in vars(term).items():
        other = getattr(found, name)
        assert torch.equal(x, other) if isinstance(x, torch.Tensor) else x == other, name
