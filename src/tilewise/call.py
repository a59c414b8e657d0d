"""From a public call's arguments to those of `tilewise.autograd`: read and checked once, remembered for its like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from tilewise.autocast import autocast, autocast_on, autocast_somewhere
from tilewise.autograd import eager_attention, eager_folded, eager_packed, heads_first
from tilewise.backends import Inputs, address
from tilewise.bias.autograd import Rule, is_node, vector_of
from tilewise.bias.canonical import Slots, canonical, with_dense
from tilewise.bias.low_rank import LowRankBias
from tilewise.bias.packed import RaggedBias
from tilewise.bias.terms import Term, shift_of
from tilewise.bias.toeplitz import Alibi, T5Bias
from tilewise.dispatch import Forward, forward_of, forward_variants
from tilewise.ops.runtime.eager import is_eager
from tilewise.ops.runtime.prepared import Prepared
from tilewise.ops.runtime.seed import drawn_seed
from tilewise.plan import check_backend
from tilewise.problem import Sizes, check_flag, check_qkv, check_seed, four_dims, sink_of_rows
from tilewise.score.lengths import Lengths
from tilewise.score.parts import Parts
from tilewise.score.terms import Band, Numbers, Score, Terms, Window, check_numbers
from tilewise.score.tile_tensors import TileTensors
from tilewise.structure import Variants, layouts, structure_of
from tilewise.tensors import causal_limit, check_tensor, is_causal_bias, is_dtensor
from tilewise.tile_mask import TileMask, tile_mask_of

Seed = tuple[int, int] | Tensor | None
Mask = Tensor | TileMask | None
Bias = Tensor | Term | Sequence[Tensor | Term] | None
_EVERYWHERE = Band()
_STRIDED = torch.strided


# --- read and check ---


class Call(NamedTuple):
    """The arguments of a call with their defaults filled in: those of `attention_op`."""

    inputs: Inputs
    score: Score
    deterministic: bool
    backend: str


def read_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    bias: Bias,
    mask: Mask,
    sink: Tensor | None,
    causal: bool,
    window: Window | None,
    dropout_p: float,
    dropout_seed: Seed,
    deterministic: bool | None,
    backend: str | None,
    **numbers: Unpack[Numbers],
) -> Call:
    """The keyword arguments of `attention`, read and checked; ``numbers``: those of `Score.of`. Dropout without a seed
    has none yet: `with_seed`."""
    check_numbers(window, dropout_p=dropout_p, **numbers)
    if causal is not True and causal is not False:  # the common case without a call
        check_flag("causal", causal)
    if deterministic is not None:
        check_flag("deterministic", deterministic, "a bool or None")
    check_backend(backend)
    tiles = None if mask is None or isinstance(mask, Tensor) else _tiles(mask, q, k, v)
    if tiles is not None:
        mask = None
    check_inputs(q, k, v, bias, mask, sink)
    if dropout_seed is not None:
        check_dropout_seed(dropout_seed, q)
    q, k, v = autocast(q, k, v)
    band = _EVERYWHERE
    if causal or window is not None:
        # Malformed tensors get a neutral diagonal here and their error where the Problem is made.
        diagonal = k.shape[2] - q.shape[2] if q.dim() == k.dim() == 4 else 0
        band = Band.aligned(bool(causal), window, diagonal)
    slots = None
    if isinstance(bias, (Term, tuple, list)):
        slots, bias = _slots(bias, q, k, v), None
        band = band.both(slots.band)
    elif bias is not None:
        assert isinstance(bias, Tensor)
        bias, band = _operand("bias", bias, (q, k, v), causal, band)
    if mask is not None:
        assert isinstance(mask, Tensor)
        mask, band = _operand("mask", mask, (q, k, v), causal, band)
    if sink is not None:
        sink = sink_of_rows(sink, q, k, v)
    score = Score.of(band, q.shape[-1] if q.dim() > 0 else 0, dropout_p=dropout_p, **numbers)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    inputs = Inputs(q, k, v, bias, mask, sink, tiles=tiles)
    if score.dropout and dropout_seed is not None:
        inputs = inputs._replace(seed=seed_tensor(dropout_seed, q.device))
    if slots is not None:
        if slots.low_rank is not None and backend == "oracle":
            sizes = Sizes(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2])
            slots = slots._replace(matrix=with_dense(low_rank_of(slots, q, score), slots.matrix, sizes), low_rank=None)
        inputs, score = with_slots(inputs, score, slots)
    return Call(inputs, score, deterministic, "auto" if backend is None else backend)


def with_seed(inputs: Inputs, score: Score) -> Inputs:
    """``inputs`` of a call that is to be computed: with dropout, and no seed in them, one from torch's generator."""
    if not score.dropout:
        return inputs
    if is_dtensor(inputs.q):
        raise NotImplementedError(
            "dropout_p: dropout takes no DTensors, of which each device would count its sequences and heads from 0; "
            "call attention on local tensors, with a seed of each device"
        )
    if inputs.seed is not None:
        return inputs
    return inputs._replace(seed=drawn_seed(inputs.q))


