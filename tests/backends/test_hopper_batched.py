"""Batch elements side by side in a program of the Hopper backward: the roles of its warps, run as Python threads with
barriers that work as the hardware's do, see test_hopper_roles; and what comes of it."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from kernel_stubs import gluon

pytest.importorskip("triton")

from test_hopper_roles import Barrier, Roles
from test_hopper_work import kernel_arguments, plain, problem

from tilewise.backends.gluon.pipeline import Pipeline
from tilewise.backends.gluon.sm90.backward import batched as batched
from tilewise.backends.gluon.sm90.backward import scheduler as scheduler
from tilewise.backends.gluon.sm90.backward import warps as producers
from tilewise.backends.gluon.sm90.common import config
from tilewise.layouts import nvmma_shared_layout

__all__ = ["plain"]  # a fixture of all tests here too

ELEMENTS, OTHERS = ["element 0", "element 1", "element 2"], ["loads", "fetches", "adds"]
STAGES = 2


class Arrivals(Barrier):
    """An mbarrier of several arrivals."""

    def __init__(self, count):
        self.arrivals, self.count = 0, count

    @property
    def phase(self):
        return self.arrivals // self.count

    @phase.setter
    def phase(self, value):
        self.arrivals += value - self.phase


class Slots:
    def __init__(self, made):
        self.made = made

    def index(self, slot):
        return self.made[slot]


def pipeline(full=1, empty=1):
    barriers = ([Arrivals(n) for _ in range(STAGES)] for n in (full, empty))
    return Pipeline(Slots([{} for _ in range(STAGES)]), *map(Slots, barriers))


class Tile:
    """A tile of shared memory."""

    def __init__(self, values):
        self.values = values

    def piece(self, n):
        return Tile(self.values[0, 0, 16 * n : 16 * n + 16])

    def load(self, _):
        return self.values


def new_element():
    ds_pipeline, k_pipeline, v_pipeline, rows = pipeline(), pipeline(), pipeline(), pipeline(full=4)
    stored = Pipeline(None, Slots([Arrivals(1) for _ in range(STAGES)]), None)
    stats, do = Slots([None] * 2 * STAGES), Slots([None] * STAGES)
    ds = Slots([Tile(torch.zeros(1, 1, 64, 64)) for _ in range(STAGES)])
    shared = SimpleNamespace(k=k_pipeline.slots, v=v_pipeline.slots, ds=ds, ds_pipeline=ds_pipeline)
    return SimpleNamespace(
        rows=SimpleNamespace(pipeline=rows, do=do, stats=stats, bias_pipeline=None),
        k_pipeline=k_pipeline, v_pipeline=v_pipeline,
        dq_pipeline=SimpleNamespace(stored=stored), shared=shared,
    )  # fmt: skip


def ds_of(b, h, m, n0):
    """Small integers, whose sums are exact, alike for no two tiles."""
    generator = torch.Generator().manual_seed(hash((b, h, m, n0)) % 2**31)
    return torch.randint(-99, 99, (64, 64), generator=generator).float()


@pytest.mark.parametrize("late", [*ELEMENTS, *OTHERS])
@pytest.mark.parametrize(
    ("batch", "biases", "group", "keys", "taken", "hidden"),
    [
        (258, 1, 1, 260, [0, 1, 4, 700], ()), (257, 1, 2, 260, [1699, 1700, 1701], ()),
        (257, 1, 1, 259, [1707, 1709], ()), (258, 1, 1, 260, [0, 1, 4, 5, 6, 700], {0, 4, 5, 700}),
        # Programs end with the runs of 128 elements that share a bias: 43 programs for each head and tile of a run.
        (256, 2, 1, 260, [0, 842, 859, 860, 1719], ()), (258, 2, 1, 260, [0, 859, 860, 1719], {860}),
    ],
)  # fmt: skip
def test_roles_of_lanes(monkeypatch, late, batch, biases, group, keys, taken, hidden):
    """The elements of a program meet the same tile of the bias, and dBias gets what each of them has added, but for one
    without a batch element; a role that is late keeps nobody waiting for ever. hidden: work tiles without a step."""
    monkeypatch.setattr(config, "BATCHED_FROM", 100)  # shorter ones have the same roles
    roles = Roles(late)
    roles.waits_for = dict.fromkeys([*ELEMENTS, *OTHERS])
    terms, sizes, c = kernel_arguments(problem(batch, 4 * group, 4, 150, keys, f"{biases}hmn", D=32))
    assert c.ELEMENTS == 3
    c.KEY_STAGES = c.VALUE_STAGES = STAGES
    c.HIDES_KEYS = bool(hidden)
    count = sizes.key_tiles * sizes.kv_heads * sizes.batch
    numbers, indices = iter([*taken, count]), pipeline(empty=5)
    bias_pipeline, elements = pipeline(empty=c.ELEMENTS), tuple(new_element() for _ in ELEMENTS)
    for element in elements:
        element.rows.bias_pipeline = bias_pipeline
    dbias = torch.zeros(biases, 4 * group, 150, 264)  # a row has room for a multiple of eight elements
    finished, waited, done, stored = [], [], [], []

    def tma_load(source, at, barrier, slot):
        if slot is not None:
            slot["holds"] = (source.name, *at)
        roles.arrive(barrier, 1)

    def next_tile_index(_, t, *__):
        slot = t % STAGES
        roles.wait(indices.full.index(slot), t // STAGES & 1)
        found = indices.slots.index(slot)["holds"]
        roles.arrive(indices.empty.index(slot), 1)
        return found

    def hand_out_tile_index(_, t, tile_index):
        roles.wait(indices.empty.index(t % STAGES), (t // STAGES & 1) ^ 1)
        indices.slots.index(t % STAGES)["holds"] = tile_index
        roles.arrive(indices.full.index(t % STAGES), 1)

    def fill_at(to, slot, use, source, at):
        roles.wait(to.empty.index(slot), (use & 1) ^ 1)
        tma_load(source, at, to.full.index(slot), to.slots.index(slot))

    def atomic_add(to, values, mask, sem):
        dbias.view(-1)[to[mask]] += values[mask]

    def work_tile_at(n, *_):
        found = scheduler.work_tile_of.fn(n // c.ELEMENTS, n % c.ELEMENTS, terms, sizes, c)
        return found._replace(end=found.begin) if n // c.ELEMENTS in hidden else found

    gl = gluon(where=lambda c, x, y: x if c else torch.full_like(x, y), atomic_add=atomic_add)
    barriers = SimpleNamespace(arrive=roles.arrive, wait=roles.wait, expect=lambda *_: None)
    stubs = {
        "gl": gl, "mbarrier": barriers, "tma_load": tma_load, "PIECE_ROWS": 16, "next_tile_index": next_tile_index,
        "hand_out_tile_index": hand_out_tile_index, "fill_at": fill_at, "fetch_tile_index": lambda _: next(numbers),
        "slot_of": lambda _, n: n % STAGES, "use_of": lambda _, n: n // STAGES,
        "release": lambda pipeline, slot: roles.arrive(pipeline.empty.index(slot), 1),
        "wait_full": lambda pipeline, slot, use: roles.wait(pipeline.full.index(slot), use & 1),
        "work_tile_count": lambda *_: count, "box_of": lambda first, queries, b, h, row, c, col=0: [b, h, row, col],
        "work_tile_at": work_tile_at, "of_element": scheduler.of_element.fn,
        "bias_of_tile": scheduler.bias_of_tile.fn,
        "row_tile": scheduler.row_tile, "counters_at": lambda *_: SimpleNamespace(tile_count_semaphore=None, done=0),
        "finish_earlier_heads": lambda n, *_: finished.append(n),
        "wait_zeroed": lambda n, tile, *_: waited.append(scheduler.head_of(tile, sizes, c)),
        "head_of": scheduler.head_of, "count_up": lambda at: done.append((at, len(computed))),
        "tma": SimpleNamespace(store_wait=lambda _: None), "tma_store": lambda to, at, slot: stored.append((to, at)),
        **dict.fromkeys(("warps_barrier", "fence_async_shared", "let_next_begin"), lambda: None),
        "widened": lambda x: x, "add_pieces": batched.add_pieces.fn,
        "piece_of": lambda element, slot, piece, _: element.shared.ds.index(slot).piece(piece),
        "tile_of_element": batched.tile_of_element.fn, "load_step": batched.load_step.fn,
        **{name: getattr(producers, name).fn for name in ("fetch_keys_of", "load_do", "store_keys_of")},
    }  # fmt: skip
    for name, stub in stubs.items():
        for module in (batched, producers):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, stub)

    def source(name):
        return SimpleNamespace(name=name, block_type=SimpleNamespace(nbytes=0), shape=[batch])

    x = SimpleNamespace(**{name: source(name) for name in ("q", "k", "v", "do", "bias", "stats")}, dk="dk", dv="dv")
    computed = []

    def computes(which):
        element, step, nth = elements[which], 0, 0
        tile_index = next_tile_index(0, nth)
        while tile_index * c.ELEMENTS < count:
            w, slot = stubs["work_tile_at"](tile_index * c.ELEMENTS + which), nth % STAGES
            for of, name in ((element.k_pipeline, "k"), (element.v_pipeline, "v")):
                roles.wait(of.full.index(slot), nth // STAGES & 1)
                assert of.slots.index(slot)["holds"] == (name, w.b, w.hk, w.n0, 0)
            for g, m in itertools.product(range(group), reversed(range(w.begin, w.end))):
                slot, phase, h = step % STAGES, step // STAGES & 1, w.hk * group + g
                roles.wait(element.rows.pipeline.full.index(slot), phase)
                roles.wait(bias_pipeline.full.index(slot), phase)
                assert element.rows.pipeline.slots.index(slot)["holds"] == ("q", w.b, h, 64 * m, 0)
                assert bias_pipeline.slots.index(slot)["holds"] == (
                    "bias",
                    w.place // sizes.broadcast_batch,
                    h,
                    64 * m,
                    w.n0,
                )
                roles.wait(element.shared.ds_pipeline.empty.index(slot), phase ^ 1)
                element.shared.ds.made[slot] = Tile(ds_of(w.b, h, m, w.n0)[None, None])
                roles.arrive(element.shared.ds_pipeline.full.index(slot), 1)
                roles.arrive(bias_pipeline.empty.index(slot), 1)
                roles.arrive(element.rows.pipeline.empty.index(slot), 1)
                step += 1
            computed.append(w)
            roles.arrive(element.dq_pipeline.stored.full.index(nth % STAGES), 1)
            nth += 1
            tile_index = next_tile_index(tile_index, nth)

    strides = SimpleNamespace(pointer=0, stride0=4 * group * 150 * 264, stride1=150 * 264, stride2=264)
    given = (None, 0, terms, sizes, c)
    roles.run(**{
        **{name: lambda which=which: computes(which) for which, name in enumerate(ELEMENTS)},
        "loads": lambda: batched.load_elements.fn(x, elements, *given),
        "fetches": lambda: batched.finish_and_store.fn(x, elements, None, *given),
        "adds": lambda: batched.add_elements.fn(x, elements, strides, None, terms, sizes, c),
    })  # fmt: skip
    wanted = [n * c.ELEMENTS + element for n in taken for element in range(c.ELEMENTS)]
    assert finished == taken
    heads = [3 * (w.place // 3 * 4 + w.hk) for w in map(stubs["work_tile_at"], wanted[::3])]
    assert [at for at, _ in done] == waited == heads
    assert all(so_far >= 3 * nth for nth, (_, so_far) in enumerate(done, 1)), (
        "counted before all elements have added dQ"
    )
    assert len(computed) == len(wanted)
    assert len(stored) == 2 * len(wanted)
    expected = torch.zeros(biases, 4 * group, 192, 320)
    for w in computed:
        for g, m in itertools.product(range(group), range(w.begin, w.end)):
            h = w.hk * group + g
            if w.b < batch:
                bias = w.b // (batch // biases)
                expected[bias, h, 64 * m : 64 * m + 64, w.n0 : w.n0 + 64] += ds_of(w.b, h, m, w.n0)
    assert torch.equal(dbias[..., :keys], expected[:, :, :150, :keys])
    assert (batch == 258) == all(w.b < batch for w in computed)


def test_some_rows_of_a_tile_lie_by_themselves():
    """As `piece_of` reads them: a tile's ``n``-th rows are where they would be in as many tiles of so few."""
    rows = batched.PIECE_ROWS.value
    whole, piece = (nvmma_shared_layout(shape, "bfloat16").invert() for shape in ((64, 64), (rows, 64)))
    for row, col in itertools.product(range(64), range(0, 64, 7)):
        (offset,) = piece(dim0=row % rows, dim1=col)[:1]
        assert whole(dim0=row, dim1=col)[0] == row // rows * rows * 64 + offset
