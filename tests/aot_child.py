"""Compiles kernels ahead of time, for a GPU that need not be there; child process of `aot_compilers.Compilers`.

What is compiled is what would run: the backend's own launch code, on meta tensors, with a driver that only names a
target. What the ledger of earlier compilations knows is not compiled again, see ledger.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import bytecode_written  # noqa: F401  (before torch)
import descriptor_lint
import ledger
import torch
import wgmma_lint
from garbage import collect_seldom
from helpers import Case, rows_of
from relative_helpers import Term
from softmax_helpers import Case as SoftmaxCase


class Kernel(NamedTuple):
    """What is known of one compiled kernel: sizes in bytes, `instructions` a count of each of INSTRUCTIONS."""

    name: str
    shared: int
    shared_limit: int
    tensor_memory: int  # columns, of 512 that a Blackwell multiprocessor has; past them the kernel is one trap
    registers: int
    spill_stores: int
    instructions: dict[str, int]
    warnings: list[str]


# In PTX: tensor-core instructions of Hopper (HGMMA in machine code), of Ampere and Ada (HMMA), of Blackwell; rounding.
INSTRUCTIONS = {
    "wgmma": r"\bwgmma\.mma_async\b",
    "mma.sync": r"(?<!\.)\bmma\.sync\b",
    "tcgen05": r"\btcgen05\.mma\b",
    "to tf32": r"\bcvt\.rna\.tf32\b",
    "added by TMA": r"\bcp\.reduce\.async\.bulk\.tensor\b",
    "added in fours": r"\b(?:atom|red)\.global\.\S*\.add\.v4\.f32\b",
    "stored in pairs": r"\bst\.shared\.v2\b",
    "lets the next begin": r"\bgriddepcontrol\.launch_dependents\b",
    "waits for the previous": r"\bgriddepcontrol\.wait\b",
    "scaled bias": r"\bmul\.rz\.f32\b",
    "words of dropout": r"\bmul\.(?:lo\.s32|wide\.u32)\b.*, -?(?:766062189|3528905107);",
}

_capability = (0, 0)  # of the target, see `on_target`
_launched: list[tuple[str, Any]] = []  # name, kernel: Triton's, or the fingerprint of one in the ledger
_logs: dict[str, str] = {}  # what ptxas said of a kernel, by its hash: several cases may share one
_fingerprints: dict[str, str] = {}  # of a kernel, by its hash
_entries: dict[str, ledger.Entry] = {}  # of this process, by fingerprint
_known: dict[str, Any] = {}  # what need not be compiled, by fingerprint: the ledger's entry, or room


def on_target(target: int, function: Any, *arguments: Any) -> Any:
    """``function(*arguments)``, which compiles for a target such as 90."""
    global _capability
    _capability = divmod(target, 10)
    return function(*arguments)


def start(triton_path: str | None, cache: str) -> None:
    """Make this process a compiler, with the triton in ``triton_path`` or else the installed one."""
    if triton_path is not None:
        sys.path.insert(0, triton_path)
    os.environ.update(TRITON_ALWAYS_COMPILE="1", TRITON_DUMP_PTXAS_LOG="1", TRITON_CACHE_DIR=cache)
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITCallable, JITFunction

    from tilewise.backends.launch import launcher

    collect_seldom()
    assert triton_path is None or Path(triton.__file__).is_relative_to(triton_path)
    warnings.simplefilter("error")  # as in the tests' own process: here a version says what the next will not have

    class Target:
        """A driver of no device: names the target and nothing else. Each target has a number of device of its own, by
        which Triton keeps what it has found out of one."""

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", self.get_current_device(), 32)

        def get_current_device(self) -> int:
            return 10 * _capability[0] + _capability[1]

        def get_current_stream(self, device: int = 0) -> int:
            return 0

    def compile_only(self, *args, grid, warmup, **options):
        log = io.StringIO()
        with contextlib.redirect_stdout(log):
            kernel = run(self, *args, grid=grid, warmup=True, **options)
        if not isinstance(kernel, str):
            _logs.setdefault(kernel.hash, log.getvalue())
        _launched.append((self.fn.__name__, kernel))
        return kernel

    def compile_unknown(self, key, signature, device, constexprs, options, attrs, warmup):
        *_, target, backend, _ = self.device_caches[device]
        libraries = {"extern_libs": None}  # where they lie
        found = ledger.digest(
            self.cache_key, signature, constexprs, attrs, options.__dict__ | libraries, backend.hash(), target,
            triton.__version__,
        )  # fmt: skip
        if found in _known:
            return found
        kernel = compile(self, key, signature, device, constexprs, options, attrs, warmup)
        _fingerprints.setdefault(kernel.hash, found)
        return kernel

    def program_key(self):
        if self.hash is None:
            source, line = self._src, self.starting_line_number
            self._src, self.starting_line_number = ledger.program(source), 0
            try:
                cache_key(self)
                # Again, now that what it calls has its own: Triton takes the globals of those alone that had one.
                self.hash = None
                cache_key(self)
            finally:
                self._src, self.starting_line_number = source, line
        return self.hash

    driver.set_active(Target())
    # Every case asks for its kernels anew.
    launcher.kernels = SimpleNamespace(get=lambda wants: None, put=lambda wants, kernel: kernel)
    run, JITFunction.run = JITFunction.run, compile_only
    compile, JITFunction._do_compile = JITFunction._do_compile, compile_unknown
    cache_key, JITCallable.cache_key = JITCallable.cache_key.fget, property(program_key)


def with_ledger(function: Any, name: str, folder: str | None, again: bool, case: Any, *more: Any) -> Any:
    """``function(case, *more)``, one of those below, whose compilations are known as `name`.

    again: every kernel is compiled, and has to be what the ledger says if it has an entry. folder: where what was
    compiled is written for a new ledger; nothing is then taken from the old one.
    """
    known = {} if folder else ledger.load().kernels
    _known.clear()
    _known.update({} if again else known)
    try:
        found, kernels = function(case, *more), list(map(_entry, _launched))
    finally:
        _known.clear()
    for fingerprint, entry in kernels:
        if not known.get(fingerprint, entry).agrees(entry):
            raise AssertionError(f"the ledger has {known[fingerprint]}, compiled was {entry}: see tests/ledger.py")
    if folder:
        with (Path(folder) / f"{os.getpid()}.jsonl").open("a") as file:
            print(json.dumps([name, kernels]), file=file)
    return found


def with_rooms(function: Any, name: str, folder: str | None, again: bool, case: Any, *more: Any) -> Any:
    """The same of `room_child.room`, which reads the memory of each kernel by `memory_of`."""
    known: dict[str, Any] = {} if folder else ledger.load().rooms
    _known.clear()
    _known.update({} if again else known)
    try:
        found = function(case, *more)
        rooms = [(_fingerprint(kernel), memory_of(kernel)) for _, kernel in _launched]
    finally:
        _known.clear()
    for key, memory in rooms:
        if known.get(key, memory) != memory:
            raise AssertionError(f"the ledger has {known[key]}, compiled was {memory}: see tests/ledger.py")
    if folder:
        with (Path(folder) / f"{os.getpid()}.jsonl").open("a") as file:
            print(json.dumps([ledger.ROOM, rooms]), file=file)
    return found


def memory_of(kernel: Any) -> list[int]:
    """Bytes of shared memory, columns of tensor memory."""
    if isinstance(kernel, str):
        return _known[kernel]
    return [kernel.metadata.shared, getattr(kernel.metadata, "tmem_size", 0) or 0]


def _fingerprint(kernel: Any) -> str:
    return kernel if isinstance(kernel, str) else _fingerprints[kernel.hash]


def triton_version() -> str:
    import triton

    return triton.__version__


def compile_case(
    case: Case, backward: bool = True, tf32: bool = False, terms: tuple[Term, ...] = (), tiles: str = "",
    origin: tuple[int, int, int] = (0, 0, 0), statistics: tuple[bool, ...] = (),
) -> list[Kernel]:  # fmt: skip
    """Every Triton kernel that a case's forward and backward launch; of layouts, "contiguous" and "sliced".

    terms: bias terms beside the case's own bias, each with its gradient. tiles: of a mask by tiles, one for each batch
    element, "bits" or "intervals", a space, and how many queries and keys a tile has. origin: of dropout. statistics:
    those that are computed.
    """
    torch.backends.cuda.matmul.allow_tf32 = tf32
    from tilewise.backends import Needs, Outputs, empty_low_bits, empty_output, saved_lse_dtype
    from tilewise.backends import triton as backend
    from tilewise.backends.triton import config
    from tilewise.spec.bias_components import DIFFERENTIABLE
    from tilewise.spec.dropout import Origin
    from tilewise.spec.statistics import Statistics

    problem, inputs = _call(case, terms, tiles)
    score = dataclasses.replace(problem.score, origin=Origin(*origin), statistics=Statistics(*statistics))
    problem = dataclasses.replace(problem, score=score)
    o = empty_output(inputs.q, case.value_dim)
    lse = torch.empty(o.shape[:3], dtype=saved_lse_dtype(problem.dtype, problem), device="meta")
    _launched.clear()
    backend.prepare["forward"](problem, inputs)(inputs)
    if backward:
        outputs = Outputs(o, lse, empty_low_bits(o, problem))
        cotangents = Outputs(torch.empty_like(o), torch.empty_like(lse, dtype=torch.float32) if case.lse else None)
        needs = Needs(
            *("q" in case.grads, "k" in case.grads, "v" in case.grads), inputs.bias is not None and "b" in case.grads,
            case.sink is not None,
            **{name: name in problem.parts.grads for name in DIFFERENTIABLE if problem.parts is not None},
        )  # fmt: skip
        backend.prepare["backward"](problem, inputs, outputs, cotangents, needs)(inputs, outputs, cotangents)
    limit = config.shared_memory(problem)
    return [_report(launched, limit) for launched in _launched]


def compile_tangents(case: Case, given: str = "qkvb") -> list[Kernel]:
    """What Triton launches for the tangents of a case; given: the operands that have one, letters of "qkvbs"."""
    from tilewise.backends import Outputs, empty_output
    from tilewise.backends import triton as backend
    from tilewise.backends.protocol import Tangents
    from tilewise.backends.triton import config

    torch.backends.cuda.matmul.allow_tf32 = False  # `compile_case` leaves its own
    problem, inputs = _call(case)
    names = {"q": "q", "k": "k", "v": "v", "b": "bias", "s": "sink"}
    found = {names[letter]: torch.empty_like(getattr(inputs, names[letter])) for letter in given}
    tangents = Tangents(**dict.fromkeys(("q", "k", "v", "bias")) | found)
    outputs = Outputs(empty_output(inputs.q, case.value_dim), None)
    _launched.clear()
    backend.prepare["tangents"](problem, inputs, outputs, tangents)(inputs, outputs, tangents)
    return [_report(launched, config.shared_memory(problem)) for launched in _launched]


def compile_softmax(case: SoftmaxCase, processors: int) -> list[Kernel]:
    """Every kernel that a softmax and its backward launch on a device of so many multiprocessors."""
    from tilewise.ops.row_softmax import BiasLike, SoftmaxNeeds
    from tilewise.ops.row_softmax.triton import launch

    def meta(shape: tuple[int, ...], dtype: torch.dtype = case.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    x, dim = meta(case.shape), case.dim % len(case.shape)
    bias = None if case.bias is None else meta(case.operand(case.bias), case.bias_dtype or case.dtype)
    mask = None if case.mask is None else meta(case.operand(case.mask), torch.bool)
    launch._processors = lambda x: processors
    _launched.clear()
    p = launch.forward(x, case.scale, bias, mask, dim)
    like = None if bias is None else BiasLike(tuple(bias.shape), bias.dtype)
    launch.backward(x, p, case.scale, like, dim, SoftmaxNeeds(True, bias is not None))
    return [_report(launched, 227 * 1024) for launched in _launched]


def compile_kept_keys(shape: tuple[int, int, int, int], chunks: int) -> list[Kernel]:
    """The kernels of a dynamic mask that is causal, and of the gradients of its gathered keys (B, H, N, D)."""
    from tilewise.backends.kernels import interval_tiles
    from tilewise.topk import kernels as topk_kernels

    def meta(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    B, H, N, D = shape
    _launched.clear()
    begins, ends = topk_kernels.selected_intervals(meta(B, H, N), N // 4, True, N)
    interval_tiles.tiles_of_intervals(begins, ends, N, (128, 128))
    way = chunks, N // chunks, N // 2, True
    keys, _ = topk_kernels.keys_of_chunks(begins, ends, (-(2**30), 0), way, B)
    places = topk_kernels.places_of(keys, N)
    grad = meta(B * chunks, H, N // 2, D, dtype=torch.bfloat16)
    topk_kernels.sum_rows(grad, places, shape, torch.bfloat16, True)
    topk_kernels.take_rows(meta(*shape, dtype=torch.bfloat16), keys)
    return [_report(launched, 227 * 1024) for launched in _launched]


class WindowCase(NamedTuple):
    """A call of windows of 32 queries and 128 keys, or others; samples share the bias, q, k, v lie as (B, N, H, D)."""

    samples: int = 1
    heads: int = 4
    length: int = 10240
    head_dim: int = 32
    dtype: torch.dtype = torch.bfloat16
    q_block: int = 32
    k_block: int = 128
    shift: bool = False
    heads_last: bool = False  # of the bias

    def tensors(self, device: str = "meta") -> list[torch.Tensor]:
        """q, k, v, the bias and the mask."""

        def empty(*shape: int, dtype: torch.dtype = self.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        blocks = -(-self.length // self.q_block)
        rows = [empty(self.samples, self.length, self.heads, self.head_dim).transpose(1, 2) for _ in range(3)]
        if self.heads_last:
            bias = empty(1, blocks, self.q_block, self.k_block, self.heads).movedim(-1, 1)
        else:
            bias = empty(1, self.heads, blocks, self.q_block, self.k_block)
        return [*rows, bias, empty(1, self.length, dtype=torch.bool)]


def compile_windows(case: WindowCase) -> list[Kernel]:
    """The forward of windows of keys, which keeps what a backward reads, and the backward with all gradients."""
    from tilewise.windows import Geometry, WindowNeeds
    from tilewise.windows.launch import Windowed

    tensors = case.tensors()
    _launched.clear()
    run = Windowed(*tensors, Geometry(case.q_block, case.k_block, case.shift), 0.1)
    o, stats = run.forward(*tensors, True)
    run.backward(*tensors, o, stats, torch.empty_like(o), WindowNeeds(True, True, True, True))
    return [_report(launched, 227 * 1024) for launched in _launched]


class Code(NamedTuple):
    """A compiled kernel, with what its machine code says of wgmma."""

    kernel: Kernel
    wgmma: int
    hazards: list[wgmma_lint.Hazard]


def compile_hopper_case(
    case: Case, backward: bool = False, tiles: str = "", statistics: tuple[bool, ...] = ()
) -> list[Code]:
    """Every kernel that a case's forward, or its backward, launches in the hopper backend; tiles, statistics: as for
    `compile_case`."""
    from tilewise.backends import Needs, Outputs, empty_low_bits, empty_output, saved_lse_dtype
    from tilewise.backends.gluon.sm90.backward import launch as backward_launch
    from tilewise.backends.gluon.sm90.common import config
    from tilewise.backends.gluon.sm90.forward import launch
    from tilewise.spec.statistics import Statistics

    _launched.clear()
    problem, inputs = _call(case, tiles=tiles)
    score = dataclasses.replace(problem.score, statistics=Statistics(*statistics))
    problem = dataclasses.replace(problem, score=score)
    if backward:
        o = empty_output(inputs.q, case.value_dim)
        lse, dlse = (
            torch.empty(o.shape[:3], dtype=dtype, device="meta")
            for dtype in (saved_lse_dtype(problem.dtype, problem), torch.float32)
        )
        needs = Needs(True, True, True, case.bias is not None, case.sink is not None)
        outputs, cotangents = Outputs(o, lse, empty_low_bits(o, problem)), Outputs(o, dlse)
        backward_launch.HopperBackward(problem, inputs, outputs, cotangents, needs)(inputs, outputs, cotangents)
    else:
        launch.HopperForward(problem, inputs)(inputs)
    return _codes(config.SHARED_MEMORY)


def _codes(limit: int) -> list[Code]:
    entries = [_entry(launched)[1] for launched in _launched]
    return [
        Code(_report(launched, limit), x.wgmma, [wgmma_lint.Hazard(*hazard) for hazard in x.hazards])
        for launched, x in zip(_launched, entries, strict=True)
    ]


def compile_matmul(case: Any, backend: str, changes: dict[str, Any]) -> list[Code] | list[Kernel]:
    """The kernel that a product of matmul_helpers launches in a backend of `tilewise.matmul`; for Hopper with
    ``changes`` to its configuration."""
    import importlib

    from matmul_helpers import operands

    from tilewise.ops.gemm.config import hopper_config
    from tilewise.ops.gemm.problem import describe

    torch.backends.cuda.matmul.allow_tf32 = False  # `compile_case` leaves its own
    module = importlib.import_module(f"tilewise.ops.gemm.{backend}")
    a, b, c, y = operands(case, "meta")
    product = describe(a, b, c, ())
    assert product is not None
    product = dataclasses.replace(product, device="cuda", capability=_capability)
    _launched.clear()
    if backend == "hopper":
        config = dataclasses.replace(hopper_config(product), **changes)
        module.prepare(product, a, b, c, y, case.alpha, case.beta, config)(a, b, c, y)
        return _codes(227 * 1024)
    module.prepare(product, a, b, c, y, case.alpha, case.beta)(a, b, c, y)
    return [_report(launched, 99 * 1024) for launched in _launched]


def _call(case: Case, terms: tuple[Term, ...] = (), tiles: str = "") -> tuple[Any, Any]:
    """The case as a problem on the target, and its inputs as meta tensors; "heads_last" of the mask alone."""
    from tilewise.backends import Inputs
    from tilewise.frontend.arguments import read_call
    from tilewise.spec.problem import Problem
    from tilewise.spec.score import Band, Score

    c = case

    def meta(*shape: int, dtype: torch.dtype = c.dtype) -> torch.Tensor:
        padding = 1 if c.layout == "sliced" else 0  # rows that no TMA descriptor can hold
        return torch.empty((*shape[:-1], shape[-1] + padding), dtype=dtype, device="meta")[..., : shape[-1]]

    mask = None if c.mask is None else meta(*c.shape(c.mask), dtype=torch.bool)
    inputs = Inputs(
        meta(c.B, c.H, c.M, c.D),
        meta(c.B, c.kv_heads, c.N, c.D),
        meta(c.B, c.kv_heads, c.N, c.value_dim),
        None if c.bias is None else meta(*c.shape(c.bias), dtype=c.bias_dtype or c.dtype),
        mask.mT.contiguous().mT if mask is not None and c.layout == "heads_last" else mask,
        None if c.sink is None else rows_of(meta(*c.shape(c.sink), dtype=c.sink_dtype or c.dtype)),
        seed=torch.empty(2, dtype=torch.int64, device="meta") if c.dropout_p else None,
    )
    if tiles:
        inputs = inputs._replace(tiles=_tiles(c, *tiles.split()))
    band = Band.aligned(c.causal, c.window, c.N - c.M)
    score = Score.of(band, c.D, softcap=c.softcap, dropout_p=c.dropout_p)
    grads: tuple[str, ...] = ()
    if terms:
        made = [term.of(term.leaf(c, "meta", None), c) for term in terms]
        call = read_call(
            *inputs[:3], bias=(*made,) if inputs.bias is None else (inputs.bias, *made), mask=inputs.mask,
            sink=inputs.sink, **{**c.terms, "dropout_p": 0.0, "dropout_seed": None}, deterministic=c.deterministic,
            backend=None,
        )  # fmt: skip
        inputs, score = call.inputs, call.score
        grads = tuple(name for name, x in inputs.parts._asdict().items() if x is not None and x.is_floating_point())
    in_runs = c.bias is not None and c.bias[0] == "r"
    described = inputs._replace(bias=inputs.bias.unsqueeze(1)) if in_runs else inputs
    problem = Problem.of(
        *described, score, bias_grad=inputs.bias is not None, sink_grad=c.sink is not None, part_grads=grads,
        deterministic=c.deterministic,
    )  # fmt: skip
    return dataclasses.replace(problem, device="cuda", capability=_capability), inputs


def _tiles(c: Case, kind: str, block: str) -> Any:
    from tilewise.spec.block_mask import TileTensors

    def meta(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device="meta")

    n = int(block)
    tiles = meta(c.B, 1, -(-c.M // n), -(-c.N // n))
    if kind == "bits":
        return TileTensors(tiles, meta(100, n, n // 32))
    found = TileTensors(tiles, meta(0, n, n // 32), meta(c.B, 1, 1, c.N), meta(c.B, 1, 1, c.N))
    return found._replace(offsets=meta(c.B, c.N + 1)) if kind == "documents" else found


IDLE = "its memory is given to something else, into which the hardware may write it back late"


def idle_barriers(ttgir: str) -> list[str]:
    """Barriers that are set up for the roles of a kernel, and used by none of them."""
    before, _, after = ttgir.partition("ttg.warp_specialize(")
    names = re.findall(r"(%\S+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<[\dx]+xi64", before)
    return [name for name in names if after and not re.search(rf"{re.escape(name)}\b", after)]


@functools.lru_cache(maxsize=1)  # a kernel is read twice, one after the other
def _disassemble(cubin: bytes) -> str:
    """SASS, by the tools that come with the triton in use."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        path = f"{tools}{os.pathsep}{os.environ['PATH']}"  # cuobjdump looks for nvdisasm
        done = subprocess.run(
            [tools / "cuobjdump", "-sass", file.name],
            env=os.environ | {"PATH": path}, capture_output=True, text=True, check=True,
        )  # fmt: skip
    return done.stdout


