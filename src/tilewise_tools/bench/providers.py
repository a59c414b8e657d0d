"""Providers, which compute a case: tilewise's backends and the alternatives to them."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

import tilewise
from tilewise.planner import AUTOMATIC, backend_module
from tilewise_tools.bench import operators, packed, packed_peers, sparse, structure, terms, windows
from tilewise_tools.bench.cases import DROPOUT_SEED, Case, CaseInputs

_CUDA_ONLY = "measured on CUDA devices only"
_MATH_BYTES = 8 << 30  # limit of float32 scores for SDPA's math backend, which is too slow above it


class Steps(NamedTuple):
    """Forward and backward of one provider on one case.

    Attributes:
        forward: () -> o (B, H, M, D), any strides.
        backward: (o) -> gradients of `CaseInputs.leaves` in their order, for the cotangent ``do``. Can be repeated.
        context: entered around all calls, outside the timed region.
        plain: converts (o, gradients) to the layout of the reference.
        renew: replaces a mask whose tile lists are cached, so that the next call computes them again; or None.
    """

    forward: Callable[[], Tensor]
    backward: Callable[[Tensor], tuple[Tensor, ...]]
    context: Callable[[], AbstractContextManager] = nullcontext
    plain: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]] = lambda found: found
    renew: Callable[[], None] | None = None


class Provider(NamedTuple):
    """One implementation of an operator.

    Attributes:
        unavailable: reason why it cannot run on this machine; None if it can.
        declines: (case) -> reason why it does not support the case, as far as known in advance; None if it may.
        prepare: (case, inputs) -> steps; may compile; raises if it does not support the case.
        operator: the operator of its cases.
        applies: (case) -> False if there is nothing to measure, so that no row is made.
    """

    name: str
    unavailable: str | None
    declines: Callable[[Any], str | None]
    prepare: Callable[[Any, Any], Steps]
    operator: str = "attention"
    applies: Callable[[Any], bool] = lambda case: True

    @property
    def ours(self) -> bool:
        return is_ours(self.name)


def is_ours(provider: str) -> bool:
    return provider.startswith("tilewise-")


def wants_cuda(reason: str | None) -> bool:
    """True if ``reason`` for not measuring a provider or case is that there is no CUDA device."""
    return reason is not None and (reason == _CUDA_ONLY or reason.startswith("needs a CUDA device"))


def providers(device: torch.device) -> list[Provider]:
    """Return all providers, including unavailable ones: tilewise's backends first, in order of preference."""
    elsewhere = None if device.type == "cuda" else _CUDA_ONLY
    flex = "has no backward on the CPU" if elsewhere else _missing("triton", "triton")
    return [
        *(_tilewise(backend, device) for backend in AUTOMATIC),
        Provider(
            "tilewise-entry",
            None,
            lambda case: None,
            lambda case, x: _autograd(structure.entry_point(case, x), x),
            applies=lambda case: case.entry is not None,
        ),
        _sdpa("sdpa-flash", "FLASH_ATTENTION", None),
        _sdpa("sdpa-cudnn", "CUDNN_ATTENTION", elsewhere),
        _sdpa("sdpa-efficient", "EFFICIENT_ATTENTION", elsewhere),
        _sdpa("sdpa-math", "MATH", None),
        Provider("flex", flex, _flex_declines, _flex),
        Provider("fa4", elsewhere or _missing("flash_attn.cute", "flash-attn-4"), _fa4_declines, _fa4),
        Provider(
            "cudnn-graph",
            elsewhere or _missing("cudnn", "nvidia-cudnn-frontend"),
            _no_cudnn_graph,
            _cudnn_graph,
        ),
        Provider(
            "cuequivariance",
            elsewhere or _missing("cuequivariance_ops_torch", "cuequivariance-ops-torch-cu13"),
            lambda case: _plain(case) or structure.cuequivariance_declines(case),
            lambda case, x: _autograd(structure.cuequivariance(case, x), x),
        ),
        *(_of_operator(*computer) for computer in operators.computers()),
        *_of_packed(device, elsewhere, flex),
        *_of_windows(device, flex),
    ]