def check_dropout_seed(seed: Any, q: Tensor) -> None:
    if isinstance(seed, Tensor):
        check_tensor("dropout_seed", seed)
        check_seed("dropout_seed", seed, q)
        return
    pair = isinstance(seed, (tuple, list)) and len(seed) == 2
    if not pair or not all(isinstance(x, (Integral, torch.SymInt)) and not isinstance(x, bool) for x in seed):
        raise TypeError(
            f"dropout_seed: expected a pair (seed, offset) of ints, or an int64 tensor of shape (2,), got {seed!r}"
        )
    if not all(-(2**63) <= x < 2**64 for x in seed):
        raise ValueError(f"dropout_seed: expected numbers of 64 bits, got {seed!r}")


def seed_tensor(seed: tuple[int, int] | Tensor, device: torch.device) -> Tensor:
    """A number reaches a device with the kernel that writes it: a copy from the host would wait, or not be captured by
    a CUDA graph."""
    if isinstance(seed, Tensor):
        return seed.contiguous()
    first, second = (x - 2**64 if x >= 2**63 else x for x in seed)
    made = torch.full((2,), first, dtype=torch.int64, device=device)
    made[1].fill_(second)
    return made


def check_inputs(q: Tensor, k: Tensor, v: Tensor, bias: Bias, mask: Mask, sink: Tensor | None) -> None:
    check_tensor("q", q)
    check_tensor("k", k)
    check_tensor("v", v)
    if bias is not None and not isinstance(bias, (Term, tuple, list)):
        check_tensor("bias", bias, may_be_causal=True)
    if mask is not None:
        check_tensor("mask", mask, may_be_causal=True)
        assert isinstance(mask, Tensor)
        if mask.requires_grad:
            raise ValueError("mask: requires grad, but a mask has no gradient; pass a trainable additive mask as bias=")
    if sink is not None:
        check_tensor("sink", sink)


def _operand(
    name: str, x: Tensor, qkv: tuple[Tensor, Tensor, Tensor], causal: bool, band: Band
) -> tuple[Tensor | None, Band]:
    """A bias or mask in four dimensions, and the band; PyTorch's CausalBias is a band and no tensor."""
    q, k, _ = qkv
    if not is_causal_bias(x):
        return four_dims(name, x, *qkv), band
    if causal:
        raise ValueError(f"{name}: a CausalBias says by itself what is hidden; leave causal=True out")
    if not q.dim() == k.dim() == 4:
        return None, band  # the error comes where the Problem is made
    hi = causal_limit(name, x, q.shape[2], k.shape[2])
    return None, Band(band.lo, hi if band.hi is None else min(band.hi, hi))


