"""Spellings of a dtype on the command line. Needs no typer, as ``python -m tilewise_tools.bench`` has none."""

from __future__ import annotations

# Each dtype as torch names it, and what else it is called.
DTYPES = {
    "float16": ("fp16", "f16", "half"),
    "bfloat16": ("bf16",),
    "float32": ("fp32", "f32"),
    "float64": ("fp64", "f64"),
}
_NAMES = {spelling: name for name, others in DTYPES.items() for spelling in (name, *others)}


def dtype_name(text: str) -> str | None:
    """torch's name of the dtype that ``text`` names in any case, also after "torch."; None if it names none."""
    return _NAMES.get(text.strip().lower().removeprefix("torch."))
