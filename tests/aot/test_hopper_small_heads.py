"""The Hopper forward of small heads beside a bias tile: which calls take it, what compilers make of it, and how its
warps hand tiles on, as Python threads."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from aot_child import compile_hopper_case
from aot_compilers import hold_hopper
from helpers import Case

from tilewise.spec.operands import TensorSpec
from tilewise.spec.problem import Problem
from tilewise.spec.score import Band, Score

pytest.importorskip("triton")

from tilewise.backends.gluon import score
from tilewise.backends.gluon.sm90.common import key_mask
from tilewise.backends.gluon.sm90.common.config import SHARED_MEMORY, forward_config, has_small_heads
from tilewise.backends.gluon.sm90.forward import small_heads as small_heads_kernel

BRAIN, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32
PAIR = Case(B=256, H=4, M=256, N=256, D=32, bias="1hmn", dtype=BRAIN)


@pytest.mark.parametrize("triton", ["3.6.0", "installed"])
@pytest.mark.parametrize(
    "case", [PAIR, replace(PAIR, D=24, M=77, N=320, bias="bhmn", bias_dtype=HALF, Hkv=2, layout="heads_last")], ids=str
)
def test_compiled(compilers, triton, case):
    codes = compilers.compile(compile_hopper_case, triton, 90, case)
    assert [code.kernel.name for code in codes] == ["small_heads_kernel", "nan_fixup_kernel"]
    hold_hopper(codes, 0)
    # of each warpgroup the first tile of keys, the others, and P·V of the last
    assert codes[0].wgmma == 2 * (2 + (2 + 4) + 4)
    assert not codes[0].kernel.instructions["scaled bias"]
    assert 2 * (codes[0].kernel.shared + 1024) <= SHARED_MEMORY + 1024


@pytest.mark.parametrize(
    "case", [replace(PAIR, N=248), replace(PAIR, mask="b11n"), replace(PAIR, mask="111n", dtype=HALF, N=200)], ids=str
)
def test_hidden_keys_are_one_more_step(compilers, case):
    codes = compilers.compile(compile_hopper_case, "3.6.0", 90, case)
    kernels = {code.kernel.name: code for code in codes}
    assert set(kernels) - {"key_summary_kernel"} == {"small_heads_kernel", "nan_fixup_kernel"}
    hold_hopper(codes, 0)
    code = kernels["small_heads_kernel"]
    assert code.wgmma == 2 * ((2 + 1) + (2 + 1 + 4) + 4)
    assert 2 * (code.kernel.shared + 1024) <= SHARED_MEMORY + 1024


KEYS = TensorSpec(torch.bool, 256, 1, 1, 256)


def of(bias=BRAIN, band=None, cap=None, scale=0.2, dim=32, **terms):
    operand = bias and TensorSpec(bias, 1, 4, 256, 256)
    score = Score(scale, cap, band or Band())
    return Problem("cuda", (9, 0), BRAIN, 256, 4, 4, 256, 256, dim, dim, score, operand, **terms)


@pytest.mark.parametrize("problem", [of(), of(HALF), of(dim=17), of(scale=2.0), of(scale=1e-3), of(mask=KEYS)])
def test_which_calls_come_together(problem):
    assert has_small_heads(problem)
    assert forward_config(problem).programs == 2


@pytest.mark.parametrize(
    "problem",
    [
        of(None), of(FLOAT), of(cap=5.0), of(dim=40),
        of(band=Band.aligned(True, None, 0)), of(mask=replace(KEYS, rows=256)),
        of(mask=replace(KEYS, heads=4)), of(mask=KEYS, dim=40), of(mask=KEYS, cap=5.0),
        of(sink=TensorSpec(FLOAT, 1, 4, 1, 1)), of(totals=(512, 512)),
    ],
)  # fmt: skip
def test_which_do_not(problem):
    assert not has_small_heads(problem)


# --- roles ---


class Memory:
    """Slots of tiles and barriers: whose turn it is, and what is read too early or written too early."""

    def __init__(self, stages, warpgroups):
        self.changed = threading.Condition()
        self.stages, self.warpgroups = stages, warpgroups
        self.phases = [0] * stages  # uses that have come
        self.left = [warpgroups] * stages  # warpgroups that have left what is there
        self.waited = [True] * stages  # whether who loads knows
        self.tiles = {}
        self.unread = {}  # warpgroups that have yet to read a tile of V
        self.since = None  # what who loads has done since it stored by itself

    def until(self, condition):
        with self.changed:
            assert self.changed.wait_for(condition, timeout=20), "a wait that never ends"

    def expect(self, slot, size):
        assert self.since in (None, ["fence", "barrier"]), "wgmma may read what was there before"
        self.missing, self.since = size, None

    def order(self, what):
        """A step of the order in which what a warp stores becomes visible to wgmma."""

        def step(*_):
            if self.since is not None and threading.current_thread().name == "load":
                self.since.append(what)

        return step

    def store(self, place, tile):
        with self.changed:
            kind, index = place
            assert self.left[index] == self.warpgroups, "written while it is read"
            assert self.waited[index], "who loads does not know that all have left"
            self.tiles[kind, index], self.since = tile, []

    def load(self, descriptor, at, slot, place):
        with self.changed:
            kind, index = place
            assert self.left[slot] == self.warpgroups, "written while it is read"
            assert self.waited[slot], "who loads does not know that all have left"
            assert not self.unread.get((kind, index)), "written before it is read"
            self.tiles[kind, index] = tuple(at)
            if kind == "v":
                self.unread[kind, index] = set(range(self.warpgroups))
            self.missing -= descriptor.block_type.nbytes
            if not self.missing:
                self.left[slot], self.waited[slot] = 0, False
                self.phases[slot] += 1
                self.changed.notify_all()

    def wait(self, slot, phase, pred=True):
        if pred:
            self.until(lambda: self.phases[slot] % 2 != phase % 2)

    def wait_left(self, slot, c):
        self.until(lambda: self.left[slot] == self.warpgroups)
        self.waited[slot] = True

    def leave(self, slot, c):
        with self.changed:
            self.left[slot] += 1
            assert self.left[slot] <= self.warpgroups, "left twice"
            self.changed.notify_all()


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize(("keys", "tiles"), [(1, 5), (2, 3), (3, 1), (4, 4), (6, 3), (12, 2)])
def test_tiles_are_handed_on(monkeypatch, keys, tiles, cut):
    """``keys`` tiles of keys for each of ``tiles`` tiles of queries; cut: some keys are hidden."""
    stages, read = small_heads_kernel.STAGES.value, {0: [], 1: []}
    memory = Memory(stages, 2)
    gl = MagicMock()
    gl.where = lambda condition, x, y: x if condition else y
    gl.to_tensor, gl.static_range, gl.constexpr = lambda x: x, range, MagicMock()
    gl.program_id, gl.num_programs = lambda axis: 0, lambda axis: 1
    names = "new_pipeline fill_at release slot_of use_of wait_full widened online_softmax rescaled rounded sums_of_rows"
    more = "accumulator finish tma tma_store warpgroup_mma times_v"
    for name in (*names.split(), *more.split()):
        monkeypatch.setattr(small_heads_kernel, name, MagicMock())
    small_heads_kernel.online_softmax.return_value = (0, 0, 0, 0, 0, 0)

    def work_tile_at(t, *_):
        return SimpleNamespace(seq=MagicMock(), b=0, h=t, row0=0, count=keys, last=keys - 1)

    replaced = {
        "gl": gl, "STAGES": stages, "V_STAGES": stages + 1, "exceeds": lambda sums: 0,
        "bias_of": score.bias_of.fn,
        "following": small_heads_kernel.following.fn, "mma_one_n_block": small_heads_kernel.mma_one_n_block.fn,
        "with_maxima": small_heads_kernel.with_maxima.fn,
        "work_tile_at": work_tile_at, "entry_at": lambda i, tile, c: SimpleNamespace(n=tile.last - i),
        "box_of": lambda first, count, b, h, row, c, col=0: [h, row],
        "bias_box": lambda tile, b, row, n0, terms, c: [tile.h, row, n0],
        "hidden_keys": lambda x, tile, n, sizes, c: (tile.h, 64 * n), "store_step": memory.store,
        "fence_async_shared": memory.order("fence"), "warps_barrier": memory.order("barrier"),
        "tma_load": memory.load, "wait_left": memory.wait_left, "leave": memory.leave,
        "mbarrier": SimpleNamespace(wait=memory.wait, expect=memory.expect),
        "warpgroup_mma_wait": lambda count, deps: deps if len(deps) > 1 else deps[0],
    }  # fmt: skip
    for name, value in replaced.items():
        monkeypatch.setattr(small_heads_kernel, name, value)

    def pipeline(kind):
        """Whose index names a slot for `load`, and says in another thread what was read there."""

        def index(slot):
            role = threading.current_thread().name
            if role == "load":
                return kind, slot
            read[int(role)].append((kind, memory.tiles[kind, slot]))
            memory.unread.get((kind, slot), set()).discard(int(role))
            return MagicMock()

        return SimpleNamespace(index=index)

    full = SimpleNamespace(index=lambda slot: slot)
    pipelines = pipeline("k"), pipeline("v"), pipeline("bias"), pipeline("hidden")
    shared = small_heads_kernel.SmallHeadShared(MagicMock(), *pipelines, MagicMock(), full, MagicMock())
    sized = {
        name: SimpleNamespace(block_type=SimpleNamespace(nbytes=n)) for name, n in {"k": 4, "v": 4, "bias": 8}.items()
    }
    x = SimpleNamespace(q=MagicMock(), o=MagicMock(), **sized)
    c = SimpleNamespace(WARPGROUPS=2, BLOCK_N=64, BLOCK_D=32, BLOCK_DV=32, BIAS_BATCH=False, HIDES_KEYS=cut)
    sizes = SimpleNamespace(tiles=tiles, group=1, batch=1)
    failed = []

    def role(function, *arguments):
        try:
            function(x, shared, *arguments)
        except Exception as error:  # noqa: BLE001  (of another thread)
            failed.append(error)

    threads = [threading.Thread(target=role, args=(small_heads_kernel.load.fn, MagicMock(), sizes, c), name="load")]
    for w in range(2):
        arguments = (small_heads_kernel.compute.fn, MagicMock(), MagicMock(), sizes, c, w)
        threads.append(threading.Thread(target=role, args=arguments, name=str(w)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed
    order = [(h, 64 * n) for h in range(tiles) for n in reversed(range(keys))]
    for w in range(2):
        assert [at for kind, at in read[w] if kind == "k"] == order
        assert [at for kind, at in read[w] if kind == "v"] == order
        assert [at for kind, at in read[w] if kind == "bias"] == [(h, 64 * w, n0) for h, n0 in order]
        assert [at for kind, at in read[w] if kind == "hidden"] == (order if cut else [])


def as_numpy(words):
    """Of Gluon's language what `key_mask.hidden_keys` needs; pointers are places in ``words``."""
    return SimpleNamespace(
        arange=lambda begin, end, _: np.arange(begin, end), where=np.where, cdiv=lambda x, y: -(-x // y),
        load=lambda at: words[at], SliceLayout=MagicMock(), BlockedLayout=MagicMock(),
    )  # fmt: skip


def drawn_mask(batch, keys):
    """Of tiles of 64 keys, of which the last is not whole."""
    seen = np.random.default_rng(0).random((batch, -(-keys // 64) * 64)) < 0.5
    seen[:, keys:] = False
    return seen


def test_hidden_keys_have_the_bits_of_the_mask(monkeypatch):
    """In the order of `mask_kernels.summary_kernel`'s docstring, of one batch element of several."""
    batch, keys = 3, 150
    seen = drawn_mask(batch, keys)
    words = np.zeros(batch * 3 * 4, int)
    for b, n, col in np.argwhere(seen.reshape(batch, 3, 64)):
        words[4 * (3 * b + n) + col % 8 // 2] |= 1 << (2 * (col // 8) + col % 2)
    monkeypatch.setattr(key_mask, "gl", as_numpy(words))
    monkeypatch.setattr(key_mask, "mask_of", lambda b, h, heads, c: b)
    c = SimpleNamespace(MASK=True, BLOCK_N=64)
    for b, n in itertools.product(range(batch), range(3)):
        found = key_mask.hidden_keys.fn(
            SimpleNamespace(bits=0), SimpleNamespace(b=b, h=1), n, SimpleNamespace(keys=keys, heads=4), c
        )
        assert list(found == 0.0) == list(seen[b, 64 * n : 64 * n + 64])
        assert list(found == -np.inf) == list(~seen[b, 64 * n : 64 * n + 64])


def test_keys_past_the_end_are_hidden(monkeypatch):
    monkeypatch.setattr(key_mask, "gl", as_numpy(None))
    c, sizes = SimpleNamespace(MASK=False, BLOCK_N=64), SimpleNamespace(keys=150)
    found = [key_mask.hidden_keys.fn(None, None, n, sizes, c) for n in range(3)]
    assert list(np.concatenate(found) == 0.0) == [key < 150 for key in range(192)]


@pytest.mark.parametrize("heads", [1, 4])
def test_lanes_hide_keys_by_the_bits_of_the_mask(monkeypatch, heads):
    """In the order of `mask_kernels.summary_kernel`'s docstring, BY_KEYS; all keys of a batch element that is not."""
    batch, keys = 3, 150
    seen = drawn_mask(batch, keys)
    words = np.zeros(batch * 3 * 128, int)
    for b, n, col in np.argwhere(seen.reshape(batch, 3, 64)):
        s, h, k = col // 16, col // 8 % 2, col % 8
        for w in range(4):
            words[128 * (3 * b + n) + 32 * s + 4 * k + w] |= 0xFFFF << (16 * h)
    gl = as_numpy(None)
    gl.load = lambda at, mask, other: np.where(mask, words[np.minimum(at, len(words) - 1)], other)
    monkeypatch.setattr(key_mask, "gl", gl)
    monkeypatch.setattr(key_mask, "mask_of", lambda b, h, heads, c: b)
    c, sizes = SimpleNamespace(BLOCK_N=64), SimpleNamespace(key_tiles=3, kv_heads=heads, group=1)
    x = SimpleNamespace(bits=0, k=SimpleNamespace(shape=[batch]))
    for b, n in itertools.product(range(batch + 1), range(3)):
        tile = SimpleNamespace(b=b, hk=heads - 1, n0=64 * n)
        found = key_mask.hidden_keys_of_element.fn(x, tile, sizes, c)
        shown = seen[b, 64 * n : 64 * n + 64] if b < batch else np.zeros(64, bool)
        assert list(found == 0.0) == list(shown)
        assert list(found == -np.inf) == list(~shown)
