"""Helpers of the explanations of attention, matmul and softmax."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Iterator
from typing import Any, TypeVar

import torch

from tilewise.spec.gpus import compute_capability

P = TypeVar("P")
DEVICES = "'cpu', a GPU such as 'H100', or a compute capability such as 'sm_90'"


class Lines:
    """Base class of explanations: its text is its lines, in a REPL too, and a notebook shows them as a table."""

    def lines(self) -> Iterator[str]:
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        """Return a table with a row for each line and the indented lines below it, in the colors of the page."""
        rows: list[list[str]] = []
        for line in self.lines():
            if line.startswith(" ") and rows:
                rows[-1].append(line.strip())
            else:
                rows.append([line])
        cell = '<td style="text-align: left; vertical-align: top">'
        body = (
            f"<tr>{cell}{html.escape(first)}</td>{cell}{'<br>'.join(map(html.escape, more))}</td></tr>"
            for first, *more in rows
        )
        return f"<table>{''.join(body)}</table>"


def on_device(problem: P, device: str) -> P:
    """Return ``problem``, a dataclass with ``device`` and ``capability``, for another device: "cpu", a GPU such as
    "H100", or a compute capability such as "sm_90"."""
    values: dict[str, Any] = {"device": "cpu", "capability": None}
    if device != "cpu":
        values = {"device": "cuda", "capability": compute_capability(device)}
        if values["capability"] is None:
            raise ValueError(f"device: must be {DEVICES}, got {device!r}")
    return dataclasses.replace(problem, **values)  # type: ignore[type-var]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
