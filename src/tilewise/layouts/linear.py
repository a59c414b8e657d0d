"""Linear layouts: functions that are linear over F2, the field of two elements, as in Triton.

An index is the vector of its bits, and adding vectors is XOR. A linear function is given by its bases, its values at
the powers of two; its value at an index is the XOR of the bases of the set bits. So sizes are powers of two. Theory:
"Linear Layouts: Robust Code Generation of Efficient Tensor Computation Using F2" (arXiv:2505.23819).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

Bases = tuple[tuple[int, ...], ...]


def is_power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


@dataclass(frozen=True)
class LinearLayout:
    """Function from named input indices to named output coordinates. `LinearLayout.of` builds one from lists.

    ``inputs``: name and bases of each input dimension: the outputs at index 1, 2, 4 and so on, each with a number per
    output dimension. ``outputs``: name and size of each output dimension.
    """

    inputs: tuple[tuple[str, Bases], ...]
    outputs: tuple[tuple[str, int], ...]

    @staticmethod
    def of(inputs: Mapping[str, Sequence[Sequence[int]]], outputs: Mapping[str, int]) -> LinearLayout:
        """Build and check a layout.

        Raises:
            ValueError: a size that is not a power of two, or a basis outside the output sizes.
        """
        for name, size in outputs.items():
            if not is_power_of_two(size):
                raise ValueError(f"a linear layout needs sizes that are powers of two, got {name} of size {size}")
        for name, bases in inputs.items():
            for basis in bases:
                if len(basis) != len(outputs):
                    raise ValueError(f"each basis of {name} needs {len(outputs)} numbers, got {tuple(basis)}")
                if any(not 0 <= i < size for i, size in zip(basis, outputs.values(), strict=True)):
                    raise ValueError(f"basis {tuple(basis)} of {name} is outside the sizes {tuple(outputs.values())}")
        return LinearLayout(
            tuple((name, tuple(map(tuple, bases))) for name, bases in inputs.items()), tuple(outputs.items())
        )

    @cached_property
    def input_sizes(self) -> dict[str, int]:
        return {name: 1 << len(bases) for name, bases in self.inputs}

    def __call__(self, **indices: int) -> tuple[int, ...]:
        """Return the output coordinates at these input indices; a missing input is 0.

        Raises:
            ValueError: an unknown input, or an index past its size.
        """
        sizes = self.input_sizes
        for name, index in indices.items():
            if name not in sizes or not 0 <= index < sizes[name]:
                raise ValueError(f"{name}={index} is not inside the inputs {sizes}")
        packed, columns = 0, iter(self._columns)
        for name, size in sizes.items():
            index = indices.get(name, 0)
            for bit in range(size.bit_length() - 1):
                value, _ = next(columns)
                if index >> bit & 1:
                    packed ^= value
        return _unpack(packed, self.outputs)

    def compose(self, outer: LinearLayout) -> LinearLayout:
        """Return ``outer`` after this layout; outer's inputs are this layout's outputs, matched by name."""
        sizes = outer.input_sizes
        if sizes != dict(self.outputs):
            raise ValueError(f"outputs {dict(self.outputs)} are not the inputs {sizes} of the outer layout")
        names = [name for name, _ in self.outputs]
        return LinearLayout.of(
            {name: [outer(**dict(zip(names, basis, strict=True))) for basis in bases] for name, bases in self.inputs},
            dict(outer.outputs),
        )

    def invert(self) -> LinearLayout:
        """Return the inverse function, from the outputs' names to the inputs'.

        Raises:
            ValueError: the layout is not a bijection.
        """
        # Gauss-Jordan elimination. A row is (value, preimage), each the bits of all dimensions as one integer.
        rows = self._columns
        if len(rows) != sum(size.bit_length() - 1 for _, size in self.outputs):
            raise ValueError(f"{len(rows)} input bits cannot be mapped one to one to the outputs {dict(self.outputs)}")
        pivots: dict[int, tuple[int, int]] = {}
        for value, preimage in rows:
            for bit, (v, p) in pivots.items():
                if value >> bit & 1:
                    value, preimage = value ^ v, preimage ^ p
            if value == 0:
                raise ValueError("two inputs have the same output, so that there is no inverse")
            new = value.bit_length() - 1
            for bit, (v, p) in pivots.items():
                if v >> new & 1:
                    pivots[bit] = (v ^ value, p ^ preimage)
            pivots[new] = (value, preimage)
        inputs, bit = {}, 0
        sizes = list(self.input_sizes.items())
        for name, size in self.outputs:
            inputs[name] = [_unpack(pivots[bit + i][1], sizes) for i in range(size.bit_length() - 1)]
            bit += size.bit_length() - 1
        return LinearLayout.of(inputs, dict(sizes))

    @cached_property
    def _columns(self) -> list[tuple[int, int]]:
        """List of (output, input) of each basis, packed into integers."""
        columns, bit = [], 0
        for _, bases in self.inputs:
            for basis in bases:
                value, shift = 0, 0
                for i, (_, size) in zip(basis, self.outputs, strict=True):
                    value |= i << shift
                    shift += size.bit_length() - 1
                columns.append((value, 1 << bit))
                bit += 1
        return columns

    def __str__(self) -> str:
        """Return the layout as Triton prints it: a line per basis, then the output dimensions."""
        lines = []
        for name, bases in self.inputs:
            if not bases:
                lines.append(f" - {name} is a size 1 dimension")
            for bit, basis in enumerate(bases):
                start = "   " if bit else " - "
                lines.append(f"{start}{name}={1 << bit} -> ({', '.join(map(str, basis))})")
        outputs = ", ".join(f"{name} (size {size})" for name, size in self.outputs)
        return "\n".join([*lines, f"where out dims are: [{outputs}]"])


def _unpack(packed: int, sizes: Sequence[tuple[str, int]]) -> tuple[int, ...]:
    parts = []
    for _, size in sizes:
        parts.append(packed & (size - 1))
        packed >>= size.bit_length() - 1
    return tuple(parts)
