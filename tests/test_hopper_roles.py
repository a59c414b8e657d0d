"""How the warps of the Hopper backward hand dQ on: the kernels' own functions, as two Python threads with barriers that
work as the hardware's do. One of them always looks at a barrier as late as it can: a phase that it misses would be a
program that never ends."""

from __future__ import annotations

import importlib.util
import itertools
import threading
from types import SimpleNamespace

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from tilewise.backends.hopper import query_sums

COMPUTES, ADDS = "computes", "adds"


class Barrier:
    """An mbarrier of one arrival: of a phase's end one knows only whether it was even or odd."""

    def __init__(self):
        self.phase = 0

    def index(self, _):
        return self


class Slot:
    """A slot of shared memory."""

    value = None

    def index(self, _):
        return self

    def store(self, value):
        self.value = value


class Roles:
    """Two threads, of which ``late`` looks at a barrier only when the other can go no further."""

    def __init__(self, late):
        self.late = late
        self.changed = threading.Condition()
        self.waits_for = {COMPUTES: None, ADDS: None}  # a condition, or that the role has ended
        self.stuck = []

    def arrive(self, barrier, count):
        with self.changed:
            barrier.phase += count
            self.changed.notify_all()

    def other_stops(self):
        """The other role waits for something that is not there yet, or has ended."""
        condition = self.waits_for[ADDS if threading.current_thread().name == COMPUTES else COMPUTES]
        return condition is not None and not condition()

    def is_late(self):
        if threading.current_thread().name == self.late:
            with self.changed:
                self.changed.wait_for(self.other_stops)

    def wait(self, barrier, parity):
        me = threading.current_thread().name

        def over():
            return barrier.phase % 2 != parity

        self.is_late()
        with self.changed:
            self.waits_for[me] = over
            self.changed.notify_all()
            self.changed.wait_for(lambda: over() or self.other_stops())
            if not over():
                self.stuck.append(me)
                raise SystemExit
            self.waits_for[me] = None

    def run(self, **roles):
        def ends(role, work):
            try:
                work()
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


@pytest.mark.parametrize("late", [COMPUTES, ADDS])
@pytest.mark.parametrize(
    ("by_tma", "ordered"), [(True, False), (True, True), (False, False)], ids=["by TMA", "in order", "from registers"]
)
@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize(
    ("group", "visits", "parts"), [(1, 1, 1), (1, 2, 1), (1, 5, 2), (3, 4, 1), (2, 3, 2), (1, 0, 1)]
)
def test_every_part_of_dq_is_added_once(monkeypatch, late, by_tma, ordered, shares, group, visits, parts):
    """And said to be, when what the other warps store has been stored."""
    roles, added, counted, stored = Roles(late), [], [], []
    gl = SimpleNamespace(static_range=range, minimum=min, program_id=lambda _: 0)
    stubs = {
        "gl": gl,
        "mbarrier": roles,
        "wait_full": lambda ring, slot, use: roles.wait(ring.full.index(slot), use % 2),
        "tma": SimpleNamespace(store_wait=lambda _: None),
        "tma_add": lambda _, place, slot: added.append((place[0], slot.value)),
        "as_threads_hold_it": lambda dq, _: dq,
        "place_of_part": lambda tile, part, c: tile * c.DQ_PARTS + part,
        "work_of": lambda *_: SimpleNamespace(b=0, hk=0, n0=0),
        "counters_at": lambda *_: SimpleNamespace(turns=1000, ended=2000, done=3000),
        "visits_of": lambda *_: (visits, None),
        "visit_at": lambda i, *_: (visits - 1 - i, 0),
        "key_tiles": lambda *_: (0, 0, 0, 0),
        "count_up": lambda at: counted.append((at, bool(stored))),
        "count_stored": lambda at: counted.append((at, bool(stored))),
        **dict.fromkeys(
            ("warps_barrier", "fence_async_shared", "wait_stored", "wait_count", "wait_zeroed"), lambda *_: None
        ),
    }
    for name, stub in stubs.items():
        monkeypatch.setattr(query_sums, name, stub)
    c = SimpleNamespace(
        DQ_BY_TMA=by_tma, ORDERED=ordered, DQ_PARTS=parts, DBIAS="share" if shares else "none", SHARERS=1, MASK=False,
        BLOCK_M=64, BLOCK_N=64, WARPS=8,
    )  # fmt: skip
    sizes = SimpleNamespace(group=group, kv_heads=1, row_tiles=visits, queries=64 * visits, keys=64)
    terms = SimpleNamespace(lo=0, hi=0)
    counts_others = shares or not by_tma
    queries = query_sums.Queries(Slot(), Barrier(), Barrier(), Barrier() if counts_others else 0)
    x = SimpleNamespace(dq=None, visits=None)
    tiles = [g * visits + m for g in range(group) for m in reversed(range(visits))]

    def computes():
        for step, tile in enumerate(tiles if by_tma else []):  # from registers they are atomic additions of their own
            for part in range(parts):
                query_sums.release_part.fn((tile, part), x, queries, tile, step, part, c)
                query_sums.send_part.fn(queries, c)
        roles.is_late()
        stored.append(True)
        if counts_others:
            query_sums.say_stored.fn(queries, 2, c)

    roles.run(**{COMPUTES: computes, ADDS: lambda: query_sums.add_queries.fn(x, queries, 0, terms, sizes, c)})
    expected = [(tile * parts + part, (tile, part)) for tile, part in itertools.product(tiles, range(parts))]
    assert added == (expected if by_tma else [])
    turns = [1000 + tile for tile in tiles] if ordered else []
    assert [at for at, _ in counted] == [*turns, *([2000] if shares else []), 3000]
    assert all(after for at, after in counted if at >= 2000 and counts_others)