def _of_windows(device: torch.device, flex: str | None) -> list[Provider]:
    """Return the providers of attention in windows of keys."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None

    def ours(backend: str) -> Provider:
        return Provider(
            f"tilewise-windows-{backend}",
            None,
            lambda case: backend_module(backend).declines(case.problem(device.type, capability)),
            lambda case, x: _autograd(windows.tilewise_windows(case, x, backend), x),
            "windows",
        )

    def provider(name: str, unavailable: str | None, make: Any) -> Provider:
        prepare: Any = lambda case, x: _autograd(make(case, x), x)  # noqa: E731
        return Provider(name, unavailable, lambda case: None, prepare, "windows")

    return [
        *(ours(backend) for backend in AUTOMATIC),
        provider("einsum-windows", None, windows.einsum),
        provider("einsum-compiled", None, windows.einsum_compiled),
        provider("sdpa-windows", None, windows.sdpa),
        provider("flex-windows", flex, windows.flex),
    ]


def _of_packed(device: torch.device, elsewhere: str | None, flex: str | None) -> list[Provider]:
    """Return the providers of packed batches; "padded" is a baseline, although tilewise computes it."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None

    def tilewise_varlen(backend: str) -> Provider:
        return Provider(
            f"tilewise-varlen-{backend}",
            None,
            lambda case: backend_module(backend).declines(case.problem(device.type, capability)),
            lambda case, x: _autograd(packed_peers.tilewise_varlen(case, x, backend), x),
            "varlen",
        )

    def other(name: str, unavailable: str | None, declines: Any, make: Any) -> Provider:
        return Provider(name, unavailable, declines, lambda case, x: _autograd(make(case, x), x), "varlen")

    no_fa4 = elsewhere or _missing("flash_attn.cute", "flash-attn-4")
    no_varlen = elsewhere or _missing("torch.nn.attention.varlen", "a torch with varlen_attn")
    return [
        *(tilewise_varlen(backend) for backend in AUTOMATIC),
        other("fa4-varlen", no_fa4, packed_peers.no_bias, packed_peers.fa4),
        other("torch-varlen", no_varlen, packed_peers.no_bias, packed_peers.torch_varlen),
        other("flex-varlen", flex, lambda case: None, packed_peers.flex),
        Provider("padded", None, packed_peers.ragged_alone, _padded, "varlen"),
    ]


def _padded(case: packed.PackedCase, x: packed.PackedInputs) -> Steps:
    full = packed_peers.padded(case, x)
    steps = _autograd(packed_peers.tilewise_padded(case, full), full)
    return steps._replace(plain=lambda found: packed_peers.packed_again(case, full, found))


def _of_operator(
    operator: str, name: str, make: Callable[[Any, operators.OperatorInputs], Callable[[], Tensor]]
) -> Provider:
    return Provider(name, None, lambda case: None, lambda case, x: _autograd(make(case, x), x), operator)


def _missing(module: str, distribution: str) -> str | None:
    parts = module.split(".")
    names = (".".join(parts[: n + 1]) for n in range(len(parts)))  # find_spec of a child needs its parent
    try:
        return None if all(importlib.util.find_spec(name) for name in names) else f"{distribution} is not installed"
    except ImportError as error:  # find_spec of a child imports its parent
        return f"{distribution} cannot be imported: {error}"


class _Leaves(Protocol):
    """Inputs of any case: leaves and the gradient of the output."""

    @property
    def leaves(self) -> list[Tensor]: ...
    @property
    def do(self) -> Tensor: ...


def _autograd(forward: Callable[[], Tensor], x: _Leaves, context: Any = nullcontext) -> Steps:
    return Steps(forward, lambda o: torch.autograd.grad(o, x.leaves, x.do, retain_graph=True), context)