def _tiles(mask: Any, q: Tensor, k: Tensor, v: Tensor) -> TileTensors | None:
    """Of a TileMask or a BlockMask; None of what is none. An error of q, k or v comes first."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
    check_qkv(q, k, v)
    found = tile_mask_of("mask", mask, q.shape[2], k.shape[2])
    return None if found is None else found.tensors


def _slots(bias: Any, q: Tensor, k: Tensor, v: Tensor) -> Slots:
    """Bias terms in their places; an error of q, k or v comes first."""
    check_qkv(q, k, v)
    B, H, M, _ = q.shape
    return canonical(bias, B, H, k.shape[1], M, k.shape[2], q.device)


def with_slots(inputs: Inputs, score: Score, slots: Slots) -> tuple[Inputs, Score]:
    """A call with the bias that `canonical` has found; ``score`` is that of the q that came.

    One tensor alone, if only along the keys, is a plain bias, which every backend has.
    """
    if slots.low_rank is not None:
        q, k, scale = low_rank_of(slots, inputs.q, score).extended(inputs.q, inputs.k, score.scale)
        inputs, score = inputs._replace(q=q, k=k), replace(score, scale=scale)
    bias, cols, rows = slots.matrix, slots.cols, slots.rows
    if bias is None:
        bias, cols = cols, None
    if bias is None:
        bias, rows = rows, None
    query, key = slots.query, slots.key
    parts = Parts(
        cols,
        rows,
        None if query is None else query.values,
        None if key is None else key.values,
        None if slots.toeplitz is None else slots.toeplitz.values,
        None if query is None else query.shift,
        None if key is None else key.shift,
        None if query is None else query.buckets,
        None if key is None else key.buckets,
    )
    score = replace(
        score, query=None if query is None else query.distances, key=None if key is None else key.distances,
        toeplitz=slots.far,
    )  # fmt: skip
    return inputs._replace(bias=bias, parts=None if all(x is None for x in parts) else parts), score


def low_rank_of(slots: Slots, q: Tensor, score: Score) -> LowRankBias:
    """The bias of low rank, checked against the call, and cast as autocast has cast q, if it has: it becomes a part of
    q and k."""
    found = slots.low_rank
    assert found is not None
    if q.dtype != torch.float64:
        found = LowRankBias(*autocast(found.u, found.w))
    found.check_call(q, score.transformed)
    return found


def cast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """What autocast makes of them, if they are tensors at all."""
    tensors = isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)
    return autocast(q, k, v) if tensors else (q, k, v)


# --- remember ---


class Folded(NamedTuple):
    """A call with more leading dimensions than a batch: what computes it takes views of these shapes."""

    terms: Terms
    run: Forward
    shapes: tuple[tuple[int, ...], ...]  # of the tensors of `Inputs` to the sink; () where there is none


# The usual call, one that differs from an earlier one in nothing but its numbers: the arguments that are no tensors,
# and the layouts of those that are, lead to what the earlier one was read as. Nothing is read or checked again.
usual_calls: Prepared[tuple[Terms, Forward] | Folded] = Prepared()
# Beside those of one with T5's or ALiBi's bias, in the place of the term: how its vector is made.
vectors: Prepared[tuple[Rule, int, int]] = Prepared()
# And one that differs in its lengths too: what the first of its structure was read as, and see `remember_call`.
structures: Prepared[tuple[Terms, bool, Variants]] = Prepared()


def usual_call(inputs: Inputs, arguments: tuple, return_lse: bool) -> tuple[Tensor, Tensor | None] | None:
    """``(o, lse)`` of a call like an earlier one; None of any other. ``inputs`` are as the caller gave them."""
    tiles = inputs.mask if type(inputs.mask) is TileMask else None
    if tiles is not None:
        inputs = inputs._replace(mask=None, tiles=tiles.tensors)
    term: Any = inputs.bias
    if type(term) is T5Bias or type(term) is Alibi:
        settings = _settings(term)
        if settings is None:
            return None
        inputs, arguments = inputs._replace(bias=None), (*arguments, settings)
    else:
        term = None
    if not _is_usual(inputs, tiles):
        return None
    key = _usual_key(inputs, tiles, arguments)
    known = usual_calls.get(key)
    if known is None:
        if term is not None or tiles is not None:
            return None
        if inputs.sink is not None:
            if inputs.sink.dim() not in (1, 3):
                return None
            inputs = _with_rows(inputs)
        known = _of_structure(inputs, key)
        if known is None:
            return None
        usual_calls.keep(key, known)
    elif type(known) is Folded:
        return eager_folded(inputs, *known, return_lse)
    elif inputs.sink is not None:
        inputs = _with_rows(inputs)
    assert len(known) == 2
    if term is not None:
        made = vectors.get(key)
        if made is None:
            return None
        rule, first, width = made
        inputs = inputs._replace(parts=Parts(toeplitz=vector_of(rule, term.of, first, width)))
    if known[0].dropout:
        inputs = inputs._replace(seed=drawn_seed(inputs.q))
    return eager_attention(inputs, *known, return_lse)


def _settings(term: T5Bias | Alibi) -> tuple | None:
    """All that a call depends on in a term, beside the numbers in its tensor; None where that is not enough."""
    query_start, key_start, x = term.query_start, term.key_start, term.of
    if isinstance(query_start, Tensor) or isinstance(key_start, Tensor) or not is_node(x):
        return None
    return term.rule, query_start, key_start, layouts(x)


def _of_structure(inputs: Inputs, key: tuple) -> tuple[Terms, Forward] | None:
    """Of a call that differs from an earlier one in its lengths alone, with tensors that lie alike; key: `_usual_key`,
    which has read the tensors already."""
    sink, arguments = key[17], key[19]
    if inputs.sink is not None:  # in rows, as the key's may not be
        (sink,) = layouts(inputs.sink)
    structure = structure_of(key[:5], key[5:10], key[10:15], key[15], key[16], sink)
    if structure is None:
        return None
    known = structures.get((structure.key, arguments))
    if known is None:
        return None
    terms, aligned, variants = known
    if aligned and terms.hi is not None:
        hi = structure.keys - structure.queries
        if hi != terms.hi:
            terms = tuple.__new__(Terms, (terms.lo, hi, *terms[2:]))
    run = variants.resized(structure, terms, inputs)
    return None if run is None else (terms, run)


def remember_call(
    inputs: Inputs, arguments: tuple, score: Score, deterministic: bool, backend: str, *, exact: bool = False,
    aligned: bool = True, parts: Parts | None = None,
) -> None:  # fmt: skip
    """After a call that went well, with what it was read as; see `usual_call`. aligned: its band, if it has one, ends
    where the last query and the last key meet; else where the first ones do. parts: what a bias term was read as."""
    term: Any = inputs.bias
    if type(term) is T5Bias or type(term) is Alibi:
        _remember_vector(inputs, arguments, Terms.of(score, deterministic, backend, exact), parts)
        return
    tiles = inputs.mask if type(inputs.mask) is TileMask else None
    if tiles is not None:
        inputs = inputs._replace(mask=None, tiles=tiles.tensors)
    if _is_usual(inputs, tiles):
        terms = Terms.of(score, deterministic, backend, exact)
        key, inputs = _usual_key(inputs, tiles, arguments), _with_rows(inputs)
        if score.dropout:
            inputs = inputs._replace(seed=seed_tensor((0, 0), inputs.q.device))  # for its layout
        usual_calls.keep(key, (terms, forward_of(inputs, terms)))
        if tiles is None and inputs.seed is None:
            structure = structure_of(*layouts(*inputs[:6]))  # type: ignore[arg-type]
            variants = None if structure is None else forward_variants(structure, terms)
            if structure is not None and variants is not None:
                structures.keep((structure.key, arguments), (terms, aligned, variants))


def _remember_vector(inputs: Inputs, arguments: tuple, terms: Terms, parts: Parts | None) -> None:
    """The same of a call whose bias is a term of which a vector was made, ``parts``."""
    term: Any = inputs.bias
    settings = _settings(term)
    tiles = inputs.mask if type(inputs.mask) is TileMask else None
    inputs = inputs._replace(bias=None)
    if tiles is not None:
        inputs = inputs._replace(mask=None, tiles=tiles.tensors)
    M, N = inputs.q.shape[2], inputs.k.shape[2]
    if settings is None or parts is None or M + N < 2 or not _is_usual(inputs, tiles):
        return
    key = _usual_key(inputs, tiles, (*arguments, settings))
    inputs = _with_rows(inputs)._replace(parts=parts)
    if terms.dropout:
        inputs = inputs._replace(seed=seed_tensor((0, 0), inputs.q.device))  # for its layout
    usual_calls.keep(key, (terms, forward_of(inputs, terms)))
    vectors.keep(key, (term.rule, 1 - M + shift_of(term, M, N)[0], M + N - 1))


def remember_folded(inputs: Inputs, folded: Inputs, arguments: tuple) -> None:
    """After a call with more leading dimensions that went well; ``folded``: the views that a usual call was given."""
    if _is_usual(inputs, None) and inputs.sink is None and _is_usual(folded, None):
        known = usual_calls.get(_usual_key(folded, None, arguments))
        if known is not None and not known[0].dropout:
            shapes = tuple([() if x is None else tuple(x.shape) for x in folded[:6]])
            usual_calls.keep(_usual_key(inputs, None, arguments), Folded(*known[:2], shapes))


def usual_door(name: str, inputs: Inputs) -> tuple | None:
    """The key, among those of `usual_calls`, of a call of ``attention`` by a door that changes the shapes of its bias
    and mask alone; None where such a call is read anew."""
    q, k, v, bias, mask = inputs[:5]
    if q is None or k is None or v is None or autocast_somewhere() or not is_eager(inputs[:5]):
        return None
    for x in (q, k, v, bias, mask):
        if x is not None and (x.layout is not _STRIDED or x.is_nested):
            return None
    return name, layouts(*inputs[:5]), torch.are_deterministic_algorithms_enabled()


def usual_door_call(key: tuple, inputs: Inputs) -> Tensor | None:
    """o of a call like one that `remember_door` was told of."""
    known = usual_calls.get(key)
    return eager_folded(inputs, *known, False)[0] if type(known) is Folded else None


def remember_door(key: tuple, inputs: Inputs) -> None:
    """After a call of ``attention(q, k, v, bias=, mask=)`` that went well; inputs: what it was given."""
    if _is_usual(inputs, None):
        known = usual_calls.get(_usual_key(inputs, None, (False, key[2], None, 0.0)))
        if type(known) is Folded:
            usual_calls.keep(key, known)
        elif known is not None:
            usual_calls.keep(key, Folded(*known[:2], tuple([() if x is None else tuple(x.shape) for x in inputs[:6]])))


def _with_rows(inputs: Inputs) -> Inputs:
    """``inputs`` of a call that was checked, with a sink of heads as `sink_of_rows` gives it."""
    sink = inputs.sink
    return inputs if sink is None or sink.dim() == 3 else inputs._replace(sink=sink[None, :, None])


def _is_usual(inputs: Inputs, tiles: TileMask | None) -> bool:
    q, k, v, bias, mask, sink, *_ = inputs
    return (
        q is not None and k is not None and v is not None
        and is_eager(inputs[:6] if tiles is None else (*inputs[:6], *tiles.tensors))
        and (tiles is None or tiles.kept is None)  # how kept keys are found is decided where a call is read
        and q.layout is k.layout is v.layout is _STRIDED
        and (bias is None or (bias.dim() == q.dim() and bias.layout is _STRIDED))
        and (mask is None or (mask.dim() == q.dim() and mask.layout is _STRIDED))
        and (sink is None or sink.layout is _STRIDED)
    )  # fmt: skip


def _usual_key(inputs: Inputs, tiles: TileMask | None, arguments: tuple) -> tuple:
    q, k, v, bias, mask, sink, *_ = inputs
    if q.is_cuda:
        q_begin, k_begin, v_begin = q.data_ptr() & 15, k.data_ptr() & 15, v.data_ptr() & 15
    elif q.is_cpu:
        q_begin = k_begin = v_begin = 0
    else:
        q_begin, k_begin, v_begin = [address(x) % 16 for x in (q, k, v)]
    return (  # first `layouts` of q, k and v
        q.shape, q.dtype, q.device, q.stride(), q_begin, k.shape, k.dtype, k.device, k.stride(), k_begin,
        v.shape, v.dtype, v.device, v.stride(), v_begin,
        None if bias is None else layouts(bias)[0], None if mask is None else layouts(mask)[0],
        None if sink is None else layouts(sink)[0],
        None if tiles is None else (tiles.queries, tiles.keys, layouts(*tiles.tensors)), arguments,
    )  # fmt: skip


# --- packed batches ---

# Of a packed batch: the terms, what computes it, and the shape of its bias in `Inputs`.
usual_packed: Prepared[tuple[Terms, Forward, tuple[int, ...] | None]] = Prepared()


def padded_mask(mask: Tensor | None) -> Tensor | None:
    """Of a packed batch a mask with four dimensions."""
    if mask is None:
        return None
    if is_causal_bias(mask):
        raise TypeError("mask: a CausalBias has lengths of its own; pass causal=True")
    return mask if mask.dim() >= 4 else mask[(None,) * (4 - mask.dim())]


class UsualPacked(NamedTuple):
    """A call of a packed batch that may be like an earlier one: its tensors as the caller has them, with the values of
    a `RaggedBias` in the bias's place, and its key, all that its reading depends on."""

    given: tuple[Tensor, Tensor, Tensor, Tensor | None]
    mask: Tensor | None
    lengths: Lengths
    key: tuple

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, longest: tuple[int, int], exact: bool,
        options: dict[str, Any],
    ) -> UsualPacked | None:  # fmt: skip
        """None of a call with other bias terms, a sink, dropout, or offsets to be validated."""
        bias, mask = options.get("bias"), options.get("mask")
        if type(bias) is RaggedBias:
            lengths = lengths._replace(pairs=bias.offsets)
            bias = bias.values
        tensors = (q, k, v, bias, mask, *lengths)
        if (
            options.get("validate") or options.get("dropout_p") or options.get("sink") is not None
            or type(options.get("window")) is list or q is None or not is_eager(tensors) or autocast_on(q)
        ):  # fmt: skip
            return None
        settings = tuple([(name, type(x), x) for name, x in options.items() if name not in ("bias", "mask")])
        ordered = torch.are_deterministic_algorithms_enabled()
        key = layouts(*tensors), longest, *map(type, longest), exact, ordered, settings
        return cls((q, k, v, bias), mask, lengths, key)

    def again(self, return_lse: bool) -> tuple[Tensor, Tensor | None] | None:
        """(o, lse) as its caller has them, if it is like an earlier one. Nothing is read or checked again."""
        try:
            known = usual_packed.get(self.key)
        except TypeError:  # what has no hash is no setting that is allowed, and whoever reads it says so
            return None
        if known is None:
            return None
        terms, run, shape = known
        q, k, v, bias = self.given
        with torch.no_grad():
            viewed = None if bias is None or shape is None else bias.view(shape)
            inputs = Inputs(
                heads_first(q), heads_first(k), heads_first(v), viewed, padded_mask(self.mask), lengths=self.lengths
            )
        return eager_packed(self.given, inputs, terms, run, return_lse)

    def keep(self, inputs: Inputs, terms: Terms) -> None:
        """After it went well; ``inputs``: what it was read as."""
        if inputs.parts is None:
            shape = None if inputs.bias is None else tuple(inputs.bias.shape)
            usual_packed.keep(self.key, (terms, forward_of(inputs, terms), shape))
