"""How much shared and tensor memory kernels take, for GPUs that need not be there; in a child process as aot_child.

What is looked at is what the compiler has decided before it makes machine code, which takes most of its time.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import aot_child
import torch
from helpers import Case, lay_out, rows_of
from relative_helpers import Term
from torch import Tensor

TENSOR_MEMORY = 512  # columns of a Blackwell multiprocessor


class Room(NamedTuple):
    """What a kernel takes of a multiprocessor, in bytes and columns, and how many bytes there are."""

    name: str
    shared: int
    limit: int
    tensor_memory: int

    @property
    def fits(self) -> bool:
        return self.shared <= self.limit and self.tensor_memory <= TENSOR_MEMORY


@contextlib.contextmanager
def no_machine_code(known: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Triton makes no machine code. known: what it would say of memory, which it then does not find out either."""
    from triton.backends.nvidia.compiler import CUDABackend

    add_stages = CUDABackend.add_stages

    def end(source: Any, metadata: dict) -> str:
        metadata.update(known or {}, name="kernel")
        return ""

    def without(self, stages: dict, *arguments: Any) -> None:
        add_stages(self, stages, *arguments)
        stages |= {"ptx": end, "cubin": lambda source, metadata: b""} | ({} if known is None else {"llir": end})

    CUDABackend.add_stages = without
    try:
        yield
    finally:
        CUDABackend.add_stages = add_stages


def room(
    case: Case, backend: str | None = None, smallest: bool = False, exact: bool = False, terms: tuple[Term, ...] = ()
) -> list[Room]:  # fmt: skip
    """Of every kernel that a case launches, forward and the gradients that it asks for, in the plan's backend or in the
    one that is named. See `launches`."""
    aot_child._launched.clear()
    with no_machine_code():
        launches(case, backend, smallest, exact, terms)
    limit = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227}.get(aot_child._capability, 99) * 1024
    return [
        Room(name, shared, limit, columns)
        for name, kernel in aot_child._launched
        for shared, columns in [aot_child.memory_of(kernel)]
    ]


def launches(
    case: Case, backend: str | None = None, smallest: bool = False, exact: bool = False, terms: tuple[Term, ...] = ()
) -> None:  # fmt: skip
    """Launch what computes a case and the gradients that it asks for, on meta tensors. smallest: in the triton backend,
    with the shortest pipeline that is tried. exact: the problem is, and torch's setting for float32 is TF32.
    terms: bias terms beside the case's bias, each with its gradient."""
    from tilewise.backends import Inputs, Needs, Outputs, empty_output
    from tilewise.backends.triton import launch
    from tilewise.frontend.arguments import read_call
    from tilewise.planner import make_plan
    from tilewise.spec.problem import Problem, irregular
    from tilewise.spec.score import Band, Score

    c = case
    torch.backends.cuda.matmul.allow_tf32 = exact

    def meta(which: int, *shape: int, dtype: torch.dtype = c.dtype) -> Tensor:
        return lay_out(torch.empty(shape, dtype=dtype, device="meta"), c.layout, which)

    inputs = Inputs(
        meta(0, c.B, c.H, c.M, c.D),
        meta(1, c.B, c.kv_heads, c.N, c.D),
        meta(2, c.B, c.kv_heads, c.N, c.value_dim),
        None if c.bias is None else meta(3, *c.shape(c.bias), dtype=c.bias_dtype or c.dtype),
        None if c.mask is None else meta(4, *c.shape(c.mask), dtype=torch.bool),
        None if c.sink is None else rows_of(torch.empty(c.shape(c.sink), dtype=c.sink_dtype or c.dtype, device="meta")),
        seed=torch.empty(2, dtype=torch.int64, device="meta") if c.dropout_p else None,
    )
    cotangents = Outputs(
        meta(5, c.B, c.H, c.M, c.value_dim), meta(6, c.B, c.H, c.M, dtype=torch.float32) if c.lse else None
    )
    needs = Needs(
        *(x in c.grads for x in "qkv"), c.bias is not None and "b" in c.grads, c.sink is not None and "s" in c.grads
    )
    band = Band.aligned(c.causal, c.window, c.N - c.M)
    score = Score.of(band, c.D, scale=c.scale, softcap=c.softcap, dropout_p=c.dropout_p)
    part_grads: tuple[str, ...] = ()
    if terms:
        made = [term.of(term.leaf(c, "meta", None), c) for term in terms]
        call = read_call(
            *inputs[:3], bias=(*made,) if inputs.bias is None else (inputs.bias, *made), mask=inputs.mask,
            sink=inputs.sink, **{"dropout_p": 0.0, "dropout_seed": None, **c.terms}, deterministic=c.deterministic,
            backend=None,
        )  # fmt: skip
        inputs, score = call.inputs, call.score
        found = {} if inputs.parts is None else inputs.parts._asdict()
        part_grads = tuple(name for name, x in found.items() if x is not None and x.is_floating_point())
        needs = needs._replace(bias=inputs.bias is not None and needs.bias, **dict.fromkeys(part_grads, True))

    def plan(do: Tensor | None, bias_grad: bool) -> Any:
        problem = Problem.of(
            *inputs, score, bias_grad=bias_grad, deterministic=c.deterministic, exact=exact,
            part_grads=part_grads if do is not None else (), irregular=irregular(*inputs[:4], do),
        )  # fmt: skip
        problem = dataclasses.replace(problem, device="cuda", capability=aot_child._capability)
        return make_plan(problem, backend or "auto")

    def shrink(run: Any, *tensors: Any) -> None:
        while (
            smallest
            and isinstance(run, (launch.TritonForward, launch.TritonBackward))
            and run.config.smaller() is not None
        ):
            run._prepare(run.config.smaller(), *tensors)

    forward = plan(None, False)
    run = forward.module.prepare["forward"](forward.problem, inputs)
    shrink(run, inputs)
    run(inputs)
    if any(needs):
        outputs = Outputs(
            empty_output(inputs.q, c.value_dim, "meta"),
            torch.empty(c.B, c.H, c.M, dtype=torch.float32, device="meta"),
        )
        backward = plan(cotangents.o, needs.bias)
        run = backward.backward_module.prepare["backward"](backward.problem, inputs, outputs, cotangents, needs)
        shrink(run, inputs, outputs, cotangents)
        run(inputs, outputs, cotangents)