def _tilewise(backend: str, device: torch.device) -> Provider:
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None

    def declines(case: Case) -> str | None:
        return backend_module(backend).declines(case.problem(device.type, capability))

    def prepare(case: Case, x: CaseInputs) -> Steps:
        q, k, v, bias, _, sink, trained, mask = x
        if case.run > 1:  # more leading dimensions
            q, k, v, bias, mask = structure.by_structure(case, x)  # type: ignore[assignment]
        term: Any = bias if case.term is None or trained is None else terms.term(case.term, trained)

        more: dict[str, Any] = {}
        if case.dropout:
            more = {"dropout_p": case.dropout, "dropout_seed": torch.tensor(DROPOUT_SEED, device=q.device)}
        if case.window is not None:
            more["window"] = (case.window - 1, 0)
        own = None
        if case.mask is not None and sparse.keep(case.mask) is not None:
            own = sparse.scores(case.heads, case.keys).to(q.device)
        elif case.mask is not None:
            more["mask"] = sparse.tile_mask(case.mask, case.queries, case.keys, q.device)
        elif mask is not None:
            more["mask"] = mask

        def forward() -> Tensor:
            if own is not None and case.mask is not None:
                more["mask"] = sparse.new_mask(case.mask, own, case.queries, case.causal)
            o = tilewise.attention(q, k, v, bias=term, sink=sink, causal=case.causal, backend=backend, **more)
            return o.flatten(0, -4)

        def renew() -> None:
            more["mask"] = sparse.copied(more["mask"])

        renews = case.mask is not None and own is None and device.type == "cuda"
        return _autograd(forward, x)._replace(renew=renew if renews else None)

    return Provider(f"tilewise-{backend}", None, declines, prepare)


def _sdpa(name: str, backend: str, unavailable: str | None) -> Provider:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def declines(case: Case) -> str | None:
        scores = 4 * case.batch * case.heads * case.queries * case.keys
        if backend == "MATH" and scores > _MATH_BYTES:
            return f"would store float32 scores of {scores / 2**30:.0f} GiB more than once"
        if case.run > 1:
            return "takes a bias of all batch elements or of each: an expanded one would be a copy"
        if case.causal and case.queries != case.keys:
            return "is_causal aligns top-left: with M != N another function"
        return _no_term(case)

    def prepare(case: Case, x: CaseInputs) -> Steps:
        q, k, v, bias, *_ = x
        grouped = case.heads != case.kv_heads
        return _autograd(
            lambda: F.scaled_dot_product_attention(
                q, k, v, attn_mask=_matrix(bias, x.mask), dropout_p=case.dropout, is_causal=case.causal,
                enable_gqa=grouped,
            ),
            x,
            lambda: sdpa_kernel(getattr(SDPBackend, backend)),
        )  # fmt: skip

    return Provider(name, unavailable, declines, prepare)