def _report(launched: tuple[str, Any], limit: int) -> Kernel:
    _, x = _entry(launched)
    counts = {word: x.instructions.get(word, 0) for word in INSTRUCTIONS}
    return Kernel(launched[0], x.shared, limit, x.tensor_memory, x.registers, x.spill_stores, counts, list(x.warnings))


def _entry(launched: tuple[str, Any]) -> tuple[str, ledger.Entry]:
    """A kernel's fingerprint, and what the ledger says of it or its code does."""
    name, kernel = launched
    if isinstance(kernel, str):
        return kernel, _known[kernel]
    fingerprint = _fingerprints[kernel.hash]
    if fingerprint not in _entries:
        _entries[fingerprint] = _read(name, kernel, _logs[kernel.hash])
    return fingerprint, _entries[fingerprint]


def _read(name: str, kernel: Any, log: str) -> ledger.Entry:
    """What ptxas said of a kernel, and its code; disassembled where there is wgmma, which takes half a second."""
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.search(r"(\d+) bytes spill stores", log)
    if registers is None or spills is None:
        raise AssertionError(f"{name}: ptxas did not say what it used:\n{log}")
    warnings = [
        line for line in log.splitlines() if re.search(r"warning|performance loss|serializ", line, re.IGNORECASE)
    ]
    instructions = {word: len(re.findall(pattern, kernel.asm["ptx"])) for word, pattern in INSTRUCTIONS.items()}
    sass = ""
    if instructions["wgmma"]:
        sass = _disassemble(kernel.asm["cubin"])
        lost = descriptor_lint.check(sass, kernel.asm["ptx"])
        warnings += [f"reads a descriptor that nothing made: {x.address:#x}: {x.instruction}" for x in lost]
    warnings += [f"{barrier} is a barrier without use: {IDLE}" for barrier in idle_barriers(kernel.asm["ttgir"])]
    return ledger.Entry(
        name=name,
        shared=kernel.metadata.shared,
        tensor_memory=getattr(kernel.metadata, "tmem_size", 0) or 0,
        registers=int(registers[1]),
        spill_stores=int(spills[1]),
        instructions={word: count for word, count in instructions.items() if count},
        warnings=warnings,
        wgmma=wgmma_lint.count(sass),
        hazards=[list(x) for x in wgmma_lint.lint(sass)],
        ptx=ledger.ptx_instructions(name, kernel.asm["ptx"]),
        code=ledger.instructions(kernel.asm["cubin"]),
    )
