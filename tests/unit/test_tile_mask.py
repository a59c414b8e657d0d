"""Masks by tiles: what the constructors make, and calls with them, against dense bool masks."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import Case, tensors
from memory_helpers import leftovers
from tile_mask_helpers import PATTERNS, check, check_wrong, gradients_of, pattern
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, or_masks

import tilewise
from tilewise import TileMask, api, attention, dynamic_mask
from tilewise.backends.cpu import tiled
from tilewise.masks import block_sparse as tile_mask
from tilewise.masks.block_sparse import Kept
from tilewise.spec.block_mask import FULL, PARTIAL, TileTensors
from tilewise.spec.problem import Problem
from tilewise.spec.score import Band, Score

USUAL = Case(B=2, H=4, Hkv=2, M=239, N=239, D=16)
FEW = replace(USUAL, M=127, N=239)
SQUARE = ("documents", "prefix", "tree")  # of one length


@pytest.fixture
def small_tiles(monkeypatch):
    """Of the CPU, so that several are hidden."""
    monkeypatch.setattr(tiled, "BLOCK_M", 64)
    monkeypatch.setattr(tiled, "MAX_BLOCK_M", 64)
    monkeypatch.setattr(tiled, "BLOCK_N", 64)


def of_lengths(name, M, N):
    return replace(USUAL, M=N if name in SQUARE else M, N=N)


# --- what is made ---


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize(("M", "N"), [(1, 239), (127, 129), (239, 1), (129, 300)])
@pytest.mark.parametrize("block", [64, (64, 192)])
def test_the_dense_mask_is_the_pattern(name, M, N, block):
    found, dense = pattern(name, of_lengths(name, M, N), block)
    assert torch.equal(found.validate().dense(), dense.expand_as(found.dense()))


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("N", [192, 239])
def test_routes_give_equal_lists(name, N):
    """A constructor; a bool mask of all tiles; a function of indices; and FlexAttention's lists of it."""
    case = replace(USUAL, M=N, N=N)
    found, dense = pattern(name, case)

    def seen(b, h, q, kv):
        return dense[b, h, q, kv]

    B, H = dense.shape[:2]
    every = torch.ones(1, 1, -(-N // 64), -(-N // 64), dtype=torch.bool)
    block_mask = create_block_mask(seen, B, H, N, N, device="cpu", BLOCK_SIZE=64)
    routes = [
        TileMask.from_tiles(every, N, N, block=64, mask=dense),
        TileMask.from_mask_mod(seen, N, N, batch=B, heads=H, block=64),
        TileMask.from_block_mask(block_mask, validate=True),
    ]
    for route in routes:
        assert torch.equal(route.dense(), found.dense())
        if name in ("dilated", "strided") and N % 64:
            continue  # tiles of a diagonal are alike, also where one reaches past an end
        for by_keys in (False, True):
            for one, other in zip(found.lists(by_keys), route.lists(by_keys), strict=True):
                assert torch.equal(one, other)
    assert found.lists(True) is found.lists(True)


def test_lists_name_the_tiles():
    found, dense = pattern("bits", USUAL)
    full, full_at, partial, partial_at = found.lists()
    tiles = torch.zeros(*full.shape, 4, dtype=torch.int64)
    for b, h, m in torch.cartesian_prod(*map(torch.arange, full.shape)):
        tiles[b, h, m, full_at[b, h, m, : full[b, h, m]].long()] = 1
        tiles[b, h, m, partial_at[b, h, m, : partial[b, h, m]].long()] += 2
    padded = torch.nn.functional.pad(dense, (0, 17, 0, 17)).unflatten(3, (4, 64)).unflatten(2, (4, 64))
    some = padded.any(-1).any(3)
    assert torch.equal(tiles > 0, some)
    assert (tiles < 3).all()
    back = found.lists(True)
    assert back.partial_counts.sum() == partial.sum()


def test_long_documents_make_no_matrix():
    """131,072 tokens: the tensors are of the tokens and the tiles."""
    ids = torch.arange(131072) // 3000
    found = TileMask.documents(ids)
    assert sum(x.nbytes for x in found.tensors if x is not None) < 8 << 20
    assert found.shape == (1, 1, 1024, 1024)
    row = found.tensors.rows_visible(slice(70000, 70001), 131072)[0, 0, 0]
    assert torch.equal(row, ids == ids[70000])


def test_tiles_of_a_diagonal_share_their_bits():
    found = TileMask.strided(4096, 4096, 100)
    assert found.tensors.bits.shape[0] == 63
    assert (found.tensors.tiles >= PARTIAL).sum() > 900


def test_a_block_mask_with_wrong_lists():
    """A block twice, or out of range: an error where it is asked for, else it counts once, or not."""
    noop = lambda b, h, q, kv: (q >= 0) & (kv >= 0)  # noqa: E731
    count = torch.tensor([[[2, 1]]], dtype=torch.int32)

    def block_mask(rows, **more):
        indices = torch.tensor([[rows]], dtype=torch.int32)
        lists = {"full_kv_num_blocks": None, "full_kv_indices": None, **more}
        return BlockMask((128, 128), count, indices, **lists, q_num_blocks=None, q_indices=None,
                         full_q_num_blocks=None, full_q_indices=None, BLOCK_SIZE=(64, 64), mask_mod=noop)  # fmt: skip

    for rows, message in (([[1, 1], [0, 7]], "names a block twice"), ([[0, 5], [-3, 0]], "names a block out of range")):
        with pytest.raises(ValueError, match=f"^block_mask: kv_indices {message}"):
            TileMask.from_block_mask(block_mask(rows), validate=True)
    assert TileMask.from_block_mask(block_mask([[1, 1], [0, 7]])).lists().full_counts.tolist() == [[[1, 1]]]
    assert TileMask.from_block_mask(block_mask([[0, 5], [-3, 0]])).lists().full_counts.tolist() == [[[1, 0]]]
    both = block_mask([[0, 1], [1, 0]], full_kv_num_blocks=count, full_kv_indices=torch.tensor([[[[0, 1], [0, 0]]]]))
    with pytest.raises(ValueError, match=r"^block_mask: a block is in full_kv_indices and in kv_indices"):
        TileMask.from_block_mask(both, validate=True)


def blocks_of(block, M=239, N=200):
    """A BlockMask of random blocks, full, partial and empty, whose mask_mod hides nothing else; and the dense mask."""
    torch.manual_seed(0)
    rows, cols = -(-M // block[0]), -(-N // block[1])
    kinds = torch.randint(0, 3, (2, 4, rows, cols))
    lists = [(kinds == kind).sort(dim=-1, descending=True, stable=True) for kind in (1, 2)]
    some = torch.rand(M, N) < 0.9
    mask = BlockMask.from_kv_blocks(
        *(x for found in lists for x in (found.values.sum(-1, dtype=torch.int32), found.indices.int())),
        BLOCK_SIZE=block, mask_mod=lambda b, h, q, kv: some[q, kv], seq_lengths=(M, N),
    )  # fmt: skip
    whole = kinds[:, :, torch.arange(M) // block[0]][..., torch.arange(N) // block[1]]
    return mask, (whole == 2) | ((whole == 1) & some)


BLOCK_SIZES = {
    (16, 16): (64, 64), (32, 16): (64, 64), (48, 100): (64, 64), (128, 32): (128, 64), (200, 64): (128, 64),
    (64, 1 << 30): (64, 128),
}  # fmt: skip


@pytest.mark.parametrize("block", BLOCK_SIZES)
def test_blocks_of_any_size(block):
    mask, dense = blocks_of(block)
    found = TileMask.from_block_mask(mask, validate=True).validate()
    assert found.block == BLOCK_SIZES[block]
    assert torch.equal(found.dense(), dense)


def test_full_small_blocks_make_a_full_tile():
    mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 192, 192, device="cpu", BLOCK_SIZE=16)
    found = TileMask.from_block_mask(mask)
    assert torch.equal(found.tensors.tiles[0, 0].sign(), torch.ones(3, 3, dtype=torch.int32).tril())
    assert torch.equal(found.tensors.tiles[0, 0] == FULL, torch.ones(3, 3).tril(-1) > 0)


@pytest.mark.parametrize("block", [(16, 16), (64, 64), (100, 128)])
def test_a_block_mask_compiles_in_one_graph(block):
    mask, dense = blocks_of(block)
    q, k, v = (torch.randn(2, 4, n, 16, requires_grad=True) for n in (239, 200, 200))
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, mask=mask), fullgraph=True, backend="aot_eager")
    do = torch.randn(2, 4, 239, 16)
    found = [(o, *torch.autograd.grad(o, (q, k, v), do)) for o in (compiled(q, k, v), attention(q, k, v, mask=dense))]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_numbers_that_are_no_tiles_are_found():
    found, _ = pattern("bits", USUAL)
    for number in (-1, 10**6):
        tiles = found.tensors.tiles.clone()
        tiles[0, 0, 1, 1] = number
        with pytest.raises(ValueError, match=r"^TileMask.tiles: expected 0 to "):
            TileMask(239, 239, found.tensors._replace(tiles=tiles)).validate()
    found, _ = pattern("window", USUAL)
    wrong = found.tensors._replace(ends=found.tensors.ends + 200)
    with pytest.raises(ValueError, match=r"^TileMask: an interval is not within the 239 queries"):
        TileMask(239, 239, wrong).validate()
    shown = found.tensors._replace(tiles=torch.full_like(found.tensors.tiles, FULL))
    with pytest.raises(ValueError, match=r"^TileMask.tiles: are not those of its intervals"):
        TileMask(239, 239, shown).validate()


# --- calls ---


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize(("M", "N"), [(1, 239), (127, 129), (239, 127), (129, 1), (239, 239)])
def test_lengths(small_tiles, name, M, N):
    check(of_lengths(name, M, N), name, "cpu", 64 if M % 2 else (128, 64))


@pytest.mark.parametrize("name", ["documents", "window", "blocks", "bits"])
@pytest.mark.parametrize(
    "more",
    [
        {"causal": True, "bias": "bhmn"},
        {"window": (50, 10), "bias": "11mn", "grads": "b"},
        {"bias": "1k1n", "sink": "h", "softcap": 9.0},
        {"bias": "bhm1", "dropout_p": 0.2, "grads": "qkv"},
        {"sink": "bhm", "layout": "heads_last"},
    ],
    ids=str,
)
def test_beside_other_terms(small_tiles, name, more):
    check(replace(USUAL, M=150, N=150, **more), name, "cpu")


@pytest.mark.parametrize("block", [64, (64, 128)], ids=str)
@pytest.mark.parametrize("name", PATTERNS)
def test_tiles_of_the_mask(name, block):
    """Without `small_tiles` those of the CPU are the mask's, whose states are read at once; NaN in what nobody sees."""
    hidden = name in ("bits", "documents")
    check(replace(USUAL, planted=math.nan if hidden else None, bias="1hmn"), name, "cpu", block)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", ["documents", "bits"])
@pytest.mark.parametrize("bias", [None, "11mn"])
def test_hidden_nan(small_tiles, name, backend, bias):
    check(replace(USUAL, planted=math.nan, bias=bias, dtype=torch.float32), name, backend)


def test_hidden_tiles_are_not_computed(small_tiles, monkeypatch):
    """Nor is their part of the bias's gradient."""
    made = []
    score_tile = tiled._Heads.score_tile
    monkeypatch.setattr(
        tiled._Heads, "score_tile", lambda self, q, tile: made.append(tile) or score_tile(self, q, tile)
    )
    tiles = torch.eye(4, dtype=torch.bool)[None, None]
    q, k, v = (torch.randn(1, 1, 256, 8, requires_grad=True) for _ in range(3))
    bias = torch.randn(256, 256, requires_grad=True)
    attention(q, k, v, bias=bias, mask=TileMask.from_tiles(tiles, 256, 256, block=64)).sum().backward()
    assert len(made) == 8
    assert all(tile.visible is None for tile in made)
    assert bias.grad.unflatten(1, (4, 64)).unflatten(0, (4, 64)).any(3).any(1).sum() == 4


def test_gradcheck(small_tiles):
    found, _ = pattern("bits", Case(B=1, H=2, Hkv=1, M=66, N=70), 64)
    q, k, v = (torch.randn(1, h, n, 3, dtype=torch.float64, requires_grad=True) for h, n in ((2, 66), (1, 70), (1, 70)))
    bias = torch.randn(1, 2, 1, 70, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda q, k, v, bias: attention(q, k, v, bias=bias, mask=found), (q, k, v, bias),
        fast_mode=True,
    )  # fmt: skip


def test_a_block_mask_as_it_is():
    """Its TileMask is made once, and shared by calls."""
    asked = []

    def seen(b, h, q, kv):
        asked.append(1)
        return (q - kv).abs() < 70 + h

    block_mask = create_block_mask(seen, 1, 4, 239, 239, device="cpu", BLOCK_SIZE=(128, 64))
    made = TileMask.from_block_mask(block_mask)
    found = gradients_of(USUAL, block_mask, "cpu")
    before = len(asked)
    assert all(torch.equal(x, y) for x, y in zip(found, gradients_of(USUAL, block_mask, "cpu"), strict=True))
    assert len(asked) == before
    assert all(torch.equal(x, y) for x, y in zip(found, gradients_of(USUAL, made, "cpu"), strict=True))


@pytest.mark.parametrize("name", ["documents", "tree", "bits"])
def test_compiles_in_one_graph(name):
    found, dense = pattern(name, USUAL)
    x = tensors(USUAL)
    q, k, v = (y.float().requires_grad_() for y in x[:3])
    compiled = torch.compile(lambda q, k, v, mask: attention(q, k, v, mask=mask), fullgraph=True, backend="aot_eager")
    results = []
    for function, mask in ((compiled, found), (lambda q, k, v, mask: attention(q, k, v, mask=mask), dense)):
        o = function(q, k, v, mask)
        results.append((o, *torch.autograd.grad(o.square().sum(), (q, k, v))))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_wrong_numbers_reach_no_memory(small_tiles, backend):
    check_wrong(replace(USUAL, dtype=torch.float32, bias="11mn"), backend)


def test_the_operator():
    found, _ = pattern("documents", Case(B=1, H=2, M=70, N=70))
    q = torch.randn(1, 2, 70, 4)
    names = [x.name for x in torch.ops.tilewise.attention.default._schema.arguments]
    values = {"q": q, "k": q, "v": q, "scale": 1.0, "deterministic": False, "exact": False, "backend": "auto"}
    values |= {"dropout": 0, "query_rule": "", "key_rule": "", "packed_forms": "", "toeplitz_rule": ""}
    values |= {"first_query": 0, "first_key": 0, "first_head": 0, "statistics": 0}
    values |= dict(zip(TileTensors._fields, found.tensors, strict=True))
    arguments = [values.get(name) for name in names]
    torch.library.opcheck(torch.ops.tilewise.attention.default, arguments)


# --- errors, and words ---


def test_errors():
    q = torch.randn(2, 4, 239, 16)
    found, dense = pattern("bits", USUAL)
    for mask, message in (
        (pattern("window", FEW)[0], r"mask: the TileMask is for 127 queries and 239 keys, the call has 239 and 239"),
        (TileMask.from_tiles(torch.ones(3, 1, 4, 4, dtype=torch.bool), 239, 239, block=64),
         r"mask: a TileMask of shape \(3, 1, 4, 4\) does not fit \(2\|1, 4\|1, 4, 4\), tiles of 64 x 64"),
        (TileMask(239, 239, found.tensors._replace(tiles=found.tensors.tiles[..., :3].contiguous())), r"does not fit"),
        (TileMask(239, 239, found.tensors._replace(tiles=found.tensors.tiles.long())), r"must be contiguous int32"),
        (found.to("meta"), r"mask: TileMask.tiles must be on q's device cpu, got meta"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            attention(q, q, q, mask=mask)
    with pytest.raises(TypeError, match=r"^mask: expected a torch.Tensor, got list"):
        attention(q, q, q, mask=[1])
    tiles = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    for arguments, more, message in (
        ((tiles, 239, 239), {"block": 48}, "block: expected multiples of 64, got 48"),
        ((tiles, 239, 239), {"block": 128}, "tiles: expected shape"),
        ((tiles, 239, 239), {"block": 64, "mask": dense[..., 1:]}, "mask: shape"),
        ((tiles, 0, 239), {"block": 64}, "queries: must be 1 or more, got 0"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            TileMask.from_tiles(*arguments, **more)
    for arguments, message in (
        ((tiles.int(), 239, 239), "tiles: dtype must be bool"),
        ((3, 1, 1), "tiles: expected a"),
    ):
        with pytest.raises(TypeError, match=f"^{message}"):
            TileMask.from_tiles(*arguments, block=64)
    for window, message in (((-1, 0), "window: left width must be 0 or more"), ((1, -2), "window: right width")):
        with pytest.raises(ValueError, match=f"^{message}"):
            TileMask.sliding_window(239, 239, window)
    with pytest.raises(TypeError, match=r"^window: expected a pair \(left, right\) of int or None, got 3"):
        TileMask.sliding_window(239, 239, 3)
    with pytest.raises(ValueError, match=r"^global_tokens: must be 0 or more, got -1"):
        TileMask.sliding_window(239, 239, (1, 1), global_tokens=-1)
    for name, value in (("batch", 0), ("heads", -1)):
        with pytest.raises(ValueError, match=f"^{name}: must be 1 or more, got {value}"):
            TileMask.from_mask_mod(lambda b, h, q, kv: q >= kv, 4, 4, **{name: value})
    with pytest.raises(TypeError, match=r"^ids: dtype must be int32 or int64, got torch.float32"):
        TileMask.documents(torch.zeros(4))
    with pytest.raises(TypeError, match=r"^mask_mod: must return a bool tensor, got torch.int64"):
        TileMask.from_mask_mod(lambda b, h, q, kv: q - kv, 4, 4)
    with pytest.raises(TypeError, match=r"^block_mask: expected FlexAttention's BlockMask, got Tensor"):
        TileMask.from_block_mask(tiles)


@pytest.mark.parametrize("name", PATTERNS)
def test_states_are_those_of_each_tile(name):
    x = pattern(name, USUAL)[0].tensors
    found = x.states(x.tiles)
    assert found == [[x.state(x.tiles[..., m, n]) for n in range(4)] for m in range(4)]


@pytest.mark.parametrize(("shape", "heads"), [((1, 1), 64), ((2, 1), 32), ((1, 32), 1), ((2, 32), 1)])
def test_tiles_of_the_cpu_are_those_of_the_mask(shape, heads):
    """A larger one is hidden less often; heads share one that is hidden from all or none of them."""
    q = torch.randn(2, 32, 600, 16)
    found = TileMask.from_tiles(torch.ones(*shape, 5, 10, dtype=torch.bool), 600, 600, block=(128, 64))
    problem = Problem.of(q, q, q, None, None, None, None, None, None, found.tensors, Score(1.0, None, Band()))
    assert tiled.tiling(problem) == (min(heads, 32 * torch.get_num_threads()), 128, 64)


def test_packed_batches_decline_it():
    q, cu = torch.randn(239, 4, 16), torch.tensor([0, 100, 239])
    with pytest.raises(TypeError, match=r"^mask: varlen_attention takes no TileMask yet"):
        tilewise.varlen_attention(q, q, q, cu, cu, 139, 139, mask=pattern("window", USUAL)[0])


def test_explain():
    found, dense = pattern("documents", USUAL)
    x = tensors(USUAL)
    e = tilewise.explain(*x[:3], mask=found)
    dense_e = tilewise.explain(*x[:3], mask=dense)
    assert (e.mask, e.forward.flops) == (dense_e.mask, dense_e.forward.flops)
    assert e.tile_mask.visible == int((found.tensors.tiles > 0).sum())
    words = f"{e.tile_mask.visible} of 32 tiles visible, {e.tile_mask.partial} of them in part"
    assert f"TileMask (2, 1, 239, 239) in tiles of 64 x 64: {words}" in str(e)
    assert "  not hopper: " in str(e)
    on_hopper = tilewise.explain(*(y.to("meta") for y in x[:3]), mask=found.to("meta"), device="sm_90")
    assert on_hopper.plan.backend == "hopper"
    assert on_hopper.tile_mask is None


def test_a_usual_call_has_its_own_mask(monkeypatch):
    """One with a mask of the same layout is not read again; another size, other bits and a dynamic mask are."""
    read, reads = api.read_call, []
    monkeypatch.setattr(api, "read_call", lambda *args, **named: reads.append(1) or read(*args, **named))
    q, k, v = (torch.randn(1, 2, 200, 8, requires_grad=True) for _ in range(3))
    ids = torch.arange(200)
    masks = [TileMask.documents(ids // n) for n in (50, 70, 90)]
    for mask in masks:
        o = attention(q, k, v, mask=mask)
        expected = attention(q, k, v, mask=mask.dense())
        torch.testing.assert_close(o, expected)
        for one, other in zip(*(torch.autograd.grad(x.sum(), (q, k, v)) for x in (o, expected)), strict=True):
            torch.testing.assert_close(one, other)
    reads.clear()
    for mask in masks:
        attention(q, k, v, mask=mask)
    assert not reads
    attention(q, k, v, mask=TileMask.from_tiles(torch.ones(1, 1, 2, 2, dtype=torch.bool), 200, 200))
    attention(q, k, v, mask=TileMask(200, 200, masks[0].tensors, Kept(200, False, by_query=False)))
    assert len(reads) == 2
    with pytest.raises(ValueError, match=r"^mask: the TileMask is for 199 queries and 200 keys"):
        attention(q, k, v, mask=TileMask(199, 200, masks[0].tensors))


# --- a BlockMask's TileMask ---


def seen_of(mask):
    """Which pairs a call sees by a mask of 200 queries and keys: what each query has of values that are one-hot."""
    zeros = torch.zeros(1, 1, 200, 16)
    return attention(zeros, zeros, torch.eye(200)[None, None], mask=mask)[0, 0] > 0


def of_closure(x):
    return lambda b, h, q, kv: x[q] == x[kv]


def of_default(x):
    def mask_mod(b, h, q, kv, x=x):
        return x[q] == x[kv]

    return mask_mod


def of_partial(x):
    return functools.partial(lambda x, b, h, q, kv: x[q] == x[kv], x)


def of_module(x):
    module = torch.nn.Module()
    module.register_buffer("ids", x)
    return lambda b, h, q, kv: module.ids[q] == module.ids[kv]


def of_object(x):
    found = SimpleNamespace(ids=x)
    return lambda b, h, q, kv: found.ids[q] == found.ids[kv]


def of_others(x):
    return or_masks(and_masks(of_closure(x), lambda b, h, q, kv: q >= 0), lambda b, h, q, kv: q < 0)


def of_global(x):
    names = {"ids_of_a_global": x}
    exec("def mask_mod(b, h, q, kv): return ids_of_a_global[q] == ids_of_a_global[kv]", names)
    return names["mask_mod"]


@pytest.mark.parametrize("of", [of_closure, of_default, of_partial, of_module, of_object, of_others, of_global])
def test_what_a_mask_mod_reads_may_change(of):
    """In place: the next call sees it. Without a change nothing is made again."""
    ids = torch.arange(200) // 50
    mod, asked = of(ids), []
    mask = create_block_mask(mod, None, None, 200, 200, device="cpu")
    mask.mask_mod = functools.partial(lambda mod, *x: asked.append(1) or mod(*x), mod)
    for _ in range(3):
        assert torch.equal(seen_of(mask), ids[:, None] == ids)
    assert len(asked) == 1
    ids[:60] = 0
    for _ in range(3):
        assert torch.equal(seen_of(mask), ids[:, None] == ids)
    assert len(asked) == 2


def test_another_tensor_in_the_place_of_one_that_a_mask_mod_reads():
    ids = torch.arange(200) // 50
    mask = create_block_mask(lambda b, h, q, kv: ids[q] == ids[kv], None, None, 200, 200, device="cpu")
    assert torch.equal(seen_of(mask), ids[:, None] == ids)
    ids = torch.arange(200) // 60
    assert torch.equal(seen_of(mask), ids[:, None] == ids)
    mask.kv_num_blocks.zero_()
    mask.full_kv_num_blocks.zero_()
    assert not seen_of(mask).any()


def test_a_block_mask_that_comes_first_in_inference_mode_trains_later():
    mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 200, 200, device="cpu")
    with torch.inference_mode():
        assert torch.equal(seen_of(mask), torch.ones(200, 200).tril() > 0)
    q = torch.randn(1, 2, 200, 16, requires_grad=True)
    attention(q, q, q, mask=mask).sum().backward()
    with torch.inference_mode():
        made = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 200, 200, device="cpu")
        assert torch.equal(seen_of(made), torch.ones(200, 200).tril() > 0)


def test_no_tensor_of_a_block_mask_outlives_it():
    def call(c):
        ids = torch.arange(c.n, device=c.device) // 9
        c.made["ids"] = ids
        mask = create_block_mask(lambda b, h, q, kv: ids[q] == ids[kv], None, None, c.n, c.n, device=c.device)
        return [attention(*c.qkv(), mask=mask) for _ in range(2)]

    assert leftovers(call, 91, "cpu") == []


def test_lists_are_of_one_stream(monkeypatch):
    """No stream reads what another may not have written yet."""
    mask = TileMask.sliding_window(300, 300, (40, 0))
    found = {}
    for stream in (1, 2, 1, 2):
        monkeypatch.setattr(tile_mask, "stream_of", lambda device, stream=stream: stream)
        assert mask.lists() is found.setdefault(stream, mask.lists())
    assert found[1] is not found[2]


# --- files ---


@pytest.mark.parametrize(
    "mask",
    [
        TileMask.documents(torch.arange(100) // 9, block=64),
        TileMask.from_rows(lambda rows: torch.ones(1, 1, 100, 100).tril()[:, :, rows] > 0, 100, 100, block=64),
        dynamic_mask(torch.arange(100.0)[None, None, None], keep=5),
    ],
)
def test_a_file_with_a_mask(tmp_path, mask):
    """torch.load allows it by default, as it allows tensors. What is made of a mask is not written."""
    mask.lists()
    torch.save({"mask": mask}, tmp_path / "mask.pt")
    found = torch.load(tmp_path / "mask.pt", weights_only=True)["mask"]
    assert (found.queries, found.keys, found.kept) == (mask.queries, mask.keys, mask.kept)
    assert torch.equal(found.validate().dense(), mask.dense())
    assert found._lists == {}
    x = [torch.randn(1, 2, 100, 16) for _ in range(3)]
    assert torch.equal(attention(*x, mask=found), attention(*x, mask=mask))