def _matrix(bias: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """Return SDPA's attn_mask: the bias, the mask, or both combined, of the broadcast shape."""
    if bias is None or mask is None:
        return mask if bias is None else bias
    return bias.masked_fill(~mask, -torch.inf)


def _flex_declines(case: Case) -> str | None:
    if case.mask is not None and sparse.keep(case.mask) is not None:
        return "has no mask of the best keys"
    return _no_dropout(case)


def _flex(case: Case, x: CaseInputs) -> Steps:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v, bias, *_ = x
    torch._dynamo.reset()  # beyond its recompilation limit flex_attention would run uncompiled and unfused
    compiled = torch.compile(flex_attention, dynamic=False)
    offset = case.keys - case.queries
    block_mask = None
    visible = None if case.mask is None else sparse.seen(case.mask, case.queries, case.keys, q.device)
    if case.causal or visible is not None:

        def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            found = j <= i + offset if case.causal else j >= 0
            if case.window is not None:
                found = found & (j > i + offset - case.window)
            return found if visible is None else found & visible(i, j)

        block_mask = create_block_mask(mask_mod, None, None, case.queries, case.keys, device=q.device.type)
    score_mod = None if bias is None else _score_mod(bias, case.run)
    if case.term is not None and x.term is not None:
        score_mod = terms.score_mod(case.term, x.term)
    if x.mask is not None:
        score_mod = _score_mod_of_mask(score_mod, x.mask)
    grouped = case.heads != case.kv_heads
    return _autograd(lambda: compiled(q, k, v, score_mod=score_mod, block_mask=block_mask, enable_gqa=grouped), x)


def _score_mod(bias: Tensor, run: int = 1) -> Callable[..., Tensor]:
    """Return a score_mod that adds the bias; omits broadcast axes, since an index of 0 is slower. run: `Case.run`."""
    batch, heads, rows, _ = (size > 1 for size in bias.shape)
    if run > 1:
        return lambda s, b, h, i, j: s + bias[b // run, h, i, j]
    if (batch, heads, rows) == (True, True, True):
        return lambda s, b, h, i, j: s + bias[b, h, i, j]
    if (batch, heads, rows) == (False, True, True):
        shared = bias.squeeze(0)  # the gradient of a select is a copy
        return lambda s, b, h, i, j: s + shared[h, i, j]
    if (batch, heads, rows) == (True, False, False):
        keys = bias.squeeze((1, 2))
        return lambda s, b, h, i, j: s + keys[b, j]
    return lambda s, b, h, i, j: s + bias[b if batch else 0, h if heads else 0, i if rows else 0, j]


def _score_mod_of_mask(score_mod: Callable[..., Tensor] | None, mask: Tensor) -> Callable[..., Tensor]:
    """Return ``score_mod`` with a mask of keys or pairs that all heads share; a block mask would skip no tile."""
    shown, by_keys = mask[:, 0], mask.shape[2] == 1

    def hidden(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        score = s if score_mod is None else score_mod(s, b, h, i, j)
        return torch.where(shown[b, 0, j] if by_keys else shown[b, i, j], score, -torch.inf)

    return hidden


def _no_bias(case: Case) -> str | None:
    if case.padded or case.windows is not None:
        return "takes no mask of keys" if case.padded else "takes no mask of pairs"
    return _plain(case) if case.bias is None else "takes no bias tensor that has a gradient"


def _no_cudnn_graph(case: Case) -> str | None:
    if case.run > 1:
        return "takes a bias of all batch elements or of each"
    if case.padded or case.windows is not None:
        return "takes no mask of keys" if case.padded else "takes no mask of pairs"
    return _plain(case) if case.dtype in ("bfloat16", "float16") else f"has no {case.dtype} kernels"


def _fa4_declines(case: Case) -> str | None:
    return _no_bias(replace(case, window=None))


def _no_sink(case: Case) -> str | None:
    return "is measured without sinks" if case.sink else None


def _no_term(case: Case) -> str | None:
    """Return why a provider without bias terms, masks and windows does not support a case, or None."""
    if case.mask is not None:
        return "takes no list of visible tiles"
    if case.window is not None:
        return "takes no window"
    return _no_sink(case) if case.term is None else "takes only a bias matrix, and the caller must reduce its gradient"


def _no_dropout(case: Case) -> str | None:
    return "is measured without dropout" if case.dropout else _no_sink(case)


def _plain(case: Case) -> str | None:
    return _no_dropout(case) or _no_term(case)


def _fa4(case: Case, x: CaseInputs) -> Steps:
    from flash_attn.cute import flash_attn_func

    more: dict[str, Any] = {} if case.window is None else {"window_size": (case.window - 1, 0)}

    def forward() -> Tensor:
        o = flash_attn_func(*(t.transpose(1, 2) for t in x[:3]), causal=case.causal, **more)
        return (o[0] if isinstance(o, tuple) else o).transpose(1, 2)

    return _autograd(forward, x)


def _cudnn_graph(case: Case, x: CaseInputs) -> Steps:
    """Return steps of cuDNN's frontend graphs, which support dbias, unlike SDPA's cuDNN backend."""
    graphs = _CudnnGraphs(case, x)
    return Steps(graphs.forward, graphs.backward)


class _CudnnGraphs:
    """cuDNN graphs of the forward and the backward; each call allocates its outputs and workspace."""

    def __init__(self, case: Case, x: CaseInputs) -> None:
        import cudnn

        self.cudnn, self.x, self.handle = cudnn, x, cudnn.create_handle()
        self.options = {"attn_scale": 1 / math.sqrt(case.head_dim), "use_causal_mask": case.causal}
        self.q, self.k, self.v, self.do = (t.detach() for t in (x.q, x.k, x.v, x.do))
        self.bias = None if x.bias is None else x.bias.detach()
        self.stats = torch.empty(*x.q.shape[:3], 1, device=x.q.device, dtype=torch.float32)

        g = self.forward_graph = self._graph()
        tensors = {name: g.tensor_like(t) for name, t in self._inputs().items()}
        self.forward_names = dict(tensors)
        o, stats = g.sdpa(name="sdpa", is_inference=False, **tensors, **self.options)
        self.forward_names |= {"o": self._result(o, self.do), "stats": self._result(stats, self.stats)}
        stats.set_data_type(cudnn.data_type.FLOAT)
        g.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        if case.backward:
            self._build_backward()

    def _build_backward(self) -> None:
        cudnn = self.cudnn
        g = self.backward_graph = self._graph()
        tensors = {name: g.tensor_like(t) for name, t in self._inputs().items()}
        tensors |= {"o": g.tensor_like(self.do), "dO": g.tensor_like(self.do), "stats": g.tensor_like(self.stats)}
        if self.bias is not None:
            tensors["dBias"] = g.tensor_like(self.bias)
        self.backward_names = dict(tensors)
        grads = g.sdpa_backward(name="sdpa_backward", **tensors, **self.options)
        for name, grad, leaf in zip(("dq", "dk", "dv"), grads, (self.q, self.k, self.v), strict=True):
            self.backward_names[name] = self._result(grad, leaf)
        g.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])

    def _graph(self) -> Any:
        types = self.cudnn.data_type
        half = {torch.bfloat16: types.BFLOAT16, torch.float16: types.HALF}[self.q.dtype]
        return self.cudnn.pygraph(
            io_data_type=half,
            intermediate_data_type=types.FLOAT,
            compute_data_type=types.FLOAT,
            handle=self.handle,
        )

    def _inputs(self) -> dict[str, Tensor]:
        tensors = {"q": self.q, "k": self.k, "v": self.v}
        return tensors if self.bias is None else {**tensors, "bias": self.bias}

    @staticmethod
    def _result(node: Any, like: Tensor) -> Any:
        return node.set_output(True).set_dim(list(like.size())).set_stride(list(like.stride()))

    def _execute(self, graph: Any, names: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        workspace = torch.empty(graph.get_workspace_size(), device=self.q.device, dtype=torch.uint8)
        graph.execute({names[name]: t for name, t in tensors.items()}, workspace, handle=self.handle)

    def forward(self) -> Tensor:
        o = torch.empty_like(self.do)
        self._execute(self.forward_graph, self.forward_names, {**self._inputs(), "o": o, "stats": self.stats})
        return o

    def backward(self, o: Tensor) -> tuple[Tensor, ...]:
        grads = {"dq": torch.empty_like(self.q), "dk": torch.empty_like(self.k), "dv": torch.empty_like(self.v)}
        if self.bias is not None:
            grads["dBias"] = torch.empty_like(self.bias)
        tensors = {**self._inputs(), "o": o, "dO": self.do, "stats": self.stats, **grads}
        self._execute(self.backward_graph, self.backward_names, tensors)
        return tuple(grads.values())
