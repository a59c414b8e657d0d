"""How the warps of the Hopper backward hand K, V and dQ on: the kernels' own functions, as Python threads with barriers
that work as the hardware's do. One of them always looks at a barrier as late as it can: a phase that it misses would be
a program that never ends."""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace

import pytest
from kernel_stubs import gluon

pytest.importorskip("triton")

from tilewise.backends.gluon.pipeline import Pipeline
from tilewise.backends.gluon.sm90.backward import dq as dq_accum
from tilewise.backends.gluon.sm90.backward import warps as producers
from tilewise.backends.gluon.varlen import SeqInfo

COMPUTES, ADDS, FETCHES = "computes", "adds", "fetches"


class Barrier:
    """An mbarrier of one arrival: of a phase's end one knows only whether it was even or odd."""

    def __init__(self):
        self.phase = 0

    def index(self, _):
        return self


class Barriers:
    """Of the slots of a pipeline."""

    def __init__(self, slots):
        self.barriers = [Barrier() for _ in range(slots)]

    def index(self, slot):
        return self.barriers[slot]


class Slot:
    """A slot of shared memory."""

    value = None

    def index(self, _):
        return self

    def store(self, value):
        self.value = value


class Roles:
    """Threads, of which ``late`` looks at a barrier only when the others can go no further."""

    def __init__(self, late):
        self.late = late
        self.changed = threading.Condition()
        self.waits_for = {COMPUTES: None, ADDS: None, FETCHES: None}  # a condition, or that the role has ended
        self.stuck = []

    def arrive(self, barrier, count, pred=True):
        with self.changed:
            barrier.phase += count if pred else 0
            self.changed.notify_all()

    def others_stop(self):
        """Each other role waits for something that is not there yet, or has ended."""
        others = (found for role, found in self.waits_for.items() if role != threading.current_thread().name)
        return all(found is not None and not found() for found in others)

    def is_late(self):
        if threading.current_thread().name == self.late:
            with self.changed:
                self.changed.wait_for(self.others_stop)

    def wait(self, barrier, parity):
        me = threading.current_thread().name

        def over():
            return barrier.phase % 2 != parity

        self.is_late()
        with self.changed:
            self.waits_for[me] = over
            self.changed.notify_all()
            self.changed.wait_for(lambda: over() or self.others_stop())
            if not over():
                self.stuck.append(me)
                raise SystemExit
            self.waits_for[me] = None

    def run(self, **roles):
        def ends(role, work_tile):
            try:
                work_tile()
            finally:
                with self.changed:
                    self.waits_for[role] = lambda: False
                    self.changed.notify_all()

        threads = [threading.Thread(target=ends, args=role, name=role[0], daemon=True) for role in roles.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        assert not self.stuck, f"waits for ever: {self.stuck}"


@pytest.mark.parametrize("late", [COMPUTES, ADDS, FETCHES])
@pytest.mark.parametrize(
    ("by_tma", "ordered", "later"),
    [(True, False, False), (True, True, False), (True, True, True), (False, False, False)],
    ids=["by TMA", "in order", "in order, counted later", "from registers"],
)
@pytest.mark.parametrize(
    ("work_tiles", "group", "entries", "parts"),
    [(1, 1, 1, 1), (1, 1, 2, 1), (1, 1, 5, 2), (1, 3, 4, 1), (3, 2, 3, 2), (1, 1, 0, 1), (2, 1, 1, 1), (4, 1, 3, 1)],
)
@pytest.mark.parametrize("programs", ["stay", "stay, K and V ahead", "have one work", "share a bias"])
def test_every_part_of_dq_is_added_once(
    monkeypatch, late, by_tma, ordered, later, programs, work_tiles, group, entries, parts
):
    hold_parts_of_dq(monkeypatch, late, by_tma, ordered, later, programs, work_tiles, group, entries, parts)


@pytest.mark.parametrize("late", [COMPUTES, ADDS, FETCHES])
@pytest.mark.parametrize(("ordered", "later"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(
    ("work_tiles", "group", "entries"), [(1, 1, 1), (1, 1, 2), (1, 3, 4), (1, 1, 0), (2, 1, 1), (4, 1, 3)]
)
def test_dv_leaves_through_the_memory_of_dq(monkeypatch, late, ordered, later, work_tiles, group, entries):
    """Where K has two slots and V one; dQ's parts are as many as its slots, and added by TMA."""
    hold_parts_of_dq(monkeypatch, late, True, ordered, later, "stay, K ahead", work_tiles, group, entries, 1)


def hold_parts_of_dq(monkeypatch, late, by_tma, ordered, later, programs, work_tiles, group, entries, parts):
    """And said to be, when what the other warps store has been stored; K and V come when those of the work before, and
    dK and dV in their place, have left."""
    dynamic, dbias_tiles = "stay" in programs, programs == "share a bias"
    work_tiles, key_stages = work_tiles if dynamic else 1, 2 if "ahead" in programs else 1
    value_stages = 1 if programs == "stay, K ahead" else key_stages
    roles, added, counted, stored, kept, left, left_from = Roles(late), [], [], [], [], [], []
    keys, values = (Pipeline(None, Barriers(stages), Barriers(stages)) for stages in (key_stages, value_stages))
    seq = SeqInfo(0, 0, 64 * entries, 64, 0)

    def fill_at(pipeline, slot, use, source, place):
        roles.wait(pipeline.empty.index(slot), (use & 1) ^ 1)
        kept.append((source, use * len(pipeline.full.barriers) + slot))
        roles.arrive(pipeline.full.index(slot), 1)

    def tma_store(to, place, slot):
        left.append((to, place[1], len(stored)))
        if to == "dv":
            left_from.append(slot.value)

    stubs = {
        "gl": gluon(),
        "mbarrier": roles,
        "fill_at": fill_at,
        "box_of": lambda first, count, b, h, row, c: [b, h, row, 0],
        "row_tile": lambda work_tile, h, m, sizes: h * sizes.row_tiles + m,
        "slot_of": lambda pipeline, n: n % len(pipeline.full.barriers),
        "use_of": lambda pipeline, n: n // len(pipeline.full.barriers),
        "release": lambda pipeline, slot: roles.arrive(pipeline.empty.index(slot), 1),
        "wait_full": lambda pipeline, slot, use: roles.wait(pipeline.full.index(slot), use % 2),
        "tma": SimpleNamespace(store_wait=lambda _: None),
        "add_part": lambda _, slot, place, *__: added.append((place, slot.value)),
        "tma_store": tma_store,
        "as_threads_hold_it": lambda dq, _: dq,
        "place_of_part": lambda tile, part, c: tile * c.DQ_PARTS + part,
        "work_tile_at": lambda tile_index, *_: SimpleNamespace(b=0, hk=tile_index, n0=0, seq=seq),
        "work_tile_count": lambda *_: work_tiles,
        "next_tile_index": lambda tile_index, t, *_: t,
        "zero_ahead": lambda *_: None,
        "reduce_earlier_group": lambda *_: None,
        "counters_at": lambda *_: SimpleNamespace(dq_semaphores=1000, ended=2000, done=3000),
        "tile_list_of": lambda *_: (entries, None),
        "entry_at": lambda i, *_: (entries - 1 - i, 0),
        "key_tiles": lambda *_: (0, 0, 0, 0),
        "count_up": lambda at: counted.append((at, len(left))),
        "count_stored": lambda at: counted.append((at, len(left))),
        "steps_of": lambda *_: group * entries,
        "dv_tile": lambda x, dq_pipeline, c: dq_pipeline.slots,
        "add_dq": dq_accum.add_dq.fn,
        **{
            name: getattr(producers, name).fn
            for name in ("fetch_keys", "fetch_keys_of", "store_keys", "store_keys_of", "signal_done")
        },
        **dict.fromkeys(
            ("warps_barrier", "fence_async_shared", "wait_stored", "wait_count", "wait_zeroed"), lambda *_: None
        ),
    }
    for name, stub in stubs.items():
        for module in (dq_accum, producers):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, stub)
    c = SimpleNamespace(
        DQ_BY_TMA=by_tma, ORDERED=ordered, DEFERRED_RELEASE=later, DQ_PARTS=parts, DBIAS="reduce" if dbias_tiles else
        "none", DYNAMIC=dynamic, KEY_STAGES=key_stages, VALUE_STAGES=value_stages, GROUP_PROGRAMS=1, MASK=False,
        BLOCK_M=64, BLOCK_N=64, BLOCK_D=128, COLS_OF_DQ=128 // parts, WARPS=8, PACKED=False, DQ_STORED=False,
        ZEROES_DBIAS=False, UNDERFLOWS=False,
    )  # fmt: skip
    sizes = SimpleNamespace(group=group, kv_heads=work_tiles, row_tiles=entries, queries=64 * entries, keys=64)
    terms = SimpleNamespace(lo=0, hi=0)
    queries = dq_accum.DqPipeline(Slot(), Barrier(), Barrier(), Pipeline(None, Barriers(key_stages), None))
    x = SimpleNamespace(dq=None, tile_list=None, k="k", v="v", dk="dk", dv="dv")
    shared = SimpleNamespace(k=Slot(), v=Slot())
    tiles = [
        [(work_tile * group + g) * entries + m for g in range(group) for m in reversed(range(entries))]
        for work_tile in range(work_tiles)
    ]

    def computes():
        step = 0
        for work_tile in range(work_tiles):
            slot = work_tile % key_stages
            shared_now = SimpleNamespace(slot=slot)

            def has(name, stages, work_tile=work_tile):
                mine = [n for kind, n in kept if kind == name and n % stages == work_tile % stages]
                return mine[-1] == work_tile

            for pipeline, name, stages in ((keys, "k", key_stages), (values, "v", value_stages)):
                roles.wait(pipeline.full.index(work_tile % stages), work_tile // stages % 2)
                assert has(name, stages)
            for tile in tiles[work_tile] if by_tma else []:  # from registers they are atomic additions of their own
                assert has("v", value_stages)
                for part in range(parts):
                    uses = dq_accum.uses_of_slot.fn(step, shared_now, c)
                    dq_accum.release_part.fn((tile, part), x, queries, tile, uses, part, None, c)
                    dq_accum.send_part.fn(queries, c)
                step += 1
            roles.is_late()
            assert has("k", key_stages)
            if value_stages < key_stages:
                roles.wait(queries.empty, (dq_accum.uses_of_slot.fn(step, shared_now, c) & 1) ^ 1)
                queries.slots.store(("dv", work_tile))
            stored.append(work_tile)
            dq_accum.signal_stored.fn(queries, slot, c)

    adds, fetches = producers.add.fn, producers.background.fn
    roles.run(**{
        COMPUTES: computes,
        ADDS: lambda: adds(x, keys, values, queries, shared, None, 0, terms, sizes, c),
        FETCHES: lambda: fetches(x, keys, values, None, None, None, None, 0, terms, sizes, c),
    })  # fmt: skip
    expected = [(t * parts + p, (t, p)) for work_tile in tiles for t, p in itertools.product(work_tile, range(parts))]
    assert added == (expected if by_tma else [])
    assert value_stages == key_stages or left_from == [("dv", work_tile) for work_tile in range(work_tiles)]
    assert [found[:2] for found in left] == [(to, work_tile) for work_tile in range(work_tiles) for to in ("dv", "dk")]
    assert all(work_tile < so_far <= work_tile + key_stages for _, work_tile, so_far in left)
    assert kept == [(name, work_tile) for work_tile in range(work_tiles) for name in "kv"]
    for work_tile in range(work_tiles):
        dq_semaphores = [1000 + tile for tile in tiles[work_tile]] if ordered and by_tma else []
        some, counted = counted[: len(dq_semaphores)], counted[len(dq_semaphores) :]
        assert [at for at, _ in some] == dq_semaphores
        ends = [*([2000 + work_tile] if dbias_tiles else []), 3000 + work_tile]
        assert [at for at, _ in counted[: len(ends)]] == ends
        assert all(so_far >= 2 * (work_tile + 1) for _, so_far in counted[: len(ends)])
        counted = counted[len(ends) :]
    assert not counted
